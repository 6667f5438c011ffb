//! Graphs from Rust code that reads like the computation.

use crate::constant::Constant;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::graph::Graph;
use crate::op::{Attr, Attrs, Fact, ValueId};
use crate::ops;
use crate::shape::Shape;
use crate::tensor::Tensor;
use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::ops::{Add, Div, Mul, Neg, Range, Sub};

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
pub struct Trace(RefCell<State>);

struct State {
    graph: Graph,
    /// The first error. Nothing that depends on it is built.
    error: Option<Error>,
    /// The number of uses of each operator so far. Nodes are named by it.
    counts: HashMap<String, usize>,
    inputs: HashSet<String>,
}

/// A value of a [`Trace`]: a handle that is cheap to copy.
#[derive(Clone, Copy)]
pub struct Var<'g> {
    trace: &'g Trace,
    /// `None` after an error.
    value: Option<ValueId>,
}

impl Trace {
    /// An empty graph.
    pub fn new(name: &str) -> Trace {
        let state = State { graph: Graph::new(name), error: None, counts: HashMap::new(), inputs: HashSet::new() };
        Trace(RefCell::new(state))
    }

    /// An input of the graph.
    pub fn input(&self, name: &str, dtype: DType, shape: impl Into<Shape>) -> Var<'_> {
        let fact = Fact::new(dtype, shape);
        self.build(|state| {
            if !state.inputs.insert(name.into()) {
                return Err(Error::graph(format!("two inputs are called '{name}'")));
            }
            fact.countable().map_err(|what| Error::graph(format!("input '{name}': {what}")))?;
            Ok(state.graph.input(name, fact))
        })
    }

    /// A constant.
    pub fn constant(&self, name: &str, tensor: Tensor) -> Var<'_> {
        self.build(|state| Ok(state.graph.constant(Constant::new(name, tensor))))
    }

    /// A constant without axes.
    pub fn scalar(&self, value: f64, dtype: DType) -> Var<'_> {
        self.constant("scalar", Tensor::from_f64(dtype, Shape::default(), &[value]))
    }

    /// Declares an output of the graph.
    pub fn output(&self, name: &str, var: Var) {
        self.build(|state| {
            if state.graph.outputs().iter().any(|(n, _)| n == name) {
                return Err(Error::graph(format!("two outputs are called '{name}'")));
            }
            if let Some(value) = self.own(var)? {
                state.graph.output(name, value);
            }
            Ok(ValueId { node: 0, port: 0 })
        });
    }

    /// Concatenates values along an axis.
    pub fn concat<'g>(&'g self, vars: &[Var<'g>], axis: i64) -> Var<'g> {
        let vars: Vec<_> = vars.iter().copied().map(Some).collect();
        self.op("Concat", &vars, Attrs::new().with("axis", axis))
    }

    /// The first output of any operator of the table. A constant input that shapes the computation is an attribute
    /// here. An omitted optional input is `None`.
    pub fn op<'g>(&'g self, op: &str, inputs: &[Option<Var<'g>>], attrs: Attrs) -> Var<'g> {
        let none = Var { trace: self, value: None };
        self.outputs(op, inputs, attrs).first().copied().unwrap_or(none)
    }

    /// Every output of any operator of the table. Empty after an error.
    pub fn outputs<'g>(&'g self, op: &str, inputs: &[Option<Var<'g>>], attrs: Attrs) -> Vec<Var<'g>> {
        let mut ports = 0;
        let first = self.build(|state| {
            let Some(row) = ops::find(op) else {
                return Err(Error::graph(format!("no such operator: {op}; `plimsoll ops` lists those there are")));
            };
            let mut values = Vec::with_capacity(inputs.len());
            for var in inputs {
                values.push(var.map(|v| self.own(v)).transpose()?.flatten());
            }
            if state.error.is_some() {
                return Ok(ValueId { node: 0, port: 0 });
            }
            let count = state.counts.entry(op.into()).or_default();
            *count += 1;
            let name = format!("{op}_{count}");
            state.graph.append();
            let node = state.graph.add(row, &name, &values, attrs, &[])?;
            ports = state.graph.node(node).outputs.len() as u32;
            Ok(ValueId { node, port: 0 })
        });
        let port = |port| Var { trace: self, value: first.value.map(|v| ValueId { port, ..v }) };
        (0..ports).map(port).collect()
    }

    /// The graph.
    ///
    /// # Errors
    /// The first error of the trace, or that it has no output.
    pub fn finish(self) -> Result<Graph> {
        let State { mut graph, error, .. } = self.0.into_inner();
        match error {
            Some(error) => Err(error),
            None if graph.outputs().is_empty() => Err(Error::graph("it has no outputs".into())),
            None => {
                graph.sweep();
                Ok(graph)
            }
        }
    }

    /// Keeps the first error. Nothing is built after it.
    fn build(&self, f: impl FnOnce(&mut State) -> Result<ValueId>) -> Var<'_> {
        let state = &mut *self.0.borrow_mut();
        let value = f(state).map_err(|error| _ = state.error.get_or_insert(error)).ok();
        Var { trace: self, value: value.filter(|_| state.error.is_none()) }
    }

    fn own(&self, var: Var) -> Result<Option<ValueId>> {
        if std::ptr::eq(self, var.trace) {
            Ok(var.value)
        } else {
            Err(Error::graph("a value of another trace is used".into()))
        }
    }
}

macro_rules! unary {
    ($($(#[$doc:meta])* $name:ident: $op:literal;)+) => {$(
        $(#[$doc])*
        pub fn $name(self) -> Var<'g> {
            self.with($op, &[], Attrs::new())
        }
    )+};
}

macro_rules! binary {
    ($($(#[$doc:meta])* $name:ident: $op:literal;)+) => {$(
        $(#[$doc])*
        pub fn $name(self, other: Var<'g>) -> Var<'g> {
            self.with($op, &[other], Attrs::new())
        }
    )+};
}

macro_rules! reductions {
    ($($(#[$doc:meta])* $name:ident: $op:literal;)+) => {$(
        $(#[$doc])*
        /// over these axes (over all if there are none), which stay with extent 1 if `keepdims`.
        pub fn $name(self, axes: &[i64], keepdims: bool) -> Var<'g> {
            self.with($op, &[], Attrs::new().with("axes", axes.to_vec()).with("keepdims", i64::from(keepdims)))
        }
    )+};
}

impl<'g> Var<'g> {
    /// Element type and shape, unless an error came before it.
    pub fn fact(self) -> Option<Fact> {
        Some(self.trace.0.borrow().graph.fact(self.value?).clone())
    }

    /// An operator whose first inputs are this value and `others`.
    fn with(self, op: &str, others: &[Var<'g>], attrs: Attrs) -> Var<'g> {
        let inputs: Vec<_> = std::iter::once(self).chain(others.iter().copied()).map(Some).collect();
        self.trace.op(op, &inputs, attrs)
    }

    /// A scalar of this value's type.
    fn like(self, value: f32) -> Var<'g> {
        let dtype = self.fact().map_or(DType::F32, |f| f.dtype);
        self.trace.scalar(value.into(), dtype)
    }

    unary! {
        /// max(x, 0).
        relu: "Relu";
        /// x Φ(x), exactly.
        gelu: "Gelu";
        /// 1 / (1 + exp(-x)).
        sigmoid: "Sigmoid";
        /// Hyperbolic tangent.
        tanh: "Tanh";
        /// The error function.
        erf: "Erf";
        /// e to the power of x.
        exp: "Exp";
        /// Natural logarithm.
        log: "Log";
        /// Square root.
        sqrt: "Sqrt";
        /// 1 / x.
        reciprocal: "Reciprocal";
        /// Absolute value.
        abs: "Abs";
        /// Sine.
        sin: "Sin";
        /// Cosine.
        cos: "Cos";
        /// The mean of each channel of `[n, c, ...]`, which keeps its axes.
        global_average_pool: "GlobalAveragePool";
    }

    binary! {
        /// Matrix product over the last two axes; those in front broadcast.
        matmul: "MatMul";
        /// x to the power of `other`.
        pow: "Pow";
        /// The larger of two.
        max: "Max";
        /// The smaller of two.
        min: "Min";
        /// True where two values are equal.
        equal: "Equal";
        /// True where x is less than `other`.
        less: "Less";
        /// True where x is greater than `other`.
        greater: "Greater";
    }

    reductions! {
        /// Sum
        reduce_sum: "ReduceSum";
        /// Mean
        reduce_mean: "ReduceMean";
        /// Largest element
        reduce_max: "ReduceMax";
        /// Smallest element
        reduce_min: "ReduceMin";
    }

    /// Softmax along an axis.
    pub fn softmax(self, axis: i64) -> Var<'g> {
        self.with("Softmax", &[], Attrs::new().with("axis", axis))
    }

    /// Logarithm of the softmax along an axis.
    pub fn log_softmax(self, axis: i64) -> Var<'g> {
        self.with("LogSoftmax", &[], Attrs::new().with("axis", axis))
    }

    /// Mean 0 and variance 1 over the axes from `axis` on, then times `scale`, plus `bias`.
    pub fn layer_norm(self, scale: Var<'g>, bias: Option<Var<'g>>, axis: i64, epsilon: f64) -> Var<'g> {
        let attrs = Attrs::new().with("axis", axis).with("epsilon", epsilon);
        self.trace.op("LayerNormalization", &[Some(self), Some(scale), bias], attrs)
    }

    /// Normalises each channel of `[n, c, ...]` by running statistics `[c]`.
    pub fn batch_norm(self, scale: Var<'g>, bias: Var<'g>, mean: Var<'g>, variance: Var<'g>, epsilon: f64) -> Var<'g> {
        self.with("BatchNormalization", &[scale, bias, mean, variance], Attrs::new().with("epsilon", epsilon))
    }

    /// Convolution of `[n, c, h, w]` by `weight` `[m, c / groups, kh, kw]`, padded by `pad` on every side.
    pub fn conv2d(self, weight: Var<'g>, bias: Option<Var<'g>>, stride: i64, pad: i64, groups: i64) -> Var<'g> {
        let attrs = Attrs::new().with("strides", vec![stride; 2]).with("pads", vec![pad; 4]).with("group", groups);
        self.trace.op("Conv", &[Some(self), Some(weight), bias], attrs)
    }

    /// The largest element of each `kernel` x `kernel` window of `[n, c, h, w]`.
    pub fn max_pool2d(self, kernel: i64, stride: i64, pad: i64) -> Var<'g> {
        self.with("MaxPool", &[], pool(kernel, stride, pad))
    }

    /// The mean of each `kernel` x `kernel` window of `[n, c, h, w]`, without the padding.
    pub fn average_pool2d(self, kernel: i64, stride: i64, pad: i64) -> Var<'g> {
        self.with("AveragePool", &[], pool(kernel, stride, pad))
    }

    /// The elements in the same order under another shape; 0 keeps an axis, -1 takes what is left.
    pub fn reshape(self, shape: &[i64]) -> Var<'g> {
        self.with("Reshape", &[], Attrs::new().with("shape", shape.to_vec()))
    }

    /// Two axes: those before `axis`, and the others.
    pub fn flatten(self, axis: i64) -> Var<'g> {
        self.with("Flatten", &[], Attrs::new().with("axis", axis))
    }

    /// Axis `k` of the result is axis `axes[k]`.
    pub fn transpose(self, axes: &[i64]) -> Var<'g> {
        self.with("Transpose", &[], Attrs::new().with("perm", axes.to_vec()))
    }

    /// Without these axes of extent 1.
    pub fn squeeze(self, axes: &[i64]) -> Var<'g> {
        self.with("Squeeze", &[], Attrs::new().with("axes", axes.to_vec()))
    }

    /// With axes of extent 1 at these places of the result.
    pub fn unsqueeze(self, axes: &[i64]) -> Var<'g> {
        self.with("Unsqueeze", &[], Attrs::new().with("axes", axes.to_vec()))
    }

    /// Broadcast to a shape.
    pub fn expand(self, shape: &[i64]) -> Var<'g> {
        self.with("Expand", &[], Attrs::new().with("shape", shape.to_vec()))
    }

    /// A range along an axis; a negative end counts from the back.
    pub fn slice(self, axis: i64, range: Range<i64>) -> Var<'g> {
        let attrs = Attrs::new().with("axes", vec![axis]);
        self.with("Slice", &[], attrs.with("starts", vec![range.start]).with("ends", vec![range.end]))
    }

    /// Consecutive parts of these lengths along an axis.
    pub fn split(self, axis: i64, lengths: &[i64]) -> Vec<Var<'g>> {
        let attrs = Attrs::new().with("axis", axis).with("split", lengths.to_vec());
        self.trace.outputs("Split", &[Some(self)], attrs)
    }

    /// The slices along an axis that integer `indices` name.
    pub fn gather(self, indices: Var<'g>, axis: i64) -> Var<'g> {
        self.with("Gather", &[indices], Attrs::new().with("axis", axis))
    }

    /// `then` where this is true, `other` elsewhere.
    pub fn select(self, then: Var<'g>, other: Var<'g>) -> Var<'g> {
        self.with("Where", &[then, other], Attrs::new())
    }

    /// The nearest values of another type.
    pub fn cast(self, dtype: DType) -> Var<'g> {
        self.with("Cast", &[], Attrs::new().with("to", Attr::Int(dtype.onnx())))
    }
}

