//! A graph as a model: nodes, constants, and states as a training step.
//!
//! ```text
//! graph         what the outputs need, with the states that it reads as initializers
//! algorithm     what only updates need, with the states that it reads alone; its outputs are the updates
//! ```

use super::proto::*;
use super::write::write;
use crate::body::inline;
use crate::constant::Constant;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::graph::{Graph, Kind, Node, State};
use crate::op::{Arity, Attr, Fact, NodeId, OpDef, ValueId};
use crate::ops::{Loop, REPEAT};
use crate::pass::dequantized_from;
use crate::tensor::Tensor;
use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::sync::Arc;

/// The version of ONNX's operators that the rows of the op table describe.
const OPSET: i64 = 24;
/// The version of the file format that was released with [`OPSET`].
const IR_VERSION: i64 = 12;
/// The domain of ONNX Runtime's operators.
const MICROSOFT: &str = "com.microsoft";
/// The operator whose constants are numbers that share bytes.
const UNPACK: &str = "plimsoll.Unpack";
/// Its `bits` of the types that [`OPSET`] has.
const FOUR: Attr = Attr::Int(4);
/// The operator that reads such numbers.
const DEQUANTIZE: &str = "DequantizeLinear";
/// Zeros of more bytes than this are written without their elements.
const MAX_ZEROS: usize = 1 << 10;

/// Exports a graph as a model that holds all constants itself. States are initializers of a training step (`training_info`), which
/// [`with_training`](super::Model::with_training) takes.
///
/// Attributes that ONNX has as inputs become constant inputs again. If two values share a name, one of them is renamed: inputs and states of
/// the graph keep their names, and so do outputs, unless an input or a state has the name of one.
///
/// # Errors
/// A constant's elements cannot be read, a state counts rows, or the graph has a cycle.
pub fn export(graph: &Graph) -> Result<ModelProto> {
    export_step(graph, &[])
}

/// Exports as [`export`] does. Outputs of these names, such as a loss, are the training step's.
///
/// # Errors
/// As [`export`].
pub fn export_step(graph: &Graph, outputs: &[String]) -> Result<ModelProto> {
    let outputs: HashSet<&str> = outputs.iter().map(String::as_str).collect();
    let own = needed(graph, &outputs);
    let (names, used, parts) = (HashMap::new(), HashSet::new(), HashMap::new());
    let (main, step) = (GraphProto::default(), GraphProto::default());
    let nodes = HashSet::new();
    let mut export = Exporter { graph, outputs, own, names, used, nodes, parts, main, step };
    let update_binding = export.run()?;
    let Exporter { main, step, .. } = export;
    let is_microsoft = |graph: &GraphProto| graph.node.iter().any(|node| node.domain == MICROSOFT);
    let mut opset_import = vec![OperatorSetIdProto { domain: String::new(), version: OPSET }];
    if is_microsoft(&main) || is_microsoft(&step) {
        opset_import.push(OperatorSetIdProto { domain: MICROSOFT.into(), version: 1 });
    }
    let is_none = update_binding.is_empty() && step.output.is_empty();
    let algorithm = Some(step);
    let training = TrainingInfoProto { algorithm, update_binding, ..Default::default() };
    Ok(ModelProto {
        ir_version: IR_VERSION,
        producer_name: "plimsoll".into(),
        producer_version: env!("CARGO_PKG_VERSION").into(),
        opset_import,
        graph: Some(main),
        training_info: if is_none { Vec::new() } else { vec![training] },
        ..Default::default()
    })
}

/// Per node, true if outputs depend on it that are not the step's; of a graph without states, true for all.
fn needed(graph: &Graph, step: &HashSet<&str>) -> Vec<bool> {
    let mut needed = vec![graph.states().is_empty(); graph.bound()];
    let outputs = graph.outputs().iter().filter(|(name, _)| !step.contains(&name[..]));
    let mut work: Vec<NodeId> = outputs.map(|(_, value)| value.node).collect();
    while let Some(node) = work.pop() {
        if !std::mem::replace(&mut needed[node.index()], true) {
            work.extend(graph.operands(node).into_iter().flatten().map(|value| value.node));
        }
    }
    needed
}

