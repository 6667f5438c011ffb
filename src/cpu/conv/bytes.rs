//! Convolutions of bytes: panels of patches.

use super::{LANES, PanelLanes};
#[cfg(target_arch = "x86_64")]
use crate::gemm::interleave_vectors;
use crate::gemm::{Produce, interleave};
use crate::simd::{Isa, Lanes, Plain, per_isa};
#[cfg(target_arch = "x86_64")]
use crate::simd::{Ymm, Zmm};
use crate::window::Window;
use std::ops::Range;

/// The matrix of image patches of bytes, whose columns are positions. Lanes are positions, and a word has four rows.
pub(super) struct BytePatches<'a> {
    pub window: &'a Window,
    pub ptr: *const u8,
    pub channel_stride: usize,
    pub channels: usize,
    /// Rows are `(tap, channel)`, with a whole number of words for each tap; else `(channel, tap)`.
    pub by_tap: bool,
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
        unsafe { if self.by_tap { cut_by_tap(isa, self, k, lanes, panel) } else { cut(isa, self, k, lanes, panel) } }
    }
}

per_isa! {
    /// Rows are `(tap, channel)`.
    ///
    /// # Safety
    /// As for [`Produce::panel`].
    unsafe fn cut_by_tap(patches: &BytePatches, k: Range<usize>, lanes: Range<usize>, panel: *mut f32) => cut_by_tap_by
}

/// # Safety
/// As for [`Produce::panel`], where the CPU has the instruction set of `R`.
#[inline(always)]
unsafe fn cut_by_tap_by<R: Row>(patches: &BytePatches, k: Range<usize>, lanes: Range<usize>, panel: *mut f32) {
    let BytePatches { window, ptr, channel_stride, channels, padding, .. } = *patches;
    let each = channels.div_ceil(4);
    let taps = k.start / each..k.end.div_ceil(each);
    let table = PanelLanes::new(window, lanes, taps.clone());
    let mut to = panel.cast::<[u8; 4]>();
    for (tap, &(offset, inside)) in taps.zip(&table.taps) {
        let mut under = Under { runs: [(0, 0); LANES], count: 0, stride: window.strides[2], padding };
        for &(origin, run) in table.runs[..table.run_count].iter().filter(|(_, run)| run & inside != 0) {
            under.runs[under.count] = (origin + offset, run & inside);
            under.count += 1;
        }
        for word in k.start.max(tap * each)..k.end.min((tap + 1) * each) {
            // Of channels behind the last one weights are zero.
            let channel = |c: usize| (4 * (word - tap * each) + c).min(channels - 1);
            let planes = std::array::from_fn(|c| ptr.wrapping_add(channel(c) * channel_stride));
            // SAFETY: lanes of the masks are inside the image; the panel has a vector of words for each step.
            unsafe { R::words(planes, &under, to) }
            to = to.wrapping_add(LANES);
        }
    }
}

/// The elements of a plane under one tap of sixteen windows.
struct Under {
    /// Where lane 0 is, or would be, relative to the plane, and the lanes that are at even distances from there.
    runs: [(isize, u16); LANES],
    count: usize,
    /// From one lane to the next.
    stride: usize,
    /// The byte of the lanes that are in no run.
    padding: u8,
}

per_isa! {
    /// Rows are `(channel, tap)`.
    ///
    /// # Safety
    /// As for [`Produce::panel`].
    unsafe fn cut(patches: &BytePatches, k: Range<usize>, lanes: Range<usize>, panel: *mut f32) => cut_by
}

/// # Safety
/// As for [`Produce::panel`], where the CPU has the instruction set of `R`.
#[inline(always)]
unsafe fn cut_by<R: Row>(patches: &BytePatches, k: Range<usize>, lanes: Range<usize>, panel: *mut f32) {
    let BytePatches { window, ptr, channel_stride, channels, padding, .. } = *patches;
    let (taps, stride) = (window.taps(), window.strides[2]);
    let table = PanelLanes::new(window, lanes, 0..taps);
    let runs = &table.runs[..table.run_count];
    let (mut channel, mut tap) = (ptr.wrapping_add(4 * k.start / taps * channel_stride), 4 * k.start % taps);
    for (p, word) in k.enumerate() {
        let mut rows = [[padding; LANES]; 4];
        for row in rows.iter_mut().take(channels * taps - 4 * word) {
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

/// Sixteen bytes of rows of patches.
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

    /// Writes sixteen words, each of four planes.
    ///
    /// # Safety
    /// Bytes of the lanes in runs must be readable, and the words writable.
    #[inline(always)]
    unsafe fn words(planes: [*const u8; 4], under: &Under, to: *mut [u8; 4]) {
        let mut rows = [[under.padding; LANES]; 4];
        // SAFETY: guaranteed by the caller.
        unsafe {
            for (row, plane) in rows.iter_mut().zip(planes) {
                for &(offset, run) in &under.runs[..under.count] {
                    Self::pick(row, plane.wrapping_offset(offset), under.stride, run);
                }
            }
            interleave(rows.each_ref().map(|row| row.as_ptr()), to);
        }
    }
}

impl Row for Plain {}

#[cfg(target_arch = "aarch64")]
impl Row for crate::simd::Neon {}

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

    #[inline(always)]
    unsafe fn words(planes: [*const u8; 4], under: &Under, to: *mut [u8; 4]) {
        use std::arch::x86_64::*;
        // SAFETY: as above.
        unsafe {
            let mut rows = [_mm_set1_epi8(under.padding.cast_signed()); 4];
            for &(offset, mask) in &under.runs[..under.count] {
                let at = planes.map(|plane| plane.wrapping_offset(offset));
                match under.stride {
                    1 => {
                        for (row, at) in rows.iter_mut().zip(at) {
                            *row = _mm_mask_loadu_epi8(*row, mask, at.cast());
                        }
                    }
                    2 => {
                        let pairs = _pdep_u32(u32::from(mask), 0x5555_5555);
                        for (row, at) in rows.iter_mut().zip(at) {
                            let near = _mm256_maskz_loadu_epi8(pairs, at.cast());
                            *row = _mm256_mask_cvtepi16_epi8(*row, mask, near);
                        }
                    }
                    stride => {
                        for (row, at) in rows.iter_mut().zip(at) {
                            let mut bytes = [0; LANES];
                            _mm_storeu_si128(bytes.as_mut_ptr().cast(), *row);
                            Plain::pick(&mut bytes, at, stride, mask);
                            *row = _mm_loadu_si128(bytes.as_ptr().cast());
                        }
                    }
                }
            }
            interleave_vectors(rows, to);
        }
    }
}
