//! Packing: all blocks from the bottom up, in a given order, around those whose offsets are given.
//!
//! ```text
//!   +---+        +--
//!   |   |  basin |       a basin of the skyline takes the first block, in the order, that lives within it;
//!   |   +--------+       where none does it is lifted to the lower of its walls, or to the fixed block above it
//!   +---------------
//! ```

use super::NONE;
use super::effort::Meter;
use super::exact::Block;
use std::cmp::Reverse;
use std::ops::Range;

/// How to pack.
#[derive(Clone, Default)]
pub(super) struct Recipe {
    /// The blocks, first come first served.
    pub order: Vec<u32>,
    /// What it may cost to widen a stretch.
    pub level: Option<Level>,
}

/// When a stretch is lifted to its wall though a block lives within it: a little room is lost under the stretch, but what the block
/// would leave beside it is often too narrow for any other.
#[derive(Clone)]
pub(super) struct Level {
    /// How much room matters in the sections before each, in sum.
    pub worth: Vec<u64>,
    /// Of the room beside the block, one part in so many may be lost.
    pub parts: u32,
}

impl Level {
    /// Whether to lift a stretch by so much rather than to put a block there.
    fn lifts(&self, stretch: &Range<usize>, by: u64, block: &Block) -> bool {
        let worth = |span: &Range<usize>| u128::from(self.worth[span.end] - self.worth[span.start]);
        let (under, beside) = (worth(stretch), worth(stretch) - worth(&block.span));
        // Bytes have 64 bits, worth 59, and of parts there are few.
        u128::from(by) * under * u128::from(self.parts) < u128::from(block.size) * beside
    }
}

/// Steps for a node that is looked at, about.
const STEPS: u64 = 8;

/// Packs the same blocks in one order after another.
#[derive(Clone)]
pub(super) struct Packer<'a> {
    blocks: &'a [Block],
    sections: usize,
    rank: Vec<u32>,
    waiting: Waiting,
    skyline: Skyline,
    ceiling: Ceiling,
    /// Per block, its offset, once packed.
    pub offsets: Vec<u64>,
}

/// Why nothing was packed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stuck {
    /// This block does not fit under the limit.
    At(u32),
    /// Time is up.
    Late,
}

impl<'a> Packer<'a> {
    /// A packer for blocks over so many sections. Blocks of no sections are passed over; those that are fixed begin with the first
    /// section or end with the last one.
    pub fn new(sections: usize, blocks: &'a [Block]) -> Packer<'a> {
        Packer {
            blocks,
            sections,
            rank: vec![NONE; blocks.len()],
            waiting: Waiting::new(blocks),
            skyline: Skyline::default(),
            ceiling: Ceiling::new(blocks),
            offsets: blocks.iter().map(|block| block.fixed.unwrap_or(0)).collect(),
        }
    }

    /// What it packs.
    pub fn blocks(&self) -> &'a [Block] {
        self.blocks
    }

    /// Finds the offsets that a recipe leads to; the highest end of those that are not fixed.
    pub fn pack(&mut self, Recipe { order, level }: &Recipe, limit: u64, meter: &mut Meter) -> Result<u64, Stuck> {
        order.iter().enumerate().for_each(|(rank, &block)| self.rank[block as usize] = rank as u32);
        self.waiting.reset(&self.rank);
        self.skyline.reset(self.sections);
        self.ceiling.reset(self.blocks);
        let mut peak = 0;
        while let Some((floor, stretch)) = self.skyline.basin() {
            let (above, fixed) = self.ceiling.over(&stretch);
            if above == floor {
                let Block { span, size, .. } = &self.blocks[fixed as usize];
                self.ceiling.remove(fixed, span);
                self.skyline.raise(stretch, span, floor + size);
                continue;
            }
            let (blocks, ceiling) = (self.blocks, &self.ceiling);
            let end = |index: usize| floor.next_multiple_of(blocks[index].align) + blocks[index].size;
            let fits = |index: usize| above == u64::MAX || end(index) <= ceiling.over(&blocks[index].span).0;
            let mut seen = 0;
            let found = self.waiting.first_within(&stretch, &fits, &mut seen);
            if meter.spend(STEPS * (8 + seen)) {
                return Err(Stuck::Late);
            }
            let up = || self.skyline.wall(&stretch).min(above) - floor;
            let stays =
                |&index: &usize| level.as_ref().is_none_or(|level| !level.lifts(&stretch, up(), &blocks[index]));
            let Some(index) = found.filter(stays) else {
                self.skyline.lift(stretch, above);
                continue;
            };
            let end = end(index);
            if end > limit {
                return Err(Stuck::At(index as u32));
            }
            self.waiting.remove(index);
            self.skyline.raise(stretch, &blocks[index].span, end);
            self.offsets[index] = end - blocks[index].size;
            peak = peak.max(end);
        }
        Ok(peak)
    }
}

