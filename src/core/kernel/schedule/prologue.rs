//! Tells which kernels can apply a prologue to a core operand's elements, and when that is cheaper than a kernel of its own.

use super::conv::unfolds_transposed;
use super::cpu;
use crate::dtype::DType;
use crate::expr::{Binary, Body, Code, Unary};
use crate::kernel::algorithm::{Schedule, Way};
use crate::kernel::cpu::conv::Conv;
use crate::kernel::cpu::gemm::{FEW_ROWS, IN_PLACE_ROWS, Layout};
use crate::kernel::cpu::{Product, Slide, Windowed};
use crate::kernel::{Kernel, Operand, Prologue, Template, unfolds};
use crate::shape::Access;
use crate::target::{Family, Target};

/// The most times that the CPU packs an element and applies the prologue to it. Beyond that, a kernel of its own is faster.
const MOST_REPEATS: f64 = 2.0;
/// The most instructions that vanish beside those of a product.
const CHEAP: usize = 8;

/// True if the target's schedules of the kernel can apply the prologue of a core operand. None can apply a prologue that depends on the
/// index.
///
/// The CPU can if it packs blocks of the operand for a product and each element has one place in its matrix. GPUs can if the template
/// asks for elements by their index.
pub fn is_possible(kernel: &Kernel, operand: usize, target: &Target) -> bool {
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
        (Template::Conv { .. }, 0) if cpu => conv(kernel).is_some_and(|(conv, _)| {
            conv.is_pointwise() && conv.way != Way::Depthwise && own.iter().all(|o| per_position(&o.access).is_some())
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

/// True if applying the prologue on the way into the core, as often as the kernel reads each element, costs less than a pass over
/// memory.
pub fn is_cheaper(kernel: &Kernel, operand: usize, target: &Target) -> bool {
    let Some((Prologue { body, .. }, _)) = kernel.prologue(operand) else { return false };
    if target.family == Family::Cpu {
        return is_cheap(body) && repeats(kernel, operand).is_some_and(|n| n <= MOST_REPEATS);
    }
    let [.., m, n] = kernel.shape[..] else { return false };
    // In a product with a thin operand, the other operand is read once.
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

/// The convolution in the CPU's expected fastest way, and true if its result is collected in its destination.
fn conv(kernel: &Kernel) -> Option<(Conv, bool)> {
    let schedule = Schedule::Cpu(cpu::best(kernel, &Target::cpu(1)));
    let windowed = Windowed::new(&Kernel { schedule, ..kernel.clone() }).ok()?;
    match windowed.slide {
        Slide::Conv(conv) => Some((conv, windowed.direct.is_some())),
        _ => None,
    }
}

/// The number of times that the CPU packs each element; `None` if it would have no other reason to pack them.
fn repeats(kernel: &Kernel, operand: usize) -> Option<f64> {
    let access = &kernel.reads.get(operand)?.access;
    let elements: usize = access.shape.iter().zip(&access.strides).filter(|(_, s)| **s != 0).map(|(d, _)| d).product();
    let (left, [m, n, k], [pack_a, pack_b], direct, count) = if kernel.template == Template::MatMul {
        let p = Product::new(kernel);
        (operand == 0, [p.m, p.n, p.k], p.packed.map(|packed| !packed), p.direct, p.count())
    } else {
        let (conv, direct) = conv(kernel)?;
        let (m, n, k) = conv.product();
        let left = conv.way == Way::WeightsRight;
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
