//! The host as a device: kernels are compiled to block programs and run by a small crew of threads.
//!
//! ```text
//! Kernel --compile--> Compiled (nests, programs, tasks)     one per kernel, immutable
//! Launch --record--->  addresses, checked once              one list per record
//!        --replay--->  crew: task after task                nothing is allocated here
//! ```
//!
//! All that kernels read and write lies in segments, whose bytes the plan knows. What the machinery needs on top, registers of
//! the block programs and tile memory for blocks of products, each thread holds from the time the device is opened or a kernel is
//! compiled; [`Usage::overhead`] tells how much.

use super::records::Records;
use super::{Backend, KernelId, Launch, RecordId, SegmentId, Slice, Usage};
use crate::error::{Error, Result};
use crate::kernel::layout::{Slots, TILE_BYTES, slots};
use crate::kernel::{Kernel, Template};
use crate::target::{Memory as Place, Target};
use check::Check;
use crew::Crew;
use memory::Memory;
pub use memory::{Line, Region};
use simd::Isa;
use std::cell::UnsafeCell;

mod attention;
mod block;
mod check;
pub mod conv;
mod copy;
mod crew;
pub mod gemm;
mod index;
mod map;
pub mod math;
mod memory;
mod moves;
mod nest;
mod operands;
mod product;
mod program;
mod prologue;
mod reduction;
mod rewrite;
mod row;
mod shares;
pub mod simd;
mod slide;
mod tile;
pub mod window;

/// Addresses of a launch's arguments.
struct Args(Vec<*mut u8>);

// SAFETY: addresses; `Compiled::run`'s contract is what makes using them sound.
unsafe impl Send for Args {}
// SAFETY: as above.
unsafe impl Sync for Args {}

impl Args {
    /// The address `position` bytes into argument `arg`.
    #[inline(always)]
    fn at(&self, arg: usize, position: isize) -> *mut u8 {
        self.0[arg].wrapping_offset(position)
    }
}

/// What a kernel needs of each thread's scratch memory.
#[derive(Clone, Copy, Debug, Default)]
struct Needs {
    /// Bytes of block registers.
    bytes: usize,
    /// Base pointers.
    bases: usize,
    /// Axes of its nest.
    rank: usize,
    /// Operands of its nest.
    motions: usize,
}

/// A thread's own memory: block registers and loop counters.
#[derive(Default)]
struct Scratch {
    /// The thread's number.
    worker: usize,
    /// [`TILE_BYTES`] for the blocks of products and windows.
    tile: Vec<Line>,
    mem: Vec<Line>,
    bases: Vec<*mut u8>,
    index: Vec<usize>,
    at: Vec<isize>,
}

impl Scratch {
    fn provide(&mut self, needs: Needs) {
        fn grow<T: Clone>(list: &mut Vec<T>, len: usize, value: T) {
            if list.len() < len {
                list.resize(len, value);
            }
        }
        grow(&mut self.mem, needs.bytes.div_ceil(size_of::<Line>()), Line::ZERO);
        grow(&mut self.bases, needs.bases, std::ptr::null_mut());
        grow(&mut self.index, needs.rank, 0);
        grow(&mut self.at, needs.motions, 0);
    }
}

/// A kernel that is ready to run.
trait Compiled: Send + Sync {
    /// What it needs of each thread's scratch memory.
    fn needs(&self) -> Needs;

    /// How many phases follow one another.
    fn phases(&self) -> usize {
        1
    }

    /// Into how many tasks a phase is cut. They are independent.
    fn tasks(&self, phase: usize) -> usize;

    /// Runs one task.
    ///
    /// # Safety
    /// `args` must have passed [`Check::launch`] for the same kernel, `scratch` have what [`Compiled::needs`] says, and nothing else may
    /// use the memory behind `args` but other tasks of the same phase, each once. Earlier phases must be complete.
    unsafe fn run(&self, phase: usize, task: usize, args: &Args, scratch: &mut Scratch);
}

/// A kernel that writes no elements, however many rows of none there are.
struct Nothing;

impl Compiled for Nothing {
    fn needs(&self) -> Needs {
        Needs::default()
    }

    fn tasks(&self, _: usize) -> usize {
        0
    }

    unsafe fn run(&self, _: usize, _: usize, _: &Args, _: &mut Scratch) {}
}

/// How the tasks of a kernel share its workspace.
#[derive(Clone, Copy, Debug, Default)]
struct Workspace {
    /// The launch's argument.
    arg: usize,
    /// Bytes in front that all share.
    shared: u64,
    /// Bytes of each slot, and how many there are; none when the threads' tile memory serves.
    each: u64,
    count: u64,
    /// Number of tasks: as many as slots at most, or any number if there is a slot for every thread.
    tasks: usize,
}

