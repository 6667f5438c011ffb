//! The instruction sets that the CPU kernels are written for, and small moves that all of them use.

/// How wide and how capable the vector unit is. Higher levels include the lower ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Level {
    /// Plain Rust that the compiler vectorises for the target's baseline.
    Portable,
    /// AVX2 with FMA and BMI2: 16 registers of 8 floats.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// AVX-512 F, BW, DQ, VL: 32 registers of 16 floats, with masks.
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

/// An instruction set that this machine is known to have. It can only be made by asking the CPU, so holding one is the proof that
/// kernels written for it may run; kernels take it as an argument, and nothing is remembered globally.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Isa(Level);

impl Isa {
    /// The plain Rust kernels, which run everywhere.
    pub const PORTABLE: Isa = Isa(Level::Portable);

    /// The best instruction set of this machine.
    pub fn detect() -> Isa {
        #[cfg(target_arch = "x86_64")]
        {
            use std::is_x86_feature_detected as has;
            if has!("avx2") && has!("fma") && has!("bmi2") {
                if has!("avx512f") && has!("avx512bw") && has!("avx512dq") && has!("avx512vl") {
                    return Isa(Level::Avx512);
                }
                return Isa(Level::Avx2);
            }
        }
        Isa::PORTABLE
    }

    /// Every instruction set that this machine has, the plainest first. Tests run each kernel on all of them.
    pub fn available() -> impl Iterator<Item = Isa> {
        let best = Isa::detect();
        let all = [
            Level::Portable,
            #[cfg(target_arch = "x86_64")]
            Level::Avx2,
            #[cfg(target_arch = "x86_64")]
            Level::Avx512,
        ];
        all.into_iter().map(Isa).filter(move |isa| *isa <= best)
    }

    /// `"portable"`, `"avx2"` or `"avx512"`.
    pub fn name(self) -> &'static str {
        match self.0 {
            Level::Portable => "portable",
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => "avx2",
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => "avx512",
        }
    }

    pub(super) fn level(self) -> Level {
        self.0
    }
}

/// `dst[c * dst_step + r] = src[r * src_step + c]` for `r < rows`, `c < cols`: a matrix with contiguous rows turned on its side.
///
/// # Safety
/// `src` must be readable and `dst` writable at every element named above, and the two must not overlap.
pub unsafe fn transpose(rows: usize, cols: usize, src: *const f32, src_step: isize, dst: *mut f32, dst_step: usize) {
    // SAFETY: every index below is one that the caller vouches for: r < rows and c < cols.
    unsafe {
        let mut r = 0;
        while r < rows {
            let height = (rows - r).min(4);
            let from = src.offset(r as isize * src_step);
            let to = dst.add(r);
            let mut c = 0;
            #[cfg(target_arch = "x86_64")]
            if height == 4 {
                while c + 4 <= cols {
                    transpose_4x4(from.add(c), src_step, to.add(c * dst_step), dst_step);
                    c += 4;
                }
            }
            while c < cols {
                for i in 0..height {
                    *to.add(c * dst_step + i) = *from.offset(i as isize * src_step).add(c);
                }
                c += 1;
            }
            r += height;
        }
    }
}

/// SSE is part of the x86-64 baseline, so this needs no run-time check.
///
/// # Safety
/// As for [`transpose`], with four rows and four columns.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn transpose_4x4(src: *const f32, src_step: isize, dst: *mut f32, dst_step: usize) {
    use std::arch::x86_64::*;
    // SAFETY: four floats are read from each of four rows and written to each of four rows, which the caller vouches for.
    unsafe {
        let (a, b) = (_mm_loadu_ps(src), _mm_loadu_ps(src.offset(src_step)));
        let (c, d) = (_mm_loadu_ps(src.offset(2 * src_step)), _mm_loadu_ps(src.offset(3 * src_step)));
        let (ab_lo, ab_hi) = (_mm_unpacklo_ps(a, b), _mm_unpackhi_ps(a, b));
        let (cd_lo, cd_hi) = (_mm_unpacklo_ps(c, d), _mm_unpackhi_ps(c, d));
        _mm_storeu_ps(dst, _mm_movelh_ps(ab_lo, cd_lo));
        _mm_storeu_ps(dst.add(dst_step), _mm_movehl_ps(cd_lo, ab_lo));
        _mm_storeu_ps(dst.add(2 * dst_step), _mm_movelh_ps(ab_hi, cd_hi));
        _mm_storeu_ps(dst.add(3 * dst_step), _mm_movehl_ps(cd_hi, ab_hi));
    }
}

