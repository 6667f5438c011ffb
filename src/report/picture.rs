//! A plan as rectangles over time and addresses. A [`Scene`] decides what is drawn, for the page and the static picture alike.
//!
//! ```text
//! Plan ---------of-----> Scene --page--> HTML: one file, drawn by page.js
//! eager::Log ---eager----^    '--svg---> SVG
//! ```

use crate::graph::Graph;
use crate::kernel::Kernel;
use crate::kernel::templates::Kind as Work;
use crate::plan::index::Per;
use crate::plan::tell::peak::operators;
use crate::plan::tell::timeline::Timeline;
use crate::plan::{Buffer, BufferIdx, Class, Plan, Segment, SegmentIdx, StepIdx, View};
use crate::target::Memory;
use serde::Serialize;
use std::collections::HashMap;

mod eager;
mod modules;
mod page;
mod parts;

pub use modules::Modules;
pub use page::{comparison_page, escape, page, plan_page, stages_page, timed_page, training_page};
pub use parts::Part;

/// The kind of a rectangle, which decides its colour.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// Scratch memory of one step.
    Workspace,
    /// [`Class::Constant`].
    Constant,
    /// [`Class::State`].
    State,
    /// A state that is a trained weight.
    Weight,
    /// A state that an optimizer keeps.
    Optimizer,
    /// [`Class::Input`].
    Input,
    /// [`Class::Output`].
    Output,
    /// [`Class::Staging`].
    Staging,
    /// Results of a kind of work.
    #[serde(untagged)]
    Computed(Work),
}

/// Every kind in the order of legends, with its word and its fill colour.
const LOOKS: [(Kind, &str, &str); 14] = [
    (Kind::Computed(Work::Product), "matrix product", "#77aadd"),
    (Kind::Computed(Work::Convolution), "convolution", "#ee8866"),
    (Kind::Computed(Work::Window), "pooling, resizing", "#ffaabb"),
    (Kind::Computed(Work::Row), "reduction, norm", "#44bb99"),
    (Kind::Computed(Work::Elementwise), "elementwise", "#eedd88"),
    (Kind::Computed(Work::Movement), "gather, pad", "#bbcc33"),
    (Kind::Workspace, "workspace", "#aaaa00"),
    (Kind::Constant, "constants", "#8792a0"),
    (Kind::Weight, "weights", "#ae76a3"),
    (Kind::Optimizer, "optimizer", "#d9cce3"),
    (Kind::State, "state", "#caaccb"),
    (Kind::Input, "inputs", "#99ddff"),
    (Kind::Output, "outputs", "#c6cdd5"),
    (Kind::Staging, "staging", "#dfe3e8"),
];

impl Kind {
    /// Every kind, in the order of legends.
    pub fn all() -> impl Iterator<Item = Kind> {
        LOOKS.into_iter().map(|(kind, ..)| kind)
    }

    /// The kind of buffers in segments of a class. In the arena it is the producer's kind instead.
    pub fn resident(class: Class) -> Option<Kind> {
        match class {
            Class::Constant => Some(Kind::Constant),
            Class::State => Some(Kind::State),
            Class::Input => Some(Kind::Input),
            Class::Output => Some(Kind::Output),
            Class::Staging | Class::Backend | Class::Reserve => Some(Kind::Staging),
            Class::Workspace => Some(Kind::Workspace),
            Class::Activation => None,
        }
    }

    /// The word in legends.
    pub fn label(self) -> &'static str {
        self.look().1
    }

    /// The fill colour. Results of steps, workspaces and inputs have Paul Tol's light colours: people of every colour vision can tell them
    /// apart, and black text is readable on them. States have three of his rainbow; what is left has greys of its own.
    pub fn fill(self) -> &'static str {
        self.look().2
    }

    fn look(self) -> (Kind, &'static str, &'static str) {
        LOOKS.into_iter().find(|(kind, ..)| *kind == self).expect("every kind is in the table")
    }
}

