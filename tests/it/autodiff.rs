//! Gradients beside central differences.

use crate::common;
use plimsoll::internals::op::{Data, OpDef, Sample};
use plimsoll::internals::ops;
use plimsoll::internals::reference;
use plimsoll::{Attrs, DType, Graph, Options, Tensor, Trace, ValueId, Var};
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
            let session = common::load(graph.clone(), open(), name, &Options::default()).expect("it loads");
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
    // What one rank has from another is cut after graphs are differentiated, and says so.
    for op in ops::all().filter(|op| !ops::is_passed(op)) {
        match compare(op, &op.example()) {
            Ok(compared) => derived += usize::from(compared),
            Err(what) => wrong.push(format!("{}: {what}", op.name)),
        }
    }
    assert!(wrong.is_empty(), "{}\n{}", wrong.len(), wrong.join("\n"));
    assert!(derived > 150, "{derived} rows compute floats from floats");
}

/// Derivatives where an operator has a kink, a tie or a single element, by what PyTorch gives: the operator, its attributes, its inputs, the
/// gradient of its first output, and that of its first input.
type AtPoint = (&'static str, Attrs, Vec<Vec<f64>>, Vec<f64>, Vec<f64>);

fn points() -> Vec<AtPoint> {
    let none = Attrs::new;
    let first = || Attrs::new().with("axes", vec![0]).with("keepdims", 0);
    let window = || Attrs::new().with("kernel_shape", vec![2]);
    let inf = f64::INFINITY;
    vec![
        ("ReduceL2", first(), vec![vec![0.0, 0.0]], vec![1.0], vec![0.0, 0.0]),
        ("ReduceL2", first(), vec![vec![3.0, 4.0]], vec![1.0], vec![0.6, 0.8]),
        ("ReduceL2", first(), vec![vec![0.0]], vec![1.0], vec![0.0]),
        ("ReduceL1", first(), vec![vec![0.0, 2.0]], vec![1.0], vec![0.0, 1.0]),
        ("ReduceSumSquare", first(), vec![vec![0.0, 2.0]], vec![1.0], vec![0.0, 4.0]),
        ("ReduceLogSum", first(), vec![vec![0.0, 0.0]], vec![1.0], vec![inf, inf]),
        ("ReduceLogSumExp", first(), vec![vec![-inf, 0.0]], vec![1.0], vec![0.0, 1.0]),
        ("ReduceLogSumExp", first(), vec![vec![7.0]], vec![1.0], vec![1.0]),
        ("ReduceLogSumExp", first(), vec![vec![7.0, 7.0]], vec![1.0], vec![0.5, 0.5]),
        // As `torch.amax`. A maximum that has an index, as of `torch.max (x, dim)`, is a TopK of one.
        ("ReduceMax", first(), vec![vec![1.0, 1.0, 0.0]], vec![1.0], vec![0.5, 0.5, 0.0]),
        ("ReduceMin", first(), vec![vec![1.0, 1.0, 2.0]], vec![1.0], vec![0.5, 0.5, 0.0]),
        ("TopK", none().with("K", 1), vec![vec![1.0, 1.0]], vec![1.0], vec![1.0, 0.0]),
        ("ReduceProd", first(), vec![vec![0.0, 2.0, 3.0]], vec![1.0], vec![6.0, 0.0, 0.0]),
        ("ReduceProd", first(), vec![vec![0.0, 0.0, 3.0]], vec![1.0], vec![0.0, 0.0, 0.0]),
        ("ReduceProd", first(), vec![vec![0.0]], vec![1.0], vec![1.0]),
        ("ReduceMean", first(), vec![vec![3.0]], vec![1.0], vec![1.0]),
        ("Sqrt", none(), vec![vec![0.0, 4.0]], vec![1.0, 1.0], vec![inf, 0.25]),
        ("Reciprocal", none(), vec![vec![0.0]], vec![1.0], vec![-inf]),
        ("Log", none(), vec![vec![0.0]], vec![1.0], vec![inf]),
        ("Abs", none(), vec![vec![0.0]], vec![1.0], vec![0.0]),
        ("Sign", none(), vec![vec![0.0]], vec![1.0], vec![0.0]),
        ("Relu", none(), vec![vec![0.0]], vec![1.0], vec![0.0]),
        ("Softplus", none(), vec![vec![0.0]], vec![1.0], vec![0.5]),
        ("Softsign", none(), vec![vec![0.0]], vec![1.0], vec![1.0]),
        ("Elu", none(), vec![vec![0.0]], vec![1.0], vec![1.0]),
        ("Max", none(), vec![vec![1.0], vec![1.0]], vec![1.0], vec![0.5]),
        ("Min", none(), vec![vec![1.0], vec![1.0]], vec![1.0], vec![0.5]),
        (
            "Pow",
            none(),
            vec![vec![0.0, 0.0, 2.0, 0.0], vec![2.0, 0.0, 0.0, 1.0]],
            vec![1.0; 4],
            vec![0.0, 0.0, 0.0, 1.0],
        ),
        ("Pow", none(), vec![vec![0.0, 0.0], vec![3.5, 0.5]], vec![1.0; 2], vec![0.0, inf]),
        // Documented: the gradient reaches what is on a bound.
        (
            "Clip",
            none().with("min", -1.0).with("max", 1.0),
            vec![vec![-1.0, 1.0, 0.0, 2.0, -2.0]],
            vec![1.0; 5],
            vec![1.0, 1.0, 1.0, 0.0, 0.0],
        ),
        ("Softmax", none(), vec![vec![1.0, 1.0]], vec![1.0, 0.0], vec![0.25, -0.25]),
        ("Softmax", none(), vec![vec![1.0, -inf]], vec![1.0, 0.0], vec![0.0, 0.0]),
        ("Softmax", none(), vec![vec![1.0]], vec![1.0], vec![0.0]),
        ("LogSoftmax", none(), vec![vec![1.0, 1.0]], vec![1.0, 0.0], vec![0.5, -0.5]),
        // Documented: where the norm is 0, it divides by 1.
        ("LpNormalization", none(), vec![vec![0.0, 0.0]], vec![1.0, 2.0], vec![1.0, 2.0]),
        ("LpNormalization", none().with("p", 1), vec![vec![0.0, 0.0]], vec![1.0, 2.0], vec![1.0, 2.0]),
        ("LpPool", window(), vec![vec![0.0, 0.0]], vec![1.0], vec![0.0, 0.0]),
        ("LpPool", window().with("p", 1), vec![vec![0.0, 0.0]], vec![1.0], vec![0.0, 0.0]),
        ("LpPool", window().with("p", 3), vec![vec![0.0, 0.0]], vec![1.0], vec![0.0, 0.0]),
        ("LpPool", window(), vec![vec![3.0, 4.0]], vec![1.0], vec![0.6, 0.8]),
        ("GlobalLpPool", none(), vec![vec![0.0, 0.0]], vec![1.0], vec![0.0, 0.0]),
        ("GlobalLpPool", none().with("p", 3), vec![vec![0.0, 0.0]], vec![1.0], vec![0.0, 0.0]),
        ("MaxPool", window(), vec![vec![1.0, 1.0]], vec![1.0], vec![1.0, 0.0]),
        // Documented: the mean of both sides, or the right one.
        ("HardSigmoid", none().with("alpha", 0.25), vec![vec![-2.0, 2.0]], vec![1.0; 2], vec![0.125, 0.125]),
        ("Selu", none(), vec![vec![0.0]], vec![1.0], vec![1.404_400_18]),
        ("LeakyRelu", none(), vec![vec![0.0]], vec![1.0], vec![1.0]),
        ("PRelu", none(), vec![vec![0.0], vec![0.25]], vec![1.0], vec![1.0]),
    ]
}

#[test]
fn derivatives_at_kinks_and_ties_are_those_of_pytorch() {
    let mut failures = Vec::new();
    // Shaders have no reliable infinities.
    let finite = |values: &[f64]| values.iter().all(|value| value.is_finite());
    let backends = common::backends();
    for (op, attrs, inputs, dy, expected) in points() {
        let g = Trace::new(op);
        // Windows have batches and channels in front.
        let front = if op.ends_with("Pool") { vec![1, 1] } else { vec![] };
        let shaped = |values: &Vec<f64>| [&front[..], &[values.len()]].concat();
        let given: Vec<_> =
            inputs.iter().enumerate().map(|(k, x)| g.input(&format!("x{k}"), DType::F32, shaped(x))).collect();
        let slots: Vec<_> = given.iter().copied().map(Some).collect();
        let y = g.outputs(op, &slots, attrs.clone())[0].reshape(&[-1]);
        let loss = (y * g.constant("dy", Tensor::from_f64(DType::F32, [dy.len()], &dy))).reduce_sum(&[], false);
        // Where nothing leads back, there is no derivative.
        let found = if op == "Sign" { given[0] * 0.0 } else { g.grad(loss, &given[..1])[0] };
        g.output("dx", found);
        let graph = g.finish().expect("it is a graph");
        let tensors: Vec<_> = inputs.iter().map(|x| Tensor::from_f64(DType::F32, shaped(x), x)).collect();
        let by_reference = reference::run(&graph, &tensors).expect("it runs")[0].to_f64();
        let names: Vec<String> = (0..tensors.len()).map(|slot| format!("x{slot}")).collect();
        let named: Vec<_> = names.iter().map(String::as_str).zip(tensors).collect();
        let sound = finite(&expected) && inputs.iter().all(|x| finite(x));
        for &(name, open) in backends.iter().filter(|(name, _)| sound || *name != "wgpu") {
            let session = common::load(graph.clone(), open(), name, &Options::default());
            let by_device = session.expect("it is planned").run(&named).expect("it runs")[0].1.to_f64();
            for (by, found) in [("the reference", &by_reference), (name, &by_device)] {
                let near = |(found, expected): (&f64, &f64)| found == expected || (found - expected).abs() < 1e-5;
                if !found.iter().zip(&expected).all(near) {
                    failures
                        .push(format!("{op} {attrs:?} at {inputs:?}, by {by}: expected {expected:?}, found {found:?}"));
                }
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

/// Parts of one value, by Gathers of known indices, have gradients that lie side by side.
#[test]
fn parts_that_are_all_of_a_value_have_gradients_side_by_side() {
    let g = Trace::new("parts");
    let x = g.input("x", DType::F32, [3, 2, 4]);
    let weights = g.input("weights", DType::F32, [3, 2, 4]);
    let index = |i: f64| g.constant("index", Tensor::from_f64(DType::I64, [], &[i]));
    let part = |i: usize| {
        let taken = x.op("Gather", &[index(i as f64 - 3.0 * (i % 2) as f64)], Attrs::new().with("axis", 0));
        (taken * weights.part(0, i..i + 1).reshape(&[2, 4])).reduce_sum(&[], false)
    };
    let loss = part(2) + part(0) + part(1);
    g.output("loss", loss);
    g.output("dx", g.grad(loss, &[x])[0]);
    let graph = g.finish().expect("it is sound");
    let has = |name: &str| graph.order().expect("no cycle").iter().any(|&node| graph.node(node).op_name() == name);
    assert!(!has("Scatter") && !has("Pad") && !has("ScatterND"), "it adds up what lies apart");
    let mut random = Random(3);
    let inputs = [random.draw(-1.0, 1.0, 24), random.draw(-1.0, 1.0, 24)];
    assert_eq!(values(&graph, &inputs)[&graph.outputs()[1].1], inputs[1]);
}

/// Pads of values that are no zeros are added up, though they lie side by side.
#[test]
fn gradients_with_other_values_around_them_are_added_up() {
    let g = Trace::new("pads");
    let x = g.input("x", DType::F32, [4]);
    let [a, b] = ["a", "b"].map(|name| g.input(name, DType::F32, [2]));
    fn padded(part: Var<'_>, pads: [i64; 2], value: f64) -> Var<'_> {
        part.op("Pad", &[], Attrs::new().with("pads", pads.to_vec()).with("constant_value", value))
    }
    let loss = (x * padded(a, [0, 2], 5.0) + x * padded(b, [2, 0], 7.0)).reduce_sum(&[], false);
    g.output("loss", loss);
    g.output("dx", g.grad(loss, &[x])[0]);
    let graph = g.finish().expect("it is sound");
    let inputs = [vec![0.0; 4], vec![1.0, 2.0], vec![3.0, 4.0]];
    assert_eq!(values(&graph, &inputs)[&graph.outputs()[1].1], [8.0, 9.0, 8.0, 9.0]);
}

/// Halves of a value that is read as a whole, too, as where it is turned: their gradients are side by side, and no zeros stand around them.
#[test]
fn gradients_of_halves_and_of_the_whole_are_added_up() {
    let g = Trace::new("turned");
    let [x, w, v] = ["x", "w", "v"].map(|name| g.input(name, DType::F32, [1, 4]));
    let half = |from: i64| {
        let attrs = Attrs::new().with("axes", vec![1]).with("starts", vec![from]).with("ends", vec![from + 2]);
        x.op("Slice", &[], attrs)
    };
    let turned = (-half(2)).op("Concat", &[half(0)], Attrs::new().with("axis", 1));
    let loss = (x * w + turned * v).reduce_sum(&[], false);
    g.output("loss", loss);
    g.output("dx", g.grad(loss, &[x])[0]);
    let graph = g.finish().expect("it is sound");
    let inputs = [vec![0.0; 4], vec![1.0, 2.0, 3.0, 4.0], vec![10.0, 20.0, 30.0, 40.0]];
    assert_eq!(values(&graph, &inputs)[&graph.outputs()[1].1], [31.0, 42.0, -7.0, -16.0]);
    let pads = graph.order().expect("it has one").into_iter().filter(|&node| graph.node(node).op_name() == "Pad");
    assert_eq!(pads.count(), 0);
}

/// A table of few rows that many indices name: its gradient is that of stretches of the updates, on devices, too.
#[test]
fn gradients_of_small_tables_are_those_of_the_reference() {
    let mut random = Random(11);
    let few: Vec<f64> = random.draw(-7.0, 7.0, 4096).into_iter().map(f64::floor).collect();
    // A large table, most of whose updates are for one row: a workgroup lists them a part at a time.
    let one: Vec<f64> =
        random.draw(-70.0, 700.0, 600).into_iter().map(|at| if at < 70.0 { at.floor() } else { 3.0 }).collect();
    for (rows, width, indices, parts) in [(7, 3, few, true), (70, 1000, one, false)] {
        let count = indices.len();
        let g = Trace::new("table");
        let table = g.input("table", DType::F32, [rows, width]);
        let weights = g.input("weights", DType::F32, [count, width]);
        let indices = g.constant("indices", Tensor::from_f64(DType::I64, [count], &indices));
        let taken = table.op("Gather", &[indices], Attrs::new().with("axis", 0));
        let loss = (taken * weights).reduce_sum(&[], false);
        g.output("dtable", g.grad(loss, &[table])[0]);
        let graph = g.finish().expect("it is sound");
        let mut state = 5;
        for opener in common::backends() {
            let plan = common::runs_as_the_reference(&graph, &opener, &mut state);
            // Stretches are sums of their own, and a sum of these.
            let is_one = plan.programs[0].steps.len() == 1;
            assert!(opener.0 == "cpu" || !parts || !is_one, "{}: one step", opener.0);
        }
    }
}
