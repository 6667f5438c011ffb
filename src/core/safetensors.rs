//! Reads and writes safetensors files: a header in JSON with the name, type, shape and place of each tensor, then their elements.
//!
//! Format: <https://huggingface.co/docs/safetensors>. The reader holds a file to all of it: names are unique, and every byte behind the
//! header belongs to exactly one tensor.

use crate::dtype::DType;
use crate::error::{Error, Result, ensure};
use crate::file;
use crate::shape::Shape;
use crate::tensor::Tensor;
use bytes::Bytes;
use serde::de::{self, Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// Bytes before the header, which hold its length.
const LENGTH: usize = size_of::<u64>();
/// The longest header, as the format sets it.
const MAX_HEADER: u64 = 100_000_000;
/// The most axes of a tensor.
const MAX_AXES: usize = 64;
/// The longest name of a tensor, in bytes.
const MAX_NAME: usize = 1 << 12;
/// The most entries that describe the whole file.
const MAX_METADATA: usize = 1 << 12;
/// The key of the entries that describe the whole file.
const METADATA: &str = "__metadata__";

/// The format's names of element types, their bits, and the types that tensors can have.
const TYPES: [(&str, u64, Option<DType>); 22] = [
    ("F32", 32, Some(DType::F32)),
    ("F16", 16, Some(DType::F16)),
    ("BF16", 16, Some(DType::BF16)),
    ("F64", 64, Some(DType::F64)),
    ("I64", 64, Some(DType::I64)),
    ("I32", 32, Some(DType::I32)),
    ("U8", 8, Some(DType::U8)),
    ("I8", 8, Some(DType::I8)),
    ("BOOL", 8, Some(DType::Bool)),
    ("U16", 16, Some(DType::U16)),
    ("I16", 16, Some(DType::I16)),
    ("U32", 32, Some(DType::U32)),
    ("U64", 64, Some(DType::U64)),
    ("F8_E4M3", 8, Some(DType::F8E4M3FN)),
    ("F8_E5M2", 8, Some(DType::F8E5M2)),
    ("F8_E8M0", 8, Some(DType::F8E8M0)),
    ("F8_E4M3FNUZ", 8, Some(DType::F8E4M3FNUZ)),
    ("F8_E5M2FNUZ", 8, Some(DType::F8E5M2FNUZ)),
    ("F6_E2M3", 6, None),
    ("F6_E3M2", 6, None),
    ("F4", 4, Some(DType::F4E2M1)),
    ("C64", 64, None),
];

/// A file of named tensors. Their elements stay in the mapped file, which must not change meanwhile.
#[derive(Debug)]
pub struct SafeTensors {
    path: PathBuf,
    metadata: BTreeMap<String, String>,
    tensors: BTreeMap<String, Entry>,
    data: Bytes,
}

/// A tensor's type, as an index of [`TYPES`], its shape, and the place of its elements.
#[derive(Debug)]
struct Entry {
    kind: usize,
    shape: Shape,
    at: Range<u64>,
}

/// The header as it is written.
#[derive(Default)]
struct Header {
    metadata: Metadata,
    tensors: BTreeMap<String, Entry>,
}

/// The entries that describe the whole file.
#[derive(Default)]
struct Metadata(BTreeMap<String, String>);

impl SafeTensors {
    /// Maps a file, and reads its header.
    ///
    /// # Errors
    /// When the file cannot be read, or breaks a rule of the format.
    pub fn open(path: &Path) -> Result<SafeTensors> {
        let fail = |e| Error::file(path, "read the tensors", e);
        let bad = |what: String| Error::File { path: path.to_owned(), what, source: None };
        ensure(path.metadata().map_err(fail)?.is_file(), || bad("not a file".into()))?;
        let mut data = file::map_whole(path).map_err(fail)?;
        let refuse = |what: String| bad(format!("not a safetensors file, or only a part of one: {what}"));
        let header = split_header(&mut data).map_err(refuse)?;
        let Header { metadata, tensors } =
            serde_json::from_slice(&header).map_err(|e| refuse(format!("the header: {e}")))?;
        check_places(&tensors, data.len() as u64).map_err(refuse)?;
        Ok(SafeTensors { path: path.to_owned(), metadata: metadata.0, tensors, data })
    }

    /// An entry that describes the whole file.
    pub fn metadata(&self, key: &str) -> Option<&str> {
        self.metadata.get(key).map(String::as_str)
    }

    /// The names of the tensors, sorted.
    pub fn names(&self) -> impl ExactSizeIterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// The type and shape of a tensor, for messages; `None` if the file has no such tensor.
    pub fn describe(&self, name: &str) -> Option<String> {
        let Entry { kind, shape, .. } = self.tensors.get(name)?;
        let (name, _, dtype) = TYPES[*kind];
        Some(format!("{}{shape}", dtype.map_or(name, DType::name)))
    }

    /// A tensor, whose elements stay in the mapped file.
    ///
    /// # Errors
    /// When the file has no such tensor, or its elements are of a type that no [`DType`] stands for.
    pub fn tensor(&self, name: &str) -> Result<Tensor> {
        let bad = |what: String| Error::File { path: self.path.clone(), what, source: None };
        let Entry { kind, shape, at } = self.tensors.get(name).ok_or_else(|| bad(format!("no tensor '{name}'")))?;
        let dtype = TYPES[*kind].2.ok_or_else(|| {
            let supported: Vec<_> = TYPES.iter().filter(|t| t.2.is_some()).map(|t| t.0).collect();
            let supported = supported.join(", ");
            bad(format!("tensor '{name}': element type {} is not supported (supported: {supported})", TYPES[*kind].0))
        })?;
        Tensor::from_file(dtype, shape.clone(), self.data.slice(at.start as usize..at.end as usize))
    }
}

/// Takes the header from a file's bytes. The elements stay.
fn split_header(data: &mut Bytes) -> Result<Bytes, String> {
    let found = data.len();
    let Some(length) = data.first_chunk::<LENGTH>().map(|length| u64::from_le_bytes(*length)) else {
        return Err(format!("expected the header's length in {LENGTH} bytes, found {found} bytes in all"));
    };
    ensure(length <= MAX_HEADER, || format!("expected a header of at most {MAX_HEADER} bytes, found one of {length}"))?;
    ensure(length <= (found - LENGTH) as u64, || {
        format!("expected a header of {length} bytes, found {} behind its length", found - LENGTH)
    })?;
    let elements = data.split_off(LENGTH + length as usize);
    let header = std::mem::replace(data, elements).slice(LENGTH..);
    ensure(header.first() == Some(&b'{'), || "the header: expected '{' as its first byte".to_owned())?;
    Ok(header)
}

/// Refuses tensors that do not follow one another without gaps to the file's end.
fn check_places(tensors: &BTreeMap<String, Entry>, bytes: u64) -> Result<(), String> {
    let mut order: Vec<(&String, &Entry)> = tensors.iter().collect();
    order.sort_by_key(|(_, entry)| (entry.at.start, entry.at.end));
    let mut end = 0;
    for (name, Entry { kind, shape, at }) in order {
        let (word, bits, _) = TYPES[*kind];
        ensure(at.start == end, || {
            let fault = if at.start < end { "overlaps another tensor" } else { "leaves a gap before it" };
            format!("tensor '{name}' at bytes {}..{} {fault}: expected it at byte {end}", at.start, at.end)
        })?;
        let needed = shape.checked_len().and_then(|n| (n as u64).checked_mul(bits));
        let found = at.end.checked_sub(at.start);
        let fits = needed.is_some_and(|bits| bits % 8 == 0 && found == Some(bits / 8));
        ensure(fits, || {
            let needed = needed.map_or("too many bytes".to_owned(), |bits| format!("{} bytes", bits.div_ceil(8)));
            format!("tensor '{name}' ({word}{shape}): expected {needed}, found bytes {}..{}", at.start, at.end)
        })?;
        end = at.end;
    }
    ensure(end == bytes, || format!("expected {end} bytes behind the header, found {bytes}"))
}

/// Writes a file. A reader never sees a part of it. `elements` gets the number of a tensor, and hands on its elements in any pieces,
/// row-major and little-endian.
///
/// # Errors
/// When the file cannot be written, a name is the format's own, or `elements` fails.
pub fn write(
    path: &Path,
    doing: &str,
    metadata: &BTreeMap<&str, String>,
    tensors: &[(&str, DType, &Shape)],
    mut elements: impl FnMut(usize, &mut dyn FnMut(&[u8]) -> Result<()>) -> Result<()>,
) -> Result<()> {
    if let Some((name, ..)) = tensors.iter().find(|(name, ..)| *name == METADATA || name.len() > MAX_NAME) {
        let name: String = name.chars().take(METADATA.len()).collect();
        let what = format!("'{name}' cannot be a tensor's name in a safetensors file");
        return Err(Error::usage(format!("{what}: expected at most {MAX_NAME} bytes, and not '{METADATA}'")));
    }
    let order = order(tensors);
    let header = header(metadata, order.iter().map(|&number| tensors[number]));
    let mut failed = None;
    let written = file::write_whole(path, doing, |out| {
        out.write_all(&(header.len() as u64).to_le_bytes())?;
        out.write_all(header.as_bytes())?;
        for &number in &order {
            let mut put = |bytes: &[u8]| out.write_all(bytes).map_err(|e| Error::file(path, doing, e));
            if let Err(error) = elements(number, &mut put) {
                failed = Some(error);
                return Err(io::ErrorKind::Other.into());
            }
        }
        Ok(())
    });
    failed.map_or(written, Err)
}

/// The order in which [`write()`] asks for the elements of tensors: types in order of their size keep every tensor aligned in a mapped file.
pub fn order(tensors: &[(&str, DType, &Shape)]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..tensors.len()).collect();
    order.sort_by(|&a, &b| (tensors[b].1.size(), tensors[a].0).cmp(&(tensors[a].1.size(), tensors[b].0)));
    order
}

