//! From a [`Model`] to a [`Graph`].
//!
//! A loop over nodes: inputs are looked up by name, attributes are copied, and inputs that only shape the computation
//! become attributes. Every node whose inputs are known is folded at once, so that the shape arithmetic that exporters
//! write out is gone before the next node asks for its result. Functions of the model are inlined, and so are
//! [bodies]: the branch of an `If` whose condition is known, the iterations of a `Loop` that can be counted. A [sequence] is a list of
//! values, and not in the graph.

use super::Model;
use super::dims::{bind, check_output};
use super::proto::*;
use crate::choices::Choices;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::graph::{Graph, Kind, MAX_NODES};
use crate::op::{Arity, Attr, Attrs, OpDef, ValueId};
use crate::ops;
use crate::pass::fold_node;
use prost::Message;
use sequence::Named;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

mod bodies;
mod sequence;

/// The oldest version of ONNX's operators that rows know to [`upgrade`](OpDef::upgrade).
const OLDEST_OPSET: i64 = 7;
/// Functions and branches nest no deeper.
const MAX_DEPTH: usize = 32;
/// Nodes of functions and bodies are read no more often, each as often as it is inlined, and their inputs and outputs.
const MAX_WORK: usize = 1 << 22;
/// So many bytes that are copied are as much work as a node.
const BYTES: usize = 1 << 6;
/// Of longer names the middle is left out: what stands for a node has its name, as often as there is any.
const MAX_NAME: usize = 1 << 10;
/// An input that shapes a computation holds no more numbers.
const MAX_SHAPING: usize = 1 << 16;

/// The graph of a model, with its dims bound: a named one by its name, an unnamed one of an input as `input.axis`.
///
/// A dim that an input writes as sums and products of other dims (`past + 1`) may be left out.
///
/// # Errors
/// The first thing that is not as ONNX or the op table wants it, with the node; all operators that have no row at once;
/// dims that are not bound, or that the graph does not have.
pub fn import(model: &Model, dims: &[(String, usize)]) -> Result<Graph> {
    import_as(model, dims, Choices::default())
}

/// As [`import`], of a graph that makes these choices.
///
/// # Errors
/// As [`import`].
pub fn import_as(model: &Model, dims: &[(String, usize)], choices: Choices) -> Result<Graph> {
    let run = || {
        let proto = model.graph()?;
        let mut importer = Importer::new(model, &proto.name);
        importer.graph = importer.graph.choosing(choices);
        importer.check_operators()?;
        importer.run(proto, dims)?;
        importer.graph.sweep();
        Ok(importer.graph)
    };
    run().map_err(|e| model.name_file(e))
}

struct Importer<'a> {
    model: &'a Model,
    rows: HashMap<&'static str, &'static OpDef>,
    functions: HashMap<FunctionId<'a>, &'a FunctionProto>,
    graph: Graph,
    /// Constants of elements of which several share a byte: they are held as whole ones.
    few_bits: HashSet<ValueId>,
    /// Values that rows would use if they were constants, and do without.
    unread: HashSet<ValueId>,
    /// What functions and bodies may still take, in units of a node that is read.
    left: usize,
}

/// Domain, name and overload.
type FunctionId<'a> = (&'a str, &'a str, &'a str);

/// What names mean within a graph, a function's body or a branch.
struct Scope<'s, 'a> {
    values: HashMap<&'a str, Named>,
    /// What a function's body may refer to by `ref_attr_name`.
    attributes: HashMap<&'a str, &'a AttributeProto>,
    /// What a branch sees of the graph around it.
    outer: Option<&'s Scope<'s, 'a>>,
    /// Stands before the names of nodes and values.
    prefix: String,
    opset: i64,
    depth: usize,
}

