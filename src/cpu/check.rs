//! Refuses unsound kernels and launches. Every operand must lie within its memory. It must overlap no other, unless the kernel may
//! overwrite that one in place.

use super::operands::stored;
use plimsoll_backend::Slice;
use plimsoll_core::dtype::DType;
use plimsoll_core::elements::Set;
use plimsoll_core::error::ensure;
use plimsoll_core::expr::{Body, Instr};
use plimsoll_core::kernel::cpu::{packed_bytes, same_elements};
use plimsoll_core::kernel::{Kernel, Operand, check_prologues};
use plimsoll_core::shape::Access;
use plimsoll_core::target::Family;

/// The requirements of a kernel on its launches.
pub struct Check {
    /// Bytes that each argument must have.
    bytes: Vec<u64>,
    reads: usize,
    writes: usize,
    /// Pairs of a read and a write that may share memory: an element is read at the index where it is overwritten, or not at all.
    in_place: Vec<(usize, usize)>,
}

/// Bytes up to the end of the last element that an access reaches.
fn extent(access: &Access, dtype: DType) -> Result<u64, String> {
    let Access { shape, strides, offset } = access;
    if shape.contains(&0) {
        return Ok(0);
    }
    let (mut low, mut high) = (*offset as i128, *offset as i128);
    for (&d, &s) in shape.iter().zip(strides) {
        let reach = (d as i128 - 1) * s as i128;
        if reach < 0 { low += reach } else { high += reach }
    }
    let bytes = (high + 1) * dtype.size() as i128;
    ensure(low >= 0 && bytes <= isize::MAX as i128, || format!("an operand reaches from element {low} to {high}"))?;
    Ok(bytes as u64)
}

/// True if a read and a write of one buffer have no element in common, such as parts of a concatenation.
fn is_disjoint(kernel: &Kernel, read: usize, write: usize) -> Result<bool, String> {
    let (from, to) = (&kernel.reads[read], &kernel.writes[write]);
    if [from, to].iter().any(|operand| operand.access.shape.contains(&0)) {
        return Ok(true);
    }
    if from.packed || from.dtype.size() != to.dtype.size() {
        return Ok(false);
    }
    let set = |slot: usize| Set::new(&kernel.reach(slot), std::iter::empty());
    Ok(matches!((set(read)?, set(kernel.reads.len() + write)?), (Some(a), Some(b)) if a.is_disjoint(&b)))
}

/// True if the element that one operand reads at an index is the one that another writes there. A row that is written once
/// has one element.
fn is_overwritten(kernel: &Kernel, read: usize, write: usize) -> bool {
    let (from, to, written) = (&kernel.reads[read], &kernel.writes[write], kernel.written().len());
    let mut access = from.access.clone();
    access.shape.truncate(written);
    access.strides.truncate(written);
    let same = same_elements(&access, &to.access) && from.dtype.size() == to.dtype.size();
    same && kernel.shape[written..].iter().all(|&d| d == 1)
}

/// Instructions of a body use earlier ones, and its results are instructions.
fn straight(body: &Body) -> Result<(), String> {
    let len = body.code.len();
    let earlier = |(i, instr): (usize, &Instr)| instr.code.operands().all(|a| (a as usize) < i);
    let ordered = body.code.iter().enumerate().all(earlier) && body.results.iter().all(|&r| (r as usize) < len);
    ensure(ordered, || "a body whose instructions are not in order".into())
}

impl Check {
    /// The requirements of a loop: its launches have their own.
    pub fn nothing() -> Check {
        Check { bytes: Vec::new(), reads: 0, writes: 0, in_place: Vec::new() }
    }

    /// Checks a kernel's operands against its template.
    pub fn new(kernel: &Kernel) -> Result<Check, String> {
        check_prologues(kernel)?;
        kernel.validate(Family::Cpu)?;
        let Kernel { template, reads, writes, .. } = kernel;
        let prologues = kernel.prologues.iter().map(|p| &p.body);
        template.bodies().into_iter().chain(prologues).chain([&kernel.body]).try_for_each(straight)?;
        for Operand { access: Access { shape, strides, .. }, .. } in writes.iter().filter(|_| !kernel.is_in_place()) {
            let still = shape.iter().zip(strides).any(|(&d, &s)| d > 1 && s == 0);
            ensure(!still || shape.contains(&0), || "a write that stands still".to_owned())?;
        }
        let mut bytes = Vec::new();
        for (k, operand) in reads.iter().chain(writes).enumerate() {
            stored(operand)?;
            // An axis of one element may have any stride, but its bytes are counted.
            let far = operand.access.strides.iter().find(|s| s.unsigned_abs() > isize::MAX as usize / 64);
            ensure(far.is_none(), || format!("operand {k} has a stride of {far:?} elements"))?;
            bytes.push(if operand.packed {
                let packed = packed_bytes(kernel, k).filter(|_| k < template.core_reads());
                packed.ok_or_else(|| format!("operand {k} has no packed layout"))?
            } else {
                extent(&kernel.reach(k), operand.dtype)?
            });
        }
        if kernel.workspace > 0 {
            bytes.push(kernel.workspace);
        }
        let mut in_place = Vec::new();
        for w in 0..writes.len() {
            for r in 0..reads.len() {
                let data = kernel.is_in_place() && (r, w) == (0, 0);
                if data || is_disjoint(kernel, r, w)? || kernel.further().contains(&r) && is_overwritten(kernel, r, w) {
                    in_place.push((r, reads.len() + w));
                }
            }
        }
        Ok(Check { bytes, reads: reads.len(), writes: writes.len(), in_place })
    }

    /// Checks the slices of a launch.
    pub fn launch(&self, args: &[Slice]) -> Result<(), String> {
        if args.len() != self.bytes.len() {
            return Err(format!("a launch with {} arguments for {}", args.len(), self.bytes.len()));
        }
        for (k, (slice, &bytes)) in args.iter().zip(&self.bytes).enumerate() {
            ensure(slice.bytes >= bytes && slice.offset % 64 == 0, || {
                format!("argument {k} needs {bytes} bytes at a multiple of 64, has {} at {}", slice.bytes, slice.offset)
            })?;
        }
        let end = |s: &Slice| s.offset.saturating_add(s.bytes);
        for w in self.reads..args.len() {
            for other in 0..args.len() {
                let (a, b) = (&args[w], &args[other]);
                let disjoint = a.segment != b.segment || end(a) <= b.offset || end(b) <= a.offset;
                // The workspace comes after the writes, and nothing may share it.
                let allowed = w < self.reads + self.writes && a == b && self.in_place.contains(&(other, w));
                if other != w && a.bytes > 0 && b.bytes > 0 && !disjoint && !allowed {
                    return Err(format!("argument {other} overlaps argument {w}, which is written"));
                }
            }
        }
        Ok(())
    }
}
