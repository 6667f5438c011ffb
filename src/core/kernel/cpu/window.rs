//! The geometry of windows that slide over planes, and what the CPU keeps of these: a ring of rows, or several planes side by side.

use std::ops::Range;

/// The geometry of a window over depth, height and width. Lower ranks have leading dimensions of 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// Size of the input.
    pub input: [usize; 3],
    /// Size of the output. It is given, not computed, because rounding modes differ.
    pub output: [usize; 3],
    /// Taps in each dimension.
    pub kernel: [usize; 3],
    /// Distance between windows.
    pub strides: [usize; 3],
    /// Distance between taps.
    pub dilations: [usize; 3],
    /// Padding before the first element.
    pub pads: [usize; 3],
    /// Padding after the last element; only an average that counts the padding looks at it.
    pub pads_end: [usize; 3],
}

/// Register tiles computed together.
pub const TILES: usize = 4;
/// Output rows computed together by the kernels for common windows; planes of 7, 14, 28, 56 or 112 rows leave no rest.
pub const TALL: usize = 7;
/// Input rows under `TALL` windows of 7 rows two apart.
pub const LINES: usize = 2 * (TALL - 1) + 7;
/// The widest vector. Rows in the ring are padded to it.
pub const WIDEST: usize = 16;
/// The narrowest.
pub const NARROWEST: usize = 8;

/// Planes of which each one is a lane, where rows are too short for vectors.
pub const SIDE_BY_SIDE: usize = 16;
/// The longest rows for which that pays, and the most elements of a plane: so many fit in the L1 cache.
const SHORT: usize = 8;
const SMALL: usize = 1 << 8;
/// Results go to the epilogue in bands of about this many elements.
const BAND: usize = 8 << 10;

/// How the ring is laid out in the workspace, in floats.
pub struct Ring {
    /// Rows kept per depth tap, a power of two.
    pub rows: usize,
    /// From one phase of a row to the next.
    pub phase: usize,
    /// From one row to the next.
    pub pitch: usize,
}

impl Window {
    /// The input coordinate under tap `tap` of window `at`, if it is inside the input.
    #[inline(always)]
    pub fn under(&self, dim: usize, at: usize, tap: usize) -> Option<usize> {
        (at * self.strides[dim] + tap * self.dilations[dim])
            .checked_sub(self.pads[dim])
            .filter(|&i| i < self.input[dim])
    }

    /// The taps of window `at` that are inside the input.
    #[inline(always)]
    pub fn taps_inside(&self, dim: usize, at: usize) -> Range<usize> {
        let (from, step) = (at * self.strides[dim], self.dilations[dim]);
        let before = |place: usize| {
            let steps = place.saturating_sub(from);
            // Divisions take longer than the rest.
            let steps = if step == 1 { steps } else { steps.div_ceil(step) };
            steps.min(self.kernel[dim])
        };
        let start = before(self.pads[dim]);
        start..before(self.input[dim] + self.pads[dim]).max(start)
    }

    /// The number of taps of window `at` that an average divides by.
    #[inline]
    pub fn count(&self, dim: usize, at: usize, count_pads: bool) -> usize {
        let inside = |tap: &usize| {
            let padded = at * self.strides[dim] + tap * self.dilations[dim];
            if count_pads {
                padded < self.input[dim] + self.pads[dim] + self.pads_end[dim]
            } else {
                self.under(dim, at, *tap).is_some()
            }
        };
        (0..self.kernel[dim]).filter(inside).count()
    }

    /// True if there is one window, whose taps are the elements of the input in their order.
    pub fn covers(&self) -> bool {
        self.kernel == self.input && self.output_len() == 1 && self.dilations == [1; 3] && self.pads == [0; 3]
    }

    /// The window that reads an output plane and gives an input plane, with its taps in reverse: what a transposed convolution with this
    /// window computes. `None` if windows are more than one element apart, or the plane would have to be cut.
    pub fn flipped(&self) -> Option<Window> {
        let around = |dim: usize| (self.dilations[dim] * (self.kernel[dim] - 1)).checked_sub(self.pads[dim]);
        let pads = [around(0)?, around(1)?, around(2)?];
        (self.strides == [1; 3]).then_some(Window {
            input: self.output,
            output: self.input,
            pads,
            pads_end: [0; 3],
            ..*self
        })
    }

    /// The rows of a plane that any windows read at some lines of their taps.
    pub fn rows_under(&self, lines: Range<usize>) -> Range<usize> {
        let reach = (self.output[1].max(1) - 1) * self.strides[1];
        let inside = |row: usize| row.saturating_sub(self.pads[1]).min(self.input[1]);
        let start = inside(lines.start * self.dilations[1]);
        start..inside((lines.end - 1) * self.dilations[1] + reach + 1).max(start)
    }

    /// Elements of one output plane.
    pub fn output_len(&self) -> usize {
        self.output.iter().product()
    }

    /// Elements of one input plane.
    pub fn input_len(&self) -> usize {
        self.input.iter().product()
    }

    /// Taps of the kernel.
    pub fn taps(&self) -> usize {
        self.kernel.iter().product()
    }

    /// Rows of one output plane: depth times height.
    pub fn rows(&self) -> usize {
        self.output[0] * self.output[1]
    }

    /// Planes that a slide computes together, as far as there are so many.
    pub fn together(&self) -> usize {
        let is_short = self.output[2] <= SHORT && self.input_len().max(self.output_len()).max(self.taps()) <= SMALL;
        if is_short { SIDE_BY_SIDE } else { 1 }
    }

    /// Output rows that are handed to the epilogue together.
    pub fn band(&self) -> usize {
        (BAND / self.output[2].max(1)).clamp(1, self.rows().max(1))
    }

    /// Bytes of workspace that one call of a slide needs; each thread needs its own.
    pub fn workspace_bytes(&self) -> usize {
        if self.together() > 1 {
            return 4 * SIDE_BY_SIDE * (self.input_len() + self.taps() + self.output_len());
        }
        let ring = self.ring();
        4 * ((self.kernel[0] * ring.rows + 1) * ring.pitch + self.output[2].next_multiple_of(WIDEST))
    }

    pub fn ring(&self) -> Ring {
        let [_, kernel, width_kernel] = self.kernel;
        let rows = (kernel.max(1) - 1) * self.dilations[1] + 1 + (TILES.max(TALL) - 1) * self.strides[1];
        let reach = (width_kernel.max(1) - 1) * self.dilations[2] / self.strides[2] + 1;
        let phase = (self.output[2].next_multiple_of(WIDEST) + reach).next_multiple_of(WIDEST);
        Ring { rows: rows.min(self.input[1]).next_power_of_two(), phase, pitch: phase * self.strides[2] }
    }
}
