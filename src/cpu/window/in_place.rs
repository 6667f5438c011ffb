//! Windows that read the rows of a plane where they are. A vector's load leaves out the lanes that are in the padding, so nothing is copied.
//!
//! ```text
//!   7 output rows of 16 columns, tap by tap:    an input vector is loaded once for all output rows that it is under
//!   a plane of up to 64 positions:              its vectors go on from row to row, and the masks leave out what is beyond a row's ends
//! ```

use super::{Combine, Window};
#[cfg(target_arch = "aarch64")]
use crate::simd::Neon;
use crate::simd::{Lanes, Plain};
#[cfg(target_arch = "x86_64")]
use crate::simd::{Ymm, Zmm};
use crate::window::Planes;
use plimsoll_core::kernel::cpu::window::TALL;

/// The most positions of a plane whose vectors go on from row to row: so many bits has a word.
const WORD: usize = u64::BITS as usize;
/// Vectors of such a plane.
const VECTORS: usize = WORD / 16;
/// The longest line of taps.
const LONGEST_LINE: usize = 7;

/// Vectors that can be loaded under a mask. Those that have the loads have 16 lanes.
pub(super) trait Masked: Lanes {
    /// True if the loads exist.
    const MASKS: bool = false;
    /// The elements from an address on; lanes that are not under the mask are those of `other`.
    ///
    /// # Safety
    /// The CPU must have the implementor's instruction set, and the elements under the mask must be readable.
    unsafe fn load_where(_from: *const f32, _mask: u16, _other: Self) -> Self {
        unreachable!("`MASKS` is false")
    }
    /// The first ones of 16 pairs of elements. The mask has a bit for each element.
    ///
    /// # Safety
    /// As that of `load_where`.
    unsafe fn load_pairs_where(_from: *const f32, _mask: u32, _other: Self) -> Self {
        unreachable!("`MASKS` is false")
    }
}

impl Masked for Plain {}

#[cfg(target_arch = "aarch64")]
impl Masked for Neon {}

#[cfg(target_arch = "x86_64")]
impl Masked for Ymm {}

#[cfg(target_arch = "x86_64")]
impl Masked for Zmm {
    const MASKS: bool = true;
    #[inline(always)]
    unsafe fn load_where(from: *const f32, mask: u16, other: Zmm) -> Zmm {
        use std::arch::x86_64::_mm512_mask_loadu_ps;
        // SAFETY: AVX-512, by the contract of `Masked`; lanes that are masked out are not read.
        unsafe { _mm512_mask_loadu_ps(other.into(), mask, from).into() }
    }
    #[inline(always)]
    unsafe fn load_pairs_where(from: *const f32, mask: u32, other: Zmm) -> Zmm {
        use std::arch::x86_64::{_mm512_mask_loadu_ps, _mm512_permutex2var_ps, _mm512_setr_epi32};
        // SAFETY: as above.
        unsafe {
            let low = _mm512_mask_loadu_ps(other.into(), mask as u16, from);
            let high = _mm512_mask_loadu_ps(other.into(), (mask >> 16) as u16, from.wrapping_add(16));
            let even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
            _mm512_permutex2var_ps(low, even, high).into()
        }
    }
}

/// Slides over planes in place, if there is a kernel for the window. Returns whether there is.
///
/// # Safety
/// As for [`slide`](super::slide), where the CPU has the instruction set of `V`.
#[inline(always)]
pub(super) unsafe fn in_place<V: Masked, C: Combine>(
    window: &Window,
    weights: Option<*const f32>,
    planes: &Planes,
) -> bool {
    let Window { input, output, kernel, strides, dilations, .. } = *window;
    let is_flat = [input[0], output[0], kernel[0]] == [1; 3] && window.pads[0] == 0;
    if !V::MASKS || !is_flat || dilations[1..] != [1; 2] {
        return false;
    }
    // SAFETY: guaranteed by the caller.
    unsafe {
        let is_small = input == output && strides[1..] == [1; 2] && window.output_len() <= WORD;
        if is_small && kernel[2] <= LONGEST_LINE {
            small::<V, C>(window, weights, planes);
            return true;
        }
        if kernel[1] != kernel[2] || strides[1] != strides[2] {
            return false;
        }
        match (kernel[1], strides[1]) {
            (3, 1) => tall::<V, C, 3, 1>(window, weights, planes),
            (3, 2) => tall::<V, C, 3, 2>(window, weights, planes),
            (5, 1) => tall::<V, C, 5, 1>(window, weights, planes),
            (5, 2) => tall::<V, C, 5, 2>(window, weights, planes),
            (7, 1) => tall::<V, C, 7, 1>(window, weights, planes),
            (7, 2) => tall::<V, C, 7, 2>(window, weights, planes),
            _ => return false,
        }
    }
    true
}

