//! Reads and writes NumPy's array files: a header with a Python dictionary that describes the array, then its elements.
//!
//! Format: <https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html>.

use crate::dtype::DType;
use crate::error::{Error, Result, ensure};
use crate::file;
use crate::shape::Shape;
use crate::tensor::Tensor;
use bytes::Bytes;
use half::bf16;
use std::io::{self, BufReader, ErrorKind, Read, Write};
use std::path::Path;

const MAGIC: &[u8; 6] = b"\x93NUMPY";

/// NumPy's names of element types.
const TYPES: [(&str, DType); 12] = [
    ("<f4", DType::F32),
    ("<f2", DType::F16),
    ("<f8", DType::F64),
    ("<i8", DType::I64),
    ("<i4", DType::I32),
    ("<i2", DType::I16),
    ("|i1", DType::I8),
    ("<u8", DType::U64),
    ("<u4", DType::U32),
    ("<u2", DType::U16),
    ("|u1", DType::U8),
    ("|b1", DType::Bool),
];

/// The header ends at a multiple of this, so that the elements are aligned in a mapped file.
const ALIGNMENT: usize = 64;

/// Maps an `.npy` file in C order: its elements' type and shape, and the elements. They take no memory of the process.
///
/// # Errors
/// As [`read`], and when the array is in Fortran order.
pub fn map(path: &Path) -> Result<(DType, Shape, Bytes)> {
    let fail = |e| Error::file(path, "read the array", e);
    parts(&file::map_whole(path).map_err(fail)?).map_err(fail)
}

/// The parts of an array file in C order: its elements' type and shape, and the elements, which are not copied.
///
/// # Errors
/// As [`map`], without a file's name.
pub fn parts(whole: &Bytes) -> io::Result<(DType, Shape, Bytes)> {
    let mut rest = &whole[..];
    let Header { descr, fortran, shape } = Header::read(&mut rest)?;
    let dtype = TYPES.iter().find(|(name, _)| *name == descr).map(|(_, dtype)| *dtype);
    let dtype = dtype.ok_or_else(|| unsupported(&descr))?;
    ensure(!fortran, || {
        invalid(
            "expected the rows one after another (C order), found Fortran order; write numpy.ascontiguousarray of it",
        )
    })?;
    let (shape, length) = (Shape::new(shape), rest.len());
    let size = shape.checked_len().and_then(|n| n.checked_mul(dtype.size()));
    ensure(size == Some(length), || invalid(format!("the header says {dtype}{shape}, but {length} bytes follow it")))?;
    Ok((dtype, shape, whole.slice(whole.len() - length..)))
}

/// Reads an `.npy` file, in C or Fortran order.
///
/// # Errors
/// The file cannot be read, is too short, or has elements of a type that no [`DType`] stands for.
pub fn read(path: &Path) -> Result<Tensor> {
    let fail = |e| Error::file(path, "read the array", e);
    let file = file::open(path).map_err(|e| Error::file(path, "open", e))?;
    let length = file.metadata().map_err(fail)?.len();
    read_from(&mut BufReader::new(file), length).map_err(fail)
}

/// Reads an array file of `length` bytes, in C or Fortran order.
///
/// # Errors
/// As [`read`], without a file's name.
pub fn read_from(file: &mut impl Read, length: u64) -> io::Result<Tensor> {
    let Header { descr, fortran, shape } = Header::read(file)?;
    let Some(&(_, dtype)) = TYPES.iter().find(|(name, _)| *name == descr) else {
        return Err(unsupported(&descr));
    };
    let mut shape = Shape::new(shape);
    let size = shape.checked_len().and_then(|n| n.checked_mul(dtype.size())).filter(|&n| n as u64 <= length);
    let Some(size) = size else {
        return Err(invalid(format!("the header says {dtype}{shape}, but the file has only {length} bytes")));
    };
    let mut bytes = vec![0; size];
    file.read_exact(&mut bytes)?;
    if file.read(&mut [0])? > 0 {
        return Err(invalid(format!(
            "the header says {dtype}{shape}, but the file has more bytes: expected one array"
        )));
    }
    if let (DType::Bool, Some(byte)) = (dtype, bytes.iter().find(|&&byte| byte > 1)) {
        return Err(invalid(format!("expected 0 or 1 for a bool, found {byte}")));
    }
    let made = |shape, bytes| Tensor::new(dtype, shape, bytes).map_err(|e| invalid(e.to_string()));
    if !fortran {
        return made(shape, bytes);
    }
    shape.reverse();
    Ok(made(shape, bytes)?.transposed())
}

