//! What is given is used, or refused: defaults of inputs, the axis of classes, frozen and buffered weights, logs, files that are written.

use crate::cli::{fails, ok, ok_json};
use crate::common::Folder;
use plimsoll::internals::npy;
use plimsoll::internals::onnx::proto::{DataLocation, ModelProto, StringStringEntryProto, TensorProto, ValueInfoProto};
use plimsoll::internals::onnx::{self, text};
use plimsoll::{Choice, DType, Options, Session, Tensor};
use prost::Message;
use serde_json::Value;
use std::path::Path;

const CPU: &[&str] = &["--backend", "cpu", "--threads", "1"];
const SGD: &[&str] = &["--optimizer", "sgd", "--lr", "0.1", "--no-shuffle"];

/// A model of ONNX's textual form, as a file.
fn model(folder: &Folder, name: &str, body: &str) -> String {
    model_of(folder, name, 10, body)
}

fn model_of(folder: &Folder, name: &str, ir: i64, body: &str) -> String {
    folder.file(name, format!("<ir_version: {ir}, opset_import: [\"\" : 20]>\n{body}"))
}

/// An array file of these elements.
fn array(folder: &Folder, name: &str, dtype: DType, shape: &[usize], elements: &[f64]) -> String {
    let path = folder.path(name);
    npy::write(Path::new(&path), &Tensor::from_f64(dtype, shape, elements)).expect("it is written");
    path
}

/// Numbers from -1 to 1 without a pattern.
fn numbers(count: usize) -> Vec<f64> {
    (0..count).map(|i| f64::from((i as u32 * 37 + 11) % 101) / 50.0 - 1.0).collect()
}

fn list(numbers: &[f64]) -> String {
    numbers.iter().map(f64::to_string).collect::<Vec<_>>().join(", ")
}

/// The initializers of a written model.
fn weights(path: &str) -> Vec<TensorProto> {
    let bytes = std::fs::read(path).expect("it was written");
    ModelProto::decode(&bytes[..]).expect("it is a model").graph.expect("it has a graph").initializer
}

fn weight(path: &str, name: &str) -> Vec<f64> {
    let found = weights(path).into_iter().find(|tensor| tensor.name == name);
    let found = found.unwrap_or_else(|| panic!("{path} has {name}"));
    let shape: Vec<usize> = found.dims.iter().map(|&extent| extent as usize).collect();
    let dtype = found.dtype().expect("a known type");
    Tensor::new(dtype, shape, found.bytes().expect("its elements are in the file")).expect("they are whole").to_f64()
}

const WITH_DEFAULT: &str = "g (float[2] x, float[2] w) => (float[2] y) <float[2] w = {1, 1}> { y = Mul (x, w) }";

#[test]
fn a_given_value_goes_before_the_default_of_an_input() {
    let folder = Folder::new("defaults");
    let path = model(&folder, "m.onnxtxt", WITH_DEFAULT);
    let run = |more: &[&str]| {
        let out = folder.path("out");
        ok(&[&["run", &path, "--input", "x=2xf32=3", "--output-dir", &out], CPU, more]);
        npy::read(Path::new(&format!("{out}/y.npy"))).expect("it was written").to_f64()
    };
    assert_eq!(run(&[]), [3.0, 3.0]);
    assert_eq!(run(&["--input", "w=2xf32=5"]), [15.0, 15.0]);
    // A plan for runs that give it is run so again.
    let plan = folder.path("plan.json");
    ok(&[&["plan", &path, "--threads", "1", "--input", "w=2xf32=5", "-o", &plan]]);
    let out = folder.path("planned");
    let given = ["--input", "x=2xf32=3", "--input", "w=2xf32=4", "--output-dir", &out];
    ok(&[&["run", &plan, "--model", &path], CPU, &given]);
    assert_eq!(npy::read(Path::new(&format!("{out}/y.npy"))).expect("it was written").to_f64(), [12.0, 12.0]);
    // The file says so.
    let found = ok_json(&[&["inspect", &path]]);
    assert_eq!(found["defaults"][0]["name"], "w");
    assert!(ok(&[&["inspect", &path]]).contains("w float[2]"), "{}", ok(&[&["inspect", &path]]));
    // In a program.
    let session = Session::from_path(&path, &Options::default().on(Choice::Cpu).give("w")).expect("it loads");
    let two = |n: f32| Tensor::from_f32([2], &[n, n]).expect("two elements");
    assert_eq!(session.run(&[("x", two(3.0)), ("w", two(2.0))]).expect("it runs")[0].1.to_f64(), [6.0, 6.0]);
    // Before IR version 4, an initializer is the only value of its input.
    let old = model_of(&folder, "old.onnxtxt", 3, WITH_DEFAULT);
    let words = ["input 'w' is an initializer", "IR version 4 or newer", "found 3"];
    fails(1, &[&["run", &old, "--input", "w=2xf32=5"], CPU], &words);
}

