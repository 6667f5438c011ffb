//! The readers of files, and the files that a search for bad ones starts with. The tests mutate these blindly; the crate beside this file
//! follows the code that each mutant reaches.

use plimsoll::internals::plan::Plan;
use plimsoll::internals::plan::check::check;
use plimsoll::internals::safetensors::SafeTensors;
use plimsoll::internals::session::{Choice, Options, Session};
use plimsoll::internals::target::Target;
use plimsoll::internals::train::checkpoint::{Folder, Place};
use plimsoll::internals::{npy, npz, onnx, place::Table};
use plimsoll::{DType, Graph, Tensor};
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

/// The step that checkpoints are of.
const STEP: &str = "graphs/sgd.onnxtxt";

/// A reader: the name of its files, and what reads one. It returns whether the file was read.
pub struct Reader {
    pub name: &'static str,
    pub file: &'static str,
    pub read: fn(&Path) -> bool,
}

pub const READERS: [Reader; 9] = [
    Reader { name: "protobuf", file: "model.onnx", read: imports },
    Reader { name: "text", file: "model.onnxtxt", read: imports },
    Reader { name: "npy", file: "array.npy", read: |path| npy::read(path).is_ok() | npy::map(path).is_ok() },
    Reader { name: "npz", file: "arrays.npz", read: |path| npz::read(path).is_ok() | npz::map(path).is_ok() },
    Reader { name: "plan", file: "plan.json", read: is_plan },
    Reader { name: "target", file: "target.json", read: |path| Target::named(&path.to_string_lossy()).is_ok() },
    Reader { name: "csv", file: "buffers.csv", read: |path| Table::read(path, 256).is_ok() },
    Reader { name: "safetensors", file: "weights.safetensors", read: has_tensors },
    Reader { name: "checkpoint", file: "step-000000001.safetensors", read: is_resumed },
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

/// The training of all checkpoints.
static TRAINING: LazyLock<(Session, Place)> = LazyLock::new(|| {
    let graph = Graph::training_from_path(root().join(STEP), &[("batch", 2)]).expect("a step");
    let options = Options { threads: 1, ..Options::default() }.on(Choice::Cpu);
    let session = Session::from_graph(graph, &options).expect("it is loaded");
    (session, Place { step: 1, best: None, method: serde_json::json!({ "rate": 0.05 }) })
});

/// A training goes on from the file, which is the last checkpoint of its folder.
fn is_resumed(path: &Path) -> bool {
    let (session, now) = &*TRAINING;
    let folder = Folder::open(path.parent().expect("it is in a folder")).expect("it is there");
    folder.resume(session, now, &[]).is_ok_and(|place| place.is_some())
}

/// The project's folder.
fn root() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let of_tests = here.parent().filter(|parent| parent.ends_with("tests")).and_then(Path::parent);
    of_tests.unwrap_or(here).to_owned()
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
pub fn seeds(reader: &Reader, folder: &Path) -> Vec<Vec<u8>> {
    let root = root();
    let tensor = Tensor::from_f64(DType::F32, [2, 3], &[1.0, -2.0, 0.5, 3.0, 4.0, 5.0]);
    let own = |name: &str| std::fs::read(folder.join(name)).expect("it was written");
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
            npy::write(&folder.join("seed.npy"), &tensor).expect("it is written");
            let array = own("seed.npy");
            if reader.name == "npy" { vec![array] } else { vec![archive("x.npy", &array)] }
        }
        "plan" => files(&root.join("tests/golden"), ".cpu.json"),
        "target" => ["cpu", "wgpu", "cuda"]
            .map(|name| serde_json::to_vec(&Target::named(name).expect("a preset")).expect("it is JSON"))
            .into(),
        "csv" => files(&root.join("graphs"), ".csv"),
        "checkpoint" => {
            let (session, place) = &*TRAINING;
            Folder::open(folder).and_then(|folder| folder.save(session, place)).expect("it is written");
            vec![own(reader.file)]
        }
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
