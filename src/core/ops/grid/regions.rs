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
     part, of `sampling_ratio` points along each axis",
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

/// The points of a region along one axis, `[regions, points]`, as places among the elements.
fn points<'g>(b: Nodes<'g>, regions: Var<'g>, axis: Axis, call: &Call) -> OpResult<Var<'g>> {
    let Axis { low, out, ratio } = axis;
    let half = call.choice("coordinate_transformation_mode", &[("half_pixel", true), ("output_half_pixel", false)])?;
    let scale = call.float("spatial_scale", 1.0)?;
    let moved = |column: usize| regions.part(1, column..column + 1) * scale - if half { 0.5 } else { 0.0 };
    let (start, end) = (moved(low), moved(low + 2));
    let span = if half { end - start } else { (end - start).max(1.0) };
    let count = out * ratio;
    let shares =
        b.constant(regions.fact()?.dtype, [1, count], || (0..count).map(|i| (i as f64 + 0.5) / count as f64).collect());
    Ok(start + span * shares)
}

/// An axis of the regions: the column of their lower end, the elements of the results, and the points of each.
#[derive(Clone, Copy)]
struct Axis {
    low: usize,
    out: usize,
    ratio: usize,
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
    let [rows, columns, ratio] = size(call)?;
    let wide = dtype.unhalved();
    let regions = x[1].cast(wide);
    let column = points(b, regions, Axis { low: 0, out: columns, ratio }, call)?;
    let row = points(b, regions, Axis { low: 1, out: rows, ratio }, call)?;
    // A region reads its own image.
    let image = channels_last(x[0].cast(wide), 4);
    let places = x[2].cast(DType::I64).shaped(&[count, 1, 1, 1]);
    // One point of every element at a time, and one of the elements around it: nothing is larger than the result.
    let whole = [count, rows, columns, 1];
    let mut out: Option<Var> = None;
    for (y, x) in (0..ratio).flat_map(|y| (0..ratio).map(move |x| (y, x))) {
        let point = |places: Var<'g>, out: usize, at: usize| {
            places.shaped(&[count, out, ratio]).part(2, at..at + 1).shaped(&[count, out])
        };
        let (y, x) = (point(row, rows, y), point(column, columns, x));
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
            let value = inside.and(near(y, height)).and(near(x, width)).select(value, 0.0);
            // ONNX takes the largest of all weighted elements, not of their sums.
            out = Some(match out {
                None => value,
                Some(others) if mean => others + value,
                Some(others) => others.max(value),
            });
        }
    }
    let out = out.ok_or("an element has a point")?;
    let out = if mean { out / (ratio * ratio) as f64 } else { out };
    Ok(vec![channels_first(out.cast(dtype), 4)])
}

/// Rows and columns of a result, and the points along each axis of each element.
fn size(call: &Call) -> OpResult<[usize; 3]> {
    let count = |name: &str, default: i64| match call.int(name, default)? {
        n if n > 0 => Ok(n as usize),
        n => Err(format!("attribute '{name}': expected a number above 0, found {n}")),
    };
    let ratio = count("sampling_ratio", 0).map_err(|what| {
        format!("{what}: by the size of each region, how much is read would depend on data; export it with a number")
    })?;
    ensure(ratio <= MOST_POINTS, || {
        format!("attribute 'sampling_ratio': expected at most {MOST_POINTS} points along an axis, found {ratio}")
    })?;
    let size = [count("output_height", 1)?, count("output_width", 1)?, ratio];
    Shape::new(size).checked_len().and_then(|n| n.checked_mul(ratio)).ok_or("the result is too large to count")?;
    Ok(size)
}
