//! Fourier transforms as matrix products.
//!
//! A short transform is one product. A long one is a grid of short ones: transforms of columns, turns, transforms of rows. What it takes
//! grows with the length, and with the sum of its factors.
//!
//! ```text
//! x [n]  --as--> [first, rest] --product over first--> turned --transforms of rest--> [first, rest] --read by columns--> [n]
//! ```
//!
//! A length with a large prime factor has no such grid. It is a convolution by a chirp, which is a product of two transforms of a power of two:
//! Bluestein's algorithm.

use crate::dtype::DType;
use crate::op::{Args, Attrs, Call, Nodes, OpResult, Var};
use crate::ops::expect_dtype;
use std::f64::consts::TAU;

/// The longest transform that is one product.
const SHORT: usize = 128;
/// The longest transform of a column.
const COLUMN: usize = 64;

/// The matrix `[samples parts, bins 2]`: the contribution of each part of each sample to both parts of each bin.
fn matrix(samples: usize, parts: usize, bins: usize, length: usize, inverse: bool) -> Vec<f64> {
    if samples == 0 {
        return Vec::new();
    }
    let (sign, share) = if inverse { (1.0, 1.0 / length as f64) } else { (-1.0, 1.0) };
    // An angle depends on the product of sample and bin modulo the length only. So large products are as exact as small ones.
    let turn = |at: usize| (TAU * (at as f64 / length as f64)).sin_cos();
    let turns: Vec<(f64, f64)> = (0..length).map(turn).collect();
    let mut weights = Vec::with_capacity(samples * parts * bins * 2);
    for sample in 0..samples {
        for part in 0..parts {
            let mut at = 0;
            for _ in 0..bins {
                let (sin, cos) = turns[at];
                weights.extend(if part == 0 {
                    [cos * share, sign * sin * share]
                } else {
                    [-sign * sin * share, cos * share]
                });
                at = (at + sample) % length;
            }
        }
    }
    weights
}

/// The direction of a transform.
#[derive(Clone, Copy, PartialEq)]
struct Way {
    inverse: bool,
}

impl Way {
    /// The angle of the first bin's first sample, of `length` samples.
    fn turn(self, at: usize, length: usize) -> (f64, f64) {
        let (sin, cos) = (TAU * (at % length) as f64 / length as f64).sin_cos();
        (cos, if self.inverse { sin } else { -sin })
    }
}

/// The factor by which a long transform is cut: the largest that a column may have. `None` if no factor is small enough.
fn column(length: usize) -> Option<usize> {
    (2..=COLUMN).rev().find(|&factor| length.is_multiple_of(factor))
}

/// Rows `[rows, length, parts]` transformed, `[rows, length, 2]`. An inverse has its share, one by the length.
fn rows<'g>(b: Nodes<'g>, x: Var<'g>, length: usize, way: Way) -> OpResult<Var<'g>> {
    let fact = x.fact()?;
    let &[count, _, parts] = &fact.shape[..] else { return Err("expected rows of parts".into()) };
    let product = |x: Var<'g>, shape: &[usize], parts: usize, length: usize| {
        let weights = || matrix(length, parts, length, length, way.inverse);
        let weights = b.constant(fact.dtype, [length * parts, length * 2], weights);
        x.shaped(&[shape, &[length * parts]].concat()).matmul(weights).shaped(&[shape, &[length, 2]].concat())
    };
    if length <= SHORT {
        return Ok(product(x, &[count], parts, length));
    }
    let Some(first) = column(length) else { return chirped(b, x, length, way) };
    let rest = length / first;
    // Samples of a column are `rest` apart.
    let columns = x.shaped(&[count, first, rest, parts]).transpose(&[0, 2, 1, 3]);
    let columns = product(columns, &[count, rest], parts, first);
    let turned = turned(b, columns, &[1, rest, first], |i| way.turn(i / first * (i % first), length));
    let inner = turned.transpose(&[0, 2, 1, 3]).shaped(&[count * first, rest, 2]);
    let bins = rows(b, inner, rest, way)?.shaped(&[count, first, rest, 2]);
    Ok(bins.transpose(&[0, 2, 1, 3]).shaped(&[count, length, 2]))
}

