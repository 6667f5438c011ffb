//! Constants: tensors that are known before a run. Their elements are read or computed only when they are needed.

use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::file;
use crate::op::{Attrs, Call, Eval, Fact, Lower, OpDef};
use crate::ops;
use crate::shape::{Access, Shape};
use crate::tensor::Tensor;
use pieces::{Map, PIECE};
use std::collections::HashSet;
use std::fs::File;
use std::io::ErrorKind;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

mod pieces;
mod rows;

pub use pieces::Pieces;
pub use rows::Rows;

/// A tensor that is known before the run.
///
/// Its type and shape are known at once. Its elements are fetched when a device needs them, so planning a large model reads none
/// of its weights.
#[derive(Debug)]
pub struct Constant {
    /// Name, for people and for the plan.
    pub name: String,
    /// Type and shape.
    pub fact: Fact,
    source: Source,
    value: OnceLock<Tensor>,
    /// True if it is stored by itself, even where it is a view of another.
    apart: bool,
}

/// The source of a constant's elements.
#[derive(Debug)]
enum Source {
    Given,
    File {
        path: PathBuf,
        offset: u64,
    },
    Derived {
        op: &'static OpDef,
        attrs: Attrs,
        inputs: Vec<Option<Arc<Constant>>>,
        port: usize,
        depth: usize,
    },
    /// A constant that an operator's decomposition makes, by number.
    Part {
        of: Arc<Decomposed>,
        number: usize,
    },
    /// The numbers of few bits that another constant's bytes hold, in rows.
    Rows {
        of: Arc<Constant>,
        rows: Rows,
    },
}

/// An operator, its attributes and the facts of its inputs. Its decomposition follows from these.
#[derive(Debug)]
pub struct Decomposed {
    op: &'static OpDef,
    attrs: Attrs,
    inputs: Vec<Option<Fact>>,
}

/// Constants of decompositions with up to this many elements are computed at once, because passes look at them.
const MADE_AT_ONCE: usize = 1 << 12;

/// Marks a cast that the program made of a number that the file has as a wider one.
const NARROWED: &str = "narrowed";

/// The operator whose elements are all one number.
pub const FILL: &str = "ConstantOfShape";

/// The longest chain of derived constants. A longer one is evaluated at once, so that fetching and dropping recurse only so far.
const MAX_DERIVED_DEPTH: usize = 64;

impl Decomposed {
    /// Records a call.
    pub fn new(call: &Call) -> Arc<Decomposed> {
        let inputs = call.inputs.iter().map(|fact| fact.cloned()).collect();
        Arc::new(Decomposed { op: call.op, attrs: call.attrs.clone(), inputs })
    }
}

impl Constant {
    /// A constant in memory.
    pub fn new(name: impl Into<String>, tensor: Tensor) -> Constant {
        let fact = Fact::new(tensor.dtype(), tensor.shape().clone());
        Constant { name: name.into(), fact, source: Source::Given, value: OnceLock::from(tensor), apart: false }
    }

    /// A constant in a file, row-major and little-endian from `offset`.
    pub fn in_file(name: impl Into<String>, fact: Fact, path: PathBuf, offset: u64) -> Constant {
        Constant {
            name: name.into(),
            fact,
            source: Source::File { path, offset },
            value: OnceLock::new(),
            apart: false,
        }
    }

    /// A constant that an operator's decomposition makes, by number.
    ///
    /// Few elements are computed at once, because passes look at them. Many are computed when they are needed.
    pub fn decomposed(
        name: String,
        fact: Fact,
        of: &Arc<Decomposed>,
        number: usize,
        elements: &dyn Fn() -> Vec<f64>,
    ) -> Constant {
        if fact.shape.numel() <= MADE_AT_ONCE {
            return Constant::new(name, Tensor::from_f64(fact.dtype, fact.shape, &elements()));
        }
        Constant {
            name,
            fact,
            source: Source::Part { of: Arc::clone(of), number },
            value: OnceLock::new(),
            apart: false,
        }
    }

