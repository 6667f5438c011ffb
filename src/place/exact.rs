//! Exact search for a placement within a capacity.
//!
//! It considers *canonical* placements only: each block is at address 0 or directly on another block. It builds them from the
//! bottom up, so a node of the search is a skyline and the open blocks, which have no offset yet.
//!
//! ```text
//! floor[s]   no open block begins below this in section s: the least `low` of the open blocks that span s
//! low[b]     block b does not begin below this: the highest floor of its sections
//! rest[s]    bytes of the open blocks that span s;  floor[s] + rest[s] <= capacity, or the node is dead
//! ```
//!
//! Floors and lows determine each other and are brought to a fixpoint, so a hole that is too narrow for every open block is closed
//! at once. A node branches over one section of a *basin*, a stretch of the skyline between two higher walls. Either a block is on
//! the floor there, or none is, and the floor rises to the lowest address at which one could be. The search takes the section with
//! the fewest choices, divided by the number of nodes that died there.
//!
//! Parts of time that no open block spans together are solved one after the other. If one fails, the others are not solved again.
//! A failed part is remembered by its hash. A collision could hide a placement, but never makes a wrong one.

use plimsoll_core::random::mix;
use std::ops::Range;

/// The result of a search.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Outcome {
    /// All blocks are placed, at [`Search::offsets`].
    Found,
    /// There is no canonical placement.
    Failed,
    /// The caller stopped the search.
    Stopped,
}

/// An item, as the search and the packer see it.
#[derive(Debug, Clone)]
pub(super) struct Block {
    /// Its sections; not empty in a search.
    pub span: Range<usize>,
    /// Its bytes; not zero in a search.
    pub size: u64,
    /// A power of two that divides its offset.
    pub align: u64,
    /// Its offset, if that is given. With such blocks the search may miss placements.
    pub fixed: Option<u64>,
}

/// The heuristics of one run of a search.
pub(super) struct Manner {
    /// Per block, its rank. Of the blocks that may be on a floor, the least rank is tried first.
    rank: Vec<u32>,
    /// The weight of the deaths in a section when it is chosen.
    focus: Focus,
}

impl Manner {
    /// The manner that tries the blocks in this order.
    pub fn new(order: &[u32], focus: Focus) -> Manner {
        let mut rank = vec![0; order.len()];
        order.iter().enumerate().for_each(|(place, &block)| rank[block as usize] = place as u32);
        Manner { rank, focus }
    }
}

/// The weight of the deaths in a section: their number, its square root, or one.
#[derive(Debug, Clone, Copy)]
pub(super) enum Focus {
    Full,
    Root,
    None,
}

/// A change that is undone when the search goes back.
enum Change {
    /// A section and its old floor.
    Floor(u32, u64),
    /// A block and its old low.
    Low(u32, u64),
    /// A block that was placed.
    Put(u32),
}

/// A section to branch over, and the choices that are left.
struct Node {
    /// The node whose choice led to this one.
    parent: usize,
    part: Range<usize>,
    key: u64,
    /// Length of the trail to go back to.
    trail: usize,
    /// Length of the list of parts to go back to.
    todo: usize,
    section: usize,
    /// The blocks that may be on the floor, the next one last.
    blocks: Vec<u32>,
    /// The new floor of the section if no block is on the old one; `None` if that cannot lead to a placement.
    bare: Option<u64>,
}

const ROOT: usize = usize::MAX;

/// A problem for exact search, with what earlier runs learnt about it.
pub(super) struct Search {
    blocks: Vec<Block>,
    /// Per block, its offset, once [`Outcome::Found`].
    pub offsets: Vec<u64>,
    /// Number of elementary steps so far, about a nanosecond each.
    pub work: u64,
    capacity: u64,
    low: Vec<u64>,
    floor: Vec<u64>,
    rest: Vec<u64>,
    /// Per section, the blocks that span it. The first `open` of them are open.
    spanning: Vec<Vec<u32>>,
    /// Per section, the number of open blocks that span it.
    open: Vec<usize>,
    /// Per block and section of it, the block's index in the section's list. A block's entries start at its `base`.
    seat: Vec<u32>,
    base: Vec<usize>,
    /// Per section, the number of open blocks that span both it and the section before.
    joined: Vec<u32>,
    /// Per section, a hash of the open blocks that begin in it.
    begins: Vec<u64>,
    /// Per section, the number of nodes that died in it.
    deaths: Vec<u64>,
    /// Hashes of parts that failed at this capacity.
    failed: Vec<u64>,
    trail: Vec<Change>,
    dirty: Vec<u32>,
    is_dirty: Vec<bool>,
    nodes: Vec<Node>,
    todo: Vec<(Range<usize>, usize)>,
    beside: Vec<u64>,
}

