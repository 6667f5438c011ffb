//! Training steps in files: `training_info`, whose updates make states of initializers.

use crate::common::{self, Folder};
use crate::state::{caches, mixed};
use plimsoll::internals::onnx::{self, proto::*};
use plimsoll::internals::plan::Planning;
use plimsoll::internals::session::{Choice, Options, Session};
use plimsoll::internals::{onnx::Model, reference};
use plimsoll::{DType, Graph, Limits, Plan, Recipe, Target, Tensor, Trace};
use prost::Message;
use serde_json::Value;
use std::process::Command;

fn options() -> Options {
    Options { threads: 2, training: true, ..Options::default() }.on(Choice::Cpu)
}

/// Gradient descent on a linear layer, with momentum and a counter of the step's own.
const LINEAR: &str = include_str!("../../graphs/sgd.onnxtxt");

fn model(text: &str) -> ModelProto {
    onnx::text::parse(text, "model.onnxtxt".as_ref()).expect("the text is sound")
}

fn step(text: &str) -> Result<Graph, String> {
    let trained = Model::new(model(text)).with_training().map_err(|e| e.to_string())?;
    let dims = if text.contains("batch") { vec![("batch".into(), 4)] } else { Vec::new() };
    onnx::import(&trained, &dims).map_err(|e| e.to_string())
}

fn target(x: &Tensor) -> Tensor {
    let rows = x.to_f64();
    let y: Vec<f64> = rows.chunks(3).map(|row| row[0] - 2.0 * row[1] + 0.5 * row[2]).collect();
    Tensor::from_f64(DType::F32, [y.len(), 1], &y)
}

#[test]
fn a_step_follows_the_reference_on_every_backend() {
    let graph = step(LINEAR).expect("it is a step");
    let names: Vec<_> = graph.states().iter().map(|state| graph.value_name(state.value)).collect();
    assert_eq!(names, ["w", "m", "count"]);
    for (name, open) in common::backends() {
        let session = common::load(graph.clone(), open(), name, &options());
        let session = session.expect("it loads");
        assert_eq!(session.usage().bytes, session.plan().bytes());
        let mut states = reference::initial(&graph).expect("the elements are there");
        let (mut seed, mut losses) = (5, Vec::new());
        for run in 0..60 {
            let x = common::random(&mut seed, &[4, 3].into());
            let inputs = [x.clone(), target(&x)];
            let expected = reference::step(&graph, &inputs, &mut states).expect("the reference runs");
            let [x, target] = inputs;
            let given = [("x", x), ("target", target)];
            let found = if run == 7 { session.run_poisoned(&given) } else { session.run(&given) }.expect("it runs");
            assert_eq!(found.iter().map(|(name, _)| &name[..]).collect::<Vec<_>>(), ["y", "loss"]);
            losses.push(found[1].1.to_f64()[0]);
            for ((_, found), expected) in found.iter().zip(&expected) {
                common::agrees(found, expected, 1e-3).unwrap_or_else(|e| panic!("{name}, run {run}: {e}"));
            }
        }
        assert!(losses[59] < losses[0] / 100.0, "{name}: {losses:?}");
        assert_eq!(session.state("count").expect("it is a state").to_i64(), Some(vec![60]));
    }
}

/// Inference is what it was: the step is no part of it, and its initializers are constants.
#[test]
fn inference_does_without_the_step() {
    let folder = Folder::new("training");
    let path = folder.file("linear.onnxtxt", LINEAR);
    let plain = folder.file("plain.onnxtxt", LINEAR.split("<update_binding").next().expect("it has a graph"));
    let plan = |path: &str| {
        let graph = Graph::from_path(path, &[("batch", 4)]).expect("it is a graph");
        Recipe::default().plan(graph, &Target::cpu(2), &Limits { memory: None }).expect("it is planned").to_json()
    };
    assert_eq!(plan(&path), plan(&plain));
    let session =
        |training| Session::from_path(&path, &Options { training, ..options().set("batch", 4) }).expect("it loads");
    assert_eq!((session(false).plan().programs[0].state.len(), session(true).plan().programs[0].state.len()), (0, 3));
    let error = Session::from_path(&plain, &options().set("batch", 4)).unwrap_err().to_string();
    assert_eq!(error, format!("{plain}: graph: expected a file with one training step (training_info), found 0"));
}

