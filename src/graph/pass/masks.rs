//! Masks are conditions where they are read, not tensors: what expands, such as a comparison of a row with a column, is computed for each
//! element of the scores that it hides. A mask that is a band, whether it is computed or stood in the file, is a condition of the index alone.
//!
//! ```text
//! keys [1, n] <= queries [n, 1] --> [n, n] --Where--> scores [b, h, n, n]
//!
//!                     Band <to = 0> [b, h, n, n] --Where--> scores [b, h, n, n]      one kernel
//! ```

use super::Context;
use crate::dtype::DType;
use crate::error::Result;
use crate::graph::{Decomposer, Graph};
use crate::op::{Attrs, Lower, Nodes, OpResult, ValueId, Var, build};
use crate::ops::{AT_RUN, BAND};
use crate::shape::Shape;
use crate::tensor::Tensor;

/// A value is computed where it is read if it has so many times the elements of what it is made of.
const EXPANDS: usize = 8;
/// The fewest bytes of such a value. Its code takes registers, which each thread of a CPU has in memory.
const LARGE: usize = 1 << 16;
/// The most elements of a constant that is looked at.
const MOST_LOOKED_AT: usize = 1 << 28;
/// The most nodes that are computed in another place, and the most values that they read.
const MOST_NODES: usize = 12;
const MOST_READS: usize = 3;

/// Rewrites the operands of elementwise nodes.
pub fn run(graph: &mut Graph, context: &Context) -> Result<()> {
    for id in graph.order()?.into_iter().rev() {
        let Some(op) = graph.node(id).op() else { continue };
        let is_read = graph.is_output(id.output(0)) || !graph.users(id.output(0)).is_empty();
        if !matches!(op.lower, Lower::Map(_)) || !is_read {
            continue;
        }
        let shape = graph.node(id).outputs[0].fact.shape.clone();
        if shape.len() < 2 {
            continue;
        }
        let mut operands = graph.operands(id);
        let mut is_changed = false;
        for operand in &mut operands {
            let Some(value) = *operand else { continue };
            let (moved, is_cheaper) = Moved::of(graph, value, &shape).unwrap_or((Moved::Read(value), false));
            let moves = !matches!(moved, Moved::Read(_));
            if context.decisions.choose("masks", id, is_cheaper.then_some(0), |_| moves).is_none() {
                continue;
            }
            let node = graph.node(id).clone();
            graph.insert_at(id);
            let made = build(Decomposer::new(graph, node.name.clone()), |b| Ok(vec![moved.nodes(b, &shape)?]));
            *operand = Some(made.map_err(|what| node.error(what))?[0]);
            is_changed = true;
        }
        if is_changed {
            graph.read(id, &operands);
        }
    }
    graph.sweep();
    Ok(())
}

/// A value as it is computed where it is read.
enum Moved {
    /// A value that is there.
    Read(ValueId),
    /// True where the column is from `from` to `to` behind the row.
    Band([Option<i64>; 2]),
    /// A band of two numbers of a type: within, and outside.
    Numbers([Option<i64>; 2], DType, [f64; 2]),
    /// A node of these operands.
    Node(&'static str, Attrs, Vec<Option<Moved>>),
}

impl Moved {
    /// The value as a reader of this shape computes it, and whether that is cheaper than to store it.
    fn of(graph: &Graph, value: ValueId, shape: &Shape) -> Option<(Moved, bool)> {
        let own = graph.fact(value).shape.clone();
        let whole = own.len() >= 2 && own[own.len() - 2..] == shape[shape.len() - 2..];
        if !whole || graph.is_output(value) {
            return None;
        }
        // A node of the reader's own shape that nothing else reads is computed there as it is, unless it is a band.
        let alone = own == *shape && graph.users(value).len() == 1;
        let mut chain =
            Chain { graph, square: [own[own.len() - 2], own[own.len() - 1]], nodes: 0, reads: Vec::new(), bands: 0 };
        let moved = chain.moved(value)?;
        let read: usize = chain.reads.iter().map(|&value| graph.fact(source(graph, value)).shape.numel()).sum();
        let expands = read.saturating_mul(EXPANDS) <= own.numel();
        let few = chain.nodes <= MOST_NODES && chain.reads.len() <= MOST_READS;
        let is_cheaper = expands && graph.fact(value).bytes() >= LARGE && (!alone || chain.bands > 0);
        (few && !matches!(moved, Moved::Read(_))).then_some((moved, is_cheaper))
    }

