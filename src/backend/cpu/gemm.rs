//! Matrix product `C[m, n] = A[m, k] * B[k, n]` in f32, in memory that the caller provides.
//!
//! The structure is that of BLIS: operands are copied ("packed") into panels that the innermost kernel reads front to back. `A` is
//! cut into panels of [`PANEL_ROWS`] rows, each stored column by column; `B` into panels of [`PANEL_COLS`] columns, each stored row by
//! row. The kernel keeps a tile of `C` in registers while it walks down `k`.
//!
//! ```text
//!              panel of B: k rows of 16               packed A, m = 29: panels of 12, 12 and 5 rows
//!             .----------.                            .--------------------------------------.
//!             |          |                            | k columns of 12 | k of 12 |  k of 5  |
//!   .------.  .----------.                            '--------------------------------------'
//!   | A 12 |  |  C tile  |                            packed B, n = 40: panels of 16, 16 and 8, the last
//!   '------'  '----------'                            padded with zeros to 16
//! ```
//!
//! `pack` makes the panels, `kernels` compute the tiles, `grid` shares the work among threads. This file has the loops between them, cache by
//! cache.
//!
//! The packed form does not depend on the instruction set, so constants can be packed before the machine is known. Nothing here
//! allocates: packing buffers come from the caller, who learns their size from [`workspace_bytes`] when the shapes are known.
//!
//! Every element of `C` is the sum over `k` in an order that depends on `m`, `n` and `k` alone. Computing a matrix in one piece or as any
//! number of ranges gives the same bits.

use super::simd::{Isa, Level, transpose};
use crate::kernel::cpu::gemm::*;
pub use crate::kernel::cpu::gemm::{PANEL_COLS, PANEL_ROWS, packed_a_bytes, packed_b_bytes, workspace_bytes};
#[cfg(target_arch = "x86_64")]
use kernels::{AVX2, AVX512};
use kernels::{Block, Kernels, PORTABLE, Panels, Slab};
use pack::{pack_a_block, pack_b_block};
use std::ops::Range;

mod grid;
mod kernels;
mod pack;

pub use grid::Grid;
pub(super) use pack::pack_panel;
pub use pack::{View, pack_a, pack_b};

/// An operand: the left one, `m` by `k`, or the right one, `k` by `n`.
#[derive(Clone, Copy)]
pub enum Matrix<'a> {
    /// As written by [`pack_a`] or [`pack_b`] for the whole matrix.
    Packed(*const f32),
    /// Packed block by block into the workspace, or read in place where that is faster.
    Strided(View),
    /// Written block by block into the workspace by a function, so that the matrix need not exist: image patches of a convolution. The lanes
    /// of the left operand are rows.
    Produced(&'a dyn Produce),
    /// Packed block by block into the workspace, and there rewritten by a function.
    Changed(View, &'a dyn Change),
}

/// An operand that is computed when needed.
pub trait Produce: Sync {
    /// Writes one panel: some lanes (rows of `A` or columns of `B`) over a range of `k`. Element `(p, j)` goes to
    /// `panel[(p - k.start) * step + (j - lanes.start)]`; the rest of each step is zero.
    ///
    /// # Safety
    /// `panel` must be writable for `k.len() * step` floats, and `lanes.len() <= step <= 16`.
    unsafe fn panel(&self, isa: Isa, k: Range<usize>, lanes: Range<usize>, step: usize, panel: *mut f32);
}

/// A packed block of an operand. Element `(p, j)` of a panel is at `p * step + j` of its floats, where `step` is the number of its lanes, or
/// `width` if panels are padded.
#[derive(Clone, Debug)]
pub struct Part {
    /// The range of `k`.
    pub k: Range<usize>,
    /// Rows of `A` or columns of `B`.
    pub lanes: Range<usize>,
    /// Most lanes of a panel.
    pub width: usize,
    /// Panels are padded with zeros to their width.
    pub padded: bool,
}

/// Rewrites the blocks of an operand once they are packed.
pub trait Change: Sync {
    /// Rewrites a block.
    ///
    /// # Safety
    /// `block` must hold the packed block.
    unsafe fn change(&self, isa: Isa, part: Part, block: *mut f32);
}

/// The destination.
#[derive(Clone, Copy, Debug)]
pub enum Out {
    /// Element `(i, j)` to `ptr[i * rs + j * cs]`. With `cs == 1` and no gap that matters to the caller this is the fast way. The memory
    /// also holds partial sums during the call.
    Strided {
        /// The element at row 0, column 0.
        ptr: *mut f32,
        /// From one row to the next.
        rs: isize,
        /// From one column to the next.
        cs: isize,
    },
    /// None: the epilogue finds each finished tile in the workspace, and stores its result.
    Epilogue,
}

/// A finished block of `C`: element `(i, j)` is at `ptr[(i - rows.start) * stride + (j - cols.start)]`.
#[derive(Clone, Debug)]
pub struct Tile {
    /// Rows of `C` in this tile.
    pub rows: Range<usize>,
    /// Columns of `C` in this tile.
    pub cols: Range<usize>,
    /// The tile's first element; the tile may be changed in place.
    pub ptr: *mut f32,
    /// From one row to the next, in elements.
    pub stride: usize,
}

/// A matrix product: the shapes, the operands and the destination.
#[derive(Clone, Copy)]
pub struct Gemm<'a> {
    /// Rows of `A` and `C`.
    pub m: usize,
    /// Columns of `B` and `C`.
    pub n: usize,
    /// Columns of `A`, rows of `B`. With `k == 0` the product is zero.
    pub k: usize,
    /// Left operand.
    pub a: Matrix<'a>,
    /// Right operand.
    pub b: Matrix<'a>,
    /// Destination.
    pub c: Out,
    /// Add to what the destination holds instead of overwriting it. Needs [`Out::Strided`].
    pub accumulate: bool,
}

