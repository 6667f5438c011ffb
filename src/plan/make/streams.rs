//! Assigns steps to streams. Steps of a stream run one after another. A step may wait for steps of other streams.
//!
//! ```text
//! stream 0   a ---- c ------ e        c waits for nothing, d for a, e for d
//!             \             /
//! stream 1     '--- d -----'
//! ```
//!
//! Two buffers may share bytes only if streams and waits order all their uses. Positions in the list of steps are a time that
//! respects this order. So the live range of a buffer is stretched over all steps that may run at the same time as one that uses
//! it. If two such ranges are disjoint, the uses are ordered.

use crate::StepIdx;
use crate::lower::{Dag, Draft};
use std::ops::Range;

/// The streams of steps. All indices are positions in the order that the streams were made for.
#[derive(Clone, Debug)]
pub struct Streams {
    /// Per step, its stream.
    pub stream: Vec<u32>,
    /// Per step, the steps of other streams that it waits for, as the plan numbers them.
    pub waits: Vec<Vec<StepIdx>>,
    /// Per step and stream, the number of the stream's steps that are over when the step is over, including itself.
    done: Vec<Vec<usize>>,
    /// Per stream, its steps.
    steps: Vec<Vec<usize>>,
    /// Per step, its position in its stream.
    rank: Vec<usize>,
}

impl Streams {
    /// Assigns steps to at most `most` streams.
    ///
    /// A step goes right behind a step that it depends on, if that is the last of its stream. Else it goes into a stream whose steps are
    /// all over by then, or into the stream whose last step is oldest.
    pub fn new(draft: &Draft, order: &[StepIdx], most: usize) -> Streams {
        let count = order.len();
        let mut streams = Streams {
            stream: Vec::with_capacity(count),
            waits: Vec::with_capacity(count),
            done: Vec::with_capacity(count),
            steps: vec![Vec::new(); most.max(1)],
            rank: Vec::with_capacity(count),
        };
        if most <= 1 {
            streams.steps[0] = (0..count).collect();
            streams.rank = (0..count).collect();
            streams.stream = vec![0; count];
            streams.waits = vec![Vec::new(); count];
            streams.done = (1..=count).map(|n| vec![n]).collect();
            return streams;
        }
        let dag = Dag::new(draft);
        // What ranks exchange, and what comes from the memory of the host, share the last stream: all ranks begin exchanges in one order.
        let moves = draft.exchanges() || draft.fetches();
        let own = if moves { most - 1 } else { most };
        let mut position = vec![0; count];
        // The last step that computes.
        let mut computed = None;
        for (at, &s) in order.iter().enumerate() {
            position[s] = at;
            let mut needs: Vec<usize> = dag.before[s].iter().map(|&p| position[p]).collect();
            let is_fetch = draft.is_fetch(s);
            // It would begin at once otherwise, and so would all others: their copies would need memory of their own.
            needs.extend(computed.filter(|_| is_fetch));
            needs.sort_unstable();
            needs.dedup();
            let is_move = draft.is_exchange(s) || is_fetch;
            computed = if is_move { computed } else { Some(at) };
            streams.push(at, &needs, if is_move { own..most } else { 0..own });
        }
        streams
    }

    fn push(&mut self, at: usize, needs: &[usize], among: Range<usize>) {
        let mut done = vec![0; self.steps.len()];
        for &need in needs {
            done.iter_mut().zip(&self.done[need]).for_each(|(d, n)| *d = (*d).max(*n));
        }
        let last = |stream: usize| self.steps[stream].last().copied();
        let follows = needs
            .iter()
            .rev()
            .map(|&n| self.stream[n] as usize)
            .filter(|l| among.contains(l))
            .find(|&l| last(l).is_some_and(|t| needs.contains(&t)));
        let free = among.clone().find(|&l| done[l] == self.steps[l].len());
        let oldest = among.clone().min_by_key(|&l| last(l)).expect("there is a stream");
        let stream = follows.or(free).unwrap_or(oldest);
        // Starts with the latest. A step that one of these has waited for needs no wait of its own.
        let mut known = vec![0; self.steps.len()];
        if let Some(tail) = last(stream) {
            known.clone_from(&self.done[tail]);
        }
        let mut waits = Vec::new();
        for &need in needs.iter().rev() {
            if known[self.stream[need] as usize] <= self.rank[need] {
                waits.push(StepIdx::new(need));
                known.iter_mut().zip(&self.done[need]).for_each(|(d, n)| *d = (*d).max(*n));
            }
        }
        waits.sort_unstable();
        self.steps[stream].push(at);
        known[stream] = self.steps[stream].len();
        self.rank.push(self.steps[stream].len() - 1);
        self.stream.push(stream as u32);
        self.waits.push(waits);
        self.done.push(known);
    }

