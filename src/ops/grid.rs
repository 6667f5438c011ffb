//! The row that samples an image at the points of a grid.

use super::compose::{channels_first, channels_last, composed};
use super::{ensure, indices, output, position, required_ints, same_float};
use crate::dtype::DType;
use crate::op::{Args, Attrs, Call, Eval, Fact, Lower, Nodes, OpDef, OpResult, Var, inputs, names};
use crate::shape::Shape;

pub(super) static OPS: &[OpDef] = &[
    OpDef::new(
        "GridSample",
        "The image [n, c, h, w] at points [n, .., .., 2] of -1..1 along w and h: the nearest element's \
         value, or a mean of four",
        inputs![X grid],
        |call| Sampling::of(call).map(|(_, fact)| vec![fact]),
        Eval::Tensor(eval),
        Lower::Decompose(nodes),
    )
    .sample(|s| s.floats(&[&[2, 3, 5, 4]]).input(DType::F32, &[2, 3, 6, 2], -1.3, 1.3))
    .attrs(names![align_corners mode padding_mode]),
    composed(
        "AffineGrid",
        "The points of -1..1 that a GridSample is to read for images moved by matrices [n, axes, axes + 1]",
        inputs![theta size=],
        moved,
    )
    .sample(|s| s.floats(&[&[2, 2, 3]]).ints("size", &[2, 3, 4, 5]))
    .attrs(names![align_corners]),
];

fn moved<'g>(b: Nodes<'g>, call: &Call, x: &Args<Var<'g>>) -> OpResult<Vec<Var<'g>>> {
    let dtype = same_float(call)?;
    let size = required_ints(call, "size")?;
    let size: Vec<usize> = size.iter().map(|&n| usize::try_from(n).unwrap_or(0)).collect();
    let axes = size.len().saturating_sub(2);
    ensure((2..=3).contains(&axes) && call.shape(0)[..] == [size[0], axes, axes + 1], || {
        format!("input 'theta': expected [n, axes, axes + 1] for images of {size:?}, found {}", call.shape(0))
    })?;
    let corners = call.int("align_corners", 0)? != 0;
    let image = Shape::new(&size[2..]);
    let points = image.checked_len().ok_or_else(|| format!("'size': found {image}, larger than any memory"))?;
    let base = b.constant(dtype, [points, axes + 1], || {
        let mut base = Vec::with_capacity(points * (axes + 1));
        for index in indices(&image) {
            // From the last axis to the first, which is the order of a grid's coordinates.
            for axis in (0..axes).rev() {
                let (at, extent) = (index[axis] as f64, image[axis] as f64);
                base.push(if !corners {
                    (2.0 * at + 1.0) / extent - 1.0
                } else if extent > 1.0 {
                    2.0 * at / (extent - 1.0) - 1.0
                } else {
                    0.0
                });
            }
            base.push(1.0);
        }
        base
    });
    let grid = base.matmul(x[0].transpose(&[0, 2, 1]));
    Ok(vec![grid.shaped(&[&[size[0]][..], &image, &[axes]].concat())])
}

/// The attributes of a GridSample.
#[derive(Clone, Copy)]
struct Sampling {
    /// True if -1 and 1 are the centres of the outer elements, false if they are their edges.
    corners: bool,
    nearest: bool,
    /// True if points outside read the border, false if they read zero.
    border: bool,
}

impl Sampling {
    /// Reads the attributes, and infers the output's fact.
    fn of(call: &Call) -> OpResult<(Sampling, Fact)> {
        let dtype = same_float(call)?;
        let nearest = call.choice("mode", &[("linear", false), ("bilinear", false), ("nearest", true)])?;
        let border = call.choice("padding_mode", &[("zeros", false), ("border", true)])?;
        let corners = call.int("align_corners", 0)? != 0;
        let (x, grid) = (call.shape(0), call.shape(1));
        let (&[n, c, h, w], &[points, rows, columns, 2]) = (&x[..], &grid[..]) else {
            return Err(format!("expected an image [n, c, h, w] and a grid [n, .., .., 2], found {x} and {grid}"));
        };
        ensure(h != 0 && w != 0, || format!("input 'X': expected elements along h and w, found {x}"))?;
        ensure(points == n, || format!("input 'grid': expected one per image of {x}, found {grid}"))?;
        Ok((Sampling { corners, nearest, border }, output(dtype, [n, c, rows, columns])?.remove(0)))
    }

    /// The factor and the summand that map -1..1 to positions among this many elements.
    fn scale(self, extent: usize) -> (f64, f64) {
        let last = extent as f64 - 1.0;
        (if self.corners { last / 2.0 } else { extent as f64 / 2.0 }, last / 2.0)
    }
}

