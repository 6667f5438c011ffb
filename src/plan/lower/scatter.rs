//! Scatters: kernels that write some elements, and whose results lie over their data.
//!
//! ```text
//! data    ---> other readers          all of them before, or else they read a copy
//!    |  the same bytes
//! result  ---> readers
//! ```
//!
//! Data that must stay is copied first: a constant, an output, a state whose update is another value, and data of which another scatter takes
//! the place. A state's old elements, an input and an activation do not stay.

use super::buffer_view::BufferView;
use super::outline::{Outline, build};
use super::view::keeps_order;
use super::{Dag, DraftBuffer, Lowering, state::reached};
use crate::error::Result;
use crate::expr::Body;
use crate::graph::Graph;

use crate::op::{NodeId, ValueId};
use crate::shape::Access;
use crate::{BufferIdx, Class, StepIdx};
use std::collections::{HashMap, HashSet};

/// The scatters of a graph, and the buffers over which they lie.
#[derive(Default)]
pub(super) struct Scatters {
    /// Nodes that make the update of a state from its old elements.
    updates: HashMap<NodeId, BufferIdx>,
    /// Per buffer of data that a scatter lies over, the data.
    over: HashMap<BufferIdx, ValueId>,
}

impl Scatters {
    /// True if a scatter takes the place of the data in a buffer.
    pub(super) fn replaces(&self, buffer: BufferIdx) -> bool {
        self.over.contains_key(&buffer)
    }
}

/// True if a node is a scatter: its row says so.
pub(super) fn is_scatter(graph: &Graph, id: NodeId) -> bool {
    graph.node(id).op().is_some_and(|op| op.in_place)
}

