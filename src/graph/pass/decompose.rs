//! Replaces operators by the smaller ones that their rows name, and loops of at most one step by the nodes of their bodies. Splits operators of more inputs than a kernel may bind.

use super::{Context, fold_node};
use crate::body;
use crate::constant::Constant;
use crate::dtype::DType;
use crate::error::Result;
use crate::graph::{Decomposer, Graph};
use crate::op::{Arity, Attrs, Call, Fact, Lower, NodeId, OpDef, ValueId, build};
use crate::ops::{self, Loop};
use crate::shape::Shape;
use crate::tensor::Tensor;

/// Decomposes until only operators with kernels are left.
pub fn run(graph: &mut Graph, context: &Context) -> Result<()> {
    // One binding is for the result.
    let most = (context.target.max_bindings as usize).saturating_sub(2).max(2);
    for id in graph.order()? {
        divide(graph, id, most, context)?;
        regroup_alone(graph, id, context)?;
    }
    graph.sweep();
    loop {
        let mut order = graph.order()?;
        order.retain(|&n| matches!(graph.node(n).op().map(|op| &op.lower), Some(Lower::Decompose(_))));
        let unrolled = unroll(graph, context)?;
        if order.is_empty() && !unrolled {
            for id in graph.order()? {
                multiply(graph, id, context)?;
            }
            graph.sweep();
            return Ok(());
        }
        for node in order {
            // A node of constants is computed at once: that takes less time than its parts.
            if fold_node(graph, node, &context.decisions)?.is_none() {
                decompose(graph, node)?;
            }
        }
        graph.sweep();
    }
}

/// Replaces an exchange of one rank with itself by a view, and what it sends itself by zeros.
fn regroup_alone(graph: &mut Graph, id: NodeId, context: &Context) -> Result<()> {
    let ranks =
        graph.with_call(id, |call| ops::is_collective(call.op).then(|| ops::collective(call).map(|of| of.ranks)));
    if !matches!(ranks.flatten(), Some(Ok(1))) {
        return Ok(());
    }
    if graph.node(id).op().is_some_and(ops::is_passed) {
        let (Fact { dtype, shape }, name) = (graph.fact(id.output(0)).clone(), graph.node(id).name.clone());
        let zeros = Tensor::from_f64(dtype, shape.clone(), &vec![0.0; shape.numel()]);
        graph.insert_at(id);
        let zeros = graph.constant(Constant::new(name, zeros));
        graph.replace(id.output(0), zeros);
        return Ok(());
    }
    let shape: Vec<i64> = graph.fact(id.output(0)).shape.iter().map(|&extent| extent as i64).collect();
    let (operands, name) = (graph.operands(id), graph.node(id).name.clone());
    graph.insert_at(id);
    let same = context.add(graph, &name, "Reshape", &operands, Attrs::new().with("shape", shape))?;
    graph.replace(id.output(0), same);
    Ok(())
}

/// Replaces loops of at most one step by the nodes of their bodies. Returns true if there were some.
fn unroll(graph: &mut Graph, context: &Context) -> Result<bool> {
    let mut found = false;
    for id in graph.order()? {
        if !graph.node(id).op().is_some_and(|op| matches!(op.lower, Lower::Repeat)) {
            continue;
        }
        let times = graph.with_call(id, |call| Loop::of(call).map(|of| of.times));
        let Some(Ok(times)) = times else { continue };
        if context.decisions.if_valid("unroll", id, times <= 1) {
            body::inline_single(graph, id)?;
            found = true;
        }
    }
    Ok(found)
}

