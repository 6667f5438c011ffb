//! The template table. All that is known of a template, for every backend, is one static [`TemplateDef`] row.
//!
//! A row is the twin of an operator's [`OpDef`](crate::op::OpDef). [`Template::def`] finds it by an exhaustive match, so a new
//! variant does not compile without its row.

use super::meaning::{self, Elements, Row, mismatch, stays};
use super::validate::{MOST_EXTENT, Verdict, ensure, is_countable};
use super::{Guard, Kernel, Nearest, Operand, PadMode, Pool, Reduction, ResizeMode, RowReduction, Template, Window};
use crate::dtype::DType;
use crate::expr::{Body, Expr};
use crate::shape::{Access, Shape};
use crate::target::Family;
use serde::Serialize;

/// A row of [`TEMPLATES`]. Its functions panic on a kernel of another template.
pub struct TemplateDef {
    /// The name in plans, listings and file names of shaders.
    pub name: &'static str,
    /// One line that says what it computes.
    pub doc: &'static str,
    /// The kind of work, by which pictures colour kernels.
    pub kind: Kind,
    /// How many leading operands the core consumes.
    pub core_reads: fn(&Template) -> usize,
    /// The axes that are computed together.
    pub rows: fn(&Template) -> Rows,
    /// The template's own code, beside the kernel's body and prologues.
    pub bodies: fn(&Template) -> Vec<&Body>,
    /// Checks the core operands and the parameters. Operands are enough, and have countable extents with a stride per axis.
    pub check: fn(&Kernel, Family) -> Verdict,
    /// How a core operand lies along an axis of the index space that is not one of a row's.
    pub axis_of: fn(&Kernel, usize, usize) -> Along,
    /// Axes, by extent and stride, along which data chooses the elements of a core operand, beside its access.
    pub reach: fn(&Template, usize) -> Vec<(usize, isize)>,
    /// The values that the core computes for a row, in `f64`.
    pub meaning: fn(&Kernel, &[usize], &mut Elements) -> Row,
    /// Small well-formed kernels that exercise the parameters.
    pub samples: fn() -> Vec<Kernel>,
}

/// Kinds of work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// Matrix products and attention.
    Product,
    /// Convolutions.
    Convolution,
    /// Pooling and interpolation.
    Window,
    /// Reductions and normalisations.
    Row,
    /// Elementwise code.
    Elementwise,
    /// Gathering and padding.
    Movement,
}

/// The trailing axes of an index space that a kernel computes together. No part of a row is a kernel of its own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rows {
    /// How many axes form a row.
    pub axes: usize,
    /// Each operand written has one element per row, and the body runs once per row.
    pub written_once: bool,
}

/// How an operand lies along an axis of its kernel's index space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Along {
    /// Indices from the axis read the same range of this axis of the operand.
    Axis(usize),
    /// Every index reads from the whole operand.
    Whole,
    /// Indices share elements in a way that parts of the operand cannot serve.
    Tied,
}

/// Every row.
pub static TEMPLATES: &[&TemplateDef] =
    &[&MAP, &ROW, &MATMUL, &ATTENTION, &CONV, &CONV_TRANSPOSE, &POOL, &GATHER, &PAD, &RESIZE];

impl Template {
    /// The template's row.
    pub fn def(&self) -> &'static TemplateDef {
        match self {
            Template::Map => &MAP,
            Template::Row { .. } => &ROW,
            Template::MatMul => &MATMUL,
            Template::Attention { .. } => &ATTENTION,
            Template::Conv { .. } => &CONV,
            Template::ConvTranspose { .. } => &CONV_TRANSPOSE,
            Template::Pool { .. } => &POOL,
            Template::Gather { .. } => &GATHER,
            Template::Pad { .. } => &PAD,
            Template::Resize { .. } => &RESIZE,
        }
    }

    /// [`TemplateDef::name`].
    pub fn name(&self) -> &'static str {
        self.def().name
    }

    /// How many leading operands the core consumes.
    pub fn core_reads(&self) -> usize {
        (self.def().core_reads)(self)
    }

    /// The axes that are computed together.
    pub fn rows(&self) -> Rows {
        (self.def().rows)(self)
    }

    /// The template's own code.
    pub fn bodies(&self) -> Vec<&Body> {
        (self.def().bodies)(self)
    }
}

