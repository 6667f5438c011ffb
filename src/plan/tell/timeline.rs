//! When the buffers of a finished plan hold their bytes: read off the plan, for people.
//!
//! Time is in half steps: step `s` lasts from `2 s` to `2 s + 2`. A step that passes an operand's bytes on to its result does so in its
//! middle, so that at no time two buffers hold the same byte.

use crate::plan::check::streams::Clock;
use crate::plan::{Class, Plan};
use std::cmp::Reverse;
use std::ops::Range;

/// What holds which bytes of the arena, and when.
#[derive(Clone, Debug)]
pub struct Lives {
    /// Per buffer, the first and the last step that use it.
    pub uses: Vec<Option<(usize, usize)>>,
    /// Per buffer of the arena, the half steps in which its bytes are its own: from its first use to its last, and while steps of other
    /// lanes may run at the same time as those. Inputs hold them from the start, outputs to the end.
    pub held: Vec<Option<Range<usize>>>,
    /// Per buffer, the one whose bytes it takes over in place.
    pub takes_from: Vec<Option<usize>>,
    /// Per half step, the bytes that are held.
    live: Vec<u64>,
}

impl Lives {
    /// Reads a plan that [`check`](crate::plan::check::check) has passed. O(n log n).
    pub fn of(plan: &Plan) -> Lives {
        let clock = Clock::new(plan).expect("a plan's lanes are checked");
        let arena = |b: usize| plan.buffers[b].class.in_arena();
        let mut uses: Vec<Option<(usize, usize)>> = vec![None; plan.buffers.len()];
        let mut held: Vec<Option<Range<usize>>> = vec![None; plan.buffers.len()];
        for (s, step) in plan.steps.iter().enumerate() {
            let (first, last) = clock.beside(s);
            for &b in step.reads.iter().chain(&step.writes) {
                let used = uses[b].get_or_insert((s, s));
                used.1 = s;
                if arena(b) {
                    let held = held[b].get_or_insert(2 * first..2 * last + 2);
                    *held = held.start.min(2 * first)..held.end.max(2 * last + 2);
                }
            }
        }
        let end = 2 * plan.steps.len();
        for port in plan.inputs.iter().filter(|_| end > 0) {
            held[port.buffer].get_or_insert(0..2).start = 0;
        }
        for port in &plan.outputs {
            if let Some(held) = &mut held[port.buffer] {
                held.end = end;
            }
        }
        let class = |b: usize| plan.buffers[b].class;
        let mut takes_from = vec![None; plan.buffers.len()];
        for (s, step) in plan.steps.iter().enumerate() {
            let there = |b: usize, first: usize| first < s || class(b) == Class::Input;
            let over = |b: usize, last: usize| last == s && class(b) != Class::Output;
            let dying =
                |b: &usize| arena(*b) && uses[*b].is_some_and(|(first, last)| there(*b, first) && over(*b, last));
            let dying: Vec<usize> = step.reads.iter().copied().filter(dying).collect();
            for &heir in step.writes.iter().filter(|&&b| arena(b) && uses[b].is_some_and(|(first, _)| first == s)) {
                for &from in dying.iter().filter(|&&from| plan.buffers[from].overlaps(&plan.buffers[heir])) {
                    takes_from[heir] = Some(from);
                    if let Some(held) = &mut held[from] {
                        held.end = 2 * s + 1;
                    }
                    if let Some(held) = &mut held[heir] {
                        held.start = 2 * s + 1;
                    }
                }
            }
        }
        let mut change = vec![0i128; 2 * plan.steps.len() + 1];
        for (b, held) in held.iter().enumerate().filter_map(|(b, held)| Some((b, held.as_ref()?))) {
            change[held.start] += i128::from(bytes(plan, b));
            change[held.end] -= i128::from(bytes(plan, b));
        }
        // The arena ends with its last buffer, which is not rounded up there.
        let most = i128::from(plan.class_bytes(Class::Activation));
        let mut now = 0;
        let live = change.iter().take(2 * plan.steps.len()).map(|change| {
            now += change;
            u64::try_from(now.min(most)).expect("what is held lies in the arena")
        });
        Lives { live: live.collect(), uses, held, takes_from }
    }

    /// Bytes of the arena that are held during a step: each buffer rounded up to the target's alignment, and all together no more than
    /// there is.
    pub fn live(&self, step: usize) -> u64 {
        self.live[2 * step].max(self.live[2 * step + 1])
    }

    /// The first step that holds the most bytes; `None` of a plan without steps.
    pub fn peak(&self) -> Option<usize> {
        (0..self.live.len() / 2).max_by_key(|&s| (self.live(s), Reverse(s)))
    }

    /// The buffers that make up [`live`](Lives::live), the largest first. Of a result and the operand that it replaces, the result.
    pub fn holders(&self, plan: &Plan, step: usize) -> Vec<usize> {
        let half = 2 * step + usize::from(self.live[2 * step] <= self.live[2 * step + 1]);
        let holds = |b: &usize| self.held[*b].as_ref().is_some_and(|held| held.contains(&half));
        let mut holders: Vec<usize> = (0..plan.buffers.len()).filter(holds).collect();
        holders.sort_by_key(|&b| (Reverse(plan.buffers[b].bytes), b));
        holders
    }
}

/// What a buffer takes of the arena.
fn bytes(plan: &Plan, buffer: usize) -> u64 {
    plan.buffers[buffer].bytes.next_multiple_of(plan.target.alignment)
}
