//! Liveness: the times at which each buffer holds data, and the results that overwrite an operand in place.

use super::streams::Streams;
use crate::lower::Draft;
use crate::{BufferIdx, Class, StepIdx};

/// The live range of one buffer, or of several that are placed as one because each overwrites the one before it in place.
#[derive(Clone, Debug)]
pub struct Range {
    /// Position of the first step that may run at the same time as the first write.
    pub lower: usize,
    /// One more than the position of the last step that may run at the same time as a read or write.
    pub upper: usize,
    /// Number of bytes.
    pub bytes: u64,
}

/// The live ranges for an order of the steps.
#[derive(Clone, Debug)]
pub struct Live {
    /// Per buffer, the index in `ranges`; `None` outside the arena.
    pub range: Vec<Option<usize>>,
    /// The ranges to place.
    pub ranges: Vec<Range>,
}

/// The live ranges of the arena's buffers if steps run in `order`, on several `streams`. Inputs are live from the start, outputs to
/// the end.
pub fn live(draft: &Draft, order: &[StepIdx], streams: &Streams) -> Live {
    let class = |b: BufferIdx| draft.buffers[b].class;
    let arena = |b: BufferIdx| class(b).in_arena();
    let mut uses: Vec<Vec<usize>> = vec![Vec::new(); draft.buffers.len()];
    for (at, &s) in order.iter().enumerate() {
        let step = &draft.steps[s];
        for &b in step.reads.iter().chain(&step.writes).filter(|&&b| arena(b)) {
            if uses[b].last() != Some(&at) {
                uses[b].push(at);
            }
        }
    }
    let ends = |b: BufferIdx| match class(b) {
        Class::Output => order.len().max(1),
        _ => uses[b].iter().map(|&at| streams.latest(at) + 1).max().unwrap_or(1),
    };
    let mut owner: Vec<BufferIdx> = Vec::new();
    let mut live = Live { range: vec![None; draft.buffers.len()], ranges: Vec::new() };
    for b in BufferIdx::all(&draft.buffers).filter(|&b| class(b) == Class::Input) {
        live.range[b] = Some(live.ranges.len());
        owner.push(b);
        live.ranges.push(Range { lower: 0, upper: ends(b), bytes: draft.buffers[b].bytes });
    }
    for (at, &s) in order.iter().enumerate() {
        let step = &draft.steps[s];
        for (slot, &b) in step.writes.iter().enumerate() {
            if !arena(b) || live.range[b].is_some() {
                continue;
            }
            let dying = |&r: &BufferIdx| {
                let range = live.range[r].filter(|_| class(r) != Class::Output)?;
                // The operand dies here if no other result has overwritten it and all its other uses are over.
                let (&last, others) = uses[r].split_last()?;
                let dies = last == at && others.iter().all(|&u| streams.precedes(u, at));
                (dies && owner[range] == r).then_some(range)
            };
            let over = draft.buffers[b].over.and_then(|data| live.range[data]);
            let taken = if slot == 0 { step.reusable.iter().find_map(dying) } else { None };
            match over.or(taken) {
                Some(range) => {
                    let upper = &mut live.ranges[range].upper;
                    *upper = ends(b).max(*upper);
                    owner[range] = b;
                    live.range[b] = Some(range);
                }
                None => {
                    live.range[b] = Some(live.ranges.len());
                    owner.push(b);
                    let lower = uses[b].iter().map(|&at| streams.earliest(at)).min().map_or(at, |p| p.min(at));
                    live.ranges.push(Range { lower, upper: ends(b), bytes: draft.buffers[b].bytes });
                }
            }
        }
    }
    live
}