/// Writes an `.npy` file. A reader never sees a part of it. `bf16` and floats of at most 8 bits are written as `f4`, integers of less than 8 bits
/// as `i1` and `u1`.
///
/// # Errors
/// The file cannot be written.
pub fn write(path: &Path, tensor: &Tensor) -> Result<()> {
    file::write_whole(path, "write the array", |file| write_to(file, tensor))
}

/// Writes an array file as [`write()`] does.
///
/// # Errors
/// Those of `file`.
pub fn write_to(file: &mut dyn Write, tensor: &Tensor) -> io::Result<()> {
    let stored = match tensor.dtype() {
        DType::BF16 => DType::F32,
        narrow if narrow.is_narrow_float() => DType::F32,
        other => other.held(),
    };
    let (descr, _) = TYPES.iter().find(|(_, dtype)| *dtype == stored).expect("every other type has a name");
    let header = Header { descr: (*descr).into(), fortran: false, shape: tensor.shape().to_vec() };
    file.write_all(&header.to_bytes())?;
    match tensor.dtype() {
        DType::BF16 => tensor.bytes().chunks_exact(2).try_for_each(|element| {
            let value: bf16 = bytemuck::pod_read_unaligned(element);
            file.write_all(&value.to_f32().to_le_bytes())
        }),
        narrow if narrow.is_narrow_float() => {
            tensor.to_f64().into_iter().try_for_each(|value| file.write_all(&(value as f32).to_le_bytes()))
        }
        DType::Bool => tensor.bytes().iter().try_for_each(|&byte| file.write_all(&[u8::from(byte != 0)])),
        _ => file.write_all(tensor.bytes()),
    }
}

pub(crate) fn invalid(what: impl Into<String>) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, what.into())
}

fn unsupported(descr: &str) -> io::Error {
    let names = TYPES.map(|(name, _)| name).join(", ");
    let raw = if descr.ends_with("V1") { "; save floats of 8 bits as float32, integers of 4 bits as int8" } else { "" };
    invalid(format!("elements of type {descr} are not supported: expected one of {names}; convert them by astype{raw}"))
}

/// The description of an array, which comes before its elements.
#[derive(Debug, PartialEq)]
struct Header {
    /// The type of the elements, such as `<f4`.
    descr: String,
    /// True if the first axis moves fastest.
    fortran: bool,
    shape: Vec<usize>,
}

impl Header {
    fn read(file: &mut impl Read) -> io::Result<Header> {
        let mut start = [0; MAGIC.len() + 2];
        file.read_exact(&mut start).map_err(|e| match e.kind() {
            ErrorKind::UnexpectedEof => invalid("not a NumPy array file: it ends too early"),
            _ => e,
        })?;
        let (magic, version) = start.split_at(MAGIC.len());
        ensure(magic == MAGIC, || invalid("not a NumPy array file"))?;
        let length = match version[0] {
            1 => {
                let mut length = [0; 2];
                file.read_exact(&mut length)?;
                u64::from(u16::from_le_bytes(length))
            }
            2 | 3 => {
                let mut length = [0; 4];
                file.read_exact(&mut length)?;
                u64::from(u32::from_le_bytes(length))
            }
            other => return Err(invalid(format!("expected version 1, 2 or 3 of the format, found {other}"))),
        };
        // The buffer grows as bytes are read, so a wrong length in the file takes no memory.
        let mut text = Vec::new();
        if file.take(length).read_to_end(&mut text)? as u64 != length {
            return Err(ErrorKind::UnexpectedEof.into());
        }
        let text = std::str::from_utf8(&text).map_err(|e| invalid(format!("the header is no text: {e}")))?;
        Header::parse(text).map_err(|what| invalid(format!("the header: {what}")))
    }

    fn parse(text: &str) -> Result<Header, String> {
        let mut literal = Literal(text);
        let (mut descr, mut fortran, mut shape) = (None, None, None);
        literal.expect('{')?;
        while !literal.take('}') {
            let key = literal.string()?;
            literal.expect(':')?;
            match key {
                "descr" if literal.take('[') => return Err("elements of several fields are not supported".into()),
                "descr" => descr = Some(literal.string()?.to_owned()),
                "fortran_order" => fortran = Some(literal.bool()?),
                "shape" => shape = Some(literal.tuple()?),
                other => return Err(format!("unknown key '{other}'")),
            }
            if !literal.take(',') {
                literal.expect('}')?;
                break;
            }
        }
        literal.end()?;
        let missing = |key: &str| format!("the key '{key}' is missing");
        Ok(Header {
            descr: descr.ok_or_else(|| missing("descr"))?,
            fortran: fortran.ok_or_else(|| missing("fortran_order"))?,
            shape: shape.ok_or_else(|| missing("shape"))?,
        })
    }

