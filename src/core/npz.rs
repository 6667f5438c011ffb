//! Reads arrays: `.npy` files, and members of NumPy's archives, which are zip files of `.npy` files.
//!
//! ```text
//! member, member, ...    each with a header of its own
//! directory              name, method, sizes and place of each member
//! end                    the place of the directory; before it, if a number needs 64 bits, an end of its own (zip64)
//! ```
//!
//! A member that is stored as it is stays in the mapped file. One that is deflated must be inflated in memory, which suits small tensors.
//!
//! Format: <https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT>.

use crate::dtype::DType;
use crate::error::{Error, Result, ensure};
use crate::npy::invalid;
use crate::shape::Shape;
use crate::tensor::Tensor;
use crate::{file, npy};
use bytes::Bytes;
use miniz_oxide::inflate::decompress_to_vec_with_limit;
use std::io;
use std::path::{Path, PathBuf};

/// The most bytes that a deflated member may have.
const MOST_INFLATED: u64 = 256 << 20;
/// Deflate makes no more than this many bytes of one.
const LARGEST_RATIO: u64 = 1032;
/// The most bytes of a comment, which is the end of an archive.
const MOST_COMMENT: usize = 0xffff;
/// A number of 32 bits that stands for one of 64 bits elsewhere.
const IS_LONG: u64 = 0xffff_ffff;
/// The names of members that an error lists.
const LISTED: usize = 8;

/// Maps an array in C order: an `.npy` file, or a member of an archive, `FILE.npz:NAME`, or `FILE.npz` if it has one member. Returns its
/// elements' type and shape, and the elements, which take no memory of the process.
///
/// # Errors
/// As [`npy::map`]; when the archive is damaged or has no such member; when the member is deflated.
pub fn map(path: &Path) -> Result<(DType, Shape, Bytes)> {
    let Some((path, name)) = archive(path) else { return npy::map(path) };
    let archive = Archive::open(path)?;
    let member = archive.member(name)?;
    let fail = |e| archive.fail(member, e);
    let bytes = archive.bytes(member).map_err(fail)?;
    ensure(member.method == Method::Stored, || {
        fail(invalid(
            "it is deflated, so its rows would have to be in memory at once; write it with np.savez instead of np.savez_compressed",
        ))
    })?;
    npy::parts(&bytes).map_err(fail)
}

/// Reads an array, in C or Fortran order: what [`map`] takes, and deflated members.
///
/// # Errors
/// As [`npy::read`]; when the archive is damaged or has no such member; when a deflated member is large.
pub fn read(path: &Path) -> Result<Tensor> {
    let Some((path, name)) = archive(path) else { return npy::read(path) };
    let archive = Archive::open(path)?;
    archive.read(archive.member(name)?)
}

/// Reads all members of an archive, by name. They take no more memory together than one of them may.
///
/// # Errors
/// As [`read`]; when members share bytes, or several have one name.
pub fn read_all(path: &Path) -> Result<Vec<(String, Tensor)>> {
    let archive = Archive::open(path)?;
    let fail = |what: String| Error::File { path: path.to_owned(), what, source: None };
    let sum = |bytes: &dyn Fn(&Member) -> u64| archive.members.iter().map(bytes).fold(0, u64::saturating_add);
    ensure(sum(&|member| member.packed) <= archive.bytes.len() as u64, || {
        fail("the archive is damaged: its members have more bytes than the file".to_owned())
    })?;
    let inflated = sum(&|member| if member.method == Method::Deflated { member.size } else { 0 });
    ensure(inflated <= MOST_INFLATED, || {
        fail(format!(
            "its deflated members have {inflated} bytes: at most {MOST_INFLATED} are inflated in memory; write it with np.savez instead of np.savez_compressed"
        ))
    })?;
    archive
        .members
        .iter()
        .map(|member| Ok((member.name.clone(), archive.read(archive.member(Some(&member.name))?)?)))
        .collect()
}

/// True if a file's name is that of an archive.
pub fn is_archive(path: &Path) -> bool {
    path.extension().is_some_and(|end| end == "npz")
}

/// True if a file's name is that of an array, or of an archive.
pub fn is_array(path: &Path) -> bool {
    is_archive(path) || path.extension().is_some_and(|end| end == "npy")
}

/// The archive and the member that an argument names. `None` if it names no archive.
fn archive(path: &Path) -> Option<(&Path, Option<&str>)> {
    if is_archive(path) {
        return Some((path, None));
    }
    let text = path.to_str()?;
    let colon = text.find(".npz:")? + ".npz".len();
    Some((Path::new(&text[..colon]), Some(&text[colon + 1..])))
}

