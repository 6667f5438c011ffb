//! How GPUs walk an index space element by element, or several elements at a time.

use super::Launch;
use crate::error::ensure;
use crate::expr::{Body, Code};
use crate::kernel::algorithm::Elements;
use crate::kernel::product::is_vectorizable;
use crate::kernel::space::{Along, BYTES, along, is_aligned};
use crate::kernel::{Kernel, Template};
use crate::target::{Family, Target};
use std::collections::{BTreeMap, BTreeSet};

/// Sums by index from which on an invocation has several.
const MANY: usize = 1 << 16;

/// Indices that one integer has a bit for.
pub(in crate::kernel) const NOTED: usize = 31;

/// The elements per invocation of a kernel that adds up by indices, if its workgroups look through the indices once; `None` if they are
/// too many to note at once.
pub(in crate::kernel) fn looks(kernel: &Kernel, threads: usize) -> Option<usize> {
    const EACH: usize = 8;
    /// Groups that occupy a device: more would look through the indices in turns.
    const GROUPS: usize = 512;
    let updates = kernel.reads[1].access.shape.numel();
    let once = (1..=NOTED * threads).contains(&updates);
    let elements = kernel.shape.numel();
    let each = (elements / (GROUPS * threads)).next_power_of_two().clamp(EACH, 8 * EACH);
    once.then_some(if elements >= MANY { each } else { 1 })
}

/// Updates that a workgroup lists at a time.
pub(in crate::kernel) const LISTED: usize = 512;

/// Invocations that add up by indices and whose notes are summed up together.
pub(in crate::kernel) const TEAM: usize = 16;

impl Elements {
    pub(in crate::kernel) fn launch(&self, kernel: &Kernel) -> Launch {
        let count = (kernel.template.def().invocations)(kernel) as u64;
        let (threads, each, further) = match *self {
            Elements::One { threads } if kernel.template == Template::SumByIndex => {
                // Invocations that add up by indices note for each other what they find: an integer each, and two for each that is listed, or
                // one per team.
                match looks(kernel, threads as usize) {
                    Some(each) => (threads, each as u64, u64::from(threads) + 2 * LISTED as u64),
                    None => (threads, 1, u64::from(threads) + u64::from(threads).div_ceil(TEAM as u64)),
                }
            }
            Elements::One { threads } => (threads, 1, 0),
            Elements::Vector { width, rounds, threads } => (threads, (width * rounds) as u64, 0),
        };
        let notes = 4 * further;
        Launch { threads, groups: count.div_ceil(u64::from(threads).max(1) * each.max(1)), cluster: 1, shared: notes }
    }

    pub(in crate::kernel) fn check(&self, kernel: &Kernel, target: &Target) -> Result<(), String> {
        let threads = match *self {
            Elements::One { threads } => threads,
            Elements::Vector { width, rounds, threads } if kernel.template != Template::Map => {
                let widest = channels(kernel, target);
                if rounds != 1 || !width.is_power_of_two() || !(2..=widest).contains(&width) {
                    return Err(format!("pool_grad_vec: expected a round of at most {widest} neighbouring channels"));
                }
                threads
            }
            Elements::Vector { width, rounds, threads } => {
                let widest = Moves::new(kernel).width(kernel);
                let fits = width.is_power_of_two() && (2..=widest).contains(&width);
                if target.family != Family::Cuda || !fits {
                    return Err(format!("map_vec: {width} neighbours are not moved at once; the widest is {widest}"));
                }
                ensure(matches!(rounds, 1 | 2 | 4), || format!("map_vec: expected 1, 2 or 4 rounds, found {rounds}"))?;
                threads
            }
        };
        let known = threads >= 1 && (threads == target.max_workgroup || threads.is_power_of_two());
        let fits = known && threads <= target.max_workgroup.min(1024);
        if fits { Ok(()) } else { Err(format!("workgroups of {threads} invocations")) }
    }
}

/// One element per invocation: in small workgroups where there are few.
fn one(count: usize, target: &Target) -> Elements {
    Elements::One { threads: if count < 1 << 14 { 64 } else { 256 }.min(target.max_workgroup) }
}

/// The way that is expected to be fastest.
fn best(kernel: &Kernel, target: &Target) -> Elements {
    let count = kernel.shape.numel();
    let width = if target.family == Family::Cuda { Moves::new(kernel).width(kernel) } else { 1 };
    if width == 1 {
        return one(count, target);
    }
    let threads = if count < 1 << 18 { 128 } else { 256 };
    Elements::Vector { width, rounds: if count < 1 << 22 { 1 } else { 2 }, threads }
}

