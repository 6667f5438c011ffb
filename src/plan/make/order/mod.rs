//! In which order steps run. The order sets the lower bound of the arena; offsets can only approach it.

use crate::plan::lower::Draft;
use depth::{First, depth_first};
use list::{Next, list};
use live_bytes::{Ledger, Uses};
use search::search;

mod depth;
mod list;
mod live_bytes;
mod search;

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

/// An order of the steps that might be the best.
pub struct Order {
    /// How it was made.
    pub name: String,
    /// Every step once, behind all it depends on.
    pub steps: Vec<usize>,
    /// The most bytes of the arena that are live at once, each buffer rounded up to the alignment.
    pub bound: u64,
}

/// Candidates, the file's order first; each differs from those before it. Buffers start at multiples of `align`.
pub fn orders(draft: &Draft, align: u64) -> Vec<Order> {
    let file: Vec<usize> = (0..draft.steps.len()).collect();
    let Some(uses) = Uses::new(draft, align) else {
        // Sums that overflow are refused when the order is placed.
        return vec![Order { name: "file".into(), steps: file, bound: u64::MAX }];
    };
    let dag = Dag::new(draft);
    let mut found: Vec<Order> = Vec::new();
    let mut add = |name: &str, steps: Vec<usize>| {
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
    // From the order that is nearest to the file's, and from the best.
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

/// An order in which steps that make no less than they free wait until their first reader is next.
fn late(uses: &Uses, dag: &Dag, order: &[usize]) -> Vec<usize> {
    let mut ledger = Ledger::new(uses, false);
    let grows = |&s: &usize| {
        let growth = ledger.growth(s);
        ledger.run(s);
        growth >= 0
    };
    let grows: Vec<bool> = order.iter().map(grows).collect();
    // Per position, that of the step which it goes with. Those that go with one step keep their order.
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
