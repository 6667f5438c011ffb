//! The rules by which operators are rewritten for caches that grow.
//!
//! Along a ragged axis, the elements before the length are those that the graph of this length has; those behind it mean nothing. A node
//! that computes each element from elements at the same place stays. One that reduces over such an axis, or counts from its end, is
//! rewritten.

use super::samples::{Content, Ragged, Samples};
use super::{Grown, Pair};
use crate::constant::Constant;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::graph::{Count, Counted, Decomposer, Graph, Kind};
use crate::op::{Attrs, Call, Fact, Lower, NodeId, Nodes, OpDef, OpResult, ValueId, Var, build};
use crate::ops::{self, softmax_axes};
use crate::tensor::Tensor;
use std::collections::{HashMap, HashSet};

/// True if an operator that is not elementwise has a rule.
pub(super) fn has_rule(op: &str) -> bool {
    Rules::rule_of(op).is_some()
}

/// The values that replace a node's; none if it stays.
type Rule<'a> = fn(&mut Rules<'a>, NodeId) -> Result<Vec<ValueId>>;

/// A state that grows.
struct Cache {
    names: Pair,
    axis: usize,
    state: ValueId,
    updated: Option<ValueId>,
}

/// The graph of the largest length, while its nodes are rewritten for all lengths. Every value keeps its type and shape.
pub(super) struct Rules<'a> {
    samples: &'a Samples,
    graph: Graph,
    /// The state that is the length.
    length: ValueId,
    /// The length plus a number.
    sums: HashMap<i64, ValueId>,
    /// Values with other elements behind the length: the value, the axis, and the bits of the element.
    masked: HashMap<(ValueId, usize, u64), ValueId>,
    /// Values that are zero behind the length.
    zero: HashSet<ValueId>,
    /// Values whose elements behind the length are elements of a cache, which are finite.
    kept: HashSet<ValueId>,
    /// By the input that reads it.
    caches: HashMap<ValueId, Cache>,
}

