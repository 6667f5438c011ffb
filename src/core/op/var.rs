//! Values of a graph that is built: each operation on them adds a node.

use super::attr::Attrs;
use super::build::Nodes;
use super::fact::{Fact, OpResult, ValueId};
use crate::dtype::DType;
use crate::error::ensure;
use crate::shape::Shape;
use std::ops::{Add, Div, Mul, Neg, Range, Rem, Sub};

/// A value of a graph that grows, such as a `Trace`: a handle that is cheap to copy.
#[derive(Clone, Copy)]
pub struct Var<'g> {
    scope: Nodes<'g>,
    /// `None` after an error.
    value: Option<ValueId>,
}

/// An operand of an operator: a value, or a number that becomes a scalar of the other operand's type.
pub trait Operand<'g>: Copy {
    /// The operand beside a value.
    fn beside(self, other: Var<'g>) -> Var<'g>;
    /// The operand, if it is a value.
    fn var(self) -> Option<Var<'g>>;
}

impl<'g> Operand<'g> for Var<'g> {
    fn beside(self, _: Var<'g>) -> Var<'g> {
        self
    }

    fn var(self) -> Option<Var<'g>> {
        Some(self)
    }
}

macro_rules! numbers {
    ($($number:ty),+) => {$(
        impl<'g> Operand<'g> for $number {
            fn beside(self, other: Var<'g>) -> Var<'g> {
                other.like(self.into())
            }

            fn var(self) -> Option<Var<'g>> {
                None
            }
        }
    )+};
}
numbers!(f32, f64);

macro_rules! operators {
    ($($trait:ident $method:ident $op:literal;)+) => {$(
        impl<'g, T: Operand<'g>> $trait<T> for Var<'g> {
            type Output = Var<'g>;
            fn $method(self, other: T) -> Var<'g> {
                self.op($op, &[other.beside(self)], Attrs::new())
            }
        }

        impl<'g> $trait<Var<'g>> for f64 {
            type Output = Var<'g>;
            fn $method(self, other: Var<'g>) -> Var<'g> {
                other.like(self).op($op, &[other], Attrs::new())
            }
        }
    )+};
}
operators!(Add add "Add"; Sub sub "Sub"; Mul mul "Mul"; Div div "Div"; Rem rem "Mod";);

impl<'g> Neg for Var<'g> {
    type Output = Var<'g>;
    fn neg(self) -> Var<'g> {
        self.op("Neg", &[], Attrs::new())
    }
}

