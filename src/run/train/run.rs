//! Runs training steps: batches of rows go in, losses come out, the weights stay on the device.

use super::checkpoint::fingerprint;
use super::classes::host_bytes;
use super::data::{Labels, Order, Rows};
use super::init::{self, Init};
use super::loss::usual_class_axis;
use super::prefetch::{Batch, Prefetch};
use super::{LABELS, Loss, Outline, Programs, Schedule, Training, check_rows, of_model};
use crate::backend::{HostMemory, Place};
use crate::dtype::DType;
use crate::error::{Error, Result, ensure};
use crate::exec::finite::NotFinite;
use crate::onnx::{self, Model};
use crate::op::Fact;
use crate::session::{self, Options, Session};
use crate::target::PREFETCH_STACK;
use crate::tensor::Tensor;
use serde_json::{Value, json};
use std::collections::HashSet;
use std::path::Path;
use std::time::{Duration, Instant};

/// The data of a model: the rows of each input by its name, and the labels.
#[derive(Debug)]
pub struct Data {
    /// The rows of the inputs.
    pub inputs: Vec<(String, Rows)>,
    /// The labels.
    pub labels: Rows,
}

impl Data {
    /// Refuses files of different numbers of rows.
    ///
    /// # Errors
    /// Both numbers.
    pub fn check(&self) -> Result<usize> {
        let count = self.labels.count();
        match self.inputs.iter().find(|(_, rows)| rows.count() != count) {
            Some((_, rows)) => {
                Err(self.labels.fail(format!("expected {} labels, one per row, found {count}", rows.count())))
            }
            None => Ok(count),
        }
    }

    /// Steps per epoch: whole batches.
    pub fn steps_per_epoch(&self, batch: usize) -> u64 {
        (self.labels.count() / batch.max(1)) as u64
    }

    /// The rows of all columns.
    fn rows(&self) -> impl Iterator<Item = &Rows> + Clone {
        self.columns().map(|(_, rows)| rows)
    }

    /// All columns: those of the inputs, then the labels.
    fn columns(&self) -> impl Iterator<Item = (&str, &Rows)> + Clone {
        self.inputs.iter().map(|(name, rows)| (&name[..], rows)).chain([(LABELS, &self.labels)])
    }
}

/// A model in training.
#[derive(Debug)]
pub struct Trainer {
    session: Session,
    model: Model,
    training: Training,
    outline: Outline,
    /// Weights that no rule draws, where weights are drawn, and an operator that reads them.
    undrawn: Vec<(String, &'static str)>,
    /// The names of the columns.
    names: Vec<String>,
    /// The allowed labels.
    labels: Labels,
    /// The facts of a micro-batch, in the order of the columns.
    facts: Vec<Fact>,
    /// The rows of a micro-batch that this rank computes.
    own: Own,
    /// The rows of a micro-batch, and the thread that makes the next one ready. `None` if rows are filled in where the plan has its inputs.
    ahead: Option<Prefetch>,
    /// Bytes of the host's memory that they take, where that is no part of the plan.
    host_bytes: u64,
    parts: Vec<&'static str>,
    batch: usize,
    /// Tells the model's graph from others.
    fingerprint: String,
}

/// The rows of a micro-batch that a rank computes: its share, at its place.
#[derive(Clone, Copy, Debug)]
struct Own {
    place: usize,
    ranks: usize,
}

impl Own {
    /// The share of a session's rank.
    ///
    /// # Errors
    /// When the mesh splits the rows in a way that data have not.
    fn of(session: &Session) -> Result<Own> {
        let alone = Own { place: 0, ranks: 1 };
        let (plan, rank) = (session.plan(), session.rank());
        let Some(mesh) = &plan.mesh else { return Ok(alone) };
        let inputs = |name: &str| plan.programs[0].inputs.iter().any(|port| port.name == name);
        let mut shards = plan.programs[0].shards.iter().filter(|shard| inputs(&shard.name));
        let Some(first) = shards.next() else { return Ok(alone) };
        if let Some(other) = shards.find(|other| other.dim != 0 || other.axis != first.axis) {
            let what = format!("input '{}' is split along dim {} over '{}'", other.name, other.dim, other.axis);
            return Err(Error::usage(format!("{what}: data are split by rows, over one axis of the mesh")));
        }
        let (at, axis) = mesh.axis(&first.axis)?;
        Ok(Own { place: mesh.place(rank, at), ranks: axis.ranks })
    }

