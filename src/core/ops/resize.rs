//! Interpolation.

use super::compose::composed;
use super::{along, ensure, expect_dtype, indices, output, transposed_map};
use crate::dtype::DType;
use crate::kernel::{Nearest, ResizeMode, Template};
use crate::op::{
    Args, Attr, Attrs, Call, Eval, Fact, Lower, Nodes, OpDef, OpResult, Part, TemplateCall, ValueId, Var, inputs, names,
};
use crate::shape::{Access, Shape};

pub(super) static OPS: &[OpDef] = &[
    OpDef::new(
        "Resize",
        "Interpolates along every axis to `sizes`, or by `scales`; integers in f32, where a linear result is rounded toward zero, and others to \
         the nearest integer, with antialias behind each axis, of which the last comes first",
        inputs![X roi= scales= sizes=],
        infer_resize,
        Eval::Tensor(eval_resize),
        Lower::Decompose(decompose_resize),
    )
    .sample(|s| s.floats(&[&[2, 5, 7]]).attr("scales", vec![1.0, 2.0, 1.7]).attr("mode", "linear").attr("antialias", 0))
    .attrs(names![
        antialias axes coordinate_transformation_mode cubic_coeff_a exclude_outside extrapolation_value
        keep_aspect_ratio_policy mode nearest_mode
    ])
    .upgrade(upgrade_resize),
    OpDef::new(
        "plimsoll.Resize",
        "What Resize decomposes into: no antialias, and nothing extrapolated",
        inputs![X roi= scales= sizes=],
        infer_resize,
        Eval::Tensor(eval_resize),
        Lower::Template(lower_resize),
    )
    .grad(|b, call, back| {
        let (mode, mut dx) = (mode(call)?, back.first()?);
        for (k, &axis) in axes(call)?.iter().enumerate().filter(|(_, axis)| !axis.stays()) {
            dx = transposed_map(b, dx, k, [axis.out, axis.len], |i| neighbours(axis, mode, i))?;
        }
        Ok(vec![Some(dx)])
    })
    .sample(|s| s.floats(&[&[1, 2, 3, 4]]).ints("sizes", &[1, 2, 6, 3]).attr("mode", "linear"))
    .attrs(CORE_ATTRS)
    .part(part_resize),
    composed(
        "Upsample",
        "Resize before opset 10: by `scales`, with coordinates divided by them and the nearest element \
         rounded down",
        inputs![X scales=],
        |_, call, x| {
            let attrs = call.attrs.clone().with("coordinate_transformation_mode", "asymmetric");
            Ok(vec![x[0].op("Resize", &[], attrs.with("nearest_mode", "floor"))])
        },
    )
    .sample(|s| s.floats(&[&[1, 2, 3, 4]]).attr("scales", vec![1.0, 1.0, 2.0, 3.0]))
    .attrs(names![mode]),
];

/// Attributes that the kernel template implements.
const CORE_ATTRS: &[&str] = names![
    axes coordinate_transformation_mode cubic_coeff_a exclude_outside keep_aspect_ratio_policy mode nearest_mode
];

/// Upgrades opset 10, which has neither `roi` nor a choice of coordinates.
fn upgrade_resize(opset: i64, inputs: &mut Vec<Option<ValueId>>, attrs: &mut Attrs) {
    if opset < 11 {
        if inputs.len() == 2 {
            inputs.insert(1, None);
        }
        attrs.set("coordinate_transformation_mode", Attr::Str("asymmetric".into()));
        attrs.set("nearest_mode", Attr::Str("floor".into()));
    }
}

