//! The shapes of convolutions on the CPU: which way they are computed, and what packed weights and workspaces take.

use super::gemm::{self, Depth, Form, Plain};
use super::window::Window;
use crate::dtype::DType;
use crate::kernel::algorithm::Way;
use std::ops::Range;

/// Taps and positions are tracked in vectors of this many lanes.
pub const LANES: usize = 16;
/// Bytes of a word.
const WORD: usize = 4;
/// Images of fewer positions than this go into one product of a transposed convolution.
const TOGETHER: usize = 64;

/// The elements of a convolution of bytes, whose sums are of `i32`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bytes {
    /// True if the data are of `u8` and the weights of `i8`; else it is the other way round.
    pub unsigned_data: bool,
    /// The element around the data.
    pub padding: i32,
}

/// A plane of bytes with its padding around it, over which a depthwise convolution slides.
#[derive(Clone, Copy, Debug)]
pub struct Padded {
    pub rows: usize,
    /// Bytes from one row to the next.
    pub pitch: usize,
}

impl Padded {
    /// The plane under a window, if it is flat and square, of a usual size and stride.
    pub fn under(w: &Window) -> Option<Padded> {
        let is_flat = [w.input[0], w.output[0], w.kernel[0]] == [1; 3] && w.pads[0] == 0;
        let is_square = w.kernel[1] == w.kernel[2] && w.strides[1] == w.strides[2] && w.dilations[1..] == [1, 1];
        let is_usual = matches!(w.kernel[1], 3 | 5 | 7) && matches!(w.strides[1], 1 | 2);
        let len = |dim: usize| w.output[dim].saturating_sub(1) * w.strides[dim] + w.kernel[dim];
        (is_flat && is_square && is_usual).then(|| Padded { rows: len(1), pitch: len(2) })
    }

    /// Bytes of the plane. Vectors that begin in it are read as a whole, from up to a word further.
    pub fn bytes(&self) -> usize {
        (self.rows * self.pitch + 4 + 4 * LANES).next_multiple_of(4 * LANES)
    }
}

/// The shapes of a convolution. Weights are `[out_channels, in_channels / groups, kernel]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Conv {
    /// Images.
    pub batch: usize,
    /// Input channels.
    pub in_channels: usize,
    /// Output channels.
    pub out_channels: usize,
    /// Groups; they divide both channel counts.
    pub groups: usize,
    /// Geometry of one plane.
    pub window: Window,
    /// How it is computed.
    pub way: Way,
    /// The elements, if they are bytes: then it is depthwise, or has its weights on the left.
    pub bytes: Option<Bytes>,
    /// The type of the packed weights, if they are halves.
    pub halves: Option<DType>,
}

impl Conv {
    /// Products per sum.
    pub fn terms(&self) -> usize {
        self.in_channels / self.groups * self.window.taps()
    }

    /// True if a product of bytes walks through the channels under one tap, and then through those under the next one: each word has four
    /// channels of one position. It takes more words where there are few channels.
    pub fn is_by_tap(&self) -> bool {
        let (channels, taps) = (self.in_channels / self.groups, self.window.taps());
        let few = 3 * taps * channels.div_ceil(WORD) <= 4 * (taps * channels).div_ceil(WORD);
        self.bytes.is_some() && self.way == Way::WeightsLeft && channels > 0 && few
    }

    /// The terms of a sum, in the order in which a product walks through them.
    fn depth(&self) -> Depth {
        let (channels, taps) = (self.in_channels / self.groups, self.window.taps());
        if self.is_by_tap() {
            Depth { stretches: (taps, 1), elements: (channels, taps as isize) }
        } else {
            Depth::even(channels * taps, 1)
        }
    }

    /// The type that packed weights are laid out for.
    fn packed_dtype(&self) -> DType {
        if self.bytes.is_some() { DType::I8 } else { self.halves.unwrap_or(DType::F32) }
    }

    /// Planes that a depthwise convolution computes together: each has a filter of its own, and so has its plane of the data.
    pub fn together(&self) -> usize {
        if self.out_channels == self.groups { self.window.together() } else { 1 }
    }

    /// Floats of workspace in which a depthwise convolution of bytes has the taps of the filters, and with how many more the planes.
    pub fn widened(&self) -> (usize, usize) {
        let up = |len: usize| (self.together() * len).next_multiple_of(LANES);
        if self.bytes.is_some() { (up(self.window.taps()), up(self.window.input_len())) } else { (0, 0) }
    }

    /// Bytes in which a depthwise convolution has the planes that it slides over, in whichever form the CPU's instructions read.
    pub fn planes_bytes(&self) -> usize {
        let (taps, plane) = self.widened();
        let padded =
            self.bytes.and_then(|_| Padded::under(&self.window)).map_or(0, |padded| self.together() * padded.bytes());
        padded.max(self.window.workspace_bytes() + 4 * (taps + plane))
    }