/// Replaces a node by those that its row names, if it names any. Returns these, in order.
pub fn decompose(graph: &mut Graph, id: NodeId) -> Result<Vec<NodeId>> {
    let node = graph.node(id).clone();
    let Some(op) = node.op() else { return Ok(Vec::new()) };
    let Lower::Decompose(rule) = op.lower else { return Ok(Vec::new()) };
    let operands = graph.operands(id);
    let facts: Vec<_> = operands.iter().map(|v| v.map(|v| graph.fact(v).clone())).collect();
    let facts: Vec<_> = facts.iter().map(Option::as_ref).collect();
    let call = Call { op, attrs: &node.attrs, inputs: &facts };
    graph.insert_at(id);
    let mut build = Decomposer::new(graph, node.name.clone()).of(&call);
    let values = call.decompose(rule, &mut build, &operands).map_err(|what| node.error(what))?;
    let made = build.made;
    for (port, value) in values.into_iter().enumerate() {
        graph.replace(id.output(port), value);
    }
    Ok(made)
}

/// Writes a matrix product of a type that the target has no kernels for as products of elements and their sums.
fn multiply(graph: &mut Graph, id: NodeId, context: &Context) -> Result<()> {
    let node = graph.node(id);
    if node.op_name() != "MatMul" || context.target.has_product_for(node.outputs[0].fact.dtype) {
        return Ok(());
    }
    let node = node.clone();
    graph.insert_at(id);
    let operands: Vec<ValueId> = graph.operands(id).into_iter().flatten().collect();
    let made = build(&mut Decomposer::new(graph, node.name.clone()), |b| {
        let [a, c] = [operands[0], operands[1]].map(|value| b.value(value));
        // [.., m, k, 1] times [.., 1, k, n]; a vector has no m, or no n.
        let behind = if c.shape()?.len() > 1 { -3 } else { -1 };
        let all = (a.unsqueeze(&[-1]) * c.unsqueeze(&[behind])).reduce_sum(&[-2], false);
        Ok(vec![all.shaped(&node.outputs[0].fact.shape)])
    });
    let values = made.map_err(|what| node.error(what))?;
    graph.replace(id.output(0), values[0]);
    Ok(())
}

/// Splits an elementwise node of too many inputs into a chain of nodes of at most `most` inputs.
fn divide(graph: &mut Graph, id: NodeId, most: usize, context: &Context) -> Result<()> {
    let (operands, node) = (graph.operands(id), graph.node(id));
    let variadic =
        |op: &&OpDef| matches!(op.lower, Lower::Map(_)) && op.inputs.iter().any(|i| i.arity == Arity::Variadic);
    let Some(op) = node.op().filter(variadic).filter(|_| operands.len() > most) else { return Ok(()) };
    let (name, mean) = (node.name.clone(), op.name == "Mean");
    let fold = if mean { "Sum" } else { op.name };
    graph.insert_at(id);
    let mut operands = operands;
    let dtype = graph.fact(id.output(0)).dtype;
    let cast = |graph: &mut Graph, value: ValueId, to: DType| {
        context.add(graph, &name, "Cast", &[Some(value)], Attrs::new().with("to", to.onnx()))
    };
    // Sums on the way would be rounded, or be too large for a half.
    let adds = dtype.is_half() && fold == "Sum";
    if adds {
        for operand in operands.iter_mut().flatten() {
            *operand = cast(graph, *operand, DType::F32)?;
        }
    }
    let (first, rest) = operands.split_at(most);
    let mut value = context.add(graph, &name, fold, first, Attrs::new())?;
    for further in rest.chunks(most - 1) {
        let operands: Vec<_> = std::iter::once(Some(value)).chain(further.iter().copied()).collect();
        value = context.add(graph, &name, fold, &operands, Attrs::new())?;
    }
    if mean {
        let count = Tensor::from_f64(graph.fact(value).dtype, Shape::default(), &[operands.len() as f64]);
        let count = graph.constant(Constant::new(format!("inputs of {name}"), count));
        graph.insert_at(id);
        value = context.add(graph, &name, "Div", &[Some(value), Some(count)], Attrs::new())?;
    }
    if adds {
        value = cast(graph, value, dtype)?;
    }
    graph.replace(id.output(0), value);
    Ok(())
}
