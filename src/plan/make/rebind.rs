//! The data of a plan that was read from a file: lowering is done again, and what it makes is held against the plan.
//!
//! Where buffers lie, in which order steps run and by which algorithms is the plan's own. All else is the graph's: a plan that computes
//! something else than the graph is refused.

use super::arrange::{draft, drafts};
use crate::constant::Constant;
use crate::error::{Error, Result, ensure};
use crate::kernel::algorithm::Schedule;
use crate::kernel::call::Call;
use crate::kernel::tuned::Tuned;
use crate::kernel::{Kernel, cpu, schedule};
use crate::lower::Draft;
use crate::pass::Prepared;
use crate::{BindRange, BufferIdx, Class, View};
use std::collections::HashMap;
use std::sync::Arc;

/// The data of a plan's constants and states, as [`Compiled`](crate::Compiled) has it, from the graph that the plan was made of.
///
/// # Errors
/// When the plan is not one of this graph: the first buffer, step or port that differs.
pub fn data(mut graph: Prepared, plan: View) -> Result<Vec<Arc<Constant>>> {
    let mut lower = |table: Tuned| {
        let table = Arc::new(table);
        graph.tuned = Some(Arc::clone(&table));
        Ok::<_, Error>((drafts(|options| draft(&graph, plan.target, options))?, table))
    };
    let (mut lowered, table) = lower(schedules(plan))?;
    if let Some(table) = with_calls(plan, &table) {
        lowered = lower(table)?.0;
    }
    let found: Vec<_> = lowered.iter().map(|draft| Rebound { graph: &graph, plan, draft }.data()).collect();
    let refused = found.iter().find_map(|found| found.as_ref().err().cloned()).unwrap_or_default();
    let data = found.into_iter().find_map(Result::ok);
    data.ok_or_else(|| Error::plan(format!("it is no plan of '{}': {refused}", graph.graph.name)))
}

/// The schedules of a plan's kernels. Lowering takes them for its own, as it takes measured ones: how a kernel is cut depends on them.
fn schedules(plan: View) -> Tuned {
    let mut tuned = Tuned::new(plan.name.clone());
    for step in &plan.steps {
        let of = &plan.kernels[step.kernel];
        let mut kernel = asked(of);
        // Lowering asks with the constants packed that may be.
        for operand in 0..kernel.template.core_reads().min(step.reads.len()) {
            kernel.reads[operand].packed = plan.target.packs_constants()
                && plan.buffers[step.reads[operand]].class == Class::Constant
                && kernel.prologue(operand).is_none()
                && cpu::has_packed_forms(&kernel.template, operand);
        }
        tuned.insert(&kernel, of.schedule.clone());
    }
    tuned
}

/// The table with the library calls of a plan, too, for the kernels that lowering asked for: a call may be a part of one. `None` if none is.
fn with_calls(plan: View, table: &Tuned) -> Option<Tuned> {
    let mut more = schedules(plan);
    let calls: Vec<&Call> = plan.kernels.iter().filter_map(|kernel| kernel.schedule.call()).collect();
    let mut is_other = false;
    for (kernel, _) in table.kernels() {
        let split = schedule::split(&kernel, plan.target);
        let call = split.and_then(|split| calls.iter().find(|call| split.allows(call)));
        if let Some(&call) = call.filter(|_| table.find(&kernel).is_none()) {
            more.insert(&kernel, Schedule::Library(call.clone()));
            is_other = true;
        }
    }
    is_other.then_some(more)
}

/// A kernel before its schedule is chosen.
fn asked(kernel: &Kernel) -> Kernel {
    Kernel { workspace: 0, schedule: Schedule::Open, ..kernel.clone() }
}

/// A kernel's meaning as a text: without its algorithm, and the layouts that this one wants.
fn meaning(kernel: &Kernel) -> String {
    let mut kernel = asked(kernel);
    kernel.reads.iter_mut().for_each(|operand| operand.packed = false);
    kernel.key()
}

/// A step, which computes a kernel of this meaning: the same steps may run in any order.
type Computed<'a> = (&'a str, &'a str, Vec<BufferIdx>, Vec<BufferIdx>, &'a [BindRange]);

/// A plan beside the lowering of a graph.
struct Rebound<'a> {
    graph: &'a Prepared,
    plan: View<'a>,
    draft: &'a Draft,
}

