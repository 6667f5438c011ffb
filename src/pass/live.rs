//! The bytes that are live while a graph runs, as far as they can be told before it is lowered.

use super::Prepared;
use crate::graph::{Graph, Kind};
use crate::op::{Lower, ValueId};
use std::collections::{HashMap, HashSet};

/// Per node, the bytes that are live while its kernel runs, one kernel after another in the order of the file. Only concatenations and
/// updates of states count as written in place.
pub fn bytes(Prepared { graph, groups, .. }: &Prepared, order: &[u32]) -> HashMap<u32, u64> {
    // A kernel of several nodes runs where the last of them stands.
    let group = |id: u32| groups.number(id);
    let ends: HashMap<usize, usize> = order.iter().enumerate().filter_map(|(at, &id)| Some((group(id)?, at))).collect();
    let runs = |id: u32, at: usize| group(id).map_or(at, |group| ends[&group]);
    // Per value, the last kernel that reads it or a view or concatenation of it.
    let mut last: HashMap<ValueId, usize> = graph.results().map(|v| (v, order.len())).collect();
    let lasting: HashSet<ValueId> = graph.states().iter().filter_map(|state| state.update).collect();
    let mut change = vec![0i128; order.len() + 2];
    for (at, &id) in order.iter().enumerate().rev() {
        let (runs, node) = (runs(id, at), graph.node(id));
        let stands = node.op().is_some_and(|op| matches!(op.lower, Lower::View(_) | Lower::Concat));
        let until = last.get(&ValueId { node: id, port: 0 }).copied().filter(|_| stands).unwrap_or(runs);
        for value in graph.operands(id).into_iter().flatten() {
            let last = last.entry(value).or_insert(until);
            *last = until.max(*last);
        }
        if stands || matches!(node.kind, Kind::Constant(_) | Kind::State(_)) {
            continue;
        }
        let from = if matches!(node.kind, Kind::Input) { 0 } else { runs };
        for value in (0..node.outputs.len() as u32).map(|port| ValueId { node: id, port }) {
            // A value that only its own kernel reads is never stored.
            let until = last.get(&value).copied().filter(|&until| until > runs || group(id).is_none());
            if let Some(until) = until.filter(|_| !lasting.contains(&value)) {
                change[from] += i128::from(size(graph, value));
                change[until + 1] -= i128::from(size(graph, value));
            }
        }
    }
    let mut now = 0;
    let sums = change.into_iter().map(|change| {
        now += change;
        u64::try_from(now).unwrap_or(u64::MAX)
    });
    let sums: Vec<u64> = sums.collect();
    order.iter().enumerate().map(|(at, &id)| (id, sums[runs(id, at)])).collect()
}

/// The bytes of a value.
fn size(graph: &Graph, value: ValueId) -> u64 {
    graph.fact(value).bytes() as u64
}
