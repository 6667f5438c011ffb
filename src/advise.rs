//! What a memory limit means for a model, and what would help. Every figure is that of a plan, or of a [bound](crate::plan::fit::bound).

use crate::error::{Error, Result};
use crate::graph::Graph;
use crate::onnx::{self, Model};
use crate::plan::fit::bound::{Bound, bound};
use crate::plan::tell::peak::{Peak, peak};
use crate::plan::{self, Class, Limits, Plan, Recipe};
use crate::target::{Family, Target};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};

/// A model as it is to be planned. Remedies change a case; plans judge them.
#[derive(Clone, Debug)]
pub struct Case<'a> {
    /// The model.
    pub model: &'a Model,
    /// Its named dims and their extents.
    pub dims: Vec<(String, usize)>,
    /// What to plan for.
    pub target: Target,
    /// What is made of the graph before it is planned.
    pub recipe: Recipe,
}

impl Case<'_> {
    /// The graph as it is lowered when it is planned under a limit.
    ///
    /// # Errors
    /// When the model cannot be imported with these bindings, or a pass refuses it.
    pub fn graph(&self, limit: Option<u64>) -> Result<Graph> {
        self.recipe.graph(onnx::import(self.model, &self.dims)?, &self.target, &Limits { memory: limit })
    }

    /// Bytes that the case takes under a limit; more than the limit if it does not fit.
    ///
    /// # Errors
    /// When it cannot be planned at all.
    pub fn bytes(&self, limit: Option<u64>) -> Result<u64> {
        // What an import warns of was said when the case itself was imported.
        let silent = tracing::subscriber::NoSubscriber::default();
        let planned = tracing::subscriber::with_default(silent, || {
            plan::plan(&self.graph(limit)?, &self.target, &Limits { memory: limit })
        });
        match planned {
            Ok(plan) => Ok(plan.bytes()),
            Err(Error::Fit { needed, .. }) => Ok(needed),
            Err(error) => Err(error),
        }
    }

    /// This case by another recipe.
    fn with(&self, recipe: Recipe) -> Self {
        Case { recipe, ..self.clone() }
    }

    /// This case at another extent of a dim.
    pub fn with_dim(&self, dim: &str, extent: usize) -> Case<'_> {
        let mut case = self.clone();
        case.dims.retain(|(name, _)| name != dim);
        case.dims.push((dim.to_owned(), extent));
        case
    }
}

// ---- The largest binding

/// What a binding takes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Size {
    /// The dim's extent.
    pub extent: usize,
    /// Bytes of its plan, or why there is none.
    #[serde(flatten)]
    pub bytes: Taken,
}

/// Bytes of a plan, or why there is none.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub enum Taken {
    /// The plan's bytes.
    #[serde(rename = "planned_bytes")]
    Bytes(u64),
    /// The error.
    #[serde(rename = "error")]
    Fails(String),
}

impl Taken {
    fn new(result: Result<u64>) -> Taken {
        result.map_or_else(|error| Taken::Fails(error.to_string()), Taken::Bytes)
    }

    /// The plan's bytes, if it is within a limit.
    pub fn within(&self, limit: u64) -> Option<u64> {
        match self {
            Taken::Bytes(bytes) if *bytes <= limit => Some(*bytes),
            _ => None,
        }
    }
}

/// The largest extent of a dim that fits.
#[derive(Clone, Debug, Serialize)]
pub struct Largest {
    /// The dim.
    pub dim: String,
    /// The largest extent found that fits, if one does.
    pub fits: Option<Size>,
    /// What the next takes that can be planned, or why that one cannot be; if nothing fits, what the smallest takes that can be.
    pub next: Size,
    /// Number of plans that were made to find out.
    pub plans: usize,
}

