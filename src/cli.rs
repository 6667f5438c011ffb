//! The command line. stdout is the result, stderr the log.

use crate::backend::Usage;
use crate::dtype::DType;
use crate::eager::compare::{Setup, compare as compare_runs};
use crate::error::{Error, Result};
use crate::graph::Graph;
use crate::kernel::render::{Bindings, Dialect, PRELUDE, render};
use crate::onnx::{self, text};
use crate::plan::place::{self, Effort};
use crate::plan::{Limits, Plan};
use crate::report::{self, Table};
use crate::session::{self, Choice, Options, Session};
use crate::shape::Shape;
use crate::target::{Family, Target};
use crate::tensor::Tensor;
use crate::{npy, pass, plan};
use clap::{Args, Parser, Subcommand, ValueEnum};
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::{Map, Value, json};
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

mod support;
use support::Support;

const EXIT_CODES: &str =
    "Exit codes: 0 ok, 1 bad input or usage, 2 does not fit the limit, 3 results differ, 4 backend unavailable.
The log goes to stderr; RUST_LOG=plimsoll=debug shows passes and placements.";

/// Plans every byte of a graph's memory before it runs, and runs it from one arena.
///
/// MODEL is an ONNX file: .onnx (protobuf) or .onnxtxt (ONNX text syntax).
#[derive(Parser)]
#[command(name = "plimsoll", version, after_help = EXIT_CODES)]
struct Cli {
    #[command(subcommand)]
    command: Command,
    /// How the result is printed.
    #[arg(long, global = true, value_enum, default_value_t = Format::Text)]
    format: Format,
    /// The same as --format json.
    #[arg(long, global = true)]
    json: bool,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum Format {
    Text,
    Json,
}

#[derive(Subcommand)]
enum Command {
    /// Run a graph once and show its outputs and its memory.
    Run(Run),
    /// Plan a graph's memory, with no device and no weights.
    Plan(PlanCommand),
    /// Place buffers whose lives are known: minimalloc's CSV in and out.
    Place(Place),
    /// Judge a plan file by its own content.
    Check {
        /// A plan, as `plan -o` writes it.
        plan: PathBuf,
    },
    /// Run a graph both eagerly and planned, and compare memory and results.
    Compare(Compare),
    /// Time a graph.
    Bench(Bench),
    /// Print a graph in another form.
    Emit(Emit),
    /// List the devices that can run a plan here, and what was found of CUDA.
    Devices {
        /// Print what planning may assume of this one (cpu, cuda:0, wgpu:0) as JSON, for `plan --target FILE`.
        device: Option<String>,
    },
    /// List the operators, and on which devices they take which element types.
    Ops,
}

#[derive(Args)]
struct Model {
    /// An ONNX graph: .onnx or .onnxtxt.
    model: PathBuf,
    /// Bind a named dim. Dims that a given input's file tells need not be bound.
    #[arg(long = "set", value_name = "DIM=N", value_parser = binding)]
    dims: Vec<(String, usize)>,
    /// Refuse a plan of more than this many bytes (512, 20KiB, 1.5GB ...), exit code 2.
    #[arg(long, value_name = "SIZE", value_parser = size)]
    memory_limit: Option<u64>,
    /// Make every operator a kernel of its own.
    #[arg(long)]
    no_fuse: bool,
    /// Threads of the CPU backend. Default: the host's cores; for `plan`, what the target says.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=4096))]
    threads: Option<u16>,
}

#[derive(Args)]
struct Inputs {
    /// An input: NAME=FILE.npy, or NAME=2x784xf32=0.5 for a constant. Others are random.
    #[arg(long = "input", value_name = "NAME=VALUE")]
    inputs: Vec<String>,
    /// Seed of the random inputs.
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum Backend {
    /// CUDA, else wgpu on a GPU, else the CPU; says which and why.
    Auto,
    /// An NVIDIA GPU.
    Cuda,
    /// Vulkan, Metal or DX12, software adapters included.
    Wgpu,
    /// The host's threads.
    Cpu,
}

impl From<Backend> for Choice {
    fn from(backend: Backend) -> Choice {
        match backend {
            Backend::Auto => Choice::Auto,
            Backend::Cuda => Choice::Cuda,
            Backend::Wgpu => Choice::Wgpu,
            Backend::Cpu => Choice::Cpu,
        }
    }
}

#[derive(Args)]
struct On {
    /// What to run on.
    #[arg(long, value_enum, default_value_t = Backend::Auto)]
    backend: Backend,
    /// Which of the backend's devices: its number, or for wgpu a part of its name. Default: the first CUDA device, the best of wgpu.
    #[arg(long, value_name = "N")]
    device: Option<String>,
    /// CUDA may round f32 operands of matrix products and convolutions to TF32: faster, about 1e-3 of the peak less exact.
    #[arg(long)]
    allow_tf32: bool,
    /// CUDA does without cuBLASLt and cuDNN.
    #[arg(long)]
    no_libraries: bool,
}

#[derive(Args)]
struct Run {
    #[command(flatten)]
    model: Model,
    #[command(flatten)]
    inputs: Inputs,
    #[command(flatten)]
    on: On,
    /// Write each output to DIR/NAME.npy; characters outside [A-Za-z0-9._-] become '_'.
    #[arg(long, value_name = "DIR")]
    output_dir: Option<PathBuf>,
    /// Compare an output with a file: NAME=FILE.npy. Exit code 3 when they differ.
    #[arg(long, value_name = "NAME=FILE")]
    expect: Vec<String>,
    /// Relative tolerance of --expect.
    #[arg(long, default_value_t = 1e-4, value_parser = tolerance)]
    rtol: f64,
    /// Absolute tolerance of --expect.
    #[arg(long, default_value_t = 1e-5, value_parser = tolerance)]
    atol: f64,
    /// The right classes, as an .npy of integers: prints predictions and accuracy of the first output.
    #[arg(long, value_name = "FILE")]
    labels: Option<PathBuf>,
    /// Time each step by itself, after the run, and write spans and live bytes in Chrome's trace format (Perfetto).
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Print which device and kernel each step got, and why.
    #[arg(long)]
    placement: bool,
}

#[derive(Args)]
struct PlanCommand {
    #[command(flatten)]
    model: Model,
    /// What to plan for: cpu, cuda (an H200), wgpu (the WebGPU baseline), or a target's JSON file (`devices cuda:0`).
    #[arg(long, default_value = "cpu")]
    target: String,
    /// Write the plan as JSON, for `check`.
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
}

#[derive(Args)]
struct Place {
    /// CSV files with the columns id, lower, upper, size and perhaps alignment, or a folder of them.
    #[arg(required = true)]
    instances: Vec<PathBuf>,
    /// Stop at a peak within this size; exit code 2 when none is found.
    #[arg(long, value_name = "SIZE", value_parser = size)]
    capacity: Option<u64>,
    /// A power of two that divides all offsets; sizes are rounded up to it.
    #[arg(long, value_name = "N", default_value_t = 1)]
    align: u64,
    /// Stop after this time (10ms, 1s, 2m ...) instead of a number of steps. The best placement so far is always there.
    #[arg(long, value_name = "TIME", value_parser = duration, conflicts_with = "steps")]
    deadline: Option<Duration>,
    /// Stop after so many steps of one or two nanoseconds: the same result on every machine.
    #[arg(long, value_name = "N", default_value_t = 2_000_000_000)]
    steps: u64,
    /// Write the instance with a column of offsets.
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
}

#[derive(Args)]
struct Compare {
    #[command(flatten)]
    model: Model,
    #[command(flatten)]
    inputs: Inputs,
    #[command(flatten)]
    on: On,
    /// Timed runs of each way.
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    iters: u32,
}

#[derive(Args)]
struct Bench {
    #[command(flatten)]
    model: Model,
    #[command(flatten)]
    inputs: Inputs,
    #[command(flatten)]
    on: On,
    /// Runs that are not timed, first.
    #[arg(long, value_name = "N", default_value_t = 3)]
    warmup: u32,
    /// Timed runs.
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..))]
    iters: u32,
}

