//! Loops: a kernel that launches others, step after step. No text and no code computes it: backends expand it when they record.
//!
//! ```text
//! args      reads, writes, workspace
//! first     once: what is handed on begins with what the reads hold
//! each      at every step: the same launches on the same bytes
//! ```
//! What differs from step to step is data: a number in the workspace says which row a step reads and writes.

use super::*;

/// The launches of a loop.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Repeat {
    /// Operands that are read, and never written.
    pub reads: usize,
    /// The number of steps.
    pub times: u64,
    /// Kernels, each once.
    pub kernels: Vec<Kernel>,
    /// Launches before the first step.
    pub first: Vec<Inner>,
    /// Launches of every step.
    pub each: Vec<Inner>,
}

/// A launch within a loop.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Inner {
    /// The node whose result it computes.
    pub name: String,
    /// Index of the kernel.
    pub kernel: usize,
    /// One part of an argument of the loop per operand, then for the workspace if the kernel has one.
    pub args: Vec<ArgBytes>,
}

/// Bytes of an argument of the loop.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ArgBytes {
    /// The argument: a read, a write, or the workspace.
    pub slot: usize,
    /// Bytes from its start; a multiple of the target's alignment.
    pub offset: u64,
    /// Length in bytes.
    pub bytes: u64,
}

/// The most launches of a round: a record of a driver holds whole rounds of steps, and the steps that are left, so that steps follow each other
/// without the host.
pub const UNROLLED: u64 = 64;

impl Repeat {
    /// Every launch, each once.
    pub fn launches(&self) -> impl Iterator<Item = &Inner> {
        self.first.iter().chain(&self.each)
    }

    /// Launches that a record of it holds, where a record is a graph of a driver.
    pub fn recorded(&self) -> u64 {
        let of = |inner: &[Inner]| inner.iter().map(|inner| self.kernels[inner.kernel].recorded()).sum::<u64>();
        let each = of(&self.each);
        // Whole rounds, and the steps that are left of them.
        of(&self.first) + 2 * each.max(UNROLLED).min(each.saturating_mul(self.times))
    }
}

impl Kernel {
    /// The loop, if it is one.
    pub fn repeat(&self) -> Option<&Repeat> {
        if let Template::Repeat(repeat) = &self.template { Some(repeat) } else { None }
    }

    /// The kernels that run: this one, or those of a loop.
    pub fn launched(&self) -> Vec<&Kernel> {
        match self.repeat() {
            Some(repeat) => repeat.kernels.iter().flat_map(Kernel::launched).collect(),
            None => vec![self],
        }
    }

    /// Launches that a record of it holds.
    pub fn recorded(&self) -> u64 {
        self.repeat().map_or(1, Repeat::recorded)
    }

    /// The kernel that reads an operand in its packed layout, and the operand's number there: of a loop, one within it.
    pub fn packed_reader(&self, operand: usize) -> (&Kernel, usize) {
        let inner = self.repeat().and_then(|repeat| {
            repeat.launches().find_map(|inner| {
                let kernel = &repeat.kernels[inner.kernel];
                let reads = |at: &usize| inner.args[*at].slot == operand && kernel.reads[*at].packed;
                (0..kernel.reads.len()).find(reads).map(|at| kernel.packed_reader(at))
            })
        });
        inner.unwrap_or((self, operand))
    }
}

pub(super) static REPEAT: TemplateDef = TemplateDef {
    name: "repeat",
    doc: "the kernels of a loop's body, step after step",
    kind: Kind::Row,
    core_reads: |template| if let Template::Repeat(repeat) = template { repeat.reads } else { mismatch(template) },
    alone: true,
    check: |kernel, family| {
        let Some(repeat) = kernel.repeat() else { mismatch(&kernel.template) };
        ensure(repeat.reads == kernel.reads.len(), || format!("expected {} operands to read", repeat.reads))?;
        repeat.kernels.iter().try_for_each(|kernel| kernel.validate(family))?;
        let slots = kernel.reads.len() + kernel.writes.len() + usize::from(kernel.workspace > 0);
        for inner in repeat.launches() {
            let name = |e: String| format!("launch '{}': {e}", inner.name);
            let of = repeat
                .kernels
                .get(inner.kernel)
                .ok_or_else(|| name(format!("one of {} kernels", repeat.kernels.len())))?;
            let expected = of.reads.len() + of.writes.len() + usize::from(of.workspace > 0);
            ensure(inner.args.len() == expected, || {
                name(format!("expected {expected} arguments, found {}", inner.args.len()))
            })?;
            let beyond = inner.args.iter().find(|arg| arg.slot >= slots);
            ensure(beyond.is_none(), || name(format!("an argument beyond the {slots} of the loop")))?;
        }
        Ok(())
    },
    ..PLAIN
};