/// So many extents are tried one by one before the search leaps, and so many where no other can be planned.
const EACH: usize = 64;
const EVERY: usize = 1 << 12;
/// Beyond an extent that was found, so many further ones are tried one by one.
const NEIGHBOURS: usize = 8;
/// And the next multiples of these, at which kernels have no ragged ends and layouts no padding.
const ROUND: [usize; 4] = [16, 32, 64, 128];

/// Extents one of which can hopefully be planned, the smallest first: small ones, those with small prime factors alone, as sizes that
/// people choose mostly have, and fractions of one that can be.
fn seeds(below: Option<usize>) -> BTreeSet<usize> {
    let smooth = |extent: &usize| {
        let divided = |mut rest: usize, prime: usize| {
            while rest.is_multiple_of(prime) {
                rest /= prime;
            }
            rest
        };
        [2, 3, 5, 7].into_iter().fold(*extent, divided) == 1
    };
    let fractions = (1..=EACH).filter_map(|part| below.filter(|b| b.is_multiple_of(part)).map(|b| b / part));
    (1..=EACH).chain((EACH..=EVERY).filter(smooth)).chain(fractions).collect()
}

/// The divisors of a number above 0, the smallest first.
fn divisors(number: usize) -> Vec<usize> {
    let root = number.isqrt();
    let small: Vec<usize> = (1..=root).filter(|&d| number.is_multiple_of(d)).collect();
    let large = small.iter().rev().map(|d| number / d).filter(|&d| d > root);
    small.iter().copied().chain(large).collect()
}

/// The largest extent from 1, and below `below` if that is given, whose plan is within `limit`.
///
/// A model may insist on a multiple of something, or on a least extent. So the two smallest extents that can be planned are found first, and
/// the search is among those that follow as far apart. What must divide an extent divides it and the next, so that both are sought among
/// divisors. The search doubles, then halves the interval, both of which take it that more never takes less. As that is nearly but not
/// always so, further extents beyond what was found are planned, too, and the search goes on from there if one fits. An extent that cannot
/// be planned does not fit.
///
/// # Errors
/// The first extent's error, when no extent that was tried can be planned.
pub fn largest(
    dim: &str,
    limit: u64,
    below: Option<usize>,
    measure: &mut dyn FnMut(usize) -> Result<u64>,
) -> Result<Largest> {
    let most = below.map_or(usize::MAX, |below| below.saturating_sub(1)).max(1);
    let mut known: BTreeMap<usize, Taken> = BTreeMap::new();
    let mut error = None;
    let mut take = |extent: usize| -> Taken {
        let found = known.entry(extent).or_insert_with(|| {
            let taken = measure(extent);
            Taken::new(taken.map_err(|e| {
                let text = e.to_string();
                error.get_or_insert(e);
                Error::usage(text)
            }))
        });
        found.clone()
    };
    let planned = |taken: Taken| matches!(taken, Taken::Bytes(_));
    let within = |taken: Taken| taken.within(limit).is_some();
    let mut found = seeds(below).into_iter().filter(|&extent| extent <= most).find(|&extent| planned(take(extent)));
    // Of what the extent has no bearing on, further extents tell nothing.
    if found.is_none() && (2..=EACH.min(most)).any(|extent| take(extent) != take(1)) {
        found = (EACH..=EVERY.min(most)).find(|&extent| planned(take(extent)));
    }
    let Some(found) = found else { return Err(error.expect("1 was tried")) };
    let smallest = divisors(found).into_iter().find(|&extent| planned(take(extent))).expect("itself can be planned");
    if !within(take(smallest)) {
        let next = Size { extent: smallest, bytes: take(smallest) };
        return Ok(Largest { dim: dim.to_owned(), fits: None, next, plans: known.len() });
    }
    let apart = (1..=EACH).chain(divisors(smallest).into_iter().filter(|&apart| apart > EACH));
    let mut more = apart.map(|apart| smallest.saturating_add(apart)).filter(|&extent| extent <= most);
    let second = more.find(|&extent| planned(take(extent)));
    let step = second.map_or(smallest, |second| second - smallest);

    // From here on extents are told by how many steps they are above the smallest.
    let at = |steps: usize| smallest.saturating_add(steps.saturating_mul(step));
    let last = (most - smallest) / step;
    let (mut low, mut high) = (0, last + 1);
    let mut steps = 1;
    while steps <= last {
        if !within(take(at(steps))) {
            high = steps;
            break;
        }
        low = steps;
        steps = steps.saturating_mul(2).saturating_add(1);
    }
    loop {
        while high - low > 1 {
            let middle = low + (high - low) / 2;
            if within(take(at(middle))) { low = middle } else { high = middle }
        }
        let near = (1..=NEIGHBOURS).map(|more| low.saturating_add(more));
        let round = ROUND.iter().filter_map(|&of| {
            (1..=of).map(|more| low.saturating_add(more)).find(|&steps| at(steps).is_multiple_of(of))
        });
        let beyond: Vec<usize> = near.chain(round).filter(|&steps| steps <= last).collect();
        let Some(further) = beyond.into_iter().filter(|&steps| within(take(at(steps)))).max() else { break };
        (low, high) = (further, further + 1);
    }
    let mut next = (1..=NEIGHBOURS).map(|more| at(low.saturating_add(more)));
    let next = next.find(|&extent| planned(take(extent))).unwrap_or(at(low.saturating_add(1)));
    let mut size = |extent| Size { extent, bytes: take(extent) };
    let (fits, next) = (Some(size(at(low))), size(next));
    Ok(Largest { dim: dim.to_owned(), fits, next, plans: known.len() })
}

