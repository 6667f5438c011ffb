//! Windows of doubles, of which the CPU has no kernels, as parts of their data.

use super::Context;
use crate::dtype::DType;
use crate::error::Result;
use crate::graph::{Decomposer, Graph};
use crate::op::Call;
use crate::ops::by_taps;
use crate::target::Family;

/// Writes them so.
pub fn run(graph: &mut Graph, context: &Context) -> Result<()> {
    if context.target.family != Family::Cpu {
        return Ok(());
    }
    for id in graph.order()? {
        let node = graph.node(id);
        let Some(rule) = by_taps(node.op_name()).filter(|_| node.outputs[0].fact.dtype == DType::F64) else { continue };
        let node = node.clone();
        let operands = graph.operands(id);
        graph.insert_at(id);
        let facts: Vec<_> = operands.iter().map(|v| v.map(|v| graph.fact(v).clone())).collect();
        let facts: Vec<_> = facts.iter().map(Option::as_ref).collect();
        let Some(op) = node.op() else { continue };
        let call = Call { op, attrs: &node.attrs, inputs: &facts };
        let made = call.decompose(rule, &mut Decomposer::new(graph, node.name.clone()), &operands);
        graph.replace(id.output(0), made.map_err(|what| node.error(what))?[0]);
    }
    graph.sweep();
    Ok(())
}
