//! Judges the plans of all ranks of a mesh together: whatever the ranks' pace, each exchange is begun by all of its group, who bring the same, and
//! nobody waits for ever. Only the plans are asked.
//!
//! A rank begins its collectives in the order of its steps, and waits at each for its group. So they end in one way alone, which is walked here.

use crate::dtype::DType;
use crate::error::{Error, Result, ensure};
use crate::kernel::Collective;
use crate::{Mesh, Plan, Program};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;

/// What a rank brings to an exchange.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Meeting {
    /// The name of the step.
    step: String,
    /// The stream of the step.
    stream: u32,
    of: Collective,
    dtype: DType,
    /// Elements that the rank gives, or gets if it gives none.
    count: usize,
}

impl Meeting {
    /// The ranks that meet.
    fn group(&self, mesh: &Mesh, rank: usize) -> Result<Vec<usize>> {
        let (axis, known) = mesh
            .axis(&self.of.axis)
            .map_err(|_| Error::plan(format!("step {self}: the mesh '{mesh}' has no such axis")))?;
        ensure(known.ranks == self.of.ranks, || {
            Error::plan(format!("step {self}: the mesh has {} ranks there", known.ranks))
        })?;
        let group = mesh.group(rank, axis);
        let Some(other) = self.of.exchange.other() else { return Ok(group) };
        let other = group.get(other).copied().filter(|&other| other != rank);
        let other = other.ok_or_else(|| Error::plan(format!("step {self}: rank {rank} has no such other rank")))?;
        Ok(vec![rank.min(other), rank.max(other)])
    }

    /// What another rank brings if this one, which is at `place` to it, meets it.
    fn expects(&self, place: usize) -> Collective {
        Collective { exchange: self.of.exchange.met(place), ..self.of.clone() }
    }
}

impl fmt::Display for Meeting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "'{}', {}, {} of {}", self.step, self.of, self.count, self.dtype)
    }
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
    let all: Vec<_> = plans.iter().map(|(plan, _)| meetings(plan)).collect();
    all_meet(mesh, &of, &all)
}

/// Judges what ranks of a mesh bring, program by program: `of` names each rank's list.
///
/// # Errors
/// As [`ranks`].
pub fn all_meet(mesh: &Mesh, of: &[usize], all: &[Vec<Vec<Meeting>>]) -> Result<()> {
    let programs = all.first().map_or(0, Vec::len);
    ensure(all.iter().all(|own| own.len() == programs), || Error::plan("the ranks have not the same programs".into()))?;
    (0..programs).try_for_each(|program| {
        let own: Vec<&[Meeting]> = all.iter().map(|own| &own[program][..]).collect();
        walk(mesh, of, &own)
    })
}

/// Judges the collectives of one plan: each names an axis of the plan's mesh, with its ranks, and all are in one stream.
///
/// # Errors
/// The first rule that one breaks.
pub fn one(plan: &Plan) -> Result<()> {
    let none = Mesh::default();
    let mesh = plan.mesh.as_ref().unwrap_or(&none);
    for (program, found) in plan.programs.iter().zip(meetings(plan)) {
        let first = mesh.ranks_of(plan.stage).first().copied().unwrap_or(0);
        found.iter().try_for_each(|meeting| meeting.group(mesh, first).map(drop))?;
        if let [first, others @ ..] = &found[..]
            && let Some(other) = others.iter().find(|other| other.stream != first.stream)
        {
            let (a, b) = (&first.step, &other.step);
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

/// The collectives of each program, in the order in which a rank begins them.
pub fn meetings(plan: &Plan) -> Vec<Vec<Meeting>> {
    let of = |program: &Program| {
        let meeting = |step: &crate::Step| {
            let kernel = &program.kernels[step.kernel];
            let of = kernel.collective()?.clone();
            let moved = kernel.moved()?;
            let (dtype, count) = (moved.dtype, moved.access.shape.numel());
            Some(Meeting { step: step.name.clone(), stream: step.stream, of, dtype, count })
        };
        program.steps.iter().filter_map(meeting).collect()
    };
    plan.programs.iter().map(of).collect()
}

/// Lets all ranks go on until each is at its end, or none can.
fn walk(mesh: &Mesh, of: &[usize], meetings: &[&[Meeting]]) -> Result<()> {
    let mut at = vec![0; of.len()];
    let here = |at: &[usize], rank: usize| meetings[of[rank]].get(at[rank]);
    // Those who wait, by who meets: the first and the last of them.
    let mut waiting: BTreeMap<(usize, usize), Vec<usize>> = BTreeMap::new();
    let mut ready: Vec<usize> = (0..of.len()).rev().collect();
    while let Some(rank) = ready.pop() {
        let Some(meeting) = here(&at, rank) else { continue };
        let group = meeting.group(mesh, rank)?;
        let key = (group[0], group[group.len() - 1]);
        let there = waiting.entry(key).or_default();
        if let Some(&other) = there.first() {
            same(mesh, (rank, meeting), (other, here(&at, other).expect("it waits at one")))?;
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
    let group = meeting.group(mesh, rank)?;
    let elsewhere =
        |other: usize| here(&at, other).is_none_or(|own| own.group(mesh, other).ok() != Some(group.clone()));
    let missing = group.iter().copied().find(|&other| elsewhere(other));
    let missing = missing.map_or("another".into(), |rank| match here(&at, rank) {
        Some(own) => format!("rank {rank} is at '{}'", own.step),
        None => format!("rank {rank} is at its end"),
    });
    Err(Error::plan(format!("rank {rank} waits for ever at '{}', {}: {missing}", meeting.step, meeting.of)))
}

/// Checks that two ranks bring to a meeting what belongs together.
fn same(mesh: &Mesh, (rank, meeting): (usize, &Meeting), (other, found): (usize, &Meeting)) -> Result<()> {
    let (axis, _) = mesh.axis(&meeting.of.axis)?;
    let expected = meeting.expects(mesh.place(rank, axis));
    let alike = (&expected, meeting.dtype, meeting.count) == (&found.of, found.dtype, found.count);
    ensure(alike, || Error::plan(format!("rank {rank} begins {meeting}, rank {other} {found}")))
}