    fn to_bytes(&self) -> Vec<u8> {
        let Header { descr, fortran, shape } = self;
        let fortran = if *fortran { "True" } else { "False" };
        let extents: String = shape.iter().map(|extent| format!("{extent}, ")).collect();
        // A single extent keeps its comma, which makes it a tuple.
        let extents = if shape.len() > 1 { extents.trim_end_matches(", ") } else { extents.trim_end() };
        let mut text = format!("{{'descr': '{descr}', 'fortran_order': {fortran}, 'shape': ({extents}), }}");
        // Version 2 counts the header with 32 bits; only thousands of axes need it.
        let long = text.len() + 2 * ALIGNMENT > usize::from(u16::MAX);
        let before = MAGIC.len() + 2 + if long { 4 } else { 2 };
        let whole = (before + text.len() + 1).next_multiple_of(ALIGNMENT);
        text.extend(std::iter::repeat_n(' ', whole - before - text.len() - 1));
        text.push('\n');
        let length = (text.len() as u32).to_le_bytes();
        let (version, length) = if long { ([2, 0], &length[..]) } else { ([1, 0], &length[..2]) };
        [&MAGIC[..], &version, length, text.as_bytes()].concat()
    }
}

/// The rest of a Python literal that is being read.
struct Literal<'a>(&'a str);

impl<'a> Literal<'a> {
    /// Skips spaces, and reads this character if it comes next.
    fn take(&mut self, wanted: char) -> bool {
        self.0 = self.0.trim_start();
        let rest = self.0.strip_prefix(wanted);
        self.0 = rest.unwrap_or(self.0);
        rest.is_some()
    }

    fn expect(&mut self, wanted: char) -> Result<(), String> {
        if self.take(wanted) { Ok(()) } else { Err(self.unexpected(&format!("'{wanted}'"))) }
    }

    fn unexpected(&self, expected: &str) -> String {
        match self.0.trim_start().chars().next() {
            Some(found) => format!("expected {expected}, found '{found}'"),
            None => format!("expected {expected}, found its end"),
        }
    }

