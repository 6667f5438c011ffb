//! Trainings that are refused before the first step, and what the error says.

use crate::cli::{fails, ok};
use crate::common::Folder;
use plimsoll::internals::npy;
use plimsoll::internals::onnx::{self, proto::*};
use plimsoll::{DType, Shape, Tensor};
use prost::Message;
use std::fs;
use std::path::Path;

const CPU: &[&str] = &["--backend", "cpu", "--threads", "1", "--steps", "2", "--lr", "0.01"];
const TRAIN: &[&str] = &["train", "graphs/digits.onnx", "--batch", "12", "--loss", "cross_entropy"];
const DATA: &[&str] = &["--data", "graphs/digits-images.npy", "--labels", "graphs/digits-labels.npy"];

/// A file of an array.
fn array(folder: &Folder, name: &str, dtype: DType, shape: impl Into<Shape>, values: &[f64]) -> String {
    let path = folder.path(name);
    npy::write(Path::new(&path), &Tensor::from_f64(dtype, shape, values)).expect("it can be written");
    path
}

#[test]
fn numbers_out_of_their_range_are_named() {
    let without_rate = &CPU[..6];
    for rate in ["nan", "-1", "inf", "1e39"] {
        fails(
            1,
            &[TRAIN, DATA, without_rate, &["--lr", rate]],
            &["learning rate: expected a number of at least 0 that is finite in f32"],
        );
    }
    for (flags, words) in [
        ("--momentum -1 --optimizer sgd", "momentum: expected a number of at least 0 that is finite in f32, found -1"),
        ("--beta1 1", "beta1: expected a number of at least 0 and below 1, found 1"),
        ("--beta2 -0.5", "beta2: expected a number of at least 0 and below 1, found -0.5"),
        ("--eps nan", "eps: expected a number of at least 0"),
        ("--weight-decay -0.1", "weight decay: expected a number of at least 0"),
        ("--label-smoothing 1.5", "label smoothing: expected a number from 0 to 1, found 1.5"),
        ("--clip-norm 0", "largest norm of the gradients: expected a number above 0, found 0"),
        ("--clip-norm nan", "largest norm of the gradients: expected a number above 0, found NaN"),
        ("--ema 1", "share of the moving averages: expected a number of at least 0 and below 1, found 1"),
        ("--accumulate 5", "accumulation: a batch of 12 has no 5 equal parts"),
        ("--threads 5000", "5000 is not in 1..=4096"),
    ] {
        let flags: Vec<&str> = flags.split(' ').collect();
        let cpu = if flags[0] == "--threads" { &["--steps", "2", "--lr", "1"] } else { CPU };
        fails(1, &[TRAIN, DATA, cpu, &flags], &[words]);
    }
}

/// A flag without effect is a mistake: what is trained is not what was asked for.
#[test]
fn flags_without_effect_are_refused() {
    for (flags, words) in [
        ("--momentum 0.9", "--momentum: expected --optimizer sgd"),
        ("--nesterov --optimizer adamw", "--nesterov: expected --optimizer sgd"),
        ("--nesterov --optimizer sgd", "nesterov: expected a momentum above 0"),
        ("--beta1 0.8 --optimizer sgd", "--beta1: expected --optimizer adam or adamw"),
        ("--eps 0.1 --optimizer sgd", "--eps: expected --optimizer adam or adamw"),
        (
            "--freeze tail*",
            "frozen weights 'tail*': expected names of weights, found none that fits among 'stem.0.weight', ",
        ),
    ] {
        fails(1, &[TRAIN, DATA, CPU, &flags.split(' ').collect::<Vec<_>>()], &[words]);
    }
    let mse = &["train", "graphs/linear.onnxtxt", "--data", "graphs/linear-x.npy", "--labels", "graphs/linear-y.npy"];
    let smoothing = &["--loss", "mse", "--batch", "8", "--label-smoothing", "0.1"];
    fails(1, &[mse, CPU, smoothing], &["label smoothing: expected the loss cross_entropy"]);
    fails(1, &[TRAIN, DATA, CPU, &["--freeze", "*"]], &["no weight can be trained: it is frozen: 'stem.0.weight'"]);
    let plan = &["plan", "--train", "graphs/digits.onnx", "--batch", "12", "--loss", "cross_entropy"];
    fails(1, &[plan, &["--momentum", "0.9"]], &["--momentum: expected --optimizer sgd"]);
}

