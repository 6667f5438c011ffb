//! `bench`: times a graph's runs.

use super::args::{self, Given, Inputs, Measured, Model, On, Planned};
use super::method::Trained;
use super::programs::More;
use super::subject::Subject;
use super::{Failure, line};
use crate::backend::Usage;
use crate::error::{Error, Result};
use crate::exec::Exec;
use crate::figures::count;
use crate::file;
use crate::plan::{self, Class, Plan, Port, View};
use crate::report::{self, Table, TimedStep};
use crate::session::{Session, SessionProgram};
use crate::tensor::Tensor;
use clap::Args;
use serde_json::json;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// The records of `--json`, as `schema.rs` reads them.
pub(super) const SCHEMA: &str = "
bench = times|at_once|updates|bindings
times
  ..subject
  ..spread
  ..bytes
  model text
  device text
  first_ms number
  runs_per_second number
  items_per_second number|null
  replay_median_ms number
  replay_min_ms number
  iters int
  arena_bytes int
  answer? answer
  steps? [timed_step]
timed_step
  step int
  node text
  algorithm text
  bytes int
  median_us number
  share number|null
at_once
  ..subject
  model text
  device text
  forks int
  one_per_second number
  all_per_second number
  planned_bytes int
  allocated_bytes int
  fork_bytes int
  allocations_in_runs int
updates
  ..subject
  ..spread
  ..bytes
  model text
  device text
  steps_per_second number
  iters int
  steps? [timed_step]
bindings
  ..subject
  ..bytes
  model text
  device text
  bindings [at]
  iters int
  bytes_grown_in_runs int
at
  ..spread
  binding {int}
spread
  median_ms number
  min_ms number
  max_ms number
  p90_ms number
  p99_ms number
bytes
  planned_bytes int
  allocated_bytes int
  allocations_in_load int
  allocations_in_runs int
";

#[derive(Args)]
#[command(mut_arg("warmup", |flag| flag.long("rate-warmup").hide(true)))]
#[command(mut_arg("train", |flag| flag.requires("batch")))]
pub(super) struct Bench {
    #[command(flatten)]
    model: Model,
    #[command(flatten)]
    planned: Planned,
    #[command(flatten)]
    more: More,
    #[command(flatten)]
    trained: Trained,
    /// The program to time, of several graphs. Given several times: those before the last run once. Default: the first.
    #[arg(long, value_name = "NAME")]
    program: Vec<String>,
    #[command(flatten)]
    inputs: Inputs,
    #[command(flatten)]
    on: On,
    #[command(flatten)]
    measured: Measured,
    /// Number of untimed runs before the timed ones.
    #[arg(id = "untimed", long = "warmup", value_name = "N", default_value_t = 3)]
    warmup: u32,
    /// Number of timed runs. With --train, a run is an update of the weights: all of its parts.
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..))]
    iters: u32,
    /// Time runs for this time (500ms, 10s, 2min), instead of a number of runs.
    #[arg(long, value_name = "TIME", value_parser = args::duration, conflicts_with_all = ["iters", "at", "forks", "train"])]
    duration: Option<Duration>,
    /// After the runs, time each step by itself: a table of their algorithms, the bytes that they read and write, and their median times. With
    /// --train, the steps of all parts of an update.
    #[arg(long, conflicts_with_all = ["at", "forks"])]
    steps: bool,
    /// Draw memory over steps with the time that each takes by itself, as one HTML file that needs no network.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["at", "forks", "train"])]
    html: Option<PathBuf>,
    /// Time N runs at once, in a thread each, beside one run at a time. They share the constants; each has --threads threads of its own.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=65536))]
    forks: u32,
    /// Extents to run at, one after another, for a dim that --set gives a range.
    #[arg(long, value_name = "DIM=N,N,..", value_parser = args::extents)]
    at: Vec<(String, Vec<usize>)>,
}

