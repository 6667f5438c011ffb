//! The scalar code of a group: its nodes' expressions as one, and the operands that this reads.

use super::Lowering;
use super::buffer_view::Read;
use super::constant::literal;
use crate::error::Result;
use crate::expr::{Body, Expr};
use crate::kernel::RowReduction;
use crate::op::{Args, Call, Lower, NodeId, ValueId};
use crate::shape::Access;
use std::collections::HashMap;

/// The parts of a group's expressions so far.
#[derive(Default)]
pub(super) struct Code {
    pub(super) values: HashMap<ValueId, Expr>,
    pub(super) reads: Vec<Read>,
    pub(super) reductions: Vec<RowReduction>,
    /// The number of the first operand. A core value comes before it.
    pub(super) first: usize,
}

impl Lowering<'_> {
    /// The expression of a group's last node. `access` turns a value's access into the kernel's index space, given the
    /// rank of the value that the elementwise node reading it produces.
    pub(super) fn compute(
        &mut self,
        nodes: &[NodeId],
        code: &mut Code,
        access: &dyn Fn(&Access, usize) -> Option<Access>,
    ) -> Result<Expr> {
        let graph = self.graph;
        for &id in nodes {
            let node = graph.node(id);
            let op = node.op().expect("only operators are grouped");
            if matches!(op.lower, Lower::Template(_)) {
                continue;
            }
            let operands = graph.operands(id);
            // Elementwise operands are broadcast to the node's own shape before the kernel's space is considered.
            let shape = match op.lower {
                Lower::Reduce(_) => graph.fact(operands[0].expect("a reduction reads one value")).shape.clone(),
                _ => node.outputs[0].fact.shape.clone(),
            };
            let mut args = Vec::with_capacity(operands.len());
            for &value in &operands {
                let Some(value) = value else {
                    args.push(None);
                    continue;
                };
                if let Some(expr) = code.values.get(&value) {
                    args.push(Some(expr.clone()));
                    continue;
                }
                if let Some(literal) = literal(graph, value)? {
                    args.push(Some(literal));
                    continue;
                }
                let place = self.place(value)?;
                let seen = access(&place.access.broadcast(&shape), shape.len());
                let seen = seen.ok_or_else(|| node.error("an operand cannot be read in the kernel's index space"))?;
                let read = (place.buffer, self.operand(place.buffer, seen));
                let number = code.reads.iter().position(|r| *r == read).unwrap_or_else(|| {
                    code.reads.push(read);
                    code.reads.len() - 1
                });
                args.push(Some(Expr::input(code.first + number, graph.fact(value).dtype.held())));
            }
            let facts: Vec<_> = operands.iter().map(|v| v.map(|v| graph.fact(v))).collect();
            let call = Call { op, attrs: &node.attrs, inputs: &facts };
            let result = match op.lower {
                Lower::Map(map) => map(&Args(&args), &call),
                Lower::Reduce(reduction) => {
                    let input = args[0].take().expect("a reduction reads one value");
                    // Small integers wrap around once all are reduced.
                    let dtype = input.dtype();
                    let wide = dtype.wide();
                    code.reductions.push(RowReduction { reduction, body: Body::new(&[input.cast(wide)]) });
                    Expr::reduction(code.reductions.len() - 1, wide).cast(dtype)
                }
                _ => return Err(node.error("cannot be part of a kernel")),
            };
            code.values.insert(id.output(0), result);
        }
        let sink = ValueId { node: *nodes.last().expect("a group has nodes"), port: 0 };
        Ok(code.values[&sink].clone())
    }
}
