//! Open dims of a model that no flag and no given input binds: commands take 1 for each, and say so.

use crate::error::Error;
use crate::onnx::Model;
use crate::whole::leading as leads;
pub(super) use crate::whole::{Whole, largest};
use std::ffi::OsStr;
use std::path::Path;

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
    let found = leads(model);
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
