//! Elementwise rows: one value per index, from the broadcast inputs' values there.
//!
//! A row states its function twice: in `f64`, as the specification writes it, and as the expression of the kernels.
//! The expression avoids overflow in intermediate values, because shaders may lack infinities.

use super::compose::composed;
use super::{broadcast, ensure, expect_dtype, expect_type_of, output, same_dtype};
use crate::dtype::DType;
use crate::expr::{self, Binary, Expr, maximum, minimum};
use crate::narrow;
use crate::op::{
    Args, Back, Call, Eval, Fact, Infer, Input, Lower, Nodes, OpDef, OpResult, Sample, Var, inputs, names,
};
use std::f64::consts::{FRAC_1_SQRT_2, PI};

mod circular;
pub(super) mod narrowed;

const X: &[Input] = inputs![X];
const IN: &[Input] = inputs![input];
const AB: &[Input] = inputs![A B];
const MANY: &[Input] = inputs![data_0*];
const CLIP: &[Input] = inputs![input min? max?];

/// Samples of rows with two operands that are not floats.
const BOOLS: fn(Sample) -> Sample = |s| s.input(DType::Bool, &[3, 5], 0.0, 1.0).input(DType::Bool, &[5], 0.0, 1.0);
const INTEGERS: fn(Sample) -> Sample =
    |s| s.input(DType::I32, &[3, 5], -1000.0, 1000.0).input(DType::I32, &[5], -1000.0, 1000.0);