impl Kernel {
    /// Every element that the kernel may touch through an argument, as an access: that of the operand, with further axes where data
    /// chooses the element. The arguments are the reads, then the writes.
    pub fn reach(&self, slot: usize) -> Access {
        let mut access = self.operand(slot).access.clone();
        if slot < self.template.core_reads() {
            for (extent, stride) in (self.template.def().reach)(&self.template, slot) {
                access.shape.push(extent);
                access.strides.push(stride);
            }
        }
        access
    }

    /// How an argument, one of the reads or then of the writes, lies along an axis of the index space.
    pub fn axis_of(&self, slot: usize, axis: usize) -> Along {
        if axis + self.template.rows().axes >= self.shape.len() {
            return Along::Tied;
        }
        if slot >= self.reads.len() || self.further().contains(&slot) {
            return Along::Axis(axis);
        }
        // The operands of a core operand's prologue move with that operand.
        let owner = |p: &&super::Prologue| self.prologue(p.operand).is_some_and(|(_, own)| own.contains(&slot));
        let core = if slot < self.template.core_reads() {
            Some(slot)
        } else {
            self.prologues.iter().find(owner).map(|p| p.operand)
        };
        core.map_or(Along::Tied, |operand| (self.template.def().axis_of)(self, operand, axis))
    }
}

const ALONE: fn(&Template) -> Rows = |_| Rows { axes: 0, written_once: false };
const NO_BODIES: fn(&Template) -> Vec<&Body> = |_| Vec::new();
const AS_ACCESSED: fn(&Template, usize) -> Vec<(usize, isize)> = |_, _| Vec::new();

static MAP: TemplateDef = TemplateDef {
    name: "map",
    doc: "the body at each index",
    kind: Kind::Elementwise,
    core_reads: |_| 0,
    rows: ALONE,
    bodies: NO_BODIES,
    check: |_, _| Ok(()),
    axis_of: |_, operand, _| no_core(operand),
    reach: AS_ACCESSED,
    meaning: |_, _, _| Row::default(),
    samples: || {
        let x = |n| Expr::input(n, DType::F32);
        vec![sample(Template::Map, &[2, 3], vec![floats(&[2, 3]); 2], x(0) * x(1))]
    },
};

static ROW: TemplateDef = TemplateDef {
    name: "row",
    doc: "reductions of each row, then the body at each element or once per row",
    kind: Kind::Row,
    core_reads: |_| 0,
    rows: |t| {
        let &Template::Row { inner, per_row, .. } = t else { mismatch(t) };
        Rows { axes: inner, written_once: per_row }
    },
    bodies: |t| {
        let Template::Row { reductions, .. } = t else { mismatch(t) };
        reductions.iter().map(|reduction| &reduction.body).collect()
    },
    check: |_, _| Ok(()),
    axis_of: |_, operand, _| no_core(operand),
    reach: AS_ACCESSED,
    meaning: meaning::row,
    samples: || {
        let x = Expr::input(0, DType::F32);
        let reduce = |reduction, body: &Expr| RowReduction { reduction, body: Body::new(std::slice::from_ref(body)) };
        let (largest, total) = (Expr::reduction(0, DType::F32), Expr::reduction(1, DType::F32));
        let power = (&x - &largest).exp();
        let reductions = vec![reduce(Reduction::Max, &x), reduce(Reduction::Sum, &power)];
        let softmax = Template::Row { inner: 1, reductions, per_row: false };
        let extremes = vec![reduce(Reduction::Min, &x), reduce(Reduction::Prod, &x)];
        let both = Template::Row { inner: 2, reductions: extremes, per_row: true };
        vec![
            sample(softmax, &[2, 5], vec![floats(&[2, 5])], power / &total),
            sample(both, &[2, 3, 2], vec![floats(&[2, 3, 2])], largest + total),
        ]
    },
};

/// The column of templates without core operands.
fn no_core(operand: usize) -> ! {
    panic!("operand {operand} is given to a template without core operands")
}

