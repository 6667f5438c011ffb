//! Regions of images, such as those of objects, brought to one size.

use super::{Tap, channels_first, channels_last, linear};
use crate::dtype::DType;
use crate::op::{Args, Attrs, Call, Nodes, OpDef, OpResult, Var, inputs, names};
use crate::ops::compose::composed;
use crate::ops::{ensure, expect_dtype, expect_shape};
use crate::shape::Shape;

/// The most points of an element along an axis: each takes nodes of its own.
pub(in crate::ops) const MOST_POINTS: usize = 16;

/// Attributes of the row.
const ATTRS: &[&str] =
    names![coordinate_transformation_mode mode output_height output_width sampling_ratio spatial_scale];

pub(in crate::ops) static OPS: &[OpDef] = &[composed(
    "RoiAlign",
    "Regions [x1, y1, x2, y2] of images [n, c, h, w] as images of one size: each element is the mean, or the largest \
     part, of `sampling_ratio` points along each axis; where that is 0, of as many as elements of the image meet it, at most as many as \
     if the region were the image",
    inputs![X rois batch_indices],
    align,
)
.sample(|s| {
    s.floats(&[&[2, 3, 6, 5]])
        .given(DType::F32, &[2, 4], &[0.5, 1.0, 3.5, 4.25, -1.0, 0.0, 7.0, 5.0])
        .given(DType::I64, &[2], &[1.0, 0.0])
        .attr("output_height", 2)
        .attr("output_width", 3)
        .attr("sampling_ratio", 2)
})
.attrs(ATTRS)];

/// The points of regions along one axis.
struct Points<'g> {
    /// Their places among the elements, `[regions, out * most]`.
    places: Var<'g>,
    /// The most of them in an element.
    most: usize,
    /// How many there are in an element of each region, `[regions, 1]`, if regions differ.
    counts: Option<Var<'g>>,
}

impl<'g> Points<'g> {
    /// The place of point `at` of each element, `[regions, out]`.
    fn place(&self, at: usize) -> OpResult<Var<'g>> {
        let [regions, all] = self.places.shape()?[..] else { return Err("places of points have two axes".into()) };
        let out = all / self.most;
        Ok(self.places.shaped(&[regions, out, self.most]).part(2, at..at + 1).shaped(&[regions, out]))
    }
}

/// The points of all regions along one axis.
fn points<'g>(b: Nodes<'g>, regions: Var<'g>, axis: Axis, call: &Call) -> OpResult<Points<'g>> {
    let Axis { low, out, extent, ratio } = axis;
    let half = call.choice("coordinate_transformation_mode", &[("half_pixel", true), ("output_half_pixel", false)])?;
    let scale = call.float("spatial_scale", 1.0)?;
    let moved = |column: usize| regions.part(1, column..column + 1) * scale - if half { 0.5 } else { 0.0 };
    let (start, end) = (moved(low), moved(low + 2));
    let span = if half { end - start } else { (end - start).max(1.0) };
    let dtype = regions.fact()?.dtype;
    let Some(ratio) = ratio else {
        let most = extent.div_ceil(out);
        ensure(most <= MOST_POINTS, || {
            format!(
                "attribute 'sampling_ratio': 0 asks for up to {most} points of {extent} elements along an axis of {out}, and {MOST_POINTS} \
                 is the most: export it with a number"
            )
        })?;
        let counts = (span / out as f64).op("Ceil", &[], Attrs::new()).clip(0.0, most as f64);
        let (elements, own) = (b.numbers(dtype, [out, 1], 0.0), b.numbers(dtype, [1, most], 0.5));
        let shares = elements + own / counts.max(1.0).unsqueeze(&[2]);
        let places = start.unsqueeze(&[2]) + (span / out as f64).unsqueeze(&[2]) * shares;
        let places = places.shaped(&[regions.shape()?[0], out * most]);
        return Ok(Points { places, most, counts: Some(counts) });
    };
    let count = out * ratio;
    let shares = b.constant(dtype, [1, count], || (0..count).map(|i| (i as f64 + 0.5) / count as f64).collect());
    Ok(Points { places: start + span * shares, most: ratio, counts: None })
}

/// An axis of the regions: the column of their lower end, the elements of the results and of the image, and the points of each, if all
/// regions have as many.
#[derive(Clone, Copy)]
struct Axis {
    low: usize,
    out: usize,
    extent: usize,
    ratio: Option<usize>,
}

/// The elements around places along an axis: the border stands for what is at most one element outside, and beyond is zero.
fn held<'g>(at: Var<'g>, extent: usize) -> (Vec<Tap<'g>>, Var<'g>) {
    let last = extent as f64 - 1.0;
    let inside = at.greater_or_equal(-1.0).and(at.less_or_equal(extent as f64));
    (linear(at.clip(0.0, last)).into(), inside)
}

