//! Computes values of the forward computation again where the backward computation reads them, so that they need not be kept until then.
//!
//! ```text
//! x - f - y - g - z ..            x - f - y - g - z ..
//!         '----------- dg          '-- f' - y' ------ dg       y is kept no longer; x is
//! ```
//!
//! The copy of a node stands where its first reader of the backward computation stands. It reads the kept values, and copies of the others.
//! It is the same kernel on the same elements, so no bit changes. Which values are kept is a matter of memory and of time:
//! [`fit::recompute`](crate::plan::fit) decides.

use crate::error::Result;
use crate::graph::Graph;
use crate::op::ValueId;
use std::collections::{HashMap, HashSet};

/// Makes the backward computation read copies of all forward values that are not kept.
///
/// # Errors
/// When the graph has a cycle.
pub fn run(graph: &mut Graph, kept: &HashSet<ValueId>) -> Result<()> {
    let order = graph.order()?;
    let copied = |graph: &Graph, value: ValueId| {
        graph.node(value.node).op().is_some() && !graph.is_backward(value.node) && !kept.contains(&value)
    };
    let mut copies: HashMap<u32, u32> = HashMap::new();
    let rank: HashMap<u32, usize> = order.iter().enumerate().map(|(at, &node)| (node, at)).collect();
    for &id in &order {
        if !graph.is_backward(id) {
            continue;
        }
        let operands = graph.operands(id);
        let mut wanted: Vec<u32> =
            operands.iter().flatten().filter(|value| copied(graph, **value)).map(|value| value.node).collect();
        if wanted.is_empty() {
            continue;
        }
        // Nodes are copied behind those that they read.
        let mut stack = wanted.clone();
        wanted.clear();
        let mut seen = HashSet::new();
        while let Some(node) = stack.pop() {
            if !copies.contains_key(&node) && seen.insert(node) {
                wanted.push(node);
                stack.extend(graph.operands(node).iter().flatten().filter(|v| copied(graph, **v)).map(|v| v.node));
            }
        }
        wanted.sort_by_key(|node| rank[node]);
        for node in wanted {
            let read = moved(graph, node, &copies, &copied);
            let copy = graph.copy(node, &read, id);
            copies.insert(node, copy);
        }
        let read = moved(graph, id, &copies, &copied);
        graph.read(id, &read);
    }
    graph.sweep();
    graph.verify()
}

/// The operands of a node, with copies for those that are copied.
fn moved(
    graph: &Graph,
    node: u32,
    copies: &HashMap<u32, u32>,
    copied: &impl Fn(&Graph, ValueId) -> bool,
) -> Vec<Option<ValueId>> {
    let operands = graph.operands(node).into_iter();
    let copy = |value: ValueId| match copies.get(&value.node).filter(|_| copied(graph, value)) {
        Some(&node) => ValueId { node, ..value },
        None => value,
    };
    operands.map(|value| value.map(copy)).collect()
}
