//! How a matrix product on the CPU is cut into blocks, and what its packed operands and workspace take.

use crate::dtype::DType;
use std::ops::Range;

/// Rows per panel of packed `A`. Ranges of rows start at a multiple of it.
pub const PANEL_ROWS: usize = 12;
/// Columns per panel of packed `B`. Ranges of columns start at a multiple of it.
pub const PANEL_COLS: usize = 16;

/// Depth of one block of `k`: two panels of `B` of this depth stay in the L1 cache.
pub const DEPTH: usize = 256;
/// Rows of `C` that are computed together. Their part of a block of `A` stays in the L2 cache, and in a thread's tile memory.
pub const TILE_ROWS: usize = 11 * PANEL_ROWS;
/// Up to this many rows the product is limited by reading `B`, and `A` is not packed.
pub const FEW_ROWS: usize = 4;
/// Up to this many rows a right operand with contiguous rows is not worth packing.
pub const IN_PLACE_ROWS: usize = 2 * PANEL_ROWS;
/// A block of `B` of up to this many floats stays in the L1 cache.
pub const SHALLOW: usize = 2 * PANEL_COLS * DEPTH;

/// Elements along `k` that make one element of 4 bytes of a packed operand: four bytes, two halves, or one number of 4 bytes.
pub fn together(dtype: DType) -> usize {
    match dtype {
        _ if dtype.is_byte() => 4,
        _ if dtype.is_half() => 2,
        _ => 1,
    }
}

/// Bytes of a packed `m` by `k` left operand.
pub fn packed_a_bytes(m: usize, k: usize) -> usize {
    4 * m * k
}

/// Bytes of a packed `k` by `n` right operand, padding included.
pub fn packed_b_bytes(k: usize, n: usize) -> usize {
    4 * n.next_multiple_of(PANEL_COLS) * k
}

/// The layout of a packed operand: panels of some lines, which are rows of a left operand or columns of a right one.
#[derive(Clone, Copy, Debug)]
pub(super) struct Form {
    /// Lines of a panel.
    pub unit: usize,
    /// The last panel is padded with zeros, rather than narrower.
    pub padded: bool,
    /// Elements of a line that stand [together] in 4 bytes.
    pub together: usize,
}

impl Form {
    /// The form of the left or of the right operand of a product.
    pub fn of(operand: usize, dtype: DType) -> Form {
        let together = together(dtype);
        match operand {
            0 => Form { unit: PANEL_ROWS, padded: false, together },
            _ => Form { unit: PANEL_COLS, padded: true, together },
        }
    }

    /// Bytes of an element.
    fn size(self) -> usize {
        4 / self.together
    }
}

/// The elements of a line along `k`: some stretches, of which each begins a word.
#[derive(Clone, Copy, Debug)]
pub(super) struct Depth {
    /// Number of stretches, and elements of the source from one to the next.
    pub stretches: (usize, isize),
    /// Elements of a stretch, and elements of the source from one to the next.
    pub elements: (usize, isize),
}

impl Depth {
    /// One stretch.
    pub fn even(len: usize, step: isize) -> Depth {
        Depth { stretches: (1, 0), elements: (len, step) }
    }
}

/// Packs `lines`: a panel has lines side by side, 4 bytes by 4 bytes of their `depth`. Lines come with their step in the source, which
/// starts at element `start`.
pub(super) fn pack_lines(from: Plain, start: isize, lines: (usize, isize), depth: Depth, form: Form, to: &mut [u8]) {
    let (count, step) = depth.stretches;
    let each = depth.elements.0.div_ceil(form.together);
    for stretch in 0..count {
        let (start, words) = (start + stretch as isize * step, (stretch * each, count * each));
        pack_stretch(from, start, lines, depth.elements, form, words, to);
    }
}

/// Packs a stretch of lines: its words begin behind so many of all words of a line.
fn pack_stretch(
    from: Plain,
    start: isize,
    (lines, line_step): (usize, isize),
    (depth, depth_step): (usize, isize),
    form: Form,
    (before, words): (usize, usize),
    to: &mut [u8],
) {
    let Form { unit, padded, together } = form;
    let size = form.size();
    if !from.has_all(start, (lines, line_step), (depth, depth_step), size) {
        return pack_some(from, start, (lines, line_step), (depth, depth_step), form, (before, words), to);
    }
    let (start, from) = (start - from.first as isize, from.bytes);
    for (panel, first) in to.chunks_mut((4 * unit * words).max(1)).zip((0..lines).step_by(unit)) {
        let width = unit.min(lines - first);
        let stride = if padded { unit } else { width };
        let own = panel.chunks_exact_mut(4 * stride).skip(before).take(depth.div_ceil(together));
        for (p, to) in own.enumerate() {
            to[4 * width..].fill(0);
            let at = start + first as isize * line_step + (p * together) as isize * depth_step;
            if line_step == 1 && together == 1 {
                let at = 4 * at as usize;
                to[..4 * width].copy_from_slice(&from[at..at + 4 * width]);
                continue;
            }
            for (i, to) in to.chunks_exact_mut(4).take(width).enumerate() {
                let at = at + i as isize * line_step;
                for (t, to) in to.chunks_exact_mut(size).enumerate() {
                    if p * together + t < depth {
                        let at = size * (at + t as isize * depth_step) as usize;
                        to.copy_from_slice(&from[at..at + size]);
                    } else {
                        to.fill(0);
                    }
                }
            }
        }
    }
}

