//! Chooses the lowering, the order and the number of streams: the smallest arena, on as many streams as cost little.

use super::offsets::{Layout, check_sizes, layout as place, stack, total};
use super::{order, overlap, workspace};
use crate::error::Result;
use crate::lower::{Draft, Options, Placed, lower};
use crate::pass::{Prefer, Prepared};
use crate::target::Target;
use crate::{Because, Candidate, Knob, Limits, Segment, Spot, StepIdx};

/// A graph whose passes have run, lowered with the bodies of its loops.
///
/// # Errors
/// As of [`lower`].
pub fn lowered(graph: &Prepared, target: &Target, options: Options) -> Result<Draft> {
    lower(graph, target, options, |body, target| {
        let made = arrange(target, &Limits { memory: None }, |options| draft(body, target, options))?;
        let Arrangement { draft, layout, segments, places, .. } = made;
        Ok(Placed { draft, order: layout.order, segments, places })
    })
}

/// A draft that is ready to be ordered. Library calls have small workspaces, or the most that they can use if speed comes first.
pub fn draft(graph: &Prepared, target: &Target, options: Options) -> Result<Draft> {
    let mut draft = lowered(graph, target, options)?;
    if draft.prefer != Prefer::Speed {
        workspace::shrink(&mut draft, target);
    }
    Ok(draft)
}

/// A draft and all decisions about it: order, segments, offsets.
pub struct Arrangement {
    pub draft: Draft,
    pub options: Options,
    pub layout: Layout,
    pub orders: Vec<Candidate>,
    pub segments: Vec<Segment>,
    /// Per buffer of the draft, its segment and offset; `None` if nothing uses it.
    pub places: Vec<Option<Spot>>,
    /// The choices that were made.
    pub knobs: Vec<Knob>,
}

/// Chooses the draft to plan, and places all of its buffers.
pub fn arrange(target: &Target, limits: &Limits, draft: impl FnMut(Options) -> Result<Draft>) -> Result<Arrangement> {
    let (mut draft, options, mut layout, mut orders, mut knobs) = best_order(target, limits, draft)?;
    if draft.prefer == Prefer::Speed {
        let mut small = draft.clone();
        workspace::shrink(&mut small, target);
        let least = place(&small, target, &layout.order, 1, u64::MAX)?.peak;
        let cost = layout.peak as i64 - least as i64;
        knobs.extend((cost > 0).then(|| Knob::new("workspaces", cost, Because::Speed)));
    }
    if let Some(wide) = widen(&draft, target, &layout)? {
        let bytes = |layout| total(target, &draft, layout);
        // If neither fits, the smaller one shows how much is missing.
        if limits.memory.is_none_or(|limit| bytes(&wide) <= limit.max(bytes(&layout))) {
            let cost = wide.peak as i64 - layout.peak as i64;
            knobs.push(Knob::new(format!("{} streams", wide.streams.used()), cost, Because::Speed));
            layout = wide;
        }
    }
    let before = layout.peak;
    if let Some(bytes) = workspace::grow(&mut draft, &mut layout, target) {
        knobs.push(Knob::new(format!("{bytes} bytes of workspace that were free"), 0, Because::Speed));
    }
    if let Some(order) = orders.iter_mut().find(|order| order.peak == before) {
        order.peak = layout.peak;
        order.bound = order.bound.min(layout.peak);
    }
    let (segments, mut places) = stack(target, &[(&draft, &layout)]);
    let places = places.swap_remove(0);
    Ok(Arrangement { draft, options, layout, orders, segments, places, knobs })
}

/// The lowerings that may become the plan.
pub fn drafts(mut draft: impl FnMut(Options) -> Result<Draft>) -> Result<Vec<Draft>> {
    let joined = draft(Options { join: true })?;
    if !joined.concatenates {
        return Ok(vec![joined]);
    }
    Ok(vec![joined, draft(Options { join: false })?])
}

/// About the bytes of the arena, without a placement.
pub fn estimate(graph: &Prepared, target: &Target) -> Result<u64> {
    let draft = draft(graph, target, Options { join: true })?;
    Ok(order::peak(&draft, target.alignment).unwrap_or(u64::MAX))
}

/// Copies of parts into concatenations take time: they are made only where they save more than one in this many bytes of the plan, or
/// where it would not fit without.
const COPIES_SAVE: u64 = 64;