    /// True if every output position reads the input position of the same number and no other.
    pub fn is_pointwise(&self) -> bool {
        let w = &self.window;
        w.taps() == 1 && w.strides == [1; 3] && w.pads == [0; 3] && w.input == w.output
    }

    /// Rows, columns and depth of the matrix product of one group of one image, or of all images. The depth counts elements of 4 bytes.
    pub fn product(&self) -> (usize, usize, usize) {
        let (outputs, positions) = (self.out_channels / self.groups, self.window.output_len());
        let Depth { stretches: (stretches, _), elements: (each, _) } = self.depth();
        // Halves are widened before they are multiplied.
        let k = stretches * each.div_ceil(if self.bytes.is_some() { WORD } else { 1 });
        match self.way {
            Way::Depthwise | Way::WeightsLeft => (outputs, positions, k),
            Way::WeightsRight => (positions, outputs, k),
            Way::WholeBatch if self.lanes_are_images() => (outputs, self.batch.next_multiple_of(LANES) * positions, k),
            Way::WholeBatch => (outputs, self.batch * positions, k),
        }
    }

    /// True if a vector of a product over the whole batch holds one position of [`LANES`] images, so that the columns are `(images / LANES,
    /// position, image)` and some of the last ones stand for no image. Otherwise they are `(image, position)`.
    pub fn lanes_are_images(&self) -> bool {
        let columns = (self.batch.next_multiple_of(LANES), self.batch.max(1));
        let is_flat = self.window.input[0] == 1 && self.window.kernel[0] == 1;
        self.way == Way::WholeBatch && is_flat && self.out_channels > self.groups && 5 * columns.0 <= 6 * columns.1
    }

    /// The rows of the image, counted over all channels, that any windows read at the taps of a range of `k`.
    pub fn rows_read(&self, k: &Range<usize>) -> Range<usize> {
        let w = &self.window;
        let (height, tap) = (w.input[1], |at: usize| (at / w.taps(), at % w.taps() / w.kernel[2]));
        if k.is_empty() {
            return 0..0;
        }
        let ((first, low), (last, high)) = (tap(k.start), tap(k.end - 1));
        let (low, high) = (w.rows_under(low..low + 1).start, w.rows_under(high..high + 1).end);
        let (low, high) = (first * height + low, last * height + high);
        low..high.max(low)
    }

    /// Floats of the rows of [`LANES`] images, image by image within an element, of which the panels of a block of `k` are made. None if a
    /// panel is made of the images as they are.
    pub fn transposed_len(&self) -> usize {
        let w = &self.window;
        if !self.lanes_are_images() || w.taps() == 0 || w.covers() {
            return 0;
        }
        let (m, n, k) = self.product();
        let depth = gemm::Layout::new(m, n, k, true, true, true).depth;
        let within = |units: usize| depth.saturating_sub(2) / units + 2;
        let planes = within(w.taps()).min(self.in_channels / self.groups);
        let taps = within(w.kernel[2]).min(planes * w.kernel[1]);
        let reach = ((w.output[1].max(1) - 1) * w.strides[1] + 1).saturating_sub(w.dilations[1]);
        let rows = (taps * w.dilations[1] + planes * reach).min(planes * w.input[1]);
        rows * w.input[2] * LANES
    }

    /// Lines of the filters that a product of single filters treats together with channels as its lanes: as many as there is room for where a
    /// product has its panels. None if a channel's line, or all of its plane, fills the vectors better.
    pub fn lines_by_lane(&self) -> usize {
        let ((m, n, k), w) = (self.product(), &self.window);
        let is_flat = w.input[0] == 1 && w.kernel[0] == 1;
        if m != 1 || self.batch != 1 || !is_flat || w.covers() || 2 * self.in_channels < LANES * self.groups {
            return 0;
        }
        let room = gemm::workspace_bytes(m, n, k, false, false, false) / 4 / LANES;
        let len = |lines: usize| {
            let reach = (w.output[1].max(1) - 1) * w.strides[1] + (lines - 1) * w.dilations[1] + 1;
            lines * w.kernel[2] + reach.min(w.input[1]) * w.input[2]
        };
        (1..=w.kernel[1]).rev().find(|&lines| len(lines) <= room).unwrap_or(0)
    }

    /// Bytes of the packed weights; none if they are read where they are.
    pub fn packed_weight_bytes(&self) -> usize {
        let (m, n, k) = self.product();
        let k = if self.halves.is_some() { k.div_ceil(2) } else { k };
        match self.way {
            Way::Depthwise => 4 * self.out_channels * k,
            Way::WeightsLeft => self.groups * gemm::packed_a_bytes(m, k),
            Way::WeightsRight => self.groups * gemm::packed_b_bytes(k, n),
            Way::WholeBatch => 0,
        }
    }

