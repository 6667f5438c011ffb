//! `train`: trains the weights of a model's file.

use super::args::{self, On, limit};
use super::method::{self, Method};
use super::{Failure, line, stop};
use crate::advise::Trained as Case;
use crate::error::{Error, Result};
use crate::file;
use crate::onnx::{self, Model};
use crate::report::{human, picture};
use crate::session::{self, Options, Program};
use crate::shape::Extent;
use crate::train::Training;
use crate::train::checkpoint::{Folder, Place};
use crate::train::classes::{Classes, States};
use crate::train::curve::Point;
use crate::train::data::Rows;
use crate::train::losses::Losses;
use crate::train::run::{Data, Score, Trainer};
use clap::Args;
use serde_json::{Value, json};
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// A whole command, behind the flags.
const EXAMPLE: &str = "Example: a classifier, validated after each of 10 epochs
  plimsoll train model.onnx --data x.npy --labels y.npy --loss cross_entropy --lr 0.001 --batch 64 --epochs 10 \\
    --valid valid-x.npy --valid-labels valid-y.npy --output trained.onnx";

#[derive(Args)]
#[command(after_help = EXAMPLE)]
#[command(mut_arg("loss", |flag| flag.required(true)))]
#[command(mut_arg("lr", |flag| flag.required(true)))]
#[command(mut_arg("batch", |flag| flag.required(true)))]
pub(super) struct Train {
    /// The model: an .onnx or .onnxtxt file, as it was exported for inference.
    model: PathBuf,
    /// The data: an array with a row per example. FILE is an .npy file; an array of an archive, FILE.npz:NAME; or a folder of such files, whose
    /// rows come one after another, part2 before part10. A model of several inputs takes NAME=FILE for each.
    #[arg(long, value_name = "FILE", required = true)]
    data: Vec<String>,
    /// The right answers: a FILE as of --data, with a row per example.
    #[arg(long, value_name = "FILE")]
    labels: PathBuf,
    #[command(flatten)]
    method: Method,
    /// The number of steps: updates of the weights.
    #[arg(long, value_name = "N", required_unless_present = "epochs", conflicts_with = "epochs")]
    steps: Option<u64>,
    /// The number of times that all rows are used. The rows of a last batch that is not full are left out.
    #[arg(long, value_name = "E")]
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
    /// rows. The norm of the gradients is computed for it.
    #[arg(long, value_name = "FILE")]
    log: Option<PathBuf>,
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
    /// Write the trained model: the file with new weights under their names.
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Give a named dim its extent, if the data does not.
    #[arg(long = "set", value_name = "DIM=N", value_parser = args::binding)]
    dims: Vec<(String, Extent)>,
    /// Refuse a plan that takes more memory than this, with exit code 2.
    #[arg(long, value_name = "SIZE", value_parser = limit, allow_hyphen_values = true)]
    memory_limit: Option<u64>,
    /// Number of CPU threads. Default: the host's cores.
    #[arg(long, value_name = "T", value_parser = clap::value_parser!(u16).range(1..=4096))]
    threads: Option<u16>,
    #[command(flatten)]
    on: On,
}