#[derive(Args)]
struct Emit {
    #[command(flatten)]
    model: Model,
    /// onnxtxt: the file as text; dot: the graph after the passes; wgsl, cuda: the kernels.
    #[arg(value_enum)]
    form: Form,
}

#[derive(Clone, Copy, ValueEnum)]
enum Form {
    Onnxtxt,
    Dot,
    Wgsl,
    Cuda,
}

/// Ways to run a graph that `compare` tries on every device; one more where the device has a pool.
const WAYS: u64 = 5;
/// Fusion reorders sums: results agree with unfused ones to this share of the output's peak.
const FUSED_TOLERANCE: f64 = 1e-4;

/// Runs the command line of this process.
pub fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            // A closed pipe is no failure of the help text.
            let _ = error.print();
            return ExitCode::from(u8::from(error.use_stderr()));
        }
    };
    let filter = tracing_subscriber::EnvFilter::try_from_default_env();
    let filter = filter.unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("error,plimsoll=info"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .without_time()
        .with_target(false)
        .init();
    let json = cli.json || cli.format == Format::Json;
    let result = match &cli.command {
        Command::Run(c) => run(c, json),
        Command::Plan(c) => plan_command(c, json),
        Command::Place(c) => place(c, json),
        Command::Check { plan } => check(plan, json),
        Command::Compare(c) => compare(c, json),
        Command::Bench(c) => bench(c, json),
        Command::Emit(c) => emit(c, json),
        Command::Devices { device } => devices(device.as_deref(), json),
        Command::Ops => operators(json),
    };
    match result.and_then(|text| print(&text)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(error.exit_code())
        }
    }
}

/// Writes the result. A reader that has seen enough (`| head`) is no error.
fn print(text: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(e) if e.kind() != std::io::ErrorKind::BrokenPipe => {
            Err(Error::Usage(format!("cannot write to stdout: {e}")))
        }
        _ => Ok(()),
    }
}

fn line(value: &Value) -> String {
    format!("{value}\n")
}

fn binding(text: &str) -> Result<(String, usize), String> {
    let (name, extent) = text.split_once('=').ok_or("expected DIM=N")?;
    let extent = extent.parse().map_err(|_| format!("expected a whole number after '{name}=', found '{extent}'"))?;
    Ok((name.to_owned(), extent))
}

