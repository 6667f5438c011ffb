//! Updates that are copied to the places that indices choose. What they cost is independent of the data's size.

use super::block::Repr;
use super::nest::{Motion, Nest};
use super::operands::stored;
use super::shares::Shares;
use super::task::{Args, Compiled, Needs, Scratch};
use plimsoll_core::kernel::{Kernel, Template};

/// A compiled scatter.
///
/// Rows are the index space without the axis along which indices may be the same, and without the elements that are copied at once. A row's
/// updates are copied in order, by one task, so that the last one for a place stays.
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
    /// Bytes of an element.
    size: usize,
    /// The elements that are copied at once.
    shares: Shares,
}

/// The launch's arguments. The data is the result.
const INDICES: usize = 1;
const UPDATES: usize = 2;
const RESULT: usize = 3;

impl Scatter {
    pub fn new(kernel: &Kernel, threads: usize) -> Result<Scatter, String> {
        let &Template::Scatter { axis, stride, extent, .. } = &kernel.template else {
            return Err(format!("a scatter of template '{}'", kernel.template.name()));
        };
        let [indices, updates] = [INDICES, UPDATES].map(|i| &kernel.reads[i]);
        let (repr, size) = (stored(indices)?, stored(updates)?.size());
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
        let shares = Shares::new(nest.len(), run, 4096, ns, threads);
        let (extent, stride) = (extent as i64, stride * dense);
        Ok(Scatter { nest, count, index_step, update_step, wide: repr == Repr::I64, extent, stride, size, shares })
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
        let items = self.shares.of(task);
        let (index, at) = (&mut scratch.index[..self.nest.rank()], &mut scratch.at[..3]);
        let mut row = self.shares.row(items.start);
        self.nest.seek(row, index, at);
        for item in items {
            if self.shares.row(item) != row {
                row += 1;
                self.nest.advance(index, at);
            }
            let elements = self.shares.elements(item);
            let (start, bytes) = ((elements.start * self.size) as isize, elements.len() * self.size);
            for k in 0..self.count as isize {
                // SAFETY: operands were checked to span their memory when the launch was recorded, and the result all places inside.
                unsafe {
                    let chosen = args.at(INDICES, at[1] + k * self.index_step);
                    let Some(place) = self.place(chosen) else { continue };
                    let from = args.at(UPDATES, at[2] + k * self.update_step + start).cast_const();
                    args.at(RESULT, at[0] + place * self.stride + start).copy_from_nonoverlapping(from, bytes);
                }
            }
        }
    }
}
