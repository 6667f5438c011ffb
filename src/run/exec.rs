//! Loads a plan on a backend and replays it. Decides nothing.

use crate::backend::{Backend, HostMemory, KernelId, Launch, RecordId, SegmentId, Slice, host_memory};
use crate::constant::Constant;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::kernel::Kernel;
use crate::kernel::cpu::{self, Plain};
use crate::pass::shard::PLACE;
use crate::plan::{
    BufferIdx, Class, ConstantPort, Counted, Data, Indexes, Plan, Port, Program, Segment, SegmentIdx, Spot, StatePort,
    Step, Use, View,
};
use crate::shape::{Access, Shape};
use crate::target::{Memory, PREFETCH_STACK};
use crate::tensor::Tensor;
use spread::Spread;
use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

mod count;
pub(crate) mod finite;
mod place;
pub mod poison;
mod saved;
pub(crate) mod spread;

/// A plan on a device: allocated, filled with its constants, recorded. One of its programs is current and runs. Plans of other bindings of a
/// range may be added: they have the same segments, and one program each.
pub struct Exec {
    backend: Box<dyn Backend>,
    segments: Vec<SegmentId>,
    /// The programs, by their numbers.
    loaded: Vec<Loaded>,
    /// The number of the program that runs.
    current: usize,
    /// True if the inputs are written and not yet overwritten.
    ready: bool,
    /// Per input and per output, the number of its place in the lists of the last run in place, whose room the next one takes.
    order: [Vec<usize>; 2],
    /// The states of all plans, each once.
    states: Vec<Lasting>,
    /// The states that ranks of other stages have.
    elsewhere: Vec<Lasting>,
    /// Compiled kernels by their content, if there is more than one plan.
    compiled: HashMap<String, KernelId>,
    contents: Option<Box<Contents>>,
    /// Where the inputs of the next run are made ready, until somebody takes it.
    ahead: Option<Vec<u8>>,
    /// True if this is the rank that writes files.
    is_first: bool,
}

/// The constants of plans that want different contents at the same place: bindings of a range.
#[derive(Default)]
struct Contents {
    /// Per plan, the place of each of its constants, and the number of the constant's content in `wanted`.
    constants: Vec<Vec<(Spot, usize)>>,
    /// Per place, the contents that plans want there.
    wanted: HashMap<Spot, Vec<Content>>,
    /// Per place, the number of the content that lies there.
    held: HashMap<Spot, usize>,
}

/// A program that is ready to run.
struct Loaded {
    plan: Arc<Plan>,
    /// The number of the program in the plan.
    number: usize,
    kernels: Vec<KernelId>,
    record: RecordId,
    /// True if a run overwrites the inputs.
    consumes: bool,
}

impl Loaded {
    fn program(&self) -> &Program {
        &self.plan.programs[self.number]
    }
}

/// A state, and the elements that it begins with if they are given.
#[derive(Clone)]
struct Lasting {
    port: Port,
    at: Slice,
    stored: DType,
    initial: Option<Arc<Constant>>,
    /// True if a plan bounds its elements.
    watched: bool,
    /// If the state counts: the most that it may hold.
    most: Option<u64>,
    /// The host's copy of the least and the largest element of a state that is watched; `None` if it is unknown.
    ends: Option<count::Ends>,
    /// How it is split, if each rank has a part.
    spread: Option<Spread>,
}

impl Lasting {
    /// True if it tells a rank its place: it is every rank's own, and in no file.
    fn is_place(&self) -> bool {
        self.port.name.starts_with(PLACE)
    }

    /// True if ranks of another stage have it.
    fn is_elsewhere(&self) -> bool {
        self.spread.as_ref().is_some_and(Spread::is_elsewhere)
    }

    /// The shape of the whole.
    fn whole(&self) -> Shape {
        self.spread.as_ref().map_or_else(|| self.port.shape.clone(), |spread| spread.whole(&self.port.shape))
    }
}

/// A constant in the form that a plan wants.
struct Content {
    constant: Arc<Constant>,
    at: Slice,
    stored: DType,
    packed: Option<(Kernel, usize)>,
}

impl std::fmt::Debug for Exec {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Exec").field("program", &self.plan().name).finish_non_exhaustive()
    }
}

impl Exec {
    /// Allocates the plan's segments, uploads its data, and records the steps of its programs. The first program is current. Calls `progress`
    /// as each constant arrives.
    ///
    /// # Errors
    /// When the data is not the plan's, a constant cannot be fetched, or the device refuses. All that was allocated is freed.
    pub fn load(backend: Box<dyn Backend>, plan: Plan, data: &Data, progress: &dyn Fn(usize)) -> Result<Exec> {
        let mut exec = Exec::new(backend);
        // If it fails, dropping it frees what it has allocated.
        exec.prepare(Arc::new(plan), data, progress)?;
        exec.ready = exec.plan().inputs.is_empty();
        Ok(exec)
    }

    fn new(backend: Box<dyn Backend>) -> Exec {
        Exec {
            backend,
            segments: Vec::new(),
            loaded: Vec::new(),
            current: 0,
            ready: false,
            order: [Vec::new(), Vec::new()],
            states: Vec::new(),
            elsewhere: Vec::new(),
            compiled: HashMap::new(),
            contents: None,
            ahead: None,
            is_first: true,
        }
    }

