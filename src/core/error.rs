//! One error type for the whole crate: a variant per cause, each with its facts.

use crate::figures::grouped;
use std::any::Any;
use std::fmt::{self, Display, Formatter};
use std::io;
use std::path::{Path, PathBuf};

/// Shorthand for results of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The words for a panic that a door of the library has caught.
pub fn bug(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no reason is known");
    format!("plimsoll has a bug, please report it: {text}")
}

/// Refuses with `error` unless `holds`.
pub fn ensure<E>(holds: bool, error: impl FnOnce() -> E) -> Result<(), E> {
    if holds { Ok(()) } else { Err(error()) }
}

/// The error of every function of this crate: what went wrong, where, and what was expected instead.
///
/// A variant is the same whether the graph came from a file or not: the file is one of its fields. [`Display`] says all of it, the file and
/// the cause included.
#[non_exhaustive]
pub enum Error {
    /// A file cannot be read or written, or has other content than expected.
    File {
        /// The file or folder.
        path: PathBuf,
        /// The attempt and the reason why it failed.
        what: String,
        /// The cause, if the system or a decoder gave one.
        source: Option<io::Error>,
    },
    /// A text file does not follow its syntax.
    Syntax {
        /// The file.
        path: PathBuf,
        /// Line, counted from 1.
        line: usize,
        /// Column, counted from 1, in characters.
        column: usize,
        /// The text that was expected, and the text that was found.
        what: String,
    },
    /// A node of a graph breaks a rule of its operator.
    Node {
        /// Name of the node.
        node: String,
        /// Name of its operator.
        op: String,
        /// Expected and found.
        what: String,
        /// The graph's file, if it came from one.
        file: Option<PathBuf>,
    },
    /// A graph as a whole is malformed.
    Graph {
        /// The fault, with what was expected.
        what: String,
        /// The graph's file, if it came from one.
        file: Option<PathBuf>,
    },
    /// Named dims of a graph have no extent: see `Options::set`.
    Unbound {
        /// The dims, by name.
        dims: Vec<String>,
        /// The graph's file, if it came from one.
        file: Option<PathBuf>,
    },
    /// An input or an option does not suit the graph or the device.
    Usage {
        /// Expected and found.
        what: String,
        /// The file concerned, if there is one.
        file: Option<PathBuf>,
    },
    /// More bytes are needed than the limit allows or the device has. A plan that does not fit has allocated nothing.
    Fit {
        /// The thing that does not fit, such as a plan or staging.
        what: String,
        /// Bytes needed.
        needed: u64,
        /// Bytes that may be used.
        limit: u64,
        /// The graph's file, if it came from one.
        file: Option<PathBuf>,
    },
    /// The host does not have enough memory.
    Memory {
        /// The use that the memory was for.
        what: String,
        /// Bytes needed.
        needed: u64,
        /// The graph's file, if it came from one.
        file: Option<PathBuf>,
    },
    /// A plan breaks a rule that every plan must keep.
    Plan {
        /// The rule, and where the plan breaks it.
        what: String,
        /// The plan's or the graph's file, if it came from one.
        file: Option<PathBuf>,
    },
    /// Two results that should agree differ.
    Differ {
        /// Where, and by how much.
        what: String,
        /// The graph's file, if it came from one.
        file: Option<PathBuf>,
    },
    /// A device is absent, is lost, or refused a request.
    Backend {
        /// `cpu`, `wgpu`, ...
        backend: &'static str,
        /// The request and the device's answer.
        what: String,
        /// The graph's file, if it came from one.
        file: Option<PathBuf>,
    },
}

impl Error {
    /// The exit code of a process that ends with this error: 1 bad input or usage, 2 does not fit, 3 results differ, 4 backend unavailable.
    pub fn exit_code(&self) -> u8 {
        match self {
            Error::Fit { .. } | Error::Memory { .. } => 2,
            Error::Differ { .. } => 3,
            Error::Backend { .. } => 4,
            _ => 1,
        }
    }

