//! Imports a [`Model`] as a [`Graph`].
//!
//! The importer is a loop over nodes. It looks up inputs by name, copies attributes, and turns inputs that only shape the
//! computation into attributes. A node whose inputs are all constants is folded at once, so the shape arithmetic that
//! exporters write is gone before the next node needs its result.
//!
//! Functions of the model are inlined. So are [bodies]: every iteration of a `Scan`, and what [control] leaves of an `If` or a `Loop`.
//! A [sequence] is a list of the graph's values; the graph itself has no sequences.

use super::Model;
use super::dims::{bind, check_output};
use super::proto::*;
use super::symbolic::{Form, Forms, Ranges, Varying};
use crate::constant::Constant;
use crate::decisions::Decisions;
use crate::dtype::DType;
use crate::error::{Error, Result, ensure};
use crate::graph::{Graph, Kind, MAX_NODES};
use crate::op::{Arity, Attr, Attrs, Fact, Input, OpDef, ValueId};
use crate::ops;
use crate::pass::fold_node;
use crate::tensor::Tensor;
use dependence::{Dependence, Shaped};
pub(super) use find::{Counts, Lengths};
pub(super) use open::Open;
use open::{Notes, Relied, Shaping};
use prost::Message;
use sequence::Named;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use training::Initial;

mod bodies;
mod control;
mod dependence;
mod find;
mod old;
mod open;
mod order;
mod repeat;
mod sequence;
mod training;

/// The first version of ONNX's operators.
const OLDEST_OPSET: i64 = 1;
/// The deepest nesting of functions and bodies.
const MAX_DEPTH: usize = 32;
/// The most work that inlining may repeat: one unit per node, per input and per output, each time it is inlined.
const MAX_WORK: usize = 1 << 22;
/// Copied bytes that count as one unit of work.
const BYTES_PER_UNIT: usize = 1 << 6;
/// The longest name in bytes; the middle of a longer one is left out. Inlined nodes repeat the names of their callers.
const MAX_NAME: usize = 1 << 10;
/// The most numbers in an input that shapes a computation.
const MAX_SHAPING: usize = 1 << 16;

/// Stands for the version of operators that a model does not use: newer than any.
const NO_OPSET: i64 = i64::MAX;
/// The domain of operators that may still change.
const PREVIEW: &str = "ai.onnx.preview";

/// The most constant indices that are looked at.
const MAX_INDICES: usize = 1 << 20;

/// Imports a model whose inputs and outputs stay what they are. What a run finds must be as many as the import knows.
///
/// # Errors
/// As [`Open::new`].
pub(super) fn import_ports(model: &Model, dims: &[(String, usize)]) -> Result<Graph> {
    let counts = Counts { all_known: true, ..Counts::default() };
    let Importer { mut graph, .. } = read(model, dims, &Decisions::default(), &mut counts.clone())?;
    graph.sweep();
    Ok(graph)
}

/// A model as a graph, and the constants of that graph that depend on counts.
pub(super) struct Imported {
    pub graph: Graph,
    pub varying: Varying,
}

/// Reads a model. What is folded follows `decisions`.
fn read<'a>(
    model: &'a Model,
    dims: &[(String, usize)],
    decisions: &Decisions,
    counts: &mut Counts,
) -> Result<Importer<'a>> {
    let proto = model.graph()?;
    let mut bound = BTreeSet::new();
    loop {
        let mut importer = Importer::new(model, &proto.name, decisions.clone());
        importer.bound.clone_from(&bound);
        importer.counts.clone_from(counts);
        importer.check_operators()?;
        match importer.run(proto, dims) {
            // Each time there is one more input that is bound.
            Err(_) if !importer.wanted.is_empty() => bound.append(&mut importer.wanted),
            result => {
                result?;
                for name in &bound {
                    tracing::info!("input '{name}' is bound by value: the plan is for these elements alone");
                }
                *counts = importer.counts.clone();
                return Ok(importer);
            }
        }
    }
}

/// An operator of a model.
#[derive(Debug, Serialize)]
pub struct Operator {
    /// Its name, with its domain unless that is ONNX's.
    pub name: String,
    /// The number of nodes.
    pub nodes: usize,
    /// Why it is not supported, if it is not.
    pub lacks: Option<String>,
    /// True if it finds as many as the run decides where the run gives its input: an output `NAME.count` says how many.
    pub counts: bool,
    /// The first of its nodes.
    pub first: String,
}

/// Why most operators that are not supported are not.
const NO_ROW: &str = "plimsoll does not have this operator";

/// The operators of a model, by name. Those in bodies of `If` and loops are not among them.
pub(super) fn operators(model: &Model) -> Result<Vec<Operator>> {
    Importer::new(model, model.name(), Decisions::default()).operators()
}

