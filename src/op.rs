//! The schema of the op table: everything the crate knows of an operator is one static [`OpDef`] row.
//!
//! Names, inputs, attributes and semantics are ONNX's. An input that only shapes the computation (a Reshape's target, a
//! Slice's bounds) is declared [`Arity::Shaping`]: it must be a constant, and reaches the row's functions as the
//! attribute of the same name, whichever way the file's opset spells it. One that a row can do without is a [`Arity::Hint`].

mod exact;

use crate::dtype::DType;
use crate::expr::{Body, Code, Expr};
use crate::kernel::{Fold, Template};
use crate::shape::{Access, Shape};
use crate::tensor::Tensor;
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ops::Index;
use std::ops::Range;

/// Why a row refuses a node: expected and found. The graph adds the node's name and operator.
pub type OpResult<T> = Result<T, String>;

/// What is known of a value before anything runs.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Fact {
    /// Element type.
    pub dtype: DType,
    /// Extents; named dims are bound.
    pub shape: Shape,
}

/// No value takes more bytes, with extents of 0 left out: products of a value's extents never overflow.
const MAX_BYTES: usize = 1 << 46;
/// What shapes and attributes alone determine takes no more bytes: it is made by the host, and held.
pub const MAX_MADE: usize = 1 << 30;

impl Fact {
    /// A value of this type and shape.
    pub fn new(dtype: DType, shape: impl Into<Shape>) -> Fact {
        Fact { dtype, shape: shape.into() }
    }

    /// The bytes of the elements, of a value that is [countable](Self::countable).
    pub fn bytes(&self) -> usize {
        self.shape.numel() * self.dtype.size()
    }

    /// Refuses what no memory holds. No extents come into a graph without having been asked here.
    ///
    /// # Errors
    /// What was found.
    pub fn countable(&self) -> OpResult<()> {
        let mut extents = self.shape.iter().filter(|&&extent| extent > 0);
        match extents.try_fold(self.dtype.size(), |n, &extent| n.checked_mul(extent).filter(|&n| n <= MAX_BYTES)) {
            Some(_) => Ok(()),
            None if self.shape.contains(&0) => Err(format!("{self} has extents larger than any memory")),
            None => Err(format!("{self} is larger than any memory")),
        }
    }

    /// Refuses what the host is not to make of shapes and attributes alone.
    ///
    /// # Errors
    /// What was expected and found.
    pub fn makeable(&self) -> OpResult<()> {
        match self.countable().is_ok() && self.bytes() <= MAX_MADE {
            true => Ok(()),
            false => Err(format!("expected to make constants of up to {MAX_MADE} bytes, found {self}")),
        }
    }
}

impl std::fmt::Display for Fact {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}{}", self.dtype, self.shape)
    }
}

/// A value of a graph: output `port` of node `node`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ValueId {
    /// The producing node's index.
    pub node: u32,
    /// Which of its outputs.
    pub port: u32,
}

/// The value of an attribute.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)]
pub enum Attr {
    Int(i64),
    Float(f64),
    Str(String),
    Ints(Vec<i64>),
    Floats(Vec<f64>),
    Strs(Vec<String>),
    Tensor(Tensor),
}

impl Attr {
    /// The name of the attribute's kind, as ONNX calls it.
    pub fn kind(&self) -> &'static str {
        match self {
            Attr::Int(_) => "int",
            Attr::Float(_) => "float",
            Attr::Str(_) => "string",
            Attr::Ints(_) => "ints",
            Attr::Floats(_) => "floats",
            Attr::Strs(_) => "strings",
            Attr::Tensor(_) => "tensor",
        }
    }

    /// What the constant of a shaping input becomes: a number without axes, a list with one. A scalar whose type is
    /// not the usual one stays a tensor, so that a row whose result has that type (a Range) can tell; so does what has more axes.
    pub fn shaping(tensor: &Tensor) -> Attr {
        match (tensor.dtype(), tensor.to_i64(), tensor.shape().is_empty()) {
            (DType::I64, Some(values), true) => Attr::Int(values[0]),
            (DType::F32, _, true) => Attr::Float(tensor.to_f64()[0]),
            _ if tensor.shape().len() != 1 => Attr::Tensor(tensor.clone()),
            (_, Some(values), _) => Attr::Ints(values),
            (_, None, _) => Attr::Floats(tensor.to_f64()),
        }
    }
}