/// One vector register. Kernels are written once over this trait with `#[inline(always)]` and instantiated inside a function that has
/// the matching `#[target_feature]`; the methods then become single instructions.
///
/// # Safety
/// Every method may only run where the CPU has the implementor's instruction set. Loads and stores need `LEN` valid elements at the
/// pointer, the `_first` forms only `n`; no alignment is needed.
pub(super) trait Lanes: Copy {
    /// Floats per register.
    const LEN: usize;
    unsafe fn splat(x: f32) -> Self;
    unsafe fn load(from: *const f32) -> Self;
    /// The first `n <= LEN` elements, then zeros.
    unsafe fn load_first(from: *const f32, n: usize) -> Self;
    unsafe fn store(self, to: *mut f32);
    unsafe fn store_first(self, to: *mut f32, n: usize);
    unsafe fn add(self, other: Self) -> Self;
    unsafe fn sub(self, other: Self) -> Self;
    unsafe fn mul(self, other: Self) -> Self;
    unsafe fn div(self, other: Self) -> Self;
    /// The smaller of the two; `other` when `self` is NaN or they are equal.
    unsafe fn min(self, other: Self) -> Self;
    /// The larger of the two; `other` when `self` is NaN or they are equal.
    unsafe fn max(self, other: Self) -> Self;
    /// `self`, and `other` where that is NaN.
    unsafe fn or_nan(self, other: Self) -> Self;
    /// The smaller of the two; NaN when either is.
    #[inline(always)]
    unsafe fn minimum(self, other: Self) -> Self {
        // SAFETY: the caller's word.
        unsafe { other.min(self).or_nan(other) }
    }
    /// The larger of the two; NaN when either is.
    #[inline(always)]
    unsafe fn maximum(self, other: Self) -> Self {
        // SAFETY: the caller's word.
        unsafe { other.max(self).or_nan(other) }
    }
    /// `self * factor + term`, fused where the hardware has it.
    unsafe fn mul_add(self, factor: Self, term: Self) -> Self;
}

/// Eight floats that the compiler keeps in whatever registers the target has.
#[derive(Clone, Copy)]
pub(super) struct Plain([f32; 8]);

