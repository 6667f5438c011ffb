//! What a record runs: launches, and loops of launches.

use super::{KernelId, Launch, Slice};
use plimsoll_core::kernel::Repeat;
use std::collections::HashMap;

/// A part of a record.
#[derive(Clone, Debug, PartialEq)]
pub enum Work<L> {
    /// One launch.
    Launch(L),
    /// The parts of a loop, so many times.
    Repeat {
        /// How often they run.
        times: u64,
        /// Its parts.
        of: Vec<Work<L>>,
    },
}

impl<L> Work<L> {
    /// The same parts, with each launch made into something else.
    ///
    /// # Errors
    /// The first error of `make`.
    pub fn try_map<M, E>(self, make: &mut impl FnMut(L) -> Result<M, E>) -> Result<Work<M>, E> {
        Ok(match self {
            Work::Launch(launch) => Work::Launch(make(launch)?),
            Work::Repeat { times, of } => {
                let of = of.into_iter().map(|part| part.try_map(make)).collect::<Result<_, E>>()?;
                Work::Repeat { times, of }
            }
        })
    }

    /// Adds each launch of this part once, in order.
    pub fn each<'a>(&'a self, to: &mut Vec<&'a L>) {
        match self {
            Work::Launch(launch) => to.push(launch),
            Work::Repeat { of, .. } => of.iter().for_each(|part| part.each(to)),
        }
    }

    /// Calls a function for every launch, as often as it runs.
    ///
    /// # Errors
    /// The first error of `run`.
    pub fn run<E>(&self, run: &mut impl FnMut(&L) -> Result<(), E>) -> Result<(), E> {
        match self {
            Work::Launch(launch) => run(launch),
            Work::Repeat { times, of } => (0..*times).try_for_each(|_| of.iter().try_for_each(|part| part.run(run))),
        }
    }
}

/// Every launch of a record, each once, in order.
pub fn launches<L>(work: &[Work<L>]) -> Vec<&L> {
    let mut all = Vec::new();
    work.iter().for_each(|part| part.each(&mut all));
    all
}

/// The loops among the kernels of a backend.
#[derive(Default)]
pub struct Loops(HashMap<KernelId, (Repeat, Vec<KernelId>)>);

impl Loops {
    /// Notes a loop, of whose kernels these are the ids.
    pub fn insert(&mut self, id: KernelId, of: &Repeat, kernels: Vec<KernelId>) {
        self.0.insert(id, (of.clone(), kernels));
    }

    /// The work of launches: those of loops are expanded, in their stream. The first launch of a loop waits for what the loop does.
    pub fn expand(&self, launches: &[Launch]) -> Vec<Vec<Work<Launch>>> {
        launches.iter().map(|launch| self.parts(launch)).collect()
    }

    fn parts(&self, launch: &Launch) -> Vec<Work<Launch>> {
        let Some((of, kernels)) = self.0.get(&launch.kernel) else { return vec![Work::Launch(launch.clone())] };
        let inner = |inner: &plimsoll_core::kernel::Inner| {
            let args = inner.args.iter().map(|arg| {
                let Slice { segment, offset, .. } = launch.args[arg.slot];
                Slice { segment, offset: offset + arg.offset, bytes: arg.bytes }
            });
            let (args, stream) = (args.collect(), launch.stream);
            self.parts(&Launch { kernel: kernels[inner.kernel], args, stream, waits: Vec::new() })
        };
        let mut parts: Vec<_> = of.first.iter().flat_map(inner).collect();
        if let Some(Work::Launch(first)) = parts.first_mut() {
            first.waits.clone_from(&launch.waits);
        }
        if of.times == 0 {
            return parts;
        }
        parts.push(Work::Repeat { times: of.times, of: of.each.iter().flat_map(inner).collect() });
        parts
    }
}
