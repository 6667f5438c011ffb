//! Threads share a product.

use plimsoll_core::kernel::cpu::gemm::{PANEL_COLS, PANEL_ROWS};
use std::ops::Range;

/// How to share a product among threads: a grid of ranges, all of about the same size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    m: usize,
    n: usize,
    row_step: usize,
    col_step: usize,
}

impl Grid {
    /// Cuts `m` by `n` into about `parts` ranges that start at panels. Fewer come out when the matrix is small.
    pub fn new(m: usize, n: usize, parts: usize) -> Grid {
        Grid::best(m, n, parts, false)
    }

    /// The same, but where both are as good, rows are cut.
    pub fn of_rows(m: usize, n: usize, parts: usize) -> Grid {
        Grid::best(m, n, parts, true)
    }

    fn best(m: usize, n: usize, parts: usize, rows_first: bool) -> Grid {
        let parts = parts.max(1);
        let cut = |len: usize, unit: usize, parts: usize| len.div_ceil(unit).div_ceil(parts).max(1) * unit;
        // The cost of a split is the largest piece, in units of what the kernel computes at a time; on a tie, cut columns: both
        // operands of a wide product are read once. Rows are cut where the left operand is the large one.
        let mut best = Grid { m, n, row_step: cut(m, PANEL_ROWS, 1), col_step: cut(n, PANEL_COLS, 1) };
        let mut cost = usize::MAX;
        for row_parts in 1..=parts.min(m.div_ceil(PANEL_ROWS).max(1)) {
            if !parts.is_multiple_of(row_parts) {
                continue;
            }
            let row_step = cut(m, PANEL_ROWS, row_parts);
            let col_step = cut(n, PANEL_COLS, parts / row_parts);
            let piece = row_step.min(m.next_multiple_of(4)) * col_step.min(n.next_multiple_of(PANEL_COLS));
            if piece < cost || rows_first && piece == cost {
                cost = piece;
                best = Grid { m, n, row_step, col_step };
            }
        }
        best
    }

    /// Cuts `m` by `n` into `row_parts` by `col_parts` ranges that start anywhere, for work that is not made of panels.
    pub fn even(m: usize, n: usize, row_parts: usize, col_parts: usize) -> Grid {
        let step = |len: usize, parts: usize| len.div_ceil(parts.max(1)).max(1);
        Grid { m, n, row_step: step(m, row_parts), col_step: step(n, col_parts) }
    }

    /// Number of ranges.
    pub fn len(&self) -> usize {
        self.m.div_ceil(self.row_step) * self.n.div_ceil(self.col_step)
    }

    /// True when the matrix has no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The rows and columns of range `index < len()`.
    pub fn get(&self, index: usize) -> (Range<usize>, Range<usize>) {
        let across = self.n.div_ceil(self.col_step);
        let (row, col) = (index / across * self.row_step, index % across * self.col_step);
        (row..(row + self.row_step).min(self.m), col..(col + self.col_step).min(self.n))
    }
}
