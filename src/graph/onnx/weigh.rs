//! The memory that the messages of a file take, from their bytes alone: a file is weighed before it is decoded.
//!
//! A message of two bytes can become a struct of several hundred. [`fits`] counts as the decoder allocates: a vector has room for four
//! elements at first, and twice as many each time it is full.

use bytes::Bytes;
use std::mem::size_of;

/// The memory that every file may take while it is read, and more for each of its bytes.
const FREE: u64 = 64 << 20;
const PER_BYTE: u64 = 4;
/// Packed numbers may take so many more for each of their bytes: one of a byte becomes eight, in a list with room for twice as many.
const PER_PACKED_BYTE: u64 = 16;
/// The overhead of an allocation.
pub const HEADER: u64 = 16;
/// The deepest nesting of messages; the decoder refuses it, too.
const MAX_DEPTH: usize = 100;

/// The bytes that reading a file of so many bytes may take, if it has no packed numbers.
pub fn most(bytes: usize) -> u64 {
    FREE + PER_BYTE.saturating_mul(bytes as u64)
}

/// Why a file is refused that would take more than [`most`] says.
pub fn refusal(bytes: usize) -> String {
    format!(
        "reading it would take more than {} MiB, the limit: {} MiB and {PER_BYTE} times its size. It has very many, very small parts",
        most(bytes) >> 20,
        FREE >> 20
    )
}

/// True if the messages of a model take at most `most` bytes, without those of its raw data, and what packed numbers may take beside that.
/// Counting ends where they take more.
pub fn fits<M: Weigh>(message: &[u8], most: u64) -> bool {
    let mut meter = Meter { bytes: 0, most, depth: 0 };
    M::weigh(message, &mut meter);
    meter.bytes <= meter.most
}

/// The bytes that were counted.
pub struct Meter {
    bytes: u64,
    most: u64,
    depth: usize,
}

/// The value of a field.
#[derive(Clone, Copy)]
pub enum Wire<'a> {
    Number,
    Bytes(&'a [u8]),
}

/// A message that can be weighed.
pub trait Weigh: Sized {
    /// Adds what the fields of a message take, beside the struct itself.
    fn weigh(body: &[u8], meter: &mut Meter);
}

/// A type that a field has in its struct.
pub trait Field: Sized {
    /// True if its values may be packed.
    const IS_NUMBER: bool = false;

    /// Adds what one more value takes beside its struct. `before` counts the values that the field had.
    fn add(number: u32, value: Wire, before: &mut u64, meter: &mut Meter);

    /// The number of elements in a value of a repeated field: numbers may be packed.
    fn elements(_value: Wire) -> u64 {
        1
    }
}

impl Meter {
    fn add(&mut self, bytes: u64) {
        self.bytes = self.bytes.saturating_add(bytes);
    }
}

/// Bytes of a vector's elements after so many were pushed, one by one.
pub fn capacity(elements: u64, size: u64) -> u64 {
    let first = if size > 1024 { 1 } else { 4 };
    if elements == 0 { 0 } else { HEADER + elements.max(first).next_power_of_two().saturating_mul(size) }
}

macro_rules! numbers {
    ($($type:ty: $count:expr;)*) => {$(
        impl Field for $type {
            const IS_NUMBER: bool = true;

            fn add(_: u32, _: Wire, _: &mut u64, _: &mut Meter) {}

            fn elements(value: Wire) -> u64 {
                let count: fn(&[u8]) -> usize = $count;
                if let Wire::Bytes(packed) = value { count(packed) as u64 } else { 1 }
            }
        }
    )*};
}

/// In a varint, every byte but the last has its highest bit set.
fn varints(packed: &[u8]) -> usize {
    packed.iter().filter(|&&byte| byte < 0x80).count()
}

numbers! {
    i32: varints;
    i64: varints;
    u64: varints;
    f32: |packed| packed.len() / 4;
    f64: |packed| packed.len() / 8;
}

impl Field for String {
    fn add(_: u32, value: Wire, _: &mut u64, meter: &mut Meter) {
        if let Wire::Bytes(text) = value
            && !text.is_empty()
        {
            meter.add(HEADER + text.len() as u64);
        }
    }
}

/// A part of the mapped file.
impl Field for Bytes {
    fn add(_: u32, _: Wire, _: &mut u64, _: &mut Meter) {}
}

impl<T: Field> Field for Vec<T> {
    fn add(number: u32, value: Wire, before: &mut u64, meter: &mut Meter) {
        let (had, size) = (*before, size_of::<T>() as u64);
        *before += T::elements(value);
        if let (true, Wire::Bytes(packed)) = (T::IS_NUMBER, value) {
            meter.most = meter.most.saturating_add(PER_PACKED_BYTE.saturating_mul(packed.len() as u64));
        }
        meter.add(capacity(*before, size) - capacity(had, size));
        T::add(number, value, &mut 0, meter);
    }
}

impl<T: Field> Field for Option<T> {
    fn add(number: u32, value: Wire, before: &mut u64, meter: &mut Meter) {
        T::add(number, value, before, meter);
    }
}

impl<T: Field> Field for Box<T> {
    fn add(number: u32, value: Wire, before: &mut u64, meter: &mut Meter) {
        meter.add(HEADER + size_of::<T>() as u64);
        T::add(number, value, before, meter);
    }
}

/// The numbers between quotes in the attributes of a field, as bits.
pub const fn tags(attributes: &str) -> u32 {
    let (text, mut at, mut quoted, mut number, mut tags) = (attributes.as_bytes(), 0, false, 0, 0);
    while at < text.len() {
        let digit = text[at].wrapping_sub(b'0');
        if quoted && digit < 10 {
            number = 10 * number + digit as u32;
        } else if number > 0 {
            tags |= 1 << number;
            number = 0;
        }
        quoted ^= text[at] == b'"';
        at += 1;
    }
    tags
}

/// Calls `take` with each field of a message, and stops where the bytes are no message: the decoder refuses them.
pub fn fields(mut rest: &[u8], meter: &mut Meter, mut take: impl FnMut(u32, Wire, &mut Meter)) {
    let mut groups = 0;
    meter.depth += 1;
    while meter.bytes <= meter.most && meter.depth <= MAX_DEPTH {
        let Some(key) = varint(&mut rest) else { break };
        let number = u32::try_from(key >> 3).unwrap_or(0);
        let length = match key & 7 {
            0 => varint(&mut rest).map(|_| None),
            1 => Some(Some(8)),
            2 => varint(&mut rest).map(Some),
            3 => {
                groups += 1;
                continue;
            }
            4 => {
                groups -= 1;
                continue;
            }
            5 => Some(Some(4)),
            _ => None,
        };
        let Some(length) = length else { break };
        let Some((body, behind)) = rest.split_at_checked(usize::try_from(length.unwrap_or(0)).unwrap_or(usize::MAX))
        else {
            break;
        };
        rest = behind;
        if groups == 0 {
            take(number, if key & 7 == 2 { Wire::Bytes(body) } else { Wire::Number }, meter);
        }
    }
    meter.depth -= 1;
}

fn varint(rest: &mut &[u8]) -> Option<u64> {
    let mut value = 0;
    for at in 0..10 {
        let (&byte, behind) = rest.split_first()?;
        *rest = behind;
        value |= u64::from(byte & 0x7f) << (7 * at);
        if byte < 0x80 {
            return Some(value);
        }
    }
    None
}
