//! What will run, on which bytes: order first, offsets second, all of it known before a device is touched.
//!
//! ```text
//! Graph --lower--> Draft --order--> --lanes--> --live--> --place--> Plan --check
//!         kernels,         step       side by    ranges,   offsets        (knows only the plan)
//!         virtual buffers  order      side       in-place
//! ```

use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::graph::{Constant, Graph, Indexes};
use crate::kernel::Kernel;
use crate::shape::Shape;
use crate::target::{Memory, Target};
use lanes::Lanes;
use live::Live;
use lower::{Draft, DraftBuffer, DraftStep, Options, lower};
use place::{Effort, Item, Problem};
pub use recipe::Recipe;
use serde::{Deserialize, Serialize};
use std::path::Path;
use std::sync::Arc;

pub mod bound;
pub mod check;
pub mod chunks;
pub mod diff;
pub mod lanes;
pub mod live;
pub mod lives;
pub mod lower;
pub mod order;
pub mod peak;
pub mod place;
pub mod range;
mod recipe;
mod spare;

/// The version of the plan's file format.
pub const VERSION: u32 = 1;

/// What a buffer or a segment is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Class {
    /// Written once when the plan is loaded.
    Constant,
    /// Zeros when the plan is loaded, kept from one run to the next and written by steps.
    State,
    /// Written by the caller before each run; no step writes it. In the arena until its last reader has run.
    Input,
    /// Read by the caller after a run. In the arena from its first writer on, until the next run begins.
    Output,
    /// Lives within a run, in the arena.
    Activation,
    /// Scratch memory of one step, in the arena.
    Workspace,
    /// What data passes through between the host and the device; a segment without buffers.
    Staging,
}

impl Class {
    /// Every class.
    pub const ALL: [Class; 7] = [
        Class::Constant,
        Class::State,
        Class::Input,
        Class::Output,
        Class::Activation,
        Class::Workspace,
        Class::Staging,
    ];

    /// The name used in plans and tables.
    pub fn name(self) -> &'static str {
        match self {
            Class::Constant => "constant",
            Class::State => "state",
            Class::Input => "input",
            Class::Output => "output",
            Class::Activation => "activation",
            Class::Workspace => "workspace",
            Class::Staging => "staging",
        }
    }

    /// The class of the segment that holds buffers of this class: what is not there for all of the run shares the activations' arena.
    pub fn segment(self) -> Class {
        match self {
            Class::Workspace | Class::Input | Class::Output => Class::Activation,
            lasting => lasting,
        }
    }

    /// Whether buffers of this class lie in the arena.
    pub fn in_arena(self) -> bool {
        self.segment() == Class::Activation
    }
}

/// One allocation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Segment {
    /// What its buffers are for; [`Class::Activation`] is the arena.
    pub class: Class,
    /// Where it lies: [`Class::Staging`] is visible to the host, all else is the device's.
    #[serde(default, skip_serializing_if = "Memory::is_device")]
    pub memory: Memory,
    /// Size in bytes.
    pub bytes: u64,
}

/// A range of bytes in a segment that holds one tensor for a part of the run. Two buffers may share bytes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Buffer {
    /// The tensor's name.
    pub name: String,
    /// The type in which elements are stored.
    pub dtype: DType,
    /// The tensor's extents.
    pub shape: Shape,
    /// Index of the segment.
    pub segment: usize,
    /// First byte.
    pub offset: u64,
    /// Length in bytes.
    pub bytes: u64,
    /// What it is for.
    pub class: Class,
}

impl Buffer {
    /// Whether both have bytes in common.
    pub fn overlaps(&self, other: &Buffer) -> bool {
        let (start, end) = (self.offset, self.offset + self.bytes);
        self.segment == other.segment && start < other.offset + other.bytes && other.offset < end
    }
}

/// A constant and where its bytes go.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ConstantPort {
    /// Its name in the graph.
    pub name: String,
    /// Its type in the graph (the buffer's may be narrower).
    pub dtype: DType,
    /// Index of the buffer.
    pub buffer: usize,
    /// The kernel and its operand whose packed layout the bytes take, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub packed: Option<(usize, usize)>,
}

/// An input or an output of the graph and its buffer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Port {
    /// Its name in the graph.
    pub name: String,
    /// Its type in the graph (the buffer's may be narrower).
    pub dtype: DType,
    /// Its extents.
    pub shape: Shape,
    /// Index of the buffer.
    pub buffer: usize,
    /// What an input's elements look up, if they do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub indexes: Option<Indexes>,
}

