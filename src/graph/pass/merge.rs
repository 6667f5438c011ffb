//! Merges products of one value by several matrices into one product by all of them side by side, as those that make queries, keys and
//! values. Each alone is short, and leaves much of a GPU idle. On CUDA only those of 16-bit floats are merged: short ones of `f32` run side by
//! side as they are.
//!
//! ```text
//! x -+- MatMul wq - Add bq -          x - MatMul [wq wk wv] - Add [bq bk bv] -+- Slice -
//!    +- MatMul wk - Add bk -                                                  +- Slice -
//!    `- MatMul wv - Add bv -                                                  `- Slice -
//! ```

use super::Context;
use super::simplify::addend;
use crate::dtype::DType;
use crate::error::Result;
use crate::graph::Graph;
use crate::op::{Attrs, Lower, NodeId, OpDef, ValueId};
use crate::target::{Target, Wave};
use std::collections::BTreeSet;

/// The most steps over which elementwise nodes are followed.
const DEPTH: usize = 16;
/// The most nodes that are searched for one that needs all of the results.
const NEAR: usize = 64;

/// A product by a constant matrix.
#[derive(Clone)]
struct Product {
    node: NodeId,
    weights: ValueId,
    /// The vector that is added to each row.
    bias: Option<ValueId>,
    /// The product, or the sum of it and the bias.
    end: ValueId,
}

/// Merges products of one value that stand side by side in the order of the graph.
pub fn run(graph: &mut Graph, context: &Context) -> Result<()> {
    let Some(wave) = context.target.wave() else { return Ok(()) };
    let mut row: Vec<Product> = Vec::new();
    for id in graph.order()? {
        // Other kernels in between would run while all of the results are kept. A result in place takes no memory of its own.
        let computes = |op: &OpDef| matches!(op.lower, Lower::Template(_) | Lower::Reduce(_)) && !op.in_place;
        let computes = graph.node(id).op().is_some_and(computes);
        if !computes {
            continue;
        }
        let product = product(graph, id, wave.half);
        if !product.as_ref().is_some_and(|p| row.first().is_some_and(|first| joins(graph, first, p))) {
            merge(graph, &std::mem::take(&mut row), &wave, context)?;
        }
        row.extend(product);
    }
    merge(graph, &row, &wave, context)?;
    graph.sweep();
    Ok(())
}

/// A product of this type that may be merged.
fn product(graph: &Graph, node: NodeId, half: bool) -> Option<Product> {
    let result = node.output(0);
    let &[Some(_), Some(weights)] = &graph.operands(node)[..] else { return None };
    let multiplies = graph.node(node).op()?.name == "MatMul" && graph.as_constant(weights).is_some();
    let dtype = graph.fact(result).dtype;
    let typed = if half { dtype.is_half() } else { dtype == DType::F32 };
    let matrix = graph.fact(weights).shape.len() == 2 && typed;
    // Weights that others read, too, would be held twice.
    if !multiplies || !matrix || graph.is_output(result) || !graph.is_alone(weights) {
        return None;
    }
    let biased = || {
        let [user] = graph.users(result)[..] else { return None };
        let (inner, bias) = addend(graph, user)?;
        let row = graph.fact(bias).shape[..] == graph.fact(weights).shape[1..] && graph.is_alone(bias);
        (inner == result && row).then_some((user.output(0), bias))
    };
    let (end, bias) = biased().map_or((result, None), |(end, bias)| (end, Some(bias)));
    (!graph.is_output(end)).then_some(Product { node, weights, bias, end })
}

/// True if both products multiply one value, have equal depths, and both or neither have a bias.
fn joins(graph: &Graph, first: &Product, other: &Product) -> bool {
    let left = |p: &Product| graph.operands(p.node)[0];
    let depth = |p: &Product| graph.fact(p.weights).shape[0];
    left(first) == left(other) && depth(first) == depth(other) && first.bias.is_some() == other.bias.is_some()
}

