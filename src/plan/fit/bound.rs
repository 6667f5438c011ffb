//! Finds a lower bound of memory for every order of the steps and every placement.

use crate::error::Result;
use crate::kernel::schedule;
use crate::lower::{Dag, Draft};
use crate::make::arrange::{draft, drafts};
use crate::make::offsets::{TransferBytes, own_segments};
use crate::pass::Prepared;
use crate::target::Target;
use crate::{BufferIdx, Class, StepIdx};
use serde::Serialize;
use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};

/// The least that a graph's kernels take, in whatever order they run and wherever their buffers lie.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Bound {
    /// Bytes of all segments together.
    pub bytes: u64,
    /// Bytes that are held throughout, such as constants, state, staging, the backend's own.
    pub held_bytes: u64,
    /// Bytes of the arena that must hold data at once.
    pub arena_bytes: u64,
    /// The node of the step that runs then; `None` before the first step or after the last one.
    pub step: Option<String>,
}

/// The most steps for which the data that is live across a step is sought. The ancestors of all steps take a bit per pair.
const MAX_ANCESTRY: usize = 1 << 14;

/// A bound for every order and every placement of the graph's kernels; passes have run.
///
/// While a step runs, all that it reads and writes is live. So is a buffer that a step before it in every order has written, if a step
/// after it in every order reads it. Inputs are live before all steps, outputs after all. A result that may overwrite an operand counts
/// once. Padding for alignment does not count.
/// The bound does not hold for other kernels, such as those of another fusion or of another binding of a dim.
///
/// # Errors
/// As [`plan`](crate), but for the limit.
pub fn bound(graph: &Prepared, target: &Target) -> Result<Bound> {
    let bounds = drafts(|options| draft(graph, target, options))?.into_iter().map(|draft| of(&draft, target));
    Ok(bounds.min_by_key(|bound| bound.bytes).expect("there is a lowering"))
}

/// A bound for programs that share their memory, whatever is [computed again](super::limit) of their forward computations.
///
/// Every step runs once at least, so all that it reads and writes is live then. What the backward computation makes, it makes once: such a
/// buffer is live across the steps of the backward computation that lie between its writer and a reader. So is an input, up to the last of
/// them that reads it. Values of the forward computation may be made and read at any time, and count only where a step touches them.
///
/// # Errors
/// As [`bound`].
pub fn together(graphs: &[Prepared], target: &Target) -> Result<Bound> {
    let lowered =
        graphs.iter().map(|graph| drafts(|options| draft(graph, target, options))).collect::<Result<Vec<_>>>()?;
    let arenas = lowered.iter().zip(graphs).map(|(drafts, graph)| {
        let once = once(graph);
        let arenas = drafts
            .iter()
            .map(|draft| arena(draft, &|s| once.as_ref().is_none_or(|once| once.contains(&draft.steps[s].name[..]))));
        arenas.min_by_key(|(bytes, _)| *bytes).expect("there is a lowering")
    });
    let (arena_bytes, step) = arenas.rev().max_by_key(|(bytes, _)| *bytes).unwrap_or_default();
    // The first lowering of each, and the last.
    let ends =
        [0, usize::MAX].map(|at| lowered.iter().map(|drafts| &drafts[at.min(drafts.len() - 1)]).collect::<Vec<_>>());
    let held_bytes = ends.iter().map(|drafts| held(drafts, target)).min().unwrap_or(0);
    Ok(Bound { bytes: held_bytes + arena_bytes, held_bytes, arena_bytes, step })
}

/// The steps of a graph that run once whatever is computed again: those of the backward computation. `None` if all do.
fn once(graph: &Prepared) -> Option<HashSet<&str>> {
    let order = graph.graph.order().unwrap_or_default();
    let backward =
        order.into_iter().filter(|&node| graph.is_backward(node)).filter_map(|node| graph.graph.name_of(node));
    graph.graph.has_backward().then(|| backward.collect())
}

fn of(draft: &Draft, target: &Target) -> Bound {
    let held_bytes = held(&[draft], target);
    let (arena_bytes, step) = arena(draft, &|_| true);
    Bound { bytes: held_bytes + arena_bytes, held_bytes, arena_bytes, step }
}

/// The bytes of a class in a draft.
fn sum(draft: &Draft, class: Class) -> u64 {
    let used = draft.used();
    let kept = draft.buffers.iter().zip(&used).filter(|(b, used)| **used && b.class == class && !b.is_update());
    kept.map(|(b, _)| b.bytes).sum()
}

/// The bytes that drafts hold throughout at the least. States of one name are there once, and so may constants be.
fn held(drafts: &[&Draft], target: &Target) -> u64 {
    let mut states: HashMap<&str, u64> = HashMap::new();
    for draft in drafts {
        let buffers = draft.states.iter().map(|state| &draft.buffers[state.buffer]);
        states.extend(buffers.map(|buffer| (&buffer.name[..], buffer.bytes)));
    }
    let states: u64 = states.values().sum();
    let of_class = |class: Class| match class {
        Class::State => states,
        class => drafts.iter().map(|draft| sum(draft, class)).max().unwrap_or(0),
    };
    let staging: u64 = TransferBytes::of(of_class).staging(target).map(|s| s.bytes).sum();
    let lasting = Class::ALL.into_iter().filter(|class| !class.in_arena());
    let own: u64 = own_segments(target, drafts).map(|s| s.bytes).sum();
    lasting.map(of_class).sum::<u64>() + staging + own
}

