//! Runs a plan element by element, twice: on the bytes that it assigns, and with memory of its own for every buffer.

use plimsoll::internals::dtype::DType;
use plimsoll::internals::kernel::meaning::{self, Order};
use plimsoll::internals::kernel::{Kernel, Template};
use plimsoll::internals::plan::check::{Span, dead};
use plimsoll::internals::plan::{Buffer, BufferIdx, Class, Plan, SegmentIdx, Step};
use std::collections::BTreeMap;

/// Outputs, then state, after each of the runs, bit by bit.
pub type Results = Vec<Vec<u64>>;

/// Runs whose work is beyond this many elements are not worth waiting for.
const MOST_WORK: u128 = 1 << 20;

/// Where elements are read and written.
trait Memory {
    fn get(&mut self, buffer: BufferIdx, element: isize) -> f64;
    fn set(&mut self, buffer: BufferIdx, element: isize, value: f64);
    /// The kernel uses that many bytes of its workspace.
    fn scribble(&mut self, _buffer: BufferIdx, _bytes: u64) {}
    /// A result begins with the elements of this operand, over which it lies.
    fn keep(&mut self, _from: BufferIdx, _to: BufferIdx) {}
    /// The step is over.
    fn commit(&mut self) {}
    /// This step is next, or nothing is.
    fn before(&mut self, _step: usize) {}
}

/// The port of a constant in a packed layout. Its bytes are the kernel's own affair; what it reads is the constant.
fn packed(plan: &Plan, buffer: BufferIdx) -> Option<usize> {
    plan.programs[0].constants.iter().position(|c| c.buffer == buffer && c.packed.is_some())
}

/// A buffer's own memory. What a step writes is seen after it.
struct Private<'a> {
    plan: &'a Plan,
    written: Vec<BTreeMap<isize, f64>>,
    staged: Vec<(BufferIdx, isize, f64)>,
    /// A buffer of which an element was read that nothing wrote.
    unwritten: Option<BufferIdx>,
}

impl Memory for Private<'_> {
    fn get(&mut self, buffer: BufferIdx, element: isize) -> f64 {
        if let Some(port) = packed(self.plan, buffer) {
            return given(DType::F32, port, element as usize, 0);
        }
        let found = self.written[buffer].get(&element).copied();
        if found.is_none() {
            self.unwritten = Some(buffer);
        }
        found.unwrap_or(0.0)
    }

    fn set(&mut self, buffer: BufferIdx, element: isize, value: f64) {
        self.staged.push((buffer, element, value));
    }

    fn keep(&mut self, from: BufferIdx, to: BufferIdx) {
        self.written[to] = self.written[from].clone();
    }

    fn commit(&mut self) {
        for (buffer, element, value) in self.staged.drain(..) {
            let dtype = self.plan.programs[0].buffers[buffer].dtype;
            let value = load(dtype, &store(dtype, value));
            self.written[buffer].insert(element, value);
        }
    }
}

/// The plan's segments, full of nonsense at first. What dies is nonsense again.
struct Shared<'a> {
    plan: &'a Plan,
    segments: Vec<Vec<u8>>,
    nonsense: u64,
    dead: Vec<Vec<Span>>,
}

impl Shared<'_> {
    fn bytes(&mut self, buffer: BufferIdx, element: isize, size: usize) -> &mut [u8] {
        let Buffer { segment, offset, bytes, .. } = self.plan.programs[0].buffers[buffer];
        let at = usize::try_from(element).expect("no element is below a buffer") * size;
        assert!(at + size <= bytes as usize, "element {element} is beyond buffer {buffer}");
        &mut self.segments[segment][offset as usize + at..][..size]
    }

    /// Four bytes that are a number of every type.
    fn nonsense(&mut self) -> [u8; 4] {
        self.nonsense = self.nonsense.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (0x3f80_0000 | (self.nonsense >> 41) as u32).to_le_bytes()
    }

    fn fill(&mut self, segment: SegmentIdx, from: usize, to: usize) {
        for at in from..to {
            let byte = self.nonsense()[at % 4];
            self.segments[segment][at] = byte;
        }
    }
}

impl Memory for Shared<'_> {
    fn get(&mut self, buffer: BufferIdx, element: isize) -> f64 {
        if let Some(port) = packed(self.plan, buffer) {
            return given(DType::F32, port, element as usize, 0);
        }
        let dtype = self.plan.programs[0].buffers[buffer].dtype;
        load(dtype, self.bytes(buffer, element, dtype.size()))
    }

    fn set(&mut self, buffer: BufferIdx, element: isize, value: f64) {
        let dtype = self.plan.programs[0].buffers[buffer].dtype;
        self.bytes(buffer, element, dtype.size()).copy_from_slice(&store(dtype, value));
    }

    fn scribble(&mut self, buffer: BufferIdx, bytes: u64) {
        let Buffer { segment, offset, .. } = self.plan.programs[0].buffers[buffer];
        self.fill(segment, offset as usize, (offset + bytes) as usize);
    }

    fn before(&mut self, step: usize) {
        for Span { segment, offset, bytes } in self.dead[step].clone() {
            self.fill(segment, offset as usize, (offset + bytes) as usize);
        }
    }
}

