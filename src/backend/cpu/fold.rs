//! Folds: many values to one, or block into block.

use super::block::{Form, Kind, Ptrs, Repr, in_place};
use super::moves;
use super::simd::{Isa, Lanes, Level, Plain};
#[cfg(target_arch = "x86_64")]
use super::simd::{Ymm, Zmm};
use crate::expr::Binary;
use crate::kernel::Fold;
use std::slice::from_raw_parts;

/// Sums `x`, or finds its largest or smallest element (the folds of nothing, if there is none; NaN is passed over). Products are not
/// for this function.
pub fn reduce(isa: Isa, fold: Fold, x: &[f32]) -> f32 {
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
    fn avx512(fold: Fold, x: &[f32]) -> f32 {
        // SAFETY: this function has the features of `Zmm`.
        unsafe { reduce_in::<Zmm>(fold, x) }
    }
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma")]
    fn avx2(fold: Fold, x: &[f32]) -> f32 {
        // SAFETY: this function has the features of `Ymm`.
        unsafe { reduce_in::<Ymm>(fold, x) }
    }
    // SAFETY: an `Isa` proves that the CPU has its instructions; `Plain` needs none.
    unsafe {
        match isa.level() {
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => avx512(fold, x),
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => avx2(fold, x),
            _ => reduce_in::<Plain>(fold, x),
        }
    }
}

/// # Safety
/// The CPU must have the instruction set of `L`.
#[inline(always)]
unsafe fn reduce_in<L: Lanes>(fold: Fold, x: &[f32]) -> f32 {
    // SAFETY: loads stay inside the slice.
    unsafe {
        match fold {
            Fold::Max => {
                let larger = |a: f32, b: f32| if a > b || a.is_nan() { a } else { b };
                fold_in::<L>(x, f32::NEG_INFINITY, false, |acc, x| acc.maximum(x), larger)
            }
            Fold::Min => {
                let smaller = |a: f32, b: f32| if a < b || a.is_nan() { a } else { b };
                fold_in::<L>(x, f32::INFINITY, false, |acc, x| acc.minimum(x), smaller)
            }
            Fold::Sum | Fold::Prod => fold_in::<L>(x, 0.0, true, |acc, x| acc.add(x), |a, b| a + b),
        }
    }
}

/// Four registers of partial results, joined in a fixed order. `counts`: an element must not be folded twice, but zeros change nothing;
/// otherwise it is the other way round.
///
/// # Safety
/// As for [`reduce_in`].
#[inline(always)]
unsafe fn fold_in<L: Lanes>(
    x: &[f32],
    start: f32,
    counts: bool,
    step: impl Fn(L, L) -> L,
    join: impl Fn(f32, f32) -> f32,
) -> f32 {
    let (ptr, n) = (x.as_ptr(), x.len());
    if n < L::LEN && !counts {
        return x.iter().fold(start, |a, &b| join(a, b));
    }
    // SAFETY: loads stay inside the slice, the store inside the array.
    unsafe {
        let mut parts = [L::splat(start); 4];
        let mut i = 0;
        while i + 4 * L::LEN <= n {
            for (k, part) in parts.iter_mut().enumerate() {
                *part = step(*part, L::load(ptr.add(i + k * L::LEN)));
            }
            i += 4 * L::LEN;
        }
        while i + L::LEN <= n {
            parts[0] = step(parts[0], L::load(ptr.add(i)));
            i += L::LEN;
        }
        if i < n {
            let rest = if counts { L::load_first(ptr.add(i), n - i) } else { L::load(ptr.add(n - L::LEN)) };
            parts[3] = step(parts[3], rest);
        }
        let mut lanes = [start; 16];
        step(step(parts[0], parts[1]), step(parts[2], parts[3])).store(lanes.as_mut_ptr());
        // Halves joined by halves, each width spelled out so that it becomes one instruction.
        let lanes: [f32; 8] = match L::LEN {
            16 => std::array::from_fn(|k| join(lanes[k], lanes[k + 8])),
            _ => std::array::from_fn(|k| lanes[k]),
        };
        let lanes: [f32; 4] = std::array::from_fn(|k| join(lanes[k], lanes[k + 4]));
        join(join(lanes[0], lanes[2]), join(lanes[1], lanes[3]))
    }
}

/// `acc[i] = acc[i] (fold) x[i]`.
///
/// # Safety
/// `acc` writable and `x` readable for `n` elements, aligned for their type, apart.
pub unsafe fn accumulate(isa: Isa, fold: Fold, repr: Repr, n: usize, acc: *mut u8, x: *mut u8) {
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
    fn avx512(fold: Fold, acc: &mut [f32], x: &[f32]) {
        accumulate_in(fold, acc, x);
    }
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma")]
    fn avx2(fold: Fold, acc: &mut [f32], x: &[f32]) {
        accumulate_in(fold, acc, x);
    }
    // SAFETY: the caller's word; an `Isa` proves that the CPU has its instructions.
    unsafe {
        if repr != Repr::F32 {
            let op = match fold {
                Fold::Sum => Binary::Add,
                Fold::Prod => Binary::Mul,
                Fold::Max => Binary::Max,
                Fold::Min => Binary::Min,
            };
            return in_place(isa, Kind::Binary(op, repr, Form::VV), n, &Ptrs { to: acc, args: [acc, x, x] });
        }
        let (acc, x) = (std::slice::from_raw_parts_mut(acc.cast(), n), from_raw_parts(x.cast(), n));
        match isa.level() {
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => avx512(fold, acc, x),
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => avx2(fold, acc, x),
            _ => accumulate_in(fold, acc, x),
        }
    }
}

