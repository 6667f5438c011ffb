//! The CPU's elementary functions, against exact ones.

use plimsoll::internals::backend::cpu::math::{Elementary, elementary, pow, pow_scalar, reduce, softmax_in_place};
use plimsoll::internals::backend::cpu::simd::Isa;
use plimsoll::internals::kernel::Reduction;

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
    type Case = (Elementary, fn(f64) -> f64, f64, f64);
    let cases: [Case; 6] = [
        (Elementary::Exp, f64::exp, 2.0, 0.0),
        (Elementary::Log, f64::ln, 2.0, 0.0),
        (Elementary::Tanh, f64::tanh, 2.0, 0.0),
        (Elementary::Erf, erf_exact, 3.0, 0.0),
        (Elementary::Sin, f64::sin, 2.0, 1e-7),
        (Elementary::Cos, f64::cos, 2.0, 1e-7),
    ];
    let x = everywhere();
    for isa in Isa::available() {
        for (op, exact, limit, absolute) in cases {
            let mut y = vec![0.0; x.len()];
            elementary(isa, op, &x, &mut y);
            let mut worst = (0.0, 0.0, 0.0);
            for (&x, &y) in x.iter().zip(&y) {
                let want = exact(f64::from(x));
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
            let mut y = [f32::NAN];
            elementary(isa, op, &[x], &mut y);
            y[0]
        };
        for op in [Elementary::Tanh, Elementary::Erf, Elementary::Sin] {
            assert_eq!(one(op, -0.0).to_bits(), (-0f32).to_bits(), "{op:?}");
        }
        assert_eq!(one(Elementary::Exp, f32::NEG_INFINITY), 0.0);
        assert_eq!(one(Elementary::Exp, f32::INFINITY), f32::INFINITY);
        assert_eq!(one(Elementary::Log, -0.0), f32::NEG_INFINITY);
        assert!(one(Elementary::Log, -1.0).is_nan());
        assert_eq!(one(Elementary::Tanh, 30.0), 1.0);
        assert_eq!(one(Elementary::Erf, f32::NEG_INFINITY), -1.0);
    }
}

#[test]
fn powers() {
    let some =
        [0.0, -0.0, 1.0, -1.0, 0.5, 2.0, 3.0, 4.0, -2.0, -0.5, 0.75, 10.25, 1e-40, 1e30, -7.0, 1.000_001, 31.9, 150.0];
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
            let exact = |f: fn(f32, f32) -> f32, start| x.iter().copied().fold(start, f);
            let max = exact(f32::max, f32::NEG_INFINITY);
            assert_eq!(reduce(isa, Reduction::Sum, x), exact(|a, b| a + b, 0.0), "sum of {len}, {}", isa.name());
            assert_eq!(reduce(isa, Reduction::Max, x), max, "largest of {len}, {}", isa.name());
            assert_eq!(
                reduce(isa, Reduction::Min, x),
                exact(f32::min, f32::INFINITY),
                "smallest of {len}, {}",
                isa.name()
            );
            let mut y: Vec<f32> = x.iter().map(|x| x / 100.0).collect();
            softmax_in_place(isa, &mut y);
            let power = |x: f32| f64::from((x - max) / 100.0).exp();
            let total: f64 = x.iter().map(|&x| power(x)).sum();
            assert!(x.iter().zip(&y).all(|(&x, &y)| (f64::from(y) / (power(x) / total) - 1.0).abs() < 1e-5));
        }
        for at in [0, 63, 64, 130] {
            let mut x = vec![1.0; 131];
            x[at] = f32::NAN;
            assert!(reduce(isa, Reduction::Max, &x).is_nan() && reduce(isa, Reduction::Min, &x).is_nan());
        }
    }
}