    /// The fact of this rank's rows.
    fn part(self, mut fact: Fact) -> Fact {
        fact.shape[0] /= self.ranks;
        fact
    }

    /// This rank's rows of a micro-batch of so many.
    fn rows(self, batch: Batch, micro: usize) -> Batch {
        let first = self.place * (micro / self.ranks);
        // Of a last batch that has fewer rows, this rank may have none.
        Batch {
            first: batch.first + first.min(batch.count),
            count: batch.count.saturating_sub(first).min(micro / self.ranks),
            ..batch
        }
    }
}

/// The figures of a step.
#[derive(Clone, Copy, Debug, Default)]
pub struct Shown {
    /// The mean loss over the batch, before the update.
    pub loss: f32,
    /// The learning rate.
    pub rate: f32,
    /// The norm of all gradients together.
    pub norm: f32,
    /// How long the step has waited for its rows.
    pub waited: Duration,
}

/// The figures of an evaluation.
#[derive(Clone, Copy, Debug, Default)]
pub struct Score {
    /// The mean loss.
    pub loss: f64,
    /// The share of right answers, of classes.
    pub accuracy: Option<f64>,
}

impl Trainer {
    /// Plans the training of a model on batches of `batch` rows, and loads it.
    ///
    /// # Errors
    /// When data and model do not fit each other, an operator has no derivatives, or the plan exceeds the limit.
    pub fn new(model: Model, data: &Data, batch: usize, training: Training, options: &Options) -> Result<Trainer> {
        Trainer::load(model, data, batch, training, options, None)
    }

    /// As [`new`](Self::new), with weights that are drawn by a seed, as [`init`] tells. What no rule draws, and what is frozen, begins with the
    /// elements of the model.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn drawn(
        model: Model,
        data: &Data,
        batch: usize,
        training: Training,
        options: &Options,
        seed: u64,
    ) -> Result<Trainer> {
        Trainer::load(model, data, batch, training, options, Some(seed))
    }

