//! Files: atomic writes, where a file gets its name when it is complete, mapped files, and the folder of the caches.

use crate::error::{Error, Result, ensure};
use bytes::Bytes;
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::{PoisonError, RwLock};
use std::time::Duration;

/// Writes a file atomically: a reader sees the old file or the complete new one. A device or a pipe is written through, never replaced; of a
/// link, the file that it leads to is replaced.
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
    if path.symlink_metadata().is_ok_and(|there| there.is_symlink()) && path.metadata().is_ok_and(|to| to.is_file()) {
        // What the link leads to is replaced when it is complete, and may be mapped until then.
        return try_write_whole(&path.canonicalize()?, put);
    }
    if path.symlink_metadata().is_ok_and(|there| !there.is_file()) {
        return put(&mut File::create(path)?);
    }
    // Other processes may write the same file at the same time. The partial file has a short name, because the file's
    // own name may already have the maximal length.
    let start = partial_start(path);
    let partial = path.with_file_name(format!("{start}{}.partial", std::process::id()));
    remove_remains(&partial, &start);
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

/// What the names of a file's partial files begin with.
fn partial_start(path: &Path) -> String {
    format!(".{:016x}.", fnv(path.file_name().unwrap_or_default().as_encoded_bytes()) as u64)
}

/// Removes partial files of the same name that writers left when they were stopped. One that still writes has written in the last hour.
fn remove_remains(partial: &Path, start: &str) {
    const HOUR: Duration = Duration::from_secs(3600);
    let folder = partial.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let is_partial = name.to_str().is_some_and(|name| name.starts_with(start) && name.ends_with(".partial"));
        let age = || entry.metadata().and_then(|data| data.modified()).ok()?.elapsed().ok();
        if is_partial && age().is_some_and(|age| age > HOUR) {
            // Remains that cannot be removed are no reason not to write.
            let _ = fs::remove_file(entry.path());
        }
    }
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

