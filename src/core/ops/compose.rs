//! Composed rows: a row is stated once, as the nodes that it stands for. Facts and meaning follow from these.

use super::find;
use crate::op::{Args, Attrs, Build, Call, Eval, Fact, Input, Lower, NodeId, OpDef, OpResult, Rule, ValueId, Var};
use crate::tensor::Tensor;

/// A row that stands for these nodes.
pub(super) const fn composed(name: &'static str, doc: &'static str, inputs: &'static [Input], rule: Rule) -> OpDef {
    OpDef::new(
        name,
        doc,
        inputs,
        |call| Trace::of(call, None).map(|outputs| outputs.into_iter().map(|(fact, _)| fact).collect()),
        Eval::Tensor(|x, call| {
            Trace::of(call, Some(x)).map(|outputs| outputs.into_iter().map(|(_, values)| values).collect())
        }),
        Lower::Decompose(rule),
    )
}

/// Upper bound of the number of values that a row's nodes compute.
const MAX_PARTS: usize = 1 << 18;

/// The facts of a row's nodes, and their values if the inputs have values.
struct Trace {
    values: Vec<(Fact, Vec<f64>)>,
    wants: Wants,
    /// Number of constants so far.
    constants: usize,
}

/// The values that a trace computes.
#[derive(Clone, Copy, PartialEq)]
enum Wants {
    Nothing,
    Everything,
    /// The constant with this number.
    Constant(usize),
}

/// A constant that the row's rule makes for a call, by its number.
pub fn constant(call: &Call, number: usize) -> OpResult<Tensor> {
    let trace = Trace::run(call, None, Wants::Constant(number))?.0;
    let mut found = trace.values.into_iter().filter(|(_, values)| !values.is_empty());
    let (fact, values) = found.next().ok_or_else(|| format!("there is no constant {number}"))?;
    Ok(Tensor::from_f64(fact.dtype, fact.shape, &values))
}

impl Trace {
    /// The outputs of a composed row. They have values only if the inputs have.
    fn of(call: &Call, x: Option<&Args<&[f64]>>) -> OpResult<Vec<(Fact, Vec<f64>)>> {
        let wants = if x.is_some() { Wants::Everything } else { Wants::Nothing };
        let (trace, outputs) = Trace::run(call, x, wants)?;
        Ok(outputs.into_iter().map(|value| trace.values[value.node.index()].clone()).collect())
    }

    fn run(call: &Call, x: Option<&Args<&[f64]>>, wants: Wants) -> OpResult<(Trace, Vec<ValueId>)> {
        let Lower::Decompose(rule) = call.op.lower else { return Err("it is not composed of other operators".into()) };
        let mut trace = Trace { values: Vec::new(), wants, constants: 0 };
        let mut inputs = Vec::with_capacity(call.inputs.len());
        for (input, fact) in call.inputs.iter().enumerate() {
            let values = x.and_then(|x| x.given(input)).unwrap_or_default();
            inputs.push(fact.map(|fact| trace.push(fact.clone(), values.to_vec())));
        }
        let outputs = call.decompose(rule, &mut trace, &inputs)?;
        Ok((trace, outputs))
    }

    fn push(&mut self, fact: Fact, values: Vec<f64>) -> ValueId {
        self.values.push((fact, values));
        NodeId::new(self.values.len() - 1).output(0)
    }
}

impl Build for Trace {
    fn fact(&self, value: ValueId) -> Fact {
        self.values[value.node.index()].0.clone()
    }

    fn node(&mut self, op: &str, inputs: &[Option<ValueId>], attrs: Attrs) -> OpResult<Vec<ValueId>> {
        let row = find(op).ok_or_else(|| format!("there is no operator {op}"))?;
        if self.values.len() >= MAX_PARTS {
            return Err(format!("expected to be made of {MAX_PARTS} others at most, found more"));
        }
        let operands: Vec<_> = inputs.iter().map(|v| v.map(|v| &self.values[v.node.index()])).collect();
        let facts: Vec<_> = operands.iter().map(|v| v.map(|(fact, _)| fact)).collect();
        let call = Call { op: row, attrs: &attrs, inputs: &facts };
        let named = |what: String| format!("as {op}: {what}");
        let facts = call.infer().map_err(named)?;
        let mut values = vec![Vec::new(); facts.len()];
        if self.wants == Wants::Everything {
            let x: Vec<_> = operands.iter().map(|v| v.map(|(_, values)| &values[..])).collect();
            values = call.eval(&x).map_err(named)?;
        }
        Ok(facts.into_iter().zip(values).map(|(fact, values)| self.push(fact, values)).collect())
    }

