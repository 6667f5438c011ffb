//! Groups become kernels, values become buffers and accesses.
//!
//! ```text
//! draft                            what is made: buffers without offsets, kernels, launches
//! place, view                      where a value lies, under which access, and copies of it
//! constant, channels, destination  decided first: what is held once, what has its channels last, what is written where
//! fuse_prologue                    then group by group: elementwise code that a template takes along,
//! group                            or a kernel's template, its body, its operands
//! scatter                          a kernel that writes some elements lies over its data
//! shared_bytes                     elements of less than 8 bits share the bytes of inputs, outputs and states
//! repeat                           a loop is one kernel, which launches those of its body
//! launch, parts                    and its library call, its workspace, its parts where a binding does not hold a buffer
//! join_rows                        then reductions of the same rows become one kernel,
//! updates, state                   and updates that follow from each other. These are written in place, behind all that reads the old
//!                                  elements
//! ```
//!
//! A view is a value whose access differs from its source's and whose buffer is the same. A concatenation is a buffer
//! whose parts are written in place by whoever produces them, where that is possible. What cannot be expressed so is
//! copied by a kernel of its own.
//!
//! Values lie row-major, except around convolutions that cuDNN computes on tensor cores. These want the channels of a position one
//! after another. So do rendered convolutions of the same types with few channels per group. Of their constant weights, neighbouring
//! outputs lie side by side.
//!
//! An elementwise group whose value only a template reads makes no kernel if the template's kernel can apply it to each element it reads.
//! The group is then the prologue of that operand.

use crate::backend::cpu;
use crate::constant::Constant;
use crate::decisions::Decisions;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::graph::{Graph, Kind};
use crate::kernel::tuned::Tuned;
use crate::op::{Fact, Lower, NodeId, ValueId};
use crate::pass::offload::Offload;
use crate::pass::{Group, GroupKind, Groups, Prepared};
use crate::shape::{Access, Shape};
use crate::target::{Family, Target};
use crate::{BufferIdx, Class, KernelIdx};
use buffer_view::BufferView;
use channels::channels_last;
use fuse_prologue::FusedPrologue;
use scatter::{Scatters, is_scatter};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

mod attention;
mod buffer_view;
mod channels;
mod code;
mod constant;
mod copy;
mod dag;
mod destination;
mod draft;
mod fuse_prologue;
mod join_rows;
mod launch;
mod map;
mod outline;
mod repeat;
mod row;
mod scatter;
mod shared_bytes;
mod split;
mod state;
mod template;
mod updates;
mod view;

pub use dag::Dag;
pub use draft::{Draft, DraftBuffer, DraftConstant, DraftState, DraftStep};
pub use repeat::{Place, Placed};

/// Decisions of lowering that change memory, not results.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Write the parts of a concatenation in place.
    pub join: bool,
}

struct Lowering<'a> {
    graph: &'a Graph,
    groups: &'a Groups,
    decisions: &'a Decisions,
    target: &'a Target,
    /// What lies in the memory of the host.
    offload: Offload,
    tuned: Option<&'a Tuned>,
    place_body: Place,
    draft: Draft,
    places: HashMap<ValueId, BufferView>,
    /// The place where a value must be written, decided before its kernel is made.
    destinations: HashMap<ValueId, BufferView>,
    /// Values whose channels come last. True if their kernels can write them in no other way.
    channels_last: HashMap<ValueId, bool>,
    /// Copies of values in the layout that a template wants.
    copies: HashMap<ValueId, BufferView>,
    /// Copies of values in the order that a view wants, by where they lie and by direction.
    view_copies: HashMap<(BufferIdx, Access, Access, bool), BufferView>,
    /// Per value that a template reads: the group that it applies to the elements itself.
    prologues: HashMap<ValueId, FusedPrologue>,
    /// Views that a template looks through.
    passed: HashSet<NodeId>,
    constants: HashMap<(*const Constant, Option<String>), BufferIdx>,
    /// Constants that are read as views of another one, which is held anyway.
    shared: HashMap<*const Constant, (Arc<Constant>, Access)>,
    kernels: HashMap<String, KernelIdx>,
    scatters: Scatters,
    /// Inputs and states whose elements share bytes, until they are read.
    shared_ports: HashMap<ValueId, BufferIdx>,
}

/// Lowers a graph whose passes have run. `place_body` places the bodies of loops.
///
/// # Errors
/// When the target has no type for a value, or a node has no kernel.
pub fn lower(prepared: &Prepared, target: &Target, options: Options, place_body: Place) -> Result<Draft> {
    let Prepared { graph, groups, decisions, prefer, offload, sequential, tuned, .. } = prepared;
    let mut lowering = Lowering {
        graph,
        groups,
        decisions,
        target,
        tuned: tuned.as_deref(),
        place_body,
        offload: *offload,
        draft: Draft { prefer: *prefer, sequential: *sequential, ..Draft::default() },
        places: HashMap::new(),
        destinations: HashMap::new(),
        channels_last: HashMap::new(),
        copies: HashMap::new(),
        view_copies: HashMap::new(),
        prologues: HashMap::new(),
        passed: HashSet::new(),
        constants: HashMap::new(),
        shared: HashMap::new(),
        kernels: HashMap::new(),
        scatters: Scatters::default(),
        shared_ports: HashMap::new(),
    };
    lowering.run(options)?;
    let mut draft = lowering.draft;
    if target.family == Family::Cpu {
        // Other devices have memory of their own, and the plan is of that.
        let inputs = graph.inputs().iter().filter(|_| graph.prefetches);
        let bytes = |fact: &Fact| (fact.shape.numel() * fact.dtype.size()) as u64;
        draft.ahead = inputs.map(|&input| (graph.value_name(input).to_owned(), bytes(graph.fact(input)))).collect();
        draft.own = draft.kernels.iter().map(|kernel| cpu::own_bytes(kernel, target.threads as usize)).collect();
    }
    Ok(draft)
}