    /// True if a step is over before another, later one starts.
    pub fn precedes(&self, first: usize, second: usize) -> bool {
        self.done[second][self.stream[first] as usize] > self.rank[first]
    }

    /// The first step that may run at the same time as this one.
    pub fn earliest(&self, at: usize) -> usize {
        let beside = |(steps, &done): (&Vec<usize>, &usize)| steps.get(done).copied();
        self.steps.iter().zip(&self.done[at]).filter_map(beside).min().map_or(at, |p| p.min(at))
    }

    /// The last step that may run at the same time as this one.
    pub fn latest(&self, at: usize) -> usize {
        let (stream, rank) = (self.stream[at] as usize, self.rank[at]);
        // Along a stream, the steps that are over only become more, so bisection finds the end.
        let beside = |steps: &Vec<usize>| {
            let count = steps.partition_point(|&p| self.done[p][stream] <= rank);
            count.checked_sub(1).map(|i| steps[i])
        };
        let others = (0..self.steps.len()).filter(|&l| l != stream);
        others.filter_map(|l| beside(&self.steps[l])).max().map_or(at, |p| p.max(at))
    }

    /// The number of streams that have steps.
    pub fn used(&self) -> usize {
        self.steps.iter().filter(|s| !s.is_empty()).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::lower::{DraftBuffer, DraftStep};
    use crate::{BufferIdx, Class, KernelIdx};

    /// Steps that each read up to two earlier results, drawn from a seed.
    fn draft(seed: u64, steps: usize) -> Draft {
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let mut below = |n: usize| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state % n as u64) as usize
        };
        let mut draft = Draft::default();
        for s in 0..steps {
            let (name, shape) = (format!("b{s}"), vec![1].into());
            let (dtype, class) = (DType::F32, Class::Activation);
            draft.buffers.push(DraftBuffer { name, dtype, shape, bytes: 4, class, over: None, offloaded: false });
            let reads = if s == 0 { Vec::new() } else { (0..below(3)).map(|_| BufferIdx::new(below(s))).collect() };
            let name = format!("s{s}");
            let (writes, bind_ranges) = (vec![BufferIdx::new(s)], Vec::new());
            draft.steps.push(DraftStep {
                name,
                kernel: KernelIdx::default(),
                reads,
                writes,
                bind_ranges,
                reusable: Vec::new(),
            });
        }
        draft
    }

    #[test]
    fn what_may_run_beside_a_step_is_found() {
        let mut concurrent = 0;
        for seed in 0..300 {
            let (count, most) = (3 + seed as usize % 20, 1 + seed as usize % 5);
            let draft = draft(seed, count);
            let order: Vec<_> = StepIdx::all(&draft.steps).collect();
            let streams = Streams::new(&draft, &order, most);
            // By definition, a step starts after the steps that it waits for, the earlier steps of its stream, and all that these
            // started after.
            let mut before: Vec<Vec<bool>> = Vec::new();
            for at in 0..count {
                let tail = (0..at).rfind(|&p| streams.stream[p] == streams.stream[at]);
                let mut over = vec![false; count];
                for p in streams.waits[at].iter().map(|step| step.index()).chain(tail) {
                    over[p] = true;
                    over.iter_mut().zip(&before[p]).for_each(|(over, earlier)| *over |= earlier);
                }
                before.push(over);
            }
            for (at, over) in before.iter().enumerate() {
                assert!(draft.steps[at].reads.iter().all(|&b| over[b]), "{streams:?}");
                assert!((0..at).all(|p| streams.precedes(p, at) == over[p]), "{streams:?}");
                let beside: Vec<usize> = (0..count).filter(|&p| !over[p] && !before[p][at]).collect();
                assert_eq!(
                    (streams.earliest(at), streams.latest(at)),
                    (beside[0], beside[beside.len() - 1]),
                    "{streams:?}"
                );
                concurrent += beside.len() - 1;
            }
        }
        assert!(concurrent > 1000, "{concurrent}");
    }
}
