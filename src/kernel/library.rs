//! Kernels as calls of cuBLASLt and cuDNN, in plain data.
//!
//! Whether a kernel is one is decided with the plan, from the kernel and the target alone: [`split`] takes what a library computes in one
//! call out of a kernel and leaves the rest as a map over the result, in place. A backend obeys [`Kernel::call`] and decides
//! nothing; [`call`] is also what the plan's checker holds it against.
//!
//! ```text
//! body of the kernel    core -> * alpha -> + bias -> + residual -> activation -> anything else
//!                       `------------------ the call -----------------------'   `-- a map --'
//! ```

use super::layout::prologue::{self, EIGHT};
use super::{Kernel, Template, render};
use crate::dtype::DType;
use crate::target::{Family, Target};
use serde::{Deserialize, Serialize};

mod conv;
mod epilogue;
mod matmul;
mod split;

pub use split::{Split, split};

/// A library call that computes a kernel.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Call {
    /// cuBLASLt.
    MatMul(MatMul),
    /// cuDNN, forward.
    Conv(Conv),
}

/// A batch of column-major products: `D = activation(alpha * A B + C + bias)`, accumulated in `f32` (`f64` where operands are).
///
/// A row-major result is the column-major one of the transposed problem, so `a` is the kernel's second operand then.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MatMul {
    /// Rows of A and D.
    pub m: u64,
    /// Columns of B and D.
    pub n: u64,
    /// Columns of A, rows of B.
    pub k: u64,
    /// Number of products.
    pub batch: u64,
    /// The left operand, `[m, k]`.
    pub a: Matrix,
    /// The right operand, `[k, n]`.
    pub b: Matrix,
    /// What is added, `[m, n]`: laid out as `d`, and it may be the very same bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub c: Option<Matrix>,
    /// The result, `[m, n]`; its `slot` is that of the kernel's write.
    pub d: Matrix,
    /// Factor of the product.
    pub alpha: f64,
    /// `m` elements of D's type, one per row.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bias: Option<Vector>,
    /// What is applied last.
    pub activation: Activation,
    /// Whether `f32` operands may be rounded to TF32.
    pub tf32: bool,
}

impl MatMul {
    /// Bytes of what sixteen shares of the inner axis sum to.
    fn partial_sums(&self) -> u64 {
        let elements = self.batch.saturating_mul(self.m).saturating_mul(self.n);
        elements.saturating_mul(64).checked_next_multiple_of(256).unwrap_or(u64::MAX)
    }

    /// Squares of so many rows and columns that the results are made of.
    fn tiles(&self, size: u64) -> u64 {
        self.batch.saturating_mul(self.m.div_ceil(size)).saturating_mul(self.n.div_ceil(size))
    }
}

/// A column-major matrix among a launch's arguments.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Matrix {
    /// Which of the launch's arguments.
    pub slot: usize,
    /// Element type.
    pub dtype: DType,
    /// First element.
    pub offset: u64,
    /// Whether what lies there is the transpose of the operand.
    pub transposed: bool,
    /// Elements from one column of what lies there to the next.
    pub leading: u64,
    /// Elements from one matrix of the batch to the next; 0 where all are the same.
    pub stride: u64,
}

impl Matrix {
    /// The largest power of two, at most 256, that every matrix's address is a multiple of when the buffer's is one of 256.
    pub fn alignment(&self) -> u32 {
        let steps = (self.offset | self.stride).wrapping_mul(self.dtype.size() as u64);
        1 << steps.trailing_zeros().min(8)
    }
}

/// Elements one after another among a launch's arguments.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Vector {
    /// Which of the launch's arguments.
    pub slot: usize,
    /// First element.
    pub offset: u64,
}

impl Vector {
    fn new(kernel: &Kernel, slot: usize) -> Option<Vector> {
        Some(Vector { slot, offset: kernel.reads[slot].access.offset.try_into().ok()? })
    }
}

/// What a call applies to its result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Activation {
    /// Nothing.
    None,
    /// `max(x, 0)`.
    Relu,
    /// The tanh approximation of GELU.
    GeluTanh,
}

/// A convolution: `y = activation(conv(x, w) + residual + bias)`, accumulated in `f32`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Conv {
    /// Channel groups.
    pub groups: u64,
    /// Steps between windows, per spatial axis (two of them, or three).
    pub strides: Vec<u64>,
    /// Steps between elements of a window.
    pub dilations: Vec<u64>,
    /// Padding at both ends of each axis.
    pub pads: Vec<u64>,
    /// `[n, c, spatial..]`.
    pub x: Image,
    /// `[o, c / groups, spatial..]`.
    pub w: Image,
    /// `[n, o, spatial..]`.
    pub y: Image,
    /// One element of the result's type per output channel.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bias: Option<Vector>,
    /// What is added; apart from the result.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub residual: Option<Image>,
    /// [`Activation::None`] or [`Activation::Relu`].
    pub activation: Activation,
    /// Whether the channels of a position lie one after another, in images and in weights; else each tensor is row-major.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub channels_last: bool,
    /// Whether `f32` operands may be rounded to TF32.
    pub tf32: bool,
}

