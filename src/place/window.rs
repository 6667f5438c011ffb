//! Windows: what reaches too high is placed anew together with what is around it, while all else stays.
//!
//! ```text
//!  . . . . . . +--+ . . . . . . .  the roof
//!         |  +-|  |-+  |
//!  -------+  | +--+ |  +---------  blocks that leave the window keep their offsets,
//!         |  +------+  |           those within are free
//!  -------+------------+---------
//! ```

use super::Problem;
use super::effort::Meter;
use super::exact::{Block, Focus, Manner, Outcome, Search};
use super::pack::{Packer, Recipe, Stuck};
use super::sections::Timeline;
use super::subproblem::Placed;
use std::cmp::Reverse;
use std::ops::Range;

/// The most items of a window, free or not, and of one that is searched.
const LARGEST: usize = 1 << 16;
const EXACT: usize = 600;
/// Steps for an item of a window that is packed, about.
const PACKING: u64 = 1000;
/// Steps of one attempt at a window.
const ATTEMPT: u64 = 2_000_000;
/// The most attempts to pack the blocks of a window in one order.
const SQUEEZES: usize = 10;

/// Brings an item and all that share a window with it, at most these sections, under the roof until so many steps were spent, or changes
/// nothing.
pub(super) fn clear(
    problem: &Problem,
    time: &Timeline,
    placed: &Placed,
    offsets: &mut [u64],
    item: usize,
    most: &Range<usize>,
    roof: u64,
    end: u64,
    meter: &mut Meter,
) -> bool {
    let span = time.spans[item].clone();
    let mut margin = span.len().max(8);
    let mut last = 0;
    while meter.spent() < end && !meter.is_over() {
        let window = span.start.saturating_sub(margin).max(most.start)..(span.end + margin).min(most.end);
        let mut items = Vec::new();
        placed.meeting(&window, &mut |other| items.push(other));
        let steps = PACKING * items.len() as u64;
        if last > 0 && (items.len() > LARGEST || items.len() == last) || meter.spent().saturating_add(steps) > end {
            return false;
        }
        let crossing = items.iter().filter(|&&i| time.spans[i].start < window.start || time.spans[i].end > window.end);
        last = items.len();
        meter.spend(16 * last as u64);
        margin *= 2;
        // Where most are fixed there is little to choose.
        if 2 * crossing.count() <= last && place_anew(problem, time, offsets, &items, window, roof, end, meter) {
            return true;
        }
    }
    false
}

/// Places those items anew that lie within the window.
fn place_anew(
    problem: &Problem,
    time: &Timeline,
    offsets: &mut [u64],
    items: &[usize],
    window: Range<usize>,
    roof: u64,
    end: u64,
    meter: &mut Meter,
) -> bool {
    let inside = |span: &Range<usize>| window.start <= span.start && span.end <= window.end;
    let block = |&item: &usize| {
        let span = &time.spans[item];
        let own = span.start.max(window.start) - window.start..span.end.min(window.end) - window.start;
        problem.block(item, own, (!inside(span)).then_some(offsets[item]))
    };
    let blocks: Vec<Block> = items.iter().map(block).collect();
    meter.spend(64 * blocks.len() as u64);
    let Some(found) = squeeze(time, items, window.len(), &blocks, roof, end, meter)
        .or_else(|| exact(window.len(), &blocks, roof, meter))
    else {
        return false;
    };
    items.iter().zip(&found).for_each(|(&item, &offset)| offsets[item] = offset);
    true
}

/// Packs the free blocks in several orders. One that finds no room goes earlier in the next attempt.
fn squeeze(
    time: &Timeline,
    items: &[usize],
    sections: usize,
    blocks: &[Block],
    roof: u64,
    end: u64,
    meter: &mut Meter,
) -> Option<Vec<u64>> {
    let mut packer = Packer::new(sections, blocks);
    let free: Vec<u32> = (0..blocks.len() as u32).filter(|&at| blocks[at as usize].fixed.is_none()).collect();
    for which in 0..4 {
        let mut recipe = Recipe { order: free.clone(), level: None };
        recipe.order.sort_by_cached_key(|&at| {
            let Block { span, size, .. } = &blocks[at as usize];
            let busy = time.busiest()[items[at as usize]];
            let width = span.len() as u64;
            Reverse(match which {
                0 => (u128::from(busy), width),
                1 => (u128::from(width), *size),
                2 => (u128::from(*size) * u128::from(width), width),
                _ => (u128::from(*size), width),
            })
        });
        for _ in 0..SQUEEZES {
            if meter.spent() >= end {
                return None;
            }
            match packer.pack(&recipe, roof, meter) {
                Ok(_) => return Some(packer.offsets),
                Err(Stuck::Late) => return None,
                Err(Stuck::At(block)) => {
                    let order = &mut recipe.order;
                    let at = order.iter().position(|&other| other == block).expect("it is one of them");
                    if at == 0 {
                        break;
                    }
                    order[at / 2..=at].rotate_right(1);
                }
            }
        }
    }
    None
}

/// Searches for offsets of the free blocks.
fn exact(sections: usize, blocks: &[Block], roof: u64, meter: &mut Meter) -> Option<Vec<u64>> {
    // What leaves the window above the roof is but in the way of the others; the search would take it for a failure.
    if blocks.len() > EXACT || blocks.iter().any(|block| block.fixed.is_some_and(|offset| offset + block.size > roof)) {
        return None;
    }
    let mut search = Search::new(sections, blocks.to_vec());
    for turn in 0..2 {
        let mut order: Vec<u32> = (0..blocks.len() as u32).collect();
        order.sort_by_cached_key(|&index| {
            let block = &blocks[index as usize];
            let (size, width) = (u128::from(block.size), block.span.len() as u128);
            Reverse(if turn % 2 == 0 { width << 64 | size } else { size * width })
        });
        let mut rank = vec![0; order.len()];
        order.iter().enumerate().for_each(|(place, &block)| rank[block as usize] = place as u32);
        let manner = Manner { rank, focus: if turn < 1 { Focus::Full } else { Focus::None } };
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
