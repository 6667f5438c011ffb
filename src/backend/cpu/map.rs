//! Elementwise kernels, and the driver of all kernels that compute a core value per index and feed it to a body.
//!
//! The index space becomes a nest of few axes. Along its innermost axis every operand is one of three: where it lies densely, block
//! instructions read it in place; where it stands still, it is one value per run; anything else is copied into a staging
//! block first. When the innermost axis is short, blocks run across its ends instead (`flat`), and only what is dense or
//! still over the whole index space is read in place.

use super::block::{BLOCK, Repr};
use super::moves;
use super::nest::{Motion, Nest};
use super::program::{Frame, Program, Sink, Source, source};
use super::simd::Isa;
use super::{Args, Compiled, Needs, Scratch, share};
use crate::expr::Code;
use crate::kernel::{Kernel, Operand};

/// Innermost axes shorter than this are run across.
const SHORT: usize = 32;

/// Computes the core values of a template.
pub trait Core: Send + Sync {
    /// The values at `start..start + n` of the innermost axis, where `at` are the positions of the core's motions: a pointer to memory that
    /// already holds them, or else they are written to `to`.
    ///
    /// # Safety
    /// `args` must be the kernel's, `to` writable for `n` elements.
    unsafe fn feed(&self, args: &Args, at: &[isize], start: usize, n: usize, to: *mut u8) -> *const u8;
}

/// What a core needs of the driver.
pub struct CoreSpec<'a> {
    /// How its values lie in memory.
    pub repr: Repr,
    /// What [`Core::feed`] gets the positions of.
    pub motions: Vec<Motion>,
    /// Nanoseconds per value.
    pub cost: f64,
    /// Makes the core, given its motions' steps along the innermost axis and that axis' extent.
    pub build: Box<dyn FnOnce(&[isize], usize) -> Box<dyn Core> + 'a>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Place {
    /// Block instructions use the memory itself.
    Dense,
    /// One value for the whole run.
    Still,
    /// By way of a staging block at this offset of the scratch memory.
    Staged(usize),
}

#[derive(Clone, Copy, Debug)]
enum Feed {
    /// An argument of the launch.
    Memory(usize),
    /// The index itself.
    Index,
    Core,
}

#[derive(Clone, Copy, Debug)]
struct Stream {
    feed: Feed,
    size: usize,
    place: Place,
    /// Along the innermost axis.
    step: isize,
}

/// A compiled elementwise kernel.
pub struct Map {
    isa: Isa,
    /// Without the innermost axis.
    nest: Nest,
    inner: usize,
    flat: bool,
    sources: Vec<Stream>,
    outs: Vec<Stream>,
    /// Which of them, sources first, are staged.
    staged: Vec<usize>,
    program: Program,
    core: Option<Box<dyn Core>>,
    core_at: usize,
    /// Elements of the innermost axis per item of work.
    piece: usize,
    items: usize,
    tasks: usize,
    needs: Needs,
}

/// Lists the body's leaves: which inputs and which axes it reads.
pub fn leaves<'a>(bodies: impl IntoIterator<Item = &'a crate::expr::Body>) -> (Vec<u32>, Vec<u32>) {
    let (mut inputs, mut axes) = (Vec::new(), Vec::new());
    for instr in bodies.into_iter().flat_map(|b| &b.code) {
        match instr.code {
            Code::Input(j) => inputs.push(j),
            Code::Index(axis) => axes.push(axis),
            _ => {}
        }
    }
    for list in [&mut inputs, &mut axes] {
        list.sort_unstable();
        list.dedup();
    }
    (inputs, axes)
}

/// How an operand's elements lie.
pub fn stored(operand: &Operand) -> Result<Repr, String> {
    Repr::stored(operand.dtype).ok_or_else(|| format!("no kernels for {}", operand.dtype))
}

