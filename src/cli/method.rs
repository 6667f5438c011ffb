//! Flags that say how a model is trained.

use super::Failure;
use super::args::{self, Model, has_range};
use super::open::{self, Whole};
use super::ranks::Meshed;
use crate::advise::{Trained as Case, refusal};
use crate::dtype::DType;
use crate::error::{Error, Result, ensure};
use crate::pass::shard::DATA;
use crate::report;
use crate::target::Target;
use crate::train::{self, Loss, Optimizer, Programs, Rate, Schedule, Training};
use clap::{Args, ValueEnum};
use serde_json::json;

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
    /// Gradient descent, with --momentum if it is given.
    Sgd,
    /// By the moving mean and mean square of the gradients.
    Adam,
    /// Adam with decoupled weight decay.
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

/// Whether norms of a batch are of all ranks' rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum SyncNorm {
    Yes,
    No,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
pub(super) enum Precision {
    F32,
    Bf16,
    F16,
}

impl Precision {
    pub(super) fn dtype(self) -> DType {
        match self {
            Precision::F32 => DType::F32,
            Precision::Bf16 => DType::BF16,
            Precision::F16 => DType::F16,
        }
    }
}

/// The learning rate where nothing is trained.
const ANY_RATE: f64 = 1e-3;
/// Adam's constants, unless flags say otherwise.
const BETA1: f64 = 0.9;
const BETA2: f64 = 0.999;
const EPS: f64 = 1e-8;

/// Flags of a method. Where they are optional as a group, clap asks for those that are needed once one is given.
#[derive(Args, Clone)]
pub(super) struct Method {
    /// The loss: what training makes small. It judges the model's first output.
    #[arg(long, value_enum, required = false)]
    loss: LossName,
    /// Label smoothing, for cross_entropy: this share of each label is spread over all classes.
    #[arg(long, value_name = "S", default_value_t = 0.0, allow_negative_numbers = true)]
    label_smoothing: f64,
    /// The optimizer: how a gradient changes a weight.
    #[arg(long, value_enum, default_value_t = OptimizerName::Adam)]
    optimizer: OptimizerName,
    /// Momentum, for sgd: the share of the moving sum of gradients that is kept.
    #[arg(long, value_name = "M", default_value_t = 0.0, allow_negative_numbers = true)]
    momentum: f64,
    /// Nesterov's momentum, for sgd: look ahead by one momentum.
    #[arg(long)]
    nesterov: bool,
    /// For adam and adamw: the share of the gradients' moving mean that is kept.
    #[arg(long, value_name = "B", default_value_t = BETA1, allow_negative_numbers = true)]
    beta1: f64,
    /// For adam and adamw: the share of their moving mean square that is kept.
    #[arg(long, value_name = "B", default_value_t = BETA2, allow_negative_numbers = true)]
    beta2: f64,
    /// For adam and adamw: added to the root of the mean square.
    #[arg(long, value_name = "E", default_value_t = EPS, allow_negative_numbers = true)]
    eps: f64,
    /// Weight decay: adamw takes it from the weights, the others add it to the gradients.
    #[arg(long, value_name = "W", default_value_t = 0.0, allow_negative_numbers = true)]
    weight_decay: f64,
    /// Only weights with at least N axes decay: 2 leaves out biases and the scales of norms.
    #[arg(long, value_name = "N", default_value_t = 0)]
    decay_dims: usize,
    /// The learning rate. With a warmup or a schedule, its largest value.
    #[arg(long, value_name = "R", allow_negative_numbers = true)]
    lr: Option<f64>,
    /// The schedule: how the learning rate falls after the warmup.
    #[arg(long, value_enum, default_value_t = ScheduleName::Constant)]
    schedule: ScheduleName,
    /// Warmup: steps in which the learning rate rises to --lr.
    #[arg(long, value_name = "N", default_value_t = 0)]
    warmup: u64,
    /// Rows per update. Commands have a flag for it.
    #[arg(skip)]
    pub(super) batch: u64,
    /// Gradient accumulation: compute an update in K parts, one after another. Their activations take a K-th of the memory; the sums of the
    /// gradients take as much as the weights.
    #[arg(long, value_name = "K", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    pub(super) accumulate: u64,
    /// Gradient clipping: scale the gradients so that their norm, all together, is at most C.
    #[arg(long, value_name = "C", allow_negative_numbers = true)]
    clip_norm: Option<f64>,
    /// Keep moving averages of the weights: after each step, D of the average and 1 - D of the weight. Validation and --output take the
    /// averages.
    #[arg(long, value_name = "D", allow_negative_numbers = true)]
    ema: Option<f64>,
    /// BatchNormalization on the ranks of --mesh: yes, by all rows of the batch, as on one device; no, on each rank by its own rows, without an
    /// exchange. Running statistics follow the mean of the ranks.
    #[arg(long, value_enum, default_value_t = SyncNorm::Yes)]
    sync_norm: SyncNorm,
    /// Type of activations and gradients. Weights and other states stay f32, and so do sums, softmax, norms and losses. With f16, GPUs scale
    /// the loss. The CPU computes in f32 and scales nothing: it keeps in this type what the backward computation reads.
    #[arg(long, value_enum, default_value_t = Precision::F32)]
    pub(super) precision: Precision,
    /// The device that the training is planned for, if it is known.
    #[arg(skip)]
    target: Option<Target>,
    /// Weights that stay as they are: names, in which * stands for any text. A BatchNormalization whose scale and bias stay uses its stored
    /// statistics, and leaves them as they are.
    #[arg(long, value_name = "GLOB")]
    freeze: Vec<String>,
    /// The only weights that are trained: names, in which * stands for any text. All others stay as they are.
    #[arg(long, value_name = "GLOB")]
    train_only: Vec<String>,
    /// For cross_entropy: the axis of the classes in the model's first output, counted from 0, the batch. Without it, `train` takes the axis
    /// without which the output has the labels' shape; other commands, which have no labels, the last of three axes, else the second, and they
    /// ask for it where two axes are equal.
    #[arg(long, value_name = "AXIS", value_parser = clap::value_parser!(u32).range(1..))]
    class_axis: Option<u32>,
}

