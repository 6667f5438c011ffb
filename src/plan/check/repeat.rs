//! Judges a loop: each of its launches is one that every backend can run, touches no bytes but those of its arguments, and reads what was
//! written for it, in the first step and in all others.
//!
//! A row that a step writes is chosen by data, as a scatter's: that all rows are written is the loop's own promise.

use super::kernel::{self, Accessed, Needs};
use crate::elements::Set;
use crate::error::ensure;
use crate::kernel::validate::Verdict;
use crate::kernel::{ArgBytes, Inner, Kernel, Repeat, cpu};
use crate::shape::Access;
use crate::target::Target;
use std::collections::BTreeMap;

/// The bytes of a loop's arguments that hold what was written to them as one, by argument and first byte: where they end.
type Holders = Vec<BTreeMap<u64, u64>>;

/// Checks a kernel, which may be a loop.
pub fn check(kernel: &Kernel, target: &Target) -> Verdict<Needs> {
    match kernel.repeat() {
        Some(of) => check_loop(kernel, of, target),
        None => kernel::check(kernel, target),
    }
}

fn check_loop(kernel: &Kernel, of: &Repeat, target: &Target) -> Verdict<Needs> {
    kernel.validate(target.family)?;
    let needs = of.kernels.iter().map(|inner| check(inner, target)).collect::<Verdict<Vec<_>>>()?;
    let bytes = arguments(kernel)?;
    let mut holders: Holders = vec![BTreeMap::new(); bytes.len()];
    // What the second step finds, all later ones do. A loop of no steps launches none.
    let each = if of.times > 0 { &of.each[..] } else { &[] };
    for inner in of.first.iter().chain(each).chain(each) {
        let mut judge = || {
            let (own, needs) = (&of.kernels[inner.kernel], &needs[inner.kernel]);
            bounds(inner, own, needs, &bytes, target)?;
            disjoint(inner, own, needs)?;
            flow(inner, own, (of.reads, kernel.writes.len()), &mut holders)
        };
        judge().map_err(|e: String| format!("launch '{}': {e}", inner.name))?;
    }
    counts(kernel, of)?;
    for (slot, holders) in holders.iter().enumerate().skip(of.reads).take(kernel.writes.len()) {
        // The rows of a loop without steps are none.
        let access = &kernel.operand(slot).access;
        let written = holders.get(&0).is_some_and(|&end| end == bytes[slot]);
        ensure(written || access.shape.contains(&0), || format!("no launch writes result {}", slot - of.reads))?;
    }
    let whole = |access: &Access| Ok(Accessed { set: Set::new(access, std::iter::empty())?, at_index: false });
    let all = |operands: &[crate::kernel::Operand]| {
        operands.iter().map(|operand| whole(&operand.access)).collect::<Verdict<Vec<_>>>()
    };
    Ok(Needs { reads: all(&kernel.reads)?, writes: all(&kernel.writes)?, own: Vec::new() })
}

/// A result that begins as nothing has a row for each step, and the number of the step's row, which begins in the workspace, moves on.
fn counts(kernel: &Kernel, of: &Repeat) -> Verdict {
    let written = |launches: &[Inner]| -> Vec<ArgBytes> {
        let results = |inner: &Inner| inner.args[of.kernels[inner.kernel].reads.len()..].to_vec();
        launches.iter().flat_map(results).collect()
    };
    let (first, each) = (written(&of.first), written(&of.each));
    let results = of.reads..of.reads + kernel.writes.len();
    for slot in results.clone().filter(|slot| first.iter().all(|arg| arg.slot != *slot)) {
        let shape = &kernel.operand(slot).access.shape;
        ensure(shape.first().is_some_and(|&rows| rows as u64 == of.times), || {
            format!("result {}: expected {} rows, one for each step, found {shape}", slot - of.reads, of.times)
        })?;
    }
    let stuck = first.iter().find(|arg| arg.slot >= results.end && !each.contains(arg));
    ensure(stuck.is_none(), || "the number of the step's row stays the same".into())
}

/// Bytes of each argument of a loop: of an operand, up to its last element.
fn arguments(kernel: &Kernel) -> Verdict<Vec<u64>> {
    let operand = |(slot, operand): (usize, &crate::kernel::Operand)| {
        if operand.packed {
            let (reader, at) = kernel.packed_reader(slot);
            return Ok(cpu::packed_bytes(reader, at).ok_or("it has no packed layout")?.next_multiple_of(4));
        }
        let high = Set::new(&operand.access, std::iter::empty())?.map_or(0, |set| set.high() + 1);
        // Buffers are filled up to words.
        Ok((high * operand.dtype.size() as u64).next_multiple_of(4).max(4))
    };
    let mut all = kernel.reads.iter().chain(&kernel.writes).enumerate().map(operand).collect::<Verdict<Vec<_>>>()?;
    all.extend((kernel.workspace > 0).then_some(kernel.workspace));
    Ok(all)
}

