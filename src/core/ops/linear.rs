//! Matrix products.

use super::compose::composed;
use super::{broadcasts_to, ensure, expect_shape, indices, output, same_factor, same_float};
use crate::kernel::Template;
use crate::op::{Args, Back, Call, Eval, Fact, Lower, Nodes, OpDef, OpResult, Part, TemplateCall, Var, inputs, names};
use crate::shape::{Access, Shape};
use std::collections::BTreeMap;

pub(super) static OPS: &[OpDef] = &[
    product(
        "MatMul",
        "The matrix product of the last two axes, as NumPy's matmul: vectors are promoted, leading axes \
         broadcast",
    ),
    product(
        SCORES,
        "MatMul whose result is part of the kernel that reads it: the scores of an attention, computed again for its gradients",
    ),
    OpDef::new(
        "Gemm",
        "alpha * A' * B' + beta * C, where A' and B' are the matrices or their transposes",
        inputs![A B C?],
        infer_gemm,
        Eval::Tensor(eval_gemm),
        Lower::Decompose(|_, call, x| decompose_gemm(call, x)),
    )
    .sample(|s| s.floats(&[&[2, 3], &[3, 4], &[4]]))
    .attrs(names![alpha beta transA transB]),
    composed("Det", "The determinant of each matrix in the last two axes", inputs![X], determinants)
        .sample(|s| s.floats(&[&[2, 3, 3]])),
];

/// The row of a matrix product.
const fn product(name: &'static str, doc: &'static str) -> OpDef {
    OpDef::new(name, doc, inputs![A B], infer_matmul, Eval::Tensor(eval_matmul), Lower::Template(lower_matmul))
        .grad(matmul_grad)
        .flop(|call| Product::new(call).map_or(0.0, |p| 2.0 * p.batch.numel() as f64 * (p.m * p.k * p.n) as f64))
        .sample(|s| s.floats(&[&[2, 3], &[3, 4]]))
        .part(part_matmul)
        .summed(|call| {
            let (a, b) = (call.shape(0).len(), call.shape(1).len());
            vec![vec![a.checked_sub(1), Some(b.saturating_sub(2))]]
        })
}

/// A product that the kernel of its reader computes, where it can: `q kᵀ` of an attention, or `dy vᵀ` of its gradient.
pub const SCORES: &str = "plimsoll.Scores";

/// The largest matrix whose determinant is written out: a row doubles the work.
const MOST_ROWS: usize = 7;

/// Expands row by row: the minors of the first rows, for every set of as many columns, give those of one row more.
fn determinants<'g>(b: Nodes<'g>, call: &Call, x: &Args<Var<'g>>) -> OpResult<Vec<Var<'g>>> {
    let dtype = same_float(call)?;
    let (shape, rank) = (call.shape(0), call.shape(0).len());
    let n = *shape.last().unwrap_or(&0);
    let square = rank >= 2 && shape[rank - 2] == n && (1..=MOST_ROWS).contains(&n);
    expect_shape(call, 0, square, format_args!("square matrices of 1 to {MOST_ROWS} rows"))?;
    let batch = &shape[..rank - 2];
    let matrix = x[0].shaped(&[batch, &[n * n]].concat());
    let element = |row: usize, column: usize| {
        let at = row * n + column;
        matrix.part(rank - 2, at..at + 1).shaped(batch)
    };
    let mut minors: BTreeMap<u32, Var<'g>> = BTreeMap::from([(0, b.scalar(1.0, dtype).expand(batch))]);
    for row in 0..n {
        let mut next: BTreeMap<u32, Var<'g>> = BTreeMap::new();
        for (&columns, &minor) in &minors {
            for column in (0..n).filter(|column| columns >> column & 1 == 0) {
                // The sign turns with each chosen column to the right.
                let term = minor * element(row, column);
                let term = if (columns >> column).count_ones() % 2 == 1 { -term } else { term };
                next.entry(columns | 1 << column).and_modify(|sum| *sum = *sum + term).or_insert(term);
            }
        }
        minors = next;
    }
    Ok(minors.into_values().collect())
}

/// The extents of a batched product `[batch.., m, k] x [batch.., k, n]`.
struct Product {
    batch: Shape,
    m: usize,
    k: usize,
    n: usize,
}

impl Product {
    /// The extents, with vectors promoted: a left one to a row, a right one to a column.
    fn new(call: &Call) -> OpResult<Product> {
        let (a, b) = (call.shape(0), call.shape(1));
        let (batch_a, m, k) = match a[..] {
            [] => return Err(format!("input 'A': expected a vector, a matrix or a batch of them, found {a}")),
            [k] => (&[][..], 1, k),
            [ref batch @ .., m, k] => (batch, m, k),
        };
        let (batch_b, rows, n) = match b[..] {
            [] => return Err(format!("input 'B': expected a vector, a matrix or a batch of them, found {b}")),
            [k] => (&[][..], k, 1),
            [ref batch @ .., k, n] => (batch, k, n),
        };
        ensure(k == rows, || format!("expected as many rows of B as columns of A, found {a} and {b}"))?;
        let batch = Shape::broadcast([&Shape::new(batch_a), &Shape::new(batch_b)])
            .ok_or_else(|| format!("expected leading axes that broadcast, found {a} and {b}"))?;
        Ok(Product { batch, m, k, n })
    }

