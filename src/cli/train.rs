//! `train`: trains the weights of a model's file.

use super::args::{self, Axes, On, limit};
use super::method::{self, Method};
use super::modules::modules;
use super::ranks::Meshed;
use super::{Failure, line, open, stop};
use crate::advise::Trained as Case;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::figures::count as counted;
use crate::file;
use crate::onnx::{self, Model};
use crate::pass::offload::Offload;
use crate::plan::Recipe;
use crate::report::picture::{self, About};
use crate::report::{self, human};
use crate::session::{self, Options};
use crate::shape::Extent;
use crate::train::Training;
use crate::train::checkpoint::{Folder, Place};
use crate::train::classes::{Classes, States};
use crate::train::curve::Point;
use crate::train::data::Rows;
use crate::train::losses::Losses;
use crate::train::run::{Data, Score, Shown, Trainer};
use clap::{ArgGroup, Args};
use serde_json::{Value, json};
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The records of `--json`, as `schema.rs` reads them.
pub(super) const SCHEMA: &str = "
train
  model text
  file text
  device text
  steps int
  loss number|null
  planned_bytes int
  allocated_bytes int
  arena_bytes int
  classes classes
  states states
  recompute recompute
  host_bytes int
  seconds number
  wait_seconds number
  trained [text]
  valid_loss? number|null
  valid_accuracy? number|null
";

/// The settings of a training as checkpoints have them, each with its flag or in words.
const SETTINGS: &[(&str, &str)] = &[
    ("batch", "--batch"),
    ("loss", "--loss"),
    ("smoothing", "--label-smoothing"),
    ("optimizer", "--optimizer"),
    ("optimizer.momentum", "--momentum"),
    ("optimizer.nesterov", "--nesterov"),
    ("optimizer.beta1", "--beta1"),
    ("optimizer.beta2", "--beta2"),
    ("optimizer.eps", "--eps"),
    ("rate.most", "--lr"),
    ("rate.schedule", "--schedule"),
    ("rate.warmup", "--warmup"),
    ("rate.steps", "the number of steps"),
    ("decay", "--weight-decay"),
    ("decay_dims", "--decay-dims"),
    ("clip", "--clip-norm"),
    ("accumulate", "--accumulate"),
    ("ema", "--ema"),
    ("freeze", "--freeze"),
    ("only", "--train-only"),
    ("class_axis", "--class-axis"),
    ("seed", "--seed"),
    ("precision", "--precision"),
    ("kept", "the type that is kept for the backward computation"),
    ("rows", "the number of rows of the data"),
];

