//! Loops: the body is lowered, ordered and placed as a program of its own, and becomes one kernel that launches it.
//!
//! ```text
//! body, from states --passes, lower, arrange--> launches on buffers of its own
//! its states      are the loop's operands: what is handed on and rows that are written are results, all else is read
//! its arena       is the loop's workspace, with the number of the step's row behind it
//! its constants   are operands, held once with those of the graph
//! ```

use super::buffer_view::{BufferView, Read};
use super::{Draft, DraftConstant, DraftStep, Lowering};
use crate::dtype::DType;
use crate::error::Result;
use crate::expr::Body;
use crate::kernel::algorithm::Schedule;
use crate::kernel::{ArgBytes, Inner, Kernel, Operand, Repeat, Template, schedule};
use crate::op::{NodeId, ValueId};
use crate::ops::Loop;
use crate::pass::{self, Context, Prepared, Recipe};
use crate::shape::{Access, Shape};
use crate::target::Target;
use crate::{BufferIdx, Class, KernelIdx, Segment, Spot, StepIdx};
use plimsoll_core::constant::Constant;
use plimsoll_core::tensor::Tensor;
use plimsoll_graph::body::{Stepped, stepped};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

/// A body whose steps have an order, and whose buffers have places.
pub struct Placed {
    /// Its kernels and buffers.
    pub draft: Draft,
    /// The order of its steps.
    pub order: Vec<StepIdx>,
    /// Its segments.
    pub segments: Vec<Segment>,
    /// Per buffer, its place; `None` if nothing uses it.
    pub places: Vec<Option<Spot>>,
}

/// Orders and places a body. Lowering cannot do that itself: it stands below.
pub type Place = fn(&Prepared, &Target) -> Result<Placed>;

/// Bytes of an argument of the loop that a buffer of the body has.
#[derive(Clone, Copy)]
enum Slot {
    /// A read, from a byte on.
    Read(usize, u64),
    /// A result.
    Written(usize),
    /// The number of the step's row.
    Row,
}

/// The operands of a loop, and which of them its body's buffers are.
#[derive(Default)]
struct Operands {
    reads: Vec<Read>,
    writes: Vec<BufferIdx>,
    /// By buffer of the body. The update of a state is where the state is.
    slots: HashMap<BufferIdx, Slot>,
    /// What a launch in front of all steps copies: a read, to the buffer of a state, and the type of its value.
    copies: Vec<(usize, BufferIdx, DType)>,
}

