//! Kernels: a template with its holes filled. The CPU interprets them, GPUs render them.
//!
//! Every kernel writes its index space once. A template computes a *core* value per index from its core operands
//! (a matrix product, a window's maximum, a gathered element); `body` turns that value and any further operands into
//! what is stored. An elementwise kernel is the template without a core. A core operand may have a prologue, code that its
//! elements pass on their way into the core.
//!
//! ```text
//! reads  = [core operands ..., further operands ..., operands of prologues ...]
//! prologue of operand i : Input(0) is its element, Input(j) the prologue's j-th own operand, at the same index
//! body   : Input(0) is the core value, Input(j) the j-th further operand        (Map, Row: Input(j) is reads[j])
//! writes : results[i] of body goes to writes[i]
//! args   = reads, then writes, then one workspace if `workspace` > 0
//! ```
//!
//! These types are plain data and stand below the op table, whose rows name templates. The floors of this folder, each of which knows
//! those above it alone:
//!
//! ```text
//! call, algorithm, mod algorithms as plain data; what a kernel computes
//! tuned                algorithms that were measured, by kernel
//! space, product       facts about its index space, and about the product that it is
//! library, cpu         what cuBLASLt and cuDNN can compute of it; how the CPU packs and cuts it
//! schedule             which algorithm computes it: the only policy
//! render               WGSL and CUDA C++ from shaders/, as the schedule says
//! ```

pub mod algorithm;
pub mod call;
pub mod cpu;
pub mod library;
pub mod meaning;
mod product;
pub mod render;
pub mod schedule;
mod space;
pub mod templates;
pub mod tuned;
pub mod validate;

use crate::dtype::DType;
use crate::expr::Body;
use crate::shape::{Access, Shape};
use algorithm::Schedule;
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// A buffer that a kernel reads or writes, and how its elements lie in it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Operand {
    /// The type in which elements are stored. `bool` values may be stored as `i32`.
    pub dtype: DType,
    /// Where index `i` of the operand's own index space lies, in elements from the buffer's start. Packed constants
    /// have their own layout; the access then only tells the unpacked extents.
    pub access: Access,
    /// Elements are in the packed layout of the template (constants on the CPU).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub packed: bool,
}

/// A kernel: everything a backend needs, but for addresses.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Kernel {
    /// The template and its parameters.
    pub template: Template,
    /// The index space: the extents of what is written (of what is read, for [`Template::Row`]).
    pub shape: Shape,
    /// Operands read: those of the core, of the body, of the prologues.
    pub reads: Vec<Operand>,
    /// Operands written. No two elements of the index space share an address.
    pub writes: Vec<Operand>,
    /// The prologues, at most one per core operand, in the operands' order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub prologues: Vec<Prologue>,
    /// Computes the stored values from the core value and further operands.
    pub body: Body,
    /// Bytes of scratch memory that the plan provides as the last argument.
    pub workspace: u64,
    /// The algorithm that computes the kernel.
    pub schedule: Schedule,
}

/// Code that the elements of a core operand pass on their way into the core. It does not apply to padding, which is
/// added after it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Prologue {
    /// The core operand.
    pub operand: usize,
    /// The number of its own operands. They have the core operand's shape.
    pub reads: usize,
    /// Computes the element that the core consumes from the core operand's element and the own operands', in the core operand's type.
    pub body: Body,
}

impl Kernel {
    /// The operands that `body` reads beside the core value.
    pub fn further(&self) -> Range<usize> {
        let own = self.prologues.iter().fold(0usize, |n, p| n.saturating_add(p.reads));
        let core = self.template.core_reads();
        core..self.reads.len().saturating_sub(own).max(core)
    }

    /// The prologue of a core operand, and the operands of its own.
    pub fn prologue(&self, operand: usize) -> Option<(&Prologue, Range<usize>)> {
        let mut start = self.further().end;
        for prologue in &self.prologues {
            if prologue.operand == operand {
                return Some((prologue, start..start.saturating_add(prologue.reads)));
            }
            start = start.saturating_add(prologue.reads);
        }
        None
    }

    /// The kernel's content as a text: equal kernels have equal texts.
    pub fn key(&self) -> String {
        serde_json::to_string(self).expect("a kernel has only finite numbers and text keys")
    }

    /// The operand of an argument: reads, then writes. Panics beyond them.
    pub fn operand(&self, slot: usize) -> &Operand {
        let reads = self.reads.len();
        if slot < reads { &self.reads[slot] } else { &self.writes[slot - reads] }
    }
}

/// Judges the prologues of a kernel: each is of a core operand of its own, and has the operands that it names.
///
/// # Errors
/// The rule that they break.
pub fn check_prologues(kernel: &Kernel) -> Result<(), String> {
    let core = kernel.template.core_reads();
    let mut left = kernel.reads.len().checked_sub(core).ok_or("fewer operands than the core reads")?;
    let mut from = 0;
    for Prologue { operand, reads, .. } in &kernel.prologues {
        if !(from..core).contains(operand) {
            return Err(format!("a prologue of operand {operand}, expected one of {from} to {core}"));
        }
        left = left.checked_sub(*reads).ok_or_else(|| format!("a prologue of {reads} operands, found {left}"))?;
        from = operand + 1;
    }
    for (operand, own) in kernel.prologues.iter().filter_map(|p| Some((p.operand, kernel.prologue(p.operand)?.1))) {
        let shape = &kernel.reads[operand].access.shape;
        if let Some(other) = kernel.reads[own].iter().find(|o| o.access.shape != *shape) {
            return Err(format!(
                "a prologue of operand {operand}: expected extents {shape}, found {}",
                other.access.shape
            ));
        }
    }
    Ok(())
}

