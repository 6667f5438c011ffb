//! The search for a lower peak, once the greedy pass has given one.

use super::effort::Meter;
use super::exact::{Focus, Manner, Outcome, Search, mix};
use super::greedy::GIANT;
use super::pack::{Packer, Recipe, Stuck};
use super::repair::{move_steps, repair};
use super::sections::Timeline;
use super::subproblem::Core;
use super::{Problem, Solution};
use crate::shape::gcd;
use std::cmp::Reverse;
use std::ops::Range;

/// Rounds of a level: first for the lowest capacity of interest, then for some between it and the best peak.
const LOWEST: u64 = 9;
const BETWEEN: u64 = 3;
/// Steps of a round of the first level, and of the last. Each level doubles them.
const FIRST: u64 = 1 << 21;
const LAST: u64 = 1 << 34;

/// Steps of a repair of one place on the first level, at least; and how many moves they are to suffice for.
const ATTEMPT: u64 = 1 << 21;
const MOVES: u64 = 256;

/// Improves a solution in rounds that grow, until it is within the range's start, nothing better exists or the meter says stop. Peaks
/// from the range's end on are of no interest.
///
/// A round repairs the best solution, and asks the exact search for a capacity: the lowest of interest and one below the best peak by turns.
/// Which placement is found does not depend on how much effort is left, so more effort is never worse.
pub(super) fn hunt(
    problem: &Problem,
    time: &Timeline,
    packer: Packer,
    best: Solution,
    recipe: Recipe,
    range: Range<u64>,
    meter: &mut Meter,
) -> Solution {
    // A round should do more than to look at every item.
    let first = (1000 * problem.items().len() as u64).clamp(FIRST, 1 << 27);
    let core = Core::new(problem, time, first >> LOWEST);
    let targets = Targets::new(problem, best.proved, range.start);
    let searches = searches(&core);
    let mut hunt = Hunt {
        problem,
        time,
        packer,
        meter,
        best,
        bar: range.end,
        first,
        attempt: ATTEMPT.max(MOVES * move_steps(time.crowd())),
        targets,
        recipe,
        core,
        searches,
    };
    for round in 0.. {
        if !hunt.round(round / (LOWEST + BETWEEN), round % (LOWEST + BETWEEN)) {
            break;
        }
    }
    Solution { proved: hunt.targets.proved, ..hunt.best }
}

/// One search for the lowest capacity and one for the others: what is learnt at the one is not for the other.
fn searches(core: &Core) -> [Search; 2] {
    [(); 2].map(|()| Search::new(core.sections, core.blocks.clone()))
}

/// A hunt between two rounds.
struct Hunt<'a> {
    problem: &'a Problem,
    time: &'a Timeline,
    packer: Packer<'a>,
    meter: &'a mut Meter,
    best: Solution,
    bar: u64,
    /// Steps of a round of the first level, and of a repair of one place.
    first: u64,
    attempt: u64,
    targets: Targets,
    /// What led to the best packing.
    recipe: Recipe,
    core: Core,
    searches: [Search; 2],
}

