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
    I16,
    I8,
    U64,
    U32,
    U16,
    U8,
    Bool,
    I4,
    U4,
    I2,
    U2,
    F8E4M3FN,
    F8E4M3FNUZ,
    F8E5M2,
    F8E5M2FNUZ,
    F8E8M0,
    F4E2M1,
}

impl DType {
    /// Every element type.
    pub const ALL: [DType; 23] = [
        DType::F32,
        DType::F16,
        DType::BF16,
        DType::F64,
        DType::I64,
        DType::I32,
        DType::I16,
        DType::I8,
        DType::U64,
        DType::U32,
        DType::U16,
        DType::U8,
        DType::Bool,
        DType::I4,
        DType::U4,
        DType::I2,
        DType::U2,
        DType::F8E4M3FN,
        DType::F8E4M3FNUZ,
        DType::F8E5M2,
        DType::F8E5M2FNUZ,
        DType::F8E8M0,
        DType::F4E2M1,
    ];

    /// Bytes of one element in memory. One of less than 8 bits has a byte of its own there; in files, several share one.
    pub const fn size(self) -> usize {
        match self {
            DType::F64 | DType::I64 | DType::U64 => 8,
            DType::F32 | DType::I32 | DType::U32 => 4,
            DType::F16 | DType::BF16 | DType::I16 | DType::U16 => 2,
            _ => 1,
        }
    }

    /// Bits of an element in a file.
    pub const fn bits(self) -> usize {
        match self {
            DType::I4 | DType::U4 | DType::F4E2M1 => 4,
            DType::I2 | DType::U2 => 2,
            other => 8 * other.size(),
        }
    }

    /// Bytes of so many elements in a file, where those of less than 8 bits share bytes.
    pub const fn packed_bytes(self, count: usize) -> usize {
        // In 64 bits: a machine of 32 holds more bytes than it could count bits.
        let bytes = (count as u64).saturating_mul(self.bits() as u64).div_ceil(8);
        if bytes > usize::MAX as u64 { usize::MAX } else { bytes as usize }
    }

    /// True if several elements share a byte in files.
    pub const fn is_packed(self) -> bool {
        self.bits() < 8
    }

    /// True for types that are stored and not computed with: integers of less than 8 bits, and floats of at most 8.
    pub const fn is_narrow(self) -> bool {
        self.held() as u8 != self as u8
    }

    /// True for floats of at most 8 bits.
    pub const fn is_narrow_float(self) -> bool {
        self.is_narrow() && !matches!(self, DType::I4 | DType::U4 | DType::I2 | DType::U2)
    }

    /// The type that holds elements of a [narrow](Self::is_narrow) one: an integer as such, a float as its code. Others hold themselves.
    pub const fn held(self) -> DType {
        match self {
            DType::I4 | DType::I2 => DType::I8,
            DType::U4
            | DType::U2
            | DType::F8E4M3FN
            | DType::F8E4M3FNUZ
            | DType::F8E5M2
            | DType::F8E5M2FNUZ
            | DType::F8E8M0
            | DType::F4E2M1 => DType::U8,
            other => other,
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
            DType::I16 => "i16",
            DType::I8 => "i8",
            DType::U64 => "u64",
            DType::U32 => "u32",
            DType::U16 => "u16",
            DType::U8 => "u8",
            DType::Bool => "bool",
            DType::I4 => "i4",
            DType::U4 => "u4",
            DType::I2 => "i2",
            DType::U2 => "u2",
            DType::F8E4M3FN => "f8e4m3fn",
            DType::F8E4M3FNUZ => "f8e4m3fnuz",
            DType::F8E5M2 => "f8e5m2",
            DType::F8E5M2FNUZ => "f8e5m2fnuz",
            DType::F8E8M0 => "f8e8m0",
            DType::F4E2M1 => "f4e2m1",
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
            DType::U16 => 4,
            DType::I16 => 5,
            DType::I32 => 6,
            DType::I64 => 7,
            DType::Bool => 9,
            DType::F16 => 10,
            DType::F64 => 11,
            DType::U32 => 12,
            DType::U64 => 13,
            DType::BF16 => 16,
            DType::F8E4M3FN => 17,
            DType::F8E4M3FNUZ => 18,
            DType::F8E5M2 => 19,
            DType::F8E5M2FNUZ => 20,
            DType::U4 => 21,
            DType::I4 => 22,
            DType::F4E2M1 => 23,
            DType::F8E8M0 => 24,
            DType::U2 => 25,
            DType::I2 => 26,
        }
    }

