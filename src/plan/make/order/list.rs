//! List schedules: of the steps that could run, the one after which least is live.

use super::Dag;
use super::live_bytes::{Ledger, Uses};
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Which of the steps that could run is next.
#[derive(Clone, Copy)]
pub(super) enum Next {
    /// After which least is live, then the first in the file.
    Least,
    /// After which least is live, then that which has been possible for the shortest time.
    LeastNewest,
    /// That which has been possible for the shortest time, then the first in the file.
    Newest,
}

/// A list schedule; `backward`, one from the last step to the first: what is live is counted the same way.
pub(super) fn list(uses: &Uses, dag: &Dag, next: Next, backward: bool) -> Vec<usize> {
    let steps = dag.before.len();
    let (before, after) = if backward { (&dag.after, &dag.before) } else { (&dag.before, &dag.after) };
    let mut missing: Vec<usize> = before.iter().map(Vec::len).collect();
    let mut ledger = Ledger::new(uses, backward);
    let mut heap = BinaryHeap::new();
    // Per step that could run, its key; what else the heap holds of it is out of date.
    let mut current = vec![None; steps];
    let mut since = vec![0usize; steps];
    let mut order = Vec::with_capacity(steps);
    let key = |s: usize, since: usize, ledger: &Ledger| {
        let growth = if matches!(next, Next::Newest) { 0 } else { ledger.growth(s) };
        let age = if matches!(next, Next::Least) { 0 } else { steps - since };
        (growth, age, if backward { steps - s } else { s })
    };
    for s in (0..steps).filter(|&s| missing[s] == 0) {
        current[s] = Some(key(s, 0, &ledger));
        heap.push(Reverse((current[s], s)));
    }
    let mut stale = Vec::new();
    while let Some(Reverse((found, s))) = heap.pop() {
        if found.is_none() || found != current[s] {
            continue;
        }
        current[s] = None;
        order.push(s);
        // The growth of others changes with the first step that touches a buffer, and with the last but one.
        stale.extend(uses.touched[s].iter().filter(|&&b| ledger.is_new(b) || ledger.left[b as usize] == 2));
        ledger.run(s);
        for other in stale.drain(..).flat_map(|b: u32| &uses.touching[b as usize]).map(|&s| s as usize) {
            if current[other].is_some() {
                let value = Some(key(other, since[other], &ledger));
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
                current[other] = Some(key(other, since[other], &ledger));
                heap.push(Reverse((current[other], other)));
            }
        }
    }
    if backward {
        order.reverse();
    }
    order
}
