//! The instruction sets that the CPU kernels are written for, and the vectors that they compute with.

/// The width and abilities of the vector unit. Higher levels include the lower ones.
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
    /// The same with VNNI, which adds up products of bytes.
    #[cfg(target_arch = "x86_64")]
    Avx512Vnni,
    /// NEON, which every 64-bit Arm has: 32 registers of 4 floats, of which a vector takes two.
    #[cfg(target_arch = "aarch64")]
    Neon,
}

/// An instruction set that this machine has. Only a query of the CPU makes one, so a value of this type is the proof that kernels for
/// it may run. Kernels take it as an argument; nothing global remembers it.
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
                    return Isa(if has!("avx512vnni") { Level::Avx512Vnni } else { Level::Avx512 });
                }
                return Isa(Level::Avx2);
            }
        }
        #[cfg(target_arch = "aarch64")]
        return Isa(Level::Neon);
        #[cfg(not(target_arch = "aarch64"))]
        Isa::PORTABLE
    }

    /// Every instruction set of this machine, the plainest first. Tests run each kernel on all of them.
    pub fn available() -> impl Iterator<Item = Isa> {
        let best = Isa::detect();
        let all = [
            Level::Portable,
            #[cfg(target_arch = "x86_64")]
            Level::Avx2,
            #[cfg(target_arch = "x86_64")]
            Level::Avx512,
            #[cfg(target_arch = "x86_64")]
            Level::Avx512Vnni,
            #[cfg(target_arch = "aarch64")]
            Level::Neon,
        ];
        all.into_iter().map(Isa).filter(move |isa| *isa <= best)
    }

    /// `"portable"`, `"avx2"`, `"avx512"`, `"avx512-vnni"` or `"neon"`.
    pub fn name(self) -> &'static str {
        match self.0 {
            Level::Portable => "portable",
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => "avx2",
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => "avx512",
            #[cfg(target_arch = "x86_64")]
            Level::Avx512Vnni => "avx512-vnni",
            #[cfg(target_arch = "aarch64")]
            Level::Neon => "neon",
        }
    }

    pub(super) fn level(self) -> Level {
        self.0
    }
}

/// `dst[c * dst_step + r] = src[r * src_step + c]` for `r < rows`, `c < cols`: a matrix with contiguous rows, transposed.
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
            #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
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

per_isa! {
    /// As [`transpose`], with the vectors of an instruction set.
    ///
    /// # Safety
    /// As for [`transpose`].
    pub unsafe fn turn(rows: usize, cols: usize, src: *const f32, src_step: isize, dst: *mut f32, dst_step: usize) => turn_by
}

/// # Safety
/// As for [`transpose`], where the CPU has the instruction set of `V`.
#[inline(always)]
pub(super) unsafe fn turn_by<V: Lanes>(
    rows: usize,
    cols: usize,
    src: *const f32,
    src_step: isize,
    dst: *mut f32,
    dst_step: usize,
) {
    let mut done = 0;
    // SAFETY: every index below is one that the caller vouches for.
    unsafe {
        while V::TURNED.min(rows - done) >= 8 {
            let (from, to) = (src.offset(done as isize * src_step), dst.add(done));
            done += match V::TURNED.min(rows - done) {
                16.. => turn_rows::<V, 16>(cols, from, src_step, to, dst_step),
                12.. => turn_rows::<V, 12>(cols, from, src_step, to, dst_step),
                _ => turn_rows::<V, 8>(cols, from, src_step, to, dst_step),
            };
        }
        if done < rows {
            transpose(rows - done, cols, src.offset(done as isize * src_step), src_step, dst.add(done), dst_step);
        }
    }
}

