//! Random numbers from counters, and dropout in training.

use crate::common;
use plimsoll::internals::onnx::{self, Model, Weight};
use plimsoll::internals::plan::Planning;
use plimsoll::internals::random::{key, uniform};
use plimsoll::internals::session::Session;
use plimsoll::internals::train::{self, Loss, Optimizer, Programs, Rate, Training};
use plimsoll::internals::{backend::Backend, reference};
use plimsoll::{Attrs, DType, Graph, Options, Tensor, Trace};
use std::collections::HashMap;

fn session(graph: Graph, name: &str, backend: Box<dyn Backend>) -> Session {
    common::load(graph, backend, name, &Options::default()).expect("it loads")
}

/// The same bits everywhere: by keys and draws of all signs, for elements in any place of a kernel.
#[test]
fn every_backend_draws_the_same_bits() {
    const KEYS: [[u32; 2]; 4] = [[0, 0], [u32::MAX, 1 << 31], [0x1319_8a2e, 0x8370_7344], [1, u32::MAX]];
    const SHAPES: [&[usize]; 4] = [&[], &[3, 1, 700], &[5, 2, 129], &[2311]];
    let trace = Trace::new("random");
    let draw = trace.input("draw", DType::I32, []);
    for ((at, key), shape) in KEYS.iter().enumerate().zip(SHAPES) {
        let key = key.map(|word| i64::from(word as i32)).to_vec();
        let attrs = Attrs::new().with("key", key).with("shape", shape);
        trace.output(&at.to_string(), draw.op("plimsoll.Random", &[], attrs));
    }
    let graph = trace.finish().expect("a graph");
    for (name, open) in common::backends() {
        let session = session(graph.clone(), name, open());
        for draw in [0, 1, 77_777, i32::MAX, i32::MIN, -1] {
            let given = [("draw", Tensor::from_f64(DType::I32, [], &[draw.into()]))];
            for (((_, found), key), shape) in session.run(&given).expect("it runs").iter().zip(KEYS).zip(SHAPES) {
                let count = shape.iter().product::<usize>();
                let expected: Vec<f64> = (0..count).map(|element| uniform(key, draw as u32, element as u32)).collect();
                assert_eq!(found.to_f64(), expected, "{name}: key {key:?}, draw {draw}");
            }
        }
    }
}

#[test]
fn a_seed_gives_each_stream_a_key_of_its_own() {
    let keys: Vec<[u32; 2]> =
        [0, 1, 1 << 32, u64::MAX].into_iter().flat_map(|seed| (0..50).map(move |stream| key(seed, stream))).collect();
    assert!((1..keys.len()).all(|at| !keys[..at].contains(&keys[at])));
}

/// `y = dropout(x * w)`, of which a file says that it is in inference.
const PRODUCT: &str = r#"<ir_version: 10, opset_import: ["" : 20]>
    product (float[batch, 500] x) => (float[batch, 500] y)
    <float[500] w = {ONES}, float ratio = {0.3}, bool trains = {0}>
    { scaled = Mul (x, w) y = Dropout (scaled, ratio, trains) }"#;

fn product(from: &str, to: &str) -> (Graph, Vec<Weight>) {
    imported(from, to).expect("it is a graph")
}

fn imported(from: &str, to: &str) -> plimsoll::Result<(Graph, Vec<Weight>)> {
    let ones = vec!["1"; 500].join(", ");
    assert!(PRODUCT.contains(from), "{from}");
    let text = PRODUCT.replace(from, to).replace("ONES", &ones);
    let model = Model::new(onnx::text::parse(&text, "product.onnxtxt".as_ref()).expect("the text is sound"));
    let weights = model.weights();
    Ok((onnx::import(&model, &[("batch".into(), 8)])?, weights))
}

/// Sums of magnitudes, whose gradients tell which elements stay.
fn method(accumulate: usize, seed: u64) -> Training {
    Training {
        accumulate,
        seed,
        ..Training::new(Loss::L1, Optimizer::Sgd { momentum: 0.0, nesterov: false }, Rate::constant(0.0))
    }
}

fn programs(model: &(Graph, Vec<Weight>), accumulate: usize, seed: u64) -> Programs {
    train::programs(&model.0, &model.1, &method(accumulate, seed)).expect("it trains")
}

fn rows() -> [Tensor; 2] {
    [1.0, -1.0].map(|value| Tensor::from_f64(DType::F32, [8, 500], &[value; 4000]))
}

/// A share of the elements is dropped, the mean stays, and the backward pass drops the same ones: with all products 1 and labels below, the
/// loss is the sum of the gradients, plus 1. Each step drops others, each seed, too.
#[test]
fn a_step_drops_the_same_elements_forward_and_backward() {
    let model = product("trains", "trains");
    let mut losses = Vec::new();
    for seed in [0, 1] {
        let graph = programs(&model, 1, seed).parts.remove(0).1;
        let mut states = reference::initial(&graph).expect("the elements are there");
        for _ in 0..3 {
            let found = reference::step(&graph, &rows(), &mut states).expect("it runs");
            losses.push(found[0].to_f64()[0]);
        }
    }
    assert!((1..losses.len()).all(|at| !losses[..at].contains(&losses[at])), "{losses:?}");
    // The mean of 4,000 elements of mean 1 and variance 0.3 / 0.7: four deviations are 0.04.
    assert!(losses.iter().all(|loss| (loss - 2.0).abs() < 0.04), "{losses:?}");
}

