//! Keeps data in the memory of the host: what reads it reads a copy that is made shortly before.
//!
//! ```text
//! weight (host) --Fetch--> forward        (host) --Fetch--> backward
//! mean   (host) --Fetch--> update --> mean (host)
//! ```
//!
//! A copy lives as long as one reader needs it. An update is written where the state lies.

use super::{Context, Recipe};
use crate::error::Result;
use crate::graph::{Graph, Kind};
use crate::op::{Attrs, Fact, ValueId};
use crate::ops::FETCH;
use crate::pass::shard::{PLACE, is_beside};
use serde::{Deserialize, Serialize};

/// What lies in the memory of the host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Offload {
    /// Nothing.
    #[default]
    None,
    /// What a training keeps beside its weights: what the optimizer keeps, sums of gradients, averages.
    States,
    /// Weights: large constants, and all states that are not kept beside weights, a decoder's caches among them.
    Weights,
    /// Both.
    All,
}

/// Data of fewer bytes stay on the device.
const LEAST: usize = 64 << 10;

impl Offload {
    /// True if nothing lies in the memory of the host.
    #[allow(clippy::trivially_copy_pass_by_ref)]
    pub fn is_none(&self) -> bool {
        *self == Offload::None
    }

    /// True if a state of this name lies in the memory of the host.
    pub fn takes_state(self, name: &str, fact: &Fact) -> bool {
        let level = if is_beside(name) { Offload::States } else { Offload::Weights };
        (self == Offload::All || self == level) && fact.bytes() >= LEAST && !name.starts_with(PLACE)
    }
}

/// True if a constant lies in the memory of the host: all that read it fetch it.
pub fn is_fetched(graph: &Graph, constant: ValueId) -> bool {
    let users = graph.users(constant);
    !users.is_empty() && users.iter().all(|&user| graph.node(user).op_name() == FETCH) && !graph.is_output(constant)
}

/// Has each reader of what is kept on the host fetch it.
///
/// # Errors
/// When the graph has a cycle.
pub(super) fn run(graph: &mut Graph, context: &Context) -> Result<()> {
    let Recipe { offload, .. } = context.recipe;
    if offload.is_none() {
        return Ok(());
    }
    for id in graph.order()? {
        let value = id.output(0);
        let takes = match &graph.node(id).kind {
            Kind::State(_) => offload.takes_state(graph.value_name(value), graph.fact(value)),
            Kind::Constant(_) => {
                matches!(offload, Offload::Weights | Offload::All) && graph.fact(value).bytes() >= LEAST
            }
            _ => false,
        };
        if !context.decisions.if_valid("offload", id, takes) {
            continue;
        }
        for user in graph.users(value) {
            graph.insert_at(user);
            let name = format!("{}/fetched", graph.value_name(value));
            let fetched = context.add(graph, &name, FETCH, &[Some(value)], Attrs::new())?;
            let read = graph.operands(user).into_iter();
            let read: Vec<_> = read.map(|operand| operand.map(|o| if o == value { fetched } else { o })).collect();
            graph.read(user, &read);
        }
    }
    Ok(())
}
