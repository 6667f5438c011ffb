//! Scalar code: types, literals, instructions, and the functions that devices lack.

use super::Dialect;
use crate::dtype::DType;
use crate::error::ensure;
use crate::expr::{Binary, Unary};
use crate::target::Family;
use Type::{BF16, Bool, F16, F32, F64, I8, I16, I32, I64, U8, U16, U32, U64, Vec2, Vec4};

/// Types of values in registers and buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Type {
    F32,
    F16,
    BF16,
    F64,
    I64,
    I32,
    I16,
    I8,
    U64,
    U32,
    U16,
    U8,
    Bool,
    Vec2,
    Vec4,
}

impl Type {
    pub(super) fn name(self) -> &'static str {
        match self {
            F32 => "f32",
            F16 => "f16",
            BF16 => "bf16",
            F64 => "f64",
            I64 => "i64",
            I32 => "i32",
            I16 => "i16",
            I8 => "i8",
            U64 => "u64",
            U32 => "u32",
            U16 => "u16",
            U8 => "u8",
            Bool => "bool",
            Vec2 => "vec2f",
            Vec4 => "vec4f",
        }
    }

    /// Bytes of an element in a buffer.
    pub(super) fn size(self) -> usize {
        match self {
            U8 | I8 | Bool => 1,
            F16 | BF16 | I16 | U16 => 2,
            F32 | I32 | U32 => 4,
            F64 | I64 | U64 | Vec2 => 8,
            Vec4 => 16,
        }
    }

    /// The type of elements that are stored as `dtype`; `None` when the family's kernels have no such type.
    pub(super) fn stored(dtype: DType, family: Family) -> Option<Type> {
        Some(match dtype {
            DType::F32 => F32,
            DType::I32 => I32,
            DType::F16 => F16,
            DType::BF16 => BF16,
            DType::I16 => I16,
            DType::I8 => I8,
            DType::U16 => U16,
            DType::U8 => U8,
            DType::Bool => Bool,
            _ if family != Family::Cuda => return None,
            DType::F64 => F64,
            DType::I64 => I64,
            DType::U64 => U64,
            DType::U32 => U32,
            // Kernels read and write the integers that hold them.
            _ => return None,
        })
    }

    /// The type of WGSL's memory for these elements: a word, where they have less than 32 bits.
    pub(super) fn in_words(self) -> Type {
        if self.is_part() { U32 } else { self }
    }

    /// True if a word of WGSL's memory holds several.
    pub(super) fn is_part(self) -> bool {
        self.size() < 4
    }

    /// The type in which a stored value is computed with.
    pub(super) fn value(self) -> Type {
        match self {
            F16 | BF16 => F32,
            U8 | I8 | U16 | I16 => I32,
            U32 => I64,
            other => other,
        }
    }

    /// The type in which values of a body are held.
    pub(super) fn register(dtype: DType, family: Family) -> Type {
        match dtype {
            DType::Bool => Bool,
            DType::F64 if family == Family::Cuda => F64,
            DType::I64 | DType::U32 if family == Family::Cuda => I64,
            DType::U64 if family == Family::Cuda => U64,
            d if d.is_int() => I32,
            _ => F32,
        }
    }

    pub(super) fn is_float(self) -> bool {
        matches!(self, F32 | F64)
    }

    /// The least and the greatest value; of floats, the infinities.
    pub(super) fn bounds(self) -> (f64, f64) {
        match self {
            I64 => (i64::MIN as f64, i64::MAX as f64),
            I32 => (i32::MIN.into(), i32::MAX.into()),
            U64 => (0.0, u64::MAX as f64),
            Bool => (0.0, 1.0),
            _ => (f64::NEG_INFINITY, f64::INFINITY),
        }
    }
}

pub(super) fn convert(value: &str, from: Type, to: Type) -> String {
    match (from, to) {
        (from, to) if from == to => value.to_owned(),
        (F32 | F64, Bool) => format!("({value} != 0.0f)"),
        (I32 | I64 | U64, Bool) => format!("({value} != 0)"),
        _ => format!("{}({value})", to.name()),
    }
}

/// Converts a float to an integer of a register: truncated and saturated, and 0 if it is not a number.
pub(super) fn whole((value, from): (String, Type), to: Type) -> String {
    format!("whole_{}_{}({value})", to.name(), from.name())
}