/// Complex numbers `[.., 2]` times constants of the shape before the parts, each given as its parts.
fn turned<'g>(b: Nodes<'g>, x: Var<'g>, shape: &[usize], by: impl Fn(usize) -> (f64, f64)) -> Var<'g> {
    let (dtype, rank) = (x.fact().map_or(DType::F32, |fact| fact.dtype), shape.len());
    let count = shape.iter().product::<usize>();
    let parts = |of: &dyn Fn((f64, f64)) -> [f64; 2]| -> Vec<f64> { (0..count).flat_map(|i| of(by(i))).collect() };
    let shape = [shape, &[2]].concat();
    let own = b.constant(dtype, shape.clone(), || parts(&|(re, _)| [re, re]));
    let other = b.constant(dtype, shape, || parts(&|(_, im)| [-im, im]));
    let back = Attrs::new().with("starts", vec![1]).with("ends", vec![i64::MIN]).with("steps", vec![-1]);
    let swapped = x.op("Slice", &[], back.with("axes", vec![rank as i64]));
    x * own + swapped * other
}

/// Bluestein's algorithm: sample and bin multiply to `(sample^2 + bin^2 - (bin - sample)^2) / 2`, whose last part is a convolution.
fn chirped<'g>(b: Nodes<'g>, x: Var<'g>, length: usize, way: Way) -> OpResult<Var<'g>> {
    let fact = x.fact()?;
    let (count, parts) = (fact.shape[0], fact.shape[2]);
    // Half a turn per square: the angle depends on the square modulo twice the length.
    let chirp = |i: usize| way.turn(i * i % (2 * length), 2 * length);
    let complex = match parts {
        1 => b.concat(&[x, b.scalar(0.0, fact.dtype).expand(&fact.shape)], 2),
        _ => x,
    };
    let padded = (2 * length - 1).next_power_of_two();
    let zeros = b.scalar(0.0, fact.dtype).expand(&[count, padded - length, 2]);
    let samples = b.concat(&[turned(b, complex, &[1, length], chirp), zeros], 1);
    let forth = rows(b, samples, padded, Way { inverse: false })?;
    // The chirp that is convolved with turns the other way, and goes round.
    let mut filter = vec![(0.0, 0.0); padded];
    for i in 0..length {
        let (re, im) = chirp(i);
        filter[i] = (re, -im);
        filter[(padded - i) % padded] = (re, -im);
    }
    let spectrum = host(&filter);
    let both = turned(b, forth, &[1, padded], |i| spectrum[i]);
    let convolved = rows(b, both, padded, Way { inverse: true })?.part(1, 0..length);
    let share = if way.inverse { 1.0 / length as f64 } else { 1.0 };
    Ok(turned(b, convolved, &[1, length], |i| (chirp(i).0 * share, chirp(i).1 * share)))
}

/// The transform of a power of two of complex numbers, in `f64`.
fn host(x: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let n = x.len();
    if n == 1 {
        return x.to_vec();
    }
    let half = |first: usize| host(&x.iter().copied().skip(first).step_by(2).collect::<Vec<_>>());
    let (even, odd) = (half(0), half(1));
    let bin = |k: usize| {
        let ((a, b), (c, d)) = (even[k % (n / 2)], odd[k % (n / 2)]);
        let (re, im) = Way { inverse: false }.turn(k, n);
        (a + c * re - d * im, b + c * im + d * re)
    };
    (0..n).map(bin).collect()
}

