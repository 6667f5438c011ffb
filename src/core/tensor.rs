//! Tensors in host memory.

use crate::dtype::DType;
use crate::error::{Error, Result, ensure};
use crate::narrow::{self, Rounding};
use crate::shape::{Access, Shape};
use bytes::Bytes;
use half::{bf16, f16};
use std::borrow::Cow;
use std::ops::Range;

/// A dense row-major array in host memory, little-endian. Cheap to clone; its bytes may lie in a mapped file.
///
/// ```
/// # use plimsoll_core as plimsoll;
/// use plimsoll::{DType, Tensor};
/// let tensor = Tensor::from_f32([2, 2], &[1.0, 2.0, 3.0, 4.0])?;
/// assert_eq!((tensor.dtype(), &tensor.shape()[..]), (DType::F32, &[2, 2][..]));
/// assert_eq!(tensor.to_f64(), [1.0, 2.0, 3.0, 4.0]);
/// assert!(Tensor::from_f32([2, 2], &[1.0]).is_err());
/// # Ok::<(), plimsoll::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    dtype: DType,
    shape: Shape,
    bytes: Bytes,
}

/// Every element of some bytes as `f64`.
pub fn widen(dtype: DType, bytes: &[u8], values: &mut [f64]) {
    fn map<T: bytemuck::AnyBitPattern>(bytes: &[u8], values: &mut [f64], f: impl Fn(T) -> f64) {
        let elements = bytes.chunks_exact(size_of::<T>());
        values.iter_mut().zip(elements).for_each(|(value, c)| *value = f(bytemuck::pod_read_unaligned(c)));
    }
    match dtype {
        DType::F32 => map(bytes, values, |v: f32| v.into()),
        DType::F16 => map(bytes, values, |v: f16| v.to_f64()),
        DType::BF16 => map(bytes, values, |v: bf16| v.to_f64()),
        DType::F64 => map(bytes, values, |v: f64| v),
        DType::I64 => map(bytes, values, |v: i64| v as f64),
        DType::I32 => map(bytes, values, |v: i32| v.into()),
        DType::I16 => map(bytes, values, |v: i16| v.into()),
        DType::I8 => map(bytes, values, |v: i8| v.into()),
        DType::U64 => map(bytes, values, |v: u64| v as f64),
        DType::U32 => map(bytes, values, |v: u32| v.into()),
        DType::U16 => map(bytes, values, |v: u16| v.into()),
        DType::U8 => map(bytes, values, |v: u8| v.into()),
        DType::Bool => map(bytes, values, |v: u8| f64::from(v != 0)),
        narrow => map(bytes, values, |v: u8| narrow::decode(narrow, v)),
    }
}

/// The bytes of values that are rounded to `dtype`. Integers are truncated and saturated.
pub fn narrow(dtype: DType, values: &[f64], bytes: &mut [u8]) {
    fn map<T: bytemuck::NoUninit>(values: &[f64], bytes: &mut [u8], f: impl Fn(f64) -> T) {
        let elements = bytes.chunks_exact_mut(size_of::<T>());
        elements.zip(values).for_each(|(c, &v)| c.copy_from_slice(bytemuck::bytes_of(&f(v))));
    }
    match dtype {
        DType::F32 => map(values, bytes, |v| v as f32),
        DType::F16 => map(values, bytes, f16::from_f64),
        DType::BF16 => map(values, bytes, bf16::from_f64),
        DType::F64 => map(values, bytes, |v| v),
        DType::I64 => map(values, bytes, |v| v as i64),
        DType::I32 => map(values, bytes, |v| v as i32),
        DType::I16 => map(values, bytes, |v| v as i16),
        DType::I8 => map(values, bytes, |v| v as i8),
        DType::U64 => map(values, bytes, |v| v as u64),
        DType::U32 => map(values, bytes, |v| v as u32),
        DType::U16 => map(values, bytes, |v| v as u16),
        DType::U8 => map(values, bytes, |v| v as u8),
        DType::Bool => map(values, bytes, |v| u8::from(v != 0.0)),
        // Infinity stays infinite, if the type has that.
        narrow => map(values, bytes, |v| {
            narrow::encode(narrow, v, Rounding { saturate: v.is_finite(), ..Rounding::default() })
        }),
    }
}

