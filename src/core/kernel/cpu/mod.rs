//! The memory that kernels use beyond their operands, from shapes alone: the CPU's packed constants, and workspaces.
//!
//! Planning asks here, and the CPU backend obeys. A kernel's needs follow from the kernel and the target. They are the same on every
//! machine and for every instruction set.

use super::algorithm::{Cpu, Schedule, Way};
use super::{Kernel, Operand, Pool, Template};
use crate::dtype::DType;
use crate::expr::Code;
use crate::shape::Access;
use std::borrow::Cow;
use std::ops::Range;

pub mod attention;
pub mod conv;
pub mod gemm;
pub mod window;

use attention::Attention;
use conv::{Bytes, Conv, ConvTranspose};
pub use gemm::Plain;
use gemm::{Depth, Form, Layout, pack_lines, packed_a_bytes, packed_b_bytes, together};
use window::Window;

/// A workspace: bytes that all threads share, and as many slots as threads can use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Slots {
    /// Bytes in front that all threads share; a multiple of 64.
    pub shared: u64,
    /// Bytes of each slot; a multiple of 64.
    pub each: u64,
    /// Number of slots.
    pub count: u64,
}

impl Slots {
    fn new(shared: usize, each: usize, count: usize) -> Slots {
        let up = |bytes: usize| (bytes as u64).next_multiple_of(64);
        Slots { shared: up(shared), each: up(each), count: count as u64 }
    }

    /// True if the workspace fits a thread's tile memory.
    pub fn in_tile(&self) -> bool {
        self.shared == 0 && self.each <= TILE_BYTES
    }

    /// Bytes altogether.
    pub fn total(&self) -> u64 {
        self.shared + self.each * self.count
    }
}

/// The workspace of a well-formed kernel on the CPU, shared and per thread.
pub fn slots(kernel: &Kernel) -> Slots {
    let Schedule::Cpu(cpu) = kernel.schedule else { return Slots::default() };
    let threads = cpu.threads() as usize;
    match (cpu, &kernel.template) {
        (Cpu::Attention { strip, .. }, Template::Attention { .. }) => {
            Slots::new(0, Attention::new(kernel, strip).slot_bytes(), threads)
        }
        (Cpu::Matmul { .. }, Template::MatMul | Template::MatMulBits { .. }) => {
            Slots::new(0, Product::new(kernel).slot_bytes(), threads)
        }
        (Cpu::Conv { .. } | Cpu::Window { .. }, _) => {
            let slots = |w: Windowed| Slots::new(w.shared_bytes(), w.slot_bytes(), threads);
            Windowed::new(kernel).map(slots).unwrap_or_default()
        }
        (Cpu::Sort { .. }, Template::Sort { .. }) => {
            let size = if kernel.reads[0].dtype.size() > 4 { size_of::<u128>() } else { size_of::<u64>() };
            Slots::new(0, candidates(kernel) * size, threads)
        }
        _ => Slots::default(),
    }
}

/// The candidates for which a thread that sorts a group has room: all elements, or where few are kept, some more than these.
pub fn candidates(kernel: &Kernel) -> usize {
    const FEW: usize = 1 << 10;
    let &Template::Sort { given, runs, .. } = &kernel.template else { return 0 };
    let rank = kernel.shape.len();
    let (all, kept) = (if given { kernel.reads[1].access.shape[rank] } else { 1 } * runs, kernel.shape[rank - 1]);
    all.min((2 * kept).max(FEW))
}

/// The most bytes of tile memory per thread of the CPU backend, as a workgroup of a GPU has shared memory. Blocks of operands are packed
/// there on their way into the registers.
pub const TILE_BYTES: u64 = 256 << 10;

/// Bytes of workspace that a kernel needs: none when its slots fit into the threads' tile memory.
pub fn workspace(kernel: &Kernel) -> u64 {
    let slots = slots(kernel);
    if slots.in_tile() { 0 } else { slots.total() }
}

