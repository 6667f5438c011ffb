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
//! prices of work are tried. The least work whose plan fits wins. If none fits, the smallest plan does.

use super::chunks::bytes as planned;
use crate::error::Result;
use crate::graph::{Graph, min_cut};
use crate::op::ValueId;
use crate::pass::recompute::{Recompute, work};
use crate::pass::{Prepared, recompute, regroup};
use crate::plan::Limits;
use crate::plan::make::arrange::estimate;
use crate::target::Target;
use std::collections::{HashMap, HashSet};

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
/// The most values that are tried one by one.
const REFINED: usize = 64;
/// The most choices that are planned.
const PLANNED: usize = 8;

/// Computes again what saves memory: without products and convolutions, and, if the plan then exceeds the limit, with them.
///
/// # Errors
/// When the graph has a cycle.
pub fn run(graph: &mut Prepared, target: &Target, limits: &Limits, fuse: bool) -> Result<()> {
    if !graph.graph.has_backward() {
        return Ok(());
    }
    let mut copies = free(graph, target, fuse)?;
    if let Some(limit) = limits.memory {
        let (whole, _) = planned(graph, target, limits)?;
        if let Some(found) = (whole > limit).then(|| within(graph, target, limits, limit)).transpose()?.flatten() {
            *graph = found.graph;
            copies.extend(found.copies);
        }
    }
    graph.recompute = Some(Recompute::of(graph, &copies)?);
    Ok(())
}

