//! Computes a region of the graph in chunks along an axis, one chunk after another. Only a chunk of its values is live at a time.
//!
//! ```text
//! x [32, ..] --> nodes --> y [32, ..]   becomes   x[..16] --> nodes --> y[..16] --.
//!                                                                                 Concat --> y
//!                                                 x[16..] --> nodes --> y[16..] --'
//! ```
//!
//! A node's row says if its chunks make up the whole ([`Call::part`](crate::op::Call::part)), so every choice of nodes is right. The choice is a matter of memory
//! alone: the region has all nodes that run while at least so many bytes are live. Plans are asked for that
//! threshold. A chunk of a whole value is a slice of it; a whole value of chunks is their concatenation. Along the outermost axis neither
//! moves a byte. Constants are shared.

use super::{Groups, Prepared};
use crate::error::{Error, Result};
use crate::graph::{Graph, Kind};
use crate::op::{Attrs, Lower, NodeId, Part, ValueId};
use crate::ops;
use crate::shape::Shape;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Range;

/// The most nodes that a graph may grow to: a larger one would take long to plan.
const MOST_NODES: usize = 1 << 20;

/// Computes nodes in `chunks` chunks, if they can be and run while at least `least` bytes are live ([`levels`] lists the useful values).
/// The axis is the inputs' outermost one with several elements: the batch, or the next axis if the batch is 1. There are at most as many
/// chunks as that axis has elements. This runs behind the pipeline, and kernels keep their nodes.
///
/// # Errors
/// [`Error::Usage`] when no node can be computed in chunks, the axis has fewer elements than the followed choices ask for, or the graph
/// would become too large.
pub fn run(whole: &mut Prepared, chunks: usize, least: u64) -> Result<()> {
    if chunks < 2 {
        return Ok(());
    }
    let order = whole.graph.order()?;
    let (region, chunks) = chosen(whole, &order, chunks, least)?.ok_or_else(|| nothing(&whole.graph))?;
    let nodes = region.nodes.len().saturating_mul(chunks.len()).saturating_add(order.len());
    if nodes > MOST_NODES {
        let (of, chunks) = (region.nodes.len(), chunks.len());
        return Err(Error::usage(format!(
            "{chunks} chunks of {of} operators: expected a graph of at most {MOST_NODES} nodes, found {nodes}; ask for fewer chunks"
        )));
    }
    tracing::debug!(units = region.units, nodes = region.nodes.len(), chunks = chunks.len(), least, "in chunks");
    *whole = Chunking::new(whole, &region, chunks).build(&order)?;
    whole.graph.verify()
}

/// The largest number of chunks, and the bytes that are live while each node of the region runs as a whole, in the order of the file. Each
/// figure stands once, the smallest first.
///
/// # Errors
/// [`Error::Usage`] when nothing can be computed in chunks.
pub fn levels(whole: &Prepared) -> Result<(usize, Vec<u64>)> {
    let Prepared { graph, .. } = whole;
    let order = graph.order()?;
    let (_, region) = largest(whole, &order).ok_or_else(|| nothing(graph))?;
    let live = live(whole, &order);
    let levels: BTreeSet<u64> = region.nodes.keys().filter(|&&id| !graph.is_view(id)).map(|id| live[id]).collect();
    Ok((region.units, levels.into_iter().collect()))
}

fn nothing(graph: &Graph) -> Error {
    let inputs = graph.inputs().iter().map(|&v| format!("'{}' {}", graph.value_name(v), graph.fact(v)));
    let inputs = inputs.collect::<Vec<_>>().join(", ");
    Error::usage(format!(
        "nothing can be computed in chunks: expected an input of several rows that do not depend on each other, such as a batch of 2 or more, \
         found {inputs}; bind a larger batch, or do without chunks"
    ))
}

