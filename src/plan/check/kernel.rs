//! Judges a kernel on its own: whether every backend can run it without a step outside of what its operands say.

use crate::dtype::DType;
use crate::elements::{Set, is_injective};
use crate::expr::{Binary, Body, Code, Unary};
use crate::kernel::layout::{self, prologue};
use crate::kernel::{Kernel, Operand, PadMode, Pool, Template, Window, library};
use crate::shape::{Access, Shape};
use crate::target::{Family, Target};

/// Index spaces and windows beyond these sizes are refused, so that nothing computed from them overflows.
const MOST_INDICES: u128 = 1 << 44;
const MOST_EXTENT: usize = i32::MAX as usize;
const MOST_WINDOW: u128 = 1 << 36;

/// What an operand needs of its buffer.
#[derive(Debug)]
pub struct Touch {
    /// The elements it may touch; `None` is none at all.
    pub set: Option<Set>,
    /// Whether it is only read at the index that is written next.
    pub at_index: bool,
}

/// What a kernel needs of its buffers.
#[derive(Debug)]
pub struct Needs {
    /// Per operand read.
    pub reads: Vec<Touch>,
    /// Per operand written.
    pub writes: Vec<Touch>,
}

type Verdict<T = ()> = Result<T, String>;

/// Whether values of `dtype` are stored as `stored`.
pub fn stores(target: &Target, dtype: DType, stored: DType) -> bool {
    target.storage(dtype).is_ok_and(|s| s == stored)
}

/// Whether extents are few enough to count with, empty axes aside.
pub fn is_countable(shape: &Shape) -> bool {
    shape.iter().try_fold(1u128, |n, &d| n.checked_mul(d.max(1) as u128)).is_some_and(|n| n <= MOST_INDICES)
}

/// Checks a kernel.
pub fn check(kernel: &Kernel, target: &Target) -> Verdict<Needs> {
    let Kernel { template, shape, reads, writes, prologues, body, workspace, .. } = kernel;
    let core = template.core_reads();
    ensure(is_countable(shape), || format!("an index space of {shape} is too large"))?;
    ensure(reads.len() >= core, || format!("expected at least {core} operands to read, found {}", reads.len()))?;
    ensure(!writes.is_empty(), || "it writes nothing".into())?;
    prologue::check(kernel)?;
    let further = kernel.further();
    let inner = match template {
        Template::Row { inner, .. } => *inner,
        _ => 0,
    };
    ensure(inner <= shape.len(), || format!("rows of {inner} axes in {shape}"))?;
    let outer = shape.len() - inner;
    let per_row = matches!(template, Template::Row { per_row: true, .. });
    let written: Shape = if per_row { shape[..outer].into() } else { shape.clone() };

    for (i, operand) in reads.iter().enumerate() {
        operand_alone(operand).map_err(|e| format!("operand {i} read: {e}"))?;
        if further.contains(&i) {
            extents(operand, shape).map_err(|e| format!("operand {i} read: {e}"))?;
        }
    }
    for (i, operand) in writes.iter().enumerate() {
        let name = |e| format!("operand {i} written: {e}");
        operand_alone(operand).and_then(|()| extents(operand, &written)).map_err(name)?;
        ensure(!operand.packed, || name("a packed result".into()))?;
        let injective = is_injective(&operand.access);
        ensure(injective, || name(format!("elements share addresses under strides {:?}", operand.access.strides)))?;
    }
    let value = check_template(kernel, !written.contains(&0), target)?;
    // From here on nothing that follows from the extents overflows.
    for (i, _) in reads.iter().enumerate().filter(|(_, operand)| operand.packed) {
        let has = i < core && layout::packed_bytes(kernel, i).is_some();
        ensure(has, || format!("operand {i} read: it has no packed layout"))?;
    }
    check_bodies(kernel, value, target)?;
    for p in prologues {
        let name = || format!("operand {} read: the kernel has no place for a prologue of it", p.operand);
        ensure(prologue::hosts(kernel, p.operand, target), name)?;
    }

    let called = kernel.call.is_none() || kernel.call == library::call(kernel, target);
    ensure(called, || "its library call is not what this version has for it, or the target lacks the library".into())?;
    let in_place = |i: usize| kernel.call.as_ref().is_none_or(|call| call.in_place() == Some(i));
    let needed = layout::workspace(kernel, target);
    ensure(*workspace >= needed, || format!("expected a workspace of {needed} bytes, found {workspace}"))?;
    ensure(body.results.len() == writes.len(), || {
        format!("expected one result per operand written, {}, found {}", writes.len(), body.results.len())
    })?;
    let touch = |i: usize, operand: &Operand, read: bool| -> Verdict<Touch> {
        let mut access = operand.access.clone();
        let mut indexed = Vec::new();
        if let (Template::Gather { strides, extents }, 0, true) = (template, i, read) {
            indexed.extend(extents.iter().copied().zip(strides.iter().copied()));
        }
        if per_row && read {
            // Where rows are empty, what does not move along a row is read all the same.
            for axis in (outer..shape.len()).filter(|&k| operand.access.strides[k] == 0) {
                access.shape[axis] = access.shape[axis].max(1);
            }
        }
        let verb = if read { "read" } else { "written" };
        let set = Set::new(&access, indexed.into_iter()).map_err(|e| format!("operand {i} {verb}: reaches {e}"))?;
        Ok(Touch { set, at_index: further.contains(&i) && !per_row && (!read || in_place(i)) })
    };
    let all = |operands: &[Operand], read| -> Verdict<Vec<Touch>> {
        operands.iter().enumerate().map(|(i, o)| touch(i, o, read)).collect()
    };
    Ok(Needs { reads: all(reads, true)?, writes: all(writes, false)? })
}