    /// A shape of the batch axes and two more.
    fn with(&self, rows: usize, columns: usize) -> Shape {
        self.batch.iter().copied().chain([rows, columns]).collect()
    }
}

fn infer_matmul(call: &Call) -> OpResult<Vec<Fact>> {
    let dtype = same_factor(call)?;
    let p = Product::new(call)?;
    let mut shape = p.with(p.m, p.n);
    if call.shape(1).len() == 1 {
        shape.pop();
    }
    if call.shape(0).len() == 1 {
        shape.remove(p.batch.len());
    }
    output(dtype, shape)
}

/// The gradients `dy Bᵀ` and `Aᵀ dy`. Of a matrix that multiplies a batch, the second is one product over all rows of the batch.
fn matmul_grad<'g>(_: Nodes<'g>, call: &Call, back: &Back<'_, 'g>) -> OpResult<Vec<Option<Var<'g>>>> {
    let p = Product::new(call)?;
    let promoted = |x: Var<'g>, shape: &Shape, vector: [usize; 2]| if shape.len() == 1 { x.shaped(&vector) } else { x };
    let a = promoted(back.x[0], call.shape(0), [1, p.k]);
    let b = promoted(back.x[1], call.shape(1), [p.k, 1]);
    let dy = back.first()?.shaped(&p.with(p.m, p.n));
    let transposed = |x: Var<'g>| -> OpResult<Var<'g>> {
        let rank = x.shape()?.len();
        let mut axes: Vec<usize> = (0..rank).collect();
        axes.swap(rank - 2, rank - 1);
        Ok(x.transpose(&axes))
    };
    let da = dy.matmul(transposed(b)?);
    let rows = p.batch.numel() * p.m;
    let db = if b.shape()?.len() == 2 && a.shape()?.numel() == rows * p.k {
        transposed(a.shaped(&[rows, p.k]))?.matmul(dy.shaped(&[rows, p.n]))
    } else {
        transposed(a)?.matmul(dy)
    };
    let unpromoted = |gradient: Var<'g>, shape: &Shape| -> OpResult<Var<'g>> {
        if shape.len() != 1 {
            return Ok(gradient);
        }
        // A vector is summed over the batch before its axis is alone again.
        let axes: Vec<i64> = (0..gradient.shape()?.len() as i64 - 2).collect();
        let sum = if axes.is_empty() { gradient } else { gradient.reduce_sum(&axes, false) };
        Ok(sum.shaped(shape))
    };
    Ok(vec![Some(unpromoted(da, call.shape(0))?), Some(unpromoted(db, call.shape(1))?)])
}

fn eval_matmul(inputs: &Args<&[f64]>, call: &Call) -> OpResult<Vec<Vec<f64>>> {
    let (a, b) = (inputs[0], inputs[1]);
    let Product { batch, m, k, n } = Product::new(call)?;
    // For each index of the batch, the operand's matrix.
    let matrices = |operand: &Shape| {
        let own = &operand[..operand.len().saturating_sub(2)];
        Access::contiguous(Shape::new(own)).broadcast(&batch)
    };
    let (at_a, at_b) = (matrices(call.shape(0)), matrices(call.shape(1)));
    let mut y = Vec::with_capacity(batch.numel() * m * n);
    for index in indices(&batch) {
        let a = &a[at_a.at(&index) as usize * m * k..][..m * k];
        let b = &b[at_b.at(&index) as usize * k * n..][..k * n];
        for i in 0..m {
            for j in 0..n {
                y.push((0..k).map(|l| a[i * k + l] * b[l * n + j]).sum());
            }
        }
    }
    Ok(vec![y])
}

/// Rows of the product depend on rows of A, columns on columns of B, and matrices on the matrices of both at the same
/// batch index.
pub(super) fn part_matmul(call: &Call, axis: usize, _: usize) -> Option<Part> {
    let (a, b) = (call.shape(0), call.shape(1));
    let p = Product::new(call).ok()?;
    let of_batch = |operand: &Shape| {
        let own = operand.len().saturating_sub(2);
        (axis + own).checked_sub(p.batch.len()).filter(|&k| operand[k] == p.batch[axis])
    };
    match axis.checked_sub(p.batch.len()) {
        None => Part::of([of_batch(a), of_batch(b)]),
        Some(0) if a.len() > 1 => Part::of([Some(a.len() - 2), None]),
        Some(_) => Part::of([None, Some(b.len() - 1)]),
    }
}

