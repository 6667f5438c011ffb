//! The command line from outside: its output, its exit codes, and the files that it writes.

use crate::common::{self, Folder};
use plimsoll::internals::onnx;
use plimsoll::internals::onnx::proto::{DataLocation, StringStringEntryProto};
use plimsoll::internals::plan::{self, Limits};
use plimsoll::internals::report;
use plimsoll::internals::target::Target;
use plimsoll::internals::trace::Trace;
use plimsoll::internals::{npy, ops};
use plimsoll::{DType, Recipe, Tensor};
use prost::Message;
use serde_json::{Value, json};
use std::panic::catch_unwind;
use std::path::Path;
use std::process::Command;

const MLP: &[&str] = &["graphs/mlp.onnxtxt", "--set", "batch=3"];
const GRAPHS: &[&[&str]] = &[
    &["graphs/attention.onnxtxt", "--set", "batch=2", "--set", "sequence=5"],
    &["graphs/digits.onnx", "--set", "batch=2"],
    MLP,
    &["graphs/residual.onnxtxt", "--set", "batch=1", "--set", "height=5", "--set", "width=6"],
];
const DIGITS: &[&str] = &["graphs/digits.onnx", "--input", "image=graphs/digits-images.npy"];
const CPU: &[&str] = &["--backend", "cpu", "--threads", "2"];

struct Ran {
    code: Option<i32>,
    out: String,
    err: String,
}

fn program(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_plimsoll"));
    command.args(args).current_dir(env!("CARGO_MANIFEST_DIR")).env_remove("RUST_LOG").env("RUST_BACKTRACE", "1");
    command
}

/// Runs the program to its end. No arguments may cause a panic or a backtrace.
fn finish(mut command: Command) -> Ran {
    let output = command.output().expect("the program starts");
    let text = |bytes| String::from_utf8(bytes).expect("the output is text");
    let ran = Ran { code: output.status.code(), out: text(output.stdout), err: text(output.stderr) };
    for word in ["panicked", "RUST_BACKTRACE", "stack backtrace"] {
        assert!(!ran.err.contains(word), "{command:?}: {}", ran.err);
    }
    ran
}

/// The result of a command that succeeds.
pub fn ok(args: &[&[&str]]) -> String {
    let ran = finish(program(&args.concat()));
    assert_eq!(ran.code, Some(0), "{args:?}: {}", ran.err);
    ran.out
}

pub fn ok_json(args: &[&[&str]]) -> Value {
    let [short, long] = [&["--json"][..], &["--format", "json"]].map(|flag| ok(&[args, &[flag]].concat()));
    for text in [&short, &long] {
        assert!(text.ends_with('\n') && serde_json::from_str::<Value>(text).is_ok(), "{args:?}: {text}");
    }
    common::printed(&args.concat(), &short)
}

/// A command that must fail with this exit code, an error that contains all words, and nothing on stdout.
#[track_caller]
pub fn fails(code: i32, args: &[&[&str]], words: &[&str]) {
    let ran = finish(program(&args.concat()));
    assert_eq!((ran.code, ran.out.as_str()), (Some(code), ""), "{args:?}: {}", ran.err);
    let error = ran.err.split_once("error: ").unwrap_or_else(|| panic!("{args:?}: no error in {}", ran.err)).1;
    let missing: Vec<_> = words.iter().filter(|word| !error.contains(**word)).collect();
    assert!(missing.is_empty(), "{args:?}: {missing:?} missing in {error}");
}

/// Declared output sizes may be those of an exporter's example, so a wrong one is only a warning.
#[test]
fn an_output_of_another_size_than_the_file_says_is_named() {
    let folder = Folder::new("sizes");
    for (declared, differs) in [("past", false), ("\"past + 1\"", true), ("4", true), ("3", false), ("other", false)] {
        let source = format!(
            "<ir_version: 9, opset_import: [\"\" : 20]> g (float[past] x) => (float[{declared}] y) {{ y = Relu (x) }}"
        );
        let model = folder.file("m.onnxtxt", source);
        let ran = finish(program(&[&["plan", &model, "--set", "past=3"][..], &["--target", "cpu"]].concat()));
        assert_eq!((ran.code, ran.err.contains("size differs")), (Some(0), differs), "{declared}: {}", ran.err);
    }
    let source = "<ir_version: 9, opset_import: [\"\" : 20]> g (float[3] x) => (float[1, 3] y) { y = Relu (x) }";
    let model = folder.file("m.onnxtxt", source);
    let ran = finish(program(&["plan", &model, "--target", "cpu"]));
    assert_eq!((ran.code, ran.err.contains("the number of dims differs")), (Some(0), true), "{}", ran.err);
}

/// The best of some needs one at least.
#[test]
fn a_graph_that_cannot_be_read_for_none_that_are_found_says_so() {
    let folder = Folder::new("none-found");
    let model = |k: usize| {
        let source = format!(
            "<ir_version: 9, opset_import: [\"\" : 20]> g (float[6] x) => (float[k] y) {{
                k = Constant <value_ints = [{k}]> ()  zero = Constant <value_ints = [0]> ()
                at = NonZero (x)  row = Squeeze (at, zero)  some = Gather (x, row)  y, places = TopK (some, k)
            }}"
        );
        folder.file("m.onnxtxt", source)
    };
    let file = model(1);
    let ran = finish(program(&["plan", &file, "--target", "cpu"]));
    let words = "a run that finds none is refused";
    assert!(ran.code == Some(0) && ran.err.contains(words) && ran.err.contains("node=\"at\""), "{}", ran.err);
    ok(&[&["run", &file, "--input", "x=6xf32=2"], CPU]);
    let words = ["output 'at.count': node 'at' finds 0 elements, but the graph has no meaning for fewer than 1"];
    fails(1, &[&["run", &file, "--input", "x=6xf32=0"], CPU], &words);
    let words = ["node 'y' (TopK)", "(where node 'at' finds 1 element)"];
    fails(1, &[&["plan", &model(2), "--target", "cpu"]], &words);
}

/// A graph of float vectors in ONNX's text syntax.
fn text(inputs: &str, outputs: &str, body: &str) -> String {
    format!("<ir_version: 8, opset_import: [\"\" : 17]>\ntest ({inputs}) => ({outputs})\n{{\n{body}\n}}\n")
}

/// xorshift64.
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as usize % n
    }

    /// Flips, overwrites, removes, repeats or moves bytes in one to four places.
    fn mutate(&mut self, bytes: &[u8]) -> Vec<u8> {
        let mut bytes = bytes.to_vec();
        for _ in 0..1 + self.below(4) {
            let at = self.below(bytes.len().max(1));
            let len = (1 + self.below(12)).min(bytes.len() - at.min(bytes.len()));
            match self.below(5) {
                _ if bytes.is_empty() => {}
                0 => bytes[at] ^= 1 << self.below(8),
                1 => bytes[at] = self.below(256) as u8,
                2 => drop(bytes.drain(at..at + len)),
                3 => {
                    let part = bytes[at..at + len].to_vec();
                    bytes.splice(at..at, part);
                }
                _ => {
                    let part: Vec<u8> = bytes.drain(at..at + len).collect();
                    let to = self.below(bytes.len() + 1);
                    bytes.splice(to..to, part);
                }
            }
        }
        bytes
    }
}

// ---- What works

#[test]
fn plans_need_no_weights_and_runs_say_which_are_missing() {
    let folder = Folder::new("weightless");
    let source = "<ir_version: 9, opset_import: [\"\" : 20]>
        g (float[2] x) => (float[2] y) <float[2] w = {0, 0}> { y = Mul (x, w) }";
    let mut proto = onnx::text::parse(source, Path::new("test")).expect("well-formed");
    let weight = &mut proto.graph.as_mut().expect("a graph").initializer[0];
    weight.float_data.clear();
    weight.data_location = DataLocation::External as i32;
    weight.external_data = vec![StringStringEntryProto { key: "location".into(), value: "w.bin".into() }];
    let (model, saved) = (folder.file("model.onnx", proto.encode_to_vec()), folder.path("plan.json"));
    ok(&[&["plan", &model, "-o", &saved]]);
    ok(&[&["check", &saved]]);
    ok(&[&["emit", &model, "wgsl"]]);
    for command in ["run", "bench", "compare"] {
        fails(1, &[&[command, &model], CPU], &["w.bin: no such file", "tensor 'w'", "put it there"]);
    }
    folder.file("w.bin", [0; 8]);
    ok(&[&["run", &model], CPU]);
}

#[test]
fn the_main_job_classifies_digits_it_never_saw() {
    let labels = &["--labels", "graphs/digits-labels.npy"];
    let args: &[&[&str]] = &[&["run"], DIGITS, labels, CPU];
    let text = ok(args);
    for words in ["predicted classes", "accuracy 99", "planned", "allocated", "as planned", "lower bound", "constants"]
    {
        assert!(text.contains(words), "{words} missing in\n{text}");
    }
    let found = ok_json(args);
    assert!(found["accuracy"].as_f64() >= Some(0.97), "{}", found["accuracy"]);
    assert_eq!(found["predictions"].as_array().map(Vec::len), Some(360));
    let memory = &found["memory"];
    assert_eq!(memory["planned_bytes"], memory["allocated_bytes"]);
    assert!(memory["lower_bound"].as_u64() <= memory["arena_bytes"].as_u64());
    let share = |class: &str| memory[class].as_u64().expect("it is a number of bytes");
    let sum: u64 = ["arena_bytes", "constant_bytes", "state_bytes", "backend_bytes"].map(share).iter().sum();
    assert_eq!(sum, share("planned_bytes"));
}

#[test]
fn plans_are_printed_written_and_checked() {
    let folder = Folder::new("plan");
    for model in GRAPHS {
        for target in ["cpu", "wgpu"] {
            let args: &[&[&str]] = &[&["plan"], *model, &["--target", target]];
            let text = ok(args);
            assert!(text.contains("planned") && text.contains("arena") && !text.contains("allocated"), "{text}");
            let found = ok_json(args);
            let bytes = found["programs"][0]["summary"]["planned_bytes"].as_u64().expect("it is a number of bytes");
            assert!(text.contains(&plimsoll::internals::report::grouped(bytes)), "{bytes} in {text}");

            let file = folder.path("plan.json");
            ok(&[&["plan"], *model, &["--target", target, "-o", &file]]);
            let written = std::fs::read_to_string(&file).expect("the plan is written");
            let origin = found["origin"].clone();
            let mut whole = without_subject(found.clone());
            whole["origin"] = origin;
            whole.as_object_mut().expect("an object").remove("planned_bytes");
            assert_eq!(parsed(&written), whole);
            assert_eq!(folder.names(""), ["plan.json"]);
            assert!(ok(&[&["check", &file]]).contains("sound"));
            assert_eq!(ok_json(&[&["check", &file]])["ok"], json!(true));
            std::fs::remove_file(&file).expect("it is there");

            // A preset and the same target from a file give the same plan.
            let described = folder.file("target.json", found["target"].to_string());
            ok(&[&["plan"], *model, &["--target", &described, "-o", &file]]);
            assert_eq!(written, std::fs::read_to_string(&file).expect("the plan is written"));
            std::fs::remove_file(&file).expect("it is there");
            std::fs::remove_file(&described).expect("it is there");
        }
    }
}

fn parsed(text: &str) -> Value {
    serde_json::from_str(text).expect("it is JSON")
}

/// A record that does not say which file it is about.
fn without_subject(mut record: Value) -> Value {
    let fields = record.as_object_mut().expect("a record has fields");
    for name in ["file", "binding", "origin"] {
        fields.remove(name);
    }
    record
}

/// The table of algorithms of `plan -v`, and that of `plan --placement`.
fn algorithms(model: &[&str], target: &str) -> [String; 2] {
    [&["-v"][..], &["--placement"]].map(|flag| {
        let text = ok(&[&["plan"], model, &["--target", target], flag]);
        let start = text.find("\nstep").unwrap_or_else(|| panic!("there is no table in {text}"));
        let table = &text[start + 1..];
        table.split("\n\n").next().map_or(String::new(), |table| format!("{}\n", table.trim_end()))
    })
}