/// Bytes of the packed form of a constant operand on the CPU, if the kernel's template has one for it.
pub fn packed_bytes(kernel: &Kernel, operand: usize) -> Option<u64> {
    let access = &kernel.reads.get(operand)?.access;
    let rank = access.shape.len();
    let bytes = match (&kernel.template, operand) {
        (Template::MatMul, 0 | 1) if rank >= 2 => {
            let (rows, cols) = (access.shape[rank - 2], access.shape[rank - 1]);
            matrices(access, 0..rank - 2) * matrix_bytes(operand, kernel.reads[operand].dtype, rows, cols)
        }
        (Template::Conv { .. } | Template::ConvTranspose { .. }, 1) => {
            let windowed = Windowed::new(kernel).ok()?;
            // Flipped filters are those of gradients, and never constant.
            if windowed.flipped || !windowed.packs_weights() {
                return None;
            }
            windowed.packed_bytes()
        }
        _ => return None,
    };
    Some(bytes as u64)
}

/// Bytes of a packed matrix, the left or the right operand of a product.
fn matrix_bytes(operand: usize, dtype: DType, rows: usize, cols: usize) -> usize {
    let words = |elements: usize| elements.div_ceil(together(dtype));
    if operand == 0 { packed_a_bytes(rows, words(cols)) } else { packed_b_bytes(words(rows), cols) }
}

/// True if the template has packed forms for this operand, whatever the schedule.
pub fn has_packed_forms(template: &Template, operand: usize) -> bool {
    match template {
        Template::MatMul => true,
        Template::Conv { .. } | Template::ConvTranspose { .. } => operand == 1,
        _ => false,
    }
}

/// True if a constant operand can be [packed](pack) part by part.
pub fn packs_in_parts(kernel: &Kernel, operand: usize) -> bool {
    let access = &kernel.reads[operand].access;
    access.strides.iter().all(|&s| s >= 0) && (kernel.template == Template::MatMul || access.is_contiguous())
}

/// Writes the packed form of a constant operand, whose buffer is given: as a whole, or part by part over zeros.
///
/// # Panics
/// When `packed` has not [`packed_bytes`], or the operand reaches outside its buffer. When a part is given of an operand that cannot be
/// [packed in parts](packs_in_parts).
pub fn pack(kernel: &Kernel, operand: usize, from: Plain, packed: &mut [u8]) {
    assert_eq!(packed_bytes(kernel, operand), Some(packed.len() as u64), "the bytes of the packed form");
    let access = &kernel.reads[operand].access;
    match &kernel.template {
        Template::MatMul => {
            let batch = access.shape.len() - 2;
            let (rows, cols) = (access.shape[batch], access.shape[batch + 1]);
            let (rs, cs) = (access.strides[batch], access.strides[batch + 1]);
            let dtype = kernel.reads[operand].dtype;
            let (size, form) = (matrix_bytes(operand, dtype, rows, cols), Form::of(operand, dtype));
            // Where matrices start that are not repeated.
            let moving: Vec<usize> = (0..batch).filter(|&k| access.strides[k] != 0).collect();
            let starts = access.permute(&moving);
            for (start, matrix) in starts.elements().zip(packed.chunks_exact_mut(size.max(1))) {
                match operand {
                    0 => pack_lines(from, start, (rows, rs), Depth::even(cols, cs), form, matrix),
                    _ => pack_lines(from, start, (cols, cs), Depth::even(rows, rs), form, matrix),
                }
            }
        }
        _ => {
            let windowed = Windowed::new(kernel).expect("a kernel with a packed form is well-formed");
            if access.is_contiguous() {
                windowed.pack(from, access.offset, packed);
            } else {
                assert_eq!(from.first, 0, "weights that do not lie one after another are packed as a whole");
                let dense = gather(access, kernel.reads[operand].dtype.size(), from.bytes);
                windowed.pack(Plain::whole(&dense), 0, packed);
            }
        }
    }
}

/// The matrices of an access without the batch axes along which they are repeated.
pub fn unrepeated(access: &Access) -> Access {
    let batch = access.shape.len().saturating_sub(2);
    let moves = |k: &usize| *k >= batch || access.strides[*k] != 0;
    let kept: Vec<usize> = (0..access.shape.len()).filter(moves).collect();
    access.permute(&kept)
}

