//! `bench`: times a graph's runs.

use super::args::{self, Given, Inputs, Measured, Model, On};
use super::method::Trained;
use super::programs::More;
use super::subject::Subject;
use super::{Failure, line};
use crate::error::{Error, Result};
use crate::exec::Exec;
use crate::figures::count;
use crate::report::{self, Table};
use crate::session::{Program, Session};
use crate::tensor::Tensor;
use clap::Args;
use serde_json::json;
use std::time::{Duration, Instant};

#[derive(Args)]
#[command(mut_arg("warmup", |flag| flag.long("rate-warmup").hide(true)))]
#[command(mut_arg("train", |flag| flag.requires("batch")))]
pub(super) struct Bench {
    #[command(flatten)]
    model: Model,
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
    /// Time N runs at once, in a thread each, beside one run at a time. They share the constants; each has --threads threads of its own.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=65536))]
    forks: u32,
    /// Extents to run at, one after another, for a dim that --set gives a range.
    #[arg(long, value_name = "DIM=N,N,..", value_parser = args::extents)]
    at: Vec<(String, Vec<usize>)>,
}

impl Bench {
    pub(super) fn run(&self, json: bool) -> Result<String, Failure> {
        let given = args::given("--input", &self.inputs.inputs)?;
        if self.trained.method.is_some() {
            return self.run_training(&given, json);
        }
        let model = Model { forks: self.forks, ..self.model.clone() };
        let (session, subject) = self.more.session(&model, &self.on, &self.measured, &given, json)?;
        if !self.at.is_empty() {
            return self.run_range(&session, &subject, &given, json);
        }
        if self.forks > 1 {
            return self.run_forks(session, &subject, &given, json);
        }
        let (plan, inputs) = self.more.select(&session, &self.program, given, self.inputs.seed)?;
        let (warmup, iters) = (u64::from(self.warmup), u64::from(self.iters));
        let bar = args::progress("runs");
        bar.set_length(warmup + iters);
        let loaded = session.usage();
        let mut times = Vec::new();
        for _ in 0..warmup + iters {
            let start = Instant::now();
            session.with(|exec| exec.run(&inputs))?;
            times.push(start.elapsed());
            bar.inc(1);
        }
        bar.finish_and_clear();
        let first = times[0].as_secs_f64() * 1e3;
        let whole = Times::new(times.split_off(self.warmup as usize));
        let time = |exec: &mut Exec| exec.write(&inputs).and_then(|()| exec.time());
        let alone: Result<Vec<_>> = (0..iters).map(|_| session.with(time)).collect();
        let alone = Times::new(alone?);
        let (usage, subject) = (session.usage(), subject.of(&plan));
        if json {
            let mut value = json!({
                "model": plan.title(),
                "device": session.device(),
                "first_ms": first,
                "median_ms": whole.median,
                "min_ms": whole.min,
                "max_ms": whole.max,
                "replay_median_ms": alone.median,
                "replay_min_ms": alone.min,
                "iters": iters,
                "planned_bytes": plan.bytes(),
                "allocated_bytes": usage.bytes,
                "allocations_in_load": loaded.allocations,
                "allocations_in_runs": usage.allocations - loaded.allocations,
                "arena_bytes": plan.summary.arena_bytes,
            });
            subject.name_in(&mut value);
            if let Some(answer) = self.model.answer(&plan) {
                value["answer"] = json!(answer);
            }
            return Ok(line(&value));
        }
        let mut table = Table::new("<>");
        table.row([count(iters, "run"), "median".into(), "min".into(), "max".into()]);
        table.row(["first run".to_owned(), format!("{first:.3} ms")]);
        table.row(whole.row("whole runs"));
        table.row(alone.row("steps alone"));
        let (before, after) = (loaded.allocations, usage.allocations - loaded.allocations);
        let runs = warmup + 2 * iters;
        let head = format!(
            "{} on {}\n\n{table}\nallocations: {before} when loading, {after} in {}\n\n",
            subject.heading(),
            session.device(),
            count(runs, "run")
        );
        let memory = report::memory(&plan, Some(usage)) + &report::overhead(&session.overhead());
        Ok(head + &memory + &self.model.answer_text(&plan))
    }
}

