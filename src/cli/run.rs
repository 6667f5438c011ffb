//! `run`: runs a graph once, or several times in a row.

use super::args::{self, Given, Inputs, Measured, Model, On, Planned};
use super::expect::{self, Same, Tolerances};
use super::programs::More;
use super::text::Text;
use super::{Failure, line};
use crate::backend::Usage;
use crate::error::{Error, Result};
use crate::exec::{self, Exec};
use crate::figures::count as counted;
use crate::pass::shard::PLACE;
use crate::plan::{Port, View};
use crate::report::{self, Table};
use crate::session::Session;
use crate::tensor::Tensor;
use crate::{file, npy, npz};
use clap::Args;
use serde::Serialize;
use serde_json::{Value, json};
use std::path::PathBuf;
use std::time::Instant;

/// States of more elements stay on the device: their figures are not worth the time.
const MOST_SHOWN: usize = 1 << 20;

/// The records of `--json`, as `schema.rs` reads them.
pub(super) const SCHEMA: &str = "
run = once|generated
once
  ..subject
  model text
  seconds number
  device text
  outputs [tensor]
  states? [tensor]
  expected? [compared]
  runs? repeats
  memory memory
  answer? answer
  placement? [placed]
  predictions? [int]
  right? int
  accuracy? number
generated
  ..subject
  device text
  prompt [int]
  tokens [int]
  text? text
  first_token_seconds number|null
  decode_seconds number
  tokens_per_second number|null
  allocated_bytes_first int
  allocated_bytes_last int
  planned_bytes int
tensor
  name text
  dtype text
  shape [int]
  min number|null
  mean number|null
  max number|null
compared
  name text
  difference number
  of_peak number|null
  at [int]
repeats
  count int
  seconds number
  per_second number|null
  allocated_bytes_first int
  allocated_bytes_last int
memory
  ..summary
  allocated_bytes int
  allocations int
  overhead_bytes int|null
  overhead? {int}
";

