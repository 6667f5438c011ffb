//! Finds all addresses for one order of the steps: offsets in the arena's segments, and the other segments.

use super::liveness::{self, Live};
use super::streams::Streams;
use crate::error::{Error, Result};
use crate::lower::{Draft, DraftBuffer, DraftConstant};
use crate::place::{self, Effort, Item, Problem};
use crate::target::{Memory, PREFETCH_STACK, Target};
use crate::{BufferIdx, Class, Segment, SegmentIdx, Spot, StepIdx};
use std::collections::{HashMap, HashSet};

/// An order and the offsets it leads to.
pub struct Layout {
    pub order: Vec<StepIdx>,
    pub streams: Streams,
    pub live: Live,
    /// Per range, its place in the segments of the arena.
    pub offsets: Vec<Spot>,
    /// Bytes of each segment of the arena.
    pub segments: Vec<u64>,
    pub bound: u64,
    pub peak: u64,
}

/// Refuses buffers that are larger than any segment, and sizes whose sum overflows. Later sums are at most this one.
pub fn check_sizes(draft: &Draft, target: &Target) -> Result<()> {
    let mut sum = 0u64;
    for b in &draft.buffers {
        let padded = b.bytes.checked_next_multiple_of(target.alignment);
        let next = padded.and_then(|bytes| sum.checked_add(bytes)).filter(|&sum| sum <= i64::MAX as u64);
        sum = next.ok_or_else(|| {
            let (name, dtype, shape) = (&b.name, b.dtype, &b.shape);
            Error::usage(format!("tensor '{name}' ({dtype}{shape}): the sum of all sizes is beyond 63 bits"))
        })?;
    }
    draft.fits_segments(target)
}

/// Finds the offsets for an order. If the lower bound is not below `bar`, it spends little effort.
pub fn layout(draft: &Draft, target: &Target, order: &[StepIdx], streams: usize, bar: u64) -> Result<Layout> {
    let streams = Streams::new(draft, order, streams);
    let live = liveness::live(draft, order, &streams);
    let items = live.ranges.iter().map(|r| Item {
        lower: r.lower as u64,
        upper: r.upper as u64,
        size: r.bytes,
        align: target.alignment,
    });
    let problem = Problem::new(items.collect(), target.alignment)?;
    let bound = problem.lower_bound();
    let effort = if bound < bar { Effort::PLAN } else { Effort::Steps(0) };
    // With several segments, the peak of one cannot be compared with a bar for their sum.
    let bar = if bar <= target.max_segment { bar } else { u64::MAX };
    let mut offsets = vec![Spot::default(); live.ranges.len()];
    let mut segments = Vec::new();
    let mut rest: Vec<usize> = (0..live.ranges.len()).collect();
    while !rest.is_empty() {
        // Ranges that end beyond the largest segment go to the next one.
        let items = rest.iter().map(|&r| problem.items()[r]).collect();
        let part = Problem::new(items, target.alignment)?;
        let solution = place::place_below(&part, bar, effort);
        let mut bytes = 0;
        let mut beyond = Vec::new();
        for (&range, &offset) in rest.iter().zip(&solution.offsets) {
            let end = offset + live.ranges[range].bytes;
            if end > target.max_segment {
                beyond.push(range);
            } else {
                offsets[range] = Spot { segment: SegmentIdx::new(segments.len()), offset };
                bytes = bytes.max(end);
            }
        }
        segments.push(bytes);
        rest = beyond;
    }
    let peak = segments.iter().sum();
    Ok(Layout { order: order.to_vec(), streams, live, offsets, segments, bound, peak })
}

/// Puts buffers one after another into segments of one class.
struct Stack<'a> {
    target: &'a Target,
    class: Class,
    memory: Memory,
    open: Option<SegmentIdx>,
}

impl Stack<'_> {
    fn push(&mut self, segments: &mut Vec<Segment>, bytes: u64) -> Spot {
        if let Some(open) = self.open {
            let offset = segments[open].bytes.next_multiple_of(self.target.alignment);
            if offset + bytes <= self.target.max_segment {
                segments[open].bytes = offset + bytes;
                return Spot { segment: open, offset };
            }
        }
        segments.push(Segment { class: self.class, memory: self.memory, bytes });
        let segment = SegmentIdx::new(segments.len() - 1);
        self.open = Some(segment);
        Spot { segment, offset: 0 }
    }
}

/// Bytes that move between the host and the device, including the padding for alignment.
pub struct TransferBytes {
    pub constants: u64,
    pub states: u64,
    pub inputs: u64,
    pub outputs: u64,
}