/// A step survives text and protobuf, and means the same behind them.
#[test]
fn a_step_is_written_and_read() {
    let first = model(LINEAR);
    let text = onnx::text::print(&first);
    assert_eq!(model(&text), first, "{text}");
    let decoded = ModelProto::decode(&first.encode_to_vec()[..]).expect("it was encoded");
    assert_eq!(decoded, first);
    let whole = format!("{LINEAR}{INITIALIZATION}");
    assert_eq!(model(&onnx::text::print(&model(&whole))), model(&whole));
}

const INITIALIZATION: &str = r#"
<initialization_binding: ["w" : "drawn", "m" : "none", "b" : "half"]>
first () => (float[3, 1] drawn, float[3, 1] none, float[1] half)
<int64[2] extents = {3, 1}, float[3, 1] some = {1, 2, 3}, float two = {2}, float[1] half = {0.5}>
{
    drawn = Mul (some, two)
    none = ConstantOfShape (extents)
}"#;

#[test]
fn an_initialization_gives_initializers_their_elements() {
    let whole = format!("{LINEAR}{INITIALIZATION}");
    let session = Session::from_graph(step(&whole).expect("it is a step"), &options()).expect("it loads");
    assert_eq!(session.state("w").expect("it is a state").to_f64(), [2.0, 4.0, 6.0]);
    assert_eq!(session.plan().programs[0].state.iter().filter(|state| state.given).count(), 2, "zeros are not data");
    let zeros = [
        ("x", Tensor::from_f64(DType::F32, [4, 3], &[0.0; 12])),
        ("target", Tensor::from_f64(DType::F32, [4, 1], &[0.0; 4])),
    ];
    assert_eq!(session.run(&zeros).expect("it runs")[0].1.to_f64(), [0.5; 4], "a constant has its elements, too");
    let refused = |from: &str, to: &str| step(&whole.replace(from, to)).expect_err("it is refused");
    assert_eq!(
        refused("extents = {3, 1}", "extents = {1, 3}"),
        "graph: initialization_binding: initializer 'm' is f32[3,1], but is to begin with f32[1,3]"
    );
    assert_eq!(
        refused("drawn = Mul (some, two)", "drawn = RandomNormal <shape = [3, 1]> ()"),
        "node 'initialization/drawn' (RandomNormal): plimsoll does not have this operator; `plimsoll ops` lists those that it has"
    );
    assert_eq!(
        refused("\"b\" : \"half\"", "\"c\" : \"half\""),
        "graph: initialization_binding 'c=half': 'c' is no initializer"
    );
    assert_eq!(
        refused("\"b\" : \"half\"", "\"b\" : \"third\""),
        "graph: initialization_binding 'b=third': expected a value that follows from constants and is not much larger than they are"
    );
}

