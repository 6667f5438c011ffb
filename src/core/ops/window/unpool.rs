//! Images made again from the maxima of their windows.

use super::sizes;
use crate::dtype::DType;
use crate::op::{Args, Attrs, Call, Nodes, OpDef, OpResult, Var, inputs, names};
use crate::ops::compose::composed;
use crate::ops::{ensure, expect_dtype, expect_shape, required_ints};
use crate::shape::Shape;

pub(in crate::ops) static OPS: &[OpDef] = &[composed(
    "MaxUnpool",
    "Images of zeros with the maxima of windows where the second input says that they stood",
    inputs![X I output_shape=],
    unpool,
)
.sample(|s| {
    s.floats(&[&[1, 1, 2, 2]])
        .given(DType::I64, &[1, 1, 2, 2], &[5.0, 7.0, 13.0, 15.0])
        .ints("kernel_shape", &[2, 2])
        .ints("strides", &[2, 2])
        .ints("output_shape", &[1, 1, 5, 5])
})
.attrs(names![kernel_shape pads strides])];

fn unpool<'g>(b: Nodes<'g>, call: &Call, x: &Args<Var<'g>>) -> OpResult<Vec<Var<'g>>> {
    expect_dtype(call, 0, "a float type", DType::is_float)?;
    expect_dtype(call, 1, "i64 or i32", |d| matches!(d, DType::I64 | DType::I32))?;
    let shape = call.shape(0);
    let axes = shape.len().saturating_sub(2);
    expect_shape(call, 0, axes > 0, format_args!("[n, c, spatial..]"))?;
    expect_shape(call, 1, call.shape(1) == shape, format_args!("{shape} as the data"))?;
    let kernel = sizes(call, "kernel_shape", axes, 1, 1)?;
    let strides = sizes(call, "strides", axes, 1, 1)?;
    let pads = sizes(call, "pads", 2 * axes, 0, 0)?;
    let own = (0..axes).map(|k| {
        let all = (shape[2 + k].saturating_sub(1)).checked_mul(strides[k]).and_then(|n| n.checked_add(kernel[k]));
        all.and_then(|n| n.checked_sub(pads[k] + pads[axes + k]))
            .ok_or("the pads leave nothing, or the image is too large")
    });
    let own = own.collect::<Result<Vec<usize>, _>>()?;
    let pooled = Shape::new([&shape[..2], &own].concat());
    let count = pooled.checked_len().ok_or("the image is too large")?;
    let flat = shape.numel();
    let zeros = b.scalar(0.0, call.dtype(0)).expand(&[count]);
    let y = zeros.op("ScatterElements", &[x[1].shaped(&[flat]), x[0].shaped(&[flat])], Attrs::new());
    let y = y.shaped(&pooled);
    if call.attrs.get("output_shape").is_none() {
        return Ok(vec![y]);
    }
    let asked = required_ints(call, "output_shape")?;
    let larger = asked.len() == pooled.len() && asked.iter().zip(pooled.iter()).all(|(&a, &b)| a >= b as i64);
    ensure(larger, || format!("'output_shape': expected {pooled} or larger, found {asked:?}"))?;
    let after = asked.iter().zip(pooled.iter()).map(|(a, &b)| a - b as i64);
    let pads: Vec<i64> = std::iter::repeat_n(0, pooled.len()).chain(after).collect();
    Ok(vec![y.op("Pad", &[], Attrs::new().with("pads", pads))])
}
