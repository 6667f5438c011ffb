//! Any GPU that Vulkan, Metal or DX12 reaches, through wgpu; where none of them does, one that GL reaches.
//!
//! - A segment is one buffer of exactly the bytes asked for. An operand is a range of one, bound once per step; a segment
//!   that no step of a record writes is bound for reading only, any other for both: usage is tracked per buffer.
//! - A record is a list of pipelines and bind groups. Each replay encodes them into a compute pass anew, because a command buffer runs once.
//!   A record that runs repeatedly is encoded for its next replay while the device still runs it.
//! - Compiled pipelines are kept on disk (`cache.rs`) where the driver gives them out.
//! - Data moves through the [staging](Memory) segments alone, so that wgpu needs no memory of its own for it. A write waits in its slot for
//!   the next submission.
//! - The device's clock (`clock.rs`), if it has one, times records: the host's time to encode and submit does not count.
//! - wgpu cuts small buffers from blocks of 4 MiB and keeps a buffer of 512 KiB for itself. [`Usage::overhead`] counts all bytes that it has
//!   taken from the driver beyond the segments. It is 0 on Metal, which does not tell, and on a device of the host program, which serves
//!   others as well.

use clock::Clock;
pub use gpu::{Adapter, adapters};
use gpu::{Gpu, address, describe, failed};
use plimsoll_backend::records::Records;
use plimsoll_backend::segments::{Segment, Segments};
use plimsoll_backend::work::{Loops, Work, launches as each_launch};
use plimsoll_backend::{Backend, KernelId, Launch, Outside, RecordId, SegmentId, Slice, Usage};
use plimsoll_core::error::{Error, Result, ensure};
use plimsoll_core::kernel::Kernel;
use plimsoll_core::kernel::render::{self, Bindings, Dialect};
use plimsoll_core::target::{Memory, Target};
use record::{Device, Pipelines, Step, buffer};
use staging::Upload;
use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

mod cache;
mod clock;
mod gpu;
mod record;
mod staging;

/// A wgpu device as a backend.
pub struct Wgpu {
    gpu: Gpu,
    clock: Option<Clock>,
    adapter: Adapter,
    target: Target,
    segments: Segments<wgpu::Buffer>,
    /// Buffers of the host program that no segment has yet, if segments lie in such.
    lent: Option<VecDeque<wgpu::Buffer>>,
    /// Segments in buffers of the host program.
    in_lent: Vec<SegmentId>,
    /// The addresses of all buffers of the host program.
    all_lent: Vec<u64>,
    upload: Option<Upload>,
    download: Option<wgpu::Buffer>,
    kernels: Vec<Kernel>,
    loops: Loops,
    records: Records<Vec<Work<Option<Step>>>>,
    /// The record that ran last. Once it has run twice in a row, it is encoded for its next replay.
    ahead: Option<(RecordId, Option<wgpu::CommandBuffer>)>,
    pipelines: Pipelines,
}

/// The addresses of the buffers that are lent now.
static LENT: Mutex<Vec<u64>> = Mutex::new(Vec::new());

impl Drop for Wgpu {
    fn drop(&mut self) {
        let mut lent = LENT.lock().unwrap_or_else(PoisonError::into_inner);
        lent.retain(|address| !self.all_lent.contains(address));
    }
}

/// An error about a buffer of the host program, which says so if the buffer is of another device.
fn foreign(error: Error) -> Error {
    let text = error.to_string();
    if text.contains("different device") || text.contains("doesn't match") || text.contains("DeviceMismatch") {
        return failed(format!("it is of another device ({})", text.lines().last().unwrap_or_default().trim()));
    }
    error
}

/// A part of a buffer of the host program, which has to be words of it, and to have a usage.
fn part<'a>(place: &'a Outside, usage: wgpu::BufferUsages, target: &Target) -> Result<(&'a wgpu::Buffer, u64, u64)> {
    let Outside::Wgpu { buffer, offset, bytes } = place else { return Err(place.refused(target)) };
    let named = || format!("{bytes} bytes at {offset} of a buffer of {}", buffer.size());
    let inside = offset.checked_add(*bytes).is_some_and(|end| end <= buffer.size());
    ensure(inside, || failed(format!("{}: they end beyond it", named())))?;
    let words = offset.is_multiple_of(4) && bytes.is_multiple_of(4);
    ensure(words, || failed(format!("{}: expected multiples of 4", named())))?;
    ensure(buffer.usage().contains(usage), || failed(format!("{}: it lacks the usage {usage:?}", named())))?;
    Ok((buffer, *offset, *bytes))
}

