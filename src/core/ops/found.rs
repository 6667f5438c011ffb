//! Rows whose results are as many as are found. The elements that decide are known before the run.

use super::compose::composed;
use super::{ensure, output, position};
use crate::dtype::DType;
use crate::kernel::templates::ascending;
use crate::op::{Attr, Call, Eval, Lower, Nodes, OpDef, OpResult, Var, inputs, names};
use crate::shape::{Shape, indices};
use crate::tensor::Tensor;
use std::cmp::Ordering;

pub(super) static OPS: &[OpDef] = &[
    OpDef::new(
        "NonMaxSuppression",
        "The best boxes [image, class, box] of each image and class, without those that overlap a better one",
        inputs![boxes= scores= max_output_boxes_per_class= iou_threshold= score_threshold=],
        |call| output(DType::I64, known_boxes(call)?.shape().clone()),
        Eval::Known(known_boxes),
        Lower::Const,
    )
    .sample(|s| {
        let boxes = [0.0, 0.0, 1.0, 1.0, 0.0, 0.1, 1.0, 1.1, 0.0, 10.0, 1.0, 11.0];
        s.attr("boxes", Tensor::from_f64(DType::F32, [1, 3, 4], &boxes))
            .attr("scores", Tensor::from_f64(DType::F32, [1, 1, 3], &[0.9, 0.75, 0.6]))
            .attr("max_output_boxes_per_class", 3)
            .attr("iou_threshold", 0.5)
    })
    .attrs(names![center_point_box]),
    composed(
        "Unique",
        "The different elements, or slices along `axis`, of a constant; where each stands first, which one each is, \
         and how often it stands",
        inputs![X=],
        |b, call, _| {
            let x = tensor(call, "X")?;
            Unique::of(x.dtype(), x.shape().clone(), x.to_f64(), call)?.outputs(b)
        },
    )
    .sample(|s| s.attr("X", Tensor::from_f64(DType::F32, [6], &[2.0, 1.0, 1.0, 3.0, 4.0, 3.0])))
    .attrs(names![axis sorted]),
];

/// The tensor that a shaping input is.
fn tensor(call: &Call, name: &str) -> OpResult<Tensor> {
    match call.attrs.get(name) {
        Some(Attr::Tensor(tensor)) => Ok(tensor.clone()),
        Some(Attr::Int(value)) => Ok(Tensor::from_i64([], &[*value]).map_err(|e| e.to_string())?),
        Some(Attr::Float(value)) => Ok(Tensor::from_f64(DType::F32, [], &[*value])),
        Some(Attr::Ints(values)) => Tensor::from_i64([values.len()], values).map_err(|e| e.to_string()),
        Some(Attr::Floats(values)) => Ok(Tensor::from_f64(DType::F32, [values.len()], values)),
        Some(other) => Err(format!("'{name}': expected a tensor, found {}", other.kind())),
        None => Err(format!("'{name}' is required and must be a constant")),
    }
}

/// A box by its ends along both axes.
#[derive(Clone, Copy)]
struct Span {
    low: [f64; 2],
    high: [f64; 2],
}

impl Span {
    fn new(numbers: &[f64], centred: bool) -> Span {
        let [a, b, c, d] = [0, 1, 2, 3].map(|i| numbers[i]);
        if centred {
            return Span { low: [a - c / 2.0, b - d / 2.0], high: [a + c / 2.0, b + d / 2.0] };
        }
        Span { low: [a.min(c), b.min(d)], high: [a.max(c), b.max(d)] }
    }

    fn area(self) -> f64 {
        (self.high[0] - self.low[0]).max(0.0) * (self.high[1] - self.low[1]).max(0.0)
    }

    /// The area of both over that of either.
    fn overlap(self, other: Span) -> f64 {
        let both = Span {
            low: [self.low[0].max(other.low[0]), self.low[1].max(other.low[1])],
            high: [self.high[0].min(other.high[0]), self.high[1].min(other.high[1])],
        };
        let either = self.area() + other.area() - both.area();
        if either > 0.0 { both.area() / either } else { 0.0 }
    }
}

fn known_boxes(call: &Call) -> OpResult<Tensor> {
    let (boxes, scores) = (tensor(call, "boxes")?, tensor(call, "scores")?);
    let found = best_boxes([boxes.shape(), scores.shape()], [&boxes.to_f64(), &scores.to_f64()], call)?;
    Tensor::from_i64([found.len() / 3, 3], &found).map_err(|e| e.to_string())
}