/// The largest binding of one dim under which a case fits a limit, all else as it is; below the extent that it has, if it has one.
///
/// # Errors
/// As [`largest`].
pub fn largest_binding(case: &Case, dim: &str, limit: u64) -> Result<Largest> {
    let below = case.dims.iter().find(|(name, _)| name == dim).map(|(_, extent)| *extent);
    largest(dim, limit, below, &mut |extent| case.with_dim(dim, extent).bytes(Some(limit)))
}

// ---- Remedies

/// A change of a case, in words that a user can act on.
pub type Change<'a> = (String, Case<'a>);

/// What might help: a name, and the cases that come of it, if it applies. What a row offers can be given on the command line.
///
/// Rematerialisation, which is not there yet, is one more row, and a field of the [recipe](Recipe): a pass that lets values be computed again near
/// a late reader instead of kept for it. Nodes that it adds are ordered, placed and judged like all others, so that this is its one place here;
/// what it may add it decides by the [bytes across](crate::plan::tell::peak) the peak.
pub const REMEDIES: &[(&str, for<'a> fn(&Case<'a>) -> Vec<Change<'a>>)] = &[
    ("half the extent", halved),
    ("f16 values", narrowed),
    ("smaller workspaces", less_scratch),
    ("one lane", one_lane),
    ("fusion", other_fusion),
    ("chunks", chunked),
];

fn halved<'a>(case: &Case<'a>) -> Vec<Change<'a>> {
    let half = |at: usize| {
        let mut changed = case.clone();
        let (name, extent) = &mut changed.dims[at];
        *extent /= 2;
        (format!("--set {name}={extent}"), changed)
    };
    (0..case.dims.len()).filter(|&at| case.dims[at].1 > 1).map(half).collect()
}

fn narrowed<'a>(case: &Case<'a>) -> Vec<Change<'a>> {
    let change = || ("--f16".into(), case.with(Recipe { f16: true, ..case.recipe }));
    (!case.recipe.f16).then(change).into_iter().collect()
}

