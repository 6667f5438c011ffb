//! Files that appear under their names only when they are whole.

use crate::error::{Error, Result};
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::Path;

/// Writes a file; a reader sees the old one or the whole new one. A device, a pipe or a link is written through, never replaced.
///
/// # Errors
/// When the file cannot be written, with `what` was tried. Nothing is left behind.
pub fn write_whole(path: &Path, what: &str, put: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> Result<()> {
    try_write_whole(path, put).map_err(|e| Error::file(path, what, e))
}

/// As [`write_whole`], with the system's own error.
///
/// # Errors
/// The system's.
pub fn try_write_whole(path: &Path, put: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> io::Result<()> {
    if path.symlink_metadata().is_ok_and(|there| !there.is_file()) {
        return put(&mut File::create(path)?);
    }
    // Other processes may write the same file at the same time.
    let mut partial = path.as_os_str().to_owned();
    partial.push(format!(".{}.partial", std::process::id()));
    let written = File::create(&partial).and_then(|file| {
        let mut out = BufWriter::new(file);
        put(&mut out)?;
        out.flush()
    });
    let result = written.and_then(|()| fs::rename(&partial, path));
    if result.is_err() {
        // The first error is the one to report; whether the remains could be removed adds nothing.
        let _ = fs::remove_file(&partial);
    }
    result
}