/// Elements of one type as those of another, as [`Tensor::to_f64`] and [`Tensor::from_f64`] have them. It takes no memory for it.
pub fn convert(from: DType, bytes: &[u8], to: DType, out: &mut [u8]) {
    const BLOCK: usize = 64;
    for (bytes, out) in bytes.chunks(BLOCK * from.size()).zip(out.chunks_mut(BLOCK * to.size())) {
        let values = &mut [0.0; BLOCK][..bytes.len() / from.size()];
        widen(from, bytes, values);
        narrow(to, values, out);
    }
}

impl Tensor {
    /// Makes a tensor of bytes. A `bool` is true if its byte is not 0; it is then stored as 1.
    ///
    /// # Errors
    /// The number of bytes is not that of the shape's elements.
    pub fn new(dtype: DType, shape: impl Into<Shape>, bytes: impl Into<Bytes>) -> Result<Tensor> {
        let (shape, bytes) = (shape.into(), bytes.into());
        let expected = shape.checked_len().and_then(|n| n.checked_mul(dtype.size()));
        if expected != Some(bytes.len()) {
            return Err(Error::usage(format!(
                "a tensor {dtype}{shape} takes {} bytes, found {}",
                expected.map_or("too many".into(), |n| n.to_string()),
                bytes.len()
            )));
        }
        let bytes = if dtype == DType::Bool && bytes.iter().any(|&b| b > 1) {
            bytes.iter().map(|&b| u8::from(b != 0)).collect()
        } else {
            bytes
        };
        Ok(Tensor { dtype, shape, bytes })
    }

    /// Makes a tensor of `f32` values.
    ///
    /// # Errors
    /// The number of values is not that of the shape's elements.
    pub fn from_f32(shape: impl Into<Shape>, values: &[f32]) -> Result<Tensor> {
        Tensor::new(DType::F32, shape, bytemuck::cast_slice(values).to_vec())
    }

    /// Makes a tensor of `i64` values.
    ///
    /// # Errors
    /// The number of values is not that of the shape's elements.
    pub fn from_i64(shape: impl Into<Shape>, values: &[i64]) -> Result<Tensor> {
        Tensor::new(DType::I64, shape, bytemuck::cast_slice(values).to_vec())
    }

    /// Makes a tensor of values that are rounded to `dtype`. Integers are truncated and saturated.
    ///
    /// # Panics
    /// The number of values is not that of the shape's elements.
    pub fn from_f64(dtype: DType, shape: impl Into<Shape>, values: &[f64]) -> Tensor {
        let mut bytes = vec![0; values.len() * dtype.size()];
        narrow(dtype, values, &mut bytes);
        Tensor::new(dtype, shape, bytes).expect("as many values as the shape has elements")
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The extents of the axes.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// The elements, row-major and little-endian.
    pub fn bytes(&self) -> &Bytes {
        &self.bytes
    }

    /// A tensor of bytes as files have them, in which elements of less than 8 bits share bytes.
    ///
    /// # Errors
    /// The number of bytes is not that of the shape's elements.
    pub(crate) fn from_file(dtype: DType, shape: Shape, bytes: Bytes) -> Result<Tensor> {
        match (shape.checked_len(), dtype.bits()) {
            (Some(count), bits @ ..8) if bytes.len() == count.div_ceil(8 / bits) => {
                Tensor::new(dtype, shape, narrow::unpack(dtype, &bytes, count))
            }
            _ => Tensor::new(dtype, shape, bytes),
        }
    }

    /// The elements as files have them.
    pub fn in_file(&self) -> Cow<'_, [u8]> {
        match self.dtype.bits() {
            ..8 => Cow::Owned(narrow::pack(self.dtype, &self.bytes)),
            _ => Cow::Borrowed(&self.bytes),
        }
    }

    /// Every element as `f64` (an `i64` beyond 2^53 is rounded).
    pub fn to_f64(&self) -> Vec<f64> {
        let mut values = vec![0.0; self.bytes.len() / self.dtype.size()];
        widen(self.dtype, &self.bytes, &mut values);
        values
    }

    /// Every element as `i64`, exactly, if this is an integer or `bool` tensor and `i64` has all elements.
    pub fn to_i64(&self) -> Option<Vec<i64>> {
        match self.dtype {
            DType::U64 => self.to_integers()?.into_iter().map(|v| v.try_into().ok()).collect(),
            DType::I64 => Some(self.bytes.chunks_exact(8).map(bytemuck::pod_read_unaligned).collect()),
            d if d.is_real() => None,
            _ => Some(self.to_f64().into_iter().map(|v| v as i64).collect()),
        }
    }

