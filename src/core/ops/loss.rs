//! Losses of classes, as ONNX has them.

use super::compose::composed;
use super::ensure;
use crate::dtype::DType;
use crate::op::{Call, OpDef, OpResult, Sample, Var, inputs, names};

const REDUCTIONS: &[(&str, Reduction)] =
    &[("mean", Reduction::Mean), ("sum", Reduction::Sum), ("none", Reduction::None)];

/// The reduction of the losses of all places.
#[derive(Clone, Copy, PartialEq)]
enum Reduction {
    Mean,
    Sum,
    None,
}

pub(super) static OPS: &[OpDef] = &[
    composed(
        "NegativeLogLikelihoodLoss",
        "The negated element of the right class of log-probabilities [n, c, ..], weighted by class",
        inputs![input target weight?],
        |_, call, x| Ok(vec![loss(call, x[0], x[1], x.given(2))?]),
    )
    .wide()
    .sample(sample)
    .attrs(names![ignore_index reduction]),
    composed(
        "SoftmaxCrossEntropyLoss",
        "The negated logarithm of the right class's softmax over axis 1, weighted by class, and the log-probabilities",
        inputs![scores labels weights?],
        |_, call, x| {
            let logs = x[0].log_softmax(1);
            Ok(vec![loss(call, logs, x[1], x.given(2))?, logs])
        },
    )
    .wide()
    .sample(sample)
    .attrs(names![ignore_index reduction]),
];

fn sample(s: Sample) -> Sample {
    s.floats(&[&[2, 3, 4]])
        .given(DType::I64, &[2, 4], &[0.0, 2.0, 1.0, 1.0, 2.0, 0.0, 0.0, 1.0])
        .floats(&[&[3]])
        .attr("ignore_index", 1)
        .attr("reduction", "sum")
}

/// The loss of labels `[n, ..]`, given the logarithms `[n, c, ..]` of the probabilities of their classes.
fn loss<'g>(call: &Call, logs: Var<'g>, labels: Var<'g>, weights: Option<Var<'g>>) -> OpResult<Var<'g>> {
    let (shape, of) = (logs.shape()?, labels.shape()?);
    let places = shape.iter().enumerate().filter(|(axis, _)| *axis != 1).map(|(_, &extent)| extent);
    ensure(shape.len() >= 2 && places.eq(of.iter().copied()), || {
        format!("expected scores [n, c, ..] and labels [n, ..], found {shape} and {of}")
    })?;
    let classes = shape[1];
    let mut along = vec![1; shape.len()];
    along[1] = classes;
    let labels = labels.cast(DType::I64);
    let numbers = labels.scope().numbers(DType::I64, along.clone(), 0.0);
    let right = labels.unsqueeze(&[1]).equal(numbers);
    let of_right = |values: Var<'g>| right.select(values, 0.0).reduce_sum(&[1], false);
    let mut each = of_right(-logs);
    let mut counts = match weights {
        // A label that is no class does not count.
        None => of_right(logs.like(1.0)),
        Some(weights) => {
            let found = weights.shape()?;
            ensure(found[..] == [classes], || {
                format!("expected a weight for each of {classes} classes, found {found}")
            })?;
            of_right(weights.shaped(&along).expand(&shape))
        }
    };
    if call.attrs.get("ignore_index").is_some() {
        let ignored = labels.equal(labels.like(call.int("ignore_index", 0)? as f64));
        let none = each.like(0.0);
        // What is ignored may be infinite.
        (each, counts) = (ignored.select(none, each), ignored.select(none, counts));
    }
    each = each * counts;
    Ok(match call.choice("reduction", REDUCTIONS)? {
        Reduction::None => each,
        Reduction::Sum => each.reduce_sum(&[], false),
        Reduction::Mean => {
            let all = counts.expand(&of).reduce_sum(&[], false);
            each.reduce_sum(&[], false) / all
        }
    })
}
