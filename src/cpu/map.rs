//! Elementwise kernels, and all kernels that compute a core value per index and feed it to a body.
//!
//! The index space becomes a nest of few axes. Along its innermost axis block instructions read a dense operand in place, and one that
//! stands still as one value per run; anything else is copied to a staging block first. When the innermost axis is short, blocks run
//! across the ends of rows instead, and only operands that are dense or still over the whole index space are read in place.

use super::block::{BLOCK, Repr};
use super::moves;
use super::nest::{Motion, Nest};
use super::operands::{BlockOperand, Feed, Operands, Place, Reserved};
use super::program::{Program, source};
use super::shares::Shares;
use super::simd::Isa;
use super::task::{Args, Compiled, Needs, Scratch};
use plimsoll_core::kernel::Kernel;
use std::ops::Range;

/// Blocks run across the ends of rows that are shorter than this.
const SHORT: usize = 64;

/// Rows and columns that are transposed together.
const TRANSPOSED_ROWS: usize = 16;
const TRANSPOSED_COLS: usize = 256;

/// Computes the core values of a template.
pub trait Core: Send + Sync {
    /// The values at `start..start + n` of the innermost axis, where `at` are the positions of the core's motions: a pointer to memory that
    /// already holds them, or else they are written to `to`.
    ///
    /// # Safety
    /// `args` must be the kernel's, `to` writable for `n` elements.
    unsafe fn feed(&self, args: &Args, at: &[isize], start: usize, n: usize, to: *mut u8) -> *const u8;
}

/// The motions and the representation of a core's values, and how to make the core.
pub struct CoreSpec<'a> {
    /// The representation of its values.
    pub repr: Repr,
    /// [`Core::feed`] gets the positions of these.
    pub motions: Vec<Motion>,
    /// Nanoseconds per value.
    pub cost: f64,
    /// Bytes of the core's tables.
    pub tables: u64,
    /// Makes the core and its tables, given its motions' steps along the innermost axis and that axis' extent.
    pub build: Box<dyn FnOnce(&[isize], usize) -> Box<dyn Core> + 'a>,
}

/// A core that is never asked for values.
struct Outline;

impl Core for Outline {
    unsafe fn feed(&self, _: &Args, _: &[isize], _: usize, _: usize, _: *mut u8) -> *const u8 {
        unreachable!("an outline does not run")
    }
}

impl CoreSpec<'_> {
    /// The same without tables, for a kernel that does not run.
    pub fn outline(self) -> Self {
        CoreSpec { build: Box::new(|_, _| Box::new(Outline)), ..self }
    }
}

/// The order of blocks over the index space.
#[derive(Clone, Copy, PartialEq)]
enum Order {
    /// Along each row.
    Rows,
    /// Across the ends of rows.
    Flat,
    /// Along rows of which some are transposed together, because their sources are dense across them.
    Transposed,
}

/// A compiled elementwise kernel.
pub struct Map {
    isa: Isa,
    order: Order,
    /// Without the innermost axis, unless blocks run across its ends.
    nest: Nest,
    sources: Vec<BlockOperand>,
    outs: Vec<BlockOperand>,
    program: Program,
    core: Option<Box<dyn Core>>,
    /// The core's first motion.
    core_at: usize,
    /// Offset of the program's registers in the scratch memory.
    registers: usize,
    shares: Shares,
    needs: Needs,
}

/// A thread on its way over the index space, with its own memory.
struct Walk<'a> {
    args: &'a Args,
    index: &'a mut [usize],
    at: &'a mut [isize],
    mem: *mut u8,
    bases: &'a mut [*mut u8],
}

/// Some whole rows a step apart, or a part of one row.
struct Piece {
    /// The position of the operand at its start.
    position: isize,
    rows: usize,
    /// Elements of each row.
    len: usize,
    /// Elements of the block before the piece.
    done: usize,
}

/// The work of the smallest piece of a row, in nanoseconds.
const PIECE_NS: f64 = 4e3;

/// Places operands over a nest, and adds up the cost of a value.
struct Placing<'a> {
    nest: &'a Nest,
    flat: bool,
    has_core: bool,
    first_out: usize,
    memory: Reserved,
    ns: f64,
}

