//! A convolution as one product over all images, both of whose operands are cut out of memory when they are needed:
//!
//! ```text
//! Y[o, (image, position)] = W[o, (channel, tap)] * patches[(channel, tap), (image, position)]
//! ```
//!
//! It suits weights that are computed, and so cannot be packed ahead, at few positions: the gradients of filters, whose windows are as large
//! as images, and those of small images, which are convolutions by flipped filters. With one output channel in a group the product is
//! a few dot products: of single filters if lines are long, else of several channels side by side. Where there are enough images, the columns of a panel are one position of several of them: these images are
//! transposed, element by element side by side, and all positions cut their panels out of that.

use super::{Image, Share, Tensors, split};
use crate::gemm::{Elements, Gemm, Matrix, Out, Produce, Tile, View, pack_panel, pack_panel_by, pack_reversed};
use crate::moves;
use crate::simd::{Isa, Lanes, per_isa, transpose, turn};
use plimsoll_core::kernel::cpu::conv::{Conv, LANES};
use plimsoll_core::kernel::cpu::gemm::PANEL_COLS;
use plimsoll_core::kernel::cpu::window::Window;
use std::cell::Cell;
use std::ops::Range;

/// Elements of `k` that are collected per lane before they are transposed into a panel.
const RUN: usize = 64;

/// Channels of which flipped filters are packed together.
const CHANNELS: usize = 4;

/// Positions of an image that an epilogue gets together where the result is not stored before.
const STRETCH: usize = 32;

/// # Safety
/// As for [`Compute::run`](super::Compute::run).
pub(super) unsafe fn compute(
    conv: &Conv,
    Share { isa, parts, task }: Share,
    Tensors { x, weights, weight_steps, flipped, y, .. }: &Tensors,
    workspace: &mut [f32],
    epilogue: &mut dyn FnMut(usize, Tile),
) {
    let grid = split(conv, parts).1;
    let (group, (rows, cols)) = (task / grid.len(), grid.get(task % grid.len()));
    let (m, n, k) = conv.product();
    let (inputs, positions) = (conv.in_channels / conv.groups, conv.window.output_len());
    let first = group * m;
    let window = lined_up(&conv.window);
    let image = Image { ptr: x.ptr.wrapping_add(group * inputs * x.channel_stride), ..*x };
    let patches = Patches { window: &window, image, positions };
    // A group is its output channels, or those of the convolution whose gradient this is: its input channels.
    let [lines, step] = if *flipped { [inputs, 1] } else { [m, 0] };
    let filters = Filters {
        ptr: weights.wrapping_offset((group * lines) as isize * weight_steps[step]),
        steps: *weight_steps,
        taps: window.taps(),
        flipped: *flipped,
    };
    let out = Results { y: *y, first, positions };
    if m == 1 && !flipped {
        let lines = conv.lines_by_lane();
        for start in cols.clone().step_by(PANEL_COLS) {
            let cols = start..cols.end.min(start + PANEL_COLS);
            let sums = &mut [0.0; PANEL_COLS];
            // SAFETY: guaranteed by the caller; the workspace has room for the lines.
            unsafe {
                match lines {
                    0 => dots(isa, &patches, &filters, inputs, cols.clone(), sums),
                    _ => dots_by_lane(isa, &patches, &filters, (inputs, lines), cols.clone(), workspace, sums),
                }
            }
            let tile = Tile { rows: 0..1, stride: cols.len(), cols, ptr: sums.as_mut_ptr() };
            // SAFETY: as above.
            unsafe { out.by_image(&tile, epilogue) }
        }
        return;
    }
    let lanes_are_images = conv.lanes_are_images();
    let (space, workspace) = workspace.split_at_mut(conv.transposed_len());
    let transposed = Transposed { conv, patches: &patches, space: space.as_mut_ptr(), holds: Cell::new(None) };
    let b: &dyn Produce = if lanes_are_images { &transposed } else { &patches };
    let (a, b) = (Matrix::Produced(&filters), Matrix::Produced(b));
    let gemm = Gemm { m, n, k, elements: Elements::Floats, a, b, c: Out::Epilogue, accumulate: false };
    // SAFETY: guaranteed by the caller for this group.
    unsafe {
        gemm.run(isa, rows, cols, workspace, &mut |tile| {
            if lanes_are_images {
                out.by_lane(&tile, conv.batch, epilogue);
            } else {
                out.by_image(&tile, epilogue);
            }
        });
    }
}