/// Without a device, `plan` names the algorithms of all kernels with their numbers; `--placement` names that of each step.
#[test]
fn plans_name_the_algorithm_of_every_kernel() {
    let model = &["graphs/digits.onnx", "--set", "batch=64"];
    let [cpu, steps] = algorithms(model, "cpu");
    assert_eq!(
        cpu,
        "\
steps  kernels  template  algorithm
    1        1  conv      conv       threads 1 weights_left
    2        2  conv      conv       threads 2 weights_left
    2        2  pool      window     threads 1
    2        2  matmul    matmul     threads 1
"
    );
    assert_eq!(
        steps,
        "\
step  node                              kernel  shape          algorithm
   0  /stem/stem.2/Relu                 conv    [64,16,1,8,8]  conv threads 1 weights_left
   1  /body/body.2/Relu                 conv    [64,32,1,8,8]  conv threads 2 weights_left
   2  /pool/MaxPool/plimsoll.MaxPool    pool    [64,32,1,4,4]  window threads 1
   3  /head/head.2/Relu                 conv    [64,48,1,4,4]  conv threads 2 weights_left
   4  /pool_1/MaxPool/plimsoll.MaxPool  pool    [64,48,1,2,2]  window threads 1
   5  /Relu                             matmul  [64,28]        matmul threads 1
   6  /out/Gemm/Add                     matmul  [64,10]        matmul threads 1
"
    );
    let [wgpu, steps] = algorithms(model, "wgpu");
    assert_eq!(
        wgpu,
        "\
steps  kernels  template  algorithm
    1        1  conv      matmul          tile 16x64
    1        1  conv      matmul_slice_k  depth 8 tile 32
    1        1  pool      pool            threads 256
    1        1  conv      matmul_slice_k  depth 4 tile 16
    1        1  pool      pool            threads 64
    1        1  matmul    matmul_slice_k  row_axis 0 depth 4 tile 16
    1        1  matmul    matmul          row_axis 0 tile 16x64 transposed
"
    );
    assert!(steps.contains("[64,10]        matmul row_axis 0 tile 16x64 transposed\n"), "{steps}");
    let [cuda, steps] = algorithms(model, "cuda");
    assert_eq!(
        cuda,
        "\
steps  kernels  template  algorithm
    1        1  conv      matmul               tile 16x64
    1        1  conv      matmul_slice_k       depth 8 tile 32
    1        1  pool      pool                 threads 256
    1        1  conv      matmul_slice_k       depth 4 tile 16
    1        1  pool      pool                 threads 64
    1        1  matmul    matmul_slice_k_warp  row_axis 0 rows 16
    1        1  matmul    cuBLASLt             matmul f32 bias
"
    );
    assert!(steps.contains("[64,10]        cuBLASLt matmul f32 bias\n"), "{steps}");
    let placed = ok_json(&[&["plan"], model, &["--target", "cuda", "--placement"]]);
    assert_eq!(
        placed["programs"][0]["placement"][6],
        json!({"node": "/out/Gemm/Add", "kernel": "cuBLASLt matmul f32 bias"})
    );

    // A run on a device names the algorithms of its plan.
    let ran = ok(&[&["run"], model, CPU, &["--placement"]]);
    assert!(ran.contains("[64,28]        matmul threads 1\n"), "{ran}");
}

/// Without -v, a plan is told in a few lines: what takes its bytes, when most is live, and whether it fits.
#[test]
fn a_plan_is_told_in_a_few_lines() {
    let model = ["graphs/digits.onnx", "--set", "batch=64"];
    let text = ok(&[&["plan"], &model, &["--memory-limit", "2MiB"]]);
    let lines: Vec<_> = text.lines().filter(|line| !line.is_empty()).collect();
    let parts =
        "planned  1.21 MiB  1,265,408 bytes: constants 99.75 KiB, arena 768.00 KiB, the backend's own 368.00 KiB";
    assert_eq!(lines[1..3], [parts, "most is live in step 1 of 7: '/body/body.2/Relu'"], "{text}");
    assert!(lines.len() == 6 && lines[4].starts_with("-v adds ") && lines[5].starts_with("fits: "), "{text}");
    let all = ok(&[&["plan"], &model, &["-v"]]);
    for words in ["arena's lower bound", "order ", "steps  kernels", "choice", "most is live in step 1 of 7"] {
        assert!(all.contains(words) && !all.contains("-v adds"), "{words}: {all}");
    }
    let forks = ok(&[&["plan"], &model, &["--forks", "2"]]);
    assert!(forks.contains("\neach of the 2 runs takes "), "{forks}");

    // Weights that alone are too large come first.
    let ran = finish(program(&["plan", "graphs/digits.onnx", "--memory-limit", "64KiB"]));
    let words = "\n\nthe weights alone are above the limit: constants take 99.75 KiB (102,144 bytes)\n";
    assert!(ran.code == Some(2) && ran.err.contains(words), "{}", ran.err);
}

/// The plan of a range, with the bytes that each binding uses of the arena, in text and in JSON.
#[test]
fn the_plan_of_a_range_is_a_table() {
    let folder = Folder::new("range");
    let args: &[&[&str]] = &[&["plan", "graphs/mlp.onnxtxt", "--set", "batch=1..16"]];
    let (text, plan) = (ok(args), ok_json(args));
    let rows = plan["programs"][0]["range"].as_array().expect("a row per binding");
    assert_eq!((rows.len(), &rows[0]["binding"]), (16, &json!({"batch": 1})));
    let live = |row: &Value| row["live_bytes"].as_u64().expect("bytes");
    assert!(live(&rows[0]) < live(&rows[15]) && live(&rows[15]) == plan["programs"][0]["summary"]["lower_bound"]);
    for row in [&rows[0], &rows[3], &rows[15]] {
        assert!(text.contains(&plimsoll::internals::report::grouped(live(row))), "{row} in {text}");
    }
    let file = folder.file("plan.json", plan.to_string());
    assert!(ok(&[&["check", &file]]).contains("sound"));
}

#[test]
fn eager_and_planned_are_compared() {
    let args: &[&[&str]] = &[&["compare", "--iters", "1"], MLP, CPU];
    let text = ok(args);
    for words in ["eager direct", "eager caching", "eager bfc", "planned fused", "smallest device that fits", "equal"] {
        assert!(text.contains(words), "{words} missing in\n{text}");
    }
    let found = ok_json(args);
    let columns = found["columns"].as_array().expect("there are columns");
    let names: Vec<_> = columns.iter().map(|c| c["name"].as_str().expect("a column has a name")).collect();
    assert_eq!(names, ["eager direct", "eager caching", "eager bfc", "planned", "planned fused"]);
    let planned = &columns[3];
    assert_eq!(planned["agreement"]["equal"], json!(true));
    assert_eq!(planned["peak_reserved_bytes"], planned["smallest_device_bytes"]);
    fails(1, &[&["compare"], MLP, CPU, &["--input", "z=3x784xf32=1"]], &["z", "x, w1, b1, w2, b2"]);
}

#[test]
fn poisoned_memory_changes_nothing() {
    for model in GRAPHS {
        let args: &[&[&str]] = &[&["run"], *model, CPU];
        assert_eq!(ok_json(args)["outputs"], ok_json(&[args, &[&["--poison"]]].concat())["outputs"]);
    }
    ok(&[&["compare", "--iters", "1", "--poison"], MLP, CPU]);
}

#[test]
fn runs_are_timed() {
    let args: &[&[&str]] = &[&["bench", "--warmup", "1", "--iters", "4"], MLP, CPU];
    assert!(ok(args).contains("median"));
    let found = ok_json(args);
    assert_eq!(found["planned_bytes"], found["allocated_bytes"]);
    let [min, median, max] = ["min_ms", "median_ms", "max_ms"].map(|key| found[key].as_f64().expect("it is a time"));
    assert!(0.0 < min && min <= median && median <= max, "{min} {median} {max}");
    assert_eq!(found["iters"], json!(4));
    assert!(found["first_ms"].as_f64().is_some_and(|ms| ms > 0.0), "{found}");
    assert_eq!(ok(&[args, &[&["--json"]]].concat()).lines().count(), 1);
    // In a range, a given input selects the binding.
    let found =
        ok_json(&[&["bench", MLP[0], "--set", "batch=1..64", "--input", "x=16x784xf32=1", "--iters", "1"], CPU]);
    assert_eq!(found["planned_bytes"], found["allocated_bytes"]);
}

#[test]
fn graphs_are_emitted() {
    for model in GRAPHS {
        for (form, words) in [("dot", "digraph"), ("wgsl", "@compute"), ("onnxtxt", "ir_version")] {
            // The file itself has no extents to set.
            let model = if form == "onnxtxt" { &model[..1] } else { *model };
            let args: &[&[&str]] = &[&["emit"], model, &[form]];
            let text = ok(args);
            assert!(text.contains(words), "{words} missing in\n{text}");
            let found = ok_json(args);
            assert_eq!((&found["form"], &found["text"]), (&json!(form), &json!(text)));
        }
    }
}

#[test]
fn flags_that_a_form_has_no_use_for_are_refused() {
    let flags: [&[&str]; 7] = [
        &["--set", "batch=3"],
        &["--target", "wgpu"],
        &["--f16"],
        &["--chunks", "4"],
        &["--threads", "2"],
        &["--no-fuse"],
        &["--allow-tf32"],
    ];
    for flag in flags {
        fails(1, &[&["emit", MLP[0], "onnxtxt"], flag], &[flag[0], "as it is"]);
    }
    fails(1, &[&["emit"], MLP, &["dot", "--memory-limit", "1GiB"]], &["--memory-limit", "`plan`"]);
    fails(1, &[&["compare"], MLP, CPU, &["--no-fuse"]], &["--no-fuse", "with and without fusion"]);
    assert!(!ok(&[&["compare", "--help"]]).contains("--no-fuse"));
}

/// A flag for one family of devices is refused for a target or backend of another.
#[test]
fn flags_that_a_device_has_no_use_for_are_refused() {
    let flags: [(&[&str], &str); 3] =
        [(&["--threads", "2"], "cpu"), (&["--no-libraries"], "cuda"), (&["--allow-tf32"], "cuda")];
    for (flag, family) in flags {
        for target in ["cpu", "cuda", "wgpu"] {
            let plan: &[&[&str]] = &[&["plan"], MLP, &["--target", target], flag];
            match target == family {
                true => assert!(!ok(plan).is_empty()),
                false => fails(1, plan, &[flag[0], target, "no use", family]),
            }
            if target != family {
                fails(1, &[&["run"], MLP, &["--backend", target], flag], &[flag[0], target, "no use", family]);
            }
        }
        for form in ["wgsl", "cuda"].into_iter().filter(|form| *form != family) {
            fails(1, &[&["emit"], MLP, &[form], flag], &[flag[0], "no use", family]);
        }
    }
    let rounds =
        |flags: &[&str]| ok_json(&[&["plan"], MLP, &["--target", "cuda"], flags])["target"]["allow_tf32"].clone();
    assert_eq!((rounds(&["--allow-tf32"]), rounds(&[])), (json!(true), json!(null)));
}

/// For a range, the plan that ran is shown, as text and as JSON.
#[test]
fn a_run_in_a_range_shows_its_own_plan() {
    let range: &[&str] = &["run", "graphs/attention.onnxtxt", "--set", "batch=1..4", "--set", "sequence=1..64"];
    let small: &[&str] = &["--input", "x=1x2x64xf32=0.5"];
    let found = &ok_json(&[range, small, CPU])["memory"]["input_bytes"];
    let text = ok(&[range, small, CPU]).replace(',', "");
    let shown = text.lines().find(|line| line.contains("inputs in it")).expect("there are inputs");
    assert!(shown.contains(&format!(" {found} bytes")), "{shown}, expected {found}");
}

#[test]
fn emitted_text_is_the_same_graph() {
    let folder = Folder::new("emit");
    for model in GRAPHS {
        let (path, sets) = model.split_first().expect("a graph has a path");
        let first = ok(&[&["emit", path, "onnxtxt"]]);
        let file = folder.file("emitted.onnxtxt", &first);
        assert!(first == ok(&[&["emit", &file, "onnxtxt"]]), "{path}: emitted twice it differs");
        let plans = [*path, &file].map(|path| without_subject(ok_json(&[&["plan", path], sets])));
        assert!(plans[0] == plans[1], "{path}: plans differ");
    }
    let text = folder.path("emitted.onnxtxt");
    std::fs::write(&text, ok(&[&["emit", "graphs/digits.onnx", "onnxtxt"]])).expect("the file is written");
    let outputs = ["graphs/digits.onnx", &text].map(|model| {
        let out = folder.path("out");
        ok(&[&["run", model, "--set", "batch=2", "--output-dir", &out], CPU]);
        std::fs::read(Path::new(&out).join("logits.npy")).expect("the output is written")
    });
    assert!(outputs[0] == outputs[1], "results differ");
}