// SAFETY of the block's methods: plain loops over `LEN` or `n` elements that the caller vouches for.
impl Lanes for Plain {
    const LEN: usize = 8;
    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        Plain([x; 8])
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: the caller vouches for eight elements.
        unsafe { Plain(from.cast::<[f32; 8]>().read_unaligned()) }
    }
    #[inline(always)]
    unsafe fn load_first(from: *const f32, n: usize) -> Self {
        // SAFETY: only elements below `n` are read.
        Plain(std::array::from_fn(|i| if i < n { unsafe { *from.add(i) } } else { 0.0 }))
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: the caller vouches for eight elements.
        unsafe { to.cast::<[f32; 8]>().write_unaligned(self.0) }
    }
    #[inline(always)]
    unsafe fn store_first(self, to: *mut f32, n: usize) {
        for (i, x) in self.0.into_iter().enumerate().take(n) {
            // SAFETY: only elements below `n` are written.
            unsafe { *to.add(i) = x }
        }
    }
    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        Plain(std::array::from_fn(|i| self.0[i] + other.0[i]))
    }
    #[inline(always)]
    unsafe fn sub(self, other: Self) -> Self {
        Plain(std::array::from_fn(|i| self.0[i] - other.0[i]))
    }
    #[inline(always)]
    unsafe fn mul(self, other: Self) -> Self {
        Plain(std::array::from_fn(|i| self.0[i] * other.0[i]))
    }
    #[inline(always)]
    unsafe fn min(self, other: Self) -> Self {
        Plain(std::array::from_fn(|i| if self.0[i] < other.0[i] { self.0[i] } else { other.0[i] }))
    }
    #[inline(always)]
    unsafe fn div(self, other: Self) -> Self {
        Plain(std::array::from_fn(|i| self.0[i] / other.0[i]))
    }
    #[inline(always)]
    unsafe fn max(self, other: Self) -> Self {
        Plain(std::array::from_fn(|i| if self.0[i] > other.0[i] { self.0[i] } else { other.0[i] }))
    }
    #[inline(always)]
    unsafe fn or_nan(self, other: Self) -> Self {
        Plain(std::array::from_fn(|i| if other.0[i].is_nan() { other.0[i] } else { self.0[i] }))
    }
    #[inline(always)]
    unsafe fn mul_add(self, factor: Self, term: Self) -> Self {
        // A fused multiply-add is a library call on targets without the instruction, so it is used only where it is one.
        Plain(std::array::from_fn(|i| {
            if cfg!(any(target_arch = "aarch64", target_feature = "fma")) {
                self.0[i].mul_add(factor.0[i], term.0[i])
            } else {
                self.0[i] * factor.0[i] + term.0[i]
            }
        }))
    }
}