/// Packs the elements that a part has, as [`pack_stretch`] does. Others stay as they are.
fn pack_some(
    from: Plain,
    start: isize,
    lines: (usize, isize),
    depth: (usize, isize),
    form: Form,
    (before, words): (usize, usize),
    to: &mut [u8],
) {
    let Form { unit, padded, together } = form;
    let size = form.size();
    // The axis with the smaller step is walked within the other one.
    let by_line = lines.1 >= depth.1;
    let (outer, inner) = if by_line { (lines, depth) } else { (depth, lines) };
    let reach = (inner.0.max(1) as isize - 1) * inner.1;
    for o in from.within(start, outer, reach, size) {
        let line = start + o as isize * outer.1;
        for i in from.within(line, inner, 0, size) {
            let (l, p) = if by_line { (o, i) } else { (i, o) };
            let (first, within) = (l / unit * unit, l % unit);
            let stride = if padded { unit } else { unit.min(lines.0 - first) };
            let word = first * words + (before + p / together) * stride + within;
            let to = &mut to[4 * word + p % together * size..][..size];
            let at = size * (line + i as isize * inner.1 - from.first as isize) as usize;
            to.copy_from_slice(&from.bytes[at..at + size]);
        }
    }
}

/// The elements of a buffer, or some that follow one another.
#[derive(Clone, Copy, Debug)]
pub struct Plain<'a> {
    /// The first element.
    pub first: usize,
    /// It and those that follow.
    pub bytes: &'a [u8],
}

impl<'a> Plain<'a> {
    /// All elements.
    pub fn whole(bytes: &'a [u8]) -> Plain<'a> {
        Plain { first: 0, bytes }
    }

    /// The end of the elements, of `size` bytes each.
    fn end(self, size: usize) -> isize {
        (self.first + self.bytes.len() / size) as isize
    }

    /// True if all elements of lines of a depth are there.
    fn has_all(self, start: isize, lines: (usize, isize), depth: (usize, isize), size: usize) -> bool {
        let reach = |(count, step): (usize, isize)| (count as isize - 1) * step;
        let (low, high) = [lines, depth]
            .map(reach)
            .iter()
            .fold((start, start), |(low, high), &reach| (low + reach.min(0), high + reach.max(0)));
        lines.0 == 0 || depth.0 == 0 || (self.first as isize) <= low && high < self.end(size)
    }

    /// The indices of an axis with steps forward of which the part has the element at `start`, or one up to `reach` behind it.
    fn within(self, start: isize, (count, step): (usize, isize), reach: isize, size: usize) -> Range<usize> {
        // The first index whose element is not before `bound`.
        let from = |bound: isize| match (bound - start, step) {
            (ahead, _) if ahead <= 0 => 0,
            (_, 0) => count,
            (ahead, step) => (ahead as usize).div_ceil(step as usize).min(count),
        };
        from(self.first as isize - reach)..from(self.end(size))
    }
}

/// Bytes of workspace that one call of a product needs, whatever range it computes; each thread needs its own.
/// `a_packed`, `b_packed`: the operand is `Packed`. `c_unit`: the destination is `Out::Strided` with `cs == 1`.
pub fn workspace_bytes(m: usize, n: usize, k: usize, a_packed: bool, b_packed: bool, c_unit: bool) -> usize {
    Layout::new(m, n, k, !a_packed, !b_packed, !c_unit).bytes()
}

/// The blocks that a product is cut into and the workspace that they need, from the shapes alone.
pub struct Layout {
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
    /// Of a product of bytes. If only the right operand has to be packed, tiles are as high as they may be, because it is packed anew for
    /// each, and bytes cost more to pack than to multiply.
    pub fn of_bytes(m: usize, n: usize, k: usize, pack_a: bool, pack_b: bool, buffer_c: bool) -> Layout {
        let layout = Layout::new(m, n, k, pack_a, pack_b, buffer_c);
        if pack_a || !pack_b || !buffer_c {
            return layout;
        }
        // No more is packed than a tile is wide.
        let packed = |cols: usize| (layout.sweep.min(cols) * layout.depth).next_multiple_of(PANEL_COLS);
        if m <= TILE_ROWS {
            return Layout { b_len: packed(layout.tile.1).min(layout.b_len), ..layout };
        }
        let rows = m.div_ceil(m.div_ceil(2 * TILE_ROWS)).next_multiple_of(PANEL_ROWS);
        let cols = n.next_multiple_of(2 * PANEL_COLS).min(2 * 2 * PANEL_COLS);
        let c_len = (rows.min(m) * cols).next_multiple_of(PANEL_COLS);
        Layout { tile: (rows, cols), b_len: packed(cols).min(layout.b_len), c_len, ..layout }
    }

    /// Bytes of the workspace.
    pub fn bytes(&self) -> usize {
        4 * (self.a_len + self.b_len + self.c_len)
    }

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