struct Exporter<'g> {
    graph: &'g Graph,
    /// The outputs of the algorithm that update nothing.
    outputs: HashSet<&'g str>,
    /// Per node, true if it belongs to the model's graph, and false if to the algorithm.
    own: Vec<bool>,
    names: HashMap<ValueId, String>,
    used: HashSet<String>,
    /// The names of nodes: within bodies, no two are the same.
    nodes: HashSet<String>,
    /// The names of constants that others are made of, in each of the graphs.
    parts: HashMap<(bool, *const Constant), String>,
    main: GraphProto,
    step: GraphProto,
}

impl Exporter<'_> {
    /// Fills both graphs, and returns the bindings of updates.
    fn run(&mut self) -> Result<Vec<StringStringEntryProto>> {
        let graph = self.graph;
        self.main.name = if graph.name.is_empty() { "graph".into() } else { graph.name.clone() };
        self.step.name = "step".into();
        for &input in graph.inputs() {
            let name = self.name(input, graph.value_name(input));
            let is_own = self.own[input.node.index()] || graph.users(input).is_empty();
            let proto = if is_own { &mut self.main } else { &mut self.step };
            proto.input.push(value_info(name, graph.fact(input)));
        }
        for State { value, .. } in graph.states() {
            self.name(*value, graph.value_name(*value));
        }
        let mut copies = [Vec::new(), Vec::new()];
        for (name, value) in graph.outputs() {
            let given = self.name(*value, name);
            let shown = if given == *name { given } else { self.unique(name) };
            let is_step = self.outputs.contains(&name[..]);
            if self.names[value] != shown {
                copies[usize::from(is_step)].push(identity(&self.names[value], &shown));
            }
            let proto = if is_step { &mut self.step } else { &mut self.main };
            proto.output.push(value_info(shown, graph.fact(*value)));
        }
        for id in graph.order()? {
            let node = graph.node(id);
            match &node.kind {
                Kind::Input => {}
                Kind::State(initial) => {
                    let first = initial.as_ref().map(|initial| initial.value()).transpose()?;
                    self.state(id.output(0), first)?;
                }
                Kind::Constant(constant) => {
                    let name = self.name(id.output(0), &constant.name);
                    let users = graph.users(id.output(0));
                    let shares = !graph.is_output(id.output(0))
                        && users.iter().all(|&user| graph.node(user).op_name() == DEQUANTIZE);
                    self.constant(id, name, constant, shares)?;
                }
                Kind::Op(op) => self.node(id, op, node)?,
            }
        }
        let [main, step] = copies;
        self.main.node.extend(main);
        self.step.node.extend(step);
        let outputs = self.main.output.iter().chain(&self.step.output);
        let mut listed: HashSet<String> = outputs.map(|output| output.name.clone()).collect();
        graph.states().iter().map(|state| self.update(state, &mut listed)).collect()
    }

    /// The graph that a node belongs to.
    fn proto(&mut self, node: NodeId) -> &mut GraphProto {
        if self.own[node.index()] { &mut self.main } else { &mut self.step }
    }

    /// Adds a constant, which belongs to a node's graph. What `DequantizeLinear` makes of numbers stays what it is, and so do numbers that share
    /// bytes, if they may: other operators read whole bytes.
    fn constant(&mut self, id: NodeId, name: String, constant: &Arc<Constant>, shares: bool) -> Result<()> {
        match constant.derivation() {
            Some((op, attrs, inputs, 0)) if dequantized_from(constant).is_some() => {
                let input = inputs.iter().map(|input| self.part(id, input.as_ref())).collect::<Result<_>>()?;
                let attribute = attrs.iter().map(|(name, attr)| attribute(name, attr).map(Box::new));
                let attribute = attribute.collect::<Result<_>>()?;
                let (op_type, output) = (op.name.to_owned(), vec![name.clone()]);
                self.proto(id).node.push(NodeProto { input, output, name, op_type, attribute, ..Default::default() });
            }
            Some((op, attrs, [Some(bytes)], 0)) if shares && op.name == UNPACK && attrs.get("bits") == Some(&FOUR) => {
                let is_signed = attrs.get("signed").is_some_and(|signed| *signed != Attr::Int(0));
                let kind = if is_signed { DataType::Int4 } else { DataType::Uint4 };
                let dims = constant.fact.shape.iter().map(|&dim| dim as i64).collect();
                let packed = tensor(&name, bytes.value()?)?;
                self.proto(id).initializer.push(TensorProto { dims, data_type: kind as i32, ..packed });
            }
            _ => self.proto(id).initializer.push(tensor(&name, constant.value()?)?),
        }
        Ok(())
    }

    /// The name of a constant that another one is made of, which is added once.
    fn part(&mut self, id: NodeId, constant: Option<&Arc<Constant>>) -> Result<String> {
        let Some(constant) = constant else { return Ok(String::new()) };
        let key = (self.own[id.index()], Arc::as_ptr(constant));
        if let Some(name) = self.parts.get(&key) {
            return Ok(name.clone());
        }
        let name = self.unique(&constant.name);
        self.parts.insert(key, name.clone());
        self.constant(id, name.clone(), constant, true)?;
        Ok(name)
    }

    /// Adds a state as an initializer. Many zeros are written without their elements.
    fn state(&mut self, value: ValueId, first: Option<&Tensor>) -> Result<()> {
        let (name, fact) = (self.names[&value].clone(), self.graph.fact(value));
        let proto = self.proto(value.node);
        match first {
            Some(first) => proto.initializer.push(tensor(&name, first)?),
            None if fact.bytes() > MAX_ZEROS => {
                proto.sparse_initializer.push(SparseTensorProto::zeros(&name, fact.dtype, &fact.shape));
            }
            None => {
                let zeros = Tensor::new(fact.dtype, fact.shape.clone(), vec![0; fact.bytes()])?;
                proto.initializer.push(tensor(&name, &zeros)?);
            }
        }
        Ok(())
    }

    /// Binds a state to an output that updates it, which is added if it is not listed yet. A state without an update is bound to itself.
    fn update(&mut self, state: &State, listed: &mut HashSet<String>) -> Result<StringStringEntryProto> {
        let (graph, key) = (self.graph, self.names[&state.value].clone());
        if state.count.is_some() {
            let what = format!("state '{key}' counts the rows of caches that grow, for which ONNX has no form");
            return Err(Error::usage(format!("{what}: give their dim one extent")));
        }
        let new = state.update.unwrap_or(state.value);
        let mut value = self.names[&new].clone();
        if new != state.value && graph.node(new.node).op().is_none() {
            let copy = self.unique(&format!("next {key}"));
            self.step.node.push(identity(&value, &copy));
            value = copy;
        }
        if listed.insert(value.clone()) {
            self.step.output.push(value_info(value.clone(), graph.fact(new)));
        }
        Ok(StringStringEntryProto { key, value })
    }

    /// The name of a value. A value without one gets `wanted`, or a variant of it that is free.
    fn name(&mut self, value: ValueId, wanted: &str) -> String {
        if let Some(name) = self.names.get(&value) {
            return name.clone();
        }
        let name = self.unique(wanted);
        self.names.insert(value, name.clone());
        name
    }

    fn unique(&mut self, wanted: &str) -> String {
        let name = free(if wanted.is_empty() { "value" } else { wanted }, &self.used);
        self.used.insert(name.clone());
        name
    }

    /// Adds a loop, as a `Scan` or, if it reads nothing row by row, as a `Loop`. What it captures is read by its name.
    fn repeat(&mut self, id: NodeId, node: &Node) -> Result<()> {
        let of = self.graph.with_call(id, |call| {
            let of = Loop::of(call)?;
            Ok((of.body.clone(), of.times, (of.carried, of.scanned), of.reverse))
        });
        let (body, times, (carried, scanned), reverse) =
            of.expect("it is an operator").map_err(|what: String| node.error(what))?;
        if reverse && scanned == 0 {
            return Err(node.error("ONNX has no loop that walks back without reading rows"));
        }
        let outer: Vec<String> =
            self.graph.operands(id).into_iter().flatten().map(|value| self.names[&value].clone()).collect();
        let mut step = Graph::new(node.name.clone());
        let given: Vec<ValueId> =
            body.inputs().iter().map(|fact| step.input(format!("{}/given", node.name), fact.clone())).collect();
        for value in inline(&mut step, &body, &node.name, &given)? {
            step.output(format!("{}/made", node.name), value);
        }
        let walked = carried + scanned;
        let names = given.iter().copied().zip(outer.iter().cloned()).skip(walked).collect();
        let mut inner = Exporter {
            graph: &step,
            outputs: HashSet::new(),
            own: vec![true; step.bound()],
            names,
            used: std::mem::take(&mut self.used),
            nodes: std::mem::take(&mut self.nodes),
            parts: HashMap::new(),
            main: GraphProto::default(),
            step: GraphProto::default(),
        };
        inner.run()?;
        let Exporter { mut main, used, nodes, .. } = inner;
        (self.used, self.nodes) = (used, nodes);
        for inner in &mut main.node {
            let wanted = std::mem::take(&mut inner.name);
            inner.name = free(&wanted, &self.nodes);
            self.nodes.insert(inner.name.clone());
        }
        main.input.truncate(walked);
        let mut input = outer[..walked].to_vec();
        let mut attribute = Vec::new();
        let op_type = if scanned > 0 {
            let rows = body.outputs().len() - carried;
            let directions = |count: usize| Attr::Ints(vec![i64::from(reverse); count]);
            attribute.push(self::attribute("num_scan_inputs", &Attr::Int(scanned as i64))?);
            attribute.push(self::attribute("scan_input_directions", &directions(scanned))?);
            attribute.push(self::attribute("scan_output_directions", &directions(rows))?);
            "Scan"
        } else {
            let [number, goes, most] =
                ["number", "goes", "most"].map(|name| self.unique(&format!("{}/{name}", node.name)));
            let on = self.unique(&format!("{}/goes on", node.name));
            self.proto(id).initializer.push(tensor(&most, &Tensor::from_i64([], &[times as i64])?)?);
            main.input.splice(
                0..0,
                [(&number, DType::I64), (&goes, DType::Bool)]
                    .map(|(name, dtype)| value_info(name.clone(), &Fact::new(dtype, []))),
            );
            main.output.insert(0, value_info(on.clone(), &Fact::new(DType::Bool, [])));
            main.node.push(identity(&goes, &on));
            input.splice(0..0, [most, String::new()]);
            "Loop"
        };
        let mut proto = AttributeProto { name: "body".into(), g: Some(Box::new(main)), ..Default::default() };
        proto.set_type(AttributeType::Graph);
        attribute.push(proto);
        let ports = 0..node.outputs.len() as u32;
        let output =
            ports.map(|port| self.name(ValueId { node: id, port }, &node.outputs[port as usize].name)).collect();
        let (name, attribute) = (node.name.clone(), attribute.into_iter().map(Box::new).collect());
        let op_type = op_type.to_owned();
        self.proto(id).node.push(NodeProto { input, output, name, op_type, attribute, ..Default::default() });
        Ok(())
    }

    fn node(&mut self, id: NodeId, op: &OpDef, node: &Node) -> Result<()> {
        if op.name == REPEAT {
            return self.repeat(id, node);
        }
        let mut data = self.graph.operands(id).into_iter();
        let mut input = Vec::new();
        for declared in op.inputs {
            let count = if declared.arity == Arity::Variadic { data.len() } else { 1 };
            match node.attrs.get(declared.name) {
                Some(attr) if declared.shapes() => {
                    let name = self.unique(&format!("{}.{}", node.name, declared.name));
                    let shaping = tensor(&name, &shaping(attr, node)?)?;
                    self.proto(id).initializer.push(shaping);
                    input.push(name);
                }
                None if declared.shapes() => input.push(String::new()),
                _ => {
                    let names = &self.names;
                    let name = |v: Option<ValueId>| v.map_or(String::new(), |v| names[&v].clone());
                    input.extend((0..count).map(|_| name(data.next().flatten())));
                }
            }
        }
        while input.last().is_some_and(String::is_empty) {
            input.pop();
        }
        let ports = 0..node.outputs.len() as u32;
        let output = ports.map(|port| self.name(ValueId { node: id, port }, &node.outputs[port as usize].name));
        let output = output.collect();
        let is_input = |name: &str| op.inputs.iter().any(|i| i.name == name);
        let kept = node.attrs.iter().filter(|(name, _)| !is_input(name));
        let attribute = kept.map(|(name, attr)| attribute(name, attr).map(Box::new)).collect::<Result<_>>()?;
        let name = node.name.clone();
        let (domain, op_type) = match op.name.split_once("com.microsoft.") {
            Some(("", own)) => (MICROSOFT.to_owned(), own.to_owned()),
            None if crate::ops::is_of_runtime(op) => (MICROSOFT.to_owned(), op.name.to_owned()),
            _ => (String::new(), op.name.to_owned()),
        };
        self.proto(id).node.push(NodeProto { input, output, name, op_type, domain, attribute, ..Default::default() });
        Ok(())
    }
}

