//! The host as a device: kernels are compiled to block programs, which a pool of threads runs.
//!
//! ```text
//! Kernel --compile--> Compiled (nests, programs, tasks)     one per kernel, immutable
//! Launch --record--->  addresses, checked once              one list per record
//!        --replay--->  threads: task after task             nothing is allocated here
//! ```
//!
//! Kernels read and write segments, whose bytes the plan knows. Each thread also has registers for block programs and tile memory for blocks
//! of products. They lie in a segment of [`Memory::Scratch`](Place::Scratch), which a plan has. Without one, the backend takes them when it
//! records, and [`Usage::overhead`] counts them. Stacks of threads and tables of kernels are a segment of [`Memory::Own`](Place::Own), or
//! overhead, too.

use check::Check;
pub use memory::{Line, Region};
use memory::{Memory, refuse};
use plimsoll_backend::ranks::{Exchanged, Ranks};
use plimsoll_backend::records::Records;
use plimsoll_backend::work::{Loops, Work};
use plimsoll_backend::{Backend, KernelId, Launch, RecordId, SegmentId, Slice, Usage};
use plimsoll_core::error::Result;
use plimsoll_core::kernel::{Collective, Exchange, Kernel, Template};
use plimsoll_core::target::{Memory as Place, Target};
use simd::Isa;
use std::cell::UnsafeCell;
use std::collections::HashMap;
use std::sync::Arc;
use task::{Args, Compiled, Needs, Scratch};
use thread_pool::ThreadPool;

mod attention;
mod block;
mod check;
pub mod conv;
mod copy;
mod epilogue;
mod filters;
pub mod gemm;
mod halves;
mod index;
mod map;
pub mod math;
mod memory;
mod moves;
mod nest;
mod operands;
mod packed;
mod product;
mod program;
mod prologue;
mod reduction;
mod rewrite;
mod row;
mod scan;
mod scatter;
mod shares;
pub mod simd;
mod slide;
mod sort;
mod task;
mod thread_pool;
mod tile;
pub mod window;

/// A kernel that writes no elements.
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

struct Step {
    kernel: usize,
    args: Args,
    /// What it exchanges with other ranks, if it does.
    exchanged: Option<Exchanged>,
}

/// The host's processor and memory.
pub struct Cpu {
    target: Target,
    isa: Isa,
    pool: ThreadPool,
    memory: Memory,
    kernels: Vec<(Box<dyn Compiled>, Check)>,
    loops: Loops,
    /// What kernels exchange with other ranks, and the bytes before each rank's elements in its arguments.
    exchanges: HashMap<usize, (Exchanged, [usize; 2])>,
    ranks: Option<Arc<dyn Ranks>>,
    records: Records<Vec<Work<Step>>>,
    /// One per thread, used by that thread alone.
    scratch: Vec<UnsafeCell<Scratch>>,
    /// Bytes of scratch memory that each thread has.
    thread_bytes: u64,
    /// Bytes that it must have for the compiled kernels.
    needed: u64,
    /// The segment of the scratch memory.
    scratch_segment: Option<SegmentId>,
    /// The scratch memory if no segment has room for it.
    own_scratch: Vec<Line>,
    /// Bytes of the kernels' tables.
    tables: u64,
}

/// Bytes that the backend takes for itself to run a kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OwnBytes {
    /// Scratch memory of each thread.
    pub thread: u64,
    /// Tables, whatever the number of threads.
    pub tables: u64,
}

/// The bytes that the backend takes for itself to run a kernel. Those of a kernel that it refuses are none.
pub fn own_bytes(kernel: &Kernel, threads: usize) -> OwnBytes {
    if let Some(repeat) = kernel.repeat() {
        let all = repeat.kernels.iter().map(|inner| own_bytes(inner, threads));
        return all.fold(OwnBytes::default(), |sum, own| OwnBytes {
            thread: sum.thread.max(own.thread),
            tables: sum.tables + own.tables,
        });
    }
    if kernel.is_the_backends() {
        return OwnBytes::default();
    }
    let checked = Check::new(kernel).and_then(|_| compile(kernel, Isa::PORTABLE, threads, true));
    let needs = checked.map_or(Needs::default(), |compiled| compiled.needs());
    OwnBytes { thread: needs.thread_bytes(), tables: needs.tables }
}