impl Bench {
    pub(super) fn run(&self, json: bool) -> Result<String, Failure> {
        self.model.refuse_folder()?;
        let read = self.model.read().chain(self.more.read()).chain(args::arrays(&self.inputs.inputs));
        args::outputs(self.html.as_deref().map(|path| ("--html", path)), read)?;
        let given = args::given("--input", &self.inputs.inputs)?;
        if self.trained.method.is_some() {
            return self.run_training(&given, json);
        }
        let model = Model { forks: self.forks, of: self.planned.of.clone(), ..self.model.clone() };
        let (session, subject) = self.more.session(&model, &self.on, &self.measured, &given, json)?;
        if !self.at.is_empty() {
            return self.run_range(&session, &subject, &given, json);
        }
        if self.forks > 1 {
            return self.run_forks(session, &subject, &given, json);
        }
        let (plan, inputs) = self.more.select(&session, &self.program, given, self.inputs.seed)?;
        let loaded = session.usage();
        let (first, whole) = self.timed(&session, &inputs)?;
        let time = |exec: &mut Exec| exec.write(&inputs).and_then(|()| exec.time());
        let alone = (0..whole.count).map(|_| session.with(time)).collect::<Result<_>>()?;
        let (usage, subject) = (session.usage(), subject.of(&plan.programs[0]));
        let steps = self.profiled(&session, plan.first(), &inputs)?;
        if let (Some(path), Some(steps)) = (&self.html, &steps) {
            let page = report::picture::timed_page(&subject.heading(), plan.first(), steps, session.device());
            file::write_whole(path, "write the page", |out| out.write_all(page.as_bytes()))?;
        }
        let steps = steps.filter(|_| self.steps);
        let ran = Ran { plan, subject, first, whole, alone: Times::new(alone), steps, loaded, usage };
        Ok(if json { self.record(&session, &ran) } else { self.text(&session, &ran) })
    }

    fn record(&self, session: &Session, ran: &Ran) -> String {
        let Ran { plan, subject, first, whole, alone, steps, loaded, usage } = ran;
        let per_second = 1e3 / whole.median;
        let mut value = json!({
            "model": plan.programs[0].graph_name(),
            "device": session.device(),
            "first_ms": first,
            "median_ms": whole.median,
            "min_ms": whole.min,
            "max_ms": whole.max,
            "p90_ms": whole.p90,
            "p99_ms": whole.p99,
            "runs_per_second": per_second,
            "items_per_second": items(&plan.programs[0]).map(|items| items as f64 * per_second),
            "replay_median_ms": alone.median,
            "replay_min_ms": alone.min,
            "iters": whole.count,
            "planned_bytes": plan.bytes(),
            "allocated_bytes": usage.bytes,
            "allocations_in_load": loaded.allocations,
            "allocations_in_runs": usage.allocations - loaded.allocations,
            "arena_bytes": plan.class_bytes(Class::Activation),
        });
        subject.name_in(&mut value);
        if let Some(answer) = self.model.answer(plan) {
            value["answer"] = json!(answer);
        }
        if let Some(steps) = steps {
            value["steps"] = json!(steps);
        }
        line(&value)
    }

    fn text(&self, session: &Session, ran: &Ran) -> String {
        let Ran { plan, subject, first, whole, alone, steps, loaded, usage } = ran;
        let per_second = 1e3 / whole.median;
        let mut table = Table::new("<>");
        table.row(Times::heading(&count(whole.count, "run")));
        table.row(["first run".to_owned(), format!("{first:.3} ms")]);
        table.row(whole.row("whole runs"));
        table.row(alone.row("steps alone"));
        let items = items(&plan.programs[0]).map_or(String::new(), |items| {
            format!(", {:.1} items, of which a run has {items}", items as f64 * per_second)
        });
        let rate = format!("per second: {per_second:.1} runs{items}\n");
        let (before, after) = (loaded.allocations, usage.allocations - loaded.allocations);
        let runs = u64::from(self.warmup) + 2 * whole.count;
        let ways = "whole runs write the inputs, run the steps and read the outputs; steps alone are without both\n";
        let head = format!(
            "{} on {}\n\n{table}{ways}{rate}\nallocations: {before} when loading, {after} in {}\n\n",
            subject.heading(),
            session.device(),
            count(runs, "run")
        );
        let memory = report::memory(plan.first(), Some(*usage)) + &report::overhead(&session.overhead());
        let steps = steps.as_ref().map_or(String::new(), |steps| report::timed_steps(steps) + "\n");
        head + &steps + &memory + &self.model.answer_text(plan)
    }
}