#[test]
fn devices_and_operators_are_listed() {
    assert!(ok(&[&["devices"]]).lines().any(|line| line.starts_with("cpu ")));
    assert_eq!(ok_json(&[&["devices"]])["devices"][0]["backend"], json!("cpu"));
    let target = ok(&[&["devices", "cpu"]]);
    let target = Target::from_json(&target, Path::new("devices")).expect("a target");
    assert_eq!(target.family, plimsoll::internals::target::Family::Cpu);
    fails(1, &[&["devices", "cuda:99"]], &["no device 'cuda:99' among: cpu"]);
    let table = ok(&[&["ops"]]);
    // After the table, there is a line for each of cpu, wgpu and the other backends.
    let rows = table.lines().take_while(|line| !line.is_empty());
    assert_eq!(rows.count(), 1 + ops::all().count());
    assert!(table.contains("\nwgpu: computes i64 as i32, u64 as i32, u32 as i32 (*); has no f64\n"), "{table}");
    let found = ok_json(&[&["ops"]]);
    let names: Vec<_> = found.as_array().expect("it is a list").iter().map(|op| op["name"].as_str()).collect();
    assert_eq!(names, ops::all().map(|op| Some(op.name)).collect::<Vec<_>>());
    let types =
        |name: &str| &found.as_array().expect("a list").iter().find(|op| op["name"] == name).expect("a row")["types"];
    let floats = json!({"f16": "f16", "bf16": "bf16", "f32": "f32", "f64": "f64"});
    let cpu = json!({"f16": "f32", "bf16": "f32", "f32": "f32", "f64": "f64"});
    let wgpu = json!({"f16": "f16", "bf16": "bf16", "f32": "f32"});
    assert_eq!(types("Exp"), &json!({"cpu": cpu, "cuda": floats, "wgpu": wgpu}));
    assert_eq!(types("And"), &json!({"cpu": {"bool": "bool"}, "cuda": {"bool": "bool"}, "wgpu": {"bool": "bool"}}));
    assert_eq!(types("Erf"), types("Exp"));
    assert_eq!(types("MatMul")["cpu"]["i64"], "i64");
    assert!(types("Gather")["cpu"].get("u8").is_some() && types("Where")["wgpu"].get("f32").is_some());
    for command in ["run", "plan", "check", "compare", "bench", "emit", "devices", "ops"] {
        assert!(ok(&[&["--help"]]).contains(command));
        assert!(ok(&[&[command, "--help"]]).contains("Usage: plimsoll"));
    }
}

#[test]
fn outputs_are_written_and_expected() {
    let folder = Folder::new("outputs");
    let out = folder.path("new/out");
    ok(&[&["run"], MLP, CPU, &["--output-dir", &out]]);
    assert_eq!(folder.names("new/out"), ["scores.npy"]);
    let expect = format!("scores={out}/scores.npy");
    ok(&[&["run"], MLP, CPU, &["--expect", &expect]]);
    ok(&[&["run"], MLP, CPU, &["--expect", &expect, "--no-fuse"]]);
    fails(
        3,
        &[&["run"], MLP, CPU, &["--expect", &expect, "--seed", "1"]],
        &["'scores'", "of the peak", "expected", "found"],
    );
    fails(3, &[&["run"], MLP, CPU, &["--expect", "scores=3x11xf32=0"]], &["f32[3,11]", "f32[3,10]"]);
    ok(&[&["run"], MLP, CPU, &["--expect", &expect, "--seed", "1", "--rtol", "0", "--atol", "1e6"]]);
    fails(1, &[&["run"], MLP, CPU, &["--expect", "score=3x10xf32=0"]], &["score", "outputs: scores"]);

    // A folder has the name of the output: no partial file remains.
    let taken = folder.path("taken");
    std::fs::create_dir_all(Path::new(&taken).join("scores.npy")).expect("the folder is made");
    fails(1, &[&["run"], MLP, CPU, &["--output-dir", &taken]], &["taken/scores.npy"]);
    assert_eq!(folder.names("taken"), ["scores.npy"]);
    let file = folder.file("file", "");
    fails(1, &[&["run"], MLP, CPU, &["--output-dir", &format!("{file}/out")]], &["file/out", "folder"]);
    fails(1, &[&["plan"], MLP, &["-o", &format!("{file}/plan.json")]], &["file/plan.json", "write the plan"]);
}

#[test]
fn names_of_outputs_become_names_of_files() {
    let folder = Folder::new("names");
    let model = |file: &str, outputs: &[&str]| {
        let g = Trace::new("names");
        let x = g.input("x", DType::F32, [2]);
        for (k, name) in outputs.iter().enumerate() {
            g.output(name, x + k as f32);
        }
        let graph = g.finish().expect("the graph is sound");
        folder.file(file, onnx::export(&graph).expect("it is exported").encode_to_vec())
    };
    let out = folder.path("out");
    let good = model("good.onnx", &["layer/0:out", "../../up", "größe x"]);
    ok(&[&["run", &good, "--input", "x=2xf32=0.5", "--output-dir", &out], CPU]);
    assert_eq!(folder.names("out"), [".._.._up.npy", "gr__e_x.npy", "layer_0_out.npy"]);
    let read = npy::read(&Path::new(&out).join(".._.._up.npy")).expect("it is an array");
    assert_eq!(read.to_f64(), [1.5, 1.5]);
    // Names that no file system accepts, with the same beginning.
    let long = |end: &str| format!("{}{end}", "n".repeat(300));
    let many = model("long.onnx", &[&long("a"), &long("b"), &"m".repeat(251)]);
    let out = folder.path("long");
    ok(&[&["run", &many, "--input", "x=2xf32=0.5", "--output-dir", &out], CPU]);
    let names = folder.names("long");
    assert!(names.len() == 3 && names.iter().all(|name| name.len() == 255 && name.ends_with(".npy")), "{names:?}");
    let same = model("same.onnx", &["a/b", "a:b"]);
    let none = folder.path("none");
    fails(1, &[&["run", &same, "--output-dir", &none], CPU], &["'a/b'", "'a:b'", "a_b.npy"]);
    assert!(!Path::new(&none).exists());
}

// ---- What is refused

#[test]
fn what_does_not_fit_exits_with_2() {
    let folder = Folder::new("fit");
    let limit: &[&str] = &["--memory-limit", "10KiB"];
    fails(2, &[&["plan"], MLP, limit], &["mlp.onnxtxt", "does not fit", "10,240", "over"]);
    fails(2, &[&["run"], MLP, CPU, limit, &["--output-dir", &folder.path("out")]], &["does not fit", "10,240"]);
    fails(2, &[&["bench"], MLP, CPU, limit], &["does not fit"]);
    fails(2, &[&["emit"], MLP, limit, &["wgsl"]], &["does not fit"]);
    fails(2, &[&["plan"], MLP, limit, &["-o", &folder.path("plan.json")]], &["does not fit"]);
    assert!(folder.names("").is_empty());
    let needed = ok_json(&[&["plan"], MLP])["programs"][0]["summary"]["planned_bytes"]
        .as_u64()
        .expect("it is a number of bytes");
    ok(&[&["plan"], MLP, &["--memory-limit", &needed.to_string()]]);
    fails(2, &[&["plan"], MLP, &["--memory-limit", &(needed - 1).to_string()]], &["(1 over)"]);
    // Eager runs have the same limit. That one does not fit is a result; but if the plan does not fit either, it is an error.
    let least = needed.to_string();
    assert!(ok(&[&["compare", "--iters", "1"], MLP, CPU, &["--memory-limit", &least]]).contains("does not fit"));
    fails(2, &[&["compare", "--iters", "1"], MLP, CPU, limit], &["does not fit", "10,240"]);
}

/// Hides the drivers of Vulkan, and those of GL.
#[cfg(target_os = "linux")]
fn without_adapters(command: &mut Command) {
    let variables = ["VK_DRIVER_FILES", "VK_ICD_FILENAMES", "__EGL_VENDOR_LIBRARY_FILENAMES"];
    command.envs(variables.map(|name| (name, "/none.json")));
}

#[test]
#[cfg(target_os = "linux")]
fn a_missing_adapter_exits_with_4() {
    for name in ["run", "bench", "compare"] {
        let mut command = program(&[&[name], MLP, &["--backend", "wgpu"]].concat());
        without_adapters(&mut command);
        let ran = finish(command);
        assert_eq!((ran.code, ran.out.as_str()), (Some(4), ""), "{}", ran.err);
        assert!(ran.err.contains("error: backend wgpu: "), "{}", ran.err);
    }
    let mut command = program(&[&["run"], MLP, &["--backend", "auto"]].concat());
    without_adapters(&mut command);
    let ran = finish(command);
    assert_eq!(ran.code, Some(0), "{}", ran.err);
    assert!(ran.err.contains("no GPU"), "what was picked, and why: {}", ran.err);
}

/// Names in a file may have control characters. None reaches the terminal.
#[test]
fn names_reach_the_terminal_without_control_characters() {
    let folder = Folder::new("control");
    let name = "\u{1b}[2J\u{9b}31m\r\u{7}";
    let g = Trace::new(name);
    g.output(name, g.input("x\u{1b}]0;t\u{7}", DType::F32, [2]).relu());
    let graph = g.finish().expect("the graph is sound");
    let model = folder.file("control.onnx", onnx::export(&graph).expect("it is exported").encode_to_vec());
    let harmless = |text: &str| !text.chars().any(|c| c.is_control() && c != '\n');
    for args in [
        &["run", &model, "--backend", "cpu"][..],
        &["run", &model, "--backend", "cpu", "--json"],
        &["plan", &model, "--advise"],
        &["plan", &model, "--memory-limit", "1"],
        &["run", &model, "--input", "y=2xf32=1"],
        &["run", &model, "--backend", "cpu", "--expect", "nothing=2xf32=1"],
        &["emit", &model, "wgsl"],
        &["emit", &model, "dot"],
        &["compare", &model, "--backend", "cpu", "--iters", "1"],
    ] {
        let ran = finish(program(args));
        assert!(harmless(&ran.out) && harmless(&ran.err), "{args:?}: {:?} {:?}", ran.out, ran.err);
    }
    assert!(finish(program(&["run", &model, "--backend", "cpu"])).out.contains("\\u{1b}[2J\\u{9b}31m\\r"));
}

#[test]
fn two_results_need_two_files() {
    let folder = Folder::new("twice");
    let file = folder.path("x");
    for other in [&file, &format!("{}/./x", folder.path(""))] {
        let words = &["--save and --html would both write", "expected a file for each"];
        fails(1, &[&["plan"], MLP, &["-o", &file, "--html", other]], words);
        fails(1, &[&["plan"], MLP, &["--html", &file, "--svg", other]], &["--html and --svg"]);
    }
    assert!(folder.names("").is_empty());
    #[cfg(unix)]
    ok(&[&["plan"], MLP, &["-o", "/dev/null", "--html", "/dev/null"]]);
}