#[derive(Args)]
#[command(group = ArgGroup::new("length").required(true))]
#[command(mut_arg("loss", |flag| flag.required(true)))]
#[command(mut_arg("lr", |flag| flag.required(true)))]
pub(super) struct Train {
    /// The model: an .onnx or .onnxtxt file, as it was exported for inference.
    model: PathBuf,
    /// Begin with the elements of this safetensors file, for the initializers that have the names of its tensors.
    #[arg(long, value_name = "FILE")]
    weights: Option<PathBuf>,
    /// The data: an array with a row per example. FILE is an .npy file; an array of an archive, FILE.npz:NAME; or a folder of such files, whose
    /// rows come one after another, part2 before part10. A model of several inputs takes NAME=FILE for each.
    #[arg(long, value_name = "FILE", required = true)]
    data: Vec<String>,
    /// The right answers: a FILE as of --data, with a row per example.
    #[arg(long, value_name = "FILE")]
    labels: PathBuf,
    #[command(flatten)]
    method: Method,
    /// Batch size: rows per update.
    #[arg(long, value_name = "B", value_parser = args::rows)]
    batch: u64,
    /// The number of steps: updates of the weights.
    #[arg(long, value_name = "N", group = "length")]
    steps: Option<u64>,
    /// The number of times that all rows are used. The rows of a last batch that is not full are left out.
    #[arg(long, value_name = "E", group = "length")]
    epochs: Option<u64>,
    /// Data to validate on after each epoch: as --data.
    #[arg(long, value_name = "FILE", requires = "valid_labels")]
    valid: Vec<String>,
    /// The right answers of the data to validate on: as --labels.
    #[arg(long, value_name = "FILE", requires = "valid")]
    valid_labels: Option<PathBuf>,
    /// Take the rows in the order of the files.
    #[arg(long)]
    no_shuffle: bool,
    /// Draw the weights anew by PyTorch's rules for their layers, with --seed, before the first step. Frozen ones stay as they are. Their
    /// elements need not be in the file.
    #[arg(long)]
    init: bool,
    /// Seed of the order of the rows, of what Dropout drops, and of --init.
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Write a JSON object per step: step, loss, lr, grad_norm, allocated_bytes, ms, and wait_ms, the part of it that the step waited for its
    /// rows. It changes neither the plan nor its bytes.
    #[arg(long, value_name = "FILE")]
    log: Option<PathBuf>,
    /// Read the loss every N steps, before a checkpoint, and behind each epoch: until then no figure is waited for. The loss of an epoch is the mean of
    /// the steps that were read. A step whose loss is not finite changes no weight: if it is not read, the first read step behind it that is not
    /// finite either is named instead. --log has the steps that are read, counted from 0, with the mean time of those since the last.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    log_every: u64,
    /// Draw the losses over the steps, and the memory of a step, as one HTML file that needs no network.
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Write checkpoints to this folder: all states, and the place in the training. The last two stay, and the one with the least validation
    /// loss, best.safetensors.
    #[arg(long, value_name = "DIR")]
    checkpoint: Option<PathBuf>,
    /// Write a checkpoint after every N steps, beside one at the end. Without it, after each epoch.
    #[arg(long, value_name = "N", requires = "checkpoint", value_parser = clap::value_parser!(u64).range(1..))]
    save_every: Option<u64>,
    /// Go on from the last checkpoint of the folder, bit for bit as if the training had not been interrupted. Without a checkpoint there, it
    /// begins anew.
    #[arg(long, requires = "checkpoint")]
    resume: bool,
    /// Write the trained model: the file with new weights under their names. It is whole: all in FILE, or, of 2 GB and more, in FILE and
    /// FILE.data.
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Let --output replace the model that is read.
    #[arg(long, requires = "output")]
    overwrite: bool,
    /// Give a named dim its extent, if the data does not.
    #[arg(long = "set", value_name = "DIM=N", value_parser = args::binding)]
    dims: Vec<(String, Extent)>,
    /// Give an input's shape, such as x=8x3x64x64, in the place of the sizes that the file fixes, as `plan --shape` does. The first axis has the
    /// rows of one part of a batch.
    #[arg(long = "shape", value_name = "INPUT=NxN", value_parser = args::shape)]
    shapes: Vec<Axes>,
    /// Refuse a plan that takes more memory than this, with exit code 2. Sizes are as of `plan --memory-limit`.
    #[arg(long, value_name = "SIZE", value_parser = limit, allow_hyphen_values = true)]
    memory_limit: Option<u64>,
    /// Keep data in pinned memory of the host, from which planned copies bring it shortly before it is read: what is kept beside the weights
    /// (states), the weights, or all. Limits are of the device. For --backend cuda.
    #[arg(long, value_enum, value_name = "WHAT")]
    offload: Option<args::Offloaded>,
    /// Threads of the CPU backend. Default: one per core of this machine.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=4096))]
    threads: Option<u16>,
    #[command(flatten)]
    pub(super) several: Meshed,
    #[command(flatten)]
    on: On,
}

