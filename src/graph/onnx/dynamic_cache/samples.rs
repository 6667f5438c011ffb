//! The graphs of several lengths, compared node by node.

use crate::constant::Constant;
use crate::error::{Error, Result};
use crate::graph::{Graph, Kind, MAX_NODES};
use crate::onnx::symbolic::Varying;
use crate::op::{Lower, NodeId, ValueId};
use crate::pass::decompose;
use crate::shape::Access;
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

/// One model, imported for several lengths. A node has the same number in each graph.
pub(super) struct Samples {
    /// The graphs, that of the largest length first.
    pub graphs: Vec<Graph>,
    /// The lengths.
    pub lengths: Vec<usize>,
    /// The dim that is the length, or the output that says how many a node finds.
    pub dim: String,
    /// The reason for several lengths, for messages.
    pub why: String,
    /// True if the length is the count of what a run finds, not of a state's rows.
    pub counts: bool,
    /// The number of the length among those that constants depend on.
    pub number: usize,
    /// The constants of the largest graph that depend on lengths.
    pub varying: Varying,
}

/// How a constant depends on the length.
pub(super) enum Content {
    /// It does not. If it has more elements for larger lengths, the first of them are those of smaller lengths.
    Same,
    /// Its elements are integers: `slopes * length + offsets`.
    Linear { slopes: Vec<i64>, offsets: Vec<i64> },
    /// Otherwise.
    Other,
}

/// An axis whose extent grows with the length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ragged {
    /// The axis.
    pub axis: usize,
    /// The extent, less the length.
    pub more: i64,
}

impl Samples {
    /// The graph of the largest length.
    pub fn largest(&self) -> &Graph {
        &self.graphs[0]
    }

    /// An error at a node.
    pub fn fail(&self, id: NodeId, what: impl std::fmt::Display) -> Error {
        self.largest().node(id).error(format!("{what} ({})", self.why))
    }

    /// Makes nodes of constants whose elements depend on the length otherwise than [linearly](Content::Linear), and decomposes operators
    /// without a rule of their own.
    ///
    /// # Errors
    /// When the graphs differ by more than extents, attributes and constants; when a constant depends on the length in an unknown way.
    pub fn unfold(&mut self, has_rule: fn(&str) -> bool) -> Result<()> {
        loop {
            // Sweeping forgets nodes, whose numbers others take.
            self.graphs.iter_mut().for_each(Graph::sweep);
            let mut made: Vec<HashMap<*const Constant, ValueId>> = vec![HashMap::new(); self.graphs.len()];
            self.are_alike()?;
            let mut changed = false;
            for id in self.largest().order()? {
                if self.largest().len() > MAX_NODES {
                    return Err(self.fail(id, format!("expected at most {MAX_NODES} nodes")));
                }
                match self.largest().node(id).kind {
                    Kind::Constant(_) if matches!(self.content(id)?, Content::Other) => self.derive(id, &mut made)?,
                    Kind::Op(op)
                        if matches!(op.lower, Lower::Decompose(_)) && !has_rule(op.name) && self.is_touched(id) =>
                    {
                        self.graphs.iter_mut().try_for_each(|graph| decompose(graph, id).map(drop))?;
                    }
                    _ => continue,
                }
                changed = true;
            }
            if !changed {
                return Ok(());
            }
        }
    }

    /// Returns an error if the graphs have other nodes or other edges.
    fn are_alike(&self) -> Result<()> {
        let first = self.largest();
        let order = first.order()?;
        for (graph, length) in self.graphs.iter().zip(&self.lengths).skip(1) {
            let other = graph.order()?;
            let same = |id: NodeId| {
                let (a, b) = (first.node(id), graph.node(id));
                let alike = a
                    .outputs
                    .iter()
                    .zip(&b.outputs)
                    .all(|(a, b)| a.fact.dtype == b.fact.dtype && a.fact.shape.len() == b.fact.shape.len());
                alike
                    && a.op_name() == b.op_name()
                    && a.outputs.len() == b.outputs.len()
                    && first.operands(id) == graph.operands(id)
            };
            let differs = order.iter().zip(&other).find(|&(&a, &b)| a != b || !same(a)).map(|(&id, _)| id);
            if let Some(id) = differs.or((order.len() != other.len()).then(|| order[order.len() - 1])) {
                let (dim, most) = (&self.dim, self.lengths[0]);
                let what = format!(
                    "{dim}={length} makes other nodes here than {dim}={most}: expected the same nodes ({})",
                    self.why
                );
                return Err(first.node(id).error(what));
            }
        }
        Ok(())
    }

    /// The axes of a value whose extents grow.
    ///
    /// # Errors
    /// When one does not grow by one element per row.
    pub fn ragged(&self, value: ValueId) -> Result<Vec<Ragged>> {
        let extent = |graph: &Graph, axis: usize| graph.fact(value).shape[axis] as i64;
        let rank = self.largest().fact(value).shape.len();
        let mut found = Vec::new();
        for axis in 0..rank {
            let more = extent(self.largest(), axis) - self.lengths[0] as i64;
            let samples = || self.graphs.iter().zip(&self.lengths);
            if samples().all(|(graph, _)| extent(graph, axis) == extent(self.largest(), axis)) {
                continue;
            }
            if let Some((graph, rows)) = samples().find(|&(graph, &rows)| extent(graph, axis) != rows as i64 + more) {
                let [few, many] = [(extent(graph, axis), rows), (extent(self.largest(), axis), &self.lengths[0])]
                    .map(|(extent, rows)| format!("{extent} elements of {rows} rows"));
                let what = format!("axis {axis} of its value has {few} and {many}: expected one element per row");
                return Err(self.fail(value.node, what));
            }
            found.push(Ragged { axis, more });
        }
        Ok(found)
    }

