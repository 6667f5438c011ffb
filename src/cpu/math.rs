//! Elementary functions over blocks of f32.
//!
//! Every function is written as plain branch-free scalar code and compiled once per instruction set, so that the compiler turns its loop
//! into vector code. Coefficients are minimax fits made for these ranges; the errors stated hold for all three instruction sets.

use super::simd::{Lanes, multiply_add, per_isa};
use plimsoll_core::kernel::Reduction;

/// A function of one number. Errors are in units in the last place of the exact result (ulp) or absolute, whichever is larger.
/// Infinities, NaN, signed zeros and denormals give the results of IEEE 754 and the function's limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Elementary {
    /// e to the x: 2 ulp.
    Exp,
    /// Natural logarithm: 2 ulp.
    Log,
    /// Hyperbolic tangent: 2 ulp.
    Tanh,
    /// Error function: 3 ulp.
    Erf,
    /// Sine: 2 ulp, or 1e-7.
    Sin,
    /// Cosine: 2 ulp, or 1e-7.
    Cos,
}

/// As [`multiply_add`], in f64.
#[inline(always)]
fn multiply_add64<L: Lanes>(a: f64, b: f64, c: f64) -> f64 {
    if L::FMA { a.mul_add(b, c) } else { a * b + c }
}

/// The polynomial with these coefficients, lowest first.
#[inline(always)]
fn poly<L: Lanes, const N: usize>(x: f32, coefficients: [f32; N]) -> f32 {
    let mut sum = coefficients[N - 1];
    for i in (0..N - 1).rev() {
        sum = multiply_add::<L>(sum, x, coefficients[i]);
    }
    sum
}

