//! Poison finds reads of dead memory: it fills dead bytes with numbers that show in the results.
//!
//! ```text
//! plain      step 0, step 1, ...                     the results of each step are noted, as a hash
//! poisoned   fill, step 0, fill, step 1, ... fill    once per pattern; every note must be the same
//! ```
//!
//! The dead bytes follow from the plan's steps and buffers alone ([`check::dead`]). A wrong step reads the fill and computes
//! something else: one that reads beyond its operands, or the old contents of its workspace, or a buffer whose bytes another
//! buffer has overwritten.

use super::{Exec, Lasting, Loaded, argument, launch};
use crate::backend::{Launch, RecordId, Slice};
use crate::error::{Error, Result};
use crate::kernel::Operand;
use crate::plan::check::{self, Span};
use crate::plan::{Class, Program};
use crate::tensor::Tensor;
use std::hash::{DefaultHasher, Hash, Hasher};

/// The words that fill dead memory.
///
/// The first is NaN as `f32` and as a pair of `f16` or `bf16`: sums and products keep it. The second is a large number (3.2e29 as
/// `f32`), which comparisons keep. Both are large integers.
pub const PATTERNS: [u32; 2] = [0x7fc1_7fc1, 0x7081_7081];

/// Bytes that one write fills.
const CHUNK: usize = 1 << 20;

/// The results of a run, step by step.
struct Trace {
    /// Per step, a hash of the elements that it wrote.
    notes: Vec<u64>,
    outputs: Vec<Tensor>,
}

impl Exec {
    /// Runs as [`run`](Self::run) does, then step by step: once plainly, and once with dead memory filled with each of the
    /// [`PATTERNS`].
    ///
    /// This takes several times as long, but no more of the device's memory.
    ///
    /// # Errors
    /// Those of [`run`](Self::run); [`Error::Differ`] with the first step that computes something else on poisoned memory, or the
    /// first output that differs.
    pub fn run_poisoned(&mut self, inputs: &[Tensor]) -> Result<Vec<Tensor>> {
        let state = self.keep_state()?;
        let outputs = self.run(inputs)?;
        let records = self.record_steps()?;
        let mut dead = check::dead(self.plan());
        if self.plan().plan.runs > 1 {
            // Other runs read that segment now, and may poison it, too.
            let segments = &self.plan().segments;
            dead[0].retain(|span| segments[span.segment].class != Class::Constant);
        }
        check::spare(&mut dead[0], self.beside());
        self.restore_state(&state)?;
        let plain = self.trace(inputs, &records, None)?;
        for pattern in PATTERNS {
            self.restore_state(&state)?;
            let poisoned = self.trace(inputs, &records, Some((pattern, &dead)))?;
            let step = plain.notes.iter().zip(&poisoned.notes).position(|(a, b)| a != b);
            let what = || match step {
                Some(at) => format!("dead memory filled with {pattern:#010x}, which {} reads", self.step_name(at)),
                None => format!("dead memory filled with {pattern:#010x}"),
            };
            self.compare(&plain.outputs, &poisoned.outputs, what)?;
            if let Some(at) = step {
                let step = self.step_name(at);
                return Err(Error::differ(format!("{step} reads dead memory, which was filled with {pattern:#010x}")));
            }
        }
        self.compare(&outputs, &plain.outputs, || "the steps one by one".to_owned())?;
        Ok(outputs)
    }

    /// One record per step, so that each step runs by itself.
    pub(super) fn record_steps(&mut self) -> Result<Vec<RecordId>> {
        let Exec { backend, loaded, current, segments, .. } = self;
        let Loaded { kernels, .. } = &loaded[*current];
        let plan = loaded[*current].program();
        let alone = |step| Launch { stream: 0, waits: Vec::new(), ..launch(plan, segments, kernels, step) };
        plan.steps.iter().map(|step| backend.record(&[alone(step)])).collect()
    }

