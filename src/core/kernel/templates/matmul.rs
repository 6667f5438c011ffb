//! Products of matrices.

use super::*;

/// Terms of a sum of products of `u8` and `i8` up to which it is exact in `i32`.
pub const MOST_TERMS: usize = 1 << 16;

pub(super) static MATMUL: TemplateDef = TemplateDef {
    name: "matmul",
    doc: "batched matrix product",
    kind: Kind::Product,
    widens: |_, operand, is_constant| operand == 1 && is_constant,
    core_reads: |_| 2,
    check: |kernel, _| {
        let shape = &kernel.shape;
        let (batch, m, n) = matrix(shape)?;
        kernel.reads_axes(0, shape.len())?;
        let k = kernel.reads[0].access.shape[batch.len() + 1];
        ensure(m.max(n).max(k) <= MOST_EXTENT, || format!("a product of {m} by {k} by {n} is too large"))?;
        kernel.reads_extents(0, &[batch, &[m, k]].concat())?;
        kernel.reads_extents(1, &[batch, &[k, n]].concat())?;
        match [kernel.reads[0].dtype, kernel.reads[1].dtype] {
            [DType::U8, DType::I8] | [DType::I8, DType::U8] => {
                ensure(k <= MOST_TERMS, || format!("expected sums of up to {MOST_TERMS} products of bytes, found {k}"))
            }
            _ => kernel.reads_floats(2),
        }
    },
    axis_of: |kernel, operand, axis| {
        let summed = if operand == 0 { kernel.shape.len() - 1 } else { kernel.shape.len() - 2 };
        if axis == summed { Along::Whole } else { Along::Axis(axis) }
    },
    meaning: matmul,
    samples: || {
        let x = Expr::input(0, DType::F32);
        vec![sample(Template::MatMul, &[2, 3, 4], vec![floats(&[2, 3, 5]), floats(&[2, 5, 4])], x)]
    },
    ..PLAIN
};

fn matmul(_: &Kernel, index: &[usize], elements: &mut Elements) -> Row {
    let [batch @ .., m, n] = index else { panic!("a product has at least two axes") };
    let row = elements.along(0, &[batch, &[*m, 0]].concat(), batch.len() + 1);
    let column = elements.along(1, &[batch, &[0, *n]].concat(), batch.len());
    single(dot(&row, &column))
}
