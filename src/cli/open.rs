//! Open dims of a model that no flag and no given input binds: commands take 1 for each, and say so.

use crate::advise::silent;
use crate::error::{Error, Result};
use crate::onnx::proto::TypeValue;
use crate::onnx::{self, Model};
use crate::shape::{Extent, Shape};
use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::path::Path;

/// A model of which all dims are bound.
pub(super) struct Whole {
    pub(super) model: Model,
    pub(super) dims: Vec<(String, Extent)>,
    /// The dims that were taken as 1.
    pub(super) assumed: Vec<String>,
}

impl Whole {
    /// Binds the dims that are left to 1, but for one that follows from the others by the rule of a node.
    pub(super) fn new(model: Model, mut dims: Vec<(String, Extent)>) -> Result<Whole> {
        let is_bound = |dim: &String| dims.iter().any(|(bound, _)| bound == dim);
        if model.open_dims()?.iter().all(is_bound) {
            return Ok(Whole { model, dims, assumed: Vec::new() });
        }
        // A dim may be bound by an axis, by a sum that has it, or as the length of states: an import knows.
        let Err(Error::Unbound { dims: missing, .. }) = silent(|| onnx::import(&model, &largest(&dims))) else {
            return Ok(Whole { model, dims, assumed: Vec::new() });
        };
        let one = |dim: &String| (dim.clone(), Extent::from(1));
        let follows = |dim: &&String| {
            let others = missing.iter().filter(|other| other != dim).map(one);
            let grown = silent(|| model.clone().grow(dims.iter().cloned().chain(others).collect()));
            grown.and_then(|(model, _)| model.open_dims()).is_ok_and(|open| !open.contains(dim))
        };
        let assumed: Vec<String> = missing.iter().filter(|dim| !follows(dim)).cloned().collect();
        dims.extend(assumed.iter().map(one));
        let (model, dims) = model.grow(dims)?;
        Ok(Whole { model, dims, assumed })
    }

    /// Binds the dims that are left as [`new`](Self::new) does, but for one that is sought, or that has another extent in each part.
    pub(super) fn but(dim: Option<String>, model: Model, mut dims: Vec<(String, Extent)>) -> Result<Whole> {
        let dim = dim.filter(|dim| !dims.iter().any(|(bound, _)| bound == dim));
        dims.extend(dim.iter().map(|dim| (dim.clone(), 1.into())));
        let mut whole = Whole::new(model, dims)?;
        whole.dims.retain(|(bound, _)| Some(bound) != dim.as_ref());
        Ok(whole)
    }
}

/// The error of a file that cannot be read as a model, with what the file is, if that is seen.
pub(super) fn not_a_model(path: &Path, error: Error) -> Error {
    let extension = path.extension().and_then(OsStr::to_str).unwrap_or_default();
    let what = if path.is_dir() {
        format!("no genai_config.json in {}: expected the file of a model, or the folder of a decoder", path.display())
    } else if ["npy", "npz"].contains(&extension) && path.exists() {
        "it is an array: --input takes it, and --data of a training; expected a model, an .onnx or .onnxtxt file"
            .to_owned()
    } else if let (true, Error::Syntax { line, column, what, .. }) = (extension != "onnxtxt", &error) {
        format!(
            "it is not a model: expected an .onnx or .onnxtxt file; as ONNX text, line {line}, column {column}: {what}"
        )
    } else {
        return error;
    };
    Error::File { path: path.to_owned(), what, source: None }
}

/// Dims at their largest extents.
pub(super) fn largest(dims: &[(String, Extent)]) -> Vec<(String, usize)> {
    dims.iter().map(|(name, extent)| (name.clone(), extent.most())).collect()
}

/// An error of a model's import. Of a node, or of a state that grows, the dims that were taken as 1 may be the reason.
pub(super) fn blamed(assumed: &[String], mut error: Error) -> Error {
    if let Error::Node { what, .. } | Error::Usage { what, .. } = &mut error
        && !assumed.is_empty()
    {
        *what += &format!("; {}", note(assumed));
    }
    error
}

/// What is said of dims that were taken as 1: `batch=1, as none was given; --set batch=N`.
pub(super) fn note(assumed: &[String]) -> String {
    let taken: Vec<_> = assumed.iter().map(|dim| format!("{dim}=1")).collect();
    format!("{}, as none was given; {}", taken.join(" "), flags(assumed))
}

/// The open dim that leads the inputs: the first of all inputs that have one. Or why there is none.
pub(super) fn leading(model: &Model) -> Result<String, String> {
    let mut found = BTreeSet::new();
    for input in model.proto.graph.iter().flat_map(|graph| &graph.input) {
        let Some(TypeValue::Tensor(tensor)) = input.r#type.as_ref().and_then(|kind| kind.value.as_ref()) else {
            continue;
        };
        // Each axis has its number as its extent.
        let axes: Shape = (0..tensor.shape.as_ref().map_or(0, |shape| shape.dim.len())).collect();
        found.extend(model.dims_of(&input.name, &axes).into_iter().filter(|(_, axis)| *axis == 0).map(|(dim, _)| dim));
    }
    let found: Vec<String> = found.into_iter().collect();
    let inputs = model.declared_inputs();
    match &found[..] {
        [dim] => Ok(dim.clone()),
        [] => Err(format!(
            "expected an open dim that leads the inputs, found {inputs}: its inputs have fixed extents; export it with dynamic_shapes"
        )),
        several => {
            let names = several.iter().map(|dim| format!("'{dim}'")).collect::<Vec<_>>().join(", ");
            Err(format!(
                "expected one open dim that leads the inputs, found {names} ({inputs}); give {}",
                flags(several)
            ))
        }
    }
}

/// Says in the log which dims were taken as 1, of a command whose result has no heading.
pub(super) fn mention(assumed: &[String]) {
    if !assumed.is_empty() {
        tracing::info!("{}", note(assumed));
    }
}

/// The flags that bind dims.
pub(super) fn flags(dims: &[String]) -> String {
    let plain = |c: char| c.is_alphanumeric() || "._-:".contains(c);
    let quote = |dim: &str| if dim.chars().all(plain) { dim.to_owned() } else { format!("'{dim}'") };
    dims.iter().map(|dim| format!("--set {}=N", quote(dim))).collect::<Vec<_>>().join(" ")
}
