//! Greedy passes: each packs all items in one order, from the bottom up or one by one at the lowest free offset.

use super::effort::{Effort, Meter};
use super::exact::Block;
use super::pack::{Level, Packer, Recipe};
use super::sections::Sections;
use super::subproblem::fill;
use super::{Problem, Solution};
use std::cmp::Reverse;

/// A problem with more items is giant: a packing pass takes a second or more, and placing items one by one several seconds.
pub(super) const GIANT: usize = 200_000;
/// A problem with at most this many items is small: the search makes up for what the passes miss.
const SMALL: usize = 2000;

/// The passes for small problems, the most successful first.
const FOR_SMALL: [Pass; 8] = [
    Pass::Pack(Key::Start),
    Pass::Pack(Key::BusySections),
    Pass::Pack(Key::BusyArea),
    Pass::Pack(Key::Area),
    Pass::Pack(Key::AreaSections),
    Pass::Pack(Key::Sections),
    Pass::Pack(Key::Size),
    Pass::Pack(Key::End),
];
/// The passes for other problems, the most successful first.
const FOR_LARGE: [Pass; 12] = [
    Pass::Pack(Key::Start),
    Pass::Pack(Key::Area),
    Pass::Pack(Key::BusyArea),
    Pass::Lay(Key::BusyArea),
    Pass::Pack(Key::BusySections),
    Pass::Pack(Key::Worth(32)),
    Pass::Level(32, 16),
    Pass::Level(64, 8),
    Pass::Pack(Key::AreaSections),
    Pass::Pack(Key::Sections),
    Pass::Pack(Key::Size),
    Pass::Pack(Key::End),
];
/// The passes for giant problems: the first one, then those of the two cores by turns.
const FOR_GIANT: [Pass; 13] = [
    Pass::Pack(Key::Worth(32)),
    Pass::Level(32, 16),
    Pass::Level(64, 8),
    Pass::Level(64, 8),
    Pass::Level(32, 16),
    Pass::Pack(Key::Start),
    Pass::Again,
    Pass::Again,
    Pass::Again,
    Pass::Pack(Key::BusySections),
    Pass::Again,
    Pass::Again,
    Pass::Again,
];

/// A pass over all items.
#[derive(Clone, Copy)]
enum Pass {
    /// Packs in the order of a key.
    Pack(Key),
    /// Packs by [worth](Key::Worth), and lifts a stretch if that wastes at most one part in so many of the room it saves.
    Level(u64, u32),
    /// Repeats the level pass with the lowest peak so far, with the sections' lack of room that was learnt since.
    Again,
    /// Puts the items one by one at the lowest free offset, in the order of a key.
    Lay(Key),
}

/// A sorting key: the item with the greatest key comes first.
#[derive(Clone, Copy)]
enum Key {
    Start,
    End,
    Size,
    Sections,
    Area,
    AreaSections,
    /// The largest live sum of its sections, then their number.
    BusySections,
    /// The largest live sum of its sections, then its area.
    BusyArea,
    /// The worth of its sections: see [`Sections::worth`].
    Worth(u64),
}

/// Makes several passes, and returns the best solution with its recipe. The first pass is made whatever the effort.
pub(super) fn greedy(
    problem: &Problem,
    time: &Sections,
    packer: &mut Packer,
    enough: u64,
    meter: &mut Meter,
) -> (Solution, Recipe) {
    let blocks = packer.blocks();
    let tried: &[Pass] = match blocks.len() {
        0..=SMALL => &FOR_SMALL,
        _ if blocks.len() <= GIANT => &FOR_LARGE,
        _ => &FOR_GIANT,
    };
    let greedy = Greedy { problem, time, blocks, enough };
    let mut first = None;
    greedy.run(packer, tried[..1].iter(), &mut first, &mut Meter::new(Effort::Steps(u64::MAX)));
    meter.spend(blocks.len() as u64);
    let found = if blocks.len() <= GIANT {
        greedy.run(packer, tried[1..].iter(), &mut first, meter);
        first
    } else {
        let packer = &*packer;
        let found = meter.both(|side, meter| {
            let (mut packer, mut best) = (packer.clone(), first.clone());
            greedy.run(&mut packer, tried[1 + side..].iter().step_by(2), &mut best, meter);
            best
        });
        found.into_iter().flatten().min_by_key(|(solution, _)| solution.peak)
    };
    found.expect("the first pass has no limit")
}

/// The problem that all passes share.
struct Greedy<'a> {
    problem: &'a Problem,
    time: &'a Sections,
    blocks: &'a [Block],
    enough: u64,
}

