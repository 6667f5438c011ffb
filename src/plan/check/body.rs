//! Checks the code of a kernel: instructions use earlier ones of the right types, and inputs, indices and reductions that exist.

use crate::dtype::DType;
use crate::error::ensure;
use crate::expr::{Binary, Body, Code, Unary};
use crate::kernel::validate::Verdict;
use crate::kernel::{Kernel, Operand, RowReduction, Template};
use crate::shape::Shape;
use crate::target::Target;

/// True if values of `dtype` are stored as `stored`.
pub fn stores(target: &Target, dtype: DType, stored: DType) -> bool {
    target.storage(dtype).is_ok_and(|s| s == stored)
}

/// True if values of `dtype` may be in memory as `stored`: as the device computes them, or as it holds constants, states and what is kept.
pub fn holds(target: &Target, dtype: DType, stored: DType) -> bool {
    stores(target, dtype, stored) || target.holds(dtype).is_ok_and(|held| held == stored)
}

/// Checks every body of a [well-formed](Kernel::validate) kernel.
pub fn check(kernel: &Kernel, target: &Target) -> Verdict {
    let Kernel { template, shape, reads, writes, body, .. } = kernel;
    check_prologues(kernel, target)?;
    let core = (template.core_reads() > 0).then(|| Source { dtype: kernel.core_dtype(), strides: &[] });
    let mut scope = Scope::new(target, shape, core);
    scope.read(&reads[kernel.further()]);
    match template {
        Template::Row { inner, reductions, per_row } => {
            scope.reduce(reductions)?;
            if *per_row {
                scope.inner = *inner;
            }
        }
        Template::Attention { score, .. } => check_score(kernel, score, target)?,
        _ => {
            ensure(template.bodies().is_empty(), || format!("no rule for the code of template '{}'", template.name()))?
        }
    }
    let types = scope.check(body)?;
    for (i, (dtype, operand)) in types.into_iter().zip(writes).enumerate() {
        ensure(holds(target, dtype, operand.dtype), || {
            format!("result {i} is {dtype}, operand {i} written is {}", operand.dtype)
        })?;
    }
    Ok(())
}

fn check_prologues(kernel: &Kernel, target: &Target) -> Verdict {
    let scalar = Shape::default();
    for prologue in &kernel.prologues {
        let name = |e| format!("prologue of operand {}: {e}", prologue.operand);
        let (_, own) = kernel.prologue(prologue.operand).expect("it is one of the kernel's");
        let operand = &kernel.reads[prologue.operand];
        let mut scope = Scope::new(target, &scalar, None);
        scope.read(std::slice::from_ref(operand));
        scope.read(&kernel.reads[own]);
        let types = scope.check(&prologue.body).map_err(name)?;
        let gives = matches!(types[..], [dtype] if stores(target, dtype, operand.dtype));
        ensure(gives, || name(format!("expected one result of {}, found {types:?}", operand.dtype)))?;
    }
    Ok(())
}

/// Checks an attention's code, which computes a score from a product and further operands, at the indices `[batch.., m, n]`.
fn check_score(kernel: &Kernel, score: &Body, target: &Target) -> Verdict {
    let reads = &kernel.reads;
    let (batch, keys) = (&kernel.shape[..kernel.shape.len() - 1], &reads[1].access.shape);
    let space = Shape::new([batch, &keys[keys.len() - 1..]].concat());
    let Template::Attention { fold, .. } = kernel.template else { return Err("expected an attention".into()) };
    let value = reads[0].dtype;
    let mut scope = Scope::new(target, &space, Some(Source { dtype: value, strides: &[] }));
    if fold.products() == 2 {
        scope.inputs.push(Source { dtype: reads[3].dtype, strides: &[] });
    }
    scope.read(&reads[fold.operands()..kernel.template.core_reads()]);
    let types = scope.check(score).map_err(|e| format!("score: {e}"))?;
    // Scores of 16-bit floats may be f32, because everything is computed in f32.
    let gives = matches!(types[..], [dtype] if dtype == DType::F32 || stores(target, dtype, value));
    ensure(gives, || format!("score: expected one score, found {types:?}"))
}

/// An input of a body.
struct Source<'a> {
    dtype: DType,
    strides: &'a [isize],
}

/// The inputs, indices and reductions that a body may use.
struct Scope<'a> {
    target: &'a Target,
    inputs: Vec<Source<'a>>,
    reductions: Vec<DType>,
    /// The index space.
    shape: &'a Shape,
    /// Number of its last axes that are reduced away when the body runs.
    inner: usize,
}

