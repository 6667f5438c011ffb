//! Rounds 16-bit floats only where they are stored, and stores in `f32` what would be rounded again and again.
//!
//! - Constants scale and shift a value before it is rounded, if it was computed in `f32`, as behind a normalisation: `Cast (x) * w + b`
//!   becomes `Cast (x * w + b)`.
//! - A *stream* is a sum to which products are added, one after another, and which others read on the way. Its sums become `f32`, in which
//!   products are summed anyway. Rounded each time, their errors would add up.
//!
//! ```text
//! x ---+-----------------------------------------+-> Add ---+-------------..
//!      `-> normalisation -> .. -> MatMul -> Add -'          `-> normalisation -> ..
//! ```

use super::Context;
use super::simplify::{addend, only};
use crate::dtype::DType;
use crate::error::Result;
use crate::graph::Graph;
use crate::op::{Attrs, Lower, NodeId, ValueId};
use std::collections::HashMap;

/// Makes values be rounded later, and less often.
pub fn run(graph: &mut Graph, context: &Context) -> Result<()> {
    let stored = |dtype: &DType| dtype.is_half() && context.target.storage(*dtype).is_ok_and(DType::is_half);
    if !graph.dtypes().iter().any(stored) {
        return Ok(());
    }
    let mut streams = Streams { sums: HashMap::new(), context };
    for id in graph.order()? {
        round_last(graph, id, context)?;
        streams.widen(graph, id)?;
    }
    graph.sweep();
    Ok(())
}

/// The first output of a node.
fn result(node: NodeId) -> ValueId {
    node.output(0)
}

fn cast(graph: &mut Graph, name: &str, value: ValueId, dtype: DType, context: &Context) -> Result<ValueId> {
    // A number that was rounded to halves alone is not rounded at all.
    let exact = graph.as_constant(value).map(|constant| constant.exact()).filter(|exact| exact.fact.dtype == dtype);
    if let Some(exact) = exact.filter(|exact| exact.fact.shape.numel() == 1).cloned() {
        return Ok(graph.constant(exact));
    }
    context.add(graph, name, "Cast", &[Some(value)], Attrs::new().with("to", dtype.onnx()))
}

/// The value before it was rounded from `f32`; `None` if it was not.
fn unrounded(graph: &Graph, value: ValueId) -> Option<ValueId> {
    let source = (graph.node(value.node).op()?.name == "Cast").then(|| graph.operands(value.node)[0])??;
    (graph.fact(value).dtype.is_half() && graph.fact(source).dtype == DType::F32).then_some(source)
}

/// Applies a constant factor or addend before the rounding of the other operand.
fn round_last(graph: &mut Graph, id: NodeId, context: &Context) -> Result<()> {
    let Some(op) = graph.node(id).op().filter(|op| matches!(op.name, "Add" | "Mul")) else { return Ok(()) };
    let &[Some(a), Some(b)] = &graph.operands(id)[..] else { return Ok(()) };
    let rounded = match [a, b].map(|v| graph.as_constant(v).is_some()) {
        [false, true] => a,
        [true, false] => b,
        _ => return Ok(()),
    };
    let Some(source) = unrounded(graph, rounded).filter(|_| only(graph, rounded, &["Cast"])) else { return Ok(()) };
    if [a, b].iter().any(|&v| v != rounded && !is_slight(graph, v, context)) {
        return Ok(());
    }
    let (fact, name) = (graph.fact(result(id)).clone(), graph.node(id).name.clone());
    if !context.decisions.if_valid("round", id, graph.fact(source).shape == fact.shape) {
        return Ok(());
    }
    graph.insert_at(id);
    let mut operands = [a, b];
    for operand in &mut operands {
        *operand = if *operand == rounded { source } else { cast(graph, &name, *operand, DType::F32, context)? };
    }
    let wide = context.add(graph, &name, op.name, &operands.map(Some), Attrs::new())?;
    let value = cast(graph, &name, wide, fact.dtype, context)?;
    graph.replace(result(id), value);
    Ok(())
}

/// The sums of streams: from each rounded sum to the `f32` one that is stored.
struct Streams<'a> {
    sums: HashMap<ValueId, ValueId>,
    context: &'a Context<'a>,
}