impl Map {
    /// Compiles a kernel whose index space is that of its body.
    pub fn new(kernel: &Kernel, isa: Isa, threads: usize, core: Option<CoreSpec>) -> Result<Map, String> {
        let rank = kernel.shape.len();
        let skip = kernel.template.core_reads();
        let (inputs, axes) = leaves([&kernel.body]);
        let mut motions = Vec::new();
        let mut streams = Vec::new();
        let mut frame = Frame { inputs: vec![None; kernel.reads.len() + 1 - skip.min(1)], ..Frame::default() };
        for j in inputs {
            let is_core = skip > 0 && j == 0;
            let read = if skip > 0 { skip + j as usize - usize::from(!is_core) } else { j as usize };
            let (feed, repr, motion) = if is_core {
                let core = core.as_ref().ok_or("a template without its core")?;
                (Feed::Core, core.repr, Motion::still(rank))
            } else {
                let operand = kernel.reads.get(read).ok_or_else(|| format!("a body reads operand {j} of too few"))?;
                (Feed::Memory(read), stored(operand)?, Motion::bytes(operand, 0..rank))
            };
            frame.inputs[j as usize] = Some(streams.len());
            frame.sources.push(Source { repr, still: false, padded: false });
            streams.push((feed, repr.size()));
            motions.push(motion);
        }
        for axis in axes {
            if axis as usize >= rank {
                return Err(format!("a body reads the index along axis {axis} of {rank}"));
            }
            frame.index.insert(axis, streams.len());
            frame.sources.push(Source { repr: Repr::I64, still: false, padded: false });
            streams.push((Feed::Index, 8));
            motions.push(Motion::index(axis as usize, rank));
        }
        let first_out = motions.len();
        let mut sinks = Vec::new();
        for (k, operand) in kernel.writes.iter().enumerate() {
            let repr = stored(operand)?;
            sinks.push(Sink::Store(repr));
            streams.push((Feed::Memory(kernel.reads.len() + k), repr.size()));
            motions.push(Motion::bytes(operand, 0..rank));
        }
        let core_at = motions.len();
        let (core_motions, core_cost, build) = match core {
            Some(core) => (core.motions, core.cost, Some(core.build)),
            None => (Vec::new(), 0.0, None),
        };
        motions.extend(core_motions);
        let mut nest = Nest::new(&kernel.shape, &motions, Some(first_out));
        let len = nest.len();

        let last = *nest.dims.last().unwrap_or(&1);
        let flat = build.is_none() && nest.rank() > 1 && last < SHORT;
        let mut staged = 0;
        let mut cost = core_cost;
        let mut place = |k: usize, (feed, size): (Feed, usize), is_out: bool| {
            let step = nest.steps.last().map_or(0, |s| s[k]);
            let mut stage = |bytes: usize| {
                staged += bytes.next_multiple_of(64);
                Place::Staged(staged - bytes.next_multiple_of(64))
            };
            let still = !is_out && if flat { nest.is_still(k) } else { step == 0 };
            let dense = if flat { nest.is_dense(k, size) } else { step == size as isize || last == 1 };
            let place = match feed {
                Feed::Memory(_) if still => Place::Still,
                Feed::Memory(_) if dense => Place::Dense,
                Feed::Memory(_) => stage(BLOCK * size),
                Feed::Index if still => Place::Still,
                Feed::Index | Feed::Core => stage(BLOCK * size),
            };
            cost += match place {
                Place::Dense => 0.02 * size as f64,
                Place::Still => 0.0,
                Place::Staged(_) if flat => 1.0,
                Place::Staged(_) => 0.5,
            };
            Stream { feed, size, place, step }
        };
        let sources: Vec<Stream> = (0..first_out).map(|k| place(k, streams[k], false)).collect();
        let outs: Vec<Stream> = (first_out..core_at).map(|k| place(k, streams[k], true)).collect();
        for (source, stream) in frame.sources.iter_mut().zip(&sources) {
            source.still = stream.place == Place::Still;
            source.padded = matches!((stream.place, stream.feed), (Place::Staged(_), Feed::Memory(_) | Feed::Index));
        }
        let program = Program::new(&kernel.body, &frame, &sinks)?;
        cost += program.cost;

        let (inner, inner_steps) = if flat { (len, Vec::new()) } else { nest.split_inner() };
        let rows = if flat { 1 } else { nest.len() };
        let tasks = share(len as f64 * cost, threads);
        let blocks = inner.div_ceil(BLOCK).max(1);
        // Runs are cut when there are too few of them to go round.
        let piece = if rows >= 2 * tasks { inner } else { blocks.div_ceil(tasks.div_ceil(rows.max(1))) * BLOCK };
        let items = if len == 0 { 0 } else { rows * inner.div_ceil(piece.max(1)) };
        let needs = Needs {
            bytes: program.registers.next_multiple_of(64) + staged + 8 * sources.len(),
            bases: source(sources.len() + outs.len()),
            rank: nest.rank(),
            motions: motions.len(),
        };
        let streams = sources.iter().chain(&outs).enumerate();
        let staged = streams.filter(|(_, s)| matches!(s.place, Place::Staged(_))).map(|(k, _)| k).collect();
        let core = build.map(|build| build(&inner_steps[core_at..], inner));
        let tasks = tasks.min(items);
        Ok(Map { isa, nest, inner, flat, sources, outs, staged, program, core, core_at, piece, items, tasks, needs })
    }