/// The region, and the units of each chunk.
fn chosen(
    whole: &Prepared,
    order: &[NodeId],
    chunks: usize,
    least: u64,
) -> Result<Option<(Region, Vec<Range<usize>>)>> {
    let Prepared { graph, groups, decisions, .. } = whole;
    let mut own = largest(whole, order);
    if let Some((_, region)) = &mut own {
        region.keep_live(whole, order, least);
    }
    let mut along = None;
    for (input, &value) in graph.inputs().iter().enumerate() {
        let shape = &graph.fact(value).shape;
        let axis = own.as_ref().filter(|(first, _)| *first == input).and_then(|_| outermost(shape));
        let axis =
            decisions.choose("chunk along", value.node, axis.map(|axis| axis as u32), |k| (k as usize) < shape.len());
        along = along.or(axis.map(|axis| (value, shape[axis as usize])));
    }
    let Some((input, units)) = along else { return Ok(None) };
    let count =
        decisions.choose("chunks", input.node, Some(chunks.min(units) as u32), |_| true).map_or(0, |n| n as usize);
    if units < count {
        let (name, fact) = (graph.value_name(input), graph.fact(input));
        return Err(Error::usage(format!(
            "input '{name}' ({fact}): expected at least {count} elements for {count} chunks"
        )));
    }
    let mut region = Region { units, nodes: BTreeMap::new() };
    for &id in order.iter().filter(|&&id| graph.node(id).op().is_some()) {
        let axis = own.as_ref().and_then(|(_, region)| Some(region.nodes.get(&id)?.axis as u32));
        let mapped = |axis: u32| Mapped::new(graph, id, axis as usize, units);
        let axis = decisions.choose("in chunks", id, axis, |axis| mapped(axis).is_some());
        region.nodes.extend(axis.and_then(mapped).map(|mapped| (id, mapped)));
    }
    // A node that may not be in chunks keeps its kernel whole.
    region.keep_groups(graph, groups, order);
    // The first chunks have one unit more if the number of chunks does not divide that of the units.
    let start = |chunk: usize| chunk * (units / count) + chunk.min(units % count);
    Ok(Some((region, (0..count).map(|chunk| start(chunk)..start(chunk + 1)).collect())))
}

/// The region in which most bytes are computed, and the number of the first input along whose axis it is chunked.
fn largest(whole: &Prepared, order: &[NodeId]) -> Option<(usize, Region)> {
    let Prepared { graph, groups, .. } = whole;
    let mut best: Option<(u64, usize, Region)> = None;
    let mut tried = BTreeSet::new();
    for (input, &value) in graph.inputs().iter().enumerate() {
        let shape = &graph.fact(value).shape;
        let Some(units) = outermost(shape).map(|axis| shape[axis]).filter(|&units| tried.insert(units)) else {
            continue;
        };
        let region = Region::new(graph, groups, order, units);
        let bytes = region.bytes(graph);
        if bytes > best.as_ref().map_or(0, |(bytes, ..)| *bytes) {
            best = Some((bytes, input, region));
        }
    }
    best.map(|(_, input, region)| (input, region))
}

/// The outermost axis with more than one element.
fn outermost(shape: &Shape) -> Option<usize> {
    shape.iter().position(|&extent| extent != 1).filter(|&axis| shape[axis] > 1)
}

/// How a node is computed in chunks.
struct Mapped {
    /// The axis of its output.
    axis: usize,
    part: Part,
}

impl Mapped {
    /// The way to compute a node along this axis, which has so many units; `None` if the node's row has no way.
    fn new(graph: &Graph, id: NodeId, axis: usize, units: usize) -> Option<Mapped> {
        let part = graph.with_call(id, |call| call.part(axis, units))??;
        Some(Mapped { axis, part })
    }
}

/// Nodes that are computed in chunks.
struct Region {
    /// The number of equal units in each of the nodes' axes; a chunk has some of them.
    units: usize,
    nodes: BTreeMap<NodeId, Mapped>,
}

impl Region {
    /// The region of all nodes that can be computed in chunks of inputs whose outermost axes have so many elements.
    fn new(graph: &Graph, groups: &Groups, order: &[NodeId], units: usize) -> Region {
        let mut region = Region { units, nodes: BTreeMap::new() };
        let axis = |&v: &ValueId| {
            let shape = &graph.fact(v).shape;
            outermost(shape).filter(|&axis| shape[axis] == units).map(|axis| (v, axis))
        };
        let inputs = graph.inputs().iter().filter_map(axis).collect();
        for &id in order {
            let found = region.mapped(graph, id, &inputs);
            region.nodes.extend(found.map(|mapped| (id, mapped)));
        }
        region.keep_groups(graph, groups, order);
        region.add_sources(graph, order);
        region.keep_groups(graph, groups, order);
        region.release_views(graph, order);
        region
    }

