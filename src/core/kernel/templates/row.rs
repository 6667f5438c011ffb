//! Reductions of rows.

use super::*;

/// How values combine in a reduction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs, reason = "the names say it")]
pub enum Reduction {
    Sum,
    Max,
    Min,
    Prod,
}

impl Reduction {
    /// Two values as one.
    pub fn combine(self, a: f64, b: f64) -> f64 {
        match self {
            Reduction::Sum => a + b,
            Reduction::Prod => a * b,
            Reduction::Max => maximum(a, b),
            Reduction::Min => minimum(a, b),
        }
    }
}

/// One reduction of a row kernel.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RowReduction {
    /// How values combine.
    #[serde(rename = "fold")]
    pub reduction: Reduction,
    /// The value to combine at each element: may use reads and earlier reductions.
    pub body: Body,
}

pub(super) static ROW: TemplateDef = TemplateDef {
    name: "row",
    doc: "reductions of each row, then the body at each element or once per row",
    kind: Kind::Row,
    core_reads: |_| 0,
    rows: |t| {
        let &Template::Row { inner, per_row, .. } = t else { mismatch(t) };
        Rows { axes: inner, written_once: per_row }
    },
    bodies: |t| {
        let Template::Row { reductions, .. } = t else { mismatch(t) };
        reductions.iter().map(|reduction| &reduction.body).collect()
    },
    meaning: row,
    samples: || {
        let x = Expr::input(0, DType::F32);
        let reduce = |reduction, body: &Expr| RowReduction { reduction, body: Body::new(std::slice::from_ref(body)) };
        let (largest, total) = (Expr::reduction(0, DType::F32), Expr::reduction(1, DType::F32));
        let power = (&x - &largest).exp();
        let reductions = vec![reduce(Reduction::Max, &x), reduce(Reduction::Sum, &power)];
        let softmax = Template::Row { inner: 1, reductions, per_row: false };
        let extremes = vec![reduce(Reduction::Min, &x), reduce(Reduction::Prod, &x)];
        let both = Template::Row { inner: 2, reductions: extremes, per_row: true };
        vec![
            sample(softmax, &[2, 5], vec![floats(&[2, 5])], power / &total),
            sample(both, &[2, 3, 2], vec![floats(&[2, 3, 2])], largest + total),
        ]
    },
    ..PLAIN
};

/// The reductions of a row.
fn row(kernel: &Kernel, row: &[usize], elements: &mut Elements) -> Row {
    let Template::Row { reductions, .. } = &kernel.template else { mismatch(&kernel.template) };
    let places = indices(&kernel.shape[row.len()..], Order::Forwards);
    let mut reduced = Vec::new();
    for reduction in reductions {
        let first = match reduction.reduction {
            Reduction::Sum => 0.0,
            Reduction::Prod => 1.0,
            Reduction::Max => f64::NEG_INFINITY,
            Reduction::Min => f64::INFINITY,
        };
        let value = places.iter().fold(first, |total, place| {
            let index = [row, place].concat();
            let inputs = elements.further(&index, index.len());
            reduction.reduction.combine(total, reduction.body.eval(&inputs, &index, &reduced)[0])
        });
        reduced.push(value);
    }
    Row { reductions: reduced, ..Row::default() }
}
