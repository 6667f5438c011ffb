//! Runs a graph eagerly, as a framework would: one kernel and one allocation per operator, through a real allocator.
//!
//! ```text
//! load     allocate constants and inputs                                      (kept)
//! run      per step: allocate the buffers it writes first, launch its kernel,
//!                    free the buffers that no later step uses
//!          read the outputs and free them
//! ```
//!
//! Kernels, device and views are those of a plan. Memory differs: addresses come from an [`Allocator`] during the run, every
//! tensor has bytes of its own, and each kernel is launched alone.

use crate::backend::{Backend, KernelId, Launch, RecordId, SegmentId, Slice};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::exec;
use crate::pass::Prepared;
use crate::plan::lower::{Draft, Options};
use crate::plan::make::lowered;
use crate::plan::{BufferIdx, Class, Port, Segment, TransferBytes, own_segments};
use crate::target::{Memory, Target};
use crate::tensor::Tensor;
use alloc::{Allocator, Block, Driver, Event, Kind, Stats};
use std::collections::{BTreeMap, HashSet};
use std::mem::take;

pub mod alloc;
pub mod compare;
pub mod told;

/// The kernels of a graph in the order of the file, with the lifetime of each tensor.
#[derive(Debug)]
pub struct Program {
    draft: Draft,
    /// Buffers that are allocated once, before the first run: constants that a step reads, then states, then inputs.
    resident: Vec<BufferIdx>,
    /// Per step, the buffers to allocate before it: those that it writes first.
    allocs: Vec<Vec<BufferIdx>>,
    /// Per step, the buffers to free after it: those that no later step uses. Outputs are freed after the run.
    frees: Vec<Vec<BufferIdx>>,
    inputs: Vec<Port>,
    outputs: Vec<Port>,
    states: Vec<Port>,
    /// The staging segments that a plan would have, and those of the backend's own.
    staging: Vec<Segment>,
}

impl Program {
    /// Lowers a graph whose passes have run. Needs no device.
    ///
    /// # Errors
    /// The target has no type for a value, or a node has no kernel.
    pub fn new(prepared: &Prepared, target: &Target) -> Result<Program> {
        let mut draft = lowered(prepared, target, Options { join: false })?;
        // Steps are in an order in which results take the places of what they lie over.
        let own: Vec<BufferIdx> = BufferIdx::all(&draft.buffers).map(|b| draft.root(b)).collect();
        for (_, _, output) in &mut draft.outputs {
            *output = own[*output];
        }
        for buffer in draft.steps.iter_mut().flat_map(|step| step.reads.iter_mut().chain(&mut step.writes)) {
            *buffer = own[*buffer];
        }
        let Prepared { graph, indexes, .. } = prepared;
        let mut last = vec![None; draft.buffers.len()];
        for (s, step) in draft.steps.iter().enumerate() {
            step.reads.iter().chain(&step.writes).for_each(|&b| last[b] = Some(s));
        }
        let read = draft.constants.iter().map(|c| c.buffer).filter(|&b| last[b].is_some());
        let states = draft.states.iter().map(|state| state.buffer);
        let resident: Vec<BufferIdx> = read.chain(states).chain(draft.inputs.iter().map(|&(_, b)| b)).collect();
        let kept: HashSet<BufferIdx> = draft.outputs.iter().map(|&(_, _, b)| b).collect();
        let mut allocs = vec![Vec::new(); draft.steps.len()];
        let mut frees = vec![Vec::new(); draft.steps.len()];
        let mut seen = vec![false; draft.buffers.len()];
        resident.iter().for_each(|&b| seen[b] = true);
        for (s, step) in draft.steps.iter().enumerate() {
            for &b in &step.writes {
                if !std::mem::replace(&mut seen[b], true) {
                    allocs[s].push(b);
                    if !kept.contains(&b) {
                        frees[last[b].expect("a buffer that a step writes has a last step")].push(b);
                    }
                }
            }
        }
        let port = |name: &str, value, buffer| {
            let fact = graph.fact(value);
            Port {
                name: name.to_owned(),
                dtype: fact.dtype,
                shape: fact.shape.clone(),
                buffer,
                packed: draft.packed.contains(&buffer),
                indexes: indexes.get(&value).cloned().unwrap_or_default(),
                counted: Vec::new(),
                fewest: graph.fewest(name).cloned(),
            }
        };
        let inputs = draft.inputs.iter().map(|&(v, b)| port(graph.value_name(v), v, b)).collect();
        let outputs = draft.outputs.iter().map(|(name, v, b)| port(name, *v, *b)).collect();
        let states =
            draft.states.iter().map(|state| port(graph.value_name(state.value), state.value, state.buffer)).collect();
        let sum = |class| {
            let of = draft.buffers.iter().zip(&last).filter(|(b, last)| {
                let kept = last.is_some() || matches!(class, Class::Input | Class::State);
                b.class == class && !b.is_update() && kept
            });
            of.map(|(buffer, _)| buffer.bytes.next_multiple_of(target.alignment)).sum()
        };
        let staging = TransferBytes::of(sum).staging(target).chain(own_segments(target, &[&draft])).collect();
        Ok(Program { draft, resident, allocs, frees, inputs, outputs, states, staging })
    }

