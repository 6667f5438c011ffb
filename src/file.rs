//! Atomic file writes: a file gets its name when it is complete.

use crate::error::{Error, Result};
use std::fs::{self, File};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{self, BufWriter, Write};
use std::path::Path;

/// Writes a file atomically: a reader sees the old file or the complete new one. A device, a pipe or a link is written
/// through, never replaced.
///
/// # Errors
/// The file cannot be written. The error says that `what` was tried. Nothing is left behind.
pub fn write_whole(path: &Path, what: &str, put: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> Result<()> {
    try_write_whole(path, put).map_err(|e| Error::file(path, what, e))
}

/// Like [`write_whole`], with the system's own error.
///
/// # Errors
/// The system's error.
pub fn try_write_whole(path: &Path, put: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> io::Result<()> {
    if path.symlink_metadata().is_ok_and(|there| !there.is_file()) {
        return put(&mut File::create(path)?);
    }
    // Other processes may write the same file at the same time. The partial file has a short name, because the file's
    // own name may already have the maximal length.
    let mut name = DefaultHasher::new();
    path.file_name().hash(&mut name);
    let partial = path.with_file_name(format!(".{:016x}.{}.partial", name.finish(), std::process::id()));
    let written = File::create(&partial).and_then(|file| {
        // A replaced file keeps its permissions.
        if let Ok(there) = path.metadata() {
            file.set_permissions(there.permissions())?;
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_may_be_as_long_as_they_can_be() {
        let folder = std::env::temp_dir().join(format!("plimsoll-file-{}", std::process::id()));
        fs::create_dir_all(&folder).expect("a temporary folder");
        let path = folder.join("n".repeat(255));
        write_whole(&path, "write", |out| out.write_all(b"old")).expect("it is written");
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).expect("it is there");
            write_whole(&path, "write", |out| out.write_all(b"new")).expect("it is replaced");
            assert_eq!(path.metadata().expect("it is there").permissions().mode() & 0o777, 0o640);
        }
        assert!(write_whole(&path, "write", |_| Err(io::Error::other("no"))).is_err());
        assert_eq!(fs::read(&path).expect("it is there"), if cfg!(unix) { b"new" } else { b"old" });
        assert_eq!(fs::read_dir(&folder).expect("it is there").count(), 1, "nothing is left behind");
        fs::remove_dir_all(&folder).expect("it is there");
    }
}
