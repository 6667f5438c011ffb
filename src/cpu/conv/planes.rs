//! Depthwise convolutions: a window slides over the planes of the data. Those of bytes are slid over as they are by VNNI:
//!
//! ```text
//!   a row of the plane:   a b c d e f g ..      ->   words: abcd bcde cdef defg ..   one for each output, four taps in each
//!   a row of the filter:  p q r                 ->   word:  pqr0
//! ```
//!
//! An output's sum grows by one product of words for each row of the filter. The words of an input row serve all output rows that it is under.

use super::{Bytes, Conv};
use crate::simd::{Isa, Lanes, per_isa};
use crate::window::{Planes, Slide, Window, slide};
use plimsoll_core::kernel::cpu::conv::Padded;
use std::ops::Range;

/// Some channels of an image, which are computed together.
#[derive(Clone, Copy)]
pub(super) struct Channels {
    pub count: usize,
    /// The first input plane, whose elements are floats or bytes.
    pub from: *const f32,
    /// Elements from one input plane to the next.
    pub step: usize,
    /// The taps of the first filter, and elements of 4 bytes from one filter to the next.
    pub taps: *const f32,
    pub taps_step: usize,
}

impl Channels {
    /// The taps of a filter of bytes.
    fn filter(&self, i: usize) -> *const u8 {
        self.taps.wrapping_add(i * self.taps_step).cast()
    }

    /// A plane of bytes.
    fn plane(&self, i: usize) -> *const u8 {
        self.from.cast::<u8>().wrapping_add(i * self.step)
    }
}

