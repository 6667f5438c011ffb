//! Elementwise groups without a kernel of their own. The only template that reads such a group's value applies it to each element it reads.

use super::Lowering;
use super::buffer_view::{BufferView, Read};
use super::channels::is_dense_image;
use super::code::Code;
use super::outline::build;
use crate::dtype::DType;
use crate::error::Result;
use crate::expr::{self, Body};
use crate::kernel::algorithm::Schedule;
use crate::kernel::schedule::prologue;
use crate::kernel::{Kernel, Operand, Prologue, Template};
use crate::op::{Lower, NodeId, TemplateCall, ValueId};
use crate::pass::{Group, GroupKind};
use crate::shape::Access;
use crate::{BufferIdx, Class};
use std::collections::HashSet;

/// An elementwise group that a template applies to the elements of an operand.
#[derive(Clone, Debug)]
pub(super) struct FusedPrologue {
    /// The place of the elements, then the places of the group's other operands.
    pub(super) reads: Vec<BufferView>,
    /// From the elements of `reads` to what the template consumes.
    pub(super) body: Body,
}

/// The template that alone reads the value of a group.
struct Reader {
    /// The template's node.
    node: NodeId,
    /// Views that the template looks through.
    views: Vec<NodeId>,
    /// The value that the template reads.
    value: ValueId,
}

/// The operand of a template that could have a prologue.
struct Slot {
    /// The template's node, its operands, and their accesses if each lay row-major.
    node: NodeId,
    operands: Vec<ValueId>,
    accesses: Vec<Access>,
    /// Its index among the node's operands, and among the kernel's.
    input: usize,
    operand: usize,
    /// The kernel's template under these accesses.
    call: TemplateCall,
}

/// The decision to leave an elementwise group to a template, and all that it takes.
struct Fusion {
    reader: Reader,
    fused: FusedPrologue,
    /// True if it costs less than a kernel of its own.
    is_cheaper: bool,
}

/// A further operand of a prologue is this many times smaller than the template's, unless it is kept anyway: a prologue keeps its operands
/// alive until the kernel has run.
const SMALLER: u64 = 8;

