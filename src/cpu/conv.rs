//! Convolution of rank 1 to 3 on NCHW data in f32, or in bytes with sums in i32, and its transpose.
//!
//! The shapes, and whether the weights are constant, choose one of four ways, so that packed weights are the same everywhere:
//! - *depthwise* (a group has one input channel and few outputs): a [`Window`] slides over each plane;
//! - *weights on the left*: `Y[channels, positions] = W[channels, taps] * patches[taps, positions]`, a matrix product whose right operand
//!   is never stored: panels of it are cut out of the image when they are needed;
//! - *weights on the right*: the same product transposed, for images so small that their positions would fill a vector badly;
//! - *whole batch*: one product over all images, for weights that are computed.
//!
//! Nothing here allocates. Results do not depend on how the work is split.

use super::gemm::{self, Bytes as Lines, COPIED, Elements, Gemm, Grid, Matrix, Out, PRODUCED, Produce, Tile, View};
use super::halves::Halves;
use super::moves;
use super::prologue::Bound;
use super::simd::{Isa, Lanes, Plain, per_isa};
#[cfg(target_arch = "x86_64")]
use super::simd::{Ymm, Zmm};
use super::window::Window;
use bytes::BytePatches;
use planes::{Channels, Slider};
use plimsoll_core::kernel::algorithm::Way;
use plimsoll_core::kernel::cpu::conv::*;
pub use plimsoll_core::kernel::cpu::conv::{Conv, ConvTranspose};
use plimsoll_core::kernel::cpu::gemm::TILE_ROWS;
use std::ops::Range;

mod bytes;
mod planes;
mod whole_batch;

/// Taps of which patches are cut out with one table of masks.
const MAX_TAPS: usize = 64;

/// An image in memory: `[batch, channels, positions]` with contiguous positions. Elements of a convolution of bytes are bytes.
#[derive(Clone, Copy, Debug)]
pub struct Image<P> {
    /// The first element.
    pub ptr: P,
    /// Elements from one image of the batch to the next.
    pub batch_stride: usize,
    /// Elements from one channel to the next.
    pub channel_stride: usize,
}

// SAFETY: an image is an address with strides; whoever reads or writes through it answers for the memory.
unsafe impl<P> Send for Image<P> {}
// SAFETY: as above.
unsafe impl<P> Sync for Image<P> {}

/// The operands of a convolution.
#[derive(Clone, Copy)]
pub struct Tensors<'a> {
    /// The data.
    pub x: Image<*const f32>,
    /// The packed weights, or, for a whole batch, those in memory.
    pub weights: *const f32,
    /// Elements of weights in memory from one output channel to the next, and from one input channel to the next.
    pub weight_steps: [isize; 2],
    /// True if weights in memory have their taps in reverse: those of a convolution whose gradient this one computes. Its output channels
    /// are the input channels here.
    pub flipped: bool,
    /// The result; `None` if the epilogue stores it.
    pub y: Option<Image<*mut f32>>,
    /// The body that the data passes as it is read: of pointwise convolutions only.
    pub prologue: Option<Bound<'a>>,
}

impl Image<*const f32> {
    /// The address of an image's channel, whose elements are `bytes`, or floats.
    fn channel(&self, image: usize, channel: usize, bytes: bool) -> *const f32 {
        let elements = image * self.batch_stride + channel * self.channel_stride;
        if bytes { self.ptr.cast::<u8>().wrapping_add(elements).cast() } else { self.ptr.wrapping_add(elements) }
    }
}

/// One task of as many as make `parts` parts.
#[derive(Clone, Copy)]
pub struct Share {
    /// The kernels to use.
    pub isa: Isa,
    /// For how many threads the work is cut.
    pub parts: usize,
    /// The number of the task.
    pub task: usize,
}

/// Computes one of the two convolutions by tasks.
pub trait Compute {
    /// Number of tasks when the work is cut for `parts` threads. Those of a [`Conv`] are at least that many, if the shapes allow.
    fn tasks(&self, parts: usize) -> usize;

    /// Computes one task, which calls `epilogue` with each finished piece and the index of its image, while the piece is still in cache: rows
    /// are output channels, columns are positions. A [`ConvTranspose`] computes a few channels of one image, or of several small ones, which
    /// are then handed to `epilogue` one by one, in place.
    ///
    /// # Panics
    /// If there is no such task, or `workspace` is shorter than [`Conv::workspace_bytes`] or [`ConvTranspose::workspace_bytes`] says. If a
    /// [`ConvTranspose`] has no result.
    ///
    /// # Safety
    /// The data must be readable, the result writable and apart from it, the weights as packed by [`Conv::pack`]. No other thread may
    /// use the task's part of the result during the call; tasks of one number of parts do not overlap.
    unsafe fn run(&self, share: Share, tensors: &Tensors, workspace: &mut [f32], epilogue: &mut dyn FnMut(usize, Tile));
}

impl Compute for Conv {
    fn tasks(&self, parts: usize) -> usize {
        let (_, grid) = split(self, parts);
        match self.way {
            Way::Depthwise => grid.len(),
            Way::WholeBatch => self.groups * grid.len(),
            Way::WeightsLeft | Way::WeightsRight => self.batch * self.groups * grid.len(),
        }
    }

