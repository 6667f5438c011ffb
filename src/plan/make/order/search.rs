//! Improves an order locally: finds the best order of the steps around the peak, while all others stay.
//!
//! The live bytes between two steps depend on the set of steps that have run, not on their order. So the search goes through
//! the possible sets by size, and keeps the least peak that leads to each. A set is possible if it has all steps that its
//! steps depend on. If one size has too many sets, only those with the fewest live bytes go on, and the search is not exact.

use super::live_bytes::{Level, Uses};
use crate::lower::Dag;
use crate::{BufferIdx, StepIdx};
use std::collections::HashMap;
use std::ops::Range;

/// The lengths of stretches to try, one after the other. A set of steps is a `u128` with one bit per step.
const LENGTHS: [usize; 3] = [24, 64, 128];
/// The most sets of one size that go on.
const WIDTH: usize = 192;
/// The effort for one order, in elementary steps of about a nanosecond each.
const EFFORT: u64 = 40_000_000;

/// Lowers the peak of an order, stretch by stretch, as long as it gains. Returns true if it gained anything.
pub(super) fn search(uses: &Uses, dag: &Dag, order: &mut [StepIdx]) -> bool {
    let mut levels = uses.levels(order);
    let mut position = vec![0; order.len()];
    order.iter().enumerate().for_each(|(at, &s)| position[s] = at);
    let (mut effort, mut lower) = (EFFORT, false);
    let most = |levels: &[Level]| levels.iter().map(|level| level.during).max().unwrap_or(0);
    'peaks: while effort > 0 && !order.is_empty() {
        let peak = most(&levels);
        let at = levels.iter().position(|level| level.during == peak).expect("some step has the most");
        for length in LENGTHS {
            let from = at.saturating_sub(length / 2).min(order.len().saturating_sub(length));
            let range = from..(from + length).min(order.len());
            let beside = most(&levels[..range.start]).max(most(&levels[range.end..]));
            let mut stretch = Stretch::new(uses, dag, order, &position, range.clone(), levels[from].before);
            effort = effort.saturating_sub(stretch.work + order.len() as u64);
            if let Some(best) = stretch.best(beside, peak, &mut effort) {
                let steps: Vec<_> = best.iter().map(|&own| order[from + own]).collect();
                order[range.clone()].copy_from_slice(&steps);
                range.clone().for_each(|at| position[order[at]] = at);
                levels[range].copy_from_slice(&stretch.levels(&best));
                lower = true;
                continue 'peaks;
            }
            if length >= order.len() {
                break;
            }
        }
        break;
    }
    lower
}

/// A buffer that steps of a stretch touch.
struct Local {
    bytes: u64,
    /// True if it is live before the stretch.
    before: bool,
    /// True if it is live after the stretch.
    behind: bool,
    /// The steps of the stretch that touch it.
    touching: u128,
}

/// A possible set of steps of a stretch that have run.
#[derive(Clone, Copy)]
struct State {
    done: u128,
    /// The steps that could run next.
    ready: u128,
    /// The live bytes now.
    live: u64,
    /// The most live bytes so far.
    peak: u64,
    /// Index of its last step in the list of steps taken.
    last: usize,
}

/// Some consecutive steps of an order, numbered from 0.
struct Stretch {
    /// The live bytes before the first step.
    live: u64,
    buffers: Vec<Local>,
    /// Per step, the buffers that it touches.
    touched: Vec<Vec<usize>>,
    /// Per step, its first result and the operands that the result may overwrite in place.
    heirs: Vec<Option<(usize, Vec<usize>)>>,
    /// Per step, the steps that it depends on directly.
    before: Vec<u128>,
    /// Per step, the steps that depend on it directly.
    after: Vec<u128>,
    /// The elementary steps spent on making this.
    work: u64,
}

impl Stretch {
    fn new(uses: &Uses, dag: &Dag, order: &[StepIdx], position: &[usize], range: Range<usize>, live: u64) -> Stretch {
        let (mut buffers, mut number) = (Vec::new(), HashMap::new());
        let mut work = 0;
        let steps = &order[range.clone()];
        let mut local = |b: BufferIdx| {
            *number.entry(b).or_insert_with(|| {
                let (bytes, before, behind) = (uses.bytes[b], uses.before[b], uses.behind[b]);
                let mut own = Local { bytes, before, behind, touching: 0 };
                for &s in &uses.touching[b] {
                    let at = position[s];
                    own.before |= at < range.start;
                    own.behind |= at >= range.end;
                    own.touching |= if range.contains(&at) { 1 << (at - range.start) } else { 0 };
                }
                work += 8 * uses.touching[b].len() as u64;
                buffers.push(own);
                buffers.len() - 1
            })
        };
        let touched = steps.iter().map(|&s| uses.touched[s].iter().map(|&b| local(b)).collect()).collect();
        let heir = |&s: &StepIdx| {
            uses.heirs[s].as_ref().map(|(to, from)| (local(*to), from.iter().map(|&b| local(b)).collect()))
        };
        let heirs = steps.iter().map(heir).collect();
        let bits = |list: &[StepIdx]| {
            let inside = list.iter().map(|&s| position[s]).filter(|at| range.contains(at));
            inside.fold(0, |set: u128, at| set | 1 << (at - range.start))
        };
        let before = steps.iter().map(|&s| bits(&dag.before[s])).collect();
        let after = steps.iter().map(|&s| bits(&dag.after[s])).collect();
        Stretch { live, buffers, touched, heirs, before, after, work }
    }