/// Refuses a tensor that the format has no name or no place for.
///
/// # Errors
/// What is not possible.
pub fn check(name: &str, dtype: DType, shape: &Shape) -> Result<()> {
    ensure(TYPES.iter().any(|t| t.2 == Some(dtype)), || {
        Error::usage(format!("'{name}' is {dtype}{shape}: safetensors has no name for such elements"))
    })?;
    ensure((shape.numel() * dtype.bits()).is_multiple_of(8), || {
        Error::usage(format!(
            "'{name}' is {dtype}{shape}: safetensors has no place for elements that do not fill bytes"
        ))
    })
}

/// The header of tensors in the order of their elements, filled with spaces up to a whole number of words.
fn header<'a>(metadata: &BTreeMap<&str, String>, tensors: impl Iterator<Item = (&'a str, DType, &'a Shape)>) -> String {
    let json = |text: &str| serde_json::to_string(text).expect("text can always be written");
    let metadata = serde_json::to_string(metadata).expect("keys and values are text");
    let (mut text, mut start) = (format!("{{{}:{metadata}", json(METADATA)), 0);
    for (name, dtype, shape) in tensors {
        let (word, ..) = TYPES.iter().find(|t| t.2 == Some(dtype)).expect("every type has a name");
        let end = start + (shape.numel() * dtype.bits() / 8) as u64;
        let shape = serde_json::to_string(shape).expect("extents are numbers");
        text += &format!(",{}:{{\"dtype\":\"{word}\",\"shape\":{shape},\"data_offsets\":[{start},{end}]}}", json(name));
        start = end;
    }
    text.push('}');
    text.extend(std::iter::repeat_n(' ', text.len().next_multiple_of(LENGTH) - text.len()));
    text
}

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Header, D::Error> {
        deserializer.deserialize_map(HeaderVisitor)
    }
}

