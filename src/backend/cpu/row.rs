//! Reductions and row-wise kernels.
//!
//! A row is folded block by block along its densest axis (`Rows`). Where rows lie side by side instead, as in a sum over leading axes or a
//! normalisation over channels, a block holds one element of many rows and folds are kept in blocks too (`Lanes`).
//!
//! Sums are accurate: blocks are summed in many parts and the parts in `f64`, or in two levels side by side.

use super::block::{BLOCK, Repr, VECTOR};
use super::map::{leaves, stored};
use super::moves;
use super::nest::{Motion, Nest};
use super::program::{Frame, Program, Sink, Source, source};
use super::reduction::{Reduction, accumulate, fill_identity};
use super::rewrite::{hoist, keep_values};
use super::simd::Isa;
use super::{Args, Compiled, Needs, Scratch, share};
use crate::dtype::DType;
use crate::expr::{Binary, Body, Code, Unary};
use crate::kernel::{Fold, Kernel, Template};
use std::ops::Range;

/// Most bytes of intermediate values that are kept from one pass over a row to the next.
const KEPT_BYTES: usize = 64 << 10;
/// Side by side, this many additions go to one partial sum.
const PARTIAL: usize = 32;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Place {
    Dense,
    Still,
    Staged(usize),
    /// Dense across rows while blocks run along them, or the other way round: `TURN` of them are turned on their side at once.
    Turned(usize),
}

/// Blocks of results that are turned on their side together.
const TURN: usize = 16;
/// Rows of up to this many bytes are turned.
const TURNED_BYTES: usize = 16 << 10;

/// How many rows of so many bytes are turned together: some cache lines of each element, but no more than stay in the cache.
fn turned_rows(bytes: usize) -> usize {
    ((32 << 10) / bytes.max(1)).clamp(16, 64)
}

#[derive(Clone, Copy, Debug)]
struct Stream {
    /// The launch's argument; `None` is the index itself.
    arg: Option<usize>,
    size: usize,
    place: Place,
    /// Along the axis that blocks run along.
    step: isize,
}

/// Counts rows that are treated together.
#[derive(Default)]
struct Group {
    at: usize,
    len: usize,
}

impl Group {
    /// Moves on by a row; true when that starts a new group, of `len` rows.
    fn next(&mut self, len: usize) -> bool {
        self.at += 1;
        let new = self.at >= self.len;
        if new {
            *self = Group { at: 0, len };
        }
        new
    }
}

struct Phase {
    program: Program,
    /// How the first result is folded, and its representation; the last phase has none.
    fold: Option<(Fold, Repr)>,
    /// Values that are kept for later phases: kept value and destination number.
    keeps: Vec<(usize, usize)>,
    /// Side by side, what depends on earlier folds alone is computed once per block of rows.
    prelude: Option<Program>,
}

/// A compiled row kernel.
pub struct Row {
    isa: Isa,
    /// Over rows; without the axis that blocks run along, when that is one of its axes.
    outer: Nest,
    /// Over the elements of a row; likewise.
    inner: Nest,
    /// Extent of the axis that blocks run along, and how much of it is one block.
    along: usize,
    block: usize,
    lanes: bool,
    per_row: bool,
    /// Rows that are turned together.
    turned_rows: usize,
    sources: Vec<Stream>,
    outs: Vec<Stream>,
    /// Sources that are values kept from an earlier phase: offset in scratch memory and size.
    kept: Vec<(usize, usize)>,
    phases: Vec<Phase>,
    /// Offsets in scratch memory: folded values (one slot or one block each), partial sums, index slots, zeros, and last the registers of
    /// whichever program, body or prelude, has most of them.
    folds: usize,
    partial: usize,
    slots: usize,
    zeros: usize,
    registers: usize,
    /// Where folded values of many rows are collected, when the body needs nothing else: it then runs once for all of them.
    group_at: Option<usize>,
    items: usize,
    tasks: usize,
    needs: Needs,
}

/// Everything that a row kernel moves, before it is known which way blocks run.
struct Operands {
    frame: Frame,
    /// What bodies read, then what is written: the launch's argument, if it is not an index, and the size of an element.
    streams: Vec<(Option<usize>, usize)>,
    /// How each of these moves over all axes: those of the rows, then those of the elements.
    motions: Vec<Motion>,
    /// The first of what is written.
    first_out: usize,
    /// How results are stored.
    stores: Vec<Sink>,
}