/// A mapped archive and its directory.
struct Archive {
    path: PathBuf,
    bytes: Bytes,
    /// The place of the directory: members end before it.
    directory: usize,
    members: Vec<Member>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Method {
    Stored,
    Deflated,
    Other(u16),
}

/// A line of the directory.
struct Member {
    /// Without `.npy`.
    name: String,
    method: Method,
    encrypted: bool,
    crc: u32,
    /// Bytes in the file.
    packed: u64,
    /// Bytes of the member itself.
    size: u64,
    /// The place of its header.
    at: u64,
}

impl Archive {
    fn open(path: &Path) -> Result<Archive> {
        let fail = |e| Error::file(path, "read the archive", e);
        let bytes = file::map_whole(path).map_err(fail)?;
        let (directory, members) = directory(&bytes).map_err(fail)?;
        Ok(Archive { path: path.to_owned(), bytes, directory, members })
    }

    fn fail(&self, member: &Member, error: io::Error) -> Error {
        Error::file(&self.path, &format!("read its member '{}'", member.name), error)
    }

    /// The member of a name, or the only one.
    fn member(&self, name: Option<&str>) -> Result<&Member> {
        let bad = |what: String| {
            let mut names: Vec<_> = self.members.iter().take(LISTED).map(|m| format!("'{}'", m.name)).collect();
            if self.members.len() > LISTED {
                names.push("...".to_owned());
            }
            let what = format!("{what}; its members: {}", names.join(", "));
            Error::File { path: self.path.clone(), what, source: None }
        };
        let Some(name) = name else {
            let [member] = &self.members[..] else {
                let count = self.members.len();
                return Err(bad(format!(
                    "expected an archive of one array, found {count}: name one, as FILE.npz:NAME"
                )));
            };
            return Ok(member);
        };
        let is_named = |member: &&Member| member.name == name || Some(&member.name[..]) == name.strip_suffix(".npy");
        let mut found = self.members.iter().filter(is_named);
        let member = found.next().ok_or_else(|| bad(format!("it has no member '{name}'")))?;
        ensure(found.next().is_none(), || bad(format!("it has several members '{name}'")))?;
        Ok(member)
    }

    /// The tensor of a member.
    fn read(&self, member: &Member) -> Result<Tensor> {
        let fail = |e| self.fail(member, e);
        let bytes = self.bytes(member).and_then(|bytes| member.inflated(bytes)).map_err(fail)?;
        ensure(crc32fast::hash(&bytes) == member.crc, || {
            fail(invalid("its bytes are not those that were written: the checksum differs"))
        })?;
        npy::read_from(&mut &bytes[..], bytes.len() as u64).map_err(fail)
    }

    /// The bytes of a member as they are in the file.
    fn bytes(&self, member: &Member) -> io::Result<Bytes> {
        ensure(!member.encrypted, || invalid("it is encrypted; write it without a password"))?;
        if let Method::Other(number) = member.method {
            return Err(invalid(format!(
                "it is packed by method {number}; expected a stored or a deflated member (0 or 8)"
            )));
        }
        ensure(member.method == Method::Deflated || member.packed == member.size, || {
            let Member { packed, size, .. } = member;
            invalid(format!("the archive is damaged: {size} bytes are stored in {packed}"))
        })?;
        let outside = || invalid("the archive is damaged: the member is not where the directory says, or is cut off");
        // Members come before the directory.
        let before = &self.bytes[..self.directory];
        let at = usize::try_from(member.at).map_err(|_| outside())?;
        let header = Fields(before.get(at..).ok_or_else(outside)?);
        ensure(header.number(0, 4)? == 0x0403_4b50, outside)?;
        let start = 30 + header.number(26, 2)? + header.number(28, 2)?;
        let start = at + start as usize;
        let end = usize::try_from(member.packed).ok().and_then(|packed| start.checked_add(packed));
        let end = end.filter(|&end| end <= before.len()).ok_or_else(outside)?;
        Ok(self.bytes.slice(start..end))
    }
}

impl Member {
    /// The member itself, of its bytes in the file.
    fn inflated(&self, bytes: Bytes) -> io::Result<Bytes> {
        if self.method == Method::Stored {
            return Ok(bytes);
        }
        let Member { packed, size, .. } = *self;
        ensure(size / LARGEST_RATIO <= packed, || {
            invalid(format!("the archive is damaged: {packed} bytes cannot be inflated to {size}"))
        })?;
        ensure(size <= MOST_INFLATED, || {
            invalid(format!(
                "it is deflated, and has {size} bytes: at most {MOST_INFLATED} are inflated in memory; write it with np.savez instead of np.savez_compressed"
            ))
        })?;
        let whole = decompress_to_vec_with_limit(&bytes, size as usize)
            .map_err(|e| invalid(format!("the archive is damaged: its bytes cannot be inflated to {size}: {e}")))?;
        ensure(whole.len() as u64 == size, || {
            invalid(format!("the archive is damaged: expected {size} bytes, found {}", whole.len()))
        })?;
        Ok(whole.into())
    }
}

/// Bytes with numbers in them, the least byte first.
#[derive(Clone, Copy)]
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn slice(self, at: usize, count: usize) -> io::Result<&'a [u8]> {
        let found = at.checked_add(count).and_then(|end| self.0.get(at..end));
        found.ok_or_else(|| invalid("the archive is damaged: it ends too early"))
    }

    fn number(self, at: usize, count: usize) -> io::Result<u64> {
        Ok(self.slice(at, count)?.iter().rev().fold(0, |number, &byte| number << 8 | u64::from(byte)))
    }
}

