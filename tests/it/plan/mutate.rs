//! Corrupts plans in many ways.

use plimsoll::internals::backend::cpu::own_bytes;
use plimsoll::internals::dtype::DType;
use plimsoll::internals::expr::{Body, Code};
use plimsoll::internals::kernel::algorithm::{Cpu, Schedule};
use plimsoll::internals::kernel::{Kernel, Operand, Template, schedule};
use plimsoll::internals::plan::{BufferIdx, Class, KernelIdx, Plan, Segment, SegmentIdx, Step, Summary};
use plimsoll::internals::target::{Family, Memory};

/// The part of a plan's meaning that a mutation may change, if the checker lets it through.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// Only the layout, the order or the descriptions: the results stay the same.
    Layout,
    /// The computation as well: the results are those of the mutant with separate memory for each buffer.
    Meaning,
}

/// A corrupted plan.
pub struct Mutant {
    pub kind: Kind,
    pub what: String,
    pub plan: Plan,
}

/// Numbers from a seed.
pub struct Random(pub u64);

impl Random {
    pub fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((self.0 >> 33) % n.max(1) as u64) as usize
    }

    pub fn pick<'a, T>(&mut self, from: &'a [T]) -> &'a T {
        &from[self.below(from.len())]
    }
}

/// A position that no list has.
const FAR: usize = u32::MAX as usize;

/// Makes the backend's own segments as large as the kernels need.
pub fn backend(plan: &mut Plan) {
    if plan.target.family != Family::Cpu {
        return;
    }
    let own: Vec<_> =
        plan.programs[0].kernels.iter().map(|kernel| own_bytes(kernel, plan.target.threads as usize)).collect();
    let thread = own.iter().map(|own| own.thread).max().unwrap_or(0);
    let tables = own.iter().fold(plan.target.stack_bytes(), |sum, own| sum.saturating_add(own.tables));
    let scratch = thread.saturating_mul(plan.target.threads.into());
    for (memory, needed) in [(Memory::Scratch, scratch), (Memory::Own, tables)] {
        match plan.segments.iter_mut().find(|s| s.memory == memory) {
            Some(segment) => segment.bytes = segment.bytes.max(needed),
            None if needed == 0 => {}
            None => plan.segments.push(Segment { class: Class::Backend, memory, bytes: needed }),
        }
    }
}

