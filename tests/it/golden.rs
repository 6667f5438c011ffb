//! Goldens of every stage: the graph after the passes, plans, kernels, the table of operators. A refactor leaves them alone;
//! `BLESS=1 cargo test --test it golden::` writes them anew.

use crate::common::{self, Folder};
use crate::graphs;
use crate::graphs::GRAPHS;
use plimsoll::internals::plan;
use plimsoll::internals::target::Target;
use plimsoll::{DType, Limits, Options, Plan, Recipe};
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Stages: the golden's ending, and the command that prints it, `MODEL` standing for the file. A plan is written to a file.
const STAGES: &[(&str, &[&str])] = &[
    ("dot", &["emit", "MODEL", "dot"]),
    ("cpu.json", &["plan", "MODEL", "--target", "cpu", "--threads", "2"]),
    ("wgpu.json", &["plan", "MODEL", "--target", "wgpu"]),
    ("wgsl", &["emit", "MODEL", "wgsl"]),
    ("cuda.json", &["plan", "MODEL", "--target", "cuda"]),
    ("cu", &["emit", "MODEL", "cuda"]),
];

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn golden(file: &str) -> PathBuf {
    root().join("tests/golden").join(file)
}

/// The program's stdout.
fn printed(args: &[String]) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_plimsoll")).args(args).current_dir(root()).output();
    let output = output.expect("the program starts");
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("the output is text")
}

fn stage(command: &[&str], file: &str, dims: &[(&str, usize)]) -> String {
    let place = |arg: &&str| if *arg == "MODEL" { format!("graphs/{file}") } else { (*arg).to_owned() };
    let sets = dims.iter().flat_map(|(dim, extent)| ["--set".to_owned(), format!("{dim}={extent}")]);
    let mut args: Vec<_> = command.iter().map(place).chain(sets).collect();
    if command[0] != "plan" {
        return printed(&args);
    }
    let folder = Folder::new("golden");
    let plan = folder.path("plan.json");
    args.extend(["-o".to_owned(), plan.clone()]);
    printed(&args);
    std::fs::read_to_string(plan).expect("the plan is written")
}

/// The name and the expected content of every golden.
fn goldens() -> Vec<(String, String)> {
    let mut all = vec![("ops.txt".to_owned(), printed(&["ops".to_owned()]))];
    for (file, dims) in GRAPHS {
        let stem = file.split('.').next().expect("a file has a stem");
        all.extend(STAGES.iter().map(|(ending, command)| (format!("{stem}.{ending}"), stage(command, file, dims))));
    }
    all
}

/// The first lines in which two texts differ.
fn difference(expected: &str, found: &str) -> String {
    let (expected, found): (Vec<_>, Vec<_>) = (expected.lines().collect(), found.lines().collect());
    let first = expected.iter().zip(&found).take_while(|(e, f)| e == f).count();
    let show = |mark: char, lines: &[&str]| -> String {
        lines.iter().skip(first).take(4).map(|line| format!("{mark} {line}\n")).collect()
    };
    format!("line {} of {}:\n{}{}", first + 1, expected.len(), show('-', &expected), show('+', &found))
}

#[test]
fn every_stage_is_as_it_was() {
    let goldens = goldens();
    if std::env::var_os("BLESS").is_some() {
        for (name, text) in &goldens {
            std::fs::write(golden(name), text).expect("the golden is written");
        }
    }
    let mut wrong = String::new();
    for (name, text) in &goldens {
        match std::fs::read_to_string(golden(name)) {
            Ok(expected) if expected == *text => {}
            Ok(expected) => wrong += &format!("tests/golden/{name} differs at {}\n", difference(&expected, text)),
            Err(error) => wrong += &format!("tests/golden/{name}: {error}\n"),
        }
    }
    assert!(
        wrong.is_empty(),
        "\n{wrong}If this is meant: BLESS=1 cargo test --test it golden::, and look at git diff."
    );

    let there = std::fs::read_dir(golden("")).expect("the folder is there");
    let there: BTreeSet<_> = there.map(|f| f.expect("it can be listed").file_name()).collect();
    let known: BTreeSet<_> = goldens.iter().map(|(name, _)| name.into()).collect();
    assert_eq!(there, known, "tests/golden holds goldens and nothing else");
}