    /// The way to compute a node in chunks. It is the one in which most of the node's reads are in chunks already.
    fn mapped(&self, graph: &Graph, id: NodeId, inputs: &HashMap<ValueId, usize>) -> Option<Mapped> {
        let operands = graph.operands(id);
        let rank = graph.node(id).outputs.first()?.fact.shape.len();
        let axis_of = |v: ValueId| inputs.get(&v).copied().or_else(|| Some(self.nodes.get(&v.node)?.axis));
        let ways = (0..rank).filter_map(|axis| {
            let mapped = Mapped::new(graph, id, axis, self.units)?;
            let reads = operands.iter().zip(&mapped.part.inputs).filter_map(|(v, along)| Some(((*v)?, (*along)?)));
            let bytes =
                reads.filter(|&(v, along)| axis_of(v) == Some(along)).map(|(v, _)| bytes(graph, v)).sum::<u64>();
            (bytes > 0).then_some((bytes, mapped))
        });
        ways.max_by_key(|(bytes, mapped)| (*bytes, Reverse(mapped.axis))).map(|(_, mapped)| mapped)
    }

    /// The values that a node reads, slot by slot, each with true if the node reads existing chunks of it.
    fn reads(&self, graph: &Graph, id: NodeId) -> impl Iterator<Item = (ValueId, bool)> {
        let along = self.nodes.get(&id).map(|mapped| &mapped.part.inputs);
        let read = move |(slot, value): (usize, Option<ValueId>)| {
            let value = value?;
            let own = self.nodes.get(&value.node).map(|mapped| mapped.axis);
            Some((value, own.is_some() && along.is_some_and(|along| along[slot] == own)))
        };
        graph.operands(id).into_iter().enumerate().filter_map(read)
    }

    /// Removes kernels of which some nodes cannot be computed in chunks, or need more than a chunk of another of their nodes.
    fn keep_groups(&mut self, graph: &Graph, groups: &Groups, order: &[NodeId]) {
        let group = |id: NodeId| groups.number(id);
        let broken = |&&id: &&NodeId| {
            !self.nodes.contains_key(&id)
                || self.reads(graph, id).any(|(v, chunked)| group(v.node) == group(id) && !chunked)
        };
        let grouped = order.iter().filter(|&&id| group(id).is_some());
        let broken: BTreeSet<_> = grouped.filter(broken).map(|&id| group(id)).collect();
        self.nodes.retain(|&id, _| !broken.contains(&group(id)));
    }

    /// Removes nodes that run while fewer bytes are live.
    fn keep_live(&mut self, whole: &Prepared, order: &[NodeId], least: u64) {
        let Prepared { graph, groups, .. } = whole;
        let live = live(whole, order);
        let alone = |id| graph.is_view(id) && groups.number(id).is_none();
        self.nodes.retain(|&id, _| alone(id) || live[&id] >= least);
        self.release_views(graph, order);
    }

    /// Adds nodes that depend on no chunk of an input but are read in chunks only: embeddings of constants, masks.
    fn add_sources(&mut self, graph: &Graph, order: &[NodeId]) {
        // Per value, the one axis along which all readers read chunks of it.
        let mut axes: HashMap<ValueId, Option<usize>> = graph.results().map(|v| (v, None)).collect();
        for &id in order.iter().rev() {
            let axis = axes.get(&id.output(0)).copied().flatten();
            if let (Some(axis), false) = (axis, self.nodes.contains_key(&id)) {
                let found = Mapped::new(graph, id, axis, self.units);
                self.nodes.extend(found.map(|mapped| (id, mapped)));
            }
            let along = self.nodes.get(&id).map(|mapped| &mapped.part.inputs);
            for (slot, value) in graph.operands(id).into_iter().enumerate() {
                let axis = along.and_then(|along| along[slot]);
                let known = value.map(|value| axes.entry(value).or_insert(axis));
                known.into_iter().filter(|known| **known != axis).for_each(|known| *known = None);
            }
        }
    }

