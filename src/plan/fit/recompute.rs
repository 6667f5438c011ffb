//! Chooses the values of the forward computation that are kept for the backward one. The others are [computed again](recompute).
//!
//! A minimum cut chooses: between what must be kept or computed, and what the backward computation reads. Every value is an edge whose
//! capacity is its bytes; to cut it is to keep the value. A value that is computed again asks for all that its node reads.
//!
//! ```text
//! source --work of the node--> (value computed) --bytes--> (value there) --> sink, if a backward node reads it
//!                                     ^
//! (operand there) --unbounded---------'
//! ```
//!
//! Always: what takes no product and no convolution is computed again, where that saves memory. Products have no bound there. Kernels that
//! read the same elementwise values [get copies of their own](recompute::split), if that saves more.
//!
//! Under a limit: products are computed again, too. A value that is computed again is live from then on, so a long stretch of them would
//! save nothing. Therefore the forward computation is cut into segments at narrow places, whose values are kept. Numbers of segments and
//! prices of work are tried: these are the choices among which [limits](super::limit) select.

use crate::Limits;
use crate::error::Result;
use crate::graph::{Graph, min_cut};
use crate::make::arrange::{Arrangement, arrange, draft, estimate};
use crate::op::{NodeId, ValueId};
use crate::parallel::each;
use crate::pass::recompute::{Recompute, work};
use crate::pass::{Prepared, duplicate_into_readers, recompute, regroup};
use crate::target::Target;
use std::cell::OnceCell;
use std::collections::{HashMap, HashSet};
use std::rc::Rc;

/// An element that is computed again counts as one byte in so many.
const ELEMENTS: f64 = 1.0 / 16.0;
/// More than the bytes of any graph.
const UNBOUNDED: u64 = 1 << 60;
/// The numbers of segments that are tried.
const SEGMENTS: [usize; 13] = [1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48];
/// The bytes that all work together is as dear as, in shares of all bytes kept.
const PRICES: [f64; 6] = [4.0, 1.0, 0.3, 0.1, 0.03, 0.0];
/// Copies for each kernel take time: they are made only where they save more than one in this many bytes.
const APART_SAVES: u64 = 64;
/// Kernels that share no elementwise values may have one more in this many bytes live.
const DIVIDED_TAKES: u64 = 1024;
/// The most choices that are tried to find what else can be kept.
const REFINED: usize = 48;
/// Computes again what takes no product, by the number of segments with the least live bytes. Kernels are fused anew.
///
/// # Errors
/// When the graph has a cycle.
pub fn free(graph: &mut Prepared, target: &Target, fuse: bool) -> Result<()> {
    if !graph.graph.has_backward() {
        return Ok(());
    }
    let order = graph.graph.order()?;
    let mut best = (estimate(graph, target)?, graph.clone(), HashMap::new());
    let single = Prepared { groups: Default::default(), ..graph.clone() };
    let network = Network::new(&single)?;
    let mut seen = HashSet::new();
    let mut tried = Vec::new();
    for segments in SEGMENTS {
        let kept = network.kept(&borders(graph, &order, segments), None);
        if seen.insert(sorted(&kept)) {
            tried.push((segments, kept));
        }
    }
    let made = each(&tried, |(_, kept)| {
        let mut made = single.clone();
        let copies = recompute::run(&mut made, kept)?;
        regroup(&mut made, target, fuse)?;
        Ok((estimate(&made, target)?, made, copies))
    });
    for ((segments, _), made) in tried.into_iter().zip(made) {
        let made = made?;
        tracing::debug!(segments, peak = made.0, "computed again, without products");
        // Among equals, the fewest segments.
        if made.0 < best.0 {
            best = made;
        }
    }
    let (peak, mut made, mut copies) = best;
    let (mut apart, mut further) = (made.clone(), copies.clone());
    if recompute::split(&mut apart, &mut further)? {
        regroup(&mut apart, target, fuse)?;
        let less = estimate(&apart, target)?;
        tracing::debug!(peak, less, "a copy per kernel");
        if less < peak - peak / APART_SAVES {
            (made, copies) = (apart, further);
        }
    }
    if fuse && target.launches_cost() {
        divide(&mut made, &mut copies, target)?;
    }
    *graph = made;
    note(graph, copies)
}