/// The table of the page of operators: which take which types, and where.
fn operators() -> String {
    let rows = common::printed(&["ops"], &printed(&["ops".to_owned(), "--json".to_owned()]));
    let rows = rows.as_array().expect("it is a list");
    let backends: Vec<&String> = rows[0]["types"].as_object().expect("types by backend").keys().collect();
    let mut groups: Vec<(Vec<String>, Vec<&str>)> = Vec::new();
    for row in rows {
        let name = row["name"].as_str().expect("a name");
        if name.starts_with("plimsoll.") {
            continue;
        }
        let types = |backend: &&String| {
            let types = row["types"][backend.as_str()].as_object().expect("types");
            let mark =
                |(dtype, stored): (&String, &Value)| format!("{dtype}{}", if stored == dtype { "" } else { "*" });
            let is_narrow = |name: &String| DType::from_name(name).is_some_and(DType::is_narrow);
            let (narrow, others): (Vec<_>, Vec<_>) = types.iter().partition(|(name, _)| is_narrow(name));
            let narrow = match narrow.len() {
                10 => vec!["narrow*".to_owned()],
                _ => narrow.into_iter().map(mark).collect(),
            };
            others.into_iter().map(mark).chain(narrow).collect::<Vec<_>>().join(" ")
        };
        let types: Vec<_> = backends.iter().map(types).collect();
        match groups.iter_mut().find(|(known, _)| *known == types) {
            Some((_, names)) => names.push(name),
            None => groups.push((types, vec![name])),
        }
    }
    let heads: Vec<_> = backends.iter().map(|b| b.as_str()).collect();
    let mut text = format!("| {} | operators |\n|{}---|\n", heads.join(" | "), "---|".repeat(heads.len()));
    for (types, names) in groups {
        text += &format!("| {} | {} |\n", types.join(" | "), names.join(" "));
    }
    text
}

#[test]
fn the_operators_are_listed_as_they_are() {
    let path = root().join("src/operators.md");
    let page = std::fs::read_to_string(&path).expect("the page is there");
    let limit = |limit: &plimsoll::internals::ops::Limit| {
        format!("| {} | {} | {} |\n", limit.operators, limit.what, limit.most)
    };
    let limits: String = plimsoll::internals::ops::LIMITS.iter().map(limit).collect();
    let limits = format!("| operators | what | at most |\n|---|---|---|\n{limits}");
    let mut page = page;
    for (begin, end, expected) in
        [("<!-- limits -->\n", "<!-- end limits -->", limits), ("<!-- plimsoll ops -->\n", "<!-- end -->", operators())]
    {
        let (before, rest) = page.split_once(begin).expect("the table's beginning is marked");
        let (found, after) = rest.split_once(end).expect("the table's end is marked");
        if std::env::var_os("BLESS").is_some() {
            page = format!("{before}{begin}{expected}{end}{after}");
            std::fs::write(&path, &page).expect("the page is written");
            continue;
        }
        assert!(found == expected, "src/operators.md: {}", difference(&expected, found));
    }
}

/// The same graph gives the same bytes: twice in this process, and in another one.
#[test]
fn plans_are_the_same_in_every_process() {
    for (file, dims) in GRAPHS {
        let targets = [("cpu.json", Target::cpu(2)), ("wgpu.json", Target::wgpu()), ("cuda.json", Target::cuda())];
        for (golden, target) in targets {
            let (_, command) = STAGES.iter().find(|(ending, _)| *ending == golden).expect("it is a stage");
            let here = || {
                let graph = graphs::import(file, dims);
                let graph = Recipe::default().whole(graph, &target).expect("the passes run");
                let plan = plan::planned(&graph, &target, &Limits { memory: None }).expect("the graph is planned");
                let options = dims.iter().fold(Options::default(), |options, &(dim, extent)| options.set(dim, extent));
                let origin = options.origin(root().join("graphs").join(file)).expect("it is read");
                Plan { origin: Some(origin), ..plan }.to_json()
            };
            let first = here();
            assert!(first == here(), "{file} for {}: two plans in one process differ", target.name);
            let there = stage(command, file, dims);
            assert!(first == there, "{file} for {}: {}", target.name, difference(&there, &first));
        }
    }
}

#[test]
fn a_difference_is_shown_where_it_begins() {
    assert_eq!(difference("a\nb\nc\n", "a\nx\nc\n"), "line 2 of 3:\n- b\n- c\n+ x\n+ c\n");
    assert_eq!(difference("a\n", "a\nb\n"), "line 2 of 1:\n+ b\n");
}
