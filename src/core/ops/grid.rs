//! Rows that read images at points that data tells: each value is a sum of the elements around a point.

use super::compose::{channels_first, channels_last, composed};
use super::{ensure, indices, output, position, required_ints, same_float};
use crate::dtype::DType;
use crate::op::{Args, Attrs, Call, Eval, Fact, Lower, Nodes, OpDef, OpResult, Var, inputs, names};
use crate::shape::Shape;

pub(super) mod deform;
pub(super) mod regions;

pub(super) static OPS: &[OpDef] = &[
    OpDef::new(
        "GridSample",
        "The image [n, c, spatial..] at points [n, .., axes] of -1..1, the last axis first: the nearest element's \
         value, or a linear or cubic mean of those around",
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
    .wide()
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

/// How a value is made of the elements around a point.
#[derive(Clone, Copy, PartialEq)]
enum Mode {
    Linear,
    Nearest,
    Cubic,
}

/// What a place outside an image reads.
#[derive(Clone, Copy, PartialEq)]
enum Padding {
    Zeros,
    /// The border.
    Border,
    /// The place mirrored at the edges, as often as it takes.
    Reflection,
}

const MODES: &[(&str, Mode)] = &[
    ("linear", Mode::Linear),
    ("bilinear", Mode::Linear),
    ("nearest", Mode::Nearest),
    ("cubic", Mode::Cubic),
    ("bicubic", Mode::Cubic),
];
const PADDINGS: &[(&str, Padding)] =
    &[("zeros", Padding::Zeros), ("border", Padding::Border), ("reflection", Padding::Reflection)];

/// The parameter of the cubic curve.
const CUBIC: f64 = -0.75;

/// The attributes of a GridSample.
#[derive(Clone, Copy)]
struct Sampling {
    /// True if -1 and 1 are the centres of the outer elements, false if they are their edges.
    corners: bool,
    mode: Mode,
    padding: Padding,
}

impl Sampling {
    /// Reads the attributes, and infers the output's fact.
    fn of(call: &Call) -> OpResult<(Sampling, Fact)> {
        let dtype = same_float(call)?;
        let (mode, padding) = (call.choice("mode", MODES)?, call.choice("padding_mode", PADDINGS)?);
        let corners = call.int("align_corners", 0)? != 0;
        let (x, grid) = (call.shape(0), call.shape(1));
        let axes = x.len().saturating_sub(2);
        ensure((1..=3).contains(&axes) && grid.len() == x.len() && grid[axes + 1] == axes, || {
            format!("expected an image [n, c, spatial..] and a grid [n, .., axes], found {x} and {grid}")
        })?;
        ensure(!x[2..].contains(&0), || format!("input 'X': expected elements along the spatial axes, found {x}"))?;
        ensure(grid[0] == x[0], || format!("input 'grid': expected one per image of {x}, found {grid}"))?;
        let shape = [&x[..2], &grid[1..=axes]].concat();
        Ok((Sampling { corners, mode, padding }, output(dtype, shape)?.remove(0)))
    }

    /// The factor and the summand that map -1..1 to positions among this many elements.
    fn scale(self, extent: usize) -> (f64, f64) {
        let last = extent as f64 - 1.0;
        (if self.corners { last / 2.0 } else { extent as f64 / 2.0 }, last / 2.0)
    }

    /// The places at which this many elements are mirrored.
    fn mirrors(self, extent: usize) -> (f64, f64) {
        let last = extent as f64 - 1.0;
        if self.corners { (0.0, last) } else { (-0.5, last + 0.5) }
    }

    /// A place that stands for another one, which may be outside.
    fn held(self, v: f64, extent: usize) -> f64 {
        let (low, high) = self.mirrors(extent);
        match self.padding {
            Padding::Zeros => v,
            Padding::Border => v.clamp(0.0, extent as f64 - 1.0),
            Padding::Reflection if low == high => low,
            Padding::Reflection => {
                let (span, from) = (high - low, if v < low { low - v } else { (v - low).max(0.0) });
                let (times, rest) = ((from / span).floor(), from % span);
                if times % 2.0 == 0.0 { low + rest } else { high - rest }
            }
        }
    }

    /// The places along an axis that a point reads, and their weights.
    fn taps(self, at: f64, extent: usize) -> Vec<(f64, f64)> {
        if self.mode == Mode::Nearest {
            return vec![(self.held(at.round_ties_even(), extent), 1.0)];
        }
        let at = self.held(at, extent);
        let (first, behind) = (at.floor(), at - at.floor());
        if self.mode == Mode::Linear {
            return vec![(self.held(first, extent), 1.0 - behind), (self.held(first + 1.0, extent), behind)];
        }
        let weight = |distance: f64| {
            let (d, a) = (distance.abs(), CUBIC);
            if d <= 1.0 { ((a + 2.0) * d - (a + 3.0)) * d * d + 1.0 } else { a * (((d - 5.0) * d + 8.0) * d - 4.0) }
        };
        (-1..3).map(f64::from).map(|i| (self.held(first + i, extent), weight(i - behind))).collect()
    }
}

fn eval(x: &Args<&[f64]>, call: &Call) -> OpResult<Vec<Vec<f64>>> {
    let [image, grid] = [0, 1].map(|i| x[i]);
    let (sampling, fact) = Sampling::of(call)?;
    let (shape, points) = (call.shape(0), call.shape(1));
    let axes = shape.len() - 2;
    let element = |index: &[usize]| {
        let taps = |axis: usize| {
            let (factor, summand) = sampling.scale(shape[axis + 2]);
            // The last axis of an image comes first in a point.
            let at = [&index[..1], &index[2..], &[axes - 1 - axis]].concat();
            sampling.taps(grid[position(&at, points)] * factor + summand, shape[axis + 2])
        };
        let taps: Vec<_> = (0..axes).map(taps).collect();
        let count: Shape = taps.iter().map(Vec::len).collect();
        let read = |chosen: Vec<usize>| {
            let (mut at, mut weight) = (index[..2].to_vec(), 1.0);
            for (axis, &tap) in chosen.iter().enumerate() {
                let (place, share) = taps[axis][tap];
                if !(0.0..shape[axis + 2] as f64).contains(&place) {
                    return 0.0;
                }
                at.push(place as usize);
                weight *= share;
            }
            image[position(&at, shape)] * weight
        };
        indices(&count).map(read).sum()
    };
    Ok(vec![indices(&fact.shape).map(|index| element(&index)).collect()])
}

/// Elements along one axis that points read: the place of each, and its weight unless that is 1.
#[derive(Clone, Copy)]
struct Tap<'g> {
    at: Var<'g>,
    weight: Option<Var<'g>>,
}

/// The two elements around a place, by their distance from it.
fn linear<'g>(at: Var<'g>) -> [Tap<'g>; 2] {
    let one = at.like(1.0);
    let first = at.floor();
    let behind = at - first;
    [Tap { at: first, weight: Some(one - behind) }, Tap { at: first + one, weight: Some(behind) }]
}

