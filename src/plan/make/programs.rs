//! Programs: graphs that share their memory, and run one at a time.
//!
//! ```text
//! encode --lower, order, place--> arena of 3 MB -.     the arena is the larger one; constants with the same content
//! decode --lower, order, place--> arena of 5 MB -'---> lie in one place, and so do states of one name
//! ```

use super::arrange::{Arrangement, arrange, draft};
use super::assemble::assemble;
use super::offsets::stack;
use crate::error::{Error, Result};
use crate::pass::Prepared;
use crate::plan::lower::{Draft, DraftState};
use crate::plan::{BufferIdx, Compiled, Limits, check};
use crate::target::Target;
use std::collections::HashMap;

/// Plans graphs that share one set of segments, each with the name of its program. Every plan can be checked by itself, and all together.
///
/// # Errors
/// As [`compile`](super::compile), for any of the graphs. [`Error::Fit`] when all together exceed the limit. [`Error::Usage`] when two
/// programs have one name, or states of one name that differ.
pub fn compile_programs(programs: &[(String, Prepared)], target: &Target, limits: &Limits) -> Result<Vec<Compiled>> {
    for (at, (name, _)) in programs.iter().enumerate() {
        if programs[..at].iter().any(|(other, _)| other == name) {
            return Err(Error::usage(format!("two programs have the name '{name}': expected a name for each")));
        }
    }
    let compiled = compile_within(programs, target, limits)?;
    let Some(limit) = limits.memory.filter(|&limit| bytes(&compiled) > limit) else { return Ok(compiled) };
    // Each program may take more than its least, for speed.
    let compiled = compile_within(programs, target, &Limits { memory: Some(0) })?;
    let needed = bytes(&compiled);
    if needed > limit {
        let names: Vec<_> = programs.iter().map(|(name, _)| format!("'{name}'")).collect();
        let what = format!("the plan of the programs {}", names.join(", "));
        return Err(Error::Fit { what, needed, limit, file: None });
    }
    Ok(compiled)
}

/// The bytes of all programs: their segments are the same.
fn bytes(compiled: &[Compiled]) -> u64 {
    compiled.first().map_or(0, |(plan, _)| plan.bytes())
}

/// Plans with each program arranged as if it had the memory of `own` for itself.
fn compile_within(programs: &[(String, Prepared)], target: &Target, own: &Limits) -> Result<Vec<Compiled>> {
    let mut found: Vec<Arrangement> = Vec::with_capacity(programs.len());
    for (_, graph) in programs {
        found.push(arrange(target, own, |options| draft(graph, target, options))?);
    }
    agree(programs, &found)?;
    let drafts: Vec<_> = found.iter().map(|found| (&found.draft, &found.layout)).collect();
    let (segments, places) = stack(target, &drafts);
    let mut compiled = Vec::with_capacity(programs.len());
    for (((name, graph), mut found), places) in programs.iter().zip(found).zip(places) {
        (found.segments, found.places) = (segments.clone(), places);
        let same: Vec<_> = BufferIdx::all(&found.draft.buffers).map(Some).collect();
        let (mut plan, constants) = assemble(graph, target, &found, &found.draft, &same)?;
        plan.program = Some(name.clone());
        check::check(&plan)?;
        compiled.push((plan, constants));
    }
    check::programs(compiled.iter().map(|(plan, _)| plan))?;
    Ok(compiled)
}

/// Refuses states of one name that differ.
fn agree(programs: &[(String, Prepared)], found: &[Arrangement]) -> Result<()> {
    let mut known: HashMap<&str, (&str, &Draft, &DraftState)> = HashMap::new();
    for ((program, _), Arrangement { draft, .. }) in programs.iter().zip(found) {
        for state in &draft.states {
            let buffer = &draft.buffers[state.buffer];
            let (other, of, first) = known.entry(&buffer.name).or_insert((program, draft, state));
            let before = &of.buffers[first.buffer];
            let (a, b) = (format!("{}{}", before.dtype, before.shape), format!("{}{}", buffer.dtype, buffer.shape));
            let name = &buffer.name;
            if a != b {
                return Err(Error::usage(format!(
                    "state '{name}' is {a} in program '{other}', and {b} in '{program}'"
                )));
            }
            let same = match (&first.initial, &state.initial) {
                (Some(a), Some(b)) => a.same(b),
                (a, b) => a.is_none() && b.is_none(),
            };
            if !same {
                return Err(Error::usage(format!(
                    "state '{name}' begins with other elements in program '{other}' than in '{program}'"
                )));
            }
        }
    }
    count_alike(programs)
}

/// Refuses programs that update a state otherwise than the one that counts it: no bound would hold any more.
fn count_alike(programs: &[(String, Prepared)]) -> Result<()> {
    let updated = programs.iter().flat_map(|(program, Prepared { graph, .. })| {
        let states = graph.states().iter().filter(|state| state.update.is_some());
        states.map(move |state| (&program[..], graph.value_name(state.value), state.count.map(|count| count.most)))
    });
    let updated: Vec<_> = updated.collect();
    for &(counting, name, most) in updated.iter().filter(|(.., most)| most.is_some()) {
        let other = updated.iter().find(|&&(_, of, bound)| of == name && bound != most);
        if let (Some((program, ..)), Some(most)) = (other, most) {
            return Err(Error::usage(format!(
                "state '{name}' counts to {most} in program '{counting}', and program '{program}' updates it \
                 otherwise: expected the same dims with the same ranges in both"
            )));
        }
    }
    Ok(())
}