#[test]
fn a_state_begins_with_the_default_of_its_input() {
    let folder = Folder::new("default-state");
    let body = "g (float[2] x, float[2] s) => (float[2] next, float[2] y) <float[2] s = {1, 2}> {
        next = Add (x, s)  y = Neg (next)
    }";
    let path = model(&folder, "m.onnxtxt", body);
    let begins = |more: &[&str]| {
        let out = folder.path("out");
        let flags = ["run", &path, "--state", "s=next", "--input", "x=2xf32=10", "--iters", "2", "--output-dir", &out];
        ok(&[&flags, CPU, more]);
        npy::read(Path::new(&format!("{out}/y.npy"))).expect("it was written").to_f64()
    };
    assert_eq!(begins(&[]), [-21.0, -22.0]);
    assert_eq!(begins(&["--input", "s=2xf32=0"]), [-20.0, -20.0]);
}

/// Logits `[n, time, classes]` or `[n, classes, ..]`: the axis is the one whose removal gives the labels' shape, for `train` and for `plan`.
#[test]
fn the_axis_of_the_classes_is_that_of_the_labels() {
    let folder = Folder::new("classes");
    // Identities with one weight, so that every axis can have the classes.
    let net = |shape: &str| {
        let body = format!(
            "g (float[n, {shape}] x) => (float[n, {shape}] y) <float[1] weight = {{1}}> {{ y = Mul (x, weight) }}"
        );
        model(&folder, "m.onnxtxt", &body)
    };
    let train = |path: &str, x: &[usize], labels: &[usize], more: &[&str]| {
        let count = |shape: &[usize]| 2 * shape.iter().product::<usize>();
        let all = |shape: &[usize]| [&[2], shape].concat();
        let data = array(&folder, "x.npy", DType::F32, &all(x), &numbers(count(x)));
        let labels = array(&folder, "y.npy", DType::I64, &all(labels), &vec![1.0; count(labels)]);
        let log = folder.path("log");
        let flags: Vec<String> = [
            "train",
            path,
            "--data",
            &data,
            "--labels",
            &labels,
            "--loss",
            "cross_entropy",
            "--batch",
            "2",
            "--steps",
            "1",
            "--log",
            &log,
        ]
        .iter()
        .map(|word| (*word).to_owned())
        .collect();
        (flags, [SGD, CPU, more].concat().iter().map(|word| (*word).to_owned()).collect::<Vec<_>>(), log)
    };
    // The mean loss of softmax over an axis, where all labels are class 1.
    let loss = |shape: [usize; 2], axis: usize| {
        let x: Vec<f64> = numbers(2 * shape[0] * shape[1]).iter().map(|&x| f64::from(x as f32)).collect();
        let at = |n: usize, i: usize, j: usize| x[(n * shape[0] + i) * shape[1] + j];
        let (classes, places) = (shape[axis], shape[1 - axis]);
        let one = |n: usize, place: usize| {
            let logit = |class: usize| if axis == 0 { at(n, class, place) } else { at(n, place, class) };
            (0..classes).map(|class| logit(class).exp()).sum::<f64>().ln() - logit(1)
        };
        (0..2).flat_map(|n| (0..places).map(move |place| (n, place))).map(|(n, p)| one(n, p)).sum::<f64>()
            / (2 * places) as f64
    };
    for (shape, labels, axis, more) in [
        ([5, 6], 5, 1, &[][..]),
        ([5, 6], 6, 0, &[]),
        ([6, 6], 6, 1, &["--class-axis", "2"]),
        ([6, 6], 6, 0, &["--class-axis", "1"]),
    ] {
        let path = net(&format!("{}, {}", shape[0], shape[1]));
        let (flags, last, log) = train(&path, &shape, &[labels], more);
        let words: Vec<&str> = flags.iter().chain(&last).map(String::as_str).collect();
        ok(&[&words]);
        let record: Value = serde_json::from_str(&std::fs::read_to_string(&log).expect("a log")).expect("one record");
        let (found, expected) = (record["loss"].as_f64().expect("a number"), loss(shape, axis));
        assert!((found - expected).abs() < 1e-5, "{shape:?}, labels {labels}: {found}, not {expected}");
    }
    let path = net("6, 6");
    let (flags, last, _) = train(&path, &[6, 6], &[6], &[]);
    let words: Vec<&str> = flags.iter().chain(&last).map(String::as_str).collect();
    let asked = ["f32[2,6,6]", "axis 1 or on axis 2", "--class-axis 2 or --class-axis 1"];
    fails(1, &[&words], &asked);
    // `plan` has no labels, and asks where they could not tell either.
    let method = ["--loss", "cross_entropy", "--batch", "2"];
    fails(1, &[&["plan", "--train", &path], &method], &asked);
    let planned = ok(&[&["plan", "--train", &path, "--class-axis", "1"], &method]);
    assert!(planned.contains("classes: axis 1 of the first output, f32[2,6,6]"), "{planned}");
    fails(1, &[&["plan", "--train", &path, "--class-axis", "3"], &method], &["class axis 3: expected one from 1 to 2"]);
    fails(
        1,
        &[&["plan", "--train", &path, "--class-axis", "1", "--loss", "mse", "--batch", "2"]],
        &["class axis: expected the loss cross_entropy"],
    );
    // Images: [n, classes, h, w] against [n, h, w].
    let images = net("3, 4, 5");
    let (flags, last, _) = train(&images, &[3, 4, 5], &[4, 5], &[]);
    ok(&[&flags.iter().chain(&last).map(String::as_str).collect::<Vec<_>>()]);
}

