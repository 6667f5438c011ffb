//! Flags that go together: what works for one model works for several, for ranges, for trainings and for runs at once.

use crate::cli::{fails, ok, ok_json};
use crate::common::Folder;
use plimsoll::Options;
use serde_json::Value;
use std::collections::BTreeSet;

const MODEL: &[&str] = &["graphs/digits.onnx", "--set", "batch=4", "--threads", "2"];
const RANGE: &[&str] = &["graphs/digits.onnx", "--set", "batch=1..4", "--threads", "2"];
const SEVERAL: &[&str] =
    &["a=graphs/digits.onnx", "b=graphs/digits.onnx", "--set", "a:batch=2", "--set", "b:batch=4", "--threads", "2"];
const TRAIN: &[&str] = &["--train", "graphs/digits.onnx", "--loss", "cross_entropy", "--batch", "12", "--threads", "2"];
const BENCH: &[&str] = &["bench", "--backend", "cpu", "--warmup", "1", "--iters", "2"];
const FOR: &[&str] = &["bench", "--backend", "cpu", "--warmup", "1", "--duration", "5ms"];

#[test]
fn plan_takes_all_flags_for_all_kinds() {
    let folder = Folder::new("pairs");
    let svg = folder.path("plan.svg");
    for kind in [MODEL, RANGE, SEVERAL] {
        ok(&[&["plan"], kind, &["--svg", &svg, "--placement"]]);
        let drawn = std::fs::read_to_string(&svg).expect("it is drawn");
        assert_eq!(drawn.matches("<svg").count(), 1);
        let advice = &ok_json(&[&["plan"], kind, &["--advise"]])["advice"];
        assert!(!advice["remedies"].as_array().expect("remedies").is_empty(), "{kind:?}");
        fails(2, &[&["plan"], kind, &["--memory-limit", "1KiB"]], &["1,024 bytes"]);
        fails(2, &[&["plan"], kind, &["--assert-bytes", "1KiB"]], &["--assert-bytes"]);
    }
    ok(&[&["plan"], TRAIN, &["--svg", &svg]]);
    for kind in [MODEL, SEVERAL, TRAIN] {
        let [one, two] =
            ["1", "2"].map(|runs| ok_json(&[&["plan"], kind, &["--forks", runs]])["planned_bytes"].as_u64());
        assert!(one < two && two < one.map(|bytes| 2 * bytes), "{kind:?}: {one:?}, {two:?}");
    }
    ok(&[&["plan"], MODEL, &["--forks", "3", "--advise"]]);
    ok(&[&["plan"], SEVERAL, &["--forks", "3", "--advise"]]);
    // An input sets the dims of the programs that have it.
    let given = ok_json(&[&["plan", "a=graphs/digits.onnx", "b=graphs/digits.onnx", "--input", "image=3x1x8x8xf32=0"]]);
    for program in given["programs"].as_array().expect("programs") {
        assert_eq!(program["inputs"][0]["shape"][0], 3, "{given}");
    }
    // Measured schedules are for all programs.
    let tuned = folder.path("cache");
    std::fs::create_dir_all(&tuned).expect("it is made");
    fails(1, &[&["plan"], RANGE, &["--forks", "2"]], &["one run at once", "constants"]);
}

#[test]
fn bench_takes_all_flags_for_all_kinds() {
    let folder = Folder::new("pairs-bench");
    let page = folder.path("page.html");
    let at: &[&str] = &["--at", "batch=1,3"];
    let range = [RANGE, at].concat();
    let forks = [MODEL, &["--forks", "2"]].concat();
    let training = [TRAIN, &["--forks", "2"]].concat();
    for kind in [&range[..], &forks, MODEL, SEVERAL, TRAIN, &training] {
        let timed = ok_json(&[BENCH, kind, &["--steps", "--html", &page]]);
        let steps = if kind == range { &timed["bindings"][0]["steps"] } else { &timed["steps"] };
        assert!(!steps.as_array().expect("steps").is_empty(), "{kind:?}: {timed}");
        assert!(std::fs::read_to_string(&page).expect("it is drawn").contains("</html>"));
        std::fs::remove_file(&page).expect("it was there");
        ok(&[FOR, kind]);
    }
    ok_json(&[BENCH, &range, &["--input", "image=3x1x8x8xf32=0.5"]]);
    fails(1, &[BENCH, &range, &["--input", "image=2x1x8x8xf32=0.5"]], &["image", "no extent of --at"]);
    ok_json(&[BENCH, TRAIN, &["--program", "evaluate"]]);
    let [several, at] = [
        &["a=graphs/digits.onnx", "b=graphs/digits.onnx", "--set", "a:batch=1..4", "--set", "b:batch=2"][..],
        &["--at", "a:batch=1,4"],
    ];
    ok_json(&[BENCH, several, at]);
    fails(1, &[BENCH, several, at, &["--program", "nope"]], &["nope"]);
    fails(1, &[&["plan"], TRAIN, &["--input", "image=7x9xi64=1"]], &["image", "expected", "[7,9]"]);
    fails(1, &[BENCH, TRAIN, &["--at", "batch=4", "--forks", "2"]], &["--at", "one run at a time"]);
    fails(1, &[BENCH, TRAIN, &["--at", "rows=4"]], &["rows"]);
    fails(1, &[BENCH, TRAIN, &["--model", "graphs/digits.onnx"]], &["--model", "does not say how it trains"]);
}