fn eval(x: &Args<&[f64]>, call: &Call) -> OpResult<Vec<Vec<f64>>> {
    let [image, grid] = [0, 1].map(|i| x[i]);
    let (sampling, fact) = Sampling::of(call)?;
    let (shape, points) = (call.shape(0), call.shape(1));
    let element = |index: &[usize]| {
        let at = |axis: usize| {
            let (factor, summand) = sampling.scale(shape[axis]);
            // The last axis of an image comes first in a point.
            let v = grid[position(&[index[0], index[2], index[3], 3 - axis], points)] * factor + summand;
            if sampling.border { v.clamp(0.0, shape[axis] as f64 - 1.0) } else { v }
        };
        let (y, x) = (at(2), at(3));
        let read = |y: f64, x: f64| {
            let inside = |v: f64, axis: usize| (0.0..shape[axis] as f64).contains(&v);
            if inside(y, 2) && inside(x, 3) {
                image[position(&[index[0], index[1], y as usize, x as usize], shape)]
            } else {
                0.0
            }
        };
        if sampling.nearest {
            return read(y.round_ties_even(), x.round_ties_even());
        }
        let (top, left) = (y.floor(), x.floor());
        let row = |y: f64| read(y, left) * (left + 1.0 - x) + read(y, left + 1.0) * (x - left);
        row(top) * (top + 1.0 - y) + row(top + 1.0) * (y - top)
    };
    Ok(vec![indices(&fact.shape).map(|index| element(&index)).collect()])
}

/// The elements that a point reads along one axis: the position of each, and its weight unless that is 1.
fn read<'g>(sampling: Sampling, grid: Var<'g>, part: usize, extent: usize) -> Vec<(Var<'g>, Option<Var<'g>>)> {
    let at = grid.part(3, part..part + 1);
    let (factor, summand) = sampling.scale(extent);
    let (factor, summand) = (grid.like(factor), grid.like(summand));
    let mut at = at * factor + summand;
    if sampling.border {
        at = at.clip(0.0, extent as f64 - 1.0);
    }
    if sampling.nearest {
        return vec![(at.round(), None)];
    }
    let one = grid.like(1.0);
    let first = at.floor();
    let second = first + one;
    let behind = at - first;
    vec![(first, Some(one - behind)), (second, Some(behind))]
}

fn nodes<'g>(b: Nodes<'g>, call: &Call, x: &Args<Var<'g>>) -> OpResult<Vec<Var<'g>>> {
    let ((sampling, _), shape) = (Sampling::of(call)?, call.shape(0));
    // f16 cannot represent each position in a large image.
    let wide = if call.dtype(0).is_half() { DType::F32 } else { call.dtype(0) };
    let (grid, image) = (x[1].cast(wide), channels_last(x[0], 4));
    let rows = read(sampling, grid, 1, shape[2]);
    let columns = read(sampling, grid, 0, shape[3]);
    let mut sum: Option<Var> = None;
    for &(y, by_row) in &rows {
        for &(x, by_column) in &columns {
            let (mut index, mut inside) = (Vec::new(), Vec::new());
            for (at, extent) in [(y, shape[2]), (x, shape[3])] {
                let held = at.clip(0.0, extent as f64 - 1.0);
                inside.push(at.equal(held));
                index.push(held.cast(DType::I64));
            }
            let attrs = Attrs::new().with("batch_dims", 1);
            let mut value = image.op("GatherND", &[b.concat(&index, 3)], attrs).cast(wide);
            for weight in [by_row, by_column].into_iter().flatten() {
                value = value * weight;
            }
            let value = inside[0].and(inside[1]).select(value, 0.0);
            sum = Some(sum.map_or(value, |others| others + value));
        }
    }
    let sum = sum.expect("a point reads at least one element").cast(call.dtype(0));
    Ok(vec![channels_first(sum, 4)])
}

#[cfg(test)]
mod tests {
    use crate::dtype::DType::*;
    use crate::op::Attrs;
    use crate::ops::tests::{eval, refused};

    #[test]
    fn points_follow_the_specification() {
        let image = (F32, &[1, 1, 2, 2][..], &[1.0, 2.0, 3.0, 4.0][..]);
        let points = (F32, &[1, 1, 4, 2][..], &[0.0, 0.0, -0.5, 0.5, 1.0, -0.5, 3.0, 0.0][..]);
        let at = |attrs: Attrs| eval("GridSample", &[image, points], &attrs);
        // The middle; an element's centre; half outside; beyond.
        assert_eq!(at(Attrs::new()), ("f32[1,1,1,4]".into(), vec![2.5, 3.0, 1.0, 0.0]));
        assert_eq!(at(Attrs::new().with("padding_mode", "border")).1, [2.5, 3.0, 2.0, 3.0]);
        assert_eq!(at(Attrs::new().with("align_corners", 1)).1, [2.5, 2.75, 2.5, 0.0]);
        assert_eq!(at(Attrs::new().with("mode", "nearest")).1, [1.0, 3.0, 0.0, 0.0]);
        let found = refused("GridSample", &[(F32, &[1, 1, 2, 2]), (F32, &[1, 1, 4, 3])], &Attrs::new());
        assert!(found.ends_with("found [1,1,2,2] and [1,1,4,3]"), "{found}");
        let cubic = Attrs::new().with("mode", "cubic");
        let found = refused("GridSample", &[(F32, &[1, 1, 2, 2]), (F32, &[1, 1, 4, 2])], &cubic);
        assert_eq!(found, "attribute 'mode': expected linear, bilinear or nearest, found 'cubic'");
    }
}