/// A net with a normalization over `[n, 3]`, and its data.
struct Normed {
    folder: Folder,
    path: String,
    data: Vec<String>,
}

impl Normed {
    fn new(attributes: &str) -> Normed {
        let folder = Folder::new("normed");
        let body = format!(
            "g (float[n, 4] x) => (float[n, 2] y)
            <float[4, 3] stem = {{{}}}, float[3] bn_weight = {{1, 1, 1}}, float[3] bn_bias = {{0, 0, 0}},
             float[3] bn_running_mean = {{0, 0.5, 0}}, float[3] bn_running_var = {{1, 2, 1}}, float[3, 2] head = {{{}}}>
            {{ a = MatMul (x, stem)  b = BatchNormalization{attributes} (a, bn_weight, bn_bias, bn_running_mean, bn_running_var)
              y = MatMul (b, head) }}",
            list(&numbers(12)),
            list(&numbers(6)),
        );
        let path = model(&folder, "m.onnxtxt", &body);
        let x = array(&folder, "x.npy", DType::F32, &[8, 4], &numbers(32));
        let y = array(&folder, "y.npy", DType::I64, &[8], &[0.0, 1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0]);
        let data = ["--data", &x, "--labels", &y, "--loss", "cross_entropy"].map(str::to_owned).to_vec();
        Normed { folder, path, data }
    }

    /// What `train` prints on stdout, and the written model.
    fn train(&self, more: &[&str]) -> (Vec<String>, String) {
        let out = self.folder.path("out.onnx");
        let words = [&["train".to_owned(), self.path.clone()][..], &self.data].concat();
        let words: Vec<String> = words.into_iter().chain(["--output".to_owned(), out.clone()]).collect();
        (words.iter().cloned().chain([SGD, CPU, more].concat().iter().map(|w| (*w).to_owned())).collect(), out)
    }

    /// The names of the initializers that a training changes.
    fn changed(&self, more: &[&str]) -> Vec<String> {
        let (words, out) = self.train(more);
        ok(&[&words.iter().map(String::as_str).collect::<Vec<_>>()]);
        let source = std::fs::read_to_string(&self.path).expect("it is there");
        let before =
            text::parse(&source, Path::new("m.onnxtxt")).expect("it parses").graph.expect("a graph").initializer;
        let of = |tensor: &TensorProto| tensor.bytes().expect("its elements are in the file");
        let names = before.iter().zip(weights(&out)).filter(|(a, b)| of(a) != of(b)).map(|(a, _)| a.name.clone());
        names.collect()
    }
}

const STATISTICS: [&str; 2] = ["bn_running_mean", "bn_running_var"];

#[test]
fn a_frozen_norm_keeps_its_statistics() {
    for attributes in ["", " <training_mode = 0>"] {
        let net = Normed::new(attributes);
        let steps = ["--batch", "8", "--steps", "3"];
        let changed = |more: &[&str]| net.changed(&[&steps, more].concat());
        let all = changed(&[]);
        assert!(STATISTICS.iter().all(|name| all.iter().any(|other| other == name)) && all.len() == 6, "{all:?}");
        assert_eq!(changed(&["--freeze", "bn_*"]), ["stem", "head"]);
        assert_eq!(changed(&["--freeze", "bn_weight", "--freeze", "bn_bias"]), ["stem", "head"]);
        assert_eq!(changed(&["--freeze", "bn_running_*"]), ["stem", "bn_weight", "bn_bias", "head"]);
        assert_eq!(changed(&["--train-only", "head"]), ["head"]);
        assert_eq!(changed(&["--train-only", "h*d"]), ["head"]);
        // Names of its weights alone: the statistics follow the batch.
        let own = changed(&["--train-only", "bn_weight", "--train-only", "bn_bias"]);
        assert_eq!(own, ["bn_weight", "bn_bias", "bn_running_mean", "bn_running_var"]);
        // With frozen norms, one row will do.
        assert_eq!(net.changed(&["--batch", "1", "--steps", "2", "--freeze", "bn_*"]), ["stem", "head"]);
    }
}

