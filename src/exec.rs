//! Loads a plan on a backend and replays it. Decides nothing.

use crate::backend::{Backend, KernelId, Launch, RecordId, SegmentId, Slice};
use crate::constant::Constant;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::kernel::{Kernel, cpu};
use crate::plan::index::Per;
use crate::plan::{BufferIdx, Indexes, KernelIdx, Plan, Port, SegmentIdx, Spot, StatePort, Step};
use crate::tensor::Tensor;
use count::Counts;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

mod count;
pub mod poison;

impl Per<SegmentIdx> for SegmentId {}
impl Per<KernelIdx> for KernelId {}

/// A plan on a device: allocated, filled with its constants, recorded. Further plans may share its segments; one of them is current and
/// runs.
pub struct Exec {
    backend: Box<dyn Backend>,
    segments: Vec<SegmentId>,
    /// The plan that runs.
    loaded: Loaded,
    /// True if the inputs are written and not yet overwritten.
    ready: bool,
    /// The elements that states begin with, of those that have them given.
    initial: Vec<Arc<Constant>>,
    counts: Counts,
    shared: Option<Box<Shared>>,
}

/// Plans that share segments.
#[derive(Default)]
struct Shared {
    /// The number of the plan that runs.
    current: usize,
    /// The plans that do not run, by their numbers.
    idle: Vec<Option<Loaded>>,
    /// Per plan, the place of each of its constants, and the number of the constant's content in `contents`.
    constants: Vec<Vec<(Spot, usize)>>,
    /// Per place, the contents that plans want there.
    contents: HashMap<Spot, Vec<Content>>,
    /// Per place, the number of the content that lies there.
    held: HashMap<Spot, usize>,
    /// Compiled kernels, by their content.
    compiled: HashMap<String, KernelId>,
}

/// A plan that is ready to run.
struct Loaded {
    plan: Plan,
    kernels: Vec<KernelId>,
    record: RecordId,
    /// True if a run overwrites the inputs.
    consumes: bool,
}

impl Loaded {
    /// Records the steps of a plan, whose kernels are compiled.
    fn new(backend: &mut dyn Backend, plan: Plan, segments: &[SegmentId], kernels: Vec<KernelId>) -> Result<Loaded> {
        let launches: Vec<Launch> = plan.steps.iter().map(|step| launch(&plan, segments, &kernels, step)).collect();
        let record = backend.record(&launches)?;
        Ok(Loaded { consumes: plan.consumes_inputs(), plan, kernels, record })
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
        f.debug_struct("Exec").field("plan", &self.loaded.plan.name).finish_non_exhaustive()
    }
}

impl Exec {
    /// Allocates the plan's segments, uploads its data, as [`Compiled`](crate::plan::Compiled) has it, and records the steps. Calls
    /// `progress` as each constant arrives.
    ///
    /// # Errors
    /// When `constants` are not the plan's, one cannot be fetched, or the device refuses. All that was allocated is freed.
    pub fn load(
        mut backend: Box<dyn Backend>,
        plan: Plan,
        constants: &[Arc<Constant>],
        progress: &dyn Fn(usize),
    ) -> Result<Exec> {
        let mut segments = Vec::with_capacity(plan.segments.len());
        match Self::prepare(&mut *backend, plan, constants, &mut segments, progress) {
            Ok(loaded) => {
                let ready = loaded.plan.inputs.is_empty();
                let initial = constants[loaded.plan.constants.len()..].to_vec();
                let mut counts = Counts::default();
                counts.begin(&loaded.plan, &initial)?;
                Ok(Exec { backend, segments, loaded, ready, initial, counts, shared: None })
            }
            Err(error) => {
                segments.into_iter().for_each(|s| backend.free(s));
                Err(error)
            }
        }
    }

