//! Decides which nodes become one kernel, by giving them one group number.
//!
//! A group has one value that anything outside of it reads: its last node's. So whatever the grouping, the groups form a
//! DAG again (a path that leaves a group leaves by its last node and cannot come back), and nothing is stored on the way.
//! Four kinds of group exist, and [`plan::lower`](crate::plan::lower) makes a kernel of each:
//!
//! - an **attention**: two matrix products and the softmax between them, whose scores are then never stored;
//! - a **template** (matrix product, convolution, window, gather ...) and the elementwise nodes behind it;
//! - a **row**: reductions over the same axes of the same index space, and the elementwise nodes between, before and
//!   behind them, so that softmax and every normalisation, however it was spelled, is one pass over memory;
//! - **elementwise** nodes of one shape. What only the core of a template reads may in turn become the prologue of that
//!   template's kernel: lowering decides, since it depends on the form of the kernel.

use super::attention;
use crate::dtype::DType;
use crate::error::Result;
use crate::expr::Expr;
use crate::graph::Graph;
use crate::op::{Args, Call, Lower, ValueId};
use crate::shape::Shape;
use crate::target::Target;
use std::collections::{BTreeSet, HashMap, HashSet};

/// A group may read this many values from outside, less what the target can bind.
const MAX_READS: usize = 24;
/// A growing group is given up when more values than this leave it.
const MAX_LEAVING: usize = 4;
/// The most nodes in a group: what a kernel's code may grow to.
pub(super) const MAX_NODES: usize = 64;

/// How many values a group may read from outside.
pub(super) fn max_reads(target: &Target) -> usize {
    MAX_READS.min((target.max_bindings as usize).saturating_sub(2))
}

struct Fuser<'a> {
    graph: &'a Graph,
    /// Position of every node in the order of the graph.
    position: HashMap<u32, usize>,
    groups: HashMap<u32, u32>,
    next: u32,
    max_reads: usize,
}

/// What a growing group iterates over.
struct Space {
    /// The shape of its elements.
    full: Shape,
    /// For a row, the shape of one result per row, and the axes it folds.
    row: Option<(Shape, Vec<usize>)>,
}

/// Assigns groups.
pub fn run(graph: &mut Graph, target: &Target) -> Result<()> {
    let order = graph.order()?;
    let position = order.iter().enumerate().map(|(i, &n)| (n, i)).collect();
    let mut fuser = Fuser { graph, position, groups: HashMap::new(), next: 0, max_reads: max_reads(target) };
    let is = |f: fn(&Lower) -> bool| {
        let graph = &*fuser.graph;
        order.iter().copied().filter(move |&n| graph.node(n).op().is_some_and(|op| f(&op.lower))).collect::<Vec<_>>()
    };
    let templates = is(|l| matches!(l, Lower::Template(_)));
    let reductions = is(|l| matches!(l, Lower::Reduce(_)));
    let maps = is(|l| matches!(l, Lower::Map(_)));
    for &node in &templates {
        fuser.attend(node, target);
    }
    for node in templates.into_iter().filter(|n| !fuser.groups.contains_key(n)).collect::<Vec<_>>() {
        let space = Space { full: fuser.shape(node).clone(), row: None };
        fuser.grow_down(node, &space);
    }
    for node in reductions {
        if !fuser.groups.contains_key(&node) {
            let space = fuser.row_space(node);
            let nodes = fuser.grow_down(node, &space);
            fuser.grow_up(nodes, &space.full);
        }
    }
    for node in maps.into_iter().rev() {
        if !fuser.groups.contains_key(&node) {
            fuser.seal(&[node]);
            fuser.grow_up(vec![node], &fuser.shape(node).clone());
        }
    }
    let groups = fuser.groups;
    for (node, group) in groups {
        graph.set_group(node, Some(group));
    }
    Ok(())
}

