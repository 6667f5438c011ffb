//! The vectors of innermost kernels: floats, or *words*, four bytes of an operand that follow one another along `k`, and `i32` sums.
//!
//! A sum of products of one unsigned and one signed operand is exact in `i32` for up to [`MOST_TERMS`](crate::kernel::MOST_TERMS) terms. VNNI
//! adds up four products at once. Elsewhere bytes are widened to 16 bits, because the instruction that multiplies bytes saturates sums of two
//! products.

use crate::backend::cpu::simd::Lanes;

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

impl<L: Lanes> Terms for L {
    const LEN: usize = L::LEN;

    #[inline(always)]
    unsafe fn zero() -> Self {
        // SAFETY: guaranteed by the caller, as below.
        unsafe { L::splat(0.0) }
    }

    #[inline(always)]
    unsafe fn splat(from: *const f32) -> Self {
        unsafe { L::splat(*from) }
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        unsafe { L::load(from) }
    }

    #[inline(always)]
    unsafe fn load_first(from: *const f32, n: usize) -> Self {
        unsafe { L::load_first(from, n) }
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        unsafe { L::store(self, to) }
    }

    #[inline(always)]
    unsafe fn store_first(self, to: *mut f32, n: usize) {
        unsafe { L::store_first(self, to, n) }
    }

    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        unsafe { L::add(self, other) }
    }

    #[inline(always)]
    unsafe fn mul_add(self, right: Self, sum: Self) -> Self {
        unsafe { L::mul_add(self, right, sum) }
    }
}

/// A vector of words or of sums.
///
/// # Safety
/// As of [`Terms`].
pub(super) trait Words: Copy {
    const LEN: usize;
    unsafe fn zero() -> Self;
    unsafe fn splat(from: *const f32) -> Self;
    unsafe fn load(from: *const f32) -> Self;
    unsafe fn load_first(from: *const f32, n: usize) -> Self;
    unsafe fn store(self, to: *mut f32);
    unsafe fn store_first(self, to: *mut f32, n: usize);
    unsafe fn add(self, other: Self) -> Self;
    /// Adds the products of four bytes of `u8` with four of `i8` to the sum of each lane.
    unsafe fn dot(unsigned: Self, signed: Self, sum: Self) -> Self;
}

/// Words of a product whose left operand is unsigned if `LEFT`, else its right one. The other operand is signed.
#[derive(Clone, Copy)]
pub(super) struct Dot<V, const LEFT: bool>(V);

impl<V: Words, const LEFT: bool> Terms for Dot<V, LEFT> {
    const LEN: usize = V::LEN;

    #[inline(always)]
    unsafe fn zero() -> Self {
        // SAFETY: guaranteed by the caller, as below.
        unsafe { Dot(V::zero()) }
    }

    #[inline(always)]
    unsafe fn splat(from: *const f32) -> Self {
        unsafe { Dot(V::splat(from)) }
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        unsafe { Dot(V::load(from)) }
    }

    #[inline(always)]
    unsafe fn load_first(from: *const f32, n: usize) -> Self {
        unsafe { Dot(V::load_first(from, n)) }
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        unsafe { self.0.store(to) }
    }

    #[inline(always)]
    unsafe fn store_first(self, to: *mut f32, n: usize) {
        unsafe { self.0.store_first(to, n) }
    }

    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        unsafe { Dot(self.0.add(other.0)) }
    }

    #[inline(always)]
    unsafe fn mul_add(self, right: Self, sum: Self) -> Self {
        let (unsigned, signed) = if LEFT { (self.0, right.0) } else { (right.0, self.0) };
        unsafe { Dot(V::dot(unsigned, signed, sum.0)) }
    }
}

/// Words in plain Rust, which runs everywhere.
#[derive(Clone, Copy)]
pub(super) struct Widened([i32; 8]);

impl Words for Widened {
    const LEN: usize = 8;

    #[inline(always)]
    unsafe fn zero() -> Self {
        Widened([0; 8])
    }

    #[inline(always)]
    unsafe fn splat(from: *const f32) -> Self {
        // SAFETY: guaranteed by the caller, as below.
        unsafe { Widened([*from.cast(); 8]) }
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        unsafe { Widened(from.cast::<[i32; 8]>().read_unaligned()) }
    }

    #[inline(always)]
    unsafe fn load_first(from: *const f32, n: usize) -> Self {
        let mut words = [0; 8];
        for (i, word) in words.iter_mut().enumerate().take(n) {
            *word = unsafe { *from.cast::<i32>().add(i) };
        }
        Widened(words)
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        unsafe { to.cast::<[i32; 8]>().write_unaligned(self.0) }
    }