    /// Output `port` of a node whose inputs are all constants.
    ///
    /// # Errors
    /// Those of [`value`](Self::value), if the chain of constants is so long that it is evaluated here.
    pub fn derived(
        name: String,
        op: &'static OpDef,
        attrs: Attrs,
        inputs: Vec<Option<Arc<Constant>>>,
        port: usize,
        fact: Fact,
    ) -> Result<Constant> {
        let depth = 1 + inputs.iter().flatten().map(|c| c.depth()).max().unwrap_or(0);
        let source = Source::Derived { op, attrs, inputs, port, depth };
        let mut constant = Constant { name, fact, source, value: OnceLock::new(), apart: false };
        if depth > MAX_DERIVED_DEPTH {
            constant.value()?;
            constant.source = Source::Given;
        }
        Ok(constant)
    }

    /// The same elements under another name.
    ///
    /// # Errors
    /// As of [`derived`](Self::derived).
    pub fn named(self: &Arc<Self>, name: String) -> Result<Constant> {
        let identity = crate::ops::find("Identity").expect("the table has the row");
        Constant::derived(name, identity, Attrs::new(), vec![Some(Arc::clone(self))], 0, self.fact.clone())
    }

    /// The same constant, stored by itself: what it is a view of, a rank need not hold.
    pub fn apart(self) -> Constant {
        Constant { apart: true, ..self }
    }

    /// True if no file but the model's own has a part in its elements. What a plan may follow from is at hand: other files may be missing.
    pub fn is_at_hand(&self) -> bool {
        match &self.source {
            Source::Given | Source::Part { .. } => true,
            Source::File { path, .. } => file::given().is_some_and(|given| given.own == *path),
            Source::Derived { inputs, .. } => inputs.iter().flatten().all(|input| input.is_at_hand()),
            Source::Rows { of, .. } => of.is_at_hand(),
        }
    }

    /// If an operator derives this constant from others: the operator, its attributes, its inputs and the port.
    #[expect(clippy::type_complexity, reason = "the parts of a node")]
    pub fn derivation(&self) -> Option<(&'static OpDef, &Attrs, &[Option<Arc<Constant>>], usize)> {
        match &self.source {
            Source::Derived { op, attrs, inputs, port, .. } => Some((op, attrs, inputs, *port)),
            _ => None,
        }
    }

    /// If this constant is a view of another: the operator, its attributes and the other constant.
    pub fn view(&self) -> Option<(&'static OpDef, &Attrs, &Arc<Constant>)> {
        match &self.source {
            Source::Derived { op, attrs, inputs, .. } if matches!(op.lower, Lower::View(_)) && !self.apart => {
                match &inputs[..] {
                    [Some(input)] => Some((op, attrs, input)),
                    _ => None,
                }
            }
            _ => None,
        }
    }

    /// The constant that has the elements: this one, or the end of a chain of [views](Self::view).
    pub fn root(self: &Arc<Constant>) -> &Arc<Constant> {
        let mut root = self;
        while let Some((.., source)) = root.view() {
            root = source;
        }
        root
    }

    /// The same elements with axis `axes[k]` as axis `k`.
    ///
    /// # Errors
    /// Those of [`value`](Self::value), if the chain of constants is so long that it is evaluated here.
    pub fn permuted(self: &Arc<Constant>, axes: &[usize]) -> Result<Constant> {
        let op = ops::find("Transpose").expect("the table has a row for transposition");
        let shape: Shape = axes.iter().map(|&axis| self.fact.shape[axis]).collect();
        let axes: Vec<i64> = axes.iter().map(|&axis| axis as i64).collect();
        let (attrs, fact) = (Attrs::new().with("perm", axes), Fact::new(self.fact.dtype, shape));
        Constant::derived(self.name.clone(), op, attrs, vec![Some(Arc::clone(self))], 0, fact)
    }