// SAFETY: the operands are addresses; whoever uses them, on any thread, keeps the contract of `Gemm::run`.
unsafe impl Send for Gemm<'_> {}
// SAFETY: as above.
unsafe impl Sync for Gemm<'_> {}

impl Gemm<'_> {
    /// Computes rows `rows` of columns `cols` and hands each finished tile, while it is still in cache, to `epilogue`. Ranges start
    /// and end at multiples of [`PANEL_ROWS`] and [`PANEL_COLS`] or at the matrix's end. `workspace` is best aligned to 64 bytes.
    ///
    /// # Panics
    /// If a range leaves the matrix or cuts a panel, if `workspace` is shorter than [`workspace_bytes`] says, or if `accumulate` is
    /// asked of [`Out::Epilogue`].
    ///
    /// # Safety
    /// The operands must be readable in the parts that the ranges need, packed ones in the form that the packing functions write; the
    /// destination must be writable there, overlap no operand, and no other thread may use that part during the call.
    pub unsafe fn run(
        &self,
        isa: Isa,
        rows: Range<usize>,
        cols: Range<usize>,
        workspace: &mut [f32],
        epilogue: &mut dyn FnMut(Tile),
    ) {
        assert!(rows.end <= self.m && cols.end <= self.n, "the range is inside the matrix");
        assert!(
            rows.start.is_multiple_of(PANEL_ROWS) && cols.start.is_multiple_of(PANEL_COLS),
            "ranges start at panels"
        );
        let rows_are_dense = matches!(self.c, Out::Strided { cs: 1, .. });
        assert!(!self.accumulate || matches!(self.c, Out::Strided { .. }), "accumulating needs a destination");
        let ends = |end: usize, len: usize, unit: usize| end == len || end.is_multiple_of(unit);
        assert!(ends(rows.end, self.m, PANEL_ROWS) && ends(cols.end, self.n, PANEL_COLS), "ranges end at panels");
        let (a_packed, b_packed) = (matches!(self.a, Matrix::Packed(_)), matches!(self.b, Matrix::Packed(_)));
        let layout = Layout::new(self.m, self.n, self.k, !a_packed, !b_packed, !rows_are_dense);
        assert!(
            workspace.len() >= layout.a_len + layout.b_len + layout.c_len,
            "the workspace is as large as was asked for"
        );
        let (a_space, rest) = workspace.split_at_mut(layout.a_len);
        let (b_space, c_space) = rest.split_at_mut(layout.b_len);
        let kernels = match isa.level() {
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => &AVX512,
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => &AVX2,
            Level::Portable => &PORTABLE,
        };
        let mut work = Work { isa, kernels, depth: layout.depth, sweep: layout.sweep, a_space, b_space };
        let (height, width) = layout.tile;
        for row in rows.clone().step_by(height.max(1)) {
            for col in cols.clone().step_by(width.max(1)) {
                let rows = row..rows.end.min(row + height);
                let cols = col..cols.end.min(col + width);
                let (ptr, stride) = match self.c {
                    Out::Strided { ptr, rs, cs: 1 } => (ptr.wrapping_offset(row as isize * rs + col as isize), rs),
                    _ => (c_space.as_mut_ptr(), width as isize),
                };
                // Only a destination with a negative or a huge row stride cannot be named by `usize`, and there is none in memory.
                let tile = Tile { rows, cols, ptr, stride: stride as usize };
                // SAFETY: the ranges and the workspace were checked, and an `Isa` is proof of the CPU's features; a buffered tile has room
                // for the tile's rows at its own stride. The caller guarantees the rest.
                unsafe {
                    self.fill(&tile);
                    self.tile(&mut work, &tile);
                    epilogue(tile.clone());
                    self.spill(&tile);
                }
            }
        }
    }

    /// Copies a destination whose rows are not dense to a tile, if the tile is added to it.
    ///
    /// # Safety
    /// As for [`Gemm::run`]; the tile must be inside the matrix.
    unsafe fn fill(&self, tile: &Tile) {
        let (Out::Strided { ptr, rs, cs }, true) = (self.c, self.accumulate) else { return };
        if cs == 1 {
            return;
        }
        let c = View { ptr, rs, cs };
        for (i, row) in tile.rows.clone().enumerate() {
            for (j, col) in tile.cols.clone().enumerate() {
                // SAFETY: guaranteed by the caller.
                unsafe { *tile.ptr.add(i * tile.stride + j) = *c.at(row, col) }
            }
        }
    }

    /// Copies a tile to a destination whose rows are not dense.
    ///
    /// # Safety
    /// As for [`Gemm::fill`].
    unsafe fn spill(&self, tile: &Tile) {
        let Out::Strided { ptr, rs, cs } = self.c else { return };
        if cs == 1 {
            return;
        }
        let (rows, cols) = (tile.rows.len(), tile.cols.len());
        let c = ptr.wrapping_offset(tile.rows.start as isize * rs + tile.cols.start as isize * cs);
        // SAFETY: guaranteed by the caller.
        unsafe {
            if rs == 1 && cs > 0 {
                return transpose(rows, cols, tile.ptr, tile.stride as isize, c, cs as usize);
            }
            for i in 0..rows {
                for j in 0..cols {
                    *c.offset(i as isize * rs + j as isize * cs) = *tile.ptr.add(i * tile.stride + j);
                }
            }
        }
    }

    /// One tile of `C`, over all of `k`.
    ///
    /// # Safety
    /// As for [`Gemm::run`]; the tile must be writable, and the CPU have the kernels' instruction set.
    unsafe fn tile(&self, work: &mut Work, tile: &Tile) {
        let Tile { rows, cols, .. } = tile;
        let mut k0 = 0;
        loop {
            let k = k0..self.k.min(k0 + work.depth);
            let add = self.accumulate || k0 > 0;
            // SAFETY: the workspace holds the blocks that `Layout` sized it for; all else is inside the operands.
            unsafe {
                let a = self.left(work.isa, rows.clone(), k.clone(), work.a_space);
                // As much of B is packed at a time as all rows of A then find in the cache.
                let sweep = if self.packs_b() { work.sweep } else { cols.len().max(1) };
                for col in cols.clone().step_by(sweep) {
                    let these = col..cols.end.min(col + sweep);
                    let (ptr, stride) = (tile.ptr.wrapping_add(col - cols.start), tile.stride as isize);
                    let c = Block { ptr, stride, m: rows.len(), n: these.len(), k: k.len(), add };
                    let b = self.right(work.isa, these, k.clone(), work.b_space);
                    match a {
                        Left::Few(a) => work.kernels.few_rows(a, b, &c),
                        Left::Panels(a) => work.kernels.block(a, b, &c),
                    }
                }
            }
            k0 = k.end;
            if k0 >= self.k {
                break;
            }
        }
    }

    /// The right operand has to be brought into panels, all of it.
    fn packs_b(&self) -> bool {
        match self.b {
            Matrix::Packed(_) => false,
            Matrix::Strided(b) => !(b.cs == 1 && self.m <= IN_PLACE_ROWS),
            Matrix::Produced(_) | Matrix::Changed(..) => true,
        }
    }

    /// A block of the left operand, packed if need be.
    ///
    /// # Safety
    /// As for [`Gemm::tile`].
    unsafe fn left(&self, isa: Isa, rows: Range<usize>, k: Range<usize>, space: &mut [f32]) -> Left {
        let packed = Slab { ptr: space.as_ptr(), depth: k.len(), skip: 0 };
        // SAFETY: guaranteed by the caller.
        unsafe {
            let slab = match self.a {
                Matrix::Packed(a) => Slab { ptr: a.wrapping_add(rows.start * self.k), depth: self.k, skip: k.start },
                Matrix::Strided(a) if self.m <= FEW_ROWS => return Left::Few(View { ptr: a.at(0, k.start), ..a }),
                Matrix::Strided(a) => {
                    pack_a_block(a, rows, k, space.as_mut_ptr());
                    packed
                }
                Matrix::Changed(a, change) => {
                    pack_a_block(a, rows.clone(), k.clone(), space.as_mut_ptr());
                    let part = Part { k, lanes: rows, width: PANEL_ROWS, padded: false };
                    change.change(isa, part, space.as_mut_ptr());
                    packed
                }
                Matrix::Produced(a) => {
                    for row in rows.clone().step_by(PANEL_ROWS) {
                        let lanes = row..rows.end.min(row + PANEL_ROWS);
                        let panel = space.as_mut_ptr().add((row - rows.start) * k.len());
                        a.panel(isa, k.clone(), lanes.clone(), lanes.len(), panel);
                    }
                    packed
                }
            };
            if self.m <= FEW_ROWS {
                // One panel, as wide as there are rows.
                let cs = self.m as isize;
                return Left::Few(View { ptr: slab.ptr.wrapping_add(slab.skip * self.m), rs: 1, cs });
            }
            Left::Panels(slab)
        }
    }

    /// A block of the right operand, packed if need be.
    ///
    /// # Safety
    /// As for [`Gemm::tile`].
    unsafe fn right(&self, isa: Isa, cols: Range<usize>, k: Range<usize>, space: &mut [f32]) -> Panels {
        let space = space.as_mut_ptr();
        let count = cols.len().div_ceil(PANEL_COLS);
        let packed =
            Panels { ptr: space, step: PANEL_COLS, panel: PANEL_COLS * k.len(), count, tail: space, constant: false };
        // SAFETY: guaranteed by the caller.
        unsafe {
            match self.b {
                Matrix::Packed(b) => {
                    let ptr = b.wrapping_add(cols.start * self.k + k.start * PANEL_COLS);
                    Panels { ptr, panel: PANEL_COLS * self.k, constant: true, ..packed }
                }
                Matrix::Strided(b) if !self.packs_b() => {
                    let count = cols.len() / PANEL_COLS;
                    pack_b_block(b, k.clone(), cols.start + count * PANEL_COLS..cols.end, space);
                    Panels { ptr: b.at(k.start, cols.start), step: b.rs as usize, panel: PANEL_COLS, count, ..packed }
                }
                Matrix::Strided(b) => {
                    pack_b_block(b, k, cols, space);
                    packed
                }
                Matrix::Changed(b, change) => {
                    pack_b_block(b, k.clone(), cols.clone(), space);
                    change.change(isa, Part { k, lanes: cols, width: PANEL_COLS, padded: true }, space);
                    packed
                }
                Matrix::Produced(b) => {
                    for col in cols.clone().step_by(PANEL_COLS) {
                        let lanes = col..cols.end.min(col + PANEL_COLS);
                        b.panel(isa, k.clone(), lanes, PANEL_COLS, space.add((col - cols.start) * k.len()));
                    }
                    packed
                }
            }
        }
    }
}

