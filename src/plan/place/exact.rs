//! Exact search: is there a placement within a capacity?
//!
//! Only *canonical* placements count: each item lies on the ground or on another item. They are built from the bottom up, so a node of
//! the search is a skyline and the items that are still open.
//!
//! ```text
//! floor[s]   no open item can begin below this in section s: the least `low` of those that span s
//! low[i]     item i cannot begin below this: the highest floor of its sections
//! rest[s]    bytes of the open items that span s;  floor[s] + rest[s] <= capacity, or the node is dead
//! ```
//!
//! The first two are each other's fixpoint, and hold what no branch can change: a hole that is too narrow for every open item is closed at once.
//! A node branches over one section in a stretch of the skyline between two higher walls: an item that lies there, or none, and then
//! the floor rises to the lowest place at which anything could. Among such sections the one with the fewest ways is taken. Stretches of
//! time that no open item connects are solved one after the other, and what was shown to fail is remembered by its hash.

use std::ops::Range;

/// How a search ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Outcome {
    /// All items are placed.
    Found,
    /// No canonical placement exists.
    Failed,
    /// The limit came first.
    Stopped,
}

/// What is undone when the search steps back.
enum Change {
    Floor(u32, u64),
    Low(u32, u64),
    Placed(u32),
}

/// An item of the search.
#[derive(Debug, Clone)]
pub(super) struct Block {
    /// Its sections; not empty.
    pub span: Range<usize>,
    /// Its bytes; not zero.
    pub size: u64,
    /// A power of two that divides its offset.
    pub align: u64,
}

/// The state of a search.
pub(super) struct Search {
    blocks: Vec<Block>,
    /// Per block, its offset once it is placed.
    pub offsets: Vec<u64>,
    /// Blocks that come first among equals have low ranks.
    pub rank: Vec<u32>,
    capacity: u64,
    low: Vec<u64>,
    floor: Vec<u64>,
    rest: Vec<u64>,
    /// Per section, the blocks that span it: first the open ones, so many as `open` says.
    spanning: Vec<Vec<u32>>,
    open: Vec<usize>,
    /// Per block and section of it, from `base`, where the block is in the section's list.
    place: Vec<u32>,
    base: Vec<usize>,
    /// Per section, how many open blocks span it and the section before.
    joined: Vec<u32>,
    /// Per section, a hash of the open blocks that begin in it.
    begins: Vec<u64>,
    trail: Vec<Change>,
    dirty: Vec<u32>,
    is_dirty: Vec<bool>,
    failed: Vec<u64>,
    /// Nodes that were visited, and after how many to stop.
    pub nodes: u64,
    pub limit: u64,
    pub random: u64,
}

/// What the search does at a node.
struct Branch {
    section: usize,
    /// The blocks that may lie in the section, in the order in which they are tried.
    blocks: Vec<u32>,
    /// The floor that the section gets when none of them does, if that leads anywhere.
    bare: Option<u64>,
}

pub(super) fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

impl Search {
    pub fn new(sections: usize, blocks: Vec<Block>) -> Search {
        let mut spanning = vec![Vec::new(); sections];
        let (mut place, mut base) = (Vec::new(), Vec::new());
        let (mut rest, mut joined, mut begins) = (vec![0; sections], vec![0; sections], vec![0; sections]);
        for (index, block) in blocks.iter().enumerate() {
            base.push(place.len());
            begins[block.span.start] ^= mix(index as u64 + 1);
            for section in block.span.clone() {
                place.push(spanning[section].len() as u32);
                spanning[section].push(index as u32);
                rest[section] += block.size;
                joined[section] += u32::from(section > block.span.start);
            }
        }
        let n = blocks.len();
        Search {
            offsets: vec![0; n],
            rank: (0..n as u32).collect(),
            capacity: 0,
            low: vec![0; n],
            floor: vec![0; sections],
            rest,
            open: spanning.iter().map(Vec::len).collect(),
            spanning,
            place,
            base,
            joined,
            begins,
            trail: Vec::new(),
            dirty: Vec::new(),
            is_dirty: vec![false; sections],
            failed: vec![0; 1 << 18],
            nodes: 0,
            limit: 0,
            random: 0,
            blocks,
        }
    }