/// The bytes of a buffer that an argument of a step binds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Window {
    /// Bytes from the buffer's start; a multiple of the target's alignment.
    pub offset: u64,
    /// Length in bytes.
    pub bytes: u64,
}

/// A kernel launch. Reads and writes are buffers, never byte ranges: the checker depends on it. Of a buffer that is larger than a binding a
/// step sees a window.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Step {
    /// The node whose result it computes.
    pub name: String,
    /// Index of the kernel.
    pub kernel: usize,
    /// One buffer per operand that the kernel reads.
    pub reads: Vec<usize>,
    /// One buffer per operand that the kernel writes, then its workspace if it has one.
    pub writes: Vec<usize>,
    /// What the step binds, operand by operand: those read, then those written. None where it binds whole buffers.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub windows: Vec<Window>,
    /// Steps of one lane run one after another, those of several lanes side by side.
    #[serde(default, skip_serializing_if = "is_first")]
    pub lane: u32,
    /// Earlier steps of other lanes that must be over before it starts.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub waits: Vec<usize>,
}

fn is_first(lane: &u32) -> bool {
    *lane == 0
}

/// An order of the steps that was tried.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Candidate {
    /// How it was made; `file` is the graph's own.
    pub name: String,
    /// The most bytes of the arena that are live at once: no placement of it can be smaller.
    pub bound: u64,
    /// Bytes of the arena as it was placed. What could not win was placed with the least effort.
    pub peak: u64,
}

impl Candidate {
    const FILE: &str = "file";
    const COPIED: &str = ", parts copied";

    /// Whether the steps run in the order of the file.
    pub fn is_of_the_file(&self) -> bool {
        self.name.strip_suffix(Candidate::COPIED).unwrap_or(&self.name) == Candidate::FILE
    }
}

/// Figures that follow from the plan, kept beside it for readers.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// Bytes of all segments: what will be allocated.
    pub planned_bytes: u64,
    /// Bytes of the arena's segments, which hold the inputs and outputs, too.
    pub arena_bytes: u64,
    /// The largest sum of live bytes over the steps, each buffer rounded up to the alignment: no placement of this order can be smaller.
    /// Or the arena, where its last buffer ends short of that.
    pub lower_bound: u64,
    /// Bytes of the constants' segments.
    pub constant_bytes: u64,
    /// Bytes of the state's segments.
    pub state_bytes: u64,
    /// Bytes of the inputs, each rounded up to the alignment.
    pub input_bytes: u64,
    /// Bytes of the outputs, each rounded up to the alignment.
    pub output_bytes: u64,
    /// Bytes of the staging segments.
    #[serde(default)]
    pub staging_bytes: u64,
    /// What the arena would take with bytes of its own for every buffer.
    pub unshared_bytes: u64,
    /// Number of steps.
    pub steps: usize,
    /// Every order that was tried, one step after another, the file's first. The plan has the first of those with the smallest peak;
    /// steps that run side by side may take more.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub orders: Vec<Candidate>,
}

/// A named dim and its extents.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Dim {
    /// The name in the graph's file.
    pub name: String,
    /// The smallest extent.
    pub least: usize,
    /// The largest extent.
    pub most: usize,
}

/// What will run, on which bytes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// The file format's version.
    pub version: u32,
    /// The graph's name.
    pub name: String,
    /// What was assumed of the device.
    pub target: Target,
    /// Named dims that the plan was made for: a range each, of which the plan shows the largest, or one extent of such a range.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub dims: Vec<Dim>,
    /// Figures that follow from the rest.
    pub summary: Summary,
    /// Allocations.
    pub segments: Vec<Segment>,
    /// Ranges of them.
    pub buffers: Vec<Buffer>,
    /// Constants, written at load.
    pub constants: Vec<ConstantPort>,
    /// State, kept between runs.
    pub state: Vec<Port>,
    /// Inputs of the graph.
    pub inputs: Vec<Port>,
    /// Outputs of the graph.
    pub outputs: Vec<Port>,
    /// Kernels, each once.
    pub kernels: Vec<Kernel>,
    /// Launches in order.
    pub steps: Vec<Step>,
}

impl Plan {
    /// Bytes that will be allocated, all classes together.
    pub fn bytes(&self) -> u64 {
        self.segments.iter().map(|s| s.bytes).sum()
    }

