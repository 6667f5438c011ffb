//! The innermost kernels: a tile of `C` in registers while `k` is walked down. One table of them per instruction set.

use super::pack::View;
#[cfg(target_arch = "aarch64")]
use super::terms::WidenedNeon;
use super::terms::{Dot, Terms, Widened};
#[cfg(target_arch = "x86_64")]
use super::terms::{Vnni, WidenedYmm, WidenedZmm};
#[cfg(target_arch = "aarch64")]
use crate::simd::Neon;
use crate::simd::Plain;
#[cfg(target_arch = "x86_64")]
use crate::simd::{Ymm, Zmm};
use plimsoll_core::kernel::cpu::gemm::*;

/// A block of `C` with contiguous rows, and the sums that it gets.
#[derive(Clone, Copy)]
pub(super) struct Block {
    pub(super) ptr: *mut f32,
    pub(super) stride: isize,
    pub(super) m: usize,
    pub(super) n: usize,
    /// Products per sum.
    pub(super) k: usize,
    /// Add to what is there.
    pub(super) add: bool,
}

/// Panels of `A`: panel `i` starts at `ptr + i * PANEL_ROWS * depth`, and the block's first column is `skip` columns in.
#[derive(Clone, Copy)]
pub(super) struct Slab {
    pub(super) ptr: *const f32,
    pub(super) depth: usize,
    pub(super) skip: usize,
    /// True if they are in the plan's memory, not in the workspace.
    pub(super) constant: bool,
}

/// Panels of `B`: the first `count` start at `ptr + j * panel`, and their rows of [`PANEL_COLS`] are `step` apart. Columns beyond them make
/// one packed panel at `tail`.
#[derive(Clone, Copy)]
pub(super) struct Panels {
    pub(super) ptr: *const f32,
    pub(super) step: usize,
    pub(super) panel: usize,
    pub(super) count: usize,
    pub(super) tail: *const f32,
    /// True if they are in the plan's memory, not in the workspace.
    pub(super) constant: bool,
}

impl Panels {
    /// The next panels for a register tile that is up to `most` panels wide, from column `col` of `n`.
    fn group(&self, col: usize, n: usize, most: usize) -> Group {
        let first = col / PANEL_COLS;
        if first < self.count {
            let panels = most.min(self.count - first);
            let ptr = self.ptr.wrapping_add(first * self.panel);
            Group { ptr, step: self.step, panel: self.panel, panels, cols: (n - col).min(panels * PANEL_COLS) }
        } else {
            Group { ptr: self.tail, step: PANEL_COLS, panel: 0, panels: 1, cols: n - col }
        }
    }
}

/// One or two neighbouring panels of `B`.
struct Group {
    ptr: *const f32,
    step: usize,
    panel: usize,
    panels: usize,
    cols: usize,
}

/// The arguments of an innermost kernel, which computes one register tile.
struct Args {
    k: usize,
    a: *const f32,
    /// Between rows and between columns of `A`; the kernels for packed panels take the first to be 1.
    a_rs: isize,
    a_cs: isize,
    b: *const f32,
    b_step: usize,
    /// From one vector of a row of `B` to the next.
    b_next: usize,
    c: *mut f32,
    c_rs: isize,
    /// Columns to store.
    cols: usize,
    add: bool,
    /// The address to prefetch from, a line for every four steps.
    ahead: *const f32,
    /// That to prefetch a panel of `A` from, three lines for every four steps.
    a_ahead: *const f32,
}

type Kernel = unsafe fn(&Args);

/// The kernels of one instruction set.
pub(super) struct Kernels {
    /// Floats per vector.
    lanes: usize,
    /// Rows and panels of the largest register tile.
    rows: usize,
    panels: usize,
    /// By panels and rows, both less one; for packed panels of `A`.
    packed: &'static [&'static [Kernel]],
    /// By panels and rows, both less one, for up to `FEW_ROWS` rows of an `A` with any strides.
    few: &'static [&'static [Kernel]],
}

