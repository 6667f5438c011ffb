//! Plans: the steps that run and the bytes that they use. The order comes first, then the offsets. All is known before a device is used.
//!
//! ```text
//! Graph --fit--> Prepared --lower--> Draft --make--> Plan --check
//!     passes,            kernels,          order, streams,   (knows only the plan)
//!     chunks             virtual buffers   offsets
//! ```
//!
//! A [`Job`] is all that is asked, and [`plan()`] makes its plan. [`make`] tries lowerings, orders and streams, and writes the plan of the best;
//! [`range`] does so for a range of shapes. [`tell`] says what a finished plan holds.

// Its own modules, and those of the members below, by their names.
pub(crate) use plimsoll_core::{
    constant, decisions, dtype, elements, error, expr, figures, file, kernel, mesh, op, ops, parallel, shape, table,
    target,
};
pub(crate) use plimsoll_graph::{graph, onnx, pass};
use plimsoll_place as place;

mod backend {
    pub use plimsoll_backend::Usage;
    pub use plimsoll_cpu as cpu;
}

use crate::constant::Constant;
use crate::dtype::DType;
use crate::error::{Error, Result};
pub use crate::graph::{Count, Counted, Fewest};
use crate::kernel::Kernel;
pub use crate::mesh::Mesh;
use crate::pass::recompute::Recompute;
pub use crate::pass::shard::{Kept, Rule, Shard, Sharding};
pub use crate::pass::{Indexes, Prefer, Recipe, Use};
use crate::shape::Shape;
use crate::target::{Memory, Target};
pub use index::{BufferIdx, KernelIdx, SegmentIdx, Spot, StepIdx};
pub use job::{Graphs, Job, Planned, Planner, Planning, compile, compiled, of_all_ranks, plan, planned};
pub use make::offsets::{TransferBytes, own_segments};
pub use make::rebind::data;
pub use origin::{Model, Origin};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::ops::Deref;
use std::path::Path;
use std::sync::Arc;

pub mod check;
pub mod fit;
pub mod index;
pub mod job;
pub mod lower;
pub mod make;
mod origin;
pub mod range;
pub mod tell;

/// The version of the plan's file format.
pub const VERSION: u32 = 3;

/// The most runs at once of a plan.
pub const MOST_RUNS: u32 = 1 << 16;

/// The purpose of a buffer or a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Class {
    /// Written once when the plan is loaded.
    Constant,
    /// Written when the plan is loaded, kept from one run to the next and written by steps.
    State,
    /// Written by the caller before each run; no step writes it. In the arena until its last reader has run.
    Input,
    /// Read by the caller after a run. In the arena from its first writer on, until the next run begins.
    Output,
    /// Lives within a run, in the arena.
    Activation,
    /// Scratch memory of one step, in the arena.
    Workspace,
    /// Memory through which data passes between the host and the device. A segment without buffers.
    Staging,
    /// Memory that the backend takes for itself: scratch memory of its threads, their stacks, tables of kernels. A segment without buffers.
    Backend,
    /// Memory that NCCL takes when ranks join. A segment without buffers.
    Reserve,
}

impl Class {
    /// Every class.
    pub const ALL: [Class; 9] = [
        Class::Constant,
        Class::State,
        Class::Input,
        Class::Output,
        Class::Activation,
        Class::Workspace,
        Class::Staging,
        Class::Backend,
        Class::Reserve,
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
            Class::Backend => "backend",
            Class::Reserve => "reserve",
        }
    }

    /// The class of the segment that holds buffers of this class. Classes that do not last for the whole run share the activations' arena.
    pub fn segment(self) -> Class {
        match self {
            Class::Workspace | Class::Input | Class::Output => Class::Activation,
            lasting => lasting,
        }
    }

    /// True if buffers of this class lie in the arena.
    pub fn in_arena(self) -> bool {
        self.segment() == Class::Activation
    }
}

/// One allocation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Segment {
    /// The class of its buffers; [`Class::Activation`] is the arena.
    pub class: Class,
    /// The kind of its memory. That of [`Class::Staging`] is visible to the host, that of [`Class::Backend`] is the host's, and all other
    /// segments are the device's. That of [`Class::Reserve`] is NCCL's.
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
    pub segment: SegmentIdx,
    /// First byte.
    pub offset: u64,
    /// Length in bytes.
    pub bytes: u64,
    /// The class of its data.
    pub class: Class,
}