impl Train {
    pub(super) fn run(&self, json: bool) -> Result<String, Failure> {
        let files = [("--log", &self.log), ("--html", &self.html), ("--output", &self.output)];
        let files = files.into_iter().filter_map(|(flag, path)| Some((flag, path.as_deref()?)));
        args::distinct(files.clone())?;
        files.into_iter().try_for_each(|(_, path)| args::has_place(path))?;
        let model = onnx::load(&self.model)?;
        let first = model.first_input().unwrap_or_default().to_owned();
        let data = rows(&self.data, &self.labels, &first)?;
        let valid = self.valid_labels.as_ref().map(|labels| rows(&self.valid, labels, &first)).transpose()?;
        let count = data.check()? as u64;
        let per_epoch = count / self.method.batch;
        let steps = self.steps.unwrap_or_else(|| self.epochs.unwrap_or(1).saturating_mul(per_epoch));
        let options = Options {
            backend: self.on.backend.into(),
            device: self.on.device.clone(),
            dims: self.dims.clone(),
            threads: self.threads.map_or(0, usize::from),
            memory_limit: self.memory_limit,
            ..Options::default()
        };
        let training = Training { seed: self.seed, ..self.method.training(steps, self.log.is_some())? };
        let precision = training.precision;
        let folder = self.checkpoint.as_deref().map(Folder::open).transpose()?;
        if let Some(folder) = folder.as_ref().filter(|_| !self.resume) {
            folder.expect_new()?;
        }
        let resumed = folder.as_ref().filter(|_| self.resume).map(Folder::is_begun).transpose()?.unwrap_or(false);
        let batch = self.method.batch as usize;
        let trainer = match self.init && !resumed {
            true => Trainer::drawn(model, &data, batch, training, &options, self.seed),
            false => Trainer::new(model, &data, batch, training, &options),
        };
        let mut trainer = trainer.map_err(|error| {
            let file = onnx::load(&self.model);
            method::refuse(error.in_file(&self.model), json, || self.case(file.as_ref().ok()?, &data, &options))
        })?;
        let bytes = trainer.session().plan().bytes();
        let left_out = valid.as_ref().map(|valid| trainer.admits(valid)).transpose()?.unwrap_or(0);
        if !json {
            eprintln!(
                "{} weights, {} rows, {per_epoch} steps per epoch{}; {} planned",
                trainer.trained().len(),
                count,
                match count % self.method.batch {
                    0 => String::new(),
                    rest => format!(", {rest} rows left out of each"),
                },
                human(bytes)
            );
            if left_out > 0 {
                eprintln!("  the last {left_out} rows to validate on are left out: they do not fill a part of a batch");
            }
            if trainer.precision() != precision {
                eprintln!("  {} stores {precision} as f32: all values are f32", trainer.session().device());
            }
            for (name, why) in trainer.fixed() {
                eprintln!("  not trained: '{name}': {why}");
            }
            for (name, reader) in trainer.undrawn() {
                eprintln!(
                    "  not drawn: '{name}': no rule for a weight that {reader} reads; it begins with the file's elements: give the file those \
                     that it is to begin with"
                );
            }
        }
        let seed = (!self.no_shuffle).then_some(self.seed);
        let mut place = Place { step: 0, best: None, method: trainer.identity(&data, seed) };
        if let Some(found) =
            folder.as_ref().filter(|_| self.resume).map(|folder| folder.resume(trainer.session(), &place))
        {
            place = found?.unwrap_or(place);
            if !json {
                eprintln!("{} of {steps} steps were done", place.step);
            }
        }
        let mut log =
            self.log.as_deref().map(|path| Ok::<_, Error>((path, open_log(path, place.step)?))).transpose()?;
        let bar = args::progress("loss");
        bar.set_length(steps);
        bar.set_position(place.step);
        stop::catch();
        let (mut last, mut score) = (None, None);
        let mut losses = Losses::default();
        let (begin, mut waited) = (Instant::now(), Duration::ZERO);
        let first = place.step;
        for step in first..steps {
            let start = Instant::now();
            let shown = trainer.step(&data, step, seed)?;
            let ms = start.elapsed().as_secs_f64() * 1e3;
            last = Some(shown.loss);
            waited += shown.waited;
            losses.push(shown.loss);
            if let Some((path, log)) = &mut log {
                let record = json!({
                    "step": step, "loss": shown.loss, "lr": shown.rate, "grad_norm": shown.norm,
                    "allocated_bytes": trainer.session().usage().bytes, "ms": ms,
                    "wait_ms": shown.waited.as_secs_f64() * 1e3,
                });
                writeln!(log, "{record}").map_err(|e| Error::file(path, "write the log", e))?;
            }
            if trainer.refuses(&shown) {
                let what = match shown.loss.is_finite() {
                    true => format!("the norm of the gradients is {}", shown.norm.unwrap_or_default()),
                    false => format!("the loss is {}", shown.loss),
                };
                if let Some(name) = trainer.broken_weight()? {
                    return Err(Error::usage(format!(
                        "step {step}: {what}: weight '{name}' has values that are not finite before this step"
                    ))
                    .into());
                }
                if trainer.ignores_all(&data, step, seed) {
                    let advice =
                        "no label of its batch counts: all are -100; take a larger --batch, or leave such rows out";
                    return Err(Error::usage(format!("step {step}: {what}: {advice}")).into());
                }
                let first = match trainer.not_finite(&data, step, seed)? {
                    Some(found) => format!("the first value that is not finite is {found}"),
                    None => "run again, all values of the step are finite".to_owned(),
                };
                let advice = "the weights are those before this step; a smaller --lr, or --clip-norm, may help";
                return Err(Error::usage(format!("step {step}: {what}; {first}; {advice}")).into());
            }
            let (done, share) = (step + 1 - first, percent(waited, begin.elapsed()));
            let pace = done as f64 / begin.elapsed().as_secs_f64();
            bar.set_message(format!(
                "loss {:.4}  lr {:.1e}  {pace:.1} steps/s  data {share:.0} %  {}",
                shown.loss,
                shown.rate,
                human(bytes)
            ));
            bar.inc(1);
            let ends = (step + 1).is_multiple_of(per_epoch.max(1)) || step + 1 == steps;
            if let (true, Some(valid)) = (ends, &valid) {
                let found = trainer.evaluate(valid)?;
                losses.validated(found.loss, found.accuracy);
                if !json {
                    bar.println(epoch_line((step + 1).div_ceil(per_epoch), shown.loss, &found));
                }
                score = Some(found);
            }
            place.step = step + 1;
            let stops = stop::is_asked();
            if let Some(folder) = &folder {
                let is_least =
                    |score: &Score| score.loss.is_finite() && place.best.is_none_or(|best| score.loss < best);
                let least = score.filter(|score| ends && is_least(score));
                if let Some(score) = least {
                    place.best = Some(score.loss);
                    folder.save_best(trainer.session(), &place)?;
                }
                let is_due = self.save_every.map_or(ends, |every| place.step.is_multiple_of(every));
                if is_due || stops || place.step == steps {
                    // The log has all steps before a checkpoint, whatever ends the process.
                    flush(&mut log)?;
                    folder.save(trainer.session(), &place)?;
                }
            }
            if stops {
                break;
            }
        }
        bar.finish_and_clear();
        flush(&mut log)?;
        let (seconds, wait_seconds) = (begin.elapsed().as_secs_f64(), waited.as_secs_f64());
        if let Some(path) = &self.output {
            let bytes = onnx::encode(&trainer.model()?)?;
            file::write_whole(path, "write the trained model", |out| out.write_all(&bytes))?;
        }
        self.draw(&trainer, &losses)?;
        let usage = trainer.session().usage();
        if json {
            let plans: Vec<_> = trainer.session().programs().map(Program::plan).collect();
            let Point { arena_bytes, recompute, .. } = Point::of(&plans, self.method.accumulate as usize);
            let mut record = json!({
                "model": self.model, "device": trainer.session().device(), "steps": place.step, "loss": last,
                "planned_bytes": bytes, "allocated_bytes": usage.bytes, "arena_bytes": arena_bytes,
                "classes": Classes::of(&plans), "states": States::of(&plans, trainer.trained()), "recompute": recompute,
                "host_bytes": trainer.host_bytes(), "seconds": seconds, "wait_seconds": wait_seconds, "trained": trainer.trained(),
            });
            if let Some(score) = score {
                record["valid_loss"] = score.loss.into();
                record["valid_accuracy"] = score.accuracy.into();
            }
            return Ok(line(&record));
        }
        let valid = score.map_or(String::new(), |score| {
            let accuracy = score.accuracy.map_or(String::new(), |share| format!(", accuracy {:.2} %", share * 100.0));
            format!("; validation loss {:.4}{accuracy}", score.loss)
        });
        let steps = match place.step < steps {
            true => format!("stopped after {} of {steps}", place.step),
            false => steps.to_string(),
        };
        let loss = last.map_or("no step was left to do".to_owned(), |loss| format!("loss {loss:.4}"));
        Ok(format!(
            "{steps} steps in {seconds:.1} s on {}: {loss}{valid}\nplanned {}, allocated {}\n",
            trainer.session().device(),
            human(bytes),
            human(usage.bytes)
        ))
    }
}