/// The scratch memory of all threads, of which each takes its own.
struct Shared<'a>(&'a [UnsafeCell<Scratch>]);

// SAFETY: threads index it by their own number, and the pool gives no number to two threads.
unsafe impl Sync for Shared<'_> {}

impl Shared<'_> {
    fn of(&self, worker: usize) -> *mut Scratch {
        self.0[worker].get()
    }
}

// SAFETY: the scratch memory's pointers are only meaningful during a task.
unsafe impl Send for Cpu {}

impl Cpu {
    /// A device of `threads` threads (at least one), the caller's own among them, with memory from the system's allocator. There are fewer
    /// if the system refuses a thread.
    pub fn new(threads: usize) -> Cpu {
        Cpu::build(threads, Memory::system())
    }

    /// The same, with segments in memory that the host program lends.
    pub fn with_arena(threads: usize, arena: Region) -> Cpu {
        Cpu::build(threads, Memory::within(arena))
    }

    fn build(threads: usize, memory: Memory) -> Cpu {
        let pool = ThreadPool::new(threads);
        Cpu {
            target: Target::cpu(pool.threads() as u32),
            isa: Isa::detect(),
            memory,
            kernels: Vec::new(),
            loops: Loops::default(),
            exchanges: HashMap::new(),
            ranks: None,
            records: Records::default(),
            scratch: (0..pool.threads()).map(|worker| UnsafeCell::new(Scratch::new(worker))).collect(),
            thread_bytes: 0,
            needed: 0,
            scratch_segment: None,
            own_scratch: Vec::new(),
            tables: 0,
            pool,
        }
    }

    /// Uses kernels for this instruction set from now on instead of the best one. Results may differ in their last bits.
    pub fn set_isa(&mut self, isa: Isa) {
        self.isa = isa;
    }

    /// Gives each thread its part of the scratch memory at `start`.
    fn share_scratch(&mut self, start: *mut u8, bytes: u64) {
        let line = size_of::<Line>() as u64;
        self.thread_bytes = bytes / self.scratch.len() as u64 / line * line;
        let each = self.thread_bytes as usize;
        for (worker, scratch) in self.scratch.iter_mut().enumerate() {
            let scratch = scratch.get_mut();
            scratch.mem = start.wrapping_add(worker * each);
            scratch.end = scratch.mem.wrapping_add(each);
        }
    }

    /// Takes scratch memory, unless the threads have enough for the compiled kernels.
    fn provide_scratch(&mut self) {
        if self.thread_bytes < self.needed {
            let bytes = self.needed * self.scratch.len() as u64;
            self.own_scratch = vec![Line::ZERO; bytes as usize / size_of::<Line>()];
            let start = self.own_scratch.as_mut_ptr().cast();
            self.share_scratch(start, bytes);
        }
    }

    fn compile_collective(&mut self, kernel: &Kernel, collective: &Collective) -> Result<KernelId> {
        let joined = self.ranks.is_some() || collective.ranks == 1;
        if !joined {
            return Err(refuse(format!("{collective}: expected a rank of a mesh, found a device that runs alone")));
        }
        let check = Check::new(kernel).map_err(refuse)?;
        let exchanged = Exchanged::of(kernel).expect("the kernel is a collective");
        self.kernels.push((Box::new(Nothing), check));
        self.exchanges.insert(self.kernels.len() - 1, exchanged);
        Ok(KernelId(self.kernels.len() as u32 - 1))
    }

    /// Stacks and tables that no segment counts; negative if segments count more than there are.
    fn uncounted(&self) -> i64 {
        (self.target.stack_bytes() + self.tables) as i64 - self.memory.own_bytes() as i64
    }
}

/// The processor's name if the system tells it, else its architecture.
fn processor() -> String {
    let told = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = told.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
    model.map_or(std::env::consts::ARCH, |(_, name)| name.trim()).to_owned()
}

