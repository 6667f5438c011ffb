//! On GPUs, elementwise code takes as long as its bytes take to move; its arithmetic is free. So where several kernels read one elementwise
//! value, each may compute it itself, if all of them together then move fewer bytes.
//!
//! ```text
//! x (bf16) - f (f32) -+- sum            x -+- f - sum
//!                     '- g - product       '- f' - g - product
//! ```
//!
//! So may kernels that reduce the same rows, such as those of a softmax and of its gradient.

use super::Prepared;
use super::group::{GroupKind, MAX_GROUP_NODES, is_computable, keeps_index, max_reads, uses_index};
use crate::error::Result;
use crate::graph::Graph;
use crate::op::{Lower, NodeId, ValueId};
use crate::ops::BAND;
use crate::target::Target;
use std::collections::HashMap;

/// A launch takes about as long as moving this many bytes.
const LAUNCH: u64 = 4 << 20;

/// The kernels of a graph while copies are made.
struct Kernels<'a> {
    prepared: &'a mut Prepared,
    target: &'a Target,
    /// The nodes of each group, with the copies that it will take in.
    members: Vec<Vec<NodeId>>,
    /// The number of each node's group.
    of: HashMap<NodeId, usize>,
}

/// Gives each kernel that reads an elementwise value a copy of its own, which [fusion](super::regroup) takes into the kernel. Adds the
/// copies, each with its original, to `copies`. Returns false if nothing changes.
///
/// # Errors
/// When the graph has a cycle.
pub fn run(prepared: &mut Prepared, target: &Target, copies: &mut HashMap<NodeId, NodeId>) -> Result<bool> {
    let order = prepared.graph.order()?;
    let members: Vec<Vec<NodeId>> = prepared.groups.iter().map(|group| group.nodes.clone()).collect();
    let of = members.iter().enumerate().flat_map(|(at, nodes)| nodes.iter().map(move |&node| (node, at))).collect();
    let mut kernels = Kernels { prepared, target, members, of };
    let mut is_changed = false;
    // Readers first: what they take in reads further values.
    for &node in order.iter().rev() {
        let Some(own) = kernels.of.get(&node).copied() else { continue };
        let group = kernels.prepared.groups.get(own);
        if group.sink != node || !matches!(group.kind, GroupKind::Map | GroupKind::Row { .. }) {
            continue;
        }
        let readers = kernels.readers(own, node);
        if let Some(readers) = readers.filter(|readers| kernels.is_less(own, node, readers)) {
            kernels.divide(own, node, &readers, copies);
            is_changed = true;
        }
    }
    Ok(is_changed)
}

/// The bytes that all kernels read and write, with those that launches are worth.
pub fn moved_bytes(prepared: &Prepared) -> u64 {
    let graph = &prepared.graph;
    let grouped = prepared.groups.iter().map(|group| (group.sink, reads(graph, &group.nodes)));
    let is_alone = |node: &NodeId| prepared.groups.of(*node).is_none() && !graph.is_view(*node);
    let alone = graph.order().expect("the graph was verified").into_iter().filter(is_alone);
    let alone = alone.filter(|&node| graph.node(node).op().is_some()).map(|node| (node, reads(graph, &[node])));
    let bytes = |value: ValueId| graph.fact(value).bytes() as u64;
    let all = grouped.chain(alone);
    all.map(|(sink, reads)| LAUNCH + bytes(sink.output(0)) + reads.into_iter().map(bytes).sum::<u64>()).sum()
}

/// The values from outside that some nodes read.
fn reads(graph: &Graph, nodes: &[NodeId]) -> Vec<ValueId> {
    let mut found = Vec::new();
    for value in nodes.iter().flat_map(|&node| graph.operands(node)).flatten() {
        if !nodes.contains(&value.node) && !found.contains(&value) {
            found.push(value);
        }
    }
    found
}