/// The context of a product's loops.
struct Work<'a> {
    isa: Isa,
    kernels: &'a Kernels,
    /// Most of `k` that is packed at a time, and most columns.
    depth: usize,
    sweep: usize,
    a_space: &'a mut [f32],
    b_space: &'a mut [f32],
}

/// A block of the left operand in the form that the kernels for its number of rows read.
#[derive(Clone, Copy)]
enum Left {
    Few(View),
    Panels(Slab),
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Small deterministic values with exact sums up to a few thousand terms, so that results can be compared bit for bit.
    fn values(len: usize, seed: u32) -> Vec<f32> {
        let mut state = seed.wrapping_mul(2654435761).wrapping_add(12345);
        (0..len)
            .map(|_| {
                state = state.wrapping_mul(1664525).wrapping_add(1013904223);
                ((state >> 24) as i32 - 128) as f32 / 16.0
            })
            .collect()
    }

    /// A matrix in a buffer of exactly the size it needs, with the strides of the kind asked for.
    fn matrix(rows: usize, cols: usize, kind: usize, seed: u32) -> (Vec<f32>, isize, isize) {
        let (rs, cs) = match kind {
            0 => (cols, 1),
            1 => (1, rows),
            2 => (cols + 3, 1),
            _ => (2 * cols, 2),
        };
        let len = if rows == 0 || cols == 0 { 0 } else { (rows - 1) * rs + (cols - 1) * cs + 1 };
        (values(len, seed), rs as isize, cs as isize)
    }