    unsafe fn run(
        &self,
        share: Share,
        tensors: &Tensors,
        workspace: &mut [f32],
        epilogue: &mut dyn FnMut(usize, Tile),
    ) {
        assert!(share.task < self.tasks(share.parts), "the task exists");
        let needed = self.workspace_bytes(tensors.y.is_some()) / 4;
        assert!(workspace.len() >= needed, "the workspace is as large as was asked for");
        // SAFETY: guaranteed by the caller.
        unsafe {
            match self.way {
                Way::Depthwise => depthwise(self, share, tensors, workspace, epilogue),
                Way::WeightsLeft | Way::WeightsRight => by_product(self, share, tensors, workspace, epilogue),
                Way::WholeBatch => whole_batch::compute(self, share, tensors, workspace, epilogue),
            }
        }
    }
}

/// The planes or products that exist, and the cut of each (depthwise: of all the planes together).
fn split(conv: &Conv, parts: usize) -> (usize, Grid) {
    let (m, n, _) = conv.product();
    match conv.way {
        Way::Depthwise => {
            let planes = conv.batch * conv.out_channels;
            let rows = conv.window.rows();
            let cuts = if planes >= parts { 1 } else { parts.div_ceil(planes.max(1)) };
            (planes, Grid::even(planes, rows, parts.min(planes.max(1)), cuts.min(rows.max(1))))
        }
        Way::WholeBatch => {
            let products = conv.groups;
            (products, Grid::packing(m, n, parts.div_ceil(products.max(1)), [COPIED, PRODUCED]))
        }
        Way::WeightsLeft | Way::WeightsRight => {
            let products = conv.batch * conv.groups;
            // Each of several high tiles cuts its patches anew, so threads may as well share the weights, if these are more than the data.
            let has_tiles = conv.bytes.is_some() && m > n && m > 2 * TILE_ROWS;
            let grid = if has_tiles { Grid::of_rows } else { Grid::new };
            (products, grid(m, n, parts.div_ceil(products.max(1))))
        }
    }
}

/// # Safety
/// As for [`Compute::run`].
unsafe fn depthwise(
    conv: &Conv,
    Share { isa, parts, task }: Share,
    Tensors { x, weights, y, .. }: &Tensors,
    workspace: &mut [f32],
    epilogue: &mut dyn FnMut(usize, Tile),
) {
    let (planes, rows) = split(conv, parts).1.get(task);
    let (memory, bands) = workspace.split_at_mut(conv.planes_bytes() / 4);
    let (window, outputs, taps_step) = (&conv.window, conv.out_channels / conv.groups, conv.product().2);
    let width = window.output[2];
    let mut slider = Slider::new(isa, conv, memory);
    let mut plane = planes.start;
    while plane < planes.end {
        let (image, channel) = (plane / conv.out_channels, plane % conv.out_channels);
        let count = conv.together().min(conv.out_channels - channel).min(planes.end - plane);
        let from = x.channel(image, channel / outputs, conv.bytes.is_some());
        let taps = weights.wrapping_add(channel * taps_step);
        let channels = Channels { count, from, step: x.channel_stride, taps, taps_step };
        // SAFETY: planes of x, and the taps of their channels.
        unsafe { slider.load(isa, window, &channels) }
        for start in rows.clone().step_by(window.band()) {
            let rows = start..rows.end.min(start + window.band());
            let cols = rows.start * width..rows.end * width;
            let (ptr, stride) = match y {
                Some(y) => {
                    let plane = y.ptr.wrapping_add(image * y.batch_stride + channel * y.channel_stride);
                    (plane.wrapping_add(cols.start), y.channel_stride)
                }
                None => (bands.as_mut_ptr(), cols.len()),
            };
            // SAFETY: as above, and bands of y or of the workspace.
            unsafe { slider.rows(isa, window, &channels, rows, (ptr, stride)) }
            epilogue(image, Tile { rows: channel..channel + count, cols, ptr, stride });
        }
        plane += count;
    }
}

