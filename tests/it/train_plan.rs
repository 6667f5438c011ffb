//! Training without data: its plans, their classes, the batch that fits, its graphs, its timing and its comparison.

use crate::cli::{fails, ok, ok_json};
use crate::common::{Folder, printed, random};
use crate::train_limit::refused;
use plimsoll::internals::onnx::proto::{DataLocation, ModelProto, StringStringEntryProto};
use plimsoll::{DType, Trace};
use prost::Message;
use serde_json::Value;

const DIGITS: &str = "graphs/digits.onnx";
const METHOD: &[&str] = &["--loss", "cross_entropy", "--batch", "12"];
const PLAN: &[&str] = &["plan", "--train", DIGITS, "--threads", "2"];
const DATA: &[&str] = &["--data", "graphs/digits-images.npy", "--labels", "graphs/digits-labels.npy"];
const CPU: &[&str] = &["--backend", "cpu", "--threads", "2"];

/// Methods with other states and programs each.
const METHODS: &[&[&str]] = &[
    &["--optimizer", "sgd"],
    &["--accumulate", "3", "--optimizer", "adamw", "--weight-decay", "0.1"],
    &["--ema", "0.9", "--clip-norm", "1", "--freeze", "head*"],
];

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| panic!("expected a number, found {value}"))
}

/// Where the sums of gradients take more than the parts of a batch save.
#[test]
fn an_accumulation_that_takes_more_says_so() {
    let few = [METHOD[0], METHOD[1], "--batch", "4"];
    let plan = |more: &[&str]| ok_json(&[PLAN, &few, more]);
    let (whole, parts) = (plan(&[]), plan(&["--accumulate", "2"]));
    let [whole_bytes, bytes] = [&whole, &parts].map(|plan| number(&plan["planned_bytes"]));
    assert!(whole_bytes < bytes && whole.get("undivided_bytes").is_none(), "{whole_bytes}, {bytes}");
    assert_eq!(number(&parts["undivided_bytes"]), whole_bytes);
    let text = ok(&[PLAN, &few, &["--accumulate", "2"]]);
    assert!(text.starts_with("graphs/digits.onnx (batch 4, adam, cross_entropy) for "), "{text}");
    assert!(text.contains("accumulation takes ") && text.contains(" without it\n"), "{text}");
}

fn sum(value: &Value) -> u64 {
    value.as_object().expect("figures").values().map(number).sum()
}

#[test]
fn a_plan_has_the_bytes_that_training_takes() {
    for method in METHODS {
        let planned = ok_json(&[PLAN, METHOD, method]);
        let trained = ok_json(&[&["train", DIGITS, "--steps", "1", "--lr", "0.1"], DATA, CPU, METHOD, method]);
        for figure in ["planned_bytes", "classes", "states", "recompute", "trained"] {
            assert_eq!(planned[figure], trained[figure], "{figure} of {method:?}");
        }
        assert_eq!(planned["programs"][0]["summary"]["arena_bytes"], trained["arena_bytes"], "{method:?}");
        assert_eq!(planned["programs"][0]["summary"]["planned_bytes"], planned["planned_bytes"]);
    }
}

#[test]
fn classes_add_up_to_what_is_planned() {
    for method in METHODS {
        let plan = ok_json(&[PLAN, METHOD, method]);
        assert_eq!(sum(&plan["classes"]), number(&plan["planned_bytes"]), "{method:?}");
        assert_eq!(sum(&plan["states"]), number(&plan["classes"]["state"]), "{method:?}");
    }
    let [sgd, accumulated, clipped] = [0, 1, 2].map(|at| ok_json(&[PLAN, METHOD, METHODS[at]]));
    // With accumulation, no value that is kept is live at the peak.
    for plan in [&sgd, &clipped] {
        assert!(number(&plan["classes"]["kept"]) > 0, "{plan}");
    }
    let weights = number(&sgd["states"]["weight"]);
    // The number of the step alone.
    assert_eq!(number(&sgd["states"]["optimizer"]), 4);
    assert_eq!(number(&sgd["states"]["gradient"]), 0);
    assert!(number(&accumulated["states"]["optimizer"]) >= 2 * weights);
    assert!(number(&accumulated["states"]["gradient"]) >= weights);
    assert_eq!(clipped["states"]["average"], clipped["states"]["weight"]);
    for plan in [sgd, accumulated, clipped] {
        // Means and variances of 16, 32 and 32 channels in three layers.
        assert!(number(&plan["states"]["statistic"]) > 0);
    }
}