macro_rules! unary {
    ($($(#[$doc:meta])* $name:ident: $op:literal;)+) => {$(
        $(#[$doc])*
        pub fn $name(self) -> Var<'g> {
            self.op($op, &[], Attrs::new())
        }
    )+};
}

macro_rules! binary {
    ($($(#[$doc:meta])* $name:ident: $op:literal;)+) => {$(
        $(#[$doc])*
        pub fn $name(self, other: impl Operand<'g>) -> Var<'g> {
            self.op($op, &[other.beside(self)], Attrs::new())
        }
    )+};
}

macro_rules! reductions {
    ($($(#[$doc:meta])* $name:ident: $op:literal;)+) => {$(
        $(#[$doc])*
        /// over these axes (over all if there are none), which stay with extent 1 if `keepdims`.
        pub fn $name(self, axes: &[i64], keepdims: bool) -> Var<'g> {
            self.op($op, &[], Attrs::new().with("axes", axes.to_vec()).with("keepdims", i64::from(keepdims)))
        }
    )+};
}

impl<'g> Var<'g> {
    pub(super) fn new(scope: Nodes<'g>, value: Option<ValueId>) -> Var<'g> {
        Var { scope, value }
    }

    /// The value in the graph `scope`.
    pub fn id(self, scope: Nodes<'g>) -> OpResult<ValueId> {
        ensure(std::ptr::addr_eq(self.scope, scope), || "a value of another trace is used".to_owned())?;
        self.value.ok_or_else(|| "an error came before this value".into())
    }

    /// The graph that the value is in.
    pub fn scope(self) -> Nodes<'g> {
        self.scope
    }

    /// Element type and shape.
    ///
    /// # Errors
    /// An error came before this value.
    pub fn fact(self) -> OpResult<Fact> {
        Ok(self.scope.fact(self.id(self.scope)?))
    }

    /// The shape of the value.
    ///
    /// # Errors
    /// As of [`fact`](Self::fact).
    pub fn shape(self) -> OpResult<Shape> {
        Ok(self.fact()?.shape)
    }

    /// Any operator of one output, whose first inputs are this value and `others`.
    pub fn op(self, op: &str, others: &[Var<'g>], attrs: Attrs) -> Var<'g> {
        self.scope.op(op, &[&[self], others].concat(), attrs)
    }

    /// A scalar of this value's type.
    pub fn like(self, value: f64) -> Var<'g> {
        match self.fact() {
            Ok(fact) => self.scope.scalar(value, fact.dtype),
            Err(_) => Var { value: None, ..self },
        }
    }

    /// The value, or none if something could not be built.
    fn refuse(self, what: String) -> Var<'g> {
        Var { value: self.scope.attempt(|_| Err(what)), ..self }
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
        /// The nearest whole number, the even one of two.
        round: "Round";
        /// The largest whole number that is not above.
        floor: "Floor";
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
        /// True where x is at most `other`.
        less_or_equal: "LessOrEqual";
        /// True where x is at least `other`.
        greater_or_equal: "GreaterOrEqual";
        /// True where both are.
        and: "And";
        /// True where one of the two is.
        or: "Or";
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
        self.op("Softmax", &[], Attrs::new().with("axis", axis))
    }

    /// Logarithm of the softmax along an axis.
    pub fn log_softmax(self, axis: i64) -> Var<'g> {
        self.op("LogSoftmax", &[], Attrs::new().with("axis", axis))
    }

    /// Mean 0 and variance 1 over the axes from `axis` on, then times `scale`, plus `bias`.
    pub fn layer_norm(self, scale: Var<'g>, bias: Option<Var<'g>>, axis: i64, epsilon: f64) -> Var<'g> {
        let attrs = Attrs::new().with("axis", axis).with("epsilon", epsilon);
        self.scope.op("LayerNormalization", &[Some(self), Some(scale), bias], attrs)
    }

    /// Normalises each channel of `[n, c, ...]` by running statistics `[c]`.
    pub fn batch_norm(self, scale: Var<'g>, bias: Var<'g>, mean: Var<'g>, variance: Var<'g>, epsilon: f64) -> Var<'g> {
        self.op("BatchNormalization", &[scale, bias, mean, variance], Attrs::new().with("epsilon", epsilon))
    }

    /// Convolution of `[n, c, h, w]` by `weight` `[m, c / groups, kh, kw]`, padded by `pad` on every side.
    pub fn conv2d(self, weight: Var<'g>, bias: Option<Var<'g>>, stride: i64, pad: i64, groups: i64) -> Var<'g> {
        let attrs = Attrs::new().with("strides", vec![stride; 2]).with("pads", vec![pad; 4]).with("group", groups);
        self.scope.op("Conv", &[Some(self), Some(weight), bias], attrs)
    }

    /// The largest element of each `kernel` x `kernel` window of `[n, c, h, w]`.
    pub fn max_pool2d(self, kernel: i64, stride: i64, pad: i64) -> Var<'g> {
        self.op("MaxPool", &[], pool(kernel, stride, pad))
    }

    /// The mean of each `kernel` x `kernel` window of `[n, c, h, w]`, without the padding.
    pub fn average_pool2d(self, kernel: i64, stride: i64, pad: i64) -> Var<'g> {
        self.op("AveragePool", &[], pool(kernel, stride, pad))
    }

    /// The elements in the same order under another shape; 0 keeps an axis, -1 takes what is left.
    pub fn reshape(self, shape: &[i64]) -> Var<'g> {
        self.op("Reshape", &[], Attrs::new().with("shape", shape.to_vec()))
    }

    /// The elements in the same order under exactly this shape; the value itself if it has that shape.
    pub fn shaped(self, shape: &[usize]) -> Var<'g> {
        if self.shape().is_ok_and(|own| own[..] == *shape) {
            return self;
        }
        self.op("Reshape", &[], Attrs::new().with("shape", shape).with("allowzero", 1))
    }

    /// Two axes: those before `axis`, and the others.
    pub fn flatten(self, axis: i64) -> Var<'g> {
        self.op("Flatten", &[], Attrs::new().with("axis", axis))
    }

    /// Axis `k` of the result is axis `axes[k]`.
    pub fn transpose(self, axes: &[usize]) -> Var<'g> {
        self.op("Transpose", &[], Attrs::new().with("perm", axes))
    }

    /// Without these axes of extent 1.
    pub fn squeeze(self, axes: &[i64]) -> Var<'g> {
        self.op("Squeeze", &[], Attrs::new().with("axes", axes.to_vec()))
    }

    /// With axes of extent 1 at these places of the result.
    pub fn unsqueeze(self, axes: &[i64]) -> Var<'g> {
        self.op("Unsqueeze", &[], Attrs::new().with("axes", axes.to_vec()))
    }

    /// Broadcast to a shape.
    pub fn expand(self, shape: &[usize]) -> Var<'g> {
        self.op("Expand", &[], Attrs::new().with("shape", shape))
    }

    /// A range along an axis; a negative end counts from the back.
    pub fn slice(self, axis: i64, range: Range<i64>) -> Var<'g> {
        let attrs = Attrs::new().with("axes", vec![axis]);
        self.op("Slice", &[], attrs.with("starts", vec![range.start]).with("ends", vec![range.end]))
    }

    /// The elements within a range of an axis; the value itself if these are all.
    pub fn part(self, axis: usize, range: Range<usize>) -> Var<'g> {
        let Ok(shape) = self.shape() else { return self };
        match shape.get(axis) {
            Some(&extent) if range == (0..extent) => self,
            Some(&extent) if range.start <= range.end && range.end <= extent => {
                self.op("Slice", &[], Attrs::span(axis, range))
            }
            _ => self
                .refuse(format!("expected elements {} to {} along axis {axis}, found {shape}", range.start, range.end)),
        }
    }

    /// Consecutive parts of these lengths along an axis.
    pub fn split(self, axis: i64, lengths: &[i64]) -> Vec<Var<'g>> {
        let attrs = Attrs::new().with("axis", axis).with("split", lengths.to_vec());
        self.scope.all_outputs("Split", &[self], attrs)
    }

    /// The slices along an axis that integer `indices` name.
    pub fn gather(self, indices: Var<'g>, axis: i64) -> Var<'g> {
        self.op("Gather", &[indices], Attrs::new().with("axis", axis))
    }

    /// `then` where this is true, `other` elsewhere.
    pub fn select(self, then: impl Operand<'g>, other: impl Operand<'g>) -> Var<'g> {
        let either = then.var().or(other.var()).unwrap_or(self);
        self.op("Where", &[then.beside(either), other.beside(either)], Attrs::new())
    }

    /// The value held between two bounds.
    pub fn clip(self, low: f64, high: f64) -> Var<'g> {
        self.op("Clip", &[], Attrs::new().with("min", low).with("max", high))
    }

    /// The nearest values of another type; the value itself if it has that type.
    pub fn cast(self, dtype: DType) -> Var<'g> {
        if self.fact().is_ok_and(|own| own.dtype == dtype) {
            return self;
        }
        self.op("Cast", &[], Attrs::new().with("to", dtype.onnx()))
    }
}

fn pool(kernel: i64, stride: i64, pad: i64) -> Attrs {
    let attrs = Attrs::new().with("kernel_shape", vec![kernel; 2]);
    attrs.with("strides", vec![stride; 2]).with("pads", vec![pad; 4])
}