    fn prepare(&mut self, plan: Arc<Plan>, data: &Data, progress: &dyn Fn(usize)) -> Result<()> {
        let device = plan.segments.iter().filter(|s| s.memory.is_device());
        let needed = device.map(|s| s.bytes * plan.copies(s.class)).sum();
        if let Some(room) = self.backend.room().filter(|room| room.free < needed) {
            let what = format!("the plan of '{}' in what is free on '{}'", plan.title(), plan.target.name);
            return Err(Error::Fit { what, needed, limit: room.free, file: None });
        }
        let (expected, found) = (plan.programs.len(), data.len());
        if expected != found {
            return Err(Error::plan(format!("expected the data of {expected} programs, found {found}")));
        }
        for (program, constants) in plan.programs.iter().zip(data) {
            are_constants(program, constants)?;
        }
        for segment in &plan.segments {
            let id = self.alloc(segment)?;
            self.segments.push(id);
        }
        self.write_constants(&plan, data, progress)?;
        for (number, constants) in data.iter().enumerate() {
            let program = &plan.programs[number];
            self.know_states(program, &constants[program.constants.len()..]);
            self.record(Arc::clone(&plan), number)?;
        }
        // Recording may have run steps.
        self.reset_state()
    }

    fn alloc(&mut self, segment: &Segment) -> Result<SegmentId> {
        if segment.memory == Memory::Prefetch {
            self.ahead = Some(host_memory(segment.bytes.saturating_sub(PREFETCH_STACK), "the next rows")?);
        }
        self.backend.alloc(segment.bytes, segment.memory)
    }

    /// The planned memory for the inputs of the next run, if there is some, for whoever makes them ready while one runs. It may be taken once,
    /// and it is counted for as long as the plan is loaded.
    pub(crate) fn take_prefetch(&mut self) -> Option<Vec<u8>> {
        self.ahead.take()
    }

    /// Writes the constants of all programs, each once.
    fn write_constants(&mut self, plan: &Plan, data: &Data, progress: &dyn Fn(usize)) -> Result<()> {
        let mut written: HashMap<Spot, Content> = HashMap::new();
        let mut done = 0;
        for (program, constants) in plan.programs.iter().zip(data) {
            for (port, constant) in program.constants.iter().zip(constants) {
                let spot = program.buffers[port.buffer].spot();
                done += 1;
                progress(done);
                // One program has no constant twice.
                if data.len() > 1 {
                    let content = Content::new(program, port, constant, &self.segments);
                    if let Some(other) = written.get(&spot) {
                        if !other.is_same(&content) {
                            let names = (&other.constant.name, &constant.name);
                            let what =
                                format!("constants '{}' and '{}' differ, but share their bytes", names.0, names.1);
                            return Err(Error::plan(format!("'{}': {what}", program.name)));
                        }
                        continue;
                    }
                    written.insert(spot, content);
                }
                let (stored, at) = place(program, &self.segments, port.buffer);
                let packed = port.packed.map(|(kernel, operand)| (&program.kernels[kernel], operand));
                write_constant(&mut *self.backend, at, stored, packed, constant)?;
            }
        }
        Ok(())
    }

    /// Notes the states of a program that no earlier one has. `given` has the elements of states whose first elements are given.
    fn know_states(&mut self, plan: &Program, given: &[Arc<Constant>]) {
        let mut given = given.iter();
        for StatePort { port, given: is_given, count, .. } in &plan.state {
            let initial =
                is_given.then(|| given.next().expect("there is data for each state that has it given").clone());
            let most = count.map(|count| count.most);
            let watched = most.is_some() || !port.indexes.is_empty();
            if let Some(known) = self.states.iter_mut().find(|known| known.port.name == port.name) {
                known.watched |= watched;
                known.most = known.most.max(most);
            } else {
                let (stored, at) = port_place(plan, &self.segments, port);
                self.states.push(Lasting {
                    port: port.clone(),
                    at,
                    stored,
                    initial,
                    watched,
                    most,
                    ends: None,
                    spread: None,
                });
            }
        }
    }

    /// Compiles the kernels of a program that no earlier one has, records its steps, and returns its number.
    fn record(&mut self, plan: Arc<Plan>, number: usize) -> Result<usize> {
        let program = &plan.programs[number];
        if let ([only], true) = (&self.loaded[..], self.compiled.is_empty()) {
            self.compiled.extend(only.program().kernels.iter().map(Kernel::key).zip(only.kernels.iter().copied()));
        }
        let mut kernels = Vec::with_capacity(program.kernels.len());
        for kernel in &program.kernels {
            if self.loaded.is_empty() {
                kernels.push(self.backend.compile(kernel)?);
                continue;
            }
            kernels.push(match self.compiled.entry(kernel.key()) {
                Entry::Occupied(known) => *known.get(),
                Entry::Vacant(new) => *new.insert(self.backend.compile(kernel)?),
            });
        }
        let launches: Vec<Launch> =
            program.steps.iter().map(|s| launch(program, &self.segments, &kernels, s)).collect();
        let record = self.backend.record(&launches)?;
        let [inputs, outputs] = &mut self.order;
        inputs.reserve(program.inputs.len());
        outputs.reserve(program.outputs.len());
        self.loaded.push(Loaded { consumes: program.consumes_inputs(), plan, number, kernels, record });
        Ok(self.loaded.len() - 1)
    }

