//! `train`: trains the weights of a model's file.

use super::args::{self, On, limit};
use super::{Failure, line};
use crate::error::{Error, Result};
use crate::onnx;
use crate::report::human;
use crate::session::Options;
use crate::shape::Extent;
use crate::train::data::Rows;
use crate::train::run::{Data, Score, Trainer};
use crate::train::{Loss, Optimizer, Rate, Schedule, Training};
use crate::file;
use clap::{Args, ValueEnum};
use serde_json::json;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::PathBuf;
use std::time::Instant;

#[derive(Clone, Copy, PartialEq, ValueEnum)]
#[value(rename_all = "snake_case")]
enum LossName {
    /// Classes: the labels are whole numbers, and -100 does not count. The model ends before its softmax.
    CrossEntropy,
    /// The mean square of the difference.
    Mse,
    /// Labels of 0 and 1. The model ends before its sigmoid.
    BceLogits,
    /// The mean magnitude of the difference.
    L1,
    /// Half the square of a difference up to 1, beyond that its magnitude less a half.
    Huber,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum OptimizerName {
    Sgd,
    Adam,
    Adamw,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum ScheduleName {
    /// The rate stays.
    Constant,
    /// Half a cosine, down to 0.
    Cosine,
    /// A line, down to 0.
    Linear,
    /// A tenth after each third of the steps.
    Step,
}

#[derive(Args)]
pub(super) struct Train {
    /// The model: an .onnx or .onnxtxt file, as it was exported for inference.
    model: PathBuf,
    /// The data: an .npy file with a row per example. A model of several inputs takes NAME=FILE for each.
    #[arg(long, value_name = "FILE", required = true)]
    data: Vec<String>,
    /// The right answers: an .npy file with a row per example.
    #[arg(long, value_name = "FILE")]
    labels: PathBuf,
    /// What is made small.
    #[arg(long, value_enum)]
    loss: LossName,
    /// The share of the label that all classes have together, for cross_entropy.
    #[arg(long, value_name = "S", default_value_t = 0.0)]
    label_smoothing: f64,
    /// How a gradient changes a weight.
    #[arg(long, value_enum, default_value_t = OptimizerName::Adam)]
    optimizer: OptimizerName,
    /// For sgd: the share of the moving sum that is kept.
    #[arg(long, value_name = "M", default_value_t = 0.0)]
    momentum: f64,
    /// For sgd: look ahead by one momentum.
    #[arg(long)]
    nesterov: bool,
    /// For adam and adamw: the share of the mean that is kept.
    #[arg(long, value_name = "B", default_value_t = 0.9)]
    beta1: f64,
    /// For adam and adamw: the share of the mean square that is kept.
    #[arg(long, value_name = "B", default_value_t = 0.999)]
    beta2: f64,
    /// For adam and adamw: added to the root of the mean square.
    #[arg(long, value_name = "E", default_value_t = 1e-8)]
    eps: f64,
    /// The weights' decay: adamw takes it from the weights, the others add it to the gradients.
    #[arg(long, value_name = "W", default_value_t = 0.0)]
    weight_decay: f64,
    /// Only weights with at least N axes decay.
    #[arg(long, value_name = "N", default_value_t = 0)]
    decay_dims: usize,
    /// The learning rate, at its largest.
    #[arg(long, value_name = "R")]
    lr: f64,
    /// How the rate falls after the warmup.
    #[arg(long, value_enum, default_value_t = ScheduleName::Constant)]
    schedule: ScheduleName,
    /// Steps in which the rate rises.
    #[arg(long, value_name = "N", default_value_t = 0)]
    warmup: u64,
    /// Rows per update.
    #[arg(long, value_name = "B", value_parser = clap::value_parser!(u64).range(1..))]
    batch: u64,
    /// Compute an update in K parts, one after another: their activations take a K-th of the memory.
    #[arg(long, value_name = "K", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    accumulate: u64,
    /// The number of updates.
    #[arg(long, value_name = "N", required_unless_present = "epochs", conflicts_with = "epochs")]
    steps: Option<u64>,
    /// The number of times that all rows are used. The rows of a last batch that is not full are left out.
    #[arg(long, value_name = "E")]
    epochs: Option<u64>,
    /// Scale the gradients so that their norm, all together, is at most C.
    #[arg(long, value_name = "C")]
    clip_norm: Option<f64>,
    /// Keep moving averages of the weights, of which each step keeps the share D. Validation and --output use them.
    #[arg(long, value_name = "D")]
    ema: Option<f64>,
    /// Weights that stay as they are: names, in which * stands for any text.
    #[arg(long, value_name = "GLOB")]
    freeze: Vec<String>,
    /// Data to validate on after each epoch.
    #[arg(long, value_name = "FILE", requires = "valid_labels")]
    valid: Vec<String>,
    /// The right answers of the data to validate on.
    #[arg(long, value_name = "FILE", requires = "valid")]
    valid_labels: Option<PathBuf>,
    /// Take the rows in the order of the file.
    #[arg(long)]
    no_shuffle: bool,
    /// Seed of the order of the rows.
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Write a JSON object per step: step, loss, lr, grad_norm, allocated_bytes, ms.
    #[arg(long, value_name = "FILE")]
    log: Option<PathBuf>,
    /// Write the trained model: the file with new weights under their names.
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Give a named dim its extent, if the data does not.
    #[arg(long = "set", value_name = "DIM=N", value_parser = args::binding)]
    dims: Vec<(String, Extent)>,
    /// Refuse a plan that takes more memory than this, with exit code 2.
    #[arg(long, value_name = "SIZE", value_parser = limit, allow_hyphen_values = true)]
    memory_limit: Option<u64>,
    /// Number of CPU threads.
    #[arg(long, value_name = "T", default_value_t = 0)]
    threads: usize,
    #[command(flatten)]
    on: On,
}

impl Train {
    pub(super) fn run(&self, json: bool) -> Result<String, Failure> {
        let model = onnx::load(&self.model)?;
        let first = model.first_input().unwrap_or_default().to_owned();
        let data = rows(&self.data, &self.labels, &first)?;
        let valid = self.valid_labels.as_ref().map(|labels| rows(&self.valid, labels, &first)).transpose()?;
        let count = data.check()? as u64;
        let per_epoch = count / self.batch;
        let steps = self.steps.unwrap_or_else(|| self.epochs.unwrap_or(1) * per_epoch);
        let options = Options {
            backend: self.on.backend.into(),
            device: self.on.device.clone(),
            dims: self.dims.clone(),
            threads: self.threads,
            memory_limit: self.memory_limit,
            ..Options::default()
        };
        let training = self.training(steps);
        let mut trainer = Trainer::new(model, &data, self.batch as usize, training, &options).map_err(|e| e.in_file(&self.model))?;
        let bytes = trainer.session().plan().bytes();
        if !json {
            eprintln!(
                "{} weights, {} rows, {per_epoch} steps per epoch{}; {} planned",
                trainer.trained().len(),
                count,
                match count % self.batch {
                    0 => String::new(),
                    rest => format!(", {rest} rows left out of each"),
                },
                human(bytes)
            );
            for (name, why) in trainer.fixed() {
                eprintln!("  not trained: '{name}': {why}");
            }
        }
        let mut log = self.log.as_ref().map(|path| File::create(path).map_err(|e| Error::file(path, "write the log", e)));
        let mut log = log.take().transpose()?.map(BufWriter::new);
        let bar = args::progress("loss");
        bar.set_length(steps);
        let seed = (!self.no_shuffle).then_some(self.seed);
        let (mut last, mut score) = (Default::default(), None);
        let begin = Instant::now();
        for step in 0..steps {
            let start = Instant::now();
            let shown = trainer.step(&data, step, seed)?;
            let ms = start.elapsed().as_secs_f64() * 1e3;
            last = shown;
            if let (Some(log), Some(path)) = (&mut log, &self.log) {
                let record = json!({
                    "step": step, "loss": shown.loss, "lr": shown.rate, "grad_norm": shown.norm,
                    "allocated_bytes": trainer.session().usage().bytes, "ms": ms,
                });
                writeln!(log, "{record}").map_err(|e| Error::file(path, "write the log", e))?;
            }
            if !shown.loss.is_finite() {
                return Err(Error::differ(format!("step {step}: the loss is {}", shown.loss)).into());
            }
            bar.set_message(format!("loss {:.4}", shown.loss));
            bar.inc(1);
            let ends = (step + 1).is_multiple_of(per_epoch.max(1)) || step + 1 == steps;
            if let (true, Some(valid)) = (ends, &valid) {
                let found = trainer.evaluate(valid)?;
                if !json {
                    bar.println(epoch_line((step + 1).div_ceil(per_epoch), shown.loss, &found));
                }
                score = Some(found);
            }
        }
        bar.finish_and_clear();
        if let (Some(log), Some(path)) = (&mut log, &self.log) {
            log.flush().map_err(|e| Error::file(path, "write the log", e))?;
        }
        let seconds = begin.elapsed().as_secs_f64();
        if let Some(path) = &self.output {
            let bytes = onnx::encode(&trainer.model()?)?;
            file::write_whole(path, "write the trained model", |out| out.write_all(&bytes))?;
        }
        let usage = trainer.session().usage();
        if json {
            let mut record = json!({
                "model": self.model, "device": trainer.session().device(), "steps": steps, "loss": last.loss,
                "planned_bytes": bytes, "allocated_bytes": usage.bytes, "seconds": seconds,
                "trained": trainer.trained(),
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
        Ok(format!(
            "{steps} steps in {seconds:.1} s on {}: loss {:.4}{valid}\nplanned {}, allocated {}\n",
            trainer.session().device(),
            last.loss,
            human(bytes),
            human(usage.bytes)
        ))
    }

    fn training(&self, steps: u64) -> Training {
        let optimizer = match self.optimizer {
            OptimizerName::Sgd => Optimizer::Sgd { momentum: self.momentum, nesterov: self.nesterov },
            name => Optimizer::Adam {
                beta1: self.beta1,
                beta2: self.beta2,
                eps: self.eps,
                decoupled: name == OptimizerName::Adamw,
            },
        };
        let schedule = match self.schedule {
            ScheduleName::Constant => Schedule::Constant,
            ScheduleName::Cosine => Schedule::Cosine,
            ScheduleName::Linear => Schedule::Linear,
            ScheduleName::Step => Schedule::Step,
        };
        Training {
            loss: match self.loss {
                LossName::CrossEntropy => Loss::CrossEntropy,
                LossName::Mse => Loss::Mse,
                LossName::BceLogits => Loss::BceLogits,
                LossName::L1 => Loss::L1,
                LossName::Huber => Loss::Huber,
            },
            smoothing: self.label_smoothing,
            optimizer,
            rate: Rate { most: self.lr, schedule, warmup: self.warmup, steps },
            decay: self.weight_decay,
            decay_dims: self.decay_dims,
            clip: self.clip_norm,
            accumulate: self.accumulate as usize,
            ema: self.ema,
            freeze: self.freeze.clone(),
            norm: self.log.is_some(),
        }
    }
}

/// Maps the files of data and labels. A file without a name is the first input's.
fn rows(data: &[String], labels: &std::path::Path, first: &str) -> Result<Data> {
    let inputs = data.iter().map(|given| match given.split_once('=') {
        Some((name, path)) => Ok((name.to_owned(), Rows::open(path.as_ref())?)),
        None => Ok((first.to_owned(), Rows::open(given.as_ref())?)),
    });
    Ok(Data { inputs: inputs.collect::<Result<_>>()?, labels: Rows::open(labels)? })
}

fn epoch_line(epoch: u64, loss: f32, score: &Score) -> String {
    let accuracy = score.accuracy.map_or(String::new(), |share| format!("  accuracy {:6.2} %", share * 100.0));
    format!("epoch {epoch:4}  loss {loss:8.4}  validation {:8.4}{accuracy}", score.loss)
}
