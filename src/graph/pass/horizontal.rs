//! Elementwise code on parts of one value that lie side by side is computed on these together, as rotary embeddings on queries and keys
//! that one product makes: each kernel alone leaves much of a GPU idle, and costs a launch.
//!
//! ```text
//! x -+- Slice 0..16  - f - MatMul          x - Slice 0..24 - f -+- Slice 0..16  - MatMul
//!    `- Slice 16..24 - f ----'                                  `- Slice 16..24 ----'
//! ```

use super::Context;
use super::merge::together;
use crate::error::Result;
use crate::graph::Graph;
use crate::op::{Attrs, Call, Fact, Lower, NodeId, ValueId};
use crate::shape::{Access, gcd};
use crate::target::Target;
use std::collections::{HashMap, HashSet};
use std::ops::Range;

/// The most parts that are computed together. More parts are the steps of a sequence, each of which needs the one before.
const MOST: usize = 8;
/// The number of nodes, about, over which code is followed.
const LONGEST: usize = 64;

/// Computes such parts together.
pub fn run(graph: &mut Graph, context: &Context) -> Result<()> {
    if !context.target.launches_cost() {
        return Ok(());
    }
    let order = graph.order()?;
    let slices: Vec<NodeId> = order.into_iter().filter(|&id| graph.node(id).op_name() == "Slice").collect();
    let mut pieces: HashMap<(ValueId, usize, usize), Piece> = HashMap::new();
    for piece in slices.iter().filter_map(|&id| Piece::of(graph, id)) {
        pieces.entry((piece.source, piece.axis, piece.span.start)).or_insert(piece);
    }
    let mut done: HashSet<ValueId> = HashSet::new();
    for id in slices {
        let row: Vec<Piece> = Piece::of(graph, id).map_or(Vec::new(), |first| {
            let next = |piece: &Piece| pieces.get(&(piece.source, piece.axis, piece.span.end)).cloned();
            std::iter::successors(Some(first), next)
                .take_while(|piece| !done.contains(&piece.value))
                .take(MOST)
                .collect()
        });
        let twins = |count: u32| row.get(..count as usize).and_then(|row| Twins::of(graph, row));
        let cheaper = |&count: &u32| twins(count).is_some_and(|twins| twins.is_cheaper(graph, context.target));
        let own = (2..=row.len() as u32).rev().find(cheaper);
        let taken = context.decisions.choose("together", id, own, |count| twins(count).is_some());
        if let Some(twins) = taken.and_then(twins) {
            done.extend(&twins.parts);
            twins.compute(graph, context)?;
        }
    }
    graph.sweep();
    Ok(())
}

/// A part of a value along one axis.
#[derive(Clone)]
struct Piece {
    source: ValueId,
    axis: usize,
    span: Range<usize>,
    value: ValueId,
}

impl Piece {
    fn of(graph: &Graph, id: NodeId) -> Option<Piece> {
        let node = graph.node(id);
        let op = node.op().filter(|op| op.name == "Slice")?;
        let (Lower::View(view), source) = (op.lower, graph.operands(id)[0]?) else { return None };
        let whole = Access::contiguous(graph.fact(source).shape.clone());
        let part = view(&Call { op, attrs: &node.attrs, inputs: &[Some(graph.fact(source))] }, &whole)?;
        let mut cut = (0..whole.shape.len()).filter(|&k| part.shape[k] != whole.shape[k]);
        let (Some(axis), None) = (cut.next(), cut.next()) else { return None };
        let along = |k: usize| part.shape[k] < 2 || part.strides[k] == whole.strides[k];
        if part.shape.contains(&0) || !(0..whole.shape.len()).all(along) {
            return None;
        }
        let start = usize::try_from(part.offset / whole.strides[axis]).ok()?;
        Some(Piece { source, axis, span: start..start + part.shape[axis], value: id.output(0) })
    }
}

/// The same code on each of several parts.
struct Twins {
    source: ValueId,
    axis: usize,
    span: Range<usize>,
    /// The number of units in each part; the axis falls into equal units.
    units: Vec<usize>,
    /// The parts themselves.
    parts: Vec<ValueId>,
    /// Nodes in an order in which they can be computed.
    steps: Vec<Step>,
}

