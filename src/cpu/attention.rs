//! Attention, a strip of query rows at a time: products, scores, softmax and the weighted sum stay in a thread's own memory.

use super::block::Repr;
use super::gemm::{Elements, Gemm, Matrix, Out, Tile, View, pack_b};
use super::math;
use super::nest::{Motion, Nest};
use super::operands::Operands;
use super::prologue::Space;
use super::simd::Isa;
use super::task::{Args, Compiled, Needs, Scratch, Workspace};
use super::tile::Epilogue;
use plimsoll_core::kernel::algorithm::{Cpu, Schedule};
use plimsoll_core::kernel::cpu::attention::Attention as Cut;
use plimsoll_core::kernel::templates::{Band, band};
use plimsoll_core::kernel::{Guard, Kernel, Operand, Template};
use std::ops::Range;

/// A compiled attention.
pub struct Attention {
    isa: Isa,
    cut: Cut,
    /// Over heads: queries, keys, values, the destination, then the operands of the score and those of the body; in bytes.
    nest: Nest,
    /// Elements per row and per column of queries, keys, values and the destination.
    steps: [(isize, isize); 4],
    score: Option<Epilogue>,
    /// How many operands of the nest the score has.
    scored: usize,
    body: Option<Epilogue>,
    guarded: Option<Guard>,
    /// The keys that a query may see, if not all.
    band: Option<Band>,
    /// The destination's argument.
    write: usize,
    items: usize,
    workspace: Workspace,
}

impl Attention {
    /// Compiles an attention.
    pub fn new(kernel: &Kernel, isa: Isa, threads: usize) -> Result<Attention, String> {
        let (Template::Attention { score, guarded, .. }, &Schedule::Cpu(Cpu::Attention { strip, .. })) =
            (&kernel.template, &kernel.schedule)
        else {
            return Err("an attention whose schedule is not the CPU's".into());
        };
        let cut = Cut::new(kernel, strip);
        let batch = kernel.shape.len() - 2;
        let matrices = [&kernel.reads[0], &kernel.reads[1], &kernel.reads[2], &kernel.writes[0]];
        let mut motions: Vec<Motion> = matrices.iter().map(|o| Motion::bytes(o, 0..batch)).collect();
        let steps = matrices.map(|o: &Operand| (o.access.strides[batch], o.access.strides[batch + 1]));
        let mut add = |operands: &Operands| {
            let of = |m: &Motion| Motion { steps: m.steps[..batch].to_vec(), start: m.start };
            motions.extend(operands.motions.iter().map(of));
            operands.motions.len()
        };
        let (mut scored, mut scores, mut body) = (0, None, None);
        if !score.is_identity() {
            let mut space = kernel.shape.clone();
            space[batch + 1] = cut.n;
            let operands = Operands::in_place(kernel, score, 3, space.len())?;
            scored = add(&operands);
            scores = Some(Epilogue::new(score, &space, isa, operands, batch, batch + 1..batch + 2)?);
        }
        if !cut.direct {
            let operands = Operands::new(kernel, std::slice::from_ref(&kernel.body), Some(Repr::F32))?;
            add(&operands);
            body = Some(Epilogue::new(&kernel.body, &kernel.shape, isa, operands, batch, batch + 1..batch + 2)?);
        }
        let nest = Nest::new(&kernel.shape[..batch], &motions, None);
        let items = cut.heads * cut.strips();
        let tasks = if cut.nanoseconds() < 20e3 { 1 } else { threads.min(items.max(1)) };
        let workspace = Workspace::new(kernel, threads, tasks)?;
        let write = kernel.reads.len();
        let (guarded, band) = (*guarded, band(kernel));
        Ok(Attention { isa, cut, nest, steps, score: scores, scored, body, guarded, band, write, items, workspace })
    }
}

/// A thread's part of the workspace.
struct Buffers<'a> {
    /// Packed, where that pays.
    keys: &'a mut [f32],
    values: &'a mut [f32],
    scores: &'a mut [f32],
    /// Space of the products, for packed operands.
    products: &'a mut [f32],
}

