//! Rows of sums over windows: norms of windows, and images summed from windows.

use super::{image_axes, pool, sizes};
use crate::op::{Args, Attrs, Call, Nodes, OpDef, OpResult, Var, inputs, names};
use crate::ops::compose::composed;
use crate::ops::{required_ints, same_float};
use crate::shape::Shape;

pub(in crate::ops) static OPS: &[OpDef] = &[
    composed(
        "LpPool",
        "The root of the sum of `p`-th powers of magnitudes in each window of [n, c, spatial..]",
        inputs![X],
        power_pool,
    )
    .wide()
    .sample(|s| {
        s.floats(&[&[1, 2, 7, 8]]).ints("kernel_shape", &[3, 2]).ints("strides", &[2, 1]).ints("pads", &[1, 0, 1, 1])
    })
    .attrs(names![auto_pad ceil_mode dilations kernel_shape p pads strides]),
    composed(
        "GlobalLpPool",
        "The root of the sum of `p`-th powers of magnitudes over all spatial axes, which stay with extent 1",
        inputs![X],
        |_, call, x| {
            let p = power(call)?;
            Ok(vec![rooted(raised(x[0], p).reduce_sum(&image_axes(call)?, true), p)])
        },
    )
    .wide()
    .sample(|s| s.floats(&[&[1, 2, 7, 8]]))
    .attrs(names![p]),
    composed(
        "Col2Im",
        "The images that windows [n, c window, windows] add up to",
        inputs![input image_shape= block_shape=],
        image,
    )
    .sample(|s| {
        s.floats(&[&[2, 18, 4]]).ints("image_shape", &[5, 6]).ints("block_shape", &[2, 3]).ints("strides", &[3, 2])
    })
    .attrs(names![dilations pads strides]),
];

/// The power of a norm.
fn power(call: &Call) -> OpResult<f64> {
    match call.int("p", 2)? {
        p @ 1.. => Ok(p as f64),
        p => Err(format!("attribute 'p': expected 1 or more, found {p}")),
    }
}

fn raised(x: Var, p: f64) -> Var {
    match p {
        1.0 => x.abs(),
        2.0 => x * x,
        p => x.abs().pow(p),
    }
}

/// The root of a sum of powers. Where the sum is 0, so is the derivative, though a root has none there.
fn rooted(sum: Var, p: f64) -> Var {
    let nothing = sum.equal(0.0);
    let some = nothing.select(1.0, sum);
    match p {
        1.0 => sum,
        2.0 => nothing.select(0.0, some.sqrt()),
        p => nothing.select(0.0, some.pow(1.0 / p)),
    }
}

/// Computes the sum as a mean times the number of elements.
fn power_pool<'g>(b: Nodes<'g>, call: &Call, x: &Args<Var<'g>>) -> OpResult<Vec<Var<'g>>> {
    let dtype = same_float(call)?;
    let (p, (shape, sides)) = (power(call)?, pool(call)?);
    let mut attrs = call.attrs.clone();
    attrs.remove("p");
    let mut sum = raised(x[0], p).op("AveragePool", &[], attrs);
    for (axis, side) in sides.iter().enumerate() {
        let inside = |o| side.taps(o).len() as f64;
        let mut along = vec![1; shape.len()];
        along[axis + 2] = side.out;
        sum = sum * b.constant(dtype, along, || (0..side.out).map(inside).collect());
    }
    Ok(vec![rooted(sum, p)])
}

/// Computes the image as a transposed convolution with one-hot filters.
fn image<'g>(b: Nodes<'g>, call: &Call, x: &Args<Var<'g>>) -> OpResult<Vec<Var<'g>>> {
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
    let data = x[0].shaped(&[&[n, all][..], &counts].concat());
    let one = |i: usize| f64::from(u8::from(i / window % window == i % window));
    let filters = [&[all, 1][..], &block].concat();
    let filters = b.constant(dtype, filters, || (0..all * window).map(one).collect());
    let attrs = Attrs::new().with("group", (all / window) as i64).with("strides", &strides[..]);
    let attrs = attrs.with("dilations", &dilations[..]).with("pads", &pads[..]).with("output_padding", &rests[..]);
    Ok(vec![data.op("ConvTranspose", &[filters], attrs)])
}
