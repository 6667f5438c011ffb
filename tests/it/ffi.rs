//! The door of C and C++: its header, its programs, and what it refuses.

use crate::common::door;
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

/// The files of the door, in the order of the header.
const SOURCES: [&str; 2] = ["src/ffi.rs", "src/ffi/run.rs"];
const HEADER: &str = "src/ffi/plimsoll.h";

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn read(file: &str) -> String {
    fs::read_to_string(root().join(file)).unwrap_or_else(|error| panic!("{file}: {error}"))
}

// ---- The header

/// A type of Rust as C writes it, before a name.
fn c_type(rust: &str) -> String {
    let inner = |prefix: &str| rust.strip_prefix(prefix).and_then(|rest| rest.strip_suffix('>'));
    let pointer = |to: String| if to.ends_with('*') { format!("{to}*") } else { format!("{to} *") };
    if let Some(to) = inner("Places<").or_else(|| inner("Box<")) {
        return pointer(c_type(to));
    }
    if let Some(to) = inner("List<").or_else(|| inner("Option<&")).or_else(|| rust.strip_prefix('&')) {
        return format!("const {}", pointer(c_type(to)));
    }
    if let Some(to) = rust.strip_prefix("*mut ") {
        return pointer(c_type(to));
    }
    if let Some(to) = rust.strip_prefix("*const ") {
        return format!("const {}", pointer(c_type(to)));
    }
    let plain = match rust {
        "Text" => "const char *",
        "c_int" => "int",
        "c_char" => "char",
        "c_void" => "void",
        "u8" => "uint8_t",
        "u32" => "uint32_t",
        "u64" => "uint64_t",
        "usize" => "size_t",
        "f32" => "float",
        "f64" => "double",
        own if own.starts_with("plimsoll_") => own,
        other => panic!("the header has no word for {other}"),
    };
    plain.to_owned()
}

/// `name: Type` of Rust as C declares it.
fn declared(field: &str) -> String {
    let (name, rust) = field.trim().trim_start_matches("pub ").split_once(": ").expect("a name and a type");
    let c = c_type(rust);
    if c.ends_with('*') { format!("{c}{name}") } else { format!("{c} {name}") }
}

/// A function as C declares it: `name(parameters) -> result` of Rust, or of the macro `doors!`, where the result may be a place with a name, and
/// what has a body and no result gives a code alone.
fn prototype(rust: &str, has_code: bool) -> String {
    let (name, rest) = rust.split_once('(').expect("parameters");
    let (parameters, result) = rest.rsplit_once(')').expect("parameters");
    let mut parameters: Vec<_> = parameters.split(',').filter(|p| !p.trim().is_empty()).map(declared).collect();
    let result = result.trim().strip_prefix("-> ").unwrap_or_default();
    let place = result.split_once(": ").map(|(name, of)| match of.split_once(" or ") {
        Some((value, _)) => format!("{} *{name}", c_type(value)),
        None if of == "String" => format!("char **{name}"),
        None => format!("{} **{name}", c_type(of)),
    });
    let result = match result {
        _ if place.is_some() || has_code => {
            parameters.extend(place.into_iter().chain(["plimsoll_error **error".to_owned()]));
            "int".to_owned()
        }
        "" => "void".to_owned(),
        plain => c_type(plain),
    };
    let gap = if result.ends_with('*') { "" } else { " " };
    let parameters = if parameters.is_empty() { "void".to_owned() } else { parameters.join(", ") };
    format!("{result}{gap}{name}({parameters});")
}

fn comment(lines: &[&str], indent: &str) -> String {
    match lines {
        [] => String::new(),
        [line] => format!("{indent}/* {line} */\n"),
        lines => format!("{indent}/* {} */\n", lines.join(&format!("\n{indent} * ")).replace(" * \n", " *\n")),
    }
}

