//! `plan` and `check`: a graph's memory, with no device.

use super::args::{self, Model};
use super::line;
use crate::error::{Error, Result};
use crate::plan::{self, Limits};
use crate::{file, pass, report};
use clap::Args;
use serde_json::json;
use std::path::PathBuf;

#[derive(Args)]
#[command(after_help = args::targets())]
pub(super) struct Plan {
    #[command(flatten)]
    model: Model,
    /// What to plan for: one of the targets below.
    #[arg(long, default_value = "cpu")]
    target: String,
    /// Write the plan as JSON, for `check`.
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
}

impl Plan {
    pub(super) fn run(&self, json: bool) -> Result<String> {
        let target = args::target(&self.target, self.model.threads)?;
        let in_file = |e: Error| e.in_file(&self.model.model);
        let mut graph = self.model.graph(&[])?;
        pass::run(&mut graph, &target, !self.model.no_fuse).map_err(in_file)?;
        let limits = Limits { memory: self.model.memory_limit };
        let plan = plan::plan(&graph, &target, &limits).map_err(in_file)?;
        if let Some(path) = &self.output {
            file::write_whole(path, "write the plan", |out| out.write_all(plan.to_json().as_bytes()))?;
        }
        if json {
            return Ok(plan.to_json());
        }
        Ok(format!("{} for {}, {} steps\n\n{}", plan.name, target.name, plan.steps.len(), report::memory(&plan, None)))
    }
}

#[derive(Args)]
pub(super) struct Check {
    /// A plan, as `plan -o` writes it.
    plan: PathBuf,
}

impl Check {
    pub(super) fn run(&self, json: bool) -> Result<String> {
        let text = std::fs::read_to_string(&self.plan).map_err(|e| Error::file(&self.plan, "read the plan", e))?;
        let plan = plan::Plan::from_json(&text, &self.plan)?;
        if json {
            return Ok(line(&json!({"plan": plan.name, "steps": plan.steps.len(), "ok": true})));
        }
        Ok(format!("{}: sound: {} steps, {} buffers\n", plan.name, plan.steps.len(), plan.buffers.len()))
    }
}