impl Operands {
    fn new(kernel: &Kernel, bodies: &[Body]) -> Result<Operands, String> {
        let rank = kernel.shape.len();
        let (inputs, axes) = leaves(bodies);
        let mut frame = Frame { inputs: vec![None; kernel.reads.len()], ..Frame::default() };
        let mut motions = Vec::new();
        let mut streams: Vec<(Option<usize>, usize)> = Vec::new();
        for j in inputs {
            let operand = kernel.reads.get(j as usize).ok_or_else(|| format!("a body reads operand {j} of too few"))?;
            let repr = stored(operand)?;
            frame.inputs[j as usize] = Some(streams.len());
            frame.sources.push(Source { repr, still: false, padded: false });
            streams.push((Some(j as usize), repr.size()));
            motions.push(Motion::bytes(operand, 0..rank));
        }
        for axis in axes {
            if axis as usize >= rank {
                return Err(format!("a body reads the index along axis {axis} of {rank}"));
            }
            frame.index.insert(axis, streams.len());
            frame.sources.push(Source { repr: Repr::I64, still: false, padded: false });
            streams.push((None, 8));
            motions.push(Motion::index(axis as usize, rank));
        }
        let first_out = motions.len();
        let mut stores = Vec::new();
        for (k, operand) in kernel.writes.iter().enumerate() {
            let repr = stored(operand)?;
            stores.push(Sink::Store(repr));
            streams.push((Some(kernel.reads.len() + k), repr.size()));
            let mut motion = Motion::bytes(operand, 0..operand.access.shape.len());
            motion.steps.resize(rank, 0);
            motions.push(motion);
        }
        Ok(Operands { frame, streams, motions, first_out, stores })
    }

    /// The motions over some of the axes, from where they start or from nothing.
    fn half(&self, axes: Range<usize>, start: bool) -> Vec<Motion> {
        let cut = |m: &Motion| Motion { steps: m.steps[axes.clone()].to_vec(), start: if start { m.start } else { 0 } };
        self.motions.iter().map(cut).collect()
    }

    /// Whether blocks run across rows: where data is dense that way, or where rows are very short.
    fn across(&self, outer: &Nest, inner: &Nest, per_row: bool) -> bool {
        let step = |nest: &Nest, k: usize| nest.steps.last().map_or(0, |s| s[k]);
        let is_dense = |nest: &Nest, k: usize| step(nest, k) == self.streams[k].1 as isize;
        // Only operands that move both ways have a preference.
        let full = |k: &usize| outer.steps.iter().any(|s| s[*k] != 0) && inner.steps.iter().any(|s| s[*k] != 0);
        let dense = |nest: &Nest| (0..self.first_out).filter(full).filter(|&k| is_dense(nest, k)).count();
        let (across, row_len) = (*outer.dims.last().unwrap_or(&1), inner.len());
        // A normalisation of rows that lie side by side is better turned, some rows at a time, than read once per fold.
        let out_dense = (self.first_out..self.motions.len()).all(|k| is_dense(outer, k));
        let side_by_side = dense(outer) > dense(inner) && (per_row || ((out_dense || row_len <= 128) && across >= 256));
        across >= 8 && ((side_by_side && across >= 16) || row_len * 2 <= across.min(32))
    }
}

/// Scratch memory as it is handed out, in whole cache lines.
#[derive(Default)]
struct Reserved(usize);

impl Reserved {
    /// The offset of so many bytes.
    fn take(&mut self, size: usize) -> usize {
        let at = self.0;
        self.0 += size.next_multiple_of(64);
        at
    }
}

/// Which way blocks run over a row kernel, and the loops around them.
struct Blocks {
    outer: Nest,
    inner: Nest,
    lanes: bool,
    per_row: bool,
    along: usize,
    /// Per stream, along the axis that blocks run along.
    steps: Vec<isize>,
    /// Extent of the last axis of the rows, before it may have become the one that blocks run along.
    across: usize,
    row_len: usize,
}

