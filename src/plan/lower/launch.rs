//! Kernels become launches. A kernel is cut into parts if a binding does not hold a buffer. A library call replaces it if it can.
//! Results are written in place if possible.

use super::buffer_view::{BufferView, Read};
use super::destination::unreachable;
use super::outline::Outline;
use super::{DraftStep, Lowering, split};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::expr::{self, Body};
use crate::kernel::algorithm::Schedule;
use crate::kernel::schedule::{self, Split};
use crate::kernel::tuned::Tuned;
use crate::kernel::{Kernel, Template};
use crate::op::NodeId;
use crate::shape::{Access, Shape};
use crate::target::Target;
use crate::{BindRange, BufferIdx, Class, KernelIdx};

impl Lowering<'_> {
    /// Adds the kernel of a group, which writes the value of its last node. `seen` is that value's place in the kernel's index space, if
    /// strides can express it.
    pub(super) fn write(
        &mut self,
        sink: NodeId,
        outline: Outline,
        reads: Vec<Read>,
        seen: impl FnOnce(&Access) -> Option<Access>,
    ) -> Result<()> {
        let BufferView { buffer, access } = self.destination(sink.output(0))?;
        let access = seen(&access).ok_or_else(|| unreachable(self.graph, sink))?;
        self.step(self.graph.node(sink).name.clone(), outline, reads, BufferView { buffer, access })
    }

    /// Adds a kernel that reads these operands and writes to one place.
    pub(super) fn step(
        &mut self,
        name: String,
        Outline { template, shape, prologues, body }: Outline,
        reads: Vec<Read>,
        to: BufferView,
    ) -> Result<()> {
        let (mut buffers, operands): (Vec<_>, Vec<_>) = reads.into_iter().unzip();
        let mut kernel = Kernel {
            template,
            shape,
            reads: operands,
            writes: vec![self.operand(to.buffer, to.access)],
            prologues,
            body,
            workspace: 0,
            schedule: Schedule::Open,
        };
        let to = to.buffer;
        if let Some(parts) = self.cut(&name, &kernel, &buffers, to)? {
            for split::Part { kernel, bind_ranges } in parts {
                let in_place = kernel.is_in_place();
                self.launch(name.clone(), kernel, buffers.clone(), to, bind_ranges)?;
                if in_place {
                    // The data there are a part of the result by now.
                    buffers[0] = to;
                }
            }
            return Ok(());
        }
        self.widen(&mut kernel, &mut buffers)?;
        walk_as_written(&mut kernel, self.target);
        if self.target.packs_constants() {
            // The packed form of a constant depends on the algorithm.
            kernel.schedule = self.schedule(&name, &kernel, &buffers)?;
            self.pack(&mut kernel, &mut buffers);
        }
        let Some(Split { call: (call, slots), rest, .. }) = self.call(&mut kernel, &buffers) else {
            return self.launch(name, kernel, buffers, to, Vec::new());
        };
        let pick = |slots: &[usize]| slots.iter().map(|&s| buffers[s]).collect::<Vec<_>>();
        self.launch(name.clone(), call, pick(&slots), to, Vec::new())?;
        if let Some((mut map, slots)) = rest {
            walk_as_written(&mut map, self.target);
            let reads = [to].into_iter().chain(pick(&slots)).collect();
            self.launch(name, map, reads, to, Vec::new())?;
        }
        Ok(())
    }

    /// The parts of a kernel that writes `to`; none if all its buffers are within bindings. All bindings of a range have as many parts as
    /// the largest.
    fn cut(
        &self,
        name: &str,
        kernel: &Kernel,
        buffers: &[BufferIdx],
        to: BufferIdx,
    ) -> Result<Option<Vec<split::Part>>> {
        let slots: Vec<_> = buffers.iter().copied().chain([to]).map(|b| (b, self.draft.buffers[b].bytes)).collect();
        let own = if slots.iter().any(|(_, bytes)| *bytes > self.target.max_binding) {
            // Cutting does not help a buffer that no segment holds.
            self.draft.fits_segments(self.target)?;
            let parts = split::cut(kernel, &slots, self.target);
            Some(parts.map_err(|slot| self.too_large(name, kernel, slots[slot].0, "cannot be split"))?)
        } else {
            None
        };
        let count = own.as_ref().map(|parts| parts.len() as u32);
        let most = self.decisions.choose("parts", self.draft.steps.len() as u32, count, |most| count <= Some(most));
        if let Some(most) = most {
            let parts = own.map_or_else(|| split::cut(kernel, &slots, self.target), Ok);
            let parts = parts.expect("it is within bindings, or was cut");
            return Ok(Some(split::pad(kernel, parts, most as usize, &slots)));
        }
        if own.is_some() {
            let slot = slots.iter().max_by_key(|(_, bytes)| *bytes).expect("a kernel writes");
            return Err(self.too_large(name, kernel, slot.0, "is not split as at the largest binding of its range"));
        }
        Ok(None)
    }

    /// The library call that computes a kernel, with the map behind it. A text that was measured to be faster becomes the kernel's schedule.
    fn call(&mut self, kernel: &mut Kernel, buffers: &[BufferIdx]) -> Option<Split> {
        let refused = self.tuned.map_or(&[][..], Tuned::refused);
        let is_taken = |split: &Split| !refused.iter().any(|call| split.allows(call));
        let mut split = schedule::split(kernel, self.target).filter(is_taken);
        if split.is_some() {
            let measured = self.measured(kernel, buffers);
            self.draft.measured += usize::from(measured.is_some());
            match measured {
                Some(Schedule::Library(call)) => split = split.map(|split| split.called(call.algorithm())),
                Some(text) => (split, kernel.schedule) = (None, text),
                None => {}
            }
        }
        let form = |s: &Split| u32::from(s.rest.is_some());
        let own = split.as_ref().filter(|s| s.is_preferred).map(form);
        let fits = |f| split.as_ref().is_some_and(|s| form(s) == f);
        let taken = self.decisions.choose("call", self.draft.steps.len() as u32, own, fits);
        split.filter(|_| taken.is_some())
    }

    /// The algorithm of a kernel whose arguments are these buffers.
    pub(super) fn schedule(&mut self, name: &str, kernel: &Kernel, buffers: &[BufferIdx]) -> Result<Schedule> {
        if kernel.is_the_backends() {
            return Ok(Schedule::Open);
        }
        // A library's call may leave a part of the kernel to a map.
        if let Some(measured) = self.measured(kernel, buffers).filter(|schedule| schedule.call().is_none()) {
            self.draft.measured += 1;
            return Ok(measured);
        }
        let own = |slot: usize| buffers.iter().filter(|&&b| b == buffers[slot]).count() == 1;
        // The best schedule may depend on which operands are packed.
        schedule::choose(&self.with_packed(kernel, buffers), self.target, &own).map_err(|why| {
            let (template, target) = (kernel.template.name(), &self.target.name);
            Error::usage(format!("node '{name}': target '{target}' has no kernel '{template}' for it: {why}"))
        })
    }

    /// The kernel with the constants packed that may be.
    fn with_packed(&self, kernel: &Kernel, buffers: &[BufferIdx]) -> Kernel {
        let mut packed = kernel.clone();
        if self.target.packs_constants() {
            for (operand, &buffer) in buffers.iter().enumerate().take(kernel.template.core_reads()) {
                packed.reads[operand].packed = self.may_pack(kernel, operand, buffer);
            }
        }
        packed
    }

    /// The measured algorithm of a kernel, if there is one that is legal for these buffers.
    fn measured(&self, kernel: &Kernel, buffers: &[BufferIdx]) -> Option<Schedule> {
        let tuned = self.tuned?;
        let schedule = tuned.find(&self.with_packed(kernel, buffers))?.clone();
        if let Schedule::Library(call) = &schedule {
            let split = schedule::split(kernel, self.target)?;
            return split.allows(call).then_some(schedule);
        }
        let scheduled = Kernel { schedule, ..kernel.clone() };
        let needs = schedule::check(&scheduled, self.target).ok()?;
        let own = |slot: &usize| buffers.iter().filter(|&&b| b == buffers[*slot]).count() == 1;
        needs.own.iter().all(own).then_some(scheduled.schedule)
    }

    fn too_large(&self, name: &str, kernel: &Kernel, buffer: BufferIdx, why: &str) -> Error {
        let (b, target) = (&self.draft.buffers[buffer], self.target);
        let (value, kernel, most) =
            (format!("'{}' ({}{})", b.name, b.dtype, b.shape), kernel.template.name(), target.max_binding);
        Error::usage(format!(
            "node '{name}': tensor {value} takes {} bytes; target '{}' binds at most {most}, and kernel '{kernel}' {why}",
            b.bytes, target.name
        ))
    }

    /// The buffers that a launch reads and may overwrite in place.
    pub(super) fn reusable(
        &self,
        kernel: &Kernel,
        buffers: &[BufferIdx],
        to: BufferIdx,
        bind_ranges: &[BindRange],
    ) -> Vec<BufferIdx> {
        if kernel.is_in_place() {
            return buffers[..1].iter().copied().filter(|&data| data != to).collect();
        }
        let per_row = matches!(kernel.template, Template::Row { per_row: true, .. });
        let bytes = |b: BufferIdx| self.draft.buffers[b].bytes;
        // With several parts, one would overwrite data that another has yet to read.
        let whole = |b: BufferIdx| {
            let mut slots = buffers.iter().chain([&to]).zip(bind_ranges).filter(|(slot, _)| **slot == b);
            slots.all(|(_, w)| (w.offset, w.bytes) == (0, bytes(b)))
        };
        let mut reusable = buffers.to_vec();
        reusable.sort_unstable();
        reusable.dedup();
        reusable.retain(|&b| {
            whole(b) && whole(to) && !per_row && bytes(b) == bytes(to) && reads_as_written(kernel, buffers, b, 0)
        });
        reusable
    }

    /// The number of a kernel among those of the plan, where it is held once.
    pub(super) fn number(&mut self, kernel: Kernel) -> KernelIdx {
        let kernels = &mut self.draft.kernels;
        *self.kernels.entry(kernel.key()).or_insert_with(|| {
            kernels.push(kernel);
            KernelIdx::new(kernels.len() - 1)
        })
    }

    /// Adds a launch and its workspace, and notes the operands that it may overwrite in place.
    fn launch(
        &mut self,
        name: String,
        mut kernel: Kernel,
        buffers: Vec<BufferIdx>,
        to: BufferIdx,
        bind_ranges: Vec<BindRange>,
    ) -> Result<()> {
        if kernel.schedule == Schedule::Open {
            let all: Vec<_> = buffers.iter().copied().chain([to]).collect();
            kernel.schedule = self.schedule(&name, &kernel, &all)?;
        }
        kernel.workspace = match kernel.schedule.call() {
            // It runs with less than it can use, so a small binding does not refuse it.
            Some(call) => call.workspace().min(self.target.max_binding).max(call.least_workspace()),
            None => schedule::workspace(&kernel),
        };
        let mut written = vec![to];
        let reusable = self.reusable(&kernel, &buffers, to, &bind_ranges);
        if kernel.workspace > self.target.max_binding {
            let (found, most) = (kernel.workspace, self.target.max_binding);
            let what = format!(
                "node '{name}': a workspace of {found} bytes; target '{}' binds at most {most}",
                self.target.name
            );
            return Err(Error::usage(what));
        }
        if kernel.workspace > 0 {
            let shape = Shape::new([kernel.workspace as usize]);
            written.push(self.add_buffer(format!("workspace of {name}"), DType::U8, shape, Class::Workspace));
        }
        let number = self.number(kernel);
        for constant in &mut self.draft.constants {
            if let Some((kernel, _)) = &mut constant.packed {
                kernel.get_or_insert(number);
            }
        }
        self.draft.steps.push(DraftStep {
            name,
            kernel: number,
            reads: buffers,
            writes: written,
            bind_ranges,
            reusable,
        });
        Ok(())
    }
}

