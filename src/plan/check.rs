//! Checks a plan from the plan alone.
//!
//! A plan that passes is safe to run: every launch reads only data that was written for it, and touches no other bytes. The
//! checker knows kernels, buffers and bytes. It does not know how a plan is made, so it can check a plan that was edited by hand.
//!
//! ```text
//! once            target, segments, buffers, ports, kernels, summary
//! step by step    operands fit their buffers -> slices are equal or disjoint -> reads find their data -> writes take their bytes
//! ```
//!
//! A buffer *holds* its bytes from the first write to it until another buffer that shares some of them is written. If a buffer is
//! written in parts, only these parts may be read. A kernel in place writes some elements of its result, which has the bytes of its data: it
//! holds what the data held.

use super::{
    BindRange, Buffer, BufferIdx, Class, Count, Counted, KernelIdx, MOST_RUNS, Plan, Port, StatePort, Step, StepIdx,
    VERSION, View,
};
use crate::backend::cpu::{OwnBytes, own_bytes};
use crate::dtype::DType;
use crate::elements::Set;
use crate::error::ensure;
use crate::error::{Error, Result};
use crate::kernel::algorithm::{Cpu, Schedule, Way};
use crate::kernel::validate::{Verdict, is_countable};
use crate::kernel::{Kernel, Template, cpu, schedule};
use crate::shape::Access;
use crate::target::{Family, Memory};
use body::{holds, stores};
use kernel::{Accessed, Needs};
use std::collections::{BTreeMap, HashSet};
use streams::Clock;

mod body;
mod dead;
mod kernel;
mod placement;
mod programs;
pub mod ranks;
mod repeat;
pub(super) mod streams;

pub use dead::{Span, dead, spare};
pub use placement::placement;

/// Checks a plan.
///
/// # Errors
/// [`Error::Plan`], with the step, the kernel and the buffers that break a rule, what was expected and what was found.
pub fn check(plan: &Plan) -> Result<()> {
    let all = || {
        ensure(plan.version == VERSION, || format!("expected version {VERSION}, found {}", plan.version))?;
        plan.target.check().map_err(|e| format!("target '{}': {e}", plan.target.name))?;
        ensure(!plan.programs.is_empty(), || "expected a program, found none".to_owned())?;
        for view in plan.views() {
            let of = if plan.programs.len() > 1 { format!("program '{}': ", view.name) } else { String::new() };
            Checker::new(view).and_then(|mut checker| checker.run()).map_err(|e| of + &e)?;
        }
        programs::together(plan)
    };
    all().map_err(Error::plan)?;
    // While a plan is made, it has no mesh yet.
    if plan.mesh.is_some() { ranks::one(plan) } else { Ok(()) }
}

/// The way of a convolution on the CPU, which its packed weights are for.
fn way(kernel: &Kernel) -> Option<Way> {
    match kernel.schedule {
        Schedule::Cpu(Cpu::Conv { way, .. }) => Some(way),
        _ => None,
    }
}

/// The elements that a packed matrix holds: the first one, and the axes that it moves along, including the last two.
fn packs(access: &Access) -> (isize, Vec<(usize, isize)>) {
    let axes = access.shape.iter().copied().zip(access.strides.iter().copied()).enumerate();
    let held = axes.filter(|(k, (_, stride))| *stride != 0 || k + 2 >= access.shape.len());
    (access.offset, held.map(|(_, axis)| axis).collect())
}

struct Checker<'a> {
    plan: View<'a>,
    /// Per buffer, the kernel and the operand that define its packed layout.
    packed: Vec<Option<(KernelIdx, usize)>>,
    needs: Vec<Needs>,
    /// Per workspace of library calls, the most bytes that a call needs.
    least: Vec<Option<u64>>,
    /// Per buffer, the data in its bytes, if it holds them.
    held: Vec<Option<Held>>,
    /// Per segment, the buffers that hold their bytes, by offset. They do not overlap.
    holders: Vec<BTreeMap<u64, BufferIdx>>,
    clock: Clock,
    /// The buffers of updates, and of what becomes one, which take the bytes of their states over. No step writes a state's own buffer.
    updates: HashSet<BufferIdx>,
    /// Changes of the arena's live bytes from one step to the next.
    live: Vec<i128>,
}

/// The data in a buffer's bytes.
struct Held {
    /// The last step that used the bytes.
    last: StepIdx,
    /// The first and the last step that may run while a step uses the bytes. If they were taken over in place, the operand's
    /// uses count, too.
    span: (StepIdx, StepIdx),
    /// The elements that were written; `None` means all.
    parts: Option<Vec<Set>>,
}

impl Held {
    fn use_at(&mut self, at: StepIdx, clock: &Clock) {
        let (first, last) = clock.beside(at);
        self.last = at;
        self.span = (self.span.0.min(first), self.span.1.max(last));
    }

    fn has(&self, set: &Set) -> bool {
        self.parts.as_ref().is_none_or(|parts| set.is_covered(parts))
    }
}