/// Zeros without elements take no bytes in the file, on the host, or, as a constant, on the device.
#[test]
fn zeros_are_small() {
    const CACHE: &str = r#"<ir_version: 10, opset_import: ["" : 20]>
        cache (float[4, 1] x) => (float[4, 1000000] y)
        <sparse_tensor(float[4, 1000000]) old = {}> { y = Add (old, x) }
        <update_binding: ["old" : "y"]> step () => () { }"#;
    let inference = onnx::import(&Model::new(model(CACHE)), &[]).expect("it is a graph");
    let plan = Recipe::default().plan(inference, &Target::cpu(2), &Limits { memory: None }).expect("it is planned");
    assert!(plan.class_bytes(plimsoll::Class::Constant) < 100, "{:?}", plan.programs[0].summary);
    let session = Session::from_graph(step(CACHE).expect("it is a step"), &options()).expect("it loads");
    assert_eq!((session.plan().programs[0].state.len(), session.plan().programs[0].state[0].given), (1, false));
    let x = [("x", Tensor::from_f64(DType::F32, [4, 1], &[1.0, 2.0, 3.0, 4.0]))];
    session.run(&x).expect("it runs");
    let y = session.run(&x).expect("it runs");
    assert_eq!([0, 3_999_999].map(|at| y[0].1.to_f64()[at]), [2.0, 8.0]);
    assert_eq!(model(&onnx::text::print(&model(CACHE))), model(CACHE));
    // A state of more bytes than any host has is planned.
    let large = CACHE.replace("1000000", "100000000000");
    let trained = Model::new(model(&large)).with_training().expect("it has a step");
    let graph = onnx::import(&trained, &[]).expect("it is a graph");
    let plan = Recipe::default().plan(graph, &Target::cpu(2), &Limits { memory: None }).expect("it is planned");
    assert_eq!(plan.programs[0].summary.state_bytes, 4 * 4 * 100_000_000_000);
}

#[test]
fn steps_that_are_none_are_refused() {
    let refused = |from: &str, to: &str| {
        assert!(LINEAR.contains(from), "{from}");
        step(&LINEAR.replace(from, to)).expect_err("it is refused")
    };
    for (from, to, expected) in [
        ("\"m\" : \"next_m\"", "\"n\" : \"next_m\"", "graph: update_binding 'n=next_m': 'n' is no initializer"),
        ("\"m\" : \"next_m\"", "\"x\" : \"next_m\"", "graph: update_binding 'x=next_m': 'x' is no initializer"),
        ("\"m\" : \"next_m\"", "\"w\" : \"next_m\"", "graph: update_binding: 'w' is bound twice"),
        (
            "\"m\" : \"next_m\"",
            "\"m\" : \"old\"",
            "graph: update_binding 'm=old': 'old' is no output of the algorithm or of the graph",
        ),
        (
            "\"m\" : \"next_m\"",
            "\"m\" : \"loss\"",
            "graph: update_binding 'm=loss': state 'm': expected an update of f32[3,1], found 'loss' of f32[]",
        ),
        ("float rate = {0.05}", "float rate = {0.05}, float w = {1}", "graph: two initializers are called 'w'"),
        ("step (float[batch, 1] target)", "step (float[batch, 1] x)", "graph: two inputs are called 'x'"),
        ("    old = Mul (m, kept)", "    y = Mul (m, kept)", "node 'y' (Mul): 'y' is already another value's name"),
    ] {
        assert_eq!(refused(from, to), expected);
    }
    let twice = format!("{LINEAR}{}", LINEAR.split_once("\n}\n").expect("it has a step").1);
    assert_eq!(step(&twice).unwrap_err(), "graph: expected a file with one training step (training_info), found 2");
    let shaped = LINEAR
        .replace("y = Add (product, b)", "y = Add (product, b) tiled = Expand (product, shape)")
        .replace("float[1] b = {0.0}", "float[1] b = {0.0}, int64[2] shape = {4, 1}");
    assert!(step(&shaped).is_ok());
    assert_eq!(
        step(&shaped.replace("\"count\" : ", "\"shape\" : ")).unwrap_err(),
        "node 'tiled' (Expand): input 'shape' must be known before the run, but 'shape' depends on the data of 'shape'; where their elements are given, they are bound"
    );
}