pub(super) fn lower_matmul(call: &Call, at: &[Access]) -> OpResult<TemplateCall> {
    let p = Product::new(call)?;
    let matrix = |access: &Access, promoted: [usize; 2], shape: Shape| match access.shape.len() {
        1 => access.reshape(&promoted.into()).expect("a unit axis needs no copy").broadcast(&shape),
        _ => access.broadcast(&shape),
    };
    let a = matrix(&at[0], [1, p.k], p.with(p.m, p.k));
    let b = matrix(&at[1], [p.k, 1], p.with(p.k, p.n));
    Ok(TemplateCall { template: Template::MatMul, shape: p.with(p.m, p.n), reads: vec![(0, a), (1, b)] })
}

/// The extents m, k and n of a Gemm, and the flags of transposed matrices.
fn gemm(call: &Call) -> OpResult<([usize; 3], [bool; 2])> {
    let flip = [call.int("transA", 0)? != 0, call.int("transB", 0)? != 0];
    let matrix = |input: usize| match call.shape(input)[..] {
        [rows, columns] => Ok(if flip[input] { (columns, rows) } else { (rows, columns) }),
        _ => Err(format!("input '{}': expected a matrix, found {}", ["A", "B"][input], call.shape(input))),
    };
    let ((m, k), (rows, n)) = (matrix(0)?, matrix(1)?);
    if k != rows {
        let (a, b) = (call.shape(0), call.shape(1));
        return Err(format!(
            "expected as many rows of B' as columns of A', found {a} and {b} with transA={}, transB={}",
            u8::from(flip[0]),
            u8::from(flip[1])
        ));
    }
    Ok(([m, k, n], flip))
}

fn infer_gemm(call: &Call) -> OpResult<Vec<Fact>> {
    let dtype = same_factor(call)?;
    let ([m, _, n], _) = gemm(call)?;
    for name in ["alpha", "beta"] {
        let factor = call.float(name, 1.0)?;
        ensure(dtype.is_float() || factor.fract() == 0.0, || {
            format!("attribute '{name}': expected a whole number as a factor of {dtype}, found {factor}")
        })?;
    }
    let shape = Shape::new([m, n]);
    broadcasts_to(call, 2, &shape)?;
    output(dtype, shape)
}

fn eval_gemm(inputs: &Args<&[f64]>, call: &Call) -> OpResult<Vec<Vec<f64>>> {
    let (a, b) = (inputs[0], inputs[1]);
    let ([m, k, n], [flip_a, flip_b]) = gemm(call)?;
    let (alpha, beta) = (call.float("alpha", 1.0)?, call.float("beta", 1.0)?);
    let mut y = Vec::with_capacity(m * n);
    for i in 0..m {
        for j in 0..n {
            let a = |l: usize| if flip_a { a[l * m + i] } else { a[i * k + l] };
            let b = |l: usize| if flip_b { b[j * k + l] } else { b[l * n + j] };
            let mut value = alpha * (0..k).map(|l| a(l) * b(l)).sum::<f64>();
            if let Some(c) = inputs.given(2) {
                let (rows, columns) = match call.shape(2)[..] {
                    [] => (1, 1),
                    [columns] => (1, columns),
                    [.., rows, columns] => (rows, columns),
                };
                value += beta * c[(i % rows) * columns + j % columns];
            }
            y.push(value);
        }
    }
    Ok(vec![y])
}

fn decompose_gemm<'g>(call: &Call, x: &Args<Var<'g>>) -> OpResult<Vec<Var<'g>>> {
    let (_, flip) = gemm(call)?;
    let [a, b] = [0, 1].map(|i| if flip[i] { x[i].transpose(&[1, 0]) } else { x[i] });
    let scaled = |value: Var<'g>, factor| if factor == 1.0 { value } else { value * factor };
    let y = scaled(a.matmul(b), call.float("alpha", 1.0)?);
    let beta = call.float("beta", 1.0)?;
    Ok(vec![x.given(2).map_or(y, |c| y + scaled(c, beta))])
}

#[cfg(test)]
mod tests {
    use crate::dtype::DType::*;
    use crate::op::Attrs;
    use crate::ops::tests::{eval, refused};

    #[test]
    fn integers_are_multiplied_as_such() {
        let (a, b) = ((I32, &[1, 2][..], &[2.0, -3.0][..]), (I32, &[2, 1][..], &[5.0, 7.0][..]));
        assert_eq!(eval("MatMul", &[a, b], &Attrs::new()), ("i32[1,1]".into(), vec![-11.0]));
        assert_eq!(eval("Gemm", &[a, b], &Attrs::new().with("alpha", 2.0)).1, [-22.0]);
        let shapes = |dtype| [(dtype, &[1, 2][..]), (dtype, &[2, 1][..])];
        assert_eq!(
            refused("Gemm", &shapes(I64), &Attrs::new().with("alpha", 0.5)),
            "attribute 'alpha': expected a whole number as a factor of i64, found 0.5"
        );
        assert_eq!(
            refused("MatMul", &shapes(U8), &Attrs::new()),
            "input 'A': expected a floating-point type, or integers of 32 or 64 bits, found u8"
        );
    }
}
