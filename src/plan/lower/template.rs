//! Kernels of template calls, and of what is computed of their values.

use super::Lowering;
use super::buffer_view::{BufferView, Read};
use super::channels::is_dense_image;
use super::code::Code;
use super::fuse_prologue::Hosted;
use super::outline::Outline;
use super::view::take_apart;
use crate::error::Result;
use crate::expr::{Body, Expr};
use crate::kernel::schedule::conv::is_direct;
use crate::kernel::{Prologue, Template};
use crate::op::{Call, Fact, Lower, TemplateCall, ValueId};
use crate::pass::Group;
use crate::shape::{Access, Shape};

impl Lowering<'_> {
    /// Makes one kernel of a template call and what is computed of its value.
    pub(super) fn template(&mut self, Group { nodes, sink, .. }: &Group, anchor: u32) -> Result<()> {
        let mut code = Code::default();
        let sink = *sink;
        let value = ValueId { node: sink, port: 0 };
        let shape = self.graph.fact(value).shape.clone();
        let operands: Vec<_> = self.graph.operands(anchor).into_iter().flatten().collect();
        let apart = self.apart(&operands)?;
        let (core, mut reads, own) = self.core(anchor, apart.as_ref())?;
        let dtype = self.graph.node(anchor).outputs[0].fact.dtype;
        code.values.insert(ValueId { node: anchor, port: 0 }, Expr::input(0, dtype));
        code.first = 1;
        let result = self.compute(nodes, &mut code, &|access, _| access.broadcast(&shape).reshape(&core.shape))?;
        reads.append(&mut code.reads);
        let mut prologues = Vec::new();
        for (prologue, mut operands) in own {
            reads.append(&mut operands);
            prologues.push(prologue);
        }
        let to = self.destination(value)?;
        let access = to.access.reshape(&core.shape);
        let to = BufferView { buffer: to.buffer, access: access.ok_or_else(|| self.unreachable(sink))? };
        let outline = Outline { prologues, ..Outline::new(core.template, core.shape, Body::new(&[result])) };
        self.step(self.graph.node(sink).name.clone(), outline, reads, vec![to])
    }

    /// The template of a node whose operands are read as given; of a product, with its batch axes `apart`.
    pub(super) fn build(&self, anchor: u32, accesses: &[Access], apart: Option<&Shape>) -> Result<TemplateCall> {
        let (graph, node) = (self.graph, self.graph.node(anchor));
        let op = node.op().expect("a template is an operator");
        let Lower::Template(template) = op.lower else { unreachable!("the caller chose a template") };
        let operands: Vec<_> = graph.operands(anchor).into_iter().flatten().collect();
        let mut facts: Vec<Fact> = operands.iter().map(|&v| graph.fact(v).clone()).collect();
        let mut accesses = accesses.to_vec();
        if let Some(apart) = apart {
            let batch = &node.outputs[0].fact.shape;
            let batch = &batch[..batch.len() - 2];
            for (access, fact) in accesses.iter_mut().zip(&mut facts) {
                *access = take_apart(access, batch, apart).ok_or_else(|| self.unreachable(anchor))?;
                fact.shape = access.shape.clone();
            }
        }
        let facts: Vec<_> = facts.iter().map(Some).collect();
        template(&Call { op, attrs: &node.attrs, inputs: &facts }, &accesses).map_err(|what| node.error(what))
    }

    /// The template of a node, with its operands' buffers, and with the prologues that it hosts and theirs. The batch axes of a product may
    /// be `apart`.
    pub(super) fn core(
        &mut self,
        anchor: u32,
        apart: Option<&Shape>,
    ) -> Result<(TemplateCall, Vec<Read>, Vec<(Prologue, Vec<Read>)>)> {
        let operands: Vec<_> = self.graph.operands(anchor).into_iter().flatten().collect();
        let mut places = Vec::with_capacity(operands.len());
        for &value in &operands {
            places.push(match self.hosted.get(&value) {
                Some(hosted) => hosted.reads[0].clone(),
                None => self.place(value)?,
            });
        }
        let accesses = |places: &[BufferView]| places.iter().map(|p| p.access.clone()).collect::<Vec<_>>();
        let mut core = self.build(anchor, &accesses(&places), apart)?;
        let dtype = self.graph.node(anchor).outputs[0].fact.dtype;
        let last = self.wants_channels_last(&core.template, dtype);
        if last {
            let is_direct =
                matches!(core.template, Template::Conv { groups, .. } if is_direct(&core.reads[1].1.shape, groups));
            for (i, &value) in operands.iter().enumerate() {
                let vectors = i == core.reads[1].0 && is_direct;
                places[i] = if vectors { self.with_outputs_last(value)? } else { self.with_channels_last(value)? };
            }
            core = self.build(anchor, &accesses(&places), apart)?;
        }
        let strided = matches!(core.template, Template::ConvTranspose { .. } | Template::Pool { .. });
        let either = self.target.reads_channels_last() && strided;
        let lies = either && core.reads[0].1.has_channels_last();
        let lies = last || self.decisions.if_valid("lies", anchor, lies);
        let windowed = matches!(
            core.template,
            Template::Conv { .. } | Template::ConvTranspose { .. } | Template::Pool { .. } | Template::Resize { .. }
        );
        if windowed && !lies && !self.decisions.if_valid("dense", anchor, is_dense_image(&core.reads[0].1)) {
            let input = core.reads[0].0;
            places[input] = self.contiguous(operands[input], &places[input])?;
            core = self.build(anchor, &accesses(&places), apart)?;
        }
        let reads: Vec<_> = core
            .reads
            .iter()
            .map(|(i, access)| (places[*i].buffer, self.operand(places[*i].buffer, access.clone())))
            .collect();
        let mut prologues = Vec::new();
        for (operand, &(input, _)) in core.reads.iter().enumerate() {
            let Some(Hosted { reads, body }) = self.hosted.get(&operands[input]) else { continue };
            let mut own = Vec::with_capacity(reads.len() - 1);
            for place in &reads[1..] {
                let mut accesses = accesses(&places);
                accesses[input] = place.access.clone();
                let access = self.build(anchor, &accesses, apart)?.reads.swap_remove(operand).1;
                own.push((place.buffer, self.operand(place.buffer, access)));
            }
            prologues.push((Prologue { operand, reads: own.len(), body: body.clone() }, own));
        }
        Ok((core, reads, prologues))
    }
}
