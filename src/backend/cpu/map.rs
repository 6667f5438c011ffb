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
use std::ops::Range;

/// Innermost axes shorter than this are run across.
const SHORT: usize = 64;

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
    /// Dense across rows: by way of a staging block of some rows, turned on their side.
    Turned(usize),
}

/// Rows and columns that are turned on their side together.
const TURNED_ROWS: usize = 16;
const TURNED_COLS: usize = 256;

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
    turned: bool,
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
        let turns = |k: usize, size: usize| {
            let above = nest.rank().checked_sub(2).map(|axis| (nest.dims[axis], nest.steps[axis][k]));
            build.is_none() && !flat && above.is_some_and(|(dim, step)| dim >= 4 && step == size as isize)
        };
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
                Feed::Memory(_) if !is_out && turns(k, size) => match stage(TURNED_ROWS * TURNED_COLS * size) {
                    Place::Staged(offset) => Place::Turned(offset),
                    other => other,
                },
                Feed::Memory(_) => stage(BLOCK * size),
                Feed::Index if still => Place::Still,
                Feed::Index | Feed::Core => stage(BLOCK * size),
            };
            cost += match place {
                Place::Dense => 0.02 * size as f64,
                Place::Still => 0.0,
                Place::Turned(_) => 0.3,
                Place::Staged(_) => 0.5,
            };
            Stream { feed, size, place, step }
        };
        let sources: Vec<Stream> = (0..first_out).map(|k| place(k, streams[k], false)).collect();
        let outs: Vec<Stream> = (first_out..core_at).map(|k| place(k, streams[k], true)).collect();
        for (source, stream) in frame.sources.iter_mut().zip(&sources) {
            source.still = stream.place == Place::Still;
            source.padded = match stream.feed {
                Feed::Core => false,
                _ => matches!(stream.place, Place::Staged(_) | Place::Turned(_)),
            };
        }
        let program = Program::new(&kernel.body, &frame, &sinks)?;
        cost += program.cost;

        let (inner, inner_steps) = if flat { (len, Vec::new()) } else { nest.split_inner() };
        let turned = sources.iter().any(|s| matches!(s.place, Place::Turned(_)));
        let rows = match nest.dims.last() {
            _ if flat => 1,
            // A group of rows is one.
            Some(&across) if turned => nest.len() / across.max(1) * across.div_ceil(TURNED_ROWS),
            _ => nest.len(),
        };
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
        Ok(Map {
            isa,
            nest,
            inner,
            flat,
            turned,
            sources,
            outs,
            staged,
            program,
            core,
            core_at,
            piece,
            items,
            tasks,
            needs,
        })
    }

    /// # Safety
    /// As for [`Compiled::run`].
    unsafe fn run_rows(&self, items: Range<usize>, args: &Args, scratch: &mut Scratch) {
        let Scratch { mem, bases, index, at, .. } = scratch;
        let (index, at) = (&mut index[..self.nest.rank()], &mut at[..self.needs.motions]);
        let mem = mem.as_mut_ptr().cast::<u8>();
        self.program.bind(mem, bases);
        let pieces = self.inner.div_ceil(self.piece);
        self.nest.seek(items.start / pieces, index, at);
        let mut fresh = true;
        for item in items {
            let first = item % pieces * self.piece;
            let end = self.inner.min(first + self.piece);
            for i in (first..end).step_by(BLOCK) {
                // SAFETY: the block is within the index space.
                unsafe { self.block(args, at, 0, i..end.min(i + BLOCK), fresh, mem, bases) }
                fresh = false;
            }
            if end == self.inner {
                self.nest.advance(index, at);
                fresh = true;
            }
        }
    }

    /// Blocks of rows whose sources are dense across them: those of some rows are turned on their side at once.
    ///
    /// # Safety
    /// As for [`Compiled::run`].
    unsafe fn run_turned(&self, items: Range<usize>, args: &Args, scratch: &mut Scratch) {
        let Scratch { mem, bases, index, at, .. } = scratch;
        let (index, at) = (&mut index[..self.nest.rank()], &mut at[..self.needs.motions]);
        let mem = mem.as_mut_ptr().cast::<u8>();
        let stages = mem.wrapping_add(self.stages());
        self.program.bind(mem, bases);
        let pieces = self.inner.div_ceil(self.piece);
        let across = self.nest.dims[self.nest.rank() - 1];
        let groups = across.div_ceil(TURNED_ROWS);
        for item in items {
            let (group, piece) = (item / pieces, item % pieces);
            let row = group % groups * TURNED_ROWS;
            self.nest.seek(group / groups * across + row, index, at);
            let rows = TURNED_ROWS.min(across - row);
            let end = self.inner.min((piece + 1) * self.piece);
            for i in (piece * self.piece..end).step_by(TURNED_COLS) {
                let n = TURNED_COLS.min(end - i);
                for (k, s) in self.sources.iter().enumerate() {
                    if let (Place::Turned(offset), Feed::Memory(arg)) = (s.place, s.feed) {
                        let from = args.at(arg, at[k] + i as isize * s.step);
                        let (to, to_step) = (stages.wrapping_add(offset), TURNED_COLS * s.size);
                        // SAFETY: the operand was checked to span its memory, and so many rows fit the staging memory.
                        unsafe { moves::turn(s.size, n, rows, from, s.step, to, to_step as isize) }
                    }
                }
                for r in 0..rows {
                    // SAFETY: the block is within the index space.
                    unsafe { self.block(args, at, r, i..i + n, true, mem, bases) }
                }
            }
        }
    }

    /// Where staging blocks begin in scratch memory.
    fn stages(&self) -> usize {
        self.program.registers.next_multiple_of(64)
    }

    /// Computes `cols` of the row that is `r` rows behind `at`; `fresh`: what stands still along a row is not known yet.
    ///
    /// # Safety
    /// As for [`Compiled::run`]; the block must be within the index space, and no longer than [`BLOCK`].
    #[expect(clippy::too_many_arguments, reason = "the state of one loop nest")]
    unsafe fn block(
        &self,
        args: &Args,
        at: &[isize],
        r: usize,
        cols: Range<usize>,
        fresh: bool,
        mem: *mut u8,
        bases: &mut [*mut u8],
    ) {
        let stages = mem.wrapping_add(self.stages());
        let (i, n) = (cols.start, cols.len());
        let down = |k: usize| if r == 0 { 0 } else { r as isize * self.nest.steps[self.nest.rank() - 1][k] };
        for (k, s) in self.sources.iter().enumerate() {
            let position = at[k].wrapping_add(down(k)).wrapping_add(i as isize * s.step);
            bases[source(k)] = match (s.place, s.feed) {
                (Place::Still, _) if !fresh => continue,
                (Place::Still | Place::Dense, Feed::Memory(arg)) => args.at(arg, position),
                (Place::Still | Place::Dense, _) => {
                    let slot = mem.wrapping_add(self.needs.bytes - 8 * (self.sources.len() - k));
                    // SAFETY: eight bytes per source are set aside for this.
                    unsafe { slot.cast::<i64>().write_unaligned(position as i64) }
                    slot
                }
                (Place::Turned(offset), _) => stages.wrapping_add(offset + r * TURNED_COLS * s.size),
                (Place::Staged(offset), feed) => {
                    let to = stages.wrapping_add(offset);
                    // SAFETY: a staging block holds `BLOCK` elements; operands were checked to span their memory when the launch was
                    // recorded.
                    unsafe {
                        match feed {
                            Feed::Memory(arg) => moves::gather(s.size, n, args.at(arg, position), s.step, to),
                            Feed::Index => moves::iota(n, position, s.step, to.cast()),
                            Feed::Core => {
                                let core = self.core.as_deref().expect("a core stream comes with a core");
                                bases[source(k)] = core.feed(args, &at[self.core_at..], i, n, to).cast_mut();
                                continue;
                            }
                        }
                    }
                    to
                }
            };
        }
        let out = |k: usize, s: &Stream| {
            let k = self.sources.len() + k;
            let Feed::Memory(arg) = s.feed else { unreachable!("destinations are memory") };
            args.at(arg, at[k].wrapping_add(down(k)).wrapping_add(i as isize * s.step))
        };
        for (k, s) in self.outs.iter().enumerate() {
            bases[self.program.out(k)] = match s.place {
                Place::Staged(offset) => stages.wrapping_add(offset),
                _ => out(k, s),
            };
        }
        // SAFETY: as above.
        unsafe {
            if fresh {
                self.program.run_still(self.isa, bases);
            }
            self.program.run_each(self.isa, n, bases);
            for (k, s) in self.outs.iter().enumerate() {
                if let Place::Staged(offset) = s.place {
                    moves::scatter(s.size, n, stages.wrapping_add(offset), out(k, s), s.step);
                }
            }
        }
    }

    /// Blocks across short runs: what is staged is collected run by run.
    ///
    /// # Safety
    /// As for [`Compiled::run`].
    unsafe fn run_flat(&self, items: Range<usize>, args: &Args, scratch: &mut Scratch) {
        let Scratch { mem, bases, index, at, .. } = scratch;
        let (index, at) = (&mut index[..self.nest.rank()], &mut at[..self.needs.motions]);
        let mem = mem.as_mut_ptr().cast::<u8>();
        let stages = mem.wrapping_add(self.stages());
        self.program.bind(mem, bases);
        for (k, s) in self.sources.iter().enumerate().filter(|(_, s)| s.place == Place::Still) {
            bases[source(k)] = match s.feed {
                Feed::Memory(arg) => args.at(arg, self.nest.start[k]),
                _ => {
                    let slot = mem.wrapping_add(self.needs.bytes - 8 * (self.sources.len() - k));
                    // SAFETY: eight bytes per source are set aside for this.
                    unsafe { slot.cast::<i64>().write_unaligned(self.nest.start[k] as i64) }
                    slot
                }
            };
        }
        // SAFETY: operands were checked to span their memory when the launch was recorded.
        unsafe { self.program.run_still(self.isa, bases) }
        let (first, end) = (items.start * self.piece, self.inner.min(items.end * self.piece));
        let mut i = first;
        while i < end {
            let n = BLOCK.min(end - i);
            // SAFETY: staging blocks hold `BLOCK` elements; operands as above.
            unsafe {
                self.each_piece(i, n, index, at, |k, from, rows, len, done| {
                    self.collect(k, args, stages, from, (rows, len), done);
                });
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
                self.each_piece(i, n, index, at, |k, to, rows, len, done| {
                    self.spill(k, args, stages, to, (rows, len), done);
                });
            }
            i += n;
        }
    }

    /// Calls `f(operand, position, rows, elements of each, elements before)` for every staged operand and every piece of
    /// `first..first + n` that is some whole runs a step apart, or a part of one run.
    ///
    /// # Safety
    /// That of `f`.
    unsafe fn each_piece(
        &self,
        first: usize,
        n: usize,
        index: &mut [usize],
        at: &mut [isize],
        f: impl Fn(usize, isize, usize, usize, usize),
    ) {
        if self.staged.is_empty() {
            return;
        }
        // The nest still has its innermost axis here, and one outside it.
        let rank = self.nest.rank();
        let (run, outer) = (self.nest.dims[rank - 1], self.nest.dims[rank - 2]);
        self.nest.seek(first, index, at);
        let mut done = 0;
        while done < n {
            let left = n - done;
            let (rows, len) = match index[rank - 1] {
                0 if left >= run => ((outer - index[rank - 2]).min(left / run), run),
                i => (1, (run - i).min(left)),
            };
            for &k in &self.staged {
                f(k, at[k], rows, len, done);
            }
            done += rows * len;
            // To the last index of what was done, then one on.
            let (down, along) = (rows - 1, len - 1);
            index[rank - 2] += down;
            index[rank - 1] += along;
            for (k, at) in at.iter_mut().enumerate() {
                let steps = (self.nest.steps[rank - 2][k], self.nest.steps[rank - 1][k]);
                *at += down as isize * steps.0 + along as isize * steps.1;
            }
            self.nest.advance(index, at);
        }
    }

    /// Copies a piece of a source to its staging block.
    ///
    /// # Safety
    /// As for [`Compiled::run`]; the piece lies within the index space, and `done` elements before it in the block.
    unsafe fn collect(
        &self,
        k: usize,
        args: &Args,
        stages: *mut u8,
        position: isize,
        (rows, len): (usize, usize),
        done: usize,
    ) {
        let Some(s) = self.sources.get(k) else { return };
        let Place::Staged(offset) = s.place else { return };
        let down = self.nest.steps[self.nest.rank() - 2][k];
        let to = stages.wrapping_add(offset + done * s.size);
        // SAFETY: part of a staging block, and of an operand that spans its memory.
        unsafe {
            match s.feed {
                Feed::Memory(arg) => moves::gather_rows(s.size, rows, len, args.at(arg, position), (down, s.step), to),
                _ => (0..rows).for_each(|r| {
                    moves::iota(len, position + r as isize * down, s.step, to.add(r * len * s.size).cast());
                }),
            }
        }
    }

    /// Copies a piece of a destination from its staging block.
    ///
    /// # Safety
    /// As for [`Map::collect`].
    unsafe fn spill(
        &self,
        k: usize,
        args: &Args,
        stages: *mut u8,
        position: isize,
        (rows, len): (usize, usize),
        done: usize,
    ) {
        let Some(s) = k.checked_sub(self.sources.len()).map(|k| &self.outs[k]) else { return };
        let (Place::Staged(offset), Feed::Memory(arg)) = (s.place, s.feed) else { return };
        let down = self.nest.steps[self.nest.rank() - 2][k];
        for r in 0..rows {
            let from = stages.wrapping_add(offset + (done + r * len) * s.size);
            // SAFETY: as for `collect`.
            unsafe { moves::scatter(s.size, len, from, args.at(arg, position + r as isize * down), s.step) }
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
            } else if self.turned {
                self.run_turned(items, args, scratch);
            } else {
                self.run_rows(items, args, scratch);
            }
        }
    }
}