static MATMUL: TemplateDef = TemplateDef {
    name: "matmul",
    doc: "batched matrix product",
    kind: Kind::Product,
    core_reads: |_| 2,
    rows: ALONE,
    bodies: NO_BODIES,
    check: |kernel, _| {
        let shape = &kernel.shape;
        let (batch, m, n) = matrix(shape)?;
        kernel.reads_axes(0, shape.len())?;
        let k = kernel.reads[0].access.shape[batch.len() + 1];
        ensure(m.max(n).max(k) <= MOST_EXTENT, || format!("a product of {m} by {k} by {n} is too large"))?;
        kernel.reads_extents(0, &[batch, &[m, k]].concat())?;
        kernel.reads_extents(1, &[batch, &[k, n]].concat())?;
        kernel.reads_floats(2)
    },
    axis_of: |kernel, operand, axis| {
        let summed = if operand == 0 { kernel.shape.len() - 1 } else { kernel.shape.len() - 2 };
        if axis == summed { Along::Whole } else { Along::Axis(axis) }
    },
    reach: AS_ACCESSED,
    meaning: meaning::matmul,
    samples: || {
        let x = Expr::input(0, DType::F32);
        vec![sample(Template::MatMul, &[2, 3, 4], vec![floats(&[2, 3, 5]), floats(&[2, 5, 4])], x)]
    },
};

/// A shape as batch axes, rows and columns.
fn matrix(shape: &Shape) -> Verdict<(&[usize], usize, usize)> {
    match &shape[..] {
        [batch @ .., m, n] => Ok((batch, *m, *n)),
        _ => Err(format!("expected at least 2 axes, found {shape}")),
    }
}

static ATTENTION: TemplateDef = TemplateDef {
    name: "attention",
    doc: "softmax of the scores of queries and keys, times values; scores are never stored",
    kind: Kind::Product,
    core_reads: |t| {
        let Template::Attention { further, .. } = t else { mismatch(t) };
        3usize.saturating_add(*further)
    },
    rows: |_| Rows { axes: 1, written_once: false },
    bodies: |t| {
        let Template::Attention { score, .. } = t else { mismatch(t) };
        vec![score]
    },
    check: |kernel, _| {
        let shape = &kernel.shape;
        let (batch, m, e) = matrix(shape)?;
        kernel.reads_axes(0, shape.len())?;
        kernel.reads_axes(1, shape.len())?;
        let last = |operand: usize| kernel.reads[operand].access.shape[batch.len() + 1];
        let (d, n) = (last(0), last(1));
        ensure(m.max(n).max(d).max(e) <= MOST_EXTENT, || {
            format!("an attention of {m} by {d} by {n} by {e} is too large")
        })?;
        kernel.reads_extents(0, &[batch, &[m, d]].concat())?;
        kernel.reads_extents(1, &[batch, &[d, n]].concat())?;
        kernel.reads_extents(2, &[batch, &[n, e]].concat())?;
        let scores = [batch, &[m, n]].concat();
        (3..kernel.template.core_reads()).try_for_each(|i| kernel.reads_extents(i, &scores))?;
        kernel.reads_floats(3)
    },
    axis_of: |kernel, operand, axis| {
        let shared = matches!(operand, 1 | 2) && axis == kernel.shape.len() - 2;
        if shared { Along::Whole } else { Along::Axis(axis) }
    },
    reach: AS_ACCESSED,
    meaning: meaning::attention,
    samples: || {
        let x = |n| Expr::input(n, DType::F32);
        let reads = || vec![floats(&[2, 3, 4]), floats(&[2, 4, 5]), floats(&[2, 5, 6])];
        let plain = Template::Attention { score: Body::new(&[x(0) * 0.5]), further: 0, guarded: None };
        let masked = Template::Attention { score: Body::new(&[x(0) + x(1)]), further: 1, guarded: Some(Guard::All) };
        let mut with_mask = reads();
        with_mask.push(floats(&[2, 3, 5]));
        vec![sample(plain, &[2, 3, 6], reads(), x(0)), sample(masked, &[2, 3, 6], with_mask, x(0))]
    },
};

