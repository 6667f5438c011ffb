//! Plans that were saved and run again: the same results, and a refusal of whatever is no plan of the model or breaks a rule.

use crate::cli::{fails, ok, ok_json};
use crate::common::{self, Folder};
use crate::graphs::{self, GRAPHS};
use plimsoll::internals::kernel::algorithm::Schedule;
use plimsoll::internals::kernel::tuned::Tuned;
use plimsoll::internals::kernel::{Kernel, schedule};
use plimsoll::internals::pass::Prepared;
use plimsoll::internals::plan::Planning;
use plimsoll::internals::session::{Choice, Device, Options, Saved, Session};
use plimsoll::internals::target::PRESETS;
use plimsoll::internals::{plan, tune};
use plimsoll::{Error, Graph, Limits, Plan, Recipe, Target, Tensor};
use serde_json::{Value, json};
use std::path::Path;
use std::sync::Arc;

const CPU: &[&str] = &["--backend", "cpu", "--threads", "2"];
const DIGITS: &str = "graphs/digits.onnx";

/// A counter: it adds its input to a state, and shows two results.
const COUNTER: &str = r#"< ir_version: 8, opset_import: ["" : 17] >
counter (float[n] x, float[n] total) => (float[n] next, float[n] twice)
<float[1] two = {2}>
{
   next = Add (total, x)
   twice = Mul (next, two)
}"#;

/// Weights alone decide what it computes; its axes are an input.
const SHAPED: &str = r#"< ir_version: 8, opset_import: ["" : 18] >
shaped (float[2, 3] x, int64[1] axes) => (float[a, b] y)
{
   y = ReduceSum <keepdims = 1> (x, axes)
}"#;

/// The files of outputs in a folder, with their bytes.
fn outputs(folder: &Folder, below: &str) -> Vec<(String, Vec<u8>)> {
    let read = |name: String| (name.clone(), std::fs::read(folder.0.join(below).join(name)).expect("it is there"));
    folder.names(below).into_iter().map(read).collect()
}

/// A plan is what runs: the outputs are the same bit for bit, whatever shaped the graph.
#[test]
fn a_saved_plan_runs_as_the_model_does() {
    let folder = Folder::new("from-plan");
    let (counter, shaped) = (folder.file("counter.onnxtxt", COUNTER), folder.file("shaped.onnxtxt", SHAPED));
    let (saved, one, other) = (folder.path("plan.json"), folder.path("one"), folder.path("other"));
    // The model, what plans it, and what is given to a run, too.
    let cases: &[(&str, &[&str], &[&str])] = &[
        ("graphs/mlp.onnxtxt", &["--set", "batch=3"], &[]),
        ("graphs/attention.onnxtxt", &["--set", "batch=2", "--set", "sequence=5"], &[]),
        ("graphs/residual.onnxtxt", &["--set", "batch=1", "--set", "height=5", "--set", "width=6"], &["--seed", "7"]),
        (DIGITS, &["--set", "batch=4", "--no-fuse"], &[]),
        (DIGITS, &["--set", "batch=64", "--chunks", "4"], &[]),
        (DIGITS, &["--set", "batch=64", "--chunks", "4", "--memory-limit", "1200KiB"], &[]),
        (DIGITS, &[], &["--input", "image=graphs/digits-images.npy"]),
        (&counter, &["--set", "n=3", "--output", "twice"], &["--input", "total=3xf32=5"]),
        (&counter, &["--set", "n=3", "--state", "total=next"], &["--iters", "4"]),
        (&shaped, &[], &["--input", "axes=1xi64=1"]),
    ];
    for &(model, shaping, given) in cases {
        let inputs = if given.first() == Some(&"--input") { given } else { &[] };
        ok(&[&["plan", model, "-o", &saved], shaping, inputs]);
        ok(&[&["run", model, "--output-dir", &one], CPU, shaping, given]);
        let ran = ok_json(&[&["run", &saved, "--model", model, "--output-dir", &other, "--backend", "cpu"], given]);
        assert_eq!(outputs(&folder, "one"), outputs(&folder, "other"), "{model} {shaping:?}");
        assert_eq!((&ran["file"], &ran["plan"]), (&json!(model), &json!(saved)));
        let bytes = |found: &Value| found["planned_bytes"].clone();
        let plan: Value = serde_json::from_slice(&std::fs::read(&saved).expect("it is there")).expect("it is JSON");
        assert_eq!(
            (bytes(&ran["memory"]), &ran["memory"]["allocated_bytes"]),
            (bytes(&plan["programs"][0]["summary"]), &bytes(&plan["programs"][0]["summary"]))
        );
        [&one, &other].iter().for_each(|made| std::fs::remove_dir_all(made).expect("it is there"));
    }
    let text = ok(&[&["bench", &saved, "--model", &shaped, "--iters", "2", "--input", "axes=1xi64=1"]]);
    assert!(text.starts_with(&format!("{shaped} by {saved} on cpu, 2 threads")), "{text}");
}

