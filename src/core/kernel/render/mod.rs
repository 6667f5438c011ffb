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

use super::algorithm::{Schedule, Text};
use super::schedule::{self, Launch};
use super::space::{Space, beyond, over};
use super::{Kernel, Operand};
use crate::dtype::DType;
use crate::error::{Error, Result, ensure};
use crate::expr::{Body, Code, Instr};
use crate::shape::Access;
use crate::target::{Family, Target};
use frame::Frame;
use locate::{locate, within};
use scalar::Type::{self, BF16, Bool, F16, F32, I8, I16, I32, U32};
use scalar::{arithmetic, constant, convert, literal, small, unary, whole};
use std::collections::{BTreeMap, BTreeSet};

mod attention;
mod bytes;
mod conv;
mod frame;
mod index;
mod locate;
mod map;
mod matmul;
mod order;
mod packed;
mod pool;
mod row;
mod scalar;
mod vector;

/// A row of [`KERNELS`].
pub struct KernelDef {
    /// [`Template::name`](super::Template::name), or a variant of it.
    pub name: &'static str,
    /// One line: what it computes and how.
    pub doc: &'static str,
    /// The algorithm.
    pub text: &'static str,
    /// Fills its holes for a kernel whose schedule was checked.
    fill: fn(&mut Module, &Text) -> Result<(), String>,
}

/// Every kernel text, by the files that fill their holes.
pub static KERNELS: &[&[KernelDef]] = &[
    map::KERNELS,
    row::KERNELS,
    matmul::KERNELS,
    attention::KERNELS,
    conv::KERNELS,
    pool::KERNELS,
    index::KERNELS,
    order::KERNELS,
];

/// The flag of a text in WGSL whose invocations know their place among subgroups.
const SUBGROUPS: &str = "SUBGROUPS";

/// Declares rows, by the function that fills their holes: the text's name, its file in `shaders/`, and one line on it.
macro_rules! kernels {
    ($($fill:expr => { $($name:ident $file:literal: $doc:literal,)* })*) => {
        pub(super) static KERNELS: &[super::KernelDef] = &[$($(super::KernelDef {
            name: stringify!($name),
            doc: $doc,
            text: include_str!(concat!("../../../../shaders/", $file)),
            fill: $fill,
        },)*)*];
    };
}
use kernels;

/// The text that every CUDA kernel holds once, ahead of its constants.
pub const PRELUDE: &str = include_str!("../../../../shaders/prelude.cuh");

/// The language of a rendered kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dialect {
    /// A compute shader with entry point `main`.
    Wgsl,
    /// An `extern "C"` kernel called `kernel`, whose parameters are the bindings in order.
    Cuda,
}

/// The binding of each argument of a launch. Arguments over the same bytes share one.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Bindings {
    /// The binding of each read, then of each write; `None` for one without elements.
    pub of: Vec<Option<usize>>,
    /// Per binding, true if it may be bound for reading only.
    pub read_only: Vec<bool>,
}