#[rustfmt::skip] // A table: one row, one line, where it fits.
pub(super) static OPS: &[OpDef] = &[
    // Arithmetic
    map("Abs", "The absolute value |x|", X, number, |x, _| x[0].abs(), |x, _| x[0].abs()),
    map("Add", "The sum a + b", AB, number, |x, _| x[0] + x[1], |x, _| &x[0] + &x[1]),
    map("Div", "a / b; of integers, rounded toward zero", AB, number, div, |x, _| &x[0] / &x[1])
        .sample(|s| s.uniform(-3.0, 3.0).uniform(0.3, 2.0)),
    map("Max", "The largest of the inputs", MANY, number, |x, _| fold(x, maximum), |x, _| join(x, Expr::max))
        .sample(|s| s.floats(&[&[2, 1, 5], &[3, 1], &[5]])),
    map("Mean", "The mean of the inputs", MANY, float,
        |x, _| x.iter().sum::<f64>() / x.len() as f64,
        |x, _| join(x, |a, b| a + b) / x.0.len() as f64).sample(|s| s.floats(&[&[2, 1, 5], &[3, 1], &[5]])),
    map("Min", "The smallest of the inputs", MANY, number, |x, _| fold(x, minimum), |x, _| join(x, Expr::min))
        .sample(|s| s.floats(&[&[2, 1, 5], &[3, 1], &[5]])),
    map("Mod", "Remainder of a / b: with the sign of b, or with that of a where `fmod` is 1", AB, number, modulo,
        modulo_expr)
        .sample(|s| s.given(DType::F32, &[4], &[7.5, -7.5, 7.5, -7.5]).given(DType::F32, &[4], &[2.0, 2.0, -2.0, -2.0]))
        .attrs(names![fmod]),
    map("Mul", "The product a b", AB, number, |x, _| x[0] * x[1], |x, _| &x[0] * &x[1]),
    map("Neg", "The negative -x", X, number, |x, _| -x[0], |x, _| -&x[0]),
    map("Pow", "a^b, in the type of a", inputs![X Y], pow_infer, |x, _| x[0].powf(x[1]), pow)
        .sample(|s| s.uniform(0.2, 3.0).uniform(-2.0, 2.0)),
    map("Reciprocal", "The reciprocal 1 / x", X, float, |x, _| 1.0 / x[0], |x, _| x[0].recip())
        .sample(|s| s.uniform(0.2, 3.0)),
    map("Sign", "-1, 0 or 1, as x is negative, zero or positive", IN, number,
        |x, _| if x[0] == 0.0 { 0.0 } else { x[0].signum() },
        |x, _| x[0].sign()),
    map("Sub", "The difference a - b", AB, number, |x, _| x[0] - x[1], |x, _| &x[0] - &x[1]),
    map("Sum", "The sum of the inputs", MANY, number, |x, _| x.iter().sum(), |x, _| join(x, |a, b| a + b))
        .sample(|s| s.floats(&[&[2, 1, 5], &[3, 1], &[5]])),
    // Functions of mathematics
    map("Acos", "The arccosine in radians", IN, float, |x, _| x[0].acos(), |x, _| circular::acos(&x[0]))
        .sample(|s| s.uniform(-1.0, 1.0)),
    map("Acosh", "The inverse of the hyperbolic cosine", IN, float, |x, _| x[0].acosh(), |x, _| circular::acosh(&x[0]))
        .sample(|s| s.uniform(1.0, 9.0)),
    map("Asin", "The arcsine in radians", IN, float, |x, _| x[0].asin(), |x, _| circular::asin(&x[0]))
        .sample(|s| s.uniform(-1.0, 1.0)),
    map("Asinh", "The inverse of the hyperbolic sine", IN, float, |x, _| x[0].asinh(), |x, _| circular::asinh(&x[0]))
        .sample(|s| s.uniform(-5.0, 5.0)),
    map("Atan", "The arctangent in radians", IN, float, |x, _| x[0].atan(), |x, _| circular::atan(&x[0]))
        .sample(|s| s.uniform(-5.0, 5.0)),
    map("Atanh", "The inverse of the hyperbolic tangent", IN, float, |x, _| x[0].atanh(), |x, _| circular::atanh(&x[0]))
        .sample(|s| s.uniform(-0.9, 0.9)),
    map("Ceil", "The smallest integer not below x", X, float, |x, _| x[0].ceil(), |x, _| x[0].ceil()),
    map("Cos", "The cosine of x in radians", IN, float, |x, _| x[0].cos(), |x, _| x[0].cos())
        .sample(|s| s.uniform(-6.0, 6.0)),
    map("Cosh", "The hyperbolic cosine", IN, float, |x, _| x[0].cosh(), |x, _| circular::cosh(&x[0]))
        .sample(|s| s.uniform(-5.0, 5.0)),
    map("Erf", "The error function of x", IN, float, |x, _| libm::erf(x[0]), |x, _| x[0].erf()),
    map("Exp", "The exponential e^x", IN, float, |x, _| x[0].exp(), |x, _| x[0].exp()).sample(|s| s.uniform(-5.0, 3.0)),
    map("Floor", "The largest integer not above x", X, float, |x, _| x[0].floor(), |x, _| x[0].floor()),
    map("Log", "The natural logarithm of x", IN, float, |x, _| x[0].ln(), |x, _| x[0].log())
        .sample(|s| s.uniform(0.1, 9.0)),
    map("Round", "The nearest integer, ties to even", X, float, |x, _| x[0].round_ties_even(), |x, _| x[0].round()),
    map("Sin", "The sine of x in radians", IN, float, |x, _| x[0].sin(), |x, _| x[0].sin())
        .sample(|s| s.uniform(-6.0, 6.0)),
    map("Sinh", "The hyperbolic sine", IN, float, |x, _| x[0].sinh(), |x, _| circular::sinh(&x[0]))
        .sample(|s| s.uniform(-5.0, 5.0)),
    map("Sqrt", "The square root of x", X, float, |x, _| x[0].sqrt(), |x, _| x[0].sqrt())
        .sample(|s| s.uniform(0.0, 9.0)),
    map("Tan", "The tangent of x in radians", IN, float, |x, _| x[0].tan(), |x, _| x[0].sin() / x[0].cos())
        .sample(|s| s.uniform(-1.2, 1.2)),
    map("Tanh", "The hyperbolic tangent", IN, float, |x, _| x[0].tanh(), |x, _| x[0].tanh())
        .sample(|s| s.uniform(-4.0, 4.0)),
    // Activations
    map("BiasGelu", "Gelu of the sum a + b", AB, float,
        |x, _| gelu(x[0] + x[1], false),
        |x, _| gelu_expr(&(&x[0] + &x[1]), false)),
    map("Celu", "max(x, 0) + min(alpha (e^(x / alpha) - 1), 0)", X, float,
        |x, c| maximum(x[0], 0.0) + minimum(param(c, "alpha", 1.0) * (x[0] / param(c, "alpha", 1.0)).exp_m1(), 0.0),
        |x, c| exponential(&x[0], param(c, "alpha", 1.0), 1.0 / param(c, "alpha", 1.0)))
        .sample(|s| s.uniform(-4.0, 4.0))
        .attrs(names![alpha]),
    map("Clip", "x, but at least `min` and at most `max`", CLIP, keeps_shape, clip, clip_expr)
        .sample(|s| s.uniform(-5.0, 5.0).given(DType::F32, &[], &[-1.5]).given(DType::F32, &[], &[1.5])).attrs(names![
            min max
        ])
        .grad(clip_grad),
    map("Elu", "x, or alpha (e^x - 1) where x < 0", X, float,
        |x, c| if x[0] < 0.0 { param(c, "alpha", 1.0) * x[0].exp_m1() } else { x[0] },
        |x, c| exponential(&x[0], param(c, "alpha", 1.0), 1.0))
        .sample(|s| s.uniform(-4.0, 4.0))
        .attrs(names![alpha]),
    map("FastGelu", "The tanh approximation of Gelu, of x or x + bias", inputs![X bias?], float,
        |x, c| gelu(if c.has(1) { x[0] + x[1] } else { x[0] }, true),
        |x, _| gelu_expr(&x.get(1).map_or(x[0].clone(), |bias| &x[0] + bias), true)),
    map("Gelu", "x times the normal distribution's value at x, or its tanh approximation", X, gelu_infer,
        |x, c| gelu(x[0], approximate(c)),
        |x, c| gelu_expr(&x[0], approximate(c)))
        .sample(|s| s.uniform(-5.0, 5.0))
        .attrs(names![approximate]),
    map("HardSigmoid", "alpha x + beta within 0..1", X, float,
        |x, c| (param(c, "alpha", 0.2) * x[0] + param(c, "beta", 0.5)).clamp(0.0, 1.0),
        |x, c| ramp(&x[0], param(c, "alpha", 0.2), param(c, "beta", 0.5)))
        .sample(|s| s.uniform(-4.0, 4.0))
        .attrs(names![alpha beta]),
    map("HardSwish", "x times (x / 6 + 1/2 within 0..1)", X, float,
        |x, _| x[0] * (x[0] / 6.0 + 0.5).clamp(0.0, 1.0),
        |x, _| &x[0] * ramp(&x[0], 1.0 / 6.0, 0.5)).sample(|s| s.uniform(-5.0, 5.0)),
    map("LeakyRelu", "x, or alpha x where x < 0", X, float,
        |x, c| if x[0] < 0.0 { param(c, "alpha", 0.01) * x[0] } else { x[0] },
        |x, c| negative(&x[0]).select(&(&x[0] * param(c, "alpha", 0.01)), &x[0]))
        .attrs(names![alpha]),
    map("Mish", "x tanh(ln(1 + e^x))", X, float, |x, _| x[0] * x[0].exp().ln_1p().tanh(), mish)
        .sample(|s| s.uniform(-6.0, 6.0)),
    map("PRelu", "x, or slope x where x < 0", inputs![X slope], keeps_shape,
        |x, _| if x[0] < 0.0 { x[1] * x[0] } else { x[0] },
        |x, _| negative(&x[0]).select(&(&x[0] * &x[1]), &x[0])),
    map("QuickGelu", "x / (1 + e^(-alpha x)), alpha being 1.702", X, float,
        |x, c| x[0] / (1.0 + (-param(c, "alpha", 1.702) * x[0]).exp()),
        |x, c| &x[0] * sigmoid(&(&x[0] * param(c, "alpha", 1.702))))
        .sample(|s| s.uniform(-5.0, 5.0))
        .attrs(names![alpha]),
    map("Relu", "max(x, 0)", X, number, |x, _| maximum(x[0], 0.0), |x, _| x[0].max(&x[0].like(0.0)))
        .grad(|_, _, back| {
            let dy = back.first()?;
            Ok(vec![Some(back.y[0].greater(0.0).select(dy, 0.0))])
        }),
    map("Selu", "gamma x, or gamma alpha (e^x - 1) where x < 0", X, float,
        |x, c| {
            let (alpha, gamma) = (param(c, "alpha", SELU_ALPHA), param(c, "gamma", SELU_GAMMA));
            gamma * if x[0] > 0.0 { x[0] } else { alpha * x[0].exp_m1() }
        },
        |x, c| exponential(&x[0], param(c, "alpha", SELU_ALPHA), 1.0) * param(c, "gamma", SELU_GAMMA))
        .sample(|s| s.uniform(-4.0, 4.0))
        .attrs(names![alpha gamma]),
    map("Shrink", "x + bias where x < -lambd, x - bias where x > lambd, else 0; of integers in f32, rounded toward zero", IN, number,
        |x, c| {
            let (bias, least) = (param(c, "bias", 0.0), param(c, "lambd", 0.5));
            let y = if x[0] < -least { x[0] + bias } else if x[0] > least { x[0] - bias } else { 0.0 };
            if c.dtype(0).is_int() { y.trunc() } else { y }
        },
        |x, c| {
            let (dtype, bias, least) = (x[0].dtype(), param(c, "bias", 0.0), param(c, "lambd", 0.5));
            let x = if dtype.is_int() { x[0].cast(DType::F32) } else { x[0].clone() };
            let above = x.like(least).lt(&x).select(&(&x + -bias), &x.like(0.0));
            x.lt(&x.like(-least)).select(&(&x + bias), &above).cast(dtype)
        })
        .attrs(names![bias lambd]),
    map("Sigmoid", "1 / (1 + e^-x)", X, float, |x, _| 1.0 / (1.0 + (-x[0]).exp()), |x, _| sigmoid(&x[0]))
        .grad(|_, _, back| Ok(vec![Some(back.first()? * (back.y[0] * (1.0 - back.y[0])))]))
        .sample(|s| s.uniform(-9.0, 9.0)),
    map("Softplus", "ln(1 + e^x)", X, float,
        |x, _| if x[0] > 40.0 { x[0] } else { x[0].exp().ln_1p() },
        |x, _| x[0].max(&x[0].like(0.0)) + ((-x[0].abs()).exp() + 1.0).log()).sample(|s| s.uniform(-6.0, 6.0)),
    map("Softsign", "x / (1 + |x|)", IN, float, |x, _| x[0] / (1.0 + x[0].abs()), |x, _| &x[0] / (x[0].abs() + 1.0))
        .sample(|s| s.uniform(-6.0, 6.0)),
    map("SwiGLU", "Swish of a times b", AB, float,
        |x, c| x[0] / (1.0 + (-param(c, "alpha", 1.0) * x[0]).exp()) * x[1],
        |x, c| &x[0] * sigmoid(&(&x[0] * param(c, "alpha", 1.0))) * &x[1])
        .attrs(names![alpha]),
    map("Swish", "x / (1 + e^(-alpha x))", X, float,
        |x, c| x[0] / (1.0 + (-param(c, "alpha", 1.0) * x[0]).exp()),
        |x, c| &x[0] * sigmoid(&(&x[0] * param(c, "alpha", 1.0))))
        .sample(|s| s.uniform(-6.0, 6.0))
        .attrs(names![alpha]),
    map("ThresholdedRelu", "x, or 0 where x <= alpha", X, float,
        |x, c| if x[0] > param(c, "alpha", 1.0) { x[0] } else { 0.0 },
        |x, c| x[0].like(param(c, "alpha", 1.0)).lt(&x[0]).select(&x[0], &x[0].like(0.0)))
        .attrs(names![alpha]),
    // Comparison and logic
    map("And", "Whether both a and b hold", AB, logical, |x, _| x[0] * x[1], |x, _| x[0].and(&x[1]))
        .sample(BOOLS),
    map("Equal", "Whether a = b", AB, equality, |x, _| truth(x[0] == x[1]), |x, _| x[0].eq(&x[1])),
    map("Greater", "Whether a > b", AB, comparison, |x, _| truth(x[0] > x[1]), |x, _| x[1].lt(&x[0])),
    map("GreaterOrEqual", "Whether a >= b", AB, comparison, |x, _| truth(x[0] >= x[1]), |x, _| x[1].le(&x[0])),
    map("IsInf", "Whether x is infinite, of a sign that `detect_negative` and `detect_positive` do not exclude", X, undefined,
        |x, c| truth(x[0].is_infinite() && param(c, if x[0] < 0.0 { NEGATIVE } else { POSITIVE }, 1.0) != 0.0),
        infinite)
        .attrs(&[NEGATIVE, POSITIVE]),
    map("IsNaN", "Whether x is not a number", X, undefined, |x, _| truth(x[0].is_nan()), |x, _| x[0].eq(&x[0]).not()),
    map("Less", "Whether a < b", AB, comparison, |x, _| truth(x[0] < x[1]), |x, _| x[0].lt(&x[1])),
    map("LessOrEqual", "Whether a <= b", AB, comparison, |x, _| truth(x[0] <= x[1]), |x, _| x[0].le(&x[1])),
    map("Not", "Whether x is false", X, logical, |x, _| 1.0 - x[0], |x, _| x[0].not())
        .sample(|s| s.input(DType::Bool, &[3, 5], 0.0, 1.0)),
    map("Or", "Whether a or b holds", AB, logical, |x, _| x[0].max(x[1]), |x, _| x[0].or(&x[1]))
        .sample(BOOLS),
    map("Where", "x where the condition holds, else y", inputs![condition X Y], where_infer,
        |x, _| if x[0] != 0.0 { x[1] } else { x[2] },
        |x, _| x[0].select(&x[1], &x[2]))
        .sample(|s| s.input(DType::Bool, &[2, 1, 37], 0.0, 1.0).uniform(-3.0, 3.0).uniform(-3.0, 3.0).element(DType::F32)),
    map("Xor", "Either a or b", AB, logical, |x, _| (x[0] - x[1]).abs(), |x, _| x[0].xor(&x[1]))
        .sample(BOOLS),
    map("BitwiseAnd", "The bits that both a and b have", AB, integer, |x, _| bits(x, |a, b| a & b), |x, _| x[0].and(&x[1]))
        .sample(INTEGERS),
    map("BitwiseNot", "x with every bit turned", X, integer,
        |x, c| if c.dtype(0).is_unsigned() { c.dtype(0).range().1 - x[0] } else { -1.0 - x[0] },
        |x, _| -&x[0] - 1.0)
        .sample(|s| s.input(DType::I32, &[3, 5], -1000.0, 1000.0)),
    map("BitwiseOr", "The bits that a or b has", AB, integer, |x, _| bits(x, |a, b| a | b), |x, _| x[0].or(&x[1]))
        .sample(INTEGERS),
    map("BitwiseXor", "The bits that either a or b has", AB, integer, |x, _| bits(x, |a, b| a ^ b), |x, _| x[0].xor(&x[1]))
        .sample(INTEGERS),
    map("BitShift", "The bits of a, moved by b places to the side that `direction` names", inputs![X Y], shifted,
        |x, c| match (direction(c), c.dtype(0)) {
            (side, DType::I32) => expr::shift(side, x[0] as i64 as i32, x[1] as i64 as i32).into(),
            (Binary::Shl, dtype) => expr::small(x[0] * x[1].exp2(), false, dtype),
            (_, _) => (x[0] / x[1].exp2()).trunc(),
        },
        |x, c| match (direction(c), c.dtype(0)) {
            (side, DType::I32) => x[0].binary(side, &x[1]),
            // A power that is too large wraps around to 0, and so do the product and the quotient.
            (Binary::Shl, _) => &x[0] * x[0].like(2.0).pow(&x[1]),
            (_, _) => &x[0] / x[0].like(2.0).pow(&x[1]),
        })
        .sample(|s| INTEGERS(s).attr("direction", "RIGHT"))
        .attrs(names![direction]),
    // Conversion
    map("Cast", "x as type `to`: to integers by truncation, to bool by comparing with zero", IN, cast_infer,
        |x, c| convert(x[0], c),
        narrowed::cast)
        .sample(|s| s.uniform(-3.0, 3.0).attr("to", DType::I32.onnx()))
        .attrs(names![to saturate round_mode]),
    map("BitCast", "The bits of x, read as type `to`, which is as wide", IN, bits_infer,
        |x, c| bits_of(x[0], c.dtype(0), target(c)),
        |x, c| x[0].bits(target(c)))
        .sample(|s| s.uniform(-3.0, 3.0).attr("to", DType::I32.onnx()))
        .attrs(names![to]),
    composed("CastLike", "x in the other input's type", inputs![input target_type],
        |b, c, x| Ok(vec![b.op("Cast", &x.0[..1], c.attrs.clone().with("to", c.dtype(1).onnx()))]))
        .sample(|s| s.uniform(-3.0, 3.0).input(DType::I64, &[5], 0.0, 1.0))
        .attrs(names![saturate round_mode]),
];