impl Buffer {
    /// The buffer's first byte.
    pub fn spot(&self) -> Spot {
        Spot { segment: self.segment, offset: self.offset }
    }

    /// True if both have bytes in common.
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
    pub buffer: BufferIdx,
    /// The kernel and its operand whose packed layout the bytes take, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub packed: Option<(KernelIdx, usize)>,
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
    pub buffer: BufferIdx,
    /// True if elements of less than 8 bits share the buffer's bytes.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub packed: bool,
    /// The allowed elements of an input or a state, if they are indices or lengths.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub indexes: Vec<Indexes>,
    /// The axes of an output along which a run fills the first elements.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub counted: Vec<Counted>,
    /// Of an output that says how many elements a node finds: the fewest that the plan is for, if it is not for none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fewest: Option<Fewest>,
}

impl Port {
    /// The type in which the elements are stored, in a buffer of this type.
    pub fn stored(&self, buffer: DType) -> DType {
        if self.packed { self.dtype } else { buffer }
    }

    /// True if the device stores the caller's bytes as they are.
    pub fn is_stored_as(&self, stored: DType) -> bool {
        stored == self.dtype && !self.packed
    }

    /// The name, and the axes along which a run fills the first elements.
    pub fn room(&self) -> (&str, &[Counted]) {
        (&self.name, &self.counted)
    }
}

/// A state and its buffers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StatePort {
    /// Its name, type and extents, and the buffer with the elements from before the run.
    #[serde(flatten)]
    pub port: Port,
    /// The buffer with the elements from after the run, at the same bytes. If there is none, the state stays as it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub update: Option<BufferIdx>,
    /// True if its elements before the first run are given; else they are zeros.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub given: bool,
    /// If the state counts: what each run adds, and the most that it may hold.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub count: Option<Count>,
}

/// The bytes of a buffer that an argument of a step binds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct BindRange {
    /// Bytes from the buffer's start; a multiple of the target's alignment.
    pub offset: u64,
    /// Length in bytes.
    pub bytes: u64,
}

/// A kernel launch. Reads and writes are buffers, never byte ranges, because the checker depends on it. If a buffer is larger than a
/// binding, the step binds a range of it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Step {
    /// The node whose result it computes.
    pub name: String,
    /// Index of the kernel.
    pub kernel: KernelIdx,
    /// One buffer per operand that the kernel reads.
    pub reads: Vec<BufferIdx>,
    /// One buffer per operand that the kernel writes, then its workspace if it has one.
    pub writes: Vec<BufferIdx>,
    /// The range that each operand binds: of those read, then of those written. Empty if the step binds whole buffers.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub bind_ranges: Vec<BindRange>,
    /// Its stream. Steps of one stream run one after another, steps of different streams side by side.
    #[serde(default, skip_serializing_if = "is_first")]
    pub stream: u32,
    /// Earlier steps of other streams that must be over before it starts.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub waits: Vec<StepIdx>,
}

fn is_none(bytes: &u64) -> bool {
    *bytes == 0
}

fn is_first(stream: &u32) -> bool {
    *stream == 0
}

/// An order of the steps that was tried.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Candidate {
    /// The name of the method that made it; `file` is the graph's own order.
    pub name: String,
    /// The most bytes of the arena that are live at once. No placement of this order can be smaller.
    pub bound: u64,
    /// Bytes of the arena as it was placed. An order that could not win was placed with the least effort.
    pub peak: u64,
}

impl Candidate {
    const FILE: &str = "file";
    const COPIED: &str = ", parts copied";