    /// The kernels and buffers.
    pub fn draft(&self) -> &Draft {
        &self.draft
    }

    /// Number of kernel launches in a run.
    pub fn launches(&self) -> usize {
        self.draft.steps.len()
    }

    /// Bytes of the staging segments, and of the backend's own. They are the same with every allocator.
    pub fn staging_bytes(&self) -> u64 {
        self.staging.iter().map(|s| s.bytes).sum()
    }

    /// Number of allocations in a run: one per tensor and per workspace.
    pub fn allocations(&self) -> usize {
        self.allocs.iter().map(Vec::len).sum()
    }

    /// The requests to an allocator: those of loading, then those of `runs` runs.
    pub fn trace(&self, runs: usize) -> Vec<Event> {
        let alloc = |&b: &BufferIdx| Event::Alloc { id: b.index(), bytes: self.draft.buffers[b].bytes };
        let free = |b: &BufferIdx| Event::Free { id: b.index() };
        let mut trace: Vec<Event> = self.resident.iter().map(alloc).collect();
        for _ in 0..runs {
            for (allocs, frees) in self.allocs.iter().zip(&self.frees) {
                trace.extend(allocs.iter().map(alloc));
                trace.extend(frees.iter().map(free));
            }
            let own = self.outputs.iter().filter(|p| !self.resident.contains(&p.buffer));
            trace.extend(own.map(|p| free(&p.buffer)));
        }
        trace
    }
}

/// The history of memory from the empty device to the end of the first run.
#[derive(Clone, Debug, Default)]
pub struct Log {
    /// Each act with its time, in order. Time is in half steps: step `s` lasts from `2 s` to `2 s + 2`. Buffers are allocated
    /// when a step begins and freed when a step ends.
    pub acts: Vec<(usize, Act)>,
    now: usize,
}

/// One change of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Act {
    /// The allocator gets a segment from the device: its number and its bytes.
    Reserve(u64, u64),
    /// The allocator gives a segment back to the device.
    Release(u64),
    /// A buffer gets a block.
    Take(BufferIdx, Block),
    /// A buffer gives its block back.
    Give(BufferIdx),
}

/// A device as an allocator's source of segments.
struct Device {
    backend: Box<dyn Backend>,
    /// The backend's segments and their bytes, by the allocator's ids. These only grow; the backend may use its own again.
    segments: BTreeMap<u64, (SegmentId, u64)>,
    next: u64,
    /// Bytes that the allocator holds.
    used: u64,
    /// The most bytes that the allocator may hold.
    limit: u64,
    /// True if segments come from the device's own pool.
    pooled: bool,
    /// Staging segments, which the allocator does not manage.
    staging: Vec<SegmentId>,
    staging_bytes: u64,
    /// Why the device refused the last request. `None` if the limit did.
    refused: Option<String>,
    /// The history so far, until the first run ends, if a caller asked for it.
    log: Option<Log>,
}

impl Device {
    fn log(&mut self, act: Act) {
        if let Some(log) = &mut self.log {
            log.acts.push((log.now, act));
        }
    }

    fn at(&mut self, half: usize) {
        if let Some(log) = &mut self.log {
            log.now = half;
        }
    }
}

impl Driver for Device {
    fn malloc(&mut self, bytes: u64) -> Option<u64> {
        let used = self.used.checked_add(bytes).filter(|&used| used <= self.limit)?;
        let largest = self.backend.target().max_segment;
        if bytes > largest {
            self.refused = Some(format!("a segment has at most {largest} bytes on this device"));
            return None;
        }
        let segment =
            if self.pooled { self.backend.alloc_pooled(bytes) } else { self.backend.alloc(bytes, Memory::Device) };
        match segment {
            Ok(segment) => {
                self.used = used;
                self.next += 1;
                self.segments.insert(self.next, (segment, bytes));
                self.log(Act::Reserve(self.next, bytes));
                Some(self.next)
            }
            Err(error) => {
                self.refused = Some(error.to_string());
                None
            }
        }
    }