/// An elementwise row. Its sample has one operand, or two, between -3 and 3; a row with another domain says so.
const fn map(
    name: &'static str,
    doc: &'static str,
    inputs: &'static [Input],
    infer: Infer,
    eval: fn(&[f64], &Call) -> f64,
    lower: fn(&Args, &Call) -> Expr,
) -> OpDef {
    let sample: fn(Sample) -> Sample =
        if inputs.len() == 1 { |s| s.uniform(-3.0, 3.0) } else { |s| s.uniform(-3.0, 3.0).uniform(-3.0, 3.0) };
    OpDef::new(name, doc, inputs, infer, Eval::Scalar(eval), Lower::Map(lower)).sample(sample)
}

/// Operands of one type, which `allowed` admits; attributes are floats.
fn same(call: &Call, expected: &str, allowed: fn(DType) -> bool) -> OpResult<Vec<Fact>> {
    expect_dtype(call, 0, expected, allowed)?;
    for name in call.op.attrs {
        call.float(name, 0.0)?;
    }
    output(same_dtype(call)?, broadcast(call)?)
}

fn float(call: &Call) -> OpResult<Vec<Fact>> {
    same(call, "a float type", DType::is_float)
}

fn number(call: &Call) -> OpResult<Vec<Fact>> {
    same(call, "a float or integer type", DType::is_number)
}

