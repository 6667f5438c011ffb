//! What the library answers about a model's file, beside what the command does; options of programs in other languages.

use crate::cli::ok_json;
use plimsoll::internals::{settings, train::data::Rows};
use plimsoll::training::{Data, Loss, Optimizer, Rate, Training};
use plimsoll::{Choice, Error, Model, Options, Target, Tensor};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

fn file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("graphs").join(name)
}

fn cpu() -> Options {
    Options::default().on(Choice::Cpu)
}

fn text(path: &Path) -> &str {
    path.to_str().expect("it is text")
}

#[test]
fn plans_and_answers_are_those_of_the_command() {
    for name in ["mlp.onnxtxt", "attention.onnxtxt", "digits.onnx", "unet.onnxtxt"] {
        let path = file(name);
        let model = Model::from_path(&path, &cpu()).expect("a model");
        for target in ["cpu", "cuda", "wgpu"] {
            let plan = model.plan(&Target::named(target).expect("a target")).expect("it is planned");
            let told = ok_json(&[&["plan", text(&path), "--target", target]]);
            assert_eq!(json!(plan.bytes()), told["planned_bytes"], "{name} for {target}");
            assert_eq!(json!(model.assumed()), told.get("assumed").cloned().unwrap_or(json!([])), "{name}");
            assert!(plan.to_string().starts_with("planned "), "{plan}");
        }
        let limit = 1 << 20;
        let target = Target::named("cpu").expect("a target");
        let model = Model::from_path(&path, &cpu().memory_limit(limit)).expect("a model");
        if let Ok(advice) = model.advise(&target)
            && advice.answer.as_ref().is_some_and(|answer| answer.deficit_bytes == 0)
        {
            let told = ok_json(&[&["plan", text(&path), "--advise", "--memory-limit", "1MiB"]]);
            assert_eq!(json!(advice.remedies), told["advice"]["remedies"], "{name}");
            assert!(advice.to_string().contains("live at the peak"), "{advice}");
        }
    }
}

#[test]
fn the_largest_batch_is_that_of_the_command() {
    let path = file("mlp.onnxtxt");
    let target = Target::named("cpu").expect("a target");
    for options in [cpu(), cpu().batch(8), cpu().set("batch", 8)] {
        let model = Model::from_path(&path, &options.memory_limit(2 << 20)).expect("a model");
        let found = model.max_batch(&target, None).expect("it is found").fits.expect("one fits");
        let told = ok_json(&[&["max-batch", text(&path), "--memory-limit", "2MiB"]]);
        // What is bound by name is only made smaller.
        let most =
            if model.options().dims.is_empty() { told["largest"]["extent"].as_u64().expect("a number") } else { 7 };
        assert_eq!(found.extent as u64, most);
    }
    let open = Model::from_path(&path, &cpu()).expect("a model");
    let error = open.max_batch(&target, None).expect_err("there is no limit").to_string();
    assert!(error.contains("expected a memory limit"), "{error}");
    let limited = Model::from_path(&path, &cpu().memory_limit(1 << 20)).expect("a model");
    let error = limited.max_batch(&target, Some("rows")).expect_err("no such dim").to_string();
    assert!(error.contains("no dim 'rows'") && error.contains("'batch'"), "{error}");
}

#[test]
fn a_model_fits_on_cards_and_is_compared_as_the_command_says() {
    let path = file("mlp.onnxtxt");
    let model = Model::from_path(&path, &cpu().batch(8).memory_limit(660_000)).expect("a model");
    let target = Target::named("cpu").expect("a target");
    let found = model.fit(&target, 1..=4, plimsoll::answers::Cluster::default()).expect("it is searched");
    let told = ok_json(&[&[
        "fit",
        text(&path),
        "--batch",
        "8",
        "--memory-limit",
        "660000",
        "--cards",
        "1..4",
        "--target",
        "cpu",
    ]]);
    assert_eq!(json!(found.fewest), told["fewest"]);
    let compared = Model::from_path(&path, &cpu().batch(8)).expect("a model").compare(&[], 2).expect("it runs");
    assert!(compared.columns.len() >= 4 && compared.to_string().contains("peak"), "{compared}");
    compared.verdict(1e-4).expect("all ways agree");
}