impl Placing<'_> {
    fn place(&mut self, k: usize, feed: Feed, size: usize) -> (Place, isize) {
        let (nest, is_out) = (self.nest, k >= self.first_out);
        let step = nest.steps.last().map_or(0, |s| s[k]);
        let (is_still, is_dense) = if self.flat {
            (nest.is_still(k), nest.is_dense(k, size))
        } else {
            (step == 0, step == size as isize || nest.dims.last().is_none_or(|&last| last == 1))
        };
        let place = match feed {
            Feed::Memory(_) if is_still && !is_out => Place::Still,
            Feed::Memory(_) if is_dense => Place::Dense,
            Feed::Memory(_) if !is_out && self.is_dense_across(k, size) => {
                Place::Transposed(self.memory.take(TRANSPOSED_ROWS * TRANSPOSED_COLS * size))
            }
            Feed::Index if is_still => Place::Slot(self.memory.take(size)),
            _ => Place::Staged(self.memory.take(BLOCK * size)),
        };
        self.ns += match place {
            Place::Dense => 0.02 * size as f64,
            Place::Still | Place::Slot(_) => 0.0,
            Place::Transposed(_) => 0.3,
            Place::Staged(_) => 0.5,
        };
        (place, step)
    }

    /// True if rows lie side by side in the operand, so that some of them can be transposed together.
    fn is_dense_across(&self, k: usize, size: usize) -> bool {
        let above = self.nest.rank().checked_sub(2).map(|axis| (self.nest.dims[axis], self.nest.steps[axis][k]));
        !self.has_core && !self.flat && above.is_some_and(|(dim, step)| dim >= 4 && step == size as isize)
    }
}

impl Map {
    /// Compiles a kernel whose index space is that of its body.
    pub fn new(kernel: &Kernel, isa: Isa, threads: usize, core: Option<CoreSpec>) -> Result<Map, String> {
        let body = std::slice::from_ref(&kernel.body);
        let mut operands = Operands::new(kernel, body, core.as_ref().map(|core| core.repr))?;
        let core_at = operands.motions.len();
        let mut motions = std::mem::take(&mut operands.motions);
        let (core_cost, tables, build) = match core {
            Some(core) => {
                motions.extend(core.motions);
                (core.cost, core.tables, Some(core.build))
            }
            None => (0.0, 0, None),
        };
        let first_out = operands.first_out();
        let mut nest = Nest::new(&kernel.shape, &motions, Some(first_out));
        let len = nest.len();
        let has_core = build.is_some();
        let flat = !has_core && nest.rank() > 1 && nest.dims.last().is_some_and(|&last| last < SHORT);
        let memory = Reserved::default();
        let mut placing = Placing { nest: &nest, flat, has_core, first_out, memory, ns: core_cost };
        let (sources, outs) = operands.place(|k, feed, size| placing.place(k, feed, size));
        let Placing { memory: Reserved(registers), ns, .. } = placing;
        let program = Program::new(&kernel.body, &operands.frame, &operands.sinks)?;
        let transposes = sources.iter().any(|s| matches!(s.place, Place::Transposed(_)));
        let order = match (flat, transposes) {
            (true, _) => Order::Flat,
            (false, true) => Order::Transposed,
            (false, false) => Order::Rows,
        };
        let (inner, inner_steps) = if flat { (len, Vec::new()) } else { nest.split_inner() };
        let across = nest.dims.last().map_or(1, |&across| across.max(1));
        let rows = match order {
            Order::Flat => 1,
            Order::Transposed => nest.len() / across * across.div_ceil(TRANSPOSED_ROWS),
            Order::Rows => nest.len(),
        };
        let ns = ns + program.cost;
        // Few elements that cost much are shared as well.
        let unit = ((PIECE_NS / ns.max(1.0)) as usize).next_power_of_two().clamp(16, BLOCK);
        let shares = Shares::new(rows, inner, unit, len as f64 * ns, threads);
        let needs = Needs {
            bytes: registers + program.registers,
            bases: source(sources.len() + outs.len()),
            rank: nest.rank(),
            motions: motions.len(),
            tables,
            ..Needs::default()
        };
        let core = build.map(|build| build(&inner_steps[core_at..], inner));
        Ok(Map { isa, order, nest, sources, outs, program, core, core_at, registers, shares, needs })
    }

    /// # Safety
    /// As for [`Compiled::run`].
    unsafe fn run_rows(&self, items: Range<usize>, walk: &mut Walk) {
        let mut row = self.shares.row(items.start);
        self.nest.seek(row, walk.index, walk.at);
        let mut fresh = true;
        for item in items {
            if self.shares.row(item) != row {
                row += 1;
                self.nest.advance(walk.index, walk.at);
                fresh = true;
            }
            let elements = self.shares.elements(item);
            for i in elements.clone().step_by(BLOCK) {
                // SAFETY: the block is within the index space.
                unsafe { self.block(walk, 0, i..elements.end.min(i + BLOCK), fresh) }
                fresh = false;
            }
        }
    }

