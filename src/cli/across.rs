//! `compare --across`: a graph on two devices, or on one and by the reference, node by node.
//!
//! ```text
//! the graph as it is                      --run both ways--> its outputs
//! its values, some at a time, as outputs  --run both ways--> the first node whose values differ
//! ```

use super::expect::{self, Same, Tolerance};
use super::subject::Subject;
use super::{Failure, line};
use crate::error::{Error, Result};
use crate::exec;
use crate::graph::Graph;
use crate::op::ValueId;
use crate::plan::Recipe;
use crate::session::{self, Choice, Options, Session};
use crate::tensor::Tensor;
use crate::{figures, reference};
use serde_json::json;
use std::collections::HashSet;

/// The most bytes of values that are held against each other at a time, unless one value has more.
const AT_ONCE: u64 = 256 << 20;

/// A way to compute a graph.
#[derive(Clone, PartialEq)]
enum Way {
    /// On a backend, and its device if one is named.
    Device(Choice, Option<String>),
    /// In `f64`, by what its operators mean.
    Reference,
}

/// Two ways.
#[derive(Clone)]
pub(super) struct Ways([Way; 2]);

/// Reads `cpu,wgpu` or `cpu,cuda:1`.
pub(super) fn ways(text: &str) -> Result<Ways, String> {
    let way = |text: &str| {
        let (name, device) =
            text.split_once(':').map_or((text, None), |(name, device)| (name, Some(device.to_owned())));
        Ok(match (name, &device) {
            ("cpu", None) => Way::Device(Choice::Cpu, None),
            ("cuda", _) => Way::Device(Choice::Cuda, device),
            ("wgpu", _) => Way::Device(Choice::Wgpu, device),
            ("reference", None) => Way::Reference,
            _ => return Err(format!("expected cpu, cuda, wgpu or reference, found '{text}'")),
        })
    };
    let (one, other) = text.split_once(',').ok_or("expected two, such as cpu,wgpu")?;
    let mut ways = [way(one)?, way(other)?];
    if ways[0] == ways[1] {
        return Err(format!("expected two different ones, found '{text}'"));
    }
    // The one that is expected comes first.
    if ways[1] == Way::Reference {
        ways.reverse();
    }
    Ok(Ways(ways))
}

/// A value of a graph.
struct Value {
    id: ValueId,
    /// Its name as an output.
    output: String,
    bytes: u64,
}

/// A node whose values differ.
struct Differs {
    node: String,
    operator: &'static str,
    value: String,
    /// How they differ.
    how: String,
}

/// A graph and its inputs, to be computed in two ways.
pub(super) struct Across<'a> {
    pub(super) graph: &'a Graph,
    pub(super) inputs: Vec<(String, Tensor)>,
    pub(super) options: Options,
    pub(super) ways: Ways,
    pub(super) tolerance: Tolerance,
}

