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
#[cfg(target_arch = "x86_64")]
use kernels::{AVX2, AVX2_BYTES, AVX512, AVX512_BYTES, VNNI_BYTES};
use kernels::{Block, Kernels, PORTABLE, PORTABLE_BYTES, Panels, Slab};
#[cfg(target_arch = "aarch64")]
use kernels::{NEON, NEON_BYTES};
use pack::{pack_a_block, pack_b_block, pack_rows, pack_words};
use plimsoll_core::kernel::cpu::gemm::*;
pub use plimsoll_core::kernel::cpu::gemm::{PANEL_COLS, PANEL_ROWS, packed_a_bytes, packed_b_bytes, workspace_bytes};
use std::ops::Range;

mod grid;
mod kernels;
mod pack;
mod terms;

pub use grid::{COPIED, Grid, PRODUCED};
#[cfg(target_arch = "x86_64")]
pub(super) use pack::interleave_vectors;
pub use pack::{Bytes, View, pack_a, pack_b};
pub(super) use pack::{interleave, pack_panel, pack_panel_by, pack_reversed};

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
    /// Bytes, packed block by block into the workspace, four along `k` in each element.
    Bytes(Bytes),
}

/// The elements of the operands. Everything here moves elements of 4 bytes; their products are what differs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Elements {
    /// One `f32`, and sums in `f32`.
    Floats,
    /// Four bytes that follow one another along `k`, zeros behind its end, and sums in `i32`. One operand is of `u8`, the other of `i8`.
    Bytes {
        /// True if the left operand is the one of `u8`.
        left_unsigned: bool,
    },
}

/// An operand that is computed when needed.
pub trait Produce: Sync {
    /// Writes one panel: some lanes (rows of `A` or columns of `B`) over a range of `k`. Element `(p, j)` goes to
    /// `panel[(p - k.start) * step + (j - lanes.start)]`; the rest of each step is zero.
    ///
    /// # Safety
    /// `panel` must be writable for `k.len() * step` floats, and `lanes.len() <= step <= 16`.
    unsafe fn panel(&self, isa: Isa, k: Range<usize>, lanes: Range<usize>, step: usize, panel: *mut f32);

    /// Elements of `k` whose rows are near one another in memory: all panels of a block are written for so many before the next ones.
    fn near(&self) -> usize {
        usize::MAX
    }

    /// The most rows of a left operand in memory that it is multiplied by [without panels](Self::multiply).
    fn few(&self) -> usize {
        0
    }

    /// Computes a product of [few](Self::few) rows, of which this is the right operand.
    ///
    /// # Safety
    /// The left operand must have the rows and the terms, this one the columns, and the destination the elements.
    unsafe fn multiply(&self, _: Isa, _: &FewRows) {
        unreachable!("panels of it are multiplied")
    }
}

/// A product of few rows by some columns of a right operand.
pub struct FewRows {
    /// The left operand.
    pub left: View,
    /// Its rows.
    pub rows: usize,
    /// Its columns.
    pub terms: usize,
    /// Columns of the result.
    pub columns: Range<usize>,
    /// The first of them, of the first row.
    pub to: *mut f32,
    /// From one row of the result to the next.
    pub stride: isize,
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
    /// Columns of `A`, rows of `B`, counted in elements of 4 bytes. With `k == 0` the product is zero.
    pub k: usize,
    /// The operands' elements.
    pub elements: Elements,
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
        let layout = match self.elements {
            Elements::Floats => Layout::new,
            Elements::Bytes { .. } => Layout::of_bytes,
        };
        let layout = layout(self.m, self.n, self.k, !a_packed, !b_packed, !rows_are_dense);
        assert!(
            workspace.len() >= layout.a_len + layout.b_len + layout.c_len,
            "the workspace is as large as was asked for"
        );
        let (a_space, rest) = workspace.split_at_mut(layout.a_len);
        let (b_space, c_space) = rest.split_at_mut(layout.b_len);
        let kernels = kernels(isa, self.elements);
        let mut work = Work { isa, kernels, depth: layout.depth, sweep: layout.sweep, left: None, a_space, b_space };
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
        if let (Matrix::Strided(left), Matrix::Produced(right)) = (self.a, self.b)
            && self.m <= right.few()
        {
            assert!(!self.accumulate, "the right operand has no product that is added");
            let (rows, columns) = (rows.len(), cols.clone());
            let few = FewRows { left, rows, terms: self.k, columns, to: tile.ptr, stride: tile.stride as isize };
            // SAFETY: all of it is inside the operands; few rows are one tile high.
            return unsafe { right.multiply(work.isa, &few) };
        }
        let mut k0 = 0;
        loop {
            let k = k0..self.k.min(k0 + work.depth);
            let add = self.accumulate || k0 > 0;
            // SAFETY: the workspace holds the blocks that `Layout` sized it for; all else is inside the operands.
            unsafe {
                let a = self.left(work, rows.clone(), k.clone());
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
            Matrix::Produced(_) | Matrix::Changed(..) | Matrix::Bytes(_) => true,
        }
    }

