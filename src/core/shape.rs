//! Shapes, and accesses: affine maps from an index to an element of a buffer.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::ops::{Deref, DerefMut, RangeInclusive};

/// Extents of a tensor, outermost first. Named dims are bound before a shape exists.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Shape(Vec<usize>);

impl Shape {
    /// The shape with these extents. No extents is a scalar.
    pub fn new(dims: impl Into<Vec<usize>>) -> Shape {
        Shape(dims.into())
    }

    /// Number of elements, or `None` when it exceeds `isize::MAX`.
    pub fn checked_len(&self) -> Option<usize> {
        let len = self.0.iter().try_fold(1u128, |n, &d| n.checked_mul(d as u128))?;
        (len <= isize::MAX as u128).then_some(len as usize)
    }

    /// Number of elements.
    ///
    /// # Panics
    /// When it exceeds `isize::MAX`: a graph admits no such shape.
    pub fn numel(&self) -> usize {
        self.checked_len().expect("a shape in a graph has a countable number of elements")
    }

    /// The shape that all of `shapes` broadcast to (NumPy's rules), if there is one.
    pub fn broadcast<'a>(shapes: impl IntoIterator<Item = &'a Shape>) -> Option<Shape> {
        let mut out: Vec<usize> = Vec::new();
        for s in shapes {
            if s.len() > out.len() {
                out.splice(0..0, std::iter::repeat_n(1, s.len() - out.len()));
            }
            let skip = out.len() - s.len();
            for (o, &d) in out[skip..].iter_mut().zip(s.iter()) {
                match (*o, d) {
                    (a, b) if a == b => {}
                    (1, b) => *o = b,
                    (_, 1) => {}
                    _ => return None,
                }
            }
        }
        Some(Shape(out))
    }

    /// Row-major strides, in elements.
    pub fn strides(&self) -> Vec<isize> {
        let mut strides = vec![1isize; self.len()];
        for i in (1..self.len()).rev() {
            strides[i - 1] = strides[i].saturating_mul(self[i] as isize);
        }
        strides
    }

    /// The index of a row-major element.
    pub fn index_of(&self, mut at: usize) -> Vec<usize> {
        let mut index = vec![0; self.len()];
        for (index, &extent) in index.iter_mut().zip(self.iter()).rev() {
            (*index, at) = (at % extent.max(1), at / extent.max(1));
        }
        index
    }

    /// The axis that ONNX's `axis` names; a negative one counts from the end. `None` if there is no such axis.
    pub fn axis(&self, axis: i64) -> Option<usize> {
        let rank = self.len() as i64;
        let axis = if axis < 0 { axis + rank } else { axis };
        (0..rank).contains(&axis).then_some(axis as usize)
    }
}

impl Deref for Shape {
    type Target = Vec<usize>;
    fn deref(&self) -> &Vec<usize> {
        &self.0
    }
}

impl DerefMut for Shape {
    fn deref_mut(&mut self) -> &mut Vec<usize> {
        &mut self.0
    }
}

impl<T: Into<Vec<usize>>> From<T> for Shape {
    fn from(dims: T) -> Shape {
        Shape(dims.into())
    }
}

impl FromIterator<usize> for Shape {
    fn from_iter<I: IntoIterator<Item = usize>>(dims: I) -> Shape {
        Shape(dims.into_iter().collect())
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "[")?;
        for (i, d) in self.0.iter().enumerate() {
            write!(f, "{}{d}", if i > 0 { "," } else { "" })?;
        }
        write!(f, "]")
    }
}

/// The value of a named dim: one extent, or an inclusive range. Planning refuses an empty range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    least: usize,
    most: usize,
}

impl Extent {
    /// The smallest extent.
    pub fn least(self) -> usize {
        self.least
    }

    /// The largest extent.
    pub fn most(self) -> usize {
        self.most
    }

    /// The extent, if it is a single one.
    pub fn fixed(self) -> Option<usize> {
        (self.least == self.most).then_some(self.least)
    }
}

impl From<usize> for Extent {
    fn from(extent: usize) -> Extent {
        Extent { least: extent, most: extent }
    }
}

impl From<RangeInclusive<usize>> for Extent {
    fn from(range: RangeInclusive<usize>) -> Extent {
        let (least, most) = range.into_inner();
        Extent { least, most }
    }
}

impl fmt::Display for Extent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.fixed() {
            Some(extent) => write!(f, "{extent}"),
            None => write!(f, "{}..{}", self.least, self.most),
        }
    }
}

/// Where the elements of a tensor are in a buffer: element `i` is at `offset + sum(i[k] * strides[k])`, in elements.
///
/// A broadcast axis has the stride 0, a reversed one a negative stride. A view is a new access and costs nothing.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Access {
    /// The extents of the index space.
    pub shape: Shape,
    /// One stride per axis, in elements.
    pub strides: Vec<isize>,
    /// The element that index zero reads.
    pub offset: isize,
}

