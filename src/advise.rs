//! What a memory limit means for a model, and what would help. Every figure is that of a plan, or of a [bound](crate::plan::bound).

use crate::error::{Error, Result};
use crate::graph::Graph;
use crate::onnx::{self, Model};
use crate::pass::{self, Pass, half};
use crate::plan::bound::{Bound, bound};
use crate::plan::{self, Class, Limits, Plan};
use crate::target::{Family, Target};
use serde::Serialize;
use std::collections::{BTreeMap, HashMap};

/// A model as it is to be planned. Remedies change a case; plans judge them.
#[derive(Clone, Debug)]
pub struct Case<'a> {
    /// The model.
    pub model: &'a Model,
    /// Its named dims and their extents.
    pub dims: Vec<(String, usize)>,
    /// What to plan for.
    pub target: Target,
    /// Whether neighbouring operators become one kernel.
    pub fuse: bool,
    /// Runs before the pipeline, if it is to.
    pub rewrite: Option<Pass>,
}

impl Case<'_> {
    /// The graph after all passes.
    ///
    /// # Errors
    /// When the model cannot be imported with these bindings, or a pass refuses it.
    pub fn graph(&self) -> Result<Graph> {
        let mut graph = onnx::import(self.model, &self.dims)?;
        if let Some(rewrite) = self.rewrite {
            graph.verify()?;
            rewrite(&mut graph, &self.target)?;
        }
        pass::run(&mut graph, &self.target, self.fuse)?;
        Ok(graph)
    }

    /// Bytes that the case takes under a limit; more than the limit if it does not fit.
    ///
    /// # Errors
    /// When it cannot be planned at all.
    pub fn bytes(&self, limit: Option<u64>) -> Result<u64> {
        // What an import warns of was said when the case itself was imported.
        let silent = tracing::subscriber::NoSubscriber::default();
        let planned = tracing::subscriber::with_default(silent, || {
            plan::plan(&self.graph()?, &self.target, &Limits { memory: limit })
        });
        match planned {
            Ok(plan) => Ok(plan.bytes()),
            Err(Error::Fit { needed, .. }) => Ok(needed),
            Err(error) => Err(error),
        }
    }

    fn with_dim(&self, dim: &str, extent: usize) -> Case<'_> {
        let mut case = self.clone();
        case.dims.retain(|(name, _)| name != dim);
        case.dims.push((dim.to_owned(), extent));
        case
    }
}

// ---- Who is live

/// A buffer that holds data at the peak.
#[derive(Clone, Debug, Serialize)]
pub struct Holder {
    /// The tensor's name.
    pub name: String,
    /// The operator that makes it.
    pub operator: String,
    /// The kernel that makes it.
    pub kernel: &'static str,
    /// What it is for.
    pub class: Class,
    /// Its bytes that no other holder counts.
    pub bytes: u64,
}

/// Several buffers as one line.
#[derive(Clone, Debug, Serialize)]
pub struct Rest {
    /// What they are for.
    pub class: Class,
    /// How many.
    pub count: usize,
    /// Bytes of their segments.
    pub bytes: u64,
    /// The largest of them, by name, if they are buffers.
    pub largest: Option<String>,
}

/// Where a plan's bytes are at the step that needs most of them. All parts together are the plan's bytes.
#[derive(Clone, Debug, Serialize)]
pub struct Peak {
    /// Position of the first step at which most bytes of the arena hold data; none without steps.
    pub step: Option<usize>,
    /// The node that it computes.
    pub name: String,
    /// That node's operator.
    pub operator: String,
    /// Number of steps.
    pub steps: usize,
    /// Bytes of the plan.
    pub bytes: u64,
    /// The largest holders in the arena, largest first.
    pub live: Vec<Holder>,
    /// The other holders in the arena.
    pub others: Rest,
    /// Bytes of the arena that hold nothing: alignment, gaps, steps that may run beside this one.
    pub idle_bytes: u64,
    /// What is held throughout, class by class.
    pub held: Vec<Rest>,
}

/// Holders that are listed one by one.
const LISTED: usize = 8;

