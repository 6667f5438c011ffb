//! Decides where values are written, before their kernels are made: outputs in the caller's buffers, parts of concatenations in the
//! whole, heads of attentions side by side.

use super::buffer_view::BufferView;
use super::view::keeps_order;
use super::{Lowering, Options};
use crate::Class;
use crate::error::{Error, Result};
use crate::graph::Graph;
use crate::kernel::cpu::same_elements;
use crate::op::{Lower, NodeId, ValueId};
use crate::ops::is_collective;
use crate::pass::{Group, GroupKind};
use crate::shape::Access;

impl Lowering<'_> {
    /// Gives every output a buffer; the first update or output of a value that a kernel produces is written there directly.
    pub(super) fn choose_outputs(&mut self) -> Result<()> {
        for at in 0..self.draft.states.len() {
            let (Some(value), Some(buffer)) = (self.graph.states()[at].update, self.draft.states[at].update) else {
                continue;
            };
            if self.draft.packed.contains(&buffer) {
                continue;
            }
            let access = Access::contiguous(self.graph.fact(value).shape.clone());
            self.aim(value, BufferView { buffer, access });
        }
        for (name, value) in self.graph.outputs() {
            let shared = self.shared_bytes(*value, Class::Output);
            let buffer = shared.map_or_else(|| self.buffer(*value, Class::Output), Ok)?;
            self.draft.buffers[buffer].name = name.clone();
            self.draft.outputs.push((name.clone(), *value, buffer));
            if shared.is_some() {
                continue;
            }
            let access = Access::contiguous(self.graph.fact(*value).shape.clone());
            self.aim(*value, BufferView { buffer, access });
        }
        Ok(())
    }

    /// Decides where a value is written, through views that keep all elements. Does nothing if that is decided already or if
    /// nothing writes the value.
    fn aim(&mut self, mut value: ValueId, mut place: BufferView) {
        loop {
            let node = self.graph.node(value.node);
            let Some(op) = node.op() else { return };
            if self.destinations.contains_key(&value) || self.channels_last.get(&value) == Some(&true) {
                return;
            }
            let Lower::View(_) = op.lower else {
                // What ranks exchange is one run of bytes.
                let lies = place.access.is_contiguous();
                if is_collective(op) && !self.decisions.if_valid("exchange there", value.node, lies) {
                    return;
                }
                self.destinations.insert(value, place);
                return;
            };
            // Only views that keep the elements' order are undone: the source is written under its own shape.
            let source = self.graph.operands(value.node)[0].expect("a view has a source");
            let keeps = keeps_order(self.graph, value.node);
            let access = place.access.reshape(&self.graph.fact(source).shape).filter(|_| keeps);
            let Some(access) = self.decisions.if_found("aim", value.node, access) else { return };
            place = BufferView { buffer: place.buffer, access };
            value = source;
        }
    }

    /// Lets the producers of a concatenation's parts write into it.
    pub(super) fn choose_destinations(&mut self, order: &[NodeId], options: Options) -> Result<()> {
        for &id in order.iter().rev() {
            let node = self.graph.node(id);
            if !matches!(node.op().map(|op| &op.lower), Some(Lower::Concat)) {
                continue;
            }
            self.draft.concatenates = true;
            let value = id.output(0);
            if !self.destinations.contains_key(&value) {
                let buffer = self.buffer(value, Class::Activation)?;
                self.destinations.insert(value, BufferView { buffer, access: self.layout(value) });
            }
            if options.join {
                let whole = self.destinations[&value].clone();
                for (part, access) in self.parts(id, &whole.access) {
                    self.aim(part, BufferView { buffer: whole.buffer, access });
                }
            }
        }
        Ok(())
    }

    /// Lets kernels write a result in the order in which a transposition reads it: attentions write their heads side by side if these are
    /// joined, as a view that strides cannot express would need a copy; convolutions that are gradients write their filters output by output.
    pub(super) fn choose_transposed(&mut self, order: &[NodeId]) -> Result<()> {
        let graph = self.graph;
        for &id in order {
            let Some(perm) = graph.permutation(id) else { continue };
            let value = graph.operands(id)[0].expect("a view has a source");
            if graph.users(value) != [id] || self.destinations.contains_key(&value) || graph.is_output(value) {
                continue;
            }
            let attends = |group: &Group| matches!(group.kind, GroupKind::Attention(_));
            let is_better = if self.groups.of(value.node).is_some_and(attends) {
                let seen = graph.view_access(id, &Access::contiguous(graph.fact(value).shape.clone()));
                let copies = |user: &NodeId| {
                    graph.is_view(*user) && seen.as_ref().is_some_and(|seen| graph.view_access(*user, seen).is_none())
                };
                graph.users(id.output(0)).iter().any(copies)
            } else {
                let keeps_positions = perm.iter().enumerate().skip(2).all(|(to, &from)| to == from);
                keeps_positions && graph.node(value.node).op_name() == "plimsoll.Conv"
            };
            if self.decisions.if_cheaper("transpose", id, is_better) {
                let mut back = vec![0; perm.len()];
                perm.iter().enumerate().for_each(|(to, &from)| back[from] = to);
                let access = Access::contiguous(graph.fact(id.output(0)).shape.clone()).permute(&back);
                let buffer = self.buffer(value, Class::Activation)?;
                self.destinations.insert(value, BufferView { buffer, access });
            }
        }
        Ok(())
    }

    /// Lets products write their results transposed if elementwise kernels alone read them so: gradients of weights that a model transposes.
    /// These kernels would read and write in different orders otherwise.
    pub(super) fn choose_transposed_products(&mut self, order: &[NodeId]) -> Result<()> {
        let graph = self.graph;
        if !self.target.prefers_written_order() {
            return Ok(());
        }
        for &id in order {
            let Some(perm) = graph.permutation(id) else { continue };
            let rank = perm.len();
            let swaps = rank >= 2 && perm[rank - 2..] == [rank - 1, rank - 2] && (0..rank - 2).all(|k| perm[k] == k);
            let value = graph.operands(id)[0].expect("a view has a source");
            let multiplies = |group: &Group| match group.kind {
                GroupKind::Template { call } => group.sink == value.node && graph.node(call).op_name() == "MatMul",
                _ => false,
            };
            let alone =
                graph.users(value) == [id] && !graph.is_output(value) && !self.destinations.contains_key(&value);
            let seen = id.output(0);
            let read = read_by_maps(graph, seen);
            let found = swaps && alone && read && self.groups.of(value.node).is_some_and(multiplies);
            if self.decisions.if_cheaper("product", id, found) && found {
                let access = Access::contiguous(graph.fact(seen).shape.clone()).permute(&perm);
                let buffer = self.buffer(value, Class::Activation)?;
                self.destinations.insert(value, BufferView { buffer, access });
            }
        }
        Ok(())
    }

    /// The parts of a concatenation, and their accesses in the whole.
    fn parts(&self, id: NodeId, whole: &Access) -> Vec<(ValueId, Access)> {
        let axis = self.graph.with_call(id, |call| call.axis("axis", 0, &whole.shape)).expect("a concatenation");
        let axis = axis.expect("the axis was inferred");
        let mut start = 0;
        let part = |value: ValueId| {
            let len = self.graph.fact(value).shape[axis];
            start += len;
            (value, whole.slice(axis, start - len, 1, len))
        };
        self.graph.operands(id).into_iter().flatten().map(part).collect()
    }

    /// Makes a concatenation: copies the parts that were not written in place.
    pub(super) fn concat(&mut self, id: NodeId) -> Result<()> {
        let value = id.output(0);
        let whole = self.destinations[&value].clone();
        for (part, access) in self.parts(id, &whole.access) {
            let place = self.place(part)?;
            let in_place = place.buffer == whole.buffer && same_elements(&place.access, &access);
            if !self.decisions.if_valid("join", part.node, in_place) {
                self.copy(part, &place, BufferView { buffer: whole.buffer, access })?;
            }
        }
        self.places.insert(value, whole);
        Ok(())
    }

    /// The place where a value is written: the one that was decided, or a buffer of its own.
    pub(super) fn destination(&mut self, value: ValueId) -> Result<BufferView> {
        let place = match self.destinations.get(&value) {
            Some(place) => place.clone(),
            None => {
                let buffer = self.buffer(value, Class::Activation)?;
                BufferView { buffer, access: self.layout(value) }
            }
        };
        self.places.insert(value, place.clone());
        Ok(place)
    }
}

/// True if elementwise kernels alone read a value, or a part of it.
fn read_by_maps(graph: &Graph, value: ValueId) -> bool {
    let suits = |user: &NodeId| match graph.node(*user).op().map(|op| (op.name, &op.lower)) {
        Some((_, Lower::Map(_))) => true,
        Some(("Slice", _)) => read_by_maps(graph, user.output(0)),
        _ => false,
    };
    !graph.is_output(value) && graph.users(value).iter().all(suits)
}

pub(super) fn unreachable(graph: &Graph, node: NodeId) -> Error {
    graph.node(node).error("its result cannot be written where it is needed")
}
