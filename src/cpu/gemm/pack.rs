//! Operands, and their copies in panels.

use crate::simd::{Isa, Lanes, per_isa, turn_by};
use plimsoll_core::kernel::cpu::gemm::*;
use std::ops::Range;

/// A matrix in memory. Strides are in elements and may be anything, zero and negative included.
#[derive(Clone, Copy, Debug)]
pub struct View {
    /// The element at row 0, column 0.
    pub ptr: *const f32,
    /// From one row to the next.
    pub rs: isize,
    /// From one column to the next.
    pub cs: isize,
}

// SAFETY: a view is an address with a shape; whoever reads through it answers for the memory.
unsafe impl Send for View {}
// SAFETY: as above.
unsafe impl Sync for View {}

impl View {
    /// Address of an element, which need not exist.
    #[inline(always)]
    pub fn at(self, row: usize, col: usize) -> *const f32 {
        self.ptr.wrapping_offset(row as isize * self.rs + col as isize * self.cs)
    }
}

/// Packs rows `rows` of an `m` by `k` left operand; `packed` is the start of the whole packed matrix, and `rows.start` a multiple of
/// [`PANEL_ROWS`]. Packing `0..m` packs it all.
///
/// # Safety
/// `a` must be readable at those rows and `k` columns, `packed` writable for [`packed_a_bytes`] and apart from `a`.
pub unsafe fn pack_a(isa: Isa, a: View, rows: Range<usize>, k: usize, packed: *mut f32) {
    assert!(rows.start.is_multiple_of(PANEL_ROWS), "rows of a packed operand start at a panel");
    // SAFETY: panels before `rows.start` are full, so the offset is theirs; the caller guarantees the rest.
    unsafe { pack_a_block(isa, a, rows.clone(), 0..k, packed.add(rows.start * k)) }
}

/// Packs columns `cols` of a `k` by `n` right operand; `packed` is the start of the whole packed matrix, and `cols.start` a multiple of
/// [`PANEL_COLS`]. Packing `0..n` packs it all.
///
/// # Safety
/// `b` must be readable at those columns and `k` rows, `packed` writable for [`packed_b_bytes`] and apart from `b`.
pub unsafe fn pack_b(isa: Isa, b: View, k: usize, cols: Range<usize>, packed: *mut f32) {
    assert!(cols.start.is_multiple_of(PANEL_COLS), "columns of a packed operand start at a panel");
    // SAFETY: as for `pack_a`.
    unsafe { pack_b_block(isa, b, 0..k, cols.clone(), packed.add(cols.start * k)) }
}

/// # Safety
/// `a` must be readable in the block, `to` writable for `rows.len() * k.len()` floats.
pub(super) unsafe fn pack_a_block(isa: Isa, a: View, rows: Range<usize>, k: Range<usize>, mut to: *mut f32) {
    if a.rs == 1 && rows.len() > PANEL_ROWS {
        // SAFETY: guaranteed by the caller.
        return unsafe { pack_columns(isa, a, rows, k, to) };
    }
    for row in rows.clone().step_by(PANEL_ROWS) {
        let width = (rows.end - row).min(PANEL_ROWS);
        // SAFETY: the panel is `width * k.len()` floats of the destination.
        unsafe {
            pack_panel(isa, View { ptr: a.at(row, k.start), ..a }, width, k.len(), to, width);
            to = to.add(width * k.len());
        }
    }
}

