//! `bench`: how long a graph takes.

use super::args::{self, Inputs, Model, On};
use super::line;
use crate::error::Result;
use crate::exec::Exec;
use crate::report;
use clap::Args;
use serde_json::json;
use std::time::Instant;

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
    pub(super) fn run(&self, json: bool) -> Result<String> {
        let given = args::given("--input", &self.inputs.inputs)?;
        let session = self.model.session(&self.on, &given)?;
        let inputs = args::fill(session.plan(), given, self.inputs.seed)?;
        let (warmup, iters) = (u64::from(self.warmup), u64::from(self.iters));
        let bar = args::progress("runs");
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
            let time = |exec: &mut Exec| exec.write(&inputs).and_then(|()| exec.time());
            alone.push(session.with(time)?.as_secs_f64() * 1e3);
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
}
