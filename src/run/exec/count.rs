//! States that are places or lengths: a run that would go beyond a bound is refused before it starts.
//!
//! The host keeps the least and the largest element of each such state. If a run adds a constant, the host adds it, too. After any other
//! update the host reads the state again: with the outputs, or else before the next run.
//!
//! Outputs that count what a run found: where it is too few, the outputs are refused.

use super::{Lasting, read_ports, use_of};
use crate::backend::Backend;
use crate::error::{Error, Result};
use crate::figures;
use crate::plan::{Count, Fewest, Port, Program, StatePort};
use crate::tensor::Tensor;

/// The least and the largest element of a state.
pub(super) type Ends = [i64; 2];

pub(super) fn ends(tensor: &Tensor) -> Ends {
    let all = tensor.to_i64().unwrap_or_default();
    [all.iter().min(), all.iter().max()].map(|end| end.copied().unwrap_or_default())
}

/// Refuses what a run found where it is less than the plan is for. The tensor is the output's.
pub(super) fn suffices(port: &Port, tensor: &Tensor) -> Result<()> {
    let Some(Fewest { node, number }) = &port.fewest else { return Ok(()) };
    match ends(tensor)[0] {
        found if u64::try_from(found).is_ok_and(|found| found >= *number) => Ok(()),
        found => Err(Error::usage(format!(
            "output '{}': node '{node}' finds {}, but the graph has no meaning for fewer than {number}",
            port.name,
            figures::count(found.max(0) as u64, "element")
        ))),
    }
}

impl Lasting {
    /// The ends of a tensor that becomes the state's elements. `None` if the state is not watched.
    pub(super) fn counted(&self, tensor: &Tensor) -> Result<Option<Ends>> {
        if !self.watched {
            return Ok(None);
        }
        let found = ends(tensor);
        let allowed = |end: &i64| self.most.is_none_or(|most| u64::try_from(*end).is_ok_and(|end| end <= most));
        match (self.most, found.into_iter().find(|end| !allowed(end))) {
            (Some(most), Some(end)) => {
                Err(Error::usage(format!("state '{}': expected 0 to {most}, found {end}", self.port.name)))
            }
            _ => Ok(Some(found)),
        }
    }

    /// Its least and largest element, which are read if the host does not know them.
    fn ends(&mut self, backend: &mut dyn Backend) -> Result<Ends> {
        if self.ends.is_none() {
            self.ends = Some(ends(&read_ports(backend, &[(&self.port, self.stored, self.at)])?[0]));
        }
        Ok(self.ends.expect("it was read"))
    }
}

/// The states that have bounds, and what a plan says of them.
fn watched<'a>(states: &'a mut [Lasting], plan: &'a Program) -> impl Iterator<Item = (&'a mut Lasting, &'a StatePort)> {
    let own = |name: &str| plan.state.iter().find(|state| state.port.name == name);
    states
        .iter_mut()
        .filter(|state| state.watched)
        .filter_map(move |state| own(&state.port.name).map(|own| (state, own)))
}

/// Refuses a run that would go beyond a bound.
pub(super) fn check(states: &mut [Lasting], plan: &Program, backend: &mut dyn Backend) -> Result<()> {
    const REMEDY: &str = "reset the states, or plan a larger capacity";
    for (state, StatePort { port, count, .. }) in watched(states, plan) {
        let ([least, most], name) = (state.ends(backend)?, &port.name);
        for indexes in &port.indexes {
            if let Some(end) = [least, most].into_iter().find(|end| !(indexes.least..=indexes.most).contains(end)) {
                let what = format!("state '{name}' is {end}: {}", use_of(indexes));
                return Err(Error::usage(format!("{what}; {REMEDY}")));
            }
        }
        let Some(Count { by, most: bound }) = count else { continue };
        if i128::from(most) + i128::from(*by) > i128::from(*bound) {
            let what = format!("state '{name}' is {most}, and a run adds {by}: expected at most {bound} after it");
            return Err(Error::usage(format!("{what}; {REMEDY}")));
        }
    }
    Ok(())
}

/// Notes what a run has done.
pub(super) fn advance(states: &mut [Lasting], plan: &Program) {
    for (state, own) in watched(states, plan).filter(|(_, own)| own.update.is_some()) {
        state.ends =
            state.ends.zip(own.count).map(|(ends, count)| ends.map(|end| end.saturating_add_unsigned(count.by)));
    }
}