/// The most neighbouring channels of the data and the maxima of a pooling that are read at once; 1 if there are none.
fn channels(kernel: &Kernel, target: &Target) -> usize {
    let (Template::PoolGrad { .. }, Family::Cuda) = (&kernel.template, target.family) else { return 1 };
    let [data, maxima, ..] = &kernel.reads[..] else { return 1 };
    let last = [data, maxima, &kernel.writes[0]].iter().all(|o| o.access.has_channels_last());
    let fits = |&width: &usize| {
        let whole = kernel.shape[1].is_multiple_of(width) && width * data.dtype.size() <= BYTES;
        whole && data.dtype == maxima.dtype && [data, maxima].iter().all(|operand| is_vectorizable(operand, 1, width))
    };
    [8, 4, 2].into_iter().filter(|_| last).find(fits).unwrap_or(1)
}

/// As many neighbouring channels of a pooling's gradient per invocation as can be read at once.
pub(super) fn of_channels(kernel: &Kernel, target: &Target) -> Option<Elements> {
    let width = channels(kernel, target);
    (width > 1).then_some(Elements::Vector { width, rounds: 1, threads: 128 })
}

/// Every way that may be worth a try.
pub(super) fn all(kernel: &Kernel, target: &Target) -> Vec<Elements> {
    let mut all = vec![best(kernel, target)];
    if let Elements::Vector { width, .. } = all[0] {
        let ways = [1, 2, 4].into_iter().flat_map(|rounds| [128, 256].map(|threads| (rounds, threads)));
        all.extend(ways.map(|(rounds, threads)| Elements::Vector { width, rounds, threads }));
    }
    all.extend(ones(kernel, target));
    all
}

/// One element per invocation, in workgroups of every size. The best is the first.
pub(super) fn ones(kernel: &Kernel, target: &Target) -> Vec<Elements> {
    let of = |threads| Elements::One { threads };
    // Larger workgroups note all indices at once where smaller ones look through them for each element.
    let notes = |&threads: &u32| threads <= target.max_workgroup && looks(kernel, threads as usize).is_some();
    let many = kernel.template == Template::SumByIndex && kernel.shape.numel() >= MANY;
    let wide = if many { [256, 512, 1024].into_iter().find(notes).map(of) } else { None };
    let plain = one((kernel.template.def().invocations)(kernel), target);
    wide.into_iter().chain([plain]).chain([64, 128, 256].map(of)).collect()
}

/// The operands of a map that its body reads or writes, and how each moves along the index space.
pub(in crate::kernel) struct Moves {
    /// Reads that the body uses.
    pub(in crate::kernel) used: BTreeSet<usize>,
    /// Per slot of these and of the writes.
    pub(in crate::kernel) ways: BTreeMap<usize, Along>,
}

impl Moves {
    pub(in crate::kernel) fn new(kernel: &Kernel) -> Moves {
        let used = inputs(&kernel.body);
        let reads = kernel.reads.len();
        let slots = used.iter().copied().chain(reads..reads + kernel.writes.len());
        let ways = slots.map(|slot| (slot, along(&kernel.operand(slot).access, 0))).collect();
        Moves { used, ways }
    }

    /// The most neighbours that all operands allow to be moved at once; 1 where nothing is gained.
    fn width(&self, kernel: &Kernel) -> usize {
        let count = kernel.shape.numel();
        if count == 0 {
            return 1;
        }
        let reads = kernel.reads.len();
        let width = widest(kernel, self.ways.keys().copied(), |slot, width| match self.ways[&slot] {
            Along::Dense(run) => {
                (run == count || run.is_multiple_of(width)) && is_aligned(&kernel.operand(slot).access, run, width)
            }
            Along::Still(run) => slot < reads && (run == count || run.is_multiple_of(width)),
            Along::Other => false,
        });
        let whole = |way: &Along| matches!(way, Along::Dense(run) | Along::Still(run) if *run == count);
        let tail = !count.is_multiple_of(width);
        if tail && !self.ways.values().all(whole) { 1 } else { width }
    }
}

/// The widest access that these operands allow, one element at least.
pub(super) fn widest(
    kernel: &Kernel,
    slots: impl Iterator<Item = usize>,
    fits: impl Fn(usize, usize) -> bool,
) -> usize {
    let slots: Vec<usize> = slots.collect();
    let size = |slot: &usize| kernel.operand(*slot).dtype.size();
    let mut width = slots.iter().map(|slot| BYTES / size(slot)).min().unwrap_or(1);
    while width > 1 && !slots.iter().all(|&slot| fits(slot, width)) {
        width /= 2;
    }
    width
}

/// The inputs that a body names.
pub(in crate::kernel) fn inputs(body: &Body) -> BTreeSet<usize> {
    let input = |code| if let Code::Input(j) = code { Some(j as usize) } else { None };
    body.code.iter().filter_map(|i| input(i.code)).collect()
}

/// True if a body asks where it is in the index space.
pub(in crate::kernel) fn is_indexed(body: &Body) -> bool {
    body.code.iter().any(|i| matches!(i.code, Code::Index(_)))
}