impl Train {
    /// What is printed, and the exit code: of a training that was stopped, that of the signal.
    pub(super) fn run(&self, json: bool) -> Result<(String, u8), Failure> {
        let files = [("--log", &self.log), ("--html", &self.html), ("--output", &self.output)];
        let files = files.into_iter().filter_map(|(flag, path)| Some((flag, path.as_deref()?)));
        files.clone().try_for_each(|(_, path)| args::has_place(path))?;
        let model = onnx::load_weighed(&self.model, self.weights.as_deref());
        let model = model.map_err(|e| if self.weights.is_none() { open::not_a_model(&self.model, e) } else { e })?;
        self.check_outputs(&model, files)?;
        self.shapes.iter().try_for_each(|axes| axes.suits(&model)).map_err(|e| e.in_file(&self.model))?;
        let first = model.first_input().unwrap_or_default().to_owned();
        let data = rows(&self.data, &self.labels, &first)?;
        let valid = self.valid_labels.as_ref().map(|labels| rows(&self.valid, labels, &first)).transpose()?;
        let count = data.check()? as u64;
        let per_epoch = data.steps_per_epoch(self.batch as usize);
        let steps = self.steps.unwrap_or_else(|| self.epochs.unwrap_or(1).saturating_mul(per_epoch));
        let norm_groups = self.method.norm_groups(&self.several)?;
        if self.offload.is_some() && self.on.backend != args::Backend::Cuda {
            return Err(Error::usage(
                "--offload: expected --backend cuda, which has memory beside the host's".to_owned(),
            )
            .into());
        }
        let training = Training { seed: self.seed, norm_groups, ..self.method.training(steps)? };
        let precision = training.precision;
        let folder = self.folder()?;
        let mut trainer = self.trainer(model, &data, training, folder.as_ref(), json)?;
        if self.output.is_some() {
            trainer.check_model()?;
        }
        valid.as_ref().map_or(Ok(()), |valid| trainer.admits(valid))?;
        if !json && self.several.is_first() {
            let rest = match count % self.batch {
                0 => String::new(),
                rest => format!(", {} left out of each", counted(rest, "row")),
            };
            let (weights, bytes) = (trainer.trained().len(), human(trainer.session().plan().bytes()));
            let [weights, rows, steps] = [(weights as u64, "weight"), (count, "row"), (per_epoch, "step")]
                .map(|(number, noun)| counted(number, noun));
            eprintln!("{weights}, {rows}, {steps} per epoch{rest}; {bytes} planned");
            notes(&trainer, precision);
            let case = (self.method.accumulate > 1).then(|| onnx::load_weighed(&self.model, self.weights.as_deref()));
            let case = case.and_then(|model| self.case(&model.ok()?, &data, &self.options()));
            let bytes = trainer.session().plan().bytes();
            if let Some(Ok(Some(whole))) = case.map(|case| case.undivided(bytes, self.memory_limit)) {
                eprintln!("  {}", report::undivided(bytes, whole));
            }
        }
        let seed = (!self.no_shuffle).then_some(self.seed);
        let mut place = Place { step: 0, best: None, method: trainer.identity(&data, seed) };
        if let Some(folder) = folder.as_ref().filter(|_| self.resume) {
            if let (Some(path), false) = (&self.checkpoint, folder.is_begun()?) {
                tracing::warn!("{} has no checkpoint: the training begins at step 1", path.display());
            }
            place = folder.resume(trainer.session(), &place, SETTINGS)?.unwrap_or(place);
            if !json && self.several.is_first() {
                eprintln!("{} of {steps} steps were done", place.step);
            }
        }
        let log = self
            .log
            .as_deref()
            .filter(|_| self.several.is_first())
            .map(|path| Log::open(path, place.step))
            .transpose()?;
        let seen = Seen::default();
        let mut course = Course { data, valid, folder, seed, place, steps, per_epoch, log, kept: None, seen };
        self.steps(&mut course, &mut trainer, json)?;
        if let Some(path) = &self.output {
            let model = trainer.model()?;
            if self.several.is_first() {
                onnx::write(model, path, None)?;
            }
        }
        self.draw(&trainer, &course.seen.losses)?;
        let written = self.written(&course);
        let text = if json {
            // Where stderr is closed, nobody waits for it.
            let _ = write!(std::io::stderr(), "{}", report::plain(&written));
            self.record(&trainer, &course)
        } else {
            format!("{}: {}{written}", self.model.display(), summary(&trainer, &course))
        };
        Ok((text, if course.is_stopped() { stop::exit_code() } else { 0 }))
    }