/// The colour of the arena as a whole.
pub const ARENA: &str = "#4477aa";

/// A step of the run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Mark {
    /// The node whose result it computes.
    pub name: String,
    /// The node's operator, or the kernel's template if the operator is not known.
    pub operator: String,
    /// The kernel's template.
    pub kernel: &'static str,
    /// The algorithm that computes the kernel; empty for an eager run.
    pub algorithm: String,
    /// The kind of its results.
    pub kind: Kind,
    /// The path of the module whose result it computes, if the file names modules.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub module: Option<String>,
    /// Of a training, the part of an update that it computes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub part: Option<Part>,
    /// Its stream. Steps of different streams may run at the same time.
    pub stream: u32,
    /// Indices of the buffers that it reads.
    pub reads: Vec<BufferIdx>,
    /// Indices of the buffers that it writes.
    pub writes: Vec<BufferIdx>,
}

impl Per<StepIdx> for Mark {}

/// A buffer, as tooltips and details describe it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Item {
    /// The tensor's name.
    pub name: String,
    /// The path of the module that computes it, if the file names modules.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub module: Option<String>,
    /// Stored type and extents: `f32[8,10]`.
    #[serde(rename = "type")]
    pub ty: String,
    /// Length in bytes.
    pub bytes: u64,
    /// Its class.
    pub class: Class,
    /// Its kind.
    pub kind: Kind,
    /// Index of the segment.
    pub segment: SegmentIdx,
    /// First byte in the segment.
    pub offset: u64,
    /// The first and the last step that use it.
    pub uses: Option<(StepIdx, StepIdx)>,
    /// The buffer that it overwrites in place.
    pub takes_from: Option<BufferIdx>,
}

impl Per<BufferIdx> for Item {}

/// A buffer's bytes over time. Time is in half steps: step `s` lasts from `2 s` to `2 s + 2`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Rect {
    /// Index of the buffer.
    pub buffer: BufferIdx,
    /// Half steps in which it holds data: the first, and one after the last.
    pub time: (usize, usize),
    /// Half steps in which no other buffer may have its bytes. Longer than `time` if steps of other streams may run at the same
    /// time.
    pub held: (usize, usize),
    /// The first byte, and one after the last.
    pub bytes: (u64, u64),
}

/// An allocation: a range of bytes for a range of time.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Area {
    /// Half steps: the first, and one after the last.
    pub time: (usize, usize),
    /// The first byte, and one after the last.
    pub bytes: (u64, u64),
}

/// A range of addresses that is drawn as one plot.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Space {
    /// `arena`, `constants` ...
    pub title: String,
    /// The class of its buffers; `None` if it has all classes.
    pub class: Option<Class>,
    /// Its height in bytes.
    pub bytes: u64,
    /// Allocations.
    pub areas: Vec<Area>,
    /// Buffers in them.
    pub rects: Vec<Rect>,
}

impl Per<SegmentIdx> for Space {}

/// The step at which the most bytes are live.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Peak {
    /// The first such step.
    pub step: StepIdx,
    /// Live bytes.
    pub bytes: u64,
    /// Buffers, the largest first.
    pub buffers: Vec<BufferIdx>,
}

/// One way to run a graph, as a picture.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Scene {
    /// The graph, or the way to run it.
    pub name: String,
    /// The target.
    pub target: String,
    /// Bytes of all segments; 0 for an eager run.
    pub planned: u64,
    /// Bytes of the arena; 0 for an eager run.
    pub arena: u64,
    /// The fewest bytes that a placement of this order takes; 0 for an eager run.
    pub bound: u64,
    /// The most bytes that all segments together may take.
    pub limit: Option<u64>,
    /// Steps in order.
    pub steps: Vec<Mark>,
    /// Buffers.
    pub buffers: Vec<Item>,
    /// The arena's segments, then the others.
    pub spaces: Vec<Space>,
    /// Per step, the live bytes.
    pub live: Vec<u64>,
    /// Per step, the bytes taken from the device; empty if that does not change.
    pub reserved: Vec<u64>,
    /// Per step, the microseconds that it takes by itself; empty if they were not measured.
    pub times: Vec<f64>,
    /// `None` without steps.
    pub peak: Option<Peak>,
    /// Further figures, as label and text.
    pub figures: Vec<(String, String)>,
}

