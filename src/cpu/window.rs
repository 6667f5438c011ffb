//! Windows that slide over planes: depthwise convolution, max and average pooling, in one, two or three dimensions.
//!
//! Vectors that load under a mask read the rows of usual windows where they are: lanes in the padding are masked out (`in_place`).
//!
//! Elsewhere, where rows are shorter than vectors, the elements of several planes at one position are a vector. Else planes come one by one: input rows are copied, with their padding, to a ring of rows that stays in the L1 cache. A stride above one deals a row out into as many
//! phases, so that neighbouring outputs always read neighbouring floats and every load is a plain vector load without bounds.
//!
//! ```text
//!   row, stride 2, pad 1:   0 a b c d e f g 0   ->   phase 0:  0 b d f 0     tap 0 reads phase 0 from column 0
//!                                                    phase 1:  a c e g       tap 1 reads phase 1 from column 0
//!                                                                            tap 2 reads phase 0 from column 1
//! ```

use super::simd::{Isa, Lanes, per_isa, transpose};
use in_place::{Masked, in_place};
pub use plimsoll_core::kernel::cpu::window::Window;
use plimsoll_core::kernel::cpu::window::*;
use std::ops::Range;

mod in_place;

/// The function of the elements under a window.
#[derive(Clone, Copy, Debug)]
pub enum Slide {
    /// Their sum weighted by as many weights as the kernel has taps, of each plane its own; padding is zero.
    Weighted(*const f32),
    /// The largest. Padding does not count: of padding alone, the result is the lowest finite number, as in ONNX Runtime.
    Max,
    /// Their mean.
    Average {
        /// Divide by all taps inside the padded input, not only by those inside the input.
        count_pads: bool,
    },
}

/// Planes to slide over, and the destination.
#[derive(Clone, Debug)]
pub struct Planes {
    /// Number of planes: at most as many as [`Window::together`] says.
    pub count: usize,
    /// The first input plane.
    pub x: *const f32,
    /// Elements from one input plane to the next.
    pub x_step: usize,
    /// The first of the output rows of the first plane.
    pub y: *mut f32,
    /// Elements from one plane's output rows to the next one's.
    pub y_step: usize,
    /// The output rows (of depth times height) that are computed.
    pub rows: Range<usize>,
}

/// Slides a window over planes and writes the output rows of each one after the other.
///
/// # Panics
/// If there are more planes than go together, the rows leave the plane, or `workspace` is shorter than [`Window::workspace_bytes`] says.
///
/// # Safety
/// The input planes must be readable, the weights for all taps of each, the output writable for the rows and apart from both.
pub unsafe fn slide(isa: Isa, window: &Window, what: Slide, planes: Planes, workspace: &mut [f32]) {
    assert!(planes.count <= window.together(), "the planes go together");
    assert!(planes.rows.end <= window.rows(), "the rows are inside the plane");
    assert!(workspace.len() >= window.workspace_bytes() / 4, "the workspace is as large as was asked for");
    if planes.count == 0 || planes.rows.is_empty() || window.output[2] == 0 {
        return;
    }
    // SAFETY: guaranteed by the caller.
    unsafe { slide_checked(isa, window, what, planes, workspace) }
}

per_isa! {
    /// # Safety
    /// As for [`slide`], with all that it checks.
    unsafe fn slide_checked(window: &Window, what: Slide, planes: Planes, workspace: &mut [f32]) => slide_by
}

/// # Safety
/// As for [`slide`], where the CPU has the instruction set of `V`.
#[inline(always)]
unsafe fn slide_by<V: Masked>(window: &Window, what: Slide, planes: Planes, workspace: &mut [f32]) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        match what {
            Slide::Weighted(weights) => slide_with::<V, Sum>(window, Some(weights), None, planes, workspace),
            Slide::Max => slide_with::<V, Max>(window, None, None, planes, workspace),
            Slide::Average { count_pads } => slide_with::<V, Sum>(window, None, Some(count_pads), planes, workspace),
        }
    }
}

/// # Safety
/// As for [`slide_by`].
#[inline(always)]
unsafe fn slide_with<V: Masked, C: Combine>(
    window: &Window,
    weights: Option<*const f32>,
    average: Option<bool>,
    planes: Planes,
    workspace: &mut [f32],
) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        if average.is_none() && in_place::<V, C>(window, weights, &planes) {
            return;
        }
        if window.together() > 1 {
            side_by_side::<V, C>(window, weights, average, &planes, workspace);
        } else {
            by_rows::<V, C>(window, weights, average, planes, workspace);
        }
    }
}

