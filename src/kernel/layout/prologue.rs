//! Which kernels apply a prologue to a core operand's elements, and where that is cheaper than a kernel of its own.

use super::gemm::{FEW_ROWS, IN_PLACE_ROWS, Layout};
use super::{Product, Slide, Way, Windowed};
use crate::dtype::DType;
use crate::expr::{Binary, Body, Code, Unary};
use crate::kernel::{Kernel, Operand, Prologue, Template, Window};
use crate::shape::Access;
use crate::target::{Family, Target};

/// How often the CPU may pack an element, and apply the prologue to it, before a kernel of its own is faster.
const MOST_REPEATS: f64 = 2.0;
/// Halves in 16 bytes.
pub const EIGHT: usize = 8;
/// The most instructions that vanish beside those of a product.
const CHEAP: usize = 8;

/// Whether a convolution with so many output channels per group and weights per output channel is computed as a product of
/// matrices on GPUs.
pub fn unfolds(outputs: usize, depth: usize) -> bool {
    outputs >= 8 && depth >= 8
}

/// Whether a product of halves of so many rows, inner elements and columns gives the tensor cores of a CUDA device something to do.
pub fn suits_warps([m, k, n]: [usize; 3]) -> bool {
    m > 16 && n > 16 && k >= 16
}

/// Whether a transposed convolution is computed as one on GPUs. Of each group, results that lie a stride apart are a row; each takes as many
/// weights as the window has for one of them.
pub fn unfolds_transposed(outputs: usize, inputs: usize, window: &Window) -> bool {
    let Window { kernel, strides, dilations, .. } = window;
    // Every tap is that of one phase, the same for all positions.
    let regular = |a: usize| strides[a] == 1 || dilations[a] == 1 && (2..=kernel[a]).contains(&strides[a]);
    let rows = || strides.iter().fold(outputs, |rows, &s| rows.saturating_mul(s));
    let depth = || (0..3).fold(inputs, |depth, a| depth.saturating_mul(kernel[a].div_ceil(strides[a])));
    (0..3).all(regular) && unfolds(rows(), depth())
}

/// Whether a convolution with these weights is computed on GPUs by strips of results even where a library has it: one of a few channels
/// per group, which libraries compute as products that are mostly zeros, or one result at a time.
pub fn by_strips(weights: &[usize], groups: usize) -> bool {
    matches!(weights, [o, c, taps @ ..] if *c < 8 && !unfolds(o / groups.max(1), c * taps.iter().product::<usize>()))
}