    fn load(
        model: Model,
        data: &Data,
        batch: usize,
        training: Training,
        options: &Options,
        seed: Option<u64>,
    ) -> Result<Trainer> {
        let rows = data.check()?;
        ensure(batch <= rows, || data.labels.fail(format!("expected at least {batch} rows, one batch, found {rows}")))?;
        let micro = training.rows_of_part(batch)?;
        let model = model.with_given(data.inputs.iter().map(|(name, _)| &name[..]))?.with_weights();
        let mut dims = options.fixed().ok_or_else(|| Error::usage("training takes no range of a dim".to_owned()))?;
        for (name, rows) in &data.inputs {
            let mut shape = rows.shape().clone();
            shape[0] = micro;
            for (dim, extent) in model.dims_of(name, &shape) {
                if !dims.iter().any(|(known, _)| *known == dim) {
                    dims.push((dim, extent));
                }
            }
        }
        // Data of another rank than the model's binds none, and is refused by its shape.
        if let Some(dim) = model.batch_dim().filter(|dim| !dims.iter().any(|(known, _)| known == dim)) {
            dims.push((dim, micro));
        }
        let mut graph = onnx::import(&model, &dims)?;
        let fingerprint = fingerprint(&graph)?;
        let weights = model.weights();
        let mut init = Init::default();
        if seed.is_some() {
            init = init::rules(&graph, &weights, &training)?;
            init::forget(&mut graph, &init)?;
        }
        let device = session::open(options)?;
        tracing::info!("backend: {}", device.described());
        let training = Training { labels: Some(data.labels.shape().clone()), ..training.on(device.backend.target()) };
        let Programs { parts, evaluate, outline, .. } = of_model(&model, &graph, &training)?;
        let facts: Vec<Fact> = data
            .columns()
            .map(|(name, rows)| {
                let input = parts[0].1.inputs().iter().find(|&&input| parts[0].1.value_name(input) == name);
                let input = input.ok_or_else(|| Error::usage(format!("the model has no input '{name}'")))?;
                let fact = parts[0].1.fact(*input).clone();
                check_rows(name, &fact, micro)?;
                rows.suit(name, &fact)?;
                Ok(fact)
            })
            .collect::<Result<_>>()?;
        let given = |input: &str| data.inputs.iter().any(|(name, _)| name == input);
        let inputs = parts[0].1.inputs().iter().map(|&input| parts[0].1.value_name(input));
        if let Some(name) = inputs.clone().find(|&name| name != LABELS && !given(name)) {
            return Err(Error::usage(format!("the model's input '{name}' has no data")));
        }
        let labels = match training.loss {
            Loss::CrossEntropy => {
                let axis = outline.class_axis.expect("a loss of classes has their axis");
                Labels::Classes(outline.output.shape[axis])
            }
            Loss::BceLogits => Labels::Shares,
            _ => Labels::Any,
        };
        data.labels.check_labels(labels)?;
        let names = parts.iter().map(|(name, _)| *name).collect();
        let all = parts.into_iter().chain([("evaluate", evaluate)]);
        let session = Session::new(options.job(all, &device), device, &|_, _| {})?;
        let own = Own::of(&session)?;
        let facts: Vec<Fact> = facts.into_iter().map(|fact| own.part(fact)).collect();
        // A device with memory of its own plans that alone: the slot is the host's.
        let host = host_bytes(session.plan());
        let slot = session.with(|exec| match exec.take_prefetch() {
            Some(planned) => Ok(Some(Box::new(planned) as Box<dyn HostMemory>)),
            None if host == 0 => Ok(None),
            None => exec.backend_mut().host_memory(host - PREFETCH_STACK, "the next rows").map(Some),
        })?;
        let ahead = slot.map(|slot| Prefetch::new(&facts, slot));
        init.unknown.retain(|(name, _)| outline.trained.contains(name));
        let undrawn = std::mem::take(&mut init.unknown);
        let trainer = Trainer {
            session,
            model,
            training,
            outline,
            undrawn,
            names: data.columns().map(|(name, _)| name.to_owned()).collect(),
            labels,
            facts,
            own,
            ahead,
            host_bytes: host,
            parts: names,
            batch,
            fingerprint,
        };
        if let Some(seed) = seed {
            trainer.draw(&init, seed)?;
        }
        Ok(trainer)
    }

    /// Gives the states of drawn weights their elements, and their moving averages the same.
    fn draw(&self, init: &Init, seed: u64) -> Result<()> {
        let states = self.states();
        for drawn in &init.drawn {
            let average = format!("ema/{}", drawn.name);
            let names = [&drawn.name, &average].into_iter().filter(|name| states.contains(*name));
            let mut names = names.peekable();
            if names.peek().is_some() {
                let tensor = drawn.tensor(seed)?;
                names.try_for_each(|name| self.session.set_state(name, &tensor))?;
            }
        }
        Ok(())
    }

    /// The names of all states.
    fn states(&self) -> HashSet<String> {
        self.session.state_names().into_iter().collect()
    }

    /// True if it is so on any rank of the mesh.
    ///
    /// # Errors
    /// When a rank is gone or late.
    pub fn any(&self, here: bool) -> Result<bool> {
        let Some(ranks) = self.session.ranks() else { return Ok(here) };
        Ok(ranks.gather(&[u8::from(here)])?.iter().any(|there| there == &[1]))
    }

    /// The session that runs the steps.
    pub fn session(&self) -> &Session {
        &self.session
    }

    /// Bytes of the host beside the plan: on a device with memory of its own, rows are made ready in the host's. On the CPU, they are planned.
    pub fn host_bytes(&self) -> u64 {
        self.host_bytes
    }

    /// The type in which values are computed. On the CPU it is `f32`, whatever was asked for.
    pub fn precision(&self) -> DType {
        self.training.precision
    }

