//! List schedules: of the steps that are ready, the one with the fewest live bytes after it is next.

use super::live_bytes::{LiveBytes, Uses};
use crate::lower::Dag;
use crate::{BufferIdx, StepIdx};
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// The rule that says which ready step is next.
#[derive(Clone, Copy)]
pub(super) enum Next {
    /// The one with the fewest live bytes after it, then the first in the file.
    Least,
    /// The one with the fewest live bytes after it, then the one that became ready last.
    LeastNewest,
    /// The one that became ready last, then the first in the file.
    Newest,
}

/// A list schedule. A `backward` schedule is made from the last step to the first; live bytes are counted the same way.
pub(super) fn list(uses: &Uses, dag: &Dag, next: Next, backward: bool) -> Vec<StepIdx> {
    let steps = dag.before.len();
    let (before, after) = if backward { (&dag.after, &dag.before) } else { (&dag.before, &dag.after) };
    let mut missing: Vec<usize> = before.iter().map(Vec::len).collect();
    let mut live = LiveBytes::new(uses, backward);
    let mut heap = BinaryHeap::new();
    // Per ready step, its key. Other entries of the step in the heap are out of date.
    let mut current = vec![None; steps];
    let mut since = vec![0usize; steps];
    let mut order = Vec::with_capacity(steps);
    let key = |s: StepIdx, since: usize, live: &LiveBytes| {
        let growth = if matches!(next, Next::Newest) { 0 } else { live.growth(s) };
        let age = if matches!(next, Next::Least) { 0 } else { steps - since };
        (growth, age, if backward { steps - s.index() } else { s.index() })
    };
    for s in StepIdx::all(&missing).filter(|&s| missing[s] == 0) {
        current[s] = Some(key(s, 0, &live));
        heap.push(Reverse((current[s], s)));
    }
    let mut stale = Vec::new();
    while let Some(Reverse((found, s))) = heap.pop() {
        if found.is_none() || found != current[s] {
            continue;
        }
        current[s] = None;
        order.push(s);
        // The first step that touches a buffer, and the last but one, change the growth of the buffer's other steps.
        stale.extend(uses.touched[s].iter().filter(|&&b| live.is_new(b) || live.left[b] == 2));
        live.run(s);
        for other in stale.drain(..).flat_map(|b: BufferIdx| &uses.touching[b]).copied() {
            if current[other].is_some() {
                let value = Some(key(other, since[other], &live));
                if value != current[other] {
                    current[other] = value;
                    heap.push(Reverse((value, other)));
                }
            }
        }
        for &other in &after[s] {
            missing[other] -= 1;
            if missing[other] == 0 {
                since[other] = order.len();
                current[other] = Some(key(other, since[other], &live));
                heap.push(Reverse((current[other], other)));
            }
        }
    }
    if backward {
        order.reverse();
    }
    order
}