/// The most elements of an index space. Texts count elements in `i32`. They also count those beyond the end in a grid's last workgroups
/// and in a row's last block.
pub(crate) const MOST_ELEMENTS: usize = i32::MAX as usize - (1 << 16);

/// Checks that the indices of a kernel's elements fit `i32`, as GPU texts count them.
///
/// # Errors
/// The operand or the extent that is too large.
pub fn fits_i32(kernel: &Kernel) -> Result<(), String> {
    for (slot, operand) in kernel.reads.iter().chain(&kernel.writes).enumerate() {
        let far = |(low, high): &(isize, isize)| *low < 0 || *high >= i32::MAX as isize;
        if let Some((low, high)) = operand.access.span().filter(far) {
            return Err(format!("operand {slot} reaches from element {low} to {high}"));
        }
    }
    if kernel.shape.checked_len().is_none_or(|n| n > MOST_ELEMENTS) {
        return Err(format!("{} elements are more than {MOST_ELEMENTS}", kernel.shape));
    }
    Ok(())
}

/// How values combine in a reduction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs, reason = "the names say it")]
pub enum Reduction {
    Sum,
    Max,
    Min,
    Prod,
}

/// One reduction of a row kernel.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RowReduction {
    /// How values combine.
    #[serde(rename = "fold")]
    pub reduction: Reduction,
    /// The value to combine at each element: may use reads and earlier reductions.
    pub body: Body,
}

/// A window that slides over up to three spatial axes (unused leading ones have extent 1).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Window {
    /// Extents.
    pub kernel: [usize; 3],
    /// Steps between windows.
    pub strides: [usize; 3],
    /// Steps between elements of a window.
    pub dilations: [usize; 3],
    /// Elements of padding before each axis. The padding behind follows from the output's extents.
    pub pads: [usize; 3],
}

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
    /// Batched matrix product: reads\[0\] is `[batch.., m, k]`, reads\[1\] `[batch.., k, n]`, shape `[batch.., m, n]`. Sums are in `f32`, of `f64` operands in `f64`.
    MatMul,
    /// Attention, whose scores are never stored: reads\[2\] `[batch.., n, e]` under the softmax over `n` of scores, shape
    /// `[batch.., m, e]`. A score is the one result of `score`, of whose inputs 0 is the product of reads\[0\] `[batch.., m, d]`
    /// and reads\[1\] `[batch.., d, n]`, and `j` is reads\[2 + j\] `[batch.., m, n]`. In f32.
    Attention {
        /// Computes a score from a product and further operands.
        score: Body,
        /// The number of further operands of `score`.
        further: usize,
        /// The rows without a softmax that give zeros. Others give NaN.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        guarded: Option<Guard>,
    },
    /// Convolution: reads\[0\] is `[n, c, d, h, w]` (each image contiguous, as for every windowed template),
    /// reads\[1\] `[o, c / groups, kernel..]`, shape `[n, o, d', h', w']`.
    Conv {
        /// Channel groups.
        groups: usize,
        /// The window.
        window: Window,
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
    /// Maximum or mean of a window: reads\[0\] is `[n, c, d, h, w]`, shape `[n, c, d', h', w']`.
    Pool {
        /// The window.
        window: Window,
        /// How the window's elements combine.
        pool: Pool,
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
}

/// How a pooling window's elements combine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Pool {
    /// The largest element inside the data.
    Max,
    /// The mean of the elements inside the data.
    Mean,
    /// The sum of the elements inside the data over the number of window elements inside the data and its padding,
    /// whose trailing extents are given.
    MeanPadded {
        /// Elements of padding behind each axis.
        pads_end: [usize; 3],
    },
}

/// Rows without a softmax.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Guard {
    /// Rows whose scores are all minus infinity, so that nothing is seen. WGSL, which need not know NaN, takes all rows.
    Unseen,
    /// All such rows: those that see nothing, and those with a NaN.
    All,
}

/// The values outside of padded data.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PadMode {
    /// This value.
    Constant(#[serde(with = "crate::expr::literal")] f64),
    /// The nearest element.
    Edge,
    /// The data mirrored at its outermost element, which is not repeated.
    Reflect,
    /// The data from the other end.
    Wrap,
}

/// How a resized element follows from its neighbours.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ResizeMode {
    /// The nearest element, chosen by the rounding rule.
    Nearest(Nearest),
    /// Multilinear over the two neighbours along each resized axis; coordinates are clamped to the data.
    Linear,
    /// Cubic convolution with this coefficient over four neighbours along each resized axis, which are clamped to the data
    /// or, with `exclude_outside`, left out and the weights renormalised.
    Cubic {
        /// Coefficient `a`, usually -0.75.
        a: f64,
        /// Leave out what lies outside.
        exclude_outside: bool,
    },
}

/// The choice of the nearest neighbour.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs, reason = "the names say it")]
pub enum Nearest {
    RoundPreferFloor,
    RoundPreferCeil,
    Floor,
    Ceil,
}

impl Nearest {
    /// The neighbour of a coordinate.
    pub fn choose(self, x: f64) -> f64 {
        match self {
            Nearest::Floor => x.floor(),
            Nearest::Ceil => x.ceil(),
            Nearest::RoundPreferFloor => (x - 0.5).ceil(),
            Nearest::RoundPreferCeil => (x + 0.5).floor(),
        }
    }
}
