//! Attributes of a node, and the bodies of loops, which are attributes.

use super::OpDef;
use super::fact::{Fact, NodeId, ValueId};
use crate::dtype::DType;
use crate::tensor::Tensor;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

/// The value of an attribute.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)]
pub enum Attr {
    Int(i64),
    Float(f64),
    Str(String),
    Ints(Vec<i64>),
    Floats(Vec<f64>),
    Strs(Vec<String>),
    Tensor(Tensor),
    Body(Arc<Body>),
}

impl Attr {
    /// The name of the attribute's kind, as ONNX calls it.
    pub fn kind(&self) -> &'static str {
        match self {
            Attr::Int(_) => "int",
            Attr::Float(_) => "float",
            Attr::Str(_) => "string",
            Attr::Ints(_) => "ints",
            Attr::Floats(_) => "floats",
            Attr::Strs(_) => "strings",
            Attr::Tensor(_) => "tensor",
            Attr::Body(_) => "graph",
        }
    }

    /// The attribute that stands for the constant of a shaping input: a number for a scalar, a list for one axis.
    ///
    /// A tensor with more axes stays a tensor. So does one of another type than `i64` and `f32`: the result of a Range, or of a Unique, has
    /// its type.
    pub fn shaping(tensor: &Tensor) -> Attr {
        match (tensor.dtype(), tensor.to_i64(), tensor.shape().is_empty()) {
            (DType::I64, Some(values), true) => Attr::Int(values[0]),
            (DType::F32, _, true) => Attr::Float(tensor.to_f64()[0]),
            (DType::I64, Some(values), _) if tensor.shape().len() == 1 => Attr::Ints(values),
            (DType::F32, _, _) if tensor.shape().len() == 1 => Attr::Floats(tensor.to_f64()),
            _ => Attr::Tensor(tensor.clone()),
        }
    }
}

/// The attributes of a node, by name, in a fixed order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Attrs(BTreeMap<String, Attr>);

impl Attrs {
    /// No attributes.
    pub fn new() -> Attrs {
        Attrs::default()
    }

    /// Attributes of a Slice of this range along one axis.
    pub fn span(axis: usize, span: Range<usize>) -> Attrs {
        let at = |n: usize| vec![n as i64];
        Attrs::new().with("axes", at(axis)).with("starts", at(span.start)).with("ends", at(span.end))
    }

    /// Sets one attribute and returns all.
    pub fn with(mut self, name: &str, value: impl Into<Attr>) -> Attrs {
        self.set(name, value);
        self
    }

    /// Sets an attribute. An earlier value is replaced.
    pub fn set(&mut self, name: &str, value: impl Into<Attr>) {
        self.0.insert(name.to_owned(), value.into());
    }

    /// The attribute's value, if it is set.
    pub fn get(&self, name: &str) -> Option<&Attr> {
        self.0.get(name)
    }

    /// Removes an attribute and returns its value.
    pub fn remove(&mut self, name: &str) -> Option<Attr> {
        self.0.remove(name)
    }

    /// The attributes that have one of these names.
    pub fn only(&self, names: &[&str]) -> Attrs {
        let kept = self.0.iter().filter(|(name, _)| names.contains(&name.as_str()));
        Attrs(kept.map(|(name, value)| (name.clone(), value.clone())).collect())
    }

    /// All attributes in order of their names.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Attr)> {
        self.0.iter().map(|(k, v)| (k.as_str(), v))
    }
}

macro_rules! from {
    ($($kind:ident: $($ty:ty),+);+) => {$($(
        impl From<$ty> for Attr {
            fn from(value: $ty) -> Attr { Attr::$kind(value.into()) }
        }
    )+)+};
}
from!(Int: i64, i32; Float: f64, f32; Str: String, &str; Ints: Vec<i64>; Floats: Vec<f64>; Tensor: Tensor);

impl From<&[usize]> for Attr {
    fn from(values: &[usize]) -> Attr {
        Attr::Ints(values.iter().map(|&v| v as i64).collect())
    }
}

/// Nodes that a loop runs at each step. It grows as a graph that is [built](super::Build).
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Body {
    inputs: Vec<Fact>,
    nodes: Vec<BodyNode>,
    outputs: Vec<ValueId>,
}

/// A node of a body.
#[derive(Clone, Debug, PartialEq)]
pub struct BodyNode {
    /// What it is.
    pub kind: BodyKind,
    /// The values that it reads, by slot.
    pub inputs: Vec<Option<ValueId>>,
    /// The facts of its values.
    pub outputs: Vec<Fact>,
}

/// The kinds of a body's nodes.
#[derive(Clone, Debug)]
pub enum BodyKind {
    /// A call of a row.
    Op(&'static OpDef, Attrs),
    /// A tensor that is known before the run.
    Constant(Tensor),
}

impl PartialEq for BodyKind {
    fn eq(&self, other: &BodyKind) -> bool {
        match (self, other) {
            (BodyKind::Op(op, attrs), BodyKind::Op(other, found)) => op.name == other.name && attrs == found,
            (BodyKind::Constant(constant), BodyKind::Constant(other)) => constant == other,
            _ => false,
        }
    }
}

impl Body {
    /// A body with these inputs, and without nodes.
    pub fn new(inputs: Vec<Fact>) -> Body {
        Body { inputs, ..Body::default() }
    }

    /// Its inputs.
    pub fn inputs(&self) -> &[Fact] {
        &self.inputs
    }

    /// The value of an input.
    pub fn input(&self, input: usize) -> ValueId {
        NodeId::new(input).output(0)
    }

    /// Its nodes, in order. The first has the number behind that of the last input.
    pub fn nodes(&self) -> &[BodyNode] {
        &self.nodes
    }

    /// Its outputs.
    pub fn outputs(&self) -> &[ValueId] {
        &self.outputs
    }

    /// Says what its outputs are.
    pub fn set_outputs(&mut self, outputs: Vec<ValueId>) {
        self.outputs = outputs;
    }

    /// The fact of a value.
    pub fn fact_of(&self, value: ValueId) -> &Fact {
        match value.node.index().checked_sub(self.inputs.len()) {
            Some(node) => &self.nodes[node].outputs[value.port as usize],
            None => &self.inputs[value.node.index()],
        }
    }

    /// Adds a node.
    pub fn push(&mut self, kind: BodyKind, inputs: Vec<Option<ValueId>>, outputs: Vec<Fact>) -> NodeId {
        self.nodes.push(BodyNode { kind, inputs, outputs });
        NodeId::new(self.inputs.len() + self.nodes.len() - 1)
    }
}