    /// The live bytes during and after a step, if the steps in `done` have run.
    fn run(&self, done: u128, live: u64, step: usize) -> (u64, u64) {
        let own = 1 << step;
        let is_new = |b: &Local| !b.before && b.touching & done == 0;
        let dies = |b: &Local| !b.behind && b.touching & !done == own;
        let (mut made, mut freed) = (0, 0);
        for b in self.touched[step].iter().map(|&b| &self.buffers[b]) {
            made += if is_new(b) { b.bytes } else { 0 };
            freed += if dies(b) { b.bytes } else { 0 };
        }
        let inherits = |(to, from): &&(usize, Vec<usize>)| {
            is_new(&self.buffers[*to]) && from.iter().any(|&b| dies(&self.buffers[b]))
        };
        let inherited = self.heirs[step].as_ref().filter(inherits).map_or(0, |(to, _)| self.buffers[*to].bytes);
        (live + made - inherited, live + made - freed)
    }

    /// The live bytes of each step in an order of the stretch.
    fn levels(&self, order: &[usize]) -> Vec<Level> {
        let (mut done, mut live) = (0, self.live);
        let level = |&step: &usize| {
            let (during, after) = self.run(done, live, step);
            let level = Level { before: live, during };
            done |= 1 << step;
            live = after;
            level
        };
        order.iter().map(level).collect()
    }

    /// An order with a peak below `roof`: the lowest that the search finds, or any that is at most `enough`.
    fn best(&mut self, enough: u64, roof: u64, effort: &mut u64) -> Option<Vec<usize>> {
        let count = self.touched.len();
        let ready = (0..count).filter(|&s| self.before[s] == 0).fold(0, |set: u128, s| set | 1 << s);
        let mut states = vec![State { done: 0, ready, live: self.live, peak: enough, last: usize::MAX }];
        // Steps taken, each with the one before it.
        let mut taken: Vec<(usize, u8)> = Vec::new();
        for _ in 0..count {
            let mut next: Vec<State> = Vec::new();
            let mut known: HashMap<u128, usize> = HashMap::new();
            for state in &states {
                let runs = bits(state.ready).map(|step| (step, self.run(state.done, state.live, step)));
                let runs: Vec<_> = runs.collect();
                *effort = effort.saturating_sub(60 * runs.len() as u64);
                // A step that raises neither the peak nor the live bytes can run now without loss.
                let free = |(_, (during, after)): &&(usize, (u64, u64))| *during <= state.peak && *after <= state.live;
                let runs = runs.iter().find(free).map_or(&runs[..], std::slice::from_ref);
                for &(step, (during, after)) in runs.iter().filter(|(_, (during, _))| *during < roof) {
                    let done = state.done | 1 << step;
                    let peak = state.peak.max(during);
                    let at = *known.entry(done).or_insert(next.len());
                    if next.get(at).is_some_and(|other| other.peak <= peak) {
                        continue;
                    }
                    let opened = bits(self.after[step]).filter(|&s| self.before[s] & !done == 0);
                    let ready = opened.fold(state.ready & !(1 << step), |set, s| set | 1 << s);
                    taken.push((state.last, step as u8));
                    let new = State { done, ready, live: after, peak, last: taken.len() - 1 };
                    if at == next.len() {
                        next.push(new);
                    } else {
                        next[at] = new;
                    }
                }
            }
            if *effort == 0 {
                return None;
            }
            if next.len() > WIDTH {
                next.sort_by_key(|state| (state.live, state.peak));
                next.truncate(WIDTH);
            }
            states = next;
        }
        let mut at = states.first()?.last;
        let mut order = Vec::with_capacity(count);
        while let Some(&(before, step)) = taken.get(at) {
            order.push(usize::from(step));
            at = before;
        }
        order.reverse();
        Some(order)
    }
}

/// The steps of a set.
fn bits(mut set: u128) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let lowest = (set != 0).then(|| set.trailing_zeros() as usize)?;
        set &= set - 1;
        Some(lowest)
    })
}
