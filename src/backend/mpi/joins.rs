//! How elements are joined: by operations of MPI, or by functions that it calls.

use super::library::{Handle, Join, abi};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use plimsoll_core::dtype::DType;
use plimsoll_core::kernel::Reduction;
use std::ffi::c_void;
use std::slice;

/// The type that MPI knows elements by when they are joined.
pub(super) fn kind(dtype: DType) -> Option<Handle> {
    Some(match dtype {
        DType::F32 => abi::FLOAT,
        DType::F64 => abi::DOUBLE,
        DType::I8 => abi::INT8,
        DType::I16 => abi::INT16,
        DType::I32 => abi::INT32,
        DType::I64 => abi::INT64,
        DType::U8 | DType::Bool => abi::UINT8,
        DType::U16 | DType::F16 | DType::BF16 => abi::UINT16,
        DType::U32 => abi::UINT32,
        DType::U64 => abi::UINT64,
        _ => return None,
    })
}

/// The operation of MPI. A sum of truths is their maximum.
pub(super) fn operation(dtype: DType, by: Reduction) -> Handle {
    match by {
        Reduction::Sum if dtype == DType::Bool => abi::MAX,
        Reduction::Sum => abi::SUM,
        Reduction::Max => abi::MAX,
        Reduction::Min => abi::MIN,
        Reduction::Prod => abi::PROD,
    }
}

/// Functions for MPI, each of which hands elements of a type to the one that joins them.
macro_rules! joins {
    ($($dtype:ident $ty:ident $by:ident $all:ident,)*) => {[$({
        unsafe extern "C" fn join(read: *const c_void, both: *mut c_void, count: *const i64, _: *const Handle) {
            // SAFETY: MPI joins elements of this type alone by this function: so many in both places, which are disjoint and aligned.
            let (read, both) = unsafe {
                let count = *count as usize;
                (slice::from_raw_parts(read.cast::<$ty>(), count), slice::from_raw_parts_mut(both.cast::<$ty>(), count))
            };
            $all(read, both, Reduction::$by);
        }
        (DType::$dtype, Reduction::$by, join as Join)
    }),*]};
}

/// What joins the elements that MPI does not, or not so that all ranks get the same.
pub(super) const JOINS: [(DType, Reduction, Join); 12] = joins![
    F16 f16 Sum halves, F16 f16 Max halves, F16 f16 Min halves, F16 f16 Prod halves,
    BF16 bf16 Sum halves, BF16 bf16 Max halves, BF16 bf16 Min halves, BF16 bf16 Prod halves,
    F32 f32 Max singles, F32 f32 Min singles, F64 f64 Max doubles, F64 f64 Min doubles,
];

/// Joins elements with those in the second place.
fn doubles(read: &[f64], both: &mut [f64], by: Reduction) {
    both.iter_mut().zip(read).for_each(|(both, read)| *both = by.combine(*both, *read));
}

/// As [`doubles`].
fn singles(read: &[f32], both: &mut [f32], by: Reduction) {
    both.iter_mut().zip(read).for_each(|(both, read)| *both = by.combine((*both).into(), (*read).into()) as f32);
}

/// As [`doubles`]. That results are rounded to `f32` first changes none, except subnormal products.
fn halves<T>(read: &[T], both: &mut [T], by: Reduction)
where
    [T]: HalfFloatSliceExt,
{
    const BLOCK: usize = 256;
    let (mut values, mut more) = ([0.0; BLOCK], [0.0; BLOCK]);
    for (read, both) in read.chunks(BLOCK).zip(both.chunks_mut(BLOCK)) {
        let (values, more) = (&mut values[..read.len()], &mut more[..read.len()]);
        both.convert_to_f32_slice(values);
        read.convert_to_f32_slice(more);
        singles(more, values, by);
        both.convert_from_f32_slice(values);
    }
}
