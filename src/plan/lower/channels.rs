//! Chooses the values that have their channels last, around convolutions that cuDNN computes on tensor cores.

use super::buffer_view::BufferView;
use super::outline::build;
use super::{DraftConstant, Lowering};
use crate::Class;
use crate::constant::Constant;
use crate::dtype::DType;
use crate::error::Result;
use crate::graph::{Graph, Kind};
use crate::kernel::{Template, library};
use crate::op::{Fact, Lower, NodeId, ValueId};
use crate::pass::Groups;
use crate::shape::Access;
use crate::target::Target;
use std::collections::HashMap;
use std::sync::Arc;

/// True for a convolution that wants its operands' channels last, or its gradient by filters.
pub(super) fn wants_channels_last(template: &Template, dtype: DType, target: &Target) -> bool {
    let convolves = matches!(template, Template::Conv { .. } | Template::ConvFilters { .. });
    // Neighbouring channels of bytes are multiplied at once, by texts of our own.
    let bytes = dtype.is_byte() && target.reads_channels_last();
    convolves && (bytes || target.prefers_channels_last() && library::on_tensor_cores(dtype, target))
}

/// True if the weights of a transposed convolution have their outputs last, if its data have their channels last.
pub(super) fn wants_outputs_last(dtype: DType, target: &Target) -> bool {
    target.prefers_channels_last() && dtype.is_half()
}

/// Decides which values have their channels last: those of convolutions that want it. Further, values that are computed from these or
/// for these alone, if their kernels can write either layout.
pub(super) fn channels_last(
    graph: &Graph,
    groups: &Groups,
    order: &[NodeId],
    target: &Target,
) -> Result<HashMap<ValueId, bool>> {
    let mut chosen: HashMap<ValueId, bool> = HashMap::new();
    if !target.reads_channels_last() {
        return Ok(chosen);
    }
    let template = |id: NodeId| {
        let operands: Vec<_> = graph.operands(id).into_iter().flatten().collect();
        let dense: Vec<_> = operands.iter().map(|&v| Access::contiguous(graph.fact(v).shape.clone())).collect();
        build(graph, id, &dense, None).map(|call| call.template)
    };
    for &id in order {
        let Kind::Op(op) = graph.node(id).kind else { continue };
        let alone = [id];
        let group = groups.of(id).map_or(&alone[..], |group| &group.nodes);
        let value = id.output(0);
        let Fact { dtype, shape } = graph.fact(value);
        if group.last() != Some(&id) || shape.len() < 3 {
            continue;
        }
        let lower = |n: NodeId| graph.node(n).op().map(|op| &op.lower);
        let called = group.iter().copied().find(|&n| matches!(lower(n), Some(Lower::Template(_))));
        let from = |nodes: &[NodeId]| {
            let mut operands = nodes.iter().flat_map(|&n| graph.operands(n)).flatten();
            operands.any(|v| chosen.contains_key(&v) && graph.fact(v).shape.len() == shape.len())
        };
        let convolved = |user: &NodeId| match lower(*user) {
            Some(Lower::Template(_)) => template(*user).is_ok_and(|t| {
                let is_data = graph.operands(*user).first() == Some(&Some(value));
                wants_channels_last(&t, *dtype, target)
                    || !is_data && matches!(t, Template::ConvTranspose { .. }) && wants_outputs_last(*dtype, target)
            }),
            _ => false,
        };
        let users = graph.users(value);
        let fixed = match (op.lower, called) {
            (_, Some(called)) => match template(called)? {
                Template::ConvFilters { .. } => None,
                ref t if wants_channels_last(t, *dtype, target) => Some(true),
                Template::ConvTranspose { .. } | Template::Pool { .. } | Template::PoolGrad { .. } => {
                    from(&[called]).then_some(false)
                }
                _ => None,
            },
            (Lower::Map(_), None) => {
                // An elementwise reader beside a convolution reads either layout.
                let either = |user: &NodeId| convolved(user) || matches!(lower(*user), Some(Lower::Map(_)));
                let meant = users.iter().any(convolved) && users.iter().all(either);
                (meant || from(group)).then_some(false)
            }
            (Lower::Concat, None) => from(&[id]).then_some(false),
            _ => None,
        };
        if let Some(fixed) = fixed {
            chosen.insert(value, fixed);
        }
    }
    Ok(chosen)
}

impl Lowering<'_> {
    /// The layout of a value in a buffer of its own.
    pub(super) fn layout(&self, value: ValueId) -> Access {
        let shape = self.graph.fact(value).shape.clone();
        if self.channels_last.contains_key(&value) { Access::channels_last(shape) } else { Access::contiguous(shape) }
    }

    /// A value with its channels last: as it is, as a constant that is stored so, or as a copy.
    pub(super) fn with_channels_last(&mut self, value: ValueId) -> Result<BufferView> {
        let shape = self.graph.fact(value).shape.clone();
        if let Some(constant) = self.graph.as_constant(value).cloned() {
            return self.stored(value, &constant, "channels last", &crate::shape::channels_last(shape.len()));
        }
        let place = self.place(value)?;
        if self.decisions.if_valid("last", value.node, place.access.has_channels_last()) {
            return Ok(place);
        }
        if let Some(copy) = self.copies.get(&value) {
            return Ok(copy.clone());
        }
        let copy = self.copied(value, &place, Access::channels_last(shape))?;
        self.copies.insert(value, copy.clone());
        Ok(copy)
    }

    /// The weights of a convolution that vectors of channels go through: those of neighbouring outputs side by side, where they are constant.
    pub(super) fn with_outputs_last(&mut self, value: ValueId) -> Result<BufferView> {
        let rank = self.graph.fact(value).shape.len();
        match self.graph.as_constant(value).cloned() {
            Some(constant) => {
                let order: Vec<usize> = (1..rank).chain([0]).collect();
                self.stored(value, &constant, "outputs last", &order)
            }
            None => self.with_channels_last(value),
        }
    }

    /// A constant whose axes lie in another order, given from the outermost inwards. `name` is the name of the order.
    pub(super) fn stored(
        &mut self,
        value: ValueId,
        constant: &Arc<Constant>,
        name: &str,
        order: &[usize],
    ) -> Result<BufferView> {
        let shape = self.graph.fact(value).shape.clone();
        let ordered = Access::contiguous(order.iter().map(|&axis| shape[axis]).collect());
        let mut strides = vec![0; shape.len()];
        order.iter().zip(&ordered.strides).for_each(|(&axis, &stride)| strides[axis] = stride);
        let access = Access { shape, strides, offset: 0 };
        let key = (Arc::as_ptr(constant), Some(name.to_owned()));
        if let Some(&buffer) = self.constants.get(&key) {
            return Ok(BufferView { buffer, access });
        }
        let constant = Arc::new(constant.permuted(order)?);
        let buffer = self.buffer(value, Class::Constant)?;
        self.constants.insert(key, buffer);
        self.draft.constants.push(DraftConstant { constant, buffer, packed: None });
        Ok(BufferView { buffer, access })
    }
}

/// True if each image of `[n, ..]` lies without gaps, and images lie in the order of their numbers.
pub(super) fn is_dense_image(access: &Access) -> bool {
    if access.strides.first().is_some_and(|&s| s < 0) {
        return false;
    }
    let mut image = access.clone();
    if image.shape.len() > 1 {
        image.shape.remove(0);
        image.strides.remove(0);
    }
    image.is_contiguous()
}