#[test]
fn data_to_validate_on_is_judged_before_the_first_step() {
    let folder = Folder::new("valid");
    let rows = |name: &str, count: usize| array(&folder, name, DType::F32, [count, 1, 8, 8], &vec![0.5; count * 64]);
    let some = rows("some.npy", 24);
    let labels = |name: &str, labels: &[f64]| array(&folder, name, DType::I64, [labels.len()], labels);
    let five = labels("five.npy", &[1.0; 5]);
    let mut wrong = [3.0; 24];
    wrong[17] = 10.0;
    let (wrong, none) = (labels("wrong.npy", &wrong), labels("none.npy", &[-100.0; 24]));
    let log = folder.path("log");
    for (valid, right, words) in [
        (some.clone(), &five, "five.npy: expected 24 labels, one per row, found 5"),
        (some.clone(), &wrong, "wrong.npy: row 17: expected a label of 0 to 9"),
        (some.clone(), &none, "none.npy: all labels are -100"),
        (format!("picture={some}"), &five, "expected 24 labels"),
        (format!("picture={some}"), &none, "the data to validate on: expected inputs 'image', found 'picture'"),
    ] {
        fails(1, &[TRAIN, DATA, CPU, &["--log", &log, "--valid", &valid, "--valid-labels", right]], &[words]);
        assert!(!Path::new(&log).exists(), "{words}: no step was done");
    }
}

#[test]
fn a_file_that_cannot_be_written_is_named_before_the_first_step() {
    let folder = Folder::new("places");
    let (missing, log) = (folder.path("missing/trained.onnx"), folder.path("log"));
    for flag in ["--output", "--html", "--log"] {
        let log: &[&str] = if flag == "--log" { &[] } else { &["--log", &log] };
        fails(1, &[TRAIN, DATA, CPU, log, &[flag, &missing]], &[&missing, "there is no folder"]);
        fails(1, &[TRAIN, DATA, CPU, log, &[flag, &folder.path("")]], &["expected a file to write, found a folder"]);
    }
    assert!(!Path::new(&log).exists(), "no step was done");
}

#[test]
fn data_that_does_not_suit_the_model_is_named() {
    let folder = Folder::new("unsuited");
    let labels = ["--labels", "graphs/digits-labels.npy"];
    let refuses = |data: &str, words: &str| fails(1, &[TRAIN, CPU, &labels, &["--data", data]], &[words]);
    let count = 360;
    let zeros = vec![0.0; count * 64];
    // Rows of as many elements, in another order.
    let turned = array(&folder, "turned.npy", DType::F32, [count, 4, 16, 1], &zeros);
    refuses(&turned, "turned.npy: 'image': expected rows of f32[1,8,8], found f32[4,16,1]");
    let flat = array(&folder, "flat.npy", DType::F32, [count, 64], &zeros);
    refuses(&flat, "flat.npy: 'image': expected rows of f32[1,8,8], found f32[64]");
    refuses("picture=graphs/digits-images.npy", "the model has no input 'picture'");
    let twice = ["--data", "graphs/digits-images.npy", "--data", "image=graphs/digits-images.npy"];
    fails(1, &[TRAIN, CPU, &labels, &twice], &["input 'image' has data twice"]);
    for (header, words) in [
        ("'>f4', 'fortran_order': False", "elements of type >f4 are not supported: expected one of <f4"),
        ("'|O', 'fortran_order': False", "elements of type |O are not supported"),
        ("'<f4', 'fortran_order': True", "found Fortran order; write numpy.ascontiguousarray"),
    ] {
        let text = format!("{{'descr': {header}, 'shape': ({count}, 1, 8, 8), }}\n");
        let mut bytes = [&b"\x93NUMPY\x01\x00"[..], &(text.len() as u16).to_le_bytes(), text.as_bytes()].concat();
        bytes.resize(bytes.len() + count * 256, 0);
        refuses(&folder.file("strange.npy", bytes), words);
    }
    refuses(
        &folder.file("empty.npy", ""),
        "empty.npy: cannot read the array: not a NumPy array file: it ends too early",
    );
    let bits = array(&folder, "bits.npy", DType::F32, [16, 1], &[2.0; 16]);
    let x = array(&folder, "x.npy", DType::F32, [16, 10], &[0.0; 160]);
    let bce = &["train", "graphs/linear.onnxtxt", "--loss", "bce_logits", "--batch", "8"];
    fails(
        1,
        &[bce, CPU, &["--data", &x, "--labels", &bits]],
        &["bits.npy: row 0: expected a label of 0 to 1, found 2"],
    );
    let ones = array(&folder, "ones.npy", DType::I64, [16], &[1.0; 16]);
    let one = &["train", "graphs/linear.onnxtxt", "--loss", "cross_entropy", "--batch", "8"];
    fails(1, &[one, CPU, &["--data", &x, "--labels", &ones]], &["for 0/1 labels take bce_logits"]);
}