    /// A number without axes that the program itself needs, such as a count or an epsilon. A half is a cast of the `f32` number, so that
    /// code can hold the number [before](Self::unrounded) it was rounded.
    pub fn number(name: String, dtype: DType, value: f64) -> Constant {
        let given = |dtype: DType| Constant::new(name.clone(), Tensor::from_f64(dtype, Shape::default(), &[value]));
        if !dtype.is_half() {
            return given(dtype);
        }
        Constant::narrowed(name.clone(), &Arc::new(given(DType::F32)), dtype)
    }

    /// A constant that the program stores as halves, though what computes with it may take it [before](Self::exact) it is rounded. A Cast of
    /// the file is no such constant: it asks for the rounded number.
    pub fn narrowed(name: String, wide: &Arc<Constant>, dtype: DType) -> Constant {
        let op = ops::find("Cast").expect("the table has Cast");
        let attrs = Attrs::new().with("to", dtype.onnx()).with(NARROWED, 1);
        let fact = Fact::new(dtype, wide.fact.shape.clone());
        let source =
            Source::Derived { op, attrs, inputs: vec![Some(Arc::clone(wide))], port: 0, depth: 1 + wide.depth() };
        Constant { name, fact, source, value: OnceLock::new(), apart: false }
    }

    /// The half that an elementwise node makes of constants. If it is one number, and one of these was rounded, only the result is rounded.
    ///
    /// # Errors
    /// As of [`derived`](Self::derived).
    pub fn of_numbers(
        name: String,
        op: &'static OpDef,
        attrs: &Attrs,
        inputs: &[Option<Arc<Constant>>],
        fact: Fact,
    ) -> Result<Constant> {
        if fact.shape.numel() != 1 || inputs.iter().flatten().all(|input| Arc::ptr_eq(input, input.exact())) {
            return Constant::derived(name, op, attrs.clone(), inputs.to_vec(), 0, fact);
        }
        let of = |constant: &Arc<Constant>, op: &str, attrs: Attrs, fact: Fact| {
            let op = ops::find(op).expect("the table has Cast and Reshape");
            Constant::derived(name.clone(), op, attrs, vec![Some(Arc::clone(constant))], 0, fact)
        };
        let cast = |constant: &Arc<Constant>, to: DType| {
            of(constant, "Cast", Attrs::new().with("to", to.onnx()), Fact::new(to, constant.fact.shape.clone()))
        };
        let wide = |constant: &Arc<Constant>| match constant.exact() {
            half if half.fact.dtype.is_half() => cast(half, DType::F32).map(Arc::new),
            exact if exact.fact.shape == constant.fact.shape => Ok(Arc::clone(exact)),
            exact => {
                let shape = constant.fact.shape.clone();
                let attrs = Attrs::new().with("shape", &shape[..]).with("allowzero", 1);
                of(exact, "Reshape", attrs, Fact::new(exact.fact.dtype, shape)).map(Arc::new)
            }
        };
        let inputs = inputs.iter().map(|input| input.as_ref().map(wide).transpose()).collect::<Result<_>>()?;
        let result = Constant::derived(name.clone(), op, attrs.clone(), inputs, 0, fact.unhalved())?;
        Ok(Constant::narrowed(name.clone(), &Arc::new(result), fact.dtype))
    }

    /// The same bytes read as another type and shape, which take as many. They stay where they are. `None` if they are computed.
    pub fn reinterpreted(self: &Arc<Constant>, fact: Fact) -> Option<Constant> {
        if fact.bytes() != self.fact.bytes() {
            return None;
        }
        match &self.source {
            Source::Given => {
                let tensor = Tensor::new(fact.dtype, fact.shape, self.value.get()?.bytes().clone()).ok()?;
                Some(Constant::new(self.name.clone(), tensor))
            }
            Source::File { path, offset } => Some(Constant::in_file(self.name.clone(), fact, path.clone(), *offset)),
            // A shape changes no byte.
            Source::Derived { op, inputs, .. } if op.name == "Reshape" => inputs.first()?.as_ref()?.reinterpreted(fact),
            Source::Derived { .. } | Source::Part { .. } | Source::Rows { .. } => None,
        }
    }

