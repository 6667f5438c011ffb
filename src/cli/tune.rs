//! `tune`: the fastest algorithm of each kernel on a device.

use super::args::{self, Inputs, Model, On};
use super::programs::{self, More};
use super::subject::Subject;
use super::{Failure, line};
use crate::error::{Error, Result};
use crate::exec::Exec;
use crate::kernel::tuned::Tuned;
use crate::plan::{self, Compiled, Job, Plan, Planner};
use crate::report::{self, Table};
use crate::session::{self, Options};
use crate::tensor::Tensor;
use crate::tune::{self, Entry, cache};
use clap::Args;
use serde_json::json;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// The plans run in turns: the number of turns, and of runs in each.
const TURNS: usize = 3;
const RUNS: usize = 10;
/// The tuned plan is kept if it takes at most this many times the other one's time.
const NOISE: f64 = 1.02;
/// Rows of the table of kernels.
const ROWS: usize = 20;

/// The records of `--json`, as `schema.rs` reads them.
pub(super) const SCHEMA: &str = "
tune
  ..subject
  model text
  device text
  kernels int
  measured [timed]
  untuned_ms number|null
  tuned_ms number
  untuned_bytes int
  tuned_bytes int
  kept_in text|null
timed
  template text
  shape [int]
  launches int
  tried int
  expected text
  schedule text
  before_us number|null
  after_us number
";

#[derive(Args)]
#[command(
    after_help = "The measured schedules are kept in the user's cache folder (PLIMSOLL_CACHE_DIR names another), one file per device
and driver. `run`, `bench` and the library use them there; --no-tuned leaves them out. `plan --tuned FILE` plans with such a file."
)]
pub(super) struct Tune {
    #[command(flatten)]
    model: Model,
    #[command(flatten)]
    more: More,
    /// Batch size: the extent of the open dim that leads the inputs, as --set gives it.
    #[arg(long, value_name = "B", value_parser = args::batch)]
    batch: Option<u64>,
    #[command(flatten)]
    inputs: Inputs,
    #[command(flatten)]
    on: On,
    /// Write the tuned plan as JSON.
    #[arg(short = 'o', long, value_name = "FILE")]
    save: Option<PathBuf>,
    /// Time no further kernels after this many seconds. Kernels that take the most time come first.
    #[arg(long, value_name = "N", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    seconds: u64,
    /// Time all kernels, even those that were measured before.
    #[arg(long)]
    again: bool,
    /// Let the tuned plan take more bytes than the untuned one.
    #[arg(long)]
    more_memory: bool,
}

/// Milliseconds of the fastest run of all programs without measured schedules, and of the fastest with them.
struct Runs {
    untuned: Option<f64>,
    tuned: f64,
}

/// The result of the command.
struct Outcome {
    subject: Subject,
    device: String,
    untuned: Plan,
    tuned: Plan,
    /// Kernels that have a choice, and those that were measured now.
    asked: usize,
    found: Vec<Entry>,
    runs: Runs,
    kept: Option<PathBuf>,
}

impl Tune {
    pub(super) fn run(&self, json: bool) -> Result<String, Failure> {
        self.model.several.refuse("tune")?;
        let model = &Model { batch: self.batch, ..self.model.clone() };
        let read = model.read().chain(self.more.read()).chain(args::arrays(&self.inputs.inputs));
        args::outputs(self.save.as_deref().map(|path| ("--save", path)), read)?;
        let given = args::given("--input", &self.inputs.inputs)?;
        let options = Options { tuned: false, ..model.options(&self.on)? };
        let asked = self.more.asked(model, &given)?;
        let device = session::open(&options)?;
        model.may_offload(&device)?;
        tracing::info!("backend: {}", device.described());
        session::check_limit(&*device.backend, options.memory_limit)?;
        let job = options.job(asked.programs.clone(), &device);
        let session::Device { backend: mut device, name, .. } = device;
        let identity = device.identity();
        let in_file = |e: Error| asked.in_file(model, e);
        let refuse = |e| asked.refuse(model, &job.target, e, json);

        let mut planner = Planner::new(&job).map_err(in_file)?;
        let untuned = planner.within(job.limit).map_err(refuse)?;
        let (mut known, mut entries) =
            cache::load(&identity).unwrap_or_else(|| (Tuned::new(&identity[..]), Vec::new()));
        let graphs = planner.graphs(job.limit).map_err(in_file)?;
        let mut kernels = tune::kernels(&graphs, &job.target).map_err(in_file)?;
        let choices: Vec<_> = kernels.iter().map(|(kernel, _)| kernel.clone()).collect();
        kernels.retain(|(kernel, _)| self.again || known.find(kernel).is_none());

        let bar = args::progress("kernels");
        bar.set_length(kernels.len() as u64);
        let budget = Duration::from_secs(self.seconds);
        let found = tune::measure(&mut *device, kernels, budget, &|done| bar.set_position(done as u64));
        bar.finish_and_clear();
        let mut found = found.map_err(in_file)?;
        drop(device);

        found.iter().for_each(|entry| known.insert(&entry.kernel, entry.schedule.clone()));
        let with = Job { schedules: Some(Arc::new(known)), more_memory: self.more_memory, ..job.clone() };
        let tuned = plan::plan(&with).map_err(in_file)?;
        let inputs = programs::inputs(&tuned.plan, &given, self.inputs.seed)?;
        let (untuned, mut tuned) = ((untuned.plan, untuned.data), (tuned.plan, tuned.data));
        let runs = compare(&options, &untuned, &tuned, &inputs).map_err(in_file)?;
        if runs.untuned.is_some_and(|untuned| runs.tuned > NOISE * untuned) {
            tracing::info!("what is faster alone is not faster together: the expected schedules stay");
            let known = entries.iter_mut().filter(|entry| choices.contains(&entry.kernel));
            known.chain(&mut found).for_each(|entry| entry.schedule.clone_from(&entry.expected));
            tuned = untuned.clone();
        }
        entries.retain(|old| found.iter().all(|new| new.kernel != old.kernel));
        entries.extend(found.iter().cloned());
        let kept = cache::save(&identity, entries);
        let ((untuned, _), (mut tuned, _)) = (untuned, tuned);
        if let Some(path) = &self.save {
            tuned.origin = asked.origin()?;
            tuned.save(path)?;
        }
        let subject = asked.subject;
        let outcome = Outcome { subject, device: name, untuned, tuned, asked: choices.len(), found, runs, kept };
        Ok(if json { outcome.json() } else { outcome.text() })
    }
}

