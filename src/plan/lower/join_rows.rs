//! On GPUs, reductions of the same rows become one kernel if one reads all that the other reads: a batch normalization's gradient needs the
//! sums of `dy` and of `dy * x`. Each element is then read once, and one step is launched.
//!
//! ```text
//! sum (dy)  ---> waits
//!                             sum (dy), sum (dy * x)  ---> waits
//! sum (dy * x)
//! ```

use super::state::reached;
use super::{Dag, DraftStep, Lowering};
use crate::error::Result;
use crate::expr::{Body, Code, Instr};
use crate::kernel::algorithm::Schedule;
use crate::kernel::{Kernel, RowReduction, Template};
use crate::{BufferIdx, StepIdx};

/// The most reductions of a joined kernel. Each holds a sum in registers.
const MOST_REDUCTIONS: usize = 8;

/// A kernel that computes what two steps did.
struct Joined {
    kernel: Kernel,
    /// The step that reads all.
    all: StepIdx,
    /// The step that reads some of it.
    some: StepIdx,
    /// The steps between the two that do not depend on the first, and come before.
    ahead: Vec<StepIdx>,
    /// Those that depend on the first, and come behind.
    waiting: Vec<StepIdx>,
}

impl Lowering<'_> {
    /// Makes one kernel of such reductions.
    pub(super) fn join_rows(&mut self) -> Result<()> {
        if !self.target.launches_cost() {
            return Ok(());
        }
        let before = self.draft.steps.len();
        let mut next = 0;
        while next < self.draft.steps.len() {
            let second = StepIdx::new(next);
            let firsts = (0..next).rev().map(StepIdx::new).filter(|&first| self.may_join(first, second));
            let site = next as u32;
            let found = firsts.into_iter().find_map(|first| {
                let joined = self.joined_rows(first, second);
                Some((first, self.decisions.if_found("join", site, joined)?))
            });
            let Some((first, joined)) = found else {
                next += 1;
                continue;
            };
            // The joined step may take in more, and so may those that waited.
            next -= 1 + joined.waiting.len();
            self.replace_rows(first, second, joined)?;
        }
        if self.draft.steps.len() < before {
            self.forget_kernels();
        }
        Ok(())
    }

    /// True for two steps with a result per row and few reductions, one of which reads buffers that the other reads.
    fn may_join(&self, first: StepIdx, second: StepIdx) -> bool {
        let [a, b] = [first, second].map(|s| &self.draft.steps[s]);
        let reductions = |step: &DraftStep| match &self.draft.kernels[step.kernel].template {
            Template::Row { per_row: true, reductions, .. } if step.bind_ranges.is_empty() => Some(reductions.len()),
            _ => None,
        };
        let Some(count) = reductions(b).and_then(|count| Some(count + reductions(a)?)) else { return false };
        let read = |step: &DraftStep| !step.reads.is_empty();
        count <= MOST_REDUCTIONS && read(a) && read(b) && (covers(a, b) || covers(b, a))
    }

    /// The kernel of two such steps, if their rows are the same and neither depends on the other. The steps that wait move no more bytes
    /// than are read once less, so hardly more is held meanwhile.
    fn joined_rows(&self, first: StepIdx, second: StepIdx) -> Option<Joined> {
        let steps = &self.draft.steps;
        let (all, some) = if covers(&steps[second], &steps[first]) { (second, first) } else { (first, second) };
        let kernel = self.with_reductions(&steps[all], &steps[some])?;
        let behind = reached(&[first], &Dag::new(&self.draft), &vec![Vec::new(); steps.len()]);
        let between = (first.index() + 1..second.index()).map(StepIdx::new);
        let (waiting, ahead): (Vec<StepIdx>, Vec<StepIdx>) = between.partition(|s| behind.contains(s));
        let bytes = |list: &[BufferIdx]| list.iter().map(|&b| self.draft.buffers[b].bytes).sum::<u64>();
        let moved: u64 = waiting.iter().map(|&s| bytes(&steps[s].reads) + bytes(&steps[s].writes)).sum();
        let fits = !behind.contains(&second) && moved <= bytes(&steps[some].reads);
        fits.then_some(Joined { kernel, all, some, ahead, waiting })
    }

    /// The kernel of one step with the reductions and the results of another over the same rows.
    fn with_reductions(&self, all: &DraftStep, some: &DraftStep) -> Option<Kernel> {
        let [mut kernel, other] = [all, some].map(|step| self.draft.kernels[step.kernel].clone());
        let place = |(&buffer, operand)| {
            let mut known = all.reads.iter().zip(&kernel.reads);
            known.position(|(&read, own)| read == buffer && own == operand).map(|slot| slot as u32)
        };
        let slots: Vec<u32> = some.reads.iter().zip(&other.reads).map(place).collect::<Option<_>>()?;
        let Template::Row { inner, reductions: further, .. } = other.template else { return None };
        let Template::Row { inner: own, reductions, .. } = &mut kernel.template else { return None };
        if *own != inner || kernel.shape != other.shape {
            return None;
        }
        let count = reductions.len() as u32;
        let turned = |instr: &Instr, start: u32| {
            let code = match instr.code {
                Code::Input(slot) => Code::Input(slots[slot as usize]),
                Code::Reduction(number) => Code::Reduction(number + count),
                code => code.map(|operand| operand + start),
            };
            Instr { code, ..*instr }
        };
        reductions.extend(further.into_iter().map(|RowReduction { reduction, body }| {
            let code = body.code.iter().map(|instr| turned(instr, 0)).collect();
            RowReduction { reduction, body: Body { code, ..body } }
        }));
        let start = kernel.body.code.len() as u32;
        kernel.body.code.extend(other.body.code.iter().map(|instr| turned(instr, start)));
        kernel.body.results.extend(other.body.results.iter().map(|result| result + start));
        kernel.writes.extend(other.writes);
        kernel.schedule = Schedule::Open;
        let bindings = kernel.reads.len() + kernel.writes.len();
        let apart = all.writes.iter().all(|written| !some.writes.contains(written));
        (apart && bindings <= self.target.max_bindings as usize).then_some(kernel)
    }

    /// Puts the joined step in the place of the second, and the steps that wait behind it.
    fn replace_rows(&mut self, first: StepIdx, second: StepIdx, joined: Joined) -> Result<()> {
        let Joined { mut kernel, all, some, ahead, waiting } = joined;
        let [DraftStep { name, reads, writes, .. }, some] = [all, some].map(|s| self.draft.steps[s].clone());
        let writes = [writes, some.writes].concat();
        let buffers: Vec<BufferIdx> = reads.iter().chain(&writes).copied().collect();
        kernel.schedule = self.schedule(&name, &kernel, &buffers)?;
        let step = DraftStep {
            name,
            kernel: self.number(kernel),
            reads,
            writes,
            bind_ranges: Vec::new(),
            reusable: Vec::new(),
        };
        let [ahead, waiting] = [ahead, waiting].map(|list| list.into_iter().map(|s| self.draft.steps[s].clone()));
        let order: Vec<DraftStep> = ahead.chain([step]).chain(waiting).collect();
        self.draft.steps.splice(first.index()..=second.index(), order);
        Ok(())
    }
}

/// True if one step reads every buffer that another reads.
fn covers(step: &DraftStep, other: &DraftStep) -> bool {
    other.reads.iter().all(|read| step.reads.contains(read))
}
