//! Options as an object of JSON, as programs in other languages give them. Its fields have the names of the command's flags.

use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::figures::{listed, size};
use crate::mesh::Mesh;
use crate::pass::offload::Offload;
use crate::plan::{Kept, Prefer, Recipe, Rule};
use crate::session::{Choice, Options};
use crate::shape::Extent;
use crate::train::{Loss, Optimizer, Rate, Schedule, Training};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// Bytes, as a number or as a text with a unit.
#[derive(Deserialize)]
#[serde(untagged, expecting = "expected a number of bytes, or a text such as '6GiB'")]
enum Bytes {
    Count(u64),
    Text(String),
}

/// An extent: a number, a range as a text such as `1..64`, or its two ends.
#[derive(Deserialize)]
#[serde(untagged, expecting = "expected a whole number, a range such as '1..64', or its two ends")]
enum Size {
    One(usize),
    Ends([usize; 2]),
    Text(String),
}

/// Names, or one of them.
#[derive(Deserialize)]
#[serde(untagged, expecting = "expected a name, or a list of names")]
enum Names {
    One(String),
    All(Vec<String>),
}

impl Default for Names {
    fn default() -> Names {
        Names::All(Vec::new())
    }
}

impl Names {
    fn all(self) -> Vec<String> {
        match self {
            Names::One(name) => vec![name],
            Names::All(names) => names,
        }
    }
}

/// The fields of [`Options`].
#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
struct Fields {
    device: Option<String>,
    batch: Option<Size>,
    dims: BTreeMap<String, Size>,
    ties: BTreeMap<String, String>,
    memory_limit: Option<Bytes>,
    threads: Option<usize>,
    forks: Option<u32>,
    state: BTreeMap<String, String>,
    output: Names,
    given: Names,
    weights: Option<PathBuf>,
    training: bool,
    f16: bool,
    no_fuse: bool,
    quantize: Option<String>,
    cache: Option<String>,
    chunks: Option<usize>,
    prefer: Option<Prefer>,
    offload: Option<Offload>,
    no_libraries: bool,
    allow_tf32: bool,
    no_tuned: bool,
    mesh: Option<String>,
    shard: Names,
    shard_states: Option<usize>,
}

/// The fields of a [`Training`].
#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
struct Method {
    loss: String,
    optimizer: Option<String>,
    lr: Option<f64>,
    momentum: Option<f64>,
    nesterov: Option<bool>,
    beta1: Option<f64>,
    beta2: Option<f64>,
    eps: Option<f64>,
    label_smoothing: f64,
    weight_decay: f64,
    decay_dims: usize,
    schedule: Option<String>,
    warmup: u64,
    accumulate: Option<usize>,
    clip_norm: Option<f64>,
    ema: Option<f64>,
    precision: Option<String>,
    freeze: Names,
    train_only: Names,
    class_axis: Option<usize>,
    seed: u64,
}

/// An option that is not as expected.
fn wrong(name: &str, what: &str) -> Error {
    Error::usage(format!("option {name}: {what}"))
}

/// One of some names.
fn one_of<T: Copy>(name: &str, found: &str, known: &[(&str, T)]) -> Result<T> {
    let expected = || listed(known.iter().map(|(name, _)| (*name).to_owned()));
    let found_it = known.iter().find(|(known, _)| *known == found).map(|(_, value)| *value);
    found_it.ok_or_else(|| wrong(name, &format!("expected one of {}, found '{found}'", expected())))
}