/// Uses the kernel template, except with antialias or doubles: then neighbours and weights are constants, axis by axis. Coordinates outside the data get the extrapolation value.
fn decompose_resize<'g>(b: Nodes<'g>, call: &Call, x: &Args<Var<'g>>) -> OpResult<Vec<Var<'g>>> {
    let (axes, dtype) = (axes(call)?, call.dtype(0));
    let rounding = Rounding::of(call)?;
    let mut y = if rounding != Rounding::None {
        let wide = Fact::new(DType::F32, call.shape(0).clone());
        let inputs: Vec<_> = [Some(&wide)].into_iter().chain(call.inputs[1..].iter().copied()).collect();
        let call = Call { inputs: &inputs, ..*call };
        if rounding == Rounding::Steps {
            blurred(b, &call, &axes, x[0].cast(DType::F32), Some(dtype))?
        } else {
            let y = x[0].cast(DType::F32).op("plimsoll.Resize", &[], core_attrs(&call));
            if rounding == Rounding::Nearest { held(y.round(), dtype) } else { y }
        }
        .cast(dtype)
    } else if dtype.is_int() {
        chosen(b, call, &axes, x[0])?
    } else if dtype == DType::F64 || axes.iter().any(|a| a.blur < 1.0) {
        blurred(b, call, &axes, x[0], None)?
    } else {
        x[0].op("plimsoll.Resize", &[], core_attrs(call))
    };
    let value = call.float("extrapolation_value", 0.0)?;
    for (k, axis) in axes.iter().enumerate() {
        // Coordinates ascend, or descend.
        if axis.out > 0 && !(axis.reads(0) && axis.reads(axis.out - 1)) {
            let inside = |i| f64::from(u8::from(axis.reads(i)));
            let along = along(axis.out, axes.len() - k);
            let inside = b.constant(DType::Bool, along, || (0..axis.out).map(inside).collect());
            y = inside.select(y, value);
        }
    }
    Ok(vec![y])
}

/// The attributes of the kernel template.
fn core_attrs(call: &Call) -> Attrs {
    let mut attrs = call.attrs.clone();
    for name in ["antialias", "extrapolation_value"] {
        attrs.remove(name);
    }
    attrs
}

/// How integers follow from what is interpolated between them.
#[derive(Clone, Copy, PartialEq)]
enum Rounding {
    /// Not at all: they are elements of the data, or no integers.
    None,
    /// Toward zero.
    Down,
    /// To the nearest.
    Nearest,
    /// To the nearest, axis by axis from the last one.
    Steps,
}

impl Rounding {
    fn of(call: &Call) -> OpResult<Rounding> {
        if !call.dtype(0).is_int() {
            return Ok(Rounding::None);
        }
        Ok(match mode(call)? {
            ResizeMode::Nearest(_) => Rounding::None,
            _ if call.int("antialias", 0)? != 0 => Rounding::Steps,
            ResizeMode::Linear => Rounding::Down,
            ResizeMode::Cubic { .. } => Rounding::Nearest,
        })
    }

    /// A value between integers of this type as an integer.
    fn round(self, value: f64, dtype: DType) -> f64 {
        let (low, high) = dtype.range();
        match self {
            Rounding::None => value,
            Rounding::Down => value.trunc(),
            Rounding::Nearest | Rounding::Steps => value.round_ties_even().clamp(low, high),
        }
    }
}

/// A value within the range of an integer type.
fn held(y: Var, dtype: DType) -> Var {
    let (low, high) = dtype.range();
    y.clip(low, high)
}

/// Takes the nearest elements, axis by axis.
fn chosen<'g>(b: Nodes<'g>, call: &Call, axes: &[Axis], mut y: Var<'g>) -> OpResult<Var<'g>> {
    let mode = mode(call)?;
    for (k, &axis) in axes.iter().enumerate().filter(|(_, axis)| !axis.stays()) {
        let place = |i| neighbours(axis, mode, i)[0].0 as f64;
        y = y.gather(b.constant(DType::I32, [axis.out], || (0..axis.out).map(place).collect()), k as i64);
    }
    Ok(y)
}