impl Across<'_> {
    pub(super) fn run(&self, subject: &Subject, json: bool) -> Result<String, Failure> {
        let ([first, second], devices) = self.both(self.graph.clone(), &self.options)?;
        let (mut same, mut beyond) = (Vec::new(), None);
        for ((name, _), (expected, found)) in self.graph.outputs().iter().zip(first.iter().zip(&second)) {
            match Same::new(&format!("output '{name}'"), name, found, expected, self.tolerance) {
                Ok(found) => same.push(found),
                Err(error) => beyond = beyond.or(Some(how(error))),
            }
        }
        drop((first, second));
        let values = values(self.graph)?;
        let differs = self.first(&values)?;
        let nodes = values.iter().map(|value| value.id.node).collect::<HashSet<_>>().len();
        let head = format!("{} on {} and {}", subject.heading(), devices[0], devices[1]);
        let mut record = json!({
            "model": self.graph.name,
            "devices": devices,
            "outputs": same.iter().map(Same::json).collect::<Vec<_>>(),
            "nodes": nodes,
            "first": differs.as_ref().map(|Differs { node, operator, value, how }| {
                json!({"node": node, "operator": operator, "value": value, "difference": how})
            }),
        });
        subject.name_in(&mut record);
        let error = match (differs, beyond) {
            (Some(Differs { node, operator, how, .. }), _) => {
                format!("node '{node}' ({operator}) is the first of {nodes} that differs: {how}")
            }
            (None, Some(how)) => format!("{how}; each of the {nodes} nodes by itself agrees: fused kernels differ"),
            (None, None) if json => return Ok(line(&record)),
            (None, None) => {
                let nodes = figures::count(nodes as u64, "node");
                return Ok(format!("{head}\n{}\nthe values of {nodes} agree\n", expect::table("output", &same)));
            }
        };
        let error = Error::differ(error);
        if json { Err(Failure::with(error, record)) } else { Err(error.into()) }
    }

    /// The outputs of a graph in both ways, and where each was computed.
    fn both(&self, graph: Graph, options: &Options) -> Result<([Vec<Tensor>; 2], [String; 2])> {
        let [one, other] = &self.ways.0;
        let (first, device) = self.outputs(one, graph.clone(), options)?;
        let (second, beside) = self.outputs(other, graph, options)?;
        Ok(([first, second], [device, beside]))
    }

    fn outputs(&self, way: &Way, graph: Graph, options: &Options) -> Result<(Vec<Tensor>, String)> {
        let Way::Device(backend, device) = way else {
            let inputs: Vec<_> = self.inputs.iter().map(|(_, tensor)| tensor.clone()).collect();
            let ports = graph.outputs().iter().map(|(name, _)| (&name[..], graph.counted(name)));
            return Ok((exec::found(ports, reference::run(&graph, &inputs)?), "the reference in f64".to_owned()));
        };
        let options = Options { device: device.clone(), ..options.clone() }.on(*backend);
        let device = session::open(&options)?;
        let session = Session::new(options.job([("", graph)], &device), device, &|_, _| {})?;
        let inputs: Vec<_> = self.inputs.iter().map(|(name, tensor)| (&name[..], tensor.clone())).collect();
        let outputs = session.run(&inputs)?.into_iter().map(|(_, tensor)| tensor).collect();
        Ok((outputs, session.device().to_owned()))
    }

    /// The first node, in the graph's order, whose values differ. Each node has kernels of its own.
    fn first(&self, values: &[Value]) -> Result<Option<Differs>> {
        let recipe = Recipe { fuse: false, ..self.options.recipe };
        // The values of all nodes at once may take any memory.
        let options = Options { memory_limit: None, recipe, ..self.options.clone() };
        let mut rest = values;
        while !rest.is_empty() {
            let mut sum = 0u64;
            let within = |value: &&Value| {
                sum = sum.saturating_add(value.bytes);
                sum <= AT_ONCE
            };
            let count = rest.iter().take_while(within).count().max(1);
            let (now, later) = rest.split_at(count);
            rest = later;
            let mut graph = self.graph.clone();
            now.iter().for_each(|value| graph.output(&*value.output, value.id));
            graph.keep_outputs(&now.iter().map(|value| value.output.clone()).collect::<Vec<_>>())?;
            let ([first, second], _) = self.both(graph, &options)?;
            for (Value { id, .. }, (expected, found)) in now.iter().zip(first.iter().zip(&second)) {
                let (node, value) = (self.graph.node(id.node), self.graph.value_name(*id));
                if let Err(error) = Same::new(&format!("value '{value}'"), value, found, expected, self.tolerance) {
                    let (node, operator, value) = (node.name.clone(), node.op_name(), value.to_owned());
                    return Ok(Some(Differs { node, operator, value, how: how(error) }));
                }
            }
        }
        Ok(None)
    }
}

/// The difference that an error tells of.
fn how(error: Error) -> String {
    match error {
        Error::Differ { what, .. } => what,
        error => error.to_string(),
    }
}

/// The values of the nodes that compute something of inputs or states, in the graph's order.
fn values(graph: &Graph) -> Result<Vec<Value>> {
    let mut moving = HashSet::new();
    let mut values = Vec::new();
    for node in graph.order()? {
        let own = graph.node(node);
        let moves = match own.op() {
            None => graph.as_constant(node.output(0)).is_none(),
            Some(_) => graph.operands(node).iter().flatten().any(|value| moving.contains(&value.node)),
        };
        if !moves {
            continue;
        }
        moving.insert(node);
        if own.op().is_none() {
            continue;
        }
        for (port, output) in own.outputs.iter().enumerate() {
            let bytes = (output.fact.shape.numel() * output.fact.dtype.size()) as u64;
            let number = values.len();
            values.push(Value { id: node.output(port), output: format!("plimsoll.value.{number}"), bytes });
        }
    }
    Ok(values)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_different_ways_are_read() {
        let found = |text: &str| ways(text).map(|Ways(ways)| ways).map_err(|e| e.to_string());
        let wgpu = Way::Device(Choice::Wgpu, Some("llvmpipe".into()));
        assert!(found("cpu,wgpu:llvmpipe").is_ok_and(|found| found == [Way::Device(Choice::Cpu, None), wgpu]));
        for text in ["reference,cpu", "cpu,reference"] {
            assert!(found(text).is_ok_and(|found| found[0] == Way::Reference), "{text}");
        }
        for text in ["cpu", "cpu,cpu", "cpu,tpu", "cpu:1,wgpu", "cpu,wgpu,cuda", ""] {
            assert!(found(text).is_err(), "{text}");
        }
    }
}