fn integer(call: &Call) -> OpResult<Vec<Fact>> {
    same(call, "an integer type", DType::is_int)
}

fn shifted(call: &Call) -> OpResult<Vec<Fact>> {
    call.choice("direction", DIRECTIONS)?;
    expect_dtype(call, 0, "an unsigned integer type, or i32", |dtype| dtype.is_unsigned() || dtype == DType::I32)?;
    output(same_dtype(call)?, broadcast(call)?)
}

/// The first is that of a node that names none.
const DIRECTIONS: &[(&str, Binary)] = &[("LEFT", Binary::Shl), ("RIGHT", Binary::Shr)];

fn direction(call: &Call) -> Binary {
    call.choice("direction", DIRECTIONS).expect("attributes are checked when facts are inferred")
}

fn logical(call: &Call) -> OpResult<Vec<Fact>> {
    same(call, "bool", |d| d == DType::Bool)
}

fn comparison(call: &Call) -> OpResult<Vec<Fact>> {
    number(call)?;
    output(DType::Bool, broadcast(call)?)
}

fn undefined(call: &Call) -> OpResult<Vec<Fact>> {
    float(call)?;
    output(DType::Bool, call.shape(0).clone())
}

fn equality(call: &Call) -> OpResult<Vec<Fact>> {
    expect_dtype(call, 0, "bool, a float or integer type", |d| d.is_number() || d == DType::Bool)?;
    same_dtype(call)?;
    output(DType::Bool, broadcast(call)?)
}