/// An axis with this many elements per neighbour of a result, at most, is resized by a matrix product, if the matrix has few elements, or no
/// more than a plane of the data.
const DENSE: usize = 64;
const SMALL: usize = 1 << 16;
/// The most weights that are made for an axis.
const MOST_WEIGHTS: f64 = (1 << 26) as f64;

/// Resizes axis by axis, by a matrix product, or by the neighbours alone. If the data were integers of type `whole`, so is the result of each axis.
fn blurred<'g>(b: Nodes<'g>, call: &Call, axes: &[Axis], mut y: Var<'g>, whole: Option<DType>) -> OpResult<Var<'g>> {
    let (mode, mut shape) = (mode(call)?, call.shape(0).clone());
    let mut order: Vec<_> = axes.iter().copied().enumerate().filter(|(_, axis)| !axis.stays()).collect();
    if whole.is_some() {
        order.reverse();
    }
    for (k, axis) in order {
        let (outer, inner): (usize, usize) = (shape[..k].iter().product(), shape[k + 1..].iter().product());
        let most = (4.0 / axis.blur + 2.0) * axis.out as f64;
        ensure(most <= MOST_WEIGHTS, || {
            format!("axis {k}: expected at most {MOST_WEIGHTS} weights of what antialias widens, found {most}")
        })?;
        let found: Vec<Vec<(usize, f64)>> = (0..axis.out).map(|i| neighbours(axis, mode, i)).collect();
        let taps = found.iter().map(Vec::len).max().unwrap_or(0);
        // The batch has no part in the choice: graphs of other batches have the same nodes.
        let small = axis.out.saturating_mul(axis.len) <= SMALL || axis.out <= inner;
        if axis.len > DENSE * taps || !small {
            y = by_neighbours(b, call.dtype(0), y.shaped(&[outer, axis.len, inner]), &found, taps);
        } else {
            y = by_product(b, call.dtype(0), y, [outer, inner], axis, &found);
        }
        shape[k] = axis.out;
        y = y.shaped(&shape);
        if let Some(dtype) = whole {
            y = held(y.round(), dtype);
        }
    }
    Ok(y)
}

/// The product of all elements along an axis with their weights, of which most are zero.
fn by_product<'g>(
    b: Nodes<'g>,
    dtype: DType,
    y: Var<'g>,
    [outer, inner]: [usize; 2],
    axis: Axis,
    found: &[Vec<(usize, f64)>],
) -> Var<'g> {
    // `at(i, j)` is the position of the weight of data element `j` in result element `i`.
    let weights = |shape: [usize; 2], at: &dyn Fn(usize, usize) -> usize| {
        b.constant(dtype, shape, || {
            let mut weights = vec![0.0; axis.out * axis.len];
            for (i, found) in found.iter().enumerate() {
                found.iter().for_each(|&(j, w)| weights[at(i, j)] += w);
            }
            weights
        })
    };
    if inner == 1 {
        let weights = weights([axis.len, axis.out], &|i, j| j * axis.out + i);
        y.shaped(&[outer, axis.len]).matmul(weights)
    } else {
        let weights = weights([axis.out, axis.len], &|i, j| i * axis.len + j);
        weights.matmul(y.shaped(&[outer, axis.len, inner]))
    }
}

/// Sums of the neighbours along the middle axis, each times its weight.
fn by_neighbours<'g>(b: Nodes<'g>, dtype: DType, y: Var<'g>, found: &[Vec<(usize, f64)>], taps: usize) -> Var<'g> {
    let tap = |k: usize| {
        let of = |pick: &dyn Fn((usize, f64)) -> f64| {
            found.iter().map(|all| all.get(k).map_or(0.0, |&tap| pick(tap))).collect::<Vec<f64>>()
        };
        let places = b.constant(DType::I32, [found.len()], || of(&|(at, _)| at as f64));
        let weights = b.constant(dtype, [found.len(), 1], || of(&|(_, weight)| weight));
        y.gather(places, 1) * weights
    };
    (1..taps).fold(tap(0), |sum, k| sum + tap(k))
}

