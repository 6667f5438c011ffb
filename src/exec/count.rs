//! The host's copy of states that count, by which a run beyond a bound is refused before it starts.

use crate::constant::Constant;
use crate::error::{Error, Result};
use crate::plan::{Count, Plan, StatePort};
use crate::tensor::Tensor;
use std::collections::HashMap;
use std::sync::Arc;

/// The elements of states that count, by name.
#[derive(Debug, Default)]
pub(super) struct Counts(HashMap<String, u64>);

/// The states of a plan that count.
fn counting(plan: &Plan) -> impl Iterator<Item = (&StatePort, Count)> {
    plan.state.iter().filter_map(|state| Some((state, state.count?)))
}

impl Counts {
    /// Sets all counts to what they begin with: an element of `given`, which has one per state that has its elements given, or zero.
    pub(super) fn begin(&mut self, plan: &Plan, given: &[Arc<Constant>]) -> Result<()> {
        let mut given = given.iter();
        for state in &plan.state {
            let initial = if state.given { given.next() } else { None };
            if state.count.is_none() {
                continue;
            }
            let first = initial.map_or(Ok(Some(0)), |first| Counts::of(plan, &state.port.name, first.value()?))?;
            self.set(&state.port.name, first);
        }
        Ok(())
    }

    /// The count that a tensor holds; `None` if the state of this name does not count.
    pub(super) fn of(plan: &Plan, name: &str, tensor: &Tensor) -> Result<Option<u64>> {
        let Some((_, Count { most, .. })) = counting(plan).find(|(state, _)| state.port.name == name) else {
            return Ok(None);
        };
        let found = tensor.to_i64().and_then(|values| values.first().copied()).unwrap_or_default();
        match u64::try_from(found) {
            Ok(count) if count <= most => Ok(Some(count)),
            _ => Err(Error::usage(format!("state '{name}': expected 0 to {most}, found {found}"))),
        }
    }

    pub(super) fn set(&mut self, name: &str, count: Option<u64>) {
        if let Some(count) = count {
            self.0.insert(name.to_owned(), count);
        }
    }

    fn now(&self, state: &StatePort) -> u64 {
        self.0.get(&state.port.name).copied().unwrap_or(0)
    }

    /// Refuses a run that would take a count beyond its bound.
    pub(super) fn check(&self, plan: &Plan) -> Result<()> {
        for (state, Count { by, most }) in counting(plan) {
            let (name, now) = (&state.port.name, self.now(state));
            if now.checked_add(by).is_none_or(|after| after > most) {
                let what = format!("state '{name}' is {now}, and a run adds {by}: expected at most {most} after it");
                return Err(Error::usage(format!("{what}; reset the states, or plan a larger capacity")));
            }
        }
        Ok(())
    }

    /// Counts a run.
    pub(super) fn advance(&mut self, plan: &Plan) {
        for (state, Count { by, .. }) in counting(plan) {
            let after = self.now(state) + by;
            self.set(&state.port.name, Some(after));
        }
    }
}
