//! Losses: how far the model's output is from the labels.

use super::Training;
use crate::dtype::DType;
use crate::error::{Error, Result, ensure};
use crate::op::{Fact, OpResult, Var};
use serde::Serialize;

/// The loss of the model's first output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum Loss {
    /// The negative logarithm of the probability of the right class. The output is not yet a softmax. A label of -100 does not count.
    CrossEntropy,
    /// The square of the difference.
    Mse,
    /// The negative logarithm of the probability of a label of 0 or 1. The output is not yet a sigmoid.
    BceLogits,
    /// The magnitude of the difference.
    L1,
    /// Half the square of a difference up to 1, and beyond that its magnitude less a half.
    Huber,
}

/// The axis of the classes where nothing tells it: the last of three, else the second.
pub(super) fn usual_class_axis(output: &Fact) -> Option<usize> {
    match output.shape.len() {
        0 | 1 => None,
        3 => Some(2),
        _ => Some(1),
    }
}

/// The axis of the classes of an output: the one without which it has the shape of the labels. Where there are no labels, it is the last of
/// three axes, else the second; `None` if there is no second one. Where the labels of one axis have the shape of those of another, the
/// training must say which it is.
///
/// # Errors
/// When it does not, or names an axis that cannot have the classes.
pub(super) fn class_axis(output: &Fact, training: &Training) -> Result<Option<usize>> {
    let rank = output.shape.len();
    let axes = 1..rank.max(1);
    if let Some(axis) = training.class_axis {
        ensure(axes.contains(&axis), || {
            let expected = match axes.end {
                0 | 1 => "a first output with an axis of classes behind the batch".to_owned(),
                end => format!("one from 1 to {}, of the first output", end - 1),
            };
            Error::usage(format!("class axis {axis}: expected {expected}, found {output}"))
        })?;
        return Ok(Some(axis));
    }
    // Axes of one element change no element's place.
    let row = |shape: &[usize]| shape.iter().copied().skip(1).filter(|&extent| extent != 1).collect::<Vec<_>>();
    let without = |axis: usize| row(&[&output.shape[..axis], &output.shape[axis + 1..]].concat());
    let usual = usual_class_axis(output);
    let Some(labels) = training.labels.as_ref().map(|labels| row(labels)).or(usual.map(without)) else {
        return Ok(None);
    };
    let fits: Vec<usize> = axes.filter(|&axis| without(axis) == labels).collect();
    match fits[..] {
        // The shape that the labels lack is told where they are looked at.
        [] => Ok(usual),
        [axis] => Ok(Some(axis)),
        [first, second, ..] => Err(Error::usage(format!(
            "the first output {output} has its classes on axis {first} or on axis {second}: the labels fit both; \
             --class-axis {second} or --class-axis {first} says which"
        ))),
    }
}

/// The label of elements that do not count.
pub const IGNORED: f64 = -100.0;

/// The float label of elements that do not count: those of rows that fill up the last part of a validation.
pub(super) const PADDING: f64 = (1u128 << 127) as f64;

/// The number of elements that a sum of losses is divided by.
pub(super) enum Count<'g> {
    Known(usize),
    /// It depends on the labels.
    Counted(Var<'g>),
}

impl Loss {
    /// The axis of the classes of a loss that has some, which [`class_axis`] found.
    pub(super) fn axis(output: &Fact, classes: Option<usize>) -> OpResult<usize> {
        classes.ok_or_else(|| format!("cross_entropy: expected an output [batch, classes, ..], found {output}"))
    }

    /// The fact of the labels for an output.
    pub(super) fn labels(self, output: &Fact, classes: Option<usize>) -> OpResult<Fact> {
        ensure(output.dtype == DType::F32, || format!("expected a model whose first output is f32, found {output}"))?;
        if self != Loss::CrossEntropy {
            ensure(!output.shape.is_empty(), || {
                format!("expected a first output with a row per example, found {output}")
            })?;
            return Ok(output.clone());
        }
        let mut shape = output.shape.clone();
        shape.remove(Loss::axis(output, classes)?);
        Ok(Fact::new(DType::I64, shape))
    }