/// Opens a device as [`Wgpu::new`] does. Returns its name, too. Software devices are refused unless `software` allows them.
///
/// # Errors
/// When there is none.
pub fn open(adapter: Option<&str>, software: bool) -> Result<(Box<dyn Backend>, String)> {
    let wgpu = Wgpu::new(adapter)?;
    ensure(!wgpu.adapter.software || software, || failed(format!("{} is no GPU", wgpu.adapter)))?;
    let name = format!("wgpu, {}", wgpu.adapter);
    Ok((Box::new(wgpu), name))
}

impl Wgpu {
    /// Opens the device of this number in [`adapters`], or the first whose name contains this text, or the best.
    ///
    /// # Errors
    /// When there is no such device, or it refuses.
    pub fn new(adapter: Option<&str>) -> Result<Wgpu> {
        Wgpu::with_checks(adapter, false)
    }

    /// As [`new`](Self::new); with `checked`, kernels check every index at run time. Kernels of a plan that the checker has passed do not need
    /// that.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_checks(adapter: Option<&str>, checked: bool) -> Result<Wgpu> {
        let (gpu, adapter) = Gpu::open(adapter)?;
        Ok(Wgpu::assemble(gpu, adapter, checked))
    }

    /// A backend over a device that the host program owns, which keeps its own error handlers. When such a device is lost, the next
    /// [`write`](Backend::write) or [`read`](Backend::read) fails; calls in between have no effect.
    pub fn from_device(device: wgpu::Device, queue: wgpu::Queue) -> Wgpu {
        let adapter = describe(&device.adapter_info(), &device.limits(), device.features());
        Wgpu::assemble(Gpu::lent(device, queue), adapter, false)
    }

    /// As [`from_device`](Self::from_device), with segments in buffers of the host program: one each, in the order of the plan's segments of
    /// device memory. A buffer may be larger than its segment; what lies behind the segment is left alone. wgpu tracks uses per buffer, so two
    /// segments cannot share one.
    ///
    /// # Errors
    /// When a buffer lacks a usage, or is lent already. One that is too small, or of another device, is refused when its segment is allocated.
    /// wgpu does not tell buffers of two of its instances apart.
    pub fn with_buffers(device: wgpu::Device, queue: wgpu::Queue, buffers: Vec<wgpu::Buffer>) -> Result<Wgpu> {
        use wgpu::BufferUsages as U;
        let mut addresses = Vec::with_capacity(buffers.len());
        let mut lent = LENT.lock().unwrap_or_else(PoisonError::into_inner);
        for (number, buffer) in buffers.iter().enumerate() {
            let refuse = |what: String| failed(format!("lent buffer {number}: {what}"));
            let missing = (U::STORAGE | U::COPY_SRC | U::COPY_DST) - buffer.usage();
            ensure(missing.is_empty(), || {
                refuse(format!("expected the usages STORAGE, COPY_SRC and COPY_DST, it lacks {missing:?}"))
            })?;
            let address = address(buffer).map_err(|error| refuse(error.to_string()))?;
            let twice = lent.contains(&address) || addresses.contains(&address);
            ensure(!twice, || refuse("it is lent already".into()))?;
            addresses.push(address);
        }
        lent.extend(&addresses);
        drop(lent);
        let mut wgpu = Wgpu::from_device(device, queue);
        wgpu.all_lent = addresses;
        wgpu.lent = Some(buffers.into());
        Ok(wgpu)
    }

    /// The next lent buffer, with zeros where its segment lies.
    fn next_lent(&mut self, bytes: u64) -> Result<Option<wgpu::Buffer>> {
        let Some(lent) = &mut self.lent else { return Ok(None) };
        let number = self.all_lent.len() - lent.len();
        let Some(buffer) = lent.front().cloned() else {
            let what = format!("a segment of {bytes} bytes: all {number} lent buffers have one");
            return Err(Error::Fit { what, needed: bytes, limit: 0, file: None });
        };
        if buffer.size() < bytes {
            let what = format!("a segment of {bytes} bytes in lent buffer {number}");
            return Err(Error::Fit { what, needed: bytes, limit: buffer.size(), file: None });
        }
        let whose = |error: Error| failed(format!("lent buffer {number}: {}", foreign(error)));
        let cleared = self.gpu.encode("lent buffer", |encoder| encoder.clear_buffer(&buffer, 0, Some(bytes)));
        let commands = cleared.map_err(whose)?;
        self.gpu.scoped("lent buffer", || self.gpu.queue.submit([commands])).map_err(whose)?;
        lent.pop_front();
        Ok(Some(buffer))
    }

    fn assemble(gpu: Gpu, adapter: Adapter, checked: bool) -> Wgpu {
        Wgpu {
            clock: Clock::new(&gpu),
            gpu,
            target: adapter.target.clone(),
            adapter,
            segments: Segments::default(),
            lent: None,
            in_lent: Vec::new(),
            all_lent: Vec::new(),
            upload: None,
            download: None,
            kernels: Vec::new(),
            loops: Loops::default(),
            records: Records::default(),
            ahead: None,
            pipelines: Pipelines::new(checked),
        }
    }

    /// Name, interface and limits of the device.
    pub fn adapter(&self) -> &Adapter {
        &self.adapter
    }

    /// The device itself, to look at: its report of allocations, its limits.
    pub fn device(&self) -> &wgpu::Device {
        &self.gpu.device
    }

    /// Encodes the commands of a record. With a clock, its readings before and after them go to a slot.
    fn encode(&self, record: RecordId, clock: Option<(&Clock, &wgpu::Buffer)>) -> Result<wgpu::CommandBuffer> {
        let steps = self.records.get(record);
        let steps = steps.ok_or_else(|| failed(format!("there is no record {}, or its memory is gone", record.0)))?;
        self.gpu.encode("replay", |encoder| {
            // One pass for all: reads after writes are ordered within it, and passes cost more than dispatches.
            let timestamp_writes = clock.map(|(clock, _)| clock.marks());
            let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor { label: None, timestamp_writes });
            let mut run = |step: &Option<Step>| {
                let Some(step) = step else { return Ok::<_, Infallible>(()) };
                let [x, y, z] = step.groups;
                pass.set_pipeline(&step.pipeline);
                pass.set_bind_group(0, &step.group, &[]);
                pass.dispatch_workgroups(x, y, z);
                Ok(())
            };
            let Ok(()) = steps.iter().try_for_each(|part| part.run(&mut run));
            drop(pass);
            if let Some((clock, slot)) = clock {
                clock.resolve(encoder, slot);
            }
        })
    }

    /// Makes a buffer of zeros, which is mapped if it is the host's.
    fn zeros(&self, bytes: u64, memory: Memory) -> Result<wgpu::Buffer> {
        use wgpu::BufferUsages as U;
        let usage = match memory {
            Memory::Upload => U::MAP_WRITE | U::COPY_SRC,
            Memory::Download if self.clock.is_some() => U::MAP_READ | U::COPY_DST | U::QUERY_RESOLVE,
            Memory::Download => U::MAP_READ | U::COPY_DST,
            _ => U::STORAGE | U::COPY_SRC | U::COPY_DST,
        };
        self.gpu.scoped("allocation", || {
            let buffer = self.gpu.device.create_buffer(&wgpu::BufferDescriptor {
                label: Some("segment"),
                size: bytes,
                usage,
                mapped_at_creation: memory == Memory::Upload,
            });
            // wgpu fills a buffer with zeros at its first use. That is done here, not in the first run.
            if usage.contains(U::COPY_DST) {
                let mut encoder = self.gpu.device.create_command_encoder(&Default::default());
                encoder.clear_buffer(&buffer, 0, None);
                self.gpu.queue.submit([encoder.finish()]);
            }
            buffer
        })
    }
}

