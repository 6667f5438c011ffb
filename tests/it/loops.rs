//! Loops: one step of a plan, however long they run, on every backend, forwards and back.

use crate::common::{self, backends};
use plimsoll::internals::plan::check;
use plimsoll::{DType, Graph, Limits, Planning, Recipe, Target, Trace};

/// The gates of each recurrent row.
const ROWS: [(&str, usize); 3] = [("RNN", 1), ("GRU", 3), ("LSTM", 4)];

/// A recurrent row over a sequence, with the derivatives of the sum of squares of all that it gives.
fn recurrent(op: &str, gates: usize, steps: usize, derives: bool) -> Graph {
    let (batch, input, hidden) = (2, 3, 5);
    let g = Trace::new(op);
    let x = g.input("x", DType::F32, [steps, batch, input]);
    let w = g.input("w", DType::F32, [1, gates * hidden, input]);
    let r = g.input("r", DType::F32, [1, gates * hidden, hidden]);
    let all = g.outputs(op, &[Some(x), Some(w), Some(r)], plimsoll::Attrs::new());
    let loss = all.iter().map(|y| (*y * *y).reduce_sum(&[], false)).reduce(|a, b| a + b).expect("it has outputs");
    if derives {
        for (name, gradient) in ["dx", "dw", "dr"].into_iter().zip(g.grad(loss, &[x, w, r])) {
            g.output(name, gradient);
        }
    }
    all.iter().enumerate().for_each(|(port, y)| g.output(&format!("y{port}"), *y));
    g.finish().expect("the row takes these inputs")
}

#[test]
fn sequences_and_their_derivatives_agree_with_the_reference() {
    let mut state = 11;
    for opener in backends() {
        for (op, gates) in ROWS {
            for (steps, derives) in [(2, false), (9, true), (70, true)] {
                let graph = recurrent(op, gates, steps, derives);
                common::runs_as_the_reference(&graph, &opener, &mut state);
            }
        }
    }
}

#[test]
fn a_sequence_is_one_step_however_long() {
    for target in [Target::cpu(2), Target::wgpu(), Target::cuda()] {
        for (op, gates) in ROWS {
            let plan = |steps: usize| {
                let graph = recurrent(op, gates, steps, true);
                Recipe::default().plan(graph, &target, &Limits { memory: None }).expect("it is planned")
            };
            let [short, long] = [plan(16), plan(65_536)];
            check::check(&long).expect("the plan is sound");
            assert_eq!(short.programs[0].steps.len(), long.programs[0].steps.len(), "{op} on {}", target.name);
            let loops = long.programs[0].kernels.iter().filter(|kernel| kernel.repeat().is_some()).count();
            assert_eq!(loops, 2, "{op} on {}: one loop walks on, one back", target.name);
            // Of a row that is thousands of times as long, nothing but the rows grows.
            let ports =
                |plan: &plimsoll::Plan| plan.programs[0].summary.input_bytes + plan.programs[0].summary.output_bytes;
            let rows = long.programs[0].summary.arena_bytes / ports(&long);
            assert!(rows <= 12, "{op} on {}: {rows} times its inputs and outputs", target.name);
        }
    }
}