/// The attributes of a node, by name, in a fixed order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Attrs(BTreeMap<String, Attr>);

impl Attrs {
    /// No attributes.
    pub fn new() -> Attrs {
        Attrs::default()
    }

    /// Those of a Slice of these elements along one axis.
    pub fn span(axis: usize, span: Range<usize>) -> Attrs {
        let at = |n: usize| vec![n as i64];
        Attrs::new().with("axes", at(axis)).with("starts", at(span.start)).with("ends", at(span.end))
    }

    /// These attributes and one more (or another value for it).
    pub fn with(mut self, name: &str, value: impl Into<Attr>) -> Attrs {
        self.set(name, value);
        self
    }

    /// Adds an attribute, or gives it another value.
    pub fn set(&mut self, name: &str, value: impl Into<Attr>) {
        self.0.insert(name.to_owned(), value.into());
    }

    /// The attribute's value, if it is set.
    pub fn get(&self, name: &str) -> Option<&Attr> {
        self.0.get(name)
    }

    /// Takes an attribute out.
    pub fn remove(&mut self, name: &str) -> Option<Attr> {
        self.0.remove(name)
    }

    /// All attributes in order of their names.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Attr)> {
        self.0.iter().map(|(k, v)| (k.as_str(), v))
    }
}

macro_rules! from {
    ($($kind:ident: $($ty:ty),+);+) => {$($(
        impl From<$ty> for Attr {
            fn from(value: $ty) -> Attr { Attr::$kind(value.into()) }
        }
    )+)+};
}
from!(Int: i64, i32; Float: f64, f32; Str: String, &str; Ints: Vec<i64>; Floats: Vec<f64>; Tensor: Tensor);

impl From<&[usize]> for Attr {
    fn from(values: &[usize]) -> Attr {
        Attr::Ints(values.iter().map(|&v| v as i64).collect())
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

impl<'a> Call<'a> {
    /// The fact of a required input. Arity is checked before a row is asked.
    pub fn fact(&self, input: usize) -> &'a Fact {
        self.inputs[input].expect("a required input is present: arity is checked first")
    }

    /// The shape of a required input.
    pub fn shape(&self, input: usize) -> &'a Shape {
        &self.fact(input).shape
    }

    /// The element type of a required input.
    pub fn dtype(&self, input: usize) -> DType {
        self.fact(input).dtype
    }

    /// Whether an optional input is given.
    pub fn has(&self, input: usize) -> bool {
        self.inputs.get(input).is_some_and(Option::is_some)
    }

    /// An integer attribute, or `default`.
    pub fn int(&self, name: &str, default: i64) -> OpResult<i64> {
        match self.attrs.get(name) {
            None => Ok(default),
            Some(Attr::Int(v)) => Ok(*v),
            Some(Attr::Ints(v)) if v.len() == 1 => Ok(v[0]),
            Some(Attr::Tensor(t)) => match t.to_i64().as_deref() {
                Some(&[v]) => Ok(v),
                _ => Err(format!(
                    "attribute '{name}': expected an int, found {}",
                    Fact::new(t.dtype(), t.shape().clone())
                )),
            },
            Some(other) => Err(format!("attribute '{name}': expected an int, found {}", other.kind())),
        }
    }

    /// A float attribute, or `default`.
    pub fn float(&self, name: &str, default: f64) -> OpResult<f64> {
        match self.attrs.get(name) {
            None => Ok(default),
            Some(Attr::Float(v)) => Ok(*v),
            Some(Attr::Int(v)) => Ok(*v as f64),
            Some(Attr::Floats(v)) if v.len() == 1 => Ok(v[0]),
            Some(Attr::Ints(v)) if v.len() == 1 => Ok(v[0] as f64),
            Some(Attr::Tensor(t)) if t.shape().numel() == 1 => Ok(t.to_f64()[0]),
            Some(other) => Err(format!("attribute '{name}': expected a float, found {}", other.kind())),
        }
    }