/// The four elements around a place, by a cubic curve of their distance from it.
fn cubic<'g>(at: Var<'g>) -> Vec<Tap<'g>> {
    let (first, a) = (at.floor(), CUBIC);
    let behind = at - first;
    let near = |d: Var<'g>| (d * (a + 2.0) - (a + 3.0)) * d * d + 1.0;
    let far = |d: Var<'g>| (((d - 5.0) * d + 8.0) * d - 4.0) * a;
    let weights = [far(behind + 1.0), near(behind), near(1.0 - behind), far(2.0 - behind)];
    let tap = |(i, weight)| Tap { at: first + (f64::from(i) - 1.0), weight: Some(weight) };
    (0..).zip(weights).map(tap).collect()
}

/// The values of an image `[n, spatial.., c]` at places `[n, points.., 1]` along each axis: all combinations of the axes' elements. What is
/// outside the image counts as zero.
fn combine<'g>(b: Nodes<'g>, image: Var<'g>, taps: &[Vec<Tap<'g>>]) -> OpResult<Var<'g>> {
    let (fact, count) = (image.fact()?, taps.iter().map(Vec::len).collect::<Shape>());
    let mut sum: Option<Var> = None;
    for chosen in indices(&count) {
        let (mut index, mut inside, mut weights) = (Vec::new(), Vec::<Var>::new(), Vec::new());
        for (axis, &tap) in chosen.iter().enumerate() {
            let Tap { at, weight } = taps[axis][tap];
            let held = at.clip(0.0, fact.shape[axis + 1] as f64 - 1.0);
            inside.push(at.equal(held));
            index.push(held.cast(DType::I64));
            weights.extend(weight);
        }
        let last = index[0].shape()?.len() - 1;
        let mut value = image.op("GatherND", &[b.concat(&index, last as i64)], Attrs::new().with("batch_dims", 1));
        for weight in weights {
            value = value * weight;
        }
        let inside = inside.into_iter().reduce(|all, one| all.and(one)).ok_or("an image without axes")?;
        let value = inside.select(value, 0.0);
        sum = Some(sum.map_or(value, |others| others + value));
    }
    sum.ok_or_else(|| "a point reads at least one element".into())
}

