//! What was compiled, kept in files under the keys that it was compiled by.

use plimsoll_core::file::{self, fnv};
use std::io;
use std::path::Path;

/// The bytes of a file: first those that name its format and version, then the length of the key, the key, the hash of the content, the content.
pub(crate) fn entry(magic: &[u8], key: &str, content: &[u8]) -> Vec<u8> {
    let (length, hash) = ((key.len() as u64).to_le_bytes(), fnv(content).to_le_bytes());
    [magic, &length, key.as_bytes(), &hash, content].concat()
}

/// The content of an entry, if that is whole and of this key.
pub(crate) fn content<'a>(magic: &[u8], entry: &'a [u8], key: &str) -> Option<&'a [u8]> {
    let rest = entry.strip_prefix(magic)?;
    let rest = rest.strip_prefix(&(key.len() as u64).to_le_bytes())?.strip_prefix(key.as_bytes())?;
    let (hash, content) = rest.split_first_chunk::<16>()?;
    (u128::from_le_bytes(*hash) == fnv(content)).then_some(content)
}

/// Writes an entry atomically, in a folder that only its user can write.
pub(crate) fn store(path: &Path, entry: &[u8]) -> io::Result<()> {
    file::create_private(path.parent().expect("an entry has a folder"))?;
    file::try_write_whole(path, |out| out.write_all(entry))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_whole_entries_of_the_same_key_serve() {
        let magic = b"compiled 1\n";
        let kept = entry(magic, "key", b"machine code");
        assert_eq!(content(magic, &kept, "key"), Some(&b"machine code"[..]));
        assert_eq!(content(magic, &kept, "kez"), None);
        for at in 0..kept.len() {
            let mut spoilt = kept.clone();
            spoilt[at] ^= 1;
            assert_eq!(content(magic, &spoilt, "key"), None, "byte {at}");
            assert_eq!(content(magic, &kept[..at], "key"), None, "{at} bytes");
        }
    }
}
