//! Splits tensors that are larger than a binding, and whose rows an index or an inner axis selects. They are read part by part.
//!
//! ```text
//! Gather (table, i)     table [0..n]: g   table [n..2n] at i - n: h       i >= n ? h : g
//! MatMul (x, w)         x [.., 0..k] . w [0..k, ..]   +   x [.., k..] . w [k.., ..]
//! ```
//!
//! Each part is a view that a binding holds. Kernels that can be cut along their results are cut when they are made,
//! and stay as they are here.

use super::Context;
use crate::dtype::DType;
use crate::error::Result;
use crate::graph::{Decomposer, Graph};
use crate::op::{OpResult, ValueId, Var, build};
use crate::ops::from_start;
use crate::target::Target;

/// The most parts in which a tensor is read.
const MOST: u64 = 512;

/// Splits the operands that no binding holds.
pub fn run(graph: &mut Graph, context: &Context) -> Result<()> {
    let mut changed = false;
    for id in graph.order()? {
        let node = graph.node(id);
        let parts = match node.op().map(|op| op.name) {
            Some("Gather") => lookup,
            Some("MatMul") if !is_transposed(graph, graph.operands(id)[1].expect("a product has two operands")) => {
                product
            }
            _ => continue,
        };
        let operands: Vec<ValueId> = graph.operands(id).into_iter().flatten().collect();
        let name = node.name.clone();
        let axis = node.attrs.get("axis").map_or(Ok(0), |_| {
            let call = crate::op::Call { op: node.op().expect("it is one"), attrs: &node.attrs, inputs: &[] };
            call.axis("axis", 0, &graph.fact(operands[0]).shape)
        });
        let axis = axis.map_err(|what| node.error(what))?;
        graph.insert_at(id);
        let made = build(Decomposer::new(graph, name), |b| {
            let operands: Vec<_> = operands.iter().map(|&value| b.value(value)).collect();
            Ok(parts(context.target, &operands, axis)?.into_iter().collect())
        });
        if let [made] = made.map_err(|what| graph.node(id).error(what))?[..] {
            graph.replace(id.output(0), made);
            changed = true;
        }
    }
    if changed {
        graph.sweep();
    }
    Ok(())
}

/// The most rows, of `elements` each, that a binding holds wherever they begin. `None` if it holds all of them, if it holds not even one,
/// or if there would be too many parts.
fn rows(target: &Target, dtype: DType, rows: usize, elements: usize) -> Option<usize> {
    let size = target.storage(dtype).ok()?.size() as u64;
    let row = (elements as u64).checked_mul(size).filter(|&bytes| bytes > 0)?;
    let all = row.checked_mul(rows as u64)?;
    // A window starts at a multiple of the alignment.
    let most = target.max_binding.saturating_sub(target.alignment) / row;
    let few = most > 0 && (rows as u64).div_ceil(most) <= MOST;
    (all > target.max_binding && few).then_some(most as usize)
}

/// Splits a Gather along the outermost axis of more than one element.
fn lookup<'g>(target: &Target, x: &[Var<'g>], axis: usize) -> OpResult<Option<Var<'g>>> {
    let (table, at) = (x[0].fact()?, x[1].fact()?);
    let extent = table.shape[axis];
    let outermost = table.shape[..axis].iter().all(|&d| d == 1);
    let Some(most) = rows(target, table.dtype, extent, table.shape[axis + 1..].iter().product()).filter(|_| outermost)
    else {
        return Ok(None);
    };
    let at_least = from_start(x[1], extent).max(0.0);
    // The condition needs the axes of the result that stand behind those of the indices.
    let behind: Vec<i64> = (0..(table.shape.len() - axis - 1) as i64).map(|k| k + at.shape.len() as i64).collect();
    let wide = at_least.unsqueeze(&behind);
    let mut found: Option<Var> = None;
    for start in (0..extent).step_by(most) {
        let part = x[0].part(axis, start..extent.min(start + most));
        let from = at_least.like(start as f64);
        let read = part.gather(at_least - from, axis as i64);
        found = Some(found.map_or(read, |others| wide.greater_or_equal(from).select(read, others)));
    }
    Ok(found)
}

/// Splits a product whose right operand lies row by row.
fn product<'g>(target: &Target, x: &[Var<'g>], _: usize) -> OpResult<Option<Var<'g>>> {
    let (left, right) = (x[0].fact()?, x[1].fact()?);
    let (rank, ranks) = (left.shape.len(), right.shape.len());
    if rank < 2 || ranks < 2 || left.dtype != right.dtype {
        return Ok(None);
    }
    let inner = right.shape[ranks - 2];
    let Some(most) = rows(target, right.dtype, inner, right.shape[ranks - 1]) else { return Ok(None) };
    let part = |start: usize| {
        let range = start..inner.min(start + most);
        let rows = x[1].part(ranks - 2, range.clone());
        x[0].part(rank - 1, range).matmul(rows)
    };
    Ok((0..inner).step_by(most).map(part).reduce(|others, part| others + part))
}

/// True if a value is another one with its axes in another order.
fn is_transposed(graph: &Graph, value: ValueId) -> bool {
    let transposed = |view: Option<&str>| view == Some("Transpose");
    let made = graph.node(value.node).op().filter(|_| graph.is_view(value.node));
    let viewed = graph.as_constant(value).and_then(|constant| constant.view());
    transposed(made.map(|op| op.name)) || transposed(viewed.map(|(op, ..)| op.name))
}
