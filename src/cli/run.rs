//! `run`: runs a graph once, or several times in a row.

use super::args::{self, Given, Inputs, Measured, Model, On, tolerance};
use super::programs::More;
use super::{Failure, line};
use crate::backend::Usage;
use crate::error::{Error, Result};
use crate::plan::Plan;
use crate::report::{self, Table};
use crate::session::Session;
use crate::tensor::Tensor;
use crate::{file, npy, npz};
use clap::Args;
use serde::Serialize;
use serde_json::{Value, json};
use std::path::PathBuf;
use std::time::Instant;

/// States of more elements stay on the device: their figures are not worth the host's memory.
const MOST_SHOWN: usize = 1 << 20;

#[derive(Args)]
pub(super) struct Run {
    #[command(flatten)]
    model: Model,
    #[command(flatten)]
    more: More,
    /// The program to run, of several graphs. Given several times: they run one after another, and --iters repeats the last. Default: the
    /// first.
    #[arg(long, value_name = "NAME")]
    program: Vec<String>,
    #[command(flatten)]
    inputs: Inputs,
    #[command(flatten)]
    on: On,
    #[command(flatten)]
    measured: Measured,
    /// Run N times in a row, on the same inputs. States go on from run to run. The outputs are those of the last run.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    iters: u32,
    /// Begin with the states of a safetensors file, such as one of --save-states. It must have all states of the graph or the programs, and
    /// no others. Lengths of caches that grow are among them.
    #[arg(long, value_name = "FILE")]
    load_states: Option<PathBuf>,
    /// After the last run, write all states to a safetensors file, by name. A later run goes on with --load-states.
    #[arg(long, value_name = "FILE")]
    save_states: Option<PathBuf>,
    /// Write each output to DIR/NAME.npy. Characters of names outside [A-Za-z0-9._-] become '_'. The end of an overlong name becomes a hash.
    #[arg(long, value_name = "DIR")]
    output_dir: Option<PathBuf>,
    /// Compare an output with a file: NAME=FILE.npy or NAME=FILE.npz:MEMBER. Exit code 3 if they differ.
    #[arg(long, value_name = "NAME=FILE")]
    expect: Vec<String>,
    /// Relative tolerance of --expect.
    #[arg(long, default_value_t = 1e-4, value_parser = tolerance)]
    rtol: f64,
    /// Absolute tolerance of --expect.
    #[arg(long, default_value_t = 1e-5, value_parser = tolerance)]
    atol: f64,
    /// The right classes, as an array of integers: FILE.npy or FILE.npz:MEMBER. The report shows the predictions of the first output, and their accuracy.
    #[arg(long, value_name = "FILE")]
    labels: Option<PathBuf>,
    /// After the run, time each step by itself, and write the times and live bytes in Chrome's trace format (for Perfetto).
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// After the run, repeat it step by step, with unused memory overwritten by NaN, then by a large number. Exit code 3 if any result
    /// changes.
    #[arg(long)]
    poison: bool,
    /// Print the kernel of each step, and the algorithm that computes it.
    #[arg(long)]
    placement: bool,
}