/// Some rows of queries of one head.
struct Strip<'a> {
    /// The keys that they may see.
    keys: Range<usize>,
    args: &'a Args,
    /// The positions of the nest's operands.
    at: &'a [isize],
    rows: Range<usize>,
}

impl Strip<'_> {
    /// Applies a body to a tile of the strip; `first` is the first of its operands in the nest.
    fn apply(&self, epilogue: &Option<Epilogue>, first: usize, tile: Tile, space: &mut Space) {
        let Some(epilogue) = epilogue else { return };
        let tile = Tile { rows: self.rows.start + tile.rows.start..self.rows.start + tile.rows.end, ..tile };
        // SAFETY: the tile is a part of the epilogue's index space.
        unsafe { epilogue.apply(self.args, &self.at[first..], &tile, space.mem, space.bases) }
    }
}

impl Attention {
    fn buffers<'a>(&self, slot: &'a mut [f32]) -> Buffers<'a> {
        let floats = |bytes: usize| bytes.next_multiple_of(64) / 4;
        let [keys, values] = self.cut.packed_bytes();
        let (keys, slot) = slot.split_at_mut(floats(keys));
        let (values, slot) = slot.split_at_mut(floats(values));
        let (scores, products) = slot.split_at_mut(floats(self.cut.score_bytes()));
        Buffers { keys, values, scores, products }
    }

    /// A matrix of a head, from a row on: queries, keys, values or the destination.
    fn view(&self, args: &Args, at: &[isize], o: usize, row: usize) -> View {
        let (rs, cs) = self.steps[o];
        let arg = if o == 3 { self.write } else { o };
        View { ptr: args.at(arg, at[o] + 4 * row as isize * rs).cast_const().cast(), rs, cs }
    }

    /// Packs the keys and values of a head.
    ///
    /// # Safety
    /// As for [`Compiled::run`].
    unsafe fn pack(&self, args: &Args, at: &[isize], buffers: &mut Buffers) {
        let Cut { n, d, e, .. } = self.cut;
        // SAFETY: there is room for both packed operands, which were checked to span their memory.
        unsafe {
            pack_b(self.isa, self.view(args, at, 1, 0), d, 0..n, buffers.keys.as_mut_ptr());
            pack_b(self.isa, self.view(args, at, 2, 0), n, 0..e, buffers.values.as_mut_ptr());
        }
    }

    /// Keys or values as the right operand of a product.
    fn right(&self, strip: &Strip, o: usize, packed: &[f32]) -> Matrix<'static> {
        if self.cut.packs() {
            Matrix::Packed(packed.as_ptr())
        } else {
            Matrix::Strided(self.view(strip.args, strip.at, o, 0))
        }
    }

    /// The keys that these queries may see, to whole vectors.
    fn keys(&self, rows: &Range<usize>) -> Range<usize> {
        const WHOLE: usize = 64;
        let Some(band) = self.band else { return 0..self.cut.n };
        let Range { start, end } = band.keys(rows.clone(), self.cut.n);
        start / WHOLE * WHOLE..end.next_multiple_of(WHOLE).min(self.cut.n)
    }

    /// Computes the scores of a strip.
    ///
    /// # Safety
    /// As for [`Compiled::run`].
    unsafe fn score(&self, strip: &Strip, buffers: &mut Buffers, space: &mut Space) {
        let Cut { n, d, .. } = self.cut;
        let rows = strip.rows.len();
        let product = Gemm {
            m: rows,
            n,
            k: d,
            elements: Elements::Floats,
            a: Matrix::Strided(self.view(strip.args, strip.at, 0, strip.rows.start)),
            b: self.right(strip, 1, buffers.keys),
            c: Out::Strided { ptr: buffers.scores.as_mut_ptr(), rs: n as isize, cs: 1 },
            accumulate: false,
        };
        let mut finish = |tile: Tile| strip.apply(&self.score, 4, tile, space);
        // SAFETY: operands were checked to span their memory, and the scores are the task's own.
        unsafe { product.run(self.isa, 0..rows, strip.keys.clone(), buffers.products, &mut finish) }
    }

    /// Makes rows of scores probabilities.
    fn normalise(&self, scores: &mut [f32], keys: &Range<usize>) {
        for all in scores.chunks_exact_mut(self.cut.n.max(1)) {
            all[..keys.start].fill(0.0);
            all[keys.end..].fill(0.0);
            let row = &mut all[keys.clone()];
            let unseen = self.guarded == Some(Guard::Unseen) && row.iter().all(|&score| score == f32::NEG_INFINITY);
            math::softmax_in_place(self.isa, row);
            // All of a row are numbers, or none is.
            if unseen || self.guarded == Some(Guard::All) && row[0].is_nan() {
                row.fill(0.0);
            }
        }
    }

    /// Weighs the values by the probabilities of a strip.
    ///
    /// # Safety
    /// As for [`Compiled::run`].
    unsafe fn weigh(&self, strip: &Strip, buffers: &mut Buffers, space: &mut Space) {
        let Cut { n, e, direct, .. } = self.cut;
        let rows = strip.rows.len();
        let View { ptr, rs, cs } = self.view(strip.args, strip.at, 3, strip.rows.start);
        // A single column has any step.
        let to = Out::Strided { ptr: ptr.cast_mut(), rs, cs: if e == 1 { 1 } else { cs } };
        // Packed values are read whole: what is not seen weighs nothing.
        let keys = if self.cut.packs() { 0..n } else { strip.keys.clone() };
        let b = match self.right(strip, 2, buffers.values) {
            Matrix::Strided(view) => {
                Matrix::Strided(View { ptr: view.ptr.wrapping_offset(keys.start as isize * view.rs), ..view })
            }
            other => other,
        };
        let product = Gemm {
            m: rows,
            n: e,
            k: keys.len(),
            elements: Elements::Floats,
            a: Matrix::Strided(View { ptr: buffers.scores[keys.start..].as_ptr(), rs: n as isize, cs: 1 }),
            b,
            c: if direct { to } else { Out::Epilogue },
            accumulate: false,
        };
        let mut finish = |tile: Tile| strip.apply(&self.body, 4 + self.scored, tile, space);
        // SAFETY: operands were checked to span their memory; items cover disjoint rows of the destination.
        unsafe { product.run(self.isa, 0..rows, 0..e, buffers.products, &mut finish) }
    }
}

