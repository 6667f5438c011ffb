//! The weights of a file: initializers that can be trained, and a file with others in their places.

use super::Model;
use super::proto::*;
use crate::error::{Error, Result, ensure};
use crate::figures::{count, listed};
use crate::safetensors::SafeTensors;
use crate::shape::Shape;
use crate::tensor::Tensor;
use std::collections::BTreeSet;
use std::path::Path;

/// True if the elements are floats, of a tensor with axes.
pub(super) fn is_weight(tensor: &TensorProto) -> bool {
    !tensor.dims.is_empty() && is_float(tensor)
}

/// True if the elements are floats.
pub(super) fn is_float(tensor: &TensorProto) -> bool {
    tensor.packed().is_none() && tensor.dtype().is_ok_and(|dtype| dtype.is_float())
}

/// Gives each BatchNormalization running statistics of its own, if others read these in another place: a fresh model has a bias and a running
/// mean of zeros, which exporters write once. Nodes that share all their operands are one layer that is used several times.
/// Returns the names of these, each with that of the initializer that it was.
fn part_statistics(graph: &mut GraphProto) -> Vec<(String, String)> {
    let is_norm = |node: &NodeProto| node.op_type == "BatchNormalization" && node.input.len() == 5;
    let mut parted = Vec::new();
    for (number, node) in graph.node.iter().enumerate().filter(|(_, node)| is_norm(node)) {
        for slot in 3..5 {
            let is_other = |other: &NodeProto| {
                let is_same = is_norm(other) && other.input[1..] == node.input[1..];
                let mut reads = other.input.iter().enumerate().filter(|(_, name)| **name == node.input[slot]);
                reads.any(|(place, _)| !is_same || place != slot)
            };
            let is_weight = graph.initializer.iter().any(|t| t.name == node.input[slot]);
            if is_weight && graph.node.iter().any(is_other) {
                parted.push((number, slot));
            }
        }
    }
    let mut copies = Vec::new();
    for (number, slot) in parted {
        let what = if slot == 3 { "running_mean" } else { "running_var" };
        let name = format!("{}.{what}", graph.node[number].output[0]);
        let old = std::mem::replace(&mut graph.node[number].input[slot], name.clone());
        let own = graph.initializer.iter().find(|tensor| tensor.name == old).cloned();
        copies.push((name.clone(), old));
        graph.initializer.extend(own.map(|tensor| TensorProto { name, ..tensor }));
    }
    copies
}

impl Model {
    /// This model with weights that can be trained: a node is not folded because it reads weights alone. Exporters write equal tensors once.
    /// Therefore an Identity of a weight is a weight of its own, and so is a running statistic that something else reads, too.
    pub fn with_weights(mut self) -> Model {
        self.trains = true;
        let Some(graph) = &mut self.proto.graph else { return self };
        let (mut added, mut copies) = (Vec::new(), Vec::new());
        graph.node.retain(|node| {
            let copied = node.op_type == "Identity" && node.input.len() == 1 && node.output.len() == 1;
            let find = |name: &String| graph.initializer.iter().find(|tensor| tensor.name == *name);
            let Some(tensor) = node.input.first().filter(|_| copied).and_then(find).filter(|t| is_weight(t)) else {
                return true;
            };
            copies.push((node.output[0].clone(), tensor.name.clone()));
            added.push(TensorProto { name: node.output[0].clone(), ..tensor.clone() });
            false
        });
        graph.initializer.extend(added);
        copies.extend(part_statistics(graph));
        self.copies = copies;
        self
    }

    /// This model with the elements of a safetensors file, for the initializers that have the names of its tensors. The elements stay in the
    /// mapped file, which must stay as it is while the model or a tensor of it is in use.
    ///
    /// # Errors
    /// When the file is not one of tensors, one of these has another type or shape than its initializer, or none is an initializer's.
    pub fn with_elements_of(self, path: &Path) -> Result<Model> {
        let file = SafeTensors::open(path)?;
        let bad = |what: String| Error::File { path: path.to_owned(), what, source: None };
        let initializers = || self.proto.graph.iter().flat_map(|graph| &graph.initializer);
        let own: BTreeSet<&str> = initializers().map(|tensor| &tensor.name[..]).collect();
        let (known, unknown): (BTreeSet<&str>, BTreeSet<&str>) = file.names().partition(|name| own.contains(name));
        ensure(!known.is_empty(), || {
            let [own, found] = [&own, &unknown].map(|names| listed(names.iter()));
            bad(format!("none of its tensors has the name of an initializer: expected some of {own}, found {found}"))
        })?;
        for tensor in initializers().filter(|tensor| known.contains(&tensor.name[..])) {
            let expected = format!("{}{}", tensor.dtype()?, Shape::from(tensor.shape()?));
            let found = file.describe(&tensor.name).unwrap_or_default();
            ensure(tensor.packed().is_none() && found == expected, || {
                bad(format!("tensor '{}': expected {expected}, as the model's initializer, found {found}", tensor.name))
            })?;
        }
        let kept: BTreeSet<&str> = own.difference(&known).copied().collect();
        let note = |what: &str, names: &BTreeSet<&str>| {
            if names.is_empty() { String::new() } else { format!("; {what} {}", listed(names.iter())) }
        };
        tracing::info!(
            "{}: the elements of {}{}{}",
            path.display(),
            count(known.len() as u64, "initializer"),
            note("the model keeps its own of", &kept),
            note("it has none called", &unknown)
        );
        let proto = self.replaced(|name| known.get(name).map(|name| file.tensor(name)).transpose())?;
        Ok(Model { proto, ..self })
    }

    /// The first input of the graph that is no initializer.
    pub fn first_input(&self) -> Option<&str> {
        let graph = self.proto.graph.as_ref()?;
        let own = |name: &str| graph.initializer.iter().any(|tensor| tensor.name == name);
        graph.input.iter().map(|input| &input.name[..]).find(|name| !own(name))
    }

    /// The file with other elements for some initializers.
    ///
    /// # Errors
    /// Those of `find`.
    pub fn replaced(&self, mut find: impl FnMut(&str) -> Result<Option<Tensor>>) -> Result<ModelProto> {
        let mut proto = self.proto.clone();
        // What is given in the place of a default is of a run: the file has the default still.
        proto.graph.iter_mut().for_each(|graph| graph.initializer.extend(self.defaults.iter().cloned()));
        for tensor in proto.graph.iter_mut().flat_map(|graph| &mut graph.initializer) {
            let Some(found) = find(&tensor.name)? else { continue };
            *tensor = TensorProto {
                name: std::mem::take(&mut tensor.name),
                dims: std::mem::take(&mut tensor.dims),
                doc_string: std::mem::take(&mut tensor.doc_string),
                data_type: DataType::from(found.dtype()) as i32,
                raw_data: found.bytes().clone(),
                ..Default::default()
            };
        }
        Ok(proto)
    }
}
