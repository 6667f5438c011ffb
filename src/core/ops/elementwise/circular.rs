//! Inverse circular functions, hyperbolic functions and their inverses, from exponentials, logarithms and roots.

use super::negative;
use crate::expr::Expr;
use std::f64::consts::{FRAC_PI_2, FRAC_PI_4};

/// `tan(pi / 8)`: the bound of a reduced argument.
const SHORT: f64 = 0.4142135623730951;

/// `x + s x^3 / 3 + s^2 x^5 / 5 ..` for `|x|` up to about [`SHORT`]: the arctangent if `s` is -1, its hyperbolic twin
/// if `s` is 1.
fn series(x: &Expr, s: f64) -> Expr {
    // The remaining terms are below the precision of f64.
    let terms = 20;
    let square = x * x;
    let factor = |k: i32| s.powi(k) / f64::from(2 * k + 1);
    let sum = (0..terms - 1).rev().fold(x.like(factor(terms - 1)), |sum, k| sum * &square + factor(k));
    x * sum
}

/// `magnitude` with the sign of `x`. If `x` is zero the result is `x`, which may be a negative zero.
fn signed(x: &Expr, magnitude: &Expr) -> Expr {
    x.eq(&x.like(0.0)).select(x, &negative(x).select(&-magnitude, magnitude))
}

/// The arctangent of `a / b` for `a >= 0` and `b > 0`, and of infinity for `b = 0`. No quotient overflows.
fn quotient(a: &Expr, b: &Expr) -> Expr {
    // a / b, (a - b) / (a + b) or -b / a, whichever is short.
    let (long, middle) = ((b * (1.0 / SHORT)).lt(a), (b * SHORT).lt(a));
    let over = long.select(&-b, &middle.select(&(a - b), a));
    let under = long.select(a, &middle.select(&(a + b), b));
    let base = long.select(&a.like(FRAC_PI_2), &middle.select(&a.like(FRAC_PI_4), &a.like(0.0)));
    base + series(&(over / under), -1.0)
}

pub(super) fn atan(x: &Expr) -> Expr {
    signed(x, &quotient(&x.abs(), &x.like(1.0)))
}

/// The root of `1 - x^2`, NaN if `x` is outside -1..1.
fn other_leg(x: &Expr) -> Expr {
    ((x.like(1.0) - x) * (x + 1.0)).sqrt()
}

pub(super) fn asin(x: &Expr) -> Expr {
    signed(x, &quotient(&x.abs(), &other_leg(x)))
}

pub(super) fn acos(x: &Expr) -> Expr {
    let angle = quotient(&other_leg(x), &x.abs());
    negative(x).select(&(-&angle + 2.0 * FRAC_PI_2), &angle)
}

/// `e^|x| / 2` and `e^-|x| / 2`, each as a square, so that only the result can overflow.
fn exponentials(x: &Expr) -> (Expr, Expr) {
    let root = (x.abs() * 0.5).exp();
    (&root * 0.5 * &root, root.recip() * 0.5 * root.recip())
}

pub(super) fn cosh(x: &Expr) -> Expr {
    let (up, down) = exponentials(x);
    up + down
}

pub(super) fn sinh(x: &Expr) -> Expr {
    let (up, down) = exponentials(x);
    // Where the difference would lose digits: x + x^3 / 3! ..
    let square = x * x;
    let short =
        (0..8).rev().fold(x.like(1.0), |sum, k| sum * &square * (1.0 / f64::from((2 * k + 2) * (2 * k + 3))) + 1.0);
    x.abs().lt(&x.like(1.0)).select(&(x * short), &signed(x, &(up - down)))
}

pub(super) fn atanh(x: &Expr) -> Expr {
    let long = ((x + 1.0) / (x.like(1.0) - x)).log() * 0.5;
    x.abs().lt(&x.like(SHORT)).select(&series(x, 1.0), &long)
}

/// `asinh(a)` for `a >= 0`.
fn area(a: &Expr) -> Expr {
    let one = a.like(1.0);
    // No square overflows: what is more than 1 stands before the logarithm's argument.
    let (most, held) = (a.max(&one), a.min(&one));
    let unit = most.recip();
    let long = most.log() + (&held + (&held * &held + &unit * &unit).sqrt()).log();
    let short = series(&(&held / (&held * &held + 1.0).sqrt()), 1.0);
    a.lt(&a.like(SHORT)).select(&short, &long)
}

pub(super) fn asinh(x: &Expr) -> Expr {
    signed(x, &area(&x.abs()))
}

/// `2 asinh(sqrt((x - 1) / 2))`, which is exact next to 1. NaN if `x < 1`.
pub(super) fn acosh(x: &Expr) -> Expr {
    let half = ((x + -1.0) * 0.5).sqrt();
    area(&half) * 2.0
}