/// Makes the figures follow from the rest again, and the segments hold their buffers, so that a mutant is not refused for those alone.
pub fn repair(plan: &mut Plan) {
    // None is refused for its algorithm alone, unless that is what was corrupted.
    let Plan { programs, target, .. } = &mut *plan;
    let kernels = &mut programs[0].kernels;
    for kernel in kernels.iter_mut().filter(|k| k.schedule != Schedule::Open && schedule::check(k, target).is_err()) {
        kernel.schedule = schedule::choose(kernel, target, &|_| false).unwrap_or_default();
    }
    let align = plan.target.alignment.max(1);
    for b in &plan.programs[0].buffers {
        if let (Some(segment), Some(end)) = (plan.segments.get_mut(b.segment.index()), b.offset.checked_add(b.bytes)) {
            segment.bytes = segment.bytes.max(end);
        }
    }
    backend(plan);
    let sum = |class: Option<Class>| {
        let of = plan.segments.iter().filter(|s| class.is_none_or(|c| c == s.class));
        of.fold(0u64, |n, s| n.saturating_add(s.bytes))
    };
    let size = |b: BufferIdx| plan.programs[0].buffers[b].bytes.div_ceil(align).saturating_mul(align);
    let class = |class: Class| {
        let of = BufferIdx::all(&plan.programs[0].buffers).filter(|&b| plan.programs[0].buffers[b].class == class);
        of.fold(0, |n: u64, b| n.saturating_add(size(b)))
    };
    let arena =
        |b: &BufferIdx| plan.programs[0].buffers.get(b.index()).is_some_and(|b| b.class.segment() == Class::Activation);
    let all = BufferIdx::all(&plan.programs[0].buffers);
    // From the first step that writes a buffer to the last that uses it; inputs from the start, outputs to the end.
    let life = |b: BufferIdx| {
        let last = plan.programs[0].steps.iter().rposition(|s| s.writes.contains(&b) || s.reads.contains(&b));
        if plan.programs[0].inputs.iter().any(|port| port.buffer == b) {
            return Some((0, last.unwrap_or(0)));
        }
        let first = plan.programs[0].steps.iter().position(|s| s.writes.contains(&b))?;
        let kept = plan.programs[0].outputs.iter().any(|port| port.buffer == b);
        Some((first, if kept { plan.programs[0].steps.len() - 1 } else { last? }))
    };
    let lives: Vec<_> = all.clone().map(|b| arena(&b).then(|| life(b)).flatten()).collect();
    let place = |b: BufferIdx| {
        (plan.programs[0].buffers[b].segment, plan.programs[0].buffers[b].offset, plan.programs[0].buffers[b].bytes)
    };
    let live = |at: usize| -> u64 {
        let here: Vec<_> = all.clone().filter(|&b| lives[b].is_some_and(|(f, l)| f <= at && at <= l)).collect();
        let heir = |r: BufferIdx| {
            lives[r].is_some_and(|(_, last)| last == at)
                && here.iter().any(|&w| w != r && lives[w].is_some_and(|(f, _)| f == at) && place(w) == place(r))
        };
        here.iter()
            .filter(|&&b| !heir(b) || lives[b].is_some_and(|(f, _)| f == at))
            .fold(0, |n, &b| n.saturating_add(size(b)))
    };
    plan.programs[0].summary = Summary {
        planned_bytes: sum(None),
        arena_bytes: sum(Some(Class::Activation)),
        lower_bound: (0..plan.programs[0].steps.len()).map(live).max().unwrap_or(0).min(sum(Some(Class::Activation))),
        constant_bytes: sum(Some(Class::Constant)),
        state_bytes: sum(Some(Class::State)),
        input_bytes: class(Class::Input),
        output_bytes: class(Class::Output),
        staging_bytes: sum(Some(Class::Staging)),
        backend_bytes: sum(Some(Class::Backend)),
        reserve_bytes: sum(Some(Class::Reserve)),
        unshared_bytes: all.clone().filter(arena).fold(0, |n, b| n.saturating_add(size(b))),
        steps: plan.programs[0].steps.len(),
        orders: Vec::new(),
    };
}

struct Nursery<'a> {
    seed: &'a Plan,
    mutants: Vec<Mutant>,
}

impl Nursery<'_> {
    fn add(&mut self, kind: Kind, what: String, change: impl FnOnce(&mut Plan)) {
        let mut plan = self.seed.clone();
        change(&mut plan);
        if plan == *self.seed {
            return;
        }
        let mut repaired = plan.clone();
        repair(&mut repaired);
        if repaired != plan && repaired != *self.seed {
            self.mutants.push(Mutant { kind, what: format!("{what}, repaired"), plan: repaired });
        }
        self.mutants.push(Mutant { kind, what, plan });
    }
}

/// Every single corruption of a plan.
pub fn mutants(seed: &Plan) -> Vec<Mutant> {
    let mut nursery = Nursery { seed, mutants: Vec::new() };
    buffers(&mut nursery);
    plan_wide(&mut nursery);
    steps(&mut nursery);
    ports(&mut nursery);
    for k in 0..seed.programs[0].kernels.len() {
        kernel(&mut nursery, k);
        // Any legal schedule computes the same.
        for schedule in schedule::candidates(&seed.programs[0].kernels[k], &seed.target, &|_| false) {
            let what = format!("kernel {k}: schedule {schedule}");
            nursery.add(Kind::Layout, what, |p| p.programs[0].kernels[k].schedule = schedule.clone());
        }
    }
    nursery.mutants
}

/// Two corruptions at once: of the plan, and of one of its mutants.
pub fn compound(one: &Mutant, random: &mut Random, count: usize) -> Vec<Mutant> {
    let second = mutants(&one.plan);
    let pick = |_| {
        let two = random.pick(&second);
        Mutant { kind: one.kind.max(two.kind), what: format!("{}; {}", one.what, two.what), plan: two.plan.clone() }
    };
    (0..count).map(pick).collect()
}

