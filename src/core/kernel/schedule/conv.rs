//! How GPUs compute convolutions and their gradients: as products of matrices, or directly, by strips that share what they read.
//!
//! With overlapping windows of `k` by `k` and strips of `s` results, an invocation reads `(s + k - 1) k` elements and `k k` weights for
//! `s k k` products. For 7 by 7 and 14 results, that is a fifth of an element and a fourteenth of a weight per product.

use super::Launch;
use super::matmul::{self, EIGHT, suits_tensor_cores};
use crate::dtype::DType;
use crate::kernel::algorithm::{ConvDirect, FiltersDirect};
use crate::kernel::product::{Phases, Product, is_vectorizable};
use crate::kernel::{Kernel, MOST_HELD as ROWS, Template, Window, unfolds};
use crate::target::{FEW_GROUPS, Family, Target};

/// The most sums of an invocation.
const SUMS: usize = 32;
/// The most results of a strip.
const STRIP: usize = 16;
/// The most products of a strip that stand side by side in the text.
const TERMS: usize = 256;
/// The most phases of a transposed convolution, and the most results between two of them.
const MOST_PHASES: usize = 1 << 16;

/// True if a convolution's data has its channels last.
pub(in crate::kernel) fn has_channels_last(kernel: &Kernel) -> bool {
    let data = &kernel.reads[0].access;
    data.strides[1] == 1 && data.shape[1] > 1
}

/// Output and input channels of a group.
fn channels(kernel: &Kernel, groups: usize) -> [usize; 2] {
    [kernel.shape[1], kernel.reads[0].access.shape[1]].map(|n| n / groups.max(1))
}

impl ConvDirect {
    pub(in crate::kernel) fn launch(&self, kernel: &Kernel) -> Launch {
        let shape = &kernel.shape;
        let others: usize = (0..3).filter(|&axis| axis != self.axis).map(|axis| shape[axis + 2]).product();
        let strips = shape[self.axis + 2].div_ceil(self.results.max(1));
        let count = shape[0] * (shape[1] / self.channels.max(1)) * others * strips;
        Launch {
            threads: self.threads,
            groups: count.div_ceil((self.threads as usize).max(1)) as u64,
            cluster: 1,
            shared: 0,
        }
    }

    pub(in crate::kernel) fn check(
        &self,
        kernel: &Kernel,
        groups: usize,
        window: &Window,
        target: &Target,
    ) -> Result<(), String> {
        let rule = |holds: bool, what: &str| if holds { Ok(()) } else { Err(format!("conv_direct: {what}")) };
        let &ConvDirect { channels: width, axis, results, lanes, threads } = self;
        rule(kernel.prologues.is_empty(), "strips apply no prologue")?;
        rule(!kernel.reads[0].dtype.is_byte(), "it multiplies no bytes")?;
        rule(axis < 3, "expected one of three spatial axes")?;
        let known = width == 1 || matches!(width, 2 | 4) && takes_channels(kernel, groups, width, target);
        rule(known, "neighbouring channels do not go together")?;
        let terms = results.saturating_mul(window.kernel[axis]);
        let fits = (1..=STRIP).contains(&results) && results * width <= SUMS && (results == 1 || terms <= TERMS);
        rule(fits, "a strip has too many results")?;
        let last = has_channels_last(kernel);
        let blocks = kernel.shape[1] / width;
        let divides = if last { lanes >= 1 && blocks.is_multiple_of(lanes) } else { lanes == 1 };
        rule(divides || kernel.shape.contains(&0), "expected lanes that divide the channels, or one")?;
        let whole = !is_transposed(kernel) || results.is_multiple_of(window.strides[axis]);
        rule(whole, "expected strips of whole strides")?;
        rule(threads >= 1 && threads <= target.max_workgroup.min(1024), "a workgroup is larger than the target's")
    }
}

fn is_transposed(kernel: &Kernel) -> bool {
    matches!(kernel.template, Template::ConvTranspose { .. })
}