    #[inline(always)]
    unsafe fn store_first(self, to: *mut f32, n: usize) {
        for (i, word) in self.0.into_iter().enumerate().take(n) {
            unsafe { *to.cast::<i32>().add(i) = word }
        }
    }

    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        Widened(std::array::from_fn(|i| self.0[i].wrapping_add(other.0[i])))
    }

    #[inline(always)]
    unsafe fn dot(unsigned: Self, signed: Self, sum: Self) -> Self {
        Widened(std::array::from_fn(|i| {
            let (unsigned, signed) = (unsigned.0[i].to_ne_bytes(), signed.0[i].to_ne_bytes());
            let product = |t: usize| i32::from(unsigned[t]) * i32::from(signed[t].cast_signed());
            sum.0[i].wrapping_add(product(0) + product(1) + product(2) + product(3))
        }))
    }
}

#[cfg(target_arch = "x86_64")]
pub(super) use x86::{Vnni, WidenedYmm, WidenedZmm};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::Words;
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

    macro_rules! zmm {
        ($name:ident, $unsigned:ident, $signed:ident, $sum:ident => $dot:expr) => {
            impl Words for $name {
                const LEN: usize = 16;

                #[inline(always)]
                unsafe fn zero() -> Self {
                    // SAFETY: guaranteed by the caller, as below.
                    unsafe { $name(_mm512_setzero_si512()) }
                }

                #[inline(always)]
                unsafe fn splat(from: *const f32) -> Self {
                    unsafe { $name(_mm512_set1_epi32(*from.cast())) }
                }

                #[inline(always)]
                unsafe fn load(from: *const f32) -> Self {
                    unsafe { $name(_mm512_loadu_si512(from.cast())) }
                }

                #[inline(always)]
                unsafe fn load_first(from: *const f32, n: usize) -> Self {
                    unsafe { $name(_mm512_maskz_loadu_epi32(((1u32 << n) - 1) as u16, from.cast())) }
                }

                #[inline(always)]
                unsafe fn store(self, to: *mut f32) {
                    unsafe { _mm512_storeu_si512(to.cast(), self.0) }
                }

                #[inline(always)]
                unsafe fn store_first(self, to: *mut f32, n: usize) {
                    unsafe { _mm512_mask_storeu_epi32(to.cast(), ((1u32 << n) - 1) as u16, self.0) }
                }

                #[inline(always)]
                unsafe fn add(self, other: Self) -> Self {
                    unsafe { $name(_mm512_add_epi32(self.0, other.0)) }
                }

                #[inline(always)]
                unsafe fn dot(unsigned: Self, signed: Self, sum: Self) -> Self {
                    let ($unsigned, $signed, $sum) = (unsigned.0, signed.0, sum.0);
                    unsafe { $name($dot) }
                }
            }
        };
    }

    zmm!(Vnni, unsigned, signed, sum => _mm512_dpbusd_epi32(sum, unsigned, signed));
    zmm!(WidenedZmm, unsigned, signed, sum => {
        // Bytes 0 and 2 of each word, then bytes 1 and 3, as 16-bit numbers.
        let even = _mm512_madd_epi16(
            _mm512_and_si512(unsigned, _mm512_set1_epi16(0xff)),
            _mm512_srai_epi16::<8>(_mm512_slli_epi16::<8>(signed)),
        );
        let odd = _mm512_madd_epi16(_mm512_srli_epi16::<8>(unsigned), _mm512_srai_epi16::<8>(signed));
        _mm512_add_epi32(sum, _mm512_add_epi32(even, odd))
    });

    /// All ones in the first `n` lanes.
    #[inline(always)]
    unsafe fn first(n: usize) -> __m256i {
        // SAFETY: the caller has AVX2.
        unsafe { _mm256_cmpgt_epi32(_mm256_set1_epi32(n as i32), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)) }
    }

    impl Words for WidenedYmm {
        const LEN: usize = 8;

        #[inline(always)]
        unsafe fn zero() -> Self {
            // SAFETY: guaranteed by the caller, as below.
            unsafe { WidenedYmm(_mm256_setzero_si256()) }
        }

        #[inline(always)]
        unsafe fn splat(from: *const f32) -> Self {
            unsafe { WidenedYmm(_mm256_set1_epi32(*from.cast())) }
        }

        #[inline(always)]
        unsafe fn load(from: *const f32) -> Self {
            unsafe { WidenedYmm(_mm256_loadu_si256(from.cast())) }
        }

        #[inline(always)]
        unsafe fn load_first(from: *const f32, n: usize) -> Self {
            unsafe { WidenedYmm(_mm256_maskload_epi32(from.cast(), first(n))) }
        }

        #[inline(always)]
        unsafe fn store(self, to: *mut f32) {
            unsafe { _mm256_storeu_si256(to.cast(), self.0) }
        }

        #[inline(always)]
        unsafe fn store_first(self, to: *mut f32, n: usize) {
            unsafe { _mm256_maskstore_epi32(to.cast(), first(n), self.0) }
        }

        #[inline(always)]
        unsafe fn add(self, other: Self) -> Self {
            unsafe { WidenedYmm(_mm256_add_epi32(self.0, other.0)) }
        }

        #[inline(always)]
        unsafe fn dot(unsigned: Self, signed: Self, sum: Self) -> Self {
            let (unsigned, signed) = (unsigned.0, signed.0);
            unsafe {
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
}