    fn nodes<'g>(&self, b: Nodes<'g>, shape: &Shape) -> OpResult<Var<'g>> {
        let band = |[from, to]: [Option<i64>; 2]| {
            let ends = [("from", from), ("to", to)].into_iter().filter_map(|(name, end)| Some((name, end?)));
            let attrs = ends.fold(Attrs::new(), |attrs, (name, end)| attrs.with(name, end));
            b.scalar(0.0, DType::F32).op(AT_RUN, &[], Attrs::new()).expand(shape).op(BAND, &[], attrs)
        };
        Ok(match self {
            Moved::Read(value) => b.value(*value).expand(shape),
            Moved::Band(ends) => band(*ends),
            Moved::Numbers(ends, dtype, [within, outside]) => {
                let number = |number: f64| b.scalar(number, *dtype);
                band(*ends).op("Where", &[number(*within), number(*outside)], Attrs::new())
            }
            Moved::Node(op, attrs, operands) => {
                let made = operands.iter().map(|operand| operand.as_ref().map(|o| o.nodes(b, shape)).transpose());
                let made: Vec<Option<Var>> = made.collect::<OpResult<_>>()?;
                let Some(Some(first)) = made.first() else { return Err("an elementwise node has operands".into()) };
                let rest: Option<Vec<Var>> = made[1..].iter().copied().collect();
                first.op(op, &rest.ok_or("an operand is missing")?, attrs.clone())
            }
        })
    }
}

/// The value that a repeated one is made of.
fn source(graph: &Graph, mut value: ValueId) -> ValueId {
    while graph.node(value.node).op_name() == "Expand" {
        let Some(from) = graph.operands(value.node)[0] else { return value };
        value = from;
    }
    value
}

/// A walk from a value to what it is made of.
struct Chain<'a> {
    graph: &'a Graph,
    /// The last two extents.
    square: [usize; 2],
    nodes: usize,
    reads: Vec<ValueId>,
    bands: usize,
}

impl Chain<'_> {
    fn moved(&mut self, value: ValueId) -> Option<Moved> {
        let graph = self.graph;
        let (node, fact) = (graph.node(value.node), graph.fact(value));
        let whole = fact.shape.len() >= 2 && fact.shape[fact.shape.len() - 2..] == self.square;
        if !whole || graph.is_output(value) || self.nodes > MOST_NODES {
            return Some(self.read(value));
        }
        if let Some(band) = constant_band(graph, value).or_else(|| compared(graph, value)) {
            self.bands += 1;
            return Some(band);
        }
        let Some(op) = node.op() else { return Some(self.read(value)) };
        if op.name == "Expand" {
            return self.moved(graph.operands(value.node)[0]?);
        }
        // What depends on an index depends on the last two axes alone.
        let is_map = matches!(op.lower, Lower::Map(map) if !super::group::uses_index(graph, value.node, map) || ["Trilu", BAND].contains(&op.name));
        if !is_map || node.outputs.len() != 1 {
            return Some(self.read(value));
        }
        self.nodes += 1;
        let operands = graph.operands(value.node).into_iter().map(|o| o.map(|o| self.moved(o)));
        let operands: Option<Vec<Option<Moved>>> = operands.map(|o| o.map_or(Some(None), |o| o.map(Some))).collect();
        let operands = operands?;
        // Optional operands in between are not written by position.
        operands.iter().all(Option::is_some).then(|| Moved::Node(op.name, node.attrs.clone(), operands))
    }

    fn read(&mut self, value: ValueId) -> Moved {
        if self.graph.fact(value).shape.numel() > 1 && !self.reads.contains(&value) {
            self.reads.push(value);
        }
        Moved::Read(value)
    }
}

