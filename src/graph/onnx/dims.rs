//! Binds the open dims of a model's inputs: those that the file does not give as numbers.

use super::Model;
use super::proto::*;
use crate::error::{Error, Result, ensure};
use crate::op::Fact;
use crate::ops::KEYS;
use crate::shape::{Extent, Shape};
use std::collections::{BTreeMap, BTreeSet};

/// A dim of an input.
enum Dim {
    Fixed(usize),
    /// A name, or a sum of products of names and numbers (`past + 1`). An unnamed dim is called `input.axis`.
    Open(String),
}

/// The name, type and bound shape of each input. Dims may also bound `loops`.
pub(super) fn bind<'a>(
    inputs: &[&'a ValueInfoProto],
    loops: BTreeSet<String>,
    given: &[(String, usize)],
) -> Result<Vec<(&'a str, Fact)>> {
    let (named, mut known) = named(inputs, given);
    known.extend(loops);
    let mut values: BTreeMap<&str, usize> = BTreeMap::new();
    for (name, value) in given.iter().chain(&named) {
        if values.insert(name, *value).is_some_and(|old| old != *value) {
            return Err(Error::usage(format!("dim '{name}' is set twice, to different values")));
        }
    }
    let mut missing = BTreeSet::new();
    let mut facts = Vec::with_capacity(inputs.len());
    for input in inputs {
        let (dtype, dims) = declared(input).map_err(|what| Error::graph(format!("input '{}': {what}", input.name)))?;
        let mut shape = Shape::default();
        for (axis, dim) in dims.into_iter().enumerate() {
            shape.push(match dim {
                Dim::Fixed(size) => values.get(&axis_of(&input.name, axis)[..]).copied().unwrap_or(size),
                Dim::Open(text) => {
                    let (names, size) = evaluate(&text, &values)?;
                    missing
                        .extend(names.iter().filter(|n| size.is_none() && !values.contains_key(n.as_str())).cloned());
                    known.extend(names);
                    known.extend(values.contains_key(text.as_str()).then_some(text));
                    size.unwrap_or(0)
                }
            });
        }
        let fact = Fact::new(dtype, shape);
        fact.countable().map_err(|what| Error::graph(format!("input '{}': {what}", input.name)))?;
        facts.push((input.name.as_str(), fact));
    }
    let list = |names: &BTreeSet<String>| names.iter().map(|n| format!("'{n}'")).collect::<Vec<_>>().join(", ");
    if let Some(name) = values.keys().find(|n| !known.contains(**n)) {
        let known = if known.is_empty() { "none".into() } else { list(&known) };
        let of = |input: &&&ValueInfoProto| {
            declared(input).is_ok_and(|(_, dims)| matches!(dims.first(), Some(Dim::Fixed(_))))
        };
        let fixed = inputs.iter().find(of).map_or(String::new(), |input| {
            format!("; a size that the file fixes is set by its input and axis, such as {}", axis_of(&input.name, 0))
        });
        return Err(Error::usage(format!("the graph has no dim '{name}' to set; its dims: {known}{fixed}")));
    }
    if !missing.is_empty() {
        return Err(Error::Unbound { dims: missing.into_iter().collect(), file: None });
    }
    Ok(facts)
}

/// The name of any axis of an input.
fn axis_of(input: &str, axis: usize) -> String {
    format!("{input}.{axis}")
}

/// The extents of dims that are given by input and axis, and these names.
fn named(inputs: &[&ValueInfoProto], given: &[(String, usize)]) -> (Vec<(String, usize)>, BTreeSet<String>) {
    let (mut named, mut known) = (Vec::new(), BTreeSet::new());
    for input in inputs {
        for (axis, dim) in declared(input).into_iter().flat_map(|(_, dims)| dims).enumerate() {
            let own = axis_of(&input.name, axis);
            let Some((_, size)) = given.iter().find(|(name, _)| *name == own) else { continue };
            match dim {
                Dim::Open(text) if text != own && is_single(&text) => named.push((text, *size)),
                Dim::Open(text) if text != own => continue,
                _ => {}
            }
            known.insert(own);
        }
    }
    (named, known)
}

