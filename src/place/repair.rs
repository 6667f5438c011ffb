//! Repairs a placement by ejection: an item above the roof is moved to where it drives out the least.
//!
//! The items that it drives out are moved in turn.
//!
//! ```text
//!        +---+                 c reaches above the roof. If only b is in its way, c drives b out.
//!  - - - | c |- - - - roof     b moves to the lowest free offset, or drives out others.
//!    +---+---+--+
//!    |   b   |  |
//! ```
//!
//! The weight of an item grows each time it is driven out, so no two items drive each other out for ever. In a large problem that
//! is packed well, only a few items are too high, and each is repaired among the items around it.

use super::Problem;
use super::effort::Meter;
use super::neighbourhood::Clearing;
use super::sections::Sections;
use super::subproblem::Placed;
use std::collections::BinaryHeap;
use std::ops::Range;

/// A gain of less than one part in so many is not worth an attempt.
const LEAST: u64 = 4000;

/// An attempt first tries to gain the distance to a sufficient peak times two to the power of minus this.
const LARGEST: u32 = 3;

/// The goal of a repair, and the steps for it.
#[derive(Clone)]
pub(super) struct Goal {
    /// Only items within these sections are moved.
    pub sections: Range<usize>,
    /// A peak that is low enough.
    pub enough: u64,
    /// Steps for one item at first.
    pub attempt: u64,
    /// Steps for the repair, approximately.
    pub steps: u64,
}

/// Lowers the highest end of the items within the goal's sections. All other items stay.
pub(super) fn repair(problem: &Problem, time: &Sections, offsets: Vec<u64>, goal: Goal, meter: &mut Meter) -> Vec<u64> {
    let Goal { sections, enough, mut attempt, steps } = goal;
    let end = meter.spent().saturating_add(steps);
    let mut repair = Repair::new(problem, time, offsets, sections);
    meter.spend(64 * time.spans.len() as u64);
    let mut part = LARGEST;
    let mut peak = repair.peak();
    while peak > enough && meter.spent() < end && !meter.is_over() {
        let roof = peak - ((peak - enough) >> part).max(1);
        let done = repair.lower(roof, attempt, end, meter);
        peak = repair.peak();
        if done {
            part = LARGEST.max(part - 1);
        } else if (peak - enough) >> part > peak / LEAST {
            part += 1;
        } else {
            (part, attempt) = (LARGEST, attempt.saturating_mul(4));
        }
    }
    repair.offsets
}

/// A placement that is being repaired.
struct Repair<'a> {
    problem: &'a Problem,
    time: &'a Sections,
    /// Only items within these sections are moved.
    home: Range<usize>,
    offsets: Vec<u64>,
    placed: Placed<'a>,
    /// Per item, how often it was driven out.
    driven: Vec<u32>,
    /// The items without a place, by bytes times sections.
    pool: BinaryHeap<(u128, u32)>,
    /// The items that this attempt moved, and their old offsets.
    moved: Vec<(u32, u64)>,
    /// The items that share a section with the one that is moved, by start.
    near: Vec<Near>,
    /// Indices into `near`, by end.
    ends: Vec<u32>,
}

/// Approximate steps for moving an item that shares sections with so many others.
pub(super) fn move_steps(others: u64) -> u64 {
    64 + 40 * others
}

/// The weight of the items in the way: the number of those that must stay, and the weight of the others.
type Weight = (u32, u128);

/// An item that may be in the way.
struct Near {
    start: u64,
    end: u64,
    item: u32,
    weight: Weight,
}

