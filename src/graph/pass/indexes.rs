//! The allowed elements of inputs and states that are indices, or lengths. A caller who gives others is told before the run, and so is one
//! whose states have come to others. Kernels, which cannot tell, look up the nearest element, and write nothing.

use crate::body::inline;
use crate::constant::Constant;
use crate::dtype::DType;
use crate::error::Result;
use crate::graph::{Count, Graph, Kind};
use crate::op::{Call, Lower, NodeId, ValueId};
use crate::ops::{self, Loop};
use crate::shape::Shape;
use serde::{Deserialize, Serialize};
use std::collections::HashMap;

/// The use that a node makes of an index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Use {
    /// It looks up an element.
    LooksUp,
    /// It writes from there on.
    Writes,
    /// It sees so many rows.
    Sees,
}

/// The allowed elements of an input or a state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Indexes {
    /// The least that an element may be.
    pub least: i64,
    /// The most that it may be.
    pub most: i64,
    /// The number of neighbouring elements whose sum it is; 1 for each element by itself.
    pub sum: usize,
    /// The use that the node makes of it.
    pub used: Use,
    /// The node.
    pub node: String,
    /// The extent of the axis.
    pub extent: usize,
}

/// The inputs and states whose elements are indices. No entry of a list implies another.
pub(super) type Found = HashMap<ValueId, Vec<Indexes>>;

/// The most elements of a constant that are added to an index.
const MAX_ADDED: usize = 1 << 16;

/// Finds them, and bounds the states that count among them.
///
/// # Errors
/// When the graph has a cycle.
pub(super) fn find(graph: &mut Graph) -> Result<Found> {
    let mut found = Found::new();
    for id in graph.order()? {
        for (value, indexes) in within(graph, id)? {
            trace(graph, value, indexes, &mut found);
        }
        for (value, indexes) in used(graph, id) {
            let writes = indexes.used == Use::Writes;
            if !trace(graph, value, indexes, &mut found) && writes && writes_state(graph, id) {
                let node = graph.node(id);
                let what = "the graph computes where it writes rows of a state: those beyond its end are left out";
                tracing::warn!("{}", node.error(what));
            }
        }
    }
    for (value, by, most) in counted(graph, &found) {
        graph.bound_count(value, Some(Count { by, most }));
    }
    Ok(found)
}

/// The values that a loop reads, and in whose rows or elements its body looks up or writes.
fn within(graph: &Graph, id: NodeId) -> Result<Vec<(ValueId, Indexes)>> {
    let is_loop = graph.node(id).op().is_some_and(|op| matches!(op.lower, Lower::Repeat));
    let of = graph.with_call(id, |call| Loop::of(call).map(|of| (of.body.clone(), of.carried)).ok()).flatten();
    let Some((body, carried)) = of.filter(|_| is_loop) else { return Ok(Vec::new()) };
    let mut step = Graph::new("step");
    let given: Vec<ValueId> = body.inputs().iter().map(|fact| step.input("given", fact.clone())).collect();
    for (port, value) in inline(&mut step, &body, &graph.node(id).name, &given)?.into_iter().enumerate() {
        step.output(port.to_string(), value);
    }
    let found = find(&mut step)?;
    // What is handed on is another value at each step.
    let read = graph.operands(id).into_iter().flatten().zip(given).skip(carried);
    let all = read.flat_map(|(value, given)| found.get(&given).into_iter().flatten().map(move |i| (value, i.clone())));
    Ok(all.collect())
}

/// The states that are indices and to which each run adds a number: what it adds, and the most that they may be.
fn counted(graph: &Graph, found: &Found) -> Vec<(ValueId, u64, u64)> {
    let bound = |state: &crate::graph::State| {
        let most = found.get(&state.value)?.iter().map(|indexes| indexes.most).min()?;
        let by = added(graph, state.value, state.update?)?;
        Some((state.value, by, u64::try_from(most).ok()?.checked_add(by)?))
    };
    graph.states().iter().filter(|state| state.count.is_none()).filter_map(bound).collect()
}

