//! Rows that find as many elements as the run decides. Their outputs have room for the most that there can be, with zeros behind what was
//! found. The last output is how many were found.

use super::found::{Unique, best_boxes};
use super::reduce::running_sums;
use super::repeat::{Inputs, repeat};
use super::scatter::SCATTER;
use super::sort::order;
use super::{ensure, position};
use crate::dtype::DType;
use crate::op::{Args, Attrs, Call, Eval, Fact, Lower, Nodes, OpDef, OpResult, Var, inputs, names};
use crate::shape::{Shape, indices};

/// The most columns by which slices are sorted.
pub(super) const MOST_COLUMNS: usize = 1 << 6;

pub(super) static OPS: &[OpDef] = &[
    OpDef::new(
        "plimsoll.NonZero",
        "NonZero of elements that a run gives",
        inputs![X],
        |call| {
            let shape = call.shape(0);
            counted(vec![Fact::new(DType::I64, [shape.len(), shape.numel()])])
        },
        Eval::Tensor(|x, call| {
            let shape = call.shape(0);
            let found: Vec<_> = indices(shape).zip(x[0]).filter(|(_, v)| **v != 0.0).map(|(index, _)| index).collect();
            let column = |axis: usize| (0..shape.numel()).map(move |k| (k, axis));
            let place = |(k, axis): (usize, usize)| found.get(k).map_or(0.0, |index: &Vec<usize>| index[axis] as f64);
            Ok(vec![(0..shape.len()).flat_map(column).map(place).collect(), vec![found.len() as f64]])
        }),
        Lower::Decompose(non_zero),
    )
    .sample(|s| s.given(DType::F32, &[2, 3], &[0.0, 1.0, 2.0, 0.0, 0.0, -3.0])),
    OpDef::new(
        "plimsoll.Compress",
        "Compress by a condition that a run gives",
        inputs![input condition],
        |call| {
            let (shape, axis, most) = compressed(call)?;
            let kept: Shape = (0..shape.len()).map(|k| if k == axis { most } else { shape[k] }).collect();
            counted(vec![Fact::new(call.dtype(0), kept)])
        },
        Eval::Tensor(|x, call| {
            let (shape, axis, most) = compressed(call)?;
            let kept: Vec<usize> = (0..most).filter(|&i| x[1][i] != 0.0).collect();
            let room: Shape = (0..shape.len()).map(|k| if k == axis { most } else { shape[k] }).collect();
            let element = |mut index: Vec<usize>| {
                kept.get(index[axis]).map_or(0.0, |&at| {
                    index[axis] = at;
                    x[0][position(&index, &shape)]
                })
            };
            Ok(vec![indices(&room).map(element).collect(), vec![kept.len() as f64]])
        }),
        Lower::Decompose(|b, call, x| {
            let (shape, axis, most) = compressed(call)?;
            let found = Found::new(b, x[1].cast(DType::Bool), most, 0)?;
            let kept = x[0].shaped(&shape).gather(found.places, axis as i64);
            Ok(vec![found.zeros_behind(b, kept, axis), found.count])
        }),
    )
    .sample(|s| s.floats(&[&[3, 4, 2]]).given(DType::Bool, &[4], &[1.0, 0.0, 1.0, 1.0]).attr("axis", 1))
    .attrs(names![axis]),
    OpDef::new(
        "plimsoll.Unique",
        "Unique of elements that a run gives",
        inputs![X],
        |call| {
            let ([n, _], axis) = (slices(call)?, axis(call)?);
            let found = if axis.is_some() { call.shape(0).clone() } else { Shape::new([n]) };
            let numbers = || Fact::new(DType::I64, [n]);
            counted(vec![Fact::new(call.dtype(0), found), numbers(), numbers(), numbers()])
        },
        Eval::Tensor(|x, call| {
            let (axis, facts) = (axis(call)?, call.infer()?);
            let known = Unique::of(call.dtype(0), call.shape(0).clone(), x[0].to_vec(), call)?;
            let room = facts[0].shape.clone();
            let (found, at) = (known.found(), axis.unwrap_or(0));
            let [elements, first, inverse, counts] = known.numbers();
            let element = |index: Vec<usize>| {
                if index[at] < found[at] { elements[position(&index, &found)] } else { 0.0 }
            };
            let filled = |mut numbers: Vec<f64>| {
                numbers.resize(inverse.len(), 0.0);
                numbers
            };
            let count = vec![first.len() as f64];
            let elements = indices(&room).map(element).collect();
            Ok(vec![elements, filled(first), inverse.clone(), filled(counts), count])
        }),
        Lower::Decompose(unique),
    )
    .sample(|s| s.given(DType::F32, &[6], &[2.0, 1.0, 6.0, 3.0, 4.0, 5.0]))
    .attrs(names![axis sorted]),
    OpDef::new(
        "plimsoll.NonMaxSuppression",
        "NonMaxSuppression of boxes and scores that a run gives",
        inputs![boxes scores max_output_boxes_per_class= iou_threshold= score_threshold=],
        |call| {
            let Boxes { images, classes, most, .. } = Boxes::of(call)?;
            counted(vec![Fact::new(DType::I64, [images * classes * most, 3])])
        },
        Eval::Tensor(|x, call| {
            let room = call.infer()?.swap_remove(0).shape.numel();
            let found = best_boxes([call.shape(0), call.shape(1)], [x[0], x[1]], call)?;
            let mut found: Vec<f64> = found.into_iter().map(|number| number as f64).collect();
            let count = (found.len() / 3) as f64;
            found.resize(room, 0.0);
            Ok(vec![found, vec![count]])
        }),
        Lower::Decompose(best),
    )
    .sample(|s| {
        let boxes = [0.0, 0.0, 1.0, 1.0, 0.0, 0.1, 1.0, 1.1, 0.0, 10.0, 1.0, 11.0];
        s.given(DType::F32, &[1, 3, 4], &boxes)
            .given(DType::F32, &[1, 1, 3], &[0.9, 0.75, 0.6])
            .attr("max_output_boxes_per_class", 3)
            .attr("iou_threshold", 0.5)
    })
    .attrs(names![center_point_box]),
];

