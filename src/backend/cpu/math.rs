//! Elementary functions, reductions and strided copies over blocks of f32.
//!
//! Every function is written as plain branch-free scalar code and compiled once per instruction set, so that the compiler turns its loop
//! into vector code. Coefficients are minimax fits made for these ranges; the errors stated hold for all three instruction sets.

use super::simd::{Isa, Level, transpose};

/// A function of one number. The errors are in units in the last place of the exact result (ulp) or absolute, whichever is larger.
/// Infinities, NaN, signed zeros and denormals give what IEEE 754 and the function's limits say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unary {
    /// e to the x: 2 ulp.
    Exp,
    /// Natural logarithm: 2 ulp.
    Log,
    /// Hyperbolic tangent: 2 ulp.
    Tanh,
    /// Error function: 3 ulp.
    Erf,
    /// 1 / (1 + exp(-x)): 3 ulp.
    Sigmoid,
    /// x * (1 + erf(x / sqrt 2)) / 2: 1.2e-7 times |x|.
    Gelu,
    /// The tanh form of [`Unary::Gelu`]: 1.5e-7 times |x|.
    GeluTanh,
    /// Sine: 2 ulp, or 1e-7.
    Sin,
    /// Cosine: 2 ulp, or 1e-7.
    Cos,
    /// Square root, correctly rounded.
    Sqrt,
    /// 1 / x, correctly rounded.
    Reciprocal,
}

/// `a * b + c`, fused when the instruction set has it: without the instruction, the fused form would be a library call.
#[inline(always)]
fn fma<const FMA: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FMA { a.mul_add(b, c) } else { a * b + c }
}

/// As [`fma`], in f64.
#[inline(always)]
fn fma64<const FMA: bool>(a: f64, b: f64, c: f64) -> f64 {
    if FMA { a.mul_add(b, c) } else { a * b + c }
}

/// The polynomial with these coefficients, lowest first.
#[inline(always)]
fn poly<const FMA: bool, const N: usize>(x: f32, coefficients: [f32; N]) -> f32 {
    let mut sum = coefficients[N - 1];
    for i in (0..N - 1).rev() {
        sum = fma::<FMA>(sum, x, coefficients[i]);
    }
    sum
}

/// As [`poly`], in f64.
#[inline(always)]
fn poly64<const FMA: bool, const N: usize>(x: f64, coefficients: [f64; N]) -> f64 {
    let mut sum = coefficients[N - 1];
    for i in (0..N - 1).rev() {
        sum = fma64::<FMA>(sum, x, coefficients[i]);
    }
    sum
}

/// Adding this number rounds to an integer and leaves it in the low bits of the sum.
const ROUND: f32 = 12_582_912.0;
/// As [`ROUND`], in f64.
const ROUND64: f64 = 6_755_399_441_055_744.0;

/// 2 to the n, for n in -126..=127.
#[inline(always)]
fn power_of_two(n: i32) -> f32 {
    f32::from_bits((n.wrapping_add(127) as u32) << 23)
}