impl<'a> Scope<'a> {
    fn new(target: &'a Target, shape: &'a Shape, core: Option<Source<'a>>) -> Scope<'a> {
        Scope { target, inputs: core.into_iter().collect(), reductions: Vec::new(), shape, inner: 0 }
    }

    /// Makes the elements of these operands the next inputs.
    fn read(&mut self, operands: &'a [Operand]) {
        self.inputs.extend(operands.iter().map(|o| Source { dtype: o.dtype, strides: &o.access.strides }));
    }

    /// Checks reductions. Each has one result, which later ones and the body may use.
    fn reduce(&mut self, reductions: &[RowReduction]) -> Verdict {
        for (i, reduction) in reductions.iter().enumerate() {
            let name = |e| format!("reduction {i}: {e}");
            let types = self.check(&reduction.body).map_err(name)?;
            let &[dtype] = &types[..] else {
                return Err(name(format!("expected one result, found {}", types.len())));
            };
            self.reductions.push(dtype);
        }
        Ok(())
    }

    /// The types of the results.
    fn check(&self, body: &Body) -> Verdict<Vec<DType>> {
        let mut types: Vec<DType> = Vec::with_capacity(body.code.len());
        for (i, instr) in body.code.iter().enumerate() {
            self.instr(instr.code, instr.dtype, &types).map_err(|e| format!("instruction {i}: {e}"))?;
            types.push(instr.dtype);
        }
        let result = |&r: &u32| types.get(r as usize).copied().ok_or_else(|| format!("a result of instruction {r}"));
        body.results.iter().map(result).collect()
    }

    fn instr(&self, code: Code, dtype: DType, types: &[DType]) -> Verdict {
        let of = |i: u32| types.get(i as usize).copied().ok_or_else(|| format!("operand {i} is not an earlier one"));
        let expect = |i: u32, expected: DType| match of(i)? {
            found if found == expected => Ok(()),
            found => Err(format!("operand {i}: expected {expected}, found {found}")),
        };
        let result = |expected: DType| {
            ensure(dtype == expected, || format!("expected a result of type {expected}, found {dtype}"))
        };
        match code {
            Code::Const(_) => Ok(()),
            Code::Input(i) => {
                let count = self.inputs.len();
                let Source { dtype: stored, strides } =
                    self.inputs.get(i as usize).ok_or_else(|| format!("input {i} of {count}"))?;
                let mut row = strides.iter().zip(&self.shape[..]).skip(self.shape.len() - self.inner);
                let fixed = row.all(|(&stride, &extent)| stride == 0 || extent == 1);
                ensure(fixed, || format!("input {i} moves along the row in code that runs once per row"))?;
                ensure(holds(self.target, dtype, *stored), || {
                    format!("input {i} is stored as {stored}, read as {dtype}")
                })
            }
            Code::Index(axis) => {
                let axes = self.shape.len() - self.inner;
                ensure((axis as usize) < axes, || format!("an index along axis {axis} of {axes}"))?;
                ensure(dtype.is_int(), || format!("an index of type {dtype}"))
            }
            Code::Reduction(i) => {
                let count = self.reductions.len();
                result(*self.reductions.get(i as usize).ok_or_else(|| format!("reduction {i} of {count}"))?)
            }
            Code::Unary(Unary::Not, a) => expect(a, DType::Bool).and(result(DType::Bool)),
            Code::Unary(_, a) => expect(a, dtype),
            Code::Binary(Binary::And | Binary::Or | Binary::Xor, a, b) if !dtype.is_int() => {
                expect(a, DType::Bool).and(expect(b, DType::Bool)).and(result(DType::Bool))
            }
            Code::Binary(Binary::Shl | Binary::Shr, a, b) => {
                expect(a, DType::I32).and(expect(b, DType::I32)).and(result(DType::I32))
            }
            Code::Binary(op, a, b) if op.compares() => expect(b, of(a)?).and(result(DType::Bool)),
            Code::Binary(_, a, b) => expect(a, dtype).and(expect(b, dtype)),
            Code::Select(c, a, b) => expect(c, DType::Bool).and(expect(a, dtype)).and(expect(b, dtype)),
            Code::Cast(a) => of(a).map(drop),
            Code::Bits(a) => {
                let pairs = [(DType::F32, DType::I32), (DType::F64, DType::I64)];
                let found = of(a)?;
                let is_pair = pairs.contains(&(found, dtype)) || pairs.contains(&(dtype, found));
                ensure(is_pair, || format!("the bits of {found} as {dtype}"))
            }
        }
    }
}