fn size(text: &str) -> Result<u64, String> {
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let scale: u64 = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "kb" => 1000,
        "mb" => 1_000_000,
        "gb" => 1_000_000_000,
        "k" | "kib" => 1 << 10,
        "m" | "mib" => 1 << 20,
        "g" | "gib" => 1 << 30,
        "t" | "tib" => 1 << 40,
        other => return Err(format!("unknown unit '{other}'; use B, KiB, MiB, GiB, kB, MB or GB")),
    };
    if let Ok(whole) = number.parse::<u64>() {
        return whole.checked_mul(scale).ok_or_else(|| format!("'{text}' is more than 64 bits can count"));
    }
    let value: f64 = number.parse().map_err(|_| format!("expected a size such as 512MiB, found '{text}'"))?;
    let bytes = value * scale as f64;
    if bytes < u64::MAX as f64 { Ok(bytes as u64) } else { Err(format!("'{text}' is more than 64 bits can count")) }
}

fn duration(text: &str) -> Result<Duration, String> {
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let scale = match unit.trim() {
        "ms" => 1e-3,
        "s" => 1.0,
        "m" | "min" => 60.0,
        other => return Err(format!("unknown unit '{other}'; use ms, s or min")),
    };
    let seconds = number.parse::<f64>().ok().and_then(|n| Duration::try_from_secs_f64(n * scale).ok());
    seconds.ok_or_else(|| format!("expected a time such as 500ms, found '{text}'"))
}

fn tolerance(text: &str) -> Result<f64, String> {
    let value = text.parse::<f64>().ok().filter(|v| v.is_finite() && *v >= 0.0);
    value.ok_or_else(|| "expected a number that is not negative".into())
}

/// A tensor that a flag gives, by name.
struct Given {
    name: String,
    tensor: Tensor,
}

fn given(flag: &str, values: &[String]) -> Result<Vec<Given>> {
    values.iter().map(|text| value(flag, text)).collect()
}

fn value(flag: &str, text: &str) -> Result<Given> {
    let bad = || Error::Usage(format!("{flag} {text}: expected NAME=FILE.npy or NAME=2x784xf32=0.5"));
    let (name, value) = text.split_once('=').ok_or_else(bad)?;
    let name = name.to_owned();
    let Some((spec, fill)) = value.split_once('=').filter(|_| !Path::new(value).exists()) else {
        return Ok(Given { name, tensor: npy::read(Path::new(value))? });
    };
    let mut parts: Vec<&str> = spec.split('x').collect();
    let dtype = parts.pop().and_then(DType::from_name).ok_or_else(bad)?;
    let shape = parts.iter().map(|d| d.parse::<usize>().map_err(|_| bad())).collect::<Result<Vec<_>>>()?;
    let fill: f64 = fill.parse().map_err(|_| bad())?;
    let tensor =
        made(dtype, Shape::new(shape), || fill).map_err(|what| Error::Usage(format!("{flag} {text}: {what}")))?;
    Ok(Given { name, tensor })
}

/// A tensor of made-up values, or why the host cannot hold it.
fn made(dtype: DType, shape: Shape, mut next: impl FnMut() -> f64) -> Result<Tensor, String> {
    const BLOCK: usize = 4096;
    let size = shape.checked_len().and_then(|n| n.checked_mul(dtype.size()));
    let size = size.ok_or_else(|| format!("{dtype}{shape} is larger than any memory"))?;
    let mut bytes = Vec::new();
    bytes.try_reserve_exact(size).map_err(|_| format!("the host has no {size} bytes for {dtype}{shape}"))?;
    let mut left = shape.numel();
    while left > 0 {
        let block: Vec<f64> = std::iter::repeat_with(&mut next).take(left.min(BLOCK)).collect();
        bytes.extend_from_slice(Tensor::from_f64(dtype, vec![block.len()], &block).bytes());
        left -= block.len();
    }
    Tensor::new(dtype, shape, bytes).map_err(|e| e.to_string())
}

impl Model {
    fn options(&self, on: &On) -> Options {
        Options {
            backend: on.backend.into(),
            device: on.device.clone(),
            libraries: !on.no_libraries,
            allow_tf32: on.allow_tf32,
            dims: self.dims.clone(),
            threads: self.threads.map_or(0, usize::from),
            fuse: !self.no_fuse,
            memory_limit: self.memory_limit,
        }
    }

    /// The graph, with named dims bound by `--set` and by the shapes of the inputs that are given.
    fn graph(&self, given: &[Given]) -> Result<Graph> {
        let model = onnx::load(&self.model)?;
        let inputs: Vec<&str> = model.proto.graph.iter().flat_map(|g| &g.input).map(|i| i.name.as_str()).collect();
        if let Some(Given { name, .. }) = given.iter().find(|g| !inputs.contains(&g.name.as_str())) {
            let what = format!("--input {name}: not an input of the graph; its inputs: {}", inputs.join(", "));
            return Err(Error::Usage(what).in_file(&self.model));
        }
        let mut dims = self.dims.clone();
        for Given { name, tensor } in given {
            for (dim, extent) in model.dims_of(name, tensor.shape()) {
                if !dims.iter().any(|(d, _)| *d == dim) {
                    dims.push((dim, extent));
                }
            }
        }
        onnx::import(&model, &dims).map_err(|e| e.in_file(&self.model))
    }

