//! Gradients beside central differences.

use crate::common;
use plimsoll::internals::op::{Data, OpDef, Sample};
use plimsoll::internals::ops;
use plimsoll::internals::reference;
use plimsoll::{Attrs, DType, Graph, Options, Session, Tensor, Trace, ValueId, Var};
use std::collections::HashMap;

struct Random(u64);

impl Random {
    /// A number in 0..1.
    fn unit(&mut self) -> f64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 11) as f64 / (1u64 << 53) as f64
    }

    fn draw(&mut self, low: f64, high: f64, count: usize) -> Vec<f64> {
        (0..count).map(|_| low + (high - low) * self.unit()).collect()
    }
}

/// The sum of all float outputs of a row, each element with a weight of its own. `None` if there are none.
fn weighted<'g>(g: &'g Trace, sample: &Sample, inputs: &[Option<Var<'g>>]) -> Option<Var<'g>> {
    let mut random = Random(7);
    let mut loss: Option<Var> = None;
    for output in g.outputs(sample.op, inputs, sample.attrs.clone()) {
        let fact = output.fact().ok()?;
        if fact.dtype != DType::F32 {
            continue;
        }
        let weights = random.draw(-1.0, 1.0, fact.shape.numel());
        let weights = g.constant("weights", Tensor::from_f64(DType::F32, fact.shape.clone(), &weights));
        let sum = (output * weights).reduce_sum(&[], false);
        loss = Some(loss.map_or(sum, |loss| loss + sum));
    }
    loss
}

/// The graph of a sample's weighted sum, with its derivatives by the float inputs if these are wanted.
fn graph(sample: &Sample, derive: bool) -> Option<plimsoll::Result<Graph>> {
    let g = Trace::new(sample.op);
    let mut inputs = Vec::new();
    for (slot, input) in sample.inputs.iter().enumerate() {
        inputs.push(input.as_ref().map(|input| g.input(&format!("x{slot}"), input.dtype, &input.shape[..])));
    }
    let loss = weighted(&g, sample, &inputs)?;
    g.output("loss", loss);
    if derive {
        let floats: Vec<_> =
            inputs.iter().flatten().copied().filter(|x| x.fact().is_ok_and(|f| f.dtype == DType::F32)).collect();
        for (number, gradient) in g.grad(loss, &floats).into_iter().enumerate() {
            g.output(&format!("d{number}"), gradient);
        }
    }
    Some(g.finish())
}

fn values(graph: &Graph, inputs: &[Vec<f64>]) -> HashMap<ValueId, Vec<f64>> {
    let given = graph.inputs().iter().copied().zip(inputs.iter().cloned()).collect();
    reference::values(graph, given).expect("the sample is computed")
}

fn loss(graph: &Graph, inputs: &[Vec<f64>]) -> f64 {
    values(graph, inputs)[&graph.outputs()[0].1][0]
}

/// Compares derivatives along random directions, and by single elements, with central differences.
fn compare(op: &OpDef, sample: &Sample) -> Result<bool, String> {
    let Some(forward) = graph(sample, false) else { return Ok(false) };
    let forward = forward.expect("the sample is sound");
    let floats: Vec<usize> =
        sample.inputs.iter().flatten().enumerate().filter(|(_, i)| i.dtype == DType::F32).map(|(k, _)| k).collect();
    if floats.is_empty() {
        return Ok(false);
    }
    let both = graph(sample, true).expect("it has a loss").map_err(|error| error.to_string())?;
    both.verify().map_err(|error| error.to_string())?;
    let mut random = Random(op.name.len() as u64);
    let mut inputs = Vec::new();
    for input in sample.inputs.iter().flatten() {
        let count = input.shape.iter().product();
        inputs.push(match &input.data {
            Data::Each(values) => values.clone(),
            Data::Uniform(low, high) if input.dtype.is_float() => random.draw(*low, *high, count),
            Data::Uniform(low, high) => {
                random.draw(*low, *high + 1.0, count).iter().map(|v| v.floor().min(*high)).collect()
            }
        });
    }
    let found = values(&both, &inputs);
    for (number, &slot) in floats.iter().enumerate() {
        let gradient = &found[&both.outputs()[1 + number].1];
        let count = inputs[slot].len();
        let mut directions = vec![random.draw(-1.0, 1.0, count)];
        for _ in 0..24.min(count) {
            let mut one = vec![0.0; count];
            one[(random.unit() * count as f64) as usize] = 1.0;
            directions.push(one);
        }
        for direction in directions {
            let step = 1e-6;
            let at = |step: f64| {
                let mut moved = inputs.clone();
                moved[slot].iter_mut().zip(&direction).for_each(|(x, d)| *x += step * d);
                loss(&forward, &moved)
            };
            let expected = (at(step) - at(-step)) / (2.0 * step);
            let found: f64 = gradient.iter().zip(&direction).map(|(g, d)| g * d).sum();
            let error = (found - expected).abs() / expected.abs().max(1.0);
            if error.is_nan() || error > 1e-6 {
                return Err(format!("input {slot}: expected {expected}, found {found}"));
            }
        }
    }
    Ok(true)
}

/// The gradient of a maximum of windows by the definition: each window gives its own to the first element that is its maximum, in the order
/// of the rows, as PyTorch does.
fn first_maxima(image: &[f64], side: usize, [window, stride, pad]: [usize; 3], gradient: &[f64]) -> Vec<f64> {
    let places = (side + 2 * pad - window) / stride + 1;
    let mut sums = vec![0.0; side * side];
    for (place, gradient) in gradient.iter().enumerate() {
        let first = |place: usize| (place * stride) as isize - pad as isize;
        let (top, left) = (first(place / places), first(place % places));
        let mut best: Option<usize> = None;
        for row in top..top + window as isize {
            for column in left..left + window as isize {
                let inside = |at: isize| (0..side as isize).contains(&at);
                if inside(row) && inside(column) {
                    let at = row as usize * side + column as usize;
                    if best.is_none_or(|best| image[at] > image[best]) {
                        best = Some(at);
                    }
                }
            }
        }
        sums[best.expect("a window covers an element")] += gradient;
    }
    sums
}

/// Elements of a few values, so that most windows have their maximum several times: whole images of one value, too.
#[test]
fn of_equal_maxima_the_first_has_the_gradient_on_every_backend() {
    let (images, side) = (3, 9);
    let values: Vec<f64> = (0..images * side * side)
        .map(|at| match at / (side * side) {
            0 => 1.5,
            1 => (at * 7919 % 97 % 3) as f64 - 1.0,
            _ => -((at % 2) as f64),
        })
        .collect();
    for [window, stride, pad] in [[2, 2, 0], [3, 1, 1], [3, 2, 1], [4, 3, 2], [5, 1, 2]] {
        let g = Trace::new("ties");
        let x = g.input("x", DType::F32, [1, images, side, side]);
        let list = |value: usize, count: usize| vec![value as i64; count];
        let attrs = Attrs::new().with("kernel_shape", list(window, 2));
        let y = x.op("MaxPool", &[], attrs.with("strides", list(stride, 2)).with("pads", list(pad, 4)));
        let places = (side + 2 * pad - window) / stride + 1;
        let given: Vec<f64> = (0..images * places * places).map(|at| (at % 23) as f64 / 4.0 + 0.25).collect();
        let weights = g.constant("weights", Tensor::from_f64(DType::F32, [1, images, places, places], &given));
        let loss = (y * weights).reduce_sum(&[], false);
        g.output("dx", g.grad(loss, &[x])[0]);
        let graph = g.finish().expect("the graph is sound");
        let parts = values.chunks(side * side).zip(given.chunks(places * places));
        let expected: Vec<f64> =
            parts.flat_map(|(image, gradient)| first_maxima(image, side, [window, stride, pad], gradient)).collect();
        let x = Tensor::from_f64(DType::F32, [1, images, side, side], &values);
        for (name, open) in common::backends() {
            let session = Session::on_backend(graph.clone(), open(), name.to_owned(), &Options::default(), &|_, _| {})
                .expect("it loads");
            let found = session.run(&[("x", x.clone())]).expect("it runs");
            // Multiples of a quarter, whose sums are exact.
            assert_eq!(found[0].1.to_f64(), expected, "{name}: window {window}, stride {stride}, pad {pad}");
        }
    }
}

#[test]
fn every_row_has_the_derivatives_that_differences_show() {
    let mut wrong = Vec::new();
    let mut derived = 0;
    for op in ops::all() {
        match compare(op, &op.example()) {
            Ok(compared) => derived += usize::from(compared),
            Err(what) => wrong.push(format!("{}: {what}", op.name)),
        }
    }
    assert!(wrong.is_empty(), "{}\n{}", wrong.len(), wrong.join("\n"));
    assert!(derived > 150, "{derived} rows compute floats from floats");
}