/// A float attribute; `infer` has read every one of them.
fn param(call: &Call, name: &str, default: f64) -> f64 {
    call.float(name, default).expect("attributes are checked when facts are inferred")
}

fn truth(holds: bool) -> f64 {
    f64::from(u8::from(holds))
}

fn bits(x: &[f64], f: fn(i64, i64) -> i64) -> f64 {
    f(x[0] as i64, x[1] as i64) as f64
}

fn fold(x: &[f64], f: fn(f64, f64) -> f64) -> f64 {
    x.iter().copied().reduce(f).expect("a variadic input is given at least once")
}

fn join(x: &Args, f: fn(&Expr, &Expr) -> Expr) -> Expr {
    x.iter().cloned().reduce(|a, b| f(&a, &b)).expect("a variadic input is given at least once")
}

fn negative(x: &Expr) -> Expr {
    x.lt(&x.like(0.0))
}

/// `scale x + offset` within 0..1.
fn ramp(x: &Expr, scale: f64, offset: f64) -> Expr {
    (x * scale + offset).max(&x.like(0.0)).min(&x.like(1.0))
}

/// `x`, or `alpha (e^(scale x) - 1)` where `x < 0`.
fn exponential(x: &Expr, alpha: f64, scale: f64) -> Expr {
    let below = x.min(&x.like(0.0)) * scale;
    // The difference of two numbers near 1 has few digits of a small value; its series has them all.
    let terms = [1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0];
    let series = &below * terms[1..].iter().fold(below.like(terms[0]), |sum, &term| sum * &below + term);
    let less = below.like(-0.01).lt(&below).select(&series, &(below.exp() + -1.0));
    x.max(&x.like(0.0)) + less * alpha
}