/// The best boxes of each image and class, as the attributes of a call ask for them.
pub(super) fn best_boxes(shapes: [&Shape; 2], [boxes, scores]: [&[f64]; 2], call: &Call) -> OpResult<Vec<i64>> {
    let (&[images, count, 4], &[batch, classes, each]) = (&shapes[0][..], &shapes[1][..]) else {
        let [boxes, scores] = shapes;
        return Err(format!("expected boxes [n, boxes, 4] and scores [n, classes, boxes], found {boxes} and {scores}"));
    };
    ensure(images == batch && count == each, || {
        format!("expected a score per box of {}, found {}", shapes[0], shapes[1])
    })?;
    let centred = call.int("center_point_box", 0)? != 0;
    let most = call.int("max_output_boxes_per_class", 0)?.max(0) as usize;
    let (overlap, least) = (call.float("iou_threshold", 0.0)?, call.float("score_threshold", f64::NEG_INFINITY)?);
    let spans: Vec<Span> = boxes.chunks_exact(4).map(|numbers| Span::new(numbers, centred)).collect();
    let mut found = Vec::new();
    for (row, scores) in scores.chunks_exact(count.max(1)).enumerate() {
        let (image, class) = (row / classes, row % classes);
        let spans = &spans[image * count..][..count];
        let mut order: Vec<usize> = (0..count).filter(|&i| scores[i] > least).collect();
        // Of equal scores, the first comes first.
        order.sort_by(|&a, &b| ascending(scores[b], scores[a]));
        let mut kept: Vec<usize> = Vec::new();
        for i in order {
            if kept.len() == most {
                break;
            }
            if kept.iter().all(|&better| spans[i].overlap(spans[better]) <= overlap) {
                kept.push(i);
            }
        }
        found.extend(kept.into_iter().flat_map(|i| [image, class, i].map(|number| number as i64)));
    }
    Ok(found)
}

/// Doubles have all integers up to this one.
const EXACT: f64 = (1u64 << f64::MANTISSA_DIGITS) as f64;

/// The different slices of a constant.
pub(super) struct Unique {
    dtype: DType,
    shape: Shape,
    values: Vec<f64>,
    /// None if all elements count on their own.
    axis: Option<usize>,
    /// Per different slice, in the order of the result: the places where it stands.
    places: Vec<Vec<usize>>,
}

impl Unique {
    pub fn of(dtype: DType, shape: Shape, values: Vec<f64>, call: &Call) -> OpResult<Unique> {
        ensure(dtype.is_float() || values.iter().all(|v| v.abs() <= EXACT), || {
            format!("'X': expected integers up to {EXACT}, found larger ones")
        })?;
        let axis = match call.attrs.get("axis") {
            None => None,
            Some(_) => Some(call.axis("axis", 0, &shape)?),
        };
        let slices = Unique::slices(&values, &shape, axis);
        let order = |a: usize, b: usize| {
            let pairs = slices[a].iter().zip(&slices[b]);
            pairs.map(|(&a, &b)| ascending(a, b)).find(|order| order.is_ne()).unwrap_or(Ordering::Equal)
        };
        let mut sorted: Vec<usize> = (0..slices.len()).collect();
        sorted.sort_by(|&a, &b| order(a, b).then(a.cmp(&b)));
        let mut places: Vec<Vec<usize>> = Vec::new();
        for at in sorted {
            match places.last_mut() {
                Some(same) if order(same[0], at).is_eq() => same.push(at),
                _ => places.push(vec![at]),
            }
        }
        if call.int("sorted", 1)? == 0 {
            places.sort_by_key(|places| places[0]);
        }
        Ok(Unique { dtype, shape, values, axis, places })
    }

    /// The elements of each slice.
    fn slices(values: &[f64], shape: &Shape, axis: Option<usize>) -> Vec<Vec<f64>> {
        let Some(axis) = axis else { return values.iter().map(|&v| vec![v]).collect() };
        let mut slices = vec![Vec::new(); shape[axis]];
        for (index, &value) in indices(shape).zip(values) {
            slices[index[axis]].push(value);
        }
        slices
    }