struct Importer<'a> {
    model: &'a Model,
    rows: HashMap<&'static str, &'static OpDef>,
    functions: HashMap<FunctionId<'a>, &'a FunctionProto>,
    graph: Graph,
    decisions: Decisions,
    /// Values of [hints](Arity::Hint) that are no constants. Each is reported once.
    unused_hints: HashSet<ValueId>,
    /// The names of initializers that are trained, and their values.
    trained: HashSet<String>,
    weights: HashSet<ValueId>,
    /// Inputs whose given elements are constants, because they shape the computation.
    bound: BTreeSet<String>,
    /// Inputs that are to be bound: their elements are given, and were needed.
    wanted: BTreeSet<String>,
    /// The most iterations of loops, by the dims that bound them.
    trips: HashMap<String, i64>,
    /// The condition under which the nodes that are read now matter.
    guard: Option<ValueId>,
    /// Values as they are read under a guard, by value and guard.
    guarded: HashMap<(ValueId, ValueId), ValueId>,
    counts: Counts,
    dependence: Dependence,
    notes: Notes,
    /// How many were found, in the order of the nodes.
    found: Vec<ValueId>,
    /// The orders of lists of nodes that were read.
    orders: HashMap<order::List, order::Order>,
    /// Work that inlining may still do, in the units of [`MAX_WORK`].
    work_left: usize,
}

/// Domain, name and overload.
type FunctionId<'a> = (&'a str, &'a str, &'a str);

/// The names that nodes of a graph, of a function or of a body can use.
struct Scope<'s, 'a> {
    values: HashMap<&'a str, Named>,
    /// Attributes of a function's caller, which the function's nodes take by `ref_attr_name`.
    attributes: HashMap<&'a str, &'a AttributeProto>,
    /// The scope around a body: the body can use its names, too.
    outer: Option<&'s Scope<'s, 'a>>,
    /// Written before the names of nodes and values.
    prefix: String,
    opset: i64,
    depth: usize,
}

/// A node whose inputs have been looked up and whose attribute references are resolved.
struct Call<'n, 'a> {
    node: &'a NodeProto,
    name: &'n str,
    inputs: Vec<Named>,
    attributes: Vec<(&'a str, &'a AttributeProto)>,
    scope: &'n Scope<'n, 'a>,
}

