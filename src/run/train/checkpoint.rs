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
use std::collections::BTreeMap;
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
        if session.rank() > 0 {
            return Ok(path);
        }
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
    /// is asked for. `names` says what settings are called in an error: a setting, as in [`Place::method`], and its name.
    ///
    /// # Errors
    /// When the checkpoint is of another training: what differs. When a file is damaged.
    pub fn resume(&self, session: &Session, now: &Place, names: &[(&str, &str)]) -> Result<Option<Place>> {
        let Some((_, path)) = self.steps()?.pop() else { return Ok(None) };
        let bad = |what: String| Error::File { path: path.clone(), what, source: None };
        let file = SafeTensors::open(&path)?;
        let text = file.metadata(KEY).ok_or_else(|| bad("it has states, but no place in a training".into()))?;
        let place: Place = serde_json::from_str(text).map_err(|e| bad(format!("its place in the training: {e}")))?;
        let differ = differences(&place.method, &now.method, names);
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

/// The differences between two trainings, setting by setting: `learning rate was 0.01, is 0.02`, if `names` calls `rate.most` so.
fn differences(then: &Value, now: &Value, names: &[(&str, &str)]) -> Vec<String> {
    let [then, now] = [then, now].map(settings);
    let mut all: Vec<&String> = then.keys().chain(now.keys()).collect();
    all.sort();
    all.dedup();
    let mut found = Vec::new();
    for name in all {
        let [before, after] = [&then, &now].map(|settings| settings.get(name).unwrap_or(&Value::Null));
        // What another optimizer or schedule has goes with it.
        let is_of = |part: &str, of: &str| name.starts_with(part) && then.get(of) != now.get(of);
        let is_told = is_of("optimizer.", "optimizer") || is_of("rate.steps", "rate.schedule");
        if before == after || is_told {
            continue;
        }
        let [was, is] = [before, after].map(words);
        found.push(match &name[..] {
            // Another batch is another graph of the same model.
            "graph" if ["batch", "accumulate"].iter().any(|&setting| then.get(setting) != now.get(setting)) => continue,
            "graph" => "the model is another one, or is read with other shapes".to_owned(),
            "shuffled by seed" if before.is_null() => "the rows were in their order, are shuffled".to_owned(),
            "shuffled by seed" if after.is_null() => "the rows were shuffled, are in their order".to_owned(),
            "shuffled by seed" if then.get("seed") != now.get("seed") => continue,
            _ => {
                let told = names.iter().find(|(setting, _)| setting == name).map_or(&name[..], |(_, told)| told);
                format!("{told} was {was}, is {is}")
            }
        });
    }
    found
}

/// The settings of a training by name, those within others as `rate.most`.
fn settings(method: &Value) -> BTreeMap<String, Value> {
    let mut found = BTreeMap::new();
    for (name, value) in method.as_object().into_iter().flatten() {
        let Some(inner) = value.as_object() else {
            found.insert(name.clone(), value.clone());
            continue;
        };
        for (part, value) in inner {
            match value.as_object() {
                // A choice with fields of its own.
                Some(fields) => {
                    let choice = if fields.get("decoupled") == Some(&Value::Bool(true)) { "AdamW" } else { part };
                    found.insert(name.clone(), choice.into());
                    let fields = fields.iter().filter(|(field, _)| *field != "decoupled");
                    found.extend(fields.map(|(field, value)| (format!("{name}.{field}"), value.clone())));
                }
                None => _ = found.insert(format!("{name}.{part}"), value.clone()),
            }
        }
    }
    found
}

/// A setting's value as a flag has it.
fn words(value: &Value) -> String {
    match value {
        Value::Null => "not given".to_owned(),
        Value::Array(all) if all.is_empty() => "not given".to_owned(),
        Value::Array(all) => all.iter().map(words).collect::<Vec<_>>().join(" "),
        Value::String(text) => match &text[..] {
            "CrossEntropy" => "cross_entropy".to_owned(),
            "BceLogits" => "bce_logits".to_owned(),
            // Names of weights stay as they are.
            "Mse" | "L1" | "Huber" | "Sgd" | "Adam" | "AdamW" | "Constant" | "Cosine" | "Linear" | "Step" => {
                text.to_lowercase()
            }
            _ => text.clone(),
        },
        other => other.to_string(),
    }
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