#[test]
fn wrong_flags_are_named() {
    for (flag, value, words) in [
        ("--set", "batch", "DIM=N"),
        ("--set", "batch=", "batch="),
        ("--set", "batch=-1", "-1"),
        ("--set", "batch=99999999999999999999", "whole number"),
        ("--set", "width=3", "'width'"),
        ("--set", "batch=4", "twice"),
        ("--memory-limit", "5parsec", "parsec"),
        ("--memory-limit", "", "size"),
        ("--memory-limit", "1..5GiB", "1..5GiB"),
        ("--memory-limit", "99999999999GiB", "64 bits"),
        ("--target", "quantum", "quantum"),
        ("--target", "graphs", "graphs"),
        ("--target", "graphs/mlp.onnxtxt", "graphs/mlp.onnxtxt:1:1"),
        ("--threads", "0", "1..=4096"),
        ("--format", "xml", "json"),
        ("--batch", "1..16", "a range goes to --set batch=1..16"),
        ("--batch", "0", "a whole number above 0"),
        ("--chunks", "auto", "a whole number above 0: the most chunks"),
    ] {
        fails(1, &[&["plan"], MLP, &[flag, value]], &[words]);
    }
    for (flag, value, words) in [
        ("--rtol", "nan", "--rtol"),
        ("--atol", "-1", "--atol"),
        ("--seed", "x", "--seed"),
        ("--input", "x", "NAME=FILE.npy"),
        ("--input", "x=3x784", "3x784"),
        ("--input", "x=3x784xf31=0", "f31"),
        ("--input", "x=3xaxf32=0", "3xaxf32"),
        ("--input", "x=4294967296x4294967296xf32=0", "larger than any memory"),
        ("--input", "x=1048576x1048576x1024xf32=0", "the host has no"),
        ("--expect", "scores", "--expect scores"),
        ("--load-states", "graphs/none.safetensors", "the graph has no states; --state makes them"),
        ("--save-states", "states.safetensors", "the graph has no states; --state makes them"),
        ("--labels", "graphs/none.npy", "graphs/none.npy"),
        ("--labels", "graphs/digits.onnx", "graphs/digits.onnx"),
    ] {
        fails(1, &[&["run"], MLP, CPU, &[&format!("{flag}={value}")]], &[words]);
    }
    fails(1, &[&["run"], MLP, &["--backend", "abacus"]], &["abacus", "wgpu", "cpu"]);
    fails(1, &[&["bench"], MLP, CPU, &["--iters", "0"]], &["--iters"]);
    fails(1, &[&["compare"], MLP, CPU, &["--iters", "0"]], &["--iters"]);
    for command in ["bench", "compare"] {
        fails(1, &[&[command], MLP, CPU, &["--html", "nodir/b.html"]], &["nodir/b.html", "there is no folder nodir"]);
    }
    fails(1, &[&["emit"], MLP, &["fortran"]], &["fortran", "wgsl"]);
    fails(1, &[&["sail"]], &["sail"]);
    fails(1, &[&["run"]], &["MODEL"]);
}

#[test]
fn wrong_inputs_are_named() {
    let folder = Folder::new("inputs");
    let run = |inputs: &[&str], words: &[&str]| {
        let flags: Vec<_> = inputs.iter().flat_map(|input| ["--input", input]).collect();
        fails(1, &[&["run", "graphs/mlp.onnxtxt"], CPU, &flags], words);
    };
    run(&["x=3x783xf32=1"], &["'x'", "f32[3,784]", "f32[3,783]"]);
    let reals = ["x=3x784xf64=0.1"];
    run(&reals, &["'x'", "f32[3,784]", "f64[3,784]", "convert it, as with NumPy's astype"]);
    let four = ["--input", "x=4x784xf32=1"];
    let given = ["run", "graphs/mlp.onnxtxt", "--batch", "3"];
    fails(1, &[&given, &four, CPU], &["found f32[4,784]; leave out --batch 3, or give 3 rows"]);
    let saved = folder.path("saved.json");
    ok(&[&["plan"], MLP, &["--save", &saved]]);
    let given = ["run", &saved, "--model", "graphs/mlp.onnxtxt"];
    fails(1, &[&given, &four, CPU], &["found f32[4,784]; the saved plan has batch=3: plan again for 4"]);
    run(&["y=3x784xf32=1"], &["mlp.onnxtxt", "--input y", "x, w1, b1, w2, b2"]);
    run(&["x=3x784xf32=1", "x=3x784xf32=1"], &["'x'", "twice"]);
    run(&["x=none.npy"], &["none.npy"]);
    run(&["x=graphs"], &["graphs"]);
    run(&["x=graphs/mlp.onnxtxt"], &["graphs/mlp.onnxtxt"]);
    let whole = folder.path("x.npy");
    npy::write(Path::new(&whole), &Tensor::from_f64(DType::F32, [3, 784], &[0.5; 3 * 784])).expect("it is written");
    let bytes = std::fs::read(&whole).expect("it is there");
    for cut in [0, 1, 6, 11, 60, 127, 128, bytes.len() - 1] {
        let file = folder.file("cut.npy", &bytes[..cut]);
        run(&[&format!("x={file}")], &["cut.npy"]);
    }
    let labels = folder.path("labels.npy");
    npy::write(Path::new(&labels), &Tensor::from_i64([2], &[0, 1]).expect("it is a tensor")).expect("it is written");
    fails(1, &[&["run"], MLP, CPU, &["--labels", &labels]], &["--labels", "2 labels", "[3,10]"]);
}

#[test]
fn graphs_that_are_none_are_named() {
    let folder = Folder::new("graphs");
    let file = |name: &str, content: &str| folder.file(name, content);
    let vectors =
        |a: usize, b: usize, body: &str| text(&format!("float[{a}] a, float[{b}] b"), &format!("float[{a}] y"), body);
    let cases: &[(String, &[&str])] = &[
        (folder.path("none.onnx"), &["none.onnx", "No such file"]),
        (folder.path(""), &["no genai_config.json in "]),
        (file("data.py", "import numpy\n"), &["data.py", "it is not a model", "line 1"]),
        (file("x.npy", "\u{1}NUMPY"), &["x.npy", "it is an array: --input takes it"]),
        (file("empty.onnx", ""), &["empty.onnx", "empty"]),
        (file("words.onnx", "What is this?"), &["words.onnx", "not an ONNX model"]),
        (file("words.onnxtxt", "What is this?"), &["words.onnxtxt:1:"]),
        (file("op.onnxtxt", &vectors(2, 2, "y = Frobnicate (a, b)")), &["op.onnxtxt", "Frobnicate"]),
        (file("attr.onnxtxt", &vectors(2, 2, "y = Relu <slope = 0.5> (a)")), &["attr.onnxtxt", "Relu", "slope"]),
        (file("shape.onnxtxt", &vectors(2, 3, "y = Add (a, b)")), &["shape.onnxtxt", "Add", "[2]", "[3]"]),
        (file("arity.onnxtxt", &vectors(2, 2, "y = Add (a)")), &["arity.onnxtxt", "Add"]),
        (file("value.onnxtxt", &vectors(2, 2, "y = Add (a, c)")), &["value.onnxtxt", "Add", "'c'"]),
        (file("cycle.onnxtxt", &vectors(2, 2, "c = Add (a, y)\ny = Relu (c)")), &["cycle.onnxtxt", "'y'"]),
        (file("dtype.onnxtxt", &vectors(2, 2, "c = Not (a)\ny = Add (c, c)")), &["dtype.onnxtxt", "Not", "f32"]),
        (file("line.onnxtxt", &vectors(2, 2, "y = Add (a; b)")), &["line.onnxtxt:4:"]),
        (file("output.onnxtxt", &vectors(2, 2, "c = Add (a, b)")), &["output.onnxtxt", "'y'"]),
    ];
    for (path, words) in cases {
        for command in ["plan", "run", "emit"] {
            if command == "emit" {
                fails(1, &[&["emit", path, "wgsl"]], words);
            } else {
                fails(1, &[&[command, path]], words);
            }
        }
    }
}

#[test]
fn a_plan_that_was_edited_is_refused() {
    let folder = Folder::new("edited");
    let good = ok_json(&[&["plan"], MLP]);
    type Edit = (&'static str, fn(&mut Value), &'static str);
    let edits: &[Edit] = &[
        ("version", |p| p["version"] = json!(99), "version"),
        ("no version", |p| _ = p.as_object_mut().expect("an object").remove("version"), "version"),
        ("segment", |p| p["segments"][0]["bytes"] = json!(256), ""),
        ("negative", |p| p["segments"][0]["bytes"] = json!(-1), ""),
        ("offset", |p| p["programs"][0]["buffers"][0]["offset"] = json!(4), ""),
        ("far away", |p| p["programs"][0]["buffers"][0]["offset"] = json!(u64::MAX - 255), ""),
        ("buffer", |p| p["programs"][0]["steps"][0]["reads"][0] = json!(9999), ""),
        ("kernel", |p| p["programs"][0]["steps"][0]["kernel"] = json!(9999), ""),
        ("one step fewer", |p| _ = p["programs"][0]["steps"].as_array_mut().expect("a list").pop(), ""),
        ("summary", |p| p["programs"][0]["summary"]["planned_bytes"] = json!(1), ""),
        ("alignment", |p| p["target"]["alignment"] = json!(3), ""),
        ("text", |p| p["programs"][0]["buffers"] = json!("none"), ""),
    ];
    for (what, edit, word) in edits {
        let mut plan = good.clone();
        edit(&mut plan);
        let file = folder.file("edited.json", plan.to_string());
        eprintln!("{what}");
        fails(1, &[&["check", &file]], &["edited.json", word]);
    }
    let whole = good.to_string();
    for cut in [0, 1, 20, whole.len() / 2, whole.len() - 1] {
        let file = folder.file("cut.json", &whole[..cut]);
        fails(1, &[&["check", &file]], &["cut.json"]);
    }
    fails(1, &[&["check", &folder.path("none.json")]], &["none.json"]);
    fails(1, &[&["check", "graphs/digits.onnx"]], &["graphs/digits.onnx"]);
    fails(1, &[&["check", "graphs"]], &["graphs"]);
}

// ---- What is broken

/// The result of `plan` for a file: a plan, or an error that names the file.
fn compile(path: &Path, dims: &[&str]) -> Result<(), String> {
    let all = || {
        let model = onnx::load(path)?;
        let model = if model.offers_training() { model.with_training()? } else { model };
        let dims: Vec<_> = dims.iter().map(|dim| ((*dim).to_owned(), 4)).collect();
        let graph = onnx::import(&model, &dims)?;
        let graph = Recipe::default().whole(graph, &Target::cpu(2))?;
        plan::planned(&graph, &Target::cpu(2), &Limits { memory: None })
    };
    all().map(|_| ()).map_err(|error: plimsoll::Error| error.to_string())
}

#[test]
fn truncated_files_are_refused() {
    let folder = Folder::new("truncated");
    let bytes = std::fs::read("graphs/digits.onnx").expect("the file is there");
    let step = bytes.len() / 61;
    let dims = &["batch"];
    let lengths = (0..bytes.len()).step_by(step).chain(1..40).chain(bytes.len() - 40..bytes.len());
    for length in lengths {
        let path = folder.file("cut.onnx", &bytes[..length]);
        let found =
            catch_unwind(|| compile(Path::new(&path), dims)).unwrap_or_else(|_| panic!("it panics at {length}"));
        assert!(found.is_err(), "{length} of {} bytes are taken for a graph", bytes.len());
    }
    for length in [0, 1, 1000, bytes.len() / 2, bytes.len() - 1] {
        let path = folder.file("cut.onnx", &bytes[..length]);
        fails(1, &[&["plan", &path, "--set", "batch=2"]], &["cut.onnx"]);
    }
}

#[test]
fn mutated_files_never_panic() {
    let folder = Folder::new("mutated");
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    let mut refused = 0;
    let files: [(&str, &[&str], u32); 5] = [
        ("digits.onnx", &["batch"], 150),
        ("mlp.onnxtxt", &["batch"], 100),
        ("attention.onnxtxt", &["batch", "sequence"], 100),
        ("residual.onnxtxt", &["batch", "height", "width"], 100),
        ("sgd.onnxtxt", &["batch"], 150),
    ];
    for (file, dims, mutants) in files {
        let good = std::fs::read(Path::new("graphs").join(file)).expect("the file is there");
        for number in 0..mutants {
            // Most of digits.onnx is weights. Its structure is at the beginning and at the end.
            let mut bytes = good.clone();
            match number % 3 {
                0 if file.ends_with(".onnx") => bytes.splice(..1500, random.mutate(&good[..1500])).for_each(drop),
                1 if file.ends_with(".onnx") => {
                    let tail = bytes.split_off(good.len() - 1500);
                    bytes.extend(random.mutate(&tail));
                }
                _ => bytes = random.mutate(&good),
            }
            let path = folder.file(&format!("mutant-{file}"), &bytes);
            match catch_unwind(|| compile(Path::new(&path), dims)) {
                Ok(found) => refused += usize::from(found.is_err()),
                Err(_) => {
                    let kept = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("panic-{number}-{file}"));
                    std::fs::write(&kept, &bytes).expect("the mutant is kept");
                    panic!("mutant {number} of {file} panics; it is kept as {}", kept.display());
                }
            }
            if number % 37 == 0 {
                let ran = finish(program(&["plan", &path]));
                assert!(ran.code == Some(0) || ran.code == Some(1) && ran.out.is_empty(), "{path}: {}", ran.err);
            }
        }
    }
    assert!((50..600).contains(&refused), "mutants are neither all harmless nor all harmful: {refused} of 600 refused");
}

