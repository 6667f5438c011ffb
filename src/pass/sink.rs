//! Concatenations of what elementwise operators make move behind the elementwise operators that read them.
//!
//! ```text
//! Concat(Exp(x[h..]), x[..h]) * s + x * c
//!
//! Concat(Exp(x[h..]) * s[..h] + x[..h] * c[..h],
//!            x[..h]  * s[h..] + x[h..] * c[h..])
//! ```
//!
//! Each part is one kernel then, which writes where the part lies in the result. Before, each was copied into the concatenation, and
//! another kernel read that.

use crate::error::{Error, Result};
use crate::graph::{Decomposer, Graph};
use crate::op::{Attrs, Build, Call, Eval, Lower, ValueId};
use crate::target::Target;
use std::ops::Range;

/// A concatenation of more parts stays where it is: each becomes a kernel.
const MAX_PARTS: usize = 4;
/// How many operators a slice is moved before.
const MAX_DEPTH: usize = 16;

/// Moves every concatenation as far as it goes.
pub fn run(graph: &mut Graph, _: &Target) -> Result<()> {
    let concat = |graph: &Graph, n: u32| matches!(graph.node(n).op().map(|op| &op.lower), Some(Lower::Concat));
    let mut left: Vec<u32> = graph.order()?.into_iter().rev().filter(|&n| concat(graph, n)).collect();
    while let Some(id) = left.pop() {
        let found = sinkable(graph, id);
        if graph.choices().holds("sink", id, found.is_some())
            && let Some(found) = found
        {
            left.push(sink(graph, id, &found)?);
        }
    }
    graph.sweep();
    Ok(())
}

/// A concatenation and the operator that it can move behind.
struct Sinkable {
    reader: u32,
    /// From the last axis backwards, so that broadcasting does not change it; the last one is 1.
    axis: usize,
    parts: Vec<(ValueId, Range<usize>)>,
}

/// Whether each element of a node's result is computed from those of its operands at the same index.
fn is_pointwise(graph: &Graph, node: u32) -> bool {
    graph.node(node).op().is_some_and(|op| matches!((&op.lower, &op.eval), (Lower::Map(_), Eval::Scalar(_))))
}

/// The only reader of a value that nobody else sees.
fn only_reader(graph: &Graph, value: ValueId) -> Option<u32> {
    match graph.users(value)[..] {
        [reader] if !graph.is_output(value) => Some(reader),
        _ => None,
    }
}

fn sinkable(graph: &Graph, id: u32) -> Option<Sinkable> {
    let (node, value) = (graph.node(id), ValueId { node: id, port: 0 });
    let shape = &graph.fact(value).shape;
    let reader = only_reader(graph, value).filter(|&reader| is_pointwise(graph, reader))?;
    if graph.node(reader).outputs[0].fact.shape != *shape {
        return None;
    }
    let values: Option<Vec<ValueId>> = graph.operands(id).into_iter().collect();
    let values = values.filter(|values| (2..=MAX_PARTS).contains(&values.len()))?;
    let call = Call { op: node.op()?, attrs: &node.attrs, inputs: &[] };
    let axis = call.axis("axis", 0, shape).ok()?;
    // What a core makes is written in place as it is.
    let cheap = |v: &ValueId| {
        let view = graph.node(v.node).op().is_some_and(|op| op.name == "Slice");
        only_reader(graph, *v) == Some(id) && (view || is_pointwise(graph, v.node))
    };
    let mut start = 0;
    let part = |value: ValueId| {
        let len = graph.fact(value).shape[axis];
        start += len;
        (value, start - len..start)
    };
    let whole = values.iter().all(|v| cheap(v) && graph.fact(*v).shape[axis] > 0);
    whole.then(|| Sinkable { reader, axis: shape.len() - axis, parts: values.into_iter().map(part).collect() })
}

/// Applies the reader to each part; gives the concatenation of the results.
fn sink(graph: &mut Graph, id: u32, found: &Sinkable) -> Result<u32> {
    let &Sinkable { reader, axis, ref parts } = found;
    graph.insert_at(reader);
    let mut results = Vec::with_capacity(parts.len());
    for (part, range) in parts {
        let of = |graph: &mut Graph, value: ValueId| match value.node == id {
            true => Ok(*part),
            false => slice(graph, value, reader, axis, range, 0),
        };
        results.push(applied(graph, reader, of)?);
    }
    let attrs = Attrs::new().with("axis", -(axis as i64));
    let name = graph.node(reader).name.clone();
    let whole = add(graph, &name, "Concat", &results.into_iter().map(Some).collect::<Vec<_>>(), attrs)?;
    graph.replace(ValueId { node: reader, port: 0 }, whole);
    Ok(whole.node)
}

/// A node's operator on other operands.
fn applied(
    graph: &mut Graph,
    node: u32,
    mut operand: impl FnMut(&mut Graph, ValueId) -> Result<ValueId>,
) -> Result<ValueId> {
    let old = graph.node(node);
    let (name, op, attrs) = (old.name.clone(), old.op().expect("an operator").name, old.attrs.clone());
    let mut operands = graph.operands(node);
    for value in operands.iter_mut().flatten() {
        *value = operand(graph, *value)?;
    }
    add(graph, &name, op, &operands, attrs)
}

/// A part of an operand along an axis, counted from the last one. What makes the operand for this reader alone makes the part instead.
fn slice(
    graph: &mut Graph,
    value: ValueId,
    reader: u32,
    axis: usize,
    range: &Range<usize>,
    depth: usize,
) -> Result<ValueId> {
    let shape = &graph.fact(value).shape;
    if shape.len() < axis || shape[shape.len() - axis] == 1 {
        return Ok(value);
    }
    if depth < MAX_DEPTH && is_pointwise(graph, value.node) && only_reader(graph, value) == Some(reader) {
        return applied(graph, value.node, |graph, v| slice(graph, v, value.node, axis, range, depth + 1));
    }
    let attrs = Attrs::new().with("starts", vec![range.start as i64]).with("ends", vec![range.end as i64]);
    let name = graph.node(value.node).name.clone();
    add(graph, &name, "Slice", &[Some(value)], attrs.with("axes", vec![-(axis as i64)]))
}

fn add(graph: &mut Graph, name: &str, op: &str, inputs: &[Option<ValueId>], attrs: Attrs) -> Result<ValueId> {
    let mut build = Decomposer { graph, name: name.to_owned() };
    build.node(op, inputs, attrs).map_err(Error::Graph)
}
