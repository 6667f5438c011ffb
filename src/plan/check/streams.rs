//! Checks that steps which may run at the same time do not use the same bytes, unless both only read them.

use super::{Plan, Verdict, ensure};

/// The order in which steps run, as far as the plan fixes it.
pub struct Clock {
    /// Per step, its position in its lane.
    rank: Vec<usize>,
    lane: Vec<usize>,
    /// Per step and lane, the number of the lane's steps that are over when the step is over.
    over: Vec<Vec<usize>>,
    /// Per lane, its steps.
    lanes: Vec<Vec<usize>>,
}

impl Clock {
    /// Reads the lanes and waits of a plan.
    ///
    /// # Errors
    /// There are more lanes than the target has, or a step waits for a later one.
    pub fn new(plan: &Plan) -> Verdict<Clock> {
        let count = plan.steps.iter().map(|s| s.lane as usize + 1).max().unwrap_or(1);
        let most = plan.target.lanes as usize;
        ensure(count <= most, || format!("expected at most {most} lanes, found {count}"))?;
        let mut clock = Clock { rank: Vec::new(), lane: Vec::new(), over: Vec::new(), lanes: vec![Vec::new(); count] };
        for (at, step) in plan.steps.iter().enumerate() {
            let lane = step.lane as usize;
            let before = clock.lanes[lane].last();
            let mut over = before.map_or_else(|| vec![0; count], |&p| clock.over[p].clone());
            for &other in &step.waits {
                ensure(other < at, || format!("step {at} '{}': waits for step {other}, which comes later", step.name))?;
                over.iter_mut().zip(&clock.over[other]).for_each(|(a, b)| *a = (*a).max(*b));
            }
            clock.rank.push(clock.lanes[lane].len());
            clock.lanes[lane].push(at);
            over[lane] = clock.lanes[lane].len();
            clock.lane.push(lane);
            clock.over.push(over);
        }
        Ok(clock)
    }

    pub fn is_single(&self) -> bool {
        self.lanes.len() == 1
    }

    /// The first and the last step that may run at the same time as this one.
    pub fn beside(&self, at: usize) -> (usize, usize) {
        if self.is_single() {
            return (at, at);
        }
        let (mut first, mut last) = (at, at);
        for (lane, steps) in self.lanes.iter().enumerate().filter(|(lane, _)| *lane != self.lane[at]) {
            let begun = self.over[at][lane];
            let ended = steps.partition_point(|&p| self.over[p][self.lane[at]] <= self.rank[at]);
            if begun < ended {
                first = first.min(steps[begun]);
                last = last.max(steps[ended - 1]);
            }
        }
        (first, last)
    }

    /// Checks all pairs of uses of the same bytes where one writes: one must be over when the other starts.
    pub fn check(&self, plan: &Plan) -> Verdict {
        if self.is_single() {
            return Ok(());
        }
        let lanes = self.lanes.len();
        // Per buffer and lane: the rank of the first use, and one more than the ranks of the last use and the last write.
        let mut first = vec![vec![usize::MAX; lanes]; plan.buffers.len()];
        let mut used = vec![vec![0; lanes]; plan.buffers.len()];
        let mut wrote = vec![vec![0; lanes]; plan.buffers.len()];
        for (at, step) in plan.steps.iter().enumerate() {
            let (lane, next) = (self.lane[at], self.rank[at] + 1);
            let over = |counts: &[usize]| (0..lanes).all(|l| l == lane || counts[l] <= self.over[at][l]);
            let late = |b: usize| {
                format!(
                    "step {at} '{}': does not wait for all uses of {} in other lanes",
                    step.name, plan.buffers[b].name
                )
            };
            for &b in &step.reads {
                ensure(over(&wrote[b]), || late(b))?;
            }
            for &b in &step.writes {
                ensure(over(&used[b]), || late(b))?;
                wrote[b][lane] = next;
            }
            for &b in step.reads.iter().chain(&step.writes) {
                used[b][lane] = next;
                first[b][lane] = first[b][lane].min(self.rank[at]);
            }
        }
        let mut arena: Vec<usize> = (0..plan.buffers.len())
            .filter(|&b| plan.buffers[b].class.in_arena() && plan.buffers[b].bytes > 0)
            .collect();
        arena.sort_by_key(|&b| (plan.buffers[b].segment, plan.buffers[b].offset));
        // True if every use of `a` is over when the first use of `b` starts. A step may overwrite its operand in place.
        let precedes = |a: usize, b: usize| {
            (0..lanes).filter(|&l| first[b][l] != usize::MAX).all(|l| {
                let start = self.lanes[l][first[b][l]];
                (0..lanes).all(|k| used[a][k] <= self.over[start][k])
            })
        };
        for (i, &a) in arena.iter().enumerate() {
            let (one, end) = (&plan.buffers[a], plan.buffers[a].offset + plan.buffers[a].bytes);
            let others = arena[i + 1..].iter();
            for &b in others.take_while(|&&b| plan.buffers[b].segment == one.segment && plan.buffers[b].offset < end) {
                ensure(precedes(a, b) || precedes(b, a), || {
                    let other = &plan.buffers[b].name;
                    format!(
                        "buffers {a} '{}' and {b} '{other}' share bytes in lanes that run at the same time",
                        one.name
                    )
                })?;
            }
        }
        Ok(())
    }
}
