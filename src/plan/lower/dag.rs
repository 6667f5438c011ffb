//! The order that steps must keep.

use super::Draft;
use crate::StepIdx;

/// The dependencies between steps.
pub struct Dag {
    /// Per step, the steps that it depends on directly.
    pub before: Vec<Vec<StepIdx>>,
    /// Per step, the steps that depend on it directly.
    pub after: Vec<Vec<StepIdx>>,
}

impl Dag {
    /// Derives the dependencies from reads and writes. A read depends on the last write before it.
    ///
    /// If several steps write a buffer, all steps that read or write it keep the file's order. So do those that read a state and those that
    /// write its update over it.
    pub fn new(draft: &Draft) -> Dag {
        // Per buffer, true if a write to its bytes comes behind reads of it.
        let mut rewritten = vec![false; draft.buffers.len()];
        let mut written = vec![false; draft.buffers.len()];
        for &b in draft.steps.iter().flat_map(|step| &step.writes) {
            rewritten[b] |= std::mem::replace(&mut written[b], true);
        }
        draft.buffers.iter().filter_map(|buffer| buffer.over).for_each(|state| rewritten[state] = true);
        let mut wrote: Vec<Option<StepIdx>> = vec![None; draft.buffers.len()];
        let mut read: Vec<Vec<StepIdx>> = vec![Vec::new(); draft.buffers.len()];
        let mut before: Vec<Vec<StepIdx>> = vec![Vec::new(); draft.steps.len()];
        for (s, step) in StepIdx::enumerate(&draft.steps) {
            for &b in &step.reads {
                before[s].extend(wrote[b]);
                if rewritten[b] {
                    read[b].push(s);
                }
            }
            for &b in &step.writes {
                before[s].extend(wrote[b]);
                before[s].append(&mut read[b]);
                if let Some(state) = draft.buffers[b].over {
                    before[s].extend(&read[state]);
                }
                wrote[b] = Some(s);
            }
            before[s].retain(|&p| p != s);
            before[s].sort_unstable();
            before[s].dedup();
        }
        let mut after = vec![Vec::new(); draft.steps.len()];
        for (s, list) in StepIdx::enumerate(&before) {
            list.iter().for_each(|&p| after[p].push(s));
        }
        Dag { before, after }
    }
}