/// The bytes of the arena that hold data at once, and the node of the step that runs then. `once` tells the steps that can run only once.
fn arena(draft: &Draft, once: &dyn Fn(StepIdx) -> bool) -> (u64, Option<String>) {
    let across = across(draft, once);
    let worst = StepIdx::all(&draft.steps).map(|s| (touched(draft, s) + across[s], s));
    // The first of equals, so that the same graph names the same step.
    let worst = worst.max_by_key(|&(bytes, s)| (bytes, Reverse(s)));
    // All inputs are there before the first step, and all outputs behind the last one.
    let within = |class: Class| if class.in_arena() { sum(draft, class) } else { 0 };
    let ends = within(Class::Input).max(within(Class::Output));
    match worst {
        Some((bytes, s)) if bytes >= ends && bytes > 0 => (bytes, Some(draft.steps[s].name.clone())),
        _ => (ends, None),
    }
}

fn in_arena(draft: &Draft, buffer: BufferIdx) -> bool {
    draft.buffers[buffer].class.in_arena()
}

/// Bytes that a step's own operands take in the arena at the least.
fn touched(draft: &Draft, step: StepIdx) -> u64 {
    let step = &draft.steps[step];
    let mut all: Vec<_> = step.reads.iter().chain(&step.writes).copied().filter(|&b| in_arena(draft, b)).collect();
    all.sort_unstable();
    all.dedup();
    let bytes = |b: &BufferIdx| match draft.buffers[*b].class {
        // The least that the kernel runs with, even if it is given more.
        Class::Workspace => schedule::workspace(&draft.kernels[step.kernel]),
        _ => draft.buffers[*b].bytes,
    };
    let bytes: u64 = all.iter().map(bytes).sum();
    let over = step.reusable.iter().any(|&b| in_arena(draft, b));
    let shared = step.writes.first().filter(|&&b| over && in_arena(draft, b)).map_or(0, |&b| draft.buffers[b].bytes);
    bytes - shared
}

/// Per step, the bytes of the arena's buffers that it does not touch and that hold data across it in every order. Only steps that run `once`
/// count: their order is that of their own dependencies, and so are the lives of what they write.
fn across(draft: &Draft, once: &dyn Fn(StepIdx) -> bool) -> Vec<u64> {
    let steps = draft.steps.len();
    let mut bytes = vec![0; steps];
    if steps > MAX_ANCESTRY {
        return bytes;
    }
    let dag = Dag::new(draft);
    let words = steps.div_ceil(64);
    let mut ancestors = vec![0u64; steps * words];
    // Steps are in the file's order, so the steps before one are complete when its turn comes.
    let once: Vec<bool> = StepIdx::all(&draft.steps).map(once).collect();
    for s in (0..steps).filter(|&s| once[s]) {
        let (earlier, own) = ancestors.split_at_mut(s * words);
        for p in dag.before[s].iter().map(|p| p.index()).filter(|&p| once[p]) {
            own.iter_mut().zip(&earlier[p * words..(p + 1) * words]).for_each(|(a, b)| *a |= b);
            own[p / 64] |= 1 << (p % 64);
        }
    }
    let has = |of: usize, s: usize| ancestors[of * words + s / 64] >> (s % 64) & 1 == 1;
    let (mut writers, mut users) = (vec![Vec::new(); draft.buffers.len()], vec![Vec::new(); draft.buffers.len()]);
    let mut moves = vec![false; draft.buffers.len()];
    for (s, step) in draft.steps.iter().enumerate() {
        if !once[s] {
            step.writes.iter().for_each(|&b| moves[b] = true);
            continue;
        }
        step.writes.iter().for_each(|&b| writers[b].push(s));
        step.reads.iter().chain(&step.writes).for_each(|&b| users[b].push(s));
    }
    let mut before = vec![0u64; words];
    for b in BufferIdx::all(&draft.buffers).filter(|&b| in_arena(draft, b) && !moves[b]) {
        // The caller reads outputs after all steps, and writes inputs before them.
        let class = draft.buffers[b].class;
        before.fill(if class == Class::Output { u64::MAX } else { 0 });
        for &user in &users[b] {
            before.iter_mut().zip(&ancestors[user * words..(user + 1) * words]).for_each(|(a, b)| *a |= b);
        }
        for (word, &bits) in before.iter().enumerate() {
            let mut bits = bits;
            while bits != 0 {
                let s = word * 64 + bits.trailing_zeros() as usize;
                bits &= bits - 1;
                let there = || class == Class::Input || writers[b].iter().any(|&w| has(s, w));
                if s < steps && once[s] && users[b].binary_search(&s).is_err() && there() {
                    bytes[s] += draft.buffers[b].bytes;
                }
            }
        }
    }
    bytes
}