/// The loss of the first step is that of the stored statistics, also where the file says that it trains.
#[test]
fn a_frozen_norm_normalizes_by_its_statistics() {
    let (net, log) = (Normed::new(""), "log.jsonl");
    let loss = |more: &[&str]| {
        let log = net.folder.path(log);
        let (words, _) = net.train(&[&["--batch", "8", "--steps", "1", "--log", &log], more].concat());
        ok(&[&words.iter().map(String::as_str).collect::<Vec<_>>()]);
        let record: Value = serde_json::from_str(&std::fs::read_to_string(&log).expect("a log")).expect("a record");
        record["loss"].as_f64().expect("a number")
    };
    let x: Vec<f64> = numbers(32).iter().map(|&v| f64::from(v as f32)).collect();
    let (stem, head, labels) = (numbers(12), numbers(6), [0, 1, 0, 0, 1, 1, 0, 1]);
    let (mean, variance) = ([0.0, 0.5, 0.0], [1.0, 2.0, 1.0]);
    let one = |row: usize| {
        let hidden = |j: usize| {
            let sum = (0..4).map(|i| x[row * 4 + i] * stem[i * 3 + j]).sum::<f64>();
            (sum - mean[j]) / (variance[j] + 1e-5f64).sqrt()
        };
        let logits = [0, 1].map(|k| (0..3).map(|j| hidden(j) * head[j * 2 + k]).sum::<f64>());
        (logits[0].exp() + logits[1].exp()).ln() - logits[labels[row]]
    };
    let expected = (0..8).map(one).sum::<f64>() / 8.0;
    let frozen = loss(&["--freeze", "bn_*"]);
    assert!((frozen - expected).abs() < 1e-5, "{frozen}, not {expected}");
    assert!((loss(&[]) - expected).abs() > 1e-3, "the statistics of the batch are others");
}

#[test]
fn one_value_per_channel_is_refused() {
    let net = Normed::new("");
    for flags in [&["--batch", "1"][..], &["--batch", "8", "--accumulate", "8"]] {
        let (words, _) = net.train(&[flags, &["--epochs", "1"]].concat());
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        fails(1, &[&words], &["(BatchNormalization)", "expected more than one value per channel", "f32[1,3]"]);
        let plan = [&["plan", "--train", &net.path, "--loss", "cross_entropy"][..], flags].concat();
        fails(1, &[&plan], &["expected more than one value per channel"]);
    }
    let plan = |batch: &str| ok(&[&["plan", "--train", &net.path, "--loss", "cross_entropy", "--batch", batch]]);
    assert!(plan("2").contains("warning: the statistics of norm 'b' are of 2 values per channel"), "{}", plan("2"));
    assert!(!plan("4").contains("warning"), "{}", plan("4"));
}

#[test]
fn what_is_frozen_is_said_in_one_line() {
    let net = Normed::new("");
    let plan = ["plan", "--train", &net.path, "--loss", "cross_entropy", "--batch", "8"];
    let text = ok(&[&plan, &["--freeze", "bn_*", "--freeze", "stem"]]);
    // 12 elements of the stem, 3 of each of the norm's.
    assert!(text.contains("trained: 1 weight: 'head'\nfrozen: 5 weights, 96 B\n"), "{text}");
    fails(1, &[&plan, &["--train-only", "tail"]], &["trained weights 'tail': expected names of weights"]);
}

