//! Groups: nodes that become one kernel.
//!
//! Only one value of a group is read outside of it: that of its sink, its last node. A path that leaves a group leaves by its sink and
//! cannot come back, so the groups form a DAG, too. No other value of a group is stored.

use crate::dtype::DType;
use crate::expr::Expr;
use crate::graph::Graph;
use crate::kernel::{Fold, Guard};
use crate::op::{Args, Call, Lower, NodeId, OpDef, ValueId};
use crate::ops::BAND;
use crate::shape::Shape;
use crate::target::Target;

/// The most values that a group may read from outside, if the target can bind as many.
const MAX_READS: usize = 24;
/// The most nodes in a group, which limits the size of a kernel's code.
pub(super) const MAX_GROUP_NODES: usize = 64;

/// The most values that a group may read from outside on a target.
pub(super) fn max_reads(target: &Target) -> usize {
    MAX_READS.min((target.max_bindings as usize).saturating_sub(2))
}

/// True if an elementwise node's code depends on the index, which only its own index space gives.
pub(super) fn uses_index(graph: &Graph, node: NodeId, map: fn(&Args, &Call) -> Expr) -> bool {
    graph.with_call(node, |call| call.uses_index(map)).expect("a map is an operator")
}

/// True if a reduction's rows are the last axes of what it reduces, so that its kernel's index is that of the elementwise nodes in it.
pub(super) fn keeps_index(graph: &Graph, reduction: NodeId) -> bool {
    let axes = graph.with_call(reduction, |call| call.reduced_axes());
    let rank = graph.operands(reduction)[0].map_or(0, |value| graph.fact(value).shape.len());
    matches!(axes, Some(Ok(axes)) if axes.iter().copied().eq(rank - axes.len()..rank))
}

/// True if a value is made of the index and of single numbers alone, such as a mask.
pub(super) fn is_made_of_index(graph: &Graph, value: ValueId) -> bool {
    const DEPTH: usize = 4;
    fn made(graph: &Graph, mut value: ValueId, left: usize) -> Option<bool> {
        while graph.is_view(value.node) {
            value = graph.operands(value.node)[0]?;
        }
        if graph.fact(value).shape.numel() == 1 {
            return Some(false);
        }
        let Some(Lower::Map(map)) = graph.node(value.node).op().map(|op| op.lower) else { return None };
        // Other values of the index, such as what a Dropout draws, are as cheap in the product's own kernel.
        let mut indexed = graph.node(value.node).op_name() == BAND;
        if uses_index(graph, value.node, map) && !indexed {
            return None;
        }
        for operand in graph.operands(value.node).into_iter().flatten() {
            indexed |= made(graph, operand, left.checked_sub(1)?)?;
        }
        Some(indexed)
    }
    made(graph, value, DEPTH) == Some(true)
}

/// A value of so many times fewer elements is computed for each element of a kernel that reads it.
const SMALLER: usize = 64;

/// True if a kernel over `full` can compute an elementwise node of this shape for each of its elements: of the same shape, or one that is
/// repeated. A small kernel of its own would cost a launch.
pub(super) fn is_computable(graph: &Graph, target: &Target, node: NodeId, full: &Shape) -> bool {
    let output = &graph.node(node).outputs[0].fact.shape;
    let repeats =
        output.len() == full.len() && output.iter().zip(full.iter()).all(|(&own, &all)| own == all || own == 1);
    let is_small = repeats && output.numel().saturating_mul(SMALLER) <= full.numel();
    let is_indexed =
        || matches!(graph.node(node).op().map(|op| op.lower), Some(Lower::Map(map)) if uses_index(graph, node, map));
    output == full || target.launches_cost() && graph.has_backward() && is_small && !is_indexed()
}

/// The bytes that a node makes floats of, by a scale and a zero point that are constants.
pub(super) fn dequantized(graph: &Graph, node: NodeId) -> Option<ValueId> {
    let shape = |value: ValueId| &graph.fact(value).shape;
    match (graph.node(node).op()?.name, &graph.operands(node)[..]) {
        ("Cast", &[Some(from)]) => {
            let to = graph.fact(node.output(0)).dtype;
            (graph.fact(from).dtype.is_byte() && to == DType::F32).then_some(from)
        }
        (name @ ("Sub" | "Mul"), &[Some(a), Some(b)]) => {
            let is_constant = |value| graph.as_constant(value).is_some();
            let from = if name == "Mul" && is_constant(a) { b } else { a };
            let other = if from == a { b } else { a };
            let is_own = is_constant(other) && shape(from) == shape(node.output(0));
            if is_own { dequantized(graph, from.node) } else { None }
        }
        _ => None,
    }
}

