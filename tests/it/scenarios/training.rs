//! The README's trainings: losses, bytes and accuracy.

use super::{folder, json_in, root, run};
use crate::common::random;
use plimsoll::internals::onnx::{self, proto::TensorProto};
use plimsoll::internals::{npy, tensor::Tensor};
use plimsoll::{DType, Trace};
use prost::Message;
use serde_json::Value;
use std::path::Path;

const ON: &str = "--backend cpu --threads 2";

/// Writes the 784-100-10 classifier as `mlp.onnx`: its weights are random numbers, no inputs.
fn classifier(folder: &Path) {
    let model = onnx::load(&root().join("graphs/mlp.onnxtxt")).expect("a graph");
    let graph = onnx::import(&model, &[("batch".into(), 1)]).expect("it is imported");
    let mut proto = model.proto;
    let made = proto.graph.as_mut().expect("a graph");
    made.input.truncate(1);
    let mut state = 11;
    for &weight in &graph.inputs()[1..] {
        let shape = &graph.fact(weight).shape;
        let scale: f64 = if shape.len() > 1 { (3.0 / shape[0] as f64).sqrt() } else { 0.0 };
        let values: Vec<f64> = random(&mut state, shape).to_f64().into_iter().map(|value| value * scale).collect();
        let bytes = Tensor::from_f64(DType::F32, shape.clone(), &values).bytes().to_vec().into();
        let name = graph.value_name(weight);
        made.initializer.push(TensorProto::new(name, DType::F32, shape, bytes).expect("a tensor"));
    }
    std::fs::write(folder.join("mlp.onnx"), proto.encode_to_vec()).expect("it is written");
}

/// Writes rows of random numbers, and as labels the sums of their first halves, or of `classes` the part in which the sum lies.
fn data(folder: &Path, rows: usize, columns: usize, classes: Option<usize>) {
    let x = random(&mut 5, &[rows, columns].into());
    let half = columns / 2;
    let sums: Vec<f64> = x.to_f64().chunks(columns).map(|row| row[..half].iter().sum()).collect();
    let y = match classes {
        None => Tensor::from_f64(DType::F32, [rows, 1], &sums),
        Some(classes) => {
            let most = sums.iter().fold(0.0, |most: f64, sum| most.max(sum.abs()));
            let class = |sum: &f64| ((sum / most + 1.0) / 2.0 * classes as f64).min(classes as f64 - 1.0).floor();
            Tensor::from_f64(DType::I64, [rows], &sums.iter().map(class).collect::<Vec<_>>())
        }
    };
    npy::write(&folder.join("x.npy"), &x).expect("it is written");
    npy::write(&folder.join("y.npy"), &y).expect("it is written");
}

/// The objects of a log, one per step.
fn log(folder: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(folder.join("log.jsonl")).expect("there is a log");
    text.lines().map(|line| serde_json::from_str(line).expect("an object")).collect()
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("expected a number, found {value}"))
}

fn losses(log: &[Value]) -> Vec<f64> {
    log.iter().map(|step| number(&step["loss"])).collect()
}

/// 5: a classifier with Adam, its loss and time every 50 steps, and the batch that fits.
#[test]
fn a_classifier_is_trained_and_its_batch_is_known() {
    let folder = folder("classifier");
    classifier(&folder);
    data(&folder, 1024, 784, Some(10));
    let method = "--loss cross_entropy --optimizer adam --lr 0.001";
    let command =
        format!("train mlp.onnx --data x.npy --labels y.npy {method} --batch 256 --steps 151 --log log.jsonl");
    let found = json_in(&folder, &format!("{command} {ON}"));
    assert_eq!(found["planned_bytes"], found["allocated_bytes"]);
    let log = log(&folder);
    let shown: Vec<_> = log.iter().step_by(50).collect();
    assert_eq!(
        shown.iter().map(|step| step["step"].as_u64()).collect::<Vec<_>>(),
        [Some(0), Some(50), Some(100), Some(150)]
    );
    assert!(shown.windows(2).all(|pair| number(&pair[1]["loss"]) < number(&pair[0]["loss"])), "{shown:?}");
    assert!(shown.iter().all(|step| number(&step["ms"]) > 0.0), "{shown:?}");
    assert!(number(&shown[3]["loss"]) < number(&shown[0]["loss"]) / 4.0, "{shown:?}");

    let method = "--train --loss cross_entropy --optimizer adam";
    let largest = json_in(&folder, &format!("max-batch mlp.onnx {method} --memory-limit 64MiB --threads 2"));
    let planned = |size: &str| number(&largest[size]["planned_bytes"]);
    let extent = |size: &str| number(&largest[size]["extent"]) as u64;
    assert!(planned("largest") <= f64::from(64 << 20) && planned("next") > f64::from(64 << 20), "{largest}");
    assert_eq!(extent("largest") + 1, extent("next"));
    let planned = json_in(&folder, &format!("plan mlp.onnx {method} --batch {} --threads 2", extent("largest")));
    assert_eq!(planned["planned_bytes"], largest["largest"]["planned_bytes"]);
}

