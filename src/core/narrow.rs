//! Elements of at most 8 bits as numbers: integers of less than 8 bits, and floats of an exponent and a mantissa.

use crate::dtype::DType;

/// How numbers become floats of at most 8 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rounding {
    /// True if numbers beyond the largest become the largest; else they become infinite, or no number.
    pub saturate: bool,
    /// Of powers of two: the next one to take.
    pub power: Power,
}

impl Default for Rounding {
    fn default() -> Rounding {
        Rounding { saturate: true, power: Power::Up }
    }
}

/// The power of two for a number between two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Power {
    Up,
    Down,
    /// Of two as near, the larger one.
    Nearest,
}

/// The layout of a float: a sign, an exponent, a mantissa.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Bits of the exponent.
    pub exponent: u32,
    /// Bits of the mantissa.
    pub mantissa: u32,
    /// What the exponent is larger by.
    pub bias: i32,
    /// The code of the largest number, without a sign.
    pub most: u32,
    /// The code of what is no number, with its sign if there is one such code alone; `None` if all codes are numbers.
    pub nan: Option<u32>,
    /// The code of infinity, without a sign.
    pub infinity: Option<u32>,
    /// True if zero has no sign: the code of its negative is no number.
    pub one_zero: bool,
}

impl Layout {
    /// The layout of a type; `None` for integers, and for powers of two, which have an exponent alone.
    pub fn of(dtype: DType) -> Option<Layout> {
        let of = |[exponent, mantissa, bias, most]: [u32; 4], nan, infinity, one_zero| {
            Some(Layout { exponent, mantissa, bias: bias as i32, most, nan, infinity, one_zero })
        };
        match dtype {
            DType::F8E4M3FN => of([4, 3, 7, 0x7e], Some(0x7f), None, false),
            DType::F8E4M3FNUZ => of([4, 3, 8, 0x7f], Some(0x80), None, true),
            DType::F8E5M2 => of([5, 2, 15, 0x7b], Some(0x7e), Some(0x7c), false),
            DType::F8E5M2FNUZ => of([5, 2, 16, 0x7f], Some(0x80), None, true),
            DType::F4E2M1 => of([2, 1, 1, 7], None, None, false),
            _ => None,
        }
    }

    /// The code for what is no number. A type without one has the negative zero, as in ONNX's tests.
    pub fn not_a_number(&self) -> u32 {
        self.nan.unwrap_or(1 << self.sign())
    }

    /// The code for a number beyond the largest, without a sign.
    pub fn beyond(&self, rounding: Rounding) -> u32 {
        let largest = if rounding.saturate { Some(self.most) } else { self.infinity.or(self.nan) };
        largest.unwrap_or(self.most)
    }

    /// The bit of the sign.
    pub fn sign(&self) -> u32 {
        self.exponent + self.mantissa
    }
}

/// The code of a power of two that is no number.
pub const NO_POWER: u32 = 0xff;

/// The number of an element, as memory holds it.
pub fn decode(dtype: DType, held: u8) -> f64 {
    let code = u32::from(held);
    let Some(layout) = Layout::of(dtype) else {
        return match dtype {
            DType::F8E8M0 if code == NO_POWER => f64::NAN,
            DType::F8E8M0 => f64::powi(2.0, code as i32 - 127),
            _ if dtype.held() == DType::I8 => f64::from(held as i8),
            _ => f64::from(held),
        };
    };
    let sign = code >> layout.sign() & 1;
    let size = code & ((1 << layout.sign()) - 1);
    let is_nan = match layout.infinity {
        Some(infinity) => size > infinity,
        None if layout.one_zero => Some(code) == layout.nan,
        None => Some(size) == layout.nan,
    };
    let value = if is_nan {
        f64::NAN
    } else if Some(size) == layout.infinity {
        f64::INFINITY
    } else {
        let (power, part) = ((size >> layout.mantissa) as i32, size & ((1 << layout.mantissa) - 1));
        let whole = if power > 0 { part + (1 << layout.mantissa) } else { part };
        f64::from(whole) * f64::powi(2.0, power.max(1) - layout.bias - layout.mantissa as i32)
    };
    if sign == 1 { -value } else { value }
}

/// The element for a number, as memory holds it.
pub fn encode(dtype: DType, value: f64, rounding: Rounding) -> u8 {
    let Some(layout) = Layout::of(dtype) else {
        if dtype == DType::F8E8M0 {
            return power_of_two(value.abs(), rounding) as u8;
        }
        let (least, most) = dtype.range();
        return (value.trunc().clamp(least, most) as i64) as u8;
    };
    let size = value.abs();
    let least = 1 - layout.bias;
    let code = if value.is_nan() {
        layout.not_a_number()
    } else if size == 0.0 {
        0
    } else {
        // The exponent of a double; those without one are smaller than all numbers of few bits.
        let power = ((size.to_bits() >> 52) as i32 - 1023).max(least);
        let whole = (size / f64::powi(2.0, power - layout.mantissa as i32)).round_ties_even();
        let code = if size.is_finite() { f64::from((power - least) << layout.mantissa) + whole } else { f64::INFINITY };
        match code <= f64::from(layout.most) {
            true => code as u32,
            false => layout.beyond(rounding),
        }
    };
    let signed = value.is_sign_negative() && !(layout.one_zero && (code == 0 || Some(code) == layout.nan));
    (code | u32::from(signed) << layout.sign()) as u8
}