/// A row that finds at run time what ONNX's operator finds among constants.
pub struct Finder {
    /// ONNX's operator.
    pub op: &'static str,
    /// The row.
    pub row: &'static str,
    /// Per output of the row but the last: the axis that is as long as many were found, if one is.
    pub axes: fn(&Call) -> OpResult<Vec<Option<usize>>>,
    /// By the number of an input, and whether elements of all its axes count on their own: the element of which the row finds none. It stands
    /// behind those that a node before it found.
    pub filler: fn(usize, bool) -> Result<f64, &'static str>,
}

/// All of them.
static FINDERS: [Finder; 4] = [
    Finder { op: "NonZero", row: "plimsoll.NonZero", axes: |_| Ok(vec![Some(1)]), filler: |_, _| Ok(0.0) },
    Finder {
        op: "Compress",
        row: "plimsoll.Compress",
        axes: |call| Ok(vec![Some(compressed(call)?.1)]),
        filler: |input, flat| match (input, flat) {
            (0, true) => Err("it keeps elements of all axes of what a node before it found: expected an axis"),
            _ => Ok(0.0),
        },
    },
    Finder {
        op: "Unique",
        row: "plimsoll.Unique",
        axes: |call| Ok(vec![Some(axis(call)?.unwrap_or(0)), Some(0), None, Some(0)]),
        filler: |_, _| Err("it looks among elements that a node before it found: expected elements that are given"),
    },
    Finder {
        op: "NonMaxSuppression",
        row: "plimsoll.NonMaxSuppression",
        axes: |_| Ok(vec![Some(0)]),
        filler: |input, _| Ok(if input == 1 { f64::NEG_INFINITY } else { 0.0 }),
    },
];