impl Bench {
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
                "model": plan.title(),
                "device": session.device(),
                "forks": self.forks,
                "one_per_second": one,
                "all_per_second": all,
                "planned_bytes": plan.bytes(),
                "allocated_bytes": usage.bytes,
                "fork_bytes": plan.fork_bytes(),
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
        Ok(head + &report::memory(plan, Some(usage)))
    }
}

impl Bench {
    /// Times the updates of a training.
    fn run_training(&self, given: &[Given], json: bool) -> Result<String, Failure> {
        let flags =
            [("--program", !self.program.is_empty()), ("--forks", self.forks > 1), ("--at", !self.at.is_empty())];
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
        let (per_second, allocations) = (1e3 / times.median, usage.allocations - loaded.allocations);
        if json {
            let mut value = json!({
                "model": plan.name,
                "device": session.device(),
                "steps_per_second": per_second,
                "median_ms": times.median,
                "min_ms": times.min,
                "max_ms": times.max,
                "iters": iters,
                "planned_bytes": plan.bytes(),
                "allocated_bytes": usage.bytes,
                "allocations_in_load": loaded.allocations,
                "allocations_in_runs": allocations,
            });
            subject.name_in(&mut value);
            return Ok(line(&value));
        }
        let mut table = Table::new("<>");
        table.row([count(iters, "update"), "median".into(), "min".into(), "max".into()]);
        table.row(times.row(&format!("{per_second:.1} per second")));
        let head = format!(
            "{} on {}\n\n{table}\nallocations: {} when loading, {allocations} in {}\n\n",
            subject.heading(),
            session.device(),
            loaded.allocations,
            count(warmup + iters, "update")
        );
        Ok(head + &report::memory(plan, Some(usage)) + &report::overhead(&session.overhead()))
    }

    /// The programs of an update in the order in which they run, each with its inputs.
    fn parts<'s>(&self, session: &'s Session, given: &[Given]) -> Result<Vec<(Program<'s>, Vec<Tensor>)>> {
        let count = self.trained.method.as_ref().map_or(1, |method| method.accumulate as usize);
        let names = (0..count).map(|part| match part {
            _ if count == 1 => "step",
            0 => "first",
            part if part + 1 == count => "last",
            _ => "next",
        });
        let ready = |name: &str| {
            let program = session.program(name)?;
            let takes = |name: &str| program.plan().inputs.iter().any(|port| port.name == name);
            let own = given.iter().filter(|given| takes(&given.name)).cloned().collect();
            Ok((program, args::fill(program.plan(), own, self.inputs.seed)?))
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
            let inputs = args::fill(&session.select(&binding)?, Vec::new(), self.inputs.seed)?;
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
        let grown = of(usage.bytes, loaded.bytes) + of(usage.overhead, loaded.overhead);
        let runs = (u64::from(self.warmup) + u64::from(self.iters)) * turns as u64;
        let list = list.into_iter().map(|at| (at.binding, Times::new(at.times)));
        if json {
            let one = |(binding, times): (Vec<(String, usize)>, Times)| {
                let Times { median, min, max } = times;
                let binding: serde_json::Map<_, _> = binding.into_iter().map(|(dim, n)| (dim, json!(n))).collect();
                json!({"binding": binding, "median_ms": median, "min_ms": min, "max_ms": max})
            };
            let mut value = json!({
                "model": plan.name,
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
        table.row([format!("{} at", count(self.iters.into(), "run")), "median".into(), "min".into(), "max".into()]);
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
        Ok(head + &report::memory(plan, Some(usage)) + &report::overhead(&session.overhead()))
    }
}

/// Times of some runs, in milliseconds.
struct Times {
    median: f64,
    min: f64,
    max: f64,
}

impl Times {
    /// The times of at least one run.
    fn new(mut runs: Vec<Duration>) -> Times {
        runs.sort_unstable();
        let [median, min, max] = [runs.len() / 2, 0, runs.len() - 1].map(|i| runs[i].as_secs_f64() * 1e3);
        Times { median, min, max }
    }

    /// The row of a table.
    fn row(&self, label: &str) -> [String; 4] {
        let Times { median, min, max } = self;
        [label.to_owned(), format!("{median:.3} ms"), format!("{min:.3} ms"), format!("{max:.3} ms")]
    }
}
