//! Kernels as text for GPUs.
//!
//! A template (`shaders/*.wgsl`) is an algorithm in statements that WGSL and C++ share. All that differs from kernel to
//! kernel is generated around it: constants (`COUNT`), and its holes, which are functions (`store(i, value)` holds the
//! kernel's body). A [`Dialect`] turns the whole into a shader or a CUDA kernel:
//!
//! ```text
//! bindings, constants, shared arrays      from the operands and the template's parameters
//! fn erf(..) fn a(..) fn store(..)        helpers the body needs; loads; the body and its stores
//! entry point { group, thread; template }
//! ```
//!
//! Two directives in templates stand on lines of their own: `//@ each LIST` .. `//@ end` repeats lines with `$` replaced
//! by the element's number, `//@ if FLAG` .. `//@ else` .. `//@ end` chooses between them.

use super::{Fold, Kernel, Nearest, Operand, PadMode, Pool, ResizeMode, Template, Window};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::expr::{Binary, Body, Code, Unary};
use crate::shape::Access;
use crate::target::Target;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::{self, Write};

/// A row of [`KERNELS`].
pub struct KernelDef {
    /// [`Template::name`], or a variant of it.
    pub name: &'static str,
    /// One line: what it computes and how.
    pub doc: &'static str,
    /// The algorithm.
    pub text: &'static str,
}

macro_rules! kernels {
    ($($name:ident: $doc:literal,)*) => {
        /// Every kernel template.
        pub static KERNELS: &[KernelDef] = &[$(KernelDef {
            name: stringify!($name),
            doc: $doc,
            text: include_str!(concat!("../../shaders/", stringify!($name), ".wgsl")),
        }),*];
    };
}
kernels! {
    map: "scalar code at every element",
    row: "reductions over trailing axes, then scalar code per row or element",
    matmul: "batched matrix product, and convolution as one: tiled through workgroup memory",
    matmul_thin: "matrix product of at most four rows or columns: reads the other operand once",
    conv: "convolution with few channels per group, directly",
    conv_transpose: "transposed convolution, gathering",
    pool: "maximum or mean of a window",
    gather: "elements chosen by index operands",
    pad: "data surrounded by a constant, its edge, its mirror image or itself",
    resize: "nearest, linear or cubic interpolation",
}

/// The language of a rendered kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dialect {
    /// A compute shader with entry point `main`.
    Wgsl,
    /// An `extern "C"` kernel called `kernel`, whose parameters are the bindings in order.
    Cuda,
}

/// Which binding each argument of a launch is: arguments over the same bytes share one.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Bindings {
    /// The binding of each read, then of each write; `None` for one without elements.
    pub of: Vec<Option<usize>>,
    /// Per binding, whether it may be bound for reading only.
    pub read_only: Vec<bool>,
}

impl Bindings {
    /// Every operand with elements has its own binding; what is read is bound for reading only.
    pub fn distinct(kernel: &Kernel) -> Bindings {
        let mut bindings = Bindings { of: Vec::new(), read_only: Vec::new() };
        for (slot, operand) in kernel.reads.iter().chain(&kernel.writes).enumerate() {
            let empty = operand.access.shape.contains(&0);
            bindings.of.push((!empty).then_some(bindings.read_only.len()));
            if !empty {
                bindings.read_only.push(slot < kernel.reads.len());
            }
        }
        bindings
    }
}

/// A kernel's text, and how to launch it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Source {
    /// The whole text; empty when there is nothing to compute.
    pub text: String,
    /// Invocations per workgroup.
    pub size: u32,
    /// Workgroups along each dimension; zero when there is nothing to compute.
    pub groups: [u32; 3],
}

/// Renders a kernel. A pure function of its arguments.
///
/// # Errors
/// When the kernel holds something that the target cannot: a type, a packed operand, more than 2^31 elements, or an
/// operation that the operand's type does not have.
pub fn render(kernel: &Kernel, target: &Target, bindings: &Bindings, dialect: Dialect) -> Result<Source> {
    let render = || -> Result<Source, String> {
        let mut module = Module::new(kernel, target, bindings)?;
        let (name, size, groups) = match &kernel.template {
            Template::Map => module.map(),
            Template::Row { inner, folds, per_row } => module.row(*inner, folds, *per_row),
            Template::MatMul => module.matmul(),
            Template::Conv { groups, window } => module.conv(*groups, window),
            Template::ConvTranspose { groups, window } => module.conv_transpose(*groups, window),
            Template::Pool { window, pool } => module.pool(window, *pool),
            Template::Gather { strides, extents } => module.gather(strides, extents),
            Template::Pad { before, mode } => module.pad(before, *mode),
            Template::Resize { scales, offsets, mode } => module.resize(scales, offsets, *mode),
        }?;
        if groups == 0 {
            return Ok(Source { text: String::new(), size, groups: [0; 3] });
        }
        // A grid of one dimension stops at the target's limit: fold it.
        let y = groups.div_ceil(u64::from(target.max_groups));
        let x = groups.div_ceil(y);
        if y > u64::from(target.max_groups) || groups > i32::MAX as u64 {
            return Err(format!("{groups} workgroups are more than '{}' runs at once", target.name));
        }
        let def = KERNELS.iter().find(|def| def.name == name).expect("every template has its row");
        let body = module.expand(def.text);
        let frame = Frame { module: &module, dialect, name, body, size, x, groups };
        Ok(Source { text: frame.to_string(), size, groups: [x as u32, y as u32, 1] })
    };
    render().map_err(|what| Error::Backend {
        backend: if dialect == Dialect::Wgsl { "wgpu" } else { "cuda" },
        what: format!("kernel '{}': {what}", kernel.template.name()),
    })
}

/// Types of values in registers and buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Type {
    F32,
    I32,
    Bool,
    Vec4,
}
use Type::{Bool, F32, I32, Vec4};

impl Type {
    fn name(self) -> &'static str {
        match self {
            F32 => "f32",
            I32 => "i32",
            Bool => "bool",
            Vec4 => "vec4f",
        }
    }

    /// The type in which values of a body are held.
    fn register(dtype: DType) -> Type {
        match dtype {
            DType::Bool => Bool,
            d if d.is_int() => I32,
            _ => F32,
        }
    }
}

fn convert(value: &str, from: Type, to: Type) -> String {
    match (from, to) {
        (from, to) if from == to => value.to_owned(),
        (F32, Bool) => format!("({value} != 0.0f)"),
        (I32, Bool) => format!("({value} != 0)"),
        _ => format!("{}({value})", to.name()),
    }
}

/// A literal. What is not finite becomes the largest finite value: GPUs may assume that there is nothing else.
fn literal(value: f64, ty: Type) -> String {
    match ty {
        Bool => (value != 0.0).to_string(),
        I32 if value <= f64::from(i32::MIN) => "(-2147483647 - 1)".into(),
        I32 if value < 0.0 => format!("({})", value as i32),
        I32 => (value as i32).to_string(),
        F32 | Vec4 => {
            let v = if value.is_nan() { 0.0 } else { (value as f32).clamp(f32::MIN, f32::MAX) };
            let v = if v.is_subnormal() { 0.0 } else { v };
            if v.is_sign_negative() { format!("({v:?}f)") } else { format!("{v:?}f") }
        }
    }
}

