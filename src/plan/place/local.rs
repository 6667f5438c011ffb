//! Local search over orders.

use super::effort::Meter;
use super::greedy::Packer;
use super::{Solution, XorShift};

/// An order that is changed step by step; the greedy pass says what it is worth.
pub(super) struct Walk {
    order: Vec<u32>,
    random: XorShift,
    found: Vec<usize>,
}

impl Walk {
    pub fn new(order: Vec<u32>) -> Walk {
        Walk { order, random: XorShift(0x9e37_79b9_7f4a_7c15), found: Vec::new() }
    }

    /// Takes a step: an item that shares time with one at the peak moves before another that shares time with it, and the new order
    /// stays if its peak is no higher.
    pub fn step(&mut self, packer: &mut Packer, best: &mut Solution, meter: &mut Meter) {
        let Walk { order, random, found } = self;
        let time = packer.time;
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
        let to = pick(&mut (0..item).filter(|&at| meet(at, item)));
        meter.spend(3 * order.len() as u64);
        if let Some(to) = to {
            order[to..=item].rotate_right(1);
            match packer.pack(order, best.peak, meter) {
                Some(solution) => *best = solution,
                None => order[to..=item].rotate_left(1),
            }
        }
    }
}
