//! Cuts a graph into stages: along the axis `stage` of a mesh each rank has other nodes, and passes on what later stages read.
//!
//! ```text
//! stage 0   table, layers 0..5   --Send--.                        .--Recv-- gradient --> backward of layers 5..0
//! stage 1                                '--Recv--> layers 6..11, loss, backward of layers 11..6 --Send--'
//! ```
//!
//! Cuts lie before weights, so that stages have about as many bytes of them, where the fewest bytes are read on the other side. A node of the
//! forward computation is in the first stage that has all of its weights and what it reads; one of the backward computation in that of the node
//! whose gradient it is; and others, such as updates of states, where most of what they read is.
//!
//! What passes between stages keeps one order, that of the whole graph: each [`Send`](ops::SEND) and [`Recv`](ops::RECV) reads what the one
//! before gave. So no two stages ever wait for each other.

use super::{Along, PLACE};
use crate::dtype::DType;
use crate::error::{Error, Result, ensure};
use crate::graph::{GRADIENT, Graph, Kind, State};
use crate::op::{Attrs, Fact, NodeId, ValueId};
use crate::ops;
use std::collections::{HashMap, HashSet};

/// The state that ends the chain of what a stage passes on: without it nobody would read the last mark.
const PASSED: &str = "mesh/passed";

/// Leaves of a graph the nodes of one stage.
///
/// # Errors
/// When there are not as many weights as stages.
pub(super) fn run(graph: &mut Graph, along: &Along) -> Result<()> {
    let stages = Stages::of(graph, along)?;
    stages.cut(graph, along)
}

/// Where the nodes are. Constants, inputs and what is computed of these alone are in all stages, and not here.
struct Stages {
    of: HashMap<NodeId, usize>,
    order: Vec<NodeId>,
}

impl Stages {
    fn of(graph: &Graph, along: &Along) -> Result<Stages> {
        let order = graph.order()?;
        let is_forward = |id: &NodeId| graph.node(*id).op().is_some() && !graph.is_backward(*id);
        let (levels, weights) = levels(graph, order.iter().copied().filter(is_forward));
        let cuts = cuts(graph, &levels, &weights, along)?;
        let stage = |level: usize| cuts.iter().filter(|&&cut| level >= cut).count();
        let mut stages = Stages { of: HashMap::new(), order };
        let mut named: HashMap<&str, usize> = HashMap::new();
        for &id in &stages.order {
            if let Some(&level) = levels.get(&id) {
                stages.of.insert(id, stage(level));
                named.insert(&graph.node(id).name, stage(level));
            }
        }
        stages.follow_readers(graph, is_forward);
        stages.keep_beside_weights(graph);
        for at in 0..stages.order.len() {
            let id = stages.order[at];
            let node = graph.node(id);
            if node.op().is_none() {
                continue;
            }
            let own = match stages.of.get(&id) {
                Some(&stage) => Some(stage),
                None => gradient_of(&named, &node.name).or_else(|| stages.by_operands(graph, id)),
            };
            let Some(own) = own else { continue };
            stages.of.insert(id, own);
            stages.take_states(graph, id, own);
        }
        for state in graph.states() {
            let update = state.update.and_then(|update| stages.of.get(&update.node).copied());
            if !is_everywhere(graph, state.value) {
                stages.of.entry(state.value.node).or_insert(update.unwrap_or(0));
            }
        }
        Ok(stages)
    }