/// The lowest free address of each section, as stretches of sections that share one. Neighbours differ, so a stretch is all the
/// room that there is between two walls.
#[derive(Clone, Default)]
struct Skyline {
    /// By a stretch's first section: its address.
    floor: Vec<u64>,
    /// By a stretch's first section: the section after its last.
    end: Vec<usize>,
    /// By a stretch's last section: its first.
    begin: Vec<usize>,
    /// The first section of the stretch from which the next basin is looked for, unless all is done.
    at: Option<usize>,
}

impl Skyline {
    fn reset(&mut self, sections: usize) {
        self.floor.resize(sections, 0);
        self.end.resize(sections, 0);
        self.begin.resize(sections, 0);
        self.at = (sections > 0).then(|| self.set(0..sections, 0, 0..sections));
    }

    /// A basin, a stretch between higher walls, and its address: the next one downhill. It is to be lifted or raised next. What happens in
    /// one basin has no bearing on another, so their order does not matter, and one close by is still in the cache.
    fn basin(&mut self) -> Option<(u64, Range<usize>)> {
        let mut at = self.at?;
        loop {
            let (floor, stretch) = (self.floor[at], at..self.end[at]);
            let lower = |other: &usize| self.floor[*other] < floor;
            match self.left(&stretch).filter(lower).or_else(|| self.right(&stretch).filter(lower)) {
                Some(other) => at = other,
                None => return Some((floor, stretch)),
            }
        }
    }

    /// The first sections of the stretches beside one.
    fn left(&self, stretch: &Range<usize>) -> Option<usize> {
        stretch.start.checked_sub(1).map(|last| self.begin[last])
    }

    fn right(&self, stretch: &Range<usize>) -> Option<usize> {
        (stretch.end < self.floor.len()).then_some(stretch.end)
    }

    /// The lowest of the walls of a stretch, or no address if it has none.
    fn wall(&self, stretch: &Range<usize>) -> u64 {
        let floor = |other: Option<usize>| other.map_or(u64::MAX, |other| self.floor[other]);
        floor(self.left(stretch)).min(floor(self.right(stretch)))
    }

    /// Lifts a stretch to the lowest of its walls and what is `above` it. If there is nothing all is done.
    fn lift(&mut self, stretch: Range<usize>, above: u64) {
        let wall = self.wall(&stretch).min(above);
        self.at = (wall < u64::MAX).then(|| self.set(stretch.clone(), wall, stretch));
    }

    /// Raises a part of a stretch; what remains on either side keeps its floor.
    fn raise(&mut self, stretch: Range<usize>, part: &Range<usize>, floor: u64) {
        let old = self.floor[stretch.start];
        self.at = Some(self.set(part.clone(), floor, stretch.clone()));
        for rest in [part.end..stretch.end, stretch.start..part.start].into_iter().filter(|rest| !rest.is_empty()) {
            self.at = Some(self.set(rest.clone(), old, rest));
        }
    }

    /// Makes a stretch of a part of one, joined with neighbours of the same height beyond it, and gives its first section.
    fn set(&mut self, part: Range<usize>, floor: u64, whole: Range<usize>) -> usize {
        let Range { start: mut begin, mut end } = part;
        if let Some(right) = self.right(&whole).filter(|&right| end == whole.end && self.floor[right] == floor) {
            end = self.end[right];
        }
        if let Some(left) = self.left(&whole).filter(|&left| begin == whole.start && self.floor[left] == floor) {
            begin = left;
        }
        self.floor[begin] = floor;
        self.end[begin] = end;
        self.begin[end - 1] = begin;
        begin
    }
}

