//! Gives each kernel that widens 16-bit floats a cast of its own. Shared, the `f32` values would be stored, in twice the bytes of the 16-bit floats.

use super::Context;
use crate::dtype::DType;
use crate::error::Result;
use crate::graph::Graph;
use crate::op::{Lower, NodeId, ValueId};

/// Copies casts of 16-bit floats to `f32` for all readers but the first that can take them in.
pub fn run(graph: &mut Graph, context: &Context) -> Result<()> {
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
            if !context.decisions.if_valid("recast", user, takes_in(graph, user, value)) {
                continue;
            }
            let copy = graph.copy(id, &[Some(from)], user);
            let copied = |v: Option<ValueId>| if v == Some(value) { Some(copy.output(0)) } else { v };
            let read: Vec<_> = graph.operands(user).into_iter().map(copied).collect();
            graph.read(user, &read);
        }
    }
    Ok(())
}

/// True if a node's kernel can compute the value where it reads it.
fn takes_in(graph: &Graph, user: NodeId, value: ValueId) -> bool {
    match graph.node(user).op().map(|op| &op.lower) {
        Some(Lower::Map(_)) => graph.node(user).outputs[0].fact.shape == graph.fact(value).shape,
        Some(Lower::Reduce(_)) => true,
        _ => false,
    }
}