    /// True if the steps run in the order of the file.
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
    /// The largest sum of live bytes over the steps, each buffer rounded up to the alignment. No placement of this order can be smaller.
    /// If the arena is smaller than that, because its last buffer is not rounded up, this is the arena.
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
    /// Bytes of the segments that the backend takes for itself.
    #[serde(default, skip_serializing_if = "is_none")]
    pub backend_bytes: u64,
    /// Bytes that are left to NCCL.
    #[serde(default, skip_serializing_if = "is_none")]
    pub reserve_bytes: u64,
    /// Bytes of the arena if no buffers of the program shared bytes.
    pub unshared_bytes: u64,
    /// Number of steps.
    pub steps: usize,
    /// Every order that was tried with one step after another, the file's first. The plan has the first of those with the smallest peak.
    /// Steps that run side by side may take more.
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

/// A program: steps that run one after another or side by side, on buffers in the segments of its plan.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Program {
    /// Its name. A plan of one graph has the graph's.
    pub name: String,
    /// The name of its graph, if it has another.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub graph: Option<String>,
    /// Named dims that it was made for. Each has a range, of which the program shows the largest extent, or one extent of such a range.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub dims: Vec<Dim>,
    /// Number of steps whose schedule was measured.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub measured: usize,
    /// The work of values that are computed again for a backward computation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recompute: Option<Recompute>,
    /// Inputs, constants and states of which each rank has a part.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub shards: Vec<Shard>,
    /// Figures that follow from the program and from the plan's segments.
    pub summary: Summary,
    /// Ranges of bytes in the plan's segments.
    pub buffers: Vec<Buffer>,
    /// Constants, written at load. Those that programs share are at the same bytes.
    pub constants: Vec<ConstantPort>,
    /// State, kept between runs. Programs that have a state of one name share it.
    pub state: Vec<StatePort>,
    /// Inputs of the graph.
    pub inputs: Vec<Port>,
    /// Outputs of the graph.
    pub outputs: Vec<Port>,
    /// Kernels, each once.
    pub kernels: Vec<Kernel>,
    /// Launches in order.
    pub steps: Vec<Step>,
}

/// The reason of a choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Because {
    /// The plan would not fit its limit without.
    Limit,
    /// It takes less memory.
    Memory,
    /// It takes less time.
    Speed,
    /// The caller asked for it.
    Asked,
}

impl Because {
    /// The reason in words.
    pub fn words(self) -> &'static str {
        match self {
            Because::Limit => "to fit the limit",
            Because::Memory => "to take less memory",
            Because::Speed => "to take less time",
            Because::Asked => "as asked",
        }
    }
}

/// A choice that planning made between memory and speed, beside the plan without it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Knob {
    /// The program, if the plan has several and the choice is one's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub program: Option<String>,
    /// What was chosen, such as `4 streams`.
    pub what: String,
    /// The bytes that it cost in one run, and of one program if it is that one's own, beside its plan without the choice; below 0, those that
    /// it saved. Programs share the arena of the largest.
    pub bytes: i64,
    /// The reason.
    pub because: Because,
}

impl Knob {
    /// A choice of a plan's only program, or of all.
    pub(crate) fn new(what: impl Into<String>, bytes: i64, because: Because) -> Knob {
        Knob { program: None, what: what.into(), bytes, because }
    }
}

/// A plan: programs, and the bytes that they share. Programs run one at a time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// The file format's version.
    pub version: u32,
    /// The device that the plan was made for.
    pub target: Target,
    /// The device on which schedules of this plan were measured, if any were.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tuned: Option<String>,
    /// Runs at once. They share the constants; each has all other segments for itself.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub runs: u32,
    /// The files that it was made of, if a session is to load it again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub origin: Option<Origin>,
    /// The ranks that it is for, all but for what their data are: each runs this plan.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mesh: Option<Mesh>,
    /// The stage of the mesh that it computes.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub stage: usize,
    /// Allocations.
    pub segments: Vec<Segment>,
    /// The programs: at least one.
    pub programs: Vec<Program>,
    /// The choices between memory and speed, with what each cost or saved.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub choices: Vec<Knob>,
}

/// A program of a plan, with what it shares with the others.
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    /// The plan.
    pub plan: &'a Plan,
    /// The program, whose fields a view has, too.
    pub program: &'a Program,
    /// The device that the plan was made for.
    pub target: &'a Target,
    /// The plan's allocations.
    pub segments: &'a [Segment],
}

impl Deref for View<'_> {
    type Target = Program;

    fn deref(&self) -> &Program {
        self.program
    }
}

fn one() -> u32 {
    1
}

#[allow(clippy::trivially_copy_pass_by_ref)]
fn is_one(number: &u32) -> bool {
    *number == 1
}

#[allow(clippy::trivially_copy_pass_by_ref)]
fn is_zero(number: &usize) -> bool {
    *number == 0
}

impl Program {
    /// The name of its graph.
    pub fn graph_name(&self) -> &str {
        self.graph.as_ref().unwrap_or(&self.name)
    }