/// The blocks that are not placed yet, under a tree that halves them by start and by end in turns: what lives side by side and as long
/// is under one node.
#[derive(Clone)]
struct Waiting {
    /// By leaf, its block.
    blocks: Vec<u32>,
    /// By block, its leaf.
    leaf: Vec<u32>,
    /// By leaf, what the node of its block says.
    full: Vec<Below>,
    /// Node 1 is the root, the children of `n` are `2n` and `2n + 1`; the second half are the leaves.
    nodes: Vec<Below>,
}

/// What there is below a node.
#[derive(Clone, Copy, PartialEq)]
struct Below {
    last_start: u32,
    first_end: u32,
    least_rank: u32,
}

impl Below {
    const NOTHING: Below = Below { last_start: 0, first_end: NONE, least_rank: NONE };

    fn join(self, other: Below) -> Below {
        Below {
            last_start: self.last_start.max(other.last_start),
            first_end: self.first_end.min(other.first_end),
            least_rank: self.least_rank.min(other.least_rank),
        }
    }
}

impl Waiting {
    fn new(blocks: &[Block]) -> Waiting {
        let open = |&index: &u32| {
            let block = &blocks[index as usize];
            !block.span.is_empty() && block.fixed.is_none()
        };
        let end_points = |index: u32| {
            let Range { start, end } = blocks[index as usize].span;
            [start as u32, end as u32, index]
        };
        let mut free: Vec<[u32; 3]> = (0..blocks.len() as u32).filter(open).map(end_points).collect();
        let leaves = free.len().next_power_of_two();
        let mut by_leaf = vec![NONE; leaves];
        halve(&mut free, &mut by_leaf, true);
        let (mut leaf, mut full) = (vec![NONE; blocks.len()], vec![Below::NOTHING; leaves]);
        for (at, &index) in by_leaf.iter().enumerate().filter(|&(_, &index)| index != NONE) {
            let Range { start, end } = blocks[index as usize].span;
            leaf[index as usize] = (leaves + at) as u32;
            full[at] = Below { last_start: start as u32, first_end: end as u32, least_rank: NONE };
        }
        Waiting { blocks: by_leaf, leaf, full, nodes: Vec::new() }
    }

    fn reset(&mut self, rank: &[u32]) {
        let leaves = self.blocks.len();
        self.nodes.clear();
        self.nodes.resize(leaves, Below::NOTHING);
        let ranked = |(&index, below): (&u32, &Below)| match rank.get(index as usize) {
            Some(&least_rank) => Below { least_rank, ..*below },
            None => *below,
        };
        self.nodes.extend(self.blocks.iter().zip(&self.full).map(ranked));
        (1..leaves).rev().for_each(|node| self.nodes[node] = self.nodes[2 * node].join(self.nodes[2 * node + 1]));
    }

    fn remove(&mut self, block: usize) {
        let mut node = self.leaf[block] as usize;
        self.nodes[node] = Below::NOTHING;
        while node > 1 {
            node /= 2;
            let below = self.nodes[2 * node].join(self.nodes[2 * node + 1]);
            if below == self.nodes[node] {
                return;
            }
            self.nodes[node] = below;
        }
    }

    /// The block of least rank that lives within these sections and fits. `seen` counts the nodes that are looked at.
    fn first_within(&self, sections: &Range<usize>, fits: &impl Fn(usize) -> bool, seen: &mut u64) -> Option<usize> {
        let mut best = (NONE, NONE);
        self.search(1, &(sections.start as u32..sections.end as u32), fits, &mut best, seen);
        (best.0 != NONE).then_some(best.1 as usize)
    }

    /// Lowers `best`, a rank and its block, to that below `node` among the blocks that live within the sections and fit.
    fn search(
        &self,
        node: usize,
        sections: &Range<u32>,
        fits: &impl Fn(usize) -> bool,
        best: &mut (u32, u32),
        seen: &mut u64,
    ) {
        *seen += 1;
        let Below { last_start, first_end, least_rank } = self.nodes[node];
        if least_rank >= best.0 || last_start < sections.start || first_end > sections.end {
            return;
        }
        if let Some(leaf) = node.checked_sub(self.blocks.len()) {
            if fits(self.blocks[leaf] as usize) {
                *best = (least_rank, self.blocks[leaf]);
            }
            return;
        }
        let (left, right) = (2 * node, 2 * node + 1);
        let first = if self.nodes[left].least_rank <= self.nodes[right].least_rank { left } else { right };
        for child in [first, left + right - first] {
            self.search(child, sections, fits, best, seen);
        }
    }
}

