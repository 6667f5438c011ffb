//! The result of lowering: kernels, and buffers that have no offsets yet.

use crate::backend::cpu::OwnBytes;
use crate::constant::Constant;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::index::Per;
use crate::kernel::{Kernel, cpu};
use crate::op::ValueId;
use crate::pass::Prefer;
use crate::shape::Shape;
use crate::target::Target;
use crate::{BindRange, BufferIdx, Class, KernelIdx, StepIdx};
use std::collections::BTreeSet;
use std::sync::Arc;

/// A buffer that has no offset yet.
#[derive(Clone, Debug)]
pub struct DraftBuffer {
    /// The tensor's name.
    pub name: String,
    /// The type in which elements are stored.
    pub dtype: DType,
    /// The tensor's extents.
    pub shape: Shape,
    /// Length in bytes, a multiple of 4.
    pub bytes: u64,
    /// The class of its data.
    pub class: Class,
    /// The buffer whose bytes it takes over: a state's, if it holds the update, or that of the data whose other elements it keeps.
    pub over: Option<BufferIdx>,
    /// True if it lies in the memory of the host.
    pub offloaded: bool,
}

impl DraftBuffer {
    /// True if it has the bytes of a state, which is another buffer.
    pub fn is_update(&self) -> bool {
        self.class == Class::State && self.over.is_some()
    }
}

impl Per<BufferIdx> for DraftBuffer {}

/// A launch whose place in the order is not decided.
#[derive(Clone, Debug)]
pub struct DraftStep {
    /// The node whose result it computes.
    pub name: String,
    /// Index of the kernel.
    pub kernel: KernelIdx,
    /// One buffer per operand read.
    pub reads: Vec<BufferIdx>,
    /// One buffer per operand written, then the workspace.
    pub writes: Vec<BufferIdx>,
    /// The bind range of each operand; empty if it binds whole buffers.
    pub bind_ranges: Vec<BindRange>,
    /// Buffers read whose bytes the first write may take: each element is read before it is written.
    pub reusable: Vec<BufferIdx>,
}

impl Per<StepIdx> for DraftStep {}

/// A constant and its buffer.
#[derive(Clone, Debug)]
pub struct DraftConstant {
    /// The constant.
    pub constant: Arc<Constant>,
    /// Index of the buffer.
    pub buffer: BufferIdx,
    /// The kernel, once it is made, and its operand whose packed layout the bytes take.
    pub packed: Option<(Option<KernelIdx>, usize)>,
}

/// A state and its buffers.
#[derive(Clone, Debug)]
pub struct DraftState {
    /// The state.
    pub value: ValueId,
    /// The buffer with the elements from before a run.
    pub buffer: BufferIdx,
    /// The buffer with its update, at the same bytes.
    pub update: Option<BufferIdx>,
    /// The elements that it begins with; `None` means zeros.
    pub initial: Option<Arc<Constant>>,
}

/// Kernels and buffers of a graph, in the order of the file.
#[derive(Clone, Debug, Default)]
pub struct Draft {
    /// Buffers.
    pub buffers: Vec<DraftBuffer>,
    /// Buffers of ports whose elements share bytes.
    pub packed: BTreeSet<BufferIdx>,
    /// Kernels, each once.
    pub kernels: Vec<Kernel>,
    /// Per kernel, the bytes that the CPU backend takes for itself; empty on other targets.
    pub own: Vec<OwnBytes>,
    /// The least to plan for it: what other bindings of a range need.
    pub least_own: OwnBytes,
    /// The inputs that are made ready for the next run in planned memory, and the bytes of each, as the host has it.
    pub ahead: Vec<(String, u64)>,
    /// Launches.
    pub steps: Vec<DraftStep>,
    /// Constants.
    pub constants: Vec<DraftConstant>,
    /// States of the graph.
    pub states: Vec<DraftState>,
    /// Inputs of the graph: value and buffer.
    pub inputs: Vec<(ValueId, BufferIdx)>,
    /// Outputs of the graph: name, value and buffer.
    pub outputs: Vec<(String, ValueId, BufferIdx)>,
    /// Number of launches whose schedule was measured.
    pub measured: usize,
    /// True if there are concatenations, which [`Options::join`](super::Options::join) affects.
    pub concatenates: bool,
    /// What comes [first](crate::pass::Prepared::prefer) where memory and speed pull apart.
    pub prefer: Prefer,
    /// True to run one step after [another](crate::pass::Prepared::sequential).
    pub sequential: bool,
}

