//! Gradients: a graph grows by the nodes that compute the derivatives of one value by others.
//!
//! The graph is walked backwards from the value. Each node on the way hands the gradients of its outputs to its inputs, as its row's
//! [`Grad`] says. Most rows state nothing:
//!
//! - an elementwise row is derived from its expression (`scalar`);
//! - a row that decomposes is derived node by node. These nodes are added beside the row, and are computed once with those of the forward
//!   computation, because equal nodes are;
//! - a reduction, a concatenation and a view have one rule each.
//!
//! Parts of a value, such as queries, keys and values of one product, have gradients that are put side by side where these are all of it.
//!
//! A rule may read inputs and outputs freely. What is kept from the forward computation is a matter of the plan.

mod fixed;
mod repeat;
mod scalar;

use crate::constant::Constant;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::graph::{Decomposer, GRADIENT, Graph};
use crate::op::{Args, Attr, Back, Call, Fact, Grad, Lower, NodeId, Nodes, OpResult, ValueId, Var, build};
use crate::ops::spread;
use crate::pass::even_gather;
use crate::shape::Shape;
use crate::tensor::Tensor;
use std::collections::{HashMap, HashSet};

/// Adds the nodes that compute the derivatives of `of`, which has one element, by each of `by`. Where nothing leads from one of these to
/// `of`, there is no derivative.
///
/// # Errors
/// When `of` is not one float, or a node between has no derivatives: its name, its operator, and the way from `of` to it.
pub fn gradients(graph: &mut Graph, of: ValueId, by: &[ValueId]) -> Result<Vec<Option<ValueId>>> {
    let fact = graph.fact(of);
    if !fact.dtype.is_float() || fact.shape.numel() != 1 {
        let found = format!("gradients of '{}': expected one float, found {fact}", graph.value_name(of));
        return Err(Error::graph(found));
    }
    let (dtype, shape) = (fact.dtype, fact.shape.clone());
    let order = graph.order()?;
    graph.begin_backward();
    graph.append();
    let seed = graph.constant(Constant::new("gradients", Tensor::from_f64(dtype, shape, &[1.0])));
    let mut sweep = Sweep { graph, active: by.iter().copied().collect(), found: HashMap::new(), of, seed };
    order.iter().for_each(|&node| sweep.activate(node));
    sweep.add(of, seed);
    for &node in order.iter().rev() {
        sweep.back(node)?;
    }
    by.iter().map(|&value| sweep.total(value)).collect()
}

/// The walk from a value to what it depends on.
struct Sweep<'a> {
    graph: &'a mut Graph,
    /// The floats that depend on one of the values to derive by.
    active: HashSet<ValueId>,
    /// The gradients that the readers of a value have given so far.
    found: HashMap<ValueId, Vec<ValueId>>,
    /// The value that is derived.
    of: ValueId,
    /// Its gradient: 1.
    seed: ValueId,
}

/// Gradients that lie side by side along an axis, and those of the whole.
struct Stretches {
    axis: usize,
    inner: Vec<ValueId>,
    others: Vec<ValueId>,
}

