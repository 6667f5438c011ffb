//! What will run, on which bytes: order first, offsets second, all of it known before a device is touched.
//!
//! ```text
//! Graph --lower--> Draft --order--> --live--> --place--> Plan --check
//!         kernels,         step      ranges,    offsets        (knows only the plan)
//!         virtual buffers  order     in-place
//! ```

use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::kernel::Kernel;
use crate::shape::Shape;
use crate::target::Target;
use serde::{Deserialize, Serialize};
use std::path::Path;

pub mod check;
pub mod place;

/// The version of the plan's file format.
pub const VERSION: u32 = 1;

/// What a buffer or a segment is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Class {
    /// Written once when the plan is loaded.
    Constant,
    /// Kept from one run to the next and written by steps.
    State,
    /// Written by the caller before a run; no step writes it.
    Input,
    /// Read by the caller after a run.
    Output,
    /// Lives within a run, in the arena.
    Activation,
    /// Scratch memory of one step, in the arena.
    Workspace,
}

impl Class {
    /// Every class.
    pub const ALL: [Class; 6] =
        [Class::Constant, Class::State, Class::Input, Class::Output, Class::Activation, Class::Workspace];

    /// The name used in plans and tables.
    pub fn name(self) -> &'static str {
        match self {
            Class::Constant => "constant",
            Class::State => "state",
            Class::Input => "input",
            Class::Output => "output",
            Class::Activation => "activation",
            Class::Workspace => "workspace",
        }
    }

    /// The class of the segment that holds buffers of this class: workspaces share the activations' arena.
    pub fn segment(self) -> Class {
        if self == Class::Workspace { Class::Activation } else { self }
    }
}

/// One allocation on the device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Segment {
    /// What its buffers are for; [`Class::Activation`] is the arena.
    pub class: Class,
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
}

/// A kernel launch. Reads and writes are buffers, never byte ranges: the checker depends on it.
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
}

/// Figures that follow from the plan, kept beside it for readers.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// Bytes of all segments: what will be allocated.
    pub planned_bytes: u64,
    /// Bytes of the arena's segments.
    pub arena_bytes: u64,
    /// The largest sum of live bytes over the steps: no placement of this order can be smaller.
    pub lower_bound: u64,
    /// Bytes of the constants' segments.
    pub constant_bytes: u64,
    /// Bytes of the state's segments.
    pub state_bytes: u64,
    /// Bytes of the inputs' segments.
    pub input_bytes: u64,
    /// Bytes of the outputs' segments.
    pub output_bytes: u64,
    /// What the arena would take with a buffer of its own for every activation.
    pub unshared_bytes: u64,
    /// Number of steps.
    pub steps: usize,
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
        let syntax = |e: serde_json::Error| Error::Syntax {
            path: path.to_owned(),
            line: e.line(),
            column: e.column(),
            what: e.to_string(),
        };
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
