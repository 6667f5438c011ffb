//! Makes a plan from an arrangement.

use super::arrange::Arrangement;
use super::offsets::Layout;
use crate::error::Result;
use crate::kernel;
use crate::lower::{Draft, DraftBuffer, DraftStep};
use crate::pass::Prepared;
use crate::place::{Item, Problem};
use crate::target::Target;
use crate::{
    Buffer, BufferIdx, Candidate, Class, Compiled, ConstantPort, Plan, Port, Program, Spot, StatePort, Step, Summary,
    VERSION, View,
};

/// The plan of a draft whose buffers lie at the places of an arrangement, a plan of one program, and its data. `whole` has each
/// buffer's number in the arrangement.
///
/// # Errors
/// When the sizes cannot be counted.
pub fn assemble(
    Prepared { graph, indexes, tuned, recompute, .. }: &Prepared,
    target: &Target,
    arrangement: &Arrangement,
    draft: &Draft,
    whole: &[Option<BufferIdx>],
) -> Result<Compiled> {
    let Arrangement { layout, orders, segments, places, .. } = arrangement;
    let used = draft.used();
    let mut numbers = vec![None; draft.buffers.len()];
    let mut buffers = Vec::new();
    for b in BufferIdx::all(&draft.buffers).filter(|&b| used[b]) {
        let place = whole[b].and_then(|b| places[b]);
        let Spot { segment, offset } = place.expect("what a draft uses has its place");
        numbers[b] = Some(BufferIdx::new(buffers.len()));
        let DraftBuffer { name, dtype, shape, bytes, class, .. } = draft.buffers[b].clone();
        buffers.push(Buffer { name, dtype, shape, segment, offset, bytes, class });
    }
    let number = |b: BufferIdx| numbers[b].expect("a draft uses the buffers that it names");
    let port = |name: &str, value, buffer| {
        let fact = graph.fact(value);
        let indexes = indexes.get(&value).cloned().unwrap_or_default();
        let (name, dtype, shape) = (name.to_owned(), fact.dtype, fact.shape.clone());
        let packed = draft.packed.contains(&buffer);
        Port { name, dtype, shape, buffer: number(buffer), packed, indexes, counted: Vec::new(), fewest: None }
    };
    let inputs: Vec<_> = draft.inputs.iter().map(|&(v, b)| port(graph.value_name(v), v, b)).collect();
    let output = |name: &str, v, b| {
        let (counted, fewest) = (graph.counted(name).to_vec(), graph.fewest(name).cloned());
        Port { counted, fewest, ..port(name, v, b) }
    };
    let outputs: Vec<_> = draft.outputs.iter().map(|(name, v, b)| output(name, *v, *b)).collect();
    let states = draft.states.iter().map(|s| StatePort {
        port: port(graph.value_name(s.value), s.value, s.buffer),
        update: s.update.map(number),
        given: s.initial.is_some(),
        count: graph.states().iter().find(|state| state.value == s.value).and_then(|state| state.count),
    });
    let states: Vec<_> = states.collect();
    let kept = || draft.constants.iter().filter(|c| used[c.buffer]);
    let initial = draft.states.iter().filter_map(|s| s.initial.clone());
    let data = kept().map(|c| c.constant.clone()).chain(initial).collect();
    let constants = kept().map(|c| ConstantPort {
        name: c.constant.name.clone(),
        dtype: c.constant.fact.dtype,
        buffer: number(c.buffer),
        packed: c.packed.map(|(kernel, operand)| (kernel.expect("its reader is a kernel"), operand)),
    });
    let constants: Vec<_> = constants.collect();
    let steps = layout.order.iter().enumerate().map(|(at, &s)| {
        let step = &draft.steps[s];
        let renumber = |list: &[BufferIdx]| list.iter().map(|&b| number(b)).collect();
        Step {
            name: step.name.clone(),
            kernel: step.kernel,
            reads: renumber(&step.reads),
            writes: renumber(&step.writes),
            bind_ranges: step.bind_ranges.clone(),
            stream: layout.streams.stream[at],
            waits: layout.streams.waits[at].clone(),
        }
    });
    let program = Program {
        name: graph.name.clone(),
        graph: None,
        dims: Vec::new(),
        measured: draft.measured,
        recompute: *recompute,
        shards: Vec::new(),
        summary: Summary::default(),
        steps: steps.collect(),
        buffers,
        constants,
        state: states,
        inputs,
        outputs,
        kernels: draft.kernels.clone(),
    };
    let tuned = tuned.as_ref().filter(|_| draft.measured > 0);
    let mut plan = Plan {
        version: VERSION,
        target: target.clone(),
        tuned: tuned.map(|tuned| tuned.device.clone()),
        runs: 1,
        origin: None,
        mesh: None,
        stage: 0,
        segments: segments.clone(),
        programs: vec![program],
        choices: arrangement.knobs.clone(),
    };
    let bound = live_bytes(layout, draft, whole, target)?;
    plan.programs[0].summary = summary(plan.first(), bound, orders.clone());
    Ok((plan, vec![data]))
}