/// A name, or a variant of it that is not used.
fn free(wanted: &str, used: &HashSet<String>) -> String {
    let numbered = (2..).map(|n| format!("{wanted}_{n}"));
    let mut names = std::iter::once(wanted.to_owned()).chain(numbered);
    names.find(|name| !used.contains(name)).expect("numbers do not end")
}

fn identity(input: &str, output: &str) -> NodeProto {
    let (input, output) = (vec![input.to_owned()], vec![output.to_owned()]);
    NodeProto { op_type: "Identity".into(), input, output, ..Default::default() }
}

/// The constant input for a shaping attribute. Numbers become scalars, lists become tensors of one axis.
fn shaping(attr: &Attr, node: &Node) -> Result<Tensor> {
    match attr {
        Attr::Int(v) => Tensor::from_i64(vec![], &[*v]),
        Attr::Ints(v) => Tensor::from_i64([v.len()], v),
        Attr::Float(v) => Ok(Tensor::from_f64(DType::F32, vec![], &[*v])),
        Attr::Floats(v) => Ok(Tensor::from_f64(DType::F32, [v.len()], v)),
        Attr::Tensor(tensor) => Ok(tensor.clone()),
        Attr::Str(_) | Attr::Strs(_) | Attr::Body(_) => {
            Err(node.error(format!("expected numbers for an input, found {}", attr.kind())))
        }
    }
}