fn buffers(nursery: &mut Nursery) {
    let seed = nursery.seed;
    let count = seed.programs[0].buffers.len();
    for b in 0..count {
        let name = &seed.programs[0].buffers[b].name;
        for by in [-512i64, -256, -64, -4, -1, 1, 4, 64, 256, 512, 1024] {
            let change = |n: &mut u64| *n = n.wrapping_add_signed(by);
            nursery
                .add(Kind::Layout, format!("{name}: offset {by:+}"), |p| change(&mut p.programs[0].buffers[b].offset));
            nursery.add(Kind::Layout, format!("{name}: bytes {by:+}"), |p| change(&mut p.programs[0].buffers[b].bytes));
        }
        for bytes in [0, 1, u64::MAX] {
            nursery.add(Kind::Layout, format!("{name}: {bytes} bytes"), |p| p.programs[0].buffers[b].bytes = bytes);
        }
        for offset in [0, u64::MAX, u64::MAX - 255] {
            nursery.add(Kind::Layout, format!("{name}: at {offset}"), |p| p.programs[0].buffers[b].offset = offset);
        }
        for segment in (0..seed.segments.len() + 1).chain([FAR]).map(SegmentIdx::new) {
            nursery.add(Kind::Layout, format!("{name}: in segment {segment}"), |p| {
                p.programs[0].buffers[b].segment = segment
            });
            nursery.add(Kind::Layout, format!("{name}: in segment {segment} and of its class"), |p| {
                p.programs[0].buffers[b].segment = segment;
                p.programs[0].buffers[b].class = p.segments.get(segment.index()).map_or(Class::Workspace, |s| s.class);
            });
        }
        for class in Class::ALL {
            nursery.add(Kind::Layout, format!("{name}: class {}", class.name()), |p| {
                p.programs[0].buffers[b].class = class
            });
        }
        for dtype in DType::ALL {
            nursery.add(Kind::Layout, format!("{name}: {dtype}"), |p| p.programs[0].buffers[b].dtype = dtype);
        }
        for axis in 0..seed.programs[0].buffers[b].shape.len() {
            for extent in [0, 1, 2, 7, 1 << 40, usize::MAX] {
                nursery.add(Kind::Layout, format!("{name}: extent {axis} is {extent}"), |p| {
                    p.programs[0].buffers[b].shape[axis] = extent;
                });
            }
        }
        nursery.add(Kind::Layout, format!("{name}: flat"), |p| {
            let n = p.programs[0].buffers[b].shape.checked_len().unwrap_or(usize::MAX);
            p.programs[0].buffers[b].shape = [n].into();
        });
        for other in 0..count {
            nursery.add(Kind::Layout, format!("{name}: on buffer {other}"), |p| {
                (p.programs[0].buffers[b].segment, p.programs[0].buffers[b].offset) =
                    (p.programs[0].buffers[other].segment, p.programs[0].buffers[other].offset);
            });
            nursery.add(Kind::Layout, format!("{name}: places swapped with buffer {other}"), |p| {
                let (x, y) = (
                    (p.programs[0].buffers[b].segment, p.programs[0].buffers[b].offset),
                    (p.programs[0].buffers[other].segment, p.programs[0].buffers[other].offset),
                );
                (p.programs[0].buffers[b].segment, p.programs[0].buffers[b].offset) = y;
                (p.programs[0].buffers[other].segment, p.programs[0].buffers[other].offset) = x;
            });
        }
    }
    nursery.add(Kind::Layout, "no buffers".into(), |p| p.programs[0].buffers.clear());
}

