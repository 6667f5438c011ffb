//! States: values that last from one run to the next.
//!
//! A state has two buffers at the same bytes: the elements from before the run, and the update. The update is written in place if every
//! step that reads the old elements can run before. Else it is made in the arena and copied behind them.
//!
//! ```text
//! old  ---> reader ---> reader
//!                             \\ the same bytes
//! update                       '---> writer ---> readers of the update
//! ```

use super::buffer_view::BufferView;
use super::launch::reads_as_written;
use super::{Dag, DraftState, DraftStep, Lowering};
use crate::error::Result;
use crate::graph::Kind;
use crate::shape::Access;
use crate::{BufferIdx, Class, StepIdx};
use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashSet};

impl Lowering<'_> {
    /// Adds the buffers of all states.
    pub(super) fn add_states(&mut self) -> Result<()> {
        for state in self.graph.states() {
            let shared = self.shared_bytes(state.value, Class::State);
            let buffer = shared.map_or_else(|| self.buffer(state.value, Class::State), Ok)?;
            let name = self.graph.value_name(state.value);
            self.draft.buffers[buffer].offloaded = self.offload.takes_state(name, self.graph.fact(state.value));
            let update = state.update.map(|_| self.update_buffer(buffer));
            let Kind::State(initial) = &self.graph.node(state.value.node).kind else { unreachable!("it is a state") };
            let initial = initial.clone();
            self.draft.states.push(DraftState { value: state.value, buffer, update, initial });
            if shared.is_some() {
                self.shared_ports.insert(state.value, buffer);
                continue;
            }
            let access = Access::contiguous(self.graph.fact(state.value).shape.clone());
            self.places.insert(state.value, BufferView { buffer, access });
        }
        Ok(())
    }

    /// A buffer for the update of the state that lies in `buffer`.
    fn update_buffer(&mut self, buffer: BufferIdx) -> BufferIdx {
        let mut update = self.draft.buffers[buffer].clone();
        update.name += " (updated)";
        update.over = Some(buffer);
        self.draft.buffers.push(update);
        let update = BufferIdx::new(self.draft.buffers.len() - 1);
        if self.draft.packed.contains(&buffer) {
            self.draft.packed.insert(update);
        }
        update
    }

    /// Puts each step that writes over data behind all other steps that read it: a scatter, or what writes an update. An update that has to
    /// be there earlier is copied.
    pub(super) fn order_updates(&mut self) -> Result<()> {
        // Per step, the steps that write over data that it reads: edges beside those of `dag`. Those of one more state are safe if no
        // reader comes behind a writer by the edges so far.
        let mut overwrites = self.order_scatters()?;
        let dag = Dag::new(&self.draft);
        let (reads, writes) = (self.uses(|step| &step.reads), self.uses(|step| &step.writes));
        for at in 0..self.draft.states.len() {
            let DraftState { value, buffer, update: Some(update), .. } = self.draft.states[at] else { continue };
            if self.scatters.replaces(buffer) {
                continue;
            }
            let (readers, writers) = (&reads[buffer], &writes[update]);
            let in_place = writers.iter().filter(|s| readers.contains(s)).all(|&s| {
                let step = &self.draft.steps[s];
                let further = |result| reads_as_written(&self.draft.kernels[step.kernel], &step.reads, buffer, result);
                let fits = match step.writes.iter().position(|&written| written == update) {
                    Some(0) => step.reusable.contains(&buffer),
                    result => result.is_some_and(further),
                };
                writers.len() == 1 && fits
            });
            let first = in_place && {
                let behind = reached(writers, &dag, &overwrites);
                readers.iter().all(|s| writers.contains(s) || !behind.contains(s))
            };
            if self.decisions.if_valid("update in place", value.node, first) {
                for &s in readers {
                    overwrites[s].extend(writers.iter().filter(|&&w| w != s));
                }
                continue;
            }
            // The update is made elsewhere, and copied behind the readers.
            let copy = self.update_buffer(buffer);
            let made = &mut self.draft.buffers[update];
            (made.class, made.over, made.offloaded) = (Class::Activation, None, false);
            self.draft.states[at].update = Some(copy);
            let access = Access::contiguous(self.draft.buffers[buffer].shape.clone());
            let view = |buffer| BufferView { buffer, access: access.clone() };
            let before = self.draft.steps.len();
            self.copy(value, &view(update), view(copy))?;
            let copies = StepIdx::all(&self.draft.steps).skip(before);
            readers.iter().for_each(|&s| overwrites[s].extend(copies.clone()));
            overwrites.resize(self.draft.steps.len(), Vec::new());
        }
        self.sort_steps(&overwrites);
        Ok(())
    }

    /// Per buffer of a state, the steps that use it.
    fn uses(&self, of: fn(&DraftStep) -> &Vec<BufferIdx>) -> Vec<Vec<StepIdx>> {
        let mut uses = vec![Vec::new(); self.draft.buffers.len()];
        for (s, step) in StepIdx::enumerate(&self.draft.steps) {
            let states = of(step).iter().filter(|&&b| self.draft.buffers[b].class == Class::State);
            states.for_each(|&b| uses[b].push(s));
        }
        uses
    }

    /// Sorts the steps so that each comes behind those it depends on and before those that overwrite what it reads; otherwise in the order
    /// of the file.
    fn sort_steps(&mut self, overwrites: &[Vec<StepIdx>]) {
        if overwrites.iter().all(Vec::is_empty) {
            return;
        }
        let dag = Dag::new(&self.draft);
        let after = |s: StepIdx| dag.after[s].iter().chain(&overwrites[s]);
        let mut missing = vec![0usize; overwrites.len()];
        StepIdx::all(&self.draft.steps).flat_map(after).for_each(|&s| missing[s] += 1);
        let ready = StepIdx::all(&self.draft.steps).filter(|&s| missing[s] == 0);
        let mut ready: BinaryHeap<_> = ready.map(Reverse).collect();
        let mut sorted = Vec::with_capacity(missing.len());
        while let Some(Reverse(s)) = ready.pop() {
            sorted.push(self.draft.steps[s].clone());
            for &next in after(s) {
                missing[next] -= 1;
                if missing[next] == 0 {
                    ready.push(Reverse(next));
                }
            }
        }
        assert_eq!(sorted.len(), missing.len(), "no step depends on one that overwrites what it reads");
        self.draft.steps = sorted;
    }
}

/// All steps that come behind these.
pub(super) fn reached(from: &[StepIdx], dag: &Dag, overwrites: &[Vec<StepIdx>]) -> HashSet<StepIdx> {
    let (mut found, mut stack) = (HashSet::new(), from.to_vec());
    while let Some(s) = stack.pop() {
        // A copy of an update has no step behind it.
        let after = dag.after.get(s.index()).into_iter().flatten().chain(&overwrites[s]);
        stack.extend(after.filter(|&&next| found.insert(next)));
    }
    found
}
