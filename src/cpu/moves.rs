//! Moves of elements whose size, not type, matters.

use super::simd;

/// `to[i] = from[i * step]` for elements of `size` bytes, `step` in bytes.
///
/// # Safety
/// Source and destination must be valid for `n` elements each, and apart.
#[inline]
pub unsafe fn gather(size: usize, n: usize, from: *const u8, step: isize, to: *mut u8) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        match size {
            1 => strided::<u8>(n, from, step, to, 1),
            2 => strided::<u16>(n, from, step, to, 2),
            4 => strided::<u32>(n, from, step, to, 4),
            _ => strided::<u64>(n, from, step, to, 8),
        }
    }
}

/// `to[i * step] = from[i]` for elements of `size` bytes, `step` in bytes.
///
/// # Safety
/// Source and destination must be valid for `n` elements each, and apart.
#[inline]
pub unsafe fn scatter(size: usize, n: usize, from: *const u8, to: *mut u8, step: isize) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        match size {
            1 => strided::<u8>(n, from, 1, to, step),
            2 => strided::<u16>(n, from, 2, to, step),
            4 => strided::<u32>(n, from, 4, to, step),
            _ => strided::<u64>(n, from, 8, to, step),
        }
    }
}

/// # Safety
/// As for [`gather`], with steps on both sides.
#[inline(always)]
pub unsafe fn strided<T: Copy>(n: usize, from: *const u8, from_step: isize, to: *mut u8, to_step: isize) {
    let size = size_of::<T>() as isize;
    // SAFETY: guaranteed by the caller.
    unsafe {
        // Short runs are cheaper to move than to call for.
        if from_step == size && to_step == size && n >= 16 {
            to.copy_from_nonoverlapping(from, n * size_of::<T>());
        } else if from_step == 0 && to_step == size {
            let x = from.cast::<T>().read_unaligned();
            for i in 0..n {
                to.cast::<T>().add(i).write_unaligned(x);
            }
        } else {
            for i in 0..n as isize {
                to.offset(i * to_step)
                    .cast::<T>()
                    .write_unaligned(from.offset(i * from_step).cast::<T>().read_unaligned());
            }
        }
    }
}

/// `to[r, i] = from[r, i]` for `rows` rows of `n` elements of `size` bytes; steps are in bytes, from row to row and from element to
/// element, and the destination has no gaps.
///
/// # Safety
/// Source and destination must be valid for `rows * n` elements each, and apart.
pub unsafe fn gather_rows(size: usize, rows: usize, n: usize, from: *const u8, steps: (isize, isize), to: *mut u8) {
    /// # Safety
    /// As above.
    unsafe fn typed<T: Copy>(rows: usize, n: usize, from: *const u8, steps: (isize, isize), to: *mut u8) {
        let (size, to) = (size_of::<T>() as isize, to.cast::<T>());
        for r in 0..rows {
            // SAFETY: guaranteed by the caller.
            unsafe {
                let (from, to) = (from.offset(r as isize * steps.0), to.add(r * n));
                if steps.1 == size {
                    let from = from.cast::<T>();
                    for i in 0..n {
                        *to.add(i) = *from.add(i);
                    }
                } else if steps.1 == 0 {
                    let x = *from.cast::<T>();
                    for i in 0..n {
                        *to.add(i) = x;
                    }
                } else {
                    for i in 0..n {
                        *to.add(i) = *from.offset(i as isize * steps.1).cast::<T>();
                    }
                }
            }
        }
    }
    // SAFETY: guaranteed by the caller.
    unsafe {
        match size {
            1 => typed::<u8>(rows, n, from, steps, to),
            2 => typed::<u16>(rows, n, from, steps, to),
            4 => typed::<u32>(rows, n, from, steps, to),
            _ => typed::<u64>(rows, n, from, steps, to),
        }
    }
}

/// `to[i] = start + i * step`.
///
/// # Safety
/// `to` must be writable for `n` elements.
pub unsafe fn iota(n: usize, start: isize, step: isize, to: *mut i64) {
    for i in 0..n {
        // SAFETY: `i < n`.
        unsafe { to.add(i).write_unaligned((start + i as isize * step) as i64) }
    }
}

