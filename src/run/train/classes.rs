//! The bytes of a training, by what they hold.
//!
//! A plan knows of no gradients. The names of its steps and states tell: those of the backward computation and of the update begin with
//! words that the file's nodes do not have. A value that the forward computation makes and a step of the backward one reads is kept for it;
//! one that the backward computation makes and the update reads is a weight's gradient. Steps that compute a forward value again, whose names
//! end with [`AGAIN`], belong to the backward computation: what they read is kept for it, and what they write is neither.

use crate::graph::{AGAIN, GRADIENT};
use crate::plan::tell::timeline::Timeline;
use crate::plan::{BufferIdx, Class, Plan, Program, StatePort, StepIdx, View};
use crate::target::{Family, PREFETCH_STACK};
use serde::Serialize;
use std::collections::HashMap;

/// The bytes of a training by what they hold. Their sum is what is planned. Those of the arena are of its peak, in the part of an update that
/// needs the most.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Classes {
    /// Constants, such as weights that stay as they are.
    pub constant: u64,
    /// All states.
    pub state: u64,
    /// Gradients of weights, in the arena.
    pub gradient: u64,
    /// Values of the forward computation that the backward one reads.
    pub kept: u64,
    /// Other values of the arena.
    pub activation: u64,
    /// Scratch memory of the step at the peak.
    pub workspace: u64,
    /// Inputs and labels, in the arena.
    pub input: u64,
    /// Outputs, in the arena.
    pub output: u64,
    /// Bytes of the arena without data: alignment and gaps.
    pub idle: u64,
    /// Memory through which data passes between the host and the device; on the CPU, the rows of the next micro-batch.
    pub staging: u64,
    /// Memory that the backend takes for itself.
    pub backend: u64,
    /// Memory that is left to NCCL.
    pub reserve: u64,
}

/// The bytes of the states by what they hold.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct States {
    /// Weights that are trained.
    pub weight: u64,
    /// Optimizer state, the number of the step, the factor of the loss, and the count of draws of Dropout.
    pub optimizer: u64,
    /// Sums of gradients over the parts of an update.
    pub gradient: u64,
    /// Moving averages of the weights.
    pub average: u64,
    /// Running statistics.
    pub statistic: u64,
    /// Bytes between states: alignment.
    pub idle: u64,
}

/// A part of an update.
#[derive(Clone, Copy, PartialEq)]
pub enum Phase {
    /// From the inputs to the loss.
    Forward,
    /// Values of the forward computation that the backward one computes once more.
    Again,
    /// The gradients.
    Backward,
    /// The weights and what the optimizer keeps.
    Update,
}

impl Phase {
    /// The part that a step computes, by the name that training gives its nodes.
    pub fn of(step: &str) -> Phase {
        let step = step.strip_prefix("copy of ").unwrap_or(step);
        if step.ends_with(AGAIN) {
            Phase::Again
        } else if step.starts_with(GRADIENT) {
            Phase::Backward
        } else if step.starts_with("update/") || step.starts_with("accumulate/") {
            Phase::Update
        } else {
            Phase::Forward
        }
    }
}

/// What a state of a training holds, as the fields of [`States`] say.
#[derive(Clone, Copy)]
pub enum Held {
    /// [`States::weight`].
    Weight,
    /// [`States::optimizer`].
    Optimizer,
    /// [`States::gradient`].
    Gradient,
    /// [`States::average`].
    Average,
    /// [`States::statistic`].
    Statistic,
}

impl Held {
    /// What a state holds, by the name that training gives it, if these weights are trained.
    pub fn of(name: &str, trained: &[String]) -> Held {
        match name.split_once('/') {
            _ if trained.iter().any(|weight| weight == name) => Held::Weight,
            Some(("optimizer" | "scale" | "dropout", _)) => Held::Optimizer,
            Some(("accumulated", _)) => Held::Gradient,
            Some(("ema", _)) => Held::Average,
            None if name == "step" => Held::Optimizer,
            _ => Held::Statistic,
        }
    }
}

