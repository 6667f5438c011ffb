//! Every flag of every command: what it adds changes the result, or is refused. `flags.txt` has the rows, and the exceptions with their reasons.

use crate::common::Folder;
use serde_json::Value;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::Path;
use std::process::Command;

const ROWS: &str = include_str!("flags.txt");
/// What its letters stand for.
const LETTERS: [(&str, &str); 4] = [
    ("M", "graphs/mlp.onnxtxt --set batch=3"),
    ("T", "graphs/linear.onnxtxt --train --loss mse --batch 4"),
    ("W", "W0 --steps 4"),
    (
        "W0",
        "graphs/linear.onnxtxt --data graphs/linear-x.npy --labels graphs/linear-y.npy --loss mse --lr 0.01 --batch 16",
    ),
];
/// What is given to each command before the arguments of a row. Times are left out of what is printed, so it is JSON where they are.
const BEFORE: [(&str, &str); 8] = [
    ("run", "--backend cpu --json"),
    ("compare", "--backend cpu --json"),
    ("bench", "--backend cpu --json"),
    ("tune", "--backend cpu --json --seconds 1"),
    ("plan", "--json"),
    ("place", "--json"),
    ("fit", "--json"),
    ("train", "--backend cpu --json"),
];

struct Row<'a> {
    commands: &'a str,
    flag: &'a str,
    without: &'a str,
    added: &'a str,
    follows: &'a str,
}

fn rows() -> Vec<Row<'static>> {
    let rows = ROWS.lines().filter(|line| !line.starts_with('#')).map(|line| {
        let cells: Vec<_> = line.split('|').map(str::trim).collect();
        let [commands, flag, without, added, follows] = cells[..] else { panic!("five cells: {line}") };
        Row { commands, flag, without, added, follows }
    });
    rows.collect()
}

fn expanded(text: &str) -> Vec<String> {
    let word = |word: &str| match LETTERS.iter().find(|(letter, _)| *letter == word) {
        Some((_, text)) => expanded(text),
        None => vec![word.to_owned()],
    };
    text.split_whitespace().flat_map(word).collect()
}

/// What a run of the program leaves: its exit code, what it printed, and its files.
#[derive(Clone, PartialEq)]
struct Left {
    code: Option<i32>,
    out: String,
    files: BTreeMap<String, Vec<u8>>,
    log: String,
}

/// Values without those that differ from run to run.
fn timeless(value: Value) -> Value {
    // Schedules that `tune` finds are chosen by the clock.
    let chosen = ["schedule", "tried", "tuned_bytes", "kept_in"];
    let is_time = |name: &str| {
        name.ends_with("_ms") || name.ends_with("_us") || ["second", "time"].iter().any(|part| name.contains(part))
    };
    match value {
        Value::Object(fields) => {
            let fields = fields.into_iter().filter(|(name, _)| !is_time(name) && !chosen.contains(&name.as_str()));
            fields.map(|(name, value)| (name, timeless(value))).collect()
        }
        Value::Array(values) => values.into_iter().map(timeless).collect(),
        other => other,
    }
}

fn files(folder: &Path, into: &mut BTreeMap<String, Vec<u8>>) {
    for entry in std::fs::read_dir(folder).expect("it can be listed") {
        let path = entry.expect("it can be listed").path();
        if path.is_dir() {
            files(&path, into);
        } else {
            into.insert(path.display().to_string(), std::fs::read(&path).expect("it is read"));
        }
    }
}

fn left(args: &[String], folder: &Folder) -> Left {
    // What `tune` keeps in the cache is none of a later row.
    for below in ["row", "cache"] {
        let _ = std::fs::remove_dir_all(folder.path(below));
    }
    std::fs::create_dir(folder.path("row")).expect("a folder for the row");
    let mut command = Command::new(env!("CARGO_BIN_EXE_plimsoll"));
    command.args(args.iter().map(|arg| arg.replace("DIR", &folder.path("row"))));
    command.current_dir(env!("CARGO_MANIFEST_DIR")).env_remove("RUST_LOG");
    command.env("PLIMSOLL_CACHE_DIR", folder.path("cache"));
    let output = command.output().expect("the program starts");
    let text = |bytes| String::from_utf8(bytes).expect("the output is text");
    let out = text(output.stdout);
    let out = serde_json::from_str(&out).map_or(out, |value| timeless(value).to_string());
    let mut found = BTreeMap::new();
    files(Path::new(&folder.path("row")), &mut found);
    Left { code: output.status.code(), out, files: found, log: text(output.stderr) }
}

