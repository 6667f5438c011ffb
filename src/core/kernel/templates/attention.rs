//! Attention.

use super::*;

/// Rows without a softmax.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Guard {
    /// Rows whose scores are all minus infinity, so that nothing is seen. WGSL, which need not know NaN, takes all rows.
    Unseen,
    /// All such rows: those that see nothing, and those with a NaN.
    All,
}

pub(super) static ATTENTION: TemplateDef = TemplateDef {
    name: "attention",
    doc: "softmax of the scores of queries and keys, times values; scores are never stored",
    kind: Kind::Product,
    widens: |_, operand, _| operand >= 3,
    core_reads: |t| {
        let Template::Attention { further, .. } = t else { mismatch(t) };
        3usize.saturating_add(*further)
    },
    rows: |_| Rows { axes: 1, written_once: false },
    bodies: |t| {
        let Template::Attention { score, .. } = t else { mismatch(t) };
        vec![score]
    },
    check: |kernel, _| {
        let shape = &kernel.shape;
        let (batch, m, e) = matrix(shape)?;
        kernel.reads_axes(0, shape.len())?;
        kernel.reads_axes(1, shape.len())?;
        let last = |operand: usize| kernel.reads[operand].access.shape[batch.len() + 1];
        let (d, n) = (last(0), last(1));
        ensure(m.max(n).max(d).max(e) <= MOST_EXTENT, || {
            format!("an attention of {m} by {d} by {n} by {e} is too large")
        })?;
        kernel.reads_extents(0, &[batch, &[m, d]].concat())?;
        kernel.reads_extents(1, &[batch, &[d, n]].concat())?;
        kernel.reads_extents(2, &[batch, &[n, e]].concat())?;
        let scores = [batch, &[m, n]].concat();
        (3..kernel.template.core_reads()).try_for_each(|i| kernel.reads_extents(i, &scores))?;
        kernel.reads_floats(3)
    },
    axis_of: |kernel, operand, axis| {
        let shared = matches!(operand, 1 | 2) && axis == kernel.shape.len() - 2;
        if shared { Along::Whole } else { Along::Axis(axis) }
    },
    meaning: attention,
    samples: || {
        let x = |n| Expr::input(n, DType::F32);
        let reads = || vec![floats(&[2, 3, 4]), floats(&[2, 4, 5]), floats(&[2, 5, 6])];
        let plain = Template::Attention { score: Body::new(&[x(0) * 0.5]), further: 0, guarded: None };
        let masked = Template::Attention { score: Body::new(&[x(0) + x(1)]), further: 1, guarded: Some(Guard::All) };
        let mut with_mask = reads();
        with_mask.push(floats(&[2, 3, 5]));
        vec![sample(plain, &[2, 3, 6], reads(), x(0)), sample(masked, &[2, 3, 6], with_mask, x(0))]
    },
    ..PLAIN
};

fn attention(kernel: &Kernel, row: &[usize], elements: &mut Elements) -> Row {
    let Template::Attention { score, further, guarded } = &kernel.template else { mismatch(&kernel.template) };
    let [batch @ .., _] = row else { panic!("an attention has at least two axes") };
    let query = elements.along(0, &[row, &[0]].concat(), row.len());
    let mut scores = Vec::new();
    for n in 0..elements.shape(1)[row.len()] {
        let index = [row, &[n]].concat();
        let mut inputs = vec![dot(&query, &elements.along(1, &[batch, &[0, n]].concat(), batch.len()))];
        inputs.extend((3..3 + further).map(|r| elements.at(r, &index)));
        scores.push(score.eval(&inputs, &index, &[])[0]);
    }
    let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let powers: Vec<f64> = scores.iter().map(|s| (s - top).exp()).collect();
    let total: f64 = powers.iter().sum();
    let weightless = match guarded {
        Some(Guard::Unseen) => scores.iter().all(|&s| s == f64::NEG_INFINITY),
        Some(Guard::All) => total.is_nan(),
        None => false,
    };
    let mut value = |e: usize| {
        let values = elements.along(2, &[batch, &[0, e]].concat(), batch.len());
        if weightless { 0.0 } else { dot(&powers, &values) / total }
    };
    let core = (0..kernel.shape[row.len()]).map(&mut value).collect();
    Row { core, ..Row::default() }
}