/// What is in a file is shown with nothing bound, and what is not supported says so.
/// A file that fixes its sizes is planned with others, if its nodes allow it.
#[test]
fn an_input_takes_another_shape() {
    let folder = Folder::new("reshaped");
    let model = folder.file("fixed.onnxtxt", text("float[1, 4] x", "float[1, 4] y", "y = Relu (x)"));
    let shape = |found: &Value| found["outputs"][0]["shape"].clone();
    assert_eq!(shape(&ok_json(&[&["run", &model, "--shape", "x=8x4"], CPU])), json!([8, 4]));
    assert_eq!(shape(&ok_json(&[&["run", &model, "--set", "x.0=3"], CPU])), json!([3, 4]));
    fails(
        1,
        &[&["run", &model, "--input", "x=8x4xf32=1"], CPU],
        &["expected f32[1,4], found f32[8,4]", "--shape x=8x4"],
    );
    fails(
        1,
        &[&["plan", &model, "--shape", "x=8"]],
        &["fixed.onnxtxt", "--shape x: the file declares f32[1,4], found [8]"],
    );
    fails(
        1,
        &[&["plan", &model, "--shape", "z=8x4"]],
        &["--shape z: not an input of the graph; its inputs: x f32[1,4]"],
    );
    fails(1, &[&["plan", &model, "--set", "batch=8"]], &["no dim 'batch'", "x.0"]);
    let merged = folder.file("merged.onnxtxt", {
        text("float[1, 4] x", "float[2, 2] y", "s = Constant <value_ints = [2, 2]> ()\ny = Reshape (x, s)")
    });
    fails(1, &[&["plan", &merged, "--shape", "x=8x4"]], &["node 'y' (Reshape)"]);
}

#[test]
fn a_model_is_inspected_with_nothing_bound() {
    let found = ok_json(&[&["inspect", "graphs/mlp.onnxtxt"]]);
    assert_eq!(found["inputs"][0], json!({"name": "x", "dtype": "float", "shape": "[batch, 784]"}));
    assert_eq!(found["outputs"][0]["name"], "scores");
    assert_eq!(found["open_dims"], json!(["batch"]));
    let nodes = |name: &str| {
        let of = found["operators"].as_array().expect("a list").iter().find(|o| o["name"] == name).cloned();
        of.unwrap_or_else(|| panic!("{name} in {found}"))
    };
    assert_eq!((&nodes("Relu")["nodes"], &nodes("Relu")["lacks"]), (&json!(1), &Value::Null));
    let digits = ok(&[&["inspect", "graphs/digits.onnx"]]);
    for words in ["graphs/digits.onnx", "producer", "opset     ai.onnx", "open dims  --set 'batch'=N", "weights   "] {
        assert!(digits.contains(words), "{words}: {digits}");
    }
    let folder = Folder::new("inspected");
    let source = text("float[2, n] a, float[m] b", "float y", "c = Frobnicate (a)\nd = NonZero (b)\ny = Relu (c)");
    let source = source.replace("\n{", "\n<float[3] w = [\"location\": \"none.bin\", \"offset\": \"4\"]>\n{");
    let model = folder.file("odd.onnxtxt", source);
    let found = ok_json(&[&["inspect", &model]]);
    let lacks = |at: usize| found["operators"][at]["lacks"].clone();
    let expected = json!("plimsoll does not have this operator");
    assert_eq!((found["operators"][0]["name"].as_str(), lacks(0)), (Some("Frobnicate"), expected));
    assert_eq!(found["open_dims"], json!(["m", "n"]));
    // Of an input whose type is not supported, too.
    let source = text("string[k] a, float[batch, 4] b", "float y", "c = StringNormalizer (a)\ny = Relu (b)");
    let words = folder.file("words.onnxtxt", source);
    assert_eq!(ok_json(&[&["inspect", &words]])["open_dims"], json!(["batch", "k"]));
    assert!(ok(&[&["inspect", &words]]).contains("open dims  --set 'batch'=N --set 'k'=N\n"));
    fails(1, &[&["inspect", "graphs"]], &["graphs", "no genai_config.json in graphs"]);
    let counts = |at: usize| found["operators"][at]["counts"].clone();
    assert_eq!(
        (counts(0), found["operators"][1]["name"].as_str(), counts(1)),
        (json!(false), Some("NonZero"), json!(true))
    );
    assert!(ok(&[&["inspect", &model]]).contains("NAME.count says how many were found"));
    let body = "body (int64 i, bool c, float v) => (bool d, float w) { d = Identity (c)\nw = Add (v, v) }";
    let source = text(
        "int64 n, float v0",
        "float v1",
        &format!("c0 = Constant <value = bool {{1}}> ()\n[twice] v1 = Loop (n, c0, v0) <body = {body}>"),
    );
    let model = folder.file("loop.onnxtxt", source);
    assert_eq!(ok_json(&[&["inspect", &model]])["loops"], json!(["twice.trips"]));
    assert!(ok(&[&["inspect", &model]]).contains("\nloops      --set 'twice.trips'=N"));
}

/// Both files are named, each with the extents that differ.
#[test]
fn a_difference_names_its_files() {
    let folder = Folder::new("differs");
    let plan = |name: &str, batch: &str| {
        let path = folder.path(name);
        ok(&[&["plan", MLP[0], "--batch", batch, "--save", &path]]);
        path
    };
    let (small, large) = (plan("small.json", "8"), plan("large.json", "10"));
    let text = ok(&[&["diff", &small, &large]]);
    assert!(text.starts_with(&format!("before  {small} (batch=8)\nafter   {large} (batch=10)\n\n")), "{text}");
    assert!(ok(&[&["diff", &small, &small]]).starts_with(&format!("before  {small}\nafter   {small}\n\n")));
}

/// Why a device is not a better one is said once, in the log.
#[test]
fn a_device_is_described_once() {
    for command in [&["run", MLP[0]][..], &["bench", MLP[0], "--iters", "1"], &["compare", MLP[0]]] {
        let ran = finish(program(command));
        let told = |text: &str| text.matches("no CUDA").count();
        assert!(ran.code == Some(0) && told(&ran.out) == 0 && told(&ran.err) <= 1, "{}{}", ran.err, ran.out);
        assert_eq!(ran.err.matches("INFO backend: ").count(), 1, "{}", ran.err);
    }
}

/// Weights alone are no graph.
#[test]
fn files_of_weights_say_how_a_graph_is_written() {
    let folder = Folder::new("weights");
    for (name, content) in [("w.safetensors", "{}"), ("w.pt", "PK"), ("w.bin", "PK\u{3}\u{4}rest")] {
        let file = folder.file(name, content);
        fails(1, &[&["inspect", &file]], &[name, "torch.onnx.export(model, (example,), \"model.onnx\", dynamo=True)"]);
    }
}

/// What is often taken for a model, or for data, says what it is.
#[test]
fn files_of_other_formats_are_named() {
    let folder = Folder::new("formats");
    let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n";
    for (name, content, words) in [
        ("m.tflite", "\u{1c}\0\0\0TFL3rest", "TensorFlow Lite"),
        ("m.gguf", "GGUF\u{3}\0\0\0", "llama.cpp"),
        ("page.onnx", "\n<!DOCTYPE html><html>", "it is a web page"),
        ("page.onnxtxt", "<html lang=en>", "it is a web page"),
        ("pointer.onnx", pointer, "`git lfs pull`"),
        ("m.zip", "PK\u{3}\u{4}rest", "it is a zip archive"),
        ("m.onnx", "PK\u{3}\u{4}rest of archive/data.pkl", "it has weights alone"),
    ] {
        let file = folder.file(name, content);
        fails(1, &[&["plan", &file]], &[name, words]);
    }
    let data = |name: &str, content: &str, words: &str| {
        let file = folder.file(name, content);
        let method = ["--labels", &file, "--loss", "mse", "--lr", "0.1", "--batch", "2", "--steps", "1"];
        fails(1, &[&["train", "graphs/linear.onnxtxt", "--data", &file], &method], &[name, words]);
        fails(1, &[&["run", "graphs/linear.onnxtxt", "--input", &format!("x={file}")]], &[name, words]);
    };
    data("x.csv", "1,2,3\n4,5,6\n", "np.loadtxt");
    data("x.npy", pointer, "`git lfs pull`");
}

/// With --json, an error is a record, too.
#[test]
fn errors_are_json_if_that_is_asked_for() {
    let ran = finish(program(&["run", "graphs/none.onnx", "--json"]));
    let found = common::printed(&["run"], &ran.out);
    assert_eq!((ran.code, &found["exit_code"]), (Some(1), &json!(1)));
    assert!(found["error"].as_str().is_some_and(|e| e.contains("none.onnx")), "{found}");
    assert!(ran.err.contains("error: "), "{}", ran.err);
    for flag in [&["--json"][..], &["--format", "json"], &["--format=json"]] {
        let ran = finish(program(&[&["run", "graphs/mlp.onnxtxt", "--nothing"], flag].concat()));
        let found = common::printed(&["run"], &ran.out);
        assert_eq!((ran.code, &found["exit_code"]), (Some(1), &json!(1)));
        assert!(found["error"].as_str().is_some_and(|e| e.starts_with("unexpected argument '--nothing'")), "{found}");
    }
    assert!(finish(program(&["run", "--nothing", "--", "--json"])).out.is_empty());
}

/// Each command's JSON is what its schema says: those that no other test runs with --json are run here.
#[test]
fn what_is_printed_is_as_its_schema_says() {
    let folder = Folder::new("schemas");
    let saved = folder.path("plan.json");
    let rows = folder.file("rows.csv", "id,lower,upper,size\na,0,2,4\nb,2,5,6\n");
    let (page, wasm) = (folder.path("page.html"), folder.file("library.wasm", b"\0asm\x01\0\0\0"));
    let mlp = |command: &'static str| [&[command], MLP].concat();
    ok(&[&mlp("plan"), &["-o", &saved]]);
    let train = ["train", "graphs/digits-fresh.onnx", "--data", "graphs/digits-train-images.npy"];
    let method =
        ["--labels", "graphs/digits-train-labels.npy", "--loss", "cross_entropy", "--lr", "0.01", "--batch", "48"];
    let runs: [Vec<&str>; 18] = [
        vec!["inspect", DIGITS[0]],
        [&mlp("run")[..], CPU, &["--iters", "2", "--placement"]].concat(),
        [&mlp("plan")[..], &["--memory-limit", "1GiB", "--advise", "--placement", "--mesh", "data=3"]].concat(),
        vec!["place", &rows, "--capacity", "16"],
        vec!["check", &saved],
        vec!["diff", &saved, &saved],
        vec!["max-batch", MLP[0], "--memory-limit", "1MiB"],
        vec!["fit", MLP[0], "--batch", "8", "--target", "cpu", "--memory-limit", "1MiB", "--cards", "2"],
        [&mlp("compare")[..], CPU, &["--iters", "1"]].concat(),
        [&mlp("bench")[..], CPU, &["--iters", "2", "--steps"]].concat(),
        [&train[..], &method, CPU, &["--steps", "1"]].concat(),
        [&mlp("emit")[..], &["wgsl"]].concat(),
        vec!["devices"],
        vec!["web", "-o", &page, "--wasm", &wasm],
        vec!["ops"],
        vec!["completions", "bash"],
        vec!["man", "run"],
        vec!["schema", "run"],
    ];
    for args in &runs {
        ok_json(&[args]);
    }
    let all = ok_json(&[&["schema"]]);
    let roots = all["anyOf"].as_array().expect("one for each command").iter();
    let roots: Vec<_> =
        roots.map(|root| root["$ref"].as_str().expect("a name").trim_start_matches("#/$defs/")).collect();
    let (error, commands) = roots.split_last().expect("there are commands");
    // `tune` writes to a cache: its tests have their own.
    let others: Vec<_> = commands.iter().filter(|command| !runs.iter().any(|args| args[0] == **command)).collect();
    assert_eq!((*error, commands.len(), others), ("error", runs.len() + 1, vec![&"tune"]));
    let one = ok_json(&[&["schema", "inspect"]]);
    assert_eq!(
        (&one["$schema"], &one["title"]),
        (&json!("https://json-schema.org/draft/2020-12/schema"), &json!("plimsoll inspect --json"))
    );
    assert!(one["$defs"].get("data_file").is_some() && one["$defs"].get("tensor").is_none(), "{one}");
    fails(1, &[&["schema", "sail"]], &["schema sail: no such command; the commands: inspect, run"]);
}