#[test]
fn a_model_of_bytes_is_that_of_the_file_and_runs() {
    let path = file("digits.onnx");
    let bytes = std::fs::read(&path).expect("it is there");
    let (of_bytes, of_file) = (Model::from_bytes(bytes, &cpu()), Model::from_path(&path, &cpu()));
    let sessions = [of_bytes, of_file].map(|model| model.expect("a model").session().expect("it is loaded"));
    let [a, b] = sessions.map(|session| {
        let inputs = Model::inputs(session.plan(), Vec::new(), 7).expect("inputs");
        let inputs: Vec<(&str, Tensor)> = inputs.iter().map(|(name, x)| (name.as_str(), x.clone())).collect();
        assert_eq!(session.usage().bytes, session.plan().bytes());
        session.run(&inputs).expect("it runs")[0].1.to_f64()
    });
    assert_eq!(a, b);
    let error = Model::from_bytes(&b"What is this?"[..], &cpu()).expect_err("no model").to_string();
    assert!(error.starts_with("(memory)"), "{error}");
    assert!(Model::from_bytes(&b""[..], &cpu()).is_err());
}

#[test]
fn training_is_planned_advised_and_run_from_memory() {
    let path = file("linear.onnxtxt");
    let method = || Training::new(Loss::Mse, Optimizer::adam(None, None, None, false), Rate::constant(0.01));
    let model = Model::from_path(&path, &cpu()).expect("a model");
    let target = Target::named("cpu").expect("a target");
    let planned = model.plan_training(&target, 16, &method()).expect("it is planned");
    let told = ok_json(&[&["plan", text(&path), "--train", "--loss", "mse", "--batch", "16"]]);
    assert_eq!(json!(planned.bytes()), told["planned_bytes"]);
    assert!(!model.advise_training(&target, 16, &method()).expect("advice").remedies.is_empty());

    let limited = Model::from_path(&path, &cpu().memory_limit(planned.bytes())).expect("a model");
    let found = limited.max_batch_of_training(&target, &method()).expect("it is found");
    assert!(found.fits.is_some_and(|size| size.extent >= 16));

    let [x, y] = ["linear-x.npy", "linear-y.npy"].map(|name| Rows::open(&file(name)).expect("rows"));
    let data = Data { inputs: vec![("x".into(), x)], labels: y };
    let mut trainer = model.trainer(&data, 16, method()).expect("it is loaded");
    let first = trainer.step(&data, 0, None).expect("a step").loss;
    for step in 1..20 {
        trainer.step(&data, step, None).expect("a step");
    }
    assert!(trainer.evaluate(&data).expect("a score").loss < f64::from(first));
    let session = trainer.session();
    assert_eq!(session.usage().bytes, session.plan().bytes());

    let error = Model::from_path(&path, &cpu().batch(4)).expect("a model").plan_training(&target, 16, &method());
    assert!(error.expect_err("the batch is given twice").to_string().contains("option batch"));
}

#[test]
fn rows_in_memory_are_those_of_files() {
    let tensor = Tensor::from_f32([3, 2], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]).expect("a tensor");
    let rows = Rows::of(&tensor).expect("rows");
    assert_eq!((rows.count(), rows.shape().to_vec()), (3, vec![3, 2]));
    let error = Rows::of(&Tensor::from_f32([0, 2], &[]).expect("a tensor")).expect_err("no rows").to_string();
    assert!(error.contains("expected an array of rows"), "{error}");
}

/// The names of a struct's public fields in a source file.
fn fields(file: &str, of: &str) -> Vec<String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/run").join(file);
    let text = std::fs::read_to_string(path).expect("it is there");
    let body = text.split(&format!("pub struct {of} {{")).nth(1).and_then(|rest| rest.split("\n}").next());
    let lines = body.expect("it is there").lines().filter_map(|line| line.trim().strip_prefix("pub "));
    lines.map(|line| line.split(':').next().unwrap_or_default().to_owned()).collect()
}

#[test]
fn every_option_has_a_builder() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/run/session/options.rs");
    let text = std::fs::read_to_string(path).expect("it is there");
    let others = [
        ("backend", "on"),
        ("dims", "set"),
        ("values", "bind"),
        ("given", "give"),
        ("ties", "tie"),
        ("outputs", "output"),
        ("shards", "shard"),
    ];
    for field in fields("session/options.rs", "Options") {
        let name = others.iter().find(|(of, _)| *of == field).map_or(&field[..], |(_, name)| name);
        // Ranks are given by the program that has joined them.
        assert!(field == "ranks" || text.contains(&format!("pub fn {name}(mut self")), "no builder for {field}");
    }
}

