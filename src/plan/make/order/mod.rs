//! Orders the steps. The order sets the lower bound of the arena, which offsets can only approach.

use crate::StepIdx;
use crate::lower::{Dag, Draft};
use depth::{First, depth_first};
use list::{Next, list};
use live_bytes::{LiveBytes, Uses};
use search::search;

mod depth;
mod list;
mod live_bytes;
mod search;

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

/// The least bytes that are live at once in the file's order and in a few others: what the arena takes at least, found without a search.
/// `None` if the sum of all bytes overflows.
pub fn peak(draft: &Draft, align: u64) -> Option<u64> {
    let uses = Uses::new(draft, align)?;
    let dag = Dag::new(draft);
    let file: Vec<_> = StepIdx::all(&draft.steps).collect();
    let late = late(&uses, &dag, &file);
    let least = list(&uses, &dag, Next::Least, false);
    [file, late, least].iter().map(|steps| uses.peak(steps)).min()
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
