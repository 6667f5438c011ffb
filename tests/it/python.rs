//! The module of Python: it is built as a wheel has it, and `tests/python` runs over it.

use crate::common::door;
use std::path::Path;
use std::process::Command;

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
    // The interpreter has Python's functions: what is built links none of its libraries.
    let built = door("python", &[("PYO3_BUILD_EXTENSION_MODULE", "1"), ("PYO3_PYTHON", &python)]);

    let module = Path::new(env!("CARGO_TARGET_TMPDIR")).join("python/plimsoll");
    std::fs::create_dir_all(&module).expect("a folder");
    for file in std::fs::read_dir(root.join("src/python/plimsoll")).expect("it is there") {
        let file = file.expect("it can be listed").path();
        if file.is_file() {
            std::fs::copy(&file, module.join(file.file_name().expect("a file has a name"))).expect("it is copied");
        }
    }
    let name = if cfg!(windows) { "_plimsoll.pyd" } else { "_plimsoll.abi3.so" };
    let library = format!("{}plimsoll{}", std::env::consts::DLL_PREFIX, std::env::consts::DLL_SUFFIX);
    std::fs::copy(built.join(library), module.join(name)).expect("it is copied");

    let mut command = Command::new(python);
    command.current_dir(root).args(["-m", "unittest", "discover", "-s", "tests/python"]);
    command.env("PYTHONPATH", module.parent().expect("it has one")).env("PYTHONDONTWRITEBYTECODE", "1");
    let text = done(command.env("PLIMSOLL_COMMAND", env!("CARGO_BIN_EXE_plimsoll")));
    assert!(text.contains("\nOK"), "{text}");
}