impl Blocks {
    /// Where a stream's blocks are, and the scratch memory it takes for them.
    fn place(&self, (arg, size): (Option<usize>, usize), k: usize, is_out: bool, memory: &mut Reserved) -> Stream {
        let Blocks { outer, inner, lanes, per_row, along, steps, across, .. } = self;
        let place = match steps[k] {
            0 if !is_out => Place::Still,
            s if arg.is_some() && (s == size as isize || *along == 1) => Place::Dense,
            // A result per row is one element, wherever it goes.
            _ if is_out && *per_row && !lanes => Place::Dense,
            _ if is_out && *lanes && !per_row && inner.rank() == 1 && inner.steps[0][k] == size as isize => {
                Place::Turned(memory.take(TURN * BLOCK * size))
            }
            _ if !is_out
                && !lanes
                && inner.rank() == 0
                && *across >= 4
                && arg.is_some()
                && outer.steps[outer.rank() - 1][k] == size as isize
                && along * size <= TURNED_BYTES =>
            {
                Place::Turned(memory.take((turned_rows(along * size) * along + VECTOR) * size))
            }
            _ => Place::Staged(memory.take(BLOCK * size)),
        };
        Stream { arg, size, place, step: steps[k] }
    }

    /// Elements of a block. Rows that lie side by side are read once per fold, so a block of them should stay in the cache.
    fn len(&self, folds: usize) -> usize {
        if !self.lanes {
            return BLOCK;
        }
        let lanes = if folds == 1 && self.per_row { BLOCK } else { (128 << 10) / 4 / self.row_len.max(1) };
        (lanes.clamp(128, BLOCK) & !15).min(self.along.max(1))
    }
}

/// What it costs to compute a value again, beside a plain addition.
fn price(code: Code, frame: &Frame, sources: &[Stream]) -> f64 {
    match code {
        Code::Input(j) => match frame.inputs[j as usize].map(|k| sources[k].place) {
            Some(Place::Staged(_)) => 6.0,
            _ => 0.0,
        },
        Code::Unary(Unary::Exp | Unary::Tanh | Unary::Erf | Unary::Log | Unary::Sin | Unary::Cos, _) => 6.0,
        Code::Binary(Binary::Pow | Binary::Rem, _, _) => 6.0,
        Code::Binary(Binary::Div, _, _) | Code::Unary(Unary::Sqrt | Unary::Recip, _) => 2.0,
        Code::Const(_) | Code::Index(_) | Code::Fold(_) => 0.0,
        _ => 1.0,
    }
}

/// What the phases of a row kernel are compiled from.
struct Bodies<'a> {
    /// One per fold, and the last.
    bodies: &'a [Body],
    /// Side by side, what is hoisted out of each.
    preludes: &'a [Body],
    folds: Vec<(Fold, Repr)>,
    /// Values that later phases need again, with the phase that computes them first.
    shared: &'a [(usize, DType)],
    stores: &'a [Sink],
    first_hoisted: usize,
    /// How the last phase is run: on folded values of many rows, or on those of one.
    last: Last,
}

#[derive(Clone, Copy, PartialEq)]
enum Last {
    Grouped,
    Single,
    Blocks,
}

impl Bodies<'_> {
    fn phase(&self, p: usize, mut frame: Frame) -> Result<Phase, String> {
        // Later folds are not known yet.
        frame.folds.truncate(p);
        let mut prelude = None;
        if let Some(code) = self.preludes.get(p).filter(|code| !code.results.is_empty()) {
            prelude = Some(Program::new(code, &frame, &vec![Sink::Place; code.results.len()])?);
            for (h, &r) in code.results.iter().enumerate() {
                let repr = Repr::computed(code.code[r as usize].dtype).ok_or("a value of no known type")?;
                frame.folds.push(self.first_hoisted + h);
                frame.sources.push(Source { repr, still: false, padded: true });
            }
        }
        let mut sinks = Vec::new();
        let mut keeps = Vec::new();
        let fold = self.folds.get(p).copied();
        if fold.is_some() {
            sinks.push(Sink::Keep);
            for (v, _) in self.shared.iter().enumerate().filter(|(_, s)| s.0 == p) {
                keeps.push((v, sinks.len()));
                sinks.push(Sink::Place);
            }
        } else {
            sinks.extend_from_slice(self.stores);
            match self.last {
                Last::Grouped => {
                    let collected = |s: &mut Source| *s = Source { still: false, padded: true, ..*s };
                    frame.folds.iter().for_each(|&f| collected(&mut frame.sources[f]));
                }
                Last::Single => frame.sources.iter_mut().for_each(|s| s.still = true),
                Last::Blocks => {}
            }
        }
        Ok(Phase { program: Program::new(&self.bodies[p], &frame, &sinks)?, fold, keeps, prelude })
    }
}