/// A function of the rendered module.
struct Function {
    name: String,
    params: Vec<(&'static str, Type)>,
    result: Option<Type>,
    body: Vec<String>,
}

/// A piece of an axis of the kernel's index space: coordinate `p` of it stands for `p * step` of the axis.
#[derive(Clone, Copy)]
struct Piece {
    axis: usize,
    extent: usize,
    step: usize,
}

/// A variable that runs over some pieces of axes, row-major, and the parameter that holds it.
struct Var {
    name: &'static str,
    pieces: Vec<Piece>,
}

/// Variables that together run over an index space.
type Space = Vec<Var>;

/// One variable over whole axes.
fn over(name: &'static str, shape: &[usize], axes: impl IntoIterator<Item = usize>) -> Var {
    Var { name, pieces: axes.into_iter().map(|axis| Piece { axis, extent: shape[axis], step: 1 }).collect() }
}

/// How accesses read at a point of a space: statements, an address per access, the coordinate of every axis asked for.
struct Located {
    statements: Vec<String>,
    addresses: Vec<String>,
    coordinates: BTreeMap<usize, String>,
}

/// Coordinates within row-major `extents` of an index, as statements and expressions. Only what is `wanted` is computed.
fn split(var: &str, extents: &[usize], wanted: &[bool], statements: &mut Vec<String>) -> Vec<String> {
    let mut coordinates = vec!["0".to_owned(); extents.len()];
    let mut inner = 1usize;
    let outermost = extents.iter().position(|&d| d != 1);
    for k in (0..extents.len()).rev() {
        if wanted[k] && extents[k] != 1 {
            let mut value = if inner > 1 { format!("u32({var}) / {inner}u") } else { format!("u32({var})") };
            if outermost != Some(k) {
                value = format!("{value} % {}u", extents[k]);
            }
            coordinates[k] = if value == format!("u32({var})") {
                var.to_owned()
            } else {
                statements.push(format!("let {var}_{k} = i32({value});"));
                format!("{var}_{k}")
            };
        }
        inner *= extents[k].max(1);
    }
    coordinates
}

/// `offset + sum(coordinate * stride)` as an expression.
fn sum(offset: isize, terms: &[(&str, isize)]) -> String {
    let mut out = String::new();
    for &(coordinate, stride) in terms {
        if stride == 0 || coordinate == "0" {
            continue;
        }
        let sign = match (out.is_empty(), stride < 0) {
            (true, false) => "",
            (true, true) => "-",
            (false, false) => " + ",
            (false, true) => " - ",
        };
        out += sign;
        out += coordinate;
        if stride.unsigned_abs() != 1 {
            write!(out, " * {}", stride.unsigned_abs()).expect("writing to a string");
        }
    }
    match (out.is_empty(), offset) {
        (true, _) => out = offset.to_string(),
        (false, 0) => {}
        (false, o) if o < 0 => write!(out, " - {}", -o).expect("writing to a string"),
        (false, o) => write!(out, " + {o}").expect("writing to a string"),
    }
    out
}

/// Where each access reads, in terms of the space's variables. Neighbouring pieces that every access walks as one, and
/// whose coordinates nobody asks for, are merged.
fn locate(space: &Space, accesses: &[&Access], asked: &BTreeSet<usize>) -> Located {
    let mut located = Located { statements: Vec::new(), addresses: Vec::new(), coordinates: BTreeMap::new() };
    let mut terms: Vec<Vec<(String, isize)>> = vec![Vec::new(); accesses.len()];
    let mut axes: BTreeMap<usize, Vec<(String, isize)>> = asked.iter().map(|&a| (a, Vec::new())).collect();
    // An operand of a row's result has no strides for the axes of the row.
    let stride = |a: &Access, p: &Piece| a.strides.get(p.axis).map_or(0, |s| s * p.step as isize);
    for var in space {
        // Per merged piece: extent, stride of every access, the one original piece if its coordinate is asked for.
        let mut merged: Vec<(usize, Vec<isize>, Option<Piece>)> = Vec::new();
        for piece in var.pieces.iter().filter(|p| p.extent != 1) {
            let strides: Vec<isize> = accesses.iter().map(|a| stride(a, piece)).collect();
            let named = asked.contains(&piece.axis).then_some(*piece);
            match merged.last_mut() {
                Some((extent, outer, None))
                    if named.is_none()
                        && outer.iter().zip(&strides).all(|(o, s)| *o == s * piece.extent as isize) =>
                {
                    *extent *= piece.extent;
                    *outer = strides;
                }
                _ => merged.push((piece.extent, strides, named)),
            }
        }
        let extents: Vec<usize> = merged.iter().map(|m| m.0).collect();
        // An access that is dense over the whole variable needs no coordinates.
        let dense = |a: usize| merged.windows(2).all(|w| w[0].1[a] == w[1].1[a] * w[1].0 as isize);
        let wanted: Vec<bool> = merged
            .iter()
            .map(|(_, strides, named)| named.is_some() || (0..accesses.len()).any(|a| strides[a] != 0 && !dense(a)))
            .collect();
        let coordinates = split(var.name, &extents, &wanted, &mut located.statements);
        for (a, terms) in terms.iter_mut().enumerate() {
            if dense(a) {
                terms.extend(merged.last().map(|m| (var.name.to_owned(), m.1[a])));
            } else {
                terms.extend(coordinates.iter().zip(&merged).map(|(c, m)| (c.clone(), m.1[a])));
            }
        }
        for (c, (_, _, named)) in coordinates.iter().zip(&merged) {
            if let Some(piece) = named {
                let axis = axes.get_mut(&piece.axis).expect("named because it was asked for");
                axis.push((c.clone(), piece.step as isize));
            }
        }
    }
    let text = |offset, terms: &[(String, isize)]| {
        sum(offset, &terms.iter().map(|(c, s)| (c.as_str(), *s)).collect::<Vec<_>>())
    };
    located.addresses = accesses.iter().zip(&terms).map(|(a, t)| text(a.offset, t)).collect();
    located.coordinates = axes.into_iter().map(|(axis, t)| (axis, text(0, &t))).collect();
    located
}

/// The parts of a rendered kernel, before a dialect frames them.
struct Module<'a> {
    kernel: &'a Kernel,
    target: &'a Target,
    bindings: &'a Bindings,
    /// Storage type of each read, then of each write.
    storage: Vec<Type>,
    /// Type of each binding: that of the first operand it serves.
    bound: Vec<Type>,
    constants: Vec<(String, Type, String)>,
    shared: Vec<(&'static str, Type, usize)>,
    private: Vec<(String, Type)>,
    functions: Vec<Function>,
    flags: Vec<&'static str>,
    /// Per `each` list, per element, what is replaced in the repeated lines beside `$`.
    lists: BTreeMap<&'static str, Vec<Vec<(&'static str, &'static str)>>>,
}

/// A template's choice: its text's name, invocations per workgroup, workgroups.
type Launch = Result<(&'static str, u32, u64), String>;

impl<'a> Module<'a> {
    fn new(kernel: &'a Kernel, target: &'a Target, bindings: &'a Bindings) -> Result<Module<'a>, String> {
        let mut storage = Vec::new();
        let mut bound = vec![None; bindings.read_only.len()];
        for (slot, operand) in kernel.reads.iter().chain(&kernel.writes).enumerate() {
            if operand.packed {
                return Err("a packed operand is for the CPU".into());
            }
            let ty = match target.storage(operand.dtype).map_err(|e| e.to_string())? {
                DType::F32 => F32,
                DType::I32 => I32,
                other => return Err(format!("operands of type {other} are not rendered yet")),
            };
            match operand.access.span() {
                Some((low, high)) if low < 0 || high >= i32::MAX as isize => {
                    return Err(format!("operand {slot} reaches from element {low} to {high}"));
                }
                _ => {}
            }
            storage.push(ty);
            if let Some(binding) = bindings.of[slot] {
                bound[binding].get_or_insert(ty);
            }
        }
        if kernel.shape.checked_len().is_none_or(|n| n > i32::MAX as usize) {
            return Err(format!("{} elements are more than 2^31", kernel.shape));
        }
        Ok(Module {
            kernel,
            target,
            bindings,
            storage,
            bound: bound.into_iter().map(|ty| ty.unwrap_or(F32)).collect(),
            constants: Vec::new(),
            shared: Vec::new(),
            private: Vec::new(),
            functions: Vec::new(),
            flags: Vec::new(),
            lists: BTreeMap::new(),
        })
    }

    fn int(&mut self, name: impl Into<String>, value: isize) {
        self.constants.push((name.into(), I32, literal(value as f64, I32)));
    }

    fn constant(&mut self, name: impl Into<String>, value: f64, ty: Type) {
        self.constants.push((name.into(), ty, literal(value, ty)));
    }

    fn function(&mut self, name: &str, params: &[(&'static str, Type)], result: Option<Type>, body: Vec<String>) {
        self.functions.push(Function { name: name.to_owned(), params: params.to_vec(), result, body });
    }

    fn access(&self, slot: usize) -> &'a Access {
        &self.operand(slot).access
    }

    fn operand(&self, slot: usize) -> &'a Operand {
        let reads = self.kernel.reads.len();
        if slot < reads { &self.kernel.reads[slot] } else { &self.kernel.writes[slot - reads] }
    }

    /// The value at an address, in the operand's storage type.
    fn load(&self, slot: usize, address: &str) -> String {
        let ty = self.storage[slot];
        match self.bindings.of[slot] {
            None => literal(0.0, ty),
            Some(b) if self.bound[b] == ty => format!("b{b}[{address}]"),
            Some(b) => format!("bitcast<{}>(b{b}[{address}])", ty.name()),
        }
    }

    /// A function `name(at)` that loads from an operand by address.
    fn loader(&mut self, name: &str, slot: usize) {
        let value = format!("return {};", self.load(slot, "at"));
        self.function(name, &[("at", I32)], Some(self.storage[slot]), vec![value]);
    }

    /// A scalar body at a point of the space. `input` gives the slot, or a value of a type; the results come back with
    /// their types.
    fn body(
        &self,
        body: &Body,
        space: &Space,
        input: impl Fn(u32) -> Input,
        writes: &[&Access],
        folds: &[Type],
    ) -> Result<(Vec<String>, Vec<(String, Type)>, Vec<String>), String> {
        let mut live = vec![false; body.code.len()];
        body.results.iter().for_each(|&r| live[r as usize] = true);
        for (i, instr) in body.code.iter().enumerate().rev() {
            if live[i] {
                operands(instr.code).iter().flatten().for_each(|&o| live[o as usize] = true);
            }
        }
        let code = || body.code.iter().enumerate().filter(|(i, _)| live[*i]);
        let slots: BTreeSet<usize> = code()
            .filter_map(|(_, instr)| match instr.code {
                Code::Input(j) => match input(j) {
                    Input::Slot(slot) => Some(slot),
                    Input::Value(..) => None,
                },
                _ => None,
            })
            .collect();
        let asked: BTreeSet<usize> = code()
            .filter_map(|(_, instr)| match instr.code {
                Code::Index(axis) => Some(axis as usize),
                _ => None,
            })
            .collect();
        let accesses: Vec<&Access> = slots.iter().map(|&s| self.access(s)).chain(writes.iter().copied()).collect();
        let mut located = locate(space, &accesses, &asked);
        let stores = located.addresses.split_off(slots.len());
        let loads: BTreeMap<usize, &String> = slots.into_iter().zip(&located.addresses).collect();
        let mut statements = located.statements;
        let mut names: Vec<(String, Type)> = Vec::with_capacity(body.code.len());
        for (i, instr) in body.code.iter().enumerate() {
            let ty = Type::register(instr.dtype);
            if !live[i] {
                names.push((String::new(), ty));
                continue;
            }
            let value = match instr.code {
                Code::Const(v) => {
                    names.push((literal(v, ty), ty));
                    continue;
                }
                Code::Index(axis) => convert(&located.coordinates[&(axis as usize)], I32, ty),
                Code::Input(j) => match input(j) {
                    Input::Slot(slot) => convert(&self.load(slot, loads[&slot]), self.storage[slot], ty),
                    Input::Value(name, from) => convert(name, from, ty),
                },
                Code::Fold(k) => convert(&format!("fold{k}"), folds[k as usize], ty),
                code => {
                    // Literals alone would be computed by the shader compiler, which refuses overflow.
                    let literal = |o: &u32| matches!(body.code[*o as usize].code, Code::Const(_));
                    let all = operands(code).iter().flatten().all(literal);
                    for o in operands(code).into_iter().flatten().filter(|_| all) {
                        statements.push(format!("let c{i}_{o} = {};", names[o as usize].0));
                    }
                    let name = |o: u32| {
                        let (name, ty) = &names[o as usize];
                        (if all { format!("c{i}_{o}") } else { name.clone() }, *ty)
                    };
                    match code {
                        Code::Unary(op, a) => unary(op, name(a))?,
                        Code::Binary(op, a, b) => binary(op, name(a), name(b))?,
                        Code::Select(c, a, b) => format!("select({}, {}, {})", name(b).0, name(a).0, name(c).0),
                        Code::Cast(a) => convert(&name(a).0, name(a).1, ty),
                        _ => unreachable!("leaves are done above"),
                    }
                }
            };
            statements.push(format!("let v{i} = {value};"));
            names.push((format!("v{i}"), ty));
        }
        let results = body.results.iter().map(|&r| names[r as usize].clone()).collect();
        Ok((statements, results, stores))
    }

    /// The function `store(<variables>, value)`: the kernel's body and its stores, where `guard` holds.
    fn store(&mut self, space: &Space, core: Option<Type>, guard: Option<&str>, folds: &[Type]) -> Result<(), String> {
        let kernel = self.kernel;
        let reads = kernel.template.core_reads();
        let input = |j: u32| match core {
            Some(ty) if j == 0 => Input::Value("value", ty),
            Some(_) => Input::Slot(reads + j as usize - 1),
            None => Input::Slot(j as usize),
        };
        let writes: Vec<&Access> = kernel.writes.iter().map(|w| &w.access).collect();
        let (mut body, results, addresses) = self.body(&kernel.body, space, input, &writes, folds)?;
        for (w, ((value, ty), address)) in results.into_iter().zip(addresses).enumerate() {
            let slot = kernel.reads.len() + w;
            let Some(b) = self.bindings.of[slot] else { continue };
            let stored = convert(&value, ty, self.storage[slot]);
            let bound = self.bound[b];
            let stored =
                if bound == self.storage[slot] { stored } else { format!("bitcast<{}>({stored})", bound.name()) };
            body.push(format!("b{b}[{address}] = {stored};"));
        }
        if let Some(guard) = guard {
            body.insert(0, format!("if ({guard}) {{"));
            body.push("}".into());
        }
        let mut params: Vec<_> = space.iter().map(|var| (var.name, I32)).collect();
        params.extend(core.map(|ty| ("value", ty)));
        self.function("store", &params, None, body);
        Ok(())
    }

    /// The variable `i` over the whole index space.
    fn flat(&self) -> Space {
        vec![over("i", &self.kernel.shape, 0..self.kernel.shape.len())]
    }

    /// One invocation per element.
    fn per_element(&mut self, name: &'static str) -> Launch {
        let count = self.kernel.shape.numel() as u64;
        let size = if count < 1 << 14 { 64 } else { 256 }.min(self.target.max_workgroup);
        self.int("COUNT", count as isize);
        Ok((name, size, count.div_ceil(u64::from(size))))
    }

    /// Axes apart from those `still`: function `base(i)` for the address that the latter add up to, and per other axis
    /// `coordinate$(i)`, `EXTENT$` and `STRIDE$` of the data.
    fn walk(&mut self, still: impl Fn(usize) -> bool) -> Vec<usize> {
        let data = self.access(0);
        let moving: Vec<usize> = (0..data.shape.len()).filter(|&a| !still(a)).collect();
        let mut base = data.clone();
        moving.iter().for_each(|&a| base.strides[a] = 0);
        let space = self.flat();
        let located = locate(&space, &[&base], &BTreeSet::new());
        let mut body = located.statements;
        body.push(format!("return {};", located.addresses[0]));
        self.function("base", &[("i", I32)], Some(I32), body);
        for (k, &axis) in moving.iter().enumerate() {
            let located = locate(&space, &[], &BTreeSet::from([axis]));
            let mut body = located.statements;
            body.push(format!("return {};", located.coordinates[&axis]));
            self.function(&format!("coordinate{k}"), &[("i", I32)], Some(I32), body);
            self.int(format!("EXTENT{k}"), data.shape[axis] as isize);
            self.int(format!("STRIDE{k}"), data.strides[axis]);
        }
        self.lists.insert("axis", vec![Vec::new(); moving.len()]);
        moving
    }

    fn map(&mut self) -> Launch {
        self.store(&self.flat(), None, None, &[])?;
        self.per_element("map")
    }

    fn row(&mut self, inner: usize, folds: &[super::RowFold], per_row: bool) -> Launch {
        let shape = &self.kernel.shape;
        let outer = shape.len() - inner;
        let rows: usize = shape[..outer].iter().product();
        let length: usize = shape[outer..].iter().product();
        let space = vec![over("row", shape, 0..outer), over("j", shape, outer..shape.len())];
        let mut types: Vec<Type> = Vec::new();
        let mut array: Vec<(&'static str, &'static str)> = Vec::new();
        for (k, RowFoldText { combine, ty, start }) in folds.iter().map(fold).enumerate() {
            let (mut body, results, _) =
                self.body(&folds[k].body, &space, |j| Input::Slot(j as usize), &[], &types)?;
            body.push(format!("return {};", convert(&results[0].0, results[0].1, ty)));
            self.private.push((format!("fold{k}"), ty));
            self.function(&format!("element{k}"), &[("row", I32), ("j", I32)], Some(ty), body);
            self.function(&format!("combine{k}"), &[("a", ty), ("b", ty)], Some(ty), vec![combine.into()]);
            self.constant(format!("START{k}"), start, ty);
            types.push(ty);
            array.push(("SHARED", if ty == F32 { "shared_f32" } else { "shared_i32" }));
        }
        if per_row {
            let space = vec![over("row", shape, 0..outer)];
            self.store(&space, None, None, &types)?;
            self.flags.push("PER_ROW");
        } else {
            self.store(&space, None, None, &types)?;
        }
        // Lanes lie along the axis in which elements are dense: that of the row, or else that of the rows.
        let dense_row = self.kernel.reads.first().is_none_or(|r| {
            let along = |axes: std::ops::Range<usize>| {
                axes.rev().find(|&a| shape[a] > 1).is_some_and(|a| r.access.strides[a].abs() == 1)
            };
            along(outer..shape.len()) || !along(0..outer)
        });
        let most = 1usize << self.target.max_workgroup.min(256).ilog2();
        let mut lanes = if dense_row { length / 4 } else { (length / 8).min((1 << 14) / rows.max(1)) };
        lanes = (lanes.max(1).next_power_of_two()).min(most);
        let per_group = (most / lanes).min(rows.max(1).next_power_of_two());
        let size = lanes * per_group;
        let (lane_step, row_step) = if dense_row { (1, lanes) } else { (per_group, 1) };
        let constants = [
            ("COUNT", rows),
            ("LENGTH", length),
            ("LANES", lanes),
            ("ROWS", per_group),
            ("LANE_STEP", lane_step),
            ("ROW_STEP", row_step),
            ("BLOCK", lanes * 64),
        ];
        constants.iter().for_each(|&(name, value)| self.int(name, value as isize));
        if lanes > 1 {
            self.flags.push("LANES");
            for (name, ty) in [("shared_f32", F32), ("shared_i32", I32)] {
                if types.contains(&ty) {
                    self.shared.push((name, ty, size));
                }
            }
        }
        self.lists.insert("fold", array.into_iter().map(|a| vec![a]).collect());
        let rows = if per_row || length > 0 { rows } else { 0 };
        Ok(("row", size as u32, rows.div_ceil(per_group) as u64))
    }

    fn matmul(&mut self) -> Launch {
        let shape = &self.kernel.shape;
        let rank = shape.len();
        let (m, n) = (shape[rank - 2], shape[rank - 1]);
        let k = self.access(0).shape[rank - 1];
        let batch: usize = shape[..rank - 2].iter().product();
        // The thinner side is the rows: (a b)' = b' a'.
        let swap = n < m && n <= 16;
        let names = if swap { ["n", "m"] } else { ["m", "n"] };
        let (rows, columns) = (names[0], names[1]);
        for (slot, name, params) in [(0, ["a", "b"], [rows, "k"]), (1, ["b", "a"], ["k", columns])] {
            let access = self.access(slot);
            let extents = &access.shape;
            let space: Space = vec![
                over("batch", extents, 0..rank - 2),
                over(params[0], extents, [rank - 2]),
                over(params[1], extents, [rank - 1]),
            ];
            let located = locate(&space, &[access], &BTreeSet::new());
            let mut body = located.statements;
            body.push(format!("return {};", self.load(slot, &located.addresses[0])));
            // `a` is called with (batch, m, k), `b` with (batch, k, n).
            let name = name[usize::from(swap)];
            let params = if name == "a" { ["m", "k"] } else { ["k", "n"] };
            self.function(name, &[("batch", I32), (params[0], I32), (params[1], I32)], Some(self.storage[slot]), body);
        }
        if self.storage[..2] != [F32, F32] {
            return Err("a matrix product is of f32".into());
        }
        let space: Space =
            vec![over("batch", shape, 0..rank - 2), over(rows, shape, [rank - 2]), over(columns, shape, [rank - 1])];
        let dense = |slot: usize, axis: usize| self.access(slot).strides[axis] == 1;
        let a_along_k = if swap { dense(1, rank - 2) } else { !dense(0, rank - 2) || dense(0, rank - 1) };
        let b_along_k = if swap { !dense(0, rank - 2) } else { !dense(1, rank - 1) && dense(1, rank - 2) };
        let (m, n) = if swap { (n, m) } else { (m, n) };
        self.product(space, [batch, m, k, n], a_along_k, b_along_k)
    }

    /// The product of `a(batch, m, k)` and `b(batch, k, n)`, whose space has the variables `batch`, `m` and `n`.
    fn product(&mut self, mut space: Space, [batch, m, k, n]: [usize; 4], a_k: bool, b_k: bool) -> Launch {
        // `store` is called with (batch, m, n).
        space.sort_by_key(|var| ["batch", "m", "n"].iter().position(|name| *name == var.name));
        self.store(&space, Some(F32), Some("m < M && n < N"), &[])?;
        [("M", m), ("K", k), ("N", n)].iter().for_each(|&(name, value)| self.int(name, value as isize));
        if m == 0 || n == 0 {
            return Ok(("matmul", 64, 0));
        }
        if m <= 4 {
            let size: usize = 64;
            let slices = if b_k { 16 } else { (k / 16).clamp(1, 8).next_power_of_two() };
            let columns = size / slices;
            let (column_step, slice_step) = if b_k { (slices, 1) } else { (1, columns) };
            let tiles = n.div_ceil(columns);
            let constants = [
                ("TILES_N", tiles),
                ("COLUMNS", columns),
                ("SLICES", slices),
                ("COLUMN_STEP", column_step),
                ("SLICE_STEP", slice_step),
                ("ROW1", 1.min(m - 1)),
                ("ROW2", 2.min(m - 1)),
                ("ROW3", 3.min(m - 1)),
            ];
            constants.iter().for_each(|&(name, value)| self.int(name, value as isize));
            self.shared.push(("partial", Vec4, size));
            return Ok(("matmul_thin", size as u32, (batch * tiles) as u64));
        }
        let tiles = |tm: usize, tn: usize| m.div_ceil(tm) * n.div_ceil(tn);
        let (tile_m, tile_n) = match () {
            () if m <= 16 => (16, 64),
            () if batch * tiles(64, 64) >= 64 && self.target.max_workgroup >= 256 => (64, 64),
            () => (32, 32),
        };
        let step = 16;
        let (am, ak) = if a_k { (step, 1) } else { (1, tile_m) };
        let (bn, bk) = if b_k { (step, 1) } else { (1, tile_n) };
        let constants = [
            ("TILE_M", tile_m),
            ("TILE_N", tile_n),
            ("TILES_M", m.div_ceil(tile_m)),
            ("TILES_N", n.div_ceil(tile_n)),
            ("STEP", step),
            ("A_M_STEP", am),
            ("A_K_STEP", ak),
            ("B_N_STEP", bn),
            ("B_K_STEP", bk),
        ];
        constants.iter().for_each(|&(name, value)| self.int(name, value as isize));
        self.shared.push(("tile_a", F32, tile_m * step));
        self.shared.push(("tile_b", F32, tile_n * step));
        Ok(("matmul", (tile_m * tile_n / 16) as u32, (batch * tiles(tile_m, tile_n)) as u64))
    }

    /// Constants of a windowed template: output extents, data extents, strides of the data (and weights), the window.
    fn windowed(&mut self, window: &Window) {
        let data = self.access(0);
        let shape = &self.kernel.shape;
        for (k, axis) in ["N", "C", "Z", "Y", "X"].into_iter().enumerate() {
            self.int(format!("OUT_{axis}"), shape[k] as isize);
            self.int(format!("IN_{axis}"), data.shape[k] as isize);
            self.int(format!("DATA_{axis}"), data.strides[k]);
            if self.kernel.template.core_reads() > 1 {
                self.int(format!("WEIGHT_{axis}"), self.access(1).strides[k]);
            }
            if let Some(k) = k.checked_sub(2) {
                self.int(format!("KERNEL_{axis}"), window.kernel[k] as isize);
                self.int(format!("STRIDE_{axis}"), window.strides[k] as isize);
                self.int(format!("DILATION_{axis}"), window.dilations[k] as isize);
                self.int(format!("PAD_{axis}"), window.pads[k] as isize);
            }
        }
        self.int("DATA_0", data.offset);
        self.loader("data", 0);
        if self.kernel.template.core_reads() > 1 {
            self.int("WEIGHT_0", self.access(1).offset);
            self.loader("weight", 1);
        }
    }

    fn channels(&mut self, groups: usize) -> Result<(usize, usize), String> {
        let (o, c) = (self.kernel.shape[1], self.access(0).shape[1]);
        if groups == 0 || o % groups != 0 || c % groups != 0 {
            return Err(format!("{c} and {o} channels do not form {groups} groups"));
        }
        if self.storage[..2] != [F32, F32] {
            return Err("a convolution is of f32".into());
        }
        self.int("GROUP_OUT", (o / groups) as isize);
        self.int("GROUP_IN", (c / groups) as isize);
        Ok((o / groups, c / groups))
    }

    fn conv(&mut self, groups: usize, window: &Window) -> Launch {
        let (out, input) = self.channels(groups)?;
        self.windowed(window);
        let [kz, ky, kx] = window.kernel;
        if out < 8 || input * kz * ky * kx < 8 {
            self.store(&self.flat(), Some(F32), None, &[])?;
            return self.per_element("conv");
        }
        // As the product of weights [o, c * kernel] and unfolded data [c * kernel, n * positions], per group.
        let s = &self.kernel.shape;
        let weights = self.access(1);
        let group = |extent, step| Piece { axis: 0, extent, step };
        let space = vec![
            Var { name: "batch", pieces: vec![group(groups, out)] },
            Var { name: "m", pieces: vec![group(out, 1)] },
            over("k", &weights.shape, 1..5),
        ];
        let located = locate(&space, &[weights], &BTreeSet::new());
        let mut body = located.statements;
        body.push(format!("return {};", self.load(1, &located.addresses[0])));
        self.function("a", &[("batch", I32), ("m", I32), ("k", I32)], Some(F32), body);
        let mut body = Vec::new();
        let c = split("k", &[input, kz, ky, kx], &[true; 4], &mut body);
        let p = split("n", &[s[0], s[2], s[3], s[4]], &[true; 4], &mut body);
        let mut inside = Vec::new();
        let data = self.access(0);
        for a in 0..3 {
            let (stride, dilation, pad) =
                (window.strides[a] as isize, window.dilations[a] as isize, window.pads[a] as isize);
            let terms = [(p[a + 1].as_str(), stride), (c[a + 1].as_str(), dilation)];
            body.push(format!("let p{a} = {};", sum(-pad, &terms)));
            if pad > 0 {
                inside.push(format!("p{a} >= 0"));
            }
            let reach = (s[a + 2] as isize - 1) * stride + (window.kernel[a] as isize - 1) * dilation - pad;
            if reach >= data.shape[a + 2] as isize {
                inside.push(format!("p{a} < {}", data.shape[a + 2]));
            }
        }
        let strides = &data.strides;
        let terms = [
            (p[0].as_str(), strides[0]),
            ("batch", strides[1] * input as isize * isize::from(groups > 1)),
            (c[0].as_str(), strides[1]),
            ("p0", strides[2] * isize::from(data.shape[2] > 1)),
            ("p1", strides[3] * isize::from(data.shape[3] > 1)),
            ("p2", strides[4] * isize::from(data.shape[4] > 1)),
        ];
        let load = self.load(0, &sum(data.offset, &terms));
        if inside.is_empty() {
            body.push(format!("return {load};"));
        } else {
            body.push("var value = 0.0f;".into());
            body.push(format!("if ({}) {{ value = {load}; }}", inside.join(" && ")));
            body.push("return value;".into());
        }
        self.function("b", &[("batch", I32), ("k", I32), ("n", I32)], Some(F32), body);
        let channel = |extent, step| Piece { axis: 1, extent, step };
        let space = vec![
            Var { name: "batch", pieces: vec![channel(groups, out)] },
            Var { name: "m", pieces: vec![channel(out, 1)] },
            over("n", s, [0, 2, 3, 4]),
        ];
        self.product(space, [groups, out, input * kz * ky * kx, s[0] * s[2] * s[3] * s[4]], true, false)
    }

    fn conv_transpose(&mut self, groups: usize, window: &Window) -> Launch {
        self.channels(groups)?;
        self.windowed(window);
        self.store(&self.flat(), Some(F32), None, &[])?;
        self.per_element("conv_transpose")
    }

    fn pool(&mut self, window: &Window, pool: Pool) -> Launch {
        self.windowed(window);
        let ty = if pool == Pool::Max { self.storage[0] } else { F32 };
        if ty != self.storage[0] {
            return Err("a mean is of f32".into());
        }
        let lowest = if ty == F32 { f64::from(f32::MIN) } else { f64::from(i32::MIN) };
        self.constant("START", if pool == Pool::Max { lowest } else { 0.0 }, ty);
        let combine = if pool == Pool::Max { "return max(a, b);" } else { "return a + b;" };
        self.function("combine", &[("a", ty), ("b", ty)], Some(ty), vec![combine.into()]);
        let finish = if pool == Pool::Max { "return a;" } else { "return a / f32(max(count, 1));" };
        self.function("finish", &[("a", ty), ("count", I32)], Some(ty), vec![finish.into()]);
        for (a, axis) in ["Z", "Y", "X"].into_iter().enumerate() {
            let extent = self.access(0).shape[a + 2] as isize;
            let (low, high) = match pool {
                Pool::MeanPadded { pads_end } => (-(window.pads[a] as isize), extent + pads_end[a] as isize),
                _ => (0, extent),
            };
            self.int(format!("LOW_{axis}"), low);
            self.int(format!("HIGH_{axis}"), high);
        }
        self.store(&self.flat(), Some(ty), None, &[])?;
        self.per_element("pool")
    }

    fn gather(&mut self, strides: &[isize], extents: &[usize]) -> Launch {
        self.walk(|_| true);
        self.loader("data", 0);
        let space = self.flat();
        for (k, (&stride, &extent)) in strides.iter().zip(extents).enumerate() {
            let slot = 1 + k;
            let located = locate(&space, &[self.access(slot)], &BTreeSet::new());
            let mut body = located.statements;
            body.push(format!("return {};", convert(&self.load(slot, &located.addresses[0]), self.storage[slot], I32)));
            self.function(&format!("index{k}"), &[("i", I32)], Some(I32), body);
            self.int(format!("EXTENT{k}"), extent as isize);
            self.int(format!("STRIDE{k}"), stride);
        }
        self.lists.insert("index", vec![Vec::new(); strides.len()]);
        self.store(&space, Some(self.storage[0]), None, &[])?;
        self.per_element("gather")
    }

    fn pad(&mut self, before: &[isize], mode: PadMode) -> Launch {
        let (data, shape) = (self.access(0), &self.kernel.shape);
        let moving = self.walk(|a| before[a] == 0 && data.shape[a] == shape[a]);
        moving.iter().enumerate().for_each(|(k, &a)| self.int(format!("BEFORE{k}"), before[a]));
        self.loader("data", 0);
        let ty = self.storage[0];
        let fill = if let PadMode::Constant(value) = mode { value } else { 0.0 };
        self.constant("FILL", fill, ty);
        let outside: &[&str] = match mode {
            PadMode::Constant(_) => &[],
            PadMode::Edge => &["return clamp(at, 0, n - 1);"],
            PadMode::Wrap => &["let r = at % n;", "return select(r, r + n, r < 0);"],
            PadMode::Reflect => &[
                "let period = max(2 * (n - 1), 1);",
                "let r = at % period;",
                "let p = select(r, r + period, r < 0);",
                "return min(p, 2 * (n - 1) - p);",
            ],
        };
        if outside.is_empty() {
            self.flags.push("CONSTANT");
        } else {
            let outside = outside.iter().map(|&line| line.to_owned()).collect();
            self.function("outside", &[("at", I32), ("n", I32)], Some(I32), outside);
        }
        self.store(&self.flat(), Some(ty), None, &[])?;
        self.per_element("pad")
    }

    fn resize(&mut self, scales: &[f64], offsets: &[f64], mode: ResizeMode) -> Launch {
        let (data, shape) = (self.access(0), &self.kernel.shape);
        let moving = self.walk(|a| scales[a] == 1.0 && offsets[a] == 0.0 && data.shape[a] == shape[a]);
        for (k, &a) in moving.iter().enumerate() {
            let offset = match mode {
                ResizeMode::Nearest(rule) => nearest(rule, scales[a], offsets[a], shape[a]),
                _ => offsets[a],
            };
            self.constant(format!("SCALE{k}"), scales[a], F32);
            self.constant(format!("OFFSET{k}"), offset, F32);
        }
        self.loader("data", 0);
        let (width, first, inside, place, falloff): (usize, isize, bool, &str, Vec<String>) = match mode {
            ResizeMode::Nearest(_) => {
                self.flags.push("NEAREST");
                self.store(&self.flat(), Some(self.storage[0]), None, &[])?;
                return self.per_element("resize");
            }
            ResizeMode::Linear => {
                (2, 0, false, "return clamp(x, 0.0f, f32(n - 1));", vec!["return max(1.0f - abs(d), 0.0f);".into()])
            }
            ResizeMode::Cubic { a, exclude_outside } => {
                let near = "((A + 2.0f) * e - (A + 3.0f)) * e * e + 1.0f";
                let far = "((A * e - 5.0f * A) * e + 8.0f * A) * e - 4.0f * A";
                self.constant("A", a, F32);
                let body = vec![
                    "let e = min(abs(d), 2.0f);".into(),
                    format!("return select({far}, {near}, e <= 1.0f);"),
                ];
                (4, -1, exclude_outside, "return x;", body)
            }
        };
        self.int("WIDTH", width as isize);
        self.int("FIRST", first);
        self.int("TAPS", width.pow(moving.len() as u32) as isize);
        if inside {
            self.flags.push("INSIDE");
        }
        self.function("place", &[("x", F32), ("n", I32)], Some(F32), vec![place.into()]);
        self.function("falloff", &[("d", F32)], Some(F32), falloff);
        self.store(&self.flat(), Some(F32), None, &[])?;
        self.per_element("resize")
    }

    /// A template with its directives carried out.
    fn expand(&self, text: &str) -> Vec<String> {
        let lines: Vec<&str> = text.lines().collect();
        let mut out = Vec::new();
        self.expand_lines(&lines, &mut out);
        out
    }

    fn expand_lines(&self, lines: &[&str], out: &mut Vec<String>) {
        let mut i = 0;
        while i < lines.len() {
            let directive = lines[i].trim().strip_prefix("//@ ");
            let Some((kind, name)) = directive.and_then(|d| d.split_once(' ')) else {
                out.push(lines[i].to_owned());
                i += 1;
                continue;
            };
            // The matching `else` and `end`.
            let (mut depth, mut middle, mut end) = (0, None, i + 1);
            loop {
                match lines[end].trim() {
                    "//@ end" if depth == 0 => break,
                    "//@ end" => depth -= 1,
                    "//@ else" if depth == 0 => middle = Some(end),
                    line if line.starts_with("//@ each") || line.starts_with("//@ if") => depth += 1,
                    _ => {}
                }
                end += 1;
            }
            if kind == "each" {
                for (k, names) in self.lists.get(name).into_iter().flatten().enumerate() {
                    let mut block = Vec::new();
                    self.expand_lines(&lines[i + 1..end], &mut block);
                    for line in block {
                        let line = line.replace('$', &k.to_string());
                        out.push(names.iter().fold(line, |line, (from, to)| line.replace(from, to)));
                    }
                }
            } else {
                let chosen = match (self.flags.contains(&name), middle) {
                    (true, middle) => i + 1..middle.unwrap_or(end),
                    (false, Some(middle)) => middle + 1..end,
                    (false, None) => end..end,
                };
                self.expand_lines(&lines[chosen], out);
            }
            i = end + 1;
        }
    }
}

/// Where the value of an input of a body comes from.
enum Input {
    Slot(usize),
    Value(&'static str, Type),
}

fn operands(code: Code) -> [Option<u32>; 3] {
    match code {
        Code::Const(_) | Code::Input(_) | Code::Index(_) | Code::Fold(_) => [None; 3],
        Code::Unary(_, a) | Code::Cast(a) => [Some(a), None, None],
        Code::Binary(_, a, b) => [Some(a), Some(b), None],
        Code::Select(c, a, b) => [Some(c), Some(a), Some(b)],
    }
}

struct RowFoldText {
    combine: &'static str,
    ty: Type,
    start: f64,
}

fn fold(fold: &super::RowFold) -> RowFoldText {
    let result = fold.body.code[fold.body.results[0] as usize].dtype;
    let ty = if Type::register(result) == F32 { F32 } else { I32 };
    let (low, high) = if ty == F32 { (f32::MIN.into(), f32::MAX.into()) } else { (i32::MIN.into(), i32::MAX.into()) };
    let (combine, start) = match fold.fold {
        Fold::Sum => ("return a + b;", 0.0),
        Fold::Prod => ("return a * b;", 1.0),
        Fold::Max => ("return max(a, b);", low),
        Fold::Min => ("return min(a, b);", high),
    };
    RowFoldText { combine, ty, start }
}

/// The offset with which `floor(f32(index) * scale + offset)` in `f32` is the neighbour that the rule chooses in `f64`, for
/// every index, with room for rounding. Ties are moved by less than any other coordinate is away from one.
fn nearest(rule: Nearest, scale: f64, offset: f64, extent: usize) -> f64 {
    let choose = |x: f64| match rule {
        Nearest::Floor => x.floor(),
        Nearest::Ceil => x.ceil(),
        Nearest::RoundPreferFloor => (x - 0.5).ceil(),
        Nearest::RoundPreferCeil => (x + 0.5).floor(),
    };
    let shift = match rule {
        Nearest::Floor => 0.0,
        Nearest::Ceil => 1.0,
        Nearest::RoundPreferFloor | Nearest::RoundPreferCeil => 0.5,
    };
    let agrees = |moved: f64| {
        (0..extent).all(|i| {
            let wanted = choose(i as f64 * scale + offset);
            let got = i as f64 * f64::from(scale as f32) + f64::from(moved as f32);
            let room = (i as f64 * scale).abs().max(1.0) * f64::from(f32::EPSILON) * 2.0;
            (got - room).floor() == wanted && (got + room).floor() == wanted
        })
    };
    let nudges = [0.0, 1e-4, -1e-4, 1e-3, -1e-3, 1e-2, -1e-2];
    let exact = offset + shift;
    nudges.iter().map(|nudge| exact + nudge).find(|&moved| agrees(moved)).unwrap_or(exact)
}

fn unary(op: Unary, (x, ty): (String, Type)) -> Result<String, String> {
    Ok(match (op, ty) {
        (Unary::Not, Bool) => format!("!{x}"),
        (Unary::Not, I32) => format!("{x} == 0"),
        (_, Bool | Vec4) | (Unary::Not, F32) => return Err(format!("{op:?} of a {}", ty.name())),
        (Unary::Neg, _) => format!("-{x}"),
        (Unary::Abs, _) => format!("abs({x})"),
        (Unary::Sign, _) => format!("sign({x})"),
        (Unary::Floor | Unary::Ceil | Unary::Round, I32) => x,
        (_, I32) => format!("i32({})", unary(op, (format!("f32({x})"), F32))?),
        (Unary::Exp, _) => format!("exp({x})"),
        (Unary::Log, _) => format!("log({x})"),
        (Unary::Sqrt, _) => format!("sqrt({x})"),
        (Unary::Recip, _) => format!("1.0f / {x}"),
        (Unary::Sin, _) => format!("sin_f32({x}, 0)"),
        (Unary::Cos, _) => format!("sin_f32({x}, 1)"),
        (Unary::Tanh, _) => format!("tanh(clamp({x}, -9.0f, 9.0f))"),
        (Unary::Erf, _) => format!("erf_f32({x})"),
        (Unary::Floor, _) => format!("floor({x})"),
        (Unary::Ceil, _) => format!("ceil({x})"),
        (Unary::Round, _) => format!("round({x})"),
    })
}

fn binary(op: Binary, (a, ty): (String, Type), (b, other): (String, Type)) -> Result<String, String> {
    if ty != other {
        return Err(format!("{op:?} of a {} and a {}", ty.name(), other.name()));
    }
    let logical = |op: &str| format!("{} {op} {}", convert(&a, ty, Bool), convert(&b, ty, Bool));
    Ok(match (op, ty) {
        (Binary::And, _) => logical("&&"),
        (Binary::Or, _) => logical("||"),
        (Binary::Xor, _) => logical("!="),
        (Binary::Eq, _) => format!("{a} == {b}"),
        (Binary::Max, Bool) => logical("||"),
        (Binary::Min, Bool) => logical("&&"),
        (_, Bool | Vec4) => return Err(format!("{op:?} of a {}", ty.name())),
        (Binary::Add, _) => format!("{a} + {b}"),
        (Binary::Sub, _) => format!("{a} - {b}"),
        (Binary::Mul, _) => format!("{a} * {b}"),
        (Binary::Div, F32) => format!("{a} / {b}"),
        (Binary::Div, _) => format!("div_i32({a}, {b})"),
        (Binary::Rem, _) => format!("rem_{}({a}, {b})", ty.name()),
        (Binary::Pow, _) => format!("pow_{}({a}, {b})", ty.name()),
        (Binary::Max, _) => format!("max({a}, {b})"),
        (Binary::Min, _) => format!("min({a}, {b})"),
        (Binary::Lt, _) => format!("{a} < {b}"),
        (Binary::Le, _) => format!("{a} <= {b}"),
    })
}

/// A function that rendered bodies may call: name, parameters, result, statements.
type Helper = (&'static str, &'static [(&'static str, Type)], Type, &'static str);

/// What devices lack, or compute less exactly than their own registers could hold.
static HELPERS: &[Helper] = &[
    // The Maclaurin series up to x^19 below 1 (error 2e-8), Abramowitz and Stegun 7.1.26 above (error 1.5e-7).
    (
        "erf_f32",
        &[("x", F32)],
        F32,
        "let a = abs(x);
        if (a < 1.0f) {
            let s = x * x;
            var p = -1.0f / 6894720.0f;
            p = p * s + 1.0f / 685440.0f;
            p = p * s - 1.0f / 75600.0f;
            p = p * s + 1.0f / 9360.0f;
            p = p * s - 1.0f / 1320.0f;
            p = p * s + 1.0f / 216.0f;
            p = p * s - 1.0f / 42.0f;
            p = p * s + 1.0f / 10.0f;
            p = p * s - 1.0f / 3.0f;
            return 1.1283792f * x * (p * s + 1.0f);
        }
        let t = 1.0f / (1.0f + 0.3275911f * a);
        let p = ((((1.0614054f * t - 1.4531521f) * t + 1.4214138f) * t - 0.28449672f) * t + 0.2548296f) * t;
        let y = 1.0f - p * exp(-(a * a));
        return select(y, -y, x < 0.0f);",
    ),
    // The sine of x + quarter * pi / 2. Cody and Waite's reduction by pi / 2 in three parts: drivers promise little.
    (
        "sin_f32",
        &[("x", F32), ("quarter", I32)],
        F32,
        "let q = round(x * 0.63661975f);
        let r = ((x - q * 1.5703125f) - q * 0.0004837513f) - q * 7.54979e-8f;
        let s = r * r;
        let sine = r + r * s * (-0.16666667f + s * (0.008333334f + s * (-0.0001984127f + s * 2.7557319e-6f)));
        let cosine = 1.0f + s * (-0.5f + s * (0.041666668f + s * (-0.0013888889f + s * 2.4801588e-5f)));
        let n = i32(q) + quarter;
        let y = select(sine, cosine, (n & 1) != 0);
        return select(y, -y, (n & 2) != 0);",
    ),
    (
        "pow_f32",
        &[("x", F32), ("y", F32)],
        F32,
        "let p = pow(abs(x), y);
        if (y == 0.0f) { return 1.0f; }
        if (x >= 0.0f) { return p; }
        if (floor(y) != y) { return sqrt(x); }
        let odd = abs(y) - 2.0f * floor(abs(y) * 0.5f) == 1.0f;
        return select(p, -p, odd);",
    ),
    // The quotient may have been rounded across an integer.
    (
        "rem_f32",
        &[("x", F32), ("y", F32)],
        F32,
        "let n = abs(y);
        let a = abs(x);
        var r = a - n * floor(a / n);
        if (r < 0.0f) { r = r + n; }
        if (r >= n) { r = r - n; }
        return select(r, -r, x < 0.0f);",
    ),
    ("div_i32", &[("x", I32), ("y", I32)], I32, "if (y == 0) { return 0; }\nreturn x / y;"),
    ("rem_i32", &[("x", I32), ("y", I32)], I32, "if (y == 0) { return 0; }\nreturn x % y;"),
    (
        "pow_i32",
        &[("x", I32), ("y", I32)],
        I32,
        "if (y < 0) { return select(0, select(x, 1, (y & 1) == 0), x == 1 || x == -1); }
        var power = 1;
        var square = x;
        for (var e = y; e > 0; e = e / 2) {
            if ((e & 1) != 0) { power = power * square; }
            square = square * square;
        }
        return power;",
    ),
];

/// A module in the clothes of a dialect.
struct Frame<'a> {
    module: &'a Module<'a>,
    dialect: Dialect,
    name: &'static str,
    body: Vec<String>,
    size: u32,
    x: u64,
    groups: u64,
}

impl Frame<'_> {
    /// Helpers that the module's functions call.
    fn helpers(&self) -> impl Iterator<Item = &Helper> {
        let calls = |name: &str| {
            let call = format!("{name}(");
            self.module.functions.iter().flat_map(|f| &f.body).any(|line| line.contains(&call))
        };
        HELPERS.iter().filter(move |(name, ..)| calls(name))
    }

    /// Statements in the dialect: C++ spells inferred types otherwise.
    fn statements(&self, lines: &mut dyn Iterator<Item = &str>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for line in lines {
            let line = match self.dialect {
                Dialect::Wgsl => line.to_owned(),
                Dialect::Cuda => {
                    let mut out = String::new();
                    for word in line.split_inclusive(|c: char| !c.is_alphanumeric() && c != '_') {
                        out += match word {
                            "let " => "const auto ",
                            "var " => "auto ",
                            other => other,
                        };
                    }
                    out
                }
            };
            writeln!(f, "    {line}")?;
        }
        Ok(())
    }

    fn function(
        &self,
        (name, params, result): (&str, &[(&str, Type)], Option<Type>),
        lines: &mut dyn Iterator<Item = &str>,
        f: &mut fmt::Formatter<'_>,
    ) -> fmt::Result {
        let list = |item: &dyn Fn(&(&str, Type)) -> String| params.iter().map(item).collect::<Vec<_>>().join(", ");
        match self.dialect {
            Dialect::Wgsl => {
                let params = list(&|(name, ty)| format!("{name}: {}", ty.name()));
                let result = result.map_or(String::new(), |ty| format!(" -> {}", ty.name()));
                writeln!(f, "fn {name}({params}){result} {{")?;
                self.statements(lines, f)?;
                writeln!(f, "}}")
            }
            Dialect::Cuda => {
                let params = list(&|(name, ty)| format!("{} {name}", ty.name()));
                let result = result.map_or("void", Type::name);
                writeln!(f, "const auto {name} = [&]({params}) -> {result} {{")?;
                self.statements(lines, f)?;
                writeln!(f, "}};")
            }
        }
    }

    fn functions(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for &(name, params, result, body) in self.helpers() {
            self.function((name, params, Some(result)), &mut body.lines().map(str::trim), f)?;
        }
        for function in &self.module.functions {
            let head = (function.name.as_str(), &function.params[..], function.result);
            self.function(head, &mut function.body.iter().map(String::as_str), f)?;
        }
        Ok(())
    }

    fn wgsl(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let module = self.module;
        for (b, (ty, read_only)) in module.bound.iter().zip(&module.bindings.read_only).enumerate() {
            let access = if *read_only { "read" } else { "read_write" };
            writeln!(f, "@group(0) @binding({b}) var<storage, {access}> b{b}: array<{}>;", ty.name())?;
        }
        writeln!(f, "const SIZE: i32 = {};", self.size)?;
        for (name, ty, value) in &module.constants {
            writeln!(f, "const {name}: {} = {value};", ty.name())?;
        }
        for (name, ty, len) in &module.shared {
            writeln!(f, "var<workgroup> {name}: array<{}, {len}>;", ty.name())?;
        }
        for (name, ty) in &module.private {
            writeln!(f, "var<private> {name}: {};", ty.name())?;
        }
        self.functions(f)?;
        writeln!(f, "@compute @workgroup_size({})", self.size)?;
        writeln!(f, "fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) index: u32) {{")?;
        writeln!(f, "    let group = i32(id.x + id.y * {}u);", self.x)?;
        writeln!(f, "    let thread = i32(index);")?;
        self.entry(f)
    }

    fn cuda(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let module = self.module;
        f.write_str(include_str!("../../shaders/prelude.cuh"))?;
        for (name, ty, value) in &module.constants {
            writeln!(f, "constexpr {} {name} = {value};", ty.name())?;
        }
        writeln!(f, "constexpr i32 SIZE = {};", self.size)?;
        let params = module.bound.iter().zip(&module.bindings.read_only).enumerate().map(|(b, (ty, read_only))| {
            format!("{}{}* b{b}", if *read_only { "const " } else { "" }, ty.name())
        });
        let params = params.collect::<Vec<_>>().join(", ");
        writeln!(f, "extern \"C\" __global__ void __launch_bounds__({}) kernel({params}) {{", self.size)?;
        for (name, ty, len) in &module.shared {
            writeln!(f, "    __shared__ {} {name}[{len}];", ty.name())?;
        }
        for (name, ty) in &module.private {
            writeln!(f, "    {} {name};", ty.name())?;
        }
        self.functions(f)?;
        writeln!(f, "    const i32 group = blockIdx.x + blockIdx.y * {}u;", self.x)?;
        writeln!(f, "    const i32 thread = threadIdx.x;")?;
        self.entry(f)
    }

    fn entry(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.groups > self.x {
            writeln!(f, "    if (group >= {}) {{ return; }}", self.groups)?;
        }
        self.statements(&mut self.body.iter().map(String::as_str), f)?;
        writeln!(f, "}}")
    }
}

impl fmt::Display for Frame<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "// {}", self.name)?;
        match self.dialect {
            Dialect::Wgsl => self.wgsl(f),
            Dialect::Cuda => self.cuda(f),
        }
    }
}