/// The header that the sources of the door tell: their documented items that are C's, in order.
fn header() -> String {
    let mut text = String::new();
    let mut handles = String::new();
    for (number, file) in SOURCES.iter().enumerate() {
        let source = read(file);
        let mut docs: Vec<&str> = Vec::new();
        let mut is_c = false;
        let mut lines = source.lines();
        if number == 0 {
            let head: Vec<_> = source.lines().map_while(|line| line.strip_prefix("//!")).map(str::trim_start).collect();
            let _ = write!(text, "{}\n#ifndef PLIMSOLL_H\n#define PLIMSOLL_H\n\n", comment(&head, ""));
            text += "#include <stddef.h>\n#include <stdint.h>\n\n#ifdef __cplusplus\nextern \"C\" {\n#endif\n\n@";
        }
        let mut is_door = false;
        while let Some(line) = lines.next() {
            is_door = line == "doors! {" || is_door && line != "}";
            let line = if is_door { line.strip_prefix("    ").unwrap_or(line) } else { line };
            if let Some(section) = line.strip_prefix("// ---- ") {
                let _ = write!(text, "\n/* ---- {section} ---- */\n");
            } else if let Some(doc) = line.strip_prefix("///") {
                docs.push(doc.trim_start());
                continue;
            } else if line.starts_with("#[unsafe(no_mangle)]") || line.starts_with("#[repr(C)]") {
                is_c = true;
                continue;
            } else if let Some(rest) = line.strip_prefix("pub const PLIMSOLL_") {
                let (name, value) = rest.split_once(": ").expect("a type");
                let value = value.split_once("= ").expect("a value").1.trim_end_matches(';');
                let _ = write!(text, "\n{}#define PLIMSOLL_{name} {value}\n", comment(&docs, ""));
            } else if let Some(rest) = line.strip_prefix(if is_door { "fn " } else { "pub extern \"C\" fn " }) {
                let mut all = rest.to_owned();
                while !all.contains(['{', ';']) {
                    all += lines.next().expect("a function has a body").trim();
                }
                let (head, body) = all.split_at(all.find(['{', ';']).expect("a body, or an end"));
                let has_code = is_door && body.starts_with('{') && !head.contains("->");
                let _ = write!(text, "\n{}{}\n", comment(&docs, ""), prototype(head.trim(), has_code));
            } else if let Some(name) = line.strip_prefix("pub struct ").and_then(|rest| rest.strip_suffix(" {")) {
                handles += &format!("typedef struct {name} {name};\n");
                if is_c {
                    let mut fields = String::new();
                    let mut about = Vec::new();
                    for line in lines.by_ref().map(str::trim).take_while(|line| *line != "}") {
                        match line.strip_prefix("///") {
                            Some(doc) => about.push(doc.trim_start()),
                            None => {
                                fields += &comment(&std::mem::take(&mut about), "    ");
                                fields += &format!("    {};\n", declared(line.trim_end_matches(',')));
                            }
                        }
                    }
                    let _ = write!(text, "\n{}struct {name} {{\n{fields}}};\n", comment(&docs, ""));
                } else {
                    handles.insert_str(
                        handles.len() - format!("typedef struct {name} {name};\n").len(),
                        &comment(&docs, ""),
                    );
                }
            }
            docs.clear();
            is_c = false;
        }
    }
    text.replace('@', &handles).trim_end().to_owned() + "\n#ifdef __cplusplus\n}\n#endif\n\n#endif\n"
}

#[test]
fn the_header_is_what_the_source_says() {
    let expected = header();
    if std::env::var_os("BLESS").is_some() {
        fs::write(root().join(HEADER), &expected).expect("the header is written");
    }
    assert!(read(HEADER) == expected, "{HEADER} is not what the source says: BLESS=1 cargo test --test it ffi::");
}

/// The functions that the header declares.
fn functions(header: &str) -> Vec<&str> {
    let declared = header.lines().filter(|line| line.ends_with(");"));
    declared.filter_map(|line| line.split_once('(')?.0.rsplit([' ', '*']).next()).collect()
}

/// What the command can do with a model or a plan, and the functions that do it.
const VERBS: [(&str, &[&str]); 10] = [
    ("Plan", &["plimsoll_model_plan", "plimsoll_model_advise", "plimsoll_model_plan_training"]),
    ("Run", &["plimsoll_session_run", "plimsoll_session_run_tensors", "plimsoll_session_open_plan"]),
    ("Bench", &["plimsoll_session_bench"]),
    ("Compare", &["plimsoll_model_compare"]),
    ("MaxBatch", &["plimsoll_model_max_batch", "plimsoll_model_max_batch_of_training"]),
    ("Check", &["plimsoll_plan_check"]),
    ("Diff", &["plimsoll_plan_diff"]),
    ("Train", &["plimsoll_trainer_step", "plimsoll_trainer_evaluate", "plimsoll_trainer_save"]),
    ("Place", &["plimsoll_place"]),
    ("Fit", &["plimsoll_model_fit"]),
];

/// What is the command's alone: it prints files and lists, or writes this machine's cache.
const COMMAND_ALONE: [&str; 9] = ["Inspect", "Tune", "Emit", "Devices", "Ops", "Web", "Completions", "Man", "Schema"];

#[test]
fn what_the_command_can_do_c_can() {
    let header = read(HEADER);
    let known = functions(&header);
    assert!(known.len() > 50, "{known:?}");
    let source = read("src/cli.rs");
    let verbs = source.split_once("enum Command {").expect("the commands").1.split_once("\n}").expect("their end").0;
    let verbs = verbs.lines().map(str::trim).filter(|line| !line.starts_with("///") && !line.is_empty());
    let verbs: Vec<&str> = verbs.map(|line| line.trim_end_matches(',').split('(').next().unwrap_or(line)).collect();
    for verb in &verbs {
        let Some((_, by)) = VERBS.iter().find(|(known, _)| known == verb) else {
            assert!(COMMAND_ALONE.contains(verb), "{verb} has no function in {HEADER}");
            continue;
        };
        let missing = by.iter().find(|function| !known.contains(function));
        assert!(missing.is_none(), "{verb}: {HEADER} has no {missing:?}");
    }
    let named = VERBS.iter().map(|(verb, _)| verb).chain(&COMMAND_ALONE);
    named.for_each(|verb| assert!(verbs.contains(verb), "the command has no {verb}"));
}

