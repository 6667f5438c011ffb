//! Reductions and row-wise kernels.
//!
//! A row is reduced block by block along its densest axis. Where rows lie side by side instead, as in a sum over leading axes or a
//! normalisation over channels, blocks run across rows: each holds one element of many rows, and results of reductions are blocks, too.
//!
//! Sums are accurate: blocks are summed in many parts and the parts in `f64`; across rows, sums have two levels.

use super::block::{BLOCK, Repr, VECTOR};
use super::moves;
use super::nest::{Motion, Nest};
use super::operands::{BlockOperand, Feed, Operands, Place, Reserved, leaves};
use super::program::{Frame, Program, Sink, Source, source};
use super::reduction::{Accumulator, accumulate, fill_identity};
use super::rewrite::{hoist, keep_values};
use super::shares::Shares;
use super::simd::Isa;
use super::task::{Args, Compiled, Needs, Scratch};
use plimsoll_core::dtype::DType;
use plimsoll_core::expr::{Binary, Body, Code, Unary};
use plimsoll_core::kernel::{Kernel, Reduction, RowReduction, Template};
use std::ops::Range;

/// Most bytes of intermediate values that are kept from one pass over a row to the next.
const KEPT_BYTES: usize = 64 << 10;
/// Across rows, this many additions go to one partial sum.
const PARTIAL: usize = 32;
/// Blocks of results that are transposed together.
const TRANSPOSED_BLOCKS: usize = 16;
/// Rows of up to this many bytes are transposed.
const TRANSPOSED_BYTES: usize = 16 << 10;