/// The form of a group, which determines the form of its kernel.
#[derive(Clone, Debug, PartialEq)]
pub enum GroupKind {
    /// Elementwise nodes of one shape. A template that alone reads their value may take them as the prologue of an operand.
    Map,
    /// Reductions over the same axes of the same index space, with elementwise nodes between, before and behind them. Softmax and every
    /// normalisation is one pass over memory, however it is spelled.
    Row {
        /// The first of the reductions.
        reduction: NodeId,
    },
    /// A matrix product, convolution, pooling, gather .., and the elementwise nodes behind it.
    Template {
        /// The node with the template.
        call: NodeId,
    },
    /// Two matrix products and the softmax between them, or what else becomes of scores. These are never stored.
    Attention(Attention),
}

/// The parts of an attention.
#[derive(Clone, Debug, PartialEq)]
pub struct Attention {
    /// The product of queries and keys.
    pub products: NodeId,
    /// The scores: that product, or the result of elementwise nodes on it.
    pub scores: ValueId,
    /// A second product that the scores are made of.
    pub second: Option<NodeId>,
    /// The weights that count as zero though they are no numbers; `None` if there are none such.
    pub guarded: Option<Guard>,
    /// What becomes of a row of scores.
    pub fold: Fold,
}

/// Nodes that become one kernel.
#[derive(Clone, Debug)]
pub struct Group {
    /// The form of the kernel.
    pub kind: GroupKind,
    /// The nodes, in the order of the graph.
    pub nodes: Vec<NodeId>,
    /// The last node, whose value alone is read outside of the group.
    pub sink: NodeId,
}

impl Group {
    /// A node as a group of its own; `None` if its row names no kernel.
    pub fn alone(node: NodeId, op: &OpDef) -> Option<Group> {
        let kind = match op.lower {
            Lower::Map(_) => GroupKind::Map,
            Lower::Reduce(_) => GroupKind::Row { reduction: node },
            Lower::Template(_) => GroupKind::Template { call: node },
            _ => return None,
        };
        Some(Group { kind, nodes: vec![node], sink: node })
    }

    /// The same group with each node replaced by `node` of it.
    pub(super) fn renumbered(&self, node: impl Fn(NodeId) -> NodeId) -> Group {
        let kind = match &self.kind {
            GroupKind::Map => GroupKind::Map,
            GroupKind::Row { reduction } => GroupKind::Row { reduction: node(*reduction) },
            GroupKind::Template { call } => GroupKind::Template { call: node(*call) },
            GroupKind::Attention(Attention { products, scores, second, guarded, fold }) => {
                GroupKind::Attention(Attention {
                    products: node(*products),
                    scores: ValueId { node: node(scores.node), ..*scores },
                    second: second.map(&node),
                    guarded: *guarded,
                    fold: *fold,
                })
            }
        };
        Group { kind, nodes: self.nodes.iter().map(|&n| node(n)).collect(), sink: node(self.sink) }
    }
}

/// The groups of a graph. A node without a group is a kernel of its own, or no kernel.
#[derive(Clone, Debug, Default)]
pub struct Groups {
    groups: Vec<Group>,
    /// The number of each node's group, by node.
    of: Vec<Option<usize>>,
}

impl Groups {
    /// Adds a group.
    pub(super) fn push(&mut self, group: Group) {
        for &node in &group.nodes {
            self.of.resize(self.of.len().max(node.index() + 1), None);
            self.of[node.index()] = Some(self.groups.len());
        }
        self.groups.push(group);
    }

    /// All groups.
    pub fn iter(&self) -> impl Iterator<Item = &Group> {
        self.groups.iter()
    }

    /// The group of this number.
    pub fn get(&self, number: usize) -> &Group {
        &self.groups[number]
    }

    /// The number of a node's group.
    pub fn number(&self, node: NodeId) -> Option<usize> {
        self.of.get(node.index()).copied().flatten()
    }

    /// A node's group.
    pub fn of(&self, node: NodeId) -> Option<&Group> {
        self.number(node).map(|number| self.get(number))
    }
}
