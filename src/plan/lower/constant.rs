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

/// The literal of a value: a constant of one element that code can hold exactly. Code computes halves in `f32`, so a number that was rounded
/// to a half, such as a count or an epsilon, is read as it was before.
pub(super) fn literal(graph: &Graph, value: ValueId) -> Result<Option<Expr>> {
    match graph.as_constant(value) {
        Some(c) if c.fact.shape.numel() == 1 => {
            const EXACT: u128 = 1 << f64::MANTISSA_DIGITS;
            let tensor = c.exact().value()?;
            let exact = tensor.to_integers().is_none_or(|v| v.iter().all(|v| v.unsigned_abs() <= EXACT));
            Ok(tensor.held().to_f64().first().filter(|_| exact).map(|&v| Expr::lit(v, c.fact.dtype.held())))
        }
        _ => Ok(None),
    }
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
