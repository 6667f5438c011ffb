//! Tuning: times the schedules of graphs' kernels on a device, and keeps the fastest of each.
//!
//! ```text
//! Graph --plan, with an empty table--> the kernels that lowering asked for
//!       each kernel: its candidates --record, time by turns, compare results--> the fastest --> table --> cache on disk
//!       --plan again, with the table--> a plan of no more bytes
//! ```
//!
//! `schedule::candidates` says what is tried, `schedule::check` what is legal. Tuning adds no algorithm and no rule.

use crate::backend::{Backend, Launch, RecordId, SegmentId, Slice};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::kernel::algorithm::Schedule;
use crate::kernel::schedule::variants::{Variant, variants};
use crate::kernel::tuned::Tuned;
use crate::kernel::{Kernel, cpu};
use crate::pass::Prepared;
use crate::plan;
use crate::plan::make::lowered;
use crate::random::splitmix;
use crate::shape::Access;
use crate::target::{Memory, Target};
use crate::tensor::Tensor;
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::time::{Duration, Instant};

pub mod cache;

/// Rounds in which all schedules of a kernel take turns.
const ROUNDS: usize = 8;
/// Schedules that take more than this many times the best one's time run in no further round.
const HOPELESS: f64 = 1.5;
/// The time of a recorded sequence of equal launches.
const RECORD: Duration = Duration::from_millis(2);
/// The most launches of such a sequence.
const MOST_LAUNCHES: u128 = 100;
/// A schedule replaces the one that is expected to be fastest only if it takes at most this share of its time.
const GAIN: f64 = 0.95;
/// Results of schedules differ by at most this share of the largest element, for `f32` and for 16-bit floats.
const DIFFER: [f64; 2] = [1e-3, 3e-2];
/// Elements of a result that are compared.
const COMPARED: u64 = 1 << 18;
/// Random elements of an operand, which then repeat.
const REPEATED: usize = 1 << 16;
/// The most bytes of a staging segment.
const STAGED: u64 = 1 << 20;

/// The measured kernel.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Entry {
    /// The kernel with an open schedule, as [`Tuned`] is asked for it.
    pub kernel: Kernel,
    /// The schedule to use.
    pub schedule: Schedule,
    /// The schedule that is used without a measurement.
    pub expected: Schedule,
    /// Microseconds of the expected schedule; none if the device refused it.
    pub before: Option<f64>,
    /// Microseconds of the schedule to use.
    pub after: f64,
    /// Number of schedules that were timed.
    pub tried: usize,
    /// Number of launches that lowering asked for; not kept on disk.
    #[serde(skip)]
    pub launches: usize,
}

/// A device on which kernels are timed. What it takes for a kernel is freed when the kernel is done.
struct Bench<'a> {
    backend: &'a mut dyn Backend,
    staging: Vec<SegmentId>,
    segments: Vec<SegmentId>,
}

impl Drop for Bench<'_> {
    fn drop(&mut self) {
        self.clear();
        self.staging.drain(..).for_each(|segment| self.backend.free(segment));
    }
}

