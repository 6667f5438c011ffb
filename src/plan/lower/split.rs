//! Splits a kernel whose buffers are larger than a binding. Each part computes a range of indices and binds ranges of the buffers.
//!
//! ```text
//! x [4096, 9000] . w [9000, 64] = y [4096, 64]      a binding holds 2000 rows of x
//! part 0   x[0..2000]    w   y[0..2000]
//! part 1   x[2000..4000] w   y[2000..4000]
//! part 2   x[4000..]     w   y[4000..]
//! ```
//!
//! Parts are kernels like any other. Together they write the same elements as the whole kernel, and no sum spans two parts.

use crate::expr::{Body, Code};
use crate::kernel::templates::Along;
use crate::kernel::{Kernel, Operand};
use crate::target::Target;
use crate::{BindRange, BufferIdx};
use std::cell::Cell;
use std::collections::BTreeMap;

/// The most parts of a kernel.
const MOST: usize = 4096;
/// The most parts that are tried before a kernel counts as one that cannot be split.
const EFFORT: usize = 1 << 17;

/// A part of a kernel.
pub struct Part {
    /// The kernel of the part. Its operands' accesses start at the ranges that it binds.
    pub kernel: Kernel,
    /// One bind range per operand that is read, then one per operand that is written.
    pub bind_ranges: Vec<BindRange>,
}

/// Splits a kernel until each buffer, or the range of it that a part binds, fits a binding.
///
/// `slots` has the buffer and its bytes for each operand that is read, then for each that is written.
///
/// # Errors
/// The operand that no split makes small enough.
pub fn cut(kernel: &Kernel, slots: &[(BufferIdx, u64)], target: &Target) -> Result<Vec<Part>, usize> {
    let mut parts = Vec::new();
    Cutter { slots, target, weighed: Cell::new(0) }.cut(kernel, &mut parts).map(|()| parts)
}

/// The parts, filled up with empty ones to the number that is asked for.
pub fn pad(kernel: &Kernel, mut parts: Vec<Part>, count: usize, slots: &[(BufferIdx, u64)]) -> Vec<Part> {
    let axis = (0..kernel.shape.len()).find(|&axis| divides(kernel, axis));
    while let Some(axis) = axis.filter(|_| parts.len() < count) {
        let bind_ranges = slots.iter().map(|&(_, bytes)| BindRange { offset: 0, bytes: bytes.min(4) }).collect();
        parts.push(Part { kernel: slice(kernel, axis, 0, 0), bind_ranges });
    }
    parts
}

struct Cutter<'a> {
    slots: &'a [(BufferIdx, u64)],
    target: &'a Target,
    weighed: Cell<usize>,
}