/// The figures of one run at a time.
struct Ran {
    plan: Plan,
    subject: Subject,
    /// Milliseconds of the first run.
    first: f64,
    /// Runs with inputs and outputs, and the steps alone.
    whole: Times,
    alone: Times,
    steps: Option<Vec<TimedStep>>,
    /// The memory that was taken before the runs and after them.
    loaded: Usage,
    usage: Usage,
}

/// The number of items in a run, if a batch is known: the first extent that all inputs with axes share, or that one shares with all outputs.
fn items(plan: &plan::Program) -> Option<usize> {
    let firsts = |ports: &[Port]| ports.iter().filter_map(|port| port.shape.first().copied()).collect::<Vec<_>>();
    let (inputs, outputs) = (firsts(&plan.inputs), firsts(&plan.outputs));
    let shared = |extent: &usize, all: &[usize]| all.iter().all(|other| other == extent);
    let of_all = inputs.first().filter(|extent| shared(extent, &inputs));
    of_all.or_else(|| inputs.iter().find(|extent| !outputs.is_empty() && shared(extent, &outputs))).copied()
}

impl Bench {
    /// The steps with their times, if a flag asks for them.
    fn profiled(&self, session: &Session, plan: View, inputs: &[Tensor]) -> Result<Option<Vec<TimedStep>>> {
        if !self.steps && self.html.is_none() {
            return Ok(None);
        }
        let (times, notes) =
            session.with(|exec| Ok::<_, Error>((exec.profile(inputs, self.rounds())?, exec.notes())))?;
        Ok(Some(TimedStep::of(plan, &times, &notes)))
    }

    /// The time of the first run in milliseconds, and those of the timed ones.
    fn timed(&self, session: &Session, inputs: &[Tensor]) -> Result<(f64, Times)> {
        let bar = args::progress("runs");
        bar.set_length(u64::from(self.warmup) + u64::from(self.iters));
        let mut times: Vec<Duration> = Vec::new();
        let mut begin = Instant::now();
        loop {
            let done = times.len().saturating_sub(self.warmup as usize);
            let is_over = match self.duration {
                Some(duration) => done > 0 && begin.elapsed() >= duration,
                None => done >= self.iters as usize,
            };
            if is_over {
                break;
            }
            if times.len() == self.warmup as usize {
                begin = Instant::now();
            }
            let start = Instant::now();
            session.with(|exec| exec.run(inputs))?;
            times.push(start.elapsed());
            bar.inc(1);
        }
        bar.finish_and_clear();
        let first = times[0].as_secs_f64() * 1e3;
        Ok((first, Times::new(times.split_off(self.warmup as usize))))
    }

