//! What a body of a loop means, and how it grows.

use super::Call;
use super::attr::{Attrs, Body, BodyKind};
use super::build::Build;
use super::fact::{Fact, OpResult, ValueId};
use crate::ops;
use crate::tensor::Tensor;

impl Body {
    /// The values of the outputs, in `f64`.
    ///
    /// # Errors
    /// When a row refuses its values.
    pub fn eval(&self, inputs: Vec<Vec<f64>>) -> OpResult<Vec<Vec<f64>>> {
        let mut values: Vec<Vec<Vec<f64>>> = inputs.into_iter().map(|input| vec![input]).collect();
        for node in self.nodes() {
            let made = match &node.kind {
                BodyKind::Constant(constant) => vec![constant.to_f64()],
                BodyKind::Op(op, attrs) => {
                    let facts: Vec<_> = node.inputs.iter().map(|value| value.map(|v| self.fact_of(v))).collect();
                    let of = |value: ValueId| &values[value.node.index()][value.port as usize][..];
                    let data: Vec<_> = node.inputs.iter().map(|value| value.map(of)).collect();
                    Call { op, attrs, inputs: &facts }.eval_rounded(&data)?
                }
            };
            values.push(made);
        }
        Ok(self.outputs().iter().map(|value| values[value.node.index()][value.port as usize].clone()).collect())
    }
}

impl Build for Body {
    fn fact(&self, value: ValueId) -> Fact {
        self.fact_of(value).clone()
    }

    fn node(&mut self, op: &str, inputs: &[Option<ValueId>], attrs: Attrs) -> OpResult<Vec<ValueId>> {
        let op = ops::find(op).ok_or_else(|| format!("no row '{op}'"))?;
        let facts: Vec<_> = inputs.iter().map(|value| value.map(|value| self.fact_of(value))).collect();
        let outputs = Call { op, attrs: &attrs, inputs: &facts }.infer()?;
        let ports = 0..outputs.len();
        let node = self.push(BodyKind::Op(op, attrs), inputs.to_vec(), outputs);
        Ok(ports.map(|port| node.output(port)).collect())
    }

    fn insert(&mut self, fact: Fact, elements: &dyn Fn() -> Vec<f64>) -> ValueId {
        let constant = Tensor::from_f64(fact.dtype, fact.shape.clone(), &elements());
        self.push(BodyKind::Constant(constant), Vec::new(), vec![fact]).output(0)
    }
}