/// The row of ONNX's operator; `None` if it does not find elements.
pub fn finder(op: &str) -> Option<&'static Finder> {
    FINDERS.iter().find(|finder| finder.op == op)
}

/// The facts of the outputs, and of how many were found.
fn counted(mut facts: Vec<Fact>) -> OpResult<Vec<Fact>> {
    facts.push(Fact::new(DType::I64, []));
    Ok(facts)
}

/// The elements of `[n]` that hold.
struct Found<'g> {
    /// Per element: how many hold up to there.
    ranks: Var<'g>,
    /// The places of those that hold, then a number that stands for none.
    places: Var<'g>,
    count: Var<'g>,
    most: usize,
}

impl<'g> Found<'g> {
    fn new(b: Nodes<'g>, holds: Var<'g>, n: usize, none: usize) -> OpResult<Found<'g>> {
        let ranks = running_sums(holds.cast(DType::I32), 0, false, false);
        // Updates whose index is outside are not written.
        let at = holds.select(ranks - 1.0, n as f64);
        let places = b.scalar(none as f64, DType::I32).expand(&[n]);
        let places = places.op(SCATTER, &[at, b.numbers(DType::I32, [n], 0.0)], unique_indices());
        let count = match n {
            0 => b.scalar(0.0, DType::I64),
            n => ranks.part(0, n - 1..n).shaped(&[]).cast(DType::I64),
        };
        Ok(Found { ranks, places, count, most: n })
    }

    /// A value with zeros behind what was found, along an axis.
    fn zeros_behind(&self, b: Nodes<'g>, value: Var<'g>, axis: usize) -> Var<'g> {
        let Ok(shape) = value.shape() else { return value };
        let mut along = vec![1; shape.len() - axis];
        along[0] = self.most;
        let inside = b.numbers(DType::I64, along, 0.0).less(self.count);
        match value.fact().map(|fact| fact.dtype) {
            Ok(DType::Bool) => inside.and(value),
            _ => inside.select(value, 0.0),
        }
    }
}

fn unique_indices() -> Attrs {
    Attrs::new().with("axis", 0).with("unique_indices", 1)
}

fn non_zero<'g>(b: Nodes<'g>, call: &Call, x: &Args<Var<'g>>) -> OpResult<Vec<Var<'g>>> {
    let shape = call.shape(0);
    let (n, rank) = (shape.numel(), shape.len());
    let found = Found::new(b, x[0].cast(DType::Bool).shaped(&[n]), n, 0)?;
    if rank == 0 || n == 0 {
        return Ok(vec![b.constant(DType::I64, [rank, n], Vec::new), found.count]);
    }
    let behind = |axis: usize| shape[axis + 1..].iter().product::<usize>() as f64;
    let column = |of: &dyn Fn(usize) -> f64| (0..rank).map(of).collect::<Vec<_>>();
    let strides = b.constant(DType::I32, [rank, 1], || column(&behind));
    let extents = b.constant(DType::I32, [rank, 1], || column(&|axis| shape[axis] as f64));
    let places = found.places.shaped(&[1, n]);
    let indices = if rank == 1 { places } else { places / strides % extents };
    Ok(vec![indices.cast(DType::I64), found.count])
}

/// The input's shape, flat if no axis is given; the axis; and the number of elements that may be kept.
fn compressed(call: &Call) -> OpResult<(Shape, usize, usize)> {
    let whole = call.attrs.get("axis").is_none();
    let shape = if whole { Shape::new([call.shape(0).numel()]) } else { call.shape(0).clone() };
    let axis = call.axis("axis", 0, &shape)?;
    ensure(call.dtype(1) == DType::Bool && call.shape(1).len() == 1, || {
        format!("input 'condition': expected bool[n], found {}", call.fact(1))
    })?;
    let most = call.shape(1)[0];
    ensure(most <= shape[axis], || {
        format!("input 'condition': expected at most {} elements, found {most}", shape[axis])
    })?;
    Ok((shape, axis, most))
}

