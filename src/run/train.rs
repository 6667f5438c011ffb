//! Training steps: a model's graph becomes a graph whose states are its weights, and which updates them in each run.
//!
//! ```text
//! model -> norm (statistics of the batch), dropout -> loss -> autodiff -> clip -> optimizer -> updates of states
//! ```
//!
//! [`programs`] builds the graphs. What is planned, and runs, are graphs with states as any other: planner, backends and executor know
//! nothing of training.
//!
//! With accumulation an update has several parts, which are programs over the same states: `first` writes the sums of the gradients, `next`
//! adds to them, `last` adds to them and updates. There is no run that sets sums to zero.

pub mod checkpoint;
pub mod classes;
pub mod curve;
pub mod data;
mod dropout;
pub mod init;
mod kept;
mod loss;
pub mod losses;
mod norm;
mod optimizer;
mod precision;
pub mod prefetch;
mod rate;
pub mod run;
mod scaling;

pub use loss::Loss;
pub use optimizer::Optimizer;
pub use rate::{Rate, Schedule};

use crate::autodiff;
use crate::dtype::DType;
use crate::error::{Error, Result, ensure};
use crate::figures::listed;
use crate::graph::{Decomposer, Graph, Kind};
use crate::onnx::{self, Model};
use crate::op::{Fact, Nodes, OpResult, ValueId, Var, build};
use crate::pass::shard;
use crate::shape::Shape;
use crate::target::Target;
use serde::Serialize;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

/// Why a weight that is frozen is not trained.
pub const FROZEN: &str = "it is frozen";

/// The name of the input that holds the right answers.
pub const LABELS: &str = "labels";

/// The least bytes of the rows of a micro-batch for which a thread of the CPU fills in the next ones while one is computed. A hand-over to
/// that thread and back takes 18 microseconds, and on two cores it takes one from a kernel: the step of a linear model takes 26 instead of 7
/// microseconds with 1 KiB of rows, a fifth more with 128 KiB, and as long with 256 KiB. Above that, rows that are read from a disk count.
const PREFETCHED: u64 = 256 << 10;

/// How a model is trained.
#[derive(Clone, Debug, Serialize)]
pub struct Training {
    /// The loss, which training makes small. It is the mean over the batch of an update.
    pub loss: Loss,
    /// The share of the label that all classes have together (label smoothing).
    pub smoothing: f64,
    /// How a gradient changes a weight.
    pub optimizer: Optimizer,
    /// The learning rate at each step.
    pub rate: Rate,
    /// The weights' decay: AdamW takes it from the weights, others add it to the gradients.
    pub decay: f64,
    /// Weights of fewer axes do not decay.
    pub decay_dims: usize,
    /// The largest norm of all gradients together.
    pub clip: Option<f64>,
    /// Parts of an update's batch, which run one after another.
    pub accumulate: usize,
    /// The decay of the weights' moving averages.
    pub ema: Option<f64>,
    /// Parts of a batch that are normalized each by statistics of its own, where a norm is of the batch: 1 for the whole batch.
    #[serde(skip_serializing_if = "is_one")]
    pub norm_groups: usize,
    /// Weights that stay as they are: names, in which `*` stands for any text. A batch normalization whose scale and bias stay, or one of
    /// whose running statistics is named, normalizes by its stored statistics and leaves them as they are.
    pub freeze: Vec<String>,
    /// The weights that are trained: names as of `freeze`. Empty for all.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub only: Vec<String>,
    /// The axis of the classes, where several may be it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub class_axis: Option<usize>,
    /// The shape of the labels, rows first, if they are known. It tells the axis of the classes.
    #[serde(skip)]
    pub labels: Option<Shape>,
    /// The seed of the elements that a Dropout drops.
    pub seed: u64,
    /// The type of the values between: `f32`, or one of 16 bits.
    pub precision: DType,
    /// The type in which what is computed in `f32` is kept for the backward computation. It follows from the device: see [`on`](Self::on).
    #[serde(skip_serializing_if = "is_f32")]
    pub kept: DType,
}

fn is_one(number: &usize) -> bool {
    *number == 1
}

fn is_f32(dtype: &DType) -> bool {
    *dtype == DType::F32
}

impl Training {
    /// A method of a loss, an optimizer and a learning rate, with nothing around them.
    pub fn new(loss: Loss, optimizer: Optimizer, rate: Rate) -> Training {
        Training {
            loss,
            smoothing: 0.0,
            optimizer,
            rate,
            decay: 0.0,
            decay_dims: 0,
            clip: None,
            accumulate: 1,
            ema: None,
            norm_groups: 1,
            freeze: Vec::new(),
            only: Vec::new(),
            class_axis: None,
            labels: None,
            seed: 0,
            precision: DType::F32,
            kept: DType::F32,
        }
    }

