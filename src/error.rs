//! One error type for the whole crate: a variant per phase, each with the facts.

use std::path::{Path, PathBuf};

/// Shorthand for results of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What went wrong, where, and what was expected instead.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file could not be read or written.
    #[error("{}: {what}", path.display())]
    File {
        /// The file or folder concerned.
        path: PathBuf,
        /// What was tried and why it failed.
        what: String,
    },
    /// A text file does not follow its syntax.
    #[error("{}:{line}:{column}: {what}", path.display())]
    Syntax {
        /// The file concerned.
        path: PathBuf,
        /// 1-based line.
        line: usize,
        /// 1-based column, in characters.
        column: usize,
        /// What was expected and what was found.
        what: String,
    },
    /// A node of a graph is not what its operator allows.
    #[error("node '{node}' ({op}): {what}")]
    Node {
        /// Name of the node.
        node: String,
        /// Name of its operator.
        op: String,
        /// Expected and found.
        what: String,
    },
    /// A graph as a whole is malformed.
    #[error("graph: {0}")]
    Graph(String),
    /// An input, a flag or a binding of the caller does not fit the graph.
    #[error("{0}")]
    Usage(String),
    /// The plan is larger than the limit it was given. Nothing was allocated.
    #[error("does not fit: {what}: needs {needed} bytes, the limit is {limit} bytes ({} over)", needed.saturating_sub(*limit))]
    Fit {
        /// What was measured against the limit.
        what: String,
        /// Bytes the plan needs.
        needed: u64,
        /// Bytes it may use.
        limit: u64,
    },
    /// The host has not the memory.
    #[error("does not fit: {what}: the host has no {needed} bytes for it")]
    Memory {
        /// What was to be taken.
        what: String,
        /// Its bytes.
        needed: u64,
    },
    /// A plan breaks a rule that every plan must keep.
    #[error("plan: {0}")]
    Plan(String),
    /// Two results that should agree do not.
    #[error("results differ: {0}")]
    Differ(String),
    /// A device is absent, lost, or refused something.
    #[error("backend {backend}: {what}")]
    Backend {
        /// `cpu`, `wgpu`, ...
        backend: &'static str,
        /// What it was asked and what it answered.
        what: String,
    },
    /// An error met while working on a file.
    #[error("{}: {error}", path.display())]
    In {
        /// The file that led to the error.
        path: PathBuf,
        /// The error itself.
        error: Box<Error>,
    },
}

impl Error {
    /// The process's exit code: 1 bad input or usage, 2 does not fit, 3 results differ, 4 backend unavailable.
    pub fn exit_code(&self) -> u8 {
        match self {
            Error::Fit { .. } | Error::Memory { .. } => 2,
            Error::Differ(_) => 3,
            Error::Backend { .. } => 4,
            Error::In { error, .. } => error.exit_code(),
            _ => 1,
        }
    }

    /// Bytes that were needed and bytes that there are, if something does not fit.
    pub fn misfit(&self) -> Option<(u64, u64)> {
        match self {
            Error::Fit { needed, limit, .. } => Some((*needed, *limit)),
            Error::In { error, .. } => error.misfit(),
            _ => None,
        }
    }

    /// Names the file that the error was met in, unless the error already names one.
    pub fn in_file(self, path: &Path) -> Error {
        match self {
            Error::File { .. } | Error::Syntax { .. } | Error::In { .. } => self,
            error => Error::In { path: path.to_owned(), error: Box::new(error) },
        }
    }

    /// An [`Error::Syntax`] from a JSON reader's error.
    pub fn json(path: &Path, error: &serde_json::Error) -> Error {
        let (line, column) = (error.line(), error.column());
        let text = error.to_string();
        let what = text.strip_suffix(&format!(" at line {line} column {column}")).unwrap_or(&text).to_owned();
        Error::Syntax { path: path.to_owned(), line, column, what }
    }

    /// An [`Error::File`] from an I/O error.
    pub fn file(path: &Path, doing: &str, error: std::io::Error) -> Error {
        Error::File { path: path.to_owned(), what: format!("cannot {doing}: {error}") }
    }
}