/// Flags of commands that take the training of a model, too.
#[derive(Args)]
#[command(mut_group("Method", |group| group.requires("train")))]
pub(super) struct Trained {
    /// Plan one training step of the model instead of inference, with the bytes that `train` takes. Needs no data: the open dim on the first axis
    /// of the first input is the batch, and others are 1 unless --set binds them. --loss and --batch are needed, too.
    #[arg(long, requires = "loss")]
    train: bool,
    /// Batch size: the extent of the open dim that leads the inputs, as --set gives it. With --train, rows per update.
    #[arg(long, value_name = "B", value_parser = args::batch)]
    pub(super) batch: Option<u64>,
    #[command(flatten)]
    method: Option<Method>,
}

impl Trained {
    /// The method, of a training.
    pub(super) fn method(&self) -> Option<Method> {
        self.method.as_ref().map(|method| method.on_batch(self.batch.unwrap_or(1)))
    }

    /// The model with the batch that is asked for, if it is not trained.
    pub(super) fn with_batch(&self, model: &Model) -> Model {
        Model { batch: self.batch.filter(|_| self.method.is_none()), ..model.clone() }
    }
}

/// The name of a flag's value.
fn name(value: &impl ValueEnum) -> String {
    value.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
}

impl Method {
    /// In a few words, for the titles of pictures: `batch 30, adam, cross_entropy`.
    pub(super) fn told(&self, batch: u64) -> String {
        let precision =
            if self.precision == Precision::F32 { String::new() } else { format!(", {}", name(&self.precision)) };
        format!("batch {batch}, {}, {}{precision}", name(&self.optimizer), name(&self.loss))
    }

    /// This method with so many rows per update.
    pub(super) fn on_batch(&self, batch: u64) -> Method {
        Method { batch, ..self.clone() }
    }

    /// This method in `f32`, if it is of another precision.
    pub(super) fn in_f32(&self) -> Option<Method> {
        (self.precision != Precision::F32).then(|| Method { precision: Precision::F32, ..self.clone() })
    }

    /// This method on a device.
    pub(super) fn on(&self, target: &Target) -> Method {
        Method { target: Some(target.clone()), ..self.clone() }
    }