    /// The numbers of few bits that a constant's bytes hold, laid anew in words of 32 bits. They are moved, and never unpacked.
    ///
    /// # Panics
    /// The bytes are not those of so many numbers.
    pub fn rows(self: &Arc<Constant>, rows: Rows) -> Constant {
        assert_eq!(self.fact.bytes(), (rows.count * rows.len * rows.held).div_ceil(8), "the bytes of the numbers");
        let fact = Fact::new(DType::I32, [rows.bytes().div_ceil(4)]);
        let source = Source::Rows { of: Arc::clone(self), rows };
        Constant { name: self.name.clone(), fact, source, value: OnceLock::new(), apart: false }
    }

    /// This constant before the program [narrowed](Self::narrowed) it to halves, if it did. A view of one number is that number, whose shape may be another one.
    pub fn exact(self: &Arc<Constant>) -> &Arc<Constant> {
        let root = self.root();
        let rounded = if root.fact.shape.numel() == 1 { root } else { self };
        let is_narrowed = rounded.derivation().is_some_and(|(_, attrs, ..)| attrs.get(NARROWED).is_some());
        rounded.unrounded().filter(|_| is_narrowed && self.fact.dtype.is_half()).unwrap_or(self)
    }

    /// The constant that this one rounds, if it is a cast of wider floats.
    pub fn unrounded(&self) -> Option<&Arc<Constant>> {
        match &self.source {
            Source::Derived { op, inputs, .. } if op.name == "Cast" => {
                let wider =
                    |c: &&Arc<Constant>| c.fact.dtype.is_float() && c.fact.dtype.size() > self.fact.dtype.size();
                inputs.first()?.as_ref().filter(wider)
            }
            _ => None,
        }
    }

    /// True if both are known to have the same data without opening a file.
    pub fn same(&self, other: &Constant) -> bool {
        self.is_same(other, &mut HashSet::new())
    }

    /// As [`same`](Self::same). Pairs that are `known` to be the same are not compared again: several constants may derive from one.
    fn is_same(&self, other: &Constant, known: &mut HashSet<[*const Constant; 2]>) -> bool {
        let pair = [std::ptr::from_ref(self), std::ptr::from_ref(other)];
        if pair[0] == pair[1] || known.contains(&pair) {
            return true;
        }
        let source = match (&self.source, &other.source) {
            (Source::Given, Source::Given) => self.value.get() == other.value.get(),
            (Source::File { path, offset }, Source::File { path: p, offset: o }) => {
                (path, offset) == (p, o) || self.fact == other.fact && self.is_alike(other)
            }
            (Source::Derived { inputs: a, .. }, Source::Derived { inputs: b, .. }) => {
                let same = |(a, b): (&Option<Arc<Constant>>, &Option<Arc<Constant>>)| match (a, b) {
                    (Some(a), Some(b)) => a.is_same(b, known),
                    (a, b) => a.is_none() && b.is_none(),
                };
                self.mark() == other.mark() && a.len() == b.len() && a.iter().zip(b).all(same)
            }
            (Source::Part { of: a, number: i }, Source::Part { of: b, number: k }) => {
                i == k && std::ptr::eq(a.op, b.op) && a.attrs == b.attrs && a.inputs == b.inputs
            }
            (Source::Rows { of: a, rows: i }, Source::Rows { of: b, rows: k }) => i == k && a.is_same(b, known),
            _ => false,
        };
        let same = source && self.fact == other.fact;
        if same {
            known.insert(pair);
        }
        same
    }