    /// Times runs at once beside one run at a time.
    fn run_forks(&self, session: Session, subject: &Subject, given: &[Given], json: bool) -> Result<String, Failure> {
        let forks = (1..self.forks).map(|_| session.fork()).collect::<Result<Vec<_>>>()?;
        let sessions: Vec<Session> = std::iter::once(session).chain(forks).collect();
        // Each has inputs of its own, as callers of their own would give it.
        let mut users = Vec::with_capacity(sessions.len());
        for session in &sessions {
            users.push((session, self.more.select(session, &self.program, given.to_vec(), self.inputs.seed)?.1));
        }
        let runs = |(session, inputs): &(&Session, Vec<Tensor>), count: u32| -> Result<()> {
            (0..count).try_for_each(|_| session.with(|exec| exec.run(inputs)).map(drop))
        };
        let at_once = |users: &[(&Session, Vec<Tensor>)]| -> Result<f64> {
            let start = Instant::now();
            std::thread::scope(|scope| {
                let threads: Vec<_> = users.iter().map(|user| scope.spawn(|| runs(user, self.iters))).collect();
                threads.into_iter().try_for_each(|thread| thread.join().expect("a run does not panic"))
            })?;
            Ok(f64::from(self.iters) * users.len() as f64 / start.elapsed().as_secs_f64())
        };
        users.iter().try_for_each(|user| runs(user, self.warmup))?;
        let allocations =
            || sessions.iter().map(|one| one.with(|exec| exec.backend().usage().allocations)).sum::<u64>();
        let before = allocations();
        // By turns, so that both ways see the same machine.
        let (mut one, mut all) = (0.0, 0.0);
        for _ in 0..3 {
            one = f64::max(one, at_once(&users[..1])?);
            all = f64::max(all, at_once(&users)?);
        }
        let session = &sessions[0];
        let (usage, plan) = (session.usage(), session.plan());
        if json {
            let mut value = json!({
                "model": plan.programs[0].graph_name(),
                "device": session.device(),
                "forks": self.forks,
                "one_per_second": one,
                "all_per_second": all,
                "planned_bytes": plan.bytes(),
                "allocated_bytes": usage.bytes,
                "fork_bytes": plan.run_bytes(),
                "allocations_in_runs": allocations() - before,
            });
            subject.name_in(&mut value);
            return Ok(line(&value));
        }
        let mut table = Table::new("<>>");
        table.row([format!("{} each", count(self.iters.into(), "run")), "runs per second".into(), String::new()]);
        table.row(["one at a time".to_owned(), format!("{one:.1}"), String::new()]);
        table.row([format!("{} at once", self.forks), format!("{all:.1}"), format!("{:.2} x", all / one)]);
        let head = format!("{} on {}\n\n{table}\n", subject.heading(), session.device());
        Ok(head + &report::memory(plan.first(), Some(usage)))
    }
}

impl Bench {
    /// Times the updates of a training.
    fn run_training(&self, given: &[Given], json: bool) -> Result<String, Failure> {
        let flags = [
            ("--program", !self.program.is_empty()),
            ("--forks", self.forks > 1),
            ("--at", !self.at.is_empty()),
            ("--model", self.planned.of.is_some()),
        ];
        if let Some((flag, _)) = flags.into_iter().find(|(_, given)| *given) {
            return Err(Error::usage(format!("{flag}: --train has no use for it")).into());
        }
        let more = self.more.or_training(self.trained.method.clone());
        let (session, subject) = more.session(&self.model, &self.on, &self.measured, given, json)?;
        let parts = self.parts(&session, given)?;
        let (warmup, iters) = (u64::from(self.warmup), u64::from(self.iters));
        let bar = args::progress("updates");
        bar.set_length(warmup + iters);
        let loaded = session.usage();
        let mut times = Vec::new();
        for _ in 0..warmup + iters {
            let start = Instant::now();
            for (program, inputs) in &parts {
                program.selected(&[], |exec| exec.run(inputs))??;
            }
            times.push(start.elapsed());
            bar.inc(1);
        }
        bar.finish_and_clear();
        let times = Times::new(times.split_off(self.warmup as usize));
        let (usage, plan) = (session.usage(), session.plan());
        let steps = self.profiled_update(&parts)?;
        let (per_second, allocations) = (1e3 / times.median, usage.allocations - loaded.allocations);
        if json {
            let mut value = json!({
                "model": plan.programs[0].graph_name(),
                "device": session.device(),
                "steps_per_second": per_second,
                "median_ms": times.median,
                "min_ms": times.min,
                "max_ms": times.max,
                "p90_ms": times.p90,
                "p99_ms": times.p99,
                "iters": iters,
                "planned_bytes": plan.bytes(),
                "allocated_bytes": usage.bytes,
                "allocations_in_load": loaded.allocations,
                "allocations_in_runs": allocations,
            });
            subject.name_in(&mut value);
            if let Some(steps) = steps {
                value["steps"] = json!(steps);
            }
            return Ok(line(&value));
        }
        let steps = steps.map_or(String::new(), |steps| report::timed_steps(&steps) + "\n");
        let mut table = Table::new("<>");
        table.row(Times::heading(&count(iters, "update")));
        table.row(times.row(&format!("{per_second:.1} per second")));
        let head = format!(
            "{} on {}\n\n{table}\nallocations: {} when loading, {allocations} in {}\n\n",
            subject.heading(),
            session.device(),
            loaded.allocations,
            count(warmup + iters, "update")
        );
        Ok(head + &steps + &report::memory(plan.first(), Some(usage)) + &report::overhead(&session.overhead()))
    }