impl Lowering<'_> {
    /// Leaves an elementwise group to the only template that reads its value, perhaps through views. It does so if the template's kernel can
    /// apply the group and gains by it. Returns true if it did.
    pub(super) fn fuse_prologue(&mut self, group: &Group) -> Result<bool> {
        if group.kind != GroupKind::Map {
            return Ok(false);
        }
        let sink = group.sink;
        let fusion = self.fusion(group)?;
        let own = fusion.as_ref().filter(|f| f.is_cheaper).map(|_| 0);
        let fuses = self.decisions.choose("prologue", sink, own, |_| fusion.is_some()).is_some();
        if let Some(Fusion { reader, fused, .. }) = fusion.filter(|_| fuses) {
            self.passed.extend(reader.views);
            self.prologues.insert(reader.value, fused);
        }
        Ok(fuses)
    }

    /// The way in which the only template that reads an elementwise group's value could apply the group, if it can.
    fn fusion(&mut self, Group { nodes, sink, .. }: &Group) -> Result<Option<Fusion>> {
        let (graph, sink) = (self.graph, (*sink).output(0));
        let Some(reader) = self.reader(sink) else { return Ok(None) };
        let reading = self.groups.of(reader.node);
        if reading.is_some_and(|group| matches!(group.kind, GroupKind::Attention(_))) {
            // It has no place for a prologue.
            return Ok(None);
        }
        let Some(slot) = self.slot(reader.node, reader.value)? else { return Ok(None) };
        let Some((fused, small)) = self.prologue(nodes, sink, &reader)? else { return Ok(None) };
        let (operand, operands) = (slot.operand, slot.operands.clone());
        let kernel = self.trial(slot, &fused)?;
        let outside = |group: &Group| {
            let operands = group.nodes.iter().flat_map(|&n| graph.operands(n)).flatten();
            operands.filter(|v| !group.nodes.contains(&v.node)).collect::<HashSet<_>>().len()
        };
        let others = operands.iter().filter_map(|v| self.prologues.get(v)).map(|h| h.reads.len() - 1);
        let bindings = reading.map_or(0, outside) + others.sum::<usize>() + fused.reads.len() - 1 + 2;
        let fits = bindings <= self.target.max_bindings as usize
            && prologue::is_possible(&kernel, operand, self.target)
            && (kernel.template == Template::MatMul || is_dense_image(&kernel.reads[operand].access));
        let is_cheaper = small && prologue::is_cheaper(&kernel, operand, self.target);
        Ok(fits.then_some(Fusion { reader, fused, is_cheaper }))
    }

    /// The only template that reads a value, perhaps through views.
    fn reader(&self, sink: ValueId) -> Option<Reader> {
        let graph = self.graph;
        let (mut value, mut views) = (sink, Vec::new());
        loop {
            let [user] = graph.users(value)[..] else { return None };
            if graph.is_output(value) || self.destinations.contains_key(&value) {
                return None;
            }
            match graph.node(user).op().map(|op| &op.lower) {
                Some(Lower::Template(_)) => return Some(Reader { node: user, views, value }),
                Some(Lower::View(_)) => {
                    views.push(user);
                    value = user.output(0);
                    if graph.fact(value).shape.numel() != graph.fact(sink).shape.numel() {
                        return None;
                    }
                }
                _ => return None,
            }
        }
    }

    /// The operand of a template that a value is, if it may have a prologue.
    fn slot(&self, node: NodeId, value: ValueId) -> Result<Option<Slot>> {
        let graph = self.graph;
        let operands: Vec<_> = graph.operands(node).into_iter().flatten().collect();
        let Some(input) = operands.iter().position(|&v| v == value) else { return Ok(None) };
        let dense = |v: &ValueId| Access::contiguous(graph.fact(*v).shape.clone());
        let accesses: Vec<_> = operands.iter().map(dense).collect();
        let call = build(graph, node, &accesses, None)?;
        let operand = call.reads.iter().position(|(i, _)| *i == input);
        let takes = |&o: &usize| match &call.template {
            Template::MatMul => true,
            Template::Conv { .. } | Template::ConvTranspose { .. } => o == 0,
            _ => false,
        };
        Ok(operand.filter(takes).map(|operand| Slot { node, operands, accesses, input, operand, call }))
    }

    /// A group as code on the elements of one of its operands, as the template sees them that reads its value. The flag is true if all else
    /// that the group reads is small, or there anyway.
    fn prologue(&mut self, nodes: &[NodeId], sink: ValueId, reader: &Reader) -> Result<Option<(FusedPrologue, bool)>> {
        let graph = self.graph;
        let (shape, value) = (&graph.fact(sink).shape, reader.value);
        let mut code = Code::default();
        let result = self.compute(nodes, &mut code, &|access, _| Some(access.broadcast(shape)))?;
        let (dtype, bytes) =
            (self.storage(result.dtype(), graph.value_name(value))?, graph.fact(value).shape.numel() as u64);
        let bytes = bytes * dtype.size() as u64;
        let buffer = |b: BufferIdx| &self.draft.buffers[b];
        // One operand is what the group computes in place of; the others must not be kept for long in its stead.
        let elements = |(b, o): &Read| {
            let moves = o.access.strides.iter().zip(o.access.shape.iter()).all(|(&s, &d)| s != 0 || d == 1);
            moves
                && o.dtype == dtype
                && buffer(*b).class != Class::Constant
                && buffer(*b).bytes <= bytes.next_multiple_of(4)
        };
        let Some(first) = code.reads.iter().position(elements) else { return Ok(None) };
        let from = code.reads[first].0;
        let kept = |b| b == from || buffer(b).class != Class::Activation || buffer(b).bytes * SMALLER <= bytes;
        let small = code.reads.iter().all(|(b, _)| kept(*b));
        let mut body = Body::new(&[result]);
        for instr in &mut body.code {
            if let expr::Code::Input(j) = &mut instr.code {
                *j = if *j as usize == first { 0 } else { *j + u32::from((*j as usize) < first) };
            }
        }
        let first = code.reads.remove(first);
        code.reads.insert(0, first);
        let mut reads = Vec::with_capacity(code.reads.len());
        for (buffer, operand) in code.reads {
            let seen = reader.views.iter().try_fold(operand.access, |access, &view| graph.view_access(view, &access));
            let Some(access) = seen else { return Ok(None) };
            reads.push(BufferView { buffer, access });
        }
        Ok(Some((FusedPrologue { reads, body }, small)))
    }

    /// The template's kernel with nothing but the prologue, to ask whether it has a place for it.
    fn trial(&self, slot: Slot, FusedPrologue { reads, body }: &FusedPrologue) -> Result<Kernel> {
        let Slot { node, operands, mut accesses, input, operand, call } = slot;
        let graph = self.graph;
        let dtype = self.storage(graph.fact(operands[input]).dtype, graph.value_name(operands[input]))?;
        let mut kernel = Kernel {
            template: call.template,
            shape: call.shape.clone(),
            reads: Vec::new(),
            writes: vec![Operand { dtype, access: Access::contiguous(call.shape), packed: false }],
            prologues: vec![Prologue { operand, reads: reads.len() - 1, body: body.clone() }],
            body: Body::identity(DType::F32),
            workspace: 0,
            schedule: Schedule::Open,
        };
        for (o, (i, access)) in call.reads.into_iter().enumerate() {
            let constant = o != operand && self.target.packs_constants() && graph.as_constant(operands[i]).is_some();
            let dtype = self.storage(graph.fact(operands[i]).dtype, graph.value_name(operands[i]))?;
            kernel.reads.push(Operand { dtype, access, packed: constant });
        }
        for (k, place) in reads.iter().enumerate() {
            accesses[input] = place.access.clone();
            let access = build(graph, node, &accesses, None)?.reads.swap_remove(operand).1;
            let read = self.operand(place.buffer, access);
            match k {
                0 => kernel.reads[operand] = read,
                _ => kernel.reads.push(read),
            }
        }
        Ok(kernel)
    }
}
