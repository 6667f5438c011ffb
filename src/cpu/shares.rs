//! How the work of a kernel is cut, and shared among threads.

use std::ops::Range;

/// Rows of elements, cut into items, which tasks share.
#[derive(Clone, Copy, Debug)]
pub struct Shares {
    /// Elements of a row.
    len: usize,
    /// Elements of an item, but for the last of a row.
    pub piece: usize,
    pub items: usize,
    pub tasks: usize,
}

impl Shares {
    /// Shares `rows` of `len` elements that take `ns` nanoseconds in all. Rows are cut, at multiples of `unit`, when there are too few of
    /// them to go round.
    pub fn new(rows: usize, len: usize, unit: usize, ns: f64, threads: usize) -> Shares {
        let tasks = tasks(ns, threads);
        let pieces = tasks.div_ceil(rows.max(1));
        let piece = if rows >= 2 * tasks { len } else { len.div_ceil(unit).div_ceil(pieces) * unit };
        Shares::of_pieces(rows, len, piece, ns, threads)
    }

    /// The same, with items of `piece` elements.
    pub fn of_pieces(rows: usize, len: usize, piece: usize, ns: f64, threads: usize) -> Shares {
        let piece = piece.max(1);
        let items = rows * len.div_ceil(piece);
        Shares { len, piece, items, tasks: tasks(ns, threads).min(items) }
    }

    /// The items of a task.
    pub fn of(&self, task: usize) -> Range<usize> {
        portion(self.items, task, self.tasks)
    }

    /// The row of an item.
    pub fn row(&self, item: usize) -> usize {
        item / self.len.div_ceil(self.piece)
    }

    /// The elements of an item.
    pub fn elements(&self, item: usize) -> Range<usize> {
        let first = item % self.len.div_ceil(self.piece) * self.piece;
        first..self.len.min(first + self.piece)
    }
}

/// The share of `items` that one of some tasks gets.
pub fn portion(items: usize, task: usize, tasks: usize) -> Range<usize> {
    items * task / tasks..items * (task + 1) / tasks
}

/// How many tasks to make of `ns` nanoseconds of work: one when sharing would cost more than it gains.
fn tasks(ns: f64, threads: usize) -> usize {
    const WORTH: f64 = 30e3;
    const TASK: f64 = 8e3;
    if threads < 2 || ns < WORTH { 1 } else { ((ns / TASK) as usize).clamp(threads, 4 * threads) }
}
