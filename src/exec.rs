//! Loads a plan on a backend and replays it. Decides nothing.

use crate::backend::{Backend, KernelId, Launch, RecordId, SegmentId, Slice};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::graph::Constant;
use crate::kernel::{Kernel, layout};
use crate::plan::{Plan, Port, Step};
use crate::tensor::Tensor;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

/// A plan on a device: allocated, filled with its constants, recorded. Further plans may share its segments.
pub struct Exec {
    backend: Box<dyn Backend>,
    segments: Vec<SegmentId>,
    plans: Vec<Loaded>,
    /// Number of the plan that runs.
    current: usize,
    /// Compiled kernels by their content.
    kernels: HashMap<String, KernelId>,
    /// What the plans want at the place of a constant, once there are several plans.
    contents: HashMap<Spot, Vec<Content>>,
    /// Which of these lies there.
    held: HashMap<Spot, usize>,
}

/// Segment and offset.
type Spot = (usize, u64);

/// A plan that is ready to run.
struct Loaded {
    plan: Plan,
    kernels: Vec<KernelId>,
    record: RecordId,
    /// Where its constants lie, and which of the contents there they are.
    constants: Vec<(Spot, usize)>,
}

/// A constant in the form in which a plan wants it.
struct Content {
    constant: Arc<Constant>,
    at: Slice,
    stored: DType,
    packed: Option<(Kernel, usize)>,
}

impl std::fmt::Debug for Exec {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Exec").field("plan", &self.plan().name).finish_non_exhaustive()
    }
}

impl Exec {
    /// Allocates the plan's segments, uploads constants (one per entry of [`Plan::constants`]) and records the steps.
    /// `progress` is told of each constant as it arrives.
    ///
    /// # Errors
    /// When a constant cannot be fetched or the device refuses. Everything taken is given back.
    pub fn load(
        backend: Box<dyn Backend>,
        plan: Plan,
        constants: &[Arc<Constant>],
        progress: &dyn Fn(usize),
    ) -> Result<Exec> {
        // Gives back what it has when it is dropped.
        let mut exec = Exec {
            backend,
            segments: Vec::with_capacity(plan.segments.len()),
            plans: Vec::new(),
            current: 0,
            kernels: HashMap::new(),
            contents: HashMap::new(),
            held: HashMap::new(),
        };
        let needed = plan.segments.iter().filter(|s| s.memory.is_device()).map(|s| s.bytes).sum();
        if let Some(room) = exec.backend.room().filter(|room| room.free < needed) {
            let what = format!("the plan of '{}' in what is free on '{}'", plan.name, plan.target.name);
            return Err(Error::Fit { what, needed, limit: room.free });
        }
        for segment in &plan.segments {
            exec.segments.push(exec.backend.alloc(segment.bytes, segment.memory)?);
        }
        for (index, (port, constant)) in plan.constants.iter().zip(constants).enumerate() {
            let (stored, at) = place(&plan, &exec.segments, port.buffer);
            let packed = port.packed.map(|(kernel, operand)| (&plan.kernels[kernel], operand));
            write_constant(&mut *exec.backend, at, stored, packed, constant)?;
            progress(index + 1);
        }
        exec.push(plan)?;
        Ok(exec)
    }

    /// Makes another plan over the same segments ready to run, and gives its number; the plan of [`load`](Self::load) has number 0, and
    /// `first` are its constants. Which plan runs is as before.
    ///
    /// # Errors
    /// When the plan has other segments, or the device refuses.
    pub fn add(&mut self, plan: Plan, constants: &[Arc<Constant>], first: &[Arc<Constant>]) -> Result<usize> {
        let (expected, found) = (&self.plans[0].plan.segments, &plan.segments);
        if expected != found {
            return Err(Error::Plan(format!("expected the segments that are there, {expected:?}, found {found:?}")));
        }
        if self.contents.is_empty() {
            self.know(0, first);
            self.held.extend(self.plans[0].constants.iter().copied());
        }
        let number = self.push(plan)?;
        self.know(number, constants);
        Ok(number)
    }

