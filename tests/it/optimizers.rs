//! Optimizers, schedules, clipping and moving averages beside loops over numbers, which share nothing with the graphs.

use crate::common;
use plimsoll::internals::onnx::{self, Model};
use plimsoll::internals::plan::Planning;
use plimsoll::internals::train::{self, Loss, Optimizer, Rate, Schedule, Training};
use plimsoll::{Class, DType, Limits, Options, Recipe, Target, Tensor};

const ROWS: usize = 6;
const COLUMNS: usize = 4;
const STEPS: usize = 20;

/// A linear layer with a bias: `y = x w + b`.
const LINEAR: &str = r#"<ir_version: 10, opset_import: ["" : 20]>
    linear (float[batch, 4] x) => (float[batch, 1] y)
    <float[4, 1] w = {0.5, -1.25, 0.75, 2}, float[1] b = {-0.5}>
    { product = MatMul (x, w) y = Add (product, b) }"#;

/// The weights that the file gives: `w`, then `b`.
const FIRST: [f64; COLUMNS + 1] = [0.5, -1.25, 0.75, 2.0, -0.5];

fn method(optimizer: Optimizer) -> Training {
    Training::new(Loss::Mse, optimizer, Rate { steps: STEPS as u64, ..Rate::constant(0.03) })
}

fn sgd(momentum: f64, nesterov: bool) -> Optimizer {
    Optimizer::Sgd { momentum, nesterov }
}

fn adam(decoupled: bool) -> Optimizer {
    Optimizer::Adam { beta1: 0.9, beta2: 0.99, eps: 1e-8, decoupled }
}

/// The rows of a step, and what is right for them. Every number is a multiple of an eighth.
fn batch(step: usize) -> ([f64; ROWS * COLUMNS], [f64; ROWS]) {
    let number = |at: usize| ((at * 37 + step * 53) % 31) as f64 / 8.0 - 1.5;
    (std::array::from_fn(number), std::array::from_fn(|row| number(row * 5 + 3) * 2.0))
}

/// What a step shows, and what it leaves.
struct State {
    loss: f64,
    rate: f64,
    norm: f64,
    /// `w`, then `b`; so are the others.
    weights: [f64; COLUMNS + 1],
    averages: [f64; COLUMNS + 1],
}

/// The rate of a step, counted from 0, by the words of the command's help.
fn rate(rate: Rate, step: usize) -> f64 {
    let (step, warmup) = (step as f64, rate.warmup as f64);
    if step < warmup {
        return rate.most * (step + 1.0) / warmup;
    }
    let done = (step - warmup) / (rate.steps as f64 - warmup);
    rate.most
        * match rate.schedule {
            Schedule::Constant => 1.0,
            Schedule::Cosine => 0.5 * (1.0 + (std::f64::consts::PI * done).cos()),
            Schedule::Linear => 1.0 - done,
            Schedule::Step if done < 1.0 / 3.0 => 1.0,
            Schedule::Step if done < 2.0 / 3.0 => 0.1,
            Schedule::Step => 0.01,
        }
}

