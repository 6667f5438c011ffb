//! Segments of a backend: the memory that each lies in, and how much they take.

use super::{SegmentId, Slice, Usage};
use plimsoll_core::target::Memory;
use std::collections::BTreeMap;

/// A segment, and what the backend made for it.
pub struct Segment<M> {
    pub bytes: u64,
    pub memory: Memory,
    /// True if another backend has made it, and frees it.
    pub borrowed: bool,
    pub made: M,
}

/// Segments of a backend. Ids rise and are never given twice.
pub struct Segments<M> {
    next: u32,
    /// Number of segments made so far.
    made: u64,
    segments: BTreeMap<u32, Segment<M>>,
}

impl<M> Default for Segments<M> {
    fn default() -> Self {
        Segments { next: 0, made: 0, segments: BTreeMap::new() }
    }
}

impl<M> Segments<M> {
    /// The next segment's id.
    ///
    /// # Errors
    /// When ids have run out.
    pub fn next(&self) -> Result<SegmentId, String> {
        if self.next == u32::MAX { Err("too many segments".into()) } else { Ok(SegmentId(self.next)) }
    }

    /// Adds a segment by the [next](Self::next) id.
    pub fn insert(&mut self, bytes: u64, memory: Memory, made: M) {
        self.segments.insert(self.next, Segment { bytes, memory, borrowed: false, made });
        self.next += 1;
        self.made += 1;
    }

    /// Segments of another backend, which borrows some of these.
    pub fn lend(&self, shared: &[SegmentId]) -> Segments<M>
    where
        M: Clone,
    {
        let lent = self.segments.iter().filter(|(id, _)| shared.contains(&SegmentId(**id)));
        let borrow = |(&id, s): (&u32, &Segment<M>)| {
            (id, Segment { bytes: s.bytes, memory: s.memory, borrowed: true, made: s.made.clone() })
        };
        Segments { next: self.next, made: 0, segments: lent.map(borrow).collect() }
    }

    pub fn remove(&mut self, id: SegmentId) -> Option<Segment<M>> {
        self.segments.remove(&id.0)
    }

    pub fn all(&self) -> impl Iterator<Item = &Segment<M>> {
        self.segments.values()
    }

    /// Bytes held now, and allocations made so far.
    pub fn usage(&self) -> Usage {
        let own = || self.all().filter(|segment| !segment.borrowed);
        let pinned = own().filter(|segment| segment.memory == Memory::Pinned).map(|segment| segment.bytes).sum();
        let bytes = own().map(|segment| segment.bytes).sum();
        Usage { bytes, pinned, allocations: self.made, overhead: Some(0) }
    }

    /// As [`usage`](Self::usage), of a device beside the host: what lies in the host's memory is none of it.
    pub fn usage_of_device(&self) -> Usage {
        let all = self.usage();
        Usage { bytes: all.bytes - all.pinned, ..all }
    }

    /// The backend's own part of the segment of a slice, which is in memory that kernels reach.
    ///
    /// # Errors
    /// When there is no such segment, or the slice is not within it.
    pub fn find(&self, at: Slice) -> Result<&M, String> {
        let segment = self.segments.get(&at.segment.0).filter(|s| s.memory.is_reached());
        let Segment { bytes, made, .. } = segment.ok_or_else(|| format!("there is no segment {}", at.segment.0))?;
        let within = at.offset.checked_add(at.bytes).is_some_and(|end| end <= *bytes);
        if within { Ok(made) } else { Err(format!("{} bytes at {} do not lie in {bytes} bytes", at.bytes, at.offset)) }
    }
}