impl Search {
    /// A search over `sections` sections. Each must be spanned by a block.
    pub fn new(sections: usize, blocks: Vec<Block>) -> Search {
        let mut spanning = vec![Vec::new(); sections];
        let (mut seat, mut base) = (Vec::new(), Vec::new());
        let (mut rest, mut joined, mut begins) = (vec![0; sections], vec![0; sections], vec![0; sections]);
        for (index, block) in blocks.iter().enumerate() {
            base.push(seat.len());
            begins[block.span.start] ^= mix(index as u64 + 1);
            for section in block.span.clone() {
                seat.push(spanning[section].len() as u32);
                spanning[section].push(index as u32);
                rest[section] += block.size;
                joined[section] += u32::from(section > block.span.start);
            }
        }
        let count = blocks.len();
        Search {
            offsets: vec![0; count],
            work: 0,
            capacity: 0,
            low: blocks.iter().map(|block| block.fixed.unwrap_or(0)).collect(),
            floor: vec![0; sections],
            rest,
            open: spanning.iter().map(Vec::len).collect(),
            spanning,
            seat,
            base,
            joined,
            begins,
            deaths: vec![1; sections],
            failed: vec![0; (64 * count).next_power_of_two().clamp(1 << 10, 1 << 18)],
            trail: Vec::new(),
            dirty: Vec::new(),
            is_dirty: vec![false; sections],
            nodes: Vec::new(),
            todo: Vec::new(),
            beside: Vec::new(),
            blocks,
        }
    }

    /// Searches for a placement within the capacity until `stop` is true for the work so far. Later runs use what it learns.
    pub fn run(&mut self, capacity: u64, manner: &Manner, stop: &mut dyn FnMut(u64) -> bool) -> Outcome {
        if capacity != self.capacity {
            self.failed.fill(0);
            self.capacity = capacity;
        }
        if self.rest.iter().any(|&rest| rest > capacity) {
            return Outcome::Failed;
        }
        if self.blocks.iter().any(|block| block.fixed.is_some()) {
            // Compute the floors that follow from the fixed offsets.
            self.dirty.extend(0..self.floor.len() as u32);
            self.is_dirty.fill(true);
        }
        let alive = self.settle();
        let outcome = if alive { self.search(manner, stop) } else { Outcome::Failed };
        self.nodes.clear();
        self.todo.clear();
        self.undo(0);
        outcome
    }

    fn search(&mut self, manner: &Manner, stop: &mut dyn FnMut(u64) -> bool) -> Outcome {
        self.split(0..self.floor.len(), ROOT);
        while let Some((part, parent)) = self.todo.pop() {
            if stop(self.work) {
                return Outcome::Stopped;
            }
            let key = self.hash(part.clone());
            let mut at = parent;
            if self.failed[key as usize % self.failed.len()] != key {
                let (section, blocks, bare) = self.choose(part.clone(), manner);
                at = self.nodes.len();
                let (trail, todo) = (self.trail.len(), self.todo.len());
                self.nodes.push(Node { parent, part, key, trail, todo, section, blocks, bare });
            }
            // Take the next choice that is not dead at once, in this node or in one of its ancestors.
            loop {
                let Some(node) = self.nodes.get_mut(at) else {
                    return Outcome::Failed;
                };
                let (parent, part, section) = (node.parent, node.part.clone(), node.section);
                let (trail, todo) = (node.trail, node.todo);
                let alive = if let Some(block) = node.blocks.pop() {
                    self.back(at, trail, todo);
                    self.put(block)
                } else if let Some(floor) = node.bare.take() {
                    self.back(at, trail, todo);
                    self.raise(section, floor) && self.settle()
                } else {
                    let slot = node.key as usize % self.failed.len();
                    self.failed[slot] = node.key;
                    at = parent;
                    continue;
                };
                if alive {
                    self.split(part, at);
                    break;
                }
            }
        }
        Outcome::Found
    }