/// Lets kernels compute the elementwise values that they share, each for itself, if they move fewer bytes so and hardly more are live.
fn divide(made: &mut Prepared, copies: &mut HashMap<NodeId, NodeId>, target: &Target) -> Result<()> {
    let (mut divided, mut further) = (made.clone(), copies.clone());
    if !duplicate_into_readers::run(&mut divided, target, &mut further)? {
        return Ok(());
    }
    regroup(&mut divided, target, true)?;
    let [before, after] = [&*made, &divided].map(duplicate_into_readers::moved_bytes);
    let [peak, less] = [estimate(made, target)?, estimate(&divided, target)?];
    tracing::debug!(before, after, peak, less, "bytes moved, if kernels share no elementwise values");
    if after < before && less <= peak + peak / DIVIDED_TAKES {
        (*made, *copies) = (divided, further);
    }
    Ok(())
}

/// Notes what is computed again, with what was before.
fn note(graph: &mut Prepared, copies: HashMap<NodeId, NodeId>) -> Result<()> {
    graph.copies.extend(copies);
    graph.recompute = Some(Recompute::of(graph, &graph.copies)?);
    Ok(())
}

/// A choice of what is kept, and what follows from it.
pub(super) struct Choice {
    /// The graph that computes the rest again.
    pub(super) graph: Prepared,
    /// About the bytes of the arena.
    pub(super) peak: u64,
    kept: HashSet<ValueId>,
    /// The smallest plan, once it is made.
    arrangement: OnceCell<Arrangement>,
}

impl Choice {
    /// A graph as it is.
    pub(super) fn of(graph: Prepared, target: &Target) -> Result<Choice> {
        let peak = estimate(&graph, target)?;
        Ok(Choice { graph, peak, kept: HashSet::new(), arrangement: OnceCell::new() })
    }

    fn new(graph: &Prepared, target: &Target, kept: HashSet<ValueId>) -> Result<Choice> {
        let mut made = graph.clone();
        let copies = recompute::run(&mut made, &kept)?;
        note(&mut made, copies)?;
        Ok(Choice { kept, ..Choice::of(made, target)? })
    }

    /// The operations that are done again.
    pub(super) fn work(&self) -> u64 {
        self.graph.recompute.map_or(0, |recompute| recompute.extra_flop)
    }

    /// The smallest plan. No limit changes it.
    pub(super) fn arrangement(&self, target: &Target) -> Result<&Arrangement> {
        if let Some(known) = self.arrangement.get() {
            return Ok(known);
        }
        let made = arrange(target, &Limits { memory: Some(0) }, |options| draft(&self.graph, target, options))?;
        Ok(self.arrangement.get_or_init(|| made))
    }

    /// The values that this choice may keep, too, as long as less than `room` is live: those first that take the most work for their bytes.
    /// Each list is kept as a whole.
    pub(super) fn keepable(&self, graph: &Prepared, target: &Target, room: u64) -> Result<Vec<Vec<ValueId>>> {
        let mut values: Vec<(f64, NodeId)> = Vec::new();
        let again: HashSet<NodeId> = self.graph.copies.values().copied().collect();
        let is_there = |original: &NodeId| graph.graph.name_of(*original).is_some();
        let is_product = |original: &NodeId| is_forward(graph, *original) && is_product(&graph.graph, *original);
        for original in again.into_iter().filter(is_there).filter(is_product) {
            let sink = graph.groups.of(original).map_or(original, |group| group.sink);
            let bytes = graph.graph.fact(sink.output(0)).bytes();
            values.push((work(&graph.graph, original) / bytes.max(1) as f64, sink));
        }
        values.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        values.dedup_by_key(|(_, sink)| *sink);
        let mut found: Vec<Vec<ValueId>> = Vec::new();
        let mut kept = self.kept.clone();
        let mut work = self.work();
        // Stretches of the list, the next one last. One that takes too much is halved.
        let mut stretches: Vec<_> = std::iter::once(0..values.len()).collect();
        for _ in 0..REFINED {
            let Some(stretch) = stretches.pop() else { break };
            if stretch.is_empty() {
                continue;
            }
            let ports = |&(_, node): &(f64, NodeId)| {
                (0..graph.graph.node(node).outputs.len() as u32).map(move |port| ValueId { node, port }).collect()
            };
            let more: Vec<Vec<ValueId>> = values[stretch.clone()].iter().map(ports).collect();
            let all: HashSet<ValueId> = kept.iter().chain(more.iter().flatten()).copied().collect();
            let tried = Choice::new(graph, target, all)?;
            if tried.peak < room && tried.work() <= work {
                (kept, work) = (tried.kept, tried.graph.recompute.map_or(0, |recompute| recompute.extra_flop));
                found.extend(more);
            } else if stretch.len() > 1 {
                let middle = stretch.start + stretch.len().div_ceil(2);
                stretches.push(middle..stretch.end);
                stretches.push(stretch.start..middle);
            }
        }
        Ok(found)
    }