pub fn transform<'g>(b: Nodes<'g>, call: &Call, x: &Args<Var<'g>>) -> OpResult<Vec<Var<'g>>> {
    let dtype = expect_dtype(call, 0, "a float type", DType::is_float)?;
    let (shape, rank) = (call.shape(0), call.shape(0).len());
    let axis = call.axis("axis", -2, shape)?;
    let parts = shape.last().copied().filter(|parts| (1..=2).contains(parts) && axis + 1 < rank);
    let parts =
        parts.ok_or_else(|| format!("input 'input': expected 1 or 2 parts behind axis {axis}, found {shape}"))?;
    let (inverse, onesided) = (call.int("inverse", 0)? != 0, call.int("onesided", 0)? != 0);
    let length = match call.attrs.get("dft_length") {
        Some(_) => super::length(call, "dft_length")?,
        None if inverse && onesided && shape[axis] > 1 => 2 * (shape[axis] - 1),
        None if shape[axis] > 0 => shape[axis],
        None => return Err(format!("input 'input': expected elements along axis {axis}, found {shape}")),
    };
    if onesided && inverse != (parts == 2) {
        return Err("attribute 'onesided': expected 0 for a complex signal and for a real spectrum, found 1".into());
    }
    let (half, mirrors) = (length / 2 + 1, onesided && inverse);
    let bins = if onesided && !inverse { half } else { length };
    let samples = shape[axis].min(if mirrors { half } else { length });
    let results = if mirrors { 1 } else { 2 };
    let last: Vec<usize> = (0..rank).filter(|&k| k != axis && k + 1 < rank).chain([axis, rank - 1]).collect();
    let back: Vec<usize> = (0..rank).map(|k| last.iter().position(|&l| l == k).expect("axes are permuted")).collect();
    let others: Vec<usize> = last[..rank - 2].iter().map(|&k| shape[k]).collect();
    let count = others.iter().product::<usize>();
    let given = x[0].part(axis, 0..samples).transpose(&last);
    let of_short = |weights: Vec<f64>| {
        let weights = b.constant(dtype, [samples * parts, bins * results], || weights.clone());
        given.shaped(&[count, samples * parts]).matmul(weights)
    };
    let found = if mirrors && length <= SHORT {
        of_short(half_matrix(samples, length))
    } else if length <= SHORT {
        of_short(matrix(samples, parts, bins, length, inverse))
    } else {
        let zeros = |along: usize| b.scalar(0.0, dtype).expand(&[count, along, parts]);
        let mut whole = given.shaped(&[count, samples, parts]);
        let expected = if mirrors { half } else { length };
        if samples < expected {
            whole = b.concat(&[whole, zeros(expected - samples)], 1);
        }
        if mirrors && length > half {
            // The other half of a real signal's spectrum is its mirror image, whose second parts have the other sign.
            let steps = Attrs::new().with("axes", vec![1]).with("steps", vec![-1]);
            let mirrored = steps.with("starts", vec![(length - half) as i64]).with("ends", vec![0]);
            let signs = b.constant(dtype, [2], || vec![1.0, -1.0]);
            whole = b.concat(&[whole, whole.op("Slice", &[], mirrored) * signs], 1);
        }
        rows(b, whole, length, Way { inverse })?.part(1, 0..bins).part(2, 0..results)
    };
    Ok(vec![found.shaped(&[&others[..], &[bins, results]].concat()).transpose(&back)])
}

/// The matrix `[bins 2, length]` from the first half of the spectrum of a real signal: the other half is its mirror.
fn half_matrix(bins: usize, length: usize) -> Vec<f64> {
    let all = matrix(bins, 2, length, length, true);
    let real = all.iter().step_by(2).enumerate();
    let times = |row: usize| if row == 0 || 2 * row == length { 1.0 } else { 2.0 };
    real.map(|(at, weight)| weight * times(at / (2 * length))).collect()
}

#[cfg(test)]
mod tests {
    use crate::dtype::DType::F64;
    use crate::op::Attrs;
    use crate::ops::tests::eval;
    use std::f64::consts::TAU;

    /// By the definition, sample by sample.
    #[test]
    fn long_transforms_are_those_of_the_definition() {
        for (length, samples) in [(128, 128), (130, 130), (131, 131), (360, 300), (1018, 1018), (4096, 4096)] {
            let x: Vec<f64> = (0..2 * samples).map(|i| ((i * i + 3 * i) % 17) as f64 / 17.0 - 0.5).collect();
            let attrs = Attrs::new().with("axis", 1).with("dft_length", length as i64);
            let (_, found) = eval("DFT", &[(F64, &[1, samples, 2], &x)], &attrs);
            for bin in [0, 1, 2, length / 3, length - 1] {
                let term = |i: usize| {
                    let (sin, cos) = (-TAU * (i * bin % length) as f64 / length as f64).sin_cos();
                    [x[2 * i] * cos - x[2 * i + 1] * sin, x[2 * i] * sin + x[2 * i + 1] * cos]
                };
                let sum = (0..samples).map(term).fold([0.0; 2], |sum, term| [sum[0] + term[0], sum[1] + term[1]]);
                for part in 0..2 {
                    let difference = (found[2 * bin + part] - sum[part]).abs();
                    assert!(difference < 1e-9, "bin {bin} of {length}: {} is {}", found[2 * bin + part], sum[part]);
                }
            }
        }
    }

    #[test]
    fn there_and_back_is_the_signal() {
        for length in [100, 254, 256, 131, 1018] {
            let x: Vec<f64> = (0..length).map(|i| ((i * i + 3 * i) % 17) as f64 / 17.0 - 0.5).collect();
            let onesided = Attrs::new().with("axis", 1).with("onesided", 1);
            let (_, half) = eval("DFT", &[(F64, &[1, length, 1], &x)], &onesided);
            let back = onesided.with("inverse", 1).with("dft_length", length as i64);
            let (_, found) = eval("DFT", &[(F64, &[1, half.len() / 2, 2], &half)], &back);
            let far = x.iter().zip(&found).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            assert!(far < 1e-12 && found.len() == x.len(), "{length}: {far}");
        }
    }
}
