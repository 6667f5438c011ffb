//! Data moves to the device and back through two mapped buffers of the plan, and through nothing else.
//!
//! ```text
//! write   host bytes --> upload slot        while it has room; its content leaves with the next submission
//! submit  [upload slot --> segments, work]  then the slot is mapped again
//! read    segments --> download slot --> host bytes
//! ```
//!
//! wgpu copies words. The last one of a value of bytes or halves is filled with zeros on its way in, and cut on its way out.

use super::gpu::{Gpu, failed};
use crate::staged::{Part, rounds};
use plimsoll_backend::{SegmentId, Slice};
use plimsoll_core::error::Result;

/// A buffer that the host fills and the device copies from.
pub(super) struct Upload {
    buffer: wgpu::Buffer,
    /// Bytes in use, from the start.
    used: u64,
    /// Copies from it that wait for the next submission.
    copies: Vec<Copy>,
    /// Copies were submitted since the host last wrote; the mapping has been asked for.
    submitted: bool,
}

struct Copy {
    from: u64,
    bytes: u64,
    to: wgpu::Buffer,
    segment: SegmentId,
    offset: u64,
}

impl Upload {
    /// A slot in a buffer that is mapped.
    pub fn new(buffer: wgpu::Buffer) -> Upload {
        Upload { buffer, used: 0, copies: Vec::new(), submitted: false }
    }

    /// Takes as much of `data` as there is room for, to be copied to the start of `at`. Returns how many bytes.
    pub fn put(&mut self, gpu: &Gpu, to: &wgpu::Buffer, at: Slice, data: &[u8]) -> Result<usize> {
        if self.submitted {
            gpu.wait()?;
            self.submitted = false;
        }
        let room = self.buffer.size() - self.used;
        let bytes = room.min(data.len() as u64);
        if bytes > 0 {
            let words = bytes.next_multiple_of(wgpu::COPY_BUFFER_ALIGNMENT);
            let range = self.used..self.used + words;
            let view = self.buffer.get_mapped_range_mut(range.clone());
            let mut view = view.map_err(|e| failed(format!("write: {e}")))?;
            view.slice(..bytes as usize).copy_from_slice(&data[..bytes as usize]);
            view.slice(bytes as usize..).fill(0);
            let (from, bytes) = (range.start, words);
            self.copies.push(Copy { from, bytes, to: to.clone(), segment: at.segment, offset: at.offset });
            self.used = range.end.next_multiple_of(wgpu::MAP_ALIGNMENT).min(self.buffer.size());
        }
        Ok(bytes as usize)
    }

    /// Drops copies to a segment that is freed.
    pub fn forget(&mut self, segment: SegmentId) {
        self.copies.retain(|copy| copy.segment != segment);
        if self.copies.is_empty() {
            self.used = 0;
        }
    }

    /// Encodes the copies, if there are any. The caller's scope catches their errors.
    fn leave(&mut self, device: &wgpu::Device) -> Option<wgpu::CommandBuffer> {
        if self.copies.is_empty() {
            return None;
        }
        self.buffer.unmap();
        let mut encoder = device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        for Copy { from, bytes, to, offset, .. } in self.copies.drain(..) {
            encoder.copy_buffer_to_buffer(&self.buffer, from, &to, offset, bytes);
        }
        Some(encoder.finish())
    }

    fn come_back(&mut self) {
        // A failure shows when a range is asked for.
        self.buffer.map_async(wgpu::MapMode::Write, .., |_| {});
        (self.used, self.submitted) = (0, true);
    }
}

/// Submits work, after the copies that wait in the upload slot.
pub(super) fn submit(
    gpu: &Gpu,
    upload: &mut Option<Upload>,
    what: &str,
    work: Option<wgpu::CommandBuffer>,
) -> Result<()> {
    gpu.alive()?;
    gpu.scoped(what, || {
        let copies = upload.as_mut().and_then(|upload| upload.leave(&gpu.device));
        let left = upload.as_mut().filter(|_| copies.is_some());
        gpu.queue.submit(copies.into_iter().chain(work));
        if let Some(upload) = left {
            upload.come_back();
        }
    })
}

/// Copies ranges of buffers to the host by way of `slot`, as many at a time as fit, after the copies that wait in the upload slot.
pub(super) fn read(
    gpu: &Gpu,
    upload: &mut Option<Upload>,
    slot: &wgpu::Buffer,
    from: &[(wgpu::Buffer, u64)],
    data: &mut [&mut [u8]],
) -> Result<()> {
    let lengths: Vec<usize> = data.iter().map(|piece| piece.len()).collect();
    for round in rounds(&lengths, wgpu::MAP_ALIGNMENT as usize, |_| slot.size() as usize) {
        let words = |bytes: usize| (bytes as u64).next_multiple_of(wgpu::COPY_BUFFER_ALIGNMENT);
        let end = round.last().map_or(0, |part| words(part.at + part.bytes));
        let copies = gpu.encode("read", |encoder| {
            for Part { piece, from: start, at, bytes } in &round {
                let (buffer, offset) = &from[*piece];
                encoder.copy_buffer_to_buffer(buffer, offset + *start as u64, slot, *at as u64, words(*bytes));
            }
        })?;
        submit(gpu, upload, "read", Some(copies))?;
        look(gpu, slot, end, |view| {
            for Part { piece, from, at, bytes } in round {
                data[piece][from..from + bytes].copy_from_slice(&view[at..at + bytes]);
            }
        })?;
    }
    Ok(())
}

/// Reads the first bytes of a slot, once all that was submitted is done.
pub(super) fn look<T>(gpu: &Gpu, slot: &wgpu::Buffer, bytes: u64, see: impl FnOnce(&[u8]) -> T) -> Result<T> {
    // A failure shows when the range is asked for.
    gpu.scoped("read", || slot.map_async(wgpu::MapMode::Read, ..bytes, |_| {}))?;
    let seen = gpu.wait().and_then(|()| {
        let view = slot.get_mapped_range(..bytes).map_err(|e| failed(format!("read: {e}")))?;
        Ok(see(&view))
    });
    gpu.scoped("read", || slot.unmap())?;
    seen
}
