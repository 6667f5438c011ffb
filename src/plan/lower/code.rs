//! The scalar code of a group: its nodes' expressions as one, and the operands that this reads.

use super::Lowering;
use super::buffer_view::Read;
use super::constant::{counted, literal, seen};
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
    /// True if numbers that count up are computed of the index.
    pub(super) counts: bool,
}

/// A value that a kernel reads so many times is worth a copy in the kernel's order.
const REPEATED: usize = 8;

impl Lowering<'_> {
    /// True if neighbouring invocations of a GPU would read elements of a value far from each other, each many times, such as a table of biases
    /// that lies transposed beside the scores of all images.
    fn gathers(&self, place: &Access, within: &dyn Fn(&Access) -> Option<Access>) -> bool {
        let step = |access: &Access| {
            let axis = (0..access.shape.len()).rev().find(|&axis| access.shape[axis] > 1);
            axis.map_or(0, |axis| access.strides[axis].unsigned_abs())
        };
        let dense = Access::contiguous(place.shape.clone());
        let (Some(own), Some(copied)) = (within(place), within(&dense)) else { return false };
        self.target.launches_cost()
            && step(&own) > 1
            && step(&copied) == 1
            && place.shape.numel().saturating_mul(REPEATED) <= own.shape.numel()
    }

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
                if let Some((constant, own)) = seen(graph, value) {
                    if let Some(literal) = literal(constant)? {
                        args.push(Some(literal));
                        continue;
                    }
                    let own = access(&own.broadcast(&shape), shape.len()).filter(|_| code.counts);
                    if let Some(number) = own.and_then(|own| counted(constant, &own)) {
                        args.push(Some(number));
                        continue;
                    }
                }
                let mut place = self.place(value)?;
                let within = |place: &Access| access(&place.broadcast(&shape), shape.len());
                if self.gathers(&place.access, &within) {
                    place = self.contiguous(value, &place)?;
                    self.places.insert(value, place.clone());
                }
                let own = within(&place.access);
                let own = own.ok_or_else(|| node.error("an operand cannot be read in the kernel's index space"))?;
                let read = (place.buffer, self.operand(place.buffer, own));
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