    /// # Safety
    /// As for [`Compiled::run`].
    unsafe fn run_transposed(&self, items: Range<usize>, walk: &mut Walk) {
        let across = self.nest.dims[self.nest.rank() - 1];
        let groups = across.div_ceil(TRANSPOSED_ROWS);
        for item in items {
            let group = self.shares.row(item);
            let row = group % groups * TRANSPOSED_ROWS;
            self.nest.seek(group / groups * across + row, walk.index, walk.at);
            let rows = TRANSPOSED_ROWS.min(across - row);
            let elements = self.shares.elements(item);
            for i in elements.clone().step_by(TRANSPOSED_COLS) {
                let n = TRANSPOSED_COLS.min(elements.end - i);
                for (k, s) in self.sources.iter().enumerate() {
                    if let Place::Transposed(offset) = s.place {
                        let from = walk.args.at(s.arg(), walk.at[k] + i as isize * s.step).cast_const();
                        let to = (walk.mem.wrapping_add(offset), (TRANSPOSED_COLS * s.size) as isize);
                        // SAFETY: the operand was checked to span its memory, and so many rows fit the staging memory.
                        unsafe { moves::transpose(s.size, n, rows, (from, s.step), to) }
                    }
                }
                for r in 0..rows {
                    // SAFETY: the block is within the index space.
                    unsafe { self.block(walk, r, i..i + n, true) }
                }
            }
        }
    }

    /// Computes `cols` of the row that is `r` rows behind the walk's. With `fresh`, operands that stand still along a row are read again.
    ///
    /// # Safety
    /// As for [`Compiled::run`]; the block must be within the index space, and no longer than [`BLOCK`].
    unsafe fn block(&self, walk: &mut Walk, r: usize, cols: Range<usize>, fresh: bool) {
        let Walk { args, at, mem, bases, .. } = walk;
        let (i, n) = (cols.start, cols.len());
        let position = |k: usize, s: &BlockOperand| {
            let down = if r == 0 { 0 } else { r as isize * self.nest.steps[self.nest.rank() - 1][k] };
            at[k].wrapping_add(down).wrapping_add(i as isize * s.step)
        };
        let out = |k: usize, s: &BlockOperand| args.at(s.arg(), position(self.sources.len() + k, s));
        // SAFETY: operands were checked to span their memory when the launch was recorded, and staging blocks hold `BLOCK` elements.
        unsafe {
            for (k, s) in self.sources.iter().enumerate() {
                bases[source(k)] = match (s.place, s.feed) {
                    (Place::Still | Place::Slot(_), _) if !fresh => continue,
                    (Place::Transposed(offset), _) => mem.wrapping_add(offset + r * TRANSPOSED_COLS * s.size),
                    (Place::Staged(offset), Feed::Core) => {
                        let core = self.core.as_deref().expect("an operand fed by a core comes with one");
                        core.feed(args, &at[self.core_at..], i, n, mem.wrapping_add(offset)).cast_mut()
                    }
                    _ => s.block(args, position(k, s), n, *mem),
                };
            }
            for (k, s) in self.outs.iter().enumerate() {
                bases[self.program.out(k)] = match s.place {
                    Place::Staged(offset) => mem.wrapping_add(offset),
                    _ => out(k, s),
                };
            }
            if fresh {
                self.program.run_still(self.isa, bases);
            }
            self.program.run_each(self.isa, n, bases);
            for (k, s) in self.outs.iter().enumerate() {
                if let Place::Staged(offset) = s.place {
                    moves::scatter(s.size, n, mem.wrapping_add(offset), out(k, s), s.step);
                }
            }
        }
    }

    /// Blocks across short rows: staged operands are collected row by row.
    ///
    /// # Safety
    /// As for [`Compiled::run`].
    unsafe fn run_flat(&self, items: Range<usize>, walk: &mut Walk) {
        let (args, mem) = (walk.args, walk.mem);
        let start = |k: usize| self.nest.start[k];
        let first_out = self.sources.len();
        // SAFETY: operands were checked to span their memory when the launch was recorded; staging blocks hold `BLOCK` elements.
        unsafe {
            for (k, s) in self.sources.iter().enumerate() {
                if matches!(s.place, Place::Still | Place::Slot(_)) {
                    walk.bases[source(k)] = s.block(args, start(k), 1, mem);
                }
            }
            self.program.run_still(self.isa, walk.bases);
            let all = self.shares.elements(items.start).start..self.shares.elements(items.end - 1).end;
            for i in all.clone().step_by(BLOCK) {
                let n = BLOCK.min(all.end - i);
                self.each_piece(&self.sources, 0, i..i + n, walk, |s, down, piece| collect(s, args, mem, down, piece));
                let bases = &mut walk.bases;
                for (k, s) in self.sources.iter().enumerate() {
                    match s.place {
                        Place::Staged(offset) => bases[source(k)] = mem.wrapping_add(offset),
                        Place::Dense => bases[source(k)] = args.at(s.arg(), start(k) + (i * s.size) as isize),
                        _ => {}
                    }
                }
                for (k, s) in self.outs.iter().enumerate() {
                    bases[self.program.out(k)] = match s.place {
                        Place::Staged(offset) => mem.wrapping_add(offset),
                        _ => args.at(s.arg(), start(first_out + k) + (i * s.size) as isize),
                    };
                }
                self.program.run_each(self.isa, n, bases);
                self.each_piece(&self.outs, first_out, i..i + n, walk, |s, down, piece| {
                    spill(s, args, mem, down, piece)
                });
            }
        }
    }

