//! Keeps in 16 bits what the backward computation reads of the forward one, on devices that compute halves in `f32`.
//!
//! ```text
//! x --> y --> ..         x --> y --> ..
//!       |                      |
//!       |            =         `--> Cast to 16 bits, which is kept
//!       |                            |
//!       '--> gradient                '--> Cast to f32 --> gradient
//! ```
//!
//! The forward computation stays that of `f32`, and so does the loss. Gradients are computed in `f32` of what was kept. Lowering (`is_kept`) holds
//! the results of these casts in 16 bits.

use super::precision::{cast, is_wide};
use crate::dtype::DType;
use crate::error::Result;
use crate::graph::{Graph, Kind};
use crate::op::{NodeId, ValueId};
use std::collections::{HashMap, HashSet};

/// Values of fewer elements are kept as they are: statistics of rows, and sums.
const FEW: usize = 1 << 10;

/// Makes the backward computation read copies of forward values, in 16 bits. What the loss makes of `judged` is kept as it is.
///
/// # Errors
/// When the graph has a cycle.
pub(super) fn narrow(graph: &mut Graph, to: DType, judged: ValueId) -> Result<()> {
    let order = graph.order()?;
    let mut kept = Kept { to, exact: exact(graph, &order, judged), halves: HashMap::new() };
    for &id in order.iter().filter(|&&id| graph.is_backward(id)).collect::<Vec<_>>() {
        let operands = graph.operands(id);
        let mut read = Vec::with_capacity(operands.len());
        for &operand in &operands {
            read.push(operand.map(|value| kept.read(graph, value, id)).transpose()?);
        }
        if read != operands {
            graph.read(id, &read);
        }
    }
    Ok(())
}

/// The values that are kept as they are: inputs and states, which are there anyway; what follows from constants alone; what follows from
/// `judged`.
fn exact(graph: &Graph, order: &[NodeId], judged: ValueId) -> HashSet<ValueId> {
    let (mut given, mut fixed, mut of_loss) = (HashSet::new(), HashSet::new(), HashSet::from([judged]));
    for &id in order {
        let operands: Vec<_> = graph.operands(id).into_iter().flatten().collect();
        let results = (0..graph.node(id).outputs.len() as u32).map(|port| ValueId { node: id, port });
        match graph.node(id).kind {
            Kind::Constant(_) => fixed.extend(results),
            Kind::Input | Kind::State(_) => given.extend(results),
            Kind::Op(_) if operands.iter().all(|value| fixed.contains(value)) => fixed.extend(results),
            Kind::Op(_) if operands.iter().any(|value| of_loss.contains(value)) => of_loss.extend(results),
            Kind::Op(_) => {}
        }
    }
    given.into_iter().chain(fixed).chain(of_loss).collect()
}

/// True if the values of an operator are elements of its first operand.
fn selects(op: &str) -> bool {
    matches!(
        op.trim_start_matches("plimsoll."),
        "MaxPool" | "GlobalMaxPool" | "ReduceMax" | "ReduceMin" | "Max" | "Min"
    )
}

struct Kept {
    to: DType,
    exact: HashSet<ValueId>,
    halves: HashMap<ValueId, ValueId>,
}

impl Kept {
    /// True if a forward value is kept in 16 bits. A value that selects elements is where they are: gradients look for it among them.
    fn rounds(&self, graph: &Graph, value: ValueId) -> bool {
        let is_float = graph.fact(value).dtype == DType::F32;
        if !is_float || self.exact.contains(&value) || graph.is_backward(value.node) {
            return false;
        }
        let name = graph.node(value.node).op_name();
        let source = || graph.operands(value.node)[0].expect("it has data");
        match () {
            // A view has the bytes of its source.
            () if graph.is_view(value.node) || selects(name) => self.rounds(graph, source()),
            // Exponentials and their like leave the range of f16.
            () if self.to == DType::F16 && is_wide(name) => false,
            () => graph.fact(value).shape.numel() >= FEW,
        }
    }

    /// What a node of the backward computation reads in a value's place.
    fn read(&mut self, graph: &mut Graph, value: ValueId, reader: NodeId) -> Result<ValueId> {
        if !self.rounds(graph, value) {
            return Ok(value);
        }
        if graph.is_view(value.node) {
            let mut operands = graph.operands(value.node);
            let source = operands[0].expect("a view has a source");
            operands[0] = Some(self.read(graph, source, reader)?);
            return Ok(graph.copy(value.node, &operands, reader).output(value.port as usize));
        }
        let half = match self.halves.get(&value) {
            Some(&half) => half,
            None => {
                graph.insert_at(value.node);
                let half = cast(graph, value, self.to)?;
                self.halves.insert(value, half);
                half
            }
        };
        graph.insert_at(reader);
        cast(graph, half, DType::F32)
    }
}
