//! Fusion: decides which nodes become one [group](super::group), and so one kernel.

use super::Context;
use super::attention;
use super::group::{
    Group, GroupKind, Groups, MAX_GROUP_NODES, dequantized, is_computable, is_made_of_index, keeps_index, max_reads,
    uses_index,
};
use crate::dtype::DType;
use crate::error::Result;
use crate::graph::Graph;
use crate::op::{Call, Lower, NodeId, ValueId};
use crate::ops::BAND;
use crate::ops::{CONV_OF_BYTES, PRODUCT_OF_BYTES, SUMS_OF_PARTS};
use crate::shape::Shape;
use std::collections::BTreeSet;

/// A matrix that is repeated so often is small beside what it is added to.
const REPEATED: usize = 4;
/// The most values that may leave a growing group before it is given up.
const MAX_LEAVING: usize = 4;

struct Fuser<'a> {
    graph: &'a Graph,
    context: &'a Context<'a>,
    /// The position of every node in the order of the graph, by node.
    position: Vec<usize>,
    /// The number of each node's group, by node.
    groups: Vec<Option<usize>>,
    kinds: Vec<GroupKind>,
    max_reads: usize,
}

/// The index space of a growing group.
struct Space {
    /// The shape of its elements.
    full: Shape,
    /// For a row, the shape of one result per row, and the reduced axes.
    row: Option<(Shape, Vec<usize>)>,
}

/// Groups the nodes of a graph.
pub(super) fn run(graph: &Graph, context: &Context) -> Result<Groups> {
    let order = graph.order()?;
    let mut position = vec![0; graph.bound()];
    order.iter().enumerate().for_each(|(at, &node)| position[node.index()] = at);
    let (groups, max_reads) = (vec![None; graph.bound()], max_reads(context.target));
    let mut fuser = Fuser { graph, context, position, groups, kinds: Vec::new(), max_reads };
    let is = |f: fn(&Lower) -> bool| {
        order.iter().copied().filter(move |&n| graph.node(n).op().is_some_and(|op| f(&op.lower))).collect::<Vec<_>>()
    };
    let templates = is(|l| matches!(l, Lower::Template(_)));
    let reductions = is(|l| matches!(l, Lower::Reduce(_)));
    let maps = is(|l| matches!(l, Lower::Map(_)));
    for &node in &templates {
        fuser.attend(node);
    }
    for node in templates.into_iter().filter(|&n| fuser.is_free(n)).collect::<Vec<_>>() {
        let kind = GroupKind::Template { call: node };
        if graph.node(node).op().is_some_and(|op| op.alone) {
            fuser.seal(&[node], kind);
            continue;
        }
        let space = Space { full: fuser.shape(node).clone(), row: None };
        let members = fuser.grow_down(node, &space, kind);
        // The backward computation often takes a derivative behind a product, and sums of bytes are scaled: their other operands are computed in the
        // same kernel.
        let of_bytes = [PRODUCT_OF_BYTES, CONV_OF_BYTES].contains(&graph.node(node).op_name());
        if graph.is_backward(node) || of_bytes || context.target.takes_in_operands() {
            fuser.grow_up(members, &space.full);
        }
    }
    for node in reductions {
        if fuser.is_free(node) {
            let space = fuser.row_space(node);
            let nodes = fuser.grow_down(node, &space, GroupKind::Row { reduction: node });
            fuser.grow_up(nodes, &space.full);
        }
    }
    for node in maps.into_iter().rev() {
        if fuser.is_free(node) {
            fuser.seal(&[node], GroupKind::Map);
            fuser.grow_up(Members::of(graph, &[node]), &fuser.shape(node).clone());
        }
    }
    Ok(fuser.finish(&order))
}

/// The nodes of a growing group.
#[derive(Default)]
struct Members {
    nodes: Vec<NodeId>,
    /// The values from outside that they read.
    reads: Vec<ValueId>,
}

impl Members {
    fn of(graph: &Graph, nodes: &[NodeId]) -> Members {
        let mut members = Members::default();
        nodes.iter().for_each(|&node| members.add(graph, node));
        members
    }