/// Splits along axes that are not resized.
fn part_resize(call: &Call, axis: usize, _: usize) -> Option<Part> {
    let own = axes(call).ok()?[axis];
    let listed = call.ints("sizes").ok()?.is_some_and(|sizes| !sizes.is_empty());
    let names = call.attrs.get("axes").is_some() && named_axes(call).ok()?.contains(&axis);
    let stretches = call.str("keep_aspect_ratio_policy", "stretch").ok()? == "stretch";
    if !own.stays() || own.crop || listed && (names || !stretches) {
        return None;
    }
    let extents = (listed && call.attrs.get("axes").is_none()).then_some("sizes");
    Some(Part { inputs: vec![Some(axis)], extents })
}

/// One axis of the data: output index `i` is at the coordinate `i * step + offset`.
#[derive(Clone, Copy)]
struct Axis {
    len: usize,
    out: usize,
    step: f64,
    offset: f64,
    /// With antialias, the interpolation's kernel is wider by `1 / blur`.
    blur: f64,
    /// True if coordinates outside the data get the extrapolation value.
    crop: bool,
}

impl Axis {
    fn at(self, i: usize) -> f64 {
        i as f64 * self.step + self.offset
    }

    fn stays(self) -> bool {
        self.len == self.out && self.step == 1.0 && self.offset == 0.0
    }

    /// True if output index `i` reads the data. A corner that single precision misses counts as inside.
    fn reads(self, i: usize) -> bool {
        let last = self.len as f64 - 1.0;
        let error = last * (-21f64).exp2();
        !self.crop || (-error..=last + error).contains(&self.at(i))
    }
}

fn nearest(call: &Call) -> OpResult<Nearest> {
    let words = [
        ("round_prefer_floor", Nearest::RoundPreferFloor),
        ("round_prefer_ceil", Nearest::RoundPreferCeil),
        ("floor", Nearest::Floor),
        ("ceil", Nearest::Ceil),
    ];
    call.choice("nearest_mode", &words)
}

fn mode(call: &Call) -> OpResult<ResizeMode> {
    match call.str("mode", "nearest")? {
        "nearest" => Ok(ResizeMode::Nearest(nearest(call)?)),
        "linear" => Ok(ResizeMode::Linear),
        "cubic" => Ok(ResizeMode::Cubic {
            a: call.float("cubic_coeff_a", -0.75)?,
            exclude_outside: call.int("exclude_outside", 0)? != 0,
        }),
        other => Err(format!("attribute 'mode': expected nearest, linear or cubic, found '{other}'")),
    }
}

/// The axes that the lists `scales` and `sizes` are about, in their order.
fn named_axes(call: &Call) -> OpResult<Vec<usize>> {
    let x = call.shape(0);
    let Some(axes) = call.ints("axes")? else { return Ok((0..x.len()).collect()) };
    let mut named = Vec::new();
    for &axis in axes.iter() {
        match x.axis(axis) {
            Some(axis) if !named.contains(&axis) => named.push(axis),
            _ => return Err(format!("attribute 'axes': expected different axes of {x}, found {axes:?}")),
        }
    }
    Ok(named)
}