/// # Safety
/// As for [`Compute::run`].
unsafe fn by_product(
    conv: &Conv,
    Share { isa, parts, task }: Share,
    Tensors { x, weights, y, prologue, .. }: &Tensors,
    workspace: &mut [f32],
    epilogue: &mut dyn FnMut(usize, Tile),
) {
    let grid = split(conv, parts).1;
    let (index, (rows, cols)) = (task / grid.len(), grid.get(task % grid.len()));
    let (image, group) = (index / conv.groups, index % conv.groups);
    let (m, n, k) = conv.product();
    let (inputs, outputs) = (conv.in_channels / conv.groups, conv.out_channels / conv.groups);
    let from = x.channel(image, group * inputs, conv.bytes.is_some());
    let weights = weights.wrapping_add(conv.packed_weight_bytes() / 4 / conv.groups * group);
    let patches = Patches { window: &conv.window, ptr: from, channel_stride: x.channel_stride };
    let pointwise = conv.is_pointwise();
    assert!(pointwise || prologue.is_none(), "a prologue sees each element of the image once");
    let prologue = prologue.map(|p| p.of_image(image, group * inputs));
    let first = group * outputs;
    let to = y.map(|y| (y.ptr.wrapping_add(image * y.batch_stride + first * y.channel_stride), y.channel_stride));
    if conv.way == Way::WeightsLeft {
        let pixels = View { ptr: from, rs: x.channel_stride as isize, cs: 1 };
        let depth = conv.terms();
        let Bytes { unsigned_data, padding } = conv.bytes.unwrap_or(Bytes { unsigned_data: false, padding: 0 });
        let bytes = BytePatches {
            window: &conv.window,
            ptr: from.cast(),
            channel_stride: x.channel_stride,
            channels: inputs,
            by_tap: conv.is_by_tap(),
            padding: padding as u8,
        };
        let (b, elements) = match (&prologue, conv.bytes) {
            (Some(prologue), _) => (Matrix::Changed(pixels, prologue), Elements::Floats),
            (None, None) if pointwise => (Matrix::Strided(pixels), Elements::Floats),
            (None, None) => (Matrix::Produced(&patches), Elements::Floats),
            (None, Some(_)) => {
                let lines = Lines { ptr: from.cast(), rs: pixels.rs, cs: pixels.cs, depth };
                let b = if pointwise { Matrix::Bytes(lines) } else { Matrix::Produced(&bytes) };
                (b, Elements::Bytes { left_unsigned: !unsigned_data })
            }
        };
        let strided = |(ptr, stride)| Out::Strided { ptr, rs: stride as isize, cs: 1 };
        let c = to.map_or(Out::Epilogue, strided);
        let halves = conv.halves.map(|dtype| Halves::left(weights.cast(), m, k, dtype));
        let a = halves.as_ref().map_or(Matrix::Packed(weights), |halves| Matrix::Produced(halves));
        let gemm = Gemm { m, n, k, elements, a, b, c, accumulate: false };
        let mut relay = |tile: Tile| {
            epilogue(image, Tile { rows: first + tile.rows.start..first + tile.rows.end, ..tile });
        };
        // SAFETY: guaranteed by the caller for this group of this image.
        unsafe { gemm.run(isa, rows, cols, workspace, &mut relay) }
    } else {
        let pixels = View { ptr: from, rs: 1, cs: x.channel_stride as isize };
        let a = match &prologue {
            Some(prologue) => Matrix::Changed(pixels, prologue),
            None if pointwise => Matrix::Strided(pixels),
            None => Matrix::Produced(&patches),
        };
        let halves = conv.halves.map(|dtype| Halves::right(weights.cast(), n, k, dtype));
        let b = halves.as_ref().map_or(Matrix::Packed(weights), |halves| Matrix::Produced(halves));
        let (elements, c) = (Elements::Floats, Out::Epilogue);
        let gemm = Gemm { m, n, k, elements, a, b, c, accumulate: false };
        let is_packed = conv.halves.is_none();
        let (space, transposed) = workspace.split_at_mut(gemm::workspace_bytes(m, n, k, false, is_packed, false) / 4);
        let mut relay = |tile: Tile| {
            let (channels, positions) = (tile.cols.len(), tile.rows.len());
            let (ptr, stride) = match to {
                Some((ptr, stride)) => (ptr.wrapping_add(tile.cols.start * stride + tile.rows.start), stride),
                None => (transposed.as_mut_ptr(), positions),
            };
            // SAFETY: the tile as it is, and its place in y or a buffer of its size.
            unsafe {
                let (from, to) = ((1, tile.stride as isize), (stride as isize, 1));
                moves::copy_2d(channels, positions, tile.ptr, from, ptr, to);
            }
            let rows = first + tile.cols.start..first + tile.cols.end;
            epilogue(image, Tile { rows, cols: tile.rows, ptr, stride });
        };
        // SAFETY: as above.
        unsafe { gemm.run(isa, rows, cols, space, &mut relay) }
    }
}

/// The matrix of image patches: row `(channel, tap)`, column `position`. Lanes are positions.
struct Patches<'a> {
    window: &'a Window,
    ptr: *const f32,
    channel_stride: usize,
}

// SAFETY: an image that the caller of `Conv::run` vouches for, and that is only read.
unsafe impl Sync for Patches<'_> {}

/// The offsets that the lanes of a panel read at, relative to the channel.
struct PanelLanes {
    /// Lanes whose offsets are evenly spaced: the offset that lane 0 would have under tap 0, which may be outside the image, and which
    /// lanes.
    runs: [(isize, u16); LANES],
    run_count: usize,
    /// By tap of a range: its offset, and the lanes that are inside the image under it.
    taps: [(isize, u16); MAX_TAPS],
}