impl Kernels {
    /// `C (+)= A * B` for a block of packed `A` and of `B`.
    ///
    /// # Safety
    /// The CPU must have the instruction set, and the operands and the destination the block's sizes.
    pub(super) unsafe fn block(&self, a: Slab, b: Panels, c: &Block) {
        let Block { m, n, k, .. } = *c;
        if k * n <= SHALLOW {
            // All of B fits the L1 cache, so C is written row by row.
            for row in (0..m).step_by(self.rows) {
                let mut col = 0;
                while col < n {
                    let group = b.group(col, n, self.panels);
                    // SAFETY: the row and the group are inside the block.
                    unsafe { self.strip(a, &group, c, (row, col), group.ptr) }
                    col += group.cols;
                }
            }
            return;
        }
        let mut col = 0;
        while col < n {
            let group = b.group(col, n, self.panels);
            let next = col + group.cols;
            for (i, row) in (0..m).step_by(self.rows).enumerate() {
                // Each tile asks for a part of the next panels, so that they arrive while these are being used.
                let (panel, offset) = (i / 4, i % 4 * k.div_ceil(4) * PANEL_COLS);
                let more = b.constant && next < n && panel < self.panels;
                let skip = if more { (group.panels + panel) * b.panel + offset } else { 0 };
                // SAFETY: as above; what lies ahead is only prefetched.
                unsafe { self.strip(a, &group, c, (row, col), group.ptr.wrapping_add(skip)) }
            }
            col = next;
        }
    }

    /// One register tile, from a row and a column of the block on.
    ///
    /// # Safety
    /// As for [`Kernels::block`].
    #[inline(always)]
    unsafe fn strip(&self, a: Slab, b: &Group, c: &Block, (row, col): (usize, usize), ahead: *const f32) {
        // A register tile never crosses a panel, because its height divides the panel's.
        let panel = row / PANEL_ROWS * PANEL_ROWS;
        let width = (c.m - panel).min(PANEL_ROWS);
        let ptr = a.ptr.wrapping_add(panel * a.depth + a.skip * width + (row - panel));
        // The first columns ask for the next panel of weights, which no cache may have yet.
        let cold = a.constant && col == 0 && panel + PANEL_ROWS < c.m;
        let more = if cold { PANEL_ROWS * a.depth } else { 0 };
        let args = self.args(View { ptr, rs: 1, cs: width as isize }, b, c, (row, col), ahead);
        let args = Args { a_ahead: ptr.wrapping_add(more), ..args };
        // SAFETY: guaranteed by the caller.
        unsafe { self.packed[b.panels - 1][(c.m - row).min(self.rows) - 1](&args) }
    }

    /// `C (+)= A * B` for `m <= FEW_ROWS`.
    ///
    /// # Safety
    /// As for [`Kernels::block`].
    pub(super) unsafe fn few_rows(&self, a: View, b: Panels, c: &Block) {
        let mut col = 0;
        while c.m > 0 && col < c.n {
            let group = b.group(col, c.n, self.panels);
            let args = self.args(a, &group, c, (0, col), group.ptr);
            // SAFETY: the tile is inside the block.
            unsafe { self.few[group.panels - 1][c.m - 1](&args) }
            col += group.cols;
        }
    }

    #[inline(always)]
    fn args(&self, a: View, b: &Group, c: &Block, (row, col): (usize, usize), ahead: *const f32) -> Args {
        Args {
            k: c.k,
            a: a.ptr,
            a_rs: a.rs,
            a_cs: a.cs,
            b: b.ptr,
            b_step: b.step,
            b_next: if self.lanes == PANEL_COLS { b.panel } else { self.lanes },
            c: c.ptr.wrapping_offset(row as isize * c.stride + col as isize),
            c_rs: c.stride,
            cols: b.cols,
            add: c.add,
            ahead,
            a_ahead: a.ptr,
        }
    }
}

/// One step of `k`: a column of `M` elements of `A` times a row of `W` vectors of `B`.
///
/// # Safety
/// As for [`packed_kernel`].
#[inline(always)]
unsafe fn step<V: Terms, const M: usize, const W: usize>(
    sum: &mut [[V; W]; M],
    a: *const f32,
    a_rs: isize,
    b: *const f32,
    b_next: usize,
) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let mut right = [V::zero(); W];
        for (w, right) in right.iter_mut().enumerate() {
            *right = V::load(b.add(w * b_next));
        }
        let column = V::column::<M>(a, a_rs);
        for (i, sum) in sum.iter_mut().enumerate() {
            let left = V::splat_of(column, i);
            for (sum, &right) in sum.iter_mut().zip(&right) {
                *sum = left.mul_add(right, *sum);
            }
        }
    }
}

