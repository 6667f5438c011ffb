//! Orders in which exchanges of ranks run beside what is computed: what reads their results comes later.
//!
//! ```text
//! a gradient, its sum over ranks, its update, the next ...     the update waits for the sum
//! a gradient, its sum, the next gradient, its sum ... update   the sum has the time of the next ones
//! ```

use crate::StepIdx;
use crate::lower::{Dag, Draft};

/// Exchanges that begin between one and what reads its result.
const LAG: usize = 8;
/// The same of what comes from the memory of the host: the next is on its way while one is used.
const FETCHED: usize = 1;

/// The same order with the readers of exchanges behind later exchanges, if there are exchanges.
pub(super) fn lagged(draft: &Draft, order: &[StepIdx]) -> Option<Vec<StepIdx>> {
    if !draft.exchanges() && !draft.fetches() {
        return None;
    }
    let dag = Dag::new(draft);
    let mut lagging = Lagging {
        dag: &dag,
        made: Vec::with_capacity(order.len()),
        later: Vec::new(),
        due: vec![0; order.len()],
        begun: 0,
    };
    for &step in order {
        let lag = if draft.is_fetch(step) { Some(FETCHED) } else { draft.is_exchange(step).then_some(LAG) };
        lagging.step(step, lag);
    }
    lagging.release(usize::MAX);
    Some(lagging.made)
}

struct Lagging<'a> {
    dag: &'a Dag,
    made: Vec<StepIdx>,
    /// Steps that come later, in order.
    later: Vec<StepIdx>,
    /// Per step, the number of exchanges that begin before it.
    due: Vec<usize>,
    /// Exchanges so far.
    begun: usize,
}

impl Lagging<'_> {
    fn step(&mut self, step: StepIdx, lag: Option<usize>) {
        let before = &self.dag.before[step];
        let due = before.iter().map(|&other| self.due[other.index()]).max().unwrap_or(0);
        if let Some(lag) = lag {
            // It waits for what it reads, and for no more.
            self.release(due);
            self.made.push(step);
            self.begun += 1;
            self.due[step.index()] = self.begun + lag;
            self.release(self.begun);
            return;
        }
        self.due[step.index()] = due;
        if due > self.begun { self.later.push(step) } else { self.made.push(step) }
    }

    /// Adds the steps that are due before so many exchanges.
    fn release(&mut self, begun: usize) {
        let (due, made) = (&self.due, &mut self.made);
        self.later.retain(|&step| {
            let stays = due[step.index()] > begun;
            if !stays {
                made.push(step);
            }
            stays
        });
    }
}