fn ensure(holds: bool, what: impl FnOnce() -> String) -> Verdict {
    if holds { Ok(()) } else { Err(what()) }
}

fn operand_alone(operand: &Operand) -> Verdict {
    let Access { shape, strides, .. } = &operand.access;
    ensure(shape.len() == strides.len(), || {
        format!("expected a stride per axis of {shape}, found {} strides", strides.len())
    })?;
    ensure(is_countable(shape), || format!("an index space of {shape} is too large"))
}

fn extents(operand: &Operand, expected: &[usize]) -> Verdict {
    let shape = &operand.access.shape;
    ensure(shape[..] == *expected, || format!("expected extents {}, found {shape}", Shape::new(expected)))
}

/// Checks what the template says of its core operands; the stored type of the core value, if there is one. `writes`: whether
/// there is any index to compute.
fn check_template(kernel: &Kernel, writes: bool, target: &Target) -> Verdict<Option<DType>> {
    let Kernel { template, shape, reads, .. } = kernel;
    let rank = shape.len();
    // Core operands exist: their number was checked.
    let at = |i: usize, expected: &[usize]| extents(&reads[i], expected).map_err(|e| format!("operand {i} read: {e}"));
    let read_rank = |i: usize, expected: usize| {
        let found = &reads[i].access.shape;
        ensure(found.len() == expected, || format!("operand {i} read: expected {expected} axes, found {found}"))
    };
    let floats = |n: usize| {
        let odd = reads[..n].iter().find(|o| !o.dtype.is_float());
        odd.map_or(Ok(()), |o| Err(format!("expected operands of a floating-point type, found {}", o.dtype)))
    };
    let images = || {
        let mut image = reads[0].access.clone();
        if image.shape.len() > 1 {
            image.shape.remove(0);
            image.strides.remove(0);
        }
        let windowed =
            matches!(template, Template::Conv { .. } | Template::ConvTranspose { .. } | Template::Pool { .. });
        let either = target.family == Family::Cuda && windowed;
        let lies = image.is_contiguous() || either && reads[0].access.has_channels_last();
        ensure(lies, || "operand 0 read: each image must be contiguous".into())
    };
    let grouped = |channels: usize, groups: usize| {
        let fits = groups > 0 && channels.is_multiple_of(groups);
        ensure(fits, || format!("expected groups that divide {channels} channels, found {groups}"))
    };
    match template {
        Template::Map | Template::Row { .. } => return Ok(None),
        Template::MatMul => {
            ensure(rank >= 2, || format!("expected at least 2 axes, found {shape}"))?;
            read_rank(0, rank)?;
            let (batch, m, n, k) =
                (&shape[..rank - 2], shape[rank - 2], shape[rank - 1], reads[0].access.shape[rank - 1]);
            ensure(m.max(n).max(k) <= MOST_EXTENT, || format!("a product of {m} by {k} by {n} is too large"))?;
            at(0, &[batch, &[m, k]].concat())?;
            at(1, &[batch, &[k, n]].concat())?;
            floats(2)?;
        }
        Template::Attention { further, .. } => {
            ensure(rank >= 2, || format!("expected at least 2 axes, found {shape}"))?;
            read_rank(0, rank)?;
            read_rank(1, rank)?;
            let (batch, m, e) = (&shape[..rank - 2], shape[rank - 2], shape[rank - 1]);
            let (d, n) = (reads[0].access.shape[rank - 1], reads[1].access.shape[rank - 1]);
            ensure(m.max(n).max(d).max(e) <= MOST_EXTENT, || {
                format!("an attention of {m} by {d} by {n} by {e} is too large")
            })?;
            at(0, &[batch, &[m, d]].concat())?;
            at(1, &[batch, &[d, n]].concat())?;
            at(2, &[batch, &[n, e]].concat())?;
            (3..3 + further).try_for_each(|i| at(i, &[batch, &[m, n]].concat()))?;
            floats(3)?;
        }
        Template::Conv { groups, window } | Template::ConvTranspose { groups, window } => {
            let transposed = matches!(template, Template::ConvTranspose { .. });
            ensure(rank == 5, || format!("expected 5 axes, found {shape}"))?;
            read_rank(0, 5)?;
            read_rank(1, 5)?;
            let data = &reads[0].access.shape;
            let (n, c, o) = (shape[0], data[1], shape[1]);
            grouped(c, *groups)?;
            grouped(o, *groups)?;
            at(0, &[&[n, c], &data[2..]].concat())?;
            let filters = if transposed { [c, o / groups] } else { [o, c / groups] };
            at(1, &[&filters, &window.kernel[..]].concat())?;
            // A transposed window slides over the result.
            check_window(window, if transposed { data } else { shape }, if transposed { shape } else { data })?;
            images()?;
            floats(2)?;
        }
        Template::Pool { window, pool } => {
            ensure(rank == 5, || format!("expected 5 axes, found {shape}"))?;
            read_rank(0, 5)?;
            let data = &reads[0].access.shape;
            at(0, &[&shape[..2], &data[2..]].concat())?;
            check_window(window, shape, data)?;
            if let Pool::MeanPadded { pads_end } = pool {
                let small = pads_end.iter().all(|&p| p <= MOST_EXTENT);
                ensure(small, || format!("padding of {pads_end:?} is too large"))?;
            }
            images()?;
        }
        Template::Gather { strides, extents: axes } => {
            ensure(strides.len() == axes.len(), || {
                format!("expected an extent per indexed axis, {}, found {}", strides.len(), axes.len())
            })?;
            let whole = !writes || axes.iter().all(|&d| d > 0);
            ensure(whole, || format!("an index into an empty axis, of extents {axes:?}"))?;
            let countable = Shape::new(axes.clone());
            ensure(is_countable(&countable), || format!("indexed extents {countable} are too large"))?;
            for (i, operand) in reads.iter().enumerate().take(1 + strides.len()) {
                at(i, shape)?;
                let index = i == 0 || operand.dtype.is_int();
                ensure(index, || format!("operand {i} read: expected integer indices, found {}", operand.dtype))?;
            }
        }
        Template::Pad { before, mode } => {
            read_rank(0, rank)?;
            ensure(before.len() == rank, || {
                format!("expected padding for each of {rank} axes, found {}", before.len())
            })?;
            let data = &reads[0].access.shape;
            let small = before.iter().all(|p| p.unsigned_abs() <= MOST_EXTENT);
            ensure(small, || format!("padding of {before:?} is too large"))?;
            let fills = matches!(mode, PadMode::Constant(_)) || !writes || !data.contains(&0);
            ensure(fills, || format!("nothing of {data} to pad with"))?;
        }
        Template::Resize { scales, offsets, .. } => {
            read_rank(0, rank)?;
            let all = scales.len() == rank && offsets.len() == rank;
            ensure(all, || {
                format!("expected a scale and an offset per axis, {rank}, found {} and {}", scales.len(), offsets.len())
            })?;
            let finite = scales.iter().chain(offsets).all(|v| v.is_finite());
            ensure(finite, || format!("expected finite numbers, found scales {scales:?} and offsets {offsets:?}"))?;
            let data = &reads[0].access.shape;
            ensure(!writes || !data.contains(&0), || format!("nothing of {data} to resize"))?;
            images()?;
        }
    }
    Ok(Some(reads[0].dtype))
}

