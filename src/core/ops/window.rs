//! Windows that slide over `[n, c, spatial..]`: convolutions and pools of one to three spatial axes.

use super::compose::composed;
use super::{along, ensure, expect_shape, indices, output, position, same_float};
use crate::dtype::DType;
use crate::expr::maximum;
use crate::kernel::{Pool, Template, Window};
use crate::op::{
    Args, Attrs, Back, Call, Eval, Fact, Lower, Nodes, OpDef, OpResult, Part, Sample, TemplateCall, Var, inputs, names,
};
use crate::shape::{Access, Shape};
use std::iter::zip;

pub(super) mod bytes;
pub(super) mod filters;
pub(super) mod sums;
pub mod taps;
pub(super) mod unpool;

pub(super) static OPS: &[OpDef] = &[
    OpDef::new(
        "Conv",
        "Convolution of [n, c, spatial..] with filters [o, c / group, kernel..], plus a bias per o",
        inputs![X W B?],
        infer_conv,
        Eval::Tensor(eval_conv),
        Lower::Decompose(|_, call, x| {
            let (_, group, sides) = conv(call)?;
            let attrs = window_attrs(&sides).with("group", group as i64);
            decompose_biased(x, "plimsoll.Conv", attrs)
        }),
    )
    .sample(|s| s.floats(&[&[2, 3, 8, 9], &[4, 3, 3, 2], &[4]]).ints("strides", &[2, 3]).ints("pads", &[1, 0, 2, 1]))
    .attrs(names![auto_pad dilations group kernel_shape pads strides]),
    OpDef::new(
        "plimsoll.Conv",
        "What Conv decomposes into: no bias, every attribute given, pads explicit",
        inputs![X W],
        infer_conv,
        Eval::Tensor(eval_conv),
        Lower::Template(|call, at| {
            let (shape, groups, sides) = conv(call)?;
            Ok(widened(Template::Conv { groups, window: window(&sides), padding: 0 }, &shape, at))
        }),
    )
    .grad(|_, call, back| {
        let (_, group, sides) = conv(call)?;
        let (x, w, dy) = (back.x[0], back.x[1], back.first()?);
        let dx = dy.op("plimsoll.ConvTranspose", &[w], adjoint(&sides).with("group", group as i64));
        Ok(vec![Some(dx), Some(x.op("plimsoll.ConvFilters", &[dy], filters::attrs(&sides, group)))])
    })
    .flop(|call| conv(call).map_or(0.0, |(shape, ..)| 2.0 * shape.numel() as f64 * taps_of(call)))
    .sample(|s| {
        s.floats(&[&[1, 4, 6, 6], &[4, 2, 3, 3]])
            .attr("group", 2)
            .ints("strides", &[1, 2])
            .ints("dilations", &[2, 1])
            .ints("pads", &[1, 0, 2, 1])
    })
    .attrs(names![dilations group pads strides])
    .part(images)
    .summed(|call| match conv(call) {
        Ok((_, 1, _)) => vec![vec![Some(1), Some(1)]],
        _ => Vec::new(),
    }),
    OpDef::new(
        "ConvTranspose",
        "The gradient of Conv by its input: [n, c, spatial..], filters [c, o / group, kernel..], plus a \
         bias per o",
        inputs![X W B?],
        infer_conv_transpose,
        Eval::Tensor(eval_conv_transpose),
        Lower::Decompose(|_, call, x| {
            let (_, group, sides) = conv_transpose(call)?;
            let surplus: Vec<i64> = sides.iter().map(|s| s.surplus as i64).collect();
            let attrs = window_attrs(&sides).with("group", group as i64).with("output_padding", surplus);
            decompose_biased(x, "plimsoll.ConvTranspose", attrs)
        }),
    )
    .sample(|s| {
        s.floats(&[&[1, 2, 3, 3], &[2, 2, 3, 3], &[2]])
            .ints("strides", &[2, 3])
            .ints("pads", &[1, 0, 0, 2])
            .ints("output_padding", &[1, 2])
    })
    .attrs(names![auto_pad dilations group kernel_shape output_padding output_shape pads strides]),
    OpDef::new(
        "plimsoll.ConvTranspose",
        "What ConvTranspose decomposes into: no bias, every attribute given, pads explicit",
        inputs![X W],
        infer_conv_transpose,
        Eval::Tensor(eval_conv_transpose),
        Lower::Template(|call, at| {
            let (shape, groups, sides) = conv_transpose(call)?;
            Ok(widened(Template::ConvTranspose { groups, window: window(&sides) }, &shape, at))
        }),
    )
    .grad(|_, call, back| {
        let (_, group, sides) = conv_transpose(call)?;
        let (x, w, dy) = (back.x[0], back.x[1], back.first()?);
        let dx = dy.op("plimsoll.Conv", &[w], window_attrs(&sides).with("group", group as i64));
        // Of the convolution whose gradient this row is, `dy` is the input.
        let reversed = |side: &Side| Side { len: side.out, out: side.len, ..*side };
        let sides: Vec<_> = sides.iter().map(reversed).collect();
        let dx = sides.iter().enumerate().fold(dx, |dx, (k, side)| dx.part(k + 2, 0..side.out));
        Ok(vec![Some(dx), Some(dy.op("plimsoll.ConvFilters", &[x], filters::attrs(&sides, group)))])
    })
    .flop(|call| 2.0 * call.shape(0).numel() as f64 * taps_of(call))
    .sample(|s| {
        s.floats(&[&[1, 4, 3, 3], &[4, 1, 3, 2]])
            .attr("group", 2)
            .ints("strides", &[2, 1])
            .ints("dilations", &[1, 2])
            .ints("pads", &[1, 0, 1, 1])
            .ints("output_padding", &[1, 0])
    })
    .attrs(names![dilations group output_padding pads strides])
    .part(images),
    composed(
        "MaxPool",
        "The maximum of each window of [n, c, spatial..], and where in the input it stands first",
        inputs![X],
        |_, call, x| {
            // A single holds every integer of 8 bits.
            let x = if call.dtype(0).is_byte() { x[0].cast(DType::F32) } else { x[0] };
            // Unread indices are dropped before they are decomposed in turn.
            let values = x.op("plimsoll.MaxPool", &[], call.attrs.clone());
            Ok(vec![values.cast(call.dtype(0)), x.op("plimsoll.MaxPoolIndices", &[values], call.attrs.clone())])
        },
    )
    .sample(POOLED)
    .attrs(MAX_POOL_ATTRS),
    OpDef::new(
        "plimsoll.MaxPool",
        "The first output of MaxPool",
        inputs![X],
        infer_pool,
        Eval::Tensor(eval_max),
        Lower::Template(|call, at| lower_pool(call, at, |_| Pool::Max)),
    )
    .grad(|_, call, back| {
        let dx = back.x[0].op("plimsoll.MaxPoolGrad", &[back.y[0], back.first()?], call.attrs.clone());
        Ok(vec![Some(dx)])
    })
    .sample(|s| s.floats(&[&[1, 2, 5, 5]]).ints("kernel_shape", &[2, 2]).ints("strides", &[2, 2]))
    .attrs(MAX_POOL_ATTRS)
    .part(planes),
    OpDef::new(
        "plimsoll.MaxPoolGrad",
        "The gradient of MaxPool by its input X, from the maxima Y and their gradient; the first maximum of a window has it",
        inputs![X Y dY],
        |call| {
            let expected = infer_pool(call)?.remove(0);
            for (input, name) in [(1, "Y"), (2, "dY")] {
                ensure(*call.fact(input) == expected, || {
                    format!("input '{name}': expected {expected}, found {}", call.fact(input))
                })?;
            }
            output(call.dtype(0), call.shape(0).clone())
        },
        Eval::Tensor(eval_max_grad),
        Lower::Template(|call, at| {
            let (_, sides) = pool(call)?;
            Ok(widened(Template::PoolGrad { window: window(&sides) }, call.shape(0), at))
        }),
    )
    .sample(|s| {
        let x = [3.0, 9.0, 1.0, 12.0, 7.0, 2.0, 14.0, 5.0, 10.0, 16.0, 4.0, 8.0, 6.0, 11.0, 13.0, 15.0];
        let reversed = x.into_iter().rev();
        let y = [9.0, 14.0, 14.0, 16.0, 16.0, 15.0, 15.0, 16.0, 16.0, 14.0, 16.0, 16.0];
        let dy = [0.5, -2.0, 1.0, 3.0, 4.0, -1.0, 2.5, 1.5, -3.0, 0.75, 5.0, 6.0];
        s.given(DType::F32, &[1, 2, 4, 4], &x.into_iter().chain(reversed).collect::<Vec<_>>())
            .given(DType::F32, &[1, 2, 2, 3], &y)
            .given(DType::F32, &[1, 2, 2, 3], &dy)
            .ints("kernel_shape", &[3, 2])
            .ints("strides", &[2, 1])
            .ints("pads", &[1, 0, 0, 0])
    })
    .attrs(MAX_POOL_ATTRS)
    .grad(|_, call, back| {
        // The derivative by a maximum's gradient is that by the element that has the maximum.
        let mut attrs = call.attrs.clone();
        attrs.remove("storage_order");
        let at = back.x[0].op("plimsoll.MaxPoolIndices", &[back.x[1]], attrs);
        let weights = back.first()?.shaped(&[call.shape(0).numel()]).op("Gather", &[at], Attrs::new());
        Ok(vec![None, None, Some(weights)])
    })
    .part(|_, axis, _| if axis < 2 { Part::of([Some(axis), Some(axis), Some(axis)]) } else { None }),
    OpDef::new(
        "plimsoll.MaxPoolIndices",
        "The second output of MaxPool, from its input and its first output",
        inputs![X Y],
        |call| {
            let expected = infer_pool(call)?.remove(0);
            ensure(*call.fact(1) == expected, || {
                format!("input 'Y': expected {expected}, the maxima of X, found {}", call.fact(1))
            })?;
            output(DType::I64, expected.shape)
        },
        Eval::Tensor(|inputs, call| Ok(vec![first_max(inputs, call)?])),
        Lower::Decompose(decompose_indices),
    )
    .sample(|s| {
        s.given(DType::F32, &[1, 1, 4], &[3.0, 1.0, 7.0, 5.0])
            .given(DType::F32, &[1, 1, 2], &[3.0, 7.0])
            .ints("kernel_shape", &[2])
            .ints("strides", &[2])
    })
    .attrs(MAX_POOL_ATTRS),
    OpDef::new(
        "AveragePool",
        "The mean of each window of [n, c, spatial..], padding left out unless count_include_pad",
        inputs![X],
        infer_pool,
        Eval::Tensor(|inputs, call| eval_pool(inputs, call, 0.0, |sum, x| sum + x, |sum, n| sum / n as f64)),
        Lower::Template(|call, at| {
            let padded = call.int("count_include_pad", 0)? != 0;
            let mean = |sides: &[Side]| {
                if padded { Pool::MeanPadded { pads_end: three(sides, 0, |s| s.after) } } else { Pool::Mean }
            };
            lower_pool(call, at, mean)
        }),
    )
    .grad(average_grad)
    .sample(POOLED)
    .attrs(names![auto_pad ceil_mode count_include_pad dilations kernel_shape pads strides])
    .part(planes),
    composed(
        "GlobalMaxPool",
        "The maximum over all spatial axes of [n, c, spatial..], which stay with extent 1",
        inputs![X],
        |_, call, x| Ok(vec![x[0].reduce_max(&image_axes(call)?, true)]),
    )
    .sample(|s| s.floats(&[&[2, 3, 4, 5]])),
    composed(
        "GlobalAveragePool",
        "The mean over all spatial axes of [n, c, spatial..], which stay with extent 1",
        inputs![X],
        |_, call, x| Ok(vec![x[0].reduce_mean(&image_axes(call)?, true)]),
    )
    .wide()
    .sample(|s| s.floats(&[&[2, 3, 4, 5]])),
];

