//! Moves factors of an attention's queries and keys into one factor of its scores, which the kernel already has. No kernel has to multiply
//! queries or keys, and 16-bit floats are rounded once less.
//!
//! ```text
//! MatMul (q * a, Transpose (k * b))   =   MatMul (q, Transpose (k)) * (a b)
//! ```

use super::{Context, attention};
use crate::constant::Constant;
use crate::dtype::DType;
use crate::error::Result;
use crate::graph::Graph;
use crate::op::{Attrs, Lower, NodeId, ValueId};
use crate::shape::Shape;
use crate::tensor::Tensor;

/// The most nodes that the factor of the scores may take.
const NODES: usize = 3;

/// Moves such factors. Right only where what is found becomes one kernel: products of 16-bit floats are not rounded before they are scaled there.
pub fn run(graph: &mut Graph, context: &Context) -> Result<()> {
    let mut changed = false;
    for sink in graph.order()? {
        if let Some(found) = attention::as_kernel(graph, sink, context, NODES) {
            changed |= scale(graph, found.attention.products, context)?;
        }
    }
    if changed {
        graph.sweep();
    }
    Ok(())
}

/// Moves the factors of a product's operands behind it.
fn scale(graph: &mut Graph, products: NodeId, context: &Context) -> Result<bool> {
    let mut operands = graph.operands(products);
    if operands[0] == operands[1] {
        return Ok(false);
    }
    let mut factor = 1.0;
    for operand in operands.iter_mut().flatten() {
        while let Some(found) = scaled(graph, *operand)?.filter(|found| holds(factor * found.factor)) {
            factor *= found.factor;
            *operand = found.without(graph, context)?;
        }
    }
    if operands == graph.operands(products) {
        return Ok(false);
    }
    // Factors that already scale the product are multiplied into the same factor.
    let mut old = products.output(0);
    while let ([user], false) = (&graph.users(old)[..], graph.is_output(old)) {
        match multiplied(graph, *user)? {
            Some((source, by)) if source == old && holds(factor * by) => (old, factor) = (user.output(0), factor * by),
            _ => break,
        }
    }
    let node = graph.node(products).clone();
    let dtype = node.outputs[0].fact.dtype;
    // A 16-bit factor would err for all scores alike.
    let wide = dtype.unhalved();
    let to = |dtype: DType| Attrs::new().with("to", dtype.onnx());
    graph.insert_at(products);
    let mut value = context.add(graph, &node.name, node.op_name(), &operands, node.attrs.clone())?;
    if wide != dtype {
        value = context.add(graph, &node.name, "Cast", &[Some(value)], to(wide))?;
    }
    let factor = Tensor::from_f64(wide, Shape::default(), &[factor]);
    let factor = graph.constant(Constant::new(format!("scale of {}", node.name), factor));
    graph.insert_at(products);
    value = context.add(graph, &node.name, "Mul", &[Some(value), Some(factor)], Attrs::new())?;
    if wide != dtype {
        value = context.add(graph, &node.name, "Cast", &[Some(value)], to(dtype))?;
    }
    graph.replace(old, value);
    Ok(true)
}

/// A value seen through views, all of whose elements are multiplied by one factor.
struct Scaled {
    source: ValueId,
    factor: f64,
    /// The views, from the last one to the first one.
    views: Vec<NodeId>,
}

impl Scaled {
    /// The same views of the source as it is.
    fn without(&self, graph: &mut Graph, context: &Context) -> Result<ValueId> {
        let mut value = self.source;
        for &id in self.views.iter().rev() {
            let node = graph.node(id).clone();
            graph.insert_at(id);
            value = context.add(graph, &node.name, node.op_name(), &[Some(value)], node.attrs)?;
        }
        Ok(value)
    }
}

/// The factor of an operand and its unscaled source, if nothing else reads the scaled value.
fn scaled(graph: &Graph, mut value: ValueId) -> Result<Option<Scaled>> {
    let mut views = Vec::new();
    loop {
        if graph.users(value).len() != 1 || graph.is_output(value) {
            return Ok(None);
        }
        if let Some((source, factor)) = multiplied(graph, value.node)? {
            return Ok(Some(Scaled { source, factor, views }));
        }
        match (graph.node(value.node).op().map(|op| &op.lower), &graph.operands(value.node)[..]) {
            (Some(Lower::View(_)), &[Some(source)]) => {
                views.push(value.node);
                value = source;
            }
            _ => return Ok(None),
        }
    }
}

/// The value that a node multiplies by a number or divides by one, and the factor.
fn multiplied(graph: &Graph, id: NodeId) -> Result<Option<(ValueId, f64)>> {
    let node = graph.node(id);
    let (name, operands) = (node.op_name(), graph.operands(id));
    let (source, by) = match (name, &operands[..]) {
        ("Mul", &[Some(a), Some(b)]) if graph.as_constant(a).is_some() => (b, a),
        ("Mul" | "Div", &[Some(a), Some(b)]) => (a, b),
        _ => return Ok(None),
    };
    let Some(constant) = graph.as_constant(by) else { return Ok(None) };
    let fact = &node.outputs[0].fact;
    if constant.fact.shape.numel() != 1 || graph.fact(source) != fact || !fact.dtype.is_float() {
        return Ok(None);
    }
    let number = constant.unrounded().unwrap_or(constant).value()?.to_f64()[0];
    let factor = if name == "Div" { 1.0 / number } else { number };
    Ok(holds(factor).then_some((source, factor)))
}

/// True if every type can hold the factor, and the values that it scales, well enough.
pub(super) fn holds(factor: f64) -> bool {
    (1e-4..1e4).contains(&factor.abs())
}
