//! Devices. A backend knows kernels and bytes; no operators, no graphs.

use plimsoll_core::error::{Error, Result};
use plimsoll_core::kernel::Kernel;
use plimsoll_core::target::{Memory, Target};
use ranks::Ranks;
use std::sync::Arc;
use std::time::{Duration, Instant};

pub mod conflicts;
mod external_memory;
mod host;
pub mod launched;
pub mod lent;
pub mod mpi;
pub mod ranks;
pub mod records;
pub mod segments;
pub mod wire;
pub mod work;

pub use external_memory::{Kind, Lies, Outside, Place, apart};
pub use host::{HostMemory, host_memory};

/// A segment that a backend allocated, by a number of its choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SegmentId(pub u32);

/// A compiled kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KernelId(pub u32);

/// A recorded sequence of launches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
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
    /// One slice per read, then per write, then the workspace if the kernel has one. Slices are equal or disjoint: a result may take the place
    /// of an operand that nothing reads later.
    pub args: Vec<Slice>,
    /// Launches of one stream run one after another, those of several may run side by side.
    pub stream: u32,
    /// Earlier launches of other streams, by their numbers in the record, that must be over before it starts.
    pub waits: Vec<usize>,
}

impl Launch {
    /// A launch in the first stream.
    pub fn new(kernel: KernelId, args: Vec<Slice>) -> Launch {
        Launch { kernel, args, stream: 0, waits: Vec::new() }
    }
}

/// Memory that a backend has taken from its device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Bytes held now.
    pub bytes: u64,
    /// Bytes of the host's memory that the device reaches. They are among `bytes` only where the host is the device.
    pub pinned: u64,
    /// Allocations made so far, those given back included.
    pub allocations: u64,
    /// Bytes that the backend and its driver hold beside the segments for this process, such as blocks that an allocator has reserved; none
    /// if nobody tells.
    pub overhead: Option<u64>,
}

/// A device's memory, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceMemory {
    /// Bytes that nobody has taken.
    pub free: u64,
    /// All bytes.
    pub total: u64,
}

