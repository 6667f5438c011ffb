//! Training steps in files: `training_info` has an algorithm, a graph that goes on where the model's graph ends. Initializers that its
//! `update_binding` names are states.
//!
//! ```text
//! graph                              x, w --MatMul--> y
//! algorithm                          y, target --..--> loss, gradient;   w, gradient --..--> next_w
//! update_binding                     w = next_w
//! ```

use super::Model;
use super::proto::*;
use crate::dtype::DType;
use crate::error::{Error, Result, ensure};
use std::collections::{HashMap, HashSet};

/// A training step that has been joined to its model's graph.
#[derive(Clone, Debug)]
pub(super) struct Training {
    /// Initializers, and the outputs that update them. One that names itself stays as it is.
    pub(super) updates: Vec<(String, String)>,
    /// The outputs of the algorithm that update nothing, such as a loss.
    pub(super) outputs: Vec<String>,
    /// The numbers of these initializers in the order of the file, which is that of the states.
    pub(super) numbers: HashMap<String, usize>,
    /// A graph without inputs, which computes what initializers begin with.
    pub(super) initialization: GraphProto,
    /// Initializers, and the values of that graph that they begin with.
    pub(super) bindings: Vec<(String, String)>,
    /// Initializers that begin with zeros.
    pub(super) zeros: Vec<Zeros>,
}

/// An initializer that a ConstantOfShape fills with zeros. They take no memory before they are on a device.
#[derive(Clone, Debug)]
pub(super) struct Zeros {
    pub(super) name: String,
    pub(super) dtype: DType,
    /// The value of the initialization that is the shape.
    pub(super) shape: String,
}

impl Model {
    /// True if the file has a training step that the model does not take.
    pub fn offers_training(&self) -> bool {
        !self.proto.training_info.is_empty()
    }

    /// The outputs of the training step that update nothing.
    pub fn step_outputs(&self) -> &[String] {
        self.training.as_ref().map_or(&[], |training| &training.outputs)
    }

    /// This model with its file's training step: one graph, whose states are the initializers that the step updates. Outputs of the step
    /// that update none, such as a loss, are outputs of the graph.
    ///
    /// # Errors
    /// When the file has no training step or several, or its bindings do not hold what ONNX demands.
    pub fn with_training(mut self) -> Result<Model> {
        let infos = std::mem::take(&mut self.proto.training_info);
        let step = join(&mut self.proto, infos).map_err(|what| self.name_file(Error::graph(what)))?;
        self.training = Some(step);
        Ok(self)
    }
}

/// Appends an algorithm to the graph of its model.
fn join(model: &mut ModelProto, infos: Vec<TrainingInfoProto>) -> Result<Training, String> {
    let count = infos.len();
    let Ok([info]) = <[_; 1]>::try_from(infos) else {
        return Err(format!("expected a file with one training step (training_info), found {count}"));
    };
    let graph = model.graph.as_mut().ok_or("it has no graph")?;
    let algorithm = info.algorithm.unwrap_or_default();
    let updates = pairs(info.update_binding, "update_binding")?;
    let mut bindings = pairs(info.initialization_binding, "initialization_binding")?;
    let outputs: HashSet<&str> = graph.output.iter().chain(&algorithm.output).map(|o| o.name.as_str()).collect();
    if let Some((state, value)) = updates.iter().find(|(_, value)| !outputs.contains(&value[..])) {
        return Err(format!(
            "update_binding '{state}={value}': '{value}' is no output of the algorithm or of the graph"
        ));
    }
    let updating: HashSet<&str> = updates.iter().map(|(_, value)| value.as_str()).collect();
    let own =
        algorithm.output.into_iter().filter(|output| !updating.contains(output.name.as_str())).collect::<Vec<_>>();
    let outputs = own.iter().map(|output| output.name.clone()).collect();
    graph.output.extend(own);
    graph.node.extend(algorithm.node);
    graph.initializer.extend(algorithm.initializer);
    graph.sparse_initializer.extend(algorithm.sparse_initializer);
    graph.input.extend(algorithm.input);
    let dense = graph.initializer.iter().map(|tensor| tensor.name.as_str());
    let names: HashSet<&str> = dense.chain(graph.sparse_initializer.iter().map(SparseTensorProto::name)).collect();
    for (pairs, field) in [(&updates, "update_binding"), (&bindings, "initialization_binding")] {
        if let Some((state, value)) = pairs.iter().find(|(state, _)| !names.contains(&state[..])) {
            return Err(format!("{field} '{state}={value}': '{state}' is no initializer"));
        }
    }
    let mut initialization = info.initialization.unwrap_or_default();
    let zeros = take_zeros(&mut initialization, &mut bindings);
    let numbers = updates.iter().enumerate().map(|(number, (name, _))| (name.clone(), number)).collect();
    Ok(Training { updates, outputs, numbers, initialization, bindings, zeros })
}

/// Keys with a value each.
fn pairs(entries: Vec<StringStringEntryProto>, field: &str) -> Result<Vec<(String, String)>, String> {
    let mut keys = HashSet::new();
    for StringStringEntryProto { key, .. } in &entries {
        ensure(keys.insert(key), || format!("{field}: '{key}' is bound twice"))?;
    }
    Ok(entries.into_iter().map(|entry| (entry.key, entry.value)).collect())
}

/// Takes the bindings of zeros from the others, and from the graph the nodes that make these zeros alone.
fn take_zeros(graph: &mut GraphProto, bindings: &mut Vec<(String, String)>) -> Vec<Zeros> {
    let mut fills: HashMap<&str, (DType, &str)> = HashMap::new();
    for node in graph.node.iter().filter(|node| node.op_type == "ConstantOfShape" && node.domain.is_empty()) {
        let dtype = match &node.attribute[..] {
            [] => Some(DType::F32),
            [value] => value.t.as_ref().filter(|t| value.name == "value" && t.is_zero()).and_then(|t| t.dtype().ok()),
            _ => None,
        };
        if let (Some(dtype), [shape], [output]) = (dtype, &node.input[..], &node.output[..]) {
            fills.insert(output, (dtype, shape));
        }
    }
    let mut zeros = Vec::new();
    for (name, value) in &*bindings {
        if let Some(&(dtype, shape)) = fills.get(&value[..]) {
            zeros.push(Zeros { name: name.clone(), dtype, shape: shape.to_owned() });
        }
    }
    let mut made: HashSet<String> = fills.into_keys().map(str::to_owned).collect();
    bindings.retain(|(_, value)| !made.contains(value));
    // Another node may read the zeros, too.
    graph.node.iter().flat_map(|node| &node.input).for_each(|input| _ = made.remove(input));
    graph.node.retain(|node| !node.output.iter().any(|output| made.contains(output)));
    zeros
}
