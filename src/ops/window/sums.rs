//! Rows of sums over windows: norms of windows, and images summed from windows.

use super::{pool, sizes, spatial};
use crate::op::{Attrs, Build, Call, OpDef, OpResult, ValueId, one, shaping};
use crate::ops::compose::{binary, composed, required, reshape, unary, with_number};
use crate::ops::{required_ints, same_float};
use crate::shape::Shape;

pub(in crate::ops) static OPS: &[OpDef] = &[
    composed(
        "LpPool",
        "The root of the sum of `p`-th powers of magnitudes in each window of [n, c, spatial..]",
        &[one("X")],
        power_pool,
    )
    .sample(|s| {
        s.floats(&[&[1, 2, 7, 8]]).ints("kernel_shape", &[3, 2]).ints("strides", &[2, 1]).ints("pads", &[1, 0, 1, 1])
    })
    .attrs(&["auto_pad", "ceil_mode", "dilations", "kernel_shape", "p", "pads", "strides"]),
    composed(
        "GlobalLpPool",
        "The root of the sum of `p`-th powers of magnitudes over all spatial axes, which stay with extent 1",
        &[one("X")],
        |b, call, x| {
            spatial(call)?;
            let p = power(call)?;
            let raised = raised(b, required(x, 0), p)?;
            let axes: Vec<usize> = (2..call.shape(0).len()).collect();
            let sum = b.op("ReduceSum", &[raised], Attrs::new().with("axes", &axes[..]))?;
            Ok(vec![rooted(b, sum, p)?])
        },
    )
    .sample(|s| s.floats(&[&[1, 2, 7, 8]]))
    .attrs(&["p"]),
    composed(
        "Col2Im",
        "The images that windows [n, c window, windows] add up to",
        &[one("input"), shaping("image_shape"), shaping("block_shape")],
        image,
    )
    .sample(|s| {
        s.floats(&[&[2, 18, 4]]).ints("image_shape", &[5, 6]).ints("block_shape", &[2, 3]).ints("strides", &[3, 2])
    })
    .attrs(&["dilations", "pads", "strides"]),
];

/// The power of a norm.
fn power(call: &Call) -> OpResult<f64> {
    match call.int("p", 2)? {
        p @ 1.. => Ok(p as f64),
        p => Err(format!("attribute 'p': expected 1 or more, found {p}")),
    }
}

fn raised(b: &mut dyn Build, x: ValueId, p: f64) -> OpResult<ValueId> {
    let size = unary(b, "Abs", x)?;
    match p {
        1.0 => Ok(size),
        2.0 => binary(b, "Mul", x, x),
        p => with_number(b, "Pow", size, p),
    }
}

fn rooted(b: &mut dyn Build, sum: ValueId, p: f64) -> OpResult<ValueId> {
    match p {
        1.0 => Ok(sum),
        2.0 => unary(b, "Sqrt", sum),
        p => with_number(b, "Pow", sum, 1.0 / p),
    }
}

/// Computes the sum as a mean times the number of elements.
fn power_pool(b: &mut dyn Build, call: &Call, x: &[Option<ValueId>]) -> OpResult<Vec<ValueId>> {
    let dtype = same_float(call)?;
    let (p, (shape, sides)) = (power(call)?, pool(call)?);
    let mut attrs = call.attrs.clone();
    attrs.remove("p");
    let powers = raised(b, required(x, 0), p)?;
    let mut sum = b.op("AveragePool", &[powers], attrs)?;
    for (axis, side) in sides.iter().enumerate() {
        let inside = |o| side.taps(o).len() as f64;
        let mut along = vec![1; shape.len()];
        along[axis + 2] = side.out;
        let counts = b.constant(dtype, along, || (0..side.out).map(inside).collect())?;
        sum = binary(b, "Mul", sum, counts)?;
    }
    Ok(vec![rooted(b, sum, p)?])
}

/// Computes the image as a transposed convolution with one-hot filters.
fn image(b: &mut dyn Build, call: &Call, x: &[Option<ValueId>]) -> OpResult<Vec<ValueId>> {
    let dtype = same_float(call)?;
    let list = |name: &str| -> OpResult<Vec<usize>> {
        let axes = required_ints(call, name)?.len();
        sizes(call, name, axes, 1, 1)
    };
    let (extents, block) = (list("image_shape")?, list("block_shape")?);
    let axes = extents.len();
    let (&[n, all, windows], 1..=3, true) = (&call.shape(0)[..], axes, block.len() == axes) else {
        return Err(format!(
            "expected [n, c window, windows] of 1 to 3 spatial axes, found {} with {extents:?} and {block:?}",
            call.shape(0)
        ));
    };
    let window = Shape::new(&block[..]).checked_len().filter(|&window| all.is_multiple_of(window));
    let window =
        window.ok_or_else(|| format!("input 'input': expected a multiple of a window {block:?}, found {all}"))?;
    let (strides, dilations) = (sizes(call, "strides", axes, 1, 1)?, sizes(call, "dilations", axes, 1, 1)?);
    let pads = sizes(call, "pads", 2 * axes, 0, 0)?;
    let (mut counts, mut rests) = (Vec::new(), Vec::new());
    for k in 0..axes {
        let reach = (block[k] - 1) * dilations[k] + 1;
        let room = (extents[k] + pads[k] + pads[axes + k]).checked_sub(reach);
        let room = room
            .ok_or_else(|| format!("'block_shape': expected windows within {extents:?} and pads, found {block:?}"))?;
        counts.push(room / strides[k] + 1);
        rests.push(room % strides[k]);
    }
    if Shape::new(&counts[..]).checked_len() != Some(windows) {
        return Err(format!("input 'input': expected {counts:?} windows, found {windows}"));
    }
    let data = reshape(b, required(x, 0), &[&[n, all][..], &counts].concat())?;
    let one = |i: usize| f64::from(u8::from(i / window % window == i % window));
    let filters = [&[all, 1][..], &block].concat();
    let filters = b.constant(dtype, filters, || (0..all * window).map(one).collect())?;
    let attrs = Attrs::new().with("group", (all / window) as i64).with("strides", &strides[..]);
    let attrs = attrs.with("dilations", &dilations[..]).with("pads", &pads[..]).with("output_padding", &rests[..]);
    Ok(vec![b.op("ConvTranspose", &[data, filters], attrs)?])
}
