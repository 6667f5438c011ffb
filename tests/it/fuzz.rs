//! Every reader of files on files that are almost right: each is read or refused, and none ends in a panic.
//!
//! A seed is a file as the crate writes it, or one of `graphs/`, or one of `tests/corpus/`: what once went wrong is kept there, in a folder
//! per reader. Each mutant is a seed with a few edits. `cargo test --test it fuzz::` tries some; `PLIMSOLL_LONG=1` tries for ten minutes.

use crate::common::{Folder, runs_long};
use plimsoll::internals::plan::Plan;
use plimsoll::internals::plan::check::check;
use plimsoll::internals::safetensors::SafeTensors;
use plimsoll::internals::target::Target;
use plimsoll::internals::{npy, npz, onnx, place::Table};
use plimsoll::{DType, Tensor};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Mutants of each reader where the search is short.
const FEW: usize = 1500;
/// How long a long search takes, all readers together.
const LONG: Duration = Duration::from_secs(600);

/// A reader: the name of its files, and what reads one. It returns whether the file was read.
struct Reader {
    name: &'static str,
    file: &'static str,
    read: fn(&Path) -> bool,
}

const READERS: [Reader; 8] = [
    Reader { name: "protobuf", file: "model.onnx", read: imports },
    Reader { name: "text", file: "model.onnxtxt", read: imports },
    Reader { name: "npy", file: "array.npy", read: |path| npy::read(path).is_ok() | npy::map(path).is_ok() },
    Reader { name: "npz", file: "arrays.npz", read: |path| npz::read(path).is_ok() | npz::map(path).is_ok() },
    Reader { name: "plan", file: "plan.json", read: is_plan },
    Reader { name: "target", file: "target.json", read: |path| Target::named(&path.to_string_lossy()).is_ok() },
    Reader { name: "csv", file: "buffers.csv", read: |path| Table::read(path, 256).is_ok() },
    Reader { name: "safetensors", file: "weights.safetensors", read: has_tensors },
];

/// A model that is read is imported, too, with open dims and with one that is bound. That may be refused.
fn imports(path: &Path) -> bool {
    let Ok(model) = onnx::load(path) else { return false };
    let dims = ["batch", "n", "past", "sequence"].map(|name| vec![(name.to_owned(), 2)]);
    for dims in dims.iter().chain([&Vec::new()]) {
        drop(onnx::import(&model, dims));
    }
    true
}

/// A plan that is read is checked: its checker refuses what no run may do.
fn is_plan(path: &Path) -> bool {
    let Ok(text) = std::fs::read_to_string(path) else { return false };
    Plan::from_json(&text, path).is_ok_and(|plan| check(&plan).is_ok())
}

fn has_tensors(path: &Path) -> bool {
    let Ok(file) = SafeTensors::open(path) else { return false };
    let names: Vec<String> = file.names().map(str::to_owned).collect();
    names.iter().all(|name| file.tensor(name).is_ok())
}

/// Numbers that are the same for the same start: a search that found something finds it again.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, end: usize) -> usize {
        (self.next() % end.max(1) as u64) as usize
    }
}

/// Words that readers of text take for more than letters, and numbers at the ends of types.
const WORDS: [&str; 20] = [
    "{",
    "}",
    "[",
    "]",
    "\"",
    ",",
    ":",
    "<",
    ">",
    "=",
    "-1",
    "0",
    "9223372036854775807",
    "18446744073709551615",
    "1e999",
    "null",
    "float[",
    "x",
    "2147483648",
    "\u{7f}",
];
/// Bytes that count something in the formats of bits.
const BYTES: [u8; 8] = [0, 1, 0x7f, 0x80, 0xff, 0x0a, 0x12, 0x22];

/// Makes a few edits. Another seed's bytes are taken over at times.
fn mutate(seed: &[u8], other: &[u8], random: &mut Random) -> Vec<u8> {
    let mut bytes = seed.to_vec();
    for _ in 0..1 + random.below(4) {
        let at = random.below(bytes.len());
        let end = (at + 1 + random.below(16)).min(bytes.len());
        match random.below(8) {
            0 if !bytes.is_empty() => bytes[at] ^= 1 << random.below(8),
            1 if !bytes.is_empty() => bytes[at] = BYTES[random.below(BYTES.len())],
            2 => bytes.truncate(at),
            3 if !bytes.is_empty() => drop(bytes.drain(at..end)),
            4 if !bytes.is_empty() => {
                let part = bytes[at..end].to_vec();
                let to = random.below(bytes.len());
                bytes.splice(to..to, part);
            }
            5 => drop(bytes.splice(at..at, WORDS[random.below(WORDS.len())].bytes())),
            6 if !other.is_empty() => {
                let from = random.below(other.len());
                let part = &other[from..(from + 1 + random.below(64)).min(other.len())];
                bytes.splice(at..at, part.iter().copied());
            }
            _ if !bytes.is_empty() => {
                let word = [u64::MAX, 1 << 63, 1 << 32, 1 << 31, 0][random.below(5)].to_le_bytes();
                let room = bytes.len().min(at + 8) - at;
                bytes[at..at + room].copy_from_slice(&word[..room]);
            }
            _ => bytes.push(0),
        }
    }
    bytes
}