/// A pipe that nobody writes to would be waited for, for ever.
#[cfg(unix)]
/// A file that fixes its batch is trained on another one if it is asked for.
#[test]
fn a_fixed_batch_is_replaced_by_a_shape() {
    let folder = Folder::new("train-shape");
    let source = "<ir_version: 9, opset_import: [\"\" : 20]> g (float[1, 2] x) => (float[1, 1] y)
        <float[2, 1] w = {0.5, 0.25}> { y = MatMul (x, w) }";
    let model = folder.file("fixed.onnxtxt", source);
    let x = array(&folder, "x.npy", DType::F32, [8, 2], &[1.0; 16]);
    let y = array(&folder, "y.npy", DType::F32, [8, 1], &[2.0; 8]);
    let method = ["--loss", "mse", "--batch", "8"];
    let train: &[&[&str]] = &[&["train", &model, "--data", &x, "--labels", &y], &method, CPU];
    fails(1, train, &["input 'x' is f32[1,2]: expected a batch of 8"]);
    ok(&[train, &[&["--shape", "x=8x2"]]].concat());
    fails(1, &[train, &[&["--shape", "x=8"]]].concat(), &["--shape x: the file declares f32[1,2], found [8]"]);
}

#[test]
fn a_pipe_is_no_file_of_data() {
    let folder = Folder::new("pipe");
    for name in ["pipe.npy", "pipe.npz"] {
        let pipe = folder.path(name);
        let made = std::process::Command::new("mkfifo").arg(&pipe).status().expect("mkfifo runs");
        assert!(made.success());
        fails(1, &[TRAIN, DATA, CPU, &["--valid", &pipe, "--valid-labels", &pipe]], &[&pipe, "found a folder, a pipe"]);
        fails(1, &[&["run", "graphs/linear.onnxtxt", "--input", &format!("x={pipe}")]], &[&pipe, "expected a file"]);
    }
}

const NETS: [(&str, &str); 5] = [
    ("float[8, 4] w = {F32}", "y = MatMul (x, labels)"),
    ("double[8, 4] w = {F32}", "d = Cast <to = 11> (x) e = MatMul (d, w) y = Cast <to = 1> (e)"),
    ("float[8, 4] w = {F32}", "a = MatMul (x, w) y = ReduceSum <keepdims = 0> (a)"),
    ("float[8, 4] w = {F32}", "y = Add (x, x)"),
    ("float[8, 4] step = {F32}", "y = MatMul (x, step)"),
];

#[test]
fn models_that_cannot_be_trained_say_why() {
    let folder = Folder::new("models");
    let x = array(&folder, "x.npy", DType::F32, [16, 8], &[0.25; 128]);
    let labels = array(&folder, "y.npy", DType::F32, [16, 4], &[0.5; 64]);
    let words = [
        "it has an input 'labels', as the one that training adds",
        "no weight can be trained: its elements are not f32: 'w'",
        "expected a first output with a row per example, found f32[]",
        "no weight can be trained: expected initializers of floats",
        "a weight is called 'step', as a state of the training",
    ];
    for ((weights, nodes), words) in NETS.into_iter().zip(words) {
        let numbers = vec!["0.5"; 32].join(", ");
        let inputs = if nodes.contains("labels") { "float[b, 8] x, float[8, 4] labels" } else { "float[b, 8] x" };
        let output = if nodes.contains("Reduce") { "float y" } else { "float[b, n] y" };
        let text = format!(
            "<ir_version: 9, opset_import: [\"\" : 17]> net ({inputs}) => ({output}) <{}> {{ {nodes} }}",
            weights.replace("F32", &numbers)
        );
        let model = folder.file("net.onnxtxt", text);
        let train = &["train", &model, "--loss", "mse", "--batch", "8", "--data", &x, "--labels", &labels];
        fails(1, &[train, CPU], &[words]);
    }
}

