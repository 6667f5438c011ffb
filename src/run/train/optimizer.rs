//! Optimizers: the elementwise change of a weight by its gradient. Their constants are PyTorch's.

use super::is_finite;
use crate::op::Var;
use serde::Serialize;

/// How a gradient changes a weight.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub enum Optimizer {
    /// Against the gradient, or a moving sum of gradients.
    Sgd {
        /// The share of the sum that is kept; 0 keeps none.
        momentum: f64,
        /// True to look ahead by one momentum.
        nesterov: bool,
    },
    /// By the gradient's moving mean over the root of its moving mean square.
    Adam {
        /// The share of the mean that is kept.
        beta1: f64,
        /// The share of the mean square that is kept.
        beta2: f64,
        /// Added to the root.
        eps: f64,
        /// True to take the decay from the weight, not to add it to the gradient.
        decoupled: bool,
    },
}

impl Optimizer {
    /// Adam with the usual constants where none is given.
    pub fn adam(beta1: Option<f64>, beta2: Option<f64>, eps: Option<f64>, decoupled: bool) -> Optimizer {
        let [beta1, beta2] = [beta1.unwrap_or(0.9), beta2.unwrap_or(0.999)];
        Optimizer::Adam { beta1, beta2, eps: eps.unwrap_or(1e-8), decoupled }
    }

    /// The values that it keeps per weight.
    pub(super) fn slots(self) -> &'static [&'static str] {
        match self {
            Optimizer::Sgd { momentum: 0.0, .. } => &[],
            Optimizer::Sgd { .. } => &["optimizer/momentum"],
            Optimizer::Adam { .. } => &["optimizer/mean", "optimizer/square"],
        }
    }

    /// The factors that it keeps for all weights: `1 - beta^step`, which corrects a mean that began at zero.
    pub(super) fn corrections(self) -> &'static [&'static str] {
        match self {
            Optimizer::Sgd { .. } => &[],
            Optimizer::Adam { .. } => &["mean", "square"],
        }
    }

    /// The factors at this step, from those of the step before. `1 - beta` is exact, so few bits are lost at the first steps.
    pub(super) fn corrected<'g>(self, factors: impl Iterator<Item = Var<'g>>) -> Vec<Var<'g>> {
        match self {
            Optimizer::Sgd { .. } => Vec::new(),
            Optimizer::Adam { beta1, beta2, .. } => {
                factors.zip([beta1, beta2]).map(|(factor, beta)| factor * beta + (1.0 - beta)).collect()
            }
        }
    }

    /// The new weight, and the new values of its slots; the old ones unless all is `finite`. The weight follows from the slots' values as they
    /// are kept, so that no others are needed.
    #[expect(clippy::too_many_arguments, reason = "each is a term of the formula")]
    pub(super) fn update<'g>(
        self,
        weight: Var<'g>,
        gradient: Var<'g>,
        slots: &[Var<'g>],
        rate: Var<'g>,
        decay: f64,
        factors: &[Var<'g>],
        finite: Var<'g>,
    ) -> (Var<'g>, Vec<Var<'g>>) {
        let old = weight;
        let decayed = || if decay == 0.0 { gradient } else { gradient + weight * decay };
        // An element whose gradient is not finite keeps its value, and the training ends with finite weights.
        let held = |new: Var<'g>, old: Var<'g>| finite.and(is_finite(new)).select(new, old);
        match self {
            Optimizer::Sgd { momentum: 0.0, .. } => (held(weight - decayed() * rate, old), Vec::new()),
            Optimizer::Sgd { momentum, nesterov } => {
                let gradient = decayed();
                let sum = held(slots[0] * momentum + gradient, slots[0]);
                let change = if nesterov { gradient + sum * momentum } else { sum };
                (held(weight - change * rate, old), vec![sum])
            }
            Optimizer::Adam { beta1, beta2, eps, decoupled } => {
                let (gradient, weight) = match decoupled {
                    true if decay != 0.0 => (gradient, weight * (1.0 - rate * decay)),
                    true => (gradient, weight),
                    false => (decayed(), weight),
                };
                let mean = held(slots[0] * beta1 + gradient * (1.0 - beta1), slots[0]);
                let square = held(slots[1] * beta2 + gradient * gradient * (1.0 - beta2), slots[1]);
                let root = square.sqrt() / factors[1].sqrt() + eps;
                (held(weight - rate / factors[0] * (mean / root), old), vec![mean, square])
            }
        }
    }
}
