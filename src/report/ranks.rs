//! Reports a plan as that of each rank of a mesh.

use super::{Table, count, human};
use crate::mesh::STAGE;
use crate::plan::Mesh;
use crate::plan::tell::ranks::{Part, StagePart};
use crate::target::Family;

/// What the library that exchanges data takes, which no plan counts.
fn uncounted(family: Family) -> &'static str {
    match family {
        Family::Cuda => "",
        _ => "beside the plan  what MPI takes of each process: no limit holds it\n",
    }
}

/// The most names that are listed.
const LISTED: usize = 6;

/// The plans of stages.
pub fn stages(stages: &[StagePart]) -> String {
    let mut table = Table::new(">>>>");
    table.row(["stage", "ranks", "each", "a rank sends"]);
    for of in stages {
        table.row([of.stage.to_string(), of.ranks.to_string(), human(of.bytes), human(of.sent_bytes)]);
    }
    format!("\n{table}")
}

/// What each rank has, and what it sends.
pub fn ranks(mesh: &Mesh, part: &Part, family: Family) -> String {
    let (all, number) = (human(part.all_bytes), count(part.ranks as u64, "rank"));
    let mut text = format!("\nmesh {mesh}: {number} with this plan each, {all} together\n");
    for axis in mesh.axes().iter().filter(|axis| axis.ranks > 1) {
        if axis.name == STAGE {
            text += &format!("cut into {}: the table of stages\n", count(axis.ranks as u64, "stage"));
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
            &format!("of constants and states a rank has {split} that are split, and {repeated} that all ranks have\n");
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