    /// What the training wrote: a line for each file.
    fn written(&self, course: &Course) -> String {
        let files = [
            ("the trained model", self.output.as_deref()),
            ("the page", self.html.as_deref()),
            ("the log", self.log.as_deref()),
            ("the last checkpoint", course.kept.as_deref()),
        ];
        let files = files.into_iter().filter_map(|(what, path)| Some((what, path?)));
        files.map(|(what, path)| format!("wrote {}: {what}\n", path.display())).collect()
    }

    /// Refuses files to write that are read, or the same, before the work that they are to hold. --overwrite lets the trained model take the
    /// place of the one that is read.
    fn check_outputs<'a>(
        &'a self,
        model: &Model,
        files: impl Iterator<Item = (&'static str, &'a Path)> + Clone,
    ) -> Result<()> {
        let own = model.files();
        let arrays = args::arrays(&self.data).chain(args::arrays(&self.valid));
        let labels = [&self.labels].into_iter().chain(&self.valid_labels).map(|path| path.display().to_string());
        let labels: Vec<String> = labels.collect();
        let read: Vec<PathBuf> = arrays.chain(args::arrays(&labels)).chain(self.weights.clone()).collect();
        args::outputs(files.clone(), &read)?;
        let Some(output) = self.output.as_deref() else { return args::outputs(files, &own) };
        args::outputs(files.filter(|(flag, _)| *flag != "--output"), &own)?;
        let replaces = args::outputs([("--output", output)], [&self.model]);
        let data = onnx::data_file(output);
        match (self.overwrite, replaces) {
            (false, Err(error)) => Err(Error::usage(format!("{error}; --overwrite replaces the model"))),
            (true, Err(_)) => Ok(()),
            (_, Ok(())) => args::outputs([("--output", output), ("the data of --output", &data)], &own),
        }
    }

    /// The folder of checkpoints, which is empty unless the training goes on.
    fn folder(&self) -> Result<Option<Folder>> {
        let folder = self.checkpoint.as_deref().map(Folder::open).transpose()?;
        let is_begun = folder.as_ref().filter(|_| !self.resume).map(Folder::is_begun).transpose()?;
        if let (Some(path), Some(true)) = (&self.checkpoint, is_begun) {
            let what =
                "it has checkpoints of a training: add --resume to go on from the last one, or name another folder";
            return Err(Error::File { path: path.clone(), what: what.to_owned(), source: None });
        }
        Ok(folder)
    }

    fn trainer(
        &self,
        model: Model,
        data: &Data,
        training: Training,
        folder: Option<&Folder>,
        json: bool,
    ) -> Result<Trainer, Failure> {
        let options = self.options();
        let resumed = folder.filter(|_| self.resume).map(Folder::is_begun).transpose()?.unwrap_or(false);
        let batch = self.batch as usize;
        let trainer = if self.init && !resumed {
            Trainer::drawn(model, data, batch, training, &options, self.seed)
        } else {
            Trainer::new(model, data, batch, training, &options)
        };
        trainer.map_err(|error| {
            let file = onnx::load(&self.model);
            method::refuse(error.in_file(&self.model), json, || self.case(file.as_ref().ok()?, data, &options))
        })
    }

    /// The options of the session.
    fn options(&self) -> Options {
        Options {
            backend: self.on.backend.into(),
            device: self.several.device(self.on.device.as_deref(), self.on.backend == args::Backend::Cuda),
            dims: self.dims.iter().cloned().chain(self.shapes.iter().flat_map(Axes::dims)).collect(),
            threads: self.several.threads(self.threads),
            mesh: self.several.mesh.clone(),
            shards: self.several.shards.clone(),
            shard_states: self.several.kept(),
            ranks: self.several.ranks.clone(),
            memory_limit: self.memory_limit,
            recipe: Recipe { offload: self.offload.map_or(Offload::None, Offload::from), ..Recipe::default() },
            ..Options::default()
        }
    }

    /// Runs the steps that are left, until the last one or Ctrl-C.
    fn steps(&self, course: &mut Course, trainer: &mut Trainer, json: bool) -> Result<()> {
        let bytes = human(trainer.session().plan().bytes());
        let bar = args::progress("loss");
        bar.set_length(course.steps);
        bar.set_position(course.place.step);
        stop::catch();
        let (begin, first) = (Instant::now(), course.place.step);
        let mut start = begin;
        for step in first..course.steps {
            if course.seen.unread == 0 {
                start = Instant::now();
            }
            let saves = self.save_every.is_some_and(|every| (step + 1).is_multiple_of(every));
            if (step + 1).is_multiple_of(self.log_every) || saves || course.would_end_epoch(step + 1) {
                let shown = trainer.step(&course.data, step, course.seed)?;
                // Those before it that were not read are over now, too.
                let took = start.elapsed() / (course.seen.unread + 1) as u32;
                if let Some(log) = &mut course.log {
                    log.write(step, &shown, took, trainer.session().usage().bytes)?;
                }
                if trainer.refuses(&shown) {
                    return Err(refusal(trainer, &course.data, step, course.seed, &shown)?);
                }
                course.push(&shown);
                let elapsed = begin.elapsed();
                let (loss, rate, share) = (shown.loss, shown.rate, percent(course.seen.waited, elapsed));
                let pace = (course.place.step - first) as f64 / elapsed.as_secs_f64();
                bar.set_message(format!(
                    "loss {loss:.4}  lr {rate:.1e}  {pace:.1} steps/s  data {share:.0} %  {bytes}"
                ));
            } else {
                let waited = trainer.unseen_step(&course.data, step, course.seed)?;
                course.pass(waited);
            }
            bar.inc(1);
            if course.ends_epoch() {
                let (sum, steps) = std::mem::take(&mut course.seen.epoch);
                let found = course.valid.as_ref().map(|valid| trainer.evaluate(valid)).transpose()?;
                // A bar that is seen has the loss already.
                if !json && self.several.is_first() && (found.is_some() || bar.is_hidden()) {
                    let epoch = (step + 1).div_ceil(course.per_epoch);
                    args::above(&bar, &epoch_line(epoch, sum / steps as f64, found.as_ref(), begin.elapsed()));
                }
                found.into_iter().for_each(|found| course.validated(found));
            }
            let stops = trainer.any(stop::is_asked())?;
            let is_due = self.save_every.map_or(course.ends_epoch(), |every| (step + 1).is_multiple_of(every));
            course.keep(trainer, is_due || stops || step + 1 == course.steps)?;
            if stops {
                break;
            }
        }
        bar.finish_and_clear();
        if first >= course.steps {
            // No step was left to do: the states are those behind the last one.
            course.seen.score = course.valid.as_ref().map(|valid| trainer.evaluate(valid)).transpose()?;
        }
        course.log.as_mut().map_or(Ok(()), Log::flush)?;
        course.seen.seconds = begin.elapsed().as_secs_f64();
        Ok(())
    }

    /// The record that `--json` prints.
    fn record(&self, trainer: &Trainer, course: &Course) -> String {
        let plan = trainer.session().plan();
        let Point { arena_bytes, recompute, .. } = Point::of(plan, self.method.accumulate as usize);
        let mut record = json!({
            "model": plan.programs[0].graph_name(), "file": self.model, "device": trainer.session().device(), "steps": course.place.step, "loss": course.seen.loss,
            "planned_bytes": plan.bytes(), "allocated_bytes": trainer.session().usage().bytes,
            "arena_bytes": arena_bytes, "classes": Classes::of(plan), "states": States::of(plan, trainer.trained()),
            "recompute": recompute, "host_bytes": trainer.host_bytes(), "seconds": course.seen.seconds,
            "wait_seconds": course.seen.waited.as_secs_f64(), "trained": trainer.trained(),
        });
        if let Some(score) = course.seen.score {
            record["valid_loss"] = score.loss.into();
            record["valid_accuracy"] = score.accuracy.into();
        }
        line(&record)
    }

    /// The training as it is planned; `None` if that takes more than the data's shapes.
    fn case(&self, model: &Model, data: &Data, options: &Options) -> Option<Case> {
        let target = session::open(options).ok()?.target(options.mesh.as_ref());
        let mut dims = options.fixed()?;
        let of_data = data.inputs.iter().flat_map(|(name, rows)| model.dims_of(name, rows.shape()));
        let is_open = |dims: &[(String, usize)], dim: &str| !dims.iter().any(|(known, _)| known == dim);
        for (dim, extent) in of_data.filter(|(dim, _)| model.batch_dim().as_ref() != Some(dim)) {
            if is_open(&dims, &dim) {
                dims.push((dim, extent));
            }
        }
        let labels = Some(data.labels.shape().clone());
        let training = Training { labels, ..self.method.training(1).ok()?.on(&target) };
        let model = model.clone();
        let (batch, recipe, sharding) = (self.batch as usize, options.recipe, options.sharding());
        Some(Case { model, dims, batch, training, target, recipe, runs: 1, sharding })
    }

    /// Draws the run, if that is wanted.
    fn draw(&self, trainer: &Trainer, losses: &Losses) -> Result<()> {
        let Some(path) = self.html.as_ref().filter(|_| self.several.is_first()) else { return Ok(()) };
        let subject = format!("{} ({})", self.model.display(), self.method.told(self.batch));
        let modules = modules(&onnx::load(&self.model)?.proto);
        let about = About { subject: &subject, limit: self.memory_limit, modules: Some(&modules), ..About::default() };
        let page = picture::training_page(trainer.session().plan(), &about, trainer.trained(), Some(losses));
        file::write_whole(path, "write the page", |out| out.write_all(page.as_bytes()))
    }
}