    /// The sum of the losses of all elements that count, and their number.
    pub(super) fn sum<'g>(
        self,
        output: Var<'g>,
        labels: Var<'g>,
        classes: Option<usize>,
        smoothing: f64,
    ) -> OpResult<(Var<'g>, Count<'g>)> {
        if self == Loss::CrossEntropy {
            return cross_entropy(output, labels, classes, smoothing);
        }
        let each = self.each(output, labels);
        let count = each.shape()?.numel();
        Ok((each.reduce_sum(&[], false), Count::Known(count)))
    }

    /// As [`sum`](Self::sum), of rows among which there may be [padding](PADDING). The number of elements counts the padding in, unless it depends on
    /// the labels.
    pub(super) fn sum_beside_padding<'g>(
        self,
        output: Var<'g>,
        labels: Var<'g>,
        classes: Option<usize>,
    ) -> OpResult<(Var<'g>, Count<'g>)> {
        if self == Loss::CrossEntropy {
            return cross_entropy(output, labels, classes, 0.0);
        }
        // Labels above it count.
        let each = labels.equal(PADDING).select(0.0, self.each(output, labels));
        let count = each.shape()?.numel();
        Ok((each.reduce_sum(&[], false), Count::Known(count)))
    }

    /// The loss of each element, of a loss that does not judge classes.
    fn each<'g>(self, output: Var<'g>, labels: Var<'g>) -> Var<'g> {
        match self {
            Loss::CrossEntropy => unreachable!("it judges classes"),
            Loss::Mse => {
                let difference = output - labels;
                difference * difference
            }
            Loss::BceLogits => output.relu() - output * labels + ((-output.abs()).exp() + 1.0).log(),
            Loss::L1 => (output - labels).abs(),
            Loss::Huber => {
                let difference = (output - labels).abs();
                difference.less(1.0).select(difference * difference * 0.5, difference - 0.5)
            }
        }
    }

    /// The number of right answers, of a loss that judges classes.
    pub(super) fn correct<'g>(
        self,
        output: Var<'g>,
        labels: Var<'g>,
        classes: Option<usize>,
    ) -> OpResult<Option<Var<'g>>> {
        if self != Loss::CrossEntropy {
            return Ok(None);
        }
        let axis = Loss::axis(&output.fact()?, classes)?;
        let attrs = crate::op::Attrs::new().with("axis", axis as i64).with("keepdims", 0);
        let right = output.op("ArgMax", &[], attrs).equal(labels);
        Ok(Some(right.cast(DType::F32).reduce_sum(&[], false)))
    }
}

/// The loss of an element is that of the right class, or with smoothing, partly the mean of all classes.
fn cross_entropy<'g>(
    output: Var<'g>,
    labels: Var<'g>,
    classes: Option<usize>,
    smoothing: f64,
) -> OpResult<(Var<'g>, Count<'g>)> {
    let fact = output.fact()?;
    let axis = Loss::axis(&fact, classes)?;
    let count = fact.shape[axis];
    let logs = output.log_softmax(axis as i64);
    let labels = labels.unsqueeze(&[axis as i64]);
    let mut along = vec![1; fact.shape.len()];
    along[axis] = count;
    let numbers = labels.scope().numbers(DType::I64, along, 0.0);
    let right = labels.equal(numbers);
    let counts = labels.equal(labels.like(IGNORED));
    let mut each = right.select(logs * -(1.0 - smoothing), 0.0);
    if smoothing > 0.0 {
        let all = counts.select(0.0, logs * -(smoothing / count as f64));
        each = each + all;
    }
    let counted = counts.select(logs.like(0.0), logs.like(1.0)).reduce_sum(&[], false);
    Ok((each.reduce_sum(&[], false), Count::Counted(counted)))
}
