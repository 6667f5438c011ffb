//! Kernels as products of cuBLASLt.

use super::epilogue::{Abilities, Epilogue};
use super::{Call, MatMul, Matrix, vector};
use crate::dtype::DType;
use crate::kernel::{Kernel, Operand};
use crate::shape::Access;
use crate::target::Target;

/// The axes of a product as one batch of matrices.
struct Axes {
    /// The axis whose step is that of the rows. `rows` counts the rows, with the batch axes that lengthen them.
    row: usize,
    rows: usize,
    /// The columns' axis.
    column: usize,
    /// The axis of the batch. `count` is the batch's extent.
    batch: Option<usize>,
    count: usize,
}

/// Elements from one index of an axis to the next; 0 for an axis of extent 1.
fn stride(access: &Access, axis: usize) -> isize {
    if access.shape[axis] == 1 { 0 } else { access.strides[axis] }
}

impl Axes {
    /// Walks the batch axes from the inside outwards. An axis lengthens the rows if the right operand (the second access) has no step along
    /// it; any other forms the batch. `None` if the batch has no single step.
    fn new(shape: &[usize], accesses: &[&Access]) -> Option<Axes> {
        let axes = shape.len() - 2;
        let mut found = Axes { row: axes, rows: shape[axes], column: axes + 1, batch: None, count: 1 };
        for axis in (0..axes).rev().filter(|&axis| shape[axis] != 1) {
            let joins = |skip_right: bool, inner: usize, extent: usize| {
                let mut list = accesses.iter().enumerate().filter(|(i, _)| !(skip_right && *i == 1));
                list.all(|(_, a)| stride(a, axis) == stride(a, inner) * extent as isize)
            };
            let lengthens = found.rows == 1 || joins(true, found.row, found.rows);
            match found.batch {
                None if stride(accesses[1], axis) == 0 && lengthens => {
                    if found.rows == 1 {
                        found.row = axis;
                    }
                    found.rows *= shape[axis];
                }
                None => (found.batch, found.count) = (Some(axis), shape[axis]),
                Some(inner) if joins(false, inner, found.count) => found.count *= shape[axis],
                Some(_) => return None,
            }
        }
        Some(found)
    }

    /// An operand as column-major matrices of `height` rows and `width` columns, with `row` as the axis of its rows. If `flip`, the
    /// matrices are those of the transposed problem.
    fn matrix(
        &self,
        slot: usize,
        operand: &Operand,
        row: usize,
        [height, width]: [usize; 2],
        flip: bool,
    ) -> Option<Matrix> {
        let access = &operand.access;
        let (down, right) = (stride(access, row), stride(access, self.column));
        let (row, column, height, width) =
            if flip { (right, down, width, height) } else { (down, right, height, width) };
        let fits = |along: isize, across: isize, [long, wide]: [usize; 2]| {
            let dense = long == 1 || along == 1;
            let leading = if wide == 1 { long as isize } else { across };
            (dense && leading >= long as isize).then_some(leading as u64)
        };
        let plain = fits(row, column, [height, width]).map(|leading| (false, leading));
        let (transposed, leading) =
            plain.or_else(|| fits(column, row, [width, height]).map(|leading| (true, leading)))?;
        let batch = self.batch.map_or(0, |axis| stride(access, axis));
        let (offset, stride) = (access.offset.try_into().ok()?, batch.try_into().ok()?);
        Some(Matrix { slot, dtype: operand.dtype, offset, transposed, leading, stride })
    }
}

/// The product of a kernel's first two reads, and the end of the part of its body that the library's epilogue computes.
pub(super) fn call(kernel: &Kernel, target: &Target) -> Option<(Call, u32)> {
    let (shape, write) = (&kernel.shape, &kernel.writes[0]);
    let [left, right, ..] = &kernel.reads[..] else { return None };
    let rows_axis = shape.len().checked_sub(2)?;
    let (rows, columns) = (shape[rows_axis], shape[rows_axis + 1]);
    let k = *left.access.shape.last()?;
    let dtype = left.dtype;
    let wide = dtype == write.dtype || write.dtype == DType::F32 && dtype.is_half();
    if !dtype.is_float() || right.dtype != dtype || !wide || left.packed || right.packed || k == 0 {
        return None;
    }
    // Without `flip`, D is column-major. If neighbours in a row lie side by side, D is the transpose of a column-major matrix.
    let flip = write.access.strides[rows_axis + 1] == 1 || columns == 1;
    let bias = |o: &Operand| o.access.moves_only_along(if flip { rows_axis + 1 } else { rows_axis });
    // The library's GELU is as exact as half precision asks for.
    let gelu = write.dtype.size() == 2;
    let epilogue = Epilogue::new(kernel, &Abilities { scale: true, gelu, bias: &bias })?;
    let addend = epilogue.residual.map(|slot| &kernel.reads[slot]);

    let accesses: Vec<&Access> =
        [&left.access, &right.access, &write.access].into_iter().chain(addend.map(|o| &o.access)).collect();
    let axes = Axes::new(shape, &accesses)?;
    let (m, count) = (axes.rows, axes.count);
    let left = axes.matrix(0, left, axes.row, [m, k], flip)?;
    let right = axes.matrix(1, right, rows_axis, [k, columns], flip)?;
    let d = axes.matrix(kernel.reads.len(), write, axes.row, [m, columns], flip)?;
    let c = match (epilogue.residual, addend) {
        (Some(slot), Some(operand)) => Some(axes.matrix(slot, operand, axes.row, [m, columns], flip)?),
        _ => None,
    };
    // The library writes D as it lies, and indices of one matrix are 32-bit in some of its kernels.
    let small = |n: usize| i32::try_from(n).is_ok();
    let biased = flip || m == rows || epilogue.bias.is_none();
    if d.transposed || !biased || ![m, columns, k, count].into_iter().all(small) {
        return None;
    }
    let bias = match epilogue.bias {
        Some(slot) => Some(vector(kernel, slot)?),
        None => None,
    };
    let (m, n) = if flip { (columns, m) } else { (m, columns) };
    let (a, b) = if flip { (right, left) } else { (left, right) };
    let call = MatMul {
        m: m as u64,
        n: n as u64,
        k: k as u64,
        batch: count as u64,
        a,
        b,
        c,
        d,
        alpha: epilogue.alpha,
        bias,
        activation: epilogue.activation,
        tf32: target.allow_tf32 && dtype == DType::F32,
        algorithm: None,
    };
    Some((Call::MatMul(call), epilogue.end))
}
