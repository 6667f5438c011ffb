//! Where values lie, and copies of those that somebody needs elsewhere.

use super::launch::Outline;
use super::{DraftConstant, Lowering};
use crate::error::{Error, Result};
use crate::expr::Body;
use crate::kernel::{Operand, Template};
use crate::op::ValueId;
use crate::plan::Class;
use crate::shape::Access;
use std::sync::Arc;

/// Where a value lies.
#[derive(Clone, Debug)]
pub(super) struct Place {
    pub(super) buffer: usize,
    pub(super) access: Access,
}

/// An operand and its buffer.
pub(super) type Read = (usize, Operand);

impl Lowering<'_> {
    /// Where a value lies; constants get their buffer when they are first read.
    pub(super) fn place(&mut self, value: ValueId) -> Result<Place> {
        if let Some(place) = self.places.get(&value) {
            return Ok(place.clone());
        }
        let Some(constant) = self.graph.as_constant(value) else {
            return Err(Error::graph(format!("value '{}' is read before it is made", self.graph.value_name(value))));
        };
        let (constant, access) = match self.shared.get(&Arc::as_ptr(constant)) {
            Some(shared) => shared.clone(),
            None => (constant.clone(), Access::contiguous(constant.fact.shape.clone())),
        };
        let key = (Arc::as_ptr(&constant), None);
        if let Some(&buffer) = self.constants.get(&key) {
            return Ok(Place { buffer, access });
        }
        let (name, dtype) = (constant.name.clone(), self.storage(constant.fact.dtype, &constant.name)?);
        let buffer = self.add_buffer(name, dtype, constant.fact.shape.clone(), Class::Constant);
        self.constants.insert(key, buffer);
        self.draft.constants.push(DraftConstant { constant, buffer, packed: None });
        Ok(Place { buffer, access })
    }

    /// A buffer under an access. Along an axis of extent 1 no step is ever taken: its stride is 0, so that equal accesses are equal
    /// values.
    pub(super) fn operand(&self, buffer: usize, mut access: Access) -> Operand {
        for (stride, _) in access.strides.iter_mut().zip(access.shape.iter()).filter(|(_, extent)| **extent == 1) {
            *stride = 0;
        }
        Operand { dtype: self.draft.buffers[buffer].dtype, access, packed: false }
    }

    /// A row-major copy of a value in a buffer of its own.
    pub(super) fn contiguous(&mut self, value: ValueId, place: &Place) -> Result<Place> {
        let access = Access::contiguous(place.access.shape.clone());
        self.copied(value, place, access)
    }

    /// A copy of a value in a buffer of its own.
    pub(super) fn copied(&mut self, value: ValueId, place: &Place, access: Access) -> Result<Place> {
        let buffer = self.buffer(value, Class::Activation)?;
        let copy = Place { buffer, access };
        self.copy(value, place, copy.clone())?;
        Ok(copy)
    }

    /// A kernel that copies a value.
    pub(super) fn copy(&mut self, value: ValueId, from: &Place, to: Place) -> Result<()> {
        let dtype = self.graph.fact(value).dtype;
        let name = format!("copy of {}", self.graph.value_name(value));
        let shape = from.access.shape.clone();
        let read = (from.buffer, self.operand(from.buffer, from.access.clone()));
        self.step(name, Outline::new(Template::Map, shape, Body::identity(dtype)), vec![read], vec![to])
    }
}
