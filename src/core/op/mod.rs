//! The schema of the op table: one static [`OpDef`] row holds everything that the crate knows of an operator.
//!
//! Names, inputs, attributes and semantics are ONNX's. An input that only shapes the computation is declared
//! [`Arity::Shaping`], such as a Reshape's target or a Slice's bounds. It must be a constant, and the row's functions
//! read it as the attribute of the same name, whichever way the file's opset spells it.
//! A shaping input that a row can do without is an [`Arity::Hint`].
//!
//! This file holds the types. `call`, `part`, `eval` and `exact` hold what a [`Call`] can be asked: its attributes and
//! facts, its parts, its values in `f64`, its values in its own types.

mod attr;
mod body;
mod build;
mod call;
mod eval;
mod exact;
mod fact;
mod grad;
mod input;
mod nodes;
mod part;
mod sample;
mod var;

pub use attr::{Attr, Attrs, Body, BodyKind, BodyNode};
pub use build::{Build, Nodes, Scope};
pub use fact::{Fact, MAX_MADE, NodeId, OpResult, ValueId};
pub use grad::{Back, Grad};
pub use input::{Arity, Input};
pub(crate) use input::{inputs, names};
pub use nodes::build;
pub use sample::{Data, Sample, SampleInput};
pub use var::{Operand, Var};

use crate::expr::Expr;
use crate::kernel::{Reduction, Template};
use crate::shape::{Access, Shape};
use crate::tensor::Tensor;
use std::ops::Index;

/// Infers the facts of a call's outputs.
pub type Infer = fn(&Call) -> OpResult<Vec<Fact>>;
/// Rewrites inputs and attributes of a node of this opset in the newest form.
pub type Upgrade = fn(opset: i64, inputs: &mut Vec<Option<ValueId>>, attrs: &mut Attrs);
/// Splits the output along an axis into units, or refuses to.
pub type Split = fn(&Call, axis: usize, units: usize) -> Option<Part>;

/// Per way, the axis of each data input along which parts of it give results that add up.
pub type Summed = fn(&Call) -> Vec<Vec<Option<usize>>>;

/// Maps row-major values of the inputs to those of every output.
pub type Tensors = fn(&Args<&[f64]>, &Call) -> OpResult<Vec<Vec<f64>>>;
/// Adds nodes of other rows that stand for a call, and returns one value per output.
pub type Rule = for<'g> fn(Nodes<'g>, &Call, &Args<Var<'g>>) -> OpResult<Vec<Var<'g>>>;

/// One row of the op table.
pub struct OpDef {
    /// ONNX's name.
    pub name: &'static str,
    /// One line: what it computes.
    pub doc: &'static str,
    /// Inputs in ONNX's order.
    pub inputs: &'static [Input],
    /// Names of the attributes it knows, besides those of shaping inputs; any other is refused. If a row knows
    /// `num_outputs` and a node lacks it, the graph's builder sets it to the number of outputs asked for.
    pub attrs: &'static [&'static str],
    /// Facts of the outputs.
    pub infer: Infer,
    /// The meaning in `f64`.
    pub eval: Eval,
    /// How it becomes kernels.
    pub lower: Lower,
    /// Rewrites a node of an older opset in the newest form, before arity and attributes are checked. The slots are
    /// the node's inputs in the file's order.
    pub upgrade: Option<Upgrade>,
    /// Splits the output along an axis into units: see [`Call::part`]. `None` if the rule follows from `lower`, or if
    /// no part can be computed without the rest.
    pub part: Option<Split>,
    /// The axes along which parts of the inputs give results that add up to the output: see [`Call::summed`].
    pub summed: Option<Summed>,
    /// The derivatives by the inputs.
    pub grad: Grad,
    /// The floating-point operations of a product or convolution; `None` for all others.
    pub flop: Option<fn(&Call) -> f64>,
    /// True if the nodes that stand for a call on halves compute in `f32`, and the results are rounded once: see [`Call::decompose`].
    pub wide: bool,
    /// True if its kernel writes some elements of its first operand, and the result lies over that: its template is in place.
    pub in_place: bool,
    /// True if its kernel stores what it computes, and no other node joins it: its template is alone.
    pub alone: bool,
    /// Adds inputs and attributes to an empty sample: see [`OpDef::example`].
    pub sample: fn(Sample) -> Sample,
}

impl std::fmt::Debug for OpDef {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name)
    }
}

impl OpDef {
    /// A row with the columns that every row has. The methods below set the others.
    pub(crate) const fn new(
        name: &'static str,
        doc: &'static str,
        inputs: &'static [Input],
        infer: Infer,
        eval: Eval,
        lower: Lower,
    ) -> OpDef {
        let grad = Grad::Derived;
        let (upgrade, part, flop) = (None, None, None);
        OpDef {
            name,
            doc,
            inputs,
            attrs: &[],
            infer,
            eval,
            lower,
            upgrade,
            part,
            summed: None,
            grad,
            flop,
            wide: false,
            in_place: false,
            alone: false,
            sample: |s| s,
        }
    }