/// Maps a whole file, as [`map`] does.
///
/// # Errors
/// As [`open`] and [`map`].
pub fn map_whole(path: &Path) -> io::Result<Bytes> {
    let file = open(path)?;
    let bytes = file.metadata()?.len();
    map(&file, 0, usize::try_from(bytes).map_err(|e| io::Error::new(io::ErrorKind::OutOfMemory, e))?)
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

/// Files that the program has no path to, because a page was given them.
#[derive(Clone)]
pub struct Given {
    /// The name of the model's own file, where its data may lie.
    pub own: PathBuf,
    /// Reads bytes of a file of this name from an offset on.
    pub read: fn(&Path, u64, &mut [u8]) -> io::Result<()>,
}

static GIVEN: RwLock<Option<Given>> = RwLock::new(None);

/// Has constants read from files that a page was given.
pub fn give(files: Given) {
    *GIVEN.write().unwrap_or_else(PoisonError::into_inner) = Some(files);
}

/// The files that a page was given, if there is one.
pub fn given() -> Option<Given> {
    GIVEN.read().unwrap_or_else(PoisonError::into_inner).clone()
}

/// The hash of a file's content as a text, which tells files apart.
///
/// # Errors
/// The file cannot be read.
pub fn content(path: &Path) -> Result<String> {
    let bytes = map_whole(path).map_err(|e| Error::file(path, "read it", e))?;
    Ok(format!("{:032x}", content_of(&bytes)))
}

/// A hash of words of 16 bytes, and of the length: models have gigabytes. Each step maps different hashes to different ones, and each bit of a
/// word changes many.
fn content_of(bytes: &[u8]) -> u128 {
    // The fraction of the golden ratio: its bits have no pattern.
    const RATIO: u128 = 0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835;
    let step = |hash: u128, word: u128| {
        let mixed = (hash ^ word).wrapping_mul(RATIO);
        (mixed ^ (mixed >> 61)).wrapping_mul(RATIO)
    };
    let word = |bytes: &[u8]| {
        let mut whole = [0; 16];
        whole[..bytes.len()].copy_from_slice(bytes);
        u128::from_le_bytes(whole)
    };
    step(bytes.chunks(16).map(word).fold(RATIO, step), bytes.len() as u128)
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

/// The cache's folder: `PLIMSOLL_CACHE_DIR`, else below the user's own. What is in it runs on devices: `None` if others can write there.
pub fn cache_folder() -> Option<PathBuf> {
    let set = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let folder = set("PLIMSOLL_CACHE_DIR")
        .or_else(|| set("XDG_CACHE_HOME").map(|folder| folder.join("plimsoll")))
        .or_else(|| set("LOCALAPPDATA").map(|folder| folder.join("plimsoll")))
        .or_else(|| set("HOME").map(|home| home.join(".cache/plimsoll")))?;
    if let Some(open) = open_to_others(&folder) {
        tracing::warn!("the cache {} is not used: others can write {}", folder.display(), open.display());
        return None;
    }
    Some(folder)
}

/// The folder, or one in it, that users other than this one can write: it is another's, or its mode says so.
#[cfg(unix)]
fn open_to_others(folder: &Path) -> Option<PathBuf> {
    use std::os::unix::fs::MetadataExt;

    // The owner of a process's own folder is its user. Where there is none, only modes are judged.
    let user = fs::metadata("/proc/self").map(|own| own.uid()).ok();
    let inside = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    let mut folders = std::iter::once(folder.to_owned()).chain(inside.filter(|path| path.is_dir()));
    folders.find(|path| {
        path.metadata()
            .is_ok_and(|data| data.mode() & 0o022 != 0 || user.is_some_and(|user| ![0, user].contains(&data.uid())))
    })
}

#[cfg(not(unix))]
fn open_to_others(_: &Path) -> Option<PathBuf> {
    None
}

/// Creates a folder of the cache, which only its user can write.
///
/// # Errors
/// The system's error.
pub fn create_private(folder: &Path) -> io::Result<()> {
    let mut builder = fs::DirBuilder::new();
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.recursive(true).create(folder)
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
    let made = create_private(folder).map_err(|e| Error::file(folder, "create the folder", e));
    let sealed = sealed(text);
    match made.and_then(|()| write_whole(&path, "keep it", |out| out.write_all(sealed.as_bytes()))) {
        Ok(()) => Some(path),
        Err(error) => {
            tracing::warn!("{what} not kept: {error}");
            None
        }
    }
}

/// A text of the cache with the hash of its content behind it, in a line of its own.
pub fn sealed(text: &str) -> String {
    format!("{text}\n{:032x}\n", fnv(text.as_bytes()))
}

/// The text of a file that was [kept](keep), without its hash: one of more than `most` bytes is refused, and what was cut off or changed. `doing`
/// says what it is read for.
///
/// # Errors
/// The file cannot be read, or is refused.
pub fn kept(path: &Path, doing: &str, most: u64) -> Result<String> {
    let failed = |e| Error::file(path, doing, e);
    let bytes = std::fs::metadata(path).map_err(failed)?.len();
    ensure(bytes <= most, || Error::usage(format!("expected at most {most} bytes, found {bytes}")).in_file(path))?;
    let text = std::fs::read_to_string(path).map_err(failed)?;
    unsealed(&text, path).map(str::to_owned)
}

/// What was read of a file that may be missing. Another error is told in the log: `what`, such as `measured schedules are`, not used.
pub fn if_there<T>(read: Result<T>, what: &str) -> Option<T> {
    match read {
        Ok(found) => Some(found),
        Err(Error::File { source: Some(e), .. }) if e.kind() == io::ErrorKind::NotFound => None,
        Err(error) => {
            tracing::warn!("{what} not used: {error}");
            None
        }
    }
}

/// The text of a file that was [kept](keep): what was cut off or changed is refused.
///
/// # Errors
/// The hash of the content is missing, or another one.
pub fn unsealed<'t>(text: &'t str, path: &Path) -> Result<&'t str> {
    let parts = text.trim_end_matches('\n').rsplit_once('\n');
    let content = parts.filter(|(content, hash)| *hash == format!("{:032x}", fnv(content.as_bytes())));
    content.map(|(content, _)| content).ok_or_else(|| {
        let what =
            "expected a last line with the hash of what is before it; the file was changed or cut off: remove it";
        Error::usage(what.into()).in_file(path)
    })
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
    fn a_kept_text_comes_back_only_if_it_is_whole() {
        let (path, kept) = (Path::new("kept"), sealed("{\"a\": 1}"));
        assert_eq!(unsealed(&kept, path).expect("it is whole"), "{\"a\": 1}");
        for changed in [kept.replace('1', "2"), kept[..kept.len() - 3].to_owned(), "{\"a\": 1}".into(), String::new()] {
            assert!(unsealed(&changed, path).is_err(), "{changed:?}");
        }
    }

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
    fn remains_of_writers_that_were_stopped_are_removed() {
        let folder = std::env::temp_dir().join(format!("plimsoll-remains-{}", std::process::id()));
        fs::create_dir_all(&folder).expect("a temporary folder");
        let path = folder.join("plan.json");
        let of = [(&path, 7200), (&path, 60), (&folder, 7200)];
        let [old, new, other] = of.map(|(path, age)| {
            let remains = folder.join(format!("{}{age}.partial", partial_start(path)));
            let file = File::create(&remains).expect("a file");
            file.set_modified(std::time::SystemTime::now() - Duration::from_secs(age)).expect("a time");
            remains
        });
        write_whole(&path, "write", |out| out.write_all(b"whole")).expect("it is written");
        assert_eq!([&old, &new, &other, &path].map(|path| path.exists()), [false, true, true, true]);
        fs::remove_dir_all(&folder).expect("it is there");
    }

    /// The content of a cache runs on a device.
    #[cfg(unix)]
    #[test]
    fn a_cache_that_others_can_write_is_not_trusted() {
        use std::os::unix::fs::PermissionsExt;
        let folder = std::env::temp_dir().join(format!("plimsoll-open-{}", std::process::id()));
        let inside = folder.join("tuned");
        create_private(&inside).expect("folders");
        for (path, mode, open) in [
            (&folder, 0o755, false),
            (&folder, 0o775, true),
            (&folder, 0o1777, true),
            (&folder, 0o700, false),
            (&inside, 0o757, true),
        ] {
            fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("it is ours");
            assert_eq!(open_to_others(&folder), open.then(|| path.clone()), "{mode:o}");
        }
        fs::remove_dir_all(&folder).expect("it is there");
        assert_eq!(open_to_others(&folder), None, "there is none");
    }

    /// Files that differ in one bit or two, in their length or in the order of their words have other hashes.
    #[test]
    fn contents_are_told_apart() {
        let bytes: Vec<u8> = (0..67).map(|n| n as u8).collect();
        let mut all: Vec<u128> = (0..67).map(|length| content_of(&bytes[..length])).collect();
        all.extend([content_of(&[0; 16]), content_of(&[0; 17]), content_of(&[&bytes[16..32], &bytes[..16]].concat())]);
        for one in 0..8 * bytes.len() {
            for two in one..8 * bytes.len() {
                let mut other = bytes.clone();
                other[one / 8] ^= 1 << (one % 8);
                if two > one {
                    other[two / 8] ^= 1 << (two % 8);
                }
                all.push(content_of(&other));
            }
        }
        let count = all.len();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), count);
    }

    #[test]
    fn the_hash_is_the_published_one() {
        assert_eq!(fnv(b""), 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d);
        assert_eq!(fnv(b"a"), 0xd228_cb69_6f1a_8caf_7891_2b70_4e4a_8964);
    }
}
