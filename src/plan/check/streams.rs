//! Checks that steps which may run at the same time do not use the same bytes, unless both only read them.

use super::{Buffer, BufferIdx, Class, StepIdx, Verdict, View, ensure};

/// The order in which steps run, as far as the plan fixes it.
pub struct Clock {
    /// Per step, its position in its stream.
    rank: Vec<usize>,
    stream: Vec<usize>,
    /// Per step and stream, the number of the stream's steps that are over when the step is over.
    over: Vec<Vec<usize>>,
    /// Per stream, its steps.
    streams: Vec<Vec<StepIdx>>,
}

impl Clock {
    /// Reads the streams and waits of a plan.
    ///
    /// # Errors
    /// There are more streams than the target has, or a step waits for a later one.
    pub fn new(plan: View) -> Verdict<Clock> {
        let count = plan.steps.iter().map(|s| s.stream as usize + 1).max().unwrap_or(1);
        let most = plan.target.streams as usize;
        ensure(count <= most, || format!("expected at most {most} streams, found {count}"))?;
        let mut clock =
            Clock { rank: Vec::new(), stream: Vec::new(), over: Vec::new(), streams: vec![Vec::new(); count] };
        for (at, step) in StepIdx::enumerate(&plan.steps) {
            let stream = step.stream as usize;
            let before = clock.streams[stream].last();
            let mut over = before.map_or_else(|| vec![0; count], |&p| clock.over[p].clone());
            for &other in &step.waits {
                ensure(other < at, || format!("step {at} '{}': waits for step {other}, which comes later", step.name))?;
                over.iter_mut().zip(&clock.over[other]).for_each(|(a, b)| *a = (*a).max(*b));
            }
            clock.rank.push(clock.streams[stream].len());
            clock.streams[stream].push(at);
            over[stream] = clock.streams[stream].len();
            clock.stream.push(stream);
            clock.over.push(over);
        }
        Ok(clock)
    }

    pub fn is_single(&self) -> bool {
        self.streams.len() == 1
    }

    /// The first and the last step that may run at the same time as this one.
    pub fn beside(&self, at: StepIdx) -> (StepIdx, StepIdx) {
        if self.is_single() {
            return (at, at);
        }
        let (mut first, mut last) = (at, at);
        for (stream, steps) in self.streams.iter().enumerate().filter(|(stream, _)| *stream != self.stream[at]) {
            let begun = self.over[at][stream];
            let ended = steps.partition_point(|&p| self.over[p][self.stream[at]] <= self.rank[at]);
            if begun < ended {
                first = first.min(steps[begun]);
                last = last.max(steps[ended - 1]);
            }
        }
        (first, last)
    }

    /// Checks all pairs of uses of the same bytes where one writes: one must be over when the other starts.
    pub fn check(&self, plan: View) -> Verdict {
        if self.is_single() {
            return Ok(());
        }
        let streams = self.streams.len();
        // Per buffer and stream: the rank of the first use, and one more than the ranks of the last use and the last write.
        let mut first = vec![vec![usize::MAX; streams]; plan.buffers.len()];
        let mut used = vec![vec![0; streams]; plan.buffers.len()];
        let mut wrote = vec![vec![0; streams]; plan.buffers.len()];
        for (at, step) in StepIdx::enumerate(&plan.steps) {
            let (stream, next) = (self.stream[at], self.rank[at] + 1);
            let over = |counts: &[usize]| (0..streams).all(|l| l == stream || counts[l] <= self.over[at][l]);
            let late = |b: BufferIdx| {
                format!(
                    "step {at} '{}': does not wait for all uses of {} in other streams",
                    step.name, plan.buffers[b].name
                )
            };
            for &b in &step.reads {
                ensure(over(&wrote[b]), || late(b))?;
            }
            for &b in &step.writes {
                ensure(over(&used[b]), || late(b))?;
                wrote[b][stream] = next;
            }
            for &b in step.reads.iter().chain(&step.writes) {
                used[b][stream] = next;
                first[b][stream] = first[b][stream].min(self.rank[at]);
            }
        }
        // Beside the arena's buffers, those of states share bytes with their updates.
        let shares = |b: &Buffer| (b.class.in_arena() || b.class == Class::State) && b.bytes > 0;
        let mut arena: Vec<_> = BufferIdx::all(&plan.buffers).filter(|&b| shares(&plan.buffers[b])).collect();
        arena.sort_by_key(|&b| (plan.buffers[b].segment, plan.buffers[b].offset));
        // True if every use of `a` is over when the first use of `b` starts. A step may overwrite its operand in place.
        let precedes = |a: BufferIdx, b: BufferIdx| {
            (0..streams).filter(|&l| first[b][l] != usize::MAX).all(|l| {
                let start = self.streams[l][first[b][l]];
                (0..streams).all(|k| used[a][k] <= self.over[start][k])
            })
        };
        for (i, &a) in arena.iter().enumerate() {
            let (one, end) = (&plan.buffers[a], plan.buffers[a].offset + plan.buffers[a].bytes);
            let others = arena[i + 1..].iter();
            for &b in others.take_while(|&&b| plan.buffers[b].segment == one.segment && plan.buffers[b].offset < end) {
                ensure(precedes(a, b) || precedes(b, a), || {
                    let other = &plan.buffers[b].name;
                    format!(
                        "buffers {a} '{}' and {b} '{other}' share bytes in streams that run at the same time",
                        one.name
                    )
                })?;
            }
        }
        Ok(())
    }
}