/// Ones for the bits of `from..to`, of which there are 64.
#[inline(always)]
fn bits(from: usize, to: usize) -> u64 {
    let below = |end: usize| if end >= 64 { u64::MAX } else { (1 << end) - 1 };
    below(to) & !below(from)
}

/// Slides over planes of few positions, as wide as the input, one step at a time.
///
/// # Safety
/// As for [`in_place`].
#[inline(always)]
unsafe fn small<V: Masked, C: Combine>(window: &Window, weights: Option<*const f32>, planes: &Planes) {
    let Window { input: [_, height, width], kernel: [_, lines, wide], pads: [_, above, before], .. } = *window;
    let (first, end) = (planes.rows.start * width, planes.rows.end * width);
    // The positions whose element under a tap is inside its row.
    let mut inside = [0; LONGEST_LINE];
    for (tap, inside) in inside.iter_mut().enumerate().take(wide) {
        let columns = before.saturating_sub(tap)..(width + before).saturating_sub(tap).min(width);
        let row = bits(columns.start, columns.end.max(columns.start));
        *inside = (0..height).fold(0, |all, at| all | row << (at * width));
    }
    for plane in 0..planes.count {
        let x = planes.x.wrapping_add(plane * planes.x_step);
        let y = planes.y.wrapping_add(plane * planes.y_step);
        let mut weight = weights.map(|weights| weights.wrapping_add(plane * lines * wide));
        // SAFETY: elements under the masks are inside the plane, and the positions are the output's. The caller guarantees the rest.
        unsafe {
            let start = V::splat(C::START);
            let mut sums = [start; VECTORS];
            for line in 0..lines {
                // The rows whose element under the line is inside the plane.
                let rows = above.saturating_sub(line)..(height + above).saturating_sub(line).min(height);
                let rows = bits(rows.start * width, (rows.end * width).max(rows.start * width));
                for (tap, inside) in inside.iter().enumerate().take(wide) {
                    let mask = (inside & rows) >> first;
                    let from = x.wrapping_add(first + line * width + tap).wrapping_sub(above * width + before);
                    let factor = match &mut weight {
                        Some(weight) => {
                            let factor = V::splat(**weight);
                            *weight = weight.add(1);
                            factor
                        }
                        None => V::splat(1.0),
                    };
                    for (v, sum) in sums.iter_mut().enumerate() {
                        let element = V::load_where(from.wrapping_add(16 * v), (mask >> (16 * v)) as u16, start);
                        *sum = C::step(*sum, element, factor);
                    }
                }
            }
            for (v, sum) in sums.into_iter().enumerate() {
                let n = (end - first).saturating_sub(16 * v).min(16);
                sum.store_first(y.wrapping_add(16 * v), n);
            }
        }
    }
}