/// Buffers that the exporter has marked are not trained, unless they are named; what may be one is named.
#[test]
fn buffers_are_no_weights() {
    let folder = Folder::new("buffers");
    let body = format!(
        "g (float[n, 4] x) => (float[n, 2] y) <float[4] mean = {{0, 0, 0, 0}}, float[4] std = {{1, 1, 1, 1}}, float[4, 2] head = {{{}}}>
        {{ a = Sub (x, mean)  b = Div (a, std)  y = MatMul (b, head) }}",
        list(&numbers(8))
    );
    let unmarked = model(&folder, "unmarked.onnxtxt", &body);
    let method = ["--loss", "mse", "--batch", "2"];
    let text = ok(&[&["plan", "--train", &unmarked], &method]);
    let doubt = "trained, but perhaps no weights: 'mean', 'std'; --freeze NAME leaves one as it is";
    assert!(text.contains("trained: 3 weights: 'mean', 'std', 'head'") && text.contains(doubt), "{text}");
    let source = std::fs::read_to_string(&unmarked).expect("it is there");
    let mut proto = text::parse(&source, Path::new("m.onnxtxt")).expect("it parses");
    let graph = proto.graph.as_mut().expect("it has a graph");
    for (name, kind) in [("mean", "BUFFER"), ("std", "CONSTANT_TENSOR"), ("head", "PARAMETER")] {
        let key = "pkg.torch.export.graph_signature.InputSpec.kind".to_owned();
        let metadata_props = vec![StringStringEntryProto { key, value: kind.to_owned() }];
        graph.value_info.push(ValueInfoProto { name: name.to_owned(), metadata_props, ..Default::default() });
    }
    let marked = folder.file("marked.onnx", proto.encode_to_vec());
    let text = ok(&[&["plan", "--train", &marked], &method]);
    let kept = "trained: 1 weight: 'head'\nnot trained: 'mean', 'std': the exporter says that it is a buffer\n";
    assert!(text.contains(kept), "{text}");
    let plan = ok_json(&[&["plan", "--train", &marked, "--train-only", "mean"], &method]);
    assert_eq!(plan["trained"], serde_json::json!(["mean"]));
    let found = ok_json(&[&["inspect", &marked, "--weights"]]);
    let roles: Vec<_> = found["initializers"].as_array().expect("a list").iter().map(|i| i["role"].clone()).collect();
    assert_eq!(roles, ["buffer", "buffer", "parameter"]);
    let text = ok(&[&["inspect", &marked, "--weights"]]);
    assert!(text.contains(", 8 parameters\n"), "{text}");
}

/// The plan that `plan --train` prints is the one that `train` takes, with a log or without, also under a limit.
#[test]
fn a_log_takes_no_memory() {
    let data = ["--data", "graphs/digits-train-images.npy", "--labels", "graphs/digits-train-labels.npy"];
    let folder = Folder::new("log");
    let log = folder.path("log");
    for method in [
        &["--optimizer", "sgd", "--lr", "0.01", "--momentum", "0.9"][..],
        &["--accumulate", "2"],
        &["--clip-norm", "1"],
    ] {
        let method = [&["--loss", "cross_entropy", "--batch", "64"][..], method].concat();
        let whole = ok_json(&[&["plan", "--train", "graphs/digits.onnx", "--threads", "2"], &method]);
        let least = ok_json(&[&["plan", "--train", "graphs/digits.onnx", "--threads", "2", "--curve"], &method]);
        let points = least["curve"].as_array().expect("points");
        let least = points.last().expect("there is one")["planned_bytes"].clone();
        for limit in [None, Some(least.to_string())] {
            let limit: Vec<&str> = limit.iter().flat_map(|limit| ["--memory-limit", limit]).collect();
            let rate: &[&str] = if method.contains(&"--lr") { &[] } else { &["--lr", "0.01"] };
            let train = |more: &[&str]| {
                let cpu = ["--backend", "cpu", "--threads", "2", "--steps", "1"];
                ok_json(&[&["train", "graphs/digits.onnx"], &data, &cpu, &method, rate, &limit, more])
            };
            let planned = ok_json(&[&["plan", "--train", "graphs/digits.onnx", "--threads", "2"], &method, &limit]);
            for found in [train(&[]), train(&["--log", &log])] {
                assert_eq!(found["planned_bytes"], planned["planned_bytes"], "{method:?} {limit:?}");
                assert_eq!(found["allocated_bytes"], planned["planned_bytes"], "{method:?} {limit:?}");
                assert_eq!(found["recompute"], planned["recompute"], "{method:?} {limit:?}");
            }
            let record = std::fs::read_to_string(&log).expect("a log");
            let record: Value = serde_json::from_str(record.trim()).expect("one record");
            assert!(record["grad_norm"].as_f64().is_some_and(|norm| norm > 0.0), "{record}");
        }
        assert!(whole["planned_bytes"].as_u64() > least.as_u64(), "{method:?}");
    }
}