/// `M` rows by `W` vectors of `C`, from a packed panel of `A`.
///
/// # Safety
/// The pointers must be valid as [`Args`] describes, and the CPU must have the instruction set of `V`.
#[inline(always)]
unsafe fn packed_kernel<V: Terms, const M: usize, const W: usize>(args: &Args) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let mut sum = [[V::zero(); W]; M];
        let (mut a, mut b, mut ahead, mut a_ahead) = (args.a, args.b, args.ahead, args.a_ahead);
        let (a_step, b_step, b_next) = (args.a_cs as usize, args.b_step, args.b_next);
        for _ in 0..args.k / 4 {
            prefetch(ahead);
            ahead = ahead.wrapping_add(16);
            (0..3).for_each(|line| prefetch(a_ahead.wrapping_add(16 * line)));
            a_ahead = a_ahead.wrapping_add(4 * PANEL_ROWS);
            for p in 0..4 {
                step(&mut sum, a.add(p * a_step), 1, b.add(p * b_step), b_next);
            }
            a = a.wrapping_add(4 * a_step);
            b = b.wrapping_add(4 * b_step);
        }
        for _ in 0..args.k % 4 {
            step(&mut sum, a, 1, b, b_next);
            a = a.wrapping_add(a_step);
            b = b.wrapping_add(b_step);
        }
        store(&sum, args);
    }
}

/// `M` rows by `W` vectors of `C`, from a few rows of `A` with any strides. There are few sums, so each is split `U` ways to hide the
/// latency of the additions.
///
/// # Safety
/// As for [`packed_kernel`].
#[inline(always)]
unsafe fn few_kernel<V: Terms, const M: usize, const W: usize, const U: usize>(args: &Args) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let mut sum = [[[V::zero(); W]; M]; U];
        let (mut a, mut b) = (args.a, args.b);
        let (a_rs, a_cs, b_step, b_next) = (args.a_rs, args.a_cs, args.b_step, args.b_next);
        for _ in 0..args.k / U {
            for (u, sum) in sum.iter_mut().enumerate() {
                step(sum, a.wrapping_offset(u as isize * a_cs), a_rs, b.add(u * b_step), b_next);
            }
            a = a.wrapping_offset(U as isize * a_cs);
            b = b.wrapping_add(U * b_step);
        }
        for _ in 0..args.k % U {
            step(&mut sum[0], a, a_rs, b, b_next);
            a = a.wrapping_offset(a_cs);
            b = b.wrapping_add(b_step);
        }
        let (first, others) = sum.split_at_mut(1);
        for other in others {
            for i in 0..M {
                for w in 0..W {
                    first[0][i][w] = first[0][i][w].add(other[i][w]);
                }
            }
        }
        store(&first[0], args);
    }
}

/// # Safety
/// `args.c` must be writable, and readable when adding, for `M` rows of `args.cols` columns.
#[inline(always)]
unsafe fn store<V: Terms, const M: usize, const W: usize>(sum: &[[V; W]; M], args: &Args) {
    for (i, row) in sum.iter().enumerate() {
        for (w, &value) in row.iter().enumerate() {
            let to = args.c.wrapping_offset(i as isize * args.c_rs + (w * V::LEN) as isize);
            // SAFETY: full vectors lie inside the tile, the last is cut to it.
            unsafe {
                if args.cols >= (w + 1) * V::LEN {
                    (if args.add { V::load(to).add(value) } else { value }).store(to);
                } else if args.cols > w * V::LEN {
                    let n = args.cols - w * V::LEN;
                    (if args.add { V::load_first(to, n).add(value) } else { value }).store_first(to, n);
                }
            }
        }
    }
}

#[inline(always)]
fn prefetch(line: *const f32) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch of any address is harmless, and SSE is part of the baseline.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T1>(line.cast());
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: as above, of the whole instruction set.
    unsafe {
        std::arch::asm!("prfm pldl2keep, [{}]", in(reg) line, options(nomem, nostack, preserves_flags));
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = line;
}

