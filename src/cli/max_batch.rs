//! `max-batch`: finds the largest extent of a dim that fits a limit.

use super::args::{self, Model, Pace};
use super::method::{Method, Trained};
use super::open::{self, Whole};
use super::programs::More;
use super::subject::Subject;
use super::{Failure, line};
use crate::advise::{Case, Largest, largest, largest_batch, largest_binding, needed};
use crate::decoder::CONTEXT;
use crate::error::{Error, Result};
use crate::log::silent;
use crate::plan::Graphs;
use crate::report;
use crate::target::Target;
use clap::Args;
use serde_json::json;
use std::ops::Bound::{Excluded, Included, Unbounded};

/// The help of --batch.
const BATCH: &str =
    "Rows per update, which --train enlarges: all parts of an update together. If given, no more are tried";

/// The records of `--json`, as `schema.rs` reads them.
pub(super) const SCHEMA: &str = "
max-batch
  ..subject
  model text
  target text
  dim text
  limit_bytes int
  largest extent_bytes
  next size|null
  plans int
";

/// How far a search is: the extent that was tried last, and the bytes that it needs.
fn tried(dim: &str, extent: usize, needed: Option<&u64>) -> String {
    let bytes = needed.map_or("cannot be planned".to_owned(), |&bytes| report::human(bytes));
    format!("still searching: {dim} {extent}: {bytes}")
}

#[derive(Args)]
#[command(after_help = args::targets())]
#[command(mut_arg("batch", |flag| {
    flag.requires("train").help(BATCH)
}))]
pub(super) struct MaxBatch {
    #[command(flatten)]
    model: Model,
    #[command(flatten)]
    more: More,
    #[command(flatten)]
    trained: Trained,
    /// The dim to enlarge; of one program NAME:DIM. Default: the one that --set leaves open.
    #[arg(long, value_name = "DIM")]
    dim: Option<String>,
    /// The target to plan for: one of those below.
    #[arg(long, default_value = "cpu")]
    target: String,
}

impl MaxBatch {
    pub(super) fn run(&self, json: bool) -> Result<String, Failure> {
        let Some(limit) = self.model.memory_limit else {
            return Err(Error::usage("max-batch: expected --memory-limit SIZE".into()).into());
        };
        let target = self.model.target(&self.target)?;
        if let Some(method) = &self.trained.method() {
            return self.run_training(method, &target, limit, json);
        }
        self.model.several.refuse("max-batch without --train")?;
        if !self.more.is_one(&self.model) {
            return self.run_programs(&target, limit, json);
        }
        let (model, dims) = self.model.load(&[])?;
        let in_file = |e: Error| e.in_file(&self.model.model);
        let mut known = model.open_dims().map_err(in_file)?;
        // A size that the file fixes is only varied if it is named.
        known.extend(self.dim.clone().filter(|dim| model.has_dim(dim) && !known.contains(dim)));
        let dim = self.dim(&known, &model.declared_inputs());
        let dim = dim.map_err(in_file)?;
        let extents = dims.into_iter().map(|(name, extent)| (name, extent.into())).collect();
        let Whole { model, dims, assumed } = Whole::but(Some(dim.clone()), model, extents).map_err(in_file)?;
        let case = Case::of(&model, open::largest(&dims), target, self.model.recipe());
        let subject = Subject::new(vec![self.model.model.clone()], dims).assuming(assumed);
        // An error that no binding can avoid is the model's. The search would report it for every extent.
        let found = largest_binding(&case, &dim, limit).map_err(in_file)?;
        let (name, target) = (model.name(), &case.target.name);
        told(name, &subject, target, &found, limit, json).map_err(|error| match error {
            Error::Fit { .. } => {
                let least = found.next.as_ref().map_or(1, |next| next.extent);
                args::refuse(&case.with_dim(&dim, least), in_file(error), json)
            }
            error => error.into(),
        })
    }

    /// Enlarges a dim of several graphs, which are planned together.
    fn run_programs(&self, target: &Target, limit: u64, json: bool) -> Result<String, Failure> {
        let programs = self.more.open_dims(&self.model)?;
        let mut known: Vec<String> = programs.iter().flat_map(|(_, dims, _)| dims.clone()).collect();
        if let Some((program, dim)) = self.dim.as_deref().and_then(|dim| dim.split_once(':')) {
            let own = programs.iter().find(|(name, ..)| name == program);
            known.extend(own.filter(|(_, dims, _)| dims.iter().any(|d| d == dim)).map(|_| format!("{program}:{dim}")));
        }
        known.sort();
        known.dedup();
        let declared: Vec<_> = programs.iter().map(|(name, _, inputs)| format!("{name}: {inputs}")).collect();
        let dim = self.dim(&known, &declared.join("; "))?;
        let of_model = self.model.decoder()?.filter(|_| dim == CONTEXT).map(|files| Included(files.most_context()));
        let below =
            self.model.dims().iter().find(|(d, _)| *d == dim).map_or(Unbounded, |(_, extent)| Excluded(extent.most()));
        let (mut assumed, mut pace) = (Vec::new(), Pace::new());
        let found = largest(&dim, limit, of_model.unwrap_or(below), &mut |extent| {
            let mut model = self.model.clone();
            model.set.push((dim.clone(), args::Bound::Extent(extent.into())));
            let needed = silent(|| {
                let made = self.more.graphs(&model, &[])?;
                assumed = made.assumed;
                self.needed(made.programs, target, limit)
            });
            pace.say(|| tried(&dim, extent, needed.as_ref().ok()));
            needed
        })?;
        let names: Vec<_> = programs.iter().map(|(name, ..)| &name[..]).collect();
        Ok(told(&names.join(", "), &self.more.subject(&self.model, assumed), &target.name, &found, limit, json)?)
    }