    /// This program under a name of its own.
    pub(crate) fn named(self, name: String) -> Program {
        if name == self.name { self } else { Program { graph: Some(self.name), name, ..self } }
    }

    /// The shape of the whole of an input or a state, of which each rank of a mesh has a part of this shape.
    pub fn whole(&self, mesh: &Mesh, name: &str, part: &Shape) -> Shape {
        let mut whole = part.clone();
        for shard in self.shards.iter().filter(|shard| shard.name == name) {
            let axis = mesh.axes().iter().find(|axis| axis.name == shard.axis);
            whole[shard.dim] *= axis.map_or(1, |axis| axis.ranks);
        }
        whole
    }

    /// True if a step may overwrite an input's bytes. Inputs must then be written again before each run.
    pub fn consumes_inputs(&self) -> bool {
        let inputs: Vec<_> = self.inputs.iter().map(|port| &self.buffers[port.buffer]).collect();
        let written = self.steps.iter().flat_map(|step| &step.writes);
        written.map(|&b| &self.buffers[b]).any(|b| inputs.iter().any(|input| input.overlaps(b)))
    }
}

impl View<'_> {
    /// The plan with this program alone, in the same segments.
    pub fn alone(&self) -> Plan {
        Plan { programs: vec![self.program.clone()], choices: self.choices().cloned().collect(), ..self.plan.clone() }
    }

    /// The choices of the program, and of all programs together.
    pub fn choices(&self) -> impl Iterator<Item = &Knob> {
        self.plan.choices.iter().filter(|knob| knob.program.as_ref().is_none_or(|name| *name == self.name))
    }

    /// As [`Plan::bytes`].
    pub fn bytes(&self) -> u64 {
        self.plan.bytes()
    }

    /// As [`Plan::class_bytes`].
    pub fn class_bytes(&self, class: Class) -> u64 {
        self.plan.class_bytes(class)
    }

    /// Bytes of the buffers of one class, each rounded up to the alignment. Bytes that buffers share count for each of them.
    pub fn buffer_bytes(&self, class: Class) -> u64 {
        let aligned = |b: &Buffer| b.bytes.next_multiple_of(self.target.alignment);
        self.buffers.iter().filter(|b| b.class == class).map(aligned).sum()
    }

    /// The algorithm of each step, in words.
    pub fn algorithms(&self) -> Vec<String> {
        let kernels: Vec<String> = self.kernels.iter().map(|k| k.schedule.words(k, self.target)).collect();
        self.steps.iter().map(|step| kernels[step.kernel].clone()).collect()
    }
}