/// True if two kernels want the same bytes of a constant operand that is packed for both.
pub fn packs_alike(a: &Kernel, b: &Kernel, operand: usize) -> bool {
    if a.template == Template::MatMul {
        let form =
            |kernel: &Kernel| kernel.reads.get(operand).map(|read| (read.dtype, read.packed, unrepeated(&read.access)));
        return a.template == b.template && form(a) == form(b);
    }
    if a.reads.get(operand) != b.reads.get(operand) {
        return false;
    }
    let weights = |kernel: &Kernel| {
        let windowed = Windowed::new(kernel).ok()?;
        let transposed = matches!(windowed.slide, Slide::Conv(conv) if conv.way == Way::WeightsRight);
        Some((transposed, windowed.packed_bytes()))
    };
    a.template == b.template && weights(a).is_some_and(|a| weights(b) == Some(a))
}

/// The elements of an access, of `size` bytes each, row-major.
fn gather(access: &Access, size: usize, bytes: &[u8]) -> Vec<u8> {
    access.elements().flat_map(|element| &bytes[size * element as usize..][..size]).copied().collect()
}

/// True if two accesses of one shape put every index at the same element.
pub fn same_elements(a: &Access, b: &Access) -> bool {
    let steps = |access: &Access| -> Vec<(usize, usize, isize)> {
        let axes = access.shape.iter().zip(&access.strides).enumerate();
        axes.filter(|(_, (d, _))| **d != 1).map(|(k, (&d, &s))| (k, d, s)).collect()
    };
    a.offset == b.offset && steps(a) == steps(b)
}

/// The reads of which none may lie where the result does, for it to be collected there: partial sums overwrite the destination before the body
/// has read its operands. `None` if the destination cannot hold them.
fn reads_in_the_way(kernel: &Kernel, fits: impl Fn(&Operand) -> bool) -> Option<Vec<usize>> {
    let [write] = &kernel.writes[..] else { return None };
    let multiplies = matches!(kernel.template, Template::MatMul | Template::Conv { .. });
    let sums_bytes = multiplies && kernel.core_dtype() == DType::I32;
    let holds = write.dtype == DType::F32 || sums_bytes && write.dtype == DType::I32;
    let alike = |&read: &usize| same_elements(&kernel.reads[read].access, &write.access);
    (holds && fits(write)).then(|| kernel.further().filter(alike).collect())
}

/// A batch axis of a product.
#[derive(Clone, Debug, PartialEq)]
pub struct BatchAxis {
    /// Extent.
    pub dim: usize,
    /// The kernel's axis.
    pub axis: usize,
    /// Step of both operands, in elements, or in matrices when they are packed.
    pub steps: [isize; 2],
}

/// The right operand of a product. One of numbers of few bits is the matrix that they are in floats: it need not exist.
pub fn right_matrix(kernel: &Kernel) -> Cow<'_, Operand> {
    if !matches!(kernel.template, Template::MatMulBits { .. }) {
        return Cow::Borrowed(&kernel.reads[1]);
    }
    let (rank, mut shape) = (kernel.shape.len(), kernel.shape.clone());
    let k = kernel.reads[0].access.shape[rank - 1];
    shape[rank - 2] = k;
    let mut access = Access::contiguous(shape);
    access.strides.iter_mut().for_each(|stride| *stride = 0);
    (access.strides[rank - 2], access.strides[rank - 1]) = (1, k as isize);
    Cow::Owned(Operand { dtype: DType::F32, access, packed: false })
}

/// A [`Template::MatMul`] or [`Template::MatMulBits`] kernel as a batch of matrix products.
#[derive(Clone, Debug, PartialEq)]
pub struct Product {
    /// Batch axes that remain after those that only lengthen the rows were joined with them.
    pub batch: Vec<BatchAxis>,
    /// The kernel's axis whose steps lead from row to row.
    pub row_axis: usize,
    /// Rows of the left operand and the result.
    pub m: usize,
    /// Columns of the right operand and the result.
    pub n: usize,
    /// Columns of the left operand, rows of the right one.
    pub depth: usize,
    /// The same, counted in elements of 4 bytes, each of which holds [several](gemm::together) elements.
    pub k: usize,
    /// True for the left and for the right operand, in this order, if it is packed as it is multiplied.
    pub packed: [bool; 2],
    /// True for the left and for the right operand if it is packed, in halves: panels of it are widened.
    pub halves: [bool; 2],
    /// True if the operands are bytes.
    pub of_bytes: bool,
    /// True if the result is collected in its destination, rather than tile by tile in the workspace.
    pub direct: bool,
    /// Reads that may share the destination's bytes. A launch in which none of them does collects its result there, too.
    pub sharing: Vec<usize>,
    /// True if the columns of the result are next to each other there. Others are collected in the workspace.
    pub dense: bool,
}

