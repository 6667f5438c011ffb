//! ONNX's rows of one step of an optimizer: new weights and new states from gradients.

use super::compose::composed;
use super::{ensure, expect_dtype};
use crate::dtype::DType;
use crate::op::{Args, Call, Input, OpDef, OpResult, Sample, Var, inputs, names};

/// The rate, the number of updates so far, then the weights, their gradients, and each kind of state.
const GROUPS: &[Input] = inputs![R T inputs*];

pub(super) static OPS: &[OpDef] = &[
    composed(
        "ai.onnx.preview.training.Adagrad",
        "A step of Adagrad: new weights, and the sums of squared gradients",
        GROUPS,
        |_, call, x| grouped(call, x, 1, adagrad),
    )
    .sample(|s| stepped(s, 1).attr("decay_factor", 0.25).attr("epsilon", 0.01))
    .attrs(names![decay_factor epsilon norm_coefficient]),
    composed(
        "ai.onnx.preview.training.Adam",
        "A step of Adam: new weights, and the means of gradients and of their squares",
        GROUPS,
        |_, call, x| grouped(call, x, 2, adam),
    )
    .sample(|s| {
        let s = stepped(s, 2).attr("alpha", 0.8).attr("beta", 0.95);
        s.attr("epsilon", 0.01).attr("norm_coefficient_post", 0.001)
    })
    .attrs(names![alpha beta epsilon norm_coefficient norm_coefficient_post]),
    composed(
        "ai.onnx.preview.training.Momentum",
        "A step with momentum, standard or Nesterov's: new weights, and the momentum",
        GROUPS,
        |_, call, x| grouped(call, x, 1, momentum),
    )
    .sample(|s| stepped(s, 1).attr("alpha", 0.9).attr("beta", 0.5).attr("mode", "nesterov"))
    .attrs(names![alpha beta mode norm_coefficient]),
];

fn stepped(s: Sample, states: usize) -> Sample {
    let s = s.given(DType::F32, &[], &[0.1]).given(DType::I64, &[], &[3.0]).floats(&[&[3], &[2, 2], &[3], &[2, 2]]);
    let s = (0..states).fold(s, |s, _| s.input(DType::F32, &[3], 0.1, 1.0).input(DType::F32, &[2, 2], 0.1, 1.0));
    s.attr("norm_coefficient", 0.001)
}

/// What is the same for all weights of a step.
struct Step<'c, 'g> {
    call: &'c Call<'c>,
    rate: Var<'g>,
    /// The number of updates so far.
    count: Var<'g>,
}

/// One step of a weight: its gradient, with the decay of weights, and its states. Returns the new weight and states.
type Update = for<'g> fn(&Step<'_, 'g>, Var<'g>, Var<'g>, &[Var<'g>]) -> OpResult<Vec<Var<'g>>>;

/// Applies a step to each weight; all new weights come first, then all states of a kind.
fn grouped<'g>(call: &Call, x: &Args<Var<'g>>, states: usize, update: Update) -> OpResult<Vec<Var<'g>>> {
    let dtype = expect_dtype(call, 0, "a float type", DType::is_float)?;
    expect_dtype(call, 1, "an integer type", DType::is_int)?;
    let tensors: Vec<Var<'g>> = x.0.iter().skip(2).flatten().copied().collect();
    let kinds = 2 + states;
    ensure(call.inputs.len() == tensors.len() + 2 && tensors.len().is_multiple_of(kinds), || {
        format!("expected {kinds} inputs per weight after 'R' and 'T', found {}", tensors.len())
    })?;
    let count = tensors.len() / kinds;
    let decay = call.float("norm_coefficient", 0.0)?;
    let step = Step { call, rate: x[0].shaped(&[]), count: x[1].shaped(&[]) };
    let mut made = vec![Vec::with_capacity(count); 1 + states];
    for weight in 0..count {
        let of = |kind: usize| tensors[kind * count + weight];
        let (value, gradient) = (of(0), of(1));
        for kind in 0..kinds {
            let (expected, found) = (value.fact()?, of(kind).fact()?);
            ensure(expected == found && expected.dtype == dtype, || {
                format!("expected the gradient and states of a weight as {expected}, of type {dtype}, found {found}")
            })?;
        }
        let states: Vec<_> = (2..kinds).map(of).collect();
        let new = update(&step, value, value * decay + gradient, &states)?;
        made.iter_mut().zip(new).for_each(|(made, new)| made.push(new));
    }
    Ok(made.concat())
}

fn adagrad<'g>(step: &Step<'_, 'g>, x: Var<'g>, gradient: Var<'g>, states: &[Var<'g>]) -> OpResult<Vec<Var<'g>>> {
    let (decay, epsilon) = (step.call.float("decay_factor", 0.0)?, step.call.float("epsilon", 0.0)?);
    let rate = step.rate / (step.count.cast(x.fact()?.dtype) * decay + 1.0);
    let squares = states[0] + gradient * gradient;
    Ok(vec![x - rate * gradient / (squares.sqrt() + epsilon), squares])
}

fn adam<'g>(step: &Step<'_, 'g>, x: Var<'g>, gradient: Var<'g>, states: &[Var<'g>]) -> OpResult<Vec<Var<'g>>> {
    let number = |name: &str, default: f64| step.call.float(name, default);
    let (alpha, beta) = (number("alpha", 0.9)?, number("beta", 0.999)?);
    let (epsilon, after) = (number("epsilon", 0.0)?, number("norm_coefficient_post", 0.0)?);
    let first = states[0] * alpha + gradient * (1.0 - alpha);
    let second = states[1] * beta + gradient * gradient * (1.0 - beta);
    let count = step.count.cast(x.fact()?.dtype);
    let kept = |share: f64| 1.0 - x.like(share).pow(count);
    let corrected = step.rate * kept(beta).sqrt() / kept(alpha);
    let rate = step.count.greater(0.0).select(corrected, step.rate);
    let new = x - rate * first / (second.sqrt() + epsilon);
    Ok(vec![new * (1.0 - after), first, second])
}

fn momentum<'g>(step: &Step<'_, 'g>, x: Var<'g>, gradient: Var<'g>, states: &[Var<'g>]) -> OpResult<Vec<Var<'g>>> {
    let nesterov = step.call.choice("mode", &[("standard", false), ("nesterov", true)])?;
    let (alpha, beta) = (step.call.float("alpha", 0.0)?, step.call.float("beta", 0.0)?);
    let share = step.count.greater(0.0).select(x.like(beta), 1.0);
    let velocity = states[0] * alpha + share * gradient;
    let direction = if nesterov { gradient + velocity * alpha } else { velocity };
    Ok(vec![x - step.rate * direction, velocity])
}