impl Rebound<'_> {
    fn data(&self) -> Result<Vec<Arc<Constant>>, String> {
        let Rebound { plan, draft, .. } = self;
        let used = draft.used();
        let kept: Vec<BufferIdx> = BufferIdx::all(&draft.buffers).filter(|&b| used[b]).collect();
        self.buffers(&kept)?;
        // A plan has the buffers of its draft in their order.
        let mut numbers = vec![BufferIdx::default(); draft.buffers.len()];
        kept.iter().enumerate().for_each(|(number, &b)| numbers[b] = BufferIdx::new(number));
        self.steps(&numbers)?;
        self.ports(&numbers)?;
        let constant = |number: BufferIdx| {
            draft.constants.iter().find(|c| used[c.buffer] && numbers[c.buffer] == number).map(|c| c.constant.clone())
        };
        let constants = plan.constants.iter().map(|port| {
            constant(port.buffer).ok_or_else(|| format!("constant '{}': the graph has no such constant", port.name))
        });
        let initial = draft.states.iter().filter_map(|state| state.initial.clone()).map(Ok);
        constants.chain(initial).collect()
    }

    fn buffers(&self, kept: &[BufferIdx]) -> Result<(), String> {
        let (planned, found) = (self.plan.buffers.len(), kept.len());
        for (own, &b) in self.plan.buffers.iter().zip(kept) {
            let of = &self.draft.buffers[b];
            // The bytes of a workspace are the plan's choice.
            let is_same = (&own.name, own.dtype, own.class) == (&of.name, of.dtype, of.class)
                && (own.class == Class::Workspace || own.shape == of.shape);
            ensure(is_same, || {
                let (expected, found) = (format!("{}{}", of.dtype, of.shape), format!("{}{}", own.dtype, own.shape));
                format!("expected buffer '{}' ({expected}), found '{}' ({found})", of.name, own.name)
            })?;
        }
        ensure(planned == found, || format!("expected {found} buffers, found {planned}"))
    }

    fn steps(&self, numbers: &[BufferIdx]) -> Result<(), String> {
        let Rebound { plan, draft, .. } = self;
        let [meanings, planned] =
            [&draft.kernels, &plan.kernels].map(|all| all.iter().map(meaning).collect::<Vec<_>>());
        let number = |list: &[BufferIdx]| list.iter().map(|&b| numbers[b]).collect::<Vec<_>>();
        let mut left: HashMap<Computed, usize> = HashMap::new();
        for step in &draft.steps {
            let kernel = &meanings[step.kernel.index()];
            let step: Computed = (&step.name, kernel, number(&step.reads), number(&step.writes), &step.bind_ranges);
            *left.entry(step).or_default() += 1;
        }
        for (at, step) in plan.steps.iter().enumerate() {
            let kernel = &planned[step.kernel.index()];
            let computed: Computed = (&step.name, kernel, step.reads.clone(), step.writes.clone(), &step.bind_ranges);
            let found = left.get_mut(&computed).filter(|count| **count > 0);
            *found.ok_or_else(|| format!("step {at} '{}': the graph has no such step", step.name))? -= 1;
        }
        let missing = left.iter().filter(|(_, count)| **count > 0).map(|((name, ..), _)| *name).min();
        missing.map_or(Ok(()), |name| Err(format!("it lacks step '{name}'")))
    }

    fn ports(&self, numbers: &[BufferIdx]) -> Result<(), String> {
        let Rebound { graph, plan, draft } = self;
        let name = |value| graph.graph.value_name(value);
        let inputs = draft.inputs.iter().map(|&(value, b)| (name(value), numbers[b])).collect::<Vec<_>>();
        let outputs = draft.outputs.iter().map(|(name, _, b)| (&name[..], numbers[*b])).collect::<Vec<_>>();
        for (kind, expected, ports) in [("inputs", inputs, &plan.inputs), ("outputs", outputs, &plan.outputs)] {
            let found: Vec<_> = ports.iter().map(|port| (&port.name[..], port.buffer)).collect();
            ensure(expected == found, || {
                let names =
                    |list: &[(&str, BufferIdx)]| list.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ");
                format!("expected {kind} {}, found {}", names(&expected), names(&found))
            })?;
        }
        let states = draft.states.iter();
        let states =
            states.map(|s| (name(s.value), numbers[s.buffer], s.update.map(|b| numbers[b]), s.initial.is_some()));
        let found = plan.state.iter().map(|s| (&s.port.name[..], s.port.buffer, s.update, s.given));
        ensure(states.eq(found), || "its states, or which of them begin with given elements, are others".to_owned())
    }
}