impl Sampling {
    /// As [`held`](Self::held), of nodes.
    fn held_nodes(self, at: Var<'_>, extent: usize) -> Var<'_> {
        let (low, high) = self.mirrors(extent);
        match self.padding {
            Padding::Zeros => at,
            Padding::Border => at.clip(0.0, extent as f64 - 1.0),
            Padding::Reflection if low == high => at * 0.0 + low,
            Padding::Reflection => {
                // There and back is one period.
                let period = 2.0 * (high - low);
                let from = (at - low).abs();
                let rest = from - (from * (1.0 / period)).floor() * period;
                rest.min(period - rest) + low
            }
        }
    }

    /// As [`taps`](Self::taps), of nodes.
    fn tap_nodes<'g>(self, grid: Var<'g>, part: usize, extent: usize) -> OpResult<Vec<Tap<'g>>> {
        let last = grid.shape()?.len() - 1;
        let (factor, summand) = self.scale(extent);
        let at = grid.part(last, part..part + 1) * factor + summand;
        let mut taps = match self.mode {
            Mode::Nearest => vec![Tap { at: at.round(), weight: None }],
            Mode::Linear => linear(self.held_nodes(at, extent)).into(),
            Mode::Cubic => cubic(self.held_nodes(at, extent)),
        };
        if self.padding != Padding::Zeros {
            taps.iter_mut().for_each(|tap| tap.at = self.held_nodes(tap.at, extent));
        }
        Ok(taps)
    }
}

fn nodes<'g>(b: Nodes<'g>, call: &Call, x: &Args<Var<'g>>) -> OpResult<Vec<Var<'g>>> {
    let ((sampling, _), shape) = (Sampling::of(call)?, call.shape(0));
    let wide = call.dtype(0).unhalved();
    let (grid, image) = (x[1].cast(wide), channels_last(x[0].cast(wide), shape.len()));
    let axes = shape.len() - 2;
    let taps = |axis: usize| sampling.tap_nodes(grid, axes - 1 - axis, shape[axis + 2]);
    let sum = combine(b, image, &(0..axes).map(taps).collect::<OpResult<Vec<_>>>()?)?;
    Ok(vec![channels_first(sum.cast(call.dtype(0)), shape.len())])
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
        let sharp = Attrs::new().with("mode", "sharp");
        let found = refused("GridSample", &[(F32, &[1, 1, 2, 2]), (F32, &[1, 1, 4, 2])], &sharp);
        assert_eq!(found, "attribute 'mode': expected linear, bilinear, nearest, cubic or bicubic, found 'sharp'");
    }

    #[test]
    fn places_outside_are_mirrored() {
        let image = (F32, &[1, 1, 4][..], &[1.0, 2.0, 3.0, 4.0][..]);
        let at = |points: &[f64], corners: i64| {
            let attrs = Attrs::new().with("padding_mode", "reflection").with("align_corners", corners);
            eval("GridSample", &[image, (F32, &[1, points.len(), 1], points)], &attrs).1
        };
        // Places -1, 4.5 and 9 between the edges -0.5 and 3.5.
        assert_eq!(at(&[-1.25, 1.5, 3.75], 0), [1.0, 3.5, 2.0]);
        // Places -1 and 4 between the centres 0 and 3.
        assert_eq!(at(&[-5.0 / 3.0, 5.0 / 3.0], 1).into_iter().map(f64::round).collect::<Vec<_>>(), [2.0, 3.0]);
    }
}