    /// Bytes of the segments of one class.
    pub fn class_bytes(&self, class: Class) -> u64 {
        self.segments.iter().filter(|s| s.class == class).map(|s| s.bytes).sum()
    }

    /// Bytes of the buffers of one class, each rounded up to the alignment; where they share bytes, those count for each of them.
    pub fn buffer_bytes(&self, class: Class) -> u64 {
        let aligned = |b: &Buffer| b.bytes.next_multiple_of(self.target.alignment);
        self.buffers.iter().filter(|b| b.class == class).map(aligned).sum()
    }

    /// Whether a step may write where an input lay: then inputs are written anew before each run.
    pub fn consumes_inputs(&self) -> bool {
        let inputs: Vec<_> = self.inputs.iter().map(|port| &self.buffers[port.buffer]).collect();
        let written = self.steps.iter().flat_map(|step| &step.writes);
        written.map(|&b| &self.buffers[b]).any(|b| inputs.iter().any(|input| input.overlaps(b)))
    }

    /// The plan as JSON, the same on every machine.
    pub fn to_json(&self) -> String {
        let mut text = serde_json::to_string_pretty(self).expect("a plan has only finite numbers and text keys");
        text.push('\n');
        text
    }

    /// A plan from JSON, checked.
    ///
    /// # Errors
    /// When the text is not a plan, is of another version, or breaks a rule of [`check::check`].
    pub fn from_json(text: &str, path: &Path) -> Result<Plan> {
        let syntax = |e| Error::json(path, &e);
        let head: serde_json::Value = serde_json::from_str(text).map_err(syntax)?;
        match head.get("version").and_then(serde_json::Value::as_u64) {
            Some(v) if v == u64::from(VERSION) => {}
            Some(v) => return Err(Error::Plan(format!("expected version {VERSION}, found {v}")).in_file(path)),
            None => return Err(Error::Plan("not a plan: it has no version".into()).in_file(path)),
        }
        let plan: Plan = serde_json::from_str(text).map_err(syntax)?;
        check::check(&plan).map_err(|e| e.in_file(path))?;
        Ok(plan)
    }
}

/// A plan and the data of its constants: one entry per entry of [`Plan::constants`].
pub type Compiled = (Plan, Vec<Arc<Constant>>);

/// What a plan must keep to.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// The most bytes the plan may take, all segments together.
    pub memory: Option<u64>,
}

impl Limits {
    fn check(&self, plan: &Plan) -> Result<()> {
        match self.memory {
            Some(limit) if plan.bytes() > limit => {
                let what = format!("the plan of '{}'", plan.name);
                Err(Error::Fit { what, needed: plan.bytes(), limit })
            }
            _ => Ok(()),
        }
    }
}

/// Plans a graph that a [`Recipe`] made: exact bytes, before any device is touched.
///
/// Several orders are placed; the smallest arena wins, the file's order among equals. Parts of concatenations are copied only where that
/// saves enough, or where the plan would not fit without. On a target with lanes its steps are then spread over them, as long as that
/// costs little and the limit holds.
///
/// # Errors
/// [`Error::Fit`] when the plan exceeds the limit; [`Error::Usage`] when a tensor is larger than the target's segments, or larger than its
/// bindings where a kernel needs all of it at once, or the target lacks its type.
pub fn plan(graph: &Graph, target: &Target, limits: &Limits) -> Result<Plan> {
    Ok(compile(graph, target, limits)?.0)
}

/// As [`plan`], with the data of the plan's constants.
///
/// # Errors
/// As [`plan`].
pub fn compile(graph: &Graph, target: &Target, limits: &Limits) -> Result<Compiled> {
    let found = arrange(target, limits, |options| draft(graph, target, options))?;
    let same: Vec<usize> = (0..found.draft.buffers.len()).collect();
    let (plan, constants) = assemble(graph, target, &found, &found.draft, &same)?;
    check::check(&plan)?;
    limits.check(&plan)?;
    Ok((plan, constants))
}

/// A draft that is ready to be ordered. Library calls have the least workspaces that they run with.
fn draft(graph: &Graph, target: &Target, options: Options) -> Result<Draft> {
    let mut draft = lower(graph, target, options)?;
    spare::shrink(&mut draft, target);
    Ok(draft)
}