/// Transposes `R` rows. Returns their number.
///
/// # Safety
/// As for [`turn_by`], with `R` rows.
#[inline(always)]
unsafe fn turn_rows<V: Lanes, const R: usize>(
    cols: usize,
    src: *const f32,
    src_step: isize,
    dst: *mut f32,
    dst_step: usize,
) -> usize {
    let whole = cols / 4 * 4;
    // SAFETY: guaranteed by the caller.
    unsafe {
        for c in (0..whole).step_by(4) {
            for (i, column) in V::columns::<R>(src.add(c), src_step).into_iter().enumerate() {
                let to = dst.add((c + i) * dst_step);
                if R == V::LEN { column.store(to) } else { column.store_first(to, R) }
            }
        }
        if whole < cols {
            transpose(R, cols - whole, src.add(whole), src_step, dst.add(whole * dst_step), dst_step);
        }
    }
    R
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

/// NEON is part of the baseline, too.
///
/// # Safety
/// As for [`transpose`], with four rows and four columns.
#[cfg(target_arch = "aarch64")]
#[inline(always)]
unsafe fn transpose_4x4(src: *const f32, src_step: isize, dst: *mut f32, dst_step: usize) {
    use std::arch::aarch64::*;
    // SAFETY: four floats are read from each of four rows and written to each of four rows, which the caller vouches for.
    unsafe {
        let row = |i: isize| vld1q_f32(src.offset(i * src_step));
        let (a, b, c, d) = (row(0), row(1), row(2), row(3));
        let (ac_lo, ac_hi) = (vzip1q_f32(a, c), vzip2q_f32(a, c));
        let (bd_lo, bd_hi) = (vzip1q_f32(b, d), vzip2q_f32(b, d));
        vst1q_f32(dst, vzip1q_f32(ac_lo, bd_lo));
        vst1q_f32(dst.add(dst_step), vzip2q_f32(ac_lo, bd_lo));
        vst1q_f32(dst.add(2 * dst_step), vzip1q_f32(ac_hi, bd_hi));
        vst1q_f32(dst.add(3 * dst_step), vzip2q_f32(ac_hi, bd_hi));
    }
}

/// One vector: a register, or two of NEON. Kernels are written once over this trait with `#[inline(always)]`; [`per_isa`] compiles them inside a function
/// that has the matching `#[target_feature]`, where each method becomes a single instruction.
///
/// # Safety
/// Every method may only run where the CPU has the implementor's instruction set. Loads and stores need `LEN` valid elements at the
/// pointer, the `_first` forms only `n`; no alignment is needed.
pub(super) trait Lanes: Copy {
    /// Floats per register.
    const LEN: usize;
    /// True if the hardware has a fused multiply-add: without the instruction it is a call of a library function.
    const FMA: bool;
    unsafe fn splat(x: f32) -> Self;
    /// Up to twelve factors of whole vectors: where they are, or registers that hold them.
    type Column: Copy;
    /// `M` elements that are `step` apart.
    unsafe fn column<const M: usize>(from: *const f32, step: isize) -> Self::Column;
    /// Element `i` of a column, in every lane.
    unsafe fn splat_of(column: Self::Column, i: usize) -> Self;
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
        // SAFETY: guaranteed by the caller.
        unsafe { other.min(self).or_nan(other) }
    }
    /// The larger of the two; NaN when either is.
    #[inline(always)]
    unsafe fn maximum(self, other: Self) -> Self {
        // SAFETY: guaranteed by the caller.
        unsafe { other.max(self).or_nan(other) }
    }
    /// `self * factor + term`, fused where the hardware has it.
    unsafe fn mul_add(self, factor: Self, term: Self) -> Self;
    /// The most rows of which [`columns`](Self::columns) makes columns; 0 if it makes none.
    const TURNED: usize = 0;
    /// Four neighbouring columns of `R` rows, a multiple of four, that are `step` apart.
    #[inline(always)]
    unsafe fn columns<const R: usize>(_: *const f32, _: isize) -> [Self; 4] {
        unreachable!("these vectors turn no rows")
    }
}