/// Splits by image: images are independent.
fn images(_: &Call, axis: usize, _: usize) -> Option<Part> {
    if axis == 0 { Part::of([Some(0), None]) } else { None }
}

/// Splits by image or channel: channels are pooled independently.
fn planes(_: &Call, axis: usize, _: usize) -> Option<Part> {
    if axis < 2 { Part::of([Some(axis)]) } else { None }
}

const POOLED: fn(Sample) -> Sample =
    |s| s.floats(&[&[1, 3, 8, 7]]).ints("kernel_shape", &[3, 2]).ints("strides", &[2, 2]).ints("pads", &[1, 0, 1, 1]);
const MAX_POOL_ATTRS: &[&str] = names![auto_pad ceil_mode dilations kernel_shape pads storage_order strides];

/// A window along one spatial axis.
struct Side {
    /// The input's extent.
    len: usize,
    /// The window's extent.
    kernel: usize,
    stride: usize,
    dilation: usize,
    /// Padding before and after the input. In a transposed convolution, the elements cut from the output.
    before: usize,
    after: usize,
    /// Elements that a transposed convolution adds at the end.
    surplus: usize,
    /// The output's extent.
    out: usize,
}

/// The spatial extents of `[n, c, spatial..]`, checked to be one to three.
fn spatial<'a>(call: &Call<'a>) -> OpResult<&'a [usize]> {
    let x = call.shape(0);
    match x.len() {
        3..=5 => Ok(&x[2..]),
        _ => Err(format!("input 'X': expected [n, c, spatial..] with 1 to 3 spatial axes, found {x}")),
    }
}

