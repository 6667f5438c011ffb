//! Constants. If several forms of one are read, one form is kept. Some become part of the code. The CPU's kernels want some in their
//! own layout.

use super::buffer_view::{BufferView, Read};
use super::outline::Outline;
use super::{DraftBuffer, DraftConstant, Lowering};
use crate::constant::Constant;
use crate::dtype::DType;
use crate::error::Result;
use crate::expr::{Body, Expr};
use crate::graph::Graph;
use crate::kernel::{Kernel, Operand, Template, cpu};
use crate::op::{Call, Lower, NodeId, ValueId};
use crate::shape::Access;
use crate::{BufferIdx, Class};
use std::collections::HashMap;
use std::sync::Arc;

impl Lowering<'_> {
    /// Finds constants that are read in several forms, such as a table of embeddings whose transpose makes the logits. If one form takes no
    /// more than all forms apart, it is held once, and products read the others through their strides. So is a transposed constant that
    /// no binding holds, because a product can be cut along its columns.
    pub(super) fn share_constants(&mut self, order: &[NodeId]) {
        let graph = self.graph;
        let mut forms: HashMap<*const Constant, Vec<(&Arc<Constant>, (Arc<Constant>, Access))>> = HashMap::new();
        for &node in order {
            let value = node.output(0);
            let Some(constant) = graph.as_constant(value) else { continue };
            let (root, access) = viewed(constant);
            if access.is_contiguous() || products_alone(graph, value) {
                forms.entry(Arc::as_ptr(&root)).or_default().push((constant, (root, access)));
            }
        }
        let bytes = |constant: &Constant| constant.fact.shape.numel() * constant.fact.dtype.size();
        // True if a binding holds all that is read of the whole, or if its columns can be taken apart.
        let windowed = |root: &Constant, access: &Access| {
            let most = self.target.max_binding.saturating_sub(self.target.alignment);
            let elements = access.span().map_or(0, |(low, high)| high.abs_diff(low) as u64 + 1);
            let columns = access.strides.len() >= 2 && access.strides[access.strides.len() - 2] == 1;
            columns || elements.saturating_mul(root.fact.dtype.size() as u64) <= most
        };
        let saves = |forms: &Vec<(&Arc<Constant>, (Arc<Constant>, Access))>| {
            let whole = bytes(&forms[0].1.0);
            let one = forms.len() == 1 && (forms[0].1.1.is_contiguous() || whole as u64 <= self.target.max_binding);
            let binds = whole as u64 <= self.target.max_binding || forms.iter().all(|(_, (root, a))| windowed(root, a));
            let less = whole <= forms.iter().map(|form| bytes(form.0)).sum();
            !one && binds && less && whole as u64 <= self.target.max_segment
        };
        let shared = forms.into_values().filter(saves).flatten();
        self.shared = shared.map(|(form, whole)| (Arc::as_ptr(form), whole)).collect();
    }

    /// True if an operand in this buffer may have a packed layout.
    pub(super) fn may_pack(&self, kernel: &Kernel, operand: usize, buffer: BufferIdx) -> bool {
        self.draft.buffers[buffer].class == Class::Constant
            && kernel.prologue(operand).is_none()
            && cpu::has_packed_forms(&kernel.template, operand)
    }

    /// Gives a kernel that cannot widen the halves that it reads a buffer in which they are wider: constants are held so, all else is copied.
    pub(super) fn widen(&mut self, kernel: &mut Kernel, buffers: &mut [BufferIdx]) -> Result<()> {
        for (operand, slot) in buffers.iter_mut().enumerate() {
            let (source, dtype) = (*slot, kernel.reads[operand].dtype);
            let stored = if dtype.is_half() { self.target.storage(dtype)? } else { dtype };
            let is_constant = self.draft.buffers[source].class == Class::Constant;
            if stored == dtype || kernel.widens(operand, is_constant) {
                continue;
            }
            let at = self.draft.constants.iter().position(|c| c.buffer == source);
            let Some(at) = at.filter(|_| is_constant) else {
                (*slot, kernel.reads[operand]) = self.widened(source, &kernel.reads[operand], stored)?;
                continue;
            };
            let constant = self.draft.constants[at].constant.clone();
            let key = (Arc::as_ptr(&constant), Some("widened".to_owned()));
            kernel.reads[operand].dtype = stored;
            *slot = match self.constants.get(&key) {
                Some(&buffer) => buffer,
                None => {
                    let DraftBuffer { name, shape, .. } = self.draft.buffers[source].clone();
                    let buffer = self.add_buffer(name, stored, shape, Class::Constant);
                    self.draft.constants.push(DraftConstant { constant, buffer, packed: None });
                    self.constants.insert(key, buffer);
                    buffer
                }
            };
        }
        Ok(())
    }

    /// A copy of an operand in another type. What stands still is copied once.
    fn widened(&mut self, source: BufferIdx, read: &Operand, stored: DType) -> Result<Read> {
        let (mut access, shape) = (read.access.clone(), &read.access.shape);
        for (extent, _) in access.shape.iter_mut().zip(&read.access.strides).filter(|(_, stride)| **stride == 0) {
            *extent = (*extent).min(1);
        }
        let name = self.draft.buffers[source].name.clone();
        let dense = Access::contiguous(access.shape.clone());
        let seen = dense.broadcast(shape);
        let buffer = self.add_buffer(name.clone(), stored, access.shape.clone(), Class::Activation);
        let outline = Outline::new(Template::Map, access.shape.clone(), Body::identity(read.dtype));
        let copy = BufferView { buffer, access: dense };
        self.step(format!("{name} as {stored}"), outline, vec![(source, self.operand(source, access))], copy)?;
        Ok((buffer, self.operand(buffer, seen)))
    }

    /// Gives constants that the CPU's kernels want in their own layout a buffer in that layout.
    pub(super) fn pack(&mut self, kernel: &mut Kernel, buffers: &mut [BufferIdx]) {
        for (operand, slot) in buffers.iter_mut().enumerate().take(kernel.template.core_reads()) {
            let source = *slot;
            if !self.may_pack(kernel, operand, source) {
                continue;
            }
            let Some(bytes) = cpu::packed_bytes(kernel, operand) else { continue };
            if bytes.next_multiple_of(4) > self.target.max_binding {
                continue;
            }
            let Some(at) = self.draft.constants.iter().position(|c| c.buffer == source) else { continue };
            let constant = self.draft.constants[at].constant.clone();
            let read = &mut kernel.reads[operand];
            // A window's weights are packed for the image they slide over, a product's matrices once each.
            let (access, space) = match kernel.template {
                Template::MatMul => (cpu::unrepeated(&read.access), None),
                _ => (read.access.clone(), kernel.shape.get(1..)),
            };
            let layout = format!("{operand} {access:?} {:?} {space:?}", kernel.template);
            let key = (Arc::as_ptr(&constant), Some(layout));
            read.packed = true;
            *slot = match self.constants.get(&key) {
                Some(&buffer) => buffer,
                None => {
                    let DraftBuffer { name, dtype, shape, .. } = self.draft.buffers[source].clone();
                    let buffer = self.add_buffer(name, dtype, shape, Class::Constant);
                    self.draft.buffers[buffer].bytes = bytes.next_multiple_of(4);
                    self.draft.constants.push(DraftConstant { constant, buffer, packed: Some((None, operand)) });
                    self.constants.insert(key, buffer);
                    buffer
                }
            };
        }
    }
}

