//! In which order steps run. The order sets the lower bound of the arena; offsets can only approach it.

use super::Class;
use super::lower::Draft;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Which steps must precede which.
pub struct Dag {
    /// Per step, those right before it.
    pub before: Vec<Vec<usize>>,
    /// Per step, those right after it.
    pub after: Vec<Vec<usize>>,
}

impl Dag {
    /// Reads follow the write they see. A buffer that several steps write keeps the file's order of all who touch it.
    pub fn new(draft: &Draft) -> Dag {
        let mut writers = vec![0usize; draft.buffers.len()];
        for step in &draft.steps {
            step.writes.iter().for_each(|&b| writers[b] += 1);
        }
        let mut wrote: Vec<Option<usize>> = vec![None; draft.buffers.len()];
        let mut read: Vec<Vec<usize>> = vec![Vec::new(); draft.buffers.len()];
        let mut before: Vec<Vec<usize>> = vec![Vec::new(); draft.steps.len()];
        for (s, step) in draft.steps.iter().enumerate() {
            for &b in &step.reads {
                before[s].extend(wrote[b]);
                if writers[b] > 1 {
                    read[b].push(s);
                }
            }
            for &b in &step.writes {
                before[s].extend(wrote[b]);
                before[s].append(&mut read[b]);
                wrote[b] = Some(s);
            }
            before[s].retain(|&p| p != s);
            before[s].sort_unstable();
            before[s].dedup();
        }
        let mut after = vec![Vec::new(); draft.steps.len()];
        for (s, list) in before.iter().enumerate() {
            list.iter().for_each(|&p| after[p].push(s));
        }
        Dag { before, after }
    }
}

/// Candidate orders by name, the file's first. Each lists every step once, behind all it depends on.
pub fn orders(draft: &Draft) -> Vec<(&'static str, Vec<usize>)> {
    let dag = Dag::new(draft);
    vec![
        ("file", (0..draft.steps.len()).collect()),
        ("depth-first", depth_first(draft, &dag)),
        ("least-growth", least_growth(draft, &dag)),
    ]
}

fn arena_bytes(draft: &Draft, buffer: usize) -> u64 {
    let b = &draft.buffers[buffer];
    if matches!(b.class, Class::Activation | Class::Input) { b.bytes } else { 0 }
}

/// What a step needs is made right before it, the largest result first.
fn depth_first(draft: &Draft, dag: &Dag) -> Vec<usize> {
    let made = |s: usize| draft.steps[s].writes.iter().map(|&b| arena_bytes(draft, b)).sum::<u64>();
    let mut order = Vec::with_capacity(draft.steps.len());
    let mut state = vec![0u8; draft.steps.len()];
    for root in (0..draft.steps.len()).filter(|&s| dag.after[s].is_empty()) {
        let mut stack = vec![root];
        while let Some(&s) = stack.last() {
            if state[s] == 0 {
                state[s] = 1;
                let mut needs: Vec<usize> = dag.before[s].iter().copied().filter(|&p| state[p] == 0).collect();
                needs.sort_by_key(|&p| (made(p), Reverse(p)));
                stack.extend(needs);
            } else {
                stack.pop();
                if state[s] == 1 {
                    state[s] = 2;
                    order.push(s);
                }
            }
        }
    }
    order
}

/// Of the steps that could run, the one after which least is live; the file's order decides between equals.
fn least_growth(draft: &Draft, dag: &Dag) -> Vec<usize> {
    let steps = draft.steps.len();
    let mut readers = vec![0usize; draft.buffers.len()];
    let mut touched: Vec<Vec<usize>> = vec![Vec::new(); draft.buffers.len()];
    for (s, step) in draft.steps.iter().enumerate() {
        for &b in &unique(&step.reads) {
            readers[b] += 1;
            touched[b].push(s);
        }
    }
    let mut live = vec![false; draft.buffers.len()];
    let growth = |s: usize, readers: &[usize], live: &[bool]| -> i64 {
        let step = &draft.steps[s];
        let made: u64 = step.writes.iter().filter(|&&b| !live[b]).map(|&b| arena_bytes(draft, b)).sum();
        let freed: u64 = unique(&step.reads).iter().filter(|&&b| readers[b] == 1).map(|&b| arena_bytes(draft, b)).sum();
        made as i64 - freed as i64
    };
    let mut missing: Vec<usize> = dag.before.iter().map(Vec::len).collect();
    let mut heap = BinaryHeap::new();
    let mut current = vec![i64::MAX; steps];
    for s in (0..steps).filter(|&s| missing[s] == 0) {
        current[s] = growth(s, &readers, &live);
        heap.push(Reverse((current[s], s)));
    }
    let mut done = vec![false; steps];
    let mut order = Vec::with_capacity(steps);
    while let Some(Reverse((value, s))) = heap.pop() {
        if done[s] || value != current[s] {
            continue;
        }
        done[s] = true;
        order.push(s);
        let step = &draft.steps[s];
        let mut stale = Vec::new();
        for &b in &step.writes {
            if !live[b] {
                live[b] = true;
                stale.push(b);
            }
        }
        for b in unique(&step.reads) {
            readers[b] -= 1;
            if readers[b] == 1 {
                stale.push(b);
            }
        }
        for &next in &dag.after[s] {
            missing[next] -= 1;
            if missing[next] == 0 {
                current[next] = growth(next, &readers, &live);
                heap.push(Reverse((current[next], next)));
            }
        }
        // One reader is left: reading this buffer now frees it.
        for other in stale.into_iter().flat_map(|b| &touched[b]).copied().collect::<Vec<_>>() {
            if !done[other] && missing[other] == 0 {
                let value = growth(other, &readers, &live);
                if value != current[other] {
                    current[other] = value;
                    heap.push(Reverse((value, other)));
                }
            }
        }
    }
    order
}

fn unique(buffers: &[usize]) -> Vec<usize> {
    let mut out = buffers.to_vec();
    out.sort_unstable();
    out.dedup();
    out
}