impl PanelLanes {
    /// The table of at most [`MAX_TAPS`] taps.
    fn new(window: &Window, lanes: Range<usize>, taps: Range<usize>) -> PanelLanes {
        let [_, height, width] = window.output;
        let mut at = [lanes.start / width / height, lanes.start / width % height, lanes.start % width];
        let mut this = PanelLanes { runs: [(0, 0); LANES], run_count: 0, taps: [(0, 0); MAX_TAPS] };
        let stride = window.strides[2] as isize;
        let [input_depth, input_height, input_width] = window.input.map(|len| len as isize);
        let first = |dim: usize, at: usize| (at * window.strides[dim]) as isize - window.pads[dim] as isize;
        let dilations = window.dilations.map(|step| step as isize);
        let [_, high, wide] = window.kernel;
        // Divisions take longer than the rest, so there is one for the first tap, and the others follow it.
        let start = [taps.start / wide / high, taps.start / wide % high, taps.start % wide];
        let next = |[z, y, x]: [usize; 3]| match (x + 1 < wide, y + 1 < high) {
            (true, _) => [z, y, x + 1],
            (_, true) => [z, y + 1, 0],
            _ => [z + 1, 0, 0],
        };
        let mut tap = start;
        for place in &mut this.taps[..taps.len()] {
            let [z, y, x] = [0, 1, 2].map(|dim| tap[dim] as isize * dilations[dim]);
            place.0 = (z * input_height + y) * input_width + x;
            tap = next(tap);
        }
        let mut lane = 0;
        // Row by row of the output: in one, depth and height are the same for all lanes.
        while lane < lanes.len() {
            let count = (lanes.len() - lane).min(width - at[2]);
            let (d, h, w) = (first(0, at[0]), first(1, at[1]), first(2, at[2]));
            let origin = (d * input_height + h) * input_width + w - lane as isize * stride;
            // With equal sizes and a stride of one even the step to the next row is even.
            if this.run_count == 0 || this.runs[this.run_count - 1].0 != origin {
                this.runs[this.run_count] = (origin, 0);
                this.run_count += 1;
            }
            this.runs[this.run_count - 1].1 |= mask(lane, lane + count);
            // The lanes that are inside their row under a tap of a line.
            let across = |x: usize| {
                let column = w + x as isize * dilations[2];
                // Lane `lane + i` reads column `column + i * stride`.
                let until = |limit: isize| {
                    let left = (limit - column).max(0) as usize;
                    let steps = match stride {
                        1 => left,
                        2 => left.div_ceil(2),
                        _ => left.div_ceil(stride as usize),
                    };
                    steps.min(count)
                };
                mask(lane + until(0), lane + until(input_width))
            };
            let mut columns = [0; MAX_TAPS];
            columns.iter_mut().enumerate().take(wide).for_each(|(x, columns)| *columns = across(x));
            let mut tap = start;
            let mut place = 0;
            // Line by line of the taps.
            while place < taps.len() {
                let [deep, row] = [d + tap[0] as isize * dilations[0], h + tap[1] as isize * dilations[1]];
                let along = (wide - tap[2]).min(taps.len() - place);
                if (0..input_depth).contains(&deep) && (0..input_height).contains(&row) {
                    for (x, (_, inside)) in (tap[2]..).zip(&mut this.taps[place..place + along]) {
                        *inside |= columns.get(x).copied().unwrap_or_else(|| across(x));
                    }
                }
                place += along;
                tap = next([tap[0], tap[1], wide - 1]);
            }
            lane += count;
            at = if at[1] + 1 < height { [at[0], at[1] + 1, 0] } else { [at[0] + 1, 0, 0] };
        }
        this
    }
}

/// Lanes `from..to`.
#[inline(always)]
fn mask(from: usize, to: usize) -> u16 {
    ((1u32 << to) - (1u32 << from.min(to))) as u16
}

impl Produce for Patches<'_> {
    unsafe fn panel(&self, isa: Isa, k: Range<usize>, lanes: Range<usize>, step: usize, panel: *mut f32) {
        // SAFETY: guaranteed by the caller.
        unsafe { cut_panel(isa, self, k, lanes, step, panel) }
    }
}

per_isa! {
    /// # Safety
    /// As for [`Produce::panel`].
    unsafe fn cut_panel(patches: &Patches, k: Range<usize>, lanes: Range<usize>, step: usize, panel: *mut f32) => panel_by
}

/// # Safety
/// As for [`Produce::panel`], where the CPU has the instruction set of `F`.
#[inline(always)]
unsafe fn panel_by<F: Fetch>(patches: &Patches, k: Range<usize>, lanes: Range<usize>, step: usize, panel: *mut f32) {
    let (window, taps) = (patches.window, patches.window.taps());
    if window.strides[2] > F::FARTHEST {
        // SAFETY: guaranteed by the caller.
        return unsafe { patches.panel_slowly(k, lanes, step, panel) };
    }
    let table = |tap: usize| PanelLanes::new(window, lanes.clone(), tap..(tap + MAX_TAPS).min(taps));
    // The first tap of the table.
    let mut since = k.start % taps / MAX_TAPS * MAX_TAPS;
    let mut lanes = table(since);
    let all = mask(0, step);
    let mut channel = patches.ptr.wrapping_add(k.start / taps * patches.channel_stride);
    let mut tap = k.start % taps;
    let mut to = panel;
    let mut left = k.len();
    // Each run has a loop of its own, so that values which are the same for all taps and channels stay in registers.
    while left > 0 {
        if since != tap / MAX_TAPS * MAX_TAPS {
            since = tap / MAX_TAPS * MAX_TAPS;
            lanes = table(since);
        }
        let until = (since + MAX_TAPS).min(taps);
        let here = left.min(until - tap);
        for (i, &(origin, run)) in lanes.runs[..lanes.run_count].iter().enumerate() {
            let from = channel.wrapping_offset(origin);
            let mut to = to;
            for &(offset, inside) in &lanes.taps[tap - since..tap - since + here] {
                let from = from.wrapping_offset(offset);
                // SAFETY: masked lanes are inside the image, `step` lanes inside the panel.
                unsafe {
                    match (window.strides[2], i) {
                        (1, 0) => F::first_run(from, to, inside & run, all),
                        (1, _) => F::run(from, to, inside & run),
                        (2, 0) => F::first_pairs(from, to, inside & run, all),
                        (2, _) => F::pairs(from, to, inside & run),
                        (stride, _) => F::spread(from, stride, to, inside & run, if i == 0 { all } else { run }),
                    }
                }
                to = to.wrapping_add(step);
            }
        }
        to = to.wrapping_add(here * step);
        left -= here;
        tap += here;
        if tap == taps {
            tap = 0;
            channel = channel.wrapping_add(patches.channel_stride);
        }
    }
}