/// Where the tiles of the product go.
struct Results {
    /// The result; `None` if the epilogue stores it.
    y: Option<Image<*mut f32>>,
    /// The first output channel.
    first: usize,
    positions: usize,
}

impl Results {
    /// Stores a tile whose columns are `(image, position)`, and calls the epilogue.
    ///
    /// # Safety
    /// The result must be writable there.
    unsafe fn by_image(&self, tile: &Tile, epilogue: &mut dyn FnMut(usize, Tile)) {
        let mut col = tile.cols.start;
        while col < tile.cols.end {
            let (image, position) = (col / self.positions, col % self.positions);
            let count = (self.positions - position).min(tile.cols.end - col);
            let from = tile.ptr.wrapping_add(col - tile.cols.start);
            let rows = self.first + tile.rows.start..self.first + tile.rows.end;
            let (ptr, stride) = match self.y {
                Some(y) => {
                    let at = image * y.batch_stride + rows.start * y.channel_stride + position;
                    (y.ptr.wrapping_add(at), y.channel_stride)
                }
                None => (from, tile.stride),
            };
            if self.y.is_some() {
                let (from_steps, to_steps) = ((tile.stride as isize, 1), (stride as isize, 1));
                // SAFETY: a part of the tile, and its place in the result.
                unsafe { moves::copy_2d(rows.len(), count, from, from_steps, ptr, to_steps) }
            }
            epilogue(image, Tile { rows, cols: position..position + count, ptr, stride });
            col += count;
        }
    }

    /// As [`by_image`](Self::by_image), where the columns are `(images / LANES, position, image)`.
    ///
    /// # Safety
    /// As for [`by_image`](Self::by_image).
    unsafe fn by_lane(&self, tile: &Tile, batch: usize, epilogue: &mut dyn FnMut(usize, Tile)) {
        let mut col = tile.cols.start;
        while col < tile.cols.end {
            let (block, position) = (col / LANES / self.positions, col / LANES % self.positions);
            let images = block * LANES..batch.min((block + 1) * LANES);
            let count = (self.positions - position).min((tile.cols.end - col) / LANES).min(STRETCH);
            let cols = position..position + count;
            let from = tile.ptr.wrapping_add(col - tile.cols.start);
            let mut stretch = [0f32; LANES * STRETCH];
            for row in 0..tile.rows.len() {
                let channel = self.first + tile.rows.start + row;
                let (ptr, step) = match self.y {
                    Some(y) => {
                        let at = images.start * y.batch_stride + channel * y.channel_stride + position;
                        (y.ptr.wrapping_add(at), y.batch_stride)
                    }
                    None => (stretch.as_mut_ptr(), STRETCH),
                };
                // SAFETY: a row of the tile, and its place in the result or on the stack.
                unsafe {
                    let from = from.wrapping_add(row * tile.stride);
                    if step == 1 {
                        ptr.copy_from_nonoverlapping(from, images.len());
                    } else {
                        transpose(count, images.len(), from, LANES as isize, ptr, step);
                    }
                }
                if self.y.is_none() {
                    for (lane, image) in images.clone().enumerate() {
                        let (rows, ptr) = (channel..channel + 1, ptr.wrapping_add(lane * STRETCH));
                        epilogue(image, Tile { rows, cols: cols.clone(), ptr, stride: STRETCH });
                    }
                }
            }
            if let Some(y) = self.y {
                let rows = self.first + tile.rows.start..self.first + tile.rows.end;
                for image in images {
                    let at = image * y.batch_stride + rows.start * y.channel_stride + position;
                    let (ptr, stride) = (y.ptr.wrapping_add(at), y.channel_stride);
                    epilogue(image, Tile { rows: rows.clone(), cols: cols.clone(), ptr, stride });
                }
            }
            col += count * LANES;
        }
    }
}

