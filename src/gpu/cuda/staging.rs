//! Data moves to the device and back through pinned memory of the plan: one half is filled while the other is copied. Data that lies in pinned
//! memory of its own is copied from where it lies.

use super::api::{Driver, Refusal};
use crate::staged::{Part, rounds};
use cudarc::driver::sys::{CUcontext, CUdevice, CUdeviceptr, CUevent, CUstream};
use std::ffi::c_void;
use std::ops::Range;
use std::ptr::null_mut;
use std::sync::{Arc, Mutex, PoisonError};

/// The addresses of [pinned](Locked) memory.
pub(super) type Known = Arc<Mutex<Vec<Range<usize>>>>;

/// True if these bytes lie in pinned memory.
pub(super) fn is_locked(known: &Known, data: &[u8]) -> bool {
    let place = data.as_ptr_range();
    let (start, end) = (place.start as usize, place.end as usize);
    let known = known.lock().unwrap_or_else(PoisonError::into_inner);
    known.iter().any(|range| range.start <= start && end <= range.end)
}

/// Pinned memory of the host, for as long as somebody has it.
pub(super) struct Locked {
    driver: Arc<Driver>,
    /// Whose context is retained once more.
    device: CUdevice,
    context: CUcontext,
    memory: *mut u8,
    bytes: usize,
    known: Known,
}

// SAFETY: the memory is this one's alone, and the driver's handles belong to no thread.
unsafe impl Send for Locked {}
// SAFETY: as above; whoever has a shared reference only reads.
unsafe impl Sync for Locked {}

impl Locked {
    /// Takes `bytes` zero bytes, at least one, in the current context.
    pub(super) fn new(driver: &Arc<Driver>, device: CUdevice, bytes: usize, known: &Known) -> Result<Locked, Refusal> {
        let mut context = null_mut();
        // SAFETY: the context is given back with the memory.
        unsafe { driver.cuDevicePrimaryCtxRetain(&mut context, device) }?;
        let (driver, known) = (Arc::clone(driver), Arc::clone(known));
        let mut locked = Locked { driver, device, context, memory: null_mut(), bytes, known };
        let mut memory: *mut c_void = null_mut();
        // SAFETY: the driver sets the pointer to as many bytes, which nobody else has.
        unsafe {
            locked.driver.cuMemHostAlloc(&mut memory, bytes, 0)?;
            locked.memory = memory.cast();
            locked.memory.write_bytes(0, bytes);
        }
        let start = locked.memory as usize;
        locked.known.lock().unwrap_or_else(PoisonError::into_inner).push(start..start + bytes);
        Ok(locked)
    }
}

impl std::fmt::Debug for Locked {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Locked").field("bytes", &self.bytes).finish_non_exhaustive()
    }
}

impl AsRef<[u8]> for Locked {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: the memory has as many bytes, and stands as long as this.
        unsafe { std::slice::from_raw_parts(self.memory, self.bytes) }
    }
}

impl AsMut<[u8]> for Locked {
    fn as_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above; it is borrowed alone.
        unsafe { std::slice::from_raw_parts_mut(self.memory, self.bytes) }
    }
}

impl Drop for Locked {
    fn drop(&mut self) {
        let start = self.memory as usize;
        self.known.lock().unwrap_or_else(PoisonError::into_inner).retain(|range| range.start != start);
        // SAFETY: a copy from the memory is over when its call returns; memory and context are given back once, in this order. Nobody could
        // be told of a refusal.
        unsafe {
            // The caller's own context stays the current one.
            let pushed = self.driver.cuCtxPushCurrent_v2(self.context).is_ok();
            if !self.memory.is_null() {
                let _ = self.driver.cuMemFreeHost(self.memory.cast());
            }
            if pushed {
                let _ = self.driver.cuCtxPopCurrent_v2(&mut null_mut());
            }
            let _ = self.driver.cuDevicePrimaryCtxRelease_v2(self.device);
        }
    }
}

/// A staging segment.
pub(super) struct Slot {
    driver: Arc<Driver>,
    memory: *mut u8,
    halves: [Half; 2],
    /// The half that is filled now.
    current: usize,
}

/// A part of a slot, and the event behind the last copy that uses it.
struct Half {
    start: usize,
    bytes: usize,
    used: usize,
    event: CUevent,
}