/// The tensors of a model's file.
fn tensors(path: &str) -> Vec<(String, Vec<f64>)> {
    let model = ModelProto::decode(&fs::read(path).expect("it was written")[..]).expect("it is a model");
    let tensors = model.graph.expect("it has a graph").initializer;
    let values = |tensor: TensorProto| {
        let bytes = tensor.raw_data.chunks_exact(4);
        let numbers = bytes.map(|word| f64::from(f32::from_le_bytes(word.try_into().expect("4 bytes")))).collect();
        (tensor.name, numbers)
    };
    tensors.into_iter().map(values).collect()
}

/// Trains a net of batch normalizations by one step without a rate, on two rows. Returns its tensors.
fn normalized(folder: &Folder, tensors_of: &str, nodes: &str) -> Vec<(String, Vec<f64>)> {
    let text = format!(
        "<ir_version: 9, opset_import: [\"\" : 17]> net (float[b, 2] x) => (float[b, 2] y) <{tensors_of}> {{ {nodes} }}"
    );
    let model = folder.file("norm.onnxtxt", text);
    assert!(onnx::load(Path::new(&model)).is_ok());
    let x = array(folder, "x.npy", DType::F32, [2, 2], &[1.0, 2.0, 3.0, 6.0]);
    let y = array(folder, "y.npy", DType::F32, [2, 2], &[0.0; 4]);
    let out = folder.path("trained.onnx");
    let train = &["train", &model, "--loss", "mse", "--batch", "2", "--data", &x, "--labels", &y, "--output", &out];
    ok(&[train, &["--backend", "cpu", "--steps", "1", "--lr", "0"]]);
    tensors(&out)
}

/// A layer that is used twice updates its running statistics twice, one update after the other.
#[test]
fn a_norm_that_is_used_twice_has_its_statistics_updated_twice() {
    let folder = Folder::new("twice");
    let own = "float[2] s = {1, 1}, float[2] b = {0.5, 0}, float[2] m = {0, 0}, float[2] v = {1, 1}";
    let twice = "a = BatchNormalization (x, s, b, m, v) y = BatchNormalization (a, s, b, m, v)";
    let found = normalized(&folder, own, twice);
    let mean = &found.iter().find(|(name, _)| name == "m").expect("it is there").1;
    // The first batch has the means 2 and 4, the second those of its bias.
    for (found, expected) in mean.iter().zip([0.9 * 0.2 + 0.1 * 0.5, 0.9 * 0.4]) {
        assert!((found - expected).abs() < 1e-6, "{mean:?}");
    }
    assert_eq!(found.len(), 4, "{found:?}");
}

/// Exporters write equal tensors once: of a fresh model, the bias and the running mean of all norms.
#[test]
fn running_statistics_are_parted_from_weights_of_the_same_elements() {
    let folder = Folder::new("parted");
    let own = "float[2] ones = {1, 1}, float[2] zeros = {0, 0}";
    let nodes = "a = BatchNormalization (x, ones, zeros, zeros, ones) c = Relu (a) y = BatchNormalization (c, ones, zeros, zeros, ones)";
    let found = normalized(&folder, own, nodes);
    let names: Vec<&str> = found.iter().map(|(name, _)| &name[..]).collect();
    assert_eq!(names, ["ones", "zeros", "a.running_mean", "a.running_var", "y.running_mean", "y.running_var"]);
    assert_eq!(found[1].1, [0.0, 0.0]);
    for (mean, expected) in found[2].1.iter().zip([0.2, 0.4]) {
        assert!((mean - expected).abs() < 1e-6, "{found:?}");
    }
    assert!(found[4].1.iter().all(|mean| (mean - 0.05).abs() < 1e-3), "{found:?}");
}