impl Greedy<'_> {
    /// Makes passes until one is good enough or the effort is spent.
    fn run<'p>(
        &self,
        packer: &mut Packer,
        passes: impl Iterator<Item = &'p Pass>,
        best: &mut Option<(Solution, Recipe)>,
        meter: &mut Meter,
    ) {
        let mut lacking = vec![0; self.time.live.len()];
        let mut lowest = (u64::MAX, Pass::Level(64, 8));
        for &pass in passes {
            let pass = if let Pass::Again = pass { lowest.1 } else { pass };
            let peak = best.as_ref().map_or(u64::MAX, |(best, _)| best.peak);
            if meter.is_over() || peak <= self.enough {
                return;
            }
            let found = self.pass(packer, pass, peak, &lacking, meter);
            if let (Some((solution, _)), Pass::Level(..)) = (&found, pass) {
                self.learn(solution, self.enough.midpoint(peak.min(solution.peak)), &mut lacking);
                if solution.peak < lowest.0 {
                    lowest = (solution.peak, pass);
                }
            }
            if let Some(found) = found.filter(|(solution, _)| solution.peak < peak) {
                *best = Some(found);
            }
            meter.spend(self.blocks.len() as u64);
        }
    }

    /// Adds, per section, the bytes above a roof to what it lacks. Worth depends on that in the next level pass.
    fn learn(&self, solution: &Solution, roof: u64, lacking: &mut [u64]) {
        let mut change = vec![0u64; lacking.len() + 1];
        for (Block { span, size, .. }, offset) in self.blocks.iter().zip(&solution.offsets) {
            let above = (offset + size).saturating_sub(roof).min(*size);
            change[span.start] = change[span.start].wrapping_add(above);
            change[span.end] = change[span.end].wrapping_sub(above);
        }
        let mut above: u64 = 0;
        for (lacking, change) in lacking.iter_mut().zip(change) {
            above = above.wrapping_add(change);
            *lacking = lacking.saturating_add(above);
        }
    }

    /// Makes one pass. It stops if its peak is not below `roof`, except a level pass, which teaches what sections lack.
    fn pass(
        &self,
        packer: &mut Packer,
        pass: Pass,
        roof: u64,
        lacking: &[u64],
        meter: &mut Meter,
    ) -> Option<(Solution, Recipe)> {
        let (recipe, roof) = match pass {
            Pass::Pack(key) | Pass::Lay(key) => (Recipe { order: self.order(key, &[]), level: None }, roof),
            Pass::Level(of_bound, parts) => {
                let order = self.order(Key::Worth(of_bound), lacking);
                let level = Some(Level { worth: self.time.worth(of_bound, lacking), parts });
                (Recipe { order, level }, u64::MAX)
            }
            // `run` has replaced it by the pass that it repeats.
            Pass::Again => return None,
        };
        let solution = if let Pass::Lay(_) = pass {
            let sized = |&item: &u32| !self.blocks[item as usize].span.is_empty();
            let order = recipe.order.iter().copied().filter(sized).collect();
            fill(self.problem, self.time, vec![None; self.blocks.len()], &order, roof, meter).ok()?
        } else {
            let peak = packer.pack(&recipe, roof - 1, meter).ok()?;
            Solution { offsets: packer.offsets.clone(), peak, proved: 0 }
        };
        Some((solution, recipe))
    }

    fn order(&self, key: Key, lacking: &[u64]) -> Vec<u32> {
        let (items, time) = (&self.problem.items, self.time);
        let busy = || time.busiest();
        let worth = if let Key::Worth(parts) = key { time.worth(parts, lacking) } else { Vec::new() };
        let mut order: Vec<u32> = (0..items.len() as u32).collect();
        order.sort_by_cached_key(|&index| {
            let (item, index) = (items[index as usize], index as usize);
            let (size, life) = (u128::from(item.size), u128::from(item.upper - item.lower));
            let span = &time.spans[index];
            let sections = span.len() as u128;
            Reverse(match key {
                Key::Start => (u128::from(u64::MAX - item.lower), size),
                Key::End => (u128::from(item.upper), size),
                Key::Size => (size, life),
                Key::Sections => (sections, size),
                Key::Area => (size * life, size),
                Key::AreaSections => (size * sections, size),
                Key::BusySections => (u128::from(busy()[index]), sections),
                Key::BusyArea => (u128::from(busy()[index]), size * life),
                Key::Worth(_) => (u128::from(worth[span.end] - worth[span.start]), size),
            })
        });
        order
    }
}
