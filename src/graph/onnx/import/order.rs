//! The order in which nodes run. ONNX wants a file to list them so, and some writers do not.

use super::*;
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::rc::Rc;

/// The order of a list of nodes, as indices; `None` if the list has it.
pub(super) type Order = Option<Rc<[usize]>>;

/// A list of nodes, by its place in the file that was read.
pub(super) type List = (*const NodeProto, usize);

/// A node that waits for itself: it reads what another one makes of its outputs.
struct Circle<'a> {
    node: usize,
    reads: &'a str,
    from: usize,
}

/// Adds the names that a graph reads of those around it.
fn captured<'a>(graph: &'a GraphProto, read: &mut HashSet<&'a str>) {
    let mut own = HashSet::new();
    graph.node.iter().for_each(|node| names(node, &mut own));
    own.extend(graph.output.iter().map(|output| output.name.as_str()));
    for input in &graph.input {
        own.remove(input.name.as_str());
    }
    let made = graph.node.iter().flat_map(|node| &node.output).map(String::as_str);
    let sparse = graph.sparse_initializer.iter().map(|sparse| sparse.name());
    for name in graph.initializer.iter().map(|tensor| tensor.name.as_str()).chain(sparse).chain(made) {
        own.remove(name);
    }
    read.extend(own);
}

/// Adds the names that a node reads, its bodies' among them.
fn names<'a>(node: &'a NodeProto, read: &mut HashSet<&'a str>) {
    read.extend(node.input.iter().map(String::as_str).filter(|name| !name.is_empty()));
    let bodies =
        node.attribute.iter().flat_map(|attribute| attribute.g.as_deref().into_iter().chain(&attribute.graphs));
    bodies.for_each(|body| captured(body, read));
}

/// The order in which nodes run, as near to the list's own as can be. Names that are known before have no producer among them.
fn sorted<'a>(nodes: &'a [NodeProto], is_known: impl Fn(&str) -> bool) -> Result<Order, Circle<'a>> {
    let mut producers: HashMap<&str, usize> = HashMap::new();
    for (at, node) in nodes.iter().enumerate() {
        for output in node.output.iter().filter(|output| !output.is_empty() && !is_known(output)) {
            producers.entry(output).or_insert(at);
        }
    }
    let waits = |node: &'a NodeProto| {
        let mut read = HashSet::new();
        names(node, &mut read);
        let mut waits: Vec<_> = read.into_iter().filter_map(|name| Some((*producers.get(name)?, name))).collect();
        waits.sort_unstable();
        waits
    };
    let waits: Vec<Vec<(usize, &str)>> = nodes.iter().map(waits).collect();
    if waits.iter().enumerate().all(|(at, waits)| waits.iter().all(|&(from, _)| from < at)) {
        return Ok(None);
    }
    let mut followers = vec![Vec::new(); nodes.len()];
    for (at, waits) in waits.iter().enumerate() {
        waits.iter().for_each(|&(from, _)| followers[from].push(at));
    }
    let mut left: Vec<_> = waits.iter().map(Vec::len).collect();
    let mut ready: BinaryHeap<_> = (0..nodes.len()).filter(|&at| left[at] == 0).map(Reverse).collect();
    let (mut order, mut runs) = (Vec::with_capacity(nodes.len()), vec![false; nodes.len()]);
    while let Some(Reverse(at)) = ready.pop() {
        order.push(at);
        runs[at] = true;
        for &next in &followers[at] {
            left[next] -= 1;
            if left[next] == 0 {
                ready.push(Reverse(next));
            }
        }
    }
    // Each node that does not run waits for another. Whoever follows these for long enough goes round a circle.
    let blocked = |at: usize| waits[at].iter().find(|(from, _)| !runs[*from]);
    let Some(mut at) = runs.iter().position(|runs| !runs) else { return Ok(Some(order.into())) };
    for _ in 0..nodes.len() {
        at = blocked(at).map_or(at, |&(from, _)| from);
    }
    let &(from, reads) = blocked(at).unwrap_or(&(at, ""));
    Err(Circle { node: at, reads, from })
}

impl<'a> Importer<'a> {
    /// The order of nodes in this scope. It is found once per list: bodies and functions are inlined many times.
    pub(super) fn order(&mut self, nodes: &'a [NodeProto], scope: &Scope<'_, 'a>) -> Result<Order> {
        let list: List = (nodes.as_ptr(), nodes.len());
        if let Some(order) = self.orders.get(&list) {
            return Ok(order.clone());
        }
        let name = |at: usize| scope.name(&node_name(&nodes[at], at));
        let order = sorted(nodes, |name| scope.find(name).is_some()).map_err(|Circle { node, reads, from }| {
            let what = format!(
                "reads '{reads}', which node '{}' makes, and that node waits for this one: expected nodes that do not wait in a circle",
                name(from)
            );
            Error::Node { node: name(node), op: full_name(&nodes[node]), what, file: None }
        })?;
        if let Some(order) = &order {
            let moved = order.iter().enumerate().find(|(place, at)| place != *at).map_or(0, |(place, _)| place);
            tracing::warn!(node = name(moved), "listed before what it reads: the nodes are sorted by what they read");
        }
        self.orders.insert(list, order.clone());
        Ok(order)
    }
}