    /// This choice with more values kept.
    pub(super) fn with(&self, graph: &Prepared, target: &Target, more: &[Vec<ValueId>]) -> Result<Choice> {
        Choice::new(graph, target, self.kept.iter().chain(more.iter().flatten()).copied().collect())
    }
}

/// The choices for a graph in which [what is free](free) is computed again: this graph first. Each one does more again than the one before
/// it, and has fewer live bytes.
///
/// # Errors
/// When the graph has a cycle.
pub(super) fn choices(first: Rc<Choice>, target: &Target) -> Result<Vec<Rc<Choice>>> {
    let graph = &first.graph;
    let mut found = vec![Rc::clone(&first)];
    if !graph.graph.has_backward() {
        return Ok(found);
    }
    let (order, network) = (graph.graph.order()?, Network::new(graph)?);
    let (mut forces, mut keeps) = (HashSet::new(), HashSet::new());
    let forced = SEGMENTS.map(|segments| borders(graph, &order, segments));
    let forced = forced.into_iter().filter(|forced| forces.insert(sorted(forced)));
    let cuts: Vec<_> = forced.flat_map(|forced| PRICES.map(|price| (forced.clone(), price))).collect();
    let mut kept = each(&cuts, |(forced, price)| network.kept(forced, Some(*price)));
    kept.retain(|kept| keeps.insert(sorted(kept)));
    let made = each(&kept, |kept| Choice::new(graph, target, kept.clone()));
    let mut tried = made.into_iter().collect::<Result<Vec<_>>>()?;
    tracing::debug!(tried = tried.len(), "what could be computed again");
    tried.sort_by_key(|choice| (choice.work(), choice.peak));
    for choice in tried.into_iter().filter(|choice| choice.work() >= first.work()) {
        if found.last().is_none_or(|last| choice.peak < last.peak) {
            found.push(Rc::new(choice));
        }
    }
    Ok(found)
}

fn sorted(values: &HashSet<ValueId>) -> Vec<ValueId> {
    let mut values: Vec<ValueId> = values.iter().copied().collect();
    values.sort_unstable();
    values
}

/// The values that cross narrow places between this many segments of about equal bytes.
fn borders(prepared: &Prepared, order: &[NodeId], segments: usize) -> HashSet<ValueId> {
    let graph = &prepared.graph;
    let forward: Vec<NodeId> =
        order.iter().copied().filter(|&n| graph.node(n).op().is_some() && !graph.is_backward(n)).collect();
    let place: HashMap<NodeId, usize> = forward.iter().enumerate().map(|(at, &node)| (node, at)).collect();
    // Per value, where it is made and where it is read last in the forward computation.
    let mut spans: Vec<(usize, usize, ValueId, u64)> = Vec::new();
    for (at, &node) in forward.iter().enumerate() {
        let value = node.output(0);
        if !is_stored(prepared, value) {
            continue;
        }
        let last = last_reader(graph, value, &place, at);
        spans.push((at, last, value, graph.fact(value).bytes() as u64));
    }
    let mut made = vec![0u64; forward.len() + 1];
    let mut crossing = vec![0i128; forward.len() + 2];
    for &(from, last, _, bytes) in &spans {
        made[from + 1] += bytes;
        crossing[from + 1] += i128::from(bytes);
        crossing[last + 1] -= i128::from(bytes);
    }
    for at in 1..made.len() {
        made[at] += made[at - 1];
    }
    for at in 1..crossing.len() {
        crossing[at] += crossing[at - 1];
    }
    let total = *made.last().expect("there is a place before the first node") as f64;
    let mut found = HashSet::new();
    for border in 1..segments {
        let middle = total * border as f64 / segments as f64;
        let reach = total / segments as f64 / 2.0;
        let near = (1..forward.len()).filter(|&at| (made[at] as f64 - middle).abs() <= reach);
        let Some(at) = near.min_by_key(|&at| crossing[at]) else { continue };
        found.extend(spans.iter().filter(|&&(from, last, ..)| from < at && last >= at).map(|(_, _, value, _)| *value));
    }
    found
}

/// The last place of the forward computation that reads a value or a view of it.
fn last_reader(graph: &Graph, value: ValueId, place: &HashMap<NodeId, usize>, own: usize) -> usize {
    let mut last = own;
    let mut stack = vec![value];
    while let Some(value) = stack.pop() {
        for user in graph.users(value) {
            let Some(&at) = place.get(&user) else { continue };
            last = last.max(at);
            if graph.is_view(user) {
                stack.push(user.output(0));
            }
        }
    }
    last
}

