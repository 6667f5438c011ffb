//! The places of values in buffers.

use super::{DraftConstant, Lowering};
use crate::error::{Error, Result};
use crate::kernel::Operand;
use crate::op::ValueId;
use crate::pass::offload::is_offloaded;
use crate::shape::Access;
use crate::{BufferIdx, Class};
use std::sync::Arc;

/// A buffer as a value sees it.
#[derive(Clone, Debug)]
pub(super) struct BufferView {
    pub(super) buffer: BufferIdx,
    pub(super) access: Access,
}

/// An operand and its buffer.
pub(super) type Read = (BufferIdx, Operand);

impl Lowering<'_> {
    /// The place of a value. A constant gets its buffer when it is first read.
    pub(super) fn place(&mut self, value: ValueId) -> Result<BufferView> {
        if let Some(place) = self.places.get(&value) {
            return Ok(place.clone());
        }
        if let Some(buffer) = self.shared_ports.remove(&value) {
            let place = self.apart(value, buffer)?;
            self.places.insert(value, place.clone());
            return Ok(place);
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
            return Ok(BufferView { buffer, access });
        }
        let name = constant.name.clone();
        let dtype = self.target.holds(constant.fact.dtype).map_err(|e| Error::usage(format!("value '{name}': {e}")))?;
        let buffer = self.add_buffer(name, dtype, constant.fact.shape.clone(), Class::Constant);
        self.draft.buffers[buffer].offloaded = !self.offload.is_none() && is_offloaded(self.graph, value);
        self.constants.insert(key, buffer);
        self.draft.constants.push(DraftConstant { constant, buffer, packed: None });
        Ok(BufferView { buffer, access })
    }

    /// A buffer under an access. The stride of an axis of extent 1 is set to 0, because no step is ever taken along it. So equal accesses
    /// are equal values.
    pub(super) fn operand(&self, buffer: BufferIdx, mut access: Access) -> Operand {
        for (stride, _) in access.strides.iter_mut().zip(access.shape.iter()).filter(|(_, extent)| **extent == 1) {
            *stride = 0;
        }
        Operand { dtype: self.draft.buffers[buffer].dtype, access, packed: false }
    }
}