    /// What is computed of states that are no weights alone, such as running statistics, is in the first stage that reads it.
    fn follow_readers(&mut self, graph: &Graph, is_forward: impl Fn(&NodeId) -> bool) {
        let mut of_states: HashSet<NodeId> = HashSet::new();
        for id in self.order.iter().filter(|id| is_forward(id) && !self.of.contains_key(id)) {
            let is_of_states = |value: &ValueId| match graph.node(value.node).kind {
                Kind::State(_) => !is_everywhere(graph, *value),
                _ => of_states.contains(&value.node),
            };
            if graph.operands(*id).iter().flatten().any(is_of_states) {
                of_states.insert(*id);
            }
        }
        for at in (0..self.order.len()).rev().filter(|&at| of_states.contains(&self.order[at])) {
            let id = self.order[at];
            let outputs = (0..graph.node(id).outputs.len() as u32).map(|port| ValueId { node: id, port });
            let readers = outputs.flat_map(|value| graph.users(value));
            let first = readers.filter_map(|reader| self.of.get(&reader).copied()).min();
            self.of.insert(id, first.unwrap_or(0));
        }
    }

    /// A state is where it is read first.
    fn take_states(&mut self, graph: &Graph, id: NodeId, own: usize) {
        for value in graph.operands(id).into_iter().flatten() {
            if matches!(graph.node(value.node).kind, Kind::State(_)) && !is_everywhere(graph, value) {
                self.of.entry(value.node).or_insert(own);
            }
        }
    }

    /// Puts the states of the forward computation in their stages, and with each weight what a training keeps beside it: `optimizer/mean/WEIGHT`,
    /// `accumulated/WEIGHT`.
    fn keep_beside_weights(&mut self, graph: &Graph) {
        let forward: Vec<_> = self.order.iter().filter_map(|id| Some((*id, *self.of.get(id)?))).collect();
        forward.into_iter().for_each(|(id, stage)| self.take_states(graph, id, stage));
        let states = || graph.states().iter().map(|state| (graph.value_name(state.value), state.value.node));
        let homes: HashMap<&str, usize> =
            states().filter_map(|(name, node)| Some((name, *self.of.get(&node)?))).collect();
        for (name, node) in states() {
            let mut behind = name;
            while let (false, Some((_, rest))) = (self.of.contains_key(&node), behind.split_once('/')) {
                if let Some(&home) = homes.get(rest) {
                    self.of.insert(node, home);
                }
                behind = rest;
            }
        }
    }

    /// The stage of most of what a node reads. `None` if all of that is in all stages.
    fn by_operands(&self, graph: &Graph, id: NodeId) -> Option<usize> {
        let operands = graph.operands(id);
        let is_state = |value: &ValueId| matches!(graph.node(value.node).kind, Kind::State(_));
        let reads_state = operands.iter().flatten().any(|value| is_state(value) && !is_everywhere(graph, *value));
        let known = operands.iter().flatten().filter_map(|value| {
            let stage = *self.of.get(&value.node)?;
            Some((graph.fact(*value).bytes(), stage))
        });
        // A state that nobody has read yet, and what is made of it alone, such as the number of the update, is in the first stage.
        known.max().map(|(_, stage)| stage).or_else(|| reads_state.then_some(0))
    }

    /// The stage that has a value, unless all have it.
    fn stage(&self, value: ValueId) -> Option<usize> {
        self.of.get(&value.node).copied()
    }