/// Implements [`Lanes`] with one expression per method.
macro_rules! lanes {
    ($name:ident, $len:literal, fma: $fma:expr $(, turned: $turned:literal)?; $($rest:tt)*) => {
        lanes! { $name, $len, fma: $fma $(, turned: $turned)?, column: (*const f32, isize);
            fn column<const M: usize>(from: *const f32, step: isize) -> Self::Column { (from, step) }
            fn splat_of(column: Self::Column, i: usize) -> Self {
                $name::splat(*column.0.wrapping_offset(i as isize * column.1))
            }
            $($rest)*
        }
    };
    ($name:ident, $len:literal, fma: $fma:expr $(, turned: $turned:literal)?, column: $column:ty; $(fn $method:ident $(<const $n:ident: usize>)? ($($args:tt)*) $(-> $out:ty)? { $($body:tt)* })*) => {
        impl Lanes for $name {
            const LEN: usize = $len;
            const FMA: bool = $fma;
            $(const TURNED: usize = $turned;)?
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

/// Eight floats that the compiler keeps in whatever registers the target has.
#[derive(Clone, Copy)]
pub(super) struct Plain([f32; 8]);

impl Plain {
    #[inline(always)]
    fn each(f: impl Fn(usize) -> f32) -> Plain {
        Plain(std::array::from_fn(f))
    }
}

lanes! {
    Plain, 8, fma: cfg!(any(target_arch = "aarch64", target_feature = "fma"));
    fn splat(x: f32) -> Self { Plain([x; 8]) }
    fn load(from: *const f32) -> Self { Plain(from.cast::<[f32; 8]>().read_unaligned()) }
    fn load_first(from: *const f32, n: usize) -> Self { Plain::each(|i| if i < n { *from.add(i) } else { 0.0 }) }
    fn store(self, to: *mut f32) { to.cast::<[f32; 8]>().write_unaligned(self.0) }
    fn store_first(self, to: *mut f32, n: usize) { self.0.iter().enumerate().take(n).for_each(|(i, &x)| *to.add(i) = x) }
    fn add(self, other: Self) -> Self { Plain::each(|i| self.0[i] + other.0[i]) }
    fn sub(self, other: Self) -> Self { Plain::each(|i| self.0[i] - other.0[i]) }
    fn mul(self, other: Self) -> Self { Plain::each(|i| self.0[i] * other.0[i]) }
    fn div(self, other: Self) -> Self { Plain::each(|i| self.0[i] / other.0[i]) }
    fn min(self, other: Self) -> Self { Plain::each(|i| if self.0[i] < other.0[i] { self.0[i] } else { other.0[i] }) }
    fn max(self, other: Self) -> Self { Plain::each(|i| if self.0[i] > other.0[i] { self.0[i] } else { other.0[i] }) }
    fn or_nan(self, other: Self) -> Self { Plain::each(|i| if other.0[i].is_nan() { other.0[i] } else { self.0[i] }) }
    fn mul_add(self, factor: Self, term: Self) -> Self { Plain::each(|i| multiply_add::<Plain>(self.0[i], factor.0[i], term.0[i])) }
}

/// `a * b + c`, fused where the hardware of `L` has it.
#[inline(always)]
pub(super) fn multiply_add<L: Lanes>(a: f32, b: f32, c: f32) -> f32 {
    if L::FMA { a.mul_add(b, c) } else { a * b + c }
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
    ///
    /// # Safety
    /// The CPU must have AVX2.
    #[inline(always)]
    unsafe fn first(n: usize) -> __m256i {
        // SAFETY: AVX2, by the contract of `Lanes`.
        unsafe { _mm256_cmpgt_epi32(_mm256_set1_epi32(n as i32), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)) }
    }

    lanes! {
        Ymm, 8, fma: true, turned: 8;
        fn columns<const R: usize>(from: *const f32, step: isize) -> [Self; 4] {
            // Halves of a register are transposed apart from each other.
            let fours = |row: isize| {
                let half = |i: isize| _mm_loadu_ps(from.wrapping_offset((row + 4 * i) * step));
                let low = _mm256_castps128_ps256(half(0));
                if R > 4 { _mm256_insertf128_ps::<1>(low, half(1)) } else { low }
            };
            let (a, b, c, d) = (fours(0), fours(1), fours(2), fours(3));
            let [ab, cd] = [(a, b), (c, d)].map(|(a, b)| [_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b)]);
            let [ab, cd] = [ab, cd].map(|pair| pair.map(|x| _mm256_castps_pd(x)));
            [
                Ymm(_mm256_castpd_ps(_mm256_unpacklo_pd(ab[0], cd[0]))),
                Ymm(_mm256_castpd_ps(_mm256_unpackhi_pd(ab[0], cd[0]))),
                Ymm(_mm256_castpd_ps(_mm256_unpacklo_pd(ab[1], cd[1]))),
                Ymm(_mm256_castpd_ps(_mm256_unpackhi_pd(ab[1], cd[1]))),
            ]
        }
        fn splat(x: f32) -> Self { Ymm(_mm256_set1_ps(x)) }
        fn load(from: *const f32) -> Self { Ymm(_mm256_loadu_ps(from)) }
        fn load_first(from: *const f32, n: usize) -> Self { Ymm(_mm256_maskload_ps(from, first(n))) }
        fn store(self, to: *mut f32) { _mm256_storeu_ps(to, self.0) }
        fn store_first(self, to: *mut f32, n: usize) { _mm256_maskstore_ps(to, first(n), self.0) }
        fn add(self, other: Self) -> Self { Ymm(_mm256_add_ps(self.0, other.0)) }
        fn sub(self, other: Self) -> Self { Ymm(_mm256_sub_ps(self.0, other.0)) }
        fn mul(self, other: Self) -> Self { Ymm(_mm256_mul_ps(self.0, other.0)) }
        fn div(self, other: Self) -> Self { Ymm(_mm256_div_ps(self.0, other.0)) }
        fn min(self, other: Self) -> Self { Ymm(_mm256_min_ps(self.0, other.0)) }
        fn max(self, other: Self) -> Self { Ymm(_mm256_max_ps(self.0, other.0)) }
        fn or_nan(self, other: Self) -> Self {
            Ymm(_mm256_blendv_ps(self.0, other.0, _mm256_cmp_ps::<_CMP_UNORD_Q>(other.0, other.0)))
        }
        fn mul_add(self, factor: Self, term: Self) -> Self { Ymm(_mm256_fmadd_ps(self.0, factor.0, term.0)) }
    }

    impl From<__m256> for Ymm {
        #[inline(always)]
        fn from(x: __m256) -> Ymm {
            Ymm(x)
        }
    }

    impl From<Ymm> for __m256 {
        #[inline(always)]
        fn from(x: Ymm) -> __m256 {
            x.0
        }
    }

    /// Sixteen floats in an AVX-512 register.
    #[derive(Clone, Copy)]
    pub struct Zmm(__m512);

    impl From<__m512> for Zmm {
        #[inline(always)]
        fn from(x: __m512) -> Zmm {
            Zmm(x)
        }
    }

    impl From<Zmm> for __m512 {
        #[inline(always)]
        fn from(x: Zmm) -> __m512 {
            x.0
        }
    }

    /// Ones for the first `n` lanes.
    #[inline(always)]
    fn mask(n: usize) -> __mmask16 {
        ((1u32 << n) - 1) as u16
    }

    lanes! {
        Zmm, 16, fma: true, turned: 16;
        fn columns<const R: usize>(from: *const f32, step: isize) -> [Self; 4] {
            // Quarters of a register are transposed apart from each other.
            let fours = |row: isize| {
                let part = |i: isize| _mm_loadu_ps(from.wrapping_offset((row + 4 * i) * step));
                let mut all = _mm512_castps128_ps512(part(0));
                if R > 4 { all = _mm512_insertf32x4::<1>(all, part(1)) }
                if R > 8 { all = _mm512_insertf32x4::<2>(all, part(2)) }
                if R > 12 { all = _mm512_insertf32x4::<3>(all, part(3)) }
                all
            };
            let (a, b, c, d) = (fours(0), fours(1), fours(2), fours(3));
            let [ab, cd] = [(a, b), (c, d)].map(|(a, b)| [_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)]);
            let [ab, cd] = [ab, cd].map(|pair| pair.map(|x| _mm512_castps_pd(x)));
            [
                Zmm(_mm512_castpd_ps(_mm512_unpacklo_pd(ab[0], cd[0]))),
                Zmm(_mm512_castpd_ps(_mm512_unpackhi_pd(ab[0], cd[0]))),
                Zmm(_mm512_castpd_ps(_mm512_unpacklo_pd(ab[1], cd[1]))),
                Zmm(_mm512_castpd_ps(_mm512_unpackhi_pd(ab[1], cd[1]))),
            ]
        }
        fn splat(x: f32) -> Self { Zmm(_mm512_set1_ps(x)) }
        fn load(from: *const f32) -> Self { Zmm(_mm512_loadu_ps(from)) }
        fn load_first(from: *const f32, n: usize) -> Self { Zmm(_mm512_maskz_loadu_ps(mask(n), from)) }
        fn store(self, to: *mut f32) { _mm512_storeu_ps(to, self.0) }
        fn store_first(self, to: *mut f32, n: usize) { _mm512_mask_storeu_ps(to, mask(n), self.0) }
        fn add(self, other: Self) -> Self { Zmm(_mm512_add_ps(self.0, other.0)) }
        fn sub(self, other: Self) -> Self { Zmm(_mm512_sub_ps(self.0, other.0)) }
        fn mul(self, other: Self) -> Self { Zmm(_mm512_mul_ps(self.0, other.0)) }
        fn div(self, other: Self) -> Self { Zmm(_mm512_div_ps(self.0, other.0)) }
        fn min(self, other: Self) -> Self { Zmm(_mm512_min_ps(self.0, other.0)) }
        fn max(self, other: Self) -> Self { Zmm(_mm512_max_ps(self.0, other.0)) }
        fn or_nan(self, other: Self) -> Self {
            Zmm(_mm512_mask_mov_ps(self.0, _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(other.0, other.0), other.0))
        }
        fn mul_add(self, factor: Self, term: Self) -> Self { Zmm(_mm512_fmadd_ps(self.0, factor.0, term.0)) }
    }
}