impl Conv {
    /// Whether tensor cores take the operands as they lie.
    fn suits_tensor_cores(&self) -> bool {
        self.channels_last && self.w.dims[1].is_multiple_of(8)
    }
}

/// A tensor among a launch's arguments.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Image {
    /// Which of the launch's arguments.
    pub slot: usize,
    /// Element type.
    pub dtype: DType,
    /// First element.
    pub offset: u64,
    /// Extents.
    pub dims: Vec<u64>,
    /// Elements from index to index, per axis.
    pub strides: Vec<u64>,
}

impl Image {
    fn elements(&self) -> u64 {
        self.dims.iter().product()
    }
}

const MIB: u64 = 1 << 20;

/// About four times as many as a large device has multiprocessors: of fewer, the last turn leaves many of them idle. BERT-base's products
/// of 192 tiles take 2 % longer on an H200 without a workspace.
const MANY_TILES: u64 = 512;

impl Call {
    /// Whose call it is.
    pub fn library(&self) -> &'static str {
        match self {
            Call::MatMul(_) => "cuBLASLt",
            Call::Conv(_) => "cuDNN",
        }
    }

    /// Bytes of workspace that the call can make use of: a rule, so that planning needs no library. An algorithm that wants more than it
    /// is given is not chosen.
    ///
    /// For products NVIDIA recommends 32 MiB from Hopper on; what splits the inner axis needs is a multiple of the result.
    pub fn workspace(&self) -> u64 {
        match self {
            Call::MatMul(p) => p.partial_sums().clamp(MIB, 32 * MIB),
            Call::Conv(c) => {
                let bytes = [&c.x, &c.w, &c.y].map(|t| t.elements().saturating_mul(t.dtype.size() as u64));
                bytes.into_iter().fold(0, u64::saturating_add).clamp(MIB, 64 * MIB).next_multiple_of(256)
            }
        }
    }

    /// Bytes of workspace that the call is given even where the arena becomes larger by them.
    ///
    /// Products of few tiles share the inner axis among all multiprocessors, each of which leaves a tile of `f32` there; those of many
    /// keep all busy without. Convolutions of
    /// `f32` have algorithms that need next to none, and so have those of halves whose channels come last and are a multiple of 8; others
    /// turn images in the workspace.
    pub fn least_workspace(&self) -> u64 {
        match self {
            Call::MatMul(p) if p.tiles(128) >= MANY_TILES => 64 << 10,
            Call::MatMul(p) => p.partial_sums().clamp(64 << 10, 8 * MIB),
            Call::Conv(c) if c.x.dtype.size() == 2 && !c.suits_tensor_cores() => self.workspace(),
            Call::Conv(_) => MIB,
        }
    }

    /// The read whose bytes the result may take: the call reads each element before it writes it.
    pub fn in_place(&self) -> Option<usize> {
        match self {
            Call::MatMul(p) => p.c.as_ref().map(|c| c.slot),
            Call::Conv(_) => None,
        }
    }
}

/// The library call that computes all of a kernel, if there is one on this target.
pub fn call(kernel: &Kernel, target: &Target) -> Option<Call> {
    let (parts, end) = absorb(kernel, target)?;
    (end == kernel.body.results[0] && !is_small(kernel, &parts, target)).then_some(parts)
}

/// The call that computes a kernel's core and as much of its body as it can, and the instruction whose value that is.
fn absorb(kernel: &Kernel, target: &Target) -> Option<(Call, u32)> {
    let there = target.family == Family::Cuda && !kernel.shape.contains(&0);
    if !there || !kernel.prologues.is_empty() || kernel.writes.len() != 1 || kernel.body.results.len() != 1 {
        return None;
    }
    match &kernel.template {
        Template::MatMul if target.libraries.cublaslt => matmul::call(kernel, target),
        Template::Conv { groups, window } if target.libraries.cudnn => conv::call(kernel, *groups, window, target),
        _ => None,
    }
}

/// Products of at most so many rows or columns are rendered.
const THIN: u64 = 4;

/// Whether a product or a convolution is rendered even where a library computes it.
fn is_small(kernel: &Kernel, call: &Call, target: &Target) -> bool {
    // Rendered kernels count elements in 32 bits.
    if !render::counts(kernel) {
        return false;
    }
    match (call, &kernel.template, &kernel.shape[..], &kernel.reads[..]) {
        // A few rows or columns are bound by reading the other operand, which a rendered kernel does once and with the whole body.
        (Call::MatMul(p), ..) => {
            p.m.min(p.n) <= THIN || starts_anywhere(kernel, p, target) || splits(kernel, p, target)
        }
        (Call::Conv(c), &Template::Conv { groups, ref window }, [images, channels, rest @ ..], [x, w, ..]) => {
            let (outputs, depth) = (channels / groups.max(1), w.access.shape.iter().skip(1).product());
            // Of patches of few channels cuDNN has no algorithm for tensor cores.
            let patches = !c.suits_tensor_cores() && prologue::by_patches(kernel, groups, window, target).is_some();
            if patches || prologue::by_strips(&w.access.shape, groups) {
                return true;
            }
            // Few tiles leave most multiprocessors idle: a rendered product shares the inner axis among them, too.
            let positions = rest.iter().fold(*images, |n, &d| n.saturating_mul(d));
            let tiles = groups.saturating_mul(outputs.div_ceil(TILE)).saturating_mul(positions.div_ceil(TILE));
            let few = prologue::unfolds(outputs, depth) && tiles < target.multiprocessors as usize;
            few && !on_tensor_cores(x.dtype, target)
        }
        _ => false,
    }
}