/// The order with the smallest arena, the file's among equals, in the lowering that is worth it; and the orders that were tried of that,
/// behind the file's.
fn best_order(
    target: &Target,
    limits: &Limits,
    draft: impl FnMut(Options) -> Result<Draft>,
) -> Result<(Draft, Options, Layout, Vec<Candidate>, Vec<Knob>)> {
    let mut best: Option<(Draft, Options, Layout, Vec<Candidate>, Vec<Knob>)> = None;
    for (join, draft) in [true, false].into_iter().zip(drafts(draft)?) {
        check_sizes(&draft, target)?;
        let fits = |bytes: u64| limits.memory.is_none_or(|limit| bytes <= limit);
        let bar = best.as_ref().map_or(u64::MAX, |(joined, _, layout, ..)| {
            let bytes = total(target, joined, layout);
            let worth = match joined.prefer {
                _ if !fits(bytes) => 0,
                Prefer::Memory => 0,
                Prefer::Balance => bytes / COPIES_SAVE,
                Prefer::Speed => u64::MAX,
            };
            layout.peak.saturating_sub(worth)
        });
        if let Some((layout, mut orders)) = best_of(target, &draft, bar)? {
            let mut knobs = Vec::new();
            if let Some((before, _, joined, first, _)) = &best {
                let because = if fits(total(target, before, joined)) { Because::Memory } else { Because::Limit };
                knobs.push(Knob::new("copies of parts", layout.peak as i64 - joined.peak as i64, because));
                orders.iter_mut().for_each(|order| order.name += Candidate::COPIED);
                orders.insert(0, first[0].clone());
            } else if let Some(file) = orders.first().filter(|file| file.peak > layout.peak) {
                let saved = layout.peak as i64 - file.peak as i64;
                knobs.push(Knob::new("another order than the file's", saved, Because::Memory));
            }
            best = Some((draft, Options { join }, layout, orders, knobs));
        }
    }
    Ok(best.expect("any arena is below the first bar"))
}

/// The order of a draft with the smallest arena below `bar`, the file's among equals, and all that were tried.
fn best_of(target: &Target, draft: &Draft, bar: u64) -> Result<Option<(Layout, Vec<Candidate>)>> {
    let tries = order::orders(draft, target.alignment);
    let candidate = |order: &order::Order| Candidate { name: order.name.clone(), bound: order.bound, peak: u64::MAX };
    let mut orders: Vec<Candidate> = tries.iter().map(candidate).collect();
    // A low bound first: what is placed within it leaves little for others to win.
    let mut queue: Vec<usize> = (0..tries.len()).collect();
    queue.sort_by_key(|&at| (tries[at].bound, at));
    let mut best: Option<(usize, Layout)> = None;
    for at in queue {
        let bar = best.as_ref().map_or(bar, |(holder, best)| best.peak.saturating_add(u64::from(at < *holder)));
        let layout = place(draft, target, &tries[at].steps, 1, bar)?;
        orders[at].peak = layout.peak;
        orders[at].bound = layout.bound.min(layout.peak);
        if layout.peak < bar {
            best = Some((at, layout));
        }
    }
    Ok(best.map(|(_, layout)| (layout, orders)))
}

/// Bytes by which an arena may become larger in any case for steps to run side by side: no device is short of them.
const STREAMS_COST: u64 = 1 << 20;

/// An order in which exchanges and fetches have time, the file's or the same one, in as many streams as the target runs, or in fewer, if the arena
/// grows by little: by two of the largest that are fetched, by an eighth where ranks exchange in a training, else by a quarter or by a thirty-second
/// of the constants; by nothing where memory comes first, and in any other training.
fn widen(draft: &Draft, target: &Target, narrow: &Layout) -> Result<Option<Layout>> {
    let constants: u64 = draft.constants.iter().map(|c| draft.buffers[c.buffer].bytes).sum();
    let most = match draft.prefer {
        Prefer::Memory => 0,
        // The next of what comes from the host is on its way while one is used.
        Prefer::Balance if draft.fetches() => STREAMS_COST.max(2 * draft.largest_offloaded()),
        // What ranks exchange runs beside what is computed.
        Prefer::Balance if draft.sequential && draft.exchanges() => STREAMS_COST.max(narrow.peak / 8),
        Prefer::Balance if draft.sequential => 0,
        Prefer::Balance => STREAMS_COST.max(narrow.peak / 4).max(constants / 32),
        Prefer::Speed => u64::MAX,
    };
    let bar = narrow.peak.saturating_add(most).saturating_add(1);
    let file: Vec<_> = StepIdx::all(&draft.steps).collect();
    let mut orders: Vec<_> =
        overlap::lagged(draft, &narrow.order).into_iter().chain([file, narrow.order.clone()]).collect();
    orders.dedup();
    let mut streams = target.streams as usize;
    let moves = draft.exchanges() || draft.fetches();
    if draft.sequential && moves {
        streams = streams.min(2);
    }
    while streams > 1 {
        let mut best: Option<Layout> = None;
        for order in &orders {
            let bar = best.as_ref().map_or(bar, |best| best.peak);
            let wide = place(draft, target, order, streams, bar)?;
            if wide.peak < bar && wide.streams.used() > 1 {
                best = Some(wide);
                // The first order is the one in which exchanges have the most time.
                if moves {
                    break;
                }
            }
        }
        if best.is_some() {
            return Ok(best);
        }
        streams /= 2;
    }
    Ok(None)
}
