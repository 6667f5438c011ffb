//! Rows that move elements and compute nothing. Most are views, which cost nothing.

use super::{ensure, indices, moving, output, position, required_ints, same_dtype};
use crate::kernel::Template;
use crate::op::{
    Args, Attrs, Back, Call, Eval, Fact, Input, Lower, Nodes, OpDef, OpResult, Part, TemplateCall, Var, inputs, names,
};
use crate::shape::{Access, Shape};

const DATA: &[Input] = inputs![data];
const INPUT: &[Input] = inputs![input];
const DATA_AXES: &[Input] = inputs![data axes=];
const SLICE: &[Input] = inputs![data starts= ends= axes= steps=];

/// The row that stops folding: what it feeds is computed in the run. Without it, weights that are held in few bits would be folded to floats.
pub const AT_RUN: &str = "plimsoll.AtRun";

/// The row that brings what lies in the host's memory to where kernels compute.
pub const FETCH: &str = "plimsoll.Fetch";

#[rustfmt::skip] // A table: one row, one line, where it fits.
pub(super) static OPS: &[OpDef] = &[
    // Views: the same elements in the same order
    moving("Flatten", "The axes before `axis` as one, and the others as one", INPUT, flatten, same, RESHAPE)
        .sample(|s| s.floats(&[&[2, 3, 4]]).attr("axis", 2))
        .attrs(names![axis])
        .part(regrouped),
    moving("Identity", "The input", INPUT, |c| Ok(vec![c.fact(0).clone()]), same, RESHAPE)
        .sample(|s| s.floats(&[&[2, 3, 4]]))
        .part(regrouped),
    moving(AT_RUN, "The input. Nothing behind it is computed before the run", INPUT, |c| Ok(vec![c.fact(0).clone()]), same, RESHAPE)
        .sample(|s| s.floats(&[&[2, 3, 4]]))
        .part(regrouped),
    OpDef::new(FETCH, "The input, copied from the memory of the host to that of the device", INPUT, |c| Ok(vec![c.fact(0).clone()]),
        Eval::Move(|x, _| Ok(vec![x[0].to_vec()])),
        Lower::Template(|c, x| Ok(TemplateCall { template: Template::Map, shape: c.shape(0).clone(), reads: vec![(0, x[0].clone())] })))
        .grad(|_, _, back| Ok(vec![Some(back.first()?)]))
        .alone()
        .part(|_, axis, _| Part::of([Some(axis)]))
        .sample(|s| s.floats(&[&[2, 3, 4]])),
    moving("Reshape", "The elements in the same order under another shape", inputs![data shape=], reshape,
        same, RESHAPE)
        .sample(|s| s.floats(&[&[2, 3, 4]]).ints("shape", &[4, 6]))
        .attrs(names![allowzero])
        .part(|c, axis, units| Some(Part { extents: Some("shape"), ..regrouped(c, axis, units)? })),
    moving("Squeeze", "Without axes of extent 1", DATA_AXES, squeeze, same, RESHAPE)
        .sample(|s| s.floats(&[&[1, 3, 1, 2]]).ints("axes", &[-2]))
        // A part may have other axes of extent 1 than the whole.
        .part(|c, axis, units| c.attrs.get("axes").and_then(|_| regrouped(c, axis, units))),
    moving("Unsqueeze", "With more axes of extent 1", DATA_AXES, unsqueeze, same, RESHAPE)
        .sample(|s| s.floats(&[&[3, 2]]).ints("axes", &[0, -1]))
        .part(regrouped),
    // Views: other strides
    moving("Expand", "Broadcast to a shape", inputs![input shape=], expand,
        |x, c| rearrange(x, c, |index, shape| {
            let skip = index.len() - shape.len();
            shape.iter().zip(&index[skip..]).map(|(&d, &i)| if d == 1 { 0 } else { i }).collect()
        }),
        Lower::View(|c, a| Some(a.broadcast(&expand(c).ok()?[0].shape))))
        .grad(|_, _, back| Ok(vec![Some(back.first()?)]))
        .sample(|s| s.floats(&[&[3, 1]]).ints("shape", &[2, 3, 4]))
        .part(|c, axis, _| {
            Some(Part { extents: Some("shape"), ..c.broadcast_part(&expand(c).ok()?[0].shape, axis) })
        }),
    moving("Slice", "From `starts` to `ends` along `axes`, every `steps`-th element", SLICE, slice,
        |x, c| {
            let spans = spans(c)?;
            let start = |k: usize, i: usize| (spans[k].start as i64 + i as i64 * spans[k].step) as usize;
            rearrange(x, c, |index, _| index.iter().enumerate().map(|(k, &i)| start(k, i)).collect())
        },
        Lower::View(|c, a| {
            let spans = spans(c).ok()?;
            Some(spans.iter().enumerate().fold(a.clone(), |a, (k, s)| a.slice(k, s.start, s.step as isize, s.len)))
        }))
        .grad(slice_grad)
        .sample(|s| s.floats(&[&[4, 3, 5]]).ints("starts", &[1, 0]).ints("ends", &[3, 4]).ints("axes", &[0, 2]).ints("steps", &[1, 2]))
        .part(|c, axis, _| {
            let Span { start, step, len } = spans(c).ok()?.swap_remove(axis);
            if (start, step, len) == (0, 1, c.shape(0)[axis]) { Part::of([Some(axis)]) } else { None }
        }),
    moving("Transpose", "The axes in the order of `perm`; reversed without it", DATA, transpose,
        |x, c| {
            let perm = permutation(c)?;
            rearrange(x, c, |index, shape| {
                let mut source = vec![0; shape.len()];
                perm.iter().zip(index).for_each(|(&axis, &i)| source[axis] = i);
                source
            })
        },
        Lower::View(|c, a| Some(a.permute(&permutation(c).ok()?))))
        .grad(|_, c, back| {
            let perm = permutation(c)?;
            let inverse: Vec<_> = (0..perm.len()).map(|axis| perm.iter().position(|&p| p == axis).expect("it is one of them")).collect();
            Ok(vec![Some(back.first()?.transpose(&inverse))])
        })
        .sample(|s| s.floats(&[&[2, 3, 4, 5]]).ints("perm", &[0, 2, 1, 3]))
        .attrs(names![perm])
        .part(|c, axis, _| Part::of([Some(permutation(c).ok()?[axis])])),
    // Several inputs or outputs
    moving("Concat", "The inputs one after another along `axis`", inputs![inputs*], concat, concat_eval,
        Lower::Concat)
        .sample(|s| s.floats(&[&[2, 3], &[2, 4]]).attr("axis", 1))
        .attrs(names![axis]),
    moving("Split", "Consecutive parts along `axis`", inputs![input split=], split,
        |x, c| {
            let (axis, sizes) = parts(c)?;
            let mut at = 0;
            let mut outputs = Vec::new();
            for (size, fact) in sizes.into_iter().zip(split(c)?) {
                outputs.push(pick(x, c.shape(0), &fact.shape, |index, _| {
                    let mut source = index.to_vec();
                    source[axis] += at;
                    source
                })?);
                at += size;
            }
            Ok(outputs)
        },
        Lower::Decompose(|_, c, x| {
            let (axis, sizes) = parts(c)?;
            let mut end = 0;
            let part = |size: usize| {
                let start = end;
                end += size;
                x[0].op("Slice", &[], Attrs::span(axis, start..end))
            };
            Ok(sizes.into_iter().map(part).collect())
        }))
        .grad(|b, call, back| {
            // The parts of one gradient, which are written where they belong. What nothing depends on is zero.
            let zeros = |fact: Fact| b.scalar(0.0, fact.dtype).expand(&fact.shape);
            let parts: Vec<_> = split(call)?.into_iter().zip(back.dy).map(|(fact, dy)| dy.unwrap_or_else(|| zeros(fact))).collect();
            Ok(vec![Some(b.concat(&parts, call.int("axis", 0)?))])
        })
        .sample(|s| s.floats(&[&[7, 2]]).attr("num_outputs", 3))
        .attrs(names![axis num_outputs]),
    // Rearrangements
    moving("DepthToSpace", "Blocks of channels become blocks of pixels", INPUT, depth_to_space,
        |x, c| {
            let (depth, block) = (depth_to_space(c)?[0].shape[1], blocksize(c)?);
            let columns_first = columns_first(c)?;
            rearrange(x, c, |i, _| {
                let at = i[2] % block * block + i[3] % block;
                let channel = if columns_first { i[1] * block * block + at } else { at * depth + i[1] };
                vec![i[0], channel, i[2] / block, i[3] / block]
            })
        },
        Lower::Decompose(|_, c, x| {
            let (s, k) = (c.shape(0), blocksize(c)?);
            let depth = s[1] / (k * k);
            if columns_first(c)? {
                shuffle(c, x[0], &[s[0], depth, k, k, s[2], s[3]], &[0, 1, 4, 2, 5, 3])
            } else {
                shuffle(c, x[0], &[s[0], k, k, depth, s[2], s[3]], &[0, 3, 4, 1, 5, 2])
            }
        }))
        .sample(|s| s.floats(&[&[1, 9, 1, 2]]).attr("blocksize", 3))
        .attrs(names![blocksize mode]),
    moving("SpaceToDepth", "Blocks of pixels become blocks of channels", INPUT, space_to_depth,
        |x, c| {
            let (depth, block) = (c.shape(0)[1], blocksize(c)?);
            let columns_first = columns_first(c)?;
            rearrange(x, c, |i, _| {
                let (channel, at) =
                    if columns_first { (i[1] / (block * block), i[1] % (block * block)) } else { (i[1] % depth, i[1] / depth) };
                vec![i[0], channel, i[2] * block + at / block, i[3] * block + at % block]
            })
        },
        Lower::Decompose(|_, c, x| {
            let (s, k) = (c.shape(0), blocksize(c)?);
            let perm = if columns_first(c)? { [0, 1, 3, 5, 2, 4] } else { [0, 3, 5, 1, 2, 4] };
            shuffle(c, x[0], &[s[0], s[1], s[2] / k, k, s[3] / k, k], &perm)
        }))
        .sample(|s| s.floats(&[&[2, 3, 4, 6]]).attr("blocksize", 2))
        .attrs(names![blocksize mode]),
    moving("Tile", "The input repeated along each axis", inputs![input repeats=], tile,
        |x, c| rearrange(x, c, |index, shape| index.iter().zip(shape.iter()).map(|(&i, &d)| i % d).collect()),
        Lower::Decompose(|_, c, x| {
            let (from, to) = (c.shape(0), &tile(c)?[0].shape);
            let (mut once, mut often) = (Vec::new(), Vec::new());
            for (&d, &n) in from.iter().zip(to.iter()) {
                let repeats = n.checked_div(d).unwrap_or(0);
                once.extend([1, d]);
                often.extend([repeats, d]);
            }
            Ok(vec![x[0].shaped(&once).expand(&often).shaped(to)])
        })).sample(|s| s.floats(&[&[2, 3]]).ints("repeats", &[2, 2])),
];