    fn push(&mut self, plan: Plan) -> Result<usize> {
        let mut kernels = Vec::with_capacity(plan.kernels.len());
        for kernel in &plan.kernels {
            let text = serde_json::to_string(kernel).expect("a kernel has only finite numbers and text keys");
            kernels.push(match self.kernels.get(&text) {
                Some(kernel) => *kernel,
                None => {
                    let made = self.backend.compile(kernel)?;
                    self.kernels.insert(text, made);
                    made
                }
            });
        }
        let launches: Vec<Launch> = plan.steps.iter().map(|s| launch(&plan, &self.segments, &kernels, s)).collect();
        let record = self.backend.record(&launches)?;
        self.plans.push(Loaded { plan, kernels, record, constants: Vec::new() });
        Ok(self.plans.len() - 1)
    }

    /// Notes where a plan's constants lie, and which of them it shares with plans before it.
    fn know(&mut self, number: usize, constants: &[Arc<Constant>]) {
        let Loaded { plan, constants: known, .. } = &mut self.plans[number];
        for (port, constant) in plan.constants.iter().zip(constants) {
            let buffer = &plan.buffers[port.buffer];
            let (stored, at) = place(plan, &self.segments, port.buffer);
            let packed = port.packed.map(|(kernel, operand)| (plan.kernels[kernel].clone(), operand));
            let content = Content { constant: constant.clone(), at, stored, packed };
            let spot = (buffer.segment, buffer.offset);
            let contents = self.contents.entry(spot).or_default();
            let same = contents.iter().position(|other| other.is_same(&content));
            known.push((spot, same.unwrap_or(contents.len())));
            if same.is_none() {
                contents.push(content);
            }
        }
    }

    /// Lets a plan be the one that runs. What it does not share with the others, its inputs and constants of its own, is written anew:
    /// the constants here.
    ///
    /// # Errors
    /// When a constant cannot be fetched or the device fails.
    ///
    /// # Panics
    /// When there is no plan of this number.
    pub fn select(&mut self, number: usize) -> Result<()> {
        for (spot, content) in &self.plans[number].constants {
            if self.held.get(spot) == Some(content) {
                continue;
            }
            // Until all of it has arrived, nothing is known of these bytes.
            self.held.remove(spot);
            let Content { constant, at, stored, packed } = &self.contents[spot][*content];
            let packed = packed.as_ref().map(|(kernel, operand)| (kernel, *operand));
            write_constant(&mut *self.backend, *at, *stored, packed, constant)?;
            self.held.insert(*spot, *content);
        }
        self.current = number;
        Ok(())
    }

    fn loaded(&self) -> &Loaded {
        &self.plans[self.current]
    }

    /// The plan that runs.
    pub fn plan(&self) -> &Plan {
        &self.loaded().plan
    }

    /// The device.
    pub fn backend(&self) -> &dyn Backend {
        &*self.backend
    }

    pub(crate) fn backend_mut(&mut self) -> &mut dyn Backend {
        &mut *self.backend
    }

    /// Copies inputs, in the plan's order, into their buffers.
    ///
    /// # Errors
    /// When one is not of the type and shape that were planned, or holds a value that the device's type cannot.
    pub fn write(&mut self, inputs: &[Tensor]) -> Result<()> {
        let Exec { backend, plans, current, segments, .. } = self;
        let plan = &plans[*current].plan;
        write_inputs(&mut **backend, &plan.inputs, &|b| place(plan, segments, b), inputs)
    }

    /// Runs all steps once.
    ///
    /// # Errors
    /// When the device fails.
    pub fn replay(&mut self) -> Result<()> {
        self.backend.replay(self.loaded().record)
    }

    /// Runs all steps once; how long they took, by the device's clock if it has one.
    ///
    /// # Errors
    /// When the device fails.
    pub fn time(&mut self) -> Result<Duration> {
        let start = self.backend.start()?;
        self.backend.replay(self.loaded().record)?;
        self.backend.stop(start)
    }

    /// Runs the steps one by one, in order; how long each took by itself.
    ///
    /// # Errors
    /// When the device fails.
    pub fn profile(&mut self) -> Result<Vec<Duration>> {
        let Exec { backend, plans, current, segments, .. } = self;
        let Loaded { plan, kernels, .. } = &plans[*current];
        let mut records = Vec::with_capacity(plan.steps.len());
        for step in &plan.steps {
            records.push(backend.record(&[launch(plan, segments, kernels, step)])?);
        }
        let mut times = Vec::with_capacity(records.len());
        // The first round is not counted: devices and drivers prepare much at a kernel's first run.
        for round in 0..2 {
            times.clear();
            for record in &records {
                let start = backend.start()?;
                backend.replay(*record)?;
                times.push(backend.stop(start)?);
            }
            tracing::debug!(round, steps = times.len(), "profiled");
        }
        Ok(times)
    }