impl Fuser<'_> {
    fn shape(&self, node: u32) -> &Shape {
        &self.graph.node(node).outputs[0].fact.shape
    }

    fn seal(&mut self, nodes: &[u32]) {
        for &node in nodes {
            self.groups.insert(node, self.next);
        }
        self.next += 1;
    }

    /// Makes a group of the attention that ends in a node, if one does.
    fn attend(&mut self, sink: u32, target: &Target) {
        let Some(attention) = attention::as_kernel(self.graph, sink, target, 0) else { return };
        if attention.nodes.iter().all(|n| !self.groups.contains_key(n)) {
            self.seal(&attention.nodes.into_iter().collect::<Vec<_>>());
        }
    }

    fn row_space(&self, node: u32) -> Space {
        let n = self.graph.node(node);
        let input = self.graph.operands(node)[0].expect("a reduction reads one value");
        let facts = [Some(self.graph.fact(input))];
        let call = Call { op: n.op().expect("a reduction is an operator"), attrs: &n.attrs, inputs: &facts };
        let axes = call.reduced_axes().expect("axes were inferred");
        Space { full: self.graph.fact(input).shape.clone(), row: Some((self.shape(node).clone(), axes)) }
    }

    /// Whether a node could be part of a group over this space.
    fn fits(&self, node: u32, space: &Space) -> bool {
        let n = self.graph.node(node);
        let Some(op) = n.op() else { return false };
        match op.lower {
            Lower::Map(map) => {
                let shape = self.shape(node);
                let in_row = space.row.as_ref().is_some_and(|(row, _)| row == shape);
                // Without kept axes a result per row would broadcast along the wrong ones.
                let in_full = space.row.as_ref().is_none_or(|(row, _)| row.len() == space.full.len());
                let in_full = in_full && *shape == space.full;
                let own = if in_row { Some(0) } else { in_full.then_some(1) };
                let placed = self.graph.choices().take("place", node, own, |way| [in_row, in_full][way as usize]);
                placed.is_some() && !uses_index(self.graph, node, map)
            }
            Lower::Reduce(_) => space.row.as_ref().is_some_and(|(row, axes)| {
                let other = self.row_space(node);
                let same = other.full == space.full && other.row.is_some_and(|(r, a)| r == *row && a == *axes);
                self.graph.choices().holds("row", node, same)
            }),
            _ => false,
        }
    }

    /// Adds readers in the order of the graph for as long as they fit, and keeps the longest run of them that one
    /// value leaves.
    fn grow_down(&mut self, seed: u32, space: &Space) -> Vec<u32> {
        let mut nodes = vec![seed];
        let mut members = HashSet::from([seed]);
        let mut frontier: BTreeSet<(usize, u32)> = BTreeSet::new();
        let mut kept = 1;
        let mut joined = seed;
        while nodes.len() < MAX_NODES {
            let readers = self.graph.users(ValueId { node: joined, port: 0 });
            let free = readers.into_iter().filter(|u| !members.contains(u) && !self.groups.contains_key(u));
            frontier.extend(free.map(|u| (self.position[&u], u)));
            let fits = |&(_, n): &(usize, u32)| self.fits(n, space) && self.reads(&members, n) <= self.max_reads;
            let Some(next) = frontier.iter().copied().find(fits) else { break };
            frontier.remove(&next);
            joined = next.1;
            nodes.push(joined);
            members.insert(joined);
            match self.leaving(&nodes, &members) {
                1 if self.leaves(joined, &members) && self.only_widens(joined, seed) => {}
                1 if self.leaves(joined, &members) => kept = nodes.len(),
                // Too many values would have to be kept on the way; what follows is unlikely to take them all in.
                n if n > MAX_LEAVING => break,
                _ => {}
            }
        }
        nodes.truncate(kept);
        self.seal(&nodes);
        nodes
    }

    /// Whether a node stores halves as `f32` for readers that can as well widen what they read: half the bytes, and behind a product
    /// a library's epilogue.
    fn only_widens(&self, node: u32, seed: u32) -> bool {
        let value = ValueId { node, port: 0 };
        let (graph, operands) = (self.graph, self.graph.operands(node));
        let [Some(from)] = operands[..] else { return false };
        let half = graph.fact(from).dtype.is_half();
        let cast = graph.node(node).op().is_some_and(|op| op.name == "Cast") && graph.fact(value).dtype == DType::F32;
        let takes =
            |user: &u32| matches!(graph.node(*user).op().map(|op| &op.lower), Some(Lower::Map(_) | Lower::Reduce(_)));
        cast && half && from.node != seed && !graph.is_output(value) && graph.users(value).iter().all(takes)
    }

    /// Whether anything outside of the group reads the node.
    fn leaves(&self, node: u32, members: &HashSet<u32>) -> bool {
        let value = ValueId { node, port: 0 };
        self.graph.is_output(value) || self.graph.users(value).iter().any(|u| !members.contains(u))
    }

    fn leaving(&self, nodes: &[u32], members: &HashSet<u32>) -> usize {
        nodes.iter().filter(|&&n| self.leaves(n, members)).count()
    }

    /// How many values from outside a group reads, with `more` added to it.
    fn reads(&self, members: &HashSet<u32>, more: u32) -> usize {
        let inside = |n: u32| members.contains(&n) || more == n;
        let operands = members.iter().copied().chain([more]).flat_map(|n| self.graph.operands(n)).flatten();
        operands.filter(|v| !inside(v.node)).collect::<HashSet<_>>().len()
    }

    /// Adds elementwise producers of the group's shape that nothing else reads.
    fn grow_up(&mut self, mut nodes: Vec<u32>, full: &Shape) {
        let group = self.groups[&nodes[0]];
        let has_row =
            nodes.iter().any(|&n| matches!(self.graph.node(n).op().map(|o| &o.lower), Some(Lower::Reduce(_))));
        let mut members: HashSet<u32> = nodes.iter().copied().collect();
        let mut next = 0;
        while next < nodes.len() {
            let node = nodes[next];
            next += 1;
            for value in self.graph.operands(node).into_iter().flatten() {
                let producer = value.node;
                let Some(Lower::Map(map)) = self.graph.node(producer).op().map(|op| &op.lower) else { continue };
                let free = !self.groups.contains_key(&producer) && !self.graph.is_output(value);
                if free
                    && nodes.len() < MAX_NODES
                    && self.graph.choices().holds("grow", producer, self.shape(producer) == full)
                    && self.graph.users(value).iter().all(|u| members.contains(u))
                    && !(has_row && uses_index(self.graph, producer, *map))
                    && self.reads(&members, producer) <= self.max_reads
                {
                    members.insert(producer);
                    self.groups.insert(producer, group);
                    nodes.push(producer);
                }
            }
        }
    }
}

/// Whether an elementwise node's code depends on the index, which only its own index space gives.
pub(super) fn uses_index(graph: &Graph, node: u32, map: fn(&Args, &Call) -> Expr) -> bool {
    let n = graph.node(node);
    let operands = graph.operands(node);
    let facts: Vec<_> = operands.iter().map(|v| v.map(|v| graph.fact(v))).collect();
    Call { op: n.op().expect("a map is an operator"), attrs: &n.attrs, inputs: &facts }.uses_index(map)
}