/// An argument of a launch.
struct Arg<'a> {
    buffer: BufferIdx,
    /// The bytes of the buffer that are bound.
    bind_range: BindRange,
    /// The elements that the operand may touch; `None` for the workspace, which may be touched everywhere.
    accessed: Option<&'a Accessed>,
    /// The elements of the buffer that it may touch.
    set: Option<Set>,
    /// Its index among the operands that are read, or that are written.
    operand: usize,
    written: bool,
}

impl<'a> Checker<'a> {
    /// Checks everything but the steps.
    fn new(plan: View<'a>) -> Verdict<Checker<'a>> {
        let target = plan.target;
        let kernel =
            |(i, k)| repeat::check(k, target).map_err(|e: String| format!("kernel {i} ({}): {e}", k.template.name()));
        let needs = plan.kernels.iter().enumerate().map(kernel).collect::<Verdict<Vec<_>>>()?;
        let mut checker = Checker {
            plan,
            packed: vec![None; plan.buffers.len()],
            needs,
            least: vec![None; plan.buffers.len()],
            held: plan.buffers.iter().map(|_| None).collect(),
            holders: vec![BTreeMap::new(); plan.segments.len()],
            clock: Clock::new(plan)?,
            updates: HashSet::new(),
            // What a plan without steps holds is live at one moment.
            live: vec![0; plan.steps.len().max(1) + 1],
        };
        checker.segments()?;
        checker.ports()?;
        checker.buffers()?;
        Ok(checker)
    }

    fn run(&mut self) -> Verdict {
        for (at, step) in StepIdx::enumerate(&self.plan.program.steps) {
            self.step(at, step).map_err(|e| {
                let kernel = self.plan.kernels.get(step.kernel.index()).map_or("absent", |k| k.template.name());
                format!("step {at} '{}' (kernel {}, {kernel}): {e}", step.name, step.kernel)
            })?;
        }
        let last = StepIdx::all(&self.plan.steps).next_back().unwrap_or_default();
        for port in &self.plan.outputs {
            let whole = Set::first(self.elements(port.buffer));
            let held = self.held[port.buffer].as_ref();
            let written = whole.is_none_or(|whole| held.is_some_and(|h| h.has(&whole)));
            ensure(written, || format!("output '{}': no step writes all of {}", port.name, self.name(port.buffer)))?;
            if let Some(held) = &mut self.held[port.buffer] {
                held.span.1 = last;
            }
        }
        for StatePort { port, update, .. } in &self.plan.state {
            let Some(update) = *update else { continue };
            let whole = Set::first(self.elements(update));
            let written = whole.is_none_or(|whole| self.held[update].as_ref().is_some_and(|h| h.has(&whole)));
            ensure(written, || format!("state '{}': no step writes all of {}", port.name, self.name(update)))?;
        }
        for buffer in BufferIdx::all(&self.plan.buffers) {
            self.release(buffer);
        }
        self.clock.check(self.plan)?;
        self.backend()?;
        self.summary()
    }

    fn name(&self, buffer: BufferIdx) -> String {
        format!("buffer {buffer} '{}'", self.plan.buffers[buffer].name)
    }

    /// The number of a buffer's elements. An earlier check rules out an overflow.
    fn elements(&self, buffer: BufferIdx) -> u64 {
        self.plan.buffers[buffer].shape.iter().map(|&d| d as u64).product()
    }

    fn is_arena(&self, buffer: BufferIdx) -> bool {
        self.plan.buffers[buffer].class.in_arena()
    }

    /// Bytes rounded up to the alignment, as the arena counts them.
    fn aligned(&self, bytes: u64) -> i128 {
        (bytes as i128 + self.plan.target.alignment as i128 - 1) & -(self.plan.target.alignment as i128)
    }

    /// The bytes that a buffer needs in the arena. The workspace of a library call may be larger than it needs to be, if the
    /// bytes are free.
    fn footprint(&self, buffer: BufferIdx) -> i128 {
        let bytes = self.plan.buffers[buffer].bytes;
        self.aligned(self.least[buffer].map_or(bytes, |least| bytes.min(least)))
    }

    fn segments(&self) -> Verdict {
        let most = self.plan.target.max_segment;
        for (i, segment) in self.plan.segments.iter().enumerate() {
            let own = segment.class.segment() == segment.class;
            ensure(own, || format!("segment {i}: no segment is of class {}", segment.class.name()))?;
            ensure(
                segment.bytes <= most
                    || matches!(segment.memory, Memory::Scratch | Memory::Own | Memory::Prefetch | Memory::Reserve),
                || format!("segment {i}: expected at most {most} bytes, found {}", segment.bytes),
            )?;
            let named = || format!("segment {i} of class {}", segment.class.name());
            let staging = segment.class == Class::Staging;
            let right = match segment.memory {
                Memory::Device => !staging && !matches!(segment.class, Class::Backend | Class::Reserve),
                Memory::Upload | Memory::Download => staging,
                Memory::Scratch | Memory::Own => segment.class == Class::Backend,
                Memory::Prefetch => staging && self.plan.target.family == Family::Cpu,
                Memory::Reserve => segment.class == Class::Reserve,
                Memory::Pinned => matches!(segment.class, Class::Constant | Class::State),
            };
            ensure(right, || format!("{}: in {:?} memory", named(), segment.memory))?;
            let (slot, cap) = (segment.bytes, self.plan.target.staging);
            let passes = matches!(segment.memory, Memory::Upload | Memory::Download);
            let whole = !passes || slot > 0 && slot <= cap && slot.is_multiple_of(self.plan.target.alignment);
            ensure(whole, || {
                let alignment = self.plan.target.alignment;
                format!("{}: expected a multiple of {alignment} up to {cap}, found {slot}", named())
            })?;
        }
        let runs = u64::from(self.plan.plan.runs);
        ensure((1..=MOST_RUNS).contains(&self.plan.plan.runs), || {
            format!("expected 1 to {MOST_RUNS} runs at once, found {runs}")
        })?;
        let total = self.plan.segments.iter().try_fold(0u64, |sum, s| sum.checked_add(s.bytes.checked_mul(runs)?));
        ensure(total.is_some(), || "the sum of the segments' sizes overflows 64 bits".to_owned())?;
        self.staging()?;
        self.reserve()
    }

    /// Checks that NCCL has the memory that the target leaves to it.
    fn reserve(&self) -> Verdict {
        let needed = self.plan.target.reserve;
        let reserves = self.plan.segments.iter().filter(|s| s.class == Class::Reserve);
        let found: Vec<u64> = reserves.map(|s| s.bytes).collect();
        let right = if needed == 0 { found.is_empty() } else { found == [needed] };
        ensure(right, || {
            format!("the reserve of NCCL: expected one segment of {needed} bytes or none for 0, found {found:?}")
        })
    }

    /// Checks that there is one staging segment in each direction, if data must pass through it.
    fn staging(&self) -> Verdict {
        if self.plan.target.staging == 0 {
            return Ok(());
        }
        let bytes = |classes: &[Class]| -> u128 {
            self.plan.buffers.iter().filter(|b| classes.contains(&b.class)).map(|b| u128::from(b.bytes)).sum()
        };
        let up = bytes(&[Class::Constant, Class::State, Class::Input]);
        for (memory, moved) in [(Memory::Upload, up), (Memory::Download, bytes(&[Class::State, Class::Output]))] {
            let found = self.plan.segments.iter().filter(|s| s.memory == memory).count();
            let right = found == 1 || found == 0 && moved == 0;
            ensure(right, || {
                format!("{moved} bytes to stage: expected one segment in {memory:?} memory, found {found}")
            })?;
        }
        Ok(())
    }

    /// Checks that the CPU's threads and kernels have the memory that the backend takes for itself, and no other device has any.
    fn backend(&self) -> Verdict {
        let View { target, segments, program, .. } = self.plan;
        let kernels = &program.kernels;
        let own = kernels.iter().filter(|_| target.family == Family::Cpu);
        let own: Vec<OwnBytes> = own.map(|kernel| own_bytes(kernel, target.threads as usize)).collect();
        let thread = own.iter().map(|own| own.thread).max().unwrap_or(0);
        let tables = own.iter().map(|own| own.tables).try_fold(target.stack_bytes(), u64::checked_add);
        for (memory, needed) in [(Memory::Scratch, thread.checked_mul(target.threads.into())), (Memory::Own, tables)] {
            let needed = needed.ok_or_else(|| format!("{memory:?} memory: its bytes overflow 64 bits"))?;
            let found: Vec<u64> = segments.iter().filter(|s| s.memory == memory).map(|s| s.bytes).collect();
            let right = match found[..] {
                [] => needed == 0,
                [bytes] => bytes >= needed && target.family == Family::Cpu,
                _ => false,
            };
            ensure(right, || {
                format!(
                    "{memory:?} memory: expected one segment of {needed} bytes or none for 0, found {found:?}; plan the model again"
                )
            })?;
        }
        Ok(())
    }

    /// Checks ports and their buffers, and notes which buffers hold data before the first step.
    fn ports(&mut self) -> Verdict {
        let plan = self.plan;
        let mut taken = HashSet::new();
        let mut fill = |checker: &mut Checker, name: &str, dtype: DType, buffer: BufferIdx, class: Class| {
            let name = || format!("{} '{name}'", class.name());
            let Some(found) = plan.buffers.get(buffer.index()) else {
                return Err(format!("{}: buffer {buffer} of {}", name(), plan.buffers.len()));
            };
            let named = || format!("{}: {}", name(), checker.name(buffer));
            ensure(found.class == class, || {
                format!("{}: expected class {}, found {}", named(), class.name(), found.class.name())
            })?;
            let fits = if matches!(class, Class::Constant | Class::State) { holds } else { stores };
            ensure(fits(plan.target, dtype, found.dtype), || {
                format!("{}: expected what stores {dtype}, found {}", named(), found.dtype)
            })?;
            if class != Class::Output {
                ensure(taken.insert(buffer), || format!("{}: filled twice", named()))?;
                checker.held[buffer] = Some(Held { last: StepIdx::default(), span: Default::default(), parts: None });
            }
            Ok(())
        };
        for port in &plan.constants {
            fill(self, &port.name, port.dtype, port.buffer, Class::Constant)?;
            let Some((kernel, operand)) = port.packed else { continue };
            let reader = plan.kernels.get(kernel.index()).and_then(|k| k.reads.get(operand));
            ensure(reader.is_some_and(|o| o.packed), || {
                format!("constant '{}': operand {operand} of kernel {kernel} is not packed", port.name)
            })?;
            self.packed[port.buffer] = port.packed;
        }
        let updated = plan.state.iter().any(|state| state.update.is_some());
        ensure(updated || !plan.outputs.is_empty(), || "it has no outputs, and updates no state".to_owned())?;
        let states: Vec<&Port> = plan.state.iter().map(|state| &state.port).collect();
        for (ports, class) in [
            (states, Class::State),
            (plan.inputs.iter().collect(), Class::Input),
            (plan.outputs.iter().collect(), Class::Output),
        ] {
            let mut names = HashSet::new();
            for Port { name, dtype, shape, buffer, packed, .. } in ports {
                ensure(!packed || dtype.is_packed(), || format!("{} '{name}': {dtype} shares no bytes", class.name()))?;
                fill(self, name, if *packed { DType::U8 } else { *dtype }, *buffer, class)?;
                ensure(names.insert(name), || format!("{} '{name}': named twice", class.name()))?;
                let count = |s: &crate::shape::Shape| s.iter().map(|&d| d as u128).product::<u128>();
                let found = &plan.buffers[*buffer].shape;
                let shared = if *packed { 8 / dtype.bits().max(1) as u128 } else { 1 };
                let same = is_countable(shape) && is_countable(found) && count(shape).div_ceil(shared) == count(found);
                ensure(same, || {
                    format!("{} '{name}': {} expected {shape}, found {found}", class.name(), self.name(*buffer))
                })?;
            }
        }
        plan.outputs.iter().try_for_each(|port| self.counts(port))?;
        self.updates()
    }

    /// Checks that outputs of one integer say how many elements of an output a run has found.
    fn counts(&self, Port { name, shape, counted, fewest, dtype, .. }: &Port) -> Verdict {
        ensure(fewest.is_none() || dtype.is_int() && shape.numel() == 1, || {
            format!("output '{name}': expected one integer to say how many are found, found {dtype}{shape}")
        })?;
        let is_count = |port: &Port, by: &str| port.name == by && port.dtype.is_int() && port.shape.numel() == 1;
        counted.iter().try_for_each(|Counted { axis, by, more }| {
            let fits = shape.get(*axis).is_some_and(|extent| more.unsigned_abs() <= *extent as u64);
            ensure(fits && self.plan.outputs.iter().any(|port| is_count(port, by)), || {
                format!(
                    "output '{name}': expected an output '{by}' of one integer to count along axis {axis} of {shape}"
                )
            })
        })
    }

    /// Checks that each update is a buffer of its own at the bytes of its state. As any buffer, the state then loses its bytes to the first
    /// write of its update, so that no later step can read the old elements.
    fn updates(&mut self) -> Verdict {
        let plan = self.plan;
        let mut taken: HashSet<BufferIdx> = plan.state.iter().map(|state| state.port.buffer).collect();
        for StatePort { port, update, count, .. } in &plan.state {
            let counts = |count: Count| {
                count.by <= count.most && port.dtype.is_int() && port.shape.numel() > 0 && update.is_some()
            };
            ensure(count.is_none_or(counts), || {
                format!("state '{}': {count:?} is no bound of {}{}, which it counts", port.name, port.dtype, port.shape)
            })?;
            let Some(update) = *update else { continue };
            let named = |e: String| format!("state '{}': its update, buffer {update}: {e}", port.name);
            let Some(found) = plan.buffers.get(update.index()) else {
                return Err(named(format!("one of {} buffers", plan.buffers.len())));
            };
            ensure(taken.insert(update), || named("it has another purpose, too".into()))?;
            let old = &plan.buffers[port.buffer];
            let same = Buffer { name: found.name.clone(), ..old.clone() } == *found;
            ensure(same, || named(format!("expected what {} is, found {found:?}", self.name(port.buffer))))?;
            self.updates.insert(update);
        }
        // An update may be made in several steps, each of which changes some elements.
        let updated: Vec<_> =
            plan.state.iter().filter(|s| s.update.is_some()).map(|s| &plan.buffers[s.port.buffer]).collect();
        for (b, found) in
            BufferIdx::enumerate(&plan.buffers).filter(|(b, found)| found.class == Class::State && !taken.contains(b))
        {
            let same =
                |old: &&&Buffer| (old.segment, old.offset, old.bytes) == (found.segment, found.offset, found.bytes);
            ensure(updated.iter().any(|old| same(&old)), || {
                format!("{}: expected the bytes of a state that is updated, found {found:?}", self.name(b))
            })?;
            self.updates.insert(b);
        }
        Ok(())
    }

    /// Checks the sizes and addresses of buffers. Only buffers in the arena may share bytes.
    fn buffers(&mut self) -> Verdict {
        let plan = self.plan;
        let target = &plan.target;
        let mut lasting = Vec::new();
        for (i, b) in BufferIdx::enumerate(&plan.buffers) {
            let name = |e: String| format!("{}: {e}", self.name(i));
            let Some(segment) = plan.segments.get(b.segment.index()) else {
                return Err(name(format!("segment {} of {}", b.segment, plan.segments.len())));
            };
            let holds = !matches!(b.class, Class::Staging | Class::Backend | Class::Reserve);
            ensure(holds, || name(format!("a buffer of class {}", b.class.name())))?;
            ensure(segment.class == b.class.segment(), || {
                name(format!("class {} in a segment of class {}", b.class.name(), segment.class.name()))
            })?;
            ensure(b.offset.is_multiple_of(target.alignment), || {
                name(format!("expected an offset that is a multiple of {}, found {}", target.alignment, b.offset))
            })?;
            let inside = b.offset.checked_add(b.bytes).is_some_and(|end| end <= segment.bytes);
            ensure(inside, || {
                let Buffer { segment: number, offset, bytes, .. } = b;
                name(format!("{bytes} bytes at {offset} of segment {number}, which has {} bytes", segment.bytes))
            })?;
            ensure(is_countable(&b.shape), || name(format!("{} is too large", b.shape)))?;
            let needed = match self.packed[i] {
                // The operand was seen to be packed, and its kernel to have a layout for it.
                Some((kernel, operand)) => {
                    let (kernel, operand) = plan.kernels[kernel].packed_reader(operand);
                    cpu::packed_bytes(kernel, operand).unwrap_or(u64::MAX)
                }
                None => self.elements(i) * b.dtype.size() as u64,
            };
            ensure(b.bytes >= needed, || {
                name(format!("{}{} takes {needed} bytes, found {}", b.dtype, b.shape, b.bytes))
            })?;
            // All inputs are live at the start, so they must not overlap.
            let update = self.updates.contains(&i);
            if (!self.is_arena(i) || b.class == Class::Input) && b.bytes > 0 && !update {
                lasting.push((b.segment, b.offset, i));
            }
            let lent = b.class == Class::Input || b.class == Class::State && !update;
            if lent && b.bytes > 0 && self.held[i].is_some() {
                self.holders[b.segment].insert(b.offset, i);
            }
        }
        lasting.sort_unstable();
        for pair in lasting.windows(2) {
            let [(segment, offset, a), (other, next, b)] = *pair else { unreachable!("windows of two") };
            let disjoint = segment != other || offset + plan.buffers[a].bytes <= next;
            ensure(disjoint, || {
                let class = plan.segments[segment].class.name();
                format!("{} overlaps {} in a segment of class {class}", self.name(b), self.name(a))
            })?;
        }
        Ok(())
    }

    fn step(&mut self, at: StepIdx, step: &Step) -> Verdict {
        let plan = self.plan;
        let Some(kernel) = plan.kernels.get(step.kernel.index()) else {
            return Err(format!("one of {} kernels", plan.kernels.len()));
        };
        let works = usize::from(kernel.workspace > 0);
        let counts = (kernel.reads.len(), kernel.writes.len() + works);
        ensure((step.reads.len(), step.writes.len()) == counts, || {
            let (reads, writes) = counts;
            let (found, written) = (step.reads.len(), step.writes.len());
            format!("expected {reads} buffers to read and {writes} to write, found {found} and {written}")
        })?;
        let mut buffers = step.reads.iter().chain(&step.writes);
        if let Some(buffer) = buffers.find(|&&b| b.index() >= plan.buffers.len()) {
            return Err(format!("buffer {buffer} of {}", plan.buffers.len()));
        }
        self.bind_ranges(step, kernel.reads.len() + kernel.writes.len())?;
        self.operands(step)?;
        for &slot in &self.needs[step.kernel].own {
            let (b, all) = (step.reads[slot], step.reads.iter().chain(&step.writes));
            let alone = all.filter(|&&other| other == b).count() == 1;
            ensure(alone, || format!("{}: its schedule binds it alone, but the step has it twice", self.name(b)))?;
        }

        // Taken out for a while, because the arguments borrow from it.
        let needs = std::mem::take(&mut self.needs);
        let Needs { reads, writes, .. } = &needs[step.kernel];
        let result = self.launch(at, step, reads, writes);
        self.needs = needs;
        result
    }

    /// The bytes of a buffer that the argument in a slot binds.
    fn bind_range(&self, step: &Step, slot: usize, buffer: BufferIdx) -> BindRange {
        step.bind_ranges.get(slot).copied().unwrap_or(BindRange { offset: 0, bytes: self.plan.buffers[buffer].bytes })
    }

    /// Checks that bind ranges are within their buffers and within the largest binding.
    fn bind_ranges(&self, step: &Step, operands: usize) -> Verdict {
        let plan = self.plan;
        let found = step.bind_ranges.len();
        ensure(found == 0 || found == operands, || format!("expected {operands} bind ranges or none, found {found}"))?;
        let most = plan.target.max_binding;
        for (slot, &b) in step.reads.iter().chain(&step.writes).enumerate() {
            let BindRange { offset, bytes } = self.bind_range(step, slot, b);
            let name = |e: String| format!("binds {}: {e}", self.name(b));
            // A loop binds nothing itself.
            let binds = plan.kernels[step.kernel].repeat().is_none();
            ensure(bytes <= most || !binds, || name(format!("expected at most {most} bytes, found {bytes}")))?;
            let (buffer, unit) = (&plan.buffers[b], plan.target.alignment);
            let whole = offset.is_multiple_of(unit) && offset.is_multiple_of(buffer.dtype.size() as u64);
            ensure(whole, || name(format!("expected a bind range at a multiple of {unit}, found {offset}")))?;
            ensure(offset.checked_add(bytes).is_some_and(|end| end <= buffer.bytes), || {
                name(format!("a bind range of {bytes} bytes at {offset} of {}", buffer.bytes))
            })?;
        }
        Ok(())
    }

    /// Checks that each buffer has the type, class, size and layout that its operand needs.
    fn operands(&mut self, step: &Step) -> Verdict {
        let plan = self.plan;
        let (kernel, needs) = (&plan.kernels[step.kernel], &self.needs[step.kernel]);
        let reads = step.reads.iter().zip(&kernel.reads).zip(&needs.reads).map(|a| (a, "reads"));
        let writes = step.writes.iter().zip(&kernel.writes).zip(&needs.writes).map(|a| (a, "writes"));
        for (i, (((&b, operand), accessed), verb)) in reads.chain(writes).enumerate() {
            let name = |e: String| format!("{verb} {}: {e}", self.name(b));
            let buffer = &plan.buffers[b];
            ensure(buffer.dtype == operand.dtype, || {
                name(format!("expected {}, found {}", operand.dtype, buffer.dtype))
            })?;
            let fixed = match buffer.class {
                Class::Constant | Class::Input => verb == "writes",
                Class::State => verb == "writes" && !self.updates.contains(&b),
                Class::Activation
                | Class::Output
                | Class::Workspace
                | Class::Staging
                | Class::Backend
                | Class::Reserve => false,
            };
            let usable = buffer.class != Class::Workspace && !fixed;
            ensure(usable, || name(format!("a buffer of class {}", buffer.class.name())))?;
            let (all, size) = (self.elements(b), buffer.dtype.size() as u64);
            let bind_range = step.bind_ranges.get(i);
            let seen = |w: &BindRange| (all.saturating_sub(w.offset / size)).min(w.bytes / size);
            let elements = bind_range.map_or(all, seen);
            let inside = accessed.set.as_ref().is_none_or(|s| s.high() < elements);
            ensure(inside, || {
                let high = accessed.set.as_ref().map_or(0, Set::high);
                name(format!("expected elements below {elements}, found element {high}"))
            })?;
            let layout = |(k, o): (KernelIdx, usize)| {
                let (packed, o) = plan.kernels[k].packed_reader(o);
                let (kernel, i) = kernel.packed_reader(i);
                let operand = &kernel.reads[i];
                let same = match kernel.template {
                    // A matrix that is repeated is packed once.
                    Template::MatMul => packs(&packed.reads[o].access) == packs(&operand.access),
                    // Weights are packed for what they slide over, not for how many of these there are.
                    Template::Conv { .. } | Template::ConvTranspose { .. } => {
                        let alike = packed.shape.get(1..) == kernel.shape.get(1..) && way(packed) == way(kernel);
                        alike && packed.reads[o] == *operand
                    }
                    // No other template has a packed layout.
                    _ => false,
                };
                o == i && same && packed.template == kernel.template && packed.reads[o].dtype == operand.dtype
            };
            let fits = match self.packed[b] {
                Some(at) => operand.packed && layout(at),
                None => !operand.packed,
            };
            ensure(fits, || name("its packed layout is not what the kernel reads".into()))?;
            let whole = bind_range.is_none_or(|w| w.offset == 0 && w.bytes == buffer.bytes);
            ensure(whole || !operand.packed, || name("a bind range of a packed layout".into()))?;
        }
        if let Some(&b) = step.writes.get(kernel.writes.len()) {
            let Buffer { class, bytes, .. } = plan.buffers[b];
            let name = |e: String| format!("works in {}: {e}", self.name(b));
            ensure(class == Class::Workspace, || name(format!("a buffer of class {}", class.name())))?;
            ensure(bytes >= kernel.workspace, || {
                name(format!("expected at least {} bytes, found {bytes}", kernel.workspace))
            })?;
            if kernel.schedule.call().is_some() {
                let needed = schedule::workspace(kernel);
                self.least[b] = self.least[b].max(Some(needed));
            }
        }
        Ok(())
    }

    fn launch(&mut self, at: StepIdx, step: &Step, reads: &[Accessed], writes: &[Accessed]) -> Verdict {
        let arg = |written: bool, operand: usize, buffer: BufferIdx| {
            let (slot, accesses) = if written { (step.reads.len() + operand, writes) } else { (operand, reads) };
            let (accessed, bind_range) = (accesses.get(operand), self.bind_range(step, slot, buffer));
            let first = bind_range.offset / self.plan.buffers[buffer].dtype.size() as u64;
            let set = accessed.and_then(|t| t.set.as_ref()).map(|set| set.shifted(first));
            Arg { buffer, bind_range, accessed, set, operand, written }
        };
        let mut args: Vec<Arg> = step.reads.iter().enumerate().map(|(i, &b)| arg(false, i, b)).collect();
        args.extend(step.writes.iter().enumerate().map(|(i, &b)| arg(true, i, b)));
        self.slices(step, &args)?;
        let kept = self.kept(step)?;
        for arg in args.iter().filter(|a| !a.written) {
            let found = match (&arg.set, &self.held[arg.buffer]) {
                (None, _) => true,
                (Some(_), None) => false,
                (Some(set), Some(held)) => held.has(set),
            };
            ensure(found, || {
                let lost = "bytes that were not written, or were overwritten by another buffer";
                format!("reads {}: {lost}", self.name(arg.buffer))
            })?;
            if let Some(held) = &mut self.held[arg.buffer] {
                held.use_at(at, &self.clock);
            }
        }
        for arg in args.iter().filter(|a| a.written) {
            self.write(at, arg);
        }
        if let (Some(kept), Some(held)) = (kept, &mut self.held[step.writes[0]]) {
            held.parts = kept;
        }
        Ok(())
    }

    /// The elements that the result of a kernel in place has from its data, at whose bytes it must be. Those that it may write are not
    /// sure to be written.
    fn kept(&self, step: &Step) -> Verdict<Option<Option<Vec<Set>>>> {
        let kernel = &self.plan.kernels[step.kernel];
        if !kernel.is_in_place() {
            return Ok(None);
        }
        let (data, result) = (step.reads[0], step.writes[0]);
        let [from, to] = [data, result].map(|b| &self.plan.buffers[b]);
        let place = |b: &Buffer, slot, buffer| (b.segment, b.offset, b.bytes, self.bind_range(step, slot, buffer));
        let same = place(from, 0, data) == place(to, kernel.reads.len(), result);
        ensure(same && self.elements(data) == self.elements(result), || {
            format!(
                "writes some of {}: expected the place of {}, whose others stay",
                self.name(result),
                self.name(data)
            )
        })?;
        Ok(Some(self.held[data].as_ref().map_or(Some(Vec::new()), |held| held.parts.clone())))
    }

    /// Checks that the slices of two arguments are equal or disjoint, and that no write destroys data that is still read.
    fn slices(&self, step: &Step, args: &[Arg]) -> Verdict {
        let plan = self.plan;
        let slice = |a: &Arg| {
            let Buffer { segment, offset, .. } = plan.buffers[a.buffer];
            (segment, offset + a.bind_range.offset, offset + a.bind_range.offset + a.bind_range.bytes)
        };
        let mut sorted: Vec<&Arg> = args.iter().collect();
        sorted.sort_by_key(|a| slice(a));
        let groups: Vec<&[&Arg]> = sorted.chunk_by(|a, b| slice(a) == slice(b)).collect();
        let most = plan.target.max_bindings;
        let binds = plan.kernels[step.kernel].repeat().is_none();
        ensure(groups.len() as u64 <= u64::from(most) || !binds, || {
            format!("expected at most {most} bindings, found {}", groups.len())
        })?;
        let mut before: Option<&Arg> = None;
        for group in groups {
            let (segment, offset, end) = slice(group[0]);
            if offset == end {
                continue;
            }
            if let Some(before) = before {
                let (other, _, reached) = slice(before);
                ensure(other != segment || reached <= offset, || {
                    format!("{} overlaps {}", self.name(group[0].buffer), self.name(before.buffer))
                })?;
            }
            before = Some(group[0]);
            for (i, w) in group.iter().enumerate().filter(|(_, a)| a.written) {
                for (j, other) in group.iter().enumerate() {
                    if i != j && (!other.written || j > i) {
                        ensure(self.may_share(step, w, other), || {
                            let verb = if other.written { "writes" } else { "reads" };
                            format!(
                                "{verb} {} while it writes {} at the same bytes",
                                self.name(other.buffer),
                                self.name(w.buffer)
                            )
                        })?;
                    }
                }
            }
        }
        Ok(())
    }

    /// True if `w` may be written to the bytes that `other` reads or writes.
    fn may_share(&self, step: &Step, w: &Arg, other: &Arg) -> bool {
        let (Some(to), Some(from)) = (w.accessed, other.accessed) else { return false };
        let kernel = &self.plan.kernels[step.kernel];
        // A kernel in place leaves its data where it is.
        if kernel.is_in_place() && !other.written && other.operand == 0 {
            return true;
        }
        if !other.written && from.at_index {
            let (a, b) = (&kernel.reads[other.operand], &kernel.writes[w.operand]);
            let strides = |(k, &extent): (usize, &usize)| extent == 1 || a.access.strides[k] == b.access.strides[k];
            let same = a.access.offset == b.access.offset
                && a.access.shape == b.access.shape
                && a.access.shape.iter().enumerate().all(strides);
            if same && a.dtype.size() == b.dtype.size() {
                return true;
            }
        }
        w.buffer == other.buffer
            && match (&to.set, &from.set) {
                (Some(a), Some(b)) => a.is_disjoint(b),
                _ => true,
            }
    }

    fn write(&mut self, at: StepIdx, arg: &Arg) {
        let Buffer { segment, offset, bytes, .. } = self.plan.buffers[arg.buffer];
        if self.held[arg.buffer].is_none() {
            let mut span = (at, at);
            let below =
                |holders: &BTreeMap<u64, BufferIdx>| holders.range(..offset + bytes).next_back().map(|(_, &b)| b);
            while let Some(last) = below(&self.holders[segment]) {
                let Buffer { offset: start, bytes: length, .. } = self.plan.buffers[last];
                if start + length <= offset {
                    break;
                }
                match &self.held[last] {
                    // This step reads and overwrites exactly these bytes in place, so they count once.
                    Some(held) if held.last == at && (start, length) == (offset, bytes) => {
                        span = held.span;
                        self.held[last] = None;
                        self.holders[segment].remove(&start);
                    }
                    _ => self.release(last),
                }
            }
            self.held[arg.buffer] = Some(Held { last: at, span, parts: Some(Vec::new()) });
            if bytes > 0 {
                self.holders[segment].insert(offset, arg.buffer);
            }
        }
        let whole = Set::first(self.elements(arg.buffer));
        let Some(held) = &mut self.held[arg.buffer] else { unreachable!("it took its bytes above") };
        held.use_at(at, &self.clock);
        let (Some(parts), Some(set)) = (&mut held.parts, &arg.set) else { return };
        if !parts.contains(set) {
            parts.push(set.clone());
        }
        // Too few elements cannot cover the whole, and counting them is cheaper than covering.
        let written = parts.iter().fold(0u64, |sum, p| sum.saturating_add(p.most_elements()));
        if whole.is_some_and(|whole| written >= whole.most_elements() && whole.is_covered(parts)) {
            held.parts = None;
        }
    }

    /// Notes that a buffer no longer holds its bytes, and adds them to the live bytes of the steps in its span.
    fn release(&mut self, buffer: BufferIdx) {
        let Some(Held { span: (from, to), .. }) = self.held[buffer].take() else { return };
        let Buffer { segment, offset, bytes, .. } = self.plan.buffers[buffer];
        if bytes > 0 {
            self.holders[segment].remove(&offset);
        }
        if self.is_arena(buffer) {
            self.live[from] += self.footprint(buffer);
            self.live[to.index() + 1] -= self.footprint(buffer);
        }
    }

    /// Checks the figures of the summary.
    fn summary(&self) -> Verdict {
        let (plan, found) = (self.plan, &self.plan.program.summary);
        let mut live = 0;
        let bound = self.live.iter().map(|change| {
            live += change;
            live
        });
        let bound = bound.max().unwrap_or(0);
        let arena = BufferIdx::all(&plan.buffers).filter(|&b| self.is_arena(b));
        let unshared: i128 = arena.map(|b| self.aligned(plan.buffers[b].bytes)).sum();
        let class = |class| i128::from(plan.plan.class_bytes(class));
        let buffers = |class| plan.buffers.iter().filter(|b| b.class == class).map(|b| self.aligned(b.bytes)).sum();
        let figures = [
            ("planned_bytes", i128::from(plan.plan.bytes()), found.planned_bytes),
            ("arena_bytes", class(Class::Activation), found.arena_bytes),
            // The last buffer of a segment is not rounded up.
            ("lower_bound", bound.min(class(Class::Activation)), found.lower_bound),
            ("constant_bytes", class(Class::Constant), found.constant_bytes),
            ("state_bytes", class(Class::State), found.state_bytes),
            ("input_bytes", buffers(Class::Input), found.input_bytes),
            ("output_bytes", buffers(Class::Output), found.output_bytes),
            ("staging_bytes", class(Class::Staging), found.staging_bytes),
            ("backend_bytes", class(Class::Backend), found.backend_bytes),
            ("reserve_bytes", class(Class::Reserve), found.reserve_bytes),
            ("unshared_bytes", unshared, found.unshared_bytes),
            ("steps", plan.steps.len() as i128, found.steps as u64),
        ];
        for (name, expected, found) in figures {
            ensure(expected == i128::from(found), || format!("summary: {name}: expected {expected}, found {found}"))?;
        }
        for order in &found.orders {
            let (name, bound, peak) = (&order.name, order.bound, order.peak);
            ensure(bound <= peak, || {
                format!("summary: orders: '{name}' has a bound of {bound}, and a peak of {peak}")
            })?;
        }
        // The plan has the best order that was tried. But with several streams, it may take more.
        let least = found.orders.iter().map(|order| order.peak).min();
        // Other programs, and other bindings of a range, may need a larger arena.
        let is_alone = plan.plan.programs.len() == 1 && plan.dims.is_empty();
        let own = |least| if is_alone { least == found.arena_bytes } else { least <= found.arena_bytes };
        let best = least.is_none_or(|least| own(least) || !self.clock.is_single());
        ensure(best, || format!("summary: orders: the least peak is {least:?}, the arena's is {}", found.arena_bytes))
    }
}