impl Hunt<'_> {
    /// False when it is over.
    fn round(&mut self, level: u64, turn: u64) -> bool {
        let slice = (self.first << level.min(32)).min(LAST);
        // A small problem is decided before it is worth a repair, of a large one the search takes up but a part.
        if self.core.whole && turn == 1 {
            self.squeeze(slice);
            self.repair(level, slice);
        }
        if !self.core.whole && turn == 0 {
            if self.problem.items().len() <= GIANT {
                self.squeeze(slice);
            }
            // The exact search soon settles what is not too large for it.
            let steps = if self.problem.items().len() > GIANT { 16 } else { 4 } * slice;
            self.repair_halves(level, steps);
            self.repair(level, steps / 4);
        }
        if !self.core.whole && turn < LOWEST {
            // The rounds of a level take up ever more sections.
            let core = Core::new(self.problem, self.time, (2 * slice) >> (LOWEST - 1 - turn));
            self.meter.spend(16 * self.problem.items().len() as u64);
            if core.items.len() != self.core.items.len() {
                self.searches = searches(&core);
                self.core = core;
            }
        }
        // Between the lowest capacity and the peak a search succeeds soon or never: many short ones.
        let short = if turn < LOWEST { slice } else { slice.min(self.first >> 1 << (level / 2)) };
        (0..slice / short).all(|part| self.probe(level, turn, part, short))
    }

    /// Repairs the best solution.
    fn repair(&mut self, level: u64, steps: u64) {
        let Hunt { problem, time, .. } = *self;
        let (offsets, home) = (std::mem::take(&mut self.best.offsets), 0..time.live.len());
        let (enough, attempt) = (self.targets.least, self.attempt << level.min(16));
        self.best = Solution::new(problem, repair(problem, time, offsets, home, enough, attempt, steps, self.meter));
    }

    /// Repairs the best solution on two cores: one takes what lives before a point in time, the other what lives behind it. There is as
    /// much to do on either side.
    fn repair_halves(&mut self, level: u64, steps: u64) {
        let Hunt { problem, time, .. } = *self;
        let (enough, attempt) = (self.targets.least, self.attempt << level.min(16));
        let over = |&item: &usize| self.best.offsets[item] + problem.size(item) > enough;
        let mut over: Vec<usize> = (0..time.spans.len()).filter(over).map(|item| time.spans[item].start).collect();
        if over.is_empty() {
            return;
        }
        let middle = over.len() / 2;
        let cut = *over.select_nth_unstable(middle).1;
        let homes = [0..cut, cut..time.live.len()];
        let [mut first, second] = self.meter.both(|side, meter| {
            let (offsets, home) = (self.best.offsets.clone(), homes[side].clone());
            repair(problem, time, offsets, home, enough, attempt, steps, meter)
        });
        let behind = (0..first.len()).filter(|&item| time.spans[item].start >= cut);
        behind.for_each(|item| first[item] = second[item]);
        self.best = Solution::new(problem, first);
    }

    /// Packs all items anew in about so many steps, those that found no room under a lower roof earlier each time.
    fn squeeze(&mut self, steps: u64) {
        let end = self.meter.spent() + steps;
        while self.meter.spent() < end && self.best.peak > self.targets.least {
            let roof = self.best.peak - (self.best.peak - self.targets.least).div_ceil(16);
            match self.packer.pack(&self.recipe, roof, self.meter) {
                Ok(peak) => self.best = Solution { offsets: self.packer.offsets.clone(), peak, proved: 0 },
                Err(Stuck::Late) => return,
                Err(Stuck::At(item)) => {
                    let order = &mut self.recipe.order;
                    let at = order.iter().position(|&other| other == item).expect("the order has every item");
                    if at == 0 {
                        return;
                    }
                    order[at / 2..=at].rotate_right(1);
                }
            }
        }
    }

    /// Searches at one capacity for so many steps. False when the hunt is over.
    fn probe(&mut self, level: u64, turn: u64, part: u64, steps: u64) -> bool {
        let (roof, lowest) = (self.best.peak.min(self.bar), turn < LOWEST);
        let Some(capacity) = self.targets.next(lowest, roof) else { return false };
        if self.meter.is_over() {
            return false;
        }
        let manner = manner(&self.core, level, turn, part);
        let search = &mut self.searches[usize::from(!lowest)];
        let begin = search.work;
        let mut seen = begin;
        let outcome = search.run(capacity, &manner, &mut |work| {
            let over = self.meter.spend(work - seen + 64);
            seen = work;
            over || work - begin > steps
        });
        self.meter.spend(search.work - seen + 64 * self.core.items.len() as u64);
        match outcome {
            Outcome::Found => {
                let found = self.core.complete(self.problem, self.time, &search.offsets, roof, self.meter);
                if let Some(solution) = found {
                    self.best = solution;
                }
            }
            Outcome::Failed => self.targets.failed(capacity),
            Outcome::Stopped => self.targets.stopped(capacity),
        }
        true
    }
}

/// In which order a round tries the blocks, and how it picks sections: nine ways, varied by noise from the second level on.
fn manner(core: &Core, level: u64, turn: u64, part: u64) -> Manner {
    let seed = mix(level * (LOWEST + BETWEEN) + turn) ^ part;
    let noise =
        |block: usize| 1024 + u128::from(if level == 0 && part == 0 { 0 } else { mix(seed ^ block as u64) % 307 });
    let mut order: Vec<u32> = (0..core.blocks.len() as u32).collect();
    order.sort_by_cached_key(|&index| {
        let block = &core.blocks[index as usize];
        let (size, width) = (u128::from(block.size), block.span.len() as u128);
        let key = match (turn + part) % 3 {
            0 => width << 64 | size,
            1 => size * width,
            _ => size << 32 | width,
        };
        // A width has 31 bits and the noise 11.
        Reverse(key * noise(index as usize))
    });
    let mut rank = vec![0; order.len()];
    order.iter().enumerate().for_each(|(place, &block)| rank[block as usize] = place as u32);
    Manner { rank, focus: [Focus::None, Focus::Full, Focus::Root][((turn + turn / 3 + level + part / 3) % 3) as usize] }
}

/// Which capacities to try.
struct Targets {
    /// No peak can be below it.
    proved: u64,
    /// Nothing below is of interest, or none is possible.
    least: u64,
    /// The highest capacity that was tried in vain.
    vain: u64,
    /// All peaks are multiples of it.
    unit: u64,
    /// Whether the exact search's failure proves that there is no placement.
    exact: bool,
}

impl Targets {
    fn new(problem: &Problem, proved: u64, least: u64) -> Targets {
        let align = |index: usize| problem.items()[index].align.max(problem.align());
        let sized = || (0..problem.items().len()).filter(|&index| problem.size(index) > 0);
        let strictest = sized().map(align).max().unwrap_or(1);
        let exact = sized().all(|index| problem.size(index).is_multiple_of(strictest));
        let unit = sized().fold(if exact { 0 } else { 1 }, |unit, index| gcd(unit, problem.size(index))).max(1);
        Targets { proved, least, vain: least, unit, exact }
    }

    /// The capacity for a round, or nothing if the roof is as low as it gets.
    fn next(&mut self, lowest: bool, roof: u64) -> Option<u64> {
        let highest = roof.saturating_sub(self.unit);
        if highest < self.least {
            return None;
        }
        if lowest {
            return Some(self.least);
        }
        if self.vain + roof / 1024 >= highest {
            self.vain = self.least;
        }
        Some(self.vain.midpoint(highest))
    }

    fn failed(&mut self, capacity: u64) {
        if self.exact {
            self.least = (capacity + 1).next_multiple_of(self.unit);
            self.proved = self.least.max(self.proved);
        }
        self.vain = self.vain.max(capacity);
    }

    fn stopped(&mut self, capacity: u64) {
        self.vain = self.vain.max(capacity);
    }
}