/// Whether this is a product of halves that lie 16 bytes at a time, whose result's rows do not: libraries have nothing but kernels of earlier
/// architectures for it. On an H200, where rows start at odd elements, they take twice a rendered kernel's time; at even ones a fifth less,
/// but twice that of warpgroups.
fn starts_anywhere(kernel: &Kernel, call: &MatMul, target: &Target) -> bool {
    let ([left, right, ..], [write]) = (&kernel.reads[..], &kernel.writes[..]) else { return false };
    let Some(row) = kernel.shape.len().checked_sub(2) else { return false };
    let halves = [left, right, write].iter().all(|o| o.dtype.is_half());
    let along_k = right.access.lies(row, EIGHT);
    let lie = left.access.lies(row + 1, EIGHT) && (along_k || right.access.lies(row + 1, EIGHT));
    let [step, dense] = [write.access.strides[row], write.access.strides[row + 1]];
    // The call's rows are the result's columns.
    let [batch, m, k, n] = [call.batch, call.n, call.k, call.m].map(|extent| extent as usize);
    // A rendered product lengthens its rows by a batch over which the right operand stands still: its tiles are fewer.
    let apart = batch == 1 || call.a.stride > 0;
    let warpgroups = along_k && apart && fill_warpgroups([batch, m, n], target);
    let anywhere = step % 2 != 0 || step % EIGHT as isize != 0 && warpgroups;
    halves && target.compute >= 80 && prologue::suits_warps([m, k, n]) && lie && dense == 1 && anywhere
}

/// Whether this is a product of `f32` whose inner axis warps of a rendered kernel share, 16 bytes at a time. On an H200 it takes between
/// a fifth and nine tenths of the library's time.
fn splits(kernel: &Kernel, call: &MatMul, target: &Target) -> bool {
    let ([left, right, ..], Some(row)) = (&kernel.reads[..], kernel.shape.len().checked_sub(2)) else { return false };
    let lie = left.access.lies(row + 1, 4) && (right.access.lies(row, 4) || right.access.lies(row + 1, 4));
    let plain = call.a.dtype == DType::F32 && !call.tf32 && kernel.shape[row + 1] as u64 > WARP_ROWS;
    plain && lie && target.compute >= 80 && few_tiles(call.tiles(SPLIT_TILE as u64), target)
}

/// Rows and columns of a tile that two groups of four warps multiply by the instructions of compute capability 9.0 (wgmma), as
/// `shaders/matmul_warpgroup.cu` has them.
pub const WARPGROUP_TILE: [usize; 2] = [128, 256];
/// Bytes of workgroup memory in which four stages of such tiles lie, of 64 slices of the inner axis each.
pub const WARPGROUP_BYTES: usize = 4 * 64 * (WARPGROUP_TILE[0] + WARPGROUP_TILE[1]) * 2;

/// Whether products of halves of so many rows and columns keep the target busy in such tiles. They take half as long as by earlier
/// instructions: even where their last turn is nearly empty.
pub fn fill_warpgroups([batch, m, n]: [usize; 3], target: &Target) -> bool {
    let [rows, columns] = WARPGROUP_TILE;
    let tiles = batch.saturating_mul(m.div_ceil(rows)).saturating_mul(n.div_ceil(columns));
    let there = target.compute == 90 && target.max_shared as usize >= WARPGROUP_BYTES && target.max_workgroup >= 256;
    there && m > rows / 2 && target.multiprocessors > 0 && tiles >= target.multiprocessors as usize
}

/// Rows and columns of a tile whose inner axis warps share.
pub const SPLIT_TILE: usize = 32;

/// Whether so many of them leave multiprocessors idle while larger tiles are computed.
pub fn few_tiles(tiles: u64, target: &Target) -> bool {
    tiles <= 3 * u64::from(target.multiprocessors)
}

/// More columns than this, and warps have something to do.
const WARP_ROWS: u64 = 16;

/// Whether libraries compute products of this type on tensor cores.
pub fn on_tensor_cores(dtype: DType, target: &Target) -> bool {
    dtype.is_half() || target.allow_tf32 && dtype == DType::F32
}

/// Rows and columns of a tile of an f32 convolution.
const TILE: usize = 64;
