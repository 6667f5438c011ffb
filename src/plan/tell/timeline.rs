//! The timeline of a finished plan, for people: when each buffer holds its bytes.
//!
//! Time is in half steps: step `s` lasts from `2 s` to `2 s + 2`. If a result overwrites an operand in place, it takes over the
//! bytes in the middle of the step. So no two buffers hold the same byte at the same time.

use crate::check::streams::Clock;
use crate::{BufferIdx, Class, StepIdx, View};
use std::cmp::Reverse;
use std::ops::Range;

/// The times at which each buffer of the arena holds its bytes.
#[derive(Clone, Debug)]
pub struct Timeline {
    /// Per buffer, the first and the last step that use it.
    pub uses: Vec<Option<(StepIdx, StepIdx)>>,
    /// Per buffer of the arena, the half steps in which it holds its bytes: from its first use to its last, and while steps of other
    /// streams may run at the same time. Inputs hold their bytes from the start, outputs to the end.
    pub held: Vec<Option<Range<usize>>>,
    /// Per buffer, the operand that it overwrites in place.
    pub takes_from: Vec<Option<BufferIdx>>,
    /// Per half step, the number of bytes held.
    live: Vec<u64>,
}

impl Timeline {
    /// The timeline of a plan that [`check`](crate::check::check) has accepted. O(n log n).
    pub fn of(plan: View) -> Timeline {
        let clock = Clock::new(plan).expect("a plan's streams are checked");
        let arena = |b: BufferIdx| plan.buffers[b].class.in_arena();
        let mut uses: Vec<Option<(StepIdx, StepIdx)>> = vec![None; plan.buffers.len()];
        let mut held: Vec<Option<Range<usize>>> = vec![None; plan.buffers.len()];
        for (s, step) in StepIdx::enumerate(&plan.steps) {
            let (first, last) = clock.beside(s);
            let (from, to) = (2 * first.index(), 2 * last.index() + 2);
            for &b in step.reads.iter().chain(&step.writes) {
                let used = uses[b].get_or_insert((s, s));
                used.1 = s;
                if arena(b) {
                    let held = held[b].get_or_insert(from..to);
                    *held = held.start.min(from)..held.end.max(to);
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
        let class = |b: BufferIdx| plan.buffers[b].class;
        let mut takes_from = vec![None; plan.buffers.len()];
        for (s, step) in StepIdx::enumerate(&plan.steps) {
            let there = |b: BufferIdx, first: StepIdx| first < s || class(b) == Class::Input;
            let over = |b: BufferIdx, last: StepIdx| last == s && class(b) != Class::Output;
            let dying =
                |b: &BufferIdx| arena(*b) && uses[*b].is_some_and(|(first, last)| there(*b, first) && over(*b, last));
            let dying: Vec<_> = step.reads.iter().copied().filter(dying).collect();
            for &heir in step.writes.iter().filter(|&&b| arena(b) && uses[b].is_some_and(|(first, _)| first == s)) {
                for &from in dying.iter().filter(|&&from| plan.buffers[from].overlaps(&plan.buffers[heir])) {
                    takes_from[heir] = Some(from);
                    if let Some(held) = &mut held[from] {
                        held.end = 2 * s.index() + 1;
                    }
                    if let Some(held) = &mut held[heir] {
                        held.start = 2 * s.index() + 1;
                    }
                }
            }
        }
        let mut change = vec![0i128; 2 * plan.steps.len() + 1];
        for (b, held) in BufferIdx::enumerate(&held).filter_map(|(b, held)| Some((b, held.as_ref()?))) {
            change[held.start] += i128::from(bytes(plan, b));
            change[held.end] -= i128::from(bytes(plan, b));
        }
        // The end of the arena's last buffer is not rounded up, so the sum may exceed the arena by that.
        let most = i128::from(plan.class_bytes(Class::Activation));
        let mut now = 0;
        let live = change.iter().take(2 * plan.steps.len()).map(|change| {
            now += change;
            u64::try_from(now.min(most)).expect("what is held lies in the arena")
        });
        Timeline { live: live.collect(), uses, held, takes_from }
    }

    /// The bytes of the arena that are held during a step. Each buffer is rounded up to the target's alignment; the sum is at most
    /// the arena.
    pub fn live(&self, step: StepIdx) -> u64 {
        let half = 2 * step.index();
        self.live[half].max(self.live[half + 1])
    }

    /// The first step with the most bytes held; `None` without steps.
    pub fn peak(&self) -> Option<StepIdx> {
        (0..self.live.len() / 2).map(StepIdx::new).max_by_key(|&s| (self.live(s), Reverse(s)))
    }

    /// The buffers that [`live`](Timeline::live) counts, the largest first. A result that overwrites its operand is listed, the operand
    /// is not.
    pub fn holders(&self, plan: View, step: StepIdx) -> Vec<BufferIdx> {
        let half = 2 * step.index();
        let half = half + usize::from(self.live[half] <= self.live[half + 1]);
        let holds = |b: &BufferIdx| self.held[*b].as_ref().is_some_and(|held| held.contains(&half));
        let mut holders: Vec<_> = BufferIdx::all(&plan.buffers).filter(holds).collect();
        holders.sort_by_key(|&b| (Reverse(plan.buffers[b].bytes), b));
        holders
    }
}

/// The bytes that a buffer takes in the arena.
fn bytes(plan: View, buffer: BufferIdx) -> u64 {
    plan.buffers[buffer].bytes.next_multiple_of(plan.target.alignment)
}
