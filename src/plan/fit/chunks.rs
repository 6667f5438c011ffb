//! Chooses the stretches of a graph that are computed in [chunks](crate::pass::chunk): those whose plans show a gain.
//!
//! ```text
//! live bytes, as a whole                        in chunks
//!   ^        ___                                  ^
//!   |  _____|   |___                              |
//!   |-|-------------|-------- threshold ----------|---.--.----.--.----------------
//!   | |             |_     ___                    | _|    |  |    |_     ___
//!   |_|               |___|   |____               |_|      |_|      |___|   |____
//!   +------------------------------> kernels      +------------------------------> kernels
//!      ^^^^^^^^^^^^^
//! ```
//!
//! All steps that run while at least a threshold of bytes is live are computed in chunks, the others as a whole. A chunk's kernels have
//! less to do at once, so chunks that save no memory only take time. Thresholds are tried from the peak downwards, and each graph is
//! planned. Under a limit, the highest threshold that fits wins, or the smallest plan if none fits. Without a limit, the highest
//! threshold wins that saves about as much as any.

use crate::decisions::Decisions;
use crate::error::Result;
use crate::make::arrange::{arrange, draft};
use crate::pass::{Prefer, Prepared, chunk};
use crate::target::Target;
use crate::{Because, Class, Knob, Limits};

/// The most thresholds that are tried. They are equally far apart.
const TRIED: usize = 16;
/// The most nodes, approximately, of all planned graphs together. At least one graph is planned.
const NODES: usize = 1 << 16;
/// Without a limit, chunks are worth it if they save one in so many bytes of the arena, and a lower threshold if it saves that much more.
const WORTH: u64 = 16;

/// Computes the stretches that gain by it in so many chunks, as [`chunk::run`] does. Without a limit, it also lets memory come before
/// time. If no stretch gains, the graph stays whole. Returns what it saved.
///
/// # Errors
/// As [`chunk::run`].
pub fn run(graph: &mut Prepared, target: &Target, limits: &Limits, chunks: usize) -> Result<Option<Knob>> {
    if chunks < 2 {
        return Ok(None);
    }
    let mut knob = None;
    if let Some(cut) = threshold(graph, target, limits, chunks)? {
        chunk::run(graph, chunks, cut.least)?;
        knob = cut.knob(chunks, limits);
    }
    graph.sequential |= limits.memory.is_none();
    Ok(knob)
}

/// Where a graph is cut.
pub struct Cut {
    /// The live bytes from which on it is computed in chunks.
    pub least: u64,
    /// The bytes that this saves, if it can be planned as a whole, too.
    saved: Option<u64>,
}

impl Cut {
    /// The choice, if what it saves is known.
    pub fn knob(&self, chunks: usize, limits: &Limits) -> Option<Knob> {
        let because = if limits.memory.is_some() { Because::Limit } else { Because::Asked };
        self.saved.map(|saved| Knob::new(format!("{chunks} chunks"), -(saved as i64), because))
    }
}

/// Where a graph is cut into so many chunks; `None` if it is better left whole.
///
/// # Errors
/// As [`chunk::run`].
pub fn threshold(graph: &Prepared, target: &Target, limits: &Limits, chunks: usize) -> Result<Option<Cut>> {
    let (units, levels) = chunk::levels(graph)?;
    let chunks = chunks.min(units);
    let fits = |bytes: u64| limits.memory.is_some_and(|limit| bytes <= limit);
    // A graph that is too large to be planned becomes smaller in any chunks.
    let (whole, arena) = bytes(graph, target, limits).unwrap_or((u64::MAX, 0));
    if fits(whole) {
        tracing::info!("'{}' fits the limit without chunks", graph.graph.name);
        return Ok(None);
    }
    let mut saved = Vec::new();
    for least in thresholds(&levels, (NODES / graph.graph.len().saturating_mul(chunks).max(1)).clamp(1, TRIED)) {
        let mut changed = Prepared { decisions: Decisions::default(), ..graph.clone() };
        chunk::run(&mut changed, chunks, least)?;
        let (bytes, _) = bytes(&changed, target, limits).unwrap_or((u64::MAX, 0));
        tracing::debug!(least, bytes, whole, "in chunks");
        if fits(bytes) {
            return Ok(Some(Cut { least, saved: (whole < u64::MAX).then(|| whole.saturating_sub(bytes)) }));
        }
        saved.push((least, whole.saturating_sub(bytes)));
    }
    let most = saved.iter().map(|&(_, saved)| saved).max().unwrap_or(0);
    let is_balanced = limits.memory.is_none() && graph.prefer != Prefer::Memory;
    let (worth, slack) = if is_balanced { (arena / WORTH, most / WORTH) } else { (0, 0) };
    if most == 0 || most < worth {
        tracing::warn!("'{}' takes hardly less memory in {chunks} chunks: it is computed as a whole", graph.graph.name);
        return Ok(None);
    }
    let found = saved.into_iter().find(|&(_, saved)| saved >= most - slack);
    Ok(found.map(|(least, saved)| Cut { least, saved: (whole < u64::MAX).then_some(saved) }))
}

/// At most `most` of the levels, the highest first and the lowest last.
fn thresholds(levels: &[u64], most: usize) -> Vec<u64> {
    let peak = levels.last().copied().unwrap_or(0);
    let step = |number: usize| (u128::from(peak) * number as u128 / most as u128) as u64;
    let level = |number: usize| levels.iter().copied().find(|&level| level >= step(number));
    let mut found: Vec<u64> = (0..most).rev().filter_map(level).collect();
    found.dedup();
    found
}

/// Bytes of a graph's plan, and those of the arena in it, with one step after another.
pub(super) fn bytes(graph: &Prepared, target: &Target, limits: &Limits) -> Result<(u64, u64)> {
    let target = Target { streams: 1, ..target.clone() };
    let graph = Prepared { decisions: Decisions::default(), ..graph.clone() };
    let found = arrange(&target, limits, |options| draft(&graph, &target, options))?;
    let arena = found.segments.iter().filter(|segment| segment.class == Class::Activation);
    Ok((found.segments.iter().map(|segment| segment.bytes).sum(), arena.map(|segment| segment.bytes).sum()))
}