/// A model whose weights are in another file, and data for it.
fn external(folder: &Folder) -> (String, Vec<String>) {
    let mut proto = text::parse(
        &format!(
            "<ir_version: 10, opset_import: [\"\" : 20]>
            g (float[n, 4] x) => (float[n, 2] y) <float[4, 3] stem = {{{}}}, float[3, 2] head = {{{}}}>
            {{ a = MatMul (x, stem)  c = Constant <value = float[2] {{0.5, 0.25}}> ()  b = MatMul (a, head)  y = Add (b, c) }}",
            list(&numbers(12)),
            list(&numbers(6))
        ),
        Path::new("m.onnxtxt"),
    )
    .expect("it parses");
    let mut data = Vec::new();
    let graph = proto.graph.as_mut().expect("it has a graph");
    let inner = graph.node.iter_mut().flat_map(|node| &mut node.attribute).filter_map(|a| a.t.as_deref_mut());
    for tensor in graph.initializer.iter_mut().chain(inner) {
        let bytes = tensor.bytes().expect("its elements are in the file");
        let entries = [
            ("location", "m.data".to_owned()),
            ("offset", data.len().to_string()),
            ("length", bytes.len().to_string()),
        ];
        data.extend_from_slice(&bytes);
        *tensor = TensorProto {
            name: tensor.name.clone(),
            dims: tensor.dims.clone(),
            data_type: tensor.data_type,
            external_data: entries.map(|(key, value)| StringStringEntryProto { key: key.to_owned(), value }).into(),
            data_location: DataLocation::External as i32,
            ..Default::default()
        };
    }
    folder.file("m.data", data);
    let x = array(folder, "x.npy", DType::F32, &[4, 4], &numbers(16));
    let y = array(folder, "y.npy", DType::F32, &[4, 2], &numbers(8));
    let words = ["--data", &x, "--labels", &y, "--loss", "mse", "--batch", "4", "--steps", "1"];
    (folder.file("m.onnx", proto.encode_to_vec()), words.map(str::to_owned).to_vec())
}

/// Every model that is written is whole: another folder does not have the data of the one that was read.
#[test]
fn a_written_model_refers_to_no_other_file() {
    let (folder, other) = (Folder::new("external"), Folder::new("elsewhere"));
    let (path, data) = external(&folder);
    let data: Vec<&str> = data.iter().map(String::as_str).collect();
    let (trained, copied) = (other.path("trained.onnx"), other.path("copied.onnx"));
    ok(&[&["train", &path, "--freeze", "stem", "--output", &trained], &data, SGD, CPU]);
    ok(&[&["emit", &path, "onnx", "-o", &copied]]);
    for (written, changes) in [(&trained, true), (&copied, false)] {
        assert_eq!(weight(written, "stem").len(), 12);
        let run = |path: &str| {
            let out = other.path("out");
            ok(&[&["run", path, "--input", "x=1x4xf32=1", "--output-dir", &out], CPU]);
            npy::read(Path::new(&format!("{out}/y.npy"))).expect("it was written").to_f64()
        };
        assert_eq!(run(written) != run(&path), changes, "{written}");
    }
    assert_eq!(other.names(""), ["copied.onnx", "out", "trained.onnx"]);
}

/// What protobuf has no room for lies in a data file, at places that can be mapped.
#[test]
fn a_large_model_has_a_data_file_of_its_own() {
    let (folder, other) = (Folder::new("large"), Folder::new("large-written"));
    let body = format!(
        "g (float[n, 20] x) => (float[n, 20] y) <float[20, 20] w = {{{}}}, float[20] b = {{{}}}> {{ a = MatMul (x, w)  y = Add (a, b) }}",
        list(&numbers(400)),
        list(&numbers(20))
    );
    let path = model(&folder, "m.onnxtxt", &body);
    let model = onnx::load(Path::new(&path)).expect("it is a model");
    let mut proto = model.proto.clone();
    for tensor in &mut proto.graph.as_mut().expect("a graph").initializer {
        tensor.raw_data = tensor.bytes().expect("its elements are in the file");
        tensor.float_data.clear();
    }
    let written = other.path("m.onnx");
    onnx::write(proto, Path::new(&written), Some(1000)).expect("it is written");
    assert_eq!(other.names(""), ["m.onnx", "m.onnx.data"]);
    let of = |path: &str| {
        let session = Session::from_path(path, &Options::default().on(Choice::Cpu).set("n", 1)).expect("it loads");
        session.run(&[("x", Tensor::from_f32([1, 20], &[0.5; 20]).expect("twenty"))]).expect("it runs")[0].1.to_f64()
    };
    assert_eq!(of(&written), of(&path));
    let files = onnx::load(Path::new(&written)).expect("it is a model").files();
    assert_eq!(
        files.iter().map(|file| file.file_name().expect("a name")).collect::<Vec<_>>(),
        ["m.onnx", "m.onnx.data"]
    );
}

/// What is read is not replaced, unless that is asked for.
#[test]
fn files_that_are_read_are_not_overwritten() {
    let folder = Folder::new("overwritten");
    let (path, data) = external(&folder);
    let data: Vec<&str> = data.iter().map(String::as_str).collect();
    let before = std::fs::read(&path).expect("it is there");
    let train = ["train", &path];
    let own = folder.path("m.data");
    let x = folder.path("x.npy");
    for (flag, file) in
        [("--output", &path), ("--output", &own), ("--log", &path), ("--html", &own), ("--output", &x), ("--log", &x)]
    {
        fails(1, &[&train, &data, SGD, CPU, &[flag, file]], &[&format!("{flag} would replace {file}, which is read")]);
    }
    fails(1, &[&train, &data, SGD, CPU, &["--output", &path]], &["--overwrite replaces the model"]);
    fails(1, &[&["plan", &path, "--set", "n=1", "-o", &path]], &["--save would replace"]);
    fails(1, &[&["emit", &path, "onnx", "-o", &own]], &["--save would replace"]);
    fails(1, &[&["compare", &path, "--set", "n=1", "--html", &path], CPU], &["--html would replace"]);
    assert_eq!(std::fs::read(&path).expect("it is there"), before);
    ok(&[&train, &data, SGD, CPU, &["--output", &path, "--overwrite"]]);
    assert_eq!(weight(&path, "stem").len(), 12);
}

