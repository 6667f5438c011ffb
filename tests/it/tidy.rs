//! The project's rules about itself.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// Modules from bottom to top, within the members of the workspace that have layers; between members the compiler holds them. A file may use
/// its own folder, the modules of its own line, and the lines above its own. A module that is named twice, as `plan` and `plan::make`, has the
/// longer name's line.
const LAYERS: &[&[&str]] = &[
    &[
        "figures",
        "error",
        "file",
        "hash",
        "log",
        "mesh",
        "random",
        "parallel",
        "dtype",
        "narrow",
        "shape",
        "table",
        "elements",
        "tensor",
        "npy",
        "npz",
        "safetensors",
        "target",
    ],
    &["expr", "kernel", "op", "ops"],
    &["decisions", "constant"],
    &["annotations"],
    &["graph"],
    &["body"],
    &["autodiff", "trace", "onnx", "reference", "pass", "train"],
    &["kernel::library"],
    &["kernel::cpu"],
    &["kernel::schedule"],
    &["kernel::render"],
    &["backend"],
    &["gpu::bound", "gpu::staged"],
    &["gpu::cuda", "gpu::wgpu"],
    &["place"],
    &["plan"],
    &["plan::check"],
    &["plan::lower"],
    &["plan::make"],
    &["plan::fit"],
    &["plan::range"],
    &["plan::job"],
    &["plan::tell"],
    &["exec", "eager", "reserve", "tune", "whole"],
    &[
        "session",
        "settings",
        "model",
        "python",
        "ffi",
        "web",
        "decoder",
        "train::prefetch",
        "train::run",
        "train::classes",
        "train::curve",
        "train::checkpoint",
        "driver_memory",
        "advise",
        "fit",
        "roofline",
        "report",
        "cli",
    ],
];

/// Modules of which none may use another.
const APART: &[&[&str]] = &[&["gpu::cuda", "gpu::wgpu"], &["ffi", "python", "web"]];

/// The members of the workspace: a folder of `src`, and what stands before the names of its modules. Those of `core` have the names by which the
/// library brings them in.
const MEMBERS: &[(&str, &str)] = &[
    ("core", ""),
    ("graph", ""),
    ("run", ""),
    ("plan", "plan"),
    ("place", "place"),
    ("backend", "backend"),
    ("cpu", "cpu"),
    ("gpu", "gpu"),
];

fn rust_files(folder: &Path, out: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).expect("the folder is there") {
        let path = entry.expect("it can be listed").path();
        if path.is_dir() {
            rust_files(&path, out);
        } else if path.extension().is_some_and(|e| e == "rs") {
            out.push(path);
        }
    }
}

/// Every source file with its module path and its code: comments and tests are left out.
fn sources() -> Vec<(PathBuf, String, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = Vec::new();
    rust_files(&root, &mut files);
    files.sort();
    let load = |path: PathBuf| {
        let text = fs::read_to_string(&path).expect("it is text");
        let code = text.split("#[cfg(test)]\nmod tests").next().unwrap_or_default();
        let code: String =
            code.lines().filter(|l| !l.trim_start().starts_with("//")).map(|l| format!("{l}\n")).collect();
        let relative = path.strip_prefix(&root).expect("it is below src").with_extension("");
        let module = relative.to_string_lossy().replace('/', "::");
        let inside = |&(folder, name): &(&str, &str)| Some(join(name, module.strip_prefix(&format!("{folder}::"))?));
        let module = MEMBERS.iter().find_map(inside).unwrap_or(module);
        let head = [module.strip_suffix("::mod"), module.strip_suffix("::lib")].into_iter().flatten().next();
        (path, head.unwrap_or(&module).to_owned(), code)
    };
    files.into_iter().map(load).collect()
}

/// A path below another one; none of them is empty at its ends.
fn join(above: &str, path: &str) -> String {
    format!("{above}::{path}").trim_matches(':').to_owned()
}

/// The layer and position of the longest listed prefix of a module path.
fn place(module: &str) -> Option<(usize, usize)> {
    let listed =
        LAYERS.iter().enumerate().flat_map(|(l, names)| names.iter().enumerate().map(move |(i, n)| (*n, (l, i))));
    listed
        .filter(|(name, _)| module == *name || module.starts_with(&format!("{name}::")))
        .max_by_key(|(name, _)| name.len())
        .map(|(_, at)| at)
}