impl Workspace {
    /// For a kernel that would like to be cut into `tasks` tasks.
    fn new(kernel: &Kernel, threads: usize, tasks: usize) -> Result<Workspace, String> {
        let slots = slots(kernel, threads);
        let Slots { shared, each, .. } = slots;
        let arg = kernel.reads.len() + kernel.writes.len();
        if kernel.workspace == 0 && slots.in_tile() {
            return Ok(Workspace { arg, shared, each, count: 0, tasks });
        }
        let count = match kernel.workspace.checked_sub(shared) {
            Some(_) if each == 0 => u64::MAX,
            Some(rest) => rest / each,
            None => 0,
        };
        if count == 0 {
            return Err(format!("a workspace of {} bytes, at least {} needed", kernel.workspace, shared + each));
        }
        let tasks = if count >= threads as u64 { tasks } else { tasks.min(count as usize) };
        Ok(Workspace { arg, shared, each, count, tasks })
    }

    /// The share of `items` that is a task's.
    fn share(&self, items: usize, task: usize) -> std::ops::Range<usize> {
        shares::portion(items, task, self.tasks)
    }

    /// The slot of a task that a worker runs.
    ///
    /// # Safety
    /// As for [`Compiled::run`]; a task may hold one slot at a time.
    unsafe fn slot<'a>(&self, args: &Args, task: usize, scratch: &mut Scratch) -> &'a mut [f32] {
        if self.each == 0 {
            return &mut [];
        }
        if self.count == 0 {
            // SAFETY: the tile memory is `TILE_BYTES` long, which no slot exceeds, and the worker's own until the task ends.
            return unsafe { std::slice::from_raw_parts_mut(scratch.tile.as_mut_ptr().cast(), self.each as usize / 4) };
        }
        let worker = scratch.worker;
        let slot = if self.tasks as u64 <= self.count { task as u64 } else { worker as u64 };
        let at = args.at(self.arg, (self.shared + slot * self.each) as isize);
        // SAFETY: inside the workspace, whose size was checked; slots are apart, and no two tasks at work have the same.
        unsafe { std::slice::from_raw_parts_mut(at.cast(), self.each as usize / 4) }
    }
}

struct Step {
    kernel: usize,
    args: Args,
}

/// The host's processor and memory.
pub struct Cpu {
    target: Target,
    isa: Isa,
    crew: Crew,
    memory: Memory,
    kernels: Vec<(Box<dyn Compiled>, Check)>,
    records: Records<Vec<Step>>,
    /// One per thread, used by that thread alone.
    scratch: Vec<UnsafeCell<Scratch>>,
    scratch_bytes: u64,
}

/// The scratch memory of all threads, of which each takes its own.
struct Shared<'a>(&'a [UnsafeCell<Scratch>]);

// SAFETY: threads index it by their own number, and the crew gives no number to two threads.
unsafe impl Sync for Shared<'_> {}

impl Shared<'_> {
    fn of(&self, worker: usize) -> *mut Scratch {
        self.0[worker].get()
    }
}

// SAFETY: the scratch memory's pointers are only meaningful during a task.
unsafe impl Send for Cpu {}

impl Cpu {
    /// A device of `threads` threads (at least one), the caller's own among them, with memory from the system's allocator. When the
    /// system refuses a thread, there are fewer.
    pub fn new(threads: usize) -> Cpu {
        Cpu::build(threads, Memory::system())
    }

    /// The same, with segments carved from memory that the host program provides.
    pub fn with_arena(threads: usize, arena: Region) -> Cpu {
        Cpu::build(threads, Memory::within(arena))
    }

    fn build(threads: usize, memory: Memory) -> Cpu {
        let crew = Crew::new(threads);
        let tile = || vec![Line::ZERO; TILE_BYTES as usize / size_of::<Line>()];
        let scratch = |worker| UnsafeCell::new(Scratch { worker, tile: tile(), ..Scratch::default() });
        let mut cpu = Cpu {
            target: Target::cpu(crew.threads() as u32),
            isa: Isa::detect(),
            memory,
            kernels: Vec::new(),
            records: Records::default(),
            scratch: (0..crew.threads()).map(scratch).collect(),
            scratch_bytes: 0,
            crew,
        };
        cpu.count_scratch();
        cpu
    }

    /// Uses kernels for this instruction set from now on, rather than the best one. Results may differ in their last bits.
    pub fn set_isa(&mut self, isa: Isa) {
        self.isa = isa;
    }

    /// What the threads hold now: their tile memory and their registers.
    fn count_scratch(&mut self) {
        let bytes = |s: &mut UnsafeCell<Scratch>| {
            let s = s.get_mut();
            (size_of_val(&s.tile[..]) + size_of_val(&s.mem[..])) as u64
        };
        self.scratch_bytes = self.scratch.iter_mut().map(bytes).sum();
    }
}

fn refuse(what: impl Into<String>) -> Error {
    Error::Backend { backend: "cpu", what: what.into(), file: None }
}

