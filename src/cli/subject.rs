//! The subject of a report: which file, and with which extents.

use crate::plan::Program;
use crate::shape::Extent;
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};

/// The files of a command's graphs, and the extents of their dims.
#[derive(Clone)]
pub(super) struct Subject {
    files: Vec<PathBuf>,
    dims: Vec<(String, Extent)>,
    /// The plan's file, of a saved plan.
    plan: Option<PathBuf>,
}

impl Subject {
    pub(super) fn new(files: Vec<PathBuf>, dims: Vec<(String, Extent)>) -> Subject {
        Subject { files, dims, plan: None }
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

    /// The heading of a report: `model.onnx (batch=8 sequence=1..64)`.
    pub(super) fn heading(&self) -> String {
        let files: Vec<_> = self.files.iter().map(|file| file.display().to_string()).collect();
        let dims: Vec<_> = self.dims.iter().map(|(name, extent)| format!("{name}={extent}")).collect();
        let dims = if dims.is_empty() { String::new() } else { format!(" ({})", dims.join(" ")) };
        let plan = self.plan.as_ref().map_or(String::new(), |plan| format!(" by {}", plan.display()));
        files.join(", ") + &dims + &plan
    }

    /// Adds the file and the extents to a record. Several graphs have `files`; a range of extents is a text.
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
    }
}