/// An attribute with `axes` integers, none below `least`.
fn sizes(call: &Call, name: &str, axes: usize, default: usize, least: i64) -> OpResult<Vec<usize>> {
    let Some(values) = call.ints(name)? else { return Ok(vec![default; axes]) };
    ensure(values.len() == axes, || format!("attribute '{name}': expected {axes} values, found {values:?}"))?;
    // The bound keeps sums and products of attributes and extents far from overflow.
    let checked = |&v: &i64| (least..=i64::from(i32::MAX)).contains(&v).then_some(v as usize);
    values
        .iter()
        .map(checked)
        .collect::<Option<_>>()
        .ok_or_else(|| format!("attribute '{name}': expected values from {least} to {}, found {values:?}", i32::MAX))
}

#[derive(Clone, Copy, PartialEq)]
enum AutoPad {
    Explicit,
    Valid,
    SameUpper,
    SameLower,
}

impl AutoPad {
    fn new(call: &Call) -> OpResult<AutoPad> {
        let words = [
            ("NOTSET", AutoPad::Explicit),
            ("", AutoPad::Explicit),
            ("VALID", AutoPad::Valid),
            ("SAME_UPPER", AutoPad::SameUpper),
            ("SAME_LOWER", AutoPad::SameLower),
        ];
        call.choice("auto_pad", &words)
    }
}

/// The sides of a window of these extents. Padding and output follow later.
fn sides(call: &Call, kernel: &[usize]) -> OpResult<Vec<Side>> {
    let lens = spatial(call)?;
    let axes = lens.len();
    if let Some(shape) = call.ints("kernel_shape")?
        && !shape.iter().copied().eq(kernel.iter().map(|&k| k as i64))
    {
        return Err(format!("attribute 'kernel_shape': expected {kernel:?} as the input W has, found {shape:?}"));
    }
    if let Some(k) = kernel.iter().find(|k| !(1..=i32::MAX as usize).contains(*k)) {
        return Err(format!("expected window extents from 1 to {}, found {k}", i32::MAX));
    }
    if Shape::new(kernel).checked_len().is_none() {
        return Err(format!("expected a window with a countable number of elements, found {kernel:?}"));
    }
    let strides = sizes(call, "strides", axes, 1, 1)?;
    let dilations = sizes(call, "dilations", axes, 1, 1)?;
    let pads = match AutoPad::new(call)? {
        AutoPad::Explicit => sizes(call, "pads", 2 * axes, 0, 0)?,
        _ => vec![0; 2 * axes],
    };
    let side = |k: usize| Side {
        len: lens[k],
        kernel: kernel[k],
        stride: strides[k],
        dilation: dilations[k],
        before: pads[k],
        after: pads[axes + k],
        surplus: 0,
        out: 0,
    };
    Ok((0..axes).map(side).collect())
}