    /// # Safety
    /// As for [`Compiled::run`].
    unsafe fn run_rows(&self, items: std::ops::Range<usize>, args: &Args, scratch: &mut Scratch) {
        let Scratch { mem, bases, index, at, .. } = scratch;
        let (index, at) = (&mut index[..self.nest.rank()], &mut at[..self.needs.motions]);
        let mem = mem.as_mut_ptr().cast::<u8>();
        let stages = mem.wrapping_add(self.program.registers.next_multiple_of(64));
        let slots = mem.wrapping_add(self.needs.bytes - 8 * self.sources.len());
        self.program.bind(mem, bases);
        let pieces = self.inner.div_ceil(self.piece);
        self.nest.seek(items.start / pieces, index, at);
        let mut fresh = true;
        for item in items {
            if fresh {
                for (k, s) in self.sources.iter().enumerate() {
                    if s.place == Place::Still {
                        bases[source(k)] = match s.feed {
                            Feed::Memory(arg) => args.at(arg, at[k]),
                            _ => {
                                let slot = slots.wrapping_add(8 * k);
                                // SAFETY: eight bytes per source are set aside for this.
                                unsafe { slot.cast::<i64>().write_unaligned(at[k] as i64) }
                                slot
                            }
                        };
                    }
                }
                // SAFETY: operands were checked to span their memory when the launch was recorded.
                unsafe { self.program.run_still(self.isa, bases) }
            }
            let first = item % pieces * self.piece;
            let end = self.inner.min(first + self.piece);
            let mut i = first;
            while i < end {
                let n = BLOCK.min(end - i);
                for (k, s) in self.sources.iter().enumerate() {
                    let position = at[k].wrapping_add(i as isize * s.step);
                    match (s.place, s.feed) {
                        (Place::Still, _) => {}
                        (Place::Staged(offset), feed) => {
                            let to = stages.wrapping_add(offset);
                            bases[source(k)] = to;
                            // SAFETY: a staging block holds `BLOCK` elements; operands as above.
                            unsafe {
                                match feed {
                                    Feed::Memory(arg) => moves::gather(s.size, n, args.at(arg, position), s.step, to),
                                    Feed::Index => moves::iota(n, position, s.step, to.cast()),
                                    Feed::Core => {
                                        let core = self.core.as_deref().expect("a core stream comes with a core");
                                        bases[source(k)] = core.feed(args, &at[self.core_at..], i, n, to).cast_mut();
                                    }
                                }
                            }
                        }
                        (Place::Dense, Feed::Memory(arg)) => bases[source(k)] = args.at(arg, position),
                        (Place::Dense, _) => unreachable!("only memory is dense"),
                    }
                }
                for (k, s) in self.outs.iter().enumerate() {
                    let Feed::Memory(arg) = s.feed else { unreachable!("destinations are memory") };
                    bases[self.program.out(k)] = match s.place {
                        Place::Staged(offset) => stages.wrapping_add(offset),
                        _ => args.at(arg, at[self.sources.len() + k].wrapping_add(i as isize * s.step)),
                    };
                }
                // SAFETY: as above.
                unsafe { self.program.run_each(self.isa, n, bases) }
                for (k, s) in self.outs.iter().enumerate() {
                    if let (Place::Staged(offset), Feed::Memory(arg)) = (s.place, s.feed) {
                        let position = at[self.sources.len() + k].wrapping_add(i as isize * s.step);
                        // SAFETY: as above.
                        unsafe {
                            moves::scatter(s.size, n, stages.wrapping_add(offset), args.at(arg, position), s.step)
                        }
                    }
                }
                i += n;
            }
            fresh = end == self.inner;
            if fresh {
                self.nest.advance(index, at);
            }
        }
    }

