//! The search for a lower peak, once the greedy pass has given one.

use super::core::Core;
use super::effort::Meter;
use super::exact::{Focus, Manner, Outcome, Search, mix};
use super::greedy::Packer;
use super::local::Walk;
use super::window::repair;
use super::{Problem, Solution};
use std::cmp::Reverse;

/// Rounds of a level: first for the lowest capacity of interest, then for some between it and the best peak.
const LOWEST: u64 = 9;
const BETWEEN: u64 = 3;
/// Steps of a round of the first level, and of the last. Each level doubles them.
const FIRST: u64 = 1 << 21;
const LAST: u64 = 1 << 34;

/// The largest problem that is worth a walk over orders.
const WALK: usize = 4000;

/// Improves a solution in rounds that grow, until it is good enough, nothing better exists or the meter says stop.
///
/// A round walks over orders, and asks the exact search for a capacity: the lowest of interest and one below the best peak by turns.
/// Which placement is found does not depend on how much effort is left, so more effort is never worse.
pub(super) fn hunt(
    problem: &Problem,
    packer: &mut Packer,
    best: &mut Solution,
    order: Vec<u32>,
    enough: u64,
    bar: u64,
    meter: &mut Meter,
) {
    let time = packer.time;
    let mut target = Targets::new(problem, enough);
    let mut walk = Walk::new(order);
    // A round should do more than to look at every item.
    let first = (1000 * problem.items().len() as u64).clamp(FIRST, 1 << 27);
    let mut core = Core::new(problem, time, first >> LOWEST);
    let mut search = Search::new(core.sections, core.blocks.clone());
    for round in 0.. {
        let (level, turn) = (round / (LOWEST + BETWEEN), round % (LOWEST + BETWEEN));
        let slice = (first << level.min(32)).min(LAST);
        if turn == 0 && best.offsets.len() <= WALK {
            let end = meter.spent() + slice;
            while meter.spent() < end && best.peak > enough && !meter.is_over() {
                walk.step(packer, best, meter);
            }
        }
        if turn == LOWEST && !core.whole {
            repair(problem, time, best, enough, 16 * slice, meter);
        }
        if !core.whole && turn < LOWEST {
            // The rounds of a level take up ever more sections.
            let other = Core::new(problem, time, (2 * slice) >> (LOWEST - 1 - turn));
            meter.spend(16 * problem.items().len() as u64);
            if other.sections != core.sections {
                search = Search::new(other.sections, other.blocks.clone());
                core = other;
            }
        }
        // Between the lowest capacity and the peak a search succeeds soon or never: many short ones.
        let short = if turn < LOWEST { slice } else { slice.min(first >> 1 << (level / 2)) };
        for part in 0..slice / short {
            let roof = best.peak.min(bar);
            let Some(capacity) = target.next(turn < LOWEST, roof) else {
                return;
            };
            if meter.is_over() {
                return;
            }
            let manner = manner(&core, level, turn, part);
            let begin = search.work;
            let mut seen = begin;
            let outcome = search.run(capacity, &manner, &mut |work| {
                let over = meter.spend(work - seen + 64);
                seen = work;
                over || work - begin > short
            });
            meter.spend(search.work - seen + 64 * core.items.len() as u64);
            match outcome {
                Outcome::Found => {
                    if let Some(solution) = core.complete(problem, time, &search.offsets, roof, meter) {
                        *best = solution;
                    }
                }
                Outcome::Failed => target.failed(capacity),
                Outcome::Stopped => target.stopped(capacity),
            }
        }
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
    fn new(problem: &Problem, least: u64) -> Targets {
        let align = |index: usize| problem.items()[index].align.max(problem.align());
        let sized = || (0..problem.items().len()).filter(|&index| problem.size(index) > 0);
        let strictest = sized().map(align).max().unwrap_or(1);
        let exact = sized().all(|index| problem.size(index).is_multiple_of(strictest));
        let unit = sized().fold(if exact { 0 } else { 1 }, |unit, index| gcd(unit, problem.size(index))).max(1);
        Targets { least, vain: least, unit, exact }
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
        }
        self.vain = self.vain.max(capacity);
    }

    fn stopped(&mut self, capacity: u64) {
        self.vain = self.vain.max(capacity);
    }
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}