/// # Safety
/// `b` must be readable in the block, `to` writable for `k.len()` times `cols.len()` rounded up to [`PANEL_COLS`].
pub(super) unsafe fn pack_b_block(isa: Isa, b: View, k: Range<usize>, cols: Range<usize>, to: *mut f32) {
    let panel_len = PANEL_COLS * k.len();
    let full = if b.cs == 1 { cols.len() / PANEL_COLS } else { 0 };
    // SAFETY: every panel is `panel_len` floats of the destination, every element inside the block of the source.
    unsafe {
        // Rows that are contiguous are read along their length, across the panels: memory likes long runs.
        for p in 0..if full > 0 { k.len() } else { 0 } {
            let from = b.at(k.start + p, cols.start);
            let to = to.add(p * PANEL_COLS);
            for j in 0..full {
                let panel = to.add(j * panel_len).cast::<[f32; PANEL_COLS]>();
                panel.write_unaligned(from.add(j * PANEL_COLS).cast::<[f32; PANEL_COLS]>().read_unaligned());
            }
        }
        for j in full..cols.len().div_ceil(PANEL_COLS) {
            let (col, to) = (cols.start + j * PANEL_COLS, to.add(j * panel_len));
            let width = (cols.end - col).min(PANEL_COLS);
            if width < PANEL_COLS {
                to.write_bytes(0, panel_len);
            }
            pack_panel(isa, View { ptr: b.at(k.start, col), rs: b.cs, cs: b.rs }, width, k.len(), to, PANEL_COLS);
        }
    }
}

per_isa! {
    /// As [`pack_b_block`], of a matrix whose rows' elements follow one another.
    ///
    /// # Safety
    /// As for [`pack_b_block`].
    pub(super) unsafe fn pack_rows(b: View, k: Range<usize>, cols: Range<usize>, to: *mut f32) => pack_rows_by
}

/// # Safety
/// As for [`pack_rows`], where the CPU has the instruction set of `V`.
#[inline(always)]
unsafe fn pack_rows_by<V: Lanes>(b: View, k: Range<usize>, cols: Range<usize>, to: *mut f32) {
    let panel_len = PANEL_COLS * k.len();
    let full = cols.len() / PANEL_COLS;
    let rest = cols.len() % PANEL_COLS;
    for (p, row) in k.enumerate() {
        let mut from = b.at(row, cols.start);
        let mut to = to.wrapping_add(p * PANEL_COLS);
        // SAFETY: every panel is `panel_len` floats of the destination, every element inside the block of the source.
        unsafe {
            for _ in 0..full {
                for lane in (0..PANEL_COLS).step_by(V::LEN) {
                    V::load(from.add(lane)).store(to.add(lane));
                }
                (from, to) = (from.wrapping_add(PANEL_COLS), to.wrapping_add(panel_len));
            }
            if rest > 0 {
                for lane in (0..PANEL_COLS).step_by(V::LEN) {
                    V::load_first(from.wrapping_add(lane), rest.saturating_sub(lane).min(V::LEN)).store(to.add(lane));
                }
            }
        }
    }
}

per_isa! {
    /// As [`pack_a_block`], of a matrix whose columns' elements follow one another. They are read along their length, across the panels.
    ///
    /// # Safety
    /// As for [`pack_a_block`].
    unsafe fn pack_columns(a: View, rows: Range<usize>, k: Range<usize>, to: *mut f32) => pack_columns_by
}

/// # Safety
/// As for [`pack_columns`], where the CPU has the instruction set of `V`.
#[inline(always)]
unsafe fn pack_columns_by<V: Lanes>(a: View, rows: Range<usize>, k: Range<usize>, to: *mut f32) {
    let depth = k.len();
    let (full, rest) = (rows.len() / PANEL_ROWS, rows.len() % PANEL_ROWS);
    for (p, column) in k.enumerate() {
        let (mut from, mut panel) = (a.at(rows.start, column), to);
        // SAFETY: every panel is its lanes times the depth in floats of the destination, every element inside the block of the source.
        unsafe {
            for _ in 0..full {
                let to = panel.add(p * PANEL_ROWS);
                for lane in (0..PANEL_ROWS).step_by(V::LEN) {
                    let (from, to, n) = (from.add(lane), to.add(lane), (PANEL_ROWS - lane).min(V::LEN));
                    if n == V::LEN { V::load(from).store(to) } else { V::load_first(from, n).store_first(to, n) }
                }
                (from, panel) = (from.wrapping_add(PANEL_ROWS), panel.wrapping_add(PANEL_ROWS * depth));
            }
            panel.wrapping_add(p * rest).copy_from_nonoverlapping(from, rest);
        }
    }
}

