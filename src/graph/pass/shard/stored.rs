//! States that ranks share out, though all of them compute with the whole (ZeRO, FSDP).
//!
//! ```text
//! gradient: terms --ReduceScatter--.            .-- part of the state: stays
//! part of the state ---------------'-- update --'-- weight, if every rank has all of it: AllGather
//! part of a weight --AllGather-- forward, and once more backward
//! ```
//!
//! What is computed element by element of such a state, of a gradient for it, and of what every rank has is computed in parts. All others read
//! the whole. So a gathered weight is dead after its last reader in the forward computation, and is gathered anew for the backward computation.

use super::{Split, Spread, Terms, Walk, Way, Whole};
use crate::graph::Graph;
use crate::kernel::Reduction;
use crate::op::{Lower, NodeId, OpDef, ValueId};
use std::collections::HashMap;

/// The values that lead to updates of stored states element by element, each with the dim of its state.
pub(super) fn scattered(graph: &Graph, stored: &HashMap<ValueId, usize>) -> HashMap<ValueId, usize> {
    let mut found = HashMap::new();
    for state in graph.states() {
        let (Some(update), Some(&dim)) = (state.update, stored.get(&state.value)) else { continue };
        let shape = &graph.fact(state.value).shape;
        let mut stack = vec![update];
        while let Some(value) = stack.pop() {
            if graph.fact(value).shape != *shape || found.contains_key(&value) {
                continue;
            }
            found.insert(value, dim);
            if matches!(graph.node(value.node).op().map(|op| op.lower), Some(Lower::Map(_))) {
                stack.extend(graph.operands(value.node).into_iter().flatten());
            }
        }
    }
    found
}

impl Walk<'_> {
    /// The way of a node that has operands split as states are stored: in parts if it goes element by element, or makes a sum of one. Otherwise
    /// it reads the whole.
    pub(super) fn as_stored(
        &self,
        id: NodeId,
        op: &OpDef,
        operands: &[Option<ValueId>],
        spreads: &mut [Spread],
    ) -> Option<Way> {
        let wanted = |value: &ValueId, has: Spread| match has {
            Terms(Reduction::Sum) => self.scattered.get(value).copied(),
            Split(_) => self.stored.get(value).copied(),
            _ => None,
        };
        let dims: Vec<Option<usize>> =
            operands.iter().zip(&*spreads).map(|(value, has)| value.and_then(|value| wanted(&value, *has))).collect();
        let dim = dims.iter().flatten().copied().next()?;
        let others = || spreads.iter().zip(&dims).filter(|(_, dim)| dim.is_none()).map(|(spread, _)| *spread);
        let is_alone = others().all(|has| has == Whole);
        if let (Lower::Map(_), [output], true) = (op.lower, &self.graph.node(id).outputs[..], is_alone) {
            let ranks = self.along.ranks;
            let part = self.graph.with_call(id, |call| call.part(dim, ranks)).flatten();
            let of = |axis: &Option<usize>| axis.map_or(Whole, Split);
            if let Some(part) = part {
                let needs: Vec<Spread> = part.inputs.iter().map(of).collect();
                let fits = needs.iter().zip(&dims).all(|(need, dim)| dim.is_none_or(|dim| *need == Split(dim)));
                if fits && output.fact.shape.get(dim).is_some_and(|extent| extent.is_multiple_of(ranks)) {
                    return Some(Way { needs, gives: Split(dim), part: Some(part) });
                }
            }
        }
        let sums = is_alone && operands.len() == 1 && matches!(op.lower, Lower::Reduce(_));
        for ((spread, dim), value) in spreads.iter_mut().zip(&dims).zip(operands) {
            match dim {
                // A sum of parts is made of its terms.
                Some(dim) if sums => *spread = Split(*dim),
                Some(_) if value.is_some_and(|value| self.stored.contains_key(&value)) => *spread = Whole,
                _ => {}
            }
        }
        None
    }
}
