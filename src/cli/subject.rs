//! The subject of a report: which file, and with which extents.

use super::open;
use crate::plan::Program;
use crate::shape::Extent;
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};

/// The files of a command's graphs, and the extents of their dims.
#[derive(Clone)]
pub(super) struct Subject {
    files: Vec<PathBuf>,
    dims: Vec<(String, Extent)>,
    /// Those of the dims that no flag bound.
    assumed: Vec<String>,
    /// The plan's file, of a saved plan.
    plan: Option<PathBuf>,
}

impl Subject {
    pub(super) fn new(files: Vec<PathBuf>, dims: Vec<(String, Extent)>) -> Subject {
        Subject { files, dims, assumed: Vec::new(), plan: None }
    }

    /// Where these dims were taken as 1.
    pub(super) fn assuming(self, assumed: Vec<String>) -> Subject {
        Subject { assumed, ..self }
    }

    /// The dims that were taken as 1.
    pub(super) fn assumed(&self) -> &[String] {
        &self.assumed
    }

    /// As a saved plan has it.
    pub(super) fn by(self, plan: &Path) -> Subject {
        Subject { plan: Some(plan.to_owned()), ..self }
    }

    /// With the extents of a plan, which is of one binding if the dims have ranges.
    pub(super) fn of(&self, plan: &Program) -> Subject {
        let mut own = self.clone();
        for (name, extent) in &mut own.dims {
            if let Some(dim) = plan.dims.iter().find(|dim| dim.name == *name) {
                *extent = (dim.least..=dim.most).into();
            }
        }
        own
    }

    /// The heading of a report: `model.onnx (batch=8 sequence=1..64)`, or `model.onnx (batch=1, as none was given; --set batch=N)`.
    pub(super) fn heading(&self) -> String {
        let given = self.dims.iter().filter(|(name, _)| !self.assumed.contains(name));
        let given: Vec<_> = given.map(|(name, extent)| format!("{name}={extent}")).collect();
        let assumed = if self.assumed.is_empty() { Vec::new() } else { vec![open::note(&self.assumed)] };
        let given = if given.is_empty() { Vec::new() } else { vec![given.join(" ")] };
        self.named(&[given, assumed].concat().join("; "))
    }

    /// The title of a picture: as the heading, but for what is said of dims.
    pub(super) fn title(&self) -> String {
        let dims: Vec<_> = self.dims.iter().map(|(name, extent)| format!("{name}={extent}")).collect();
        self.named(&dims.join(" "))
    }

    fn named(&self, dims: &str) -> String {
        let files: Vec<_> = self.files.iter().map(|file| file.display().to_string()).collect();
        let dims = if dims.is_empty() { String::new() } else { format!(" ({dims})") };
        let plan = self.plan.as_ref().map_or(String::new(), |plan| format!(" by {}", plan.display()));
        files.join(", ") + &dims + &plan
    }

    /// Adds the file and the extents to a record. Several graphs have `files`; a range of extents is a text; dims that no flag bound are `assumed`.
    pub(super) fn name_in(&self, record: &mut Value) {
        match &self.files[..] {
            [file] => record["file"] = json!(file),
            files => record["files"] = json!(files),
        }
        if let Some(plan) = &self.plan {
            record["plan"] = json!(plan);
        }
        if !self.dims.is_empty() {
            let extent = |extent: Extent| extent.fixed().map_or_else(|| json!(extent.to_string()), |n| json!(n));
            let binding: Map<_, _> = self.dims.iter().map(|(name, of)| (name.clone(), extent(*of))).collect();
            record["binding"] = binding.into();
        }
        if !self.assumed.is_empty() {
            record["assumed"] = json!(self.assumed);
        }
    }
}