    /// The facts that must be the same for a training to go on: the model, the method, and the rows and their order.
    pub fn identity(&self, data: &Data, seed: Option<u64>) -> Value {
        let mut identity = json!(self.training);
        if self.training.rate.schedule == Schedule::Constant {
            // It depends on no number of steps.
            identity["rate"]["steps"] = Value::Null;
        }
        // The axis that is taken, where it is not the usual one, whoever says so.
        let axis = self.outline.class_axis.filter(|axis| usual_class_axis(&self.outline.output) != Some(*axis));
        identity["class_axis"] = json!(axis);
        identity["batch"] = self.batch.into();
        identity["rows"] = data.labels.count().into();
        identity["shuffled by seed"] = json!(seed);
        identity["graph"] = self.fingerprint.clone().into();
        identity
    }

    /// True if a training cannot go on behind a step: its loss is not finite, or the norm of its gradients. With loss scaling, a norm that is not
    /// finite only makes the next step use a smaller factor.
    pub fn refuses(&self, shown: &Shown) -> bool {
        let skips = self.training.scales_loss();
        !shown.loss.is_finite() || !skips && !shown.norm.is_finite()
    }

    /// The names of the weights that are trained.
    pub fn trained(&self) -> &[String] {
        &self.outline.trained
    }

    /// True if no weight changes before the norm of all gradients is known: they are clipped by it, or are those of a scaled loss.
    pub fn waits_for_norm(&self) -> bool {
        self.training.waits_for_norm()
    }

    /// What is trained, and how the model is read.
    pub fn outline(&self) -> &Outline {
        &self.outline
    }

    /// Weights that were to be drawn, but begin with the elements of the model, because no rule draws what this operator reads.
    pub fn undrawn(&self) -> &[(String, &'static str)] {
        &self.undrawn
    }

    /// Steps per epoch: whole batches.
    pub fn steps_per_epoch(&self, data: &Data) -> u64 {
        data.steps_per_epoch(self.batch)
    }

    /// Runs the step with this number, counted from 0. If its loss is not finite, no weight changes, and nothing that the optimizer keeps. Nor
    /// does an element whose gradient is not finite; nothing does, if all gradients [wait](Self::waits_for_norm) for their norm.
    ///
    /// # Errors
    /// When a row is not finite, or the device fails.
    pub fn step(&mut self, data: &Data, number: u64, seed: Option<u64>) -> Result<Shown> {
        let mut shown = [[0u8; 4]; 3];
        let waited = self.parts(data, number, seed, Some(&mut shown))?;
        let [loss, rate, norm] = shown.map(f32::from_le_bytes);
        Ok(Shown { loss, rate, norm, waited })
    }

    /// As [`step`](Self::step), but its figures are not read, and so not waited for. If its loss is not finite, nobody learns it. Returns
    /// how long it has waited for its rows.
    ///
    /// # Errors
    /// As [`step`](Self::step).
    pub fn unseen_step(&mut self, data: &Data, number: u64, seed: Option<u64>) -> Result<Duration> {
        self.parts(data, number, seed, None)
    }

    /// Runs the parts of a step, and reads the figures of the last one if that is wanted. Returns how long they have waited for their rows.
    fn parts(
        &mut self,
        data: &Data,
        number: u64,
        seed: Option<u64>,
        mut shown: Option<&mut [[u8; 4]; 3]>,
    ) -> Result<Duration> {
        let mut waited = Duration::ZERO;
        let parts = self.training.accumulate;
        for part in 0..parts {
            let next = if part + 1 < parts { (number, part + 1) } else { (number + 1, 0) };
            let [batch, next] = [(number, part), next].map(|(number, part)| self.batch(data, number, part, seed));
            let program = self.program(part);
            let shown = shown.as_deref_mut().filter(|_| part + 1 == parts);
            waited += self.run(data, batch, Some(next), program, ["loss", "lr", "grad_norm"], shown)?;
        }
        Ok(waited)
    }

    /// The first value of a step that is not finite, found by running the step again on the same rows. Its weights are still those of the first
    /// time, but for elements that had a finite gradient. With accumulation, running statistics and Dropouts have gone on in the parts that were finite. `None` if all values are finite this time.
    ///
    /// # Errors
    /// As [`step`](Self::step).
    pub fn not_finite(&mut self, data: &Data, number: u64, seed: Option<u64>) -> Result<Option<NotFinite>> {
        if self.session.plan().mesh.is_some() {
            // Ranks stop at different steps, and would wait for each other.
            return Ok(None);
        }
        for part in 0..self.training.accumulate {
            let batch = self.batch(data, number, part, seed);
            let program = self.session.program(self.program(part))?;
            let takes = |name: &str| program.plan().inputs.iter().any(|port| port.name == name);
            let columns = data.columns().zip(&self.facts).filter(|((name, _), _)| takes(name));
            let inputs = columns.map(|((name, rows), fact)| {
                let mut bytes = vec![0; fact.shape.numel() * fact.dtype.size()];
                batch.fill(rows, name == LABELS, fact, &mut bytes)?;
                Ok((name, Tensor::new(fact.dtype, fact.shape.clone(), bytes)?))
            });
            if let Some(found) = program.first_not_finite(&inputs.collect::<Result<Vec<_>>>()?)? {
                return Ok(Some(found));
            }
        }
        Ok(None)
    }

    /// The rows of a part of a step.
    fn batch(&self, data: &Data, number: u64, part: usize, seed: Option<u64>) -> Batch {
        let per_epoch = self.steps_per_epoch(data);
        let order = Order::new(data.labels.count(), seed, number / per_epoch);
        let count = self.batch / self.training.accumulate;
        Batch { order, first: (number % per_epoch) as usize * self.batch + part * count, count }
    }

    /// The program of a part of a step.
    fn program(&self, part: usize) -> &'static str {
        match part {
            0 => self.parts[0],
            part if part + 1 == self.training.accumulate => self.parts.last().expect("there is a part"),
            _ => "next",
        }
    }