fn align<'g>(b: Nodes<'g>, call: &Call, x: &Args<Var<'g>>) -> OpResult<Vec<Var<'g>>> {
    let dtype = expect_dtype(call, 0, "a float type", DType::is_float)?;
    expect_dtype(call, 1, "a float type", DType::is_float)?;
    expect_dtype(call, 2, "i64 or i32", |d| matches!(d, DType::I64 | DType::I32))?;
    let &[images, _, height, width] = &call.shape(0)[..] else {
        return Err(format!("input 'X': expected [n, c, h, w], found {}", call.shape(0)));
    };
    ensure(images * height * width > 0, || format!("input 'X': expected elements, found {}", call.shape(0)))?;
    let count = *call.shape(1).first().unwrap_or(&0);
    expect_shape(call, 1, call.shape(1)[..] == [count, 4], format_args!("[regions, 4]"))?;
    expect_shape(call, 2, call.shape(2)[..] == [count], format_args!("[{count}], an image per region"))?;
    let mean = call.choice("mode", &[("avg", true), ("max", false)])?;
    let ([rows, columns], ratio) = size(call)?;
    let wide = dtype.unhalved();
    let regions = x[1].cast(wide);
    let column = points(b, regions, Axis { low: 0, out: columns, extent: width, ratio }, call)?;
    let row = points(b, regions, Axis { low: 1, out: rows, extent: height, ratio }, call)?;
    // A region reads its own image.
    let image = channels_last(x[0].cast(wide), 4);
    let places = x[2].cast(DType::I64).shaped(&[count, 1, 1, 1]);
    // One point of every element at a time, and one of the elements around it: nothing is larger than the result.
    let whole = [count, rows, columns, 1];
    let mut out: Option<Var> = None;
    for (y, x) in (0..row.most).flat_map(|y| (0..column.most).map(move |x| (y, x))) {
        // Beyond a region's own number of points there is none.
        let is_point = match (row.counts, column.counts) {
            (Some(rows), Some(columns)) => {
                Some(rows.greater(y as f64).and(columns.greater(x as f64)).shaped(&[count, 1, 1, 1]))
            }
            _ => None,
        };
        let (y, x) = (row.place(y)?, column.place(x)?);
        let ((down, in_rows), (across, in_columns)) =
            (held(y.shaped(&[count, rows, 1, 1]), height), held(x.shaped(&[count, 1, columns, 1]), width));
        let inside = in_rows.and(in_columns);
        for (y, x) in down.iter().flat_map(|y| across.iter().map(move |x| (y, x))) {
            let named =
                |tap: &Tap<'g>, extent: usize| tap.at.clip(0.0, extent as f64 - 1.0).cast(DType::I64).expand(&whole);
            let index = b.concat(&[places.expand(&whole), named(y, height), named(x, width)], 3);
            let mut value = image.op("GatherND", &[index], Attrs::new());
            // Weights of a bilinear mean.
            for weight in [y.weight, x.weight].into_iter().flatten() {
                value = value * weight;
            }
            let near = |tap: &Tap<'g>, extent: usize| tap.at.less_or_equal(extent as f64 - 1.0);
            let mut value = inside.and(near(y, height)).and(near(x, width)).select(value, 0.0);
            if let Some(is_point) = is_point {
                value = is_point.select(value, if mean { 0.0 } else { f64::NEG_INFINITY });
            }
            // ONNX takes the largest of all weighted elements, not of their sums.
            out = Some(match out {
                None => value,
                Some(others) if mean => others + value,
                Some(others) => others.max(value),
            });
        }
    }
    let out = out.ok_or("an element has a point")?;
    let out = match (row.counts, column.counts) {
        (Some(rows), Some(columns)) => {
            let points = (rows * columns).shaped(&[count, 1, 1, 1]);
            // A region without points has zeros.
            if mean { out / points.max(1.0) } else { points.greater(0.0).select(out, 0.0) }
        }
        _ if mean => out / (row.most * column.most) as f64,
        _ => out,
    };
    Ok(vec![channels_first(out.cast(dtype), 4)])
}

/// Rows and columns of a result, and the points along each axis of each element, unless they follow from its region.
fn size(call: &Call) -> OpResult<([usize; 2], Option<usize>)> {
    let count = |name: &str, default: i64| match call.int(name, default)? {
        n if n > 0 => Ok(n as usize),
        n => Err(format!("attribute '{name}': expected a number above 0, found {n}")),
    };
    let ratio = call.int("sampling_ratio", 0)?;
    ensure((0..=MOST_POINTS as i64).contains(&ratio), || {
        format!("attribute 'sampling_ratio': expected at most {MOST_POINTS} points along an axis, found {ratio}")
    })?;
    let size = [count("output_height", 1)?, count("output_width", 1)?];
    let all = Shape::new(size).checked_len().and_then(|n| n.checked_mul(MOST_POINTS * MOST_POINTS));
    all.ok_or("the result is too large to count")?;
    Ok((size, (ratio > 0).then_some(ratio as usize)))
}