    fn cut(self, graph: &mut Graph, along: &Along) -> Result<()> {
        let own = along.place;
        let passes = self.passes(graph, along);
        let attrs = |place: usize| {
            let attrs = Attrs::new().with("mesh_axis", along.name).with("ranks", along.ranks as i64);
            attrs.with("place", place as i64)
        };
        let row = |name: &str| ops::find(name).expect("the table has the row");
        let mark = graph.state(PASSED, Fact::new(DType::I32, ops::MARK), None);
        let (mut after, mut sent, mut got) = (mark, None, HashMap::new());
        for Pass { value, from, to, reader } in passes {
            let name = graph.value_name(value).to_owned();
            if from == own {
                graph.insert_at(value.node);
                let reads = [Some(value), Some(after)];
                let send = graph.add(row(ops::SEND), &format!("{name}/to {to}"), &reads, attrs(to), &[])?;
                (after, sent) = (send.output(0), Some(send.output(0)));
            } else if to == own {
                match reader {
                    Some(reader) => graph.insert_at(reader),
                    None => graph.append(),
                }
                let Fact { dtype, shape } = graph.fact(value).clone();
                let shape: Vec<i64> = shape.iter().map(|&extent| extent as i64).collect();
                let attrs = attrs(from).with("shape", shape).with("to", dtype.onnx());
                let receive = graph.add(row(ops::RECV), &format!("{name}/from {from}"), &[Some(after)], attrs, &[])?;
                after = receive.output(0);
                got.insert(value, after);
            }
        }
        let here = |value: ValueId| got.get(&value).copied().unwrap_or(value);
        for &id in self.order.iter().filter(|id| self.of.get(id) == Some(&own)) {
            let operands = graph.operands(id);
            let read: Vec<_> = operands.iter().map(|operand| operand.map(here)).collect();
            if read != operands {
                graph.read(id, &read);
            }
        }
        for (at, value) in graph.outputs().iter().map(|(_, value)| *value).enumerate().collect::<Vec<_>>() {
            graph.set_output(at, here(value));
        }
        for state in graph.states().to_vec() {
            match (self.of.get(&state.value.node), state.update) {
                (Some(&stage), _) if stage != own => graph.withdraw_state(state.value),
                (_, Some(update)) => graph.set_update(state.value, here(update)),
                _ => {}
            }
        }
        match sent {
            Some(sent) => graph.update(mark, sent).map_err(Error::graph)?,
            None if after == mark => graph.withdraw_state(mark),
            // It has only received: nobody changes the mark.
            None => {}
        }
        Ok(())
    }

    /// What passes between stages, in the order in which it is made.
    fn passes(&self, graph: &Graph, along: &Along) -> Vec<Pass> {
        let mut passes: HashMap<(ValueId, usize), Option<NodeId>> = HashMap::new();
        for &id in &self.order {
            let Some(to) = self.of.get(&id).copied().filter(|_| graph.node(id).op().is_some()) else { continue };
            for value in graph.operands(id).into_iter().flatten() {
                if self.stage(value).is_some_and(|from| from != to) {
                    passes.entry((value, to)).or_insert(Some(id));
                }
            }
        }
        for (_, value) in graph.outputs() {
            let Some(from) = self.stage(*value) else { continue };
            (0..along.ranks).filter(|&to| to != from).for_each(|to| _ = passes.entry((*value, to)).or_insert(None));
        }
        for state in graph.states() {
            let (Some(update), Some(&to)) = (state.update, self.of.get(&state.value.node)) else { continue };
            if self.stage(update).is_some_and(|from| from != to) {
                passes.entry((update, to)).or_insert(Some(update.node));
            }
        }
        let at: HashMap<NodeId, usize> = self.order.iter().enumerate().map(|(at, &id)| (id, at)).collect();
        let mut passes: Vec<Pass> = passes
            .into_iter()
            .map(|((value, to), reader)| Pass { value, from: self.of[&value.node], to, reader })
            .collect();
        passes.sort_by_key(|pass| (at[&pass.value.node], pass.value.port, pass.to));
        passes
    }
}

/// A value that one stage has and another reads.
struct Pass {
    value: ValueId,
    from: usize,
    to: usize,
    /// The first node there that reads it; none if it is an output.
    reader: Option<NodeId>,
}

/// True if each stage has a value by itself.
fn is_everywhere(graph: &Graph, value: ValueId) -> bool {
    match graph.node(value.node).kind {
        Kind::Op(_) => false,
        Kind::State(_) => graph.value_name(value).starts_with(PLACE),
        _ => true,
    }
}

/// The states of two dims or more that a training has as weights: all of its programs have them, and are cut alike.
fn trained(graph: &Graph) -> HashSet<ValueId> {
    let is_trained = |state: &&State| graph.has_backward() || state.update.is_none();
    let weights = graph.states().iter().filter(is_trained).map(|state| state.value);
    weights.filter(|&value| graph.fact(value).shape.len() >= 2).collect()
}