impl Patches<'_> {
    /// Wide strides.
    ///
    /// # Safety
    /// As for [`Produce::panel`].
    unsafe fn panel_slowly(&self, k: Range<usize>, lanes: Range<usize>, step: usize, panel: *mut f32) {
        let w = self.window;
        for (p, k) in k.enumerate() {
            let (channel, tap) = (k / w.taps(), k % w.taps());
            let tap = [tap / w.kernel[2] / w.kernel[1], tap / w.kernel[2] % w.kernel[1], tap % w.kernel[2]];
            for j in 0..step {
                let at = lanes.start + j;
                let at = [at / w.output[2] / w.output[1], at / w.output[2] % w.output[1], at % w.output[2]];
                let mut index = (j < lanes.len()).then_some(0);
                for dim in 0..3 {
                    let padded = at[dim] * w.strides[dim] + tap[dim] * w.dilations[dim];
                    let inside = padded.checked_sub(w.pads[dim]).filter(|&i| i < w.input[dim]);
                    index = index.zip(inside).map(|(index, i)| index * w.input[dim] + i);
                }
                // SAFETY: inside the image, and inside the panel.
                unsafe {
                    *panel.add(p * step + j) = match index {
                        Some(index) => *self.ptr.add(channel * self.channel_stride + index),
                        None => 0.0,
                    };
                }
            }
        }
    }
}

/// Moves of up to 16 floats under a mask.
///
/// # Safety
/// The CPU must have the implementor's instruction set. `from` must be readable at the masked lanes (of each pair, at the first), `to`
/// writable at them, and at all lanes of `all` in the forms that have it, which write zero to the others.
trait Fetch {
    /// The largest distance of elements that it moves. With more than one, `pairs` and `first_pairs` exist; with more than two, `spread`.
    const FARTHEST: usize = 1;
    #[inline(always)]
    unsafe fn first_run(from: *const f32, to: *mut f32, mask: u16, all: u16) {
        // SAFETY: guaranteed by the caller.
        unsafe {
            if mask == u16::MAX {
                return to.cast::<[f32; LANES]>().write_unaligned(from.cast::<[f32; LANES]>().read_unaligned());
            }
            for lane in 0..all.count_ones() as usize {
                *to.add(lane) = if mask >> lane & 1 == 1 { *from.wrapping_add(lane) } else { 0.0 };
            }
        }
    }
    #[inline(always)]
    unsafe fn run(from: *const f32, to: *mut f32, mask: u16) {
        let mut left = mask;
        while left != 0 {
            let lane = left.trailing_zeros() as usize;
            // SAFETY: guaranteed by the caller.
            unsafe { *to.add(lane) = *from.wrapping_add(lane) }
            left &= left - 1;
        }
    }
    unsafe fn first_pairs(_: *const f32, _: *mut f32, _: u16, _: u16) {
        unreachable!("it moves neighbours alone")
    }
    unsafe fn pairs(_: *const f32, _: *mut f32, _: u16) {
        unreachable!("it moves neighbours alone")
    }
    /// Elements that are `stride` apart.
    unsafe fn spread(_from: *const f32, _stride: usize, _to: *mut f32, _mask: u16, _all: u16) {
        unreachable!("it moves neighbours alone")
    }
}

impl Fetch for Plain {}

#[cfg(target_arch = "aarch64")]
impl Fetch for super::simd::Neon {}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{Fetch, Ymm, Zmm};
    use std::arch::x86_64::*;

    /// The first elements of 16 pairs, those under the mask.
    ///
    /// # Safety
    /// As for [`Fetch`], with AVX-512.
    #[inline(always)]
    unsafe fn every_other(from: *const f32, mask: u16) -> __m512 {
        // SAFETY: AVX-512 and BMI2, by the contract of `Fetch`; lanes that are masked out are not read.
        unsafe {
            let wide = _pdep_u32(u32::from(mask), 0x5555_5555);
            let low = _mm512_maskz_loadu_ps(wide as u16, from);
            let high = _mm512_maskz_loadu_ps((wide >> 16) as u16, from.wrapping_add(16));
            let even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
            _mm512_permutex2var_ps(low, even, high)
        }
    }

    // SAFETY of every block: guaranteed by the caller; lanes that are masked out are neither read nor written.
    impl Fetch for Zmm {
        const FARTHEST: usize = 1 << 24;
        #[inline(always)]
        unsafe fn first_run(from: *const f32, to: *mut f32, mask: u16, all: u16) {
            // SAFETY: as above.
            unsafe { _mm512_mask_storeu_ps(to, all, _mm512_maskz_loadu_ps(mask, from)) }
        }
        #[inline(always)]
        unsafe fn run(from: *const f32, to: *mut f32, mask: u16) {
            // SAFETY: as above.
            unsafe { _mm512_mask_storeu_ps(to, mask, _mm512_maskz_loadu_ps(mask, from)) }
        }
        #[inline(always)]
        unsafe fn first_pairs(from: *const f32, to: *mut f32, mask: u16, all: u16) {
            // SAFETY: as above.
            unsafe { _mm512_mask_storeu_ps(to, all, every_other(from, mask)) }
        }
        #[inline(always)]
        unsafe fn pairs(from: *const f32, to: *mut f32, mask: u16) {
            // SAFETY: as above.
            unsafe { _mm512_mask_storeu_ps(to, mask, every_other(from, mask)) }
        }
        #[inline(always)]
        unsafe fn spread(from: *const f32, stride: usize, to: *mut f32, mask: u16, all: u16) {
            // SAFETY: as above.
            unsafe {
                let lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
                let places = _mm512_mullo_epi32(lanes, _mm512_set1_epi32(stride as i32));
                let elements = _mm512_mask_i32gather_ps::<4>(_mm512_setzero_ps(), mask, places, from);
                _mm512_mask_storeu_ps(to, all, elements);
            }
        }
    }

    /// The low eight bits as a vector mask.
    ///
    /// # Safety
    /// The CPU must have AVX2.
    #[inline(always)]
    unsafe fn spread(mask: u16) -> __m256i {
        // SAFETY: AVX2, by the contract of `Fetch`.
        unsafe {
            let bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
            _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(i32::from(mask)), bit), bit)
        }
    }

    // SAFETY of every block: as for `Zmm`.
    impl Fetch for Ymm {
        #[inline(always)]
        unsafe fn first_run(from: *const f32, to: *mut f32, mask: u16, all: u16) {
            // SAFETY: as above.
            unsafe {
                let low = _mm256_maskload_ps(from, spread(mask));
                let high = _mm256_maskload_ps(from.wrapping_add(8), spread(mask >> 8));
                if all == u16::MAX {
                    _mm256_storeu_ps(to, low);
                    _mm256_storeu_ps(to.wrapping_add(8), high);
                } else {
                    _mm256_maskstore_ps(to, spread(all), low);
                    _mm256_maskstore_ps(to.wrapping_add(8), spread(all >> 8), high);
                }
            }
        }
        #[inline(always)]
        unsafe fn run(from: *const f32, to: *mut f32, mask: u16) {
            // SAFETY: as above.
            unsafe {
                let (low, high) = (spread(mask), spread(mask >> 8));
                _mm256_maskstore_ps(to, low, _mm256_maskload_ps(from, low));
                _mm256_maskstore_ps(to.wrapping_add(8), high, _mm256_maskload_ps(from.wrapping_add(8), high));
            }
        }
    }
}