impl Plan {
    /// The programs, each with what it shares with the others.
    pub fn views(&self) -> impl DoubleEndedIterator<Item = View<'_>> + ExactSizeIterator + Clone {
        self.programs.iter().map(|program| View { plan: self, program, target: &self.target, segments: &self.segments })
    }

    /// The first program.
    ///
    /// # Panics
    /// When the plan has no programs: [`check`](check::check) refuses such a plan.
    pub fn first(&self) -> View<'_> {
        self.views().next().expect("a plan has a program")
    }

    /// The names of the programs, joined so that one quote stands before and one behind: `a', 'b`.
    pub fn title(&self) -> String {
        self.programs.iter().map(|program| &program.name[..]).collect::<Vec<_>>().join("', '")
    }

    /// Bytes that will be allocated, all classes and all runs at once together.
    pub fn bytes(&self) -> u64 {
        self.own().map(|s| s.bytes * self.copies(s.class)).sum()
    }

    /// The segments that the device has, and its share of the host's memory for them. What is offloaded is not among them.
    fn own(&self) -> impl Iterator<Item = &Segment> {
        self.segments.iter().filter(|s| s.memory.counts(self.target.family))
    }

    /// Bytes of the host's memory in which offloaded data lies, which are beside the plan's.
    pub fn offloaded_bytes(&self) -> u64 {
        self.segments.iter().filter(|s| s.memory == Memory::Pinned).map(|s| s.bytes * self.copies(s.class)).sum()
    }

    /// Bytes of the segments of one class, for one run.
    pub fn class_bytes(&self, class: Class) -> u64 {
        self.own().filter(|s| s.class == class).map(|s| s.bytes).sum()
    }

    /// The bytes by class, those of all runs at once, as JSON.
    pub fn classes(&self) -> Map<String, Value> {
        let bytes = |class: Class| self.class_bytes(class) * self.copies(class);
        Class::ALL.into_iter().map(|class| (class.name().to_owned(), bytes(class).into())).collect()
    }

    /// Bytes that one more run at once takes.
    pub fn run_bytes(&self) -> u64 {
        self.own().map(|s| s.bytes).sum::<u64>() - self.class_bytes(Class::Constant)
    }

    /// Bytes of memory of the host that a caller lends to hold the plan, wherever they begin: each segment lies at a multiple of the target's
    /// alignment. Tables and stacks, which the system and the compiled kernels take, are beside them.
    pub fn lent_bytes(&self) -> u64 {
        let lies = |segment: &&Segment| !matches!(segment.memory, Memory::Own | Memory::Prefetch);
        let align = self.target.alignment;
        let bytes = |segment: &Segment| segment.bytes.next_multiple_of(align) * self.copies(segment.class);
        self.segments.iter().filter(lies).map(bytes).sum::<u64>() + align - 1
    }

    /// Number of segments of a class, for each that the plan lists: runs at once share the constants.
    pub fn copies(&self, class: Class) -> u64 {
        if class == Class::Constant { 1 } else { self.runs.into() }
    }

    /// The plan as JSON, the same on every machine.
    pub fn to_json(&self) -> String {
        let mut text = serde_json::to_string_pretty(self).expect("a plan has only finite numbers and text keys");
        text.push('\n');
        text
    }

    /// Reads a plan's file, and checks it.
    ///
    /// # Errors
    /// As [`from_json`](Self::from_json), and when it cannot be read.
    pub fn load(path: &Path) -> Result<Plan> {
        let text = std::fs::read_to_string(path).map_err(|e| Error::file(path, "read the plan", e))?;
        Plan::from_json(&text, path)
    }

    /// Writes a plan's file. A reader sees the old one or the complete new one.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn save(&self, path: &Path) -> Result<()> {
        file::write_whole(path, "write the plan", |out| out.write_all(self.to_json().as_bytes()))
    }

    /// A plan from JSON, checked.
    ///
    /// # Errors
    /// When the text is not a plan, is of another version, or breaks a rule of [`check::check`].
    pub fn from_json(text: &str, path: &Path) -> Result<Plan> {
        #[derive(Deserialize)]
        struct Head {
            version: Option<u64>,
        }
        let syntax = |e| Error::json(path, &e);
        let refuse = |what: String| Err(Error::plan(what).in_file(path));
        match serde_json::from_str::<Head>(text).map_err(syntax)?.version {
            Some(version) if version == u64::from(VERSION) => {}
            Some(version @ 1..3) => {
                return refuse(format!(
                    "expected version {VERSION}, found {version}, in which each program was a plan; plan the model again"
                ));
            }
            Some(version) => {
                return refuse(format!(
                    "expected version {VERSION}, found {version}; a plimsoll of that version reads it, or plan the model again"
                ));
            }
            None => return refuse("not a plan: it has no version".into()),
        }
        let plan: Plan = serde_json::from_str(text).map_err(syntax)?;
        check::check(&plan).and_then(|()| check::ranks::one(&plan)).map_err(|e| e.in_file(path))?;
        Ok(plan)
    }
}

/// The data of a plan: per program, one entry per entry of [`Program::constants`], then one per state whose elements are given.
pub type Data = Vec<Vec<Arc<Constant>>>;

/// A plan and its data.
pub type Compiled = (Plan, Data);

/// The limits of a plan.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// The most bytes the plan may take, all segments together.
    pub memory: Option<u64>,
}

impl Limits {
    /// Refuses a plan that takes more.
    pub fn check(&self, plan: &Plan) -> Result<()> {
        match self.memory {
            Some(limit) if plan.bytes() > limit => Err(plan.exceeds(limit)),
            _ => Ok(()),
        }
    }
}

impl Plan {
    /// The error of a plan that takes more than a limit.
    pub(crate) fn exceeds(&self, limit: u64) -> Error {
        let of = if self.programs.len() > 1 { "the programs " } else { "" };
        let what = format!("the plan of {of}'{}'", self.title());
        Error::Fit { what, needed: self.bytes(), limit, file: None }
    }
}