/// Compiles a kernel by its template. An outline does not run: it has no tables.
fn compile(kernel: &Kernel, isa: Isa, threads: usize, outline: bool) -> Result<Box<dyn Compiled>, String> {
    if kernel.writes.iter().all(|write| write.access.shape.contains(&0)) {
        return Ok(Box::new(Nothing));
    }
    Ok(match &kernel.template {
        Template::Map => match copy::Copy::new(kernel, threads)? {
            Some(copy) => Box::new(copy),
            None => Box::new(map::Map::new(kernel, isa, threads, None)?),
        },
        Template::Row { .. } => Box::new(row::Row::new(kernel, isa, threads)?),
        Template::MatMul | Template::MatMulBits { .. } => Box::new(product::MatMul::new(kernel, isa, threads)?),
        Template::Attention { .. } => Box::new(attention::Attention::new(kernel, isa, threads)?),
        Template::Conv { .. } | Template::ConvTranspose { .. } | Template::Pool { .. } => {
            Box::new(slide::Sliding::new(kernel, isa, threads)?)
        }
        Template::Scatter { .. } => Box::new(scatter::Scatter::new(kernel, threads)?),
        Template::Scan { .. } => Box::new(scan::Scan::new(kernel, threads)?),
        Template::Sort { .. } => Box::new(sort::Sort::new(kernel, threads)?),
        _ => {
            let core = index::core(kernel)?;
            let core = if outline { core.outline() } else { core };
            Box::new(map::Map::new(kernel, isa, threads, Some(core))?)
        }
    })
}

impl Backend for Cpu {
    fn target(&self) -> &Target {
        &self.target
    }

    fn identity(&self) -> String {
        format!("cpu, {}, {}, {} threads", processor(), self.isa.name(), self.target.threads)
    }

    fn usage(&self) -> Usage {
        let overhead = size_of_val(&self.own_scratch[..]) as u64 + self.uncounted().max(0) as u64;
        Usage { overhead: Some(overhead), ..self.memory.usage() }
    }

    fn alloc(&mut self, bytes: u64, place: Place) -> Result<SegmentId> {
        if matches!(place, Place::Own | Place::Prefetch) {
            return self.memory.note(bytes, place);
        }
        // All other memory is the host's, and kernels work there.
        let place = if matches!(place, Place::Scratch | Place::Pinned) { place } else { Place::Device };
        let (segment, start) = self.memory.alloc(bytes, place)?;
        if place == Place::Scratch {
            self.share_scratch(start, bytes);
            (self.scratch_segment, self.own_scratch) = (Some(segment), Vec::new());
        }
        Ok(segment)
    }

    fn overhead(&self) -> Vec<(&'static str, u64)> {
        let scratch = size_of_val(&self.own_scratch[..]) as u64;
        let parts = [("threads' scratch memory", scratch), ("stacks and tables", self.uncounted().max(0) as u64)];
        parts.into_iter().filter(|part| part.1 != 0).collect()
    }

    fn fork(&mut self, shared: &[SegmentId]) -> Result<Box<dyn Backend>> {
        let mut fork = Cpu::build(self.pool.threads(), self.memory.lend(shared)?);
        fork.set_isa(self.isa);
        Ok(Box::new(fork))
    }

    fn join(&mut self, ranks: Arc<dyn Ranks>) -> Result<()> {
        self.ranks = Some(ranks);
        Ok(())
    }

    fn free(&mut self, segment: SegmentId) {
        self.records.free(segment);
        if self.scratch_segment == Some(segment) {
            // Every record uses it.
            self.records.clear();
            self.scratch_segment = None;
            self.share_scratch(std::ptr::null_mut(), 0);
        }
        self.memory.free(segment);
    }

    fn write(&mut self, at: Slice, data: &[u8]) -> Result<()> {
        let to = self.memory.resolve(at)?;
        if data.len() as u64 != at.bytes {
            return Err(refuse(format!("{} bytes for a slice of {}", data.len(), at.bytes)));
        }
        // SAFETY: the slice is within a segment, no reference points there, and nothing runs: `&mut self`.
        unsafe { to.copy_from_nonoverlapping(data.as_ptr(), data.len()) }
        Ok(())
    }