impl<'a> Repair<'a> {
    fn new(problem: &'a Problem, time: &'a Sections, offsets: Vec<u64>, home: Range<usize>) -> Repair<'a> {
        let mut repair = Repair {
            problem,
            time,
            home,
            offsets,
            placed: Placed::new(time),
            driven: vec![0; time.spans.len()],
            pool: BinaryHeap::new(),
            moved: Vec::new(),
            near: Vec::new(),
            ends: Vec::new(),
        };
        (0..time.spans.len()).filter(|&item| !time.spans[item].is_empty()).for_each(|item| repair.placed.insert(item));
        repair
    }

    /// True if the item may be moved.
    fn is_free(&self, item: usize) -> bool {
        let Range { start, end } = self.time.spans[item];
        start < end && self.home.start <= start && end <= self.home.end
    }

    fn top(&self, item: usize) -> u64 {
        self.offsets[item] + self.problem.size(item)
    }

    fn area(&self, item: usize) -> u128 {
        u128::from(self.problem.size(item)) * self.time.spans[item].len() as u128
    }

    fn peak(&self) -> u64 {
        let free = (0..self.offsets.len()).filter(|&item| self.is_free(item));
        free.map(|item| self.top(item)).max().unwrap_or(0)
    }

    /// Brings all items under a roof, the earliest first. Returns false if an item could not be brought there.
    ///
    /// The roof is then raised for the items that follow, so that the gains so far are kept.
    fn lower(&mut self, mut roof: u64, attempt: u64, end: u64, meter: &mut Meter) -> bool {
        let reaches = |&item: &usize| self.is_free(item) && self.top(item) > roof;
        let mut over: Vec<usize> = (0..self.offsets.len()).filter(reaches).collect();
        over.sort_by_key(|&item| self.time.spans[item].start);
        meter.spend(4 * self.offsets.len() as u64);
        let mut done = true;
        for item in over {
            while self.top(item) > roof && meter.spent() < end && !meter.is_over() {
                let end = |meter: &Meter| meter.spent().saturating_add(attempt);
                if !self.bring(item, roof, end(meter), meter) && !self.clear(item, roof, end(meter), meter) {
                    done = false;
                    let raised = roof.midpoint(self.top(item));
                    // In a small problem every gain is more than one part in `LEAST`, so look for the end of all gains, too.
                    if raised == roof || self.top(item) - raised < raised / LEAST {
                        return false;
                    }
                    roof = raised;
                }
            }
        }
        done
    }

    /// Brings an item under the roof before the meter reaches `end`. On failure, it restores all offsets.
    fn bring(&mut self, item: usize, roof: u64, end: u64, meter: &mut Meter) -> bool {
        self.moved.clear();
        self.take(item);
        while let Some((area, item)) = self.pool.pop() {
            if meter.spent() >= end || meter.is_over() || !self.put(item as usize, roof, meter) {
                self.pool.push((area, item));
                self.restore();
                return false;
            }
        }
        true
    }

    /// Brings an item and the items around it under the roof before the meter reaches `end`. On failure, nothing changes.
    fn clear(&mut self, item: usize, roof: u64, end: u64, meter: &mut Meter) -> bool {
        let clearing = Clearing { problem: self.problem, time: self.time, home: &self.home, roof, end };
        clearing.clear(&self.placed, &mut self.offsets, item, meter)
    }

    fn take(&mut self, item: usize) {
        self.moved.push((item as u32, self.offsets[item]));
        self.placed.remove(item);
        self.pool.push((self.area(item), item as u32));
    }

    fn restore(&mut self) {
        self.pool.drain().for_each(|(_, item)| self.placed.insert(item as usize));
        for &(item, offset) in self.moved.iter().rev() {
            self.offsets[item as usize] = offset;
        }
    }

    /// Puts an item where it drives out the least. Returns false if items that must stay are everywhere in its way.
    fn put(&mut self, item: usize, roof: u64, meter: &mut Meter) -> bool {
        let Some(offset) = self.cheapest(item, roof, meter) else { return false };
        self.offsets[item] = offset;
        let (top, near) = (self.top(item), std::mem::take(&mut self.near));
        for other in near.iter().take_while(|other| other.start < top).filter(|other| offset < other.end) {
            self.driven[other.item as usize] += 1;
            self.take(other.item as usize);
        }
        self.near = near;
        self.placed.insert(item);
        true
    }

    /// The offset under the roof with the least weight in the way; the lowest of equals.
    ///
    /// It is directly above or below a neighbour, at 0, or directly under the roof. `None` if items that must stay are in the way.
    fn cheapest(&mut self, item: usize, roof: u64, meter: &mut Meter) -> Option<u64> {
        let (size, align) = (self.problem.size(item), self.problem.items()[item].align.max(self.problem.align()));
        let down = |offset: u64| offset & !(align - 1);
        let highest = roof.checked_sub(size).map(down)?;
        let mut near = std::mem::take(&mut self.near);
        near.clear();
        self.placed.meeting(&self.time.spans[item], &mut |other| near.push(self.near(other)));
        near.sort_unstable_by_key(|other| (other.start, other.item));
        self.ends.clear();
        self.ends.extend(0..near.len() as u32);
        self.ends.sort_unstable_by_key(|&at| near[at as usize].end);
        meter.spend(move_steps(near.len() as u64));
        let above = self.ends.iter().map(|&at| near[at as usize].end.next_multiple_of(align));
        let below = near.iter().filter_map(|other| other.start.checked_sub(size).map(down));
        let above = std::iter::once(0).chain(above).take_while(|&at| at <= highest);
        let below = below.take_while(|&at| at < highest).chain([highest]);
        let ((held, _), offset) =
            lightest(above, size, &near, &self.ends).min(lightest(below, size, &near, &self.ends));
        self.near = near;
        (held == 0).then_some(offset)
    }

    fn near(&self, item: usize) -> Near {
        // This does not overflow: the sum of bytes has 64 bits, sections and counts have 32 each.
        let weight =
            if self.is_free(item) { (0, self.area(item) * (1 + u128::from(self.driven[item]))) } else { (1, 0) };
        Near { start: self.offsets[item], end: self.top(item), item: item as u32, weight }
    }
}

/// The least weight in the way at one of some rising offsets, and that offset. An item is in the way if it overlaps `size` bytes
/// from the offset on.
fn lightest(offsets: impl Iterator<Item = u64>, size: u64, near: &[Near], ends: &[u32]) -> (Weight, u64) {
    let mut starts = near.iter().peekable();
    let mut ends = ends.iter().map(|&at| &near[at as usize]).peekable();
    let mut inside: Weight = (0, 0);
    let weigh = |offset: u64| {
        while let Some(Near { weight: (held, free), .. }) = starts.next_if(|other| other.start < offset + size) {
            inside = (inside.0 + held, inside.1 + free);
        }
        while let Some(Near { weight: (held, free), .. }) = ends.next_if(|other| other.end <= offset) {
            inside = (inside.0 - held, inside.1 - free);
        }
        (inside, offset)
    };
    offsets.map(weigh).min().unwrap_or(((u32::MAX, 0), 0))
}

#[cfg(test)]
mod tests {
    use super::super::Item;
    use super::super::effort::Effort;
    use super::*;

    #[test]
    fn what_cannot_be_lowered_by_a_unit_is_given_up() {
        let item = |size| Item { lower: 0, upper: 1, size, align: 1 };
        let problem = Problem::new(vec![item(2), item(3)], 1).expect("sizes are small");
        let time = Sections::new(&problem);
        let mut repair = Repair::new(&problem, &time, vec![0, 2], 0..1);
        let mut meter = Meter::new(Effort::Steps(1_000_000));
        assert!(!repair.lower(4, 10_000, u64::MAX, &mut meter));
        assert!(!meter.is_over(), "{}", meter.spent());
        assert_eq!(repair.offsets, [0, 2]);
    }
}