const SELU_ALPHA: f64 = 1.6732631921768188;
const SELU_GAMMA: f64 = 1.0507010221481323;

/// `1 / (1 + e)` or `e / (1 + e)` with `e = e^-|x|`. Nothing overflows, and small results are exact to the last
/// digits.
pub(super) fn sigmoid(x: &Expr) -> Expr {
    let e = (-x.abs()).exp();
    negative(x).select(&e, &e.like(1.0)) / (&e + 1.0)
}

/// With `e = e^-|x|`, `tanh(ln(1 + e^x))` is `n / (n + 2 e^2)` where `n = 1 + 2 e`, and for negative `x` it is
/// `n / (n + 2)` where `n = e (e + 2)`.
fn mish(args: &Args, _: &Call) -> Expr {
    let x = &args[0];
    let e = (-x.abs()).exp();
    let n = negative(x).select(&(&e * (&e + 2.0)), &(&e * 2.0 + 1.0));
    let rest = negative(x).select(&x.like(2.0), &(&e * &e * 2.0));
    x * (&n / (&n + rest))
}

fn gelu_infer(call: &Call) -> OpResult<Vec<Fact>> {
    match call.str("approximate", "none")? {
        "none" | "tanh" => output(expect_dtype(call, 0, "a float type", DType::is_float)?, call.shape(0).clone()),
        other => Err(format!("attribute 'approximate': expected none or tanh, found {other}")),
    }
}

/// True if a Gelu uses the tanh approximation.
fn approximate(call: &Call) -> bool {
    call.str("approximate", "none") == Ok("tanh")
}

fn gelu(x: f64, approximate: bool) -> f64 {
    let cdf = if approximate {
        0.5 * (1.0 + ((2.0 / PI).sqrt() * (x + 0.044715 * x.powi(3))).tanh())
    } else {
        0.5 * libm::erfc(-x * FRAC_1_SQRT_2)
    };
    x * cdf
}

fn gelu_expr(x: &Expr, approximate: bool) -> Expr {
    let odd =
        if approximate { ((x * x * 0.044715 + 1.0) * x * (2.0 / PI).sqrt()).tanh() } else { (x * FRAC_1_SQRT_2).erf() };
    x * 0.5 * (odd + 1.0)
}

fn div(x: &[f64], call: &Call) -> f64 {
    let quotient = x[0] / x[1];
    match (call.dtype(0).is_int(), x[1] == 0.0) {
        (false, _) => quotient,
        (true, false) => quotient.trunc(),
        (true, true) => 0.0,
    }
}

fn modulo(x: &[f64], call: &Call) -> f64 {
    let [a, b] = [x[0], x[1]];
    if call.dtype(0).is_int() && b == 0.0 {
        0.0
    } else if param(call, "fmod", 0.0) != 0.0 {
        a % b
    } else if b < 0.0 {
        -(-a).rem_euclid(b)
    } else {
        a.rem_euclid(b)
    }
}

fn modulo_expr(x: &Args, call: &Call) -> Expr {
    let (b, r) = (&x[1], x[0].rem(&x[1]));
    if param(call, "fmod", 0.0) != 0.0 {
        return r;
    }
    let other_side = negative(&r).xor(&negative(b));
    r.eq(&r.like(0.0)).not().and(&other_side).select(&(&r + b), &r)
}

