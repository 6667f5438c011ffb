//! Conversions from and to elements of at most 8 bits, as expressions of kernels. Kernels have such an element as the integer that holds it:
//! of a float, its code.
//!
//! ```text
//! code of e4m3fn    sign exponent mantissa      s eeee mmm
//! bits of f32       the exponent is larger by 127 - 7, and 20 bits of zeros follow the mantissa
//! ```

use super::target;
use crate::dtype::DType;
use crate::error::ensure;
use crate::expr::{Binary, Expr};
use crate::narrow::{Layout, NO_POWER, Power, Rounding};
use crate::op::{Args, Call, OpResult};

const INFINITY: i32 = 0x7f80_0000;
const NOT_A_NUMBER: i32 = 0x7fc0_0000;
/// Bits of the mantissa of `f32`, and what its exponent is larger by.
const MANTISSA: u32 = 23;
const BIAS: i32 = 127;

/// Refuses attributes that say how to round, and are none of ONNX's.
pub fn check(call: &Call) -> OpResult<()> {
    call.int("saturate", 1)?;
    let mode = call.str("round_mode", "up")?;
    ensure(["up", "down", "nearest"].contains(&mode), || {
        format!("attribute 'round_mode': expected up, down or nearest, found {mode}")
    })
}

/// How a Cast rounds.
pub fn rounding(call: &Call) -> Rounding {
    let power = match call.str("round_mode", "up") {
        Ok("down") => Power::Down,
        Ok("nearest") => Power::Nearest,
        _ => Power::Up,
    };
    Rounding { saturate: call.int("saturate", 1) != Ok(0), power }
}

/// The expression of a Cast.
pub fn cast(x: &Args, call: &Call) -> Expr {
    let (from, to) = (call.dtype(0), target(call));
    let wide = if from.is_narrow_float() { number(&x[0].cast(DType::I32), from) } else { x[0].clone() };
    match to {
        to if to.is_narrow_float() => code(&wide.cast(DType::F32), to, rounding(call)).cast(to.held()),
        to if to.is_narrow() => {
            let (least, most) = to.range();
            // The lowest bits.
            let whole = wide.cast(DType::I32);
            let low = whole.and(&whole.like(most - least));
            let kept = if least < 0.0 { low.xor(&low.like(-least)) + low.like(least) } else { low };
            kept.cast(to.held())
        }
        to => wide.cast(to),
    }
}

fn bits(like: &Expr, value: i32) -> Expr {
    like.like(value.into())
}

fn shifted(value: &Expr, op: Binary, by: u32) -> Expr {
    value.binary(op, &value.like(by.into()))
}

/// The `f32` of a code, an `i32`.
fn number(code: &Expr, dtype: DType) -> Expr {
    let Some(layout) = Layout::of(dtype) else {
        // The smallest power has no exponent in f32, but half of the mantissa.
        let power =
            code.eq(&code.like(0.0)).select(&bits(code, 1 << (MANTISSA - 1)), &shifted(code, Binary::Shl, MANTISSA));
        let is_none = code.eq(&code.like(NO_POWER.into()));
        return is_none.select(&bits(code, NOT_A_NUMBER), &power).bits(DType::F32);
    };
    let size = code.and(&bits(code, (1 << layout.sign()) - 1));
    let moved = MANTISSA - layout.mantissa;
    let above = bits(code, (BIAS - layout.bias) << layout.mantissa);
    let mut normal = shifted(&(&size + &above), Binary::Shl, moved);
    match (layout.infinity, layout.nan) {
        (Some(infinity), _) => {
            // What is above infinity is no number: its mantissa is not zero.
            let special = shifted(&size, Binary::Shl, moved).or(&bits(code, INFINITY));
            normal = size.lt(&size.like(infinity.into())).select(&normal, &special);
        }
        (None, Some(nan)) => {
            let found = if layout.one_zero { code } else { &size };
            normal = found.eq(&found.like(nan.into())).select(&bits(code, NOT_A_NUMBER), &normal);
        }
        (None, None) => {}
    }
    let small = size.cast(DType::F32) * f64::powi(2.0, 1 - layout.bias - layout.mantissa as i32);
    let mut is_small = size.lt(&bits(code, 1 << layout.mantissa));
    if let (true, Some(nan)) = (layout.one_zero, layout.nan) {
        // What is no number has the size of zero.
        is_small = is_small.and(&code.eq(&code.like(nan.into())).not());
    }
    let value = is_small.select(&small, &normal.bits(DType::F32));
    let is_negative = shifted(code, Binary::Shr, layout.sign()).eq(&code.like(1.0));
    is_negative.select(&-&value, &value)
}