#[test]
fn compare_takes_all_kinds() {
    let folder = Folder::new("pairs-compare");
    let page = folder.path("page.html");
    let on: &[&str] = &["--backend", "cpu", "--iters", "1", "--html", &page];
    for (kind, programs) in [(MODEL, 1), (RANGE, 1), (SEVERAL, 2)] {
        let compared = ok_json(&[&["compare"], kind, on]);
        let all = compared["programs"].as_array().cloned().unwrap_or_else(|| vec![compared.clone()]);
        assert_eq!(all.len(), programs, "{compared}");
        let drawn = std::fs::read_to_string(&page).expect("it is drawn");
        assert_eq!(drawn.contains("b: planned"), programs > 1);
        ok(&[&["compare"], kind, &["--across", "cpu,reference"]]);
    }
    let both = ok_json(&[&["compare"], SEVERAL, &["--across", "cpu,reference"]]);
    assert_eq!(both["programs"].as_array().map(Vec::len), Some(2), "{both}");
}

/// One table of measured schedules serves the kernels of all programs, and those of a range.
#[test]
fn tune_takes_several_programs_and_ranges() {
    let folder = Folder::new("pairs-tune");
    let cache = folder.path("cache");
    let ran = |args: &[&[&str]]| -> Value {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_plimsoll"));
        let output = command.args(args.concat()).arg("--json").env("PLIMSOLL_CACHE_DIR", &cache).output();
        let output = output.expect("it starts");
        assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).expect("it is JSON")
    };
    let cpu: &[&str] = &["--backend", "cpu", "--again"];
    let shapes = |told: &Value| -> BTreeSet<String> {
        let measured = told["measured"].as_array().expect("measured").iter();
        measured.map(|kernel| format!("{} {}", kernel["template"], kernel["shape"])).collect()
    };
    let [two, four] = ["batch=2", "batch=4"]
        .map(|set| shapes(&ran(&[&["tune", "graphs/digits.onnx", "--set", set, "--threads", "2"], cpu])));
    let ranged = ran(&[&["tune"], RANGE, cpu]);
    assert_eq!(shapes(&ranged), four, "{ranged}");
    std::fs::remove_dir_all(&cache).expect("it is there");
    let told = ran(&[&["tune"], SEVERAL, cpu]);
    assert_eq!(shapes(&told), two.union(&four).cloned().collect(), "{told}");
    assert!(told["tuned_bytes"].as_u64() <= told["untuned_bytes"].as_u64(), "{told}");
    // The same programs take what was measured for each, whatever bytes it takes.
    let kept = told["kept_in"].as_str().expect("it is kept");
    let planned = ran(&[&["plan"], SEVERAL, &["--tuned", kept, "--prefer", "speed"]]);
    for program in planned["programs"].as_array().expect("programs") {
        assert!(program["measured"].as_u64() > Some(0), "{}", program["name"]);
    }
    let [tuned, plain] = [&[][..], &["--no-tuned"]].map(|more| {
        let mut ran = ran(&[&["run"], SEVERAL, &["--backend", "cpu", "--program", "b", "--seed", "3"], more]);
        ran["outputs"][0]["mean"].take().as_f64().expect("a number")
    });
    assert!((tuned - plain).abs() < 1e-4, "{tuned}, {plain}");
}