/// The combination of elements.
///
/// # Safety
/// The CPU must have the instruction set of `V`.
trait Combine {
    /// The value of an empty window, and of padding.
    const START: f32;
    unsafe fn step<V: Lanes>(sum: V, x: V, weight: V) -> V;
}

struct Sum;
impl Combine for Sum {
    const START: f32 = 0.0;
    #[inline(always)]
    unsafe fn step<V: Lanes>(sum: V, x: V, weight: V) -> V {
        // SAFETY: the CPU has the instruction set of `V`.
        unsafe { x.mul_add(weight, sum) }
    }
}

struct Max;
impl Combine for Max {
    const START: f32 = f32::NEG_INFINITY;
    #[inline(always)]
    unsafe fn step<V: Lanes>(sum: V, x: V, _: V) -> V {
        // SAFETY: the CPU has the instruction set of `V`.
        unsafe { sum.maximum(x) }
    }
}

/// Slides over planes of which each is a lane. With `average`, sums are divided by their count, which includes padding or not.
///
/// # Safety
/// As for [`slide_by`].
#[inline(always)]
unsafe fn side_by_side<V: Lanes, C: Combine>(
    window: &Window,
    weights: Option<*const f32>,
    average: Option<bool>,
    &Planes { count, x, x_step, y, y_step, ref rows }: &Planes,
    workspace: &mut [f32],
) {
    let Window { input, output: [_, height, width], kernel, strides, dilations, .. } = *window;
    let (elements, rest) = workspace.split_at_mut(SIDE_BY_SIDE * window.input_len());
    let (taps, results) = rest.split_at_mut(SIDE_BY_SIDE * window.taps());
    if count < SIDE_BY_SIDE {
        // What lanes without a plane have is stored nowhere; zeros are quick to compute with.
        elements.fill(0.0);
        taps.fill(0.0);
    }
    // SAFETY: whole planes and filters, which the caller vouches for.
    unsafe {
        transpose(count, window.input_len(), x, x_step as isize, elements.as_mut_ptr(), SIDE_BY_SIDE);
        if let Some(weights) = weights {
            let len = window.taps();
            transpose(count, len, weights, len as isize, taps.as_mut_ptr(), SIDE_BY_SIDE);
        }
    }
    let (vectors, mut result) = (SIDE_BY_SIDE / V::LEN, results.as_mut_ptr());
    let (elements, taps) = (elements.as_ptr(), taps.as_ptr());
    for row in rows.clone() {
        let (depth, row) = (row / height, row % height);
        for column in 0..width {
            let across = window.taps_inside(2, column);
            // SAFETY: the CPU has the instruction set of `V`.
            let mut sums = [unsafe { V::splat(C::START) }; SIDE_BY_SIDE / NARROWEST];
            for plane in window.taps_inside(0, depth) {
                let deep = depth * strides[0] + plane * dilations[0] - window.pads[0];
                for line in window.taps_inside(1, row) {
                    let at = row * strides[1] + line * dilations[1] - window.pads[1];
                    for tap in across.clone() {
                        let column = column * strides[2] + tap * dilations[2] - window.pads[2];
                        let element =
                            elements.wrapping_add(((deep * input[1] + at) * input[2] + column) * SIDE_BY_SIDE);
                        let weight = taps.wrapping_add(((plane * kernel[1] + line) * kernel[2] + tap) * SIDE_BY_SIDE);
                        for (i, sum) in sums.iter_mut().enumerate().take(vectors) {
                            // SAFETY: the tap is inside the planes.
                            unsafe {
                                let weight =
                                    if weights.is_some() { V::load(weight.add(i * V::LEN)) } else { V::splat(1.0) };
                                *sum = C::step(*sum, V::load(element.add(i * V::LEN)), weight);
                            }
                        }
                    }
                }
            }
            // SAFETY: there is room for the results of all rows.
            unsafe {
                if let Some(count_pads) = average {
                    let counted = [depth, row, column];
                    let count: usize = (0..3).map(|dim| window.count(dim, counted[dim], count_pads)).product();
                    for sum in &mut sums {
                        *sum = sum.div(V::splat(count as f32));
                    }
                }
                for (i, sum) in sums.into_iter().enumerate().take(vectors) {
                    sum.store(result.add(i * V::LEN));
                }
                result = result.add(SIDE_BY_SIDE);
            }
        }
    }
    // SAFETY: the output rows, which the caller vouches for.
    unsafe { transpose(rows.len() * width, count, results.as_ptr(), SIDE_BY_SIDE as isize, y, y_step) }
}

