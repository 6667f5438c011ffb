//! The content of a model, with nothing bound.

use super::annotations::{Configuration, configurations};
use super::import::{Operator, operators};
use super::proto::*;
use super::{Model, Role, in_graph};
use crate::error::Result;
use serde::Serialize;
use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;

/// The content of a model's file.
#[derive(Debug, Serialize)]
pub struct Inspected {
    /// The graph's name.
    pub graph: String,
    /// The program that wrote the file, and its version.
    pub producer: String,
    /// The version of the format.
    pub ir_version: i64,
    /// Domains of operators, and their versions.
    pub opsets: Vec<(String, i64)>,
    /// Inputs that are no initializers.
    pub inputs: Vec<Declared>,
    /// Inputs that have a default: an initializer of the same name.
    pub defaults: Vec<Declared>,
    /// Outputs.
    pub outputs: Vec<Declared>,
    /// Dims of inputs that a plan needs extents for.
    pub open_dims: Vec<String>,
    /// Dims that bound the iterations of loops, which a plan needs where the run decides how often they run.
    pub loops: Vec<String>,
    /// Operators, by name. Those in bodies of `If` and loops are not among them.
    pub operators: Vec<Operator>,
    /// The number of initializers and tensors in nodes.
    pub weights: usize,
    /// Their bytes, those in other files among them.
    pub weight_bytes: u64,
    /// The numbers that a training may change.
    pub parameters: u64,
    /// The files with external data.
    pub files: Vec<DataFile>,
    /// True if it has a training step.
    pub training: bool,
    /// The initializers, if they are asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub initializers: Option<Vec<Initializer>>,
    /// What tells that an exporter has folded the norms of the network away, if something does.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub folded_norms: Option<String>,
    /// The configurations of several devices that nodes are annotated for.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub configurations: Vec<Configuration>,
}

/// An input or an output as the file declares it.
#[derive(Debug, Serialize)]
pub struct Declared {
    /// Its name.
    pub name: String,
    /// ONNX's name of its element type, or what it is instead of a tensor.
    pub dtype: String,
    /// Its dims: numbers, names, or `?`.
    pub shape: String,
}

/// An initializer.
#[derive(Debug, Serialize)]
pub struct Initializer {
    /// Its name.
    pub name: String,
    /// Its element type.
    pub dtype: String,
    /// Its shape.
    pub shape: Vec<i64>,
    /// Its elements' number.
    pub elements: u64,
    /// Its bytes.
    pub bytes: u64,
    /// What it is to a training; none if it has no axes, or no floats.
    pub role: Option<Role>,
}

/// A file with external data.
#[derive(Debug, Serialize)]
pub struct DataFile {
    /// Its path.
    pub path: PathBuf,
    /// The bytes that tensors take there.
    pub bytes: u64,
    /// True if the file exists.
    pub is_there: bool,
}

impl Model {
    /// The content of the model, with nothing bound; each initializer by itself, if that is asked for.
    ///
    /// # Errors
    /// It has no graph, or a tensor's place in another file is malformed.
    pub fn inspect(&self, lists_initializers: bool) -> Result<Inspected> {
        let (graph, proto) = (self.graph()?, &self.proto);
        let mut files: BTreeMap<PathBuf, u64> = BTreeMap::new();
        let (mut weights, mut weight_bytes) = (0, 0u64);
        in_graph(graph, &mut |tensor| {
            // Of types that are not supported, the bytes in the file are counted.
            let bytes = tensor.byte_len().unwrap_or(tensor.raw_data.len() as u64);
            (weights, weight_bytes) = (weights + 1, weight_bytes.saturating_add(bytes));
            if let Some(external) = tensor.external()? {
                let bytes = files.entry(self.beside(external.location)).or_default();
                *bytes = bytes.saturating_add(external.length);
            }
            Ok(())
        })?;
        let initializers = self.initializers();
        let is_trained = |i: &&Initializer| matches!(i.role, Some(Role::Parameter | Role::Doubtful));
        let domain = |domain: &str| if domain.is_empty() { "ai.onnx".to_owned() } else { domain.to_owned() };
        let file = |(path, bytes): (PathBuf, u64)| DataFile { is_there: path.exists(), path, bytes };
        Ok(Inspected {
            graph: graph.name.clone(),
            producer: format!("{} {}", proto.producer_name, proto.producer_version).trim().to_owned(),
            ir_version: proto.ir_version,
            opsets: proto.opset_import.iter().map(|set| (domain(&set.domain), set.version)).collect(),
            open_dims: self.named_dims(),
            inputs: self.open_inputs().map(declared).collect(),
            defaults: self.inputs_with_default().map(declared).collect(),
            outputs: graph.output.iter().map(declared).collect(),
            loops: self.loops().into_iter().collect(),
            operators: operators(self)?,
            weights,
            weight_bytes,
            files: files.into_iter().map(file).collect(),
            training: self.offers_training(),
            parameters: initializers.iter().filter(is_trained).map(|initializer| initializer.elements).sum(),
            initializers: lists_initializers.then_some(initializers),
            folded_norms: self.folded_norms(),
            configurations: configurations(proto),
        })
    }

    /// The initializers of the graph, in the order of the file.
    fn initializers(&self) -> Vec<Initializer> {
        let roles: HashMap<String, Role> =
            self.weights().into_iter().map(|weight| (weight.name, weight.role)).collect();
        let initializers = self.proto.graph.iter().flat_map(|graph| &graph.initializer);
        let one = |tensor: &TensorProto| Initializer {
            name: tensor.name.clone(),
            dtype: DataType::try_from(tensor.data_type).map_or("unknown", DataType::name).to_owned(),
            shape: tensor.dims.clone(),
            elements: tensor.dims.iter().fold(1, |all: u64, &extent| all.saturating_mul(extent.max(0) as u64)),
            bytes: tensor.byte_len().unwrap_or(tensor.raw_data.len() as u64),
            role: roles.get(&tensor.name).copied(),
        };
        initializers.map(one).collect()
    }
}

fn declared(value: &ValueInfoProto) -> Declared {
    let name = value.name.clone();
    let kind = value.r#type.as_ref().and_then(|of| of.value.as_ref());
    let Some(TypeValue::Tensor(TensorType { elem_type, shape })) = kind else {
        let dtype = match kind {
            None => "unknown",
            Some(TypeValue::Sequence(_)) => "sequence",
            Some(TypeValue::Optional(_)) => "optional",
            Some(TypeValue::Map(_)) => "map",
            Some(TypeValue::SparseTensor(_)) => "sparse tensor",
            Some(_) => "opaque",
        };
        return Declared { name, dtype: dtype.to_owned(), shape: String::new() };
    };
    let dim = |dim: &Dimension| match &dim.value {
        Some(DimensionValue::DimValue(size)) => size.to_string(),
        Some(DimensionValue::DimParam(name)) if !name.is_empty() => name.clone(),
        _ => "?".to_owned(),
    };
    let shape = shape.as_ref().map_or("unknown rank".to_owned(), |shape| {
        format!("[{}]", shape.dim.iter().map(dim).collect::<Vec<_>>().join(", "))
    });
    Declared { name, dtype: DataType::try_from(*elem_type).map_or("unknown", DataType::name).to_owned(), shape }
}
