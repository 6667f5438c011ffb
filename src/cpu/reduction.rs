//! Reductions of blocks: many values to one, or block into block.

use super::block::{Form, Kind, Ptrs, Repr, in_place};
use super::math;
use super::moves;
use super::simd::{Isa, Lanes, per_isa};
use plimsoll_core::expr::Binary;
use plimsoll_core::kernel::Reduction;
use std::slice::{from_raw_parts, from_raw_parts_mut};

/// Reduces `sums[i]` and `x[i]` to `sums[i]`.
///
/// # Safety
/// `sums` writable and `x` readable for `n` elements, aligned for their type, apart.
pub unsafe fn accumulate(isa: Isa, by: Reduction, repr: Repr, n: usize, sums: *mut u8, x: *mut u8) {
    let op = match by {
        Reduction::Sum => Binary::Add,
        Reduction::Prod => Binary::Mul,
        Reduction::Max => Binary::Max,
        Reduction::Min => Binary::Min,
    };
    // SAFETY: guaranteed by the caller.
    unsafe {
        if repr == Repr::F32 {
            accumulate_f32(isa, by, from_raw_parts_mut(sums.cast(), n), from_raw_parts(x.cast(), n));
        } else {
            in_place(isa, Kind::Binary(op, repr, Form::VV), n, &Ptrs { to: sums, args: [sums, x, x] });
        }
    }
}

per_isa! {
    fn accumulate_f32(by: Reduction, sums: &mut [f32], x: &[f32]) => accumulate_body
}

#[inline(always)]
fn accumulate_body<L: Lanes>(by: Reduction, sums: &mut [f32], x: &[f32]) {
    let pairs = sums.iter_mut().zip(x);
    match by {
        Reduction::Sum => pairs.for_each(|(a, &x)| *a += x),
        Reduction::Prod => pairs.for_each(|(a, &x)| *a *= x),
        Reduction::Max => pairs.for_each(|(a, &x)| *a = if x > *a || x.is_nan() { x } else { *a }),
        Reduction::Min => pairs.for_each(|(a, &x)| *a = if x < *a || x.is_nan() { x } else { *a }),
    }
}

/// Fills a block with the reduction of no elements.
///
/// # Safety
/// `to` must be writable for `n` elements.
pub unsafe fn fill_identity(by: Reduction, repr: Repr, n: usize, to: *mut u8) {
    // SAFETY: guaranteed by the caller; no element is larger than eight bytes.
    unsafe { moves::gather(repr.size(), n, Accumulator::new(by).bytes(repr).as_ptr(), 0, to) }
}

/// The types that values are computed in have no others.
const WIDE: &str = "small integers are reduced in a wider type";

/// A reduction in progress: floats in `f64`, everything else in `i64`.
pub struct Accumulator {
    by: Reduction,
    float: f64,
    int: i64,
}

impl Accumulator {
    /// The reduction of no elements.
    pub fn new(by: Reduction) -> Accumulator {
        let (float, int) = match by {
            Reduction::Sum => (0.0, 0),
            Reduction::Prod => (1.0, 1),
            Reduction::Max => (f64::NEG_INFINITY, i64::MIN),
            Reduction::Min => (f64::INFINITY, i64::MAX),
        };
        Accumulator { by, float, int }
    }

    fn add_float(&mut self, x: f64) {
        self.float = match self.by {
            Reduction::Sum => self.float + x,
            Reduction::Prod => self.float * x,
            Reduction::Max if x > self.float || x.is_nan() => x,
            Reduction::Min if x < self.float || x.is_nan() => x,
            Reduction::Max | Reduction::Min => self.float,
        };
    }

    fn add_int(&mut self, x: i64) {
        self.int = match self.by {
            Reduction::Sum => self.int.wrapping_add(x),
            Reduction::Prod => self.int.wrapping_mul(x),
            Reduction::Max => self.int.max(x),
            Reduction::Min => self.int.min(x),
        };
    }

    /// An unsigned integer as a signed one, and back: for the largest and the smallest, one that is ordered alike.
    fn signed(&self, x: u64) -> i64 {
        (if matches!(self.by, Reduction::Max | Reduction::Min) { x ^ (1 << 63) } else { x }) as i64
    }

    /// Adds `n` elements.
    ///
    /// # Safety
    /// `from` must be readable for `n` elements.
    pub unsafe fn add(&mut self, isa: Isa, repr: Repr, n: usize, from: *const u8) {
        // SAFETY: guaranteed by the caller; elements are aligned because offsets count whole elements from aligned starts.
        unsafe {
            match repr {
                Repr::F32 => {
                    let x = from_raw_parts(from.cast::<f32>(), n);
                    if self.by == Reduction::Prod {
                        x.iter().for_each(|&x| self.add_float(f64::from(x)));
                    } else {
                        self.add_float(f64::from(math::reduce(isa, self.by, x)));
                    }
                }
                Repr::F64 => from_raw_parts(from.cast::<f64>(), n).iter().for_each(|&x| self.add_float(x)),
                Repr::I64 => from_raw_parts(from.cast::<i64>(), n).iter().for_each(|&x| self.add_int(x)),
                Repr::I32 => from_raw_parts(from.cast::<i32>(), n).iter().for_each(|&x| self.add_int(x.into())),
                Repr::U64 => from_raw_parts(from.cast::<u64>(), n).iter().for_each(|&x| self.add_int(self.signed(x))),
                Repr::Bool => from_raw_parts(from, n).iter().for_each(|&x| self.add_int(i64::from(x != 0))),
                Repr::F16 | Repr::BF16 | Repr::I16 | Repr::I8 | Repr::U32 | Repr::U16 | Repr::U8 => {
                    unreachable!("{WIDE}")
                }
            }
        }
    }

    /// The result in its representation, the element's bytes first.
    pub fn bytes(&self, repr: Repr) -> [u8; 8] {
        let narrow = |bytes: [u8; 4]| {
            let [a, b, c, d] = bytes;
            [a, b, c, d, 0, 0, 0, 0]
        };
        match repr {
            Repr::F32 => narrow((self.float as f32).to_ne_bytes()),
            Repr::F64 => self.float.to_ne_bytes(),
            Repr::I64 => self.int.to_ne_bytes(),
            // Of no elements the result is the type's own limit; all other values were narrow to begin with, or wrap.
            Repr::I32 => narrow(match (self.by, self.int) {
                (Reduction::Max, i64::MIN) => i32::MIN.to_ne_bytes(),
                (Reduction::Min, i64::MAX) => i32::MAX.to_ne_bytes(),
                (_, int) => (int as i32).to_ne_bytes(),
            }),
            Repr::U64 => self.signed(self.int as u64).to_ne_bytes(),
            Repr::Bool => [u8::from(self.int > 0), 0, 0, 0, 0, 0, 0, 0],
            Repr::F16 | Repr::BF16 | Repr::I16 | Repr::I8 | Repr::U32 | Repr::U16 | Repr::U8 => unreachable!("{WIDE}"),
        }
    }
}
