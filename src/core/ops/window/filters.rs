//! Rows of the gradient of a convolution by its filters: as another convolution, or as sums over parts of the positions.
//!
//! ```text
//! ConvFilters (x, dy)   =   ReduceSum (ConvFilterSums <parts = [4, 2]> (x, dy))      parts: four of the images, two of the rows
//! ```

use super::{AutoPad, Side, adjoint, kernel, sides, sizes, spatial, tap, taps, widen, window, window_attrs};
use crate::kernel::Template;
use crate::op::{Args, Attrs, Call, Eval, Lower, OpDef, OpResult, Part, TemplateCall, Var, inputs, names};
use crate::ops::compose::composed;
use crate::ops::{ensure, indices, output, position, same_float};
use crate::shape::{Access, Shape};

/// The row of sums over parts of the positions.
pub const SUMS_OF_PARTS: &str = "plimsoll.ConvFilterSums";

pub(in crate::ops) static OPS: &[OpDef] = &[
    composed(
        "plimsoll.ConvFilters",
        "The gradient of plimsoll.Conv by its filters, from its input X and the gradient dY of its output",
        inputs![X dY],
        |_, call, x| {
            let Positions { groups, sides, .. } = positions(call)?;
            Ok(vec![as_convolution(x[0], x[1], groups, &sides)?])
        },
    )
    .sample(|s| {
        s.floats(&[&[1, 4, 6, 6], &[1, 4, 3, 4]])
            .attr("group", 2)
            .ints("kernel_shape", &[3, 3])
            .ints("strides", &[2, 1])
            .ints("dilations", &[1, 2])
            .ints("pads", &[0, 1, 1, 1])
    })
    .attrs(names![dilations group kernel_shape pads strides]),
    OpDef::new(
        SUMS_OF_PARTS,
        "What plimsoll.ConvFilters adds up: sums over parts of the images and the rows, of 16-bit floats in f32",
        inputs![X dY],
        |call| {
            let dtype = same_float(call)?;
            output(dtype.unhalved(), positions(call)?.shape())
        },
        Eval::Tensor(eval),
        Lower::Template(|call, at| {
            let positions = positions(call)?;
            let [images, rows] = positions.parts;
            let filters = widen(&positions.filters);
            let template = Template::ConvFilters { groups: positions.groups, rows, window: window(&positions.sides) };
            let shape = [&[images * rows], &filters[..]].concat().into();
            let read = |access: &Access| access.reshape(&widen(&access.shape)).expect("a unit axis needs no copy");
            Ok(TemplateCall { template, shape, reads: at.iter().map(read).enumerate().collect() })
        }),
    )
    .grad(|_, call, back| gradients(&positions(call)?, [back.x[0], back.x[1]], back.first()?))
    .flop(|call| {
        let sums =
            |p: Positions| 2.0 * p.filters.numel() as f64 * (call.shape(1).numel() / call.shape(1)[1].max(1)) as f64;
        positions(call).map_or(0.0, sums)
    })
    .sample(|s| {
        s.floats(&[&[2, 4, 7, 6], &[2, 6, 4, 4]])
            .ints("kernel_shape", &[2, 3])
            .ints("strides", &[2, 1])
            .ints("pads", &[1, 0, 0, 0])
    })
    .sample(|s| {
        s.floats(&[&[4, 2, 5, 3], &[4, 3, 4, 3]])
            .ints("kernel_shape", &[2, 3])
            .ints("pads", &[0, 1, 0, 1])
            .ints("parts", &[2, 2])
    })
    .attrs(names![dilations group kernel_shape pads parts strides])
    .part(|call, axis, _| {
        let Positions { groups, parts, .. } = positions(call).ok()?;
        // Filters of one output, or of one input, are those of a convolution with fewer of these.
        match axis.checked_sub(usize::from(parts != [1, 1]))? {
            0 if groups == 1 => Part::of([None, Some(1)]),
            1 if groups == 1 => Part::of([Some(1), None]),
            _ => None,
        }
    })
    .summed(|call| match positions(call) {
        Ok(Positions { parts: [1, 1], .. }) => vec![vec![Some(0), Some(0)]],
        _ => Vec::new(),
    }),
];