/// Every argument of a launch lies in one of the loop's, and holds what the kernel touches.
fn bounds(inner: &Inner, own: &Kernel, needs: &Needs, bytes: &[u64], target: &Target) -> Verdict {
    for (at, arg) in inner.args.iter().enumerate() {
        let inside = arg.offset.checked_add(arg.bytes).is_some_and(|end| end <= bytes[arg.slot]);
        let fits = inside && arg.offset.is_multiple_of(target.alignment) && arg.bytes <= target.max_binding;
        ensure(fits, || format!("argument {at}: {arg:?} does not lie in {} bytes", bytes[arg.slot]))?;
        let needed = match at.checked_sub(own.reads.len()) {
            None if own.reads[at].packed => {
                let (reader, operand) = own.packed_reader(at);
                cpu::packed_bytes(reader, operand).unwrap_or(u64::MAX)
            }
            None => touched(&needs.reads[at], own.reads[at].dtype.size()),
            Some(write) if write < own.writes.len() => touched(&needs.writes[write], own.writes[write].dtype.size()),
            Some(_) => own.workspace,
        };
        ensure(needed <= arg.bytes, || format!("argument {at}: expected {needed} bytes, found {}", arg.bytes))?;
    }
    Ok(())
}

fn touched(accessed: &Accessed, size: usize) -> u64 {
    accessed.set.as_ref().map_or(0, |set| (set.high() + 1) * size as u64)
}

fn overlap(a: &ArgBytes, b: &ArgBytes) -> bool {
    a.slot == b.slot && a.offset < b.offset + b.bytes && b.offset < a.offset + a.bytes
}

/// What a launch writes overlaps none of its other arguments, unless it may be written over that in place.
fn disjoint(inner: &Inner, own: &Kernel, needs: &Needs) -> Verdict {
    let reads = own.reads.len();
    for (at, written) in inner.args.iter().enumerate().skip(reads) {
        for (other, arg) in inner.args.iter().enumerate().filter(|(other, arg)| *other != at && overlap(arg, written)) {
            let is_result = at < reads + own.writes.len();
            let in_place = other < reads && arg == written && is_result && {
                let (from, to) = (&own.reads[other], &own.writes[at - reads]);
                let same = from.access == to.access && from.dtype.size() == to.dtype.size();
                own.is_in_place() && other == 0 || needs.reads[other].at_index && same
            };
            // Results that are parts of one buffer.
            let parts = arg == written && is_result && apart(needs, own, other, at);
            ensure(in_place || parts, || format!("argument {other} overlaps argument {at}, which is written"))?;
        }
    }
    Ok(())
}

/// True if two arguments of one slice have no element in common.
fn apart(needs: &Needs, own: &Kernel, a: usize, b: usize) -> bool {
    let all: Vec<&Accessed> = needs.reads.iter().chain(&needs.writes).collect();
    let same = a < all.len() && own.operand(a).dtype.size() == own.operand(b).dtype.size();
    same && match (&all[a].set, &all[b].set) {
        (Some(a), Some(b)) => a.is_disjoint(b),
        _ => true,
    }
}

/// A launch reads bytes that were written as it reads them, writes none of what the loop only reads, and takes the bytes that it writes.
fn flow(inner: &Inner, own: &Kernel, (reads, writes): (usize, usize), holders: &mut Holders) -> Verdict {
    let count = own.reads.len();
    for (at, arg) in inner.args[..count].iter().enumerate().filter(|(_, arg)| arg.slot >= reads && arg.bytes > 0) {
        let held = holders[arg.slot].get(&arg.offset) == Some(&(arg.offset + arg.bytes));
        // Rows of a result are written one by one.
        let rows = own.is_in_place() && at == 0 && arg.slot < reads + writes;
        ensure(held || rows, || {
            format!("argument {at}: reads bytes that were not written, or were overwritten: {arg:?}")
        })?;
    }
    for (at, arg) in inner.args.iter().enumerate().skip(count).filter(|(_, arg)| arg.bytes > 0) {
        ensure(arg.slot >= reads, || format!("argument {at}: writes what the loop reads"))?;
        let (from, to) = (arg.offset, arg.offset + arg.bytes);
        holders[arg.slot].retain(|&start, end| *end <= from || start >= to);
        holders[arg.slot].insert(from, to);
    }
    Ok(())
}
