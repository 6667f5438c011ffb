//! Neighbourhoods: an item that is too high is placed again together with the items around it. All others stay.
//!
//! ```text
//!  . . . . . . +--+ . . . . . . .  the roof
//!         |  +-|  |-+  |
//!  -------+  | +--+ |  +---------  blocks that cross the neighbourhood's ends keep their offsets,
//!         |  +------+  |           blocks within it are free
//!  -------+------------+---------
//! ```

use super::Problem;
use super::effort::Meter;
use super::exact::{Block, Focus, Manner, Outcome, Search};
use super::pack::{Packer, Recipe, Stuck};
use super::sections::Sections;
use super::subproblem::Placed;
use std::cmp::Reverse;
use std::ops::Range;

/// The most items of a neighbourhood, free or fixed.
const LARGEST: usize = 1 << 16;
/// The most items of a neighbourhood for the exact search.
const EXACT: usize = 600;
/// Approximate steps per item when a neighbourhood is packed.
const PACKING: u64 = 1000;
/// Steps of one exact search.
const ATTEMPT: u64 = 2_000_000;
/// The most attempts to pack the blocks of a neighbourhood in one order.
const SQUEEZES: usize = 10;

/// An attempt to bring items under a roof before the meter reaches `end`.
pub(super) struct Clearing<'a> {
    pub problem: &'a Problem,
    pub time: &'a Sections,
    /// Neighbourhoods stay within these sections.
    pub home: &'a Range<usize>,
    pub roof: u64,
    pub end: u64,
}

impl Clearing<'_> {
    /// Brings an item and the items around it under the roof, in growing neighbourhoods. On failure, nothing changes.
    pub fn clear(&self, placed: &Placed, offsets: &mut [u64], item: usize, meter: &mut Meter) -> bool {
        let spans = &self.time.spans;
        let span = spans[item].clone();
        let mut margin = span.len().max(8);
        let mut last = 0;
        while meter.spent() < self.end && !meter.is_over() {
            let neighbourhood =
                span.start.saturating_sub(margin).max(self.home.start)..(span.end + margin).min(self.home.end);
            let mut items = Vec::new();
            placed.meeting(&neighbourhood, &mut |other| items.push(other));
            let too_large = last > 0 && (items.len() > LARGEST || items.len() == last);
            if too_large || meter.spent().saturating_add(PACKING * items.len() as u64) > self.end {
                return false;
            }
            let crossing =
                items.iter().filter(|&&i| spans[i].start < neighbourhood.start || spans[i].end > neighbourhood.end);
            last = items.len();
            meter.spend(16 * last as u64);
            margin *= 2;
            // If most items are fixed, there is little to choose.
            if 2 * crossing.count() <= last && self.place_again(offsets, &items, neighbourhood, meter) {
                return true;
            }
        }
        false
    }

    /// Places the items within the neighbourhood again, around those that cross its ends.
    fn place_again(
        &self,
        offsets: &mut [u64],
        items: &[usize],
        neighbourhood: Range<usize>,
        meter: &mut Meter,
    ) -> bool {
        let inside = |span: &Range<usize>| neighbourhood.start <= span.start && span.end <= neighbourhood.end;
        let block = |&item: &usize| {
            let span = &self.time.spans[item];
            let own = span.start.max(neighbourhood.start) - neighbourhood.start
                ..span.end.min(neighbourhood.end) - neighbourhood.start;
            self.problem.block(item, own, (!inside(span)).then_some(offsets[item]))
        };
        let blocks: Vec<Block> = items.iter().map(block).collect();
        meter.spend(64 * blocks.len() as u64);
        let Some(found) = self
            .squeeze(items, neighbourhood.len(), &blocks, meter)
            .or_else(|| exact(neighbourhood.len(), &blocks, self.roof, meter))
        else {
            return false;
        };
        items.iter().zip(&found).for_each(|(&item, &offset)| offsets[item] = offset);
        true
    }

    /// Packs the free blocks in several orders. A block that does not fit goes earlier in the next attempt.
    fn squeeze(&self, items: &[usize], sections: usize, blocks: &[Block], meter: &mut Meter) -> Option<Vec<u64>> {
        let mut packer = Packer::new(sections, blocks);
        let free: Vec<u32> = (0..blocks.len() as u32).filter(|&at| blocks[at as usize].fixed.is_none()).collect();
        for which in 0..4 {
            let mut recipe = Recipe { order: free.clone(), level: None };
            recipe.order.sort_by_cached_key(|&at| {
                let Block { span, size, .. } = &blocks[at as usize];
                let busy = self.time.busiest()[items[at as usize]];
                let width = span.len() as u64;
                Reverse(match which {
                    0 => (u128::from(busy), width),
                    1 => (u128::from(width), *size),
                    2 => (u128::from(*size) * u128::from(width), width),
                    _ => (u128::from(*size), width),
                })
            });
            for _ in 0..SQUEEZES {
                if meter.spent() >= self.end {
                    return None;
                }
                match packer.pack(&recipe, self.roof, meter) {
                    Ok(_) => return Some(packer.offsets),
                    Err(Stuck::Late) => return None,
                    Err(Stuck::At(block)) if recipe.prefer(block) => {}
                    Err(Stuck::At(_)) => break,
                }
            }
        }
        None
    }
}

/// Searches for offsets of the free blocks.
fn exact(sections: usize, blocks: &[Block], roof: u64, meter: &mut Meter) -> Option<Vec<u64>> {
    // The search would count a fixed block above the roof as a failure, although it may not be in the way.
    if blocks.len() > EXACT || blocks.iter().any(|block| block.fixed.is_some_and(|offset| offset + block.size > roof)) {
        return None;
    }
    let mut search = Search::new(sections, blocks.to_vec());
    for which in 0..2 {
        let mut order: Vec<u32> = (0..blocks.len() as u32).collect();
        order.sort_by_cached_key(|&index| {
            let block = &blocks[index as usize];
            let (size, width) = (u128::from(block.size), block.span.len() as u128);
            Reverse(if which == 0 { width << 64 | size } else { size * width })
        });
        let manner = Manner::new(&order, if which == 0 { Focus::Full } else { Focus::None });
        let (begin, mut seen) = (search.work, search.work);
        let outcome = search.run(roof, &manner, &mut |work| {
            let over = meter.spend(work - seen + 64);
            seen = work;
            over || work - begin > ATTEMPT
        });
        match outcome {
            Outcome::Found => return Some(search.offsets),
            Outcome::Failed => return None,
            Outcome::Stopped => {}
        }
    }
    None
}