impl Lowering<'_> {
    /// Makes the kernel of a loop.
    pub(super) fn repeat(&mut self, id: NodeId) -> Result<()> {
        let node = self.graph.node(id);
        let values: Vec<ValueId> = self.graph.operands(id).into_iter().flatten().collect();
        let known: Vec<_> = values.iter().map(|&value| self.graph.as_constant(value).cloned()).collect();
        let prepare = |of: Loop| Ok((stepped(&of, &node.name, &known)?, of.times, of.carried, of.reverse));
        let made = self.graph.with_call(id, |call| Loop::of(call).map(prepare)).expect("it is an operator");
        let (Stepped { graph, inputs, rows, row }, times, carried, reverse) =
            made.map_err(|what| node.error(what))??;
        // Launches of a loop follow each other.
        let target = Target { streams: 1, ..self.target.clone() };
        let recipe = Recipe { prefer: self.draft.prefer, ..Recipe::default() };
        let body = pass::run(graph, &Context::new(&target, recipe))?;
        let made = (self.place_body)(&body, &target)?;

        let mut operands = Operands::default();
        let states: HashSet<ValueId> = made.draft.states.iter().map(|state| state.value).collect();
        for (&value, &state) in values.iter().zip(&inputs).skip(carried).filter(|(_, state)| states.contains(state)) {
            let state = state_of(&made.draft, state);
            let (read, offset) = self.operand_of_loop(value, &made.draft, state)?;
            operands.slots.insert(state, Slot::Read(operands.reads.len(), offset));
            operands.reads.push(read);
        }
        for (port, &state) in inputs[..carried].iter().chain(&rows).enumerate() {
            let state = state_of(&made.draft, state);
            operands.slots.insert(state, Slot::Written(port));
            operands.writes.push(self.result_of_loop(id.output(port), &made.draft, state));
        }
        for (&value, &state) in values[..carried].iter().zip(&inputs) {
            let place = self.place(value)?;
            let dtype = self.graph.fact(value).dtype.held();
            operands.copies.push((operands.reads.len(), state_of(&made.draft, state), dtype));
            operands.reads.push((place.buffer, self.operand(place.buffer, place.access)));
        }
        let first = if reverse { times.saturating_sub(1) } else { 0 };
        let state = state_of(&made.draft, row);
        operands.slots.insert(state, Slot::Row);
        operands.copies.push((operands.reads.len(), state, DType::I64));
        operands.reads.push(self.row_number(&node.name, first)?);
        let packed = self.constants_of_loop(&made.draft, &mut operands);
        let kernel = self.loop_kernel(id, &target, &made, times as u64, &operands)?;
        self.launch_loop(id, kernel, operands, &packed);
        Ok(())
    }

    /// A value as the body's state has it: in its type, row-major, from an aligned byte on. It is copied if it is not so.
    fn operand_of_loop(&mut self, value: ValueId, body: &Draft, state: BufferIdx) -> Result<(Read, u64)> {
        let (place, dtype) = (self.place(value)?, body.buffers[state].dtype);
        let offset = place.access.offset.unsigned_abs() as u64 * dtype.size() as u64;
        let aligned = place.access.offset >= 0 && offset.is_multiple_of(self.target.alignment);
        let same = self.draft.buffers[place.buffer].dtype == dtype && place.access.is_contiguous() && aligned;
        if self.decisions.if_valid("loop reads", value.node, same) {
            return Ok(((place.buffer, self.operand(place.buffer, place.access)), offset));
        }
        let shape = place.access.shape.clone();
        let buffer = self.add_buffer(self.graph.value_name(value).to_owned(), dtype, shape.clone(), Class::Activation);
        let access = Access::contiguous(shape);
        self.copy(value, &place, BufferView { buffer, access: access.clone() })?;
        Ok(((buffer, self.operand(buffer, access)), 0))
    }

    /// The buffer of a result: the one that was decided if it is whole and of the state's type, or a new one.
    fn result_of_loop(&mut self, value: ValueId, body: &Draft, state: BufferIdx) -> BufferIdx {
        let dtype = body.buffers[state].dtype;
        let fits = |place: &&BufferView| {
            let found = &self.draft.buffers[place.buffer];
            let all = place.access.offset == 0 && place.access.shape.numel() == found.shape.numel();
            all && place.access.is_contiguous() && found.dtype == dtype
        };
        let shape = self.graph.fact(value).shape.clone();
        let decided = self.destinations.get(&value).filter(fits).map(|place| place.buffer);
        let decided = self.decisions.if_found("loop result", value.node, decided);
        let buffer = decided.unwrap_or_else(|| {
            self.add_buffer(self.graph.value_name(value).to_owned(), dtype, shape.clone(), Class::Activation)
        });
        self.places.insert(value, BufferView { buffer, access: Access::contiguous(shape) });
        buffer
    }

    /// A constant with the number of the first step's row.
    fn row_number(&mut self, name: &str, first: usize) -> Result<Read> {
        let name = format!("{name}/row");
        let constant = Arc::new(Constant::new(name.clone(), Tensor::from_i64([], &[first as i64])?));
        let dtype = self.storage(DType::I64, &name)?;
        let known = self.draft.constants.iter().find(|other| other.constant.same(&constant));
        let known = known.filter(|other| other.packed.is_none() && self.draft.buffers[other.buffer].dtype == dtype);
        let buffer = match known {
            Some(other) => other.buffer,
            None => {
                let buffer = self.add_buffer(name, dtype, Shape::default(), Class::Constant);
                self.draft.constants.push(DraftConstant { constant, buffer, packed: None });
                buffer
            }
        };
        Ok((buffer, self.operand(buffer, Access::contiguous(Shape::default()))))
    }

    /// Makes operands of the body's constants. Returns those in a packed layout, each with its operand.
    fn constants_of_loop(&mut self, body: &Draft, operands: &mut Operands) -> Vec<(usize, usize)> {
        let (used, mut packed) = (body.used(), Vec::new());
        for own in body.constants.iter().filter(|own| used[own.buffer]) {
            let of = body.buffers[own.buffer].clone();
            let alike = |other: &&DraftConstant| {
                let found = &self.draft.buffers[other.buffer];
                let same = (found.dtype, found.bytes) == (of.dtype, of.bytes);
                same && other.packed.is_none() && own.packed.is_none() && other.constant.same(&own.constant)
            };
            let read = operands.reads.len();
            let known = self.draft.constants.iter().find(alike).map(|other| other.buffer);
            let buffer = known.unwrap_or_else(|| {
                let buffer = self.add_buffer(of.name, of.dtype, of.shape.clone(), Class::Constant);
                self.draft.buffers[buffer].bytes = of.bytes;
                packed.extend(own.packed.map(|_| (self.draft.constants.len(), read)));
                self.draft.constants.push(DraftConstant { constant: own.constant.clone(), buffer, packed: None });
                buffer
            });
            operands.slots.insert(own.buffer, Slot::Read(read, 0));
            let operand = self.operand(buffer, Access::contiguous(of.shape));
            operands.reads.push((buffer, Operand { packed: own.packed.is_some(), ..operand }));
        }
        packed
    }

    /// The kernel of a loop whose body is arranged.
    fn loop_kernel(
        &self,
        id: NodeId,
        target: &Target,
        made: &Placed,
        times: u64,
        operands: &Operands,
    ) -> Result<Kernel> {
        let node = self.graph.node(id);
        let arguments = Arguments::new(made, operands, target);
        // The buffer may have the shape of a view.
        let written = |(port, &buffer): (usize, &BufferIdx)| {
            let access = Access::contiguous(self.graph.fact(id.output(port)).shape.clone());
            self.operand(buffer, access)
        };
        let writes: Vec<Operand> = operands.writes.iter().enumerate().map(written).collect();
        let mut repeat =
            Repeat { reads: operands.reads.len(), times, kernels: Vec::new(), first: Vec::new(), each: Vec::new() };
        for &(read, state, dtype) in &operands.copies {
            let (_, from) = &operands.reads[read];
            let elements = from.access.span().map_or(0, |(_, high)| high.unsigned_abs() as u64 + 1);
            let to = &made.draft.buffers[state];
            let access = Access::contiguous(to.shape.clone());
            let to = Operand { dtype: to.dtype, access, packed: false };
            let kernel = Kernel {
                template: Template::Map,
                shape: to.access.shape.clone(),
                reads: vec![from.clone()],
                body: Body::identity(dtype),
                writes: vec![to],
                prologues: Vec::new(),
                workspace: 0,
                schedule: Schedule::Open,
            };
            let kernel = schedule::scheduled(&kernel, target).map_err(|why| node.error(why))?;
            let bytes = (elements * from.dtype.size() as u64).next_multiple_of(4).max(4);
            let args = vec![ArgBytes { slot: read, offset: 0, bytes }, arguments.of(state)];
            let inner = Inner { name: node.name.clone(), kernel: number(&mut repeat, kernel), args };
            repeat.first.push(inner);
        }
        for &step in &made.order {
            let step = &made.draft.steps[step];
            if !step.bind_ranges.is_empty() {
                let most = target.max_binding;
                let what = format!("step '{}' of its body works on more than a binding holds, {most} bytes", step.name);
                return Err(node.error(format!("{what}: a loop's steps are not split")));
            }
            let kernel = number(&mut repeat, made.draft.kernels[step.kernel].clone());
            let args = step.reads.iter().chain(&step.writes).map(|&buffer| arguments.of(buffer)).collect();
            repeat.each.push(Inner { name: step.name.clone(), kernel, args });
        }
        Ok(Kernel {
            template: Template::Repeat(Box::new(repeat)),
            shape: Shape::new([times as usize]),
            reads: operands.reads.iter().map(|(_, operand)| operand.clone()).collect(),
            writes,
            prologues: Vec::new(),
            body: Body::new(&[]),
            workspace: arguments.row + ROW_BYTES,
            schedule: Schedule::Open,
        })
    }

    /// Adds the step of a loop.
    fn launch_loop(&mut self, id: NodeId, kernel: Kernel, operands: Operands, packed: &[(usize, usize)]) {
        let name = self.graph.node(id).name.clone();
        let bytes = Shape::new([kernel.workspace as usize]);
        let workspace = self.add_buffer(format!("workspace of {name}"), DType::U8, bytes, Class::Workspace);
        let kernel: KernelIdx = self.number(kernel);
        for &(constant, operand) in packed {
            self.draft.constants[constant].packed = Some((Some(kernel), operand));
        }
        self.draft.steps.push(DraftStep {
            name,
            kernel,
            reads: operands.reads.into_iter().map(|(buffer, _)| buffer).collect(),
            writes: operands.writes.into_iter().chain([workspace]).collect(),
            bind_ranges: Vec::new(),
            reusable: Vec::new(),
        });
    }
}

