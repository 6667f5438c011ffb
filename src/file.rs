//! Files: atomic writes, where a file gets its name when it is complete, mapped files, and the folder of the caches.

use crate::error::{Error, Result};
use bytes::Bytes;
use std::fs::{self, File};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

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
        // The bytes are on the disk before the name is: a machine that stops in between has the old file.
        out.into_inner().map_err(io::IntoInnerError::into_error)?.sync_all()
    });
    let result = written.and_then(|()| fs::rename(&partial, path));
    if result.is_err() {
        // The first error is the one to report; whether the remains could be removed adds nothing.
        let _ = fs::remove_file(&partial);
    }
    result
}

/// Opens a file of data. A pipe has no end that could be known, and to open one may take forever.
///
/// # Errors
/// The system's error, and [`InvalidInput`](io::ErrorKind::InvalidInput) if it is no file.
pub fn open(path: &Path) -> io::Result<File> {
    if !path.metadata()?.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "expected a file, found a folder, a pipe or a device"));
    }
    File::open(path)
}

/// Maps `bytes` bytes of a file from `offset` on. They take no memory of the process: the system reads them when they are used, and can drop
/// them again. The file must not change while they are in use.
///
/// # Errors
/// The system's error, and [`UnexpectedEof`](io::ErrorKind::UnexpectedEof) if the file is too short.
pub fn map(file: &File, offset: u64, bytes: usize) -> io::Result<Bytes> {
    if offset.checked_add(bytes as u64).is_none_or(|end| file.metadata().is_ok_and(|m| end > m.len())) {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    if bytes == 0 {
        return Ok(Bytes::new());
    }
    // SAFETY: the map is read-only and private, and lives as long as the last `Bytes` into it. Nothing can prevent others from changing or
    // truncating the file meanwhile; the documentation says that they must not.
    let map = unsafe { memmap2::MmapOptions::new().offset(offset).len(bytes).map(file)? };
    Ok(Bytes::from_owner(map))
}

/// How the bytes of a mapped file are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Here and there: what is around them is not worth reading.
    Scattered,
    /// Soon.
    Soon,
}

/// Tells the system how bytes of a mapped file will be read. Where the system takes no advice, nothing happens.
pub fn advise(bytes: &[u8], access: Access) {
    #[cfg(unix)]
    if !bytes.is_empty() {
        let advice = match access {
            Access::Scattered => libc::MADV_RANDOM,
            Access::Soon => libc::MADV_WILLNEED,
        };
        // SAFETY: asks for a number.
        let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) }.max(1) as usize;
        let before = bytes.as_ptr().addr() % page;
        let start = bytes.as_ptr().wrapping_sub(before).cast_mut();
        // SAFETY: these two kinds of advice change no byte, wherever they point; the pages are those of the bytes, which are mapped.
        unsafe { libc::madvise(start.cast(), before + bytes.len(), advice) };
    }
    #[cfg(not(unix))]
    let _ = (bytes, access);
}

/// True if a name fits a pattern, in which `*` stands for any text.
pub fn glob(pattern: &str, name: &str) -> bool {
    let Some((first, rest)) = pattern.split_once('*') else { return pattern == name };
    let (middle, last) = rest.rsplit_once('*').unwrap_or(("", rest));
    let Some(name) = name.strip_prefix(first).and_then(|name| name.strip_suffix(last)) else { return false };
    // The first place of each part leaves the most for those behind it.
    let mut left = Some(name);
    for part in middle.split('*') {
        left = left.and_then(|name| name.split_once(part)).map(|(_, behind)| behind);
    }
    left.is_some()
}

/// The cache's folder: `PLIMSOLL_CACHE_DIR`, else below the user's own.
pub fn cache_folder() -> Option<PathBuf> {
    let set = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    set("PLIMSOLL_CACHE_DIR")
        .or_else(|| set("XDG_CACHE_HOME").map(|folder| folder.join("plimsoll")))
        .or_else(|| set("LOCALAPPDATA").map(|folder| folder.join("plimsoll")))
        .or_else(|| set("HOME").map(|home| home.join(".cache/plimsoll")))
}

/// The file of a device in a folder of the cache. `None` if the user has no cache folder.
pub fn cached(folder: &str, device: &str) -> Option<PathBuf> {
    let safe = |c: char| if c.is_ascii_alphanumeric() || "._-".contains(c) { c } else { '_' };
    let name: String = device.chars().map(safe).take(100).collect();
    let file = format!("{name}-{:016x}.json", fnv(device.as_bytes()) as u64);
    Some(cache_folder()?.join(folder).join(file))
}

/// Writes a [file of the cache](cached). Returns its path, or `None` if it could not be written, with a line in the log that names `what`.
pub fn keep(path: Option<PathBuf>, what: &str, text: &str) -> Option<PathBuf> {
    let Some(path) = path else {
        tracing::warn!("{what} not kept: the user has no cache folder; PLIMSOLL_CACHE_DIR names one");
        return None;
    };
    let folder = path.parent().expect("it is in a folder");
    let made = fs::create_dir_all(folder).map_err(|e| Error::file(folder, "create the folder", e));
    match made.and_then(|()| write_whole(&path, "keep it", |out| out.write_all(text.as_bytes()))) {
        Ok(()) => Some(path),
        Err(error) => {
            tracing::warn!("{what} not kept: {error}");
            None
        }
    }
}

/// FNV-1a of 128 bits (Fowler, Noll, Vo). It names files; the content of a file proves that it is the right one.
pub fn fnv(bytes: &[u8]) -> u128 {
    let step =
        |hash: u128, byte: &u8| (hash ^ u128::from(*byte)).wrapping_mul(0x0000_0000_0100_0000_0000_0000_0000_013b);
    bytes.iter().fold(0x6c62_272e_07bb_0142_62b8_2175_6295_c58d, step)
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

    #[test]
    fn the_hash_is_the_published_one() {
        assert_eq!(fnv(b""), 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d);
        assert_eq!(fnv(b"a"), 0xd228_cb69_6f1a_8caf_7891_2b70_4e4a_8964);
    }
}
