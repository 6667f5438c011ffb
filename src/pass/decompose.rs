//! Replaces operators by the smaller ones that their rows name.

use crate::error::Result;
use crate::graph::{Decomposer, Graph};
use crate::op::{Call, Lower, ValueId};
use crate::target::Target;

/// Decomposes until only rows with kernels are left.
pub fn run(graph: &mut Graph, _: &Target) -> Result<()> {
    let mut work: Vec<u32> = graph.order()?;
    work.reverse();
    while let Some(id) = work.pop() {
        let Some(op) = graph.node(id).op() else { continue };
        let Lower::Decompose(decompose) = op.lower else { continue };
        let node = graph.node(id).clone();
        let operands = graph.operands(id);
        let facts: Vec<_> = operands.iter().map(|v| v.map(|v| graph.fact(v).clone())).collect();
        let facts: Vec<_> = facts.iter().map(Option::as_ref).collect();
        let call = Call { op, attrs: &node.attrs, inputs: &facts };
        let first = graph.bound() as u32;
        graph.insert_at(id);
        let mut build = Decomposer { graph, name: node.name.clone() };
        let values = decompose(&mut build, &call, &operands).map_err(|what| node.error(what))?;
        for (port, value) in values.into_iter().enumerate() {
            graph.replace(ValueId { node: id, port: port as u32 }, value);
        }
        work.extend((first..graph.bound() as u32).rev());
    }
    graph.sweep();
    Ok(())
}
