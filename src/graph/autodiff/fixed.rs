//! The gradients of rows that reduce, view or concatenate.

use super::over;
use crate::kernel::Reduction;
use crate::op::{Back, Call, OpResult, Var};

/// The gradient of a reduction. Equal extremes share it.
pub fn reduction<'g>(call: &Call, reduction: Reduction, back: &Back<'_, 'g>) -> OpResult<Vec<Option<Var<'g>>>> {
    let axes = call.reduced_axes()?;
    let kept: Vec<usize> =
        call.shape(0).iter().enumerate().map(|(axis, &extent)| if axes.contains(&axis) { 1 } else { extent }).collect();
    let (x, y, dy) = (back.x[0], back.y[0].shaped(&kept), back.first()?.shaped(&kept));
    let zero = x.like(0.0);
    Ok(vec![Some(match reduction {
        Reduction::Sum => dy,
        Reduction::Max | Reduction::Min => {
            // There may be more than a half can count.
            let wide = call.dtype(0).unhalved();
            let extreme = x.equal(y).cast(wide);
            (extreme * (dy.cast(wide) / extreme.reduce_sum(&over(&axes), true))).cast(call.dtype(0))
        }
        Reduction::Prod => {
            // Beside one zero, only its own derivative is not zero: the product of the others.
            let zeros = x.equal(0.0);
            let others = zeros.select(1.0, x).op("ReduceProd", &[], crate::op::Attrs::new().with("axes", over(&axes)));
            let count = zeros.cast(call.dtype(0).unhalved()).reduce_sum(&over(&axes), true);
            let alone = zeros.and(count.equal(1.0)).select(others, zero);
            dy * zeros.select(alone, y / zeros.select(1.0, x))
        }
    })])
}

/// The gradient of a view that keeps the order of the elements.
pub fn view<'g>(call: &Call, back: &Back<'_, 'g>) -> OpResult<Vec<Option<Var<'g>>>> {
    Ok(vec![Some(back.first()?.shaped(call.shape(0)))])
}

/// The gradients of concatenated values: the parts of the result's.
pub fn parts<'g>(call: &Call, back: &Back<'_, 'g>) -> OpResult<Vec<Option<Var<'g>>>> {
    let (axis, dy) = (call.axis("axis", 0, call.shape(0))?, back.first()?);
    let mut end = 0;
    let part = |input: usize| {
        let start = end;
        end += call.shape(input)[axis];
        Some(dy.part(axis, start..end))
    };
    Ok((0..call.inputs.len()).map(part).collect())
}