fn load(dtype: DType, bytes: &[u8]) -> f64 {
    fn array<const N: usize>(bytes: &[u8]) -> [u8; N] {
        bytes.try_into().expect("an element's bytes")
    }
    match dtype {
        DType::F32 => f32::from_le_bytes(array(bytes)).into(),
        DType::F64 => f64::from_le_bytes(array(bytes)),
        DType::I64 => i64::from_le_bytes(array(bytes)) as f64,
        DType::I32 => i32::from_le_bytes(array(bytes)).into(),
        DType::I16 => i16::from_le_bytes(array(bytes)).into(),
        DType::I8 => (bytes[0] as i8).into(),
        DType::U64 => u64::from_le_bytes(array(bytes)) as f64,
        DType::U32 => u32::from_le_bytes(array(bytes)).into(),
        DType::U8 | DType::Bool => bytes[0].into(),
        DType::F16 | DType::BF16 | DType::U16 => u16::from_le_bytes(array(bytes)).into(),
        narrow => load(narrow.held(), bytes),
    }
}

fn store(dtype: DType, value: f64) -> Vec<u8> {
    match dtype {
        DType::F32 => (value as f32).to_le_bytes().to_vec(),
        DType::F64 => value.to_le_bytes().to_vec(),
        DType::I64 => (value as i64).to_le_bytes().to_vec(),
        DType::I32 => (value as i32).to_le_bytes().to_vec(),
        DType::I16 => (value as i16).to_le_bytes().to_vec(),
        DType::I8 => vec![value as i8 as u8],
        DType::U64 => (value as u64).to_le_bytes().to_vec(),
        DType::U32 => (value as u32).to_le_bytes().to_vec(),
        DType::U8 => vec![value as u8],
        DType::Bool => vec![u8::from(value != 0.0)],
        DType::F16 | DType::BF16 | DType::U16 => (value as u16).to_le_bytes().to_vec(),
        narrow => store(narrow.held(), value),
    }
}

/// Values that the caller or the loader provides: small, different, and whole where they should be.
pub fn given(dtype: DType, port: usize, element: usize, run: usize) -> f64 {
    let n = (element * 7 + port * 3 + run * 5) % 11;
    if dtype.is_float() { 0.25 * n as f64 - 1.0 } else { (n % 3) as f64 }
}

/// Elements that a run reads, or thereabouts.
fn work(plan: &Plan) -> u128 {
    let size = |shape: &[usize]| shape.iter().fold(1u128, |n, &d| n.saturating_mul(d as u128));
    let kernel = |k: &Kernel| {
        let core = k.reads.iter().take(k.template.core_reads()).map(|o| size(&o.access.shape)).max().unwrap_or(1);
        let space = size(&k.shape);
        match k.template {
            Template::MatMul | Template::MatMulBits { .. } => {
                space.saturating_mul(k.reads[0].access.shape.last().copied().unwrap_or(1) as u128)
            }
            Template::Gather { .. }
            | Template::Scatter { .. }
            | Template::Scan { .. }
            | Template::Sort { .. }
            | Template::Map
            | Template::Row { .. } => space,
            Template::Attention { .. }
            | Template::Conv { .. }
            | Template::ConvTranspose { .. }
            | Template::ConvFilters { .. }
            | Template::Pool { .. }
            | Template::PoolGrad { .. }
            | Template::SumByIndex
            | Template::Pad { .. }
            | Template::Resize { .. } => space.saturating_mul(core),
            // Launches of other kernels have no elements of their own.
            Template::Repeat(_) | Template::Collective(_) => u128::MAX,
        }
    };
    let steps = plan.programs[0]
        .steps
        .iter()
        .map(|s| kernel(&plan.programs[0].kernels[s.kernel]))
        .fold(0u128, u128::saturating_add);
    plan.segments.iter().fold(steps, |n, s| n.saturating_add(u128::from(s.bytes)))
}

/// Runs twice in a row with a memory of its own for each buffer; `None` when that would take too long.
///
/// # Errors
/// With a buffer of which an element was read that nothing wrote.
pub fn ideal(plan: &Plan) -> Option<Result<Results, BufferIdx>> {
    if work(plan) > MOST_WORK {
        return None;
    }
    let mut memory = Private {
        plan,
        written: vec![BTreeMap::new(); plan.programs[0].buffers.len()],
        staged: Vec::new(),
        unwritten: None,
    };
    let results = runs(plan, &mut memory, false, |memory, buffer, lasts| {
        if !lasts {
            memory.written[buffer].clear();
        }
    });
    Some(memory.unwritten.map_or(Ok(results), Err))
}

