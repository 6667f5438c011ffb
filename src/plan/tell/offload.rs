//! What lies in the memory of the host, and what comes from there.

use crate::{Memory, Plan, Program};
use serde::Serialize;

/// What a device fetches from the host in a second, in GB, for estimates: what an H200 did over PCI Express 5.
pub const GB_PER_SECOND: f64 = 39.0;

/// The data of a plan that is offloaded.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Offloaded {
    /// Bytes of pinned memory of the host.
    pub bytes: u64,
    /// What each program moves.
    pub programs: Vec<Moved>,
    /// The rate of the estimates.
    pub gb_per_second: f64,
}

/// What a run of a program moves between the host and the device.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Moved {
    /// The program.
    pub program: String,
    /// Bytes that it fetches.
    pub fetched_bytes: u64,
    /// Bytes that it writes back.
    pub written_bytes: u64,
    /// An estimate of the milliseconds that this takes, if nothing else is done meanwhile.
    pub ms: f64,
}

/// What a plan says of its offloaded data, if it has some.
pub fn offloaded(plan: &Plan) -> Option<Offloaded> {
    let bytes = plan.offloaded_bytes();
    let of = |program: &Program| {
        let pinned =
            |buffer: &&crate::BufferIdx| plan.segments[program.buffers[**buffer].segment].memory == Memory::Pinned;
        let bytes = |buffers: &[crate::BufferIdx]| -> u64 {
            buffers.iter().filter(pinned).map(|&buffer| program.buffers[buffer].bytes).sum()
        };
        let fetched_bytes = program.steps.iter().map(|step| bytes(&step.reads)).sum::<u64>();
        let written_bytes = program.steps.iter().map(|step| bytes(&step.writes)).sum::<u64>();
        let ms = (fetched_bytes + written_bytes) as f64 / GB_PER_SECOND / 1e6;
        Moved { program: program.name.clone(), fetched_bytes, written_bytes, ms }
    };
    let programs = plan.programs.iter().map(of).collect();
    (bytes > 0).then_some(Offloaded { bytes, programs, gb_per_second: GB_PER_SECOND })
}
