//! Takes a library call out of a kernel and leaves the rest to a map. Also tells when a text is faster than the call.

use super::choose;
use super::conv::{by_patches, is_direct};
use super::matmul::{EIGHT, FEW_ROWS, HEAD, MANY_HEADS, SLICE_TILE, few_tiles, fill_wgmma, suits_tensor_cores};
use crate::dtype::DType;
use crate::error::ensure;
use crate::kernel::algorithm::Schedule;
use crate::kernel::library::{Call, LibraryAlgorithm, MatMul, Matrix, absorb, on_tensor_cores, part};
use crate::kernel::{Kernel, Template, fits_i32, unfolds};
use crate::target::Target;

/// A kernel as a library call, and the map that finishes the result in place if anything is left to do. The map reads the result first,
/// then the given reads of the original kernel.
#[derive(Clone)]
pub struct Split {
    /// The kernel that the call computes, and its reads among those of the original kernel.
    pub call: (Kernel, Vec<usize>),
    /// The map, and its further reads among those of the original kernel.
    pub rest: Option<(Kernel, Vec<usize>)>,
    /// True if the call is expected to be faster than a text of the whole kernel. If it is not, a text computes the call's kernel.
    pub is_preferred: bool,
    /// The call of a library.
    library: Call,
}

/// Takes a library call out of a kernel.
pub fn split(kernel: &Kernel, target: &Target) -> Option<Split> {
    let (_, end) = absorb(kernel, target)?;
    let core = kernel.template.core_reads();
    let (body, inputs) = part(&kernel.body, None, end);
    let operands: Vec<usize> = (0..core).chain(inputs.iter().map(|&i| core + i as usize - 1)).collect();
    let pick = |slots: &[usize]| slots.iter().map(|&s| kernel.reads[s].clone()).collect::<Vec<_>>();
    let mut first = Kernel { reads: pick(&operands), body, ..kernel.clone() };
    let (found, _) = absorb(&first, target)?;
    let is_preferred = !prefers_text(kernel, &found, target);
    if is_preferred {
        first.workspace = found.workspace();
        first.schedule = Schedule::Library(found.clone());
    } else {
        first.schedule = choose(&first, target, &|_| true).ok()?;
    }
    let (body, inputs) = part(&kernel.body, Some(end), kernel.body.results[0]);
    let rest = (end != kernel.body.results[0]).then(|| {
        let slots: Vec<usize> = inputs.iter().map(|&i| core + i as usize - 1).collect();
        let mut reads = kernel.writes.clone();
        reads.extend(pick(&slots));
        let map = Kernel {
            template: Template::Map,
            shape: kernel.shape.clone(),
            reads,
            writes: kernel.writes.clone(),
            prologues: Vec::new(),
            body,
            workspace: 0,
            schedule: Schedule::Open,
        };
        (map, slots)
    });
    Some(Split { call: (first, operands), rest, is_preferred, library: found })
}

impl Split {
    /// This split with the library's call by an algorithm as the schedule of the call's kernel, whatever is expected of it.
    pub fn called(mut self, algorithm: Option<LibraryAlgorithm>) -> Split {
        let call = self.library.clone().by(algorithm);
        self.call.0.workspace = call.workspace();
        self.call.0.schedule = Schedule::Library(call);
        Split { is_preferred: true, ..self }
    }

    /// The library's algorithms that may be worth a try: the first ones within the workspace that it wants, and within the most that
    /// it can use.
    pub fn algorithms(&self) -> Vec<LibraryAlgorithm> {
        if !self.library.has_algorithms() {
            return Vec::new();
        }
        let (least, most) = (self.library.wanted_workspace(), self.library.workspace());
        let within = |workspace: u64| (0..RANKS).map(move |rank| LibraryAlgorithm { rank, workspace });
        // The call without a named algorithm is the first within the workspace that it wants, if it gets that.
        within(least).skip(1).chain(within(most).filter(|_| most > least)).collect()
    }

    /// True if a call is this split's, by an algorithm that it may name.
    pub fn allows(&self, call: &Call) -> bool {
        let is_legal = |algorithm| check_algorithm(&self.library, algorithm).is_ok();
        call.clone().by(None) == self.library && call.algorithm().is_none_or(is_legal)
    }

    /// The call that a library computes.
    pub fn library(&self) -> &Call {
        &self.library
    }
}