impl Scene {
    /// The scene of a checked plan, with one space per segment. The graph that was planned gives the operators.
    pub fn of(plan: View, graph: Option<&Graph>, limit: Option<u64>) -> Scene {
        let timeline = Timeline::of(plan);
        let operators = operators(graph);
        let mut kinds: Vec<Option<Kind>> = plan.buffers.iter().map(|b| Kind::resident(b.class)).collect();
        let mut steps = Vec::with_capacity(plan.steps.len());
        for (step, algorithm) in plan.steps.iter().zip(plan.algorithms()) {
            let mark = Mark::new(&step.name, &plan.kernels[step.kernel], &operators, &step.reads, &step.writes);
            for &b in &step.writes {
                kinds[b].get_or_insert(mark.kind);
            }
            steps.push(Mark { stream: step.stream, algorithm, ..mark });
        }
        let item = |(b, (buffer, kind)): (BufferIdx, (&Buffer, Option<Kind>))| Item {
            name: buffer.name.clone(),
            module: None,
            ty: format!("{}{}", buffer.dtype, buffer.shape),
            bytes: buffer.bytes,
            class: buffer.class,
            kind: kind.unwrap_or(Kind::Computed(Work::Elementwise)),
            segment: buffer.segment,
            offset: buffer.offset,
            uses: timeline.uses[b],
            takes_from: timeline.takes_from[b],
        };
        let buffers = BufferIdx::all(&plan.buffers).zip(plan.buffers.iter().zip(kinds)).map(item).collect();
        let spaces = spaces(plan, &timeline);
        let peak = timeline.peak().map(|step| Peak {
            step,
            bytes: timeline.live(step),
            buffers: timeline.holders(plan, step),
        });
        Scene {
            name: plan.name.clone(),
            target: plan.target.name.clone(),
            planned: plan.bytes(),
            arena: plan.class_bytes(Class::Activation),
            bound: plan.summary.lower_bound,
            limit,
            live: StepIdx::all(&plan.steps).map(|s| timeline.live(s)).collect(),
            reserved: Vec::new(),
            times: Vec::new(),
            steps,
            buffers,
            spaces,
            peak,
            figures: Vec::new(),
        }
    }

    /// The scene of a checked plan in one space, beside other ways to run. The arena is above the other segments.
    pub fn whole(name: &str, plan: View, graph: Option<&Graph>) -> Scene {
        let mut scene = Scene { name: name.to_owned(), ..Scene::of(plan, graph, None) };
        let mut whole = Space { title: "planned".into(), class: None, bytes: 0, areas: Vec::new(), rects: Vec::new() };
        let (arena, rest): (Vec<_>, Vec<_>) =
            scene.spaces.drain(..).partition(|space| space.class == Some(Class::Activation));
        for space in rest.into_iter().chain(arena) {
            let up = |(from, to): (u64, u64)| (from + whole.bytes, to + whole.bytes);
            whole.areas.extend(space.areas.iter().map(|area| Area { bytes: up(area.bytes), ..*area }));
            whole.rects.extend(space.rects.iter().map(|rect| Rect { bytes: up(rect.bytes), ..*rect }));
            whole.bytes += space.bytes;
        }
        let resident = scene.planned - scene.arena;
        scene.live.iter_mut().for_each(|live| *live += resident);
        scene.reserved = vec![scene.planned; scene.steps.len()];
        scene.spaces.push(whole);
        scene
    }

    /// The number of streams.
    pub fn streams(&self) -> u32 {
        self.steps.iter().map(|s| s.stream + 1).max().unwrap_or(1)
    }

