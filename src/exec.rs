//! Loads a plan on a backend and replays it. Decides nothing.

use crate::backend::{Backend, Launch, RecordId, SegmentId, Slice};
use crate::error::{Error, Result};
use crate::graph::Constant;
use crate::kernel::layout;
use crate::plan::{Plan, Port};
use crate::tensor::Tensor;
use std::sync::Arc;

/// A plan on a device: allocated, filled with its constants, recorded.
pub struct Exec {
    backend: Box<dyn Backend>,
    plan: Plan,
    segments: Vec<SegmentId>,
    record: RecordId,
}

impl std::fmt::Debug for Exec {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Exec").field("plan", &self.plan.name).finish_non_exhaustive()
    }
}

impl Exec {
    /// Allocates the plan's segments, uploads constants (one per entry of [`Plan::constants`]) and records the steps.
    /// `progress` is told of each constant as it arrives.
    ///
    /// # Errors
    /// When a constant cannot be fetched or the device refuses. Everything taken is given back.
    pub fn load(
        mut backend: Box<dyn Backend>,
        plan: Plan,
        constants: &[Arc<Constant>],
        progress: &dyn Fn(usize),
    ) -> Result<Exec> {
        let mut segments = Vec::with_capacity(plan.segments.len());
        match Self::prepare(&mut *backend, &plan, constants, &mut segments, progress) {
            Ok(record) => Ok(Exec { backend, plan, segments, record }),
            Err(error) => {
                segments.into_iter().for_each(|s| backend.free(s));
                Err(error)
            }
        }
    }

    fn prepare(
        backend: &mut dyn Backend,
        plan: &Plan,
        constants: &[Arc<Constant>],
        segments: &mut Vec<SegmentId>,
        progress: &dyn Fn(usize),
    ) -> Result<RecordId> {
        for segment in &plan.segments {
            segments.push(backend.alloc(segment.bytes)?);
        }
        for (index, (port, constant)) in plan.constants.iter().zip(constants).enumerate() {
            let value = constant.value()?;
            let bytes = match port.packed {
                Some((kernel, operand)) => layout::pack(&plan.kernels[kernel], operand, value.bytes()),
                None => value.store(plan.buffers[port.buffer].dtype, &port.name)?.into_owned(),
            };
            let at = Slice { bytes: bytes.len() as u64, ..slice(plan, segments, port.buffer) };
            backend.write(at, &bytes)?;
            progress(index + 1);
        }
        let mut kernels = Vec::with_capacity(plan.kernels.len());
        for kernel in &plan.kernels {
            kernels.push(backend.compile(kernel)?);
        }
        let launch = |step: &crate::plan::Step| Launch {
            kernel: kernels[step.kernel],
            args: step.reads.iter().chain(&step.writes).map(|&b| slice(plan, segments, b)).collect(),
        };
        backend.record(&plan.steps.iter().map(launch).collect::<Vec<_>>())
    }

    /// The plan that is loaded.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The device.
    pub fn backend(&self) -> &dyn Backend {
        &*self.backend
    }

    /// Copies inputs, in the plan's order, into their buffers.
    ///
    /// # Errors
    /// When one is not of the type and shape that were planned, or holds a value that the device's type cannot.
    pub fn write(&mut self, inputs: &[Tensor]) -> Result<()> {
        if inputs.len() != self.plan.inputs.len() {
            let expected = self.plan.inputs.len();
            return Err(Error::Usage(format!("expected {expected} inputs, found {}", inputs.len())));
        }
        for (port, tensor) in self.plan.inputs.iter().zip(inputs) {
            fits(port, tensor)?;
        }
        for (port, tensor) in self.plan.inputs.iter().zip(inputs) {
            let bytes = tensor.store(self.plan.buffers[port.buffer].dtype, &port.name)?;
            let at = Slice { bytes: bytes.len() as u64, ..slice(&self.plan, &self.segments, port.buffer) };
            self.backend.write(at, &bytes)?;
        }
        Ok(())
    }

    /// Runs all steps once.
    ///
    /// # Errors
    /// When the device fails.
    pub fn replay(&mut self) -> Result<()> {
        self.backend.replay(self.record)
    }

    /// Waits for the device and copies the outputs, in the plan's order, to the host.
    ///
    /// # Errors
    /// When the device fails.
    pub fn read(&mut self) -> Result<Vec<Tensor>> {
        let mut outputs = Vec::with_capacity(self.plan.outputs.len());
        for port in &self.plan.outputs {
            let stored = self.plan.buffers[port.buffer].dtype;
            let mut bytes = vec![0; port.shape.numel() * stored.size()];
            let at = Slice { bytes: bytes.len() as u64, ..slice(&self.plan, &self.segments, port.buffer) };
            self.backend.read(at, &mut bytes)?;
            outputs.push(Tensor::load(stored, bytes, port.dtype, port.shape.clone())?);
        }
        Ok(outputs)
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

fn slice(plan: &Plan, segments: &[SegmentId], buffer: usize) -> Slice {
    let b = &plan.buffers[buffer];
    Slice { segment: segments[b.segment], offset: b.offset, bytes: b.bytes }
}

fn fits(port: &Port, tensor: &Tensor) -> Result<()> {
    if tensor.dtype() == port.dtype && *tensor.shape() == port.shape {
        return Ok(());
    }
    let Port { name, dtype, shape, .. } = port;
    Err(Error::Usage(format!("input '{name}': expected {dtype}{shape}, found {}{}", tensor.dtype(), tensor.shape())))
}
