//! The order that steps must keep.

use super::Draft;
use crate::plan::StepIdx;

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
        let mut writers = vec![0usize; draft.buffers.len()];
        for step in &draft.steps {
            step.writes.iter().for_each(|&b| writers[b] += 1);
        }
        for state in draft.buffers.iter().filter_map(|buffer| buffer.over) {
            writers[state] += 2;
        }
        let mut wrote: Vec<Option<StepIdx>> = vec![None; draft.buffers.len()];
        let mut read: Vec<Vec<StepIdx>> = vec![Vec::new(); draft.buffers.len()];
        let mut before: Vec<Vec<StepIdx>> = vec![Vec::new(); draft.steps.len()];
        for (s, step) in StepIdx::enumerate(&draft.steps) {
            for &b in &step.reads {
                before[s].extend(wrote[b]);
                if writers[b] > 1 {
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