impl Lowering<'_> {
    fn run(&mut self, options: Options) -> Result<()> {
        let order = self.graph.order()?;
        for &value in self.graph.inputs() {
            if let Some(buffer) = self.shared_bytes(value, Class::Input) {
                self.draft.inputs.push((value, buffer));
                self.shared_ports.insert(value, buffer);
                continue;
            }
            let buffer = self.buffer(value, Class::Input)?;
            self.draft.inputs.push((value, buffer));
            let access = Access::contiguous(self.graph.fact(value).shape.clone());
            self.places.insert(value, BufferView { buffer, access });
        }
        self.add_states()?;
        self.share_constants(&order);
        self.channels_last = channels_last(self.graph, self.groups, &order, self.target)?;
        self.choose_outputs()?;
        self.choose_destinations(&order, options)?;
        self.choose_scatters();
        self.choose_transposed(&order)?;
        self.choose_transposed_products(&order)?;
        for &id in &order {
            let node = self.graph.node(id);
            let Kind::Op(op) = node.kind else { continue };
            if let Some(group) = self.groups.of(id) {
                // An elementwise group may become part of another kernel.
                if group.sink == id && !self.fuse_prologue(group)? {
                    self.group(group)?;
                }
                continue;
            }
            match op.lower {
                Lower::View(_) if self.passed.contains(&id) => {}
                Lower::View(_) => self.view(id)?,
                Lower::Concat => self.concat(id)?,
                Lower::Repeat => self.repeat(id)?,
                Lower::Map(_) | Lower::Reduce(_) | Lower::Template(_) => {
                    self.group(&Group::alone(id, op).expect("its row names a kernel"))?;
                }
                Lower::Decompose(_) | Lower::Const => {
                    return Err(node.error("its inputs must be constants: it has no kernel"));
                }
            }
        }
        let states = self.graph.states().iter().zip(&self.draft.states);
        let updates = states.filter_map(|(state, draft)| Some((state.update?, draft.update?)));
        let outputs = self.draft.outputs.iter().map(|(_, value, buffer)| (*value, *buffer));
        for (value, buffer) in updates.chain(outputs).collect::<Vec<_>>() {
            let place = self.place(value)?;
            if self.draft.packed.contains(&buffer) {
                self.together(value, &place, buffer)?;
            } else if place.buffer != buffer {
                let access = Access::contiguous(place.access.shape.clone());
                self.copy(value, &place, BufferView { buffer, access })?;
            }
        }
        self.join_rows()?;
        self.merge_updates()?;
        self.order_updates()
    }

    /// Makes the kernel of a group.
    fn group(&mut self, group: &Group) -> Result<()> {
        match &group.kind {
            GroupKind::Map => self.map(group),
            GroupKind::Row { reduction } => self.rows(group, *reduction),
            GroupKind::Template { call } if is_scatter(self.graph, *call) => self.scatter(*call),
            GroupKind::Template { call } => self.template(group, *call),
            GroupKind::Attention(attention) => self.attention(group, attention),
        }
    }

    fn buffer(&mut self, value: ValueId, class: Class) -> Result<BufferIdx> {
        let (fact, name) = (self.graph.fact(value), self.graph.value_name(value));
        let dtype = match class {
            Class::State => self.target.holds(fact.dtype),
            Class::Activation if self.is_kept(value) => self.target.holds(fact.dtype),
            _ => self.target.storage(fact.dtype),
        };
        let dtype = dtype.map_err(|e| Error::usage(format!("value '{name}': {e}")))?;
        Ok(self.add_buffer(name.to_owned(), dtype, fact.shape.clone(), class))
    }

    /// True for halves of the forward computation that the backward one reads, itself or through views: what `train/kept.rs` casts. They are
    /// held in 16 bits until then.
    fn is_kept(&self, value: ValueId) -> bool {
        let graph = self.graph;
        if !graph.fact(value).dtype.is_half() || !graph.has_backward() || graph.is_backward(value.node) {
            return false;
        }
        let mut seen = vec![value];
        while let Some(value) = seen.pop() {
            for user in graph.users(value) {
                match graph.is_view(user) {
                    true => seen.push(user.output(0)),
                    false if graph.is_backward(user) => return true,
                    false => {}
                }
            }
        }
        false
    }

    fn storage(&self, dtype: DType, name: &str) -> Result<DType> {
        self.target.storage(dtype).map_err(|e| Error::usage(format!("value '{name}': {e}")))
    }

    fn add_buffer(&mut self, name: String, dtype: DType, shape: Shape, class: Class) -> BufferIdx {
        let bytes = (shape.numel() * dtype.size()).next_multiple_of(4).max(4) as u64;
        self.draft.buffers.push(DraftBuffer { name, dtype, shape, bytes, class, over: None, offloaded: false });
        BufferIdx::new(self.draft.buffers.len() - 1)
    }
}