    /// Refuses numbers that no training can have, and those that this loss or optimizer would not use.
    fn check(&self) -> Result<()> {
        let Training { loss, smoothing, rate, decay, clip, ema, .. } = self;
        let refuse = |name: &str, expected: &str, found: f64| {
            Err(Error::usage(format!("{name}: expected {expected}, found {found}")))
        };
        // Steps compute in `f32`.
        let counts = |name: &str, number: f64| match (number as f32).is_finite() && number >= 0.0 {
            true => Ok(()),
            false => refuse(name, "a number of at least 0 that is finite in f32", number),
        };
        let share = |name: &str, number: f64| match (0.0..1.0).contains(&number) {
            true => Ok(()),
            false => refuse(name, "a number of at least 0 and below 1", number),
        };
        counts("learning rate", rate.most)?;
        counts("weight decay", *decay)?;
        if !(0.0..=1.0).contains(smoothing) {
            return refuse("label smoothing", "a number from 0 to 1", *smoothing);
        }
        ensure(*smoothing == 0.0 || *loss == Loss::CrossEntropy, || {
            Error::usage("label smoothing: expected the loss cross_entropy: no other has classes".to_owned())
        })?;
        ensure(self.class_axis.is_none() || *loss == Loss::CrossEntropy, || {
            Error::usage("class axis: expected the loss cross_entropy: no other has classes".to_owned())
        })?;
        match clip {
            Some(most) if most.is_nan() || *most <= 0.0 => {
                refuse("largest norm of the gradients", "a number above 0", *most)?
            }
            _ => {}
        }
        ema.map_or(Ok(()), |kept| share("share of the moving averages", kept))?;
        match self.optimizer {
            Optimizer::Sgd { momentum, nesterov } => {
                counts("momentum", momentum)?;
                ensure(!nesterov || momentum > 0.0, || {
                    Error::usage("nesterov: expected a momentum above 0, which it looks ahead by".to_owned())
                })
            }
            Optimizer::Adam { beta1, beta2, eps, .. } => {
                share("beta1", beta1)?;
                share("beta2", beta2)?;
                counts("eps", eps)
            }
        }
    }

    /// Refuses a pattern that fits no weight: it would train what was to stay, or leave what was to be trained.
    fn check_patterns(&self, weights: &[onnx::Weight]) -> Result<()> {
        let fits = |pattern: &str| weights.iter().any(|weight| crate::file::glob(pattern, &weight.name));
        let patterns = [("frozen", &self.freeze), ("trained", &self.only)];
        let mut patterns = patterns.into_iter().flat_map(|(what, all)| all.iter().map(move |pattern| (what, pattern)));
        let Some((what, pattern)) = patterns.find(|(_, pattern)| !fits(pattern)) else { return Ok(()) };
        Err(Error::usage(format!(
            "{what} weights '{pattern}': expected names of weights, found none that fits among {}",
            quoted(weights.iter().map(|weight| &weight.name[..]))
        )))
    }

    /// This method for a model with these weights. A pattern that fits the name of an initializer fits the copies of it, too.
    fn of(&self, weights: &[onnx::Weight]) -> Training {
        let copies = |patterns: &[String]| {
            let fits = |weight: &&onnx::Weight| {
                weight.of.as_ref().is_some_and(|of| patterns.iter().any(|pattern| crate::file::glob(pattern, of)))
            };
            let names = weights.iter().filter(fits).map(|weight| weight.name.clone());
            patterns.iter().cloned().chain(names).collect()
        };
        Training { freeze: copies(&self.freeze), only: copies(&self.only), ..self.clone() }
    }

    /// True if a pattern of frozen weights fits this name.
    fn names_frozen(&self, name: &str) -> bool {
        self.freeze.iter().any(|pattern| crate::file::glob(pattern, name))
    }

    /// True if a pattern of the weights that are trained alone fits this name.
    fn names_trained(&self, name: &str) -> bool {
        self.only.iter().any(|pattern| crate::file::glob(pattern, name))
    }

    /// True if the weight of this name stays as it is.
    fn freezes(&self, name: &str) -> bool {
        self.names_frozen(name) || !self.only.is_empty() && !self.names_trained(name)
    }

    /// This method on a device. The CPU computes halves in `f32`: there `precision` becomes `f32`, and [`kept`](Self::kept) what was asked for.
    #[must_use]
    pub fn on(self, target: &Target) -> Training {
        match target.storage(self.precision) {
            Ok(DType::F32) if self.precision != DType::F32 => {
                Training { precision: DType::F32, kept: self.precision, ..self }
            }
            _ => self,
        }
    }

    /// True if no weight changes before the norm of all gradients is known: they are clipped by it, or are those of a scaled loss.
    fn waits_for_norm(&self) -> bool {
        self.clip.is_some() || self.scales_loss()
    }