/// The arguments of a row for a command, without and with what the row adds.
fn arguments(command: &str, row: &Row) -> [Vec<String>; 2] {
    let (mut without, added) = (expanded(row.without), expanded(row.added));
    if command == "emit" {
        let has = |flag: &str| without.iter().chain(&added).any(|arg| arg == flag);
        // A graph as it is after the passes, unless it is one of kernels or of a training.
        let form = if has("--target") { "cuda" } else { "dot" };
        without.insert(1, if has("--train") && form == "dot" { "onnxtxt" } else { form }.to_owned());
    }
    let before = BEFORE.iter().find(|(name, _)| *name == command).map_or("", |(_, before)| before);
    let start = std::iter::once(command).chain(before.split_whitespace()).map(str::to_owned);
    let without: Vec<_> = start.chain(without).collect();
    let with = without.iter().cloned().chain(added).collect();
    [without, with]
}

#[test]
fn what_a_flag_adds_changes_the_result_or_is_refused() {
    let folder = Folder::new("flags");
    let (mut seen, mut wrong) = (HashMap::new(), Vec::new());
    for row in rows() {
        let refused = row.follows.strip_prefix("refused ");
        if refused.is_none() && row.follows != "differs" {
            assert!(row.without.is_empty() && row.added.is_empty(), "{}: a reason, or a test", row.flag);
            continue;
        }
        for command in row.commands.split(',') {
            let [without, with] = arguments(command, &row);
            let line = with.join(" ");
            let found = left(&with, &folder);
            if let Some(words) = refused {
                if !(matches!(found.code, Some(1 | 4)) && found.log.contains(words)) {
                    wrong.push(format!("{line}\n  not refused with {words:?}: {:?} {}", found.code, found.log));
                }
                continue;
            }
            let bare = seen.entry(without.clone()).or_insert_with(|| left(&without, &folder));
            if (bare.code, &bare.out, &bare.files) == (found.code, &found.out, &found.files) {
                wrong.push(format!("{line}\n  has the result that it has without {}", row.flag));
            } else if !matches!(found.code, Some(0 | 2 | 3)) {
                wrong.push(format!("{line}\n  {:?} {}", found.code, found.log));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// What differs between two runs of the same would hide a flag without effect.
#[test]
fn a_result_is_the_same_in_each_run() {
    let folder = Folder::new("same");
    for (command, _) in BEFORE {
        let without = match command {
            "train" => "W",
            "place" => "graphs/buffers.csv",
            "fit" => "M --target cpu --memory-limit 1M",
            _ => "M",
        };
        let row = Row { commands: command, flag: "", without, added: "", follows: "" };
        let [args, _] = arguments(command, &row);
        let [one, other] = [left(&args, &folder), left(&args, &folder)];
        assert!(one.code == Some(0) && one.out == other.out, "{args:?}: {} {}\n{}", one.log, one.out, other.out);
    }
}

/// The flags that `--help` lists, without its examples.
fn flags(command: &str) -> Vec<String> {
    let output = Command::new(env!("CARGO_BIN_EXE_plimsoll")).args([command, "--help"]).output();
    let help = String::from_utf8(output.expect("the program starts").stdout).expect("the output is text");
    let lines = help.lines().take_while(|line| *line != "Examples:");
    let flag = |line: &str| {
        // What a flag does stands further to the right than its name.
        let flag = line.trim_start();
        let flag = if flag.starts_with("--") { flag } else { flag.strip_prefix('-')?.split_once(", ")?.1 };
        let is_name = flag.starts_with("--") && line.find('-')? < 8;
        is_name.then(|| flag.split([' ', '[', '=']).next().map(str::to_owned)).flatten()
    };
    lines.filter_map(flag).collect()
}

#[test]
fn every_flag_has_a_row() {
    let output = Command::new(env!("CARGO_BIN_EXE_plimsoll")).arg("--help").output().expect("the program starts");
    let help = String::from_utf8(output.stdout).expect("the output is text");
    let (_, list) = help.split_once("Commands:\n").expect("a list of commands");
    let names = list.lines().take_while(|line| !line.is_empty()).filter(|line| !line.starts_with("   "));
    let commands: Vec<_> = names.filter_map(|line| line.split_whitespace().next()).filter(|n| *n != "help").collect();
    assert!(commands.contains(&"max-batch") && commands.len() > 10, "{commands:?}");
    let rows = rows();
    let known: HashSet<_> = rows.iter().flat_map(|row| row.commands.split(',').map(|c| (c, row.flag))).collect();
    let mut listed = HashSet::new();
    for command in commands {
        for flag in flags(command) {
            assert!(known.contains(&(command, flag.as_str())), "{command} {flag}: no row in flags.txt");
            listed.insert((command, flag));
        }
    }
    for (command, flag) in known {
        assert!(listed.contains(&(command, flag.to_owned())), "{command} {flag}: `--help` does not list it");
    }
}
