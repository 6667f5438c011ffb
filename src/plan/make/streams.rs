//! Which steps may run side by side: each step has a lane, steps of a lane follow one another, and a step waits for those of other
//! lanes that it names.
//!
//! ```text
//! lane 0   a ---- c ------ e          c waits for nothing, d for a, e for d
//!           \             /
//! lane 1     '--- d -----'
//! ```
//!
//! Buffers whose uses are not ordered by this may not share bytes. Positions in the list are a time that respects the order, so a
//! buffer's live range is stretched over all steps that might run at the same time as one that uses it: ranges that are then
//! apart are ordered.

use super::order::Dag;
use crate::plan::lower::Draft;

/// Steps in lanes. Everything is by position in the order that they were made for.
#[derive(Clone, Debug)]
pub struct Lanes {
    /// The lane of each step.
    pub lane: Vec<u32>,
    /// Steps of other lanes that each step waits for.
    pub waits: Vec<Vec<usize>>,
    /// Per step and lane, how many of that lane's steps are over when the step is; itself included.
    done: Vec<Vec<usize>>,
    /// Per lane, its steps.
    steps: Vec<Vec<usize>>,
    /// Number of each step in its lane.
    rank: Vec<usize>,
}

impl Lanes {
    /// Puts steps into at most `most` lanes: behind what they need where nothing else has followed it yet, else into a lane that they
    /// need not wait for longer than they must.
    pub fn new(draft: &Draft, order: &[usize], most: usize) -> Lanes {
        let count = order.len();
        let mut lanes = Lanes {
            lane: Vec::with_capacity(count),
            waits: Vec::with_capacity(count),
            done: Vec::with_capacity(count),
            steps: vec![Vec::new(); most.max(1)],
            rank: Vec::with_capacity(count),
        };
        if most <= 1 {
            lanes.steps[0] = (0..count).collect();
            lanes.rank = (0..count).collect();
            lanes.lane = vec![0; count];
            lanes.waits = vec![Vec::new(); count];
            lanes.done = (1..=count).map(|n| vec![n]).collect();
            return lanes;
        }
        let dag = Dag::new(draft);
        let mut position = vec![0; count];
        for (at, &s) in order.iter().enumerate() {
            position[s] = at;
            let mut needs: Vec<usize> = dag.before[s].iter().map(|&p| position[p]).collect();
            needs.sort_unstable();
            lanes.push(at, &needs);
        }
        lanes
    }

    fn push(&mut self, at: usize, needs: &[usize]) {
        let mut done = vec![0; self.steps.len()];
        for &need in needs {
            done.iter_mut().zip(&self.done[need]).for_each(|(d, n)| *d = (*d).max(*n));
        }
        let last = |lane: usize| self.steps[lane].last().copied();
        let follows =
            needs.iter().rev().map(|&n| self.lane[n] as usize).find(|&l| last(l).is_some_and(|t| needs.contains(&t)));
        let free = (0..self.steps.len()).find(|&l| done[l] == self.steps[l].len());
        let oldest = (0..self.steps.len()).min_by_key(|&l| last(l)).expect("there is a lane");
        let lane = follows.or(free).unwrap_or(oldest);
        // Latest first: what one of them waited for need not be waited for again.
        let mut known = vec![0; self.steps.len()];
        if let Some(tail) = last(lane) {
            known.clone_from(&self.done[tail]);
        }
        let mut waits = Vec::new();
        for &need in needs.iter().rev() {
            if known[self.lane[need] as usize] <= self.rank[need] {
                waits.push(need);
                known.iter_mut().zip(&self.done[need]).for_each(|(d, n)| *d = (*d).max(*n));
            }
        }
        waits.sort_unstable();
        self.steps[lane].push(at);
        known[lane] = self.steps[lane].len();
        self.rank.push(self.steps[lane].len() - 1);
        self.lane.push(lane as u32);
        self.waits.push(waits);
        self.done.push(known);
    }

    /// Whether a step is over before another, later one starts.
    pub fn precedes(&self, first: usize, second: usize) -> bool {
        self.done[second][self.lane[first] as usize] > self.rank[first]
    }

    /// The first step that may still run when this one does.
    pub fn earliest(&self, at: usize) -> usize {
        let beside = |(steps, &done): (&Vec<usize>, &usize)| steps.get(done).copied();
        self.steps.iter().zip(&self.done[at]).filter_map(beside).min().map_or(at, |p| p.min(at))
    }

    /// The last step that may already run while this one does.
    pub fn latest(&self, at: usize) -> usize {
        let (lane, rank) = (self.lane[at] as usize, self.rank[at]);
        // Along a lane, more and more is over.
        let beside = |steps: &Vec<usize>| {
            let count = steps.partition_point(|&p| self.done[p][lane] <= rank);
            count.checked_sub(1).map(|i| steps[i])
        };
        let others = (0..self.steps.len()).filter(|&l| l != lane);
        others.filter_map(|l| beside(&self.steps[l])).max().map_or(at, |p| p.max(at))
    }

    /// How many lanes have steps.
    pub fn used(&self) -> usize {
        self.steps.iter().filter(|s| !s.is_empty()).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::plan::Class;
    use crate::plan::lower::{DraftBuffer, DraftStep};

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
            draft.buffers.push(DraftBuffer { name, dtype: DType::F32, shape, bytes: 4, class: Class::Activation });
            let reads = if s == 0 { Vec::new() } else { (0..below(3)).map(|_| below(s)).collect() };
            let name = format!("s{s}");
            let (writes, windows) = (vec![s], Vec::new());
            draft.steps.push(DraftStep { name, kernel: 0, reads, writes, windows, reusable: Vec::new() });
        }
        draft
    }

    #[test]
    fn what_may_run_beside_a_step_is_found() {
        let mut concurrent = 0;
        for seed in 0..300 {
            let (count, most) = (3 + seed as usize % 20, 1 + seed as usize % 5);
            let draft = draft(seed, count);
            let order: Vec<usize> = (0..count).collect();
            let lanes = Lanes::new(&draft, &order, most);
            // By definition: what is over before a step starts is what it waits for, what its lane ran, and what was over before those.
            let mut before: Vec<Vec<bool>> = Vec::new();
            for at in 0..count {
                let tail = (0..at).rfind(|&p| lanes.lane[p] == lanes.lane[at]);
                let mut over = vec![false; count];
                for p in lanes.waits[at].iter().copied().chain(tail) {
                    over[p] = true;
                    over.iter_mut().zip(&before[p]).for_each(|(over, earlier)| *over |= earlier);
                }
                before.push(over);
            }
            for (at, over) in before.iter().enumerate() {
                assert!(draft.steps[at].reads.iter().all(|&b| over[b]), "{lanes:?}");
                assert!((0..at).all(|p| lanes.precedes(p, at) == over[p]), "{lanes:?}");
                let beside: Vec<usize> = (0..count).filter(|&p| !over[p] && !before[p][at]).collect();
                assert_eq!((lanes.earliest(at), lanes.latest(at)), (beside[0], beside[beside.len() - 1]), "{lanes:?}");
                concurrent += beside.len() - 1;
            }
        }
        assert!(concurrent > 1000, "{concurrent}");
    }
}