/// A record that is not as its schema says is seen.
#[test]
fn records_of_another_form_are_seen() {
    let all = ok_json(&[&["schema"]]);
    let records = all["$defs"].as_object().expect("it defines records");
    let found = ok_json(&[&["inspect", MLP[0]]]);
    let refused = |edit: &dyn Fn(&mut Value)| {
        let mut other = found.clone();
        edit(&mut other);
        common::conforms(&other, &records["inspect"], records).expect_err("it is of another form")
    };
    assert_eq!(refused(&|found| found["more"] = json!(1)), "more is not known");
    assert_eq!(
        refused(&|found| _ = found.as_object_mut().expect("a record").remove("weights")),
        "\"weights\" is missing"
    );
    assert_eq!(refused(&|found| found["weights"] = json!(1.5)), "weights: expected \"integer\", found 1.5");
    let lacks = refused(&|found| found["operators"][0]["lacks"] = json!(1));
    assert!(lacks.starts_with("operators: #/$defs/operator: lacks: none of: "), "{lacks}");
    assert!(refused(&|found| *found = json!([])).contains("\"object\""));
}

/// Two ways to compute a graph agree, or the first node that differs is named.
#[test]
fn a_graph_is_compared_across_devices() {
    let across = ["--across", "cpu,reference"];
    for model in GRAPHS {
        let found = ok_json(&[&["compare"], *model, &across]);
        assert_eq!((&found["first"], &found["devices"][0]), (&Value::Null, &json!("the reference in f64")));
        assert!(
            found["nodes"].as_u64() > Some(3) && !found["outputs"].as_array().expect("a list").is_empty(),
            "{found}"
        );
    }
    let told = ok(&[&["compare"], MLP, &across, &["--threads", "2"]]);
    for words in ["graphs/mlp.onnxtxt (batch=3) on the reference in f64 and cpu, 2 threads", "scores", "nodes agree"] {
        assert!(told.contains(words), "{words}: {told}");
    }
    if common::backends().iter().any(|(name, _)| *name == "wgpu") {
        for model in GRAPHS {
            let found = ok_json(&[&["compare"], *model, &["--across", "cpu,wgpu"]]);
            assert!(found["devices"][1].as_str().is_some_and(|name| name.starts_with("wgpu, ")), "{found}");
        }
    }
    // Relu of f32 is exact, a product is not.
    let folder = Folder::new("across");
    let source = text("float[64, 64] x", "float[64, 64] y", "r = Relu (x)\np = MatMul (r, r)\ny = Neg (p)");
    let model = folder.file("rounds.onnxtxt", source);
    let exact = ["--rtol", "0", "--atol", "0"];
    let words = ["rounds.onnxtxt", "node 'p' (MatMul) is the first of 3 that differs: value 'p'"];
    fails(3, &[&["compare", &model], &across, &exact], &words);
    let ran = finish(program(&[&["compare", &model, "--json"][..], &across, &exact].concat()));
    let found = common::printed(&["compare"], &ran.out);
    assert_eq!(
        (ran.code, &found["first"]["value"], &found["first"]["operator"]),
        (Some(3), &json!("p"), &json!("MatMul"))
    );
    ok(&[&["compare", &model], &across, &["--rtol", "0", "--atol", "1"]]);
    // States begin anew for each.
    let counter = text("float[2] x, float[2] total", "float[2] next", "next = Add (total, x)");
    let counter = folder.file("counter.onnxtxt", counter);
    ok(&[&["compare", &counter, "--state", "total=next"], &across]);
    for flags in [&["--backend", "cpu"][..], &["--poison"], &["--iters", "2"], &["--html", "x.html"]] {
        fails(1, &[&["compare"], MLP, &across, flags], &["compare --across <A,B>", flags[0]]);
    }
    fails(1, &[&["compare"], MLP, &["--across", "cpu,tpu"]], &["expected cpu, cuda, wgpu or reference, found 'tpu'"]);
    fails(1, &[&["compare"], MLP, CPU, &["--rtol", "1"]], &["--across"]);
}

/// The steps of a run have times of their own, in a table, in JSON and in a page.
#[test]
fn steps_are_timed() {
    let folder = Folder::new("steps");
    let page = folder.path("page.html");
    let args: &[&[&str]] =
        &[&["bench", "graphs/digits.onnx", "--set", "batch=16", "--iters", "3", "--steps", "--html", &page], CPU];
    let found = ok_json(args);
    let plan = ok_json(&[&["plan", "graphs/digits.onnx", "--set", "batch=16", "--placement"]]);
    let steps = found["steps"].as_array().expect("a list");
    assert_eq!(steps.len(), plan["programs"][0]["steps"].as_array().expect("a list").len());
    let mut shares = 0.0;
    for (number, (step, placed)) in
        steps.iter().zip(plan["programs"][0]["placement"].as_array().expect("a list")).enumerate()
    {
        assert_eq!((&step["step"], &step["node"]), (&json!(number), &placed["node"]));
        assert!(
            step["algorithm"].as_str().is_some_and(|own| own.starts_with(placed["kernel"].as_str().expect("text"))),
            "{step}"
        );
        assert!(step["median_us"].as_f64() > Some(0.0) && step["bytes"].as_u64() > Some(0), "{step}");
        shares += step["share"].as_f64().expect("a share");
    }
    assert!((shares - 1.0).abs() < 1e-9, "{shares}");
    let text = ok(args);
    let rows: Vec<&str> = text.lines().skip_while(|line| !line.starts_with("step ")).take(1 + steps.len()).collect();
    assert!(rows[0].ends_with("share") && rows.iter().any(|row| row.contains("/stem/stem.2/Relu")), "{text}");
    assert!(text.contains("all steps, one after another: "), "{text}");
    let drawn = std::fs::read_to_string(&page).expect("it is written");
    let data = drawn.split_once("id=\"data\">").expect("it has data").1.split_once("</script>").expect("it ends").0;
    let data = parsed(data);
    assert_eq!(data["scenes"][0]["times"].as_array().map(Vec::len), Some(steps.len()));
    assert!(
        data["title"].as_str().is_some_and(|title| title.contains("(batch=16) on cpu, 2 threads")),
        "{}",
        data["title"]
    );
    // Beside the rates of the device.
    let found = ok_json(&[args[0], CPU, &["--roofline"]]);
    let bounds: Vec<&str> =
        found["steps"].as_array().expect("a list").iter().filter_map(|s| s["bound"].as_str()).collect();
    assert_eq!(bounds.len(), steps.len());
    assert!(bounds.contains(&"products") && bounds.contains(&"copies"), "{bounds:?}");
    let text = ok(&[args[0], CPU, &["--roofline"]]);
    assert!(text.contains("of the roof") && text.contains(" % of products"), "{text}");
}

/// An item is what a batch has several of: rows that the inputs share, or that one shares with the outputs.
#[test]
fn items_are_rows_of_a_batch() {
    let folder = Folder::new("items");
    let of = |inputs: &str, outputs: &str, body: &str| {
        let model = folder.file("m.onnxtxt", text(inputs, outputs, body));
        let found = ok_json(&[&["bench", &model, "--iters", "1"], CPU]);
        found["items_per_second"]
            .as_f64()
            .map(|items| (items / found["runs_per_second"].as_f64().expect("a rate")).round())
    };
    assert_eq!(
        of("float[4, 2] a, float s, float[4] b", "float[2, 4] y", "c = Transpose (a)\nd = Mul (c, s)\ny = Add (d, b)"),
        Some(4.0)
    );
    assert_eq!(of("float[3, 3] w, float[5, 3] x", "float[5, 3] y", "y = MatMul (x, w)"), Some(5.0));
    assert_eq!(
        of("float[2, 3] a, float[3, 2] b", "float[2, 2] y, float[3, 3] z", "y = MatMul (a, b)\nz = MatMul (b, a)"),
        None
    );
    assert_eq!(of("float s", "float y", "y = Neg (s)"), None);
}

#[test]
fn sizes_have_units() {
    for size in ["1TB", "1.5GB", "900MiB"] {
        ok(&[&["plan"], MLP, &["--memory-limit", size]]);
    }
    for size in ["64KiB", "0.5k", "1.5kB"] {
        fails(2, &[&["plan"], MLP, &["--assert-bytes", size]], &["bytes"]);
    }
    for size in ["1.5", "2.0B", "1XB", "1,5MiB", ",500", "1.0,5MiB", "12,34,567"] {
        fails(1, &[&["plan"], MLP, &["--memory-limit", size]], &["--memory-limit", size]);
    }
}

/// A size serves as a limit as it is printed: exactly, or rounded up.
#[test]
fn what_a_plan_takes_can_be_given_as_its_limit() {
    let plan = ok(&[&["plan"], MLP]);
    let line = plan.lines().find(|line| line.starts_with("planned")).expect("the first figure");
    let words: Vec<_> = line.split_whitespace().collect();
    let [_, number, unit, exact, ..] = words[..] else { panic!("four words: {line}") };
    for size in [format!("{number}{unit}"), format!("{number} {unit}"), exact.to_owned(), format!("{exact} bytes")] {
        ok(&[&["plan"], MLP, &["--memory-limit", &size]]);
    }
    let less = exact.replace(',', "").parse::<u64>().expect("a number") - 1;
    fails(2, &[&["plan"], MLP, &["--memory-limit", &report::grouped(less)]], &["(1 over)"]);
    assert_eq!(report::human((1 << 20) + 1), "1.01 MiB");
    assert_eq!((report::human(3 << 19), report::human((1 << 20) - 1)), ("1.50 MiB".into(), "1.00 MiB".into()));
}

