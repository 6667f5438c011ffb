//! Data in the memory of the host: the same results, in fewer bytes of the device.

use crate::common::{Folder, printed};
use crate::ranks::{filled, inputs, lent};
use plimsoll::internals::pass::offload::Offload;
use plimsoll::internals::plan::{self, Job, Plan, check};
use plimsoll::internals::train::data::Rows;
use plimsoll::internals::train::run::{Data, Trainer};
use plimsoll::internals::train::{Loss, Optimizer, Rate, Training};
use plimsoll::internals::{npy, onnx};
use plimsoll::{Choice, Class, DType, Graph, Memory, Options, Program, Recipe, Session, Target, Tensor, Trace};
use std::path::Path;

fn options(offload: Offload) -> Options {
    let recipe = Recipe { offload, ..Recipe::default() };
    Options { threads: 1, recipe, ..Options::default() }.on(Choice::Cpu)
}

/// Steps that bring data from the memory of the host.
fn fetches(plan: &Plan) -> usize {
    let pinned = |segment: plimsoll::SegmentIdx| plan.segments[segment].memory == Memory::Pinned;
    let of = |program: &Program| {
        let reads = |buffer: plimsoll::BufferIdx| pinned(program.buffers[buffer].segment);
        program.steps.iter().filter(|step| step.reads.iter().any(|&buffer| reads(buffer))).count()
    };
    plan.programs.iter().map(of).sum()
}

/// A network whose weights are worth it.
pub fn wide() -> Graph {
    let trace = Trace::new("wide");
    let mut x = trace.input("x", DType::F32, [4, 256]);
    for layer in 0..6 {
        let values: Vec<f64> = (0..256 * 256).map(|i| f64::from((i * 37 % 101 + layer) as u32) / 3000.0).collect();
        let weight = trace.constant(&format!("w{layer}"), Tensor::from_f64(DType::F32, [256, 256], &values));
        x = x.op("MatMul", &[weight], Default::default()).relu();
    }
    trace.output("y", x);
    trace.finish().expect("it is a graph")
}

#[test]
fn weights_come_when_they_are_read() {
    let graph = wide();
    let target = Target::cuda();
    let plan = |offload| {
        let recipe = Recipe { offload, ..Recipe::default() };
        plan::plan(&Job { recipe, ..Job::of(graph.clone(), &target) }).expect("it is planned").plan
    };
    let (plain, plan) = (plan(Offload::None), plan(Offload::Weights));
    check::check(&plan).expect("it is sound");
    assert_eq!(plan.offloaded_bytes(), 6 * 256 * 256 * 4, "the weights");
    assert!(plan.bytes() < plain.bytes(), "{} of {} bytes", plan.bytes(), plain.bytes());
    assert_eq!(fetches(&plan), 6);
    let streams: Vec<_> = plan.programs[0].steps.iter().map(|step| step.stream).collect();
    assert!(streams.iter().any(|&stream| stream != streams[0]), "copies run beside what is computed: {streams:?}");
}

#[test]
fn results_are_the_same() {
    let graph = wide();
    let plain = Session::from_graph(graph.clone(), &options(Offload::None)).expect("it is planned");
    let inputs = inputs(&plain);
    let expected = plain.run(&lent(&inputs)).expect("it runs");
    let session = Session::from_graph(graph, &options(Offload::All)).expect("it is planned");
    let (usage, plan) = (session.usage(), session.plan());
    assert_eq!((usage.bytes, usage.pinned), (plan.bytes(), plan.offloaded_bytes()), "planned == allocated");
    session.run_poisoned(&lent(&inputs)).expect("it runs");
    let found = session.run(&lent(&inputs)).expect("it runs");
    for ((_, a), (_, b)) in expected.iter().zip(&found) {
        let peak = a.to_f64().iter().fold(0.0, |peak: f64, a| peak.max(a.abs()));
        let off = a.to_f64().iter().zip(b.to_f64()).fold(0.0, |off: f64, (a, b)| off.max((a - b).abs()));
        assert!(off <= 1e-6 * peak, "off by {off} of {peak}");
    }
}

/// A table is read where it lies, so that no copy of it is planned.
#[test]
fn rows_are_looked_up_there() {
    let trace = Trace::new("table");
    let ids = trace.input("ids", DType::I64, [4]);
    let values: Vec<f64> = (0..4096 * 64).map(|i| f64::from((i * 37 % 101) as u32)).collect();
    let table = trace.constant("table", Tensor::from_f64(DType::F32, [4096, 64], &values));
    trace.output("rows", table.op("Gather", &[ids], Default::default()));
    let graph = trace.finish().expect("it is a graph");
    let session = Session::from_graph(graph, &options(Offload::Weights)).expect("it is planned");
    let (plan, bytes) = (session.plan(), 4096 * 64 * 4);
    assert_eq!(plan.offloaded_bytes(), bytes);
    assert!(plan.class_bytes(Class::Activation) < bytes, "the arena has no copy of the table");
    let ids = Tensor::from_f64(DType::I64, [4], &[7.0, 4095.0, 0.0, 7.0]);
    let found = session.run(&[("ids", ids)]).expect("it runs").remove(0).1.to_f64();
    let expected: Vec<f64> = [7, 4095, 0, 7].iter().flat_map(|&row| values[row * 64..][..64].to_vec()).collect();
    assert_eq!(found, expected);
}

