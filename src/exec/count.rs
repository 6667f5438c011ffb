//! The host's copy of states that count, by which a run beyond a bound is refused before it starts.

use super::Lasting;
use crate::error::{Error, Result};
use crate::plan::{Count, Plan};
use crate::tensor::Tensor;

impl Lasting {
    /// The count that a tensor holds; 0 if the state does not count.
    pub(super) fn counted(&self, tensor: &Tensor) -> Result<u64> {
        let Some(most) = self.most else { return Ok(0) };
        let found = tensor.to_i64().and_then(|values| values.first().copied()).unwrap_or_default();
        match u64::try_from(found) {
            Ok(count) if count <= most => Ok(count),
            _ => Err(Error::usage(format!("state '{}': expected 0 to {most}, found {found}", self.port.name))),
        }
    }
}

/// The number that a run of a plan adds to a state.
fn adds(state: &Lasting, plan: &Plan) -> Option<Count> {
    plan.state.iter().find(|other| other.port.name == state.port.name)?.count
}

/// Refuses a run that would take a count beyond its bound.
pub(super) fn check(states: &[Lasting], plan: &Plan) -> Result<()> {
    for state in states.iter().filter(|state| state.most.is_some()) {
        let (name, now) = (&state.port.name, state.count);
        let Some(Count { by, most }) = adds(state, plan) else { continue };
        if now.checked_add(by).is_none_or(|after| after > most) {
            let what = format!("state '{name}' is {now}, and a run adds {by}: expected at most {most} after it");
            return Err(Error::usage(format!("{what}; reset the states, or plan a larger capacity")));
        }
    }
    Ok(())
}

/// Counts a run.
pub(super) fn advance(states: &mut [Lasting], plan: &Plan) {
    for state in states.iter_mut().filter(|state| state.most.is_some()) {
        state.count += adds(state, plan).map_or(0, |count| count.by);
    }
}