/// The kinds of operator that a node can name.
enum Meaning<'a> {
    Row(&'static OpDef),
    Function(&'a FunctionProto),
    Bodies,
    Sequence,
}

/// The domain under its shortest name: `ai.onnx` and the empty name are one domain.
fn domain(domain: &str) -> &str {
    if domain == "ai.onnx" { "" } else { domain }
}

/// The operator with its domain, for messages.
fn full_name(node: &NodeProto) -> String {
    match domain(&node.domain) {
        "" => node.op_type.clone(),
        domain => format!("{domain}.{}", node.op_type),
    }
}

/// The name, or its two ends if it is longer than [`MAX_NAME`].
fn shortened(name: String) -> String {
    if name.len() <= MAX_NAME {
        return name;
    }
    let half = MAX_NAME / 2;
    let [head, tail] = [name.floor_char_boundary(half), name.ceil_char_boundary(name.len() - half)];
    format!("{}…{}", &name[..head], &name[tail..])
}

/// The bytes that reading a tensor copies. Raw data is shared, not copied.
fn copied(tensor: &TensorProto) -> usize {
    let wide = tensor.double_data.len() + tensor.int64_data.len() + tensor.uint64_data.len();
    tensor.name.len() + 8 * (tensor.dims.len() + wide) + 4 * (tensor.float_data.len() + tensor.int32_data.len())
}

/// The work of reading a node with these attributes, in the units of [`MAX_WORK`]. Graphs in attributes count on their own.
fn effort(node: &NodeProto, attributes: &[(&str, &AttributeProto)]) -> usize {
    let names = node.input.iter().chain(&node.output).map(String::len).sum::<usize>() + node.name.len();
    let attribute = |(name, a): &(&str, &AttributeProto)| {
        let texts = a.strings.iter().map(|s| s.len()).sum::<usize>() + a.s.len() + name.len();
        texts + 8 * (a.ints.len() + a.floats.len()) + a.t.as_deref().map_or(0, copied)
    };
    let bytes = names + attributes.iter().map(attribute).sum::<usize>();
    1 + node.input.len() + node.output.len() + node.attribute.len() + bytes / BYTES_PER_UNIT
}

fn node_name(node: &NodeProto, index: usize) -> String {
    let output = || node.output.iter().find(|o| !o.is_empty()).cloned();
    let name = Some(&node.name).filter(|n| !n.is_empty()).cloned();
    name.or_else(output).unwrap_or_else(|| format!("{}#{index}", node.op_type))
}

/// The message for a constant input whose elements cannot be read.
fn needed(input: &str, error: &Error) -> String {
    format!("input '{input}' must be known to plan: {error}")
}

/// The imported version of ONNX's own operators, if they are imported.
fn opset(imports: &[OperatorSetIdProto]) -> Result<Option<i64>> {
    match imports.iter().find(|i| domain(&i.domain).is_empty()).map(|i| i.version) {
        Some(version) if version < OLDEST_OPSET => {
            Err(Error::graph(format!("opset {version}: expected {OLDEST_OPSET} or newer")))
        }
        version => Ok(version),
    }
}

impl<'a> Importer<'a> {
    fn new(model: &'a Model, name: &str, decisions: Decisions) -> Importer<'a> {
        let functions = &model.proto.functions;
        let key = |f: &'a FunctionProto| ((domain(&f.domain), f.name.as_str(), f.overload.as_str()), f);
        Importer {
            model,
            rows: ops::all().map(|op| (op.name, op)).collect(),
            functions: functions.iter().map(key).collect(),
            graph: Graph::new(name),
            decisions,
            unused_hints: HashSet::new(),
            trained: model.trains.then(|| model.weights()).into_iter().flatten().map(|weight| weight.name).collect(),
            weights: HashSet::new(),
            bound: BTreeSet::new(),
            wanted: BTreeSet::new(),
            trips: HashMap::new(),
            guard: None,
            guarded: HashMap::new(),
            counts: Counts::default(),
            dependence: Dependence::default(),
            notes: Notes::default(),
            found: Vec::new(),
            orders: HashMap::new(),
            // Reading the whole file once is free.
            work_left: MAX_WORK + model.proto.encoded_len() / BYTES_PER_UNIT,
        }
    }

    fn meaning(&self, node: &'a NodeProto) -> Option<Meaning<'a>> {
        let (domain, op) = (domain(&node.domain), node.op_type.as_str());
        if let Some(function) = self.functions.get(&(domain, op, node.overload.as_str())) {
            return Some(Meaning::Function(function));
        }
        match domain {
            "" | PREVIEW if bodies::OPERATORS.contains(&(domain, op)) => Some(Meaning::Bodies),
            "" if sequence::is_operator(op) => Some(Meaning::Sequence),
            // ONNX Runtime has operators with the name, but not the meaning, of one of ONNX's. Their rows are named with the domain.
            "com.microsoft" => self.rows.get(&full_name(node)[..]).or(self.rows.get(op)).copied().map(Meaning::Row),
            "" => self.rows.get(op).copied().map(Meaning::Row),
            "ai.onnx.ml" | "ai.onnx.preview.training" => self.rows.get(&full_name(node)[..]).copied().map(Meaning::Row),
            _ => None,
        }
    }

    /// The operators of the graph and of the functions that it calls, by name.
    fn operators(&self) -> Result<Vec<Operator>> {
        let mut found: BTreeMap<String, Operator> = BTreeMap::new();
        let mut seen: HashSet<FunctionId> = HashSet::new();
        let mut work: Vec<&'a [NodeProto]> = vec![&self.model.graph()?.node];
        while let Some(nodes) = work.pop() {
            for (index, node) in nodes.iter().enumerate() {
                let meaning = self.meaning(node);
                match meaning {
                    Some(Meaning::Function(f)) if seen.insert((&f.domain, &f.name, &f.overload)) => work.push(&f.node),
                    // A body is checked when it is inlined: the branch that is not taken may hold anything.
                    _ => {}
                }
                let name = full_name(node);
                let operator = found.entry(name).or_insert_with_key(|name| {
                    let nchwc = "it is laid out for one processor; optimize the model less";
                    let reason = ops::unplannable(name).or(name.starts_with("com.microsoft.nchwc.").then_some(nchwc));
                    let lacks = meaning.is_none().then(|| reason.unwrap_or(NO_ROW).to_owned());
                    let counts = ops::finder(name).is_some();
                    Operator { name: name.clone(), nodes: 0, lacks, counts, first: node_name(node, index) }
                });
                operator.nodes += 1;
            }
        }
        Ok(found.into_values().collect())
    }

    /// Refuses operators without a row. One message names them all.
    fn check_operators(&self) -> Result<()> {
        let unknown = |operator: Operator| {
            let Operator { name, nodes, lacks, first, .. } = operator;
            let reason = lacks.map(|why| if why == NO_ROW { String::new() } else { format!(": {why}") })?;
            Some(match nodes {
                1 => format!("{name} (node '{first}'{reason})"),
                count => format!("{name} ({count} nodes, the first is '{first}'{reason})"),
            })
        };
        let list: Vec<_> = self.operators()?.into_iter().filter_map(unknown).collect();
        if list.is_empty() {
            return Ok(());
        }
        let opset = opset(&self.model.proto.opset_import)?.map_or("unknown".into(), |v| v.to_string());
        let these = if list.len() == 1 { "this operator" } else { "these operators" };
        Err(Error::graph(format!(
            "plimsoll does not have {these}: {}; the model's opset is {opset}, and `plimsoll ops` lists those that it has",
            list.join(", ")
        )))
    }

    fn run(&mut self, proto: &'a GraphProto, dims: &[(String, usize)]) -> Result<()> {
        let imports = &self.model.proto.opset_import;
        // A model that uses other domains alone has no version of ONNX's own operators.
        let others = !imports.is_empty() && proto.node.iter().all(|node| !domain(&node.domain).is_empty());
        let opset = opset(imports)?
            .or(others.then_some(NO_OPSET))
            .ok_or_else(|| Error::graph("not a whole ONNX model: it does not say which opset it uses".into()))?;
        let mut scope = Scope::new(String::new(), opset, 0);
        scope.values.reserve(proto.node.len() + proto.initializer.len());
        let training = self.model.training.as_ref();
        let initial = training.map_or(Ok(Initial::new()), |training| self.initial(training, opset))?;
        self.initializers(proto, &initial, &mut scope)?;
        // Up to IR version 3, every initializer was listed as an input, too. The initializer is then the input's value.
        let inputs: Vec<_> = proto.input.iter().filter(|i| !scope.values.contains_key(i.name.as_str())).collect();
        self.trips = dims.iter().map(|(dim, most)| (dim.clone(), i64::try_from(*most).unwrap_or(i64::MAX))).collect();
        let mut grown = self.grown_inputs(&inputs)?;
        for (name, fact) in bind(&inputs, self.model.loops(), dims)? {
            let value = match self.model.values.iter().find(|(given, _)| given == name && self.bound.contains(name)) {
                None => {
                    let input = self.graph.input(name, fact);
                    self.notes.open(input);
                    input
                }
                Some((_, given)) => {
                    let tensor = given.converted(fact.dtype).unwrap_or_else(|| given.clone());
                    ensure((tensor.dtype(), tensor.shape()) == (fact.dtype, &fact.shape), || {
                        Error::usage(format!(
                            "input '{name}': expected {fact}, found {}{}",
                            given.dtype(),
                            given.shape()
                        ))
                    })?;
                    self.graph.constant(Constant::new(name, tensor))
                }
            };
            grown.remove(name).into_iter().for_each(|extents| self.dependence.note(value, extents));
            if scope.values.insert(name, Named::Tensor(value)).is_some() {
                return Err(Error::graph(format!("two inputs are called '{name}'")));
            }
        }
        self.nodes(&proto.node, &mut scope)?;
        self.model.knows_outputs(proto)?;
        training.map_or(Ok(()), |training| self.update(training, &scope))?;
        let mut names = HashSet::new();
        for output in proto.output.iter().filter(|output| self.model.wants(&output.name)) {
            let name = output.name.as_str();
            let value = match scope.find(name) {
                Some(Named::Tensor(value)) => value,
                Some(Named::Sequence(_)) => {
                    return Err(Error::graph(format!(
                        "output '{name}': expected a tensor, found a sequence; make its tensors outputs of the model"
                    )));
                }
                _ => return Err(Error::graph(format!("output '{name}' is produced by no node"))),
            };
            check_output(output, self.graph.fact(value), dims)?;
            // Some exporters list an output twice. One name is one value, so the second is left out.
            if names.insert(name) {
                self.graph.output(name, value);
            } else {
                tracing::warn!(output = name, "listed twice");
            }
        }
        for (&count, known) in self.found.iter().zip(&self.counts.known) {
            self.graph.output(&known.name, count);
        }
        let updates = training.is_some_and(|training| !training.updates.is_empty());
        if proto.output.is_empty() && !updates { Err(Error::graph("it has no outputs".into())) } else { Ok(()) }
    }

    /// Adds the initializers of a graph. Those of the model's graph begin as its training step says.
    fn initializers(&mut self, proto: &'a GraphProto, initial: &Initial<'a>, scope: &mut Scope<'_, 'a>) -> Result<()> {
        let model = self.model;
        let is_main = model.graph().is_ok_and(|main| std::ptr::eq(main, proto));
        let training = model.training.as_ref().filter(|_| is_main);
        let is_trained = |name: &str| {
            training.is_some_and(|training| training.numbers.contains_key(name)) || initial.contains_key(name)
        };
        for sparse in &proto.sparse_initializer {
            let name = sparse.name();
            let value = if is_trained(name) {
                let fact = Fact::new(sparse.dtype()?, sparse.shape()?);
                self.trained(name, fact, model.sparse(sparse, name)?, initial)
            } else {
                self.sparse(sparse, &scope.name(name))
            };
            scope.take(name, value?)?;
        }
        for tensor in &proto.initializer {
            let name = tensor.name.as_str();
            let value = if is_trained(name) {
                let own = self.model.constant(tensor, name.into())?;
                self.trained(name, own.fact.clone(), Some(own), initial)
            } else {
                self.constant(tensor, &scope.name(name))
            };
            let value = value?;
            if is_main && self.trained.contains(name) {
                self.weights.insert(value);
            }
            scope.take(name, value)?;
        }
        Ok(())
    }

    /// Adds a sparse tensor to the graph as a dense constant.
    fn sparse(&mut self, tensor: &SparseTensorProto, name: &str) -> Result<ValueId> {
        match self.model.sparse(tensor, name)? {
            Some(constant) => Ok(self.graph.constant(constant)),
            None => self.zeros(name, Fact::new(tensor.dtype()?, tensor.shape()?)),
        }
    }

    /// Adds a tensor to the graph as a constant, unpacked if several of its elements share a byte.
    fn constant(&mut self, tensor: &TensorProto, name: &str) -> Result<ValueId> {
        let Some((bits, signed)) = tensor.packed() else {
            return Ok(self.graph.constant(self.model.constant(tensor, name.into())?));
        };
        let bytes = self.graph.constant(self.model.constant(&tensor.shared()?, name.into())?);
        let attrs = Attrs::new().with("bits", bits as i64).with("signed", i64::from(signed));
        let attrs = attrs.with("to", tensor.dtype()?.onnx());
        let row = self.rows["plimsoll.Unpack"];
        Ok(self.add(row, name, &[Some(bytes)], attrs.with("shape", &tensor.shape()?[..]), &[name])?[0])
    }

    /// Integers of at most 4 bits as i8, which holds each. Any other value stays as it is.
    fn as_i8(&mut self, value: ValueId, name: &str) -> Result<ValueId> {
        let dtype = self.graph.fact(value).dtype;
        if !dtype.is_narrow() || dtype.is_narrow_float() {
            return Ok(value);
        }
        let attrs = Attrs::new().with("to", DType::I8.onnx());
        Ok(self.add(self.rows["Cast"], &format!("{name}.i8"), &[Some(value)], attrs, &[])?[0])
    }

    /// Adds a node and returns its outputs. A node whose inputs are all constants is folded into constants, unless one is trained.
    fn add(
        &mut self,
        op: &'static OpDef,
        name: &str,
        inputs: &[Option<ValueId>],
        attrs: Attrs,
        outputs: &[&str],
    ) -> Result<Vec<ValueId>> {
        self.add_shaped(op, name, inputs, (attrs, &Shaping::default()), outputs)
    }

    /// Adds a node of which attributes may depend on what is open.
    fn add_shaped(
        &mut self,
        op: &'static OpDef,
        name: &str,
        inputs: &[Option<ValueId>],
        (attrs, shaping): (Attrs, &Shaping),
        outputs: &[&str],
    ) -> Result<Vec<ValueId>> {
        let node = self.graph.add(op, name, inputs, attrs, outputs)?;
        self.notes.added(node, inputs, shaping, self.guard.is_none());
        let varies = self.dependence.read(&self.graph, node, &shaping.forms)?;
        let ports = self.graph.node(node).outputs.len() as u32;
        let own = || (0..ports).map(|port| ValueId { node, port }).collect();
        let is_trained = inputs.iter().flatten().any(|value| self.weights.contains(value));
        let folded = if is_trained { None } else { fold_node(&mut self.graph, node, &self.decisions)? };
        let is_folded = folded.is_some();
        let values = folded.unwrap_or_else(own);
        self.notes.became(node, &values, is_folded);
        self.dependence.keep(&self.graph, &values, varies);
        Ok(values)
    }

    fn nodes(&mut self, nodes: &'a [NodeProto], scope: &mut Scope<'_, 'a>) -> Result<()> {
        let order = self.order(nodes, scope)?;
        for place in 0..nodes.len() {
            let index = order.as_ref().map_or(place, |order| order[place]);
            let node = &nodes[index];
            let name = scope.name(&node_name(node, index));
            let fail = |what: String| Error::Node { node: name.clone(), op: full_name(node), what, file: None };
            let mut inputs = Vec::with_capacity(node.input.len());
            for input in &node.input {
                let value = match scope.values.get(input.as_str()) {
                    _ if input.is_empty() => Some(Named::Nothing),
                    Some(own) => Some(own.clone()),
                    None => scope.find(input).map(|outer| self.guarded(outer)).transpose()?,
                };
                let Some(value) = value else {
                    return Err(fail(format!(
                        "reads '{input}', which is no input, no initializer and no node's output"
                    )));
                };
                inputs.push(value);
            }
            // Constants that folding makes keep the place of the node in the file.
            self.graph.append();
            let outputs = self.node(node, &name, inputs, scope)?;
            for (output, value) in node.output.iter().zip(outputs).filter(|(name, _)| !name.is_empty()) {
                if scope.values.insert(output, value).is_some() {
                    return Err(fail(format!("'{output}' is already another value's name")));
                }
            }
            self.has_room().map_err(fail)?;
        }
        Ok(())
    }

    /// Refuses a graph with more nodes than one may have.
    fn has_room(&self) -> Result<(), String> {
        ensure(self.graph.len() <= MAX_NODES, || {
            format!(
                "functions and loops let the graph grow beyond {MAX_NODES} nodes: expected fewer calls or iterations"
            )
        })
    }

    /// Pays for work that is repeated each time a function or a body is inlined.
    fn spend(&mut self, work: usize) -> Result<(), String> {
        self.work_left = self.work_left.checked_sub(work).ok_or_else(|| {
            format!(
                "functions and loops repeat more than {MAX_WORK} nodes, inputs and outputs, where {BYTES_PER_UNIT} bytes count as one: expected fewer calls or iterations"
            )
        })?;
        Ok(())
    }

    /// Adds the nodes that a node of the file stands for, and returns its outputs.
    fn node(
        &mut self,
        node: &'a NodeProto,
        name: &str,
        inputs: Vec<Named>,
        scope: &Scope<'_, 'a>,
    ) -> Result<Vec<Named>> {
        let mut attributes: Vec<(&'a str, &'a AttributeProto)> = Vec::with_capacity(node.attribute.len());
        for attribute in &node.attribute {
            match attribute.ref_attr_name.as_str() {
                "" => attributes.push((&attribute.name, attribute)),
                // If the function's caller leaves the attribute out, so does the node.
                refers => attributes.extend(scope.attribute(refers).map(|a| (attribute.name.as_str(), a))),
            }
        }
        let call = Call { node, name, inputs, attributes, scope };
        if scope.depth > 0 {
            self.spend(effort(node, &call.attributes)).map_err(|what| call.fail(what))?;
        }
        match self.meaning(node) {
            Some(Meaning::Row(op)) if op.name == "Identity" && matches!(call.inputs[..], [Named::Sequence(_)]) => {
                Ok(call.inputs)
            }
            Some(Meaning::Row(op)) => Ok(self.row(op, &call)?.into_iter().map(Named::Tensor).collect()),
            Some(Meaning::Sequence) => Ok(vec![self.sequence(&call)?]),
            Some(_) if scope.depth == MAX_DEPTH => {
                Err(call.fail(format!("functions or branches nest deeper than {MAX_DEPTH}: does one call itself?")))
            }
            Some(Meaning::Function(function)) => self.function(function, &call),
            Some(Meaning::Bodies) => self.bodies(&call),
            None => Err(call.fail("plimsoll does not have this operator; `plimsoll ops` lists those that it has")),
        }
    }

    /// Adds a node whose operator has a row in the op table.
    fn row(&mut self, op: &'static OpDef, call: &Call<'_, 'a>) -> Result<Vec<ValueId>> {
        let mut inputs = call.tensors()?;
        let outputs: Vec<_> =
            call.node.output.iter().map(|o| if o.is_empty() { String::new() } else { call.scope.name(o) }).collect();
        if op.name == "Constant"
            && let Some(tensor) = call.attribute("value").and_then(|a| a.t.as_deref())
        {
            // As an attribute the elements would be read; as a constant they stay in the file.
            let name = outputs.first().map_or(call.name, String::as_str);
            return Ok(vec![self.constant(tensor, name).map_err(|e| call.fail(e.to_string()))?]);
        }
        if op.name == "Constant"
            && let Some(tensor) = call.attribute("sparse_value").and_then(|a| a.sparse_tensor.as_deref())
        {
            let name = outputs.first().map_or(call.name, String::as_str);
            return Ok(vec![self.sparse(tensor, name).map_err(|e| call.fail(e.to_string()))?]);
        }
        let mut attrs = self.attributes(call)?;
        if op.name == "GatherBlockQuantized" {
            // This row reads u8 as packed elements, so others must not be u8.
            for input in inputs.iter_mut() {
                *input = input.map(|value| self.as_i8(value, call.name)).transpose()?;
            }
        }
        self.modernize(op, call, &mut inputs, &mut attrs)?;
        if let (Some(upgrade), "") = (op.upgrade, domain(&call.node.domain)) {
            upgrade(call.scope.opset, &mut inputs, &mut attrs);
        }
        if let Some(finder) = ops::finder(op.name)
            && self.is_found(finder, op, &inputs)?
        {
            return self.find(finder, call, inputs, attrs);
        }
        let (data, shaping) = self.take_shaping(op, call, inputs, &mut attrs)?;
        let shaped = op.inputs.iter().any(|i| i.shapes() && attrs.get(i.name).is_some());
        if op.attrs.contains(&"num_outputs") && attrs.get("num_outputs").is_none() && !shaped {
            attrs.set("num_outputs", outputs.len() as i64);
        }
        let outputs: Vec<_> = outputs.iter().map(String::as_str).collect();
        // Indices of what is not taken may be any.
        if self.guard.is_none() {
            look_up(&self.graph, op, &data, &attrs).map_err(|what| call.fail(what))?;
        }
        self.add_shaped(op, call.name, &data, (attrs, &shaping), &outputs)
    }

    /// Moves the inputs that shape the computation into attributes. Returns the other inputs, and what the attributes are from.
    fn take_shaping(
        &mut self,
        op: &OpDef,
        call: &Call<'_, 'a>,
        inputs: Vec<Option<ValueId>>,
        attrs: &mut Attrs,
    ) -> Result<(Vec<Option<ValueId>>, Shaping)> {
        let (mut data, mut shaping) = (Vec::with_capacity(inputs.len()), Shaping::default());
        for (slot, input) in inputs.into_iter().enumerate() {
            let declared = op.inputs.get(slot).or(op.inputs.last().filter(|i| i.arity == Arity::Variadic));
            match declared.filter(|declared| declared.shapes()) {
                Some(declared) => {
                    let Some(value) = input else { continue };
                    let Some(attr) = self.shaping(declared, call, value)? else { continue };
                    if attrs.get(declared.name).is_some() {
                        return Err(call.fail(format!(
                            "'{}' is given as an attribute and as an input: expected one of them",
                            declared.name
                        )));
                    }
                    attrs.set(declared.name, attr);
                    shaping.forms.extend(self.dependence.elements(value).map(|own| (declared.name, own.clone())));
                    shaping.values.push((declared.name, self.folded(value)?));
                }
                None if declared.is_none() && input.is_none() => {}
                // If there is one input too many, the graph refuses the node.
                None => data.push(input),
            }
        }
        while data.last().is_some_and(Option::is_none) {
            data.pop();
        }
        Ok((data, shaping))
    }

    /// The attribute that an input becomes. A hint that is no constant becomes none.
    fn shaping(&mut self, declared: &Input, call: &Call<'_, 'a>, value: ValueId) -> Result<Option<Attr>> {
        let input = declared.name;
        let value = self.folded(value)?;
        let others = self.dependence.elements(value).is_some_and(|forms| forms.others() != 0);
        let Some(constant) = self.graph.as_constant(value).filter(|_| !others) else {
            if declared.arity != Arity::Hint {
                let known = self.not_constant(input, value);
                let is_searched = |finder: &ops::Finder| {
                    self.rows[finder.row].inputs.iter().any(|other| other.name == input && !other.shapes())
                };
                let decides = ops::finder(&call.node.op_type).is_some_and(is_searched);
                let more = if decides { "; beside states that grow, how much it finds must be known" } else { "" };
                return Err(call.fail(format!("{known}{more}")));
            }
            if self.unused_hints.insert(value) {
                tracing::warn!(node = call.name, input, "not a constant: the plan follows from shapes instead");
            }
            return Ok(None);
        };
        ensure(constant.fact.shape.numel() <= MAX_SHAPING, || {
            call.fail(format!("input '{input}': expected at most {MAX_SHAPING} numbers, found {}", constant.fact))
        })?;
        let tensor = constant.value().map_err(|e| call.fail(needed(input, &e)))?;
        Ok(Some(Attr::shaping(tensor)))
    }

    /// Folds what a value depends on, if these are weights alone: what shapes the computation is not trained.
    fn folded(&mut self, value: ValueId) -> Result<ValueId> {
        if self.weights.is_empty() || self.graph.node(value.node).op().is_none() {
            return Ok(value);
        }
        for operand in self.graph.operands(value.node).into_iter().flatten() {
            self.folded(operand)?;
        }
        let made = fold_node(&mut self.graph, value.node, &self.decisions)?;
        self.notes.late(value.node);
        Ok(made.map_or(value, |made| made[value.port as usize]))
    }

    /// Inlines the nodes of a function.
    fn function(&mut self, function: &'a FunctionProto, call: &Call<'_, 'a>) -> Result<Vec<Named>> {
        let Call { name, inputs, attributes, scope, .. } = call;
        let fail = |what: String| Error::Node { node: (*name).into(), op: function.name.clone(), what, file: None };
        if inputs.len() > function.input.len() {
            let (expected, found) = (function.input.len(), inputs.len());
            return Err(fail(format!("expected at most {expected} inputs, found {found}")));
        }
        self.spend(1 + function.input.len() + function.output.len() + function.attribute_proto.len()).map_err(fail)?;
        let known = |key| function.attribute.iter().any(|a| a == key);
        let defaults = || function.attribute_proto.iter();
        if let Some((key, _)) = attributes.iter().find(|(key, _)| !known(key) && defaults().all(|d| d.name != *key)) {
            return Err(fail(format!("unknown attribute '{key}'")));
        }
        let opset = opset(&function.opset_import)?.unwrap_or(scope.opset);
        let mut inner = Scope::new(format!("{name}/"), opset, scope.depth + 1);
        inner.attributes = defaults().map(|a| (a.name.as_str(), a)).chain(attributes.iter().copied()).collect();
        let given = inputs.iter().cloned().chain(std::iter::repeat(Named::Nothing));
        inner.values.extend(function.input.iter().map(String::as_str).zip(given));
        self.nodes(&function.node, &mut inner)?;
        let output = |name: &String| {
            inner
                .find(name)
                .filter(|value| !matches!(value, Named::Nothing))
                .ok_or_else(|| fail(format!("the function's output '{name}' is produced by no node")))
        };
        function.output.iter().map(output).collect()
    }

    fn attributes(&self, call: &Call<'_, 'a>) -> Result<Attrs> {
        let mut attrs = Attrs::new();
        for &(key, attribute) in &call.attributes {
            ensure(attrs.get(key).is_none(), || call.fail(format!("attribute '{key}' is given twice")))?;
            let attr = self.attribute(attribute);
            attrs.set(key, attr.map_err(|what| call.fail(format!("attribute '{key}': {what}")))?);
        }
        Ok(attrs)
    }

    fn attribute(&self, attribute: &AttributeProto) -> Result<Attr, String> {
        let text = |s: &bytes::Bytes| String::from_utf8(s.to_vec()).map_err(|_| "expected UTF-8".to_owned());
        let kind = AttributeType::try_from(attribute.r#type).unwrap_or(AttributeType::Undefined);
        Ok(match kind {
            AttributeType::Float => Attr::Float(attribute.f.into()),
            AttributeType::Int => Attr::Int(attribute.i),
            AttributeType::String => Attr::Str(text(&attribute.s)?),
            AttributeType::Floats => Attr::Floats(attribute.floats.iter().map(|&v| v.into()).collect()),
            AttributeType::Ints => Attr::Ints(attribute.ints.clone()),
            AttributeType::Strings => Attr::Strs(attribute.strings.iter().map(text).collect::<Result<_, _>>()?),
            AttributeType::Tensor => {
                let tensor = attribute.t.as_deref().ok_or("it has no value")?;
                let constant = self.model.constant(tensor, String::new()).map_err(|e| e.to_string())?;
                Attr::Tensor(constant.value().map_err(|e| e.to_string())?.clone())
            }
            AttributeType::Undefined => return Err(format!("its type {} is not one of ONNX's", attribute.r#type)),
            other => {
                return Err(format!("expected numbers, text or a tensor, found a value of type {other:?}"));
            }
        })
    }

    /// The message for an input that must be a constant and depends on inputs of the model. Those that are given are to be bound.
    fn not_constant(&mut self, input: &str, value: ValueId) -> String {
        if let Some(forms) = self.dependence.elements(value) {
            let (name, decides) = (self.graph.value_name(value), self.decides(forms.on()));
            return format!(
                "input '{input}' must be known before the run, but '{name}' depends on {decides}: expected a number that no run decides"
            );
        }
        let (mut inputs, mut seen, mut work) = (BTreeSet::new(), HashSet::new(), vec![value]);
        let mut has_state = false;
        while let Some(value) = work.pop() {
            if !seen.insert(value.node) {
                continue;
            }
            let kind = &self.graph.node(value.node).kind;
            has_state |= matches!(kind, Kind::State(_));
            match kind {
                Kind::Input | Kind::State(_) => _ = inputs.insert(self.graph.value_name(value).to_owned()),
                _ => work.extend(self.graph.operands(value.node).into_iter().flatten()),
            }
        }
        let is_given = |name: &String| {
            let given = self.model.values.iter().find(|(given, _)| given == name);
            given.is_some_and(|(_, tensor)| tensor.shape().numel() <= MAX_SHAPING)
        };
        let quoted: Vec<_> = inputs.iter().map(|name| format!("'{name}'")).collect();
        if !has_state && inputs.iter().all(is_given) {
            self.wanted = inputs;
        }
        format!(
            "input '{input}' must be known before the run, but '{}' depends on the data of {}; where their elements are given, they are bound",
            self.graph.value_name(value),
            quoted.join(", ")
        )
    }
}

/// Refuses constant indices that are outside of what they look up. Kernels, which cannot tell, would take other elements.
fn look_up(graph: &Graph, op: &OpDef, data: &[Option<ValueId>], attrs: &Attrs) -> Result<(), String> {
    let number = |name| if let Some(Attr::Int(number)) = attrs.get(name) { *number } else { 0 };
    let &[Some(data), Some(at), ..] = data else { return Ok(()) };
    let (data, constant) = (&graph.fact(data).shape, graph.as_constant(at));
    let Some(constant) = constant.filter(|c| c.fact.shape.numel() <= MAX_INDICES) else { return Ok(()) };
    // The first axis that is looked up, and how many indices an element has.
    let (first, tuple) = match op.name {
        "Gather" | "GatherElements" | "ScatterElements" => {
            let axis = number("axis");
            (if axis < 0 { axis + data.len() as i64 } else { axis }, 1)
        }
        "GatherND" | "ScatterND" => (number("batch_dims"), constant.fact.shape.last().copied().unwrap_or(0)),
        _ => return Ok(()),
    };
    // Whatever else is wrong with the node, its row says. Elements in a file that is missing are not there to plan.
    let axes = usize::try_from(first).ok().and_then(|first| data.get(first..first.checked_add(tuple)?));
    let (Some(axes), Some(indices)) = (axes, constant.value().ok().and_then(Tensor::to_i64)) else { return Ok(()) };
    for (index, &extent) in indices.iter().zip(axes.iter().cycle()) {
        let extent = extent as i64;
        ensure((-extent..extent).contains(index), || {
            format!("input '{}': expected indices from {} to {}, found {index}", op.inputs[1].name, -extent, extent - 1)
        })?;
    }
    Ok(())
}

impl<'a> Call<'_, 'a> {
    fn fail(&self, what: impl Into<String>) -> Error {
        Error::Node { node: self.name.into(), op: full_name(self.node), what: what.into(), file: None }
    }

    fn attribute(&self, key: &str) -> Option<&'a AttributeProto> {
        self.attributes.iter().find(|(k, _)| *k == key).map(|(_, attribute)| *attribute)
    }

    /// The tensor at an input; `None` if the input is left out.
    fn tensor(&self, at: usize) -> Result<Option<ValueId>> {
        let name = self.node.input.get(at).map_or("", String::as_str);
        self.inputs.get(at).cloned().unwrap_or(Named::Nothing).tensor(name).map_err(|what| self.fail(what))
    }

    /// The tensors at all inputs.
    fn tensors(&self) -> Result<Vec<Option<ValueId>>> {
        (0..self.inputs.len()).map(|at| self.tensor(at)).collect()
    }
}

impl<'a> Scope<'_, 'a> {
    /// A scope without names and without a scope around it.
    fn new(prefix: String, opset: i64, depth: usize) -> Scope<'static, 'a> {
        Scope { values: HashMap::new(), attributes: HashMap::new(), outer: None, prefix, opset, depth }
    }

    /// The name in the graph of a node or value with this name in the file.
    fn name(&self, own: &str) -> String {
        shortened(format!("{}{own}", self.prefix))
    }

    /// Notes an initializer.
    fn take(&mut self, name: &'a str, value: ValueId) -> Result<()> {
        let is_new = self.values.insert(name, Named::Tensor(value)).is_none();
        ensure(is_new, || Error::graph(format!("two initializers are called '{name}'")))
    }

    /// The value with this name, here or in a scope around this one.
    fn find(&self, name: &str) -> Option<Named> {
        self.values.get(name).cloned().or_else(|| self.outer?.find(name))
    }

    fn attribute(&self, name: &str) -> Option<&'a AttributeProto> {
        self.attributes.get(name).copied().or_else(|| self.outer?.attribute(name))
    }
}