/// True if an invocation can take `width` neighbouring channels. Either each has data of its own, or they share it.
fn takes_channels(kernel: &Kernel, groups: usize, width: usize, target: &Target) -> bool {
    // Two of `f64` at a time would gain nothing.
    if kernel.reads[0].dtype == DType::F64 {
        return false;
    }
    let [out, input] = channels(kernel, groups);
    if out == 1 && input == 1 {
        target.family == Family::Cuda && has_channels_last(kernel) && is_vectorizable(&kernel.reads[0], 1, width)
    } else {
        out.is_multiple_of(width)
    }
}

/// The number of results of a strip along an axis. It leaves enough strips, and these have the same length as far as possible.
fn length(extent: usize, mut most: usize, enough: impl Fn(usize) -> bool) -> usize {
    loop {
        let strips = extent.div_ceil(most);
        if most <= 2 || enough(strips) {
            return extent.div_ceil(strips);
        }
        most /= 2;
    }
}

/// The strips that are expected to be fastest.
pub(super) fn direct(kernel: &Kernel, groups: usize, window: &Window, target: &Target) -> ConvDirect {
    let fits = |&width: &usize| takes_channels(kernel, groups, width, target);
    cut(kernel, window, [4, 2].into_iter().find(fits).unwrap_or(1), STRIP, target)
}

/// Strips of `channels` channels and at most `most` results.
fn cut(kernel: &Kernel, window: &Window, channels: usize, most: usize, target: &Target) -> ConvDirect {
    let shape = &kernel.shape;
    let last = has_channels_last(kernel);
    // Neighbours lie along the innermost axis. Strips lie along an axis that keeps neighbours' reads side by side.
    let reuse = |&axis: &usize| if shape[axis + 2] > 1 { window.kernel[axis] } else { 0 };
    let axes = if last { &[0, 2, 1][..] } else { &[0, 1] };
    let is_short =
        |&axis: &usize| window.kernel[axis] <= ROWS && (!is_transposed(kernel) || window.strides[axis] <= most);
    let short = axes.iter().copied().filter(is_short).max_by_key(reuse);
    let axis = short.or(axes.iter().copied().min_by_key(|&axis| window.kernel[axis])).expect("there are axes");
    let blocks = shape[1] / channels;
    let others = shape[0] * blocks * (0..3).filter(|&a| a != axis).map(|a| shape[a + 2]).product::<usize>();
    let busy = match target.multiprocessors as usize {
        0 => 64 * FEW_GROUPS,
        n => 256 * n,
    };
    let most = most.min(SUMS / channels).min(TERMS / window.kernel[axis].max(1)).max(1);
    let mut results = length(shape[axis + 2].max(1), most, |strips| others * strips >= busy);
    if is_transposed(kernel) {
        results = results.next_multiple_of(window.strides[axis].max(1));
    }
    let lanes = if last { (8..=32).rev().find(|&n| blocks.is_multiple_of(n)).unwrap_or(blocks.max(1)) } else { 1 };
    let count = others * shape[axis + 2].div_ceil(results);
    let threads = if count < 1 << 14 { 64 } else { 128 }.min(target.max_workgroup);
    ConvDirect { channels, axis, results, lanes, threads }
}

/// Strips that may be worth a try.
pub(super) fn all_direct(kernel: &Kernel, groups: usize, window: &Window, target: &Target) -> Vec<ConvDirect> {
    let mut all = vec![direct(kernel, groups, window, target)];
    let widths = [4, 2, 1].into_iter().filter(|&w| w == 1 || takes_channels(kernel, groups, w, target));
    let cuts = widths.flat_map(|width| [STRIP, STRIP / 2, STRIP / 4].map(|most| (width, most)));
    all.extend(cuts.map(|(width, most)| cut(kernel, window, width, most, target)));
    all
}

impl FiltersDirect {
    /// Positions of a part along each axis, and the images.
    pub(in crate::kernel) fn part(kernel: &Kernel, rows: usize) -> ([usize; 3], usize) {
        let gradient = &kernel.reads[1].access.shape;
        let images = gradient[0] / (kernel.shape[0] / rows).max(1);
        ([gradient[2], gradient[3] / rows, gradient[4]], images)
    }