/// How many rows of so many bytes are transposed together: some cache lines of each element, but no more than stay in the cache.
fn transposed_rows(bytes: usize) -> usize {
    ((32 << 10) / bytes.max(1)).clamp(16, 64)
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

/// One pass over a row: a reduction, or the last, which stores the results.
struct Phase {
    program: Program,
    /// How the first result is reduced, and its representation; the last phase has none.
    reduction: Option<(Reduction, Repr)>,
    /// Values that are kept for later phases: kept value and destination number.
    keeps: Vec<(usize, usize)>,
    /// Across rows, computes once per block of rows what depends on earlier reductions alone.
    prelude: Option<Program>,
}

/// A compiled row kernel.
pub struct Row {
    isa: Isa,
    blocks: Blocks,
    /// Elements of a block.
    block: usize,
    /// Rows that are transposed together.
    transposed_rows: usize,
    sources: Vec<BlockOperand>,
    outs: Vec<BlockOperand>,
    /// Sources that are values kept from an earlier phase: offset in scratch memory and size.
    kept: Vec<(usize, usize)>,
    phases: Vec<Phase>,
    offsets: Offsets,
    shares: Shares,
    needs: Needs,
}

/// Offsets in scratch memory.
struct Offsets {
    /// Results of reductions, then values that preludes compute: one slot or one block each.
    results: usize,
    /// Partial sums.
    partial: usize,
    /// A block of zeros, for rows of no elements.
    zeros: usize,
    /// Results of many rows, when the body needs nothing else: it then runs once for all of them.
    group: Option<usize>,
    /// Registers of whichever program, body or prelude, has most of them.
    registers: usize,
}

/// The order of blocks over a row kernel, and the loops around them.
struct Blocks {
    /// Over rows; without the axis that blocks run along, when that is one of its axes.
    outer: Nest,
    /// Over the elements of a row; likewise.
    inner: Nest,
    /// Blocks run across rows.
    across: bool,
    /// The kernel has one result per row.
    per_row: bool,
    /// Extent of the axis that blocks run along.
    along: usize,
    /// Per operand, along that axis.
    steps: Vec<isize>,
    /// Rows, elements of a row, and rows along the innermost axis that rows have.
    rows: usize,
    row_len: usize,
    last_rows: usize,
    first_out: usize,
    /// Per operand, true if it does not move along a row.
    still: Vec<bool>,
}

impl Blocks {
    /// Chooses how blocks run over a kernel whose last `axes` axes are those of a row.
    fn new(kernel: &Kernel, operands: &Operands, axes: usize, per_row: bool) -> Blocks {
        let (first_out, split) = (operands.first_out(), kernel.shape.len() - axes);
        let half = |axes: Range<usize>, start: bool| -> Vec<Motion> {
            let start = |m: &Motion| if start { m.start } else { 0 };
            operands.motions.iter().map(|m| Motion { steps: m.steps[axes.clone()].to_vec(), start: start(m) }).collect()
        };
        // The outer loops start where operands do, the inner ones at a row.
        let outer = Nest::new(&kernel.shape[..split], &half(0..split, true), Some(first_out));
        let by = if per_row { 0 } else { first_out };
        let inner = Nest::new(&kernel.shape[split..], &half(split..kernel.shape.len(), false), Some(by));
        let (rows, row_len, last_rows) = (outer.len(), inner.len(), *outer.dims.last().unwrap_or(&1));
        let (along, steps) = (0, Vec::new());
        let still = operands.motions.iter().map(|m| m.steps[split..].iter().all(|&step| step == 0)).collect();
        let mut blocks =
            Blocks { outer, inner, across: false, per_row, along, steps, rows, row_len, last_rows, first_out, still };
        blocks.across = blocks.should_cross(operands);
        let nest = if blocks.across { &mut blocks.outer } else { &mut blocks.inner };
        (blocks.along, blocks.steps) = nest.split_inner();
        blocks
    }

    /// True if data is dense across rows, or rows are very short.
    fn should_cross(&self, operands: &Operands) -> bool {
        let Blocks { outer, inner, per_row, row_len, last_rows, first_out, .. } = self;
        let step = |nest: &Nest, k: usize| nest.steps.last().map_or(0, |s| s[k]);
        let is_dense = |nest: &Nest, k: usize| step(nest, k) == operands.size(k) as isize;
        // Only operands that move both ways have a preference.
        let moves = |nest: &Nest, k: usize| nest.steps.iter().any(|s| s[k] != 0);
        let full = |k: &usize| moves(outer, *k) && moves(inner, *k);
        let dense = |nest: &Nest| (0..*first_out).filter(full).filter(|&k| is_dense(nest, k)).count();
        // A normalisation of rows that lie side by side is better transposed, some rows at a time, than read once per reduction.
        let out_dense = (*first_out..operands.motions.len()).all(|k| is_dense(outer, k));
        let worth = *per_row || ((out_dense || *row_len <= 128) && *last_rows >= 256);
        let side_by_side = dense(outer) > dense(inner) && worth;
        *last_rows >= 8 && ((side_by_side && *last_rows >= 16) || row_len * 2 <= (*last_rows).min(32))
    }

    /// Chooses the way to blocks of an operand, and takes the scratch memory that it needs.
    fn place(&self, k: usize, feed: Feed, size: usize, memory: &mut Reserved) -> (Place, isize) {
        let (step, dense, is_out) = (self.steps[k], size as isize, k >= self.first_out);
        let place = match feed {
            Feed::Index if step == 0 => Place::Slot(memory.take(size)),
            Feed::Index | Feed::Core => Place::Staged(memory.take(BLOCK * size)),
            Feed::Memory(_) if step == 0 && !is_out => Place::Still,
            Feed::Memory(_) if step == dense || self.along == 1 => Place::Dense,
            // A result per row is one element, wherever it goes.
            Feed::Memory(_) if is_out && self.per_row && !self.across => Place::Dense,
            Feed::Memory(_) if is_out && self.is_dense_along_row(k, dense) => {
                Place::Transposed(memory.take(TRANSPOSED_BLOCKS * BLOCK * size))
            }
            Feed::Memory(_) if !is_out && self.is_dense_across(k, dense) => {
                Place::Transposed(memory.take((transposed_rows(self.along * size) * self.along + VECTOR) * size))
            }
            Feed::Memory(_) => Place::Staged(memory.take(BLOCK * size)),
        };
        (place, step)
    }

    /// True if blocks run across rows, but a result is dense along them.
    fn is_dense_along_row(&self, k: usize, dense: isize) -> bool {
        self.across && !self.per_row && self.inner.rank() == 1 && self.inner.steps[0][k] == dense
    }

    /// True if blocks run along rows, but a source is dense across them, and some of its rows stay in the cache.
    fn is_dense_across(&self, k: usize, dense: isize) -> bool {
        let one_run = !self.across && self.inner.rank() == 0 && self.last_rows >= 4;
        let fits = self.along * dense as usize <= TRANSPOSED_BYTES;
        one_run && fits && self.outer.steps.last().is_some_and(|steps| steps[k] == dense)
    }

    /// Elements of a block. Rows that lie side by side are read once per reduction, so a block of them should stay in the cache.
    fn len(&self, reductions: usize) -> usize {
        if !self.across {
            return BLOCK;
        }
        let rows = if reductions == 1 && self.per_row { BLOCK } else { (128 << 10) / 4 / self.row_len.max(1) };
        (rows.clamp(128, BLOCK) & !15).min(self.along.max(1))
    }
}

/// The cost of computing a value again, beside a plain addition.
fn price(code: Code, frame: &Frame, sources: &[BlockOperand]) -> f64 {
    match code {
        Code::Input(j) => match frame.inputs[j as usize].map(|k| sources[k].place) {
            Some(Place::Staged(_)) => 6.0,
            _ => 0.0,
        },
        Code::Unary(Unary::Exp | Unary::Tanh | Unary::Erf | Unary::Log | Unary::Sin | Unary::Cos, _) => 6.0,
        Code::Binary(Binary::Pow | Binary::Rem, _, _) => 6.0,
        Code::Binary(Binary::Div, _, _) | Code::Unary(Unary::Sqrt | Unary::Recip, _) => 2.0,
        Code::Const(_) | Code::Index(_) | Code::Reduction(_) => 0.0,
        _ => 1.0,
    }
}

/// A row kernel on its way to phases: bodies, the sources that they read, and the scratch memory that is taken.
struct Draft<'a> {
    blocks: &'a Blocks,
    /// Elements of a block.
    block: usize,
    /// One per reduction, and the last.
    bodies: Vec<Body>,
    reductions: &'a [RowReduction],
    frame: Frame,
    memory: Reserved,
}

