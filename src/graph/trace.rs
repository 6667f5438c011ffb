//! Graphs from Rust code that reads like the computation.

use crate::autodiff;
use crate::constant::Constant;
use crate::dtype::DType;
use crate::error::{Error, Result, ensure};
use crate::graph::Graph;
use crate::op::{Attrs, Build, Fact, Nodes, OpResult, Scope, ValueId};
use crate::ops;
use crate::shape::Shape;
use crate::tensor::Tensor;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

pub use crate::op::Var;

/// A graph that grows with each operation on its [`Var`]s.
///
/// ```
/// use plimsoll::{DType, Tensor, Trace};
///
/// let g = Trace::new("mlp");
/// let x = g.input("x", DType::F32, [8, 784]);
/// let w = g.constant("w", Tensor::from_f64(DType::F32, [784, 10], &[0.01; 7840]));
/// let y = (x.matmul(w) * 2.0).relu();
/// g.output("y", y);
/// let graph = g.finish()?;
/// assert_eq!(graph.fact(graph.outputs()[0].1).to_string(), "f32[8,10]");
///
/// // The first thing that does not fit is reported at the end; nothing panics on the way.
/// let g = Trace::new("wrong");
/// let x = g.input("x", DType::F32, [8, 784]);
/// g.output("y", x.matmul(x).relu());
/// assert!(g.finish().unwrap_err().to_string().starts_with("node 'MatMul_1' (MatMul): "));
/// # Ok::<(), plimsoll::Error>(())
/// ```
pub struct Trace(Scope<State>);

struct State {
    graph: Graph,
    /// The first error of a node, which the scope has as text.
    error: Option<Error>,
    /// The number of uses of each operator so far. Nodes are named by it.
    counts: HashMap<String, usize>,
    inputs: HashSet<String>,
}

impl Build for State {
    fn fact(&self, value: ValueId) -> Fact {
        self.graph.fact(value).clone()
    }

    fn node(&mut self, op: &str, inputs: &[Option<ValueId>], attrs: Attrs) -> OpResult<Vec<ValueId>> {
        let Some(row) = ops::find(op) else {
            return Err(format!("no such operator: {op}; `plimsoll ops` lists those there are"));
        };
        let count = self.counts.entry(op.into()).or_default();
        *count += 1;
        let name = format!("{op}_{count}");
        self.graph.append();
        let node = self.graph.add(row, &name, inputs, attrs, &[]).map_err(|error| {
            let what = error.to_string();
            self.error.get_or_insert(error);
            what
        })?;
        Ok((0..self.graph.node(node).outputs.len() as u32).map(|port| ValueId { node, port }).collect())
    }

    fn insert(&mut self, fact: Fact, elements: &dyn Fn() -> Vec<f64>) -> ValueId {
        let elements = elements();
        self.graph.constant(match elements[..] {
            [value] if fact.shape.is_empty() => Constant::number("scalar".into(), fact.dtype, value),
            _ => Constant::new("scalar", Tensor::from_f64(fact.dtype, fact.shape, &elements)),
        })
    }
}

impl Trace {
    /// An empty graph.
    pub fn new(name: &str) -> Trace {
        let (counts, inputs) = (HashMap::new(), HashSet::new());
        Trace(Scope::new(State { graph: Graph::new(name), error: None, counts, inputs }))
    }