/// Slides over the rows of one plane. With `average`, sums are divided by their count, which includes padding or not.
///
/// # Safety
/// As for [`slide_by`].
#[inline(always)]
unsafe fn by_rows<V: Lanes, C: Combine>(
    window: &Window,
    weights: Option<*const f32>,
    average: Option<bool>,
    Planes { x, mut y, rows, .. }: Planes,
    workspace: &mut [f32],
) {
    let ring = window.ring();
    let [_, height, width] = window.output;
    let (space, across) = workspace.split_at_mut((window.kernel[0] * ring.rows + 1) * ring.pitch);
    space.fill(C::START);
    let blank = space.len() - ring.pitch;
    if let Some(count_pads) = average {
        for (at, count) in across.iter_mut().enumerate().take(width) {
            *count = window.count(2, at, count_pads) as f32;
        }
    }
    let across = across.as_ptr();
    let space = space.as_mut_ptr();
    let mut state = State { window, ring: &ring, x, y, space, blank, depth: 0, copied: 0, weights, counts: None };
    let mut row = rows.start;
    // Depth by depth, because the rows of the ring belong to one output depth.
    while row < rows.end {
        let depth = row / height;
        let end = rows.end.min((depth + 1) * height) - depth * height;
        let start = row - depth * height;
        state.depth = depth;
        state.y = y.wrapping_sub(start * width);
        state.copied = (start * window.strides[1]).saturating_sub(window.pads[1]);
        state.counts =
            average.map(|count_pads| Counts { deep: window.count(0, depth, count_pads), across, count_pads });
        // SAFETY: rows and columns are inside the planes.
        unsafe {
            let left = state.tall_tiles::<V, C>(start..end);
            state.tiles::<V, C>(left..end);
        }
        y = y.wrapping_add((end - start) * width);
        row = depth * height + end;
    }
}

/// The divisors of the means of one output depth.
struct Counts {
    /// Taps that count in depth.
    deep: usize,
    /// Taps that count in each column, as floats.
    across: *const f32,
    count_pads: bool,
}

/// One vector of an output row.
#[derive(Clone, Copy)]
struct Place {
    row: usize,
    vector: usize,
}

impl Place {
    #[inline(always)]
    fn next(self, vectors: usize) -> Place {
        if self.vector + 1 < vectors {
            Place { vector: self.vector + 1, ..self }
        } else {
            Place { row: self.row + 1, vector: 0 }
        }
    }
}

/// Copies one input row to the ring, dealt out into its phases. The padding around it is there already.
///
/// # Safety
/// `from` must be readable for an input row, `to` writable for a row of the ring.
#[inline(always)]
unsafe fn copy_row<V: Lanes>(window: &Window, ring: &Ring, from: *const f32, to: *mut f32) {
    let (stride, pad) = (window.strides[2], window.pads[2]);
    // Elements past the last window's reach are not needed and may not fit.
    let len = window.input[2].min(ring.pitch.saturating_sub(pad));
    // SAFETY: element `i` goes to padded column `pad + i < ring.pitch`, which is inside its phase.
    unsafe {
        match stride {
            1 => {
                let mut i = 0;
                while i + V::LEN <= len {
                    V::load(from.add(i)).store(to.add(pad + i));
                    i += V::LEN;
                }
                V::load_first(from.add(i), len - i).store_first(to.add(pad + i), len - i);
            }
            2 => {
                // The first pair may be split by the padding.
                let odd = pad % 2;
                if odd == 1 && len > 0 {
                    *to.add(ring.phase + pad / 2) = *from;
                }
                let (even, uneven) = (to.add(pad.div_ceil(2)), to.add(ring.phase + pad.div_ceil(2)));
                let from = from.add(odd.min(len));
                let len = len - odd.min(len);
                for i in 0..len / 2 {
                    *even.add(i) = *from.add(2 * i);
                    *uneven.add(i) = *from.add(2 * i + 1);
                }
                if len % 2 == 1 {
                    *even.add(len / 2) = *from.add(len - 1);
                }
            }
            _ => {
                let (mut phase, mut column) = (pad % stride, pad / stride);
                for i in 0..len {
                    *to.add(phase * ring.phase + column) = *from.add(i);
                    phase += 1;
                    if phase == stride {
                        (phase, column) = (0, column + 1);
                    }
                }
            }
        }
    }
}

/// The ring and how far it has been filled.
struct State<'a> {
    window: &'a Window,
    ring: &'a Ring,
    /// The input plane.
    x: *const f32,
    /// The first output row of this depth, if all of them were wanted.
    y: *mut f32,
    space: *mut f32,
    /// Offset of a row of nothing but padding.
    blank: usize,
    /// Of the output rows being computed.
    depth: usize,
    /// Input rows below this have been copied, and as many of the last as the ring has are there.
    copied: usize,
    weights: Option<*const f32>,
    counts: Option<Counts>,
}