/// Caches to which runs add rows may lie on the host, too.
#[test]
fn caches_grow_there() {
    let run = |offload: Offload| {
        let pairs = [("token", "next_token"), ("past_*", "present_*")];
        let state = pairs.map(|(input, output)| (input.to_owned(), output.to_owned())).to_vec();
        let options = Options { state, ..options(offload) }.set("past", 0..=4096).set("batch", 2);
        let session = Session::from_path("graphs/append.onnxtxt", &options).expect("it is planned");
        let inputs = inputs(&session);
        let found: Vec<_> = (0..6).map(|_| session.run(&lent(&inputs)).expect("it runs")).collect();
        assert_eq!(session.usage().bytes, session.plan().bytes(), "planned == allocated");
        (found, session.state("past_keys").expect("it is a state"), session.plan().offloaded_bytes())
    };
    let (expected, keys, none) = run(Offload::None);
    let (found, own, bytes) = run(Offload::Weights);
    assert!(none == 0 && bytes > 1 << 16, "{bytes} bytes on the host");
    assert!(keys.to_f64().iter().any(|key| *key != 0.0), "runs add rows");
    assert_eq!(keys.to_f64(), own.to_f64());
    for (a, b) in expected.iter().flatten().zip(found.iter().flatten()) {
        assert_eq!(a.1.to_f64(), b.1.to_f64(), "{}", a.0);
    }
}

/// The records of plans with offloaded data, and of stages, are as their schema says.
#[test]
fn records_are_as_their_schema_says() {
    let folder = Folder::new("offloaded-records");
    let path = folder.path("perceptron.onnxtxt");
    let text = filled(PERCEPTRON, &[("up", 128 * 160), ("bias", 160), ("down", 480)]);
    std::fs::write(&path, text).expect("it can be written");
    let plan = |further: &[&str]| {
        let args = [&["plan", &path, "--batch", "8", "--target", "cuda", "--json"], further].concat();
        let ran = std::process::Command::new(env!("CARGO_BIN_EXE_plimsoll")).args(&args).output().expect("it starts");
        printed(&args, &String::from_utf8_lossy(&ran.stdout))
    };
    assert_eq!(plan(&["--offload", "weights"])["offloaded"]["bytes"], 128 * 160 * 4);
    assert_eq!(plan(&["--mesh", "stage=2"])["stages"].as_array().map(Vec::len), Some(2));
}

const PERCEPTRON: &str = r#"<ir_version: 10, opset_import: ["" : 20]>
    perceptron (float[batch, 128] x) => (float[batch, 3] y)
    <float[128, 160] up, float[160] bias, float[160, 3] down>
    {
      wide = MatMul (x, up)
      biased = Add (wide, bias)
      bent = Relu (biased)
      y = MatMul (bent, down)
    }"#;

#[test]
fn trainings_are_the_same() {
    let folder = Folder::new("offloaded-training");
    let path = folder.path("perceptron.onnxtxt");
    let text = filled(PERCEPTRON, &[("up", 128 * 160), ("bias", 160), ("down", 480)]);
    std::fs::write(&path, text).expect("it can be written");
    let open = |name: &str, tensor: Tensor| {
        let path = folder.path(name);
        npy::write(Path::new(&path), &tensor).expect("it can be written");
        Rows::open(Path::new(&path)).expect("it is an array of rows")
    };
    let x: Vec<f64> = (0..24 * 128).map(|i| f64::from((i * 37 % 101) as u32) / 50.0 - 1.0).collect();
    let y: Vec<f64> = (0..24).map(|row| f64::from(row % 3)).collect();
    let data = Data {
        inputs: vec![("x".to_owned(), open("x.npy", Tensor::from_f64(DType::F32, [24, 128], &x)))],
        labels: open("y.npy", Tensor::from_f64(DType::I64, [24], &y)),
    };
    let adam = Optimizer::Adam { beta1: 0.9, beta2: 0.999, eps: 1e-8, decoupled: true };
    let method = |accumulate: usize| Training {
        accumulate,
        ema: Some(0.9),
        clip: Some(1.0),
        ..Training::new(Loss::CrossEntropy, adam, Rate::constant(0.01))
    };
    for accumulate in [1, 2] {
        let losses = |offload: Offload| {
            let model = onnx::load(Path::new(&path)).expect("it is a model");
            let mut trainer =
                Trainer::new(model, &data, 8, method(accumulate), &options(offload)).expect("it is planned");
            let losses: Vec<f32> =
                (0..20).map(|step| trainer.step(&data, step, Some(3)).expect("it runs").loss).collect();
            let score = trainer.evaluate(&data).expect("it runs").loss;
            let session = trainer.session();
            let (usage, plan) = (session.usage(), session.plan());
            assert_eq!((usage.bytes, usage.pinned), (plan.bytes(), plan.offloaded_bytes()), "planned == allocated");
            (losses, score, session.plan().offloaded_bytes(), fetches(session.plan()))
        };
        let (expected, score, none, _) = losses(Offload::None);
        assert!(none == 0 && expected[19] < 0.9 * expected[0], "{expected:?}");
        // The moments and the average of one weight, with the sum of its gradients; the weight; and all of these.
        let one = 128 * 160 * 4;
        let beside = 3 + u64::from(accumulate > 1);
        for (offload, count) in [(Offload::States, beside), (Offload::Weights, 1), (Offload::All, beside + 1)] {
            let (found, own_score, bytes, steps) = losses(offload);
            assert_eq!(found, expected, "{offload:?}");
            assert!((own_score - score).abs() < 1e-6, "{own_score} {score}");
            assert_eq!(bytes, one * count, "{offload:?} in {accumulate} parts");
            assert!(steps >= count as usize, "{steps} steps read what is on the host");
        }
    }
}
