//! The greedy pass: packs from the bottom up in a given order.

use super::core::fill;
use super::effort::{Effort, Meter};
use super::time::Timeline;
use super::{NONE, Problem, Solution};
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::ops::Range;

/// The best of several orders, each packed from the bottom up or laid item by item into the lowest room.
pub(super) fn greedy(problem: &Problem, packer: &mut Packer, enough: u64, meter: &mut Meter) -> (Solution, Vec<u32>) {
    let time = packer.time;
    let mut best: Option<(Solution, Vec<u32>)> = None;
    let mut free = Meter::new(Effort::Steps(u64::MAX));
    for (which, order) in orders(problem, time) {
        let solution = match &best {
            None => packer.pack(&order, u64::MAX, &mut free),
            Some((best, _)) => packer.pack(&order, best.peak - 1, meter),
        };
        if let Some(solution) = solution {
            best = Some((solution, order.clone()));
        }
        let reached = |best: &Option<(Solution, Vec<u32>)>| best.as_ref().is_some_and(|(best, _)| best.peak <= enough);
        if meter.spend(problem.items.len() as u64) || reached(&best) {
            break;
        }
        if which == 2 && (2001..=GIANT).contains(&problem.items.len()) {
            let (roof, filled) = (
                best.as_ref().map_or(u64::MAX, |(best, _)| best.peak),
                order.iter().copied().filter(|&item| !time.spans[item as usize].is_empty()).collect(),
            );
            if let Ok(solution) = fill(problem, time, vec![None; order.len()], &filled, roof, meter) {
                best = Some((solution, order));
            }
            if meter.is_over() || reached(&best) {
                break;
            }
        }
    }
    best.expect("the first order has no limit")
}

/// Beyond so many items a pass takes a second or more, and laying them one by one several: a hunt does that, around what it has found.
pub(super) const GIANT: usize = 200_000;
/// Steps that it takes to put one item down, about.
const STEPS: u64 = 256;

/// Orders worth trying, the most successful first. Lazy: a problem that the first one solves costs one sort.
fn orders<'a>(problem: &'a Problem, time: &'a Timeline) -> impl Iterator<Item = (usize, Vec<u32>)> + 'a {
    let items = &problem.items;
    let busy = time.busiest();
    let tried: &[usize] = match items.len() {
        0..=2000 => &[0, 1, 2, 3, 4, 5, 6, 7],
        2001..=GIANT => &[0, 3, 2, 1, 4, 5, 6, 7],
        _ => &[0, 2, 1, 5],
    };
    tried.iter().map(move |&which| {
        let mut order: Vec<u32> = (0..items.len() as u32).collect();
        order.sort_by_cached_key(|&index| {
            let (item, index) = (items[index as usize], index as usize);
            let (size, life) = (u128::from(item.size), u128::from(item.upper - item.lower));
            let (sections, busy) = (time.spans[index].len() as u128, u128::from(busy[index]));
            Reverse(match which {
                0 => (u128::from(u64::MAX - item.lower), size),
                1 => (busy, sections),
                2 => (busy, size * life),
                3 => (size * life, size),
                4 => (size * sections, size),
                5 => (sections, size),
                6 => (size, life),
                _ => (u128::from(item.upper), size),
            })
        });
        (which, order)
    })
}

/// Packs one problem in one order after another.
pub(super) struct Packer<'a> {
    pub time: &'a Timeline,
    pub sizes: Vec<u64>,
    aligns: Vec<u64>,
    rank: Vec<u32>,
    waiting: Waiting<'a>,
    skyline: Skyline,
}

impl<'a> Packer<'a> {
    pub fn new(problem: &Problem, time: &'a Timeline) -> Packer<'a> {
        Packer {
            time,
            sizes: (0..problem.items.len()).map(|index| problem.size(index)).collect(),
            aligns: problem.items.iter().map(|item| item.align.max(problem.align)).collect(),
            rank: vec![0; problem.items.len()],
            waiting: Waiting::new(time),
            skyline: Skyline::default(),
        }
    }

    /// The placement that an order leads to, or nothing as soon as it exceeds the limit or time is up.
    pub fn pack(&mut self, order: &[u32], limit: u64, meter: &mut Meter) -> Option<Solution> {
        for (rank, &item) in order.iter().enumerate() {
            self.rank[item as usize] = rank as u32;
        }
        self.waiting.reset(&self.rank);
        self.skyline.reset(self.time.live.len());
        let mut solution = Solution { offsets: vec![0; order.len()], peak: 0, proved: 0 };
        while let Some((floor, stretch)) = self.skyline.lowest() {
            let Some(item) = self.waiting.first_within(&stretch) else {
                self.skyline.lift(stretch);
                continue;
            };
            let offset = floor.next_multiple_of(self.aligns[item]);
            let end = offset + self.sizes[item];
            if end > limit || meter.spend(STEPS) {
                return None;
            }
            self.waiting.remove(item);
            self.skyline.raise(stretch, &self.time.spans[item], end);
            solution.offsets[item] = offset;
            solution.peak = solution.peak.max(end);
        }
        Some(solution)
    }
}

/// The lowest free address of each section, as stretches of sections that share one. Neighbours differ, so a stretch is all the
/// room that there is between two walls.
#[derive(Default)]
struct Skyline {
    /// By a stretch's first section: its address. `u64::MAX` where no stretch begins.
    floor: Vec<u64>,
    /// By a stretch's first section: the section after its last.
    end: Vec<usize>,
    /// By a stretch's last section: its first.
    begin: Vec<usize>,
    /// The stretches, lowest first, among some that are gone.
    heap: BinaryHeap<Reverse<(u64, usize)>>,
}

impl Skyline {
    fn reset(&mut self, sections: usize) {
        self.floor.clear();
        self.floor.resize(sections, u64::MAX);
        self.end.resize(sections, 0);
        self.begin.resize(sections, 0);
        self.heap.clear();
        self.set(0..sections, 0);
    }