impl TransferBytes {
    pub fn new<'a>(buffers: impl Iterator<Item = &'a DraftBuffer> + Clone, target: &Target) -> TransferBytes {
        let aligned = |b: &DraftBuffer| b.bytes.next_multiple_of(target.alignment);
        TransferBytes::of(|class| {
            let own = |b: &&DraftBuffer| b.class == class && !b.is_update();
            buffers.clone().filter(own).map(aligned).sum()
        })
    }

    /// Adds those of another program over the same segments. Programs run one at a time.
    fn add(&mut self, other: &TransferBytes) {
        self.constants += other.constants;
        self.states += other.states;
        self.inputs = self.inputs.max(other.inputs);
        self.outputs = self.outputs.max(other.outputs);
    }

    /// From the bytes of all buffers of a class.
    pub fn of(bytes: impl Fn(Class) -> u64) -> TransferBytes {
        let (constants, states) = (bytes(Class::Constant), bytes(Class::State));
        TransferBytes { constants, states, inputs: bytes(Class::Input), outputs: bytes(Class::Output) }
    }

    /// The staging segments, sized by [`Target::staged`].
    ///
    /// Every run moves all inputs at once, and all outputs. Constants move only once, and states seldom, so they may take up to sixteen
    /// parts rather than a segment of their own size.
    pub fn staging(&self, target: &Target) -> impl Iterator<Item = Segment> + use<> {
        let states = self.states.div_ceil(16);
        let up = self.inputs.max(self.constants.div_ceil(16)).max(states);
        let slots = [(Memory::Upload, up), (Memory::Download, self.outputs.max(states))];
        let slots = slots.map(|(memory, bytes)| Segment { class: Class::Staging, memory, bytes: target.staged(bytes) });
        slots.into_iter().filter(|s| s.bytes > 0)
    }
}

/// The segments that hold no buffers. Those of the CPU: the inputs that are made ready for the next run, with the stack of the thread that does
/// it; then what the backend takes for itself, which is scratch memory of its threads, their stacks and the tables of kernels. That of a CUDA
/// device among others: what NCCL takes.
pub fn own_segments(target: &Target, drafts: &[&Draft]) -> impl Iterator<Item = Segment> + use<> {
    let least = drafts.iter().map(|draft| &draft.least_own);
    let threads = drafts.iter().flat_map(|draft| &draft.own).chain(least.clone()).map(|own| own.thread);
    let thread = threads.max().unwrap_or(0);
    let kernels =
        drafts.iter().flat_map(|draft| draft.kernels.iter().zip(&draft.own)).filter(|(_, own)| own.tables > 0);
    // Equal kernels are compiled once.
    let tables: HashMap<String, u64> = kernels.map(|(kernel, own)| (kernel.key(), own.tables)).collect();
    let tables = tables.values().fold(0, |sum: u64, &bytes| sum.saturating_add(bytes));
    let tables = least.map(|own| own.tables).fold(tables, u64::max);
    let own = target.stack_bytes().saturating_add(tables);
    // Programs take the inputs of one name from one place.
    let ahead: HashMap<&str, u64> =
        drafts.iter().flat_map(|draft| &draft.ahead).map(|(name, bytes)| (&name[..], *bytes)).collect();
    let ahead = if ahead.is_empty() { 0 } else { PREFETCH_STACK + ahead.values().sum::<u64>() };
    let segments = [
        (Class::Staging, Memory::Prefetch, ahead),
        (Class::Backend, Memory::Scratch, thread * u64::from(target.threads)),
        (Class::Backend, Memory::Own, own),
        (Class::Reserve, Memory::Reserve, target.reserve),
    ];
    let segments = segments.map(|(class, memory, bytes)| Segment { class, memory, bytes });
    segments.into_iter().filter(|segment| segment.bytes > 0)
}

/// The sum of the bytes of all segments.
pub fn total(target: &Target, draft: &Draft, layout: &Layout) -> u64 {
    let segments = stack(target, &[(draft, layout)]).0;
    segments.iter().filter(|segment| segment.memory.counts(target.family)).map(|segment| segment.bytes).sum()
}