fn tensor(name: &str, tensor: &Tensor) -> Result<TensorProto> {
    TensorProto::new(name, tensor.dtype(), tensor.shape(), tensor.bytes().clone())
}

fn attribute(name: &str, attr: &Attr) -> Result<AttributeProto> {
    let mut proto = AttributeProto { name: name.into(), ..Default::default() };
    let kind = match attr {
        Attr::Int(v) => {
            proto.i = *v;
            AttributeType::Int
        }
        Attr::Float(v) => {
            proto.f = *v as f32;
            AttributeType::Float
        }
        Attr::Str(v) => {
            proto.s = v.clone().into();
            AttributeType::String
        }
        Attr::Ints(v) => {
            proto.ints = v.clone();
            AttributeType::Ints
        }
        Attr::Floats(v) => {
            proto.floats = v.iter().map(|&v| v as f32).collect();
            AttributeType::Floats
        }
        Attr::Strs(v) => {
            proto.strings = v.iter().map(|v| v.clone().into()).collect();
            AttributeType::Strings
        }
        Attr::Tensor(v) => {
            proto.t = Some(Box::new(tensor("", v)?));
            AttributeType::Tensor
        }
        Attr::Body(_) => return Err(Error::graph(format!("attribute '{name}': a body is written as a loop"))),
    };
    proto.set_type(kind);
    Ok(proto)
}

