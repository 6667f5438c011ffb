//! Products whose columns are parted, as those of queries, keys and values are, become products of parts of the weight: each is then split by
//! itself.

use crate::constant::Constant;
use crate::error::Result;
use crate::graph::Graph;
use crate::op::{Attrs, NodeId, ValueId};
use crate::ops;
use std::ops::Range;
use std::sync::Arc;

/// Rewrites all such products of constants.
///
/// # Errors
/// When the graph has a cycle.
pub(super) fn run(graph: &mut Graph) -> Result<()> {
    for id in graph.order()? {
        // What decomposes is written out first: a Gemm is a product and a sum.
        if graph.node(id).op_name() == "Gemm" && graph.operands(id)[1].is_some_and(|w| graph.as_constant(w).is_some()) {
            crate::pass::decompose(graph, id)?;
        }
    }
    graph.sweep();
    for id in graph.order()? {
        if let Some(parted) = Parted::of(graph, id) {
            parted.rewrite(graph)?;
        }
    }
    graph.sweep();
    Ok(())
}

/// A Split of the columns of a product by a constant, which may have a constant added.
struct Parted {
    split: NodeId,
    x: ValueId,
    weight: Arc<Constant>,
    added: Option<(NodeId, Arc<Constant>)>,
    product: NodeId,
    parts: Vec<Range<usize>>,
}

impl Parted {
    fn of(graph: &Graph, split: NodeId) -> Option<Parted> {
        let node = graph.node(split);
        if node.op_name() != "Split" {
            return None;
        }
        let mut value = graph.operands(split)[0]?;
        let last = graph.fact(value).shape.len() - 1;
        let axis = graph.with_call(split, |call| call.axis("axis", 0, call.shape(0)))?.ok()?;
        let mut from = 0;
        let parts = node.outputs.iter().map(|output| {
            from += output.fact.shape[axis];
            from - output.fact.shape[axis]..from
        });
        let parts: Vec<_> = parts.collect();
        let alone = |value: ValueId| graph.users(value).len() == 1 && !graph.is_output(value);
        let mut added = None;
        if graph.node(value.node).op_name() == "Add" && alone(value) {
            let [Some(a), Some(b)] = graph.operands(value.node)[..] else { return None };
            let (sum, term) = if graph.as_constant(a).is_some() { (b, a) } else { (a, b) };
            let columns = graph.fact(value).shape[last];
            let term = graph.as_constant(term).filter(|c| c.fact.shape[..] == [columns])?;
            added = Some((value.node, Arc::clone(term)));
            value = sum;
        }
        let product = value.node;
        let is_product = graph.node(product).op_name() == "MatMul" && alone(value) && axis == last;
        let [Some(x), Some(w)] = graph.operands(product)[..] else { return None };
        let weight = graph.as_constant(w).filter(|c| is_product && c.fact.shape.len() >= 2)?;
        Some(Parted { split, x, weight: Arc::clone(weight), added, product, parts })
    }

    fn rewrite(self, graph: &mut Graph) -> Result<()> {
        let row = |name: &str| ops::find(name).expect("the table has the row");
        for (port, part) in self.parts.iter().enumerate() {
            let name = |graph: &Graph, of: NodeId| format!("{}/{port}", graph.node(of).name);
            graph.insert_at(self.product);
            let weight = graph.constant(columns(&self.weight, part)?);
            let own = name(graph, self.product);
            let mut value = graph.add(row("MatMul"), &own, &[Some(self.x), Some(weight)], Attrs::new(), &[])?.output(0);
            if let Some((sum, term)) = &self.added {
                let term = graph.constant(columns(term, part)?);
                let own = name(graph, *sum);
                value = graph.add(row("Add"), &own, &[Some(value), Some(term)], Attrs::new(), &[])?.output(0);
            }
            graph.replace(self.split.output(port), value);
        }
        Ok(())
    }
}

/// Some columns of a constant.
fn columns(constant: &Arc<Constant>, part: &Range<usize>) -> Result<Constant> {
    let mut fact = constant.fact.clone();
    let last = fact.shape.len() - 1;
    fact.shape[last] = part.len();
    let (op, attrs) = (ops::find("Slice").expect("the table has the row"), Attrs::span(last, part.clone()));
    let name = format!("{}[{}..{}]", constant.name, part.start, part.end);
    Constant::derived(name, op, attrs, vec![Some(Arc::clone(constant))], 0, fact)
}
