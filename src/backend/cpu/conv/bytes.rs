//! Convolutions of bytes: panels of patches.

use super::{LANES, PanelLanes};
use crate::backend::cpu::gemm::{Produce, interleave};
use crate::backend::cpu::simd::{Isa, Lanes, Plain, per_isa};
#[cfg(target_arch = "x86_64")]
use crate::backend::cpu::simd::{Ymm, Zmm};
use crate::backend::cpu::window::Window;
use std::ops::Range;

/// The matrix of image patches of bytes: row `(channel, tap)`, column `position`. Lanes are positions, and a word has four rows.
pub(super) struct BytePatches<'a> {
    pub window: &'a Window,
    pub ptr: *const u8,
    pub channel_stride: usize,
    /// Rows.
    pub depth: usize,
    /// The byte around the image.
    pub padding: u8,
}

// SAFETY: an image that the caller of `Conv::run` vouches for, and that is only read.
unsafe impl Sync for BytePatches<'_> {}

impl Produce for BytePatches<'_> {
    /// Lanes behind the last position have any bytes: their sums are stored nowhere.
    unsafe fn panel(&self, isa: Isa, k: Range<usize>, lanes: Range<usize>, step: usize, panel: *mut f32) {
        assert!(step == LANES, "panels of bytes are a vector wide");
        // SAFETY: guaranteed by the caller.
        unsafe { cut(isa, self, k, lanes, panel) }
    }
}

per_isa! {
    /// # Safety
    /// As for [`Produce::panel`].
    unsafe fn cut(patches: &BytePatches, k: Range<usize>, lanes: Range<usize>, panel: *mut f32) => cut_by
}

/// # Safety
/// As for [`Produce::panel`], where the CPU has the instruction set of `R`.
#[inline(always)]
unsafe fn cut_by<R: Row>(patches: &BytePatches, k: Range<usize>, lanes: Range<usize>, panel: *mut f32) {
    let BytePatches { window, ptr, channel_stride, depth, padding } = *patches;
    let (taps, stride) = (window.taps(), window.strides[2]);
    let table = PanelLanes::new(window, lanes, 0..taps);
    let runs = &table.runs[..table.run_count];
    let (mut channel, mut tap) = (ptr.wrapping_add(4 * k.start / taps * channel_stride), 4 * k.start % taps);
    for (p, word) in k.enumerate() {
        let mut rows = [[padding; LANES]; 4];
        for row in rows.iter_mut().take(depth - 4 * word) {
            let (offset, inside) = table.taps[tap];
            for &(origin, run) in runs {
                // SAFETY: lanes of the mask are inside the image.
                unsafe { R::pick(row, channel.wrapping_offset(origin + offset), stride, inside & run) }
            }
            tap += 1;
            if tap == taps {
                (tap, channel) = (0, channel.wrapping_add(channel_stride));
            }
        }
        // SAFETY: the panel has a vector of words for each step.
        unsafe { interleave(rows.each_ref().map(|row| row.as_ptr()), panel.add(p * LANES).cast()) }
    }
}

/// Sixteen bytes of a row of patches.
///
/// # Safety
/// The CPU must have the implementor's instruction set.
trait Row: Lanes {
    /// Writes byte `from[lane * stride]` to each lane of a mask.
    ///
    /// # Safety
    /// Those bytes must be readable.
    #[inline(always)]
    unsafe fn pick(row: &mut [u8; LANES], from: *const u8, stride: usize, mask: u16) {
        if mask == u16::MAX && stride == 1 {
            // SAFETY: all lanes are readable.
            *row = unsafe { from.cast::<[u8; LANES]>().read_unaligned() };
            return;
        }
        for (lane, to) in row.iter_mut().enumerate().filter(|(lane, _)| mask >> lane & 1 == 1) {
            // SAFETY: the lane is one of the mask's.
            *to = unsafe { *from.wrapping_add(lane * stride) };
        }
    }
}

impl Row for Plain {}

#[cfg(target_arch = "x86_64")]
impl Row for Ymm {}

#[cfg(target_arch = "x86_64")]
impl Row for Zmm {
    #[inline(always)]
    unsafe fn pick(row: &mut [u8; LANES], from: *const u8, stride: usize, mask: u16) {
        use std::arch::x86_64::*;
        // SAFETY: AVX-512 and BMI2, by the contract of the trait; lanes that are masked out are not read.
        unsafe {
            let to = row.as_mut_ptr().cast();
            let old = _mm_loadu_si128(to);
            match stride {
                1 => _mm_storeu_si128(to, _mm_mask_loadu_epi8(old, mask, from.cast())),
                2 => {
                    let pairs = _mm256_maskz_loadu_epi8(_pdep_u32(u32::from(mask), 0x5555_5555), from.cast());
                    _mm_storeu_si128(to, _mm_mask_blend_epi8(mask, old, _mm256_cvtepi16_epi8(pairs)));
                }
                _ => Plain::pick(row, from, stride, mask),
            }
        }
    }
}