/// Bytes of the number of the step's row: room for the widest integer.
const ROW_BYTES: u64 = 8;

/// The arguments of a loop, as its body's buffers lie in them.
struct Arguments<'a> {
    made: &'a Placed,
    operands: &'a Operands,
    /// Per segment of the body's arena, where it begins in the workspace.
    starts: Vec<u64>,
    /// Where the number of the step's row is in the workspace.
    row: u64,
}

impl<'a> Arguments<'a> {
    fn new(made: &'a Placed, operands: &'a Operands, target: &Target) -> Arguments<'a> {
        let mut row = 0u64;
        let mut starts = Vec::new();
        for segment in &made.segments {
            starts.push(row);
            if segment.class == Class::Activation {
                row = (row + segment.bytes).next_multiple_of(target.alignment);
            }
        }
        Arguments { made, operands, starts, row }
    }

    fn of(&self, buffer: BufferIdx) -> ArgBytes {
        let of = &self.made.draft.buffers[buffer];
        let reads = self.operands.reads.len();
        let workspace = reads + self.operands.writes.len();
        let state = of.over.filter(|_| of.class == Class::State).map_or(buffer, |state| self.state(state));
        let (slot, offset) = match self.operands.slots.get(&state) {
            Some(&Slot::Read(read, offset)) => (read, offset),
            Some(&Slot::Written(port)) => (reads + port, 0),
            Some(Slot::Row) => (workspace, self.row),
            None => {
                let place = self.made.places[buffer].expect("what a step uses has its place");
                (workspace, self.starts[place.segment.index()] + place.offset)
            }
        };
        ArgBytes { slot, offset, bytes: of.bytes }
    }

    /// The buffer of a state whose update, or the update of that, lies over it.
    fn state(&self, mut buffer: BufferIdx) -> BufferIdx {
        while let Some(over) = self.made.draft.buffers[buffer].over {
            buffer = over;
        }
        buffer
    }
}

/// The buffer of a state of a body.
fn state_of(body: &Draft, value: ValueId) -> BufferIdx {
    body.states.iter().find(|state| state.value == value).expect("passes leave states where they are").buffer
}

/// The number of a kernel of a loop, which has each once.
fn number(repeat: &mut Repeat, kernel: Kernel) -> usize {
    let known = repeat.kernels.iter().position(|other| *other == kernel);
    known.unwrap_or_else(|| {
        repeat.kernels.push(kernel);
        repeat.kernels.len() - 1
    })
}
