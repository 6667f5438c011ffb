//! The commands of the README and of the guide run and end as these say: one for each problem with device memory, and the others.

mod training;

use crate::common;
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// A folder to work in, with the project's graphs.
fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).expect("the folder is made");
    for file in std::fs::read_dir(from).expect("it is there") {
        let file = file.expect("it can be listed").path();
        let to = to.join(file.file_name().expect("a file has a name"));
        if file.is_file() {
            std::fs::copy(&file, to).expect("it is copied");
        } else {
            copy(&file, &to);
        }
    }
}

fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let graphs = folder.join("graphs");
    std::fs::create_dir_all(&graphs).expect("the folder is made");
    copy(&root().join("graphs"), &graphs);
    folder
}

/// A command's exit code, stdout and stderr.
fn run(folder: &Path, args: &[&str]) -> (Option<i32>, String, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_plimsoll")).args(args).current_dir(folder).output();
    let output = output.expect("the program starts");
    let text = |bytes| String::from_utf8(bytes).expect("the output is text");
    (output.status.code(), text(output.stdout), text(output.stderr))
}

fn json(name: &str, command: &str) -> Value {
    json_in(&folder(name), command)
}

/// What a command prints that runs in a folder.
fn json_in(folder: &Path, command: &str) -> Value {
    let args: Vec<&str> = command.split_whitespace().chain(["--json"]).collect();
    let (code, out, err) = run(folder, &args);
    assert_eq!(code, Some(0), "{command}: {err}");
    common::printed(&args, &out)
}

/// A column of a comparison.
fn column<'a>(comparison: &'a Value, name: &str) -> &'a Value {
    let columns = comparison["columns"].as_array().expect("it has columns");
    columns.iter().find(|column| column["name"] == name).unwrap_or_else(|| panic!("no column {name}"))
}

/// The commands of a page: what follows `plimsoll` in indented blocks, in those of `bash`, and in the steps of workflows.
fn commands(page: &str) -> Vec<String> {
    let text = std::fs::read_to_string(root().join(page)).expect("it is there");
    let fenced = text.split("```bash\n").skip(1).flat_map(|block| block.split("```").next()).flat_map(str::lines);
    let indented = text.lines().filter_map(|line| line.strip_prefix("    "));
    let steps = text.lines().filter_map(|line| line.trim_start().strip_prefix("- run: "));
    indented.chain(fenced).chain(steps).filter_map(|line| line.strip_prefix("plimsoll ")).map(str::to_owned).collect()
}

/// Each command of the README and of the guide, with the exit code in the comment after it. In a clone they leave files below `target` alone.
#[test]
fn the_readmes_commands_run() {
    // An earlier run may have left files there.
    let _ = std::fs::remove_dir_all(Path::new(env!("CARGO_TARGET_TMPDIR")).join("readme"));
    let folder = folder("readme");
    std::fs::create_dir_all(folder.join("target")).expect("the folder is made");
    let mut ran = BTreeSet::new();
    for (page, least) in [("README.md", 11), ("src/guide.md", 40)] {
        let commands = commands(page);
        assert!(commands.len() >= least, "{page} has {} commands", commands.len());
        for line in &commands {
            if !ran.insert(line.clone()) {
                continue;
            }
            let (command, comment) = line.split_once(" # ").unwrap_or((line, "exit code 0"));
            let expected = comment.strip_prefix("exit code ").and_then(|code| code.parse().ok());
            let words = command.split_whitespace().map(|word| word.trim_matches('\''));
            let (code, _, err) = run(&folder, &words.collect::<Vec<_>>());
            assert_eq!(code, expected, "{page}: plimsoll {command}: {err}");
        }
    }
    let there = |folder: &Path| -> BTreeSet<_> {
        let files = std::fs::read_dir(folder).expect("it is there");
        files.map(|file| file.expect("it can be listed").file_name()).collect()
    };
    assert_eq!(there(&folder), BTreeSet::from(["graphs".into(), "target".into()]));
    assert_eq!(there(&folder.join("graphs")), there(&root().join("graphs")));
}

