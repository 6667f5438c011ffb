//! Workspaces of library calls. An algorithm may use more than it needs, but only bytes that are free beside it anyway.
//!
//! The order and the offsets are chosen with the least workspace that each call runs with. A call then gets the bytes of the arena that
//! are free during its step, up to the most that it can use. A kernel has one algorithm, so all its steps get as much as the one with
//! the least.
//!
//! ```text
//! address                                       address
//!   ^  +----------------------+ peak              ^  +----------------------+ peak
//!   |  |   b   +------+-----+ |                   |  |   b   +------+-----+ |
//!   |  +-----+ |   d  |     | |        ->         |  +-----+ |   d  |     | |
//!   |  |  w  | |      +--+  | |                   |  |  w  | |      +--+  | |
//!   |  +-----+-+------| w|  | |                   |  |     | |------|w |  | |
//!   +-----------------+--+----+--> step           +--+-----+-+------+--+----+--> step
//! ```

use super::liveness::Range;
use super::offsets::Layout;
use super::order;
use crate::kernel::call::Call;
use crate::kernel::{Kernel, schedule};
use crate::lower::{Draft, DraftBuffer};
use crate::pass::Prefer;
use crate::shape::Shape;
use crate::target::Target;
use crate::{BufferIdx, Class, KernelIdx, SegmentIdx, Spot, StepIdx};
use std::cmp::Reverse;

/// A plan is larger by workspaces that make it faster by at most one in this many of its bytes.
const PART: u64 = 16;

/// Leaves every library call the least workspace that it runs with, and, unless memory comes first, the one with which it is fast, as far as
/// that is a small [part](PART) of what the plan takes without.
pub fn shrink(draft: &mut Draft, target: &Target) {
    resize(draft, |_, kernel| schedule::workspace(kernel));
    let wanted = |kernel: &Kernel| kernel.schedule.call().map_or(0, Call::wanted_workspace);
    let wants = |kernel: &Kernel| wanted(kernel) > schedule::workspace(kernel);
    if draft.prefer == Prefer::Memory || !draft.kernels.iter().any(wants) {
        return;
    }
    let arena = order::peak(draft, target.alignment).unwrap_or(u64::MAX);
    let kept = |buffer: &&DraftBuffer| matches!(buffer.class, Class::Constant | Class::State);
    let kept = draft.buffers.iter().filter(kept).fold(0, |sum: u64, buffer| sum.saturating_add(buffer.bytes));
    let part = arena.saturating_add(kept) / PART / target.alignment * target.alignment;
    resize(draft, |_, kernel| wanted(kernel).min(part).max(schedule::workspace(kernel)));
}

/// Gives every library call the bytes of the arena that are free while it runs, up to the most that it can use.
///
/// Returns how much more the calls got, if they did: at most, of one.
pub fn grow(draft: &mut Draft, layout: &mut Layout, target: &Target) -> Option<u64> {
    let least: Vec<u64> = draft.kernels.iter().map(|kernel| kernel.workspace).collect();
    let most = |call: &Call| call.workspace().min(target.max_binding);
    let most: Vec<u64> = draft.kernels.iter().map(|k| k.schedule.call().map_or(0, most)).collect();
    if most.iter().all(|&bytes| bytes == 0) {
        return None;
    }
    let (ranges, offsets) = (&mut layout.live.ranges, &mut layout.offsets);
    let mut by_start: Vec<usize> = (0..ranges.len()).collect();
    by_start.sort_by_key(|&r| (ranges[r].lower, r));
    // The ranges that begin before this workspace, or an earlier one, ends.
    let mut beside: Vec<usize> = Vec::new();
    let mut next = by_start.into_iter().peekable();
    let mut given = most.clone();
    // Per call, its kernel and the range of its workspace.
    let calls = layout.order.iter().filter_map(|&step| {
        let (kernel, own) = (draft.steps[step].kernel, layout.live.range[draft.workspace(step)?]?);
        (most[kernel] > 0).then_some((kernel, own))
    });
    let calls: Vec<_> = calls.collect();
    for &(kernel, own) in &calls {
        let Range { lower, upper, .. } = ranges[own];
        while let Some(range) = next.next_if(|&r| ranges[r].lower < upper) {
            beside.push(range);
        }
        let meets = |&r: &usize| r != own && ranges[r].lower < upper && lower < ranges[r].upper;
        let mut taken: Vec<_> = beside.iter().copied().filter(meets).collect();
        taken.sort_unstable_by_key(|&r| (offsets[r], Reverse(ranges[r].bytes)));
        let (room, place) = roomiest(&taken, ranges, offsets, &layout.segments, target.alignment);
        let bytes = most[kernel].min(room);
        if bytes > ranges[own].bytes {
            offsets[own] = place;
            ranges[own].bytes = bytes;
        }
        given[kernel] = given[kernel].min(ranges[own].bytes);
    }
    resize(draft, |kernel, _| given[kernel]);
    calls.iter().for_each(|&(kernel, own)| ranges[own].bytes = given[kernel]);
    // A workspace that lay behind all else has perhaps left its place, or ends before it did.
    let mut ends = vec![0; layout.segments.len()];
    for (range, &Spot { segment, offset }) in layout.live.ranges.iter().zip(&layout.offsets) {
        ends[segment] = ends[segment].max(offset + range.bytes);
    }
    layout.segments = ends;
    layout.peak = layout.segments.iter().sum();
    let more = calls.iter().map(|&(kernel, _)| given[kernel].saturating_sub(least[kernel.index()]));
    more.max().filter(|&bytes| bytes > 0)
}