    struct FromView(View);
    impl Produce for FromView {
        unsafe fn panel(&self, _: Isa, k: Range<usize>, lanes: Range<usize>, step: usize, panel: *mut f32) {
            for (i, p) in k.enumerate() {
                for j in 0..step {
                    // SAFETY: as below.
                    let value = if j < lanes.len() { unsafe { *self.0.at(p, lanes.start + j) } } else { 0.0 };
                    // SAFETY: the test's view covers the whole operand, the panel every step.
                    unsafe { *panel.add(i * step + j) = value }
                }
            }
        }
    }

    #[derive(Clone, Copy, Debug)]
    struct Case {
        a: usize,
        b: usize,
        c: usize,
        accumulate: bool,
        parts: usize,
    }

    /// Runs one case and compares it with a plain triple loop.
    fn check(isa: Isa, m: usize, n: usize, k: usize, case: Case) {
        let (a, a_rs, a_cs) = matrix(m, k, case.a % 4, 1);
        let (b, b_rs, b_cs) = matrix(k, n, case.b % 4, 2);
        let view_a = View { ptr: a.as_ptr(), rs: a_rs, cs: a_cs };
        let view_b = View { ptr: b.as_ptr(), rs: b_rs, cs: b_cs };
        let (mut packed_a, mut packed_b) =
            (vec![f32::NAN; packed_a_bytes(m, k) / 4], vec![f32::NAN; packed_b_bytes(k, n) / 4]);
        let produced = FromView(view_b);
        let produced_a = FromView(View { ptr: view_a.ptr, rs: a_cs, cs: a_rs });
        let (a_packed, b_packed) = ((4..8).contains(&case.a), (4..8).contains(&case.b));
        let a_operand = if a_packed {
            // SAFETY: the buffers have the sizes that the functions name.
            unsafe { pack_a(view_a, 0..m, k, packed_a.as_mut_ptr()) };
            Matrix::Packed(packed_a.as_ptr())
        } else if case.a >= 8 {
            Matrix::Produced(&produced_a)
        } else {
            Matrix::Strided(view_a)
        };
        let b_operand = if b_packed {
            // SAFETY: as above.
            unsafe { pack_b(view_b, k, 0..n, packed_b.as_mut_ptr()) };
            Matrix::Packed(packed_b.as_ptr())
        } else if case.b >= 8 {
            Matrix::Produced(&produced)
        } else {
            Matrix::Strided(view_b)
        };
        let (mut c, c_rs, c_cs) = matrix(m, n, case.c % 4, 3);
        let before = c.clone();
        let out = c.as_mut_ptr();
        let to_epilogue = case.c == 4;
        let gemm = Gemm {
            m,
            n,
            k,
            a: a_operand,
            b: b_operand,
            c: if to_epilogue { Out::Epilogue } else { Out::Strided { ptr: out, rs: c_rs, cs: c_cs } },
            accumulate: case.accumulate && !to_epilogue,
        };
        let bytes = workspace_bytes(m, n, k, a_packed, b_packed, !to_epilogue && c_cs == 1);
        let grid = Grid::new(m, n, case.parts);
        let mut seen = 0;
        for index in 0..grid.len() {
            let mut workspace = vec![f32::NAN; bytes / 4];
            let (rows, cols) = grid.get(index);
            let mut epilogue = |tile: Tile| {
                for (i, r) in tile.rows.clone().enumerate() {
                    for (j, s) in tile.cols.clone().enumerate() {
                        seen += 1;
                        // SAFETY: inside the tile, and inside C.
                        unsafe {
                            let value = tile.ptr.add(i * tile.stride + j);
                            *value = -*value;
                            if to_epilogue {
                                *out.offset(r as isize * c_rs + s as isize * c_cs) = *value;
                            }
                        }
                    }
                }
            };
            // SAFETY: the operands are whole matrices, and C overlaps none of them.
            unsafe { gemm.run(isa, rows, cols, &mut workspace, &mut epilogue) }
        }
        assert_eq!(seen, m * n, "every element passes the epilogue once");
        let mut want = before.clone();
        for i in 0..m {
            for j in 0..n {
                let at = |rs: isize, cs: isize, r: usize, s: usize| (r as isize * rs + s as isize * cs) as usize;
                let to = at(c_rs, c_cs, i, j);
                let sum: f64 =
                    (0..k).map(|p| f64::from(a[at(a_rs, a_cs, i, p)]) * f64::from(b[at(b_rs, b_cs, p, j)])).sum();
                want[to] = -(sum + if gemm.accumulate { f64::from(before[to]) } else { 0.0 }) as f32;
            }
        }
        assert_eq!(c, want, "{} m={m} n={n} k={k} {case:?}", isa.name());
    }