/// Runs twice in a row on the bytes that the plan assigns, forwards or backwards through each kernel's index space.
pub fn shared(plan: &Plan, seed: u64, backwards: bool) -> Results {
    let segments = plan.segments.iter().map(|s| vec![0; s.bytes as usize]).collect();
    let mut memory = Shared { plan, segments, nonsense: seed, dead: dead(plan.first()) };
    for (i, segment) in SegmentIdx::enumerate(&plan.segments) {
        memory.fill(i, 0, segment.bytes as usize);
    }
    runs(plan, &mut memory, backwards, |_, _, _| ())
}

fn runs<M: Memory>(
    plan: &Plan,
    memory: &mut M,
    backwards: bool,
    mut reset: impl FnMut(&mut M, BufferIdx, bool),
) -> Results {
    let mut results = Vec::new();
    let elements = |b: BufferIdx| plan.programs[0].buffers[b].shape.iter().product::<usize>();
    let fill = |memory: &mut M, buffer: BufferIdx, port: usize, run: usize| {
        for e in 0..elements(buffer) {
            memory.set(buffer, e as isize, given(plan.programs[0].buffers[buffer].dtype, port, e, run));
        }
        memory.commit();
    };
    for (i, port) in plan.programs[0].constants.iter().enumerate().filter(|(_, c)| c.packed.is_none()) {
        fill(memory, port.buffer, i, 0);
    }
    for state in &plan.programs[0].state {
        fill(memory, state.port.buffer, 0, 0);
    }
    for run in 0..2 {
        let updates: Vec<_> = plan.programs[0].state.iter().filter_map(|s| Some((s.port.buffer, s.update?))).collect();
        for (b, buffer) in BufferIdx::enumerate(&plan.programs[0].buffers) {
            let update = updates.iter().any(|&(_, update)| update == b);
            reset(memory, b, matches!(buffer.class, Class::Constant | Class::State) && !update);
        }
        for (i, port) in plan.programs[0].inputs.iter().enumerate() {
            fill(memory, port.buffer, 5 + i, run);
        }
        for (at, step) in plan.programs[0].steps.iter().enumerate() {
            memory.before(at);
            launch(&plan.programs[0].kernels[step.kernel], step, memory, backwards);
            memory.commit();
        }
        memory.before(plan.programs[0].steps.len());
        for port in plan.programs[0].outputs.iter().chain(plan.programs[0].state.iter().map(|state| &state.port)) {
            let updated = updates.iter().find(|&&(state, _)| state == port.buffer);
            let buffer = updated.map_or(port.buffer, |&(_, update)| update);
            results.push((0..elements(buffer)).map(|e| memory.get(buffer, e as isize).to_bits()).collect());
        }
        // The next run begins with the updates.
        for (state, update) in updates {
            for e in 0..elements(state) as isize {
                let value = memory.get(update, e);
                memory.set(state, e, value);
            }
        }
        memory.commit();
    }
    results
}

/// Elements from the start of an argument's buffer to what its kernel counts from.
fn first(kernel: &Kernel, step: &Step, slot: usize) -> isize {
    step.bind_ranges.get(slot).map_or(0, |w| (w.offset / kernel.operand(slot).dtype.size() as u64) as isize)
}

/// A step's operands in a memory.
struct Operands<'a, M> {
    kernel: &'a Kernel,
    step: &'a Step,
    memory: &'a mut M,
    /// Between 0 and 1: follows from all that the core has read for this row.
    seen: f64,
}

impl<M: Memory> meaning::Memory for Operands<'_, M> {
    fn load(&mut self, read: usize, element: isize) -> f64 {
        let value = self.memory.get(self.step.reads[read], first(self.kernel, self.step, read) + element);
        if read < self.kernel.template.core_reads() && value.is_finite() {
            self.seen = (1.37 * self.seen + 0.731 * value).rem_euclid(1.0);
        }
        value
    }

    /// Every element that the core reads shows in what is written, also where a template hides it: in a maximum, or under a weight of 0.
    fn store(&mut self, write: usize, element: isize, value: f64) {
        let shown = if self.kernel.writes[write].dtype.is_float() { value + self.seen } else { value };
        let slot = self.kernel.reads.len() + write;
        self.memory.set(self.step.writes[write], first(self.kernel, self.step, slot) + element, shown);
    }

    fn begin_row(&mut self) {
        self.seen = 0.0;
        if let Some(&workspace) = self.step.writes.get(self.kernel.writes.len()) {
            self.memory.scribble(workspace, self.kernel.workspace);
        }
    }
}

fn launch<M: Memory>(kernel: &Kernel, step: &Step, memory: &mut M, backwards: bool) {
    let order = if backwards { Order::Backwards } else { Order::Forwards };
    if kernel.is_in_place() {
        memory.keep(step.reads[0], step.writes[0]);
    }
    meaning::run(kernel, order, &mut Operands { kernel, step, memory, seen: 0.0 });
}