/// The way in which the planes of a depthwise convolution are slid over.
pub(super) enum Slider<'a> {
    /// Planes of floats, as they are.
    Floats { space: &'a mut [f32] },
    /// Planes of bytes, widened to floats, less their padding: sums of the few products of a window are exact there, and there are zeros
    /// around the planes.
    Widened { bytes: Bytes, space: &'a mut [f32], filters: &'a mut [f32], wide: &'a mut [f32] },
    /// Planes of bytes, each with its padding around it.
    Padded { layout: Padded, kernel: SlideBytes, planes: &'a mut [f32] },
}

impl<'a> Slider<'a> {
    /// The fastest way on this CPU. The memory is as large as [`Conv::planes_bytes`] says.
    pub fn new(isa: Isa, conv: &Conv, memory: &'a mut [f32]) -> Slider<'a> {
        let window = &conv.window;
        let Some(bytes) = conv.bytes else { return Slider::Floats { space: memory } };
        if let Some((layout, kernel)) = Padded::under(window).zip(kernel(isa, window, bytes.unsigned_data)) {
            let planes = &mut memory[..conv.together() * layout.bytes() / 4];
            planes.fill(f32::from_ne_bytes([bytes.padding as u8; 4]));
            return Slider::Padded { layout, kernel, planes };
        }
        let (filters, wide) = conv.widened();
        let (space, rest) = memory.split_at_mut(window.workspace_bytes() / 4);
        let (filters, rest) = rest.split_at_mut(filters);
        Slider::Widened { bytes, space, filters, wide: &mut rest[..wide] }
    }

    /// Makes channels ready.
    ///
    /// # Safety
    /// Their planes and filters must be readable, and they must be no more than go together.
    pub unsafe fn load(&mut self, isa: Isa, window: &Window, channels: &Channels) {
        let (size, taps) = (window.input_len(), window.taps());
        // SAFETY: planes and filters that the caller vouches for, and room for all of them.
        unsafe {
            match self {
                Slider::Floats { .. } => {}
                Slider::Widened { bytes: Bytes { unsigned_data, padding }, filters, wide, .. } => {
                    for i in 0..channels.count {
                        let (filter, plane) = (filters.as_mut_ptr().add(i * taps), wide.as_mut_ptr().add(i * size));
                        widen(isa, channels.filter(i), taps, !*unsigned_data, 0.0, filter);
                        widen(isa, channels.plane(i), size, *unsigned_data, *padding as f32, plane);
                    }
                }
                Slider::Padded { layout, planes, .. } => {
                    for i in 0..channels.count {
                        pad(
                            window,
                            layout,
                            channels.plane(i),
                            planes.as_mut_ptr().cast::<u8>().add(i * layout.bytes()),
                        );
                    }
                }
            }
        }
    }

    /// Computes some rows of the channels that were made ready last: of each channel `stride` elements behind those of the one before.
    ///
    /// # Safety
    /// As for [`Slider::load`], and the rows of `y` must be writable.
    pub unsafe fn rows(
        &mut self,
        isa: Isa,
        window: &Window,
        &Channels { count, from, step, taps, taps_step }: &Channels,
        rows: Range<usize>,
        (y, stride): (*mut f32, usize),
    ) {
        let planes = |x, x_step| Planes { count, x, x_step, y, y_step: stride, rows: rows.clone() };
        // SAFETY: guaranteed by the caller.
        unsafe {
            match self {
                Slider::Floats { space } => slide(isa, window, Slide::Weighted(taps), planes(from, step), space),
                Slider::Widened { bytes, space, filters, wide } => {
                    let planes = planes(wide.as_ptr(), window.input_len());
                    slide(isa, window, Slide::Weighted(filters.as_ptr()), planes, space);
                    for (i, filter) in filters.chunks_exact(window.taps().max(1)).take(count).enumerate() {
                        let plus = bytes.padding * filter.iter().sum::<f32>() as i32;
                        narrow(isa, y.wrapping_add(i * stride), rows.len() * window.output[2], plus);
                    }
                }
                Slider::Padded { layout, kernel, planes } => {
                    for i in 0..count {
                        let plane = planes.as_ptr().cast::<u8>().add(i * layout.bytes());
                        let (filter, y) = (taps.add(i * taps_step).cast(), y.wrapping_add(i * stride).cast());
                        kernel(plane, layout, window.output[2], filter, rows.clone(), y);
                    }
                }
            }
        }
    }
}

/// Copies a plane to where its padding is already. Rows are so short that a call for each would take longer than its copy, so each is two or four
/// pieces, which may overlap.
///
/// # Safety
/// `from` must be readable for the window's input, `to` writable for the padded plane.
unsafe fn pad(window: &Window, layout: &Padded, from: *const u8, to: *mut u8) {
    let [_, height, width] = window.input;
    let [_, above, before] = window.pads;
    let columns = width.min(layout.pitch.saturating_sub(before));
    let rows = height.min(layout.rows.saturating_sub(above));
    let rows =
        (0..rows).map(|row| (from.wrapping_add(row * width), to.wrapping_add((above + row) * layout.pitch + before)));
    // SAFETY: the rows are inside the plane and the padded plane, and no piece is longer than a row.
    unsafe {
        match columns {
            0 => {}
            1..4 => rows.for_each(|(from, to)| (0..columns).for_each(|at| *to.add(at) = *from.add(at))),
            4..8 => rows.for_each(|(from, to)| ends::<[u8; 4]>(from, to, columns)),
            8..16 => rows.for_each(|(from, to)| ends::<[u8; 8]>(from, to, columns)),
            16..32 => rows.for_each(|(from, to)| ends::<[u8; 16]>(from, to, columns)),
            32..64 => rows.for_each(|(from, to)| {
                ends::<[u8; 16]>(from, to, columns);
                ends::<[u8; 16]>(from.add(16), to.add(16), columns - 32);
            }),
            _ => rows.for_each(|(from, to)| to.copy_from_nonoverlapping(from, columns)),
        }
    }
}

/// Copies the first and the last piece of `n` bytes.
///
/// # Safety
/// `from` must be readable and `to` writable for `n` bytes and for a piece.
#[inline(always)]
unsafe fn ends<T>(from: *const u8, to: *mut u8, n: usize) {
    for at in [0, n.wrapping_sub(size_of::<T>())] {
        let (from, to) = (from.wrapping_add(at), to.wrapping_add(at));
        // SAFETY: guaranteed by the caller.
        unsafe { to.cast::<T>().write_unaligned(from.cast::<T>().read_unaligned()) }
    }
}

/// A function that slides over the rows of one plane: the padded plane, its layout, the output's width, the filter's taps, the rows, and
/// where the sums of these go.
type SlideBytes = unsafe fn(*const u8, &Padded, usize, *const u8, Range<usize>, *mut i32);

/// The function for a window that has a padded plane under it, if this CPU has one.
fn kernel(isa: Isa, window: &Window, unsigned_data: bool) -> Option<SlideBytes> {
    #[cfg(target_arch = "x86_64")]
    if isa.level() == crate::simd::Level::Avx512Vnni {
        return Some(match (window.kernel[1], window.strides[1], unsigned_data) {
            (3, 1, true) => x86::slide::<3, 1, true>,
            (3, 1, false) => x86::slide::<3, 1, false>,
            (3, _, true) => x86::slide::<3, 2, true>,
            (3, _, false) => x86::slide::<3, 2, false>,
            (5, 1, true) => x86::slide::<5, 1, true>,
            (5, 1, false) => x86::slide::<5, 1, false>,
            (5, _, true) => x86::slide::<5, 2, true>,
            (5, _, false) => x86::slide::<5, 2, false>,
            (_, 1, true) => x86::slide::<7, 1, true>,
            (_, 1, false) => x86::slide::<7, 1, false>,
            (_, _, true) => x86::slide::<7, 2, true>,
            (_, _, false) => x86::slide::<7, 2, false>,
        });
    }
    let _ = (isa, window, unsigned_data);
    None
}

per_isa! {
    /// Widens bytes, less a number, to floats.
    ///
    /// # Safety
    /// `from` must be readable and `to` writable for `n` elements.
    unsafe fn widen(from: *const u8, n: usize, unsigned: bool, less: f32, to: *mut f32) => widen_by
}

/// # Safety
/// As for [`widen`].
#[inline(always)]
unsafe fn widen_by<L: Lanes>(from: *const u8, n: usize, unsigned: bool, less: f32, to: *mut f32) {
    // SAFETY: guaranteed by the caller.
    let (from, to) = unsafe { (std::slice::from_raw_parts(from, n), std::slice::from_raw_parts_mut(to, n)) };
    if unsigned {
        to.iter_mut().zip(from).for_each(|(to, &x)| *to = f32::from(x) - less);
    } else {
        to.iter_mut().zip(from).for_each(|(to, &x)| *to = f32::from(x.cast_signed()) - less);
    }
}

per_isa! {
    /// Turns floats that are whole numbers into the `i32` of these plus a number, in place.
    ///
    /// # Safety
    /// `at` must be writable for `n` elements of 4 bytes. With the number they must be less than 2^31.
    unsafe fn narrow(at: *mut f32, n: usize, plus: i32) => narrow_by
}

/// # Safety
/// As for [`narrow`].
#[inline(always)]
unsafe fn narrow_by<L: Lanes>(at: *mut f32, n: usize, plus: i32) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        for at in std::slice::from_raw_parts_mut(at.cast::<u32>(), n) {
            *at = (f32::from_bits(*at).to_int_unchecked::<i32>() + plus).cast_unsigned();
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::super::LANES;
    use super::{Padded, Range};
    use plimsoll_core::kernel::cpu::window::TALL;
    use std::arch::x86_64::*;

    /// Words of a row of the widest filter.
    const WORDS: usize = 2;

    /// Slides a `K` by `K` window, `S` elements apart.
    ///
    /// # Safety
    /// The CPU must have AVX-512 with VNNI. The padded plane and `K * K` taps must be readable, the output writable for `rows` of `width`.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    pub unsafe fn slide<const K: usize, const S: usize, const UNSIGNED: bool>(
        plane: *const u8,
        layout: &Padded,
        width: usize,
        taps: *const u8,
        rows: Range<usize>,
        y: *mut i32,
    ) {
        let words = K.div_ceil(4);
        let mut weights = [[_mm512_setzero_si512(); WORDS]; K];
        for (line, weights) in weights.iter_mut().enumerate() {
            for (w, weight) in weights.iter_mut().enumerate().take(words) {
                let tap = |t: usize| {
                    let at = 4 * w + t;
                    // SAFETY: the tap is one of the filter's.
                    if at < K { unsafe { *taps.add(line * K + at) } } else { 0 }
                };
                *weight = _mm512_set1_epi32(i32::from_le_bytes([tap(0), tap(1), tap(2), tap(3)]));
            }
        }
        // Each quarter of a vector has the bytes of its four outputs, and then their words.
        let quarter = |i: usize| (S * (i / 4) + i % 4) as i32;
        let byte = |i: usize| (S * (i / 4 % 4) + i % 4) as i8;
        let (quarters, bytes): ([i32; 16], [i8; 64]) = (std::array::from_fn(quarter), std::array::from_fn(byte));
        // SAFETY: arrays of a vector's size. Rows are inside the padded plane, which has room behind it for a vector; lanes behind the width
        // are not stored. The caller guarantees the rest.
        unsafe {
            let (quarters, bytes) =
                (_mm512_loadu_si512(quarters.as_ptr().cast()), _mm512_loadu_si512(bytes.as_ptr().cast()));
            for row in rows.clone().step_by(TALL) {
                for column in (0..width).step_by(LANES) {
                    let mut sums = [_mm512_setzero_si512(); TALL];
                    #[allow(clippy::needless_range_loop, reason = "the number of words is known when this is compiled")]
                    for w in 0..words {
                        for i in 0..(TALL - 1) * S + K {
                            let line = (row * S + i).min(layout.rows - 1);
                            let from = plane.add(line * layout.pitch + column * S + 4 * w);
                            let near = if S == 1 {
                                _mm512_castsi256_si512(_mm256_loadu_si256(from.cast()))
                            } else {
                                _mm512_loadu_si512(from.cast())
                            };
                            let x = _mm512_shuffle_epi8(_mm512_permutexvar_epi32(quarters, near), bytes);
                            for t in 0..TALL {
                                if i >= t * S && i - t * S < K {
                                    let weight = weights[i - t * S][w];
                                    let (unsigned, signed) = if UNSIGNED { (x, weight) } else { (weight, x) };
                                    sums[t] = _mm512_dpbusd_epi32(sums[t], unsigned, signed);
                                }
                            }
                        }
                    }
                    let first = (1u32 << (width - column).min(LANES)) - 1;
                    for (t, sum) in sums.into_iter().enumerate().take(rows.end - row) {
                        _mm512_mask_storeu_epi32(y.add((row - rows.start + t) * width + column), first as u16, sum);
                    }
                }
            }
        }
    }
}
