//! Packs blocks from the bottom up, in a given order, around blocks with fixed offsets.
//!
//! ```text
//!   +---+        +--
//!   |   |  basin |       a basin of the skyline takes the first block in the order whose sections are within it;
//!   |   +--------+       without such a block, it is lifted to the lower of its walls or to the fixed block above it
//!   +---------------
//! ```

use super::NONE;
use super::effort::Meter;
use super::exact::Block;
use std::cmp::Reverse;
use std::ops::Range;

/// An order for packing, and a rule for lifting.
#[derive(Clone, Default)]
pub(super) struct Recipe {
    /// The blocks; earlier ones take precedence.
    pub order: Vec<u32>,
    /// The rule for lifting a stretch that could take a block; without one, a block is always put there.
    pub level: Option<Level>,
}

impl Recipe {
    /// Puts a block that did not fit earlier in the order. Returns false if it is the first already.
    pub fn prefer(&mut self, block: u32) -> bool {
        let at = self.order.iter().position(|&other| other == block).expect("the order has every free block");
        self.order[at / 2..=at].rotate_right(1);
        at > 0
    }
}

/// A rule that lifts a stretch to its wall although a block fits into it.
///
/// Lifting wastes a little room under the stretch. But the room that the block would leave beside it is often too narrow for any
/// other block.
#[derive(Clone)]
pub(super) struct Level {
    /// The worth of room, as prefix sums over the sections: see [`Sections::worth`](super::sections::Sections::worth).
    pub worth: Vec<u64>,
    /// Lifting may waste one part in so many of the room beside the block.
    pub parts: u32,
}

impl Level {
    /// True if the stretch is lifted by `by` bytes instead of taking the block.
    fn lifts(&self, stretch: &Range<usize>, by: u64, block: &Block) -> bool {
        let worth = |span: &Range<usize>| u128::from(self.worth[span.end] - self.worth[span.start]);
        let (under, beside) = (worth(stretch), worth(stretch) - worth(&block.span));
        // This does not overflow: bytes have 64 bits, worth has 59, and there are few parts.
        u128::from(by) * under * u128::from(self.parts) < u128::from(block.size) * beside
    }
}

/// Approximate steps per node that is looked at.
const STEPS: u64 = 8;

/// Packs the same blocks, in one order after another.
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

/// The reason why packing stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stuck {
    /// This block does not fit under the limit.
    At(u32),
    /// The effort is spent.
    Late,
}

impl<'a> Packer<'a> {
    /// A packer for blocks over `sections` sections. It skips blocks without sections. A fixed block begins with the first section
    /// or ends with the last.
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

    /// The blocks that it packs.
    pub fn blocks(&self) -> &'a [Block] {
        self.blocks
    }

    /// Packs by a recipe: finds the [`offsets`](Self::offsets), and returns the highest end of the blocks that are not fixed.
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

/// The lowest free address of each section, as stretches of sections with the same address. Neighbouring stretches differ, so a
/// basin is all the room between two walls.
#[derive(Clone, Default)]
struct Skyline {
    /// By the first section of a stretch: its address.
    floor: Vec<u64>,
    /// By the first section of a stretch: the section after its last.
    end: Vec<usize>,
    /// By the last section of a stretch: its first.
    begin: Vec<usize>,
    /// The first section of the stretch where the search for the next basin starts; `None` when all blocks are packed.
    at: Option<usize>,
}

impl Skyline {
    fn reset(&mut self, sections: usize) {
        self.floor.resize(sections, 0);
        self.end.resize(sections, 0);
        self.begin.resize(sections, 0);
        self.at = (sections > 0).then(|| self.set(0..sections, 0, 0..sections));
    }

    /// A basin, which is a stretch between higher walls, and its address. The caller must lift or raise it next.
    ///
    /// Basins do not affect each other, so their order does not matter. This takes the next one downhill, which is in the cache.
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

    /// The first section of the stretch to the left of one.
    fn left(&self, stretch: &Range<usize>) -> Option<usize> {
        stretch.start.checked_sub(1).map(|last| self.begin[last])
    }

    /// The first section of the stretch to the right of one.
    fn right(&self, stretch: &Range<usize>) -> Option<usize> {
        (stretch.end < self.floor.len()).then_some(stretch.end)
    }

    /// The address of the lower wall of a stretch; `u64::MAX` if it has no walls.
    fn wall(&self, stretch: &Range<usize>) -> u64 {
        let floor = |other: Option<usize>| other.map_or(u64::MAX, |other| self.floor[other]);
        floor(self.left(stretch)).min(floor(self.right(stretch)))
    }

    /// Lifts a stretch to its lower wall or to `above`, whichever is lower. If there is neither, packing is done.
    fn lift(&mut self, stretch: Range<usize>, above: u64) {
        let wall = self.wall(&stretch).min(above);
        self.at = (wall < u64::MAX).then(|| self.set(stretch.clone(), wall, stretch));
    }

    /// Raises a part of a stretch. The rest on either side keeps its address.
    fn raise(&mut self, stretch: Range<usize>, part: &Range<usize>, floor: u64) {
        let old = self.floor[stretch.start];
        self.at = Some(self.set(part.clone(), floor, stretch.clone()));
        for rest in [part.end..stretch.end, stretch.start..part.start].into_iter().filter(|rest| !rest.is_empty()) {
            self.at = Some(self.set(rest.clone(), old, rest));
        }
    }

    /// Makes a part of a stretch a stretch of its own, joins it with neighbours at the same address, and returns its first section.
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

/// The blocks that are not placed yet, in a tree that halves them by start and by end alternately. Blocks with similar spans
/// are below one node.
#[derive(Clone)]
struct Waiting {
    /// Per leaf, its block.
    blocks: Vec<u32>,
    /// Per block, its leaf.
    leaf: Vec<u32>,
    /// Per leaf, its node while its block is waiting.
    full: Vec<Below>,
    /// The nodes. Node 1 is the root, and the children of `n` are `2n` and `2n + 1`. The second half are the leaves.
    nodes: Vec<Below>,
}

/// Bounds of the blocks below a node.
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

    /// The block of least rank whose span is within these sections and that fits. `seen` counts the nodes that are looked at.
    fn first_within(&self, sections: &Range<usize>, fits: &impl Fn(usize) -> bool, seen: &mut u64) -> Option<usize> {
        let mut best = (NONE, NONE);
        self.search(1, &(sections.start as u32..sections.end as u32), fits, &mut best, seen);
        (best.0 != NONE).then_some(best.1 as usize)
    }

    /// Replaces `best`, a rank and its block, if a block below `node` has a lower rank, is within the sections and fits.
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

/// Assigns blocks (start, end and index) to leaves. The first half of the blocks, by start or by end, gets the first half of the
/// leaves.
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

/// The fixed blocks that the skyline has not reached yet. They limit the room above it.
#[derive(Clone)]
struct Ceiling {
    /// The blocks that begin with the first section: end and block, the last end first.
    left: Vec<(usize, u32)>,
    /// The other blocks: start and block, the first start first.
    right: Vec<(usize, u32)>,
    /// For either side, a tree over the offsets of the remaining blocks, with their indices. Node 1 is the root.
    nodes: [Vec<(u64, u32)>; 2],
}

/// No block: an offset above all others.
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

    /// The lowest fixed block that spans one of these sections: its offset and its index.
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