/// The input's elements in their order, under the shape that the row infers.
const RESHAPE: Lower = Lower::View(|call: &Call, access: &Access| access.reshape(&call.infer().ok()?[0].shape));

/// Splits a row that keeps the order of elements: an axis of the input is split into the same units if as many
/// elements precede it.
fn regrouped(call: &Call, axis: usize, units: usize) -> Option<Part> {
    let (from, to) = (call.shape(0), &call.infer().ok()?[0].shape);
    let outer = |shape: &Shape, axis: usize| shape[..axis].iter().product::<usize>();
    let same = |&k: &usize| outer(from, k) == outer(to, axis) && from[k].is_multiple_of(units);
    Part::of([Some((0..from.len()).find(same)?)])
}

fn same(x: &Args<&[f64]>, _: &Call) -> OpResult<Vec<Vec<f64>>> {
    Ok(vec![x[0].to_vec()])
}

/// Fills the first output from input 0: `source` gives the index to read for an index of the output and the input's
/// shape.
fn rearrange(
    x: &Args<&[f64]>,
    call: &Call,
    source: impl Fn(&[usize], &Shape) -> Vec<usize>,
) -> OpResult<Vec<Vec<f64>>> {
    Ok(vec![pick(x, call.shape(0), &call.infer()?[0].shape, source)?])
}

