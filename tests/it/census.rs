//! Bytes and time grow with the data: every row of the op table, along every extent of its samples.

use crate::samples::{self, Sample};
use plimsoll::internals::graph::Graph;
use plimsoll::internals::op::{Attr, Attrs, Call, Fact, ValueId};
use plimsoll::internals::plan::{Limits, Recipe};
use plimsoll::internals::target::Target;
use plimsoll::internals::{ops, plan};
use std::collections::BTreeSet;

/// The extents to which samples grow.
const EXTENTS: [usize; 3] = [1 << 8, 1 << 10, 1 << 12];
/// Bytes that a plan may have beside those that grow.
const STILL: f64 = (1 << 16) as f64;
/// The largest exponent of bytes over the bytes of inputs and outputs.
const STEEPEST: f64 = 1.2;

/// Rows that are steeper along an extent: attentions that store their scores there, RoiAlign on wgpu, and a convolution whose library call
/// takes a MiB of workspace from some size on.
const STEEP: [&str; 4] = ["GroupQueryAttention", "PackedAttention", "RoiAlign", "Conv"];

/// The sample with one of its extents grown wherever it stands: in shapes, and, if asked, in attributes.
fn grown(sample: &Sample, from: usize, to: usize, attrs: bool) -> Sample {
    let mut grown = sample.clone();
    for input in grown.inputs.iter_mut().flatten() {
        input.shape.iter_mut().filter(|extent| **extent == from).for_each(|extent| *extent = to);
    }
    if attrs {
        let number = |n: i64| if n == from as i64 { to as i64 } else { n };
        for (name, value) in sample.attrs.iter() {
            match value {
                Attr::Int(n) => grown.attrs.set(name, number(*n)),
                Attr::Ints(all) => grown.attrs.set(name, all.iter().map(|&n| number(n)).collect::<Vec<_>>()),
                _ => {}
            }
        }
    }
    grown
}

/// The graph of a call, and the bytes of what it reads and writes; `None` if there is no such call.
fn graph(sample: &Sample) -> Option<(Graph, u64)> {
    let op = ops::find(sample.op)?;
    let facts: Vec<_> = sample.inputs.iter().map(|i| i.as_ref().map(|i| Fact::new(i.dtype, i.shape.clone()))).collect();
    let facts: Vec<_> = facts.iter().map(Option::as_ref).collect();
    let outputs = (Call { op, attrs: &sample.attrs, inputs: &facts }).infer().ok()?;
    let bytes = facts.iter().flatten().copied().chain(&outputs).map(|fact| fact.bytes() as u64).sum();
    let mut graph = Graph::new(sample.op);
    let inputs: Vec<Option<ValueId>> =
        facts.iter().enumerate().map(|(i, fact)| fact.map(|fact| graph.input(format!("x{i}"), fact.clone()))).collect();
    let node = graph.add(op, sample.op, &inputs, sample.attrs.clone(), &[]).ok()?;
    for port in 0..graph.node(node).outputs.len() {
        graph.output(format!("y{port}"), node.output(port));
    }
    Some((graph, bytes))
}

/// The bytes of the plan of a call, and of what it reads and writes.
fn bytes(sample: &Sample, target: &Target) -> Option<[f64; 2]> {
    let (graph, own) = graph(sample)?;
    let passed = Recipe::default().whole(graph, target).ok()?;
    let (plan, _) = plan::compile(&passed, target, &Limits { memory: None }).ok()?;
    Some([plan.bytes() as f64, own as f64])
}

/// Every way in which a sample grows: the extent, and whether attributes grow with it.
fn ways(sample: &Sample) -> Vec<(usize, bool)> {
    let shapes = sample.inputs.iter().flatten().flat_map(|input| input.shape.iter().copied());
    let attr = |value: &Attr| match value {
        Attr::Int(n) => vec![*n],
        Attr::Ints(all) => all.clone(),
        _ => Vec::new(),
    };
    let numbers = sample.attrs.iter().flat_map(|(_, value)| attr(value)).filter_map(|n| usize::try_from(n).ok());
    let extents: BTreeSet<usize> = shapes.chain(numbers).filter(|&extent| extent > 1).collect();
    extents.into_iter().flat_map(|extent| [(extent, false), (extent, true)]).collect()
}

fn named(sample: &Sample) -> String {
    let inputs: Vec<String> =
        sample.inputs.iter().map(|i| i.as_ref().map_or("-".into(), |i| format!("{}{:?}", i.dtype, i.shape))).collect();
    let attrs: &Attrs = &sample.attrs;
    format!("{} ({}) {attrs:?}", sample.op, inputs.join(", ")).chars().take(200).collect()
}

#[test]
fn bytes_grow_with_the_data() {
    let (mut walked, mut steep) = (0, Vec::new());
    let mut seen = BTreeSet::new();
    for sample in samples::samples() {
        for (extent, attrs) in ways(&sample) {
            for target in [Target::cpu(2), Target::cuda(), Target::wgpu()] {
                let mut points: Vec<[f64; 3]> = Vec::new();
                for to in EXTENTS {
                    let grown = grown(&sample, extent, to, attrs);
                    // A plan of another one that is the same.
                    let key = format!("{} {to} {}", target.name, named(&grown));
                    if points.is_empty() && !seen.insert(key) {
                        break;
                    }
                    let Some([plan, own]) = bytes(&grown, &target) else { break };
                    if let Some(&[before, own_before, extent_before]) = points.last() {
                        let growth = |now: f64, before: f64| ((now + STILL) / (before + STILL)).ln();
                        let data = growth(own, own_before).max((to as f64 / extent_before).ln());
                        let exponent = growth(plan, before) / data;
                        if exponent > STEEPEST && !STEEP.contains(&sample.op) {
                            steep.push(format!(
                                "{}: {before:.0} to {plan:.0} bytes for {own_before:.0} to {own:.0} of data, exponent {exponent:.2}: \
                                 extent {extent} is {to}: {}",
                                target.name,
                                named(&sample)
                            ));
                            break;
                        }
                    }
                    points.push([plan, own, to as f64]);
                }
                walked += usize::from(points.len() > 1);
            }
        }
    }
    eprintln!("{walked} walks");
    assert!(steep.is_empty(), "{} of {walked} are too steep\n{}", steep.len(), steep.join("\n"));
}
