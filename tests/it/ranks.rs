//! Several ranks compute what one device does, and take the bytes that their plan says.

use crate::common::Folder;
use crate::graphs;
use plimsoll::internals::backend::ranks::{Ranks, Threads};
use plimsoll::internals::mesh::Mesh;
use plimsoll::internals::npy;
use plimsoll::internals::onnx;
use plimsoll::internals::plan::{Plan, Rule};
use plimsoll::internals::train::data::Rows;
use plimsoll::internals::train::run::{Data, Trainer};
use plimsoll::internals::train::{Loss, Optimizer, Rate, Training};
use plimsoll::{Choice, DType, Graph, Options, Session, Tensor};
use std::path::Path;
use std::sync::Arc;
use std::thread;

fn mesh(text: &str) -> Mesh {
    Mesh::parse(text).expect("it is a mesh")
}

/// What a rule of the command line says.
pub fn rule(pattern: &str, dim: usize, axis: &str) -> Rule {
    Rule { pattern: pattern.into(), dim, axis: axis.into() }
}

fn options() -> Options {
    Options { threads: 1, ..Options::default() }.on(Choice::Cpu)
}

/// Runs a function for each rank of a mesh, by a thread of its own.
pub fn each<T: Send>(mesh: &Mesh, of_rank: impl Fn(Arc<dyn Ranks>) -> T + Sync) -> Vec<T> {
    thread::scope(|scope| {
        let of_rank = &of_rank;
        let threads: Vec<_> = Threads::of(mesh).into_iter().map(|ranks| scope.spawn(move || of_rank(ranks))).collect();
        threads.into_iter().map(|thread| thread.join().expect("a rank does not panic")).collect()
    })
}

/// Random inputs of a session.
fn inputs(session: &Session) -> Vec<(String, Tensor)> {
    let tensor = |at: usize, shape: &[usize]| {
        let count: usize = shape.iter().product();
        let values: Vec<f64> = (0..count).map(|i| f64::from(((i * 37 + at * 11) % 101) as u32) / 101.0 - 0.5).collect();
        values
    };
    let made = |(at, port): (usize, &plimsoll::Port)| {
        (port.name.clone(), Tensor::from_f64(port.dtype, port.shape.clone(), &tensor(at, &port.shape)))
    };
    session.inputs().iter().enumerate().map(made).collect()
}

fn lent(inputs: &[(String, Tensor)]) -> Vec<(&str, Tensor)> {
    inputs.iter().map(|(name, tensor)| (&name[..], tensor.clone())).collect()
}

/// Holds what the ranks of a mesh compute against one device. Returns the plan of a rank.
fn same(graph: &Graph, on: &str, by: &[Rule], most: f64) -> Plan {
    same_on(graph, on, by, most, &|_| options())
}

/// As [`same`], with the options of each rank; one device has those of the first.
pub fn same_on(graph: &Graph, on: &str, by: &[Rule], most: f64, options: &(dyn Fn(usize) -> Options + Sync)) -> Plan {
    let whole = Session::from_graph(graph.clone(), &options(0)).expect("it is planned");
    let inputs = inputs(&whole);
    let expected = whole.run(&lent(&inputs)).expect("it runs");
    let mesh = mesh(on);
    let found = each(&mesh, |ranks| {
        let own = options(ranks.rank());
        let options = Options { mesh: Some(mesh.clone()), shards: by.to_vec(), ranks: Some(ranks), ..own };
        let session = Session::from_graph(graph.clone(), &options).expect("it is planned");
        assert_eq!(session.usage().bytes, session.plan().bytes(), "planned == allocated");
        session.run_poisoned(&lent(&inputs)).expect("it runs");
        (session.run(&lent(&inputs)).expect("it runs"), session.plan().clone())
    });
    for (outputs, _) in &found {
        for ((name, expected), (_, found)) in expected.iter().zip(outputs) {
            let (a, b) = (expected.to_f64(), found.to_f64());
            let peak = a.iter().fold(0.0, |peak: f64, a| peak.max(a.abs()));
            let off = a.iter().zip(&b).fold(0.0, |off: f64, (a, b)| off.max((a - b).abs()));
            assert!(
                a.len() == b.len() && off <= most * peak,
                "'{}' of {} on {on}: off by {off} of {peak}",
                name,
                graph.name
            );
        }
    }
    found.into_iter().next().expect("a mesh has a rank").1
}

