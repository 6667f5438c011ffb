//! Rows that select elements by a constant condition, and that reverse sequences.

use super::{ensure, expect_dtype, indices, output, position};
use crate::dtype::DType;
use crate::op::{Args, Attr, Attrs, Call, Eval, Lower, Nodes, OpDef, OpResult, Var, inputs, names};
use crate::shape::Shape;
use crate::tensor::Tensor;

pub(super) static OPS: &[OpDef] = &[
    OpDef::new(
        "Compress",
        "The slices along `axis`, or the elements, for which the condition holds, which is a constant",
        inputs![input condition=],
        |call| {
            let (axis, kept) = kept(call)?;
            let mut shape = flat(call)?;
            shape[axis] = kept.len();
            output(call.dtype(0), shape)
        },
        Eval::Move(|x, call| {
            let (x, shape, (axis, kept)) = (x[0], flat(call)?, kept(call)?);
            let mut taken = shape.clone();
            taken[axis] = kept.len();
            let element = |mut index: Vec<usize>| {
                index[axis] = kept[index[axis]];
                x[position(&index, &shape)]
            };
            Ok(vec![indices(&taken).map(element).collect()])
        }),
        Lower::Decompose(|b, call, x| {
            let (axis, kept) = kept(call)?;
            let at = b.constant(DType::I64, [kept.len()], || kept.iter().map(|&i| i as f64).collect());
            Ok(vec![x[0].shaped(&flat(call)?).gather(at, axis as i64)])
        }),
    )
    .sample(|s| s.floats(&[&[3, 4, 2]]).ints("condition", &[1, 0, 1, 1]).attr("axis", 1))
    .attrs(names![axis]),
    OpDef::new(
        "NonZero",
        "The indices of the elements of a constant that are not zero, one column for each",
        inputs![X=],
        |call| output(DType::I64, places(call)?.shape().clone()),
        Eval::Known(places),
        Lower::Const,
    )
    .sample(|s| s.attr("X", Tensor::from_f64(DType::F32, [2, 3], &[0.0, 1.0, 2.0, 0.0, 0.0, -3.0]))),
    OpDef::new(
        "ReverseSequence",
        "Each sequence along `time_axis` turned around up to its length; there is one per element of \
         `batch_axis`",
        inputs![input sequence_lens],
        |call| sequences(call).map(|_| vec![call.fact(0).clone()]),
        Eval::Move(|x, call| {
            let ([batch, time], shape) = (sequences(call)?, call.shape(0));
            let [x, lengths] = [x[0], x[1]];
            let element = |mut index: Vec<usize>| {
                let (at, length) = (index[time], (lengths[index[batch]].max(0.0) as usize).min(shape[time]));
                index[time] = if at < length { length - 1 - at } else { at };
                x[position(&index, shape)]
            };
            Ok(vec![indices(shape).map(element).collect()])
        }),
        Lower::Decompose(reversed),
    )
    .sample(|s| s.floats(&[&[5, 3, 2]]).given(DType::I64, &[3], &[3.0, 0.0, 5.0]))
    .attrs(names![batch_axis time_axis]),
];

/// The input's shape; flattened if no axis is given.
fn flat(call: &Call) -> OpResult<Shape> {
    Ok(if call.attrs.get("axis").is_some() { call.shape(0).clone() } else { Shape::new([call.shape(0).numel()]) })
}

/// The axis, and the indices of the elements that are kept.
fn kept(call: &Call) -> OpResult<(usize, Vec<usize>)> {
    let shape = flat(call)?;
    let axis = call.axis("axis", 0, &shape)?;
    let condition = super::required_ints(call, "condition")?;
    if condition.len() > shape[axis] {
        let found = condition.len();
        return Err(format!("input 'condition': expected at most {} elements, found {found}", shape[axis]));
    }
    let holds = condition.iter().enumerate().filter(|&(_, &holds)| holds != 0);
    Ok((axis, holds.map(|(i, _)| i).collect()))
}