    fn prepare(
        backend: &mut dyn Backend,
        plan: Plan,
        constants: &[Arc<Constant>],
        segments: &mut Vec<SegmentId>,
        progress: &dyn Fn(usize),
    ) -> Result<Loaded> {
        are_constants(&plan, constants)?;
        let needed = plan.segments.iter().filter(|s| s.memory.is_device()).map(|s| s.bytes).sum();
        if let Some(room) = backend.room().filter(|room| room.free < needed) {
            let what = format!("the plan of '{}' in what is free on '{}'", plan.name, plan.target.name);
            return Err(Error::Fit { what, needed, limit: room.free, file: None });
        }
        for segment in &plan.segments {
            segments.push(backend.alloc(segment.bytes, segment.memory)?);
        }
        for (index, (port, constant)) in plan.constants.iter().zip(constants).enumerate() {
            let (stored, at) = place(&plan, segments, port.buffer);
            let packed = port.packed.map(|(kernel, operand)| (&plan.kernels[kernel], operand));
            write_constant(backend, at, stored, packed, constant)?;
            progress(index + 1);
        }
        let mut kernels = Vec::with_capacity(plan.kernels.len());
        for kernel in &plan.kernels {
            kernels.push(backend.compile(kernel)?);
        }
        let loaded = Loaded::new(backend, plan, segments, kernels)?;
        // Recording may have run steps.
        reset(backend, &loaded.plan, segments, &constants[loaded.plan.constants.len()..])?;
        Ok(loaded)
    }

    /// Makes another plan over the same segments ready to run, and returns its number. States stay as they are. The plan of [`load`](Self::load), whose constants
    /// are `first`, has number 0. The plan that runs stays the same.
    ///
    /// # Errors
    /// When the plan has other segments, a list of constants is not its plan's, or the device refuses.
    pub fn add(&mut self, plan: Plan, constants: &[Arc<Constant>], first: &[Arc<Constant>]) -> Result<usize> {
        let state = self.keep_state()?;
        let added = self.add_beside(plan, constants, first);
        self.restore_state(&state)?;
        added
    }

    fn add_beside(&mut self, plan: Plan, constants: &[Arc<Constant>], first: &[Arc<Constant>]) -> Result<usize> {
        let (expected, found) = (&self.loaded.plan.segments, &plan.segments);
        if expected != found {
            return Err(Error::plan(format!("expected the segments that are there, {expected:?}, found {found:?}")));
        }
        are_constants(&plan, constants)?;
        if self.shared.is_none() {
            are_constants(&self.loaded.plan, first)?;
        }
        let shared = self.shared.get_or_insert_with(|| {
            let mut shared = Box::new(Shared { idle: vec![None], ..Shared::default() });
            shared
                .compiled
                .extend(self.loaded.plan.kernels.iter().map(Kernel::key).zip(self.loaded.kernels.iter().copied()));
            shared.know(&self.loaded.plan, &self.segments, first);
            shared.held.extend(shared.constants[0].iter().copied());
            shared
        });
        let mut kernels = Vec::with_capacity(plan.kernels.len());
        for kernel in &plan.kernels {
            let text = kernel.key();
            kernels.push(match shared.compiled.get(&text) {
                Some(kernel) => *kernel,
                None => {
                    let made = self.backend.compile(kernel)?;
                    shared.compiled.insert(text, made);
                    made
                }
            });
        }
        let loaded = Loaded::new(&mut *self.backend, plan, &self.segments, kernels)?;
        shared.know(&loaded.plan, &self.segments, constants);
        shared.idle.push(Some(loaded));
        Ok(shared.idle.len() - 1)
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
        let Some(shared) = &mut self.shared else {
            assert_eq!(number, 0, "one plan is loaded");
            return Ok(());
        };
        let Shared { current, idle, constants, contents, held, .. } = &mut **shared;
        for (spot, content) in &constants[number] {
            if held.get(spot) == Some(content) {
                continue;
            }
            // Until the constant has arrived as a whole, these bytes are unknown.
            held.remove(spot);
            let Content { constant, at, stored, packed } = &contents[spot][*content];
            let packed = packed.as_ref().map(|(kernel, operand)| (kernel, *operand));
            write_constant(&mut *self.backend, *at, *stored, packed, constant)?;
            held.insert(*spot, *content);
        }
        if let Some(loaded) = idle[number].take() {
            self.ready = loaded.plan.inputs.is_empty();
            idle[*current] = Some(std::mem::replace(&mut self.loaded, loaded));
            *current = number;
        }
        Ok(())
    }

    /// The plan that runs.
    pub fn plan(&self) -> &Plan {
        &self.loaded.plan
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
        let Exec { backend, loaded: Loaded { plan, .. }, segments, .. } = self;
        write_inputs(&mut **backend, &plan.inputs, &|b| place(plan, segments, b), inputs)?;
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
        self.counts.check(&self.loaded.plan)?;
        self.ready = !self.loaded.consumes;
        self.backend.replay(self.loaded.record)?;
        self.counts.advance(&self.loaded.plan);
        Ok(())
    }