impl Product {
    /// Takes a matrix product apart, which is [well-formed](Kernel::validate).
    pub fn new(kernel: &Kernel) -> Product {
        let Kernel { shape, reads, writes, .. } = kernel;
        let (rank, a, b) = (shape.len(), &reads[0], &*right_matrix(kernel));
        let (batch, m, n, depth) = (rank - 2, shape[rank - 2], shape[rank - 1], a.access.shape[rank - 1]);
        let further = &reads[kernel.further()];
        let [own_left, own_right] = [0, 1].map(|o| kernel.prologue(o).map_or(&[][..], |(_, own)| &reads[own]));
        // Batch axes along which the right operand stands still only lengthen the rows, from the innermost outwards. A single row has no
        // step, so its step cannot be wrong. A body that uses the index needs the axes apart.
        let indexed = kernel.body.code.iter().any(|i| matches!(i.code, Code::Index(_)));
        let (mut row_axis, mut rows, mut joining) = (batch, m, m > 0 && !a.packed);
        let mut separate = Vec::new();
        for axis in (0..batch).rev().filter(|&axis| shape[axis] != 1) {
            let lengthens = |access: &Access| {
                rows == 1 || Some(access.strides[axis]) == access.strides[row_axis].checked_mul(rows as isize)
            };
            joining &= own_right.iter().chain([b]).all(|o| o.access.strides[axis] == 0)
                && (rows == 1 || !indexed)
                && own_left.iter().chain([a]).chain(further).chain(writes).all(|o| lengthens(&o.access));
            if !joining {
                separate.insert(0, axis);
                continue;
            }
            if rows == 1 {
                row_axis = axis;
            }
            rows *= shape[axis];
        }
        let rows_dense = |w: &Operand| w.access.strides[rank - 1] == 1 && w.access.strides[row_axis] >= 0;
        let plain = kernel.body.is_identity();
        let sharing = reads_in_the_way(kernel, |w| plain || rows_dense(w));
        let direct = sharing.as_ref().is_some_and(Vec::is_empty);
        // Bytes are cut into other tiles then.
        let sharing = sharing.filter(|_| !a.dtype.is_byte()).unwrap_or_default();
        let dense = n == 1 || writes[0].access.strides[rank - 1] == 1;
        let batch_axis = |axis: usize| {
            let steps = [a, b].map(|o| match o.access.strides[axis] {
                0 => 0,
                _ if o.packed => matrices(&o.access, axis + 1..batch) as isize,
                step => step,
            });
            BatchAxis { dim: shape[axis], axis, steps }
        };
        let batch = separate.into_iter().map(batch_axis).collect();
        let k = if a.dtype.is_byte() { depth.div_ceil(together(a.dtype)) } else { depth };
        let halves = [a, b].map(|o| o.packed && o.dtype.is_half());
        let packed = [0, 1].map(|o| [a, b][o].packed && !halves[o]);
        let of_bytes = a.dtype.is_byte();
        Product { batch, row_axis, m: rows, n, depth, k, packed, halves, of_bytes, direct, sharing, dense }
    }

    /// Number of matrices.
    pub fn count(&self) -> usize {
        self.batch.iter().map(|axis| axis.dim).product()
    }

    /// About how long one thread takes.
    pub fn nanoseconds(&self) -> f64 {
        self.count() as f64 * self.m as f64 * self.n as f64 * self.k as f64 / 50.0
    }

