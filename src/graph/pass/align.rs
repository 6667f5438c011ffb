//! Lengthens operands of large products of 16-bit floats to a multiple of eight by zeros, where their rows are no such multiple: a
//! vocabulary of 50,257, say. Tensor cores are fed 16 bytes at a time. Rows that begin anywhere are read element by element, which takes
//! four times as long on an H100.
//!
//! ```text
//! MatMul (a [2048, 50257], b [50257, 768])   =   MatMul (Concat (a, 0) [2048, 50264], Concat (b, 0) [50264, 768])
//! MatMul (a [768, 2048], b [2048, 50257])    =   Slice (MatMul (a, Concat (b, 0) [2048, 50264]))
//! ```
//!
//! What makes an operand writes it in its place in the longer one, so that nothing is copied.

use super::Context;
use crate::constant::Constant;
use crate::error::Result;
use crate::graph::Graph;
use crate::op::{Attrs, NodeId, ValueId};
use crate::shape::Shape;
use crate::target::{Family, Target};
use crate::tensor::Tensor;
use std::collections::HashMap;

/// Elements that are read at once.
const WIDTH: usize = 8;
/// The shortest extent that is lengthened: the zeros are less than a hundredth of it.
const SHORTEST: usize = 1 << 10;

/// Lengthens such operands.
pub fn run(graph: &mut Graph, context: &Context) -> Result<()> {
    if !suits(context.target) {
        return Ok(());
    }
    let mut aligner = Aligner { context, longer: HashMap::new() };
    for id in graph.order()? {
        if graph.node(id).op_name() == "MatMul" && graph.fact(id.output(0)).dtype.is_half() {
            aligner.product(graph, id)?;
        }
    }
    graph.sweep();
    Ok(())
}

fn suits(target: &Target) -> bool {
    target.family == Family::Cuda && target.compute >= 80
}

struct Aligner<'a> {
    context: &'a Context<'a>,
    /// Per value and axis, the longer one.
    longer: HashMap<(ValueId, usize), ValueId>,
}