fn value_info(name: String, fact: &Fact) -> ValueInfoProto {
    let dim = |&d: &usize| Dimension { value: Some(DimensionValue::DimValue(d as i64)), ..Default::default() };
    let shape = Some(TensorShapeProto { dim: fact.shape.iter().map(dim).collect() });
    let tensor = TensorType { elem_type: DataType::from(fact.dtype) as i32, shape };
    let r#type = Some(TypeProto { value: Some(TypeValue::Tensor(tensor)), ..Default::default() });
    ValueInfoProto { name, r#type, ..Default::default() }
}

impl Graph {
    /// Writes the graph as a model that holds its constants: `.onnxtxt` as text, any other name as protobuf. Its states become a training
    /// step, which `Options::training` runs. A reader sees the old file or the complete new one.
    ///
    /// ```
    /// use plimsoll::{Choice, Options, Session, Tensor, Trace};
    /// let trace = Trace::new("counter");
    /// let count = trace.state("count", Tensor::from_f32([1], &[2.0])?);
    /// trace.update(count, count + 1.0);
    /// let path = std::env::temp_dir().join(format!("counter-{}.onnx", std::process::id()));
    /// trace.finish()?.save(&path)?;
    /// let session = Session::from_path(&path, &Options { training: true, ..Options::default().on(Choice::Cpu) })?;
    /// session.run(&[])?;
    /// assert_eq!(session.state("count")?.to_f64(), [3.0]);
    /// # std::fs::remove_file(path).expect("it was written");
    /// # Ok::<(), plimsoll::Error>(())
    /// ```
    ///
    /// # Errors
    /// A constant's elements cannot be read, a state counts the rows of a cache that grows, or the file cannot be written.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<()> {
        write(export(self)?, path.as_ref(), None)
    }
}
