//! Where a plan's bytes are when most of them are needed.

use super::timeline::Lives;
use crate::graph::Graph;
use crate::plan::{Class, Plan};
use serde::Serialize;
use std::collections::HashMap;

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
    /// Its bytes.
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
    /// Bytes of the arena that hold nothing: alignment and gaps.
    pub idle_bytes: u64,
    /// What is held throughout, class by class.
    pub held: Vec<Rest>,
}

/// Holders that are listed one by one.
const LISTED: usize = 8;

/// The operators of a graph's nodes by name, of those whose name tells: files may give several nodes one name. None without a graph.
pub fn operators(graph: Option<&Graph>) -> HashMap<&str, &str> {
    let order = graph.and_then(|graph| Some((graph, graph.order().ok()?)));
    let nodes = order.into_iter().flat_map(|(graph, order)| order.into_iter().map(|id| graph.node(id)));
    let mut operators = HashMap::new();
    for node in nodes.filter(|node| node.op().is_some()) {
        let operator = operators.entry(node.name.as_str()).or_insert(Some(node.op_name()));
        *operator = operator.filter(|operator| *operator == node.op_name());
    }
    operators.into_iter().filter_map(|(name, operator)| Some((name, operator?))).collect()
}

/// Who is live at the peak of a plan. Operators are those of the graph that was planned; without one, kernels stand for them.
pub fn peak(plan: &Plan, graph: Option<&Graph>) -> Peak {
    let operators = operators(graph);
    let kernel = |step: usize| plan.kernels[plan.steps[step].kernel].template.name();
    let operator = |step: usize| {
        let name = plan.steps[step].name.as_str();
        operators.get(name).copied().unwrap_or_else(|| kernel(step)).to_owned()
    };

    let lives = Lives::of(plan);
    let step = lives.peak();
    let found = step.map_or(Vec::new(), |step| lives.holders(plan, step));
    let most: u64 = found.iter().map(|&b| plan.buffers[b].bytes).sum();
    let mut others = Rest { class: Class::Activation, count: 0, bytes: 0, largest: None };
    let mut live = Vec::new();
    for b in found {
        let buffer = &plan.buffers[b];
        let bytes = buffer.bytes;
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
        idle_bytes: plan.class_bytes(Class::Activation).saturating_sub(most),
        held: held.collect(),
    }
}