impl<'a> Rules<'a> {
    /// The graph of the largest length, in which a value is the length.
    fn new(samples: &'a Samples, graph: Graph, length: ValueId) -> Rules<'a> {
        let (sums, masked) = (HashMap::from([(0, length)]), HashMap::new());
        let (zero, kept, caches) = (HashSet::new(), HashSet::new(), HashMap::new());
        Rules { samples, graph, length, sums, masked, zero, kept, caches }
    }

    /// The length is the output of its name.
    pub fn counting(samples: &'a Samples) -> Rules<'a> {
        let graph = samples.largest().clone();
        let count = graph.outputs().iter().find(|(name, _)| *name == samples.dim).map(|(_, value)| *value);
        Rules::new(samples, graph, count.expect("what is found is counted by an output"))
    }

    /// Adds the state that is the length.
    pub fn growing(samples: &'a Samples, least: usize, count: Count) -> Result<Rules<'a>> {
        let mut graph = samples.largest().clone();
        let dim = &samples.dim;
        if graph.inputs().iter().any(|&v| graph.value_name(v) == *dim) {
            return Err(Error::usage(format!(
                "dim '{dim}': an input has this name, which the state needs that is the length"
            )));
        }
        let integer = |value: u64| Tensor::from_f64(DType::I64, [], &[value as f64]);
        let first = (least > 0).then(|| Constant::new(dim.clone(), integer(least as u64)).into());
        let length = graph.state(dim.clone(), Fact::new(DType::I64, []), first);
        let by = graph.constant(Constant::new(format!("rows that a run adds to '{dim}'"), integer(count.by)));
        let add = ops::find("Add").expect("the table has a row for sums");
        let after = graph.add(add, &format!("{dim} after the run"), &[Some(length), Some(by)], Attrs::new(), &[])?;
        graph.update(length, after.output(0)).map_err(Error::graph)?;
        graph.bound_count(length, Some(count));
        Ok(Rules::new(samples, graph, length))
    }

    /// Rewrites all nodes, and makes the pairs states.
    pub fn apply(mut self, pairs: &[Grown]) -> Result<Graph> {
        for pair in pairs {
            self.add_cache(pair)?;
        }
        for id in self.samples.largest().order()? {
            let made = match self.samples.largest().node(id).kind {
                Kind::Constant(_) => self.constant(id)?,
                Kind::Op(op) if self.samples.is_touched(id) => self.rule(id, op)?,
                _ => Vec::new(),
            };
            for (port, value) in made.into_iter().enumerate() {
                self.graph.replace(id.output(port), value);
            }
        }
        self.update_caches()?;
        for (name, value) in self.samples.largest().outputs() {
            let left = self.graph.outputs().iter().any(|(output, _)| output == name);
            let ragged = self.samples.ragged(*value)?;
            if self.samples.counts {
                for Ragged { axis, more } in ragged {
                    self.graph.count_output(name, Counted { axis, by: self.samples.dim.clone(), more });
                }
            } else if left && !ragged.is_empty() {
                let (dim, fact) = (&self.samples.dim, self.samples.largest().fact(*value));
                return Err(Error::usage(format!(
                    "output '{name}', {fact}, grows along dim '{dim}': expected an output of one shape, or a pair of a state"
                )));
            }
        }
        Ok(self.graph)
    }

    /// Adds the state of a pair.
    fn add_cache(&mut self, pair: &Grown) -> Result<()> {
        let Grown { input, output, axis } = pair;
        let graph = &mut self.graph;
        let old =
            graph.inputs().iter().copied().find(|&v| graph.value_name(v) == input).expect("the pair has been found");
        let new = graph.outputs().iter().find(|(name, _)| name == output).expect("the pair has been found").1;
        let fact = graph.fact(new).clone();
        graph.insert_at(old.node);
        let state = graph.state(input.clone(), fact, None);
        graph.withdraw_input(old);
        self.kept.insert(state);
        self.caches.insert(old, Cache { names: (input.clone(), output.clone()), axis: *axis, state, updated: None });
        Ok(())
    }

    /// Gives the caches their updates.
    fn update_caches(&mut self) -> Result<()> {
        // Nodes that have been replaced still read the inputs.
        self.graph.sweep();
        let mut caches: Vec<_> = self.caches.drain().collect();
        caches.sort_by_key(|(input, _)| *input);
        for (input, Cache { names: (name, output), state, updated, .. }) in caches {
            if let Some(&reader) = self.graph.users(input).first() {
                let what = format!("reads state '{name}' before it has grown: expected a Concat alone");
                return Err(self.graph.node(reader).error(what));
            }
            let Some(value) = self.graph.withdraw_output(&output) else {
                return Err(Error::usage(format!("state '{name}={output}': '{output}' is a state's already")));
            };
            if updated != Some(value) {
                let what = format!("expected '{output}' to be a Concat of '{name}' and new rows");
                return Err(Error::usage(format!(
                    "state '{name}={output}': {what}, found '{}'",
                    self.graph.value_name(value)
                )));
            }
            self.graph.update(state, value).map_err(Error::graph)?;
        }
        Ok(())
    }

    /// Builds nodes in the place of one.
    fn build(
        &mut self,
        id: NodeId,
        make: impl for<'g> FnOnce(Nodes<'g>) -> OpResult<Vec<Var<'g>>>,
    ) -> Result<Vec<ValueId>> {
        let name = self.samples.largest().node(id).name.clone();
        self.graph.insert_at(id);
        build(Decomposer::new(&mut self.graph, name), make).map_err(|what| self.samples.fail(id, what))
    }

    fn one(&mut self, id: NodeId, make: impl for<'g> FnOnce(Nodes<'g>) -> OpResult<Var<'g>>) -> Result<ValueId> {
        Ok(self.build(id, |b| Ok(vec![make(b)?]))?[0])
    }

    /// The same operator on other operands.
    fn again(&mut self, id: NodeId, operands: &[Option<ValueId>]) -> Result<Vec<ValueId>> {
        let node = self.samples.largest().node(id);
        let Kind::Op(op) = node.kind else { unreachable!("rules are of operators") };
        let outputs: Vec<&str> = node.outputs.iter().map(|o| o.name.as_str()).collect();
        self.graph.insert_at(id);
        let made = self.graph.add(op, &node.name, operands, node.attrs.clone(), &outputs)?;
        Ok((0..outputs.len() as u32).map(|port| ValueId { node: made, port }).collect())
    }

    /// The length before the run, plus a number.
    fn length_plus(&mut self, id: NodeId, number: i64) -> Result<ValueId> {
        // The graphs of several counts are compared again: numbers that are equal in one of them may differ in others.
        if let Some(&sum) = self.sums.get(&number).filter(|_| !self.samples.counts) {
            return Ok(sum);
        }
        let length = self.length;
        // Every node may read it, so it stands where the length does.
        self.graph.insert_at(length.node);
        let made = build(Decomposer::new(&mut self.graph, self.samples.dim.clone()), |b| {
            Ok(vec![b.value(length) + number as f64])
        });
        let sum = made.map_err(|what| self.samples.fail(id, what))?[0];
        self.sums.insert(number, sum);
        Ok(sum)
    }

    /// A value with `element` behind the length.
    fn masked(&mut self, id: NodeId, value: ValueId, along: &[Ragged], element: f64) -> Result<ValueId> {
        let mut found = value;
        for &Ragged { axis, more } in along {
            let key = (found, axis, element.to_bits());
            found = match self.masked.get(&key) {
                Some(&masked) => masked,
                None => {
                    let end = self.length_plus(id, more)?;
                    let shape = self.graph.fact(found).shape.clone();
                    let masked = self.one(id, |b| {
                        let mut along = vec![1; shape.len() - axis];
                        along[0] = shape[axis];
                        let inside = b.numbers(DType::I64, along, 0.0).less(b.value(end));
                        Ok(inside.select(b.value(found), element))
                    })?;
                    self.masked.insert(key, masked);
                    masked
                }
            };
        }
        if element == 0.0 {
            self.zero.insert(found);
        }
        Ok(found)
    }

    /// The ragged axes of an operand.
    fn ragged(&self, id: NodeId, slot: usize) -> Result<Vec<Ragged>> {
        let operand = self.samples.largest().operands(id)[slot];
        operand.map_or(Ok(Vec::new()), |value| self.samples.ragged(value))
    }

    /// The operands as they are now.
    fn operands(&self, id: NodeId) -> Vec<Option<ValueId>> {
        self.graph.operands(id)
    }

    /// An answer of the call in the graph of the largest length.
    fn call<T>(&self, id: NodeId, of: impl FnOnce(&Call) -> OpResult<T>) -> Result<T> {
        self.samples
            .largest()
            .with_call(id, of)
            .expect("rules are of operators")
            .map_err(|what| self.samples.fail(id, what))
    }

    /// A constant that depends on the length.
    fn constant(&mut self, id: NodeId) -> Result<Vec<ValueId>> {
        let Content::Linear { slopes, offsets } = self.samples.content(id)? else { return Ok(Vec::new()) };
        let Fact { dtype, shape } = self.graph.fact(id.output(0)).clone();
        let length = self.length;
        let floats = |values: &[i64]| values.iter().map(|&v| v as f64).collect::<Vec<_>>();
        let made = self.one(id, |b| {
            let length = b.value(length).cast(dtype);
            let offsets = b.constant(dtype, shape.clone(), || floats(&offsets));
            if slopes.iter().all(|&slope| slope == 1) {
                return Ok(length + offsets);
            }
            Ok(length * b.constant(dtype, shape.clone(), || floats(&slopes)) + offsets)
        })?;
        Ok(vec![made])
    }

    /// Refuses attributes that depend on the length, but for those named.
    fn only(&self, id: NodeId, allowed: &[&str]) -> Result<()> {
        match self.samples.changed(id).into_iter().find(|name| !allowed.contains(name)) {
            None => Ok(()),
            Some(name) => Err(self.samples.fail(id, format!("attribute '{name}' depends on the length"))),
        }
    }

    /// The rule of an operator.
    fn rule_of(op: &str) -> Option<Rule<'a>> {
        Some(match op {
            "Reshape" | "Flatten" | "Squeeze" | "Unsqueeze" | "Identity" => Rules::regroup,
            "Transpose" | "Expand" => |rules, id| rules.only(id, &["shape"]).map(|()| rules.follow(id)),
            "Slice" => Rules::slice,
            "Concat" => Rules::concat,
            "Gather" | "GatherElements" | "GatherND" => Rules::gather,
            "MatMul" => Rules::product,
            "Trilu" => Rules::triangle,
            "Pad" => Rules::pad,
            "TensorScatter" => Rules::scatter,
            "CumSum" => Rules::running_sum,
            "ReduceSum" | "ReduceMean" | "ReduceMax" | "ReduceMin" | "ReduceProd" | "ReduceL1" | "ReduceL2"
            | "ReduceLogSum" | "ReduceLogSumExp" | "ReduceSumSquare" | "ArgMax" | "ArgMin" | "TopK" | "Softmax"
            | "LogSoftmax" => Rules::reduce,
            _ => return None,
        })
    }