    /// Per step, its kernel's template and what the device made of it.
    pub fn notes(&self) -> Vec<String> {
        let Loaded { plan, record, .. } = self.loaded();
        let notes = self.backend.notes(*record);
        let template = |step: &Step| plan.kernels[step.kernel].template.name();
        let note = |(s, step)| notes.get(s).cloned().unwrap_or_else(|| template(step).to_owned());
        plan.steps.iter().enumerate().map(note).collect()
    }

    /// Waits for the device and copies the outputs, in the plan's order, to the host.
    ///
    /// # Errors
    /// When the device fails.
    pub fn read(&mut self) -> Result<Vec<Tensor>> {
        let Exec { backend, plans, current, segments, .. } = self;
        let plan = &plans[*current].plan;
        read_outputs(&mut **backend, &plan.outputs, &|b| place(plan, segments, b))
    }

    /// One run: inputs in, outputs out, in the plan's order.
    ///
    /// # Errors
    /// As [`write`](Self::write), [`replay`](Self::replay) and [`read`](Self::read).
    pub fn run(&mut self, inputs: &[Tensor]) -> Result<Vec<Tensor>> {
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

impl Content {
    fn is_same(&self, other: &Content) -> bool {
        let packed = match (&self.packed, &other.packed) {
            (Some((a, operand)), Some((b, o))) => operand == o && layout::packs_alike(a, b, *operand),
            (a, b) => a.is_none() && b.is_none(),
        };
        packed && self.stored == other.stored && self.constant.is_same(&other.constant)
    }
}

fn launch(plan: &Plan, segments: &[SegmentId], kernels: &[KernelId], step: &Step) -> Launch {
    let buffers = step.reads.iter().chain(&step.writes);
    Launch {
        kernel: kernels[step.kernel],
        args: buffers.map(|&b| place(plan, segments, b).1).collect(),
        lane: step.lane,
        waits: step.waits.clone(),
    }
}

fn place(plan: &Plan, segments: &[SegmentId], buffer: usize) -> (DType, Slice) {
    let b = &plan.buffers[buffer];
    (b.dtype, Slice { segment: segments[b.segment], offset: b.offset, bytes: b.bytes })
}

/// Copies a constant to its buffer: in the layout that a kernel wants of an operand, or as the type that is stored.
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
            layout::pack(kernel, operand, &plain).into()
        }
        None => value.store(stored, &constant.name)?,
    };
    let found = bytes.len() as u64;
    if found > at.bytes {
        let (name, expected) = (&constant.name, at.bytes);
        return Err(Error::Plan(format!("constant '{name}': expected at most {expected} bytes, found {found}")));
    }
    backend.write(Slice { bytes: found, ..at }, &bytes)
}

/// Copies inputs to their buffers once all of them were found to be what the ports ask for. `place` tells where a buffer lies, and
/// as which type.
pub(crate) fn write_inputs(
    backend: &mut dyn Backend,
    ports: &[Port],
    place: &dyn Fn(usize) -> (DType, Slice),
    inputs: &[Tensor],
) -> Result<()> {
    if inputs.len() != ports.len() {
        return Err(Error::Usage(format!("expected {} inputs, found {}", ports.len(), inputs.len())));
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
    place: &dyn Fn(usize) -> (DType, Slice),
) -> Result<Vec<Tensor>> {
    let mut outputs = Vec::with_capacity(ports.len());
    for port in ports {
        let (stored, at) = place(port.buffer);
        let mut bytes = vec![0; port.shape.numel() * stored.size()];
        backend.read(Slice { bytes: bytes.len() as u64, ..at }, &mut bytes)?;
        outputs.push(Tensor::load(stored, bytes, port.dtype, port.shape.clone())?);
    }
    Ok(outputs)
}

fn fits(port: &Port, tensor: &Tensor) -> Result<()> {
    if tensor.dtype() == port.dtype && *tensor.shape() == port.shape {
        return Ok(());
    }
    let Port { name, dtype, shape, .. } = port;
    Err(Error::Usage(format!("input '{name}': expected {dtype}{shape}, found {}{}", tensor.dtype(), tensor.shape())))
}