    /// Sets the names of the attributes.
    pub(crate) const fn attrs(self, attrs: &'static [&'static str]) -> OpDef {
        OpDef { attrs, ..self }
    }

    /// Sets the rule that rewrites nodes of older opsets.
    pub(crate) const fn upgrade(self, upgrade: Upgrade) -> OpDef {
        OpDef { upgrade: Some(upgrade), ..self }
    }

    /// Sets the rule that splits the output.
    pub(crate) const fn part(self, part: Split) -> OpDef {
        OpDef { part: Some(part), ..self }
    }

    /// Sets the axes along which results of parts add up.
    pub(crate) const fn summed(self, summed: Summed) -> OpDef {
        OpDef { summed: Some(summed), ..self }
    }

    /// Sets the rule of the derivatives.
    pub(crate) const fn grad(self, rule: grad::GradRule) -> OpDef {
        OpDef { grad: Grad::Rule(rule), ..self }
    }

    /// Sets the count of floating-point operations.
    pub(crate) const fn flop(self, count: fn(&Call) -> f64) -> OpDef {
        OpDef { flop: Some(count), ..self }
    }

    /// Says that halves are computed in `f32`, as sums, counts and squares of theirs must be.
    pub(crate) const fn wide(self) -> OpDef {
        OpDef { wide: true, ..self }
    }

    /// Says that the result lies over the first operand.
    pub(crate) const fn in_place(self) -> OpDef {
        OpDef { in_place: true, alone: true, ..self }
    }

    /// Says that no other node joins its kernel.
    pub(crate) const fn alone(self) -> OpDef {
        OpDef { alone: true, ..self }
    }

    /// Sets inputs and attributes of the sample.
    pub(crate) const fn sample(self, sample: fn(Sample) -> Sample) -> OpDef {
        OpDef { sample, ..self }
    }

    /// A call that exercises the row: the tests that walk the table run it, and `plimsoll ops` finds types with it.
    pub fn example(&self) -> Sample {
        (self.sample)(Sample::new(self.name))
    }

    /// The smallest and the largest number of data inputs of a node.
    pub fn arity(&self) -> (usize, usize) {
        let (mut min, mut max) = (0, 0);
        for (slot, input) in self.inputs.iter().filter(|i| !i.shapes()).enumerate() {
            // Optional ones may stand before required ones.
            min = if input.arity == Arity::Optional { min } else { slot + 1 };
            max = if input.arity == Arity::Variadic { usize::MAX } else { slot + 1 };
        }
        (min, max)
    }
}

/// A node as its row sees it: attributes and input facts.
#[derive(Clone, Copy)]
pub struct Call<'a> {
    /// The node's row.
    pub op: &'static OpDef,
    /// The node's attributes, shaping inputs among them.
    pub attrs: &'a Attrs,
    /// Facts of the data inputs; an omitted optional input is `None`.
    pub inputs: &'a [Option<&'a Fact>],
}

/// The row's meaning in `f64`, independent of its lowering. Tests compare every backend with it.
#[derive(Clone, Copy)]
pub enum Eval {
    /// Elementwise: maps the values of the broadcast inputs at one index to the output's. An omitted optional input reads as NaN.
    Scalar(fn(&[f64], &Call) -> f64),
    /// Over whole tensors.
    Tensor(Tensors),
    /// Like `Tensor`, and only moves elements: every output element is one of input 0, or of any input of a variadic row.
    Move(Tensors),
    /// Computes the only output from facts and attributes alone.
    Known(fn(&Call) -> OpResult<Tensor>),
}

/// How a row becomes kernels.
#[derive(Clone, Copy)]
pub enum Lower {
    /// Elementwise over the broadcast inputs.
    Map(fn(&Args, &Call) -> Expr),
    /// A reduction over [`Call::reduced_axes`], which are kept with extent 1 unless `keepdims` is 0.
    Reduce(Reduction),
    /// Maps the access of input 0 to the output's. `None` if strides cannot express it, so that a copy is needed.
    View(fn(&Call, &Access) -> Option<Access>),
    /// The inputs one after another along attribute `axis`.
    Concat,
    /// Nodes of other rows; returns one value per output.
    Decompose(Rule),
    /// A kernel that launches those of a body, step after step.
    Repeat,
    /// A kernel template over the data inputs, whose accesses are given.
    Template(fn(&Call, &[Access]) -> OpResult<TemplateCall>),
    /// A constant, computed from constants, facts and attributes before lowering. It has no kernel.
    Const,
}

impl Lower {
    /// The name of the lowering, as `plimsoll ops` prints it.
    pub fn name(&self) -> &'static str {
        match self {
            Lower::Map(_) => "elementwise",
            Lower::Reduce(_) => "row",
            Lower::View(_) => "view",
            Lower::Concat => "in place",
            Lower::Decompose(_) => "decomposed",
            Lower::Repeat => "loop",
            Lower::Template(_) => "template",
            Lower::Const => "constant",
        }
    }
}

/// A call of a kernel template: its parameters and operands, before these have buffers.
pub struct TemplateCall {
    /// The template.
    pub template: Template,
    /// The kernel's index space: the output's elements in row-major order, possibly under another shape.
    pub shape: Shape,
    /// The template's operands: the data input that each reads, and the access.
    pub reads: Vec<(usize, Access)>,
}

/// The inputs of a call: expressions, values of a graph, or elements. An omitted optional input is absent.
pub struct Args<'a, T = Expr>(pub &'a [Option<T>]);

impl<T> Args<'_, T> {
    /// An optional input.
    pub fn get(&self, input: usize) -> Option<&T> {
        self.0.get(input)?.as_ref()
    }

    /// Every input given.
    pub fn iter(&self) -> impl Iterator<Item = &T> {
        self.0.iter().flatten()
    }
}

impl<T: Copy> Args<'_, T> {
    /// An optional input.
    pub fn given(&self, input: usize) -> Option<T> {
        self.get(input).copied()
    }
}

impl<T> Index<usize> for Args<'_, T> {
    type Output = T;
    fn index(&self, input: usize) -> &T {
        self.get(input).expect("a required input is present: arity is checked first")
    }
}

/// How a part of an output is computed. The output is split along one axis into equal units; a part is a run of units.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// Per data input, the axis along which a part reads the same units. `None` if a part reads the whole input.
    pub inputs: Vec<Option<usize>>,
    /// The attribute that lists the output's extents, if there is one.
    pub extents: Option<&'static str>,
}