/// The code of a power of two near a number without a sign.
fn power_of_two(size: f64, Rounding { saturate, power }: Rounding) -> u32 {
    let least = f64::powi(2.0, -127);
    if size.is_nan() || !saturate && (size < least || size.is_infinite()) {
        return NO_POWER;
    }
    if size <= least {
        return 0;
    }
    let below = ((size.to_bits() >> 52) as i64 - 1023).min(1023);
    let part = size / f64::powi(2.0, below as i32);
    let more = match power {
        Power::Up => part > 1.0,
        Power::Down => false,
        Power::Nearest => part >= 1.5,
    };
    let code = below + i64::from(more) + 127;
    match code < i64::from(NO_POWER) {
        true => code.max(0) as u32,
        false if saturate => NO_POWER - 1,
        false => NO_POWER,
    }
}

/// Elements of less than 8 bits, each in a byte of its own, as files have them: several in a byte, the first in its lowest bits.
pub fn pack(dtype: DType, held: &[u8]) -> Vec<u8> {
    let bits = dtype.bits();
    let byte = |elements: &[u8]| {
        let of = |(place, element): (usize, &u8)| (element & (u8::MAX >> (8 - bits))) << (place * bits);
        elements.iter().enumerate().map(of).fold(0, |byte, element| byte | element)
    };
    held.chunks(8 / bits).map(byte).collect()
}

/// The reverse of [`pack`].
pub fn unpack(dtype: DType, packed: &[u8], count: usize) -> Vec<u8> {
    let bits = dtype.bits();
    let element = |at: usize| {
        let above = packed[at * bits / 8] << (8 - bits - at * bits % 8);
        // The sign is the highest bit.
        if dtype.held() == DType::I8 { (above as i8 >> (8 - bits)) as u8 } else { above >> (8 - bits) }
    };
    (0..count).map(element).collect()
}

/// The nearest number that a narrow type has.
pub fn round(dtype: DType, value: f64, rounding: Rounding) -> f64 {
    decode(dtype, encode(dtype, value, rounding))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every code is the one of its own number, and the number between two is rounded to the even one.
    #[test]
    fn codes_are_those_of_their_numbers() {
        for dtype in DType::ALL.into_iter().filter(|dtype| dtype.is_narrow()) {
            let count = 1u32 << dtype.bits();
            let held = |code: u32| match dtype.held() {
                DType::I8 if code >= count / 2 => (code as u8) | !(count - 1) as u8,
                _ => code as u8,
            };
            for code in 0..count {
                let value = decode(dtype, held(code));
                let back = encode(dtype, value, Rounding { saturate: false, ..Rounding::default() });
                match value.is_nan() {
                    true => assert!(decode(dtype, back).is_nan(), "{dtype} {code:#x}"),
                    false => assert_eq!(back, held(code), "{dtype} {code:#x} is {value}"),
                }
            }
            let held: Vec<u8> = (0..count).map(held).collect();
            for odd in [0, 1] {
                let held = &held[odd..];
                assert_eq!(unpack(dtype, &pack(dtype, held), held.len()), held, "{dtype}");
            }
            let Some(layout) = Layout::of(dtype) else { continue };
            for code in 0..layout.most {
                let [low, high] = [code, code + 1].map(|code| decode(dtype, code as u8));
                let even = code + (code & 1);
                assert_eq!(u32::from(encode(dtype, (low + high) / 2.0, Rounding::default())), even, "{dtype} {code}");
            }
        }
    }

    #[test]
    fn what_is_too_large_is_the_largest_or_no_number() {
        let hard = Rounding { saturate: false, ..Rounding::default() };
        for (dtype, most, over) in [
            (DType::F8E4M3FN, 448.0, f64::NAN),
            (DType::F8E4M3FNUZ, 240.0, f64::NAN),
            (DType::F8E5M2, 57344.0, f64::INFINITY),
            (DType::F8E5M2FNUZ, 57344.0, f64::NAN),
        ] {
            for large in [most * 1.5, f64::INFINITY] {
                assert_eq!(round(dtype, large, Rounding::default()), most, "{dtype}");
                assert_eq!(round(dtype, -large, Rounding::default()), -most, "{dtype}");
                let found = round(dtype, large, hard);
                assert!(found == over || found.is_nan() && over.is_nan(), "{dtype}: {found}");
            }
            assert!(round(dtype, f64::NAN, Rounding::default()).is_nan());
        }
        assert_eq!(round(DType::F4E2M1, 100.0, hard), 6.0);
        let power = |value, power| round(DType::F8E8M0, value, Rounding { saturate: true, power });
        assert_eq!([Power::Up, Power::Down, Power::Nearest].map(|p| power(5.0, p)), [8.0, 4.0, 4.0]);
        assert_eq!([0.0, f64::INFINITY].map(|v| power(v, Power::Up)), [f64::powi(2.0, -127), f64::powi(2.0, 127)]);
        assert!(round(DType::F8E8M0, 0.0, hard).is_nan());
    }
}
