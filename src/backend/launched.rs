//! What launchers tell the processes that they start.

use plimsoll_core::error::{Error, Result, ensure};
use std::env;
use std::fmt;

/// A process that a launcher has started.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launched {
    /// Its rank.
    pub rank: usize,
    /// The number of ranks.
    pub size: usize,
    /// Where rank 0 is to be found, if the launcher is not one of MPI, whose library knows it.
    pub address: Option<Address>,
}

/// Where rank 0 waits for the others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address {
    /// The machine.
    pub host: String,
    /// The port.
    pub port: u16,
    /// True if all ranks are on one machine.
    pub is_here: bool,
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{}:{}", self.host, self.port)
    }
}

/// The rank of this process and the number of ranks, by the variables of its launcher: `mpirun` of MPICH or Open MPI, `torchrun`, `srun`.
///
/// # Errors
/// When two launchers disagree, one tells no number, the rank alone, or none that there is, or nobody tells where rank 0 is.
pub fn launched() -> Result<Option<Launched>> {
    launched_by(&|name| env::var(name).ok())
}

/// As [`launched`], by these variables.
fn launched_by(variable: &dyn Fn(&str) -> Option<String>) -> Result<Option<Launched>> {
    const OF_MPI: [[&str; 2]; 2] = [["PMI_RANK", "PMI_SIZE"], ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"]];
    const TORCHRUN: [&str; 2] = ["RANK", "WORLD_SIZE"];
    // A job's script has SLURM_PROCID and SLURM_NTASKS, too; only steps, which srun starts, have this size.
    const STEP: [&str; 2] = ["SLURM_PROCID", "SLURM_STEP_NUM_TASKS"];
    let told_by = |[rank, size]: [&str; 2]| -> Result<_> {
        let told = number(variable, rank)?.zip(number(variable, size)?);
        ensure(told.is_none_or(|(of, all)| of < all), || {
            let (of, all) = told.unwrap_or_default();
            Error::usage(format!("{rank}={of}, {size}={all}: expected a rank below the number of ranks"))
        })?;
        Ok(told)
    };
    let mut first = None;
    for names in OF_MPI.into_iter().chain([TORCHRUN]) {
        let Some(told) = told_by(names)? else { continue };
        let (by, other) = first.get_or_insert((names, told));
        let words = |[rank, size]: [&str; 2], told: (usize, usize)| format!("{rank}={}, {size}={}", told.0, told.1);
        ensure(*other == told, || {
            Error::usage(format!("two launchers disagree: {}; {}", words(*by, *other), words(names, told)))
        })?;
    }
    // The other launchers may use srun or PMIx to start one helper per node, whose variables their ranks inherit.
    let has_mpi = number(variable, "PMIX_RANK")?.is_some();
    match (first, told_by(STEP)?) {
        (Some((TORCHRUN, (rank, size))), _) => {
            let local = number(variable, "LOCAL_WORLD_SIZE")?;
            ensure(local.is_none_or(|local| local <= size), || {
                let local = local.unwrap_or_default();
                Error::usage(format!(
                    "LOCAL_WORLD_SIZE={local}, WORLD_SIZE={size}: expected no more ranks here than in all"
                ))
            })?;
            let address = of_torchrun(variable, size, local == Some(size))?;
            Ok(Some(Launched { rank, size, address: Some(address) }))
        }
        (None, Some((rank, size))) if !has_mpi => {
            Ok(Some(Launched { rank, size, address: Some(of_step(variable, size)?) }))
        }
        (Some((_, (rank, size))), _) | (None, Some((rank, size))) => Ok(Some(Launched { rank, size, address: None })),
        (None, None) if has_mpi => {
            let what = "PMIX_RANK tells a rank, but nobody tells the number of ranks: start them with mpirun or srun";
            Err(Error::usage(what.into()))
        }
        (None, None) => Ok(None),
    }
}

fn number(variable: &dyn Fn(&str) -> Option<String>, name: &str) -> Result<Option<usize>> {
    let parse = |text: String| {
        text.trim().parse::<usize>().map_err(|_| Error::usage(format!("{name}: expected a number, found '{text}'")))
    };
    variable(name).map(parse).transpose()
}

/// The port that is asked for, or this one.
fn port(variable: &dyn Fn(&str) -> Option<String>, own: usize) -> Result<u16> {
    let asked = number(variable, "PLIMSOLL_PORT")?.unwrap_or(own);
    u16::try_from(asked).ok().filter(|&port| port > 0).ok_or_else(|| {
        Error::usage(format!("port {asked}: expected one from 1 to 65535; PLIMSOLL_PORT names another, on all ranks"))
    })
}

/// Beside the port of torchrun's own store.
fn of_torchrun(variable: &dyn Fn(&str) -> Option<String>, size: usize, is_here: bool) -> Result<Address> {
    let host = variable("MASTER_ADDR").filter(|host| !host.is_empty());
    let host = host.or_else(|| (size == 1).then(|| "localhost".to_owned())).ok_or_else(|| {
        Error::usage(format!("WORLD_SIZE={size}: expected MASTER_ADDR, the machine of rank 0, found none"))
    })?;
    let store = number(variable, "MASTER_PORT")?.unwrap_or(29_500);
    Ok(Address { host, port: port(variable, store + 1)?, is_here })
}

/// On the first machine of the step, at a port that follows from its number.
fn of_step(variable: &dyn Fn(&str) -> Option<String>, size: usize) -> Result<Address> {
    let is_here = number(variable, "SLURM_STEP_NUM_NODES")? == Some(1);
    let nodes = variable("SLURM_STEP_NODELIST").or_else(|| variable("SLURM_NODELIST"));
    let first = if is_here { Some("localhost".to_owned()) } else { nodes.as_deref().map(first_of) };
    let host = variable("MASTER_ADDR").or(first).ok_or_else(|| {
        Error::usage(format!("SLURM_STEP_NUM_TASKS={size}: expected SLURM_STEP_NODELIST, the machines, found none"))
    })?;
    let [job, step] = ["SLURM_JOB_ID", "SLURM_STEP_ID"].map(|name| number(variable, name));
    let own = 10_000 + job?.unwrap_or(0).wrapping_mul(7).wrapping_add(step?.unwrap_or(0)) % 20_000;
    Ok(Address { host, port: port(variable, own)?, is_here })
}

/// The first of Slurm's machines: `node03` of `node[03-05,09],other`.
fn first_of(nodes: &str) -> String {
    match nodes.split_once(['[', ',']) {
        Some((prefix, rest)) if nodes[prefix.len()..].starts_with('[') => {
            let end = rest.find(['-', ',', ']']).unwrap_or(rest.len());
            let behind = rest.split_once(']').map_or("", |(_, behind)| behind);
            let behind = behind.split(',').next().unwrap_or_default();
            format!("{prefix}{}{behind}", &rest[..end])
        }
        Some((first, _)) => first.to_owned(),
        None => nodes.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What variables such as `RANK=1` tell.
    fn told(variables: &str) -> Result<Option<Launched>> {
        launched_by(&|name| {
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
            let expected = expected.map(|(rank, size)| Launched { rank, size, address: None });
            assert_eq!(told(variables).expect(variables), expected, "{variables}");
        }
    }

    /// Where there is no MPI, the launcher says where rank 0 is.
    #[test]
    fn launchers_tell_where_rank_0_is() {
        for (variables, host, port, is_here) in [
            ("RANK=1 WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=400", "127.0.0.1", 401, true),
            ("RANK=1 WORLD_SIZE=4 LOCAL_WORLD_SIZE=2 MASTER_ADDR=a.b", "a.b", 29_501, false),
            ("RANK=0 WORLD_SIZE=1 LOCAL_WORLD_SIZE=1 PLIMSOLL_PORT=7", "localhost", 7, true),
            ("SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NUM_NODES=1 SLURM_JOB_ID=3", "localhost", 10_021, true),
            ("SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NODELIST=n[03-05,09],z", "n03", 10_000, false),
            ("SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NODELIST=a,b SLURM_STEP_ID=2", "a", 10_002, false),
            ("SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NODELIST=a MASTER_ADDR=b", "b", 10_000, false),
        ] {
            let found = told(variables).expect(variables).expect("there is a launcher").address;
            assert_eq!(found, Some(Address { host: host.into(), port, is_here }), "{variables}");
        }
    }

    #[test]
    fn launchers_that_disagree_are_named() {
        for (variables, what) in [
            ("PMI_RANK=1 PMI_SIZE=2 RANK=0 WORLD_SIZE=2", "disagree: PMI_RANK=1, PMI_SIZE=2; RANK=0, WORLD_SIZE=2"),
            ("RANK=one WORLD_SIZE=2", "RANK: expected a number, found 'one'"),
            ("RANK=2 WORLD_SIZE=2", "RANK=2, WORLD_SIZE=2: expected a rank below the number of ranks"),
            ("RANK=0 WORLD_SIZE=2", "WORLD_SIZE=2: expected MASTER_ADDR, the machine of rank 0, found none"),
            ("RANK=0 WORLD_SIZE=2 LOCAL_WORLD_SIZE=3", "LOCAL_WORLD_SIZE=3, WORLD_SIZE=2: expected no more ranks"),
            ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=x", "MASTER_PORT: expected a number, found 'x'"),
            ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=65535", "port 65536: expected one from 1 to 65535"),
            ("SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=2", "SLURM_STEP_NUM_TASKS=2: expected SLURM_STEP_NODELIST"),
            ("PMIX_RANK=0", "PMIX_RANK tells a rank"),
        ] {
            let error = told(variables).expect_err(variables).to_string();
            assert!(error.contains(what), "{error}");
        }
    }
}