impl Side {
    /// Extent of the window with dilation.
    fn reach(&self) -> usize {
        (self.kernel - 1) * self.dilation + 1
    }

    /// The input element under element `t` of window `o`. `None` if it is padding.
    fn tap(&self, o: usize, t: usize) -> Option<usize> {
        (o * self.stride + t * self.dilation).checked_sub(self.before).filter(|&i| i < self.len)
    }

    /// The elements of window `o` that are inside the input.
    fn taps(&self, o: usize) -> std::ops::Range<usize> {
        let before = |end: usize| end.saturating_sub(o * self.stride).div_ceil(self.dilation).min(self.kernel);
        before(self.before)..before(self.before + self.len)
    }

    /// The elements of window `o` that are inside the padded input.
    fn within(&self, o: usize) -> usize {
        (self.before + self.len + self.after - o * self.stride).div_ceil(self.dilation).min(self.kernel)
    }

    /// Leaves out the elements at both ends of the window that are padding wherever it lies.
    fn cut(&mut self) {
        // Nothing is inside the data before this element. Padding in front is left where windows begin inside it alone.
        let first = self.before.saturating_sub((self.out - 1) * self.stride).div_ceil(self.dilation);
        let first = first.min(self.before / self.dilation);
        let end = (self.before + self.len).div_ceil(self.dilation).min(self.kernel);
        if self.len > 0 && first < end {
            (self.kernel, self.before) = (end - first, self.before - first * self.dilation);
        }
    }

    /// Splits `total` elements of padding, the odd one at the end for `SAME_UPPER`.
    fn split(&mut self, total: usize, auto: AutoPad) {
        self.before = if auto == AutoPad::SameUpper { total / 2 } else { total.div_ceil(2) };
        self.after = total - self.before;
    }

    /// Output extent and padding of a sliding window on spatial axis `axis`.
    fn slide(&mut self, axis: usize, auto: AutoPad, ceil: bool) -> OpResult<()> {
        if matches!(auto, AutoPad::SameUpper | AutoPad::SameLower) {
            let last = self.len.div_ceil(self.stride).saturating_sub(1) * self.stride;
            self.split((last + self.reach()).saturating_sub(self.len), auto);
        }
        let (len, reach) = (self.before + self.len + self.after, self.reach());
        let Some(room) = len.checked_sub(reach) else {
            return Err(format!(
                "spatial axis {axis}: expected extent {} + padding {} + {} to hold a window that reaches over {reach}",
                self.len, self.before, self.after
            ));
        };
        self.out = room / self.stride + 1;
        // Rounded up, a last window may reach beyond the padding, but none starts in the padding behind the data.
        let rounds = ceil && auto == AutoPad::Explicit && !room.is_multiple_of(self.stride);
        if rounds && self.out * self.stride < self.before + self.len {
            self.out += 1;
        }
        Ok(())
    }

    /// Output extent and cut of a transposed convolution.
    fn spread(&mut self, axis: usize, auto: AutoPad, wanted: Option<usize>) -> OpResult<()> {
        let spread = self.len.checked_sub(1).and_then(|n| n.checked_mul(self.stride)?.checked_add(self.reach()));
        let Some(spread) = spread.filter(|&n| n <= isize::MAX as usize) else {
            return Err(format!("spatial axis {axis}: expected a countable extent that is not 0, found {}", self.len));
        };
        let same = matches!(auto, AutoPad::SameUpper | AutoPad::SameLower);
        let Some(out) = wanted.or(same.then(|| self.len * self.stride)) else {
            let out = (spread + self.surplus).checked_sub(self.before + self.after).filter(|&out| out > 0);
            self.out = out.ok_or_else(|| {
                format!(
                    "spatial axis {axis}: expected pads that leave some of {} elements, found {} + {}",
                    spread + self.surplus,
                    self.before,
                    self.after
                )
            })?;
            return Ok(());
        };
        let most = spread + self.surplus + self.stride.max(self.dilation) - 1;
        if out == 0 || (out > most && !same) {
            return Err(format!("attribute 'output_shape': expected 1 to {most} on spatial axis {axis}, found {out}"));
        }
        self.split((spread + self.surplus).saturating_sub(out), auto);
        // Explicit pads and padding of the output that come to the same.
        self.after = (spread - self.before.min(spread)).saturating_sub(out);
        self.surplus = (out + self.before).saturating_sub(spread);
        self.out = out;
        Ok(())
    }
}

/// The explicit attributes of a `plimsoll.` row.
fn window_attrs(sides: &[Side]) -> Attrs {
    let ints = |f: fn(&Side) -> usize| sides.iter().map(f).collect::<Vec<_>>();
    let pads = [ints(|s| s.before), ints(|s| s.after)].concat();
    let (strides, dilations) = (ints(|s| s.stride), ints(|s| s.dilation));
    Attrs::new().with("pads", &pads[..]).with("strides", &strides[..]).with("dilations", &dilations[..])
}

