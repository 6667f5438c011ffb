//! Copies of values that are needed elsewhere or in another layout.

use super::Lowering;
use super::buffer_view::BufferView;
use super::outline::Outline;
use crate::Class;
use crate::dtype::DType;
use crate::error::Result;
use crate::expr::Body;
use crate::kernel::Template;
use crate::op::ValueId;
use crate::shape::Access;

impl Lowering<'_> {
    /// A row-major copy of a value in a buffer of its own.
    pub(super) fn contiguous(&mut self, value: ValueId, place: &BufferView) -> Result<BufferView> {
        let access = Access::contiguous(place.access.shape.clone());
        self.copied(value, place, access)
    }

    /// A copy of a value in a buffer of its own.
    pub(super) fn copied(&mut self, value: ValueId, place: &BufferView, access: Access) -> Result<BufferView> {
        let buffer = self.buffer(value, Class::Activation)?;
        let copy = BufferView { buffer, access };
        self.copy(value, place, copy.clone())?;
        Ok(copy)
    }

    /// A kernel that copies a value.
    pub(super) fn copy(&mut self, value: ValueId, from: &BufferView, to: BufferView) -> Result<()> {
        let shared = self.draft.packed.contains(&from.buffer);
        let dtype = if shared { DType::U8 } else { self.graph.fact(value).dtype.held() };
        let name = format!("copy of {}", self.graph.value_name(value));
        let shape = from.access.shape.clone();
        let read = (from.buffer, self.operand(from.buffer, from.access.clone()));
        self.step(name, Outline::new(Template::Map, shape, Body::identity(dtype)), vec![read], to)
    }
}