/// True if a kernel reads each element of a buffer at the place of the result's that it then writes.
pub(super) fn reads_as_written(kernel: &Kernel, buffers: &[BufferIdx], buffer: BufferIdx, result: usize) -> bool {
    let (to, further) = (&kernel.writes[result], kernel.further());
    let in_place = |i: usize| kernel.schedule.call().is_none_or(|call| call.in_place() == Some(i));
    let mut operands = kernel.reads.iter().enumerate().filter(|(i, _)| buffers[*i] == buffer);
    operands
        .all(|(i, o)| further.contains(&i) && in_place(i) && o.access == to.access && o.dtype.size() == to.dtype.size())
}

/// Makes neighbours in an elementwise kernel's index space neighbours in memory, and neighbouring rows of a reduction, if the target is
/// faster that way.
fn walk_as_written(kernel: &mut Kernel, target: &Target) {
    let (outer, indexed) = {
        let indexed = |body: &Body| body.code.iter().any(|i| matches!(i.code, expr::Code::Index(_)));
        let bodies = kernel.template.bodies().into_iter().chain([&kernel.body]).any(indexed);
        match kernel.template {
            Template::Map => (kernel.shape.len(), bodies),
            Template::Row { inner, per_row: true, .. } => (kernel.shape.len() - inner, bodies),
            _ => return,
        }
    };
    if !target.prefers_written_order() || indexed || kernel.writes.len() != 1 {
        return;
    }
    let is_map = kernel.template == Template::Map;
    let Some(along) = (if is_map { kernel.writes.first() } else { kernel.reads.first() }) else { return };
    let (strides, shape) = (&along.access.strides, &kernel.shape);
    let mut axes: Vec<usize> = (0..outer).filter(|&k| shape[k] != 1).collect();
    axes.sort_by_key(|&k| std::cmp::Reverse(strides[k].unsigned_abs()));
    // Axes of extent 1 stay where they are, and so do those of a row.
    let mut sorted = axes.into_iter();
    let order: Vec<usize> = (0..shape.len())
        .map(|k| if k >= outer || shape[k] == 1 { k } else { sorted.next().expect("as many as moved") })
        .collect();
    kernel.shape = order.iter().map(|&k| shape[k]).collect();
    for operand in kernel.reads.iter_mut().chain(&mut kernel.writes) {
        let axes = operand.access.shape.len();
        operand.access = operand.access.permute(&order[..axes]);
    }
}