impl Row {
    /// Compiles a row kernel.
    pub fn new(kernel: &Kernel, isa: Isa, threads: usize) -> Result<Row, String> {
        let Template::Row { inner, folds, per_row } = &kernel.template else { return Err("not a row kernel".into()) };
        let (rank, per_row) = (kernel.shape.len(), *per_row);
        let rows = rank - inner;
        let mut bodies: Vec<Body> = folds.iter().map(|f| f.body.clone()).collect();
        bodies.push(kernel.body.clone());
        if bodies[..folds.len()].iter().any(|b| b.results.len() != 1) {
            return Err("a fold of more than one value".into());
        }

        let operands = Operands::new(kernel, &bodies)?;
        let first_out = operands.first_out;
        let mut outer = Nest::new(&kernel.shape[..rows], &operands.half(0..rows, true), Some(first_out));
        let by = if per_row { 0 } else { first_out };
        let mut inner = Nest::new(&kernel.shape[rows..], &operands.half(rows..rank, false), Some(by));
        let (row_count, row_len) = (outer.len(), inner.len());
        let lanes = operands.across(&outer, &inner, per_row);
        let across = *outer.dims.last().unwrap_or(&1);
        let (along, steps) = if lanes { outer.split_inner() } else { inner.split_inner() };
        let blocks = Blocks { outer, inner, lanes, per_row, along, steps, across, row_len };
        let block = blocks.len(folds.len());

        // Scratch memory: staging blocks, kept values, folds, partial sums, index slots, then registers.
        let mut memory = Reserved::default();
        let Operands { mut frame, streams, motions, stores, .. } = operands;
        let mut place = |k: usize| blocks.place(streams[k], k, k >= first_out, &mut memory);
        let sources: Vec<Stream> = (0..first_out).map(&mut place).collect();
        let outs: Vec<Stream> = (first_out..motions.len()).map(&mut place).collect();
        for (source, stream) in frame.sources.iter_mut().zip(&sources) {
            source.still = stream.place == Place::Still;
            source.padded = matches!(stream.place, Place::Staged(_) | Place::Turned(_));
        }

        // Values that several phases compute.
        let room = KEPT_BYTES / if lanes { block * row_len.max(1) } else { row_len.max(1) };
        let last = if per_row { bodies.len() - 1 } else { bodies.len() };
        let price = |code: Code| price(code, &frame, &sources);
        let shared = keep_values(&mut bodies[..last], kernel.reads.len() as u32, price, room);
        let mut kept = Vec::new();
        for &(_, dtype) in &shared {
            let repr = Repr::computed(dtype).ok_or_else(|| format!("no kernels for {dtype}"))?;
            frame.inputs.push(Some(frame.sources.len()));
            frame.sources.push(Source { repr, still: false, padded: true });
            let elements = row_len * if lanes { block.next_multiple_of(VECTOR) } else { 1 };
            kept.push((memory.take((elements + VECTOR) * repr.size()), repr.size()));
        }
        // In each phase, the folds before it, then what its prelude makes of them.
        let preludes: Vec<Body> = match lanes {
            true => bodies.iter_mut().enumerate().map(|(p, body)| hoist(body, p as u32)).collect(),
            false => Vec::new(),
        };
        let hoisted = preludes.iter().map(|p| p.results.len()).max().unwrap_or(0);
        let mut reprs = Vec::new();
        for body in &bodies[..folds.len()] {
            let dtype = body.code.get(body.results[0] as usize).ok_or("a fold without code")?.dtype;
            let repr = Repr::computed(dtype).ok_or_else(|| format!("no kernels for {dtype}"))?;
            frame.folds.push(frame.sources.len());
            frame.sources.push(Source { repr, still: !lanes, padded: lanes });
            reprs.push(repr);
        }
        let first_hoisted = frame.sources.len();
        let folds_at = memory.take((reprs.len() + hoisted) * if lanes { BLOCK * 8 } else { 8 });
        let partial = memory.take(if lanes { BLOCK * 8 } else { 0 });
        let slots = memory.take(8 * sources.len());
        let zeros = memory.take(if row_len == 0 { 8 * BLOCK } else { 0 });
        let alone = leaves([&kernel.body]) == (Vec::new(), Vec::new());
        let group_at =
            (per_row && !lanes && alone).then(|| memory.take(8 * BLOCK * (folds.len() + kernel.writes.len())));

        let compiled = Bodies {
            bodies: &bodies,
            preludes: &preludes,
            folds: folds.iter().zip(reprs).map(|(f, repr)| (f.fold, repr)).collect(),
            shared: &shared,
            stores: &stores,
            first_hoisted,
            last: match (group_at, per_row && !lanes) {
                (Some(_), _) => Last::Grouped,
                (None, true) => Last::Single,
                (None, false) => Last::Blocks,
            },
        };
        let phases: Vec<Phase> =
            (0..bodies.len()).map(|p| compiled.phase(p, frame.clone())).collect::<Result<_, String>>()?;
        let programs = || phases.iter().flat_map(|p| std::iter::once(&p.program).chain(&p.prelude));
        let registers = programs().map(|p| p.registers).max().unwrap_or(0);
        let needs = Needs {
            bytes: memory.0 + registers,
            bases: source(first_hoisted + 2 * hoisted + stores.len().max(1 + shared.len())),
            rank: blocks.outer.rank() + blocks.inner.rank(),
            motions: 2 * motions.len(),
        };
        let staged = sources.iter().filter(|s| matches!(s.place, Place::Staged(_))).count();
        let ns = phases.iter().map(|p| p.program.cost + 0.1).sum::<f64>() + staged as f64;
        let overhead = if lanes { 0.0 } else { 40.0 * phases.len() as f64 };
        let tasks = share(row_count as f64 * (row_len as f64 * ns + overhead), threads);
        let items = blocks.outer.len() * if lanes { along.div_ceil(block.max(1)) } else { 1 };
        let widest = sources.iter().filter(|s| matches!(s.place, Place::Turned(_))).map(|s| along * s.size).max();
        Ok(Row {
            isa,
            outer: blocks.outer,
            inner: blocks.inner,
            along,
            block,
            lanes,
            per_row,
            turned_rows: turned_rows(widest.unwrap_or(usize::MAX)),
            sources,
            outs,
            kept,
            phases,
            folds: folds_at,
            partial,
            slots,
            zeros,
            registers: memory.0,
            group_at,
            items,
            tasks: tasks.min(items),
            needs,
        })
    }

