//! Depth-first orders, from the results back: the inputs of a step are computed right before it.

use super::live_bytes::Uses;
use crate::lower::Dag;
use crate::{BufferIdx, StepIdx};
use std::cmp::Reverse;

/// The rule that says which of a step's inputs is computed first.
#[derive(Clone, Copy)]
pub(super) enum First {
    /// The first in the file.
    File,
    /// The one with the largest result.
    Largest,
    /// The one whose result, with all that it is computed from, has the most other readers; then the one with the most bytes.
    /// This is the rule of XLA's depth-first scheduler.
    Shared,
    /// The one whose peak exceeds its result by most. In a tree, no order that completes subtrees one by one has a lower peak
    /// (Sethi and Ullman, 1970; Liu, 1986).
    Needy,
}

pub(super) fn depth_first(uses: &Uses, dag: &Dag, first: First) -> Vec<StepIdx> {
    let steps = dag.before.len();
    let key = keys(uses, dag, first);
    let mut order = Vec::with_capacity(steps);
    let (mut begun, mut done) = (vec![false; steps], vec![false; steps]);
    for root in StepIdx::all(&dag.after).filter(|&s| dag.after[s].is_empty()) {
        let mut stack = vec![root];
        while let Some(&s) = stack.last() {
            if !begun[s] {
                begun[s] = true;
                let from = stack.len();
                stack.extend(dag.before[s].iter().filter(|&&p| !begun[p]));
                stack[from..].sort_by_key(|&p| (key[p], Reverse(p)));
                continue;
            }
            stack.pop();
            if !done[s] {
                done[s] = true;
                order.push(s);
            }
        }
    }
    order
}

/// A key per step. The step with the greatest key goes first.
fn keys(uses: &Uses, dag: &Dag, first: First) -> Vec<(u64, u64)> {
    let size = |b: BufferIdx| uses.bytes[b];
    // The buffers that a step is the first to touch, and the bytes of those that outlive it.
    let first_in = move |b: BufferIdx, s: StepIdx| !uses.before[b] && uses.touching[b][0] == s;
    let made = |s: StepIdx| uses.touched[s].iter().copied().filter(move |&b| first_in(b, s));
    let kept = |&b: &BufferIdx| uses.behind[b] || uses.touching[b].len() > 1;
    let leaves = |s: StepIdx| made(s).filter(kept).map(size).sum::<u64>();
    let mut keys: Vec<(u64, u64)> = Vec::with_capacity(dag.before.len());
    let mut need: Vec<u64> = Vec::new();
    for (s, before) in StepIdx::enumerate(&dag.before) {
        keys.push(match first {
            First::File => (0, 0),
            First::Largest => (leaves(s), 0),
            First::Shared => {
                let own = (dag.after[s].len().saturating_sub(1) as u64, leaves(s));
                before.iter().fold(own, |sum, &p| (sum.0.saturating_add(keys[p].0), sum.1.saturating_add(keys[p].1)))
            }
            First::Needy => {
                let mut parts: Vec<(u64, u64)> = before.iter().map(|&p| (keys[p].0, need[p])).collect();
                parts.sort_unstable_by_key(|&part| Reverse(part));
                let (mut held, mut most) = (0u64, 0u64);
                for (beyond, need) in parts {
                    most = most.max(held.saturating_add(need));
                    held = held.saturating_add(need - beyond);
                }
                most = most.max(held.saturating_add(made(s).map(size).sum()));
                need.push(most);
                (most - leaves(s).min(most), 0)
            }
        });
    }
    keys
}