    /// Refuses data that [`evaluate`](Self::evaluate) would refuse, or whose labels are none that the loss can judge.
    ///
    /// # Errors
    /// The file, what was expected, and what was found.
    pub fn admits(&self, data: &Data) -> Result<()> {
        self.fits(data)?;
        data.labels.check_labels(self.labels)
    }

    /// Refuses data of other columns than the training's. Returns the number of rows.
    fn fits(&self, data: &Data) -> Result<usize> {
        let rows = data.check()?;
        ensure(data.columns().map(|(name, _)| name).eq(self.names.iter().map(String::as_str)), || {
            let found: Vec<_> = data.inputs.iter().map(|(name, _)| name.clone()).collect();
            let quoted = |names: &[String]| super::quoted(names.iter().map(String::as_str));
            let [expected, found] = [&self.names[..self.names.len() - 1], &found].map(quoted);
            Error::usage(format!("the data to validate on: expected inputs {expected}, found {found}"))
        })?;
        for ((name, rows), fact) in data.columns().zip(&self.facts) {
            rows.suit(name, fact)?;
        }
        Ok(rows)
    }

    /// True if no label of a step counts, so that its loss is 0 / 0.
    pub fn ignores_all(&self, data: &Data, number: u64, seed: Option<u64>) -> bool {
        let per_epoch = self.steps_per_epoch(data);
        let order = Order::new(data.labels.count(), seed, number / per_epoch);
        let first = (number % per_epoch) as usize * self.batch;
        let mut rows = (first..first + self.batch).map(|place| order.row(place));
        self.training.loss == Loss::CrossEntropy && rows.all(|row| data.labels.is_ignored(row))
    }

    /// The first trained weight with an element that is not finite.
    ///
    /// # Errors
    /// When the device fails.
    pub fn broken_weight(&self) -> Result<Option<&str>> {
        for name in &self.outline.trained {
            if self.session.state(name)?.to_f64().iter().any(|element| !element.is_finite()) {
                return Ok(Some(name));
            }
        }
        Ok(None)
    }

