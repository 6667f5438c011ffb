//! Finds the peak of a plan: the step with the most live bytes, and the buffers that hold them.

use super::timeline::Timeline;
use crate::graph::Graph;
use crate::{BufferIdx, Class, StepIdx, View};
use serde::Serialize;
use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};

/// A buffer that holds data at the peak.
#[derive(Clone, Debug, Serialize)]
pub struct Holder {
    /// The tensor's name.
    pub name: String,
    /// The operator that computes it. If one kernel computes several, the last of them.
    pub operator: String,
    /// The template of the kernel that computes it.
    pub kernel: String,
    /// Its class.
    pub class: Class,
    /// Its bytes.
    pub bytes: u64,
}

/// Several buffers in one line.
#[derive(Clone, Debug, Serialize)]
pub struct Rest {
    /// Their class.
    pub class: Class,
    /// Number of buffers.
    pub count: usize,
    /// Bytes of their segments.
    pub bytes: u64,
    /// The name of the largest buffer, if there are buffers.
    pub largest: Option<String>,
}

/// The step of a plan with the most live bytes. The sum of all parts is the plan's bytes.
#[derive(Clone, Debug, Serialize)]
pub struct Peak {
    /// The first step with the most live bytes in the arena; `None` without steps.
    pub step: Option<StepIdx>,
    /// The node that it computes.
    pub name: String,
    /// That node's operator.
    pub operator: String,
    /// Number of steps.
    pub steps: usize,
    /// Bytes of the plan.
    pub bytes: u64,
    /// The largest live buffers of the arena, the largest first.
    pub live: Vec<Holder>,
    /// The other live buffers of the arena.
    pub others: Rest,
    /// Bytes of the arena that hold no data: alignment and gaps.
    pub idle_bytes: u64,
    /// The segments outside the arena, class by class.
    pub held: Vec<Rest>,
}

/// The most buffers that are listed one by one.
const LISTED: usize = 8;

/// The operators of a graph's nodes, by name. Names that nodes with different operators share are left out.
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

/// The peak of a plan. Operators come from the graph that was planned; without a graph, they are the kernels' templates.
pub fn peak(plan: View, graph: Option<&Graph>) -> Peak {
    let operators = operators(graph);
    let kernel = |step: StepIdx| plan.kernels[plan.steps[step].kernel].template.name();
    let operator = |step: StepIdx| {
        let name = plan.steps[step].name.as_str();
        operators.get(name).copied().unwrap_or_else(|| kernel(step)).to_owned()
    };

    let timeline = Timeline::of(plan);
    let step = timeline.peak();
    let found = step.map_or(Vec::new(), |step| timeline.holders(plan, step));
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
        let maker = StepIdx::all(&plan.steps).find(|&s| plan.steps[s].writes.contains(&b));
        let made = |by: &dyn Fn(StepIdx) -> String| maker.map_or_else(|| buffer.class.name().to_owned(), by);
        let (operator, kernel) = (made(&operator), made(&|s| kernel(s).to_owned()));
        live.push(Holder { name: buffer.name.clone(), operator, kernel, class: buffer.class, bytes });
    }
    // An update has the bytes of its state.
    let updates: HashSet<BufferIdx> = plan.state.iter().filter_map(|state| state.update).collect();
    let held = Class::ALL.into_iter().filter(|&class| class.segment() == class && class != Class::Activation);
    let held = held.filter_map(|class| {
        let bytes = plan.class_bytes(class);
        let of = || {
            let own = BufferIdx::enumerate(&plan.buffers).filter(|(b, _)| !updates.contains(b));
            own.map(|(_, buffer)| buffer).filter(|b| plan.segments[b.segment].class == class)
        };
        // The first of equals.
        let largest = of().min_by_key(|b| Reverse(b.bytes)).map(|b| b.name.clone());
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