    /// The numbers of all graphs for one question, as `slope * length + offset`; `None` if no line goes through them.
    pub fn line(&self, numbers: &[i64]) -> Option<(i64, i64)> {
        let at = |k: usize| (self.lengths[k] as i64, numbers[k]);
        let (first, last) = (at(0), at(numbers.len() - 1));
        if numbers.iter().all(|&n| n == first.1) {
            return Some((0, first.1));
        }
        let (run, rise) = (first.0.checked_sub(last.0)?, first.1.checked_sub(last.1)?);
        let slope = (run != 0 && rise % run == 0).then(|| rise / run)?;
        let offset = first.1.checked_sub(slope.checked_mul(first.0)?)?;
        let fits = |k: usize| slope.checked_mul(at(k).0).and_then(|n| n.checked_add(offset)) == Some(at(k).1);
        (0..numbers.len()).all(fits).then_some((slope, offset))
    }

    /// How a constant depends on the length.
    ///
    /// # Errors
    /// When elements are needed and cannot be fetched.
    pub fn content(&self, id: NodeId) -> Result<Content> {
        let constants: Vec<_> = self.graphs.iter().filter_map(|graph| graph.as_constant(id.output(0))).collect();
        let (first, others) = (constants[0], &constants[1..]);
        // The graphs are of some lengths. A line that goes through these may miss the others.
        if self.varying.of(first).is_some_and(|forms| forms.others() & 1 << self.number != 0) {
            return Ok(Content::Other);
        }
        if others.iter().all(|other| first.same(other)) {
            return Ok(Content::Same);
        }
        let prefix = |other: &Arc<Constant>| -> Result<bool> {
            let shape = &other.fact.shape;
            if shape.iter().zip(first.fact.shape.iter()).any(|(few, many)| few > many) {
                return Ok(false);
            }
            let whole = Access::contiguous(first.fact.shape.clone());
            let part = shape.iter().enumerate().fold(whole, |access, (axis, &len)| access.slice(axis, 0, 1, len));
            Ok(first.value()?.gather(&part).bytes() == other.value()?.bytes())
        };
        let mut all = true;
        for other in others {
            all = all && prefix(other)?;
        }
        if all {
            return Ok(Content::Same);
        }
        if others.iter().any(|other| other.fact != first.fact) {
            return Ok(Content::Other);
        }
        let mut rows = Vec::with_capacity(constants.len());
        for constant in &constants {
            let Some(integers) = constant.value()?.to_i64() else { return Ok(Content::Other) };
            rows.push(integers);
        }
        let lines = (0..rows[0].len()).map(|k| self.line(&rows.iter().map(|row| row[k]).collect::<Vec<_>>()));
        Ok(match lines.collect::<Option<Vec<_>>>() {
            Some(lines) => {
                let (slopes, offsets) = lines.into_iter().unzip();
                Content::Linear { slopes, offsets }
            }
            None => Content::Other,
        })
    }

    /// Replaces a constant by the node that it was folded from.
    fn derive(&mut self, id: NodeId, made: &mut [HashMap<*const Constant, ValueId>]) -> Result<()> {
        let old = id.output(0);
        let known = |graph: &Graph| graph.as_constant(old).is_some_and(|constant| constant.derivation().is_some());
        if !self.graphs.iter().all(known) {
            let what = "its elements depend on the length, and no operator is known that would compute them";
            return Err(self.fail(id, what));
        }
        for (graph, made) in self.graphs.iter_mut().zip(made) {
            let constant = graph.as_constant(old).expect("it is one in every graph").clone();
            let (op, attrs, inputs, port) = constant.derivation().expect("an operator derived it");
            graph.insert_at(id);
            let mut input = |constant: &Arc<Constant>| {
                *made.entry(Arc::as_ptr(constant)).or_insert_with(|| graph.constant(constant.clone()))
            };
            let operands: Vec<_> = inputs.iter().map(|constant| constant.as_ref().map(&mut input)).collect();
            let node = graph.add(op, &constant.name, &operands, attrs.clone(), &[])?;
            graph.replace(old, node.output(port));
        }
        Ok(())
    }

    /// True if a node depends on the length by more than the elements that it reads.
    pub fn is_touched(&self, id: NodeId) -> bool {
        let facts = |graph: &Graph| -> Vec<_> {
            let operands = graph.operands(id).into_iter().flatten().map(|v| graph.fact(v).clone());
            operands.chain(graph.node(id).outputs.iter().map(|o| o.fact.clone())).collect()
        };
        let own = self.largest();
        self.graphs[1..].iter().any(|g| g.node(id).attrs != own.node(id).attrs || facts(g) != facts(own))
    }

    /// The names of the attributes that differ.
    pub fn changed(&self, id: NodeId) -> Vec<&str> {
        let own = &self.largest().node(id).attrs;
        let names: BTreeSet<_> =
            self.graphs.iter().flat_map(|graph| graph.node(id).attrs.iter()).map(|(name, _)| name).collect();
        let differs = |name: &str| self.graphs.iter().any(|graph| graph.node(id).attrs.get(name) != own.get(name));
        names.into_iter().filter(|name| differs(name)).collect()
    }
}