    /// The same programs, ready to run at the same time as these: on the same constants, with all other segments and states of their own, which
    /// begin as those did. It has to be dropped before this one.
    ///
    /// # Errors
    /// When the device refuses, or bindings of a range write constants.
    pub fn fork(&mut self) -> Result<Exec> {
        if self.contents.is_some() {
            return Err(Error::usage("the bindings of a range write constants: expected one run at once".into()));
        }
        let plan = Arc::clone(&self.loaded[0].plan);
        let own = |segment: &Segment| segment.class != Class::Constant;
        let shared = SegmentIdx::enumerate(&plan.segments).filter(|(_, segment)| !own(segment));
        let backend = self.backend.fork(&shared.map(|(at, _)| self.segments[at]).collect::<Vec<_>>())?;
        let mut fork = Exec::new(backend);
        for (at, segment) in SegmentIdx::enumerate(&plan.segments) {
            let id = if own(segment) { fork.alloc(segment)? } else { self.segments[at] };
            fork.segments.push(id);
        }
        for state in &self.states {
            let at = self.segments.iter().position(|&segment| segment == state.at.segment);
            let segment = fork.segments[at.expect("a state lies in a segment")];
            fork.states.push(Lasting { at: Slice { segment, ..state.at }, ..state.clone() });
        }
        for Loaded { plan, number, .. } in &self.loaded {
            fork.record(Arc::clone(plan), *number)?;
        }
        fork.reset_state()?;
        fork.ready = fork.plan().inputs.is_empty();
        Ok(fork)
    }

    /// Makes the plan of another binding ready to run, a plan of one program over the same segments, and returns its number. States stay as
    /// they are. `before` is the data of the plan that was [loaded](Self::load), whose programs have the first numbers. The program that runs
    /// stays the same.
    ///
    /// # Errors
    /// When the plan has other segments, a list of constants is not its plan's, or the device refuses.
    pub fn add(&mut self, plan: Plan, data: &Data, before: &Data) -> Result<usize> {
        let state = self.keep_state()?;
        let added = self.add_beside(plan, data, before);
        self.restore_state(&state)?;
        added
    }

    fn add_beside(&mut self, plan: Plan, data: &Data, before: &Data) -> Result<usize> {
        let (expected, found) = (&self.loaded[0].plan.segments, &plan.segments);
        if expected != found {
            return Err(Error::plan(format!("expected the segments that are there, {expected:?}, found {found:?}")));
        }
        let ([program], [constants]) = (&plan.programs[..], &data[..]) else {
            return Err(Error::plan("expected the plan of one binding, of one program".into()));
        };
        are_constants(program, constants)?;
        if self.contents.is_none() {
            assert_eq!(before.len(), self.loaded.len(), "constants of all programs before");
            let mut contents = Box::<Contents>::default();
            for (loaded, constants) in self.loaded.iter().zip(before) {
                are_constants(loaded.program(), constants)?;
                contents.know(loaded.program(), &self.segments, constants);
            }
            contents.held.extend(contents.constants.iter().flatten().copied());
            self.contents = Some(contents);
        }
        let number = self.record(Arc::new(plan), 0)?;
        let contents = self.contents.as_mut().expect("it was made above");
        contents.know(self.loaded[number].program(), &self.segments, constants);
        Ok(number)
    }

    /// Makes a plan the one that runs. This writes those constants of it that other plans have overwritten. Its inputs have to be written
    /// anew.
    ///
    /// # Errors
    /// When a constant cannot be fetched or the device fails.
    ///
    /// # Panics
    /// When no plan has this number.
    pub fn select(&mut self, number: usize) -> Result<()> {
        assert!(number < self.loaded.len(), "plan {number} is loaded");
        if let Some(contents) = &mut self.contents {
            contents.select(number, &mut *self.backend)?;
        }
        if self.current != number {
            self.current = number;
            self.ready = self.plan().inputs.is_empty();
        }
        Ok(())
    }

