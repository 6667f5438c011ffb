//! Kernels of template calls, and of what is computed of their values.

use super::Lowering;
use super::buffer_view::{BufferView, Read};
use super::channels::{is_dense_image, wants_channels_last, wants_outputs_last};
use super::code::Code;
use super::fuse_prologue::FusedPrologue;
use super::outline::{Outline, build};
use crate::error::Result;
use crate::expr::{Body, Expr};
use crate::kernel::schedule::conv::is_direct;
use crate::kernel::{Prologue, Template};
use crate::op::{NodeId, TemplateCall, ValueId};
use crate::ops::PRODUCT_OF_BYTES;
use crate::pass::Group;
use crate::shape::Shape;
use crate::target::Family;

impl Lowering<'_> {
    /// Makes one kernel of a template call and what is computed of its value.
    pub(super) fn template(&mut self, Group { nodes, sink, .. }: &Group, id: NodeId) -> Result<()> {
        let mut code = Code::default();
        let sink = *sink;
        let value = sink.output(0);
        let shape = self.graph.fact(value).shape.clone();
        let operands: Vec<_> = self.graph.operands(id).into_iter().flatten().collect();
        let split = self.split_batch_axes(&operands)?;
        let (call, mut reads, own) = self.template_call(id, split.as_ref())?;
        let dtype = self.graph.node(id).outputs[0].fact.dtype;
        // Sums by filters are wider than what they are of. A cast of them does not round.
        let is_wider = matches!(call.template, Template::ConvFilters { .. });
        let core = if is_wider { self.graph.fact(operands[0]).dtype } else { dtype }.held();
        code.values.insert(id.output(0), Expr::input(0, core).cast(dtype.held()));
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

    /// The template of a node, with its operands' buffers, and with the prologues that it applies and theirs. `split` has the batch axes
    /// of a product that are split.
    pub(super) fn template_call(
        &mut self,
        id: NodeId,
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
        let mut call = build(self.graph, id, &accesses(&places), split)?;
        let dtype = self.graph.fact(operands[0]).dtype.held();
        let last = wants_channels_last(&call.template, dtype, self.target);
        if last {
            let is_direct =
                matches!(call.template, Template::Conv { groups, .. } if is_direct(&call.reads[1].1.shape, groups));
            for (i, &value) in operands.iter().enumerate() {
                let vectors = i == call.reads[1].0 && is_direct;
                places[i] = if vectors { self.with_outputs_last(value)? } else { self.with_channels_last(value)? };
            }
            call = build(self.graph, id, &accesses(&places), split)?;
        }
        if call.template == Template::MatMul && dtype.is_byte() && !self.target.packs_constants() {
            for (operand, &(i, _)) in call.reads.iter().take(2).enumerate() {
                places[i] = self.inner_axis_last(operands[i], places[i].clone(), operand)?;
            }
            call = build(self.graph, id, &accesses(&places), split)?;
        }
        let strided = matches!(call.template, Template::ConvTranspose { .. } | Template::Pool { .. });
        let either = self.target.reads_channels_last() && strided;
        let channels_last = either && call.reads[0].1.has_channels_last();
        let channels_last = last || self.decisions.if_valid("channels last", id, channels_last);
        let transposes = matches!(call.template, Template::ConvTranspose { .. });
        if channels_last && transposes && wants_outputs_last(dtype, self.target) {
            // Both operands are then copied 16 bytes at a time, and so is the result.
            let weights = call.reads[1].0;
            places[weights] = self.with_channels_last(operands[weights])?;
            call = build(self.graph, id, &accesses(&places), split)?;
        }
        let windowed = matches!(
            call.template,
            Template::Conv { .. } | Template::ConvTranspose { .. } | Template::Pool { .. } | Template::Resize { .. }
        );
        let data = &call.reads[0].1;
        // The CPU's windows step from plane to plane.
        let by_plane = self.target.family == Family::Cpu && !matches!(call.template, Template::Resize { .. });
        let dense = is_dense_image(data) || by_plane && data.has_dense_planes();
        if windowed && !channels_last && !self.decisions.if_valid("dense", id, dense) {
            let input = call.reads[0].0;
            places[input] = self.contiguous(operands[input], &places[input])?;
            call = build(self.graph, id, &accesses(&places), split)?;
        }
        // What ranks exchange is one run of bytes.
        let exchanged = matches!(call.template, Template::Collective(_));
        if exchanged && !self.decisions.if_valid("exchanged", id, call.reads[0].1.is_contiguous()) {
            places[0] = self.contiguous(operands[0], &places[0])?;
            call = build(self.graph, id, &accesses(&places), split)?;
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
                let access = build(self.graph, id, &accesses, split)?.reads.swap_remove(operand).1;
                own.push((place.buffer, self.operand(place.buffer, access)));
            }
            prologues.push((Prologue { operand, reads: own.len(), body: body.clone() }, own));
        }
        Ok((call, reads, prologues))
    }

    /// A constant operand of a product of bytes, with the summed axis innermost: a word is four neighbours along it. A constant that another node
    /// reads stays as it is.
    fn inner_axis_last(&mut self, value: ValueId, place: BufferView, operand: usize) -> Result<BufferView> {
        let rank = self.graph.fact(value).shape.len();
        let alone = self.graph.users(value).iter().all(|&user| {
            self.graph.node(user).op_name() == PRODUCT_OF_BYTES && self.graph.operands(user)[operand] == Some(value)
        });
        let constant = self.graph.as_constant(value).filter(|_| rank >= 2 && alone).cloned();
        let Some(constant) = constant else { return Ok(place) };
        let summed = rank - 1 - operand;
        if place.access.strides[summed] == 1 {
            return Ok(place);
        }
        let order: Vec<usize> = (0..rank).filter(|&axis| axis != summed).chain([summed]).collect();
        self.stored(value, &constant, "inner axis last", &order)
    }
}