/// A draft with all that is decided of it: order, segments, offsets.
struct Arrangement {
    draft: Draft,
    options: Options,
    layout: Layout,
    orders: Vec<Candidate>,
    segments: Vec<Segment>,
    /// Per buffer of the draft, segment and offset; `None` for what nothing uses.
    places: Vec<Option<(usize, u64)>>,
}

/// Decides which of the drafts to plan, and where everything of it goes.
fn arrange(target: &Target, limits: &Limits, draft: impl FnMut(Options) -> Result<Draft>) -> Result<Arrangement> {
    let (mut draft, options, mut layout, mut orders) = best_order(target, limits, draft)?;
    if let Some(wide) = widen(&draft, target, &layout)? {
        let bytes = |layout| total(target, &draft, layout);
        // Where neither fits, the smaller one tells by how much.
        if limits.memory.is_none_or(|limit| bytes(&wide) <= limit.max(bytes(&layout))) {
            layout = wide;
        }
    }
    let before = layout.peak;
    spare::grow(&mut draft, &mut layout, target);
    if let Some(order) = orders.iter_mut().find(|order| order.peak == before) {
        order.peak = layout.peak;
        order.bound = order.bound.min(layout.peak);
    }
    let (segments, places) = stack(target, &draft, &layout);
    Ok(Arrangement { draft, options, layout, orders, segments, places })
}

/// The lowerings that may become the plan.
fn drafts(mut draft: impl FnMut(Options) -> Result<Draft>) -> Result<Vec<Draft>> {
    let joined = draft(Options { join: true })?;
    if !joined.concatenates {
        return Ok(vec![joined]);
    }
    Ok(vec![joined, draft(Options { join: false })?])
}

/// Copies of parts into concatenations take time: they are made only where they save more than one in this many bytes of the plan, or
/// where it would not fit without.
const COPIES_SAVE: u64 = 64;

/// The order with the smallest arena, the file's among equals, in the lowering that is worth it; and the orders that were tried of that,
/// behind the file's.
fn best_order(
    target: &Target,
    limits: &Limits,
    draft: impl FnMut(Options) -> Result<Draft>,
) -> Result<(Draft, Options, Layout, Vec<Candidate>)> {
    let mut best: Option<(Draft, Options, Layout, Vec<Candidate>)> = None;
    for (join, draft) in [true, false].into_iter().zip(drafts(draft)?) {
        check_sizes(&draft, target)?;
        let bar = best.as_ref().map_or(u64::MAX, |(joined, _, layout, _)| {
            let bytes = total(target, joined, layout);
            let fits = limits.memory.is_none_or(|limit| bytes <= limit);
            layout.peak.saturating_sub(if fits { bytes / COPIES_SAVE } else { 0 })
        });
        if let Some((layout, mut orders)) = best_of(target, &draft, bar)? {
            if let Some((_, _, _, joined)) = &best {
                orders.iter_mut().for_each(|order| order.name += Candidate::COPIED);
                orders.insert(0, joined[0].clone());
            }
            best = Some((draft, Options { join }, layout, orders));
        }
    }
    Ok(best.expect("any arena is below the first bar"))
}

/// The order of a draft with the smallest arena below `bar`, the file's among equals, and all that were tried.
fn best_of(target: &Target, draft: &Draft, bar: u64) -> Result<Option<(Layout, Vec<Candidate>)>> {
    let tries = order::orders(draft, target.alignment);
    let candidate = |order: &order::Order| Candidate { name: order.name.clone(), bound: order.bound, peak: u64::MAX };
    let mut orders: Vec<Candidate> = tries.iter().map(candidate).collect();
    // A low bound first: what is placed within it leaves little for others to win.
    let mut turns: Vec<usize> = (0..tries.len()).collect();
    turns.sort_by_key(|&at| (tries[at].bound, at));
    let mut best: Option<(usize, Layout)> = None;
    for at in turns {
        let bar = best.as_ref().map_or(bar, |(holder, best)| best.peak.saturating_add(u64::from(at < *holder)));
        let layout = layout(draft, target, &tries[at].steps, 1, bar)?;
        orders[at].peak = layout.peak;
        orders[at].bound = layout.bound.min(layout.peak);
        if layout.peak < bar {
            best = Some((at, layout));
        }
    }
    Ok(best.map(|(_, layout)| (layout, orders)))
}

/// For steps to run side by side, an arena may become larger by a quarter, by a thirty-second of the constants, or by this many bytes,
/// which no device is short of.
const LANES_COST: u64 = 1 << 20;