    /// Reads letters and digits.
    fn word(&mut self) -> &'a str {
        self.0 = self.0.trim_start();
        let end = self.0.find(|c: char| !c.is_ascii_alphanumeric()).unwrap_or(self.0.len());
        let (word, rest) = self.0.split_at(end);
        self.0 = rest;
        word
    }

    fn string(&mut self) -> Result<&'a str, String> {
        let quote = ['\'', '"'].into_iter().find(|&quote| self.take(quote));
        let quote = quote.ok_or_else(|| self.unexpected("a string"))?;
        let (text, rest) = self.0.split_once(quote).ok_or("a string does not end")?;
        self.0 = rest;
        Ok(text)
    }

    fn bool(&mut self) -> Result<bool, String> {
        match self.word() {
            "True" => Ok(true),
            "False" => Ok(false),
            other => Err(format!("expected True or False, found '{other}'")),
        }
    }

    fn tuple(&mut self) -> Result<Vec<usize>, String> {
        let mut extents = Vec::new();
        self.expect('(')?;
        while !self.take(')') {
            let word = self.word();
            // Python 2 marks long integers.
            let digits = word.strip_suffix('L').unwrap_or(word);
            extents.push(digits.parse().map_err(|_| format!("expected an extent, found '{word}'"))?);
            if !self.take(',') {
                self.expect(')')?;
                break;
            }
        }
        Ok(extents)
    }

    fn end(&self) -> Result<(), String> {
        if self.0.trim().is_empty() { Ok(()) } else { Err(self.unexpected("its end")) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_type_survives_a_file() {
        let folder = std::env::temp_dir().join(format!("plimsoll-npy-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a temporary folder");
        for dtype in DType::ALL {
            let path = folder.join(format!("{dtype}.npy"));
            let tensor = Tensor::from_f64(dtype, [2, 3], &[0.0, 1.0, 2.0, -3.0, 4.0, 5.0]);
            write(&path, &tensor).expect("writes");
            let back = read(&path).expect("reads");
            assert_eq!((back.shape(), back.to_f64()), (tensor.shape(), tensor.to_f64()));
            let whole = std::fs::read(&path).expect("is there");
            for cut in [0, 5, 20, whole.len() - 1] {
                std::fs::write(&path, &whole[..cut]).expect("writes");
                assert!(read(&path).is_err(), "{dtype} cut at {cut}");
            }
            std::fs::write(&path, [&whole[..], &[0]].concat()).expect("writes");
            assert!(read(&path).is_err(), "{dtype} with a byte behind it");
        }
        let scalar = folder.join("scalar.npy");
        write(&scalar, &Tensor::from_f64(DType::F32, Shape::default(), &[2.5])).expect("writes");
        assert_eq!(read(&scalar).expect("reads").to_f64(), [2.5]);
        std::fs::remove_dir_all(&folder).expect("is there");
    }

    #[test]
    fn fortran_order_is_understood() {
        let path = std::env::temp_dir().join(format!("plimsoll-fortran-{}.npy", std::process::id()));
        let header = Header { descr: "<f4".into(), fortran: true, shape: vec![2, 3] };
        let elements = [1f32, 4.0, 2.0, 5.0, 3.0, 6.0].map(f32::to_le_bytes).concat();
        std::fs::write(&path, [header.to_bytes(), elements].concat()).expect("a temporary file");
        assert_eq!(read(&path).expect("reads").to_f64(), [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        std::fs::remove_file(&path).expect("is there");
    }

    #[test]
    fn headers_are_those_of_numpy() {
        let header = |shape: &[usize]| Header { descr: "|u1".into(), fortran: false, shape: shape.to_vec() };
        for (shape, text) in [(&[][..], "()"), (&[3], "(3,)"), (&[2, 3], "(2, 3)")] {
            let expected = format!("{{'descr': '|u1', 'fortran_order': False, 'shape': {text}, }}");
            let expected = format!("{expected:117}\n");
            assert_eq!(header(shape).to_bytes(), [b"\x93NUMPY\x01\x00\x76\x00", expected.as_bytes()].concat());
        }
        for rank in [1, 30, 21_000, 22_000, 40_000] {
            let header = header(&vec![1; rank]);
            let bytes = header.to_bytes();
            assert_eq!(bytes.len() % ALIGNMENT, 0);
            assert_eq!(bytes[MAGIC.len()], if rank < 21_800 { 1 } else { 2 });
            assert_eq!(Header::read(&mut &bytes[..]).expect("reads"), header);
        }
    }

    #[test]
    fn headers_of_other_writers_are_read_and_bad_ones_refused() {
        let expected = Header { descr: "<f4".into(), fortran: true, shape: vec![2, 3] };
        for text in [
            "{'descr': '<f4', 'fortran_order': True, 'shape': (2, 3)}",
            "{\"shape\":(2L,3L,),\"fortran_order\":True,\"descr\":\"<f4\"}\n",
            " { 'fortran_order' : True , 'descr' : '<f4' , 'shape' : ( 2 , 3 , ) , } ",
        ] {
            assert_eq!(Header::parse(text).as_ref(), Ok(&expected), "{text}");
        }
        for (text, error) in [
            ("", "expected '{', found its end"),
            ("{'descr': '<f4', 'fortran_order': True}", "the key 'shape' is missing"),
            ("{'descr': [('a', '<f4')]}", "elements of several fields are not supported"),
            ("{'descr': '<f4", "a string does not end"),
            ("{'descr' \"<f4\"}", "expected ':', found '\"'"),
            ("{'order': 'C'}", "unknown key 'order'"),
            ("{'fortran_order': 1}", "expected True or False, found '1'"),
            ("{'shape': (2, -3)}", "expected an extent, found ''"),
            ("{'shape': (99999999999999999999,)}", "expected an extent, found '99999999999999999999'"),
            ("{'shape': 3}", "expected '(', found '3'"),
            ("{'shape': (3 4)}", "expected ')', found '4'"),
            ("{} x", "expected its end, found 'x'"),
        ] {
            assert_eq!(Header::parse(text), Err(error.to_owned()), "{text}");
        }
    }

    #[test]
    fn what_is_no_array_is_refused_by_its_reason() {
        let path = std::env::temp_dir().join(format!("plimsoll-bad-{}.npy", std::process::id()));
        let header = |descr: &str, shape: &[usize]| {
            Header { descr: descr.into(), fortran: false, shape: shape.to_vec() }.to_bytes()
        };
        let huge = [&MAGIC[..], &[2, 0], &u32::MAX.to_le_bytes(), b"{'descr'"].concat();
        for (bytes, reason) in [
            (b"PK\x03\x04, a zip".to_vec(), "not a NumPy array file"),
            ([&MAGIC[..], &[9, 0, 0, 0]].concat(), "found 9"),
            (huge, "end of file"),
            (header("<c8", &[1]), "elements of type <c8 are not supported"),
            (header(">f4", &[1]), "elements of type >f4 are not supported"),
            (header("|u1", &[usize::MAX, 2]), "the file has only"),
            ([header("|b1", &[2]), vec![1, 2]].concat(), "expected 0 or 1 for a bool, found 2"),
        ] {
            std::fs::write(&path, bytes).expect("a temporary file");
            let error = read(&path).expect_err(reason).to_string();
            assert!(error.contains(reason), "{error}");
        }
        std::fs::remove_file(&path).expect("is there");
    }
}