/// Per named axis, the output's extent and the scale.
fn resized(call: &Call, named: &[usize]) -> OpResult<Vec<(usize, f64)>> {
    let x = call.shape(0);
    let listed = |name: &str, found: usize| match named.len() {
        len if len == found => Ok(()),
        len => Err(format!("attribute '{name}': expected {len} values, one per axis, found {found}")),
    };
    // An empty list stands for one that is not given.
    let scales = call.floats("scales")?.filter(|s| !s.is_empty());
    let sizes = call.ints("sizes")?.filter(|s| !s.is_empty());
    match (scales, sizes) {
        (Some(scales), None) => {
            listed("scales", scales.len())?;
            let extent = |(k, &scale): (usize, &f64)| {
                let len = x[named[k]];
                if scale == 1.0 {
                    return Some((len, scale));
                }
                // In single precision, as the factors are: 0.7 of 10 is 7.
                let out = (len as f32 * scale as f32).floor();
                let valid = scale > 0.0 && out < i64::MAX as f32 && (out >= 1.0 || len == 0);
                valid.then_some((out as usize, scale))
            };
            let resized = scales.iter().enumerate().map(extent).collect::<Option<_>>();
            resized.ok_or_else(|| {
                format!("attribute 'scales': expected positive factors that leave elements, found {scales:?}")
            })
        }
        (None, Some(sizes)) => {
            listed("sizes", sizes.len())?;
            if let Some(size) = sizes.iter().find(|&&s| s < 1) {
                return Err(format!("attribute 'sizes': expected 1 or more, found {size}"));
            }
            if named.iter().any(|&k| x[k] == 0) {
                return Err(format!("input 'X': expected elements to interpolate, found {x}"));
            }
            let scales = sizes.iter().zip(named).map(|(&size, &k)| size as f64 / x[k] as f64);
            type Common = Option<fn(f64, f64) -> f64>;
            let policies: [(_, Common); 3] =
                [("stretch", None), ("not_larger", Some(f64::min)), ("not_smaller", Some(f64::max))];
            let common = call.choice("keep_aspect_ratio_policy", &policies)?;
            Ok(match common.and_then(|common| scales.clone().reduce(common)) {
                None => sizes.iter().map(|&s| s as usize).zip(scales).collect(),
                Some(scale) => named.iter().map(|&k| ((scale * x[k] as f64 + 0.5).floor() as usize, scale)).collect(),
            })
        }
        (scales, _) => {
            let found = if scales.is_some() { "both" } else { "neither" };
            Err(format!("expected constant 'scales' or 'sizes', found {found}"))
        }
    }
}

/// The resizing of every axis.
fn axes(call: &Call) -> OpResult<Vec<Axis>> {
    let (x, named) = (call.shape(0), named_axes(call)?);
    let resized = resized(call, &named)?;
    let transform = call.str("coordinate_transformation_mode", "half_pixel")?;
    let whole = |&len: &usize| Axis { len, out: len, step: 1.0, offset: 0.0, blur: 1.0, crop: false };
    let mut axes: Vec<Axis> = x.iter().map(whole).collect();
    let crop = if transform == "tf_crop_and_resize" { regions(call, named.len())? } else { Vec::new() };
    let blurs = call.int("antialias", 0)? != 0 && !matches!(mode(call)?, ResizeMode::Nearest(_));
    for (k, &(out, scale)) in resized.iter().enumerate() {
        let axis = &mut axes[named[k]];
        let (len, last) = (axis.len as f64, axis.len as f64 - 1.0);
        // Not rounded to whole elements, as ONNX's reference has it.
        let exact = scale * len;
        (axis.out, axis.step) = (out, 1.0 / scale);
        if blurs {
            axis.blur = scale.min(1.0);
        }
        axis.offset = match transform {
            "half_pixel" => 0.5 / scale - 0.5,
            "half_pixel_symmetric" => len / 2.0 * (1.0 - out as f64 / (scale * len)) + 0.5 / scale - 0.5,
            "pytorch_half_pixel" if out > 1 => 0.5 / scale - 0.5,
            "asymmetric" | "pytorch_half_pixel" => 0.0,
            "align_corners" => {
                axis.step = if out > 1 { last / (exact - 1.0) } else { 0.0 };
                0.0
            }
            "tf_crop_and_resize" => {
                let (start, end) = crop[k];
                axis.crop = call.op.name == "Resize";
                axis.step = if out > 1 { (end - start) * last / (exact - 1.0) } else { 0.0 };
                last * if out > 1 || exact > 1.0 + 1e-6 { start } else { (start + end) / 2.0 }
            }
            other => {
                return Err(format!(
                    "attribute 'coordinate_transformation_mode': expected half_pixel, half_pixel_symmetric, \
                     pytorch_half_pixel, align_corners, asymmetric or tf_crop_and_resize, found '{other}'"
                ));
            }
        };
    }
    Ok(axes)
}