/// Gives the library calls of a draft that runs in a layout, where `whole` numbers its buffers, what the layout has for them.
pub fn take(draft: &mut Draft, layout: &Layout, whole: &[Option<BufferIdx>]) {
    let mut given: Vec<u64> =
        draft.kernels.iter().map(|k| k.schedule.call().map_or(0, |call| call.workspace())).collect();
    for step in StepIdx::all(&draft.steps) {
        if let Some(range) = draft.workspace(step).and_then(|b| layout.live.range[whole[b]?]) {
            let kernel = draft.steps[step].kernel;
            given[kernel] = given[kernel].min(layout.live.ranges[range].bytes);
        }
    }
    resize(draft, |kernel, _| given[kernel]);
}

/// The largest stretch between ranges that are sorted by offset: its bytes, a multiple of the alignment, and where it begins.
fn roomiest(taken: &[usize], ranges: &[Range], offsets: &[Spot], segments: &[u64], alignment: u64) -> (u64, Spot) {
    let mut best = (0, Spot::default());
    let mut taken = taken.iter().copied().peekable();
    for segment in SegmentIdx::all(segments) {
        let mut free = 0;
        let mut consider = |from: u64, to: u64| {
            let room = to.saturating_sub(from) / alignment * alignment;
            if room > best.0 {
                best = (room, Spot { segment, offset: from });
            }
        };
        while let Some(range) = taken.next_if(|&r| offsets[r].segment == segment) {
            consider(free, offsets[range].offset);
            free = free.max((offsets[range].offset + ranges[range].bytes).next_multiple_of(alignment));
        }
        consider(free, segments[segment]);
    }
    best
}

/// Gives each library call these bytes of workspace.
fn resize(draft: &mut Draft, bytes: impl Fn(KernelIdx, &Kernel) -> u64) {
    for (k, kernel) in draft.kernels.iter_mut().enumerate().filter(|(_, kernel)| kernel.schedule.call().is_some()) {
        kernel.workspace = bytes(KernelIdx::new(k), kernel);
    }
    for step in StepIdx::all(&draft.steps) {
        let kernel = &draft.kernels[draft.steps[step].kernel];
        let (called, bytes) = (kernel.schedule.call().is_some(), kernel.workspace);
        if let Some(buffer) = draft.workspace(step).filter(|_| called) {
            draft.buffers[buffer].bytes = bytes;
            draft.buffers[buffer].shape = Shape::new([bytes as usize]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::lower::Options;
    use crate::make::liveness::live;
    use crate::make::streams::Streams;
    use plimsoll_graph::trace::Trace;

    const MIB: u64 = 1 << 20;

    /// The first of two calls of one kernel has room at the end of the arena that the second has not: both get the second's, and the arena
    /// ends where its last buffer then does.
    #[test]
    fn calls_of_one_kernel_leave_what_only_one_has_room_for() {
        let g = Trace::new("twice");
        let [x, w] = [("x", 512), ("w", 1024)].map(|(name, rows)| g.input(name, DType::F16, [rows, 1024]));
        g.output("y", x.matmul(w).matmul(w));
        let (graph, target) = (g.finish().expect("the graph is sound"), Target::cuda());
        let mut draft =
            crate::make::arrange::draft(&graph.into(), &target, Options { join: true }).expect("it is lowered");
        assert!(draft.kernels.len() == 1 && draft.steps.len() == 2);
        let order: Vec<_> = StepIdx::all(&draft.steps).collect();
        let streams = Streams::new(&draft, &order, 1);
        let live = live(&draft, &order, &streams);
        let range = |b: BufferIdx| live.range[b].expect("it lies in the arena");
        let mut offsets = vec![Spot { offset: u64::MAX, ..Spot::default() }; live.ranges.len()];
        let (inputs, writes) = (&draft.inputs, |s: usize| draft.steps[s].writes[0]);
        // The result stands between the intermediate and the end.
        let end = 6 * MIB;
        for (b, offset) in [(inputs[0].1, 0), (inputs[1].1, MIB), (writes(0), 3 * MIB), (writes(1), 4 * MIB + MIB / 4)]
        {
            offsets[range(b)].offset = offset;
        }
        let own = [order[0], order[1]].map(|s| range(draft.workspace(s).expect("it is a library's call")));
        own.iter().for_each(|&r| offsets[r].offset = end);
        let mut layout = Layout { order, streams, live, offsets, segments: vec![end], bound: 0, peak: end };
        own.iter().for_each(|&r| layout.live.ranges[r].bytes = 0);
        grow(&mut draft, &mut layout, &target);
        let placed = |b: BufferIdx| layout.live.range[b].map(|r| layout.offsets[r].offset + draft.buffers[b].bytes);
        assert_eq!(
            layout.segments,
            [BufferIdx::all(&draft.buffers).filter_map(placed).max().expect("there are buffers")]
        );
        assert!(
            layout.segments[0] < end && own.iter().all(|&r| layout.live.ranges[r].bytes == MIB),
            "{:?}",
            layout.segments
        );
    }
}