#[test]
fn each_kind_of_error_has_a_code() {
    let (header, errors) = (read(HEADER), read("src/core/error.rs"));
    let kinds: Vec<&str> = errors.lines().filter_map(|line| line.split_once("=> (\"")?.1.split('"').next()).collect();
    assert!(kinds.len() > 10, "{kinds:?}");
    for kind in kinds {
        assert!(header.contains(&format!("#define PLIMSOLL_{} ", kind.to_uppercase())), "{kind} has no code");
    }
}

// ---- Programs

/// The compilers, or a word why there are none. In CI there are.
fn has(program: &str) -> bool {
    let found = Command::new(program).arg("--version").output().is_ok_and(|output| output.status.success());
    assert!(found || std::env::var("CI").as_deref() != Ok("true"), "{program} is not here");
    if !found {
        eprintln!("SKIPPED: {program} is not here");
    }
    found
}

fn ran(command: &mut Command) -> Output {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{command:?}: {}\n{out}\n{err}", output.status);
    output
}

/// The folder of the library, which is built once.
fn library() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| door("ffi", &[]))
}

/// Builds a program against the library.
fn built(compiler: &str, flags: &[&str], source: &str) -> PathBuf {
    let (library, name) = (library(), Path::new(source).file_stem().expect("a name").to_string_lossy());
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("ffi-{name}-{}", std::process::id()));
    let mut command = Command::new(compiler);
    command.current_dir(root()).args(flags).args(["-O2", "-g", "-Wall", "-Wextra", "-pedantic", "-Werror"]);
    command.args([source, "-Isrc/ffi", "-o"]).arg(&program).arg("-L").arg(library);
    command.args(["-lplimsoll", "-lm"]).arg(format!("-Wl,-rpath,{}", library.display()));
    ran(&mut command);
    program
}

/// Runs a program, and once more under valgrind if that is here. Returns what it printed.
fn run(program: &Path, checked: bool) -> String {
    // What it may write.
    let file = program.with_extension("json");
    let output = ran(Command::new(program).arg(&file).current_dir(root()));
    if checked && Command::new("valgrind").arg("--version").output().is_ok() {
        let mut valgrind = Command::new("valgrind");
        valgrind.args(["-q", "--error-exitcode=9", "--leak-check=full", "--errors-for-leak-kinds=definite,indirect"]);
        valgrind.arg("--suppressions=tests/it/ffi/valgrind.supp");
        ran(valgrind.arg(program).arg(&file).current_dir(root()));
    } else if checked {
        eprintln!("SKIPPED: valgrind is not here");
    }
    let _ = fs::remove_file(file);
    fs::remove_file(program).expect("it was built");
    String::from_utf8(output.stdout).expect("it prints text")
}

const C: &[&str] = &["-std=c11"];
const CPP: &[&str] = &["-std=c++17"];

#[test]
fn a_program_of_c_classifies() {
    if has("gcc") {
        let told = run(&built("gcc", C, "tests/examples/c/classify.c"), true);
        assert!(told.contains("It is a 7."), "{told}");
    }
}

#[test]
fn a_program_of_cpp_plans() {
    if has("g++") {
        let told = run(&built("g++", CPP, "tests/examples/c/plan.cpp"), true);
        assert!(told.contains("does not fit") && told.contains("the largest batch"), "{told}");
    }
}

#[test]
fn a_program_of_cpp_trains() {
    if has("g++") {
        let told = run(&built("g++", CPP, "tests/examples/c/train.cpp"), false);
        assert!(told.contains("steps are an epoch") && told.contains("was written: 1"), "{told}");
    }
}

#[test]
fn what_c_may_get_wrong_is_an_error() {
    if has("gcc") {
        let told = run(&built("gcc", C, "tests/it/ffi/wrong.c"), true);
        assert!(told.ends_with("all well\n"), "{told}");
    }
}

/// The program has a malloc of its own, which counts. The other models have filters, and an index.
#[test]
#[cfg(target_os = "linux")]
fn a_run_of_c_allocates_nothing() {
    if !has("gcc") {
        return;
    }
    let program = built("gcc", C, "tests/it/ffi/allocations.c");
    let cpu = r#"{"device": "cpu", "threads": 2, "dims": {"n": 2}}"#;
    let digits = r#"{"device": "cpu", "threads": 2, "batch": 1}"#;
    let append = r#"{"device": "cpu", "threads": 1}"#;
    for (model, options) in [("product.onnxtxt", cpu), ("digits.onnx", digits), ("append.onnxtxt", append)] {
        let output = ran(Command::new(&program).args([&format!("graphs/{model}"), options]).current_dir(root()));
        let told = String::from_utf8_lossy(&output.stdout);
        eprintln!("{model}: {told}");
        assert!(told.contains("calls of the allocator in 1000 runs: 0\n"), "{model}: {told}");
    }
    fs::remove_file(program).expect("it was built");
}
