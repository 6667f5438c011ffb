//! Where each buffer goes: offsets for items whose live ranges are known.
//!
//! The problem statement is minimalloc's: an item is `size` bytes, live on the half-open range `[lower, upper)`, and two items
//! that are live at the same time share no byte. No peak is below the largest sum of live sizes, [`Problem::lower_bound`].
//!
//! ```text
//! address
//!   ^          +------+
//!   |  +-----+ |      +---+
//!   |  |  b  | |   d  |   |
//!   |  +-----+-+----+-+ c |
//!   |  |      a     |-|   |
//!   +--+------------+-+---+--> time
//! ```
//!
//! [`place`] packs from the bottom up. The *skyline* is the lowest free address at each time; of its lowest stretch, the first
//! item (in some order) that fits between the walls is put there; when none fits, the stretch is lifted to its lower wall. So no item
//! fits into a hole that is left below. Several orders are tried, and the best is improved by small changes to it. The result is the
//! same on every machine.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::fmt::Write;
use std::num::IntErrorKind;
use std::ops::Range;
use std::path::Path;

use crate::error::{Error, Result};

/// A buffer to place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Item {
    /// First time at which it is live.
    pub lower: u64,
    /// First time at which it is dead again; above `lower`.
    pub upper: u64,
    /// Bytes; may be zero.
    pub size: u64,
    /// A power of two that divides its offset (as the problem's alignment does).
    pub align: u64,
}

/// Items to place together, known to be sound: nothing that is computed from them overflows.
#[derive(Debug, Clone)]
pub struct Problem {
    items: Vec<Item>,
    align: u64,
    /// A peak that is low enough: placing stops at the first solution within it. With `None` it stops at the lower bound only.
    pub capacity: Option<u64>,
}

/// An offset for each item of a [`Problem`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Solution {
    /// Byte offsets, in the order of the items. Items of no bytes are at 0.
    pub offsets: Vec<u64>,
    /// The highest end of an item, where sizes are rounded up to the problem's alignment.
    pub peak: u64,
}

impl Problem {
    /// A problem where `align` (a power of two) divides every offset, and sizes are rounded up to it.
    ///
    /// # Errors
    /// A live range is empty, an alignment is not a power of two, or the sizes with their padding exceed 64 bits in sum.
    pub fn new(items: Vec<Item>, align: u64) -> Result<Problem> {
        Problem::checked(items, align).map_err(|(index, what)| match index {
            Some(index) => Error::Usage(format!("item {index}: {what}")),
            None => Error::Usage(what),
        })
    }

    /// The problem, or the first item that breaks a rule and how.
    fn checked(items: Vec<Item>, align: u64) -> Result<Problem, (Option<usize>, String)> {
        if !align.is_power_of_two() {
            return Err((None, format!("alignment {align} is not a power of two")));
        }
        if items.len() > MOST {
            return Err((None, format!("{} items are more than {MOST}", items.len())));
        }
        // Packing pads each item at most once below it and once above it, and never leaves a gap that is larger.
        let mut room = u64::MAX;
        for (index, item) in items.iter().enumerate() {
            let bad = |what| Err((Some(index), what));
            if !item.align.is_power_of_two() {
                return bad(format!("alignment {} is not a power of two", item.align));
            }
            if item.upper <= item.lower {
                return bad(format!("upper {} is not above lower {}", item.upper, item.lower));
            }
            let padded = item.size.checked_add(align).and_then(|size| size.checked_add(align.max(item.align)));
            match padded.and_then(|padded| room.checked_sub(padded)) {
                Some(rest) => room = rest,
                None => return bad(format!("with size {} the sum of sizes overflows 64 bits", item.size)),
            }
        }
        Ok(Problem { items, align, capacity: None })
    }

    /// The items, in the order of [`Solution::offsets`].
    pub fn items(&self) -> &[Item] {
        &self.items
    }

    /// The alignment of all items.
    pub fn align(&self) -> u64 {
        self.align
    }

