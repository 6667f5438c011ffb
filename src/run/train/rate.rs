//! The learning rate, as a function of the step.

use crate::op::Var;
use serde::Serialize;
use std::f64::consts::PI;

/// How the rate falls.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum Schedule {
    /// It stays.
    Constant,
    /// Half a cosine, down to 0 at the last step.
    Cosine,
    /// A line, down to 0 at the last step.
    Linear,
    /// A tenth after each third of the steps.
    Step,
}

/// The learning rate.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Rate {
    /// The largest rate.
    pub most: f64,
    /// How it falls after the warmup.
    pub schedule: Schedule,
    /// Steps in which it rises from `most / warmup` to `most`.
    pub warmup: u64,
    /// The number of all steps.
    pub steps: u64,
}

impl Rate {
    /// A rate that stays.
    pub fn constant(rate: f64) -> Rate {
        Rate { most: rate, schedule: Schedule::Constant, warmup: 0, steps: 0 }
    }

    /// The rate of the step with this number, counted from 0.
    pub(super) fn at(self, step: Var) -> Var {
        let rest = self.steps.saturating_sub(self.warmup).max(1) as f64;
        let done = || (step - self.warmup as f64) / rest;
        let falling = match self.schedule {
            Schedule::Constant => step.like(self.most),
            Schedule::Cosine => ((done() * PI).cos() + 1.0) * (self.most / 2.0),
            Schedule::Linear => (1.0 - done()) * self.most,
            Schedule::Step => step.like(0.1).pow((done() * 3.0).floor()) * self.most,
        };
        if self.warmup == 0 {
            return falling;
        }
        let rising = (step + 1.0) * (self.most / self.warmup as f64);
        step.less(self.warmup as f64).select(rising, falling)
    }
}