    /// Workgroups that share the taps, and that share the pairs of channels.
    pub(in crate::kernel) fn shares(&self, kernel: &Kernel) -> [usize; 2] {
        let taps: usize = (0..3).filter(|&axis| axis != self.axis).map(|axis| kernel.shape[axis + 3]).product();
        [if self.all_taps { 1 } else { taps }, (kernel.shape[1] * kernel.shape[2]).div_ceil(self.lanes.max(1))]
    }

    pub(in crate::kernel) fn launch(&self, kernel: &Kernel) -> Launch {
        let [taps, pairs] = self.shares(kernel);
        let size = kernel.writes[0].dtype.size() as u64;
        Launch {
            threads: self.threads,
            groups: (kernel.shape[0] * taps * pairs) as u64,
            cluster: 1,
            shared: u64::from(self.threads) * size,
        }
    }

    pub(in crate::kernel) fn check(&self, kernel: &Kernel, window: &Window, target: &Target) -> Result<(), String> {
        let &FiltersDirect { axis, places, all_taps, lanes, threads } = self;
        let rule = |holds: bool, what: &str| if holds { Ok(()) } else { Err(format!("filters_direct: {what}")) };
        rule(kernel.prologues.is_empty(), "strips apply no prologue")?;
        rule(axis < 3, "expected one of three spatial axes")?;
        let taps = if all_taps { window.kernel.iter().product() } else { window.kernel[axis] };
        rule(taps <= ROWS, "an invocation has too many sums")?;
        rule((1..=STRIP).contains(&places), "a strip has too many positions")?;
        rule(threads >= 1 && threads <= target.max_workgroup.min(1024), "a workgroup is larger than the target's")?;
        let turns = threads as usize / lanes.max(1);
        let divides = lanes >= 1 && turns * lanes == threads as usize && turns.is_power_of_two();
        rule(divides, "expected a power of two of invocations for each lane")
    }
}

/// Invocations of a workgroup that adds up gradients of filters.
const ADDERS: u32 = 256;

/// The strips of positions that may be worth a try, the one that is expected to be fastest first.
pub(super) fn filters(kernel: &Kernel, rows: usize, window: &Window, target: &Target) -> Vec<FiltersDirect> {
    let last = has_channels_last(kernel);
    let (part, images) = FiltersDirect::part(kernel, rows);
    // Strips lie along an axis that keeps neighbours' reads side by side.
    let axes = if last { &[0, 2, 1][..] } else { &[0, 1] };
    let reuse = |&axis: &usize| if part[axis] > 1 { window.kernel[axis] } else { 0 };
    let short = axes.iter().copied().filter(|&axis| window.kernel[axis] <= ROWS).max_by_key(reuse);
    let Some(axis) = short.or_else(|| (0..3).find(|&axis| window.kernel[axis] <= ROWS)) else { return Vec::new() };
    let pairs = kernel.shape[1] * kernel.shape[2];
    let threads = ADDERS.min(1 << target.max_workgroup.max(1).ilog2());
    let lanes = if last { pairs.next_power_of_two().min(32).min(threads as usize) } else { 1 };
    let all_taps = window.kernel.iter().product::<usize>() <= ROWS;
    let others = images * (0..3).filter(|&a| a != axis).map(|a| part[a]).product::<usize>();
    let turns = threads as usize / lanes;
    let strips = |most: usize| {
        let places = length(part[axis].max(1), most, |strips| others * strips >= turns);
        FiltersDirect { axis, places, all_taps, lanes, threads }
    };
    vec![strips(4), strips(8)]
}

/// True if GPUs compute a transposed convolution as a product. In each group, results of all phases form a row. Each takes as many weights
/// as the window has for one of them.
pub fn unfolds_transposed(outputs: usize, inputs: usize, window: &Window) -> bool {
    let phases = Phases::new(inputs, window);
    let depth = phases.taps().iter().fold(inputs, |depth, &n| depth.saturating_mul(n));
    counts_phases(window) && unfolds(outputs.saturating_mul(phases.count()), depth)
}

/// True if texts can count the phases of a transposed convolution, and the results that they lie apart.
pub(super) fn counts_phases(window: &Window) -> bool {
    let phases = Phases::new(1, window);
    phases.count() <= MOST_PHASES && (0..3).all(|a| phases.reach(a) <= MOST_PHASES)
}