impl Model {
    /// True if a dim can be set: an open one, an axis of an input, `input.axis`, whose size the file fixes, or one that bounds a loop.
    pub fn has_dim(&self, name: &str) -> bool {
        let is_axis = |input: &ValueInfoProto| {
            let dims = declared(input).map_or(0, |(_, dims)| dims.len());
            (0..dims).any(|axis| axis_of(&input.name, axis) == name)
        };
        self.open_dims().is_ok_and(|open| open.iter().any(|dim| dim == name))
            || self.open_inputs().any(is_axis)
            || self.loops().contains(name)
    }

    /// True if the elements of an input are given in this shape.
    pub(super) fn gives(&self, input: &str, shape: &Shape) -> bool {
        self.values.iter().any(|(name, tensor)| name == input && tensor.shape() == shape)
    }

    /// The open dims that an input of this name and shape binds: single names, or `input.axis`.
    ///
    /// Empty if the model has no such input, or its rank is another: [`import`](super::import) and the run report that.
    pub fn dims_of(&self, input: &str, shape: &Shape) -> Vec<(String, usize)> {
        let declared = self.proto.graph.iter().flat_map(|g| &g.input).find(|i| i.name == input).map(declared);
        let Some(Ok((_, dims))) = declared.filter(|d| d.as_ref().is_ok_and(|(_, dims)| dims.len() == shape.len()))
        else {
            return Vec::new();
        };
        let open = dims.into_iter().zip(shape.iter()).filter_map(|(dim, &size)| match dim {
            Dim::Open(text) if is_single(&text) => Some((text, size)),
            _ => None,
        });
        open.collect()
    }

    /// The dims that follow from others by the rule of a node, where these have extents and they have none: a GroupQueryAttention, whose mask has
    /// a column for each row of its cache before the run, and for each new one.
    pub(super) fn forced_ties(&self, given: &[(String, Extent)]) -> Vec<(String, String)> {
        let Some(graph) = &self.proto.graph else { return Vec::new() };
        let nodes: Vec<_> = graph.node.iter().filter(|node| node.op_type == "GroupQueryAttention").collect();
        let has = |dim: &str| given.iter().any(|(name, _)| name == dim);
        let axis = |values: &[ValueInfoProto], name: &str, axis: usize| {
            declared(values.iter().find(|value| value.name == name)?).ok()?.1.into_iter().nth(axis)
        };
        let caches: BTreeSet<&String> = nodes.iter().flat_map(|node| node.input.iter().skip(KEYS).take(2)).collect();
        // The new tokens are along the second axes of other inputs.
        let others = graph.input.iter().filter(|input| !caches.contains(&input.name));
        let second = others.filter_map(|input| match declared(input).ok()?.1.into_iter().nth(1)? {
            Dim::Fixed(size) => Some(size.to_string()),
            Dim::Open(text) => Some(text),
        });
        let second: BTreeSet<String> = second.collect();
        let mut ties = Vec::new();
        for node in nodes {
            let (Some(cache), Some(present)) = (node.input.get(KEYS), node.output.get(1)) else { continue };
            let ends = (axis(&graph.input, cache, 2), axis(&graph.output, present, 2));
            let (Some(Dim::Open(past)), Some(Dim::Open(all))) = ends else { continue };
            let is_free = past != all && is_single(&past) && is_single(&all) && has(&past) && !has(&all);
            let new: Vec<_> = second.iter().filter(|dim| **dim != all).collect();
            if let (&[new], true) = (&new[..], is_free && second.contains(&all)) {
                ties.push((all, format!("{past} + {new}")));
            }
        }
        ties.sort();
        ties.dedup();
        ties
    }