/// Runs both plans in turns. An untuned plan that the device refuses has no time.
fn compare(options: &Options, untuned: &Compiled, tuned: &Compiled, inputs: &[Vec<Tensor>]) -> Result<Runs> {
    let mut runs = Runs { untuned: None, tuned: f64::INFINITY };
    for _ in 0..TURNS {
        match fastest(options, untuned, inputs) {
            Ok(time) => runs.untuned = Some(runs.untuned.map_or(time, |best| best.min(time))),
            Err(error) => tracing::warn!("the untuned plan does not run here: {error}"),
        }
        runs.tuned = runs.tuned.min(fastest(options, tuned, inputs)?);
    }
    Ok(runs)
}

/// Milliseconds of the fastest of some runs of each program, in all, by the device's clock if it has one.
fn fastest(options: &Options, (plan, constants): &Compiled, inputs: &[Vec<Tensor>]) -> Result<f64> {
    let device = session::open(options)?;
    let mut exec = Exec::load(device.backend, plan.clone(), constants, &|_| {})?;
    let mut sum = 0.0;
    for (program, inputs) in inputs.iter().enumerate() {
        exec.select(program)?;
        // A cache that grows has room for some runs alone.
        let grows = plan.programs[program].state.iter().any(|state| state.count.is_some());
        let mut best = f64::INFINITY;
        for _ in 0..RUNS {
            if grows {
                exec.reset_state()?;
            }
            exec.write(inputs)?;
            best = best.min(exec.time()?.as_secs_f64() * 1e3);
        }
        sum += best;
    }
    Ok(sum)
}

impl Outcome {
    fn json(&self) -> String {
        let Outcome { subject, device, untuned, tuned, asked, found, runs, kept } = self;
        let kernel = |entry: &Entry| {
            let Entry { kernel, schedule, expected, before, after, tried, launches } = entry;
            json!({
                "template": kernel.template.name(), "shape": kernel.shape, "launches": launches, "tried": tried,
                "expected": expected.to_string(), "schedule": schedule.to_string(),
                "before_us": before, "after_us": after,
            })
        };
        let mut value = json!({
            "model": tuned.title(),
            "device": device,
            "kernels": asked,
            "measured": found.iter().map(kernel).collect::<Vec<_>>(),
            "untuned_ms": runs.untuned,
            "tuned_ms": runs.tuned,
            "untuned_bytes": untuned.bytes(),
            "tuned_bytes": tuned.bytes(),
            "kept_in": kept,
        });
        subject.name_in(&mut value);
        line(&value)
    }

    fn text(&self) -> String {
        let Outcome { subject, device, untuned, tuned, asked, found, runs, kept } = self;
        let mut text = format!("{} on {device}\n\n", subject.heading());
        let gain =
            |entry: &&Entry| entry.before.map_or(f64::INFINITY, |before| before - entry.after) * entry.launches as f64;
        let mut won: Vec<&Entry> = found.iter().filter(|entry| entry.schedule != entry.expected).collect();
        won.sort_by(|a, b| gain(b).total_cmp(&gain(a)));
        text += &format!(
            "{asked} kernels have a choice; {} were timed now; another algorithm is faster for {}\n\n",
            found.len(),
            won.len()
        );
        if !won.is_empty() {
            let mut table = Table::new("<<>>><");
            table.row(["kernel", "shape", "launches", "before", "after", "algorithm"]);
            let microseconds = |time: f64| format!("{time:.1} us");
            for entry in won.iter().take(ROWS) {
                table.row([
                    entry.kernel.template.name().to_owned(),
                    entry.kernel.shape.to_string(),
                    entry.launches.to_string(),
                    entry.before.map_or("refused".into(), microseconds),
                    microseconds(entry.after),
                    entry.schedule.to_string(),
                ]);
            }
            text += &format!("{table}");
            if won.len() > ROWS {
                text += &format!("and {} more\n", won.len() - ROWS);
            }
            text += "\n";
        }
        let mut table = Table::new("<>>");
        table.row(["plan", "fastest run", "bytes"]);
        let time = runs.untuned.map_or("refused".into(), |time| format!("{time:.3} ms"));
        table.row(["untuned".into(), time, report::grouped(untuned.bytes())]);
        table.row(["tuned".into(), format!("{:.3} ms", runs.tuned), report::grouped(tuned.bytes())]);
        text += &table.to_string();
        if let Some(path) = kept {
            text += &format!("\nkept in {}\n", path.display());
        }
        text
    }
}