    fn first_kept(&self) -> usize {
        self.sources.len()
    }

    fn first_fold(&self) -> usize {
        self.sources.len() + self.kept.len()
    }

    /// Points every source that comes from an operand at element `i` of the current run, in row `group` of those that were turned together.
    ///
    /// # Safety
    /// As for [`Compiled::run`]; `at` is within the nests.
    #[expect(clippy::too_many_arguments, reason = "the state of one loop nest")]
    unsafe fn bind(
        &self,
        args: &Args,
        at: &[isize],
        add: &[isize],
        (i, group): (usize, usize),
        n: usize,
        mem: *mut u8,
        bases: &mut [*mut u8],
    ) {
        for (k, s) in self.sources.iter().enumerate() {
            let position = at[k] + add[k] + i as isize * s.step;
            bases[source(k)] = match (s.place, s.arg) {
                (Place::Still | Place::Dense, Some(arg)) => args.at(arg, position),
                (Place::Turned(offset), _) => mem.wrapping_add(offset + (group * self.along + i) * s.size),
                (Place::Staged(offset), arg) => {
                    let to = mem.wrapping_add(offset);
                    // SAFETY: a staging block holds a block; operands were checked to span their memory.
                    unsafe {
                        match arg {
                            Some(arg) => moves::gather(s.size, n, args.at(arg, position), s.step, to),
                            None => moves::iota(n, position, s.step, to.cast()),
                        }
                    }
                    to
                }
                (_, None) => {
                    let slot = mem.wrapping_add(self.slots + 8 * k);
                    // SAFETY: eight bytes per source are set aside for this.
                    unsafe { slot.cast::<i64>().write_unaligned(position as i64) }
                    slot
                }
            };
        }
    }

    /// Points every source at zeros: a row of no elements has none to read.
    ///
    /// # Safety
    /// `mem` must be this kernel's scratch memory.
    unsafe fn bind_nothing(&self, mem: *mut u8, bases: &mut [*mut u8]) {
        let zeros = mem.wrapping_add(self.zeros);
        // SAFETY: a block is set aside when rows are empty.
        unsafe { zeros.write_bytes(0, 8 * BLOCK) }
        for k in 0..self.sources.len() {
            bases[source(k)] = zeros;
        }
    }