impl Draft<'_> {
    fn add_source(&mut self, dtype: DType, still: bool, padded: bool) -> Result<Repr, String> {
        let repr = Repr::computed(dtype).ok_or_else(|| format!("no kernels for {dtype}"))?;
        self.frame.sources.push(Source { repr, still, padded });
        Ok(repr)
    }

    /// Finds values that later phases need again, and takes memory for them. Returns the phase that computes each first, and its offset and
    /// size.
    fn keep_values(&mut self, sources: &[BlockOperand]) -> Result<(Vec<usize>, Vec<(usize, usize)>), String> {
        let Blocks { across, per_row, row_len, .. } = *self.blocks;
        let lanes = if across { self.block } else { 1 };
        let last = if per_row { self.bodies.len() - 1 } else { self.bodies.len() };
        let price = |code: Code| price(code, &self.frame, sources);
        let first = self.frame.inputs.len() as u32;
        let shared = keep_values(&mut self.bodies[..last], first, price, KEPT_BYTES / (lanes * row_len.max(1)));
        let mut kept = Vec::new();
        for &(_, dtype) in &shared {
            self.frame.inputs.push(Some(self.frame.sources.len()));
            let size = self.add_source(dtype, false, true)?.size();
            let elements = row_len * if across { lanes.next_multiple_of(VECTOR) } else { 1 };
            kept.push((self.memory.take((elements + VECTOR) * size), size));
        }
        Ok((shared.into_iter().map(|(phase, _)| phase).collect(), kept))
    }

    /// Across rows, takes values that depend on reductions alone out of the bodies. Returns, per phase, the code that computes them once per
    /// block of rows.
    fn hoist(&mut self) -> Vec<Body> {
        if !self.blocks.across {
            return vec![Body::default(); self.bodies.len()];
        }
        // `Reduction`s of a phase are the reductions before it, then the values of its prelude.
        self.bodies.iter_mut().enumerate().map(|(p, body)| hoist(body, p as u32)).collect()
    }

    /// Makes results of reductions sources of later phases.
    fn accumulators(&mut self) -> Result<Vec<(Reduction, Repr)>, String> {
        let across = self.blocks.across;
        let mut accumulators = Vec::new();
        for (p, reduction) in self.reductions.iter().enumerate() {
            let body = &self.bodies[p];
            let dtype = body.code.get(body.results[0] as usize).ok_or("a reduction without code")?.dtype;
            self.frame.reductions.push(self.frame.sources.len());
            accumulators.push((reduction.reduction, self.add_source(dtype, !across, across)?));
        }
        Ok(accumulators)
    }

    /// Compiles a phase. `first_kept` are the phases that compute kept values first.
    fn phase(
        &self,
        p: usize,
        prelude: &Body,
        reduction: Option<(Reduction, Repr)>,
        first_kept: &[usize],
        last: (&[Sink], Last),
    ) -> Result<Phase, String> {
        let mut frame = self.frame.clone();
        let first_hoisted = frame.sources.len();
        // Later reductions are not known yet.
        frame.reductions.truncate(p);
        let mut compiled = None;
        if !prelude.results.is_empty() {
            compiled = Some(Program::new(prelude, &frame, &vec![Sink::Place; prelude.results.len()])?);
            for (h, &r) in prelude.results.iter().enumerate() {
                let repr = Repr::computed(prelude.code[r as usize].dtype).ok_or("a value of no known type")?;
                frame.reductions.push(first_hoisted + h);
                frame.sources.push(Source { repr, still: false, padded: true });
            }
        }
        let (mut sinks, mut keeps) = (Vec::new(), Vec::new());
        if reduction.is_some() {
            sinks.push(Sink::Keep);
            for (v, _) in first_kept.iter().enumerate().filter(|(_, first)| **first == p) {
                keeps.push((v, sinks.len()));
                sinks.push(Sink::Place);
            }
        } else {
            sinks.extend_from_slice(last.0);
            match last.1 {
                Last::Grouped => {
                    let collected = |s: &mut Source| *s = Source { still: false, padded: true, ..*s };
                    frame.reductions.iter().for_each(|&f| collected(&mut frame.sources[f]));
                }
                Last::Single => frame.sources.iter_mut().for_each(|s| s.still = true),
                Last::Blocks => {}
            }
        }
        Ok(Phase { program: Program::new(&self.bodies[p], &frame, &sinks)?, reduction, keeps, prelude: compiled })
    }
}