/// Who is live at the peak of a plan. Operators are those of the graph that was planned; without one, kernels stand for them.
pub fn peak(plan: &Plan, graph: Option<&Graph>) -> Peak {
    let nodes = graph.and_then(|g| Some((g, g.order().ok()?)));
    let operators: HashMap<&str, &str> = nodes
        .iter()
        .flat_map(|(g, order)| order.iter().map(|&n| g.node(n)).filter(|n| n.op().is_some()))
        .map(|n| (n.name.as_str(), n.op_name()))
        .collect();
    let kernel = |step: usize| plan.kernels[plan.steps[step].kernel].template.name();
    let operator = |step: usize| {
        let name = plan.steps[step].name.as_str();
        operators.get(name).copied().unwrap_or_else(|| kernel(step)).to_owned()
    };

    // First and last use of each buffer.
    let mut uses: Vec<Option<(usize, usize)>> = vec![None; plan.buffers.len()];
    for (s, step) in plan.steps.iter().enumerate() {
        for &b in step.reads.iter().chain(&step.writes) {
            uses[b] = Some((uses[b].map_or(s, |(first, _)| first), s));
        }
    }
    let arena = |b: usize| plan.segments[plan.buffers[b].segment].class == Class::Activation;
    let used: Vec<(usize, usize, usize)> =
        (0..uses.len()).filter(|&b| arena(b)).filter_map(|b| uses[b].map(|(first, last)| (first, last, b))).collect();
    let mut starts: Vec<Vec<usize>> = vec![Vec::new(); plan.steps.len()];
    used.iter().for_each(|&(first, _, b)| starts[first].push(b));
    // Bytes that several buffers share count for the one that was made last: it is what they hold from now on.
    let mut live: BTreeMap<(usize, u64, usize), u64> = BTreeMap::new();
    let holders = |live: &BTreeMap<(usize, u64, usize), u64>| {
        let mut found: Vec<(usize, u64)> = Vec::new();
        let mut end = (usize::MAX, 0);
        let mut ranges: Vec<_> = live.iter().map(|(&(segment, from, b), &to)| (segment, from, to, b)).collect();
        ranges.sort_by_key(|&(segment, from, _, b)| (segment, from, std::cmp::Reverse(uses[b])));
        for (segment, from, to, b) in ranges {
            let from = if end.0 == segment { from.max(end.1) } else { from };
            found.push((b, to.saturating_sub(from)));
            end = (segment, if end.0 == segment { to.max(end.1) } else { to });
        }
        found
    };
    let mut best: Option<(u64, usize, Vec<(usize, u64)>)> = None;
    for (s, started) in starts.iter().enumerate() {
        for &b in started {
            let buffer = &plan.buffers[b];
            live.insert((buffer.segment, buffer.offset, b), buffer.offset + buffer.bytes);
        }
        live.retain(|&(_, _, b), _| uses[b].is_some_and(|(_, last)| last >= s));
        let found = holders(&live);
        let bytes = found.iter().map(|f| f.1).sum();
        if best.as_ref().is_none_or(|(most, ..)| bytes > *most) {
            best = Some((bytes, s, found));
        }
    }
    let (bytes, step, mut found) = best.map_or((0, None, Vec::new()), |(bytes, s, found)| (bytes, Some(s), found));

    found.retain(|f| f.1 > 0);
    found.sort_by_key(|&(b, bytes)| (std::cmp::Reverse(bytes), b));
    let mut others = Rest { class: Class::Activation, count: 0, bytes: 0, largest: None };
    let mut live = Vec::new();
    for (b, bytes) in found {
        if live.len() == LISTED {
            let largest = others.largest.take().unwrap_or_else(|| plan.buffers[b].name.clone());
            others = Rest { count: others.count + 1, bytes: others.bytes + bytes, largest: Some(largest), ..others };
            continue;
        }
        let maker = plan.steps.iter().position(|s| s.writes.contains(&b)).expect("a buffer of the arena is written");
        let buffer = &plan.buffers[b];
        let (operator, kernel) = (operator(maker), kernel(maker));
        live.push(Holder { name: buffer.name.clone(), operator, kernel, class: buffer.class, bytes });
    }
    let held = Class::ALL.into_iter().filter(|&class| class.segment() == class && class != Class::Activation);
    let held = held.filter_map(|class| {
        let bytes = plan.class_bytes(class);
        let of = || plan.buffers.iter().filter(|b| plan.segments[b.segment].class == class);
        let largest = of().max_by_key(|b| b.bytes).map(|b| b.name.clone());
        (bytes > 0).then(|| Rest { class, count: of().count(), bytes, largest })
    });
    Peak {
        step,
        name: step.map_or(String::new(), |s| plan.steps[s].name.clone()),
        operator: step.map_or(String::new(), &operator),
        steps: plan.steps.len(),
        bytes: plan.bytes(),
        live,
        others,
        idle_bytes: plan.class_bytes(Class::Activation) - bytes,
        held: held.collect(),
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
    /// What one more takes; if nothing fits, what the smallest takes.
    pub next: Size,
    /// Number of plans that were made to find out.
    pub plans: usize,
}

/// Beyond an extent that was found, so many further ones are tried one by one.
const NEIGHBOURS: usize = 8;
/// And the next multiples of these, at which kernels have no ragged ends and layouts no padding.
const ROUND: [usize; 4] = [16, 32, 64, 128];

/// The largest extent from 1 to `most` whose plan is within `limit`: doubling, then halving the interval, both of which take it that
/// more never takes less. As that is nearly but not always so, further extents beyond what was found are planned, too,
/// and the search goes on from there if one fits. An extent that cannot be planned does not fit.
///
/// # Errors
/// The first extent's error, when no extent that was tried can be planned.
pub fn largest(
    dim: &str,
    limit: u64,
    most: usize,
    measure: &mut dyn FnMut(usize) -> Result<u64>,
) -> Result<Largest> {
    let mut known: BTreeMap<usize, Taken> = BTreeMap::new();
    let mut first = None;
    let mut take = |extent: usize| -> Taken {
        let found = known.entry(extent).or_insert_with(|| {
            Taken::new(measure(extent).map_err(|error| {
                let text = error.to_string();
                first.get_or_insert(error);
                Error::Usage(text)
            }))
        });
        found.clone()
    };
    let (mut low, mut high) = (0, most.saturating_add(1));
    let mut extent = 1;
    while extent <= most {
        match take(extent) {
            // A model may insist on a multiple of something.
            Taken::Fails(_) if low == 0 && extent < 1 << 12 => {}
            taken if taken.within(limit).is_some() => low = extent,
            _ => {
                high = extent;
                break;
            }
        }
        let Some(twice) = extent.checked_mul(2) else { break };
        extent = twice;
    }
    while low > 0 {
        while high - low > 1 {
            let middle = low + (high - low) / 2;
            match take(middle).within(limit) {
                Some(_) => low = middle,
                None => high = middle,
            }
        }
        let near = (1..=NEIGHBOURS).map(|more| low.saturating_add(more));
        let round = ROUND.iter().filter_map(|of| low.checked_add(1)?.checked_next_multiple_of(*of));
        let beyond: Vec<usize> = near.chain(round).filter(|&extent| extent <= most).collect();
        let Some(further) = beyond.into_iter().filter(|&extent| take(extent).within(limit).is_some()).max() else {
            break;
        };
        (low, high) = (further, further + 1);
    }
    let next = Size { extent: low.saturating_add(1), bytes: take(low.saturating_add(1)) };
    let fits = (low > 0).then(|| Size { extent: low, bytes: take(low) });
    let plans = known.len();
    match first {
        Some(error) if known.values().all(|taken| matches!(taken, Taken::Fails(_))) => Err(error),
        _ => Ok(Largest { dim: dim.to_owned(), fits, next, plans }),
    }
}

/// The largest binding of one dim under which a case fits a limit, all else as it is; up to `most`.
///
/// # Errors
/// As [`largest`].
pub fn largest_binding(case: &Case, dim: &str, limit: u64, most: usize) -> Result<Largest> {
    largest(dim, limit, most, &mut |extent| case.with_dim(dim, extent).bytes(Some(limit)))
}

// ---- Remedies

/// A change of a case, in words that a user can act on.
pub type Change<'a> = (String, Case<'a>);

