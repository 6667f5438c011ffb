//! Scalar code: types, literals, instructions, and the functions that devices lack.

use crate::dtype::DType;
use crate::expr::{Binary, Unary};
use Type::{Bool, F32, I32, Vec4};

/// Types of values in registers and buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Type {
    F32,
    I32,
    Bool,
    Vec4,
}
impl Type {
    pub(super) fn name(self) -> &'static str {
        match self {
            F32 => "f32",
            I32 => "i32",
            Bool => "bool",
            Vec4 => "vec4f",
        }
    }

    /// The type in which values of a body are held.
    pub(super) fn register(dtype: DType) -> Type {
        match dtype {
            DType::Bool => Bool,
            d if d.is_int() => I32,
            _ => F32,
        }
    }
}

pub(super) fn convert(value: &str, from: Type, to: Type) -> String {
    match (from, to) {
        (from, to) if from == to => value.to_owned(),
        (F32, Bool) => format!("({value} != 0.0f)"),
        (I32, Bool) => format!("({value} != 0)"),
        _ => format!("{}({value})", to.name()),
    }
}

/// A literal. What is not finite becomes the largest finite value: GPUs may assume that there is nothing else.
pub(super) fn literal(value: f64, ty: Type) -> String {
    match ty {
        Bool => (value != 0.0).to_string(),
        I32 if value <= f64::from(i32::MIN) => "(-2147483647 - 1)".into(),
        I32 if value < 0.0 => format!("({})", value as i32),
        I32 => (value as i32).to_string(),
        F32 | Vec4 => {
            let v = if value.is_nan() { 0.0 } else { (value as f32).clamp(f32::MIN, f32::MAX) };
            let v = if v.is_subnormal() { 0.0 } else { v };
            if v.is_sign_negative() { format!("({v:?}f)") } else { format!("{v:?}f") }
        }
    }
}

pub(super) fn unary(op: Unary, (x, ty): (String, Type)) -> Result<String, String> {
    Ok(match (op, ty) {
        (Unary::Not, Bool) => format!("!{x}"),
        (Unary::Not, I32) => format!("{x} == 0"),
        (_, Bool | Vec4) | (Unary::Not, F32) => return Err(format!("{op:?} of a {}", ty.name())),
        (Unary::Neg, _) => format!("-{x}"),
        (Unary::Abs, _) => format!("abs({x})"),
        (Unary::Sign, _) => format!("sign({x})"),
        (Unary::Floor | Unary::Ceil | Unary::Round, I32) => x,
        (_, I32) => format!("i32({})", unary(op, (format!("f32({x})"), F32))?),
        (Unary::Exp, _) => format!("exp({x})"),
        (Unary::Log, _) => format!("log({x})"),
        (Unary::Sqrt, _) => format!("sqrt({x})"),
        (Unary::Recip, _) => format!("1.0f / {x}"),
        (Unary::Sin, _) => format!("sin_f32({x}, 0)"),
        (Unary::Cos, _) => format!("sin_f32({x}, 1)"),
        (Unary::Tanh, _) => format!("tanh(clamp({x}, -9.0f, 9.0f))"),
        (Unary::Erf, _) => format!("erf_f32({x})"),
        (Unary::Floor, _) => format!("floor({x})"),
        (Unary::Ceil, _) => format!("ceil({x})"),
        (Unary::Round, _) => format!("round({x})"),
    })
}

pub(super) fn binary(op: Binary, (a, ty): (String, Type), (b, other): (String, Type)) -> Result<String, String> {
    if ty != other {
        return Err(format!("{op:?} of a {} and a {}", ty.name(), other.name()));
    }
    let logical = |op: &str| format!("{} {op} {}", convert(&a, ty, Bool), convert(&b, ty, Bool));
    Ok(match (op, ty) {
        (Binary::And, _) => logical("&&"),
        (Binary::Or, _) => logical("||"),
        (Binary::Xor, _) => logical("!="),
        (Binary::Eq, _) => format!("{a} == {b}"),
        (Binary::Max, Bool) => logical("||"),
        (Binary::Min, Bool) => logical("&&"),
        (_, Bool | Vec4) => return Err(format!("{op:?} of a {}", ty.name())),
        (Binary::Add, _) => format!("{a} + {b}"),
        (Binary::Sub, _) => format!("{a} - {b}"),
        (Binary::Mul, _) => format!("{a} * {b}"),
        (Binary::Div, F32) => format!("{a} / {b}"),
        (Binary::Div, _) => format!("div_i32({a}, {b})"),
        (Binary::Rem, _) => format!("rem_{}({a}, {b})", ty.name()),
        (Binary::Pow, _) => format!("pow_{}({a}, {b})", ty.name()),
        (Binary::Max, _) => format!("max({a}, {b})"),
        (Binary::Min, _) => format!("min({a}, {b})"),
        (Binary::Lt, _) => format!("{a} < {b}"),
        (Binary::Le, _) => format!("{a} <= {b}"),
    })
}

