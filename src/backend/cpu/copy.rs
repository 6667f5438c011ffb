//! Kernels that only move elements.

use super::map::stored;
use super::moves;
use super::nest::{Motion, Nest};
use super::{Args, Compiled, Needs, Scratch, share};
use crate::kernel::{Kernel, Template};

/// Copies one operand to another access of the same type.
pub struct Copy {
    /// Without the axes that are moved at once.
    nest: Nest,
    size: usize,
    /// The innermost axis: dense in the destination, this step in the source.
    inner: usize,
    from_step: isize,
    /// The axis that is dense in the source, when the innermost is not: extent and step in the destination.
    turned: Option<(usize, isize)>,
    /// How much of the axis that is cut (the turned one, else the innermost) makes one item of work.
    piece: usize,
    items: usize,
    tasks: usize,
}

impl Copy {
    /// The kernel as a copy, if it is one that this file knows to do well.
    pub fn new(kernel: &Kernel, threads: usize) -> Result<Option<Copy>, String> {
        let ([from], [to]) = (&kernel.reads[..], &kernel.writes[..]) else { return Ok(None) };
        if kernel.template != Template::Map || !kernel.body.is_identity() || from.dtype != to.dtype {
            return Ok(None);
        }
        let (rank, size) = (kernel.shape.len(), stored(from)?.size());
        let mut nest = Nest::new(&kernel.shape, &[Motion::bytes(from, 0..rank), Motion::bytes(to, 0..rank)], Some(1));
        let len = nest.len();
        let (inner, steps) = nest.split_inner();
        if inner > 1 && steps[1] != size as isize {
            return Ok(None);
        }
        let (mut turned, mut ns) = (None, 0.1 * size as f64);
        if inner > 1 && steps[0] != size as isize {
            let axis = (0..nest.rank()).find(|&k| nest.steps[k][0] == size as isize);
            ns = 1.0;
            if let Some(k) = axis.filter(|_| steps[0] != 0) {
                let steps = nest.steps.remove(k);
                turned = Some((nest.dims.remove(k), steps[1]));
            }
        }
        let tasks = share(len as f64 * ns, threads);
        let rows = nest.len();
        let cut = turned.map_or(inner, |(extent, _)| extent);
        let unit = if turned.is_some() { 32 } else { 4096 };
        let piece =
            if rows >= 2 * tasks { cut } else { cut.div_ceil(unit).div_ceil(tasks.div_ceil(rows.max(1))) * unit };
        let items = if len == 0 { 0 } else { rows * cut.div_ceil(piece.max(1)) };
        let tasks = tasks.min(items);
        Ok(Some(Copy { nest, size, inner, from_step: steps[0], turned, piece, items, tasks }))
    }
}

impl Compiled for Copy {
    fn needs(&self) -> Needs {
        Needs { rank: self.nest.rank(), motions: 2, ..Needs::default() }
    }

    fn tasks(&self, _: usize) -> usize {
        self.tasks
    }

    unsafe fn run(&self, _: usize, task: usize, args: &Args, scratch: &mut Scratch) {
        let items = self.items * task / self.tasks..self.items * (task + 1) / self.tasks;
        let (index, at) = (&mut scratch.index[..self.nest.rank()], &mut scratch.at[..2]);
        let cut = self.turned.map_or(self.inner, |(extent, _)| extent);
        let pieces = cut.div_ceil(self.piece);
        self.nest.seek(items.start / pieces, index, at);
        for item in items {
            let start = item % pieces * self.piece;
            let n = self.piece.min(cut - start);
            let (from, to) = (args.at(0, at[0]).cast_const(), args.at(1, at[1]));
            // SAFETY: both operands were checked to span their memory when the launch was recorded; one that is the other already holds
            // the result.
            unsafe {
                if std::ptr::eq(from, to) {
                } else if let Some((_, to_step)) = self.turned {
                    let to = to.offset(start as isize * to_step);
                    moves::turn(self.size, self.inner, n, from.add(start * self.size), self.from_step, to, to_step);
                } else {
                    let from = from.offset(start as isize * self.from_step);
                    moves::gather(self.size, n, from, self.from_step, to.add(start * self.size));
                }
            }
            if start + n == cut {
                self.nest.advance(index, at);
            }
        }
    }
}