/// The command: the step runs when it is asked for, and its states are given, saved and gone on with.
#[test]
fn the_command_trains() {
    let folder = Folder::new("training-command");
    let (path, saved) = (folder.file("linear.onnxtxt", LINEAR), folder.path("weights.safetensors"));
    let run = |more: &[&str]| {
        let inputs = ["--input", "x=2x3xf32=1", "--input", "target=2x1xf32=3", "--backend", "cpu", "--threads", "2"];
        let inputs = if more.contains(&"--training") { &inputs[..] } else { &inputs[..2] };
        let output = Command::new(env!("CARGO_BIN_EXE_plimsoll"))
            .args([&["run", &path, "--json"], inputs, more].concat())
            .output()
            .expect("the program starts");
        let text = |bytes| String::from_utf8(bytes).expect("the output is text");
        let (out, err) = (text(output.stdout), text(output.stderr));
        (if out.is_empty() { Value::Null } else { common::printed(&["run"], &out) }, err)
    };
    let (found, err) = run(&["--backend", "cpu"]);
    assert!(found["states"].is_null() && found["outputs"].as_array().is_some_and(|o| o.len() == 1), "{found}");
    assert!(err.contains("the file has a training step, which --training runs"), "{err}");
    let (whole, err) = run(&["--training", "--iters", "6"]);
    assert!(!err.contains("--training"), "{err}");
    let (_, err) = run(&["--training", "--iters", "4", "--save-states", &saved]);
    assert!(!err.contains("error"), "{err}");
    let (second, err) = run(&["--training", "--iters", "2", "--load-states", &saved]);
    assert_eq!(second["states"], whole["states"], "{err}");
    let (given, err) = run(&["--training", "--input", "w=3x1xf32=1", "--output", "loss", "--poison"]);
    assert_eq!(given["outputs"][0]["max"], 0.0, "{err}");
    assert_eq!(given["outputs"].as_array().map(Vec::len), Some(1));
    let (_, err) = run(&["--training", "--input", "w=3xf32=1"]);
    assert!(err.contains("state 'w': expected to begin with f32[3,1], found f32[3]"), "{err}");
}

/// A step whose graph has a cache that grows beside its weights.
#[test]
fn a_step_and_states_of_other_kinds() {
    const BOTH: &str = r#"<ir_version: 10, opset_import: ["" : 20]>
        both (float[1, 2] x, float[past, 2] old, float[2] sum) => (float[all, 2] new, float[2] next, float[1, 2] y)
        <float[2] w = {1, 2}, int64[1] axis = {0}>
        { y = Mul (x, w) new = Concat <axis = 0> (old, y) total = ReduceSum <keepdims = 0> (new, axis) next = Add (sum, total) }
        <update_binding: ["w" : "next_w"]>
        step () => (float[2] next_w) <float[2] half = {0.5, 0.5}> { next_w = Mul (w, half) }"#;
    let folder = Folder::new("training-grows");
    let path = folder.file("both.onnxtxt", BOTH);
    let state = [("old", "new"), ("sum", "next")].map(|(a, b)| (a.to_owned(), b.to_owned())).to_vec();
    let session = Session::from_path(&path, &Options { state, ..options() }.set("past", 0..=4)).expect("it loads");
    for _ in 0..3 {
        session.run_poisoned(&[("x", Tensor::from_f32([1, 2], &[1.0, 1.0]).expect("two numbers"))]).expect("it runs");
    }
    let is = |name: &str, expected: &[f64]| {
        assert_eq!(session.state(name).expect("it is a state").to_f64(), expected, "{name}")
    };
    is("w", &[0.125, 0.25]);
    is("old", &[1.0, 2.0, 0.5, 1.0, 0.25, 0.5, 0.0, 0.0]);
    is("sum", &[1.0 + 1.5 + 1.75, 2.0 + 3.0 + 3.5]);
}

/// The model of a program may be trained while the other answers with the same inputs.
#[test]
fn programs_train() {
    let folder = Folder::new("training-programs");
    let files = [
        folder.file("train.onnxtxt", LINEAR),
        folder.file("other.onnxtxt", LINEAR.split("<update_binding").next().expect("a graph")),
    ];
    let run = |more: &[&str], files: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_plimsoll"))
            .args([&["run", "--json", "--set", "batch=2", "--backend", "cpu"], files, more].concat())
            .output()
            .expect("the program starts");
        let text = |bytes| String::from_utf8(bytes).expect("the output is text");
        (text(output.stdout), text(output.stderr))
    };
    let (found, err) = run(&["--training", "--program", "train", "--program", "other"], &[&files[0], &files[1]]);
    assert!(found.contains("\"outputs\""), "{err}");
    let (_, err) = run(&["--training"], &[&files[1], &format!("again={}", files[1])]);
    assert!(err.contains("--training: no program has a training step; the programs: other, again"), "{err}");
}

