//! Reports a plan as that of each rank of a mesh, and what of it lies beside the device.

use super::{Table, count, human};
use crate::mesh::STAGE;
use crate::plan::Mesh;
use crate::plan::tell::offload::Offloaded;
use crate::plan::tell::ranks::{Part, StagePart};
use crate::target::Family;

/// What the library that exchanges data takes, which no plan counts.
fn uncounted(family: Family) -> &'static str {
    match family {
        Family::Cuda => "",
        _ => "beside the plan  the memory of MPI itself, which is neither planned nor limited\n",
    }
}

/// The most names that are listed.
const LISTED: usize = 6;

/// What is in the memory of the host, and how long it takes to come from there.
pub fn offloaded(of: &Offloaded) -> String {
    let (bytes, rate) = (human(of.bytes), of.gb_per_second);
    let mut table = Table::new("<>>>");
    table.row(["program", "fetched", "written back", "about"]);
    for moved in &of.programs {
        let [fetched, written] = [moved.fetched_bytes, moved.written_bytes].map(human);
        table.row([moved.program.clone(), fetched, written, format!("{:.2} ms", moved.ms)]);
    }
    format!(
        "\noffloaded  {bytes} in pinned memory of the host, beside the plan; times are estimates, at {rate} GB/s\n\n{table}"
    )
}

/// The plans of stages.
pub fn stages(stages: &[StagePart]) -> String {
    let mut table = Table::new(">>>>");
    table.row(["stage", "ranks", "each", "a rank sends"]);
    for of in stages {
        table.row([of.stage.to_string(), of.ranks.to_string(), human(of.bytes), human(of.sent_bytes)]);
    }
    let all: u64 = stages.iter().map(|of| of.bytes * of.ranks as u64).sum();
    format!("\n{table}all ranks of all stages take {} together\n", human(all))
}

/// What each rank has, and what it sends.
pub fn ranks(mesh: &Mesh, part: &Part, family: Family) -> String {
    let (all, number) = (human(part.all_bytes), count(part.ranks as u64, "rank"));
    let of = if mesh.stages() > 1 { "of its largest stage, " } else { "" };
    let mut text = format!("\nmesh {mesh}: {of}{number} with this plan each, {all} together\n");
    for axis in mesh.axes().iter().filter(|axis| axis.ranks > 1) {
        if axis.name == STAGE {
            text += &format!("cut into {}, each with a plan of its own\n", count(axis.ranks as u64, "stage"));
            continue;
        }
        let own = part.shards.iter().filter(|shard| shard.axis == axis.name);
        let names: Vec<_> = own.map(|shard| format!("{} (dim {})", shard.name, shard.dim)).collect();
        let more = names.len().saturating_sub(LISTED);
        let rest = if more > 0 { format!(" and {more} more") } else { String::new() };
        let listed = names[..names.len().min(LISTED)].join(", ");
        text += &format!("split over {}: {listed}{rest}\n", axis.name);
    }
    if part.split_bytes + part.repeated_bytes > 0 {
        let [split, repeated] = [part.split_bytes, part.repeated_bytes].map(human);
        text +=
            &format!("of constants and states a rank has {split} that are split, and {repeated} that it has whole\n");
    }
    text += uncounted(family);
    if part.traffic.is_empty() {
        return text;
    }
    let mut table = Table::new("<<>>");
    table.row(["program", "axis", "exchanges", "a rank sends"]);
    for of in &part.traffic {
        table.row([of.program.clone(), of.axis.clone(), of.collectives.to_string(), human(of.sent_bytes)]);
    }
    text + "\n" + &table.to_string()
}