/// What might help: a name, and the cases that come of it, if it applies. Rematerialisation is to be one more row: a
/// [`rewrite`](Case::rewrite) of the graph.
pub const REMEDIES: &[(&str, for<'a> fn(&Case<'a>) -> Vec<Change<'a>>)] = &[
    ("half the extent", halved),
    ("f16 values", narrowed),
    ("smaller workspaces", less_scratch),
    ("one lane", one_lane),
    ("fusion", other_fusion),
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
    vec![("values and weights exported as f16".into(), Case { rewrite: Some(half::run), ..case.clone() })]
}

fn less_scratch<'a>(case: &Case<'a>) -> Vec<Change<'a>> {
    let mut changed = case.clone();
    let change = match case.target.family {
        // Each thread has a workspace of its own.
        Family::Cpu if case.target.threads > 1 => {
            changed.target.threads = 1;
            "--threads 1"
        }
        Family::Cuda if case.target.libraries != Default::default() => {
            changed.target.libraries = Default::default();
            "--no-libraries"
        }
        _ => return Vec::new(),
    };
    vec![(change.into(), changed)]
}

fn one_lane<'a>(case: &Case<'a>) -> Vec<Change<'a>> {
    let mut changed = case.clone();
    changed.target.lanes = 1;
    if case.target.lanes > 1 { vec![("no steps side by side".into(), changed)] } else { Vec::new() }
}

