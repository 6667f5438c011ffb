//! Elementwise groups without a kernel of their own. The only core that reads such a group's value applies it to each element it reads.

use super::Lowering;
use super::buffer_view::BufferView;
use super::channels::is_dense_image;
use super::code::Code;
use crate::dtype::DType;
use crate::error::Result;
use crate::expr::{self, Body};
use crate::kernel::algorithm::Schedule;
use crate::kernel::schedule::prologue;
use crate::kernel::{Kernel, Operand, Prologue, Template};
use crate::op::{Lower, TemplateCall, ValueId};
use crate::pass::{Group, GroupKind};
use crate::plan::Class;
use crate::shape::Access;
use std::collections::HashSet;

/// An elementwise group that a core applies to the elements of an operand.
#[derive(Clone, Debug)]
pub(super) struct Hosted {
    /// The place of the elements, then the places of the group's other operands.
    pub(super) reads: Vec<BufferView>,
    /// From the elements of `reads` to what the core consumes.
    pub(super) body: Body,
}

/// The core that alone reads the value of a group.
struct Reader {
    /// The core's node.
    anchor: u32,
    /// Views that the core looks through.
    views: Vec<u32>,
    /// The value that the core reads.
    value: ValueId,
}

/// The operand of a core that could have a prologue.
struct Slot {
    /// The core's node, its operands, and their accesses if each lay row-major.
    anchor: u32,
    operands: Vec<ValueId>,
    accesses: Vec<Access>,
    /// Its index among the node's operands, and among the kernel's.
    input: usize,
    operand: usize,
    /// The kernel's template under these accesses.
    core: TemplateCall,
}

/// The decision to leave an elementwise group to a core, and all that it takes.
struct Hosting {
    reader: Reader,
    hosted: Hosted,
    /// True if it costs less than a kernel of its own.
    pays: bool,
}

/// An operand of a prologue beside the core's is this many times smaller than the core's, unless it is kept anyway: a prologue keeps
/// its operands alive until the core has run.
const SMALLER: u64 = 8;

