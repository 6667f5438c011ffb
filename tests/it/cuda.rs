//! CUDA without a GPU: errors name what is missing; its compiler, where there is one, compiles plans; the backend runs on a stub,
//! whose memory is the host's and whose kernels compute nothing.

use crate::common;
use crate::offload::wide;
use plimsoll::internals::backend::cuda::library::Search;
use plimsoll::internals::backend::cuda::{Settings, machine_code, open, report};
use plimsoll::internals::backend::{Launch, Slice};
use plimsoll::internals::file::{sealed, unsealed};
use plimsoll::internals::kernel::Kernel;
use plimsoll::internals::kernel::render::{Bindings, Dialect, render};
use plimsoll::internals::kernel::schedule;
use plimsoll::internals::pass::offload::Offload;
use plimsoll::internals::session::{Choice, Options, Session};
use plimsoll::internals::target::{Libraries, Memory, STAGING, Target};
use plimsoll::internals::trace::Trace;
use plimsoll::internals::{onnx, plan, session};
use plimsoll::{DType, Limits, Recipe, Tensor};
use std::path::{Path, PathBuf};
use std::process::Command;

mod ranks;

/// A folder that is removed when the test is over.
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

/// Compiles a driver from C.
fn compile(folder: &Folder, text: &str, defines: &[&str]) -> bool {
    let source = folder.0.join("driver.c");
    std::fs::write(&source, text).expect("the source is written");
    let mut command = Command::new("cc");
    command.args(["-shared", "-fPIC", "-w", "-o"]).arg(folder.0.join("libcuda.so.1")).arg(&source).args(defines);
    match command.status() {
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

/// Every function of the driver that is used, as C that answers "not initialised", but for the ones in `with`.
fn driver(folder: &Folder, with: &str, without: &[&str]) -> bool {
    let api = include_str!("../../src/gpu/cuda/api.rs");
    let names = api.match_indices("fn cu").filter_map(|(at, _)| api[at + 3..].split('(').next());
    let names = names.filter(|name| name.as_bytes()[2].is_ascii_uppercase());
    let mut text = String::from(with);
    for name in names.filter(|name| !without.contains(name) && !with.contains(&format!("int {name}("))) {
        text += &format!("int {name}(void) {{ return 3; }}\n");
    }
    compile(folder, &text, &[])
}

/// The error with which a device of this driver is not opened.
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
    // An unknown error code.
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

/// The command line with this folder's driver: exit code, stdout, stderr.
fn plimsoll(folder: &Folder, args: &[&str], cache: &Path) -> (Option<i32>, String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_plimsoll"));
    command.args(args).env("LD_LIBRARY_PATH", &folder.0).env("PLIMSOLL_CACHE_DIR", cache);
    let output = command.env("RUST_LOG", "plimsoll=debug").output().expect("the program starts");
    let text = |bytes| String::from_utf8(bytes).expect("it is text");
    (output.status.code(), text(output.stdout), text(output.stderr))
}

const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/graphs/digits.onnx");

/// The command line reports it in one line, and `auto` goes on with another backend.
#[test]
fn auto_falls_back() {
    let folder = Folder::new("auto");
    if !driver(&folder, &SOUND.replace("VERSION", "13000"), &[]) {
        return;
    }
    let (code, _, log) = plimsoll(&folder, &["run", MODEL, "--set", "batch=2"], &folder.0);
    assert_eq!(code, Some(0), "{log}");
    let lines: Vec<_> = log.lines().filter(|line| line.contains("backend: ")).collect();
    assert!(lines.len() == 1 && lines[0].contains("no CUDA: driver: it has no device"), "{log}");
    let (code, _, log) = plimsoll(&folder, &["run", MODEL, "--set", "batch=2", "--backend", "cuda"], &folder.0);
    assert!(code == Some(4) && log.contains("driver: it has no device"), "{log}");
    let (code, devices, _) = plimsoll(&folder, &["devices"], &folder.0);
    assert!(code == Some(0) && devices.contains("libcuda.so.1"), "{devices}");
}

/// A search that finds the stub driver and the real compiler. `None`, with a message, if that or a C compiler is missing.
fn paper(folder: &Folder, defines: &[&str]) -> Option<Search> {
    paper_of(folder, include_str!("cuda/driver.c"), defines, &[])
}

/// As [`paper`], of a driver with further libraries in it, by these names.
fn paper_of(folder: &Folder, text: &str, defines: &[&str], further: &[&str]) -> Option<Search> {
    if let Err(error) = machine_code(&Search::here(), "sm_90a", &[]) {
        assert!(std::env::var_os("PLIMSOLL_REQUIRE_NVRTC").is_none(), "NVRTC is required: {error}");
        eprintln!("SKIPPED: {error}");
        return None;
    }
    let found = report(&Search::here()).libraries.into_iter().find(|found| found.library == "nvrtc");
    let mut search = folder.search();
    search.folders.extend(Search::here().folders);
    search.folders.extend(found.and_then(|found| Some(found.path?.parent()?.to_owned())));
    let made = compile(folder, text, defines);
    // One library under several names has one count of what is used.
    for name in further.iter().chain(&["libnvidia-ml.so.1"]).filter(|_| made) {
        let [driver, other] = ["libcuda.so.1", name].map(|name| folder.0.join(name));
        std::fs::hard_link(driver, other).expect("the library has another name");
    }
    made.then_some(search)
}

const BARE: Settings = Settings { device: 0, libraries: false, allow_tf32: false };

#[test]
fn memory_is_what_was_planned() {
    let folder = Folder::new("memory");
    let Some(search) = paper(&folder, &[]) else { return };
    let (mut backend, name) = open(&search, &BARE).expect("the device opens");
    assert!(name.starts_with("cuda, device 0, Paper GPU"), "{name}");
    // More bytes than a staging segment holds, and no multiple of it.
    let bytes = 5 * STAGING / 2 + 4;
    let segment = backend.alloc(bytes, Memory::Device).expect("it has room");
    let slots = [Memory::Upload, Memory::Download].map(|memory| backend.alloc(STAGING, memory).expect("a slot"));
    assert!(backend.alloc(STAGING, Memory::Upload).is_err(), "a second slot");
    let all = Slice { segment, offset: 0, bytes };
    let mut found = vec![1; bytes as usize];
    backend.read(all, &mut found).expect("it is read");
    assert!(found.iter().all(|byte| *byte == 0), "memory comes filled with zeros");
    let data: Vec<u8> = (0..bytes).map(|i| (i % 251) as u8).collect();
    backend.write(all, &data).expect("it is written");
    backend.read(all, &mut found).expect("it is read");
    assert!(found == data, "what is written is read again");
    let beyond = Slice { offset: bytes - 4, bytes: 8, ..all };
    assert!(backend.write(beyond, &[0; 8]).is_err() && backend.read(beyond, &mut [0; 8]).is_err());
    slots.into_iter().chain([segment]).for_each(|segment| backend.free(segment));
    assert_eq!((backend.usage().bytes, backend.usage().allocations), (0, 3));
    assert!(backend.read(all, &mut found).is_err(), "a segment that was given back");

    let graph =
        onnx::import(&onnx::load(Path::new(MODEL)).expect("a graph"), &[("batch".into(), 4)]).expect("it is imported");
    let session = common::load(graph, backend, name, &Options::default()).expect("it is loaded");
    assert_eq!(session.usage().bytes, session.plan().bytes());
    let input = Tensor::from_f64(DType::F32, [4, 1, 8, 8], &[0.5; 256]);
    let run = || session.run(&[(session.plan().programs[0].inputs[0].name.as_str(), input.clone())]).expect("it runs");
    run();
    let (usage, parts) = (session.usage(), session.overhead());
    for _ in 0..1000 {
        run();
    }
    assert_eq!((session.usage(), session.overhead()), (usage, parts.clone()), "a run takes nothing");
    assert_eq!(usage.overhead, Some(parts.iter().map(|part| part.1).sum()));
    // The bytes that the stub driver takes for a module and a graph, and for each segment in steps of 2 MiB.
    let part = |name: &str| parts.iter().find(|part| part.0 == name).expect("a part").1;
    assert_eq!((part("modules"), part("graphs")), (1 << 20, 64 << 10));
    let device = session.plan().segments.iter().filter(|s| s.memory.is_device());
    let rounded: u64 = device.map(|s| s.bytes.next_multiple_of(2 << 20) - s.bytes).sum();
    assert_eq!(part("allocations rounded up"), rounded);
}

/// What lies in pinned memory of the host is allocated as planned, beside the device's.
#[test]
fn offloaded_data_is_counted_apart() {
    let folder = Folder::new("pinned");
    let Some(search) = paper(&folder, &[]) else { return };
    let (backend, name) = open(&search, &BARE).expect("the device opens");
    let recipe = Recipe { offload: Offload::Weights, ..Recipe::default() };
    let session = common::load(wide(), backend, name, &Options { recipe, ..Options::default() }).expect("it is loaded");
    let (usage, plan) = (session.usage(), session.plan());
    assert_eq!((usage.bytes, usage.pinned), (plan.bytes(), plan.offloaded_bytes()));
    let pinned = plan.segments.iter().filter(|s| s.memory == Memory::Pinned).map(|s| s.bytes);
    assert_eq!(usage.pinned, pinned.sum::<u64>());
    assert!(usage.pinned > 1 << 20, "{usage:?}");
}

/// What the driver takes for runs at once is counted once, part by part, and the segments of all are planned.
#[test]
fn forks_share_what_the_driver_takes() {
    let folder = Folder::new("forks");
    let Some(search) = paper(&folder, &[]) else { return };
    let (backend, name) = open(&search, &BARE).expect("the device opens");
    let graph =
        onnx::import(&onnx::load(Path::new(MODEL)).expect("a graph"), &[("batch".into(), 4)]).expect("it is imported");
    let options = Options { forks: 3, ..Options::default() };
    let session = common::load(graph, backend, name, &options).expect("it is loaded");
    let plan = session.plan();
    let forks = [session.fork().expect("it was planned"), session.fork().expect("it was planned")];
    let input = Tensor::from_f64(DType::F32, [4, 1, 8, 8], &[0.5; 256]);
    let segments = plan.segments.iter().filter(|s| s.memory.is_device());
    let rounded = segments.map(|s| plan.copies(s.class) * (s.bytes.next_multiple_of(2 << 20) - s.bytes));
    // The forks use the kernels that are loaded; each run has a graph of its own.
    let expected = [
        ("context", 0),
        ("libraries", 0),
        ("modules", 1 << 20),
        ("graphs", 3 * (64 << 10)),
        ("allocations rounded up", rounded.sum::<u64>()),
    ];
    for run in [&forks[1], &session, &forks[0]] {
        run.run(&[(plan.programs[0].inputs[0].name.as_str(), input.clone())]).expect("it runs");
        assert_eq!(session.overhead(), expected);
        assert_eq!(run.usage().bytes, plan.bytes());
        assert_eq!(run.usage().overhead, Some(expected.iter().map(|part| part.1).sum()));
    }
    assert_eq!(forks[0].overhead(), []);
}

/// Bindings of a range use the memory of the largest by turns. The driver takes memory for kernels and graphs in the first run of each.
#[test]
fn a_range_runs_in_the_memory_of_its_largest_binding() {
    let folder = Folder::new("range");
    let Some(search) = paper(&folder, &[]) else { return };
    let (backend, name) = open(&search, &BARE).expect("the device opens");
    let options = Options::default().set("batch", 1..=8);
    let source = session::source(onnx::load(Path::new(MODEL)).expect("a graph"));
    let session = common::load_range(source, backend, name, &options).expect("it is loaded");
    let input = session.plan().programs[0].inputs[0].name.clone();
    let run = |batch: usize| {
        let tensor = Tensor::from_f64(DType::F32, [batch, 1, 8, 8], &vec![0.5; 64 * batch]);
        let outputs = session.run(&[(input.as_str(), tensor)]).expect("it runs");
        assert_eq!(outputs[0].1.shape()[0], batch);
    };
    let taken = || (session.usage().bytes, session.usage().allocations);
    let bytes = session.plan().bytes();
    let before = taken();
    [4, 2, 8, 1, 3].into_iter().for_each(run);
    assert_eq!((taken(), before.0), (before, bytes));
    let beside = session.overhead();
    for _ in 0..100 {
        [4, 2, 8, 1, 4].into_iter().for_each(run);
    }
    assert_eq!((taken(), session.overhead()), (before, beside), "further runs take nothing");
}

/// An error frees everything that was made before it.
#[test]
fn a_graph_that_cannot_be_used_takes_nothing() {
    let folder = Folder::new("upload");
    let Some(search) = paper(&folder, &["-DUPLOADED=NO_MEMORY"]) else { return };
    let (mut backend, _) = open(&search, &BARE).expect("the device opens");
    let g = Trace::new("sum");
    let x = g.input("x", DType::F32, [256]);
    g.output("y", x + 1.0);
    let graph = g.finish().expect("the graph is sound");
    let plan = plan::planned(&graph.into(), backend.target(), &Limits { memory: None }).expect("it is planned");
    let kernel = backend.compile(&plan.programs[0].kernels[0]).expect("it is rendered");
    let segment = backend.alloc(1 << 10, Memory::Device).expect("it has room");
    let launch = Launch::new(kernel, vec![Slice { segment, offset: 0, bytes: 1 << 10 }; 2]);
    let alone = backend.record(std::slice::from_ref(&launch)).expect("one launch is no graph");
    let room = backend.room();
    for _ in 0..3 {
        let error = backend.record(&[launch.clone(), launch.clone()]).expect_err("the driver refuses").to_string();
        assert!(error.contains("cuGraphUpload: error 2"), "{error}");
    }
    assert_eq!(backend.room(), room);
    backend.replay(alone).expect("what was recorded before is as it was");
}

#[test]
fn a_full_card_and_limits_beyond_it() {
    let folder = Folder::new("full");
    let cache = folder.0.join("cache");
    if paper(&folder, &["-DMEMORY=(64ull<<20)", "-DTAKEN=(63ull<<20)"]).is_none() {
        return;
    }
    let run = |flags: &[&str]| {
        let all = [&["run", MODEL, "--backend", "cuda", "--no-libraries", "--set", "batch=400"][..], flags].concat();
        plimsoll(&folder, &all, &cache)
    };
    let (code, _, log) = run(&[]);
    let needs = log.contains("does not fit: ") && log.contains("the limit is 1,048,576 bytes");
    assert!(code == Some(2) && needs, "planned and free bytes: {log}");
    let (code, _, log) = run(&["--memory-limit", "1GiB"]);
    assert!(
        code == Some(1) && log.contains("limit is 1,073,741,824 bytes") && log.contains("has 67,108,864 bytes"),
        "{log}"
    );
    let (code, _, log) = run(&["--device", "3"]);
    assert!(code == Some(4) && log.contains("no device 3: device 0 is the only one"), "{log}");
    let (code, _, log) = run(&["--device", "first"]);
    assert!(code == Some(4) && log.contains("no device 'first'"), "{log}");
}

#[test]
fn compiled_kernels_are_kept() {
    let folder = Folder::new("kept");
    if paper(&folder, &[]).is_none() {
        return;
    }
    let cache = folder.0.join("cache");
    let run = |cache: &Path| {
        let args = ["run", MODEL, "--backend", "cuda", "--no-libraries", "--set", "batch=4"];
        let (code, _, log) = plimsoll(&folder, &args, cache);
        assert_eq!(code, Some(0), "{log}");
        log
    };
    assert!(run(&cache).contains("kernels compiled"));
    assert!(run(&cache).contains("kernels from the cache"));
    let entries =
        || std::fs::read_dir(&cache).expect("a folder").map(|e| e.expect("an entry").path()).collect::<Vec<_>>();
    let [entry] = &entries()[..] else { panic!("one entry: {:?}", entries()) };
    let whole = std::fs::read(entry).expect("it is read");
    std::fs::write(entry, &whole[..whole.len() / 2]).expect("it is cut");
    let log = run(&cache);
    assert!(log.contains("compiled again") && log.contains("kernels compiled"), "{log}");
    assert!(std::fs::read(entry).expect("it is read") == whole, "it is whole again");
    // A file has the name of the folder, so nothing can be stored there.
    let file = folder.0.join("file");
    std::fs::write(&file, "").expect("a file");
    let log = run(&file);
    assert!(log.contains("WARN") && log.contains("compiled kernels are not kept"), "{log}");
}

/// What the driver takes beside plans is measured once, kept, and estimated for plans without the device.
#[test]
fn what_is_beside_plans_is_measured_once() {
    let folder = Folder::new("beside");
    if paper(&folder, &[]).is_none() {
        return;
    }
    let cache = folder.0.join("cache");
    let ok = |args: &[&str]| {
        let (code, out, log) = plimsoll(&folder, args, &cache);
        assert_eq!(code, Some(0), "{log}");
        (out, log)
    };
    let list = || common::printed(&["devices"], &ok(&["devices", "--json"]).0);
    let measured = list()["devices"][1]["beside"].clone();
    // The stub driver takes 1 MiB for each module, of 16 of the 48 kernels, and 64 KiB for the graph of 384 steps.
    assert_eq!((&measured["kernel"], &measured["step"]), (&((3 << 20) / 48).into(), &((64 << 10) / 384).into()));
    let entries = std::fs::read_dir(cache.join("beside")).expect("a folder").map(|e| e.expect("an entry").path());
    let [file] = &entries.collect::<Vec<_>>()[..] else { panic!("one file") };
    let text = std::fs::read_to_string(file).expect("it is text");
    assert!(text.contains("Paper GPU, CUDA 13.0"), "{text}");

    // Later calls read the file.
    let content = unsealed(&text, file).expect("it is whole");
    let changed = sealed(&content.replace("\"context\": 0", "\"context\": 3145728"));
    std::fs::write(file, &changed).expect("it is written");
    assert_eq!(list()["devices"][1]["beside"]["context"], 3 << 20);
    let (devices, _) = ok(&["devices"]);
    assert!(devices.contains("\ncuda:0        3.00 MiB"), "{devices}");
    let plan = |target: &str| ok(&["plan", MODEL, "--set", "batch=4", "--target", target]);
    let line = |out: &str| out.lines().find(|line| line.starts_with("beside the plan")).map(str::to_owned);
    let found = line(&plan("cuda").0).expect("it is estimated");
    assert!(
        found.contains("context 3.00 MiB, modules ") && found.contains("(measured on Paper GPU, CUDA 13.0"),
        "{found}"
    );
    assert!(
        line(&plan("cpu").0).is_some_and(|line| line.ends_with(" of the process itself")),
        "no driver takes a part"
    );
    let target = |name: &str, target: &str| {
        let path = folder.0.join(name);
        std::fs::write(&path, target).expect("it is written");
        path.to_str().expect("it is text").to_owned()
    };
    let here = ok(&["devices", "cuda:0"]).0;
    assert_eq!(line(&plan(&target("here", &here)).0).expect("it is estimated"), found);
    let other = target("other", &here.replace("cuda: Paper GPU", "cuda: Tin GPU"));
    assert!(line(&plan(&other).0).expect("it is told").contains("not measured: `plimsoll devices`"));

    // It is no part of the plan.
    let path = folder.0.join("plan.json");
    let save =
        ["plan", MODEL, "--set", "batch=4", "--target", "cuda", "--json", "-o", path.to_str().expect("it is text")];
    let mut answer = common::printed(&save, &ok(&save).0);
    let record = answer.as_object_mut().expect("it is a plan");
    let beside = record.remove("beside").expect("it is estimated");
    assert_eq!(
        (record.remove("file"), record.remove("binding")),
        (Some(MODEL.into()), Some(serde_json::json!({ "batch": 4 })))
    );
    let part = |name: &str| beside[name].as_u64().expect("it is a number");
    assert_eq!(part("bytes"), (3 << 20) + part("modules") + part("graphs"));
    let steps = answer["programs"][0]["steps"].as_array().expect("it has steps").len() as u64;
    assert_eq!((part("graphs"), part("libraries")), (steps * ((64 << 10) / 384), 0));
    answer.as_object_mut().expect("it is a plan").remove("planned_bytes");
    let saved: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).expect("it is there")).expect("JSON");
    assert_eq!(answer, saved);
    let programs = ok(&[
        "plan",
        MODEL,
        concat!(env!("CARGO_MANIFEST_DIR"), "/graphs/mlp.onnxtxt"),
        "--set",
        "batch=4",
        "--target",
        "cuda",
        "--json",
    ]);
    let programs = common::printed(&["plan"], &programs.0);
    assert!(programs["beside"]["bytes"].as_u64().expect("it is estimated") > part("bytes"), "{}", programs["beside"]);

    // A file that is cut off or of another version is left out, in one line, and replaced.
    for broken in [
        &text[..text.len() / 2],
        &sealed(&content.replace("\"version\": 1", "\"version\": 0")),
        &text.replace("step", "stop"),
    ] {
        std::fs::write(file, broken).expect("it is written");
        let (out, log) = plan("cuda");
        let lines = log.lines().filter(|line| line.contains("WARN")).count();
        assert!(lines == 1 && log.contains("is not used") && out.contains("not measured: "), "{out}{log}");
        assert_eq!(list()["devices"][1]["beside"], measured);
        assert_eq!(std::fs::read_to_string(file).expect("it is text"), text);
    }
    // Where nothing can be kept, it is measured all the same.
    let nowhere = target("file", "");
    let (code, out, log) = plimsoll(&folder, &["devices"], Path::new(&nowhere));
    assert!(code == Some(0) && out.contains("beside plans") && log.contains("is not kept"), "{out}{log}");
}

