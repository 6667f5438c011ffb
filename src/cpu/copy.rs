//! Kernels that only move elements.

use super::moves;
use super::nest::{Motion, Nest};
use super::operands::stored;
use super::shares::Shares;
use super::task::{Args, Compiled, Needs, Scratch, walk};
use plimsoll_core::kernel::{Kernel, Template};

/// Copies one operand to another access of the same type.
pub struct Copy {
    /// Without the axes that are moved at once.
    nest: Nest,
    size: usize,
    /// The innermost axis: dense in the destination, this step in the source.
    inner: usize,
    from_step: isize,
    /// Step in the destination of the axis that is dense in the source, when the innermost is not: the two are transposed.
    transposed: Option<isize>,
    /// Of the transposed axis, else of the innermost.
    shares: Shares,
}

impl Copy {
    /// The kernel as a copy, if it is one that moves whole runs of elements.
    pub fn new(kernel: &Kernel, threads: usize) -> Result<Option<Copy>, String> {
        let ([from], [to]) = (&kernel.reads[..], &kernel.writes[..]) else { return Ok(None) };
        if kernel.template != Template::Map || !kernel.body.is_identity() || from.dtype != to.dtype {
            return Ok(None);
        }
        let (rank, size) = (kernel.shape.len(), stored(from)?.size());
        let mut nest = Nest::new(&kernel.shape, &[Motion::bytes(from, 0..rank), Motion::bytes(to, 0..rank)], Some(1));
        let len = nest.len() as f64;
        let (inner, steps) = nest.split_inner();
        if inner > 1 && steps[1] != size as isize {
            return Ok(None);
        }
        let strided = inner > 1 && steps[0] != size as isize;
        let axis = (0..nest.rank()).find(|&k| strided && steps[0] != 0 && nest.steps[k][0] == size as isize);
        let (cut, transposed) = match axis {
            Some(k) => (nest.dims.remove(k), Some(nest.steps.remove(k)[1])),
            None => (inner, None),
        };
        let unit = if transposed.is_some() { 32 } else { 4096 };
        let ns = len * if strided { 1.0 } else { 0.1 * size as f64 };
        let shares = Shares::new(nest.len(), cut, unit, ns, threads);
        Ok(Some(Copy { nest, size, inner, from_step: steps[0], transposed, shares }))
    }
}

impl Compiled for Copy {
    fn needs(&self) -> Needs {
        Needs { rank: self.nest.rank(), motions: 2, ..Needs::default() }
    }

    fn tasks(&self, _: usize) -> usize {
        self.shares.tasks
    }

    unsafe fn run(&self, _: usize, task: usize, args: &Args, scratch: &mut Scratch) {
        walk(&self.nest, &self.shares, task, scratch, |at, elements| {
            let (start, n) = (elements.start, elements.len());
            let (from, to) = (args.at(0, at[0]).cast_const(), args.at(1, at[1]));
            // A source that is the destination holds the result.
            if std::ptr::eq(from, to) {
                return;
            }
            // SAFETY: both operands were checked to span their memory when the launch was recorded.
            unsafe {
                if let Some(to_step) = self.transposed {
                    let to = (to.offset(start as isize * to_step), to_step);
                    moves::transpose(self.size, self.inner, n, (from.add(start * self.size), self.from_step), to);
                } else {
                    let from = from.offset(start as isize * self.from_step);
                    moves::gather(self.size, n, from, self.from_step, to.add(start * self.size));
                }
            }
        });
    }
}