/// The constant that a value is, or is a view of, and how the value sees its elements.
pub(super) fn seen(graph: &Graph, value: ValueId) -> Option<(&Arc<Constant>, Access)> {
    if let Some(constant) = graph.as_constant(value) {
        return Some((constant, Access::contiguous(constant.fact.shape.clone())));
    }
    let Lower::View(view) = graph.node(value.node).op()?.lower else { return None };
    let (constant, access) = seen(graph, graph.operands(value.node)[0]?)?;
    Some((constant, graph.with_call(value.node, |call| view(call, &access))??))
}

/// The literal of a constant of one element that code can hold exactly. Code computes halves in `f32`, so a number that was rounded
/// to a half, such as a count or an epsilon, is read as it was before.
pub(super) fn literal(constant: &Arc<Constant>) -> Result<Option<Expr>> {
    if constant.fact.shape.numel() != 1 {
        return Ok(None);
    }
    const EXACT: u128 = 1 << f64::MANTISSA_DIGITS;
    let tensor = constant.exact().value()?;
    let exact = tensor.to_integers().is_none_or(|v| v.iter().all(|v| v.unsigned_abs() <= EXACT));
    Ok(tensor.held().to_f64().first().filter(|_| exact).map(|&v| Expr::lit(v, constant.fact.dtype.held())))
}