/// The operands of the last phase.
#[derive(Clone, Copy, PartialEq)]
enum Last {
    /// On results of reductions of many rows.
    Grouped,
    /// On those of one row.
    Single,
    /// On all elements.
    Blocks,
}

impl Row {
    /// Compiles a row kernel.
    pub fn new(kernel: &Kernel, isa: Isa, threads: usize) -> Result<Row, String> {
        let Template::Row { inner, reductions, per_row } = &kernel.template else {
            return Err("not a row kernel".into());
        };
        if reductions.iter().any(|f| f.body.results.len() != 1) {
            return Err("a reduction of more than one value".into());
        }
        let bodies: Vec<Body> = reductions.iter().map(|f| &f.body).chain([&kernel.body]).cloned().collect();
        let mut operands = Operands::new(kernel, &bodies, None)?;
        let blocks = Blocks::new(kernel, &operands, *inner, *per_row);
        let Blocks { across, row_len, along, .. } = blocks;
        let block = blocks.len(reductions.len());
        let mut memory = Reserved::default();
        let (sources, outs) = operands.place(|k, feed, size| blocks.place(k, feed, size, &mut memory));

        let Operands { frame, sinks, .. } = operands;
        let mut draft = Draft { blocks: &blocks, block, bodies, reductions, frame, memory };
        let (first_kept, kept) = draft.keep_values(&sources)?;
        let preludes = draft.hoist();
        let hoisted = preludes.iter().map(|p| p.results.len()).max().unwrap_or(0);
        let accumulators = draft.accumulators()?;
        let memory = &mut draft.memory;
        let results = memory.take((accumulators.len() + hoisted) * if across { BLOCK * 8 } else { 8 });
        let partial = memory.take(if across { BLOCK * 8 } else { 0 });
        let zeros = memory.take(if row_len == 0 { 8 * BLOCK } else { 0 });
        let once = *per_row && !across;
        let alone = leaves([&kernel.body]) == (Vec::new(), Vec::new());
        let group = (once && alone).then(|| memory.take(8 * BLOCK * (reductions.len() + kernel.writes.len())));
        let offsets = Offsets { results, partial, zeros, group, registers: memory.0 };

        let last = match group {
            Some(_) => Last::Grouped,
            None if once => Last::Single,
            None => Last::Blocks,
        };
        let accumulators = accumulators.into_iter().map(Some).chain([None]);
        let phases = preludes.iter().zip(accumulators).enumerate();
        let phases = phases.map(|(p, (prelude, by))| draft.phase(p, prelude, by, &first_kept, (&sinks, last)));
        let phases: Vec<Phase> = phases.collect::<Result<_, String>>()?;
        let programs = || phases.iter().flat_map(|p| std::iter::once(&p.program).chain(&p.prelude));
        let registers = programs().map(|p| p.registers).max().unwrap_or(0);
        let needs = Needs {
            bytes: offsets.registers + registers,
            bases: source(draft.frame.sources.len() + 2 * hoisted + sinks.len().max(1 + kept.len())),
            rank: blocks.outer.rank() + blocks.inner.rank(),
            motions: 2 * (sources.len() + outs.len()),
            ..Needs::default()
        };
        let staged = sources.iter().filter(|s| matches!(s.place, Place::Staged(_))).count();
        let ns = phases.iter().map(|p| p.program.cost + 0.1).sum::<f64>() + staged as f64;
        let overhead = if across { 0.0 } else { 40.0 * phases.len() as f64 };
        let ns = blocks.rows as f64 * (row_len as f64 * ns + overhead);
        let (len, piece) = if across { (along, block) } else { (1, 1) };
        let shares = Shares::of_pieces(blocks.outer.len(), len, piece, ns, threads);
        let widest = sources.iter().filter(|s| matches!(s.place, Place::Transposed(_))).map(|s| along * s.size).max();
        let transposed_rows = transposed_rows(widest.unwrap_or(usize::MAX));
        Ok(Row { isa, blocks, block, transposed_rows, sources, outs, kept, phases, offsets, shares, needs })
    }