    /// Calls `f(operand, step from row to row, piece)` for every staged one of some operands, the first of which is number `number`, and
    /// for every piece of `block`.
    fn each_piece(
        &self,
        operands: &[BlockOperand],
        number: usize,
        block: Range<usize>,
        walk: &mut Walk,
        f: impl Fn(&BlockOperand, isize, Piece),
    ) {
        if !operands.iter().any(|s| matches!(s.place, Place::Staged(_))) {
            return;
        }
        let Walk { index, at, .. } = walk;
        // The nest still has its innermost axis here, and one outside it.
        let rank = self.nest.rank();
        let (row, outer) = (self.nest.dims[rank - 1], self.nest.dims[rank - 2]);
        let (outer_steps, steps) = (&self.nest.steps[rank - 2], &self.nest.steps[rank - 1]);
        self.nest.seek(block.start, index, at);
        let mut done = 0;
        while done < block.len() {
            let left = block.len() - done;
            let (rows, len) = match index[rank - 1] {
                0 if left >= row => ((outer - index[rank - 2]).min(left / row), row),
                i => (1, (row - i).min(left)),
            };
            for (k, s) in operands.iter().enumerate().filter(|(_, s)| matches!(s.place, Place::Staged(_))) {
                f(s, outer_steps[number + k], Piece { position: at[number + k], rows, len, done });
            }
            done += rows * len;
            // To the last index of the piece, then one on.
            let (down, along) = (rows - 1, len - 1);
            index[rank - 2] += down;
            index[rank - 1] += along;
            for (k, at) in at.iter_mut().enumerate() {
                *at += down as isize * outer_steps[k] + along as isize * steps[k];
            }
            self.nest.advance(index, at);
        }
    }
}

/// Copies a piece of a source to its staging block.
///
/// # Safety
/// As for [`Compiled::run`]; the piece must lie within the index space.
unsafe fn collect(s: &BlockOperand, args: &Args, mem: *mut u8, down: isize, piece: Piece) {
    let Place::Staged(offset) = s.place else { return };
    let Piece { position, rows, len, done } = piece;
    let to = mem.wrapping_add(offset + done * s.size);
    // SAFETY: a part of a staging block, and of an operand that spans its memory.
    unsafe {
        if let Feed::Memory(arg) = s.feed {
            return moves::gather_rows(s.size, rows, len, args.at(arg, position), (down, s.step), to);
        }
        for r in 0..rows {
            moves::iota(len, position + r as isize * down, s.step, to.add(r * len * s.size).cast());
        }
    }
}

/// Copies a piece of a destination from its staging block.
///
/// # Safety
/// As for [`collect`].
unsafe fn spill(s: &BlockOperand, args: &Args, mem: *mut u8, down: isize, piece: Piece) {
    let Place::Staged(offset) = s.place else { return };
    let Piece { position, rows, len, done } = piece;
    for r in 0..rows {
        let from = mem.wrapping_add(offset + (done + r * len) * s.size);
        // SAFETY: as for `collect`.
        unsafe { moves::scatter(s.size, len, from, args.at(s.arg(), position + r as isize * down), s.step) }
    }
}

impl Compiled for Map {
    fn needs(&self) -> Needs {
        self.needs
    }

    fn tasks(&self, _: usize) -> usize {
        self.shares.tasks
    }

    unsafe fn run(&self, _: usize, task: usize, args: &Args, scratch: &mut Scratch) {
        let Scratch { mem, bases, index, at, .. } = scratch;
        let (index, at) = (&mut index[..self.nest.rank()], &mut at[..self.needs.motions]);
        let mem = *mem;
        self.program.bind(mem.wrapping_add(self.registers), bases);
        let mut walk = Walk { args, index, at, mem, bases };
        let items = self.shares.of(task);
        // SAFETY: guaranteed by the caller.
        unsafe {
            match self.order {
                Order::Rows => self.run_rows(items, &mut walk),
                Order::Flat => self.run_flat(items, &mut walk),
                Order::Transposed => self.run_transposed(items, &mut walk),
            }
        }
    }
}
