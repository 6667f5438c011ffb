//! `diff`: compares two plans, or the programs of two.

use super::{github, line};
use crate::error::{Error, Result};
use crate::plan::tell::diff::{self as differs, diff};
use crate::plan::{Dim, Plan};
use crate::report;
use clap::Args;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::path::PathBuf;

/// The records of `--json`, as `schema.rs` reads them.
pub(super) const SCHEMA: &str = "
diff = difference|differences
differences
  programs [named_difference]
named_difference
  program text
  diff difference
difference
  plans [text]
  targets [text]
  planned_bytes [int]
  classes [total]
  buffers [changed]
  unchanged int
  choices [[choice]]
  peaks [peak]
total
  class class
  bytes [int]
changed
  name text
  class class
  fate 'new'|'gone'|'grown'|'shrunk'|'moved'
  bytes [int]
  at [[int]|null]
";

#[derive(Args)]
pub(super) struct Diff {
    /// A plan, as `plan -o` writes it; or one of several programs, each of which is compared with the one of its name.
    before: PathBuf,
    /// Another plan.
    after: PathBuf,
}

impl Diff {
    pub(super) fn run(&self, json: bool, annotated: bool) -> Result<String> {
        let (before, after) = (Plan::load(&self.before)?, Plan::load(&self.after)?);
        if let ([_], [_]) = (&before.programs[..], &after.programs[..]) {
            let diff = diff(before.first(), after.first());
            let files = self.files(&before, &after);
            return Ok(if json { line(&json!(diff)) } else { self.text(&diff, annotated, &files) });
        }
        let names = |plan: &Plan| plan.programs.iter().map(|program| program.name.clone()).collect::<Vec<_>>();
        let mut sorted = [names(&before), names(&after)];
        sorted.iter_mut().for_each(|names| names.sort());
        if sorted[0] != sorted[1] {
            let [one, other] = sorted.map(|names| names.join(", "));
            return Err(Error::usage(format!("expected the same programs in both, found {one} and {other}")));
        }
        let other = |name: &str| after.views().find(|other| other.name == name).expect("it is in both");
        let diffs = before.views().map(|program| (&program.program.name[..], diff(program, other(&program.name))));
        if json {
            let programs: Vec<Value> = diffs.map(|(name, diff)| json!({"program": name, "diff": diff})).collect();
            return Ok(line(&json!({"programs": programs})));
        }
        let text = |(name, diff): (&str, differs::Diff)| format!("program {name}\n{}", self.text(&diff, annotated, ""));
        Ok(self.files(&before, &after) + &diffs.map(text).collect::<Vec<_>>().join("\n"))
    }

    /// Both files, each with the extents that the other plan does not have.
    fn files(&self, before: &Plan, after: &Plan) -> String {
        let [before, after] =
            [(&self.before, before, after), (&self.after, after, before)].map(|(path, plan, other)| {
                let other = dims(other);
                let own = dims(plan).into_iter().filter(|dim| !other.contains(dim)).collect::<Vec<_>>().join(" ");
                let own = if own.is_empty() { own } else { format!(" ({own})") };
                format!("{}{own}", path.display())
            });
        format!("before  {before}\nafter   {after}\n\n")
    }

    /// A difference in words, behind the files and, if that is wanted, its annotation.
    fn text(&self, diff: &differs::Diff, annotated: bool, files: &str) -> String {
        let annotation =
            if annotated { github::of_diff(&self.after.display().to_string(), diff) } else { String::new() };
        annotation + files + &report::diff(diff)
    }
}

/// The extents of the dims that a plan was made for; of several programs, of those that have them.
fn dims(plan: &Plan) -> BTreeSet<String> {
    let models = plan.origin.iter().flat_map(|origin| &origin.models);
    let text = |dim: &Dim| match (dim.least, dim.most) {
        (least, most) if least == most => format!("{}={most}", dim.name),
        (least, most) => format!("{}={least}..{most}", dim.name),
    };
    models.flat_map(|model| model.dims.iter().map(text)).collect()
}