/// Start and end of the region of interest along every named axis, as shares of the axis.
fn regions(call: &Call, named: usize) -> OpResult<Vec<(f64, f64)>> {
    let roi = call.floats("roi")?.unwrap_or_default();
    // Farther away, coordinates lose their meaning in single precision.
    let near = roi.iter().all(|v| v.abs() <= 1024.0);
    ensure(roi.len() == 2 * named && near, || {
        format!("attribute 'roi': expected {named} starts, then as many ends, within -1024 to 1024, found {roi:?}")
    })?;
    Ok((0..named).map(|k| (roi[k], roi[named + k])).collect())
}

fn infer_resize(call: &Call) -> OpResult<Vec<Fact>> {
    let dtype = match call.op.name {
        "Resize" => expect_dtype(call, 0, "a float or integer type", DType::is_number)?,
        _ => expect_dtype(call, 0, "a floating-point type", DType::is_float)?,
    };
    mode(call)?;
    call.float("extrapolation_value", 0.0)?;
    output(dtype, axes(call)?.iter().map(|a| a.out).collect::<Shape>())
}

fn lower_resize(call: &Call, at: &[Access]) -> OpResult<TemplateCall> {
    let (mode, axes) = (mode(call)?, axes(call)?);
    // A coordinate that should be an integer, or half of one, falls on the right side whatever the rounding errors of
    // `index * step + offset` in single precision. They grow with the axis; so does this.
    let nudge = |len: usize| {
        let error = len as f64 * (-21f64).exp2();
        match mode {
            ResizeMode::Nearest(Nearest::Floor | Nearest::RoundPreferCeil) => error,
            ResizeMode::Nearest(Nearest::Ceil | Nearest::RoundPreferFloor) => -error,
            _ => 0.0,
        }
    };
    Ok(TemplateCall {
        template: Template::Resize {
            scales: axes.iter().map(|a| a.step).collect(),
            offsets: axes.iter().map(|a| a.offset + nudge(a.len)).collect(),
            mode,
        },
        shape: axes.iter().map(|a| a.out).collect(),
        reads: vec![(0, at[0].clone())],
    })
}

/// The elements that output index `i` of an axis reads, with their weights.
fn neighbours(axis: Axis, mode: ResizeMode, i: usize) -> Vec<(usize, f64)> {
    let x = axis.at(i);
    let last = axis.len - 1;
    let clamp = |i: f64| i.clamp(0.0, last as f64) as usize;
    match mode {
        ResizeMode::Nearest(rule) => {
            // Scales are in single precision: 3 over the number nearest to 1/3 is 9, not a little less. 20 bits of a
            // coordinate count.
            let unit = (axis.len.max(1).ilog2() as f64 - 20.0).exp2().min(0.25);
            let x = (x / unit).round() * unit;
            vec![(clamp(rule.choose(x)), 1.0)]
        }
        ResizeMode::Linear if axis.blur < 1.0 => spread(axis, x, 1.0, false, |d| (1.0 - d.abs()).max(0.0)),
        ResizeMode::Linear => {
            let x = x.clamp(0.0, last as f64);
            vec![(clamp(x.floor()), 1.0 - x.fract()), (clamp(x.floor() + 1.0), x.fract())]
        }
        ResizeMode::Cubic { a, exclude_outside } => {
            // Keys, "Cubic convolution interpolation for digital image processing", 1981, equation 4.
            let weight = |d: f64| match d.abs() {
                d if d <= 1.0 => ((a + 2.0) * d - (a + 3.0)) * d * d + 1.0,
                d if d < 2.0 => ((a * d - 5.0 * a) * d + 8.0 * a) * d - 4.0 * a,
                _ => 0.0,
            };
            if axis.blur < 1.0 {
                return spread(axis, x, 2.0, exclude_outside, weight);
            }
            let mut taps: Vec<(f64, f64)> =
                [-1.0, 0.0, 1.0, 2.0].map(|k| x.floor() + k).map(|i| (i, weight(x - i))).to_vec();
            if exclude_outside {
                taps.retain(|&(i, _)| (0.0..=last as f64).contains(&i));
                let sum: f64 = taps.iter().map(|&(_, w)| w).sum();
                taps.iter_mut().for_each(|(_, w)| *w /= sum);
            }
            taps.into_iter().map(|(i, w)| (clamp(i), w)).collect()
        }
    }
}