#[test]
fn options_are_read_from_json() {
    let every = json!({
        "device": "cuda:1", "batch": "1..64", "dims": {"sequence": 128, "other": [1, 4]}, "ties": {"total": "past+new"},
        "memory_limit": "2GiB", "threads": 3, "forks": 2, "state": {"past": "present"}, "output": ["y"], "given": "g",
        "weights": "w.safetensors", "training": true, "f16": true, "no_fuse": true, "quantize": "int4:64", "cache": "int8",
        "chunks": 4, "prefer": "speed", "offload": "weights", "no_libraries": true, "allow_tf32": true, "no_tuned": true,
        "mesh": "data=2,tensor=2", "shard": "w*=1:tensor", "shard_states": 0
    });
    let options = settings::options(&every.to_string()).expect("options");
    assert_eq!((options.backend, options.device.as_deref()), (Choice::Cuda, Some("1")));
    assert_eq!((options.memory_limit, options.threads, options.forks), (Some(2 << 30), 3, 2));
    assert_eq!(options.batch.map(|extent| extent.to_string()).as_deref(), Some("1..64"));
    // A field that changes nothing would be read by nobody.
    let plain = format!("{:?}", settings::options("").expect("options"));
    for (name, value) in every.as_object().expect("an object") {
        let value = if name == "shard_states" { json!(3) } else { value.clone() };
        let one = settings::options(&json!({ name: value }).to_string()).expect("an option");
        assert_ne!(format!("{one:?}"), plain, "{name}");
    }
    for (wrong, words) in [
        (json!({"memory": 3}), &["unknown field 'memory'", "memory_limit"][..]),
        (json!({"memory_limit": "2GX"}), &["memory_limit", "unknown unit"]),
        (json!({"memory_limit": 0}), &["memory_limit", "above 0"]),
        (json!({"batch": "8..2"}), &["batch", "8..2"]),
        (json!({"dims": {"s": [4, 1]}}), &["dims['s']", "4..1"]),
        (json!({"device": "tpu"}), &["device", "found 'tpu'", "cuda"]),
        (json!({"quantize": "int3"}), &["quantize", "int8 or int4"]),
        (json!({"shard_states": 4}), &["shard_states", "0 to 3"]),
        (json!({"forks": 0}), &["forks", "at least 1"]),
        (json!({"batch": 0}), &["option batch", "at least 1"]),
        (json!({"batch": [0, 4]}), &["option batch", "at least 1"]),
        (json!({"threads": -1}), &["option threads", "found -1"]),
    ] {
        let error = settings::options(&wrong.to_string()).expect_err("it is wrong");
        assert!(matches!(error, Error::Usage { .. }), "{error:?}");
        let text = error.to_string();
        assert!(words.iter().all(|word| text.contains(word)), "{wrong}: {text}");
    }
}

#[test]
fn methods_are_read_from_json() {
    let every = json!({
        "loss": "mse", "optimizer": "sgd", "lr": 0.5, "momentum": 0.9, "nesterov": true, "label_smoothing": 0.1,
        "weight_decay": 0.2, "decay_dims": 2, "schedule": "cosine", "warmup": 3, "accumulate": 2, "clip_norm": 1.0,
        "ema": 0.9, "precision": "bf16", "freeze": "a*", "train_only": ["b"], "class_axis": 1, "seed": 5
    });
    settings::training(&every.to_string(), 10).expect("a method");
    let plain = format!("{:?}", settings::training(r#"{"loss": "mse"}"#, 10).expect("a method"));
    for (name, value) in every.as_object().expect("an object").iter().filter(|(name, _)| *name != "loss") {
        let mut one: Value = json!({"loss": "mse", name: value});
        if ["momentum", "nesterov"].contains(&&name[..]) {
            one["optimizer"] = json!("sgd");
        }
        assert_ne!(format!("{:?}", settings::training(&one.to_string(), 10).expect("a method")), plain, "{name}");
    }
    for (wrong, words) in [
        (json!({"loss": "mse", "momentum": 0.9}), &["momentum", "the optimizer sgd", "found adam"][..]),
        (json!({"loss": "mse", "optimizer": "sgd", "beta1": 0.9}), &["beta1", "adam or adamw"]),
        (json!({"optimizer": "sgd"}), &["loss", "cross_entropy"]),
        (json!({"loss": "mse", "rate": 1}), &["unknown field 'rate'"]),
        (json!({"loss": "mse", "accumulate": 0}), &["accumulate", "at least 1"]),
    ] {
        let text = settings::training(&wrong.to_string(), 1).expect_err("it is wrong").to_string();
        assert!(words.iter().all(|word| text.contains(word)), "{wrong}: {text}");
    }
}
