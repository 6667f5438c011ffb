//! Orders the steps. The order sets the lower bound of the arena, which offsets can only approach.

use crate::plan::StepIdx;
use crate::plan::lower::Draft;
use depth::{First, depth_first};
use list::{Next, list};
use live_bytes::{LiveBytes, Uses};
use search::search;

mod depth;
mod list;
mod live_bytes;
mod search;

/// The dependencies between steps.
pub struct Dag {
    /// Per step, the steps that it depends on directly.
    pub before: Vec<Vec<StepIdx>>,
    /// Per step, the steps that depend on it directly.
    pub after: Vec<Vec<StepIdx>>,
}

impl Dag {
    /// Derives the dependencies from reads and writes. A read depends on the last write before it.
    ///
    /// If several steps write a buffer, all steps that read or write it keep the file's order.
    pub fn new(draft: &Draft) -> Dag {
        let mut writers = vec![0usize; draft.buffers.len()];
        for step in &draft.steps {
            step.writes.iter().for_each(|&b| writers[b] += 1);
        }
        let mut wrote: Vec<Option<StepIdx>> = vec![None; draft.buffers.len()];
        let mut read: Vec<Vec<StepIdx>> = vec![Vec::new(); draft.buffers.len()];
        let mut before: Vec<Vec<StepIdx>> = vec![Vec::new(); draft.steps.len()];
        for (s, step) in StepIdx::enumerate(&draft.steps) {
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
        for (s, list) in StepIdx::enumerate(&before) {
            list.iter().for_each(|&p| after[p].push(s));
        }
        Dag { before, after }
    }
}

/// A candidate for the order of the steps.
pub struct Order {
    /// The name of the method that made it.
    pub name: String,
    /// Every step once, after all steps that it depends on.
    pub steps: Vec<StepIdx>,
    /// The most bytes of the arena that are live at once, each buffer rounded up to the alignment.
    pub bound: u64,
}

/// The candidates, the file's order first. No two are equal. Buffers start at multiples of `align`.
pub fn orders(draft: &Draft, align: u64) -> Vec<Order> {
    let file: Vec<_> = StepIdx::all(&draft.steps).collect();
    let Some(uses) = Uses::new(draft, align) else {
        // The sum of sizes overflows. Placement refuses that with a message.
        return vec![Order { name: "file".into(), steps: file, bound: u64::MAX }];
    };
    let dag = Dag::new(draft);
    let mut found: Vec<Order> = Vec::new();
    let mut add = |name: &str, steps: Vec<StepIdx>| {
        if found.iter().all(|other| other.steps != steps) {
            found.push(Order { name: name.into(), bound: uses.peak(&steps), steps });
        }
    };
    add("file", file.clone());
    add("late", late(&uses, &dag, &file));
    add("depth-first", depth_first(&uses, &dag, First::File));
    add("largest-first", depth_first(&uses, &dag, First::Largest));
    add("shared-first", depth_first(&uses, &dag, First::Shared));
    add("sethi-ullman", depth_first(&uses, &dag, First::Needy));
    add("least-growth", list(&uses, &dag, Next::Least, false));
    add("least-newest", list(&uses, &dag, Next::LeastNewest, false));
    add("newest", list(&uses, &dag, Next::Newest, false));
    add("least-growth-backward", list(&uses, &dag, Next::Least, true));
    add("least-newest-backward", list(&uses, &dag, Next::LeastNewest, true));
    // Search from the better of the first two orders, which are nearest to the file's, and from the best of all.
    let near = found.iter().take(2).min_by_key(|order| order.bound).map(|order| order.steps.clone());
    let best = found.iter().min_by_key(|order| order.bound).map(|order| (order.name.clone(), order.steps.clone()));
    let searches = near.map(|steps| ("file".to_owned(), steps)).into_iter().chain(best);
    for (name, mut steps) in searches {
        if search(&uses, &dag, &mut steps) && found.iter().all(|other| other.steps != steps) {
            found.push(Order { name: format!("{name}, searched"), bound: uses.peak(&steps), steps });
        }
    }
    found
}

/// Delays each step that frees no more than it allocates until its first reader is next.
fn late(uses: &Uses, dag: &Dag, order: &[StepIdx]) -> Vec<StepIdx> {
    let mut live = LiveBytes::new(uses, false);
    let grows = |&s: &StepIdx| {
        let growth = live.growth(s);
        live.run(s);
        growth >= 0
    };
    let grows: Vec<bool> = order.iter().map(grows).collect();
    // Per position, the position of the step that it is moved before. Steps that are moved before one step keep their order.
    let mut with: Vec<usize> = (0..order.len()).collect();
    let mut position = vec![0; order.len()];
    order.iter().enumerate().for_each(|(at, &s)| position[s] = at);
    for at in (0..order.len()).rev() {
        let first = dag.after[order[at]].iter().map(|&s| with[position[s]]).min();
        with[at] = first.filter(|_| grows[at]).unwrap_or(at);
    }
    let mut sorted: Vec<usize> = (0..order.len()).collect();
    sorted.sort_by_key(|&at| (with[at], at));
    sorted.into_iter().map(|at| order[at]).collect()
}