/// The axis of the slices that are compared; none if elements are.
fn axis(call: &Call) -> OpResult<Option<usize>> {
    call.attrs.get("axis").map(|_| call.axis("axis", 0, call.shape(0))).transpose()
}

/// The number of slices, and of elements in each.
fn slices(call: &Call) -> OpResult<[usize; 2]> {
    let (shape, axis) = (call.shape(0), axis(call)?);
    let n = axis.map_or(shape.numel(), |axis| shape[axis]);
    let Some(axis) = axis else { return Ok([n, 1]) };
    let others = (0..shape.len()).filter(|&k| k != axis).map(|k| shape[k]).product();
    ensure((1..=MOST_COLUMNS).contains(&others), || {
        format!("input 'X': expected slices of 1 to {MOST_COLUMNS} elements, found {others}")
    })?;
    Ok([n, others])
}

fn unique<'g>(b: Nodes<'g>, call: &Call, x: &Args<Var<'g>>) -> OpResult<Vec<Var<'g>>> {
    let (shape, [n, width], axis) = (call.shape(0), slices(call)?, axis(call)?);
    let whole = if axis.is_some() { x[0] } else { x[0].shaped(&[n]) };
    let at = axis.unwrap_or(0);
    if n == 0 {
        let none = || b.constant(DType::I64, [0], Vec::new);
        return Ok(vec![whole, none(), none(), none(), b.scalar(0.0, DType::I64)]);
    }
    let axes: Vec<usize> = std::iter::once(at).chain((0..shape.len()).filter(|&k| k != at)).collect();
    let table = if axis.is_some() { x[0].transpose(&axes) } else { whole };
    let table = if call.dtype(0) == DType::Bool { table.cast(DType::I32) } else { table };
    let table = table.shaped(&[n, width]);
    // Sorted by the last column first; equal ones stay in their order.
    let keys = |column: usize| table.part(1, column..column + 1).shaped(&[n]);
    let mut sorted_by = order(keys(width - 1), n, n, false);
    for column in (0..width - 1).rev() {
        let next = order(keys(column).gather(sorted_by, 0), n, n, false);
        sorted_by = sorted_by.gather(next, 0);
    }
    let sorted = table.gather(sorted_by, 0);
    let yes = b.scalar(1.0, DType::Bool).expand(&[1]);
    let [later, earlier] = [sorted.part(0, 1..n), sorted.part(0, 0..n - 1)];
    let mut same = later.equal(earlier);
    if call.dtype(0).is_float() {
        let [later, earlier] = [later, earlier].map(|v| v.op("IsNaN", &[], Attrs::new()));
        same = same.or(later.and(earlier));
    }
    let again = same.cast(DType::I32).reduce_min(&[1], false);
    let starts = if n == 1 { yes } else { b.concat(&[yes, again.equal(0.0)], 0) };
    let found = Found::new(b, starts, n, n)?;
    let last = (n - 1) as f64;
    let next = b.concat(&[found.places.part(0, 1..n), b.scalar(n as f64, DType::I32).expand(&[1])], 0);
    let mut counts = next - found.places;
    let mut first = sorted_by.gather(found.places.min(last), 0);
    let none = b.scalar(0.0, DType::I32).expand(&[n]);
    let mut inverse = none.op(SCATTER, &[sorted_by, found.ranks - 1.0], unique_indices());
    if call.int("sorted", 1)? == 0 {
        let firsts = none.op(SCATTER, &[sorted_by, starts.cast(DType::I32)], unique_indices()).cast(DType::Bool);
        let seen = Found::new(b, firsts, n, n)?;
        let own = seen.places.min(last);
        counts = counts.gather(inverse.gather(own, 0), 0);
        inverse = (seen.ranks - 1.0).gather(first.gather(inverse, 0), 0);
        first = own;
    }
    let elements = whole.gather(first, at as i64);
    let [elements, first, counts] =
        [(elements, at), (first, 0), (counts, 0)].map(|(v, axis)| found.zeros_behind(b, v, axis));
    let numbers = |v: Var<'g>| v.cast(DType::I64);
    Ok(vec![elements, numbers(first), numbers(inverse), numbers(counts), found.count])
}