impl Compute for ConvTranspose {
    fn tasks(&self, _: usize) -> usize {
        self.batch.div_ceil(self.together()) * self.groups * self.blocks()
    }

    unsafe fn run(
        &self,
        Share { isa, parts, task }: Share,
        Tensors { x, weights, y, .. }: &Tensors,
        workspace: &mut [f32],
        epilogue: &mut dyn FnMut(usize, Tile),
    ) {
        assert!(task < self.tasks(parts), "the task exists");
        let y = y.expect("a transposed convolution adds up where its result goes");
        let (inputs, outputs, taps) =
            (self.in_channels / self.groups, self.out_channels / self.groups, self.window.taps());
        let (part, group, block) =
            (task / self.blocks() / self.groups, task / self.blocks() % self.groups, task % self.blocks());
        let images = part * self.together()..self.batch.min((part + 1) * self.together());
        let first = block * self.block();
        let channels = self.block().min(outputs - first);
        let channel = group * outputs + first;
        let (positions, size) = (self.window.output_len(), self.window.input_len());
        let to = |image: usize| y.ptr.wrapping_add(image * y.batch_stride + channel * y.channel_stride);
        let plane = |image: usize, row: usize| to(image).wrapping_add(row / taps * y.channel_stride);
        let from = x.ptr.wrapping_add(images.start * x.batch_stride + group * inputs * x.channel_stride);
        // SAFETY: guaranteed by the caller for these channels of these images.
        unsafe {
            if inputs == 1 {
                // The product of one column and one row.
                for c in 0..channels {
                    let filter = weights.add((channel + c) * taps);
                    spread(isa, &self.window, filter, from, to(images.start).add(c * y.channel_stride));
                }
            } else {
                for image in images.clone() {
                    for c in 0..channels {
                        to(image).add(c * y.channel_stride).write_bytes(0, size);
                    }
                }
                let columns = Columns { ptr: from, positions, image: *x };
                let view = View { ptr: from, rs: x.channel_stride as isize, cs: 1 };
                let gemm = Gemm {
                    m: channels * taps,
                    n: images.len() * positions,
                    k: inputs,
                    elements: Elements::Floats,
                    a: Matrix::Packed(weights.wrapping_add(channel * taps * inputs)),
                    b: if images.len() > 1 { Matrix::Produced(&columns) } else { Matrix::Strided(view) },
                    c: Out::Epilogue,
                    accumulate: false,
                };
                let mut scatter = |tile: Tile| {
                    for (i, row) in tile.rows.clone().enumerate() {
                        let mut from = tile.ptr.wrapping_add(i * tile.stride).cast_const();
                        for (image, cols) in by_image(tile.cols.clone(), positions) {
                            let count = cols.len();
                            scatter(self, row % taps, cols, from, plane(images.start + image, row));
                            from = from.add(count);
                        }
                    }
                };
                gemm.run(isa, 0..gemm.m, 0..gemm.n, workspace, &mut scatter);
            }
        }
        for image in images {
            for c in 0..channels {
                let ptr = to(image).wrapping_add(c * y.channel_stride);
                let rows = channel + c..channel + c + 1;
                epilogue(image, Tile { rows, cols: 0..size, ptr, stride: y.channel_stride });
            }
        }
    }
}

/// Adds what positions `cols` contribute through one tap to an output plane.
///
/// # Safety
/// `from` must be readable for `cols.len()` elements, `plane` writable for a plane.
unsafe fn scatter(conv: &ConvTranspose, tap: usize, cols: Range<usize>, from: *const f32, plane: *mut f32) {
    let w = &conv.window;
    let tap = [tap / w.kernel[2] / w.kernel[1], tap / w.kernel[2] % w.kernel[1], tap % w.kernel[2]];
    let place = |dim: usize, at: usize| {
        let padded = at * w.strides[dim] + tap[dim] * w.dilations[dim];
        padded.checked_sub(w.pads[dim]).filter(|&i| i < w.input[dim])
    };
    let width = w.output[2];
    let mut col = cols.start;
    while col < cols.end {
        let (row, start) = (col / width, col % width);
        let end = width.min(start + cols.end - col);
        if let (Some(d), Some(h)) = (place(0, row / w.output[1]), place(1, row % w.output[1])) {
            // The positions of this row whose target is inside: those from `low` to `high`.
            let shift = tap[2] * w.dilations[2];
            let low = w.pads[2].saturating_sub(shift).div_ceil(w.strides[2]).max(start);
            let high = (w.input[2] + w.pads[2]).saturating_sub(shift).div_ceil(w.strides[2]).min(end);
            // SAFETY: by the choice of `low` and `high`.
            unsafe {
                let line = plane.add((d * w.input[1] + h) * w.input[2]);
                for at in low..high {
                    let to = line.add(at * w.strides[2] + shift - w.pads[2]);
                    *to += *from.add(col - cols.start + at - start);
                }
            }
        }
        col += end - start;
    }
}

