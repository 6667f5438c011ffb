//! A subproblem holds the busiest sections of a problem. They are placed first and exactly, and the other items around them.

use super::effort::Meter;
use super::exact::Block;
use super::sections::Sections;
use super::{Problem, Solution};
use std::collections::VecDeque;
use std::ops::Range;

/// Problems of at most this many items are never cut down.
const WHOLE: usize = 1000;

/// The items of some sections of a problem.
pub(super) struct Subproblem {
    /// Number of sections of these items. They have their own numbering.
    pub sections: usize,
    /// The items as blocks for the exact search.
    pub blocks: Vec<Block>,
    /// Per block, its item.
    pub items: Vec<u32>,
    /// True if this is the whole problem.
    pub whole: bool,
}

impl Subproblem {
    /// The busiest sections, as many as can be placed in about `steps` steps.
    pub fn new(problem: &Problem, time: &Sections, steps: u64) -> Subproblem {
        let (mut births, mut deaths) = (vec![0; time.live.len()], vec![0; time.live.len() + 1]);
        for span in time.spans.iter().filter(|span| !span.is_empty()) {
            births[span.start] += 1;
            deaths[span.end] += 1;
        }
        let mut now: u64 = 0;
        let open: Vec<u64> = births
            .iter()
            .zip(&deaths)
            .map(|(births, deaths)| {
                now = now + births - deaths;
                now
            })
            .collect();
        let count = problem.items().len();
        let mut busiest: Vec<usize> = (0..time.live.len()).collect();
        busiest.sort_by_key(|&section| std::cmp::Reverse(time.live[section]));
        // A descent of the search looks at all cells, pairs of a section and a block, before each block. A block begins in one
        // of the sections, or spans two of them.
        let (mut cells, mut blocks) = (0, 0);
        let taken = busiest.iter().take_while(|&&section| {
            cells += open[section];
            blocks = open[section].max(blocks + births[section]);
            count <= WHOLE || cells * blocks <= steps
        });
        let taken = taken.count();
        // `before[s]` counts the chosen sections before s.
        let mut before = vec![0; time.live.len() + 1];
        busiest[..taken].iter().for_each(|&section| before[section + 1] = 1);
        (1..before.len()).for_each(|section| before[section] += before[section - 1]);
        let taken_by = |index: &usize| before[time.spans[*index].start] < before[time.spans[*index].end];
        let items: Vec<u32> = (0..count).filter(taken_by).map(|index| index as u32).collect();
        // Two items may share a section, but none that was chosen. So the sections are derived again from the items.
        let part = items.iter().map(|&index| problem.items()[index as usize]).collect();
        let own = Sections::new(&Problem { items: part, align: problem.align(), capacity: None });
        let block = |(&index, span): (&u32, &Range<usize>)| problem.block(index as usize, span.clone(), None);
        let blocks = items.iter().zip(&own.spans).map(block).collect();
        Subproblem { sections: own.live.len(), blocks, items, whole: taken == time.live.len() }
    }

    /// Places the other items of the problem around the blocks. The peak is below `roof`.
    pub fn complete(
        &self,
        problem: &Problem,
        time: &Sections,
        offsets: &[u64],
        roof: u64,
        meter: &mut Meter,
    ) -> Option<Solution> {
        let mut fixed = vec![None; problem.items().len()];
        self.items.iter().zip(offsets).for_each(|(&item, &offset)| fixed[item as usize] = Some(offset));
        let busy = time.busiest();
        let weight = |item: u32| {
            let Range { start, end } = &time.spans[item as usize];
            (busy[item as usize], u128::from(problem.size(item as usize)) * (end - start) as u128)
        };
        let open = (0..fixed.len() as u32).filter(|&item| fixed[item as usize].is_none());
        let mut order: VecDeque<u32> = open.filter(|&item| !time.spans[item as usize].is_empty()).collect();
        order.make_contiguous().sort_by_cached_key(|&item| std::cmp::Reverse(weight(item)));
        // An item that does not fit goes first in the next attempt.
        for _ in 0..8 {
            match fill(problem, time, fixed.clone(), &order, roof, meter) {
                Ok(solution) => return Some(solution),
                Err(Some(at)) => {
                    let item = order.remove(at).expect("it is one of them");
                    order.push_front(item);
                }
                Err(None) => return None,
            }
        }
        None
    }
}

