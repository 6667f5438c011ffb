//! Windows as nodes that have kernels of every type: one part of the padded data per element of a window.
//!
//! ```text
//! window of 3, stride 2, pad 1:   0 a b c d e 0   ->   0 b d   tap 0
//!                                                      a c e   tap 1
//!                                                      b d 0   tap 2
//! ```
//!
//! Taps of pools are joined axis by axis. Those of a convolution are multiplied by their weights, and summed over channels. A transposed
//! convolution is one of data with zeros between the elements, by reversed filters.

use super::{Side, conv, conv_transpose, kernel, pool};
use crate::op::{Args, Attrs, Call, Nodes, OpResult, Rule, Var};
use crate::ops::ensure;
use crate::shape::indices;

/// The most elements of a window: each takes nodes of its own.
pub const MOST_TAPS: usize = 1 << 10;

/// The rule that writes a window's row as parts of its data, if it is one.
pub fn by_taps(name: &str) -> Option<Rule> {
    Some(match name {
        "plimsoll.Conv" => convolved,
        "plimsoll.ConvTranspose" => spread,
        "plimsoll.MaxPool" => largest,
        "AveragePool" => averaged,
        _ => return None,
    })
}

/// The data with `before` and `after` more elements along an axis, or fewer where these are negative.
fn padded<'g>(b: Nodes<'g>, x: Var<'g>, axis: usize, ends: [isize; 2], fill: f64) -> OpResult<Var<'g>> {
    let fact = x.fact()?;
    let [less_before, less_after] = ends.map(|more| more.min(0).unsigned_abs());
    let kept = x.part(axis, less_before..fact.shape[axis].saturating_sub(less_after).max(less_before));
    let around = |more: isize| {
        let mut shape = fact.shape.clone();
        shape[axis] = more.max(0).unsigned_abs();
        (more > 0).then(|| b.scalar(fill, fact.dtype).expand(&shape))
    };
    let parts: Vec<_> = [around(ends[0]), Some(kept), around(ends[1])].into_iter().flatten().collect();
    Ok(if parts.len() == 1 { kept } else { b.concat(&parts, axis as i64) })
}

/// What tap `t` of each window reads along an axis of padded data.
fn tapped<'g>(x: Var<'g>, axis: usize, side: &Side, t: usize) -> Var<'g> {
    let first = t * side.dilation;
    let one = |value: usize| vec![value as i64];
    let attrs = Attrs::new().with("axes", one(axis)).with("steps", one(side.stride)).with("starts", one(first));
    x.op("Slice", &[], attrs.with("ends", one(first + (side.out - 1) * side.stride + 1)))
}

/// The elements that windows reach behind the data, with the sign of [`padded`].
fn behind(side: &Side) -> isize {
    ((side.out - 1) * side.stride + side.reach()) as isize - (side.before + side.len) as isize
}

fn few(taps: usize) -> OpResult<()> {
    ensure(taps <= MOST_TAPS, || format!("expected at most {MOST_TAPS} elements of a window of doubles, found {taps}"))
}

/// Joins the elements of each window, axis by axis.
fn joined<'g>(
    b: Nodes<'g>,
    mut y: Var<'g>,
    sides: &[Side],
    fill: f64,
    join: fn(Var<'g>, Var<'g>) -> Var<'g>,
) -> OpResult<Var<'g>> {
    for (axis, side) in (2..).zip(sides) {
        few(side.kernel)?;
        let wide = padded(b, y, axis, [side.before as isize, behind(side)], fill)?;
        y = (1..side.kernel).fold(tapped(wide, axis, side, 0), |all, t| join(all, tapped(wide, axis, side, t)));
    }
    Ok(y)
}

fn largest<'g>(b: Nodes<'g>, call: &Call, x: &Args<Var<'g>>) -> OpResult<Vec<Var<'g>>> {
    let (_, mut sides) = pool(call)?;
    sides.iter_mut().for_each(Side::cut);
    Ok(vec![joined(b, x[0], &sides, f64::NEG_INFINITY, |a, b| a.max(b))?])
}