    /// A text that is equal for constants that are the [same](Self::same), and seldom for others.
    pub fn mark(&self) -> String {
        const FIRST: usize = 64;
        let first = |tensor: &Tensor| tensor.bytes()[..tensor.bytes().len().min(FIRST)].to_vec();
        match &self.source {
            Source::Given => format!("{} {:?}", self.fact, self.value.get().map(first)),
            Source::File { path, offset } => match self.given_bytes(0..FIRST) {
                Some(first) => format!("{} {:?}", self.fact, Some(first)),
                None => format!("{} {} {offset}", self.fact, path.display()),
            },
            Source::Derived { op, attrs, port, .. } => format!("{} {} {attrs:?} {port}", self.fact, op.name),
            Source::Part { of, number } => format!("{} {of:?} {number}", self.fact),
            Source::Rows { of, rows } => {
                format!("{} {:?} {}", of.mark(), Rows { order: None, ..rows.clone() }, rows.order.is_some())
            }
        }
    }

    /// Some of its bytes, if they lie in the model's own file, which a page was given: what is in the file itself is compared by content.
    fn given_bytes(&self, range: Range<usize>) -> Option<Vec<u8>> {
        let Source::File { path, offset } = &self.source else { return None };
        let given = file::given().filter(|given| given.own == *path)?;
        let end = range.end.min(self.fact.shape.numel() * self.fact.dtype.size());
        let mut bytes = vec![0; end.saturating_sub(range.start)];
        (given.read)(path, offset + range.start as u64, &mut bytes).ok()?;
        Some(bytes)
    }

    /// True if both lie in a file that a page was given, with the same content.
    fn is_alike(&self, other: &Constant) -> bool {
        const PART: usize = 1 << 20;
        let part = |constant: &Constant, start: usize| constant.given_bytes(start..start + PART);
        let bytes = self.fact.shape.numel() * self.fact.dtype.size();
        let mut starts = (0..bytes).step_by(PART);
        starts.all(|start| part(self, start).is_some_and(|part_of| Some(part_of) == part(other, start)))
    }

    fn depth(&self) -> usize {
        match &self.source {
            Source::Derived { depth, .. } => *depth,
            Source::Rows { of, .. } => 1 + of.depth(),
            _ => 0,
        }
    }

    /// The elements, which are fetched or computed on first use.
    ///
    /// # Errors
    /// The file with the elements is missing or too short.
    pub fn value(&self) -> Result<&Tensor> {
        match self.value.get() {
            Some(tensor) => Ok(tensor),
            None => {
                let tensor = self.fetch()?;
                Ok(self.value.get_or_init(|| tensor))
            }
        }
    }

    /// The elements, to be taken range by range. What views and elementwise operators make of other constants is computed with its range,
    /// so that it is never held as a whole.
    ///
    /// # Errors
    /// Those of [`value`](Self::value).
    pub fn pieces(&self) -> Result<Pieces> {
        const MOST_MAPS: usize = 8;
        self.pieces_of(&mut { MOST_MAPS })
    }