    /// The largest sum of sizes (rounded up to the alignment) that are live at once. O(n log n).
    pub fn lower_bound(&self) -> u64 {
        Timeline::new(self).bound()
    }

    fn size(&self, index: usize) -> u64 {
        self.items[index].size.next_multiple_of(self.align)
    }
}

/// As many items as a problem may have: their numbers, and those of a tree over them, are 32-bit.
const MOST: usize = 1 << 30;
/// Stands for no item, rank or section.
const NONE: u32 = u32::MAX;

/// How many items [`place`] may put down while it improves its first solution: some 50 ms at most. A count and not a time, so that
/// every machine finds the same offsets.
const IMPROVE: usize = 100_000;

/// Finds low offsets for all items: O(n log n) on the problems that graphs give. Stops early at the lower bound or the capacity.
pub fn place(problem: &Problem) -> Solution {
    let time = Timeline::new(problem);
    let enough = time.bound().max(problem.capacity.unwrap_or(0));
    let mut packer = Packer::new(problem, &time);
    let mut best: Option<(Solution, Vec<u32>)> = None;
    for order in orders(problem, &time) {
        let limit = best.as_ref().map_or(u64::MAX, |(solution, _)| solution.peak);
        match packer.pack(&order, limit) {
            Some(solution) if solution.peak <= enough => return solution,
            Some(solution) if solution.peak < limit => best = Some((solution, order)),
            _ => {}
        }
    }
    let (solution, order) = best.expect("there is an order, and the first has no limit");
    improve(&mut packer, solution, order, enough)
}

/// Orders worth trying, the most successful first. Lazy: a problem that the first one solves costs one sort.
fn orders<'a>(problem: &'a Problem, time: &'a Timeline) -> impl Iterator<Item = Vec<u32>> + 'a {
    let items = &problem.items;
    let busy = time.busiest();
    (0..8).map(move |which| {
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
        order
    })
}

/// Local search over orders: an item that shares time with one at the peak moves before another that shares time with it, and the
/// new order stays if its peak is no higher.
fn improve(packer: &mut Packer, mut best: Solution, mut order: Vec<u32>, enough: u64) -> Solution {
    let time = packer.time;
    let mut random = XorShift(0x9e37_79b9_7f4a_7c15);
    let mut found = Vec::new();
    let rounds = match IMPROVE / order.len().max(1) {
        0..50 => 0, // So few change nothing on a problem that large.
        rounds => rounds.min(500),
    };
    for _ in 0..rounds {
        if best.peak <= enough {
            break;
        }
        let mut pick = |from: &mut dyn Iterator<Item = usize>| {
            found.clear();
            found.extend(from);
            (!found.is_empty()).then(|| found[random.below(found.len())])
        };
        let meet = |at: usize, other: usize| {
            let (a, b) = (&time.spans[order[at] as usize], &time.spans[order[other] as usize]);
            a.start < b.end && b.start < a.end
        };
        let at_peak = |at: usize| best.offsets[order[at] as usize] + packer.sizes[order[at] as usize] == best.peak;
        let top = pick(&mut (0..order.len()).filter(|&at| at_peak(at))).expect("some item ends at the peak");
        let item = pick(&mut (0..order.len()).filter(|&at| meet(at, top))).expect("an item meets itself");
        let Some(to) = pick(&mut (0..item).filter(|&at| meet(at, item))) else {
            continue;
        };
        order[to..=item].rotate_right(1);
        match packer.pack(&order, best.peak) {
            Some(solution) => best = solution,
            None => order[to..=item].rotate_left(1),
        }
    }
    best
}

/// Marsaglia's 64-bit generator: choices that repeat.
struct XorShift(u64);

impl XorShift {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % bound as u64) as usize
    }
}

/// Time, cut into sections: a run of births, then a run of deaths. Two items overlap in time exactly when they share a section,
/// and the live sum of a section is that between its births and its deaths.
struct Timeline {
    /// The sections that each item spans; none if it has no bytes.
    spans: Vec<Range<usize>>,
    /// Live bytes by section.
    live: Vec<u64>,
}