struct HeaderVisitor;

impl<'de> Visitor<'de> for HeaderVisitor {
    type Value = Header;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("tensors by name")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Header, A::Error> {
        let mut header = Header::default();
        let mut described = false;
        while let Some(name) = map.next_key::<String>()? {
            if name == METADATA {
                ensure(!described, || de::Error::custom(format!("two entries '{METADATA}'")))?;
                described = true;
                header.metadata = map.next_value()?;
            } else {
                ensure(name.len() <= MAX_NAME, || {
                    let found = name.len();
                    de::Error::custom(format!("expected names of at most {MAX_NAME} bytes, found one of {found}"))
                })?;
                let entry = map.next_value()?;
                ensure(!header.tensors.contains_key(&name), || {
                    de::Error::custom(format!("two tensors are called '{name}'"))
                })?;
                header.tensors.insert(name, entry);
            }
        }
        Ok(header)
    }
}

impl<'de> Deserialize<'de> for Entry {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Entry, D::Error> {
        deserializer.deserialize_map(EntryVisitor)
    }
}

struct EntryVisitor;

impl<'de> Visitor<'de> for EntryVisitor {
    type Value = Entry;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("a tensor's dtype, shape and data_offsets")
    }

    // Derived code would take a list, too.
    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Entry, A::Error> {
        let Info { dtype, shape, data_offsets: [start, end] } =
            Info::deserialize(de::value::MapAccessDeserializer::new(map))?;
        Ok(Entry { kind: dtype.0, shape: Shape::new(shape.0), at: start..end })
    }
}

/// The fields of an entry.
#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct Info {
    dtype: Kind,
    shape: Extents,
    data_offsets: [u64; 2],
}

/// An index of [`TYPES`].
struct Kind(usize);

impl<'de> Deserialize<'de> for Kind {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Kind, D::Error> {
        let name = String::deserialize(deserializer)?;
        let found = TYPES.iter().position(|(known, ..)| *known == name);
        let shown = || name.chars().take(16).collect::<String>();
        found.map(Kind).ok_or_else(|| de::Error::custom(format!("'{}' is none of the format's element types", shown())))
    }
}

impl<'de> Deserialize<'de> for Metadata {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Metadata, D::Error> {
        deserializer.deserialize_map(MetadataVisitor)
    }
}

struct MetadataVisitor;

impl<'de> Visitor<'de> for MetadataVisitor {
    type Value = Metadata;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "at most {MAX_METADATA} texts by name")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Metadata, A::Error> {
        let mut entries = BTreeMap::new();
        while let Some((key, value)) = map.next_entry()? {
            ensure(entries.len() < MAX_METADATA, || de::Error::invalid_length(entries.len() + 1, &self))?;
            entries.insert(key, value);
        }
        Ok(Metadata(entries))
    }
}

/// The extents of a shape, of which a file cannot have any number.
struct Extents(Vec<usize>);

impl<'de> Deserialize<'de> for Extents {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Extents, D::Error> {
        deserializer.deserialize_seq(ExtentsVisitor)
    }
}

struct ExtentsVisitor;

impl<'de> Visitor<'de> for ExtentsVisitor {
    type Value = Extents;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "at most {MAX_AXES} extents")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Extents, A::Error> {
        let mut extents = Vec::new();
        while let Some(extent) = seq.next_element()? {
            ensure(extents.len() < MAX_AXES, || de::Error::invalid_length(extents.len() + 1, &self))?;
            extents.push(extent);
        }
        Ok(Extents(extents))
    }
}