/// Every backend drops what the reference drops, and the gradients that accumulate tell that each part drops others.
#[test]
fn each_part_of_an_update_drops_others() {
    let model = product("trains", "trains");
    let parts = programs(&model, 3, 5).parts;
    assert_eq!(parts.iter().map(|(name, _)| *name).collect::<Vec<_>>(), ["first", "next", "last"]);
    let mut held: HashMap<String, Tensor> = HashMap::new();
    let mut sums: Vec<Vec<f64>> = vec![vec![0.0; 500]];
    for (_, graph) in &parts[..2] {
        let mut states = reference::initial(graph).expect("the elements are there");
        let names: Vec<String> = graph.states().iter().map(|state| graph.value_name(state.value).to_owned()).collect();
        for (name, state) in names.iter().zip(&mut states) {
            if let Some(found) = held.get(name) {
                *state = found.clone();
            }
        }
        reference::step(graph, &rows(), &mut states).expect("it runs");
        held.extend(names.into_iter().zip(states));
        sums.push(held["accumulated/w"].to_f64());
    }
    assert_eq!(held["dropout/draw"].to_f64(), [2.0]);
    let kept =
        |at: usize| -> Vec<f64> { sums[at].iter().zip(&sums[at - 1]).map(|(sum, before)| sum - before).collect() };
    let (first, second) = (kept(1), kept(2));
    assert_ne!(first, second);
    for kept in [first, second] {
        let all: f64 = kept.iter().sum();
        assert!((all * 3.0 - 1.0).abs() < 0.04, "{all}");
    }
}

#[test]
fn every_backend_drops_what_the_reference_drops() {
    let model = product("trains", "trains");
    let graph = programs(&model, 1, 9).parts.remove(0).1;
    for (name, open) in common::backends() {
        let session = session(graph.clone(), name, open());
        let mut states = reference::initial(&graph).expect("the elements are there");
        for step in 0..4 {
            let [x, labels] = rows();
            let expected = reference::step(&graph, &[x.clone(), labels.clone()], &mut states).expect("it runs");
            let found = session.run(&[("x", x), ("labels", labels)]).expect("it runs");
            for ((_, found), expected) in found.iter().zip(&expected) {
                common::agrees(found, expected, 1e-5).unwrap_or_else(|e| panic!("{name}, step {step}: {e}"));
            }
        }
        assert_eq!(session.state("dropout/draw").expect("it is a state").to_f64(), [4.0]);
    }
}

/// Nothing is kept for the backward pass that a step without dropout does not keep. A mask would take a byte per element.
#[test]
fn dropout_keeps_nothing() {
    let text = |drops: &str| {
        format!(
            r#"<ir_version: 10, opset_import: ["" : 20]> net (float[batch, 64] x) => (float[batch, 64] y)
            <float[64] w = {{{ones}}}, float ratio = {{{drops}}}> {{ a = Mul (x, w) y = Dropout (a, ratio) }}"#,
            ones = ["1"; 64].join(", ")
        )
    };
    let bytes = |drops: &str| {
        let model = Model::new(onnx::text::parse(&text(drops), "net.onnxtxt".as_ref()).expect("the text is sound"));
        let graph = onnx::import(&model, &[("batch".into(), 512)]).expect("it is a graph");
        let step = programs(&(graph, model.weights()), 1, 0).parts.remove(0).1;
        let limits = plimsoll::Limits { memory: None };
        plimsoll::Recipe::default().plan(step, &plimsoll::Target::cpu(2), &limits).expect("it is planned").bytes()
    };
    let (without, with) = (bytes("0"), bytes("0.5"));
    assert!(with < without + 64 * 512 / 2, "{with} bytes, {without} without dropout");
}

/// Evaluation drops nothing, even of a file in training mode; where such a file runs by itself, it drops.
#[test]
fn evaluation_is_inference() {
    for trains in ["{0}", "{1}"] {
        let model = product("{0}", trains);
        let evaluate = programs(&model, 1, 0).evaluate;
        let mut states = reference::initial(&evaluate).expect("the elements are there");
        let found = reference::step(&evaluate, &rows(), &mut states).expect("it runs");
        assert_eq!(found[0].to_f64(), [2.0 * 4000.0], "training_mode {trains}");
        let kept = reference::run(&model.0, &rows()[..1]).expect("it runs")[0].to_f64();
        let zeros = kept.iter().filter(|value| **value == 0.0).count();
        assert_eq!(zeros > 0, trains == "{1}", "{zeros} elements are dropped");
        if zeros > 0 {
            assert!((zeros as f64 / 4000.0 - 0.3).abs() < 0.03, "{zeros}");
        }
    }
    let error = imported("0.3", "1.5").expect_err("it is refused").to_string();
    assert_eq!(error, "node 'y' (Dropout): input 'ratio': expected 0 to 1, found 1.5");
}
