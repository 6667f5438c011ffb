//! The losses of a run, in a bounded number of points, for a picture.

use serde::Serialize;

/// The most points. A picture has no room for more.
const MOST: usize = 1024;

/// Losses over the steps of a run. A point is the mean of as many steps as it takes to have few points.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Losses {
    /// Steps per point.
    each: u64,
    /// Mean losses, of steps in order.
    points: Vec<f64>,
    /// The sum and the number of the losses behind the last point.
    #[serde(skip)]
    rest: (f64, u64),
    /// The number of steps.
    steps: u64,
    /// The results of validation.
    valid: Vec<Valid>,
    /// Of so many validations, `valid` keeps one.
    #[serde(skip)]
    every: usize,
    #[serde(skip)]
    validations: usize,
}

/// The result of a validation.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Valid {
    /// The number of steps before it.
    pub step: u64,
    /// The mean loss.
    pub loss: f64,
    /// The share of right answers, of classes.
    pub accuracy: Option<f64>,
}

impl Default for Losses {
    fn default() -> Losses {
        Losses { each: 1, points: Vec::new(), rest: (0.0, 0), steps: 0, valid: Vec::new(), every: 1, validations: 0 }
    }
}

impl Losses {
    /// Adds the loss of a step.
    pub fn push(&mut self, loss: f32) {
        self.steps += 1;
        self.rest = (self.rest.0 + f64::from(loss), self.rest.1 + 1);
        if self.rest.1 < self.each {
            return;
        }
        self.points.push(self.rest.0 / self.rest.1 as f64);
        self.rest = (0.0, 0);
        if self.points.len() == MOST {
            self.points = self.points.chunks(2).map(|pair| pair.iter().sum::<f64>() / pair.len() as f64).collect();
            self.each *= 2;
        }
    }

    /// Adds what a validation found behind the steps so far.
    pub fn validated(&mut self, loss: f64, accuracy: Option<f64>) {
        if self.validations.is_multiple_of(self.every) {
            self.valid.push(Valid { step: self.steps, loss, accuracy });
        }
        self.validations += 1;
        if self.valid.len() == MOST {
            let mut number = 0;
            self.valid.retain(|_| {
                number += 1;
                number % 2 == 1
            });
            self.every *= 2;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_steps_are_points_and_many_are_means() {
        let mut losses = Losses::default();
        (0..5).for_each(|step| losses.push(step as f32));
        assert_eq!((losses.each, &losses.points[..]), (1, &[0.0, 1.0, 2.0, 3.0, 4.0][..]));
        let mut losses = Losses::default();
        for step in 0..100_000 {
            losses.push(step as f32);
            if step % 10 == 9 {
                losses.validated(f64::from(step), None);
            }
        }
        assert!(losses.points.len() < MOST && losses.points.len() >= MOST / 2, "{}", losses.points.len());
        assert!(losses.valid.len() < MOST && losses.valid.len() >= MOST / 2, "{}", losses.valid.len());
        assert_eq!(losses.points[3], 3.0 * losses.each as f64 + (losses.each - 1) as f64 / 2.0);
        assert!(losses.valid.iter().all(|valid| valid.loss + 1.0 == valid.step as f64));
        let apart = losses.valid[1].step - losses.valid[0].step;
        assert!(losses.valid.windows(2).all(|pair| pair[1].step - pair[0].step == apart));
    }
}