/// A training on its way.
struct Course<'a> {
    data: Data,
    valid: Option<Data>,
    folder: Option<Folder>,
    /// Of the order of the rows.
    seed: Option<u64>,
    place: Place,
    /// The number of steps after which it is done.
    steps: u64,
    per_epoch: u64,
    log: Option<Log<'a>>,
    /// The last checkpoint that was written.
    kept: Option<PathBuf>,
    seen: Seen,
}

/// The figures of a run's steps.
#[derive(Default)]
struct Seen {
    losses: Losses,
    /// The loss of the last step, if one ran.
    loss: Option<f32>,
    /// The sum of the losses of the epoch that were read so far, and their number.
    epoch: (f64, u64),
    /// The number of steps since a loss was read.
    unread: u64,
    /// The last validation.
    score: Option<Score>,
    /// The time that its steps waited for their rows, and the time of all.
    waited: Duration,
    seconds: f64,
}

impl Course<'_> {
    /// Counts a step whose figures were read. Its loss stands for those before it that were not.
    fn push(&mut self, shown: &Shown) {
        self.pass(shown.waited);
        self.seen.loss = Some(shown.loss);
        self.seen.epoch.0 += f64::from(shown.loss);
        self.seen.epoch.1 += 1;
        (0..std::mem::take(&mut self.seen.unread)).for_each(|_| self.seen.losses.push(shown.loss));
    }

    /// Counts a step.
    fn pass(&mut self, waited: Duration) {
        self.place.step += 1;
        self.seen.unread += 1;
        self.seen.waited += waited;
    }

    fn validated(&mut self, score: Score) {
        self.seen.losses.validated(score.loss, score.accuracy);
        self.seen.score = Some(score);
    }

    /// True if steps are left: the training was stopped.
    fn is_stopped(&self) -> bool {
        self.place.step < self.steps
    }

    /// True if the last step ended an epoch, or the training.
    fn ends_epoch(&self) -> bool {
        self.would_end_epoch(self.place.step)
    }

    /// True if an epoch, or the training, ends behind so many steps.
    fn would_end_epoch(&self, step: u64) -> bool {
        step.is_multiple_of(self.per_epoch.max(1)) || step == self.steps
    }

    /// Writes the checkpoint with the least validation loss, if the last step gave it, and the one that `is_due`.
    fn keep(&mut self, trainer: &Trainer, is_due: bool) -> Result<()> {
        let Some(folder) = &self.folder else { return Ok(()) };
        let is_least = |loss: f64| loss.is_finite() && self.place.best.is_none_or(|best| loss < best);
        if let Some(score) = self.seen.score.filter(|score| self.ends_epoch() && is_least(score.loss)) {
            self.place.best = Some(score.loss);
            folder.save_best(trainer.session(), &self.place)?;
        }
        if is_due {
            // The log has all steps before a checkpoint, whatever ends the process.
            self.log.as_mut().map_or(Ok(()), Log::flush)?;
            self.kept = Some(folder.save(trainer.session(), &self.place)?);
        }
        Ok(())
    }
}

