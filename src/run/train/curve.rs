//! The curve of a training: the bytes that it takes, against the work that it does again for them.

use crate::error::{Error, Result};
use crate::pass::recompute::Recompute;
use crate::plan::{Class, Plan, Planner};
use serde::Serialize;

/// Limits are this part of the arena apart.
const APART: u64 = 20;

/// A plan of a training.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Point {
    /// Bytes that will be allocated.
    pub planned_bytes: u64,
    /// Those of the arena among them, which the programs share.
    pub arena_bytes: u64,
    /// The work of an update.
    #[serde(flatten)]
    pub recompute: Recompute,
}

impl Point {
    /// The point of a training's plan, an update of which has so many parts.
    pub fn of(plan: &Plan, parts: usize) -> Point {
        let arena_bytes = plan.class_bytes(Class::Activation);
        Point { planned_bytes: plan.bytes(), arena_bytes, recompute: recompute(plan, parts) }
    }
}

/// The work of an update of so many parts: the first, the last, and those between them.
pub fn recompute(plan: &Plan, parts: usize) -> Recompute {
    let mut all = Recompute::default();
    for program in &plan.programs {
        let times = if program.name == "next" { parts.saturating_sub(2) as u64 } else { 1 };
        if let Some(Recompute { extra_flop, extra_bytes, flop }) = program.recompute {
            all.extra_flop += times * extra_flop;
            all.extra_bytes += times * extra_bytes;
            all.flop += times * flop;
        }
    }
    all
}

/// Plans of a job without a limit and under ever smaller ones, until none fits. Each point takes less memory and does more again than the one before
/// it. `seen` gets each plan's point as it is made.
///
/// # Errors
/// Of planning, but for a limit that nothing fits.
pub fn curve(parts: usize, planner: &mut Planner, seen: &mut dyn FnMut(&Point)) -> Result<Vec<Point>> {
    let mut point = |limit| {
        let point = Point::of(&planner.within(limit)?.plan, parts);
        seen(&point);
        Ok(point)
    };
    let mut found = vec![point(None)?];
    let apart = found[0].arena_bytes.div_ceil(APART).max(1);
    loop {
        let last = found[found.len() - 1].planned_bytes;
        match point(Some(last.saturating_sub(apart))) {
            Ok(next) => found.push(next),
            Err(Error::Fit { needed, .. }) if needed < last => {
                found.extend(point(Some(needed)));
                break;
            }
            Err(Error::Fit { .. }) => break,
            Err(other) => return Err(other),
        }
    }
    // What takes more memory and does no less again is no choice.
    found.sort_by_key(|point| (point.planned_bytes, point.recompute.extra_flop));
    let mut least = u64::MAX;
    found.retain(|point| {
        let own = point.recompute.extra_flop;
        let is_less = own < least;
        least = least.min(own);
        is_less
    });
    found.reverse();
    Ok(found)
}