    /// The type with this [number](Self::onnx).
    pub fn from_onnx(number: i64) -> Option<DType> {
        Self::ALL.into_iter().find(|d| d.onnx() == number)
    }

    /// The least and the greatest value, which are infinite for floats of at least 16 bits, and for powers of two.
    pub const fn range(self) -> (f64, f64) {
        match self {
            DType::I64 => (i64::MIN as f64, i64::MAX as f64),
            DType::I32 => (i32::MIN as f64, i32::MAX as f64),
            DType::I16 => (i16::MIN as f64, i16::MAX as f64),
            DType::I8 => (i8::MIN as f64, i8::MAX as f64),
            DType::U64 => (0.0, u64::MAX as f64),
            DType::U32 => (0.0, u32::MAX as f64),
            DType::U16 => (0.0, u16::MAX as f64),
            DType::U8 => (u8::MIN as f64, u8::MAX as f64),
            DType::Bool => (0.0, 1.0),
            DType::I4 => (-8.0, 7.0),
            DType::U4 => (0.0, 15.0),
            DType::I2 => (-2.0, 1.0),
            DType::U2 => (0.0, 3.0),
            DType::F8E4M3FN => (-448.0, 448.0),
            DType::F8E4M3FNUZ => (-240.0, 240.0),
            DType::F8E5M2 | DType::F8E5M2FNUZ => (-57344.0, 57344.0),
            DType::F4E2M1 => (-6.0, 6.0),
            _ => (f64::NEG_INFINITY, f64::INFINITY),
        }
    }

    /// True for floats that are computed with, of at least 16 bits; [`is_real`](Self::is_real) has those of fewer, too.
    pub const fn is_float(self) -> bool {
        matches!(self, DType::F32 | DType::F16 | DType::BF16 | DType::F64)
    }

    /// True for floating-point types of two bytes.
    pub const fn is_half(self) -> bool {
        matches!(self, DType::F16 | DType::BF16)
    }

    /// The type that arithmetic is done in: one that has all values of a small integer type, else the type itself.
    pub const fn wide(self) -> DType {
        match self {
            DType::U8 | DType::I8 | DType::U16 | DType::I16 => DType::I32,
            DType::U32 => DType::I64,
            other => other,
        }
    }

    /// The type that sums, counts and places are computed in beside values of this type: halves are stored, but not computed with.
    pub const fn unhalved(self) -> DType {
        if self.is_half() { DType::F32 } else { self }
    }

    /// True for integers that are computed in a [wider](Self::wide) type.
    pub const fn is_small_int(self) -> bool {
        matches!(self, DType::U8 | DType::I8 | DType::U16 | DType::I16 | DType::U32)
    }

    /// True for integers of one byte.
    pub const fn is_byte(self) -> bool {
        matches!(self, DType::U8 | DType::I8)
    }

    /// True for floats of any number of bits.
    pub const fn is_real(self) -> bool {
        self.is_float() || self.is_narrow_float()
    }

    /// True for integers of any number of bits; `bool` is not one.
    pub const fn is_whole(self) -> bool {
        self.is_int() || self.is_narrow() && !self.is_narrow_float()
    }

    /// True for floats and integers that are computed with.
    pub const fn is_number(self) -> bool {
        self.is_float() || self.is_int()
    }

    /// True for integers that are computed with, of at least 8 bits; [`is_whole`](Self::is_whole) has those of fewer, too. `bool` is none.
    pub const fn is_int(self) -> bool {
        matches!(self, DType::I64 | DType::I32 | DType::I16 | DType::I8) || self.is_unsigned()
    }

    /// True for integer types without negative values.
    pub const fn is_unsigned(self) -> bool {
        matches!(self, DType::U64 | DType::U32 | DType::U16 | DType::U8)
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