#[test]
fn files_are_the_same_on_two_and_four_ranks() {
    for (file, dims) in graphs::GRAPHS {
        let dims: Vec<_> =
            dims.iter().map(|&(name, extent)| (name, if name == "batch" { 8 } else { extent })).collect();
        let graph = graphs::import(file, &dims);
        for on in ["data=2", "data=4"] {
            same(&graph, on, &[], 1e-5);
        }
    }
}

#[test]
fn products_are_split_along_columns_and_rows() {
    let mlp = graphs::import("mlp.onnxtxt", &[("batch", 8)]);
    let by = [rule("w1", 1, "tensor"), rule("b1", 0, "tensor"), rule("w2", 0, "tensor")];
    for on in ["tensor=2", "tensor=4", "data=2,tensor=2"] {
        let plan = same(&mlp, on, &by, 1e-6);
        let exchanges: Vec<_> = plan.programs[0].kernels.iter().filter_map(|kernel| kernel.collective()).collect();
        // The sums of the second product; and the rows of the output.
        assert_eq!(exchanges.len(), 1 + usize::from(on.starts_with("data")), "{exchanges:?}");
    }
    let attention = graphs::import("attention.onnxtxt", &[("batch", 2), ("sequence", 16)]);
    let mut by: Vec<Rule> = ["query", "key", "value"]
        .iter()
        .flat_map(|of| [rule(&format!("w_{of}"), 1, "tensor"), rule(&format!("b_{of}"), 0, "tensor")])
        .collect();
    by.push(rule("w_out", 0, "tensor"));
    let plan = same(&attention, "tensor=2", &by, 1e-6);
    let exchanges = plan.programs[0].kernels.iter().filter_map(|kernel| kernel.collective()).count();
    assert_eq!(exchanges, 1, "heads are apart, and their sum is one exchange");
    assert_eq!(plan.programs[0].shards.len(), by.len());
}

#[test]
fn rows_are_split_along_data() {
    let graph = graphs::import("mlp.onnxtxt", &[("batch", 8)]);
    let whole = Session::from_graph(graph.clone(), &options()).expect("it is planned").plan().bytes();
    for on in ["data=2", "data=4", "data=2,tensor=1"] {
        let plan = same(&graph, on, &[], 1e-5);
        assert_eq!(plan.mesh, Some(mesh(on)));
        assert!(plan.bytes() < whole, "{} of {whole}", plan.bytes());
    }
}

/// A network of most that trainings have: a convolution, the norm of a batch, a Dropout, a norm of rows.
const NETWORK: &str = r#"<ir_version: 10, opset_import: ["" : 20]>
    network (float[batch, 1, 6, 6] x) => (float[batch, 3] y)
    <float[4, 1, 3, 3] filters, float[4] scale = {1, 1, 1, 1}, float[4] shift = {0, 0, 0, 0}, float[4] mean = {0, 0, 0, 0},
     float[4] variance = {1, 1, 1, 1}, float[64, 8] up, float[8] bias, float[8] weight = {1, 1, 1, 1, 1, 1, 1, 1},
     float[8] zero = {0, 0, 0, 0, 0, 0, 0, 0}, float[8, 3] down, float ratio = {0.25}, bool training = {1}>
    {
      image = Conv (x, filters)
      normed = BatchNormalization (image, scale, shift, mean, variance)
      positive = Relu (normed)
      flat = Flatten (positive)
      hidden = MatMul (flat, up)
      biased = Add (hidden, bias)
      some = Dropout (biased, ratio, training)
      even = LayerNormalization (some, weight, zero)
      bent = Gelu (even)
      y = MatMul (bent, down)
    }"#;