/// The kernels of several programs are those of each; of a range, those of its largest extents; of a training, those that `plan` has.
#[test]
fn emit_takes_several_programs_and_ranges() {
    let body = |text: &str| -> Vec<String> {
        let own = text.lines().filter(|line| !line.starts_with("// program") && !line.starts_with("// the kernels"));
        own.filter(|line| !line.is_empty()).map(str::to_owned).collect()
    };
    let of = |batch: &str, form: &str| ok(&[&["emit", "graphs/digits.onnx", form, "--set", batch]]);
    let several = |form: &str, more: &[&str]| {
        let named = ["emit", "a=graphs/digits.onnx", "b=graphs/digits.onnx", form];
        ok(&[&named, &["--set", "a:batch=2", "--set", "b:batch=4"], more])
    };
    for form in ["wgsl", "dot"] {
        let [two, four] = ["batch=2", "batch=4"].map(|batch| of(batch, form));
        assert_eq!(body(&several(form, &[])), [body(&two), body(&four)].concat());
        assert_eq!(body(&several(form, &["--program", "b"])), body(&four));
        assert_eq!(body(&of("batch=1..4", form)), body(&four));
    }
    let text = several("cuda", &[]);
    assert_eq!(text.matches("// program ").count(), 2);
    assert!(of("batch=1..4", "wgsl").contains("the largest extents of batch=1..4"));
    let both = ["graphs/digits.onnx", "graphs/mlp.onnxtxt"];
    fails(1, &[&["emit"], &both, &["onnxtxt"]], &["onnxtxt: a file has one graph", "graphs/mlp.onnxtxt"]);
    fails(1, &[&["emit"], &both, &["dot", "--set", "batch=1", "--program", "c"]], &["expected one of digits, mlp"]);
    fails(
        1,
        &[&["emit", "--train"], &both, &["dot", "--loss", "mse", "--batch", "1"]],
        &["--train: expected one model"],
    );
}

/// A saved plan of several programs runs as they do, bit for bit, from the file of each or from the one of all.
#[test]
fn saved_plans_of_several_programs_run() {
    let folder = Folder::new("pairs-saved");
    let (saved, one, other) = (folder.path("plan.json"), folder.path("one"), folder.path("other"));
    let digits: &[&str] = &["--model", "graphs/digits.onnx"];
    let mlp: &[&str] = &["--model", "graphs/mlp.onnxtxt"];
    let mixed = ["graphs/digits.onnx", "mlp=graphs/mlp.onnxtxt", "--set", "batch=3", "--threads", "2"];
    let given =
        ["a=graphs/digits.onnx", "b=graphs/digits.onnx", "--threads", "2", "--input", "a:image=2x1x8x8xf32=0.5"];
    let given = [&given[..], &["--set", "b:batch=3"]].concat();
    let sums = folder.file("sums.onnxtxt", SUMS);
    let (first, next) = (format!("first={sums}"), format!("next={sums}"));
    let state = [&first, &next, "--set", "n=4", "--threads", "2", "--state", "past=present"];
    let sums = ["--model", &sums];
    let cases: [(&[&str], Vec<&str>, &[&str], &[&str]); 4] = [
        (SEVERAL, digits.to_vec(), &["a", "b"], &[]),
        (&mixed, [digits, mlp].concat(), &["digits", "mlp"], &[]),
        (&given, digits.to_vec(), &["a", "b"], &["--input", "a:image=2x1x8x8xf32=0.5"]),
        (&state, sums.to_vec(), &["first", "next"], &["--input", "x=4xf32=2"]),
    ];
    for (kind, models, programs, more) in &cases {
        ok(&[&["plan"], kind, &["-o", &saved]]);
        for program in *programs {
            let flags: &[&str] = &["--backend", "cpu", "--seed", "5", "--program", programs[0], "--program", program];
            // What shaped the programs is the plan's.
            let ours = if kind.contains(&"--input") { kind.to_vec() } else { [*kind, more].concat() };
            ok(&[&["run"], &ours, flags, &["--no-tuned", "--output-dir", &one]]);
            let ran = ok_json(&[&["run", &saved], models, flags, more, &["--output-dir", &other]]);
            assert_eq!(ran["plan"], saved[..], "{ran}");
            for name in folder.names("one") {
                let [a, b] =
                    ["one", "other"].map(|of| std::fs::read(folder.0.join(of).join(&name)).expect("it is there"));
                assert!(a == b, "{programs:?} {program} {name}");
            }
            assert_eq!(folder.names("one"), folder.names("other"));
            [&one, &other].iter().for_each(|made| std::fs::remove_dir_all(made).expect("it is there"));
        }
    }
    ok(&[&["plan"], &mixed, &["-o", &saved]]);
    let timed = ok_json(&[&["bench", &saved], digits, mlp, &["--iters", "2", "--program", "mlp"]]);
    assert!(timed["median_ms"].as_f64() > Some(0.0), "{timed}");
    ok(&[&["run", &saved], digits, mlp, &["--set", "batch=3"]]);
    ok(&[&["run", &saved], digits, mlp, &["--set", "mlp:batch=3"]]);
    fails(1, &[&["run", &saved], digits, mlp, &["--set", "batch=4"]], &["dim 'batch' is 4: the plan has 3"]);
    fails(1, &[&["run", &saved], mlp, digits], &["program 'digits' was made of a model", "mlp.onnxtxt is"]);
    fails(1, &[&["run", &saved], digits, mlp, mlp], &["in the order digits, mlp", "found 3"]);
    fails(1, &[&["run", &saved], digits, mlp, &["--input", "none=1xf32=1"]], &["none", "no such input"]);
    let session =
        plimsoll::Session::from_plan(&saved, &["graphs/digits.onnx", "graphs/mlp.onnxtxt"], &Options::default());
    let session = session.expect("it loads");
    assert_eq!(
        session.programs().map(|program| &program.plan().program.name[..]).collect::<Vec<_>>(),
        ["digits", "mlp"]
    );
}

