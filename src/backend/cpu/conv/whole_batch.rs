//! A convolution as one product over all images, both of whose operands are cut out of memory when they are needed:
//!
//! ```text
//! Y[o, (image, position)] = W[o, (channel, tap)] * patches[(channel, tap), (image, position)]
//! ```
//!
//! It suits weights that are computed, and so cannot be packed ahead, at few positions: the gradients of filters, whose windows are as large
//! as images. With one output channel in a group the product is a few dot products.

use super::{Image, Share, Tensors};
use crate::backend::cpu::gemm::{Gemm, Matrix, Out, Produce, Tile, View, pack_panel};
use crate::backend::cpu::moves;
use crate::backend::cpu::simd::{Isa, Lanes, per_isa, transpose};
use crate::kernel::cpu::conv::Conv;
use crate::kernel::cpu::gemm::PANEL_COLS;
use crate::kernel::cpu::window::Window;
use std::ops::Range;

/// Elements of `k` that are collected per lane before they are transposed into a panel.
const RUN: usize = 64;

impl Conv {
    /// # Safety
    /// As for [`Conv::run`].
    pub(super) unsafe fn whole_batch(
        &self,
        Share { isa, parts, task }: Share,
        Tensors { x, weights, weight_steps, y, .. }: &Tensors,
        workspace: &mut [f32],
        epilogue: &mut dyn FnMut(usize, Tile),
    ) {
        let grid = self.split(parts).1;
        let (group, (rows, cols)) = (task / grid.len(), grid.get(task % grid.len()));
        let (m, n, k) = self.product();
        let (inputs, positions) = (self.in_channels / self.groups, self.window.output_len());
        let first = group * m;
        let window = lined_up(&self.window);
        let image = Image { ptr: x.ptr.wrapping_add(group * inputs * x.channel_stride), ..*x };
        let patches = Patches { window: &window, image, positions };
        let filters = Filters {
            ptr: weights.wrapping_offset(first as isize * weight_steps[0]),
            steps: *weight_steps,
            taps: window.taps(),
        };
        let mut relay = |tile: Tile| {
            // The columns of a tile are the positions of several images.
            let mut col = tile.cols.start;
            while col < tile.cols.end {
                let (image, position) = (col / positions, col % positions);
                let count = (positions - position).min(tile.cols.end - col);
                let from = tile.ptr.wrapping_add(col - tile.cols.start);
                let channels = first + tile.rows.start..first + tile.rows.end;
                let (ptr, stride) = match y {
                    Some(y) => {
                        let at = image * y.batch_stride + channels.start * y.channel_stride + position;
                        (y.ptr.wrapping_add(at), y.channel_stride)
                    }
                    None => (from, tile.stride),
                };
                if y.is_some() {
                    let (from_steps, to_steps) = ((tile.stride as isize, 1), (stride as isize, 1));
                    // SAFETY: a part of the tile, and its place in the result.
                    unsafe { moves::copy_2d(channels.len(), count, from, from_steps, ptr, to_steps) }
                }
                epilogue(image, Tile { rows: channels, cols: position..position + count, ptr, stride });
                col += count;
            }
        };
        if m == 1 {
            for start in cols.clone().step_by(PANEL_COLS) {
                let cols = start..cols.end.min(start + PANEL_COLS);
                let sums = &mut [0.0; PANEL_COLS];
                // SAFETY: guaranteed by the caller.
                unsafe { dots(isa, &patches, &filters, inputs, cols.clone(), sums) }
                relay(Tile { rows: 0..1, stride: cols.len(), cols, ptr: sums.as_mut_ptr() });
            }
            return;
        }
        let gemm = Gemm {
            m,
            n,
            k,
            a: Matrix::Produced(&filters),
            b: Matrix::Produced(&patches),
            c: Out::Epilogue,
            accumulate: false,
        };
        // SAFETY: guaranteed by the caller for this group.
        unsafe { gemm.run(isa, rows, cols, workspace, &mut relay) }
    }
}