impl Slot {
    /// Takes `bytes` bytes of the host's memory, at least one, in the current context.
    pub(super) fn new(driver: Arc<Driver>, bytes: usize) -> Result<Slot, Refusal> {
        let first = bytes.div_ceil(2).next_multiple_of(256).min(bytes);
        let half = |start, bytes| Half { start, bytes, used: 0, event: null_mut() };
        let halves = [half(0, first), half(first, bytes - first)];
        let mut slot = Slot { driver, memory: null_mut(), halves, current: 0 };
        let mut memory: *mut c_void = null_mut();
        // CU_EVENT_DISABLE_TIMING: these only order.
        const NO_TIME: u32 = 2;
        // SAFETY: memory and events are given back with the slot.
        unsafe {
            slot.driver.cuMemHostAlloc(&mut memory, bytes, 0)?;
            slot.memory = memory.cast();
            slot.memory.write_bytes(0, bytes);
            for half in &mut slot.halves {
                slot.driver.cuEventCreate(&mut half.event, NO_TIME)?;
            }
        }
        Ok(slot)
    }

    /// Copies `data`, which lies in pinned memory, to `to`, after the work in the stream. Returns when the copy is over.
    pub(super) fn upload_locked(&mut self, to: CUdeviceptr, data: &[u8], stream: CUstream) -> Result<(), Refusal> {
        // An event of a half also stands behind the copies from the half.
        let event = self.halves[self.current].event;
        // SAFETY: the data stays where it is until the event is over; the caller's destination has room for all of it.
        unsafe {
            self.driver.cuMemcpyHtoDAsync_v2(to, data.as_ptr().cast(), data.len(), stream)?;
            self.driver.cuEventRecord(event, stream)?;
            self.driver.cuEventSynchronize(event)
        }
    }

    /// Copies `data` to `to`, after the work in the stream. Returns when the data is in the slot.
    pub(super) fn upload(&mut self, to: CUdeviceptr, data: &[u8], stream: CUstream) -> Result<(), Refusal> {
        let mut done = 0;
        while done < data.len() {
            if self.halves[self.current].used == self.halves[self.current].bytes {
                self.current = 1 - self.current;
                let half = &mut self.halves[self.current];
                half.used = 0;
                // SAFETY: the event lives as long as the slot.
                unsafe { self.driver.cuEventSynchronize(half.event) }?;
            }
            let half = &mut self.halves[self.current];
            let bytes = (half.bytes - half.used).min(data.len() - done);
            // SAFETY: no copy uses this part of the slot, which lies within it; the caller's destination has room for all of the data.
            unsafe {
                let from = self.memory.add(half.start + half.used);
                from.copy_from_nonoverlapping(data[done..].as_ptr(), bytes);
                self.driver.cuMemcpyHtoDAsync_v2(to + done as u64, from.cast(), bytes, stream)?;
                self.driver.cuEventRecord(half.event, stream)?;
            }
            half.used += bytes.next_multiple_of(16).min(half.bytes - half.used);
            done += bytes;
        }
        Ok(())
    }

    /// Copies from each of `from` to each of `data`, after the work in the stream, as many at a time as fit in a half. The next ones arrive
    /// while the last are copied out.
    pub(super) fn download(
        &mut self,
        data: &mut [&mut [u8]],
        from: &[CUdeviceptr],
        stream: CUstream,
    ) -> Result<(), Refusal> {
        let Slot { driver, memory, halves, .. } = self;
        // With one half, nothing comes over before the last round is out.
        let ahead = usize::from(halves[1].bytes > 0);
        let half = |round: usize| &halves[round % 2 * ahead];
        let lengths: Vec<usize> = data.iter().map(|piece| piece.len()).collect();
        let rounds = rounds(&lengths, 16, |round| half(round).bytes);
        let begin = |(number, round): (usize, &Vec<Part>)| {
            // SAFETY: the last content of this half has been copied out, and it has room for the round; the caller's sources have all
            // the bytes.
            unsafe {
                for &Part { piece, from: start, at, bytes } in round {
                    let to = memory.add(half(number).start + at).cast();
                    driver.cuMemcpyDtoHAsync_v2(to, from[piece] + start as u64, bytes, stream)?;
                }
                driver.cuEventRecord(half(number).event, stream)
            }
        };
        let mut coming = rounds.iter().enumerate();
        coming.by_ref().take(ahead).try_for_each(begin)?;
        for (number, round) in rounds.iter().enumerate() {
            coming.next().map_or(Ok(()), begin)?;
            // SAFETY: the event lives as long as the slot; behind it the half holds this round.
            unsafe {
                driver.cuEventSynchronize(half(number).event)?;
                for &Part { piece, from, at, bytes } in round {
                    let found = memory.add(half(number).start + at);
                    data[piece][from..from + bytes].as_mut_ptr().copy_from_nonoverlapping(found, bytes);
                }
            }
        }
        Ok(())
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        // SAFETY: the stream has been waited for; each is given back once. Nobody could be told of a refusal.
        unsafe {
            for half in self.halves.iter().filter(|half| !half.event.is_null()) {
                let _ = self.driver.cuEventDestroy_v2(half.event);
            }
            if !self.memory.is_null() {
                let _ = self.driver.cuMemFreeHost(self.memory.cast());
            }
        }
    }
}