    /// The bytes that programs need under the limit.
    fn needed(&self, programs: Vec<(String, Graphs)>, target: &Target, limit: u64) -> Result<u64> {
        needed(&self.model.job(programs, target)?.within(limit))
    }

    /// Enlarges the batch of a training. The search is over the rows of one part of an update, which decide about the bytes.
    fn run_training(&self, method: &Method, target: &Target, limit: u64, json: bool) -> Result<String, Failure> {
        if self.dim.is_some() {
            return Err(Error::usage("--dim: --train enlarges the batch".into()).into());
        }
        let parts = method.accumulate as usize;
        let most = match self.trained.batch.map(|batch| (batch, batch as usize / parts)) {
            None => Unbounded,
            Some((batch, 0)) => {
                return Err(Error::usage(format!("a batch of {batch} has no {parts} equal parts")).into());
            }
            Some((_, rows)) => Included(rows),
        };
        let mut pace = Pace::new();
        let found = largest_batch(parts, limit, most, &mut |batch| {
            let more = self.more.or_training(Some(method.on_batch(batch as u64).on(target)));
            let needed = silent(|| self.needed(more.asked(&self.model, &[])?.programs, target, limit));
            pace.say(|| tried("batch", batch, needed.as_ref().ok()));
            needed
        })?;
        let Whole { model: file, assumed, .. } = method.whole(&self.model)?;
        Ok(told(file.name(), &self.more.subject(&self.model, assumed), &target.name, &found, limit, json)?)
    }

    /// The dim that is asked for, or the only one that is left of those that are known.
    fn dim(&self, known: &[String], declared: &str) -> Result<String> {
        if known.is_empty() {
            let dim = self.dim.as_deref().unwrap_or("batch");
            return Err(Error::usage(format!(
                "it has no dim '{dim}' to vary: all sizes of its inputs are numbers in the file ({declared}); name one by its input and axis, such as --dim x.0, or export it with that axis dynamic"
            )));
        }
        let list = |names: &[&String]| names.iter().map(|n| format!("'{n}'")).collect::<Vec<_>>().join(", ");
        let all: Vec<&String> = known.iter().collect();
        let set = |name: &str| self.model.dims().iter().any(|(d, _)| d == name);
        match &self.dim {
            Some(dim) if !known.contains(dim) => {
                let nobody =
                    if self.more.is_one(&self.model) { "the graph has no dim" } else { "no program has a dim" };
                Err(Error::usage(format!("{nobody} '{dim}'; the dims: {} ({declared})", list(&all))))
            }
            Some(dim) if set(dim) => Err(Error::usage(format!("dim '{dim}' is bound by --set and sought by --dim"))),
            Some(dim) => Ok(dim.clone()),
            None if self.model.is_folder() && set(CONTEXT) => {
                Err(Error::usage(format!("dim '{CONTEXT}' is bound and sought; name another one with --dim")))
            }
            None if self.model.is_folder() => Ok(CONTEXT.to_owned()),
            None => match all.iter().filter(|d| !set(d)).collect::<Vec<_>>()[..] {
                [only] => Ok((*only).clone()),
                [] => Err(Error::usage(format!("--set binds all dims: {}; leave one to be found", list(&all)))),
                _ => Err(Error::usage(format!(
                    "several dims are open: {}; name one with --dim, bind the others with --set",
                    list(&all)
                ))),
            },
        }
    }
}

/// The report of a search.
///
/// # Errors
/// [`Error::Fit`] when no extent fits.
fn told(name: &str, subject: &Subject, target: &str, found: &Largest, limit: u64, json: bool) -> Result<String> {
    found.or_refuse(limit, None)?;
    if !json {
        return Ok(format!("{} for {target}\n\n{}", subject.heading(), report::largest(found, limit)));
    }
    let mut value = found.told(limit, None)?;
    value["model"] = json!(name);
    value["target"] = json!(target);
    subject.name_in(&mut value);
    Ok(line(&value))
}
