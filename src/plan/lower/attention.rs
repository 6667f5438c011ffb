//! Kernels of attentions.

use super::Lowering;
use super::code::Code;
use super::destination::unreachable;
use super::outline::Outline;
use super::view::split_batch;
use crate::error::Result;
use crate::expr::{self, Body, Expr};
use crate::kernel::{Fold, Template};
use crate::op::{Lower, NodeId};
use crate::pass::Group;
use crate::pass::group::Attention;

impl Lowering<'_> {
    /// Makes one kernel of an attention.
    pub(super) fn attention(&mut self, group: &Group, found: &Attention) -> Result<()> {
        let graph = self.graph;
        let Group { nodes, sink, .. } = group;
        let sink = *sink;
        let value = sink.output(0);
        let values = graph.operands(sink)[1].filter(|_| found.fold != Fold::LogSum);
        let products = [found.products].into_iter().chain(found.second);
        let operands: Vec<_> = products.flat_map(|product| graph.operands(product)).chain([values]).flatten().collect();
        let split = self.split_batch_axes(&operands)?;
        let (products, mut reads, _) = self.template_call(found.products, split.as_ref())?;
        let second = found.second.map(|second| self.template_call(second, split.as_ref())).transpose()?;
        let (whole, space) = (graph.node(found.products).outputs[0].fact.shape.clone(), products.shape);
        let batch = &whole[..whole.len() - 2];
        let mut shape = space.clone();
        shape.truncate(space.len() - 2);
        let split = shape.clone();
        let result = &graph.fact(value).shape;
        shape.extend_from_slice(&result[result.len() - 2..]);
        if let Some(values) = values {
            let place = self.place(values)?;
            let access = split_batch(&place.access, batch, &split).ok_or_else(|| unreachable(graph, sink))?;
            reads.push((place.buffer, self.operand(place.buffer, access)));
        }
        reads.extend(second.into_iter().flat_map(|(_, reads, _)| reads));

        let dtype = graph.fact(found.products.output(0)).dtype;
        let mut code = Code { first: found.fold.products(), ..Code::default() };
        for (i, product) in [found.products].into_iter().chain(found.second).enumerate() {
            code.values.insert(product.output(0), Expr::input(i, graph.fact(product.output(0)).dtype));
        }
        let scoring = |&n: &NodeId| n != sink && matches!(graph.node(n).op().map(|op| &op.lower), Some(Lower::Map(_)));
        let last = nodes.iter().position(|&n| n == found.scores.node).expect("the scores are of the group");
        let maps: Vec<NodeId> = nodes[..=last].iter().copied().filter(scoring).collect();
        let score = if maps.is_empty() {
            Expr::input(0, dtype)
        } else {
            self.compute(&maps, &mut code, &|access, _| access.broadcast(&whole).reshape(&space))?
        };
        let further = code.reads.len();
        reads.append(&mut code.reads);
        let mut score = Body::new(&[score]);
        // Code at an index is of the last two axes.
        for instr in &mut score.code {
            if let expr::Code::Index(axis) = &mut instr.code {
                *axis = *axis + space.len() as u32 - whole.len() as u32;
            }
        }
        let template = Template::Attention { score, further, guarded: found.guarded, fold: found.fold };
        let outline = Outline::new(template, shape.clone(), Body::identity(graph.fact(value).dtype.held()));
        self.write(sink, outline, reads, |access| access.reshape(&shape))
    }
}
