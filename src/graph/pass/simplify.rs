//! Simplifies by algebra. Nodes that compute nothing are removed, equal nodes are computed once, and known factors move into the weights in
//! front of them.

use super::Context;
use crate::dtype::DType;
use crate::error::Result;
use crate::graph::{Graph, Kind};
use crate::hash::FastMap;
use crate::op::{Attrs, NodeId, ValueId};
use crate::ops;
use crate::shape::Shape;
use std::collections::HashMap;

/// The most elements of a constant that are compared to see if it is one number.
const MAX_UNIFORM: usize = 1 << 12;

/// Simplifies once over the graph.
pub fn run(graph: &mut Graph, context: &Context) -> Result<()> {
    unite(graph, context)?;
    // Nodes by operator and operands.
    let mut seen: FastMap<(&str, Vec<Option<ValueId>>), Vec<NodeId>> = FastMap::default();
    for id in graph.order()? {
        let slot = forwards(graph, id)?;
        if let Some(slot) = context.decisions.choose("forward", id, slot, |s| slot == Some(s)) {
            let value = graph.operands(id)[slot as usize].expect("what is forwarded is there");
            graph.replace(id.output(0), value);
            continue;
        }
        if let Some(op) = graph.node(id).op() {
            let alike = seen.entry((op.name, graph.operands(id))).or_default();
            let twin = alike.iter().copied().rfind(|&other| same_attrs(graph, id, other));
            let same = |other: NodeId| {
                let is = graph.node(other).op().is_some_and(|o| o.name == op.name);
                is && graph.operands(other) == graph.operands(id) && same_attrs(graph, id, other)
            };
            if let Some(twin) = context.decisions.choose("twin", id, twin.map(u32::from), |twin| same(twin.into())) {
                for port in 0..graph.node(id).outputs.len() {
                    graph.replace(id.output(port), NodeId::from(twin).output(port));
                }
                continue;
            }
            alike.push(id);
        }
        keep_rows(graph, id, context)?;
        join_addends(graph, id, context)?;
        scale_weights(graph, id, context)?;
    }
    graph.sweep();
    Ok(())
}

/// Replaces constants of the same data by one.
fn unite(graph: &mut Graph, context: &Context) -> Result<()> {
    let mut seen: HashMap<String, Vec<ValueId>> = HashMap::new();
    for node in graph.order()? {
        let value = node.output(0);
        let Some(constant) = graph.as_constant(value) else { continue };
        let alike = seen.entry(constant.mark()).or_default();
        let twin = alike.iter().find(|&&v| graph.as_constant(v).is_some_and(|other| other.same(constant)));
        let twin = twin.map(|v| v.node.into());
        let same = |twin: u32| {
            let other = graph.as_constant(NodeId::from(twin).output(0));
            other.is_some_and(|other| other.same(constant))
        };
        match context.decisions.choose("unite", node, twin, same) {
            Some(node) => graph.replace(value, NodeId::from(node).output(0)),
            None => alike.push(value),
        }
    }
    Ok(())
}

/// True if two nodes have the same attributes. Two numbers are the same if they are written the same, as NaNs are, and 0 and -0 are not.
fn same_attrs(graph: &Graph, a: NodeId, b: NodeId) -> bool {
    let [a, b] = [a, b].map(|node| format!("{:?}", graph.node(node).attrs));
    a == b
}

/// The scalar that a constant of one element holds. That it cannot be fetched is an error: the plan would depend on it.
fn scalar(graph: &Graph, value: Option<ValueId>) -> Result<Option<f64>> {
    match value.and_then(|v| graph.as_constant(v)) {
        Some(constant) if constant.fact.shape.numel() == 1 => Ok(constant.exact().value()?.to_f64().first().copied()),
        _ => Ok(None),
    }
}

/// The number that all elements of a constant equal; `None` if they differ or the constant has many elements.
fn uniform(graph: &Graph, value: ValueId) -> Result<Option<f64>> {
    match graph.as_constant(value) {
        Some(constant) if (1..=MAX_UNIFORM).contains(&constant.fact.shape.numel()) => {
            let values = constant.exact().value()?.to_f64();
            Ok(values.iter().all(|v| *v == values[0]).then_some(values[0]))
        }
        _ => Ok(None),
    }
}