/// The same order or the file's in as many lanes as the target runs, or in fewer, if they take little more memory: none, where the graph
/// spares it.
fn widen(draft: &Draft, target: &Target, layout: &Layout) -> Result<Option<Layout>> {
    let constants: u64 = draft.constants.iter().map(|c| draft.buffers[c.buffer].bytes).sum();
    let most = if draft.sparing { 0 } else { LANES_COST.max(layout.peak / 4).max(constants / 32) };
    let bar = layout.peak.saturating_add(most).saturating_add(1);
    let file: Vec<usize> = (0..draft.steps.len()).collect();
    let mut lanes = target.lanes as usize;
    while lanes > 1 {
        let mut best: Option<Layout> = None;
        for order in [&file, &layout.order] {
            let bar = best.as_ref().map_or(bar, |best| best.peak);
            let wide = self::layout(draft, target, order, lanes, bar)?;
            if wide.peak < bar && wide.lanes.used() > 1 {
                best = Some(wide);
            }
            if layout.order == file {
                break;
            }
        }
        if best.is_some() {
            return Ok(best);
        }
        lanes /= 2;
    }
    Ok(None)
}

/// An order and the offsets it leads to.
struct Layout {
    order: Vec<usize>,
    lanes: Lanes,
    live: Live,
    /// Per range: segment of the arena, offset in it.
    offsets: Vec<(usize, u64)>,
    /// Bytes of each segment of the arena.
    segments: Vec<u64>,
    bound: u64,
    peak: u64,
}

/// Refuses what no segment holds, and sizes whose sum cannot be counted: nothing that is added up later is more.
fn check_sizes(draft: &Draft, target: &Target) -> Result<()> {
    let mut sum = 0u64;
    for b in &draft.buffers {
        let padded = b.bytes.checked_next_multiple_of(target.alignment);
        let next = padded.and_then(|bytes| sum.checked_add(bytes)).filter(|&sum| sum <= i64::MAX as u64);
        sum = next.ok_or_else(|| {
            let (name, dtype, shape) = (&b.name, b.dtype, &b.shape);
            Error::Usage(format!("tensor '{name}' ({dtype}{shape}): the sum of all sizes is beyond 63 bits"))
        })?;
    }
    match draft.buffers.iter().find(|b| b.bytes > target.max_segment) {
        Some(b) => Err(Error::Usage(format!(
            "tensor '{}' ({}{}) takes {} bytes; target '{}' allocates at most {} at once",
            b.name, b.dtype, b.shape, b.bytes, target.name, target.max_segment
        ))),
        None => Ok(()),
    }
}

/// Places an order, with little effort where its bound says that it cannot come below `bar`.
fn layout(draft: &Draft, target: &Target, order: &[usize], lanes: usize, bar: u64) -> Result<Layout> {
    let lanes = Lanes::new(draft, order, lanes);
    let live = live::live(draft, order, &lanes);
    let items = live.ranges.iter().map(|r| Item {
        lower: r.lower as u64,
        upper: r.upper as u64,
        size: r.bytes,
        align: target.alignment,
    });
    let problem = Problem::new(items.collect(), target.alignment)?;
    let bound = problem.lower_bound();
    let effort = if bound < bar { Effort::PLAN } else { Effort::Steps(0) };
    // The peak of one of several segments says nothing about their sum.
    let bar = if bar <= target.max_segment { bar } else { u64::MAX };
    let mut offsets = vec![(0, 0); live.ranges.len()];
    let mut segments = Vec::new();
    let mut rest: Vec<usize> = (0..live.ranges.len()).collect();
    while !rest.is_empty() {
        // What reaches beyond the largest segment goes to the next one.
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
                offsets[range] = (segments.len(), offset);
                bytes = bytes.max(end);
            }
        }
        segments.push(bytes);
        rest = beyond;
    }
    let peak = segments.iter().sum();
    Ok(Layout { order: order.to_vec(), lanes, live, offsets, segments, bound, peak })
}

/// Lays buffers one after another into segments of one class.
struct Stack<'a> {
    target: &'a Target,
    class: Class,
    open: Option<usize>,
}