    /// The source that is the first kept value.
    fn first_kept(&self) -> usize {
        self.sources.len()
    }

    /// The source that is the result of the first reduction.
    fn first_result(&self) -> usize {
        self.sources.len() + self.kept.len()
    }

    /// Points every source that comes from an operand at element `i` of the axis that blocks run along.
    ///
    /// # Safety
    /// As for [`Compiled::run`]; the walk is within the nests.
    unsafe fn bind(&self, walk: &mut Walk, i: usize, n: usize) {
        for (k, s) in self.sources.iter().enumerate() {
            walk.bases[source(k)] = match s.place {
                Place::Transposed(offset) => {
                    walk.mem.wrapping_add(offset + (walk.transposed.at * self.blocks.along + i) * s.size)
                }
                // SAFETY: operands were checked to span their memory.
                _ => unsafe { s.block(walk.args, walk.position(k, i, s), n, walk.mem) },
            };
        }
    }

    /// Points every source that moves along a row at zeros: a row of no elements has none to read. The others are there.
    ///
    /// # Safety
    /// As for [`bind`](Self::bind).
    unsafe fn bind_zeros(&self, walk: &mut Walk, i: usize, n: usize) {
        let zeros = walk.mem.wrapping_add(self.offsets.zeros);
        // SAFETY: a block is set aside when rows are empty; operands that stand still were checked to span their memory.
        unsafe {
            zeros.write_bytes(0, 8 * BLOCK);
            for (k, s) in self.sources.iter().enumerate() {
                let is_there = self.blocks.still[k] && !matches!(s.place, Place::Transposed(_));
                walk.bases[source(k)] =
                    if is_there { s.block(walk.args, walk.position(k, i, s), n, walk.mem) } else { zeros };
            }
        }
    }

    /// Points kept values at element `i` of the row (or at element `i` times a block).
    fn bind_kept(&self, phase: &Phase, i: usize, walk: &mut Walk) {
        let at = |v: usize| {
            let (offset, size) = self.kept[v];
            walk.mem.wrapping_add(offset + i * size)
        };
        for v in 0..self.kept.len() {
            walk.bases[source(self.first_kept() + v)] = at(v);
        }
        for &(v, out) in &phase.keeps {
            walk.bases[phase.program.out(out)] = at(v);
        }
    }

    /// Points the destinations at element `i` of the axis that blocks run along and element `j` of the row, runs the last phase for `n`
    /// elements, and copies staged results.
    ///
    /// # Safety
    /// As for [`Compiled::run`].
    unsafe fn finish(&self, phase: &Phase, walk: &mut Walk, (i, j): (usize, usize), n: usize) {
        let first = self.sources.len();
        let part = j % TRANSPOSED_BLOCKS;
        for (k, s) in self.outs.iter().enumerate() {
            walk.bases[phase.program.out(k)] = match s.place {
                Place::Staged(offset) => walk.mem.wrapping_add(offset),
                Place::Transposed(offset) => walk.mem.wrapping_add(offset + part * BLOCK * s.size),
                _ => walk.args.at(s.arg(), walk.position(first + k, i, s)),
            };
        }
        // SAFETY: operands were checked to span their memory.
        unsafe {
            phase.program.run_each(self.isa, n, walk.bases);
            for (k, s) in self.outs.iter().enumerate() {
                let position = || walk.position(first + k, i, s);
                match s.place {
                    Place::Staged(offset) => {
                        let to = walk.args.at(s.arg(), position());
                        moves::scatter(s.size, n, walk.mem.wrapping_add(offset), to, s.step);
                    }
                    Place::Transposed(offset) if part + 1 == TRANSPOSED_BLOCKS || j + 1 == self.blocks.row_len => {
                        let to = walk.args.at(s.arg(), position() - (part * s.size) as isize);
                        let from = (walk.mem.wrapping_add(offset).cast_const(), (BLOCK * s.size) as isize);
                        moves::transpose(s.size, part + 1, n, from, (to, s.step));
                    }
                    _ => {}
                }
            }
        }
    }

