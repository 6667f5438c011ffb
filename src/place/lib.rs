//! Placement: finds offsets for items whose live ranges are known.
//!
//! The problem is minimalloc's. An item has `size` bytes and is live on the half-open range `[lower, upper)`. Two items that
//! are live at the same time share no byte. No peak is below the largest sum of live sizes, [`Problem::lower_bound`].
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
//! [`place`] begins with cheap methods, goes on with thorough ones, and keeps the best solution:
//!
//! ```text
//! greedy       tries several orders: packs items from the bottom up, or puts each at its lowest free offset
//! improve      repeats in growing rounds, first for the lowest useful capacity, then for some between it and the best peak:
//!   repair       an item above the roof drives out the items in its way, or is packed again with the items around it
//!   exact        searches canonical placements, with bounds per section, independent parts, and a memory of failures
//!   subproblem   of a large problem, only the busiest sections are searched; the other items are placed around them
//! ```
//!
//! The effort is a number of steps or a deadline. With steps, the result is the same on every machine. Large problems are
//! repaired on two cores.

use effort::Meter;
use exact::Block;
use greedy::greedy;
use improve::improve;
use pack::Packer;
use plimsoll_core::error::{Error, Result};
use sections::Sections;
use std::ops::Range;

mod effort;
mod exact;
mod greedy;
mod improve;
mod neighbourhood;
mod pack;
mod repair;
mod sections;
mod subproblem;
mod table;

pub use effort::Effort;
pub use table::Table;

/// A buffer to place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Item {
    /// The first time at which it is live.
    pub lower: u64,
    /// The first time after `lower` at which it is not live.
    pub upper: u64,
    /// Bytes; may be zero.
    pub size: u64,
    /// A power of two that divides its offset, besides the problem's alignment.
    pub align: u64,
}

/// Items to place together. They were checked, so that no sum of their sizes overflows.
#[derive(Debug, Clone)]
pub struct Problem {
    items: Vec<Item>,
    align: u64,
    /// A peak that is low enough: the search stops at the first solution within it. Without one, only the lower bound stops it.
    pub capacity: Option<u64>,
}

/// An offset for each item of a [`Problem`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Solution {
    /// Byte offsets, in the order of the items. Items without bytes are at 0.
    pub offsets: Vec<u64>,
    /// The highest end of an item, with sizes rounded up to the problem's alignment.
    pub peak: u64,
    /// A peak that no placement undercuts: the lower bound, or more if an exhaustive search failed below it. The search
    /// remembers failures by 64-bit hashes, so a collision could make this too high.
    pub proved: u64,
}

impl Solution {
    fn new(problem: &Problem, offsets: Vec<u64>) -> Solution {
        let end = |index: usize| if problem.items[index].size > 0 { offsets[index] + problem.size(index) } else { 0 };
        Solution { peak: (0..offsets.len()).map(end).max().unwrap_or(0), proved: 0, offsets }
    }

    /// True if no placement has a lower peak.
    pub fn is_optimal(&self) -> bool {
        self.peak <= self.proved
    }
}

impl Problem {
    /// Makes a problem. `align`, a power of two, divides every offset, and sizes are rounded up to it.
    ///
    /// # Errors
    /// A live range is empty, an alignment is not a power of two, or the sum of the sizes with padding exceeds 64 bits.
    pub fn new(items: Vec<Item>, align: u64) -> Result<Problem> {
        Problem::checked(items, align).map_err(|(index, what)| match index {
            Some(index) => Error::usage(format!("item {index}: {what}")),
            None => Error::usage(what),
        })
    }

    /// Makes a problem. The error is the first item that breaks a rule, if it is an item's fault, and the rule.
    fn checked(items: Vec<Item>, align: u64) -> Result<Problem, (Option<usize>, String)> {
        if !align.is_power_of_two() {
            return Err((None, format!("alignment {align} is not a power of two")));
        }
        if items.len() > MOST {
            return Err((None, format!("expected at most {MOST} items, found {}", items.len())));
        }
        // Packing pads an item at most once below it and once above it, and leaves no larger gap. So this sum bounds every address.
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
        Sections::new(self).bound()
    }

    fn size(&self, index: usize) -> u64 {
        self.items[index].size.next_multiple_of(self.align)
    }

    fn block(&self, index: usize, span: Range<usize>, fixed: Option<u64>) -> Block {
        Block { span, size: self.size(index), align: self.items[index].align.max(self.align), fixed }
    }

    fn blocks(&self, time: &Sections) -> Vec<Block> {
        time.spans.iter().enumerate().map(|(index, span)| self.block(index, span.clone(), None)).collect()
    }
}

/// The most items of a problem: their indices, and those of a tree over them, have 32 bits.
const MOST: usize = 1 << 30;
/// The index of no item, rank or section.
const NONE: u32 = u32::MAX;

/// Finds low offsets for all items, first by greedy passes, then by search.
///
/// A greedy pass takes O(n log n) for the problems that graphs give. The first pass is always made. The search stops early at the
/// lower bound or the capacity.
pub fn place(problem: &Problem, effort: Effort) -> Solution {
    place_below(problem, u64::MAX, effort)
}

/// Places items as [`place`] does, for a caller that can only use a peak below `bar`. If the lower bound is not below it, only the
/// first pass is made.
pub fn place_below(problem: &Problem, bar: u64, effort: Effort) -> Solution {
    let time = Sections::new(problem);
    let effort = if time.bound() < bar { effort } else { Effort::Steps(0) };
    search(problem, &time, bar, Meter::new(effort))
}