/// Chooses how to run a kernel.
fn compile(kernel: &Kernel, isa: Isa, threads: usize) -> Result<Box<dyn Compiled>, String> {
    if kernel.writes.iter().all(|write| write.access.shape.contains(&0)) {
        return Ok(Box::new(Nothing));
    }
    Ok(match &kernel.template {
        Template::Map => match copy::Copy::new(kernel, threads)? {
            Some(copy) => Box::new(copy),
            None => Box::new(map::Map::new(kernel, isa, threads, None)?),
        },
        Template::Row { .. } => Box::new(row::Row::new(kernel, isa, threads)?),
        Template::MatMul => Box::new(product::MatMul::new(kernel, isa, threads)?),
        Template::Attention { .. } => Box::new(attention::Attention::new(kernel, isa, threads)?),
        Template::Conv { .. } | Template::ConvTranspose { .. } | Template::Pool { .. } => {
            Box::new(slide::Sliding::new(kernel, isa, threads)?)
        }
        Template::Gather { .. } => Box::new(map::Map::new(kernel, isa, threads, Some(index::gather(kernel)?))?),
        Template::Pad { .. } => Box::new(map::Map::new(kernel, isa, threads, Some(index::pad(kernel)?))?),
        Template::Resize { .. } => Box::new(map::Map::new(kernel, isa, threads, Some(index::resize(kernel)?))?),
    })
}

impl Backend for Cpu {
    fn target(&self) -> &Target {
        &self.target
    }

    fn usage(&self) -> Usage {
        Usage { overhead: self.scratch_bytes, ..self.memory.usage() }
    }

    fn alloc(&mut self, bytes: u64, _: Place) -> Result<SegmentId> {
        // All of its memory is the host's.
        self.memory.alloc(bytes)
    }

    fn free(&mut self, segment: SegmentId) {
        self.records.free(segment);
        self.memory.free(segment);
    }

    fn write(&mut self, at: Slice, data: &[u8]) -> Result<()> {
        let to = self.memory.resolve(at)?;
        if data.len() as u64 != at.bytes {
            return Err(refuse(format!("{} bytes for a slice of {}", data.len(), at.bytes)));
        }
        // SAFETY: the slice lies in a segment, which no reference points into, and nothing runs: `&mut self`.
        unsafe { to.copy_from_nonoverlapping(data.as_ptr(), data.len()) }
        Ok(())
    }

    fn read(&mut self, at: Slice, data: &mut [u8]) -> Result<()> {
        let from = self.memory.resolve(at)?;
        if data.len() as u64 != at.bytes {
            return Err(refuse(format!("{} bytes for a slice of {}", data.len(), at.bytes)));
        }
        // SAFETY: as for `write`; segments are initialised from the start.
        unsafe { from.copy_to_nonoverlapping(data.as_mut_ptr(), data.len()) }
        Ok(())
    }

    fn compile(&mut self, kernel: &Kernel) -> Result<KernelId> {
        let malformed = |what: String| refuse(format!("kernel {}: {what}", kernel.template.name()));
        let check = Check::new(kernel).map_err(malformed)?;
        let compiled = compile(kernel, self.isa, self.crew.threads()).map_err(malformed)?;
        for scratch in &mut self.scratch {
            scratch.get_mut().provide(compiled.needs());
        }
        self.count_scratch();
        self.kernels.push((compiled, check));
        Ok(KernelId(self.kernels.len() as u32 - 1))
    }

    fn record(&mut self, launches: &[Launch]) -> Result<RecordId> {
        let mut steps = Vec::with_capacity(launches.len());
        for launch in launches {
            let kernel = launch.kernel.0 as usize;
            let (_, check) = self.kernels.get(kernel).ok_or_else(|| refuse(format!("no kernel {kernel}")))?;
            check.launch(&launch.args).map_err(refuse)?;
            let args = launch.args.iter().map(|&slice| self.memory.resolve(slice)).collect::<Result<_>>()?;
            steps.push(Step { kernel, args: Args(args) });
        }
        let segments = launches.iter().flat_map(|launch| &launch.args).map(|at| at.segment);
        self.records.insert(steps, segments).ok_or_else(|| refuse("too many records"))
    }

    fn replay(&mut self, record: RecordId) -> Result<()> {
        let Cpu { records, kernels, scratch, crew, .. } = self;
        let steps = records.get(record).ok_or_else(|| refuse("replay of a record whose memory is gone"))?;
        let scratch = Shared(scratch);
        for step in steps {
            let kernel = &*kernels[step.kernel].0;
            let scratch = &scratch;
            // SAFETY: the launch was checked when it was recorded and its segments still stand; scratch memory was provided when the kernel
            // was compiled, and the crew gives each thread a number of its own.
            for phase in 0..kernel.phases() {
                crew.run(kernel.tasks(phase), &|task, worker| unsafe {
                    kernel.run(phase, task, &step.args, &mut *scratch.of(worker));
                });
            }
        }
        Ok(())
    }
}