impl Sweep<'_> {
    /// Marks the float outputs of a node that reads an active value.
    fn activate(&mut self, node: NodeId) {
        let reads = self.graph.operands(node).into_iter().flatten().any(|value| self.active.contains(&value));
        if reads {
            let outputs = self.graph.node(node).outputs.iter().enumerate();
            let floats = outputs.filter(|(_, output)| output.fact.dtype.is_float());
            self.active.extend(floats.map(|(port, _)| node.output(port)));
        }
    }

    fn nodes_of(&mut self, name: &str) -> Decomposer<'_> {
        self.graph.append();
        Decomposer::new(self.graph, name.to_owned())
    }

    /// Adds to the gradient of a value.
    fn add(&mut self, value: ValueId, gradient: ValueId) {
        if self.active.contains(&value) {
            self.found.entry(value).or_default().push(gradient);
        }
    }

    /// The sum of the gradients that the readers of a value gave.
    fn total(&mut self, value: ValueId) -> Result<Option<ValueId>> {
        let Some(parts) = self.found.remove(&value) else { return Ok(None) };
        let name = format!("{GRADIENT}{}", self.graph.value_name(value));
        let whole = self.stretches(&parts);
        let sum = build(self.nodes_of(&name), |b| {
            let (mut sum, mut rest) = (None, &parts);
            if let Some(Stretches { axis, inner, others }) = &whole {
                let inner: Vec<_> = inner.iter().map(|&part| b.value(part)).collect();
                (sum, rest) = (Some(b.concat(&inner, *axis as i64)), others);
            }
            for part in rest.iter().map(|&part| b.value(part)) {
                sum = Some(sum.map_or(part, |sum| sum + part));
            }
            Ok(sum.into_iter().collect())
        });
        let sum = sum.map_err(Error::graph)?[0];
        // Others may ask again.
        self.found.insert(value, vec![sum]);
        Ok(Some(sum))
    }

    /// The gradients that are stretches of an axis with zeros around them, if they are all of the axis and have nothing in common.
    fn stretches(&self, parts: &[ValueId]) -> Option<Stretches> {
        let stretch = |&part: &ValueId| {
            let (node, shape) = (self.graph.node(part.node), &self.graph.fact(part).shape);
            let &[Some(inner)] = &self.graph.operands(part.node)[..] else { return None };
            // With another attribute, other values than zeros may stand around it.
            let plain = node.op_name() == "Pad" && node.attrs.iter().count() == 1;
            let Some(Attr::Ints(pads)) = node.attrs.get("pads").filter(|_| plain) else { return None };
            let mut padded = (0..shape.len()).filter(|&axis| pads[axis] != 0 || pads[shape.len() + axis] != 0);
            let (axis, None) = (padded.next()?, padded.next()) else { return None };
            Some((axis, pads[axis], self.graph.fact(inner).shape[axis] as i64, inner))
        };
        let others = parts.iter().copied().filter(|part| stretch(part).is_none()).collect();
        let mut all: Vec<_> = parts.iter().filter_map(stretch).collect();
        all.sort_unstable_by_key(|&(_, start, ..)| start);
        let &(axis, ..) = all.first()?;
        let mut next = 0;
        for &(of, start, len, _) in &all {
            if (of, start) != (axis, next) {
                return None;
            }
            next += len;
        }
        let is_whole = next == self.graph.fact(parts[0]).shape[axis] as i64;
        let inner = all.into_iter().map(|(.., inner)| inner).collect();
        is_whole.then_some(Stretches { axis, inner, others })
    }

    /// Hands the gradients of a node's outputs to its inputs.
    fn back(&mut self, id: NodeId) -> Result<()> {
        let outputs = 0..self.graph.node(id).outputs.len() as u32;
        let dy: Vec<_> = outputs.map(|port| self.total(ValueId { node: id, port })).collect::<Result<_>>()?;
        let Some(op) = self.graph.node(id).op().filter(|_| dy.iter().any(Option::is_some)) else { return Ok(()) };
        if let Some((data, axis, span)) = even_gather(self.graph, id)? {
            let mut shape = self.graph.fact(data).shape.to_vec();
            let extent = std::mem::replace(&mut shape[axis], span.len);
            return self.apply(id, &dy, |_, _, back| {
                Ok(vec![Some(spread(back.first()?.shaped(&shape), axis, &span, extent)?), None])
            });
        }
        match (op.grad, op.lower) {
            (Grad::Derived, Lower::Decompose(_)) => self.pieces(id, &dy),
            (Grad::Derived, Lower::Const) => Ok(()),
            (Grad::Derived, Lower::Repeat) => self.repeat(id, &dy),
            (Grad::Derived, Lower::Template(_)) => Err(self.refuse(id, "its row states none")),
            (Grad::Rule(rule), _) => self.apply(id, &dy, rule),
            (Grad::Derived, Lower::Map(map)) => {
                self.apply(id, &dy, |b, call, back| scalar::gradients(b, call, map, back))
            }
            (Grad::Derived, Lower::Reduce(reduction)) => {
                self.apply(id, &dy, |_, call, back| fixed::reduction(call, reduction, back))
            }
            (Grad::Derived, Lower::View(_)) => self.apply(id, &dy, |_, call, back| fixed::view(call, back)),
            (Grad::Derived, Lower::Concat) => self.apply(id, &dy, |_, call, back| fixed::parts(call, back)),
        }
    }

    /// Calls a rule, and gives each input its gradient.
    fn apply(
        &mut self,
        id: NodeId,
        dy: &[Option<ValueId>],
        rule: impl for<'g> Fn(Nodes<'g>, &Call, &Back<'_, 'g>) -> OpResult<Vec<Option<Var<'g>>>>,
    ) -> Result<()> {
        let (node, operands) = (self.graph.node(id).clone(), self.graph.operands(id));
        let facts: Vec<_> = operands.iter().map(|v| v.map(|v| self.graph.fact(v).clone())).collect();
        let facts: Vec<Option<&Fact>> = facts.iter().map(Option::as_ref).collect();
        let call = Call { op: node.op().expect("it is an operator"), attrs: &node.attrs, inputs: &facts };
        // A row that computes halves in `f32` has gradients that are rounded once, too.
        let half = call.rounded_to();
        let wide: Vec<_> = facts.iter().map(|fact| fact.map(Fact::unhalved)).collect();
        let wide: Vec<_> = wide.iter().map(Option::as_ref).collect();
        let call = if half.is_some() { Call { inputs: &wide, ..call } } else { call };
        let active = |value: &ValueId| self.active.contains(value);
        let wanted: Vec<_> = operands.iter().map(|value| value.filter(active)).collect();
        let mut given = Vec::new();
        let seed = self.seed;
        let mut nodes = self.nodes_of(&format!("{GRADIENT}{}", node.name));
        let made = build(&mut nodes, |b| {
            let read = |value: ValueId| {
                let value = b.value(value);
                let dtype = value.fact().map_or(DType::F32, |fact| fact.dtype);
                if half.is_some() { value.cast(dtype.unhalved()) } else { value }
            };
            let x: Vec<_> = operands.iter().map(|value| value.map(read)).collect();
            let outputs = 0..node.outputs.len() as u32;
            let y: Vec<_> = outputs.map(|port| read(ValueId { node: id, port })).collect();
            let dy: Vec<_> = dy.iter().map(|value| value.map(read)).collect();
            let found = rule(b, &call, &Back { x: Args(&x), y: &y, dy: &dy })?;
            let mut gradients = Vec::new();
            for ((gradient, wanted), fact) in found.into_iter().zip(&wanted).zip(&facts) {
                if let (Some(gradient), Some(value), Some(fact)) = (gradient, wanted, fact) {
                    gradients.push(fitted(gradient, &fact.shape)?.cast(fact.dtype));
                    given.push(*value);
                }
            }
            Ok(gradients)
        });
        // Values that depend on forward values alone may be kept instead of these.
        nodes.hoist(seed);
        let made = made.map_err(|what| self.refuse(id, &what))?;
        given.into_iter().zip(made).for_each(|(value, gradient)| self.add(value, gradient));
        Ok(())
    }

    /// Derives a row by the nodes that it decomposes into.
    fn pieces(&mut self, id: NodeId, dy: &[Option<ValueId>]) -> Result<()> {
        let (node, operands) = (self.graph.node(id).clone(), self.graph.operands(id));
        let op = node.op().expect("it is an operator");
        let Lower::Decompose(rule) = op.lower else { unreachable!("the row decomposes") };
        let facts: Vec<_> = operands.iter().map(|v| v.map(|v| self.graph.fact(v).clone())).collect();
        let facts: Vec<Option<&Fact>> = facts.iter().map(Option::as_ref).collect();
        let call = Call { op, attrs: &node.attrs, inputs: &facts };
        self.graph.insert_at(id);
        let mut pieces = Decomposer::new(self.graph, node.name.clone()).of(&call);
        let values = call.decompose(rule, &mut pieces, &operands).map_err(|what| node.error(what))?;
        let made = pieces.made;
        let is_loop = |&piece: &NodeId| matches!(self.graph.node(piece).op().map(|op| op.lower), Some(Lower::Repeat));
        if made.iter().any(is_loop) {
            // The loop keeps what its steps began with. It runs once: nobody reads the row any more.
            values.iter().enumerate().for_each(|(port, &value)| self.graph.replace(id.output(port), value));
        }
        made.iter().for_each(|&piece| self.activate(piece));
        for (value, gradient) in values.into_iter().zip(dy) {
            gradient.iter().for_each(|&gradient| self.add(value, gradient));
        }
        made.into_iter().rev().try_for_each(|piece| self.back(piece))
    }

    /// The error of a node without derivatives, with the way that leads to it.
    fn refuse(&self, id: NodeId, why: &str) -> Error {
        let graph = &*self.graph;
        let mut way = Vec::new();
        let mut at = id;
        let mut seen = HashSet::from([id]);
        // Readers of active values lead to the value that is derived.
        let reads = |node: NodeId| {
            let outputs = 0..graph.node(node).outputs.len() as u32;
            outputs.flat_map(move |port| graph.users(ValueId { node, port }))
        };
        let reaches = ancestors(graph, [self.of.node]);
        while at != self.of.node {
            let Some(next) = reads(at).find(|user| reaches.contains(user) && seen.insert(*user)) else { break };
            way.push(format!("'{}'", graph.node(next).name));
            at = next;
        }
        way.reverse();
        let way = if way.is_empty() { String::new() } else { format!("; on the way {}", way.join(" <- ")) };
        graph.node(id).error(format!("no derivatives: {why}{way}"))
    }
}