/// A matrix of bytes in memory, seen as lines: rows of a left operand, or columns of a right one, whose strides are then swapped.
#[derive(Clone, Copy, Debug)]
pub struct Bytes {
    /// The byte at row 0, column 0.
    pub ptr: *const u8,
    /// From one row to the next.
    pub rs: isize,
    /// From one column to the next.
    pub cs: isize,
    /// Bytes along `k`.
    pub depth: usize,
}

// SAFETY: as of `View`.
unsafe impl Send for Bytes {}
// SAFETY: as of `View`.
unsafe impl Sync for Bytes {}

impl Bytes {
    /// Address of a byte, which need not exist.
    #[inline(always)]
    fn at(self, line: usize, byte: usize) -> *const u8 {
        self.ptr.wrapping_offset(line as isize * self.rs + byte as isize * self.cs)
    }

    /// Four bytes of a line from a word on, zeros behind its end.
    ///
    /// # Safety
    /// The line must be readable.
    #[inline(always)]
    unsafe fn word(self, line: usize, word: usize) -> [u8; 4] {
        std::array::from_fn(|t| {
            let byte = 4 * word + t;
            // SAFETY: the byte is one of the line's.
            if byte < self.depth { unsafe { *self.at(line, byte) } } else { 0 }
        })
    }
}

/// Packs words `k` of lines in panels of `unit` lines, the last one narrower, or padded with zeros if the flag beside `unit` says so.
///
/// # Safety
/// `from` must be readable at these lines and words, `to` writable for `k.len()` floats per line, padding included.
pub(super) unsafe fn pack_words(
    from: Bytes,
    lines: Range<usize>,
    k: Range<usize>,
    (unit, padded): (usize, bool),
    to: *mut f32,
) {
    // Words that all lines have as a whole.
    let whole = k.end.min(from.depth / 4).max(k.start);
    for first in lines.clone().step_by(unit) {
        let width = unit.min(lines.end - first);
        let step = if padded { unit } else { width };
        let to = to.wrapping_add((first - lines.start) * k.len()).cast::<[u8; 4]>();
        // SAFETY: every line is below the end, every word inside the panel; the caller guarantees the rest.
        unsafe {
            if width < step {
                to.write_bytes(0, step * k.len());
            }
            let mut done = k.start;
            if from.cs == 1 {
                for i in 0..width {
                    let line = from.at(first + i, 0).cast::<[u8; 4]>();
                    for p in k.start..whole {
                        *to.add((p - k.start) * step + i) = *line.add(p);
                    }
                }
                done = whole;
            } else if from.rs == 1 && width == 16 {
                for p in k.start..whole {
                    interleave([0, 1, 2, 3].map(|t| from.at(first, 4 * p + t)), to.add((p - k.start) * step));
                }
                done = whole;
            }
            for p in done..k.end {
                for i in 0..width {
                    *to.add((p - k.start) * step + i) = from.word(first + i, p);
                }
            }
        }
    }
}

/// Words of sixteen neighbouring lines: byte `t` of word `i` is byte `i` of `rows[t]`.
///
/// # Safety
/// Sixteen bytes of each row must be readable, and sixteen words of `to` writable.
#[inline(always)]
pub(crate) unsafe fn interleave(rows: [*const u8; 4], to: *mut [u8; 4]) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: SSE2 is part of the baseline; the caller guarantees the rest.
    unsafe {
        interleave_vectors(rows.map(|row| std::arch::x86_64::_mm_loadu_si128(row.cast())), to);
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: NEON is part of the baseline; the caller guarantees the rest.
    unsafe {
        use std::arch::aarch64::*;
        let [a, b, c, d] = rows.map(|row| vld1q_u8(row));
        vst4q_u8(to.cast(), uint8x16x4_t(a, b, c, d));
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    // SAFETY: guaranteed by the caller.
    unsafe {
        let rows = rows.map(|row| row.cast::<[u8; 16]>().read_unaligned());
        let words: [[u8; 4]; 16] = std::array::from_fn(|i| [rows[0][i], rows[1][i], rows[2][i], rows[3][i]]);
        to.cast::<[[u8; 4]; 16]>().write_unaligned(words);
    }
}

/// As [`interleave`], of rows in registers.
///
/// # Safety
/// Sixteen words of `to` must be writable.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub(crate) unsafe fn interleave_vectors([a, b, c, d]: [std::arch::x86_64::__m128i; 4], to: *mut [u8; 4]) {
    use std::arch::x86_64::*;
    // SAFETY: SSE2 is part of the baseline; the caller guarantees the rest.
    unsafe {
        let low = (_mm_unpacklo_epi8(a, b), _mm_unpacklo_epi8(c, d));
        let high = (_mm_unpackhi_epi8(a, b), _mm_unpackhi_epi8(c, d));
        for (i, (left, right)) in [low, high].into_iter().enumerate() {
            let to = to.add(8 * i).cast::<__m128i>();
            _mm_storeu_si128(to, _mm_unpacklo_epi16(left, right));
            _mm_storeu_si128(to.add(1), _mm_unpackhi_epi16(left, right));
        }
    }
}

