//! Keeps unsound kernels and launches out: every operand must lie within the memory it is given, and overlap nothing but what a kernel may
//! overwrite in place.

use super::map::stored;
use crate::backend::Slice;
use crate::elements::Set;
use crate::expr::{Body, Instr};
use crate::kernel::layout::{packed_bytes, prologue, same_elements};
use crate::kernel::{Kernel, Operand, Template};
use crate::shape::{Access, Shape};

/// What a kernel asks of its launches.
pub struct Check {
    /// Bytes that each argument must have.
    bytes: Vec<u64>,
    reads: usize,
    writes: usize,
    /// Reads that may share their memory with a write: what is overwritten at an index is read at that index or not at all.
    in_place: Vec<(usize, usize)>,
}

/// Bytes that an operand spans, with `below` and `above` further elements on each side.
fn extent(operand: &Operand, below: i128, above: i128) -> Result<u64, String> {
    let Access { shape, strides, offset } = &operand.access;
    if strides.len() != shape.len() {
        return Err(format!("{} strides for {shape}", strides.len()));
    }
    shape.checked_len().ok_or_else(|| format!("{shape} has too many elements"))?;
    if shape.contains(&0) {
        return Ok(0);
    }
    let (mut low, mut high) = (*offset as i128 + below, *offset as i128 + above);
    for (&d, &s) in shape.iter().zip(strides) {
        let reach = (d as i128 - 1) * s as i128;
        if reach < 0 { low += reach } else { high += reach }
    }
    let bytes = (high + 1) * operand.dtype.size() as i128;
    if low < 0 || bytes > isize::MAX as i128 {
        return Err(format!("an operand reaches from element {low} to {high}"));
    }
    Ok(bytes as u64)
}

/// Whether a read and a write of one buffer touch no element both, such as parts of a concatenation.
fn is_apart(template: &Template, number: usize, read: &Operand, write: &Operand) -> Result<bool, String> {
    if write.access.shape.contains(&0) {
        return Ok(true);
    }
    if read.packed || read.dtype.size() != write.dtype.size() {
        return Ok(false);
    }
    // Where indices choose, any element along the axes that they choose from may be read.
    let chosen: Vec<_> = match template {
        Template::Gather { strides, extents } if number == 0 => {
            extents.iter().copied().zip(strides.iter().copied()).collect()
        }
        _ => Vec::new(),
    };
    let (read, write) = (Set::new(&read.access, chosen.into_iter())?, Set::new(&write.access, std::iter::empty())?);
    Ok(matches!((read, write), (Some(a), Some(b)) if a.is_apart(&b)))
}

/// Instructions of a body use earlier ones, and its results are instructions.
fn straight(body: &Body) -> Result<(), String> {
    let len = body.code.len();
    let earlier = |(i, instr): (usize, &Instr)| instr.code.operands().all(|a| (a as usize) < i);
    match body.code.iter().enumerate().all(earlier) && body.results.iter().all(|&r| (r as usize) < len) {
        true => Ok(()),
        false => Err("a body whose instructions are not in order".into()),
    }
}

impl Check {
    /// Checks a kernel's operands against its template.
    pub fn new(kernel: &Kernel) -> Result<Check, String> {
        let Kernel { template, shape, reads, writes, .. } = kernel;
        shape.checked_len().ok_or_else(|| format!("{shape} has too many elements"))?;
        let core = template.core_reads();
        if reads.len() < core || writes.is_empty() {
            return Err(format!("{} reads and {} writes", reads.len(), writes.len()));
        }
        let expect = |operand: &Operand, expected: &[usize]| match operand.access.shape.as_slice() == expected {
            true => Ok(()),
            false => Err(format!("an operand of {} in place of {}", operand.access.shape, Shape::new(expected))),
        };
        prologue::check(kernel)?;
        let further = kernel.further();
        let folds = match template {
            Template::Row { folds, .. } => &folds[..],
            _ => &[],
        };
        let prologues = kernel.prologues.iter().map(|p| &p.body);
        for body in folds.iter().map(|f| &f.body).chain(prologues).chain([&kernel.body]) {
            straight(body)?;
        }
        let written = match template {
            Template::Row { inner, per_row, .. } => {
                let outer = shape.len().checked_sub(*inner).ok_or("rows of more axes than there are")?;
                if *per_row { &shape[..outer] } else { &shape[..] }
            }
            _ => &shape[..],
        };
        for operand in writes {
            expect(operand, written)?;
            let Access { shape, strides, .. } = &operand.access;
            let empty = shape.contains(&0);
            if operand.packed || !empty && shape.iter().zip(strides).any(|(&d, &s)| d > 1 && s == 0) {
                return Err("a write that stands still".into());
            }
        }
        for operand in &reads[further.clone()] {
            expect(operand, shape)?;
        }
        if reads[core..].iter().any(|operand| operand.packed) {
            return Err("a packed operand of a body".into());
        }
        let mut bytes = Vec::new();
        for (k, operand) in reads.iter().chain(writes).enumerate() {
            stored(operand)?;
            let (mut below, mut above) = (0, 0);
            if let (Template::Gather { strides, extents }, 0) = (template, k) {
                if strides.len() != extents.len() {
                    return Err("a gather with as many strides as extents".into());
                }
                for (&s, &d) in strides.iter().zip(extents) {
                    let reach = (d as i128 - 1).max(0) * s as i128;
                    if reach < 0 { below += reach } else { above += reach }
                }
            }
            bytes.push(match packed_bytes(kernel, k).filter(|_| operand.packed) {
                Some(bytes) => bytes,
                None if operand.packed => return Err(format!("operand {k} has no packed layout")),
                None => extent(operand, below, above)?,
            });
        }
        if kernel.workspace > 0 {
            bytes.push(kernel.workspace);
        }
        let mut in_place = Vec::new();
        for (w, write) in writes.iter().enumerate() {
            for (r, read) in reads.iter().enumerate() {
                if is_apart(template, r, read, write)? {
                    in_place.push((r, reads.len() + w));
                }
            }
            for (r, read) in further.clone().map(|r| (r, &reads[r])) {
                // A row that is reduced in place has one element.
                let mut access = read.access.clone();
                access.shape.truncate(written.len());
                access.strides.truncate(written.len());
                let same = same_elements(&access, &write.access) && read.dtype.size() == write.dtype.size();
                if same && shape[written.len()..].iter().all(|&d| d == 1) {
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
            if slice.bytes < bytes || slice.offset % 64 != 0 {
                return Err(format!(
                    "argument {k} needs {bytes} bytes at a multiple of 64, has {} at {}",
                    slice.bytes, slice.offset
                ));
            }
        }
        let end = |s: &Slice| s.offset.saturating_add(s.bytes);
        for w in self.reads..args.len() {
            for other in 0..args.len() {
                let (a, b) = (&args[w], &args[other]);
                let apart = a.segment != b.segment || end(a) <= b.offset || end(b) <= a.offset;
                // The workspace comes after the writes, and nothing may share it.
                let allowed = w < self.reads + self.writes && a == b && self.in_place.contains(&(other, w));
                if other != w && a.bytes > 0 && b.bytes > 0 && !apart && !allowed {
                    return Err(format!("argument {other} overlaps argument {w}, which is written"));
                }
            }
        }
        Ok(())
    }
}
