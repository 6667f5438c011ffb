//! Plans for several runs at once: each has an arena, states and staging of its own, and all read the same constants.

use super::{Class, Limits, Plan};
use crate::error::{Error, Result};

/// Plans for `forks` runs at once, which together are to be within the limit. `make` plans one run, `plans` gives access to what it made:
/// one plan, or several over the same segments.
///
/// # Errors
/// The error of `make`; [`Error::Fit`] when the runs do not fit together.
pub fn at_once<T>(
    forks: u32,
    limits: &Limits,
    make: &mut dyn FnMut(&Limits) -> Result<T>,
    plans: &dyn Fn(&mut T) -> Vec<&mut Plan>,
) -> Result<T> {
    let mut made = make(limits)?;
    let Some((bytes, constants)) = set(forks, &mut made, plans) else { return Ok(made) };
    let Some(limit) = limits.memory.filter(|&limit| bytes > limit) else { return Ok(made) };
    let forks64 = u64::from(forks);
    // One run may have taken more than its least, for speed.
    let each = Limits { memory: Some(constants + limit.saturating_sub(constants) / forks64) };
    let needed = match make(&each) {
        Ok(mut made) => match set(forks, &mut made, plans) {
            Some((bytes, _)) if bytes > limit => bytes,
            _ => return Ok(made),
        },
        Err(Error::Fit { needed, .. }) => constants + needed.saturating_sub(constants) * forks64,
        Err(error) => return Err(error),
    };
    let title = plans(&mut made).first().map(|plan| plan.title().to_owned()).unwrap_or_default();
    let what = format!("the plan of {forks} runs at once of '{title}'");
    Err(Error::Fit { what, needed, limit, file: None })
}

/// Notes the number of runs in plans. Returns the bytes of all runs, and those of the constants.
fn set<T>(forks: u32, made: &mut T, plans: &dyn Fn(&mut T) -> Vec<&mut Plan>) -> Option<(u64, u64)> {
    let mut plans = plans(made);
    plans.iter_mut().for_each(|plan| plan.forks = forks);
    plans.first().map(|plan| (plan.bytes(), plan.class_bytes(Class::Constant)))
}