    /// Opens the device, plans, and loads the weights under a progress bar.
    fn session(&self, on: &On, given: &[Given]) -> Result<Session> {
        let options = self.options(on);
        let graph = self.graph(given)?;
        let (device, name) = session::open(&options)?;
        tracing::info!("backend: {name}");
        let bar = progress("weights");
        let report = |done: usize, of: usize| {
            bar.set_length(of as u64);
            bar.set_position(done as u64);
        };
        let session = Session::on_backend(graph, device, name, &options, &report);
        bar.finish_and_clear();
        session.map_err(|e| e.in_file(&self.model))
    }
}

/// A bar on a terminal, nothing elsewhere.
fn progress(what: &'static str) -> ProgressBar {
    let style = ProgressStyle::with_template("{msg:>10} [{bar:40}] {pos}/{len} {eta}").expect("the template is valid");
    ProgressBar::new(0).with_style(style.progress_chars("=> ")).with_message(what)
}

/// Inputs in the plan's order: those given, random ones for the rest.
fn fill(plan: &Plan, given: Vec<Given>, seed: u64) -> Result<Vec<Tensor>> {
    let mut random = Random(seed);
    let mut inputs: Vec<_> = given.into_iter().map(|g| (g.name, g.tensor)).collect();
    for port in &plan.inputs {
        if !inputs.iter().any(|(name, _)| *name == port.name) {
            let tensor = made(port.dtype, port.shape.clone(), || random.value(port.dtype));
            let tensor = tensor.map_err(|what| Error::Usage(format!("input '{}': {what}", port.name)))?;
            inputs.push((port.name.clone(), tensor));
        }
    }
    let inputs: Vec<_> = inputs.iter().map(|(name, tensor)| (name.as_str(), tensor.clone())).collect();
    session::arrange(plan, &inputs)
}

/// splitmix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Floats in [-1, 1); 0 or 1 for integers, which every index allows.
    fn value(&mut self, dtype: DType) -> f64 {
        let bits = self.next();
        if dtype.is_float() { (bits >> 11) as f64 / (1u64 << 52) as f64 - 1.0 } else { (bits >> 63) as f64 }
    }
}

/// The file's name for an output: what a shell or a file system could trip over becomes `_`.
fn file_name(output: &str) -> String {
    let safe = |c: char| if c.is_ascii_alphanumeric() || "._-".contains(c) { c } else { '_' };
    format!("{}.npy", output.chars().map(safe).collect::<String>())
}

fn run(command: &Run, json: bool) -> Result<String> {
    let given = given("--input", &command.inputs.inputs)?;
    let expected = self::given("--expect", &command.expect)?;
    let labels = command.labels.as_deref().map(npy::read).transpose()?;
    let session = command.model.session(&command.on, &given)?;
    let names: Vec<&str> = session.plan().outputs.iter().map(|p| p.name.as_str()).collect();
    if let Some(Given { name, .. }) = expected.iter().find(|e| !names.contains(&e.name.as_str())) {
        let what = format!("--expect {name}: not an output of the graph; its outputs: {}", names.join(", "));
        return Err(Error::Usage(what));
    }
    if command.output_dir.is_some() {
        for (i, name) in names.iter().enumerate() {
            if let Some(other) = names[..i].iter().find(|other| file_name(other) == file_name(name)) {
                let file = file_name(name);
                return Err(Error::Usage(format!("--output-dir: outputs '{other}' and '{name}' would both be {file}")));
            }
        }
    }
    let inputs = fill(session.plan(), given, command.inputs.seed)?;
    let outputs = session.with(|exec| exec.run(&inputs))?;
    let outputs: Vec<_> = names.iter().map(|name| (*name).to_owned()).zip(outputs).collect();
    let usage = session.usage();
    let notes = session.with(|exec| exec.notes());
    if let Some(path) = &command.trace {
        let times = session.with(|exec| exec.profile())?;
        let trace = report::trace(session.plan(), session.device(), &times, &notes);
        write_whole(path, &line(&trace)).map_err(|e| Error::file(path, "write the trace", e))?;
    }
    let score = labels.zip(outputs.first()).map(|(labels, first)| Score::new(first, &labels)).transpose()?;
    if let Some(folder) = &command.output_dir {
        std::fs::create_dir_all(folder).map_err(|e| Error::file(folder, "create the folder", e))?;
        for (name, tensor) in &outputs {
            npy::write(&folder.join(file_name(name)), tensor)?;
        }
    }
    for Given { name, tensor } in &expected {
        let (_, found) = outputs.iter().find(|(n, _)| n == name).expect("expected names were checked");
        let same = found.compare(tensor, command.rtol, command.atol);
        same.map_err(|what| Error::Differ(format!("output '{name}': {what}")))?;
    }
    if json {
        let outputs = outputs.iter().map(|(name, t)| {
            let [min, mean, max] = spread(t);
            json!({"name": name, "dtype": t.dtype().name(), "shape": t.shape(), "min": min, "mean": mean, "max": max})
        });
        let mut value = json!({
            "model": session.plan().name,
            "device": session.device(),
            "outputs": outputs.collect::<Vec<_>>(),
            "memory": memory(session.plan(), usage),
        });
        for (part, bytes) in session.overhead() {
            value["memory"]["overhead"][part] = json!(bytes);
        }
        if command.placement {
            let steps = session.plan().steps.iter().zip(&notes);
            value["placement"] = steps.map(|(step, note)| json!({"node": step.name, "kernel": note})).collect();
        }
        if let Some(score) = &score {
            value["predictions"] = json!(score.predicted);
            value["right"] = json!(score.right);
            value["accuracy"] = json!(score.right as f64 / score.predicted.len() as f64);
        }
        Ok(line(&value))
    } else {
        let placement = report::placement(session.plan(), session.device(), &notes);
        let placement = if command.placement { placement + "\n" } else { String::new() };
        Ok(placement + &run_text(&session, &outputs, score.as_ref(), usage))
    }
}