impl Timeline {
    fn new(problem: &Problem) -> Timeline {
        let mut spans = vec![0..0; problem.items.len()];
        let mut live = Vec::new();
        // Ranges are half-open, so the deaths at a time (false) come before its births (true).
        let mut events = Vec::with_capacity(2 * spans.len());
        for (index, item) in problem.items.iter().enumerate().filter(|(_, item)| item.size > 0) {
            events.push((item.lower, true, index as u32));
            events.push((item.upper, false, index as u32));
        }
        events.sort_unstable();
        let (mut now, mut growing) = (0, false);
        for (_, birth, index) in events {
            if growing && !birth {
                live.push(now);
            }
            growing = birth;
            let index = index as usize;
            if birth {
                spans[index].start = live.len();
                now += problem.size(index);
            } else {
                spans[index].end = live.len();
                now -= problem.size(index);
            }
        }
        Timeline { spans, live }
    }

    fn bound(&self) -> u64 {
        self.live.iter().copied().max().unwrap_or(0)
    }

    /// By item, the largest live sum in its span.
    fn busiest(&self) -> Vec<u64> {
        let leaves = self.live.len();
        let mut tree = vec![0; leaves];
        tree.extend(&self.live);
        for node in (1..leaves).rev() {
            tree[node] = tree[2 * node].max(tree[2 * node + 1]);
        }
        let busiest = |span: &Range<usize>| {
            let (mut from, mut to, mut most) = (span.start + leaves, span.end + leaves, 0);
            while from < to {
                if from % 2 == 1 {
                    most = tree[from].max(most);
                }
                if to % 2 == 1 {
                    most = tree[to - 1].max(most);
                }
                (from, to) = (from.div_ceil(2), to / 2);
            }
            most
        };
        self.spans.iter().map(busiest).collect()
    }
}

/// Packs one problem in one order after another.
struct Packer<'a> {
    time: &'a Timeline,
    sizes: Vec<u64>,
    aligns: Vec<u64>,
    rank: Vec<u32>,
    waiting: Waiting<'a>,
    skyline: Skyline,
}

