//! Keeps data in the memory of the host: what reads it reads a copy that is made shortly before.
//!
//! ```text
//! weight (host) --Fetch--> forward        (host) --Fetch--> backward
//! mean   (host) --Fetch--> update --> mean (host)
//! ```
//!
//! A copy lives as long as one reader needs it. What is looked up by rows is read where it lies, and an update is written there.

use super::{Context, Recipe};
use crate::error::Result;
use crate::graph::{Graph, Kind};
use crate::op::{Attrs, Fact, NodeId, ValueId};
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

    /// True if a constant that is read lies in the memory of the host.
    fn takes_constant(self, fact: &Fact) -> bool {
        matches!(self, Offload::Weights | Offload::All) && fact.bytes() >= LEAST
    }

    /// True if a state of this name lies in the memory of the host.
    pub fn takes_state(self, name: &str, fact: &Fact) -> bool {
        let level = if is_beside(name) { Offload::States } else { Offload::Weights };
        (self == Offload::All || self == level) && fact.bytes() >= LEAST && !name.starts_with(PLACE)
    }
}

/// True if a constant lies in the memory of the host: all that read it fetch it, or look up rows there.
pub fn is_offloaded(graph: &Graph, constant: ValueId) -> bool {
    let users = graph.users(constant);
    let suits = |&user: &NodeId| graph.node(user).op_name() == FETCH || looks_up(graph, user, constant);
    !users.is_empty() && users.iter().all(suits) && !graph.is_output(constant)
}

/// True if a node reads few of a value's elements: rows that indices name.
fn looks_up(graph: &Graph, node: NodeId, value: ValueId) -> bool {
    let operands = graph.operands(node);
    let is_data = operands.first() == Some(&Some(value)) && !operands[1..].contains(&Some(value));
    is_data && graph.node(node).op_name() == "Gather" && graph.fact(node.output(0)).bytes() < graph.fact(value).bytes()
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
                let is_read = !graph.is_output(value) && !graph.users(value).is_empty();
                is_read && offload.takes_constant(graph.fact(value))
            }
            _ => false,
        };
        if !context.decisions.if_valid("offload", id, takes) {
            continue;
        }
        let readers = graph.users(value);
        for user in readers.into_iter().filter(|&user| !looks_up(graph, user, value)).collect::<Vec<_>>() {
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