impl Aligner<'_> {
    /// Lengthens the operands of a product along its inner axis, and along an outer one that lies innermost in memory.
    fn product(&mut self, graph: &mut Graph, id: NodeId) -> Result<()> {
        let &[Some(left), Some(right)] = &graph.operands(id)[..] else { return Ok(()) };
        let [rank, other] = [left, right].map(|value| graph.fact(value).shape.len());
        if rank < 2 || other != 2 {
            return Ok(());
        }
        let (inner, columns) = (graph.fact(right).shape[0], graph.fact(right).shape[1]);
        // An axis counts where the memory of an operand that is computed lies along it.
        let along_inner = [(left, true), (right, false)].iter().any(|&(value, last)| lies_along(graph, value, last));
        let is_longer = [is_odd(inner) && along_inner, is_odd(columns) && lies_along(graph, right, true)];
        let own = is_longer.contains(&true).then_some(0);
        if self.context.decisions.choose("align", id, own, |_| true).is_none() {
            return Ok(());
        }
        let node = graph.node(id).clone();
        graph.insert_at(id);
        let mut operands = [left, right];
        if is_longer[0] {
            operands = [self.lengthen(graph, left, rank - 1)?, self.lengthen(graph, right, 0)?];
        }
        if is_longer[1] {
            operands[1] = self.lengthen(graph, operands[1], 1)?;
        }
        let value = self.context.add(graph, &node.name, "MatMul", &operands.map(Some), node.attrs)?;
        if is_longer[1] {
            self.shorten(graph, id.output(0), value, columns)
        } else {
            graph.replace(id.output(0), value);
            Ok(())
        }
    }

    /// A value with zeros behind it along an axis. A transposed one stays the transposition of what lies in memory.
    fn lengthen(&mut self, graph: &mut Graph, value: ValueId, axis: usize) -> Result<ValueId> {
        if let Some(&longer) = self.longer.get(&(value, axis)) {
            return Ok(longer);
        }
        let name = graph.value_name(value).to_owned();
        let made = match graph.permutation(value.node) {
            None if axis + 1 == graph.fact(value).shape.len() && reshaped(graph, value).is_some() => {
                let source = reshaped(graph, value).expect("it is reshaped");
                let rank = graph.fact(source).shape.len();
                let source = self.lengthen(graph, source, rank - 1)?;
                let mut shape: Vec<i64> = graph.fact(value).shape.iter().map(|&extent| extent as i64).collect();
                shape[axis] = (shape[axis] as usize).next_multiple_of(WIDTH) as i64;
                self.context.add(graph, &name, "Reshape", &[Some(source)], Attrs::new().with("shape", shape))?
            }
            Some(perm) => {
                let source = graph.operands(value.node)[0].expect("a view has a source");
                let source = self.lengthen(graph, source, perm[axis])?;
                let attrs = graph.node(value.node).attrs.clone();
                self.context.add(graph, &name, "Transpose", &[Some(source)], attrs)?
            }
            None => {
                let fact = graph.fact(value).clone();
                let mut zeros = fact.shape.to_vec();
                zeros[axis] = fact.shape[axis].next_multiple_of(WIDTH) - fact.shape[axis];
                let zeros = Shape::new(zeros);
                let zeros = Tensor::from_f64(fact.dtype, zeros.clone(), &vec![0.0; zeros.numel()]);
                let zeros = graph.constant(Constant::new(format!("zeros behind {name}"), zeros));
                let attrs = Attrs::new().with("axis", axis as i64);
                self.context.add(graph, &name, "Concat", &[Some(value), Some(zeros)], attrs)?
            }
        };
        self.longer.insert((value, axis), made);
        Ok(made)
    }

    /// Makes the readers of a product read its columns of a longer product. If its only reader is a transposition, transpose the longer
    /// product instead: the kernel can write that layout.
    fn shorten(&self, graph: &mut Graph, old: ValueId, longer: ValueId, columns: usize) -> Result<()> {
        let (name, rank) = (graph.value_name(old).to_owned(), graph.fact(old).shape.len());
        let (mut old, mut value, mut axis) = (old, longer, rank - 1);
        let users = graph.users(old);
        let alone = users.first().filter(|_| users.len() == 1 && !graph.is_output(old));
        if let Some((user, perm)) = alone.and_then(|&user| Some((user, graph.permutation(user)?))) {
            let attrs = graph.node(user).attrs.clone();
            value = self.context.add(graph, &name, "Transpose", &[Some(longer)], attrs)?;
            axis = perm.iter().position(|&from| from == axis).expect("it is a permutation");
            old = user.output(0);
        }
        let part = self.context.add(graph, &name, "Slice", &[Some(value)], Attrs::span(axis, 0..columns))?;
        graph.replace(old, part);
        Ok(())
    }
}

/// The source of a reshaped value that has the same last axis.
fn reshaped(graph: &Graph, value: ValueId) -> Option<ValueId> {
    let source = graph.operands(value.node).first().copied().flatten()?;
    let last = |value: ValueId| graph.fact(value).shape.last().copied();
    (graph.node(value.node).op_name() == "Reshape" && last(source) == last(value)).then_some(source)
}

fn is_odd(extent: usize) -> bool {
    extent >= SHORTEST && !extent.is_multiple_of(WIDTH)
}

/// True if a value that is computed lies in memory along its last axis, or along the one before.
fn lies_along(graph: &Graph, value: ValueId, last: bool) -> bool {
    let perm = graph.permutation(value.node);
    let source = if perm.is_some() { graph.operands(value.node)[0].expect("a view has a source") } else { value };
    let rank = graph.fact(value).shape.len();
    let innermost =
        perm.map_or(rank - 1, |perm| perm.iter().position(|&from| from == rank - 1).expect("a permutation"));
    let axis = if last { rank - 1 } else { rank - 2 };
    let made =
        std::iter::successors(Some(source), |&value| reshaped(graph, value)).last().expect("it is its own source");
    graph.node(made.node).op().is_some() && !graph.is_view(made.node) && innermost == axis
}