    /// This model with a dim that follows from others: `text` is a sum of products of dims and numbers, which stands for it in the inputs.
    ///
    /// # Errors
    /// When no input has the dim, or the text is no such sum, or has the dim itself.
    pub fn with_tie(mut self, dim: &str, text: &str) -> Result<Model> {
        let (names, _) = evaluate(text, &BTreeMap::new())?;
        if names == [text] && !self.has_dim(text) || names.iter().any(|name| name == dim) {
            let what = "expected another dim, or a sum such as past_sequence_length+sequence_length";
            return Err(Error::usage(format!("dim '{dim}={text}': {what}")));
        }
        let mut found = false;
        for input in self.proto.graph.iter_mut().flat_map(|graph| &mut graph.input) {
            let name = input.name.clone();
            let Some(TypeValue::Tensor(tensor)) = input.r#type.as_mut().and_then(|t| t.value.as_mut()) else {
                continue;
            };
            for (axis, dim_of) in tensor.shape.iter_mut().flat_map(|shape| &mut shape.dim).enumerate() {
                let is_it = match &dim_of.value {
                    Some(DimensionValue::DimParam(text)) if !["", "?"].contains(&text.trim()) => text.trim() == dim,
                    Some(DimensionValue::DimValue(size)) if *size >= 0 => false,
                    // It has no name of its own.
                    _ => axis_of(&name, axis) == dim,
                };
                if is_it {
                    dim_of.value = Some(DimensionValue::DimParam(text.to_owned()));
                    found = true;
                }
            }
        }
        ensure(found, || {
            let dims = self.open_dims().unwrap_or_default().join(", ");
            Error::usage(format!("the graph has no dim '{dim}' to set; its dims: {dims}"))
        })?;
        Ok(self)
    }

    /// The open dim that is the first axis of the first input: a single name, or `input.axis`.
    pub fn batch_dim(&self) -> Option<String> {
        let input = self.open_inputs().next()?;
        match declared(input).ok()?.1.into_iter().next()? {
            Dim::Open(text) if is_single(&text) => Some(text),
            _ => None,
        }
    }

    /// The inputs with an axis that is this dim alone, not a sum or product of it.
    pub(super) fn inputs_along(&self, dim: &str) -> impl Iterator<Item = &str> {
        let along = move |d: &Dim| matches!(d, Dim::Open(text) if text == dim);
        let has = move |i: &&ValueInfoProto| declared(i).is_ok_and(|(_, dims)| dims.iter().any(along));
        self.open_inputs().filter(has).map(|input| input.name.as_str())
    }

    /// The dims that bound loops: those of the graph, of functions, and of loops within loops.
    pub(super) fn loops(&self) -> BTreeSet<String> {
        let mut loops = BTreeSet::new();
        let functions = self.proto.functions.iter().map(|function| &function.node);
        let mut work: Vec<_> = self.proto.graph.iter().map(|graph| &graph.node).chain(functions).collect();
        while let Some(nodes) = work.pop() {
            for node in nodes {
                loops.extend(trips_of(node).filter(|_| node.op_type == "Loop"));
                work.extend(node.attribute.iter().filter_map(|attribute| attribute.g.as_ref()).map(|body| &body.node));
            }
        }
        loops
    }

    /// The graph's name.
    pub fn name(&self) -> &str {
        self.proto.graph.as_ref().map_or("", |g| &g.name)
    }

    /// Inputs that have no initializer.
    pub(super) fn open_inputs(&self) -> impl Iterator<Item = &ValueInfoProto> {
        let graph = self.proto.graph.as_ref();
        let initializers: BTreeSet<&str> = graph.iter().flat_map(|g| &g.initializer).map(|t| t.name.as_str()).collect();
        graph.into_iter().flat_map(|g| &g.input).filter(move |i| !initializers.contains(i.name.as_str()))
    }

    /// The names of the dims that [`import`](super::import) needs, in alphabetical order.
    ///
    /// # Errors
    /// An input is no tensor or has no rank.
    pub fn open_dims(&self) -> Result<Vec<String>> {
        let mut open = BTreeSet::new();
        for input in self.open_inputs() {
            let fail = |what| Error::graph(format!("input '{}': {what}", input.name));
            for dim in declared(input).map_err(fail)?.1 {
                if let Dim::Open(text) = dim {
                    open.extend(evaluate(&text, &BTreeMap::new())?.0);
                }
            }
        }
        Ok(open.into_iter().collect())
    }

    /// The names of the open dims of all inputs that have some, in alphabetical order, whatever the types of the inputs are.
    pub(super) fn named_dims(&self) -> Vec<String> {
        let dims = self.open_inputs().filter_map(|input| dims_of(&input.name, tensor(input).ok()?).ok()).flatten();
        let open = dims.filter_map(|dim| match dim {
            Dim::Open(text) => Some(evaluate(&text, &BTreeMap::new()).ok()?.0),
            Dim::Fixed(_) => None,
        });
        open.flatten().collect::<BTreeSet<_>>().into_iter().collect()
    }

    /// The names, types and dims of the inputs, as the file declares them.
    pub fn declared_inputs(&self) -> String {
        let one = |input| match declared(input) {
            Ok(declared) => format!("{} {}", input.name, written(&declared)),
            Err(what) => format!("{}: {what}", input.name),
        };
        self.open_inputs().map(one).collect::<Vec<_>>().join(", ")
    }

    /// The declared type of an input, if its rank differs from that of `shape`.
    pub fn other_rank(&self, input: &str, shape: &Shape) -> Option<String> {
        let declared = declared(self.open_inputs().find(|i| i.name == input)?).ok()?;
        (declared.1.len() != shape.len()).then(|| written(&declared))
    }
}