/// The number of the operand that a node passes on unchanged, if it does.
fn forwards(graph: &Graph, id: NodeId) -> Result<Option<u32>> {
    let node = graph.node(id);
    let operands = graph.operands(id);
    let fact = &node.outputs[0].fact;
    let same = |slot: u32| operands[slot as usize].filter(|&v| graph.fact(v) == fact).map(|_| slot);
    let (Some(op), Some(&Some(a))) = (node.op(), operands.first()) else { return Ok(None) };
    let b = operands.get(1).copied().flatten();
    // -0 + 0 is 0: what is neutral has a sign.
    let alike = |s: f64, neutral: f64| {
        s == neutral && (s.is_sign_negative() == neutral.is_sign_negative() || !fact.dtype.is_float())
    };
    let is = |v: Option<ValueId>, neutral: f64| scalar(graph, v).map(|s| s.is_some_and(|s| alike(s, neutral)));
    Ok(match op.name {
        "Identity" | "Cast" | "Reshape" | "Expand" | "Flatten" | "Squeeze" | "Unsqueeze" => same(0),
        "Dropout" if node.outputs.len() == 1 && !drops(graph, id)? => same(0),
        "Concat" | "Sum" | "Max" | "Min" | "Mean" if operands.len() == 1 => same(0),
        "Add" if is(b, -0.0)? => same(0),
        "Sub" if is(b, 0.0)? => same(0),
        "Mul" | "Div" | "Pow" if is(b, 1.0)? => same(0),
        "Add" if is(Some(a), -0.0)? => b.and_then(|_| same(1)),
        "Mul" if is(Some(a), 1.0)? => b.and_then(|_| same(1)),
        "Where" => match uniform(graph, a)? {
            Some(0.0) if operands.len() == 3 => same(2),
            Some(_) if b.is_some() => same(1),
            _ => None,
        },
        "Transpose" => {
            let perm = crate::op::Call { op, attrs: &node.attrs, inputs: &[] }.ints("perm").ok().flatten();
            perm.filter(|perm| perm.iter().enumerate().all(|(i, &p)| i as i64 == p)).map(|_| 0)
        }
        _ => None,
    })
}

/// True if a Dropout is in training mode, and drops elements.
fn drops(graph: &Graph, id: NodeId) -> Result<bool> {
    let found = graph.with_call(id, ops::dropped).expect("it is an operator");
    found.map(|ratio| ratio.is_some()).map_err(|what| graph.node(id).error(what))
}

/// A node with one reader, no output of the graph, of the given operator.
pub(super) fn only(graph: &Graph, value: ValueId, ops: &[&str]) -> bool {
    matches!(graph.node(value.node).kind, Kind::Op(op) if ops.contains(&op.name))
        && graph.users(value).len() == 1
        && !graph.is_output(value)
}

/// `(x + b) + c` with constants `b` and `c` becomes `x + (b + c)`, unless that is larger than both.
fn join_addends(graph: &mut Graph, id: NodeId, context: &Context) -> Result<()> {
    let found = context.decisions.if_found("addends", id, joinable(graph, id));
    let Some([x, first, outer]) = found else { return Ok(()) };
    let name = graph.node(id).name.clone();
    graph.insert_at(id);
    let sum = context.add(graph, &name, "Add", &[Some(first), Some(outer)], Attrs::new())?;
    graph.insert_at(id);
    let result = context.add(graph, &name, "Add", &[Some(x), Some(sum)], Attrs::new())?;
    graph.replace(id.output(0), result);
    Ok(())
}

/// The value to which two constants are added, and the two constants.
fn joinable(graph: &Graph, id: NodeId) -> Option<[ValueId; 3]> {
    let (inner, outer) = addend(graph, id)?;
    let shape = &graph.node(id).outputs[0].fact.shape;
    if !only(graph, inner, &["Add"]) || graph.fact(inner).shape != *shape {
        return None;
    }
    let (x, first) = addend(graph, inner.node)?;
    let [b, c] = [first, outer].map(|v| &graph.fact(v).shape);
    let joined = Shape::broadcast([b, c]).map_or(usize::MAX, |s| s.numel());
    (graph.fact(x).shape == *shape && joined <= b.numel().max(c.numel())).then_some([x, first, outer])
}