    /// The shape of the different slices.
    pub fn found(&self) -> Shape {
        let Some(axis) = self.axis else { return Shape::new([self.places.len()]) };
        let mut found = self.shape.clone();
        found[axis] = self.places.len();
        found
    }

    /// The different slices, where each stands first, which one each is, and how often each stands.
    pub fn numbers(&self) -> [Vec<f64>; 4] {
        let Unique { values, shape, .. } = self;
        let element = |mut index: Vec<usize>| match self.axis {
            None => values[self.places[index[0]][0]],
            Some(axis) => {
                index[axis] = self.places[index[axis]][0];
                values[position(&index, shape)]
            }
        };
        let of_each = |of: fn(&Vec<usize>) -> usize| self.places.iter().map(|p| of(p) as f64).collect::<Vec<_>>();
        let mut inverse = vec![0.0; self.places.iter().map(Vec::len).sum()];
        for (number, places) in self.places.iter().enumerate() {
            places.iter().for_each(|&at| inverse[at] = number as f64);
        }
        [indices(&self.found()).map(element).collect(), of_each(|places| places[0]), inverse, of_each(Vec::len)]
    }

    fn outputs<'g>(&self, b: Nodes<'g>) -> OpResult<Vec<Var<'g>>> {
        let (count, total) = ([self.places.len()], [self.places.iter().map(Vec::len).sum::<usize>()]);
        let shapes = [self.found(), Shape::new(count), Shape::new(total), Shape::new(count)];
        let dtypes = [self.dtype, DType::I64, DType::I64, DType::I64];
        let outputs = shapes.into_iter().zip(dtypes).enumerate();
        Ok(outputs.map(|(k, (shape, dtype))| b.constant(dtype, shape, || self.numbers()[k].clone())).collect())
    }
}

#[cfg(test)]
mod tests {
    use crate::dtype::DType::*;
    use crate::op::Attrs;
    use crate::ops::tests::{eval, outputs};
    use crate::tensor::Tensor;

    #[test]
    fn better_boxes_hide_those_that_overlap() {
        let boxes = [0.0, 0.0, 1.0, 1.0, 0.0, 0.1, 1.0, 1.1, 0.0, 10.0, 1.0, 11.0];
        let attrs = Attrs::new()
            .with("boxes", Tensor::from_f64(F32, [1, 3, 4], &boxes))
            .with("scores", Tensor::from_f64(F32, [1, 1, 3], &[0.75, 0.9, 0.6]));
        let best = |attrs: Attrs| eval("NonMaxSuppression", &[], &attrs);
        assert_eq!(best(attrs.clone()).0, "i64[0,3]", "none are asked for");
        let attrs = attrs.with("max_output_boxes_per_class", 3).with("iou_threshold", 0.5);
        assert_eq!(best(attrs.clone()), ("i64[2,3]".into(), vec![0.0, 0.0, 1.0, 0.0, 0.0, 2.0]));
        assert_eq!(best(attrs.with("score_threshold", 0.7)).1, [0.0, 0.0, 1.0]);
    }

    #[test]
    fn different_elements_follow_the_specification() {
        let of = |tensor: Tensor, attrs: Attrs| -> Vec<_> {
            outputs("Unique", &[], &attrs.with("X", tensor)).into_iter().map(|(_, values)| values).collect()
        };
        let x = Tensor::from_f64(I64, [6], &[2.0, 1.0, 1.0, 3.0, 4.0, 3.0]);
        let sorted = of(x.clone(), Attrs::new());
        assert_eq!(sorted[..2], [vec![1.0, 2.0, 3.0, 4.0], vec![1.0, 0.0, 3.0, 4.0]]);
        let first = of(x, Attrs::new().with("sorted", 0));
        assert_eq!(first[2..], [vec![0.0, 1.0, 1.0, 2.0, 3.0, 2.0], vec![1.0, 2.0, 2.0, 1.0]]);
        let rows = Tensor::from_f64(F32, [3, 2], &[1.0, 0.0, 1.0, 0.0, 0.0, 5.0]);
        let rows = of(rows, Attrs::new().with("axis", 0));
        assert_eq!(rows, [vec![0.0, 5.0, 1.0, 0.0], vec![2.0, 0.0], vec![1.0, 1.0, 0.0], vec![1.0, 2.0]]);
    }
}