fn averaged<'g>(b: Nodes<'g>, call: &Call, x: &Args<Var<'g>>) -> OpResult<Vec<Var<'g>>> {
    let (shape, mut sides) = pool(call)?;
    let counts_pads = call.int("count_include_pad", 0)? != 0;
    let mut count = b.scalar(1.0, call.dtype(0));
    for (axis, side) in (2..).zip(&sides) {
        let mut along = vec![1; shape.len()];
        along[axis] = side.out;
        let of = |o| if counts_pads { side.within(o) } else { side.taps(o).len() } as f64;
        count = count * b.constant(call.dtype(0), along, || (0..side.out).map(of).collect());
    }
    sides.iter_mut().for_each(Side::cut);
    Ok(vec![joined(b, x[0], &sides, 0.0, |a, b| a + b)? / count])
}

/// The sum of each tap of padded data times its weights, which are `[o, c / groups, taps..]`.
fn weighted<'g>(wide: Var<'g>, w: Var<'g>, groups: usize, sides: &[Side]) -> OpResult<Var<'g>> {
    let (data, filters, window) = (wide.shape()?, w.shape()?, kernel(sides));
    few(window.numel())?;
    let (own, all, results) = (filters[1], filters[0], filters[0] / groups);
    let out: Vec<usize> = sides.iter().map(|side| side.out).collect();
    let one = vec![1; sides.len()];
    let mut sum: Option<Var> = None;
    for index in indices(&window) {
        let (mut x, mut weight) = (wide, w);
        for (axis, (side, &t)) in (2..).zip(sides.iter().zip(&index)) {
            (x, weight) = (tapped(x, axis, side, t), weight.part(axis, t..t + 1));
        }
        let x = x.shaped(&[&[data[0], groups, 1, own], &out[..]].concat());
        let weight = weight.shaped(&[&[1, groups, results, own], &one[..]].concat());
        let part = (x * weight).reduce_sum(&[3], false);
        sum = Some(sum.map_or(part, |sum| sum + part));
    }
    let sum = sum.ok_or("a window has an element")?;
    Ok(sum.shaped(&[&[data[0], all], &out[..]].concat()))
}

fn convolved<'g>(b: Nodes<'g>, call: &Call, x: &Args<Var<'g>>) -> OpResult<Vec<Var<'g>>> {
    let (_, groups, sides) = conv(call)?;
    let mut wide = x[0];
    for (axis, side) in (2..).zip(&sides) {
        wide = padded(b, wide, axis, [side.before as isize, behind(side)], 0.0)?;
    }
    Ok(vec![weighted(wide, x[1], groups, &sides)?])
}

fn spread<'g>(b: Nodes<'g>, call: &Call, x: &Args<Var<'g>>) -> OpResult<Vec<Var<'g>>> {
    let (shape, groups, sides) = conv_transpose(call)?;
    let mut wide = x[0];
    for (axis, side) in (2..).zip(&sides) {
        wide = padded(b, apart(b, wide, axis, side.stride)?, axis, reached(side), 0.0)?;
    }
    // [groups, c / groups, o / groups, taps..] to [o, c / groups, taps..].
    let filters = call.shape(1);
    let (own, results) = (filters[0] / groups, filters[1]);
    let split = x[1].shaped(&[&[groups, own, results], &filters[2..]].concat());
    let order: Vec<usize> = [0, 2, 1].into_iter().chain(3..3 + sides.len()).collect();
    let w = split.transpose(&order).shaped(&[&[shape[1], own], &filters[2..]].concat());
    let flat: Vec<Side> = sides.iter().map(|side| Side { stride: 1, ..*side }).collect();
    let axes: Vec<i64> = (2..2 + sides.len() as i64).collect();
    let all = |value: i64| vec![value; axes.len()];
    let backwards = Attrs::new().with("axes", axes.clone()).with("steps", all(-1)).with("starts", all(-1));
    let reversed = w.op("Slice", &[], backwards.with("ends", all(i64::MIN)));
    Ok(vec![weighted(wide, reversed, groups, &flat)?])
}