    fn slot_bytes(&self) -> usize {
        let [pack_a, pack_b] = self.packed.map(|packed| !packed);
        let layout = if self.of_bytes { Layout::of_bytes } else { Layout::new };
        layout(self.m, self.n, self.k, pack_a, pack_b, !(self.direct && self.dense)).bytes()
    }
}

/// The number of different matrices of an operand over these batch axes.
fn matrices(access: &Access, axes: Range<usize>) -> usize {
    axes.filter(|&k| access.strides[k] != 0).map(|k| access.shape[k]).product()
}

/// The operation of a window.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Slide {
    /// A convolution.
    Conv(Conv),
    /// A transposed convolution.
    ConvTranspose(ConvTranspose),
    /// A reduction of the window's elements.
    Pool(Pool),
}

/// A kernel with a window over images.
#[derive(Clone, Debug, PartialEq)]
pub struct Windowed {
    /// The operation of the window.
    pub slide: Slide,
    /// Its geometry over the input (over the output, for a transposed convolution).
    pub window: Window,
    /// Images and channels of the output.
    pub planes: [usize; 2],
    /// Elements between images and between channels of the input.
    pub input: [usize; 2],
    /// The same of the output, if the result is collected in its destination.
    pub direct: Option<[usize; 2]>,
    /// Reads that may share the destination's bytes, and the same of the output for launches in which none of them does: those collect their
    /// results there, too.
    pub sharing: Option<(Vec<usize>, [usize; 2])>,
    /// True if the weights are packed.
    pub packed: bool,
    /// True if unpacked weights lie row-major, and are floats.
    pub dense: bool,
    /// True for a transposed convolution that is computed as a convolution, by its filters flipped.
    pub flipped: bool,
}

impl Windowed {
    /// Takes a kernel with a window apart, which is [well-formed](Kernel::validate).
    ///
    /// # Errors
    /// When the kernel has no window, its planes have gaps, or its schedule is not the CPU's.
    pub fn new(kernel: &Kernel) -> Result<Windowed, String> {
        let Kernel { template, shape, reads, writes, .. } = kernel;
        let (window, pads_end) = match template {
            Template::Conv { window, .. } | Template::ConvTranspose { window, .. } => (window, [0; 3]),
            Template::Pool { window, pool: Pool::MeanPadded { pads_end } } => (window, *pads_end),
            Template::Pool { window, .. } => (window, [0; 3]),
            _ => return Err("a kernel without a window".into()),
        };
        let (core, data) = (template.core_reads(), &reads[0].access);
        let images = image_steps(data).ok_or("a window over planes with gaps")?;
        let [input, output] = [&data.shape, shape].map(|s| [s[2], s[3], s[4]]);
        let transposed = matches!(template, Template::ConvTranspose { .. });
        let (input, output) = if transposed { (output, input) } else { (input, output) };
        let window = Window {
            input,
            output,
            kernel: window.kernel,
            strides: window.strides,
            dilations: window.dilations,
            pads: window.pads,
            pads_end,
        };
        let (batch, in_channels, out_channels) = (shape[0], data.shape[1], shape[1]);
        let mut flipped = false;
        let slide = match (template, &kernel.schedule) {
            (&Template::Conv { groups, padding, .. }, &Schedule::Cpu(Cpu::Conv { way, .. })) => {
                let bytes = Bytes { unsigned_data: reads[0].dtype == DType::U8, padding };
                let bytes = reads[0].dtype.is_byte().then_some(bytes);
                let halves = Some(reads[1].dtype).filter(|dtype| dtype.is_half());
                Slide::Conv(Conv { batch, in_channels, out_channels, groups, window, way, bytes, halves })
            }
            (&Template::ConvTranspose { groups, .. }, &Schedule::Cpu(Cpu::Conv { way, .. })) => {
                flipped = true;
                let window =
                    window.flipped().ok_or("a transposed convolution with strides, or one that cuts its result")?;
                Slide::Conv(Conv { batch, in_channels, out_channels, groups, window, way, bytes: None, halves: None })
            }
            (&Template::ConvTranspose { groups, .. }, _) => {
                Slide::ConvTranspose(ConvTranspose { batch, in_channels, out_channels, groups, window })
            }
            (&Template::Pool { pool, .. }, _) => Slide::Pool(pool),
            _ => return Err("a convolution whose schedule is not the CPU's".into()),
        };
        let window = if let Slide::Conv(conv) = slide { conv.window } else { window };
        let sharing = reads_in_the_way(kernel, |w| image_steps(&w.access).is_some());
        let steps = image_steps(&writes[0].access);
        let (direct, sharing) = match (sharing, steps) {
            (Some(sharing), Some(steps)) if sharing.is_empty() => (Some(steps), None),
            // Bytes are cut into other tiles then.
            (Some(sharing), Some(steps)) if !reads[0].dtype.is_byte() => (None, Some((sharing, steps))),
            _ => (None, None),
        };
        Ok(Windowed {
            slide,
            window,
            planes: [batch, out_channels],
            input: images,
            direct,
            sharing,
            packed: core > 1 && reads[1].packed,
            dense: core > 1 && reads[1].access.is_contiguous() && !reads[1].dtype.is_byte(),
            flipped,
        })
    }