/// Each point of the curve is a plan that is made under a limit of its bytes, and the work of an update is that of all its parts.
#[test]
fn the_curve_is_one_of_plans() {
    for method in [&["--optimizer", "sgd"][..], &["--optimizer", "sgd", "--accumulate", "4"]] {
        let plan = ok_json(&[PLAN, METHOD, method, &["--curve"]]);
        let points = plan["curve"].as_array().expect("points");
        assert!(points.len() > 1, "{points:?}");
        assert_eq!(points[0]["planned_bytes"], plan["planned_bytes"]);
        assert_eq!(points[0]["extra_flop"], plan["recompute"]["extra_flop"]);
        for pair in points.windows(2) {
            assert!(number(&pair[1]["planned_bytes"]) < number(&pair[0]["planned_bytes"]));
            assert!(number(&pair[1]["extra_flop"]) > number(&pair[0]["extra_flop"]));
        }
        for point in points {
            let limit = point["planned_bytes"].to_string();
            let within = ok_json(&[PLAN, METHOD, method, &["--memory-limit", &limit]]);
            assert!(number(&within["planned_bytes"]) <= number(&point["planned_bytes"]));
        }
        let least = number(&points[points.len() - 1]["planned_bytes"]);
        refused(&[PLAN, METHOD, method, &["--memory-limit", &(least - 1).to_string()]], &["does not fit"]);
    }
}

/// The norm of all gradients needs them at once. Without it, each dies in the update of its weight.
#[test]
fn gradients_are_held_where_their_norm_is_computed() {
    let folder = Folder::new("gradients");
    let trace = Trace::new("mlp");
    let mut value = trace.input("x", DType::F32, [2, 64]);
    for layer in 0..3 {
        value = value.matmul(trace.constant(&format!("w{layer}"), random(&mut 7, &[64, 64].into()))).tanh();
    }
    trace.output("y", value);
    let path = folder.path("mlp.onnx");
    trace.finish().expect("a graph").save(&path).expect("it is written");
    let gradients = |more: &[&str]| {
        let plan = ok_json(&[&["plan", "--train", &path, "--loss", "mse", "--batch", "2"], more]);
        (number(&plan["classes"]["gradient"]), number(&plan["states"]["weight"]))
    };
    let (one, weights) = gradients(&[]);
    assert_eq!(weights, 3 * 64 * 64 * 4);
    assert!(one <= weights / 3, "{one} of {weights} bytes");
    assert_eq!(gradients(&["--clip-norm", "1"]).0, weights);
}

#[test]
fn a_plan_in_words_names_its_parts() {
    let text = ok(&[PLAN, METHOD, METHODS[2]]);
    for words in [
        "2 programs",
        "step",
        "evaluate",
        "weights",
        "optimizer",
        "running statistics",
        "gradients",
        "kept for backward",
    ] {
        assert!(text.contains(words), "{words} missing in\n{text}");
    }
    assert!(text.contains("and 2 more\nfrozen: 5 weights, 54.75 KiB\n"), "{text}");
    let text = ok(&[PLAN, METHOD, METHODS[1]]);
    for words in ["4 programs", "first", "next", "last", "sums of gradients"] {
        assert!(text.contains(words), "{words} missing in\n{text}");
    }
}