impl Train {
    /// The training as it is planned; `None` if that takes more than the data's shapes.
    fn case<'a>(&self, model: &'a Model, data: &Data, options: &Options) -> Option<Case<'a>> {
        let target = session::open(options).ok()?.0.target().clone();
        let mut dims = options.fixed()?;
        let of_data = data.inputs.iter().flat_map(|(name, rows)| model.dims_of(name, rows.shape()));
        let is_open = |dims: &[(String, usize)], dim: &str| !dims.iter().any(|(known, _)| known == dim);
        for (dim, extent) in of_data.filter(|(dim, _)| model.batch_dim().as_ref() != Some(dim)) {
            if is_open(&dims, &dim) {
                dims.push((dim, extent));
            }
        }
        let training = self.method.training(1, self.log.is_some()).ok()?.on(&target);
        Some(Case { model, dims, batch: self.method.batch as usize, training, target, recipe: options.recipe })
    }

    /// Draws the run, if that is wanted.
    fn draw(&self, trainer: &Trainer, losses: &Losses) -> Result<()> {
        let Some(path) = &self.html else { return Ok(()) };
        let plans: Vec<_> = trainer.session().programs().map(Program::plan).collect();
        let model = self.model.file_stem().unwrap_or_default().to_string_lossy();
        let page = picture::training_page(&model, &plans, trainer.trained(), losses, self.memory_limit);
        file::write_whole(path, "write the page", |out| out.write_all(page.as_bytes()))
    }
}

/// Opens the log for the steps from `first` on. What an interrupted training wrote of the steps before stays.
fn open_log(path: &Path, first: u64) -> Result<BufWriter<File>> {
    let fail = |e| Error::file(path, "write the log", e);
    let before = if first > 0 { std::fs::read_to_string(path).unwrap_or_default() } else { String::new() };
    let is_before = |text: &&str| {
        let step = serde_json::from_str::<Value>(text).ok().and_then(|record| record["step"].as_u64());
        step.is_some_and(|step| step < first)
    };
    if first == 0 {
        return Ok(BufWriter::new(File::create(path).map_err(fail)?));
    }
    let mut before = before.lines().filter(is_before);
    file::write_whole(path, "write the log", |out| before.try_for_each(|text| writeln!(out, "{text}")))?;
    Ok(BufWriter::new(File::options().append(true).open(path).map_err(fail)?))
}

/// Hands the lines of a log to the system.
fn flush(log: &mut Option<(&Path, BufWriter<File>)>) -> Result<()> {
    let Some((path, log)) = log else { return Ok(()) };
    log.flush().map_err(|e| Error::file(path, "write the log", e))
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

fn epoch_line(epoch: u64, loss: f32, score: &Score) -> String {
    let accuracy = score.accuracy.map_or(String::new(), |share| format!("  accuracy {:6.2} %", share * 100.0));
    format!("epoch {epoch:4}  loss {loss:8.4}  validation {:8.4}{accuracy}", score.loss)
}