impl<'a> Bench<'a> {
    fn new(backend: &'a mut dyn Backend) -> Result<Bench<'a>> {
        let mut bench = Bench { backend, staging: Vec::new(), segments: Vec::new() };
        let bytes = bench.backend.target().staged(STAGED);
        for memory in [Memory::Upload, Memory::Download].into_iter().filter(|_| bytes > 0) {
            let segment = bench.backend.alloc(bytes, memory)?;
            bench.staging.push(segment);
        }
        Ok(bench)
    }

    fn clear(&mut self) {
        self.segments.drain(..).for_each(|segment| self.backend.free(segment));
    }

    /// Times the variants of a kernel by turns. `None` if there is nothing to choose, or the device refuses every variant.
    fn measure(&mut self, kernel: &Kernel, until: Instant) -> Result<Option<Entry>> {
        let variants = variants(kernel, self.backend.target());
        if variants.len() < 2 {
            return Ok(None);
        }
        let entry = self.measure_variants(kernel, &variants, until);
        self.clear();
        entry
    }

    fn measure_variants(&mut self, kernel: &Kernel, variants: &[Variant], until: Instant) -> Result<Option<Entry>> {
        let mut slots = Vec::new();
        for slot in 0..kernel.reads.len() + kernel.writes.len() {
            slots.push(self.alloc(operand_bytes(variants, slot))?);
            if slot < kernel.reads.len() {
                let mut at = Slice { bytes: 0, ..slots[slot] };
                for block in values(kernel.operand(slot).dtype, slots[slot].bytes, slot) {
                    at = Slice { offset: at.offset + at.bytes, bytes: block.len() as u64, ..at };
                    self.backend.write(at, &block)?;
                }
            }
        }
        let workspace = variants.iter().flat_map(|variant| &variant.launches).map(|(kernel, _)| kernel.workspace).max();
        let workspace = workspace.filter(|&bytes| bytes > 0).map(|bytes| self.alloc(bytes)).transpose()?;
        let mut packed = Vec::new();
        let bound: Vec<_> =
            variants.iter().map(|variant| self.launches(variant, &slots, workspace, &mut packed)).collect();
        // Texts are compiled together. If one of them fails, each is compiled by itself.
        let texts = variants.iter().zip(&bound).filter(|(variant, _)| variant.schedule.call().is_none());
        let texts: Vec<Launch> = texts.filter_map(|(_, bound)| bound.as_ref().ok()).flatten().cloned().collect();
        let _ = self.backend.record(&texts);
        let mut runs = Vec::new();
        let mut expected: Option<Vec<Vec<f64>>> = None;
        for (number, (variant, bound)) in variants.iter().zip(bound).enumerate() {
            // The result of the way before must not pass for that of this one.
            self.spoil(kernel, &slots)?;
            let made = bound.and_then(|launches| self.prepare(number, launches));
            let (run, found) = match made.and_then(|run| Ok((run, self.results(kernel, &slots)?))) {
                Ok(made) => made,
                Err(error) => {
                    tracing::debug!("kernel '{}', {}: {error}", kernel.template.name(), variant.schedule);
                    continue;
                }
            };
            match expected.as_ref().map(|expected| agree(kernel, self.backend.target(), expected, &found)) {
                Some(Err(what)) => {
                    let (kernel, schedule) = (kernel.template.name(), &variant.schedule);
                    tracing::warn!("kernel '{kernel}', {schedule}: {what}; it is not used");
                    continue;
                }
                Some(Ok(())) => {}
                None => expected = Some(found),
            }
            runs.push(run);
        }
        for round in 0..ROUNDS {
            for run in &mut runs {
                let time = self.backend.time(run.record)?.as_secs_f64() * 1e6 / run.count as f64;
                run.best = run.best.min(time);
            }
            let best = runs.iter().fold(f64::INFINITY, |best, run| best.min(run.best));
            runs.retain(|run| run.number == 0 || run.best <= HOPELESS * best);
            if round > 0 && Instant::now() > until {
                break;
            }
        }
        for Run { number, best, .. } in &runs {
            let (name, schedule) = (kernel.template.name(), &variants[*number].schedule);
            tracing::debug!("kernel '{name}' {}, {schedule} {}: {best:.1} us", kernel.shape, schedule.numbers());
        }
        let before = runs.iter().find(|run| run.number == 0).map(|run| run.best);
        let Some(best) = runs.iter().min_by(|a, b| a.best.total_cmp(&b.best)) else { return Ok(None) };
        let (number, after) = match before {
            Some(before) if best.best > GAIN * before => (0, before),
            _ => (best.number, best.best),
        };
        let [schedule, expected] = [number, 0].map(|number| variants[number].schedule.clone());
        Ok(Some(Entry {
            kernel: kernel.clone(),
            schedule,
            expected,
            before,
            after,
            tried: variants.len(),
            launches: 0,
        }))
    }

    fn alloc(&mut self, bytes: u64) -> Result<Slice> {
        let target = self.backend.target();
        let bytes = bytes.next_multiple_of(target.alignment);
        if bytes > target.max_segment.min(target.max_binding) {
            return Err(Error::usage(format!("an operand of {bytes} bytes")));
        }
        let segment = self.backend.alloc(bytes, Memory::Device)?;
        self.segments.push(segment);
        Ok(Slice { segment, offset: 0, bytes })
    }

    /// The launches of a variant. Operands in a packed layout have buffers of their own, which variants share.
    fn launches(
        &mut self,
        variant: &Variant,
        slots: &[Slice],
        workspace: Option<Slice>,
        packed: &mut Vec<(Vec<u8>, Slice)>,
    ) -> Result<Vec<Launch>> {
        let mut launches = Vec::new();
        for (kernel, args) in &variant.launches {
            let mut bound = Vec::new();
            for (at, &slot) in args.iter().enumerate() {
                if !kernel.operand(at).packed {
                    bound.push(slots[slot]);
                    continue;
                }
                let plain = values(kernel.operand(at).dtype, slots[slot].bytes, slot).concat();
                let mut bytes = vec![0; cpu::packed_bytes(kernel, at).unwrap_or_default() as usize];
                cpu::pack(kernel, at, cpu::Plain::whole(&plain), &mut bytes);
                let there = packed.iter().find(|(other, _)| *other == bytes).map(|(_, slice)| *slice);
                bound.push(match there {
                    Some(slice) => slice,
                    None => {
                        let slice = self.alloc(bytes.len() as u64)?;
                        self.backend.write(Slice { bytes: bytes.len() as u64, ..slice }, &bytes)?;
                        packed.push((bytes, slice));
                        slice
                    }
                });
            }
            let work = workspace.filter(|_| kernel.workspace > 0);
            bound.extend(work.map(|at| Slice { bytes: kernel.workspace, ..at }));
            launches.push(Launch::new(self.backend.compile(kernel)?, bound));
        }
        Ok(launches)
    }

    /// Runs launches once, and records as many repetitions as take a while.
    fn prepare(&mut self, number: usize, launches: Vec<Launch>) -> Result<Run> {
        let once = self.backend.record(&launches)?;
        self.backend.time(once)?;
        let time = self.backend.time(once)?;
        let count = (RECORD.as_nanos() / time.as_nanos().max(1)).clamp(1, MOST_LAUNCHES) as usize;
        let record = if count > 1 { self.backend.record(&vec![launches; count].concat())? } else { once };
        if count > 1 {
            self.backend.time(record)?;
        }
        Ok(Run { number, record, count, best: f64::INFINITY })
    }

    /// Overwrites the first elements of a kernel's results: floats by NaN.
    fn spoil(&mut self, kernel: &Kernel, slots: &[Slice]) -> Result<()> {
        let mut written = compared(kernel, slots);
        written.try_for_each(|(_, at)| self.backend.write(at, &vec![0xff; at.bytes as usize]))
    }

    /// The first elements of what a kernel wrote.
    fn results(&mut self, kernel: &Kernel, slots: &[Slice]) -> Result<Vec<Vec<f64>>> {
        let read = |(dtype, at): (DType, Slice)| {
            let mut bytes = vec![0; at.bytes as usize];
            self.backend.read(at, &mut bytes)?;
            let count = bytes.len() / dtype.size();
            Ok(Tensor::load(dtype, bytes, dtype, [count].into())?.to_f64())
        };
        compared(kernel, slots).map(read).collect()
    }
}

/// The first elements of each result of a kernel, which are compared.
fn compared(kernel: &Kernel, slots: &[Slice]) -> impl Iterator<Item = (DType, Slice)> {
    kernel.writes.iter().zip(&slots[kernel.reads.len()..]).map(|(operand, at)| {
        let size = operand.dtype.size() as u64;
        (operand.dtype, Slice { bytes: (at.bytes / size).min(COMPARED) * size, ..*at })
    })
}

/// A way that runs on the device.
struct Run {
    number: usize,
    record: RecordId,
    /// Repetitions in the record.
    count: usize,
    /// Microseconds of the fastest round.
    best: f64,
}

/// The content of an operand, block by block: floats between -1 and 1 that repeat after a while; zeros elsewhere, which every index allows.
fn values(dtype: DType, bytes: u64, seed: usize) -> Vec<Bytes> {
    let mut random = splitmix(seed as u64);
    let mut value = || if dtype.is_float() { (random() >> 11) as f64 / (1u64 << 52) as f64 - 1.0 } else { 0.0 };
    let count = (bytes as usize / dtype.size()).min(REPEATED);
    let block: Vec<f64> = (0..count).map(|_| value()).collect();
    let block = Tensor::from_f64(dtype, [count], &block).bytes().clone();
    let mut blocks = vec![block.clone(); bytes as usize / block.len()];
    blocks.push(block.slice(..bytes as usize % block.len()));
    blocks
}

/// Bytes of an operand that is not packed.
fn operand_bytes(variants: &[Variant], slot: usize) -> u64 {
    let of = |(kernel, args): &(Kernel, Vec<usize>)| {
        let at = args.iter().position(|&arg| arg == slot)?;
        let operand = kernel.operand(at);
        let last = |access: &Access| access.span().map_or(0, |(_, high)| high.max(0) as u64);
        Some((last(&kernel.reach(at)).max(last(&operand.access)) + 1) * operand.dtype.size() as u64)
    };
    variants.iter().flat_map(|variant| &variant.launches).filter_map(of).max().unwrap_or(0).max(4)
}

/// Compares the results of two schedules of a kernel.
fn agree(kernel: &Kernel, target: &Target, expected: &[Vec<f64>], found: &[Vec<f64>]) -> Result<(), String> {
    for ((operand, expected), found) in kernel.writes.iter().zip(expected).zip(found) {
        let rounded = kernel.reads.iter().any(|read| read.dtype.is_half()) || target.allow_tf32;
        let share = if !operand.dtype.is_float() { 0.0 } else { DIFFER[usize::from(rounded)] };
        let finite = expected.iter().map(|v| v.abs()).filter(|v| v.is_finite());
        let most = share * finite.fold(0.0, f64::max);
        let same = |a: f64, b: f64| a == b || (a - b).abs() <= most || a.is_nan() && b.is_nan();
        if let Some((at, (a, b))) = expected.iter().zip(found).enumerate().find(|(_, (a, b))| !same(**a, **b)) {
            return Err(format!("element {at}: expected {a}, found {b}"));
        }
    }
    Ok(())
}

/// The kernels of graphs that lowering asks a table for, and how often it asks for each.
///
/// # Errors
/// As [`lowered()`].
pub fn kernels(graphs: &[Prepared], target: &Target) -> Result<Vec<(Kernel, usize)>> {
    let asked = Arc::new(Tuned::default());
    for graph in graphs {
        let prepared = Prepared { tuned: Some(Arc::clone(&asked)), ..graph.clone() };
        lowered(&prepared, target, plan::lower::Options { join: true })?;
    }
    Ok(asked.kernels())
}

/// Times the schedules of kernels on a device, those that take most time first, until the time is over. Returns what was found, and
/// calls `progress` with the number of kernels that are done.
///
/// # Errors
/// When the device fails.
pub fn measure(
    backend: &mut dyn Backend,
    mut kernels: Vec<(Kernel, usize)>,
    budget: Duration,
    progress: &dyn Fn(usize),
) -> Result<Vec<Entry>> {
    let until = Instant::now() + budget;
    kernels.sort_by_key(|(kernel, launches)| std::cmp::Reverse(work(kernel).saturating_mul(*launches as u64)));
    let mut bench = Bench::new(backend)?;
    let mut found = Vec::new();
    for (done, (kernel, launches)) in kernels.iter().enumerate() {
        if done > 0 && Instant::now() > until {
            tracing::info!("the time is over: {} of {} kernels are not timed", kernels.len() - done, kernels.len());
            break;
        }
        match bench.measure(kernel, until) {
            Ok(entry) => found.extend(entry.map(|entry| Entry { launches: *launches, ..entry })),
            Err(error) => tracing::info!("kernel '{}' is not timed: {error}", kernel.template.name()),
        }
        progress(done + 1);
    }
    Ok(found)
}

/// About the work of a kernel: products of cores, else elements.
fn work(kernel: &Kernel) -> u64 {
    kernel.multiply_adds().unwrap_or_else(|| crate::kernel::elements(&kernel.shape))
}