/// The most numbers that are looked at.
const COUNTED: usize = 1 << 20;

/// The expression of integers that count up by 1, such as those of classes, as a kernel sees them that moves through them along one axis: they
/// are its index, and take neither memory nor reads.
pub(super) fn counted(constant: &Constant, seen: &Access) -> Option<Expr> {
    let (dtype, count) = (constant.fact.dtype, constant.fact.shape.numel());
    if !matches!(dtype, DType::I64 | DType::I32) || !(2..=COUNTED).contains(&count) || !constant.is_at_hand() {
        return None;
    }
    let mut moving = (0..seen.shape.len()).filter(|&axis| seen.shape[axis] > 1 && seen.strides[axis] != 0);
    let (axis, None) = (moving.next()?, moving.next()) else { return None };
    let values = constant.value().ok()?.to_integers()?;
    let counts = values.windows(2).all(|pair| pair[1] == pair[0] + 1);
    // What a stride of 1 and an offset reach is within the numbers.
    let first = values[0].checked_add(seen.offset as i128)?;
    // What devices with integers of 32 bits refuse to hold, they refuse to count.
    let fits = [values[0], values[values.len() - 1]].iter().all(|&end| i32::try_from(end).is_ok());
    let is_plain = counts && fits && seen.strides[axis] == 1;
    let index = is_plain.then(|| Expr::index(axis))?;
    let number = if first == 0 { index } else { index + Expr::lit(first as f64, DType::I64) };
    Some(number.cast(dtype))
}

fn products_alone(graph: &Graph, value: ValueId) -> bool {
    graph.users(value).iter().all(|&user| graph.node(user).op().is_some_and(|op| op.name == "MatMul"))
}

/// The constant that this one is a view of, and the view's access. A constant that is no view is returned itself.
fn viewed(constant: &Arc<Constant>) -> (Arc<Constant>, Access) {
    let through = || {
        let (op, attrs, source) = constant.view()?;
        let Lower::View(view) = op.lower else { return None };
        let (root, access) = viewed(source);
        let access = view(&Call { op, attrs, inputs: &[Some(&source.fact)] }, &access)?;
        Some((root, access))
    };
    through().unwrap_or_else(|| (constant.clone(), Access::contiguous(constant.fact.shape.clone())))
}

#[cfg(test)]
mod tests {
    use super::*;
    use plimsoll_core::tensor::Tensor;

    #[test]
    fn numbers_that_count_up_are_the_index() {
        let constant = |first: f64, step: f64| {
            let numbers: Vec<f64> = (0..5).map(|i| first + step * f64::from(i)).collect();
            Constant::new("numbers", Tensor::from_f64(DType::I64, [5], &numbers))
        };
        let seen = Access::contiguous([5].into()).broadcast(&[3, 5].into());
        assert!(counted(&constant(7.0, 1.0), &seen).is_some());
        assert!(counted(&constant(7.0, 2.0), &seen).is_none());
        // Devices with integers of 32 bits would wrap around.
        assert!(counted(&constant(f64::from(i32::MAX - 2), 1.0), &seen).is_none());
        assert!(counted(&constant(f64::from(i32::MIN) - 1.0, 1.0), &seen).is_none());
    }
}
