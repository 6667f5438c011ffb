//! Devices. A backend knows kernels and bytes; no operators, no graphs.

use crate::error::Result;
use crate::kernel::Kernel;
use crate::target::{Memory, Target};
use std::time::{Duration, Instant};

pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
mod records;
#[cfg(any(feature = "cuda", feature = "wgpu"))]
mod staged;
#[cfg(feature = "wgpu")]
pub mod wgpu;

/// A segment that a backend allocated: an index of its own choosing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SegmentId(pub u32);

/// A compiled kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KernelId(pub u32);

/// A recorded sequence of launches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RecordId(pub u32);

/// A range of bytes in a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Slice {
    /// The segment.
    pub segment: SegmentId,
    /// Bytes from the segment's start; a multiple of the target's alignment.
    pub offset: u64,
    /// Length in bytes.
    pub bytes: u64,
}

/// A kernel and the bytes it works on.
#[derive(Clone, Debug, PartialEq)]
pub struct Launch {
    /// The kernel.
    pub kernel: KernelId,
    /// One slice per read, then per write, then the workspace if the kernel has one. Slices are equal, or disjoint:
    /// an operand that dies in the step may lie exactly where the result goes.
    pub args: Vec<Slice>,
    /// Launches of one lane run one after another, those of several may run side by side.
    pub lane: u32,
    /// Earlier launches of other lanes, by their numbers in the record, that must be over before it starts.
    pub waits: Vec<usize>,
}

impl Launch {
    /// A launch in the first lane.
    pub fn new(kernel: KernelId, args: Vec<Slice>) -> Launch {
        Launch { kernel, args, lane: 0, waits: Vec::new() }
    }
}

/// What a backend has taken from its device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Bytes held now.
    pub bytes: u64,
    /// Allocations made so far, those given back included.
    pub allocations: u64,
    /// Bytes that the backend and its driver hold for themselves, beside the plan, as far as they can be known: threads' tile memory and
    /// registers, blocks that an allocator has reserved.
    pub overhead: u64,
}

/// A device's memory, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    /// What nobody has taken.
    pub free: u64,
    /// All of it.
    pub total: u64,
}

/// A device that runs kernels on segments of its memory.
pub trait Backend: Send {
    /// What planning may assume of this device.
    fn target(&self) -> &Target;
    /// What has been taken from the device: the figure that plans are held against.
    fn usage(&self) -> Usage;
    /// The device's memory, if it tells.
    fn room(&self) -> Option<Room> {
        None
    }
    /// Takes exactly `bytes` bytes of this memory, zero-filled.
    ///
    /// Where the target asks for [staging](Target::staging), [`write`](Self::write) and [`read`](Self::read) move data through the
    /// segments of [`Memory::Upload`] and [`Memory::Download`], and through nothing else; they fail without one.
    fn alloc(&mut self, bytes: u64, memory: Memory) -> Result<SegmentId>;
    /// Whether the device has an allocator of its own that keeps what is given back.
    fn pools(&self) -> bool {
        false
    }
    /// As [`alloc`](Self::alloc) of device memory, from the device's own pool, and not filled.
    fn alloc_pooled(&mut self, bytes: u64) -> Result<SegmentId> {
        self.alloc(bytes, Memory::Device)
    }
    /// Gives a segment back. Records that use it are gone with it.
    fn free(&mut self, segment: SegmentId);
    /// Copies host bytes to the device, before all that is replayed later.
    fn write(&mut self, at: Slice, data: &[u8]) -> Result<()>;
    /// Copies device bytes to the host, after all replayed work.
    fn read(&mut self, at: Slice, data: &mut [u8]) -> Result<()>;
    /// As [`read`](Self::read), of many slices in one go.
    fn read_all(&mut self, pieces: &mut [(Slice, &mut [u8])]) -> Result<()> {
        pieces.iter_mut().try_for_each(|(at, data)| self.read(*at, data))
    }
    /// Prepares a kernel.
    fn compile(&mut self, kernel: &Kernel) -> Result<KernelId>;
    /// Prepares a sequence of launches; all that can be done once is done here.
    fn record(&mut self, launches: &[Launch]) -> Result<RecordId>;
    /// Runs a recorded sequence, in order. Allocates nothing.
    fn replay(&mut self, record: RecordId) -> Result<()>;
    /// What each launch of a record became and, where there was a choice, why; empty where there is none.
    fn notes(&self, record: RecordId) -> Vec<String> {
        let _ = record;
        Vec::new()
    }
    /// What [`Usage::overhead`] is made of, as far as that is known; negative where less was taken than was asked for.
    fn overhead(&self) -> Vec<(&'static str, i64)> {
        Vec::new()
    }
    /// Waits until all replayed work is done.
    fn wait(&mut self) -> Result<()> {
        Ok(())
    }
    /// Begins to time what follows.
    fn start(&mut self) -> Result<Instant> {
        self.wait()?;
        Ok(Instant::now())
    }
    /// Waits until all replayed work is done; the time since [`start`](Self::start).
    fn stop(&mut self, start: Instant) -> Result<Duration> {
        self.wait()?;
        Ok(start.elapsed())
    }
    /// Runs a recorded sequence; how long it took, by the device's own clock if it has one.
    fn time(&mut self, record: RecordId) -> Result<Duration> {
        let start = self.start()?;
        self.replay(record)?;
        self.stop(start)
    }
}

/// The highest element of its slice that a kernel touches through an operand, or `Some(None)` when that is before its
/// start or beyond counting; `None` if it touches nothing.
#[cfg(any(feature = "cuda", feature = "wgpu"))]
fn reaches(kernel: &Kernel, slot: usize) -> Option<Option<u64>> {
    if kernel.operand(slot).access.shape.contains(&0) {
        return None;
    }
    let span = kernel.reach(slot).span().filter(|&(low, _)| low >= 0);
    Some(span.and_then(|(_, high)| u64::try_from(high).ok()))
}