/// Converts a value to a small integer, held in a register. Of a float it is the nearest one, of an integer the one with the same lowest
/// bits: where these are all bits of the register, the value itself.
pub(super) fn small((value, from): (String, Type), to: DType, family: Family) -> String {
    let held = Type::register(to, family);
    let (low, high) = to.range();
    let int = || convert(&value, from, held);
    let [mask, half] = [high - low, -low].map(|value| literal(value, held));
    match from {
        _ if from.is_float() => {
            let [low, high] = [low, high].map(|end| literal(end, held));
            format!("clamp({}, {low}, {high})", whole((value, from), held))
        }
        Bool => int(),
        _ if to == DType::U32 && held == I32 => int(),
        _ if to.is_unsigned() => format!("{} & {mask}", int()),
        _ => format!("(({} + {half}) & {mask}) - {half}", int()),
    }
}

/// A constant of a kernel's body: on CUDA to the bit.
pub(super) fn constant(value: f64, ty: Type, dialect: Dialect) -> String {
    match ty {
        F32 if dialect == Dialect::Cuda && !(value as f32).is_finite() => {
            format!("bitcast<f32>({:#x}u)", (value as f32).to_bits())
        }
        F64 if dialect == Dialect::Cuda && !value.is_finite() => format!("bitcast<f64>({:#x}ull)", value.to_bits()),
        _ => literal(value, ty),
    }
}

/// A sum, difference or product of integers keeps the lowest bits. In C++ that is said of numbers without a sign alone: compilers take it that
/// others do not overflow.
pub(super) fn arithmetic(op: Binary, a: (String, Type), b: (String, Type), dialect: Dialect) -> Result<String, String> {
    let overflows = matches!(op, Binary::Add | Binary::Sub | Binary::Mul) && dialect == Dialect::Cuda;
    let unsigned = match a.1 {
        I32 if overflows => "u32",
        I64 if overflows => "u64",
        _ => return binary(op, a, b),
    };
    let (name, ty) = (a.1.name(), a.1);
    let [a, b] = [a, b].map(|(value, own)| (format!("{unsigned}({value})"), own));
    ensure(b.1 == ty, || format!("{op:?} of a {name} and a {}", b.1.name()))?;
    Ok(format!("{name}({})", binary(op, a, b)?))
}

/// A literal. What is not finite becomes the largest finite value: GPUs may assume that there is nothing else.
pub(super) fn literal(value: f64, ty: Type) -> String {
    match ty {
        Bool => (value != 0.0).to_string(),
        I64 if value <= i64::MIN as f64 => "(-9223372036854775807ll - 1)".into(),
        I64 => format!("{}ll", value as i64),
        U64 => format!("{}ull", value as u64),
        U32 => format!("{}u", value as u32),
        I32 | I16 | I8 | U16 | U8 if value <= f64::from(i32::MIN) => "(-2147483647 - 1)".into(),
        I32 | I16 | I8 | U16 | U8 if value < 0.0 => format!("({})", value as i32),
        I32 | I16 | I8 | U16 | U8 => (value as i32).to_string(),
        F64 => {
            let v = if value.is_nan() { 0.0 } else { value.clamp(f64::MIN, f64::MAX) };
            format!("({v:?})")
        }
        F32 | F16 | BF16 | Vec2 | Vec4 => {
            let v = if value.is_nan() { 0.0 } else { (value as f32).clamp(f32::MIN, f32::MAX) };
            let v = if v.is_subnormal() { 0.0 } else { v };
            // The shortest text of the largest is above it, which browsers refuse.
            let text = if v.abs() == f32::MAX { format!("{:?}", f64::from(v)) } else { format!("{v:?}") };
            if v.is_sign_negative() { format!("({text}f)") } else { format!("{text}f") }
        }
    }
}

