//! The vectors of innermost kernels: floats, or *words*, four bytes of an operand that follow one another along `k`, and `i32` sums.
//!
//! A sum of products of one unsigned and one signed operand is exact in `i32` for up to [`MOST_TERMS`](plimsoll_core::kernel::MOST_TERMS) terms. VNNI
//! adds up four products at once. Elsewhere bytes are widened to 16 bits, because the instruction that multiplies bytes saturates sums of two
//! products. (That of NEON's dot products takes operands of one sign.)

use crate::simd::Lanes;

/// A vector of sums, or of elements of an operand, in lanes of 4 bytes.
///
/// # Safety
/// As of [`Lanes`].
pub(super) trait Terms: Copy {
    /// Lanes.
    const LEN: usize;
    unsafe fn zero() -> Self;
    /// The element at `from` in every lane.
    unsafe fn splat(from: *const f32) -> Self;
    /// As [`Lanes::Column`].
    type Column: Copy;
    /// As [`Lanes::column`].
    unsafe fn column<const M: usize>(from: *const f32, step: isize) -> Self::Column;
    /// As [`Lanes::splat_of`].
    unsafe fn splat_of(column: Self::Column, i: usize) -> Self;
    unsafe fn load(from: *const f32) -> Self;
    /// The first `n <= LEN` elements.
    unsafe fn load_first(from: *const f32, n: usize) -> Self;
    unsafe fn store(self, to: *mut f32);
    unsafe fn store_first(self, to: *mut f32, n: usize);
    /// Adds sums.
    unsafe fn add(self, other: Self) -> Self;
    /// Adds the product of an element of the left operand and one of the right operand to a sum.
    unsafe fn mul_add(self, right: Self, sum: Self) -> Self;
}

/// Words of a product whose left operand is unsigned if `LEFT`, else its right one. The other operand is signed. The multiplication of `V`
/// takes the unsigned one first.
#[derive(Clone, Copy)]
pub(super) struct Dot<V, const LEFT: bool>(V);

macro_rules! vector {
    ([] $trait:ident for $name:ty, $len:expr; $($rest:tt)*) => {
        vector! {
            [] $trait for $name, $len, column: (*const f32, isize);
            fn column<const M: usize>(from: *const f32, step: isize) -> Self::Column { (from, step) }
            fn splat_of(column: Self::Column, i: usize) -> Self {
                <$name>::splat(column.0.wrapping_offset(i as isize * column.1))
            }
            $($rest)*
        }
    };
    ([$($generics:tt)*] $trait:ident for $name:ty, $len:expr, column: $column:ty; $(fn $method:ident $(<const $n:ident: usize>)? ($($args:tt)*) $(-> $out:ty)? { $($body:tt)* })*) => {
        impl<$($generics)*> $trait for $name {
            const LEN: usize = $len;
            type Column = $column;
            $(
                #[inline(always)]
                unsafe fn $method $(<const $n: usize>)? ($($args)*) $(-> $out)? {
                    // SAFETY: the caller vouches for the instruction set, and for as many elements as the method reads or writes. Masked
                    // forms neither read nor write (nor fault on) the lanes that are masked out.
                    #[allow(unused_unsafe, reason = "plain Rust needs none")]
                    unsafe { $($body)* }
                }
            )*
        }
    };
}

vector! {
    [L: Lanes] Terms for L, L::LEN, column: L::Column;
    fn zero() -> Self { L::splat(0.0) }
    fn splat(from: *const f32) -> Self { L::splat(*from) }
    fn column<const M: usize>(from: *const f32, step: isize) -> L::Column { L::column::<M>(from, step) }
    fn splat_of(column: L::Column, i: usize) -> Self { L::splat_of(column, i) }
    fn load(from: *const f32) -> Self { L::load(from) }
    fn load_first(from: *const f32, n: usize) -> Self { L::load_first(from, n) }
    fn store(self, to: *mut f32) { L::store(self, to) }
    fn store_first(self, to: *mut f32, n: usize) { L::store_first(self, to, n) }
    fn add(self, other: Self) -> Self { L::add(self, other) }
    fn mul_add(self, right: Self, sum: Self) -> Self { L::mul_add(self, right, sum) }
}

vector! {
    [V: Terms, const LEFT: bool] Terms for Dot<V, LEFT>, V::LEN, column: V::Column;
    fn column<const M: usize>(from: *const f32, step: isize) -> V::Column { V::column::<M>(from, step) }
    fn splat_of(column: V::Column, i: usize) -> Self { Dot(V::splat_of(column, i)) }
    fn zero() -> Self { Dot(V::zero()) }
    fn splat(from: *const f32) -> Self { Dot(V::splat(from)) }
    fn load(from: *const f32) -> Self { Dot(V::load(from)) }
    fn load_first(from: *const f32, n: usize) -> Self { Dot(V::load_first(from, n)) }
    fn store(self, to: *mut f32) { self.0.store(to) }
    fn store_first(self, to: *mut f32, n: usize) { self.0.store_first(to, n) }
    fn add(self, other: Self) -> Self { Dot(self.0.add(other.0)) }
    fn mul_add(self, right: Self, sum: Self) -> Self {
        let (unsigned, signed) = if LEFT { (self.0, right.0) } else { (right.0, self.0) };
        Dot(unsigned.mul_add(signed, sum.0))
    }
}