/// The figures of a plan whose steps have at most `bound` bytes live at once.
fn summary(view: View, bound: u64, orders: Vec<Candidate>) -> Summary {
    let plan = view.plan;
    let aligned = |b: &Buffer| b.bytes.next_multiple_of(plan.target.alignment);
    Summary {
        planned_bytes: plan.bytes(),
        arena_bytes: plan.class_bytes(Class::Activation),
        lower_bound: bound.min(plan.class_bytes(Class::Activation)),
        constant_bytes: plan.class_bytes(Class::Constant),
        state_bytes: plan.class_bytes(Class::State),
        input_bytes: view.buffer_bytes(Class::Input),
        output_bytes: view.buffer_bytes(Class::Output),
        staging_bytes: plan.class_bytes(Class::Staging),
        backend_bytes: plan.class_bytes(Class::Backend),
        reserve_bytes: plan.class_bytes(Class::Reserve),
        unshared_bytes: view.buffers.iter().filter(|b| b.class.in_arena()).map(aligned).sum(),
        steps: view.steps.len(),
        orders,
    }
}

/// The largest sum of live bytes over the steps of a draft that runs in a layout, which may have been made for larger sizes and for further
/// uses of its buffers.
fn live_bytes(layout: &Layout, draft: &Draft, whole: &[Option<BufferIdx>], target: &Target) -> Result<u64> {
    let mut items = Vec::new();
    // Per range, the buffer that holds it and the last step that used it.
    let mut held: Vec<Option<(BufferIdx, usize, Item)>> = vec![None; layout.live.ranges.len()];
    let align = target.alignment;
    let range = |b: BufferIdx| whole[b].and_then(|b| layout.live.range[b]);
    for b in BufferIdx::all(&draft.buffers).filter(|&b| draft.buffers[b].class == Class::Input) {
        if let Some(range) = range(b) {
            held[range] = Some((b, 0, Item { lower: 0, upper: 1, size: draft.buffers[b].bytes, align }));
        }
    }
    for (at, &s) in layout.order.iter().enumerate() {
        let (from, to) = (layout.streams.earliest(at) as u64, layout.streams.latest(at) as u64 + 1);
        let DraftStep { reads, writes, kernel, .. } = &draft.steps[s];
        for &b in reads.iter().chain(writes) {
            let Some(range) = range(b) else { continue };
            // Of a library call's workspace, only the least that it runs with counts.
            let size = match draft.buffers[b].class {
                Class::Workspace => kernel::schedule::workspace(&draft.kernels[*kernel]),
                _ => draft.buffers[b].bytes,
            };
            let to = if draft.buffers[b].class == Class::Output { layout.order.len() as u64 } else { to };
            let new = Item { lower: from, upper: to, size, align };
            let item = match held[range].take() {
                // The same buffer, or one that takes the bytes of an operand of this step.
                Some((other, last, item)) if other == b || last == at && item.size == size => {
                    Item { lower: item.lower.min(from), upper: item.upper.max(to), ..item }
                }
                other => {
                    items.extend(other.map(|(.., item)| item));
                    new
                }
            };
            held[range] = Some((b, at, item));
        }
    }
    items.extend(held.into_iter().flatten().map(|(.., item)| item));
    Ok(Problem::new(items, target.alignment)?.lower_bound())
}
