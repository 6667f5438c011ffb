//! Updates that are copied to the places that indices choose, or join what is there. What they cost is independent of the data's size.

use super::block::Repr;
use super::nest::{Motion, Nest};
use super::operands::stored;
use super::shares::Shares;
use super::task::{Args, Compiled, Needs, Scratch, walk};
use half::{bf16, f16};
use plimsoll_core::kernel::{Kernel, Reduction, Template};

/// A compiled scatter.
///
/// Rows are the index space without the axis along which indices may be the same, and without the elements that are copied at once. A row's
/// updates are taken in order, by one task, so that the last one for a place stays, and sums are the same in every run.
pub struct Scatter {
    /// The result, the indices, the updates.
    nest: Nest,
    /// Updates of a row, and the steps from one to the next of its index and of its elements.
    count: usize,
    index_step: isize,
    update_step: isize,
    /// True if indices are `i64`; else they are `i32`.
    wide: bool,
    extent: i64,
    /// Bytes from one place to the next.
    stride: isize,
    /// An element.
    repr: Repr,
    /// How an update joins the element at its place.
    join: Option<Reduction>,
    /// The elements that are copied at once.
    shares: Shares,
}

/// The launch's arguments. The data is the result.
const INDICES: usize = 1;
const UPDATES: usize = 2;
const RESULT: usize = 3;

impl Scatter {
    pub fn new(kernel: &Kernel, threads: usize) -> Result<Scatter, String> {
        let &Template::Scatter { axis, stride, extent, join, .. } = &kernel.template else {
            return Err(format!("a scatter of template '{}'", kernel.template.name()));
        };
        let [indices, updates] = [INDICES, UPDATES].map(|i| &kernel.reads[i]);
        let (repr, element) = (stored(indices)?, stored(updates)?);
        let size = element.size();
        if !matches!(repr, Repr::I64 | Repr::I32) {
            return Err(format!("indices of type {}", indices.dtype));
        }
        let rank = kernel.shape.len();
        let mut motions = [&kernel.writes[0], indices, updates].map(|o| Motion::bytes(o, 0..rank));
        let [_, index_step, update_step] = [0, 1, 2].map(|k| std::mem::take(&mut motions[k].steps[axis]));
        let mut shape = kernel.shape.clone();
        let count = std::mem::replace(&mut shape[axis], 1);
        let mut nest = Nest::new(&shape, &motions, Some(0));
        let dense = size as isize;
        let run = match nest.steps.last() {
            Some(steps) if steps[..] == [dense, 0, dense] => nest.split_inner().0,
            _ => 1,
        };
        let ns = (nest.len() * count) as f64 * (2.0 + 0.1 * (run * size) as f64);
        // Many updates of short rows are shared by their elements: each thread reads all indices, and whole lines of the cache.
        let unit = if join.is_some() { run.div_ceil(threads.max(1)).next_multiple_of(16).min(4096) } else { 4096 };
        let shares = Shares::new(nest.len(), run, unit, ns, threads);
        let (extent, stride) = (extent as i64, stride * dense);
        let wide = repr == Repr::I64;
        Ok(Scatter { nest, count, index_step, update_step, wide, extent, stride, repr: element, join, shares })
    }

    /// The place that an index chooses, if it is inside.
    ///
    /// # Safety
    /// `index` must be readable.
    #[inline(always)]
    unsafe fn place(&self, index: *const u8) -> Option<isize> {
        // SAFETY: guaranteed by the caller.
        let i = unsafe {
            if self.wide {
                index.cast::<i64>().read_unaligned()
            } else {
                i64::from(index.cast::<i32>().read_unaligned())
            }
        };
        let i = if i < 0 { i.wrapping_add(self.extent) } else { i };
        (0..self.extent).contains(&i).then_some(i as isize)
    }
}

impl Compiled for Scatter {
    fn needs(&self) -> Needs {
        Needs { rank: self.nest.rank(), motions: 3, ..Needs::default() }
    }

    fn tasks(&self, _: usize) -> usize {
        self.shares.tasks
    }