    /// Runs all steps once, on what the inputs hold now. Returns how long they took, by the device's clock if it has one.
    ///
    /// # Errors
    /// When the device fails, or a state that counts would pass its bound.
    pub fn time(&mut self) -> Result<Duration> {
        self.counts.check(&self.loaded.plan)?;
        self.ready &= !self.loaded.consumes;
        let time = self.backend.time(self.loaded.record)?;
        self.counts.advance(&self.loaded.plan);
        Ok(time)
    }

    /// Runs the steps one by one, in order, on what the inputs hold now. Returns how long each took by itself. States stay as they are.
    ///
    /// # Errors
    /// When the device fails.
    pub fn profile(&mut self) -> Result<Vec<Duration>> {
        self.ready &= !self.loaded.consumes;
        let state = self.keep_state()?;
        let records = self.record_steps()?;
        let backend = &mut self.backend;
        let mut times = Vec::with_capacity(records.len());
        // The first round is not counted: devices and drivers prepare much when a kernel first runs.
        for round in 0..2 {
            times.clear();
            for record in &records {
                times.push(backend.time(*record)?);
            }
            tracing::debug!(round, steps = times.len(), "profiled");
        }
        self.restore_state(&state)?;
        Ok(times)
    }

    /// Per step, its algorithm, and the device's note on it.
    pub fn notes(&self) -> Vec<String> {
        let (mut words, notes) = (self.loaded.plan.algorithms(), self.backend.notes(self.loaded.record));
        for (words, note) in words.iter_mut().zip(&notes).filter(|(_, note)| !note.is_empty()) {
            *words += &format!(", {note}");
        }
        words
    }

    /// Waits for the device and copies the outputs, in the plan's order, to the host.
    ///
    /// # Errors
    /// When the device fails.
    pub fn read(&mut self) -> Result<Vec<Tensor>> {
        let Exec { backend, loaded: Loaded { plan, .. }, segments, .. } = self;
        read_outputs(&mut **backend, &plan.outputs, &|b| place(plan, segments, b))
    }

    /// A state's elements.
    ///
    /// # Errors
    /// When the plan has no such state, or the device fails.
    pub fn state(&mut self, name: &str) -> Result<Tensor> {
        let Exec { backend, loaded: Loaded { plan, .. }, segments, .. } = self;
        let port = &state_port(plan, name)?.port;
        let found = read_outputs(&mut **backend, std::slice::from_ref(port), &|b| place(plan, segments, b))?;
        Ok(found.into_iter().next().expect("one port has one tensor"))
    }

    /// Gives a state elements. Inputs that were written stay as they are.
    ///
    /// # Errors
    /// When the plan has no such state, or the tensor is not of its type and shape; the state is then as before. When the device fails.
    pub fn set_state(&mut self, name: &str, tensor: &Tensor) -> Result<()> {
        let Exec { backend, loaded: Loaded { plan, .. }, segments, .. } = self;
        let Port { dtype, shape, buffer, .. } = &state_port(plan, name)?.port;
        if (tensor.dtype(), tensor.shape()) != (*dtype, shape) {
            let found = (tensor.dtype(), tensor.shape());
            return Err(Error::usage(format!("state '{name}': expected {dtype}{shape}, found {}{}", found.0, found.1)));
        }
        let count = Counts::of(plan, name, tensor)?;
        let (stored, at) = place(plan, segments, *buffer);
        let bytes = tensor.store(stored, name)?;
        backend.write(Slice { bytes: bytes.len() as u64, ..at }, &bytes)?;
        self.counts.set(name, count);
        Ok(())
    }

    /// Gives all states the elements that they began with.
    ///
    /// # Errors
    /// When these cannot be fetched, or the device fails.
    pub fn reset_state(&mut self) -> Result<()> {
        reset(&mut *self.backend, &self.loaded.plan, &self.segments, &self.initial)?;
        self.counts.begin(&self.loaded.plan, &self.initial)
    }