/// One value per axis of three. Missing leading axes get `fill`.
fn three(sides: &[Side], fill: usize, f: impl Fn(&Side) -> usize) -> [usize; 3] {
    let mut out = [fill; 3];
    for (o, side) in zip(&mut out[3 - sides.len()..], sides) {
        *o = f(side);
    }
    out
}

fn window(sides: &[Side]) -> Window {
    Window {
        kernel: three(sides, 1, |s| s.kernel),
        strides: three(sides, 1, |s| s.stride),
        dilations: three(sides, 1, |s| s.dilation),
        pads: three(sides, 0, |s| s.before),
    }
}

/// `[n, c, spatial..]` with three spatial axes: axes of extent 1 are inserted before the spatial ones.
fn widen(shape: &[usize]) -> Shape {
    let units = std::iter::repeat_n(1, 5 - shape.len());
    shape[..2].iter().copied().chain(units).chain(shape[2..].iter().copied()).collect()
}

/// A template whose result and operands have three spatial axes.
fn widened(template: Template, shape: &[usize], at: &[Access]) -> TemplateCall {
    let read = |access: &Access| access.reshape(&widen(&access.shape)).expect("a unit axis needs no copy");
    TemplateCall { template, shape: widen(shape), reads: at.iter().map(read).enumerate().collect() }
}

/// The filters' shape, checked against the data's rank, and the number of groups.
fn filters<'a>(call: &Call<'a>) -> OpResult<(&'a Shape, usize)> {
    let (x, w) = (call.shape(0), call.shape(1));
    ensure(w.len() == spatial(call)?.len() + 2, || format!("input 'W': expected as many axes as X {x}, found {w}"))?;
    match call.int("group", 1)? {
        group @ 1.. => Ok((w, group as usize)),
        group => Err(format!("attribute 'group': expected 1 or more, found {group}")),
    }
}

/// The elements of the filters that one element of a convolution's output, or of a transposed one's input, meets.
fn taps_of(call: &Call) -> f64 {
    call.shape(1)[1..].iter().product::<usize>() as f64
}

/// Output shape, groups and sides of a convolution.
fn conv(call: &Call) -> OpResult<(Shape, usize, Vec<Side>)> {
    let x = call.shape(0);
    let (w, group) = filters(call)?;
    if w[1].checked_mul(group) != Some(x[1]) || !w[0].is_multiple_of(group) {
        return Err(format!(
            "expected filters [o, c / group, kernel..] with o divisible by group, found X {x}, W {w} and group \
         {group}"
        ));
    }
    let auto = AutoPad::new(call)?;
    let mut sides = sides(call, &w[2..])?;
    for (axis, side) in sides.iter_mut().enumerate() {
        side.slide(axis, auto, false)?;
    }
    Ok(([x[0], w[0]].into_iter().chain(sides.iter().map(|s| s.out)).collect(), group, sides))
}

/// Output shape, groups and sides of a transposed convolution.
fn conv_transpose(call: &Call) -> OpResult<(Shape, usize, Vec<Side>)> {
    let x = call.shape(0);
    let (w, group) = filters(call)?;
    let channels = w[1].checked_mul(group);
    let (Some(channels), true) = (channels, w[0] == x[1] && x[1].is_multiple_of(group)) else {
        return Err(format!(
            "expected filters [c, o / group, kernel..] with c divisible by group, found X {x}, W {w} and group \
         {group}"
        ));
    };
    let auto = AutoPad::new(call)?;
    let mut sides = sides(call, &w[2..])?;
    let surplus = sizes(call, "output_padding", sides.len(), 0, 0)?;
    let wanted = call.ints("output_shape")?.is_some().then(|| sizes(call, "output_shape", sides.len(), 0, 1));
    let wanted = wanted.transpose()?;
    for (axis, side) in sides.iter_mut().enumerate() {
        side.surplus = surplus[axis];
        side.spread(axis, auto, wanted.as_ref().map(|w| w[axis]))?;
    }
    Ok(([x[0], channels].into_iter().chain(sides.iter().map(|s| s.out)).collect(), group, sides))
}

fn biased(call: &Call, shape: Shape) -> OpResult<Vec<Fact>> {
    let dtype = same_float(call)?;
    let fits = !call.has(2) || call.shape(2)[..] == [shape[1]];
    expect_shape(call, 2, fits, format_args!("[{}], one bias per output channel", shape[1]))?;
    output(dtype, shape)
}

fn infer_conv(call: &Call) -> OpResult<Vec<Fact>> {
    biased(call, conv(call)?.0)
}

fn infer_conv_transpose(call: &Call) -> OpResult<Vec<Fact>> {
    biased(call, conv_transpose(call)?.0)
}

/// Decomposes into the row without bias, and adds the bias along axis 1.
fn decompose_biased<'g>(x: &Args<Var<'g>>, core: &str, attrs: Attrs) -> OpResult<Vec<Var<'g>>> {
    let y = x[0].op(core, &[x[1]], attrs);
    let Some(bias) = x.given(2) else { return Ok(vec![y]) };
    Ok(vec![y + bias.shaped(&along(bias.shape()?[0], y.shape()?.len() - 1))])
}