    /// As [`pieces`](Self::pieces), with at most `maps` elementwise operators: a constant may be asked for by several of them.
    fn pieces_of(&self, maps: &mut usize) -> Result<Pieces> {
        let Source::Derived { op, attrs, inputs, port: 0, .. } = &self.source else { return self.held() };
        if self.value.get().is_some() || self.fact.shape.numel() <= PIECE {
            return self.held();
        }
        let facts: Vec<_> = inputs.iter().map(|c| c.as_deref().map(|c| &c.fact)).collect();
        match (op.lower, op.eval, &inputs[..]) {
            (Lower::View(view), _, [Some(input)]) => {
                let view = |access: &Access| {
                    let access = view(&Call { op, attrs, inputs: &facts }, access);
                    access.filter(|access| access.shape == self.fact.shape)
                };
                match input.pieces_of(maps)?.viewed(&view) {
                    Some(pieces) => Ok(pieces),
                    None => self.held(),
                }
            }
            (Lower::Map(_), Eval::Scalar(_), _) if *maps > 0 => {
                *maps -= 1;
                let mut operands = Vec::with_capacity(inputs.len());
                for input in inputs {
                    let operand = |input: &Arc<Constant>| input.broadcast(&self.fact.shape, maps);
                    operands.push(input.as_ref().map(operand).transpose()?);
                }
                match Map::new(&self.name, op, attrs, operands, &self.fact) {
                    Some(map) => Ok(Pieces::Map(Box::new(map))),
                    None => self.held(),
                }
            }
            (_, Eval::Known(fill), _) if op.name == FILL => {
                // One element stands for all.
                let attrs = attrs.clone().with("input", Vec::<i64>::new());
                let fail = |what| Error::Node { node: self.name.clone(), op: op.name.into(), what, file: None };
                let one = fill(&Call { op, attrs: &attrs, inputs: &[] }).map_err(fail)?;
                let all = Access::contiguous(one.shape().clone()).broadcast(&self.fact.shape);
                Ok(Pieces::Held(one, all))
            }
            _ => self.held(),
        }
    }

    /// The elements, repeated to fill a shape.
    fn broadcast(&self, shape: &Shape, maps: &mut usize) -> Result<Pieces> {
        Ok(match self.pieces_of(maps)? {
            Pieces::Held(tensor, access) => Pieces::Held(tensor, access.broadcast(shape)),
            map if self.fact.shape == *shape => map,
            _ => Pieces::Held(self.value()?.clone(), Access::contiguous(self.fact.shape.clone()).broadcast(shape)),
        })
    }

    fn held(&self) -> Result<Pieces> {
        Ok(Pieces::Held(self.fetch()?, Access::contiguous(self.fact.shape.clone())))
    }

    /// The result of an operator, computed part by part along its first axis: operators compute in 64-bit numbers, of which few are then held
    /// at a time. `None` if there are few anyway, or the operator cannot be split there.
    fn in_parts(&self, call: &Call, values: &[Option<&Tensor>]) -> Result<Option<Tensor>, String> {
        let Fact { dtype, shape } = &self.fact;
        let largest = call.inputs.iter().flatten().map(|fact| fact.shape.numel()).fold(shape.numel(), usize::max);
        let Some(axis) = shape.iter().position(|&extent| extent > 1).filter(|_| largest > PIECE) else {
            return Ok(None);
        };
        let extent = shape[axis];
        let units = (1..extent).find(|units| extent.is_multiple_of(*units) && largest / units <= PIECE);
        let units = units.unwrap_or(extent);
        let Some(part) = call.part(axis, units) else { return Ok(None) };
        let mut own = shape.clone();
        own[axis] = extent / units;
        let attrs = part.attrs(call.attrs, &own);
        let mut bytes = Vec::with_capacity(shape.numel() * dtype.size());
        for unit in 0..units {
            let piece = |(value, along): (&Option<&Tensor>, &Option<usize>)| {
                let (value, Some(axis)) = ((*value)?, *along) else { return value.cloned() };
                let len = value.shape()[axis] / units;
                Some(value.gather(&Access::contiguous(value.shape().clone()).slice(axis, unit * len, 1, len)))
            };
            let pieces: Vec<_> = values.iter().zip(&part.inputs).map(piece).collect();
            let facts: Vec<_> =
                pieces.iter().map(|piece| piece.as_ref().map(|p| Fact::new(p.dtype(), p.shape().clone()))).collect();
            let facts: Vec<_> = facts.iter().map(Option::as_ref).collect();
            let pieces: Vec<_> = pieces.iter().map(Option::as_ref).collect();
            let made = Call { op: call.op, attrs: &attrs, inputs: &facts }.compute(&pieces)?;
            bytes.extend_from_slice(made[0].bytes());
        }
        Tensor::new(*dtype, shape.clone(), bytes).map(Some).map_err(|e| e.to_string())
    }

