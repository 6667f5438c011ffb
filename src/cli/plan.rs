//! `plan` and `check`: a graph's memory, with no device.

use super::args::{self, Model};
use super::line;
use crate::error::{Error, Result};
use crate::plan::range::Family;
use crate::plan::{self, Limits};
use crate::{file, pass, report, session};
use clap::Args;
use serde_json::json;
use std::path::PathBuf;

#[derive(Args)]
pub(super) struct Plan {
    #[command(flatten)]
    model: Model,
    /// What to plan for: cpu, cuda (an H200), wgpu (the WebGPU baseline), or a target's JSON file (`devices cuda:0`).
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
        let limits = Limits { memory: self.model.memory_limit };
        let (plan, range) = if self.model.has_range() {
            let (model, dims) = self.model.dims(&[])?;
            let family = Family::new(session::source(model), &dims, &target, !self.model.no_fuse, &limits);
            let family = family.map_err(in_file)?;
            (family.plan().clone(), format!("\n{}", report::range(&family)))
        } else {
            let mut graph = self.model.graph(&[])?;
            pass::run(&mut graph, &target, !self.model.no_fuse).map_err(in_file)?;
            (plan::plan(&graph, &target, &limits).map_err(in_file)?, String::new())
        };
        if let Some(path) = &self.output {
            file::write_whole(path, "write the plan", |out| out.write_all(plan.to_json().as_bytes()))?;
        }
        if json {
            return Ok(plan.to_json());
        }
        let memory = report::memory(&plan, None);
        Ok(format!("{} for {}, {} steps\n\n{memory}{range}", plan.name, target.name, plan.steps.len()))
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
