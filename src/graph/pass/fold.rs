//! Constant folding: computes values that depend on constants and shapes alone before the run.

use super::Context;
use crate::constant::{Constant, FILL};
use crate::decisions::Decisions;
use crate::error::Result;
use crate::graph::Graph;
use crate::op::{Lower, MAX_MADE, NodeId, ValueId};
use crate::ops::{AT_RUN, FETCH, is_collective};

/// Views of constants that would make more than this many bytes stay views, which cost nothing. Other nodes that would make more bytes than
/// they read, and more than [`MAX_MADE`], are left to the run.
const MAX_EXPANDED: usize = 4 << 10;

/// Folds every node that can be.
pub fn run(graph: &mut Graph, context: &Context) -> Result<()> {
    for node in graph.order()? {
        fold_node(graph, node, &context.decisions)?;
    }
    graph.sweep();
    Ok(())
}

/// Replaces a node by constants if its inputs are constants, or if shapes alone determine it. Returns the values that now stand for its
/// outputs; `None` if the node stays.
///
/// # Errors
/// When an operator refuses its values.
pub fn fold_node(graph: &mut Graph, id: NodeId, decisions: &Decisions) -> Result<Option<Vec<ValueId>>> {
    let node = graph.node(id);
    let Some(op) = node.op() else { return Ok(None) };
    let operands = graph.operands(id);
    let constants: Vec<_> = operands.iter().map(|v| v.and_then(|v| graph.as_constant(v))).collect();
    let known = operands.iter().zip(&constants).all(|(v, c)| v.is_none() || c.is_some());
    let output: usize = node.outputs.iter().map(|o| o.fact.bytes()).sum();
    let input: usize = constants.iter().flatten().map(|c| c.fact.bytes()).sum();
    let folds = match op.lower {
        // It is there to stop this.
        _ if op.name == AT_RUN || op.name == FETCH || is_collective(op) => false,
        Lower::Const => true,
        _ if known && !operands.is_empty() => {
            let most = if let Lower::View(_) = op.lower { MAX_EXPANDED } else { MAX_MADE };
            decisions.if_cheaper("fold", id, output <= input.max(most))
        }
        _ => false,
    };
    if !folds {
        return Ok(None);
    }
    let constants = folded_constants(graph, id)?;
    Ok(Some(graph.put(id, constants)))
}

/// The constants that a node becomes which can be folded, one for each of its outputs.
///
/// # Errors
/// When the operator refuses its values.
pub fn folded_constants(graph: &Graph, id: NodeId) -> Result<Vec<Constant>> {
    let node = graph.node(id);
    let bytes: usize = node.outputs.iter().map(|o| o.fact.bytes()).sum();
    match node.op() {
        // The value is a fact: it is computed at once, from facts and attributes alone. But a fill is made where it is needed, so that it is
        // never held as a whole.
        Some(op) if matches!(op.lower, Lower::Const) && (op.name != FILL || bytes <= MAX_EXPANDED) => {
            let slots = graph.operands(id).len();
            let tensors = graph.with_call(id, |call| call.compute(&vec![None; slots])).expect("an operator");
            let tensors = tensors.map_err(|what| node.error(what))?;
            Ok(node.outputs.iter().zip(tensors).map(|(o, tensor)| Constant::new(o.name.clone(), tensor)).collect())
        }
        _ => graph.derived(id),
    }
}