    /// The kinds of its buffers.
    pub fn kinds(&self) -> Vec<Kind> {
        let used = |kind: &Kind| self.buffers.iter().any(|b| b.kind == *kind);
        Kind::all().filter(used).collect()
    }
}

/// What a picture of a plan is told beside it.
#[derive(Clone, Copy, Default)]
pub struct About<'a> {
    /// The file, its extents, how it is trained.
    pub subject: &'a str,
    /// The graph of each program, which gives the operators.
    pub graphs: &'a [Graph],
    /// The most bytes that all segments together may take.
    pub limit: Option<u64>,
    /// Of a training, the weights that are trained.
    pub trained: Option<&'a [String]>,
    /// The modules that the file names.
    pub modules: Option<&'a Modules>,
}

/// The scenes of a plan's programs.
pub fn scenes(plan: &Plan, about: &About) -> Vec<Scene> {
    let scene = |(number, view): (usize, View)| {
        let mut scene = Scene::of(view, about.graphs.get(number), about.limit);
        if let Some(modules) = about.modules {
            scene.name_modules(modules);
        }
        if let Some(trained) = about.trained {
            scene.name_parts(view, trained);
        }
        scene
    };
    plan.views().enumerate().map(scene).collect()
}

/// The segments of a plan with their buffers, those of the arena first.
fn spaces(plan: View, timeline: &Timeline) -> Vec<Space> {
    let end = 2 * plan.steps.len();
    let space = |s: &Segment| Space {
        title: match s.memory {
            Memory::Device => title(s.class).into(),
            Memory::Upload => "staging up".into(),
            Memory::Download => "staging down".into(),
            Memory::Scratch => "threads' scratch memory".into(),
            Memory::Own => "stacks and tables".into(),
            Memory::Prefetch => "the next rows".into(),
            Memory::Reserve => "NCCL's reserve".into(),
            Memory::Pinned => "on the host".into(),
        },
        class: Some(s.class),
        bytes: s.bytes,
        areas: vec![Area { time: (0, end), bytes: (0, s.bytes) }],
        rects: Vec::new(),
    };
    let mut spaces: Vec<Space> = plan.segments.iter().map(space).collect();
    for (b, buffer) in BufferIdx::enumerate(&plan.buffers) {
        let (time, held) = match (&timeline.held[b], timeline.uses[b]) {
            (Some(held), Some((first, last))) => {
                let (first, last) = (2 * first.index(), 2 * last.index() + 2);
                ((held.start.max(first), held.end.min(last)), (held.start, held.end))
            }
            _ => ((0, end), (0, end)),
        };
        let bytes = (buffer.offset, buffer.offset + buffer.bytes);
        spaces[buffer.segment].rects.push(Rect { buffer: b, time, held, bytes });
    }
    spaces.sort_by_key(|space| space.class != Some(Class::Activation));
    spaces
}

/// The heading of a segment.
pub fn title(class: Class) -> &'static str {
    match class {
        Class::Activation | Class::Workspace => "arena",
        Class::Constant => "constants",
        Class::State => "state",
        Class::Input => "inputs",
        Class::Output => "outputs",
        Class::Staging => "staging",
        Class::Backend => "the backend's own",
        Class::Reserve => "NCCL's reserve",
    }
}

impl Mark {
    fn new(
        name: &str,
        kernel: &Kernel,
        operators: &HashMap<&str, &str>,
        reads: &[BufferIdx],
        writes: &[BufferIdx],
    ) -> Mark {
        let template = &kernel.template;
        Mark {
            name: name.to_owned(),
            operator: operators.get(name).copied().unwrap_or(template.name()).to_owned(),
            kernel: template.name(),
            algorithm: String::new(),
            kind: Kind::Computed(template.def().kind),
            module: None,
            part: None,
            stream: 0,
            reads: reads.to_vec(),
            writes: writes.to_vec(),
        }
    }
}