impl Streams<'_> {
    /// Keeps a sum in `f32` if it belongs to a stream.
    fn widen(&mut self, graph: &mut Graph, id: NodeId) -> Result<()> {
        let Some(operands) = sum(graph, id) else { return Ok(()) };
        let follows = residual(graph, id, self.context).is_some_and(|stream| self.sums.contains_key(&stream));
        if graph.is_output(result(id)) || !follows && !goes_on(graph, result(id), self.context) {
            return Ok(());
        }
        let (name, dtype) = (graph.node(id).name.clone(), graph.fact(result(id)).dtype);
        graph.insert_at(id);
        let mut wide = [None; 2];
        for (wide, operand) in wide.iter_mut().zip(operands) {
            *wide = Some(self.wide(graph, &name, operand)?);
        }
        let wide = self.context.add(graph, &name, "Add", &wide, Attrs::new())?;
        let rounded = cast(graph, &name, wide, dtype, self.context)?;
        graph.replace(result(id), rounded);
        for user in graph.users(rounded) {
            if widens(graph, user) {
                graph.replace(result(user), wide);
            }
        }
        self.sums.insert(rounded, wide);
        Ok(())
    }

    /// Returns a value in `f32`. If the value is a product plus a constant, both become `f32` before the addition.
    fn wide(&self, graph: &mut Graph, name: &str, value: ValueId) -> Result<ValueId> {
        if let Some(&wide) = self.sums.get(&value) {
            return Ok(wide);
        }
        match addend(graph, value.node) {
            Some((product, constant)) if is_product(graph, value) && is_slight(graph, constant, self.context) => {
                let product = cast(graph, name, product, DType::F32, self.context)?;
                let constant = cast(graph, name, constant, DType::F32, self.context)?;
                self.context.add(graph, name, "Add", &[Some(product), Some(constant)], Attrs::new())
            }
            _ => match graph.users(value).into_iter().find(|&user| widens(graph, user)) {
                Some(user) => Ok(result(user)),
                None => cast(graph, name, value, DType::F32, self.context),
            },
        }
    }
}

/// True if a constant is small enough to store in `f32` as well, as scales and shifts of a row are. That is twice the bytes, beside the
/// half that others may read.
fn is_slight(graph: &Graph, constant: ValueId, context: &Context) -> bool {
    context.decisions.if_cheaper("widen", constant.node, graph.fact(constant).shape.numel() <= 1 << 16)
}

/// True if a node casts its operand to `f32`.
fn widens(graph: &Graph, id: NodeId) -> bool {
    graph.node(id).op_name() == "Cast" && graph.fact(result(id)).dtype == DType::F32
}

/// The operands of a sum of 16-bit floats; `None` for any other node.
fn sum(graph: &Graph, id: NodeId) -> Option<[ValueId; 2]> {
    let node = graph.node(id);
    let &[Some(a), Some(b)] = &graph.operands(id)[..] else { return None };
    (node.op()?.name == "Add" && node.outputs[0].fact.dtype.is_half()).then_some([a, b])
}

/// True if a value is a matrix product, or one plus a constant, that has one reader.
fn is_product(graph: &Graph, value: ValueId) -> bool {
    let biased = || Some(addend(graph, value.node)?.0).filter(|_| only(graph, value, &["Add"]));
    only(graph, value, &["MatMul"]) || biased().is_some_and(|inner| only(graph, inner, &["MatMul"]))
}

/// The value to which a node adds a product; `None` if it adds none.
fn residual(graph: &Graph, id: NodeId, context: &Context) -> Option<ValueId> {
    let (stream, product) = match sum(graph, id)? {
        [stream, product] if is_product(graph, product) => (stream, product),
        [product, stream] if is_product(graph, product) => (stream, product),
        _ => return None,
    };
    let whole = [stream, product].iter().all(|&v| graph.fact(v).shape == graph.fact(result(id)).shape);
    context.decisions.if_valid("stream", id, whole).then_some(stream)
}

/// True if a value goes on in a stream: some reader, but not every one, adds a product to it, and each can as well read `f32`.
fn goes_on(graph: &Graph, value: ValueId, context: &Context) -> bool {
    let users = graph.users(value);
    let reads = |&user: &NodeId| {
        let lower = graph.node(user).op().map(|op| &op.lower);
        matches!(lower, Some(Lower::Map(_) | Lower::Reduce(_)))
    };
    let added = |&&user: &&NodeId| residual(graph, user, context) == Some(value);
    users.iter().all(reads) && (1..users.len()).contains(&users.iter().filter(added).count())
}
