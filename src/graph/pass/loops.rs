//! Loops that differ in their outputs alone become one, and rows that nobody reads are not written.
//!
//! ```text
//! loop -> y, last            loop -> y, last, begun
//! loop -> y, last, begun
//! ```
//! A forward computation and its derivatives ask for the same loop; the derivatives also ask for what each step began with.

use super::Context;
use crate::error::Result;
use crate::graph::Graph;
use crate::op::{Attr, Attrs, Body, Call, Lower, NodeId, ValueId};
use crate::ops::{self, Loop, REPEAT};
use std::collections::HashMap;
use std::sync::Arc;

/// Joins loops, and drops rows.
pub fn run(graph: &mut Graph, _: &Context) -> Result<()> {
    let mut alike: HashMap<(Vec<Option<ValueId>>, String), Vec<NodeId>> = HashMap::new();
    for id in graph.order()? {
        if let Some(mark) = graph.with_call(id, mark).flatten() {
            alike.entry((graph.operands(id), mark)).or_default().push(id);
        }
    }
    let mut groups: Vec<Vec<NodeId>> = alike.into_values().collect();
    groups.sort_unstable();
    for group in groups {
        join(graph, &group)?;
    }
    graph.sweep();
    Ok(())
}

/// What a loop computes, but for its outputs.
fn mark(call: &Call) -> Option<String> {
    if !matches!(call.op.lower, Lower::Repeat) {
        return None;
    }
    let of = Loop::of(call).ok()?;
    let handed = &of.body.outputs()[..of.carried];
    Some(format!("{:?}", (of.times, of.carried, of.scanned, of.reverse, of.body.inputs(), of.body.nodes(), handed)))
}

/// Puts one loop in the place of several, with the rows that somebody reads.
fn join(graph: &mut Graph, group: &[NodeId]) -> Result<()> {
    let first = group[0];
    let Some((body, carried)) = graph
        .with_call(first, |call| {
            let of = Loop::of(call).ok()?;
            Some((Body::clone(of.body), of.carried))
        })
        .flatten()
    else {
        return Ok(());
    };
    let mut rows: Vec<ValueId> = Vec::new();
    let mut read = Vec::new();
    for &id in group {
        let Some(Attr::Body(own)) = graph.node(id).attrs.get("body") else { continue };
        for (port, &row) in own.outputs().iter().enumerate().skip(carried) {
            let value = id.output(port);
            if !graph.users(value).is_empty() || graph.results().any(|result| result == value) {
                let at = rows.iter().position(|&other| other == row).unwrap_or(rows.len());
                if at == rows.len() {
                    rows.push(row);
                }
                read.push((value, carried + at));
            }
        }
    }
    if group.len() == 1 && carried + rows.len() == body.outputs().len() {
        return Ok(());
    }
    let mut joined = body.clone();
    joined.set_outputs([&body.outputs()[..carried], &rows].concat());
    let node = graph.node(first).clone();
    let operands = graph.operands(first);
    graph.insert_at(first);
    let attrs: Attrs = node.attrs.clone().with("body", Attr::Body(Arc::new(joined)));
    let row = ops::find(REPEAT).expect("the table has the row");
    let made = graph.add(row, &node.name, &operands, attrs, &[])?;
    for &id in group {
        (0..carried).for_each(|port| graph.replace(id.output(port), made.output(port)));
    }
    read.into_iter().for_each(|(value, port)| graph.replace(value, made.output(port)));
    Ok(())
}