/// x = n ln 2 + r; exp(x) = 2^n (1 + r + r^2 p(r)).
#[inline(always)]
fn exp<const FMA: bool>(x: f32) -> f32 {
    // Results that are zero are selected, not computed: hardware is slow at underflow, and masks make it common.
    let zero = x < -104.0;
    let y = if zero { 0.0 } else { x };
    let y = if y > 89.0 { 89.0 } else { y };
    let shifted = fma::<FMA>(y, std::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    let bits = (shifted.to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32);
    let r = fma::<FMA>(n, -0.693_359_4, y);
    let r = fma::<FMA>(n, 2.121_944_4e-4, r);
    let p = poly::<FMA, 5>(r, [0.499_999_94, 0.166_665_21, 0.041_668_39, 0.008_368_717, 0.001_381_459_9]);
    let e = fma::<FMA>(r * r, p, r) + 1.0;
    // In two steps, because 2^n alone can be out of range when the result is not.
    let half = bits >> 1;
    let e = e * power_of_two(half) * power_of_two(bits.wrapping_sub(half));
    if zero { 0.0 } else { e }
}

/// x = 2^e (1 + r) with 1 + r around 1; log(1 + r) = r - r^2 / 2 + r^3 p(r).
#[inline(always)]
fn log<const FMA: bool>(x: f32) -> f32 {
    const SQRT_HALF: u32 = 0x3f35_04f3;
    let denormal = x < f32::MIN_POSITIVE;
    let y = if denormal { x * 33_554_432.0 } else { x };
    let bits = y.to_bits().wrapping_sub(SQRT_HALF) as i32;
    let e = (bits >> 23) as f32 - if denormal { 25.0 } else { 0.0 };
    let r = f32::from_bits(((bits & 0x7f_ffff) as u32).wrapping_add(SQRT_HALF)) - 1.0;
    let p = poly::<FMA, 9>(
        r,
        [
            0.333_333_13,
            -0.250_000_1,
            0.200_021_19,
            -0.166_679_96,
            0.142_195_52,
            -0.124_055_89,
            0.118_881_63,
            -0.116_756_51,
            0.067_466_386,
        ],
    );
    let square = r * r;
    let tail = fma::<FMA>(e, -2.121_944_4e-4, square * r * p);
    let log = fma::<FMA>(e, 0.693_359_4, r + fma::<FMA>(square, -0.5, tail));
    let log = if x == f32::INFINITY { x } else { log };
    let log = if x == 0.0 { f32::NEG_INFINITY } else { log };
    if x >= 0.0 { log } else { f32::NAN }
}

/// x + x^3 p(x^2) around zero, and 1 - 2 / (exp(2 |x|) + 1) beyond, where nothing cancels.
#[inline(always)]
fn tanh<const FMA: bool>(x: f32) -> f32 {
    let u = x * x;
    let p = poly::<FMA, 5>(u, [-0.333_332_78, 0.133_313_31, -0.053_730_007, 0.020_606_173, -0.005_666_974]);
    let near = fma::<FMA>(x * u, p, x);
    let far = 1.0 - 2.0 / (exp::<FMA>(2.0 * x.abs()) + 1.0);
    (if x.abs() < 0.625 { near } else { far }).copysign(x)
}

/// x p(x^2) around zero, and 1 - exp(-q(|x|)) beyond, up to where that is 1.
#[inline(always)]
fn erf<const FMA: bool>(x: f32) -> f32 {
    let u = x * x;
    let p = poly::<FMA, 7>(
        u,
        [
            std::f32::consts::FRAC_2_SQRT_PI,
            -0.376_126_35,
            0.112_836_97,
            -0.026_859_5,
            0.005_201_286,
            -8.145_597_5e-4,
            8.382_39e-5,
        ],
    );
    let a = if x.abs() > 3.95 { 3.95 } else { x.abs() };
    let q = poly::<FMA, 7>(
        a,
        [1.774_931_2e-4, 1.127_749_6, 0.637_059_75, 0.104_037_374, -0.022_277_094, 0.003_055_609_3, -1.971_819_3e-4],
    );
    let far = 1.0 - exp::<FMA>(-q);
    (if x.abs() < 0.91 { x * p } else { far }).copysign(x)
}

#[inline(always)]
fn sigmoid<const FMA: bool>(x: f32) -> f32 {
    let e = exp::<FMA>(-x.abs());
    (if x < 0.0 { e } else { 1.0 }) / (1.0 + e)
}

#[inline(always)]
fn gelu<const FMA: bool>(x: f32) -> f32 {
    0.5 * x * (1.0 + erf::<FMA>(x * std::f32::consts::FRAC_1_SQRT_2))
}

/// (1 + tanh(u)) / 2 is sigmoid(2 u), which does not cancel.
#[inline(always)]
fn gelu_tanh<const FMA: bool>(x: f32) -> f32 {
    x * sigmoid::<FMA>(1.595_769 * x * fma::<FMA>(0.044_715 * x, x, 1.0))
}

/// Beyond this the reduction to a quarter turn loses digits, and the library's function takes over.
const FAR: f32 = 1e8;

/// Sine (`turn` 0) or cosine (`turn` 1) for |x| <= `FAR`: x = n pi/2 + r, reduced in f64.
#[inline(always)]
fn sin_turned<const FMA: bool>(x: f32, turn: u32) -> f32 {
    // pi/2 as 33 bits and the rest, so that n times the first part is exact.
    const PI_2: (f64, f64) = (1.570_796_326_734_125_6, 6.077_100_506_506_192e-11);
    let shifted = fma64::<FMA>(f64::from(x), std::f64::consts::FRAC_2_PI, ROUND64);
    let n = shifted - ROUND64;
    let quarter = (shifted.to_bits() as u32).wrapping_add(turn);
    let r = fma64::<FMA>(n, -PI_2.1, fma64::<FMA>(n, -PI_2.0, f64::from(x))) as f32;
    let u = r * r;
    let sin = fma::<FMA>(r * u, poly::<FMA, 3>(u, [-0.166_666_55, 8.332_178e-3, -1.951_723_4e-4]), r);
    let cos =
        fma::<FMA>(u * u, poly::<FMA, 3>(u, [0.041_666_646, -1.388_736_7e-3, 2.443_838e-5]), fma::<FMA>(u, -0.5, 1.0));
    let value = if quarter & 1 == 0 { sin } else { cos };
    let value = f32::from_bits(value.to_bits() ^ ((quarter & 2) << 30));
    // Minus zero is lost by the reduction.
    if x == 0.0 && turn == 0 { x } else { value }
}

/// x to the y for finite positive x and finite y: 2 to the (y log2 x), in f64 because the exponent's absolute error counts.
#[inline(always)]
fn pow_positive<const FMA: bool>(x: f32, y: f32) -> f32 {
    let bits = f64::from(x).to_bits();
    let m = f64::from_bits((bits & 0x000f_ffff_ffff_ffff) | 0x3ff0_0000_0000_0000);
    let upper = m > std::f64::consts::SQRT_2;
    let e = f64::from((bits >> 52) as i32 - 1023) + if upper { 1.0 } else { 0.0 };
    let m = if upper { 0.5 * m } else { m };
    let s = (m - 1.0) / (m + 1.0);
    let u = s * s;
    let p = poly64::<FMA, 5>(
        u,
        [
            0.333_333_333_379_232_65,
            0.199_999_978_023_048_95,
            0.142_860_555_756_96,
            0.110_880_494_670_161,
            0.097_927_654_899_549_7,
        ],
    );
    let log2 = fma64::<FMA>(2.0 * std::f64::consts::LOG2_E * s, fma64::<FMA>(u, p, 1.0), e);
    let v = f64::from(y) * log2;
    let v = if v > 200.0 { 200.0 } else { v };
    let v = if v < -200.0 { -200.0 } else { v };
    let shifted = v + ROUND64;
    let r = v - (shifted - ROUND64);
    let n = shifted.to_bits().wrapping_sub(ROUND64.to_bits());
    let p = poly64::<FMA, 8>(
        r,
        [
            0.693_147_180_546_128_3,
            0.240_226_506_955_535_16,
            0.055_504_109_407_942_905,
            0.009_618_129_219_654_463,
            0.001_333_345_081_804_123_7,
            0.000_154_034_152_971_925_92,
            0.000_015_310_033_644_933_154,
            0.000_001_326_353_676_074_494,
        ],
    );
    (fma64::<FMA>(r, p, 1.0) * f64::from_bits(n.wrapping_add(1023) << 52)) as f32
}

/// Compiles a generic function once per instruction set and calls the one that fits: `$body` runs as `$name::<FMA>(args)`.
macro_rules! multiversion {
    ($(#[$doc:meta])* $vis:vis fn $name:ident($($arg:ident: $type:ty),*) $(-> $out:ty)? => $body:ident) => {
        $(#[$doc])*
        $vis fn $name(isa: Isa, $($arg: $type),*) $(-> $out)? {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
            fn avx512($($arg: $type),*) $(-> $out)? {
                $body::<true>($($arg),*)
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma")]
            fn avx2($($arg: $type),*) $(-> $out)? {
                $body::<true>($($arg),*)
            }
            match isa.level() {
                // SAFETY (both): an `Isa` is proof that the CPU has the features.
                #[cfg(target_arch = "x86_64")]
                Level::Avx512 => unsafe { avx512($($arg),*) },
                #[cfg(target_arch = "x86_64")]
                Level::Avx2 => unsafe { avx2($($arg),*) },
                _ => $body::<{ cfg!(target_arch = "aarch64") }>($($arg),*),
            }
        }
    };
}

multiversion! {
    /// `y[i] = op(x[i])`.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn unary(op: Unary, x: &[f32], y: &mut [f32]) => unary_body
}
multiversion! {
    /// `x[i] = op(x[i])`.
    pub fn unary_in_place(op: Unary, x: &mut [f32]) => unary_in_place_body
}
multiversion! {
    /// `z[i] = x[i]` to the power `y[i]`: 1 ulp, with the special cases of C's `pow`.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn pow(x: &[f32], y: &[f32], z: &mut [f32]) => pow_body
}
multiversion! {
    /// `y[i] = x[i]` to the power `exponent`. Whole exponents up to 4 and plus or minus one half are products and roots.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn pow_scalar(x: &[f32], exponent: f32, y: &mut [f32]) => pow_scalar_body
}
multiversion! {
    /// `x[i] = exp(x[i] - max) / sum`, where `max` is the largest element and `sum` that of the numerators.
    pub fn softmax_in_place(x: &mut [f32]) => softmax_body
}
multiversion! {
    /// The sum of `x`.
    pub fn sum(x: &[f32]) -> f32 => sum_body
}
multiversion! {
    /// The sum of squares of `x[i] - shift`.
    pub fn sum_squares(x: &[f32], shift: f32) -> f32 => sum_squares_body
}
multiversion! {
    /// The sum of `x[i] * y[i]`.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn dot(x: &[f32], y: &[f32]) -> f32 => dot_body
}
multiversion! {
    /// The largest element; minus infinity if there is none. A NaN anywhere makes the result NaN.
    pub fn max(x: &[f32]) -> f32 => max_body
}
multiversion! {
    /// The smallest element; infinity if there is none. A NaN anywhere makes the result NaN.
    pub fn min(x: &[f32]) -> f32 => min_body
}

#[inline(always)]
fn each(x: &[f32], y: &mut [f32], f: impl Fn(f32) -> f32) {
    assert_eq!(x.len(), y.len(), "as many results as arguments");
    for (y, &x) in y.iter_mut().zip(x) {
        *y = f(x);
    }
}

#[inline(always)]
fn each_in_place(x: &mut [f32], f: impl Fn(f32) -> f32) {
    for x in x {
        *x = f(*x);
    }
}

/// How many elements are looked at together for a special case.
const CHUNK: usize = 64;

/// `f` where `usual` holds and `rare` elsewhere; chunks with nothing rare in them are computed without a branch.
#[inline(always)]
fn each_or(x: &mut [f32], f: impl Fn(f32) -> f32, usual: impl Fn(f32) -> bool, rare: impl Fn(f32) -> f32) {
    for x in x.chunks_mut(CHUNK) {
        if x.iter().fold(true, |all, &x| all & usual(x)) {
            each_in_place(x, &f);
        } else {
            each_in_place(x, |x| if usual(x) { f(x) } else { rare(x) });
        }
    }
}

#[inline(always)]
fn unary_body<const FMA: bool>(op: Unary, x: &[f32], y: &mut [f32]) {
    match op {
        Unary::Exp => each(x, y, exp::<FMA>),
        Unary::Log => each(x, y, log::<FMA>),
        Unary::Tanh => each(x, y, tanh::<FMA>),
        Unary::Erf => each(x, y, erf::<FMA>),
        Unary::Sigmoid => each(x, y, sigmoid::<FMA>),
        Unary::Gelu => each(x, y, gelu::<FMA>),
        Unary::GeluTanh => each(x, y, gelu_tanh::<FMA>),
        Unary::Sqrt => each(x, y, f32::sqrt),
        Unary::Reciprocal => each(x, y, f32::recip),
        Unary::Sin | Unary::Cos => {
            y.copy_from_slice(x);
            unary_in_place_body::<FMA>(op, y);
        }
    }
}

#[inline(always)]
fn unary_in_place_body<const FMA: bool>(op: Unary, x: &mut [f32]) {
    let near = |x: f32| x.abs() <= FAR;
    match op {
        Unary::Exp => each_in_place(x, exp::<FMA>),
        Unary::Log => each_in_place(x, log::<FMA>),
        Unary::Tanh => each_in_place(x, tanh::<FMA>),
        Unary::Erf => each_in_place(x, erf::<FMA>),
        Unary::Sigmoid => each_in_place(x, sigmoid::<FMA>),
        Unary::Gelu => each_in_place(x, gelu::<FMA>),
        Unary::GeluTanh => each_in_place(x, gelu_tanh::<FMA>),
        Unary::Sqrt => each_in_place(x, f32::sqrt),
        Unary::Reciprocal => each_in_place(x, f32::recip),
        Unary::Sin => each_or(x, |x| sin_turned::<FMA>(x, 0), near, |x| f64::from(x).sin() as f32),
        Unary::Cos => each_or(x, |x| sin_turned::<FMA>(x, 1), near, |x| f64::from(x).cos() as f32),
    }
}

#[inline(always)]
fn pow_body<const FMA: bool>(x: &[f32], y: &[f32], z: &mut [f32]) {
    assert!(x.len() == y.len() && y.len() == z.len(), "as many results as arguments");
    let usual = |x: f32, y: f32| x > 0.0 && x < f32::INFINITY && y.abs() < f32::INFINITY;
    for ((x, y), z) in x.chunks(CHUNK).zip(y.chunks(CHUNK)).zip(z.chunks_mut(CHUNK)) {
        let pairs = x.iter().zip(y);
        if pairs.clone().fold(true, |all, (&x, &y)| all & usual(x, y)) {
            for (z, (&x, &y)) in z.iter_mut().zip(pairs) {
                *z = pow_positive::<FMA>(x, y);
            }
        } else {
            for (z, (&x, &y)) in z.iter_mut().zip(pairs) {
                *z = if usual(x, y) { pow_positive::<FMA>(x, y) } else { x.powf(y) };
            }
        }
    }
}

#[inline(always)]
fn pow_scalar_body<const FMA: bool>(x: &[f32], exponent: f32, y: &mut [f32]) {
    if exponent == 2.0 {
        each(x, y, |x| x * x);
    } else if exponent == 0.5 {
        // C's pow makes both zeros plus zero and minus infinity plus infinity, where a square root would not.
        each(x, y, |x| if x == f32::NEG_INFINITY { f32::INFINITY } else { (x + 0.0).sqrt() });
    } else if exponent == -0.5 {
        each(x, y, |x| if x == f32::NEG_INFINITY { 0.0 } else { (x + 0.0).sqrt().recip() });
    } else if exponent == 1.0 {
        y.copy_from_slice(x);
    } else if exponent == -1.0 {
        each(x, y, f32::recip);
    } else if exponent == 0.0 {
        y.fill(1.0);
    } else if exponent == 3.0 {
        each(x, y, |x| x * x * x);
    } else if exponent == 4.0 {
        each(x, y, |x| (x * x) * (x * x));
    } else {
        y.copy_from_slice(x);
        let usual = |x: f32| x > 0.0 && x < f32::INFINITY && exponent.abs() < f32::INFINITY;
        each_or(y, |x| pow_positive::<FMA>(x, exponent), usual, |x| x.powf(exponent));
    }
}

#[inline(always)]
fn softmax_body<const FMA: bool>(x: &mut [f32]) {
    let shift = max_body::<FMA>(x);
    each_in_place(x, |x| exp::<FMA>(x - shift));
    let scale = 1.0 / sum_body::<FMA>(x);
    each_in_place(x, |x| x * scale);
}

/// Accumulators of a reduction: enough for four of the widest vectors, which hides the latency of an addition.
const WAYS: usize = 64;

/// Folds `x` in `WAYS` independent parts and joins them in a fixed order.
#[inline(always)]
fn fold(x: &[f32], start: f32, step: impl Fn(f32, f32) -> f32, join: impl Fn(f32, f32) -> f32) -> f32 {
    let mut parts = [start; WAYS];
    let (chunks, rest) = x.as_chunks::<WAYS>();
    for chunk in chunks {
        for (part, &x) in parts.iter_mut().zip(chunk) {
            *part = step(*part, x);
        }
    }
    for (part, &x) in parts.iter_mut().zip(rest) {
        *part = step(*part, x);
    }
    let mut width = WAYS / 2;
    while width > 0 {
        for i in 0..width {
            parts[i] = join(parts[i], parts[i + width]);
        }
        width /= 2;
    }
    parts[0]
}

#[inline(always)]
fn sum_body<const FMA: bool>(x: &[f32]) -> f32 {
    fold(x, 0.0, |sum, x| sum + x, |a, b| a + b)
}

#[inline(always)]
fn sum_squares_body<const FMA: bool>(x: &[f32], shift: f32) -> f32 {
    fold(x, 0.0, |sum, x| fma::<FMA>(x - shift, x - shift, sum), |a, b| a + b)
}

#[inline(always)]
fn dot_body<const FMA: bool>(x: &[f32], y: &[f32]) -> f32 {
    assert_eq!(x.len(), y.len(), "vectors of one length");
    let mut parts = [0.0; WAYS];
    let ((x_chunks, x_rest), (y_chunks, y_rest)) = (x.as_chunks::<WAYS>(), y.as_chunks::<WAYS>());
    for (x, y) in x_chunks.iter().zip(y_chunks) {
        for i in 0..WAYS {
            parts[i] = fma::<FMA>(x[i], y[i], parts[i]);
        }
    }
    for ((part, &x), &y) in parts.iter_mut().zip(x_rest).zip(y_rest) {
        *part = fma::<FMA>(x, y, *part);
    }
    sum_body::<FMA>(&parts)
}

#[inline(always)]
fn max_body<const FMA: bool>(x: &[f32]) -> f32 {
    let larger = |a: f32, b: f32| if b > a || b.is_nan() { b } else { a };
    fold(x, f32::NEG_INFINITY, larger, larger)
}

#[inline(always)]
fn min_body<const FMA: bool>(x: &[f32]) -> f32 {
    let smaller = |a: f32, b: f32| if b < a || b.is_nan() { b } else { a };
    fold(x, f32::INFINITY, smaller, smaller)
}

/// `dst[r * dst_steps.0 + c * dst_steps.1] = src[r * src_steps.0 + c * src_steps.1]` for `r < rows`, `c < cols`: copies, transposes,
/// gathers and spreads a block of any 4-byte elements. Fast when one of the two dimensions is contiguous on each side.
///
/// # Safety
/// `src` must be readable and `dst` writable at every element named above, and the two must not overlap.
pub unsafe fn copy_2d(
    rows: usize,
    cols: usize,
    src: *const f32,
    src_steps: (isize, isize),
    dst: *mut f32,
    dst_steps: (isize, isize),
) {
    // Which dimension is called the row is ours to choose.
    if dst_steps.1 != 1 && dst_steps.0 == 1 {
        let turn = |steps: (isize, isize)| (steps.1, steps.0);
        // SAFETY: the same elements.
        return unsafe { copy_2d(cols, rows, src, turn(src_steps), dst, turn(dst_steps)) };
    }
    // SAFETY: the caller's word; every index is below `rows` and `cols`.
    unsafe {
        if src_steps.1 == 1 && dst_steps.1 == 1 {
            for r in 0..rows as isize {
                dst.offset(r * dst_steps.0).copy_from_nonoverlapping(src.offset(r * src_steps.0), cols);
            }
        } else if src_steps.0 == 1 && dst_steps.1 == 1 && dst_steps.0 >= 0 {
            // Blocks of whole cache lines on both sides.
            const SIDE: usize = 16;
            for c in (0..cols).step_by(SIDE) {
                for r in (0..rows).step_by(SIDE) {
                    let from = src.offset(c as isize * src_steps.1).add(r);
                    let to = dst.offset(r as isize * dst_steps.0).add(c);
                    let (height, width) = (SIDE.min(cols - c), SIDE.min(rows - r));
                    transpose(height, width, from, src_steps.1, to, dst_steps.0 as usize);
                }
            }
        } else {
            for r in 0..rows as isize {
                let (from, to) = (src.offset(r * src_steps.0), dst.offset(r * dst_steps.0));
                for c in 0..cols as isize {
                    *to.offset(c * dst_steps.1) = *from.offset(c * src_steps.1);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Distance in units in the last place of the exact result.
    fn ulps(got: f32, exact: f64) -> f64 {
        let want = exact as f32;
        if got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan() {
            return 0.0;
        }
        if !got.is_finite() || !want.is_finite() {
            // One step past the largest number counts as one.
            return if got.abs().max(want.abs()) == f32::INFINITY && got.abs().min(want.abs()) == f32::MAX {
                1.0
            } else {
                f64::INFINITY
            };
        }
        let exponent = (exact.abs().max(f64::from(f32::MIN_POSITIVE))).log2().floor() as i32;
        (f64::from(got) - exact).abs() / 2f64.powi(exponent - 23)
    }

    /// Numbers of every exponent and both signs, and the special ones.
    fn everywhere() -> Vec<f32> {
        let mut all: Vec<f32> = (0..1u64 << 32).step_by(35_537).map(|bits| f32::from_bits(bits as u32)).collect();
        // Signalling NaNs are nobody's input.
        all.retain(|x| !x.is_nan());
        let one = 1f32.to_bits();
        for special in
            [0.0, 1e-45, f32::MIN_POSITIVE, 1.0, 2.0, 88.0, 88.722_84, 89.0, 103.9, 104.1, 1e8, f32::MAX, f32::INFINITY]
        {
            all.extend([special, -special]);
        }
        all.extend([f32::NAN, f32::from_bits(one - 1), f32::from_bits(one + 1)]);
        // Everything of interest happens between -20 and 20.
        all.extend((-100_000..100_000).map(|i| i as f32 * 2e-4 + 1e-5));
        all
    }

    /// Abramowitz and Stegun 7.1.5 and 7.1.14: a series for small and a continued fraction for large arguments.
    fn erf_exact(x: f64) -> f64 {
        if x.abs() < 3.0 {
            let (mut term, mut sum) = (x, x);
            for n in 1..80 {
                term *= -x * x / f64::from(n);
                sum += term / f64::from(2 * n + 1);
            }
            sum * std::f64::consts::FRAC_2_SQRT_PI
        } else if x.abs() < 7.0 {
            let mut fraction = x.abs();
            for n in (1..100).rev() {
                fraction = x.abs() + f64::from(n) / 2.0 / fraction;
            }
            (1.0 - (-x * x).exp() / fraction / std::f64::consts::PI.sqrt()).copysign(x)
        } else {
            x.clamp(-1.0, 1.0)
        }
    }

    #[test]
    fn functions_are_as_exact_as_they_say() {
        type Case = (Unary, fn(f64) -> f64, f64, f64);
        let cases: [Case; 11] = [
            (Unary::Exp, f64::exp, 2.0, 0.0),
            (Unary::Log, f64::ln, 2.0, 0.0),
            (Unary::Tanh, f64::tanh, 2.0, 0.0),
            (Unary::Erf, erf_exact, 3.0, 0.0),
            (Unary::Sigmoid, |x| 1.0 / (1.0 + (-x).exp()), 3.0, 0.0),
            (Unary::Gelu, |x| 0.5 * x * (1.0 + erf_exact(x / 2f64.sqrt())), 2.0, 1.2e-7),
            (
                Unary::GeluTanh,
                |x| x / (1.0 + (-1.595_769_121_605_731 * (x + 0.044_715 * x * x * x)).exp()),
                2.0,
                1.5e-7,
            ),
            (Unary::Sin, f64::sin, 2.0, 1e-7),
            (Unary::Cos, f64::cos, 2.0, 1e-7),
            (Unary::Sqrt, f64::sqrt, 0.5, 0.0),
            (Unary::Reciprocal, f64::recip, 0.5, 0.0),
        ];
        let x = everywhere();
        for isa in Isa::available() {
            for (op, exact, limit, absolute) in cases {
                let mut y = vec![0.0; x.len()];
                unary(isa, op, &x, &mut y);
                let mut in_place = x.clone();
                unary_in_place(isa, op, &mut in_place);
                assert!(y.iter().zip(&in_place).all(|(a, b)| a.to_bits() == b.to_bits()), "{op:?}");
                let mut worst = (0.0, 0.0, 0.0);
                for (&x, &y) in x.iter().zip(&y) {
                    let want = exact(f64::from(x));
                    // The limits of 0 * inf are not of interest.
                    if matches!(op, Unary::Gelu | Unary::GeluTanh) && (x.is_nan() || x.abs() > 1e12) {
                        continue;
                    }
                    let error = ulps(y, want);
                    let close = (f64::from(y) - want).abs() <= absolute * f64::from(x.abs().max(1.0));
                    if error > worst.0 && !close {
                        worst = (error, x, y);
                    }
                }
                println!("{} {op:?}: {worst:?}", isa.name());
                assert!(worst.0 <= limit, "{} {op:?}: {worst:?}", isa.name());
            }
        }
    }

    #[test]
    fn signed_zeros_and_limits() {
        for isa in Isa::available() {
            let one = |op, x: f32| {
                let mut y = [x];
                unary_in_place(isa, op, &mut y);
                y[0]
            };
            for op in [Unary::Tanh, Unary::Erf, Unary::Sin, Unary::Gelu, Unary::Sqrt] {
                assert_eq!(one(op, -0.0).to_bits(), (-0f32).to_bits(), "{op:?}");
            }
            assert_eq!(one(Unary::Exp, f32::NEG_INFINITY), 0.0);
            assert_eq!(one(Unary::Exp, f32::INFINITY), f32::INFINITY);
            assert_eq!(one(Unary::Log, -0.0), f32::NEG_INFINITY);
            assert!(one(Unary::Log, -1.0).is_nan());
            assert_eq!(one(Unary::Tanh, 30.0), 1.0);
            assert_eq!(one(Unary::Erf, f32::NEG_INFINITY), -1.0);
            assert_eq!(one(Unary::Sigmoid, f32::NEG_INFINITY), 0.0);
        }
    }

    #[test]
    fn powers() {
        let some = [
            0.0, -0.0, 1.0, -1.0, 0.5, 2.0, 3.0, 4.0, -2.0, -0.5, 0.75, 10.25, 1e-40, 1e30, -7.0, 1.000_001, 31.9,
            150.0,
        ];
        let rare = [f32::INFINITY, f32::NEG_INFINITY, f32::NAN];
        for isa in Isa::available() {
            for y in some.into_iter().chain(rare) {
                let x: Vec<f32> = everywhere().into_iter().step_by(31).chain(some).chain(rare).collect();
                let mut scalar = vec![0.0; x.len()];
                pow_scalar(isa, &x, y, &mut scalar);
                let mut general = vec![0.0; x.len()];
                pow(isa, &x, &vec![y; x.len()], &mut general);
                for ((&x, &scalar), &general) in x.iter().zip(&scalar).zip(&general) {
                    let exact = f64::from(x).powf(f64::from(y));
                    assert!(ulps(general, exact) <= 1.0, "{} {x}^{y} = {exact}, not {general}", isa.name());
                    // Two or three roundings; and products of tiny numbers underflow early.
                    assert!(ulps(scalar, exact) <= 2.0, "{} {x}^{y} = {exact}, not {scalar}", isa.name());
                }
            }
        }
    }

    #[test]
    fn reductions_of_every_length() {
        let x: Vec<f32> = (0..1000).map(|i| ((i * 7919) % 1009) as f32 - 504.0).collect();
        for isa in Isa::available() {
            for len in (0..200).chain([511, 1000]) {
                let x = &x[..len];
                let exact = |f: fn(f64) -> f64| x.iter().map(|&x| f(f64::from(x))).sum::<f64>();
                assert_eq!(f64::from(sum(isa, x)), exact(|x| x));
                assert!(
                    (f64::from(sum_squares(isa, x, 1.0)) / exact(|x| (x - 1.0).powi(2)).max(1.0) - 1.0).abs() < 1e-6
                        || len == 0
                );
                assert!((f64::from(dot(isa, x, x)) / exact(|x| x * x).max(1.0) - 1.0).abs() < 1e-6 || len == 0);
                assert_eq!(max(isa, x), x.iter().copied().fold(f32::NEG_INFINITY, f32::max));
                assert_eq!(min(isa, x), x.iter().copied().fold(f32::INFINITY, f32::min));
                let mut y: Vec<f32> = x.iter().map(|x| x / 100.0).collect();
                softmax_in_place(isa, &mut y);
                let max = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                let power = |x: f32| f64::from((x - max) / 100.0).exp();
                let total: f64 = x.iter().map(|&x| power(x)).sum();
                assert!(x.iter().zip(&y).all(|(&x, &y)| (f64::from(y) / (power(x) / total) - 1.0).abs() < 1e-5));
            }
            for at in [0, 63, 64, 130] {
                let mut x = vec![1.0; 131];
                x[at] = f32::NAN;
                assert!(max(isa, &x).is_nan() && min(isa, &x).is_nan());
            }
        }
    }

    #[test]
    fn copies_of_any_strides() {
        for (rows, cols) in [(0, 3), (1, 1), (3, 5), (4, 4), (17, 33), (64, 20)] {
            let (r, c) = (rows as isize, cols as isize);
            let steps = [(c, 1), (1, r), (c + 2, 1), (1, r + 1), (2 * c, 2), (0, 1), (-c, 1), (1, -r)];
            for src_steps in steps {
                for dst_steps in &steps[..5] {
                    let span = |steps: (isize, isize)| {
                        let (a, b) = ((r - 1).max(0) * steps.0, (c - 1).max(0) * steps.1);
                        (a.min(0) + b.min(0), a.max(0) + b.max(0))
                    };
                    let (low, high) = span(src_steps);
                    let src: Vec<f32> = (low..=high).map(|i| i as f32).collect();
                    let mut dst = vec![f32::NAN; span(*dst_steps).1 as usize + 1];
                    // SAFETY: the buffers reach from the lowest to the highest element that the strides name.
                    unsafe {
                        copy_2d(rows, cols, src.as_ptr().offset(-low), src_steps, dst.as_mut_ptr(), *dst_steps);
                    }
                    for i in 0..r {
                        for j in 0..c {
                            let got = dst[(i * dst_steps.0 + j * dst_steps.1) as usize];
                            assert_eq!(got, (i * src_steps.0 + j * src_steps.1) as f32);
                        }
                    }
                }
            }
        }
    }
}