    /// Removes views that are only needed as a whole and cost nothing that way.
    fn release_views(&mut self, graph: &Graph, order: &[NodeId]) {
        // Per value, the number of its reads in chunks, and of those as a whole.
        let mut readers: HashMap<ValueId, [usize; 2]> = HashMap::new();
        for &id in order {
            self.reads(graph, id).for_each(|(v, chunked)| readers.entry(v).or_default()[usize::from(!chunked)] += 1);
        }
        graph.results().for_each(|v| readers.entry(v).or_default()[1] += 1);
        for &id in order.iter().rev() {
            let value = id.output(0);
            if !self.nodes.contains_key(&id) || !graph.is_view(id) {
                continue;
            }
            let (source, chunked) = self.reads(graph, id).next().expect("a view has a source");
            let wanted = readers.get(&value).is_none_or(|[chunked, _]| *chunked == 0);
            let there = !self.nodes.contains_key(&source.node) || readers[&source][1] > 0;
            if wanted && (there || bytes(graph, source) <= bytes(graph, value)) {
                self.nodes.remove(&id);
                let [chunks, whole] = readers.get_mut(&source).expect("the view reads it");
                *chunks -= usize::from(chunked);
                *whole += usize::from(chunked);
            }
        }
    }

    /// Bytes of the values that are computed in chunks.
    fn bytes(&self, graph: &Graph) -> u64 {
        self.nodes.keys().filter(|&&id| !graph.is_view(id)).map(|&node| bytes(graph, node.output(0))).sum()
    }

    /// Per node, the number of its stretch of chunks, counted from the last. A node that needs a whole value of chunks waits for the
    /// stretch that makes it. Every node joins the first stretch that needs it, so that few other chunks are live meanwhile.
    fn stretches(&self, graph: &Graph, order: &[NodeId]) -> HashMap<NodeId, usize> {
        let mut stretches: HashMap<NodeId, usize> = order.iter().map(|&id| (id, 0)).collect();
        for &id in order.iter().rev() {
            for (value, chunked) in self.reads(graph, id) {
                let whole = self.nodes.contains_key(&value.node) && !chunked;
                let before = stretches[&id] + usize::from(whole);
                let own = stretches.get_mut(&value.node).expect("every node is in the order");
                *own = before.max(*own);
            }
        }
        stretches
    }
}

fn bytes(graph: &Graph, value: ValueId) -> u64 {
    let fact = graph.fact(value);
    (fact.shape.numel() * fact.dtype.size()) as u64
}

/// Per node, the bytes that are live while its kernel runs, one kernel after another in the order of the file. Only concatenations count as
/// written in place.
fn live(Prepared { graph, groups, .. }: &Prepared, order: &[NodeId]) -> HashMap<NodeId, u64> {
    // A kernel of several nodes runs where the last of them stands.
    let group = |id: NodeId| groups.number(id);
    let ends: HashMap<usize, usize> = order.iter().enumerate().filter_map(|(at, &id)| Some((group(id)?, at))).collect();
    let runs = |id: NodeId, at: usize| group(id).map_or(at, |group| ends[&group]);
    // Per value, the last kernel that reads it or a view or concatenation of it.
    let mut last: HashMap<ValueId, usize> = graph.results().map(|v| (v, order.len())).collect();
    let mut change = vec![0i128; order.len() + 2];
    for (at, &id) in order.iter().enumerate().rev() {
        let (runs, node) = (runs(id, at), graph.node(id));
        let stands = node.op().is_some_and(|op| matches!(op.lower, Lower::View(_) | Lower::Concat));
        let until = last.get(&id.output(0)).copied().filter(|_| stands).unwrap_or(runs);
        for value in graph.operands(id).into_iter().flatten() {
            let last = last.entry(value).or_insert(until);
            *last = until.max(*last);
        }
        if stands || matches!(node.kind, Kind::Constant(_) | Kind::State(_)) {
            continue;
        }
        let from = if matches!(node.kind, Kind::Input) { 0 } else { runs };
        for value in (0..node.outputs.len() as u32).map(|port| ValueId { node: id, port }) {
            // A value that only its own kernel reads is never stored.
            let until = last.get(&value).copied().filter(|&until| until > runs || group(id).is_none());
            if let Some(until) = until {
                change[from] += i128::from(bytes(graph, value));
                change[until + 1] -= i128::from(bytes(graph, value));
            }
        }
    }
    let mut now = 0;
    let sums = change.into_iter().map(|change| {
        now += change;
        u64::try_from(now).unwrap_or(u64::MAX)
    });
    let sums: Vec<u64> = sums.collect();
    order.iter().enumerate().map(|(at, &id)| (id, sums[runs(id, at)])).collect()
}