/// The elements under a widened interpolation kernel of this reach, with their weights. Elements outside the data are
/// clamped to it, or left out if `inside`.
fn spread(axis: Axis, x: f64, reach: f64, inside: bool, weight: impl Fn(f64) -> f64) -> Vec<(usize, f64)> {
    let (last, wide) = (axis.len as f64 - 1.0, reach / axis.blur);
    let (first, count) = ((x - wide).ceil(), (x + wide).floor() - (x - wide).ceil() + 1.0);
    let taps = (0..count as usize).map(|k| first + k as f64);
    let taps: Vec<_> =
        taps.filter(|i| !inside || (0.0..=last).contains(i)).map(|i| (i, weight((i - x) * axis.blur))).collect();
    let sum: f64 = taps.iter().map(|&(_, w)| w).sum();
    taps.into_iter().map(|(i, w)| (i.clamp(0.0, last) as usize, w / sum)).collect()
}

/// Resizes axis by axis.
fn eval_resize(inputs: &Args<&[f64]>, call: &Call) -> OpResult<Vec<Vec<f64>>> {
    let (mode, axes, outside) = (mode(call)?, axes(call)?, call.float("extrapolation_value", 0.0)?);
    let (mut values, mut shape) = (inputs[0].to_vec(), call.shape(0).clone());
    let (rounding, dtype) = (Rounding::of(call)?, call.dtype(0));
    let mut order: Vec<_> = axes.iter().copied().enumerate().collect();
    if rounding == Rounding::Steps {
        order.reverse();
    }
    for (k, axis) in order {
        let inner: usize = shape[k + 1..].iter().product();
        shape[k] = axis.out;
        let mut resized = Vec::with_capacity(shape.numel());
        let outer: usize = shape[..k].iter().product();
        for index in indices(&[outer, axis.out, inner]) {
            let at = |i: usize| values[(index[0] * axis.len + i) * inner + index[2]];
            resized.push(if axis.reads(index[1]) {
                neighbours(axis, mode, index[1]).iter().map(|&(i, w)| w * at(i)).sum()
            } else {
                outside
            });
        }
        values = resized;
        if rounding == Rounding::Steps {
            values.iter_mut().for_each(|value| *value = rounding.round(*value, dtype));
        }
    }
    values.iter_mut().for_each(|value| *value = rounding.round(*value, dtype));
    Ok(vec![values])
}

#[cfg(test)]
mod tests {
    use crate::dtype::DType::*;
    use crate::op::Attrs;
    use crate::ops::tests::eval;

    #[test]
    fn integers_stay_integers() {
        let of = |mode: &str| {
            let attrs = Attrs::new().with("scales", vec![2.0]).with("mode", mode);
            eval("Resize", &[(I8, &[3], &[-5.0, 6.0, 127.0])], &attrs).1
        };
        assert_eq!(of("nearest"), [-5.0, -5.0, 6.0, 6.0, 127.0, 127.0]);
        assert_eq!(of("linear"), [-5.0, -2.0, 3.0, 36.0, 96.0, 127.0], "toward zero: of -2.25, 3.25, 36.25 and 96.75");
        assert_eq!(of("cubic")[5], 127.0, "more would be held within the type");
    }
}