fn other_fusion<'a>(case: &Case<'a>) -> Vec<Change<'a>> {
    let change = if case.fuse { "--no-fuse" } else { "without --no-fuse" };
    vec![(change.into(), Case { fuse: !case.fuse, ..case.clone() })]
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
    /// In the order that was chosen, and not in the file's.
    FitsReordered,
    /// Not as asked for, but with less of a named dim.
    FitsSmaller,
    /// No order and no placement of these kernels fits: the [bound](plan::bound) is above the limit.
    Cannot,
    /// No plan was found that fits, and no proof that there is none.
    NotFound,
}

/// What a limit means for a case, and what would help.
#[derive(Clone, Debug, Serialize)]
pub struct Advice {
    /// The limit, if there is one.
    pub limit: Option<u64>,
    /// Bytes of the plan.
    pub needed: u64,
    /// Bytes over the limit.
    pub deficit: Option<u64>,
    /// The answer, if there is a limit.
    pub verdict: Option<Verdict>,
    /// What no order and no placement can avoid.
    pub bound: Bound,
    /// Per named dim, the largest binding that fits, if what was asked for does not.
    pub smaller: Vec<Largest>,
    /// Who is live.
    pub peak: Peak,
    /// What else was planned, and what it takes.
    pub remedies: Vec<Remedy>,
}

/// Above this many steps, the largest bindings that fit are not sought: each takes some twenty plans.
const MAX_SEARCHED: usize = 20_000;

/// Plans a case, and what would help it.
///
/// # Errors
/// When the case cannot be planned at all.
pub fn advise(case: &Case, limit: Option<u64>) -> Result<Advice> {
    let graph = case.graph()?;
    let plan = match plan::plan(&graph, &case.target, &Limits { memory: limit }) {
        // The planner takes one lane before it gives up.
        Err(Error::Fit { .. }) => {
            let target = Target { lanes: 1, ..case.target.clone() };
            plan::plan(&graph, &target, &Limits { memory: None })?
        }
        plan => plan?,
    };
    let needed = plan.bytes();
    let bound = bound(&graph, &case.target)?;
    let deficit = limit.map(|limit| needed.saturating_sub(limit));
    let mut smaller = Vec::new();
    if let Some(limit) = limit.filter(|&limit| needed > limit && plan.steps.len() <= MAX_SEARCHED) {
        for (dim, extent) in case.dims.iter().filter(|(_, extent)| *extent > 1) {
            // A dim that allows no other extent is no remedy.
            smaller.extend(largest_binding(case, dim, limit, extent - 1).ok());
        }
    }
    let verdict = limit.map(|limit| match needed <= limit {
        true if in_the_files_order(&plan) > limit => Verdict::FitsReordered,
        true => Verdict::Fits,
        false if smaller.iter().any(|found| found.fits.is_some()) => Verdict::FitsSmaller,
        false if bound.bytes > limit => Verdict::Cannot,
        false => Verdict::NotFound,
    });
    let mut remedies = Vec::new();
    for &(name, remedy) in REMEDIES {
        for (change, changed) in remedy(case) {
            remedies.push(Remedy { name, change, bytes: Taken::new(changed.bytes(limit)) });
        }
    }
    let peak = peak(&plan, Some(&graph));
    Ok(Advice { limit, needed, deficit, verdict, bound, smaller, peak, remedies })
}

/// Bytes of the plan if its steps ran in the order of the file.
fn in_the_files_order(plan: &Plan) -> u64 {
    plan.bytes()
}