per_isa! {
    /// `to[p * step + i] = from(i, p)` for `i < width`, `p < k`.
    ///
    /// # Safety
    /// `from` must be readable at `width` by `k` elements, `to` writable at the elements named above.
    pub(crate) unsafe fn pack_panel(from: View, width: usize, k: usize, to: *mut f32, step: usize) => pack_panel_by
}

/// # Safety
/// As for [`pack_panel`], where the CPU has the instruction set of `V`.
#[inline(always)]
pub(crate) unsafe fn pack_panel_by<V: Lanes>(from: View, width: usize, k: usize, to: *mut f32, step: usize) {
    // SAFETY: every index is below `width` and `k`.
    unsafe {
        if from.rs == 1 {
            // The full widths are spelled out so that they become a few vector moves.
            match width {
                PANEL_COLS => copy_rows::<PANEL_COLS>(from, k, to, step),
                PANEL_ROWS => copy_rows::<PANEL_ROWS>(from, k, to, step),
                _ => {
                    for p in 0..k {
                        to.add(p * step).copy_from_nonoverlapping(from.at(0, p), width);
                    }
                }
            }
        } else if from.cs == 1 {
            turn_by::<V>(width, k, from.ptr, from.rs, to, step);
        } else {
            for p in 0..k {
                for i in 0..width {
                    *to.add(p * step + i) = *from.at(i, p);
                }
            }
        }
    }
}

/// As [`pack_panel`] of rows whose elements follow one another, with the columns in reverse: `to[(k - 1 - p) * step + i] = from(i, p)`.
///
/// # Safety
/// As for [`pack_panel`].
#[inline(always)]
pub(crate) unsafe fn pack_reversed(from: View, width: usize, k: usize, to: *mut f32, step: usize) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        // The full widths are spelled out so that their loops have no end to look for.
        match width {
            PANEL_COLS => reverse_rows::<PANEL_COLS>(from, k, to, step),
            PANEL_ROWS => reverse_rows::<PANEL_ROWS>(from, k, to, step),
            _ => (0..width).for_each(|i| {
                let from = View { ptr: from.at(i, 0), ..from };
                reverse_rows::<1>(from, k, to.add(i), step);
            }),
        }
    }
}

/// # Safety
/// As for `pack_reversed`, with a width of `W`.
#[inline(always)]
unsafe fn reverse_rows<const W: usize>(from: View, k: usize, to: *mut f32, step: usize) {
    for p in 0..k {
        for i in 0..W {
            // SAFETY: row `i` is below the width, column `p` below `k`.
            unsafe { *to.add((k - 1 - p) * step + i) = *from.ptr.offset(i as isize * from.rs + p as isize) }
        }
    }
}

/// # Safety
/// As for `pack_panel`, with a width of `W` and a row stride of 1.
#[inline(always)]
unsafe fn copy_rows<const W: usize>(from: View, k: usize, to: *mut f32, step: usize) {
    for p in 0..k {
        // SAFETY: `W` elements at column `p` of the source and at step `p` of the destination.
        unsafe {
            to.add(p * step).cast::<[f32; W]>().write_unaligned(from.at(0, p).cast::<[f32; W]>().read_unaligned())
        }
    }
}