// Closures would not do in these inner loops: they are compiled without the features of the function that they are in.
impl State<'_> {
    /// Computes rows in tall tiles, if there is a kernel for the window, as far as that is worth it. Returns the first row that is left.
    ///
    /// # Safety
    /// As for [`slide_by`]; the rows must be inside the plane.
    #[inline(always)]
    unsafe fn tall_tiles<V: Lanes, C: Combine>(&mut self, rows: Range<usize>) -> usize {
        let Window { kernel, strides, dilations, output, .. } = self.window;
        // Square windows of the usual sizes have kernels of their own.
        let square = kernel[0] == 1 && kernel[1] == kernel[2] && strides[1] == strides[2] && dilations[1..] == [1, 1];
        if !square || !matches!(kernel[1], 3 | 5 | 7) || !matches!(strides[1], 1 | 2) {
            return rows.start;
        }
        let mut row = rows.start;
        while row + TALL <= rows.end + 2 && row < rows.end {
            let here = TALL.min(rows.end - row);
            // SAFETY: the rows under the tile are copied before they are read.
            unsafe {
                self.copy_until::<V>(row + here - 1);
                let lines = self.lines(row);
                for vector in 0..output[2].div_ceil(V::LEN) {
                    let mut sums = [V::splat(C::START); TALL];
                    let column = vector * V::LEN;
                    match (kernel[1], strides[1]) {
                        (3, 1) => self.tall::<V, C, 3, 1>(&lines, column, &mut sums),
                        (3, 2) => self.tall::<V, C, 3, 2>(&lines, column, &mut sums),
                        (5, 1) => self.tall::<V, C, 5, 1>(&lines, column, &mut sums),
                        (5, 2) => self.tall::<V, C, 5, 2>(&lines, column, &mut sums),
                        (7, 1) => self.tall::<V, C, 7, 1>(&lines, column, &mut sums),
                        _ => self.tall::<V, C, 7, 2>(&lines, column, &mut sums),
                    }
                    for (i, sum) in sums.into_iter().enumerate().take(here) {
                        self.finish(Place { row: row + i, vector }, sum);
                    }
                }
            }
            row += here;
        }
        row
    }

    /// Computes rows in tiles of some vectors each, one after the other.
    ///
    /// # Safety
    /// As for [`State::tall_tiles`].
    #[inline(always)]
    unsafe fn tiles<V: Lanes, C: Combine>(&mut self, rows: Range<usize>) {
        let vectors = self.window.output[2].div_ceil(V::LEN);
        let mut tile = Place { row: rows.start, vector: 0 };
        while tile.row < rows.end {
            let mut places = [tile; TILES];
            let mut count = 0;
            while count < TILES && tile.row < rows.end {
                places[count] = tile;
                count += 1;
                tile = tile.next(vectors);
            }
            // SAFETY: the rows under the tile are copied before they are read.
            unsafe {
                self.copy_until::<V>(places[count - 1].row);
                let mut sums = [V::splat(C::START); TILES];
                if count == TILES {
                    self.combine::<V, C, TILES>(&places, &mut sums);
                } else {
                    for i in 0..count {
                        let mut one = [sums[i]];
                        self.combine::<V, C, 1>(&[places[i]], &mut one);
                        sums[i] = one[0];
                    }
                }
                for (place, sum) in places.into_iter().zip(sums).take(count) {
                    self.finish(place, sum);
                }
            }
        }
    }

    /// Stores a finished vector.
    ///
    /// # Safety
    /// The vector must be inside an output row that is wanted.
    #[inline(always)]
    unsafe fn finish<V: Lanes>(&self, place: Place, mut sum: V) {
        let width = self.window.output[2];
        let column = place.vector * V::LEN;
        let n = (width - column).min(V::LEN);
        // SAFETY: guaranteed by the caller; there is a count for each column.
        unsafe {
            if let Some(counts) = &self.counts {
                let above = counts.deep * self.window.count(1, place.row, counts.count_pads);
                let across = V::load_first(counts.across.add(column), n);
                sum = sum.div(V::splat(above as f32).mul(across));
            }
            let to = self.y.wrapping_add(place.row * width + column);
            if n == V::LEN { sum.store(to) } else { sum.store_first(to, n) }
        }
    }

    /// Copies all rows under output rows up to `last`.
    ///
    /// # Safety
    /// The input plane must be readable.
    #[inline(always)]
    unsafe fn copy_until<V: Lanes>(&mut self, last: usize) {
        let (window, ring) = (self.window, self.ring);
        let needed = last * window.strides[1] + (window.kernel[1] - 1) * window.dilations[1] + 1;
        let needed = needed.saturating_sub(window.pads[1]).min(window.input[1]);
        while self.copied < needed {
            for tap in 0..window.kernel[0] {
                if let Some(plane) = window.under(0, self.depth, tap) {
                    // SAFETY: a row of the input, and a row of the ring.
                    unsafe {
                        let from = self.x.add((plane * window.input[1] + self.copied) * window.input[2]);
                        let to = self.space.add((tap * ring.rows + (self.copied & (ring.rows - 1))) * ring.pitch);
                        copy_row::<V>(window, ring, from, to);
                    }
                }
            }
            self.copied += 1;
        }
    }

    /// The ring's rows under `TALL` output rows from `row` on. Rows that are not copied are under none that is wanted.
    #[inline(always)]
    fn lines(&self, row: usize) -> [*const f32; LINES] {
        let inside = self.window.under(0, self.depth, 0).is_some();
        let first = row * self.window.strides[1];
        let mut lines = [self.space.wrapping_add(self.blank).cast_const(); LINES];
        for (i, line) in lines.iter_mut().enumerate() {
            // Below the padding the subtraction wraps to a row that is never copied.
            let at = (first + i).wrapping_sub(self.window.pads[1]);
            if inside && at < self.copied {
                *line = self.space.wrapping_add((at & (self.ring.rows - 1)) * self.ring.pitch);
            }
        }
        lines
    }

    /// Adds up one vector in each of `TALL` rows under a `K` by `K` window. An input vector is loaded once for all rows that it is under.
    ///
    /// # Safety
    /// The lines must be rows of the ring, the column one of a vector.
    #[inline(always)]
    unsafe fn tall<V: Lanes, C: Combine, const K: usize, const S: usize>(
        &self,
        lines: &[*const f32; LINES],
        column: usize,
        sums: &mut [V; TALL],
    ) {
        // SAFETY: the ring's rows are long enough for the last vector under the last tap; there are K * K weights.
        unsafe {
            let mut acc = *sums;
            for tap in 0..K {
                let offset = tap % S * self.ring.phase + tap / S + column;
                let mut column = [V::splat(1.0); K];
                if let Some(weights) = self.weights {
                    for (i, weight) in column.iter_mut().enumerate() {
                        *weight = V::splat(*weights.add(i * K + tap));
                    }
                }
                for i in 0..(TALL - 1) * S + K {
                    let x = V::load(lines[i].add(offset));
                    for t in 0..TALL {
                        if i >= t * S && i - t * S < K {
                            acc[t] = C::step(acc[t], x, column[i - t * S]);
                        }
                    }
                }
            }
            *sums = acc;
        }
    }

    /// Adds up `T` vectors of output at once.
    ///
    /// # Safety
    /// The ring must hold the rows under these places.
    #[inline(always)]
    unsafe fn combine<V: Lanes, C: Combine, const T: usize>(&self, places: &[Place; T], sums: &mut [V; T]) {
        let (window, ring) = (self.window, self.ring);
        let [depth_taps, row_taps, taps] = window.kernel;
        let (stride, dilation) = (window.strides[2], window.dilations[2]);
        // SAFETY: the ring's rows are long enough for the last vector under the last tap.
        unsafe {
            let mut acc = *sums;
            for plane in 0..depth_taps {
                if window.under(0, self.depth, plane).is_none() {
                    continue;
                }
                for tap_row in 0..row_taps {
                    let mut base = [self.space.cast_const(); T];
                    for (base, place) in base.iter_mut().zip(places) {
                        let row = match window.under(1, place.row, tap_row) {
                            Some(row) => (plane * ring.rows + (row & (ring.rows - 1))) * ring.pitch,
                            None => self.blank,
                        };
                        *base = base.add(row + place.vector * V::LEN);
                    }
                    let weights = self.weights.map(|weights| weights.add((plane * row_taps + tap_row) * taps));
                    let (mut phase, mut column) = (0, 0);
                    for tap in 0..taps {
                        let weight = match weights {
                            Some(weights) => V::splat(*weights.add(tap)),
                            None => V::splat(1.0),
                        };
                        let offset = phase * ring.phase + column;
                        for t in 0..T {
                            acc[t] = C::step(acc[t], V::load(base[t].add(offset)), weight);
                        }
                        phase += dilation % stride;
                        column += dilation / stride;
                        if phase >= stride {
                            phase -= stride;
                            column += 1;
                        }
                    }
                }
            }
            *sums = acc;
        }
    }
}
