//! The template table. All that is known of a template, for every backend, is one static [`TemplateDef`] row, in the file that also has
//! the template's meaning and its samples.
//!
//! A row is the twin of an operator's [`OpDef`](crate::op::OpDef). [`Template::def`] finds it by an exhaustive match, so a new
//! variant does not compile without its row.

use super::algorithm::Schedule;
use super::meaning::{Elements, Order, Row, To, dot, indices, mismatch, single};
use super::validate::{MOST_EXTENT, Verdict, is_countable};
use super::{Kernel, Operand};
use crate::dtype::DType;
use crate::error::ensure;
use crate::expr::{Body, Expr, maximum, minimum};
use crate::shape::{Access, Shape};
use crate::target::Family;
use serde::{Deserialize, Serialize};

mod attention;
mod collective;
mod gather;
mod map;
mod matmul;
mod packed;
mod pad;
mod repeat;
mod resize;
mod row;
mod scan;
mod scatter;
mod sort;
mod window;

pub use attention::{Band, Fold, Guard, band, scaled};
pub use collective::{Collective, Exchange};
pub use matmul::MOST_TERMS;
pub use packed::{Packing, ZeroPoints};
pub use pad::PadMode;
pub use repeat::{ArgBytes, Inner, Repeat, UNROLLED};
pub use resize::{Nearest, ResizeMode};
pub use row::{Reduction, RowReduction};
pub use sort::ascending;
pub use window::{MOST_HELD, MOST_TAPS, Pool, Window, adds_directly, unfolds};

