//! Splits tensors that are larger than a binding, and whose rows an index or an inner axis selects. They are read part by part.
//!
//! ```text
//! Gather (table, i)     table [0..n]: g   table [n..2n] at i - n: h       i >= n ? h : g
//! MatMul (x, w)         x [.., 0..k] . w [0..k, ..]   +   x [.., k..] . w [k.., ..]
//! ```
//!
//! Each part is a view that a binding holds. Kernels that can be cut along their results are cut [when they are made](crate::plan::lower),
//! and stay as they are here.

use super::Context;
use crate::dtype::DType;
use crate::error::Result;
use crate::graph::{Decomposer, Graph};
use crate::op::{Attrs, Build, Lower, OpResult, ValueId};
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
            Some("MatMul") => product,
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
        let mut build = Decomposer::new(graph, name);
        let made = parts(&mut build, context.target, &operands, axis).map_err(|what| graph.node(id).error(what))?;
        if let Some(made) = made {
            graph.replace(ValueId { node: id, port: 0 }, made);
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
fn lookup(b: &mut Decomposer, target: &Target, x: &[ValueId], axis: usize) -> OpResult<Option<ValueId>> {
    let b: &mut dyn Build = b;
    let (table, at) = (b.fact(x[0]), b.fact(x[1]));
    let extent = table.shape[axis];
    let outermost = table.shape[..axis].iter().all(|&d| d == 1);
    let Some(most) = rows(target, table.dtype, extent, table.shape[axis + 1..].iter().product()).filter(|_| outermost)
    else {
        return Ok(None);
    };
    let [zero, whole] = [0, extent].map(|n| b.scalar(n as f64, at.dtype));
    let below = b.op("Less", &[x[1], zero], Attrs::new())?;
    let raised = b.op("Add", &[x[1], whole], Attrs::new())?;
    let raised = b.op("Where", &[below, raised, x[1]], Attrs::new())?;
    let at_least = b.op("Max", &[raised, zero], Attrs::new())?;
    // The condition needs the axes of the result that stand behind those of the indices.
    let behind: Vec<i64> = (0..(table.shape.len() - axis - 1) as i64).map(|k| k + at.shape.len() as i64).collect();
    let wide = b.op("Unsqueeze", &[at_least], Attrs::new().with("axes", behind))?;
    let mut found: Option<ValueId> = None;
    for start in (0..extent).step_by(most) {
        let part = b.slice(x[0], axis, start, extent.min(start + most))?;
        let from = b.scalar(start as f64, at.dtype);
        let own = b.op("Sub", &[at_least, from], Attrs::new())?;
        let read = b.op("Gather", &[part, own], Attrs::new().with("axis", axis as i64))?;
        found = Some(match found {
            None => read,
            Some(others) => {
                let here = b.op("GreaterOrEqual", &[wide, from], Attrs::new())?;
                b.op("Where", &[here, read, others], Attrs::new())?
            }
        });
    }
    Ok(found)
}

/// Splits a product whose right operand lies row by row.
fn product(b: &mut Decomposer, target: &Target, x: &[ValueId], _: usize) -> OpResult<Option<ValueId>> {
    let transposed = |view: Option<&str>| view == Some("Transpose");
    let made = b.graph.node(x[1].node).op().filter(|op| matches!(op.lower, Lower::View(_)));
    let viewed = b.graph.as_constant(x[1]).and_then(|constant| constant.view());
    if transposed(made.map(|op| op.name)) || transposed(viewed.map(|(op, ..)| op.name)) {
        return Ok(None);
    }
    let b: &mut dyn Build = b;
    let [left, right] = [x[0], x[1]].map(|v| b.fact(v));
    let (rank, ranks) = (left.shape.len(), right.shape.len());
    if rank < 2 || ranks < 2 || left.dtype != right.dtype {
        return Ok(None);
    }
    let inner = right.shape[ranks - 2];
    let Some(most) = rows(target, right.dtype, inner, right.shape[ranks - 1]) else { return Ok(None) };
    let mut sum: Option<ValueId> = None;
    for start in (0..inner).step_by(most) {
        let end = inner.min(start + most);
        let (rows, columns) = (b.slice(x[1], ranks - 2, start, end)?, b.slice(x[0], rank - 1, start, end)?);
        let part = b.op("MatMul", &[columns, rows], Attrs::new())?;
        sum = Some(match sum {
            None => part,
            Some(others) => b.op("Add", &[part, others], Attrs::new())?,
        });
    }
    Ok(sum)
}