fn memory(plan: &Plan, usage: Usage) -> Value {
    let mut value = json!(plan.summary);
    value["allocated_bytes"] = json!(usage.bytes);
    value["allocations"] = json!(usage.allocations);
    value["overhead_bytes"] = json!(usage.overhead);
    value
}

fn run_text(session: &Session, outputs: &[(String, Tensor)], score: Option<&Score>, usage: Usage) -> String {
    let mut text = format!("{} on {}\n\n", session.plan().name, session.device());
    let mut table = Table::new("<<<>");
    table.row(["output", "type", "shape", "min", "mean", "max"]);
    for (name, tensor) in outputs {
        let figures = spread(tensor).map(|v| v.map_or("-".into(), |v| format!("{v:.6}")));
        let [min, mean, max] = figures;
        table.row([name.clone(), tensor.dtype().to_string(), tensor.shape().to_string(), min, mean, max]);
    }
    text += &table.to_string();
    if let Some(score) = score {
        text += "\npredicted classes\n";
        for row in score.predicted.chunks(40) {
            let row: Vec<_> = row.iter().map(usize::to_string).collect();
            text += &format!("  {}\n", row.join(" "));
        }
        let of = score.predicted.len();
        text += &format!("accuracy {:.2} % ({} of {of} right)\n", 100.0 * score.right as f64 / of as f64, score.right);
    }
    text + "\n" + &report::memory(session.plan(), Some(usage)) + &report::overhead(&session.overhead())
}

/// Smallest, mean and largest element; none of an empty tensor.
fn spread(tensor: &Tensor) -> [Option<f64>; 3] {
    let values = tensor.to_f64();
    if values.is_empty() {
        return [None; 3];
    }
    let min = values.iter().copied().fold(f64::INFINITY, f64::min);
    let max = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    [min, values.iter().sum::<f64>() / values.len() as f64, max].map(Some)
}

/// Predicted classes and how many are right.
struct Score {
    predicted: Vec<usize>,
    right: usize,
}

impl Score {
    fn new((name, scores): &(String, Tensor), labels: &Tensor) -> Result<Score> {
        let classes = match scores.shape()[..] {
            [rows, classes] if rows == labels.shape().numel() && classes > 0 => classes,
            _ => {
                let (found, rows) = (scores.shape(), labels.shape().numel());
                return Err(Error::Usage(format!(
                    "--labels: expected output '{name}' of shape [{rows},classes] for {rows} labels, found {found}"
                )));
            }
        };
        let labels = labels.to_i64().ok_or_else(|| Error::Usage("--labels: expected integers".into()))?;
        let best = |row: &[f64]| (0..classes).max_by(|&a, &b| row[a].total_cmp(&row[b]).then(b.cmp(&a)));
        let predicted: Vec<usize> = scores.to_f64().chunks(classes).filter_map(best).collect();
        let right = predicted.iter().zip(&labels).filter(|&(&p, &l)| p as i64 == l).count();
        Ok(Score { predicted, right })
    }
}

fn target(name: &str, threads: Option<u16>) -> Result<Target> {
    if let Some(mut target) = Target::preset(name) {
        if let (Family::Cpu, Some(threads)) = (target.family, threads) {
            target.threads = threads.into();
        }
        return Ok(target);
    }
    let path = Path::new(name);
    let text = std::fs::read_to_string(path).map_err(|e| {
        Error::Usage(format!("--target {name}: neither cpu, wgpu nor cuda, nor a file that can be read: {e}"))
    })?;
    Target::from_json(&text, path)
}

fn plan_command(command: &PlanCommand, json: bool) -> Result<String> {
    let target = target(&command.target, command.model.threads)?;
    let in_file = |e: Error| e.in_file(&command.model.model);
    let mut graph = command.model.graph(&[])?;
    pass::run(&mut graph, &target, !command.model.no_fuse).map_err(in_file)?;
    let limits = Limits { memory: command.model.memory_limit };
    let plan = plan::plan(&graph, &target, &limits).map_err(in_file)?;
    if let Some(path) = &command.output {
        write_whole(path, &plan.to_json()).map_err(|e| Error::file(path, "write the plan", e))?;
    }
    if json {
        return Ok(plan.to_json());
    }
    Ok(format!("{} for {}, {} steps\n\n{}", plan.name, target.name, plan.steps.len(), report::memory(&plan, None)))
}

