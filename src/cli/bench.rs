//! `bench`: how long a graph takes.

use super::args::{self, Inputs, Model, On};
use super::{Failure, line};
use crate::error::Result;
use crate::exec::Exec;
use crate::report::{self, Table};
use clap::Args;
use serde_json::json;
use std::time::{Duration, Instant};

#[derive(Args)]
pub(super) struct Bench {
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

impl Bench {
    pub(super) fn run(&self, json: bool) -> Result<String, Failure> {
        let given = args::given("--input", &self.inputs.inputs)?;
        let session = self.model.session(&self.on, &given, json)?;
        let inputs = args::fill(session.plan(), given, self.inputs.seed)?;
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
        let usage = session.usage();
        let plan = session.plan();
        if json {
            let mut value = json!({
                "model": plan.name,
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
            if let Some(answer) = self.model.answer(plan) {
                value["answer"] = json!(answer);
            }
            return Ok(line(&value));
        }
        let mut table = Table::new("<>");
        table.row([format!("{iters} runs"), "median".into(), "min".into(), "max".into()]);
        let row = |label: &str, Times { median, min, max }: Times| {
            [label.to_owned(), format!("{median:.3} ms"), format!("{min:.3} ms"), format!("{max:.3} ms")]
        };
        table.row(["first run".to_owned(), format!("{first:.3} ms")]);
        table.row(row("whole runs", whole));
        table.row(row("steps alone", alone));
        let (before, after) = (loaded.allocations, usage.allocations - loaded.allocations);
        let runs = warmup + 2 * iters;
        let head = format!(
            "{} on {}\n\n{table}\nallocations: {before} when loading, {after} in {runs} runs\n\n",
            plan.name,
            session.device()
        );
        let memory = report::memory(plan, Some(usage)) + &report::overhead(&session.overhead());
        Ok(head + &memory + &self.model.answer_text(plan))
    }
}

/// What some runs took, in milliseconds.
struct Times {
    median: f64,
    min: f64,
    max: f64,
}

impl Times {
    /// Of at least one run.
    fn new(mut runs: Vec<Duration>) -> Times {
        runs.sort_unstable();
        let [median, min, max] = [runs.len() / 2, 0, runs.len() - 1].map(|i| runs[i].as_secs_f64() * 1e3);
        Times { median, min, max }
    }
}