#[inline(always)]
fn accumulate_in(fold: Fold, acc: &mut [f32], x: &[f32]) {
    let pairs = acc.iter_mut().zip(x);
    match fold {
        Fold::Sum => pairs.for_each(|(a, &x)| *a += x),
        Fold::Prod => pairs.for_each(|(a, &x)| *a *= x),
        Fold::Max => pairs.for_each(|(a, &x)| *a = if x > *a || x.is_nan() { x } else { *a }),
        Fold::Min => pairs.for_each(|(a, &x)| *a = if x < *a || x.is_nan() { x } else { *a }),
    }
}

/// A fold in progress: floats in `f64`, everything else in `i64`.
pub struct Folded {
    fold: Fold,
    float: f64,
    int: i64,
}

impl Folded {
    pub fn new(fold: Fold) -> Folded {
        let (float, int) = match fold {
            Fold::Sum => (0.0, 0),
            Fold::Prod => (1.0, 1),
            Fold::Max => (f64::NEG_INFINITY, i64::MIN),
            Fold::Min => (f64::INFINITY, i64::MAX),
        };
        Folded { fold, float, int }
    }

    fn add_float(&mut self, x: f64) {
        self.float = match self.fold {
            Fold::Sum => self.float + x,
            Fold::Prod => self.float * x,
            Fold::Max if x > self.float || x.is_nan() => x,
            Fold::Min if x < self.float || x.is_nan() => x,
            Fold::Max | Fold::Min => self.float,
        };
    }

    fn add_int(&mut self, x: i64) {
        self.int = match self.fold {
            Fold::Sum => self.int.wrapping_add(x),
            Fold::Prod => self.int.wrapping_mul(x),
            Fold::Max => self.int.max(x),
            Fold::Min => self.int.min(x),
        };
    }

    /// # Safety
    /// `from` must be readable for `n` elements.
    pub unsafe fn add(&mut self, isa: Isa, repr: Repr, n: usize, from: *const u8) {
        // SAFETY: the caller's word; elements are aligned because offsets count whole elements from aligned starts.
        unsafe {
            match repr {
                Repr::F32 => {
                    let x = from_raw_parts(from.cast::<f32>(), n);
                    match self.fold {
                        fold @ (Fold::Sum | Fold::Max | Fold::Min) => self.add_float(f64::from(reduce(isa, fold, x))),
                        Fold::Prod => x.iter().for_each(|&x| self.add_float(f64::from(x))),
                    }
                }
                Repr::F64 => from_raw_parts(from.cast::<f64>(), n).iter().for_each(|&x| self.add_float(x)),
                Repr::I64 => from_raw_parts(from.cast::<i64>(), n).iter().for_each(|&x| self.add_int(x)),
                Repr::I32 => from_raw_parts(from.cast::<i32>(), n).iter().for_each(|&x| self.add_int(x.into())),
                Repr::U8 | Repr::I8 | Repr::Bool => {
                    from_raw_parts(from, n).iter().for_each(|&x| self.add_int(i64::from(x != 0)));
                }
            }
        }
    }

    /// # Safety
    /// `to` must be writable for eight bytes.
    pub unsafe fn store(&self, repr: Repr, to: *mut u8) {
        // SAFETY: the caller's word.
        unsafe {
            match repr {
                Repr::F32 => to.cast::<f32>().write_unaligned(self.float as f32),
                Repr::F64 => to.cast::<f64>().write_unaligned(self.float),
                Repr::I64 => to.cast::<i64>().write_unaligned(self.int),
                // The folds of nothing are the type's own limits; all other values were narrow to begin with, or wrap.
                Repr::I32 => to.cast::<i32>().write_unaligned(match self.int {
                    i64::MIN => i32::MIN,
                    i64::MAX => i32::MAX,
                    int => int as i32,
                }),
                Repr::U8 | Repr::I8 | Repr::Bool => *to = u8::from(self.int > 0),
            }
        }
    }
}

/// # Safety
/// `to` must be writable for a block.
pub unsafe fn fill_identity(fold: Fold, repr: Repr, n: usize, to: *mut u8) {
    let mut slot = [0u8; 8];
    // SAFETY: the caller's word.
    unsafe {
        Folded::new(fold).store(repr, slot.as_mut_ptr());
        moves::gather(repr.size(), n, slot.as_ptr(), 0, to);
    }
}

impl Folded {
    /// As [`Folded::store`], touching no more than the element.
    ///
    /// # Safety
    /// `to` must be writable for one element.
    pub unsafe fn store_one(&self, repr: Repr, to: *mut u8) {
        let mut slot = [0u8; 8];
        // SAFETY: the caller's word.
        unsafe {
            self.store(repr, slot.as_mut_ptr());
            moves::gather(repr.size(), 1, slot.as_ptr(), 0, to);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_length_on_every_instruction_set() {
        for isa in Isa::available() {
            for n in [0, 1, 7, 8, 9, 15, 16, 17, 63, 64, 65, 200] {
                let x: Vec<f32> = (0..n).map(|i| ((i * 37 + 11) % 101) as f32 - 50.0).collect();
                let exact = |f: fn(f32, f32) -> f32, start| x.iter().copied().fold(start, f);
                assert_eq!(reduce(isa, Fold::Sum, &x), exact(|a, b| a + b, 0.0), "sum of {n}, {}", isa.name());
                assert_eq!(
                    reduce(isa, Fold::Max, &x),
                    exact(f32::max, f32::NEG_INFINITY),
                    "max of {n}, {}",
                    isa.name()
                );
                assert_eq!(reduce(isa, Fold::Min, &x), exact(f32::min, f32::INFINITY), "min of {n}, {}", isa.name());
            }
        }
    }
}
