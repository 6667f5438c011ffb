//! Judges a kernel alone: every backend can run it, and it touches no elements but those of its operands.

use super::body;
use crate::elements::{Set, is_injective};
use crate::error::ensure;
use crate::index::{KernelIdx, Per};
use crate::kernel::schedule::{self, prologue};
use crate::kernel::validate::Verdict;
use crate::kernel::{Kernel, Operand, Template, check_prologues, cpu};
use crate::shape::Access;
use crate::target::Target;

/// An operand's use of its buffer.
#[derive(Debug)]
pub struct Accessed {
    /// The elements that it may touch; `None` if there are none.
    pub set: Option<Set>,
    /// True if it is only read at the index that is written next.
    pub at_index: bool,
}

/// A kernel's use of its buffers.
#[derive(Debug)]
pub struct Needs {
    /// Per operand read.
    pub reads: Vec<Accessed>,
    /// Per operand written.
    pub writes: Vec<Accessed>,
    /// Operands whose bytes no other operand of a step may share.
    pub own: Vec<usize>,
}

impl Per<KernelIdx> for Needs {}

/// Checks a kernel.
pub fn check(kernel: &Kernel, target: &Target) -> Verdict<Needs> {
    let Kernel { template, reads, writes, prologues, body, workspace, .. } = kernel;
    check_prologues(kernel)?;
    kernel.validate(target.family)?;
    for (i, Operand { access, .. }) in writes.iter().enumerate() {
        ensure(is_injective(&once(kernel, access)), || {
            format!("operand {i} written: elements share addresses under strides {:?}", access.strides)
        })?;
    }
    // From here on nothing that follows from the extents overflows.
    for (i, _) in reads.iter().enumerate().filter(|(_, operand)| operand.packed) {
        let has = i < template.core_reads() && cpu::packed_bytes(kernel, i).is_some();
        ensure(has, || format!("operand {i} read: it has no packed layout"))?;
    }
    body::check(kernel, target)?;
    for p in prologues {
        let name = || format!("operand {} read: the kernel has no place for a prologue of it", p.operand);
        ensure(prologue::is_possible(kernel, p.operand, target), name)?;
    }

    let schedule::Needs { workspace: needed, own } = schedule::check(kernel, target)?;
    ensure(*workspace >= needed, || format!("expected a workspace of {needed} bytes, found {workspace}"))?;
    ensure(body.results.len() == writes.len(), || {
        format!("expected one result per operand written, {}, found {}", writes.len(), body.results.len())
    })?;
    let in_place = |i: usize| kernel.schedule.call().is_none_or(|call| call.in_place() == Some(i));
    let mut needs = Needs { reads: Vec::new(), writes: Vec::new(), own };
    for i in 0..reads.len() {
        let set = elements_read(kernel, i).map_err(|e| format!("operand {i} read: reaches {e}"))?;
        let at_index = kernel.further().contains(&i) && !template.rows().written_once && in_place(i);
        needs.reads.push(Accessed { set, at_index });
    }
    for (i, operand) in writes.iter().enumerate() {
        let set = Set::new(&operand.access, chosen(kernel, 0).filter(|_| kernel.is_in_place()));
        let set = set.map_err(|e| format!("operand {i} written: reaches {e}"))?;
        needs.writes.push(Accessed { set, at_index: false });
    }
    Ok(needs)
}

/// The elements that a kernel writes, each once. Updates of one element are of one index along the axis that counts them, and only the last
/// of them is stored.
fn once(kernel: &Kernel, written: &Access) -> Access {
    let mut access = written.clone();
    if let Template::Scatter { axis, stride, extent, .. } = kernel.template {
        access.shape[axis] = extent;
        access.strides[axis] = stride;
    }
    access
}

/// Axes, by extent and stride, along which indices choose any element of operand `i`.
fn chosen(kernel: &Kernel, i: usize) -> impl Iterator<Item = (usize, isize)> {
    let axes: Vec<_> = match &kernel.template {
        Template::Gather { strides, extents } if i == 0 => {
            extents.iter().copied().zip(strides.iter().copied()).collect()
        }
        &Template::Scatter { stride, extent, .. } if i == 0 => vec![(extent, stride)],
        _ => Vec::new(),
    };
    axes.into_iter()
}

/// The elements that operand `i` may read. This is the checker's own rule, apart from the one by which plans are made.
fn elements_read(kernel: &Kernel, i: usize) -> Verdict<Option<Set>> {
    let mut access = kernel.reads[i].access.clone();
    match &kernel.template {
        // Even if rows are empty, operands that do not move along a row are read.
        Template::Row { inner, per_row: true, .. } => {
            let outer = kernel.shape.len() - inner;
            for axis in (outer..kernel.shape.len()).filter(|&k| kernel.reads[i].access.strides[k] == 0) {
                access.shape[axis] = access.shape[axis].max(1);
            }
        }
        Template::Map
        | Template::Row { per_row: false, .. }
        | Template::MatMul
        | Template::MatMulBits { .. }
        | Template::Attention { .. }
        | Template::Conv { .. }
        | Template::ConvTranspose { .. }
        | Template::ConvFilters { .. }
        | Template::Pool { .. }
        | Template::PoolGrad { .. }
        | Template::Gather { .. }
        | Template::Scatter { .. }
        | Template::SumByIndex
        | Template::Scan { .. }
        | Template::Sort { .. }
        | Template::Pad { .. }
        | Template::Resize { .. }
        | Template::Repeat(_)
        | Template::Collective(_) => {}
    }
    Set::new(&access, chosen(kernel, i))
}