/// A device that runs kernels on segments of its memory.
pub trait Backend: Send {
    /// The limits and abilities that plans for this device may use.
    fn target(&self) -> &Target;
    /// The device, its driver and its libraries, with their versions. What was measured on one identity says nothing about another.
    fn identity(&self) -> String;
    /// Memory that has been taken from the device, which tests hold against the plan.
    fn usage(&self) -> Usage;
    /// The device's memory, if it is known.
    fn room(&self) -> Option<DeviceMemory> {
        None
    }
    /// Allocates exactly `bytes` bytes of this memory, zero-filled. That of [`Memory::Own`] and [`Memory::Prefetch`] is there already: it is
    /// counted from then on. If the target asks for [staging](Target::staging), [`write`](Self::write) and [`read`](Self::read) need a segment of [`Memory::Upload`] and [`Memory::Download`], and move data through nothing else.
    fn alloc(&mut self, bytes: u64, memory: Memory) -> Result<SegmentId>;
    /// True if the device has an allocator of its own, which keeps freed memory.
    fn pools(&self) -> bool {
        false
    }
    /// As [`alloc`](Self::alloc) of device memory, from the device's own allocator, and not zero-filled.
    fn alloc_pooled(&mut self, bytes: u64) -> Result<SegmentId> {
        self.alloc(bytes, Memory::Device)
    }
    /// A further device over the same processor or card, which runs at the same time as this one. It has segments of its own, and those of
    /// `shared` by the same ids, which nobody writes from now on. What was written to them has arrived. It has to be dropped before this one,
    /// which tells what the driver has taken for both beside the segments.
    ///
    /// # Errors
    /// When the device has only one run at a time, or refuses.
    fn fork(&mut self, shared: &[SegmentId]) -> Result<Box<dyn Backend>> {
        let _ = shared;
        Err(Error::usage(format!("'{}' has one run at a time", self.target().name)))
    }
    /// Makes this device that of one rank of a mesh: from now on it runs collectives, together with the devices of the other ranks.
    ///
    /// # Errors
    /// When the device has no way to others.
    fn join(&mut self, ranks: Arc<dyn Ranks>) -> Result<()> {
        let what = format!("it runs alone: expected the CPU or CUDA for the ranks of '{}'", ranks.mesh());
        Err(Error::usage(format!("'{}': {what}", self.target().name)))
    }
    /// Frees a segment, and drops the records that use it. One that is shared stays.
    fn free(&mut self, segment: SegmentId);
    /// Zero bytes of the host for what the error names, from which [`write`](Self::write) copies without a detour if the device has such. They
    /// are beside the plan.
    ///
    /// # Errors
    /// When the host has not so many, or the device refuses.
    fn host_memory(&mut self, bytes: u64, what: &str) -> Result<Box<dyn HostMemory>> {
        Ok(Box::new(host_memory(bytes, what)?))
    }
    /// Copies host bytes to the device, before any record that is replayed later.
    fn write(&mut self, at: Slice, data: &[u8]) -> Result<()>;
    /// Bytes of the device, if they are memory of the host: to be written in place, before any record that is replayed later.
    fn host_bytes(&mut self, at: Slice) -> Result<Option<&mut [u8]>> {
        let _ = at;
        Ok(None)
    }
    /// Copies device bytes to the host, after all replayed records.
    fn read(&mut self, at: Slice, data: &mut [u8]) -> Result<()>;
    /// As [`read`](Self::read), of many slices at once.
    fn read_all(&mut self, pieces: &mut [(Slice, &mut [u8])]) -> Result<()> {
        pieces.iter_mut().try_for_each(|(at, data)| self.read(*at, data))
    }
    /// Checks that memory of the host program is this device's, as a whole, and can be read, or written.
    fn reaches(&self, place: &Outside, written: bool) -> Result<()> {
        let _ = written;
        Err(place.refused(self.target()))
    }
    /// Copies memory that it [reaches](Self::reaches) to the device, before any record that is replayed later.
    fn copy_in(&mut self, at: Slice, from: &Outside) -> Result<()> {
        let _ = at;
        Err(from.refused(self.target()))
    }
    /// Copies device bytes to memory that it [reaches](Self::reaches), after all replayed records, and waits for it.
    fn copy_out(&mut self, at: Slice, to: &Outside) -> Result<()> {
        let _ = at;
        Err(to.refused(self.target()))
    }
    /// Prepares a kernel.
    fn compile(&mut self, kernel: &Kernel) -> Result<KernelId>;
    /// Prepares a sequence of launches, so that a replay repeats no work. It may run some of them: what they write is unknown after it.
    fn record(&mut self, launches: &[Launch]) -> Result<RecordId>;
    /// Runs a recorded sequence, in order. Allocates nothing.
    fn replay(&mut self, record: RecordId) -> Result<()>;
    /// Per launch of a record, what the device adds to its kernel's algorithm; empty if nothing.
    fn notes(&self, record: RecordId) -> Vec<String> {
        let _ = record;
        Vec::new()
    }
    /// The parts of [`Usage::overhead`], as far as they are known.
    fn overhead(&self) -> Vec<(&'static str, u64)> {
        Vec::new()
    }
    /// Waits until all replayed records are done.
    fn wait(&mut self) -> Result<()> {
        Ok(())
    }
    /// Starts to time the calls that follow.
    fn start(&mut self) -> Result<Instant> {
        self.wait()?;
        Ok(Instant::now())
    }
    /// Waits until all replayed records are done. Returns the time since [`start`](Self::start).
    fn stop(&mut self, start: Instant) -> Result<Duration> {
        self.wait()?;
        Ok(start.elapsed())
    }
    /// Runs a recorded sequence. Returns its duration, by the device's own clock if it has one.
    fn time(&mut self, record: RecordId) -> Result<Duration> {
        let start = self.start()?;
        self.replay(record)?;
        self.stop(start)
    }
    /// Runs a recorded sequence in one stream. Returns how long each launch takes there, by the device's own clock. `None` if it has no clock
    /// that tells: then nothing runs.
    fn time_launches(&mut self, record: RecordId) -> Result<Option<Vec<Duration>>> {
        let _ = record;
        Ok(None)
    }
}