fn pool(kernel: i64, stride: i64, pad: i64) -> Attrs {
    let attrs = Attrs::new().with("kernel_shape", vec![kernel; 2]);
    attrs.with("strides", vec![stride; 2]).with("pads", vec![pad; 4])
}

macro_rules! operators {
    ($($trait:ident $method:ident $op:literal;)+) => {$(
        impl<'g> $trait for Var<'g> {
            type Output = Var<'g>;
            fn $method(self, other: Var<'g>) -> Var<'g> {
                self.with($op, &[other], Attrs::new())
            }
        }

        impl<'g> $trait<f32> for Var<'g> {
            type Output = Var<'g>;
            fn $method(self, other: f32) -> Var<'g> {
                self.with($op, &[self.like(other)], Attrs::new())
            }
        }

        impl<'g> $trait<Var<'g>> for f32 {
            type Output = Var<'g>;
            fn $method(self, other: Var<'g>) -> Var<'g> {
                other.like(self).with($op, &[other], Attrs::new())
            }
        }
    )+};
}
operators!(Add add "Add"; Sub sub "Sub"; Mul mul "Mul"; Div div "Div";);

impl<'g> Neg for Var<'g> {
    type Output = Var<'g>;
    fn neg(self) -> Var<'g> {
        self.with("Neg", &[], Attrs::new())
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
        let x = |g: &Trace| -> Option<Fact> { g.input("x", DType::F32, [2, 3]).reshape(&[7]).fact() };
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