    fn host_bytes(&mut self, at: Slice) -> Result<Option<&mut [u8]>> {
        let to = self.memory.resolve(at)?;
        // SAFETY: the slice is within a segment, which is initialised from the start; nothing else uses it while `self` is borrowed.
        Ok(Some(unsafe { std::slice::from_raw_parts_mut(to, at.bytes as usize) }))
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
        if let Some(repeat) = kernel.repeat() {
            let kernels = repeat.kernels.iter().map(|inner| self.compile(inner)).collect::<Result<_>>()?;
            self.kernels.push((Box::new(Nothing), Check::nothing()));
            let id = KernelId(self.kernels.len() as u32 - 1);
            self.loops.insert(id, repeat, kernels);
            return Ok(id);
        }
        if let Some(collective) = kernel.collective() {
            return self.compile_collective(kernel, collective);
        }
        let malformed = |what: String| refuse(format!("kernel {}: {what}", kernel.template.name()));
        let check = Check::new(kernel).map_err(malformed)?;
        let compiled = compile(kernel, self.isa, self.pool.threads(), false).map_err(malformed)?;
        let needs = compiled.needs();
        for scratch in &mut self.scratch {
            scratch.get_mut().provide(needs);
        }
        self.needed = self.needed.max(needs.thread_bytes());
        self.tables += needs.tables;
        self.kernels.push((compiled, check));
        Ok(KernelId(self.kernels.len() as u32 - 1))
    }

    fn record(&mut self, launches: &[Launch]) -> Result<RecordId> {
        let mut step = |launch: Launch| {
            let kernel = launch.kernel.0 as usize;
            let (_, check) = self.kernels.get(kernel).ok_or_else(|| refuse(format!("no kernel {kernel}")))?;
            check.launch(&launch.args).map_err(refuse)?;
            let args = launch.args.iter().map(|&slice| self.memory.resolve(slice)).collect::<Result<_>>()?;
            let exchanged = self.exchanges.get(&kernel).map(|(exchanged, _)| exchanged.clone());
            Ok(Step { kernel, args: Args(args), exchanged })
        };
        let work = self.loops.expand(launches).into_iter().flatten();
        let steps = work.map(|part| part.try_map(&mut step)).collect::<Result<Vec<_>>>()?;
        self.provide_scratch();
        let segments = launches.iter().flat_map(|launch| &launch.args).map(|at| at.segment);
        self.records.insert(steps, segments).ok_or_else(|| refuse("too many records"))
    }

    fn replay(&mut self, record: RecordId) -> Result<()> {
        let Cpu { records, kernels, scratch, pool, exchanges, ranks, .. } = self;
        let steps = records.get(record).ok_or_else(|| refuse("replay of a record whose memory is gone"))?;
        let scratch = Shared(scratch);
        let mut run = |step: &Step| {
            if let Some(exchanged) = &step.exchanged {
                let (_, [read, write]) = exchanges[&step.kernel];
                let written = *step.args.0.last().expect("a collective writes");
                let (read, write) = (step.args.0[0].wrapping_add(read), written.wrapping_add(write));
                if let Exchange::Send { .. } = exchanged.collective.exchange {
                    // SAFETY: the launch was checked when it was recorded: what it writes is a mark.
                    unsafe { write.cast::<i32>().write(0) };
                }
                return match ranks {
                    // SAFETY: the launch was checked when it was recorded: both have as many elements as are exchanged.
                    Some(ranks) => unsafe { ranks.exchange(exchanged, read, write) },
                    // A group of one rank has what it gives; of what two would pass, nothing.
                    None => {
                        // SAFETY: as above.
                        unsafe {
                            std::ptr::copy(read, write, exchanged.gave().min(exchanged.got()) * exchanged.dtype.size())
                        };
                        Ok(())
                    }
                };
            }
            let kernel = &*kernels[step.kernel].0;
            let scratch = &scratch;
            // SAFETY: the launch was checked when it was recorded and its segments are not freed. Scratch memory was provided then, too,
            // and the pool gives each thread a number of its own.
            for phase in 0..kernel.phases() {
                pool.run(kernel.tasks(phase), &|task, worker| unsafe {
                    kernel.run(phase, task, &step.args, &mut *scratch.of(worker));
                });
            }
            Ok(())
        };
        steps.iter().try_for_each(|part| part.run(&mut run))
    }
}