static CONV: TemplateDef = TemplateDef {
    name: "conv",
    doc: "convolution",
    kind: Kind::Convolution,
    core_reads: |_| 2,
    rows: ALONE,
    bodies: NO_BODIES,
    check: |kernel, family| {
        let Template::Conv { groups, window } = &kernel.template else { mismatch(&kernel.template) };
        let (c, o) = channels(kernel, *groups)?;
        kernel.reads_extents(1, &[&[o, c / groups], &window.kernel[..]].concat())?;
        window.validate(&kernel.shape, &kernel.reads[0].access.shape)?;
        kernel.reads_images(family == Family::Cuda)?;
        kernel.reads_floats(2)
    },
    axis_of: |kernel, operand, axis| {
        let &Template::Conv { groups, .. } = &kernel.template else { mismatch(&kernel.template) };
        match (operand, axis) {
            (0, 0) => Along::Axis(0),
            (1, 0) => Along::Whole,
            (0, 1) if groups == 1 => Along::Whole,
            (1, 1) if groups == 1 => Along::Axis(0),
            _ => Along::Tied,
        }
    },
    reach: AS_ACCESSED,
    meaning: meaning::conv,
    samples: || {
        let window = Window { kernel: [1, 2, 3], strides: [1, 2, 1], dilations: [1, 1, 2], pads: [0, 1, 0] };
        let reads = |groups| vec![floats(&[2, 4, 1, 5, 6]), floats(&[6, 4 / groups, 1, 2, 3])];
        let conv = |groups| {
            let template = Template::Conv { groups, window: window.clone() };
            sample(template, &[2, 6, 1, 3, 2], reads(groups), Expr::input(0, DType::F32))
        };
        vec![conv(1), conv(2)]
    },
};

/// The channels read and written by a convolution whose data has five axes.
fn channels(kernel: &Kernel, groups: usize) -> Verdict<(usize, usize)> {
    let shape = &kernel.shape;
    ensure(shape.len() == 5, || format!("expected 5 axes, found {shape}"))?;
    kernel.reads_axes(0, 5)?;
    kernel.reads_axes(1, 5)?;
    let data = &kernel.reads[0].access.shape;
    for channels in [data[1], shape[1]] {
        let fits = groups > 0 && channels.is_multiple_of(groups);
        ensure(fits, || format!("expected groups that divide {channels} channels, found {groups}"))?;
    }
    kernel.reads_extents(0, &[&[shape[0]], &data[1..]].concat())?;
    Ok((data[1], shape[1]))
}

static CONV_TRANSPOSE: TemplateDef = TemplateDef {
    name: "conv_transpose",
    doc: "transposed convolution, the gradient of a convolution by its input",
    kind: Kind::Convolution,
    core_reads: |_| 2,
    rows: ALONE,
    bodies: NO_BODIES,
    check: |kernel, family| {
        let Template::ConvTranspose { groups, window } = &kernel.template else { mismatch(&kernel.template) };
        let (c, o) = channels(kernel, *groups)?;
        kernel.reads_extents(1, &[&[c, o / groups], &window.kernel[..]].concat())?;
        // The window slides over the result.
        window.validate(&kernel.reads[0].access.shape, &kernel.shape)?;
        kernel.reads_images(family == Family::Cuda)?;
        kernel.reads_floats(2)
    },
    axis_of: |kernel, operand, axis| {
        let &Template::ConvTranspose { groups, .. } = &kernel.template else { mismatch(&kernel.template) };
        match (operand, axis) {
            (0, 0) => Along::Axis(0),
            (1, 0) => Along::Whole,
            (0, 1) if groups == 1 => Along::Whole,
            (1, 1) if groups == 1 => Along::Axis(1),
            _ => Along::Tied,
        }
    },
    reach: AS_ACCESSED,
    meaning: meaning::conv_transpose,
    samples: || {
        let window = Window { kernel: [1, 2, 3], strides: [1, 2, 1], dilations: [1, 1, 2], pads: [0, 1, 0] };
        let reads = |groups| vec![floats(&[2, 4, 1, 3, 2]), floats(&[4, 6 / groups, 1, 2, 3])];
        let conv = |groups| {
            let template = Template::ConvTranspose { groups, window: window.clone() };
            sample(template, &[2, 6, 1, 5, 6], reads(groups), Expr::input(0, DType::F32))
        };
        vec![conv(1), conv(2)]
    },
};