/// The value to which a sum of floats adds a constant, and the constant.
pub(super) fn addend(graph: &Graph, id: NodeId) -> Option<(ValueId, ValueId)> {
    let node = graph.node(id);
    if node.op()?.name != "Add" || !node.outputs[0].fact.dtype.is_float() {
        return None;
    }
    match graph.operands(id)[..] {
        [Some(a), Some(b)] => match [a, b].map(|v| graph.as_constant(v).is_some()) {
            [false, true] => Some((a, b)),
            [true, false] => Some((b, a)),
            _ => None,
        },
        _ => None,
    }
}

/// A product of rows that were collected for it and are taken apart behind it is one of the rows where they are:
/// `Reshape(Reshape(x) * w + b)` becomes `x * w + b`, and what follows can be computed with it. Where exporters have made one reshape
/// of several, as behind an attention's heads, `x` is seen in the rows that the result has.
fn keep_rows(graph: &mut Graph, id: NodeId, context: &Context) -> Result<()> {
    let found = context.decisions.if_found("rows", id, collected(graph, id));
    let Some(Collected { source, rows, weights, bias }) = found else { return Ok(()) };
    let name = graph.node(id).name.clone();
    graph.insert_at(id);
    let source = if graph.fact(source).shape == rows {
        source
    } else {
        context.add(graph, &name, "Reshape", &[Some(source)], Attrs::new().with("shape", rows.as_slice()))?
    };
    let mut result = context.add(graph, &name, "MatMul", &[Some(source), Some(weights)], Attrs::new())?;
    if let Some(bias) = bias {
        graph.insert_at(id);
        result = context.add(graph, &name, "Add", &[Some(result), Some(bias)], Attrs::new())?;
    }
    graph.replace(id.output(0), result);
    Ok(())
}

/// A product of rows that were collected for it.
struct Collected {
    /// The left operand, and its shape in the rows of the result.
    source: ValueId,
    rows: Shape,
    weights: ValueId,
    /// The vector that is added to each row.
    bias: Option<ValueId>,
}

/// The product between a reshape and this one, if that is all there is between them.
fn collected(graph: &Graph, id: NodeId) -> Option<Collected> {
    let reshaped = |id: NodeId| {
        let node = graph.node(id);
        (node.op()?.name == "Reshape").then(|| graph.operands(id)[0])?
    };
    let mut product = reshaped(id)?;
    let mut bias = None;
    if only(graph, product, &["Add"])
        && let Some((inner, constant)) = addend(graph, product.node)
    {
        let row = matches!(graph.fact(constant).shape[..], [] | [_] | [1, _]);
        if !row || graph.fact(inner).shape != graph.fact(product).shape {
            return None;
        }
        (product, bias) = (inner, Some(constant));
    }
    if !only(graph, product, &["MatMul"]) {
        return None;
    }
    let &[Some(left), Some(weights)] = &graph.operands(product.node)[..] else { return None };
    let source = reshaped(left.node)?;
    let (left, result) = (&graph.fact(left).shape, &graph.node(id).outputs[0].fact.shape);
    let (&[_, depth], &[_, width]) = (&left[..], &graph.fact(weights).shape[..]) else { return None };
    let [outer @ .., last] = &result[..] else { return None };
    let rows: Shape = outer.iter().copied().chain([depth]).collect();
    let same = *last == width && rows.numel() == left.numel() && !outer.is_empty();
    same.then_some(Collected { source, rows, weights, bias })
}

/// `(x * w + b) * c` with constant `w`, `b`, `c` becomes `x * (w c) + b c`: normalisation after a convolution or a matrix
/// product costs nothing.
fn scale_weights(graph: &mut Graph, id: NodeId, context: &Context) -> Result<()> {
    let found = scalable(graph, id);
    let form = found.as_ref().map(|s| u32::from(s.bias.is_some()));
    if context.decisions.choose("scale", id, form, |f| form == Some(f)).is_none() {
        return Ok(());
    }
    let Some(Scaling { product, factor, bias, along }) = found else { return Ok(()) };
    let name = graph.node(id).name.clone();
    let operands = graph.operands(product.node);
    let (x, weights) = (operands[0].expect("a product has two"), operands[1].expect("a product has two"));
    let (op, attrs) = (graph.node(product.node).op(), graph.node(product.node).attrs.clone());
    let op = op.expect("a product is an operator");
    graph.insert_at(product.node);
    // A factor that was rounded to the product's type would round twice.
    let factor = match graph.as_constant(factor).and_then(|c| c.unrounded()).cloned() {
        Some(unrounded) => graph.constant(unrounded),
        None => factor,
    };
    let along = Attrs::new().with("shape", along.as_slice());
    let along = context.add(graph, &name, "Reshape", &[Some(factor)], along)?;
    let weights = scaled_by(graph, &name, weights, along, context)?;
    let bias = bias.map(|bias| scaled_by(graph, &name, bias, factor, context)).transpose()?;
    graph.insert_at(product.node);
    let mut result = context.add(graph, &name, op.name, &[Some(x), Some(weights)], attrs)?;
    if let Some(bias) = bias {
        result = context.add(graph, &name, "Add", &[Some(result), Some(bias)], Attrs::new())?;
    }
    graph.replace(id.output(0), result);
    Ok(())
}

