//! Draws a graph in Graphviz's language.

use crate::error::Result;
use crate::pass::Prepared;
use std::collections::BTreeMap;

/// The graph in Graphviz's language. Nodes that become one kernel are in one box.
///
/// # Errors
/// The graph has a cycle.
pub fn dot(Prepared { graph, groups: kernels, .. }: &Prepared) -> Result<String> {
    let quote = |text: &str| format!("{text:?}");
    let mut groups: BTreeMap<Option<usize>, Vec<String>> = BTreeMap::new();
    let mut edges = String::new();
    for id in graph.order()? {
        let node = graph.node(id);
        let facts: Vec<_> = node.outputs.iter().map(|o| o.fact.to_string()).collect();
        let label = quote(&format!("{}\n{}\n{}", node.op_name(), node.name, facts.join(" ")));
        groups.entry(kernels.number(id)).or_default().push(format!("  n{id} [shape=box label={label}];\n"));
        for value in graph.operands(id).into_iter().flatten() {
            edges += &format!("  n{} -> n{id};\n", value.node);
        }
    }
    let mut text = format!("digraph {} {{\n", quote(&graph.name));
    for (group, nodes) in groups {
        match group {
            Some(group) => text += &format!("  subgraph cluster_{group} {{\n{}  }}\n", nodes.concat()),
            None => text += &nodes.concat(),
        }
    }
    for (name, value) in graph.outputs() {
        edges += &format!("  n{} -> {};\n", value.node, quote(name));
    }
    for (state, update) in graph.states().iter().filter_map(|s| Some((s.value, s.update?))) {
        edges += &format!("  n{} -> n{} [style=dashed label=update];\n", update.node, state.node);
    }
    Ok(text + &edges + "}\n")
}