impl Access {
    /// Row-major, from the buffer's first element.
    pub fn contiguous(shape: Shape) -> Access {
        Access { strides: shape.strides(), shape, offset: 0 }
    }

    /// The access of `[n, c, spatial..]` with channels innermost, from the buffer's first element.
    pub fn channels_last(shape: Shape) -> Access {
        let rank = shape.len();
        let order = channels_last(rank);
        let stored = Access::contiguous(order.iter().map(|&axis| shape[axis]).collect());
        let mut strides = vec![0; rank];
        order.iter().zip(&stored.strides).for_each(|(&axis, &stride)| strides[axis] = stride);
        Access { shape, strides, offset: 0 }
    }

    /// True if each image of `[n, c, spatial..]` has no gaps and channels are innermost.
    pub fn has_channels_last(&self) -> bool {
        self.shape.len() > 1 && self.permute(&channels_last(self.shape.len())[1..]).is_contiguous()
    }

    /// True if each plane of `[n, c, spatial..]` has no gaps. There may be gaps between planes.
    pub fn has_dense_planes(&self) -> bool {
        let planes: Vec<usize> = (2..self.shape.len()).collect();
        let outer = |k: &usize| self.shape[*k] == 1 || self.strides[*k] >= 0;
        self.shape.len() > 2 && self.permute(&planes).is_contiguous() && [0, 1].iter().all(outer)
    }

    /// True if only the index along `axis` selects the element, and neighbours are adjacent.
    pub fn moves_only_along(&self, axis: usize) -> bool {
        let expected = |k: usize| isize::from(k == axis);
        (0..self.shape.len()).all(|k| self.shape[k] == 1 || self.strides[k] == expected(k))
    }

    /// True if elements can be read `width` at a time along an axis: each such run is contiguous and starts at a
    /// multiple of `width` from the buffer's start.
    pub fn is_vectorizable(&self, axis: usize, width: usize) -> bool {
        let step = |k: usize| k == axis || self.shape[k] == 1 || self.strides[k].unsigned_abs().is_multiple_of(width);
        self.strides[axis] == 1
            && self.shape[axis].is_multiple_of(width)
            && self.offset.unsigned_abs().is_multiple_of(width)
            && (0..self.shape.len()).all(step)
    }

    /// True if elements are in row-major order without gaps, from any offset.
    pub fn is_contiguous(&self) -> bool {
        let mut expected = 1isize;
        for (&d, &s) in self.shape.iter().zip(&self.strides).rev() {
            if d != 1 && s != expected {
                return self.shape.contains(&0);
            }
            expected = expected.saturating_mul(d as isize);
        }
        true
    }

    /// The access broadcast to `shape` (which [`Shape::broadcast`] allows).
    pub fn broadcast(&self, shape: &Shape) -> Access {
        let skip = shape.len() - self.shape.len();
        let mut strides = vec![0; shape.len()];
        for (k, &s) in self.strides.iter().enumerate() {
            strides[skip + k] = if self.shape[k] == shape[skip + k] { s } else { 0 };
        }
        Access { shape: shape.clone(), strides, offset: self.offset }
    }

    /// Axis `k` of the result is axis `axes[k]` of `self`.
    pub fn permute(&self, axes: &[usize]) -> Access {
        Access {
            shape: axes.iter().map(|&a| self.shape[a]).collect(),
            strides: axes.iter().map(|&a| self.strides[a]).collect(),
            offset: self.offset,
        }
    }

    /// Takes `len` elements along `axis` from `start`, `step` apart. `step` may be negative.
    pub fn slice(&self, axis: usize, start: usize, step: isize, len: usize) -> Access {
        let mut out = self.clone();
        if len > 0 {
            out.offset += start as isize * self.strides[axis];
        }
        out.shape[axis] = len;
        out.strides[axis] *= step;
        out
    }

    /// The same elements in the same order under another shape. `None` if strides cannot express it.
    pub fn reshape(&self, shape: &Shape) -> Option<Access> {
        if shape.contains(&0) {
            return Some(Access { strides: shape.strides(), shape: shape.clone(), offset: self.offset });
        }
        // Runs of axes that behave as one: (extent, stride of the innermost).
        let mut runs: Vec<(usize, isize)> = Vec::new();
        for (&d, &s) in self.shape.iter().zip(&self.strides) {
            if d == 1 {
                continue;
            }
            match runs.last_mut() {
                Some((extent, stride)) if *stride == s * d as isize => {
                    *extent *= d;
                    *stride = s;
                }
                _ => runs.push((d, s)),
            }
        }
        let mut strides = vec![0isize; shape.len()];
        let mut runs = runs.into_iter().rev();
        let mut run = runs.next();
        for k in (0..shape.len()).rev() {
            let d = shape[k];
            if d == 1 {
                continue;
            }
            let (extent, stride) = run?;
            if extent % d != 0 {
                return None;
            }
            strides[k] = stride;
            run = if extent == d { runs.next() } else { Some((extent / d, stride * d as isize)) };
        }
        run.is_none().then(|| Access { shape: shape.clone(), strides, offset: self.offset })
    }