    /// The elements as [`value`](Self::value) returns them, but without keeping them in the constant.
    ///
    /// # Errors
    /// Those of [`value`](Self::value).
    pub fn fetch(&self) -> Result<Tensor> {
        if let Some(tensor) = self.value.get() {
            return Ok(tensor.clone());
        }
        match &self.source {
            Source::Given => unreachable!("a given constant has its value from the start"),
            Source::File { path, offset } => {
                let bytes = self.fact.shape.numel() * self.fact.dtype.size();
                let fail = |e: std::io::Error| {
                    let what = format!("{bytes} bytes of tensor '{}' at {offset}", self.name);
                    match e.kind() {
                        ErrorKind::NotFound => Error::File {
                            path: path.clone(),
                            what: format!("no such file; it should hold {what}: put it there"),
                            source: Some(e),
                        },
                        _ => Error::file(path, &format!("read {what}"), e),
                    }
                };
                if let Some(given) = file::given() {
                    let mut data = Vec::new();
                    data.try_reserve_exact(bytes).map_err(|e| fail(std::io::Error::other(e)))?;
                    data.resize(bytes, 0);
                    (given.read)(path, *offset, &mut data).map_err(fail)?;
                    return Tensor::new(self.fact.dtype, self.fact.shape.clone(), data);
                }
                let file = File::open(path).map_err(fail)?;
                let len = file.metadata().map_err(fail)?.len();
                if offset.checked_add(bytes as u64).is_none_or(|end| end > len) {
                    let what =
                        format!("tensor '{}' needs {bytes} bytes from {offset} on, but the file has {len}", self.name);
                    return Err(Error::File { path: path.clone(), what, source: None });
                }
                let data = file::map(&file, *offset, bytes).map_err(fail)?;
                Tensor::new(self.fact.dtype, self.fact.shape.clone(), data)
            }
            Source::Derived { op, attrs, inputs, port, .. } => {
                let facts: Vec<_> = inputs.iter().map(|c| c.as_deref().map(|c| &c.fact)).collect();
                let mut values = Vec::with_capacity(inputs.len());
                for input in inputs {
                    let fetch = |c: &Constant| match c.source {
                        // Constants on the way to it may be asked for many times over.
                        Source::Derived { .. } | Source::Part { .. } => c.value().cloned(),
                        _ => c.fetch(),
                    };
                    values.push(input.as_deref().map(fetch).transpose()?);
                }
                let values: Vec<_> = values.iter().map(Option::as_ref).collect();
                let fail = |what| Error::Node { node: self.name.clone(), op: op.name.into(), what, file: None };
                let call = Call { op, attrs, inputs: &facts };
                if let Some(made) = self.in_parts(&call, &values).map_err(fail)? {
                    return Ok(made);
                }
                Ok(call.compute(&values).map_err(fail)?.swap_remove(*port))
            }
            Source::Rows { of, rows } => {
                // What is computed of other constants is never held but as the numbers.
                let pieces = of.pieces()?;
                let numbers = match pieces.at_once() {
                    Some(numbers) => numbers.bytes().clone(),
                    None => {
                        let mut all = Vec::with_capacity(of.fact.bytes());
                        pieces.each(|piece| {
                            all.extend_from_slice(piece.bytes());
                            Ok(())
                        })?;
                        all.into()
                    }
                };
                Tensor::new(self.fact.dtype, self.fact.shape.clone(), rows.laid(&numbers))
            }
            Source::Part { of, number } => {
                let facts: Vec<_> = of.inputs.iter().map(Option::as_ref).collect();
                let call = Call { op: of.op, attrs: &of.attrs, inputs: &facts };
                let fail = |what| Error::Node { node: self.name.clone(), op: of.op.name.into(), what, file: None };
                ops::made_constant(&call, *number).map_err(fail)
            }
        }
    }
}