/// The nodes that some nodes depend on, with these.
fn ancestors(graph: &Graph, of: impl IntoIterator<Item = NodeId>) -> HashSet<NodeId> {
    let (mut found, mut stack) = (HashSet::new(), Vec::from_iter(of));
    while let Some(node) = stack.pop() {
        if found.insert(node) {
            stack.extend(graph.operands(node).into_iter().flatten().map(|value| value.node));
        }
    }
    found
}

/// A gradient in the shape of its input: summed where the input was broadcast, and broadcast where the gradient is.
fn fitted<'g>(gradient: Var<'g>, shape: &Shape) -> OpResult<Var<'g>> {
    let found = gradient.shape()?;
    if found == *shape {
        return Ok(gradient);
    }
    let front = found.len().saturating_sub(shape.len());
    let summed = |&axis: &usize| axis < front || shape[axis - front] == 1 && found[axis] != 1;
    let axes: Vec<i64> = (0..found.len()).filter(summed).map(|axis| axis as i64).collect();
    let sum = if axes.is_empty() { gradient } else { gradient.reduce_sum(&axes, true) };
    let kept: Vec<usize> = sum.shape()?[front..].to_vec();
    let sum = sum.shaped(&kept);
    Ok(if kept == shape[..] { sum } else { sum.expand(shape) })
}

/// The attributes of a reduction over these axes, which stay with extent 1.
fn over(axes: &[usize]) -> Vec<i64> {
    axes.iter().map(|&axis| axis as i64).collect()
}
