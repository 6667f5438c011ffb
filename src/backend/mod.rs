//! Devices. A backend knows kernels and bytes; no operators, no graphs.

use crate::error::Result;
use crate::kernel::Kernel;
use crate::target::{Memory, Target};

pub mod cpu;
mod records;
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

/// A device that runs kernels on segments of its memory.
pub trait Backend: Send {
    /// What planning may assume of this device.
    fn target(&self) -> &Target;
    /// What has been taken from the device: the figure that plans are held against.
    fn usage(&self) -> Usage;
    /// Takes exactly `bytes` bytes of this memory, zero-filled.
    ///
    /// Where the target asks for [staging](Target::staging), [`write`](Self::write) and [`read`](Self::read) move data through the
    /// segments of [`Memory::Upload`] and [`Memory::Download`], and through nothing else; they fail without one.
    fn alloc(&mut self, bytes: u64, memory: Memory) -> Result<SegmentId>;
    /// Gives a segment back. Records that use it are gone with it.
    fn free(&mut self, segment: SegmentId);
    /// Copies host bytes to the device, before all that is replayed later.
    fn write(&mut self, at: Slice, data: &[u8]) -> Result<()>;
    /// Copies device bytes to the host, after all replayed work.
    fn read(&mut self, at: Slice, data: &mut [u8]) -> Result<()>;
    /// Prepares a kernel.
    fn compile(&mut self, kernel: &Kernel) -> Result<KernelId>;
    /// Prepares a sequence of launches; all that can be done once is done here.
    fn record(&mut self, launches: &[Launch]) -> Result<RecordId>;
    /// Runs a recorded sequence, in order. Allocates nothing.
    fn replay(&mut self, record: RecordId) -> Result<()>;
}