fn pick(
    x: &Args<&[f64]>,
    from: &Shape,
    to: &Shape,
    source: impl Fn(&[usize], &Shape) -> Vec<usize>,
) -> OpResult<Vec<f64>> {
    let x = x[0];
    Ok(indices(to).map(|index| x[position(&source(&index, from), from)]).collect())
}

/// Reshapes, transposes, and reshapes to what the row infers.
fn shuffle<'g>(call: &Call, x: Var<'g>, split: &[usize], perm: &[usize]) -> OpResult<Vec<Var<'g>>> {
    Ok(vec![x.shaped(split).transpose(perm).shaped(&call.infer()?[0].shape)])
}

fn flatten(call: &Call) -> OpResult<Vec<Fact>> {
    let (shape, axis) = (call.shape(0), call.int("axis", 1)?);
    let rank = shape.len() as i64;
    ensure(axis >= -rank && axis <= rank, || format!("attribute 'axis': axis {axis} is outside {shape}"))?;
    let (outer, inner) = shape.split_at(if axis < 0 { axis + rank } else { axis } as usize);
    output(call.dtype(0), vec![outer.iter().product(), inner.iter().product()])
}

fn reshape(call: &Call) -> OpResult<Vec<Fact>> {
    let (from, to) = (call.shape(0), required_ints(call, "shape")?);
    let keep_zeros = call.int("allowzero", 0)? != 0;
    let refuse = || format!("cannot reshape {from} to {to:?}");
    let mut shape = Vec::with_capacity(to.len());
    let mut open = None;
    for (k, &dim) in to.iter().enumerate() {
        shape.push(match dim {
            0 if !keep_zeros => *from.get(k).ok_or_else(refuse)?,
            -1 if open.is_none() => {
                open = Some(k);
                1
            }
            dim => usize::try_from(dim).map_err(|_| refuse())?,
        });
    }
    let mut shape = Shape::new(shape);
    let known = shape.checked_len().ok_or_else(refuse)?;
    if let Some(k) = open {
        shape[k] = from.numel().checked_div(known).ok_or_else(refuse)?;
    }
    if shape.checked_len() == Some(from.numel()) { output(call.dtype(0), shape) } else { Err(refuse()) }
}