    /// Blocks across short runs: what is staged is collected run by run.
    ///
    /// # Safety
    /// As for [`Compiled::run`].
    unsafe fn run_flat(&self, items: std::ops::Range<usize>, args: &Args, scratch: &mut Scratch) {
        let Scratch { mem, bases, index, at, .. } = scratch;
        let (index, at) = (&mut index[..self.nest.rank()], &mut at[..self.needs.motions]);
        let mem = mem.as_mut_ptr().cast::<u8>();
        let stages = mem.wrapping_add(self.program.registers.next_multiple_of(64));
        self.program.bind(mem, bases);
        for (k, s) in self.sources.iter().enumerate() {
            if let (Place::Still, Feed::Memory(arg)) = (s.place, s.feed) {
                bases[source(k)] = args.at(arg, self.nest.start[k]);
            }
        }
        // SAFETY: operands were checked to span their memory when the launch was recorded.
        unsafe { self.program.run_still(self.isa, bases) }
        let run = *self.nest.dims.last().unwrap_or(&1);
        let (first, end) = (items.start * self.piece, self.inner.min(items.end * self.piece));
        let mut i = first;
        while i < end {
            let n = BLOCK.min(end - i);
            // SAFETY (both calls of `each_run`): staging blocks hold `BLOCK` elements; operands as above.
            unsafe {
                self.each_run(i, n, run, index, at, |k, from, len, done| self.collect(k, args, stages, from, len, done))
            }
            for (k, s) in self.sources.iter().enumerate() {
                match (s.place, s.feed) {
                    (Place::Staged(offset), _) => bases[source(k)] = stages.wrapping_add(offset),
                    (Place::Dense, Feed::Memory(arg)) => {
                        bases[source(k)] = args.at(arg, self.nest.start[k] + (i * s.size) as isize);
                    }
                    _ => {}
                }
            }
            for (k, s) in self.outs.iter().enumerate() {
                let Feed::Memory(arg) = s.feed else { unreachable!("destinations are memory") };
                bases[self.program.out(k)] = match s.place {
                    Place::Staged(offset) => stages.wrapping_add(offset),
                    _ => args.at(arg, self.nest.start[self.sources.len() + k] + (i * s.size) as isize),
                };
            }
            // SAFETY: as above.
            unsafe {
                self.program.run_each(self.isa, n, bases);
                self.each_run(i, n, run, index, at, |k, to, len, done| self.spill(k, args, stages, to, len, done));
            }
            i += n;
        }
    }

    /// Calls `f(operand, position, elements, elements before)` for every operand and every run within `first..first + n`.
    ///
    /// # Safety
    /// That of `f`.
    unsafe fn each_run(
        &self,
        first: usize,
        n: usize,
        run: usize,
        index: &mut [usize],
        at: &mut [isize],
        f: impl Fn(usize, isize, usize, usize),
    ) {
        if self.staged.is_empty() {
            return;
        }
        // The nest still has its innermost axis here; runs are entered at its start, but for the first.
        self.nest.seek(first, index, at);
        let mut done = 0;
        while done < n {
            let rank = self.nest.rank();
            let len = (run - index[rank - 1]).min(n - done);
            for &k in &self.staged {
                f(k, at[k], len, done);
            }
            done += len;
            // To the last index of what was done, then one on.
            index[rank - 1] += len - 1;
            for (at, step) in at.iter_mut().zip(&self.nest.steps[rank - 1]) {
                *at += (len - 1) as isize * step;
            }
            self.nest.advance(index, at);
        }
    }

    fn collect(&self, k: usize, args: &Args, stages: *mut u8, position: isize, len: usize, done: usize) {
        let Some(s) = self.sources.get(k) else { return };
        let Place::Staged(offset) = s.place else { return };
        let to = stages.wrapping_add(offset + done * s.size);
        // SAFETY: part of a staging block, and of an operand that spans its memory.
        unsafe {
            match s.feed {
                Feed::Memory(arg) => moves::gather(s.size, len, args.at(arg, position), s.step, to),
                _ => moves::iota(len, position, s.step, to.cast()),
            }
        }
    }

    fn spill(&self, k: usize, args: &Args, stages: *mut u8, position: isize, len: usize, done: usize) {
        let Some(s) = k.checked_sub(self.sources.len()).map(|k| &self.outs[k]) else { return };
        let (Place::Staged(offset), Feed::Memory(arg)) = (s.place, s.feed) else { return };
        // SAFETY: as for `collect`.
        unsafe {
            moves::scatter(s.size, len, stages.wrapping_add(offset + done * s.size), args.at(arg, position), s.step)
        }
    }
}

impl Compiled for Map {
    fn needs(&self) -> Needs {
        self.needs
    }

    fn tasks(&self, _: usize) -> usize {
        self.tasks
    }

    unsafe fn run(&self, _: usize, task: usize, args: &Args, scratch: &mut Scratch) {
        let items = self.items * task / self.tasks..self.items * (task + 1) / self.tasks;
        // SAFETY: the caller's word.
        unsafe {
            if self.flat {
                self.run_flat(items, args, scratch);
            } else {
                self.run_rows(items, args, scratch);
            }
        }
    }
}
