//! Checks programs: plans that share their segments.

use crate::error::{Error, Result, ensure};
use crate::kernel::validate::Verdict;
use crate::plan::{Buffer, Class, Plan, Port, Spot, StatePort};
use crate::target::{AHEAD_STACK, Memory};
use std::collections::{BTreeMap, HashMap, HashSet};

/// Checks that plans fit together: they have the same target and segments, and names of their own. Constants and states of two plans are
/// the same buffer, or share no bytes. A state has one name everywhere. So no program writes what another one keeps.
///
/// Each plan must have passed [`check`](super::check).
///
/// # Errors
/// [`Error::Plan`], with the programs that do not fit together.
pub fn programs<'a>(plans: impl IntoIterator<Item = &'a Plan>) -> Result<()> {
    let plans: Vec<&Plan> = plans.into_iter().collect();
    together(&plans).map_err(Error::plan)
}

fn together(plans: &[&Plan]) -> Verdict {
    let mut names = HashSet::new();
    let mut lasting: BTreeMap<Spot, (&Buffer, &Plan)> = BTreeMap::new();
    let mut states: HashMap<&str, (&StatePort, &Plan)> = HashMap::new();
    let mut names_at: HashMap<Spot, &str> = HashMap::new();
    for plan in plans {
        let Some(name) = &plan.program else { return Err(format!("plan '{}': it is not one of several", plan.name)) };
        let named = |e: String| format!("program '{name}': {e}");
        ensure(names.insert(name), || named("another program has its name".into()))?;
        ensure(plan.target == plans[0].target, || named(format!("its target is not that of '{}'", plans[0].title())))?;
        ensure(plan.segments == plans[0].segments, || {
            named(format!(
                "expected the segments of '{}', {:?}, found {:?}",
                plans[0].title(),
                plans[0].segments,
                plan.segments
            ))
        })?;
        ensure(plan.forks == plans[0].forks, || {
            named(format!("{} runs at once, but '{}' has {}", plan.forks, plans[0].title(), plans[0].forks))
        })?;
        for buffer in plan.buffers.iter().filter(|b| matches!(b.class, Class::Constant | Class::State)) {
            let (other, of) = lasting.entry(buffer.spot()).or_insert((buffer, plan));
            let same = (other.class, other.dtype, other.bytes) == (buffer.class, buffer.dtype, buffer.bytes);
            ensure(same, || {
                named(format!("'{}' lies at '{}' of '{}', but is another", buffer.name, other.name, of.title()))
            })?;
        }
        for state in &plan.state {
            let (other, of) = states.entry(&state.port.name).or_insert((state, plan));
            let place = |state: &StatePort, plan: &Plan| plan.buffers[state.port.buffer].spot();
            let figures = |state: &StatePort| (state.port.dtype, state.port.shape.clone(), state.given);
            let held = *names_at.entry(place(state, plan)).or_insert(&state.port.name);
            let same = figures(other) == figures(state) && place(other, of) == place(state, plan);
            ensure(held == state.port.name, || named(format!("state '{}' lies where '{held}' does", state.port.name)))?;
            ensure(same, || named(format!("state '{}' is not that of '{}'", state.port.name, of.title())))?;
        }
    }
    for ((spot, (a, of)), (next, (b, other))) in lasting.iter().zip(lasting.iter().skip(1)) {
        let disjoint = spot.segment != next.segment || spot.offset + a.bytes <= next.offset;
        ensure(disjoint, || {
            format!("'{}' of program '{}' overlaps '{}' of program '{}'", b.name, other.title(), a.name, of.title())
        })?;
    }
    ahead(plans, plans.iter().all(|plan| plan.dims.is_empty()))?;
    filled(plans)
}

/// Checks the memory in which the inputs of the next run are made ready, if there is some: it holds each input of these plans once, and a
/// stack. It may hold others if they are not `all`.
pub(super) fn ahead(plans: &[&Plan], all: bool) -> Verdict {
    let Some(Plan { segments, .. }) = plans.first() else { return Ok(()) };
    let found: Vec<u64> = segments.iter().filter(|s| s.memory == Memory::Ahead).map(|s| s.bytes).collect();
    if found.is_empty() {
        return Ok(());
    }
    let ports = plans.iter().flat_map(|plan| &plan.inputs);
    let bytes = |port: &Port| port.shape.iter().map(|&d| d as u128).product::<u128>() * port.dtype.size() as u128;
    let inputs: HashMap<&str, u128> = ports.map(|port| (&port.name[..], bytes(port))).collect();
    let needed = inputs.values().sum::<u128>() + u128::from(AHEAD_STACK);
    let right = matches!(found[..], [bytes] if u128::from(bytes) == needed || !all && u128::from(bytes) > needed);
    ensure(right, || {
        format!("Ahead memory: expected one segment of {needed} bytes, found {found:?}; plan the model again")
    })
}

/// Checks that the segments of plans end with their last buffers, up to alignment.
pub(super) fn filled(plans: &[&Plan]) -> Verdict {
    let Some(Plan { segments, target, .. }) = plans.first() else { return Ok(()) };
    let mut ends = vec![0; segments.len()];
    let buffers = plans.iter().flat_map(|plan| &plan.buffers);
    buffers.for_each(|b| ends[b.segment.index()] = ends[b.segment.index()].max(b.offset + b.bytes));
    let device = segments.iter().zip(ends).enumerate().filter(|(_, (s, _))| s.memory.is_device());
    for (i, (segment, end)) in device {
        ensure(u128::from(segment.bytes) <= u128::from(end).next_multiple_of(u128::from(target.alignment)), || {
            let (class, bytes) = (segment.class.name(), segment.bytes);
            format!("segment {i} of class {class}: expected {end} bytes, where its last buffer ends, found {bytes}")
        })?;
    }
    Ok(())
}