fn squeeze(call: &Call) -> OpResult<Vec<Fact>> {
    let shape = call.shape(0);
    let axes = match call.listed_axes()? {
        None => (0..shape.len()).filter(|&k| shape[k] == 1).collect(),
        Some(axes) => axes,
    };
    if let Some(axis) = axes.iter().find(|&&k| shape[k] != 1) {
        return Err(format!("attribute 'axes': expected extent 1 at axis {axis}, found {}", shape[*axis]));
    }
    let kept = (0..shape.len()).filter(|k| !axes.contains(k)).map(|k| shape[k]);
    output(call.dtype(0), kept.collect::<Shape>())
}

fn unsqueeze(call: &Call) -> OpResult<Vec<Fact>> {
    let (shape, axes) = (call.shape(0), required_ints(call, "axes")?);
    let rank = shape.len() + axes.len();
    let mut new = vec![false; rank];
    for &axis in axes.iter() {
        let at = if axis < 0 { axis.saturating_add(rank as i64) } else { axis };
        match usize::try_from(at).ok().and_then(|at| new.get_mut(at)) {
            Some(slot) if !*slot => *slot = true,
            Some(_) => return Err(format!("attribute 'axes': axis {axis} is given twice")),
            None => return Err(format!("attribute 'axes': axis {axis} is outside rank {rank}")),
        }
    }
    let mut dims = shape.iter().copied();
    output(call.dtype(0), new.iter().map(|&new| if new { 1 } else { dims.next().unwrap_or(1) }).collect::<Shape>())
}

fn expand(call: &Call) -> OpResult<Vec<Fact>> {
    let (from, to) = (call.shape(0), required_ints(call, "shape")?);
    let refuse = || format!("cannot expand {from} to {to:?}");
    let target = to.iter().map(|&d| usize::try_from(d)).collect::<Result<Shape, _>>().map_err(|_| refuse())?;
    output(call.dtype(0), Shape::broadcast([from, &target]).ok_or_else(refuse)?)
}

/// The elements that a Slice takes along one axis.
pub struct Span {
    pub start: usize,
    pub step: i64,
    pub len: usize,
}

/// The spans of a Slice along all axes, clamped as the specification says.
pub fn spans(call: &Call) -> OpResult<Vec<Span>> {
    let shape = call.shape(0);
    let (starts, ends) = (required_ints(call, "starts")?, required_ints(call, "ends")?);
    let (axes, steps) = (call.ints("axes")?, call.ints("steps")?);
    let lens = [Some(&ends), axes.as_ref(), steps.as_ref()].map(|l| l.map_or(starts.len(), |l| l.len()));
    if lens.iter().any(|&len| len != starts.len()) {
        return Err(format!("expected as many ends, axes and steps as starts ({}), found {lens:?}", starts.len()));
    }
    let mut spans: Vec<_> = shape.iter().map(|&len| (Span { start: 0, step: 1, len }, false)).collect();
    for (k, (&start, &end)) in starts.iter().zip(ends.iter()).enumerate() {
        let (axis, step) = (axes.as_ref().map_or(k as i64, |a| a[k]), steps.as_ref().map_or(1, |s| s[k]));
        let at = shape.axis(axis).ok_or_else(|| format!("input 'axes': axis {axis} is outside {shape}"))?;
        if step == 0 || spans[at].1 {
            return Err(format!("input 'steps': expected one step other than 0 for axis {axis}, found {steps:?}"));
        }
        spans[at] = (span(start, end, step, shape[at]), true);
    }
    Ok(spans.into_iter().map(|(span, _)| span).collect())
}

