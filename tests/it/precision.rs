//! Training with values of 16 bits: how it ends beside `f32`, what stays wide, and the scale of the loss.

use crate::common;
use plimsoll::internals::onnx::{self, Model, Weight};
use plimsoll::internals::reference;
use plimsoll::internals::train::{self, Loss, Optimizer, Programs, Rate, Training};
use plimsoll::{DType, Graph, Options, Target, Tensor};
use std::process::Command;

/// Convolution, normalization, pooling, a residual sum, softmax and products.
const NET: &str = r#"<ir_version: 10, opset_import: ["" : 20]>
    net (float[batch, 2, 6, 6] x) => (float[batch, 3] y)
    <float[4, 2, 3, 3] filters = {F72}, float[4] scale = {1, 1, 1, 1}, float[4] shift = {0, 0, 0, 0},
     float[4] mean = {0, 0, 0, 0}, float[4] variance = {1, 1, 1, 1},
     float[36, 8] first = {F288}, float[8] bias = {F8}, float[8] gain = {1, 1, 1, 1, 1, 1, 1, 1},
     float[8, 8] inner = {F64}, float[8, 3] last = {F24}>
    {
        c = Conv <pads = [1, 1, 1, 1]> (x, filters)
        n = BatchNormalization (c, scale, shift, mean, variance)
        r = Relu (n)
        p = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (r)
        f = Flatten (p)
        m = MatMul (f, first)
        h = Add (m, bias)
        l = LayerNormalization <axis = -1> (h, gain)
        q = MatMul (l, inner)
        s = Softmax <axis = -1> (q)
        e = Mul (s, l)
        t = Add (e, h)
        y = MatMul (t, last)
    }"#;

/// Maxima of what is computed in the same kernel as their gradients, of many elements and of few.
const MAXIMA: &str = r#"<ir_version: 10, opset_import: ["" : 20]>
    maxima (float[batch, 2, 6, 6] x) => (float[batch, 3] y)
    <float[4, 2, 3, 3] filters = {F72}, float[4, 1, 1] gain = {1, 1.1, 0.9, 1.2}, float[8, 4, 3, 3] inner = {F288},
     float[36, 3] last = {F108}, float[8, 3] top = {F24}>
    {
        c = Conv <pads = [1, 1, 1, 1]> (x, filters)
        s = Mul (c, gain)
        p = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (s)
        f = Flatten (p)
        m = MatMul (f, last)
        d = Conv <pads = [1, 1, 1, 1]> (p, inner)
        h = HardSwish (d)
        g = GlobalMaxPool (h)
        k = Flatten (g)
        t = MatMul (k, top)
        y = Add (m, t)
    }"#;

/// Numbers between -0.4 and 0.4, other ones for each count.
fn numbers(count: usize) -> Vec<f64> {
    (0..count).map(|at| ((at * 7919 + count * 31) % 97) as f64 / 120.0 - 0.4).collect()
}

fn net() -> (Graph, Vec<Weight>) {
    parsed(NET)
}

fn parsed(text: &str) -> (Graph, Vec<Weight>) {
    let mut text = text.to_owned();
    for count in [288, 108, 72, 64, 24, 8] {
        let list: Vec<String> = numbers(count).iter().map(f64::to_string).collect();
        text = text.replace(&format!("F{count}"), &list.join(", "));
    }
    let model = Model::new(onnx::text::parse(&text, "net.onnxtxt".as_ref()).expect("the text is sound")).with_weights();
    let weights = model.weights();
    (onnx::import(&model, &[("batch".into(), 8)]).expect("it is a graph"), weights)
}

fn method(precision: DType) -> Training {
    Training {
        decay: 0.01,
        ema: Some(0.9),
        precision,
        ..Training::new(
            Loss::CrossEntropy,
            Optimizer::Adam { beta1: 0.9, beta2: 0.999, eps: 1e-8, decoupled: true },
            Rate::constant(0.01),
        )
    }
}

fn programs(training: &Training) -> Programs {
    let (graph, weights) = net();
    train::programs(&graph, &weights, training).expect("it trains")
}

/// A step of training.
pub fn step(precision: DType) -> Graph {
    programs(&method(precision)).parts.remove(0).1
}

fn batch(seed: &mut u64) -> [Tensor; 2] {
    let x = common::random(seed, &[8, 2, 6, 6].into());
    let labels: Vec<f64> =
        x.to_f64().chunks(72).map(|row| ((row.iter().sum::<f64>().abs() * 5.0) as i64 % 3) as f64).collect();
    [x, Tensor::from_f64(DType::I64, [8], &labels)]
}

/// The losses of steps of the reference, which rounds every value to its type.
fn losses(graph: &Graph, steps: usize) -> Vec<f64> {
    let (mut seed, mut states) = (3, reference::initial(graph).expect("the elements are there"));
    let batch = batch(&mut seed);
    let step = |_| reference::step(graph, &batch, &mut states).expect("it runs")[0].to_f64()[0];
    (0..steps).map(step).collect()
}

