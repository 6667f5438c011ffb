//! The host as a device: kernels are compiled to block programs, which a pool of threads runs.
//!
//! ```text
//! Kernel --compile--> Compiled (nests, programs, tasks)     one per kernel, immutable
//! Launch --record--->  addresses, checked once              one list per record
//!        --replay--->  threads: task after task             nothing is allocated here
//! ```
//!
//! Kernels read and write segments, whose bytes the plan knows. Each thread also has registers for block programs and tile memory for blocks
//! of products. It takes them when the device is opened or a kernel is compiled; [`Usage::overhead`] counts them.

use super::records::Records;
use super::{Backend, KernelId, Launch, RecordId, SegmentId, Slice, Usage};
use crate::error::Result;
use crate::kernel::cpu::TILE_BYTES;
use crate::kernel::{Kernel, Template};
use crate::target::{Memory as Place, Target};
use check::Check;
pub use memory::{Line, Region};
use memory::{Memory, refuse};
use simd::Isa;
use std::cell::UnsafeCell;
use task::{Args, Compiled, Needs, Scratch};
use thread_pool::ThreadPool;

mod attention;
mod block;
mod check;
pub mod conv;
mod copy;
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
mod scatter;
mod shares;
pub mod simd;
mod slide;
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
}

/// The host's processor and memory.
pub struct Cpu {
    target: Target,
    isa: Isa,
    pool: ThreadPool,
    memory: Memory,
    kernels: Vec<(Box<dyn Compiled>, Check)>,
    records: Records<Vec<Step>>,
    /// One per thread, used by that thread alone.
    scratch: Vec<UnsafeCell<Scratch>>,
    scratch_bytes: u64,
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
        let tile = || vec![Line::ZERO; TILE_BYTES as usize / size_of::<Line>()];
        let scratch = |worker| UnsafeCell::new(Scratch { worker, tile: tile(), ..Scratch::default() });
        let mut cpu = Cpu {
            target: Target::cpu(pool.threads() as u32),
            isa: Isa::detect(),
            memory,
            kernels: Vec::new(),
            records: Records::default(),
            scratch: (0..pool.threads()).map(scratch).collect(),
            scratch_bytes: 0,
            pool,
        };
        cpu.count_scratch();
        cpu
    }

    /// Uses kernels for this instruction set from now on instead of the best one. Results may differ in their last bits.
    pub fn set_isa(&mut self, isa: Isa) {
        self.isa = isa;
    }

    /// Counts the bytes that the threads hold now: their tile memory and their registers.
    fn count_scratch(&mut self) {
        let bytes = |s: &mut UnsafeCell<Scratch>| {
            let s = s.get_mut();
            (size_of_val(&s.tile[..]) + size_of_val(&s.mem[..])) as u64
        };
        self.scratch_bytes = self.scratch.iter_mut().map(bytes).sum();
    }
}

/// The processor's name if the system tells it, else its architecture.
fn processor() -> String {
    let told = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = told.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
    model.map_or(std::env::consts::ARCH, |(_, name)| name.trim()).to_owned()
}

/// Compiles a kernel by its template.
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
        Template::Scatter { .. } => Box::new(scatter::Scatter::new(kernel, threads)?),
        _ => Box::new(map::Map::new(kernel, isa, threads, Some(index::core(kernel)?))?),
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
        let malformed = |what: String| refuse(format!("kernel {}: {what}", kernel.template.name()));
        let check = Check::new(kernel).map_err(malformed)?;
        let compiled = compile(kernel, self.isa, self.pool.threads()).map_err(malformed)?;
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
        let Cpu { records, kernels, scratch, pool, .. } = self;
        let steps = records.get(record).ok_or_else(|| refuse("replay of a record whose memory is gone"))?;
        let scratch = Shared(scratch);
        for step in steps {
            let kernel = &*kernels[step.kernel].0;
            let scratch = &scratch;
            // SAFETY: the launch was checked when it was recorded and its segments are not freed. Scratch memory was provided when the kernel
            // was compiled, and the pool gives each thread a number of its own.
            for phase in 0..kernel.phases() {
                pool.run(kernel.tasks(phase), &|task, worker| unsafe {
                    kernel.run(phase, task, &step.args, &mut *scratch.of(worker));
                });
            }
        }
        Ok(())
    }
}