#[cfg(target_arch = "x86_64")]
pub(super) use x86::{Ymm, Zmm};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::Lanes;
    use std::arch::x86_64::*;

    /// Eight floats in an AVX register.
    #[derive(Clone, Copy)]
    pub struct Ymm(__m256);

    /// All ones in the first `n` lanes.
    #[inline(always)]
    unsafe fn first(n: usize) -> __m256i {
        // SAFETY: AVX2, by the contract of `Lanes`.
        unsafe { _mm256_cmpgt_epi32(_mm256_set1_epi32(n as i32), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)) }
    }

    // SAFETY of every block here: the instruction set and the memory are vouched for by the callers of `Lanes`; masked forms
    // neither read nor write (nor fault on) the lanes that are masked out.
    impl Lanes for Ymm {
        const LEN: usize = 8;
        #[inline(always)]
        unsafe fn splat(x: f32) -> Self {
            // SAFETY: as above.
            unsafe { Ymm(_mm256_set1_ps(x)) }
        }
        #[inline(always)]
        unsafe fn load(from: *const f32) -> Self {
            // SAFETY: as above.
            unsafe { Ymm(_mm256_loadu_ps(from)) }
        }
        #[inline(always)]
        unsafe fn load_first(from: *const f32, n: usize) -> Self {
            // SAFETY: as above.
            unsafe { Ymm(_mm256_maskload_ps(from, first(n))) }
        }
        #[inline(always)]
        unsafe fn store(self, to: *mut f32) {
            // SAFETY: as above.
            unsafe { _mm256_storeu_ps(to, self.0) }
        }
        #[inline(always)]
        unsafe fn store_first(self, to: *mut f32, n: usize) {
            // SAFETY: as above.
            unsafe { _mm256_maskstore_ps(to, first(n), self.0) }
        }
        #[inline(always)]
        unsafe fn add(self, other: Self) -> Self {
            // SAFETY: as above.
            unsafe { Ymm(_mm256_add_ps(self.0, other.0)) }
        }
        #[inline(always)]
        unsafe fn sub(self, other: Self) -> Self {
            // SAFETY: as above.
            unsafe { Ymm(_mm256_sub_ps(self.0, other.0)) }
        }
        #[inline(always)]
        unsafe fn mul(self, other: Self) -> Self {
            // SAFETY: as above.
            unsafe { Ymm(_mm256_mul_ps(self.0, other.0)) }
        }
        #[inline(always)]
        unsafe fn min(self, other: Self) -> Self {
            // SAFETY: as above.
            unsafe { Ymm(_mm256_min_ps(self.0, other.0)) }
        }
        #[inline(always)]
        unsafe fn div(self, other: Self) -> Self {
            // SAFETY: as above.
            unsafe { Ymm(_mm256_div_ps(self.0, other.0)) }
        }
        #[inline(always)]
        unsafe fn max(self, other: Self) -> Self {
            // SAFETY: as above.
            unsafe { Ymm(_mm256_max_ps(self.0, other.0)) }
        }
        #[inline(always)]
        unsafe fn or_nan(self, other: Self) -> Self {
            // SAFETY: as above.
            unsafe { Ymm(_mm256_blendv_ps(self.0, other.0, _mm256_cmp_ps::<_CMP_UNORD_Q>(other.0, other.0))) }
        }
        #[inline(always)]
        unsafe fn mul_add(self, factor: Self, term: Self) -> Self {
            // SAFETY: as above.
            unsafe { Ymm(_mm256_fmadd_ps(self.0, factor.0, term.0)) }
        }
    }

    /// Sixteen floats in an AVX-512 register.
    #[derive(Clone, Copy)]
    pub struct Zmm(__m512);

    // SAFETY of every block here: as for `Ymm`.
    impl Lanes for Zmm {
        const LEN: usize = 16;
        #[inline(always)]
        unsafe fn splat(x: f32) -> Self {
            // SAFETY: as above.
            unsafe { Zmm(_mm512_set1_ps(x)) }
        }
        #[inline(always)]
        unsafe fn load(from: *const f32) -> Self {
            // SAFETY: as above.
            unsafe { Zmm(_mm512_loadu_ps(from)) }
        }
        #[inline(always)]
        unsafe fn load_first(from: *const f32, n: usize) -> Self {
            // SAFETY: as above.
            unsafe { Zmm(_mm512_maskz_loadu_ps(((1u32 << n) - 1) as u16, from)) }
        }
        #[inline(always)]
        unsafe fn store(self, to: *mut f32) {
            // SAFETY: as above.
            unsafe { _mm512_storeu_ps(to, self.0) }
        }
        #[inline(always)]
        unsafe fn store_first(self, to: *mut f32, n: usize) {
            // SAFETY: as above.
            unsafe { _mm512_mask_storeu_ps(to, ((1u32 << n) - 1) as u16, self.0) }
        }
        #[inline(always)]
        unsafe fn add(self, other: Self) -> Self {
            // SAFETY: as above.
            unsafe { Zmm(_mm512_add_ps(self.0, other.0)) }
        }
        #[inline(always)]
        unsafe fn sub(self, other: Self) -> Self {
            // SAFETY: as above.
            unsafe { Zmm(_mm512_sub_ps(self.0, other.0)) }
        }
        #[inline(always)]
        unsafe fn mul(self, other: Self) -> Self {
            // SAFETY: as above.
            unsafe { Zmm(_mm512_mul_ps(self.0, other.0)) }
        }
        #[inline(always)]
        unsafe fn min(self, other: Self) -> Self {
            // SAFETY: as above.
            unsafe { Zmm(_mm512_min_ps(self.0, other.0)) }
        }
        #[inline(always)]
        unsafe fn div(self, other: Self) -> Self {
            // SAFETY: as above.
            unsafe { Zmm(_mm512_div_ps(self.0, other.0)) }
        }
        #[inline(always)]
        unsafe fn max(self, other: Self) -> Self {
            // SAFETY: as above.
            unsafe { Zmm(_mm512_max_ps(self.0, other.0)) }
        }
        #[inline(always)]
        unsafe fn or_nan(self, other: Self) -> Self {
            // SAFETY: as above.
            unsafe { Zmm(_mm512_mask_mov_ps(self.0, _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(other.0, other.0), other.0)) }
        }
        #[inline(always)]
        unsafe fn mul_add(self, factor: Self, term: Self) -> Self {
            // SAFETY: as above.
            unsafe { Zmm(_mm512_fmadd_ps(self.0, factor.0, term.0)) }
        }
    }
}