/// The segments of drafts that share them, and per draft, the segment and offset of each buffer that is used. The drafts run one at a time:
/// the arena is that of the largest. Constants with the same content lie in one place, and so do states of one name.
pub fn stack(target: &Target, drafts: &[(&Draft, &Layout)]) -> (Vec<Segment>, Vec<Vec<Option<Spot>>>) {
    let mut arena: Vec<u64> = Vec::new();
    for (_, layout) in drafts {
        arena.resize(arena.len().max(layout.segments.len()), 0);
        arena.iter_mut().zip(&layout.segments).for_each(|(most, &bytes)| *most = bytes.max(*most));
    }
    let arena = arena.into_iter().filter(|&bytes| bytes > 0);
    let mut segments: Vec<Segment> =
        arena.map(|bytes| Segment { class: Class::Activation, memory: Memory::Device, bytes }).collect();
    let stacks = [Memory::Device, Memory::Pinned]
        .into_iter()
        .flat_map(|memory| Class::ALL.map(|class| Stack { target, class, memory, open: None }));
    let mut stacks: Vec<Stack> = stacks.collect();
    let mut shared = Shared::default();
    let mut moved = TransferBytes { constants: 0, states: 0, inputs: 0, outputs: 0 };
    let mut all = Vec::with_capacity(drafts.len());
    for (draft, layout) in drafts {
        let used = draft.used();
        let known = if drafts.len() > 1 { shared.places(draft) } else { vec![None; draft.buffers.len()] };
        let mut places: Vec<Option<Spot>> = vec![None; draft.buffers.len()];
        let mut new = known.iter().map(Option::is_none).collect::<Vec<_>>();
        for b in BufferIdx::all(&draft.buffers).filter(|&b| used[b]) {
            let buffer = &draft.buffers[b];
            places[b] = match (layout.live.range[b], known[b]) {
                (Some(range), _) => Some(layout.offsets[range]),
                // Placed with its state below.
                (None, _) if buffer.is_update() => None,
                (None, Some(spot)) => Some(spot),
                (None, None) => {
                    let memory = if buffer.offloaded { Memory::Pinned } else { Memory::Device };
                    let stack = stacks.iter_mut().find(|s| (s.class, s.memory) == (buffer.class, memory));
                    let stack = stack.expect("every class has a stack");
                    Some(stack.push(&mut segments, buffer.bytes))
                }
            };
        }
        for b in BufferIdx::all(&draft.buffers).filter(|&b| used[b] && draft.buffers[b].is_update()) {
            places[b] = places[draft.root(b)];
        }
        if drafts.len() > 1 {
            shared.note(draft, &places);
        }
        new.iter_mut().zip(used).for_each(|(new, used)| *new &= used);
        let own = draft.buffers.iter().zip(new).filter(|(_, new)| *new).map(|(buffer, _)| buffer);
        moved.add(&TransferBytes::new(own, target));
        all.push(places);
    }
    segments.extend(moved.staging(target));
    segments.extend(own_segments(target, &drafts.iter().map(|(draft, _)| *draft).collect::<Vec<_>>()));
    (segments, all)
}

/// The places of what drafts share.
#[derive(Default)]
struct Shared<'a> {
    /// By a mark of their content.
    constants: HashMap<String, Vec<(&'a Draft, &'a DraftConstant, Spot)>>,
    /// By name.
    states: HashMap<&'a str, Spot>,
}

impl<'a> Shared<'a> {
    /// Per buffer of a draft, its place if an earlier draft has the same constant or state. No two constants of a draft have one place.
    fn places(&self, draft: &Draft) -> Vec<Option<Spot>> {
        let mut places = vec![None; draft.buffers.len()];
        let mut taken = HashSet::new();
        for constant in &draft.constants {
            let mut alike = self.constants.get(&constant.constant.mark()).into_iter().flatten();
            let is_free = |spot: &Spot| !taken.contains(&(spot.segment, spot.offset));
            let found = alike.find(|(other, own, spot)| is_free(spot) && other.holds_alike(own, draft, constant));
            places[constant.buffer] = found.map(|(.., spot)| *spot);
            taken.extend(found.map(|(.., spot)| (spot.segment, spot.offset)));
        }
        for state in &draft.states {
            places[state.buffer] = self.states.get(draft.buffers[state.buffer].name.as_str()).copied();
        }
        places
    }

    fn note(&mut self, draft: &'a Draft, places: &[Option<Spot>]) {
        for constant in &draft.constants {
            if let Some(spot) = places[constant.buffer.index()] {
                self.constants.entry(constant.constant.mark()).or_default().push((draft, constant, spot));
            }
        }
        for state in &draft.states {
            let spot = places[state.buffer.index()].expect("every state has a place");
            self.states.insert(&draft.buffers[state.buffer].name, spot);
        }
    }
}