/// The values by which a node looks up or writes, each with what its elements may be.
fn used(graph: &Graph, id: NodeId) -> Vec<(ValueId, Indexes)> {
    let node = graph.node(id);
    let Some(op) = node.op() else { return Vec::new() };
    let operands = graph.operands(id);
    let operand = |slot: usize| operands.get(slot).copied().flatten();
    let indexes = |least, most, used, extent| Indexes { least, most, sum: 1, used, node: node.name.clone(), extent };
    // Such an index may count from the end.
    let either = |extent: usize, used| indexes(-(extent as i64), extent as i64 - 1, used, extent);
    let one = |call: &Call| -> Option<(ValueId, Indexes)> {
        let axis = |default| Some(call.shape(0)[call.axis("axis", default, call.shape(0)).ok()?]);
        Some(match op.name {
            "Gather" | "GatherElements" => (operand(1)?, either(axis(0)?, Use::LooksUp)),
            "GatherBlockQuantized" => {
                let axis = call.axis("gather_axis", 0, call.shape(0)).ok()?;
                (operand(1)?, either(call.shape(0)[axis], Use::LooksUp))
            }
            "plimsoll.GatherBits" => (operand(0)?, either(usize::try_from(call.int("N", 0).ok()?).ok()?, Use::LooksUp)),
            "ScatterElements" | "Scatter" => (operand(1)?, either(axis(0)?, Use::Writes)),
            "TensorScatter" if call.str("mode", "linear").ok()? == "linear" => {
                let at = call.axis("axis", -2, call.shape(0)).ok()?;
                let rows = call.shape(1).get(at)?;
                let extent = call.shape(0)[at];
                (operand(2)?, indexes(0, extent as i64 - *rows as i64, Use::Writes, extent))
            }
            "GroupQueryAttention" => {
                let (lengths, room) = ops::key_room(call).ok()?;
                (operand(lengths)?, indexes(0, room as i64 - 1, Use::Writes, room))
            }
            "Attention" => {
                let (lengths, keys) = ops::keys_seen(call).ok()?;
                (operand(lengths)?, indexes(0, keys as i64, Use::Sees, keys))
            }
            _ => return None,
        })
    };
    let tuples = match op.name {
        "ScatterND" => Some((0, Use::Writes)),
        "GatherND" => {
            graph.with_call(id, |call| ops::tuples(call).ok()).flatten().map(|(batch, _)| (batch, Use::LooksUp))
        }
        _ => None,
    };
    if let Some((batch, used)) = tuples {
        return columns(graph, &operands, batch).map(|(value, extent)| (value, either(extent, used))).collect();
    }
    let found = graph.with_call(id, one).flatten();
    found.filter(|(_, indexes)| indexes.extent > 0).into_iter().collect()
}

/// The tuples of a ScatterND or a GatherND, column by column: their values, and the extents of the axes, of which the first `batch` have no
/// column. Columns that come as one value, along axes of different extents, are checked for the longest one.
fn columns(graph: &Graph, operands: &[Option<ValueId>], batch: usize) -> impl Iterator<Item = (ValueId, usize)> {
    let (data, tuples) = (operands[0].expect("it is required"), operands[1].expect("it is required"));
    let extents = &graph.fact(data).shape[batch..];
    let id = tuples.node;
    let joins = graph.node(id).op_name() == "Concat"
        && graph.with_call(id, |call| call.axis("axis", 0, call.shape(0)))
            == Some(Ok(graph.fact(tuples).shape.len() - 1));
    let parts = if joins { graph.operands(id).into_iter().flatten().collect() } else { vec![tuples] };
    let mut column = 0;
    let found = parts.into_iter().map(|part| {
        let width = *graph.fact(part).shape.last().unwrap_or(&0);
        column += width;
        (part, extents[column - width..column].iter().copied().max().unwrap_or(0))
    });
    found.filter(|(_, extent)| *extent > 0).collect::<Vec<_>>().into_iter()
}

/// True if a Cast keeps all values that can be indices. Others wrap around, or become a truth value.
fn keeps_indexes(from: DType, to: DType) -> bool {
    match from {
        DType::I64 | DType::I32 => matches!(to, DType::I64 | DType::I32),
        DType::U8 | DType::I8 | DType::U16 | DType::I16 => to == from || matches!(to, DType::I64 | DType::I32),
        DType::U32 => matches!(to, DType::U32 | DType::I64),
        DType::Bool => to.is_int(),
        _ => false,
    }
}