pub(super) fn unary(op: Unary, (x, ty): (String, Type)) -> Result<String, String> {
    let name = ty.name();
    Ok(match (op, ty) {
        (Unary::Not, Bool) => format!("!{x}"),
        (Unary::Not, I32 | I64 | U64) => format!("{x} == 0"),
        (_, Bool | Vec2 | Vec4 | F16 | BF16 | I16 | I8 | U32 | U16 | U8) | (Unary::Not, _) => {
            return Err(format!("{op:?} of a {name}"));
        }
        (Unary::Abs, U64) => x,
        (Unary::Neg, _) => format!("-{x}"),
        (Unary::Abs, _) => format!("abs({x})"),
        (Unary::Sign, F32) => format!("sign_f32({x})"),
        (Unary::Sign, _) => format!("sign({x})"),
        (Unary::Floor | Unary::Ceil | Unary::Round, I32 | I64 | U64) => x,
        (_, I32) => format!("i32({})", unary(op, (format!("f32({x})"), F32))?),
        (_, I64 | U64) => format!("{name}({})", unary(op, (format!("f64({x})"), F64))?),
        (Unary::Exp, _) => format!("exp({x})"),
        (Unary::Log, _) => format!("log({x})"),
        (Unary::Sqrt, _) => format!("sqrt({x})"),
        (Unary::Recip, _) => format!("1.0f / {x}"),
        (Unary::Sin, _) => format!("sin_{name}({x}, 0)"),
        (Unary::Cos, _) => format!("sin_{name}({x}, 1)"),
        (Unary::Tanh, F64) => format!("tanh({x})"),
        (Unary::Tanh, _) => format!("tanh_{name}({x})"),
        (Unary::Erf, _) => format!("erf_{name}({x})"),
        (Unary::Floor, _) => format!("floor({x})"),
        (Unary::Ceil, _) => format!("ceil({x})"),
        (Unary::Round, _) => format!("round({x})"),
    })
}

pub(super) fn binary(op: Binary, (a, ty): (String, Type), (b, other): (String, Type)) -> Result<String, String> {
    ensure(ty == other, || format!("{op:?} of a {} and a {}", ty.name(), other.name()))?;
    let name = ty.name();
    let logical = |op: &str| format!("{} {op} {}", convert(&a, ty, Bool), convert(&b, ty, Bool));
    Ok(match (op, ty) {
        (Binary::And, I32 | I64 | U64) => format!("{a} & {b}"),
        (Binary::Or, I32 | I64 | U64) => format!("{a} | {b}"),
        (Binary::Xor, I32 | I64 | U64) => format!("{a} ^ {b}"),
        (Binary::And, _) => logical("&&"),
        (Binary::Or, _) => logical("||"),
        (Binary::Xor, _) => logical("!="),
        (Binary::Eq, _) => format!("{a} == {b}"),
        (Binary::Max, Bool) => logical("||"),
        (Binary::Min, Bool) => logical("&&"),
        (Binary::Shl, I32) => format!("bitcast<i32>(bitcast<u32>({a}) << (u32({b}) & 31u))"),
        (Binary::Shr, I32) => format!("bitcast<i32>(bitcast<u32>({a}) >> (u32({b}) & 31u))"),
        (Binary::Shl | Binary::Shr, _) | (_, Bool | Vec2 | Vec4 | F16 | BF16 | I16 | I8 | U32 | U16 | U8) => {
            return Err(format!("{op:?} of a {name}"));
        }
        (Binary::Add, _) => format!("{a} + {b}"),
        (Binary::Sub, _) => format!("{a} - {b}"),
        (Binary::Mul, _) => format!("{a} * {b}"),
        (Binary::Div, F32 | F64) => format!("{a} / {b}"),
        (Binary::Div, _) => format!("div_{name}({a}, {b})"),
        (Binary::Rem, _) => format!("rem_{name}({a}, {b})"),
        (Binary::Pow, _) => format!("pow_{name}({a}, {b})"),
        (Binary::Max | Binary::Min, _) => format!("{}({a}, {b})", extreme(op == Binary::Max, ty)),
        (Binary::Lt, _) => format!("{a} < {b}"),
        (Binary::Le, _) => format!("{a} <= {b}"),
    })
}

/// The function that returns the larger or the smaller of two values. If either is not a number, the result is none, unlike that of
/// devices' own functions.
pub(super) fn extreme(larger: bool, ty: Type) -> &'static str {
    match (larger, ty) {
        (true, F32) => "max_f32",
        (false, F32) => "min_f32",
        (true, F64) => "max_f64",
        (false, F64) => "min_f64",
        (true, _) => "max",
        (false, _) => "min",
    }
}