fn plan_wide(nursery: &mut Nursery) {
    let seed = nursery.seed;
    nursery.add(Kind::Layout, "version".into(), |p| p.version += 1);
    for s in 0..seed.segments.len() {
        for by in [-4096i64, -256, -1, 1, 256, 4096] {
            nursery.add(Kind::Layout, format!("segment {s}: {by:+}"), |p| {
                p.segments[s].bytes = p.segments[s].bytes.wrapping_add_signed(by);
            });
        }
        for class in Class::ALL {
            nursery.add(Kind::Layout, format!("segment {s}: class {}", class.name()), |p| p.segments[s].class = class);
        }
        for memory in [Memory::Device, Memory::Upload, Memory::Download] {
            nursery.add(Kind::Layout, format!("segment {s}: in {memory:?}"), |p| p.segments[s].memory = memory);
        }
        nursery.add(Kind::Layout, format!("segment {s}: gone"), |p| {
            p.segments.remove(s);
        });
        nursery.add(Kind::Layout, format!("segment {s}: endless"), |p| p.segments[s].bytes = u64::MAX);
        nursery.add(Kind::Layout, format!("segment {s}: swapped"), |p| p.segments.rotate_left(s));
    }
    nursery.add(Kind::Layout, "a segment more".into(), |p| {
        p.segments.push(Segment { class: Class::Activation, memory: Memory::Device, bytes: 256 })
    });
    for alignment in [0, 1, 3, 64, 4096, 1 << 63] {
        nursery.add(Kind::Layout, format!("alignment {alignment}"), |p| p.target.alignment = alignment);
    }
    for limit in [0, 1, 255] {
        nursery.add(Kind::Layout, format!("segments of {limit}"), |p| p.target.max_segment = limit);
        nursery.add(Kind::Layout, format!("bindings of {limit}"), |p| p.target.max_binding = limit);
        nursery.add(Kind::Layout, format!("{limit} bindings"), |p| p.target.max_bindings = limit as u32);
        nursery.add(Kind::Layout, format!("{limit} bytes of staging"), |p| p.target.staging = limit);
        nursery.add(Kind::Layout, format!("{limit} threads"), |p| p.target.threads = limit as u32);
    }
    let figures: [fn(&mut Summary) -> &mut u64; 9] = [
        |s| &mut s.planned_bytes,
        |s| &mut s.arena_bytes,
        |s| &mut s.lower_bound,
        |s| &mut s.constant_bytes,
        |s| &mut s.state_bytes,
        |s| &mut s.input_bytes,
        |s| &mut s.output_bytes,
        |s| &mut s.staging_bytes,
        |s| &mut s.unshared_bytes,
    ];
    for (i, figure) in figures.into_iter().enumerate() {
        for by in [-256i64, -1, 1, 256] {
            nursery.add(Kind::Layout, format!("figure {i}: {by:+}"), |p| {
                let n = figure(&mut p.programs[0].summary);
                *n = n.wrapping_add_signed(by);
            });
        }
    }
    nursery.add(Kind::Layout, "figure steps".into(), |p| p.programs[0].summary.steps += 1);
}

fn steps(nursery: &mut Nursery) {
    let seed = nursery.seed;
    // An accepted order computes the same, unless a step changes a buffer that it reads: twice is another result then.
    let changes = |step: &Step| step.reads.iter().any(|b| step.writes.contains(b));
    let order = if seed.programs[0].steps.iter().any(changes) { Kind::Meaning } else { Kind::Layout };
    for s in 0..seed.programs[0].steps.len() {
        for other in 0..s {
            nursery.add(order, format!("steps {other} and {s} swapped"), |p| p.programs[0].steps.swap(other, s));
            nursery
                .add(order, format!("step {s} moved to {other}"), |p| p.programs[0].steps[other..=s].rotate_right(1));
            nursery.add(order, format!("step {other} moved to {s}"), |p| p.programs[0].steps[other..=s].rotate_left(1));
        }
        for w in 0..seed.programs[0].steps[s].bind_ranges.len() {
            for by in [-256i64, -64, -4, 4, 64, 256] {
                let change = |n: &mut u64| *n = n.wrapping_add_signed(by);
                nursery.add(Kind::Meaning, format!("step {s}: bind range {w} at {by:+}"), |p| {
                    change(&mut p.programs[0].steps[s].bind_ranges[w].offset)
                });
                nursery.add(Kind::Layout, format!("step {s}: bind range {w} of {by:+}"), |p| {
                    change(&mut p.programs[0].steps[s].bind_ranges[w].bytes)
                });
            }
            for extreme in [0, u64::MAX] {
                nursery.add(Kind::Layout, format!("step {s}: bind range {w} of {extreme}"), |p| {
                    p.programs[0].steps[s].bind_ranges[w].bytes = extreme
                });
                nursery.add(Kind::Meaning, format!("step {s}: bind range {w} at {extreme}"), |p| {
                    p.programs[0].steps[s].bind_ranges[w].offset = extreme
                });
            }
        }
        nursery.add(Kind::Meaning, format!("step {s}: no bind ranges"), |p| p.programs[0].steps[s].bind_ranges.clear());
        nursery.add(Kind::Meaning, format!("step {s}: a bind range less"), |p| {
            p.programs[0].steps[s].bind_ranges.pop();
        });
        nursery.add(Kind::Meaning, format!("step {s}: gone"), |p| drop(p.programs[0].steps.remove(s)));
        nursery.add(order, format!("step {s}: again at once"), |p| {
            let own = p.programs[0].steps[s].clone();
            p.programs[0].steps.insert(s, own);
        });
        nursery.add(order, format!("step {s}: again at the end"), |p| {
            let own = p.programs[0].steps[s].clone();
            p.programs[0].steps.push(own);
        });
        for kernel in (0..seed.programs[0].kernels.len() + 1).chain([FAR]).map(KernelIdx::new) {
            nursery
                .add(Kind::Meaning, format!("step {s}: kernel {kernel}"), |p| p.programs[0].steps[s].kernel = kernel);
        }
        for writes in [false, true] {
            let verb = if writes { "writes" } else { "reads" };
            let count =
                if writes { seed.programs[0].steps[s].writes.len() } else { seed.programs[0].steps[s].reads.len() };
            fn list(p: &mut Plan, s: usize, writes: bool) -> &mut Vec<BufferIdx> {
                if writes { &mut p.programs[0].steps[s].writes } else { &mut p.programs[0].steps[s].reads }
            }
            for i in 0..count {
                for b in (0..seed.programs[0].buffers.len() + 1).chain([FAR]).map(BufferIdx::new) {
                    nursery.add(Kind::Meaning, format!("step {s}: {verb} {b} as {i}"), |p| list(p, s, writes)[i] = b);
                }
                nursery.add(Kind::Meaning, format!("step {s}: {verb} no {i}"), |p| {
                    list(p, s, writes).remove(i);
                });
                nursery.add(Kind::Meaning, format!("step {s}: {verb} {i} twice"), |p| {
                    let b = list(p, s, writes)[i];
                    list(p, s, writes).push(b);
                });
                nursery.add(Kind::Meaning, format!("step {s}: {verb} rotated by {i}"), |p| {
                    list(p, s, writes).rotate_left(i)
                });
            }
            nursery.add(Kind::Meaning, format!("step {s}: {verb} nothing"), |p| list(p, s, writes).clear());
        }
    }
    nursery.add(Kind::Meaning, "no steps".into(), |p| p.programs[0].steps.clear());
}

