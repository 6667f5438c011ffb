//! What a picture of a training shows beside a plan: the part of an update that each step computes, and what each state holds.

use super::{Kind, Scene};
use crate::plan::View;
use crate::train::classes::{Held, Phase};
use serde::Serialize;

/// A part of an update.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Part {
    /// From the inputs to the loss.
    Forward,
    /// Values of the forward computation that the backward one computes once more.
    Again,
    /// The gradients.
    Backward,
    /// The weights and what the optimizer keeps.
    Update,
}

/// Every part in the order of legends, with its word and its fill colour: Paul Tol's pale ones, which no kind of bytes has.
const LOOKS: [(Part, &str, &str); 4] = [
    (Part::Forward, "forward", "#bbccee"),
    (Part::Again, "computed again", "#eeeebb"),
    (Part::Backward, "backward", "#ffcccc"),
    (Part::Update, "update", "#ccddaa"),
];

impl Part {
    /// Every part, in the order of legends.
    pub fn all() -> impl Iterator<Item = Part> {
        LOOKS.into_iter().map(|(part, ..)| part)
    }

    /// The part of a step, by the name that training gives its nodes.
    pub fn of(step: &str) -> Part {
        match Phase::of(step) {
            Phase::Forward => Part::Forward,
            Phase::Again => Part::Again,
            Phase::Backward => Part::Backward,
            Phase::Update => Part::Update,
        }
    }

    /// The word in legends.
    pub fn label(self) -> &'static str {
        self.look().1
    }

    /// The fill colour.
    pub fn fill(self) -> &'static str {
        self.look().2
    }

    fn look(self) -> (Part, &'static str, &'static str) {
        LOOKS.into_iter().find(|(part, ..)| *part == self).expect("every part is in the table")
    }
}

impl Scene {
    /// Says what its steps and its states are in a training of these weights.
    pub(super) fn name_parts(&mut self, program: View, trained: &[String]) {
        for step in &mut self.steps {
            step.part = Some(Part::of(&step.name));
        }
        for state in &program.state {
            let kind = match Held::of(&state.port.name, trained) {
                Held::Weight => Kind::Weight,
                Held::Optimizer => Kind::Optimizer,
                Held::Gradient | Held::Average | Held::Statistic => Kind::State,
            };
            self.buffers[state.port.buffer].kind = kind;
            if let Some(update) = state.update {
                self.buffers[update].kind = kind;
            }
        }
    }

    /// Its steps as runs of one part: the part, the first step, and one after the last. Empty if it is no scene of a training.
    pub(in crate::report) fn parts(&self) -> Vec<(Part, usize, usize)> {
        let mut runs: Vec<(Part, usize, usize)> = Vec::new();
        for (s, step) in self.steps.iter().enumerate() {
            match (step.part, runs.last_mut()) {
                (Some(part), Some((last, _, end))) if *last == part => *end = s + 1,
                (Some(part), _) => runs.push((part, s, s + 1)),
                (None, _) => {}
            }
        }
        runs
    }
}