/// The dim that bounds the iterations of a loop: `name.trips`, where its first output may stand in for its name.
pub(super) fn trips_of(node: &NodeProto) -> Option<String> {
    let name = std::iter::once(&node.name).chain(&node.output).find(|name| !name.is_empty())?;
    Some(format!("{name}.trips"))
}

/// True if a dim's text is one name, not a sum or product.
fn is_single(text: &str) -> bool {
    evaluate(text, &BTreeMap::new()).is_ok_and(|(names, _)| names == [text])
}

/// A declared type as text: `f32[batch,784]`.
fn written((dtype, dims): &(crate::dtype::DType, Vec<Dim>)) -> String {
    let dim = |dim: &Dim| match dim {
        Dim::Fixed(size) => size.to_string(),
        Dim::Open(text) => text.clone(),
    };
    format!("{dtype}[{}]", dims.iter().map(dim).collect::<Vec<_>>().join(","))
}

/// The type and dims that a file declares for a value.
fn declared(value: &ValueInfoProto) -> Result<(crate::dtype::DType, Vec<Dim>), String> {
    let tensor = tensor(value)?;
    Ok((dtype(tensor.elem_type)?, dims_of(&value.name, tensor)?))
}

/// The dims that a file declares for a tensor of this name.
fn dims_of(value: &str, tensor: &TensorType) -> Result<Vec<Dim>, String> {
    let shape = tensor.shape.as_ref().ok_or("its rank is unknown: expected a shape")?;
    let open = |axis, name: &str| match name {
        // PaddlePaddle calls every unknown size "?".
        "" | "?" => Dim::Open(format!("{value}.{axis}")),
        name => Dim::Open(name.into()),
    };
    let dims = shape.dim.iter().enumerate().map(|(axis, dim)| match &dim.value {
        Some(DimensionValue::DimParam(name)) => open(axis, name.trim()),
        // Some exporters write an unknown size as -1.
        Some(DimensionValue::DimValue(size)) => usize::try_from(*size).map_or(open(axis, ""), Dim::Fixed),
        None => open(axis, ""),
    });
    Ok(dims.collect())
}