/// The graph behind a file that it was written to.
fn read(graph: &Graph, form: &str) -> Graph {
    let folder = Folder::new("training-written");
    let path = folder.path(form);
    graph.save(&path).expect("it is written");
    let read = onnx::load(path.as_ref()).and_then(Model::with_training).expect("it has a step");
    onnx::import(&read, &[]).expect("it is a graph")
}

/// A graph with states that was written and read again takes the same bytes in as many steps, and computes the same bits.
#[test]
fn graphs_with_states_are_written() {
    let small = Trace::new("small");
    let (x, count) =
        (small.input("x", DType::F32, [2]), small.state("count", Tensor::from_i64([1], &[5]).expect("one number")));
    small.update(count, count + 1.0);
    let last = small.state("last", Tensor::from_f32([2], &[0.0; 2]).expect("two numbers"));
    small.update(last, x);
    let graphs = [mixed(), caches(), step(LINEAR).expect("it is a step"), small.finish().expect("states are enough")];
    for (number, graph) in graphs.iter().enumerate() {
        for form in ["graph.onnx", "graph.onnxtxt"] {
            let again = read(graph, form);
            let plan = |graph: &Graph| {
                Recipe::default().plan(graph.clone(), &Target::cpu(2), &Limits { memory: None }).expect("it is planned")
            };
            let (first, second) = (plan(graph), plan(&again));
            let ports = |plan: &Plan| {
                let state = |s: &plimsoll::StatePort| {
                    (s.port.name.clone(), s.port.dtype, s.port.shape.to_vec(), s.update.is_some())
                };
                let mut states: Vec<_> = plan.programs[0].state.iter().map(state).collect();
                states.sort();
                let ports = |ports: &[plimsoll::Port]| {
                    // An output is renamed if a state has its name.
                    let name = |p: &plimsoll::Port| p.name.trim_end_matches("_3").to_owned();
                    let mut ports: Vec<_> = ports.iter().map(|p| (name(p), p.dtype, p.shape.to_vec())).collect();
                    ports.sort();
                    ports
                };
                (states, ports(&plan.programs[0].inputs), ports(&plan.programs[0].outputs))
            };
            assert_eq!(ports(&first), ports(&second), "graph {number}, {form}");
            assert_eq!(first.bytes(), second.bytes(), "graph {number}, {form}");
            assert_eq!(first.programs[0].steps.len(), second.programs[0].steps.len(), "graph {number}, {form}");
            let sessions =
                [graph, &again].map(|graph| Session::from_graph(graph.clone(), &options()).expect("it loads"));
            let mut seed = 3;
            for _ in 0..4 {
                let random = |p: &plimsoll::Port| (p.name.clone(), common::random(&mut seed, &p.shape));
                let inputs: Vec<_> = first.programs[0].inputs.iter().map(random).collect();
                let inputs: Vec<_> = inputs.iter().map(|(name, tensor)| (&name[..], tensor.clone())).collect();
                let [a, b] = [0, 1].map(|at: usize| {
                    let outputs = sessions[at].run(&inputs).expect("it runs");
                    outputs.into_iter().map(|(_, tensor)| tensor).collect::<Vec<_>>()
                });
                assert_eq!(a, b, "graph {number}, {form}");
            }
            for state in &first.programs[0].state {
                let [a, b] = [0, 1].map(|at: usize| sessions[at].state(&state.port.name).expect("it is a state"));
                assert_eq!(a, b, "graph {number}, {form}: '{}'", state.port.name);
            }
            // Without its step it is a graph of the same outputs.
            if !first.programs[0].outputs.is_empty() {
                let folder = Folder::new("training-plain");
                graph.save(folder.path(form)).expect("it is written");
                let plain = Graph::from_path(folder.path(form), &[]).expect("it is a graph");
                assert!(plain.states().is_empty());
            }
        }
    }
}

