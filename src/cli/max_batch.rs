//! `max-batch`: finds the largest extent of a dim that fits a limit.

use super::args::{self, Model};
use super::{Failure, line};
use crate::advise::{Size, Taken, largest_binding};
use crate::error::{Error, Result};
use crate::report;
use clap::Args;
use serde_json::json;

#[derive(Args)]
#[command(after_help = args::targets())]
pub(super) struct MaxBatch {
    #[command(flatten)]
    model: Model,
    /// The dim to enlarge. Default: the one that --set leaves open.
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
        let (model, dims) = self.model.load(&[])?;
        let in_file = |e: Error| e.in_file(&self.model.model);
        let dim = self.dim(&model).map_err(in_file)?;
        let case = self.model.case(&model, dims, target);
        // An error that no binding can avoid is the model's. The search would report it for every extent.
        let found = largest_binding(&case, &dim, limit).map_err(in_file)?;
        let Some(Size { extent, bytes: Taken::Bytes(taken) }) = &found.fits else {
            return Err(match &found.next.bytes {
                Taken::Bytes(needed) => {
                    let what = format!("the plan at {dim}={}", found.next.extent);
                    let error = in_file(Error::Fit { what, needed: *needed, limit, file: None });
                    args::refuse(&case.with_dim(&dim, found.next.extent), error, json)
                }
                // The error names its file already.
                Taken::Fails(error) => Error::usage(error.clone()).into(),
            });
        };
        if !json {
            let name = model.name();
            return Ok(format!("{name} for {}\n\n{}", case.target.name, report::largest(&found, limit)));
        }
        let next = match &found.next.bytes {
            Taken::Bytes(bytes) => {
                json!({"extent": found.next.extent, "planned_bytes": bytes, "deficit_bytes": bytes.saturating_sub(limit)})
            }
            Taken::Fails(error) => json!({"extent": found.next.extent, "error": error}),
        };
        Ok(line(&json!({
            "model": model.name(),
            "target": case.target.name,
            "dim": dim,
            "limit_bytes": limit,
            "largest": {"extent": extent, "planned_bytes": taken},
            "next": next,
            "plans": found.plans,
        })))
    }

    /// The dim that is asked for, or the only one that is left.
    fn dim(&self, model: &crate::onnx::Model) -> Result<String> {
        let known = model.open_dims()?;
        if known.is_empty() {
            let dim = self.dim.as_deref().unwrap_or("batch");
            return Err(Error::usage(format!(
                "it has no dim '{dim}' to vary: all sizes of its inputs are numbers in the file ({}); export it with that axis dynamic",
                model.declared_inputs()
            )));
        }
        let list = |names: &[&String]| names.iter().map(|n| format!("'{n}'")).collect::<Vec<_>>().join(", ");
        let all: Vec<&String> = known.iter().collect();
        let set = |name: &str| self.model.dims.iter().any(|(d, _)| d == name);
        match &self.dim {
            Some(dim) if !known.contains(dim) => {
                let declared = model.declared_inputs();
                Err(Error::usage(format!("the graph has no dim '{dim}'; its dims: {} ({declared})", list(&all))))
            }
            Some(dim) if set(dim) => Err(Error::usage(format!("dim '{dim}' is bound by --set and sought by --dim"))),
            Some(dim) => Ok(dim.clone()),
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
