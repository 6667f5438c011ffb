//! CUDA where there is none: what is missing is said in words. And its compiler, where that is, which needs no GPU.
#![cfg(feature = "cuda")]

use plimsoll::backend::cuda::library::Search;
use plimsoll::backend::cuda::{Settings, machine_code, open, report};
use plimsoll::kernel::Kernel;
use plimsoll::kernel::render::{Bindings, Dialect, render};
use plimsoll::target::Target;
use plimsoll::{Limits, onnx, pass, plan};
use std::path::{Path, PathBuf};
use std::process::Command;

/// A folder that is gone when the test is over.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("plimsoll-cuda-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).expect("a folder");
        Folder(path)
    }

    fn search(&self) -> Search {
        Search { loader: false, folders: vec![self.0.clone()] }
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Every function of the driver that is used, as C that answers "not initialised", but for the ones in `with`.
fn driver(folder: &Folder, with: &str, without: &[&str]) -> bool {
    let api = include_str!("../src/backend/cuda/api.rs");
    let names = api.match_indices("fn cu").filter_map(|(at, _)| api[at + 3..].split('(').next());
    let names = names.filter(|name| name.starts_with("cu") && name.as_bytes()[2].is_ascii_uppercase());
    let mut text = String::from(with);
    for name in names.filter(|name| !without.contains(name) && !with.contains(&format!("int {name}("))) {
        text += &format!("int {name}(void) {{ return 3; }}\n");
    }
    let source = folder.0.join("driver.c");
    std::fs::write(&source, text).expect("the source is written");
    let library = folder.0.join("libcuda.so.1");
    let compiled = Command::new("cc").args(["-shared", "-fPIC", "-w", "-o"]).arg(&library).arg(&source).status();
    match compiled {
        Ok(status) => {
            assert!(status.success(), "the driver's C is compiled");
            true
        }
        Err(error) => {
            assert!(std::env::var_os("CI").is_none(), "a C compiler is required: {error}");
            eprintln!("SKIPPED: cc: {error}");
            false
        }
    }
}

/// What a device of this driver cannot be opened for.
fn refusal(search: &Search) -> String {
    let error = open(search, &Settings::default()).map(|(_, name)| name).expect_err("there is no device");
    assert_eq!(error.exit_code(), 4, "{error}");
    let error = error.to_string();
    let report = report(search);
    let problem = report.libraries[0].problem.as_ref().expect("the driver has a problem");
    assert!(report.devices.is_empty() && error.contains(problem.as_str()), "{error}, {problem}");
    error
}

#[test]
fn no_driver() {
    let error = refusal(&Search::default());
    assert_eq!(error, "backend cuda: driver: libcuda.so.1 or libcuda.so was not found");
}

const SOUND: &str = "
int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int *version) { *version = VERSION; return 0; }
int cuDeviceGetCount(int *count) { *count = 0; return 0; }
int cuGetErrorName(int code, const char **name) { *name = code == 100 ? \"CUDA_ERROR_NO_DEVICE\" : 0; return 0; }
int cuGetErrorString(int code, const char **text) { *text = \"no CUDA-capable device is detected\"; return 0; }
";

#[test]
fn a_driver_without_a_device() {
    let folder = Folder::new("none");
    if driver(&folder, &SOUND.replace("VERSION", "13000"), &[]) {
        assert!(refusal(&folder.search()).ends_with("it has no device"));
    }
}

#[test]
fn a_driver_that_does_not_start() {
    let folder = Folder::new("init");
    let text = SOUND
        .replace("VERSION", "13000")
        .replace("int cuInit(unsigned flags) { return 0; }", "int cuInit(unsigned flags) { return 100; }");
    if driver(&folder, &text, &[]) {
        let error = refusal(&folder.search());
        assert!(
            error.ends_with("cuInit: error 100 (CUDA_ERROR_NO_DEVICE: no CUDA-capable device is detected)"),
            "{error}"
        );
    }
    // A code that nobody has heard of.
    let folder = Folder::new("code");
    if driver(&folder, &text.replace("return 100", "return 4711"), &[]) {
        let error = refusal(&folder.search());
        assert!(error.ends_with("cuInit: error 4711 (unknown to the library)"), "{error}");
    }
}

#[test]
fn a_driver_that_is_too_old() {
    let folder = Folder::new("old");
    if driver(&folder, &SOUND.replace("VERSION", "11040"), &[]) {
        let error = refusal(&folder.search());
        assert!(error.ends_with("it is too old: for CUDA 11.4, at least 12.0 is needed"), "{error}");
    }
}

#[test]
fn a_driver_that_lacks_a_function() {
    let folder = Folder::new("lacks");
    if driver(&folder, &SOUND.replace("VERSION", "13000"), &["cuGraphUpload"]) {
        let error = refusal(&folder.search());
        assert!(error.ends_with("libcuda.so.1: it has no function cuGraphUpload"), "{error}");
    }
}

/// The command line says it in one line, and `auto` goes on with what there is.
#[test]
fn auto_falls_back() {
    let folder = Folder::new("auto");
    if !driver(&folder, &SOUND.replace("VERSION", "13000"), &[]) {
        return;
    }
    let plimsoll = |args: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_plimsoll"));
        let output = command.args(args).env("LD_LIBRARY_PATH", &folder.0).env_remove("RUST_LOG").output();
        let output = output.expect("the program starts");
        let text = |bytes| String::from_utf8(bytes).expect("it is text");
        (output.status.code(), text(output.stdout), text(output.stderr))
    };
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/graphs/mlp.onnxtxt");
    let (code, _, log) = plimsoll(&["run", model, "--set", "batch=2"]);
    assert_eq!(code, Some(0), "{log}");
    let lines: Vec<_> = log.lines().filter(|line| line.contains("backend: ")).collect();
    assert!(lines.len() == 1 && lines[0].contains("no CUDA: driver: it has no device"), "{log}");
    let (code, _, log) = plimsoll(&["run", model, "--set", "batch=2", "--backend", "cuda"]);
    assert!(code == Some(4) && log.contains("driver: it has no device"), "{log}");
    let (code, devices, _) = plimsoll(&["devices"]);
    assert!(code == Some(0) && devices.contains("libcuda.so.1"), "{devices}");
}

/// Kernels of a whole plan become one program that the compiler accepts.
#[test]
fn plans_compile() {
    let search = Search::here();
    let empty = machine_code(&search, "sm_90", &[]);
    if let Err(error) = empty {
        assert!(std::env::var_os("PLIMSOLL_REQUIRE_NVRTC").is_none(), "NVRTC is required: {error}");
        eprintln!("SKIPPED: {error}");
        return;
    }
    let target = Target::cuda();
    for (file, dims) in [("digits.onnx", &["batch"][..]), ("mlp.onnxtxt", &["batch"])] {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("graphs").join(file);
        let dims: Vec<_> = dims.iter().map(|dim| ((*dim).to_owned(), 4)).collect();
        let mut graph = onnx::import(&onnx::load(&path).expect("a graph"), &dims).expect("it is imported");
        pass::run(&mut graph, &target, true).expect("the passes run");
        let plan = plan::plan(&graph, &target, &Limits { memory: None }).expect("it is planned");
        let render = |kernel: &Kernel| {
            let kernel = Kernel { call: None, ..kernel.clone() };
            render(&kernel, &target, &Bindings::distinct(&kernel), Dialect::Cuda).expect("it is rendered")
        };
        let sources: Vec<_> = plan.kernels.iter().map(render).collect();
        let texts: Vec<&str> = sources.iter().map(|source| source.text.as_str()).collect();
        let image = machine_code(&search, "sm_90", &texts).unwrap_or_else(|error| panic!("{file}: {error}"));
        assert_eq!(&image[..4], b"\x7fELF");
    }
}