    /// The program that runs, and its plan.
    pub fn plan(&self) -> View<'_> {
        let Loaded { plan, number, .. } = &self.loaded[self.current];
        plan.views().nth(*number).expect("it is loaded")
    }

    /// A tensor in memory of the host from which the device copies it without a detour, beside the plan.
    ///
    /// # Errors
    /// When the host has not so much.
    pub fn within_reach(&mut self, tensor: &Tensor) -> Result<Tensor> {
        struct Reached(Box<dyn HostMemory>);
        impl AsRef<[u8]> for Reached {
            fn as_ref(&self) -> &[u8] {
                (*self.0).as_ref()
            }
        }
        let bytes = tensor.bytes();
        let mut memory = self.backend.host_memory(bytes.len() as u64, "an input")?;
        (*memory).as_mut().copy_from_slice(bytes);
        Tensor::new(tensor.dtype(), tensor.shape().clone(), bytes::Bytes::from_owner(Reached(memory)))
    }

    /// The device.
    pub fn backend(&self) -> &dyn Backend {
        &*self.backend
    }

    pub(crate) fn backend_mut(&mut self) -> &mut dyn Backend {
        &mut *self.backend
    }

    /// Copies inputs, in the plan's order, into their buffers. They are good for one run, which may overwrite them.
    ///
    /// # Errors
    /// When an input is not of the planned type and shape, or holds a value that the device's type cannot hold.
    pub fn write(&mut self, inputs: &[Tensor]) -> Result<()> {
        let Exec { backend, loaded, current, segments, .. } = self;
        let plan = loaded[*current].program();
        write_inputs(&mut **backend, &plan.inputs, &|port| port_place(plan, segments, port), inputs)?;
        self.ready = true;
        Ok(())
    }

    /// Runs all steps once, on the inputs that were written last.
    ///
    /// # Errors
    /// When the device fails, no inputs were written since the plan was loaded or selected, or an earlier run has overwritten them. When a
    /// state that counts would pass its bound: then nothing runs.
    pub fn replay(&mut self) -> Result<()> {
        if !self.ready {
            return Err(Error::usage("the inputs have to be written before each run, which may overwrite them".into()));
        }
        let Loaded { consumes, record, .. } = &self.loaded[self.current];
        let plan = self.loaded[self.current].program();
        count::check(&mut self.states, plan, &mut *self.backend)?;
        self.ready = !consumes;
        self.backend.replay(*record)?;
        count::advance(&mut self.states, plan);
        Ok(())
    }

    /// Runs all steps once, on what the inputs hold now. Returns how long they took, by the device's clock if it has one.
    ///
    /// # Errors
    /// When the device fails, or a state that counts would pass its bound.
    pub fn time(&mut self) -> Result<Duration> {
        let Loaded { consumes, record, .. } = &self.loaded[self.current];
        let plan = self.loaded[self.current].program();
        count::check(&mut self.states, plan, &mut *self.backend)?;
        self.ready &= !consumes;
        let time = self.backend.time(*record)?;
        count::advance(&mut self.states, plan);
        Ok(time)
    }

    /// Runs the steps so many times. Returns how long each takes, the median of its times: within a run by the device's clock if it has one that
    /// tells, and else one by one. States stay as they are.
    ///
    /// # Errors
    /// As [`write`](Self::write), and when the device fails.
    ///
    /// # Panics
    /// When no round is asked for.
    pub fn profile(&mut self, inputs: &[Tensor], rounds: u32) -> Result<Vec<Duration>> {
        let state = self.keep_state()?;
        let mut times = vec![Vec::with_capacity(rounds as usize); self.plan().steps.len()];
        let mut records = None;
        // The first round is not counted: devices and drivers prepare much when a kernel first runs.
        for round in 0..=rounds {
            self.write(inputs)?;
            self.ready &= !self.loaded[self.current].consumes;
            let within = match &records {
                None => self.backend.time_launches(self.loaded[self.current].record)?,
                Some(_) => None,
            };
            let found = match within {
                Some(within) => within,
                None => {
                    let records = match &mut records {
                        Some(records) => records,
                        none => none.insert(self.record_steps()?),
                    };
                    records.iter().map(|record| self.backend.time(*record)).collect::<Result<_>>()?
                }
            };
            for (times, time) in times.iter_mut().zip(found).filter(|_| round > 0) {
                times.push(time);
            }
            self.restore_state(&state)?;
            tracing::debug!(round, steps = times.len(), "profiled");
        }
        let median = |mut times: Vec<Duration>| {
            times.sort_unstable();
            times[times.len() / 2]
        };
        Ok(times.into_iter().map(median).collect())
    }

    /// Per step, its algorithm, and the device's note on it.
    pub fn notes(&self) -> Vec<String> {
        let (mut words, notes) = (self.plan().algorithms(), self.backend.notes(self.loaded[self.current].record));
        for (words, note) in words.iter_mut().zip(&notes).filter(|(_, note)| !note.is_empty()) {
            *words += &format!(", {note}");
        }
        words
    }

    /// Waits for the device and copies the outputs, in the plan's order, to the host.
    ///
    /// # Errors
    /// When the run found fewer elements than the plan is for, or the device fails.
    pub fn read(&mut self) -> Result<Vec<Tensor>> {
        let Exec { backend, loaded, current, segments, states, .. } = self;
        let plan = loaded[*current].program();
        let own = plan.outputs.iter().map(|port| {
            let (stored, at) = port_place(plan, segments, port);
            (port, stored, at)
        });
        // What the next run needs to know comes on the same way.
        let unknown = |state: &&Lasting| state.watched && state.ends.is_none();
        let further = states.iter().filter(unknown).map(|state| (&state.port, state.stored, state.at));
        let mut found = read_ports(&mut **backend, &own.chain(further).collect::<Vec<_>>())?;
        let further = found.split_off(plan.outputs.len());
        for (state, tensor) in states.iter_mut().filter(|state| unknown(&&**state)).zip(further) {
            state.ends = Some(count::ends(&tensor));
        }
        plan.outputs.iter().zip(&found).try_for_each(|(port, tensor)| count::suffices(port, tensor))?;
        Ok(found)
    }

    /// Refuses a run that would take a state beyond a bound.
    fn check_states(&mut self) -> Result<()> {
        count::check(&mut self.states, self.loaded[self.current].program(), &mut *self.backend)
    }

    /// Waits for the device and copies one output, by its number in the plan, to the host.
    ///
    /// # Errors
    /// When the device fails.
    ///
    /// # Panics
    /// When the plan has fewer outputs.
    pub fn output(&mut self, number: usize) -> Result<Tensor> {
        let Exec { backend, loaded, current, segments, .. } = self;
        let plan = loaded[*current].program();
        let found =
            read_outputs(&mut **backend, &plan.outputs[number..=number], &|port| port_place(plan, segments, port))?;
        Ok(found.into_iter().next().expect("one port has one tensor"))
    }

    /// One output, by its number in the plan, without the room behind what the run found.
    ///
    /// # Errors
    /// When the run found fewer elements than the plan is for, or the device fails.
    ///
    /// # Panics
    /// When the plan has fewer outputs.
    pub fn found(&mut self, number: usize) -> Result<Tensor> {
        let outputs = self.plan().outputs.clone();
        for (at, port) in outputs.iter().enumerate().filter(|(_, port)| port.fewest.is_some()) {
            count::suffices(port, &self.output(at)?)?;
        }
        let mut counts = BTreeMap::new();
        for Counted { by, .. } in &outputs[number].counted {
            let at = outputs.iter().position(|port| port.name == *by);
            counts.insert(&by[..], self.output(at.expect("a checked plan has the output that counts"))?);
        }
        Ok(without_room(self.output(number)?, &outputs[number].counted, &counts))
    }

    /// A state's elements.
    ///
    /// # Errors
    /// When no plan has such a state, or the device fails.
    pub fn state(&mut self, name: &str) -> Result<Tensor> {
        let state = lasting(&mut self.states, &mut self.elsewhere, name)?;
        let Lasting { port, at, stored, spread, .. } = &*state;
        let mut part = None;
        if !state.is_elsewhere() {
            let found = read_outputs(&mut *self.backend, std::slice::from_ref(port), &|_| (*stored, *at))?;
            part = found.into_iter().next();
        }
        match (spread, part) {
            (Some(spread), part) => spread.gathered(port.dtype, &port.shape, part.as_ref()),
            (None, part) => Ok(part.expect("one port has one tensor")),
        }
    }

    /// Gives a state elements. Inputs that were written stay as they are.
    ///
    /// # Errors
    /// When no plan has such a state, or the tensor is not of its type and shape; the state is then as before. When the device fails.
    pub fn set_state(&mut self, name: &str, tensor: &Tensor) -> Result<()> {
        let state = lasting(&mut self.states, &mut self.elsewhere, name)?;
        let (dtype, shape) = (&state.port.dtype, &state.whole());
        if (tensor.dtype(), tensor.shape()) != (*dtype, shape) {
            let found = (tensor.dtype(), tensor.shape());
            return Err(Error::usage(format!("state '{name}': expected {dtype}{shape}, found {}{}", found.0, found.1)));
        }
        let own = state.spread.as_ref().map(|spread| spread.own(tensor));
        let tensor = own.as_ref().unwrap_or(tensor);
        state.admits(tensor)?;
        state.give(&mut *self.backend, tensor)
    }

    /// Gives all states the elements that they began with.
    ///
    /// # Errors
    /// When these cannot be fetched, or the device fails.
    pub fn reset_state(&mut self) -> Result<()> {
        for state in &mut self.states {
            let first = state.initial.as_deref();
            state.ends = match first.filter(|_| state.watched) {
                Some(first) => state.counted(first.value()?)?,
                None => state.watched.then_some([0; 2]),
            };
            write_initial(&mut *self.backend, state.at, state.stored, first)?;
        }
        Ok(())
    }

    /// Runs once: writes the inputs, runs all steps, reads the outputs, in the plan's order.
    ///
    /// # Errors
    /// As [`write`](Self::write), [`replay`](Self::replay) and [`read`](Self::read).
    pub fn run(&mut self, inputs: &[Tensor]) -> Result<Vec<Tensor>> {
        self.check_states()?;
        self.write(inputs)?;
        self.replay()?;
        self.read()
    }
}

