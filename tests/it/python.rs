//! The module of Python: it is built as a wheel has it, and `tests/python` runs over it.

use std::path::{Path, PathBuf};
use std::process::Command;

/// The folder that doors are built to: their crates have other features than those of the tests.
fn target() -> PathBuf {
    let program = Path::new(env!("CARGO_BIN_EXE_plimsoll"));
    program.ancestors().nth(2).expect("a program is two folders below").join("doors")
}

fn done(command: &mut Command) -> String {
    let done = command.output().unwrap_or_else(|e| panic!("{command:?}: {e}"));
    let text = format!("{}\n{}", String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr));
    assert!(done.status.success(), "{command:?}: {text}");
    text
}

#[test]
fn the_module_is_as_its_tests_say() {
    let Ok(python) = std::env::var("PLIMSOLL_PYTHON") else {
        assert!(std::env::var_os("PLIMSOLL_REQUIRE_PYTHON").is_none(), "no Python");
        eprintln!("skipped: PLIMSOLL_PYTHON names no Python with NumPy");
        return;
    };
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let build = ["rustc", "--lib", "--crate-type", "cdylib", "--no-default-features", "--features", "python"];
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    // The interpreter has Python's functions: what is built links none of its libraries.
    let mut command = Command::new(cargo);
    command.current_dir(root).args(build).env("PYO3_BUILD_EXTENSION_MODULE", "1").env("PYO3_PYTHON", &python);
    done(command.env("CARGO_TARGET_DIR", target()));

    let module = Path::new(env!("CARGO_TARGET_TMPDIR")).join("python/plimsoll");
    std::fs::create_dir_all(&module).expect("a folder");
    for file in std::fs::read_dir(root.join("src/python/plimsoll")).expect("it is there") {
        let file = file.expect("it can be listed").path();
        if file.is_file() {
            std::fs::copy(&file, module.join(file.file_name().expect("a file has a name"))).expect("it is copied");
        }
    }
    let name = if cfg!(windows) { "_plimsoll.pyd" } else { "_plimsoll.abi3.so" };
    let built = format!("{}plimsoll{}", std::env::consts::DLL_PREFIX, std::env::consts::DLL_SUFFIX);
    std::fs::copy(target().join("debug").join(built), module.join(name)).expect("it is copied");

    let mut command = Command::new(python);
    command.current_dir(root).args(["-m", "unittest", "discover", "-s", "tests/python"]);
    command.env("PYTHONPATH", module.parent().expect("it has one")).env("PYTHONDONTWRITEBYTECODE", "1");
    let text = done(command.env("PLIMSOLL_COMMAND", env!("CARGO_BIN_EXE_plimsoll")));
    assert!(text.contains("\nOK"), "{text}");
}
