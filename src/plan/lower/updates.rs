//! On GPUs, elementwise kernels that update states become one kernel where one reads what the other wrote: an optimizer's slots, and the
//! weight that follows from them. Each element is read once, and one step is launched.
//!
//! ```text
//! mean'   = f(mean, g)
//! square' = f(square, g)                 mean', square', weight' = f(mean, square, weight, g)
//! weight' = f(weight, mean', square')
//! ```

use super::{DraftStep, Lowering};
use crate::error::Result;
use crate::expr::{Body, Code, Instr};
use crate::kernel::algorithm::Schedule;
use crate::kernel::{Kernel, Operand, Template};
use crate::{BufferIdx, KernelIdx, StepIdx};
use std::collections::HashSet;

/// A kernel that computes what two did, and its arguments.
struct Joined {
    kernel: Kernel,
    reads: Vec<BufferIdx>,
    writes: Vec<BufferIdx>,
}

impl Lowering<'_> {
    /// Makes one kernel of the updates that follow from each other.
    pub(super) fn merge_updates(&mut self) -> Result<()> {
        if !self.target.launches_cost() {
            return Ok(());
        }
        let mut gone: HashSet<StepIdx> = HashSet::new();
        // Per buffer of an update, the step that writes it.
        let mut writer: Vec<Option<StepIdx>> = vec![None; self.draft.buffers.len()];
        for second in StepIdx::all(&self.draft.steps) {
            if !self.updates(&self.draft.steps[second]) {
                continue;
            }
            let mut firsts: Vec<StepIdx> =
                self.draft.steps[second].reads.iter().filter_map(|&read| writer[read]).collect();
            firsts.sort_unstable();
            firsts.dedup();
            for first in firsts {
                let joined = self.joined(first, second).filter(|_| !self.is_read_between(first, second));
                if let Some(joined) = self.decisions.if_found("merge", first.index() as u32, joined) {
                    self.replace(second, joined)?;
                    gone.insert(first);
                }
            }
            self.draft.steps[second].writes.iter().for_each(|&update| writer[update] = Some(second));
        }
        if !gone.is_empty() {
            let mut steps = StepIdx::all(&self.draft.steps);
            let all = std::mem::take(&mut self.draft.steps);
            self.draft.steps = all.into_iter().filter(|_| !gone.contains(&steps.next().expect("as many"))).collect();
            self.forget_kernels();
        }
        Ok(())
    }

    /// True for an elementwise kernel that writes updates and nothing else.
    fn updates(&self, step: &DraftStep) -> bool {
        let kernel = &self.draft.kernels[step.kernel];
        kernel.template == Template::Map
            && step.bind_ranges.is_empty()
            && step.writes.iter().all(|&b| self.draft.buffers[b].is_update())
    }

    /// True if a step between two others reads what the first writes.
    fn is_read_between(&self, first: StepIdx, second: StepIdx) -> bool {
        let written = &self.draft.steps[first].writes;
        let between = &self.draft.steps[first.index() + 1..second.index()];
        between.iter().flat_map(|step| &step.reads).any(|read| written.contains(read))
    }

    /// The kernel of two steps, if it can read and write all that they do.
    fn joined(&self, first: StepIdx, second: StepIdx) -> Option<Joined> {
        let [a, b] = [first, second].map(|s| &self.draft.steps[s]);
        let [one, other] = [a, b].map(|step| &self.draft.kernels[step.kernel]);
        let indexed = |body: &Body| body.code.iter().any(|instr| matches!(instr.code, Code::Index(_)));
        if one.shape != other.shape || [one, other].iter().any(|kernel| indexed(&kernel.body)) {
            return None;
        }
        let mut joined =
            Joined { kernel: one.clone(), reads: a.reads.clone(), writes: [&a.writes[..], &b.writes].concat() };
        joined.kernel.schedule = Schedule::Open;
        joined.kernel.writes.extend(other.writes.iter().cloned());
        // Per instruction of the second kernel, its number in both.
        let mut number: Vec<u32> = Vec::with_capacity(other.body.code.len());
        for instr in &other.body.code {
            let Code::Input(slot) = instr.code else {
                number.push(joined.push(Instr { code: instr.code.map(|i| number[i as usize]), ..*instr }));
                continue;
            };
            let (buffer, operand) = (b.reads[slot as usize], &other.reads[slot as usize]);
            number.push(match a.writes.iter().position(|&written| written == buffer) {
                None => joined.input(buffer, operand, *instr),
                Some(result) => {
                    let value = one.body.results[result];
                    let dtype = one.body.code[value as usize].dtype;
                    let same = one.writes[result] == *operand && [dtype, instr.dtype] == [operand.dtype; 2];
                    same.then_some(value)?
                }
            });
        }
        let results = other.body.results.iter().map(|&result| number[result as usize]);
        joined.kernel.body.results.extend(results);
        let bindings = joined.reads.len() + joined.writes.len();
        (bindings <= self.target.max_bindings as usize).then_some(joined)
    }

    fn replace(&mut self, second: StepIdx, joined: Joined) -> Result<()> {
        let Joined { mut kernel, reads, writes } = joined;
        let name = self.draft.steps[second].name.clone();
        let all: Vec<BufferIdx> = reads.iter().chain(&writes).copied().collect();
        kernel.schedule = self.schedule(&name, &kernel, &all)?;
        let reusable = self.reusable(&kernel, &reads, writes[0], &[]);
        let kernel = self.number(kernel);
        self.draft.steps[second] = DraftStep { name, kernel, reads, writes, bind_ranges: Vec::new(), reusable };
        Ok(())
    }

    /// Drops the kernels that no step launches.
    pub(super) fn forget_kernels(&mut self) {
        let mut kept: Vec<Option<KernelIdx>> = vec![None; self.draft.kernels.len()];
        self.draft.steps.iter().for_each(|step| kept[step.kernel.index()] = Some(step.kernel));
        for (next, number) in kept.iter_mut().flatten().enumerate() {
            *number = KernelIdx::new(next);
        }
        let mut number = kept.iter();
        self.draft.kernels.retain(|_| number.next().expect("as many").is_some());
        let turned = |kernel: KernelIdx| kept[kernel.index()];
        for step in &mut self.draft.steps {
            step.kernel = turned(step.kernel).expect("it is launched");
        }
        for (kernel, _) in self.draft.constants.iter_mut().filter_map(|constant| constant.packed.as_mut()) {
            *kernel = kernel.and_then(turned);
        }
        self.kernels = std::mem::take(&mut self.kernels)
            .into_iter()
            .filter_map(|(text, kernel)| Some((text, turned(kernel)?)))
            .collect();
    }
}

impl Joined {
    fn push(&mut self, instr: Instr) -> u32 {
        let code = &mut self.kernel.body.code;
        let same = |other: &Instr| *other == instr && matches!(instr.code, Code::Input(_));
        let known = code.iter().position(same);
        (known.unwrap_or_else(|| {
            code.push(instr);
            code.len() - 1
        })) as u32
    }

    /// The instruction that reads an operand, which is added unless it is read already.
    fn input(&mut self, buffer: BufferIdx, operand: &Operand, instr: Instr) -> u32 {
        let mut known = self.reads.iter().zip(&self.kernel.reads);
        let slot = known.position(|(&read, other)| read == buffer && other == operand).unwrap_or_else(|| {
            self.reads.push(buffer);
            self.kernel.reads.push(operand.clone());
            self.reads.len() - 1
        });
        self.push(Instr { code: Code::Input(slot as u32), ..instr })
    }
}