/// A function that rendered bodies may call: name, parameters, result, statements.
pub(super) type Helper = (&'static str, &'static [(&'static str, Type)], Type, &'static str);

/// What devices lack, or compute less exactly than their own registers could hold.
pub(super) static HELPERS: &[Helper] = &[
    // The Maclaurin series up to x^19 below 1 (error 2e-8), Abramowitz and Stegun 7.1.26 above (error 1.5e-7).
    (
        "erf_f32",
        &[("x", F32)],
        F32,
        "let a = abs(x);
        if (a < 1.0f) {
            let s = x * x;
            var p = -1.0f / 6894720.0f;
            p = p * s + 1.0f / 685440.0f;
            p = p * s - 1.0f / 75600.0f;
            p = p * s + 1.0f / 9360.0f;
            p = p * s - 1.0f / 1320.0f;
            p = p * s + 1.0f / 216.0f;
            p = p * s - 1.0f / 42.0f;
            p = p * s + 1.0f / 10.0f;
            p = p * s - 1.0f / 3.0f;
            return 1.1283792f * x * (p * s + 1.0f);
        }
        let t = 1.0f / (1.0f + 0.3275911f * a);
        let p = ((((1.0614054f * t - 1.4531521f) * t + 1.4214138f) * t - 0.28449672f) * t + 0.2548296f) * t;
        let y = 1.0f - p * exp(-(a * a));
        return select(y, -y, x < 0.0f);",
    ),
    // The sine of x + quarter * pi / 2. Cody and Waite's reduction by pi / 2 in three parts: drivers promise little.
    (
        "sin_f32",
        &[("x", F32), ("quarter", I32)],
        F32,
        "let q = round(x * 0.63661975f);
        let r = ((x - q * 1.5703125f) - q * 0.0004837513f) - q * 7.54979e-8f;
        let s = r * r;
        let sine = r + r * s * (-0.16666667f + s * (0.008333334f + s * (-0.0001984127f + s * 2.7557319e-6f)));
        let cosine = 1.0f + s * (-0.5f + s * (0.041666668f + s * (-0.0013888889f + s * 2.4801588e-5f)));
        let n = i32(q) + quarter;
        let y = select(sine, cosine, (n & 1) != 0);
        return select(y, -y, (n & 2) != 0);",
    ),
    (
        "pow_f32",
        &[("x", F32), ("y", F32)],
        F32,
        "let p = pow(abs(x), y);
        if (y == 0.0f) { return 1.0f; }
        if (x >= 0.0f) { return p; }
        if (floor(y) != y) { return sqrt(x); }
        let odd = abs(y) - 2.0f * floor(abs(y) * 0.5f) == 1.0f;
        return select(p, -p, odd);",
    ),
    // The quotient may have been rounded across an integer.
    (
        "rem_f32",
        &[("x", F32), ("y", F32)],
        F32,
        "let n = abs(y);
        let a = abs(x);
        var r = a - n * floor(a / n);
        if (r < 0.0f) { r = r + n; }
        if (r >= n) { r = r - n; }
        return select(r, -r, x < 0.0f);",
    ),
    ("div_i32", &[("x", I32), ("y", I32)], I32, "if (y == 0) { return 0; }\nreturn x / y;"),
    ("rem_i32", &[("x", I32), ("y", I32)], I32, "if (y == 0) { return 0; }\nreturn x % y;"),
    (
        "pow_i32",
        &[("x", I32), ("y", I32)],
        I32,
        "if (y < 0) { return select(0, select(x, 1, (y & 1) == 0), x == 1 || x == -1); }
        var power = 1;
        var square = x;
        for (var e = y; e > 0; e = e / 2) {
            if ((e & 1) != 0) { power = power * square; }
            square = square * square;
        }
        return power;",
    ),
];