fn ports(nursery: &mut Nursery) {
    let seed = nursery.seed;
    for b in (0..seed.programs[0].buffers.len() + 1).chain([FAR]).map(BufferIdx::new) {
        for i in 0..seed.programs[0].constants.len() {
            nursery.add(Kind::Meaning, format!("constant {i} in {b}"), |p| p.programs[0].constants[i].buffer = b);
        }
        for i in 0..seed.programs[0].inputs.len() {
            nursery.add(Kind::Meaning, format!("input {i} in {b}"), |p| p.programs[0].inputs[i].buffer = b);
        }
        for i in 0..seed.programs[0].outputs.len() {
            nursery.add(Kind::Meaning, format!("output {i} in {b}"), |p| p.programs[0].outputs[i].buffer = b);
        }
        for i in 0..seed.programs[0].state.len() {
            nursery.add(Kind::Meaning, format!("state {i} in {b}"), |p| p.programs[0].state[i].port.buffer = b);
            nursery.add(Kind::Meaning, format!("update {i} in {b}"), |p| p.programs[0].state[i].update = Some(b));
        }
    }
    for i in 0..seed.programs[0].constants.len() {
        nursery.add(Kind::Meaning, format!("constant {i} twice"), |p| {
            let own = p.programs[0].constants[i].clone();
            p.programs[0].constants.push(own);
        });
        nursery.add(Kind::Meaning, format!("constant {i} gone"), |p| drop(p.programs[0].constants.remove(i)));
        nursery.add(Kind::Meaning, format!("constant {i} i64"), |p| p.programs[0].constants[i].dtype = DType::I64);
        for packed in [(0, 0), (0, 1), (1, 1), (FAR, 0), (0, usize::MAX)] {
            nursery.add(Kind::Meaning, format!("constant {i} packed {packed:?}"), |p| {
                p.programs[0].constants[i].packed = Some((KernelIdx::new(packed.0), packed.1))
            });
        }
    }
    for i in 0..seed.programs[0].inputs.len() {
        nursery.add(Kind::Meaning, format!("input {i} twice"), |p| {
            let own = p.programs[0].inputs[i].clone();
            p.programs[0].inputs.push(own);
        });
        nursery.add(Kind::Meaning, format!("input {i} gone"), |p| drop(p.programs[0].inputs.remove(i)));
        nursery.add(Kind::Layout, format!("input {i} f64"), |p| p.programs[0].inputs[i].dtype = DType::F64);
        nursery.add(Kind::Layout, format!("input {i} longer"), |p| p.programs[0].inputs[i].shape.push(2));
    }
    for i in 0..seed.programs[0].state.len() {
        nursery.add(Kind::Meaning, format!("state {i} without update"), |p| p.programs[0].state[i].update = None);
        nursery.add(Kind::Meaning, format!("state {i} gone"), |p| drop(p.programs[0].state.remove(i)));
        nursery.add(Kind::Layout, format!("state {i} longer"), |p| p.programs[0].state[i].port.shape.push(2));
    }
    for i in 0..seed.programs[0].outputs.len() {
        nursery.add(Kind::Layout, format!("output {i} f64"), |p| p.programs[0].outputs[i].dtype = DType::F64);
        nursery.add(Kind::Layout, format!("output {i} longer"), |p| p.programs[0].outputs[i].shape.push(usize::MAX));
        nursery.add(Kind::Meaning, format!("output {i} twice"), |p| {
            let own = p.programs[0].outputs[i].clone();
            p.programs[0].outputs.push(own);
        });
    }
}