/// The position within the input's image of tap `t` of window `o`. `None` if it is padding.
fn tap(sides: &[Side], o: &[usize], t: &[usize]) -> Option<usize> {
    let mut at = 0;
    for (side, (&o, &t)) in zip(sides, zip(o, t)) {
        at = at * side.len + side.tap(o, t)?;
    }
    Some(at)
}

/// The extents of a window.
fn kernel(sides: &[Side]) -> Shape {
    sides.iter().map(|s| s.kernel).collect()
}

/// The extents of the window, and every index within it.
fn taps(sides: &[Side]) -> (Shape, Vec<Vec<usize>>) {
    let kernel = kernel(sides);
    let taps = indices(&kernel).collect();
    (kernel, taps)
}

fn eval_conv(inputs: &Args<&[f64]>, call: &Call) -> OpResult<Vec<Vec<f64>>> {
    let (x, w) = (inputs[0], inputs[1]);
    let (shape, group, sides) = conv(call)?;
    let (kernel, taps) = taps(&sides);
    let (image, channels, per_group) = (spatial(call)?.iter().product::<usize>(), call.shape(0)[1], call.shape(1)[1]);
    let mut y = Vec::with_capacity(shape.numel());
    for index in indices(&shape) {
        let (n, o) = (index[0], index[1]);
        let first = o / (shape[1] / group) * per_group;
        let mut sum = inputs.given(2).map_or(0.0, |bias| bias[o]);
        for t in &taps {
            let Some(at) = tap(&sides, &index[2..], t) else { continue };
            let t = position(t, &kernel);
            for c in 0..per_group {
                sum += x[(n * channels + first + c) * image + at] * w[(o * per_group + c) * taps.len() + t];
            }
        }
        y.push(sum);
    }
    Ok(vec![y])
}

/// Follows the definition: every input element is spread over its window.
fn eval_conv_transpose(inputs: &Args<&[f64]>, call: &Call) -> OpResult<Vec<Vec<f64>>> {
    let (x, w) = (inputs[0], inputs[1]);
    let (shape, group, sides) = conv_transpose(call)?;
    let (kernel, taps) = taps(&sides);
    let (input, per_group) = (call.shape(0), call.shape(1)[1]);
    let image = Shape::new(&shape[2..]);
    let mut y = vec![0.0; shape.numel()];
    if let Some(bias) = inputs.given(2) {
        y.chunks_exact_mut(image.numel()).enumerate().for_each(|(i, y)| y.fill(bias[i % shape[1]]));
    }
    for (value, index) in zip(x, indices(input)) {
        let (n, c) = (index[0], index[1]);
        let first = c / (input[1] / group) * per_group;
        for t in &taps {
            let spread = |(s, (&i, &t)): (&Side, (&usize, &usize))| {
                (i * s.stride + t * s.dilation).checked_sub(s.before).filter(|&o| o < s.out)
            };
            let at = zip(&sides, zip(&index[2..], t)).map(spread).collect::<Option<Vec<_>>>();
            let Some(at) = at.map(|at| position(&at, &image)) else { continue };
            let t = position(t, &kernel);
            for o in 0..per_group {
                let weight = w[(c * per_group + o) * taps.len() + t];
                y[(n * shape[1] + first + o) * image.numel() + at] += value * weight;
            }
        }
    }
    Ok(vec![y])
}

/// Output shape and sides of a pool.
fn pool(call: &Call) -> OpResult<(Shape, Vec<Side>)> {
    let axes = spatial(call)?.len();
    if call.attrs.get("kernel_shape").is_none() {
        return Err("attribute 'kernel_shape': expected ints, found none".into());
    }
    let kernel = sizes(call, "kernel_shape", axes, 1, 1)?;
    let (auto, ceil) = (AutoPad::new(call)?, call.int("ceil_mode", 0)? != 0);
    let padded = call.int("count_include_pad", 0)? != 0;
    call.int("storage_order", 0)?;
    let mut sides = sides(call, &kernel)?;
    for (axis, side) in sides.iter_mut().enumerate() {
        side.slide(axis, auto, ceil)?;
        // A window can miss the data only if it starts outside. Before the data, windows repeat their phase after `dilation` of them.
        let before = side.before.div_ceil(side.stride).min(side.dilation);
        let outside = (0..side.out.min(before)).chain(side.out.checked_sub(1));
        let mut empty = outside.filter(|&o| side.taps(o).is_empty());
        if let (false, Some(o)) = (padded, empty.next()) {
            return Err(format!(
                "spatial axis {axis}: expected data in every window, found only padding in window {o}"
            ));
        }
    }
    let x = call.shape(0);
    Ok(([x[0], x[1]].into_iter().chain(sides.iter().map(|s| s.out)).collect(), sides))
}

fn infer_pool(call: &Call) -> OpResult<Vec<Fact>> {
    output(same_float(call)?, pool(call)?.0)
}

fn lower_pool(call: &Call, at: &[Access], kind: impl Fn(&[Side]) -> Pool) -> OpResult<TemplateCall> {
    let (shape, mut sides) = pool(call)?;
    let kind = kind(&sides);
    // A mean that counts its padding divides by the elements of the whole window.
    if !matches!(kind, Pool::MeanPadded { .. }) {
        sides.iter_mut().for_each(Side::cut);
    }
    Ok(widened(Template::Pool { window: window(&sides), pool: kind }, &shape, at))
}