/// Computed in 128 bits: bounds reach to the extremes of 64 bits.
fn span(start: i64, end: i64, step: i64, extent: usize) -> Span {
    let (d, s) = (extent as i128, i128::from(step));
    let from_end = |i: i64| i128::from(i) + if i < 0 { d } else { 0 };
    let (start, distance) = match (s > 0, d) {
        (_, 0) => (0, 0),
        (true, _) => {
            let start = from_end(start).clamp(0, d);
            (start, from_end(end).clamp(0, d) - start)
        }
        (false, _) => {
            let start = from_end(start).clamp(0, d - 1);
            (start, start - from_end(end).clamp(-1, d - 1))
        }
    };
    let len = (distance + s.abs() - 1).div_euclid(s.abs()).max(0);
    // With at most one element the step is never taken, and may be too large for a stride.
    Span { start: start as usize, step: if len > 1 { step } else { 1 }, len: len as usize }
}

/// Zeros between and around the elements that the slice takes.
fn slice_grad<'g>(_: Nodes<'g>, call: &Call, back: &Back<'_, 'g>) -> OpResult<Vec<Option<Var<'g>>>> {
    let mut dx = back.first()?;
    for (axis, span) in spans(call)?.iter().enumerate() {
        dx = spread(dx, axis, span, call.shape(0)[axis])?;
    }
    Ok(vec![Some(dx)])
}

/// The inverse of a slice along one axis: its elements where they were taken from, and zeros elsewhere.
pub fn spread<'g>(x: Var<'g>, axis: usize, span: &Span, extent: usize) -> OpResult<Var<'g>> {
    let &Span { start, step, len } = span;
    if (start, step, len) == (0, 1, extent) {
        return Ok(x);
    }
    let stride = step.unsigned_abs() as usize;
    let mut y = x;
    let mut start = start;
    if step < 0 && len > 1 {
        let attrs = Attrs::new().with("axes", vec![axis as i64]).with("steps", vec![-1]);
        y = y.op("Slice", &[], attrs.with("starts", vec![i64::MAX]).with("ends", vec![i64::MIN]));
        start -= (len - 1) * stride;
    }
    let mut taken = len;
    if stride > 1 && len > 1 {
        // A column of zeros behind each element, but the last.
        let mut split = x.shape()?.to_vec();
        split.insert(axis + 1, 1);
        let wide = pad(y.shaped(&split), axis + 1, 0, stride - 1);
        split.remove(axis + 1);
        split[axis] = len * stride;
        taken = (len - 1) * stride + 1;
        y = wide.shaped(&split).part(axis, 0..taken);
    }
    Ok(pad(y, axis, start, extent - start - taken))
}

/// Zeros before and after a value, along one axis.
pub(super) fn pad(x: Var, axis: usize, before: usize, after: usize) -> Var {
    let Ok(shape) = x.shape() else { return x };
    if (before, after) == (0, 0) {
        return x;
    }
    let mut pads = vec![0; 2 * shape.len()];
    (pads[axis], pads[shape.len() + axis]) = (before as i64, after as i64);
    x.op("Pad", &[], Attrs::new().with("pads", pads))
}

fn slice(call: &Call) -> OpResult<Vec<Fact>> {
    output(call.dtype(0), spans(call)?.iter().map(|s| s.len).collect::<Shape>())
}

fn permutation(call: &Call) -> OpResult<Vec<usize>> {
    let rank = call.shape(0).len();
    let Some(perm) = call.ints("perm")? else { return Ok((0..rank).rev().collect()) };
    let axes: Vec<_> = perm.iter().filter_map(|&a| usize::try_from(a).ok()).collect();
    ensure(axes.len() == rank && perm.len() == rank && (0..rank).all(|k| axes.contains(&k)), || {
        format!("attribute 'perm': expected a permutation of {rank} axes, found {perm:?}")
    })?;
    Ok(axes)
}

fn transpose(call: &Call) -> OpResult<Vec<Fact>> {
    output(call.dtype(0), permutation(call)?.iter().map(|&axis| call.shape(0)[axis]).collect::<Shape>())
}