    /// About how long one thread takes.
    pub fn nanoseconds(&self) -> f64 {
        let [n, channels] = self.planes.map(|d| d as f64);
        let (positions, taps) = (self.window.output_len() as f64, self.window.taps() as f64);
        match self.slide {
            Slide::Conv(conv) => {
                let words = if conv.bytes.is_some() && conv.way != Way::Depthwise { 0.25 } else { 1.0 };
                let depth = (conv.in_channels / conv.groups) as f64 * taps * words;
                let rate = if conv.way == Way::Depthwise { 10.0 } else { 50.0 };
                n * channels * positions * depth / rate
            }
            Slide::ConvTranspose(conv) => {
                n * channels * (conv.in_channels / conv.groups) as f64 * taps * positions / 20.0
            }
            Slide::Pool(_) => n * channels * positions * taps / 10.0,
        }
    }

    /// True if the weights of a kernel are packed before they are read.
    pub fn packs_weights(&self) -> bool {
        !matches!(self.slide, Slide::Pool(_) | Slide::Conv(Conv { way: Way::WholeBatch, .. }))
    }

    /// Bytes of the packed weights.
    pub fn packed_bytes(&self) -> usize {
        match self.slide {
            Slide::Conv(conv) => conv.packed_weight_bytes(),
            Slide::ConvTranspose(conv) => conv.packed_weight_bytes(),
            Slide::Pool(_) => 0,
        }
    }

    /// Weights that come unpacked are packed before each use, and made dense before that.
    fn shared_bytes(&self) -> usize {
        match (self.packed || !self.packs_weights(), self.dense) {
            (true, _) => 0,
            (false, true) => self.packed_bytes(),
            (false, false) => 2 * self.packed_bytes().next_multiple_of(64),
        }
    }

    fn slot_bytes(&self) -> usize {
        let direct = self.direct.is_some();
        match self.slide {
            Slide::Conv(conv) => conv.workspace_bytes(direct),
            Slide::ConvTranspose(conv) => {
                conv.workspace_bytes().next_multiple_of(64)
                    + if direct { 0 } else { 4 * conv.together() * conv.block() * self.window.input_len() }
            }
            Slide::Pool(_) => {
                let band =
                    if direct { 0 } else { 4 * self.window.together() * self.window.band() * self.window.output[2] };
                self.window.workspace_bytes().next_multiple_of(64) + band
            }
        }
    }

    /// Packs what a part has of dense weights that start at element `start`.
    pub fn pack(&self, from: Plain, start: isize, to: &mut [u8]) {
        match self.slide {
            Slide::Pool(_) => {}
            Slide::Conv(conv) => conv.pack(from, start, to),
            Slide::ConvTranspose(conv) => conv.pack(from, start, to),
        }
    }
}

/// Elements between images and between channels, if the planes of `[n, c, d, h, w]` have no gaps.
fn image_steps(access: &Access) -> Option<[usize; 2]> {
    if !access.has_dense_planes() {
        return None;
    }
    let step = |k: usize| if access.shape[k] == 1 { Some(0) } else { usize::try_from(access.strides[k]).ok() };
    Some([step(0)?, step(1)?])
}