/// The elements of an image that are inside a window, in the window's order. Unlike a filter, a window may have more elements than anyone
/// could count.
fn inside(sides: &[Side], window: &[usize]) -> Vec<usize> {
    let taps: Vec<_> = zip(sides, window).map(|(side, &o)| side.taps(o)).collect();
    let lens: Shape = taps.iter().map(|taps| taps.len()).collect();
    let at = |t: Vec<usize>| zip(&taps, &t).map(|(taps, t)| taps.start + t).collect::<Vec<_>>();
    indices(&lens).filter_map(|t| tap(sides, window, &at(t))).collect()
}

fn eval_pool(
    inputs: &Args<&[f64]>,
    call: &Call,
    start: f64,
    fold: fn(f64, f64) -> f64,
    finish: fn(f64, usize) -> f64,
) -> OpResult<Vec<Vec<f64>>> {
    let x = inputs[0];
    let (shape, sides) = pool(call)?;
    let padded = call.int("count_include_pad", 0)? != 0;
    let image: usize = spatial(call)?.iter().product();
    let mut y = Vec::with_capacity(shape.numel());
    for index in indices(&shape) {
        let x = &x[(index[0] * shape[1] + index[1]) * image..][..image];
        let value = inside(&sides, &index[2..]).into_iter().fold(start, |value, at| fold(value, x[at]));
        let count = if padded {
            zip(&sides, &index[2..]).map(|(s, &o)| s.within(o)).product()
        } else {
            zip(&sides, &index[2..]).map(|(s, &o)| s.taps(o).len()).product()
        };
        y.push(finish(value, count));
    }
    Ok(vec![y])
}

fn eval_max(inputs: &Args<&[f64]>, call: &Call) -> OpResult<Vec<Vec<f64>>> {
    eval_pool(inputs, call, f64::NEG_INFINITY, maximum, |max, _| max)
}

/// True if a value behind another one takes its place as the maximum. What is not a number is larger than any number.
pub(super) fn larger(value: f64, than: f64) -> bool {
    value > than || value.is_nan() && !than.is_nan()
}

/// The index of the first maximum of each window, in the whole input: row-major, or with the spatial axes in reverse
/// order.
fn first_max(inputs: &Args<&[f64]>, call: &Call) -> OpResult<Vec<f64>> {
    let x = inputs[0];
    let (shape, sides) = pool(call)?;
    let reversed = call.int("storage_order", 0)? != 0;
    let extents: Shape = sides.iter().map(|s| s.len).collect();
    let image = extents.numel();
    let mut y = Vec::with_capacity(shape.numel());
    for index in indices(&shape) {
        let first = (index[0] * shape[1] + index[1]) * image;
        let best = inside(&sides, &index[2..])
            .into_iter()
            .reduce(|best, at| if larger(x[first + at], x[first + best]) { at } else { best });
        let best = best.ok_or("a window without data")?;
        let by_columns = || {
            let (mut rest, mut number) = (best, 0);
            for (axis, side) in sides.iter().enumerate().rev() {
                number += rest % side.len * extents[..axis].iter().product::<usize>();
                rest /= side.len;
            }
            number
        };
        y.push((first + if reversed { by_columns() } else { best }) as f64);
    }
    Ok(y)
}

/// The smallest index of an element in the window that equals its maximum. Each element of the window is one slice of
/// the input.
fn decompose_indices<'g>(b: Nodes<'g>, call: &Call, x: &Args<Var<'g>>) -> OpResult<Vec<Var<'g>>> {
    const MOST: usize = 512;
    let (shape, sides) = pool(call)?;
    let kernel = kernel(&sides);
    if kernel.numel() > MOST {
        return Err(format!("output 'Indices': expected windows of up to {MOST} elements, found {kernel}"));
    }
    let image: usize = sides.iter().map(|s| s.len).product();
    // Padding reaches as far as the last window does.
    let behind = |s: &Side| ((s.out - 1) * s.stride + s.reach()).saturating_sub(s.before + s.len);
    let pads = [sides.iter().map(|s| s.before).collect(), sides.iter().map(behind).collect::<Vec<_>>()].concat();
    let axes: Vec<usize> = (2..shape.len()).collect();
    let mut padded = x[0];
    if pads.iter().any(|&p| p > 0) {
        padded = padded.op("Pad", &[], Attrs::new().with("pads", &pads[..]).with("axes", &axes[..]));
    }
    // The position along one axis, as its part of the element's row-major number; too large if it is padding.
    let share = |axis: usize, t: usize| {
        let side = &sides[axis];
        let inner: usize = sides[axis + 1..].iter().map(|s| s.len).product();
        let share = |o| side.tap(o, t).map_or(image, |i| i * inner) as f64;
        b.constant(DType::I64, along(side.out, sides.len() - axis), || (0..side.out).map(share).collect())
    };
    let shares: Vec<Vec<_>> =
        sides.iter().enumerate().map(|(axis, side)| (0..side.kernel).map(|t| share(axis, t)).collect()).collect();
    let none = b.scalar(image as f64, DType::I64);
    // The last element of the window stands where no other one is found, as on devices that do not tell NaN apart.
    let last = |(axis, side): (usize, &Side)| {
        let inner: usize = sides[axis + 1..].iter().map(|s| s.len).product();
        let last = |o| ((0..side.kernel).rev().find_map(|t| side.tap(o, t)).unwrap_or(0) * inner) as f64;
        b.constant(DType::I64, along(side.out, sides.len() - axis), || (0..side.out).map(last).collect())
    };
    let last = sides.iter().enumerate().map(last).reduce(|sum, share| sum + share);
    let mut first = last.unwrap_or(none);
    let floats = call.dtype(0).is_float();
    for t in indices(&kernel) {
        let ints = |f: fn(&Side, usize) -> usize| zip(&sides, &t).map(|(s, &t)| f(s, t)).collect::<Vec<_>>();
        let slice = Attrs::new()
            .with("starts", &ints(|s, t| t * s.dilation)[..])
            .with("ends", &ints(|s, t| t * s.dilation + (s.out - 1) * s.stride + 1)[..])
            .with("steps", &ints(|s, _| s.stride)[..])
            .with("axes", &axes[..]);
        let element = padded.op("Slice", &[], slice);
        let hit = element.equal(x[1]);
        let hit = if floats { hit.or(element.op("IsNaN", &[], Attrs::new())) } else { hit };
        let at = zip(&shares, &t).map(|(shares, &t)| shares[t]).reduce(|sum, share| sum + share);
        first = first.min(hit.select(at.unwrap_or(none), none));
    }
    if call.int("storage_order", 0)? != 0 {
        first = transposed(&sides, first);
    }
    let mut planes = vec![1; shape.len()];
    planes[..2].copy_from_slice(&shape[..2]);
    let plane = |p: usize| (p * image) as f64;
    Ok(vec![first + b.constant(DType::I64, planes, || (0..shape[0] * shape[1]).map(plane).collect())])
}