    /// The programs that train a model for a number of steps.
    ///
    /// # Errors
    /// Those of the model and its loss; a flag that `train` has no use for.
    pub(super) fn programs(&self, model: &Model, steps: u64) -> Result<Programs> {
        let Whole { model: file, dims, assumed } = self.whole(model)?;
        let training = Training { norm_groups: self.norm_groups(&model.several)?, ..self.training(steps)? };
        let programs = train::programs_of_file(file, open::largest(&dims), self.batch as usize, &training);
        let blamed = |e: Error| if matches!(e, Error::Node { .. }) { open::blamed(&assumed, e) } else { e };
        programs.map_err(|e| blamed(e.in_file(&model.model)))
    }

    /// The parts of a batch that have norms of their own.
    ///
    /// # Errors
    /// When ranks are to normalize by themselves, and there are no ranks.
    pub(super) fn norm_groups(&self, several: &Meshed) -> Result<usize> {
        if self.sync_norm == SyncNorm::Yes {
            return Ok(1);
        }
        let axis = several.mesh.as_ref().and_then(|mesh| mesh.axis(DATA).ok()).map(|(_, axis)| axis.ranks);
        axis.ok_or_else(|| {
            Error::usage("--sync-norm no: expected --mesh with an axis data, such as --mesh data=2".to_owned())
        })
    }

    /// The model that is trained, with all of its dims but the batch.
    ///
    /// # Errors
    /// Those of the model; a flag that `train` has no use for.
    pub(super) fn whole(&self, model: &Model) -> Result<Whole> {
        model.suits_training()?;
        let (file, dims) = (model.file()?, model.dims());
        ensure(!has_range(&dims), || Error::usage("--set: training takes no range of a dim".to_owned()))?;
        Whole::but(file.batch_dim(), file, dims).map_err(|e| e.in_file(&model.model))
    }

    /// How a model is trained for a number of steps.
    ///
    /// # Errors
    /// A flag of another optimizer.
    pub(super) fn training(&self, steps: u64) -> Result<Training> {
        let is_sgd = self.optimizer == OptimizerName::Sgd;
        let of_sgd = [("--momentum", self.momentum != 0.0), ("--nesterov", self.nesterov)];
        let of_adam = [("--beta1", self.beta1 != BETA1), ("--beta2", self.beta2 != BETA2), ("--eps", self.eps != EPS)];
        let (others, named) = if is_sgd { (&of_adam[..], "adam or adamw") } else { (&of_sgd[..], "sgd") };
        if let Some((flag, _)) = others.iter().find(|(_, is_given)| *is_given) {
            return Err(Error::usage(format!("{flag}: expected --optimizer {named}: the other has no use for it")));
        }
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
        let training = Training {
            loss: match self.loss {
                LossName::CrossEntropy => Loss::CrossEntropy,
                LossName::Mse => Loss::Mse,
                LossName::BceLogits => Loss::BceLogits,
                LossName::L1 => Loss::L1,
                LossName::Huber => Loss::Huber,
            },
            smoothing: self.label_smoothing,
            optimizer,
            rate: Rate { most: self.lr.unwrap_or(ANY_RATE), schedule, warmup: self.warmup, steps },
            decay: self.weight_decay,
            decay_dims: self.decay_dims,
            clip: self.clip_norm,
            accumulate: self.accumulate as usize,
            ema: self.ema,
            norm_groups: 1,
            freeze: self.freeze.clone(),
            only: self.train_only.clone(),
            class_axis: self.class_axis.map(|axis| axis as usize),
            labels: None,
            seed: 0,
            precision: self.precision.dtype(),
            kept: DType::F32,
        };
        Ok(match &self.target {
            Some(target) => training.on(target),
            None => training,
        })
    }
}

/// Warns that a device has no kernels of a precision.
pub(super) fn wide(device: &str, asked: DType) -> String {
    format!(
        "warning: --precision {asked}: no kernels of {asked} on {device}: it computes in f32, and keeps {asked} for the backward pass alone"
    )
}

/// Explains an [`Error::Fit`] of a training: what no plan is below, and what would help. `case` makes the training.
pub(super) fn refuse(error: Error, json: bool, case: impl FnOnce() -> Option<Case>) -> Failure {
    let Error::Fit { limit, .. } = error else { return error.into() };
    match case().and_then(|case| refusal(&case, limit).ok().flatten()) {
        Some(refusal) => Failure::explained(error, json, json!(refusal), report::refusal(&refusal)),
        // The first error says more than an error of its explanation.
        _ => error.into(),
    }
}