impl Bindings {
    /// Every operand with elements has its own binding; what is read is bound for reading only.
    pub fn distinct(kernel: &Kernel) -> Bindings {
        let mut bindings = Bindings { of: Vec::new(), read_only: Vec::new() };
        for slot in 0..kernel.reads.len() + kernel.writes.len() {
            let empty = kernel.reach(slot).shape.contains(&0);
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
    /// Neighbouring workgroups that share their memory.
    pub cluster: u32,
    /// Bytes of workgroup memory that the launch has to ask for.
    pub shared: u32,
}

/// Renders a kernel as its schedule says. A pure function of its arguments.
///
/// # Errors
/// When the kernel's schedule is none for the target, or holds something that the dialect has not: a type, a packed operand, or an
/// operation that the operand's type does not have.
pub fn render(kernel: &Kernel, target: &Target, bindings: &Bindings, dialect: Dialect) -> Result<Source> {
    let render = || -> Result<Source, String> {
        schedule::check(kernel, target)?;
        let Schedule::Text(text) = &kernel.schedule else { return Err(format!("{} is no text", kernel.schedule)) };
        let Launch { threads: size, groups, cluster, .. } = text.launch(kernel, target);
        let mut module = Module::new(kernel, target, bindings, dialect, cluster)?;
        if groups == 0 {
            return Ok(Source { text: String::new(), size, groups: [0; 3], cluster: 1, shared: 0 });
        }
        let name = text.name(&kernel.template, target.family);
        let def = KERNELS.iter().copied().flatten().find(|def| def.name == name).expect("every text has its row");
        (def.fill)(&mut module, text)?;
        // A grid of one dimension stops at the target's limit, and goes on in a second one.
        let y = groups.div_ceil(u64::from(target.max_groups));
        let x = groups.div_ceil(y).next_multiple_of(u64::from(cluster));
        let body = module.expand(def.text);
        let frame = Frame { module: &module, dialect, name, body, size, x, groups };
        let shared = frame.pool();
        Ok(Source { text: frame.to_string(), size, groups: [x as u32, y as u32, 1], cluster, shared })
    };
    render().map_err(|what| Error::Backend {
        backend: if dialect == Dialect::Wgsl { "wgpu" } else { "cuda" },
        what: format!("kernel '{}': {what}", kernel.template.name()),
        file: None,
    })
}

/// A function of the rendered module.
struct Function {
    name: String,
    params: Vec<(&'static str, Type)>,
    result: Option<Type>,
    body: Vec<String>,
}

/// The parts of a rendered kernel, before a dialect frames them.
struct Module<'a> {
    kernel: &'a Kernel,
    target: &'a Target,
    bindings: &'a Bindings,
    dialect: Dialect,
    /// Storage type of each read, then of each write.
    storage: Vec<Type>,
    /// The type in which each of these is computed with.
    value: Vec<Type>,
    /// Type of each binding: that of the first operand it serves.
    bound: Vec<Type>,
    constants: Vec<(String, Type, String)>,
    shared: Vec<(&'static str, Type, usize)>,
    private: Vec<(String, Type)>,
    /// Declarations of CUDA kernels that stand before the functions.
    declarations: Vec<String>,
    functions: Vec<Function>,
    /// Statements before the text. If there are any, they make the text's `group` of the workgroup's number, `launched`.
    preamble: Vec<String>,
    flags: Vec<&'static str>,
    /// Neighbouring workgroups that share their memory.
    cluster: u32,
    /// Workgroups that a multiprocessor shall hold at once.
    at_once: u32,
    /// Per `each` list, per element, what is replaced in the repeated lines beside `$`.
    lists: BTreeMap<&'static str, Vec<Vec<(&'static str, String)>>>,
}

impl<'a> Module<'a> {
    fn new(
        kernel: &'a Kernel,
        target: &'a Target,
        bindings: &'a Bindings,
        dialect: Dialect,
        cluster: u32,
    ) -> Result<Module<'a>, String> {
        let mut storage = Vec::new();
        let mut bound = vec![None; bindings.read_only.len()];
        for (slot, operand) in kernel.reads.iter().chain(&kernel.writes).enumerate() {
            ensure(!operand.packed, || "a packed operand is for the CPU".to_owned())?;
            let stored = target.storage(operand.dtype).map_err(|e| e.to_string())?;
            let ty = Type::stored(stored, target.family)
                .ok_or_else(|| format!("'{}' has no kernels for operands of type {stored}", target.name))?;
            storage.push(ty);
            if let Some(binding) = bindings.of[slot] {
                bound[binding].get_or_insert(if dialect == Dialect::Wgsl { ty.in_words() } else { ty });
            }
        }
        let mut module = Module {
            kernel,
            target,
            bindings,
            dialect,
            value: storage.iter().map(|ty| ty.value()).collect(),
            storage,
            bound: bound.into_iter().map(|ty| ty.unwrap_or(F32)).collect(),
            constants: Vec::new(),
            shared: Vec::new(),
            private: Vec::new(),
            declarations: Vec::new(),
            functions: Vec::new(),
            preamble: Vec::new(),
            flags: Vec::new(),
            cluster,
            at_once: 1,
            lists: BTreeMap::new(),
        };
        module.parts_of_words();
        Ok(module)
    }

    /// Functions that read and write elements of less than 32 bits, of which a word of WGSL holds several. Invocations may write parts of one word
    /// at the same time, so each clears and sets its own bits by atomic operations, and written bindings are atomics.
    fn parts_of_words(&mut self) {
        if self.dialect == Dialect::Cuda {
            return;
        }
        let mut done = BTreeSet::new();
        for (slot, ty) in self.storage.clone().into_iter().enumerate() {
            let Some(b) = self.bindings.of[slot].filter(|_| ty.is_part()) else { continue };
            let (name, bits) = (ty.name(), 8 * ty.size());
            let per_word = 4 / ty.size();
            let word = format!("b{b}[at >> {}u]", per_word.ilog2());
            let shift = format!("u32(at & {}) * {bits}u", per_word - 1);
            let writes = slot >= self.kernel.reads.len();
            if !done.insert((b, name, writes)) {
                continue;
            }
            if writes {
                let mask = (1u32 << bits) - 1;
                let body = vec![
                    format!("let shift = {shift};"),
                    format!("atomicAnd(&{word}, ~({mask}u << shift));"),
                    format!("atomicOr(&{word}, (bits & {mask}u) << shift);"),
                ];
                self.function(&format!("{name}_to_b{b}"), &[("at", I32), ("bits", U32)], None, body);
                continue;
            }
            let word = if self.is_atomic(b) { format!("atomicLoad(&{word})") } else { word };
            let value = match ty {
                F16 => format!("unpack2x16float({word})[at & 1]"),
                BF16 => format!("bitcast<f32>(({word} >> ({shift})) << 16u)"),
                Bool => format!("extractBits({word}, {shift}, 8u) != 0u"),
                I8 | I16 => format!("extractBits(bitcast<i32>({word}), {shift}, {bits}u)"),
                _ => format!("i32(extractBits({word}, {shift}, {bits}u))"),
            };
            self.function(
                &format!("{name}_of_b{b}"),
                &[("at", I32)],
                Some(ty.value()),
                vec![format!("return {value};")],
            );
        }
    }

    /// True if a binding's words are written part by part.
    fn is_atomic(&self, binding: usize) -> bool {
        let mut writes =
            (self.kernel.reads.len()..self.storage.len()).filter(|&slot| self.bindings.of[slot] == Some(binding));
        self.dialect == Dialect::Wgsl && writes.any(|slot| self.storage[slot].is_part())
    }

    fn int(&mut self, name: impl Into<String>, value: isize) {
        self.constants.push((name.into(), I32, literal(value as f64, I32)));
    }

    fn ints(&mut self, constants: &[(&str, usize)]) {
        constants.iter().for_each(|&(name, value)| self.int(name, value as isize));
    }

    fn constant(&mut self, name: impl Into<String>, value: f64, ty: Type) {
        self.constants.push((name.into(), ty, literal(value, ty)));
    }

    /// Declares the start value of a reduction. WGSL has no infinities: there it is the largest finite value.
    fn start(&mut self, name: impl Into<String>, value: f64, ty: Type) {
        let name = name.into();
        match self.dialect {
            Dialect::Cuda if ty.is_float() && value.is_infinite() => {
                self.declarations.push(format!("const {} {name} = {};", ty.name(), constant(value, ty, self.dialect)));
            }
            _ => self.constant(name, value, ty),
        }
    }

    fn function(&mut self, name: &str, params: &[(&'static str, Type)], result: Option<Type>, body: Vec<String>) {
        self.functions.push(Function { name: name.to_owned(), params: params.to_vec(), result, body });
    }

    fn access(&self, slot: usize) -> &'a Access {
        &self.operand(slot).access
    }

    fn operand(&self, slot: usize) -> &'a Operand {
        self.kernel.operand(slot)
    }

    /// The type in which values of a body are held.
    fn register(&self, dtype: DType) -> Type {
        Type::register(dtype, self.target.family)
    }

    /// The value at an address, in the type in which the operand's elements are computed with.
    fn load(&self, slot: usize, address: &str) -> String {
        let ty = self.storage[slot];
        let element = match self.bindings.of[slot] {
            None => return literal(0.0, self.value[slot]),
            Some(b) if self.has_parts(slot) => return format!("{}_of_b{b}({address})", ty.name()),
            Some(b) if self.bound[b] == ty => format!("b{b}[{address}]"),
            Some(b) => format!("bitcast<{}>(b{b}[{address}])", ty.name()),
        };
        convert(&element, ty, self.value[slot])
    }

    /// True if several of the operand's elements are in one word.
    fn has_parts(&self, slot: usize) -> bool {
        self.dialect == Dialect::Wgsl && self.storage[slot].is_part()
    }

    /// The statement that writes a value of a type to an operand's address, in its binding `b`.
    fn write(&self, slot: usize, b: usize, address: &str, value: &str, ty: Type) -> String {
        let (stored, bound) = (self.storage[slot], self.bound[b]);
        if self.has_parts(slot) {
            let value = convert(value, ty, stored.value());
            let bits = match stored {
                F16 | BF16 => format!("{}_bits({value})", stored.name()),
                Bool => format!("select(0u, 1u, {value})"),
                _ => format!("u32({value})"),
            };
            return format!("{}_to_b{b}({address}, {bits});", stored.name());
        }
        let value = convert(value, ty, stored);
        let value = if bound == stored { value } else { format!("bitcast<{}>({value})", bound.name()) };
        format!("b{b}[{address}] = {value};")
    }

    /// A function `name(at)` that loads from an operand by address.
    fn loader(&mut self, name: &str, slot: usize) {
        let value = format!("return {};", self.load(slot, "at"));
        self.function(name, &[("at", I32)], Some(self.value[slot]), vec![value]);
    }

    /// A scalar body at a point of the space. `input` gives the slot, or a value of a type; the results come back with
    /// their types, and with the address of each write.
    fn body(
        &self,
        body: &Body,
        space: &Space,
        input: impl Fn(u32) -> Input,
        writes: &[&Access],
        reductions: &[Type],
    ) -> Result<Scalars, String> {
        let live = body.live();
        let (mut slots, mut asked) = (BTreeSet::new(), BTreeSet::new());
        for (instr, _) in body.code.iter().zip(&live).filter(|(_, live)| **live) {
            match instr.code {
                Code::Input(j) => slots.extend(if let Input::Slot(slot) = input(j) { Some(slot) } else { None }),
                Code::Index(axis) => _ = asked.insert(axis as usize),
                _ => {}
            }
        }
        let accesses: Vec<&Access> = slots.iter().map(|&s| self.access(s)).chain(writes.iter().copied()).collect();
        let mut located = locate(space, &accesses, &asked);
        let stores = located.addresses.split_off(slots.len());
        let loads: BTreeMap<usize, &String> = slots.into_iter().zip(&located.addresses).collect();
        let mut statements = located.statements;
        let mut names: Vec<(String, Type)> = Vec::with_capacity(body.code.len());
        for (i, instr) in body.code.iter().enumerate() {
            let ty = self.register(instr.dtype);
            if !live[i] {
                names.push((String::new(), ty));
                continue;
            }
            let value = match instr.code {
                Code::Const(v) => {
                    names.push((constant(v, ty, self.dialect), ty));
                    continue;
                }
                Code::Index(axis) => convert(&located.coordinates[&(axis as usize)], I32, ty),
                Code::Input(j) => match input(j) {
                    Input::Slot(slot) => convert(&self.load(slot, loads[&slot]), self.value[slot], ty),
                    Input::Value(name, from) => convert(&name, from, ty),
                },
                Code::Reduction(k) => convert(&format!("reduced{k}"), reductions[k as usize], ty),
                code => {
                    // Literals alone would be computed by the shader compiler, which refuses overflow.
                    let literal = |o: &u32| matches!(body.code[*o as usize].code, Code::Const(_));
                    let all = code.operands().all(|o| literal(&o));
                    for o in code.operands().filter(|_| all).collect::<BTreeSet<_>>() {
                        statements.push(format!("let c{i}_{o} = {};", names[o as usize].0));
                    }
                    // Compare stored halves: an element is looked for among them.
                    let compares = matches!(code, Code::Binary(op, ..) if op.compares());
                    let is_rounded = |instr: &Instr| match instr.code {
                        Code::Const(_) | Code::Cast(_) => true,
                        Code::Input(j) => matches!(input(j), Input::Slot(_)),
                        _ => false,
                    };
                    let name = |o: u32| {
                        let ((name, ty), instr) = (&names[o as usize], &body.code[o as usize]);
                        let name = if all { format!("c{i}_{o}") } else { name.clone() };
                        match compares && instr.dtype.is_half() && !is_rounded(instr) {
                            true => (self.rounded(&name, instr.dtype), *ty),
                            false => (name, *ty),
                        }
                    };
                    self.operation(*instr, name)?
                }
            };
            statements.push(format!("let v{i} = {value};"));
            names.push((format!("v{i}"), ty));
        }
        let results = body.results.iter().map(|&r| names[r as usize].clone()).collect();
        Ok(Scalars { statements, results, addresses: stores })
    }

    /// A float rounded to a half.
    fn rounded(&self, value: &str, half: DType) -> String {
        match (self.dialect, half) {
            (Dialect::Cuda, DType::F16) => convert(&convert(value, F32, F16), F16, F32),
            (Dialect::Cuda, _) => convert(&convert(value, F32, BF16), BF16, F32),
            (Dialect::Wgsl, DType::F16) => format!("unpack2x16float(f16_bits({value})).x"),
            (Dialect::Wgsl, _) => format!("bitcast<f32>(bf16_bits({value}) << 16u)"),
        }
    }

    /// An operation on values that have names and types.
    fn operation(&self, Instr { code, dtype }: Instr, name: impl Fn(u32) -> (String, Type)) -> Result<String, String> {
        Ok(match code {
            Code::Unary(op, a) => unary(op, name(a))?,
            Code::Binary(op, a, b) => arithmetic(op, name(a), name(b), self.dialect)?,
            Code::Select(c, a, b) => format!("select({}, {}, {})", name(b).0, name(a).0, name(c).0),
            // A half holds what its bits can.
            Code::Cast(a) if dtype.is_half() => self.rounded(&convert(&name(a).0, name(a).1, F32), dtype),
            Code::Cast(a) if dtype.is_small_int() => small(name(a), dtype, self.target.family),
            // Devices may take what is not a number for 0, and so may their compilers.
            Code::Cast(a) if self.target.family == Family::Wgpu && name(a).1.is_float() && dtype == DType::Bool => {
                format!("(bitcast<u32>({}) & 0x7fffffffu) != 0u", name(a).0)
            }
            Code::Cast(a) if name(a).1.is_float() && dtype.is_int() => whole(name(a), self.register(dtype)),
            Code::Cast(a) => convert(&name(a).0, name(a).1, self.register(dtype)),
            Code::Bits(a) => format!("bitcast<{}>({})", self.register(dtype).name(), name(a).0),
            Code::Const(_) | Code::Input(_) | Code::Index(_) | Code::Reduction(_) => {
                unreachable!("a leaf is no operation")
            }
        })
    }

    /// The element of an operand that the core reads at a point of a space over the operand's axes: statements and an expression.
    fn element(&self, slot: usize, space: &Space) -> Result<(Vec<String>, String), String> {
        let Some((prologue, own)) = self.kernel.prologue(slot) else {
            let (statements, address) = self.address(slot, space);
            return Ok((statements, self.load(slot, &address)));
        };
        let input = |j: u32| Input::Slot(if j == 0 { slot } else { own.start + j as usize - 1 });
        let code = self.body(&prologue.body, space, input, &[], &[])?;
        let (value, ty) = code.results.into_iter().next().ok_or("a prologue without a result")?;
        let consumed = if self.has_parts(slot) { self.value[slot] } else { self.storage[slot] };
        Ok((code.statements, convert(&value, ty, consumed)))
    }

    /// The function `store(<variables>, value)`: the kernel's body and its stores, where `guard` holds and the space is within the kernel's.
    fn store(
        &mut self,
        space: &Space,
        core: Option<Type>,
        guard: Option<&str>,
        reductions: &[Type],
    ) -> Result<(), String> {
        let kernel = self.kernel;
        let reads = kernel.template.core_reads();
        let input = |j: u32| match core {
            Some(ty) if j == 0 => Input::Value("value".into(), ty),
            Some(_) => Input::Slot(reads + j as usize - 1),
            None => Input::Slot(j as usize),
        };
        let writes: Vec<&Access> = kernel.writes.iter().map(|w| &w.access).collect();
        let Scalars { statements: mut body, results, addresses } =
            self.body(&kernel.body, space, input, &writes, reductions)?;
        for (w, ((value, ty), address)) in results.into_iter().zip(addresses).enumerate() {
            let slot = kernel.reads.len() + w;
            let Some(b) = self.bindings.of[slot] else { continue };
            body.push(self.write(slot, b, &address, &value, ty));
        }
        let outside = beyond(space, &kernel.shape);
        if !outside.is_empty() {
            let located = locate(space, &[], &outside.keys().copied().collect());
            let mut checked = located.statements;
            let inside = within(&outside, &located.coordinates, &kernel.shape, &mut checked);
            checked.extend(block(&format!("if ({inside})"), body));
            body = checked;
        }
        if let Some(guard) = guard {
            body = block(&format!("if ({guard})"), body);
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

/// Lines in braces behind a head.
fn block(head: &str, lines: Vec<String>) -> Vec<String> {
    let inner = lines.into_iter().map(|line| format!("    {line}"));
    [format!("{head} {{")].into_iter().chain(inner).chain(["}".into()]).collect()
}

/// A body's code at a point of a space.
struct Scalars {
    statements: Vec<String>,
    /// Expressions and their types.
    results: Vec<(String, Type)>,
    /// Where each write goes.
    addresses: Vec<String>,
}

/// Where the value of an input of a body comes from.
enum Input {
    Slot(usize),
    Value(String, Type),
}