/// The type that a file declares for a value, of a tensor.
fn tensor(value: &ValueInfoProto) -> Result<&TensorType, String> {
    let kind = match value.r#type.as_ref().and_then(|t| t.value.as_ref()) {
        Some(TypeValue::Tensor(tensor)) => return Ok(tensor),
        None => "nothing",
        Some(TypeValue::Sequence(_)) => "a sequence",
        Some(TypeValue::Map(_)) => "a map",
        Some(TypeValue::Optional(_)) => "an optional",
        Some(TypeValue::SparseTensor(_)) => "a sparse tensor",
        Some(TypeValue::Opaque(_)) => "an opaque value",
    };
    Err(format!("expected a tensor type, found {kind}"))
}

/// The names in a dim's text, and its size if all names have a value.
fn evaluate(text: &str, values: &BTreeMap<&str, usize>) -> Result<(Vec<String>, Option<usize>)> {
    if let Some(size) = values.get(text) {
        return Ok((Vec::new(), Some(*size)));
    }
    let plain = |c: char| c.is_alphanumeric() || "._-".contains(c);
    let is_name = |f: &str| f.starts_with(|c: char| c.is_alphabetic() || c == '_') && f.chars().all(plain);
    let mut names = Vec::new();
    let mut sum = Some(0usize);
    for term in text.split('+') {
        let mut product = Some(1usize);
        for factor in term.split('*').map(str::trim) {
            let size = match factor.parse() {
                Ok(number) => Some(number),
                Err(_) if is_name(factor) => {
                    names.push(factor.to_owned());
                    values.get(factor).copied()
                }
                // The text is no sum of products, so it is one name.
                Err(_) => return Ok((vec![text.to_owned()], None)),
            };
            product = product.zip(size).and_then(|(a, b)| a.checked_mul(b));
        }
        sum = sum.zip(product).and_then(|(a, b)| a.checked_add(b));
    }
    match sum {
        None if names.iter().all(|n| values.contains_key(n.as_str())) => {
            Err(Error::usage(format!("dim '{text}' is larger than any memory")))
        }
        size => Ok((names, size)),
    }
}

/// Refuses an output whose type differs from what the file declares.
///
/// A different size or rank is only a warning: exporters often write those of their own example.
pub(super) fn check_output(output: &ValueInfoProto, fact: &Fact, dims: &[(String, usize)]) -> Result<()> {
    let Some(TypeValue::Tensor(tensor)) = output.r#type.as_ref().and_then(|t| t.value.as_ref()) else { return Ok(()) };
    let fail = |expected: String| {
        let name = &output.name;
        Err(Error::graph(format!("output '{name}': the file declares {expected}, but its nodes make {fact}")))
    };
    if tensor.elem_type != DataType::Undefined as i32 && tensor.elem_type != DataType::from(fact.dtype) as i32 {
        let found = DataType::try_from(tensor.elem_type).map_or("an unknown type", DataType::name);
        return fail(found.into());
    }
    let Some(shape) = &tensor.shape else { return Ok(()) };
    if shape.dim.len() != fact.shape.len() {
        let (declared, made) = (shape.dim.len(), fact.shape.len());
        tracing::warn!(output = output.name, declared, made, "the number of dims differs");
        return Ok(());
    }
    let values = dims.iter().map(|(name, size)| (name.as_str(), *size)).collect();
    for (axis, dim) in shape.dim.iter().enumerate() {
        let declared = match &dim.value {
            Some(DimensionValue::DimValue(size)) => usize::try_from(*size).ok(),
            Some(DimensionValue::DimParam(text)) => evaluate(text, &values).ok().and_then(|(_, size)| size),
            None => None,
        };
        let made = fact.shape[axis];
        if let Some(declared) = declared.filter(|&declared| declared != made) {
            tracing::warn!(output = output.name, axis, declared, made, "size differs");
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::is_single;

    #[test]
    fn a_sum_or_a_product_is_not_one_name() {
        let single = ["batch", "batch-size", "past.length", "sequence length"];
        assert_eq!(single.map(is_single), [true; 4]);
        assert_eq!(["past + 1", "2*batch", "8", "a+b"].map(is_single), [false; 4]);
    }
}