    /// The lowest stretch and its address. It is to be lifted or raised next.
    fn lowest(&mut self) -> Option<(u64, Range<usize>)> {
        while let Some(Reverse((floor, begin))) = self.heap.pop() {
            if self.floor[begin] == floor {
                return Some((floor, begin..self.end[begin]));
            }
        }
        None
    }

    /// Lifts a stretch to the lower of its walls, or forgets it if it has none.
    fn lift(&mut self, stretch: Range<usize>) {
        let left = stretch.start.checked_sub(1).map_or(u64::MAX, |last| self.floor[self.begin[last]]);
        let right = self.floor.get(stretch.end).copied().unwrap_or(u64::MAX);
        let wall = left.min(right);
        if wall < u64::MAX {
            self.set(stretch, wall);
        }
    }

    /// Raises a part of a stretch; what remains on either side keeps its floor.
    fn raise(&mut self, stretch: Range<usize>, part: &Range<usize>, floor: u64) {
        let old = self.floor[stretch.start];
        self.set(stretch.start..part.start, old);
        self.set(part.clone(), floor);
        self.set(part.end..stretch.end, old);
    }

    /// Makes a stretch, joined with neighbours of the same height. The sections before it must belong to stretches already.
    fn set(&mut self, stretch: Range<usize>, floor: u64) {
        if stretch.is_empty() {
            return;
        }
        let (mut begin, mut end) = (stretch.start, stretch.end);
        if end < self.floor.len() && self.floor[end] == floor {
            self.floor[end] = u64::MAX;
            end = self.end[end];
        }
        if begin > 0 && self.floor[self.begin[begin - 1]] == floor {
            self.floor[begin] = u64::MAX;
            begin = self.begin[begin - 1];
        } else {
            self.floor[begin] = floor;
            self.heap.push(Reverse((floor, begin)));
        }
        self.end[begin] = end;
        self.begin[end - 1] = begin;
    }
}

/// The items that are not placed yet, by first section, under a tree whose nodes know the least end and the least rank below them.
struct Waiting<'a> {
    pub time: &'a Timeline,
    /// Items by first section.
    items: Vec<u32>,
    /// By section: how many items begin before it.
    starts: Vec<u32>,
    /// By item: its leaf.
    leaf: Vec<u32>,
    leaves: usize,
    /// Least end and least rank. Node 1 is the root, the children of `n` are `2n` and `2n + 1`.
    nodes: Vec<(u32, u32)>,
}

impl<'a> Waiting<'a> {
    fn new(time: &'a Timeline) -> Waiting<'a> {
        let mut items: Vec<u32> =
            (0..time.spans.len() as u32).filter(|&i| !time.spans[i as usize].is_empty()).collect();
        items.sort_by_key(|&item| time.spans[item as usize].start);
        let leaves = items.len().next_power_of_two();
        let (mut leaf, mut starts) = (vec![NONE; time.spans.len()], vec![0; time.live.len() + 1]);
        for (at, &item) in items.iter().enumerate() {
            leaf[item as usize] = (leaves + at) as u32;
            starts[time.spans[item as usize].start + 1] = at as u32 + 1;
        }
        // Every section begins with a birth, so no entry was left out.
        Waiting { time, items, starts, leaf, leaves, nodes: Vec::new() }
    }

    fn reset(&mut self, rank: &[u32]) {
        self.nodes.clear();
        self.nodes.resize(self.leaves, (NONE, NONE));
        self.nodes.extend(self.items.iter().map(|&item| {
            let item = item as usize;
            (self.time.spans[item].end as u32, rank[item])
        }));
        self.nodes.resize(2 * self.leaves, (NONE, NONE));
        (1..self.leaves).rev().for_each(|node| self.update(node));
    }

    fn update(&mut self, node: usize) {
        let (left, right) = (self.nodes[2 * node], self.nodes[2 * node + 1]);
        self.nodes[node] = (left.0.min(right.0), left.1.min(right.1));
    }

    fn remove(&mut self, item: usize) {
        let mut node = self.leaf[item] as usize;
        self.nodes[node] = (NONE, NONE);
        while node > 1 {
            node /= 2;
            self.update(node);
        }
    }

    /// The item of least rank that lives within these sections.
    fn first_within(&self, sections: &Range<usize>) -> Option<usize> {
        let starts = self.starts[sections.start] as usize..self.starts[sections.end] as usize;
        let mut best = (NONE, 0);
        self.search(1, 0..self.leaves, &starts, sections.end as u32, &mut best);
        (best.0 != NONE).then(|| self.items[best.1] as usize)
    }

    /// Lowers `best`, a rank and its place, to that below `node` among the items that start in `starts` and end by `end`.
    fn search(&self, node: usize, below: Range<usize>, starts: &Range<usize>, end: u32, best: &mut (u32, usize)) {
        let (least_end, least_rank) = self.nodes[node];
        if least_end > end || least_rank >= best.0 || below.end <= starts.start || starts.end <= below.start {
            return;
        }
        if node >= self.leaves {
            *best = (least_rank, below.start);
            return;
        }
        let middle = below.start.midpoint(below.end);
        let mut children = [(2 * node, below.start..middle), (2 * node + 1, middle..below.end)];
        if self.nodes[2 * node].1 > self.nodes[2 * node + 1].1 {
            children.reverse();
        }
        for (child, below) in children {
            self.search(child, below, starts, end, best);
        }
    }
}
