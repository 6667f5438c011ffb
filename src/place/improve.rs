//! Improves the greedy solution: searches for a lower peak in growing rounds.

use super::effort::Meter;
use super::exact::{Focus, Manner, Outcome, Search};
use super::greedy::GIANT;
use super::pack::{Packer, Recipe, Stuck};
use super::repair::{Goal, move_steps, repair};
use super::sections::Sections;
use super::subproblem::Subproblem;
use super::{Problem, Solution};
use plimsoll_core::random::mix;
use plimsoll_core::shape::gcd;
use std::cmp::Reverse;
use std::ops::Range;

/// Rounds per level that try the lowest useful capacity.
const LOWEST: u64 = 9;
/// Rounds per level that try a capacity between the lowest and the best peak. They follow the others.
const BETWEEN: u64 = 3;
/// Steps of a round of the first level. Each level doubles them.
const FIRST: u64 = 1 << 21;
/// The most steps of a round.
const LAST: u64 = 1 << 34;

/// The fewest steps to repair one item on the first level.
const ATTEMPT: u64 = 1 << 21;
/// The number of moves that these steps must suffice for.
const MOVES: u64 = 256;

/// Improves a solution, which `recipe` led to, in growing rounds.
///
/// It stops when the peak is at most the range's start, when no better solution exists, or when the effort is spent. Peaks from
/// the range's end on are useless to the caller. A round repairs the best solution and runs the exact search at one capacity. The
/// course of the search does not depend on the remaining effort, so more effort never gives a worse result.
pub(super) fn improve(
    problem: &Problem,
    time: &Sections,
    packer: Packer,
    (best, recipe): (Solution, Recipe),
    range: Range<u64>,
    meter: &mut Meter,
) -> Solution {
    // A round must do more than look at every item.
    let first = (1000 * problem.items().len() as u64).clamp(FIRST, 1 << 27);
    let part = Subproblem::new(problem, time, first >> LOWEST);
    let targets = Targets::new(problem, best.proved, range.start);
    let searches = searches(&part);
    let mut state = Improvement {
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
        part,
        searches,
    };
    for number in 0.. {
        let round = Round { level: number / (LOWEST + BETWEEN), number: number % (LOWEST + BETWEEN) };
        if !state.round(round) {
            break;
        }
    }
    Solution { proved: state.targets.proved, ..state.best }
}

/// One search for the lowest capacity and one for the others, because what a search learns holds for its capacity only.
fn searches(part: &Subproblem) -> [Search; 2] {
    [(); 2].map(|()| Search::new(part.sections, part.blocks.clone()))
}

/// A round of a level.
#[derive(Clone, Copy)]
struct Round {
    level: u64,
    /// Its number within the level.
    number: u64,
}

impl Round {
    /// True if it tries the lowest useful capacity.
    fn is_lowest(self) -> bool {
        self.number < LOWEST
    }
}

/// The state between two rounds.
struct Improvement<'a> {
    problem: &'a Problem,
    time: &'a Sections,
    packer: Packer<'a>,
    meter: &'a mut Meter,
    best: Solution,
    /// Peaks from here on are useless to the caller.
    bar: u64,
    /// Steps of a round of the first level.
    first: u64,
    /// Steps to repair one item on the first level.
    attempt: u64,
    targets: Targets,
    /// The order that led to the best packing.
    recipe: Recipe,
    /// The part of the problem that the exact search takes.
    part: Subproblem,
    searches: [Search; 2],
}