impl Backend for Wgpu {
    fn target(&self) -> &Target {
        &self.target
    }

    fn identity(&self) -> String {
        format!("wgpu, {}", self.adapter)
    }

    fn usage(&self) -> Usage {
        let reserved = self.gpu.reserved().filter(|_| self.gpu.own);
        let held = self.gpu.held.load(Ordering::Relaxed);
        Usage { overhead: Some(reserved.map_or(0, |bytes| bytes.saturating_sub(held))), ..self.segments.usage() }
    }

    fn alloc(&mut self, bytes: u64, memory: Memory) -> Result<SegmentId> {
        self.gpu.alive()?;
        if !bytes.is_multiple_of(4) || bytes > self.target.max_segment {
            let most = self.target.max_segment;
            return Err(failed(format!("cannot allocate {bytes} bytes: at most {most}, in words")));
        }
        let is_there = self.segments.all().any(|segment| segment.memory == memory);
        if !memory.is_device() && (bytes == 0 || is_there) {
            return Err(failed(format!("cannot allocate {bytes} bytes of {memory:?} memory: one segment, not empty")));
        }
        if matches!(memory, Memory::Scratch | Memory::Own | Memory::Prefetch | Memory::Reserve | Memory::Pinned) {
            return Err(failed(format!("there is no {memory:?} memory")));
        }
        let id = self.segments.next().map_err(failed)?;
        let lent = if memory.is_device() { self.next_lent(bytes)? } else { None };
        let buffer = match lent {
            Some(buffer) => {
                self.in_lent.push(id);
                buffer
            }
            None => {
                let buffer = self.zeros(bytes, memory)?;
                self.gpu.held.fetch_add(bytes, Ordering::Relaxed);
                buffer
            }
        };
        match memory {
            Memory::Upload => self.upload = Some(Upload::new(buffer.clone())),
            Memory::Download => self.download = Some(buffer.clone()),
            _ => {}
        }
        self.segments.insert(bytes, memory, buffer);
        Ok(id)
    }