    fn insert(&mut self, fact: Fact, elements: &dyn Fn() -> Vec<f64>) -> ValueId {
        let values = match self.wants {
            // A number is not rounded to halves: see `Constant::number`.
            Wants::Everything if fact.shape.is_empty() && fact.dtype.is_half() => elements(),
            Wants::Everything => Tensor::from_f64(fact.dtype, fact.shape.clone(), &elements()).to_f64(),
            Wants::Constant(number) if number == self.constants => elements(),
            _ => Vec::new(),
        };
        self.constants += 1;
        self.push(fact, values)
    }
}

/// `[n, spatial.., c]` as `[n, c, spatial..]`.
pub(super) fn channels_first(x: Var, rank: usize) -> Var {
    x.transpose(&[&[0, rank - 1][..], &(1..rank - 1).collect::<Vec<_>>()].concat())
}

/// `[n, c, spatial..]` as `[n, spatial.., c]`.
pub(super) fn channels_last(x: Var, rank: usize) -> Var {
    x.transpose(&[&[0][..], &(2..rank).collect::<Vec<_>>(), &[1]].concat())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::op::{Nodes, build};
    use crate::ops::tests::refused;

    #[test]
    fn constants_are_made_where_values_are_wanted() {
        let mut trace = Trace { values: Vec::new(), wants: Wants::Nothing, constants: 0 };
        let made = |trace: &mut Trace, make: for<'g> fn(Nodes<'g>) -> Var<'g>| build(trace, |b| Ok(vec![make(b)]));
        let value = made(&mut trace, |b| b.constant(DType::F32, [2, 3], || unreachable!("nobody asked")));
        assert_eq!(trace.fact(value.expect("it is small")[0]).to_string(), "f32[2,3]");
        let large = made(&mut trace, |b| b.constant(DType::I64, [1 << 28], || unreachable!("nobody asked")));
        assert_eq!(large, Err("expected a constant of at most 1073741824 bytes, found i64[268435456]".into()));
        trace.wants = Wants::Constant(1);
        let value = made(&mut trace, |b| b.numbers(DType::I32, [2, 2], 3.0)).expect("it is small")[0];
        assert_eq!(trace.values[value.node.index()].1, [3.0, 4.0, 5.0, 6.0]);
    }

    #[test]
    fn constants_that_no_host_should_make_are_refused_by_every_row() {
        let ints = |name: &str, values: &[i64]| Attrs::new().with(name, values.to_vec());
        let f32 = |shape: &'static [usize]| (DType::F32, shape);
        for (op, inputs, attrs) in [
            ("DFT", vec![f32(&[1, 1 << 28, 1])], Attrs::new()),
            ("AffineGrid", vec![f32(&[1, 2, 3])], ints("size", &[1, 1, 1 << 20, 1 << 20])),
            ("TensorScatter", vec![f32(&[1, 1 << 40, 1]), f32(&[1, 1 << 40, 1])], Attrs::new()),
            ("EyeLike", vec![f32(&[1 << 16, 1 << 16])], Attrs::new()),
            ("Range", vec![], Attrs::new().with("start", 0).with("limit", 1i64 << 40).with("delta", 1)),
            ("ConstantOfShape", vec![], ints("input", &[1 << 16, 1 << 16])),
            ("HannWindow", vec![], Attrs::new().with("size", 1 << 30)),
            (
                "MelWeightMatrix",
                vec![],
                [("num_mel_bins", 1 << 30), ("dft_length", 1 << 10), ("sample_rate", 16000), ("lower_edge_hertz", 0)]
                    .into_iter()
                    .fold(Attrs::new().with("upper_edge_hertz", 8000), |attrs, (name, n)| attrs.with(name, n)),
            ),
        ] {
            let found = refused(op, &inputs, &attrs);
            assert!(found.contains("expected a constant of at most 1073741824 bytes, found "), "{op}: {found}");
        }
    }
}