/// True if a transposed convolution can be cut by phase: there are several.
pub(super) fn has_phases(window: &Window) -> bool {
    window.strides.iter().any(|&stride| stride > 1)
}

/// A transposed convolution as products: with the phases as rows of one, and cut by phase. The one whose tiles multiply less comes first.
pub(super) fn transposed(kernel: &Kernel, groups: usize, window: &Window, target: &Target) -> Vec<(bool, Product)> {
    let of = |by_phase: bool| (by_phase, Product::conv_transpose(kernel, groups, window, by_phase));
    let mut all: Vec<_> =
        [false, true].into_iter().filter(|by_phase| !by_phase || has_phases(window)).map(of).collect();
    let work = |(_, product): &(bool, Product)| {
        let tiling = matmul::best(kernel, product, target, &|_| false);
        product.work(tiling.workgroup(product).tile)
    };
    all.sort_by_key(work);
    all
}

/// True if GPUs compute a convolution with these weights by strips of results even if a library has it. It has a few channels per group.
/// Libraries compute it as products that are mostly zeros, or one result at a time.
pub fn is_direct(weights: &[usize], groups: usize) -> bool {
    matches!(weights, [o, c, taps @ ..] if *c < 8 && !unfolds(o / groups.max(1), c * taps.iter().product::<usize>()))
}

/// The columns of a convolution's weights: an order of their axes but the first. In it, the convolution is a product of 16-bit floats that lie 16
/// bytes at a time. `None` unless windows have no padding and begin at multiples of 16 bytes, as the patches of a vision transformer.
pub fn by_patches(kernel: &Kernel, groups: usize, window: &Window, target: &Target) -> Option<[usize; 4]> {
    let ([x, w, ..], [_, outputs, positions @ ..]) = (&kernel.reads[..], &kernel.shape[..]) else { return None };
    let is_half = x.dtype.is_half() && w.dtype == x.dtype && target.compute >= 80 && kernel.prologues.is_empty();
    let (x, w) = (&x.access, &w.access);
    let columns = positions.iter().fold(x.shape[0], |n, &extent| n.saturating_mul(extent));
    if !is_half || !suits_tensor_cores([outputs / groups.max(1), w.shape[1..].iter().product(), columns]) {
        return None;
    }
    let whole = |n: isize| n.unsigned_abs().is_multiple_of(EIGHT);
    let times = |stride: isize, n: usize| stride.saturating_mul(n.try_into().unwrap_or(isize::MAX));
    let within = (0..3).all(|a| {
        let reach = |count: usize, step: usize| count.saturating_sub(1).saturating_mul(step);
        let last = reach(positions[a], window.strides[a]).saturating_add(reach(window.kernel[a], window.dilations[a]));
        window.pads[a] == 0 && last < x.shape[a + 2]
    });
    // Extents and steps of an operand along columns, the last of which are its runs, and between them.
    let vectorizable = |offset: isize, between: &[(usize, isize)], columns: [(usize, isize); 4]| {
        let (mut run, mut dense) = (1, true);
        for (extent, step) in columns.into_iter().rev().filter(|(extent, _)| *extent != 1) {
            dense &= step == run as isize;
            if dense {
                run *= extent;
            } else if !whole(step) {
                return false;
            }
        }
        run.is_multiple_of(EIGHT) && whole(offset) && between.iter().all(|&(extent, step)| extent == 1 || whole(step))
    };
    let under = |axis: usize| match axis {
        1 => x.strides[1],
        _ => times(x.strides[axis], window.dilations[axis - 2]),
    };
    let position = |a: usize| (positions[a], times(x.strides[a + 2], window.strides[a]));
    let (image, group) = ((x.shape[0], x.strides[0]), (groups, times(x.strides[1], w.shape[1])));
    let between = [image, group, position(0), position(1), position(2)];
    let in_order = |order: &[usize; 4]| {
        vectorizable(x.offset, &between, order.map(|axis| (w.shape[axis], under(axis))))
            && vectorizable(w.offset, &[(w.shape[0], w.strides[0])], order.map(|axis| (w.shape[axis], w.strides[axis])))
    };
    [[1, 2, 3, 4], [2, 3, 4, 1]].into_iter().find(|order| within && in_order(order))
}