    /// Points the destinations of the last phase at element `i` of the axis that blocks run along and element `j` of the row, runs `n`
    /// elements, and copies what was staged.
    ///
    /// # Safety
    /// As for [`Compiled::run`].
    #[expect(clippy::too_many_arguments, reason = "the state of one loop nest")]
    unsafe fn finish(
        &self,
        args: &Args,
        at: &[isize],
        add: &[isize],
        (i, j): (usize, usize),
        n: usize,
        mem: *mut u8,
        bases: &mut [*mut u8],
    ) {
        let phase = self.phases.last().expect("the body is the last phase");
        let first = self.sources.len();
        let position = |k: usize, s: &Stream| at[first + k] + add[first + k] + i as isize * s.step;
        for (k, s) in self.outs.iter().enumerate() {
            bases[phase.program.out(k)] = match s.place {
                Place::Staged(offset) => mem.wrapping_add(offset),
                Place::Turned(offset) => mem.wrapping_add(offset + j % TURN * BLOCK * s.size),
                _ => args.at(s.arg.expect("destinations are memory"), position(k, s)),
            };
        }
        // SAFETY: operands were checked to span their memory.
        unsafe {
            phase.program.run_each(self.isa, n, bases);
            for (k, s) in self.outs.iter().enumerate() {
                if let (Place::Staged(offset), Some(arg)) = (s.place, s.arg) {
                    moves::scatter(s.size, n, mem.wrapping_add(offset), args.at(arg, position(k, s)), s.step);
                }
                if let (Place::Turned(offset), Some(arg)) = (s.place, s.arg)
                    && (j % TURN == TURN - 1 || j + 1 == self.inner.len())
                {
                    let before = (j % TURN * s.size) as isize;
                    let (from, to) = (mem.wrapping_add(offset), args.at(arg, position(k, s) - before));
                    moves::turn(s.size, j % TURN + 1, n, from, (BLOCK * s.size) as isize, to, s.step);
                }
            }
        }
    }

    /// Points kept values at element `i` of the row (or at element `i` times a block).
    fn bind_kept(&self, phase: &Phase, i: usize, mem: *mut u8, bases: &mut [*mut u8]) {
        for (v, &(offset, size)) in self.kept.iter().enumerate() {
            bases[source(self.first_kept() + v)] = mem.wrapping_add(offset + i * size);
        }
        for &(v, out) in &phase.keeps {
            let (offset, size) = self.kept[v];
            bases[phase.program.out(out)] = mem.wrapping_add(offset + i * size);
        }
    }

    /// # Safety
    /// As for [`Compiled::run`].
    unsafe fn run_rows(&self, rows: Range<usize>, args: &Args, scratch: &mut Scratch) {
        let Scratch { mem, bases, index, at, .. } = scratch;
        let mem = mem.as_mut_ptr().cast::<u8>();
        let registers = mem.wrapping_add(self.registers);
        let operands = self.sources.len() + self.outs.len();
        let (at, add) = at[..2 * operands].split_at_mut(operands);
        let (row_index, index) = index[..self.needs.rank].split_at_mut(self.outer.rank());
        // A row of one block is pointed at once, not once per phase.
        let runs = self.inner.len();
        let single = runs == 1 && self.along <= BLOCK;
        let last = self.outer.rank().wrapping_sub(1);
        let rows_left = |index: &[usize]| self.outer.dims.get(last).map_or(1, |dim| dim - index[last]);
        let (mut turned, mut grouped) = (Group::default(), Group::default());
        self.outer.seek(rows.start, row_index, at);
        for row in rows.clone() {
            self.inner.seek(0, index, add);
            if turned.next(self.turned_rows.min(rows_left(row_index)).min(rows.end - row)) {
                // SAFETY: as many rows as there are in the operands.
                unsafe { self.turn(args, at, turned.len, mem) }
            }
            if grouped.next(BLOCK.min(rows_left(row_index)).min(rows.end - row)) {
                for f in 0..self.phases.len() - 1 {
                    bases[source(self.first_fold() + f)] = mem.wrapping_add(self.folds + 8 * f);
                }
            }
            if single {
                // SAFETY: the row is within its operands.
                unsafe { self.bind(args, at, add, (0, turned.at), self.along, mem, bases) }
            }
            for (p, phase) in self.phases.iter().enumerate() {
                phase.program.bind(registers, bases);
                let Some((fold, repr)) = phase.fold else {
                    // SAFETY: as above.
                    unsafe {
                        if self.group_at.is_some() {
                            if grouped.at + 1 == grouped.len {
                                self.finish_group(phase, args, at, grouped.len, mem, bases);
                            }
                        } else {
                            self.last_phase(phase, single, args, at, add, index, turned.at, mem, bases);
                        }
                    }
                    break;
                };
                let mut folded = Reduction::new(fold);
                for run in 0..runs {
                    for i in (0..self.along).step_by(BLOCK) {
                        let n = BLOCK.min(self.along - i);
                        // SAFETY: as above.
                        unsafe {
                            if !single {
                                self.bind(args, at, add, (i, turned.at), n, mem, bases);
                            }
                            self.bind_kept(phase, run * self.along + i, mem, bases);
                            if i == 0 {
                                phase.program.run_still(self.isa, bases);
                            }
                            phase.program.run_each(self.isa, n, bases);
                            let loc = phase.program.kept[0];
                            folded.add(self.isa, repr, n, bases[loc.base as usize].add(loc.offset as usize));
                        }
                    }
                    if runs > 1 {
                        self.inner.advance(index, add);
                    }
                }
                // SAFETY: eight bytes per fold are set aside, and a block of them for grouped rows.
                unsafe {
                    let bytes = folded.bytes(repr);
                    mem.add(self.folds + 8 * p).cast::<[u8; 8]>().write(bytes);
                    if let Some(group_at) = self.group_at {
                        let to = mem.add(group_at + 8 * BLOCK * p + grouped.at * repr.size());
                        moves::gather(repr.size(), 1, bytes.as_ptr(), 0, to);
                    }
                }
            }
            self.outer.advance(row_index, at);
        }
    }

