//! Checks that programs fit together in the segments that they share.

use crate::error::ensure;
use crate::kernel::validate::Verdict;
use crate::target::{Memory, PREFETCH_STACK};
use crate::{Buffer, BufferIdx, Class, Plan, Port, Spot, StatePort};
use std::collections::{BTreeMap, HashMap, HashSet};

/// Checks that the programs of a plan fit together: they have names of their own. Constants and states of two programs are the same buffer,
/// or share no bytes. A state has one name everywhere. So no program writes what another one keeps.
pub(super) fn together(plan: &Plan) -> Verdict {
    let mut names = HashSet::new();
    let mut lasting: BTreeMap<Spot, (&Buffer, bool, &str)> = BTreeMap::new();
    let mut states: HashMap<&str, (&StatePort, Spot, &str)> = HashMap::new();
    let mut names_at: HashMap<Spot, &str> = HashMap::new();
    for program in &plan.programs {
        let name = &program.name[..];
        let named = |e: String| format!("program '{name}': {e}");
        ensure(names.insert(name), || named("another program has its name".into()))?;
        // Within a program, what lasts was checked before.
        if plan.programs.len() == 1 {
            continue;
        }
        let packed = program.constants.iter().filter(|port| port.packed.is_some()).map(|port| port.buffer);
        let packed: HashSet<BufferIdx> = packed.collect();
        for (b, buffer) in BufferIdx::enumerate(&program.buffers) {
            if !matches!(buffer.class, Class::Constant | Class::State) {
                continue;
            }
            let is_packed = packed.contains(&b);
            let (other, was_packed, of) = lasting.entry(buffer.spot()).or_insert((buffer, is_packed, name));
            let same = (other.class, other.dtype, other.bytes, *was_packed)
                == (buffer.class, buffer.dtype, buffer.bytes, is_packed);
            ensure(same, || named(format!("'{}' lies at '{}' of '{of}', but is another", buffer.name, other.name)))?;
        }
        for state in &program.state {
            let spot = program.buffers[state.port.buffer].spot();
            let (other, place, of) = states.entry(&state.port.name).or_insert((state, spot, name));
            let figures = |state: &StatePort| (state.port.dtype, state.port.shape.clone(), state.given);
            let held = *names_at.entry(spot).or_insert(&state.port.name);
            ensure(held == state.port.name, || named(format!("state '{}' lies where '{held}' does", state.port.name)))?;
            ensure(figures(other) == figures(state) && *place == spot, || {
                named(format!("state '{}' is not that of '{of}'", state.port.name))
            })?;
        }
    }
    for ((spot, (a, _, of)), (next, (b, _, other))) in lasting.iter().zip(lasting.iter().skip(1)) {
        let disjoint = spot.segment != next.segment || spot.offset + a.bytes <= next.offset;
        ensure(disjoint, || format!("'{}' of program '{other}' overlaps '{}' of program '{of}'", b.name, a.name))?;
    }
    for knob in &plan.choices {
        let is_known = knob.program.as_ref().is_none_or(|program| names.contains(&program[..]));
        ensure(is_known, || {
            format!("choice '{}': no program '{}'", knob.what, knob.program.as_deref().unwrap_or_default())
        })?;
    }
    for (program, dim) in plan.programs.iter().flat_map(|program| program.dims.iter().map(move |dim| (program, dim))) {
        let name = &program.name;
        ensure(dim.least <= dim.most, || {
            format!("program '{name}': dim '{}': {}..{} is empty", dim.name, dim.least, dim.most)
        })?;
        ensure(dim.least == dim.most || plan.runs == 1, || {
            format!("program '{name}': dim '{}' has a range, but there are {} runs at once", dim.name, plan.runs)
        })?;
    }
    let is_whole = plan.programs.iter().all(|program| program.dims.is_empty());
    ahead(plan, is_whole)?;
    // The segments of a range are as large as its largest binding needs.
    if is_whole || plan.programs.len() > 1 { filled(plan) } else { Ok(()) }
}

/// Checks the memory in which the inputs of the next run are made ready, if there is some: it holds each input of the programs once, and a
/// stack. It may hold others if they are not `all`.
fn ahead(plan: &Plan, all: bool) -> Verdict {
    let found: Vec<u64> = plan.segments.iter().filter(|s| s.memory == Memory::Prefetch).map(|s| s.bytes).collect();
    if found.is_empty() {
        return Ok(());
    }
    let ports = plan.programs.iter().flat_map(|program| &program.inputs);
    let bytes = |port: &Port| port.shape.iter().map(|&d| d as u128).product::<u128>() * port.dtype.size() as u128;
    let inputs: HashMap<&str, u128> = ports.map(|port| (&port.name[..], bytes(port))).collect();
    let needed = inputs.values().sum::<u128>() + u128::from(PREFETCH_STACK);
    let right = matches!(found[..], [bytes] if u128::from(bytes) == needed || !all && u128::from(bytes) > needed);
    ensure(right, || {
        format!("Prefetch memory: expected one segment of {needed} bytes, found {found:?}; plan the model again")
    })
}

/// Checks that segments end with their last buffers, up to alignment.
fn filled(plan: &Plan) -> Verdict {
    let Plan { segments, target, programs, .. } = plan;
    let mut ends = vec![0; segments.len()];
    let buffers = programs.iter().flat_map(|program| &program.buffers);
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
