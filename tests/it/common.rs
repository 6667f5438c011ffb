//! Helpers of several modules: the backends that are here, comparisons in terms of the peak, graphs from text, work compared with work.

use plimsoll::internals::backend::{Backend, cpu::Cpu};
use plimsoll::internals::exec::Exec;
use plimsoll::internals::plan::range::{ShapeRange, Source};
use plimsoll::internals::plan::{Graphs, Job, Limits};
use plimsoll::internals::session::Device;
use plimsoll::internals::tensor::Tensor;
use plimsoll::internals::{onnx, plan, reference};
use plimsoll::{DType, Error, Extent, Graph, Options, Plan, Recipe, Session, Shape, Target};
use serde_json::{Map, Value};
use std::collections::HashMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::Duration;

/// A backend's name and how to open it.
pub type Opener = (&'static str, fn() -> Box<dyn Backend>);

/// Every backend that can be opened here. Without a CUDA device or a wgpu adapter that backend is skipped, in words, unless
/// `PLIMSOLL_REQUIRE_CUDA` or `PLIMSOLL_REQUIRE_WGPU` is set: then its absence is a failure. `PLIMSOLL_BACKENDS` names the only ones to
/// use, separated by commas.
pub fn backends() -> Vec<Opener> {
    let mut list = all();
    if let Ok(named) = std::env::var("PLIMSOLL_BACKENDS") {
        list.retain(|(name, _)| named.split(',').any(|n| n == *name));
    }
    list
}

fn all() -> Vec<Opener> {
    let mut list: Vec<Opener> = vec![("cpu", || Box::new(Cpu::new(2)))];
    #[cfg(feature = "cuda")]
    match cuda() {
        Ok(held) => {
            // Devices share the context that this one holds: each test would make its own otherwise, which takes long.
            std::mem::forget(held);
            list.push(("cuda", || cuda().expect("it was opened before")));
        }
        Err(error) if std::env::var_os("PLIMSOLL_REQUIRE_CUDA").is_some() => panic!("CUDA is required: {error}"),
        Err(error) => eprintln!("SKIPPED on cuda: {error}"),
    }
    #[cfg(feature = "wgpu")]
    match plimsoll::internals::backend::wgpu::open(None, true) {
        Ok(_) => list
            .push(("wgpu", || plimsoll::internals::backend::wgpu::open(None, true).expect("it was opened before").0)),
        Err(error) if std::env::var_os("PLIMSOLL_REQUIRE_WGPU").is_some() => panic!("wgpu is required: {error}"),
        Err(error) => eprintln!("SKIPPED on wgpu: {error}"),
    }
    list
}

/// The first CUDA device.
#[cfg(feature = "cuda")]
pub fn cuda() -> plimsoll::Result<Box<dyn Backend>> {
    use plimsoll::internals::backend::cuda::{Settings, library::Search, open};
    open(&Search::here(), &Settings::default()).map(|(backend, _)| backend)
}

/// Holds two tensors to each other, within `tolerance` times the expected one's largest magnitude; exactly, if they are not of floats. The
/// error names the difference.
pub fn agrees(found: &Tensor, expected: &Tensor, tolerance: f64) -> Result<(), String> {
    let peak = expected.to_f64().iter().filter(|v| v.is_finite()).fold(0.0f64, |m, v| m.max(v.abs()));
    let absolute = if expected.dtype().is_float() { tolerance * peak } else { 0.0 };
    found.compare(expected, 0.0, absolute)
}

/// True if `PLIMSOLL_LONG` is set: long searches then run in full. Otherwise stderr names what is left out; a test that passes keeps what
/// the print macros write to itself.
pub fn runs_long(left_out: &str) -> bool {
    let set = std::env::var_os("PLIMSOLL_LONG").is_some_and(|value| !value.is_empty());
    if !set {
        writeln!(std::io::stderr(), "left out without PLIMSOLL_LONG=1: {left_out}").expect("stderr is open");
    }
    set
}

/// One of each `PART` kernels of every template, by their texts in order, unless long searches run in full. The first line of a text names
/// its template, so each template is among them.
pub fn part_of<T>(kernels: Vec<T>, what: &str, text: impl Fn(&T) -> &str) -> Vec<T> {
    const PART: usize = 8;
    if runs_long(&format!("{} of {PART} {what}", PART - 1)) {
        return kernels;
    }
    let mut seen = HashMap::new();
    let mut is_next = |kernel: &T| {
        let template = text(kernel).lines().next().unwrap_or_default();
        let count = seen.entry(template.to_owned()).or_insert(0);
        *count += 1;
        *count % PART == 1
    };
    kernels.into_iter().filter(|kernel| is_next(kernel)).collect()
}

/// Seconds for which this thread is on a core while `work` runs, the mean over a tenth of a second or more. Tests compare such figures with
/// one another, taken in one run; none is held against a clock. Off Linux it is the time that passes.
pub fn core_seconds(mut work: impl FnMut()) -> f64 {
    let now = || {
        let stat = std::fs::read_to_string("/proc/thread-self/schedstat").ok();
        let nanos: Option<u64> = stat.and_then(|stat| stat.split(' ').next()?.parse().ok());
        let since = || std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("the clock is set");
        nanos.map_or_else(since, Duration::from_nanos).as_secs_f64()
    };
    let (start, mut rounds) = (now(), 0);
    loop {
        work();
        rounds += 1;
        let spent = now() - start;
        if spent > 0.1 {
            return spent / f64::from(rounds);
        }
    }
}

/// A folder that is removed with the test.
pub struct Folder(pub PathBuf);

impl Folder {
    /// A folder of its own, whatever its name: tests run side by side.
    pub fn new(name: &str) -> Folder {
        static MADE: AtomicUsize = AtomicUsize::new(0);
        let (process, number) = (std::process::id(), MADE.fetch_add(1, Ordering::Relaxed));
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{process}-{number}"));
        std::fs::create_dir_all(&path).expect("a temporary folder");
        Folder(path)
    }

    /// The path of a name in it, as text.
    pub fn path(&self, name: &str) -> String {
        self.0.join(name).to_str().expect("the path is text").to_owned()
    }

    /// A file with this content; its path.
    pub fn file(&self, name: &str, content: impl AsRef<[u8]>) -> String {
        std::fs::write(self.0.join(name), content).expect("the file is written");
        self.path(name)
    }

    /// The sorted names in a folder below it.
    pub fn names(&self, below: &str) -> Vec<String> {
        let entries = std::fs::read_dir(self.0.join(below)).expect("the folder is there");
        let mut names: Vec<_> =
            entries.map(|e| e.expect("it can be listed").file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // A temporary folder that cannot be removed does no harm.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// The record that a command printed with `--json`, held against the schema that the program prints for it. The command is among the arguments.
#[track_caller]
pub fn printed(args: &[&str], out: &str) -> Value {
    static SCHEMAS: OnceLock<Value> = OnceLock::new();
    let schemas = SCHEMAS.get_or_init(|| {
        let output = Command::new(env!("CARGO_BIN_EXE_plimsoll")).arg("schema").output().expect("the program starts");
        serde_json::from_slice(&output.stdout).expect("schemas are JSON")
    });
    let records = schemas["$defs"].as_object().expect("it defines records");
    let command =
        args.iter().find(|word| records.contains_key(**word)).unwrap_or_else(|| panic!("a command: {args:?}"));
    let value: Value = serde_json::from_str(out).unwrap_or_else(|e| panic!("{args:?}: {e}: {out}"));
    let kinds = if value.get("error").is_some() { ["error", command] } else { [command, "error"] };
    let faults = kinds.map(|kind| conforms(&value, &records[kind], records).err());
    if let [Some(fault), Some(_)] = faults {
        panic!("{args:?}: {fault}");
    }
    value
}

/// Holds a value against a JSON schema of the keywords that the program uses. The error says where it differs.
pub fn conforms(value: &Value, schema: &Value, records: &Map<String, Value>) -> Result<(), String> {
    let Value::Object(keywords) = schema else { return Err(format!("no schema: {schema}")) };
    for (keyword, of) in keywords {
        let holds = match (&keyword[..], of, value) {
            ("$ref", Value::String(name), _) => {
                let record = name.strip_prefix("#/$defs/").and_then(|name| records.get(name));
                return conforms(value, record.unwrap_or_else(|| panic!("{name} is defined")), records)
                    .map_err(|fault| format!("{name}: {fault}"));
            }
            ("anyOf", Value::Array(ways), _) => {
                let faults: Vec<_> = ways.iter().map_while(|way| conforms(value, way, records).err()).collect();
                if faults.len() < ways.len() { Ok(()) } else { Err(format!("none of: {}", faults.join("; "))) }
            }
            ("const", only, _) if only == value => Ok(()),
            ("enum", Value::Array(words), _) if words.contains(value) => Ok(()),
            ("type", Value::String(kind), _) if is_of(value, kind) => Ok(()),
            ("required", Value::Array(keys), Value::Object(own)) => {
                let missing = keys.iter().find(|key| !own.contains_key(key.as_str().expect("a key is text")));
                missing.map_or(Ok(()), |key| Err(format!("{key} is missing")))
            }
            ("properties", Value::Object(known), Value::Object(own)) => {
                let mut both = own.iter().filter_map(|(key, value)| Some((key, value, known.get(key)?)));
                both.try_for_each(|(key, value, of)| conforms(value, of, records).map_err(|e| format!("{key}: {e}")))
            }
            ("additionalProperties", of, Value::Object(own)) => {
                let mut others =
                    own.iter().filter(|(key, _)| keywords.get("properties").is_none_or(|p| p.get(key).is_none()));
                match of {
                    Value::Bool(false) => others.next().map_or(Ok(()), |(key, _)| Err(format!("{key} is not known"))),
                    of => others
                        .try_for_each(|(key, value)| conforms(value, of, records).map_err(|e| format!("{key}: {e}"))),
                }
            }
            ("items", of, Value::Array(own)) => own.iter().try_for_each(|value| conforms(value, of, records)),
            ("const" | "enum" | "type", ..) => Err(format!("expected {of}, found {value:.60}")),
            ("required" | "properties" | "additionalProperties" | "items", ..) => Ok(()),
            _ => panic!("the keyword {keyword} is not known here"),
        };
        holds?;
    }
    Ok(())
}

fn is_of(value: &Value, kind: &str) -> bool {
    match kind {
        "object" => value.is_object(),
        "array" => value.is_array(),
        "string" => value.is_string(),
        "boolean" => value.is_boolean(),
        "null" => value.is_null(),
        "integer" => value.is_i64() || value.is_u64(),
        "number" => value.is_number(),
        _ => panic!("the type {kind} is not known here"),
    }
}

/// A graph from ONNX's textual form, without its header.
pub fn graph(text: &str) -> Graph {
    let text = format!("<ir_version: 8, opset_import: [\"\" : 17]>\n{text}");
    let model = onnx::Model::new(onnx::text::parse(&text, Path::new("text")).expect("it parses"));
    onnx::import(&model, &[]).expect("it is a graph")
}

/// A graph's plan after the passes, without a limit.
pub fn planned(graph: &Graph, target: &Target) -> Plan {
    let graph = graph.clone();
    let graph = Recipe::default().whole(graph, target).expect("the passes run");
    plan::planned(&graph, target, &Limits { memory: None }).expect("it is planned")
}

/// A graph, or the graphs of a range, planned and loaded on a device.
pub fn load(
    graphs: impl Into<Graphs>,
    backend: Box<dyn Backend>,
    device: impl Into<String>,
    options: &Options,
) -> Result<Session, Error> {
    load_programs([("", graphs)], backend, device, options)
}

/// Programs, planned together and loaded on a device.
pub fn load_programs<N: Into<String>, G: Into<Graphs>>(
    programs: impl IntoIterator<Item = (N, G)>,
    backend: Box<dyn Backend>,
    device: impl Into<String>,
    options: &Options,
) -> Result<Session, Error> {
    let device = Device::new(backend, device);
    Session::new(options.job(programs, &device), device, &|_, _| {})
}

/// The graphs of a range whose dims the options have, planned and loaded on a device.
pub fn load_range(
    source: Source,
    backend: Box<dyn Backend>,
    device: impl Into<String>,
    options: &Options,
) -> Result<Session, Error> {
    load(Graphs::Range(source, options.dims.clone()), backend, device, options)
}

/// The plans of a range.
pub fn range(
    source: Source,
    dims: &[(String, Extent)],
    target: &Target,
    recipe: Recipe,
    limits: &Limits,
) -> Result<ShapeRange, Error> {
    let graphs = Graphs::Range(source, dims.to_vec());
    let planned = plan::plan(&Job { recipe, ..Job::of(graphs, target).within(limits.memory) })?;
    Ok(planned.ranges.into_iter().next().flatten().expect("a dim has a range"))
}

/// Numbers from -1 to 1, the same for the same state.
pub fn random(state: &mut u64, shape: &Shape) -> Tensor {
    let mut next = || {
        *state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (*state >> 40) as f64 / f64::from(1u32 << 23) - 1.0
    };
    let values: Vec<f64> = (0..shape.numel()).map(|_| next()).collect();
    Tensor::from_f64(DType::F32, shape.clone(), &values)
}

/// Runs a graph of floats on random inputs, and holds its outputs against the reference's: within 1e-5 of the peak.
pub fn runs_as_the_reference(graph: &Graph, (name, open): &Opener, state: &mut u64) -> Plan {
    let inputs: Vec<_> = graph.inputs().iter().map(|&v| random(state, &graph.fact(v).shape)).collect();
    let expected = reference::run(graph, &inputs).expect("the reference runs");
    let backend = open();
    let passed = graph.clone();
    let passed = Recipe::default().whole(passed, backend.target()).expect("the passes run");
    let (plan, constants) = plan::compile(&passed, backend.target(), &Limits { memory: None }).expect("it is planned");
    let mut exec = Exec::load(backend, plan.clone(), &constants, &|_| {}).expect("it loads");
    let found = exec.run(&inputs).expect("it runs");
    for (found, expected) in found.iter().zip(&expected) {
        agrees(found, expected, 1e-5).unwrap_or_else(|e| panic!("{name}, {}: {e}", graph.name));
    }
    plan
}

/// Builds the library as other languages load it, with this feature. Returns a folder that has it.
///
/// The doors are built one at a time: what comes of them has one name, and is copied before the next is built.
pub fn door(feature: &str, variables: &[(&str, &str)]) -> PathBuf {
    static ALONE: Mutex<()> = Mutex::new(());
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let temporary = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let target = temporary.parent().expect("it is below the target folder");
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.current_dir(env!("CARGO_MANIFEST_DIR")).args(["build", "--example", "door", "--target-dir"]);
    cargo.arg(target).args(["--features", &format!("door,{feature}")]).envs(variables.iter().copied());
    let done = cargo.output().expect("cargo is here");
    assert!(done.status.success(), "{cargo:?}: {}", String::from_utf8_lossy(&done.stderr));
    let folder = temporary.join(format!("door-{feature}"));
    std::fs::create_dir_all(&folder).expect("a folder");
    let name = |of: &str| format!("{}{of}{}", std::env::consts::DLL_PREFIX, std::env::consts::DLL_SUFFIX);
    // A program that runs may still have the last one mapped.
    let _ = std::fs::remove_file(folder.join(name("plimsoll")));
    let made = target.join("debug/examples").join(name("door"));
    std::fs::copy(made, folder.join(name("plimsoll"))).expect("it was built");
    folder
}
