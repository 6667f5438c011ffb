//! Kernels whose operands are not known yet.

use super::destination::unreachable;
use super::view::split_batch;
use crate::error::Result;
use crate::expr::Body;
use crate::graph::Graph;
use crate::kernel::{Prologue, Template};
use crate::op::{Call, Fact, Lower, NodeId, TemplateCall};
use crate::shape::{Access, Shape};

/// A kernel without its operands.
pub(super) struct Outline {
    pub(super) template: Template,
    pub(super) shape: Shape,
    pub(super) prologues: Vec<Prologue>,
    pub(super) body: Body,
}

impl Outline {
    pub(super) fn new(template: Template, shape: Shape, body: Body) -> Outline {
        Outline { template, shape, prologues: Vec::new(), body }
    }
}

/// The template of a node whose operands are read as given; of a product, perhaps with split batch axes.
pub(super) fn build(graph: &Graph, id: NodeId, accesses: &[Access], split: Option<&Shape>) -> Result<TemplateCall> {
    let node = graph.node(id);
    let op = node.op().expect("a template is an operator");
    let Lower::Template(template) = op.lower else { unreachable!("the caller chose a template") };
    let operands: Vec<_> = graph.operands(id).into_iter().flatten().collect();
    let mut facts: Vec<Fact> = operands.iter().map(|&v| graph.fact(v).clone()).collect();
    let mut accesses = accesses.to_vec();
    if let Some(split) = split {
        let batch = &node.outputs[0].fact.shape;
        let batch = &batch[..batch.len() - 2];
        for (access, fact) in accesses.iter_mut().zip(&mut facts) {
            *access = split_batch(access, batch, split).ok_or_else(|| unreachable(graph, id))?;
            fact.shape = access.shape.clone();
        }
    }
    let facts: Vec<_> = facts.iter().map(Some).collect();
    template(&Call { op, attrs: &node.attrs, inputs: &facts }, &accesses).map_err(|what| node.error(what))
}