/// Outputs are judged by their peak, unless a tolerance is given for each element. Types of one kind are compared.
#[test]
fn outputs_are_judged_by_their_peak() {
    let folder = Folder::new("peak");
    let model = folder.file("m.onnxtxt", text("float[2, 2] x", "float[2, 2] y", "y = Neg (x)"));
    let array = |name: &str, dtype: DType, values: &[f64]| {
        let path = folder.path(name);
        npy::write(Path::new(&path), &Tensor::from_f64(dtype, [2, 2], values)).expect("it is written");
        path
    };
    let x = format!("x={}", array("x.npy", DType::F32, &[-1.0, -1000.0, -0.25, -0.5]));
    let run = ["run", &model, "--backend", "cpu", "--input", &x];
    let near = format!("y={}", array("near.npy", DType::F64, &[1.05, 1000.0, 0.25, 0.5]));
    let far = format!("y={}", array("far.npy", DType::F64, &[1.0, 1000.0, 0.5, 0.5]));
    let text = ok(&[&run, &["--expect", &near]]);
    assert!(text.contains("as expected") && text.contains("[0, 0]") && text.contains("1 run in "), "{text}");
    let found = ok_json(&[&run, &["--expect", &near]]);
    assert_eq!(found["expected"][0]["at"], json!([0, 0]));
    assert!((found["expected"][0]["of_peak"].as_f64().expect("a number") - 5e-5).abs() < 1e-9, "{found}");
    assert!(found["seconds"].as_f64().is_some_and(|s| s > 0.0) && found["file"] == json!(model), "{found}");
    fails(3, &[&run, &["--expect", &far]], &["'y'", "2.500e-4 of the peak 1000", "[1, 0]", "expected 0.5, found 0.25"]);
    fails(3, &[&run, &["--expect", &near, "--rtol", "1e-3"]], &["'y'", "rtol 0.001", "expected 1.05, found 1"]);
    ok(&[&run, &["--expect", &far, "--atol", "0.5"]]);
    fails(3, &[&run, &["--expect", "y=2x2xi64=0"]], &["expected i64[2,2], found f32[2,2]"]);
    // Zeros have no peak: rounding is within 1e-5 of them.
    let tiny = |value: &str, expected: &str| {
        let input = format!("x=2x2xf32={value}");
        [&["run", &model, "--backend", "cpu", "--input"][..], &[&input, "--expect", expected]].concat().join(" ")
    };
    ok(&[&tiny("1e-6", "y=2x2xf32=0").split(' ').collect::<Vec<_>>()]);
    fails(3, &[&tiny("1e-4", "y=2x2xf32=0").split(' ').collect::<Vec<_>>()], &["4 of 4 elements", "expected 0"]);
    // Integers are equal, or they differ.
    let ids = folder.file("ids.onnxtxt", self::text("int64[2] x", "int64[2] y", "y = Identity (x)"));
    let run_ids = ["run", &ids, "--backend", "cpu", "--input", "x=2xi64=50000"];
    ok(&[&run_ids, &["--expect", "y=2xi32=50000"]]);
    fails(3, &[&run_ids, &["--expect", "y=2xi64=50001"]], &["expected 50001, found 50000"]);
    ok(&[&run_ids, &["--expect", "y=2xi64=50001", "--atol", "1"]]);
    fails(1, &[&["run", &ids, "--input", "x=2xi64=random:0..9007199254740993"]], &["random:0..9007199254740993"]);
    // A type that has every element is as good.
    let wide = format!("x={}", array("wide.npy", DType::F64, &[-1.0, -1000.0, -0.25, -0.5]));
    ok(&[&["run", &model, "--backend", "cpu", "--input", &wide, "--expect", &near]]);
    let finer = format!("x={}", array("finer.npy", DType::F64, &[-0.1, 0.0, 0.0, 0.0]));
    fails(1, &[&["run", &model, "--backend", "cpu", "--input", &finer]], &["'x'", "expected f32[2,2], found f64[2,2]"]);
}

/// What shapes the computation is bound from --input, and random integers have a range.
#[test]
fn inputs_shape_the_computation_and_look_up_rows() {
    let folder = Folder::new("shaping");
    let source = text("float[2, 3] x, int64[1] axes", "y", "y = ReduceSum <keepdims = 0> (x, axes)");
    let model = folder.file("sum.onnxtxt", source.replace("20", "18"));
    for command in ["plan", "run"] {
        fails(1, &[&[command, &model]], &["'axes' must be known", "where their elements are given"]);
    }
    let on = ["--backend", "cpu", "--input", "x=2x3xf32=1"];
    ok(&[&["run", &model], &on, &["--input", "axes=1xi64=0", "--expect", "y=3xf32=2"]]);
    ok(&[&["run", &model], &on, &["--input", "axes=1xi32=1", "--expect", "y=2xf32=3"]]);
    let plan = ok_json(&[&["plan", &model, "--input", "axes=1xi64=1"]]);
    assert_eq!(plan["programs"][0]["inputs"].as_array().map(Vec::len), Some(1), "{plan}");
    let rows = folder.file("rows.onnxtxt", text("float[50, 2] t, int64[400] i", "y", "y = Gather (t, i)"));
    let ids = folder.file("ids.onnxtxt", self::text("int64[400] i", "y", "y = Identity (i)"));
    let most = |args: &[&str]| ok_json(&[args, &["--backend", "cpu"]])["outputs"][0]["max"].as_f64();
    let given = most(&["run", &ids, "--input", "i=400xi64=random:-3..9"]);
    assert_eq!(given, Some(9.0));
    ok(&[&["run", &rows, "--backend", "cpu", "--input", "i=400xi64=random:0..49"]]);
    fails(1, &[&["run", &rows, "--backend", "cpu", "--input", "i=400xi64=random:0..90"]], &["'i'", "from -50 to 49"]);
    fails(1, &[&["run", &rows, "--input", "i=400xi64=random:9..0"]], &["--input i=400xi64=random:9..0"]);
}

/// A report says which file it is about, and with which extents.
#[test]
fn reports_name_their_file_and_its_extents() {
    let folder = Folder::new("subjects");
    let model = "graphs/mlp.onnxtxt";
    let head = "graphs/mlp.onnxtxt (batch=3) ";
    let given = ["--input", "x=3x784xf32=1"];
    for command in ["run", "bench", "compare", "tune"] {
        let again: &[&str] = match command {
            "run" => &[],
            "tune" => &["--seconds", "1"],
            _ => &["--iters", "1"],
        };
        for dims in [&MLP[1..], &given] {
            let mut ran = program(&[&[command, model], dims, CPU, again].concat());
            ran.env("PLIMSOLL_CACHE_DIR", folder.path("cache"));
            let ran = finish(ran);
            assert!(ran.out.starts_with(&format!("{head}on cpu")), "{command}: {}{}", ran.out, ran.err);
        }
    }
    for command in [&["run"][..], &["plan"], &["bench", "--iters", "1"], &["compare", "--iters", "1"]] {
        let on: &[&str] = if command[0] == "plan" { &[] } else { CPU };
        let found = ok_json(&[command, MLP, on]);
        assert_eq!((&found["file"], &found["binding"]), (&json!(model), &json!({"batch": 3})), "{command:?}");
    }
    assert!(ok(&[&["plan"], MLP]).starts_with(&format!("{head}for cpu, 2 steps\n")));
    let [page, picture] = ["p.html", "p.svg"].map(|name| folder.path(name));
    ok(&[&["plan"], MLP, &["--html", &page, "--svg", &picture]]);
    for file in [&page, &picture] {
        let drawn = std::fs::read_to_string(file).expect("it is drawn");
        assert!(drawn.contains(&format!("{head}on cpu")), "{file}");
    }
    ok(&[&["compare", "--iters", "1", "--html", &page], MLP, CPU]);
    let drawn = std::fs::read_to_string(&page).expect("it is drawn");
    assert!(drawn.contains(&format!("<title>{head}on cpu: eager and planned</title>")));

    // Of a range, the binding that runs.
    let range = [model, "--set", "batch=1..8"];
    assert_eq!(ok_json(&[&["plan"], &range])["binding"], json!({"batch": "1..8"}));
    assert_eq!(ok_json(&[&["run"], &range, CPU, &given])["binding"], json!({"batch": 3}));
    assert!(ok(&[&["max-batch", model, "--memory-limit", "64MiB"]]).starts_with("graphs/mlp.onnxtxt for cpu\n"));
    let train = ["max-batch", "--train", "graphs/linear.onnxtxt", "--loss", "mse", "--memory-limit", "1MiB"];
    let found = ok_json(&[&train]);
    assert_eq!((&found["file"], &found["model"]), (&json!("graphs/linear.onnxtxt"), &json!("linear")));
    let both = ["plan", "a=graphs/mlp.onnxtxt", "b=graphs/mlp.onnxtxt", "--set", "a:batch=1", "--set", "b:batch=2"];
    let head = "a=graphs/mlp.onnxtxt, b=graphs/mlp.onnxtxt (a:batch=1 b:batch=2) for cpu, 2 programs\n";
    assert!(ok(&[&both]).starts_with(head), "{}", ok(&[&both]));
    assert_eq!(ok_json(&[&both])["files"], json!(["a=graphs/mlp.onnxtxt", "b=graphs/mlp.onnxtxt"]));
}

/// Open dims that nothing binds are 1, which the heading, the log or the record says.
#[test]
fn dims_that_nobody_gives_are_one() {
    let folder = Folder::new("assumed");
    let note = "batch=1, as none was given; --set batch=N";
    for command in [&["plan"][..], &["run"], &["bench", "--iters", "1"], &["compare", "--iters", "1"]] {
        let on: &[&str] = if command[0] == "plan" { &[] } else { CPU };
        let head = format!("graphs/mlp.onnxtxt ({note}) ");
        assert!(ok(&[command, &["graphs/mlp.onnxtxt"], on]).starts_with(&head), "{command:?}");
        let found = ok_json(&[command, &["graphs/mlp.onnxtxt"], on]);
        assert_eq!((&found["assumed"], &found["binding"]), (&json!(["batch"]), &json!({"batch": 1})), "{command:?}");
        let found = ok_json(&[command, MLP, on]);
        assert!(found["assumed"].is_null(), "{found}");
    }
    let one = ["emit", "graphs/mlp.onnxtxt", "dot"];
    assert_eq!(ok(&[&one]), ok(&[&one, &["--set", "batch=1"]]));
    assert!(finish(program(&one)).err.contains(note));

    // What flags, shapes of inputs and ranges bind stays so.
    let head = |args: &[&[&str]]| ok(args).lines().next().expect("a heading").to_owned();
    let attention = ["plan", "graphs/attention.onnxtxt"];
    let found = head(&[&attention, &["--set", "batch=1..4"]]);
    assert!(found.contains(" (batch=1..4; sequence=1, as none was given; --set sequence=N) for cpu"), "{found}");
    assert!(head(&[&["plan", "graphs/mlp.onnxtxt", "--shape", "x=4x784"]]).contains(" (x.0=4 x.1=784) for cpu"));
    let given = ["plan", "graphs/mlp.onnxtxt", "--input", "x=3x784xf32=0"];
    assert!(head(&[&given]).contains(" (batch=3) for cpu"));
    // A mask has a column for each row of a cache and for each new one.
    let decoder = ok_json(&[&["plan", "graphs/decoder/model.onnxtxt"]]);
    assert_eq!(decoder["assumed"], json!(["batch", "past_sequence", "sequence"]));

    // A saved plan has them as any other.
    let saved = folder.path("plan.json");
    ok(&[&["plan", "graphs/mlp.onnxtxt", "-o", &saved]]);
    let found = ok_json(&[&["run", &saved, "--model", "graphs/mlp.onnxtxt"], CPU]);
    assert_eq!((&found["assumed"], &found["binding"]), (&Value::Null, &json!({"batch": 1})));

    // Of several programs, and of a training.
    let both = ["plan", "a=graphs/mlp.onnxtxt", "b=graphs/mlp.onnxtxt"];
    assert!(head(&[&both]).contains(&format!(" ({note}) for cpu")));
    let found = head(&[&both, &["--set", "a:batch=2"]]);
    assert!(found.contains(" (a:batch=2; b:batch=1, as none was given; --set b:batch=N) for cpu"), "{found}");
    let train = folder.file(
        "sum.onnxtxt",
        text("float[batch, length, 4] x", "float[batch, length, 2] y", "y = MatMul (x, w)")
            .replace("\n{", "\n<float[4, 2] w = {1, 2, 3, 4, 5, 6, 7, 8}>\n{"),
    );
    let train = ["plan", "--train", &train, "--loss", "mse", "--batch", "8"];
    assert!(head(&[&train]).contains("(length=1, as none was given; --set length=N)"), "{}", head(&[&train]));
    assert!(ok_json(&[&train, &["--set", "length=3"]])["assumed"].is_null());

    // Where 1 does not do, the flag that sets another is named.
    let even = "float[batch, n] x";
    let even = folder
        .file("even.onnxtxt", text(even, "float[m] y", "s = Constant<value_ints = [-1, 2]> ()\ny = Reshape (x, s)"));
    fails(
        1,
        &[&["plan", &even]],
        &["even.onnxtxt", "(Reshape)", "batch=1 n=1, as none was given; --set batch=N --set n=N"],
    );
}

/// What is missing is named by its flag.
#[test]
fn flags_that_are_missing_are_named() {
    let train = ["train", "graphs/linear.onnxtxt", "--data", "x.npy", "--labels", "y.npy", "--loss", "mse"];
    fails(1, &[&train, &["--lr", "0.1", "--batch", "8"]], &["--steps <N>", "--epochs <E>"]);
    let both = ["--lr", "0.1", "--batch", "8", "--steps", "1", "--epochs", "1"];
    fails(1, &[&train, &both], &["--steps", "--epochs", "cannot be used with"]);
    for command in ["plan", "compare", "bench"] {
        fails(1, &[&[command, "--train", "graphs/linear.onnxtxt", "--loss", "mse"]], &["--batch <B>"]);
        fails(1, &[&[command, "--train", "graphs/linear.onnxtxt", "--batch", "8"]], &["--loss <LOSS>"]);
        let tip = &["these flags are of a training, which --train asks for"];
        fails(1, &[&[command, "graphs/digits.onnx", "--optimizer", "sgd"]], tip);
    }
}