/// A call of these rows: the convolution's groups, filters and sides, and in how many parts the images and the rows are.
struct Positions {
    groups: usize,
    filters: Shape,
    sides: Vec<Side>,
    parts: [usize; 2],
}

impl Positions {
    /// The extents of the sums.
    fn shape(&self) -> Shape {
        let [images, rows] = self.parts;
        if self.parts == [1, 1] { self.filters.clone() } else { [&[images * rows], &self.filters[..]].concat().into() }
    }
}

/// The gradients of sums: each part of the positions is a convolution of its own, by its own sums.
fn gradients<'g>(positions: &Positions, [x, dy]: [Var<'g>; 2], sums: Var<'g>) -> OpResult<Vec<Option<Var<'g>>>> {
    let Positions { groups, sides, parts, .. } = positions;
    let (groups, [images, rows]) = (*groups as i64, *parts);
    let (axis, shape) = (sides.len(), dy.shape()?);
    let of = |extent: usize, parts: usize, part: usize| extent / parts * part..extent / parts * (part + 1);
    let joined = |values: Vec<Var<'g>>, axis: usize| match values[..] {
        [one] => one,
        _ => values[0].op("Concat", &values[1..], Attrs::new().with("axis", axis as i64)),
    };
    let (mut by_x, mut by_dy) = (Vec::new(), Vec::new());
    for image in 0..images {
        let [x, dy] = [x, dy].map(|value| value.part(0, of(shape[0], images, image)));
        let (mut whole, mut strips): (Option<Var<'g>>, Vec<_>) = (None, Vec::new());
        for row in 0..rows {
            let part = image * rows + row;
            let dw = if images * rows == 1 { sums } else { sums.part(0, part..part + 1).squeeze(&[0]) };
            let y = x.op("plimsoll.Conv", &[dw], window_attrs(sides).with("group", groups));
            let mut y = sides.iter().enumerate().fold(y, |y, (k, side)| y.part(k + 2, 0..side.out));
            let mut dy = dy;
            if rows > 1 {
                let here = of(shape[axis], rows, row);
                y = y.part(axis, here.clone());
                let pads = Attrs::new().with("pads", &[here.start, shape[axis] - here.end][..]);
                dy = dy.part(axis, here).op("Pad", &[], pads.with("axes", &[axis][..]));
            }
            strips.push(y);
            let dx = dy.op("plimsoll.ConvTranspose", &[dw], adjoint(sides).with("group", groups));
            whole = Some(whole.map_or(dx, |sum| sum + dx));
        }
        by_x.extend(whole);
        by_dy.push(joined(strips, axis));
    }
    Ok(vec![Some(joined(by_x, 0)), Some(joined(by_dy, 0))])
}

/// The attributes of the rows, for a convolution's window.
pub(super) fn attrs(sides: &[Side], groups: usize) -> Attrs {
    window_attrs(sides).with("kernel_shape", &kernel(sides)[..]).with("group", groups as i64)
}