impl Drop for Exec {
    fn drop(&mut self) {
        self.segments.drain(..).for_each(|s| self.backend.free(s));
    }
}

impl Contents {
    /// Notes where a plan's constants lie, and which of them earlier plans have, too.
    fn know(&mut self, plan: &Program, segments: &[SegmentId], constants: &[Arc<Constant>]) {
        let known = plan.constants.iter().zip(constants).map(|(port, constant)| {
            let spot = plan.buffers[port.buffer].spot();
            let content = Content::new(plan, port, constant, segments);
            let wanted = self.wanted.entry(spot).or_default();
            let same = wanted.iter().position(|other| other.is_same(&content));
            let number = same.unwrap_or(wanted.len());
            if same.is_none() {
                wanted.push(content);
            }
            (spot, number)
        });
        let known = known.collect();
        self.constants.push(known);
    }

    /// Writes the constants of a plan that are not in their places.
    fn select(&mut self, number: usize, backend: &mut dyn Backend) -> Result<()> {
        let Contents { constants, wanted, held } = self;
        for (spot, content) in &constants[number] {
            if held.get(spot) == Some(content) {
                continue;
            }
            // Until the constant has arrived as a whole, these bytes are unknown.
            held.remove(spot);
            let Content { constant, at, stored, packed } = &wanted[spot][*content];
            let packed = packed.as_ref().map(|(kernel, operand)| (kernel, *operand));
            write_constant(backend, *at, *stored, packed, constant)?;
            held.insert(*spot, *content);
        }
        Ok(())
    }
}