/// True if a node computes a value of the forward computation.
fn is_forward(prepared: &Prepared, node: NodeId) -> bool {
    prepared.graph.node(node).op().is_some() && !prepared.is_backward(node)
}

/// True if a value has bytes of its own: it is no view, and not within a group.
fn is_stored(prepared: &Prepared, value: ValueId) -> bool {
    let within = prepared.groups.of(value.node).is_some_and(|group| group.sink != value.node);
    !within && !prepared.graph.is_view(value.node)
}

/// True if a node is a product or a convolution.
fn is_product(graph: &Graph, node: NodeId) -> bool {
    graph.node(node).op().is_some_and(|op| op.flop.is_some())
}

/// The network of a minimum cut. Kernels stay as they are: no value within one is kept.
struct Network {
    /// Per value of the forward computation: itself, the work of its node, true if that is a product, and the bytes that it takes to keep it.
    values: Vec<(ValueId, f64, bool, u64)>,
    /// Edges without a bound: from a value that is there to one that is computed from it.
    reads: Vec<(u32, u32, u64)>,
    /// The bytes of all values, for all work together.
    rate: f64,
}

/// The ends of a network, and the first end of a value: computed. The next one is: there.
const SOURCE: u32 = 0;
const SINK: u32 = 1;
const fn computed(value: usize) -> u32 {
    2 + 2 * value as u32
}

impl Network {
    fn new(prepared: &Prepared) -> Result<Network> {
        let graph = &prepared.graph;
        let order = graph.order()?;
        let (mut bytes, mut all) = (0.0, 0.0);
        let mut made = Network { values: Vec::new(), reads: Vec::new(), rate: 0.0 };
        let mut numbers: HashMap<ValueId, u32> = HashMap::new();
        for &node in order.iter().filter(|&&node| is_forward(prepared, node)) {
            let work = work(graph, node);
            if !graph.is_view(node) {
                bytes += graph.fact(node.output(0)).bytes() as f64;
                all += work;
            }
            for port in 0..graph.node(node).outputs.len() as u32 {
                let value = ValueId { node, port };
                let number = computed(made.values.len());
                let within = prepared.groups.of(node).is_some_and(|group| group.sink != node);
                let keep = if graph.is_output(value) {
                    0
                } else if within {
                    UNBOUNDED
                } else {
                    graph.fact(value).bytes() as u64 + 1
                };
                made.values.push((value, work, is_product(graph, node), keep));
                let read = graph.operands(node).into_iter().flatten();
                made.reads.extend(read.filter_map(|operand| Some((numbers.get(&operand)? + 1, number, UNBOUNDED))));
                numbers.insert(value, number);
            }
        }
        let mut wanted = HashSet::new();
        for &node in order.iter().filter(|&&node| prepared.is_backward(node)) {
            wanted.extend(graph.operands(node).iter().flatten().filter_map(|operand| numbers.get(operand)));
        }
        let mut wanted: Vec<u32> = wanted.into_iter().collect();
        wanted.sort_unstable();
        made.reads.extend(wanted.into_iter().map(|number| (number + 1, SINK, UNBOUNDED)));
        made.rate = bytes / f64::max(all, 1.0);
        Ok(made)
    }

    /// The values that are kept, `forced` ones in any case. `price` is that of all work together, in shares of all bytes; without it,
    /// products are not computed again.
    fn kept(&self, forced: &HashSet<ValueId>, price: Option<f64>) -> HashSet<ValueId> {
        let dear = |work: f64, is_product: bool| match price {
            None if is_product => UNBOUNDED,
            None => 1 + (work * ELEMENTS) as u64,
            Some(price) => 1 + (work * price * self.rate) as u64,
        };
        let edges = self.values.iter().enumerate().flat_map(|(at, &(value, work, is_product, keep))| {
            let keep = if forced.contains(&value) { 0 } else { keep };
            [(SOURCE, computed(at), dear(work, is_product)), (computed(at), computed(at) + 1, keep)]
        });
        let edges: Vec<_> = edges.chain(self.reads.iter().copied()).collect();
        let again = min_cut(2 + 2 * self.values.len(), &edges, SOURCE, SINK);
        let values = self.values.iter().enumerate();
        values.filter(|(at, _)| !again[computed(*at) as usize]).map(|(_, (value, ..))| *value).collect()
    }
}