/// The graph with a region in chunks, while it grows.
struct Chunking<'a> {
    prepared: &'a Prepared,
    from: &'a Graph,
    region: &'a Region,
    /// The units of each chunk.
    chunks: Vec<Range<usize>>,
    to: Graph,
    /// From each value to its whole in the new graph.
    whole: HashMap<ValueId, ValueId>,
    /// From each value, axis and chunk to that chunk in the new graph.
    parts: HashMap<(ValueId, usize, usize), ValueId>,
    /// Per chunk of a group, or group as a whole, the new node of each old one. `grown` lists their keys, the first made first.
    members: HashMap<(usize, usize), HashMap<NodeId, NodeId>>,
    grown: Vec<(usize, usize)>,
}

impl<'a> Chunking<'a> {
    fn new(prepared: &'a Prepared, region: &'a Region, chunks: Vec<Range<usize>>) -> Chunking<'a> {
        let from = &prepared.graph;
        let mut to = Graph::new(from.name.clone());
        to.prefetches = from.prefetches;
        let (whole, parts, members) = (HashMap::new(), HashMap::new(), HashMap::new());
        Chunking { prepared, from, region, chunks, to, whole, parts, members, grown: Vec::new() }
    }

    fn build(mut self, order: &[NodeId]) -> Result<Prepared> {
        for &input in self.from.inputs() {
            let made = self.to.input(self.from.value_name(input), self.from.fact(input).clone());
            self.whole.insert(input, made);
        }
        for state in self.from.states() {
            let Kind::State(initial) = &self.from.node(state.value.node).kind else {
                unreachable!("it is listed as a state")
            };
            let fact = self.from.fact(state.value).clone();
            let made = self.to.state(self.from.value_name(state.value), fact, initial.clone());
            self.whole.insert(state.value, made);
        }
        let stretches = self.region.stretches(self.from, order);
        // Per node and chunk, the order of computing; whole nodes go first.
        let mut turns = Vec::with_capacity(order.len());
        for (at, id) in order.iter().enumerate().filter(|(_, id)| self.from.node(**id).op().is_some()) {
            if self.region.nodes.contains_key(id) {
                turns.extend((0..self.chunks.len()).map(|chunk| (Reverse(stretches[id]), Some(chunk), at)))
            } else {
                turns.push((Reverse(stretches[id]), None, at))
            }
        }
        turns.sort_unstable();
        for (_, chunk, at) in turns {
            self.to.append();
            match chunk {
                None => self.node(order[at])?,
                Some(chunk) => self.chunk(order[at], chunk)?,
            }
        }
        self.to.append();
        for (name, value) in self.from.outputs() {
            let made = self.whole(*value)?;
            self.to.output(name.clone(), made);
        }
        for (old, new) in self.from.states().iter().zip(self.to.states().to_vec()) {
            if let Some(update) = old.update {
                let made = self.whole(update)?;
                self.to.update(new.value, made).map_err(Error::graph)?;
            }
            self.to.bound_count(new.value, old.count);
        }
        let Prepared { indexes, decisions, prefer, sequential, recompute, .. } = self.prepared;
        let indexes = indexes.iter().map(|(input, indexes)| (self.whole[input], indexes.clone())).collect();
        let (decisions, recompute) = (decisions.clone(), *recompute);
        let (prefer, sequential) = (*prefer, *sequential);
        let groups = self.groups()?;
        Ok(Prepared {
            groups,
            graph: self.to,
            indexes,
            decisions,
            prefer,
            sequential,
            recompute,
            ..Prepared::default()
        })
    }

    /// One group for each chunk of a group, and one for each group that is computed as a whole.
    fn groups(&self) -> Result<Groups> {
        let position: HashMap<NodeId, u32> = self.to.order()?.into_iter().zip(0..).collect();
        let mut groups = Groups::default();
        for at in &self.grown {
            let made = &self.members[at];
            let mut group = self.prepared.groups.get(at.0).renumbered(|node| made[&node]);
            group.nodes.sort_unstable_by_key(|node| position[node]);
            groups.push(group);
        }
        Ok(groups)
    }

    fn add(&mut self, op: &str, name: &str, inputs: &[ValueId], attrs: Attrs) -> Result<ValueId> {
        let op = ops::find(op).expect("the table has a row for it");
        let inputs: Vec<_> = inputs.iter().copied().map(Some).collect();
        Ok(ValueId { node: self.to.add(op, name, &inputs, attrs, &[])?, port: 0 })
    }

    /// The whole of a value.
    fn whole(&mut self, value: ValueId) -> Result<ValueId> {
        if let Some(&made) = self.whole.get(&value) {
            return Ok(made);
        }
        let made = match (&self.from.node(value.node).kind, self.region.nodes.get(&value.node)) {
            (Kind::Constant(constant), _) => self.to.constant(constant.clone()),
            (_, Some(&Mapped { axis, .. })) => {
                let parts = (0..self.chunks.len()).map(|chunk| self.parts[&(value, axis, chunk)]).collect::<Vec<_>>();
                let attrs = Attrs::new().with("axis", axis as i64);
                self.add("Concat", self.from.value_name(value), &parts, attrs)?
            }
            _ => unreachable!("a node follows what it reads"),
        };
        self.whole.insert(value, made);
        Ok(made)
    }

    /// A chunk of a value along an axis.
    fn part(&mut self, value: ValueId, axis: usize, chunk: usize) -> Result<ValueId> {
        if let Some(&made) = self.parts.get(&(value, axis, chunk)) {
            return Ok(made);
        }
        let whole = self.whole(value)?;
        let attrs = Attrs::span(axis, self.range(value, axis, chunk));
        let made = self.add("Slice", &self.name(self.from.value_name(value), chunk), &[whole], attrs)?;
        self.parts.insert((value, axis, chunk), made);
        Ok(made)
    }

    /// The range of a chunk along an axis of a value.
    fn range(&self, value: ValueId, axis: usize, chunk: usize) -> Range<usize> {
        let size = self.from.fact(value).shape[axis] / self.region.units;
        let Range { start, end } = self.chunks[chunk];
        start * size..end * size
    }

    fn name(&self, name: &str, chunk: usize) -> String {
        format!("{name} [{}/{}]", chunk + 1, self.chunks.len())
    }

    /// Adds a node that is computed as a whole.
    fn node(&mut self, id: NodeId) -> Result<()> {
        let node = self.from.node(id);
        let op = node.op().expect("only operators are computed");
        let mut inputs = Vec::new();
        for value in self.from.operands(id) {
            inputs.push(value.map(|value| self.whole(value)).transpose()?);
        }
        let names: Vec<&str> = node.outputs.iter().map(|o| o.name.as_str()).collect();
        let made = self.to.add(op, &node.name, &inputs, node.attrs.clone(), &names)?;
        self.join(id, 0, made);
        for port in 0..node.outputs.len() as u32 {
            self.whole.insert(ValueId { node: id, port }, ValueId { node: made, port });
        }
        Ok(())
    }

    /// Adds a chunk of a node.
    fn chunk(&mut self, id: NodeId, chunk: usize) -> Result<()> {
        let (node, Mapped { axis, part }) = (self.from.node(id), &self.region.nodes[&id]);
        let op = node.op().expect("only operators are computed");
        let mut inputs = Vec::new();
        for (value, along) in self.from.operands(id).into_iter().zip(&part.inputs) {
            inputs.push(match (value, along) {
                (None, _) => None,
                (Some(value), None) => Some(self.whole(value)?),
                (Some(value), &Some(along)) => Some(self.part(value, along, chunk)?),
            });
        }
        let value = id.output(0);
        let mut expected = self.from.fact(value).clone();
        expected.shape[*axis] = self.range(value, *axis, chunk).len();
        let attrs = part.attrs(&node.attrs, &expected.shape);
        let made = self.to.add(op, &self.name(&node.name, chunk), &inputs, attrs, &[])?;
        let made = made.output(0);
        if *self.to.fact(made) != expected {
            let found = self.to.fact(made);
            return Err(node.error(format!("a chunk along axis {axis} is {found}, expected {expected}")));
        }
        self.join(id, chunk, made.node);
        self.parts.insert((value, *axis, chunk), made);
        Ok(())
    }

    /// Puts a node into the kernel that its chunk of the group becomes.
    fn join(&mut self, id: NodeId, chunk: usize, made: NodeId) {
        let Some(group) = self.prepared.groups.number(id) else { return };
        let grown = &mut self.grown;
        let members = self.members.entry((group, chunk)).or_insert_with(|| {
            grown.push((group, chunk));
            HashMap::new()
        });
        members.insert(id, made);
    }
}