/// Columns `(image, position)`: per image, its positions among them.
fn by_image(cols: Range<usize>, positions: usize) -> impl Iterator<Item = (usize, Range<usize>)> {
    let mut at = cols.start;
    std::iter::from_fn(move || {
        let (image, first) = (at / positions, at % positions);
        let count = (positions - first).min(cols.end - at);
        at += count;
        (count > 0).then_some((image, first..first + count))
    })
}

/// The matrix of the elements of several images: row `channel`, column `(image, position)`.
struct Columns {
    /// The first channel of the first image.
    ptr: *const f32,
    positions: usize,
    image: Image<*const f32>,
}

// SAFETY: images that the caller of `ConvTranspose::run` vouches for, and that are only read.
unsafe impl Sync for Columns {}

impl Produce for Columns {
    unsafe fn panel(&self, _: Isa, k: Range<usize>, lanes: Range<usize>, step: usize, panel: *mut f32) {
        let mut done = 0;
        // SAFETY: guaranteed by the caller.
        unsafe {
            for (image, cols) in by_image(lanes.clone(), self.positions) {
                let from = self.ptr.wrapping_add(image * self.image.batch_stride + cols.start);
                let from = from.wrapping_add(k.start * self.image.channel_stride);
                let (steps, to_steps) = ((self.image.channel_stride as isize, 1), (step as isize, 1));
                moves::copy_2d(k.len(), cols.len(), from, steps, panel.add(done), to_steps);
                done += cols.len();
            }
            if done < step {
                for p in 0..k.len() {
                    panel.add(p * step + done).write_bytes(0, step - done);
                }
            }
        }
    }
}

/// Columns of each phase that [`spread`] adds up together, and the most phases.
const STRETCH: usize = 64;
const PHASES: usize = 4;

per_isa! {
    /// Writes an output plane: the sum over all positions of an input plane of the filter's taps, times the position's element.
    ///
    /// A row of it is added up phase by phase, so that what neighbouring positions contribute through one tap lies side by side:
    ///
    /// ```text
    ///   stride 2, three taps:   phase 0: tap 0 of positions q, tap 2 of positions q - 1     phase 1: tap 1 of positions q
    /// ```
    ///
    /// # Safety
    /// `filter` must be readable for the taps, `from` for a plane, `to` writable for one.
    unsafe fn spread(window: &Window, filter: *const f32, from: *const f32, to: *mut f32) => spread_by
}