#[test]
fn folded_norms_are_asked_about() {
    let text = ok(&[&["inspect", "graphs/digits.onnx"]]);
    assert!(!text.contains("norms "), "{text}");
    let folder = Folder::new("folded");
    let body = "g (float[n, 1, 4, 4] x) => (float[n, 2, 4, 4] y)
        <float[2, 1, 1, 1] w = {1, 2}, float[2] b = {0, 1}> { y = Conv (x, w, b) }";
    let path = model(&folder, "m.onnxtxt", body);
    let words = "1 convolution with a bias and no norm: exported with the norms folded in?";
    assert!(ok(&[&["inspect", &path]]).contains(words));
    assert!(ok(&[&["plan", "--train", &path, "--loss", "mse", "--batch", "2"]]).contains(words));
}

/// A file asks for a rounded number by a Cast; numbers of the program alone are not rounded.
#[test]
fn a_cast_of_the_file_rounds() {
    let folder = Folder::new("cast");
    let body = "g (float16[4] x) => (bool[4] y) <float c = {0.3}> { h = Cast <to = 10> (c)  y = Equal (x, h) }";
    let path = model(&folder, "m.onnxtxt", body);
    let out = folder.path("out");
    ok(&[&["run", &path, "--input", "x=4xf16=0.3", "--output-dir", &out], CPU]);
    assert_eq!(npy::read(Path::new(&format!("{out}/y.npy"))).expect("it was written").to_f64(), [1.0; 4]);
}

/// What a training replaces in a run only is in the file that it writes.
#[test]
fn a_trained_model_has_the_defaults_of_the_file() {
    let folder = Folder::new("trained-default");
    let body = format!(
        "g (float[n, 4] x, float[1] gain) => (float[n, 2] y) <float[1] gain = {{1}}, float[4, 2] head = {{{}}}>
        {{ a = Mul (x, gain)  y = MatMul (a, head) }}",
        list(&numbers(8))
    );
    let path = model(&folder, "m.onnxtxt", &body);
    let x = array(&folder, "x.npy", DType::F32, &[1, 4], &numbers(4));
    let gain = array(&folder, "gain.npy", DType::F32, &[1], &[3.0]);
    let y = array(&folder, "y.npy", DType::F32, &[1, 2], &[0.0, 0.0]);
    let out = folder.path("out.onnx");
    let (x, gain) = (format!("x={x}"), format!("gain={gain}"));
    let data = ["--data", &x, "--data", &gain, "--labels", &y, "--loss", "mse", "--batch", "1", "--steps", "1"];
    ok(&[&["train", &path, "--output", &out], &data, SGD, CPU]);
    assert_eq!(weight(&out, "gain"), [1.0]);
    assert_ne!(weight(&out, "head"), numbers(8));
}

/// Files are the same whatever their path is, and a folder of data is read as a whole.
#[cfg(unix)]
#[test]
fn other_names_of_what_is_read_are_not_overwritten() {
    use std::os::unix::fs::symlink;
    let folder = Folder::new("other-names");
    let (path, data) = external(&folder);
    let data: Vec<&str> = data.iter().map(String::as_str).collect();
    let train = ["train", &path];
    let (link, hard) = (folder.path("link.onnx"), folder.path("hard.npy"));
    symlink(&path, &link).expect("a link");
    std::fs::hard_link(folder.path("x.npy"), &hard).expect("a second name");
    let refuses = |flag: &str, file: &str| {
        fails(1, &[&train, &data, SGD, CPU, &[flag, file]], &[&format!("{flag} would replace {file}, which is read")]);
    };
    refuses("--log", &hard);
    refuses("--log", &link);
    let own = folder.path("m.data");
    fails(1, &[&train, &data, SGD, CPU, &["--output", &own, "--overwrite"]], &["which is read"]);
    fails(1, &[&["plan", &path, "--set", "n=1", "--html", &own]], &["--html would replace"]);
    fails(1, &[&["run", &path, "--set", "n=1", "--trace", &own], CPU], &["--trace would replace"]);
    let given = format!("x={}", folder.path("x.npy"));
    fails(1, &[&["run", &path, "--input", &given, "--trace", &folder.path("x.npy")], CPU], &["--trace would replace"]);
    let rows = folder.path("rows");
    std::fs::create_dir(&rows).expect("a folder");
    std::fs::copy(folder.path("x.npy"), format!("{rows}/p1.npy")).expect("a copy");
    let labels = folder.path("y.npy");
    let of = ["--data", &rows, "--labels", &labels, "--loss", "mse", "--batch", "4", "--steps", "1"];
    fails(1, &[&train, &of, SGD, CPU, &["--log", &format!("{rows}/p1.npy")]], &["--log would replace"]);
    // A link is replaced where it leads to, when that is complete.
    ok(&[&train, &data, SGD, CPU, &["--output", &link, "--overwrite"]]);
    assert!(std::fs::symlink_metadata(&link).is_ok_and(|there| there.is_symlink()));
    assert_eq!(weight(&path, "stem").len(), 12);
}