    /// Goes back to a node.
    fn back(&mut self, node: usize, trail: usize, todo: usize) {
        self.nodes.truncate(node + 1);
        self.todo.truncate(todo);
        self.undo(trail);
    }

    /// Splits sections into independent parts, and puts those with open blocks on the list. The shortest is solved first.
    fn split(&mut self, sections: Range<usize>, parent: usize) {
        let first = self.todo.len();
        let mut start = sections.start;
        for section in sections.start + 1..=sections.end {
            if section == sections.end || self.joined[section] == 0 {
                if self.open[start] > 0 {
                    self.todo.push((start..section, parent));
                }
                start = section;
            }
        }
        self.todo[first..].sort_by_key(|(part, _)| std::cmp::Reverse(part.len()));
        self.work += sections.len() as u64;
    }

    fn hash(&self, part: Range<usize>) -> u64 {
        part.fold(0, |hash: u64, section| {
            let seen = self.begins[section] ^ mix(self.floor[section].wrapping_add((section as u64) << 48));
            hash.wrapping_add(mix(seen.wrapping_add(section as u64)))
        })
    }

    fn opened(&self, section: usize) -> &[u32] {
        &self.spanning[section][..self.open[section]]
    }

    /// The section of a basin with the fewest choices, the blocks that may be on its floor, and its new floor if none is.
    fn choose(&mut self, part: Range<usize>, manner: &Manner) -> (usize, Vec<u32>, Option<u64>) {
        let mut best = (u64::MAX, u64::MAX, part.start);
        let mut bare = None;
        let mut start = part.start;
        while start < part.end && best.0 > 0 {
            let floor = self.floor[start];
            let end = (start..part.end).find(|&section| self.floor[section] != floor).unwrap_or(part.end);
            let basin = start..end;
            start = end;
            let wall = |section: usize| self.floor[section] > floor;
            if (basin.start > part.start && !wall(basin.start - 1)) || (basin.end < part.end && !wall(basin.end)) {
                continue;
            }
            self.look_beside(basin.clone(), floor);
            for section in basin.clone() {
                let (mut ways, mut next) = (0, u64::MAX);
                for &block in self.opened(section) {
                    let low = self.low[block as usize];
                    if low == floor {
                        ways += 1;
                    } else {
                        next = next.min(low);
                    }
                }
                self.work += self.open[section] as u64;
                // A block may lie on another one beside the section, so the floor can rise to the lowest such top, but not less.
                next = next.min(floor.saturating_add(self.beside[section - basin.start]));
                let possible = next.saturating_add(self.rest[section]) <= self.capacity;
                ways += u64::from(possible);
                let deaths = match manner.focus {
                    Focus::Full => self.deaths[section] << 16,
                    Focus::Root => (self.deaths[section] << 32).isqrt(),
                    Focus::None => 1 << 16,
                };
                let key = (if ways == 1 { 0 } else { (ways << 48) / deaths }, floor, section);
                if key < best {
                    best = key;
                    bare = possible.then_some(next);
                }
            }
        }
        let (_, floor, section) = best;
        let on_floor = |&block: &u32| self.low[block as usize] == floor;
        let mut blocks: Vec<u32> = self.opened(section).iter().copied().filter(on_floor).collect();
        blocks.sort_unstable_by_key(|&block| std::cmp::Reverse(manner.rank[block as usize]));
        (section, blocks, bare)
    }