fn pow_infer(call: &Call) -> OpResult<Vec<Fact>> {
    expect_dtype(call, 1, "a float or integer type", DType::is_number)?;
    output(expect_dtype(call, 0, "a float or integer type", DType::is_number)?, broadcast(call)?)
}

/// The largest finite value of a float type.
pub(super) fn most(dtype: DType) -> f64 {
    match dtype {
        DType::F16 => f64::from(half::f16::MAX),
        DType::BF16 => f64::from(half::bf16::MAX),
        DType::F64 => f64::MAX,
        _ => f64::from(f32::MAX),
    }
}

const NEGATIVE: &str = "detect_negative";
const POSITIVE: &str = "detect_positive";

fn infinite(x: &Args, call: &Call) -> Expr {
    let (x, most) = (&x[0], most(x[0].dtype()));
    let (above, below) = (x.like(most).lt(x), x.lt(&x.like(-most)));
    match (param(call, NEGATIVE, 1.0) != 0.0, param(call, POSITIVE, 1.0) != 0.0) {
        (true, true) => above.or(&below),
        (true, false) => below,
        (false, true) => above,
        (false, false) => above.and(&below),
    }
}

/// The square root. Of minus infinity it is infinity, as it is for a power of 0.5.
fn root(x: &Expr) -> Expr {
    x.lt(&x.like(-most(x.dtype()))).select(&x.abs(), &x.sqrt())
}

/// Writes the powers that are common in models as products and roots.
fn pow(args: &Args, _: &Call) -> Expr {
    let (x, y) = (&args[0], &args[1]);
    let float = x.dtype().is_float();
    match y.as_lit() {
        Some(1.0) => return x.clone(),
        Some(2.0) => return x * x,
        Some(3.0) => return x * x * x,
        Some(0.5) if float => return root(x),
        Some(-0.5) if float => return root(x).recip(),
        Some(-1.0) if float => return x.recip(),
        _ => {}
    }
    let wide = if float || !y.dtype().is_float() { x.dtype() } else { y.dtype() };
    x.cast(wide).pow(&y.cast(wide)).cast(x.dtype())
}

/// The first input's fact, if the others broadcast to its shape.
fn keeps_shape(call: &Call) -> OpResult<Vec<Fact>> {
    number(call)?;
    let found = broadcast(call)?;
    ensure(found == *call.shape(0), || format!("expected shapes that broadcast to {}, found {found}", call.shape(0)))?;
    Ok(vec![call.fact(0).clone()])
}

fn clip(x: &[f64], call: &Call) -> f64 {
    let bound = |slot: usize, name: &str, open: f64| if call.has(slot) { x[slot] } else { param(call, name, open) };
    minimum(maximum(x[0], bound(1, "min", f64::NEG_INFINITY)), bound(2, "max", f64::INFINITY))
}

fn clip_expr(x: &Args, call: &Call) -> Expr {
    let bound = |slot, name| {
        let attribute = || call.attrs.get(name).map(|_| x[0].like(param(call, name, 0.0)));
        x.get(slot).cloned().or_else(attribute)
    };
    let raised = bound(1, "min").map_or(x[0].clone(), |low| x[0].max(&low));
    bound(2, "max").map_or(raised.clone(), |high| raised.min(&high))
}

/// The gradient reaches x within the bounds, and on them; a bound where x is beyond it.
fn clip_grad<'g>(_: Nodes<'g>, call: &Call, back: &Back<'_, 'g>) -> OpResult<Vec<Option<Var<'g>>>> {
    let (x, dy) = (back.x[0], back.first()?);
    let bound = |slot: usize, name: &str| {
        let attribute = || call.attrs.get(name).map(|_| x.like(param(call, name, 0.0)));
        back.x.given(slot).or_else(attribute)
    };
    let beyond = [bound(1, "min").map(|low| x.less(low)), bound(2, "max").map(|high| x.greater(high))];
    let within = beyond.iter().flatten().fold(dy, |dy, beyond| beyond.select(0.0, dy));
    let [low, high] = beyond.map(|beyond| beyond.map(|beyond| beyond.select(dy, 0.0)));
    Ok(vec![Some(within), low, high][..call.inputs.len()].to_vec())
}

fn where_infer(call: &Call) -> OpResult<Vec<Fact>> {
    expect_dtype(call, 0, "bool", |d| d == DType::Bool)?;
    expect_type_of(call, 2, call.dtype(1), "input 'X'")?;
    output(call.dtype(1), broadcast(call)?)
}

fn cast_infer(call: &Call) -> OpResult<Vec<Fact>> {
    let to = call.int("to", 0)?;
    let dtype = DType::from_onnx(to).ok_or_else(|| {
        let known: Vec<_> = DType::ALL.iter().map(|d| format!("{} ({d})", d.onnx())).collect();
        format!("attribute 'to': expected one of {}, found {to}", known.join(", "))
    })?;
    narrowed::check(call)?;
    output(dtype, call.shape(0).clone())
}