    /// Blocks along rows: the phases of one row after another.
    ///
    /// # Safety
    /// As for [`Compiled::run`].
    unsafe fn run_along(&self, rows: Range<usize>, walk: &mut Walk) {
        let outer = &self.blocks.outer;
        let registers = walk.mem.wrapping_add(self.offsets.registers);
        let mut grouped = Group::default();
        outer.seek(rows.start, walk.row, walk.at);
        for row in rows.clone() {
            self.blocks.inner.seek(0, walk.index, walk.add);
            let left = match (outer.dims.last(), walk.row.last()) {
                (Some(dim), Some(at)) => (dim - at).min(rows.end - row),
                _ => 1,
            };
            // SAFETY: the row is within its operands, and as many rows as are left follow it; results of reductions have eight bytes each,
            // and a block of them where rows are grouped.
            unsafe {
                if walk.transposed.next(self.transposed_rows.min(left)) {
                    self.transpose(walk);
                }
                if grouped.next(BLOCK.min(left)) {
                    self.bind_results(walk, self.offsets.results, 8);
                }
                if self.is_one_block() {
                    self.bind(walk, 0, self.blocks.along);
                }
                for (p, phase) in self.phases.iter().enumerate() {
                    phase.program.bind(registers, walk.bases);
                    let Some((by, repr)) = phase.reduction else {
                        match self.offsets.group {
                            None => self.last_phase(phase, walk),
                            Some(group) if grouped.at + 1 == grouped.len => {
                                self.finish_group(phase, group, walk, grouped.len)
                            }
                            Some(_) => {}
                        }
                        break;
                    };
                    let mut result = Accumulator::new(by);
                    self.each_block(phase, walk, |walk, _, n| {
                        phase.program.run_each(self.isa, n, walk.bases);
                        result.add(self.isa, repr, n, walk.value(&phase.program));
                    });
                    let bytes = result.bytes(repr);
                    walk.mem.add(self.offsets.results + 8 * p).cast::<[u8; 8]>().write(bytes);
                    if let Some(group) = self.offsets.group {
                        let to = walk.mem.add(group + 8 * BLOCK * p + grouped.at * repr.size());
                        moves::gather(repr.size(), 1, bytes.as_ptr(), 0, to);
                    }
                }
            }
            outer.advance(walk.row, walk.at);
        }
    }

    /// A row of one block is pointed at once, not once per phase.
    fn is_one_block(&self) -> bool {
        self.blocks.inner.len() == 1 && self.blocks.along <= BLOCK
    }

    /// Points the results of reductions at consecutive places of so many bytes.
    fn bind_results(&self, walk: &mut Walk, offset: usize, bytes: usize) {
        for p in 0..self.phases.len() - 1 {
            walk.bases[source(self.first_result() + p)] = walk.mem.wrapping_add(offset + bytes * p);
        }
    }

    /// Points the sources at each block of a row in turn, and calls `f` with its first element along the axis and its length.
    ///
    /// # Safety
    /// As for [`Compiled::run`].
    #[inline(always)]
    unsafe fn each_block(&self, phase: &Phase, walk: &mut Walk, mut f: impl FnMut(&mut Walk, usize, usize)) {
        let along = self.blocks.along;
        let runs = self.blocks.inner.len();
        for run in 0..runs {
            for i in (0..along).step_by(BLOCK) {
                let n = BLOCK.min(along - i);
                // SAFETY: the block is within its operands.
                unsafe {
                    if !self.is_one_block() {
                        self.bind(walk, i, n);
                    }
                    self.bind_kept(phase, run * along + i, walk);
                    if i == 0 {
                        phase.program.run_still(self.isa, walk.bases);
                    }
                }
                f(walk, i, n);
            }
            if runs > 1 {
                self.blocks.inner.advance(walk.index, walk.add);
            }
        }
    }