fn concat(call: &Call) -> OpResult<Vec<Fact>> {
    let (dtype, first) = (same_dtype(call)?, call.shape(0));
    ensure(call.attrs.get("axis").is_some(), || "attribute 'axis' is required".to_owned())?;
    let axis = call.axis("axis", 0, first)?;
    let mut out = first.clone();
    for input in 1..call.inputs.len() {
        let shape = call.shape(input);
        if shape.len() != first.len() || (0..first.len()).any(|k| k != axis && shape[k] != first[k]) {
            return Err(format!("expected shapes that differ only at axis {axis}, found {first} and {shape}"));
        }
        out[axis] = out[axis].checked_add(shape[axis]).ok_or("the extents overflow")?;
    }
    output(dtype, out)
}

fn concat_eval(x: &Args<&[f64]>, call: &Call) -> OpResult<Vec<Vec<f64>>> {
    let (axis, shape) = (call.axis("axis", 0, call.shape(0))?, &call.infer()?[0].shape);
    let element = |mut index: Vec<usize>| {
        let mut input = 0;
        while index[axis] >= call.shape(input)[axis] {
            index[axis] -= call.shape(input)[axis];
            input += 1;
        }
        x[input][position(&index, call.shape(input))]
    };
    Ok(vec![indices(shape).map(element).collect()])
}

/// Upper bound of the outputs of a Split.
const MOST_PARTS: usize = 1 << 16;

/// The axis of a Split and the extents of its parts.
fn parts(call: &Call) -> OpResult<(usize, Vec<usize>)> {
    let axis = call.axis("axis", 0, call.shape(0))?;
    let extent = call.shape(0)[axis];
    if let Some(split) = call.ints("split")? {
        let sizes: Option<Vec<_>> = split.iter().map(|&s| usize::try_from(s).ok()).collect();
        let sizes =
            sizes.filter(|s| Shape::new(&s[..]).iter().try_fold(0usize, |n, &s| n.checked_add(s)) == Some(extent));
        return Ok((axis, sizes.ok_or(format!("input 'split': expected parts of {extent}, found {split:?}"))?));
    }
    let count = call.int("num_outputs", 0)?;
    let most = extent.clamp(1, MOST_PARTS);
    if !(1..=most as i64).contains(&count) {
        return Err(format!("attribute 'num_outputs': expected 1 to {most}, found {count}"));
    }
    let size = extent.div_ceil(count as usize);
    Ok((axis, (0..count as usize).map(|i| size.min(extent.saturating_sub(i * size))).collect()))
}

fn split(call: &Call) -> OpResult<Vec<Fact>> {
    let (axis, sizes) = parts(call)?;
    let part = |size| {
        let mut shape = call.shape(0).clone();
        shape[axis] = size;
        Fact::new(call.dtype(0), shape)
    };
    Ok(sizes.into_iter().map(part).collect())
}

fn blocksize(call: &Call) -> OpResult<usize> {
    match call.int("blocksize", 0)? {
        size @ 1..=65535 => Ok(size as usize),
        other => Err(format!("attribute 'blocksize': expected 1 to 65535, found {other}")),
    }
}

/// True if the channels of a block are in the order column, row, depth.
fn columns_first(call: &Call) -> OpResult<bool> {
    call.choice("mode", &[("DCR", false), ("CRD", true)])
}

fn depth_to_space(call: &Call) -> OpResult<Vec<Fact>> {
    let (shape, k) = (call.shape(0), blocksize(call)?);
    columns_first(call)?;
    let more = |extent: usize| extent.checked_mul(k).ok_or("the extents overflow");
    match shape[..] {
        [n, c, h, w] if c % (k * k) == 0 => output(call.dtype(0), vec![n, c / (k * k), more(h)?, more(w)?]),
        _ => Err(format!("expected [n,c,h,w] with c a multiple of {}, found {shape}", k * k)),
    }
}

fn space_to_depth(call: &Call) -> OpResult<Vec<Fact>> {
    columns_first(call)?;
    let (shape, k) = (call.shape(0), blocksize(call)?);
    match shape[..] {
        [n, c, h, w] if h % k == 0 && w % k == 0 => {
            let depth = c.checked_mul(k * k).ok_or("the extents overflow")?;
            output(call.dtype(0), vec![n, depth, h / k, w / k])
        }
        _ => Err(format!("expected [n,c,h,w] with h and w multiples of {k}, found {shape}")),
    }
}

fn tile(call: &Call) -> OpResult<Vec<Fact>> {
    let (shape, repeats) = (call.shape(0), required_ints(call, "repeats")?);
    let refuse = || format!("input 'repeats': expected a count for each axis of {shape}, found {repeats:?}");
    ensure(repeats.len() == shape.len(), refuse)?;
    let extent = |(&d, &n): (&usize, &i64)| usize::try_from(n).ok().and_then(|n| d.checked_mul(n)).ok_or_else(refuse);
    output(call.dtype(0), shape.iter().zip(repeats.iter()).map(extent).collect::<OpResult<Shape>>()?)
}