/// The computation of a kernel at each index of its index space.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Template {
    /// `body` alone. All operands have the kernel's shape.
    Map,
    /// Rows are the last `inner` axes of the index space, all operands read have its shape. Per row the reductions run in order,
    /// then `body`: at each element, or once per row when `per_row` (writes then have the outer axes' shape).
    Row {
        /// The number of trailing axes that form a row.
        inner: usize,
        /// Reductions over the row, in order.
        #[serde(rename = "folds")]
        reductions: Vec<RowReduction>,
        /// True if `body` runs once per row.
        per_row: bool,
    },
    /// Batched matrix product: reads\[0\] is `[batch.., m, k]`, reads\[1\] `[batch.., k, n]`, shape `[batch.., m, n]`.
    /// Sums are in `f32`, of `f64` operands in `f64`. On the CPU one operand may be `u8` and the other one `i8`: sums are then in `i32`, and
    /// exact.
    MatMul,
    /// Product by numbers of few bits: reads\[0\] is `[batch.., m, k]`, shape `[batch.., m, n]`. reads\[1\] are words of 32 bits with `n`
    /// rows of `k` numbers, filled up to whole blocks and then to whole words, the first number of a word in its lowest bits. reads\[2\] are scales
    /// `[n, blocks]`, and reads\[3\] zero points, if they are no number: a number `q` stands for `(q - zero) * scale` of its block, or for
    /// `codes[q] * scale` if reads\[3\] are codes. Sums are in `f32`.
    MatMulBits {
        /// Bits of a number, 2 to 8.
        bits: usize,
        /// True if they have a sign, in their highest bit.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        signed: bool,
        /// Numbers of a row that share a scale and a zero point.
        block: usize,
        /// The zero points.
        zeros: ZeroPoints,
    },
    /// Attention, whose scores are never stored: reads\[2\] `[batch.., n, e]` under the softmax over `n` of scores, shape
    /// `[batch.., m, e]`. A score is the one result of `score`, of whose inputs 0 is the product of reads\[0\] `[batch.., m, d]`
    /// and reads\[1\] `[batch.., d, n]`, and `j` is reads\[2 + j\] `[batch.., m, n]`. In f32. Other [folds](Fold) of a row's scores take
    /// other reads.
    Attention {
        /// Computes a score from a product and further operands.
        score: Body,
        /// The number of further operands of `score`.
        further: usize,
        /// The rows without a softmax that give zeros. Others give NaN.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        guarded: Option<Guard>,
        /// What becomes of a row of scores.
        #[serde(default, skip_serializing_if = "Fold::is_softmax")]
        fold: Fold,
    },
    /// Convolution: reads\[0\] is `[n, c, d, h, w]` (each image contiguous, as for every windowed template),
    /// reads\[1\] `[o, c / groups, kernel..]`, shape `[n, o, d', h', w']`. On the CPU also of data of `u8` and weights of `i8`, or the
    /// other way round, whose sums are of `i32`.
    Conv {
        /// Channel groups.
        groups: usize,
        /// The window.
        window: Window,
        /// The elements around the data. Those around floats are 0.
        #[serde(default, skip_serializing_if = "is_zero")]
        padding: i32,
    },
    /// Transposed convolution (the gradient of [`Template::Conv`] by its input): reads\[0\] is `[n, c, d, h, w]`,
    /// reads\[1\] `[c, o / groups, kernel..]`, shape `[n, o, d', h', w']`. Output element `y` sums over all `x`, `t` with
    /// `x * stride + t * dilation - pad == y`.
    ConvTranspose {
        /// Channel groups.
        groups: usize,
        /// The window.
        window: Window,
    },
    /// The gradient of [`Template::Conv`] by its filters, in sums over parts of the positions: reads\[0\] is the convolution's data
    /// `[n, c, d, h, w]`, reads\[1\] the gradient by its result, `[n, o, d', h', w']`, shape `[parts, o, c / groups, kernel..]`. A part is
    /// one of `rows` stretches of `h'`, over one of the stretches of images.
    ConvFilters {
        /// Channel groups.
        groups: usize,
        /// Stretches of rows.
        rows: usize,
        /// The convolution's window.
        window: Window,
    },
    /// Maximum or mean of a window: reads\[0\] is `[n, c, d, h, w]`, shape `[n, c, d', h', w']`.
    Pool {
        /// The window.
        window: Window,
        /// How the window's elements combine.
        pool: Pool,
    },
    /// The gradient of [`Pool::Max`] by its input: reads\[0\] is the input, of the kernel's shape `[n, c, d, h, w]`, reads\[1\] the maxima
    /// and reads\[2\] their gradients, `[n, c, d', h', w']`. A gradient goes to the first element of its window that is the maximum.
    PoolGrad {
        /// The window.
        window: Window,
    },
    /// `data[access(i) + sum(index_j(i) * strides[j])]`: reads\[0\] is the data, whose access has the kernel's shape and gives
    /// each element's base; reads\[1..=n\] are integer indices of the kernel's shape. Negative indices count from the end of the
    /// axis; one outside is clamped to it.
    Gather {
        /// Per index operand, the stride of the indexed axis in elements of the data's buffer.
        strides: Vec<isize>,
        /// Per index operand, the extent of the indexed axis.
        extents: Vec<usize>,
    },
    /// reads\[0\] with reads\[2\], the updates, stored where reads\[1\], integer indices, say: the update of index `i` goes to
    /// `access(i) + reads[1](i) * stride` of the data's buffer. All have the kernel's shape; the data's access gives each base. Negative
    /// indices count from the end of the indexed axis; an update outside is left out. Of several for one element, the last along `axis`
    /// counts, or all join it in their order. The result lies at the bytes of the data: the kernel touches no other elements.
    Scatter {
        /// The axis of the index space along which indices may choose one element twice.
        axis: usize,
        /// The stride of the indexed axis in elements of the data's buffer.
        stride: isize,
        /// The extent of the indexed axis.
        extent: usize,
        /// True if no two indices along `axis` are the same, so that no update has to look for later ones.
        unique: bool,
        /// How an update joins the element at its place; none if it takes that place.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        join: Option<Reduction>,
    },
    /// The updates of each index, added up: reads\[0\] are updates `[n, ..]`, reads\[1\] their integer indices `[n]`, and index
    /// `[i, ..]` of the kernel's shape sums those whose index is `i`. Negative indices count from the end of the first axis; an update
    /// outside is left out.
    SumByIndex,
    /// The sums of the elements of reads\[0\] up to each along an axis. All have the kernel's shape.
    Scan {
        /// The axis.
        axis: usize,
        /// True for the sums without the element itself.
        exclusive: bool,
        /// True for the sums from the end.
        reverse: bool,
    },
    /// Indices of the first elements of groups, in order, as `i32`: reads\[0\] are keys `[outer.., n]`, shape `[outer.., groups, kept]`. A group
    /// has `runs` neighbouring elements. Or it has `runs` runs of reads\[1\], which are indices of keys `[outer.., groups, runs, from]`, each
    /// run in order. The first of equal ones comes first. An index of `n` or more stands for nothing, and is behind all others; a last group
    /// that the keys do not fill is filled up with such.
    Sort {
        /// True if the largest come first.
        largest: bool,
        /// True if runs of indices are given.
        given: bool,
        /// Runs of a group.
        runs: usize,
    },
    /// reads\[0\] surrounded: index `i` reads `i - before`, outside of the data's extents as `mode` says.
    Pad {
        /// Elements before each axis; negative removes elements.
        before: Vec<isize>,
        /// The values outside of the data.
        mode: PadMode,
    },
    /// Interpolation: per axis, the output index maps to the coordinate `index * scale + offset` of reads\[0\].
    Resize {
        /// Source coordinate per output step, one per axis.
        scales: Vec<f64>,
        /// Source coordinate of output index 0, one per axis.
        offsets: Vec<f64>,
        /// How neighbours combine.
        mode: ResizeMode,
    },
    /// A loop: other kernels, launched step after step.
    Repeat(Box<Repeat>),
    /// Data that the ranks of a mesh axis exchange: reads\[0\] is what this rank gives.
    Collective(Collective),
}

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
    /// True if the one result lies at the bytes of operand 0, and the kernel writes only elements that data chooses: the others stay.
    pub in_place: bool,
    /// True if the kernel stores what the core computes: it has no body, no further operands, and one result.
    pub alone: bool,
    /// Invocations by which a GPU computes it, each alone, unless its texts have tiles.
    pub invocations: fn(&Kernel) -> usize,
    /// True if the CPU's kernel widens halves of a core operand, which may be a constant, as it reads them.
    pub widens: fn(&Kernel, usize, bool) -> bool,
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