impl Lowering<'_> {
    /// Leaves an elementwise group to the only core that reads its value, perhaps through views. It does so if the core's kernel can apply
    /// the group and gains by it. Returns true if it did.
    pub(super) fn host(&mut self, group: &Group) -> Result<bool> {
        if group.kind != GroupKind::Map {
            return Ok(false);
        }
        let sink = group.sink;
        let hosting = self.hosting(group)?;
        let own = hosting.as_ref().filter(|h| h.pays).map(|_| 0);
        let hosts = self.decisions.choose("host", sink, own, |_| hosting.is_some()).is_some();
        if let Some(Hosting { reader, hosted, .. }) = hosting.filter(|_| hosts) {
            self.passed.extend(reader.views);
            self.hosted.insert(reader.value, hosted);
        }
        Ok(hosts)
    }

    /// The way in which the only core that reads an elementwise group's value could apply the group, if it can.
    fn hosting(&mut self, Group { nodes, sink, .. }: &Group) -> Result<Option<Hosting>> {
        let (graph, sink) = (self.graph, ValueId { node: *sink, port: 0 });
        let Some(reader) = self.reader(sink) else { return Ok(None) };
        let reading = self.groups.of(reader.anchor);
        if reading.is_some_and(|group| matches!(group.kind, GroupKind::Attention(_))) {
            // It has no place for a prologue.
            return Ok(None);
        }
        let Some(slot) = self.slot(reader.anchor, reader.value)? else { return Ok(None) };
        let Some((hosted, small)) = self.prologue(nodes, sink, &reader)? else { return Ok(None) };
        let (operand, operands) = (slot.operand, slot.operands.clone());
        let kernel = self.trial(slot, &hosted)?;
        let outside = |group: &Group| {
            let operands = group.nodes.iter().flat_map(|&n| graph.operands(n)).flatten();
            operands.filter(|v| !group.nodes.contains(&v.node)).collect::<HashSet<_>>().len()
        };
        let others = operands.iter().filter_map(|v| self.hosted.get(v)).map(|h| h.reads.len() - 1);
        let bindings = reading.map_or(0, outside) + others.sum::<usize>() + hosted.reads.len() - 1 + 2;
        let fits = bindings <= self.target.max_bindings as usize
            && prologue::hosts(&kernel, operand, self.target)
            && (kernel.template == Template::MatMul || is_dense_image(&kernel.reads[operand].access));
        let pays = small && prologue::pays(&kernel, operand, self.target);
        Ok(fits.then_some(Hosting { reader, hosted, pays }))
    }

    /// The only core that reads a value, perhaps through views.
    fn reader(&self, sink: ValueId) -> Option<Reader> {
        let graph = self.graph;
        let (mut value, mut views) = (sink, Vec::new());
        loop {
            let [user] = graph.users(value)[..] else { return None };
            if graph.is_output(value) || self.destinations.contains_key(&value) {
                return None;
            }
            match graph.node(user).op().map(|op| &op.lower) {
                Some(Lower::Template(_)) => return Some(Reader { anchor: user, views, value }),
                Some(Lower::View(_)) => {
                    views.push(user);
                    value = ValueId { node: user, port: 0 };
                    if graph.fact(value).shape.numel() != graph.fact(sink).shape.numel() {
                        return None;
                    }
                }
                _ => return None,
            }
        }
    }

    /// The operand of a core that a value is, if it may have a prologue.
    fn slot(&self, anchor: u32, value: ValueId) -> Result<Option<Slot>> {
        let graph = self.graph;
        let operands: Vec<_> = graph.operands(anchor).into_iter().flatten().collect();
        let Some(input) = operands.iter().position(|&v| v == value) else { return Ok(None) };
        let dense = |v: &ValueId| Access::contiguous(graph.fact(*v).shape.clone());
        let accesses: Vec<_> = operands.iter().map(dense).collect();
        let core = self.build(anchor, &accesses, None)?;
        let operand = core.reads.iter().position(|(i, _)| *i == input);
        let takes = |&o: &usize| match &core.template {
            Template::MatMul => true,
            Template::Conv { .. } | Template::ConvTranspose { .. } => o == 0,
            _ => false,
        };
        Ok(operand.filter(takes).map(|operand| Slot { anchor, operands, accesses, input, operand, core }))
    }

    /// A group as code on the elements of one of its operands, as a core sees them, which reads its value; and whether all else that the
    /// group reads is small, or there anyway.
    fn prologue(&mut self, nodes: &[u32], sink: ValueId, reader: &Reader) -> Result<Option<(Hosted, bool)>> {
        let graph = self.graph;
        let (shape, value) = (&graph.fact(sink).shape, reader.value);
        let mut code = Code::default();
        let result = self.compute(nodes, &mut code, &|access, _| Some(access.broadcast(shape)))?;
        let (dtype, bytes) =
            (self.storage(result.dtype(), graph.value_name(value))?, graph.fact(value).shape.numel() as u64);
        let bytes = bytes * dtype.size() as u64;
        let buffer = |b: usize| &self.draft.buffers[b];
        // One operand is what the group computes in place of; the others must not be kept for long in its stead.
        let elements = |(b, o): &(usize, Operand)| {
            let moves = o.access.strides.iter().zip(o.access.shape.iter()).all(|(&s, &d)| s != 0 || d == 1);
            moves
                && o.dtype == dtype
                && buffer(*b).class != Class::Constant
                && buffer(*b).bytes <= bytes.next_multiple_of(4)
        };
        let Some(first) = code.reads.iter().position(elements) else { return Ok(None) };
        let from = code.reads[first].0;
        let kept = |b: usize| b == from || buffer(b).class != Class::Activation || buffer(b).bytes * SMALLER <= bytes;
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
            let seen = reader.views.iter().try_fold(operand.access, |access, &view| self.view_access(view, &access));
            let Some(access) = seen else { return Ok(None) };
            reads.push(BufferView { buffer, access });
        }
        Ok(Some((Hosted { reads, body }, small)))
    }

    /// The core's kernel with nothing but the prologue, to ask whether it has a place for it.
    fn trial(&self, slot: Slot, Hosted { reads, body }: &Hosted) -> Result<Kernel> {
        let Slot { anchor, operands, mut accesses, input, operand, core } = slot;
        let graph = self.graph;
        let dtype = self.storage(graph.fact(operands[input]).dtype, graph.value_name(operands[input]))?;
        let mut kernel = Kernel {
            template: core.template,
            shape: core.shape.clone(),
            reads: Vec::new(),
            writes: vec![Operand { dtype, access: Access::contiguous(core.shape), packed: false }],
            prologues: vec![Prologue { operand, reads: reads.len() - 1, body: body.clone() }],
            body: Body::identity(DType::F32),
            workspace: 0,
            schedule: Schedule::Open,
        };
        for (o, (i, access)) in core.reads.into_iter().enumerate() {
            let constant = o != operand && self.target.packs_constants() && graph.as_constant(operands[i]).is_some();
            let dtype = self.storage(graph.fact(operands[i]).dtype, graph.value_name(operands[i]))?;
            kernel.reads.push(Operand { dtype, access, packed: constant });
        }
        for (k, place) in reads.iter().enumerate() {
            accesses[input] = place.access.clone();
            let access = self.build(anchor, &accesses, None)?.reads.swap_remove(operand).1;
            let read = self.operand(place.buffer, access);
            match k {
                0 => kernel.reads[operand] = read,
                _ => kernel.reads.push(read),
            }
        }
        Ok(kernel)
    }
}