    #[test]
    fn every_form_of_operand_and_destination() {
        for isa in Isa::available() {
            for a in 0..10 {
                for b in 0..12 {
                    for c in 0..5 {
                        let case = Case { a, b, c, accumulate: (a + b) % 2 == 1, parts: 1 + (a + c) % 3 };
                        check(isa, 29, 51, 23, case);
                        check(isa, 3, 37, 14, case);
                    }
                }
            }
        }
    }

    #[test]
    fn every_edge_size() {
        for isa in Isa::available() {
            for m in [0, 1, 2, 3, 4, 5, 6, 7, 11, 12, 13, 25] {
                for n in [0, 1, 7, 8, 9, 15, 16, 17, 31, 32, 33, 48] {
                    for k in [0, 1, 2, 5, 8] {
                        let case = Case { a: 4 * (m % 2), b: 4 * (n % 3), c: m % 5, accumulate: k % 2 == 0, parts: 2 };
                        check(isa, m, n, k, case);
                    }
                }
            }
        }
    }

    #[test]
    fn several_blocks_of_every_dimension() {
        for isa in Isa::available() {
            for (m, n, k) in [(400, 50, 300), (40, 1100, 520), (450, 400, 70), (2, 2100, 600), (1, 40, 1025)] {
                for (a, b, c) in [(0, 4, 0), (4, 8, 0), (1, 1, 1), (0, 0, 4)] {
                    check(isa, m, n, k, Case { a, b, c, accumulate: c == 0, parts: 2 });
                }
            }
        }
    }

