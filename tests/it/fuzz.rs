//! Every reader of files on files that are almost right: each is read or refused, and none ends in a panic.
//!
//! A seed is a file as the crate writes it, or one of `graphs/`, or one of `tests/corpus/`: what once went wrong is kept there, in a folder
//! per reader. Each mutant is a seed with a few edits. `cargo test --test it fuzz::` tries some; `PLIMSOLL_LONG=1` tries for four minutes.
//! `bash tests/fuzz.sh` searches for longer, and follows the code that each mutant reaches.

use crate::common::{Folder, runs_long};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::time::{Duration, Instant};

#[path = "../fuzz/readers.rs"]
mod readers;
use readers::{READERS, seeds};

/// Mutants of each reader where the search is short.
const FEW: usize = 1500;
/// How long a long search takes, all readers together.
const LONG: Duration = Duration::from_secs(120);

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

#[test]
fn no_file_ends_a_reader_in_a_panic() {
    let long = runs_long("four minutes of mutants of files");
    let folder = Folder::new("fuzz");
    for (number, reader) in READERS.iter().enumerate() {
        let seeds = seeds(reader, &folder.0);
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