/// A window at each of `places` on `data` is one that can be counted with.
fn check_window(window: &Window, places: &[usize], data: &[usize]) -> Verdict {
    let Window { kernel, strides, dilations, pads } = window;
    let some = kernel.iter().chain(strides).chain(dilations).all(|&n| n > 0);
    ensure(some, || format!("expected extents, strides and dilations above 0, found {window:?}"))?;
    let mut all = 1u128;
    for k in 0..3 {
        let reach = |extent: usize, step: usize| (extent as u128).saturating_sub(1).saturating_mul(step as u128);
        let sizes = [places[2 + k], data[2 + k], kernel[k], strides[k], dilations[k], pads[k]];
        let reaches = [reach(places[2 + k], strides[k]), reach(kernel[k], dilations[k])];
        let sum = sizes.into_iter().map(|n| n as u128).chain(reaches).fold(0, u128::saturating_add);
        all = all.saturating_mul(sum);
        ensure(sum <= MOST_EXTENT as u128 && all <= MOST_WINDOW, || {
            format!("spatial axis {k}: the window reaches too far: {window:?}")
        })?;
    }
    Ok(())
}

fn check_bodies(kernel: &Kernel, value: Option<DType>, target: &Target) -> Verdict {
    let Kernel { template, shape, reads, writes, prologues, body, .. } = kernel;
    for prologue in prologues {
        let name = |e| format!("prologue of operand {}: {e}", prologue.operand);
        let (_, own) = kernel.prologue(prologue.operand).expect("it is one of the kernel's");
        let operand = &reads[prologue.operand];
        let inputs = std::iter::once(operand).chain(&reads[own]);
        let inputs = inputs.map(|o| Source { dtype: o.dtype, strides: &o.access.strides }).collect();
        let scalar = Shape::default();
        let types = Scope { target, inputs, folds: Vec::new(), shape: &scalar, inner: 0 }
            .check(&prologue.body)
            .map_err(name)?;
        let gives = matches!(types[..], [dtype] if stores(target, dtype, operand.dtype));
        ensure(gives, || name(format!("expected one result of {}, found {types:?}", operand.dtype)))?;
    }
    let mut scope = Scope { target, inputs: Vec::new(), folds: Vec::new(), shape, inner: 0 };
    scope.inputs.extend(value.map(|dtype| Source { dtype, strides: &[] }));
    let further = &reads[kernel.further()];
    scope.inputs.extend(further.iter().map(|o| Source { dtype: o.dtype, strides: &o.access.strides }));
    if let Template::Attention { score, further, .. } = template {
        let mut space = shape.clone();
        let (Some(columns), Some(&n)) = (space.last_mut(), reads[1].access.shape.last()) else {
            return Err("an attention without axes".into());
        };
        *columns = n;
        let mut scope = Scope { target, inputs: Vec::new(), folds: Vec::new(), shape: &space, inner: 0 };
        scope.inputs.extend(value.map(|dtype| Source { dtype, strides: &[] }));
        let operands = &reads[3..3 + further];
        scope.inputs.extend(operands.iter().map(|o| Source { dtype: o.dtype, strides: &o.access.strides }));
        let types = scope.check(score).map_err(|e| format!("score: {e}"))?;
        // Scores of halves may be widened: all is computed in f32.
        let gives = |dtype, value| dtype == DType::F32 || stores(target, dtype, value);
        let gives = matches!((&types[..], value), (&[dtype], Some(value)) if gives(dtype, value));
        ensure(gives, || format!("score: expected one score, found {types:?}"))?;
    }
    if let Template::Row { inner, folds, per_row } = template {
        for (i, fold) in folds.iter().enumerate() {
            let name = |e| format!("fold {i}: {e}");
            let types = scope.check(&fold.body).map_err(name)?;
            let &[dtype] = &types[..] else {
                return Err(name(format!("expected one result, found {}", types.len())));
            };
            scope.folds.push(dtype);
        }
        if *per_row {
            scope.inner = *inner;
        }
    }
    let types = scope.check(body)?;
    for (i, (dtype, operand)) in types.into_iter().zip(writes).enumerate() {
        ensure(stores(target, dtype, operand.dtype), || {
            format!("result {i} is {dtype}, operand {i} written is {}", operand.dtype)
        })?;
    }
    Ok(())
}