#[test]
fn no_weights_are_needed() {
    let folder = Folder::new("weightless-training");
    let mut proto = ModelProto::decode(&std::fs::read(DIGITS).expect("it is there")[..]).expect("a model");
    for tensor in &mut proto.graph.as_mut().expect("a graph").initializer {
        if tensor.name.ends_with("weight") {
            tensor.float_data.clear();
            tensor.raw_data = Vec::new().into();
            tensor.data_location = DataLocation::External as i32;
            tensor.external_data = vec![StringStringEntryProto { key: "location".into(), value: "w.bin".into() }];
        }
    }
    let model = folder.file("model.onnx", proto.encode_to_vec());
    let args = ["plan", "--train", &model, "--threads", "2"];
    assert_eq!(
        ok_json(&[&args, METHOD])["planned_bytes"],
        ok_json(&[PLAN, METHOD])["planned_bytes"],
        "bytes with and without weights"
    );
}

#[test]
fn flags_that_do_not_fit_training_are_named() {
    fails(1, &[&["plan", DIGITS, "--loss", "mse"]], &["--train"]);
    fails(1, &[PLAN], &["--loss"]);
    fails(1, &[PLAN, &["--loss", "mse"]], &["batch"]);
    fails(1, &[PLAN, METHOD, &["--f16"]], &["--f16: --train has no use for it"]);
    fails(1, &[PLAN, METHOD, &["graphs/mlp.onnxtxt"]], &["--train: expected one model"]);
    fails(1, &[PLAN, METHOD, &["--accumulate", "5"]], &["a batch of 12 has no 5 equal parts"]);
    fails(1, &[PLAN, METHOD, &["--set", "batch=1..4"]], &["--set: training takes no range"]);
    fails(1, &[PLAN, METHOD, &["--set", "batch=4"]], &["expected a batch of 12 on its first axis"]);
}

#[test]
fn plans_of_training_are_saved_checked_drawn_and_compared() {
    let folder = Folder::new("training-plans");
    let [plan, other, page] = ["plan.json", "other.json", "page.html"].map(|name| folder.path(name));
    ok(&[PLAN, METHOD, METHODS[1], &["-o", &plan, "--html", &page]]);
    ok(&[PLAN, &["--loss", "cross_entropy", "--batch", "24"], METHODS[1], &["-o", &other]]);
    let checked = ok_json(&[&["check", &plan]]);
    let names: Vec<&str> = checked["programs"].as_array().expect("programs").iter().map(name).collect();
    assert_eq!(names, ["first", "next", "last", "evaluate"]);
    // What is printed is a plan, too.
    let told = ok(&[PLAN, METHOD, METHODS[1], &["--json"]]);
    printed(PLAN, &told);
    let again = folder.file("printed.json", told);
    let words = ok(&[&["diff", &again, &plan]]);
    assert!(words.contains("program last"), "{words}");
    let differs = ok_json(&[&["diff", &plan, &other]]);
    let changes = differs["programs"].as_array().expect("programs");
    assert_eq!(changes.len(), 4);
    assert!(ok(&[&["diff", &plan, &other]]).contains("gradient of"), "a gradient took more");
    let drawn = std::fs::read_to_string(&page).expect("it is drawn");
    for words in ["first", "evaluate", "gradient of", "accumulated/"] {
        assert!(drawn.contains(words), "{words} missing in the page");
    }
    let planned = ok_json(&[PLAN, METHOD])["planned_bytes"].to_string();
    ok(&[PLAN, METHOD, &["--assert-bytes", &planned]]);
    fails(2, &[PLAN, METHOD, &["--assert-bytes", "1000"]], &["--assert-bytes", "program 'step' needs the most arena"]);
    refused(&[PLAN, METHOD, &["--memory-limit", "1000"]], &["'step', 'evaluate'", "the limit is 1,000 bytes"]);
}

fn name(plan: &Value) -> &str {
    plan["program"].as_str().expect("a name")
}