    /// True if the loss is scaled, so that small gradients are not rounded to zero.
    fn scales_loss(&self) -> bool {
        self.precision == DType::F16
    }

    /// The rows of one part of an update, of a batch of so many rows.
    ///
    /// # Errors
    /// When the parts would not be equal.
    pub fn rows_of_part(&self, batch: usize) -> Result<usize> {
        let parts = self.accumulate;
        ensure(parts > 0 && batch.is_multiple_of(parts), || {
            Error::usage(format!("accumulation: a batch of {batch} has no {parts} equal parts"))
        })?;
        Ok(batch / parts)
    }
}

/// The programs that train a model.
#[derive(Clone, Debug)]
pub struct Programs {
    /// The parts of an update, in the order in which they run: `step`, or `first`, `next` and `last`.
    pub parts: Vec<(&'static str, Graph)>,
    /// The model with the same weights, as in inference: outputs `loss` and, of classes, `correct`.
    pub evaluate: Graph,
    /// What they train, and how they read the model.
    pub outline: Outline,
    /// With values of 16 bits: those that stay `f32`, with their operators.
    pub wide: Vec<(String, &'static str)>,
}

/// What a training trains, and how it reads the model.
#[derive(Clone, Debug)]
pub struct Outline {
    /// The weights that are trained.
    pub trained: Vec<String>,
    /// Weights that stay as they are, and the reason.
    pub fixed: Vec<(String, &'static str)>,
    /// The bytes of those among them that are frozen.
    pub frozen_bytes: u64,
    /// Trained weights that may be buffers: see [`onnx::Role::Doubtful`].
    pub doubtful: Vec<String>,
    /// The first output, which the loss judges.
    pub output: Fact,
    /// The node that makes it, with its operator, if the loss computes what this node does: a softmax before cross_entropy, a sigmoid before
    /// bce_logits.
    pub doubled: Option<(String, &'static str)>,
    /// The axis of its classes, of a loss that has some.
    pub class_axis: Option<usize>,
    /// Batch normalizations, each with the number of values that a mean and a variance are of, if these are few.
    pub few: Vec<(String, usize)>,
    /// What tells that the exporter folded norms away, if something does.
    pub folded_norms: Option<String>,
}

impl Programs {
    /// All programs, each with its name, as they are planned: the parts of an update, then `evaluate`.
    pub fn named(self) -> impl Iterator<Item = (String, Graph)> {
        self.parts.into_iter().chain([("evaluate", self.evaluate)]).map(|(name, graph)| (name.to_owned(), graph))
    }
}

/// The part of an update that a program computes.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Part {
    Whole,
    First,
    Next,
    Last,
}

impl Part {
    /// The parts of an update with this many micro-batches.
    fn all(accumulate: usize) -> &'static [(&'static str, Part)] {
        match accumulate {
            1 => &[("step", Part::Whole)],
            2 => &[("first", Part::First), ("last", Part::Last)],
            _ => &[("first", Part::First), ("next", Part::Next), ("last", Part::Last)],
        }
    }
}

/// Builds the programs that train a model, whose first output is what the loss judges. `weights` names the constants that may be trained.
///
/// # Errors
/// When a number of the method is out of its range, the loss cannot judge the output, several of its axes may be that of the classes, no
/// weight can be trained, a normalization would have the statistics of one value, or an operator on the way has no derivatives.
pub fn programs(model: &Graph, weights: &[onnx::Weight], training: &Training) -> Result<Programs> {
    training.check()?;
    training.check_patterns(weights)?;
    let training = &training.of(weights);
    let output = model.outputs().first().map(|(_, output)| model.fact(*output).clone());
    let output = output.ok_or_else(|| Error::graph("it has no output that a loss could judge".into()))?;
    let doubled = doubled(model, training.loss);
    let classes = match training.loss {
        Loss::CrossEntropy => loss::class_axis(&output, training)?,
        _ => None,
    };
    let (mut fixed, mut few, mut frozen_bytes) = (Vec::new(), Vec::new(), 0);
    let (mut parts, mut trained, mut wide) = (Vec::new(), Vec::new(), Vec::new());
    for &(name, part) in Part::all(training.accumulate) {
        let mut builder = Builder::new(model, training, classes)?;
        let (candidates, reasons) = builder.candidates(weights)?;
        let frozen = reasons.iter().filter(|fixed| fixed.why == FROZEN);
        frozen_bytes = frozen.map(|fixed| builder.graph.fact(fixed.value).bytes() as u64).sum();
        fixed = reasons.into_iter().map(|fixed| (fixed.name, fixed.why)).collect();
        few = std::mem::take(&mut builder.few);
        wide = std::mem::take(&mut builder.wide);
        let (gradients, loss) = builder.differentiate(&candidates, training.accumulate)?;
        for ((name, _), gradient) in candidates.iter().zip(&gradients) {
            if gradient.is_none() {
                fixed.push((name.clone(), "the loss does not depend on it"));
            }
        }
        let weights: Vec<Weight> = candidates
            .into_iter()
            .zip(gradients)
            .filter_map(|((name, value), gradient)| Some(Weight { name, value, gradient: gradient? }))
            .collect();
        ensure(!weights.is_empty(), || Error::usage(format!("no weight can be trained: {}", reasons_of(&fixed))))?;
        trained = weights.iter().map(|weight| weight.name.clone()).collect();
        parts.push((name, builder.finish(name, part, weights, loss)?));
    }
    let mut evaluate = evaluate(model, &trained, classes, training)?;
    let bytes = |&input: &_| (evaluate.fact(input).shape.numel() * evaluate.fact(input).dtype.size()) as u64;
    let prefetches = evaluate.inputs().iter().map(bytes).sum::<u64>() >= PREFETCHED;
    let all = parts.iter_mut().map(|(_, graph): &mut (_, Graph)| graph).chain([&mut evaluate]);
    all.for_each(|graph| graph.prefetches = prefetches);
    let is_doubtful = |weight: &&onnx::Weight| weight.role == onnx::Role::Doubtful && trained.contains(&weight.name);
    let doubtful = weights.iter().filter(is_doubtful).map(|weight| weight.name.clone()).collect();
    let class_axis = classes;
    let outline =
        Outline { trained, fixed, frozen_bytes, doubtful, output, doubled, class_axis, few, folded_norms: None };
    Ok(Programs { parts, evaluate, outline, wide })
}

/// The node that makes the first output, with its operator, if the loss computes what this node does.
fn doubled(model: &Graph, loss: Loss) -> Option<(String, &'static str)> {
    let node = model.node(model.outputs().first()?.1.node);
    let operators: &[&str] = match loss {
        Loss::CrossEntropy => &["Softmax", "LogSoftmax"],
        Loss::BceLogits => &["Sigmoid"],
        _ => &[],
    };
    let operator = operators.iter().copied().find(|&operator| operator == node.op_name())?;
    Some((node.name.clone(), operator))
}

/// Builds the programs that train a file's model on batches of `batch` rows, without data. The open dim on the first axis of the first input
/// is the rows of a part; `dims` has the others.
///
/// # Errors
/// As [`programs`], and when the first input has another number of rows.
pub fn programs_of_file(
    model: Model,
    mut dims: Vec<(String, usize)>,
    batch: usize,
    training: &Training,
) -> Result<Programs> {
    let (model, rows) = (model.with_weights(), training.rows_of_part(batch)?);
    if let Some(dim) = model.batch_dim().filter(|dim| !dims.iter().any(|(known, _)| known == dim)) {
        dims.push((dim, rows));
    }
    let graph = onnx::import(&model, &dims)?;
    if let Some(&input) = graph.inputs().first() {
        check_rows(graph.value_name(input), graph.fact(input), rows)?;
    }
    of_model(&model, &graph, training)
}

/// The programs of a model, of which this is the graph.
fn of_model(model: &Model, graph: &Graph, training: &Training) -> Result<Programs> {
    let mut programs = programs(graph, &model.weights(), training)?;
    programs.outline.folded_norms = model.folded_norms();
    Ok(programs)
}

/// Refuses an input that has not so many rows. The labels have those of the model's output.
fn check_rows(name: &str, fact: &Fact, rows: usize) -> Result<()> {
    ensure(fact.shape.first() == Some(&rows), || {
        let what = if name == LABELS { "the first output".to_owned() } else { format!("input '{name}'") };
        let mut advice = "export the model with a dim for the batch".to_owned();
        if let Some(own) = fact.shape.first() {
            advice = format!("{advice}, or take parts of {own} rows");
        }
        Error::usage(format!("{what} is {fact}: expected a batch of {rows} on its first axis; {advice}"))
    })
}

/// The first of some names, in quotes, and how many more there are.
pub fn quoted<'a>(names: impl ExactSizeIterator<Item = &'a str>) -> String {
    listed(names.map(|name| format!("'{name}'")))
}

