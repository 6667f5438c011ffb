//! Gives each kernel that widens 16-bit floats or bytes nodes of its own that do so. Shared, the `f32` values would be stored, in twice or four times
//! the bytes.

use super::Context;
use super::group::dequantized;
use crate::dtype::DType;
use crate::error::Result;
use crate::graph::Graph;
use crate::op::{Lower, NodeId, ValueId};

/// Copies casts of 16-bit floats to `f32` for all readers but the first that can take them in, and what makes floats of bytes for all that can.
pub fn run(graph: &mut Graph, context: &Context) -> Result<()> {
    // Readers first: a copy of theirs is a further reader.
    for id in graph.order()?.into_iter().rev() {
        dequantize_apart(graph, context, id);
    }
    for id in graph.order()? {
        let value = id.output(0);
        let [Some(from)] = graph.operands(id)[..] else { continue };
        let widens = graph.node(id).op_name() == "Cast"
            && graph.fact(from).dtype.is_half()
            && graph.fact(value).dtype == DType::F32;
        if !widens || graph.as_constant(from).is_some() {
            continue;
        }
        for user in graph.users(value).into_iter().skip(1) {
            if context.decisions.if_valid("recast", user, takes_in(graph, user, value)) {
                copy(graph, id, user);
            }
        }
    }
    Ok(())
}

/// Copies a node that makes floats of bytes for all readers that can take it in, but for one if no other kind of reader needs it.
fn dequantize_apart(graph: &mut Graph, context: &Context, id: NodeId) {
    let value = id.output(0);
    if dequantized(graph, id).is_none_or(|bytes| graph.as_constant(bytes).is_some()) {
        return;
    }
    let users = graph.users(value);
    let mut takers = Vec::new();
    for &user in &users {
        takers.extend(context.decisions.if_valid("dequantize", user, takes_in(graph, user, value)).then_some(user));
    }
    let kept = takers.len() == users.len() && !graph.is_output(value);
    for user in takers.into_iter().skip(usize::from(kept)) {
        copy(graph, id, user);
    }
}

/// Lets a reader of a node read a copy of it.
fn copy(graph: &mut Graph, id: NodeId, user: NodeId) {
    let value = id.output(0);
    let copy = graph.copy(id, &graph.operands(id), user);
    let copied = |v: Option<ValueId>| if v == Some(value) { Some(copy.output(0)) } else { v };
    let read: Vec<_> = graph.operands(user).into_iter().map(copied).collect();
    graph.read(user, &read);
}

/// True if a node's kernel can compute the value where it reads it.
fn takes_in(graph: &Graph, user: NodeId, value: ValueId) -> bool {
    match graph.node(user).op().map(|op| &op.lower) {
        Some(Lower::Map(_)) => graph.node(user).outputs[0].fact.shape == graph.fact(value).shape,
        Some(Lower::Reduce(_)) => true,
        _ => false,
    }
}