fn merge(graph: &mut Graph, row: &[Product], wave: &Wave, context: &Context) -> Result<()> {
    let [first, _, ..] = row else { return Ok(()) };
    if !context.decisions.if_cheaper("merge", first.node, is_cheaper(graph, row, wave, context.target)) {
        return Ok(());
    }
    let (left, name) = (graph.operands(first.node)[0], graph.node(first.node).name.clone());
    graph.insert_at(first.node);
    let beside = |graph: &mut Graph, parts: Vec<Option<ValueId>>| {
        context.add(graph, &name, "Concat", &parts, Attrs::new().with("axis", -1))
    };
    let weights = beside(graph, row.iter().map(|p| Some(p.weights)).collect())?;
    let bias = match first.bias {
        Some(_) => Some(beside(graph, row.iter().map(|p| p.bias).collect())?),
        None => None,
    };
    graph.insert_at(first.node);
    let mut whole = context.add(graph, &name, "MatMul", &[left, Some(weights)], Attrs::new())?;
    if let Some(bias) = bias {
        whole = context.add(graph, &name, "Add", &[Some(whole), Some(bias)], Attrs::new())?;
    }
    let mut start = 0;
    for product in row {
        let end = start + graph.fact(product.weights).shape[1] as i64;
        let attrs = Attrs::new().with("starts", vec![start]).with("ends", vec![end]).with("axes", vec![-1i64]);
        let name = graph.value_name(product.end).to_owned();
        let slice = context.add(graph, &name, "Slice", &[Some(whole)], attrs)?;
        graph.replace(product.end, slice);
        start = end;
    }
    Ok(())
}

/// True if one product takes fewer waves than these, whose results go separate ways: what an elementwise node makes
/// of several could take the place of one of them.
fn is_cheaper(graph: &Graph, row: &[Product], wave: &Wave, target: &Target) -> bool {
    let tiles = |p: &Product| {
        let shape = &graph.fact(p.end).shape;
        let columns = shape.last().copied().unwrap_or(1);
        (shape.numel() / columns.max(1)).div_ceil(wave.tile) * columns.div_ceil(wave.tile)
    };
    let waves = |tiles: usize| tiles.div_ceil(wave.tiles.max(1));
    let one_by_one: usize = row.iter().map(|p| waves(tiles(p))).sum();
    let mut seen = BTreeSet::new();
    let separate = row.iter().all(|p| followers(graph, p.end).into_iter().all(|node| seen.insert(node)));
    // A tensor that no binding holds would be cut again.
    let bytes = |value: fn(&Product) -> ValueId| {
        let facts = row.iter().map(|p| graph.fact(value(p)));
        facts.map(|fact| fact.shape.numel() as u64 * fact.dtype.size() as u64).sum::<u64>()
    };
    let bound = bytes(|p| p.weights).max(bytes(|p| p.end)) <= target.max_binding;
    let ends: Vec<_> = row.iter().map(|p| p.end).collect();
    waves(row.iter().map(tiles).sum()) < one_by_one && separate && bound && together(graph, &ends)
}

/// True if some node needs all of these values at once, none of them reduced on the way. Otherwise one value could be gone before the next
/// is made.
pub(super) fn together(graph: &Graph, values: &[ValueId]) -> bool {
    let mut needed = values.iter().map(|&value| {
        let (mut found, mut values) = (BTreeSet::new(), vec![value]);
        while let Some(value) = values.pop().filter(|_| found.len() < NEAR) {
            for user in graph.users(value) {
                let reduces = graph.node(user).op().is_none_or(|op| matches!(op.lower, Lower::Reduce(_)));
                if !reduces && found.insert(user) {
                    values.insert(0, user.output(0));
                }
            }
        }
        found
    });
    let first = needed.next().unwrap_or_default();
    let common = needed.fold(first, |common, own| common.intersection(&own).copied().collect());
    !common.is_empty()
}

/// The elementwise nodes that compute with a value, and with what those make of it, however it is seen.
fn followers(graph: &Graph, value: ValueId) -> BTreeSet<NodeId> {
    let mut found = BTreeSet::new();
    let mut values = vec![value];
    for _ in 0..DEPTH {
        let users: Vec<NodeId> = values.drain(..).flat_map(|value| graph.users(value)).collect();
        for user in users {
            let lower = graph.node(user).op().map(|op| &op.lower);
            if matches!(lower, Some(Lower::Map(_) | Lower::View(_))) && found.insert(user) {
                values.push(user.output(0));
            }
        }
    }
    found
}