    /// Turns the next rows of sources that lie side by side.
    ///
    /// # Safety
    /// As for [`Compiled::run`]; there must be as many rows from here on along the last axis.
    unsafe fn turn(&self, args: &Args, at: &[isize], rows: usize, mem: *mut u8) {
        for (k, s) in self.sources.iter().enumerate() {
            if let (Place::Turned(offset), Some(arg)) = (s.place, s.arg) {
                let (from, to) = (args.at(arg, at[k]), mem.wrapping_add(offset));
                // SAFETY: the operand was checked to span its memory, and so many rows fit the staging memory.
                unsafe { moves::turn(s.size, self.along, rows, from, s.step, to, (self.along * s.size) as isize) }
            }
        }
    }

    /// The body of many rows that were folded, once for each; `at` is the last of them.
    ///
    /// # Safety
    /// As for [`Compiled::run`].
    unsafe fn finish_group(
        &self,
        phase: &Phase,
        args: &Args,
        at: &[isize],
        rows: usize,
        mem: *mut u8,
        bases: &mut [*mut u8],
    ) {
        let group_at = self.group_at.expect("only grouped rows are finished together");
        for f in 0..self.phases.len() - 1 {
            bases[source(self.first_fold() + f)] = mem.wrapping_add(group_at + 8 * BLOCK * f);
        }
        let first = self.sources.len();
        let step = |k: usize| self.outer.steps.last().map_or(0, |s| s[first + k]);
        let to = |k: usize, s: &Stream| {
            args.at(s.arg.expect("destinations are memory"), at[first + k] - (rows as isize - 1) * step(k))
        };
        let dense = |k: usize, s: &Stream| rows == 1 || step(k) == s.size as isize;
        let stage = |k: usize| mem.wrapping_add(group_at + 8 * BLOCK * (self.phases.len() - 1 + k));
        for (k, s) in self.outs.iter().enumerate() {
            bases[phase.program.out(k)] = if dense(k, s) { to(k, s) } else { stage(k) };
        }
        // SAFETY: folded values have blocks, and so do staged results; operands were checked to span their memory.
        unsafe {
            phase.program.run_still(self.isa, bases);
            phase.program.run_each(self.isa, rows, bases);
            for (k, s) in self.outs.iter().enumerate().filter(|(k, s)| !dense(*k, s)) {
                moves::scatter(s.size, rows, stage(k), to(k, s), step(k));
            }
        }
    }