impl Improvement<'_> {
    /// Makes one round. Returns false when there is nothing more to do.
    fn round(&mut self, round: Round) -> bool {
        let Round { level, number } = round;
        let slice = (self.first << level.min(32)).min(LAST);
        // The exact search may decide a small problem in the first round, so repair waits for the second. Of a large problem it
        // takes only a part, so repair comes first.
        if self.part.whole && number == 1 {
            self.squeeze(slice);
            self.repair(level, slice);
        }
        if !self.part.whole && number == 0 {
            if self.problem.items().len() <= GIANT {
                self.squeeze(slice);
            }
            // The larger the problem, the less the exact search can do, and the more steps repair gets.
            let steps = if self.problem.items().len() > GIANT { 16 } else { 4 } * slice;
            self.repair_halves(level, steps);
            self.repair(level, steps / 4);
        }
        if !self.part.whole && round.is_lowest() {
            // Each round of a level takes more sections than the last.
            let part = Subproblem::new(self.problem, self.time, (2 * slice) >> (LOWEST - 1 - number));
            self.meter.spend(16 * self.problem.items().len() as u64);
            if part.items.len() != self.part.items.len() {
                self.searches = searches(&part);
                self.part = part;
            }
        }
        // Between the lowest capacity and the peak, a search succeeds soon or never. So it is started often, for few steps.
        let short = if round.is_lowest() { slice } else { slice.min(self.first >> 1 << (level / 2)) };
        (0..slice / short).all(|start| self.probe(round, start, short))
    }

    /// The goal of a repair of some sections.
    fn goal(&self, sections: Range<usize>, level: u64, steps: u64) -> Goal {
        Goal { sections, enough: self.targets.least, attempt: self.attempt << level.min(16), steps }
    }

    /// Repairs the best solution.
    fn repair(&mut self, level: u64, steps: u64) {
        let Improvement { problem, time, .. } = *self;
        let goal = self.goal(0..time.live.len(), level, steps);
        let offsets = std::mem::take(&mut self.best.offsets);
        self.best = Solution::new(problem, repair(problem, time, offsets, goal, self.meter));
    }

    /// Repairs the best solution on two cores: one moves the items before a point in time, the other those after it. About as
    /// many items are too high on either side.
    fn repair_halves(&mut self, level: u64, steps: u64) {
        let Improvement { problem, time, .. } = *self;
        let enough = self.targets.least;
        let over = |&item: &usize| self.best.offsets[item] + problem.size(item) > enough;
        let mut over: Vec<usize> = (0..time.spans.len()).filter(over).map(|item| time.spans[item].start).collect();
        if over.is_empty() {
            return;
        }
        let middle = over.len() / 2;
        let cut = *over.select_nth_unstable(middle).1;
        let goals = [0..cut, cut..time.live.len()].map(|sections| self.goal(sections, level, steps));
        let [mut first, second] =
            self.meter.both(|side, meter| repair(problem, time, self.best.offsets.clone(), goals[side].clone(), meter));
        let after = (0..first.len()).filter(|&item| time.spans[item].start >= cut);
        after.for_each(|item| first[item] = second[item]);
        self.best = Solution::new(problem, first);
    }

    /// Packs all items again under a lower roof, for about `steps` steps. An item that does not fit goes earlier next time.
    fn squeeze(&mut self, steps: u64) {
        let end = self.meter.spent() + steps;
        while self.meter.spent() < end && self.best.peak > self.targets.least {
            let roof = self.best.peak - (self.best.peak - self.targets.least).div_ceil(16);
            match self.packer.pack(&self.recipe, roof, self.meter) {
                Ok(peak) => self.best = Solution { offsets: self.packer.offsets.clone(), peak, proved: 0 },
                Err(Stuck::At(item)) if self.recipe.prefer(item) => {}
                Err(_) => return,
            }
        }
    }

    /// Runs the exact search at one capacity for `steps` steps. Returns false when there is nothing more to do.
    fn probe(&mut self, round: Round, start: u64, steps: u64) -> bool {
        let roof = self.best.peak.min(self.bar);
        let Some(capacity) = self.targets.next(round.is_lowest(), roof) else { return false };
        if self.meter.is_over() {
            return false;
        }
        let manner = manner(&self.part, round, start);
        let search = &mut self.searches[usize::from(!round.is_lowest())];
        let begin = search.work;
        let mut seen = begin;
        let outcome = search.run(capacity, &manner, &mut |work| {
            let over = self.meter.spend(work - seen + 64);
            seen = work;
            over || work - begin > steps
        });
        self.meter.spend(search.work - seen + 64 * self.part.items.len() as u64);
        match outcome {
            Outcome::Found => {
                let found = self.part.complete(self.problem, self.time, &search.offsets, roof, self.meter);
                if let Some(solution) = found {
                    self.best = solution;
                }
            }
            Outcome::Failed => self.targets.exhausted(capacity),
            Outcome::Stopped => self.targets.stopped(capacity),
        }
        true
    }
}

/// The order of blocks and the choice of sections for a search. There are nine ways, varied by noise except in the first start
/// of the first level.
fn manner(part: &Subproblem, Round { level, number }: Round, start: u64) -> Manner {
    let seed = mix(level * (LOWEST + BETWEEN) + number) ^ start;
    let noise =
        |block: usize| 1024 + u128::from(if level == 0 && start == 0 { 0 } else { mix(seed ^ block as u64) % 307 });
    let mut order: Vec<u32> = (0..part.blocks.len() as u32).collect();
    order.sort_by_cached_key(|&index| {
        let block = &part.blocks[index as usize];
        let (size, width) = (u128::from(block.size), block.span.len() as u128);
        let key = match (number + start) % 3 {
            0 => width << 64 | size,
            1 => size * width,
            _ => size << 32 | width,
        };
        // This does not overflow: a width has 31 bits, and the noise 11.
        Reverse(key * noise(index as usize))
    });
    let focus = (number + number / 3 + level + start / 3) % 3;
    Manner::new(&order, [Focus::None, Focus::Full, Focus::Root][focus as usize])
}

/// The capacities to try.
struct Targets {
    /// A peak that no placement undercuts.
    proved: u64,
    /// The lowest useful capacity: lower ones are impossible, or the caller does not need them.
    least: u64,
    /// The highest capacity at which a search ended without a placement.
    failed: u64,
    /// A number that divides all peaks.
    unit: u64,
    /// True if a failure of the exact search proves that there is no placement.
    exact: bool,
}

impl Targets {
    fn new(problem: &Problem, proved: u64, least: u64) -> Targets {
        let align = |index: usize| problem.items()[index].align.max(problem.align());
        let sized = || (0..problem.items().len()).filter(|&index| problem.size(index) > 0);
        let strictest = sized().map(align).max().unwrap_or(1);
        let exact = sized().all(|index| problem.size(index).is_multiple_of(strictest));
        let unit = sized().fold(if exact { 0 } else { 1 }, |unit, index| gcd(unit, problem.size(index))).max(1);
        Targets { proved, least, failed: least, unit, exact }
    }

    /// The capacity to try next, or `None` if no peak below the roof is possible or useful.
    fn next(&mut self, lowest: bool, roof: u64) -> Option<u64> {
        let highest = roof.saturating_sub(self.unit);
        if highest < self.least {
            return None;
        }
        if lowest {
            return Some(self.least);
        }
        if self.failed + roof / 1024 >= highest {
            self.failed = self.least;
        }
        Some(self.failed.midpoint(highest))
    }

    /// Notes that the search at this capacity was exhausted.
    fn exhausted(&mut self, capacity: u64) {
        if self.exact {
            self.least = (capacity + 1).next_multiple_of(self.unit);
            self.proved = self.least.max(self.proved);
        }
        self.failed = self.failed.max(capacity);
    }

    /// Notes that the search at this capacity ran out of steps.
    fn stopped(&mut self, capacity: u64) {
        self.failed = self.failed.max(capacity);
    }
}
