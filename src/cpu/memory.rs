//! Segments: from the system's allocator, or carved from a region that the host program lends.

use plimsoll_backend::lent::Lent;
use plimsoll_backend::segments::{Segment, Segments};
use plimsoll_backend::{SegmentId, Slice, Usage};
use plimsoll_core::error::{Error, Result};
use plimsoll_core::target::Memory as Place;
use std::alloc::Layout;
use std::any::Any;
use std::ptr::NonNull;

/// The error of a call that this backend refuses.
pub(super) fn refuse(what: impl Into<String>) -> Error {
    Error::Backend { backend: "cpu", what: what.into(), file: None }
}

/// Alignment of every segment, in bytes.
const ALIGN: usize = 256;

/// 256 bytes, aligned to 256.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(256))]
pub struct Line(pub [u8; ALIGN]);

impl Line {
    /// All zeros.
    pub const ZERO: Line = Line([0; ALIGN]);
}

/// Memory that the host program lends to a device.
pub struct Region {
    ptr: NonNull<u8>,
    lent: Lent,
    /// Keeps the memory alive.
    _owner: Option<Box<dyn Any + Send>>,
}

// SAFETY: a region is the only user of its memory, by the contracts of its constructors.
unsafe impl Send for Region {}

impl Region {
    /// The region of these lines.
    pub fn new(lines: Vec<Line>) -> Region {
        let mut lines = lines;
        let bytes = size_of_val(&lines[..]) as u64;
        let ptr: NonNull<u8> = NonNull::from(&mut lines[..]).cast();
        let lent = Lent::new("cpu", ptr.as_ptr() as u64, bytes, ALIGN as u64);
        Region { ptr, lent: lent.expect("lines are aligned, and nobody else has these"), _owner: Some(Box::new(lines)) }
    }

    /// The region of these bytes, from the first multiple of 256 on.
    ///
    /// # Errors
    /// When a part of the memory is lent already.
    pub fn of(memory: &'static mut [u8]) -> Result<Region> {
        let skipped = memory.as_ptr().align_offset(ALIGN).min(memory.len());
        let aligned = &mut memory[skipped..];
        // A short slice may have no such multiple, and nothing to lend.
        let bytes = aligned.len() as u64;
        let ptr = if bytes == 0 { NonNull::<Line>::dangling().cast() } else { NonNull::from(aligned).cast() };
        // SAFETY: they are initialised, and the reference was the only one for as long as the program runs.
        unsafe { Region::from_raw(ptr, bytes) }
    }

    /// The region at an address.
    ///
    /// # Errors
    /// When `ptr` is not aligned to 256 bytes, or a part of the memory is lent already.
    ///
    /// # Safety
    /// The bytes behind `ptr` must be initialised, and used by nobody else for as long as the region or the device it was given to lives.
    pub unsafe fn from_raw(ptr: NonNull<u8>, bytes: u64) -> Result<Region> {
        let lent = Lent::new("cpu", ptr.as_ptr() as u64, bytes, ALIGN as u64).map_err(refuse)?;
        Ok(Region { ptr, lent, _owner: None })
    }
}

/// All segments of a device.
#[derive(Default)]
pub(super) struct Memory {
    segments: Segments<NonNull<u8>>,
    arena: Option<Region>,
}

impl Memory {
    pub fn system() -> Memory {
        Memory::default()
    }

    pub fn within(arena: Region) -> Memory {
        Memory { segments: Segments::default(), arena: Some(arena) }
    }

    /// Memory of another device, which borrows some of these segments.
    pub fn lend(&self, shared: &[SegmentId]) -> Result<Memory> {
        if self.arena.is_some() {
            return Err(refuse("memory that the host program lends serves one run at a time"));
        }
        Ok(Memory { segments: self.segments.lend(shared), arena: None })
    }

    pub fn usage(&self) -> Usage {
        self.segments.usage()
    }

    /// Allocates a segment. Returns where it begins, too.
    pub fn alloc(&mut self, bytes: u64, place: Place) -> Result<(SegmentId, *mut u8)> {
        let id = self.segments.next().map_err(refuse)?;
        let ptr = match &self.arena {
            Some(arena) => self.carve(arena, bytes)?,
            None => system_alloc(bytes)?,
        };
        self.segments.insert(bytes, place, ptr);
        Ok((id, ptr.as_ptr()))
    }

    /// Notes a segment that the backend, or whoever loads a plan, has taken already.
    pub fn note(&mut self, bytes: u64, place: Place) -> Result<SegmentId> {
        let id = self.segments.next().map_err(refuse)?;
        self.segments.insert(bytes, place, NonNull::<Line>::dangling().cast());
        Ok(id)
    }

    /// Bytes of the segments that the backend has taken itself.
    pub fn own_bytes(&self) -> u64 {
        self.segments.all().filter(|s| s.memory == Place::Own).map(|s| s.bytes).sum()
    }