/// The indices of the constant's elements that are not zero, `[axes, count]`.
fn places(call: &Call) -> OpResult<Tensor> {
    let (shape, values) = match call.attrs.get("X") {
        Some(Attr::Tensor(tensor)) => (tensor.shape().clone(), tensor.to_f64()),
        Some(Attr::Int(_) | Attr::Float(_)) => (Shape::default(), vec![call.float("X", 0.0)?]),
        _ => {
            let values = call.floats("X")?.ok_or("'X' is required and must be a constant")?;
            (Shape::new([values.len()]), values)
        }
    };
    let found: Vec<_> = indices(&shape).zip(&values).filter(|(_, v)| **v != 0.0).map(|(index, _)| index).collect();
    let columns = (0..shape.len()).flat_map(|axis| found.iter().map(move |index| index[axis] as f64));
    Ok(Tensor::from_f64(DType::I64, [shape.len(), found.len()], &columns.collect::<Vec<_>>()))
}

/// The axes of the batch and of time.
fn sequences(call: &Call) -> OpResult<[usize; 2]> {
    let shape = call.shape(0);
    let axes = [call.axis("batch_axis", 1, shape)?, call.axis("time_axis", 0, shape)?];
    expect_dtype(call, 1, "i64 or i32", |d| matches!(d, DType::I64 | DType::I32))?;
    ensure(axes[0] != axes[1] && call.shape(1)[..] == [shape[axes[0]]], || {
        format!(
            "input 'sequence_lens': expected one length per element of 'batch_axis', which is not 'time_axis', \
         of {shape}, found {}",
            call.shape(1)
        )
    })?;
    Ok(axes)
}

fn reversed<'g>(b: Nodes<'g>, call: &Call, x: &Args<Var<'g>>) -> OpResult<Vec<Var<'g>>> {
    let ([batch, time], shape) = (sequences(call)?, call.shape(0));
    let along = |axis: usize| -> Shape { (0..shape.len()).map(|k| if k == axis { shape[k] } else { 1 }).collect() };
    let at = b.numbers(DType::I64, along(time), 0.0);
    let lengths = x[1].cast(DType::I64).shaped(&along(batch)).min(shape[time] as f64);
    let from = at.less(lengths).select(lengths - 1.0 - at, at).expand(shape);
    Ok(vec![x[0].op("GatherElements", &[from], Attrs::new().with("axis", time as i64))])
}

#[cfg(test)]
mod tests {
    use crate::dtype::DType::*;
    use crate::op::{Attr, Attrs};
    use crate::ops::tests::{eval, refused};
    use crate::tensor::Tensor;

    #[test]
    fn conditions_keep_slices_or_elements() {
        let x = (F32, &[3, 2][..], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0][..]);
        let condition = Attrs::new().with("condition", vec![0, 1, 1]);
        assert_eq!(eval("Compress", &[x], &condition), ("f32[2]".into(), vec![2.0, 3.0]));
        let rows = condition.clone().with("axis", 0);
        assert_eq!(eval("Compress", &[x], &rows), ("f32[2,2]".into(), vec![3.0, 4.0, 5.0, 6.0]));
        let found = refused("Compress", &[(F32, &[3, 2])], &condition.with("axis", 1));
        assert_eq!(found, "input 'condition': expected at most 2 elements, found 3");
    }

    #[test]
    fn places_stand_in_columns() {
        let of = |attr: Attr| eval("NonZero", &[], &Attrs::new().with("X", attr));
        assert_eq!(of(vec![0, 5, 0, -1].into()), ("i64[1,2]".into(), vec![1.0, 3.0]));
        let table = Tensor::from_f64(F32, [2, 2], &[0.0, 1.0, 0.5, 2.0]);
        assert_eq!(of(Attr::shaping(&table)), ("i64[2,3]".into(), vec![0.0, 1.0, 1.0, 1.0, 0.0, 1.0]));
    }
}