    /// A string attribute, or `default`.
    pub fn str(&self, name: &str, default: &'a str) -> OpResult<&'a str> {
        match self.attrs.get(name) {
            None => Ok(default),
            Some(Attr::Str(v)) => Ok(v),
            Some(other) => Err(format!("attribute '{name}': expected a string, found {}", other.kind())),
        }
    }

    /// A list of integers, if the attribute is set; a single one is a list, too, and so are those of a tensor.
    pub fn ints(&self, name: &str) -> OpResult<Option<Cow<'a, [i64]>>> {
        let list = match self.attrs.get(name) {
            None => return Ok(None),
            Some(Attr::Ints(v)) => Some(Cow::Borrowed(&v[..])),
            Some(Attr::Int(v)) => Some(Cow::Borrowed(std::slice::from_ref(v))),
            Some(Attr::Tensor(t)) => t.to_i64().map(Cow::Owned),
            Some(_) => None,
        };
        let found = self.attrs.get(name).map_or("none", Attr::kind);
        list.map(Some).ok_or_else(|| format!("attribute '{name}': expected ints, found {found}"))
    }

    /// A list of floats, if the attribute is set; a single one is a list, too, and so are those of a tensor.
    pub fn floats(&self, name: &str) -> OpResult<Option<Vec<f64>>> {
        match self.attrs.get(name) {
            None => Ok(None),
            Some(Attr::Floats(v)) => Ok(Some(v.clone())),
            Some(Attr::Float(v)) => Ok(Some(vec![*v])),
            Some(Attr::Ints(v)) => Ok(Some(v.iter().map(|&v| v as f64).collect())),
            Some(Attr::Tensor(t)) => Ok(Some(t.to_f64())),
            Some(other) => Err(format!("attribute '{name}': expected floats, found {}", other.kind())),
        }
    }

    /// The axis that an integer attribute names within `shape`, negative values counting from the end.
    pub fn axis(&self, name: &str, default: i64, shape: &Shape) -> OpResult<usize> {
        let axis = self.int(name, default)?;
        shape.axis(axis).ok_or_else(|| format!("attribute '{name}': axis {axis} is outside {shape}"))
    }

    /// The facts that the row infers for this node's outputs.
    pub fn infer(&self) -> OpResult<Vec<Fact>> {
        for (slot, fact) in self.inputs.iter().enumerate() {
            let declared = self.op.inputs.iter().filter(|i| !i.shapes()).nth(slot).or(self.op.inputs.last());
            let name = declared.map_or("", |i| i.name);
            fact.map_or(Ok(()), Fact::countable).map_err(|what| format!("input '{name}': {what}"))?;
        }
        let facts = (self.op.infer)(self)?;
        facts.iter().try_for_each(Fact::countable).map_err(|what| format!("the output {what}"))?;
        if let Lower::Fold = self.op.lower {
            facts
                .iter()
                .try_for_each(Fact::makeable)
                .map_err(|what| format!("{what}: let an input of the model hold it"))?;
        }
        Ok(facts)
    }
}

/// How often an input may be given, and what it is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arity {
    /// Exactly once.
    One,
    /// Once or not at all.
    Optional,
    /// Any number of times, at least once; last in the list.
    Variadic,
    /// A constant that shapes the computation; becomes the attribute of the input's name. May be omitted.
    Shaping,
    /// The same where it is a constant; a value that is none is not read.
    Hint,
}

/// An input of an operator.
#[derive(Clone, Copy, Debug)]
pub struct Input {
    /// ONNX's name for it.
    pub name: &'static str,
    /// How often and what for.
    pub arity: Arity,
}

impl Input {
    /// Whether it becomes an attribute, and is no data.
    pub fn shapes(&self) -> bool {
        matches!(self.arity, Arity::Shaping | Arity::Hint)
    }
}

/// A required data input.
pub const fn one(name: &'static str) -> Input {
    Input { name, arity: Arity::One }
}

/// An optional data input.
pub const fn optional(name: &'static str) -> Input {
    Input { name, arity: Arity::Optional }
}

/// A repeated data input.
pub const fn variadic(name: &'static str) -> Input {
    Input { name, arity: Arity::Variadic }
}

/// A constant input that becomes the attribute of its name.
pub const fn shaping(name: &'static str) -> Input {
    Input { name, arity: Arity::Shaping }
}

/// An input that becomes the attribute of its name if it is a constant, and is not read if it is none.
pub const fn hint(name: &'static str) -> Input {
    Input { name, arity: Arity::Hint }
}