/// What a saved plan was made of has dims that follow from others, and bounds of loops.
#[test]
fn saved_plans_keep_ties_and_bounds_of_loops() {
    let folder = Folder::new("pairs-ties");
    let saved = folder.path("plan.json");
    let tied = folder.file(
        "tied.onnxtxt",
        "<ir_version: 9, opset_import: [\"\" : 18]> g (float[past, 4] a, float[new, 4] b, float[total, 4] c) => (y) {
            k = Concat <axis = 0> (a, b) y = Add (k, c)
        }",
    );
    let looped = folder.file(
        "looped.onnxtxt",
        "<ir_version: 9, opset_import: [\"\" : 18]> g (float[2] x, int64 m) => (y) <bool yes = {1}> {
            y = Loop (m, yes, x) < body = b (int64 i, bool c, float[2] a) => (bool d, float[2] e) { d = Identity (c) e = Add (a, a) } >
        }",
    );
    let ties: &[&str] = &["--set", "past=2", "--set", "new=1", "--set", "total=past+new", "--threads", "2"];
    let trips: &[&str] = &["--set", "y.trips=3", "--threads", "2"];
    for (model, flags) in [(&tied, ties), (&looped, trips)] {
        ok(&[&["plan", model], flags, &["-o", &saved]]);
        ok(&[&["run", &saved, "--model", model]]);
        let both = [&format!("one={model}")[..], &format!("two={model}")];
        ok(&[&["plan"], &both, flags, &["-o", &saved]]);
        ok(&[&["run", &saved, "--model", model]]);
        ok(&[&["run"], &both, flags]);
    }
    let digits: &[&str] = &["--model", "graphs/digits.onnx"];
    let other = &["a=graphs/digits.onnx", "b=graphs/digits.onnx", "--set", "a:batch=2", "--set", "b:batch=3"];
    ok(&[&["plan"], other, &["--threads", "2", "-o", &saved]]);
    fails(1, &[&["run", &saved], digits, &["--set", "batch=3"]], &["dim 'batch' is 3: the plan has 2"]);
}

/// A sum that goes on from run to run.
const SUMS: &str = r#"<ir_version: 8, opset_import: ["" : 17]>
sums (float[n] x, float[n] past) => (float[n] present, float[n] twice) {
    present = Add (past, x)
    twice = Add (present, present)
}"#;