/// 8: four micro-batches are the full batch.
#[test]
fn micro_batches_are_the_full_batch() {
    let folder = folder("accumulation");
    data(&folder, 64, 10, None);
    let train = |more: &str| {
        let command = "train graphs/linear.onnxtxt --data x.npy --labels y.npy --loss mse --optimizer sgd --lr 0.01 \
            --batch 64 --steps 200 --no-shuffle --log log.jsonl --output trained.onnx";
        let found = json_in(&folder, &format!("{command} {more} {ON}"));
        let weights = onnx::load(&folder.join("trained.onnx")).expect("it is written").proto.graph.expect("a graph");
        let w = weights.initializer.iter().find(|tensor| tensor.name == "w").expect("it keeps its name");
        let w: Vec<f32> = w
            .bytes()
            .expect("it has elements")
            .chunks(4)
            .map(|b| f32::from_le_bytes(b.try_into().expect("four")))
            .collect();
        (losses(&log(&folder)), w, found)
    };
    let [(whole, w, all), (parts, v, four)] = ["", "--accumulate 4"].map(train);
    assert_eq!((whole.len(), parts.len()), (200, 200));
    assert!(whole[199] < whole[0] / 5.0, "{whole:?}");
    for (whole, parts) in whole.iter().zip(&parts) {
        assert!((whole - parts).abs() <= 1e-5 * whole.abs(), "{whole} and {parts}");
    }
    for (w, v) in w.iter().zip(&v) {
        assert!((w - v).abs() <= 1e-5, "{w} and {v}");
    }
    for found in [all, four] {
        assert_eq!(found["planned_bytes"], found["allocated_bytes"]);
    }
}

/// 9: a thousand large images are streamed from their file, in the memory that ten of them take.
#[cfg(target_os = "linux")]
#[test]
fn a_thousand_images_take_the_memory_of_ten() {
    use std::io::Write;
    let folder = folder("streaming");
    let mut planned = Vec::new();
    for count in [10usize, 1000] {
        let labels: Vec<i64> = (0..count as i64).map(|row| row % 2).collect();
        let labels = Tensor::from_i64([count], &labels).expect("a number per row");
        npy::write(&folder.join("y.npy"), &labels).expect("it is written");
        let head = format!("{{'descr': '|u1', 'fortran_order': False, 'shape': ({count}, 1024, 1024, 3), }}");
        let head = format!("{head:<117}\n");
        let mut file = std::fs::File::create(folder.join("x.npy")).expect("a file");
        file.write_all(b"\x93NUMPY\x01\x00\x76\x00")
            .and_then(|()| file.write_all(head.as_bytes()))
            .expect("it is written");
        // Behind it, a hole that reads as zeros: 3 GB that take no disk.
        file.set_len(128 + count as u64 * 1024 * 1024 * 3).expect("a hole");
        let train = format!(
            "train graphs/colours.onnxtxt --data x.npy --labels y.npy --loss cross_entropy --lr 0.01 --batch 2 --steps 3 {ON} --json"
        );
        // All that is no file may take 256 MiB, which is less than a tenth of the images.
        let mut command = std::process::Command::new("sh");
        command.args(["-c", "ulimit -d 262144; exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_plimsoll")]);
        let output = command.args(train.split(' ')).current_dir(&folder).output().expect("it starts");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let found: Value = serde_json::from_slice(&output.stdout).expect("an object");
        assert_eq!(found["planned_bytes"], found["allocated_bytes"]);
        planned.push(number(&found["planned_bytes"]));
    }
    std::fs::remove_file(folder.join("x.npy")).expect("it is there");
    assert_eq!(planned[0], planned[1]);
}

/// 10: the thousandth epoch has the bytes of the first.
#[test]
fn a_thousand_epochs_keep_their_bytes() {
    let folder = folder("epochs");
    data(&folder, 64, 10, None);
    let command = "train graphs/linear.onnxtxt --data x.npy --labels y.npy --loss mse --lr 0.01 --batch 32 --epochs 1000 \
        --log log.jsonl";
    let found = json_in(&folder, &format!("{command} {ON}"));
    let log = log(&folder);
    assert_eq!(log.len(), 2000);
    assert!(log.iter().all(|step| step["allocated_bytes"] == found["planned_bytes"]), "{found}");
    assert!(number(&log[1999]["loss"]) < 1e-3 * number(&log[0]["loss"]), "{}", log[1999]);
}