    /// The element that `index` reads.
    pub fn at(&self, index: &[usize]) -> isize {
        self.offset + index.iter().zip(&self.strides).map(|(&i, &s)| i as isize * s).sum::<isize>()
    }

    /// The element at the index of this number in row-major order.
    pub fn element(&self, mut number: usize) -> isize {
        let mut element = self.offset;
        for (&extent, &stride) in self.shape.iter().zip(&self.strides).rev() {
            element += (number % extent) as isize * stride;
            number /= extent;
        }
        element
    }

    /// The lowest and the highest element that is read. `None` for an empty index space.
    pub fn span(&self) -> Option<(isize, isize)> {
        if self.shape.contains(&0) {
            return None;
        }
        let (mut low, mut high) = (self.offset, self.offset);
        for (&d, &s) in self.shape.iter().zip(&self.strides) {
            let reach = isize::try_from(d).ok()?.checked_sub(1)?.checked_mul(s)?;
            if reach < 0 { low = low.checked_add(reach)? } else { high = high.checked_add(reach)? }
        }
        Some((low, high))
    }

    /// The position of every element, in row-major order of the index space.
    pub fn elements(&self) -> impl Iterator<Item = isize> {
        let mut next = vec![0; self.shape.len()];
        (0..self.shape.numel()).map(move |_| {
            let element = self.at(&next);
            advance(&mut next, &self.shape);
            element
        })
    }
}

/// The axes of `[n, c, spatial..]` from the outermost inwards when channels come last.
pub fn channels_last(rank: usize) -> Vec<usize> {
    (0..rank.min(1)).chain(2..rank).chain(1..rank.min(2)).collect()
}

/// The greatest common divisor. Of 0 and `b` it is `b`.
pub fn gcd(a: u64, b: u64) -> u64 {
    if a == 0 { b } else { gcd(b % a, a) }
}

/// Advances a row-major index to the next element of `shape`. After the last it is the first again.
pub fn advance(index: &mut [usize], shape: &[usize]) {
    for (i, &d) in index.iter_mut().zip(shape).rev() {
        *i += 1;
        if *i < d {
            return;
        }
        *i = 0;
    }
}

/// Every index of a shape, in row-major order.
pub fn indices(shape: &[usize]) -> impl Iterator<Item = Vec<usize>> {
    let mut next = vec![0; shape.len()];
    (0..shape.iter().product()).map(move |_| {
        let index = next.clone();
        advance(&mut next, shape);
        index
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn elements(a: &Access) -> Vec<isize> {
        a.elements().collect()
    }

    #[test]
    fn reshape_keeps_the_order_or_refuses() {
        let a = Access::contiguous(Shape::new([2, 3, 4]));
        assert_eq!(elements(&a.reshape(&Shape::new([6, 4])).expect("contiguous")), (0..24).collect::<Vec<_>>());
        let t = a.permute(&[0, 2, 1]);
        assert!(t.reshape(&Shape::new([2, 12])).is_none());
        let split = t.reshape(&Shape::new([2, 2, 2, 3])).expect("splitting an axis is a view");
        assert_eq!(elements(&split), elements(&t));
        let every_other = a.slice(2, 0, 2, 2);
        assert_eq!(elements(&every_other.reshape(&Shape::new([12])).expect("even steps")), elements(&every_other));
        assert!(a.slice(2, 0, 1, 3).reshape(&Shape::new([18])).is_none());
        assert!(!t.is_contiguous() && a.is_contiguous());
    }

    #[test]
    fn broadcast_follows_numpy() {
        let s = |d: &[usize]| Shape::new(d);
        assert_eq!(Shape::broadcast([&s(&[3, 1]), &s(&[2])]), Some(s(&[3, 2])));
        assert_eq!(Shape::broadcast([&s(&[0]), &s(&[1])]), Some(s(&[0])));
        assert_eq!(Shape::broadcast([&s(&[3]), &s(&[2])]), None);
        let b = Access::contiguous(s(&[3, 1])).broadcast(&s(&[2, 3, 2]));
        assert_eq!(elements(&b), [0, 0, 1, 1, 2, 2, 0, 0, 1, 1, 2, 2]);
    }
}