/// Words in plain Rust, which runs everywhere.
#[derive(Clone, Copy)]
pub(super) struct Widened([i32; 8]);

vector! {
    [] Terms for Widened, 8;
    fn zero() -> Self { Widened([0; 8]) }
    fn splat(from: *const f32) -> Self { Widened([*from.cast(); 8]) }
    fn load(from: *const f32) -> Self { Widened(from.cast::<[i32; 8]>().read_unaligned()) }
    fn load_first(from: *const f32, n: usize) -> Self {
        let word = |i: usize| if i < n { *from.cast::<i32>().add(i) } else { 0 };
        Widened(std::array::from_fn(word))
    }
    fn store(self, to: *mut f32) { to.cast::<[i32; 8]>().write_unaligned(self.0) }
    fn store_first(self, to: *mut f32, n: usize) { to.cast::<i32>().copy_from_nonoverlapping(self.0.as_ptr(), n) }
    fn add(self, other: Self) -> Self { Widened(std::array::from_fn(|i| self.0[i].wrapping_add(other.0[i]))) }
    fn mul_add(self, signed: Self, sum: Self) -> Self {
        Widened(std::array::from_fn(|i| {
            let (unsigned, signed) = (self.0[i].to_ne_bytes(), signed.0[i].to_ne_bytes());
            let product = |t: usize| i32::from(unsigned[t]) * i32::from(signed[t].cast_signed());
            sum.0[i].wrapping_add(product(0) + product(1) + product(2) + product(3))
        }))
    }
}

#[cfg(target_arch = "x86_64")]
pub(super) use x86::{Vnni, WidenedYmm, WidenedZmm};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::Terms;
    use std::arch::x86_64::*;

    /// Sixteen words, whose products VNNI adds up.
    #[derive(Clone, Copy)]
    pub struct Vnni(__m512i);

    /// Sixteen words, whose bytes AVX-512 widens.
    #[derive(Clone, Copy)]
    pub struct WidenedZmm(__m512i);

    /// Eight words, whose bytes AVX2 widens.
    #[derive(Clone, Copy)]
    pub struct WidenedYmm(__m256i);

    /// Ones for the first `n` lanes.
    #[inline(always)]
    fn mask(n: usize) -> __mmask16 {
        ((1u32 << n) - 1) as u16
    }

    macro_rules! zmm {
        ($name:ident, |$unsigned:ident, $signed:ident, $sum:ident| $dot:expr) => {
            vector! {
                [] Terms for $name, 16;
                fn zero() -> Self { $name(_mm512_setzero_si512()) }
                fn splat(from: *const f32) -> Self { $name(_mm512_set1_epi32(*from.cast())) }
                fn load(from: *const f32) -> Self { $name(_mm512_loadu_si512(from.cast())) }
                fn load_first(from: *const f32, n: usize) -> Self { $name(_mm512_maskz_loadu_epi32(mask(n), from.cast())) }
                fn store(self, to: *mut f32) { _mm512_storeu_si512(to.cast(), self.0) }
                fn store_first(self, to: *mut f32, n: usize) { _mm512_mask_storeu_epi32(to.cast(), mask(n), self.0) }
                fn add(self, other: Self) -> Self { $name(_mm512_add_epi32(self.0, other.0)) }
                fn mul_add(self, $signed: Self, $sum: Self) -> Self {
                    let ($unsigned, $signed, $sum) = (self.0, $signed.0, $sum.0);
                    $name($dot)
                }
            }
        };
    }

    zmm!(Vnni, |unsigned, signed, sum| _mm512_dpbusd_epi32(sum, unsigned, signed));
    zmm!(WidenedZmm, |unsigned, signed, sum| {
        // Bytes 0 and 2 of each word, then bytes 1 and 3, as 16-bit numbers.
        let even = _mm512_madd_epi16(
            _mm512_and_si512(unsigned, _mm512_set1_epi16(0xff)),
            _mm512_srai_epi16::<8>(_mm512_slli_epi16::<8>(signed)),
        );
        let odd = _mm512_madd_epi16(_mm512_srli_epi16::<8>(unsigned), _mm512_srai_epi16::<8>(signed));
        _mm512_add_epi32(sum, _mm512_add_epi32(even, odd))
    });

    /// All ones in the first `n` lanes.
    ///
    /// # Safety
    /// The CPU must have AVX2.
    #[inline(always)]
    unsafe fn first(n: usize) -> __m256i {
        // SAFETY: guaranteed by the caller.
        unsafe { _mm256_cmpgt_epi32(_mm256_set1_epi32(n as i32), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)) }
    }

    vector! {
        [] Terms for WidenedYmm, 8;
        fn zero() -> Self { WidenedYmm(_mm256_setzero_si256()) }
        fn splat(from: *const f32) -> Self { WidenedYmm(_mm256_set1_epi32(*from.cast())) }
        fn load(from: *const f32) -> Self { WidenedYmm(_mm256_loadu_si256(from.cast())) }
        fn load_first(from: *const f32, n: usize) -> Self { WidenedYmm(_mm256_maskload_epi32(from.cast(), first(n))) }
        fn store(self, to: *mut f32) { _mm256_storeu_si256(to.cast(), self.0) }
        fn store_first(self, to: *mut f32, n: usize) { _mm256_maskstore_epi32(to.cast(), first(n), self.0) }
        fn add(self, other: Self) -> Self { WidenedYmm(_mm256_add_epi32(self.0, other.0)) }
        fn mul_add(self, signed: Self, sum: Self) -> Self {
            let (unsigned, signed) = (self.0, signed.0);
            // Bytes 0 and 2 of each word, then bytes 1 and 3, as 16-bit numbers.
            let even = _mm256_madd_epi16(
                _mm256_and_si256(unsigned, _mm256_set1_epi16(0xff)),
                _mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(signed)),
            );
            let odd = _mm256_madd_epi16(_mm256_srli_epi16::<8>(unsigned), _mm256_srai_epi16::<8>(signed));
            WidenedYmm(_mm256_add_epi32(sum.0, _mm256_add_epi32(even, odd)))
        }
    }
}