/// 12: a residual net trains in three fifths of its bytes. What is computed again changes no bit of a loss.
#[test]
fn a_residual_net_trains_in_three_fifths_of_its_bytes() {
    let folder = folder("residual");
    let (rows, width) = (4096, 32);
    data(&folder, rows, width, None);
    let trace = Trace::new("residual");
    let mut state = 3;
    let mut weight = |name: &str, columns: usize| {
        let values: Vec<f64> = random(&mut state, &[width, columns].into()).to_f64().iter().map(|v| v / 4.0).collect();
        trace.constant(name, Tensor::from_f64(DType::F32, [width, columns], &values))
    };
    let mut y = trace.input("x", DType::F32, [rows, width]);
    for block in 0..24 {
        y = y + y.matmul(weight(&format!("w{block}"), width)).sigmoid();
    }
    trace.output("y", y.matmul(weight("head", 1)));
    trace.finish().expect("a graph").save(folder.join("residual.onnx")).expect("it is written");

    let train = |more: &str| {
        let command = "train residual.onnx --data x.npy --labels y.npy --loss mse --optimizer sgd --lr 0.001 --batch 4096 \
            --steps 3 --log log.jsonl";
        let found = json_in(&folder, &format!("{command} {more} {ON}"));
        assert_eq!(found["planned_bytes"], found["allocated_bytes"]);
        (number(&found["planned_bytes"]), losses(&log(&folder)))
    };
    let (bytes, whole) = train("");
    let limit = (bytes * 0.6) as u64;
    let (less, same) = train(&format!("--memory-limit {limit}"));
    assert!(less <= limit as f64, "{less} of {bytes}");
    assert!(whole == same && whole[0] != whole[2], "{whole:?} and {same:?}");
    let method = "--train --loss mse --optimizer sgd --batch 4096 --threads 2";
    let plan = json_in(&folder, &format!("plan residual.onnx {method} --memory-limit {limit}"));
    assert!(number(&plan["planned_bytes"]) <= limit as f64);
    assert!(number(&plan["recompute"]["extra_flop"]) > 0.0, "{}", plan["recompute"]);
}

/// The bytes before and after are those of plans in either precision.
#[test]
fn precision_shows_what_it_saves() {
    let folder = folder("precision");
    let model = root().join("graphs/digits.onnx").display().to_string();
    let plan = |precision: &str| {
        let method = "--loss cross_entropy --batch 4096 --target cuda";
        json_in(&folder, &format!("plan --train {model} {method} --precision {precision}"))
    };
    let (wide, narrow) = (plan("f32"), plan("bf16"));
    assert_eq!(narrow["f32"]["planned_bytes"], wide["planned_bytes"]);
    let share = |of: &dyn Fn(&Value) -> f64| of(&narrow) / of(&wide);
    // Some values are computed again, so not all that lie between are kept.
    let between =
        |plan: &Value| ["kept", "activation", "gradient"].map(|class| number(&plan["classes"][class])).iter().sum();
    let (all, between) = (share(&|plan| number(&plan["planned_bytes"])), share(&between));
    assert!(all < 0.58 && between < 0.58, "{all} of all bytes, {between} of those between");
    let bytes = [&wide, &narrow].map(|plan| number(&plan["planned_bytes"]));
    assert!(bytes[0] < 137e6 && bytes[1] < 78e6, "{bytes:?}");
    assert_eq!((&narrow["states"], narrow["wide"].is_null()), (&wide["states"], true));
}

/// Digits that the network never saw, after 20 epochs from random weights.
#[test]
fn digits_are_learnt_from_scratch() {
    let folder = folder("from-scratch");
    let command = "train graphs/digits-fresh.onnx --data graphs/digits-train-images.npy --labels graphs/digits-train-labels.npy \
        --valid graphs/digits-images.npy --valid-labels graphs/digits-labels.npy --loss cross_entropy \
        --label-smoothing 0.1 --lr 0.005 --schedule cosine --batch 30 --epochs 20 --output trained.onnx";
    let found = json_in(&folder, &format!("{command} {ON}"));
    assert!(number(&found["valid_accuracy"]) >= 0.98, "{found}");
    assert_eq!(found["planned_bytes"], found["allocated_bytes"]);
    // The file that it writes finds them, too.
    let command =
        format!("run trained.onnx --input image=graphs/digits-images.npy --labels graphs/digits-labels.npy {ON}");
    let (code, out, err) = run(&folder, &command.split(' ').collect::<Vec<_>>());
    assert_eq!(code, Some(0), "{err}");
    let right = out.split_once("accuracy ").and_then(|(_, rest)| rest.split(' ').next()?.parse::<f64>().ok());
    assert!((right.expect("it is printed") - 100.0 * number(&found["valid_accuracy"])).abs() < 0.01, "{out}");
}
