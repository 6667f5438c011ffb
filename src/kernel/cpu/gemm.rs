//! How a matrix product on the CPU is cut into blocks, and what its packed operands and workspace take.

/// Rows per panel of packed `A`. Ranges of rows start at a multiple of it.
pub const PANEL_ROWS: usize = 12;
/// Columns per panel of packed `B`. Ranges of columns start at a multiple of it.
pub const PANEL_COLS: usize = 16;

/// Depth of one block of `k`: two panels of `B` of this depth stay in the L1 cache.
pub(crate) const DEPTH: usize = 256;
/// Rows of `C` that are computed together. Their part of a block of `A` stays in the L2 cache, and in a thread's tile memory.
pub(crate) const TILE_ROWS: usize = 11 * PANEL_ROWS;
/// Up to this many rows the product is limited by reading `B`, and `A` is not packed.
pub(crate) const FEW_ROWS: usize = 4;
/// Up to this many rows a right operand with contiguous rows is not worth packing.
pub(crate) const IN_PLACE_ROWS: usize = 2 * PANEL_ROWS;
/// A block of `B` of up to this many floats stays in the L1 cache.
pub(crate) const SHALLOW: usize = 2 * PANEL_COLS * DEPTH;

/// Bytes of a packed `m` by `k` left operand.
pub fn packed_a_bytes(m: usize, k: usize) -> usize {
    4 * m * k
}

/// Bytes of a packed `k` by `n` right operand, padding included.
pub fn packed_b_bytes(k: usize, n: usize) -> usize {
    4 * n.next_multiple_of(PANEL_COLS) * k
}

/// Packs `lines`: rows of a left operand, or columns of a right one. A panel has `unit` lines side by side, element by element of their
/// `depth`. Both come with their step in the source, which starts at element `start`. The last panel is narrower, or `padded` with zeros.
pub(super) fn pack_lines(
    from: &[u8],
    start: isize,
    (lines, line_step): (usize, isize),
    (depth, depth_step): (usize, isize),
    unit: usize,
    padded: bool,
    to: &mut [u8],
) {
    for (panel, first) in to.chunks_mut((4 * unit * depth).max(1)).zip((0..lines).step_by(unit)) {
        let width = unit.min(lines - first);
        let stride = if padded { unit } else { width };
        for (p, to) in panel.chunks_exact_mut(4 * stride).enumerate() {
            to[4 * width..].fill(0);
            let at = start + first as isize * line_step + p as isize * depth_step;
            if line_step == 1 {
                let at = 4 * at as usize;
                to[..4 * width].copy_from_slice(&from[at..at + 4 * width]);
                continue;
            }
            for (i, to) in to.chunks_exact_mut(4).take(width).enumerate() {
                let at = 4 * (at + i as isize * line_step) as usize;
                to.copy_from_slice(&from[at..at + 4]);
            }
        }
    }
}

/// Bytes of workspace that one call of a product needs, whatever range it computes; each thread needs its own.
/// `a_packed`, `b_packed`: the operand is `Packed`. `c_unit`: the destination is `Out::Strided` with `cs == 1`.
pub fn workspace_bytes(m: usize, n: usize, k: usize, a_packed: bool, b_packed: bool, c_unit: bool) -> usize {
    let layout = Layout::new(m, n, k, !a_packed, !b_packed, !c_unit);
    4 * (layout.a_len + layout.b_len + layout.c_len)
}

/// The blocks that a product is cut into and the workspace that they need, from the shapes alone.
pub(crate) struct Layout {
    /// Rows and columns of a tile of `C`, the unit in which the epilogue runs.
    pub tile: (usize, usize),
    /// Depth of a block of `k`.
    pub depth: usize,
    /// Columns of `B` that are packed at a time.
    pub sweep: usize,
    pub a_len: usize,
    pub b_len: usize,
    pub c_len: usize,
}

impl Layout {
    pub fn new(m: usize, n: usize, k: usize, pack_a: bool, pack_b: bool, buffer_c: bool) -> Layout {
        // A tile is large enough to use what was packed for it often, and small enough for the L2 cache.
        let tile_len = if buffer_c { 16 << 10 } else { 128 << 10 };
        let rows = m.next_multiple_of(PANEL_ROWS).min(TILE_ROWS);
        let cols = n.next_multiple_of(2 * PANEL_COLS).min((tile_len / rows.max(64)) & !(2 * PANEL_COLS - 1));
        // A few rows read B once, so it is not worth stopping between blocks, unless it has to be packed.
        let depth = if m <= FEW_ROWS && !pack_b { k } else { k.div_ceil(k.div_ceil(DEPTH).max(1)) };
        let sweep = (SHALLOW / depth.max(1)).max(2 * PANEL_COLS) & !(2 * PANEL_COLS - 1);
        let up = |len: usize| len.next_multiple_of(PANEL_COLS);
        Layout {
            tile: (rows, cols),
            depth,
            sweep,
            a_len: if pack_a { up(rows.min(m) * depth) } else { 0 },
            b_len: if pack_b { up(sweep.min(up(n)) * depth) } else { 0 },
            c_len: if buffer_c { up(rows.min(m) * cols) } else { 0 },
        }
    }
}