impl Content {
    fn new(plan: &Program, port: &ConstantPort, constant: &Arc<Constant>, segments: &[SegmentId]) -> Content {
        let (stored, at) = place(plan, segments, port.buffer);
        let packed = port.packed.map(|(kernel, operand)| (plan.kernels[kernel].clone(), operand));
        Content { constant: constant.clone(), at, stored, packed }
    }

    fn is_same(&self, other: &Content) -> bool {
        let packed = match (&self.packed, &other.packed) {
            (Some((a, operand)), Some((b, o))) => operand == o && cpu::packs_alike(a, b, *operand),
            (a, b) => a.is_none() && b.is_none(),
        };
        packed && self.stored == other.stored && self.constant.same(&other.constant)
    }
}

/// Writes the elements that a state begins with, or zeros.
pub(crate) fn write_initial(
    backend: &mut dyn Backend,
    at: Slice,
    stored: DType,
    initial: Option<&Constant>,
) -> Result<()> {
    const CHUNK: u64 = 1 << 20;
    if let Some(initial) = initial {
        return write_constant(backend, at, stored, None, initial);
    }
    let zeros = vec![0; at.bytes.min(CHUNK) as usize];
    (0..at.bytes).step_by(CHUNK as usize).try_for_each(|offset| {
        let bytes = CHUNK.min(at.bytes - offset);
        backend.write(Slice { offset: at.offset + offset, bytes, ..at }, &zeros[..bytes as usize])
    })
}

fn lasting<'a>(states: &'a mut [Lasting], elsewhere: &'a mut [Lasting], name: &str) -> Result<&'a mut Lasting> {
    let mut states: Vec<&mut Lasting> = states.iter_mut().chain(elsewhere).collect();
    let Some(found) = states.iter().position(|state| state.port.name == name) else {
        let known: Vec<_> = states.iter().map(|state| state.port.name.as_str()).collect();
        let known =
            if known.is_empty() { "it has none".to_owned() } else { format!("its states: {}", known.join(", ")) };
        return Err(Error::usage(format!("state '{name}': not a state of the graph; {known}")));
    };
    Ok(states.swap_remove(found))
}

fn launch(plan: &Program, segments: &[SegmentId], kernels: &[KernelId], step: &Step) -> Launch {
    let slots = 0..step.reads.len() + step.writes.len();
    Launch {
        kernel: kernels[step.kernel],
        args: slots.map(|slot| argument(plan, segments, step, slot)).collect(),
        stream: step.stream,
        waits: step.waits.iter().map(|step| step.index()).collect(),
    }
}

/// The bytes that an argument of a step binds. The arguments are the reads, then the writes, then the workspace.
fn argument(plan: &Program, segments: &[SegmentId], step: &Step, slot: usize) -> Slice {
    let reads = step.reads.len();
    let buffer = if slot < reads { step.reads[slot] } else { step.writes[slot - reads] };
    let whole = place(plan, segments, buffer).1;
    step.bind_ranges.get(slot).map_or(whole, |w| Slice { offset: whole.offset + w.offset, bytes: w.bytes, ..whole })
}

/// Returns an error if these are not a plan's constants. With one of them missing, it would run on unknown bytes.
fn are_constants(plan: &Program, constants: &[Arc<Constant>]) -> Result<()> {
    let given = plan.state.iter().filter(|state| state.given).count();
    let (expected, found) = (plan.constants.len() + given, constants.len());
    if expected != found {
        return Err(Error::plan(format!("'{}': expected {expected} constants, found {found}", plan.name)));
    }
    let ports = plan.constants.iter().map(|port| (&port.name, port.dtype, &plan.buffers[port.buffer].shape));
    let states = plan.state.iter().filter(|state| state.given).map(|state| &state.port);
    let states = states.map(|port| (&port.name, port.dtype, &port.shape));
    for ((expected, dtype, shape), constant) in ports.chain(states).zip(constants) {
        let Constant { name, fact, .. } = &**constant;
        if (expected, dtype, shape.numel()) != (name, fact.dtype, fact.shape.numel()) {
            let what = format!("expected constant '{expected}' ({dtype}{shape}), found '{name}' ({fact})");
            return Err(Error::plan(format!("'{}': {what}", plan.name)));
        }
    }
    Ok(())
}

fn place(plan: &Program, segments: &[SegmentId], buffer: BufferIdx) -> (DType, Slice) {
    let b = &plan.buffers[buffer];
    (b.dtype, Slice { segment: segments[b.segment], offset: b.offset, bytes: b.bytes })
}