/// Computes again what takes no product, by the number of segments with the least live bytes. Kernels are fused anew. Returns the copies,
/// each with its original.
fn free(graph: &mut Prepared, target: &Target, fuse: bool) -> Result<HashMap<u32, u32>> {
    let order = graph.graph.order()?;
    let mut best = (estimate(graph, target)?, graph.clone(), HashMap::new());
    for segments in SEGMENTS {
        let forced = borders(graph, &order, segments);
        let mut made = Prepared { groups: Default::default(), ..graph.clone() };
        let kept = Choice::new(&made, forced, None)?.kept()?;
        let copies = recompute::run(&mut made, &kept)?;
        regroup(&mut made, target, fuse)?;
        let peak = estimate(&made, target)?;
        tracing::debug!(segments, peak, "computed again, without products");
        // Among equals, the fewest segments.
        if peak < best.0 {
            best = (peak, made, copies);
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
    *graph = made;
    Ok(copies)
}

/// A choice that was tried.
struct Tried {
    kept: HashSet<ValueId>,
    graph: Prepared,
    /// The nodes that are computed again, each with its original.
    copies: HashMap<u32, u32>,
    /// The operations that are done again.
    work: f64,
    /// About the bytes of the arena.
    peak: u64,
    /// The bytes of the plan, and those of the arena in it, once it is made.
    plan: Option<(u64, u64)>,
}

impl Tried {
    fn new(graph: &Prepared, target: &Target, kept: HashSet<ValueId>) -> Result<Tried> {
        let mut made = graph.clone();
        let copies = recompute::run(&mut made, &kept)?;
        let further = copies.iter().filter(|(_, original)| made.graph.name_of(**original).is_some());
        let work = further.map(|(&copy, _)| work(&made.graph, copy)).sum();
        let peak = estimate(&made, target)?;
        Ok(Tried { kept, graph: made, copies, work, peak, plan: None })
    }

    /// Keeps more values, as long as there is room: those first that take the most work for their bytes.
    fn refined(&self, graph: &Prepared, target: &Target, room: u64) -> Result<Option<Tried>> {
        let mut values: Vec<(f64, u32)> = Vec::new();
        for &original in self.copies.values().filter(|&&original| is_product(&graph.graph, original)) {
            let sink = graph.groups.of(original).map_or(original, |group| group.sink);
            let bytes = graph.graph.fact(ValueId { node: sink, port: 0 }).bytes();
            values.push((work(&graph.graph, original) / bytes.max(1) as f64, sink));
        }
        values.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        let mut best: Option<Tried> = None;
        for (_, sink) in values.into_iter().take(REFINED) {
            let now = best.as_ref().unwrap_or(self);
            let ports = 0..graph.graph.node(sink).outputs.len() as u32;
            let kept = now.kept.iter().copied().chain(ports.map(|port| ValueId { node: sink, port })).collect();
            let more = Tried::new(graph, target, kept)?;
            if more.peak <= room && more.work < now.work {
                best = Some(more);
            }
        }
        Ok(best)
    }
}

/// The choice with the least further work whose plan fits, else the one with the smallest plan.
fn within(graph: &Prepared, target: &Target, limits: &Limits, limit: u64) -> Result<Option<Tried>> {
    let order = graph.graph.order()?;
    let mut tried: Vec<Tried> = Vec::new();
    let mut seen = HashSet::new();
    for segments in SEGMENTS {
        let forced = borders(graph, &order, segments);
        for price in PRICES {
            let kept = Choice::new(graph, forced.clone(), Some(price))?.kept()?;
            let mut key: Vec<ValueId> = kept.iter().copied().collect();
            key.sort_unstable();
            if seen.insert(key) {
                tried.push(Tried::new(graph, target, kept)?);
            }
        }
    }
    // An order that is searched for, and what lies beside the arena, depend on the kernels. The smallest choice's plan says by how much its
    // live bytes are off, and the others' about as much.
    let mut room = limit;
    if let Some(least) = tried.iter_mut().min_by(|a, b| a.peak.cmp(&b.peak).then(a.work.total_cmp(&b.work))) {
        let (bytes, arena) = planned(&least.graph, target, limits)?;
        least.plan = Some((bytes, arena));
        room = within_arena(limit, least.peak, bytes, arena);
    }
    // The least work among those that may fit, then the smallest.
    let (mut fit, mut rest): (Vec<Tried>, Vec<Tried>) = tried.into_iter().partition(|tried| tried.peak <= room);
    fit.sort_by(|a, b| a.work.total_cmp(&b.work).then(a.peak.cmp(&b.peak)));
    rest.sort_by_key(|tried| tried.peak);
    let refined = fit.iter().take(2).map(|tried| tried.refined(graph, target, room));
    let mut refined: Vec<Tried> = refined.filter_map(Result::transpose).collect::<Result<_>>()?;
    refined.sort_by(|a, b| a.work.total_cmp(&b.work));
    let mut smallest: Option<(u64, Tried)> = None;
    let mut queue: Vec<Tried> = refined.into_iter().chain(fit).chain(rest).collect();
    for _ in 0..PLANNED {
        // What is above the room is left for last: it would fit only by luck.
        let least = queue.iter().enumerate().min_by_key(|(_, tried)| tried.peak).map(|(at, _)| at);
        let Some(at) = queue.iter().position(|tried| tried.peak <= room).or(least) else { break };
        let tried = queue.remove(at);
        let (bytes, arena) = match tried.plan {
            Some(plan) => plan,
            None => planned(&tried.graph, target, limits)?,
        };
        tracing::debug!(bytes, peak = tried.peak, work = tried.work, limit, "computed again");
        if bytes <= limit {
            return Ok(Some(tried));
        }
        room = room.min(within_arena(limit, tried.peak, bytes, arena));
        if smallest.as_ref().is_none_or(|(least, _)| bytes < *least) {
            smallest = Some((bytes, tried));
        }
    }
    // The plan that was made first may be smaller than those that were tried in vain.
    for tried in queue {
        if let Some((bytes, _)) =
            tried.plan.filter(|(bytes, _)| smallest.as_ref().is_none_or(|(least, _)| bytes < least))
        {
            smallest = Some((bytes, tried));
        }
    }
    Ok(smallest.map(|(_, tried)| tried))
}

/// The live bytes at which a plan would take a limit, if one of so many bytes, with so large an arena, has this peak of live bytes.
fn within_arena(limit: u64, peak: u64, bytes: u64, arena: u64) -> u64 {
    let room = limit.saturating_sub(bytes - arena);
    (u128::from(room) * u128::from(peak) / u128::from(arena.max(1))) as u64
}

/// The values that cross narrow places between this many segments of about equal bytes.
fn borders(prepared: &Prepared, order: &[u32], segments: usize) -> HashSet<ValueId> {
    let graph = &prepared.graph;
    let forward: Vec<u32> =
        order.iter().copied().filter(|&n| graph.node(n).op().is_some() && !graph.is_backward(n)).collect();
    let place: HashMap<u32, usize> = forward.iter().enumerate().map(|(at, &node)| (node, at)).collect();
    // Per value, where it is made and where it is read last in the forward computation.
    let mut spans: Vec<(usize, usize, ValueId, u64)> = Vec::new();
    for (at, &node) in forward.iter().enumerate() {
        let value = ValueId { node, port: 0 };
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
fn last_reader(graph: &Graph, value: ValueId, place: &HashMap<u32, usize>, own: usize) -> usize {
    let mut last = own;
    let mut stack = vec![value];
    while let Some(value) = stack.pop() {
        for user in graph.users(value) {
            let Some(&at) = place.get(&user) else { continue };
            last = last.max(at);
            if graph.is_view(user) {
                stack.push(ValueId { node: user, port: 0 });
            }
        }
    }
    last
}

/// True if a node computes a value of the forward computation.
fn is_forward(prepared: &Prepared, node: u32) -> bool {
    prepared.graph.node(node).op().is_some() && !prepared.is_backward(node)
}

/// True if a value has bytes of its own: it is no view, and not within a group.
fn is_stored(prepared: &Prepared, value: ValueId) -> bool {
    let within = prepared.groups.of(value.node).is_some_and(|group| group.sink != value.node);
    !within && !prepared.graph.is_view(value.node)
}

/// True if a node is a product or a convolution.
fn is_product(graph: &Graph, node: u32) -> bool {
    graph.node(node).op().is_some_and(|op| op.flop.is_some())
}

/// What a minimum cut decides.
struct Choice<'a> {
    /// The graph. Kernels stay as they are: no value within one is kept.
    prepared: &'a Prepared,
    /// Values that are kept in any case.
    forced: HashSet<ValueId>,
    /// The bytes that a unit of work is as dear as; `None` if products are not computed again.
    price: Option<f64>,
}

impl<'a> Choice<'a> {
    /// A choice among all values. `price` is that of all work together, in shares of all bytes.
    fn new(prepared: &'a Prepared, forced: HashSet<ValueId>, price: Option<f64>) -> Result<Choice<'a>> {
        let (mut bytes, mut all) = (0.0, 0.0);
        let graph = &prepared.graph;
        for node in graph.order()? {
            if is_forward(prepared, node) && !graph.is_view(node) {
                bytes += graph.fact(ValueId { node, port: 0 }).bytes() as f64;
                all += work(graph, node);
            }
        }
        Ok(Choice { prepared, forced, price: price.map(|price| price * bytes / f64::max(all, 1.0)) })
    }

    /// The bytes that it is as dear as to compute a node again.
    fn dear(&self, node: u32) -> u64 {
        match self.price {
            None if is_product(&self.prepared.graph, node) => UNBOUNDED,
            None => 1 + (work(&self.prepared.graph, node) * ELEMENTS) as u64,
            Some(price) => 1 + (work(&self.prepared.graph, node) * price) as u64,
        }
    }

    /// The bytes that it takes to keep a value.
    fn bytes(&self, value: ValueId) -> u64 {
        let graph = &self.prepared.graph;
        if graph.is_output(value) || self.forced.contains(&value) {
            0
        } else if self.prepared.groups.of(value.node).is_none_or(|group| group.sink == value.node) {
            graph.fact(value).bytes() as u64 + 1
        } else {
            UNBOUNDED
        }
    }

    /// The values that are kept.
    fn kept(&self) -> Result<HashSet<ValueId>> {
        let graph = &self.prepared.graph;
        let order = graph.order()?;
        let (source, sink) = (0, 1);
        let mut edges = Vec::new();
        // Per value, the number of its first end: computed. The next one is: there.
        let mut numbers: HashMap<ValueId, u32> = HashMap::new();
        for &node in order.iter().filter(|&&node| is_forward(self.prepared, node)) {
            for port in 0..graph.node(node).outputs.len() as u32 {
                let value = ValueId { node, port };
                let number = 2 + 2 * numbers.len() as u32;
                edges.push((source, number, self.dear(node)));
                edges.push((number, number + 1, self.bytes(value)));
                let read = graph.operands(node).into_iter().flatten();
                edges.extend(read.filter_map(|operand| Some((numbers.get(&operand)? + 1, number, UNBOUNDED))));
                numbers.insert(value, number);
            }
        }
        let mut wanted = HashSet::new();
        for &node in order.iter().filter(|&&node| self.prepared.is_backward(node)) {
            wanted.extend(graph.operands(node).iter().flatten().filter_map(|operand| numbers.get(operand)));
        }
        let mut wanted: Vec<u32> = wanted.into_iter().collect();
        wanted.sort_unstable();
        edges.extend(wanted.into_iter().map(|number| (number + 1, sink, UNBOUNDED)));
        let again = min_cut(2 + 2 * numbers.len(), &edges, source, sink);
        Ok(numbers.into_iter().filter(|(_, number)| !again[*number as usize]).map(|(value, _)| value).collect())
    }
}