    unsafe fn run(&self, _: usize, task: usize, args: &Args, scratch: &mut Scratch) {
        walk(&self.nest, &self.shares, task, scratch, |at, elements| {
            let size = self.repr.size();
            let (start, bytes) = ((elements.start * size) as isize, elements.len() * size);
            for k in 0..self.count as isize {
                // SAFETY: operands were checked to span their memory when the launch was recorded, and the result all places inside.
                unsafe {
                    let chosen = args.at(INDICES, at[1] + k * self.index_step);
                    let Some(place) = self.place(chosen) else { continue };
                    let from = args.at(UPDATES, at[2] + k * self.update_step + start).cast_const();
                    let to = args.at(RESULT, at[0] + place * self.stride + start);
                    match self.join {
                        None => to.copy_from_nonoverlapping(from, bytes),
                        Some(join) => with_number!(self.repr, T => joined::<T>(join, from, to, elements.len())),
                    }
                }
            }
        });
    }
}

/// A type of elements that are added and compared.
pub trait Number: Copy {
    const ZERO: Self;
    fn add(self, other: Self) -> Self;
    fn multiply(self, other: Self) -> Self;
    /// The larger of two, or what is not a number.
    fn most(self, other: Self) -> Self;
    fn least(self, other: Self) -> Self;

    /// # Safety
    /// `at` must be readable.
    #[inline(always)]
    unsafe fn load(at: *const u8) -> Self {
        // SAFETY: guaranteed by the caller.
        unsafe { at.cast::<Self>().read_unaligned() }
    }

    /// # Safety
    /// `at` must be writable.
    #[inline(always)]
    unsafe fn store(self, at: *mut u8) {
        // SAFETY: guaranteed by the caller.
        unsafe { at.cast::<Self>().write_unaligned(self) }
    }
}

macro_rules! integers {
    ($($T:ty),*) => {$(
        impl Number for $T {
            const ZERO: $T = 0;
            #[inline(always)]
            fn add(self, other: $T) -> $T {
                self.wrapping_add(other)
            }
            #[inline(always)]
            fn multiply(self, other: $T) -> $T {
                self.wrapping_mul(other)
            }
            #[inline(always)]
            fn most(self, other: $T) -> $T {
                self.max(other)
            }
            #[inline(always)]
            fn least(self, other: $T) -> $T {
                self.min(other)
            }
        }
    )*};
}
integers!(i64, i32, i16, i8, u64, u32, u16, u8);

macro_rules! floats {
    ($($T:ty, $zero:expr);*) => {$(
        impl Number for $T {
            const ZERO: $T = $zero;
            #[inline(always)]
            fn add(self, other: $T) -> $T {
                self + other
            }
            #[inline(always)]
            fn multiply(self, other: $T) -> $T {
                self * other
            }
            #[inline(always)]
            fn most(self, other: $T) -> $T {
                if self > other || self.is_nan() { self } else { other }
            }
            #[inline(always)]
            fn least(self, other: $T) -> $T {
                if self < other || self.is_nan() { self } else { other }
            }
        }
    )*};
}
floats!(f32, 0.0; f64, 0.0; f16, f16::ZERO; bf16, bf16::ZERO);

/// Runs code for the type of a representation.
macro_rules! with_number {
    ($repr:expr, $T:ident => $code:expr) => {{
        use super::block::Repr;
        macro_rules! of {
            ($of:ty) => {{
                type $T = $of;
                $code
            }};
        }
        match $repr {
            Repr::F32 => of!(f32),
            Repr::F64 => of!(f64),
            Repr::F16 => of!(half::f16),
            Repr::BF16 => of!(half::bf16),
            Repr::I64 => of!(i64),
            Repr::I32 => of!(i32),
            Repr::I16 => of!(i16),
            Repr::I8 => of!(i8),
            Repr::U64 => of!(u64),
            Repr::U32 => of!(u32),
            Repr::U16 => of!(u16),
            Repr::U8 | Repr::Bool => of!(u8),
        }
    }};
}
pub(crate) use with_number;

/// Updates that join the elements at `to`.
///
/// # Safety
/// Both must lead to `len` elements.
unsafe fn joined<T: Number>(join: Reduction, from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        match join {
            Reduction::Sum => joined_by(T::add, from, to, len),
            Reduction::Prod => joined_by(T::multiply, from, to, len),
            Reduction::Max => joined_by(T::most, from, to, len),
            Reduction::Min => joined_by(T::least, from, to, len),
        }
    }
}

/// The same by a function.
///
/// # Safety
/// As for [`joined`].
#[inline(always)]
unsafe fn joined_by<T: Number>(combine: impl Fn(T, T) -> T, from: *const u8, to: *mut u8, len: usize) {
    for i in 0..len {
        // SAFETY: guaranteed by the caller.
        unsafe {
            let at = to.add(i * size_of::<T>());
            combine(T::load(at), T::load(from.add(i * size_of::<T>()))).store(at);
        }
    }
}