impl<'a> Packer<'a> {
    fn new(problem: &Problem, time: &'a Timeline) -> Packer<'a> {
        Packer {
            time,
            sizes: (0..problem.items.len()).map(|index| problem.size(index)).collect(),
            aligns: problem.items.iter().map(|item| item.align.max(problem.align)).collect(),
            rank: vec![0; problem.items.len()],
            waiting: Waiting::new(time),
            skyline: Skyline::default(),
        }
    }

    /// The placement that an order leads to, or nothing as soon as it exceeds the limit.
    fn pack(&mut self, order: &[u32], limit: u64) -> Option<Solution> {
        for (rank, &item) in order.iter().enumerate() {
            self.rank[item as usize] = rank as u32;
        }
        self.waiting.reset(&self.rank);
        self.skyline.reset(self.time.live.len());
        let mut solution = Solution { offsets: vec![0; order.len()], peak: 0 };
        while let Some((floor, stretch)) = self.skyline.lowest() {
            let Some(item) = self.waiting.first_within(&stretch) else {
                self.skyline.lift(stretch);
                continue;
            };
            let offset = floor.next_multiple_of(self.aligns[item]);
            let end = offset + self.sizes[item];
            if end > limit {
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
    time: &'a Timeline,
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

/// A problem as minimalloc writes it: a CSV file with the columns `id`, `lower`, `upper`, `size` and perhaps `alignment`.
#[derive(Debug, Clone)]
pub struct Table {
    /// The names of the items.
    pub ids: Vec<String>,
    /// The items, in the order of the lines.
    pub problem: Problem,
}

impl Table {
    /// Reads a file. The columns may come in any order; an `offset` column is ignored.
    ///
    /// # Errors
    /// The file cannot be read, or breaks the rules of the format or of [`Problem::new`]: file, line and column are named.
    pub fn read(path: &Path, align: u64) -> Result<Table> {
        let text = std::fs::read_to_string(path).map_err(|error| Error::file(path, "read", error))?;
        Table::parse(path, &text, align)
    }

    /// Like [`Table::read`], of a text that is said to come from `path`.
    pub fn parse(path: &Path, text: &str, align: u64) -> Result<Table> {
        let fault =
            |line: usize, column: usize, what: String| Error::Syntax { path: path.to_owned(), line, column, what };
        let mut lines = (1..).zip(text.lines()).filter(|(_, line)| !line.trim().is_empty());
        let (line, header) = lines.next().ok_or_else(|| fault(1, 1, format!("expected the columns {COLUMNS}")))?;
        let header = header.trim_start_matches('\u{feff}');
        let names: Vec<&str> = fields(header).map(|(_, name)| name).collect();
        for (column, name) in fields(header) {
            if !matches!(name, "id" | "lower" | "upper" | "size" | "alignment" | "offset") {
                return Err(fault(line, column, format!("unknown column '{name}': expected {COLUMNS}")));
            }
            if names.iter().filter(|&&other| other == name).count() > 1 {
                return Err(fault(line, column, format!("column '{name}' appears twice")));
            }
        }
        let position = |name: &str| names.iter().position(|&other| other == name);
        let required = |name: &str| {
            position(name).ok_or_else(|| fault(line, 1, format!("missing column '{name}': expected {COLUMNS}")))
        };
        let (id, lower, upper, size) = (required("id")?, required("lower")?, required("upper")?, required("size")?);
        let alignment = position("alignment");

        let (mut ids, mut items, mut origins) = (Vec::new(), Vec::new(), Vec::new());
        for (line, text) in lines {
            let fields: Vec<(usize, &str)> = fields(text).collect();
            if fields.len() != names.len() {
                return Err(fault(line, 1, format!("expected {} fields, found {}", names.len(), fields.len())));
            }
            let number = |at: usize| {
                let (column, text) = fields[at];
                text.parse::<u64>().map_err(|error| {
                    let why = match error.kind() {
                        IntErrorKind::PosOverflow => "does not fit in 64 bits",
                        _ if text.starts_with('-') => "is negative",
                        _ => "is not a whole number",
                    };
                    fault(line, column, format!("{} '{text}' {why}", names[at]))
                })
            };
            let align = alignment.map_or(Ok(1), number)?;
            items.push(Item { lower: number(lower)?, upper: number(upper)?, size: number(size)?, align });
            ids.push(fields[id].1.to_owned());
            origins.push(line);
        }
        let problem = Problem::checked(items, align).map_err(|(index, what)| match index {
            Some(index) => fault(origins[index], 1, what),
            None => Error::Usage(what),
        })?;
        Ok(Table { ids, problem })
    }

    /// The file's text, with an `offset` column if there is a solution.
    pub fn to_csv(&self, solution: Option<&Solution>) -> String {
        let aligned = self.problem.items.iter().any(|item| item.align > 1);
        let mut text = String::from("id,lower,upper,size");
        text += if aligned { ",alignment" } else { "" };
        text += if solution.is_some() { ",offset\n" } else { "\n" };
        for (index, (id, item)) in self.ids.iter().zip(&self.problem.items).enumerate() {
            let alignment = if aligned { format!(",{}", item.align) } else { String::new() };
            let offset = solution.map_or(String::new(), |solution| format!(",{}", solution.offsets[index]));
            writeln!(text, "{id},{},{},{}{alignment}{offset}", item.lower, item.upper, item.size)
                .expect("writing to a string cannot fail");
        }
        text
    }
}

const COLUMNS: &str = "id, lower, upper, size and perhaps alignment";

/// The fields of a line, each with its 1-based column.
fn fields(line: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut column = 1;
    line.split(',').map(move |field| {
        let at = column;
        column += field.chars().count() + 1;
        (at, field.trim())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn item((lower, upper, size, align): (u64, u64, u64, u64)) -> Item {
        Item { lower, upper, size, align }
    }

    fn problem(items: &[(u64, u64, u64, u64)], align: u64) -> Problem {
        Problem::new(items.iter().copied().map(item).collect(), align).unwrap()
    }

    /// Judges a solution item by item and pair by pair, and the bound by summing up at each birth.
    fn judge(problem: &Problem, solution: &Solution) {
        let (items, offsets) = (problem.items(), &solution.offsets);
        assert_eq!(items.len(), offsets.len());
        let round = |size: u64| size.div_ceil(problem.align()) * problem.align();
        let live = |time: u64| items.iter().filter(move |item| item.lower <= time && time < item.upper);
        let bound = items.iter().map(|item| live(item.lower).map(|other| round(other.size)).sum()).max().unwrap_or(0);
        assert_eq!(problem.lower_bound(), bound);
        assert!(bound <= solution.peak);
        let end = |i: usize| offsets[i] + round(items[i].size);
        assert_eq!((0..items.len()).filter(|&i| items[i].size > 0).map(end).max().unwrap_or(0), solution.peak);
        for i in 0..items.len() {
            assert_eq!(offsets[i] % items[i].align.max(problem.align()), 0);
            for j in 0..i {
                let (a, b) = (items[i], items[j]);
                let apart = a.upper <= b.lower || b.upper <= a.lower || end(i) <= offsets[j] || end(j) <= offsets[i];
                assert!(apart || a.size == 0 || b.size == 0, "items {j} and {i} overlap: {problem:?} {solution:?}");
            }
        }
    }

    #[test]
    fn random_problems_are_placed_soundly() {
        let mut random = XorShift(1);
        for _ in 0..2000 {
            let (count, times, align) = (random.below(25), 1 + random.below(30), 1 << random.below(5));
            let items = (0..count).map(|_| {
                let lower = random.below(times) as u64;
                let life = 1 + random.below(times) as u64;
                Item { lower, upper: lower + life, size: random.below(100) as u64, align: 1 << random.below(7) }
            });
            let problem = Problem::new(items.collect(), align).unwrap();
            let solution = place(&problem);
            judge(&problem, &solution);
        }
    }

    #[test]
    fn small_known_problems_reach_their_optimum() {
        // Alignment lifts the last one's optimum above its bound of 2.
        type Case = (Vec<(u64, u64, u64, u64)>, u64);
        let cases: [Case; 5] = [
            (vec![(0, 3, 4, 1), (3, 9, 4, 1), (0, 9, 4, 1), (9, 21, 4, 1), (0, 21, 4, 1)], 12),
            (vec![(0, 1, 5, 1), (1, 2, 5, 1), (0, 2, 3, 1), (2, 3, 8, 1)], 8),
            (vec![], 0),
            (vec![(0, 5, 0, 1)], 0),
            (vec![(0, 2, 1, 8), (1, 3, 1, 8)], 9),
        ];
        for (items, optimum) in cases {
            let problem = problem(&items, 1);
            let solution = place(&problem);
            judge(&problem, &solution);
            assert_eq!(solution.peak, optimum, "{items:?}");
        }
    }

    #[test]
    fn an_order_is_packed_from_the_bottom() {
        // 1, 3 and 4 pile up between 0 and 2, and 5 bridges the hole above them.
        let items = [(0, 2, 4, 1), (2, 4, 1, 1), (4, 6, 4, 1), (2, 4, 1, 1), (2, 3, 1, 1), (1, 5, 3, 1)];
        let problem = problem(&items, 1);
        let time = Timeline::new(&problem);
        let mut packer = Packer::new(&problem, &time);
        let order = [0, 1, 2, 3, 4, 5];
        assert_eq!(packer.pack(&order, 7).unwrap().offsets, [0, 0, 0, 1, 2, 4]);
        assert_eq!(packer.pack(&order, 6), None);
        // With 4 first, the stretch beside it is lifted to carry 3 and 1.
        assert_eq!(packer.pack(&[4, 3, 5, 0, 1, 2], 7).unwrap().offsets, [0, 2, 0, 1, 0, 4]);
    }

    #[test]
    fn alignment_rounds_sizes_and_offsets() {
        let problem = problem(&[(0, 2, 1, 1), (0, 2, 300, 1), (1, 3, 10, 1024)], 256);
        assert_eq!(problem.lower_bound(), 256 + 512 + 256);
        let solution = place(&problem);
        judge(&problem, &solution);
    }

    #[test]
    fn capacity_is_enough() {
        let items: Vec<_> = (0..50).map(|i| (i, i + 3 + i % 7, 10 + i * i % 31, 1)).collect();
        let mut problem = problem(&items, 1);
        let free = place(&problem);
        problem.capacity = Some(free.peak + 40);
        let capped = place(&problem);
        judge(&problem, &capped);
        assert!(capped.peak <= free.peak + 40);
        assert_eq!(capped, place(&problem));
    }

    #[test]
    fn unsound_problems_are_refused() {
        let refused = |items: &[(u64, u64, u64, u64)], align| {
            Problem::new(items.iter().copied().map(item).collect(), align).unwrap_err().to_string()
        };
        assert_eq!(refused(&[(3, 3, 1, 1)], 1), "item 0: upper 3 is not above lower 3");
        assert_eq!(refused(&[(0, 1, 1, 0)], 1), "item 0: alignment 0 is not a power of two");
        assert_eq!(refused(&[], 3), "alignment 3 is not a power of two");
        let half = u64::MAX / 2;
        assert!(refused(&[(0, 1, half, 1), (2, 3, half, 1)], 1).starts_with("item 1: with size"));
        assert!(refused(&[(0, 1, u64::MAX, 1)], 256).starts_with("item 0: with size"));
    }

    #[test]
    fn tables_are_read_and_written() {
        let text = "size,id,upper,alignment,lower\n4, a ,3,1,0\r\n\n8,b,9,16,2\n";
        let table = Table::parse(Path::new("x.csv"), text, 1).unwrap();
        assert_eq!(table.ids, ["a", "b"]);
        assert_eq!(table.problem.items(), [item((0, 3, 4, 1)), item((2, 9, 8, 16))]);
        let solution = Solution { offsets: vec![8, 0], peak: 12 };
        let written = table.to_csv(Some(&solution));
        assert_eq!(written, "id,lower,upper,size,alignment,offset\na,0,3,4,1,8\nb,2,9,8,16,0\n");
        let again = Table::parse(Path::new("x.csv"), &written, 1).unwrap();
        assert_eq!(again.problem.items(), table.problem.items());
    }

    #[test]
    fn bad_tables_name_file_and_line() {
        let cases = [
            ("", "x.csv:1:1: expected the columns"),
            ("id,lower,size\n", "x.csv:1:1: missing column 'upper'"),
            ("id,lower,upper,size,gaps\n", "x.csv:1:21: unknown column 'gaps'"),
            ("id,lower,upper,size,id\n", "x.csv:1:1: column 'id' appears twice"),
            ("id,lower,upper,size\na,0,1\n", "x.csv:2:1: expected 4 fields, found 3"),
            ("id,lower,upper,size\na,0,1,-5\n", "x.csv:2:7: size '-5' is negative"),
            (
                "id,lower,upper,size\n\na,0,1,18446744073709551616\n",
                "x.csv:3:7: size '18446744073709551616' does not fit",
            ),
            ("id,lower,upper,size\na,0,x,5\n", "x.csv:2:5: upper 'x' is not a whole number"),
            ("id,lower,upper,size\na,0,1,5\nb,7,7,5\n", "x.csv:3:1: upper 7 is not above lower 7"),
            ("id,lower,upper,size\na,0,1,5\nb,0,1,18446744073709551615\n", "x.csv:3:1: with size"),
        ];
        for (text, start) in cases {
            let error = Table::parse(Path::new("x.csv"), text, 1).unwrap_err().to_string();
            assert!(error.starts_with(start), "{text:?}: {error}");
        }
    }
}