/// The same window as one row, if it covers the image and its taps follow one another in memory.
fn lined_up(window: &Window) -> Window {
    let covers = window.kernel == window.input && window.output_len() == 1;
    if !covers || window.dilations != [1; 3] || window.pads != [0; 3] {
        return *window;
    }
    let line = [1, 1, window.taps()];
    Window { input: line, kernel: line, strides: [1; 3], ..*window }
}

/// Weights in memory whose taps follow one another.
struct Filters {
    ptr: *const f32,
    /// Elements from one output channel to the next, and from one input channel to the next.
    steps: [isize; 2],
    taps: usize,
}

// SAFETY: weights that the caller of `Conv::run` vouches for, and that are only read.
unsafe impl Sync for Filters {}

impl Produce for Filters {
    unsafe fn panel(&self, _: Isa, k: Range<usize>, lanes: Range<usize>, step: usize, panel: *mut f32) {
        let mut at = k.start;
        while at < k.end {
            let (channel, tap) = (at / self.taps, at % self.taps);
            let count = (self.taps - tap).min(k.end - at);
            let from = lanes.start as isize * self.steps[0] + channel as isize * self.steps[1] + tap as isize;
            let view = View { ptr: self.ptr.wrapping_offset(from), rs: self.steps[0], cs: 1 };
            // SAFETY: guaranteed by the caller.
            unsafe { pack_panel(view, lanes.len(), count, panel.add((at - k.start) * step), step) }
            at += count;
        }
        if lanes.len() < step {
            for p in 0..k.len() {
                // SAFETY: as above.
                unsafe { panel.add(p * step + lanes.len()).write_bytes(0, step - lanes.len()) }
            }
        }
    }
}

/// The matrix of the patches of all images: row `(channel, tap)`, column `(image, position)`.
struct Patches<'a> {
    window: &'a Window,
    image: Image<*const f32>,
    positions: usize,
}

/// Taps of one row of a window that follow one another: those before `inside` and behind it are padding.
struct Piece {
    /// Numbers of the elements among those asked for.
    inside: Range<usize>,
    /// The end of the piece, padding included.
    end: usize,
    /// The first element inside, and how far apart the elements are.
    from: *const f32,
    step: usize,
}

impl Patches<'_> {
    /// Calls `f` with the pieces of some elements of a column, in order.
    #[inline(always)]
    fn pieces(&self, k: Range<usize>, column: usize, mut f: impl FnMut(Piece)) {
        let w = self.window;
        let [depth, height, width] = w.kernel;
        let (image, at) = (column / self.positions, column % self.positions);
        let at = [at / w.output[2] / w.output[1], at / w.output[2] % w.output[1], at % w.output[2]];
        let origin = |dim: usize| (at[dim] * w.strides[dim]) as isize - w.pads[dim] as isize;
        let origin = [origin(0), origin(1), origin(2)];
        let (mut channel, tap) = (k.start / w.taps(), k.start % w.taps());
        let [mut z, mut y, mut x] = [tap / width / height, tap / width % height, tap % width];
        let base = self.image.ptr.wrapping_add(image * self.image.batch_stride);
        let step = w.dilations[2];
        let mut done = 0;
        while done < k.len() {
            let count = (width - x).min(k.len() - done);
            let row = [origin[0] + (z * w.dilations[0]) as isize, origin[1] + (y * w.dilations[1]) as isize];
            let is_inside = (0..2).all(|dim| (0..w.input[dim] as isize).contains(&row[dim]));
            let first = origin[2] + (x * step) as isize;
            // The taps whose columns are inside the image.
            let until = |limit: isize| ((limit - first).max(0) as usize).div_ceil(step).min(count);
            let inside = if is_inside { until(0)..until(w.input[2] as isize) } else { 0..0 };
            let line = (row[0] * w.input[1] as isize + row[1]) * w.input[2] as isize;
            let column = first + (inside.start * step) as isize;
            let from = base.wrapping_add(channel * self.image.channel_stride).wrapping_offset(line + column);
            f(Piece { inside: done + inside.start..done + inside.end, end: done + count, from, step });
            done += count;
            x = 0;
            y += 1;
            if y == height {
                (y, z) = (0, z + 1);
                if z == depth {
                    (z, channel) = (0, channel + 1);
                }
            }
        }
    }
}