fn kernel(nursery: &mut Nursery, k: usize) {
    let seed = nursery.seed;
    let kernel = &seed.programs[0].kernels[k];
    let mut add = |what: String, change: &dyn Fn(&mut Kernel)| {
        nursery.add(Kind::Meaning, format!("kernel {k}: {what}"), |p| change(&mut p.programs[0].kernels[k]));
    };
    const STRIDES: [isize; 9] = [0, 1, 2, 3, 16, -1, -16, isize::MAX, isize::MIN];
    const EXTENTS: [usize; 6] = [0, 1, 2, 9, 1 << 40, usize::MAX];
    for writes in [false, true] {
        fn list(k: &mut Kernel, writes: bool) -> &mut Vec<Operand> {
            if writes { &mut k.writes } else { &mut k.reads }
        }
        let verb = if writes { "writes" } else { "reads" };
        let operands = if writes { &kernel.writes } else { &kernel.reads };
        for (i, operand) in operands.iter().enumerate() {
            let name = format!("{verb} {i}");
            for by in [-16isize, -4, -1, 1, 2, 16, isize::MAX, isize::MIN] {
                add(format!("{name}: offset {by:+}"), &|k| {
                    let offset = &mut list(k, writes)[i].access.offset;
                    *offset = offset.wrapping_add(by);
                });
            }
            for axis in 0..operand.access.shape.len().min(operand.access.strides.len()) {
                for stride in STRIDES {
                    add(format!("{name}: stride {axis} is {stride}"), &|k| {
                        list(k, writes)[i].access.strides[axis] = stride
                    });
                }
                for extent in EXTENTS {
                    add(format!("{name}: extent {axis} is {extent}"), &|k| {
                        list(k, writes)[i].access.shape[axis] = extent
                    });
                }
                add(format!("{name}: strides rotated by {axis}"), &|k| {
                    list(k, writes)[i].access.strides.rotate_left(axis)
                });
                add(format!("{name}: axis {axis} reversed"), &|k| {
                    let access = &mut list(k, writes)[i].access;
                    let reach = (access.shape[axis] as isize).wrapping_sub(1).wrapping_mul(access.strides[axis]);
                    access.offset = access.offset.wrapping_add(reach);
                    access.strides[axis] = access.strides[axis].wrapping_neg();
                });
            }
            for dtype in [DType::F32, DType::I64, DType::I32, DType::Bool, DType::F64, DType::F16] {
                add(format!("{name}: {dtype}"), &|k| list(k, writes)[i].dtype = dtype);
            }
            add(format!("{name}: a stride less"), &|k| {
                list(k, writes)[i].access.strides.pop();
            });
            add(format!("{name}: an axis less"), &|k| {
                list(k, writes)[i].access.strides.pop();
                list(k, writes)[i].access.shape.pop();
            });
            add(format!("{name}: packed"), &|k| list(k, writes)[i].packed ^= true);
            add(format!("{name}: gone"), &|k| drop(list(k, writes).remove(i)));
            for (j, other) in operands.iter().enumerate() {
                add(format!("{name}: like {j}"), &|k| list(k, writes)[i].access = other.access.clone());
            }
        }
        add(format!("{verb} swapped"), &|k| list(k, writes).reverse());
    }
    for axis in 0..kernel.shape.len() {
        for extent in EXTENTS {
            add(format!("extent {axis} is {extent}"), &|k| k.shape[axis] = extent);
            // The operands agree: the whole index space changes.
            add(format!("extent {axis} is {extent} everywhere"), &|k| {
                k.shape[axis] = extent;
                for operand in k.reads.iter_mut().chain(&mut k.writes) {
                    if let Some(d) = operand.access.shape.get_mut(axis) {
                        *d = extent;
                    }
                }
            });
        }
    }
    for workspace in [0, 1, 256, 512, 4096, u64::MAX] {
        add(format!("a workspace of {workspace}"), &|k| k.workspace = workspace);
    }
    add("no schedule".into(), &|k| k.schedule = Schedule::Open);
    for threads in [0, 2, u32::MAX] {
        let mut own = kernel.schedule.clone();
        if let Schedule::Cpu(
            Cpu::Matmul { threads: t }
            | Cpu::Conv { threads: t, .. }
            | Cpu::Window { threads: t }
            | Cpu::Attention { threads: t, .. },
        ) = &mut own
        {
            *t = threads;
            add(format!("{threads} threads"), &|k| k.schedule = own.clone());
        }
    }
    template(kernel, &mut add);
    body(&kernel.body, "body", &mut add, &|k| &mut k.body);
    for (i, prologue) in kernel.prologues.iter().enumerate() {
        body(&prologue.body, &format!("prologue {i}"), &mut add, &|k| match k.prologues.get_mut(i) {
            Some(prologue) => &mut prologue.body,
            None => &mut k.body,
        });
        for n in [0, 1, 2, 3, usize::MAX] {
            add(format!("prologue {i}: of operand {n}"), &|k| k.prologues[i].operand = n);
            add(format!("prologue {i}: {n} operands"), &|k| k.prologues[i].reads = n);
        }
        add(format!("prologue {i}: gone"), &|k| drop(k.prologues.remove(i)));
        add(format!("prologue {i}: twice"), &|k| k.prologues.push(k.prologues[i].clone()));
    }
    if let Template::Row { reductions, .. } = &kernel.template {
        for (i, reduction) in reductions.iter().enumerate() {
            body(&reduction.body, &format!("reduction {i}"), &mut add, &|k| match &mut k.template {
                Template::Row { reductions, .. } if i < reductions.len() => &mut reductions[i].body,
                _ => &mut k.body,
            });
        }
    }
}

