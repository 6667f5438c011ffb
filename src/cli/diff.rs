//! `diff`: compares two plans.

use super::{line, plan};
use crate::error::Result;
use crate::plan::tell::diff::diff;
use crate::report;
use clap::Args;
use serde_json::json;
use std::path::PathBuf;

#[derive(Args)]
pub(super) struct Diff {
    /// A plan, as `plan -o` writes it.
    before: PathBuf,
    /// Another plan.
    after: PathBuf,
}

impl Diff {
    pub(super) fn run(&self, json: bool) -> Result<String> {
        let diff = diff(&plan::read(&self.before)?, &plan::read(&self.after)?);
        Ok(if json { line(&json!(diff)) } else { report::diff(&diff) })
    }
}