impl Kernels<'_> {
    /// The kernels that read the value of an elementwise kernel, in the order of the graph, if there are several and each can take it in.
    fn readers(&self, own: usize, sink: NodeId) -> Option<Vec<usize>> {
        let graph = &self.prepared.graph;
        let value = sink.output(0);
        if graph.is_output(value) {
            return None;
        }
        let indexed = self.members[own].iter().any(|&node| match graph.node(node).op().map(|op| op.lower) {
            Some(Lower::Map(map)) => uses_index(graph, node, map),
            _ => true,
        });
        let mut found: Vec<usize> = Vec::new();
        for user in graph.users(value) {
            let reader = *self.of.get(&user)?;
            let takes = graph.is_backward(user) == graph.is_backward(sink) && self.takes(reader, user, own, indexed);
            if !takes {
                return None;
            }
            if !found.contains(&reader) {
                found.push(reader);
            }
        }
        let fits = |&reader: &usize| {
            let all: Vec<NodeId> = self.members[reader].iter().chain(&self.members[own]).copied().collect();
            all.len() <= MAX_GROUP_NODES && reads(graph, &all).len() <= max_reads(self.target)
        };
        (found.len() > 1 && found.iter().all(fits)).then_some(found)
    }

    /// True if a kernel can compute an elementwise kernel's nodes where one of its own reads their value.
    fn takes(&self, reader: usize, user: NodeId, own: usize, indexed: bool) -> bool {
        let graph = &self.prepared.graph;
        let group = self.prepared.groups.get(reader);
        if let GroupKind::Row { reduction } = self.prepared.groups.get(own).kind {
            return self.takes_rows(reader, reduction, own);
        }
        let full = match group.kind {
            GroupKind::Map => &graph.fact(group.sink.output(0)).shape,
            GroupKind::Row { reduction } if !indexed || self.is_masked(own) && keeps_index(graph, reduction) => {
                &graph.fact(graph.operands(reduction)[0].expect("a reduction reads one value")).shape
            }
            _ => return false,
        };
        let is_code = matches!(graph.node(user).op().map(|op| &op.lower), Some(Lower::Map(_) | Lower::Reduce(_)));
        is_code && self.members[own].iter().all(|&node| is_computable(graph, self.target, node, full))
    }

    /// True if a kernel's code depends on the index by bands alone, which rows compute, too.
    fn is_masked(&self, own: usize) -> bool {
        let graph = &self.prepared.graph;
        self.members[own].iter().all(|&node| match graph.node(node).op().map(|op| op.lower) {
            Some(Lower::Map(map)) => graph.node(node).op_name() == BAND || !uses_index(graph, node, map),
            _ => false,
        })
    }

    /// True if a kernel can reduce the rows that another reduces, and compute what that computes of each element.
    fn takes_rows(&self, reader: usize, reduction: NodeId, own: usize) -> bool {
        let graph = &self.prepared.graph;
        let reduced = |node: NodeId| {
            let full = graph.operands(node)[0].map(|value| graph.fact(value).shape.clone())?;
            let axes = graph.with_call(node, |call| call.reduced_axes())?.ok()?;
            Some((full, axes))
        };
        let shape = |node: NodeId| &graph.fact(node.output(0)).shape;
        let Some((full, axes)) = reduced(reduction) else { return false };
        let sink = self.prepared.groups.get(own).sink;
        // A result per row is small: it is stored.
        if *shape(sink) != full || shape(reduction).numel() == full.numel() {
            return false;
        }
        match self.prepared.groups.get(reader).kind {
            GroupKind::Map => self.members[reader].iter().all(|&node| *shape(node) == full),
            GroupKind::Row { reduction: other } => {
                reduced(other) == Some((full, axes)) && shape(other) == shape(reduction)
            }
            _ => false,
        }
    }

    /// True if kernels with copies of their own move fewer bytes than with a value that is stored.
    fn is_less(&self, own: usize, sink: NodeId, readers: &[usize]) -> bool {
        let graph = &self.prepared.graph;
        let bytes = |value: &ValueId| graph.fact(*value).bytes() as u64;
        let leaves = reads(graph, &self.members[own]);
        let stored =
            LAUNCH + bytes(&sink.output(0)) * (1 + readers.len() as u64) + leaves.iter().map(bytes).sum::<u64>();
        let further = |&reader: &usize| {
            let known = reads(graph, &self.members[reader]);
            leaves.iter().filter(|leaf| !known.contains(leaf)).map(bytes).sum::<u64>()
        };
        readers.iter().map(further).sum::<u64>() < stored
    }

    /// Copies an elementwise kernel's nodes for all readers but the first, which takes the nodes themselves.
    fn divide(&mut self, own: usize, sink: NodeId, readers: &[usize], copies: &mut HashMap<NodeId, NodeId>) {
        let nodes = std::mem::take(&mut self.members[own]);
        let value = sink.output(0);
        let users = self.prepared.graph.users(value);
        for &reader in &readers[1..] {
            let own_users: Vec<NodeId> = users.iter().copied().filter(|user| self.of[user] == reader).collect();
            let graph = &mut self.prepared.graph;
            let mut copied: HashMap<NodeId, NodeId> = HashMap::new();
            for &node in &nodes {
                let read = redirected(&graph.operands(node), &copied);
                copied.insert(node, graph.copy(node, &read, own_users[0]));
            }
            for user in own_users {
                let sink = HashMap::from([(sink, copied[&sink])]);
                let read = redirected(&graph.operands(user), &sink);
                graph.read(user, &read);
            }
            for node in &nodes {
                let copy = copied[node];
                self.members[reader].push(copy);
                self.of.insert(copy, reader);
                copies.insert(copy, copies.get(node).copied().unwrap_or(*node));
            }
        }
        nodes.iter().for_each(|&node| _ = self.of.insert(node, readers[0]));
        self.members[readers[0]].extend(nodes);
    }
}

/// Operands, with copies for the nodes that have one.
fn redirected(operands: &[Option<ValueId>], copies: &HashMap<NodeId, NodeId>) -> Vec<Option<ValueId>> {
    let turn = |value: ValueId| ValueId { node: copies.get(&value.node).copied().unwrap_or(value.node), ..value };
    operands.iter().map(|operand| operand.map(turn)).collect()
}