    fn fork(&mut self, shared: &[SegmentId]) -> Result<Box<dyn Backend>> {
        ensure(self.lent.is_none(), || failed("memory that the host program lends serves one run at a time"))?;
        // The last writes wait in the slot, and this backend may submit nothing before the other one runs.
        staging::submit(&self.gpu, &mut self.upload, "upload", None)?;
        let mut fork = Wgpu::assemble(self.gpu.share(), self.adapter.clone(), self.pipelines.checked());
        (fork.segments, fork.pipelines) = (self.segments.lend(shared), self.pipelines.clone());
        Ok(Box::new(fork))
    }

    fn free(&mut self, segment: SegmentId) {
        let Some(Segment { bytes, memory, borrowed, made: buffer }) = self.segments.remove(segment) else { return };
        self.records.free(segment);
        self.ahead = None;
        match memory {
            Memory::Upload => self.upload = None,
            Memory::Download => self.download = None,
            _ => self.upload.iter_mut().for_each(|upload| upload.forget(segment)),
        }
        if borrowed || self.in_lent.contains(&segment) {
            return;
        }
        self.gpu.held.fetch_sub(bytes, Ordering::Relaxed);
        if let Err(error) = self.gpu.scoped("free", || buffer.destroy()) {
            tracing::warn!(target: "plimsoll::wgpu", "{error}");
        }
    }

    fn write(&mut self, at: Slice, data: &[u8]) -> Result<()> {
        self.gpu.alive()?;
        let buffer = buffer(&self.segments, at)?.clone();
        ensure(data.len() as u64 == at.bytes, || failed(format!("{} bytes do not fill {}", data.len(), at.bytes)))?;
        let mut done = 0;
        while done < data.len() {
            let upload = self.upload.as_mut().ok_or_else(|| failed("there is no segment to upload from"))?;
            let rest = Slice { offset: at.offset + done as u64, ..at };
            done += upload.put(&self.gpu, &buffer, rest, &data[done..])?;
            if done < data.len() {
                staging::submit(&self.gpu, &mut self.upload, "write", None)?;
            }
        }
        Ok(())
    }

    fn read(&mut self, at: Slice, data: &mut [u8]) -> Result<()> {
        self.read_all(&mut [(at, data)])
    }

    fn read_all(&mut self, pieces: &mut [(Slice, &mut [u8])]) -> Result<()> {
        self.gpu.alive()?;
        let mut from = Vec::with_capacity(pieces.len());
        for (at, data) in pieces.iter() {
            from.push((buffer(&self.segments, *at)?.clone(), at.offset));
            ensure(data.len() as u64 == at.bytes, || failed(format!("{} bytes do not take {}", data.len(), at.bytes)))?;
        }
        let slot = self.download.as_ref().ok_or_else(|| failed("there is no segment to download to"))?;
        let mut data: Vec<&mut [u8]> = pieces.iter_mut().map(|(_, data)| &mut **data).collect();
        staging::read(&self.gpu, &mut self.upload, slot, &from, &mut data)
    }

    fn reaches(&self, place: &Outside, written: bool) -> Result<()> {
        use wgpu::BufferUsages as U;
        self.gpu.alive()?;
        let (buffer, ..) = part(place, if written { U::COPY_DST } else { U::COPY_SRC }, self.target())?;
        let taken = LENT.lock().unwrap_or_else(PoisonError::into_inner).contains(&address(buffer)?);
        ensure(!taken, || failed("a segment of a plan lies in this buffer"))?;
        let Some(own) = self.segments.all().find(|segment| segment.memory.is_device()) else { return Ok(()) };
        // A copy of nothing is refused if one of the buffers is not this device's.
        let (from, to) = if written { (&own.made, buffer) } else { (buffer, &own.made) };
        let tried = self.gpu.encode("place", |encoder| encoder.copy_buffer_to_buffer(from, 0, to, 0, 0));
        tried.map(drop).map_err(foreign)
    }