/// A product under a factor, perhaps with something added in between.
struct Scaling {
    product: ValueId,
    factor: ValueId,
    bias: Option<ValueId>,
    /// The shape under which the factor scales the weights.
    along: Vec<usize>,
}

fn scalable(graph: &Graph, id: NodeId) -> Option<Scaling> {
    let node = graph.node(id);
    if node.op().is_none_or(|op| op.name != "Mul") || !node.outputs[0].fact.dtype.is_float() {
        return None;
    }
    let shape = &node.outputs[0].fact.shape;
    let operands: Vec<_> = graph.operands(id).into_iter().flatten().collect();
    let factor = *operands.iter().find(|v| graph.as_constant(**v).is_some())?;
    let scaled = *operands.iter().find(|v| graph.as_constant(**v).is_none())?;
    if graph.fact(scaled).shape != *shape {
        return None;
    }
    // Through an addition of constants, down to the product.
    let mut product = scaled;
    let mut bias = None;
    if only(graph, scaled, &["Add"])
        && let Some((inner, constant)) = addend(graph, scaled.node)
        && graph.fact(inner).shape == *shape
    {
        (product, bias) = (inner, Some(constant));
    }
    if !only(graph, product, &["MatMul", "plimsoll.Conv"]) {
        return None;
    }
    let operands = graph.operands(product.node);
    let weights = operands[0].and(operands[1]).filter(|&w| graph.as_constant(w).is_some())?;
    let op = graph.node(product.node).op()?.name;
    let along = weight_factor(op, &graph.fact(factor).shape, shape, graph.fact(weights).shape.len())?;
    // Larger ones, or none that are numbers, make other weights than they make results.
    let factors = graph.as_constant(factor)?;
    if !factors.value().ok()?.to_f64().iter().all(|factor| factor.abs() <= 1e4) {
        return None;
    }
    // Weights that others read, too, would be held twice.
    graph.is_alone(weights).then_some(Scaling { product, factor, bias, along })
}

/// A constant times another, rounded to its type once.
fn scaled_by(graph: &mut Graph, name: &str, value: ValueId, factor: ValueId, context: &Context) -> Result<ValueId> {
    let [own, wide] = [value, factor].map(|v| graph.fact(v).dtype);
    let cast = |graph: &mut Graph, value: ValueId, dtype: DType| {
        if graph.fact(value).dtype == dtype {
            Ok(value)
        } else {
            context.add(graph, name, "Cast", &[Some(value)], Attrs::new().with("to", dtype.onnx()))
        }
    };
    let value = cast(graph, value, wide)?;
    let product = context.add(graph, name, "Mul", &[Some(value), Some(factor)], Attrs::new())?;
    cast(graph, product, own)
}

/// The shape under which a factor of the product's result scales its weights: along the output channels of a
/// convolution (axis 1 of the result, axis 0 of the weights), along the columns of a matrix product.
fn weight_factor(op: &str, factor: &Shape, result: &Shape, rank: usize) -> Option<Vec<usize>> {
    let axis = if op == "MatMul" { result.len().checked_sub(1)? } else { 1 };
    let skip = result.len().checked_sub(factor.len())?;
    let varies = |k: usize| k >= skip && factor[k - skip] != 1;
    if (0..result.len()).any(|k| k != axis && varies(k)) {
        return None;
    }
    let mut shape = vec![1; rank];
    let along = match op {
        // A vector has no columns: the last axis of the result is the other operand's rows.
        "MatMul" if rank < 2 && varies(axis) => return None,
        "MatMul" => rank.checked_sub(1)?,
        _ => 0,
    };
    shape[along] = if varies(axis) { result[axis] } else { 1 };
    Some(shape)
}