impl Compiled for Attention {
    fn needs(&self) -> Needs {
        let of = |e: &Option<Epilogue>| e.as_ref().map_or(Needs::default(), Epilogue::needs);
        let (a, b) = (of(&self.score), of(&self.body));
        let (rank, motions) = (self.nest.rank(), self.nest.start.len());
        let (bytes, bases, tile) = (a.bytes.max(b.bytes), a.bases.max(b.bases), self.workspace.tile_bytes());
        Needs { bytes, bases, rank, motions, tile, tables: 0 }
    }

    fn tasks(&self, _: usize) -> usize {
        self.workspace.tasks
    }

    unsafe fn run(&self, _: usize, task: usize, args: &Args, scratch: &mut Scratch) {
        // SAFETY: the task's own, by the contract of `run`.
        let mut buffers = self.buffers(unsafe { self.workspace.slot(args, task, scratch) });
        let Scratch { mem, bases, index, at, .. } = scratch;
        let (index, at) = (&mut index[..self.nest.rank()], &mut at[..self.nest.start.len()]);
        let mut space = Space { mem: *mem, bases };
        let Cut { m, n, strip, .. } = self.cut;
        let items = self.workspace.share(self.items, task);
        let strips = self.cut.strips();
        self.nest.seek(items.start / strips.max(1), index, at);
        for item in items.clone() {
            let part = item % strips;
            let rows = part * strip..m.min((part + 1) * strip);
            // SAFETY: guaranteed by the caller for these rows of this head.
            unsafe {
                if self.cut.packs() && (part == 0 || item == items.start) {
                    self.pack(args, at, &mut buffers);
                }
                let strip = Strip { keys: self.keys(&rows), args, at, rows: rows.clone() };
                self.score(&strip, &mut buffers, &mut space);
                self.normalise(&mut buffers.scores[..rows.len() * n], &strip.keys);
                self.weigh(&strip, &mut buffers, &mut space);
            }
            if part + 1 == strips {
                self.nest.advance(index, at);
            }
        }
    }
}