    fn free(&mut self, segment: u64) {
        self.log(Act::Release(segment));
        let (segment, bytes) = self.segments.remove(&segment).expect("a segment is freed once");
        self.used -= bytes;
        self.backend.free(segment);
    }

    fn limit(&self) -> u64 {
        self.limit
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        for (segment, _) in take(&mut self.segments).into_values() {
            self.backend.free(segment);
        }
        self.staging.drain(..).for_each(|s| self.backend.free(s));
    }
}

/// The last launch of a step. Its record is used again if the next run gives the step the same blocks.
struct Recorded {
    blocks: Vec<Block>,
    record: RecordId,
}

/// A program that is loaded on a device and runs through an allocator.
pub struct Eager<'a> {
    program: &'a Program,
    device: Device,
    allocator: Box<dyn Allocator>,
    kernels: Vec<KernelId>,
    /// Per buffer, its block while it is live.
    blocks: Vec<Option<Block>>,
    recorded: Vec<Option<Recorded>>,
    /// The history up to the end of the first run, once that is over.
    log: Option<Log>,
}

impl std::fmt::Debug for Eager<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Eager").field("stats", &self.stats()).finish_non_exhaustive()
    }
}

/// The type in which a port's elements are stored, and their place.
fn stored(port: &Port, places: &BTreeMap<BufferIdx, (DType, Slice)>) -> (DType, Slice) {
    let (dtype, at) = places[&port.buffer];
    (port.stored(dtype), at)
}