/// The row's meaning in `f64`, independent of how the row is lowered: the oracle of every test.
#[derive(Clone, Copy)]
pub enum Eval {
    /// Elementwise: the broadcast inputs' values at one index to the output's. An omitted optional input reads as NaN.
    Scalar(fn(&[f64], &Call) -> f64),
    /// Row-major values of the inputs to those of every output.
    Tensor(fn(&[Option<&[f64]>], &Call) -> OpResult<Vec<Vec<f64>>>),
    /// The same, and every element of the outputs is one of input 0, or of any input if that is repeated.
    Move(fn(&[Option<&[f64]>], &Call) -> OpResult<Vec<Vec<f64>>>),
    /// Facts and attributes alone tell the one output.
    Known(fn(&Call) -> OpResult<Tensor>),
}

/// A kernel template with its parameters, before operands have buffers.
pub struct Core {
    /// The template.
    pub template: Template,
    /// The kernel's index space: the output's elements in row-major order, possibly under another shape.
    pub shape: Shape,
    /// The core operands: which data input each reads, and how.
    pub reads: Vec<(usize, Access)>,
}

/// The inputs of an elementwise row, as expressions; an omitted optional input is absent.
pub struct Args<'a>(pub &'a [Option<Expr>]);

impl Args<'_> {
    /// An optional input.
    pub fn get(&self, input: usize) -> Option<&Expr> {
        self.0.get(input)?.as_ref()
    }

    /// Every input given.
    pub fn iter(&self) -> impl Iterator<Item = &Expr> {
        self.0.iter().flatten()
    }
}

impl Index<usize> for Args<'_> {
    type Output = Expr;
    fn index(&self, input: usize) -> &Expr {
        self.get(input).expect("a required input is present: arity is checked first")
    }
}

/// Builds nodes while a row is decomposed into others.
pub trait Build {
    /// The fact of a value.
    fn fact(&self, value: ValueId) -> Fact;
    /// Adds a node with one output; optional inputs that are omitted are `None`.
    fn node(&mut self, op: &str, inputs: &[Option<ValueId>], attrs: Attrs) -> OpResult<ValueId>;
    /// Adds a constant, whose elements are asked for only where values are wanted.
    fn insert(&mut self, fact: Fact, elements: &dyn Fn() -> Vec<f64>) -> ValueId;
}

impl dyn Build + '_ {
    /// Adds a node whose inputs are all given.
    pub fn op(&mut self, op: &str, inputs: &[ValueId], attrs: Attrs) -> OpResult<ValueId> {
        let inputs: Vec<_> = inputs.iter().copied().map(Some).collect();
        self.node(op, &inputs, attrs)
    }

    /// The value in another type.
    pub fn cast(&mut self, value: ValueId, dtype: DType) -> OpResult<ValueId> {
        if self.fact(value).dtype == dtype {
            return Ok(value);
        }
        self.op("Cast", &[value], Attrs::new().with("to", dtype.onnx()))
    }

    /// The elements of a value from one place along an axis to before another.
    pub fn slice(&mut self, value: ValueId, axis: usize, from: usize, to: usize) -> OpResult<ValueId> {
        let shape = self.fact(value).shape;
        match shape.get(axis) {
            Some(&extent) if (from, to) == (0, extent) => return Ok(value),
            Some(&extent) if from <= to && to <= extent => {}
            _ => return Err(format!("expected elements {from} to {to} along axis {axis}, found {shape}")),
        }
        self.op("Slice", &[value], Attrs::span(axis, from..to))
    }

    /// Adds a constant of these elements. They are not made to infer.
    pub fn constant(
        &mut self,
        dtype: DType,
        shape: impl Into<Shape>,
        elements: impl Fn() -> Vec<f64>,
    ) -> OpResult<ValueId> {
        let fact = Fact::new(dtype, shape);
        fact.makeable()?;
        Ok(self.insert(fact, &elements))
    }

    /// Adds a constant of `first` and the numbers behind it, one after another.
    pub fn numbers(&mut self, dtype: DType, shape: impl Into<Shape>, first: f64) -> OpResult<ValueId> {
        let shape = shape.into();
        let count = shape.iter().product();
        self.constant(dtype, shape, || (0..count).map(|i| first + i as f64).collect())
    }

    /// Adds a scalar constant.
    pub fn scalar(&mut self, value: f64, dtype: DType) -> ValueId {
        self.insert(Fact::new(dtype, Shape::default()), &|| vec![value])
    }
}