    /// Fills `beside`: per section of a basin, the least size of the blocks on the basin's floor that do not span the section.
    fn look_beside(&mut self, basin: Range<usize>, floor: u64) {
        let length = basin.len();
        self.beside.clear();
        self.beside.resize(3 * length + 2, u64::MAX);
        let (beside, ends) = self.beside.split_at_mut(length);
        let (ends, starts) = ends.split_at_mut(length + 1);
        for section in basin.clone() {
            for &block in &self.spanning[section][..self.open[section]] {
                let Block { span, size, .. } = &self.blocks[block as usize];
                if span.start == section && self.low[block as usize] == floor {
                    let (from, to) = (span.start - basin.start, span.end - basin.start);
                    starts[from] = starts[from].min(*size);
                    ends[to] = ends[to].min(*size);
                }
            }
        }
        let (mut left, mut right) = (u64::MAX, u64::MAX);
        for at in 0..length {
            left = left.min(ends[at]);
            beside[at] = beside[at].min(left);
            let at = length - 1 - at;
            beside[at] = beside[at].min(right);
            right = right.min(starts[at]);
        }
    }

    /// Puts a block at its `low`. Returns false if the node is dead.
    fn put(&mut self, block: u32) -> bool {
        let index = block as usize;
        let Block { span, size, .. } = self.blocks[index].clone();
        let offset = self.low[index];
        self.offsets[index] = offset;
        self.begins[span.start] ^= mix(index as u64 + 1);
        for section in span.clone() {
            self.open[section] -= 1;
            let (own, last) = (self.base[index] + section - span.start, self.open[section]);
            let (at, other) = (self.seat[own] as usize, self.spanning[section][last] as usize);
            self.spanning[section].swap(at, last);
            let others = self.base[other] + section - self.blocks[other].span.start;
            self.seat[others] = at as u32;
            self.seat[own] = last as u32;
            self.rest[section] -= size;
            self.joined[section] -= u32::from(section > span.start);
        }
        self.work += 4 * span.len() as u64;
        self.trail.push(Change::Put(block));
        span.into_iter().all(|section| self.raise(section, offset + size)) && self.settle()
    }

    /// Raises a section's floor, and the lows of the open blocks over it. Returns false if the node is dead.
    fn raise(&mut self, section: usize, floor: u64) -> bool {
        if self.open[section] == 0 || self.floor[section] >= floor {
            return true;
        }
        self.trail.push(Change::Floor(section as u32, self.floor[section]));
        self.floor[section] = floor;
        if floor + self.rest[section] > self.capacity {
            self.deaths[section] += 1;
            return false;
        }
        self.work += self.open[section] as u64;
        for at in 0..self.open[section] {
            let block = self.spanning[section][at] as usize;
            let old = self.low[block];
            if old >= floor {
                continue;
            }
            let low = floor.next_multiple_of(self.blocks[block].align);
            if low + self.blocks[block].size > self.capacity || self.blocks[block].fixed.is_some() {
                self.deaths[section] += 1;
                return false;
            }
            self.trail.push(Change::Low(block as u32, old));
            self.low[block] = low;
            self.work += self.blocks[block].span.len() as u64;
            for other in self.blocks[block].span.clone() {
                if self.floor[other] == old && !self.is_dirty[other] {
                    self.is_dirty[other] = true;
                    self.dirty.push(other as u32);
                }
            }
        }
        if !self.is_dirty[section] {
            self.is_dirty[section] = true;
            self.dirty.push(section as u32);
        }
        true
    }

    /// Brings floors and lows to their fixpoint. Returns false if the node is dead.
    fn settle(&mut self) -> bool {
        while let Some(section) = self.dirty.pop() {
            let section = section as usize;
            self.is_dirty[section] = false;
            self.work += self.open[section] as u64;
            let least = self.opened(section).iter().map(|&block| self.low[block as usize]).min().unwrap_or(0);
            if least > self.floor[section] && !self.raise(section, least) {
                return false;
            }
        }
        true
    }

    fn undo(&mut self, length: usize) {
        for section in self.dirty.drain(..) {
            self.is_dirty[section as usize] = false;
        }
        for change in self.trail.drain(length..).rev() {
            match change {
                Change::Floor(section, floor) => self.floor[section as usize] = floor,
                Change::Low(block, low) => self.low[block as usize] = low,
                Change::Put(block) => {
                    let Block { span, size, .. } = &self.blocks[block as usize];
                    self.begins[span.start] ^= mix(u64::from(block) + 1);
                    for section in span.clone() {
                        self.open[section] += 1;
                        self.rest[section] += size;
                        self.joined[section] += u32::from(section > span.start);
                    }
                }
            }
        }
    }
}