/// The type in which a port's elements are stored, and their place. Those that share bytes are stored in their own type.
fn port_place(plan: &Program, segments: &[SegmentId], port: &Port) -> (DType, Slice) {
    let (stored, at) = place(plan, segments, port.buffer);
    (port.stored(stored), at)
}

/// Copies a constant to its buffer: in the layout that a kernel wants of an operand, or in the stored type.
pub(crate) fn write_constant(
    backend: &mut dyn Backend,
    at: Slice,
    stored: DType,
    packed: Option<(&Kernel, usize)>,
    constant: &Constant,
) -> Result<()> {
    let packed = packed.map(|(kernel, operand)| kernel.packed_reader(operand));
    let pieces = constant.pieces()?;
    let wide = packed.map_or(stored, |(kernel, operand)| kernel.reads[operand].dtype);
    let plain = wide.packed_bytes(constant.fact.shape.numel()) as u64;
    let found = packed.map_or(Some(plain), |(kernel, operand)| cpu::packed_bytes(kernel, operand));
    let found = found.expect("a plan that was checked packs what has a packed form");
    if found > at.bytes {
        let (name, expected) = (&constant.name, at.bytes);
        return Err(Error::plan(format!("constant '{name}': expected at most {expected} bytes, found {found}")));
    }
    let whole = pieces.at_once().filter(|tensor| tensor.dtype() == wide && !wide.is_packed());
    let at = Slice { bytes: found, ..at };
    match (packed, whole) {
        (None, Some(whole)) => write_words(backend, at, whole.bytes()),
        (None, None) => {
            let mut to = Slice { bytes: 0, ..at };
            pieces.each(|piece| {
                let bytes = piece.store(wide, &constant.name)?;
                to = Slice { offset: to.offset + to.bytes, bytes: bytes.len() as u64, ..to };
                write_words(backend, to, &bytes)
            })
        }
        (Some((kernel, operand)), Some(whole)) => write_packed(backend, at, kernel, operand, whole.bytes()),
        (Some((kernel, operand)), None) => {
            if cpu::packs_in_parts(kernel, operand)
                && let Some(place) = backend.host_bytes(at)?
            {
                place.fill(0);
                let mut first = 0;
                return pieces.each(|piece| {
                    let bytes = piece.store(wide, &constant.name)?;
                    cpu::pack(kernel, operand, Plain { first, bytes: &bytes }, place);
                    first += piece.shape().numel();
                    Ok(())
                });
            }
            let mut all = Vec::with_capacity(plain as usize);
            pieces.each(|piece| {
                all.extend_from_slice(&piece.store(wide, &constant.name)?);
                Ok(())
            })?;
            write_packed(backend, at, kernel, operand, &all)
        }
    }
}

/// Copies bytes to a buffer, which has whole words: what fills none is filled up with zeros.
fn write_words(backend: &mut dyn Backend, at: Slice, bytes: &[u8]) -> Result<()> {
    let (words, rest) = bytes.split_at(bytes.len() / 4 * 4);
    if !words.is_empty() || rest.is_empty() {
        backend.write(Slice { bytes: words.len() as u64, ..at }, words)?;
    }
    if rest.is_empty() {
        return Ok(());
    }
    let mut last = [0; 4];
    last[..rest.len()].copy_from_slice(rest);
    backend.write(Slice { offset: at.offset + words.len() as u64, bytes: 4, ..at }, &last)
}

/// Packs an operand, at its place if the host can write there.
fn write_packed(backend: &mut dyn Backend, at: Slice, kernel: &Kernel, operand: usize, plain: &[u8]) -> Result<()> {
    if let Some(place) = backend.host_bytes(at)? {
        cpu::pack(kernel, operand, Plain::whole(plain), place);
        return Ok(());
    }
    let mut packed = vec![0; at.bytes as usize];
    cpu::pack(kernel, operand, Plain::whole(plain), &mut packed);
    backend.write(at, &packed)
}

/// Checks all inputs against their ports, then copies them to their buffers. `place` returns where a buffer lies, and its stored type.
pub(crate) fn write_inputs(
    backend: &mut dyn Backend,
    ports: &[Port],
    place: &dyn Fn(&Port) -> (DType, Slice),
    inputs: &[Tensor],
) -> Result<()> {
    if inputs.len() != ports.len() {
        return Err(Error::usage(format!("expected {} inputs, found {}", ports.len(), inputs.len())));
    }
    for (port, tensor) in ports.iter().zip(inputs) {
        fits(port, tensor)?;
    }
    for (port, tensor) in ports.iter().zip(inputs) {
        let (stored, at) = place(port);
        let bytes = tensor.store(stored, &port.name)?;
        backend.write(Slice { bytes: bytes.len() as u64, ..at }, &bytes)?;
    }
    Ok(())
}

/// Waits for the device and copies outputs from their buffers.
pub(crate) fn read_outputs(
    backend: &mut dyn Backend,
    ports: &[Port],
    place: &dyn Fn(&Port) -> (DType, Slice),
) -> Result<Vec<Tensor>> {
    let placed = ports.iter().map(|port| {
        let (stored, at) = place(port);
        (port, stored, at)
    });
    read_ports(backend, &placed.collect::<Vec<_>>())
}