/// How a row becomes kernels.
#[derive(Clone, Copy)]
pub enum Lower {
    /// Elementwise over the broadcast inputs.
    Map(fn(&Args, &Call) -> Expr),
    /// A fold over the axes that [`reduced_axes`] gives, kept with extent 1 unless `keepdims` is 0.
    Reduce(Fold),
    /// The output's access, given where input 0 lies; `None` when strides cannot express it and a copy is needed.
    View(fn(&Call, &Access) -> Option<Access>),
    /// Inputs laid one after another along attribute `axis`.
    Concat,
    /// Other rows, one value per output.
    Decompose(fn(&mut dyn Build, &Call, &[Option<ValueId>]) -> OpResult<Vec<ValueId>>),
    /// A kernel template over the data inputs, given where those lie.
    Template(fn(&Call, &[Access]) -> OpResult<Core>),
    /// Folded away before lowering (its inputs are constants or facts); there is no kernel for it.
    Fold,
}

impl Lower {
    /// How the row becomes kernels, in a word.
    pub fn name(&self) -> &'static str {
        match self {
            Lower::Map(_) => "elementwise",
            Lower::Reduce(_) => "row",
            Lower::View(_) => "view",
            Lower::Concat => "in place",
            Lower::Decompose(_) => "decomposed",
            Lower::Template(_) => "template",
            Lower::Fold => "constant",
        }
    }
}

/// One row of the op table.
pub struct OpDef {
    /// ONNX's name.
    pub name: &'static str,
    /// One line: what it computes.
    pub doc: &'static str,
    /// Inputs in ONNX's order.
    pub inputs: &'static [Input],
    /// Names of attributes it knows, besides those of shaping inputs; any other is refused. Who builds a node sets
    /// `num_outputs`, where a row knows it and it is not given, to the number of outputs asked for.
    pub attrs: &'static [&'static str],
    /// Facts of the outputs.
    pub infer: fn(&Call) -> OpResult<Vec<Fact>>,
    /// The meaning in `f64`.
    pub eval: Eval,
    /// How it becomes kernels.
    pub lower: Lower,
    /// Brings a node of an older opset to the newest form, before arity and attributes are checked. The slots are
    /// the node's inputs in the file's order.
    pub upgrade: Option<fn(opset: i64, inputs: &mut Vec<Option<ValueId>>, attrs: &mut Attrs)>,
    /// How a part of the output along an axis is made, which falls into so many units: see [`Call::part`]. None where that follows from
    /// `lower`, and where no part is made without the rest.
    pub part: Option<fn(&Call, axis: usize, units: usize) -> Option<Part>>,
}

/// What a part of an output along one axis is made of: some consecutive of the equal units into which the axis falls.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// Per data input, the axis along which the same units of it are read; `None` for an input that is read whole.
    pub inputs: Vec<Option<usize>>,
    /// The attribute that lists the output's extents, if one does.
    pub extents: Option<&'static str>,
}

impl Part {
    /// A part that reads these inputs along these axes.
    pub fn of(inputs: impl Into<Vec<Option<usize>>>) -> Option<Part> {
        Some(Part { inputs: inputs.into(), extents: None })
    }

    /// The node's attributes where its output is a part of this shape.
    pub fn attrs(&self, attrs: &Attrs, shape: &Shape) -> Attrs {
        self.extents.into_iter().fold(attrs.clone(), |attrs, name| attrs.with(name, &shape[..]))
    }
}

impl std::fmt::Debug for OpDef {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name)
    }
}

impl OpDef {
    /// The row with a rule for parts of its output.
    pub const fn part(self, part: fn(&Call, usize, usize) -> Option<Part>) -> OpDef {
        OpDef { part: Some(part), ..self }
    }

    /// How many data inputs a node must have at least and may have at most.
    pub fn arity(&self) -> (usize, usize) {
        let all: Vec<_> = self.inputs.iter().filter(|i| !i.shapes()).collect();
        // Optional ones may stand before required ones.
        let min = all.iter().rposition(|i| i.arity != Arity::Optional).map_or(0, |last| last + 1);
        let variadic = all.iter().any(|i| i.arity == Arity::Variadic);
        (min, if variadic { usize::MAX } else { all.len() })
    }
}

/// The axes a reduction folds, ascending: attribute `axes`, or all of them when it is absent or empty (none, with
/// `noop_with_empty_axes`).
pub fn reduced_axes(call: &Call) -> OpResult<Vec<usize>> {
    let shape = call.shape(0);
    let mut axes = match call.ints("axes")? {
        Some(axes) if !axes.is_empty() => axes
            .iter()
            .map(|&a| shape.axis(a).ok_or_else(|| format!("attribute 'axes': axis {a} is outside {shape}")))
            .collect::<OpResult<Vec<_>>>()?,
        _ if call.int("noop_with_empty_axes", 0)? != 0 => Vec::new(),
        _ => (0..shape.len()).collect(),
    };
    axes.sort_unstable();
    axes.dedup();
    Ok(axes)
}