/// On every target, the data of a plan is found again, whatever algorithms it has: in its order, and the same tensors.
#[test]
fn the_data_of_a_plan_is_found_again() {
    const FREE: Limits = Limits { memory: None };
    type Choose = fn(&Kernel, &Target) -> Option<Schedule>;
    let none: Choose = |_, _| None;
    let last: Choose = |kernel, target| {
        let mut plain = kernel.clone();
        plain.reads.iter_mut().for_each(|read| read.packed = false);
        schedule::candidates(&plain, target, &|_| true).pop()
    };
    let call: Choose = |kernel, target| Some(Schedule::Library(schedule::split(kernel, target)?.library().clone()));
    let unet: &[(&str, usize)] = &[("batch", 1), ("height", 16), ("width", 16)];
    for &(file, dims) in GRAPHS.iter().chain([&("unet.onnxtxt", unet)]) {
        for target in PRESETS.iter().map(|preset| (preset.target)()) {
            let graph = Recipe::default().graph(graphs::import(file, dims), &target, &FREE).expect("the passes run");
            for choose in [none, last, call] {
                let mut tuned = Tuned::new("a device");
                for (kernel, _) in tune::kernels(std::slice::from_ref(&graph), &target).expect("it is lowered") {
                    choose(&kernel, &target).into_iter().for_each(|schedule| tuned.insert(&kernel, schedule));
                }
                let measured = Prepared { tuned: Some(Arc::new(tuned)), ..graph.clone() };
                let (plan, constants) = plan::compile(&measured, &target, &FREE).expect("it is planned");
                let found = plan::data(graph.clone(), plan.first())
                    .unwrap_or_else(|e| panic!("{file} for {}: {e}", target.name));
                let same = found.iter().zip(&constants[0]).all(|(a, b)| a.name == b.name && a.same(b));
                assert!(same && found.len() == constants[0].len(), "{file} for {}", target.name);
            }
        }
    }
}

/// On every backend, a plan for its device is loaded with the model's weights, and so is one for a named target of its family.
#[test]
fn plans_are_loaded_on_every_backend() {
    let folder = Folder::new("from-plan-devices");
    let options = Options { threads: 2, ..Options::default() }.set("batch", 3);
    let graph = || Graph::from_path(DIGITS, &[("batch", 3)]).expect("it is a graph");
    let image = Tensor::from_f64(plimsoll::DType::F32, [3, 1, 8, 8], &[0.25; 192]);
    for (name, open) in common::backends() {
        let target = open().target().clone();
        let found = plimsoll::Target::named(name).into_iter().chain([target]).map(|target| {
            let plan = Recipe::default().plan(graph(), &target, &Limits { memory: None }).expect("it is planned");
            let plan = Plan { origin: Some(options.origin(DIGITS).expect("it is read")), ..plan };
            let file = folder.file("plan.json", plan.to_json());
            let saved = Saved::read(file.as_ref(), &[DIGITS]).expect("it is sound");
            let own = saved.options(&options).expect("nothing differs").swap_remove(0);
            let session =
                saved.load(vec![graph().into()], Device::new(open(), name), &own, &|_, _| {}).expect("it loads");
            assert_eq!((session.plan(), session.usage().bytes), (&plan, plan.bytes()), "{name}");
            session.run(&[("image", image.clone())]).expect("it runs").swap_remove(0).1
        });
        let plain = common::load(graph(), open(), name, &options).expect("it loads");
        let expected = plain.run(&[("image", image.clone())]).expect("it runs").swap_remove(0).1;
        for found in found {
            common::agrees(&found, &expected, 1e-5).unwrap_or_else(|e| panic!("{name}: {e}"));
        }
    }
}

