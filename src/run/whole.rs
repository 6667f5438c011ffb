//! Dims of a model that nothing binds: each of them is 1.

use crate::error::{Error, Result};
use crate::log::silent;
use crate::onnx::{self, Model, proto::TypeValue};
use crate::shape::{Extent, Shape};
use std::collections::BTreeSet;

/// A model of which all dims are bound.
#[derive(Clone)]
pub struct Whole {
    /// The model.
    pub model: Model,
    /// Its dims, with their extents.
    pub dims: Vec<(String, Extent)>,
    /// The dims that were taken as 1.
    pub assumed: Vec<String>,
}

impl Whole {
    /// Binds the dims that are left to 1, but for one that follows from the others by the rule of a node.
    ///
    /// # Errors
    /// Those of the model.
    pub fn new(model: Model, mut dims: Vec<(String, Extent)>) -> Result<Whole> {
        let is_bound = |dim: &String| dims.iter().any(|(bound, _)| bound == dim);
        if model.open_dims()?.iter().all(is_bound) {
            return Ok(Whole { model, dims, assumed: Vec::new() });
        }
        // A dim may be bound by an axis, by a sum that has it, or as the length of states: an import knows.
        let Err(Error::Unbound { dims: missing, .. }) = silent(|| onnx::import(&model, &largest(&dims))) else {
            return Ok(Whole { model, dims, assumed: Vec::new() });
        };
        let one = |dim: &String| (dim.clone(), Extent::from(1));
        let follows = |dim: &&String| {
            let others = missing.iter().filter(|other| other != dim).map(one);
            let grown = silent(|| model.clone().grow(dims.iter().cloned().chain(others).collect()));
            grown.and_then(|(model, _)| model.open_dims()).is_ok_and(|open| !open.contains(dim))
        };
        let assumed: Vec<String> = missing.iter().filter(|dim| !follows(dim)).cloned().collect();
        dims.extend(assumed.iter().map(one));
        let (model, dims) = model.grow(dims)?;
        Ok(Whole { model, dims, assumed })
    }

    /// Binds the dims that are left as [`new`](Self::new) does, but for one that is sought, or that has another extent in each part.
    ///
    /// # Errors
    /// Those of the model.
    pub fn but(dim: Option<String>, model: Model, mut dims: Vec<(String, Extent)>) -> Result<Whole> {
        let dim = dim.filter(|dim| !dims.iter().any(|(bound, _)| bound == dim));
        dims.extend(dim.iter().map(|dim| (dim.clone(), 1.into())));
        let mut whole = Whole::new(model, dims)?;
        whole.dims.retain(|(bound, _)| Some(bound) != dim.as_ref());
        Ok(whole)
    }
}

/// Dims at their largest extents.
pub fn largest(dims: &[(String, Extent)]) -> Vec<(String, usize)> {
    dims.iter().map(|(name, extent)| (name.clone(), extent.most())).collect()
}

/// The open dims that lead inputs: a batch, if there is one of them.
pub fn leading(model: &Model) -> Vec<String> {
    let mut found = BTreeSet::new();
    for input in model.proto.graph.iter().flat_map(|graph| &graph.input) {
        let Some(TypeValue::Tensor(tensor)) = input.r#type.as_ref().and_then(|kind| kind.value.as_ref()) else {
            continue;
        };
        // Each axis has its number as its extent.
        let axes: Shape = (0..tensor.shape.as_ref().map_or(0, |shape| shape.dim.len())).collect();
        found.extend(model.dims_of(&input.name, &axes).into_iter().filter(|(_, axis)| *axis == 0).map(|(dim, _)| dim));
    }
    found.into_iter().collect()
}

/// The open dim that leads all inputs.
///
/// # Errors
/// When it is none or several.
pub fn batch(model: &Model) -> Result<String> {
    let (found, inputs) = (leading(model), model.declared_inputs());
    let wanted = "expected an open dim that leads the inputs, found";
    match &found[..] {
        [dim] => Ok(dim.clone()),
        [] => Err(Error::usage(format!(
            "{wanted} {inputs}: its inputs have fixed extents; export it with dynamic_shapes"
        ))),
        several => {
            let names = several.iter().map(|dim| format!("'{dim}'")).collect::<Vec<_>>().join(", ");
            Err(Error::usage(format!("{wanted} {names} ({inputs}); give each its extent by its name")))
        }
    }
}