/// Puts items one after the other at the lowest free offset among the `fixed` ones.
///
/// The error is the position in `order` of the item that does not fit below the roof, or `None` if the time is up.
pub fn fill(
    problem: &Problem,
    time: &Sections,
    fixed: Vec<Option<u64>>,
    order: &VecDeque<u32>,
    roof: u64,
    meter: &mut Meter,
) -> Result<Solution, Option<usize>> {
    let mut offsets: Vec<u64> = fixed.iter().map(|offset| offset.unwrap_or(0)).collect();
    let mut placed = Placed::new(time);
    (0..fixed.len()).filter(|&item| fixed[item].is_some()).for_each(|item| placed.insert(item));
    let mut found: Vec<(u64, u64)> = Vec::new();
    for (at, &item) in order.iter().enumerate() {
        let index = item as usize;
        let (size, align) = (problem.size(index), problem.items()[index].align.max(problem.align()));
        found.clear();
        placed.meeting(&time.spans[index], &mut |other| {
            found.push((offsets[other], offsets[other] + problem.size(other)));
        });
        found.sort_unstable();
        let mut offset: u64 = 0;
        for &(start, end) in &found {
            if offset + size <= start {
                break;
            }
            offset = offset.max(end.next_multiple_of(align));
        }
        if meter.spend(64 + 16 * found.len() as u64) {
            return Err(None);
        }
        if offset + size >= roof {
            return Err(Some(at));
        }
        offsets[index] = offset;
        placed.insert(index);
    }
    let solution = Solution::new(problem, offsets);
    if solution.peak < roof { Ok(solution) } else { Err(None) }
}

/// The items that have offsets, in a tree by first section. It finds the items that share a section with a range.
pub(super) struct Placed<'a> {
    time: &'a Sections,
    /// Items by first section.
    items: Vec<u32>,
    /// Per item, its position in `items`.
    at: Vec<u32>,
    leaves: usize,
    /// Per node, the greatest end of the items below it.
    ends: Vec<u32>,
}

impl<'a> Placed<'a> {
    pub fn new(time: &'a Sections) -> Placed<'a> {
        let mut items: Vec<u32> =
            (0..time.spans.len() as u32).filter(|&item| !time.spans[item as usize].is_empty()).collect();
        items.sort_by_key(|&item| time.spans[item as usize].start);
        let mut at = vec![0; time.spans.len()];
        items.iter().enumerate().for_each(|(place, &item)| at[item as usize] = place as u32);
        let leaves = items.len().next_power_of_two();
        Placed { time, items, at, leaves, ends: vec![0; 2 * leaves] }
    }

    pub fn insert(&mut self, item: usize) {
        let end = self.time.spans[item].end as u32;
        let mut node = self.leaves + self.at[item] as usize;
        while node > 0 && self.ends[node] < end {
            self.ends[node] = end;
            node /= 2;
        }
    }

    pub fn remove(&mut self, item: usize) {
        let mut node = self.leaves + self.at[item] as usize;
        self.ends[node] = 0;
        while node > 1 {
            node /= 2;
            self.ends[node] = self.ends[2 * node].max(self.ends[2 * node + 1]);
        }
    }

    /// Calls `found` with each item that spans one of these sections.
    pub fn meeting(&self, sections: &Range<usize>, found: &mut dyn FnMut(usize)) {
        let before = self.items.partition_point(|&item| self.time.spans[item as usize].start < sections.end);
        self.search(1, 0..self.leaves, before, sections.start as u32, found);
    }

    fn search(&self, node: usize, below: Range<usize>, before: usize, start: u32, found: &mut dyn FnMut(usize)) {
        if below.start >= before || self.ends[node] <= start {
            return;
        }
        if node >= self.leaves {
            found(self.items[below.start] as usize);
            return;
        }
        let middle = below.start.midpoint(below.end);
        self.search(2 * node, below.start..middle, before, start, found);
        self.search(2 * node + 1, middle..below.end, before, start, found);
    }
}
