//! Repair by ejection: what reaches above a roof is put where it drives out the least, and what it drives out is put elsewhere in turn.
//!
//! ```text
//!        +---+                 c reaches above the roof. Where only b is in its way, it drives b out;
//!  - - - | c |- - - - roof     b goes to the lowest room there is, or drives out others.
//!    +---+---+--+
//!    |   b   |  |
//! ```
//!
//! An item weighs more each time that it is driven out, so no two take each other's place for ever. In a large problem that was packed
//! well only a few places are too high, and each is mended among the items around it.

use super::core::Placed;
use super::effort::Meter;
use super::time::Timeline;
use super::window::clear;
use super::{Problem, Solution};
use std::collections::BinaryHeap;

/// A gain of less than one part in so many is not worth an attempt.
const LEAST: u64 = 4000;

/// Of the distance to what is enough, two to the power of minus this is tried at once.
const LARGEST: u32 = 3;

/// Lowers the peak in about so many steps, an `attempt` of them for an item at first.
pub(super) fn repair(
    problem: &Problem,
    time: &Timeline,
    best: &mut Solution,
    enough: u64,
    mut attempt: u64,
    steps: u64,
    meter: &mut Meter,
) {
    let end = meter.spent().saturating_add(steps);
    let mut repair = Repair::new(problem, time, best);
    meter.spend(64 * time.spans.len() as u64);
    let mut part = LARGEST;
    while best.peak > enough && meter.spent() < end && !meter.is_over() {
        let roof = best.peak - ((best.peak - enough) >> part).max(1);
        let done = repair.lower(roof, attempt, end, meter);
        best.peak = repair.peak();
        if done {
            part = LARGEST.max(part - 1);
        } else if (best.peak - enough) >> part > best.peak / LEAST {
            part += 1;
        } else {
            (part, attempt) = (LARGEST, attempt.saturating_mul(4));
        }
    }
    best.offsets = repair.offsets;
}

/// A placement that is being repaired.
struct Repair<'a> {
    problem: &'a Problem,
    time: &'a Timeline,
    offsets: Vec<u64>,
    placed: Placed<'a>,
    /// By item, how often it was driven out.
    driven: Vec<u32>,
    /// What is to be put somewhere, by bytes times sections.
    pool: BinaryHeap<(u128, u32)>,
    /// What was moved in this attempt, and from where.
    moved: Vec<(u32, u64)>,
    /// Where those begin and end that share time with what is put somewhere.
    starts: Vec<(u64, u32)>,
    ends: Vec<(u64, u32)>,
}

