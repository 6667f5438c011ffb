//! Judges the plans of all ranks of a mesh together: whatever the ranks' pace, each exchange is begun by all of its group, who bring the same, and
//! nobody waits for ever. Only the plans are asked.
//!
//! A rank begins its collectives in the order of its steps, and waits at each for its group. So they end in one way alone, which is walked here.

use crate::error::{Error, Result, ensure};
use crate::kernel::{Collective, Kernel};
use crate::{Mesh, Plan, Program, Step};
use std::collections::BTreeMap;

/// A collective of a step.
struct Meeting<'a> {
    step: &'a Step,
    kernel: &'a Kernel,
    of: &'a Collective,
    /// The number of its axis.
    axis: usize,
}

/// Judges plans, each with the ranks that run it. Each rank of the mesh runs one.
///
/// # Errors
/// The first exchange that is not the same on all of its ranks, or that one never begins.
pub fn ranks(mesh: &Mesh, plans: &[(&Plan, Vec<usize>)]) -> Result<()> {
    let count = mesh.ranks();
    let mut of = vec![None; count];
    for (class, (_, ranks)) in plans.iter().enumerate() {
        for &rank in ranks {
            let free = of.get_mut(rank).filter(|of| of.is_none());
            *free.ok_or_else(|| Error::plan(format!("rank {rank} of '{mesh}' has two plans, or is none of it")))? =
                Some(class);
        }
    }
    let of: Option<Vec<usize>> = of.into_iter().collect();
    let of = of.ok_or_else(|| Error::plan(format!("a rank of '{mesh}' has no plan")))?;
    let programs = plans.first().map_or(0, |(plan, _)| plan.programs.len());
    for (plan, _) in plans {
        ensure(plan.mesh.as_ref() == Some(mesh), || Error::plan(format!("expected a plan for the ranks of '{mesh}'")))?;
        ensure(plan.programs.len() == programs, || Error::plan("the ranks have not the same programs".into()))?;
    }
    for program in 0..programs {
        let meetings =
            plans.iter().map(|(plan, _)| meetings(mesh, &plan.programs[program])).collect::<Result<Vec<_>>>()?;
        walk(mesh, &of, &meetings)?;
    }
    Ok(())
}

/// Judges the collectives of one plan: each names an axis of the plan's mesh, with its ranks, and all are in one stream.
///
/// # Errors
/// The first rule that one breaks.
pub fn one(plan: &Plan) -> Result<()> {
    let none = Mesh::default();
    let mesh = plan.mesh.as_ref().unwrap_or(&none);
    for program in &plan.programs {
        let found = meetings(mesh, program)?;
        if let [first, others @ ..] = &found[..]
            && let Some(other) = others.iter().find(|other| other.step.stream != first.step.stream)
        {
            let (a, b) = (&first.step.name, &other.step.name);
            let what =
                format!("'{a}' and '{b}' are exchanges in two streams, so that ranks may begin them in another order");
            return Err(Error::plan(format!("program '{}': {what}", program.name)));
        }
        for shard in &program.shards {
            mesh.axis(&shard.axis).map_err(|_| {
                Error::plan(format!("'{}' is split over '{}', which is no axis of the mesh", shard.name, shard.axis))
            })?;
        }
    }
    Ok(())
}

/// The collectives of a program, in the order in which a rank begins them.
fn meetings<'a>(mesh: &Mesh, program: &'a Program) -> Result<Vec<Meeting<'a>>> {
    let mut found = Vec::new();
    for step in &program.steps {
        let kernel = &program.kernels[step.kernel];
        let Some(of) = kernel.collective() else { continue };
        let fail = |what: String| Error::plan(format!("step '{}': {of}: {what}", step.name));
        let (axis, known) = mesh.axis(&of.axis).map_err(|_| fail(format!("the mesh '{mesh}' has no such axis")))?;
        ensure(known.ranks == of.ranks, || fail(format!("the mesh has {} ranks there", known.ranks)))?;
        found.push(Meeting { step, kernel, of, axis });
    }
    Ok(found)
}

/// Lets all ranks go on until each is at its end, or none can.
fn walk(mesh: &Mesh, of: &[usize], meetings: &[Vec<Meeting>]) -> Result<()> {
    let mut at = vec![0; of.len()];
    let here = |at: &[usize], rank: usize| meetings[of[rank]].get(at[rank]);
    // Those who wait, by their group: the axis, and its first rank.
    let mut waiting: BTreeMap<(usize, usize), Vec<usize>> = BTreeMap::new();
    let mut ready: Vec<usize> = (0..of.len()).rev().collect();
    while let Some(rank) = ready.pop() {
        let Some(meeting) = here(&at, rank) else { continue };
        let group = mesh.group(rank, meeting.axis);
        let key = (meeting.axis, group[0]);
        let there = waiting.entry(key).or_default();
        if let Some(&other) = there.first() {
            same(rank, meeting, other, here(&at, other).expect("it waits at one"))?;
        }
        there.push(rank);
        if there.len() == group.len() {
            waiting.remove(&key);
            group.iter().for_each(|&rank| at[rank] += 1);
            ready.extend(group);
        }
    }
    let Some((rank, meeting)) = waiting.values().flatten().find_map(|&rank| Some((rank, here(&at, rank)?))) else {
        return Ok(());
    };
    let group = mesh.group(rank, meeting.axis);
    let missing = group.iter().find(|&&other| here(&at, other).is_none_or(|own| own.axis != meeting.axis));
    let missing = missing.map_or("another".into(), |rank| match here(&at, *rank) {
        Some(own) => format!("rank {rank} is at '{}'", own.step.name),
        None => format!("rank {rank} is at its end"),
    });
    Err(Error::plan(format!("rank {rank} waits for ever at '{}', {}: {missing}", meeting.step.name, meeting.of)))
}

/// Checks that two ranks bring the same to a meeting.
fn same(rank: usize, meeting: &Meeting, other: usize, found: &Meeting) -> Result<()> {
    let words = |Meeting { step, kernel, of, .. }: &Meeting| {
        let read = &kernel.reads[0];
        format!("'{}', {of}, {}{}", step.name, read.dtype, read.access.shape)
    };
    let brings = |meeting: &Meeting| {
        let read = &meeting.kernel.reads[0];
        (meeting.of.clone(), read.dtype, read.access.shape.numel())
    };
    ensure(brings(meeting) == brings(found), || {
        Error::plan(format!("rank {rank} begins {}, rank {other} {}", words(meeting), words(found)))
    })
}