/// Reads an object; an empty text is one without fields.
fn read<T: DeserializeOwned>(text: &str) -> Result<T> {
    let text = if text.trim().is_empty() { "{}" } else { text };
    // The place in a text that no user wrote is no help.
    let told =
        |error: serde_json::Error| error.to_string().split(" at line ").next().unwrap_or_default().replace('`', "'");
    let fields: Map<String, Value> =
        serde_json::from_str(text).map_err(|error| Error::usage(format!("options: {}", told(error))))?;
    serde_json::from_value(fields.clone().into()).map_err(|error| {
        // The message has no name of the field: each is read alone.
        let alone = |(name, value): (&String, &Value)| T::deserialize(json!({ name: value })).is_err();
        let wrong = fields.iter().find(|(name, value)| alone((name, value))).map(|(name, _)| name.clone());
        match wrong {
            Some(name) if !error.to_string().starts_with("unknown field") => {
                Error::usage(format!("option {name}: {}, found {}", told(error), fields[&name]))
            }
            _ => Error::usage(format!("options: {}", told(error))),
        }
    })
}

impl Size {
    fn extent(self, name: &str) -> Result<Extent> {
        let fail =
            |found: &str| wrong(name, &format!("expected a whole number, or a range such as 1..64, found '{found}'"));
        match self {
            Size::One(extent) => Ok(extent.into()),
            Size::Ends([least, most]) if least <= most => Ok((least..=most).into()),
            Size::Ends([least, most]) => Err(fail(&format!("{least}..{most}"))),
            Size::Text(text) => {
                let (least, most) = text.split_once("..").unwrap_or((&text, &text));
                match (least.trim().parse::<usize>(), most.trim_start_matches('=').trim().parse::<usize>()) {
                    (Ok(least), Ok(most)) if least <= most => Ok((least..=most).into()),
                    _ => Err(fail(&text)),
                }
            }
        }
    }
}

/// A device by its name: `auto`, `cpu`, `cuda`, `cuda:1`, `wgpu`, or `wgpu:` with a part of an adapter's name behind it.
fn device(text: &str) -> Result<(Choice, Option<String>)> {
    let (name, number) = text.split_once(':').map_or((text, None), |(name, number)| (name, Some(number.to_owned())));
    let known = [("auto", Choice::Auto), ("cpu", Choice::Cpu), ("cuda", Choice::Cuda), ("wgpu", Choice::Wgpu)];
    Ok((one_of("device", name, &known)?, number))
}

/// Reads options from an object of JSON; an empty text is one without fields.
///
/// # Errors
/// A field that is unknown, or has a value of another kind than expected.
pub fn options(text: &str) -> Result<Options> {
    let fields: Fields = read(text)?;
    let (backend, device) = fields.device.as_deref().map_or(Ok((Choice::Auto, None)), device)?;
    let memory_limit = match fields.memory_limit {
        None => None,
        Some(Bytes::Count(bytes)) => Some(bytes),
        Some(Bytes::Text(text)) => Some(size(&text).map_err(|what| wrong("memory_limit", &what))?),
    };
    if memory_limit == Some(0) {
        return Err(wrong("memory_limit", "expected a size above 0, such as 512MiB, found 0"));
    }
    let batch = fields.batch.map(|extent| extent.extent("batch")).transpose()?;
    if batch.is_some_and(|batch| batch.least() == 0) {
        return Err(wrong("batch", "expected at least 1, found 0"));
    }
    let named = |(name, extent): (String, Size)| Ok((name.clone(), extent.extent(&format!("dims['{name}']"))?));
    let quantize = fields.quantize.map(|text| text.parse().map_err(|what: String| wrong("quantize", &what)));
    let level = fields.shard_states.unwrap_or(0);
    let levels = || wrong("shard_states", &format!("expected 0 to 3, found {level}"));
    let forks = fields.forks.unwrap_or(1);
    let chunks = fields.chunks.unwrap_or(1);
    if forks == 0 || chunks == 0 {
        return Err(wrong(if forks == 0 { "forks" } else { "chunks" }, "expected at least 1, found 0"));
    }
    let int8_caches = fields.cache.map_or(Ok(false), |text| one_of("cache", &text, &[("int8", true)]))?;
    let shards = fields.shard.all().into_iter().map(|text| Rule::parse(&text).map_err(|what| wrong("shard", &what)));
    Ok(Options {
        backend,
        device,
        libraries: !fields.no_libraries,
        allow_tf32: fields.allow_tf32,
        state: fields.state.into_iter().collect(),
        training: fields.training,
        outputs: fields.output.all(),
        values: Vec::new(),
        given: fields.given.all(),
        weights: fields.weights,
        ties: fields.ties.into_iter().collect(),
        batch,
        dims: fields.dims.into_iter().map(named).collect::<Result<_>>()?,
        threads: fields.threads.unwrap_or(0),
        recipe: Recipe {
            f16: fields.f16,
            fuse: !fields.no_fuse,
            chunks,
            quantize: quantize.transpose()?,
            int8_caches,
            prefer: fields.prefer.unwrap_or_default(),
            offload: fields.offload.unwrap_or_default(),
        },
        memory_limit,
        forks,
        tuned: !fields.no_tuned,
        mesh: fields.mesh.map(|text| Mesh::parse(&text)).transpose()?,
        shards: shards.collect::<Result<_>>()?,
        shard_states: *Kept::LEVELS.get(level).ok_or_else(levels)?,
        ranks: None,
    })
}