impl<'a> Eager<'a> {
    /// Compiles the kernels and writes the constants to the device. At most `limit` bytes of the device are used. `log` is
    /// [kept](Eager::log) until the end of the first run, if there is one.
    ///
    /// # Errors
    /// [`Error::Fit`] if constants and inputs exceed the limit or the device; any other error of the device.
    pub fn load(
        program: &'a Program,
        backend: Box<dyn Backend>,
        kind: Kind,
        limit: Option<u64>,
        log: Option<Log>,
    ) -> Result<Eager<'a>> {
        let limit = limit.unwrap_or(u64::MAX);
        let (draft, staging_bytes) = (&program.draft, program.staging_bytes());
        let limit = limit.checked_sub(staging_bytes).ok_or_else(|| Error::Fit {
            what: "staging and the backend's own".into(),
            needed: staging_bytes,
            limit,
            file: None,
        })?;
        let device = Device {
            backend,
            segments: BTreeMap::new(),
            next: 0,
            used: 0,
            limit,
            pooled: kind == Kind::Async,
            staging: Vec::new(),
            staging_bytes,
            refused: None,
            log,
        };
        let mut eager = Eager {
            program,
            device,
            allocator: kind.build(limit),
            kernels: Vec::with_capacity(draft.kernels.len()),
            blocks: vec![None; draft.buffers.len()],
            recorded: draft.steps.iter().map(|_| None).collect(),
            log: None,
        };
        for Segment { bytes, memory, .. } in &program.staging {
            let segment = eager.device.backend.alloc(*bytes, *memory)?;
            eager.device.staging.push(segment);
        }
        program.resident.iter().try_for_each(|&b| eager.alloc(b))?;
        for constant in draft.constants.iter().filter(|c| eager.blocks[c.buffer].is_some()) {
            let (stored, at) = eager.place(constant.buffer);
            let packed = constant.packed.and_then(|(kernel, operand)| Some((&draft.kernels[kernel?], operand)));
            exec::write_constant(&mut *eager.device.backend, at, stored, packed, &constant.constant)?;
        }
        for state in &draft.states {
            let (stored, at) = eager.place(state.buffer);
            exec::write_initial(&mut *eager.device.backend, at, stored, state.initial.as_deref())?;
        }
        for kernel in &draft.kernels {
            eager.kernels.push(eager.device.backend.compile(kernel)?);
        }
        Ok(eager)
    }

    /// Runs the graph once. Inputs and outputs are in the graph's order.
    ///
    /// # Errors
    /// [`Error::Fit`] if the allocator has no bytes for a tensor; all blocks of the run are then freed. An input has another
    /// type or shape than the graph needs, or the device fails.
    pub fn run(&mut self, inputs: &[Tensor]) -> Result<Vec<Tensor>> {
        let outputs = self.attempt(inputs);
        // This frees the outputs, which have been read, and all that is live after a failure.
        for buffer in self.program.allocs.iter().flatten() {
            self.free(*buffer);
        }
        if let Some(log) = self.device.log.take() {
            self.log = Some(log);
        }
        outputs
    }

    /// The states as they are now, in the graph's order.
    ///
    /// # Errors
    /// When the device fails.
    pub fn states(&mut self) -> Result<Vec<Tensor>> {
        let states = &self.program.states;
        let places: BTreeMap<BufferIdx, _> = states.iter().map(|p| (p.buffer, self.place(p.buffer))).collect();
        exec::read_outputs(&mut *self.device.backend, states, &|port| stored(port, &places))
    }

    /// The history of memory up to the end of the first run, if that is over and was logged.
    pub fn log(&self) -> Option<&Log> {
        self.log.as_ref()
    }

    /// The allocator's statistics so far.
    pub fn stats(&self) -> Stats {
        self.allocator.stats()
    }

    /// The device.
    pub fn backend(&self) -> &dyn Backend {
        &*self.device.backend
    }

    fn attempt(&mut self, inputs: &[Tensor]) -> Result<Vec<Tensor>> {
        let program = self.program;
        let places: BTreeMap<BufferIdx, _> = program.inputs.iter().map(|p| (p.buffer, self.place(p.buffer))).collect();
        exec::write_inputs(&mut *self.device.backend, &program.inputs, &|port| stored(port, &places), inputs)?;
        for (step, (allocs, frees)) in program.allocs.iter().zip(&program.frees).enumerate() {
            self.device.at(2 * step);
            allocs.iter().try_for_each(|&b| self.alloc(b))?;
            self.launch(step)?;
            self.device.at(2 * step + 2);
            frees.iter().for_each(|&b| self.free(b));
        }
        let places: BTreeMap<BufferIdx, _> = program.outputs.iter().map(|p| (p.buffer, self.place(p.buffer))).collect();
        exec::read_outputs(&mut *self.device.backend, &program.outputs, &|port| stored(port, &places))
    }

    fn launch(&mut self, index: usize) -> Result<()> {
        let step = &self.program.draft.steps[index];
        let buffers = || step.reads.iter().chain(&step.writes).copied();
        let block = |b: BufferIdx| self.blocks[b].expect("a buffer lives from its first write to its last use");
        let record = match &self.recorded[index] {
            Some(last) if buffers().map(block).eq(last.blocks.iter().copied()) => last.record,
            _ => {
                let args = buffers().enumerate().map(|(slot, b)| {
                    let whole = self.place(b).1;
                    let bind_range = step.bind_ranges.get(slot);
                    bind_range.map_or(whole, |w| Slice { offset: whole.offset + w.offset, bytes: w.bytes, ..whole })
                });
                let args = args.collect();
                let launch = Launch::new(self.kernels[step.kernel], args);
                let record = self.device.backend.record(&[launch])?;
                self.recorded[index] = Some(Recorded { blocks: buffers().map(block).collect(), record });
                record
            }
        };
        self.device.backend.replay(record)
    }

    /// The stored type and the bytes of a live buffer.
    fn place(&self, buffer: BufferIdx) -> (DType, Slice) {
        let block = self.blocks[buffer].expect("a buffer is placed while it is live");
        let (segment, _) = self.device.segments[&block.segment];
        let of = &self.program.draft.buffers[buffer];
        (of.dtype, Slice { segment, offset: block.offset, bytes: of.bytes })
    }

    fn alloc(&mut self, buffer: BufferIdx) -> Result<()> {
        let bytes = self.program.draft.buffers[buffer].bytes;
        self.device.refused = None;
        let block = self.allocator.alloc(&mut self.device, bytes).map_err(|error| self.device.explain(error))?;
        self.blocks[buffer] = Some(block);
        self.device.log(Act::Take(buffer, block));
        Ok(())
    }

    fn free(&mut self, buffer: BufferIdx) {
        if let Some(block) = self.blocks[buffer].take() {
            self.device.log(Act::Give(buffer));
            self.allocator.free(&mut self.device, block);
        }
    }
}

impl Device {
    /// Adds staging to the figures of an error. If the device refused, rather than the limit, adds the device's reason.
    fn explain(&mut self, error: Error) -> Error {
        let Error::Fit { mut what, needed, mut limit, file } = error else { return error };
        if let Some(reason) = self.refused.take() {
            what += &format!(" ({reason})");
            limit = limit.min(self.used);
        }
        let [needed, limit] = [needed, limit].map(|bytes| bytes.saturating_add(self.staging_bytes));
        Error::Fit { what, needed, limit, file }
    }
}