/// On a real card: what is gone of its memory, as another user of it sees that, is what was planned and what was said to be beside the
/// plan; and 10,000 runs take nothing.
#[test]
fn audit() {
    let observer = match open(&Search::here(), &Settings::default()) {
        Ok((observer, name)) => {
            eprintln!("{name}");
            observer
        }
        Err(error) if std::env::var_os("PLIMSOLL_REQUIRE_CUDA").is_some() => panic!("CUDA is required: {error}"),
        Err(error) => return eprintln!("SKIPPED: {error}"),
    };
    let free = || observer.room().expect("the driver tells").free as i64;
    let before = free();
    let g = Trace::new("audit");
    let x = g.input("x", DType::F32, [256, 1024]);
    let w = g.input("w", DType::F32, [1024, 2048]);
    g.output("y", x.matmul(w).relu().softmax(-1));
    let options = Options::default().on(Choice::Cuda);
    let session = Session::from_graph(g.finish().expect("the graph is sound"), &options).expect("it is loaded");
    let inputs = [
        ("x", Tensor::from_f64(DType::F32, [256, 1024], &vec![0.25; 256 << 10])),
        ("w", Tensor::from_f64(DType::F32, [1024, 2048], &vec![0.5; 2 << 20])),
    ];
    session.run(&inputs).expect("it runs");
    let (usage, parts) = (session.usage(), session.overhead());
    let gone = before - free();
    let beside: u64 = parts.iter().map(|part| part.1).sum();
    eprintln!("planned {}, beside the plan {beside} {parts:?}, gone {gone}", usage.bytes);
    assert_eq!(usage.bytes, session.plan().bytes());
    let staging: u64 = session.plan().segments.iter().filter(|s| !s.memory.is_device()).map(|s| s.bytes).sum();
    assert_eq!(gone, (usage.bytes - staging + beside) as i64);
    for _ in 0..10_000 {
        session.with(|exec| exec.time()).expect("it runs");
    }
    session.run(&inputs).expect("it runs");
    eprintln!("gone after 10,000 runs {}", before - free());
    assert_eq!((before - free(), session.usage(), session.overhead()), (gone, usage, parts));
}