#[derive(Args)]
pub(super) struct Run {
    #[command(flatten)]
    pub(super) model: Model,
    #[command(flatten)]
    planned: Planned,
    #[command(flatten)]
    more: More,
    /// Batch size: the extent of the open dim that leads the inputs, as --set gives it.
    #[arg(long, value_name = "B", value_parser = args::batch)]
    batch: Option<u64>,
    /// The program to run, of several graphs. Given several times: they run one after another, and --iters repeats the last. Default: the
    /// first.
    #[arg(long, value_name = "NAME")]
    program: Vec<String>,
    #[command(flatten)]
    inputs: Inputs,
    #[command(flatten)]
    text: Text,
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
    /// Compare an output with a file: NAME=FILE.npy or NAME=FILE.npz:MEMBER; FILE.npz alone has an output per member, by name. Exit code 3 if they differ: if the largest difference is more than
    /// 1e-4 of the largest expected element. Integers must be equal. Floats are compared with floats of any width, integers with integers.
    #[arg(long, value_name = "NAME=FILE")]
    expect: Vec<String>,
    #[command(flatten)]
    tolerances: Tolerances,
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
        if self.model.is_folder() {
            let model = Model { batch: self.batch, ..self.model.clone() };
            return self.text.run(&model, &self.more, &self.on, &self.measured, json);
        }
        self.text.refuse()?;
        let given = args::given("--input", &self.inputs.inputs)?;
        let expected = args::given("--expect", &self.expect)?;
        if self.tolerances.is_given() && expected.is_empty() {
            return Err(Error::usage("--rtol, --atol: `run` has no use for them without --expect".into()).into());
        }
        let labels = self.labels.as_deref().map(npz::read).transpose()?;
        let model = Model { of: self.planned.of.clone(), batch: self.batch, ..self.model.clone() };
        let files = [("--save-states", &self.save_states), ("--trace", &self.trace)];
        let arrays = args::arrays(&self.inputs.inputs).chain(args::arrays(&self.expect));
        let read = model.read().chain(self.more.read()).chain(arrays).chain(self.labels.clone());
        args::outputs(files.into_iter().filter_map(|(flag, path)| Some((flag, path.as_deref()?))), read)?;
        let (session, subject) = self.more.session(&model, &self.on, &self.measured, &given, json)?;
        let last = self
            .program
            .last()
            .map_or(Ok(session.plan().first()), |name| Ok::<_, Error>(session.program(name)?.plan()))?;
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
        let (alone, inputs) = self.more.select(&session, &self.program, given, self.inputs.seed)?;
        let plan = alone.first();
        let (held, repeats) = self.repeat(&session, &inputs)?;
        let found = Found { session: &session, held };
        let outputs = found.figures(plan)?;
        let shown = plan.state.iter().map(|state| &state.port).filter(|port| port.shape.numel() <= MOST_SHOWN);
        let shown = shown.filter(|port| !port.name.starts_with(PLACE));
        let states = shown.map(|port| Figures::of_state(&session, port));
        let states = states.collect::<Result<Vec<_>>>()?;
        if let Some(path) = &self.save_states {
            session.save_states(path)?;
        }
        // One output is held at a time, and none that nobody asks for.
        let score = labels.map(|labels| match names.first() {
            Some(name) => Score::new(name, &found.whole(0)?, &labels),
            None => Err(Error::usage("--labels: the graph has no output to compare with".into())),
        });
        let score = score.transpose()?;
        let writes = self.model.several.is_first();
        if let Some(folder) = self.output_dir.as_ref().filter(|_| writes) {
            std::fs::create_dir_all(folder).map_err(|e| Error::file(folder, "create the folder", e))?;
            for (number, name) in names.iter().enumerate() {
                npy::write(&folder.join(file_name(name)), &found.whole(number)?)?;
            }
        }
        let same = |expected: &Given| {
            let number = names.iter().position(|name| *name == expected.name).expect("expected names were checked");
            let (name, tolerance) = (&expected.name, self.tolerances.tolerance());
            Same::new(&format!("output '{name}'"), name, &found.whole(number)?, &expected.tensor, tolerance)
        };
        let same = expected.iter().map(same).collect::<Result<Vec<_>>>()?;
        drop(found);
        let (usage, subject) = (session.usage(), subject.of(&plan));
        let notes = session.with(|exec| exec.notes());
        if let Some(path) = &self.trace {
            // Ranks go through the steps together.
            let times = session.with(|exec| exec.profile(&inputs, 1))?;
            let trace = report::trace(plan, session.device(), &times, &notes);
            if writes {
                file::write_whole(path, "write the trace", |out| writeln!(out, "{trace}"))?;
            }
        }
        if json {
            let figures = |figures: &Figures| {
                let Figures { port, spread } = figures;
                let [min, mean, max] = spread.values();
                let (name, dtype, shape) = (&port.name, port.dtype.name(), &port.shape);
                json!({"name": name, "dtype": dtype, "shape": shape, "min": min, "mean": mean, "max": max})
            };
            let mut value = json!({
                "model": plan.name,
                "seconds": repeats.seconds,
                "device": session.device(),
                "outputs": outputs.iter().map(figures).collect::<Vec<_>>(),
                "memory": memory(plan, usage),
            });
            subject.name_in(&mut value);
            if !states.is_empty() {
                value["states"] = states.iter().map(figures).collect();
            }
            if !same.is_empty() {
                value["expected"] = same.iter().map(Same::json).collect();
            }
            if self.iters > 1 {
                value["runs"] = json!(repeats);
            }
            for (part, bytes) in session.overhead() {
                value["memory"]["overhead"][part] = json!(bytes);
            }
            if let Some(answer) = self.model.answer(&alone) {
                value["answer"] = json!(answer);
            }
            if self.placement {
                value["placement"] = placement(plan, &notes);
            }
            if let Some(score) = &score {
                value["predictions"] = json!(score.predicted);
                value["right"] = json!(score.right);
                value["accuracy"] = json!(score.right as f64 / score.predicted.len() as f64);
            }
            Ok(line(&value))
        } else {
            let placed = || format!("all steps on {}\n\n{}\n", session.device(), report::placement(plan, &notes));
            let placement = if self.placement { placed() } else { String::new() };
            let time = match self.iters {
                // With poison, the one run is not timed.
                1 if self.poison => String::new(),
                1 => format!("\n1 run in {:.3} ms, outputs read\n", 1e3 * repeats.seconds),
                _ => repeats.to_string(),
            };
            let several = session.plan().programs.len() > 1;
            let program = if several { format!(", {}", plan.name) } else { String::new() };
            let head = format!("{}{program} on {}\n\n", subject.heading(), session.device());
            let text = head + &run_text(&session, plan, &outputs, &states, score.as_ref(), usage);
            Ok(placement + &text + &expect::table("as expected", &same) + &time + &self.model.answer_text(&alone))
        }
    }
}