/// The paths below a prefix that a file names, by path and by `use prefix::{..}`.
fn named(code: &str, prefix: &str) -> Vec<String> {
    let path = |text: &str| -> String {
        let path = text.chars().take_while(|c| c.is_ascii_lowercase() || *c == '_' || *c == ':');
        path.collect::<String>().trim_end_matches(':').to_owned()
    };
    let mut found = Vec::new();
    for (at, _) in code.match_indices(prefix) {
        if code[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_' || c == ':') {
            continue;
        }
        let rest = &code[at + prefix.len()..];
        let Some(group) = rest.strip_prefix('{') else {
            found.push(path(rest));
            continue;
        };
        let mut depth = 0;
        let mut begins = true;
        for (i, c) in group.char_indices() {
            match c {
                '{' => depth += 1,
                '}' if depth == 0 => break,
                '}' => depth -= 1,
                ',' if depth == 0 => begins = true,
                c if begins && !c.is_whitespace() => {
                    found.push(path(&group[i..]));
                    begins = false;
                }
                _ => {}
            }
        }
    }
    found
}

/// The modules of this project that a module's code names.
fn uses(module: &str, code: &str) -> Vec<String> {
    let above = |module: &str| module.rsplit_once("::").map_or(String::new(), |(above, _)| above.to_owned());
    let parent = above(module);
    let own = code.lines().filter_map(|line| line.trim_start_matches("pub ").strip_prefix("mod ")?.strip_suffix(';'));
    let own_crate = MEMBERS.iter().map(|(_, name)| *name).find(|name| !name.is_empty() && within(name, module));
    let mut found = Vec::new();
    for path in named(code, "crate::") {
        found.push(join(own_crate.unwrap_or_default(), &path));
    }
    for (folder, name) in MEMBERS {
        found.extend(named(code, &format!("plimsoll_{folder}::")).iter().map(|path| join(name, path)));
    }
    found.extend(named(code, "super::").into_iter().map(|path| match path.strip_prefix("super::") {
        Some(path) => join(&above(&parent), path),
        None => join(&parent, &path),
    }));
    found
        .extend(own.flat_map(|child| named(code, &format!("{child}::")).into_iter().map(move |_| join(module, child))));
    found
}

/// The file among these that a path leads to: the longest module that begins it.
fn file_of<'a>(path: &str, modules: &[&'a str]) -> Option<&'a str> {
    let leads = |module: &&&str| path == **module || path.starts_with(&format!("{module}::"));
    modules.iter().filter(leads).max_by_key(|module| module.len()).copied()
}

/// True if a module has this name, or is in the folder of this name.
fn within(name: &str, module: &str) -> bool {
    module == name || module.starts_with(&format!("{name}::"))
}

/// True if one of two modules is in the folder of the other.
fn related(one: &str, other: &str) -> bool {
    within(one, other) || within(other, one)
}

/// Modules that import each other, directly or by way of others, as sets. That a folder's head and what is in the folder name each other is
/// no circle: the head holds what all of the folder is about, and is its door.
fn circles(files: &[(&str, &str)]) -> Vec<Vec<String>> {
    let modules: Vec<&str> = files.iter().map(|(module, _)| *module).collect();
    let arrows = |(module, code): &(&str, &str)| {
        let used = uses(module, code);
        let used = used.iter().filter_map(|path| file_of(path, &modules)).filter(|other| !related(module, other));
        used.map(|other| modules.iter().position(|m| *m == other).expect("it is one of them")).collect::<BTreeSet<_>>()
    };
    let arrows: Vec<BTreeSet<usize>> = files.iter().map(arrows).collect();
    let reached = |from: usize| {
        let (mut seen, mut work) = (BTreeSet::new(), vec![from]);
        while let Some(module) = work.pop() {
            work.extend(arrows[module].iter().filter(|&&next| seen.insert(next)));
        }
        seen
    };
    let reached: Vec<_> = (0..files.len()).map(reached).collect();
    let both = |at: usize, other: usize| reached[at].contains(&other) && reached[other].contains(&at);
    let circle =
        |at: usize| (0..files.len()).filter(|&other| both(at, other)).map(|other| modules[other].to_owned()).collect();
    let found: BTreeSet<Vec<String>> = (0..files.len()).map(circle).collect();
    found.into_iter().filter(|circle: &Vec<String>| !circle.is_empty()).collect()
}

#[test]
fn imports_are_seen() {
    let code = "use crate::op::{Fact, OpDef};\nuse crate::{npy, plan::{Plan, live},\n    session};\nlet x = crate::cli::main();
        use super::view::take;\nuse super::super::place;\nmod deep;\nuse deep::Deep;\nlet y = super::other();";
    let expected =
        ["op", "npy", "plan", "session", "cli::main", "a::b::view::take", "a::place", "a::b::other", "a::b::c::deep"];
    assert_eq!(uses("a::b::c", code), expected);
}

