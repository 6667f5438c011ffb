//! Element types.

use serde::{Deserialize, Serialize};
use std::fmt;

/// The type of one element.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs)]
pub enum DType {
    F32,
    F16,
    BF16,
    F64,
    I64,
    I32,
    U8,
    I8,
    Bool,
}

impl DType {
    /// Every element type.
    pub const ALL: [DType; 9] =
        [DType::F32, DType::F16, DType::BF16, DType::F64, DType::I64, DType::I32, DType::U8, DType::I8, DType::Bool];

    /// Bytes of one element in host memory.
    pub const fn size(self) -> usize {
        match self {
            DType::F64 | DType::I64 => 8,
            DType::F32 | DType::I32 => 4,
            DType::F16 | DType::BF16 => 2,
            DType::U8 | DType::I8 | DType::Bool => 1,
        }
    }

    /// The name used in messages, plans and on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            DType::F32 => "f32",
            DType::F16 => "f16",
            DType::BF16 => "bf16",
            DType::F64 => "f64",
            DType::I64 => "i64",
            DType::I32 => "i32",
            DType::U8 => "u8",
            DType::I8 => "i8",
            DType::Bool => "bool",
        }
    }

    /// The type with this [`name`](Self::name).
    pub fn from_name(name: &str) -> Option<DType> {
        Self::ALL.into_iter().find(|d| d.name() == name)
    }

    /// The number that ONNX files give the type (`TensorProto.DataType`).
    pub const fn onnx(self) -> i64 {
        match self {
            DType::F32 => 1,
            DType::U8 => 2,
            DType::I8 => 3,
            DType::I32 => 6,
            DType::I64 => 7,
            DType::Bool => 9,
            DType::F16 => 10,
            DType::F64 => 11,
            DType::BF16 => 16,
        }
    }

    /// The type with this [number](Self::onnx).
    pub fn from_onnx(number: i64) -> Option<DType> {
        Self::ALL.into_iter().find(|d| d.onnx() == number)
    }

    /// The least and the greatest value, which are infinite for floating-point types.
    pub const fn range(self) -> (f64, f64) {
        match self {
            DType::I64 => (i64::MIN as f64, i64::MAX as f64),
            DType::I32 => (i32::MIN as f64, i32::MAX as f64),
            DType::I8 => (i8::MIN as f64, i8::MAX as f64),
            DType::U8 => (u8::MIN as f64, u8::MAX as f64),
            DType::Bool => (0.0, 1.0),
            _ => (f64::NEG_INFINITY, f64::INFINITY),
        }
    }

    /// True for floating-point types.
    pub const fn is_float(self) -> bool {
        matches!(self, DType::F32 | DType::F16 | DType::BF16 | DType::F64)
    }

    /// True for floating-point types of two bytes.
    pub const fn is_half(self) -> bool {
        matches!(self, DType::F16 | DType::BF16)
    }

    /// True for integers of one byte. They are computed in `i32`.
    pub const fn is_small_int(self) -> bool {
        matches!(self, DType::U8 | DType::I8)
    }

    /// True for integer types; `bool` is not one.
    pub const fn is_int(self) -> bool {
        matches!(self, DType::I64 | DType::I32 | DType::U8 | DType::I8)
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