/// Kernels of a whole plan become one program that the compiler accepts.
#[test]
fn plans_compile() {
    let search = Search::here();
    let empty = machine_code(&search, "sm_90a", &[]);
    if let Err(error) = empty {
        assert!(std::env::var_os("PLIMSOLL_REQUIRE_NVRTC").is_none(), "NVRTC is required: {error}");
        eprintln!("SKIPPED: {error}");
        return;
    }
    let target = Target::cuda();
    for (file, dims) in [("digits.onnx", &["batch"][..]), ("mlp.onnxtxt", &["batch"])] {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("graphs").join(file);
        let dims: Vec<_> = dims.iter().map(|dim| ((*dim).to_owned(), 4)).collect();
        let graph = onnx::import(&onnx::load(&path).expect("a graph"), &dims).expect("it is imported");
        let graph = Recipe::default().whole(graph, &target).expect("the passes run");
        let plan = plan::planned(&graph, &target, &Limits { memory: None }).expect("it is planned");
        let render = |kernel: &Kernel| {
            let own = Target { libraries: Libraries::default(), ..target.clone() };
            let kernel = schedule::scheduled(kernel, &own).expect("there is a text for it");
            render(&kernel, &own, &Bindings::distinct(&kernel), Dialect::Cuda).expect("it is rendered")
        };
        let sources: Vec<_> = plan.programs[0].kernels.iter().map(render).collect();
        let texts: Vec<&str> = sources.iter().map(|source| source.text.as_str()).collect();
        let image = machine_code(&search, "sm_90a", &texts).unwrap_or_else(|error| panic!("{file}: {error}"));
        assert_eq!(&image[..4], b"\x7fELF");
    }
}
