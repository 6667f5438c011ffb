//! The allowed elements of inputs that are indices. A caller who gives others is told before the run. Kernels, which cannot tell, take the
//! nearest element.

use crate::dtype::DType;
use crate::graph::Graph;
use crate::op::{Call, ValueId};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;

/// The axis that an input's elements look up.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Indexes {
    /// The extent of the axis: elements are from minus the extent to the extent minus 1.
    pub extent: usize,
    /// The node that looks them up.
    pub node: String,
}

/// The inputs whose elements are indices of an axis.
pub(super) fn find(graph: &Graph) -> HashMap<ValueId, Indexes> {
    graph.inputs().iter().filter_map(|&input| Some((input, looked_up(graph, input)?))).collect()
}

/// True if a Cast keeps all values that can be indices. Others wrap around, or become a truth value.
fn keeps_indexes(from: DType, to: DType) -> bool {
    match from {
        DType::I64 | DType::I32 => matches!(to, DType::I64 | DType::I32),
        DType::U8 | DType::I8 => to == from || matches!(to, DType::I64 | DType::I32),
        DType::Bool => to.is_int(),
        _ => false,
    }
}

/// The shortest axis along which a value's elements are looked up, as they are.
fn looked_up(graph: &Graph, input: ValueId) -> Option<Indexes> {
    let mut found: Option<Indexes> = None;
    let mut values = vec![input];
    while let Some(value) = values.pop() {
        for user in graph.users(value) {
            let node = graph.node(user);
            let (Some(op), operands) = (node.op(), graph.operands(user)) else { continue };
            let result = user.output(0);
            let keeps = || graph.fact(result).shape.numel() >= graph.fact(value).shape.numel();
            match op.name {
                "Gather" | "GatherElements" if operands.get(1) == Some(&Some(value)) => {
                    let data = &graph.fact(operands[0].expect("a required input is present")).shape;
                    let call = Call { op, attrs: &node.attrs, inputs: &[] };
                    let Ok(axis) = call.axis("axis", 0, data) else { continue };
                    let extent = data[axis];
                    if found.as_ref().is_none_or(|found| extent < found.extent) {
                        found = Some(Indexes { extent, node: node.name.clone() });
                    }
                }
                "Cast" if keeps_indexes(graph.fact(value).dtype, graph.fact(result).dtype) => values.push(result),
                "Slice" => {}
                _ if graph.is_view(user) && keeps() => values.push(result),
                _ => {}
            }
        }
    }
    found.filter(|found| found.extent > 0)
}