    /// Packs what a part has of dense weights that start at element `start`.
    pub fn pack(&self, from: Plain, start: isize, to: &mut [u8]) {
        let (m, n, _) = self.product();
        let (outputs, terms) = (self.out_channels / self.groups, self.terms());
        let [left, right] = [0, 1].map(|operand| Form::of(operand, self.packed_dtype()));
        let size = (self.packed_weight_bytes() / self.groups).max(1);
        let depth = self.depth();
        for (group, to) in to.chunks_exact_mut(size).enumerate() {
            let start = start + (group * outputs * terms) as isize;
            match self.way {
                Way::Depthwise => {
                    gemm::pack_lines(from, start, (outputs, terms as isize), depth, Form { unit: 1, ..left }, to)
                }
                Way::WeightsLeft => gemm::pack_lines(from, start, (m, terms as isize), depth, left, to),
                Way::WeightsRight => gemm::pack_lines(from, start, (n, terms as isize), depth, right, to),
                Way::WholeBatch => {}
            }
        }
    }

    /// Bytes of workspace that one call of [`Conv`] needs; each thread needs its own. `direct`: the result goes to an image, not to
    /// the epilogue alone.
    pub fn workspace_bytes(&self, direct: bool) -> usize {
        let (m, n, k) = self.product();
        match self.way {
            Way::Depthwise => {
                let band = if direct { 0 } else { self.together() * self.window.band() * self.window.output[2] };
                self.planes_bytes() + 4 * band
            }
            Way::WeightsLeft if self.bytes.is_some() => gemm::Layout::of_bytes(m, n, k, false, true, !direct).bytes(),
            Way::WeightsLeft => gemm::workspace_bytes(m, n, k, self.halves.is_none(), false, direct),
            Way::WeightsRight => {
                gemm::workspace_bytes(m, n, k, false, self.halves.is_none(), false)
                    + if direct { 0 } else { 4 * self.transposed() }
            }
            Way::WholeBatch => gemm::workspace_bytes(m, n, k, false, false, false) + 4 * self.transposed_len(),
        }
    }

    /// Elements of the largest tile with weights on the right.
    pub fn transposed(&self) -> usize {
        let (m, n, _) = self.product();
        m * n.next_multiple_of(LANES)
    }
}

/// The shapes of a transposed convolution: the gradient of a [`Conv`] with respect to its input. The window is that convolution's, so its
/// `input` is this one's output. Weights are `[in_channels, out_channels / groups, kernel]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConvTranspose {
    /// Images.
    pub batch: usize,
    /// Input channels.
    pub in_channels: usize,
    /// Output channels.
    pub out_channels: usize,
    /// Groups; they divide both channel counts.
    pub groups: usize,
    /// The window that slides over an output plane, one step per input position.
    pub window: Window,
}

impl ConvTranspose {
    /// Output channels that are computed together.
    pub fn block(&self) -> usize {
        (96 / self.window.taps().max(1)).clamp(1, (self.out_channels / self.groups).max(1))
    }

    pub fn blocks(&self) -> usize {
        (self.out_channels / self.groups).div_ceil(self.block())
    }

    /// Images whose positions are the columns of one product: several small ones, which alone would not fill the vectors, and for each of
    /// which all weights would be read again.
    pub fn together(&self) -> usize {
        let positions = self.window.output_len().max(1);
        if self.in_channels == self.groups { 1 } else { (TOGETHER / positions).clamp(1, self.batch.max(1)) }
    }

    /// Bytes of the packed weights.
    pub fn packed_weight_bytes(&self) -> usize {
        gemm::packed_a_bytes(self.out_channels * self.window.taps(), self.in_channels / self.groups)
    }

    /// Packs what a part has of dense weights that start at element `start`.
    pub fn pack(&self, from: Plain, start: isize, mut to: &mut [u8]) {
        let (inputs, outputs) = (self.in_channels / self.groups, self.out_channels / self.groups);
        let taps = self.window.taps();
        for group in 0..self.groups {
            for first in (0..outputs).step_by(self.block()) {
                let rows = self.block().min(outputs - first) * taps;
                let (block, after) = to.split_at_mut(gemm::packed_a_bytes(rows, inputs));
                let start = start + ((group * inputs * outputs + first) * taps) as isize;
                let step = (outputs * taps) as isize;
                gemm::pack_lines(from, start, (rows, 1), Depth::even(inputs, step), Form::of(0, DType::F32), block);
                to = after;
            }
        }
    }

    /// Bytes of workspace that one call of [`ConvTranspose`] needs; each thread needs its own.
    pub fn workspace_bytes(&self) -> usize {
        let rows = |channels: usize| channels * self.window.taps();
        let columns = self.together() * self.window.output_len();
        let bytes = |m: usize| gemm::workspace_bytes(m, columns, self.in_channels / self.groups, true, false, false);
        let last = self.out_channels / self.groups % self.block();
        bytes(rows(self.block())).max(bytes(rows(last)))
    }
}
