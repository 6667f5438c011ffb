//! Sums of the elements up to each. Rows are shared among threads; along a row each sum follows from the one before it.

use super::block::Repr;
use super::nest::{Motion, Nest};
use super::operands::stored;
use super::scatter::{Number, with_number};
use super::shares::Shares;
use super::task::{Args, Compiled, Needs, Scratch, walk};
use plimsoll_core::kernel::{Kernel, Template};

/// A compiled scan. Rows are the index space without its axis, and without the elements that lie side by side.
pub struct Scan {
    /// The data, the sums.
    nest: Nest,
    repr: Repr,
    /// Elements of a row, and the bytes from one to the next of the data and of the sums.
    count: usize,
    steps: [isize; 2],
    exclusive: bool,
    reverse: bool,
    /// The elements that are added at once.
    shares: Shares,
}

impl Scan {
    pub fn new(kernel: &Kernel, threads: usize) -> Result<Scan, String> {
        let &Template::Scan { axis, exclusive, reverse } = &kernel.template else {
            return Err(format!("a scan of template '{}'", kernel.template.name()));
        };
        let repr = stored(&kernel.reads[0])?;
        let rank = kernel.shape.len();
        let mut motions = [&kernel.reads[0], &kernel.writes[0]].map(|o| Motion::bytes(o, 0..rank));
        let steps = [0, 1].map(|k| std::mem::take(&mut motions[k].steps[axis]));
        let mut shape = kernel.shape.clone();
        let count = std::mem::replace(&mut shape[axis], 1);
        let mut nest = Nest::new(&shape, &motions, Some(1));
        let dense = repr.size() as isize;
        let run = match nest.steps.last() {
            Some(steps) if steps[..] == [dense; 2] => nest.split_inner().0,
            _ => 1,
        };
        let each = if run == 1 { 1.2 } else { 0.3 };
        let ns = (nest.len() * run * count) as f64 * each;
        let shares = Shares::new(nest.len(), run, 256, ns, threads);
        Ok(Scan { nest, repr, count, steps, exclusive, reverse, shares })
    }

    /// The sums of `len` neighbouring elements along a row, from the one at `from` and `to` on.
    ///
    /// # Safety
    /// Both must lead to `count` elements along the row, `len` of them side by side.
    unsafe fn row<T: Number>(&self, from: *const u8, to: *mut u8, len: usize) {
        let last = self.count as isize - 1;
        let at = |k: isize, operand: usize| if self.reverse { last - k } else { k } * self.steps[operand];
        let size = size_of::<T>();
        // SAFETY: guaranteed by the caller; `k` is below `count` and `i` below `len`.
        unsafe {
            if len == 1 {
                let mut sum = T::ZERO;
                for k in 0..=last {
                    let value = T::load(from.offset(at(k, 0)));
                    let next = sum.add(value);
                    (if self.exclusive { sum } else { next }).store(to.offset(at(k, 1)));
                    sum = next;
                }
                return;
            }
            for k in 0..=last {
                let to_row = to.offset(at(k, 1));
                let added = if self.exclusive { k - 1 } else { k };
                for i in 0..len {
                    let before = if k == 0 { T::ZERO } else { T::load(to.offset(at(k - 1, 1)).add(i * size)) };
                    let value = if added < 0 { T::ZERO } else { T::load(from.offset(at(added, 0)).add(i * size)) };
                    before.add(value).store(to_row.add(i * size));
                }
            }
        }
    }
}

impl Compiled for Scan {
    fn needs(&self) -> Needs {
        Needs { rank: self.nest.rank(), motions: 2, ..Needs::default() }
    }

    fn tasks(&self, _: usize) -> usize {
        self.shares.tasks
    }

    unsafe fn run(&self, _: usize, task: usize, args: &Args, scratch: &mut Scratch) {
        walk(&self.nest, &self.shares, task, scratch, |at, elements| {
            let start = (elements.start * self.repr.size()) as isize;
            let (from, to) = (args.at(0, at[0] + start).cast_const(), args.at(1, at[1] + start));
            // SAFETY: operands were checked to span their memory when the launch was recorded.
            with_number!(self.repr, T => unsafe { self.row::<T>(from, to, elements.len()) });
        });
    }
}
