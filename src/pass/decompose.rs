//! Replaces operators by the smaller ones that their rows name.

use crate::error::Result;
use crate::graph::{Decomposer, Graph};
use crate::op::{Call, Lower, ValueId};
use crate::target::Target;

/// Decomposes until only rows with kernels are left.
pub fn run(graph: &mut Graph, _: &Target) -> Result<()> {
    loop {
        let mut order = graph.order()?;
        order.retain(|&n| matches!(graph.node(n).op().map(|op| &op.lower), Some(Lower::Decompose(_))));
        if order.is_empty() {
            return Ok(());
        }
        for node in order {
            decompose(graph, node)?;
        }
        graph.sweep();
    }
}

fn decompose(graph: &mut Graph, id: u32) -> Result<()> {
    let node = graph.node(id).clone();
    let Some(op) = node.op() else { return Ok(()) };
    let Lower::Decompose(rule) = op.lower else { return Ok(()) };
    let operands = graph.operands(id);
    let facts: Vec<_> = operands.iter().map(|v| v.map(|v| graph.fact(v).clone())).collect();
    let facts: Vec<_> = facts.iter().map(Option::as_ref).collect();
    let call = Call { op, attrs: &node.attrs, inputs: &facts };
    graph.insert_at(id);
    let mut build = Decomposer { graph, name: node.name.clone() };
    let values = rule(&mut build, &call, &operands).map_err(|what| node.error(what))?;
    for (port, value) in values.into_iter().enumerate() {
        graph.replace(ValueId { node: id, port: port as u32 }, value);
    }
    Ok(())
}
