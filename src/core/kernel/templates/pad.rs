//! Data with something around it.

use super::*;

/// The values outside of padded data.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PadMode {
    /// This value.
    Constant(#[serde(with = "crate::expr::literal")] f64),
    /// The nearest element.
    Edge,
    /// The data mirrored at its outermost element, which is not repeated.
    Reflect,
    /// The data from the other end.
    Wrap,
}

pub(super) static PAD: TemplateDef = TemplateDef {
    name: "pad",
    doc: "data with something around it",
    check: |kernel, _| {
        let Template::Pad { before, mode } = &kernel.template else { mismatch(&kernel.template) };
        let rank = kernel.shape.len();
        kernel.reads_axes(0, rank)?;
        ensure(before.len() == rank, || format!("expected padding for each of {rank} axes, found {}", before.len()))?;
        let data = &kernel.reads[0].access.shape;
        let small = before.iter().all(|p| p.unsigned_abs() <= MOST_EXTENT);
        ensure(small, || format!("padding of {before:?} is too large"))?;
        let fills = match mode {
            PadMode::Constant(_) => true,
            PadMode::Edge | PadMode::Reflect | PadMode::Wrap => kernel.is_empty() || !data.contains(&0),
        };
        ensure(fills, || format!("nothing of {data} to pad with"))
    },
    axis_of: |kernel, operand, axis| {
        let Template::Pad { before, .. } = &kernel.template else { mismatch(&kernel.template) };
        let same = before[axis] == 0 && kernel.reads[operand].access.shape[axis] == kernel.shape[axis];
        if axis < 2 && same { Along::Axis(axis) } else { Along::Tied }
    },
    meaning: pad,
    samples: || {
        let modes = [PadMode::Constant(-1.5), PadMode::Edge, PadMode::Reflect, PadMode::Wrap];
        let pad = |mode| {
            let template = Template::Pad { before: vec![1, 0, -1], mode };
            sample(template, &[5, 2, 4], vec![floats(&[3, 2, 4])], Expr::input(0, DType::F32))
        };
        modes.map(pad).into()
    },
    ..PLAIN
};

fn pad(kernel: &Kernel, index: &[usize], elements: &mut Elements) -> Row {
    let Template::Pad { before, mode } = &kernel.template else { mismatch(&kernel.template) };
    let mut at = Vec::new();
    for (axis, (&i, &before)) in index.iter().zip(before).enumerate() {
        let n = elements.shape(0)[axis] as isize;
        let i = i as isize - before;
        let inside = match mode {
            _ if (0..n).contains(&i) => i,
            PadMode::Constant(value) => return single(*value),
            PadMode::Edge => i.clamp(0, n - 1),
            PadMode::Wrap => i.rem_euclid(n),
            PadMode::Reflect if n == 1 => 0,
            PadMode::Reflect => {
                let i = i.rem_euclid(2 * (n - 1));
                i.min(2 * (n - 1) - i)
            }
        };
        at.push(inside as usize);
    }
    single(elements.at(0, &at))
}
