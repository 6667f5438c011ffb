//! When each buffer holds data, and which buffers take the bytes of one that dies as they are made.

use super::Class;
use super::lower::Draft;

/// Buffers that are placed as one, because each takes the bytes of the one before it.
#[derive(Clone, Debug)]
pub struct Range {
    /// Position of the first step that writes.
    pub lower: usize,
    /// One more than the position of the last step that reads or writes.
    pub upper: usize,
    /// Bytes.
    pub bytes: u64,
}

/// Live ranges under an order of the steps.
#[derive(Clone, Debug)]
pub struct Live {
    /// Per buffer, the index in `ranges`; `None` outside of the arena.
    pub range: Vec<Option<usize>>,
    /// Ranges to place.
    pub ranges: Vec<Range>,
}

/// Live ranges of the arena's buffers when steps run in `order`.
pub fn live(draft: &Draft, order: &[usize]) -> Live {
    let arena = |b: usize| matches!(draft.buffers[b].class, Class::Activation | Class::Workspace);
    let mut last = vec![0usize; draft.buffers.len()];
    for (at, &s) in order.iter().enumerate() {
        let step = &draft.steps[s];
        for &b in step.reads.iter().chain(&step.writes) {
            last[b] = at;
        }
    }
    let mut live = Live { range: vec![None; draft.buffers.len()], ranges: Vec::new() };
    for (at, &s) in order.iter().enumerate() {
        let step = &draft.steps[s];
        for (slot, &b) in step.writes.iter().enumerate() {
            if !arena(b) || live.range[b].is_some() {
                continue;
            }
            let dying = |r: &usize| {
                let range = live.range[*r]?;
                // Nothing has taken its bytes yet, nothing reads it later.
                (last[*r] == at && live.ranges[range].upper == at + 1).then_some(range)
            };
            let heir = if slot == 0 { step.reusable.iter().find_map(dying) } else { None };
            match heir {
                Some(range) => {
                    live.ranges[range].upper = last[b] + 1;
                    live.range[b] = Some(range);
                }
                None => {
                    live.range[b] = Some(live.ranges.len());
                    live.ranges.push(Range { lower: at, upper: last[b] + 1, bytes: draft.buffers[b].bytes });
                }
            }
        }
    }
    live
}