    /// Looks for a placement within the capacity, for so many nodes.
    pub fn run(&mut self, capacity: u64, limit: u64) -> Outcome {
        if capacity != self.capacity {
            self.failed.fill(0);
            self.capacity = capacity;
        }
        self.limit = self.nodes + limit;
        if self.rest.iter().any(|&rest| rest > capacity) {
            return Outcome::Failed;
        }
        let outcome = self.solve(0..self.floor.len());
        if outcome == Outcome::Found {
            self.undo(0);
        }
        outcome
    }

    /// Solves these sections, which no open block leaves. Leaves the state as it was unless it succeeds.
    fn solve(&mut self, sections: Range<usize>) -> Outcome {
        let mark = self.trail.len();
        let mut parts = Vec::new();
        let mut start = sections.start;
        for section in sections.start + 1..=sections.end {
            if section == sections.end || self.joined[section] == 0 {
                if self.open[start] > 0 {
                    parts.push(start..section);
                }
                start = section;
            }
        }
        parts.sort_by_key(Range::len);
        for part in parts {
            let outcome = self.branch(part);
            if outcome != Outcome::Found {
                self.undo(mark);
                return outcome;
            }
        }
        Outcome::Found
    }

    fn branch(&mut self, part: Range<usize>) -> Outcome {
        self.nodes += 1;
        if self.nodes > self.limit {
            return Outcome::Stopped;
        }
        let key = self.hash(part.clone());
        let slot = key as usize % self.failed.len();
        if self.failed[slot] == key {
            return Outcome::Failed;
        }
        let branch = self.choose(part.clone());
        let mark = self.trail.len();
        for block in branch.blocks {
            if self.put(block) {
                let outcome = self.solve(part.clone());
                if outcome != Outcome::Failed {
                    return outcome;
                }
            }
            self.undo(mark);
        }
        if let Some(floor) = branch.bare {
            if self.raise(branch.section, floor) && self.settle() {
                let outcome = self.solve(part.clone());
                if outcome != Outcome::Failed {
                    return outcome;
                }
            }
            self.undo(mark);
        }
        self.failed[slot] = key;
        Outcome::Failed
    }

    fn hash(&self, part: Range<usize>) -> u64 {
        part.fold(0, |hash: u64, section| {
            let floor = if self.open[section] > 0 { self.floor[section] } else { 0 };
            let own = self.begins[section] ^ mix(floor.wrapping_add((section as u64) << 48));
            hash.wrapping_add(mix(own.wrapping_add(section as u64)))
        })
    }

    fn opened(&self, section: usize) -> &[u32] {
        &self.spanning[section][..self.open[section]]
    }