#[cfg(target_arch = "aarch64")]
pub(super) use neon::Neon;

#[cfg(target_arch = "aarch64")]
mod neon {
    use super::Lanes;
    use std::arch::aarch64::*;

    /// Eight floats in two NEON registers. They are as many as AVX2 has, so that sums are split in the same way, and give the same bits.
    #[derive(Clone, Copy)]
    pub struct Neon(pub float32x4_t, pub float32x4_t);

    /// Where `a` is less than `b`, `x`, else `y`.
    ///
    /// # Safety
    /// None but NEON.
    #[inline(always)]
    unsafe fn where_less(a: float32x4_t, b: float32x4_t, x: float32x4_t, y: float32x4_t) -> float32x4_t {
        // SAFETY: NEON is part of the baseline.
        unsafe { vbslq_f32(vcltq_f32(a, b), x, y) }
    }

    /// `x`, and `y` where that is NaN.
    ///
    /// # Safety
    /// None but NEON.
    #[inline(always)]
    unsafe fn or_nan(x: float32x4_t, y: float32x4_t) -> float32x4_t {
        // SAFETY: NEON is part of the baseline.
        unsafe { vbslq_f32(vceqq_f32(y, y), x, y) }
    }

    lanes! {
        Neon, 8, fma: true, column: [float32x4_t; 3];
        // Neighbours are loaded together, because a multiplication can take its factor from any lane, while a load into all lanes takes the
        // time of a multiplication.
        fn column<const M: usize>(from: *const f32, step: isize) -> [float32x4_t; 3] {
            let mut fours = [vdupq_n_f32(0.0); 3];
            for (four, at) in fours.iter_mut().zip((0..M).step_by(4)) {
                let from = from.wrapping_offset(at as isize * step);
                *four = match (step, (M - at).min(4)) {
                    (1, 4) => vld1q_f32(from),
                    (1, 2) => vcombine_f32(vld1_f32(from), vdup_n_f32(0.0)),
                    (_, count) => {
                        let mut lanes = [0.0; 4];
                        for (i, lane) in lanes.iter_mut().enumerate().take(count) {
                            *lane = *from.wrapping_offset(i as isize * step);
                        }
                        vld1q_f32(lanes.as_ptr())
                    }
                };
            }
            fours
        }
        fn splat_of(column: [float32x4_t; 3], i: usize) -> Self {
            let four = column[i / 4];
            let x = match i % 4 {
                0 => vdupq_laneq_f32::<0>(four),
                1 => vdupq_laneq_f32::<1>(four),
                2 => vdupq_laneq_f32::<2>(four),
                _ => vdupq_laneq_f32::<3>(four),
            };
            Neon(x, x)
        }
        fn splat(x: f32) -> Self { Neon(vdupq_n_f32(x), vdupq_n_f32(x)) }
        fn load(from: *const f32) -> Self { Neon(vld1q_f32(from), vld1q_f32(from.add(4))) }
        fn load_first(from: *const f32, n: usize) -> Self {
            let mut lanes = [0.0; 8];
            from.copy_to_nonoverlapping(lanes.as_mut_ptr(), n);
            Neon::load(lanes.as_ptr())
        }
        fn store(self, to: *mut f32) {
            vst1q_f32(to, self.0);
            vst1q_f32(to.add(4), self.1);
        }
        fn store_first(self, to: *mut f32, n: usize) {
            let mut lanes = [0.0; 8];
            self.store(lanes.as_mut_ptr());
            to.copy_from_nonoverlapping(lanes.as_ptr(), n);
        }
        fn add(self, other: Self) -> Self { Neon(vaddq_f32(self.0, other.0), vaddq_f32(self.1, other.1)) }
        fn sub(self, other: Self) -> Self { Neon(vsubq_f32(self.0, other.0), vsubq_f32(self.1, other.1)) }
        fn mul(self, other: Self) -> Self { Neon(vmulq_f32(self.0, other.0), vmulq_f32(self.1, other.1)) }
        fn div(self, other: Self) -> Self { Neon(vdivq_f32(self.0, other.0), vdivq_f32(self.1, other.1)) }
        fn min(self, other: Self) -> Self {
            Neon(where_less(self.0, other.0, self.0, other.0), where_less(self.1, other.1, self.1, other.1))
        }
        fn max(self, other: Self) -> Self {
            Neon(where_less(other.0, self.0, self.0, other.0), where_less(other.1, self.1, self.1, other.1))
        }
        fn or_nan(self, other: Self) -> Self { Neon(or_nan(self.0, other.0), or_nan(self.1, other.1)) }
        fn mul_add(self, factor: Self, term: Self) -> Self {
            Neon(vfmaq_f32(term.0, factor.0, self.0), vfmaq_f32(term.1, factor.1, self.1))
        }
    }
}

