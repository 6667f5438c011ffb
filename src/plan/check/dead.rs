//! Finds the dead bytes of each step: those that no later step may read. Poison fills them to find wrong reads.

use crate::{BufferIdx, Class, Program, SegmentIdx, View};
use std::collections::{BTreeMap, HashSet};

/// A range of a segment's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Index of the segment.
    pub segment: SegmentIdx,
    /// First byte.
    pub offset: u64,
    /// Length in bytes.
    pub bytes: u64,
}

/// The bytes that have died before each step, since the step before it started. The last entry is for reading the outputs.
///
/// Before the first step, every byte of the device is dead that neither the loader nor the caller has written. A byte is live from
/// the first write to a buffer that has it, until the buffer's last use, or until another buffer with some of the same bytes is
/// written. Constants, state and inputs are live from the start; constants, state and outputs to the end.
///
/// A workspace is live during its step only. An input that no step reads is dead at once. If a step reads a buffer that has
/// lost its bytes to another, these bytes are dead for the step.
///
/// The plan may be one that [`check`](super::check) refuses, as long as its steps name buffers that exist.
pub fn dead(plan: View) -> Vec<Vec<Span>> {
    let mut life = Life { plan, held: vec![BTreeMap::new(); plan.segments.len()], died: Vec::new() };
    let lasts = |class| !matches!(class, Class::Activation | Class::Workspace | Class::Input);
    // Per buffer, the last step that uses it.
    let mut last: Vec<usize> = plan.buffers.iter().map(|b| if lasts(b.class) { usize::MAX } else { 0 }).collect();
    for (at, step) in plan.steps.iter().enumerate() {
        step.reads.iter().chain(&step.writes).for_each(|&b| last[b] = last[b].max(at));
    }
    for segment in SegmentIdx::all(plan.segments).filter(|&s| plan.segments[s].memory.is_device()) {
        life.died.push(Span { segment, offset: 0, bytes: plan.segments[segment].bytes });
    }
    let given = |class| matches!(class, Class::Constant | Class::Input);
    let states: HashSet<BufferIdx> = plan.state.iter().map(|state| state.port.buffer).collect();
    let begins = |&b: &BufferIdx| given(plan.buffers[b].class) || states.contains(&b);
    BufferIdx::all(&plan.buffers).filter(begins).for_each(|b| life.hold(b));
    let read = |b: BufferIdx| plan.steps.iter().any(|step| step.reads.contains(&b));
    let idle = |&b: &BufferIdx| plan.buffers[b].class == Class::Input && !read(b);
    BufferIdx::all(&plan.buffers).filter(idle).for_each(|b| life.release(b));
    let mut all = Vec::with_capacity(plan.steps.len() + 1);
    for (at, step) in plan.steps.iter().enumerate() {
        all.push(life.take(step.reads.iter().copied()));
        step.writes.iter().for_each(|&b| life.hold(b));
        step.reads.iter().chain(&step.writes).filter(|&&b| last[b] == at).for_each(|&b| life.release(b));
    }
    all.push(life.take(plan.outputs.iter().map(|port| port.buffer)));
    all
}

/// Takes from dead bytes those that constants and states of other programs over the same segments hold.
pub fn spare<'a>(dead: &mut Vec<Span>, others: impl Iterator<Item = &'a Program>) {
    let mut kept: Vec<Span> = Vec::new();
    for program in others {
        let lasting = program.buffers.iter().filter(|b| matches!(b.class, Class::Constant | Class::State));
        kept.extend(lasting.map(|b| Span { segment: b.segment, offset: b.offset, bytes: b.bytes }));
    }
    kept.sort_unstable_by_key(|span| (span.segment, span.offset));
    // Constants of two bindings may share a part of their bytes.
    kept.dedup_by(|next, before| {
        let joined = next.segment == before.segment && next.offset < before.offset + before.bytes;
        if joined {
            before.bytes = before.bytes.max(next.offset + next.bytes - before.offset);
        }
        joined
    });
    for Span { segment, offset, bytes } in std::mem::take(dead) {
        let (mut from, end) = (offset, offset + bytes);
        let first = kept.partition_point(|k| (k.segment, k.offset + k.bytes) <= (segment, from));
        for k in kept[first..].iter().take_while(|k| k.segment == segment && k.offset < end) {
            if k.offset > from {
                dead.push(Span { segment, offset: from, bytes: k.offset - from });
            }
            from = from.max(k.offset + k.bytes);
        }
        if from < end {
            dead.push(Span { segment, offset: from, bytes: end - from });
        }
    }
}

struct Life<'a> {
    plan: View<'a>,
    /// Per segment, the live buffers by offset, each with its end. They do not overlap.
    held: Vec<BTreeMap<u64, (u64, BufferIdx)>>,
    /// The bytes that have died. Some may have been written again since.
    died: Vec<Span>,
}

impl Life<'_> {
    fn span(&self, buffer: BufferIdx) -> Span {
        let b = &self.plan.buffers[buffer];
        Span { segment: b.segment, offset: b.offset, bytes: b.bytes }
    }

    fn holds(&self, buffer: BufferIdx) -> bool {
        let Span { segment, offset, .. } = self.span(buffer);
        self.held[segment].get(&offset).is_some_and(|&(_, b)| b == buffer)
    }

    /// Notes a write to a buffer: other buffers that share bytes with it die.
    fn hold(&mut self, buffer: BufferIdx) {
        let Span { segment, offset, bytes } = self.span(buffer);
        let end = offset + bytes;
        if bytes == 0 || self.holds(buffer) {
            return;
        }
        while let Some((&start, &(reached, _))) = self.held[segment].range(..end).next_back() {
            if reached <= offset {
                break;
            }
            self.held[segment].remove(&start);
            self.died.push(Span { segment, offset: start, bytes: reached - start });
        }
        self.held[segment].insert(offset, (end, buffer));
    }

    /// Notes that a buffer has no further use: it dies.
    fn release(&mut self, buffer: BufferIdx) {
        let span = self.span(buffer);
        if self.holds(buffer) {
            self.held[span.segment].remove(&span.offset);
            self.died.push(span);
        }
    }

    /// The bytes that have died and are not live again, and those of the read buffers that have lost their bytes.
    fn take(&mut self, read: impl Iterator<Item = BufferIdx>) -> Vec<Span> {
        let mut dead = Vec::with_capacity(self.died.len());
        for Span { segment, offset, bytes } in std::mem::take(&mut self.died) {
            let (mut from, end) = (offset, offset + bytes);
            let held = &self.held[segment];
            let first = held.range(..=offset).next_back().map_or(offset, |(&start, _)| start);
            for (&start, &(reached, _)) in held.range(first..end) {
                if start > from {
                    dead.push(Span { segment, offset: from, bytes: start - from });
                }
                from = from.max(reached);
            }
            if from < end {
                dead.push(Span { segment, offset: from, bytes: end - from });
            }
        }
        dead.extend(read.filter(|&b| self.plan.buffers[b].bytes > 0 && !self.holds(b)).map(|b| self.span(b)));
        dead
    }
}
