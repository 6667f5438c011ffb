//! The library as a program sees it: its errors, its documented names, the crates that it builds.

use plimsoll::{DType, Error, Graph, Options, Session, Trace};
use std::collections::BTreeSet;
use std::error::Error as _;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn limited(bytes: u64) -> Options {
    Options { memory_limit: Some(bytes), ..Options::default() }.on(plimsoll::Choice::Cpu)
}

#[test]
fn what_does_not_fit_is_the_same_error_with_and_without_a_file() {
    let trace = Trace::new("large");
    trace.output("y", trace.input("x", DType::F32, [1000]).relu());
    let refused = Session::from_graph(trace.finish().expect("a graph"), &limited(1024)).expect_err("it is too large");
    assert!(matches!(&refused, Error::Fit { limit: 1024, file: None, .. }), "{refused:?}");
    let path = root().join("graphs/mlp.onnxtxt");
    let refused = Session::from_path(&path, &limited(1024).set("batch", 4)).expect_err("it is too large");
    assert!(matches!(&refused, Error::Fit { limit: 1024, file: Some(file), .. } if *file == path), "{refused:?}");
    assert_eq!((refused.path(), refused.exit_code()), (Some(&*path), 2));
    assert!(refused.to_string().starts_with(&format!("{}: does not fit: the plan of 'mlp': needs ", path.display())));
    assert!(refused.source().is_none());
}

#[test]
fn dims_that_are_not_bound_are_named() {
    let path = root().join("graphs/attention.onnxtxt");
    for refused in [
        Session::from_path(&path, &limited(1 << 30).set("batch", 4)).expect_err("a dim is open"),
        Graph::from_path(&path, &[("batch", 4)]).expect_err("a dim is open"),
    ] {
        assert!(matches!(&refused, Error::Unbound { dims, file: Some(_) } if *dims == ["sequence"]), "{refused:?}");
        assert_eq!(refused.to_string(), format!("{}: dims not bound: 'sequence'", path.display()));
    }
    let graph = Graph::from_path(&path, &[("batch", 4), ("sequence", 8)]).expect("a graph");
    assert!(!graph.is_empty());
}

#[test]
fn errors_of_files_have_a_cause() {
    let cause = |path: &Path| {
        let error = Session::from_path(path, &limited(1024)).expect_err("it is no model");
        assert!(matches!(&error, Error::File { path: named, .. } if named == path), "{error:?}");
        error.source().and_then(|cause| Some(cause.downcast_ref::<io::Error>()?.kind()))
    };
    assert_eq!(cause(Path::new("no such file.onnx")), Some(io::ErrorKind::NotFound));
    let words = Path::new(env!("CARGO_TARGET_TMPDIR")).join("front-words.onnx");
    fs::write(&words, "What is this?").expect("it is written");
    assert_eq!(cause(&words), Some(io::ErrorKind::InvalidData));
    fs::write(&words, "").expect("it is written");
    assert_eq!(cause(&words), None);
}

fn sources(folder: &Path, out: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).expect("the folder is there") {
        let path = entry.expect("it can be listed").path();
        if path.is_dir() {
            sources(&path, out);
        } else if path.extension().is_some_and(|e| e == "rs") {
            out.push(path);
        }
    }
}

/// The command line names its flags; the library does not. The advice is the command line's, and NVRTC has options of its own.
#[test]
fn the_library_names_no_flags() {
    let mut files = Vec::new();
    sources(&root().join("src"), &mut files);
    let mut wrong = Vec::new();
    for path in files {
        let module = path.strip_prefix(root().join("src")).expect("it is below src").to_string_lossy().into_owned();
        if ["cli", "run/advise", "report", "gpu/cuda/program"].iter().any(|own| module.starts_with(own)) {
            continue;
        }
        let text = fs::read_to_string(&path).expect("it is text");
        for (number, line) in text.lines().enumerate() {
            let flag = line.match_indices("--").any(|(at, _)| {
                let inside = line[..at].matches('"').count() % 2 == 1;
                inside && line[at + 2..].starts_with(|c: char| c.is_ascii_lowercase())
            });
            if flag && !line.trim_start().starts_with("//") {
                wrong.push(format!("{module}:{}: {}", number + 1, line.trim()));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Files that the program writes are plimsoll's, whichever member of the workspace writes them.
#[test]
fn no_member_writes_its_own_name() {
    let mut files = Vec::new();
    sources(&root().join("src"), &mut files);
    for path in files {
        let text = fs::read_to_string(&path).expect("it is text");
        assert!(!text.contains("CARGO_PKG_NAME"), "{}: expected \"plimsoll\"", path.display());
    }
}

/// The names at the crate's root are what is documented; all other modules are private or hidden.
#[test]
fn the_documented_surface_is_small() {
    let lib = fs::read_to_string(root().join("src/lib.rs")).expect("it is there");
    let mut names = BTreeSet::new();
    for reexport in lib.split("\npub use ").skip(1) {
        let path = reexport.split(';').next().expect("a statement ends");
        let list = path.rsplit("::").next().expect("a path ends");
        let list = path.split_once('{').map_or(list, |(_, list)| list.trim_end_matches('}'));
        names.extend(list.split(',').map(str::trim).filter(|name| !name.is_empty()));
    }
    assert!((30..=53).contains(&names.len()), "{} names: {names:?}", names.len());
    for name in ["Session", "Options", "Graph", "Trace", "Tensor", "Plan", "Target", "Error"] {
        assert!(names.contains(name), "{name}");
    }
    let lines: Vec<&str> = lib.lines().collect();
    let public: Vec<_> = (1..lines.len()).filter(|&i| lines[i].starts_with("pub mod ")).collect();
    for i in public {
        // A page of the documentation.
        let documented = lines[i - 1].starts_with("#[doc = include_str!(") || lines[i - 1].starts_with("///");
        assert!(documented || lines[i - 1] == "#[doc(hidden)]", "{}: neither hidden nor private", lines[i]);
    }
}

/// A program that needs neither a GPU nor the command line builds few crates beside the project's own.
#[test]
fn the_library_alone_builds_few_crates() {
    let args = [
        "tree",
        "-p",
        "plimsoll",
        "--offline",
        "--locked",
        "-e",
        "normal",
        "--no-default-features",
        "--prefix",
        "none",
    ];
    let output = Command::new(env!("CARGO")).args(args).current_dir(root()).output().expect("cargo starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).expect("it is text");
    let lines: BTreeSet<&str> =
        text.lines().map(|line| line.trim_end_matches(" (*)")).filter(|line| !line.is_empty()).collect();
    let lines: BTreeSet<&str> = lines.into_iter().filter(|line| !line.starts_with("plimsoll")).collect();
    assert!(lines.len() <= 40, "{} lines:\n{}", lines.len(), Vec::from_iter(lines).join("\n"));
}