/// A plan for the device that is here is that for its target.
#[test]
fn a_plan_is_for_the_device_of_a_backend() {
    let plan = |flags: &[&str]| ok_json(&[&["plan"], MLP, flags]);
    assert_eq!(plan(&["--backend", "cpu", "--threads", "3"]), plan(&["--target", "cpu", "--threads", "3"]));
    let run = finish(program(&[&["run"], MLP, &["--json"]].concat()));
    let auto = plan(&["--backend", "auto"]);
    assert_eq!(auto["planned_bytes"], parsed(&run.out)["memory"]["planned_bytes"], "{auto}");
}

/// --batch binds the dim that leads the inputs, of each program its own.
#[test]
fn a_batch_is_the_dim_that_leads_the_inputs() {
    for command in [&["plan"][..], &["run"], &["bench", "--iters", "1"], &["compare", "--iters", "1"]] {
        let on: &[&str] = if command[0] == "plan" { &[] } else { CPU };
        let binding = |flags: &[&str]| ok_json(&[command, flags, on])["binding"].clone();
        assert_eq!(binding(&["graphs/mlp.onnxtxt", "--batch", "3"]), json!({"batch": 3}), "{command:?}");
        let attention = ["graphs/attention.onnxtxt", "--batch", "2", "--set", "sequence=4"];
        assert_eq!(binding(&attention), json!({"sequence": 4, "batch": 2}), "{command:?}");
        fails(1, &[command, MLP, on, &["--batch", "3"]], &["--batch 3: --set batch=3 binds the same dim"]);
    }
    let folder = Folder::new("batch");
    let fixed = folder.file("fixed.onnxtxt", text("float[8, n] x", "float[8, n] y", "y = Neg (x)"));
    fails(
        1,
        &[&["plan", &fixed, "--batch", "2"]],
        &["fixed.onnxtxt", "leads the inputs", "x f32[8,n]", "export it with dynamic_shapes"],
    );
    let body = "z = Add (x, y)";
    let two = folder.file("two.onnxtxt", text("float[n, 4] x, float[m, 4] y", "float[k, 4] z", body));
    fails(1, &[&["plan", &two, "--batch", "2"]], &["two.onnxtxt", "'m', 'n'", "--set m=N --set n=N"]);
    let other = folder.file("other.onnxtxt", text("float[rows, 4] x", "float[rows, 4] y", "y = Neg (x)"));
    let both = ok_json(&[&["plan", "a=graphs/mlp.onnxtxt", &format!("b={other}"), "--batch", "5"]]);
    assert_eq!(both["binding"], json!({"a:batch": 5, "b:rows": 5}));
    let plan = folder.path("plan.json");
    ok(&[&["plan", "graphs/mlp.onnxtxt", "--batch", "5", "-o", &plan]]);
    let run = ["run", &plan, "--model", "graphs/mlp.onnxtxt"];
    assert_eq!(ok_json(&[&run, CPU])["binding"], json!({"batch": 5}));
    fails(1, &[&run, CPU, &["--batch", "5"]], &["--batch: a saved plan has its own extents"]);
}

/// One of a kind is no plural, and digits stand in groups.
#[test]
fn figures_read_as_people_write_them() {
    let folder = Folder::new("figures");
    let model = folder.file("one.onnxtxt", text("float[1024, 1024] x", "float[1024, 1024] y", "y = Neg (x)"));
    let planned = ok(&[&["plan", &model]]);
    assert!(planned.lines().next().is_some_and(|head| head.ends_with(" for cpu, 1 step")), "{planned}");
    assert!(ok(&[&["bench", &model, "--iters", "1"], CPU]).contains("1 run "));
    let words = &["needs 4,", " bytes, the limit is 1,048,576 bytes"];
    fails(2, &[&["plan", &model, "--memory-limit", "1M"]], words);
    let expected = folder.path("y.npy");
    let mut values = vec![0.0; 1 << 20];
    values[1024 * 3 + 5] = 7.0;
    npy::write(Path::new(&expected), &Tensor::from_f64(DType::F32, [1024, 1024], &values)).expect("it is written");
    let zeros = ["--input", "x=1024x1024xf32=0", "--expect", &format!("y={expected}"), "--atol", "0.1"];
    fails(3, &[&["run", &model], CPU, &zeros], &["1 of 1048576 elements", "worst at [3, 5]: expected 7"]);
}

/// Flags stand in groups, behind them three examples; a wrong flag gets no tip that is wrong for it.
#[test]
fn help_teaches() {
    let help = ok(&[&["run", "--help"]]);
    for words in ["The model:", "Inputs:", "Memory:", "The device:", "Output:", "Examples:\n  plimsoll run model.onnx"]
    {
        assert!(help.contains(words), "{words} missing in\n{help}");
    }
    let short = |args: &[&str]| {
        let help = ok(&[args, &["-h"]]);
        let flags = |line: &&str| line.trim_start().starts_with('-') && line.starts_with(' ');
        (help.lines().take_while(|line| !line.starts_with("Examples")).filter(flags).count(), help)
    };
    let (first, help) = short(&["plan"]);
    assert!((8..=14).contains(&first) && !help.contains("--optimizer") && !help.contains("--shape"), "{first}: {help}");
    assert!(
        help.contains(
            "`plimsoll plan --help` has all flags and targets, `plimsoll plan --train -h` those of a training"
        )
    );
    let (all, trained) = short(&["plan", "--train"]);
    assert!(all > first + 15 && trained.contains("--optimizer") && !trained.contains("--shape"), "{all}: {trained}");
    let long = ok(&[&["plan", "--help"]]);
    let places = ["<MODEL>", "The model:", "--memory-limit <", "--optimizer <", "--html <"].map(|word| long.find(word));
    assert!(places.is_sorted() && places[0].is_some() && long.contains("--shape"), "{places:?}");
    let target = ok(&[&["plan", "--help"]]);
    assert!(target.contains("Examples:\n") && target.contains("\nTargets:\n"), "{target}");
    let ran = finish(program(&["run", "graphs/mlp.onnxtxt", "--inptu", "x"]));
    assert!(ran.err.contains("'--inptu'") && ran.err.contains("--input"), "{}", ran.err);
    let ran = finish(program(&["inspect", "graphs/mlp.onnxtxt", "--input", "x"]));
    assert!(ran.code == Some(1) && ran.err.contains("unexpected argument '--input'"), "{}", ran.err);
    assert!(!ran.err.contains("as a value"), "{}", ran.err);
}

#[test]
fn completions_and_manual_pages_are_printed() {
    for (shell, words) in [("bash", "complete -F"), ("zsh", "#compdef plimsoll"), ("fish", "complete -c plimsoll")] {
        let text = ok(&[&["completions", shell]]);
        assert!(text.contains(words) && text.contains("max-batch") && text.contains("memory-limit"), "{shell}");
        assert_eq!(ok_json(&[&["completions", shell]]), json!({"form": shell, "text": text}));
    }
    assert!(ok(&[&["man"]]).contains(".TH plimsoll 1"));
    assert!(ok(&[&["man", "max-batch"]]).contains("memory\\-limit"));
    fails(1, &[&["completions", "abacus"]], &["abacus", "bash"]);
    fails(1, &[&["man", "sail"]], &["no such command", "max-batch"]);
}

/// `-q` logs errors alone, `-v` passes and placements, too.
#[test]
fn the_log_is_as_long_as_is_asked_for() {
    let log = |flags: &[&str]| finish(program(&[&["run"], MLP, CPU, flags].concat())).err;
    assert_eq!(log(&["-q"]), "");
    assert!(log(&["-v"]).len() > log(&[]).len() && log(&[]).contains("backend: cpu"));
    assert!(log(&["-v"]).contains("DEBUG"), "{}", log(&["-v"]));
    // -v of `plan` is for its report.
    let plan = |flags: &[&str]| finish(program(&[&["plan"], MLP, flags].concat())).err;
    assert_eq!(plan(&["-v"]), plan(&[]));
    let wrong = finish(program(&["run", "-q", "graphs/none.onnx"])).err;
    assert!(wrong.starts_with("error: "), "{wrong}");
    fails(1, &[&["ops", "-q", "-v"]], &["--quiet", "--verbose"]);
}

/// Times of runs have shares and rates, and a time to run for.
#[test]
fn runs_are_timed_for_a_time() {
    let found = ok_json(&[&["bench", "--duration", "50ms"], MLP, CPU]);
    let number = |key: &str| found[key].as_f64().unwrap_or_else(|| panic!("{key} in {found}"));
    let times = ["min_ms", "median_ms", "p90_ms", "p99_ms", "max_ms"].map(number);
    assert!(times.is_sorted() && times[0] > 0.0, "{times:?}");
    assert!((number("runs_per_second") * number("median_ms") - 1e3).abs() < 1e-6, "{found}");
    assert!((number("items_per_second") - 3.0 * number("runs_per_second")).abs() < 1e-6, "{found}");
    assert!(number("iters") >= 1.0 && number("iters") * number("max_ms") >= 40.0, "{found}");
    let text = ok(&[&["bench", "--iters", "2"], MLP, CPU]);
    assert!(text.contains("2 runs") && text.contains("99 %") && text.contains("items; a run has 3 items"), "{text}");
    fails(1, &[&["bench", "--iters", "2", "--duration", "1s"], MLP], &["--iters", "--duration"]);
    fails(1, &[&["bench", "--duration", "1h"], MLP], &["ms, s or min"]);
}

/// In a workflow, what takes too much or more than before is an annotation.
#[test]
#[cfg(unix)]
fn workflows_have_annotations() {
    let folder = Folder::new("github");
    let [small, large] = ["small.json", "large.json"].map(|name| folder.path(name));
    ok(&[&["plan"], MLP, &["-o", &small]]);
    ok(&[&["plan", MLP[0], "--set", "batch=300", "-o", &large]]);
    let github = ["--format", "github"];
    let ran = finish(program(&[&["plan"], MLP, &["--assert-bytes", "64KiB"], &github].concat()));
    let first = format!("::error file={},title=Memory does not fit::{}: does not fit: --assert-bytes", MLP[0], MLP[0]);
    assert!(
        ran.code == Some(2) && ran.out.starts_with(&first) && ran.out.contains("%0Alive at the peak"),
        "{}",
        ran.out
    );
    assert_eq!(ran.out.lines().count(), 1);
    let grown = ok(&[&["diff", &small, &large], &github]);
    assert!(grown.starts_with(&format!("::warning file={large},title=Memory%3A ")), "{grown}");
    assert!(
        grown.lines().next().is_some_and(|line| line.contains(" more::")) && grown.contains("\ntook more"),
        "{grown}"
    );
    assert!(ok(&[&["diff", &large, &small], &github]).starts_with("::notice "));
    assert!(ok(&[&["diff", &small, &small], &github]).contains("title=Memory%3A as before::"));

    // The action does the same.
    let action = |limit: &str, baseline: &str| {
        let bin = Path::new(env!("CARGO_BIN_EXE_plimsoll")).parent().expect("it is in a folder");
        let path = std::env::join_paths(
            std::iter::once(bin.to_owned()).chain(std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default())),
        );
        let mut command = Command::new("bash");
        command.arg(".github/actions/memory/check.sh").current_dir(env!("CARGO_MANIFEST_DIR"));
        command.envs([("MODEL", MLP[0]), ("FLAGS", "--set batch=3"), ("LIMIT", limit), ("BASELINE", baseline)]);
        command.env("PLAN", folder.path("plan.json")).env("PATH", path.expect("folders have no colons"));
        finish(command)
    };
    let refused = action("64KiB", "");
    assert!(refused.code == Some(2) && refused.out.starts_with(&first), "{}{}", refused.out, refused.err);
    let fits = action("1GiB", &large);
    assert!(fits.code == Some(0) && fits.out.contains("::notice "), "{}{}", fits.out, fits.err);
    assert_eq!(action("", "").code, Some(0));
}