fn bits_infer(call: &Call) -> OpResult<Vec<Fact>> {
    let (from, to) = (call.dtype(0), cast_infer(call)?.remove(0).dtype);
    ensure(!from.is_narrow() && !to.is_narrow(), || {
        format!("attribute 'to': expected types of at least 8 bits that are computed with, found {from} as {to}")
    })?;
    ensure(from.size() == to.size(), || format!("attribute 'to': expected a type as wide as {from}, found {to}"))?;
    // The CPU computes halves in `f32`: their bits are not there.
    let half = from != to && (from.is_half() || to.is_half());
    ensure(!half, || format!("attribute 'to': expected no 16-bit float, found {from} as {to}"))?;
    output(to, call.shape(0).clone())
}

fn bits_of(x: f64, from: DType, to: DType) -> f64 {
    match (from.is_float(), to.is_float()) {
        (true, false) => {
            let held = if to.size() == 8 { DType::I64 } else { DType::I32 };
            expr::small(expr::bits(x, held), false, to)
        }
        (false, true) => expr::bits(x, to),
        _ => x,
    }
}

/// The type that a Cast converts to.
fn target(call: &Call) -> DType {
    let to = call.int("to", 0).ok().and_then(DType::from_onnx);
    to.expect("attributes are checked when facts are inferred")
}

fn convert(x: f64, call: &Call) -> f64 {
    let (from, to) = (call.dtype(0), target(call));
    match to {
        to if to.is_narrow() => {
            // The lowest bits of an integer; the nearest number to a float.
            let x = if from.is_real() && !to.is_narrow_float() { expr::small(x, true, DType::I32) } else { x };
            let x = if to.is_narrow_float() { x } else { expr::small(x, false, to) };
            narrow::round(to, x, narrowed::rounding(call))
        }
        DType::Bool => truth(x != 0.0),
        to if to.is_small_int() || to == DType::U64 => expr::small(x, from.is_real(), to),
        to if to.is_int() => x.trunc(),
        _ => x,
    }
}

#[cfg(test)]
mod tests {
    use crate::dtype::DType::{self, *};
    use crate::op::{Attrs, Call, Fact};
    use crate::ops::find;
    use crate::ops::tests::refused;

    fn infer(op: &str, inputs: &[(DType, &[usize])], attrs: &Attrs) -> Result<String, String> {
        let facts: Vec<_> = inputs.iter().map(|(dtype, shape)| Fact::new(*dtype, *shape)).collect();
        let inputs: Vec<_> = facts.iter().map(Some).collect();
        let call = Call { op: find(op).expect("a row"), attrs, inputs: &inputs };
        call.infer().map(|facts| facts[0].to_string())
    }

    #[test]
    fn facts_follow_the_operands_or_say_why_not() {
        let none = Attrs::new();
        assert_eq!(infer("Add", &[(F32, &[2, 1]), (F32, &[3])], &none).as_deref(), Ok("f32[2,3]"));
        assert_eq!(infer("Less", &[(I64, &[]), (I64, &[0])], &none).as_deref(), Ok("bool[0]"));
        assert_eq!(infer("Pow", &[(F32, &[4]), (I64, &[])], &none).as_deref(), Ok("f32[4]"));
        assert_eq!(infer("Cast", &[(F32, &[4])], &Attrs::new().with("to", 7)).as_deref(), Ok("i64[4]"));
        for (found, expected) in [
            (refused("Add", &[(F32, &[2]), (F32, &[3])], &none), "expected shapes that broadcast, found [2] and [3]"),
            (refused("Add", &[(F32, &[2]), (I64, &[2])], &none), "input 'B': expected f32 as input 'A', found i64"),
            (
                refused("Sum", &[(F32, &[]), (I32, &[])], &none),
                "input 'data_0[1]': expected f32 as input 'data_0[0]', found i32",
            ),
            (refused("Exp", &[(I64, &[2])], &none), "input 'input': expected a float type, found i64"),
            (
                refused("Where", &[(F32, &[]), (F32, &[]), (F32, &[])], &none),
                "input 'condition': expected bool, found f32",
            ),
            (refused("PRelu", &[(F32, &[1]), (F32, &[3])], &none), "expected shapes that broadcast to [1], found [3]"),
            (
                refused("Elu", &[(F32, &[1])], &Attrs::new().with("alpha", "one")),
                "attribute 'alpha': expected a float, found string",
            ),
            (
                refused("Gelu", &[(F32, &[1])], &Attrs::new().with("approximate", "erf")),
                "attribute 'approximate': expected none or tanh, found erf",
            ),
        ] {
            assert_eq!(found, expected);
        }
        assert!(refused("Cast", &[(F32, &[1])], &Attrs::new().with("to", 8)).ends_with("found 8"));
    }
}