fn template(kernel: &Kernel, add: &mut dyn FnMut(String, &dyn Fn(&mut Kernel))) {
    let row = |inner: usize, per_row: bool| Template::Row { inner, reductions: Vec::new(), per_row };
    for other in [Template::Map, Template::MatMul, row(0, false), row(1, false), row(1, true), row(9, false)] {
        add(format!("template {other:?}"), &|k| k.template = other.clone());
    }
    match &kernel.template {
        Template::Row { .. } => {
            for by in [0usize, 1, 2, 3, 9, usize::MAX] {
                add(format!("rows of {by} axes"), &|k| {
                    let Template::Row { inner, .. } = &mut k.template else { return };
                    *inner = by;
                });
            }
            add("per row or not".into(), &|k| {
                let Template::Row { per_row, .. } = &mut k.template else { return };
                *per_row ^= true;
            });
            add("no reductions".into(), &|k| {
                let Template::Row { reductions, .. } = &mut k.template else { return };
                reductions.clear();
            });
            add("reductions reversed".into(), &|k| {
                let Template::Row { reductions, .. } = &mut k.template else { return };
                reductions.reverse();
            });
        }
        Template::Gather { strides, .. } => {
            for j in 0..strides.len() {
                for stride in [0, 1, -1, 3, 64, isize::MAX, isize::MIN] {
                    add(format!("indexed stride {j} is {stride}"), &|k| {
                        let Template::Gather { strides, .. } = &mut k.template else { return };
                        strides[j] = stride;
                    });
                }
                for extent in [0, 1, 2, 3, 5, 1 << 40, usize::MAX] {
                    add(format!("indexed extent {j} is {extent}"), &|k| {
                        let Template::Gather { extents, .. } = &mut k.template else { return };
                        extents[j] = extent;
                    });
                }
            }
            add("an index less".into(), &|k| {
                let Template::Gather { strides, .. } = &mut k.template else { return };
                strides.pop();
            });
            add("an extent less".into(), &|k| {
                let Template::Gather { extents, .. } = &mut k.template else { return };
                extents.pop();
            });
        }
        Template::Scatter { .. } => {
            for by in [-16isize, -3, -1, 1, 3, 16] {
                add(format!("indexed stride {by:+}"), &|k| {
                    let Template::Scatter { stride, .. } = &mut k.template else { return };
                    *stride += by;
                });
                add(format!("indexed extent {by:+}"), &|k| {
                    let Template::Scatter { extent, .. } = &mut k.template else { return };
                    *extent = extent.wrapping_add_signed(by);
                });
            }
            for other in [0, 1, 2, 3, usize::MAX] {
                add(format!("updates along {other}"), &|k| {
                    let Template::Scatter { axis, .. } = &mut k.template else { return };
                    *axis = other;
                });
            }
        }
        Template::Conv { .. } | Template::Pool { .. } => {
            for value in [0, 1, 2, 3, 5, 1 << 40, usize::MAX] {
                for field in 0..13 {
                    add(format!("window field {field} is {value}"), &|k| {
                        let (groups, window) = match &mut k.template {
                            Template::Conv { groups, window, .. } => (Some(groups), window),
                            Template::Pool { window, .. } => (None, window),
                            _ => return,
                        };
                        match (field / 3, groups) {
                            (0, _) => window.kernel[field % 3] = value,
                            (1, _) => window.strides[field % 3] = value,
                            (2, _) => window.dilations[field % 3] = value,
                            (3, _) => window.pads[field % 3] = value,
                            (_, Some(groups)) => *groups = value,
                            _ => {}
                        }
                    });
                }
            }
        }
        Template::Pad { before, .. } => {
            for axis in 0..before.len() {
                for value in [isize::MIN, -1, 0, 1, isize::MAX] {
                    add(format!("padding {axis} is {value}"), &|k| {
                        let Template::Pad { before, .. } = &mut k.template else { return };
                        before[axis] = value;
                    });
                }
            }
        }
        _ => {}
    }
}

