//! Names for positions in the lists of a plan, so that a buffer is never taken for a kernel.

use super::{Buffer, Segment, Step};
use crate::kernel::Kernel;
use plimsoll_backend::{KernelId, SegmentId};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;
use std::ops::{Index, IndexMut};

/// An element of a list that an index of this type looks up. A list of plain values has one per index.
pub trait Per<I> {}

impl<I> Per<I> for bool {}
impl<I> Per<I> for u32 {}
impl<I> Per<I> for u64 {}
impl<I> Per<I> for usize {}
impl<I> Per<I> for i128 {}
impl<I, A, B> Per<I> for (A, B) {}
impl<I, T> Per<I> for Option<T> {}
impl<I, T> Per<I> for Vec<T> {}
impl<I, K, V> Per<I> for BTreeMap<K, V> {}

macro_rules! look_up {
    ($index:ident, $list:ty) => {
        impl<T: Per<$index>> Index<$index> for $list {
            type Output = T;
            fn index(&self, index: $index) -> &T {
                &self[index.index()]
            }
        }

        impl<T: Per<$index>> IndexMut<$index> for $list {
            fn index_mut(&mut self, index: $index) -> &mut T {
                &mut self[index.index()]
            }
        }
    };
}

macro_rules! indices {
    ($($(#[$doc:meta])* $name:ident)*) => { $(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(u32);

        impl $name {
            /// The index of a position. Positions are below 2^32.
            #[allow(clippy::missing_panics_doc)]
            pub fn new(position: usize) -> Self {
                Self(u32::try_from(position).expect("a position is below 2^32"))
            }

            /// The position in the list.
            pub fn index(self) -> usize {
                self.0 as usize
            }

            /// The indices of a list, in order.
            pub fn all<T: Per<Self>>(list: &[T]) -> impl DoubleEndedIterator<Item = Self> + ExactSizeIterator + Clone + use<T> {
                (0..list.len()).map(Self::new)
            }

            /// The elements of a list with their indices.
            pub fn enumerate<T: Per<Self>>(list: &[T]) -> impl Iterator<Item = (Self, &T)> + Clone {
                Self::all(list).zip(list)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }

        look_up!($name, [T]);
        look_up!($name, Vec<T>);
    )* };
}

indices! {
    /// A position in [`Plan::segments`](super::Plan::segments).
    SegmentIdx
    /// A position in [`Program::buffers`](super::Program::buffers).
    BufferIdx
    /// A position in [`Program::kernels`](super::Program::kernels).
    KernelIdx
    /// A position in [`Program::steps`](super::Program::steps).
    StepIdx
}

impl Per<SegmentIdx> for Segment {}
impl Per<BufferIdx> for Buffer {}
impl Per<BufferIdx> for BufferIdx {}
impl Per<KernelIdx> for Kernel {}
impl Per<KernelIdx> for String {}
// What a device has for each.
impl Per<SegmentIdx> for SegmentId {}
impl Per<KernelIdx> for KernelId {}
impl Per<StepIdx> for Step {}

/// The first byte of a buffer: a segment, and the bytes before it there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Spot {
    /// The segment.
    pub segment: SegmentIdx,
    /// Bytes from the segment's start.
    pub offset: u64,
}
