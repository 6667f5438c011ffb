//! Threads share a product.

use plimsoll_core::kernel::cpu::gemm::{PANEL_COLS, PANEL_ROWS, TILE_ROWS};
use std::ops::Range;

/// The time in which an element is copied to a panel, as that of so many multiply-adds with AVX-512. It decides who computes what, never what.
pub const COPIED: usize = 6;
/// The same of one that is computed for a panel.
pub const PRODUCED: usize = 24;

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
        Grid::best(m, n, parts, [0, 0], false)
    }

    /// The same, but where both are as good, rows are cut.
    pub fn of_rows(m: usize, n: usize, parts: usize) -> Grid {
        Grid::best(m, n, parts, [0, 0], true)
    }

    /// The same, where a range brings its part of the left and of the right operand into panels, each element at the cost of so many
    /// products.
    pub fn packing(m: usize, n: usize, parts: usize, costs: [usize; 2]) -> Grid {
        Grid::best(m, n, parts, costs, false)
    }

    fn best(m: usize, n: usize, parts: usize, costs: [usize; 2], rows_first: bool) -> Grid {
        let parts = parts.max(1);
        let cut = |len: usize, unit: usize, parts: usize| len.div_ceil(unit).div_ceil(parts).max(1) * unit;
        // The cost of a split is the largest piece, in units of what the kernel computes at a time, and what it packs: the right operand
        // anew for each tile. On a tie, cut columns: both operands of a wide product are read once. Rows are cut where the left operand is
        // the large one.
        let mut best = Grid { m, n, row_step: cut(m, PANEL_ROWS, 1), col_step: cut(n, PANEL_COLS, 1) };
        let mut cost = usize::MAX;
        for row_parts in 1..=parts.min(m.div_ceil(PANEL_ROWS).max(1)) {
            if !parts.is_multiple_of(row_parts) {
                continue;
            }
            let row_step = cut(m, PANEL_ROWS, row_parts);
            let col_step = cut(n, PANEL_COLS, parts / row_parts);
            let (rows, cols) = (row_step.min(m.next_multiple_of(4)), col_step.min(n.next_multiple_of(PANEL_COLS)));
            let packed = costs[0] * rows + costs[1] * cols * rows.div_ceil(TILE_ROWS);
            let piece = rows * cols + packed;
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

#[cfg(test)]
mod tests {
    use super::*;

    fn first(grid: Grid) -> (usize, usize) {
        let (rows, cols) = grid.get(0);
        (rows.len(), cols.len())
    }

    #[test]
    fn threads_share_what_they_pack() {
        assert_eq!(first(Grid::new(2048, 128, 2)), (2048, 64));
        // Half the columns would need all of the left operand, and as many tiles need the right one.
        assert_eq!(first(Grid::packing(2048, 128, 2, [COPIED, COPIED])), (1032, 128));
        assert_eq!(first(Grid::packing(512, 64, 2, [COPIED, PRODUCED])), (264, 64));
        // One tile high, the right operand is packed once by whoever needs it.
        assert_eq!(first(Grid::packing(96, 2048, 2, [COPIED, COPIED])), (96, 1024));
        // Nothing is packed.
        assert_eq!(first(Grid::packing(2048, 128, 2, [0, 0])), (2048, 64));
    }
}
