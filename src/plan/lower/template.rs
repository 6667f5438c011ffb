//! Kernels of template calls, and of what is computed of their values.

use super::Lowering;
use super::buffer_view::{BufferView, Read};
use super::channels::is_dense_image;
use super::code::Code;
use super::fuse_prologue::FusedPrologue;
use super::outline::Outline;
use super::view::split_batch;
use crate::error::Result;
use crate::expr::{Body, Expr};
use crate::kernel::schedule::conv::is_direct;
use crate::kernel::{Prologue, Template};
use crate::op::{Call, Fact, Lower, TemplateCall, ValueId};
use crate::pass::Group;
use crate::shape::{Access, Shape};

impl Lowering<'_> {
    /// Makes one kernel of a template call and what is computed of its value.
    pub(super) fn template(&mut self, Group { nodes, sink, .. }: &Group, id: u32) -> Result<()> {
        let mut code = Code::default();
        let sink = *sink;
        let value = ValueId { node: sink, port: 0 };
        let shape = self.graph.fact(value).shape.clone();
        let operands: Vec<_> = self.graph.operands(id).into_iter().flatten().collect();
        let split = self.split_batch_axes(&operands)?;
        let (call, mut reads, own) = self.template_call(id, split.as_ref())?;
        let dtype = self.graph.node(id).outputs[0].fact.dtype;
        code.values.insert(ValueId { node: id, port: 0 }, Expr::input(0, dtype));
        code.first = 1;
        let result = self.compute(nodes, &mut code, &|access, _| access.broadcast(&shape).reshape(&call.shape))?;
        reads.append(&mut code.reads);
        let mut prologues = Vec::new();
        for (prologue, mut operands) in own {
            reads.append(&mut operands);
            prologues.push(prologue);
        }
        let outline = Outline { prologues, ..Outline::new(call.template, call.shape.clone(), Body::new(&[result])) };
        self.write(sink, outline, reads, |access| access.reshape(&call.shape))
    }

    /// The template of a node whose operands are read as given; of a product, perhaps with split batch axes.
    pub(super) fn build(&self, id: u32, accesses: &[Access], split: Option<&Shape>) -> Result<TemplateCall> {
        let (graph, node) = (self.graph, self.graph.node(id));
        let op = node.op().expect("a template is an operator");
        let Lower::Template(template) = op.lower else { unreachable!("the caller chose a template") };
        let operands: Vec<_> = graph.operands(id).into_iter().flatten().collect();
        let mut facts: Vec<Fact> = operands.iter().map(|&v| graph.fact(v).clone()).collect();
        let mut accesses = accesses.to_vec();
        if let Some(split) = split {
            let batch = &node.outputs[0].fact.shape;
            let batch = &batch[..batch.len() - 2];
            for (access, fact) in accesses.iter_mut().zip(&mut facts) {
                *access = split_batch(access, batch, split).ok_or_else(|| self.unreachable(id))?;
                fact.shape = access.shape.clone();
            }
        }
        let facts: Vec<_> = facts.iter().map(Some).collect();
        template(&Call { op, attrs: &node.attrs, inputs: &facts }, &accesses).map_err(|what| node.error(what))
    }

    /// The template of a node, with its operands' buffers, and with the prologues that it applies and theirs. `split` has the batch axes
    /// of a product that are split.
    pub(super) fn template_call(
        &mut self,
        id: u32,
        split: Option<&Shape>,
    ) -> Result<(TemplateCall, Vec<Read>, Vec<(Prologue, Vec<Read>)>)> {
        let operands: Vec<_> = self.graph.operands(id).into_iter().flatten().collect();
        let mut places = Vec::with_capacity(operands.len());
        for &value in &operands {
            places.push(match self.prologues.get(&value) {
                Some(fused) => fused.reads[0].clone(),
                None => self.place(value)?,
            });
        }
        let accesses = |places: &[BufferView]| places.iter().map(|p| p.access.clone()).collect::<Vec<_>>();
        let mut call = self.build(id, &accesses(&places), split)?;
        let dtype = self.graph.node(id).outputs[0].fact.dtype;
        let last = self.wants_channels_last(&call.template, dtype);
        if last {
            let is_direct =
                matches!(call.template, Template::Conv { groups, .. } if is_direct(&call.reads[1].1.shape, groups));
            for (i, &value) in operands.iter().enumerate() {
                let vectors = i == call.reads[1].0 && is_direct;
                places[i] = if vectors { self.with_outputs_last(value)? } else { self.with_channels_last(value)? };
            }
            call = self.build(id, &accesses(&places), split)?;
        }
        let strided = matches!(call.template, Template::ConvTranspose { .. } | Template::Pool { .. });
        let either = self.target.reads_channels_last() && strided;
        let channels_last = either && call.reads[0].1.has_channels_last();
        let channels_last = last || self.decisions.if_valid("channels last", id, channels_last);
        let windowed = matches!(
            call.template,
            Template::Conv { .. } | Template::ConvTranspose { .. } | Template::Pool { .. } | Template::Resize { .. }
        );
        if windowed && !channels_last && !self.decisions.if_valid("dense", id, is_dense_image(&call.reads[0].1)) {
            let input = call.reads[0].0;
            places[input] = self.contiguous(operands[input], &places[input])?;
            call = self.build(id, &accesses(&places), split)?;
        }
        let reads: Vec<_> = call
            .reads
            .iter()
            .map(|(i, access)| (places[*i].buffer, self.operand(places[*i].buffer, access.clone())))
            .collect();
        let mut prologues = Vec::new();
        for (operand, &(input, _)) in call.reads.iter().enumerate() {
            let Some(FusedPrologue { reads, body }) = self.prologues.get(&operands[input]) else { continue };
            let mut own = Vec::with_capacity(reads.len() - 1);
            for place in &reads[1..] {
                let mut accesses = accesses(&places);
                accesses[input] = place.access.clone();
                let access = self.build(id, &accesses, split)?.reads.swap_remove(operand).1;
                own.push((place.buffer, self.operand(place.buffer, access)));
            }
            prologues.push((Prologue { operand, reads: own.len(), body: body.clone() }, own));
        }
        Ok((call, reads, prologues))
    }
}