macro_rules! templates {
    ($($variant:pat => $row:path,)* ; $($other:pat => $of_others:path,)*) => {
        /// Every row of a template that a kernel of its own computes.
        pub static TEMPLATES: &[&TemplateDef] = &[$(&$row),*];

        impl Template {
            /// The template's row.
            pub fn def(&self) -> &'static TemplateDef {
                match self {
                    $($variant => &$row,)*
                    $($other => &$of_others,)*
                }
            }
        }
    };
}
templates! {
    Template::Map => map::MAP,
    Template::Row { .. } => row::ROW,
    Template::MatMul => matmul::MATMUL,
    Template::MatMulBits { .. } => packed::MATMUL_BITS,
    Template::Attention { .. } => attention::ATTENTION,
    Template::Conv { .. } => window::CONV,
    Template::ConvTranspose { .. } => window::CONV_TRANSPOSE,
    Template::ConvFilters { .. } => window::CONV_FILTERS,
    Template::Pool { .. } => window::POOL,
    Template::PoolGrad { .. } => window::POOL_GRAD,
    Template::Gather { .. } => gather::GATHER,
    Template::Scatter { .. } => scatter::SCATTER,
    Template::SumByIndex => scatter::SUM_BY_INDEX,
    Template::Scan { .. } => scan::SCAN,
    Template::Sort { .. } => sort::SORT,
    Template::Pad { .. } => pad::PAD,
    Template::Resize { .. } => resize::RESIZE,
    ;
    Template::Repeat(_) => repeat::REPEAT,
    Template::Collective(_) => collective::COLLECTIVE,
}

/// The columns of a template that reads one operand, computes each index alone, and has no code of its own.
const PLAIN: TemplateDef = TemplateDef {
    name: "",
    doc: "",
    kind: Kind::Movement,
    core_reads: |_| 1,
    rows: |_| Rows { axes: 0, written_once: false },
    in_place: false,
    alone: false,
    invocations: |kernel| kernel.shape.numel(),
    widens: |_, _, _| false,
    bodies: |_| Vec::new(),
    check: |_, _| Ok(()),
    axis_of: |_, _, _| Along::Tied,
    reach: |_, _| Vec::new(),
    meaning: |_, _, _| Row::default(),
    samples: Vec::new,
};

impl Template {
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
        if let Template::Row { inner, per_row: true, .. } = self.template
            && slot < self.reads.len()
        {
            // What does not move along a row is read once, even if the row is empty.
            let outer = self.shape.len().saturating_sub(inner);
            let still = (outer..access.shape.len()).filter(|&axis| access.strides[axis] == 0).collect::<Vec<_>>();
            still.into_iter().for_each(|axis| access.shape[axis] = access.shape[axis].max(1));
        }
        // A result in place reaches what the data does.
        let slot = if self.is_in_place() && slot >= self.reads.len() { 0 } else { slot };
        if slot < self.template.core_reads() {
            for (extent, stride) in (self.template.def().reach)(&self.template, slot) {
                access.shape.push(extent);
                access.strides.push(stride);
            }
        }
        access
    }

    /// True if the result lies at the bytes of operand 0, of which the kernel changes elements that data chooses.
    pub fn is_in_place(&self) -> bool {
        self.template.def().in_place
    }

    /// True if it reads core operands alone, and writes one result.
    fn stores_alone(&self) -> bool {
        self.reads.len() == self.template.core_reads() && self.writes.len() == 1
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

/// Leaves padding with zeros out of a plan's text.
fn is_zero(padding: &i32) -> bool {
    *padding == 0
}

/// A shape as batch axes, rows and columns.
fn matrix(shape: &Shape) -> Verdict<(&[usize], usize, usize)> {
    match &shape[..] {
        [batch @ .., m, n] => Ok((batch, *m, *n)),
        _ => Err(format!("expected at least 2 axes, found {shape}")),
    }
}

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
        schedule: Schedule::Open,
    };
    kernel.writes.push(floats(kernel.written()));
    kernel
}