/// A node of each part, and the one that computes their results together.
struct Step {
    nodes: Vec<NodeId>,
    /// The axis along which their results follow each other.
    axis: usize,
    attrs: Attrs,
}

impl Step {
    fn values(&self) -> Vec<ValueId> {
        self.nodes.iter().map(|&node| node.output(0)).collect()
    }
}

impl Twins {
    fn of(graph: &Graph, row: &[Piece]) -> Option<Twins> {
        let (first, last) = (row.first()?, row.last()?);
        let lens = || row.iter().map(|piece| piece.span.len());
        let unit = lens().fold(0, |unit, len| gcd(unit, len as u64)) as usize;
        let mut twins = Twins {
            source: first.source,
            axis: first.axis,
            span: first.span.start..last.span.end,
            units: lens().map(|len| len / unit).collect(),
            parts: row.iter().map(|piece| piece.value).collect(),
            steps: Vec::new(),
        };
        // Per value of the first part, the step that makes it; none for the part itself.
        let mut known = HashMap::from([(first.value, None)]);
        let mut open = vec![first.value];
        while let Some(value) = open.pop().filter(|_| twins.steps.len() < LONGEST) {
            for user in graph.users(value) {
                let made = user.output(0);
                if !known.contains_key(&made)
                    && let Some(step) = twins.step(graph, user, &known)
                {
                    known.insert(made, Some(twins.steps.len()));
                    twins.steps.push(step);
                    open.push(made);
                }
            }
        }
        Some(twins)
    }

    /// The values, part by part, and the axis along which they follow each other.
    fn values(&self, step: Option<usize>) -> (Vec<ValueId>, usize) {
        match step {
            None => (self.parts.clone(), self.axis),
            Some(step) => (self.steps[step].values(), self.steps[step].axis),
        }
    }

    /// The node of the first part with those of the others that compute the same.
    fn step(&self, graph: &Graph, id: NodeId, known: &HashMap<ValueId, Option<usize>>) -> Option<Step> {
        let node = graph.node(id);
        let op =
            node.op().filter(|op| matches!(op.lower, Lower::Map(_) | Lower::View(_)) && node.outputs.len() == 1)?;
        let operands = graph.operands(id);
        let own: Vec<_> = operands.iter().map(|v| Some(self.values(*known.get(&(*v)?)?))).collect();
        let mut nodes = vec![id];
        for part in 1..self.parts.len() {
            let expected = operands.iter().zip(&own).map(|(v, own)| own.as_ref().map(|own| own.0[part]).or(*v));
            let expected: Vec<_> = expected.collect();
            let from = own.iter().flatten().next()?.0[part];
            let alike = |&user: &NodeId| graph.node(user).op_name() == op.name && graph.operands(user) == expected;
            nodes.push(graph.users(from).into_iter().find(alike)?);
        }
        let facts: Vec<_> = operands.iter().map(|v| v.map(|v| graph.fact(v))).collect();
        let total: usize = self.units.iter().sum();
        let whole = |fact: &Fact, axis: usize| {
            let mut fact = fact.clone();
            fact.shape[axis] = fact.shape[axis] / self.units[0] * total;
            fact
        };
        let joined: Vec<_> = facts
            .iter()
            .zip(&own)
            .map(|(f, own)| {
                Some(match own {
                    Some((_, axis)) => whole((*f)?, *axis),
                    None => (*f)?.clone(),
                })
            })
            .collect();
        let inputs: Vec<_> = joined.iter().map(Option::as_ref).collect();
        let result = &node.outputs[0].fact;
        (0..result.shape.len()).find_map(|axis| {
            let extents = Call { op, attrs: &node.attrs, inputs: &facts }.part(axis, 1)?;
            let alike = nodes.iter().zip(&self.units).all(|(&other, units)| {
                let (node, mut expected) = (graph.node(other), result.clone());
                expected.shape[axis] = expected.shape[axis] / self.units[0] * units;
                let attrs = |attrs| extents.attrs(attrs, &expected.shape);
                node.outputs[0].fact == expected && attrs(&node.attrs) == attrs(&graph.node(id).attrs)
            });
            let expected = whole(result, axis);
            let attrs = extents.attrs(&node.attrs, &expected.shape);
            let call = Call { op, attrs: &attrs, inputs: &inputs };
            let found = call.infer().is_ok_and(|facts| facts[..] == [expected]);
            let along: Vec<_> = own.iter().map(|own| own.as_ref().map(|own| own.1)).collect();
            let maps = found && call.part(axis, total).is_some_and(|part| part.inputs == along);
            (alike && maps).then(|| Step { nodes: nodes.clone(), axis, attrs: attrs.clone() })
        })
    }