#[cfg(target_arch = "aarch64")]
pub(super) use neon::WidenedNeon;

#[cfg(target_arch = "aarch64")]
mod neon {
    use super::Terms;
    use std::arch::aarch64::*;

    /// Eight words in two registers, whose bytes NEON widens.
    #[derive(Clone, Copy)]
    pub struct WidenedNeon(int32x4_t, int32x4_t);

    /// Adds the products of words to sums.
    ///
    /// # Safety
    /// None but NEON.
    #[inline(always)]
    unsafe fn dot(unsigned: int32x4_t, signed: int32x4_t, sum: int32x4_t) -> int32x4_t {
        // SAFETY: NEON is part of the baseline.
        unsafe {
            let (unsigned, signed) = (vreinterpretq_u16_s32(unsigned), vreinterpretq_s16_s32(signed));
            // Bytes 0 and 2 of each word, then bytes 1 and 3, as 16-bit numbers, which hold a product of two bytes.
            let even = vmulq_s16(
                vreinterpretq_s16_u16(vandq_u16(unsigned, vdupq_n_u16(0xff))),
                vshrq_n_s16::<8>(vshlq_n_s16::<8>(signed)),
            );
            let odd = vmulq_s16(vreinterpretq_s16_u16(vshrq_n_u16::<8>(unsigned)), vshrq_n_s16::<8>(signed));
            vpadalq_s16(vpadalq_s16(sum, even), odd)
        }
    }

    vector! {
        [] Terms for WidenedNeon, 8;
        fn zero() -> Self { WidenedNeon(vdupq_n_s32(0), vdupq_n_s32(0)) }
        fn splat(from: *const f32) -> Self {
            let word = vdupq_n_s32(*from.cast());
            WidenedNeon(word, word)
        }
        fn load(from: *const f32) -> Self { WidenedNeon(vld1q_s32(from.cast()), vld1q_s32(from.cast::<i32>().add(4))) }
        fn load_first(from: *const f32, n: usize) -> Self {
            let mut words = [0.0; 8];
            from.copy_to_nonoverlapping(words.as_mut_ptr(), n);
            WidenedNeon::load(words.as_ptr())
        }
        fn store(self, to: *mut f32) {
            vst1q_s32(to.cast(), self.0);
            vst1q_s32(to.cast::<i32>().add(4), self.1);
        }
        fn store_first(self, to: *mut f32, n: usize) {
            let mut words = [0.0; 8];
            self.store(words.as_mut_ptr());
            to.copy_from_nonoverlapping(words.as_ptr(), n);
        }
        fn add(self, other: Self) -> Self { WidenedNeon(vaddq_s32(self.0, other.0), vaddq_s32(self.1, other.1)) }
        fn mul_add(self, signed: Self, sum: Self) -> Self {
            WidenedNeon(dot(self.0, signed.0, sum.0), dot(self.1, signed.1, sum.1))
        }
    }
}