impl Run {
    pub(super) fn run(&self, json: bool) -> Result<String, Failure> {
        let given = args::given("--input", &self.inputs.inputs)?;
        let expected = args::given("--expect", &self.expect)?;
        let labels = self.labels.as_deref().map(npz::read).transpose()?;
        let session = self.more.session(&self.model, &self.on, &self.measured, &given, json)?;
        let last =
            self.program.last().map_or(Ok(session.plan()), |name| Ok::<_, Error>(session.program(name)?.plan()))?;
        let names: Vec<&str> = last.outputs.iter().map(|p| p.name.as_str()).collect();
        if let Some(Given { name, .. }) = expected.iter().find(|e| !names.contains(&e.name.as_str())) {
            let what = format!("--expect {name}: not an output of the graph; its outputs: {}", names.join(", "));
            return Err(Error::usage(what).into());
        }
        if self.output_dir.is_some() {
            for (i, name) in names.iter().enumerate() {
                if let Some(other) = names[..i].iter().find(|other| file_name(other) == file_name(name)) {
                    let file = file_name(name);
                    let what = format!("--output-dir: outputs '{other}' and '{name}' would both be {file}");
                    return Err(Error::usage(what).into());
                }
            }
        }
        self.load(&session, &given)?;
        let (plan, inputs) = self.more.select(&session, &self.program, given, self.inputs.seed)?;
        let (outputs, repeats) = self.repeat(&session, &inputs)?;
        let outputs: Vec<_> = names.iter().map(|name| (*name).to_owned()).zip(outputs).collect();
        let shown = plan.state.iter().map(|state| &state.port).filter(|port| port.shape.numel() <= MOST_SHOWN);
        let states = shown.map(|port| Ok((port.name.clone(), session.state(&port.name)?)));
        let states = states.collect::<Result<Vec<_>>>()?;
        if let Some(path) = &self.save_states {
            session.save_states(path)?;
        }
        let usage = session.usage();
        let notes = session.with(|exec| exec.notes());
        if let Some(path) = &self.trace {
            let times = session.with(|exec| exec.profile())?;
            let trace = report::trace(&plan, session.device(), &times, &notes);
            file::write_whole(path, "write the trace", |out| writeln!(out, "{trace}"))?;
        }
        let score = labels.zip(outputs.first()).map(|(labels, first)| Score::new(first, &labels)).transpose()?;
        if let Some(folder) = &self.output_dir {
            std::fs::create_dir_all(folder).map_err(|e| Error::file(folder, "create the folder", e))?;
            for (name, tensor) in &outputs {
                npy::write(&folder.join(file_name(name)), tensor)?;
            }
        }
        for Given { name, tensor, .. } in &expected {
            let (_, found) = outputs.iter().find(|(n, _)| n == name).expect("expected names were checked");
            let same = found.compare(tensor, self.rtol, self.atol);
            same.map_err(|what| Error::differ(format!("output '{name}': {what}")))?;
        }
        if json {
            let figures = |(name, t): &(String, Tensor)| {
                let [min, mean, max] = spread(t);
                json!({"name": name, "dtype": t.dtype().name(), "shape": t.shape(), "min": min, "mean": mean, "max": max})
            };
            let mut value = json!({
                "model": plan.title(),
                "device": session.device(),
                "outputs": outputs.iter().map(figures).collect::<Vec<_>>(),
                "memory": memory(&plan, usage),
            });
            if !states.is_empty() {
                value["states"] = states.iter().map(figures).collect();
            }
            if self.iters > 1 {
                value["runs"] = json!(repeats);
            }
            for (part, bytes) in session.overhead() {
                value["memory"]["overhead"][part] = json!(bytes);
            }
            if let Some(answer) = self.model.answer(&plan) {
                value["answer"] = json!(answer);
            }
            if self.placement {
                value["placement"] = placement(&plan, &notes);
            }
            if let Some(score) = &score {
                value["predictions"] = json!(score.predicted);
                value["right"] = json!(score.right);
                value["accuracy"] = json!(score.right as f64 / score.predicted.len() as f64);
            }
            Ok(line(&value))
        } else {
            let placed = || format!("all steps on {}\n\n{}\n", session.device(), report::placement(&plan, &notes));
            let placement = if self.placement { placed() } else { String::new() };
            let repeats = if self.iters > 1 { repeats.to_string() } else { String::new() };
            let text = placement + &run_text(&session, &plan, &outputs, &states, score.as_ref(), usage) + &repeats;
            Ok(text + &self.model.answer_text(&plan))
        }
    }
}

impl Run {
    /// Loads the states, if a file has them. Refuses flags that have no use.
    fn load(&self, session: &Session, given: &[Given]) -> Result<()> {
        let states = || session.programs().flat_map(|program| &program.plan().state);
        for (flag, path) in [("--load-states", &self.load_states), ("--save-states", &self.save_states)] {
            if path.is_some() && states().next().is_none() {
                return Err(Error::usage(format!("{flag}: the graph has no states; --state makes them")));
            }
        }
        let Some(path) = &self.load_states else { return Ok(()) };
        let is_state = |g: &&Given| states().any(|state| state.port.name == g.name);
        if let Some(Given { name, .. }) = given.iter().find(is_state) {
            return Err(Error::usage(format!("--input {name}: --load-states gives the elements of all states")));
        }
        session.load_states(path)
    }

    /// Runs as often as asked, and gives the last run's outputs.
    fn repeat(&self, session: &Session, inputs: &[Tensor]) -> Result<(Vec<Tensor>, Repeats)> {
        let bar = args::progress("runs");
        bar.set_length(self.iters.into());
        let (start, mut seconds, mut allocated_bytes_first) = (Instant::now(), 0.0, 0);
        let mut outputs = Vec::new();
        for run in 1..=self.iters {
            // Poison is for the last run, when states have grown. It repeats that run, which takes time of its own.
            let poisoned = self.poison && run == self.iters;
            outputs = session.with(|exec| if poisoned { exec.run_poisoned(inputs) } else { exec.run(inputs) })?;
            bar.inc(1);
            if !poisoned {
                seconds = start.elapsed().as_secs_f64();
            }
            if run == 1 {
                allocated_bytes_first = session.usage().bytes;
            }
        }
        bar.finish_and_clear();
        let (count, allocated_bytes_last) = (self.iters, session.usage().bytes);
        let per_second = f64::from(count - u32::from(self.poison)) / seconds;
        Ok((outputs, Repeats { count, seconds, per_second, allocated_bytes_first, allocated_bytes_last }))
    }
}