    /// The loss and the accuracy on other data: means over all of its rows.
    ///
    /// # Errors
    /// When the data does not fit the model, or the device fails.
    pub fn evaluate(&mut self, data: &Data) -> Result<Score> {
        let rows = self.fits(data)?;
        let micro = self.batch / self.training.accumulate;
        let (mut loss, mut count, mut correct) = (0.0, 0.0, 0.0);
        let order = Order::new(rows, None, 0);
        let judges_classes = self.training.loss == Loss::CrossEntropy;
        let batch = |first: usize| Batch { order, first, count: micro.min(rows - first) };
        for first in (0..rows).step_by(micro) {
            let mut shown = [[0u8; 4]; 3];
            let next = (first + micro < rows).then(|| batch(first + micro));
            self.run(data, batch(first), next, "evaluate", ["loss", "count", "correct"], Some(&mut shown))?;
            let [own, number, right] = shown.map(|bytes| f64::from(f32::from_le_bytes(bytes)));
            // The labels of classes tell which count. Of other losses, all elements of a row do.
            let share = if judges_classes { 1.0 } else { batch(first).count as f64 / micro as f64 };
            (loss, count, correct) = (loss + own, count + number * share, correct + right);
        }
        Ok(Score { loss: loss / count, accuracy: judges_classes.then_some(correct / count) })
    }

    /// Runs a program on some rows, and has the next ones made ready meanwhile. Reads the named outputs if that is wanted. Returns how long it
    /// has waited for the rows.
    fn run(
        &mut self,
        data: &Data,
        batch: Batch,
        next: Option<Batch>,
        program: &str,
        names: [&str; 3],
        shown: Option<&mut [[u8; 4]; 3]>,
    ) -> Result<Duration> {
        let micro = self.batch / self.training.accumulate;
        let Trainer { session, ahead, facts, own, .. } = self;
        let (batch, next) = (own.rows(batch, micro), next.map(|next| own.rows(next, micro)));
        let mut waited = match ahead {
            Some(ahead) => ahead.wait(data.rows(), batch)?,
            None => Duration::ZERO,
        };
        let program = session.program(program)?;
        let takes = |name: &str| program.plan().inputs.iter().any(|port| port.name == name);
        let gives = |name: &str| program.plan().outputs.iter().any(|port| port.name == name);
        program.selected(&[], |exec| {
            if let Some(ahead) = ahead {
                let columns = data.columns().map(|(name, _)| name).zip(ahead.columns());
                let inputs = columns.filter(|(name, _)| takes(name));
                exec.write_in_place(&inputs.map(|(name, (_, bytes))| (name, Place::bytes(bytes))).collect::<Vec<_>>())?;
                if let Some(next) = next {
                    ahead.ask(data.rows(), next);
                }
            } else {
                let start = Instant::now();
                exec.fill_in_place(&mut |input, place| {
                    let column = data.columns().zip(&facts[..]).find(|((name, _), _)| *name == input);
                    let ((_, rows), fact) = column.expect("a trainer has a column for each input");
                    batch.fill(rows, input == LABELS, fact, place)
                })?;
                waited = start.elapsed();
            }
            exec.replay()?;
            let Some(shown) = shown else { return Ok(()) };
            let outputs = names.into_iter().zip(shown).filter(|(name, _)| gives(name));
            exec.read_in_place(&mut outputs.map(|(name, bytes)| (name, Place::bytes_mut(bytes))).collect::<Vec<_>>())
        })??;
        Ok(waited)
    }

    /// The model's file with the weights as they are now: their moving averages, if there are any. It refers to no other file.
    ///
    /// # Errors
    /// When the device fails, or a file with weights that stay is missing.
    pub fn model(&self) -> Result<onnx::proto::ModelProto> {
        let states = self.states();
        let replaced = self.model.replaced(|name| {
            let average = format!("ema/{name}");
            let state = if states.contains(&average) { average } else { name.to_owned() };
            let found = states.contains(&state).then(|| self.session.state(&state)).transpose()?;
            Ok::<Option<Tensor>, Error>(found)
        })?;
        self.model.whole(replaced)
    }

    /// Writes the trained model as an .onnx file.
    ///
    /// # Errors
    /// As [`model`](Self::model), and when it cannot be written.
    pub fn save(&self, path: &Path) -> Result<()> {
        self.check_model()?;
        onnx::write(self.model()?, path, None)
    }

    /// Refuses a model that could not be [written](Self::model) when it is trained.
    ///
    /// # Errors
    /// A file with weights that stay is missing.
    pub fn check_model(&self) -> Result<()> {
        let states = self.states();
        let none = || Tensor::new(DType::U8, [0], Vec::new());
        let rest = self.model.replaced(|name| states.contains(name).then(none).transpose())?;
        self.model.whole(rest).map(drop)
    }
}