    /// Applies the rule of a node.
    fn rule(&mut self, id: NodeId, op: &'static OpDef) -> Result<Vec<ValueId>> {
        for port in 0..self.samples.largest().node(id).outputs.len() as u32 {
            self.samples.ragged(ValueId { node: id, port })?;
        }
        if let Some(rule) = Rules::rule_of(op.name) {
            return rule(self, id);
        }
        if let Lower::Map(map) = op.lower
            && !self.call(id, |call| Ok(call.uses_index(map)))?
        {
            self.only(id, &[])?;
            self.stretches(id)?;
            return Ok(self.elementwise(id, op.name));
        }
        let facts: Vec<_> = self.operands(id).into_iter().flatten().map(|v| self.graph.fact(v).to_string()).collect();
        let what = format!("no rule says what it makes of operands that grow, {}", facts.join(", "));
        Err(self.samples.fail(id, what))
    }

    /// Refuses an axis of as many elements as the length beside one of another number: they are as many for some lengths alone.
    fn stretches(&self, id: NodeId) -> Result<()> {
        let operands = self.samples.largest().operands(id);
        let shape = |value: ValueId| &self.samples.largest().fact(value).shape;
        let rank = operands.iter().flatten().map(|&v| shape(v).len()).max().unwrap_or(0);
        let (mut grows, mut fixed) = (vec![false; rank], vec![false; rank]);
        for (slot, value) in operands.iter().enumerate().filter_map(|(slot, v)| Some((slot, (*v)?))) {
            let ragged = self.ragged(id, slot)?;
            for (axis, extent) in shape(value).iter().enumerate() {
                let is_ragged = ragged.iter().any(|r| r.axis == axis);
                let behind = rank - shape(value).len() + axis;
                grows[behind] |= is_ragged;
                fixed[behind] |= !is_ragged && *extent != 1;
            }
        }
        let Some(axis) = (0..rank).find(|&axis| grows[axis] && fixed[axis]) else { return Ok(()) };
        let facts: Vec<_> = operands.iter().flatten().map(|&v| self.samples.largest().fact(v).to_string()).collect();
        let what = format!("axis {axis} of its operands, {}, is as long for some lengths alone", facts.join(", "));
        Err(self.samples.fail(id, what))
    }