/// All outputs of a run, without the room behind what it found. Per output: its name, and the axes along which it has room.
pub fn found<'p>(ports: impl Iterator<Item = (&'p str, &'p [Counted])>, outputs: Vec<Tensor>) -> Vec<Tensor> {
    let ports: Vec<_> = ports.collect();
    let all: BTreeMap<&str, Tensor> = ports.iter().map(|(name, _)| *name).zip(outputs.iter().cloned()).collect();
    ports.iter().zip(outputs).map(|((_, counted), tensor)| without_room(tensor, counted, &all)).collect()
}

/// A tensor without the room behind what a run found. Along an axis, several nodes may have found some: each lacks what it did not find.
fn without_room(tensor: Tensor, counted: &[Counted], counts: &BTreeMap<&str, Tensor>) -> Tensor {
    let mut shape = tensor.shape().clone();
    for Counted { axis, by, more } in counted {
        let found = counts.get(&by[..]).and_then(Tensor::to_i64).and_then(|count| count.first().copied()).unwrap_or(0);
        let most = (tensor.shape()[*axis] as i64).saturating_sub(*more);
        let lacks = usize::try_from(most.saturating_sub(found)).unwrap_or(0);
        shape[*axis] = shape[*axis].saturating_sub(lacks);
    }
    if shape == *tensor.shape() {
        return tensor;
    }
    let whole = Access::contiguous(tensor.shape().clone());
    tensor.gather(&shape.iter().enumerate().fold(whole, |access, (axis, &len)| access.slice(axis, 0, 1, len)))
}

/// Waits for the device and copies what lies in buffers, each with its stored type.
fn read_ports(backend: &mut dyn Backend, ports: &[(&Port, DType, Slice)]) -> Result<Vec<Tensor>> {
    let room = |(port, stored, _): &(&Port, DType, Slice)| {
        host_memory(stored.packed_bytes(port.shape.numel()) as u64, &format!("'{}' on the host", port.name))
    };
    let mut found = ports.iter().map(room).collect::<Result<Vec<_>>>()?;
    let pieces = ports.iter().zip(&mut found);
    let pieces = pieces.map(|((_, _, at), bytes)| (Slice { bytes: bytes.len() as u64, ..*at }, bytes.as_mut_slice()));
    backend.read_all(&mut pieces.collect::<Vec<_>>())?;
    let load = |((port, stored, _), bytes): (&(&Port, DType, Slice), Vec<u8>)| {
        Tensor::load(*stored, bytes, port.dtype, port.shape.clone())
    };
    ports.iter().zip(found).map(load).collect()
}

/// The allowed values of an index and its use, in words.
fn use_of(Indexes { least, most, used, node, extent, .. }: &Indexes) -> String {
    match used {
        Use::LooksUp => format!("expected indices from {least} to {most}, by which node '{node}' looks up"),
        Use::Writes => format!("expected {least} to {most}, from where node '{node}' writes along {extent} rows"),
        Use::Sees => format!("expected {least} to {most}, as node '{node}' sees at most {extent} rows"),
    }
}

/// Returns an error if an element, or a sum of neighbours, is not what it may be.
fn within(name: &str, indexes: &Indexes, elements: impl Iterator<Item = i64>) -> Result<()> {
    let Indexes { least, most, sum, .. } = indexes;
    let allowed = |first: usize, index: i64| {
        if (*least..=*most).contains(&index) {
            return Ok(());
        }
        let of = if *sum == 1 { format!("element {first}") } else { format!("sum of {sum} elements from {first} on") };
        Err(Error::usage(format!("input '{name}': {}, found {index} ({of})", use_of(indexes))))
    };
    let (mut first, mut count, mut total) = (0, 0, 0i64);
    for element in elements {
        (count, total) = (count + 1, total.saturating_add(element));
        if count == *sum {
            allowed(first, total)?;
            (first, count, total) = (first + sum, 0, 0);
        }
    }
    if count > 0 { allowed(first, total) } else { Ok(()) }
}

/// As [`fits`], of bytes that are as many as the port's. For the usual types of indices it allocates nothing.
fn indexes_fit(port: &Port, bytes: &[u8]) -> Result<()> {
    let all = |indexes: &Indexes| match port.dtype {
        DType::I64 => {
            let elements = bytes.as_chunks().0.iter().map(|bytes| i64::from_le_bytes(*bytes));
            within(&port.name, indexes, elements)
        }
        DType::I32 => {
            let elements = bytes.as_chunks().0.iter().map(|bytes| i32::from_le_bytes(*bytes).into());
            within(&port.name, indexes, elements)
        }
        _ => {
            let tensor = Tensor::new(port.dtype, port.shape.clone(), bytes.to_vec())?;
            within(&port.name, indexes, tensor.to_i64().unwrap_or_default().into_iter())
        }
    };
    port.indexes.iter().try_for_each(all)
}

fn fits(port: &Port, tensor: &Tensor) -> Result<()> {
    if tensor.dtype() == port.dtype && *tensor.shape() == port.shape {
        return indexes_fit(port, tensor.bytes());
    }
    let Port { name, dtype, shape, .. } = port;
    Err(Error::usage(format!("input '{name}': expected {dtype}{shape}, found {}{}", tensor.dtype(), tensor.shape())))
}