/// The schedules of a tuned plan come with it.
#[test]
fn a_tuned_plan_runs_without_its_measurements() {
    let folder = Folder::new("from-plan-tuned");
    let (tuned, model, one, other) =
        (folder.path("tuned.json"), [DIGITS, "--set", "batch=2"], folder.path("one"), folder.path("other"));
    let cached = |args: &[&[&str]]| {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_plimsoll"));
        let command = command.args(args.concat()).env("PLIMSOLL_CACHE_DIR", folder.path("cache"));
        let output = command.output().expect("it starts");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    };
    cached(&[&["tune"], &model, CPU, &["-o", &tuned]]);
    cached(&[&["run"], &model, CPU, &["--output-dir", &one]]);
    ok(&[&["run", &tuned, "--model", DIGITS, "--output-dir", &other]]);
    assert_eq!(outputs(&folder, "one"), outputs(&folder, "other"));
}

/// Weights of another file are given again. What the plan has as code is none of theirs.
#[test]
fn weights_may_come_from_another_file() {
    let folder = Folder::new("from-plan-weights");
    let (model, saved) = (folder.file("counter.onnxtxt", COUNTER), folder.path("plan.json"));
    let header = r#"{"two":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}"#;
    let bytes = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &3f32.to_le_bytes()].concat();
    let weights = folder.file("weights.safetensors", bytes);
    let given = ["--weights", &weights, "--input", "x=3xf32=1", "--input", "total=3xf32=1"];
    ok(&[&["plan", &model, "--weights", &weights, "--set", "n=3", "-o", &saved]]);
    let ran = ok_json(&[&["run", &saved, "--model", &model], &given]);
    assert_eq!((&ran["outputs"][1]["name"], &ran["outputs"][1]["max"]), (&json!("twice"), &json!(6.0)));
    let words = ["plan.json", "the graph has no such step"];
    fails(1, &[&["run", &saved, "--model", &model], &given[2..]], &words);
    ok(&[&["plan", &model, "--set", "n=3", "-o", &saved]]);
    fails(1, &[&["run", &saved, "--model", &model], &given], &words);
}