/// The network with weights, and its data.
fn network(folder: &Folder, rows: usize) -> (onnx::Model, Data) {
    let mut text = NETWORK.to_owned();
    let mut seed = 1u32;
    for (name, count) in [("filters", 36), ("up", 512), ("bias", 8), ("down", 24)] {
        let mut number = || {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            format!("{:.3}", f64::from(seed >> 8) / f64::from(1u32 << 24) - 0.5)
        };
        let numbers: Vec<_> = (0..count).map(|_| number()).collect();
        for end in [",", ">"] {
            text = text.replace(&format!("{name}{end}"), &format!("{name} = {{{}}}{end}", numbers.join(", ")));
        }
    }
    let path = folder.path("network.onnxtxt");
    std::fs::write(&path, text).expect("it can be written");
    let open = |name: &str, tensor: Tensor| {
        let path = folder.path(name);
        npy::write(Path::new(&path), &tensor).expect("it can be written");
        Rows::open(Path::new(&path)).expect("it is an array of rows")
    };
    let x: Vec<f64> = (0..rows * 36).map(|i| f64::from((i * 37 % 101) as u32) / 50.0 - 1.0).collect();
    // The class follows from a pixel.
    let y: Vec<f64> = x.chunks(36).map(|image| ((image[7] + 1.0) * 1.5).floor()).collect();
    let inputs = vec![("x".to_owned(), open("x.npy", Tensor::from_f64(DType::F32, [rows, 1, 6, 6], &x)))];
    let data = Data { inputs, labels: open("y.npy", Tensor::from_f64(DType::I64, [rows], &y)) };
    (onnx::load(Path::new(&path)).expect("it is a model"), data)
}

fn method(accumulate: usize) -> Training {
    let adam = Optimizer::Adam { beta1: 0.9, beta2: 0.999, eps: 1e-8, decoupled: true };
    let plain = Training::new(Loss::CrossEntropy, adam, Rate::constant(0.01));
    Training { accumulate, clip: Some(0.5), ema: Some(0.9), decay: 0.01, ..plain }
}

/// The losses of steps, and a weight and a running statistic after them.
pub fn trained(folder: &Folder, options: &Options, accumulate: usize, steps: u64) -> (Vec<f32>, Vec<Tensor>, f64) {
    let (model, data) = network(folder, 24);
    let mut trainer = Trainer::new(model, &data, 8, method(accumulate), options).expect("it is planned");
    let losses = (0..steps).map(|step| trainer.step(&data, step, Some(3)).expect("it runs").loss).collect();
    let session = trainer.session();
    assert_eq!(session.usage().bytes, session.plan().bytes(), "planned == allocated");
    let states = ["up", "filters", "mean", "ema/down"].map(|name| session.state(name).expect("it is a state"));
    let score = trainer.evaluate(&data).expect("it runs").loss;
    (losses, states.to_vec(), score)
}

#[test]
fn a_training_is_that_of_the_whole_batch() {
    let folder = Folder::new("trained-by-ranks");
    for accumulate in [1, 2] {
        let (losses, states, score) = trained(&folder, &options(), accumulate, 30);
        assert!(losses[29] < 0.8 * losses[0], "{losses:?}");
        for on in ["data=2", "data=4"] {
            let mesh = mesh(on);
            let found = each(&mesh, |ranks| {
                let folder = Folder::new(&format!("trained-by-rank-{on}-{}", ranks.rank()));
                let options = Options { mesh: Some(mesh.clone()), ranks: Some(ranks), ..options() };
                trained(&folder, &options, accumulate, 30)
            });
            for (own, kept, own_score) in &found {
                let off = losses.iter().zip(own).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                assert!(off < 1e-5, "{on} in {accumulate} parts: losses off by {off}: {losses:?} {own:?}");
                assert!((score - own_score).abs() < 1e-5, "{score} {own_score}");
                for (state, own) in states.iter().zip(kept) {
                    let off =
                        state.to_f64().iter().zip(own.to_f64()).fold(0.0, |off: f64, (a, b)| off.max((a - b).abs()));
                    assert!(off < 1e-4, "{on} in {accumulate} parts: a state is off by {off}");
                }
            }
        }
    }
}
