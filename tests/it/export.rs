//! A graph as a model again: the importer is held to it.

use plimsoll::internals::graph::{Kind, Node};
use plimsoll::internals::onnx::proto::*;
use plimsoll::internals::op::{Arity, Attr, Fact, OpDef, ValueId};
use plimsoll::{DType, Error, Graph, Result, Tensor};
use std::collections::{HashMap, HashSet};

/// The version of ONNX's operators that the rows of the op table describe.
const OPSET: i64 = 24;
/// The version of the file format that was released with [`OPSET`].
const IR_VERSION: i64 = 12;

/// Exports a graph as a model that holds all constants itself.
///
/// Attributes that ONNX has as inputs become constant inputs again. If two values share a name, one of them is renamed;
/// inputs and outputs of the graph keep their names.
///
/// # Errors
/// A constant's elements cannot be read, or the graph has a cycle.
pub fn export(graph: &Graph) -> Result<ModelProto> {
    let mut export = Exporter { graph, names: HashMap::new(), used: HashSet::new(), proto: GraphProto::default() };
    export.run()?;
    let opset = OperatorSetIdProto { domain: String::new(), version: OPSET };
    Ok(ModelProto {
        ir_version: IR_VERSION,
        producer_name: env!("CARGO_PKG_NAME").into(),
        producer_version: env!("CARGO_PKG_VERSION").into(),
        opset_import: vec![opset],
        graph: Some(export.proto),
        ..Default::default()
    })
}

struct Exporter<'g> {
    graph: &'g Graph,
    names: HashMap<ValueId, String>,
    used: HashSet<String>,
    proto: GraphProto,
}

impl Exporter<'_> {
    fn run(&mut self) -> Result<()> {
        let graph = self.graph;
        self.proto.name = if graph.name.is_empty() { "graph".into() } else { graph.name.clone() };
        for &input in graph.inputs() {
            let name = self.name(input, graph.value_name(input));
            self.proto.input.push(value_info(name, graph.fact(input)));
        }
        let mut copies = Vec::new();
        for (name, value) in graph.outputs() {
            let given = self.name(*value, name);
            let shown = if given == *name { given } else { self.unique(name) };
            if self.names[value] != shown {
                let (input, output) = (vec![self.names[value].clone()], vec![shown.clone()]);
                copies.push(NodeProto { op_type: "Identity".into(), input, output, ..Default::default() });
            }
            self.proto.output.push(value_info(shown, graph.fact(*value)));
        }
        for id in graph.order()? {
            let node = graph.node(id);
            match &node.kind {
                Kind::Input => {}
                Kind::State(_) => return Err(Error::usage("a state has no form in an inference export".into())),
                Kind::Constant(constant) => {
                    let name = self.name(ValueId { node: id, port: 0 }, &constant.name);
                    self.proto.initializer.push(tensor(&name, constant.value()?)?);
                }
                Kind::Op(op) => self.node(id, op, node)?,
            }
        }
        self.proto.node.extend(copies);
        Ok(())
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
        let wanted = if wanted.is_empty() { "value" } else { wanted };
        let numbered = (2..).map(|n| format!("{wanted}_{n}"));
        let mut names = std::iter::once(wanted.to_owned()).chain(numbered);
        let name = names.find(|n| !self.used.contains(n)).expect("numbers do not end");
        self.used.insert(name.clone());
        name
    }

    fn node(&mut self, id: u32, op: &OpDef, node: &Node) -> Result<()> {
        let mut data = self.graph.operands(id).into_iter();
        let mut input = Vec::new();
        for declared in op.inputs {
            let count = if declared.arity == Arity::Variadic { data.len() } else { 1 };
            match node.attrs.get(declared.name) {
                Some(attr) if declared.shapes() => {
                    let name = self.unique(&format!("{}.{}", node.name, declared.name));
                    self.proto.initializer.push(tensor(&name, &shaping(attr, node)?)?);
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
        let attribute = kept.map(|(name, attr)| attribute(name, attr)).collect::<Result<_>>()?;
        let (name, op_type) = (node.name.clone(), op.name.into());
        self.proto.node.push(NodeProto { input, output, name, op_type, attribute, ..Default::default() });
        Ok(())
    }
}

/// The constant input for a shaping attribute. Numbers become scalars, lists become tensors of one axis.
fn shaping(attr: &Attr, node: &Node) -> Result<Tensor> {
    match attr {
        Attr::Int(v) => Tensor::from_i64(vec![], &[*v]),
        Attr::Ints(v) => Tensor::from_i64([v.len()], v),
        Attr::Float(v) => Ok(Tensor::from_f64(DType::F32, vec![], &[*v])),
        Attr::Floats(v) => Ok(Tensor::from_f64(DType::F32, [v.len()], v)),
        Attr::Tensor(tensor) => Ok(tensor.clone()),
        Attr::Str(_) | Attr::Strs(_) => Err(node.error("expected numbers for an input, found text")),
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