/// Each refusal names the file, and what was expected.
#[test]
fn what_is_no_plan_of_the_model_is_refused() {
    let folder = Folder::new("from-plan-refused");
    let saved = folder.path("plan.json");
    ok(&[&["plan", DIGITS, "--set", "batch=3", "-o", &saved]]);
    let run = |plan: &str, model: &str, flags: &[&str], words: &[&str]| {
        fails(1, &[&["run", plan, "--model", model], flags], words);
    };
    run(&saved, "graphs/mlp.onnxtxt", &[], &["plan.json", "made of a model with the content", "graphs/mlp.onnxtxt is"]);
    run(&saved, "graphs/none.onnx", &[], &["graphs/none.onnx", "read it"]);
    run(&saved, "graphs", &[], &["graphs", "expected a file, found a folder"]);
    run(&saved, DIGITS, &["--set", "batch=4"], &["plan.json", "dim 'batch' is 4: the plan has 3"]);
    run(&saved, DIGITS, &["--set", "rows=4"], &["dim 'rows' is 4: the plan binds no such dim"]);
    ok(&[&["run", &saved, "--model", DIGITS, "--set", "batch=3"]]);
    for (flags, option) in [
        (&["--no-fuse"][..], "option no_fuse"),
        (&["--chunks", "2"][..], "option chunks"),
        (&["--f16"][..], "option f16"),
        (&["--prefer", "memory"][..], "option prefer"),
        (&["--output", "other"][..], "option output:"),
        (&["--state", "a=b"][..], "option state"),
        (&["--training"][..], "option training"),
        (&["--threads", "1"][..], "option threads"),
    ] {
        run(&saved, DIGITS, flags, &["plan.json", option, "the plan was made with another", "plan the model again"]);
    }
    run(&saved, DIGITS, &["--input", "image=4x1x8x8xf32=0"], &["'image'", "f32[3,1,8,8]", "f32[4,1,8,8]"]);
    run(&saved, DIGITS, &["--backend", "wgpu"], &["plan.json", "the plan is for cpu, not for wgpu"]);
    fails(2, &[&["run", &saved, "--model", DIGITS, "--memory-limit", "10KiB"]], &["plan.json", "10,240"]);
    fails(1, &[&["run", &saved]], &["plan.json", "--model"]);
    fails(1, &[&["bench", &saved, "--model", DIGITS, "--at", "batch=2"]], &["batch=2", "no range"]);
    fails(1, &[&["run", &saved, "graphs/mlp.onnxtxt", "--model", DIGITS]], &["--model", "one plan"]);

    // Plans that have no one binding, or no origin.
    let other = folder.path("other.json");
    ok(&[&["plan", DIGITS, "--set", "batch=1..4", "-o", &other]]);
    run(&other, DIGITS, &[], &["other.json", "batch=1..4", "one extent"]);
    ok(&[&["plan", DIGITS, "graphs/mlp.onnxtxt", "--set", "batch=3", "-o", &other]]);
    run(&other, DIGITS, &[], &["other.json", "program 'mlp' was made of a model with the content", "digits.onnx is"]);
    let plan: Value = serde_json::from_slice(&std::fs::read(&saved).expect("it is there")).expect("it is JSON");
    let edited = |edit: &dyn Fn(&mut Value)| {
        let mut plan = plan.clone();
        edit(&mut plan);
        folder.file("edited.json", plan.to_string())
    };
    let without = edited(&|plan| _ = plan.as_object_mut().expect("a record").remove("origin"));
    run(&without, DIGITS, &[], &["edited.json", "does not say of which model"]);
    // It breaks a rule.
    let unsound = edited(&|plan| plan["programs"][0]["buffers"][0]["offset"] = json!(4));
    run(&unsound, DIGITS, &[], &["edited.json", "plan: "]);
    // It breaks none, and computes something else: another binding, another recipe, another kernel, another wiring, other names.
    let origin =
        edited(&|plan| plan["origin"]["models"][0]["dims"][0] = json!({"name": "batch", "least": 2, "most": 2}));
    run(&origin, DIGITS, &[], &["edited.json", "it is no plan of", "expected buffer 'image'"]);
    for (least, most, words) in [(3, 2, "3..2 is empty"), (2, 3, "one extent")] {
        let dims = edited(&|plan| {
            plan["origin"]["models"][0]["dims"][0] = json!({"name": "batch", "least": least, "most": most})
        });
        run(&dims, DIGITS, &[], &[words]);
        let refused = Session::from_plan(&dims, &[DIGITS], &Options::default()).expect_err("it has no binding");
        assert!(refused.to_string().contains("edited.json") && refused.to_string().contains(words), "{refused}");
    }
    let recipe = edited(&|plan| plan["origin"]["recipe"]["fuse"] = json!(false));
    run(&recipe, DIGITS, &[], &["edited.json", "it is no plan of"]);
    let named = edited(&|plan| plan["programs"][0]["outputs"][0]["name"] = json!("other"));
    run(&named, DIGITS, &[], &["edited.json", "expected outputs logits, found other"]);
    let step = edited(&|plan| plan["programs"][0]["steps"][0]["name"] = json!("other"));
    run(&step, DIGITS, &[], &["edited.json", "step 0 'other': the graph has no such step"]);
}

/// A plan whose code was changed is sound, but is not the model's.
#[test]
fn other_code_is_another_plan() {
    let folder = Folder::new("from-plan-code");
    let model = folder.file("counter.onnxtxt", COUNTER);
    let options = Options { threads: 2, ..Options::default() }.on(Choice::Cpu).set("n", 3);
    let session = Session::from_path(&model, &options).expect("it loads");
    let plan = Plan { origin: Some(options.origin(&model).expect("it is read")), ..session.plan().clone() };
    let file = folder.file("plan.json", plan.to_json());
    let again = Session::from_plan(&file, &[&model], &Options::default()).expect("it loads");
    assert_eq!(again.plan(), &plan);
    // Two is a literal of the code.
    let text = plan.to_json();
    let literals: Vec<_> = text.match_indices("2.0").collect();
    assert_eq!(literals.len(), 1, "the code has one literal");
    let file = folder.file("edited.json", text.replace("2.0", "3.0"));
    ok(&[&["check", &file]]);
    let refused = Session::from_plan(&file, &[&model], &Options::default()).expect_err("it is another plan");
    assert!(matches!(&refused, Error::Plan { file: Some(named), .. } if named == Path::new(&file)), "{refused}");
    assert!(refused.to_string().contains("the graph has no such step"), "{refused}");
    // A graph with the same file and other weights is another model.
    let other = folder.file("other.onnxtxt", COUNTER.replace("{2}", "{4}"));
    let refused = Session::from_plan(folder.path("plan.json"), &[&other], &Options::default()).unwrap_err().to_string();
    assert!(refused.contains("made of a model with the content") && refused.contains("other.onnxtxt"), "{refused}");
}