/// The same window as one row, if it covers the image and its taps follow one another in memory.
fn lined_up(window: &Window) -> Window {
    if !window.covers() {
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
    /// True if the last tap is the first in memory.
    flipped: bool,
}

// SAFETY: weights that the caller of `Conv::run` vouches for, and that are only read.
unsafe impl Sync for Filters {}

impl Produce for Filters {
    unsafe fn panel(&self, isa: Isa, k: Range<usize>, lanes: Range<usize>, step: usize, panel: *mut f32) {
        let Filters { ptr, steps, taps, flipped } = *self;
        // Channels that follow one another are packed at once.
        let run = if !flipped && steps[1] == taps as isize { usize::MAX } else { taps };
        let mut at = k.start;
        while at < k.end {
            let (channel, tap) = (at / taps, at % taps);
            let count = (run - tap).min(k.end - at);
            let to = panel.wrapping_add((at - k.start) * step);
            let filter = ptr.wrapping_offset(lanes.start as isize * steps[0] + channel as isize * steps[1]);
            let view = |tap: usize| View { ptr: filter.wrapping_add(tap), rs: steps[0], cs: 1 };
            // SAFETY: guaranteed by the caller.
            unsafe {
                if flipped {
                    pack_reversed(view(taps - tap - count), lanes.len(), count, to, step);
                } else {
                    pack_panel(isa, view(tap), lanes.len(), count, to, step);
                }
            }
            at += count;
        }
        if lanes.len() < step {
            for p in 0..k.len() {
                // SAFETY: as above.
                unsafe { panel.add(p * step + lanes.len()).write_bytes(0, step - lanes.len()) }
            }
        }
    }

    fn near(&self) -> usize {
        // A channel has its filters side by side if those of the channels that they belong to were exchanged.
        if self.flipped { CHANNELS * self.taps } else { usize::MAX }
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
    /// The channel, and the first element inside, in its plane.
    channel: usize,
    first: isize,
    /// How far apart the elements are.
    step: usize,
}

impl Patches<'_> {
    /// The element of an image at which a piece starts.
    fn at(&self, image: usize, piece: &Piece) -> *const f32 {
        let plane = image * self.image.batch_stride + piece.channel * self.image.channel_stride;
        self.image.ptr.wrapping_add(plane).wrapping_offset(piece.first)
    }

    /// Calls `f` with the pieces of some elements of the columns of a position, in order.
    #[inline(always)]
    fn pieces(&self, k: Range<usize>, at: usize, mut f: impl FnMut(Piece)) {
        let w = self.window;
        let [depth, height, width] = w.kernel;
        let at = [at / w.output[2] / w.output[1], at / w.output[2] % w.output[1], at % w.output[2]];
        let origin = |dim: usize| (at[dim] * w.strides[dim]) as isize - w.pads[dim] as isize;
        let origin = [origin(0), origin(1), origin(2)];
        let (mut channel, tap) = (k.start / w.taps(), k.start % w.taps());
        let [mut z, mut y, mut x] = [tap / width / height, tap / width % height, tap % width];
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
            let first = line + first + (inside.start * step) as isize;
            f(Piece { inside: done + inside.start..done + inside.end, end: done + count, channel, first, step });
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
    unsafe fn panel(&self, isa: Isa, k: Range<usize>, lanes: Range<usize>, step: usize, panel: *mut f32) {
        // Lanes that are missing stay zero.
        let mut lines = [0f32; RUN * PANEL_COLS];
        for start in k.clone().step_by(RUN) {
            let k_here = start..k.end.min(start + RUN);
            for (line, column) in lines.chunks_exact_mut(RUN).zip(lanes.clone()) {
                let (image, position, mut filled) = (column / self.positions, column % self.positions, 0);
                self.pieces(k_here.clone(), position, |piece| {
                    let from = self.at(image, &piece);
                    let Piece { inside, end, step, .. } = piece;
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
            unsafe { turn(isa, step, k_here.len(), lines.as_ptr(), RUN as isize, to, step) }
        }
    }
}

/// The same matrix where a panel is one position of [`LANES`] images.
struct Transposed<'a> {
    conv: &'a Conv,
    patches: &'a Patches<'a>,
    /// Room for [`Conv::transposed_len`] floats: rows of the images of a block, element by element, and within an element image by image.
    space: *mut f32,
    /// The block of images and the first element of `k` whose rows are there.
    holds: Cell<Option<(usize, usize)>>,
}

// SAFETY: the space and the note on it are those of one task.
unsafe impl Sync for Transposed<'_> {}

impl Transposed<'_> {
    /// Turns some rows of the images of a block, which are counted over all channels.
    ///
    /// # Safety
    /// The images must be readable, and the space writable.
    unsafe fn turn(&self, isa: Isa, block: usize, rows: Range<usize>) {
        let (Patches { window, image, .. }, height) = (self.patches, self.patches.window.input[1]);
        let width = window.input[2];
        let images = block * LANES..self.conv.batch.min((block + 1) * LANES);
        let mut row = rows.start;
        while row < rows.end {
            let (channel, line) = (row / height, row % height);
            let count = (height - line).min(rows.end - row);
            let at = images.start * image.batch_stride + channel * image.channel_stride + line * width;
            let view = View { ptr: image.ptr.wrapping_add(at), rs: image.batch_stride as isize, cs: 1 };
            // SAFETY: rows of the images, and their place in the space.
            unsafe {
                let to = self.space.add((row - rows.start) * width * LANES);
                if images.len() < LANES {
                    to.write_bytes(0, count * width * LANES);
                }
                pack_panel(isa, view, images.len(), count * width, to, LANES);
            }
            row += count;
        }
    }
}

impl Produce for Transposed<'_> {
    unsafe fn panel(&self, isa: Isa, k: Range<usize>, lanes: Range<usize>, step: usize, panel: *mut f32) {
        assert!(lanes.len() == LANES && step == LANES && lanes.start.is_multiple_of(LANES), "a panel is one position");
        let (window, positions) = (self.patches.window, self.patches.positions);
        let (block, position) = (lanes.start / LANES / positions, lanes.start / LANES % positions);
        if self.conv.window.covers() {
            let images = block * LANES..self.conv.batch.min((block + 1) * LANES);
            self.patches.pieces(k, position, |piece| {
                let view = View {
                    ptr: self.patches.at(images.start, &piece),
                    rs: self.patches.image.batch_stride as isize,
                    cs: 1,
                };
                // SAFETY: guaranteed by the caller.
                unsafe {
                    let to = panel.add(piece.inside.start * LANES);
                    if images.len() < LANES {
                        to.write_bytes(0, piece.inside.len() * LANES);
                    }
                    pack_panel(isa, view, images.len(), piece.inside.len(), to, LANES);
                }
            });
            return;
        }
        let rows = self.conv.rows_read(&k);
        // SAFETY: the rows have room in the space, pieces lie in them, and the caller guarantees the panel.
        unsafe {
            if self.holds.replace(Some((block, k.start))) != Some((block, k.start)) {
                self.turn(isa, block, rows.clone());
            }
            let skipped = (rows.start * window.input[2]) as isize;
            let mut filled = 0;
            self.patches.pieces(k, position, |Piece { inside, end, channel, first, step }| {
                let zeros = |from: usize, to: usize| {
                    if from < to {
                        panel.add(from * LANES).write_bytes(0, (to - from) * LANES);
                    }
                };
                zeros(filled, inside.start);
                let at = (channel * window.input[1] * window.input[2]) as isize + first - skipped;
                let from = self.space.wrapping_offset(at * LANES as isize).cast::<[f32; LANES]>();
                let to = panel.add(inside.start * LANES).cast::<[f32; LANES]>();
                if step == 1 {
                    to.copy_from_nonoverlapping(from, inside.len());
                } else {
                    for i in 0..inside.len() {
                        to.add(i).write_unaligned(from.add(i * step).read_unaligned());
                    }
                }
                zeros(inside.end.max(filled), end);
                filled = end;
            });
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
                let (image, position) = (column / patches.positions, column % patches.positions);
                patches.pieces(channel * taps..(channel + 1) * taps, position, |piece| {
                    let (from, Piece { inside, step, .. }) = (patches.at(image, &piece), piece);
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
            let mut parts = [0f32; LANES];
            lanes.store(parts.as_mut_ptr());
            *sum = single + total(&mut parts[..L::LEN]);
        }
    }
}

/// The sum of a power of two of numbers, which are overwritten.
#[inline(always)]
fn total(mut parts: &mut [f32]) -> f32 {
    while parts.len() > 1 {
        let (left, right) = parts.split_at_mut(parts.len() / 2);
        left.iter_mut().zip(right).for_each(|(a, b)| *a += *b);
        parts = left;
    }
    parts[0]
}

per_isa! {
    /// As [`dots`], with channels as lanes: some lines of the filters, and the rows of the image under them, are transposed together, so that
    /// short lines fill the vectors, too. `channels` and `lines` are the numbers of both.
    ///
    /// # Safety
    /// As for [`dots`]; the patches must be those of one image, and the space have room for as many lines.
    unsafe fn dots_by_lane(
        patches: &Patches,
        filters: &Filters,
        channels_lines: (usize, usize),
        columns: Range<usize>,
        space: &mut [f32],
        sums: &mut [f32]
    ) => dots_by_lane_of
}

/// # Safety
/// As for [`dots_by_lane`], where the CPU has the instruction set of `L`.
#[inline(always)]
unsafe fn dots_by_lane_of<L: Lanes>(
    Patches { window, image, .. }: &Patches,
    filters: &Filters,
    (channels, lines): (usize, usize),
    columns: Range<usize>,
    space: &mut [f32],
    sums: &mut [f32],
) {
    let Window { kernel: [_, height, width], input: [_, rows, row_len], dilations, strides, pads, .. } = **window;
    let (filter_lanes, row_lanes) = space.split_at_mut(lines * width * LANES);
    for channel in (0..channels).step_by(LANES) {
        for first in (0..height).step_by(lines) {
            let lines = lines.min(height - first);
            let under = window.rows_under(first..first + lines);
            let filter = filters.ptr.wrapping_offset(channel as isize * filters.steps[1]).wrapping_add(first * width);
            let plane = image.ptr.wrapping_add(channel * image.channel_stride + under.start * row_len);
            let count = LANES.min(channels - channel);
            // SAFETY: channels and lines that there are, and room for them.
            unsafe {
                turn_lanes::<L>(filter, filters.steps[1], count, &mut filter_lanes[..lines * width * LANES]);
                turn_lanes::<L>(
                    plane,
                    image.channel_stride as isize,
                    count,
                    &mut row_lanes[..under.len() * row_len * LANES],
                );
            }
            for (sum, column) in sums.iter_mut().zip(columns.clone()) {
                let (y, x) = (column / window.output[2] * strides[1], column % window.output[2] * strides[2]);
                // The taps that are inside the image.
                let start = pads[2].saturating_sub(x).div_ceil(dilations[2]);
                let end = (row_len + pads[2]).saturating_sub(x).div_ceil(dilations[2]).min(width);
                // SAFETY: what is read is inside the lanes; the caller vouches for the instruction set.
                unsafe {
                    // Two sums hide the time that an addition takes.
                    let mut even = [L::splat(0.0); LANES / 8];
                    let mut odd = even;
                    for line in 0..lines {
                        let row = (y + (first + line) * dilations[1]).wrapping_sub(pads[1]);
                        if row >= rows || start >= end {
                            continue;
                        }
                        let at = (row - under.start) * row_len + x + start * dilations[2] - pads[2];
                        let mut from = row_lanes.as_ptr().add(at * LANES);
                        let mut tap = filter_lanes.as_ptr().add((line * width + start) * LANES);
                        let step = dilations[2] * LANES;
                        for _ in 0..(end - start) / 2 {
                            add_product(&mut even, tap, from);
                            add_product(&mut odd, tap.add(LANES), from.add(step));
                            (tap, from) = (tap.add(2 * LANES), from.wrapping_add(2 * step));
                        }
                        if (end - start) % 2 == 1 {
                            add_product(&mut even, tap, from);
                        }
                    }
                    let mut parts = [0f32; LANES];
                    for i in 0..LANES / L::LEN {
                        even[i].add(odd[i]).store(parts.as_mut_ptr().add(i * L::LEN));
                    }
                    *sum += total(&mut parts);
                }
            }
        }
    }
}

/// Adds [`LANES`] products to sums.
///
/// # Safety
/// As for [`Lanes`].
#[inline(always)]
unsafe fn add_product<L: Lanes>(sums: &mut [L; LANES / 8], a: *const f32, b: *const f32) {
    for (i, sum) in sums.iter_mut().enumerate().take(LANES / L::LEN) {
        // SAFETY: guaranteed by the caller.
        unsafe { *sum = L::load(a.add(i * L::LEN)).mul_add(L::load(b.add(i * L::LEN)), *sum) }
    }
}

/// Writes elements of `count` lines side by side, zeros where lines are missing. `step` is from line to line.
///
/// # Safety
/// The lines must be readable for as many elements as there is room for.
#[inline(always)]
unsafe fn turn_lanes<L: Lanes>(from: *const f32, step: isize, count: usize, to: &mut [f32]) {
    if count < LANES {
        to.fill(0.0);
    }
    // SAFETY: guaranteed by the caller.
    unsafe { pack_panel_by::<L>(View { ptr: from, rs: step, cs: 1 }, count, to.len() / LANES, to.as_mut_ptr(), LANES) }
}