/// Runs in a row: their time, and the bytes that the device held after the first and the last.
#[derive(Serialize)]
struct Repeats {
    count: u32,
    seconds: f64,
    per_second: f64,
    allocated_bytes_first: u64,
    allocated_bytes_last: u64,
}

impl std::fmt::Display for Repeats {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Repeats { count, seconds, per_second, allocated_bytes_first: first, allocated_bytes_last: last } = self;
        writeln!(f, "\n{count} runs in {seconds:.3} s, {per_second:.1} per second")?;
        writeln!(f, "allocated after run 1: {first} bytes, after run {count}: {last} bytes")
    }
}

/// The node and the algorithm of each step.
pub(super) fn placement(plan: &Plan, notes: &[String]) -> Value {
    plan.steps.iter().zip(notes).map(|(step, note)| json!({"node": step.name, "kernel": note})).collect()
}

/// The file's name for an output. Characters with a meaning to shells or file systems become `_`. The end of a name that is too long for
/// a file system becomes a hash (FNV-1a) of the whole.
fn file_name(output: &str) -> String {
    const MOST: usize = 255 - ".npy".len();
    let safe = |c: char| if c.is_ascii_alphanumeric() || "._-".contains(c) { c } else { '_' };
    let mut name: String = output.chars().map(safe).collect();
    if name.len() > MOST {
        let step = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
        let hash = format!("-{:016x}", output.bytes().fold(0xcbf2_9ce4_8422_2325, step));
        name.truncate(MOST - hash.len());
        name += &hash;
    }
    name + ".npy"
}

fn memory(plan: &Plan, usage: Usage) -> Value {
    let mut value = json!(plan.summary);
    value["allocated_bytes"] = json!(usage.bytes);
    value["allocations"] = json!(usage.allocations);
    value["overhead_bytes"] = json!(usage.overhead);
    value
}

fn run_text(
    session: &Session,
    plan: &Plan,
    outputs: &[(String, Tensor)],
    states: &[(String, Tensor)],
    score: Option<&Score>,
    usage: Usage,
) -> String {
    let mut text = format!("{} on {}\n\n", plan.title(), session.device());
    let tables = [("output", outputs), ("state", states)].map(|(kind, tensors)| tensor_table(kind, tensors));
    let tables: Vec<_> = tables.into_iter().filter(|table| !table.is_empty()).collect();
    text += &tables.join("\n");
    if let Some(score) = score {
        text += "\npredicted classes\n";
        for row in score.predicted.chunks(40) {
            let row: Vec<_> = row.iter().map(usize::to_string).collect();
            text += &format!("  {}\n", row.join(" "));
        }
        let of = score.predicted.len();
        text += &format!("accuracy {:.2} % ({} of {of} right)\n", 100.0 * score.right as f64 / of as f64, score.right);
    }
    text + "\n" + &report::memory(plan, Some(usage)) + &report::overhead(&session.overhead())
}

/// Tensors of a kind with their figures; empty if there are none.
fn tensor_table(kind: &str, tensors: &[(String, Tensor)]) -> String {
    let mut table = Table::new("<<<>");
    table.row([kind, "type", "shape", "min", "mean", "max"]);
    for (name, tensor) in tensors {
        let [min, mean, max] = spread(tensor).map(|v| v.map_or("-".into(), |v| format!("{v:.6}")));
        table.row([name.clone(), tensor.dtype().to_string(), tensor.shape().to_string(), min, mean, max]);
    }
    if tensors.is_empty() { String::new() } else { table.to_string() }
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

/// Predicted classes, and the number of those that are right.
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
                return Err(Error::usage(format!(
                    "--labels: expected output '{name}' of shape [{rows},classes] for {rows} labels, found {found}"
                )));
            }
        };
        let labels = labels.to_i64().ok_or_else(|| Error::usage("--labels: expected integers".into()))?;
        let best = |row: &[f64]| (0..classes).max_by(|&a, &b| row[a].total_cmp(&row[b]).then(b.cmp(&a)));
        let predicted: Vec<usize> = scores.to_f64().chunks(classes).filter_map(best).collect();
        let right = predicted.iter().zip(&labels).filter(|&(&p, &l)| p as i64 == l).count();
        Ok(Score { predicted, right })
    }
}
