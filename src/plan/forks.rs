//! Plans for several runs at once: each has an arena, states and staging of its own, and all read the same constants.

use super::{Class, Limits, Plan};
use crate::error::{Error, Result};

/// Gives access to the plans of one run: one, or several over the same segments.
pub type Plans<'a, T> = &'a dyn Fn(&mut T) -> Vec<&mut Plan>;

/// Plans for `forks` runs at once, which together are to be within the limit. `make` plans one run, with measured schedules if its flag says
/// so. If `measured`, they are used as long as all runs together take no more bytes for it: one run that takes as many bytes may take fewer
/// for its constants and more for the rest.
///
/// # Errors
/// The error of `make`; [`Error::Fit`] when the runs do not fit together; [`Error::Usage`] when there is no run, or the bytes of all runs
/// cannot be counted.
pub fn at_once<T>(
    forks: u32,
    limits: &Limits,
    measured: bool,
    make: &mut dyn FnMut(&Limits, bool) -> Result<T>,
    plans: Plans<T>,
) -> Result<T> {
    if !measured || forks == 1 {
        return within(forks, limits, &mut |limits| make(limits, measured), plans);
    }
    let mut plain = within(forks, limits, &mut |limits| make(limits, false), plans)?;
    let least = Limits { memory: plans(&mut plain).first().map(|plan| plan.bytes()) };
    Ok(within(forks, &least, &mut |limits| make(limits, true), plans).unwrap_or(plain))
}

/// Plans all runs by one way of planning one.
fn within<T>(forks: u32, limits: &Limits, make: &mut dyn FnMut(&Limits) -> Result<T>, plans: Plans<T>) -> Result<T> {
    if forks == 0 {
        return Err(Error::usage("forks: expected at least one run at once, found 0".into()));
    }
    let runs = u64::from(forks);
    let mut made = make(limits)?;
    while let Some((bytes, constants)) = set(forks, &mut made, plans)?
        && let Some(limit) = limits.memory.filter(|&limit| bytes > limit)
    {
        // One run may have taken more than its least, for speed. If the next one is too large, too, it has fewer constants than this one, so
        // that this ends.
        let each = constants + limit.saturating_sub(constants) / runs;
        made = make(&Limits { memory: Some(each) }).map_err(|error| match error {
            Error::Fit { needed, .. } => {
                let needed = constants.saturating_add(needed.saturating_sub(constants).saturating_mul(runs));
                let title = plans(&mut made).first().map(|plan| plan.title().to_owned()).unwrap_or_default();
                let what = format!("the plan of {forks} runs at once of '{title}'");
                Error::Fit { what, needed, limit, file: None }
            }
            error => error,
        })?;
    }
    Ok(made)
}

/// Notes the number of runs in plans. Returns the bytes of all runs, and those of the constants.
fn set<T>(forks: u32, made: &mut T, plans: Plans<T>) -> Result<Option<(u64, u64)>> {
    let mut plans = plans(made);
    for plan in &mut plans {
        let (constants, each) = (plan.class_bytes(Class::Constant), plan.fork_bytes());
        let all = each.checked_mul(forks.into()).and_then(|bytes| bytes.checked_add(constants));
        let countable = all.filter(|&bytes| bytes <= i64::MAX as u64);
        plan.summary.planned_bytes = countable.ok_or_else(|| {
            Error::usage(format!("forks: the bytes of {forks} runs at once, {each} each, are beyond 63 bits"))
        })?;
        plan.forks = forks;
    }
    Ok(plans.first().map(|plan| (plan.bytes(), plan.class_bytes(Class::Constant))))
}