/// The code, an `i32`, of an `f32`.
fn code(value: &Expr, dtype: DType, rounding: Rounding) -> Expr {
    let all = value.bits(DType::I32);
    let own = all.and(&bits(&all, i32::MAX));
    let is_nan = bits(&own, INFINITY).lt(&own);
    let size = own.min(&bits(&own, INFINITY));
    let Some(layout) = Layout::of(dtype) else { return power(&size, &is_nan, rounding) };
    let moved = MANTISSA - layout.mantissa;
    // Half of the last bit is added, less the smallest bit where the last one is even.
    let odd = shifted(&size, Binary::Shr, moved).and(&size.like(1.0));
    let rounded = shifted(&(&size + &odd + f64::from((1u32 << (moved - 1)) - 1)), Binary::Shr, moved);
    let normal = rounded - f64::from((BIAS - layout.bias) << layout.mantissa);
    let scale = f64::powi(2.0, layout.bias - 1 + layout.mantissa as i32);
    let small = (value.abs().min(&value.like(1.0)) * scale).round().cast(DType::I32);
    let least = (BIAS + 1 - layout.bias) << MANTISSA;
    let found = size.lt(&bits(&size, least)).select(&small, &normal);
    let over = layout.beyond(rounding);
    let is_over = found.like(layout.most.into()).lt(&found);
    let found = is_over.select(&found.like(over.into()), &found);
    let found = is_nan.select(&found.like(layout.not_a_number().into()), &found);
    let signed = found.or(&shifted(&shifted(&all, Binary::Shr, 31), Binary::Shl, layout.sign()));
    match layout.nan.filter(|_| layout.one_zero) {
        // Zero and what is no number have no sign.
        Some(nan) => found.eq(&found.like(0.0)).or(&found.eq(&found.like(nan.into()))).select(&found, &signed),
        None => signed,
    }
}

/// The code of a power of two near the number with these bits.
fn power(size: &Expr, is_nan: &Expr, rounding: Rounding) -> Expr {
    let (below, part) = (shifted(size, Binary::Shr, MANTISSA), size.and(&bits(size, (1 << MANTISSA) - 1)));
    let is_subnormal = below.eq(&below.like(0.0));
    let half = f64::from(1 << (MANTISSA - 1));
    // Below the powers that f32 has exponents for, the smallest one has half of the mantissa.
    let more = match rounding.power {
        Power::Up => is_subnormal.select(&part.like(half).lt(&part), &part.like(0.0).lt(&part)),
        Power::Nearest => {
            let most = is_subnormal.select(&part.like(1.5 * half), &part.like(half));
            part.lt(&most).not()
        }
        // Never: the exponent is not negative.
        Power::Down => below.lt(&below.like(-1.0)),
    };
    let found = &below + &more.cast(DType::I32);
    let none = found.like(NO_POWER.into());
    let over = if rounding.saturate { found.like(f64::from(NO_POWER - 1)) } else { none.clone() };
    let mut found = found.lt(&none).select(&found, &over);
    if !rounding.saturate {
        let is_under = size.lt(&bits(size, 1 << (MANTISSA - 1)));
        found = is_under.select(&none, &found);
    }
    is_nan.select(&none, &found)
}
