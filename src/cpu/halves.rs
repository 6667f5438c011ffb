//! Packed constants of 16-bit floats. They stay in 16 bits, and a panel of them is widened on its way into a product.

use super::block::f16_of_word;
use super::gemm::{PANEL_COLS, PANEL_ROWS, Produce};
use super::simd::{Isa, Lanes, per_isa};
use plimsoll_core::dtype::DType;
use std::ops::Range;

/// A packed operand of halves, two along `k` in each word.
pub struct Halves {
    /// The first word.
    pub words: *const u32,
    /// Words of a line.
    pub depth: usize,
    /// Rows of a left operand, or columns of a right one.
    pub lines: usize,
    /// Lines of a panel.
    pub unit: usize,
    /// True if the last panel is as wide as the others.
    pub padded: bool,
    /// True for `bf16`, false for `f16`.
    pub brain: bool,
}

// SAFETY: it is an address with extents; whoever reads through it answers for the memory.
unsafe impl Sync for Halves {}

impl Halves {
    /// The left operand of a product, `m` by `k`.
    pub fn left(words: *const u32, m: usize, k: usize, dtype: DType) -> Halves {
        let brain = dtype == DType::BF16;
        Halves { words, depth: k.div_ceil(2), lines: m, unit: PANEL_ROWS, padded: false, brain }
    }

    /// The right operand of a product, `k` by `n`.
    pub fn right(words: *const u32, n: usize, k: usize, dtype: DType) -> Halves {
        let brain = dtype == DType::BF16;
        Halves { words, depth: k.div_ceil(2), lines: n, unit: PANEL_COLS, padded: true, brain }
    }
}

/// Lanes that are widened together.
const TOGETHER: usize = 16;

impl Produce for Halves {
    unsafe fn panel(&self, isa: Isa, k: Range<usize>, lanes: Range<usize>, step: usize, panel: *mut f32) {
        // SAFETY: guaranteed by the caller.
        unsafe { widen(isa, self, k, lanes, step, panel) }
    }
}

per_isa! {
    /// # Safety
    /// As for [`Produce::panel`].
    unsafe fn widen(from: &Halves, k: Range<usize>, lanes: Range<usize>, step: usize, panel: *mut f32) => widen_by
}

/// # Safety
/// As for [`widen`], where the CPU has the instruction set of `L`.
#[inline(always)]
unsafe fn widen_by<L: Lanes>(from: &Halves, k: Range<usize>, lanes: Range<usize>, step: usize, panel: *mut f32) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        if from.brain {
            widen_with(from, k, lanes, step, panel, |bits| f32::from_bits(bits << 16));
        } else {
            widen_with(from, k, lanes, step, panel, f16_of_word);
        }
    }
}

/// # Safety
/// As for [`Produce::panel`].
#[inline(always)]
unsafe fn widen_with(
    from: &Halves,
    k: Range<usize>,
    lanes: Range<usize>,
    step: usize,
    panel: *mut f32,
    float: impl Fn(u32) -> f32 + Copy,
) {
    let first = lanes.start / from.unit * from.unit;
    let stride = if from.padded { from.unit } else { from.unit.min(from.lines - first) };
    let words = from.words.wrapping_add(first * from.depth + lanes.start - first);
    for word in k.start / 2..k.end.div_ceil(2) {
        let row = words.wrapping_add(word * stride);
        for (half, p) in (2 * word..2 * word + 2).enumerate().filter(|(_, p)| k.contains(p)) {
            let shift = 16 * half as u32;
            // SAFETY: the panel has the row, and the operand the word of each lane; a padded row has whole vectors.
            unsafe {
                let to = panel.add((p - k.start) * step);
                if step == TOGETHER && stride == TOGETHER {
                    let row = row.cast::<[u32; TOGETHER]>().read_unaligned();
                    to.cast::<[f32; TOGETHER]>().write_unaligned(row.map(|word| float(word >> shift & 0xffff)));
                } else {
                    for lane in 0..step {
                        let word = if lane < lanes.len() { *row.add(lane) } else { 0 };
                        *to.add(lane) = float(word >> shift & 0xffff);
                    }
                }
            }
        }
    }
}