    /// The steps of an update's parts with their times, if a flag asks for them. They are numbered from part to part.
    fn profiled_update(&self, parts: &[(SessionProgram, Vec<Tensor>)]) -> Result<Option<Vec<TimedStep>>> {
        if !self.steps {
            return Ok(None);
        }
        let mut all: Vec<TimedStep> = Vec::new();
        for (program, inputs) in parts {
            let profile = |exec: &mut Exec| Ok::<_, Error>((exec.profile(inputs, self.rounds())?, exec.notes()));
            let (times, notes) = program.selected(&[], profile)??;
            let first = all.len();
            let steps = TimedStep::of(program.plan(), &times, &notes).into_iter();
            all.extend(steps.map(|step| TimedStep { step: first + step.step, ..step }));
        }
        let sum: f64 = all.iter().map(|step| step.median_us).sum();
        all.iter_mut().for_each(|step| step.share = step.median_us / sum);
        Ok(Some(all))
    }

    /// The number of times that each step is timed by itself.
    fn rounds(&self) -> u32 {
        const MOST: u32 = 20;
        self.iters.min(MOST)
    }

    /// The programs of an update in the order in which they run, each with its inputs.
    fn parts<'s>(&self, session: &'s Session, given: &[Given]) -> Result<Vec<(SessionProgram<'s>, Vec<Tensor>)>> {
        let count = self.trained.method.as_ref().map_or(1, |method| method.accumulate as usize);
        let names = (0..count).map(|part| match part {
            _ if count == 1 => "step",
            0 => "first",
            part if part + 1 == count => "last",
            _ => "next",
        });
        let ready = |name: &str| {
            let program = session.program(name)?;
            let plan = program.plan();
            let takes = |name: &str| plan.inputs.iter().any(|port| port.name == name);
            let own = given.iter().filter(|given| takes(&given.name)).cloned().collect();
            Ok((program, args::fill(&program.plan(), own, self.inputs.seed)?))
        };
        names.map(ready).collect()
    }
}

/// A binding, its inputs, and the times of its runs.
struct At {
    binding: Vec<(String, usize)>,
    inputs: Vec<Tensor>,
    times: Vec<Duration>,
}