    /// Runs once: writes the inputs, runs all steps, reads the outputs, in the plan's order.
    ///
    /// # Errors
    /// As [`write`](Self::write), [`replay`](Self::replay) and [`read`](Self::read).
    pub fn run(&mut self, inputs: &[Tensor]) -> Result<Vec<Tensor>> {
        self.counts.check(&self.loaded.plan)?;
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

impl Shared {
    /// Records where a plan's constants lie, and which of them earlier plans have, too.
    fn know(&mut self, plan: &Plan, segments: &[SegmentId], constants: &[Arc<Constant>]) {
        let known = plan.constants.iter().zip(constants).map(|(port, constant)| {
            let buffer = &plan.buffers[port.buffer];
            let (stored, at) = place(plan, segments, port.buffer);
            let packed = port.packed.map(|(kernel, operand)| (plan.kernels[kernel].clone(), operand));
            let content = Content { constant: constant.clone(), at, stored, packed };
            let spot = Spot { segment: buffer.segment, offset: buffer.offset };
            let contents = self.contents.entry(spot).or_default();
            let same = contents.iter().position(|other| other.is_same(&content));
            let number = same.unwrap_or(contents.len());
            if same.is_none() {
                contents.push(content);
            }
            (spot, number)
        });
        let known = known.collect();
        self.constants.push(known);
    }
}

impl Content {
    fn is_same(&self, other: &Content) -> bool {
        let packed = match (&self.packed, &other.packed) {
            (Some((a, operand)), Some((b, o))) => operand == o && cpu::packs_alike(a, b, *operand),
            (a, b) => a.is_none() && b.is_none(),
        };
        packed && self.stored == other.stored && self.constant.same(&other.constant)
    }
}

/// Gives all states the elements that they begin with: those given, in order, or zeros.
fn reset(backend: &mut dyn Backend, plan: &Plan, segments: &[SegmentId], given: &[Arc<Constant>]) -> Result<()> {
    let mut given = given.iter();
    for state in &plan.state {
        let (stored, at) = place(plan, segments, state.port.buffer);
        let data = || given.next().expect("there is data for each state that has it given");
        write_initial(backend, at, stored, state.given.then(data).map(|data| &**data))?;
    }
    Ok(())
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

fn state_port<'a>(plan: &'a Plan, name: &str) -> Result<&'a StatePort> {
    plan.state.iter().find(|state| state.port.name == name).ok_or_else(|| {
        let known: Vec<_> = plan.state.iter().map(|state| state.port.name.as_str()).collect();
        let known =
            if known.is_empty() { "it has none".to_owned() } else { format!("its states: {}", known.join(", ")) };
        Error::usage(format!("state '{name}': not a state of the graph; {known}"))
    })
}

fn launch(plan: &Plan, segments: &[SegmentId], kernels: &[KernelId], step: &Step) -> Launch {
    let slots = 0..step.reads.len() + step.writes.len();
    Launch {
        kernel: kernels[step.kernel],
        args: slots.map(|slot| argument(plan, segments, step, slot)).collect(),
        stream: step.stream,
        waits: step.waits.iter().map(|step| step.index()).collect(),
    }
}

/// The bytes that an argument of a step binds. The arguments are the reads, then the writes, then the workspace.
fn argument(plan: &Plan, segments: &[SegmentId], step: &Step, slot: usize) -> Slice {
    let reads = step.reads.len();
    let buffer = if slot < reads { step.reads[slot] } else { step.writes[slot - reads] };
    let whole = place(plan, segments, buffer).1;
    step.bind_ranges.get(slot).map_or(whole, |w| Slice { offset: whole.offset + w.offset, bytes: w.bytes, ..whole })
}

/// Returns an error if these are not a plan's constants. With one of them missing, it would run on unknown bytes.
fn are_constants(plan: &Plan, constants: &[Arc<Constant>]) -> Result<()> {
    let given = plan.state.iter().filter(|state| state.given).count();
    let (expected, found) = (plan.constants.len() + given, constants.len());
    if expected != found {
        return Err(Error::plan(format!("'{}': expected {expected} constants, found {found}", plan.name)));
    }
    let ports = plan.constants.iter().map(|port| (&port.name, port.dtype, port.buffer));
    let states = plan.state.iter().filter(|state| state.given).map(|state| &state.port);
    let states = states.map(|port| (&port.name, port.dtype, port.buffer));
    for ((expected, dtype, buffer), constant) in ports.chain(states).zip(constants) {
        let shape = &plan.buffers[buffer].shape;
        let Constant { name, fact, .. } = &**constant;
        if (expected, dtype, shape.numel()) != (name, fact.dtype, fact.shape.numel()) {
            let what = format!("expected constant '{expected}' ({dtype}{shape}), found '{name}' ({fact})");
            return Err(Error::plan(format!("'{}': {what}", plan.name)));
        }
    }
    Ok(())
}

fn place(plan: &Plan, segments: &[SegmentId], buffer: BufferIdx) -> (DType, Slice) {
    let b = &plan.buffers[buffer];
    (b.dtype, Slice { segment: segments[b.segment], offset: b.offset, bytes: b.bytes })
}

/// Copies a constant to its buffer: in the layout that a kernel wants of an operand, or in the stored type.
pub(crate) fn write_constant(
    backend: &mut dyn Backend,
    at: Slice,
    stored: DType,
    packed: Option<(&Kernel, usize)>,
    constant: &Constant,
) -> Result<()> {
    let value = constant.fetch()?;
    let bytes = match packed {
        Some((kernel, operand)) => {
            let plain = value.store(kernel.reads[operand].dtype, &constant.name)?;
            cpu::pack(kernel, operand, &plain).into()
        }
        None => value.store(stored, &constant.name)?,
    };
    let found = bytes.len() as u64;
    if found > at.bytes {
        let (name, expected) = (&constant.name, at.bytes);
        return Err(Error::plan(format!("constant '{name}': expected at most {expected} bytes, found {found}")));
    }
    backend.write(Slice { bytes: found, ..at }, &bytes)
}

/// Checks all inputs against their ports, then copies them to their buffers. `place` returns where a buffer lies, and its stored type.
pub(crate) fn write_inputs(
    backend: &mut dyn Backend,
    ports: &[Port],
    place: &dyn Fn(BufferIdx) -> (DType, Slice),
    inputs: &[Tensor],
) -> Result<()> {
    if inputs.len() != ports.len() {
        return Err(Error::usage(format!("expected {} inputs, found {}", ports.len(), inputs.len())));
    }
    for (port, tensor) in ports.iter().zip(inputs) {
        fits(port, tensor)?;
    }
    for (port, tensor) in ports.iter().zip(inputs) {
        let (stored, at) = place(port.buffer);
        let bytes = tensor.store(stored, &port.name)?;
        backend.write(Slice { bytes: bytes.len() as u64, ..at }, &bytes)?;
    }
    Ok(())
}

/// Waits for the device and copies outputs from their buffers.
pub(crate) fn read_outputs(
    backend: &mut dyn Backend,
    ports: &[Port],
    place: &dyn Fn(BufferIdx) -> (DType, Slice),
) -> Result<Vec<Tensor>> {
    let mut found: Vec<Vec<u8>> =
        ports.iter().map(|port| vec![0; port.shape.numel() * place(port.buffer).0.size()]).collect();
    let pieces = ports.iter().zip(&mut found).map(|(port, bytes)| {
        let at = place(port.buffer).1;
        (Slice { bytes: bytes.len() as u64, ..at }, bytes.as_mut_slice())
    });
    backend.read_all(&mut pieces.collect::<Vec<_>>())?;
    let load =
        |(port, bytes): (&Port, Vec<u8>)| Tensor::load(place(port.buffer).0, bytes, port.dtype, port.shape.clone());
    ports.iter().zip(found).map(load).collect()
}

/// Returns an error if an element is no index of the axis that the input looks up.
fn within(name: &str, indexes: &Indexes, tensor: &Tensor) -> Result<()> {
    let Indexes { extent, node } = indexes;
    let extent = i64::try_from(*extent).unwrap_or(i64::MAX);
    let all = tensor.to_i64().unwrap_or_default();
    match all.iter().enumerate().find(|(_, index)| !(-extent..extent).contains(*index)) {
        None => Ok(()),
        Some((at, index)) => Err(Error::usage(format!(
            "input '{name}': expected indices from {} to {}, by which node '{node}' looks up, found {index} (element {at})",
            -extent,
            extent - 1
        ))),
    }
}

fn fits(port: &Port, tensor: &Tensor) -> Result<()> {
    if tensor.dtype() == port.dtype && *tensor.shape() == port.shape {
        return port.indexes.as_ref().map_or(Ok(()), |indexes| within(&port.name, indexes, tensor));
    }
    let Port { name, dtype, shape, .. } = port;
    Err(Error::usage(format!("input '{name}': expected {dtype}{shape}, found {}{}", tensor.dtype(), tensor.shape())))
}