impl Lowering<'_> {
    /// Finds the states that scatters alone update. Nothing on the way from the old elements to the update has another place.
    pub(super) fn choose_scatters(&mut self) {
        for (state, draft) in self.graph.states().iter().zip(&self.draft.states) {
            let (Some(update), Some(buffer)) = (state.update, draft.update) else { continue };
            let (mut value, mut nodes) = (update, Vec::new());
            while value != state.value {
                let node = value.node;
                if is_scatter(self.graph, node) {
                    nodes.push(node);
                } else if !keeps_order(self.graph, node) {
                    break;
                }
                value = self.graph.operands(node)[0].expect("it has data");
            }
            let made = nodes.first().map(|&node| node.output(0));
            let aimed =
                made.and_then(|value| self.destinations.get(&value)).is_some_and(|place| place.buffer == buffer);
            if value == state.value && aimed {
                nodes[1..].iter().for_each(|&node| drop(self.destinations.remove(&node.output(0))));
                self.scatters.updates.extend(nodes.into_iter().map(|node| (node, buffer)));
            }
        }
    }

    /// Makes the kernel of a scatter, whose result lies over its data, or over a copy of it.
    pub(super) fn scatter(&mut self, id: NodeId) -> Result<()> {
        let value = id.output(0);
        let operands: Vec<_> = self.graph.operands(id).into_iter().flatten().collect();
        let (data, fact) = (operands[0], self.graph.fact(value).clone());
        let place = self.place(data)?;
        let class = self.draft.buffers[place.buffer].class;
        let passes = match class {
            Class::Activation | Class::Input => true,
            Class::State => self.scatters.updates.contains_key(&id),
            _ => false,
        };
        // Data that are kept in 16 bits have fewer bytes than the result, so it cannot lie over them.
        let narrower =
            class != Class::State && self.draft.buffers[place.buffer].dtype != self.target.storage(fact.dtype)?;
        let in_place = passes && !narrower && self.is_whole(&place) && !self.scatters.replaces(place.buffer);
        let in_place = self.decisions.if_valid("scatter in place", id, in_place);
        let from = if in_place { place.buffer } else { self.contiguous(data, &place)?.buffer };
        let to = self.scattered(value, from)?;
        self.scatters.over.insert(from, data);
        self.draft.buffers[to].over = Some(from);
        let access = Access::contiguous(fact.shape);
        self.places.insert(value, BufferView { buffer: to, access: access.clone() });

        let mut places = vec![BufferView { buffer: from, access }];
        for &value in &operands[1..] {
            places.push(self.place(value)?);
        }
        // A scatter's kernel converts nothing: updates take the data's type first.
        let stored = self.draft.buffers[from].dtype;
        if let Some(updates) = places.get(2).cloned()
            && self.draft.buffers[updates.buffer].dtype != stored
        {
            let shape = self.graph.fact(operands[2]).shape.clone();
            let name = self.draft.buffers[updates.buffer].name.clone();
            let buffer = self.add_buffer(name, stored, shape.clone(), Class::Activation);
            let copy = BufferView { buffer, access: Access::contiguous(shape) };
            self.copy(operands[2], &updates, copy.clone())?;
            places[2] = copy;
        }
        let accesses: Vec<_> = places.iter().map(|place| place.access.clone()).collect();
        let call = build(self.graph, id, &accesses, None)?;
        let read = |(input, access): &(usize, Access)| {
            (places[*input].buffer, self.operand(places[*input].buffer, access.clone()))
        };
        let reads = call.reads.iter().map(read).collect();
        let base = BufferView { buffer: to, access: call.reads[0].1.clone() };
        let outline = Outline::new(call.template, call.shape, Body::identity(fact.dtype.held()));
        self.step(self.graph.node(id).name.clone(), outline, reads, base)
    }

    /// The buffer of a scatter's result over `from`: the one that was decided, if it can have the data's bytes.
    fn scattered(&mut self, value: ValueId, from: BufferIdx) -> Result<BufferIdx> {
        let class = self.draft.buffers[from].class;
        let class = if class == Class::State { class } else { Class::Activation };
        let fits = |place: &&BufferView| {
            let found = self.draft.buffers[place.buffer].class;
            self.is_whole(place)
                && (found == Class::Output || found == class)
                && (found == Class::State) == (class == Class::State)
        };
        match self.destinations.get(&value).filter(fits) {
            Some(place) => Ok(place.buffer),
            None => self.buffer(value, class),
        }
    }

    /// True if a value is all that its buffer has, in row-major order.
    fn is_whole(&self, place: &BufferView) -> bool {
        let BufferView { buffer, access } = place;
        let all = access.offset == 0 && access.shape.numel() == self.draft.buffers[*buffer].shape.numel();
        all && access.is_contiguous()
    }

    /// Per step, the steps that scatter over data that it reads. A reader that depends on the scatter over its data reads a copy, as does a
    /// scatter that reads its data for more than that.
    pub(super) fn order_scatters(&mut self) -> Result<Vec<Vec<StepIdx>>> {
        let mut overwrites = vec![Vec::new(); self.draft.steps.len()];
        let mut dag = Dag::new(&self.draft);
        for result in BufferIdx::all(&self.draft.buffers) {
            let Some(data) = self.draft.buffers[result].over else { continue };
            let Some(&value) = self.scatters.over.get(&data) else { continue };
            let mut writers = self.writers(result);
            let late = self.late(data, &writers, &reached(&writers, &dag, &overwrites));
            if !late.is_empty() {
                self.copy_for(value, data, &late, writers[0], &mut overwrites)?;
                (dag, writers) = (Dag::new(&self.draft), self.writers(result));
            }
            for (s, step) in StepIdx::enumerate(&self.draft.steps) {
                if step.reads.contains(&data) && !writers.contains(&s) {
                    overwrites[s].extend(&writers);
                }
            }
        }
        Ok(overwrites)
    }

    fn writers(&self, buffer: BufferIdx) -> Vec<StepIdx> {
        StepIdx::enumerate(&self.draft.steps)
            .filter(|(_, step)| step.writes.contains(&buffer))
            .map(|(s, _)| s)
            .collect()
    }

    /// The steps that cannot read data before the steps that scatter over it. `behind` are all that come behind these.
    fn late(&self, data: BufferIdx, writers: &[StepIdx], behind: &HashSet<StepIdx>) -> Vec<StepIdx> {
        let is_late = |s: StepIdx| {
            let reads = &self.draft.steps[s].reads;
            if writers.contains(&s) { reads[1..].contains(&data) } else { behind.contains(&s) && reads.contains(&data) }
        };
        StepIdx::all(&self.draft.steps).filter(|&s| is_late(s)).collect()
    }

    /// Copies data ahead of the first step that scatters over it, for the steps that read it too late.
    fn copy_for(
        &mut self,
        value: ValueId,
        data: BufferIdx,
        late: &[StepIdx],
        first: StepIdx,
        overwrites: &mut Vec<Vec<StepIdx>>,
    ) -> Result<()> {
        let access = Access::contiguous(self.graph.fact(value).shape.clone());
        let before = self.draft.steps.len();
        let DraftBuffer { name, dtype, shape, .. } = self.draft.buffers[data].clone();
        let copy = self.add_buffer(name, dtype, shape, Class::Activation);
        let view = |buffer| BufferView { buffer, access: access.clone() };
        self.copy(value, &view(data), view(copy))?;
        let count = self.draft.steps.len() - before;
        let (at, moved) = (first.index(), |s: StepIdx| if s < first { s } else { StepIdx::new(s.index() + count) });
        self.draft.steps[at..].rotate_right(count);
        overwrites.splice(at..at, vec![Vec::new(); count]);
        overwrites.iter_mut().flatten().for_each(|s| *s = moved(*s));
        for &s in late {
            let step = &mut self.draft.steps[moved(s)];
            let is_scatter = self.draft.kernels[step.kernel].is_in_place();
            let reads = step.reads.iter_mut().skip(usize::from(is_scatter && step.reusable.contains(&data)));
            reads.chain(&mut step.reusable).filter(|b| **b == data).for_each(|b| *b = copy);
        }
        Ok(())
    }
}