impl Stack<'_> {
    fn push(&mut self, segments: &mut Vec<Segment>, bytes: u64) -> (usize, u64) {
        if let Some(open) = self.open {
            let offset = segments[open].bytes.next_multiple_of(self.target.alignment);
            if offset + bytes <= self.target.max_segment {
                segments[open].bytes = offset + bytes;
                return (open, offset);
            }
        }
        segments.push(Segment { class: self.class, memory: Memory::Device, bytes });
        self.open = Some(segments.len() - 1);
        (segments.len() - 1, 0)
    }
}

/// Bytes that move between the host and the device, with what alignment puts between them.
pub(crate) struct Moved {
    pub constants: u64,
    pub inputs: u64,
    pub outputs: u64,
}

impl Moved {
    fn new<'a>(buffers: impl Iterator<Item = &'a DraftBuffer> + Clone, target: &Target) -> Moved {
        let aligned = |b: &DraftBuffer| b.bytes.next_multiple_of(target.alignment);
        let bytes = |class| buffers.clone().filter(|b| b.class == class).map(aligned).sum();
        Moved { constants: bytes(Class::Constant), inputs: bytes(Class::Input), outputs: bytes(Class::Output) }
    }

    /// The segments through which they pass, as [`Target::staged`] has it. All inputs, and all outputs, move at once: that is done in
    /// every run. Constants move once, in sixteen parts if the inputs' segment is no larger: for that it is not worth doubling them.
    pub fn staging(&self, target: &Target) -> impl Iterator<Item = Segment> + use<> {
        let slots = [(Memory::Upload, self.inputs.max(self.constants.div_ceil(16))), (Memory::Download, self.outputs)];
        let slots = slots.map(|(memory, bytes)| Segment { class: Class::Staging, memory, bytes: target.staged(bytes) });
        slots.into_iter().filter(|s| s.bytes > 0)
    }
}

/// The bytes of all segments.
fn total(target: &Target, draft: &Draft, layout: &Layout) -> u64 {
    stack(target, draft, layout).0.iter().map(|segment| segment.bytes).sum()
}

/// Segments, and where in them each buffer lies that is used.
fn stack(target: &Target, draft: &Draft, layout: &Layout) -> (Vec<Segment>, Vec<Option<(usize, u64)>>) {
    let used = draft.used();
    let mut segments: Vec<Segment> = Vec::new();
    let arena =
        layout.segments.iter().map(|&bytes| Segment { class: Class::Activation, memory: Memory::Device, bytes });
    segments.extend(arena.filter(|s| s.bytes > 0));
    let stack = |class| Stack { target, class, open: None };
    let mut stacks = Class::ALL.map(stack);
    let places = draft.buffers.iter().zip(&used).enumerate().map(|(b, (buffer, used))| {
        let place = || match layout.live.range[b] {
            Some(range) => layout.offsets[range],
            None => {
                let stack = stacks.iter_mut().find(|s| s.class == buffer.class).expect("every class has a stack");
                stack.push(&mut segments, buffer.bytes)
            }
        };
        used.then(place)
    });
    let places = places.collect();
    let there = draft.buffers.iter().zip(used).filter(|(_, used)| *used).map(|(buffer, _)| buffer);
    segments.extend(Moved::new(there, target).staging(target));
    (segments, places)
}

