//! Sessions of several ranks: what they agree on before they run, and which rows of an input are one's own.

use crate::backend::ranks::Ranks;
use crate::error::{Error, Result, ensure};
use crate::exec::spread::Spread;
use crate::file::fnv;
use crate::plan::{Mesh, Plan, Program};
use crate::tensor::Tensor;
use std::sync::Arc;

/// The version of the library, which all ranks have.
const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Checks that all ranks have the same plan, before any of them runs.
///
/// # Errors
/// On every rank, when one has another version, mesh or plan, or none.
pub(crate) fn agree(plan: &Plan, ranks: &dyn Ranks) -> Result<()> {
    let text = format!("{VERSION} {:032x} {}", fnv(plan.to_json().as_bytes()), plan.title());
    let all = ranks.gather(text.as_bytes())?;
    let other = all.iter().position(|other| other[..] != *text.as_bytes());
    let Some(other) = other else { return Ok(()) };
    let [mine, others] = [text.as_bytes(), &all[other]].map(|text| String::from_utf8_lossy(text).into_owned());
    let words = |text: &str| {
        let mut parts = text.splitn(3, ' ').map(str::to_owned);
        let mut next = || parts.next().unwrap_or_default();
        format!("version {}, plan {} of '{}'", next(), next(), next())
    };
    Err(Error::usage(format!(
        "the ranks have not the same plan: rank {} has {}, rank {other} has {}; give all the same model, flags and device",
        ranks.rank(),
        words(&mine),
        words(&others)
    )))
}

/// Checks that all ranks have loaded the plan.
///
/// # Errors
/// On every rank, when one could not: which, and why.
pub(crate) fn all_well(error: Option<&Error>, ranks: &dyn Ranks) -> Result<()> {
    let text = error.map_or_else(String::new, |error| format!("rank {}: {error}", ranks.rank()));
    let all = ranks.gather(text.as_bytes())?;
    match all.iter().find(|text| !text.is_empty()) {
        Some(text) => Err(Error::usage(String::from_utf8_lossy(text).into_owned())),
        None => Ok(()),
    }
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

/// The rank that runs a job of a mesh.
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
