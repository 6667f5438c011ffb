//! The greedy pass: packs from the bottom up in a given order.

use super::core::fill;
use super::effort::{Effort, Meter};
use super::exact::Block;
use super::pack::Packer;
use super::time::Timeline;
use super::{Problem, Solution};
use std::cmp::Reverse;

/// The best of several orders, each packed from the bottom up or laid item by item into the lowest room.
pub(super) fn greedy(
    problem: &Problem,
    time: &Timeline,
    blocks: &[Block],
    enough: u64,
    meter: &mut Meter,
) -> (Solution, Vec<u32>) {
    let mut packer = Packer::new(time.live.len(), blocks);
    let mut best: Option<(Solution, Vec<u32>)> = None;
    let mut free = Meter::new(Effort::Steps(u64::MAX));
    for (which, order) in orders(problem, time) {
        let peak = match &best {
            None => packer.pack(&order, u64::MAX, &mut free),
            Some((best, _)) => packer.pack(&order, best.peak - 1, meter),
        };
        if let Ok(peak) = peak {
            best = Some((Solution { offsets: packer.offsets.clone(), peak, proved: 0 }, order.clone()));
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

/// Beyond so many items a pass takes a second or more, and laying them one by one several.
pub(super) const GIANT: usize = 200_000;
/// Orders worth trying, the most successful first. Lazy: a problem that the first one solves costs one sort.
fn orders<'a>(problem: &'a Problem, time: &'a Timeline) -> impl Iterator<Item = (usize, Vec<u32>)> + 'a {
    let items = &problem.items;
    let busy = time.busiest();
    let tried: &[usize] = match items.len() {
        0..=2000 => &[0, 1, 2, 3, 4, 5, 6, 7],
        2001..=GIANT => &[0, 3, 2, 1, 4, 5, 6, 7],
        _ => &[0, 1],
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
