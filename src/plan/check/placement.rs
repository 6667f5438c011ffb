//! Checks a placement from its items and offsets alone.

use super::{Verdict, ensure};
use crate::error::{Error, Result};
use crate::place::{Problem, Solution};
use std::collections::BTreeMap;

/// Checks a placement, and returns the most bytes that are live at once, rounded up to the problem's alignment.
///
/// Items that are live at the same time must share no byte, offsets must be aligned, and the solution's peak must be right.
///
/// # Errors
/// [`Error::Plan`], with the items that break a rule.
pub fn placement(problem: &Problem, solution: &Solution) -> Result<u64> {
    judge(problem, solution).map_err(Error::plan)
}

fn judge(problem: &Problem, solution: &Solution) -> Verdict<u64> {
    let (items, offsets) = (problem.items(), &solution.offsets);
    ensure(items.len() == offsets.len(), || format!("expected {} offsets, found {}", items.len(), offsets.len()))?;
    let mut events = Vec::with_capacity(2 * items.len());
    let mut ends = Vec::with_capacity(items.len());
    for (index, (item, &offset)) in items.iter().zip(offsets).enumerate() {
        let align = item.align.max(problem.align());
        ensure(offset % align == 0, || format!("item {index} is at {offset}, which is no multiple of {align}"))?;
        let end = item.size.checked_next_multiple_of(problem.align()).and_then(|size| offset.checked_add(size));
        ends.push(end.ok_or_else(|| format!("item {index} at {offset} ends beyond 64 bits"))?);
        if item.size > 0 {
            // At the same time, ends (false) come before starts (true).
            events.push((item.upper, false, index));
            events.push((item.lower, true, index));
        }
    }
    events.sort_unstable();
    let (mut live, mut most) = (0, 0);
    // The live items by offset. They do not overlap, so a new item needs to be compared with its neighbours only.
    let mut taken: BTreeMap<u64, usize> = BTreeMap::new();
    for (_, born, index) in events {
        let (offset, end) = (offsets[index], ends[index]);
        if !born {
            taken.remove(&offset);
            live -= end - offset;
            continue;
        }
        let below = taken.range(..=offset).next_back().filter(|&(_, &other)| ends[other] > offset);
        let above = taken.range(offset..).next().filter(|&(&start, _)| start < end);
        if let Some((_, other)) = below.or(above) {
            let (a, b) = (index.min(*other), index.max(*other));
            let at = |index: usize| format!("{index} ({}..{})", offsets[index], ends[index]);
            return Err(format!("items {} and {} are live at once and overlap", at(a), at(b)));
        }
        taken.insert(offset, index);
        live += end - offset;
        most = most.max(live);
    }
    let peak = (0..items.len()).filter(|&index| items[index].size > 0).map(|index| ends[index]).max().unwrap_or(0);
    ensure(peak == solution.peak, || format!("the peak is said to be {}, but is {peak}", solution.peak))?;
    Ok(most)
}