impl Run {
    /// Loads the states, if a file has them. Refuses flags that have no use.
    fn load(&self, session: &Session, given: &[Given]) -> Result<()> {
        let states = || session.plan().programs.iter().flat_map(|program| &program.state);
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

    /// Runs as often as asked. Gives the last run's outputs if it was poisoned; otherwise they are on the device.
    fn repeat(&self, session: &Session, inputs: &[Tensor]) -> Result<(Option<Vec<Tensor>>, Repeats)> {
        let bar = args::progress("runs");
        bar.set_length(self.iters.into());
        let (start, mut seconds, mut allocated_bytes_first) = (Instant::now(), 0.0, 0);
        let mut held = None;
        // Outputs come to the host in every run, a piece at a time: the plan has room for them on the device alone.
        let run_once = |exec: &mut Exec| {
            exec.write(inputs)?;
            exec.replay()?;
            exec.each_of_outputs(&mut |_, _| {})
        };
        for run in 1..=self.iters {
            // Poison is for the last run, when states have grown. It repeats that run, which takes time of its own.
            let poisoned = self.poison && run == self.iters;
            if poisoned {
                let outputs = session.with(|exec| exec.run_poisoned(inputs))?;
                let ports = session.with(|exec| exec.plan().outputs.clone());
                held = Some(exec::found(ports.iter().map(Port::room), outputs));
            } else {
                session.with(run_once)?;
            }
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
        Ok((held, Repeats { count, seconds, per_second, allocated_bytes_first, allocated_bytes_last }))
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
        writeln!(f, "\n{} in {seconds:.3} s, {per_second:.1} per second", counted(u64::from(*count), "run"))?;
        writeln!(f, "allocated after run 1: {first} bytes, after run {count}: {last} bytes")
    }
}

/// The node and the algorithm of each step.
pub(super) fn placement(plan: View, notes: &[String]) -> Value {
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

fn memory(plan: View, usage: Usage) -> Value {
    let mut value = json!(plan.summary);
    value["allocated_bytes"] = json!(usage.bytes);
    value["allocations"] = json!(usage.allocations);
    value["overhead_bytes"] = json!(usage.overhead);
    value
}

fn run_text(
    session: &Session,
    plan: View,
    outputs: &[Figures],
    states: &[Figures],
    score: Option<&Score>,
    usage: Usage,
) -> String {
    let tables = [("output", outputs), ("state", states)].map(|(kind, tensors)| tensor_table(kind, tensors));
    let tables: Vec<_> = tables.into_iter().filter(|table| !table.is_empty()).collect();
    let mut text = tables.join("\n");
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
fn tensor_table(kind: &str, tensors: &[Figures]) -> String {
    let mut table = Table::new("<<<>");
    table.row([kind, "type", "shape", "min", "mean", "max"]);
    for Figures { port, spread } in tensors {
        let [min, mean, max] = spread.values().map(|v| v.map_or("-".into(), |v| format!("{v:.6}")));
        table.row([port.name.clone(), port.dtype.to_string(), port.shape.to_string(), min, mean, max]);
    }
    if tensors.is_empty() { String::new() } else { table.to_string() }
}

/// The outputs of the last run: on the device, unless they are held.
struct Found<'a> {
    session: &'a Session,
    held: Option<Vec<Tensor>>,
}

impl Found<'_> {
    fn whole(&self, number: usize) -> Result<Tensor> {
        match &self.held {
            Some(held) => Ok(held[number].clone()),
            None => self.session.with(|exec| exec.found(number)),
        }
    }

    fn figures(&self, plan: View) -> Result<Vec<Figures>> {
        let mut figures: Vec<_> = plan.outputs.iter().map(Figures::new).collect();
        let mut take = |number: usize, piece: &Tensor| figures[number].spread.take(piece);
        match &self.held {
            Some(held) => held.iter().enumerate().for_each(|(number, tensor)| take(number, tensor)),
            None => self.session.with(|exec| exec.each_of_outputs(&mut take))?,
        }
        // Of these, only what the run found counts.
        for (number, port) in plan.outputs.iter().enumerate().filter(|(_, port)| !port.counted.is_empty()) {
            let tensor = self.whole(number)?;
            figures[number] = Figures::new(&Port { shape: tensor.shape().clone(), ..port.clone() });
            figures[number].spread.take(&tensor);
        }
        Ok(figures)
    }
}

/// The lines that show a tensor.
struct Figures {
    port: Port,
    spread: Spread,
}

impl Figures {
    fn new(port: &Port) -> Figures {
        Figures { port: port.clone(), spread: Spread::default() }
    }

    fn of_state(session: &Session, port: &Port) -> Result<Figures> {
        let mut figures = Figures::new(port);
        session.with(|exec| exec.each_of_state(&port.name, &mut |piece| figures.spread.take(piece)))?;
        Ok(figures)
    }
}

/// The extremes, the sum and the number of elements that come piece by piece.
struct Spread {
    min: f64,
    sum: f64,
    max: f64,
    count: usize,
}

impl Default for Spread {
    fn default() -> Spread {
        Spread { min: f64::INFINITY, sum: -0.0, max: f64::NEG_INFINITY, count: 0 }
    }
}

impl Spread {
    fn take(&mut self, piece: &Tensor) {
        for value in piece.to_f64() {
            (self.min, self.max) = (self.min.min(value), self.max.max(value));
            self.sum += value;
            self.count += 1;
        }
    }

    /// Smallest, mean and largest element; none of an empty tensor.
    fn values(&self) -> [Option<f64>; 3] {
        let mean = self.sum / self.count as f64;
        [self.min, mean, self.max].map(|value| (self.count > 0).then_some(value))
    }
}

/// Predicted classes, and how many are right.
struct Score {
    predicted: Vec<usize>,
    right: usize,
}

impl Score {
    fn new(name: &str, scores: &Tensor, labels: &Tensor) -> Result<Score> {
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