    /// Transposes the next rows of sources that lie side by side.
    ///
    /// # Safety
    /// As for [`Compiled::run`]; there must be as many rows from here on along the last axis.
    unsafe fn transpose(&self, walk: &Walk) {
        let (along, rows) = (self.blocks.along, walk.transposed.len);
        for (k, s) in self.sources.iter().enumerate() {
            if let Place::Transposed(offset) = s.place {
                let from = (walk.args.at(s.arg(), walk.at[k]).cast_const(), s.step);
                let to = (walk.mem.wrapping_add(offset), (along * s.size) as isize);
                // SAFETY: the operand was checked to span its memory, and so many rows fit the staging memory.
                unsafe { moves::transpose(s.size, along, rows, from, to) }
            }
        }
    }

    /// The body of many rows that were reduced, once for each; the walk is at the last of them.
    ///
    /// # Safety
    /// As for [`Compiled::run`].
    unsafe fn finish_group(&self, phase: &Phase, group: usize, walk: &mut Walk, rows: usize) {
        self.bind_results(walk, group, 8 * BLOCK);
        let Walk { args, at, mem, bases, .. } = walk;
        let first = self.sources.len();
        let step = |k: usize| self.blocks.outer.steps.last().map_or(0, |s| s[first + k]);
        let to = |k: usize, s: &BlockOperand| args.at(s.arg(), at[first + k] - (rows as isize - 1) * step(k));
        let dense = |k: usize, s: &BlockOperand| rows == 1 || step(k) == s.size as isize;
        let stage = |k: usize| mem.wrapping_add(group + 8 * BLOCK * (self.phases.len() - 1 + k));
        for (k, s) in self.outs.iter().enumerate() {
            bases[phase.program.out(k)] = if dense(k, s) { to(k, s) } else { stage(k) };
        }
        // SAFETY: results of reductions have blocks, and so do staged results; operands were checked to span their memory.
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
    unsafe fn last_phase(&self, phase: &Phase, walk: &mut Walk) {
        // SAFETY: the row is within its operands.
        unsafe {
            if !self.blocks.per_row {
                return self.each_block(phase, walk, |walk, i, n| self.finish(phase, walk, (i, 0), n));
            }
            if self.blocks.row_len == 0 {
                self.bind_zeros(walk, 0, 1);
            } else if !self.is_one_block() {
                self.bind(walk, 0, 1);
            }
            phase.program.run_still(self.isa, walk.bases);
            self.finish(phase, walk, (0, 0), 1);
        }
    }

    /// Blocks across rows: the phases of a block of rows after another.
    ///
    /// # Safety
    /// As for [`Compiled::run`].
    unsafe fn run_across(&self, items: Range<usize>, walk: &mut Walk) {
        let Blocks { outer, inner, .. } = &self.blocks;
        self.bind_results(walk, self.offsets.results, 8 * BLOCK);
        let mut outermost = self.shares.row(items.start);
        outer.seek(outermost, walk.row, walk.at);
        for item in items {
            if self.shares.row(item) != outermost {
                outermost += 1;
                outer.advance(walk.row, walk.at);
            }
            let rows = self.shares.elements(item);
            for (p, phase) in self.phases.iter().enumerate() {
                inner.seek(0, walk.index, walk.add);
                // SAFETY: the rows are within the operands.
                unsafe {
                    self.run_prelude(phase, rows.len(), walk);
                    phase.program.bind(walk.mem.wrapping_add(self.offsets.registers), walk.bases);
                    match phase.reduction {
                        Some(reduction) => self.reduce_across(phase, p, reduction, &rows, walk),
                        None => self.finish_across(phase, &rows, walk),
                    }
                }
            }
        }
    }

    /// Computes the values that a phase makes of earlier reductions alone, for `n` rows.
    ///
    /// # Safety
    /// As for [`Compiled::run`].
    unsafe fn run_prelude(&self, phase: &Phase, n: usize, walk: &mut Walk) {
        let Some(prelude) = &phase.prelude else { return };
        let reductions = self.phases.len() - 1;
        prelude.bind(walk.mem.wrapping_add(self.offsets.registers), walk.bases);
        for h in 0..prelude.outputs() {
            let block = walk.mem.wrapping_add(self.offsets.results + 8 * BLOCK * (reductions + h));
            walk.bases[prelude.out(h)] = block;
            walk.bases[source(self.first_result() + reductions + h)] = block;
        }
        // SAFETY: results of reductions and of preludes have a block each.
        unsafe {
            prelude.run_still(self.isa, walk.bases);
            prelude.run_each(self.isa, n, walk.bases);
        }
    }

    /// Points the sources at element `j` of some rows.
    ///
    /// # Safety
    /// As for [`Compiled::run`].
    #[inline(always)]
    unsafe fn bind_across(&self, phase: &Phase, rows: &Range<usize>, j: usize, walk: &mut Walk) {
        // SAFETY: the rows are within the operands.
        unsafe {
            match self.blocks.row_len {
                0 => self.bind_zeros(walk, rows.start, rows.len()),
                _ => self.bind(walk, rows.start, rows.len()),
            }
            self.bind_kept(phase, j * self.block.next_multiple_of(VECTOR), walk);
            phase.program.run_still(self.isa, walk.bases);
        }
    }

    /// Reduces some rows, element by element. Long sums go by way of partial sums.
    ///
    /// # Safety
    /// As for [`Compiled::run`].
    unsafe fn reduce_across(
        &self,
        phase: &Phase,
        p: usize,
        (by, repr): (Reduction, Repr),
        rows: &Range<usize>,
        walk: &mut Walk,
    ) {
        let (n, len) = (rows.len(), self.blocks.row_len);
        let result = walk.mem.wrapping_add(self.offsets.results + 8 * BLOCK * p);
        let partial = walk.mem.wrapping_add(self.offsets.partial);
        let has_partial = by == Reduction::Sum && len > PARTIAL;
        // SAFETY: the result and the partial sums have a block each; the rows are within the operands.
        unsafe {
            fill_identity(by, repr, n, result);
            fill_identity(by, repr, n, partial);
            for j in 0..len {
                self.bind_across(phase, rows, j, walk);
                phase.program.run_each(self.isa, n, walk.bases);
                let value = walk.value(&phase.program);
                accumulate(self.isa, by, repr, n, if has_partial { partial } else { result }, value);
                if has_partial && (j % PARTIAL == PARTIAL - 1 || j + 1 == len) {
                    accumulate(self.isa, by, repr, n, result, partial);
                    fill_identity(by, repr, n, partial);
                }
                self.blocks.inner.advance(walk.index, walk.add);
            }
        }
    }

    /// The body of some rows, at every element or once.
    ///
    /// # Safety
    /// As for [`Compiled::run`].
    unsafe fn finish_across(&self, phase: &Phase, rows: &Range<usize>, walk: &mut Walk) {
        for j in 0..if self.blocks.per_row { 1 } else { self.blocks.row_len } {
            // SAFETY: the rows are within the operands.
            unsafe {
                self.bind_across(phase, rows, j, walk);
                self.finish(phase, walk, (rows.start, j), rows.len());
            }
            self.blocks.inner.advance(walk.index, walk.add);
        }
    }
}

/// A thread on its way over the rows, with its own memory.
struct Walk<'a> {
    args: &'a Args,
    /// The row, and the positions of operands at it.
    row: &'a mut [usize],
    at: &'a mut [isize],
    /// The run of elements within the row, and the positions of operands at it.
    index: &'a mut [usize],
    add: &'a mut [isize],
    /// The row among those that were transposed together.
    transposed: Group,
    mem: *mut u8,
    bases: &'a mut [*mut u8],
}