/// A constant of two numbers that is a band of a matrix, or of equal matrices. Only elements that are in the model's own file are looked at:
/// a plan is the same where other files are missing.
fn constant_band(graph: &Graph, value: ValueId) -> Option<Moved> {
    let constant = graph.as_constant(value)?;
    let (shape, dtype) = (&constant.fact.shape, constant.fact.dtype);
    let (rank, count) = (shape.len(), shape.numel());
    let is_matrix = rank >= 2 && shape[..rank - 2].iter().all(|&extent| extent == 1);
    if !is_matrix || !(1..=MOST_LOOKED_AT).contains(&count) || !constant.is_at_hand() {
        return None;
    }
    let [rows, columns] = [shape[rank - 2] as i64, shape[rank - 1] as i64];
    let tensor = constant.value().ok()?;
    let (bytes, size): (&[u8], usize) = (tensor.bytes(), dtype.size());
    let element = |i: usize| &bytes[i * size..][..size];
    let first = element(0);
    let other = (1..count).map(element).find(|&other| other != first).unwrap_or(first);
    if (0..count).map(element).any(|found| found != first && found != other) {
        return None;
    }
    // The column, counted from the row.
    let behind = |i: usize| i as i64 % columns - i as i64 / columns;
    let band = |within: &[u8]| {
        let found = || (0..count).filter(|&i| element(i) == within).map(behind);
        let (from, to) = (found().min()?, found().max()?);
        let is_band = (0..count).all(|i| (from..=to).contains(&behind(i)) == (element(i) == within));
        // An end at a corner hides nothing.
        is_band.then_some([(from > 1 - rows).then_some(from), (to < columns - 1).then_some(to)])
    };
    let number = |element: &[u8]| Some(Tensor::new(dtype, [1], element.to_vec()).ok()?.to_f64()[0]);
    let [first, other] = if dtype == DType::Bool && number(first)? == 0.0 { [other, first] } else { [first, other] };
    let (ends, [within, outside]) = match band(first) {
        Some(ends) => (ends, [number(first)?, number(other)?]),
        None => (band(other)?, [number(other)?, number(first)?]),
    };
    let is_exact = dtype.is_float() || within.abs().max(outside.abs()) < 2f64.powi(53);
    is_exact.then_some(match dtype {
        DType::Bool if within != 0.0 => Moved::Band(ends),
        _ => Moved::Numbers(ends, dtype, [within, outside]),
    })
}

/// A comparison of numbers that count up along the columns with such that count up along the rows.
fn compared(graph: &Graph, value: ValueId) -> Option<Moved> {
    let name = graph.node(value.node).op_name();
    let [a, b] = graph.operands(value.node)[..] else { return None };
    let (a, b) = (counted(graph, a?)?, counted(graph, b?)?);
    // column + x against row + y, whichever comes first.
    let ((first, a), (second, b)) = (a, b);
    let (columns_first, by) = match (first, second) {
        (Along::Columns | Along::Either, Along::Rows | Along::Either) => (true, b - a),
        (Along::Rows | Along::Either, Along::Columns | Along::Either) => (false, a - b),
        _ => return None,
    };
    let (below, strict) = match name {
        "Less" => (columns_first, 1),
        "LessOrEqual" => (columns_first, 0),
        "Greater" => (!columns_first, 1),
        "GreaterOrEqual" => (!columns_first, 0),
        _ => return None,
    };
    Some(Moved::Band(if below { [None, Some(by - strict)] } else { [Some(by + strict), None] }))
}

#[derive(PartialEq)]
enum Along {
    Rows,
    Columns,
    Either,
}

/// The first of the numbers that count up by 1 along the last axis, or the one before it, and nothing else.
fn counted(graph: &Graph, value: ValueId) -> Option<(Along, i64)> {
    let constant = graph.as_constant(source(graph, value)).filter(|constant| constant.is_at_hand())?;
    let (shape, rank) = (&constant.fact.shape, constant.fact.shape.len());
    let long: Vec<usize> = (0..rank).filter(|&axis| shape[axis] != 1).collect();
    let axis = match long[..] {
        [axis] => axis,
        // One number is along both.
        [] if rank > 0 => rank,
        _ => return None,
    };
    let values = constant.value().ok()?.to_f64();
    let first = *values.first()?;
    let counts =
        first.fract() == 0.0 && first.abs() < 1e9 && values.iter().zip(0..).all(|(&v, i)| v == first + f64::from(i));
    let along = match rank - axis {
        0 => Along::Either,
        1 => Along::Columns,
        2 => Along::Rows,
        _ => return None,
    };
    counts.then_some((along, first as i64))
}