#[cfg(test)]
mod tests {
    use crate::dtype::DType::{self, *};
    use crate::op::Attrs;
    use crate::ops::tests::{Input, eval, refused};

    fn ints(name: &str, values: &[i64]) -> Attrs {
        Attrs::new().with(name, values.to_vec())
    }

    #[test]
    fn reshape_follows_the_specification() {
        let reshaped = |from: &[usize], attrs: &Attrs| eval("Reshape", &[(F32, from, &[])], attrs).0;
        for (to, expected) in [(&[4, 2, 0][..], "f32[4,2,0]"), (&[0, 6, 0], "f32[0,6,0]")] {
            assert_eq!(reshaped(&[0, 3, 4], &ints("shape", to).with("allowzero", 1)), expected);
        }
        let of = |to: &[i64]| eval("Reshape", &[(F32, &[2, 3, 4], &[0.0; 24])], &ints("shape", to)).0;
        assert_eq!(of(&[4, 2, 3]), "f32[4,2,3]");
        assert_eq!(of(&[-1, 6]), "f32[4,6]");
        assert_eq!(of(&[2, 0, 1, -1]), "f32[2,3,1,4]");
        for to in [&[5, -1][..], &[-1, -1], &[-2, 12], &[24, 1, 1, 0], &[0, 0], &[i64::MAX, i64::MAX, 2]] {
            let message = refused("Reshape", &[(F32, &[2, 3, 4])], &ints("shape", to));
            assert_eq!(message, format!("cannot reshape [2,3,4] to {to:?}"));
        }
        assert_eq!(refused("Reshape", &[(F32, &[])], &Attrs::new()), "'shape' is required and must be a constant");
    }