/// Follows a value back to an input, a state or a constant, and notes what the elements there may be. False if it is computed otherwise.
fn trace(graph: &Graph, mut value: ValueId, mut indexes: Indexes, found: &mut Found) -> bool {
    loop {
        let node = graph.node(value.node);
        let op = match node.kind {
            Kind::Constant(_) => return true,
            Kind::State(_) if indexes.used == Use::LooksUp || indexes.sum > 1 => return false,
            // It is the number of rows of what grows.
            Kind::State(_) if graph.states().iter().any(|s| s.value == value && s.count.is_some()) => return true,
            Kind::Input | Kind::State(_) => {
                note(found.entry(value).or_default(), indexes);
                return true;
            }
            Kind::Op(op) => op,
        };
        let operands = graph.operands(value.node);
        let Some(first) = operands.first().copied().flatten() else { return false };
        let (from, to) = (graph.fact(first), graph.fact(value));
        let stays = match op.name {
            "Cast" => keeps_indexes(from.dtype, to.dtype),
            "Slice" => false,
            // Sums are of neighbours.
            _ if graph.is_view(value.node) => {
                let in_order = matches!(op.name, "Identity" | "Reshape" | "Squeeze" | "Unsqueeze" | "Flatten");
                to.shape.numel() >= from.shape.numel() && (indexes.sum == 1 || in_order)
            }
            "Add" | "Sub" if indexes.used != Use::LooksUp && indexes.sum == 1 => {
                let Some((other, [low, high])) = sum(graph, value.node) else { return false };
                let bounds = indexes.least.checked_sub(low).zip(indexes.most.checked_sub(high));
                let Some((least, most)) = bounds else { return false };
                (indexes.least, indexes.most, value) = (least, most, other);
                continue;
            }
            "ReduceSum" if indexes.used != Use::LooksUp && indexes.sum == 1 => {
                let axes = graph.with_call(value.node, |call| call.reduced_axes().ok()).flatten().unwrap_or_default();
                let kept = from.shape.len() - axes.len();
                indexes.sum = from.shape[kept..].iter().product();
                axes.iter().all(|&axis| axis >= kept) && indexes.sum > 0
            }
            _ => false,
        };
        if !stays {
            return false;
        }
        value = first;
    }
}

/// Adds an entry to a list, unless others imply it.
fn note(list: &mut Vec<Indexes>, new: Indexes) {
    let implies = |a: &Indexes, b: &Indexes| a.sum == b.sum && a.least >= b.least && a.most <= b.most;
    if !list.iter().any(|known| implies(known, &new)) {
        list.retain(|known| !implies(&new, known));
        list.push(new);
    }
}

/// Of a sum of a value and a constant, or their difference, the value, and the least and the most that is added to each of its elements.
/// `None` if not all elements get the same.
fn sum(graph: &Graph, id: NodeId) -> Option<(ValueId, [i64; 2])> {
    let operands = graph.operands(id);
    let (left, right) = (operands.first().copied()??, operands.get(1).copied()??);
    let minus = graph.node(id).op_name() == "Sub";
    let (value, constant) = match (graph.as_constant(left), graph.as_constant(right)) {
        (None, Some(constant)) => (left, constant),
        (Some(constant), None) if !minus => (right, constant),
        _ => return None,
    };
    let [low, high] = range(constant)?;
    let meets_all = low == high || spread(&graph.fact(value).shape, &constant.fact.shape);
    let ends = if minus { [high.checked_neg()?, low.checked_neg()?] } else { [low, high] };
    meets_all.then_some((value, ends))
}

/// The least and the largest element of a constant.
fn range(constant: &Constant) -> Option<[i64; 2]> {
    if constant.fact.shape.numel() > MAX_ADDED {
        return None;
    }
    let numbers = constant.value().ok()?.to_i64()?;
    Some([*numbers.iter().min()?, *numbers.iter().max()?])
}

/// True if each element of one shape meets all elements of another, when both broadcast.
fn spread(one: &Shape, other: &Shape) -> bool {
    let mut axes = one.iter().rev().zip(other.iter().rev());
    axes.all(|(&a, &b)| a == 1 || b == 1)
}

/// The number that an update adds to each element of its state, if it is one.
fn added(graph: &Graph, state: ValueId, update: ValueId) -> Option<u64> {
    let (mut value, mut by) = (update, 0i64);
    while value != state {
        let node = graph.node(value.node);
        if matches!(node.op_name(), "Add" | "Sub") {
            let (other, [low, _]) = sum(graph, value.node).filter(|(_, [low, high])| low == high)?;
            (value, by) = (other, by.checked_add(low)?);
            continue;
        }
        let first = graph.operands(value.node).first().copied().flatten()?;
        let (from, to) = (graph.fact(first), graph.fact(value));
        let stays = match node.op_name() {
            "Cast" => keeps_indexes(from.dtype, to.dtype),
            "Slice" => false,
            _ => graph.is_view(value.node),
        };
        if !stays || from.shape.numel() != to.shape.numel() {
            return None;
        }
        value = first;
    }
    u64::try_from(by).ok()
}

/// True if the data that a node writes to are a state whose length nothing else bounds.
fn writes_state(graph: &Graph, id: NodeId) -> bool {
    if graph.states().iter().any(|state| state.count.is_some()) {
        return false;
    }
    let mut node = id;
    loop {
        let slot = if graph.node(node).op_name() == "GroupQueryAttention" { ops::KEYS } else { 0 };
        let Some(data) = graph.operands(node).get(slot).copied().flatten() else { return false };
        match graph.node(data.node).kind {
            Kind::State(_) => return true,
            Kind::Op(op) if graph.is_view(data.node) || op.name.contains("Scatter") => node = data.node,
            _ => return false,
        }
    }
}