/// Trainings of several batches are planned together: each has the steps of its own, and they share the weights.
#[test]
fn bench_times_trainings_of_several_batches() {
    let page = Folder::new("pairs-batches");
    let page = page.path("page.html");
    let bytes = |told: &Value| told["planned_bytes"].as_u64().expect("a number");
    let steps = |told: &Value| -> Vec<String> {
        let steps = told["steps"].as_array().expect("steps").iter();
        steps.map(|step| format!("{} {} {}", step["step"], step["node"], step["bytes"])).collect()
    };
    for more in [&[][..], &["--accumulate", "2"], &["--program", "evaluate"]] {
        let at = ok_json(&[BENCH, TRAIN, more, &["--at", "batch=4,12,4", "--steps", "--html", &page]]);
        let turns = at["bindings"].as_array().expect("bindings");
        let of = |batch: &'static str| ok_json(&[BENCH, TRAIN, more, &["--steps", "--at", batch]]);
        let [four, twelve] = [of("batch=4"), of("batch=12")];
        for (turn, (batch, alone)) in turns.iter().zip([(4, &four), (12, &twelve), (4, &four)]) {
            assert_eq!(turn["binding"]["batch"], batch, "{at}");
            assert_eq!(steps(turn), steps(&alone["bindings"][0]), "{more:?}, batch {batch}");
        }
        let plain = ok_json(&[BENCH, TRAIN, more, &["--steps"]]);
        assert_eq!((steps(&plain), bytes(&plain)), (steps(&twelve["bindings"][0]), bytes(&twelve)));
        assert!(bytes(&twelve) <= bytes(&at) && bytes(&at) < bytes(&four) + bytes(&twelve), "{more:?}: {at}");
        let drawn = std::fs::read_to_string(&page).expect("it is drawn");
        assert!(drawn.contains("batch=4 ") && drawn.contains("batch=12 "));
    }
}

/// Each remedy for a training is a flag, and the plan with this flag has the bytes that were said.
#[test]
fn plan_advises_trainings() {
    let bytes = |told: &Value| told["planned_bytes"].as_u64().expect("a number");
    for forks in [&[][..], &["--forks", "2"]] {
        let plan = ["plan", "--train", "graphs/digits.onnx", "--loss", "cross_entropy", "--target", "wgpu"];
        let (plan, batch) = ([&plan, forks].concat(), ["--batch", "12"]);
        let told = ok_json(&[&plan, &batch, &["--advise"]]);
        let remedies = told["advice"]["remedies"].as_array().expect("remedies");
        let names: Vec<_> = remedies.iter().map(|remedy| remedy["name"].as_str().expect("a name")).collect();
        let states = ["smaller optimizer", "smaller optimizer", "the last layer alone"];
        assert_eq!(names, [&["recomputation"], &states[..], &["accumulation", "smaller batch", "halves"]].concat());
        for remedy in remedies {
            let change = remedy["change"].as_str().expect("a change");
            let flags: Vec<&str> =
                change.split(':').next().expect("a flag").split(' ').map(|word| word.trim_matches('\'')).collect();
            let batch = if flags[0] == "--batch" { &[][..] } else { &batch };
            let with = ok_json(&[&plan, batch, &flags]);
            assert_eq!(bytes(&with), bytes(remedy), "{change}");
        }
        assert!(told["advice"]["peak"]["live"].as_array().is_some_and(|live| !live.is_empty()));
    }
    let limit = ["--memory-limit", "16MiB", "--advise"];
    let text = ok(&[&["plan"], TRAIN, &limit]);
    assert!(text.contains("fits:") && text.contains("--accumulate 2"), "{text}");
}

/// The programs of a decoder are those of any command; where one graph is wanted, its own is named.
#[test]
fn folders_of_decoders_are_taken() {
    let (folder, graph) = ("graphs/decoder", "graphs/decoder/model.onnxtxt");
    assert_eq!(ok(&[&["inspect", folder]]), ok(&[&["inspect", graph]]));
    let planned = ok_json(&[&["plan", folder, "--threads", "2"]]);
    let steps = |program: usize| planned["programs"][program]["steps"].as_array().map(Vec::len);
    for (number, name) in ["decode", "prefill"].into_iter().enumerate() {
        let flags = ["--program", name, "--steps", "--context", "60", "--set", "prefill=4", "--threads", "2"];
        let timed = ok_json(&[BENCH, &[folder], &flags]);
        assert_eq!(timed["steps"].as_array().map(Vec::len), steps(number), "{name}");
        let text = ok(&[&["emit", folder, "dot", "--program", name]]);
        assert_eq!(text.matches("digraph").count(), 1, "{name}");
    }
    let compared = ok_json(&[&["compare", folder, "--backend", "cpu", "--iters", "1"]]);
    let names: Vec<_> = compared["programs"].as_array().expect("programs").iter().map(|p| p["model"].clone()).collect();
    assert_eq!(names, ["decode", "prefill"]);
    ok(&[&["compare", folder, "--across", "cpu,reference"]]);
    fails(1, &[&["emit", folder, "onnxtxt"]], &["onnxtxt: a file has one graph", folder]);
    fails(1, &[BENCH, &["--train", folder, "--loss", "mse", "--batch", "1"]], &["one graph", graph]);
}
