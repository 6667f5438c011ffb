//! Repair by windows: what reaches too high is placed anew together with what is around it, exactly, while all else stays.
//!
//! ```text
//!  . . . . . . +--+ . . . . . . .  the roof
//!         |  +-|  |-+  |
//!  -------+  | +--+ |  +---------  blocks that leave the window keep their offsets,
//!         |  +------+  |           those within are free
//!  -------+------------+---------
//! ```

use super::core::Placed;
use super::effort::Meter;
use super::exact::{Block, Focus, Manner, Outcome, Search};
use super::time::Timeline;
use super::{Problem, Solution};
use std::cmp::Reverse;
use std::ops::Range;

/// The most items of a window, free or not.
const LARGEST: usize = 1200;
/// A gain of less than one part in so many is not worth an attempt.
const LEAST: u64 = 2000;
/// Steps of one attempt at a window.
const ATTEMPT: u64 = 2_000_000;
/// The most attempts to lay the blocks of a window one by one.
const SQUEEZES: usize = 60;

/// Lowers the peak as far as windows can in about so many steps, halving the distance to `enough` as long as that works.
pub(super) fn repair(
    problem: &Problem,
    time: &Timeline,
    best: &mut Solution,
    enough: u64,
    steps: u64,
    meter: &mut Meter,
) {
    let end = meter.spent() + steps;
    let mut placed = Placed::new(time);
    (0..time.spans.len()).filter(|&item| !time.spans[item].is_empty()).for_each(|item| placed.insert(item));
    meter.spend(64 * time.spans.len() as u64);
    let mut vain = enough;
    while best.peak > enough && meter.spent() < end && !meter.is_over() {
        let roof = vain.midpoint(best.peak);
        if roof == best.peak || (vain > enough && best.peak - vain < best.peak / LEAST) {
            return;
        }
        vain = vain.max(lower(problem, time, &placed, &mut best.offsets, roof, end, meter));
        *best = Solution::new(problem, std::mem::take(&mut best.offsets));
    }
}

/// Brings what exceeds a roof under it, the earliest first. Where that cannot be done the roof is raised, so that what was gained stays.
/// The highest roof that was tried in vain.
fn lower(
    problem: &Problem,
    time: &Timeline,
    placed: &Placed,
    offsets: &mut [u64],
    mut roof: u64,
    end: u64,
    meter: &mut Meter,
) -> u64 {
    let top = |offsets: &[u64], item: usize| offsets[item] + problem.size(item);
    let mut over: Vec<usize> =
        (0..offsets.len()).filter(|&item| !time.spans[item].is_empty() && top(offsets, item) > roof).collect();
    over.sort_by_key(|&item| time.spans[item].start);
    meter.spend(2 * offsets.len() as u64);
    let mut vain = 0;
    for item in over {
        while top(offsets, item) > roof {
            if meter.spent() > end || meter.is_over() {
                return vain;
            }
            if !clear(problem, time, placed, offsets, item, roof, meter) {
                vain = roof;
                roof = roof.midpoint(top(offsets, item));
                if top(offsets, item) - roof < roof / LEAST {
                    return vain;
                }
            }
        }
    }
    vain
}

/// Brings an item and all that share a window with it under the roof.
fn clear(
    problem: &Problem,
    time: &Timeline,
    placed: &Placed,
    offsets: &mut [u64],
    item: usize,
    roof: u64,
    meter: &mut Meter,
) -> bool {
    let sections = time.live.len();
    let span = time.spans[item].clone();
    let mut margin = span.len().max(8);
    let mut last = 0;
    for attempt in 0.. {
        let window = span.start.saturating_sub(margin)..(span.end + margin).min(sections);
        let mut items = Vec::new();
        placed.meeting(&window, &mut |other| items.push(other));
        if attempt > 0 && (items.len() > LARGEST || items.len() == last) || meter.is_over() {
            return false;
        }
        last = items.len();
        if place_anew(problem, time, offsets, &items, window, roof, meter) {
            return true;
        }
        margin *= 2;
    }
    false
}

