//! Views: values whose access differs from their source's, and whose buffer is the same.

use super::Lowering;
use super::buffer_view::BufferView;
use crate::error::Result;
use crate::graph::Graph;
use crate::kernel::cpu::same_elements;
use crate::op::{NodeId, ValueId};
use crate::ops::SCORES;
use crate::shape::{Access, Shape};
use std::collections::HashMap;

/// True if a node is a view that keeps the order of all elements.
pub(super) fn keeps_order(graph: &Graph, id: NodeId) -> bool {
    graph.is_view(id) && {
        let source = graph.operands(id)[0].expect("a view has a source");
        let seen = graph.view_access(id, &Access::contiguous(graph.fact(source).shape.clone()));
        let kept = Access::contiguous(graph.node(id).outputs[0].fact.shape.clone());
        seen.is_some_and(|seen| seen.shape == kept.shape && same_elements(&seen, &kept))
    }
}

impl Lowering<'_> {
    /// Gives a view its source's buffer, or a copy if strides cannot express the view.
    pub(super) fn view(&mut self, id: NodeId) -> Result<()> {
        let source = self.graph.operands(id)[0].expect("a view has a source");
        let mut place = self.place(source)?;
        let finer = finer(self.graph, id, &place.access, &self.destinations);
        let seen = finer.or_else(|| self.graph.view_access(id, &place.access));
        let access = match self.decisions.if_found("view", id, seen) {
            Some(access) => access,
            None => {
                place = self.copy_to_view(id, source, &place)?;
                let whole = self.graph.view_access(id, &place.access);
                whole.ok_or_else(|| self.graph.node(id).error("not a view of contiguous data"))?
            }
        };
        self.places.insert(id.output(0), BufferView { buffer: place.buffer, access });
        Ok(())
    }

    /// A copy of a view's source, of which strides can express the view. Views of one value in one direction of the computation share it.
    fn copy_to_view(&mut self, id: NodeId, source: ValueId, place: &BufferView) -> Result<BufferView> {
        let turned = self.turned(id, &place.access);
        let turned = self.decisions.if_found("turn", id, turned);
        let access = turned.unwrap_or_else(|| Access::contiguous(place.access.shape.clone()));
        let key = (place.buffer, place.access.clone(), access.clone(), self.graph.is_backward(id));
        let known = self.view_copies.get(&key).cloned();
        if let Some(copy) = self.decisions.if_found("share", id, known) {
            return Ok(copy);
        }
        let copy = self.copied(source, place, access)?;
        self.view_copies.insert(key, copy.clone());
        Ok(copy)
    }

    /// The order for a copy of a view's source that leaves neighbours in memory neighbours, if products alone read the view: its leading axes
    /// come last. A row-major copy would transpose the source, and a product reads a transposed operand as well.
    fn turned(&self, id: NodeId, source: &Access) -> Option<Access> {
        let users = self.graph.users(id.output(0));
        let multiplies = !users.is_empty()
            && users.iter().all(|&user| ["MatMul", SCORES].contains(&self.graph.node(user).op_name()));
        let rank = source.shape.len();
        let is_dense = |access: &Access, axis: usize| access.shape[axis] > 1 && access.strides[axis] == 1;
        let inner = (0..rank).find(|&axis| is_dense(source, axis))?;
        if !multiplies || !self.target.prefers_written_order() || inner + 1 == rank {
            return None;
        }
        let order: Vec<usize> = (inner + 1..rank).chain(0..=inner).collect();
        let mut back = vec![0; rank];
        order.iter().enumerate().for_each(|(to, &from)| back[from] = to);
        let shape: Shape = order.iter().map(|&axis| source.shape[axis]).collect();
        let access = Access::contiguous(shape).permute(&back);
        self.graph.view_access(id, &access).is_some().then_some(access)
    }

    /// The split batch axes of products of these values, if one value is read that way. A value that is split otherwise is copied.
    pub(super) fn split_batch_axes(&mut self, values: &[ValueId]) -> Result<Option<Shape>> {
        let mut found: Option<Shape> = None;
        for &value in values {
            if self.prologues.contains_key(&value) {
                continue;
            }
            let (place, shape) = (self.place(value)?, self.graph.fact(value).shape.clone());
            if place.access.shape == shape {
                continue;
            }
            let batch: Shape = place.access.shape[..place.access.shape.len() - 2].into();
            if found.as_ref().is_some_and(|first| *first != batch) {
                let copy = self.contiguous(value, &place)?;
                self.places.insert(value, BufferView { access: Access::contiguous(shape), ..copy });
            } else {
                found = Some(batch);
            }
        }
        Ok(found)
    }
}

/// The access of a view that joins repeated batch axes, such as keys that several heads share. Strides cannot express it, so the axes
/// stay apart. Only matrix products may read the value, because they can have their batch axes apart, too.
fn finer(graph: &Graph, id: NodeId, source: &Access, destinations: &HashMap<ValueId, BufferView>) -> Option<Access> {
    let shape = &graph.node(id).outputs[0].fact.shape;
    let rank = shape.len();
    let before = &graph.fact(graph.operands(id)[0]?).shape;
    if source.shape != *before {
        // Its axes are apart already. Only the matrix may be transposed.
        let mut axes: Vec<usize> = (0..source.shape.len()).collect();
        let last = axes.len() - 2;
        axes.swap(last, last + 1);
        return Some(source.permute(&axes));
    }
    let batch = |shape: &Shape| shape.len().checked_sub(2).map(|axes| shape[..axes].to_vec());
    let (split, joined) = (batch(&source.shape)?, batch(shape)?);
    let matrices = rank >= 3 && source.shape[split.len()..] == shape[joined.len()..] && !shape.contains(&0);
    if !matrices || graph.view_access(id, source).is_some() || !is_split(&joined, &split) {
        return None;
    }
    let mut values = vec![id.output(0)];
    while let Some(value) = values.pop() {
        if graph.is_output(value) || destinations.contains_key(&value) {
            return None;
        }
        for user in graph.users(value) {
            let name = graph.node(user).op()?.name;
            let result = &graph.node(user).outputs[0].fact.shape;
            let transposed = || {
                let plain = graph.view_access(user, &Access::contiguous(shape.clone()));
                let axes: Vec<usize> = (0..rank - 2).chain([rank - 1, rank - 2]).collect();
                plain == Some(Access::contiguous(shape.clone()).permute(&axes))
            };
            match name {
                "MatMul" | SCORES if result.len() == rank && result[..rank - 2] == joined => {}
                "Transpose" if value.node == id && transposed() => values.push(user.output(0)),
                _ => return None,
            }
        }
    }
    Some(source.clone())
}

/// True if `split` is `joined` with axes split.
fn is_split(joined: &[usize], split: &[usize]) -> bool {
    let mut parts = split.iter();
    let whole = |&extent: &usize| {
        let mut product = 1;
        while product < extent {
            match parts.next() {
                Some(part) => product *= part,
                None => return false,
            }
        }
        product == extent
    };
    joined.iter().all(whole) && parts.all(|&part| part == 1)
}

/// The operand of a product over these batch axes, with the axes `split`. It is left alone if its axes are split already.
pub(super) fn split_batch(access: &Access, batch: &[usize], split: &Shape) -> Option<Access> {
    let matrix = &access.shape[access.shape.len() - 2..];
    let of = |batch: &[usize]| batch.iter().chain(matrix).copied().collect::<Shape>();
    if access.shape == of(split) {
        return Some(access.clone());
    }
    let whole = of(batch);
    (access.shape.len() <= whole.len()).then(|| access.broadcast(&whole))?.reshape(&of(split))
}