    #[test]
    fn slice_follows_the_specification() {
        let x: &[Input] = &[(F32, &[2, 4], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])];
        let cut = |starts: &[i64], ends: &[i64], axes: &[i64], steps: &[i64]| {
            eval(
                "Slice",
                x,
                &ints("starts", starts)
                    .with("ends", ends.to_vec())
                    .with("axes", axes.to_vec())
                    .with("steps", steps.to_vec()),
            )
            .1
        };
        assert_eq!(cut(&[1, 0], &[2, 3], &[0, 1], &[1, 2]), [5.0, 7.0]);
        assert_eq!(eval("Slice", x, &ints("starts", &[0, 1]).with("ends", vec![-1, 1000])).1, [2.0, 3.0, 4.0]);
        assert_eq!(cut(&[i64::MAX], &[i64::MIN], &[-1], &[-1]), [4.0, 3.0, 2.0, 1.0, 8.0, 7.0, 6.0, 5.0]);
        assert_eq!(cut(&[-1], &[-4], &[1], &[-2]), [4.0, 2.0, 8.0, 6.0]);
        assert_eq!(cut(&[0], &[i64::MAX], &[1], &[i64::MAX]), [1.0, 5.0]);
        assert_eq!(cut(&[3], &[i64::MIN], &[1], &[i64::MIN]), [4.0, 8.0]);
        assert!(cut(&[3], &[1], &[1], &[1]).is_empty());
        let facts: &[(DType, &[usize])] = &[(F32, &[2, 4])];
        for (attrs, part) in [
            (ints("starts", &[0]).with("ends", vec![1]).with("steps", vec![0]), "input 'steps': "),
            (ints("starts", &[0]).with("ends", vec![1, 2]), "expected as many ends"),
            (ints("starts", &[0]).with("ends", vec![1]).with("axes", vec![2]), "input 'axes': axis 2 is outside [2,4]"),
            (ints("starts", &[0, 0]).with("ends", vec![1, 1]).with("axes", vec![1, -1]), "input 'steps': "),
        ] {
            assert!(refused("Slice", facts, &attrs).starts_with(part), "{}", refused("Slice", facts, &attrs));
        }
    }

    #[test]
    fn shapes_follow_the_specification() {
        let shape =
            |op, from: &[usize], attrs: &Attrs| eval(op, &[(F32, from, &vec![0.0; from.iter().product()])], attrs).0;
        let none = Attrs::new();
        let axis = |axis: i64| Attrs::new().with("axis", axis);
        assert_eq!(shape("Flatten", &[2, 3, 4], &none), "f32[2,12]");
        assert_eq!(
            (shape("Flatten", &[2, 3], &axis(0)), shape("Flatten", &[2, 3], &axis(2))),
            ("f32[1,6]".into(), "f32[6,1]".into())
        );
        assert_eq!(
            (shape("Flatten", &[2, 3, 4], &axis(-1)), shape("Flatten", &[], &axis(0))),
            ("f32[6,4]".into(), "f32[1,1]".into())
        );
        assert_eq!(shape("Squeeze", &[1, 3, 1], &none), "f32[3]");
        assert_eq!(shape("Squeeze", &[1, 3, 1], &ints("axes", &[-1])), "f32[1,3]");
        assert_eq!(shape("Unsqueeze", &[3], &ints("axes", &[-1, 0])), "f32[1,3,1]");
        assert_eq!(shape("Expand", &[3, 1], &ints("shape", &[2, 1, 6])), "f32[2,3,6]");
        assert_eq!(shape("Expand", &[3, 4], &ints("shape", &[1])), "f32[3,4]");
        assert_eq!(shape("Transpose", &[2, 3, 4], &none), "f32[4,3,2]");
        assert_eq!(shape("Tile", &[2, 3], &ints("repeats", &[2, 0])), "f32[4,0]");
        assert_eq!(
            refused("Squeeze", &[(F32, &[3])], &ints("axes", &[0])),
            "attribute 'axes': expected extent 1 at axis 0, found 3"
        );
        assert_eq!(
            refused("Unsqueeze", &[(F32, &[3])], &ints("axes", &[2, -1])),
            "attribute 'axes': axis -1 is given twice"
        );
        assert_eq!(refused("Expand", &[(F32, &[3])], &ints("shape", &[2])), "cannot expand [3] to [2]");
        assert_eq!(
            refused("Transpose", &[(F32, &[3, 2])], &ints("perm", &[0, 0])),
            "attribute 'perm': expected a permutation of 2 axes, found [0, 0]"
        );
        assert_eq!(
            refused("Concat", &[(F32, &[3, 2]), (F32, &[2, 3])], &axis(0)),
            "expected shapes that differ only at axis 0, found [3,2] and [2,3]"
        );
        assert_eq!(refused("Concat", &[(F32, &[3])], &none), "attribute 'axis' is required");
        assert!(refused("Flatten", &[(F32, &[0, 1 << 62, 1 << 62])], &none).ends_with("larger than any memory"));
        assert!(
            refused("SpaceToDepth", &[(F32, &[1, 1 << 40, 0, 0])], &Attrs::new().with("blocksize", 65535))
                .ends_with("overflow")
        );
    }

    #[test]
    fn split_follows_the_specification() {
        let parts = |attrs: &Attrs| {
            crate::ops::tests::outputs("Split", &[(F32, &[7], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0])], attrs)
        };
        let uneven = parts(&Attrs::new().with("num_outputs", 3));
        assert_eq!(uneven.iter().map(|(_, v)| v.len()).collect::<Vec<_>>(), [3, 3, 1]);
        assert_eq!(uneven[1].1, [4.0, 5.0, 6.0]);
        assert_eq!(parts(&ints("split", &[2, 0, 5]))[2].1, [3.0, 4.0, 5.0, 6.0, 7.0]);
        assert_eq!(
            refused("Split", &[(F32, &[7])], &ints("split", &[2, 4])),
            "input 'split': expected parts of 7, found [2, 4]"
        );
        assert_eq!(
            refused("Split", &[(F32, &[7])], &Attrs::new()),
            "attribute 'num_outputs': expected 1 to 7, found 0"
        );
    }

    #[test]
    fn blocks_follow_the_specification() {
        let x: Vec<f64> = (0..48).map(f64::from).collect();
        let input: &[Input] = &[(F32, &[1, 8, 2, 3], &x)];
        let block = Attrs::new().with("blocksize", 2);
        let (fact, dcr) = eval("DepthToSpace", input, &block);
        assert_eq!((fact.as_str(), &dcr[..6]), ("f32[1,2,4,6]", &[0.0, 12.0, 1.0, 13.0, 2.0, 14.0][..]));
        assert_eq!(
            eval("DepthToSpace", input, &block.clone().with("mode", "CRD")).1[..6],
            [0.0, 6.0, 1.0, 7.0, 2.0, 8.0]
        );
        assert_eq!(eval("SpaceToDepth", &[(F32, &[1, 2, 4, 6], &dcr)], &block).1, x);
    }
}