/// The files of a folder whose names end so, each small enough to be read often.
fn files(folder: &Path, end: &str) -> Vec<Vec<u8>> {
    const MOST: u64 = 64 << 10;
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    let mut paths: Vec<PathBuf> = entries.filter(|path| path.to_string_lossy().ends_with(end)).collect();
    paths.sort();
    let small = |path: &PathBuf| std::fs::metadata(path).is_ok_and(|found| found.len() <= MOST);
    paths.iter().filter(|path| small(path)).map(|path| std::fs::read(path).expect("it can be read")).collect()
}

/// The files that a reader reads: those of the project, those that the crate writes, and what once went wrong.
fn seeds(reader: &Reader, folder: &Folder) -> Vec<Vec<u8>> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let tensor = Tensor::from_f64(DType::F32, [2, 3], &[1.0, -2.0, 0.5, 3.0, 4.0, 5.0]);
    let own = |name: &str| std::fs::read(folder.0.join(name)).expect("it was written");
    let mut seeds = match reader.name {
        "protobuf" => {
            let texts = files(&root.join("graphs"), ".onnxtxt").into_iter().take(6);
            let encode = |text: Vec<u8>| {
                let text = String::from_utf8(text).expect("a text");
                let proto = onnx::text::parse(&text, Path::new("text")).expect("it parses");
                prost::Message::encode_to_vec(&proto)
            };
            texts.map(encode).collect()
        }
        "text" => files(&root.join("graphs"), ".onnxtxt"),
        "npy" | "npz" => {
            npy::write(&folder.0.join("seed.npy"), &tensor).expect("it is written");
            let array = own("seed.npy");
            if reader.name == "npy" { vec![array] } else { vec![archive("x.npy", &array)] }
        }
        "plan" => files(&root.join("tests/golden"), ".cpu.json"),
        "target" => ["cpu", "wgpu", "cuda"]
            .map(|name| serde_json::to_vec(&Target::named(name).expect("a preset")).expect("it is JSON"))
            .into(),
        "csv" => files(&root.join("graphs"), ".csv"),
        _ => vec![weights(&tensor)],
    };
    seeds.extend(files(&root.join("tests/corpus").join(reader.name), ""));
    seeds
}

/// A file of one tensor: the length of the header, the header, the elements.
fn weights(tensor: &Tensor) -> Vec<u8> {
    let header = br#"{"__metadata__":{"of":"a test"},"x":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}}"#;
    [&(header.len() as u64).to_le_bytes()[..], header, tensor.bytes()].concat()
}

/// An archive of one file, which is not compressed.
fn archive(name: &str, content: &[u8]) -> Vec<u8> {
    let crc = content.iter().fold(!0u32, |crc, &byte| {
        (0..8).fold(crc ^ u32::from(byte), |crc, _| (crc >> 1) ^ (0xedb8_8320 & 0u32.wrapping_sub(crc & 1)))
    });
    let size = (content.len() as u32).to_le_bytes();
    let common =
        [&[20, 0, 0, 0, 0, 0, 0, 0, 0, 0][..], &(!crc).to_le_bytes(), &size, &size, &[name.len() as u8, 0, 0, 0]];
    let common = common.concat();
    let local = [b"PK\x03\x04", &common[..], name.as_bytes(), content].concat();
    let central = [b"PK\x01\x02\x14\x00", &common[..], &[0; 14], name.as_bytes()].concat();
    let end = [(central.len() as u32).to_le_bytes(), (local.len() as u32).to_le_bytes()].concat();
    [&local[..], &central, b"PK\x05\x06\0\0\0\0\x01\0\x01\0", &end, &[0, 0]].concat()
}

#[test]
fn no_file_ends_a_reader_in_a_panic() {
    let long = runs_long("ten minutes of mutants of files");
    let folder = Folder::new("fuzz");
    for (number, reader) in READERS.iter().enumerate() {
        let seeds = seeds(reader, &folder);
        let path = folder.0.join(reader.file);
        let mut random = Random(0x9e37_79b9_7f4a_7c15 + number as u64);
        let (start, mut tried, mut read) = (Instant::now(), 0, 0);
        let attempt = |bytes: &[u8]| {
            std::fs::write(&path, bytes).expect("it is written");
            match catch_unwind(AssertUnwindSafe(|| (reader.read)(&path))) {
                Ok(is_read) => is_read,
                Err(_) => {
                    let kept = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("panics-{}", reader.file));
                    std::fs::write(&kept, bytes).expect("it is written");
                    panic!(
                        "the reader of {} panics on {}; move the file to tests/corpus/{0}",
                        reader.name,
                        kept.display()
                    );
                }
            }
        };
        let sound = seeds.iter().filter(|seed| attempt(seed)).count();
        assert!(sound > 0, "{}: no seed is read", reader.name);
        loop {
            let (seed, other) = (random.below(seeds.len()), random.below(seeds.len()));
            read += usize::from(attempt(&mutate(&seeds[seed], &seeds[other], &mut random)));
            tried += 1;
            // A long search is a time that its user asks for.
            if tried >= FEW && (!long || start.elapsed() > LONG / READERS.len() as u32) {
                break;
            }
        }
        eprintln!("{}: {} seeds, {tried} mutants, {read} of them read", reader.name, seeds.len());
        assert!(read < tried, "{}: no mutant is refused", reader.name);
    }
}