    /// The kind of error in a word, and its fields, for programs in other languages.
    pub fn fields(&self) -> (&'static str, serde_json::Value) {
        use serde_json::json;
        match self {
            Error::File { .. } => ("file", json!({})),
            Error::Syntax { line, column, .. } => ("syntax", json!({"line": line, "column": column})),
            Error::Node { node, op, .. } => ("node", json!({"node": node, "op": op})),
            Error::Graph { .. } => ("graph", json!({})),
            Error::Unbound { dims, .. } => ("unbound", json!({"dims": dims})),
            Error::Usage { .. } => ("usage", json!({})),
            Error::Fit { needed, limit, .. } => ("fit", json!({"needed": needed, "limit": limit})),
            Error::Memory { needed, .. } => ("memory", json!({"needed": needed})),
            Error::Plan { .. } => ("plan", json!({})),
            Error::Differ { .. } => ("differ", json!({})),
            Error::Backend { backend, .. } => ("backend", json!({"backend": backend})),
        }
    }

    /// The file that the error names.
    pub fn path(&self) -> Option<&Path> {
        match self {
            Error::File { path, .. } | Error::Syntax { path, .. } => Some(path),
            Error::Node { file, .. }
            | Error::Graph { file, .. }
            | Error::Unbound { file, .. }
            | Error::Usage { file, .. }
            | Error::Fit { file, .. }
            | Error::Memory { file, .. }
            | Error::Plan { file, .. }
            | Error::Differ { file, .. }
            | Error::Backend { file, .. } => file.as_deref(),
        }
    }

    /// Adds the file in which the error occurred, unless the error already names one.
    pub fn in_file(mut self, path: &Path) -> Error {
        match &mut self {
            Error::File { .. } | Error::Syntax { .. } => {}
            Error::Node { file, .. }
            | Error::Graph { file, .. }
            | Error::Unbound { file, .. }
            | Error::Usage { file, .. }
            | Error::Fit { file, .. }
            | Error::Memory { file, .. }
            | Error::Plan { file, .. }
            | Error::Differ { file, .. }
            | Error::Backend { file, .. } => {
                file.get_or_insert_with(|| path.to_owned());
            }
        }
        self
    }

    /// An [`Error::Graph`] that names no file.
    pub fn graph(what: String) -> Error {
        Error::Graph { what, file: None }
    }

    /// An [`Error::Usage`] that names no file.
    pub fn usage(what: String) -> Error {
        Error::Usage { what, file: None }
    }

    /// An [`Error::Plan`] that names no file.
    pub fn plan(what: String) -> Error {
        Error::Plan { what, file: None }
    }

    /// An [`Error::Differ`] that names no file.
    pub fn differ(what: String) -> Error {
        Error::Differ { what, file: None }
    }

    /// An [`Error::File`] from an I/O error.
    pub fn file(path: &Path, doing: &str, error: io::Error) -> Error {
        Error::File { path: path.to_owned(), what: format!("cannot {doing}: {error}"), source: Some(error) }
    }

    /// An [`Error::Syntax`] from a JSON reader's error.
    pub fn json(path: &Path, error: &serde_json::Error) -> Error {
        let (line, column) = (error.line(), error.column());
        let text = error.to_string();
        let what = text.strip_suffix(&format!(" at line {line} column {column}")).unwrap_or(&text).to_owned();
        Error::Syntax { path: path.to_owned(), line, column, what }
    }
}

/// As [`Display`]: it is what a `main` that returns the error prints.
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        Display::fmt(self, f)
    }
}

impl Display for Error {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Error::Syntax { path, line, column, .. } => write!(f, "{}:{line}:{column}: ", path.display())?,
            error => error.path().map_or(Ok(()), |file| write!(f, "{}: ", file.display()))?,
        }
        match self {
            Error::File { what, .. } | Error::Syntax { what, .. } | Error::Usage { what, .. } => f.write_str(what),
            Error::Node { node, op, what, .. } => write!(f, "node '{node}' ({op}): {what}"),
            Error::Graph { what, .. } => write!(f, "graph: {what}"),
            Error::Unbound { dims, .. } => {
                write!(f, "dims not bound: '{}'", dims.join("', '"))
            }
            Error::Fit { what, needed, limit, .. } => {
                let [needed, limit, over] = [*needed, *limit, needed.saturating_sub(*limit)].map(grouped);
                write!(f, "does not fit: {what}: needs {needed} bytes, the limit is {limit} bytes ({over} over)")
            }
            Error::Memory { what, needed, .. } => {
                write!(f, "does not fit: {what}: the host has no {} bytes for it", grouped(*needed))
            }
            Error::Plan { what, .. } => write!(f, "plan: {what}"),
            Error::Differ { what, .. } => write!(f, "results differ: {what}"),
            Error::Backend { backend, what, .. } => write!(f, "backend {backend}: {what}"),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Error::File { source, .. } => source.as_ref().map(|error| error as _),
            _ => None,
        }
    }
}