/// Writes a file that appears under its name only when it is whole.
fn write_whole(path: &Path, text: &str) -> std::io::Result<()> {
    // A device, a pipe or a link is written through, never replaced.
    if path.symlink_metadata().is_ok_and(|there| !there.is_file()) {
        return std::fs::write(path, text);
    }
    let mut partial = path.as_os_str().to_owned();
    partial.push(".partial");
    let result = std::fs::write(&partial, text).and_then(|()| std::fs::rename(&partial, path));
    if result.is_err() {
        // The first error is the one to report; whether the remains could be removed adds nothing.
        let _ = std::fs::remove_file(&partial);
    }
    result
}

fn place(command: &Place, json: bool) -> Result<String> {
    let mut files = Vec::new();
    for path in &command.instances {
        match std::fs::read_dir(path) {
            Ok(folder) => {
                let found = folder.filter_map(|entry| Some(entry.ok()?.path()));
                let mut found: Vec<_> = found.filter(|file| file.extension().is_some_and(|e| e == "csv")).collect();
                found.sort();
                if found.is_empty() {
                    return Err(Error::Usage("the folder has no .csv file".into()).in_file(path));
                }
                files.append(&mut found);
            }
            Err(_) => files.push(path.clone()),
        }
    }
    if command.output.is_some() && files.len() > 1 {
        return Err(Error::Usage(format!("--output takes one instance, found {}", files.len())));
    }
    let mut table = Table::new("<>");
    table.row(["instance", "buffers", "bound", "peak", "gap", "CPU s"]);
    let (mut records, mut misfit) = (Vec::new(), None);
    for file in &files {
        let start = Instant::now();
        let mut instance = place::Table::read(file, command.align)?;
        instance.problem.capacity = command.capacity;
        let until = |time| start.checked_add(time).map(Effort::Until);
        let effort = command.deadline.map_or(Some(Effort::Steps(command.steps)), until);
        let effort = effort.ok_or_else(|| Error::Usage("--deadline: later than the clock can tell".into()))?;
        let (wall, cpu) = (Instant::now(), cpu_time());
        let solution = place::place(&instance.problem, effort);
        let seconds = match (cpu, cpu_time()) {
            (Some(before), Some(after)) => after.saturating_sub(before),
            _ => wall.elapsed(),
        };
        let seconds = seconds.as_secs_f64();
        let bound = plan::check::placement(&instance.problem, &solution).map_err(|e| e.in_file(file))?;
        if let Some(path) = &command.output {
            let text = instance.to_csv(Some(&solution));
            write_whole(path, &text).map_err(|e| Error::file(path, "write the placement", e))?;
        }
        let peak = solution.peak;
        let gap = if bound == 0 { 0.0 } else { (peak - bound) as f64 / bound as f64 * 100.0 };
        let (name, buffers) = (file.display().to_string(), instance.ids.len());
        let mut record = json!({
            "instance": name, "buffers": buffers, "lower_bound": bound, "peak": peak, "gap_percent": gap, "cpu_seconds": seconds,
        });
        if let Some(capacity) = command.capacity {
            record["capacity"] = json!(capacity);
            record["fits"] = json!(peak <= capacity);
            record["deficit"] = json!(peak.saturating_sub(capacity));
            if peak > capacity {
                let what = format!("{name}: a placement (lower bound {bound}, found {peak})");
                misfit.get_or_insert(Error::Fit { what, needed: peak, limit: capacity });
            }
        }
        records.push(record);
        let cells = [report::grouped(buffers as u64), report::grouped(bound), report::grouped(peak)];
        let cells = cells.into_iter().chain([format!("{gap:.3} %"), format!("{seconds:.3}")]);
        table.row(std::iter::once(name).chain(cells));
    }
    let single = records.len() == 1 && !command.instances[0].is_dir();
    let text = match json {
        true if single => line(&records.remove(0)),
        true => line(&json!(records)),
        false => table.to_string(),
    };
    match misfit {
        None => Ok(text),
        Some(error) => print(&text).and(Err(error)),
    }
}

/// CPU time of this thread, where the system tells.
fn cpu_time() -> Option<Duration> {
    let stat = std::fs::read_to_string("/proc/thread-self/schedstat").ok()?;
    stat.split(' ').next()?.parse().ok().map(Duration::from_nanos)
}

fn check(path: &Path, json: bool) -> Result<String> {
    let text = std::fs::read_to_string(path).map_err(|e| Error::file(path, "read the plan", e))?;
    let plan = Plan::from_json(&text, path)?;
    if json {
        return Ok(line(&json!({"plan": plan.name, "steps": plan.steps.len(), "ok": true})));
    }
    Ok(format!("{}: sound: {} steps, {} buffers\n", plan.name, plan.steps.len(), plan.buffers.len()))
}