/// Row-major numbers as numbers with the axes in reverse order.
fn transposed<'g>(sides: &[Side], numbers: Var<'g>) -> Var<'g> {
    let (mut rest, mut sum) = (numbers, None);
    for (axis, side) in sides.iter().enumerate().rev() {
        let outer: usize = sides[..axis].iter().map(|s| s.len).product();
        let (len, outer) = (rest.like(side.len as f64), rest.like(outer as f64));
        let share = rest % len * outer;
        rest = rest / len;
        sum = Some(sum.map_or(share, |sum: Var<'g>| sum + share));
    }
    sum.unwrap_or(numbers)
}

/// The attributes of the transposed convolution that hands gradients back through a window.
fn adjoint(sides: &[Side]) -> Attrs {
    let side = |side: &Side| {
        let spread = (side.out - 1) * side.stride + side.reach();
        let (after, surplus) =
            (spread.saturating_sub(side.before + side.len), (side.before + side.len).saturating_sub(spread));
        Side { after, surplus, ..*side }
    };
    let sides: Vec<_> = sides.iter().map(side).collect();
    let surplus: Vec<usize> = sides.iter().map(|side| side.surplus).collect();
    window_attrs(&sides).with("output_padding", &surplus[..])
}

/// Each mean is handed back in equal parts to the elements of its window.
fn average_grad<'g>(b: Nodes<'g>, call: &Call, back: &Back<'_, 'g>) -> OpResult<Vec<Option<Var<'g>>>> {
    let (shape, sides) = pool(call)?;
    let padded = call.int("count_include_pad", 0)? != 0;
    // A share of many elements may be too small for a half.
    let wide = call.dtype(0).unhalved();
    let mut dy = back.first()?.cast(wide);
    for (k, side) in sides.iter().enumerate() {
        let count = |o: usize| {
            let within = |t: &usize| o * side.stride + t * side.dilation < side.before + side.len + side.after;
            let count = if padded { (0..side.kernel).filter(within).count() } else { side.taps(o).len() };
            1.0 / count as f64
        };
        dy = dy * b.constant(wide, along(side.out, sides.len() - k), || (0..side.out).map(count).collect());
    }
    let window = [&[shape[1], 1], &kernel(&sides)[..]].concat();
    let ones = b.scalar(1.0, wide).expand(&window);
    let attrs = adjoint(&sides).with("group", shape[1] as i64);
    Ok(vec![Some(dy.op("plimsoll.ConvTranspose", &[ones], attrs).cast(call.dtype(0)))])
}

/// Follows the definition: each window hands its gradient to its first maximum.
fn eval_max_grad(inputs: &Args<&[f64]>, call: &Call) -> OpResult<Vec<Vec<f64>>> {
    let (x, dy) = (inputs[0], inputs[2]);
    let (shape, sides) = pool(call)?;
    let image: usize = sides.iter().map(|s| s.len).product();
    let mut dx = vec![0.0; x.len()];
    for (index, gradient) in zip(indices(&shape), dy) {
        let first = (index[0] * shape[1] + index[1]) * image;
        let best = inside(&sides, &index[2..])
            .into_iter()
            .reduce(|best, at| if larger(x[first + at], x[first + best]) { at } else { best });
        dx[first + best.ok_or("a window without data")?] += gradient;
    }
    Ok(vec![dx])
}

/// The spatial axes of a float input.
fn image_axes(call: &Call) -> OpResult<Vec<i64>> {
    same_float(call)?;
    Ok((2..spatial(call)?.len() as i64 + 2).collect())
}