impl Draft {
    /// True if a step brings data from the memory of the host.
    pub fn is_fetch(&self, step: StepIdx) -> bool {
        let DraftStep { reads, writes, .. } = &self.steps[step];
        let of_host = |&b: &BufferIdx| self.buffers[b].offloaded;
        reads.len() == 1 && reads.iter().all(of_host) && !writes.iter().any(of_host)
    }

    /// Bytes of the largest buffer in the memory of the host.
    pub fn largest_offloaded(&self) -> u64 {
        self.buffers.iter().filter(|buffer| buffer.offloaded).map(|buffer| buffer.bytes).max().unwrap_or(0)
    }

    /// True if steps bring data from the memory of the host.
    pub fn fetches(&self) -> bool {
        self.buffers.iter().any(|buffer| buffer.offloaded)
    }

    /// True if a step exchanges data with other ranks.
    pub fn is_exchange(&self, step: StepIdx) -> bool {
        let kernel = self.kernels.get(self.steps[step].kernel.index());
        kernel.is_some_and(|kernel| kernel.collective().is_some())
    }

    /// True if ranks exchange data.
    pub fn exchanges(&self) -> bool {
        self.kernels.iter().any(|kernel| kernel.collective().is_some())
    }

    /// Refuses a buffer that no segment holds.
    pub fn fits_segments(&self, target: &Target) -> Result<()> {
        match self.buffers.iter().find(|b| b.bytes > target.max_segment) {
            Some(b) => Err(Error::usage(format!(
                "tensor '{}' ({}{}) takes {} bytes; target '{}' allocates at most {} at once",
                b.name, b.dtype, b.shape, b.bytes, target.name, target.max_segment
            ))),
            None => Ok(()),
        }
    }

    /// The buffer that gives a buffer its bytes: itself, unless it lies over another.
    pub fn root(&self, mut buffer: BufferIdx) -> BufferIdx {
        while let Some(over) = self.buffers[buffer].over {
            buffer = over;
        }
        buffer
    }

    /// Per buffer, true if a step or the caller uses it.
    pub fn used(&self) -> Vec<bool> {
        let mut used = vec![false; self.buffers.len()];
        let steps = self.steps.iter().flat_map(|step| step.reads.iter().chain(&step.writes)).copied();
        let ports = self.inputs.iter().map(|p| p.1).chain(self.outputs.iter().map(|p| p.2));
        let states = self.states.iter().flat_map(|s| [Some(s.buffer), s.update]).flatten();
        steps.chain(ports).chain(states).for_each(|b| used[b] = true);
        used
    }

    /// True if a constant of this draft takes the same bytes, with the same content, as one of another draft.
    pub fn holds_alike(&self, own: &DraftConstant, other: &Draft, constant: &DraftConstant) -> bool {
        let (a, b) = (&self.buffers[own.buffer], &other.buffers[constant.buffer]);
        let packed = match (own.packed, constant.packed) {
            (None, None) => true,
            (Some((Some(kernel), operand)), Some((Some(k), o))) => {
                let (kernel, operand) = self.kernels[kernel].packed_reader(operand);
                let (k, o) = other.kernels[k].packed_reader(o);
                operand == o && cpu::packs_alike(kernel, k, operand)
            }
            _ => false,
        };
        packed && (a.dtype, a.bytes) == (b.dtype, b.bytes) && own.constant.same(&constant.constant)
    }

    /// The buffer in which a step works, if it needs one.
    pub fn workspace(&self, step: StepIdx) -> Option<BufferIdx> {
        let DraftStep { kernel, writes, .. } = &self.steps[step];
        writes.get(self.kernels[*kernel].writes.len()).copied()
    }
}