impl Bench {
    /// Times bindings of a range, which run one after another.
    fn run_range(&self, session: &Session, subject: &Subject, given: &[Given], json: bool) -> Result<String, Failure> {
        if let Some(Given { name, .. }) = given.first() {
            let what = format!("--at and --input {name}: inputs of several shapes are random ones");
            return Err(Error::usage(what).into());
        }
        let turns = self.at.iter().map(|(_, extents)| extents.len()).max().unwrap_or(0);
        let mut list = Vec::with_capacity(turns);
        for turn in 0..turns {
            let extent = |(dim, extents): &(String, Vec<usize>)| (dim.clone(), extents[turn % extents.len()]);
            let binding: Vec<_> = self.at.iter().map(extent).collect();
            let inputs = args::fill(&session.select(&binding)?.programs[0], Vec::new(), self.inputs.seed)?;
            list.push(At { binding, inputs, times: Vec::with_capacity(self.iters as usize) });
        }
        let loaded = session.usage();
        for round in 0..u64::from(self.warmup) + u64::from(self.iters) {
            for At { binding, inputs, times } in &mut list {
                let start = Instant::now();
                session.selected(binding, |exec| exec.run(inputs))??;
                if round >= u64::from(self.warmup) {
                    times.push(start.elapsed());
                }
            }
        }
        let (usage, plan) = (session.usage(), session.plan());
        let of = |bytes: u64, before: u64| i128::from(bytes) - i128::from(before);
        let allocations = usage.allocations - loaded.allocations;
        let grown = of(usage.bytes, loaded.bytes)
            + usage.overhead.zip(loaded.overhead).map_or(0, |(after, before)| of(after, before));
        let runs = (u64::from(self.warmup) + u64::from(self.iters)) * turns as u64;
        let list = list.into_iter().map(|at| (at.binding, Times::new(at.times)));
        if json {
            let one = |(binding, times): (Vec<(String, usize)>, Times)| {
                let Times { median, min, max, p90, p99, .. } = times;
                let binding: serde_json::Map<_, _> = binding.into_iter().map(|(dim, n)| (dim, json!(n))).collect();
                json!({"binding": binding, "median_ms": median, "min_ms": min, "max_ms": max, "p90_ms": p90, "p99_ms": p99})
            };
            let mut value = json!({
                "model": plan.programs[0].graph_name(),
                "device": session.device(),
                "bindings": list.map(one).collect::<Vec<_>>(),
                "iters": self.iters,
                "planned_bytes": plan.bytes(),
                "allocated_bytes": usage.bytes,
                "allocations_in_load": loaded.allocations,
                "allocations_in_runs": allocations,
                "bytes_grown_in_runs": grown as i64,
            });
            subject.name_in(&mut value);
            return Ok(line(&value));
        }
        let mut table = Table::new("<>");
        table.row(Times::heading(&format!("{} at", count(self.iters.into(), "run"))));
        for (binding, times) in list {
            let binding: Vec<_> = binding.iter().map(|(dim, extent)| format!("{dim}={extent}")).collect();
            table.row(times.row(&binding.join(" ")));
        }
        let before = loaded.allocations;
        let head = format!(
            "{} on {}\n\n{table}\nallocations: {before} when loading, {allocations} in {}, which took {grown} bytes more\n\n",
            subject.heading(),
            session.device(),
            count(runs, "run")
        );
        Ok(head + &report::memory(plan.first(), Some(usage)) + &report::overhead(&session.overhead()))
    }
}

/// Times of some runs, in milliseconds.
struct Times {
    count: u64,
    median: f64,
    min: f64,
    max: f64,
    /// Nine of ten runs take at most this.
    p90: f64,
    /// 99 of 100 runs take at most this.
    p99: f64,
}

impl Times {
    /// The times of at least one run.
    fn new(mut runs: Vec<Duration>) -> Times {
        runs.sort_unstable();
        let last = runs.len() - 1;
        let within = |percent: usize| (runs.len() * percent).div_ceil(100).saturating_sub(1);
        let [median, min, max, p90, p99] =
            [runs.len() / 2, 0, last, within(90), within(99)].map(|i| runs[i].as_secs_f64() * 1e3);
        Times { count: runs.len() as u64, median, min, max, p90, p99 }
    }

    /// The heading of a table of rows.
    fn heading(label: &str) -> [String; 6] {
        [label, "median", "min", "90 %", "99 %", "max"].map(str::to_owned)
    }

    /// The row of a table.
    fn row(&self, label: &str) -> [String; 6] {
        let times = [self.median, self.min, self.p90, self.p99, self.max].map(|time| format!("{time:.3} ms"));
        let [median, min, p90, p99, max] = times;
        [label.to_owned(), median, min, p90, p99, max]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_of_runs_are_within_their_times() {
        let times = |count: u64| Times::new((1..=count).rev().map(Duration::from_millis).collect());
        let Times { count, median, min, max, p90, p99 } = times(200);
        assert_eq!((count, median, min, max, p90, p99), (200, 101.0, 1.0, 200.0, 180.0, 198.0));
        let Times { median, min, max, p90, p99, .. } = times(1);
        assert_eq!([median, min, max, p90, p99], [1.0; 5]);
    }
}
