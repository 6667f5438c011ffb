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
//! templates            a row for each template, and what it means
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
pub use templates::{
    ArgBytes, Collective, Exchange, Fold, Guard, Inner, MOST_HELD, MOST_TAPS, MOST_TERMS, Nearest, Packing, PadMode,
    Pool, Reduction, Repeat, ResizeMode, RowReduction, Template, UNROLLED, Window, ZeroPoints, adds_directly, unfolds,
};

/// A buffer that a kernel reads or writes, and how its elements lie in it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Operand {
    /// The type in which elements are stored.
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
    /// Operands written. No two elements of the index space share an address, unless data chooses the elements.
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

/// The number of elements of these extents, or the largest number.
pub fn elements(extents: &[usize]) -> u64 {
    extents.iter().fold(1, |all, &extent| all.saturating_mul(extent as u64))
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

    /// True if the CPU's kernel widens halves of this operand as it reads them. Some do so with constants alone, which are packed.
    pub fn widens(&self, operand: usize, is_constant: bool) -> bool {
        if operand >= self.template.core_reads() {
            // A prologue rewrites what is there.
            return operand < self.further().end;
        }
        (self.template.def().widens)(self, operand, is_constant)
    }

    /// The type of the core value: the core operands' own. Products of bytes, and convolutions of them, are summed in `i32`.
    /// The order of keys is of `i32`. What another rank gives is of its own type.
    pub fn core_dtype(&self) -> DType {
        let dtype = self.reads[0].dtype;
        if self.collective().is_some_and(|of| of.exchange.other().is_some()) {
            return self.writes[0].dtype;
        }
        if matches!(self.template, Template::Attention { fold: Fold::LogSum, .. }) {
            return DType::F32;
        }
        let multiplies = matches!(self.template, Template::MatMul | Template::Conv { .. });
        if matches!(self.template, Template::Sort { .. }) {
            return DType::I32;
        }
        if multiplies && dtype.is_byte() { DType::I32 } else { dtype }
    }

    /// The products that it adds up, if that is its work; of a window at the border, those beyond it, too.
    pub fn multiply_adds(&self) -> Option<u64> {
        let size = elements(&self.shape);
        let extents = |operand: usize| self.reads.get(operand).map(|operand| &operand.access.shape[..]);
        let inner = match &self.template {
            Template::MatMul => extents(0)?.last().map_or(1, |&k| k as u64),
            Template::Conv { .. } => elements(extents(1)?.get(1..)?),
            // Each element of the data meets as many weights.
            Template::ConvTranspose { .. } => {
                return Some(elements(extents(0)?).saturating_mul(elements(extents(1)?.get(1..)?)));
            }
            // Parts share the positions; the channels of the result are in its size already.
            Template::ConvFilters { .. } => elements(extents(1)?) / elements(self.shape.get(..2)?).max(1),
            Template::Attention { fold, .. } => {
                // Of each row and key: the columns of queries and values.
                let keys = *extents(1)?.last()? as u64;
                let columns = |operand: usize| extents(operand).and_then(|of| of.last()).map_or(0, |&d| d as u64);
                let values = if *fold == Fold::LogSum { 0 } else { columns(2) };
                let second = if fold.products() == 2 { columns(3) } else { 0 };
                let rows = elements(self.shape.get(..self.shape.len().saturating_sub(1))?);
                return Some(rows.saturating_mul(keys).saturating_mul(columns(0) + values + second));
            }
            _ => return None,
        };
        Some(size.saturating_mul(inner.max(1)))
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
pub const MOST_ELEMENTS: usize = i32::MAX as usize - (1 << 16);

/// Checks that the indices of a kernel's elements fit `i32`, as GPU texts count them.
///
/// # Errors
/// The operand or the extent that is too large.
pub fn fits_i32(kernel: &Kernel) -> Result<(), String> {
    for slot in 0..kernel.reads.len() + kernel.writes.len() {
        let far = |(low, high): &(isize, isize)| *low < 0 || *high >= i32::MAX as isize;
        if let Some((low, high)) = kernel.reach(slot).span().filter(far) {
            return Err(format!("operand {slot} reaches from element {low} to {high}"));
        }
    }
    if kernel.shape.checked_len().is_none_or(|n| n > MOST_ELEMENTS) {
        return Err(format!("{} elements are more than {MOST_ELEMENTS}", kernel.shape));
    }
    let invocations = (kernel.template.def().invocations)(kernel);
    if invocations > MOST_ELEMENTS {
        return Err(format!("{invocations} invocations are more than {MOST_ELEMENTS}"));
    }
    Ok(())
}