#[test]
fn the_largest_batch_fits_and_the_next_does_not() {
    let folder = Folder::new("batches");
    let source = "<ir_version: 9, opset_import: [\"\" : 20]>
        g (float[batch, 3] x) => (float[batch, 2] y) <float[3, 2] w = {1, 2, 3, 4, 5, 6}> { y = MatMul (x, w) }";
    let model = folder.file("model.onnxtxt", source);
    for parts in ["1", "3"] {
        let method = &[&model, "--threads", "2", "--train", "--loss", "mse", "--accumulate", parts];
        let planned = |batch: &str| number(&ok_json(&[&["plan"], method, &["--batch", batch]])["planned_bytes"]);
        let limit = planned("300");
        let found = ok_json(&[&["max-batch", "--memory-limit", &limit.to_string()], method]);
        assert_eq!(found["dim"], "batch");
        let [largest, next] = ["largest", "next"].map(|size| &found[size]["extent"]);
        assert!(number(largest) >= 300, "{largest}");
        assert!(planned(&largest.to_string()) <= limit && planned(&next.to_string()) > limit, "{largest} and {next}");
        // A batch that is given is the largest that is asked for, and fits. All parts of an update are equal.
        for (batch, most) in [("30", 30), ("32", if parts == "3" { 30 } else { 32 })] {
            let asked: &[&str] = &["max-batch", "--memory-limit", &limit.to_string(), "--batch", batch];
            let found = ok_json(&[asked, method]);
            assert_eq!((number(&found["largest"]["extent"]), &found["next"]), (most, &Value::Null), "{found}");
            assert_eq!(number(&found["largest"]["planned_bytes"]), planned(&most.to_string()));
            let text = ok(&[asked, method]);
            assert!(text.contains(&format!("\n   {most}  ")) && text.contains("fits; no more is asked for"), "{text}");
        }
        let beyond = ok_json(&[&["max-batch", "--memory-limit", &limit.to_string(), "--batch", "30000"], method]);
        assert_eq!((&beyond["largest"], &beyond["next"]), (&found["largest"], &found["next"]));
        if parts == "3" {
            fails(1, &[&["max-batch", "--memory-limit", "1MiB", "--batch", "2"], method], &["2 has no 3 equal parts"]);
        }
        fails(2, &[&["max-batch", "--memory-limit", "100"], method], &[&format!("batch={parts}")]);
        fails(
            1,
            &[&["max-batch", "--memory-limit", "1MiB", "--dim", "batch"], method],
            &["--train enlarges the batch"],
        );
    }
}

#[test]
fn a_training_prints_as_a_file_that_trains() {
    let folder = Folder::new("emitted");
    let data = &["--input", "image=12x1x8x8xf32=0.5", "--input", "labels=12xi64=3"];
    let mut losses = Vec::new();
    for (form, name) in [("onnx", "step.onnx"), ("onnxtxt", "step.onnxtxt")] {
        let path = folder.path(name);
        ok(&[&["emit", "--train", DIGITS, form, "-o", &path, "--lr", "0.01"], METHOD]);
        let loss = |iters| {
            let run = ok_json(&[&["run", &path, "--training", "--iters", iters], data, CPU]);
            let outputs = run["outputs"].as_array().expect("outputs");
            let loss = outputs.iter().find(|output| output["name"] == "loss").expect("a loss");
            loss["mean"].as_f64().expect("a number")
        };
        assert!(loss("5") < loss("1"), "{form}");
        losses.push(loss("5"));
    }
    assert_eq!(losses[0], losses[1]);
    let dot = ok(&[&["emit", "--train", DIGITS, "dot", "--program", "evaluate"], METHOD]);
    assert!(dot.contains("ArgMax"), "{dot}");
    fails(1, &[&["emit", "--train", DIGITS, "dot", "--program", "next"], METHOD], &["expected one of step, evaluate"]);
}