    /// A block of the left operand, packed if need be.
    ///
    /// # Safety
    /// As for [`Gemm::tile`].
    unsafe fn left(&self, work: &mut Work, rows: Range<usize>, k: Range<usize>) -> Left {
        let (isa, space) = (work.isa, &mut *work.a_space);
        let packed = Slab { ptr: space.as_ptr(), depth: k.len(), skip: 0, constant: false };
        let block = Some((rows.clone(), k.clone()));
        let is_there = work.left == block;
        work.left = block;
        // SAFETY: guaranteed by the caller.
        unsafe {
            let slab = match self.a {
                Matrix::Packed(a) => {
                    let ptr = a.wrapping_add(rows.start * self.k);
                    Slab { ptr, depth: self.k, skip: k.start, constant: true }
                }
                Matrix::Strided(a) if self.m <= FEW_ROWS => return Left::Few(View { ptr: a.at(0, k.start), ..a }),
                // The tile beside this one had the same block.
                _ if is_there => packed,
                Matrix::Strided(a) => {
                    pack_a_block(isa, a, rows, k, space.as_mut_ptr());
                    packed
                }
                Matrix::Changed(a, change) => {
                    pack_a_block(isa, a, rows.clone(), k.clone(), space.as_mut_ptr());
                    let part = Part { k, lanes: rows, width: PANEL_ROWS, padded: false };
                    change.change(isa, part, space.as_mut_ptr());
                    packed
                }
                Matrix::Bytes(a) => {
                    pack_words(a, rows, k, (PANEL_ROWS, false), space.as_mut_ptr());
                    packed
                }
                Matrix::Produced(a) => {
                    let mut done = k.start;
                    while done < k.end {
                        let these = done..k.end.min((done / a.near() + 1).saturating_mul(a.near()));
                        for row in rows.clone().step_by(PANEL_ROWS) {
                            let lanes = row..rows.end.min(row + PANEL_ROWS);
                            let panel = space.as_mut_ptr().add((row - rows.start) * k.len());
                            let step = lanes.len();
                            a.panel(isa, these.clone(), lanes, step, panel.add((done - k.start) * step));
                        }
                        done = these.end;
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
                    pack_rows(isa, b, k.clone(), cols.start + count * PANEL_COLS..cols.end, space);
                    Panels { ptr: b.at(k.start, cols.start), step: b.rs as usize, panel: PANEL_COLS, count, ..packed }
                }
                Matrix::Strided(b) => {
                    pack_right(isa, b, k, cols, space);
                    packed
                }
                Matrix::Changed(b, change) => {
                    pack_right(isa, b, k.clone(), cols.clone(), space);
                    change.change(isa, Part { k, lanes: cols, width: PANEL_COLS, padded: true }, space);
                    packed
                }
                Matrix::Bytes(b) => {
                    let columns = Bytes { rs: b.cs, cs: b.rs, ..b };
                    pack_words(columns, cols, k, (PANEL_COLS, true), space);
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

/// Packs a block of a right operand.
///
/// # Safety
/// As for [`pack_b_block`].
unsafe fn pack_right(isa: Isa, b: View, k: Range<usize>, cols: Range<usize>, to: *mut f32) {
    // SAFETY: guaranteed by the caller.
    unsafe { if b.cs == 1 { pack_rows(isa, b, k, cols, to) } else { pack_b_block(isa, b, k, cols, to) } }
}

/// The innermost kernels of an instruction set.
fn kernels(isa: Isa, elements: Elements) -> &'static Kernels {
    let (floats, bytes): (&'static Kernels, &'static [Kernels; 2]) = match isa.level() {
        #[cfg(target_arch = "x86_64")]
        Level::Avx512Vnni => (&AVX512, &VNNI_BYTES),
        #[cfg(target_arch = "x86_64")]
        Level::Avx512 => (&AVX512, &AVX512_BYTES),
        #[cfg(target_arch = "x86_64")]
        Level::Avx2 => (&AVX2, &AVX2_BYTES),
        #[cfg(target_arch = "aarch64")]
        Level::Neon => (&NEON, &NEON_BYTES),
        Level::Portable => (&PORTABLE, &PORTABLE_BYTES),
    };
    match elements {
        Elements::Floats => floats,
        Elements::Bytes { left_unsigned } => &bytes[usize::from(left_unsigned)],
    }
}

/// The context of a product's loops.
struct Work<'a> {
    isa: Isa,
    kernels: &'a Kernels,
    /// Most of `k` that is packed at a time, and most columns.
    depth: usize,
    sweep: usize,
    /// The rows and the range of `k` of the block of `A` in its space.
    left: Option<(Range<usize>, Range<usize>)>,
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

    /// Bytes that repeat only after 251.
    fn bytes(len: usize) -> Vec<u8> {
        (0..len).map(|i| (i * i % 251 + i % 5) as u8).collect()
    }

    fn run(isa: Isa, [m, n, k]: [usize; 3], elements: Elements, (a, b): (Matrix, Matrix), layout: &Layout) -> Vec<f32> {
        let mut c = vec![0.0; m * n];
        let out = Out::Strided { ptr: c.as_mut_ptr(), rs: n as isize, cs: 1 };
        let gemm = Gemm { m, n, k, elements, a, b, c: out, accumulate: false };
        let mut workspace = vec![f32::NAN; layout.bytes() / 4];
        // SAFETY: operands and destination have the sizes that are named, and are this call's alone.
        unsafe { gemm.run(isa, 0..m, 0..n, &mut workspace, &mut |_| {}) };
        c
    }

    /// Rows of all register tiles, columns that are no whole vectors, and sums of all lengths that a loop is unrolled by.
    fn shapes() -> impl Iterator<Item = [usize; 3]> {
        [1, 2, 3, 4, 5, 7, 12, 23, 140].into_iter().flat_map(|m| [[m, 1, 5], [m, 16, 8], [m, 37, 131], [m, 70, 300]])
    }

    #[test]
    fn every_instruction_set_multiplies_floats() {
        for (isa, [m, n, k]) in Isa::available().flat_map(|isa| shapes().map(move |shape| (isa, shape))) {
            // Sums of a few hundred such products are exact.
            let floats = |len| bytes(len).iter().map(|&x| (f32::from(x) - 128.0) / 16.0).collect::<Vec<f32>>();
            let (a, b) = (floats(m * k), floats(k * n));
            let matrix = |ptr, rs: usize| Matrix::Strided(View { ptr, rs: rs as isize, cs: 1 });
            let operands = (matrix(a.as_ptr(), k), matrix(b.as_ptr(), n));
            let found = run(isa, [m, n, k], Elements::Floats, operands, &Layout::new(m, n, k, true, true, false));
            for (at, found) in found.into_iter().enumerate() {
                let (i, j) = (at / n, at % n);
                let expected: f32 = (0..k).map(|p| a[i * k + p] * b[p * n + j]).sum();
                assert_eq!(found, expected, "{}: element ({i}, {j}) of {m} x {n} x {k}", isa.name());
            }
        }
    }

    #[test]
    fn every_instruction_set_multiplies_bytes() {
        for (isa, [m, n, k]) in Isa::available().flat_map(|isa| shapes().map(move |shape| (isa, shape))) {
            let (a, b) = (bytes(m * k), bytes(k * n));
            let matrix = |ptr, rs: usize| Matrix::Bytes(Bytes { ptr, rs: rs as isize, cs: 1, depth: k });
            let words = k.div_ceil(4);
            for left_unsigned in [false, true] {
                let operands = (matrix(a.as_ptr(), k), matrix(b.as_ptr(), n));
                let layout = Layout::of_bytes(m, n, words, true, true, false);
                let found = run(isa, [m, n, words], Elements::Bytes { left_unsigned }, operands, &layout);
                let number = |x: u8, unsigned| if unsigned { i32::from(x) } else { i32::from(x.cast_signed()) };
                for (at, found) in found.into_iter().enumerate() {
                    let (i, j) = (at / n, at % n);
                    let product = |p| number(a[i * k + p], left_unsigned) * number(b[p * n + j], !left_unsigned);
                    let expected: i32 = (0..k).map(product).sum();
                    let found = found.to_bits().cast_signed();
                    assert_eq!(found, expected, "{}: element ({i}, {j}) of {m} x {n} x {k}", isa.name());
                }
            }
        }
    }
}