/// An input of a body.
struct Source<'a> {
    dtype: DType,
    strides: &'a [isize],
}

/// What a body may name.
struct Scope<'a> {
    target: &'a Target,
    inputs: Vec<Source<'a>>,
    folds: Vec<DType>,
    /// The index space.
    shape: &'a Shape,
    /// How many of its axes are folded away where the body runs.
    inner: usize,
}

impl Scope<'_> {
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
                ensure(stores(self.target, dtype, *stored), || {
                    format!("input {i} is stored as {stored}, read as {dtype}")
                })
            }
            Code::Index(axis) => {
                let axes = self.shape.len() - self.inner;
                ensure((axis as usize) < axes, || format!("an index along axis {axis} of {axes}"))?;
                ensure(dtype.is_int(), || format!("an index of type {dtype}"))
            }
            Code::Fold(i) => {
                let count = self.folds.len();
                result(*self.folds.get(i as usize).ok_or_else(|| format!("fold {i} of {count}"))?)
            }
            Code::Unary(Unary::Not, a) => expect(a, DType::Bool).and(result(DType::Bool)),
            Code::Unary(_, a) => expect(a, dtype),
            Code::Binary(Binary::And | Binary::Or | Binary::Xor, a, b) if !dtype.is_int() => {
                expect(a, DType::Bool).and(expect(b, DType::Bool)).and(result(DType::Bool))
            }
            Code::Binary(op, a, b) if op.compares() => expect(b, of(a)?).and(result(DType::Bool)),
            Code::Binary(_, a, b) => expect(a, dtype).and(expect(b, dtype)),
            Code::Select(c, a, b) => expect(c, DType::Bool).and(expect(a, dtype)).and(expect(b, dtype)),
            Code::Cast(a) => of(a).map(drop),
        }
    }
}