/// Spreads blocks (start, end and which) over leaves, at least as many: the first half of them, by start or by end, goes to the first half
/// of the leaves.
fn halve(free: &mut [[u32; 3]], leaves: &mut [u32], by_start: bool) {
    if free.len() <= 1 {
        leaves.iter_mut().zip(free).for_each(|(leaf, &mut [_, _, index])| *leaf = index);
        return;
    }
    let middle = free.len().div_ceil(2);
    free.select_nth_unstable_by_key(middle - 1, |&[start, end, index]| (if by_start { start } else { end }, index));
    let (free, leaves) = (free.split_at_mut(middle), leaves.split_at_mut(leaves.len() / 2));
    halve(free.0, leaves.0, !by_start);
    halve(free.1, leaves.1, !by_start);
}

/// The fixed blocks that are not in the skyline yet: how much room they leave above it.
#[derive(Clone)]
struct Ceiling {
    /// Those that begin with the first section, by end, and the others, by start; the farthest first.
    left: Vec<(usize, u32)>,
    right: Vec<(usize, u32)>,
    /// For either side, under a tree, the offsets of those that are left, with their blocks: a side's root is node 1.
    nodes: [Vec<(u64, u32)>; 2],
}

/// No block, above all.
const CLEAR: (u64, u32) = (u64::MAX, NONE);

impl Ceiling {
    fn new(blocks: &[Block]) -> Ceiling {
        let fixed = || (0..blocks.len() as u32).filter(|&index| blocks[index as usize].fixed.is_some());
        let span = |index: u32| &blocks[index as usize].span;
        let mut left: Vec<_> = fixed().filter(|&i| span(i).start == 0).map(|i| (span(i).end, i)).collect();
        let mut right: Vec<_> = fixed().filter(|&i| span(i).start > 0).map(|i| (span(i).start, i)).collect();
        left.sort_unstable_by_key(|&(end, index)| (Reverse(end), index));
        right.sort_unstable();
        Ceiling { left, right, nodes: [Vec::new(), Vec::new()] }
    }

    fn reset(&mut self, blocks: &[Block]) {
        for (side, nodes) in [&self.left, &self.right].into_iter().zip(&mut self.nodes) {
            nodes.clear();
            nodes.resize(side.len(), CLEAR);
            nodes.extend(side.iter().map(|&(_, index)| (blocks[index as usize].fixed.unwrap_or(0), index)));
            (1..side.len()).rev().for_each(|node| nodes[node] = nodes[2 * node].min(nodes[2 * node + 1]));
        }
    }

    /// The lowest that lives in one of these sections: its offset and which.
    fn over(&self, sections: &Range<usize>) -> (u64, u32) {
        let left = self.left.partition_point(|&(end, _)| end > sections.start);
        let right = self.right.partition_point(|&(start, _)| start < sections.end);
        least(&self.nodes[0], left).min(least(&self.nodes[1], right))
    }

    fn remove(&mut self, index: u32, span: &Range<usize>) {
        let (side, at) = match span.start {
            0 => (0, self.left.binary_search_by_key(&(Reverse(span.end), index), |&(end, i)| (Reverse(end), i))),
            start => (1, self.right.binary_search(&(start, index))),
        };
        let at = at.expect("a fixed block is on its side");
        let nodes = &mut self.nodes[side];
        let mut node = nodes.len() / 2 + at;
        nodes[node] = CLEAR;
        while node > 1 {
            node /= 2;
            nodes[node] = nodes[2 * node].min(nodes[2 * node + 1]);
        }
    }
}

/// The least of the first `count` leaves of a tree.
fn least(nodes: &[(u64, u32)], count: usize) -> (u64, u32) {
    let (mut from, mut to, mut least) = (nodes.len() / 2, nodes.len() / 2 + count, CLEAR);
    while from < to {
        if from % 2 == 1 {
            least = least.min(nodes[from]);
            from += 1;
        }
        if to % 2 == 1 {
            to -= 1;
            least = least.min(nodes[to]);
        }
        (from, to) = (from / 2, to / 2);
    }
    least
}