static POOL: TemplateDef = TemplateDef {
    name: "pool",
    doc: "maximum or mean of a window",
    kind: Kind::Window,
    core_reads: |_| 1,
    rows: ALONE,
    bodies: NO_BODIES,
    check: |kernel, family| {
        let Template::Pool { window, pool } = &kernel.template else { mismatch(&kernel.template) };
        let shape = &kernel.shape;
        ensure(shape.len() == 5, || format!("expected 5 axes, found {shape}"))?;
        kernel.reads_axes(0, 5)?;
        let data = &kernel.reads[0].access.shape;
        kernel.reads_extents(0, &[&shape[..2], &data[2..]].concat())?;
        window.validate(shape, data)?;
        match pool {
            Pool::Max | Pool::Mean => {}
            Pool::MeanPadded { pads_end } => {
                let small = pads_end.iter().all(|&p| p <= MOST_EXTENT);
                ensure(small, || format!("padding of {pads_end:?} is too large"))?;
            }
        }
        kernel.reads_images(family == Family::Cuda)
    },
    axis_of: |_, _, axis| if axis < 2 { Along::Axis(axis) } else { Along::Tied },
    reach: AS_ACCESSED,
    meaning: meaning::pool,
    samples: || {
        let window = Window { kernel: [1, 2, 2], strides: [1, 2, 1], dilations: [1; 3], pads: [0, 1, 1] };
        let pools = [Pool::Max, Pool::Mean, Pool::MeanPadded { pads_end: [0, 1, 0] }];
        let pool = |pool| {
            let template = Template::Pool { window: window.clone(), pool };
            sample(template, &[1, 2, 1, 3, 4], vec![floats(&[1, 2, 1, 4, 4])], Expr::input(0, DType::F32))
        };
        pools.map(pool).into()
    },
};

static GATHER: TemplateDef = TemplateDef {
    name: "gather",
    doc: "elements that indices choose",
    kind: Kind::Movement,
    core_reads: |t| {
        let Template::Gather { strides, .. } = t else { mismatch(t) };
        1 + strides.len()
    },
    rows: ALONE,
    bodies: NO_BODIES,
    check: |kernel, _| {
        let Template::Gather { strides, extents } = &kernel.template else { mismatch(&kernel.template) };
        ensure(strides.len() == extents.len(), || {
            format!("expected an extent per indexed axis, {}, found {}", strides.len(), extents.len())
        })?;
        let whole = kernel.is_empty() || extents.iter().all(|&d| d > 0);
        ensure(whole, || format!("an index into an empty axis, of extents {extents:?}"))?;
        let countable = Shape::new(extents.clone());
        ensure(is_countable(&countable), || format!("indexed extents {countable} are too large"))?;
        for (i, operand) in kernel.reads.iter().enumerate().take(1 + strides.len()) {
            kernel.reads_extents(i, &kernel.shape)?;
            let index = i == 0 || operand.dtype.is_int();
            ensure(index, || format!("operand {i} read: expected integer indices, found {}", operand.dtype))?;
        }
        Ok(())
    },
    axis_of: |_, _, axis| Along::Axis(axis),
    reach: |t, operand| {
        let Template::Gather { strides, extents } = t else { mismatch(t) };
        if operand == 0 { extents.iter().copied().zip(strides.iter().copied()).collect() } else { Vec::new() }
    },
    meaning: meaning::gather,
    samples: || {
        // Rows and columns of [3, 4, 2], from their ends where the strides are negative.
        let base = Access { shape: [5, 2].into(), strides: vec![0, 1], offset: 16 };
        let data = Operand { dtype: DType::F32, access: base, packed: false };
        let index = Operand { access: Access::contiguous([5, 2].into()), dtype: DType::I64, packed: false };
        let template = Template::Gather { strides: vec![-8, 2], extents: vec![3, 4] };
        vec![sample(template, &[5, 2], vec![data, index.clone(), index], Expr::input(0, DType::F32))]
    },
};

