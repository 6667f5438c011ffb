//! Computes values of the forward computation again where the backward computation reads them, so that they need not be kept until then.
//!
//! ```text
//! x - f - y - g - z ..            x - f - y - g - z ..
//!         '----------- dg          '-- f' - y' ------ dg       y is kept no longer; x is
//! ```
//!
//! The copy of a node stands where its first reader of the backward computation stands. It reads the kept values, and copies of the others.
//! Which values are kept is a matter of memory and of time: plans are asked for it.

use super::{GroupKind, Groups, Prepared};
use crate::error::Result;
use crate::graph::{Graph, Kind};
use crate::op::{Call, Lower, NodeId, ValueId};
use crate::ops;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, HashMap, HashSet};

/// The work of values that are computed again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Recompute {
    /// Floating-point operations for values that are computed again.
    pub extra_flop: u64,
    /// Bytes that the kernels of these values read and write. What a kernel of the backward computation computes within itself is not
    /// counted: it reads about as much in place of the values.
    pub extra_bytes: u64,
    /// All other floating-point operations. An element of what is no product counts as one, and so does an element that is reduced.
    pub flop: u64,
}

impl Recompute {
    /// The work of copies, each with its original. An original that is not there any more was moved, and is no further work.
    ///
    /// # Errors
    /// When the graph has a cycle.
    pub fn of(prepared: &Prepared, copies: &HashMap<NodeId, NodeId>) -> Result<Recompute> {
        let Prepared { graph, groups, .. } = prepared;
        // Of several copies of a node that is not there any more, one was moved.
        let mut moved = HashSet::new();
        let mut is_further = |node: NodeId| graph.name_of(node).is_some() || !moved.insert(node);
        let (mut extra, mut all, mut bytes) = (0.0, 0.0, 0);
        let mut read_by = HashSet::new();
        for node in graph.order()?.into_iter().filter(|&node| graph.node(node).op().is_some()) {
            let work = work(graph, node);
            all += work;
            if graph.is_view(node) || !copies.get(&node).is_some_and(|&original| is_further(original)) {
                continue;
            }
            extra += work;
            let sink = groups.of(node).map_or(node, |group| group.sink);
            if !copies.contains_key(&sink) {
                continue;
            }
            let own = groups.number(node);
            let within = |value: &ValueId| own.is_some() && groups.number(value.node) == own;
            let read = graph.operands(node).into_iter().flatten().filter(|value| !within(value));
            read_by.extend(read.map(|value| (sink, value)));
            if sink == node {
                bytes += graph.node(node).outputs.iter().map(|output| output.fact.bytes() as u64).sum::<u64>();
            }
        }
        bytes += read_by.into_iter().map(|(_, value)| graph.fact(value).bytes() as u64).sum::<u64>();
        Ok(Recompute { extra_flop: extra as u64, extra_bytes: bytes, flop: (all - extra) as u64 })
    }

    /// The further operations, in shares of all others.
    pub fn share(&self) -> f64 {
        self.extra_flop as f64 / self.flop.max(1) as f64
    }
}

/// Elements of a row that a kernel holds while it reduces it.
const HELD: usize = 4096;

/// The floating-point operations of a node: those of a product, else one per element of the result, or of what is reduced. A view has none.
/// The kernel that reads the sum of a short dense row holds this row, so the sum counts as one operation.
pub fn work(graph: &Graph, node: NodeId) -> f64 {
    let Some(op) = graph.node(node).op() else { return 0.0 };
    if graph.is_view(node) {
        return 0.0;
    }
    let operands = graph.operands(node);
    let inputs: Vec<_> = operands.iter().map(|value| value.map(|value| graph.fact(value))).collect();
    let call = Call { op, attrs: &graph.node(node).attrs, inputs: &inputs };
    match op.flop {
        Some(count) => count(&call),
        None => {
            let counted = if let Lower::Reduce(_) = op.lower { inputs[0].filter(|_| !is_held(&call)) } else { None };
            counted.unwrap_or(graph.fact(node.output(0))).shape.numel() as f64
        }
    }
}

/// True if a reduction is of the last axes, and these have few elements.
fn is_held(call: &Call) -> bool {
    let (Ok(axes), shape) = (call.reduced_axes(), call.shape(0)) else { return false };
    let first = shape.len() - axes.len();
    axes.iter().copied().eq(first..shape.len()) && shape[first..].iter().product::<usize>() <= HELD
}

/// Makes the backward computation read copies of all forward values that are not kept. A group is copied as a group: it is the same kernel
/// on the same elements, so no bit changes. Returns the copies, each with its original.
///
/// # Errors
/// When the graph has a cycle.
pub fn run(prepared: &mut Prepared, kept: &HashSet<ValueId>) -> Result<HashMap<NodeId, NodeId>> {
    let order = prepared.graph.order()?;
    let forward: HashSet<NodeId> = order.iter().copied().filter(|&node| !prepared.is_backward(node)).collect();
    let graph = &mut prepared.graph;
    let copied = |graph: &Graph, value: ValueId| {
        // What another rank gives is given once.
        let is_own = graph.node(value.node).op().is_some_and(|op| !ops::is_passed(op));
        is_own && forward.contains(&value.node) && !kept.contains(&value)
    };
    let rank: HashMap<NodeId, usize> = order.iter().enumerate().map(|(at, &node)| (node, at)).collect();
    let mut copies: HashMap<NodeId, NodeId> = HashMap::new();
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
    Ok(copies.into_iter().map(|(original, copy)| (copy, original)).collect())
}

/// The most nodes between a value and what its kernels read.
const CHAIN: usize = 24;