/// The steps in loops, as PyTorch's documentation gives them.
fn loops(method: &Training) -> Vec<State> {
    let mut weights = FIRST;
    let mut averages = FIRST;
    let (mut first, mut second) = ([0.0; COLUMNS + 1], [0.0; COLUMNS + 1]);
    let mut states = Vec::new();
    for step in 0..STEPS {
        let (x, y) = batch(step);
        let (mut loss, mut gradients) = (0.0, [0.0; COLUMNS + 1]);
        for row in 0..ROWS {
            let x = &x[row * COLUMNS..(row + 1) * COLUMNS];
            let mut error = weights[COLUMNS] - y[row];
            for column in 0..COLUMNS {
                error += x[column] * weights[column];
            }
            loss += error * error / ROWS as f64;
            for column in 0..COLUMNS {
                gradients[column] += 2.0 * error * x[column] / ROWS as f64;
            }
            gradients[COLUMNS] += 2.0 * error / ROWS as f64;
        }
        let norm = gradients.iter().map(|g| g * g).sum::<f64>().sqrt();
        if let Some(most) = method.clip {
            let factor = (most / (norm + 1e-6)).min(1.0);
            gradients.iter_mut().for_each(|gradient| *gradient *= factor);
        }
        let rate = rate(method.rate, step);
        for at in 0..=COLUMNS {
            let axes = if at < COLUMNS { 2 } else { 1 };
            let decay = if axes >= method.decay_dims { method.decay } else { 0.0 };
            let mut gradient = gradients[at];
            match method.optimizer {
                Optimizer::Sgd { momentum, nesterov } => {
                    gradient += decay * weights[at];
                    first[at] = if step == 0 { gradient } else { momentum * first[at] + gradient };
                    let change = if nesterov { gradient + momentum * first[at] } else { first[at] };
                    weights[at] -= rate * change;
                }
                Optimizer::Adam { beta1, beta2, eps, decoupled } => {
                    if decoupled {
                        weights[at] -= rate * decay * weights[at];
                    } else {
                        gradient += decay * weights[at];
                    }
                    first[at] = beta1 * first[at] + (1.0 - beta1) * gradient;
                    second[at] = beta2 * second[at] + (1.0 - beta2) * gradient * gradient;
                    let time = (step + 1) as i32;
                    let mean = first[at] / (1.0 - beta1.powi(time));
                    let square = second[at] / (1.0 - beta2.powi(time));
                    weights[at] -= rate * mean / (square.sqrt() + eps);
                }
            }
            let kept = method.ema.unwrap_or(0.0);
            averages[at] = kept * averages[at] + (1.0 - kept) * weights[at];
        }
        states.push(State { loss, rate, norm, weights, averages });
    }
    states
}

fn near(what: &str, found: f64, expected: f64) {
    assert!((found - expected).abs() <= 1e-5 * expected.abs(), "{what}: expected {expected}, found {found}");
}

/// Holds all steps of a method on every backend against the loops. Returns these.
fn judge(name: &str, method: &Training) -> Vec<State> {
    let expected = loops(method);
    let model = Model::new(onnx::text::parse(LINEAR, "linear.onnxtxt".as_ref()).expect("the text is sound"));
    let model = model.with_weights();
    let graph = onnx::import(&model, &[("batch".into(), ROWS)]).expect("it is a graph");
    let programs = train::programs(&graph, &model.weights(), method).expect("it can be trained");
    let graph = &programs.parts[0].1;
    for (backend, open) in common::backends() {
        let session = common::load(graph.clone(), open(), backend, &Options::default());
        let session = session.expect("it loads");
        for (step, expected) in expected.iter().enumerate() {
            let (x, y) = batch(step);
            let x = Tensor::from_f64(DType::F32, [ROWS, COLUMNS], &x);
            let labels = Tensor::from_f64(DType::F32, [ROWS, 1], &y);
            let shown = session.run(&[("x", x), (train::LABELS, labels)]).expect("it runs");
            let place = |what: &str| format!("{name} on {backend}, step {step}, {what}");
            for (output, expected) in [("loss", expected.loss), ("lr", expected.rate), ("grad_norm", expected.norm)] {
                let found = shown.iter().find(|(name, _)| name == output).expect("it is shown").1.to_f64()[0];
                near(&place(output), found, expected);
            }
            let state = |name: &str| session.state(name).expect("it is a state").to_f64();
            let mut kinds = vec![("", expected.weights)];
            kinds.extend(method.ema.map(|_| ("ema/", expected.averages)));
            for (kind, expected) in kinds {
                let found = [state(&format!("{kind}w")), state(&format!("{kind}b"))].concat();
                // The error of a sum is one of its largest parts, and a weight may pass through zero.
                let largest = expected.iter().fold(0.0, |most: f64, value| most.max(value.abs()));
                for (at, (found, expected)) in found.iter().zip(expected).enumerate() {
                    let what = place(&format!("{kind}weight {at}"));
                    assert!((found - expected).abs() <= 1e-5 * largest, "{what}: expected {expected}, found {found}");
                }
            }
        }
    }
    expected
}

/// Two methods whose weights end apart: a test of one would not pass with the other.
fn differ(a: &[State], b: &[State]) {
    let ends = [a, b].map(|states| states[STEPS - 1].weights);
    let apart = ends[0].iter().zip(ends[1]).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    assert!(apart > 1e-3, "{ends:?}");
}