    /// With values that do round, any partition gives the same bits.
    #[test]
    fn ranges_do_not_change_bits() {
        for isa in Isa::available() {
            for (m, n, k) in [(60, 100, 700), (3, 100, 700), (1, 200, 333)] {
                let a: Vec<f32> = values(m * k, 1).iter().map(|x| x * 1.1).collect();
                let b: Vec<f32> = values(k * n, 2).iter().map(|x| x * 0.7).collect();
                let run = |parts: usize| {
                    let mut c = vec![f32::NAN; m * n];
                    let gemm = Gemm {
                        m,
                        n,
                        k,
                        a: Matrix::Strided(View { ptr: a.as_ptr(), rs: k as isize, cs: 1 }),
                        b: Matrix::Strided(View { ptr: b.as_ptr(), rs: n as isize, cs: 1 }),
                        c: Out::Strided { ptr: c.as_mut_ptr(), rs: n as isize, cs: 1 },
                        accumulate: false,
                    };
                    let mut workspace = vec![0.0; workspace_bytes(m, n, k, false, false, true) / 4];
                    let grid = Grid::new(m, n, parts);
                    for index in 0..grid.len() {
                        let (rows, cols) = grid.get(index);
                        // SAFETY: the operands are whole matrices, and C overlaps none of them.
                        unsafe { gemm.run(isa, rows, cols, &mut workspace, &mut |_| {}) }
                    }
                    c.iter().map(|x| x.to_bits()).collect::<Vec<_>>()
                };
                let whole = run(1);
                assert!((2..9).all(|parts| run(parts) == whole), "{} {m} {n} {k}", isa.name());
            }
        }
    }

    #[test]
    fn a_grid_covers_the_matrix_once() {
        for (m, n) in [(0, 5), (1, 1), (1, 1000), (128, 768), (49, 512), (512, 49), (1000, 3)] {
            for parts in 0..9 {
                let grid = Grid::new(m, n, parts);
                let mut hits = vec![0u8; m * n];
                for index in 0..grid.len() {
                    let (rows, cols) = grid.get(index);
                    assert!(!rows.is_empty() && !cols.is_empty());
                    rows.for_each(|r| cols.clone().for_each(|c| hits[r * n + c] += 1));
                }
                assert!(hits.iter().all(|&hits| hits == 1), "{m} {n} {parts}");
                assert!(grid.len() <= parts.max(1));
            }
        }
    }
}