/// Gives each kernel that reads an elementwise value that is computed again a copy of its own, which [fusion](super::regroup) takes into the
/// kernel: the value is stored no longer. What it is computed from must be live then anyway, or be less. Returns false if nothing changes.
///
/// ```text
/// x - f' - y - dg               x -+- f' - dg
/// |        '--------- dh        |  '- f'' ------- dh
/// '------------------ dk        '---------------- dk
/// ```
///
/// # Errors
/// When the graph has a cycle.
pub fn split(prepared: &mut Prepared, copies: &mut HashMap<NodeId, NodeId>) -> Result<bool> {
    let Prepared { graph, groups, .. } = prepared;
    let order = graph.order()?;
    let rank: HashMap<NodeId, usize> = order.iter().enumerate().map(|(at, &node)| (node, at)).collect();
    // Per value, the last node that reads it or a view of it.
    let mut last = rank.clone();
    for &node in order.iter().rev() {
        for value in graph.operands(node).into_iter().flatten() {
            let end = if graph.is_view(node) { last[&node] } else { rank[&node] };
            last.entry(value.node).and_modify(|last| *last = end.max(*last));
        }
    }
    let is_map = |graph: &Graph, node: NodeId| matches!(graph.node(node).op().map(|op| &op.lower), Some(Lower::Map(_)));
    let is_reduction =
        |graph: &Graph, node: NodeId| matches!(graph.node(node).op().map(|op| &op.lower), Some(Lower::Reduce(_)));
    // The kernels of nodes that have another one than their group's.
    let mut kernels: HashMap<NodeId, NodeId> = HashMap::new();
    let mut is_changed = false;
    for &node in order.iter().rev() {
        let value = node.output(0);
        let in_map = groups.of(node).is_none_or(|group| group.kind == GroupKind::Map);
        if !copies.contains_key(&node) || !is_map(graph, node) || !in_map || graph.is_output(value) {
            continue;
        }
        // Per kernel, the readers that are part of it. What can only read a stored value reads this node's.
        let mut readers: BTreeMap<usize, (NodeId, Vec<NodeId>)> = BTreeMap::new();
        let mut users = graph.users(value);
        users.dedup();
        let mut is_stored = false;
        for user in users {
            if !is_map(graph, user) && !is_reduction(graph, user) {
                is_stored = true;
                continue;
            }
            let own = groups.of(user).map_or(user, |group| group.sink);
            let kernel = kernels.get(&user).copied().unwrap_or(own);
            readers.entry(rank[&kernel]).or_insert((kernel, Vec::new())).1.push(user);
        }
        let mut readers = readers.into_iter();
        if !is_stored {
            match readers.next() {
                Some((_, (kernel, _))) => _ = kernels.insert(node, kernel),
                None => continue,
            }
        }
        for (at, (kernel, users)) in readers {
            let is_copied = |node: NodeId| copies.contains_key(&node) && is_map(graph, node);
            let Some((leaves, chain)) = leaves(graph, node, is_copied) else { continue };
            let bytes = |node: NodeId| graph.fact(node.output(0)).bytes();
            let is_stored = |node: &NodeId| groups.of(*node).is_none_or(|group| group.sink == *node);
            let less: usize = bytes(node) + chain.into_iter().filter(is_stored).map(bytes).sum::<usize>();
            let dying = leaves.iter().filter(|leaf| last[&leaf.node] < at);
            let longer: usize = dying.map(|&leaf| graph.fact(leaf).bytes()).sum();
            if longer >= less {
                continue;
            }
            leaves.iter().for_each(|leaf| _ = last.entry(leaf.node).and_modify(|last| *last = at.max(*last)));
            let read = graph.operands(node);
            let copy = graph.copy(node, &read, users[0]);
            for &user in &users {
                let turned =
                    |operand: ValueId| if operand == value { ValueId { node: copy, ..value } } else { operand };
                let read: Vec<_> = graph.operands(user).into_iter().map(|operand| operand.map(turned)).collect();
                graph.read(user, &read);
            }
            kernels.insert(copy, kernel);
            copies.insert(copy, copies[&node]);
            is_changed = true;
        }
    }
    Ok(is_changed)
}

/// The values from which a value is computed by nodes that are copied, without those that last: constants and states; and these nodes. `None`
/// if they are too many.
fn leaves(graph: &Graph, node: NodeId, is_copied: impl Fn(NodeId) -> bool) -> Option<(Vec<ValueId>, HashSet<NodeId>)> {
    let (mut found, mut seen, mut stack) = (Vec::new(), HashSet::new(), vec![node]);
    while let Some(node) = stack.pop() {
        for value in graph.operands(node).into_iter().flatten() {
            if is_copied(value.node) {
                if seen.insert(value.node) {
                    stack.push(value.node);
                }
            } else if !matches!(graph.node(value.node).kind, Kind::Constant(_) | Kind::State(_))
                && !found.contains(&value)
            {
                found.push(value);
            }
        }
        if seen.len() > CHAIN {
            return None;
        }
    }
    Some((found, seen))
}

/// The operands of a node, with copies for those that are copied.
fn moved(
    graph: &Graph,
    node: NodeId,
    copies: &HashMap<NodeId, NodeId>,
    copied: &impl Fn(&Graph, ValueId) -> bool,
) -> Vec<Option<ValueId>> {
    let copy = |value: ValueId| match copies.get(&value.node).filter(|_| copied(graph, value)) {
        Some(&node) => ValueId { node, ..value },
        None => value,
    };
    graph.operands(node).into_iter().map(|value| value.map(copy)).collect()
}