/// The extents of a NonMaxSuppression.
struct Boxes {
    images: usize,
    classes: usize,
    boxes: usize,
    /// The most boxes of a class.
    most: usize,
    /// The overlap above which a better box hides another one, and the score above which a box counts.
    thresholds: [f64; 2],
}

impl Boxes {
    fn of(call: &Call) -> OpResult<Boxes> {
        let (&[images, boxes, 4], &[batch, classes, each]) = (&call.shape(0)[..], &call.shape(1)[..]) else {
            let (boxes, scores) = (call.shape(0), call.shape(1));
            return Err(format!(
                "expected boxes [n, boxes, 4] and scores [n, classes, boxes], found {boxes} and {scores}"
            ));
        };
        ensure(images == batch && boxes == each && call.dtype(0) == call.dtype(1), || {
            format!("expected a score per box of {}, found {}", call.fact(0), call.fact(1))
        })?;
        ensure(call.dtype(0).is_float(), || format!("input 'boxes': expected a float type, found {}", call.fact(0)))?;
        let asked = usize::try_from(call.int("max_output_boxes_per_class", 0)?).unwrap_or(0);
        let most = asked.min(boxes);
        let thresholds = [call.float("iou_threshold", 0.0)?, call.float("score_threshold", f64::NEG_INFINITY)?];
        call.int("center_point_box", 0)?;
        Ok(Boxes { images, classes, boxes, most, thresholds })
    }
}

/// Takes the best box of each image and class, hides those that overlap it, and so on.
fn best<'g>(b: Nodes<'g>, call: &Call, x: &Args<Var<'g>>) -> OpResult<Vec<Var<'g>>> {
    let Boxes { images, classes, boxes, most, thresholds: [threshold, least] } = Boxes::of(call)?;
    let room = images * classes * most;
    if room == 0 {
        return Ok(vec![b.constant(DType::I64, [0, 3], Vec::new), b.scalar(0.0, DType::I64)]);
    }
    // Areas in pixels are larger than a half can be.
    let [corners, scores] = [x[0], x[1]].map(|v| if call.dtype(0).size() < 4 { v.cast(DType::F32) } else { v });
    let spans = Span::of(call, corners, [images, boxes])?;
    let numbers = b.numbers(DType::I64, [boxes], 0.0);
    let scores = scores.greater(least).select(scores, f64::NEG_INFINITY);
    let Span { low: [left, top], high: [right, bottom], area } = spans;
    let captured = vec![left, top, right, bottom, area, numbers];
    let made =
        repeat(b, (most, false), Inputs { carried: vec![scores], scanned: Vec::new(), captured }, &|_, given| {
            let &[scores, left, top, right, bottom, area, numbers] = given else {
                return Err("a step has scores and boxes".into());
            };
            let spans = Span { low: [left, top], high: [right, bottom], area };
            let at = scores.op("ArgMax", &[], Attrs::new().with("axis", 2).with("keepdims", 1));
            let better = scores.reduce_max(&[2], true).greater(f64::NEG_INFINITY);
            let overlap = spans.at(at.shaped(&[images, classes])).overlap(&spans);
            let hidden = overlap.greater(threshold).or(numbers.equal(at));
            Ok(vec![hidden.select(f64::NEG_INFINITY, scores), at, better])
        })?;
    let &[_, taken, holds] = &made[..] else { return Err("a loop that was refused".into()) };
    // The boxes of a class one after another.
    let [taken, holds] = [taken, holds].map(|rows| rows.transpose(&[1, 2, 3, 0]).shaped(&[room]));
    let found = Found::new(b, holds, room, 0)?;
    let place = found.places;
    let column = |value: Var<'g>| value.cast(DType::I64).shaped(&[room, 1]);
    let (image, class) = (place / (classes * most) as f64, place / most as f64 % classes as f64);
    let rows = b.concat(&[column(image), column(class), column(taken.gather(place, 0))], 1);
    Ok(vec![found.zeros_behind(b, rows, 0), found.count])
}

