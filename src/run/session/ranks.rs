//! Sessions of several ranks: what they agree on before they run, and which rows of an input are one's own.

use crate::backend::ranks::Ranks;
use crate::error::{Error, Result, ensure};
use crate::exec::spread::{Spread, tell_all};
use crate::file::fnv;
use crate::plan::check::ranks::{Meeting, all_meet, meetings};
use crate::plan::{Mesh, Plan, Program};
use crate::tensor::Tensor;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// The version of the library, which all ranks have.
const VERSION: &str = env!("CARGO_PKG_VERSION");

/// What a rank tells the others of its plan.
#[derive(Serialize, Deserialize)]
struct Card {
    version: String,
    stage: usize,
    plan: String,
    title: String,
    meetings: Vec<Vec<Meeting>>,
}

/// Checks, before any of them runs, that all ranks of a stage have the same plan, and that those of all stages go on together.
///
/// # Errors
/// On every rank, when one has another version, mesh or plan, or none.
pub(crate) fn agree(plan: &Plan, ranks: &dyn Ranks) -> Result<()> {
    let several = plan.mesh.as_ref().is_some_and(|mesh| mesh.stages() > 1);
    let own = Card {
        version: VERSION.into(),
        stage: plan.stage,
        plan: format!("{:032x}", fnv(plan.to_json().as_bytes())),
        title: plan.title(),
        meetings: if several { meetings(plan) } else { Vec::new() },
    };
    let all = tell_all(ranks, &own)?;
    // The same two ranks are named on every rank.
    let first = |card: &Card| all.iter().position(|other| other.stage == card.stage).expect("a card is of its stage");
    let differs = |card: &Card| {
        let one = &all[first(card)];
        card.version != all[0].version || (&card.plan, &card.title) != (&one.plan, &one.title)
    };
    if let Some(other) = all.iter().position(differs) {
        let of = if all[other].version == all[0].version { first(&all[other]) } else { 0 };
        let words = |card: &Card| format!("version {}, plan {} of '{}'", card.version, card.plan, card.title);
        return Err(Error::usage(format!(
            "the ranks have not the same plan: rank {of} has {}, rank {other} has {}; give all the same model, flags and device",
            words(&all[of]),
            words(&all[other])
        )));
    }
    if !several {
        return Ok(());
    }
    let of: Vec<usize> = (0..all.len()).collect();
    all_meet(ranks.mesh(), &of, &all.into_iter().map(|card| card.meetings).collect::<Vec<_>>())
}

/// Why a rank cannot go on.
#[derive(Serialize, Deserialize)]
struct Trouble {
    what: String,
    /// What was needed and what there is, if memory does not suffice.
    fit: Option<[u64; 2]>,
}

/// Checks that all ranks go on.
///
/// # Errors
/// On every rank, when one cannot: which, and why. On that rank, its own.
pub(crate) fn all_well(error: Option<&Error>, ranks: &dyn Ranks) -> Result<()> {
    let own = error.map(|error| match error {
        Error::Fit { what, needed, limit, .. } => Trouble { what: what.clone(), fit: Some([*needed, *limit]) },
        error => Trouble { what: error.to_string(), fit: None },
    });
    for (rank, trouble) in tell_all(ranks, &own)?.into_iter().enumerate() {
        let Some(Trouble { what, fit }) = trouble.filter(|_| error.is_none()) else { continue };
        let what = format!("rank {rank}: {what}");
        return Err(match fit {
            Some([needed, limit]) => Error::Fit { what, needed, limit, file: None },
            None => Error::usage(what),
        });
    }
    Ok(())
}

/// The part of an input that is a rank's own. An input that has the shape of a part is one.
///
/// # Errors
/// When it is neither the whole nor a part.
pub(crate) fn own(plan: &Program, ranks: &Arc<dyn Ranks>, input: usize, tensor: Tensor) -> Result<Tensor> {
    let port = &plan.inputs[input];
    let Some(spread) = Spread::of(&port.name, &plan.shards, ranks) else { return Ok(tensor) };
    if *tensor.shape() == port.shape {
        return Ok(tensor);
    }
    let (whole, found) = (spread.whole(&port.shape), tensor.shape());
    ensure(*found == whole, || {
        let what = format!("expected {whole}, or {}, which is a rank's part, found {found}", port.shape);
        Error::usage(format!("input '{}': {what}", port.name))
    })?;
    Ok(spread.own(&tensor))
}

/// Checks that this process is one of the ranks of a job's mesh.
///
/// # Errors
/// When there are no ranks, or those of another mesh.
pub(crate) fn expect(mesh: &Mesh, ranks: Option<&Arc<dyn Ranks>>) -> Result<()> {
    if mesh.ranks() == 1 && ranks.is_none() {
        return Ok(());
    }
    let Some(ranks) = ranks else {
        let count = mesh.ranks();
        return Err(Error::usage(format!(
            "mesh '{mesh}': expected {count} processes, found one that runs alone; start {count} with a launcher, such as mpirun -n {count}"
        )));
    };
    ensure(ranks.mesh() == mesh, || {
        Error::usage(format!("mesh '{mesh}': expected its ranks, found those of '{}'", ranks.mesh()))
    })
}
