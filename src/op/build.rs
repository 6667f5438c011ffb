//! Decomposition: a row builds nodes of other rows.

use super::attr::Attrs;
use super::fact::{Fact, OpResult, ValueId};
use crate::dtype::DType;
use crate::shape::Shape;

/// Adds nodes to the graph while a row is decomposed into others.
pub trait Build {
    /// The fact of a value.
    fn fact(&self, value: ValueId) -> Fact;
    /// Adds a node with one output; optional inputs that are omitted are `None`.
    fn node(&mut self, op: &str, inputs: &[Option<ValueId>], attrs: Attrs) -> OpResult<ValueId>;
    /// Adds a constant. Its elements are computed only if the caller wants values.
    fn insert(&mut self, fact: Fact, elements: &dyn Fn() -> Vec<f64>) -> ValueId;
}

impl dyn Build + '_ {
    /// Adds a node whose inputs are all given.
    pub fn op(&mut self, op: &str, inputs: &[ValueId], attrs: Attrs) -> OpResult<ValueId> {
        let inputs: Vec<_> = inputs.iter().copied().map(Some).collect();
        self.node(op, &inputs, attrs)
    }

    /// The value in another type.
    pub fn cast(&mut self, value: ValueId, dtype: DType) -> OpResult<ValueId> {
        if self.fact(value).dtype == dtype {
            return Ok(value);
        }
        self.op("Cast", &[value], Attrs::new().with("to", dtype.onnx()))
    }

    /// The elements of a value in the range `from..to` along an axis.
    pub fn slice(&mut self, value: ValueId, axis: usize, from: usize, to: usize) -> OpResult<ValueId> {
        let shape = self.fact(value).shape;
        match shape.get(axis) {
            Some(&extent) if (from, to) == (0, extent) => return Ok(value),
            Some(&extent) if from <= to && to <= extent => {}
            _ => return Err(format!("expected elements {from} to {to} along axis {axis}, found {shape}")),
        }
        self.op("Slice", &[value], Attrs::span(axis, from..to))
    }

    /// Adds a constant of these elements. Inference alone does not compute them.
    pub fn constant(
        &mut self,
        dtype: DType,
        shape: impl Into<Shape>,
        elements: impl Fn() -> Vec<f64>,
    ) -> OpResult<ValueId> {
        let fact = Fact::new(dtype, shape);
        fact.makeable()?;
        Ok(self.insert(fact, &elements))
    }

    /// Adds a constant that counts up from `first` by 1.
    pub fn numbers(&mut self, dtype: DType, shape: impl Into<Shape>, first: f64) -> OpResult<ValueId> {
        let shape = shape.into();
        let count = shape.iter().product();
        self.constant(dtype, shape, || (0..count).map(|i| first + i as f64).collect())
    }

    /// Adds a scalar constant.
    pub fn scalar(&mut self, value: f64, dtype: DType) -> ValueId {
        self.insert(Fact::new(dtype, Shape::default()), &|| vec![value])
    }
}
