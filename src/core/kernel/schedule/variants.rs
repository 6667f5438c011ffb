//! The variants of a kernel: its candidates, each as the launches that it becomes.

use super::Split;
use crate::kernel::algorithm::Schedule;
use crate::kernel::{Kernel, cpu};
use crate::target::Target;

/// The most schedules of a kernel that are tried.
const MOST_TRIED: usize = 48;

/// A schedule of a kernel as the launches that it becomes.
pub struct Variant {
    /// The schedule.
    pub schedule: Schedule,
    /// Each kernel, and its arguments among the reads, then the writes, of the whole kernel.
    pub launches: Vec<(Kernel, Vec<usize>)>,
}

/// The variants of a kernel on a target. The first is the one that is used without a measurement.
pub fn variants(kernel: &Kernel, target: &Target) -> Vec<Variant> {
    let mut plain = kernel.clone();
    plain.reads.iter_mut().for_each(|read| read.packed = false);
    let slots: Vec<usize> = (0..kernel.reads.len() + kernel.writes.len()).collect();
    let whole = |schedule: Schedule| {
        let mut scheduled = Kernel { schedule, ..plain.clone() };
        for (operand, read) in kernel.reads.iter().enumerate() {
            scheduled.reads[operand].packed = read.packed && cpu::packed_bytes(&scheduled, operand).is_some();
        }
        scheduled.workspace = super::workspace(&scheduled);
        Variant { schedule: scheduled.schedule.clone(), launches: vec![(scheduled, slots.clone())] }
    };
    let candidates = super::candidates(&plain, target, &|_| true).into_iter();
    let mut variants: Vec<Variant> = candidates.filter(|s| s.call().is_none()).map(whole).collect();
    if let Some(split) = super::split(&plain, target) {
        let at = if split.is_preferred { 0 } else { variants.len().min(1) };
        let algorithms = [None].into_iter().chain(split.algorithms().into_iter().map(Some));
        let calls = algorithms.filter_map(|algorithm| called(split.clone().called(algorithm), &plain, target));
        variants.splice(at..at, calls.collect::<Vec<_>>());
    }
    variants.truncate(MOST_TRIED);
    variants
}

/// A library's call, with the workspace that it always gets, and the map behind it.
fn called(split: Split, kernel: &Kernel, target: &Target) -> Option<Variant> {
    let Split { call: (mut call, operands), rest, .. } = split;
    call.workspace = super::workspace(&call);
    let reads = kernel.reads.len();
    let schedule = call.schedule.clone();
    let mut launches = vec![(call, operands.into_iter().chain([reads]).collect())];
    if let Some((map, operands)) = rest {
        let map = super::scheduled(&map, target).ok()?;
        launches.push((map, [reads].into_iter().chain(operands).chain([reads]).collect()));
    }
    Some(Variant { schedule, launches })
}

/// True if a schedule of a kernel needs no more memory than the expected one.
pub fn is_no_larger(kernel: &Kernel, schedule: &Schedule, target: &Target) -> bool {
    let variants = variants(kernel, target);
    let bytes = |way: &Variant| -> u64 {
        let of = |(kernel, _): &(Kernel, Vec<usize>)| {
            let packed = (0..kernel.reads.len()).filter(|&at| kernel.reads[at].packed);
            super::workspace(kernel) + packed.filter_map(|at| cpu::packed_bytes(kernel, at)).sum::<u64>()
        };
        way.launches.iter().map(of).sum()
    };
    let own = variants.iter().find(|way| way.schedule == *schedule);
    own.zip(variants.first()).is_some_and(|(own, first)| bytes(own) <= bytes(first))
}
