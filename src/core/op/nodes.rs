//! Building nodes, by the name of their operator or by the rule of a row.

use super::attr::Attrs;
use super::build::{Build, Nodes, Scope};
use super::fact::{Fact, OpResult, ValueId};
use super::var::Var;
use super::{Args, Call, Rule};
use crate::dtype::DType;
use crate::shape::Shape;

impl<'g> Scope<dyn Build + 'g> {
    /// A value of the graph.
    pub fn value(&'g self, value: ValueId) -> Var<'g> {
        Var::new(self, Some(value))
    }

    /// A value of the graph, or none after an error.
    pub fn maybe(&'g self, value: Option<ValueId>) -> Var<'g> {
        Var::new(self, value)
    }

    /// The first output of any operator of the table. An omitted optional input is `None`.
    pub fn op<T: Copy + Into<Option<Var<'g>>>>(&'g self, op: &str, inputs: &[T], attrs: Attrs) -> Var<'g> {
        let [first] = self.outputs(op, inputs, attrs);
        first
    }

    /// The first outputs of any operator of the table.
    pub fn outputs<const N: usize, T>(&'g self, op: &str, inputs: &[T], attrs: Attrs) -> [Var<'g>; N]
    where
        T: Copy + Into<Option<Var<'g>>>,
    {
        let all = self.all_outputs(op, inputs, attrs);
        std::array::from_fn(|port| all.get(port).copied().unwrap_or(Var::new(self, None)))
    }

    /// Every output of any operator of the table. Empty after an error.
    pub fn all_outputs<T>(&'g self, op: &str, inputs: &[T], attrs: Attrs) -> Vec<Var<'g>>
    where
        T: Copy + Into<Option<Var<'g>>>,
    {
        let add = |build: &mut (dyn Build + 'g)| {
            let mut values = Vec::with_capacity(inputs.len());
            for &input in inputs {
                values.push(input.into().map(|var| var.id(self)).transpose()?);
            }
            build.node(op, &values, attrs)
        };
        self.attempt(add).unwrap_or_default().into_iter().map(|value| self.value(value)).collect()
    }

    /// Concatenates values along an axis.
    pub fn concat(&'g self, vars: &[Var<'g>], axis: i64) -> Var<'g> {
        self.op("Concat", vars, Attrs::new().with("axis", axis))
    }

    /// A constant of these elements. Inference alone does not compute them.
    pub fn constant(&'g self, dtype: DType, shape: impl Into<Shape>, elements: impl Fn() -> Vec<f64>) -> Var<'g> {
        let fact = Fact::new(dtype, shape);
        Var::new(self, self.attempt(|build| fact.makeable().map(|()| build.insert(fact, &elements))))
    }

    /// A constant that counts up from `first` by 1.
    pub fn numbers(&'g self, dtype: DType, shape: impl Into<Shape>, first: f64) -> Var<'g> {
        let shape = shape.into();
        let count = shape.iter().product();
        self.constant(dtype, shape, || (0..count).map(|i| first + i as f64).collect())
    }

    /// A constant without axes.
    pub fn scalar(&'g self, value: f64, dtype: DType) -> Var<'g> {
        self.constant(dtype, Shape::default(), || vec![value])
    }
}

/// Builds nodes in a graph. The error is the first one.
pub fn build<B: Build>(
    build: B,
    make: impl for<'g> FnOnce(Nodes<'g>) -> OpResult<Vec<Var<'g>>>,
) -> OpResult<Vec<ValueId>> {
    let scope = Scope::new(build);
    let made = made(&scope, make);
    match scope.finish() {
        (_, Some(first)) => Err(first),
        _ => made,
    }
}

fn made<'g>(b: Nodes<'g>, make: impl FnOnce(Nodes<'g>) -> OpResult<Vec<Var<'g>>>) -> OpResult<Vec<ValueId>> {
    make(b)?.into_iter().map(|var| var.id(b)).collect()
}

impl Call<'_> {
    /// Builds the nodes that stand for the call, by the rule of its row. If the row is wide (`OpDef::wide`), the rule sees `f32` in
    /// place of halves, and its `f32` results are rounded.
    pub fn decompose(&self, rule: Rule, graph: &mut dyn Build, inputs: &[Option<ValueId>]) -> OpResult<Vec<ValueId>> {
        build(graph, |b| {
            let inputs: Vec<_> = inputs.iter().map(|value| value.map(|value| b.value(value))).collect();
            match self.rounded_to() {
                Some(half) => self.decompose_wide(rule, b, &inputs, half),
                None => rule(b, self, &Args(&inputs)),
            }
        })
    }

    /// The type of halves that the call computes in `f32`, if it does.
    pub fn rounded_to(&self) -> Option<DType> {
        let first = self.inputs.first().copied().flatten()?.dtype;
        (self.op.wide && first.is_half()).then_some(first)
    }

    fn decompose_wide<'g>(
        &self,
        rule: Rule,
        b: Nodes<'g>,
        inputs: &[Option<Var<'g>>],
        half: DType,
    ) -> OpResult<Vec<Var<'g>>> {
        let facts: Vec<_> = self.inputs.iter().map(|fact| fact.map(Fact::unhalved)).collect();
        let facts: Vec<_> = facts.iter().map(Option::as_ref).collect();
        let mut wide = Vec::with_capacity(inputs.len());
        for (input, fact) in inputs.iter().zip(&facts) {
            wide.push(input.zip(*fact).map(|(input, fact)| input.cast(fact.dtype)));
        }
        let mut results = rule(b, &Call { inputs: &facts, ..*self }, &Args(&wide))?;
        for result in &mut results {
            if result.fact()?.dtype == DType::F32 {
                *result = result.cast(half);
            }
        }
        Ok(results)
    }
}