    /// An input of the graph.
    pub fn input(&self, name: &str, dtype: DType, shape: impl Into<Shape>) -> Var<'_> {
        let fact = Fact::new(dtype, shape);
        self.made(|state| {
            ensure(state.inputs.insert(name.into()), || format!("two inputs are called '{name}'"))?;
            fact.countable().map_err(|what| format!("input '{name}': {what}"))?;
            Ok(state.graph.input(name, fact))
        })
    }

    /// A constant.
    pub fn constant(&self, name: &str, tensor: Tensor) -> Var<'_> {
        self.made(|state| Ok(state.graph.constant(Constant::new(name, tensor))))
    }

    /// A constant without axes.
    pub fn scalar(&self, value: f64, dtype: DType) -> Var<'_> {
        self.nodes().scalar(value, dtype)
    }

    /// Declares an output of the graph.
    pub fn output<'g>(&'g self, name: &str, var: Var<'g>) {
        self.0.attempt(|state| {
            if state.graph.outputs().iter().any(|(n, _)| n == name) {
                return Err(format!("two outputs are called '{name}'"));
            }
            let value = var.id(self.nodes())?;
            state.graph.output(name, value);
            Ok(())
        });
    }

    /// A state: a value that lasts from one run to the next. It begins with the elements of `initial`.
    ///
    /// ```
    /// use plimsoll::{Choice, DType, Options, Session, Tensor, Trace};
    /// let g = Trace::new("counter");
    /// let count = g.state("count", Tensor::from_f64(DType::F32, [1], &[0.0]));
    /// let next = count + 1.0;
    /// g.update(count, next);
    /// g.output("now", next);
    /// let session = Session::from_graph(g.finish()?, &Options::default().on(Choice::Cpu))?;
    /// session.run(&[])?;
    /// assert_eq!(session.run(&[])?[0].1.to_f64(), [2.0]);
    /// # Ok::<(), plimsoll::Error>(())
    /// ```
    pub fn state(&self, name: &str, initial: Tensor) -> Var<'_> {
        let fact = Fact::new(initial.dtype(), initial.shape().clone());
        self.made(|state| {
            let own = |s: &crate::graph::State| state.graph.value_name(s.value) == name;
            ensure(!state.graph.states().iter().any(own), || format!("two states are called '{name}'"))?;
            Ok(state.graph.state(name, fact, Some(Arc::new(Constant::new(name, initial)))))
        })
    }

    /// Gives a state the elements of a value after each run. Until then, all readers see the old ones.
    pub fn update<'g>(&'g self, state: Var<'g>, value: Var<'g>) {
        self.0.attempt(|trace| {
            let (state, value) = (state.id(self.nodes())?, value.id(self.nodes())?);
            trace.graph.update(state, value)
        });
    }

    /// The derivatives of a value of one element by others, each in the shape of its own; zeros where nothing leads from one to the value.
    ///
    /// ```
    /// use plimsoll::{Choice, DType, Options, Session, Tensor, Trace};
    /// let g = Trace::new("slope");
    /// let w = g.state("w", Tensor::from_f64(DType::F32, [2], &[3.0, 4.0]));
    /// let loss = (w * w).reduce_sum(&[], false);
    /// let slope = g.grad(loss, &[w])[0];
    /// g.update(w, w - slope * 0.5);
    /// g.output("loss", loss);
    /// let session = Session::from_graph(g.finish()?, &Options::default().on(Choice::Cpu))?;
    /// assert_eq!(session.run(&[])?[0].1.to_f64(), [25.0]);
    /// assert_eq!(session.state("w")?.to_f64(), [0.0, 0.0]);
    /// # Ok::<(), plimsoll::Error>(())
    /// ```
    pub fn grad<'g>(&'g self, loss: Var<'g>, by: &[Var<'g>]) -> Vec<Var<'g>> {
        let made = self.0.attempt(|state| {
            let values: Vec<_> = by.iter().map(|var| var.id(self.nodes())).collect::<OpResult<_>>()?;
            let made = autodiff::gradients(&mut state.graph, loss.id(self.nodes())?, &values);
            made.map_err(|error| {
                let what = error.to_string();
                state.error.get_or_insert(error);
                what
            })
        });
        let gradient = |(at, var): (usize, &Var<'g>)| match made.as_ref().map(|made| made[at]) {
            Some(None) => match var.shape() {
                Ok(shape) => var.like(0.0).expand(&shape),
                Err(_) => *var,
            },
            found => self.nodes().maybe(found.flatten()),
        };
        by.iter().enumerate().map(gradient).collect()
    }

    /// Concatenates values along an axis.
    pub fn concat<'g>(&'g self, vars: &[Var<'g>], axis: i64) -> Var<'g> {
        self.nodes().concat(vars, axis)
    }

    /// The first output of any operator of the table. A constant input that shapes the computation is an attribute
    /// here. An omitted optional input is `None`.
    pub fn op<'g>(&'g self, op: &str, inputs: &[Option<Var<'g>>], attrs: Attrs) -> Var<'g> {
        self.nodes().op(op, inputs, attrs)
    }

    /// Every output of any operator of the table. Empty after an error.
    pub fn outputs<'g>(&'g self, op: &str, inputs: &[Option<Var<'g>>], attrs: Attrs) -> Vec<Var<'g>> {
        self.nodes().all_outputs(op, inputs, attrs)
    }

    /// The graph.
    ///
    /// # Errors
    /// The first error of the trace, or that it has no output and updates no state.
    pub fn finish(self) -> Result<Graph> {
        match self.0.finish() {
            (State { error: Some(error), .. }, Some(what)) if error.to_string() == what => Err(error),
            (_, Some(what)) => Err(Error::graph(what)),
            (State { graph, .. }, _) if graph.results().next().is_none() => {
                Err(Error::graph("it has no outputs, and updates no state".into()))
            }
            (State { mut graph, .. }, _) => {
                graph.sweep();
                Ok(graph)
            }
        }
    }

    fn nodes(&self) -> Nodes<'_> {
        &self.0
    }

    fn made(&self, make: impl FnOnce(&mut State) -> OpResult<ValueId>) -> Var<'_> {
        self.nodes().maybe(self.0.attempt(make))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn made(f: impl Fn(&Trace) -> Var<'_>) -> Result<String> {
        let g = Trace::new("test");
        g.output("y", f(&g));
        let graph = g.finish()?;
        graph.verify()?;
        Ok(graph.fact(graph.outputs()[0].1).to_string())
    }

    #[expect(clippy::reversed_empty_ranges, reason = "a negative bound counts from the end")]
    #[test]
    fn every_method_builds_what_it_says() {
        type Case = (fn(&Trace) -> Var<'_>, &'static str);
        fn x(g: &Trace) -> Var<'_> {
            g.input("x", DType::F32, [2, 8, 6, 6])
        }
        fn c<'g>(g: &'g Trace, shape: &[usize]) -> Var<'g> {
            let shape = Shape::new(shape);
            g.constant("c", Tensor::from_f64(DType::F32, shape.clone(), &vec![0.5; shape.numel()]))
        }
        let cases: [Case; 16] = [
            (|g| (1.0 - x(g)).relu().gelu().sigmoid().tanh() / 2.0 + x2(g), "f32[2,8,6,6]"),
            (|g| x(g).reshape(&[0, 0, -1]).transpose(&[0, 2, 1]).softmax(-1), "f32[2,36,8]"),
            (|g| x(g).reduce_mean(&[1], false).reduce_max(&[], true), "f32[1,1,1]"),
            (|g| x(g).layer_norm(c(g, &[6]), None, -1, 1e-5), "f32[2,8,6,6]"),
            (|g| x(g).conv2d(c(g, &[4, 8, 3, 3]), None, 2, 1, 1), "f32[2,4,3,3]"),
            (|g| x(g).conv2d(c(g, &[8, 1, 3, 3]), Some(c(g, &[8])), 1, 0, 8), "f32[2,8,4,4]"),
            (|g| x(g).max_pool2d(2, 2, 0).average_pool2d(3, 1, 1).flatten(1), "f32[2,72]"),
            (|g| x(g).batch_norm(c(g, &[8]), c(g, &[8]), c(g, &[8]), c(g, &[8]), 1e-5), "f32[2,8,6,6]"),
            (|g| x(g).slice(1, 2..-1).unsqueeze(&[0]).squeeze(&[0]), "f32[2,5,6,6]"),
            (|g| x(g).split(1, &[3, 5])[1], "f32[2,5,6,6]"),
            (|g| x(g).gather(g.scalar(3.0, DType::I64), 1), "f32[2,6,6]"),
            (|g| x(g).greater(c(g, &[])).select(x2(g), c(g, &[1])).cast(DType::I64), "i64[2,8,6,6]"),
            (|g| g.concat(&[x(g), x2(g)], 1).global_average_pool(), "f32[2,16,1,1]"),
            (|g| x(g).matmul(c(g, &[6, 9])).pow(c(g, &[])).max(c(g, &[9])).log_softmax(1), "f32[2,8,6,9]"),
            (|g| c(g, &[1, 3]).expand(&[2, 3]).exp().log().sqrt().sin().cos().abs().erf().reciprocal(), "f32[2,3]"),
            (|g| -x(g).reduce_sum(&[0, 1], false).min(c(g, &[])).less(c(g, &[])).cast(DType::F32), "f32[6,6]"),
        ];
        fn x2(g: &Trace) -> Var<'_> {
            g.input("x2", DType::F32, [2, 8, 6, 6])
        }
        for (at, (case, expected)) in cases.into_iter().enumerate() {
            assert_eq!(made(case).map_err(|e| e.to_string()).as_deref(), Ok(expected), "case {at}");
        }
    }

    #[test]
    fn the_first_error_is_kept_and_nothing_panics() {
        let wrong = |f: fn(&Trace) -> Var<'_>| made(f).expect_err("it is wrong").to_string();
        let x = |g: &Trace| -> Option<Fact> { g.input("x", DType::F32, [2, 3]).reshape(&[7]).fact().ok() };
        assert_eq!(x(&Trace::new("test")), None);
        let first = wrong(|g| {
            let x = g.input("x", DType::F32, [2, 3]);
            g.concat(&[x.reshape(&[7]).matmul(x) + 1.0, x.transpose(&[5])], 0)
        });
        assert!(first.starts_with("node 'Reshape_1' (Reshape): "), "{first}");
        assert!(wrong(|g| g.op("Nonsense", &[], Attrs::new())).contains("no such operator: Nonsense"));
        assert!(wrong(|g| g.input("x", DType::F32, [usize::MAX, 2])).contains("larger than any memory"));
        let twice = wrong(|g| g.input("x", DType::F32, [1]) + g.input("x", DType::F32, [1]));
        assert_eq!(twice, "graph: two inputs are called 'x'");
        let other = Trace::new("other");
        let g = Trace::new("test");
        g.output("y", other.input("x", DType::F32, [1]) + g.input("x", DType::F32, [1]));
        assert!(g.finish().is_err());
        assert!(Trace::new("test").finish().is_err());
    }
}