impl Classes {
    /// The classes of a training's plan, whose last program evaluates.
    ///
    /// # Panics
    /// When there is no program.
    pub fn of(plan: &Plan) -> Classes {
        let parts = plan.views().take(plan.programs.len().saturating_sub(1).max(1));
        let plan = parts.max_by_key(|program| program.summary.lower_bound).expect("an update has a part");
        let segment = |class| plan.class_bytes(class);
        let mut classes = Classes {
            constant: segment(Class::Constant),
            state: segment(Class::State),
            staging: segment(Class::Staging),
            backend: segment(Class::Backend),
            reserve: segment(Class::Reserve),
            ..Classes::default()
        };
        let timeline = Timeline::of(plan);
        let held = timeline.peak().map_or(Vec::new(), |step| timeline.holders(plan, step));
        for buffer in &held {
            *classes.place(plan, *buffer) += plan.buffers[*buffer].bytes;
        }
        let held: u64 = held.iter().map(|&b| plan.buffers[b].bytes).sum();
        classes.idle = segment(Class::Activation).saturating_sub(held);
        classes
    }

    /// The figure that a buffer of the arena counts for.
    fn place(&mut self, plan: View, buffer: BufferIdx) -> &mut u64 {
        let phases = |uses: &dyn Fn(StepIdx) -> bool| -> Vec<Phase> {
            let steps = StepIdx::all(&plan.steps).filter(|&step| uses(step));
            steps.map(|step| Phase::of(&plan.steps[step].name)).collect()
        };
        let makers = phases(&|step| plan.steps[step].writes.contains(&buffer));
        let readers = phases(&|step| plan.steps[step].reads.contains(&buffer));
        match (plan.buffers[buffer].class, makers.first()) {
            (Class::Workspace, _) => &mut self.workspace,
            (Class::Input, _) => &mut self.input,
            (Class::Output, _) => &mut self.output,
            (_, Some(Phase::Forward)) if readers.iter().any(|p| matches!(p, Phase::Backward | Phase::Again)) => {
                &mut self.kept
            }
            (_, Some(Phase::Backward)) if readers.contains(&Phase::Update) => &mut self.gradient,
            _ => &mut self.activation,
        }
    }
}

/// Bytes of the host beside the plan of a training: where rows are made ready, and the stack of the thread that does it. On the CPU they are
/// part of the plan.
pub fn host_bytes(plan: &Plan) -> u64 {
    if plan.target.family == Family::Cpu {
        return 0;
    }
    let ports = plan.programs.iter().flat_map(|program| &program.inputs);
    let inputs: HashMap<&str, u64> =
        ports.map(|port| (&port.name[..], (port.shape.numel() * port.dtype.size()) as u64)).collect();
    PREFETCH_STACK + inputs.values().sum::<u64>()
}

impl States {
    /// The states of a training's plan, in which these weights are trained.
    pub fn of(plan: &Plan, trained: &[String]) -> States {
        let mut states = States::default();
        let of = |program: &'_ Program| {
            let place = |state: &StatePort| &program.buffers[state.port.buffer];
            // What lies on the host is told beside the plan.
            let is_own = |state: &&StatePort| plan.segments[place(state).segment].memory.counts(plan.target.family);
            let bytes = |state: &StatePort| (state.port.name.clone(), place(state).bytes);
            program.state.iter().filter(is_own).map(bytes).collect::<Vec<_>>()
        };
        let bytes: HashMap<String, u64> = plan.programs.iter().flat_map(of).collect();
        let held: u64 = bytes.values().sum();
        states.idle = plan.class_bytes(Class::State).saturating_sub(held);
        for (name, bytes) in bytes {
            *match Held::of(&name, trained) {
                Held::Weight => &mut states.weight,
                Held::Optimizer => &mut states.optimizer,
                Held::Gradient => &mut states.gradient,
                Held::Average => &mut states.average,
                Held::Statistic => &mut states.statistic,
            } += bytes;
        }
        states
    }
}