/// Instantiates the kernels of an instruction set and the table of them.
macro_rules! kernels {
    ($table:ident, $packed:ident, $few:ident, $v:ty, [$($feature:meta)?], panels: $panels:literal, rows: [$($m:literal)*], vectors: [$($w:literal)*]) => {
        $(#[$feature])?
        unsafe fn $packed<const M: usize, const W: usize>(args: &Args) {
            // SAFETY: guaranteed by the caller; this function has the features of the vector type.
            unsafe { packed_kernel::<$v, M, W>(args) }
        }
        $(#[$feature])?
        unsafe fn $few<const M: usize, const W: usize, const U: usize>(args: &Args) {
            // SAFETY: as above.
            unsafe { few_kernel::<$v, M, W, U>(args) }
        }
        pub(super) const $table: Kernels = Kernels {
            lanes: <$v as Terms>::LEN,
            rows: [$($m),*].len(),
            panels: $panels,
            packed: kernels!(@rows $packed, [$($w)*], [$($m)*]),
            few: &[$(&[$few::<1, $w, 4>, $few::<2, $w, 2>, $few::<3, $w, 2>, $few::<4, $w, 1>]),*],
        };
    };
    (@rows $packed:ident, [$($w:literal)*], $rows:tt) => { &[$(kernels!(@row $packed, $w, $rows)),*] };
    (@row $packed:ident, $w:literal, [$($m:literal)*]) => { &[$($packed::<$m, $w>),*] };
}

#[cfg(target_arch = "x86_64")]
kernels!(AVX512, packed_avx512, few_avx512, Zmm, [target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")],
    panels: 2, rows: [1 2 3 4 5 6 7 8 9 10 11 12], vectors: [1 2]);
#[cfg(target_arch = "x86_64")]
kernels!(AVX2, packed_avx2, few_avx2, Ymm, [target_feature(enable = "avx2,fma")],
    panels: 1, rows: [1 2 3 4 5 6], vectors: [2]);
// Six rows by four registers leave eight for operands.
#[cfg(target_arch = "aarch64")]
kernels!(NEON, packed_neon, few_neon, Neon, [], panels: 1, rows: [1 2 3 4 5 6], vectors: [2]);
kernels!(PORTABLE, packed_portable, few_portable, Plain, [], panels: 1, rows: [1 2 3 4], vectors: [2]);

/// The kernels of an instruction set for products of bytes, by whether the left operand is the unsigned one.
macro_rules! byte_kernels {
    ($table:ident, $left:ident, $right:ident, $v:ty, $feature:tt, panels: $panels:literal, rows: $rows:tt, vectors: $vectors:tt) => {
        mod $left {
            use super::*;
            kernels!(TABLE, packed, few, Dot<$v, true>, $feature, panels: $panels, rows: $rows, vectors: $vectors);
        }
        mod $right {
            use super::*;
            kernels!(TABLE, packed, few, Dot<$v, false>, $feature, panels: $panels, rows: $rows, vectors: $vectors);
        }
        pub(super) const $table: [Kernels; 2] = [$right::TABLE, $left::TABLE];
    };
}

#[cfg(target_arch = "x86_64")]
byte_kernels!(VNNI_BYTES, vnni_left, vnni_right, Vnni,
    [target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")],
    panels: 2, rows: [1 2 3 4 5 6 7 8 9 10 11 12], vectors: [1 2]);
#[cfg(target_arch = "x86_64")]
byte_kernels!(AVX512_BYTES, avx512_left, avx512_right, WidenedZmm,
    [target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")],
    panels: 2, rows: [1 2 3 4 5 6 7 8 9 10 11 12], vectors: [1 2]);
#[cfg(target_arch = "x86_64")]
byte_kernels!(AVX2_BYTES, avx2_left, avx2_right, WidenedYmm, [target_feature(enable = "avx2,fma")],
    panels: 1, rows: [1 2 3 4], vectors: [2]);
#[cfg(target_arch = "aarch64")]
byte_kernels!(NEON_BYTES, neon_left, neon_right, WidenedNeon, [], panels: 1, rows: [1 2 3 4], vectors: [2]);
byte_kernels!(PORTABLE_BYTES, portable_left, portable_right, Widened, [], panels: 1, rows: [1 2 3 4], vectors: [2]);
