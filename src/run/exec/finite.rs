//! Finds the first value of a run that is not finite.

use super::{Exec, argument};
use crate::error::Result;
use crate::kernel::Operand;
use crate::tensor::Tensor;
use std::fmt;

/// Elements that are not finite, in the result of a step.
#[derive(Clone, Debug, PartialEq)]
pub struct NotFinite {
    /// The name of the step, which is that of the last node that it computes.
    pub step: String,
    /// The template of its kernel.
    pub template: &'static str,
    /// The first such element.
    pub value: f64,
    /// How many there are, and of how many elements.
    pub count: [usize; 2],
}

impl fmt::Display for NotFinite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let NotFinite { step, template, value, count: [count, all] } = self;
        write!(f, "{value} in the result of '{step}' ({template}), in {count} of {all} elements")
    }
}

impl Exec {
    /// Runs step by step, and returns the first result that has NaN or infinity; negative infinity, which masks have, counts only if there is
    /// nothing else. Updates of states stay, as after any run.
    ///
    /// # Errors
    /// Those of [`run`](Self::run).
    pub fn first_not_finite(&mut self, inputs: &[Tensor]) -> Result<Option<NotFinite>> {
        let records = self.record_steps()?;
        self.write(inputs)?;
        self.ready = self.plan().inputs.is_empty();
        let mut masks = None;
        for (at, &record) in records.iter().enumerate() {
            self.backend.replay(record)?;
            let Some(found) = self.not_finite_of(at)? else { continue };
            if found.value != f64::NEG_INFINITY {
                return Ok(Some(found));
            }
            masks.get_or_insert(found);
        }
        Ok(masks)
    }

    /// The elements that are not finite among those that a step has just written.
    fn not_finite_of(&mut self, at: usize) -> Result<Option<NotFinite>> {
        let Exec { backend, loaded, current, segments, .. } = self;
        let plan = loaded[*current].program();
        let step = &plan.steps[at];
        let kernel = &plan.kernels[step.kernel];
        for (w, operand) in kernel.writes.iter().enumerate().filter(|(_, operand)| operand.dtype.is_float()) {
            let slice = argument(plan, segments, step, step.reads.len() + w);
            let mut bytes = vec![0; slice.bytes as usize];
            backend.read(slice, &mut bytes)?;
            let values = elements(operand, &bytes)?;
            let worst = values.iter().copied().filter(|value| !value.is_finite());
            let count = worst.clone().count();
            let first = worst.clone().find(|value| *value != f64::NEG_INFINITY).or_else(|| worst.clone().next());
            if let Some(value) = first {
                let (step, template) = (step.name.clone(), kernel.template.name());
                return Ok(Some(NotFinite { step, template, value, count: [count, values.len()] }));
            }
        }
        Ok(None)
    }
}

/// The elements of an operand, of which the bytes of its buffer are given.
fn elements(operand: &Operand, bytes: &[u8]) -> Result<Vec<f64>> {
    let size = operand.dtype.size();
    let element = |at: isize| bytes.get(at as usize * size..(at as usize + 1) * size).unwrap_or_default();
    let own: Vec<u8> = operand.access.elements().flat_map(element).copied().collect();
    Ok(Tensor::new(operand.dtype, [own.len() / size], own)?.to_f64())
}