#[test]
fn circles_are_found() {
    let files = [
        ("graph", "use crate::op::Fact;"),
        ("op", "mod attr;\nuse attr::Attrs;"),
        // A folder's head and what is in it.
        ("op::attr", "use super::Fact;"),
        ("pass", "pub mod fuse;"),
        ("pass::fuse", "use super::attention::found;"),
        ("pass::attention", "use super::limits::MOST;"),
        ("pass::limits", "use crate::pass::fuse::group;"),
    ];
    assert_eq!(circles(&files), [["pass::fuse", "pass::attention", "pass::limits"]]);
    assert_eq!(circles(&files[..6]), [[""; 0]; 0]);
}

#[test]
fn no_two_files_import_each_other() {
    let sources = sources();
    let files: Vec<_> = sources.iter().map(|(_, module, code)| (module.as_str(), code.as_str())).collect();
    let found = circles(&files);
    assert!(found.is_empty(), "these import each other: {found:?}");
}

#[test]
fn modules_use_only_what_is_below_them() {
    let mut wrong = Vec::new();
    for (path, module, code) in sources() {
        if ["", "lib", "main"].contains(&&module[..]) {
            continue;
        }
        let is_of_member = MEMBERS.iter().any(|(_, name)| !name.is_empty() && within(name, &module));
        let layer = match place(&module) {
            Some((layer, _)) => layer,
            None if is_of_member => continue,
            None => panic!("{} has no layer", path.display()),
        };
        for used in uses(&module, &code) {
            let Some((other, _)) = place(&used) else { continue };
            // A folder's head is its door: it names what is in the folder.
            if other > layer && !within(&module, &used) {
                wrong.push(format!("{}: uses crate::{used}, a layer above", path.display()));
            }
            for apart in APART {
                let of = |module: &str| apart.iter().position(|name| within(name, module));
                if let (Some(own), Some(other)) = (of(&module), of(&used))
                    && own != other
                {
                    wrong.push(format!("{}: uses crate::{used}, which is to stay apart", path.display()));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn libraries_stay_where_they_belong() {
    let mut wrong = Vec::new();
    for (path, module, code) in sources() {
        let confined: &[(&str, &[&str])] = &[
            ("petgraph::", &["graph"]),
            ("prost::", &["onnx"]),
            ("wgpu::", &["gpu::wgpu"]),
            ("cudarc::", &["gpu::cuda"]),
            ("clap::", &["cli"]),
            ("tracing_subscriber::", &["cli"]),
            ("libloading::", &["backend::mpi", "gpu::cuda", "gpu::wgpu"]),
            ("memmap2::", &["file"]),
            ("indicatif::", &["cli"]),
            ("libc::", &["cli::stop", "cpu::memory", "file"]),
            ("pyo3::", &["python"]),
        ];
        for (library, allowed) in confined {
            // This is the crate, not a module with its name.
            let named = code.match_indices(library).any(|(i, _)| {
                let before = &code[..i];
                !before.ends_with("::") && !before.ends_with(|c: char| c.is_alphanumeric() || c == '_')
            });
            let inside = allowed.iter().any(|a| module == *a || module.starts_with(&format!("{a}::")));
            if named && !inside {
                wrong.push(format!("{} names {library}", path.display()));
            }
        }
        // Mapped files, the handler of signals, and memory of other languages.
        let system = ["file", "cli::stop", "python::array", "ffi::given", "web"].contains(&&module[..]);
        let is_backend = ["backend", "cpu", "gpu"].iter().any(|name| within(name, &module));
        if !is_backend && !system && code.contains("unsafe ") {
            wrong.push(format!("{} is unsafe", path.display()));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// wgpu takes no memory beside the plan: buffers are made in one place, and a clock has one set of timestamps.
#[test]
fn wgpu_takes_memory_in_one_place() {
    let own = sources().into_iter().filter(|(_, module, _)| within("gpu::wgpu", module));
    let code: String = own.map(|(_, _, code)| code).collect();
    for (call, times) in [("create_buffer", 1), ("write_buffer", 0), ("create_texture", 0), ("create_query_set", 1)] {
        assert_eq!(code.matches(call).count(), times, "{call}");
    }
}

#[test]
fn every_unsafe_block_says_why_it_is_sound() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = Vec::new();
    rust_files(&root, &mut files);
    let mut wrong = Vec::new();
    for path in files {
        let text = fs::read_to_string(&path).expect("it is text");
        let lines: Vec<&str> = text.lines().collect();
        for (i, line) in lines.iter().enumerate() {
            let code = line.split("//").next().unwrap_or_default();
            let block = code.contains("unsafe {") || code.contains("unsafe impl");
            // The reason is above the statement, which may span a few lines, or above several unsafe lines.
            let reasoned = lines[i.saturating_sub(12)..=i].iter().any(|l| l.contains("SAFETY"));
            if block && !reasoned {
                wrong.push(format!("{}:{}", path.display(), i + 1));
            }
        }
    }
    assert!(wrong.is_empty(), "unsafe without a SAFETY comment:\n{}", wrong.join("\n"));
}

#[test]
fn every_dependency_has_its_reason() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let members = MEMBERS.iter().map(|(folder, _)| format!("src/{folder}/Cargo.toml"));
    let read = |file: String| fs::read_to_string(root.join(file)).expect("it is there");
    let manifest: String = std::iter::once("Cargo.toml".to_owned()).chain(members).map(read).collect();
    let mut inside = false;
    let mut reason = false;
    let mut wrong = Vec::new();
    for line in manifest.lines() {
        if line.starts_with('[') {
            inside = ["[dependencies]", "[dev-dependencies]", "[workspace.dependencies]"].contains(&line);
            reason = false;
        } else if inside && line.starts_with('#') {
            reason = true;
        } else if inside && line.is_empty() {
            reason = false;
        } else if inside && line.contains('=') && !reason {
            wrong.push(line.to_owned());
        }
    }
    assert!(wrong.is_empty(), "dependencies without a reason:\n{}", wrong.join("\n"));
}

#[test]
fn every_row_of_the_op_table_is_documented_and_unique() {
    let mut seen: BTreeMap<&str, usize> = BTreeMap::new();
    for op in plimsoll::internals::ops::all() {
        *seen.entry(op.name).or_default() += 1;
        assert!(op.doc.len() > 8 && !op.doc.contains('\n'), "{}: one line that says what it computes", op.name);
    }
    let twice: Vec<_> = seen.iter().filter(|(_, n)| **n > 1).collect();
    assert!(twice.is_empty(), "{twice:?}");
}

#[test]
fn the_top_level_is_what_it_should_be() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let expected =
        ["Cargo.lock", "Cargo.toml", "LICENSE-APACHE", "LICENSE-MIT", "README.md", "graphs", "shaders", "src", "tests"];
    let mut found: Vec<_> = fs::read_dir(root)
        .expect("it is there")
        .map(|e| e.expect("it can be listed").file_name().to_string_lossy().into_owned())
        .filter(|n| !n.starts_with('.') && n != "target")
        .collect();
    found.sort();
    assert_eq!(found, expected);
}

/// The architecture page leads to files that are there.
#[test]
fn the_architecture_names_files_that_exist() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let page = fs::read_to_string(root.join("src/architecture.md")).expect("it is there");
    let paths: Vec<&str> = page.split('`').skip(1).step_by(2).filter(|name| name.starts_with("src/")).collect();
    let lost: Vec<_> = paths.iter().filter(|path| !root.join(path).exists()).collect();
    assert!(paths.len() > 30 && lost.is_empty(), "of {} paths these lead nowhere: {lost:?}", paths.len());
}

/// Each example is a test of `cargo test`, and the README names it with its command.
#[test]
fn examples_run_and_are_named() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let read = |file: &str| fs::read_to_string(root.join(file)).expect("it is there");
    let (manifest, readme) = (read("Cargo.toml"), read("README.md"));
    let mut files = Vec::new();
    rust_files(&root.join("tests/examples"), &mut files);
    let names: Vec<_> = files.iter().map(|path| path.file_stem().expect("a name").to_string_lossy()).collect();
    for name in &names {
        let path = format!("tests/examples/{name}.rs");
        let declared = format!("name = \"{name}\"\npath = \"{path}\"\ntest = true\nharness = false\n");
        let command = format!("`cargo run --example {name}`");
        assert!(manifest.contains(&declared), "Cargo.toml does not declare {name} as a test without harness");
        assert!(readme.contains(&command), "the README does not say {command}");
        let code = read(&path);
        assert!(code.contains("assert") && code.contains("println!"), "{path} says something, and asserts it");
    }
    // One more is the library that tests of the doors load.
    assert_eq!(names.len() + 1, manifest.matches("[[example]]").count(), "{names:?}");
}