/// What a transposed convolution reads before and behind the data whose elements are `stride` apart, with the sign of [`padded`].
fn reached(side: &Side) -> [isize; 2] {
    let before = (side.reach() - 1) as isize - side.before as isize;
    let data = (side.len - 1) * side.stride + 1;
    [before, (side.out + side.reach() - 1) as isize - before - data as isize]
}

/// The elements along an axis with zeros between them, so that they are `stride` apart.
fn apart<'g>(b: Nodes<'g>, x: Var<'g>, axis: usize, stride: usize) -> OpResult<Var<'g>> {
    let shape = x.shape()?;
    let split = [&shape[..=axis], &[1], &shape[axis + 1..]].concat();
    let wide = padded(b, x.shaped(&split), axis + 1, [0, stride as isize - 1], 0.0)?;
    let mut joined = shape.clone();
    joined[axis] *= stride;
    Ok(wide.shaped(&joined).part(axis, 0..joined[axis] - (stride - 1)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::op::{Fact, OpDef};
    use crate::ops::find;

    /// A row's values, and those of its taps.
    fn both(name: &str, shapes: &[&[usize]], attrs: &Attrs) -> [Vec<f64>; 2] {
        let facts: Vec<_> = shapes.iter().map(|shape| Fact::new(DType::F64, *shape)).collect();
        let facts: Vec<_> = facts.iter().map(Some).collect();
        let element = |i: usize| ((i * 37 + 11) % 23) as f64 - 11.0;
        let values: Vec<Vec<f64>> =
            facts.iter().flatten().map(|f| (0..f.shape.numel()).map(element).collect()).collect();
        let values: Vec<_> = values.iter().map(|v| Some(&v[..])).collect();
        let op = find(name).expect("a row");
        let taps = crate::ops::compose::composed("taps", "", op.inputs, by_taps(name).expect("a rule"));
        let taps: &OpDef = Box::leak(Box::new(taps));
        [op, taps].map(|op: &OpDef| Call { op, attrs, inputs: &facts }.eval(&values).expect("values").swap_remove(0))
    }

    #[test]
    fn taps_compute_what_the_rows_do() {
        let attrs = |strides: &[usize], dilations: &[usize], pads: &[usize]| {
            Attrs::new().with("strides", strides).with("dilations", dilations).with("pads", pads)
        };
        let cases = [attrs(&[1, 2], &[2, 1], &[1, 0, 2, 1]), attrs(&[3, 1], &[1, 2], &[0, 2, 0, 1])];
        for attrs in cases {
            let grouped = attrs.clone().with("group", 2);
            let [own, taps] = both("plimsoll.Conv", &[&[2, 4, 6, 7], &[6, 2, 3, 2]], &grouped);
            assert_eq!(own, taps, "Conv {attrs:?}");
            let [own, taps] = both("plimsoll.ConvTranspose", &[&[2, 4, 3, 5], &[4, 3, 3, 2]], &grouped);
            assert_eq!(own, taps, "ConvTranspose {attrs:?}");
            let pool = attrs.clone().with("kernel_shape", vec![3, 3]).with("ceil_mode", 1);
            for name in ["plimsoll.MaxPool", "AveragePool"] {
                let [own, taps] = both(name, &[&[1, 2, 8, 9]], &pool);
                assert_eq!(own, taps, "{name} {attrs:?}");
            }
            let [own, taps] = both("AveragePool", &[&[1, 2, 8, 9]], &pool.with("count_include_pad", 1));
            assert_eq!(own, taps, "with pads, {attrs:?}");
        }
    }
}