/// Per node, the number of weights that are read up to it or what it reads; and the weights, in the order in which they are read. Nodes of
/// what is everywhere have none: each stage that needs them computes them.
fn levels(graph: &Graph, nodes: impl Iterator<Item = NodeId>) -> (HashMap<NodeId, usize>, Vec<ValueId>) {
    let (mut levels, mut weights, mut number) = (HashMap::new(), Vec::new(), HashMap::new());
    let trained = trained(graph);
    let is_weight = |value: ValueId| match trained.is_empty() {
        true => graph.as_constant(value).is_some() && graph.fact(value).shape.len() >= 2,
        false => trained.contains(&value),
    };
    for id in nodes {
        let mut level = None;
        for value in graph.operands(id).into_iter().flatten() {
            let own = if is_weight(value) {
                let next = weights.len() + 1;
                let at = *number.entry(value).or_insert(next);
                if at == next {
                    weights.push(value);
                }
                // A weight that others have read before stays with the first of them, and does not hold its readers back.
                Some(if at == next { at } else { 0 })
            } else if matches!(graph.node(value.node).kind, Kind::Op(_)) {
                levels.get(&value.node).copied()
            } else {
                None
            };
            level = level.max(own);
        }
        if let Some(level) = level {
            levels.insert(id, level);
        }
    }
    (levels, weights)
}

/// The levels at which stages begin, but for the first.
fn cuts(graph: &Graph, levels: &HashMap<NodeId, usize>, weights: &[ValueId], along: &Along) -> Result<Vec<usize>> {
    let (stages, count) = (along.ranks, weights.len());
    ensure(count >= stages, || {
        let found = format!("{stages} stages: expected as many weights of two dims or more, found {count}");
        Error::usage(format!("mesh axis '{}': {found}", along.name))
    })?;
    // Bytes of the weights before each level, and those that cross it.
    let mut before = vec![0u64; count + 2];
    for (at, &weight) in weights.iter().enumerate() {
        before[at + 2] = before[at + 1] + graph.fact(weight).bytes() as u64;
    }
    let mut crossing = vec![0i128; count + 2];
    for (&id, &level) in levels {
        for port in 0..graph.node(id).outputs.len() {
            let value = id.output(port);
            let last = graph.users(value).into_iter().filter_map(|user| levels.get(&user)).max();
            if let Some(&last) = last.filter(|&&last| last > level) {
                crossing[level + 1] += graph.fact(value).bytes() as i128;
                crossing[last + 1] -= graph.fact(value).bytes() as i128;
            }
        }
    }
    for level in 1..crossing.len() {
        crossing[level] += crossing[level - 1];
    }
    let total = before[count + 1];
    let mut cuts: Vec<usize> = Vec::with_capacity(stages - 1);
    for stage in 1..stages {
        let middle = total as f64 * stage as f64 / stages as f64;
        let reach = total as f64 / stages as f64 / 4.0;
        // Each stage has a weight, and leaves one for each of the next.
        let first = cuts.last().map_or(2, |&cut| cut + 1);
        let free = first..=count - (stages - stage) + 1;
        let off = |level: usize| (before[level] as f64 - middle).abs();
        let near: Vec<usize> = free.clone().filter(|&level| off(level) <= reach).collect();
        let cut = match near.is_empty() {
            false => near.into_iter().min_by(|&a, &b| crossing[a].cmp(&crossing[b]).then(off(a).total_cmp(&off(b)))),
            true => free.min_by(|&a, &b| off(a).total_cmp(&off(b))),
        };
        cuts.push(cut.expect("there are as many weights as stages"));
    }
    Ok(cuts)
}

/// The stage of the node whose gradient a node of this name is of.
fn gradient_of(named: &HashMap<&str, usize>, name: &str) -> Option<usize> {
    let mut name = name.strip_prefix(GRADIENT)?;
    loop {
        if let Some(&stage) = named.get(name) {
            return Some(stage);
        }
        name = name.rsplit_once('/')?.0;
    }
}