impl Call<'_> {
    /// How a part of the one output along `axis`, which falls into `units` equal ones, is made of the same units of inputs: the row,
    /// applied to these, computes it and nothing else. `None` where the row does not say so.
    pub fn part(&self, axis: usize, units: usize) -> Option<Part> {
        let facts = self.infer().ok()?;
        let [Fact { shape, .. }] = &facts[..] else { return None };
        let falls = |extent: usize| extent > 0 && extent.is_multiple_of(units);
        if !falls(*shape.get(axis)?) {
            return None;
        }
        let part = match (self.op.part, self.op.lower) {
            (Some(rule), _) => rule(self, axis, units)?,
            (None, Lower::Map(map)) if !self.uses_index(map) => self.broadcast_part(shape, axis),
            (None, Lower::Reduce(_)) => {
                let folded = reduced_axes(self).ok()?;
                let mut kept = (0..self.shape(0).len()).filter(|k| !folded.contains(k));
                let keeps = shape.len() == self.shape(0).len();
                let from = if keeps { kept.find(|&k| k == axis) } else { kept.nth(axis) };
                Part::of([Some(from?)])?
            }
            (None, Lower::Concat) if self.axis("axis", 0, self.shape(0)).ok()? != axis => {
                Part::of(vec![Some(axis); self.inputs.len()])?
            }
            _ => return None,
        };
        let mut read = part.inputs.iter().zip(self.inputs).filter_map(|(k, fact)| Some(fact.as_ref()?.shape[(*k)?]));
        read.all(falls).then_some(part)
    }

    /// A part of what inputs broadcast to: those that have one element along the axis are read whole.
    pub fn broadcast_part(&self, shape: &Shape, axis: usize) -> Part {
        let along = |fact: &Option<&Fact>| {
            let own = &fact.as_ref()?.shape;
            (axis + own.len()).checked_sub(shape.len()).filter(|&k| own[k] == shape[axis])
        };
        Part { inputs: self.inputs.iter().map(along).collect(), extents: None }
    }

    /// Whether an elementwise row's expression depends on the index, which only its own index space gives.
    pub fn uses_index(&self, map: fn(&Args, &Call) -> Expr) -> bool {
        let args: Vec<_> = self.inputs.iter().enumerate().map(|(i, f)| f.map(|f| Expr::input(i, f.dtype))).collect();
        let body = Body::new(&[map(&Args(&args), self)]);
        body.code.iter().any(|i| matches!(i.code, Code::Index(_)))
    }

    /// Evaluates the row's `f64` meaning: row-major values of every output. Integer and `bool` results are whole.
    ///
    /// # Errors
    /// What the row refuses.
    pub fn eval(&self, values: &[Option<&[f64]>]) -> OpResult<Vec<Vec<f64>>> {
        let facts = self.infer()?;
        let mut outputs = match self.op.eval {
            Eval::Tensor(f) | Eval::Move(f) => f(values, self)?,
            Eval::Known(f) => vec![f(self)?.to_f64()],
            Eval::Scalar(f) => {
                let shape = &facts[0].shape;
                let views: Vec<_> = self
                    .inputs
                    .iter()
                    .map(|fact| fact.map(|f| Access::contiguous(f.shape.clone()).broadcast(shape)))
                    .collect();
                let mut index = vec![0; shape.len()];
                let mut args = vec![f64::NAN; values.len()];
                let mut out = Vec::with_capacity(shape.numel());
                for _ in 0..shape.numel() {
                    for ((arg, value), view) in args.iter_mut().zip(values).zip(&views) {
                        if let (Some(value), Some(view)) = (value, view) {
                            *arg = value[view.at(&index) as usize];
                        }
                    }
                    out.push(f(&args, self));
                    crate::shape::advance(&mut index, shape);
                }
                vec![out]
            }
        };
        for (output, fact) in outputs.iter_mut().zip(&facts) {
            if !fact.dtype.is_float() {
                output.iter_mut().for_each(|v| *v = v.trunc());
            }
        }
        Ok(outputs)
    }
}