/// 1: how much memory does it need?
#[test]
fn a_large_product_is_known_before_it_runs() {
    let plan = json("product", "plan graphs/product.onnxtxt --set n=10000");
    let segments = plan["segments"].as_array().expect("it has segments").iter();
    let bytes = segments.filter(|s| s["class"] != "backend").map(|s| s["bytes"].as_u64());
    assert_eq!(bytes.sum::<Option<u64>>(), Some(3 * 10_000 * 10_000 * 4));
    let own = |summary: &Value| summary["backend_bytes"].as_u64().expect("the threads have scratch memory");
    assert!(own(&plan["programs"][0]["summary"]) < 1 << 20, "{}", plan["programs"][0]["summary"]);
    let ran = json("product", "run graphs/product.onnxtxt --set n=320 --backend cpu --threads 2");
    assert_eq!(ran["memory"]["planned_bytes"], ran["memory"]["allocated_bytes"]);
    assert_eq!(ran["memory"]["planned_bytes"].as_u64(), Some(3 * 320 * 320 * 4 + own(&ran["memory"])));
}

/// 2: memory use that grows in a loop.
#[test]
fn the_last_run_has_the_bytes_of_the_first() {
    let found = json("loop", "compare graphs/mlp.onnxtxt --set batch=64 --iters 100 --backend cpu --threads 2");
    let direct = column(&found, "eager direct");
    assert!(direct["driver_calls_last"].as_u64().is_some_and(|calls| calls > 0), "{direct}");
    for name in ["planned", "planned fused"] {
        assert_eq!(column(&found, name)["driver_calls_last"], 0, "{found}");
    }
    let found = json("loop", "bench graphs/mlp.onnxtxt --set batch=64 --iters 100 --backend cpu --threads 2");
    assert_eq!(found["allocations_in_runs"], 0, "{found}");
    assert_eq!(found["planned_bytes"], found["allocated_bytes"]);
}

/// A decoder's cache stays on the device, in the bytes that were planned, from the first token to the thousandth.
#[test]
fn a_decoder_keeps_its_cache() {
    let generate = "graphs/generate.onnxtxt --set batch=2 --set capacity=1024 --state position=next_position";
    let append = "graphs/append.onnxtxt --set batch=2 --set past=0..1024";
    // Keys and values of two heads of 16 for both rows, and each row's token. Beside them each row's position, or the number of rows.
    let caches = 2 * 2 * 2 * 1024 * 16 * 4;
    for (name, sizes, bytes) in [("generate", generate, caches + 2 * 256), ("append", append, caches + 256 + 16)] {
        let states = "--state token=next_token --state past_*=present_*";
        let found = json(name, &format!("run {sizes} {states} --iters 1000 --backend cpu --threads 2"));
        let (runs, memory) = (&found["runs"], &found["memory"]);
        assert_eq!(runs["count"], 1000);
        assert_eq!(runs["allocated_bytes_first"], runs["allocated_bytes_last"], "{runs}");
        assert_eq!(memory["planned_bytes"], memory["allocated_bytes"], "{memory}");
        assert_eq!(memory["state_bytes"], bytes, "{memory}");
        let plan = json(name, &format!("plan {sizes} {states}"));
        let copies = plan["programs"][0]["steps"]
            .as_array()
            .expect("it has steps")
            .iter()
            .filter(|s| s["name"].as_str().unwrap_or("").starts_with("copy"));
        assert_eq!(copies.count(), 0);
    }
}

/// A decoder goes on in another process where its states were saved.
#[test]
fn states_outlive_the_process() {
    let model = "run graphs/append.onnxtxt --set batch=2 --set past=0..1024 --state token=next_token \
        --state past_*=present_* --backend cpu --threads 2";
    let run = |more: &str| json("outlive", &format!("{model} {more}"));
    let first = run("--iters 500 --save-states cache.safetensors");
    let second = run("--iters 500 --load-states cache.safetensors");
    let whole = run("--iters 1000");
    assert_eq!(second["states"], whole["states"]);
    assert_eq!(second["outputs"], whole["outputs"]);
    assert_ne!(first["states"], whole["states"]);
}