/// The data of what is trained need not be there, that of the rest must be before the first step.
#[test]
fn data_that_a_trained_model_needs_is_looked_for_first() {
    let folder = Folder::new("missing-data");
    let (path, data) = external(&folder);
    let data: Vec<&str> = data.iter().map(String::as_str).collect();
    let mut proto = ModelProto::decode(&std::fs::read(&path).expect("it is there")[..]).expect("a model");
    let graph = proto.graph.as_mut().expect("a graph");
    let mut gone = graph.initializer[0].clone();
    gone.name = "gone".to_owned();
    gone.external_data[0].value = "gone.data".to_owned();
    graph.initializer.push(gone);
    let path = folder.file("gone.onnx", proto.encode_to_vec());
    let (out, log) = (folder.path("out.onnx"), folder.path("log"));
    let words = ["gone.data", "tensor 'gone'"];
    fails(1, &[&["train", &path, "--output", &out, "--log", &log], &data, SGD, CPU], &words);
    assert!(!Path::new(&log).exists(), "no step was done");
    ok(&[&["train", &path, "--log", &log], &data, SGD, CPU]);
}

/// Operands of a norm that come through a view, a cast, or a copy of an initializer are those initializers.
#[test]
fn a_norm_is_frozen_through_views_and_copies() {
    let folder = Folder::new("views");
    let x = array(&folder, "x.npy", DType::F32, &[8, 4], &numbers(32));
    let y = array(&folder, "y.npy", DType::I64, &[8], &[0.0, 1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0]);
    let changed = |body: &str, more: &[&str]| {
        let source = format!(
            "g (float[n, 4] x) => (float[n, 2] y) <float[4, 3] stem = {{{}}}, float[1, 3] s = {{1, 1, 1}}, float[1, 3] b = {{0, 0, 0}},
             float[3] m = {{0, 0, 0}}, float[3] v = {{1, 1, 1}}, int64[1] flat = {{3}}, float[3, 2] head = {{{}}}> {{ a = MatMul (x, stem)  {body}  y = MatMul (n1, head) }}",
            list(&numbers(12)),
            list(&numbers(6))
        );
        let path = model(&folder, "m.onnxtxt", &source);
        let out = folder.path("out.onnx");
        let data = ["--data", &x, "--labels", &y, "--loss", "cross_entropy", "--batch", "8", "--steps", "2"];
        ok(&[&["train", &path, "--output", &out], &data, SGD, CPU, more]);
        let before = text::parse(&std::fs::read_to_string(&path).expect("it is there"), Path::new("m.onnxtxt"));
        let before = before.expect("it parses").graph.expect("a graph").initializer;
        let of = |tensor: &TensorProto| tensor.bytes().expect("its elements are in the file");
        let after = weights(&out);
        let is_new = |old: &&TensorProto| after.iter().any(|new| new.name == old.name && of(new) != of(old));
        before.iter().filter(is_new).map(|tensor| tensor.name.clone()).collect::<Vec<_>>()
    };
    let views = "s1 = Reshape (s, flat)  b1 = Reshape (b, flat)  n1 = BatchNormalization (a, s1, b1, m, v)";
    assert_eq!(changed(views, &["--train-only", "head"]), ["head"]);
    assert_eq!(changed(views, &["--freeze", "s", "--freeze", "b"]), ["stem", "head"]);
    // The statistics of two norms are parted; a pattern of what they were in the file fits both.
    let twice = "s1 = Reshape (s, flat)  b1 = Reshape (b, flat)  n0 = BatchNormalization (a, s1, m, m, v)
        n1 = BatchNormalization (n0, s1, b1, m, v)";
    let frozen = changed(twice, &["--freeze", "m", "--freeze", "v"]);
    assert!(!frozen.iter().any(|name| ["m", "v"].contains(&&name[..])), "{frozen:?}");
}
