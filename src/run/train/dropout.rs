//! Dropout in training: each run of a part drops other elements.

use super::grow;
use crate::dtype::DType;
use crate::error::Result;
use crate::graph::Graph;
use crate::op::{Fact, NodeId, ValueId};
use crate::ops;
use crate::random;

/// The state that counts the runs so far.
const DRAW: &str = "dropout/draw";

/// The nodes that drop elements in training, with the share that each drops.
fn nodes(graph: &Graph) -> Result<Vec<(NodeId, f64)>> {
    let mut found = Vec::new();
    for id in graph.order()?.into_iter().filter(|&id| graph.node(id).op_name() == "Dropout") {
        let ratio = graph.with_call(id, ops::ratio).expect("it is an operator");
        found.push((id, ratio.map_err(|what| graph.node(id).error(what))?));
    }
    Ok(found)
}

/// Drops elements by the seed, the number of the node, and a state that counts the runs. Returns the state with its update.
pub(super) fn train(graph: &mut Graph, seed: u64) -> Result<Option<(ValueId, ValueId)>> {
    let nodes = nodes(graph)?;
    if nodes.iter().all(|(_, ratio)| *ratio == 0.0) {
        infer(graph)?;
        return Ok(None);
    }
    let draw = graph.state(DRAW, Fact::new(DType::I32, []), None);
    for (number, (id, ratio)) in nodes.into_iter().enumerate() {
        let x = graph.operands(id)[0].expect("a Dropout has data");
        let (name, key) = (graph.node(id).name.clone(), random::key(seed, number as u32));
        let made = grow(graph, &name, |b| ops::dropout(b.value(x), b.value(draw), ratio, key).map(Vec::from))?;
        for (port, value) in (0..graph.node(id).outputs.len() as u32).zip(made) {
            graph.replace(ValueId { node: id, port }, value);
        }
    }
    let next = grow(graph, DRAW, |b| Ok(vec![b.value(draw) + 1.0]))?[0];
    Ok(Some((draw, next)))
}

/// Drops nothing, whatever the file says.
pub(super) fn infer(graph: &mut Graph) -> Result<()> {
    for (id, _) in nodes(graph)? {
        let x = graph.operands(id)[0].expect("a Dropout has data");
        let (name, shape) = (graph.node(id).name.clone(), graph.fact(x).shape.clone());
        let made = grow(graph, &name, |b| Ok(vec![b.value(x), b.scalar(1.0, DType::Bool).expand(&shape)]))?;
        for (port, value) in (0..graph.node(id).outputs.len() as u32).zip(made) {
            graph.replace(ValueId { node: id, port }, value);
        }
    }
    Ok(())
}