/// Compiles the generic function `$body::<L: Lanes>` once per instruction set. `$name` takes an [`Isa`] in front of the arguments and
/// calls the copy for it.
macro_rules! per_isa {
    ($(#[$doc:meta])* $vis:vis unsafe fn $name:ident($($args:tt)*) $(-> $out:ty)? => $body:ident) => {
        per_isa! { @make [$(#[$doc])*] [$vis] [unsafe] $name [$($args)*] [$(-> $out)?] $body }
    };
    ($(#[$doc:meta])* $vis:vis fn $name:ident($($args:tt)*) $(-> $out:ty)? => $body:ident) => {
        per_isa! { @make [$(#[$doc])*] [$vis] [] $name [$($args)*] [$(-> $out)?] $body }
    };
    (@make [$($doc:tt)*] [$vis:vis] [$($unsafe:tt)?] $name:ident [$($arg:ident: $ty:ty),*] [$($out:tt)*] $body:ident) => {
        $($doc)*
        $vis $($unsafe)? fn $name(isa: $crate::simd::Isa, $($arg: $ty),*) $($out)* {
            use $crate::simd;
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,bmi2")]
            unsafe fn avx512($($arg: $ty),*) $($out)* {
                // SAFETY: this function has the features of `Zmm`; the caller guarantees the rest.
                #[allow(unused_unsafe, reason = "the body may be safe")]
                unsafe { $body::<simd::Zmm>($($arg),*) }
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,bmi2")]
            unsafe fn avx2($($arg: $ty),*) $($out)* {
                // SAFETY: this function has the features of `Ymm`; the caller guarantees the rest.
                #[allow(unused_unsafe, reason = "the body may be safe")]
                unsafe { $body::<simd::Ymm>($($arg),*) }
            }
            // SAFETY: an `Isa` is proof that the CPU has its instructions, `Neon` is part of the baseline, and `Plain` needs none; the caller
            // guarantees the rest.
            #[allow(unused_unsafe, reason = "the bodies may be safe")]
            unsafe {
                match isa.level() {
                    #[cfg(target_arch = "aarch64")]
                    simd::Level::Neon => $body::<simd::Neon>($($arg),*),
                    #[cfg(target_arch = "x86_64")]
                    simd::Level::Avx512 | simd::Level::Avx512Vnni => avx512($($arg),*),
                    #[cfg(target_arch = "x86_64")]
                    simd::Level::Avx2 => avx2($($arg),*),
                    _ => $body::<simd::Plain>($($arg),*),
                }
            }
        }
    };
}
pub(super) use per_isa;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_instruction_set_turns_rows() {
        for isa in Isa::available() {
            for (rows, cols, step) in (1..35).flat_map(|rows| [0, 1, 3, 4, 9, 17].map(|cols| (rows, cols, rows + 2))) {
                let src: Vec<f32> = (0..rows * (cols + 1)).map(|i| i as f32).collect();
                let mut dst = vec![-1.0; cols * step];
                // SAFETY: both have room for these rows and columns, and for what is between them.
                unsafe { turn(isa, rows, cols, src.as_ptr(), cols as isize + 1, dst.as_mut_ptr(), step) }
                for (at, found) in dst.into_iter().enumerate() {
                    let (c, r) = (at / step, at % step);
                    let expected = if r < rows { (r * (cols + 1) + c) as f32 } else { -1.0 };
                    assert_eq!(found, expected, "{}: row {r}, column {c} of {rows} x {cols}", isa.name());
                }
            }
        }
    }
}