/// The file with an object per step.
struct Log<'a> {
    path: &'a Path,
    file: BufWriter<File>,
}

impl<'a> Log<'a> {
    /// Opens the log for the steps from `first` on. What an interrupted training wrote of the steps before stays.
    fn open(path: &'a Path, first: u64) -> Result<Log<'a>> {
        let fail = |e| Error::file(path, "write the log", e);
        if first == 0 {
            return Ok(Log { path, file: BufWriter::new(File::create(path).map_err(fail)?) });
        }
        let before = std::fs::read_to_string(path).unwrap_or_default();
        let is_before = |text: &&str| {
            let step = serde_json::from_str::<Value>(text).ok().and_then(|record| record["step"].as_u64());
            step.is_some_and(|step| step < first)
        };
        let mut before = before.lines().filter(is_before);
        file::write_whole(path, "write the log", |out| before.try_for_each(|text| writeln!(out, "{text}")))?;
        Ok(Log { path, file: BufWriter::new(File::options().append(true).open(path).map_err(fail)?) })
    }

    fn write(&mut self, step: u64, shown: &Shown, took: Duration, allocated: u64) -> Result<()> {
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        let record = json!({
            "step": step, "loss": shown.loss, "lr": shown.rate, "grad_norm": shown.norm,
            "allocated_bytes": allocated, "ms": ms(took), "wait_ms": ms(shown.waited),
        });
        writeln!(self.file, "{record}").map_err(|e| Error::file(self.path, "write the log", e))
    }

    /// Hands its lines to the system.
    fn flush(&mut self) -> Result<()> {
        self.file.flush().map_err(|e| Error::file(self.path, "write the log", e))
    }
}

/// Says how the model is trained.
fn notes(trainer: &Trainer, precision: DType) {
    if trainer.precision() != precision {
        eprintln!("  {}", method::wide(trainer.session().device(), precision));
    }
    report::outline(trainer.outline()).iter().for_each(|line| eprintln!("  {line}"));
    for (name, reader) in trainer.undrawn() {
        eprintln!(
            "  not drawn: '{name}': no rule for a weight that {reader} reads; it begins with the file's elements: give the file those \
             that it is to begin with"
        );
    }
}

/// Why a step was refused: its loss, or the norm of its gradients, is not finite.
fn refusal(trainer: &mut Trainer, data: &Data, step: u64, seed: Option<u64>, shown: &Shown) -> Result<Error> {
    let what = if shown.loss.is_finite() {
        format!("the norm of the gradients is {}", shown.norm)
    } else {
        format!("the loss is {}", shown.loss)
    };
    let why = if let Some(name) = trainer.broken_weight()? {
        format!(": weight '{name}' has values that are not finite before this step")
    } else if trainer.ignores_all(data, step, seed) {
        ": no label of its batch counts: all are -100; take a larger --batch, or leave such rows out".to_owned()
    } else {
        // Without a wait for the norm, weights have changed where their gradient is finite.
        let is_changed = shown.loss.is_finite() && !trainer.waits_for_norm();
        let run = if is_changed { "run again after the update, " } else { "" };
        let first = match trainer.not_finite(data, step, seed)? {
            Some(found) => format!("{run}the first value that is not finite is {found}"),
            None => "run again, all values of the step are finite".to_owned(),
        };
        let weights = if is_changed {
            "weights have changed where their gradient is finite; with --clip-norm none changes, and a smaller --lr may help"
        } else {
            "the weights are those before this step; a smaller --lr, or --clip-norm, may help"
        };
        format!("; {first}; {weights}")
    };
    Ok(Error::usage(format!("step {step}: {what}{why}")))
}

/// The text at the end.
fn summary(trainer: &Trainer, course: &Course) -> String {
    let session = trainer.session();
    let valid = course.seen.score.map_or(String::new(), |score| {
        let accuracy = score.accuracy.map_or(String::new(), |share| format!(", accuracy {:.2} %", share * 100.0));
        format!("; validation loss {:.4}{accuracy}", score.loss)
    });
    let Course { place, steps, kept, seen: Seen { seconds, .. }, .. } = course;
    let next = match kept {
        _ if !course.is_stopped() => String::new(),
        Some(path) => format!("go on with --resume: {} has all that is needed\n", path.display()),
        None => "to go on from where a training was stopped, give it --checkpoint DIR\n".to_owned(),
    };
    let steps = if course.is_stopped() {
        format!("stopped after {} of {}", place.step, counted(*steps, "step"))
    } else {
        counted(*steps, "step")
    };
    let loss = course.seen.loss.map_or("no step was left to do".to_owned(), |loss| format!("loss {loss:.4}"));
    let (device, planned, allocated) = (session.device(), human(session.plan().bytes()), human(session.usage().bytes));
    format!("{steps} in {seconds:.1} s on {device}: {loss}{valid}\nplanned {planned}, allocated {allocated}\n{next}")
}

/// Maps the files of data and labels. A file without a name is the first input's.
fn rows(data: &[String], labels: &std::path::Path, first: &str) -> Result<Data> {
    let inputs = data.iter().map(|given| match given.split_once('=') {
        Some((name, path)) => Ok((name.to_owned(), Rows::open(path.as_ref())?)),
        None => Ok((first.to_owned(), Rows::open(given.as_ref())?)),
    });
    let mut inputs = inputs.collect::<Result<Vec<_>>>()?;
    // The data to validate on may name them in another order.
    inputs.sort_by(|(a, _), (b, _)| a.cmp(b));
    if let Some(pair) = inputs.windows(2).find(|pair| pair[0].0 == pair[1].0) {
        return Err(Error::usage(format!(
            "input '{}' has data twice: expected NAME=FILE once for each input",
            pair[0].0
        )));
    }
    Ok(Data { inputs, labels: Rows::open(labels)? })
}

/// A part of a time, in percent.
fn percent(part: Duration, whole: Duration) -> f64 {
    100.0 * part.as_secs_f64() / whole.as_secs_f64().max(f64::MIN_POSITIVE)
}

/// The mean loss of an epoch's steps, what was found behind the last one, and the time since the first step.
fn epoch_line(epoch: u64, loss: f64, score: Option<&Score>, time: Duration) -> String {
    let accuracy = score.and_then(|score| score.accuracy);
    let accuracy = accuracy.map_or(String::new(), |share| format!("  accuracy {:6.2} %", share * 100.0));
    let valid = score.map_or(String::new(), |score| format!("  validation {:8.4}{accuracy}", score.loss));
    format!("epoch {epoch:4}  loss {loss:8.4}{valid}  {:7.1} s", time.as_secs_f64())
}