    /// The operator of a node.
    fn op_name(&self, id: NodeId) -> &'static str {
        self.samples.largest().node(id).op().expect("rules are of operators").name
    }

    /// A node that only moves elements: what holds behind the length of its operand holds for its value.
    fn follow(&mut self, id: NodeId) -> Vec<ValueId> {
        let (operand, value) = (self.operands(id)[0], id.output(0));
        for known in [&mut self.zero, &mut self.kept] {
            if operand.is_some_and(|operand| known.contains(&operand)) {
                known.insert(value);
            }
        }
        Vec::new()
    }

    fn elementwise(&mut self, id: NodeId, op: &str) -> Vec<ValueId> {
        let (operands, value) = (self.operands(id), id.output(0));
        let is_zero = |v: Option<ValueId>| {
            let number =
                |v| self.graph.as_constant(v).filter(|c| c.fact.shape.numel() == 1).and_then(|c| c.value().ok());
            v.is_some_and(|v| self.zero.contains(&v) || number(v).is_some_and(|t| t.to_f64()[0] == 0.0))
        };
        match op {
            "Cast" => return self.follow(id),
            "Where" if is_zero(operands[1]) && is_zero(operands[2]) => _ = self.zero.insert(value),
            _ => {}
        }
        Vec::new()
    }

    /// The elements in the same order under another shape: each ragged axis must stay an axis.
    fn regroup(&mut self, id: NodeId) -> Result<Vec<ValueId>> {
        self.only(id, &["shape"])?;
        let operands = self.operands(id);
        if self.op_name(id) == "Identity" {
            return Ok(vec![operands[0].expect("its input is required")]);
        }
        let before = self.ragged(id, 0)?;
        let after = self.samples.ragged(id.output(0))?;
        let outside = |graph: &Graph, value: ValueId, ragged: &[Ragged]| -> Vec<usize> {
            ragged.iter().map(|r| graph.fact(value).shape[..r.axis].iter().product()).collect()
        };
        let same = |graph: &Graph| {
            let source = graph.operands(id)[0].expect("its input is required");
            outside(graph, source, &before) == outside(graph, id.output(0), &after)
        };
        let more = |ragged: &[Ragged]| ragged.iter().map(|r| r.more).collect::<Vec<_>>();
        if more(&before) != more(&after) || !self.samples.graphs.iter().all(same) {
            let (from, to) =
                (self.graph.fact(operands[0].expect("its input is required")), &self.graph.node(id).outputs[0].fact);
            let what = format!("turns {from} into {to}: expected an axis that grows to stay an axis of its own");
            return Err(self.samples.fail(id, what));
        }
        Ok(self.follow(id))
    }

    /// The fixed part of a Slice, and a Gather along each axis where it begins at the length.
    fn slice(&mut self, id: NodeId) -> Result<Vec<ValueId>> {
        self.only(id, &["starts", "ends"])?;
        let mut spans = Vec::new();
        for graph in &self.samples.graphs {
            let found = graph.with_call(id, ops::spans).expect("rules are of operators");
            spans.push(found.map_err(|what| self.samples.fail(id, what))?);
        }
        let mut value = self.operands(id)[0].expect("its input is required");
        let (mut fixed, mut moving) = (Vec::new(), Vec::new());
        for (axis, span) in spans[0].iter().enumerate() {
            let starts: Vec<_> = spans.iter().map(|spans| spans[axis].start as i64).collect();
            let alike = spans.iter().all(|spans| spans[axis].len == span.len && spans[axis].step == span.step);
            match self.samples.line(&starts) {
                Some((0, _)) => fixed.push((axis, span.start, span.step, span.len)),
                Some((1, offset)) if alike => moving.push((axis, offset, span.step, span.len)),
                _ => {
                    let what = format!("where it begins along axis {axis}, {starts:?}, does not go up with the length");
                    return Err(self.samples.fail(id, what));
                }
            }
        }
        if moving.is_empty() {
            return Ok(if spans[0].iter().all(|span| span.start == 0 && span.step == 1) {
                self.follow(id)
            } else {
                Vec::new()
            });
        }
        let shape = self.graph.fact(value).shape.clone();
        fixed.retain(|&(axis, start, step, len)| (start, step, len) != (0, 1, shape[axis]));
        if !fixed.is_empty() {
            let ints = |of: &dyn Fn(&(usize, usize, i64, usize)) -> i64| fixed.iter().map(of).collect::<Vec<_>>();
            // An end before the first element stands behind the length of the axis, counted from its end.
            let end = |&(axis, start, step, len): &(usize, usize, i64, usize)| match start as i64 + step * len as i64 {
                end if end < 0 => end - shape[axis] as i64,
                end => end,
            };
            let attrs = Attrs::new().with("axes", ints(&|f| f.0 as i64)).with("starts", ints(&|f| f.1 as i64));
            let attrs = attrs.with("ends", ints(&end)).with("steps", ints(&|f| f.2));
            value = self.one(id, |b| Ok(b.value(value).op("Slice", &[], attrs)))?;
        }
        for (axis, offset, step, len) in moving {
            let start = self.length_plus(id, offset)?;
            value = self.one(id, |b| {
                let places = b.constant(DType::I64, [len], || (0..len).map(|i| (i as i64 * step) as f64).collect());
                Ok(b.value(value).gather(b.value(start) + places, axis as i64))
            })?;
        }
        Ok(vec![value])
    }

    /// Rows behind a ragged operand stand at a place that depends on the length. New rows of a cache are written into its state.
    fn concat(&mut self, id: NodeId) -> Result<Vec<ValueId>> {
        self.only(id, &[])?;
        let operands: Vec<_> = self.operands(id).into_iter().flatten().collect();
        let axis = self.call(id, |call| call.axis("axis", 0, call.shape(0)))?;
        if let [operand] = operands[..] {
            return Ok(vec![operand]);
        }
        if let Some(cache) = self.caches.get(&operands[0]).filter(|cache| cache.axis == axis && cache.updated.is_none())
        {
            let state = cache.state;
            let rest = &operands[1..];
            let new = if let [new] = *rest {
                new
            } else {
                self.one(id, |b| Ok(b.concat(&rest.iter().map(|&v| b.value(v)).collect::<Vec<_>>(), axis as i64)))?
            };
            let slots = 1..operands.len();
            for slot in slots {
                if !self.ragged(id, slot)?.is_empty() {
                    return Err(self.samples.fail(id, format!("operand {slot} grows, too, behind a state")));
                }
            }
            let written = self.write(id, state, new, axis, 0)?;
            self.caches.get_mut(&operands[0]).expect("it is there").updated = Some(written);
            self.kept.insert(written);
            return Ok(vec![written]);
        }
        let (mut ragged, mut place, mut later) = (false, 0, Vec::new());
        for (slot, &operand) in operands.iter().enumerate() {
            if ragged {
                later.push((operand, place - self.samples.lengths[0] as i64));
            }
            ragged |= self.ragged(id, slot)?.iter().any(|r| r.axis == axis);
            place += self.graph.fact(operand).shape[axis] as i64;
        }
        if later.is_empty() {
            return Ok(Vec::new());
        }
        let mut value = self.again(id, &operands.iter().copied().map(Some).collect::<Vec<_>>())?[0];
        for (operand, behind) in later {
            value = self.write(id, value, operand, axis, behind)?;
        }
        Ok(vec![value])
    }

    /// A cache with room for new rows is its state.
    fn pad(&mut self, id: NodeId) -> Result<Vec<ValueId>> {
        self.only(id, &["pads"])?;
        let (input, value) = (value_of(&self.operands(id), 0), id.output(0));
        let grows = |cache: &&Cache| self.graph.fact(value) == self.graph.fact(cache.state);
        let pads = self.call(id, |call| Ok(call.ints("pads")?.unwrap_or_default().into_owned()))?;
        let behind = |cache: &&Cache| pads.iter().enumerate().all(|(k, &n)| n == 0 || k == pads.len() / 2 + cache.axis);
        let filler =
            |call: &Call| Ok((call.str("mode", "constant")? == "constant", call.float("constant_value", 0.0)?));
        let (constant, filler) = self.call(id, filler)?;
        let behind_alone = constant && pads.iter().all(|&n| n == 0);
        match self.caches.get(&input).filter(grows).filter(behind) {
            Some(cache) => Ok(vec![cache.state]),
            // Rows up to the most that there can be.
            None if behind_alone && self.samples.ragged(value)?.is_empty() => {
                let along = self.ragged(id, 0)?;
                self.masked(id, input, &along, filler).map(|padded| vec![padded])
            }
            None => {
                Err(self.samples.fail(id, "pads what grows: expected a state, and room for its new rows behind it"))
            }
        }
    }

    /// Rows are written at places that the data name.
    fn scatter(&mut self, id: NodeId) -> Result<Vec<ValueId>> {
        self.only(id, &[])?;
        let (input, value) = (value_of(&self.operands(id), 0), id.output(0));
        if self.call(id, |call| Ok(call.str("mode", "linear")? != "linear"))? {
            return Err(self.samples.fail(id, "goes on at the start of what grows: expected mode 'linear'"));
        }
        if let Some(cache) = self.caches.values_mut().find(|cache| cache.state == input && cache.updated.is_none()) {
            cache.updated = Some(value);
            self.kept.insert(value);
        }
        Ok(Vec::new())
    }

    /// Writes rows over those of a value from the length plus a number on.
    fn write(&mut self, id: NodeId, value: ValueId, rows: ValueId, axis: usize, behind: i64) -> Result<ValueId> {
        let start = self.length_plus(id, behind)?;
        let shape = self.graph.fact(value).shape.clone();
        self.one(id, |b| {
            let (value, rows, start) = (b.value(value), b.value(rows), b.value(start));
            if axis > 0 {
                let at = start.expand(&[shape[0]]);
                return Ok(value.op("TensorScatter", &[rows, at], Attrs::new().with("axis", axis as i64)));
            }
            let at = start.expand(&[1]);
            let wide =
                value.unsqueeze(&[0]).op("TensorScatter", &[rows.unsqueeze(&[0]), at], Attrs::new().with("axis", 1));
            Ok(wide.squeeze(&[0]))
        })
    }

    /// Indices that count from the end of a ragged axis count from the length.
    fn gather(&mut self, id: NodeId) -> Result<Vec<ValueId>> {
        self.only(id, &[])?;
        let op = self.op_name(id);
        let mut operands = self.operands(id);
        let [data, indices] = [0, 1].map(|slot| operands[slot].expect("its inputs are required"));
        let tuples = op == "GatherND";
        let axis = if tuples {
            self.call(id, |call| call.int("batch_dims", 0))? as usize
        } else {
            self.call(id, |call| call.axis("axis", 0, call.shape(0)))?
        };
        let count = if tuples { *self.graph.fact(indices).shape.last().unwrap_or(&0) } else { 1 };
        let looked_up: Vec<_> =
            self.ragged(id, 0)?.into_iter().filter(|r| (axis..axis + count).contains(&r.axis)).collect();
        let constant = self.graph.as_constant(indices).map(|c| c.value().map(Tensor::to_i64)).transpose()?.flatten();
        let [along] = looked_up[..] else {
            if looked_up.is_empty() {
                let stays = self.kept.contains(&data);
                if stays && op == "Gather" {
                    self.kept.insert(id.output(0));
                }
                return Ok(Vec::new());
            }
            return Err(self.samples.fail(id, "looks up along two axes that grow"));
        };
        if constant.is_some_and(|at| at.iter().all(|&at| at >= 0)) {
            return Ok(Vec::new());
        }
        if tuples {
            return Err(self
                .samples
                .fail(id, "looks up along an axis that grows: expected constant indices of at least 0"));
        }
        let end = self.length_plus(id, along.more)?;
        let dtype = self.graph.fact(indices).dtype;
        operands[1] = Some(self.one(id, |b| {
            let indices = b.value(indices);
            Ok(indices.less(0.0).select(indices + b.value(end).cast(dtype), indices))
        })?);
        self.again(id, &operands)
    }

    /// Products over a ragged axis: one factor must be zero behind the length, the other finite.
    fn product(&mut self, id: NodeId) -> Result<Vec<ValueId>> {
        self.only(id, &[])?;
        let mut operands = self.operands(id);
        let inner = |slot: usize, rank: usize| if slot == 0 || rank == 1 { rank - 1 } else { rank - 2 };
        let mut along = [Vec::new(), Vec::new()];
        for (slot, along) in along.iter_mut().enumerate() {
            let rank = self.graph.fact(operands[slot].expect("a product has two operands")).shape.len();
            *along = self.ragged(id, slot)?;
            along.retain(|r| r.axis == inner(slot, rank));
        }
        if along[0].is_empty() {
            return Ok(Vec::new());
        }
        let known = [0, 1].map(|slot| value_of(&operands, slot));
        let is_zero = known.map(|value| self.zero.contains(&value));
        let is_kept = known.map(|value| self.kept.contains(&value));
        // If neither factor is zero, the left one becomes so. Then the other has to be finite.
        let left = if is_zero[1] { !is_zero[0] && !is_kept[0] } else { !is_zero[0] };
        let mask = [left, !is_zero[1] && !is_kept[1]];
        if mask == [false; 2] {
            return Ok(Vec::new());
        }
        for slot in (0..2).filter(|&slot| mask[slot]) {
            operands[slot] = Some(self.masked(id, known[slot], &along[slot], 0.0)?);
        }
        self.again(id, &operands)
    }

    /// A part above or below a diagonal that depends on the length.
    fn triangle(&mut self, id: NodeId) -> Result<Vec<ValueId>> {
        self.only(id, &["k"])?;
        let diagonals = self.samples.graphs.iter().map(|graph| {
            let k = graph.with_call(id, |call| call.int("k", 0)).expect("rules are of operators");
            k.map_err(|what| self.samples.fail(id, what))
        });
        let diagonals = diagonals.collect::<Result<Vec<_>>>()?;
        let upper = self.call(id, |call| call.int("upper", 1))? != 0;
        let value = self.operands(id)[0].expect("its input is required");
        let shape = self.graph.fact(value).shape.clone();
        let offset = match self.samples.line(&diagonals) {
            Some((0, _)) => return Ok(Vec::new()),
            Some((1, offset)) => offset,
            _ => {
                return Err(self
                    .samples
                    .fail(id, format!("its diagonal, {diagonals:?}, does not go up with the length")));
            }
        };
        let k = self.length_plus(id, offset)?;
        let made = self.one(id, |b| {
            let [.., rows, columns] = shape[..] else { return Err("expected a matrix".into()) };
            let diagonal = b.numbers(DType::I64, [columns], 0.0) - b.numbers(DType::I64, [rows, 1], 0.0);
            let inside = if upper { diagonal.greater_or_equal(b.value(k)) } else { diagonal.less_or_equal(b.value(k)) };
            Ok(inside.select(b.value(value), 0.0))
        })?;
        Ok(vec![made])
    }

    /// A sum of the elements so far reads nothing behind the length, unless it begins at the end.
    fn running_sum(&mut self, id: NodeId) -> Result<Vec<ValueId>> {
        if self.call(id, |call| call.int("reverse", 0))? != 0 {
            self.reduce(id)
        } else {
            self.only(id, &[]).map(|()| Vec::new())
        }
    }

    /// The axes that an operator reduces, and the element that does not change its result.
    fn reduced(&self, id: NodeId, op: &str) -> Result<(Vec<usize>, f64)> {
        let one = |default: i64| self.call(id, |call| Ok(vec![call.axis("axis", default, call.shape(0))?]));
        let (lowest, highest) = self.call(id, |call| Ok(call.dtype(0).range()))?;
        let axes = || self.call(id, |call| call.reduced_axes());
        Ok(match op {
            "Softmax" | "LogSoftmax" => (self.call(id, softmax_axes)?, f64::NEG_INFINITY),
            "ReduceMax" => (axes()?, lowest),
            "ReduceMin" => (axes()?, highest),
            "ReduceProd" => (axes()?, 1.0),
            "ReduceLogSumExp" => (axes()?, f64::NEG_INFINITY),
            "ArgMax" => (one(0)?, lowest),
            "ArgMin" => (one(0)?, highest),
            "TopK" if self.call(id, |call| call.int("largest", 1))? != 0 => (one(-1)?, lowest),
            "TopK" => (one(-1)?, highest),
            "CumSum" => (one(0)?, 0.0),
            _ => (axes()?, 0.0),
        })
    }

    /// The smallest elements along a ragged axis, which are infinite behind the length. What is not a number is larger, and so stands behind
    /// these elements:
    ///
    /// ```text
    /// numbers | infinite, behind the length | not numbers
    /// ```
    fn smallest(&mut self, id: NodeId, masked: ValueId, Ragged { axis, more }: Ragged) -> Result<Vec<ValueId>> {
        let end = self.length_plus(id, more)?;
        let (n, rank) = (self.graph.fact(masked).shape[axis], self.graph.fact(masked).shape.len());
        let k = self.graph.fact(id.output(0)).shape[axis];
        let attrs = self.samples.largest().node(id).attrs.clone().with("K", n as i64);
        self.build(id, |b| {
            let (masked, end) = (b.value(masked), b.value(end));
            let all: [Var; 2] = b.outputs("TopK", &[masked], attrs);
            let others = masked.op("IsNaN", &[], Attrs::new()).cast(DType::I64).reduce_sum(&[axis as i64], true);
            let mut along = vec![1; rank - axis];
            along[0] = k;
            let places = b.numbers(DType::I64, along, 0.0);
            let behind = (places + n as f64 - end).min(n as f64 - 1.0);
            let at = places.less(end - others).select(places, behind);
            Ok(all.map(|found| found.op("GatherElements", &[at], Attrs::new().with("axis", axis as i64))).to_vec())
        })
    }

    /// A reduction over a ragged axis takes an element behind the length that does not change its result.
    fn reduce(&mut self, id: NodeId) -> Result<Vec<ValueId>> {
        self.only(id, &[])?;
        let op = self.op_name(id);
        if self.call(id, |call| call.int("select_last_index", 0))? != 0 {
            let what = "it selects the last of equal elements, as those behind the length may be";
            return Err(self.samples.fail(id, what));
        }
        let (axes, element) = self.reduced(id, op)?;
        let mut along = self.ragged(id, 0)?;
        let whole = along.iter().all(|r| axes.contains(&r.axis));
        along.retain(|r| axes.contains(&r.axis));
        if along.is_empty() {
            return Ok(Vec::new());
        }
        let mut operands = self.operands(id);
        let value = value_of(&operands, 0);
        let masked = self.masked(id, value, &along, element)?;
        operands[0] = Some(masked);
        if op == "TopK" && self.call(id, |call| Ok(call.int("largest", 1)? == 0 && call.dtype(0).is_float()))? {
            return self.smallest(id, masked, along[0]);
        }
        if op != "ReduceMean" {
            let made = self.again(id, &operands)?;
            if op == "Softmax" && whole {
                self.zero.insert(made[0]);
            }
            return Ok(made);
        }
        let Fact { dtype, shape } = self.graph.fact(masked).clone();
        let fixed: usize =
            axes.iter().filter(|axis| along.iter().all(|r| r.axis != **axis)).map(|&axis| shape[axis]).product();
        let ends = along.iter().map(|r| self.length_plus(id, r.more)).collect::<Result<Vec<_>>>()?;
        let attrs = self.samples.largest().node(id).attrs.clone();
        let mean = self.one(id, |b| {
            let count = ends.iter().fold(b.scalar(fixed as f64, DType::I64), |count, &end| count * b.value(end));
            Ok(b.value(masked).op("ReduceSum", &[], attrs) / count.cast(dtype))
        })?;
        Ok(vec![mean])
    }
}

fn value_of(operands: &[Option<ValueId>], slot: usize) -> ValueId {
    operands[slot].expect("its inputs are required")
}