/// `to[c, r] = from[r, c]` for elements of `size` bytes, where the source's columns and the destination's rows are dense; each
/// pointer comes with the other step, in bytes.
///
/// # Safety
/// Source and destination must be valid for `rows * cols` elements each, and apart.
pub unsafe fn transpose(
    size: usize,
    rows: usize,
    cols: usize,
    (from, from_step): (*const u8, isize),
    (to, to_step): (*mut u8, isize),
) {
    const TILE: usize = 32;
    for r in (0..rows).step_by(TILE) {
        for c in (0..cols).step_by(TILE) {
            let (rn, cn) = (TILE.min(rows - r), TILE.min(cols - c));
            // SAFETY: a tile of the matrix.
            unsafe {
                let from = from.offset(r as isize * from_step).add(c * size);
                let to = to.offset(c as isize * to_step).add(r * size);
                if size == 4 && from_step % 4 == 0 && to_step % 4 == 0 && to_step > 0 {
                    simd::transpose(rn, cn, from.cast(), from_step / 4, to.cast(), to_step as usize / 4);
                } else {
                    for c in 0..cn as isize {
                        let (from, to) = (from.offset(c * size as isize), to.offset(c * to_step));
                        gather(size, rn, from, from_step, to);
                    }
                }
            }
        }
    }
}

/// `dst[r * dst_steps.0 + c * dst_steps.1] = src[r * src_steps.0 + c * src_steps.1]` for `r < rows`, `c < cols`: copies, transposes,
/// gathers and spreads a block of any 4-byte elements. Fast when one of the two dimensions is contiguous on each side.
///
/// # Safety
/// `src` must be readable and `dst` writable at every element named above, and the two must not overlap.
pub unsafe fn copy_2d(
    rows: usize,
    cols: usize,
    src: *const f32,
    src_steps: (isize, isize),
    dst: *mut f32,
    dst_steps: (isize, isize),
) {
    // Rows and columns may change names.
    if dst_steps.1 != 1 && dst_steps.0 == 1 {
        let swap = |steps: (isize, isize)| (steps.1, steps.0);
        // SAFETY: the same elements.
        return unsafe { copy_2d(cols, rows, src, swap(src_steps), dst, swap(dst_steps)) };
    }
    // SAFETY: guaranteed by the caller; every index is below `rows` and `cols`.
    unsafe {
        if src_steps.1 == 1 && dst_steps.1 == 1 {
            for r in 0..rows as isize {
                dst.offset(r * dst_steps.0).copy_from_nonoverlapping(src.offset(r * src_steps.0), cols);
            }
        } else if src_steps.0 == 1 && dst_steps.1 == 1 && dst_steps.0 >= 0 {
            // Blocks of whole cache lines on both sides.
            const SIDE: usize = 16;
            for c in (0..cols).step_by(SIDE) {
                for r in (0..rows).step_by(SIDE) {
                    let from = src.offset(c as isize * src_steps.1).add(r);
                    let to = dst.offset(r as isize * dst_steps.0).add(c);
                    let (height, width) = (SIDE.min(cols - c), SIDE.min(rows - r));
                    simd::transpose(height, width, from, src_steps.1, to, dst_steps.0 as usize);
                }
            }
        } else {
            for r in 0..rows as isize {
                let (from, to) = (src.offset(r * src_steps.0), dst.offset(r * dst_steps.0));
                for c in 0..cols as isize {
                    *to.offset(c * dst_steps.1) = *from.offset(c * src_steps.1);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_of_any_strides() {
        for (rows, cols) in [(0, 3), (1, 1), (3, 5), (4, 4), (17, 33), (64, 20)] {
            let (r, c) = (rows as isize, cols as isize);
            let steps = [(c, 1), (1, r), (c + 2, 1), (1, r + 1), (2 * c, 2), (0, 1), (-c, 1), (1, -r)];
            for src_steps in steps {
                for dst_steps in &steps[..5] {
                    let span = |steps: (isize, isize)| {
                        let (a, b) = ((r - 1).max(0) * steps.0, (c - 1).max(0) * steps.1);
                        (a.min(0) + b.min(0), a.max(0) + b.max(0))
                    };
                    let (low, high) = span(src_steps);
                    let src: Vec<f32> = (low..=high).map(|i| i as f32).collect();
                    let mut dst = vec![f32::NAN; span(*dst_steps).1 as usize + 1];
                    // SAFETY: the buffers reach from the lowest to the highest element that the strides name.
                    unsafe {
                        copy_2d(rows, cols, src.as_ptr().offset(-low), src_steps, dst.as_mut_ptr(), *dst_steps);
                    }
                    for i in 0..r {
                        for j in 0..c {
                            let got = dst[(i * dst_steps.0 + j * dst_steps.1) as usize];
                            assert_eq!(got, (i * src_steps.0 + j * src_steps.1) as f32);
                        }
                    }
                }
            }
        }
    }
}