    /// The section with the fewest ways to go on, of those in the local lows of the skyline.
    fn choose(&self, part: Range<usize>) -> Branch {
        let wall = |section: usize| self.floor[section];
        let mut best: (usize, u64, usize) = (usize::MAX, 0, 0);
        let mut bare = None;
        let mut start = part.start;
        while start < part.end {
            let floor = self.floor[start];
            let mut end = start + 1;
            while end < part.end && self.floor[end] == floor {
                end += 1;
            }
            let stretch = start..end;
            let low = (start == part.start || wall(start - 1) > floor) && (end == part.end || wall(end) > floor);
            start = end;
            if !low {
                continue;
            }
            // By section: the least size of the blocks in the stretch that end before it or begin after it.
            let mut beside = vec![u64::MAX; stretch.len()];
            let mut least_by_end = vec![u64::MAX; stretch.len() + 1];
            let mut least_by_start = vec![u64::MAX; stretch.len() + 1];
            for section in stretch.clone() {
                for &block in self.opened(section) {
                    let b = &self.blocks[block as usize];
                    if b.span.start == section && self.low[block as usize] == floor {
                        let (s, e) = (b.span.start - stretch.start, b.span.end - stretch.start);
                        least_by_start[s] = least_by_start[s].min(b.size);
                        least_by_end[e] = least_by_end[e].min(b.size);
                    }
                }
            }
            let mut least = u64::MAX;
            for at in 0..stretch.len() {
                least = least.min(least_by_end[at]);
                beside[at] = least;
            }
            least = u64::MAX;
            for at in (0..stretch.len()).rev() {
                beside[at] = beside[at].min(least);
                least = least.min(least_by_start[at]);
            }
            for section in stretch.clone() {
                let (mut ways, mut next) = (0, u64::MAX);
                for &block in self.opened(section) {
                    if self.low[block as usize] == floor {
                        ways += 1;
                    } else {
                        next = next.min(self.low[block as usize]);
                    }
                }
                next = next.min(floor.saturating_add(beside[section - stretch.start]));
                let possible = next.saturating_add(self.rest[section]) <= self.capacity;
                let key = (ways + usize::from(possible), floor, section);
                if key < best {
                    best = key;
                    bare = possible.then_some(next);
                }
            }
        }
        let (_, floor, section) = best;
        let mut blocks: Vec<u32> = self.opened(section).iter().copied().filter(|&b| self.low[b as usize] == floor).collect();
        blocks.sort_unstable_by_key(|&block| self.rank[block as usize]);
        Branch { section, blocks, bare }
    }

    /// Places a block at its `low`. What follows from it may show that it leads nowhere.
    fn put(&mut self, block: u32) -> bool {
        let index = block as usize;
        let offset = self.low[index];
        self.offsets[index] = offset;
        let Block { span, size, .. } = self.blocks[index].clone();
        self.begins[span.start] ^= mix(index as u64 + 1);
        for section in span.clone() {
            let at = self.place[self.base[index] + section - span.start] as usize;
            self.open[section] -= 1;
            let last = self.open[section];
            let other = self.spanning[section][last];
            self.spanning[section].swap(at, last);
            self.place[self.base[index] + section - span.start] = last as u32;
            let other = other as usize;
            self.place[self.base[other] + section - self.blocks[other].span.start] = if other == index { last } else { at } as u32;
            self.rest[section] -= size;
            self.joined[section] -= u32::from(section > span.start);
        }
        self.trail.push(Change::Placed(block));
        span.into_iter().all(|section| self.raise(section, offset + size)) && self.settle()
    }

    /// Raises a floor, and the open blocks over it.
    fn raise(&mut self, section: usize, floor: u64) -> bool {
        if self.open[section] == 0 || self.floor[section] >= floor {
            return true;
        }
        self.trail.push(Change::Floor(section as u32, self.floor[section]));
        self.floor[section] = floor;
        if floor + self.rest[section] > self.capacity {
            return false;
        }
        for at in 0..self.open[section] {
            let block = self.spanning[section][at] as usize;
            let old = self.low[block];
            if old >= floor {
                continue;
            }
            let low = floor.next_multiple_of(self.blocks[block].align);
            if low + self.blocks[block].size > self.capacity {
                return false;
            }
            self.trail.push(Change::Low(block as u32, old));
            self.low[block] = low;
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

    /// Brings floors and lows to their fixpoint.
    fn settle(&mut self) -> bool {
        while let Some(section) = self.dirty.pop() {
            let section = section as usize;
            self.is_dirty[section] = false;
            let least = self.opened(section).iter().map(|&b| self.low[b as usize]).min().unwrap_or(0);
            if least > self.floor[section] && !self.raise(section, least) {
                return false;
            }
        }
        true
    }

    fn undo(&mut self, mark: usize) {
        for section in self.dirty.drain(..) {
            self.is_dirty[section as usize] = false;
        }
        while self.trail.len() > mark {
            match self.trail.pop().expect("it is longer than the mark") {
                Change::Floor(section, floor) => self.floor[section as usize] = floor,
                Change::Low(block, low) => self.low[block as usize] = low,
                Change::Placed(block) => {
                    let Block { span, size, .. } = self.blocks[block as usize].clone();
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