/// Checks that a kernel's call by an algorithm is one that [`Split::algorithms`] could name. `plain` is the call without it.
///
/// # Errors
/// The first rule that the algorithm breaks.
pub(super) fn check_algorithm(plain: &Call, algorithm: LibraryAlgorithm) -> Result<(), String> {
    let LibraryAlgorithm { rank, workspace } = algorithm;
    ensure(plain.has_algorithms(), || format!("{} has no list of algorithms for it", plain.library()))?;
    ensure(rank < RANKS, || format!("expected one of the library's first {RANKS} algorithms, found rank {rank}"))?;
    let most = plain.workspace();
    ensure(workspace <= most, || format!("expected at most {most} bytes of workspace, found {workspace}"))
}

/// True if a text is expected to be faster than the library call that computes a product or a convolution.
pub(super) fn prefers_text(kernel: &Kernel, call: &Call, target: &Target) -> bool {
    if fits_i32(kernel).is_err() {
        return false;
    }
    match (call, &kernel.template, &kernel.shape[..], &kernel.reads[..]) {
        // A product of few rows or columns is limited by reading the other operand. A rendered kernel does that once, with the whole body.
        (Call::MatMul(p), ..) => {
            let is_text = starts_anywhere(kernel, p, target)
                || is_ragged(p, target)
                || splits(kernel, p, target)
                || is_outer(p, target);
            p.m.min(p.n) <= FEW_ROWS as u64 || is_text
        }
        (Call::Conv(c), Template::ConvTranspose { window, .. }, ..) => {
            // Phases of one size are dense products. The library was faster where they differ: windows of 1 and 3 in steps of 2.
            let even = (0..3).all(|axis| window.kernel[axis].is_multiple_of(window.strides[axis]));
            even || !c.suits_tensor_cores()
        }
        (Call::Conv(c), &Template::Conv { groups, ref window, .. }, [images, channels, rest @ ..], [x, w, ..]) => {
            let (outputs, depth) = (channels / groups.max(1), w.access.shape.iter().skip(1).product());
            // For patches of few channels, cuDNN has no algorithm for tensor cores.
            let patches = !c.suits_tensor_cores() && by_patches(kernel, groups, window, target).is_some();
            if patches || is_direct(&w.access.shape, groups) {
                return true;
            }
            // Libraries fill a tile of tensor cores with zeros around a group of few channels. On an H200 with 24 of them and 3 x 3 taps,
            // cuDNN 9.14 takes 1.4 to 8.5 times a rendered kernel's time.
            let has_taps = window.kernel.iter().any(|&extent| extent > 1);
            if groups > 1 && has_taps && x.dtype.is_half() && w.access.shape[1].max(outputs) <= FEW_CHANNELS {
                return true;
            }
            // The gradient of filters has a window as large as an image, with gaps where the convolution has strides, and few results. On an
            // H100, cuDNN takes up to thirty times a rendered product's time for such a window of 16-bit floats.
            let extent = |extents: &[usize]| extents.iter().fold(1, |n: usize, &extent| n.saturating_mul(extent));
            let taps = extent(&window.kernel);
            let is_image = taps > 4 * extent(rest) || window.dilations.iter().any(|&dilation| dilation > 1);
            if taps > FILTER && is_image && unfolds(outputs, depth) {
                return true;
            }
            // Few tiles leave most multiprocessors idle. A rendered product shares the inner axis among them, too.
            let positions = rest.iter().fold(*images, |n, &d| n.saturating_mul(d));
            let tiles = groups.saturating_mul(outputs.div_ceil(TILE)).saturating_mul(positions.div_ceil(TILE));
            let few = unfolds(outputs, depth) && tiles < target.multiprocessors as usize;
            few && !on_tensor_cores(x.dtype, target)
        }
        // On an H200, cuDNN 9.14 takes 0.4 to 0.6 of a text's time from 512 tokens on, with a causal mask most of all, and up to twice
        // its time where there are few.
        (Call::Attention(a), ..) => a.q.dims[2].min(a.k.dims[2]) < TOKENS,
        _ => false,
    }
}