/// # Safety
/// As for [`spread`], where the CPU has the instruction set of `V`.
#[inline(always)]
unsafe fn spread_by<V: Lanes>(window: &Window, filter: *const f32, from: *const f32, to: *mut f32) {
    let Window { input: [depth, height, width], output, kernel, strides, dilations, pads, .. } = *window;
    // Input positions of a line along an axis, with the taps that lie there.
    let covering = |dim: usize, at: usize| {
        (0..kernel[dim]).filter_map(move |tap| {
            let behind = (at + pads[dim]).checked_sub(tap * dilations[dim])?;
            let place = behind / strides[dim];
            (behind.is_multiple_of(strides[dim]) && place < output[dim]).then_some((tap, place))
        })
    };
    let (stride, pad) = (strides[2], pads[2]);
    // Phases of more than these are added up one at a time.
    let together = if stride <= PHASES { stride } else { 1 };
    let mut sums = [0f32; PHASES * STRETCH];
    for row in 0..depth * height {
        let (z, y) = (row / height, row % height);
        let line = to.wrapping_add(row * width);
        for first in (pad / stride..(width + pad).div_ceil(stride)).step_by(STRETCH) {
            let quotients = first..(first + STRETCH).min((width + pad).div_ceil(stride));
            for phase in (0..stride).step_by(together) {
                sums.chunks_exact_mut(STRETCH).take(together).for_each(|sums| sums[..quotients.len()].fill(0.0));
                for (tz, pz) in covering(0, z) {
                    for (ty, py) in covering(1, y) {
                        let taps = filter.wrapping_add((tz * kernel[1] + ty) * kernel[2]);
                        let from = from.wrapping_add((pz * output[1] + py) * output[2]);
                        for tap in 0..kernel[2] {
                            let (shift, own) = (tap * dilations[2] / stride, tap * dilations[2] % stride);
                            if !(phase..phase + together).contains(&own) {
                                continue;
                            }
                            let start = quotients.start.max(shift);
                            let end = quotients.end.min(output[2] + shift);
                            // SAFETY: positions `start - shift..end - shift` are inside the plane, and the sums have their quotients.
                            unsafe {
                                let weight = V::splat(*taps.add(tap));
                                let sums = sums.as_mut_ptr().add((own - phase) * STRETCH);
                                let mut q = start;
                                while q < end {
                                    let n = (end - q).min(V::LEN);
                                    let (from, sum) = (from.add(q - shift), sums.add(q - quotients.start));
                                    if n == V::LEN {
                                        V::load(from).mul_add(weight, V::load(sum)).store(sum);
                                    } else {
                                        let x = V::load_first(from, n);
                                        x.mul_add(weight, V::load_first(sum, n)).store_first(sum, n);
                                    }
                                    q += n;
                                }
                            }
                        }
                    }
                }
                for (i, q) in quotients.clone().enumerate() {
                    for own in 0..together {
                        let column = (q * stride + phase + own).wrapping_sub(pad);
                        if column < width {
                            // SAFETY: inside the row.
                            unsafe { *line.add(column) = sums[own * STRETCH + i] }
                        }
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Small whole numbers, of which sums of some thousand products are exact.
    fn values(len: usize) -> Vec<f32> {
        (0..len).map(|i| (i * i % 13) as f32 - 6.0).collect()
    }

    fn reference(conv: &Conv, x: &[f32], weights: &[f32]) -> Vec<f32> {
        let w = &conv.window;
        let (inputs, outputs) = (conv.in_channels / conv.groups, conv.out_channels / conv.groups);
        let [_, height, width] = w.output;
        let mut y = Vec::new();
        for channel in 0..conv.out_channels {
            for position in 0..height * width {
                let mut sum = 0.0;
                for input in 0..inputs {
                    let plane = &x[(channel / outputs * inputs + input) * w.input_len()..][..w.input_len()];
                    let filter = &weights[(channel * inputs + input) * w.taps()..][..w.taps()];
                    for (tap, weight) in filter.iter().enumerate() {
                        let row = w.under(1, position / width, tap / w.kernel[2]);
                        let column = w.under(2, position % width, tap % w.kernel[2]);
                        if let Some((row, column)) = row.zip(column) {
                            sum += weight * plane[row * w.input[2] + column];
                        }
                    }
                }
                y.push(sum);
            }
        }
        y
    }

    fn check(conv: &Conv, parts: usize) {
        let positions = conv.window.output_len();
        let x = values(conv.in_channels * conv.window.input_len());
        let weights = values(conv.out_channels * conv.terms());
        let want = reference(conv, &x, &weights);
        let bytes: Vec<u8> = weights.iter().flat_map(|x| x.to_ne_bytes()).collect();
        let mut packed = vec![0; conv.packed_weight_bytes()];
        conv.pack(plimsoll_core::kernel::cpu::Plain::whole(&bytes), 0, &mut packed);
        let packed: Vec<f32> = packed.as_chunks().0.iter().map(|&x| f32::from_ne_bytes(x)).collect();
        for isa in Isa::available() {
            let mut y = vec![f32::NAN; want.len()];
            let tensors = Tensors {
                x: Image { ptr: x.as_ptr(), batch_stride: 0, channel_stride: conv.window.input_len() },
                weights: packed.as_ptr(),
                weight_steps: [0; 2],
                flipped: false,
                y: Some(Image { ptr: y.as_mut_ptr(), batch_stride: 0, channel_stride: positions }),
                prologue: None,
            };
            let mut workspace = vec![f32::NAN; conv.workspace_bytes(true) / 4];
            for task in 0..conv.tasks(parts) {
                // SAFETY: the buffers have the sizes that the shapes name.
                unsafe { conv.run(Share { isa, parts, task }, &tensors, &mut workspace, &mut |_, _| {}) }
            }
            assert_eq!(y, want, "{} {conv:?}", isa.name());
        }
    }

    #[test]
    fn patches_of_every_window_are_cut() {
        for (input, kernel) in
            [([5usize, 7], [3, 3]), ([9, 40], [3, 2]), ([17, 18], [2, 5]), ([11, 12], [9, 9]), ([4, 90], [1, 70])]
        {
            for (stride, dilation, pad) in [(1, 1, 1), (1, 2, 0), (2, 1, 1), (2, 2, 3), (3, 1, 2), (4, 1, 0), (5, 2, 1)]
            {
                let fits =
                    |d: usize| Some((input[d] + 2 * pad).checked_sub((kernel[d] - 1) * dilation + 1)? / stride + 1);
                let (Some(height), Some(width)) = (fits(0), fits(1)) else { continue };
                let window = Window {
                    input: [1, input[0], input[1]],
                    output: [1, height, width],
                    kernel: [1, kernel[0], kernel[1]],
                    strides: [1, stride, stride],
                    dilations: [1, dilation, dilation],
                    pads: [0, pad, pad],
                    pads_end: [0, pad, pad],
                };
                for (way, groups) in [(Way::WeightsLeft, 1), (Way::WeightsLeft, 2), (Way::WeightsRight, 1)] {
                    let (in_channels, out_channels) = (4, 26);
                    let conv =
                        Conv { batch: 1, in_channels, out_channels, groups, window, way, bytes: None, halves: None };
                    [1, 3].into_iter().for_each(|parts| check(&conv, parts));
                }
            }
        }
    }

    #[test]
    fn tiles_of_many_channels_are_whole() {
        for (out_channels, side, taps) in [(140, 9, 3), (529, 6, 1), (1100, 5, 1)] {
            let pad = taps / 2;
            let window = Window {
                input: [1, side, side],
                output: [1, side, side],
                kernel: [1, taps, taps],
                strides: [1; 3],
                dilations: [1; 3],
                pads: [0, pad, pad],
                pads_end: [0, pad, pad],
            };
            let conv = Conv {
                batch: 1,
                in_channels: 300,
                out_channels,
                groups: 1,
                window,
                way: Way::WeightsLeft,
                bytes: None,
                halves: None,
            };
            [1, 2, 5].into_iter().for_each(|parts| check(&conv, parts));
        }
    }
}