impl Walk<'_> {
    /// The position of an operand at element `i` of the axis that blocks run along.
    #[inline(always)]
    fn position(&self, k: usize, i: usize, s: &BlockOperand) -> isize {
        self.at[k] + self.add[k] + i as isize * s.step
    }

    /// The first result of a program, which keeps it.
    #[inline(always)]
    fn value(&self, program: &Program) -> *mut u8 {
        let kept = program.kept[0];
        self.bases[kept.base as usize].wrapping_add(kept.offset as usize)
    }
}

impl Compiled for Row {
    fn needs(&self) -> Needs {
        self.needs
    }

    fn tasks(&self, _: usize) -> usize {
        self.shares.tasks
    }

    unsafe fn run(&self, _: usize, task: usize, args: &Args, scratch: &mut Scratch) {
        let Scratch { mem, bases, index, at, .. } = scratch;
        let (at, add) = at[..self.needs.motions].split_at_mut(self.needs.motions / 2);
        let (row, index) = index[..self.needs.rank].split_at_mut(self.blocks.outer.rank());
        let mut walk = Walk { args, row, at, index, add, transposed: Group::default(), mem: *mem, bases };
        let items = self.shares.of(task);
        // SAFETY: guaranteed by the caller.
        unsafe {
            if self.blocks.across {
                self.run_across(items, &mut walk);
            } else {
                self.run_along(items, &mut walk);
            }
        }
    }
}