    fn trace(&mut self, inputs: &[Tensor], records: &[RecordId], poison: Option<(u32, &[Vec<Span>])>) -> Result<Trace> {
        self.write(inputs)?;
        let mut notes = Vec::with_capacity(records.len());
        let fill = |exec: &mut Exec, at: usize| poison.map_or(Ok(()), |(pattern, dead)| exec.fill(&dead[at], pattern));
        for (at, &record) in records.iter().enumerate() {
            fill(self, at)?;
            self.backend.replay(record)?;
            notes.push(self.note(at)?);
        }
        fill(self, records.len())?;
        // Dead bytes have been filled, including those of inputs, so a run must write the inputs again.
        self.ready = self.plan().inputs.is_empty();
        Ok(Trace { notes, outputs: self.read()? })
    }

    fn slice(&self, Span { segment, offset, bytes }: Span) -> Slice {
        Slice { segment: self.segments[segment], offset, bytes }
    }

    fn fill(&mut self, dead: &[Span], pattern: u32) -> Result<()> {
        let longest = dead.iter().map(|span| span.bytes).max().unwrap_or(0).min(CHUNK as u64);
        let words = pattern.to_le_bytes().repeat(longest as usize / 4);
        for span in dead {
            // Devices copy whole words.
            let (mut offset, end) = (span.offset.next_multiple_of(4), (span.offset + span.bytes) & !3);
            while offset < end {
                let bytes = (end - offset).min(words.len() as u64);
                self.backend.write(self.slice(Span { offset, bytes, ..*span }), &words[..bytes as usize])?;
                offset += bytes;
            }
        }
        Ok(())
    }

    /// A hash of all elements that a step writes. Bytes between them do not count.
    fn note(&mut self, at: usize) -> Result<u64> {
        let Exec { backend, loaded, current, segments, .. } = self;
        let plan = loaded[*current].program();
        let step = &plan.steps[at];
        let mut hasher = DefaultHasher::new();
        for (w, operand) in plan.kernels[step.kernel].writes.iter().enumerate() {
            let slice = argument(plan, segments, step, step.reads.len() + w);
            let mut bytes = vec![0; slice.bytes as usize];
            backend.read(slice, &mut bytes)?;
            hash_elements(operand, &bytes, &mut hasher);
        }
        Ok(hasher.finish())
    }

    /// Compares outputs. The error names the first one that differs and the other run.
    fn compare(&self, expected: &[Tensor], found: &[Tensor], other: impl Fn() -> String) -> Result<()> {
        for ((port, expected), found) in self.plan().outputs.iter().zip(expected).zip(found) {
            if expected.bytes() != found.bytes() {
                return Err(Error::differ(format!("output '{}' is not the same with {}", port.name, other())));
            }
        }
        Ok(())
    }

    fn step_name(&self, at: usize) -> String {
        let step = &self.plan().steps[at];
        let kernel = self.plan().kernels[step.kernel].template.name();
        format!("step {at} '{}' (kernel {}, {kernel})", step.name, step.kernel)
    }

    /// The programs that share the segments with the one that runs.
    fn beside(&self) -> impl Iterator<Item = &Program> {
        let others = self.loaded.iter().enumerate().filter(|(number, _)| *number != self.current);
        others.map(|(_, loaded)| loaded.program())
    }

    pub(super) fn keep_state(&mut self) -> Result<Vec<Vec<u8>>> {
        let Exec { backend, states, .. } = self;
        let keep = |state: &Lasting| {
            let mut bytes = vec![0; state.at.bytes as usize];
            backend.read(state.at, &mut bytes)?;
            Ok(bytes)
        };
        states.iter().map(keep).collect()
    }

    pub(super) fn restore_state(&mut self, kept: &[Vec<u8>]) -> Result<()> {
        let Exec { backend, states, .. } = self;
        states.iter().zip(kept).try_for_each(|(state, bytes)| backend.write(state.at, bytes))
    }
}

/// Adds the elements of an operand in the order of its index space.
fn hash_elements(operand: &Operand, bytes: &[u8], hasher: &mut DefaultHasher) {
    let (access, size) = (&operand.access, operand.dtype.size());
    let count = access.shape.numel();
    let range = |element: isize, count: usize| {
        let start = usize::try_from(element).ok()?.checked_mul(size)?;
        bytes.get(start..start.checked_add(count.checked_mul(size)?)?)
    };
    if access.is_contiguous() {
        range(access.offset, count).hash(hasher);
        return;
    }
    access.elements().for_each(|element| range(element, 1).hash(hasher));
}