/// The columns of a convolution's weights, an order of their axes but the first, in which it is computed as a product of halves that lie 16
/// bytes at a time, if it is one: of windows without padding that begin at multiples of 16 bytes, as the patches of a vision transformer.
pub fn by_patches(kernel: &Kernel, groups: usize, window: &Window, target: &Target) -> Option<[usize; 4]> {
    let ([x, w, ..], [_, outputs, positions @ ..]) = (&kernel.reads[..], &kernel.shape[..]) else { return None };
    let halves = x.dtype.is_half() && w.dtype == x.dtype && target.compute >= 80 && kernel.prologues.is_empty();
    let (x, w) = (&x.access, &w.access);
    let columns = positions.iter().fold(x.shape[0], |n, &extent| n.saturating_mul(extent));
    if !halves || !suits_warps([outputs / groups.max(1), w.shape[1..].iter().product(), columns]) {
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
    let lies = |offset: isize, between: &[(usize, isize)], columns: [(usize, isize); 4]| {
        let (mut run, mut dense) = (1, true);
        for (extent, step) in columns.into_iter().rev().filter(|(extent, _)| *extent != 1) {
            dense &= step == run as isize;
            match dense {
                true => run *= extent,
                false if !whole(step) => return false,
                false => {}
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
        lies(x.offset, &between, order.map(|axis| (w.shape[axis], under(axis))))
            && lies(w.offset, &[(w.shape[0], w.strides[0])], order.map(|axis| (w.shape[axis], w.strides[axis])))
    };
    [[1, 2, 3, 4], [2, 3, 4, 1]].into_iter().find(|order| within && in_order(order))
}

/// Whether the prologues are those of core operands, one each, and have the operands that they name.
///
/// # Errors
/// What is wrong with them.
pub fn check(kernel: &Kernel) -> Result<(), String> {
    let core = kernel.template.core_reads();
    let mut left = kernel.reads.len().checked_sub(core).ok_or("fewer operands than the core reads")?;
    let mut from = 0;
    for Prologue { operand, reads, .. } in &kernel.prologues {
        if !(from..core).contains(operand) {
            return Err(format!("a prologue of operand {operand}, expected one of {from} to {core}"));
        }
        left = left.checked_sub(*reads).ok_or_else(|| format!("a prologue of {reads} operands, found {left}"))?;
        from = operand + 1;
    }
    for (operand, own) in kernel.prologues.iter().filter_map(|p| Some((p.operand, kernel.prologue(p.operand)?.1))) {
        let shape = &kernel.reads[operand].access.shape;
        if let Some(other) = kernel.reads[own].iter().find(|o| o.access.shape != *shape) {
            return Err(format!(
                "a prologue of operand {operand}: expected extents {shape}, found {}",
                other.access.shape
            ));
        }
    }
    Ok(())
}

/// Whether the target's form of the kernel can apply the prologue of a core operand; no form has one that depends on the index.
///
/// On the CPU that is where blocks of the operand are packed for a product and each element stands in one place of its matrix, on
/// GPUs where the template asks for elements by their index.
pub fn hosts(kernel: &Kernel, operand: usize, target: &Target) -> bool {
    let Some((Prologue { body, .. }, own)) = kernel.prologue(operand) else { return false };
    let (Some(read), Some(own)) = (kernel.reads.get(operand), kernel.reads.get(own)) else { return false };
    let indexed = body.code.iter().any(|i| matches!(i.code, Code::Index(_)));
    if indexed || read.packed || own.iter().any(|o| o.packed) {
        return false;
    }
    let cpu = target.family == Family::Cpu;
    let floats = |operands: &[Operand]| operands.iter().all(|o| o.dtype == DType::F32);
    if !floats(std::slice::from_ref(read)) || cpu && !floats(own) {
        return false;
    }
    match (&kernel.template, operand) {
        // A library computes the whole product or nothing.
        (Template::MatMul, _) if target.libraries.cublaslt => false,
        (Template::Conv { .. }, _) if target.libraries.cudnn => false,
        (Template::MatMul, 0 | 1) => true,
        (Template::Conv { .. }, 0) if cpu => conv(kernel).is_some_and(|conv| {
            conv.is_pointwise() && conv.way() != Way::Depthwise && own.iter().all(|o| per_position(&o.access).is_some())
        }),
        (&Template::Conv { groups, .. }, 0) => {
            let weights = kernel.reads.get(1).map_or(&[][..], |w| &w.access.shape[..]);
            match (kernel.shape.get(1), weights) {
                (Some(outputs), [_, taps @ ..]) if groups > 0 => unfolds(outputs / groups, taps.iter().product()),
                _ => false,
            }
        }
        (Template::ConvTranspose { groups, window }, 0) if !cpu => {
            match (kernel.shape.get(1), read.access.shape.get(1)) {
                (Some(outputs), Some(inputs)) if *groups > 0 => {
                    unfolds_transposed(outputs / groups, inputs / groups, window)
                }
                _ => false,
            }
        }
        _ => false,
    }
}

/// Whether applying the prologue on the way into the core, as often as the kernel reads each element, costs less than a pass over
/// memory.
pub fn pays(kernel: &Kernel, operand: usize, target: &Target) -> bool {
    let Some((Prologue { body, .. }, _)) = kernel.prologue(operand) else { return false };
    if target.family == Family::Cpu {
        return is_cheap(body) && repeats(kernel, operand).is_some_and(|n| n <= MOST_REPEATS);
    }
    let [.., m, n] = kernel.shape[..] else { return false };
    // Of a product with a thin operand, the other is read once.
    let once = kernel.template == Template::MatMul && if operand == 0 { n <= FEW_ROWS } else { m <= FEW_ROWS };
    is_cheap(body) || once
}

/// Steps of an operand from position to position of a `[n, c, positions..]` image, if there is one such step: 0 or 1.
pub fn per_position(access: &Access) -> Option<isize> {
    let mut dense = 1;
    let (mut still, mut moves) = (true, true);
    for k in (2..access.shape.len()).rev().filter(|&k| access.shape[k] != 1) {
        still &= access.strides[k] == 0;
        moves &= access.strides[k] == dense;
        dense = dense.checked_mul(access.shape[k] as isize)?;
    }
    if still { Some(0) } else { moves.then_some(1) }
}

fn conv(kernel: &Kernel) -> Option<super::Conv> {
    match Windowed::new(kernel).ok()?.slide {
        Slide::Conv(conv) => Some(conv),
        _ => None,
    }
}

/// How often the CPU packs each element; `None` where it would have no other reason to pack them.
fn repeats(kernel: &Kernel, operand: usize) -> Option<f64> {
    let access = &kernel.reads.get(operand)?.access;
    let elements: usize = access.shape.iter().zip(&access.strides).filter(|(_, s)| **s != 0).map(|(d, _)| d).product();
    let (left, [m, n, k], [pack_a, pack_b], direct, count) = if kernel.template == Template::MatMul {
        let p = Product::new(kernel).ok()?;
        (operand == 0, [p.m, p.n, p.k], p.packed.map(|packed| !packed), p.direct, p.count())
    } else {
        let (conv, direct) = (conv(kernel)?, Windowed::new(kernel).ok()?.direct.is_some());
        let (m, n, k) = conv.product();
        let left = conv.way() == Way::WeightsRight;
        (left, [m, n, k], [left, !left], direct && !left, conv.batch * conv.groups)
    };
    if !left && m <= IN_PLACE_ROWS && *access.strides.last()? <= 1 {
        return None;
    }
    let layout = Layout::new(m, n, k, pack_a, pack_b, !direct);
    let packed = if left { m * n.div_ceil(layout.tile.1.max(1)) } else { n * m.div_ceil(layout.tile.0.max(1)) };
    Some(count as f64 * packed as f64 * k as f64 / elements.max(1) as f64)
}

fn is_cheap(body: &Body) -> bool {
    let cheap = |code: Code| match code {
        Code::Unary(op, _) => matches!(op, Unary::Neg | Unary::Abs | Unary::Not | Unary::Floor | Unary::Ceil),
        Code::Binary(op, ..) => !matches!(op, Binary::Div | Binary::Rem | Binary::Pow),
        _ => true,
    };
    body.cost() <= CHEAP && body.code.iter().all(|i| cheap(i.code))
}