/// The reasons why weights are not trained, each once, with the names of the weights.
pub fn reasons<'a>(fixed: &'a [(String, &'static str)]) -> Vec<(&'static str, Vec<&'a str>)> {
    let mut reasons: Vec<(&str, Vec<&str>)> = Vec::new();
    for (name, why) in fixed {
        match reasons.iter_mut().find(|(reason, _)| reason == why) {
            Some((_, names)) => names.push(name),
            None => reasons.push((why, vec![name])),
        }
    }
    reasons
}

/// Why no weight is trained.
fn reasons_of(fixed: &[(String, &'static str)]) -> String {
    if fixed.is_empty() {
        return "expected initializers of floats with axes that the first output depends on, found none".to_owned();
    }
    let reasons = reasons(fixed);
    let reason = |(why, names): &(&str, Vec<&str>)| format!("{why}: {}", quoted(names.iter().copied()));
    reasons.iter().map(reason).collect::<Vec<_>>().join("; ")
}

/// A weight that is not trained.
struct Fixed {
    name: String,
    value: ValueId,
    why: &'static str,
}

/// A constant that becomes a state, and its gradient.
struct Weight {
    name: String,
    value: ValueId,
    gradient: ValueId,
}

/// A step that grows.
struct Builder<'a> {
    graph: Graph,
    training: &'a Training,
    /// The value that the loss judges, and the labels.
    judged: [ValueId; 2],
    classes: Option<usize>,
    /// States that every part updates, as running statistics, and their updates.
    running: Vec<(ValueId, ValueId)>,
    /// Values that stay `f32` among those of 16 bits.
    wide: Vec<(String, &'static str)>,
    /// Batch normalizations of few values, and their number.
    few: Vec<(String, usize)>,
    /// The state that the loss is multiplied by before it is derived.
    scale: Option<ValueId>,
}

/// The treatment of all gradients alike.
struct Factor {
    /// They are still to be multiplied by it.
    scale: Option<ValueId>,
    /// Their norm.
    norm: ValueId,
    /// True if the loss is finite, and so is their norm, if they all wait for it.
    finite: ValueId,
}

/// The sum of the losses of a part's batch, and what it is to be divided by.
struct Sum {
    loss: ValueId,
    /// The number of elements that count, if it depends on the labels.
    count: Option<ValueId>,
}

impl<'a> Builder<'a> {
    fn new(model: &Graph, training: &'a Training, classes: Option<usize>) -> Result<Builder<'a>> {
        let mut graph = model.clone();
        let wide = match training.precision {
            DType::F32 => Vec::new(),
            half => precision::narrow(&mut graph, half)?,
        };
        // The output may be a node that these replace.
        let norm::Trained { mut running, few } = norm::train(&mut graph, training)?;
        running.extend(dropout::train(&mut graph, training.seed)?);
        let judged = judge(&mut graph, training, classes)?;
        let scale = training.scales_loss().then(|| scaling::state(&mut graph)).transpose()?;
        Ok(Builder { graph, training, judged, classes, running, wide, few, scale })
    }

    /// The constants that may be trained, with their names, and those that may not, with the reason.
    fn candidates(&self, weights: &[onnx::Weight]) -> Result<(Vec<(String, ValueId)>, Vec<Fixed>)> {
        let graph = &self.graph;
        let (mut found, mut fixed) = (Vec::new(), Vec::new());
        let (mut seen, statistics) = (HashSet::new(), norm::statistics(graph)?);
        let roles: HashMap<&str, onnx::Role> = weights.iter().map(|weight| (&weight.name[..], weight.role)).collect();
        for node in graph.order()? {
            let value = ValueId { node, port: 0 };
            let Some(constant) = graph.as_constant(value) else { continue };
            let Some(role) = roles.get(&constant.name[..]) else { continue };
            let name = constant.name.clone();
            let dtype = constant.fact.dtype;
            let why = if self.training.freezes(&name) {
                Some(FROZEN)
            } else if statistics.contains(&value) {
                Some("it is a running statistic: no gradient trains it")
            } else if *role == onnx::Role::Buffer && !self.training.names_trained(&name) {
                Some("the exporter says that it is a buffer")
            } else if dtype != DType::F32 {
                Some("its elements are not f32")
            } else if constant.fact.shape.numel() == 1 && is_numbered(&name) {
                Some("it is a number that the exporter wrote out")
            } else {
                None
            };
            match why {
                Some(why) => fixed.push(Fixed { name, value, why }),
                None if seen.insert(name.clone()) => found.push((name, value)),
                None => return Err(Error::graph(format!("two weights are called '{name}'"))),
            }
        }
        Ok((found, fixed))
    }

    /// Adds the loss, and its derivatives by each candidate.
    fn differentiate(
        &mut self,
        candidates: &[(String, ValueId)],
        accumulate: usize,
    ) -> Result<(Vec<Option<ValueId>>, Sum)> {
        let (training, [judged, labels], classes, scale) = (self.training, self.judged, self.classes, self.scale);
        let made = grow(&mut self.graph, "loss", |b| {
            let (sum, count) = training.loss.sum(b.value(judged), b.value(labels), classes, training.smoothing)?;
            let (loss, count) = match (count, accumulate) {
                // The count of one part is that of the update.
                (loss::Count::Counted(count), 1) => (sum / count, None),
                (loss::Count::Counted(count), _) => (sum, Some(count)),
                (loss::Count::Known(count), parts) => (sum / (count * parts) as f64, None),
            };
            let derived = scale.map_or(loss, |scale| loss * b.value(scale));
            Ok([loss, derived].into_iter().chain(count).collect())
        })?;
        let values: Vec<ValueId> = candidates.iter().map(|(_, value)| *value).collect();
        let gradients = autodiff::gradients(&mut self.graph, made[1], &values)?;
        if training.kept != DType::F32 {
            kept::narrow(&mut self.graph, training.kept, judged)?;
        }
        Ok((gradients, Sum { loss: made[0], count: made.get(2).copied() }))
    }

    /// Adds the updates. Each stands where its gradient does, so that a gradient need not be kept.
    fn finish(mut self, name: &str, part: Part, mut weights: Vec<Weight>, mut sum: Sum) -> Result<Graph> {
        for weight in &weights {
            self.graph.keep(weight.value, None)?;
        }
        let (states, updates): (Vec<_>, Vec<_>) = std::mem::take(&mut self.running).into_iter().unzip();
        if !states.is_empty() {
            let finite = self.finite(sum.loss)?;
            let made = grow(&mut self.graph, "update", |b| Ok(held(b, b.value(finite), &states, &updates)))?;
            for (&state, next) in states.iter().zip(made) {
                self.graph.update(state, next).map_err(Error::graph)?;
            }
        }
        if part != Part::Whole {
            let values = [Some(&mut sum.loss), sum.count.as_mut()].into_iter().flatten();
            let named = ["loss", "count"].into_iter().zip(values).map(|(name, value)| (name.to_owned(), value));
            let gradients = weights.iter_mut().map(|weight| (weight.name.clone(), &mut weight.gradient));
            for (name, value) in named.chain(gradients) {
                accumulate(&mut self.graph, part, &name, value)?;
            }
        }
        if matches!(part, Part::Whole | Part::Last) {
            self.update(&mut weights, &sum)?;
        }
        self.graph.name = name.to_owned();
        self.graph.sweep();
        let mut names = HashSet::new();
        let twice =
            self.graph.states().iter().map(|state| self.graph.value_name(state.value)).find(|n| !names.insert(*n));
        match twice {
            Some(name) => {
                Err(Error::graph(format!("a weight is called '{name}', as a state of the training: rename it")))
            }
            None => Ok(self.graph),
        }
    }

    /// Adds the update of the weights, by the gradients of a whole batch.
    fn update(&mut self, weights: &mut [Weight], sum: &Sum) -> Result<()> {
        let Training { optimizer, rate, .. } = self.training;
        let graph = &mut self.graph;
        let scalar = Fact::new(DType::F32, []);
        let mut states = vec![graph.state("step", scalar.clone(), None)];
        let factors = optimizer.corrections().iter();
        states.extend(factors.map(|name| graph.state(format!("optimizer/{name}"), scalar.clone(), None)));
        graph.insert_backward();
        let mut made = grown(graph, "update", |b| {
            let step = b.value(states[0]);
            let factors = optimizer.corrected(states[1..].iter().map(|&factor| b.value(factor)));
            Ok([vec![rate.at(step), step + 1.0], factors].concat())
        })?;
        let rate = made.remove(0);
        let Factor { scale, norm, finite } = self.factor(weights, sum)?;
        let graph = &mut self.graph;
        let next = grow(graph, "update", |b| Ok(held(b, b.value(finite), &states, &made)))?;
        for (&state, &next) in states.iter().zip(&next) {
            graph.update(state, next).map_err(Error::graph)?;
        }
        if let Some(scale) = self.scale {
            scaling::update(graph, scale, finite)?;
        }
        let loss = match sum.count {
            Some(count) => grow(graph, "update", |b| Ok(vec![b.value(sum.loss) / b.value(count)]))?[0],
            None => sum.loss,
        };
        graph.output("loss", loss);
        graph.output("lr", rate);
        graph.output("grad_norm", norm);
        for weight in weights.iter() {
            self.change(weight, scale, finite, rate, &next[1..])?;
        }
        Ok(())
    }

    /// True if a loss is neither infinite nor NaN: known as soon as the loss is, so that no gradient waits for it.
    fn finite(&mut self, loss: ValueId) -> Result<ValueId> {
        self.graph.insert_at(loss.node);
        Ok(grown(&mut self.graph, "update", |b| Ok(vec![is_finite(b.value(loss))]))?[0])
    }

    /// The sum of the squares of all gradients. Each gradient is read where it is made, so that none waits for another.
    fn squares(&mut self, weights: &[Weight]) -> Result<ValueId> {
        let squares = weights.iter().map(|weight| {
            self.graph.insert_at(weight.gradient.node);
            let made = grown(&mut self.graph, "update", |b| {
                // Not the square that an optimizer takes: that would be stored for both.
                let own = b.value(weight.gradient).abs();
                Ok(vec![(own * own).reduce_sum(&[], false).shaped(&[1])])
            })?;
            Ok(made[0])
        });
        let squares = squares.collect::<Result<Vec<_>>>()?;
        let made = grow(&mut self.graph, "update", |b| {
            let squares = squares.iter().map(|&square| b.value(square));
            let total = squares.reduce(|total, square| total + square).ok_or("a training has a weight")?;
            Ok(vec![total.shaped(&[])])
        })?;
        Ok(made[0])
    }

    /// The norm of all gradients, and what they are still to be multiplied by. A gradient is read for the norm where it is made. It waits for
    /// the norm, and so do all others, only if they are clipped by it, or are those of a scaled loss.
    fn factor(&mut self, weights: &mut [Weight], sum: &Sum) -> Result<Factor> {
        let loss = self.finite(sum.loss)?;
        if !self.training.waits_for_norm() {
            if let Some(count) = sum.count {
                self.divide(weights, count)?;
            }
            let total = self.squares(weights)?;
            let norm = grow(&mut self.graph, "update", |b| Ok(vec![b.value(total).sqrt()]))?[0];
            return Ok(Factor { norm, finite: loss, scale: None });
        }
        let (clip, scale) = (self.training.clip, self.scale);
        let total = self.squares(weights)?;
        let made = grow(&mut self.graph, "update", |b| {
            let divisors = [sum.count, scale].into_iter().flatten().map(|divisor| b.value(divisor));
            let inverse = divisors.reduce(|product, divisor| product * divisor).map(|product| product.reciprocal());
            let total = b.value(total);
            let norm = inverse.map_or(total.sqrt(), |inverse| total.sqrt() * inverse);
            let finite = b.value(loss).and(is_finite(total));
            let clipped = clip.map(|most| (most / (norm + 1e-6)).min(1.0));
            let factor = clipped.into_iter().chain(inverse).reduce(|product, factor| product * factor);
            Ok([norm, finite].into_iter().chain(factor).collect())
        })?;
        Ok(Factor { norm: made[0], finite: made[1], scale: made.get(2).copied() })
    }

    /// Divides each gradient by a number, where it is made.
    fn divide(&mut self, weights: &mut [Weight], by: ValueId) -> Result<()> {
        self.graph.insert_at(by.node);
        let inverse = grown(&mut self.graph, "update", |b| Ok(vec![b.value(by).reciprocal()]))?[0];
        for weight in weights {
            self.graph.insert_at(weight.gradient.node);
            let own = weight.gradient;
            weight.gradient = grown(&mut self.graph, "update", |b| Ok(vec![b.value(own) * b.value(inverse)]))?[0];
        }
        Ok(())
    }

    /// Adds the change of a weight, of what the optimizer keeps for it, and of its moving average.
    fn change(
        &mut self,
        weight: &Weight,
        scale: Option<ValueId>,
        finite: ValueId,
        rate: ValueId,
        factors: &[ValueId],
    ) -> Result<()> {
        let Training { optimizer, decay, decay_dims, ema, .. } = *self.training;
        let graph = &mut self.graph;
        let fact = graph.fact(weight.value).clone();
        let mut states = vec![weight.value];
        let slots = optimizer.slots().iter();
        states.extend(slots.map(|slot| graph.state(format!("{slot}/{}", weight.name), fact.clone(), None)));
        if ema.is_some() {
            let Kind::State(Some(initial)) = &graph.node(weight.value.node).kind else {
                unreachable!("weights are states")
            };
            let name = format!("ema/{}", weight.name);
            let initial = Arc::new(initial.named(name.clone())?);
            states.push(graph.state(name, fact, Some(initial)));
        }
        graph.insert_at(weight.gradient.node);
        let made = grown(graph, "update", |b| {
            let values: Vec<Var> = states.iter().map(|&state| b.value(state)).collect();
            let (old, slots) = (values[0], &values[1..1 + optimizer.slots().len()]);
            let gradient = b.value(weight.gradient);
            let gradient = scale.map_or(gradient, |scale| gradient * b.value(scale));
            let decay = if old.shape()?.len() >= decay_dims { decay } else { 0.0 };
            let factors: Vec<Var> = factors.iter().map(|&factor| b.value(factor)).collect();
            let finite = b.value(finite);
            let (new, slots) = optimizer.update(old, gradient, slots, b.value(rate), decay, &factors, finite);
            let average = ema.map(|kept| {
                let old = values[values.len() - 1];
                finite.select(old * kept + new * (1.0 - kept), old)
            });
            Ok([new].into_iter().chain(slots).chain(average).collect())
        })?;
        for (&state, &next) in states.iter().zip(&made) {
            graph.update(state, next).map_err(Error::graph)?;
        }
        Ok(())
    }
}

/// True if a number is neither infinite nor NaN.
fn is_finite(number: Var<'_>) -> Var<'_> {
    number.abs().less_or_equal(f64::from(f32::MAX))
}

/// The values of states after a step: the old ones unless all is finite.
fn held<'g>(b: Nodes<'g>, finite: Var<'g>, states: &[ValueId], next: &[ValueId]) -> Vec<Var<'g>> {
    states.iter().zip(next).map(|(&state, &next)| finite.select(b.value(next), b.value(state))).collect()
}

/// Adds a value of this part to the sum of those before, which is a state. The last part takes the whole sum for the value.
fn accumulate(graph: &mut Graph, part: Part, name: &str, value: &mut ValueId) -> Result<()> {
    let fact = graph.fact(*value).clone();
    let state = graph.state(format!("{}{name}", shard::TERMS), fact, None);
    if part != Part::First {
        graph.insert_at(value.node);
        let own = *value;
        *value = grown(graph, "accumulate", |b| Ok(vec![b.value(state) + b.value(own)]))?[0];
    }
    if part != Part::Last {
        graph.update(state, *value).map_err(Error::graph)?;
    }
    Ok(())
}

/// The model as in inference, with the states that training has: its loss as a sum, the number of elements that count, and of classes, the
/// number of right answers.
fn evaluate(model: &Graph, trained: &[String], classes: Option<usize>, training: &Training) -> Result<Graph> {
    let mut graph = model.clone();
    norm::share(&mut graph, training)?;
    norm::infer(&mut graph)?;
    dropout::infer(&mut graph)?;
    let [judged, labels] = judge(&mut graph, training, classes)?;
    for node in graph.order()? {
        let value = ValueId { node, port: 0 };
        let Some(name) = graph.as_constant(value).map(|c| c.name.clone()).filter(|name| trained.contains(name)) else {
            continue;
        };
        graph.keep(value, training.ema.map(|_| format!("ema/{name}")))?;
    }
    let made = grow(&mut graph, "loss", |b| {
        let (judged, labels) = (b.value(judged), b.value(labels));
        let (sum, count) = training.loss.sum_beside_padding(judged, labels, classes)?;
        let mut made = vec![
            sum,
            match count {
                loss::Count::Known(count) => sum.like(count as f64),
                loss::Count::Counted(count) => count,
            },
        ];
        made.extend(training.loss.correct(judged, labels, classes)?);
        Ok(made)
    })?;
    for (name, &value) in ["loss", "count", "correct"].into_iter().zip(&made) {
        graph.output(name, value);
    }
    graph.name = "evaluate".to_owned();
    graph.sweep();
    Ok(graph)
}

/// Takes the outputs from a graph, and adds the labels: the value that the loss judges, and they.
fn judge(graph: &mut Graph, training: &Training, classes: Option<usize>) -> Result<[ValueId; 2]> {
    let Some((_, judged)) = graph.outputs().first().cloned() else {
        return Err(Error::graph("it has no output that a loss could judge".into()));
    };
    if let [(name, _), ..] = graph.outputs()
        && let [counted, ..] = graph.counted(name)
    {
        let by = &counted.by;
        let what =
            format!("output '{name}' is as long as '{by}' says after a run: a loss needs an output of one shape");
        return Err(Error::graph(what));
    }
    for name in graph.outputs().iter().map(|(name, _)| name.clone()).collect::<Vec<_>>() {
        graph.withdraw_output(&name);
    }
    ensure(graph.inputs().iter().all(|&input| graph.value_name(input) != LABELS), || {
        Error::graph(format!(
            "it has an input '{LABELS}', as the one that training adds: rename it, or export without it"
        ))
    })?;
    let fact = training.loss.labels(graph.fact(judged), classes).map_err(Error::graph)?;
    Ok([judged, graph.input(LABELS, fact)])
}

/// True for names that exporters give to what has none in the program: `val_12`, `onnx::Mul_34`, `12`.
fn is_numbered(name: &str) -> bool {
    let digits = name.trim_end_matches(|c: char| c.is_ascii_digit());
    digits.len() < name.len() && (digits.is_empty() || digits == "val_" || name.starts_with("onnx::"))
}

/// Adds nodes to a graph under a name, behind all others.
fn grow(
    graph: &mut Graph,
    name: &str,
    make: impl for<'g> FnOnce(Nodes<'g>) -> OpResult<Vec<Var<'g>>>,
) -> Result<Vec<ValueId>> {
    graph.append();
    grown(graph, name, make)
}

/// Adds nodes to a graph under a name, at the place that was chosen.
fn grown(
    graph: &mut Graph,
    name: &str,
    make: impl for<'g> FnOnce(Nodes<'g>) -> OpResult<Vec<Var<'g>>>,
) -> Result<Vec<ValueId>> {
    build(Decomposer::new(graph, name.to_owned()), make).map_err(Error::graph)
}