/// Reads the directory: its place and its members.
fn directory(bytes: &[u8]) -> io::Result<(usize, Vec<Member>)> {
    let file = Fields(bytes);
    let no_end = || invalid("it is no archive (.npz), or is cut off: a zip file has a directory at its end");
    // The end has 22 bytes and a comment.
    let last = bytes.len().checked_sub(22).ok_or_else(no_end)?;
    let is_end = |&at: &usize| {
        bytes[at..].starts_with(b"PK\x05\x06")
            && file.number(at + 20, 2).is_ok_and(|comment| at + 22 + comment as usize == bytes.len())
    };
    let end = (last.saturating_sub(MOST_COMMENT)..=last).rev().find(is_end).ok_or_else(no_end)?;
    let mut count = file.number(end + 10, 2)?;
    let mut size = file.number(end + 12, 4)?;
    let mut start = file.number(end + 16, 4)?;
    let damaged = || invalid("the archive is damaged: its directory is not where its end says");
    let locator = end.checked_sub(20).filter(|&at| bytes[at..].starts_with(b"PK\x06\x07"));
    if let Some(locator) = locator {
        let at = usize::try_from(file.number(locator + 8, 8)?).map_err(|_| damaged())?;
        ensure(bytes.get(at..).is_some_and(|rest| rest.starts_with(b"PK\x06\x06")), damaged)?;
        let long = Fields(&bytes[at..]);
        (count, size, start) = (long.number(32, 8)?, long.number(40, 8)?, long.number(48, 8)?);
    }
    let [start, size] = [start, size].map(|number| usize::try_from(number).unwrap_or(usize::MAX));
    ensure(start.checked_add(size).is_some_and(|behind| behind <= end), damaged)?;
    let mut rest = Fields(&bytes[start..start + size]);
    let mut members = Vec::new();
    while !rest.0.is_empty() {
        ensure(rest.number(0, 4)? == 0x0201_4b50, damaged)?;
        let (name, extra, comment) = (rest.number(28, 2)?, rest.number(30, 2)?, rest.number(32, 2)?);
        let [name, extra, comment] = [name, extra, comment].map(|count| count as usize);
        let mut numbers = [rest.number(24, 4)?, rest.number(20, 4)?, rest.number(42, 4)?];
        lengthen(&mut numbers, Fields(rest.slice(46 + name, extra)?))?;
        let [size, packed, at] = numbers;
        let text = String::from_utf8_lossy(rest.slice(46, name)?);
        members.push(Member {
            name: text.strip_suffix(".npy").unwrap_or(&text).to_owned(),
            method: match rest.number(10, 2)? {
                0 => Method::Stored,
                8 => Method::Deflated,
                other => Method::Other(other as u16),
            },
            encrypted: rest.number(8, 2)? & 1 == 1,
            crc: rest.number(16, 4)? as u32,
            packed,
            size,
            at,
        });
        let length = 46 + name + extra + comment;
        rest = Fields(&rest.0[rest.slice(0, length)?.len()..]);
    }
    ensure(members.len() as u64 == count, || {
        invalid(format!("the archive is damaged: expected {count} members, found {}", members.len()))
    })?;
    Ok((start, members))
}

/// Takes numbers of 64 bits from the extra field 1 of a member: those that its line has no room for, in order.
fn lengthen(numbers: &mut [u64; 3], mut extra: Fields) -> io::Result<()> {
    let mut is_long = numbers.contains(&IS_LONG);
    while is_long && !extra.0.is_empty() {
        let (kind, length) = (extra.number(0, 2)?, extra.number(2, 2)? as usize);
        let field = Fields(extra.slice(4, length)?);
        if kind == 1 {
            let long = numbers.iter_mut().filter(|number| **number == IS_LONG);
            long.enumerate().try_for_each(|(at, number)| {
                *number = field.number(8 * at, 8)?;
                io::Result::Ok(())
            })?;
            is_long = false;
        }
        extra = Fields(&extra.0[4 + length..]);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_are_named_behind_the_archive() {
        for (given, expected) in [
            ("x.npz", Some(("x.npz", None))),
            ("a/x.npz:y", Some(("a/x.npz", Some("y")))),
            ("C:\\x.npz:a:b", Some(("C:\\x.npz", Some("a:b")))),
            ("x.npy", None),
            ("x.npzs", None),
        ] {
            assert_eq!(archive(Path::new(given)), expected.map(|(path, name)| (Path::new(path), name)), "{given}");
        }
    }
}