impl<'a> Repair<'a> {
    fn new(problem: &'a Problem, time: &'a Timeline, solution: &Solution) -> Repair<'a> {
        let mut repair = Repair {
            problem,
            time,
            offsets: solution.offsets.clone(),
            placed: Placed::new(time),
            driven: vec![0; time.spans.len()],
            pool: BinaryHeap::new(),
            moved: Vec::new(),
            starts: Vec::new(),
            ends: Vec::new(),
        };
        (0..time.spans.len()).filter(|&item| !time.spans[item].is_empty()).for_each(|item| repair.placed.insert(item));
        repair
    }

    fn is_sized(&self, item: usize) -> bool {
        !self.time.spans[item].is_empty()
    }

    fn top(&self, item: usize) -> u64 {
        self.offsets[item] + self.problem.size(item)
    }

    fn area(&self, item: usize) -> u128 {
        u128::from(self.problem.size(item)) * self.time.spans[item].len() as u128
    }

    fn peak(&self) -> u64 {
        let sized = (0..self.offsets.len()).filter(|&item| self.is_sized(item));
        sized.map(|item| self.top(item)).max().unwrap_or(0)
    }

    /// Brings all items under a roof, the earliest first. Where that cannot be done the roof is raised, so that what was gained stays.
    /// Whether that was never so.
    fn lower(&mut self, mut roof: u64, attempt: u64, end: u64, meter: &mut Meter) -> bool {
        let reaches = |&item: &usize| self.is_sized(item) && self.top(item) > roof;
        let mut over: Vec<usize> = (0..self.offsets.len()).filter(reaches).collect();
        over.sort_by_key(|&item| self.time.spans[item].start);
        meter.spend(4 * self.offsets.len() as u64);
        let mut done = true;
        for item in over {
            while self.top(item) > roof && meter.spent() < end && !meter.is_over() {
                let end = |meter: &Meter| meter.spent().saturating_add(attempt);
                if !self.bring(item, roof, end(meter), meter) && !self.clear(item, roof, end(meter), meter) {
                    done = false;
                    roof = roof.midpoint(self.top(item));
                    if self.top(item) - roof < roof / LEAST {
                        return false;
                    }
                }
            }
        }
        done
    }

    /// Brings an item under the roof until so many steps were spent, or leaves all as it was.
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

    /// Brings an item and all that is around it under the roof until so many steps were spent, or leaves all as it was.
    fn clear(&mut self, item: usize, roof: u64, end: u64, meter: &mut Meter) -> bool {
        clear(self.problem, self.time, &self.placed, &mut self.offsets, item, roof, end, meter)
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

    /// Puts an item where it drives out the least. False if there is no room for it even alone.
    fn put(&mut self, item: usize, roof: u64, meter: &mut Meter) -> bool {
        let Some(offset) = self.cheapest(item, roof, meter) else { return false };
        self.offsets[item] = offset;
        let (top, starts) = (self.top(item), std::mem::take(&mut self.starts));
        for &(_, other) in starts.iter().take_while(|&&(start, _)| start < top) {
            if offset < self.top(other as usize) {
                self.driven[other as usize] += 1;
                self.take(other as usize);
            }
        }
        self.starts = starts;
        self.placed.insert(item);
        true
    }

    /// The offset under the roof at which the least weight is in the way, the lowest among equals: beside a neighbour, on the ground or
    /// right under the roof.
    fn cheapest(&mut self, item: usize, roof: u64, meter: &mut Meter) -> Option<u64> {
        let (size, align) = (self.problem.size(item), self.problem.items()[item].align.max(self.problem.align()));
        let down = |offset: u64| offset & !(align - 1);
        let highest = roof.checked_sub(size).map(down)?;
        let (mut starts, mut ends) = (std::mem::take(&mut self.starts), std::mem::take(&mut self.ends));
        starts.clear();
        self.placed.meeting(&self.time.spans[item], &mut |other| starts.push((self.offsets[other], other as u32)));
        starts.sort_unstable();
        ends.clear();
        ends.extend(starts.iter().map(|&(_, other)| (self.top(other as usize), other)));
        ends.sort_unstable();
        meter.spend(64 + 40 * starts.len() as u64);
        let above = ends.iter().map(|&(end, _)| end.next_multiple_of(align));
        let below = starts.iter().filter_map(|&(start, _)| start.checked_sub(size).map(down));
        let above =
            self.lightest(std::iter::once(0).chain(above).take_while(|&at| at <= highest), size, &starts, &ends);
        let below = self.lightest(below.take_while(|&at| at < highest).chain([highest]), size, &starts, &ends);
        (self.starts, self.ends) = (starts, ends);
        Some(above.min(below).1)
    }

    /// Of rising offsets the one with the least weight in the way, and that: what begins below the end and does not end by the offset.
    fn lightest(
        &self,
        offsets: impl Iterator<Item = u64>,
        size: u64,
        starts: &[(u64, u32)],
        ends: &[(u64, u32)],
    ) -> (u128, u64) {
        let (mut starts, mut ends) = (starts.iter().peekable(), ends.iter().peekable());
        // All bytes together have 64 bits, sections and drives 32 each.
        let weight = |other: u32| self.area(other as usize) * (1 + u128::from(self.driven[other as usize]));
        let mut inside = 0;
        let weigh = |offset: u64| {
            while let Some(&(_, other)) = starts.next_if(|&&(start, _)| start < offset + size) {
                inside += weight(other);
            }
            while let Some(&(_, other)) = ends.next_if(|&&(end, _)| end <= offset) {
                inside -= weight(other);
            }
            (inside, offset)
        };
        offsets.map(weigh).min().unwrap_or((u128::MAX, 0))
    }
}