fn less_scratch<'a>(case: &Case<'a>) -> Vec<Change<'a>> {
    let with = |change: String, target: Target| (change, Case { target, ..case.clone() });
    match case.target.family {
        // Each thread has a workspace of its own.
        Family::Cpu => {
            let fewer = std::iter::successors(Some(case.target.threads / 2), |threads| Some(threads / 2));
            let fewer = fewer.take_while(|&threads| threads > 0);
            fewer.map(|n| with(format!("--threads {n}"), Target { threads: n, ..case.target.clone() })).collect()
        }
        Family::Cuda if case.target.libraries != Default::default() => {
            vec![with("--no-libraries".into(), Target { libraries: Default::default(), ..case.target.clone() })]
        }
        _ => Vec::new(),
    }
}

fn one_lane<'a>(case: &Case<'a>) -> Vec<Change<'a>> {
    let mut changed = case.clone();
    changed.target.lanes = 1;
    // Planning takes one lane before it refuses.
    let change = "a --memory-limit of as much, for which no steps run side by side";
    if case.target.lanes > 1 { vec![(change.into(), changed)] } else { Vec::new() }
}

fn other_fusion<'a>(case: &Case<'a>) -> Vec<Change<'a>> {
    let Recipe { fuse, .. } = case.recipe;
    let change = if fuse { "--no-fuse" } else { "without --no-fuse" };
    vec![(change.into(), case.with(Recipe { fuse: !fuse, ..case.recipe }))]
}

fn chunked<'a>(case: &Case<'a>) -> Vec<Change<'a>> {
    let nodes = case.model.proto.graph.as_ref().map_or(0, |graph| graph.node.len());
    let more = CHUNKS.into_iter().filter(|&chunks| chunks > case.recipe.chunks && nodes * chunks <= MAX_SEARCHED);
    let into = |chunks: usize| case.with(Recipe { chunks, ..case.recipe });
    let whole = (case.recipe.chunks > 1).then(|| ("without --chunks".into(), into(1)));
    whole.into_iter().chain(more.map(|chunks| (format!("--chunks {chunks}"), into(chunks)))).collect()
}

/// A remedy that was planned.
#[derive(Clone, Debug, Serialize)]
pub struct Remedy {
    /// Its name.
    pub name: &'static str,
    /// What is changed.
    pub change: String,
    /// What the plan takes then.
    #[serde(flatten)]
    pub bytes: Taken,
}

// ---- The answer

/// What a limit means for a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// In the file's order, too.
    Fits,
    /// In the order that was chosen, and not in the file's, whether parts of concatenations are written in place or copied.
    FitsReordered,
    /// Not as asked for, but with less of a named dim.
    FitsSmaller,
    /// Not these kernels at these bindings, in whatever order and placement: the [bound](plan::bound) is above the limit. Nor do smaller
    /// bindings of one dim. Other kernels may: see the [remedies](Advice::remedies).
    Cannot,
    /// No plan was found that fits, and no proof that there is none; or smaller bindings were sought in vain, as none can be planned.
    NotFound,
}

/// What a limit means for a case.
#[derive(Clone, Debug, Serialize)]
pub struct Answer {
    /// The limit.
    pub limit_bytes: u64,
    /// Bytes of the plan.
    pub needed_bytes: u64,
    /// Bytes over the limit.
    pub deficit_bytes: u64,
    /// In a word.
    pub verdict: Verdict,
    /// The least that the plan would take in the order of the file.
    pub file_order_bytes: Option<u64>,
    /// What no order and no placement can avoid, if the plan does not fit.
    pub bound: Option<Bound>,
    /// Per named dim, the largest binding that fits, if what was asked for does not.
    pub smaller: Vec<Largest>,
    /// Named dims of which no smaller extent was found that can be planned.
    pub rigid: Vec<Rigid>,
}

/// A dim of which no smaller extent was found that can be planned.
#[derive(Clone, Debug, Serialize)]
pub struct Rigid {
    /// The dim.
    pub dim: String,
    /// Why the smallest cannot be planned.
    pub error: String,
}

