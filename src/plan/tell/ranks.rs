//! What a rank of a mesh has of the whole, and what it exchanges with the others.

use crate::{Mesh, Plan, Program, Shard};
use serde::Serialize;

/// What one rank exchanges along an axis of the mesh, in one run of a program.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Traffic {
    /// The program.
    pub program: String,
    /// The axis.
    pub axis: String,
    /// Its ranks.
    pub ranks: usize,
    /// Collectives of a run.
    pub collectives: usize,
    /// Bytes that the rank sends, as rings do it.
    pub sent_bytes: u64,
}

/// The plan of the ranks of a stage.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct StagePart {
    /// The stage.
    pub stage: usize,
    /// The ranks that have the plan.
    pub ranks: usize,
    /// Bytes of the plan.
    pub bytes: u64,
    /// Bytes that a rank sends, in one run of each program.
    pub sent_bytes: u64,
}

/// What the plans of all stages say, each with its ranks.
pub fn stages<'a>(plans: impl IntoIterator<Item = (&'a Plan, usize)>) -> Vec<StagePart> {
    let of = |(plan, ranks): (&Plan, usize)| {
        let traffic = part(plan).map(|part| part.traffic).unwrap_or_default();
        let sent_bytes = traffic.iter().map(|of| of.sent_bytes).sum();
        StagePart { stage: plan.stage, ranks, bytes: plan.bytes(), sent_bytes }
    };
    plans.into_iter().map(of).collect()
}

/// The plan of each rank, as a part of a mesh.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Part {
    /// The number of ranks, which all have this plan: all, or those of its stage.
    pub ranks: usize,
    /// Bytes of these ranks together.
    pub all_bytes: u64,
    /// What is split, in any program.
    pub shards: Vec<Shard>,
    /// Bytes that the rank has of what is split.
    pub split_bytes: u64,
    /// Bytes of constants and states that each of these ranks has whole.
    pub repeated_bytes: u64,
    /// What is exchanged, by program and axis.
    pub traffic: Vec<Traffic>,
}

/// What a plan says of its mesh, if it has one.
pub fn part(plan: &Plan) -> Option<Part> {
    let mesh = plan.mesh.as_ref()?;
    let ranks = mesh.ranks() / mesh.stages();
    let mut shards: Vec<Shard> = Vec::new();
    let (mut split, mut repeated) = (0, 0);
    let mut known: Vec<&str> = Vec::new();
    for program in &plan.programs {
        shards.extend(program.shards.iter().filter(|shard| !shards.contains(shard)).cloned().collect::<Vec<_>>());
        let constants = program.constants.iter().map(|port| (&port.name[..], port.buffer));
        for (name, buffer) in constants.chain(program.state.iter().map(|s| (&s.port.name[..], s.port.buffer))) {
            if known.contains(&name) {
                continue;
            }
            known.push(name);
            let is_split = program.shards.iter().any(|shard| shard.name == name);
            *(if is_split { &mut split } else { &mut repeated }) += program.buffers[buffer].bytes;
        }
    }
    let traffic = plan.programs.iter().flat_map(|program| traffic(mesh, program)).collect();
    let all_bytes = plan.bytes() * ranks as u64;
    Some(Part { ranks, all_bytes, shards, split_bytes: split, repeated_bytes: repeated, traffic })
}

/// What a run of a program exchanges, axis by axis.
fn traffic(mesh: &Mesh, program: &Program) -> Vec<Traffic> {
    let of = |(name, ranks): (&str, usize)| {
        let kernels = program.steps.iter().map(|step| &program.kernels[step.kernel]);
        let own = kernels.filter_map(|kernel| Some((kernel, kernel.collective()?))).filter(|(_, of)| of.axis == name);
        let sent = own.clone().map(|(kernel, of)| {
            let read = &kernel.reads[0];
            of.exchange.sent((read.access.shape.numel() * read.dtype.size()) as u64, of.ranks)
        });
        let (collectives, sent_bytes) = (own.count(), sent.sum());
        Traffic { program: program.name.clone(), axis: name.to_owned(), ranks, collectives, sent_bytes }
    };
    let all = mesh.axes().iter().map(|axis| of((&axis.name, axis.ranks)));
    all.filter(|traffic| traffic.ranks > 1).collect()
}