    /// The lowest gap of the arena that is large enough, zeroed.
    fn carve(&self, arena: &Region, bytes: u64) -> Result<NonNull<u8>> {
        let lent = self.segments.all().filter(|s| !is_noted(s.memory));
        let taken = lent.map(|s| (s.made.as_ptr() as u64, s.bytes));
        let at = arena.lent.place(taken, bytes, ALIGN as u64).map_err(|limit| {
            let what = format!("a segment of {bytes} bytes in the memory that the host lends");
            Error::Fit { what, needed: bytes, limit, file: None }
        })?;
        let offset = at - arena.ptr.as_ptr() as u64;
        // SAFETY: `offset + bytes` is within the region, no segment lies there, and nobody else uses the region.
        unsafe {
            let ptr = arena.ptr.add(offset as usize);
            ptr.as_ptr().write_bytes(0, bytes as usize);
            Ok(ptr)
        }
    }

    pub fn free(&mut self, segment: SegmentId) {
        let Some(segment) = self.segments.remove(segment) else { return };
        if self.arena.is_none() && !segment.borrowed {
            system_free(&segment);
        }
    }

    /// The address of a slice that lies within its segment.
    pub fn resolve(&self, slice: Slice) -> Result<*mut u8> {
        let segment = self.segments.find(slice).map_err(refuse)?;
        // SAFETY: within the segment.
        Ok(unsafe { segment.add(slice.offset as usize) }.as_ptr())
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if self.arena.is_none() {
            self.segments.all().filter(|segment| !segment.borrowed).for_each(system_free);
        }
    }
}

/// True for memory that no segment was allocated for.
fn is_noted(place: Place) -> bool {
    matches!(place, Place::Own | Place::Prefetch)
}

fn layout(bytes: u64) -> Option<Layout> {
    Layout::from_size_align(usize::try_from(bytes).ok()?, ALIGN).ok()
}

fn system_alloc(bytes: u64) -> Result<NonNull<u8>> {
    let refused = || Error::Memory { what: "a segment of the plan".into(), needed: bytes, file: None };
    let layout = layout(bytes).ok_or_else(refused)?;
    if bytes == 0 {
        return Ok(NonNull::<Line>::dangling().cast());
    }
    // SAFETY: the layout is not empty.
    let ptr = NonNull::new(unsafe { std::alloc::alloc(layout) }).ok_or_else(refused)?;
    #[cfg(target_os = "linux")]
    ask_for_huge_pages(ptr, layout.size());
    // SAFETY: the bytes are the allocation's.
    unsafe { ptr.write_bytes(0, layout.size()) };
    Ok(ptr)
}

/// The fewest bytes for which huge pages are worth a call.
#[cfg(target_os = "linux")]
const HUGE: usize = 4 << 20;

/// Asks the system to map a segment in huge pages where these lie within it: to find a page takes as long as to read it where there are many,
/// most of all in a virtual machine. It takes no byte more. That the system may refuse costs time alone.
#[cfg(target_os = "linux")]
fn ask_for_huge_pages(ptr: NonNull<u8>, bytes: usize) {
    // SAFETY: the call only asks.
    let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) }.max(1) as usize;
    let skipped = ptr.as_ptr().align_offset(page);
    if bytes >= HUGE && skipped < bytes {
        let pages = (bytes - skipped) / page * page;
        // SAFETY: the pages are the allocation's own, which holds nothing yet.
        unsafe { libc::madvise(ptr.as_ptr().add(skipped).cast(), pages, libc::MADV_HUGEPAGE) };
    }
}

fn system_free(segment: &Segment<NonNull<u8>>) {
    let layout = layout(segment.bytes).expect("a segment was allocated with this layout");
    if segment.bytes > 0 && !is_noted(segment.memory) {
        // SAFETY: allocated by `system_alloc` with the same layout, and freed once.
        unsafe { std::alloc::dealloc(segment.made.as_ptr(), layout) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_arena_is_carved_and_reused() {
        let mut memory = Memory::within(Region::new(vec![Line([7; ALIGN]); 4]));
        let own = memory.note(1 << 20, Place::Own).expect("an id");
        assert_eq!((memory.usage().bytes, memory.own_bytes()), (1 << 20, 1 << 20));
        memory.free(own);
        let mut alloc = |bytes| Ok::<_, Error>(memory.alloc(bytes, Place::Device)?.0);
        let a = alloc(300).expect("fits");
        let b = alloc(256).expect("fits");
        assert!(matches!(alloc(257), Err(Error::Fit { needed: 257, limit: 256, .. })));
        assert_eq!(memory.usage(), Usage { bytes: 556, pinned: 0, allocations: 3, overhead: Some(0) });
        let beyond = Memory::system().alloc(1 << 62, Place::Device).expect_err("no host has as much");
        assert!(matches!(beyond, Error::Memory { needed, .. } if needed == 1 << 62) && beyond.exit_code() == 2);
        let slice = |segment, offset, bytes| Slice { segment, offset, bytes };
        let at = memory.resolve(slice(b, 0, 256)).expect("inside");
        assert!(memory.resolve(slice(a, 256, 45)).is_err() && memory.resolve(slice(a, u64::MAX, 2)).is_err());
        memory.free(a);
        let c = memory.alloc(512, Place::Device).expect("in the gap").0;
        let c = memory.resolve(slice(c, 0, 512)).expect("inside");
        // SAFETY: both lie in the region; `c` is 512 bytes of zeros.
        assert!(unsafe { c.add(512) == at && (0..512).all(|i| *c.add(i) == 0) });
    }
}