/// Sums of `f32` beside values of 16 bits: the loss goes the way that it goes in `f32`. A rounding of bf16 is 2^-9 of a value, of f16 2^-12.
#[test]
fn trajectories_stay_beside_those_of_f32() {
    let whole = losses(&step(DType::F32), 25);
    assert!(whole[24] < whole[0] * 0.9, "{whole:?}");
    for (precision, tolerance) in [(DType::F16, 0.005), (DType::BF16, 0.03)] {
        let graph = step(precision);
        let found = losses(&graph, 25);
        for (step, (found, whole)) in found.iter().zip(&whole).enumerate() {
            assert!((found - whole).abs() < tolerance * whole, "{precision}, step {step}: {found}, in f32 {whole}");
        }
        assert_ne!(found, whole, "{precision} rounds");
    }
}

/// Products take 16 bits, and so do kept values; states, statistics and the loss are `f32`.
#[test]
fn what_is_narrow_and_what_is_wide() {
    for precision in [DType::F16, DType::BF16] {
        let Programs { parts, wide, evaluate, .. } = programs(&method(precision));
        let graph = &parts[0].1;
        assert!(graph.states().iter().all(|state| graph.fact(state.value).dtype == DType::F32));
        assert!(!evaluate.dtypes().contains(&precision));
        let order = graph.order().expect("it has no cycle");
        let of = |op: &str| -> Vec<DType> {
            let nodes = order.iter().filter(|&&node| graph.node(node).op_name() == op);
            nodes.map(|&node| graph.node(node).outputs[0].fact.dtype).collect()
        };
        for op in ["MatMul", "Conv", "Relu", "MaxPool", "Flatten"] {
            let found = of(op);
            assert!(!found.is_empty() && found.iter().all(|dtype| *dtype == precision), "{op}: {found:?}");
        }
        for op in ["Softmax", "LogSoftmax", "LayerNormalization", "Sqrt", "Exp"] {
            assert!(of(op).iter().all(|dtype| *dtype == DType::F32), "{op}");
        }
        assert_eq!(
            wide.iter().map(|(name, op)| (&name[..], *op)).collect::<Vec<_>>(),
            [("s", "Softmax"), ("e", "Mul"), ("t", "Add")]
        );
    }
    assert!(programs(&method(DType::F32)).wide.is_empty());
}

fn named<'a>(graph: &Graph, states: &'a mut [Tensor], name: &str) -> &'a mut Tensor {
    let at = graph.states().iter().position(|state| graph.value_name(state.value) == name);
    &mut states[at.unwrap_or_else(|| panic!("a state '{name}'"))]
}

/// A step whose gradients are not finite leaves everything as it is but the scale, and that is halved. After 2000 finite ones it doubles.
#[test]
fn the_scale_of_the_loss_is_found() {
    let graph = step(DType::F16);
    let mut states = reference::initial(&graph).expect("the elements are there");
    let (mut seed, scalar) = (3, |value: f64| Tensor::from_f64(DType::F32, [], &[value]));
    assert_eq!(named(&graph, &mut states, "scale/value").to_f64(), [65536.0]);
    // Products of 2^16 and this one exceed f16.
    *named(&graph, &mut states, "scale/value") = scalar(2f64.powi(30));
    let before = states.clone();
    reference::step(&graph, &batch(&mut seed), &mut states).expect("it runs");
    for ((state, before), after) in graph.states().iter().zip(&before).zip(&states) {
        match graph.value_name(state.value) {
            "scale/value" => assert_eq!(after.to_f64(), [2f64.powi(29)]),
            // The forward computation has seen a batch.
            "mean" | "variance" => assert_ne!(after, before),
            name => assert_eq!(after, before, "{name}"),
        }
    }
    *named(&graph, &mut states, "scale/value") = scalar(1024.0);
    *named(&graph, &mut states, "scale/good steps") = scalar(1998.0);
    let before = states.clone();
    for (value, good) in [(1024.0, 1999.0), (2048.0, 0.0), (2048.0, 1.0)] {
        reference::step(&graph, &batch(&mut seed), &mut states).expect("it runs");
        assert_eq!(named(&graph, &mut states, "scale/value").to_f64(), [value]);
        assert_eq!(named(&graph, &mut states, "scale/good steps").to_f64(), [good]);
    }
    assert_ne!(before[0], states[0]);
    assert_eq!(named(&graph, &mut states, "step").to_f64(), [3.0]);
    let bf16 = step(DType::BF16);
    assert!(bf16.states().iter().all(|state| !bf16.value_name(state.value).starts_with("scale/")));
}

