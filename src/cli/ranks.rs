//! Flags for several devices, and the ranks that a launcher has started.

use crate::backend::launched::{Launched, launched};
use crate::backend::mpi::Mpi;
use crate::backend::ranks::Ranks;
use crate::backend::wire::Wire;
use crate::error::{Error, Result, ensure};
use crate::plan::{Kept, Mesh, Rule, Sharding};
use crate::session;
use clap::Args;
use std::sync::Arc;

/// The variables by which launchers tell how many ranks share a machine.
const ON_ONE_MACHINE: [&str; 3] = ["MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "LOCAL_WORLD_SIZE"];
/// The variables by which launchers tell a rank its number on its machine.
const ON_MACHINE: [&str; 4] = ["MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "LOCAL_RANK", "SLURM_LOCALID"];

/// The flags.
#[derive(Args, Clone, Default)]
pub(super) struct Meshed {
    /// Plan, or run, on several devices: axes of ranks, such as data=2,tensor=4. `data` splits the rows of the inputs, and gradients are summed
    /// over it; `tensor` splits weights; `stage` cuts the graph, one part after another. --shard decides by hand, and for axes of other names.
    /// Each rank is a process that a launcher starts: mpirun -n 8 plimsoll run MODEL --mesh data=2,tensor=4
    #[arg(long, value_name = "AXES", value_parser = mesh)]
    pub(super) mesh: Option<Mesh>,
    /// Split inputs, weights or states along a dim, over an axis of --mesh: 'layers.*.up=1:tensor'. `*` stands for any text; the first that fits
    /// holds. What follows from it is found: parts of products, and what ranks exchange. Of an axis that it names, nothing else is found.
    #[arg(long = "shard", value_name = "NAME=DIM:AXIS", value_parser = Rule::parse)]
    pub(super) shards: Vec<Rule>,
    /// Share the states of a training out between the ranks of an axis `data`: 1, what the optimizer keeps beside the weights; 2, the sums of
    /// gradients, too; 3, the weights, too, which are gathered where they are read (ZeRO, FSDP)
    #[arg(long = "shard-states", value_name = "1|2|3", value_parser = clap::value_parser!(u8).range(1..=3))]
    pub(super) states: Option<u8>,
    /// The ranks that a launcher started; no flag of its own.
    #[arg(skip)]
    pub(super) ranks: Option<Arc<dyn Ranks>>,
}

impl Meshed {
    /// Joins the ranks that a launcher started, for a command that runs on them.
    ///
    /// # Errors
    /// When they are not those of the mesh, one is gone or late, there is a launcher and no mesh, or something is split without a mesh.
    pub(super) fn join(&mut self) -> Result<()> {
        self.sharding()?;
        match (&self.mesh, launched()?) {
            (None, Some(Launched { size, .. })) if size > 1 => {
                let what = format!(
                    "a launcher started {size} processes: expected --mesh, such as --mesh data={size}, found none"
                );
                Err(Error::usage(what))
            }
            (Some(mesh), Some(Launched { rank, size, address })) => {
                ensure(mesh.ranks() == size, || {
                    let ranks = mesh.ranks();
                    Error::usage(format!(
                        "--mesh {mesh}: expected {ranks} processes, found {size}, which the launcher started"
                    ))
                })?;
                self.ranks = Some(match address {
                    Some(address) => Wire::join(mesh, rank, size, &address)?,
                    None => Mpi::join(mesh)?,
                });
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// What is asked of a mesh, if there is one.
    ///
    /// # Errors
    /// When something is split and there is no mesh.
    pub(super) fn sharding(&self) -> Result<Option<Sharding>> {
        if let (None, Some(rule)) = (&self.mesh, self.shards.first()) {
            return Err(Error::usage(format!("--shard '{}': expected --mesh, which has the axes", rule.pattern)));
        }
        if let (None, Some(level)) = (&self.mesh, self.states) {
            return Err(Error::usage(format!("--shard-states {level}: expected --mesh, such as --mesh data=2")));
        }
        Ok(session::asked(self.mesh.as_ref(), &self.shards, self.kept(), self.ranks.as_deref()))
    }

    /// The states that ranks share out.
    pub(super) fn kept(&self) -> Kept {
        Kept::LEVELS[usize::from(self.states.unwrap_or(0))]
    }

    /// Refuses a mesh, for a command that has no use for it.
    pub(super) fn refuse(&self, command: &str) -> Result<()> {
        match &self.mesh {
            Some(mesh) => Err(Error::usage(format!(
                "--mesh {mesh}: {command} is for one device; plan, run, bench, emit and train take a mesh, and fit finds one"
            ))),
            None => self.sharding().map(drop),
        }
    }

    /// True if this process prints and writes files: it is the first rank, or runs alone.
    pub(super) fn is_first(&self) -> bool {
        self.ranks.as_ref().is_none_or(|ranks| ranks.rank() == 0)
    }

    /// Threads of each rank of the CPU: as many as are given, or the machine's, shared by its ranks; 0 for all.
    pub(super) fn threads(&self, given: Option<u16>) -> usize {
        match (given, &self.ranks) {
            (Some(threads), _) => threads.into(),
            (None, None) => 0,
            (None, Some(ranks)) => {
                let here = number(&ON_ONE_MACHINE).unwrap_or(ranks.mesh().ranks()).max(1);
                (std::thread::available_parallelism().map_or(1, usize::from) / here).max(1)
            }
        }
    }

    /// The device of this rank: the one that is given, or, of CUDA's, the one of its number on its machine.
    pub(super) fn device(&self, given: Option<&str>, is_cuda: bool) -> Option<String> {
        let own = self.ranks.as_ref().filter(|_| is_cuda).and_then(|_| number(&ON_MACHINE));
        given.map(str::to_owned).or_else(|| own.map(|number| number.to_string()))
    }
}

/// The number that the first of these variables has that is there.
fn number(variables: &[&str]) -> Option<usize> {
    variables.iter().find_map(|name| std::env::var(name).ok()?.trim().parse().ok())
}

fn mesh(text: &str) -> Result<Mesh, String> {
    Mesh::parse(text).map_err(|error| error.to_string())
}
