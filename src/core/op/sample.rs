//! Samples: one call per row that exercises it, so that no test and no listing has to guess.

use super::attr::{Attr, Attrs};
use crate::dtype::DType;
use crate::tensor::Tensor;

/// A call of a row: its data inputs and its attributes, those of shaping inputs among them.
#[derive(Clone, Debug)]
pub struct Sample {
    /// The row's name.
    pub op: &'static str,
    /// Data inputs in order; `None` is an omitted optional one.
    pub inputs: Vec<Option<SampleInput>>,
    /// Attributes.
    pub attrs: Attrs,
    element: Option<DType>,
}

/// A data input of a sample.
#[derive(Clone, Debug)]
pub struct SampleInput {
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
        Sample { op, inputs: Vec::new(), attrs: Attrs::new(), element: None }
    }

    /// One more input, with random values in `low..=high`.
    pub fn input(mut self, dtype: DType, shape: &[usize], low: f64, high: f64) -> Sample {
        self.inputs.push(Some(SampleInput { dtype, shape: shape.into(), data: Data::Uniform(low, high) }));
        self
    }

    /// One more `f32` input `[2, 3, 37]`, with random values in `low..=high`.
    pub fn uniform(self, low: f64, high: f64) -> Sample {
        self.input(DType::F32, &[2, 3, 37], low, high)
    }

    /// More `f32` inputs of these shapes, with random values between -1 and 1.
    pub fn floats(self, shapes: &[&[usize]]) -> Sample {
        shapes.iter().fold(self, |sample, shape| sample.input(DType::F32, shape, -1.0, 1.0))
    }

    /// One more input, with these values.
    pub fn given(mut self, dtype: DType, shape: &[usize], values: &[f64]) -> Sample {
        self.inputs.push(Some(SampleInput { dtype, shape: shape.into(), data: Data::Each(values.into()) }));
        self
    }

    /// Two more inputs: an `f32` scale, and a `u8` zero point.
    pub fn quantized(self, scale: f64, zero: f64) -> Sample {
        self.given(DType::F32, &[], &[scale]).given(DType::U8, &[], &[zero])
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

    /// Names the type of the elements that the row works on, where the first input has another one, as a condition has.
    pub fn element(mut self, dtype: DType) -> Sample {
        self.element = Some(dtype);
        self
    }

    /// The same call on elements of another type. Inputs of the element type get it, tensors among the attributes, and
    /// `output_datatype`. Indices, conditions and scales of other types stay.
    pub fn retyped(mut self, dtype: DType) -> Sample {
        let first = self.inputs.iter().flatten().next().map(|input| input.dtype);
        let element = self.element.or(first).unwrap_or(DType::F32);
        for input in self.inputs.iter_mut().flatten().filter(|input| input.dtype == element) {
            input.dtype = dtype;
        }
        let names: Vec<String> = self.attrs.iter().map(|(name, _)| name.to_owned()).collect();
        for name in names {
            match self.attrs.get(&name) {
                Some(Attr::Tensor(t)) if t.dtype() == element => {
                    let tensor = Tensor::from_f64(dtype, t.shape().clone(), &t.to_f64());
                    self.attrs.set(&name, tensor);
                }
                Some(_) if name == "output_datatype" => self.attrs.set(&name, dtype.onnx()),
                _ => {}
            }
        }
        Sample { element: Some(dtype), ..self }
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
        let mut tensor = |input: &SampleInput| {
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
