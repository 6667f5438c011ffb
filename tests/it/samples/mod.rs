//! Sample calls of every row of the op table, as data: what the tests that walk the table run on each backend.
//!
//! A family's file exports `samples() -> Vec<Sample>` and is listed in [`samples`].

use plimsoll::internals::dtype::DType;
use plimsoll::internals::op::{Attr, Attrs};
use plimsoll::internals::tensor::Tensor;

mod elementwise;
mod layout;
mod nn;
mod runtime;
mod signal;

/// Every sample of every family.
pub fn samples() -> Vec<Sample> {
    [elementwise::samples(), layout::samples(), nn::samples(), runtime::samples(), signal::samples()].concat()
}

/// A call of a row: its data inputs and its attributes, those of shaping inputs among them.
#[derive(Clone, Debug)]
pub struct Sample {
    /// The row's name.
    pub op: &'static str,
    /// Data inputs in order; `None` is an omitted optional one.
    pub inputs: Vec<Option<Input>>,
    /// Attributes.
    pub attrs: Attrs,
}

/// A call with inputs of these shapes, random between -1 and 1.
fn call(op: &'static str, shapes: &[&[usize]]) -> Sample {
    shapes.iter().fold(Sample::new(op), |sample, shape| sample.input(DType::F32, shape, -1.0, 1.0))
}

/// A data input of a sample.
#[derive(Clone, Debug)]
pub struct Input {
    /// Element type.
    pub dtype: DType,
    /// Extents.
    pub shape: Vec<usize>,
    /// Elements.
    pub data: Data,
}

/// The elements of a sample's input.
#[derive(Clone, Debug)]
pub enum Data {
    /// Random values within these bounds; whole ones for types other than floats.
    Uniform(f64, f64),
    /// These values, row-major.
    Each(Vec<f64>),
}

impl Sample {
    /// A call without inputs and attributes.
    pub fn new(op: &'static str) -> Sample {
        Sample { op, inputs: Vec::new(), attrs: Attrs::new() }
    }

    /// One more input, with random values in `low..=high`.
    pub fn input(mut self, dtype: DType, shape: &[usize], low: f64, high: f64) -> Sample {
        self.inputs.push(Some(Input { dtype, shape: shape.into(), data: Data::Uniform(low, high) }));
        self
    }

    /// One more input, with these values.
    pub fn given(mut self, dtype: DType, shape: &[usize], values: &[f64]) -> Sample {
        self.inputs.push(Some(Input { dtype, shape: shape.into(), data: Data::Each(values.into()) }));
        self
    }

    /// An optional input left out.
    pub fn omitted(mut self) -> Sample {
        self.inputs.push(None);
        self
    }

    /// One more attribute.
    pub fn attr(mut self, name: &str, value: impl Into<Attr>) -> Sample {
        self.attrs.set(name, value);
        self
    }

    /// One more attribute, a list of integers.
    pub fn ints(self, name: &str, values: &[i64]) -> Sample {
        self.attr(name, values.to_vec())
    }

    /// The inputs' tensors; the same ones at every call.
    pub fn tensors(&self) -> Vec<Option<Tensor>> {
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        let mut random = move || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 11) as f64 / (1u64 << 53) as f64
        };
        let mut tensor = |input: &Input| {
            let len = input.shape.iter().product();
            let values: Vec<f64> = match &input.data {
                Data::Each(values) => values.clone(),
                Data::Uniform(low, high) if input.dtype.is_float() => {
                    (0..len).map(|_| low + (high - low) * random()).collect()
                }
                Data::Uniform(low, high) => (0..len).map(|_| (low + (high - low + 1.0) * random()).floor()).collect(),
            };
            Tensor::from_f64(input.dtype, input.shape.clone(), &values)
        };
        self.inputs.iter().map(|input| input.as_ref().map(&mut tensor)).collect()
    }
}
