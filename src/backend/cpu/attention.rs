//! Attention, a strip of query rows at a time: products, scores, softmax and the weighted sum stay in a thread's own memory.

use super::block::Repr;
use super::gemm::{Gemm, Lhs, Out, Rhs, Tile, View, pack_b};
use super::nest::{Motion, Nest};
use super::operands::Operands;
use super::simd::Isa;
use super::tile::Epilogue;
use super::{Args, Compiled, Needs, Scratch, Workspace, math};
use crate::kernel::layout::attention::Attention as Cut;
use crate::kernel::{Guard, Kernel, Operand, Template};

/// A compiled attention.
pub struct Attention {
    isa: Isa,
    cut: Cut,
    /// Over heads: queries, keys, values, the destination, then the operands of the score and those of the body; in bytes.
    nest: Nest,
    /// Elements per row and per column of queries, keys, values and the destination.
    steps: [(isize, isize); 4],
    score: Option<Epilogue>,
    /// How many operands of the nest are the score's.
    scored: usize,
    body: Option<Epilogue>,
    guarded: Option<Guard>,
    /// The destination's argument.
    write: usize,
    items: usize,
    workspace: Workspace,
}

impl Attention {
    /// Compiles an attention.
    pub fn new(kernel: &Kernel, isa: Isa, threads: usize) -> Result<Attention, String> {
        let cut = Cut::new(kernel)?;
        let Template::Attention { score, guarded, .. } = &kernel.template else {
            return Err("not an attention".into());
        };
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
        Ok(Attention { isa, cut, nest, steps, score: scores, scored, body, guarded: *guarded, write, items, workspace })
    }
}

impl Compiled for Attention {
    fn needs(&self) -> Needs {
        let of = |e: &Option<Epilogue>| e.as_ref().map_or(Needs::default(), Epilogue::needs);
        let (a, b) = (of(&self.score), of(&self.body));
        let (rank, motions) = (self.nest.rank(), self.nest.start.len());
        Needs { bytes: a.bytes.max(b.bytes), bases: a.bases.max(b.bases), rank, motions }
    }

    fn tasks(&self, _: usize) -> usize {
        self.workspace.tasks
    }

    unsafe fn run(&self, _: usize, task: usize, args: &Args, scratch: &mut Scratch) {
        // SAFETY: the task's own, by the contract of `run`.
        let slot = unsafe { self.workspace.slot(args, task, scratch) };
        let up = |bytes: usize| bytes.next_multiple_of(64) / 4;
        let [keys, values] = self.cut.packed_bytes();
        let (keys, slot) = slot.split_at_mut(up(keys));
        let (values, slot) = slot.split_at_mut(up(values));
        let (scores, products) = slot.split_at_mut(up(self.cut.score_bytes()));
        let Cut { m, n, d, e, strip, .. } = self.cut;
        let Scratch { mem, bases, index, at, .. } = scratch;
        let (index, at) = (&mut index[..self.nest.rank()], &mut at[..self.nest.start.len()]);
        let items = self.workspace.share(self.items, task);
        let strips = self.cut.strips();
        self.nest.seek(items.start / strips.max(1), index, at);
        for item in items.clone() {
            let part = item % strips;
            let view = |o: usize, row: usize| {
                let (rs, cs) = self.steps[o];
                View { ptr: args.at(o, at[o] + 4 * row as isize * rs).cast_const().cast(), rs, cs }
            };
            if self.cut.packs() && (part == 0 || item == items.start) {
                // SAFETY: the slot has room for both packed operands, which were checked to span their memory.
                unsafe {
                    pack_b(view(1, 0), d, 0..n, keys.as_mut_ptr());
                    pack_b(view(2, 0), n, 0..e, values.as_mut_ptr());
                }
            }
            let right = |o: usize, packed: &[f32]| match self.cut.packs() {
                true => Rhs::Packed(packed.as_ptr()),
                false => Rhs::Strided(view(o, 0)),
            };
            let first = part * strip;
            let rows = strip.min(m - first);
            let mut apply = |epilogue: &Option<Epilogue>, at: &[isize], tile: Tile| {
                let Some(epilogue) = epilogue else { return };
                let tile = Tile { rows: first + tile.rows.start..first + tile.rows.end, ..tile };
                // SAFETY: the tile is a part of the epilogue's index space.
                unsafe { epilogue.apply(args, at, &tile, mem.as_mut_ptr().cast(), bases) }
            };
            let into = scores.as_mut_ptr();
            let product = Gemm {
                m: rows,
                n,
                k: d,
                a: Lhs::Strided(view(0, first)),
                b: right(1, keys),
                c: Out::Strided { ptr: into, rs: n as isize, cs: 1 },
                accumulate: false,
            };
            let mut finish = |tile: Tile| apply(&self.score, &at[4..], tile);
            let finish: Option<&mut dyn FnMut(Tile)> = if self.score.is_some() { Some(&mut finish) } else { None };
            // SAFETY: operands were checked to span their memory, and the scores are the task's own.
            unsafe { product.run(self.isa, 0..rows, 0..n, products, finish) }
            for row in scores[..rows * n].chunks_exact_mut(n.max(1)) {
                let unseen = self.guarded == Some(Guard::Unseen) && row.iter().all(|&score| score == f32::NEG_INFINITY);
                math::softmax_in_place(self.isa, row);
                // All of a row are numbers, or none is.
                if unseen || self.guarded == Some(Guard::All) && row[0].is_nan() {
                    row.fill(0.0);
                }
            }
            let (rs, cs) = self.steps[3];
            let sum = Gemm {
                m: rows,
                n: e,
                k: n,
                a: Lhs::Strided(View { ptr: into, rs: n as isize, cs: 1 }),
                b: right(2, values),
                c: match self.cut.direct {
                    true => {
                        let ptr = args.at(self.write, at[3] + 4 * first as isize * rs).cast();
                        // A single column has any step.
                        Out::Strided { ptr, rs, cs: if e == 1 { 1 } else { cs } }
                    }
                    false => Out::Epilogue,
                },
                accumulate: false,
            };
            let mut finish = |tile: Tile| apply(&self.body, &at[4 + self.scored..], tile);
            let finish: Option<&mut dyn FnMut(Tile)> = if self.body.is_some() { Some(&mut finish) } else { None };
            // SAFETY: as above; items cover disjoint rows of the destination.
            unsafe { sum.run(self.isa, 0..rows, 0..e, products, finish) }
            if part + 1 == strips {
                self.nest.advance(index, at);
            }
        }
    }
}