/// Boxes by their ends along both axes, and their areas.
struct Span<'g> {
    low: [Var<'g>; 2],
    high: [Var<'g>; 2],
    area: Var<'g>,
}

impl<'g> Span<'g> {
    /// All boxes, each number `[images, 1, boxes]`.
    fn of(call: &Call, x: Var<'g>, [images, boxes]: [usize; 2]) -> OpResult<Span<'g>> {
        let number = |k: usize| x.part(2, k..k + 1).shaped(&[images, 1, boxes]);
        let [a, b, c, d] = [0, 1, 2, 3].map(number);
        let [low, high] = match call.int("center_point_box", 0)? {
            0 => [[a.min(c), b.min(d)], [a.max(c), b.max(d)]],
            _ => [[a - c / 2.0, b - d / 2.0], [a + c / 2.0, b + d / 2.0]],
        };
        let side = |k: usize| (high[k] - low[k]).max(0.0);
        Ok(Span { low, high, area: side(0) * side(1) })
    }

    /// The boxes of these numbers `[images, classes]`, each number `[images, classes, 1]`.
    fn at(&self, numbers: Var<'g>) -> Span<'g> {
        let look_up = |of: Var<'g>| {
            let flat = of.squeeze(&[1]).op("GatherElements", &[numbers], Attrs::new().with("axis", 1));
            flat.unsqueeze(&[2])
        };
        Span { low: self.low.map(look_up), high: self.high.map(look_up), area: look_up(self.area) }
    }

    /// The area of both over that of either.
    fn overlap(&self, other: &Span<'g>) -> Var<'g> {
        let side = |k: usize| (self.high[k].min(other.high[k]) - self.low[k].max(other.low[k])).max(0.0);
        let both = side(0) * side(1);
        let either = self.area + other.area - both;
        either.greater(0.0).select(both / either, 0.0)
    }
}

#[cfg(test)]
mod tests {
    use crate::dtype::DType::*;
    use crate::op::Attrs;
    use crate::ops::tests::{outputs, refused};

    #[test]
    fn boxes_are_floats() {
        let attrs = Attrs::new().with("max_output_boxes_per_class", 1);
        let found = refused("plimsoll.NonMaxSuppression", &[(I32, &[1, 3, 4]), (I32, &[1, 1, 3])], &attrs);
        assert_eq!(found, "input 'boxes': expected a float type, found i32[1,3,4]");
    }

    #[test]
    fn zeros_stand_behind_what_is_found() {
        let found = outputs("plimsoll.NonZero", &[(F32, &[2, 2], &[0.0, 1.0, 0.5, 0.0])], &Attrs::new());
        assert_eq!(found[0], ("i64[2,4]".into(), vec![0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0]));
        assert_eq!(found[1], ("i64[]".into(), vec![2.0]));
        let inputs = [(F32, &[3, 2][..], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0][..]), (Bool, &[2], &[0.0, 1.0])];
        let kept = outputs("plimsoll.Compress", &inputs, &Attrs::new().with("axis", 0));
        assert_eq!(kept[0], ("f32[2,2]".into(), vec![3.0, 4.0, 0.0, 0.0]));
        let different = outputs("plimsoll.Unique", &[(F32, &[4], &[2.0, 1.0, 2.0, 2.0])], &Attrs::new());
        let [elements, first, inverse, counts, count] = &different[..] else { panic!("five outputs") };
        assert_eq!(elements.1, [1.0, 2.0, 0.0, 0.0]);
        assert_eq!(first.1, [1.0, 0.0, 0.0, 0.0]);
        assert_eq!((&inverse.1[..], &counts.1[..]), (&[1.0, 0.0, 1.0, 1.0][..], &[1.0, 3.0, 0.0, 0.0][..]));
        assert_eq!(count.1, [2.0]);
    }
}