/// A server of one model keeps its weights once, whatever the batches that it answers.
#[test]
fn batches_share_their_weights() {
    let files = "small=graphs/digits.onnx large=graphs/digits.onnx --set small:batch=1 --set large:batch=64";
    let together = json("digits", &format!("plan {files}"));
    let bytes = |value: &Value, field: &str| value["summary"][field].as_u64().expect("it is a number");
    let alone = [1, 64].map(|batch| json("digits", &format!("plan graphs/digits.onnx --set batch={batch}")));
    let shared = &together["programs"][0];
    let alone = alone.map(|plan| plan["programs"][0].clone());
    assert_eq!(bytes(shared, "constant_bytes"), bytes(&alone[1], "constant_bytes"));
    assert_eq!(bytes(shared, "arena_bytes"), bytes(&alone[1], "arena_bytes"));
    assert_eq!(bytes(shared, "planned_bytes"), bytes(&alone[1], "planned_bytes"), "the smaller one costs nothing");
    let found = json("digits", &format!("run {files} --program small --backend cpu --threads 2"));
    assert_eq!(found["memory"]["planned_bytes"], found["memory"]["allocated_bytes"], "{found}");
}

/// Requests that are answered at once share the weights.
#[test]
fn runs_at_once_share_their_weights() {
    let model = "graphs/digits.onnx --set batch=64 --threads 1";
    let one = json("forks", &format!("plan {model}"));
    let bytes = |field: &str| one["programs"][0]["summary"][field].as_u64().expect("it is a number");
    let four = json("forks", &format!("plan {model} --forks 4"));
    let expected = bytes("constant_bytes") + 4 * (bytes("planned_bytes") - bytes("constant_bytes"));
    assert_eq!(four["programs"][0]["summary"]["planned_bytes"], expected);
    let found = json("forks", &format!("bench {model} --forks 2 --backend cpu --iters 3"));
    assert_eq!(found["planned_bytes"], found["allocated_bytes"], "{found}");
    assert_eq!(found["allocations_in_runs"], 0, "{found}");
}

/// 3: out of memory although enough bytes are free in total.
#[test]
fn what_fits_in_total_fits() {
    let limit = 30 << 20;
    let found = json(
        "fragments",
        "compare graphs/fragments.onnxtxt --set size=1000000 --memory-limit 30MiB --iters 1 --backend cpu --threads 2",
    );
    assert!(column(&found, "eager direct")["peak_live_bytes"].as_u64().is_some_and(|live| live <= limit));
    for name in ["eager caching", "eager bfc"] {
        let column = column(&found, name);
        assert!(column["does_not_fit"].is_string(), "{column}");
        assert!(column["smallest_device_bytes"].as_u64().is_some_and(|bytes| bytes > limit), "{column}");
    }
    let planned = column(&found, "planned");
    assert_eq!(planned["agreement"]["equal"], true, "{planned}");
    let own = planned["staging_bytes"].as_u64().expect("the threads have stacks");
    assert_eq!(planned["peak_reserved_bytes"].as_u64(), Some(16_000_516 + own), "{planned}");
    assert_eq!(planned["fragmentation"], 0.0, "{planned}");
}

/// 4: the first of a hundred calls takes as much memory as the others.
#[test]
fn the_first_run_has_its_memory() {
    let found =
        json("calls", "bench graphs/digits.onnx --set batch=64 --warmup 0 --iters 100 --backend cpu --threads 2");
    assert_eq!(found["allocations_in_runs"], 0, "{found}");
    assert_eq!(found["planned_bytes"], found["allocated_bytes"]);
    for key in ["first_ms", "median_ms"] {
        assert!(found[key].as_f64().is_some_and(|ms| ms > 0.0), "{found}");
    }
}