/// The plan of a draft whose buffers lie where those of an arrangement do: `whole` gives each buffer's number there. With the data of the
/// plan's constants.
///
/// # Errors
/// When the sizes cannot be counted.
fn assemble(
    graph: &Graph,
    target: &Target,
    arrangement: &Arrangement,
    draft: &Draft,
    whole: &[usize],
) -> Result<(Plan, Vec<Arc<Constant>>)> {
    let Arrangement { layout, orders, segments, places, .. } = arrangement;
    let used = draft.used();
    let mut number = vec![usize::MAX; draft.buffers.len()];
    let mut buffers = Vec::new();
    for (b, buffer) in draft.buffers.iter().enumerate().filter(|(b, _)| used[*b]) {
        let (segment, offset) = places[whole[b]].expect("what a draft uses has its place");
        number[b] = buffers.len();
        let DraftBuffer { name, dtype, shape, bytes, class } = buffer.clone();
        buffers.push(Buffer { name, dtype, shape, segment, offset, bytes, class });
    }
    let port = |name: &str, value, buffer: usize| {
        let fact = graph.fact(value);
        let indexes = graph.indexes(value).cloned();
        Port { name: name.to_owned(), dtype: fact.dtype, shape: fact.shape.clone(), buffer: number[buffer], indexes }
    };
    let inputs: Vec<_> = draft.inputs.iter().map(|&(v, b)| port(graph.value_name(v), v, b)).collect();
    let outputs: Vec<_> = draft.outputs.iter().map(|(name, v, b)| port(name, *v, *b)).collect();
    let kept = || draft.constants.iter().filter(|c| used[c.buffer]);
    let data = kept().map(|c| c.constant.clone()).collect();
    let constants = kept().map(|c| ConstantPort {
        name: c.constant.name.clone(),
        dtype: c.constant.fact.dtype,
        buffer: number[c.buffer],
        packed: c.packed,
    });
    let constants: Vec<_> = constants.collect();
    let steps = layout.order.iter().enumerate().map(|(at, &s)| {
        let step = &draft.steps[s];
        let renumber = |list: &[usize]| list.iter().map(|&b| number[b]).collect();
        Step {
            name: step.name.clone(),
            kernel: step.kernel,
            reads: renumber(&step.reads),
            writes: renumber(&step.writes),
            windows: step.windows.clone(),
            lane: layout.lanes.lane[at],
            waits: layout.lanes.waits[at].clone(),
        }
    });
    let mut plan = Plan {
        version: VERSION,
        name: graph.name.clone(),
        target: target.clone(),
        dims: Vec::new(),
        summary: Summary::default(),
        steps: steps.collect(),
        segments: segments.clone(),
        buffers,
        constants,
        state: Vec::new(),
        inputs,
        outputs,
        kernels: draft.kernels.clone(),
    };
    let aligned = |b: &Buffer| b.bytes.next_multiple_of(target.alignment);
    plan.summary = Summary {
        planned_bytes: plan.bytes(),
        arena_bytes: plan.class_bytes(Class::Activation),
        lower_bound: bound(layout, draft, whole, target)?.min(plan.class_bytes(Class::Activation)),
        constant_bytes: plan.class_bytes(Class::Constant),
        state_bytes: plan.class_bytes(Class::State),
        input_bytes: plan.buffer_bytes(Class::Input),
        output_bytes: plan.buffer_bytes(Class::Output),
        staging_bytes: plan.class_bytes(Class::Staging),
        unshared_bytes: plan.buffers.iter().filter(|b| b.class.in_arena()).map(aligned).sum(),
        steps: plan.steps.len(),
        orders: orders.clone(),
    };
    Ok((plan, data))
}

/// The largest sum of live bytes over the steps of a draft that runs in a layout, which may have been made for larger sizes and for further
/// uses of its buffers.
fn bound(layout: &Layout, draft: &Draft, whole: &[usize], target: &Target) -> Result<u64> {
    let mut items = Vec::new();
    // Per range, the buffer that holds it and the last step that used it.
    let mut held: Vec<Option<(usize, usize, Item)>> = vec![None; layout.live.ranges.len()];
    let align = target.alignment;
    for (b, buffer) in draft.buffers.iter().enumerate().filter(|(_, b)| b.class == Class::Input) {
        if let Some(range) = layout.live.range[whole[b]] {
            held[range] = Some((b, 0, Item { lower: 0, upper: 1, size: buffer.bytes, align }));
        }
    }
    for (at, &s) in layout.order.iter().enumerate() {
        let (from, to) = (layout.lanes.earliest(at) as u64, layout.lanes.latest(at) as u64 + 1);
        let DraftStep { reads, writes, kernel, .. } = &draft.steps[s];
        for &b in reads.iter().chain(writes) {
            let Some(range) = layout.live.range[whole[b]] else { continue };
            // Of a library call's workspace counts what it cannot do without.
            let size = match draft.buffers[b].class {
                Class::Workspace => crate::kernel::layout::workspace(&draft.kernels[*kernel], target),
                _ => draft.buffers[b].bytes,
            };
            let to = if draft.buffers[b].class == Class::Output { layout.order.len() as u64 } else { to };
            let new = Item { lower: from, upper: to, size, align };
            let item = match held[range].take() {
                // The same buffer, or one that takes the bytes of what this step reads.
                Some((other, last, item)) if other == b || last == at && item.size == size => {
                    Item { lower: item.lower.min(from), upper: item.upper.max(to), ..item }
                }
                other => {
                    items.extend(other.map(|(.., item)| item));
                    new
                }
            };
            held[range] = Some((b, at, item));
        }
    }
    items.extend(held.into_iter().flatten().map(|(.., item)| item));
    Ok(Problem::new(items, target.alignment)?.lower_bound())
}