/// True for a product of 16-bit floats that lie 16 bytes at a time, but whose result's rows do not. Libraries have only kernels of earlier
/// architectures for it. On an H200, they take twice a rendered kernel's time if rows start at odd elements. At even elements they take
/// a fifth less than it, but twice the time of [`Tiling::Wgmma`](super::Tiling::Wgmma).
fn starts_anywhere(kernel: &Kernel, call: &MatMul, target: &Target) -> bool {
    let ([left, right, ..], [write]) = (&kernel.reads[..], &kernel.writes[..]) else { return false };
    let Some(row) = kernel.shape.len().checked_sub(2) else { return false };
    let is_half = [left, right, write].iter().all(|o| o.dtype.is_half());
    let along_k = right.access.is_vectorizable(row, EIGHT);
    let vectorizable =
        left.access.is_vectorizable(row + 1, EIGHT) && (along_k || right.access.is_vectorizable(row + 1, EIGHT));
    let [step, dense] = [write.access.strides[row], write.access.strides[row + 1]];
    // The call's rows are the result's columns.
    let [batch, m, k, n] = [call.batch, call.n, call.k, call.m].map(|extent| extent as usize);
    // A rendered product lengthens its rows by a batch over which the right operand stands still, so it has fewer tiles.
    let separate = batch == 1 || call.a.stride > 0;
    let wgmma = along_k && separate && fill_wgmma([batch, m, n], target);
    let anywhere = step % 2 != 0 || step % EIGHT as isize != 0 && wgmma;
    is_half && target.compute >= 80 && suits_tensor_cores([m, k, n]) && vectorizable && dense == 1 && anywhere
}

/// True for many products of `f32` with a short axis each, some of whose matrices do not lie 16 bytes at a time, such as the attention of 197
/// tokens. On an H200, a rendered kernel takes about two thirds of the library's time.
fn is_ragged(call: &MatMul, target: &Target) -> bool {
    let anywhere = [&call.a, &call.b, &call.d].iter().any(|matrix| !matrix.leading.is_multiple_of(4));
    let extents = [call.m, call.k, call.n];
    let is_short = extents.iter().any(|&n| n <= SHORT) && call.m.min(call.n) > WARP_ROWS;
    let many = call.batch >= MANY_PRODUCTS;
    call.a.dtype == DType::F32 && !call.tf32 && target.compute >= 80 && anywhere && is_short && many
}

/// True for many large products of 16-bit floats whose inner axis is a head's, such as the scores of an attention that are stored. On an H200, tiles
/// of 64 by 64 take two fifths to two thirds of the library's time for heads of 64 and 128 to 512 tokens.
fn is_outer(call: &MatMul, target: &Target) -> bool {
    let matrices = [&call.a, &call.b];
    let aligned = |matrix: &Matrix| {
        [matrix.leading, matrix.stride, matrix.offset].iter().all(|step| step.is_multiple_of(EIGHT as u64))
    };
    let half = matrices.iter().all(|matrix| matrix.dtype.is_half() && aligned(matrix));
    let outer = call.k <= HEAD as u64 && call.m.min(call.n) >= SHORT && call.batch >= MANY_HEADS as u64;
    half && outer && target.compute >= 80
}

/// True for a product of `f32` whose inner axis the warps of a rendered kernel share, 16 bytes at a time. On an H200, the rendered kernel
/// takes between a fifth and nine tenths of the library's time.
fn splits(kernel: &Kernel, call: &MatMul, target: &Target) -> bool {
    let ([left, right, ..], Some(row)) = (&kernel.reads[..], kernel.shape.len().checked_sub(2)) else { return false };
    let vectorizable = left.access.is_vectorizable(row + 1, 4)
        && (right.access.is_vectorizable(row, 4) || right.access.is_vectorizable(row + 1, 4));
    let plain = call.a.dtype == DType::F32 && !call.tf32 && kernel.shape[row + 1] as u64 > WARP_ROWS;
    plain && vectorizable && target.compute >= 80 && few_tiles(call.tiles(SLICE_TILE as u64), target)
}

/// Algorithms of a library's list that are tried.
const RANKS: u32 = 4;
/// An axis of at most this extent is short.
const SHORT: u64 = 128;
/// Products of a batch that occupy a device.
const MANY_PRODUCTS: u64 = 64;
/// With more columns than this, warps have something to do.
const WARP_ROWS: u64 = 16;
/// Queries and keys from which on cuDNN computes an attention. Of 197 tokens, it takes 0.91 of a text's time for 32 pictures, 1.1 for one.
const TOKENS: u64 = 192;
/// Rows and columns of a tile of an f32 convolution.
const TILE: usize = 64;
/// The most elements of a window that libraries are fast for.
const FILTER: usize = 48;
/// The most channels of a group that are few for libraries.
const FEW_CHANNELS: usize = 32;