/// 5: which batch fits?
#[test]
fn the_batch_that_fits_is_found_by_planning() {
    let limit = 24u64 << 30;
    let found = json("batch", "max-batch graphs/mlp.onnxtxt --dim batch --memory-limit 24GiB");
    let [largest, next] = ["largest", "next"].map(|key| {
        let size = |of: &str| found[key][of].as_u64().expect("it is a number");
        (size("extent"), size("planned_bytes"))
    });
    // Per image: 784 pixels in, 100 hidden values, 10 scores out.
    assert_eq!(largest.0, next.0 - 1);
    assert!(largest.1 <= limit && limit < next.1 && next.1 - largest.1 < 4 * (784 + 100 + 10) + 256, "{found}");
    assert_eq!(found["next"]["deficit_bytes"].as_u64(), Some(next.1 - limit));
}

/// 6: a limit.
#[test]
fn a_cap_is_an_input_of_the_plan() {
    let command = "run graphs/digits.onnx --set batch=1000 --backend cpu --memory-limit 8MiB --json";
    let (code, out, err) = run(&folder("cap"), &command.split(' ').collect::<Vec<_>>());
    assert_eq!(code, Some(2), "{err}");
    let found = common::printed(&["run"], &out);
    let figure = |key: &str| found[key].as_u64().expect("it is a number");
    assert_eq!((figure("limit_bytes"), figure("needed_bytes") - figure("deficit_bytes")), (8 << 20, 8 << 20));
    assert!(found["remedies"].as_array().is_some_and(|r| !r.is_empty()), "{found}");
    assert!(found["peak"]["live"].as_array().is_some_and(|l| !l.is_empty()), "{found}");
}

/// 7: varying shapes in the bytes of one plan.
#[test]
fn a_range_of_lengths_keeps_its_bytes() {
    let range = "graphs/attention.onnxtxt --set batch=4 --set sequence=1..64";
    let found = json(
        "range",
        &format!("bench {range} --at sequence=32,16,64,1,32 --warmup 1 --iters 1000 --backend cpu --threads 2"),
    );
    assert_eq!(found["allocations_in_runs"], 0, "{found}");
    assert_eq!(found["bytes_grown_in_runs"], 0, "{found}");
    assert_eq!(found["planned_bytes"], found["allocated_bytes"]);
    let bindings =
        found["bindings"].as_array().expect("it lists them").iter().map(|b| b["binding"]["sequence"].as_u64());
    assert_eq!(bindings.collect::<Option<Vec<_>>>(), Some(vec![32, 16, 64, 1, 32]));

    // One plan, that of the largest binding, and the peak of each binding.
    let alone = json("range", "plan graphs/attention.onnxtxt --set batch=4 --set sequence=64");
    let plan = json("range", &format!("plan {range}"));
    assert_eq!(
        plan["programs"][0]["summary"], alone["programs"][0]["summary"],
        "a plan for the range takes what its largest binding takes"
    );
    assert_eq!(plan["programs"][0]["dims"], serde_json::json!([{"name": "sequence", "least": 1, "most": 64}]));
    let (_, text, _) = run(&folder("range"), &format!("plan {range}").split(' ').collect::<Vec<_>>());
    let (_, table) = text.split_once("sequence  live at the peak").expect("a table over the range");
    let rows: Vec<&str> = table.lines().skip(1).take_while(|row| !row.is_empty()).collect();
    let extents: Vec<&str> = rows.iter().filter_map(|row| row.split_whitespace().next()).collect();
    assert_eq!(extents, ["1", "2", "4", "8", "16", "32", "64"], "{text}");
    let peak = alone["programs"][0]["summary"]["lower_bound"].as_u64().expect("it is a number");
    let figure =
        |row: &str| row.split(" bytes").next()?.split_whitespace().last()?.replace(',', "").parse::<u64>().ok();
    assert_eq!(figure(rows[6]), Some(peak), "{text}");
}