    fn copy_in(&mut self, at: Slice, from: &Outside) -> Result<()> {
        self.gpu.alive()?;
        let (source, offset, bytes) = part(from, wgpu::BufferUsages::COPY_SRC, self.target())?;
        let to = buffer(&self.segments, at)?.clone();
        let copy = self.gpu.encode("input", |encoder| {
            encoder.copy_buffer_to_buffer(source, offset, &to, at.offset, bytes.min(at.bytes.next_multiple_of(4)));
        })?;
        staging::submit(&self.gpu, &mut self.upload, "input", Some(copy))
    }

    fn copy_out(&mut self, at: Slice, to: &Outside) -> Result<()> {
        self.gpu.alive()?;
        let (target, offset, bytes) = part(to, wgpu::BufferUsages::COPY_DST, self.target())?;
        let from = buffer(&self.segments, at)?.clone();
        let copy = self.gpu.encode("output", |encoder| {
            encoder.copy_buffer_to_buffer(&from, at.offset, target, offset, bytes.min(at.bytes.next_multiple_of(4)));
        })?;
        staging::submit(&self.gpu, &mut self.upload, "output", Some(copy))?;
        self.gpu.wait()
    }

    fn compile(&mut self, kernel: &Kernel) -> Result<KernelId> {
        if let Some(repeat) = kernel.repeat() {
            let kernels = repeat.kernels.iter().map(|inner| self.compile(inner)).collect::<Result<_>>()?;
            self.kernels.push(kernel.clone());
            let id = KernelId(self.kernels.len() as u32 - 1);
            self.loops.insert(id, repeat, kernels);
            return Ok(id);
        }
        if let Some(collective) = kernel.collective() {
            return Err(Error::usage(format!(
                "'{}' runs alone: {collective}; expected the CPU or CUDA",
                self.target.name
            )));
        }
        // The text depends on which arguments share bytes, which is known when a launch is recorded. Errors are reported here.
        render::render(kernel, &self.target, &Bindings::distinct(kernel), Dialect::Wgsl)?;
        self.kernels.push(kernel.clone());
        Ok(KernelId(self.kernels.len() as u32 - 1))
    }

    fn record(&mut self, launches: &[Launch]) -> Result<RecordId> {
        self.gpu.alive()?;
        let Wgpu { gpu, target, kernels, segments, .. } = self;
        let work: Vec<Work<Launch>> = self.loops.expand(launches).into_iter().flatten().collect();
        let each: Vec<Launch> = each_launch(&work).into_iter().cloned().collect();
        let steps = self.pipelines.steps(&Device { gpu, target, kernels, segments }, &each)?;
        let mut made = steps.into_iter();
        let mut next = |_| made.next().ok_or_else(|| failed("a launch was not recorded"));
        let steps = work.into_iter().map(|part| part.try_map(&mut next)).collect::<Result<Vec<_>>>()?;
        let segments = launches.iter().flat_map(|launch| &launch.args).map(|at| at.segment);
        self.records.insert(steps, segments).ok_or_else(|| failed("too many records"))
    }

    fn replay(&mut self, record: RecordId) -> Result<()> {
        let last = self.ahead.take().filter(|(last, _)| *last == record);
        let again = last.is_some();
        let commands = match last.and_then(|(_, commands)| commands) {
            Some(commands) => commands,
            None => self.encode(record, None)?,
        };
        staging::submit(&self.gpu, &mut self.upload, "replay", Some(commands))?;
        // Should this fail, the next replay says why.
        let next = if again { self.encode(record, None).ok() } else { None };
        self.ahead = Some((record, next));
        Ok(())
    }

    fn wait(&mut self) -> Result<()> {
        self.gpu.wait()
    }

    /// Earlier writes are copied first: otherwise they would go with the record, and count in its time.
    fn time(&mut self, record: RecordId) -> Result<Duration> {
        staging::submit(&self.gpu, &mut self.upload, "upload", None)?;
        let start = self.start()?;
        let slot = self.download.as_ref().filter(|slot| slot.size() >= Clock::BYTES);
        let Some(clock) = self.clock.as_ref().zip(slot) else {
            self.replay(record)?;
            return self.stop(start);
        };
        let commands = self.encode(record, Some(clock))?;
        staging::submit(&self.gpu, &mut self.upload, "replay", Some(commands))?;
        self.gpu.wait()?;
        let elapsed = start.elapsed();
        let ticks = |view: &[u8]| [0, 8].map(|at| bytemuck::pod_read_unaligned::<u64>(&view[at..at + 8]));
        let ticks = staging::look(&self.gpu, clock.1, Clock::BYTES, ticks)?;
        Ok(Clock::between(&self.gpu, ticks).filter(|time| *time <= elapsed).unwrap_or(elapsed))
    }
}