impl Answer {
    /// For a plan that was made under a limit and fits.
    pub fn of(plan: &Plan, limit: u64) -> Answer {
        let (needed_bytes, file_order_bytes) = (plan.bytes(), in_the_files_order(plan));
        let verdict = match file_order_bytes {
            Some(file) if file > limit => Verdict::FitsReordered,
            _ => Verdict::Fits,
        };
        let deficit_bytes = needed_bytes.saturating_sub(limit);
        Answer {
            limit_bytes: limit,
            needed_bytes,
            deficit_bytes,
            verdict,
            file_order_bytes,
            bound: None,
            smaller: Vec::new(),
            rigid: Vec::new(),
        }
    }

    /// For a plan that does not.
    fn against(case: &Case, graph: &Graph, plan: &Plan, limit: u64) -> Result<Answer> {
        let (mut smaller, mut rigid) = (Vec::new(), Vec::new());
        if plan.steps.len() <= MAX_SEARCHED {
            for (dim, _) in case.dims.iter().filter(|(_, extent)| *extent > 1) {
                match largest_binding(case, dim, limit) {
                    Ok(found) => smaller.push(found),
                    Err(error) => rigid.push(Rigid { dim: dim.clone(), error: error.to_string() }),
                }
            }
        }
        let bound = bound(graph, &case.target)?;
        let verdict = match smaller.iter().any(|found| found.fits.is_some()) {
            true => Verdict::FitsSmaller,
            false if bound.bytes > limit && rigid.is_empty() => Verdict::Cannot,
            false => Verdict::NotFound,
        };
        Ok(Answer { verdict, bound: Some(bound), smaller, rigid, ..Answer::of(plan, limit) })
    }
}

/// Who is live at the peak, and what would help; with what a limit means, if there is one.
#[derive(Clone, Debug, Serialize)]
pub struct Advice {
    /// What the limit means.
    #[serde(flatten)]
    pub answer: Option<Answer>,
    /// The least that the plan would take in the order of the file.
    #[serde(skip)]
    pub file_order_bytes: Option<u64>,
    /// Who is live.
    pub peak: Peak,
    /// What else was planned, and what it takes.
    pub remedies: Vec<Remedy>,
}

/// Numbers of chunks that are offered: each chunk's kernels have less to do at once.
const CHUNKS: [usize; 2] = [2, 4];

/// Above this many steps, the largest bindings that fit are not sought: each takes some twenty plans.
const MAX_SEARCHED: usize = 20_000;

/// Plans a case, and what would help it.
///
/// # Errors
/// When the case cannot be planned at all.
pub fn advise(case: &Case, limit: Option<u64>) -> Result<Advice> {
    let graph = case.graph(limit)?;
    let plan = match plan::plan(&graph, &case.target, &Limits { memory: limit }) {
        // The planner takes one lane before it gives up.
        Err(Error::Fit { .. }) => {
            let target = Target { lanes: 1, ..case.target.clone() };
            plan::plan(&graph, &target, &Limits { memory: None })?
        }
        plan => plan?,
    };
    let answer = match limit {
        Some(limit) if plan.bytes() > limit => Some(Answer::against(case, &graph, &plan, limit)?),
        Some(limit) => Some(Answer::of(&plan, limit)),
        None => None,
    };
    let mut remedies = Vec::new();
    for &(name, remedy) in REMEDIES {
        for (change, changed) in remedy(case) {
            remedies.push(Remedy { name, change, bytes: Taken::new(changed.bytes(limit)) });
        }
    }
    Ok(Advice { answer, file_order_bytes: in_the_files_order(&plan), peak: peak(&plan, Some(&graph)), remedies })
}

/// The least that the plan would take if its steps ran in the order of the file, whatever the placement. None if the plan, whose steps may
/// run side by side, takes less.
fn in_the_files_order(plan: &Plan) -> Option<u64> {
    let held = plan.bytes() - plan.class_bytes(Class::Activation);
    let of_the_file = plan.summary.orders.iter().filter(|order| order.is_of_the_file());
    let least = held + of_the_file.map(|order| order.bound).min()?;
    (least >= plan.bytes()).then_some(least)
}