    /// The steps whose results are read by other nodes than the parts'.
    fn ends(&self, graph: &Graph) -> Vec<usize> {
        let inside = |user: &NodeId| self.steps.iter().any(|step| step.nodes.contains(user));
        let leaves = |v: &ValueId| graph.is_output(*v) || !graph.users(*v).iter().all(inside);
        (0..self.steps.len()).filter(|&step| self.steps[step].values().iter().any(leaves)).collect()
    }

    /// True if this saves launches at no cost. Only kernels with templates of their own may read the results, since they take no code of
    /// the parts along. They must need all results at once.
    fn is_cheaper(&self, graph: &Graph, target: &Target) -> bool {
        let ends = self.ends(graph);
        let computes = |step: &Step| matches!(lower(graph, step.nodes[0]), Some(Lower::Map(_)));
        let bound = |step: &Step| {
            let facts = step.values().into_iter().map(|value| graph.fact(value));
            facts.map(|fact| (fact.shape.numel() * fact.dtype.size()) as u64).sum::<u64>() <= target.max_binding
        };
        let is_free = |&end: &usize| {
            let values = self.steps[end].values();
            values.iter().all(|&value| self.is_for_templates(graph, value)) && together(graph, &values)
        };
        !ends.is_empty() && self.steps.iter().any(computes) && self.steps.iter().all(bound) && ends.iter().all(is_free)
    }

    /// True if, beside the parts' nodes, only templates read a value or views of it.
    fn is_for_templates(&self, graph: &Graph, value: ValueId) -> bool {
        let inside = |user: &NodeId| self.steps.iter().any(|step| step.nodes.contains(user));
        let mut values = vec![value];
        while let Some(value) = values.pop() {
            if graph.is_output(value) {
                return false;
            }
            for user in graph.users(value).into_iter().filter(|user| !inside(user)) {
                match lower(graph, user) {
                    Some(Lower::Template(_)) => {}
                    Some(Lower::View(_)) => values.push(user.output(0)),
                    _ => return false,
                }
            }
        }
        true
    }

    /// Adds the nodes that compute the parts together, of which the parts' results become views.
    fn compute(&self, graph: &mut Graph, context: &Context) -> Result<()> {
        let name = |graph: &Graph, node: NodeId| graph.node(node).name.clone();
        graph.insert_at(self.parts[0].node);
        let whole = if graph.fact(self.source).shape[self.axis] == self.span.len() {
            self.source
        } else {
            let name = name(graph, self.parts[0].node);
            context.add(graph, &name, "Slice", &[Some(self.source)], Attrs::span(self.axis, self.span.clone()))?
        };
        let mut made = HashMap::from([(self.parts[0], whole)]);
        for Step { nodes, attrs, .. } in &self.steps {
            let operands = graph.operands(nodes[0]).into_iter();
            let operands: Vec<_> = operands.map(|v| v.map(|v| made.get(&v).copied().unwrap_or(v))).collect();
            let (name, op) = (name(graph, nodes[0]), graph.node(nodes[0]).op_name().to_owned());
            graph.insert_at(nodes[0]);
            let value = context.add(graph, &name, &op, &operands, attrs.clone())?;
            made.insert(ValueId { node: nodes[0], port: 0 }, value);
        }
        for end in self.ends(graph) {
            let step = &self.steps[end];
            let whole = made[&step.values()[0]];
            let mut start = 0;
            for value in step.values() {
                let len = graph.fact(value).shape[step.axis];
                let name = graph.value_name(value).to_owned();
                graph.insert_at(value.node);
                let part =
                    context.add(graph, &name, "Slice", &[Some(whole)], Attrs::span(step.axis, start..start + len))?;
                graph.replace(value, part);
                start += len;
            }
        }
        Ok(())
    }
}

fn lower(graph: &Graph, node: NodeId) -> Option<Lower> {
    graph.node(node).op().map(|op| op.lower)
}