    fn add(&mut self, graph: &Graph, node: NodeId) {
        self.reads = self.reads_with(graph, node);
        self.nodes.push(node);
    }

    fn contains(&self, node: NodeId) -> bool {
        self.nodes.contains(&node)
    }

    /// The values from outside that they read with another node among them.
    fn reads_with(&self, graph: &Graph, node: NodeId) -> Vec<ValueId> {
        let mut reads: Vec<ValueId> = self.reads.iter().copied().filter(|v| v.node != node).collect();
        for value in graph.operands(node).into_iter().flatten() {
            if !self.contains(value.node) && !reads.contains(&value) {
                reads.push(value);
            }
        }
        reads
    }
}

impl Fuser<'_> {
    fn is_free(&self, node: NodeId) -> bool {
        self.groups[node.index()].is_none()
    }

    fn shape(&self, node: NodeId) -> &Shape {
        &self.graph.node(node).outputs[0].fact.shape
    }

    fn seal(&mut self, nodes: &[NodeId], kind: GroupKind) {
        nodes.iter().for_each(|&node| self.groups[node.index()] = Some(self.kinds.len()));
        self.kinds.push(kind);
    }

    /// The groups with their nodes in the order of the graph.
    fn finish(self, order: &[NodeId]) -> Groups {
        let mut members: Vec<Vec<NodeId>> = vec![Vec::new(); self.kinds.len()];
        for &node in order {
            if let Some(group) = self.groups[node.index()] {
                members[group].push(node);
            }
        }
        let mut groups = Groups::default();
        for (kind, nodes) in self.kinds.into_iter().zip(members) {
            let sink = *nodes.last().expect("a group has nodes");
            groups.push(Group { kind, nodes, sink });
        }
        groups
    }

    /// Makes a group of the attention that ends in a node, if one does.
    fn attend(&mut self, sink: NodeId) {
        let found = attention::as_kernel(self.graph, sink, self.context, 0);
        let Some(found) = found.or_else(|| attention::of_scores(self.graph, sink, self.context.target)) else { return };
        if found.nodes.iter().all(|&n| self.is_free(n)) {
            let nodes: Vec<NodeId> = found.nodes.into_iter().collect();
            self.seal(&nodes, GroupKind::Attention(found.attention));
        }
    }

    fn row_space(&self, node: NodeId) -> Space {
        let n = self.graph.node(node);
        let input = self.graph.operands(node)[0].expect("a reduction reads one value");
        let facts = [Some(self.graph.fact(input))];
        let call = Call { op: n.op().expect("a reduction is an operator"), attrs: &n.attrs, inputs: &facts };
        let axes = call.reduced_axes().expect("axes were inferred");
        Space { full: self.graph.fact(input).shape.clone(), row: Some((self.shape(node).clone(), axes)) }
    }

    /// True if a node can be part of a group over this space.
    fn fits(&self, node: NodeId, space: &Space) -> bool {
        let n = self.graph.node(node);
        let Some(op) = n.op() else { return false };
        match op.lower {
            Lower::Map(map) => {
                let shape = self.shape(node);
                let in_row = space.row.as_ref().is_some_and(|(row, _)| row == shape);
                // If reduced axes are not kept, a result per row would broadcast along the wrong ones.
                let in_full = space.row.as_ref().is_none_or(|(row, _)| row.len() == space.full.len());
                let in_full = in_full && *shape == space.full;
                let own = if in_row { Some(0) } else { in_full.then_some(1) };
                let placed = self.context.decisions.choose("place", node, own, |way| [in_row, in_full][way as usize]);
                placed.is_some() && !uses_index(self.graph, node, map)
            }
            Lower::Reduce(_) => space.row.as_ref().is_some_and(|(row, axes)| {
                let other = self.row_space(node);
                let same = other.full == space.full && other.row.is_some_and(|(r, a)| r == *row && a == *axes);
                self.context.decisions.if_valid("row", node, same)
            }),
            _ => false,
        }
    }

    /// Adds readers that fit, in the order of the graph. Keeps the longest run of them that only one value leaves.
    fn grow_down(&mut self, seed: NodeId, space: &Space, kind: GroupKind) -> Members {
        let mut members = Members::of(self.graph, &[seed]);
        let mut leaving = vec![seed];
        let mut frontier: BTreeSet<(usize, NodeId)> = BTreeSet::new();
        let mut kept = 1;
        let mut joined = seed;
        while members.nodes.len() < MAX_GROUP_NODES {
            let readers = self.graph.users(joined.output(0));
            let free = readers.into_iter().filter(|&u| !members.contains(u) && self.is_free(u));
            frontier.extend(free.map(|u| (self.position[u.index()], u)));
            let fits = |&(_, n): &(usize, NodeId)| {
                self.fits(n, space) && !self.masks(n, &members) && self.may_join(&members, n)
            };
            let Some(next) = frontier.iter().copied().find(fits) else { break };
            frontier.remove(&next);
            joined = next.1;
            members.add(self.graph, joined);
            leaving.push(joined);
            leaving.retain(|&node| self.leaves(node, &members));
            match leaving[..] {
                [only] if only == joined && self.only_widens(joined, seed) => {}
                [only] if only == joined => kept = members.nodes.len(),
                // Too many values would have to be kept on the way; later nodes are unlikely to take them all in.
                _ if leaving.len() > MAX_LEAVING => break,
                _ => {}
            }
        }
        if kept < members.nodes.len() {
            members = Members::of(self.graph, &members.nodes[..kept]);
        }
        self.seal(&members.nodes, kind);
        members
    }

    /// True if a node stores 16-bit floats or bytes as `f32` for readers that can widen them themselves. They take half or a quarter of the bytes,
    /// and behind a product a library's epilogue can store 16-bit floats.
    fn only_widens(&self, node: NodeId, seed: NodeId) -> bool {
        if self.only_dequantizes(node, seed) {
            return true;
        }
        let value = node.output(0);
        let (graph, operands) = (self.graph, self.graph.operands(node));
        let [Some(from)] = operands[..] else { return false };
        let half = graph.fact(from).dtype.is_half();
        let cast = graph.node(node).op().is_some_and(|op| op.name == "Cast") && graph.fact(value).dtype == DType::F32;
        if cast && half && self.is_called_for_few(seed) {
            return true;
        }
        let takes = |user: &NodeId| {
            matches!(graph.node(*user).op().map(|op| &op.lower), Some(Lower::Map(_) | Lower::Reduce(_)))
        };
        cast && half && from.node != seed && !graph.is_output(value) && graph.users(value).iter().all(takes)
    }

    /// True for a convolution of few outputs that a library computes, and stores in the type of its operands alone. Without the library, few
    /// invocations would read all channels.
    fn is_called_for_few(&self, seed: NodeId) -> bool {
        const FEW: usize = 8;
        let outputs = self.shape(seed).get(1).is_some_and(|&outputs| outputs < FEW);
        self.context.target.prefers_channels_last() && outputs && self.graph.node(seed).op_name() == "plimsoll.Conv"
    }

    /// True if a node makes floats of bytes for one reader that can do so itself.
    fn only_dequantizes(&self, node: NodeId, seed: NodeId) -> bool {
        let (graph, value) = (self.graph, node.output(0));
        let is_apart = dequantized(graph, node).is_some_and(|bytes| bytes.node != seed) && !graph.is_output(value);
        let takes = |user: NodeId| match graph.node(user).op().map(|op| &op.lower) {
            Some(Lower::Map(_)) => self.shape(user) == self.shape(node),
            Some(Lower::Reduce(_)) => true,
            _ => false,
        };
        is_apart && matches!(graph.users(value)[..], [user] if takes(user))
    }

    /// True if anything outside of the group reads the node.
    fn leaves(&self, node: NodeId, members: &Members) -> bool {
        let value = node.output(0);
        self.graph.is_output(value) || self.graph.users(value).iter().any(|&u| !members.contains(u))
    }

    /// True if a node hides parts of a product by a mask that is made of the index, or adds a matrix that is repeated, as a bias of positions is
    /// beside the scores of a batch. In the product's own kernel either would be a tensor: a library reads no other. Those that read the
    /// scores compute it.
    fn masks(&self, node: NodeId, members: &Members) -> bool {
        let graph = self.graph;
        let op = |node: NodeId| graph.node(node).op();
        let is_product = matches!(op(members.nodes[0]).map(|op| op.lower), Some(Lower::Template(_)));
        let calls =
            self.context.target.libraries.cublaslt && op(members.nodes[0]).is_some_and(|op| op.name == "MatMul");
        let full = self.shape(node);
        let repeats = |value: ValueId| {
            let shape = &graph.fact(value).shape;
            let is_matrix = shape.iter().filter(|&&extent| extent > 1).count() > 1;
            is_matrix && shape.numel().saturating_mul(REPEATED) <= full.numel()
        };
        let mut operands = graph.operands(node).into_iter().flatten();
        calls && is_product && operands.any(|value| repeats(value) || is_made_of_index(graph, value))
    }

    /// True if a group with this node reads no more values from outside than a group may. What is kept for the backward computation is
    /// computed with the forward one.
    fn may_join(&self, members: &Members, node: NodeId) -> bool {
        let same = self.graph.is_backward(members.nodes[0]) == self.graph.is_backward(node);
        let reads = members.reads_with(self.graph, node).len();
        // What waited for further values would keep sums of parts, which are many times the result.
        let most = if self.sums_parts(members.nodes[0]) { members.reads.len() } else { self.max_reads };
        same && reads <= most
    }

    /// True if a node makes sums of parts, or adds these up.
    fn sums_parts(&self, node: NodeId) -> bool {
        let makes = |node: NodeId| self.graph.node(node).op().is_some_and(|op| op.name == SUMS_OF_PARTS);
        let reduces = matches!(self.graph.node(node).op().map(|op| &op.lower), Some(Lower::Reduce(_)));
        makes(node) || reduces && self.graph.operands(node)[0].is_some_and(|value| makes(value.node))
    }

    /// Adds elementwise producers of the group's shape, or of values that it repeats, that nothing else reads. A template's own operands stay as they are,
    /// and before the backward computation only bytes become floats beside it.
    fn grow_up(&mut self, mut members: Members, full: &Shape) {
        let lower = |node: NodeId| self.graph.node(node).op().map(|op| op.lower);
        let group = self.groups[members.nodes[0].index()];
        let reduces = |&n: &NodeId| matches!(lower(n), Some(Lower::Reduce(_)));
        let has_row = members.nodes.iter().any(reduces);
        let turns = members.nodes.iter().filter(|n| reduces(n)).any(|&n| !keeps_index(self.graph, n));
        // A mask is a comparison. What a Dropout draws takes more code than a row's kernel should hold.
        let refuses = |producer: NodeId| turns || has_row && self.graph.node(producer).op_name() != BAND;
        let is_template = |node: NodeId| matches!(lower(node), Some(Lower::Template(_)));
        let has_template = members.nodes.iter().any(|&node| is_template(node));
        let (graph, target) = (self.graph, self.context.target);
        let same = |producer: NodeId| graph.fact(producer.output(0)).shape == *full;
        let computes = |producer| same(producer) || !has_template && is_computable(graph, target, producer, full);
        let takes_all = !has_template || graph.is_backward(members.nodes[0]);
        let mut next = 0;
        while let Some(&node) = members.nodes.get(next) {
            next += 1;
            if is_template(node) {
                continue;
            }
            for value in self.graph.operands(node).into_iter().flatten() {
                let producer = value.node;
                let Some(Lower::Map(map)) = lower(producer) else { continue };
                if self.is_free(producer)
                    && (takes_all || dequantized(graph, producer).is_some())
                    && !self.graph.is_output(value)
                    && members.nodes.len() < MAX_GROUP_NODES
                    && self.context.decisions.if_valid("grow", producer, computes(producer))
                    && !self.leaves(producer, &members)
                    && !(refuses(producer) && uses_index(self.graph, producer, map))
                    && !self.graph.users(value).into_iter().any(is_template)
                    && self.may_join(&members, producer)
                {
                    members.add(self.graph, producer);
                    self.groups[producer.index()] = group;
                }
            }
        }
    }
}