// SAFETY: images that the caller of `Conv::run` vouches for, and that are only read.
unsafe impl Sync for Patches<'_> {}

impl Produce for Patches<'_> {
    unsafe fn panel(&self, _: Isa, k: Range<usize>, lanes: Range<usize>, step: usize, panel: *mut f32) {
        // Lanes that are missing stay zero.
        let mut lines = [0f32; RUN * PANEL_COLS];
        for start in k.clone().step_by(RUN) {
            let k_here = start..k.end.min(start + RUN);
            for (line, column) in lines.chunks_exact_mut(RUN).zip(lanes.clone()) {
                let mut filled = 0;
                self.pieces(k_here.clone(), column, |Piece { inside, end, from, step }| {
                    line[filled..inside.start.max(filled)].fill(0.0);
                    line[inside.end.max(filled)..end].fill(0.0);
                    let to = &mut line[inside];
                    for (i, to) in to.iter_mut().enumerate() {
                        // SAFETY: inside the image, which the caller of `Conv::run` vouches for.
                        *to = unsafe { *from.add(i * step) };
                    }
                    filled = end;
                });
            }
            let to = panel.wrapping_add((start - k.start) * step);
            // SAFETY: guaranteed by the caller; `step` lines are at most `PANEL_COLS`.
            unsafe { transpose(step, k_here.len(), lines.as_ptr(), RUN as isize, to, step) }
        }
    }
}

per_isa! {
    /// The products of one row of filters with some columns of patches.
    ///
    /// # Safety
    /// The operands must be readable.
    unsafe fn dots(patches: &Patches, filters: &Filters, channels: usize, columns: Range<usize>, sums: &mut [f32]) => dots_by
}

/// # Safety
/// As for [`dots`], where the CPU has the instruction set of `L`.
#[inline(always)]
unsafe fn dots_by<L: Lanes>(
    patches: &Patches,
    filters: &Filters,
    channels: usize,
    columns: Range<usize>,
    sums: &mut [f32],
) {
    let taps = filters.taps;
    for (sum, column) in sums.iter_mut().zip(columns) {
        // SAFETY: pieces are inside the images, and filters have an element for each of their elements.
        unsafe {
            let (mut lanes, mut single) = (L::splat(0.0), 0.0);
            for channel in 0..channels {
                let filter = filters.ptr.wrapping_offset(channel as isize * filters.steps[1]);
                patches.pieces(channel * taps..(channel + 1) * taps, column, |Piece { inside, from, step, .. }| {
                    let (weights, count) = (filter.add(inside.start), inside.len());
                    if step > 1 {
                        for i in 0..count {
                            single += *weights.add(i) * *from.add(i * step);
                        }
                        return;
                    }
                    let mut i = 0;
                    while i + L::LEN <= count {
                        lanes = L::load(weights.add(i)).mul_add(L::load(from.add(i)), lanes);
                        i += L::LEN;
                    }
                    if i < count {
                        let (a, b) = (L::load_first(weights.add(i), count - i), L::load_first(from.add(i), count - i));
                        lanes = a.mul_add(b, lanes);
                    }
                });
            }
            let mut parts = [0f32; 16];
            lanes.store(parts.as_mut_ptr());
            let mut half = L::LEN / 2;
            while half > 0 {
                for i in 0..half {
                    parts[i] += parts[i + half];
                }
                half /= 2;
            }
            *sum = single + parts[0];
        }
    }
}
