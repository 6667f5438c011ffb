//! Rows that are nothing but others: stated once, as the nodes that they stand for, from which facts and meaning follow.

use super::find;
use crate::op::{Attrs, Build, Call, Eval, Fact, Input, Lower, OpDef, OpResult, ValueId};
use crate::tensor::Tensor;

/// The nodes that a row stands for: a value per output.
pub(super) type Nodes = fn(&mut dyn Build, &Call, &[Option<ValueId>]) -> OpResult<Vec<ValueId>>;

/// A row that stands for these nodes.
pub(super) const fn composed(
    name: &'static str,
    doc: &'static str,
    inputs: &'static [Input],
    attrs: &'static [&'static str],
    nodes: Nodes,
) -> OpDef {
    OpDef {
        name,
        doc,
        inputs,
        attrs,
        infer: |call| Trace::of(call, None).map(|outputs| outputs.into_iter().map(|(fact, _)| fact).collect()),
        eval: Eval::Tensor(|x, call| {
            Trace::of(call, Some(x)).map(|outputs| outputs.into_iter().map(|(_, values)| values).collect())
        }),
        lower: Lower::Decompose(nodes),
        upgrade: None,
        part: None,
    }
}

/// What a row's nodes infer and, where its inputs have values, compute.
struct Trace {
    values: Vec<(Fact, Vec<f64>)>,
    evaluates: bool,
}

impl Trace {
    /// The outputs of a composed row. Without the inputs' values, these have none either.
    fn of(call: &Call, x: Option<&[Option<&[f64]>]>) -> OpResult<Vec<(Fact, Vec<f64>)>> {
        let Lower::Decompose(nodes) = call.op.lower else { return Err("it is not composed of other operators".into()) };
        let mut trace = Trace { values: Vec::new(), evaluates: x.is_some() };
        let mut inputs = Vec::with_capacity(call.inputs.len());
        for (input, fact) in call.inputs.iter().enumerate() {
            let values = x.and_then(|x| x.get(input).copied().flatten()).unwrap_or_default();
            inputs.push(fact.map(|fact| trace.push(fact.clone(), values.to_vec())));
        }
        let outputs = nodes(&mut trace, call, &inputs)?;
        Ok(outputs.into_iter().map(|value| trace.values[value.node as usize].clone()).collect())
    }

    fn push(&mut self, fact: Fact, values: Vec<f64>) -> ValueId {
        self.values.push((fact, values));
        ValueId { node: self.values.len() as u32 - 1, port: 0 }
    }
}

impl Build for Trace {
    fn fact(&self, value: ValueId) -> Fact {
        self.values[value.node as usize].0.clone()
    }

    fn node(&mut self, op: &str, inputs: &[Option<ValueId>], attrs: Attrs) -> OpResult<ValueId> {
        let row = find(op).ok_or_else(|| format!("there is no operator {op}"))?;
        let operands: Vec<_> = inputs.iter().map(|v| v.map(|v| &self.values[v.node as usize])).collect();
        let facts: Vec<_> = operands.iter().map(|v| v.map(|(fact, _)| fact)).collect();
        let call = Call { op: row, attrs: &attrs, inputs: &facts };
        let named = |what: String| format!("as {op}: {what}");
        let fact = call.infer().map_err(named)?.swap_remove(0);
        let mut values = Vec::new();
        if self.evaluates {
            let x: Vec<_> = operands.iter().map(|v| v.map(|(_, values)| &values[..])).collect();
            values = call.eval(&x).map_err(named)?.swap_remove(0);
        }
        Ok(self.push(fact, values))
    }

    fn constant(&mut self, tensor: Tensor) -> ValueId {
        let values = if self.evaluates { tensor.to_f64() } else { Vec::new() };
        self.push(Fact::new(tensor.dtype(), tensor.shape().clone()), values)
    }
}

/// All outputs of a row that is decomposed, where a node would have the first one.
pub(super) fn outputs(b: &mut dyn Build, op: &str, inputs: &[Option<ValueId>], attrs: Attrs) -> OpResult<Vec<ValueId>> {
    let row = find(op).ok_or_else(|| format!("there is no operator {op}"))?;
    let Lower::Decompose(nodes) = row.lower else { return Err(format!("{op} is not composed of other operators")) };
    let facts: Vec<_> = inputs.iter().map(|v| v.map(|v| b.fact(v))).collect();
    let facts: Vec<_> = facts.iter().map(Option::as_ref).collect();
    let call = Call { op: row, attrs: &attrs, inputs: &facts };
    call.infer()?;
    nodes(b, &call, inputs)
}

/// An input that may be left out.
pub(super) fn given(x: &[Option<ValueId>], input: usize) -> Option<ValueId> {
    x.get(input).copied().flatten()
}

/// An input that may not.
pub(super) fn required(x: &[Option<ValueId>], input: usize) -> ValueId {
    given(x, input).expect("a required input is present: arity is checked first")
}

pub(super) fn reshape(b: &mut dyn Build, value: ValueId, shape: &[usize]) -> OpResult<ValueId> {
    b.op("Reshape", &[value], Attrs::new().with("shape", shape).with("allowzero", 1))
}

pub(super) fn transpose(b: &mut dyn Build, value: ValueId, perm: &[usize]) -> OpResult<ValueId> {
    b.op("Transpose", &[value], Attrs::new().with("perm", perm))
}

/// A node of one input without attributes.
pub(super) fn unary(b: &mut dyn Build, op: &str, x: ValueId) -> OpResult<ValueId> {
    b.op(op, &[x], Attrs::new())
}

/// A node of two inputs without attributes.
pub(super) fn binary(b: &mut dyn Build, op: &str, x: ValueId, y: ValueId) -> OpResult<ValueId> {
    b.op(op, &[x, y], Attrs::new())
}

/// A node of a value and a number of its type.
pub(super) fn with_number(b: &mut dyn Build, op: &str, x: ValueId, number: f64) -> OpResult<ValueId> {
    let number = b.scalar(number, b.fact(x).dtype);
    binary(b, op, x, number)
}