/// Slides a `K` by `K` window, `S` elements apart, over `TALL` rows at a time.
///
/// # Safety
/// As for [`in_place`].
#[inline(always)]
unsafe fn tall<V: Masked, C: Combine, const K: usize, const S: usize>(
    window: &Window,
    weights: Option<*const f32>,
    planes: &Planes,
) {
    let Window { input: [_, height, width], output: [_, _, columns], pads: [_, above, before], .. } = *window;
    for plane in 0..planes.count {
        let x = planes.x.wrapping_add(plane * planes.x_step);
        let y = planes.y.wrapping_add(plane * planes.y_step);
        let weights = weights.map(|weights| weights.wrapping_add(plane * K * K));
        let mut row = planes.rows.start;
        while row < planes.rows.end {
            let here = TALL.min(planes.rows.end - row);
            // Lines under the rows, of which some are in the padding.
            let first = above.saturating_sub(row * S);
            let end = (height + above).saturating_sub(row * S).min((here - 1) * S + K);
            let line = x.wrapping_add(row * S * width).wrapping_sub(above * width);
            let to = y.wrapping_add((row - planes.rows.start) * columns);
            for column in (0..columns).step_by(16) {
                // SAFETY: elements under the masks are inside the lines, which are inside the plane; stores are inside the output's rows.
                // The caller guarantees the rest.
                unsafe {
                    let start = V::splat(C::START);
                    let mut sums = [start; TALL];
                    for tap in 0..K {
                        let at = column * S + tap;
                        let mask = bits(before.saturating_sub(at), (width + before).saturating_sub(at)) as u32;
                        let mut factors = [V::splat(1.0); K];
                        if let Some(weights) = weights {
                            for (i, factor) in factors.iter_mut().enumerate() {
                                *factor = V::splat(*weights.add(i * K + tap));
                            }
                        }
                        let from = line.wrapping_add(at).wrapping_sub(before);
                        for i in 0..(TALL - 1) * S + K {
                            if i < first || i >= end {
                                continue;
                            }
                            let from = from.wrapping_add(i * width);
                            let element = if S == 1 {
                                V::load_where(from, mask as u16, start)
                            } else {
                                V::load_pairs_where(from, mask, start)
                            };
                            for t in 0..TALL {
                                if i >= t * S && i - t * S < K {
                                    sums[t] = C::step(sums[t], element, factors[i - t * S]);
                                }
                            }
                        }
                    }
                    let n = (columns - column).min(16);
                    for (t, sum) in sums.into_iter().enumerate().take(here) {
                        let to = to.wrapping_add(t * columns + column);
                        if n == 16 { sum.store(to) } else { sum.store_first(to, n) }
                    }
                }
            }
            row += here;
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::simd::Isa;
    use crate::window::{Planes, Slide, Window, slide};

    fn windows() -> impl Iterator<Item = Window> {
        let sizes = [[1usize, 1], [7, 7], [8, 8], [3, 20], [14, 9], [16, 16], [9, 33], [23, 50]];
        let kernels = [[3, 3], [5, 5], [7, 7], [1, 3], [5, 2]];
        let rest = [1, 2].into_iter().flat_map(|stride| (0..4).map(move |pad| (stride, pad)));
        sizes.into_iter().flat_map(move |size| {
            let rest = rest.clone();
            kernels.into_iter().flat_map(move |kernel| {
                rest.clone().filter_map(move |(stride, pad)| {
                    let pads = kernel.map(|len| if pad < len { pad } else { 0 });
                    let fits = |d: usize| Some((size[d] + 2 * pads[d]).checked_sub(kernel[d])? / stride + 1);
                    let deep = |[high, wide]: [usize; 2], depth| [depth, high, wide];
                    Some(Window {
                        input: deep(size, 1),
                        output: deep([fits(0)?, fits(1)?], 1),
                        kernel: deep(kernel, 1),
                        strides: [1, stride, stride],
                        dilations: [1; 3],
                        pads: deep(pads, 0),
                        pads_end: deep(pads, 0),
                    })
                })
            })
        })
    }

    /// Planes of a result, by two pieces of their rows.
    fn slid(isa: Isa, window: &Window, what: Slide, count: usize, (x, x_step): (&[f32], usize)) -> Vec<f32> {
        let (rows, width) = (window.rows(), window.output[2]);
        let mut y = vec![f32::NAN; count * rows * width];
        for rows in [0..rows / 2, rows / 2..rows] {
            let mut space = vec![f32::NAN; window.workspace_bytes() / 4];
            let start = y.as_mut_ptr().wrapping_add(rows.start * width);
            let planes = Planes { count, x: x.as_ptr(), x_step, y: start, y_step: window.output_len(), rows };
            // SAFETY: the buffers have the sizes that the window names.
            unsafe { slide(isa, window, what, planes, &mut space) }
        }
        y
    }

    #[test]
    fn every_instruction_set_slides_alike() {
        // Sums of so few whole numbers are exact, and no other plane's elements are in them.
        let values = |len: usize| (0..len).map(|i| (i * i % 251) as f32 - 125.0).collect::<Vec<_>>();
        for window in windows() {
            for count in [1, 3, 16].into_iter().filter(|&count| count <= window.together()) {
                let x_step = window.input_len() + 5;
                let mut x = values(count * x_step);
                for between in x.chunks_mut(x_step) {
                    between[x_step - 5..].fill(f32::NAN);
                }
                let weights = values(count * window.taps());
                for what in [Slide::Weighted(weights.as_ptr()), Slide::Max] {
                    let run = |isa| slid(isa, &window, what, count, (&x, x_step));
                    let plain = run(Isa::available().next().expect("there is a portable one"));
                    for isa in Isa::available() {
                        assert_eq!(run(isa), plain, "{} {window:?} {what:?} {count}", isa.name());
                    }
                }
            }
        }
    }
}