fn place_anew(
    problem: &Problem,
    time: &Timeline,
    offsets: &mut [u64],
    items: &[usize],
    window: Range<usize>,
    roof: u64,
    meter: &mut Meter,
) -> bool {
    let inside = |span: &Range<usize>| window.start <= span.start && span.end <= window.end;
    let block = |&item: &usize| {
        let span = &time.spans[item];
        let size = problem.size(item);
        Block {
            span: span.start.max(window.start) - window.start..span.end.min(window.end) - window.start,
            size,
            align: problem.items()[item].align.max(problem.align()),
            fixed: (!inside(span)).then_some(offsets[item]),
        }
    };
    let blocks: Vec<Block> = items.iter().map(block).collect();
    let cells: usize = blocks.iter().map(|block| block.span.len()).sum();
    meter.spend(8 * cells as u64);
    if let Some(found) = squeeze(&blocks, roof, meter) {
        items.iter().zip(&found).for_each(|(&item, &offset)| offsets[item] = offset);
        return true;
    }
    // What leaves the window above the roof is but in the way of the others; the search would take it for a failure.
    if blocks.iter().any(|block| block.fixed.is_some_and(|offset| offset + block.size > roof)) {
        return false;
    }
    let mut search = Search::new(window.len(), blocks);
    for turn in 0..2 {
        let mut order: Vec<u32> = (0..items.len() as u32).collect();
        order.sort_by_cached_key(|&index| {
            let block = &search.blocks()[index as usize];
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
            Outcome::Found => {
                items.iter().zip(&search.offsets).for_each(|(&item, &offset)| offsets[item] = offset);
                return true;
            }
            Outcome::Failed => return false,
            Outcome::Stopped => {}
        }
    }
    false
}

/// Lays the free blocks one by one into the lowest room. One that finds none goes earlier in the next attempt.
fn squeeze(blocks: &[Block], roof: u64, meter: &mut Meter) -> Option<Vec<u64>> {
    let weight = |&at: &usize| Reverse(u128::from(blocks[at].size) * blocks[at].span.len() as u128);
    let mut order: Vec<usize> = (0..blocks.len()).filter(|&at| blocks[at].fixed.is_none()).collect();
    order.sort_by_key(weight);
    let fixed: Vec<usize> = (0..blocks.len()).filter(|&at| blocks[at].fixed.is_some()).collect();
    let mut offsets: Vec<u64> = blocks.iter().map(|block| block.fixed.unwrap_or(0)).collect();
    let mut taken: Vec<(u64, u64)> = Vec::new();
    for _ in 0..SQUEEZES {
        let lay = |place: usize, offsets: &mut [u64], taken: &mut Vec<(u64, u64)>| {
            let block = &blocks[order[place]];
            let meets = |&&other: &&usize| {
                blocks[other].span.start < block.span.end && block.span.start < blocks[other].span.end
            };
            taken.clear();
            let others = fixed.iter().chain(&order[..place]).filter(meets);
            taken.extend(others.map(|&other| (offsets[other], offsets[other] + blocks[other].size)));
            taken.sort_unstable();
            let mut offset: u64 = 0;
            for &(start, end) in taken.iter() {
                if offset + block.size <= start {
                    break;
                }
                offset = offset.max(end.next_multiple_of(block.align));
            }
            offsets[order[place]] = offset;
            offset + block.size <= roof
        };
        let stuck = (0..order.len()).find(|&place| !lay(place, &mut offsets, &mut taken));
        let Some(stuck) = stuck else {
            return Some(offsets);
        };
        order[stuck / 2..=stuck].rotate_right(1);
        if stuck == 0 || meter.spend((stuck * blocks.len()) as u64) {
            return None;
        }
    }
    None
}
