//! Checkpoints: files with all states of a training, the step that comes next, and what the training must be to go on from there.
//!
//! A file is complete or not there, also if the process is killed or the disk is full. The last [`KEPT`] files of a folder stay, and the one
//! with the least validation loss.

use crate::error::{Error, Result, ensure};
use crate::graph::Graph;
use crate::hash::Fast;
use crate::safetensors::SafeTensors;
use crate::session::Session;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::fs;
use std::hash::Hasher;
use std::path::{Path, PathBuf};

/// The last checkpoints of a folder that stay.
pub const KEPT: usize = 2;
/// The key of a file's metadata.
const KEY: &str = "training";
/// The key of the checksum, of the place and all states.
const CHECKSUM: &str = "checksum";
const EXTENSION: &str = "safetensors";

/// A place in a training.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Place {
    /// Steps that are done.
    pub step: u64,
    /// The least validation loss so far.
    pub best: Option<f64>,
    /// The facts that must be the same for the training to go on: names and values.
    pub method: Value,
}

/// A folder of checkpoints.
#[derive(Debug)]
pub struct Folder {
    path: PathBuf,
}

impl Folder {
    /// Makes the folder if it is not there, and removes what killed processes left of files.
    ///
    /// # Errors
    /// The system's error.
    pub fn open(path: &Path) -> Result<Folder> {
        let folder = Folder { path: path.to_owned() };
        fs::create_dir_all(path).map_err(|e| Error::file(path, "make the folder of checkpoints", e))?;
        for file in folder.files()? {
            let name = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
            if name.starts_with('.') && name.ends_with(".partial") {
                // One that cannot be removed does no harm.
                let _ = fs::remove_file(file);
            }
        }
        Ok(folder)
    }

    fn files(&self) -> Result<Vec<PathBuf>> {
        let fail = |e| Error::file(&self.path, "list the checkpoints", e);
        fs::read_dir(&self.path).map_err(fail)?.map(|entry| Ok(entry.map_err(fail)?.path())).collect()
    }

    /// The checkpoints by their steps, the first step first.
    fn steps(&self) -> Result<Vec<(u64, PathBuf)>> {
        let step = |path: PathBuf| {
            let name = path.file_name()?.to_str()?;
            let number = name.strip_prefix("step-")?.strip_suffix(EXTENSION)?.strip_suffix('.')?;
            Some((number.parse().ok()?, path))
        };
        let mut found: Vec<_> = self.files()?.into_iter().filter_map(step).collect();
        found.sort();
        Ok(found)
    }

    /// True if there is a checkpoint to go on from.
    ///
    /// # Errors
    /// The system's error.
    pub fn is_begun(&self) -> Result<bool> {
        Ok(!self.steps()?.is_empty())
    }

    /// Writes a checkpoint, and removes those before the last ones. Returns its file.
    ///
    /// # Errors
    /// When the file cannot be written: those before it are still there. When the device fails.
    pub fn save(&self, session: &Session, place: &Place) -> Result<PathBuf> {
        let path = self.path.join(format!("step-{:09}.{EXTENSION}", place.step));
        self.write(&path, session, place)?;
        let found = self.steps()?;
        for (_, old) in &found[..found.len().saturating_sub(KEPT)] {
            fs::remove_file(old).map_err(|e| Error::file(old, "remove the old checkpoint", e))?;
        }
        Ok(path)
    }

    /// Writes the checkpoint with the least validation loss so far.
    ///
    /// # Errors
    /// As [`save`](Self::save).
    pub fn save_best(&self, session: &Session, place: &Place) -> Result<()> {
        self.write(&self.path.join(format!("best.{EXTENSION}")), session, place)
    }

    fn write(&self, path: &Path, session: &Session, place: &Place) -> Result<()> {
        let text = serde_json::to_string(place).expect("a place is data");
        session.with(|exec| {
            let sum = checksum(&text, exec.checksum()?);
            exec.save_states(path, &[(KEY, text), (CHECKSUM, sum)])
        })
    }

    /// Gives a training the states of the last checkpoint, and returns its place; `None` if there is none. `now` is the training as it
    /// is asked for.
    ///
    /// # Errors
    /// When the checkpoint is of another training: what differs. When a file is damaged.
    pub fn resume(&self, session: &Session, now: &Place) -> Result<Option<Place>> {
        let Some((_, path)) = self.steps()?.pop() else { return Ok(None) };
        let bad = |what: String| Error::File { path: path.clone(), what, source: None };
        let file = SafeTensors::open(&path)?;
        let text = file.metadata(KEY).ok_or_else(|| bad("it has states, but no place in a training".into()))?;
        let place: Place = serde_json::from_str(text).map_err(|e| bad(format!("its place in the training: {e}")))?;
        let differ = differences(&place.method, &now.method);
        ensure(differ.is_empty(), || {
            bad(format!(
                "it is of another training: {}; resume it with the settings that it began with",
                differ.join("; ")
            ))
        })?;
        session.load_states(&path)?;
        let sum = checksum(text, session.with(|exec| exec.checksum())?);
        ensure(file.metadata(CHECKSUM).is_none_or(|expected| expected == sum), || {
            let advice = "without this file, the training is resumed from the one before it";
            bad(format!("it is damaged: its bytes are not those that were written; {advice}"))
        })?;
        Ok(Some(place))
    }
}

/// The checksum of a place, as it is written, and of states with this checksum.
fn checksum(place: &str, states: u64) -> String {
    let mut hash = Fast::default();
    hash.write(place.as_bytes());
    hash.write_u64(states);
    format!("{:016x}", hash.finish())
}

/// The differences between two objects, name by name.
fn differences(then: &Value, now: &Value) -> Vec<String> {
    let none = serde_json::Map::new();
    let [then, now] = [then, now].map(|value| value.as_object().unwrap_or(&none));
    let mut names: Vec<&String> = then.keys().chain(now.keys()).collect();
    names.sort();
    names.dedup();
    let value = |of: &serde_json::Map<String, Value>, name: &String| of.get(name).cloned().unwrap_or(Value::Null);
    let pairs = names.into_iter().map(|name| (name, value(then, name), value(now, name)));
    let differ = pairs.filter(|(_, then, now)| then != now);
    differ.map(|(name, then, now)| format!("{name}: the checkpoint has {then}, now it is {now}")).collect()
}

/// A number that tells graphs apart: of their nodes, in order, with all that they compute.
///
/// # Errors
/// When the graph has a cycle.
pub fn fingerprint(graph: &Graph) -> Result<String> {
    let mut hash = Fast::default();
    for id in graph.order()? {
        let node = graph.node(id);
        let facts: Vec<_> = node.outputs.iter().map(|output| &output.fact).collect();
        let operands: Vec<_> = graph.operands(id).into_iter().map(|value| value.map(|v| graph.value_name(v))).collect();
        hash.write(format!("{} {} {operands:?} {facts:?} {:?}", node.name, node.op_name(), node.attrs).as_bytes());
    }
    Ok(format!("{:016x}", hash.finish()))
}
