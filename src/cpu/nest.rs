//! Loop nests: an index space and the positions of several operands in it, reduced to few axes.

use plimsoll_core::kernel::Operand;

/// A loop nest over an index space. Every axis has one step per operand, in bytes or in indices.
#[derive(Clone, Debug)]
pub struct Nest {
    /// Extents, outermost first; none is 1, and any of them may be 0.
    pub dims: Vec<usize>,
    /// `steps[axis][operand]`.
    pub steps: Vec<Vec<isize>>,
    /// The position of each operand at index zero.
    pub start: Vec<isize>,
}

/// The motion of one operand over an index space: a step per axis, and where it starts.
#[derive(Clone, Debug)]
pub struct Motion {
    /// One step per axis.
    pub steps: Vec<isize>,
    /// Position at index zero.
    pub start: isize,
}

impl Motion {
    /// In bytes, along the given axes of an access.
    pub fn bytes(operand: &Operand, axes: std::ops::Range<usize>) -> Motion {
        let size = operand.dtype.size() as isize;
        Motion {
            steps: operand.access.strides[axes].iter().map(|s| s * size).collect(),
            start: operand.access.offset * size,
        }
    }

    /// The index along `axis` itself.
    pub fn index(axis: usize, rank: usize) -> Motion {
        let mut steps = vec![0; rank];
        steps[axis] = 1;
        Motion { steps, start: 0 }
    }

    /// Does not move.
    pub fn still(rank: usize) -> Motion {
        Motion { steps: vec![0; rank], start: 0 }
    }
}

impl Nest {
    /// Drops axes of extent 1 and joins neighbours that act as one for every operand. With `order`, axes are first sorted by how far
    /// they move that operand, so that the innermost loop moves it least.
    pub fn new(dims: &[usize], motions: &[Motion], order: Option<usize>) -> Nest {
        let mut axes: Vec<usize> = (0..dims.len()).filter(|&k| dims[k] != 1).collect();
        if let Some(by) = order {
            axes.sort_by_key(|&k| std::cmp::Reverse(motions[by].steps[k].unsigned_abs()));
        }
        let mut nest = Nest { dims: Vec::new(), steps: Vec::new(), start: motions.iter().map(|m| m.start).collect() };
        for k in axes {
            let steps: Vec<isize> = motions.iter().map(|m| m.steps[k]).collect();
            match (nest.dims.last_mut(), nest.steps.last_mut()) {
                (Some(dim), Some(last))
                    if last
                        .iter()
                        .zip(&steps)
                        .all(|(&outer, &inner)| Some(outer) == inner.checked_mul(dims[k] as isize)) =>
                {
                    *dim *= dims[k];
                    *last = steps;
                }
                _ => {
                    nest.dims.push(dims[k]);
                    nest.steps.push(steps);
                }
            }
        }
        nest
    }

    /// Number of axes.
    pub fn rank(&self) -> usize {
        self.dims.len()
    }

    /// Number of indices.
    pub fn len(&self) -> usize {
        self.dims.iter().product()
    }

    /// Takes the innermost axis off: its extent and steps. A nest without axes has one of extent 1.
    pub fn split_inner(&mut self) -> (usize, Vec<isize>) {
        match (self.dims.pop(), self.steps.pop()) {
            (Some(dim), Some(steps)) => (dim, steps),
            _ => (1, vec![0; self.start.len()]),
        }
    }

    /// True if the operand's elements of `size` bytes follow one another without gaps in the nest's order.
    pub fn is_dense(&self, operand: usize, size: usize) -> bool {
        let mut expected = size as isize;
        for (dim, steps) in self.dims.iter().zip(&self.steps).rev() {
            if steps[operand] != expected {
                return false;
            }
            expected = expected.saturating_mul(*dim as isize);
        }
        true
    }

    /// True if the operand never moves.
    pub fn is_still(&self, operand: usize) -> bool {
        self.steps.iter().all(|s| s[operand] == 0)
    }

    /// Sets `index` and `at` (one slot per operand) to the nest's index number `linear`; in a nest without indices, to where it starts.
    pub fn seek(&self, mut linear: usize, index: &mut [usize], at: &mut [isize]) {
        at.copy_from_slice(&self.start);
        for k in (0..self.rank()).rev() {
            let dim = self.dims[k].max(1);
            let i = linear % dim;
            linear /= dim;
            index[k] = i;
            for (at, step) in at.iter_mut().zip(&self.steps[k]) {
                *at += i as isize * step;
            }
        }
    }

    /// Moves on by one index; after the last one, back to the first.
    pub fn advance(&self, index: &mut [usize], at: &mut [isize]) {
        for k in (0..self.rank()).rev() {
            index[k] += 1;
            if index[k] < self.dims[k] {
                for (at, step) in at.iter_mut().zip(&self.steps[k]) {
                    *at += step;
                }
                return;
            }
            index[k] = 0;
            for (at, step) in at.iter_mut().zip(&self.steps[k]) {
                *at -= (self.dims[k] as isize - 1) * step;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_join_where_all_operands_agree() {
        let motion = |steps: &[isize]| Motion { steps: steps.to_vec(), start: 8 };
        let nest = Nest::new(&[2, 1, 3, 4], &[motion(&[48, 0, 16, 4]), motion(&[0, 9, 16, 4])], None);
        assert_eq!((nest.dims.clone(), nest.steps.clone()), (vec![2, 12], vec![vec![48, 0], vec![4, 4]]));
        let nest = Nest::new(&[3, 2], &[motion(&[4, 12]), motion(&[4, 12])], Some(1));
        assert_eq!((nest.dims, nest.steps), (vec![6], vec![vec![4, 4]]));
    }

    #[test]
    fn seeking_and_advancing_agree() {
        let nest =
            Nest { dims: vec![2, 3, 2], steps: vec![vec![100, -7], vec![10, 0], vec![1, 3]], start: vec![5, 50] };
        let (mut index, mut at) = ([0; 3], [0; 2]);
        nest.seek(0, &mut index, &mut at);
        for linear in 0..=nest.len() {
            let (mut index2, mut at2) = ([0; 3], [0; 2]);
            nest.seek(linear % nest.len(), &mut index2, &mut at2);
            assert_eq!((index, at), (index2, at2), "{linear}");
            nest.advance(&mut index, &mut at);
        }
    }
}