/// Reads how a model is trained, for so many steps.
///
/// # Errors
/// As [`options`]; a constant of another optimizer.
pub fn training(text: &str, steps: u64) -> Result<Training> {
    let method: Method = read(text)?;
    let Method { momentum, nesterov, beta1, beta2, eps, .. } = method;
    let loss = one_of(
        "loss",
        &method.loss,
        &[
            ("cross_entropy", Loss::CrossEntropy),
            ("mse", Loss::Mse),
            ("bce_logits", Loss::BceLogits),
            ("l1", Loss::L1),
            ("huber", Loss::Huber),
        ],
    )?;
    let optimizer = method.optimizer.as_deref().unwrap_or("adam");
    let is_sgd = one_of("optimizer", optimizer, &[("sgd", true), ("adam", false), ("adamw", false)])?;
    let of_sgd = [("momentum", momentum.is_some()), ("nesterov", nesterov.is_some())];
    let of_adam = [("beta1", beta1.is_some()), ("beta2", beta2.is_some()), ("eps", eps.is_some())];
    let (others, named) = if is_sgd { (&of_adam[..], "adam or adamw") } else { (&of_sgd[..], "sgd") };
    if let Some((name, _)) = others.iter().find(|(_, is_given)| *is_given) {
        return Err(wrong(name, &format!("expected the optimizer {named}, found {optimizer}")));
    }
    let optimizer = match is_sgd {
        true => Optimizer::Sgd { momentum: momentum.unwrap_or(0.0), nesterov: nesterov.unwrap_or(false) },
        false => Optimizer::adam(beta1, beta2, eps, optimizer == "adamw"),
    };
    let schedule = one_of(
        "schedule",
        method.schedule.as_deref().unwrap_or("constant"),
        &[
            ("constant", Schedule::Constant),
            ("cosine", Schedule::Cosine),
            ("linear", Schedule::Linear),
            ("step", Schedule::Step),
        ],
    )?;
    let precision = one_of(
        "precision",
        method.precision.as_deref().unwrap_or("f32"),
        &[("f32", DType::F32), ("bf16", DType::BF16), ("f16", DType::F16)],
    )?;
    if method.accumulate == Some(0) {
        return Err(wrong("accumulate", "expected at least 1, found 0"));
    }
    let rate = Rate { most: method.lr.unwrap_or(1e-3), schedule, warmup: method.warmup, steps };
    Ok(Training {
        smoothing: method.label_smoothing,
        decay: method.weight_decay,
        decay_dims: method.decay_dims,
        clip: method.clip_norm,
        accumulate: method.accumulate.unwrap_or(1),
        ema: method.ema,
        freeze: method.freeze.all(),
        only: method.train_only.all(),
        class_axis: method.class_axis,
        seed: method.seed,
        precision,
        ..Training::new(loss, optimizer, rate)
    })
}