#[test]
fn sgd_follows_the_loops() {
    let plain = judge("plain", &method(sgd(0.0, false)));
    let momentum = judge("momentum", &method(sgd(0.9, false)));
    let nesterov = judge("nesterov", &method(sgd(0.9, true)));
    let decayed = judge("decay", &Training { decay: 0.1, ..method(sgd(0.9, false)) });
    let both = judge("decay, nesterov", &Training { decay: 0.1, ..method(sgd(0.9, true)) });
    let matrices = judge("decay of matrices", &Training { decay: 0.1, decay_dims: 2, ..method(sgd(0.9, false)) });
    for (a, b) in
        [(&plain, &momentum), (&momentum, &nesterov), (&momentum, &decayed), (&decayed, &both), (&decayed, &matrices)]
    {
        differ(a, b);
    }
}

#[test]
fn adam_follows_the_loops() {
    let plain = judge("adam", &method(adam(false)));
    let decayed = judge("adam, decay", &Training { decay: 0.1, ..method(adam(false)) });
    let decoupled = judge("adamw", &Training { decay: 0.1, ..method(adam(true)) });
    let matrices = judge("adamw, matrices", &Training { decay: 0.1, decay_dims: 2, ..method(adam(true)) });
    for (a, b) in [(&plain, &decayed), (&decayed, &decoupled), (&decoupled, &matrices)] {
        differ(a, b);
    }
}

#[test]
fn moving_averages_follow_the_loops() {
    for optimizer in [sgd(0.9, false), adam(true)] {
        let found = judge("ema", &Training { ema: Some(0.8), ..method(optimizer) });
        let State { weights, averages, .. } = &found[STEPS - 1];
        assert!(weights.iter().zip(averages).any(|(a, b)| (a - b).abs() > 1e-3), "{weights:?} and {averages:?}");
    }
}

/// Gradients whose norm is less than the bound stay, others are scaled down to it: both happen.
#[test]
fn clipped_gradients_follow_the_loops() {
    for optimizer in [sgd(0.9, true), adam(false)] {
        let mut norms: Vec<f64> = loops(&method(optimizer)).iter().map(|state| state.norm).collect();
        norms.sort_by(f64::total_cmp);
        let most = norms[STEPS / 2];
        let found = judge("clip", &Training { clip: Some(most), ..method(optimizer) });
        let clipped = found.iter().filter(|state| state.norm > most).count();
        assert!(0 < clipped && clipped < STEPS, "{clipped} of {STEPS} steps are clipped");
    }
}

#[test]
fn schedules_follow_the_loops() {
    for schedule in [Schedule::Constant, Schedule::Cosine, Schedule::Linear, Schedule::Step] {
        for warmup in [0, 1, 5] {
            let method = method(sgd(0.9, false));
            let rate = Rate { schedule, warmup, ..method.rate };
            let name = format!("{schedule:?} behind {warmup}");
            let found = judge(&name, &Training { rate, ..method });
            let rates: Vec<f64> = found.iter().map(|state| state.rate).collect();
            assert_eq!(rates[warmup as usize], 0.03, "{name}: the warmup ends at the largest rate");
            let falls = rates[STEPS - 1] < rates[warmup as usize];
            assert_eq!(falls, schedule != Schedule::Constant, "{name}: {rates:?}");
        }
    }
}

/// A weight's, its mean's and its mean square's update read the same elements. The CPU keeps three loops.
#[test]
fn an_update_is_one_kernel_where_launches_cost() {
    let model = Model::new(onnx::text::parse(LINEAR, "linear".as_ref()).expect("the text is sound")).with_weights();
    let weights = model.weights();
    let graph = onnx::import(&model, &[("batch".into(), ROWS)]).expect("it is a graph");
    let step = train::programs(&graph, &weights, &method(adam(true))).expect("it trains").parts.remove(0).1;
    for (target, joined) in [(Target::cuda(), 2), (Target::cpu(2), 0)] {
        let plan = Recipe::default().plan(step.clone(), &target, &Limits { memory: None }).expect("it is planned");
        let states = plan.programs[0].steps.iter().map(|step| {
            let is_state = step.writes.iter().map(|&buffer| plan.programs[0].buffers[buffer].class == Class::State);
            is_state.filter(|&is_state| is_state).count()
        });
        let several: Vec<usize> = states.filter(|&count| count > 1).collect();
        assert_eq!(several, vec![3; joined], "for {}", target.name);
    }
}