/// As [`poly`], in f64.
#[inline(always)]
fn poly64<L: Lanes, const N: usize>(x: f64, coefficients: [f64; N]) -> f64 {
    let mut sum = coefficients[N - 1];
    for i in (0..N - 1).rev() {
        sum = multiply_add64::<L>(sum, x, coefficients[i]);
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
fn exp<L: Lanes>(x: f32) -> f32 {
    // Results that are zero are selected, not computed: hardware is slow at underflow, and masks make it common.
    let zero = x < -104.0;
    let y = if zero { 0.0 } else { x };
    let y = if y > 89.0 { 89.0 } else { y };
    let shifted = multiply_add::<L>(y, std::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    let bits = (shifted.to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32);
    let r = multiply_add::<L>(n, -0.693_359_4, y);
    let r = multiply_add::<L>(n, 2.121_944_4e-4, r);
    let p = poly::<L, 5>(r, [0.499_999_94, 0.166_665_21, 0.041_668_39, 0.008_368_717, 0.001_381_459_9]);
    let e = multiply_add::<L>(r * r, p, r) + 1.0;
    // In two steps, because 2^n alone can be out of range when the result is not.
    let half = bits >> 1;
    let e = e * power_of_two(half) * power_of_two(bits.wrapping_sub(half));
    if zero { 0.0 } else { e }
}

/// x = 2^e (1 + r) with 1 + r around 1; log(1 + r) = r - r^2 / 2 + r^3 p(r).
#[inline(always)]
fn log<L: Lanes>(x: f32) -> f32 {
    const SQRT_HALF: u32 = 0x3f35_04f3;
    let denormal = x < f32::MIN_POSITIVE;
    let y = if denormal { x * 33_554_432.0 } else { x };
    let bits = y.to_bits().wrapping_sub(SQRT_HALF) as i32;
    let e = (bits >> 23) as f32 - if denormal { 25.0 } else { 0.0 };
    let r = f32::from_bits(((bits & 0x7f_ffff) as u32).wrapping_add(SQRT_HALF)) - 1.0;
    let p = poly::<L, 9>(
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
    let tail = multiply_add::<L>(e, -2.121_944_4e-4, square * r * p);
    let log = multiply_add::<L>(e, 0.693_359_4, r + multiply_add::<L>(square, -0.5, tail));
    let log = if x == f32::INFINITY { x } else { log };
    let log = if x == 0.0 { f32::NEG_INFINITY } else { log };
    if x >= 0.0 { log } else { f32::NAN }
}

/// x + x^3 p(x^2) around zero, and 1 - 2 / (exp(2 |x|) + 1) beyond, where nothing cancels.
#[inline(always)]
fn tanh<L: Lanes>(x: f32) -> f32 {
    let u = x * x;
    let p = poly::<L, 5>(u, [-0.333_332_78, 0.133_313_31, -0.053_730_007, 0.020_606_173, -0.005_666_974]);
    let near = multiply_add::<L>(x * u, p, x);
    let far = 1.0 - 2.0 / (exp::<L>(2.0 * x.abs()) + 1.0);
    (if x.abs() < 0.625 { near } else { far }).copysign(x)
}

/// x p(x^2) around zero, and 1 - exp(-q(|x|)) beyond, up to where that is 1.
#[inline(always)]
fn erf<L: Lanes>(x: f32) -> f32 {
    let u = x * x;
    let p = poly::<L, 7>(
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
    let q = poly::<L, 7>(
        a,
        [1.774_931_2e-4, 1.127_749_6, 0.637_059_75, 0.104_037_374, -0.022_277_094, 0.003_055_609_3, -1.971_819_3e-4],
    );
    let far = 1.0 - exp::<L>(-q);
    (if x.abs() < 0.91 { x * p } else { far }).copysign(x)
}

/// Beyond this the reduction to quarters of a circle loses digits, and the library's function is used.
const FAR: f32 = 1e8;

/// Sine (`quarters` 0) or cosine (`quarters` 1) for |x| <= `FAR`: x = n pi/2 + r, reduced in f64.
#[inline(always)]
fn sin_of_quarters<L: Lanes>(x: f32, quarters: u32) -> f32 {
    // pi/2 as 33 bits and the rest, so that n times the first part is exact.
    const PI_2: (f64, f64) = (1.570_796_326_734_125_6, 6.077_100_506_506_192e-11);
    let shifted = multiply_add64::<L>(f64::from(x), std::f64::consts::FRAC_2_PI, ROUND64);
    let n = shifted - ROUND64;
    let quarter = (shifted.to_bits() as u32).wrapping_add(quarters);
    let r = multiply_add64::<L>(n, -PI_2.1, multiply_add64::<L>(n, -PI_2.0, f64::from(x))) as f32;
    let u = r * r;
    let sin = multiply_add::<L>(r * u, poly::<L, 3>(u, [-0.166_666_55, 8.332_178e-3, -1.951_723_4e-4]), r);
    let cos = multiply_add::<L>(
        u * u,
        poly::<L, 3>(u, [0.041_666_646, -1.388_736_7e-3, 2.443_838e-5]),
        multiply_add::<L>(u, -0.5, 1.0),
    );
    let value = if quarter & 1 == 0 { sin } else { cos };
    let value = f32::from_bits(value.to_bits() ^ ((quarter & 2) << 30));
    // Minus zero is lost by the reduction.
    if x == 0.0 && quarters == 0 { x } else { value }
}

/// x to the y for finite positive x and finite y: 2 to the (y log2 x), in f64 because the exponent's absolute error counts.
#[inline(always)]
fn pow_positive<L: Lanes>(x: f32, y: f32) -> f32 {
    let bits = f64::from(x).to_bits();
    let m = f64::from_bits((bits & 0x000f_ffff_ffff_ffff) | 0x3ff0_0000_0000_0000);
    let upper = m > std::f64::consts::SQRT_2;
    let e = f64::from((bits >> 52) as i32 - 1023) + if upper { 1.0 } else { 0.0 };
    let m = if upper { 0.5 * m } else { m };
    let s = (m - 1.0) / (m + 1.0);
    let u = s * s;
    let p = poly64::<L, 5>(
        u,
        [
            0.333_333_333_379_232_65,
            0.199_999_978_023_048_95,
            0.142_860_555_756_96,
            0.110_880_494_670_161,
            0.097_927_654_899_549_7,
        ],
    );
    let log2 = multiply_add64::<L>(2.0 * std::f64::consts::LOG2_E * s, multiply_add64::<L>(u, p, 1.0), e);
    let v = f64::from(y) * log2;
    let v = if v > 200.0 { 200.0 } else { v };
    let v = if v < -200.0 { -200.0 } else { v };
    let shifted = v + ROUND64;
    let r = v - (shifted - ROUND64);
    let n = shifted.to_bits().wrapping_sub(ROUND64.to_bits());
    let p = poly64::<L, 8>(
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
    (multiply_add64::<L>(r, p, 1.0) * f64::from_bits(n.wrapping_add(1023) << 52)) as f32
}

per_isa! {
    /// `y[i] = function(x[i])`.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn elementary(function: Elementary, x: &[f32], y: &mut [f32]) => elementary_body
}
per_isa! {
    /// `z[i] = x[i]` to the power `y[i]`: 1 ulp, with the special cases of C's `pow`.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn pow(x: &[f32], y: &[f32], z: &mut [f32]) => pow_body
}
per_isa! {
    /// `y[i] = x[i]` to the power `exponent`. Whole exponents up to 4 and plus or minus one half are products and roots.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn pow_scalar(x: &[f32], exponent: f32, y: &mut [f32]) => pow_scalar_body
}
per_isa! {
    /// `x[i] = exp(x[i] - max) / sum`, where `max` is the largest element and `sum` that of the numerators.
    pub fn softmax_in_place(x: &mut [f32]) => softmax_body
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

/// The number of elements that are searched together for a special case.
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
fn elementary_body<L: Lanes>(function: Elementary, x: &[f32], y: &mut [f32]) {
    let near = |x: f32| x.abs() <= FAR;
    match function {
        Elementary::Exp => each(x, y, exp::<L>),
        Elementary::Log => each(x, y, log::<L>),
        Elementary::Tanh => each(x, y, tanh::<L>),
        Elementary::Erf => each(x, y, erf::<L>),
        Elementary::Sin => {
            y.copy_from_slice(x);
            each_or(y, |x| sin_of_quarters::<L>(x, 0), near, |x| f64::from(x).sin() as f32);
        }
        Elementary::Cos => {
            y.copy_from_slice(x);
            each_or(y, |x| sin_of_quarters::<L>(x, 1), near, |x| f64::from(x).cos() as f32);
        }
    }
}

#[inline(always)]
fn pow_body<L: Lanes>(x: &[f32], y: &[f32], z: &mut [f32]) {
    assert!(x.len() == y.len() && y.len() == z.len(), "as many results as arguments");
    let usual = |x: f32, y: f32| x > 0.0 && x < f32::INFINITY && y.abs() < f32::INFINITY;
    for ((x, y), z) in x.chunks(CHUNK).zip(y.chunks(CHUNK)).zip(z.chunks_mut(CHUNK)) {
        let pairs = x.iter().zip(y);
        if pairs.clone().fold(true, |all, (&x, &y)| all & usual(x, y)) {
            for (z, (&x, &y)) in z.iter_mut().zip(pairs) {
                *z = pow_positive::<L>(x, y);
            }
        } else {
            for (z, (&x, &y)) in z.iter_mut().zip(pairs) {
                *z = if usual(x, y) { pow_positive::<L>(x, y) } else { x.powf(y) };
            }
        }
    }
}

#[inline(always)]
fn pow_scalar_body<L: Lanes>(x: &[f32], exponent: f32, y: &mut [f32]) {
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
        each_or(y, |x| pow_positive::<L>(x, exponent), usual, |x| x.powf(exponent));
    }
}

#[inline(always)]
fn softmax_body<L: Lanes>(x: &mut [f32]) {
    let shift = reduce_body::<L>(Reduction::Max, x);
    each_in_place(x, |x| exp::<L>(x - shift));
    let scale = 1.0 / reduce_body::<L>(Reduction::Sum, x);
    each_in_place(x, |x| x * scale);
}

per_isa! {
    /// The sum of `x`, its largest or its smallest element; for no elements 0, minus infinity or infinity. A NaN anywhere makes the
    /// result NaN. Products are not for this function.
    pub fn reduce(by: Reduction, x: &[f32]) -> f32 => reduce_body
}

#[inline(always)]
fn reduce_body<L: Lanes>(by: Reduction, x: &[f32]) -> f32 {
    // SAFETY: `per_isa` calls this where the CPU has the instruction set of `L`.
    unsafe {
        match by {
            Reduction::Max => {
                let larger = |a: f32, b: f32| if a > b || a.is_nan() { a } else { b };
                reduce_by::<L>(x, f32::NEG_INFINITY, false, |sum, x| sum.maximum(x), larger)
            }
            Reduction::Min => {
                let smaller = |a: f32, b: f32| if a < b || a.is_nan() { a } else { b };
                reduce_by::<L>(x, f32::INFINITY, false, |sum, x| sum.minimum(x), smaller)
            }
            Reduction::Sum | Reduction::Prod => reduce_by::<L>(x, 0.0, true, |sum, x| sum.add(x), |a, b| a + b),
        }
    }
}

/// Reduces in four registers, which are joined in a fixed order. With `counts`, no element may be taken twice but zeros change nothing;
/// otherwise it is the other way round.
///
/// # Safety
/// The CPU must have the instruction set of `L`.
#[inline(always)]
unsafe fn reduce_by<L: Lanes>(
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
