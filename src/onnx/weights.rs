//! The weights of a file: initializers that can be trained, and a file with others in their places.

use super::Model;
use super::proto::*;
use crate::error::Result;
use crate::tensor::Tensor;

/// True if the elements are floats, of a tensor with axes.
pub(super) fn is_weight(tensor: &TensorProto) -> bool {
    !tensor.dims.is_empty() && tensor.packed().is_none() && tensor.dtype().is_ok_and(|dtype| dtype.is_float())
}

impl Model {
    /// This model with weights that can be trained: a node is not folded because it reads weights alone. An Identity of a weight is a
    /// weight of its own, because exporters write equal tensors once.
    pub fn with_weights(mut self) -> Model {
        self.trains = true;
        let Some(graph) = &mut self.proto.graph else { return self };
        let mut added = Vec::new();
        graph.node.retain(|node| {
            let copied = node.op_type == "Identity" && node.input.len() == 1 && node.output.len() == 1;
            let find = |name: &String| graph.initializer.iter().find(|tensor| tensor.name == *name);
            let Some(tensor) = node.input.first().filter(|_| copied).and_then(find).filter(|t| is_weight(t)) else {
                return true;
            };
            added.push(TensorProto { name: node.output[0].clone(), ..tensor.clone() });
            false
        });
        graph.initializer.extend(added);
        self
    }

    /// The first input of the graph that is no initializer.
    pub fn first_input(&self) -> Option<&str> {
        let graph = self.proto.graph.as_ref()?;
        let own = |name: &str| graph.initializer.iter().any(|tensor| tensor.name == name);
        graph.input.iter().map(|input| &input.name[..]).find(|name| !own(name))
    }

    /// The names of the weights.
    pub fn weights(&self) -> Vec<String> {
        let graph = self.proto.graph.iter();
        graph.flat_map(|graph| &graph.initializer).filter(|t| is_weight(t)).map(|t| t.name.clone()).collect()
    }

    /// The file with other elements for some initializers.
    ///
    /// # Errors
    /// Those of `find`.
    pub fn replaced(&self, mut find: impl FnMut(&str) -> Result<Option<Tensor>>) -> Result<ModelProto> {
        let mut proto = self.proto.clone();
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