/// The scale is a power of two, so it changes no bit of a gradient in `f32`. Parts of an update have one.
#[test]
fn parts_share_the_scale() {
    let training = Training { accumulate: 3, clip: Some(0.5), ..method(DType::F16) };
    let parts = programs(&training).parts;
    for (name, graph) in &parts {
        let scale = graph.states().iter().find(|state| graph.value_name(state.value) == "scale/value");
        let scale = scale.unwrap_or_else(|| panic!("{name} has a scale"));
        assert_eq!(scale.update.is_some(), *name == "last");
        graph.verify().expect("it is sound");
    }
}

/// Backends compute what the reference computes, about, in halves or of halves that are kept.
#[test]
fn backends_follow_the_reference() {
    for (name, open) in common::backends() {
        for (precision, net) in [DType::F16, DType::BF16].into_iter().flat_map(|p| [(p, NET), (p, MAXIMA)]) {
            let backend = open();
            let training = method(precision).on(backend.target());
            let (model, weights) = parsed(net);
            let made = train::programs(&model, &weights, &training).expect("it trains");
            let graph = made.parts.into_iter().next().expect("a step").1;
            let session = common::load(graph.clone(), backend, name, &Options::default());
            let session = session.expect("it loads");
            assert_eq!(session.usage().bytes, session.plan().bytes());
            let expected = losses(&graph, 25);
            let [x, labels] = batch(&mut 3);
            let given = [("x", x), ("labels", labels)];
            for (step, expected) in expected.iter().enumerate() {
                let found = session.run(&given).expect("it runs")[0].1.to_f64()[0];
                assert!((found - expected).abs() < 0.03 * expected, "{name}, {precision}, {step}: {found}, {expected}");
            }
        }
    }
}

/// The CPU computes in `f32`, and keeps halves for the backward computation: the first loss is that of `f32`, and later ones are beside it.
#[test]
fn what_is_kept_is_narrow_where_all_is_computed_in_f32() {
    let steps = |precision: DType| {
        let training = method(precision).on(&Target::cpu(2));
        assert_eq!((training.precision, training.kept), (DType::F32, precision));
        let graph = programs(&training).parts.remove(0).1;
        assert!(graph.dtypes().contains(&precision));
        losses(&graph, 25)
    };
    let [whole, f16, bf16] = [DType::F32, DType::F16, DType::BF16].map(steps);
    for (found, tolerance) in [(f16, 0.002), (bf16, 0.01)] {
        assert_eq!(found[0], whole[0]);
        assert_ne!(found, whole);
        let beside = found.iter().zip(&whole).all(|(found, wide)| (found - wide).abs() < tolerance * whole[0]);
        assert!(beside, "{found:?}, in f32 {whole:?}");
    }
}

#[test]
fn the_command_shows_what_precision_saves() {
    let run = |precision: &str, target: &str, more: &[&str]| {
        // Of this model, the step takes more than the evaluation, which stays f32.
        let model = concat!(env!("CARGO_MANIFEST_DIR"), "/graphs/digits.onnx");
        let args = ["plan", "--train", model, "--loss", "cross_entropy", "--batch", "512"];
        let args = [&args[..], &["--precision", precision, "--target", target], more].concat();
        let args = if target == "cuda" { [&args[..], &["--no-libraries"]].concat() } else { args };
        let output = Command::new(env!("CARGO_BIN_EXE_plimsoll")).args(args).output().expect("the program starts");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).expect("the output is text")
    };
    let json = |precision: &str, target: &str| common::printed(&["plan"], &run(precision, target, &["--json"]));
    let (wide, narrow) = (json("f32", "cuda"), json("bf16", "cuda"));
    assert_eq!(narrow["f32"]["classes"], wide["classes"]);
    assert_eq!((&narrow["precision"], &wide["precision"]), (&"bf16".into(), &"f32".into()));
    assert!(wide["f32"].is_null());
    let planned = |plan: &serde_json::Value| plan["planned_bytes"].as_f64().expect("a number");
    assert!(planned(&narrow) < 0.75 * planned(&wide), "{} of {}", planned(&narrow), planned(&wide));
    let text = run("bf16", "cuda", &[]);
    assert!(text.contains("kept for backward") && text.contains("f32 beside the states"), "{text}");
    for (target, most) in [("cpu", 0.98), ("wgpu", 0.75)] {
        let (wide, narrow) = (json("f32", target), json("bf16", target));
        assert_eq!(narrow["precision"], "bf16");
        assert!(planned(&narrow) < most * planned(&wide), "{target}: {} of {}", planned(&narrow), planned(&wide));
    }
    let [plain, kept] = ["f32", "bf16"].map(|precision| run(precision, "cpu", &[]));
    let line = "it computes in f32, and keeps bf16 for the backward pass alone";
    assert!(kept.contains(line) && !plain.contains("backward pass"), "{kept}");
}
