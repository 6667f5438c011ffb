//! Kernels of reductions over the same rows, and of what is computed of their elements and results.

use super::Lowering;
use super::code::Code;
use super::outline::Outline;
use crate::error::Result;
use crate::expr::Body;
use crate::graph::Graph;
use crate::kernel::Template;
use crate::op::NodeId;
use crate::pass::Group;
use crate::shape::Shape;

/// The index space of a row kernel.
struct Row {
    /// The shape that is reduced.
    full: Shape,
    /// The same shape with reduced axes of extent 1.
    kept: Shape,
    /// Outer axes, then reduced ones.
    axes: Vec<usize>,
    /// The number of reduced axes.
    inner: usize,
}

impl Lowering<'_> {
    /// Makes one kernel of reductions of the same rows, and of what is computed of their elements and results.
    pub(super) fn rows(&mut self, Group { nodes, sink, .. }: &Group, reduction: NodeId) -> Result<()> {
        let mut code = Code { counts: true, ..Code::default() };
        let value = (*sink).output(0);
        let shape = self.graph.fact(value).shape.clone();
        let row = Row::of(self.graph, reduction);
        let result = self.compute(nodes, &mut code, &|access, rank| {
            let kept = if rank == row.full.len() { access.shape.clone() } else { row.kept.clone() };
            Some(access.reshape(&kept)?.broadcast(&row.full).permute(&row.axes))
        })?;
        let per_row = shape.numel() == row.kept.numel() && (shape != row.full || row.full == row.kept);
        let space: Shape = row.axes.iter().map(|&a| row.full[a]).collect();
        let template = Template::Row { inner: row.inner, reductions: code.reductions, per_row };
        let outline = Outline::new(template, space, Body::new(&[result]));
        self.write(*sink, outline, code.reads, |access| {
            if !per_row {
                return Some(access.permute(&row.axes));
            }
            let mut access = access.reshape(&row.kept)?.permute(&row.axes);
            access.shape.truncate(row.axes.len() - row.inner);
            access.strides.truncate(row.axes.len() - row.inner);
            Some(access)
        })
    }
}

impl Row {
    /// The index space of a reduction.
    fn of(graph: &Graph, reduction: NodeId) -> Row {
        let input = graph.operands(reduction)[0].expect("a reduction reads one value");
        let full = graph.fact(input).shape.clone();
        let inner = graph
            .with_call(reduction, |call| call.reduced_axes())
            .expect("a reduction")
            .expect("the axes were inferred");
        let kept = (0..full.len()).map(|k| if inner.contains(&k) { 1 } else { full[k] }).collect();
        let mut axes: Vec<usize> = (0..full.len()).filter(|k| !inner.contains(k)).collect();
        axes.extend(&inner);
        Row { full, kept, axes, inner: inner.len() }
    }
}