    /// Every element as an integer, exactly, if this is an integer or `bool` tensor.
    pub fn to_integers(&self) -> Option<Vec<i128>> {
        if self.dtype == DType::U64 {
            let element = |bytes| i128::from(bytemuck::pod_read_unaligned::<u64>(bytes));
            return Some(self.bytes.chunks_exact(8).map(element).collect());
        }
        Some(self.to_i64()?.into_iter().map(i128::from).collect())
    }

    /// The elements as a device stores them: in the tensor's own type, wide integers as `i32`, 16-bit floats as `f32`. In their own type,
    /// elements of less than 8 bits share bytes, as in files.
    ///
    /// # Errors
    /// A value does not fit into `i32`. `name` is the tensor's name in the message.
    pub fn store(&self, stored: DType, name: &str) -> Result<Cow<'_, [u8]>> {
        if stored == self.dtype && stored.is_packed() {
            return Ok(Cow::Owned(narrow::pack(stored, &self.bytes)));
        }
        if stored == self.dtype.held() {
            return Ok(Cow::Borrowed(&self.bytes));
        }
        if self.dtype.is_narrow() {
            return Ok(Cow::Owned(self.held().store(stored, name)?.into_owned()));
        }
        if let (DType::F16 | DType::BF16, DType::F32) = (self.dtype, stored) {
            let wide = Tensor::from_f64(stored, self.shape.clone(), &self.to_f64());
            return Ok(Cow::Owned(wide.bytes.into()));
        }
        let values = self
            .to_integers()
            .filter(|_| stored == DType::I32)
            .ok_or_else(|| Error::usage(format!("tensor '{name}': {} cannot be stored as {stored}", self.dtype)))?;
        let mut bytes = Vec::with_capacity(values.len() * 4);
        for value in values {
            let narrow = i32::try_from(value).map_err(|_| {
                Error::usage(format!("tensor '{name}': {value} does not fit into i32, which this device computes in"))
            })?;
            bytes.extend_from_slice(&narrow.to_le_bytes());
        }
        Ok(Cow::Owned(bytes))
    }

    /// The reverse of [`store`](Self::store): a tensor of `dtype` from elements that a device stored.
    ///
    /// # Errors
    /// The number of bytes is not that of the shape's elements.
    pub fn load(stored: DType, bytes: Vec<u8>, dtype: DType, shape: Shape) -> Result<Tensor> {
        if stored == dtype && stored.is_packed() {
            let (count, expected) = (shape.numel(), stored.packed_bytes(shape.numel()));
            ensure(bytes.len() == expected, || {
                Error::usage(format!("{dtype}{shape}: expected {expected} bytes, found {}", bytes.len()))
            })?;
            return Tensor::new(dtype, shape, narrow::unpack(dtype, &bytes, count));
        }
        let tensor = Tensor::new(stored, shape, bytes)?;
        if stored == dtype {
            return Ok(tensor);
        }
        if dtype.is_narrow() {
            let held = Tensor::load(stored, tensor.bytes.into(), dtype.held(), tensor.shape)?;
            return Ok(Tensor { dtype, ..held });
        }
        Ok(Tensor::from_f64(dtype, tensor.shape.clone(), &tensor.to_f64()))
    }

    /// The elements as memory holds them: integers of at least 8 bits, if they have fewer.
    pub fn held(&self) -> Tensor {
        Tensor { dtype: self.dtype.held(), ..self.clone() }
    }

    /// The tensor with its axes in reverse order.
    pub fn transposed(&self) -> Tensor {
        let axes: Vec<usize> = (0..self.shape.len()).rev().collect();
        self.gather(&Access::contiguous(self.shape.clone()).permute(&axes))
    }

    /// The elements that `access` reads, row-major. If they are contiguous, the result shares this tensor's bytes.
    ///
    /// # Panics
    /// The access reads outside the tensor.
    pub fn gather(&self, access: &Access) -> Tensor {
        let Tensor { dtype, bytes, .. } = self.gather_range(access, 0..access.shape.numel());
        Tensor { dtype, shape: access.shape.clone(), bytes }
    }

    /// A range of the elements that `access` reads, row-major, as a tensor of one axis. If they are contiguous, the result shares this
    /// tensor's bytes.
    ///
    /// # Panics
    /// The access reads outside the tensor, or the range ends outside the access.
    pub fn gather_range(&self, access: &Access, elements: Range<usize>) -> Tensor {
        let (size, count) = (self.dtype.size(), elements.len());
        assert!(elements.end <= access.shape.numel(), "a range of the elements that the access reads");
        let row = |bytes| Tensor { dtype: self.dtype, shape: Shape::new([count]), bytes };
        if count == 0 {
            return row(Bytes::new());
        }
        if access.is_contiguous() {
            let start = (access.offset as usize + elements.start) * size;
            return row(self.bytes.slice(start..start + count * size));
        }
        let mut bytes = Vec::with_capacity(count * size);
        let (inner, step) = match (access.shape.last(), access.strides.last()) {
            (Some(&d), Some(&s)) => (d, s),
            _ => (1, 1),
        };
        let outer = &access.shape[..access.shape.len().saturating_sub(1)];
        let mut index = vec![0; access.shape.len()];
        let mut rest = elements.start / inner;
        for (index, extent) in index[..outer.len()].iter_mut().zip(outer).rev() {
            *index = rest % extent;
            rest /= extent;
        }
        let mut first = elements.start % inner;
        let mut left = count;
        while left > 0 {
            let run = left.min(inner - first);
            let start = access.at(&index) + first as isize * step;
            if step == 1 {
                let start = start as usize * size;
                bytes.extend_from_slice(&self.bytes[start..start + run * size]);
            } else {
                for i in 0..run as isize {
                    let at = (start + i * step) as usize * size;
                    bytes.extend_from_slice(&self.bytes[at..at + size]);
                }
            }
            crate::shape::advance(&mut index[..outer.len()], outer);
            (first, left) = (0, left - run);
        }
        row(bytes.into())
    }

    /// This tensor as another type of the same kind, floats or integers, if that has every element: `None` if it has not, and for its own type.
    pub fn converted(&self, dtype: DType) -> Option<Tensor> {
        let from = self.dtype;
        if from == dtype || !(from.is_real() && dtype.is_real() || from.is_whole() && dtype.is_whole()) {
            return None;
        }
        let values = self.to_f64();
        // Doubles have all integers up to 2^53.
        let exact = |value: &f64| from.is_real() || value.abs() < (1u64 << 53) as f64;
        let other = Tensor::from_f64(dtype, self.shape.clone(), &values);
        let same = |(a, b): (&f64, &f64)| a == b || a.is_nan() && b.is_nan();
        (values.iter().all(exact) && values.iter().zip(&other.to_f64()).all(same)).then_some(other)
    }

    /// Compares this tensor with an expected one: type and shape equal, every element within `atol + rtol * |expected|`.
    ///
    /// # Errors
    /// A message about the largest difference.
    pub fn compare(&self, expected: &Tensor, rtol: f64, atol: f64) -> Result<(), String> {
        if (self.dtype, &self.shape) != (expected.dtype, &expected.shape) {
            let (e, f) = ((expected.dtype, &expected.shape), (self.dtype, &self.shape));
            return Err(format!("expected {}{}, found {}{}", e.0, e.1, f.0, f.1));
        }
        let mut outside = 0;
        let mut worst = (0.0, 0, 0.0, 0.0);
        for (i, (found, expected)) in self.to_f64().into_iter().zip(expected.to_f64()).enumerate() {
            let same = found == expected || found.is_nan() && expected.is_nan();
            let excess = (found - expected).abs() / (atol + rtol * expected.abs());
            // A NaN on one side only makes the excess NaN, which is not within the tolerance.
            let within = |bound: f64| excess <= bound;
            if !same && !within(1.0) {
                outside += 1;
                if !within(worst.0) {
                    worst = (excess, i, expected, found);
                }
            }
        }
        let (_, at, wanted, found) = worst;
        match outside {
            0 => Ok(()),
            n => Err(format!(
                "{n} of {} elements are outside rtol {rtol}, atol {atol}; worst at {:?}: expected {wanted}, found {found}",
                self.shape.numel(),
                self.shape.index_of(at)
            )),
        }
    }
}