fn compare(command: &Compare, json: bool) -> Result<String> {
    let given = given("--input", &command.inputs.inputs)?;
    let graph = command.model.graph(&given)?;
    let options = command.model.options(&command.on);
    let (device, name) = session::open(&options)?;
    tracing::info!("backend: {name}");
    session::check_limit(&*device, options.memory_limit)?;
    let unlimited = Options { memory_limit: None, ..options.clone() };
    let compiled = session::compile(graph.clone(), device.target(), &unlimited);
    let (plan, _) = compiled.map_err(|e| e.in_file(&command.model.model))?;
    let inputs = fill(&plan, given, command.inputs.seed)?;
    let ways = WAYS + u64::from(device.pools());
    drop(device);
    let open = || session::open(&options).map(|(backend, _)| backend);
    let bar = progress("ways");
    bar.set_length(ways);
    let setup = Setup {
        open: &open,
        memory_limit: command.model.memory_limit,
        iters: command.iters as usize,
        progress: &|_| bar.inc(1),
    };
    let result = compare_runs(&graph, &inputs, &setup);
    bar.finish_and_clear();
    let result = result.map_err(|e| e.in_file(&command.model.model))?;
    print(&if json { line(&json!(result)) } else { report::comparison(&result) })?;
    result.verdict(FUSED_TOLERANCE)?;
    Ok(String::new())
}

fn bench(command: &Bench, json: bool) -> Result<String> {
    let given = given("--input", &command.inputs.inputs)?;
    let session = command.model.session(&command.on, &given)?;
    let inputs = fill(session.plan(), given, command.inputs.seed)?;
    let (warmup, iters) = (u64::from(command.warmup), u64::from(command.iters));
    let bar = progress("runs");
    bar.set_length(warmup + iters);
    let mut times = Vec::new();
    for i in 0..warmup + iters {
        let start = Instant::now();
        session.with(|exec| exec.run(&inputs))?;
        if i >= warmup {
            times.push(start.elapsed().as_secs_f64() * 1e3);
        }
        bar.inc(1);
    }
    bar.finish_and_clear();
    let mut alone = Vec::new();
    for _ in 0..iters {
        alone.push(session.with(|exec| exec.time())?.as_secs_f64() * 1e3);
    }
    times.sort_by(f64::total_cmp);
    alone.sort_by(f64::total_cmp);
    let (median, min) = (times[times.len() / 2], times[0]);
    let (replay, replay_min) = (alone[alone.len() / 2], alone[0]);
    let usage = session.usage();
    let plan = session.plan();
    if json {
        return Ok(line(&json!({
            "model": plan.name,
            "device": session.device(),
            "median_ms": median,
            "min_ms": min,
            "max_ms": times[times.len() - 1],
            "replay_median_ms": replay,
            "replay_min_ms": replay_min,
            "iters": times.len(),
            "planned_bytes": plan.bytes(),
            "allocated_bytes": usage.bytes,
            "arena_bytes": plan.summary.arena_bytes,
        })));
    }
    let head = format!(
        "{} on {}: median {median:.3} ms, min {min:.3} ms, {} runs\nsteps alone: median {replay:.3} ms, min {replay_min:.3} ms\n\n",
        plan.name,
        session.device(),
        times.len()
    );
    Ok(head + &report::memory(plan, Some(usage)) + &report::overhead(&session.overhead()))
}

fn emit(command: &Emit, json: bool) -> Result<String> {
    let (form, text) = match command.form {
        Form::Onnxtxt => ("onnxtxt", text::print(&onnx::load(&command.model.model)?.proto)),
        Form::Dot => ("dot", report::dot(&emitted(command, &Target::wgpu())?)?),
        Form::Wgsl => ("wgsl", kernels(command, &Target::wgpu(), Dialect::Wgsl)?),
        Form::Cuda => ("cuda", kernels(command, &Target::cuda(), Dialect::Cuda)?),
    };
    if json {
        return Ok(line(&json!({"model": command.model.model.display().to_string(), "form": form, "text": text})));
    }
    Ok(text)
}

/// The graph after the passes for a target.
fn emitted(command: &Emit, target: &Target) -> Result<Graph> {
    let mut graph = command.model.graph(&[])?;
    pass::run(&mut graph, target, !command.model.no_fuse).map_err(|e| e.in_file(&command.model.model))?;
    Ok(graph)
}

/// The text of a plan's kernels; of one that is a library call, the call.
fn kernels(command: &Emit, target: &Target, dialect: Dialect) -> Result<String> {
    let limits = Limits { memory: command.model.memory_limit };
    let plan = plan::plan(&emitted(command, target)?, target, &limits).map_err(|e| e.in_file(&command.model.model))?;
    let mut text = if dialect == Dialect::Cuda { format!("{PRELUDE}\n") } else { String::new() };
    for (number, kernel) in plan.kernels.iter().enumerate() {
        let users: Vec<_> = plan.steps.iter().filter(|s| s.kernel == number).map(|s| s.name.as_str()).collect();
        // Names come from the file: none of them may end the comment.
        let users = users.join(", ").replace(char::is_control, " ");
        text += &format!("// kernel {number}, {}: {users}\n", kernel.template.name());
        if let Some(call) = &kernel.call {
            let call = serde_json::to_string(call).expect("a call has only finite numbers and text keys");
            text += &format!("// {call}\n\n");
            continue;
        }
        let source = render(kernel, target, &Bindings::distinct(kernel), dialect)?;
        let own = source.text.replacen(PRELUDE, "", 1);
        text += &format!("// {} invocations, {:?} workgroups\n{own}\n", source.size, source.groups);
    }
    Ok(text)
}