/// Checks a call. Positions that `dY` lacks at the end of an axis have no gradient.
fn positions(call: &Call) -> OpResult<Positions> {
    let axes = spatial(call)?.len();
    let [x, dy] = [call.shape(0), call.shape(1)];
    ensure(call.ints("kernel_shape")?.is_some(), || "attribute 'kernel_shape': expected ints, found none".to_owned())?;
    let mut sides = sides(call, &sizes(call, "kernel_shape", axes, 1, 1)?)?;
    let groups = call.int("group", 1)?;
    let divides = |channels: usize| groups >= 1 && (channels as i64 % groups) == 0;
    ensure(dy.len() == x.len() && dy[0] == x[0] && divides(x[1]) && divides(dy[1]), || {
        format!(
            "expected dY [n, o, spatial..] with c and o divisible by group, found X {x}, dY {dy} and group {groups}"
        )
    })?;
    for (axis, side) in sides.iter_mut().enumerate() {
        side.slide(axis, AutoPad::Explicit, false)?;
        let found = dy[axis + 2];
        ensure((1..=side.out).contains(&found), || {
            format!("input 'dY': expected 1 to {} windows on spatial axis {axis}, found {found}", side.out)
        })?;
        side.out = found;
    }
    let parts = sizes(call, "parts", 2, 1, 1);
    let parts = [parts.as_ref().map_err(Clone::clone)?[0], parts?[1]];
    // The rows are the last axis but one, if there is one.
    let rows = if axes > 1 { dy[axes] } else { 1 };
    ensure(dy[0].is_multiple_of(parts[0]) && rows.is_multiple_of(parts[1]), || {
        format!("attribute 'parts': expected divisors of {} images and {rows} rows, found {parts:?}", dy[0])
    })?;
    let groups = groups as usize;
    let filters = [dy[1], x[1] / groups].into_iter().chain(sides.iter().map(|side| side.kernel)).collect();
    Ok(Positions { groups, filters, sides, parts })
}

/// The gradient as a convolution of the input by the gradient, over the images.
///
/// ```text
/// x [n, g c, in..]  -> [c, g n, in..]  --.
/// dy [g o, n.., out..] ------------------'-> [c, g o, kernel..] -> [g o, c, kernel..]
/// ```
fn as_convolution<'g>(x: Var<'g>, dy: Var<'g>, group: usize, sides: &[Side]) -> OpResult<Var<'g>> {
    let (input, rank) = (x.shape()?, sides.len() + 2);
    let (images, channels) = (input[0], input[1] / group);
    let mut axes: Vec<usize> = (0..rank + 1).collect();
    axes.swap(0, 2);
    let split = x.shaped(&[&[images, group, channels], &input[2..]].concat()).transpose(&axes);
    let data = split.shaped(&[&[channels, group * images], &input[2..]].concat());
    let mut axes: Vec<usize> = (0..rank).collect();
    axes.swap(0, 1);
    // Padding that no window reaches is left out.
    let turned = |s: &Side| {
        let spread = (s.out - 1) * s.stride + s.reach();
        Side { stride: s.dilation, dilation: s.stride, after: spread.saturating_sub(s.before + s.len), ..*s }
    };
    let attrs = window_attrs(&sides.iter().map(turned).collect::<Vec<_>>()).with("group", group as i64);
    let dw = data.op("plimsoll.Conv", &[dy.transpose(&axes)], attrs);
    // Elements of the data that no window reaches make it larger.
    let dw = sides.iter().enumerate().fold(dw, |dw, (k, side)| dw.part(k + 2, 0..side.kernel));
    Ok(dw.transpose(&axes))
}

/// Follows the definition: every position adds the products of its gradient and of the elements under its window.
fn eval(inputs: &Args<&[f64]>, call: &Call) -> OpResult<Vec<Vec<f64>>> {
    let (x, dy) = (inputs[0], inputs[1]);
    let Positions { groups, filters, sides, parts } = positions(call)?;
    let (kernel, taps) = taps(&sides);
    let (image, channels) = (spatial(call)?.iter().product::<usize>(), call.shape(0)[1]);
    let (shape, per_group, outputs) = (call.shape(1), filters[1], filters[0] / groups);
    let mut sums = vec![0.0; parts[0] * parts[1] * filters.numel()];
    for (gradient, index) in dy.iter().zip(indices(shape)) {
        let row = if sides.len() > 1 { index[sides.len()] * parts[1] / shape[sides.len()] } else { 0 };
        let part = index[0] * parts[0] / shape[0] * parts[1] + row;
        for t in &taps {
            let Some(at) = tap(&sides, &index[2..], t) else { continue };
            let t = position(t, &kernel);
            for c in 0..per_group {
                let channel = index[1] / outputs * per_group + c;
                let element = x[(index[0] * channels + channel) * image + at];
                let filter = (part * filters[0] + index[1]) * per_group + c;
                sums[filter * taps.len() + t] += gradient * element;
            }
        }
    }
    Ok(vec![sums])
}