/// The command writes states that its flags make, and zeros of any size in a few bytes.
#[test]
fn the_command_writes_steps() {
    let folder = Folder::new("training-emit");
    let path = folder.path("decoder.onnx");
    let run = |arguments: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_plimsoll")).args(arguments).output().expect("the program starts");
        let text = |bytes| String::from_utf8(bytes).expect("the output is text");
        (output.status.code(), text(output.stdout), text(output.stderr))
    };
    let model = ["graphs/generate.onnxtxt", "--set", "batch=2", "--set", "capacity=100000"];
    let states = ["--state", "token=next_token", "--state", "position=next_position", "--state", "past_*=present_*"];
    let (code, out, err) = run(&[&["emit"], &model[..], &["onnx", "--save", &path], &states].concat());
    assert_eq!((code, &out[..]), (Some(0), ""), "{err}");
    assert!(std::fs::metadata(&path).expect("it is written").len() < 1 << 20, "its caches have 51 MB");
    let bytes = |arguments: &[&str]| {
        let (_, out, err) = run(&[&["plan", "--json"], arguments].concat());
        let plan = common::printed(&["plan"], &out);
        assert!(plan["error"].is_null(), "{err}");
        let steps = plan["programs"][0]["steps"].as_array().map(Vec::len);
        (
            plan["programs"][0]["summary"]["planned_bytes"].clone(),
            plan["programs"][0]["summary"]["state_bytes"].clone(),
            steps,
        )
    };
    assert_eq!(bytes(&[&path, "--training"]), bytes(&[&model[..], &states].concat()));
    let text = folder.path("decoder.onnxtxt");
    let (_, out, err) = run(&["emit", &path, "onnxtxt"]);
    std::fs::write(&text, &out).expect("it is written");
    assert!(out.contains("<update_binding: [") && out.contains("sparse_tensor(float"), "{err}");
    assert_eq!(bytes(&[&text, "--training"]), bytes(&[&path, "--training"]));
    // Inference of a step that was bound needs no target, as before.
    let bound = folder.path("bound.onnxtxt");
    let (_, out, err) = run(&["emit", "graphs/sgd.onnxtxt", "onnxtxt", "--training", "--set", "batch=4", "-o", &bound]);
    assert_eq!(out, "", "{err}");
    let ports = |training: bool| {
        let read = if training { Graph::training_from_path } else { Graph::from_path };
        let graph = read(bound.as_ref() as &std::path::Path, &[]).expect("it is a graph");
        let inputs: Vec<_> = graph.inputs().iter().map(|&v| graph.value_name(v).to_owned()).collect();
        (inputs, graph.outputs().iter().map(|(name, _)| name.clone()).collect::<Vec<_>>())
    };
    let names = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect::<Vec<_>>();
    assert_eq!(ports(false), (names(&["x"]), names(&["y"])));
    assert_eq!(ports(true), (names(&["x", "target"]), names(&["y", "loss"])));
    // A cache that grows has its length, whose bound ONNX cannot say.
    let grows = [
        "emit",
        "graphs/append.onnxtxt",
        "--set",
        "batch=1",
        "--set",
        "past=0..8",
        "onnxtxt",
        "--state",
        "past_*=present_*",
    ];
    let (code, _, err) = run(&grows);
    assert_eq!(code, Some(1));
    assert!(err.contains("state 'past' counts the rows of caches that grow, for which ONNX has no form"), "{err}");
    for (arguments, words) in [
        (&["emit", "graphs/mlp.onnxtxt", "onnx"][..], "onnx: expected --save FILE"),
        (&["emit", "graphs/sgd.onnxtxt", "onnxtxt", "--training", "--f16"], "--f16: onnxtxt is the file as it is"),
        (&["emit", "graphs/mlp.onnxtxt", "onnxtxt", "--training"], "expected a file with one training step"),
    ] {
        let (code, _, err) = run(arguments);
        assert_eq!(code, Some(1), "{err}");
        assert!(err.contains(words), "{err}");
    }
}