    /// The body, at every element or once.
    ///
    /// # Safety
    /// As for [`Compiled::run`].
    #[expect(clippy::too_many_arguments, reason = "the state of one loop nest")]
    unsafe fn last_phase(
        &self,
        phase: &Phase,
        single: bool,
        args: &Args,
        at: &[isize],
        add: &mut [isize],
        index: &mut [usize],
        group: usize,
        mem: *mut u8,
        bases: &mut [*mut u8],
    ) {
        // SAFETY: the row is within its operands.
        unsafe {
            if self.per_row {
                if self.inner.len() * self.along == 0 {
                    self.bind_nothing(mem, bases);
                } else if !single {
                    self.bind(args, at, add, (0, group), 1, mem, bases);
                }
                phase.program.run_still(self.isa, bases);
                self.finish(args, at, add, (0, 0), 1, mem, bases);
                return;
            }
            let runs = self.inner.len();
            for run in 0..runs {
                for i in (0..self.along).step_by(BLOCK) {
                    let n = BLOCK.min(self.along - i);
                    if !single {
                        self.bind(args, at, add, (i, group), n, mem, bases);
                    }
                    self.bind_kept(phase, run * self.along + i, mem, bases);
                    if i == 0 {
                        phase.program.run_still(self.isa, bases);
                    }
                    self.finish(args, at, add, (i, 0), n, mem, bases);
                }
                if runs > 1 {
                    self.inner.advance(index, add);
                }
            }
        }
    }

    /// # Safety
    /// As for [`Compiled::run`].
    unsafe fn run_lanes(&self, items: Range<usize>, args: &Args, scratch: &mut Scratch) {
        let Scratch { mem, bases, index, at, .. } = scratch;
        let mem = mem.as_mut_ptr().cast::<u8>();
        let registers = mem.wrapping_add(self.registers);
        let operands = self.sources.len() + self.outs.len();
        let (at, add) = at[..2 * operands].split_at_mut(operands);
        let (row_index, index) = index[..self.needs.rank].split_at_mut(self.outer.rank());
        let fold_block = |f: usize| mem.wrapping_add(self.folds + f * BLOCK * 8);
        for f in 0..self.phases.len() - 1 {
            bases[source(self.first_fold() + f)] = fold_block(f);
        }
        let pieces = self.along.div_ceil(self.block);
        let len = self.inner.len();
        self.outer.seek(items.start / pieces, row_index, at);
        for item in items {
            let lane = item % pieces * self.block;
            let n = self.block.min(self.along - lane);
            for (p, phase) in self.phases.iter().enumerate() {
                phase.program.bind(registers, bases);
                self.inner.seek(0, index, add);
                let partial = mem.wrapping_add(self.partial);
                if let Some((fold, repr)) = phase.fold {
                    // SAFETY: a fold and the partial sums have a block each.
                    unsafe {
                        fill_identity(fold, repr, n, fold_block(p));
                        fill_identity(fold, repr, n, partial);
                    }
                }
                if let Some(prelude) = &phase.prelude {
                    let first = self.first_fold() + self.phases.len() - 1;
                    prelude.bind(registers, bases);
                    for h in 0..prelude.outputs() {
                        let block = fold_block(self.phases.len() - 1 + h);
                        bases[prelude.out(h)] = block;
                        bases[source(first + h)] = block;
                    }
                    // SAFETY: folds and hoisted values have a block each.
                    unsafe {
                        prelude.run_still(self.isa, bases);
                        prelude.run_each(self.isa, n, bases);
                    }
                    phase.program.bind(registers, bases);
                }
                let once = phase.fold.is_none() && self.per_row;
                for j in 0..if once { 1 } else { len } {
                    // SAFETY: the lanes and the element are within the operands.
                    unsafe {
                        match len {
                            0 => self.bind_nothing(mem, bases),
                            _ => self.bind(args, at, add, (lane, 0), n, mem, bases),
                        }
                        self.bind_kept(phase, j * self.block.next_multiple_of(VECTOR), mem, bases);
                        phase.program.run_still(self.isa, bases);
                        let Some((fold, repr)) = phase.fold else {
                            self.finish(args, at, add, (lane, j), n, mem, bases);
                            self.inner.advance(index, add);
                            continue;
                        };
                        phase.program.run_each(self.isa, n, bases);
                        let loc = phase.program.kept[0];
                        let value = bases[loc.base as usize].add(loc.offset as usize);
                        let partials = fold == Fold::Sum && len > PARTIAL;
                        accumulate(self.isa, fold, repr, n, if partials { partial } else { fold_block(p) }, value);
                        if partials && (j % PARTIAL == PARTIAL - 1 || j + 1 == len) {
                            accumulate(self.isa, fold, repr, n, fold_block(p), partial);
                            fill_identity(fold, repr, n, partial);
                        }
                    }
                    self.inner.advance(index, add);
                }
            }
            if lane + n == self.along {
                self.outer.advance(row_index, at);
            }
        }
    }
}

impl Compiled for Row {
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
            if self.lanes {
                self.run_lanes(items, args, scratch);
            } else {
                self.run_rows(items, args, scratch);
            }
        }
    }
}