impl Cutter<'_> {
    fn cut(&self, kernel: &Kernel, parts: &mut Vec<Part>) -> Result<(), usize> {
        let slot = match self.bind_ranges(kernel) {
            Ok(bind_ranges) => {
                parts.push(self.part(kernel, bind_ranges));
                return Ok(());
            }
            Err(slot) => slot,
        };
        let axes: Vec<usize> = (0..kernel.shape.len()).filter(|&k| kernel.shape[k] > 1 && divides(kernel, k)).collect();
        let longest = axes.iter().filter_map(|&axis| Some((axis, self.longest(kernel, axis)?)));
        let (axis, len) = match longest.min_by_key(|&(axis, len)| kernel.shape[axis].div_ceil(len)) {
            Some(found) => found,
            // One axis is not enough: take each index of the first axis by itself, and split along the others.
            None => (*axes.first().ok_or(slot)?, 1),
        };
        for start in (0..kernel.shape[axis]).step_by(len) {
            if parts.len() == MOST || self.weighed.get() > EFFORT {
                return Err(slot);
            }
            self.cut(&slice(kernel, axis, start, len.min(kernel.shape[axis] - start)), parts)?;
        }
        Ok(())
    }

    /// The most indices along an axis that a part may have.
    fn longest(&self, kernel: &Kernel, axis: usize) -> Option<usize> {
        let extent = kernel.shape[axis];
        let fits = |len: usize| {
            let mut starts = (0..extent).step_by(len);
            starts.all(|start| self.bind_ranges(&slice(kernel, axis, start, len.min(extent - start))).is_ok())
        };
        let (mut fit, mut beyond) = (extent.div_ceil(MOST), extent);
        if self.weighed.get() > EFFORT || !fits(fit) {
            return None;
        }
        while fit + 1 < beyond {
            let middle = fit.midpoint(beyond);
            if fits(middle) { fit = middle } else { beyond = middle }
        }
        // Parts that start at multiples of the alignment can share one kernel.
        let operands = kernel.reads.iter().chain(&kernel.writes).enumerate();
        let steps = operands.filter_map(|(slot, operand)| {
            let Along::Axis(moving) = kernel.axis_of(slot, axis) else { return None };
            Some(operand.access.strides[moving].unsigned_abs() as u64 * operand.dtype.size() as u64)
        });
        let even =
            |bytes: u64| self.target.alignment >> bytes.trailing_zeros().min(self.target.alignment.trailing_zeros());
        let unit = steps.filter(|&bytes| bytes > 0).map(even).max().unwrap_or(1) as usize;
        Some(if fit > unit { fit / unit * unit } else { fit })
    }

    /// The bytes of its buffer that an operand touches: the first, and one after the last. `None` if it touches none.
    fn span(&self, kernel: &Kernel, slot: usize) -> Option<(u64, u64)> {
        let (_, bytes) = self.slots[slot];
        let operand = kernel.operand(slot);
        if bytes <= self.target.max_binding || operand.packed {
            return Some((0, bytes));
        }
        let (low, high) = kernel.reach(slot).span()?;
        let size = operand.dtype.size() as u64;
        let start = low.max(0) as u64 * size / self.target.alignment * self.target.alignment;
        let end = (high.max(0) as u64).saturating_add(1).saturating_mul(size).next_multiple_of(4);
        Some((start, end.min(bytes)))
    }

    /// One bind range per operand. Operands of the same buffer have the same bind range. The error is an operand that is too large.
    fn bind_ranges(&self, kernel: &Kernel) -> Result<Vec<BindRange>, usize> {
        self.weighed.set(self.weighed.get() + 1);
        let mut spans: BTreeMap<BufferIdx, (u64, u64)> = BTreeMap::new();
        for (slot, &(buffer, _)) in self.slots.iter().enumerate() {
            let Some((start, end)) = self.span(kernel, slot) else { continue };
            let all = spans.entry(buffer).or_insert((start, end));
            *all = (all.0.min(start), all.1.max(end));
            if all.1 - all.0 > self.target.max_binding {
                return Err(slot);
            }
        }
        let bind_range = |&(buffer, bytes): &(BufferIdx, u64)| {
            let (start, end) = spans.get(&buffer).copied().unwrap_or((0, bytes.min(4)));
            BindRange { offset: start, bytes: end - start }
        };
        Ok(self.slots.iter().map(bind_range).collect())
    }

    /// The kernel with accesses that start at the bind ranges.
    fn part(&self, kernel: &Kernel, bind_ranges: Vec<BindRange>) -> Part {
        let mut kernel = kernel.clone();
        for (operand, bind_range) in kernel.reads.iter_mut().chain(&mut kernel.writes).zip(&bind_ranges) {
            operand.access.offset -= (bind_range.offset / operand.dtype.size() as u64) as isize;
        }
        Part { kernel, bind_ranges }
    }
}

/// Indices `start..start + len` along an axis that [`divides`] a kernel.
fn slice(kernel: &Kernel, axis: usize, start: usize, len: usize) -> Kernel {
    let mut part = kernel.clone();
    part.shape[axis] = len;
    let reads = kernel.reads.len();
    let cut = |slot: usize, operand: &mut Operand| {
        if let Along::Axis(own) = kernel.axis_of(slot, axis) {
            operand.access = operand.access.slice(own, start, 1, len);
        }
    };
    part.reads.iter_mut().enumerate().for_each(|(i, operand)| cut(i, operand));
    part.writes.iter_mut().enumerate().for_each(|(i, operand)| cut(reads + i, operand));
    part
}

/// True if the parts of a kernel along an axis are kernels of their own.
fn divides(kernel: &Kernel, axis: usize) -> bool {
    let slots = kernel.reads.len() + kernel.writes.len();
    let indexed = |body: &Body| body.code.iter().any(|instr| instr.code == Code::Index(axis as u32));
    let codes = kernel.template.bodies().into_iter().chain([&kernel.body]).any(indexed);
    !codes && (0..slots).all(|slot| kernel.axis_of(slot, axis) != Along::Tied)
}