/// What a node's operator stands for.
enum Meaning<'a> {
    Row(&'static OpDef),
    Function(&'a FunctionProto),
    Bodies,
    Sequence,
}

/// ONNX's own operators have two names for their domain.
fn domain(domain: &str) -> &str {
    if domain == "ai.onnx" { "" } else { domain }
}

/// Domain and operator, for messages.
fn full_name(node: &NodeProto) -> String {
    match domain(&node.domain) {
        "" => node.op_type.clone(),
        domain => format!("{domain}.{}", node.op_type),
    }
}

/// A name without what is too much of it.
fn shortened(name: String) -> String {
    if name.len() <= MAX_NAME {
        return name;
    }
    let half = MAX_NAME / 2;
    let [head, tail] = [name.floor_char_boundary(half), name.ceil_char_boundary(name.len() - half)];
    format!("{}…{}", &name[..head], &name[tail..])
}

/// The bytes of a tensor that are copied where it is read.
fn copied(tensor: &TensorProto) -> usize {
    let wide = tensor.double_data.len() + tensor.int64_data.len() + tensor.uint64_data.len();
    tensor.name.len() + 8 * (tensor.dims.len() + wide) + 4 * (tensor.float_data.len() + tensor.int32_data.len())
}

/// What reading a node with these attributes takes, but for their graphs, in units of a node.
fn effort(node: &NodeProto, attributes: &[(&str, &AttributeProto)]) -> usize {
    let names = node.input.iter().chain(&node.output).map(String::len).sum::<usize>() + node.name.len();
    let attribute = |(name, a): &(&str, &AttributeProto)| {
        let texts = a.strings.iter().map(|s| s.len()).sum::<usize>() + a.s.len() + name.len();
        texts + 8 * (a.ints.len() + a.floats.len()) + a.t.as_deref().map_or(0, copied)
    };
    let bytes = names + attributes.iter().map(attribute).sum::<usize>();
    1 + node.input.len() + node.output.len() + node.attribute.len() + bytes / BYTES
}

fn node_name(node: &NodeProto, index: usize) -> String {
    let output = || node.output.iter().find(|o| !o.is_empty()).cloned();
    let name = Some(&node.name).filter(|n| !n.is_empty()).cloned();
    name.or_else(output).unwrap_or_else(|| format!("{}#{index}", node.op_type))
}

/// Why an input that must be known, and is a constant, is not.
fn needed(input: &str, error: &Error) -> String {
    format!("input '{input}' must be known to plan: {error}")
}

/// The version of ONNX's operators among the imports, if it is.
fn opset(imports: &[OperatorSetIdProto]) -> Result<Option<i64>> {
    match imports.iter().find(|i| domain(&i.domain).is_empty()).map(|i| i.version) {
        Some(version) if version < OLDEST_OPSET => {
            Err(Error::graph(format!("opset {version} is too old: expected {OLDEST_OPSET} or newer")))
        }
        version => Ok(version),
    }
}

impl<'a> Importer<'a> {
    fn new(model: &'a Model, name: &str) -> Importer<'a> {
        let functions = &model.proto.functions;
        let key = |f: &'a FunctionProto| ((domain(&f.domain), f.name.as_str(), f.overload.as_str()), f);
        Importer {
            model,
            rows: ops::all().map(|op| (op.name, op)).collect(),
            functions: functions.iter().map(key).collect(),
            graph: Graph::new(name),
            few_bits: HashSet::new(),
            unread: HashSet::new(),
            // What the file has is read once anyway.
            left: MAX_WORK + model.proto.encoded_len() / BYTES,
        }
    }

    fn meaning(&self, node: &'a NodeProto) -> Option<Meaning<'a>> {
        let (domain, op) = (domain(&node.domain), node.op_type.as_str());
        if let Some(function) = self.functions.get(&(domain, op, node.overload.as_str())) {
            return Some(Meaning::Function(function));
        }
        match domain {
            "" if bodies::OPERATORS.contains(&op) => Some(Meaning::Bodies),
            "" if sequence::OPERATORS.contains(&op) => Some(Meaning::Sequence),
            // Some operators of ONNX Runtime are called as one of ONNX's and are none of it: their rows have the domain in the name.
            "com.microsoft" => self.rows.get(&full_name(node)[..]).or(self.rows.get(op)).copied().map(Meaning::Row),
            "" => self.rows.get(op).copied().map(Meaning::Row),
            _ => None,
        }
    }

    /// Refuses operators without a row, all of them at once.
    fn check_operators(&self) -> Result<()> {
        let mut unknown: BTreeMap<String, (usize, String)> = BTreeMap::new();
        let mut seen: HashSet<FunctionId> = HashSet::new();
        let mut work: Vec<&'a [NodeProto]> = vec![&self.model.graph()?.node];
        while let Some(nodes) = work.pop() {
            for (index, node) in nodes.iter().enumerate() {
                match self.meaning(node) {
                    Some(Meaning::Function(f)) if seen.insert((&f.domain, &f.name, &f.overload)) => work.push(&f.node),
                    // Only one branch will be there, and it is checked when it is known which.
                    Some(_) => {}
                    None => unknown.entry(full_name(node)).or_insert_with(|| (0, node_name(node, index))).0 += 1,
                }
            }
        }
        if unknown.is_empty() {
            return Ok(());
        }
        let list: Vec<_> = unknown
            .iter()
            .map(|(op, (count, first))| {
                let nchwc = "it is laid out for one processor; optimize the model less";
                let reason = ops::unplannable(op).or(op.starts_with("com.microsoft.nchwc.").then_some(nchwc));
                let reason = reason.map_or(String::new(), |why| format!(": {why}"));
                match count {
                    1 => format!("{op} (node '{first}'{reason})"),
                    count => format!("{op} ({count} nodes, the first is '{first}'{reason})"),
                }
            })
            .collect();
        let opset = opset(&self.model.proto.opset_import)?.map_or("unknown".into(), |v| v.to_string());
        Err(Error::graph(format!(
            "no such operator: {}; the model's opset is {opset}, and `plimsoll ops` lists the operators there are",
            list.join(", ")
        )))
    }

    fn run(&mut self, proto: &'a GraphProto, dims: &[(String, usize)]) -> Result<()> {
        let opset = opset(&self.model.proto.opset_import)?
            .ok_or_else(|| Error::graph("not a whole ONNX model: it does not say which opset it uses".into()))?;
        let mut scope = Scope {
            values: HashMap::with_capacity(proto.node.len() + proto.initializer.len()),
            attributes: HashMap::new(),
            outer: None,
            prefix: String::new(),
            opset,
            depth: 0,
        };
        self.initializers(proto, &mut scope)?;
        // Up to IR version 3, every initializer was an input, too: its default value, which nobody overrides here.
        let inputs: Vec<_> = proto.input.iter().filter(|i| !scope.values.contains_key(i.name.as_str())).collect();
        for (name, fact) in bind(&inputs, dims)? {
            if scope.values.insert(name, Named::Tensor(self.graph.input(name, fact))).is_some() {
                return Err(Error::graph(format!("two inputs are called '{name}'")));
            }
        }
        self.nodes(&proto.node, &mut scope)?;
        let mut names = HashSet::new();
        for output in &proto.output {
            let name = output.name.as_str();
            let value = match scope.find(name) {
                Some(Named::Tensor(value)) => value,
                Some(Named::Sequence(_)) => {
                    let what = "is a sequence: expected a tensor; let its tensors be outputs";
                    return Err(Error::graph(format!("output '{name}' {what}")));
                }
                _ => return Err(Error::graph(format!("output '{name}' is produced by no node"))),
            };
            check_output(output, self.graph.fact(value), dims)?;
            // Some exporters list a value twice. It is one all the same: values go by their names.
            match names.insert(name) {
                true => self.graph.output(name, value),
                false => tracing::warn!(output = name, "listed twice"),
            }
        }
        match names.is_empty() {
            true => Err(Error::graph("it has no outputs".into())),
            false => Ok(()),
        }
    }

    fn initializers(&mut self, proto: &'a GraphProto, scope: &mut Scope<'_, 'a>) -> Result<()> {
        if let Some(sparse) = proto.sparse_initializer.first() {
            let name = sparse.values.as_ref().map_or("", |v| &v.name);
            return Err(Error::graph(format!("initializer '{name}' is a sparse tensor, which is not supported")));
        }
        for tensor in &proto.initializer {
            let constant = self.constant(tensor, &scope.name(&tensor.name))?;
            if scope.values.insert(&tensor.name, Named::Tensor(constant)).is_some() {
                return Err(Error::graph(format!("two initializers are called '{}'", tensor.name)));
            }
        }
        Ok(())
    }

    /// The value that a tensor is.
    fn constant(&mut self, tensor: &TensorProto, name: &str) -> Result<ValueId> {
        let Some((bits, signed)) = tensor.packed() else {
            return Ok(self.graph.constant(self.model.constant(tensor, name.into())?));
        };
        let bytes = self.graph.constant(self.model.constant(&tensor.shared()?, name.into())?);
        let attrs = Attrs::new().with("bits", bits as i64).with("signed", i64::from(signed));
        let row = self.rows["plimsoll.Unpack"];
        let value = self.add(row, name, &[Some(bytes)], attrs.with("shape", &tensor.shape()?[..]), &[name])?[0];
        self.few_bits.insert(value);
        Ok(value)
    }

    /// A constant of elements of few bits as i8, which holds them whether they have a sign or not; any other value as it is.
    fn whole(&mut self, value: ValueId, name: &str) -> Result<ValueId> {
        if !self.few_bits.contains(&value) || self.graph.fact(value).dtype == DType::I8 {
            return Ok(value);
        }
        let attrs = Attrs::new().with("to", DType::I8.onnx());
        Ok(self.add(self.rows["Cast"], &format!("{name}.whole"), &[Some(value)], attrs, &[])?[0])
    }

    /// The values of a new node, folded if what it takes is known.
    fn add(
        &mut self,
        op: &'static OpDef,
        name: &str,
        inputs: &[Option<ValueId>],
        attrs: Attrs,
        outputs: &[&str],
    ) -> Result<Vec<ValueId>> {
        let node = self.graph.add(op, name, inputs, attrs, outputs)?;
        let ports = self.graph.node(node).outputs.len() as u32;
        let folded = fold_node(&mut self.graph, node)?;
        Ok(folded.unwrap_or_else(|| (0..ports).map(|port| ValueId { node, port }).collect()))
    }

    fn nodes(&mut self, nodes: &'a [NodeProto], scope: &mut Scope<'_, 'a>) -> Result<()> {
        for (index, node) in nodes.iter().enumerate() {
            let name = scope.name(&node_name(node, index));
            let fail = |what: String| Error::Node { node: name.clone(), op: full_name(node), what, file: None };
            let mut inputs = Vec::with_capacity(node.input.len());
            for input in &node.input {
                let value = if input.is_empty() { Some(Named::Nothing) } else { scope.find(input) };
                let Some(value) = value else {
                    let later = nodes.iter().enumerate().skip(index).find(|(_, n)| n.output.contains(input));
                    return Err(fail(match later {
                        Some((at, later)) => format!(
                            "reads '{input}', which node '{}' produces later: expected nodes in the order they run",
                            node_name(later, at)
                        ),
                        None => format!("reads '{input}', which is no input, no initializer and no node's output"),
                    }));
                };
                inputs.push(value);
            }
            // Constants made on the way stand where the node stands.
            self.graph.append();
            let outputs = self.node(node, &name, inputs, scope)?;
            for (output, value) in node.output.iter().zip(outputs).filter(|(name, _)| !name.is_empty()) {
                if scope.values.insert(output, value).is_some() {
                    return Err(fail(format!("'{output}' is already another value's name")));
                }
            }
            if self.graph.len() > MAX_NODES {
                return Err(fail(format!(
                    "functions and loops let the graph grow beyond {MAX_NODES} nodes: expected fewer calls or iterations"
                )));
            }
        }
        Ok(())
    }

    /// Counts what is done as often as a function or a body is inlined.
    fn spend(&mut self, work: usize) -> Result<(), String> {
        let left = self.left.checked_sub(work).ok_or_else(|| {
            format!(
                "functions and loops repeat more than {MAX_WORK} nodes, inputs and outputs, {BYTES} bytes of theirs counted as one: expected fewer calls or iterations"
            )
        })?;
        self.left = left;
        Ok(())
    }

    /// Adds what a node stands for; gives the values of its outputs.
    fn node(
        &mut self,
        node: &'a NodeProto,
        name: &str,
        inputs: Vec<Named>,
        scope: &Scope<'_, 'a>,
    ) -> Result<Vec<Named>> {
        let fail = |what: String| Error::Node { node: name.into(), op: full_name(node), what, file: None };
        let mut attributes: Vec<(&'a str, &'a AttributeProto)> = Vec::with_capacity(node.attribute.len());
        for attribute in &node.attribute {
            match attribute.ref_attr_name.as_str() {
                "" => attributes.push((&attribute.name, attribute)),
                // An attribute that the function's caller leaves out is left out.
                refers => attributes.extend(scope.attribute(refers).map(|a| (attribute.name.as_str(), a))),
            }
        }
        if scope.depth > 0 {
            self.spend(effort(node, &attributes)).map_err(fail)?;
        }
        match self.meaning(node) {
            Some(Meaning::Row(op)) if op.name == "Identity" && matches!(inputs[..], [Named::Sequence(_)]) => Ok(inputs),
            Some(Meaning::Row(op)) => {
                let tensors = inputs.into_iter().zip(&node.input).map(|(value, input)| value.tensor(input));
                let tensors = tensors.collect::<Result<_, _>>().map_err(fail)?;
                let values = self.row(op, node, name, tensors, &attributes, scope)?;
                Ok(values.into_iter().map(Named::Tensor).collect())
            }
            Some(Meaning::Sequence) => {
                let attrs = self.attributes(&attributes).map_err(fail)?;
                let output = node.output.first().filter(|o| !o.is_empty());
                let output = output.map_or(name.to_owned(), |o| scope.name(o));
                Ok(vec![self.sequence(&node.op_type, &output, &inputs, &attrs).map_err(fail)?])
            }
            Some(_) if scope.depth == MAX_DEPTH => {
                Err(fail(format!("functions or branches nest deeper than {MAX_DEPTH}: does one call itself?")))
            }
            Some(Meaning::Function(function)) => self.function(function, name, &inputs, &attributes, scope),
            Some(Meaning::Bodies) => self.bodies(node, name, &inputs, &attributes, scope),
            None => Err(fail("no such operator; `plimsoll ops` lists those there are".into())),
        }
    }

    fn row(
        &mut self,
        op: &'static OpDef,
        node: &'a NodeProto,
        name: &str,
        mut inputs: Vec<Option<ValueId>>,
        attributes: &[(&'a str, &'a AttributeProto)],
        scope: &Scope<'_, 'a>,
    ) -> Result<Vec<ValueId>> {
        let fail = |what: String| Error::Node { node: name.into(), op: full_name(node), what, file: None };
        let outputs: Vec<_> =
            node.output.iter().map(|o| if o.is_empty() { String::new() } else { scope.name(o) }).collect();
        for &(key, attribute) in attributes {
            // A constant's elements stay where they are.
            if let ("Constant", "value", Some(tensor)) = (op.name, key, &attribute.t) {
                let name = outputs.first().map_or(name, String::as_str);
                return Ok(vec![self.constant(tensor, name).map_err(|e| fail(e.to_string()))?]);
            }
        }
        let mut attrs = self.attributes(attributes).map_err(fail)?;
        let few_bits = |input: &Option<ValueId>| input.is_some_and(|value| self.few_bits.contains(&value));
        if op.name == "QuantizeLinear" && inputs.get(2).is_some_and(few_bits) {
            return Err(fail(
                "input 'y_zero_point': expected u8 or i8, found fewer bits: only constants may have them".into(),
            ));
        }
        if op.name == "GatherBlockQuantized" {
            // To this row, bytes are what several numbers share.
            for input in inputs.iter_mut() {
                *input = input.map(|value| self.whole(value, name)).transpose()?;
            }
        }
        if let (Some(upgrade), "") = (op.upgrade, domain(&node.domain)) {
            upgrade(scope.opset, &mut inputs, &mut attrs);
        }
        let mut data = Vec::with_capacity(inputs.len());
        for (slot, input) in inputs.into_iter().enumerate() {
            let declared = op.inputs.get(slot).or(op.inputs.last().filter(|i| i.arity == Arity::Variadic));
            match (declared, input) {
                (Some(declared), value) if declared.shapes() => {
                    let Some(value) = value else { continue };
                    let Some(constant) = self.graph.as_constant(value) else {
                        match declared.arity {
                            Arity::Hint => {
                                if self.unread.insert(value) {
                                    let input = declared.name;
                                    tracing::warn!(node = name, input, "no constant: the plan follows from shapes");
                                }
                                continue;
                            }
                            _ => return Err(fail(self.not_constant(declared.name, value))),
                        }
                    };
                    if constant.fact.shape.numel() > MAX_SHAPING {
                        return Err(fail(format!(
                            "input '{}': found {}, too many numbers",
                            declared.name, constant.fact
                        )));
                    }
                    if attrs.get(declared.name).is_some() {
                        return Err(fail(format!("'{}' is given as an attribute and as an input", declared.name)));
                    }
                    attrs.set(
                        declared.name,
                        Attr::shaping(constant.value().map_err(|e| fail(needed(declared.name, &e)))?),
                    );
                }
                (None, None) => {}
                // One input too many is counted by the graph.
                (_, value) => data.push(value),
            }
        }
        while data.last().is_some_and(Option::is_none) {
            data.pop();
        }
        let shaped = op.inputs.iter().any(|i| i.shapes() && attrs.get(i.name).is_some());
        if op.attrs.contains(&"num_outputs") && attrs.get("num_outputs").is_none() && !shaped {
            attrs.set("num_outputs", outputs.len() as i64);
        }
        let outputs: Vec<_> = outputs.iter().map(String::as_str).collect();
        self.add(op, name, &data, attrs, &outputs)
    }

    fn function(
        &mut self,
        function: &'a FunctionProto,
        name: &str,
        inputs: &[Named],
        attributes: &[(&'a str, &'a AttributeProto)],
        scope: &Scope<'_, 'a>,
    ) -> Result<Vec<Named>> {
        let fail = |what: String| Error::Node { node: name.into(), op: function.name.clone(), what, file: None };
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
        let mut inner = Scope {
            values: HashMap::with_capacity(function.node.len()),
            attributes: defaults().map(|a| (a.name.as_str(), a)).chain(attributes.iter().copied()).collect(),
            outer: None,
            prefix: format!("{name}/"),
            opset: opset(&function.opset_import)?.unwrap_or(scope.opset),
            depth: scope.depth + 1,
        };
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

    fn attributes(&self, attributes: &[(&'a str, &'a AttributeProto)]) -> Result<Attrs, String> {
        let mut attrs = Attrs::new();
        for &(key, attribute) in attributes {
            if attrs.get(key).is_some() {
                return Err(format!("attribute '{key}' is given twice"));
            }
            attrs.set(key, self.attribute(attribute).map_err(|what| format!("attribute '{key}': {what}"))?);
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
            other => return Err(format!("a value of type {other:?} is not supported")),
        })
    }

    /// Why an input that must be known is not.
    fn not_constant(&self, input: &str, value: ValueId) -> String {
        let (mut inputs, mut seen, mut work) = (BTreeSet::new(), HashSet::new(), vec![value]);
        while let Some(value) = work.pop() {
            if !seen.insert(value.node) {
                continue;
            }
            match self.graph.node(value.node).kind {
                Kind::Input => _ = inputs.insert(format!("'{}'", self.graph.value_name(value))),
                _ => work.extend(self.graph.operands(value.node).into_iter().flatten()),
            }
        }
        let inputs: Vec<_> = inputs.into_iter().collect();
        format!(
            "input '{input}' must be known before the run, but '{}' depends on the data of {}",
            self.graph.value_name(value),
            inputs.join(", ")
        )
    }
}

impl<'a> Scope<'_, 'a> {
    /// The name in the graph of what is called so here.
    fn name(&self, own: &str) -> String {
        shortened(format!("{}{own}", self.prefix))
    }

    /// The value of a name, if anything has it.
    fn find(&self, name: &str) -> Option<Named> {
        self.values.get(name).cloned().or_else(|| self.outer?.find(name))
    }

    fn attribute(&self, name: &str) -> Option<&'a AttributeProto> {
        self.attributes.get(name).copied().or_else(|| self.outer?.attribute(name))
    }
}
