//! Segments: one buffer each.

use super::gpu::failed;
use crate::backend::{SegmentId, Slice};
use crate::error::Result;
use crate::target::Memory;
use std::collections::BTreeMap;

/// A segment's buffer, and its kind of memory.
pub(super) struct Segment {
    pub buffer: wgpu::Buffer,
    pub memory: Memory,
}

/// All segments of a device. Numbers are never given twice.
#[derive(Default)]
pub(super) struct Segments {
    segments: BTreeMap<u32, Segment>,
    next: u32,
}

impl Segments {
    /// The next segment's id.
    pub fn next(&self) -> Result<SegmentId> {
        if self.next == u32::MAX { Err(failed("too many segments")) } else { Ok(SegmentId(self.next)) }
    }

    /// Adds a segment by the next id.
    pub fn insert(&mut self, segment: Segment) {
        self.segments.insert(self.next, segment);
        self.next += 1;
    }

    pub fn remove(&mut self, id: SegmentId) -> Option<Segment> {
        self.segments.remove(&id.0)
    }

    /// True if there is a segment of this memory.
    pub fn has(&self, memory: Memory) -> bool {
        self.segments.values().any(|s| s.memory == memory)
    }

    /// The device buffer that holds a slice; an error if the slice is not within its segment.
    pub fn buffer(&self, at: Slice) -> Result<&wgpu::Buffer> {
        let segment = self.segments.get(&at.segment.0).filter(|s| s.memory.is_device());
        let Segment { buffer, .. } = segment.ok_or_else(|| failed(format!("there is no segment {}", at.segment.0)))?;
        let end = at.offset.checked_add(at.bytes).filter(|end| *end <= buffer.size());
        if end.is_none() || !at.offset.is_multiple_of(4) || !at.bytes.is_multiple_of(4) {
            let Slice { offset, bytes, .. } = at;
            return Err(failed(format!("{bytes} bytes at {offset} do not lie in {} bytes in words", buffer.size())));
        }
        Ok(buffer)
    }
}