fn body(
    seed: &Body,
    name: &str,
    add: &mut dyn FnMut(String, &dyn Fn(&mut Kernel)),
    at: &dyn Fn(&mut Kernel) -> &mut Body,
) {
    for (i, instr) in seed.code.iter().enumerate() {
        for n in [0, 1, 2, 3, 7, u32::MAX] {
            for code in [Code::Input(n), Code::Index(n), Code::Reduction(n), Code::Cast(n)] {
                add(format!("{name}: instruction {i} is {code:?}"), &|k| {
                    if let Some(instr) = at(k).code.get_mut(i) {
                        instr.code = code;
                    }
                });
            }
            add(format!("{name}: instruction {i} uses {n}"), &|k| {
                let Some(instr) = at(k).code.get_mut(i) else { return };
                match &mut instr.code {
                    Code::Unary(_, a) | Code::Cast(a) | Code::Bits(a) => *a = n,
                    Code::Input(a) | Code::Index(a) | Code::Reduction(a) => *a = n,
                    Code::Binary(_, _, b) | Code::Select(_, _, b) => *b = n,
                    Code::Const(_) => {}
                }
            });
        }
        for dtype in [DType::F32, DType::I64, DType::Bool] {
            add(format!("{name}: instruction {i} ({:?}) gives {dtype}", instr.code), &|k| {
                if let Some(instr) = at(k).code.get_mut(i) {
                    instr.dtype = dtype;
                }
            });
        }
        add(format!("{name}: instruction {i} gone"), &|k| {
            if i < at(k).code.len() {
                at(k).code.remove(i);
            }
        });
    }
    for (i, _) in seed.results.iter().enumerate() {
        for n in [0, 1, 2, u32::MAX] {
            add(format!("{name}: result {i} is {n}"), &|k| {
                if let Some(result) = at(k).results.get_mut(i) {
                    *result = n;
                }
            });
        }
    }
    add(format!("{name}: no results"), &|k| at(k).results.clear());
    add(format!("{name}: results twice"), &|k| {
        let more = at(k).results.clone();
        at(k).results.extend(more);
    });
    add(format!("{name}: empty"), &|k| *at(k) = Body::default());
}
