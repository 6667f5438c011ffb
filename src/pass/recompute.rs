//! Computes values of the forward computation again where the backward computation reads them, so that they need not be kept until then.
//!
//! ```text
//! x - f - y - g - z ..            x - f - y - g - z ..
//!         '----------- dg          '-- f' - y' ------ dg       y is kept no longer; x is
//! ```
//!
//! The copy of a node stands where its first reader of the backward computation stands. It reads the kept values, and copies of the others.
//! Which values are kept is a matter of memory and of time: [plans](crate::plan::fit::recompute) are asked for it.

use super::{Groups, Prepared};
use crate::error::Result;
use crate::graph::Graph;
use crate::op::ValueId;
use std::collections::{HashMap, HashSet};

/// Makes the backward computation read copies of all forward values that are not kept. A group is copied as a group: it is the same kernel
/// on the same elements, so no bit changes. Returns the nodes that were copied.
///
/// # Errors
/// When the graph has a cycle.
pub fn run(prepared: &mut Prepared, kept: &HashSet<ValueId>) -> Result<Vec<u32>> {
    let order = prepared.graph.order()?;
    let forward: HashSet<u32> = order.iter().copied().filter(|&node| !prepared.is_backward(node)).collect();
    let graph = &mut prepared.graph;
    let copied = |graph: &Graph, value: ValueId| {
        graph.node(value.node).op().is_some() && forward.contains(&value.node) && !kept.contains(&value)
    };
    let rank: HashMap<u32, usize> = order.iter().enumerate().map(|(at, &node)| (node, at)).collect();
    let mut copies: HashMap<u32, u32> = HashMap::new();
    for &id in &order {
        if forward.contains(&id) {
            continue;
        }
        let mut wanted = Vec::new();
        let mut seen = HashSet::new();
        let mut stack = vec![id];
        while let Some(node) = stack.pop() {
            for value in graph.operands(node).into_iter().flatten().filter(|value| copied(graph, *value)) {
                if !copies.contains_key(&value.node) && seen.insert(value.node) {
                    wanted.push(value.node);
                    stack.push(value.node);
                }
            }
        }
        // Nodes are copied behind those that they read.
        wanted.sort_by_key(|node| rank[node]);
        for node in wanted {
            let read = moved(graph, node, &copies, &copied);
            let copy = graph.copy(node, &read, id);
            copies.insert(node, copy);
        }
        let read = moved(graph, id, &copies, &copied);
        if read != graph.operands(id) {
            graph.read(id, &read);
        }
    }
    graph.sweep();
    graph.verify()?;
    let mut groups = Groups::default();
    for group in prepared.groups.iter() {
        // A value that the backward computation alone read is computed there alone.
        if graph.name_of(group.sink).is_some() {
            groups.push(group.clone());
        }
        if copies.contains_key(&group.sink) {
            groups.push(group.renumbered(|node| copies[&node]));
        }
    }
    prepared.groups = groups;
    Ok(copies.into_keys().collect())
}

/// The operands of a node, with copies for those that are copied.
fn moved(
    graph: &Graph,
    node: u32,
    copies: &HashMap<u32, u32>,
    copied: &impl Fn(&Graph, ValueId) -> bool,
) -> Vec<Option<ValueId>> {
    let copy = |value: ValueId| match copies.get(&value.node).filter(|_| copied(graph, value)) {
        Some(&node) => ValueId { node, ..value },
        None => value,
    };
    graph.operands(node).into_iter().map(|value| value.map(copy)).collect()
}
