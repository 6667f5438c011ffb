//! Chooses the values of the forward computation that are kept for the backward one. The others are [computed again](recompute).
//!
//! A minimum cut chooses: between what must be kept or computed, and what the backward computation reads. Every value is an edge whose
//! capacity is its bytes; to cut it is to keep the value. A value that is computed again asks for all that its node reads.
//!
//! ```text
//! source --work of the node--> (value computed) --bytes--> (value there) --> sink, if a backward node reads it
//!                                     ^
//! (operand there) --unbounded---------'
//! ```
//!
//! Products and convolutions are not computed again: the edge from the source has no bound.

use crate::error::Result;
use crate::graph::{Graph, min_cut};
use crate::op::{Lower, ValueId};
use crate::pass::{Prepared, recompute, regroup};
use crate::target::Target;
use std::collections::{HashMap, HashSet};

/// An element that is computed again counts as one byte in so many.
const WORK: u64 = 16;
/// More than the bytes of any graph.
const UNBOUNDED: u64 = 1 << 60;

/// Computes again what takes no product and no convolution, and would take memory.
///
/// # Errors
/// When the graph has a cycle.
pub fn run(graph: &mut Prepared, target: &Target, fuse: bool) -> Result<()> {
    if !graph.graph.has_backward() {
        return Ok(());
    }
    let kept = kept(&graph.graph)?;
    recompute::run(&mut graph.graph, &kept)?;
    regroup(graph, target, fuse)
}

/// The values that are kept.
fn kept(graph: &Graph) -> Result<HashSet<ValueId>> {
    let order = graph.order()?;
    let (source, sink) = (0, 1);
    let mut edges = Vec::new();
    let mut numbers: HashMap<ValueId, u32> = HashMap::new();
    let mut values = Vec::new();
    // The two ends of a value: computed, and there.
    let forward = |node: u32| graph.node(node).op().is_some() && !graph.is_backward(node);
    for &node in order.iter().filter(|&&node| forward(node)) {
        for port in 0..graph.node(node).outputs.len() as u32 {
            let value = ValueId { node, port };
            let number = 2 + 2 * values.len() as u32;
            numbers.insert(value, number);
            values.push(value);
            let view = matches!(graph.node(node).op().map(|op| op.lower), Some(Lower::View(_)));
            let fact = graph.fact(value);
            let numel = fact.shape.numel() as u64;
            let work = if is_product(graph, node) { UNBOUNDED } else { 1 + if view { 0 } else { numel / WORK } };
            edges.push((source, number, work));
            edges.push((number, number + 1, if graph.is_output(value) { 0 } else { fact.bytes() as u64 + 1 }));
            for operand in graph.operands(node).into_iter().flatten() {
                if let Some(&operand) = numbers.get(&operand) {
                    edges.push((operand + 1, number, UNBOUNDED));
                }
            }
        }
    }
    let mut read = HashSet::new();
    for &node in order.iter().filter(|&&node| graph.is_backward(node)) {
        for operand in graph.operands(node).into_iter().flatten() {
            if let Some(&number) = numbers.get(&operand).filter(|_| read.insert(operand)) {
                edges.push((number + 1, sink, UNBOUNDED));
            }
        }
    }
    let wanted = min_cut(2 + 2 * values.len(), &edges, source, sink);
    let keeps = |value: &ValueId| {
        let number = numbers[value] as usize;
        !wanted[number]
    };
    Ok(values.into_iter().filter(keeps).collect())
}

/// True if a node is a product or a convolution.
fn is_product(graph: &Graph, node: u32) -> bool {
    let products = ["MatMul", "plimsoll.Conv", "plimsoll.ConvTranspose"];
    products.contains(&graph.node(node).op_name())
}