fn search(problem: &Problem, time: &Sections, bar: u64, mut meter: Meter) -> Solution {
    let enough = time.bound().max(problem.capacity.unwrap_or(0)).min(bar.saturating_sub(1));
    let blocks = problem.blocks(time);
    let mut packer = Packer::new(time.live.len(), &blocks);
    let (mut best, recipe) = greedy(problem, time, &mut packer, enough, &mut meter);
    best.proved = time.bound();
    if best.peak > enough && !meter.is_over() {
        best = improve(problem, time, packer, (best, recipe), enough..bar, &mut meter);
    }
    best
}

#[cfg(test)]
mod tests {
    use super::greedy::GIANT;
    use super::pack::{Recipe, Stuck};
    use super::*;
    use std::path::Path;

    /// Marsaglia's 64-bit generator of pseudorandom numbers.
    struct XorShift(u64);

    impl XorShift {
        fn below(&mut self, bound: usize) -> usize {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            (self.0 % bound as u64) as usize
        }
    }

    fn item((lower, upper, size, align): (u64, u64, u64, u64)) -> Item {
        Item { lower, upper, size, align }
    }

    fn problem(items: &[(u64, u64, u64, u64)], align: u64) -> Problem {
        Problem::new(items.iter().copied().map(item).collect(), align).unwrap()
    }

    /// Checks a solution item by item and pair by pair, and the bound by a sum at the start of each item.
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
                let disjoint = a.upper <= b.lower || b.upper <= a.lower || end(i) <= offsets[j] || end(j) <= offsets[i];
                assert!(disjoint || a.size == 0 || b.size == 0, "items {j} and {i} overlap: {problem:?} {solution:?}");
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
            let solution = place(&problem, Effort::Steps(50_000));
            judge(&problem, &solution);
        }
    }

    #[test]
    fn one_core_gives_what_two_give() {
        let mut random = XorShift(3);
        // The first is large enough to be repaired on two cores, the second to be packed on two.
        for (count, steps) in [(6000, 100_000_000), (GIANT as u64 + 1, 900_000_000)] {
            let mut item = |lower| Item {
                lower,
                upper: lower + 1 + random.below(200) as u64,
                size: 1 + random.below(1 << 20) as u64,
                align: 1,
            };
            let problem = Problem::new((0..count).map(&mut item).collect(), 1).expect("sizes are small");
            let time = Sections::new(&problem);
            let meter = || Meter::new(Effort::Steps(steps));
            let found = search(&problem, &time, u64::MAX, meter());
            assert_eq!(found, search(&problem, &time, u64::MAX, meter().without_threads()));
            let first = search(&problem, &time, u64::MAX, Meter::new(Effort::Steps(0)));
            assert!(found.peak < first.peak && found.peak > time.bound(), "{} {}", found.peak, first.peak);
        }
    }

    #[test]
    fn small_known_problems_reach_their_optimum() {
        // Alignment raises the optimum of the last one above its bound of 2.
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
            let solution = place(&problem, Effort::PLAN);
            judge(&problem, &solution);
            assert_eq!(solution.peak, optimum, "{items:?}");
        }
    }

    #[test]
    fn an_order_is_packed_from_the_bottom() {
        // Items 1, 3 and 4 are stacked between 0 and 2, and item 5 covers the hole above them.
        let items = [(0, 2, 4, 1), (2, 4, 1, 1), (4, 6, 4, 1), (2, 4, 1, 1), (2, 3, 1, 1), (1, 5, 3, 1)];
        let problem = problem(&items, 1);
        let time = Sections::new(&problem);
        let blocks = problem.blocks(&time);
        let mut packer = Packer::new(time.live.len(), &blocks);
        let mut meter = Meter::new(Effort::PLAN);
        let in_order = |order: [u32; 6]| Recipe { order: order.to_vec(), level: None };
        assert_eq!(packer.pack(&in_order([0, 1, 2, 3, 4, 5]), 7, &mut meter), Ok(7));
        assert_eq!(packer.offsets, [0, 0, 0, 1, 2, 4]);
        assert_eq!(packer.pack(&in_order([0, 1, 2, 3, 4, 5]), 6, &mut meter), Err(Stuck::At(5)));
        // With item 4 first, the stretch beside it is lifted to carry items 3 and 1.
        assert_eq!(packer.pack(&in_order([4, 3, 5, 0, 1, 2]), 7, &mut meter), Ok(7));
        assert_eq!(packer.offsets, [0, 2, 0, 1, 0, 4]);
    }

    #[test]
    fn alignment_rounds_sizes_and_offsets() {
        let problem = problem(&[(0, 2, 1, 1), (0, 2, 300, 1), (1, 3, 10, 1024)], 256);
        assert_eq!(problem.lower_bound(), 256 + 512 + 256);
        let solution = place(&problem, Effort::PLAN);
        judge(&problem, &solution);
    }

    #[test]
    fn capacity_is_enough() {
        let items: Vec<_> = (0..50).map(|i| (i, i + 3 + i % 7, 10 + i * i % 31, 1)).collect();
        let mut problem = problem(&items, 1);
        let free = place(&problem, Effort::PLAN);
        problem.capacity = Some(free.peak + 40);
        let capped = place(&problem, Effort::PLAN);
        judge(&problem, &capped);
        assert!(capped.peak <= free.peak + 40);
        assert_eq!(capped, place(&problem, Effort::PLAN));
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
        let solution = Solution { offsets: vec![8, 0], peak: 12, proved: 12 };
        let written = table.to_csv(&solution);
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