/// A device that is here.
struct Row {
    /// `cpu`, `cuda:0`, `wgpu:0`.
    name: String,
    device: String,
    status: String,
    target: Target,
}

fn devices(wanted: Option<&str>, json: bool) -> Result<String> {
    let threads = Options::default().thread_count();
    let mut rows = vec![Row {
        name: "cpu".into(),
        device: format!("{threads} threads"),
        status: "available".into(),
        target: Target::cpu(threads as u32),
    }];
    let mut libraries = Table::new("<");
    let mut found = json!([]);
    #[cfg(feature = "cuda")]
    {
        use crate::backend::cuda;
        let report = cuda::report(&cuda::library::Search::here());
        libraries.row(["library", "version", "path", "status"]);
        for cuda::library::Found { library, version, path, problem } in &report.libraries {
            let path = path.as_ref().map_or("-".into(), |path| path.display().to_string());
            let status = problem.clone().unwrap_or_else(|| "available".into());
            libraries.row([(*library).to_owned(), version.clone().unwrap_or_else(|| "-".into()), path, status]);
        }
        found = json!(report.libraries);
        rows.extend(report.devices.into_iter().map(|cuda::Device { index, name, target, memory, problem }| Row {
            name: format!("cuda:{index}"),
            device: format!("{name}, sm_{}, {}", target.compute, report::human(memory)),
            status: problem.unwrap_or_else(|| "available".into()),
            target,
        }));
    }
    #[cfg(feature = "wgpu")]
    rows.extend(crate::backend::wgpu::adapters().into_iter().enumerate().map(|(index, adapter)| Row {
        name: format!("wgpu:{index}"),
        device: adapter.to_string(),
        status: if adapter.software { "software: used when asked for" } else { "available" }.to_owned(),
        target: adapter.target,
    }));
    if let Some(wanted) = wanted {
        let names = rows.iter().map(|row| row.name.as_str()).collect::<Vec<_>>().join(", ");
        let row = rows.iter().find(|row| row.name == wanted);
        let row = row.ok_or_else(|| Error::Usage(format!("no device '{wanted}' among: {names}")))?;
        return Ok(serde_json::to_string_pretty(&row.target).expect("a target is plain data") + "\n");
    }
    if json {
        let rows: Vec<_> = rows
            .iter()
            .map(|Row { name, device, status, target }| {
                let backend = name.split(':').next();
                json!({"backend": backend, "name": name, "device": device, "status": status, "target": target})
            })
            .collect();
        return Ok(line(&json!({"devices": rows, "libraries": found})));
    }
    let mut table = Table::new("<");
    table.row(["name", "device", "status"]);
    rows.into_iter().for_each(|row| table.row([row.name, row.device, row.status]));
    let libraries = libraries.to_string();
    Ok(if libraries.is_empty() { table.to_string() } else { format!("{table}\n{libraries}") })
}

fn operators(json: bool) -> Result<String> {
    let targets = support::targets();
    let table = support::table();
    if json {
        let types = |types: &[(DType, DType)]| -> Value {
            types
                .iter()
                .map(|(dtype, stored)| (dtype.name().to_owned(), json!(stored.name())))
                .collect::<Map<_, _>>()
                .into()
        };
        let rows = table.iter().map(|Support { op, types: all }| {
            let all = targets.iter().zip(all).map(|(target, all)| (target.name.clone(), types(all)));
            let all: Map<_, _> = all.collect();
            json!({"name": op.name, "doc": op.doc, "kernel": op.lower.name(), "types": all})
        });
        return Ok(line(&json!(rows.collect::<Vec<_>>())));
    }
    let names = |types: &[(DType, DType)]| match types {
        [] => "-".to_owned(),
        types => types
            .iter()
            .map(|(d, stored)| format!("{d}{}", if d == stored { "" } else { "*" }))
            .collect::<Vec<_>>()
            .join(" "),
    };
    let mut text = Table::new("<");
    let heads = ["operator", "kernel"].map(str::to_owned).into_iter().chain(targets.iter().map(|t| t.name.clone()));
    text.row(heads.chain(["meaning".to_owned()]));
    for Support { op, types } in &table {
        let cells = [op.name, op.lower.name()].map(str::to_owned).into_iter().chain(types.iter().map(|t| names(t)));
        text.row(cells.chain([op.doc.to_owned()]));
    }
    let mut text = text.to_string() + "\n";
    for target in &targets {
        let stored = |dtype: &DType| target.storage(*dtype).ok().filter(|stored| stored != dtype);
        let moved: Vec<_> = DType::ALL.iter().filter_map(|d| Some(format!("{d} as {}", stored(d)?))).collect();
        let lacking: Vec<_> =
            DType::ALL.iter().filter(|d| target.storage(**d).is_err()).map(DType::to_string).collect();
        let mut parts = Vec::new();
        if !moved.is_empty() {
            parts.push(format!("stores {} (*)", moved.join(", ")));
        }
        if !lacking.is_empty() {
            parts.push(format!("has no {}", lacking.join(", ")));
        }
        let parts = if parts.is_empty() { "every type as it is".to_owned() } else { parts.join("; ") };
        text += &format!("{}: {parts}\n", target.name);
    }
    Ok(text)
}