/// The index of the largest class is found within one kernel: as many indices as there are outputs are stored nowhere.
#[test]
fn right_answers_are_counted_without_an_index_per_output() {
    let evaluate = ok_json(&[PLAN, METHOD])["programs"][1].clone();
    assert_eq!(evaluate["name"], "evaluate");
    let buffers = evaluate["buffers"].as_array().expect("buffers");
    let rows = buffers.iter().find(|buffer| buffer["name"] == "labels").expect("labels")["shape"][0].as_u64();
    let elements = |buffer: &serde_json::Value| {
        buffer["shape"]
            .as_array()
            .expect("a shape")
            .iter()
            .map(|extent| extent.as_u64().expect("a number"))
            .product::<u64>()
    };
    for buffer in buffers.iter().filter(|buffer| buffer["dtype"] == "i64") {
        assert!(Some(elements(buffer)) <= rows, "{buffer}");
    }
}

#[test]
fn updates_are_timed() {
    for method in METHODS {
        let timed = ok_json(&[&["bench", "--train", DIGITS, "--iters", "1", "--warmup", "1"], CPU, METHOD, method]);
        assert!(timed["steps_per_second"].as_f64() > Some(0.0));
        assert_eq!(timed["planned_bytes"], ok_json(&[PLAN, METHOD, method])["planned_bytes"]);
        assert_eq!((&timed["allocated_bytes"], &timed["allocations_in_runs"]), (&timed["planned_bytes"], &0.into()));
    }
    let evaluate = ok_json(&[&["bench", "--train", DIGITS, "--iters", "1", "--program", "evaluate"], CPU, METHOD]);
    assert!(evaluate["median_ms"].as_f64() > Some(0.0));
}

#[test]
fn eager_and_planned_updates_agree() {
    let args = &["compare", "--train", DIGITS, "--iters", "1", "--optimizer", "sgd", "--momentum", "0.9"];
    let text = ok(&[args, METHOD, CPU]);
    for words in ["step on cpu", "evaluate on cpu", "smallest device that fits", "planned together"] {
        assert!(text.contains(words), "{words} missing in\n{text}");
    }
    assert!(text.contains("reference          equal"), "{text}");
}

/// A search for a batch ends if no batch can be planned, and says why.
#[test]
fn a_batch_that_cannot_be_planned_is_not_sought_for_ever() {
    let folder = Folder::new("hopeless");
    let source =
        "<ir_version: 9, opset_import: [\"\" : 20]> g (float[b, 8] x) => (float[b, 4] y) { y = MatMul (x, w) }";
    let model = folder
        .file("none.onnxtxt", source.replace(" {", " <float[7, 4] w = {W}> {").replace('W', &["0.5"; 28].join(", ")));
    let method = ["--loss", "mse", "--memory-limit", "1GiB"];
    fails(1, &[&["max-batch", "--train", &model], &method], &["none.onnxtxt", "(MatMul)"]);
}

/// A loss that takes logits says so of a model that ends with what the loss computes.
#[test]
fn an_output_that_the_loss_would_squash_again_is_told() {
    let folder = Folder::new("squashed");
    for (operator, loss, warns) in [
        ("Softmax", "cross_entropy", true),
        ("LogSoftmax", "cross_entropy", true),
        ("Sigmoid", "bce_logits", true),
        ("Sigmoid", "mse", false),
    ] {
        let source = format!(
            "<ir_version: 9, opset_import: [\"\" : 20]> g (float[b, 2] x) => (float[b, 3] y)
            <float[2, 3] w = {{1, 2, 3, 4, 5, 6}}> {{ z = MatMul (x, w) y = {operator} (z) }}"
        );
        let model = folder.file("squashed.onnxtxt", source);
        let text = ok(&[&["plan", "--train", &model, "--loss", loss, "--batch", "4"]]);
        let words = format!("warning: the first output is made by node 'y' ({operator}), but the loss takes logits");
        assert_eq!(text.contains(&words), warns, "{loss}: {text}");
    }
}