static PAD: TemplateDef = TemplateDef {
    name: "pad",
    doc: "data with something around it",
    kind: Kind::Movement,
    core_reads: |_| 1,
    rows: ALONE,
    bodies: NO_BODIES,
    check: |kernel, _| {
        let Template::Pad { before, mode } = &kernel.template else { mismatch(&kernel.template) };
        let rank = kernel.shape.len();
        kernel.reads_axes(0, rank)?;
        ensure(before.len() == rank, || format!("expected padding for each of {rank} axes, found {}", before.len()))?;
        let data = &kernel.reads[0].access.shape;
        let small = before.iter().all(|p| p.unsigned_abs() <= MOST_EXTENT);
        ensure(small, || format!("padding of {before:?} is too large"))?;
        let fills = match mode {
            PadMode::Constant(_) => true,
            PadMode::Edge | PadMode::Reflect | PadMode::Wrap => kernel.is_empty() || !data.contains(&0),
        };
        ensure(fills, || format!("nothing of {data} to pad with"))
    },
    axis_of: |kernel, operand, axis| {
        let Template::Pad { before, .. } = &kernel.template else { mismatch(&kernel.template) };
        let same = before[axis] == 0 && kernel.reads[operand].access.shape[axis] == kernel.shape[axis];
        if axis < 2 && same { Along::Axis(axis) } else { Along::Tied }
    },
    reach: AS_ACCESSED,
    meaning: meaning::pad,
    samples: || {
        let modes = [PadMode::Constant(-1.5), PadMode::Edge, PadMode::Reflect, PadMode::Wrap];
        let pad = |mode| {
            let template = Template::Pad { before: vec![1, 0, -1], mode };
            sample(template, &[5, 2, 4], vec![floats(&[3, 2, 4])], Expr::input(0, DType::F32))
        };
        modes.map(pad).into()
    },
};

static RESIZE: TemplateDef = TemplateDef {
    name: "resize",
    doc: "interpolation between neighbours",
    kind: Kind::Window,
    core_reads: |_| 1,
    rows: ALONE,
    bodies: NO_BODIES,
    check: |kernel, _| {
        let Template::Resize { scales, offsets, .. } = &kernel.template else { mismatch(&kernel.template) };
        let rank = kernel.shape.len();
        kernel.reads_axes(0, rank)?;
        let all = scales.len() == rank && offsets.len() == rank;
        ensure(all, || {
            format!("expected a scale and an offset per axis, {rank}, found {} and {}", scales.len(), offsets.len())
        })?;
        let finite = scales.iter().chain(offsets).all(|v| v.is_finite());
        ensure(finite, || format!("expected finite numbers, found scales {scales:?} and offsets {offsets:?}"))?;
        let data = &kernel.reads[0].access.shape;
        ensure(kernel.is_empty() || !data.contains(&0), || format!("nothing of {data} to resize"))?;
        kernel.reads_images(false)
    },
    axis_of: |kernel, _, axis| if axis < 2 && stays(kernel, axis) { Along::Axis(axis) } else { Along::Tied },
    reach: AS_ACCESSED,
    meaning: meaning::resize,
    samples: || {
        let cubic = ResizeMode::Cubic { a: -0.75, exclude_outside: true };
        let modes = [ResizeMode::Nearest(Nearest::RoundPreferFloor), ResizeMode::Linear, cubic];
        let resize = |mode| {
            let template = Template::Resize { scales: vec![1.0, 0.5, 1.5], offsets: vec![0.0, -0.25, 0.25], mode };
            sample(template, &[2, 6, 2], vec![floats(&[2, 3, 3])], Expr::input(0, DType::F32))
        };
        modes.map(resize).into()
    },
};

/// An operand of `f32` in row-major order.
fn floats(shape: &[usize]) -> Operand {
    Operand { dtype: DType::F32, access: Access::contiguous(Shape::new(shape)), packed: false }
}

/// A kernel that writes one result in row-major order.
fn sample(template: Template, shape: &[usize], reads: Vec<Operand>, body: Expr) -> Kernel {
    let mut kernel = Kernel {
        template,
        shape: Shape::new(shape),
        reads,
        writes: Vec::new(),
        prologues: Vec::new(),
        body: Body::new(&[body]),
        workspace: 0,
        schedule: super::algorithm::Schedule::Open,
    };
    kernel.writes.push(floats(kernel.written()));
    kernel
}
