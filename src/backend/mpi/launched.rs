//! What launchers tell the processes that they start.

use plimsoll_core::error::{Error, Result, ensure};
use std::env;

/// The rank of this process and the number of ranks, by the variables of its launcher: `mpirun` of MPICH or Open MPI, `torchrun`, `srun`.
///
/// # Errors
/// When two launchers disagree, one tells no number, or tells the rank alone.
pub fn launched() -> Result<Option<(usize, usize)>> {
    launched_by(|name| env::var(name).ok())
}

/// As [`launched`], by these variables.
fn launched_by(variable: impl Fn(&str) -> Option<String>) -> Result<Option<(usize, usize)>> {
    const LAUNCHERS: [[&str; 2]; 3] =
        [["PMI_RANK", "PMI_SIZE"], ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"], ["RANK", "WORLD_SIZE"]];
    // A job's script has SLURM_PROCID and SLURM_NTASKS, too; only steps, which srun starts, have this size.
    const STEP: [&str; 2] = ["SLURM_PROCID", "SLURM_STEP_NUM_TASKS"];
    let number = |name: &str| {
        let parse = |text: String| {
            text.trim().parse::<usize>().map_err(|_| Error::usage(format!("{name}: expected a number, found '{text}'")))
        };
        variable(name).map(parse).transpose()
    };
    let told_by = |[rank, size]: [&str; 2]| -> Result<_> { Ok(number(rank)?.zip(number(size)?)) };
    let mut first = None;
    for names in LAUNCHERS {
        let Some(told) = told_by(names)? else { continue };
        let (by, other) = first.get_or_insert((names, told));
        let words = |[rank, size]: [&str; 2], told: (usize, usize)| format!("{rank}={}, {size}={}", told.0, told.1);
        ensure(*other == told, || {
            Error::usage(format!("two launchers disagree: {}; {}", words(*by, *other), words(names, told)))
        })?;
    }
    // The other launchers may use srun or PMIx to start one helper per node, whose variables their ranks inherit.
    match first.map(|(_, told)| told).or(told_by(STEP)?) {
        None if number("PMIX_RANK")?.is_some() => {
            let what = "PMIX_RANK tells a rank, but nobody tells the number of ranks: start them with mpirun or srun";
            Err(Error::usage(what.into()))
        }
        told => Ok(told),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What variables such as `RANK=1` tell.
    fn told(variables: &str) -> Result<Option<(usize, usize)>> {
        launched_by(|name| {
            let mut pairs = variables.split(' ').filter_map(|pair| pair.split_once('='));
            pairs.find(|(variable, _)| *variable == name).map(|(_, value)| value.to_owned())
        })
    }

    #[test]
    fn launchers_tell_ranks() {
        for (variables, expected) in [
            ("", None),
            ("RANK=1", None),
            ("SLURM_PROCID=0 SLURM_NTASKS=4", None),
            ("PMI_RANK=1 PMI_SIZE=2", Some((1, 2))),
            ("OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_SIZE=4 PMIX_RANK=2", Some((2, 4))),
            ("RANK=0 WORLD_SIZE=1 PMI_RANK=0 PMI_SIZE=1", Some((0, 1))),
            ("SLURM_PROCID=3 SLURM_STEP_NUM_TASKS=4 PMIX_RANK=3", Some((3, 4))),
            ("SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=1 PMI_RANK=1 PMI_SIZE=2", Some((1, 2))),
        ] {
            assert_eq!(told(variables).expect(variables), expected, "{variables}");
        }
    }

    #[test]
    fn launchers_that_disagree_are_named() {
        for (variables, what) in [
            ("PMI_RANK=1 PMI_SIZE=2 RANK=0 WORLD_SIZE=2", "disagree: PMI_RANK=1, PMI_SIZE=2; RANK=0, WORLD_SIZE=2"),
            ("RANK=one WORLD_SIZE=2", "RANK: expected a number, found 'one'"),
            ("PMIX_RANK=0", "PMIX_RANK tells a rank"),
        ] {
            let error = told(variables).expect_err(variables).to_string();
            assert!(error.contains(what), "{error}");
        }
    }
}
