//! Where a plan's bytes are when most of them are needed.

use super::{Class, Plan};
use crate::graph::Graph;
use serde::Serialize;
use std::cmp::Reverse;
use std::collections::{BTreeSet, HashMap};

/// A buffer that holds data at the peak.
#[derive(Clone, Debug, Serialize)]
pub struct Holder {
    /// The tensor's name.
    pub name: String,
    /// The operator that makes it: where several are one kernel, the last of them.
    pub operator: String,
    /// The kernel that makes it.
    pub kernel: String,
    /// What it is for.
    pub class: Class,
    /// Its bytes that no other holder counts.
    pub bytes: u64,
}

/// Several buffers as one line.
#[derive(Clone, Debug, Serialize)]
pub struct Rest {
    /// What they are for.
    pub class: Class,
    /// How many.
    pub count: usize,
    /// Bytes of their segments.
    pub bytes: u64,
    /// The largest of them, by name, if they are buffers.
    pub largest: Option<String>,
}

/// Where a plan's bytes are at the step that needs most of them. All parts together are the plan's bytes.
#[derive(Clone, Debug, Serialize)]
pub struct Peak {
    /// Position of the first step at which most bytes of the arena hold data; none without steps.
    pub step: Option<usize>,
    /// The node that it computes.
    pub name: String,
    /// That node's operator.
    pub operator: String,
    /// Number of steps.
    pub steps: usize,
    /// Bytes of the plan.
    pub bytes: u64,
    /// The largest holders in the arena, largest first.
    pub live: Vec<Holder>,
    /// The other holders in the arena.
    pub others: Rest,
    /// Bytes of the arena that hold nothing: alignment, gaps, steps that may run beside this one.
    pub idle_bytes: u64,
    /// What is held throughout, class by class.
    pub held: Vec<Rest>,
}

/// Holders that are listed one by one.
const LISTED: usize = 8;

/// Who is live at the peak of a plan. Operators are those of the graph that was planned; without one, kernels stand for them.
pub fn peak(plan: &Plan, graph: Option<&Graph>) -> Peak {
    let nodes = graph.and_then(|g| Some((g, g.order().ok()?)));
    let operators: HashMap<&str, &str> = nodes
        .iter()
        .flat_map(|(g, order)| order.iter().map(|&n| g.node(n)).filter(|n| n.op().is_some()))
        .map(|n| (n.name.as_str(), n.op_name()))
        .collect();
    let kernel = |step: usize| plan.kernels[plan.steps[step].kernel].template.name();
    let operator = |step: usize| {
        let name = plan.steps[step].name.as_str();
        operators.get(name).copied().unwrap_or_else(|| kernel(step)).to_owned()
    };

    // First and last use of each buffer.
    let mut uses: Vec<Option<(usize, usize)>> = vec![None; plan.buffers.len()];
    for (s, step) in plan.steps.iter().enumerate() {
        for &b in step.reads.iter().chain(&step.writes) {
            uses[b] = Some((uses[b].map_or(s, |(first, _)| first), s));
        }
    }
    // Inputs are there from the start, outputs to the end.
    for port in &plan.inputs {
        uses[port.buffer] = uses[port.buffer].map(|(_, last)| (0, last));
    }
    for port in &plan.outputs {
        uses[port.buffer] = uses[port.buffer].map(|(first, _)| (first, plan.steps.len() - 1));
    }
    let arena = |b: usize| plan.segments[plan.buffers[b].segment].class == Class::Activation;
    let (mut starts, mut ends) = (vec![Vec::new(); plan.steps.len()], vec![Vec::new(); plan.steps.len()]);
    for (b, (first, last)) in uses.iter().enumerate().filter(|(b, _)| arena(*b)).filter_map(|(b, u)| Some((b, (*u)?))) {
        starts[first].push(b);
        ends[last].push(b);
    }
    // Bytes that buffers share count for the one that was made last: it is what they hold from now on.
    let holders = |live: &BTreeSet<usize>| {
        let range = |&b: &usize| (plan.buffers[b].segment, plan.buffers[b].offset, Reverse(uses[b]), b);
        let mut ranges: Vec<_> = live.iter().map(range).collect();
        ranges.sort_unstable();
        let mut end = (usize::MAX, 0);
        let own = |(segment, from, _, b): (usize, u64, _, usize)| {
            let to = from + plan.buffers[b].bytes;
            let taken = if end.0 == segment { end.1 } else { 0 };
            end = (segment, to.max(taken));
            (b, to.saturating_sub(from.max(taken)))
        };
        ranges.into_iter().map(own).collect::<Vec<_>>()
    };
    let mut live = BTreeSet::new();
    let (mut sum, mut most, mut step, mut found) = (0, 0, None, Vec::new());
    for s in 0..plan.steps.len() {
        live.extend(&starts[s]);
        sum += starts[s].iter().map(|&b| plan.buffers[b].bytes).sum::<u64>();
        // What is shared only makes it less.
        if sum > most || step.is_none() {
            let holders = holders(&live);
            let bytes = holders.iter().map(|h| h.1).sum();
            if bytes > most || step.is_none() {
                (most, step, found) = (bytes, Some(s), holders);
            }
        }
        for b in &ends[s] {
            live.remove(b);
            sum -= plan.buffers[*b].bytes;
        }
    }

    found.retain(|f| f.1 > 0);
    found.sort_by_key(|&(b, bytes)| (Reverse(bytes), b));
    let mut others = Rest { class: Class::Activation, count: 0, bytes: 0, largest: None };
    let mut live = Vec::new();
    for (b, bytes) in found {
        let buffer = &plan.buffers[b];
        if live.len() == LISTED {
            others.count += 1;
            others.bytes += bytes;
            others.largest.get_or_insert_with(|| buffer.name.clone());
            continue;
        }
        let maker = plan.steps.iter().position(|s| s.writes.contains(&b));
        let made = |by: &dyn Fn(usize) -> String| maker.map_or_else(|| buffer.class.name().to_owned(), by);
        let (operator, kernel) = (made(&operator), made(&|s| kernel(s).to_owned()));
        live.push(Holder { name: buffer.name.clone(), operator, kernel, class: buffer.class, bytes });
    }
    let held = Class::ALL.into_iter().filter(|&class| class.segment() == class && class != Class::Activation);
    let held = held.filter_map(|class| {
        let bytes = plan.class_bytes(class);
        let of = || plan.buffers.iter().filter(|b| plan.segments[b.segment].class == class);
        // The first of equals.
        let largest = of().rev().max_by_key(|b| b.bytes).map(|b| b.name.clone());
        (bytes > 0).then(|| Rest { class, count: of().count(), bytes, largest })
    });
    Peak {
        step,
        name: step.map_or(String::new(), |s| plan.steps[s].name.clone()),
        operator: step.map_or(String::new(), operator),
        steps: plan.steps.len(),
        bytes: plan.bytes(),
        live,
        others,
        idle_bytes: plan.class_bytes(Class::Activation) - most,
        held: held.collect(),
    }
}
