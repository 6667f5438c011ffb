//! Advice about a memory limit: whether a model fits it, and which changes would help.
//!
//! Every figure is that of a plan or of a [lower bound](crate::plan::fit::bound).

use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::file;
use crate::graph::Graph;
use crate::log::silent;
use crate::mesh::Mesh;
use crate::onnx::{self, Model};
use crate::pass::recompute::Recompute;
use crate::pass::shard::{DATA, Kept, Sharding, TENSOR};
use crate::pass::{Prepared, Quantize};
use crate::plan::fit::bound::{Bound, bound, together};
use crate::plan::tell::peak::{Peak, peak};
use crate::plan::{self, Class, Graphs, Job, Plan, Planned, Planner, Recipe, View};
use crate::target::{Family, Target};
use crate::train::curve::Point;
use crate::train::{self, Optimizer, Training};
use serde::Serialize;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::{self, Bound::Excluded, Bound::Included, Bound::Unbounded};
use std::path::Path;
use std::sync::Arc;

pub mod told;

/// Makes the programs of a case, for extents of its dims.
pub type Make = Arc<dyn Fn(&[(String, usize)]) -> Result<Vec<(String, Graphs)>> + Send + Sync>;

/// Programs and the settings to plan them with. A remedy is another case of the same programs.
#[derive(Clone)]
pub struct Case {
    /// Makes the programs.
    pub make: Make,
    /// Number of nodes in their files.
    pub nodes: usize,
    /// The named dims and their extents.
    pub dims: Vec<(String, usize)>,
    /// The device to plan for.
    pub target: Target,
    /// How the graphs are prepared before they are planned.
    pub recipe: Recipe,
    /// Runs at once.
    pub runs: u32,
    /// The mesh, if the programs run on one.
    pub sharding: Option<Sharding>,
}

impl Case {
    /// One run of a model.
    pub fn of(model: &Model, dims: Vec<(String, usize)>, target: Target, recipe: Recipe) -> Case {
        let nodes = model.proto.graph.as_ref().map_or(0, |graph| graph.node.len());
        let model = model.clone();
        let make = move |dims: &[(String, usize)]| Ok(vec![(String::new(), onnx::import(&model, dims)?.into())]);
        Case { make: Arc::new(make), nodes, dims, target, recipe, runs: 1, sharding: None }
    }

    /// The job under this limit.
    ///
    /// # Errors
    /// A program cannot be made with these bindings.
    pub fn job(&self, limit: Option<u64>) -> Result<Job> {
        let programs = (self.make)(&self.dims)?;
        let (recipe, runs, sharding) = (self.recipe, self.runs, self.sharding.clone());
        Ok(Job { recipe, runs, ..on(Job::new(programs, &self.target).within(limit), sharding) })
    }

    /// The bytes that the case needs if it is planned under this limit. They exceed the limit if it does not fit.
    ///
    /// # Errors
    /// The case cannot be planned at all.
    pub fn bytes(&self, limit: Option<u64>) -> Result<u64> {
        // The warnings of the import were shown when the user's own case was imported.
        silent(|| needed(&self.job(limit)?))
    }

    /// This case with another recipe.
    fn with(&self, recipe: Recipe) -> Self {
        Case { recipe, ..self.clone() }
    }

    /// This case with another extent of a dim.
    pub fn with_dim(&self, dim: &str, extent: usize) -> Case {
        let mut case = self.clone();
        case.dims.retain(|(name, _)| name != dim);
        case.dims.push((dim.to_owned(), extent));
        case
    }
}

/// The bytes that a job needs if it is planned under its limit. They exceed the limit if it does not fit.
///
/// # Errors
/// The job cannot be planned at all.
pub fn needed(job: &Job) -> Result<u64> {
    match plan::plan(job) {
        Ok(planned) => Ok(planned.plan.bytes()),
        Err(Error::Fit { needed, .. }) => Ok(needed),
        Err(error) => Err(error),
    }
}

/// A job on a mesh, if there is one.
fn on(job: Job, sharding: Option<Sharding>) -> Job {
    let ranks = sharding.as_ref().map_or(1, |sharding| sharding.mesh.ranks());
    Job { target: job.target.among(ranks), sharding, ..job }
}

/// Programs without the annotations of their files, for meshes that are looked for.
pub fn bare(graphs: &Graphs) -> Graphs {
    match graphs {
        Graphs::One(graph) => {
            let mut graph = Graph::clone(graph);
            graph.annotations = None;
            graph.into()
        }
        Graphs::Prepared(_) => graphs.clone(),
        Graphs::Range(source, dims) => {
            let source = Arc::clone(source);
            let bare = move |dims: &[(String, usize)]| {
                source(dims).map(|mut graph| {
                    graph.annotations = None;
                    graph
                })
            };
            Graphs::Range(Arc::new(bare), dims.clone())
        }
    }
}

// ---- The largest binding

/// An extent of a dim and the bytes that the model needs with it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Size {
    /// The dim's extent.
    pub extent: usize,
    /// The bytes of its plan, or why there is none.
    #[serde(flatten)]
    pub bytes: Taken,
}

/// The bytes of a plan, or why there is none.
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
    /// The next larger extent that can be planned, or that cannot; `None` if no larger one was asked for. If nothing fits, the smallest that
    /// can be planned.
    pub next: Option<Size>,
    /// Number of plans that the search made.
    pub plans: usize,
}

impl Largest {
    /// The largest extent that fits. `file` is the model's, for the error.
    ///
    /// # Errors
    /// [`Error::Fit`] when no extent fits; the error of the smallest, when it cannot be planned.
    pub fn or_refuse(&self, limit: u64, file: Option<&Path>) -> Result<&Size> {
        if let Some(fits) = &self.fits {
            return Ok(fits);
        }
        let least = self.next.as_ref().expect("if nothing fits, the smallest is known");
        Err(match &least.bytes {
            Taken::Bytes(needed) => {
                let what = format!("the plan at {}={}", self.dim, least.extent);
                Error::Fit { what, needed: *needed, limit, file: file.map(Into::into) }
            }
            // The error names its file already.
            Taken::Fails(error) => Error::usage(error.clone()),
        })
    }

    /// What is told of a search under a limit, as JSON.
    ///
    /// # Errors
    /// As [`or_refuse`](Self::or_refuse).
    pub fn told(&self, limit: u64, file: Option<&Path>) -> Result<Value> {
        let mut next = json!(self.next);
        if let Some(Size { bytes: Taken::Bytes(bytes), .. }) = &self.next {
            next["deficit_bytes"] = bytes.saturating_sub(limit).into();
        }
        let largest = self.or_refuse(limit, file)?;
        Ok(json!({"dim": self.dim, "limit_bytes": limit, "largest": largest, "next": next, "plans": self.plans}))
    }
}

/// The search plans each extent up to this one before it leaps.
const EACH: usize = 64;
/// The largest extent that the search tries to find one that can be planned at all.
const EVERY: usize = 1 << 12;
/// Extents that are tried one by one above the largest that was found.
const NEIGHBOURS: usize = 8;
/// The next multiples of these are tried, too: kernels have no ragged ends there, and layouts no padding.
const ROUND: [usize; 4] = [16, 32, 64, 128];

/// Extents that are likely to be plannable, the smallest first.
///
/// They are small extents, extents with small prime factors only, which people choose most, and fractions of `given`.
fn seeds(given: Option<usize>) -> BTreeSet<usize> {
    let smooth = |extent: &usize| {
        let divided = |mut rest: usize, prime: usize| {
            while rest.is_multiple_of(prime) {
                rest /= prime;
            }
            rest
        };
        [2, 3, 5, 7].into_iter().fold(*extent, divided) == 1
    };
    let fractions = (1..=EACH).filter_map(|part| given.filter(|g| g.is_multiple_of(part)).map(|g| g / part));
    (1..=EACH).chain((EACH..=EVERY).filter(smooth)).chain(fractions).collect()
}

/// The divisors of a number above 0, the smallest first.
fn divisors(number: usize) -> Vec<usize> {
    let root = number.isqrt();
    let small: Vec<usize> = (1..=root).filter(|&d| number.is_multiple_of(d)).collect();
    let large = small.iter().rev().map(|d| number / d).filter(|&d| d > root);
    small.iter().copied().chain(large).collect()
}

/// A search for the largest extent that fits. It remembers what each extent takes.
struct Search<'m> {
    limit: u64,
    /// The largest extent to try.
    most: usize,
    measure: &'m mut dyn FnMut(usize) -> Result<u64>,
    known: BTreeMap<usize, Taken>,
    /// The error of the first extent that could not be planned.
    error: Option<Error>,
}

impl Search<'_> {
    fn take(&mut self, extent: usize) -> Taken {
        if let Some(taken) = self.known.get(&extent) {
            return taken.clone();
        }
        let taken = match (self.measure)(extent) {
            Ok(bytes) => Taken::Bytes(bytes),
            Err(error) => {
                let text = error.to_string();
                self.error.get_or_insert(error);
                Taken::Fails(text)
            }
        };
        self.known.insert(extent, taken.clone());
        taken
    }

    fn is_planned(&mut self, extent: usize) -> bool {
        matches!(self.take(extent), Taken::Bytes(_))
    }

    fn fits(&mut self, extent: usize) -> bool {
        self.take(extent).within(self.limit).is_some()
    }

    fn size(&mut self, extent: usize) -> Size {
        Size { extent, bytes: self.take(extent) }
    }

    /// An extent that can be planned, if one is found.
    fn any(&mut self, given: Option<usize>) -> Option<usize> {
        let most = self.most;
        let seed = seeds(given).into_iter().filter(|&extent| extent <= most).find(|&extent| self.is_planned(extent));
        // If all small extents fail in the same way, the extent is not the reason, and others fail as well.
        if seed.is_none() && (2..=EACH.min(most)).any(|extent| self.take(extent) != self.take(1)) {
            return (EACH..=EVERY.min(most)).find(|&extent| self.is_planned(extent));
        }
        seed
    }

    /// The extents from `smallest` on, as far apart as `smallest` and the next one that can be planned.
    fn grid(&mut self, smallest: usize) -> Grid {
        let most = self.most;
        let apart = (1..=EACH).chain(divisors(smallest).into_iter().filter(|&apart| apart > EACH));
        let mut next = apart.map(|apart| smallest.saturating_add(apart)).filter(|&extent| extent <= most);
        let step = next.find(|&extent| self.is_planned(extent)).map_or(smallest, |second| second - smallest);
        Grid { smallest, step, last: (most - smallest) / step }
    }

    /// The last point between two others, of which one fits and the other does not, that fits if bytes grow evenly. `None` if the bytes of
    /// one are not known.
    fn even(&self, grid: &Grid, low: usize, high: usize) -> Option<usize> {
        let bytes = |point| match self.known.get(&grid.extent(point)) {
            Some(Taken::Bytes(bytes)) => Some(*bytes),
            _ => None,
        };
        let (less, more) = (bytes(low)?, bytes(high)?);
        let part = self.limit.saturating_sub(less) as f64 / more.saturating_sub(less).max(1) as f64;
        Some((low + ((high - low) as f64 * part) as usize).clamp(low + 1, high - 1))
    }

    /// The largest point of the grid that fits. Point 0 must fit.
    ///
    /// Doubling finds a point that does not fit. The border below it is sought where it would be if bytes grew evenly; each third point halves
    /// the rest instead. Both assume that a larger extent takes no fewer bytes, which is nearly always so. So some points above the border
    /// are tried, too, and the search goes on from one that fits.
    fn climb(&mut self, grid: &Grid) -> usize {
        let (mut low, mut high) = (0, grid.last + 1);
        let mut point = 1;
        while point <= grid.last {
            if !self.fits(grid.extent(point)) {
                high = point;
                break;
            }
            low = point;
            point = point.saturating_mul(2).saturating_add(1);
        }
        loop {
            for turn in 1.. {
                if high - low <= 1 {
                    break;
                }
                let even = if turn % 3 == 0 { None } else { self.even(grid, low, high) };
                let middle = even.unwrap_or(low + (high - low) / 2);
                if self.fits(grid.extent(middle)) { low = middle } else { high = middle }
            }
            let Some(further) = grid.beyond(low).into_iter().filter(|&point| self.fits(grid.extent(point))).max()
            else {
                return low;
            };
            (low, high) = (further, further + 1);
        }
    }
}

/// The extents `smallest`, `smallest + step` and so on. Points 0 to `last` are within the search.
struct Grid {
    smallest: usize,
    step: usize,
    last: usize,
}

impl Grid {
    fn extent(&self, point: usize) -> usize {
        self.smallest.saturating_add(point.saturating_mul(self.step))
    }

    /// Points above `low` that may fit although a lower one does not: its neighbours, and round extents.
    fn beyond(&self, low: usize) -> Vec<usize> {
        let near = (1..=NEIGHBOURS).map(|more| low.saturating_add(more));
        let round = ROUND.iter().filter_map(|&of| {
            (1..=of).map(|more| low.saturating_add(more)).find(|&point| self.extent(point).is_multiple_of(of))
        });
        near.chain(round).filter(|&point| point <= self.last).collect()
    }
}

/// Finds the largest extent, from 1 on and up to `most`, whose plan is within `limit`. `measure` plans an extent.
///
/// An excluded `most` may still be reported as the next larger extent. Nothing above an included one is planned.
///
/// A model may need a multiple of some number, or a least extent. So the search first finds the two smallest extents that can
/// be planned, and then looks only at extents that are as far apart as these two. A number that must divide the extent divides
/// both, so the two are sought among divisors. An extent that cannot be planned does not fit.
///
/// # Errors
/// The error of the first extent, if no extent that was tried can be planned.
pub fn largest(
    dim: &str,
    limit: u64,
    most: ops::Bound<usize>,
    measure: &mut dyn FnMut(usize) -> Result<u64>,
) -> Result<Largest> {
    let (given, most, end) = match most {
        Included(given) => (Some(given), given, given),
        Excluded(given) => (Some(given), given.saturating_sub(1), usize::MAX),
        Unbounded => (None, usize::MAX, usize::MAX),
    };
    let mut search = Search { limit, most: most.max(1), measure, known: BTreeMap::new(), error: None };
    let Some(found) = search.any(given) else { return Err(search.error.expect("1 was tried")) };
    let mut least = divisors(found).into_iter();
    let smallest = least.find(|&extent| search.is_planned(extent)).expect("itself can be planned");
    let (mut fits, mut next) = (None, Some(search.size(smallest)));
    if search.fits(smallest) {
        let grid = search.grid(smallest);
        let low = search.climb(&grid);
        let above = (1..=NEIGHBOURS).map(|more| grid.extent(low.saturating_add(more)));
        let above: Vec<usize> = above.filter(|&extent| extent <= end).collect();
        let planned = above.iter().copied().find(|&extent| search.is_planned(extent));
        fits = Some(search.size(grid.extent(low)));
        next = planned.or(above.first().copied()).map(|extent| search.size(extent));
    }
    Ok(Largest { dim: dim.to_owned(), fits, next, plans: search.known.len() })
}

/// Finds the largest extent of one dim with which a case fits a limit, if nothing else changes. If the dim is bound, only smaller
/// extents are tried.
///
/// # Errors
/// Those of [`largest`].
pub fn largest_binding(case: &Case, dim: &str, limit: u64) -> Result<Largest> {
    let below = case.dims.iter().find(|(name, _)| name == dim).map_or(Unbounded, |(_, extent)| Excluded(*extent));
    largest(dim, limit, below, &mut |extent| case.with_dim(dim, extent).bytes(Some(limit)))
}

/// Rows that a model is likely to take, if it takes any: all are tried before a search is given up.
const LIKELY: [usize; 12] = [2, 1, 3, 4, 5, 6, 7, 8, 16, 32, 64, 128];

/// The error of a training that cannot be planned, if the rows are not the reason: all [`LIKELY`] ones fail alike, but for numbers. One row
/// alone may fail in a way of its own, as in a norm.
fn hopeless(most: usize, measure: &mut dyn FnMut(usize) -> Result<u64>) -> Option<Error> {
    let text = |error: &Error| error.to_string().replace(|c: char| c.is_ascii_digit(), "");
    let mut first: Option<Error> = None;
    for rows in LIKELY.into_iter().filter(|&rows| rows <= most) {
        match (measure(rows), &first) {
            (Ok(_) | Err(Error::Fit { .. }), _) => return None,
            (Err(error), None) => first = Some(error),
            (Err(error), Some(first)) if rows > 1 && text(&error) != text(first) => return None,
            _ => {}
        }
    }
    first
}

/// Finds the largest batch of a training, in parts of equal rows, whose plan is within `limit`. `measure` plans a batch. The search is over the
/// rows of one part of an update, which decide about the bytes; `most` bounds them.
///
/// # Errors
/// The first error, if no number of rows can be planned.
pub fn largest_batch(
    parts: usize,
    limit: u64,
    most: ops::Bound<usize>,
    measure: &mut dyn FnMut(usize) -> Result<u64>,
) -> Result<Largest> {
    let mut of_rows = |rows: usize| measure(rows.saturating_mul(parts));
    let most_rows = if let Included(rows) = most { rows } else { usize::MAX };
    if let Some(error) = hopeless(most_rows, &mut of_rows) {
        return Err(error);
    }
    let mut found = largest("batch", limit, most, &mut of_rows)?;
    for size in found.fits.iter_mut().chain(&mut found.next) {
        size.extent = size.extent.saturating_mul(parts);
    }
    Ok(found)
}

// ---- Remedies

/// A changed case, with the flags that make the change.
pub type Change = (String, Case);

/// The remedies: a name, and a function that returns the changed cases, none if the remedy does not apply.
///
/// Every change can be made on the command line. What planning does by itself under a limit is no remedy: it computes values of a training
/// again.
pub const REMEDIES: &[Way<fn(&Case) -> Vec<Change>>] = &[
    Way::all("half the extent", halved),
    Way::all("f16 values", narrowed),
    Way::all("weights in 4 bits", quantized),
    Way::all("smaller workspaces", less_scratch),
    Way::all("one stream", one_stream),
    Way::all("fusion", other_fusion),
    // More chunks save more bytes, but each chunk's kernels have less to do.
    Way { name: "chunks", changes: chunked, always: 2 },
    Way { name: "one of several cards", changes: cards, always: 0 },
];

/// A way to need fewer bytes.
pub struct Way<C> {
    /// The remedy's name.
    pub name: &'static str,
    /// Returns the changed cases, each with the flags that make it; none if the remedy does not apply.
    pub changes: C,
    /// The changes that are planned in any case. Further ones are planned only as long as none of the remedy fits.
    always: usize,
}

impl<C: Copy> Way<C> {
    /// A remedy of which all changes are planned.
    const fn all(name: &'static str, changes: C) -> Way<C> {
        Way { name, changes, always: usize::MAX }
    }

    /// Plans changes, in their order. `within` plans one, and says whether it fits; none leaves it out.
    fn planned<T>(
        &self,
        changes: Vec<(String, T)>,
        mut within: impl FnMut(T) -> Option<(Taken, bool)>,
    ) -> impl Iterator<Item = Remedy> {
        let (mut tried, mut fits) = (0, false);
        let (name, always) = (self.name, self.always);
        changes
            .into_iter()
            .map_while(move |(change, changed)| {
                if fits && tried >= always {
                    return None;
                }
                tried += 1;
                Some(within(changed).map(|(bytes, own)| {
                    fits |= own;
                    Remedy { name, change, bytes }
                }))
            })
            .flatten()
    }
}

fn halved(case: &Case) -> Vec<Change> {
    let half = |at: usize| {
        let mut changed = case.clone();
        let (name, extent) = &mut changed.dims[at];
        *extent /= 2;
        (format!("--set {name}={extent}"), changed)
    };
    (0..case.dims.len()).filter(|&at| case.dims[at].1 > 1).map(half).collect()
}

fn narrowed(case: &Case) -> Vec<Change> {
    let change = || ("--f16".into(), case.with(Recipe { f16: true, ..case.recipe }));
    (!case.recipe.f16).then(change).into_iter().collect()
}

fn quantized(case: &Case) -> Vec<Change> {
    let quantize = Quantize { bits: 4, block: 32 };
    let change = || (format!("--quantize {quantize}"), case.with(Recipe { quantize: Some(quantize), ..case.recipe }));
    case.recipe.quantize.is_none().then(change).into_iter().collect()
}

fn less_scratch(case: &Case) -> Vec<Change> {
    let with = |change: String, target: Target| (change, Case { target, ..case.clone() });
    match case.target.family {
        // Every thread has its own workspace, so fewer threads need fewer bytes.
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

fn one_stream(case: &Case) -> Vec<Change> {
    let mut changed = case.clone();
    changed.target.streams = 1;
    // Under a limit, planning tries a single stream before it refuses.
    let change = "a --memory-limit of this many bytes: no steps then run at the same time";
    if case.target.streams > 1 { vec![(change.into(), changed)] } else { Vec::new() }
}

fn other_fusion(case: &Case) -> Vec<Change> {
    let Recipe { fuse, .. } = case.recipe;
    let change = if fuse { "--no-fuse" } else { "without --no-fuse" };
    vec![(change.into(), case.with(Recipe { fuse: !fuse, ..case.recipe }))]
}

fn chunked(case: &Case) -> Vec<Change> {
    if case.sharding.is_some() {
        return Vec::new();
    }
    let nodes = case.nodes;
    let more = CHUNKS.into_iter().filter(|&chunks| chunks > case.recipe.chunks && nodes * chunks <= MAX_CHUNKED);
    let into = |chunks: usize| case.with(Recipe { chunks, ..case.recipe });
    let whole = (case.recipe.chunks > 1).then(|| ("without --chunks".into(), into(1)));
    whole.into_iter().chain(more.map(|chunks| (format!("--chunks {chunks}"), into(chunks)))).collect()
}

/// The numbers of cards that remedies try.
const CARDS: [usize; 3] = [2, 4, 8];

/// The mesh of so many cards along one axis, and the flags that ask for it.
fn several(axis: &str, cards: usize, kept: Kept) -> Option<(String, Sharding)> {
    let mesh = Mesh::new([(axis, cards)]).ok()?;
    let shares = if kept == Kept::Whole { String::new() } else { format!(" --shard-states {}", kept as usize) };
    Some((format!("--mesh {mesh}{shares}"), Sharding { mesh, kept, ..Sharding::default() }))
}

/// True if programs on one device may run on several.
fn may_spread(target: &Target, sharding: Option<&Sharding>, runs: u32, recipe: &Recipe) -> bool {
    target.family != Family::Wgpu && sharding.is_none() && runs == 1 && recipe.chunks <= 1
}

/// Weights that several cards share out, as it suits.
fn cards(case: &Case) -> Vec<Change> {
    if !may_spread(&case.target, case.sharding.as_ref(), case.runs, &case.recipe) {
        return Vec::new();
    }
    let make = Arc::clone(&case.make);
    let made = move |dims: &[(String, usize)]| {
        let programs = make(dims)?.into_iter().map(|(name, graphs)| (name, bare(&graphs)));
        Ok(programs.collect())
    };
    let made: Make = Arc::new(made);
    let on = |(change, sharding)| (change, Case { make: Arc::clone(&made), sharding: Some(sharding), ..case.clone() });
    CARDS.into_iter().filter_map(|cards| several(TENSOR, cards, Kept::Whole)).map(on).collect()
}

/// A remedy that was planned.
#[derive(Clone, Debug, Serialize)]
pub struct Remedy {
    /// The remedy's name.
    pub name: &'static str,
    /// The flags that make the change.
    pub change: String,
    /// The bytes of the changed case.
    #[serde(flatten)]
    pub bytes: Taken,
}

// ---- The answer

/// The answer in one word.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// The plan fits. The file's order may fit, too.
    Fits,
    /// The plan fits in the order that was chosen. In the file's order nothing fits, whether the parts of concatenations are
    /// written in place or copied.
    FitsReordered,
    /// The plan does not fit, but one with a smaller extent of a named dim does.
    FitsSmaller,
    /// No order and no placement of these kernels fits: the [bound](crate::plan::fit::bound) exceeds the limit. Smaller extents of one dim do
    /// not fit either. Other kernels may: see the [remedies](Advice::remedies).
    Cannot,
    /// No plan that fits was found, but there is no proof that none exists. Or no smaller extent of a dim can be planned.
    NotFound,
}

/// The answer to whether a case fits a limit.
#[derive(Clone, Debug, Serialize)]
pub struct Answer {
    /// The limit.
    pub limit_bytes: u64,
    /// Bytes of the plan.
    pub needed_bytes: u64,
    /// Bytes of the plan over the limit.
    pub deficit_bytes: u64,
    /// Bytes of the constants, which every plan of these kernels takes.
    pub constant_bytes: u64,
    /// The answer in one word.
    pub verdict: Verdict,
    /// The fewest bytes that a plan in the file's order takes.
    pub file_order_bytes: Option<u64>,
    /// The bytes that every order and placement takes, if the plan does not fit.
    pub bound: Option<Bound>,
    /// Per named dim, the largest extent that fits, if the plan does not.
    pub smaller: Vec<Largest>,
    /// Named dims for which no smaller extent can be planned.
    pub rigid: Vec<Rigid>,
}

/// A dim for which the search found no smaller extent that can be planned.
#[derive(Clone, Debug, Serialize)]
pub struct Rigid {
    /// The dim.
    pub dim: String,
    /// The error of the smallest extent.
    pub error: String,
}

impl Answer {
    /// The answer for a plan that fits the limit.
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
            constant_bytes: plan.class_bytes(Class::Constant) * plan.copies(Class::Constant),
            verdict,
            file_order_bytes,
            bound: None,
            smaller: Vec::new(),
            rigid: Vec::new(),
        }
    }

    /// The answer for a plan that exceeds the limit.
    fn against(case: &Case, graphs: &[Prepared], plan: &Plan, limit: u64) -> Result<Answer> {
        let (mut smaller, mut rigid) = (Vec::new(), Vec::new());
        let is_searched = plan.programs.iter().map(|program| program.steps.len()).sum::<usize>() <= MAX_SEARCHED
            || case.dims.iter().all(|(_, extent)| *extent <= 1);
        if is_searched {
            for (dim, _) in case.dims.iter().filter(|(_, extent)| *extent > 1) {
                match largest_binding(case, dim, limit) {
                    Ok(found) => smaller.push(found),
                    Err(error) => rigid.push(Rigid { dim: dim.clone(), error: error.to_string() }),
                }
            }
        }
        let bound = match graphs {
            [graph] => bound(graph, &case.target)?,
            graphs => together(graphs, &case.target)?,
        };
        let verdict = if smaller.iter().any(|found| found.fits.is_some()) {
            Verdict::FitsSmaller
        } else if bound.bytes > limit && is_searched && rigid.is_empty() {
            Verdict::Cannot
        } else {
            Verdict::NotFound
        };
        Ok(Answer { verdict, bound: Some(bound), smaller, rigid, ..Answer::of(plan, limit) })
    }
}

/// The tensors that are live at the peak, the remedies, and the answer for a limit if there is one.
#[derive(Clone, Debug, Serialize)]
pub struct Advice {
    /// The answer for the limit.
    #[serde(flatten)]
    pub answer: Option<Answer>,
    /// The fewest bytes that a plan in the file's order takes.
    #[serde(skip)]
    pub file_order_bytes: Option<u64>,
    /// The peak and the tensors that are live there.
    pub peak: Peak,
    /// The remedies that were planned.
    pub remedies: Vec<Remedy>,
}

/// The numbers of chunks that the remedy tries.
const CHUNKS: [usize; 4] = [2, 4, 8, 16];
/// The most nodes, over all chunks, with which chunks are tried: each number of them is a plan.
const MAX_CHUNKED: usize = 20_000;

/// The most steps with which smaller extents are sought: each search makes about twenty plans.
const MAX_SEARCHED: usize = 20_000;

/// Plans a case and every remedy for it.
///
/// # Errors
/// The case cannot be planned at all.
pub fn advise(case: &Case, limit: Option<u64>) -> Result<Advice> {
    let job = case.job(limit)?;
    let mut planner = Planner::new(&job)?;
    let planned = match planner.within(limit) {
        // The plan that was refused: it fits the bytes that it takes.
        Err(Error::Fit { needed, .. }) => planner.within(Some(needed))?,
        planned => planned?,
    };
    let plan = &planned.plan;
    let answer = match limit {
        Some(limit) if plan.bytes() > limit => Some(Answer::against(case, &planner.graphs(Some(limit))?, plan, limit)?),
        Some(limit) => Some(Answer::of(plan, limit)),
        None => None,
    };
    let mut remedies = Vec::new();
    for way in REMEDIES {
        remedies.extend(way.planned((way.changes)(case), |changed| {
            let bytes = Taken::new(changed.bytes(limit));
            let fits = limit.is_none_or(|limit| bytes.within(limit).is_some());
            // What cannot be split is no remedy.
            let looked_for = case.sharding.is_none() && changed.sharding.is_some();
            (!looked_for || matches!(bytes, Taken::Bytes(_))).then_some((bytes, fits))
        }));
    }
    Ok(Advice::of(&planned, answer, remedies))
}

impl Advice {
    fn of(planned: &Planned, answer: Option<Answer>, remedies: Vec<Remedy>) -> Advice {
        let (program, graph) = fullest(planned);
        let peak = peak(program, Some(graph));
        Advice { answer, file_order_bytes: in_the_files_order(&planned.plan), peak, remedies }
    }
}

/// The program that needs the most arena, and its graph.
///
/// # Panics
/// When the plan has no programs.
pub fn fullest(planned: &Planned) -> (View<'_>, &Graph) {
    let programs = planned.plan.views().zip(&planned.graphs);
    programs.rev().max_by_key(|(program, _)| program.summary.lower_bound).expect("a plan has a program")
}

/// The fewest bytes that the steps of a plan of one program take in the file's order, in any placement.
///
/// `None` if that is less than the plan: its steps may run at the same time, which takes more.
fn in_the_files_order(plan: &Plan) -> Option<u64> {
    if plan.programs.len() > 1 {
        return None;
    }
    let copies = plan.copies(Class::Activation);
    let resident = plan.bytes() - copies * plan.class_bytes(Class::Activation);
    let of_the_file = plan.programs[0].summary.orders.iter().filter(|order| order.is_of_the_file());
    let least = resident + copies * of_the_file.map(|order| order.bound).min()?;
    (least >= plan.bytes()).then_some(least)
}

// ---- Trainings

/// The training of a model, and the settings to plan it with. A remedy is another training of the same model.
#[derive(Clone, Debug)]
pub struct Trained {
    /// The model.
    pub model: Model,
    /// The named dims and their extents, but for the batch.
    pub dims: Vec<(String, usize)>,
    /// The rows of an update.
    pub batch: usize,
    /// How it is trained.
    pub training: Training,
    /// The device to plan for.
    pub target: Target,
    /// How the graphs are prepared before they are planned.
    pub recipe: Recipe,
    /// Runs at once.
    pub runs: u32,
    /// The mesh, if it runs on one.
    pub sharding: Option<Sharding>,
}

impl Trained {
    /// The job of its programs.
    ///
    /// # Errors
    /// Those of [`train::programs_of_file`].
    pub fn job(&self) -> Result<Job> {
        let programs = train::programs_of_file(self.model.clone(), self.dims.clone(), self.batch, &self.training)?;
        let (recipe, runs, sharding) = (self.recipe, self.runs, self.sharding.clone());
        Ok(Job { recipe, runs, ..on(Job::new(programs.named(), &self.target), sharding) })
    }

    /// The bytes that it needs if its updates have one part, where they are fewer than these: each part adds its gradients to sums, which take as
    /// much as the weights.
    ///
    /// # Errors
    /// As [`job`](Self::job).
    pub fn undivided(&self, bytes: u64, limit: Option<u64>) -> Result<Option<u64>> {
        if self.training.accumulate == 1 {
            return Ok(None);
        }
        let training = Training { accumulate: 1, ..self.training.clone() };
        Ok(Trained { training, ..self.clone() }.bytes(limit)?.filter(|&whole| whole < bytes))
    }

    /// The bytes that it needs if it is planned under a limit. They exceed the limit if it does not fit. `None` if that is known without a
    /// plan.
    fn bytes(&self, limit: Option<u64>) -> Result<Option<u64>> {
        let silent = tracing::subscriber::NoSubscriber::default();
        tracing::subscriber::with_default(silent, || {
            let job = self.job()?;
            let mut planner = Planner::new(&job)?;
            if limit.map_or(Ok(false), |limit| Ok::<_, Error>(planner.bound()?.bytes > limit))? {
                return Ok(None);
            }
            match planner.within(limit) {
                Ok(planned) => Ok(Some(planned.plan.bytes())),
                Err(Error::Fit { needed, .. }) => Ok(Some(needed)),
                Err(error) => Err(error),
            }
        })
    }

    /// The remedies that were planned under this limit. The first is to compute again what the plan of the fewest bytes does.
    fn remedies(&self, whole: &Point, least: &Point, limit: Option<u64>) -> Vec<Remedy> {
        let mut remedies = Vec::new();
        if least.planned_bytes < whole.planned_bytes {
            let bytes = least.planned_bytes;
            let change = format!(
                "--memory-limit {bytes}: {:.1} % more operations, {:.1} % without a limit",
                100.0 * least.recompute.share(),
                100.0 * whole.recompute.share()
            );
            remedies.push(Remedy { name: "recomputation", change, bytes: Taken::Bytes(bytes) });
        }
        for way in TRAINING_REMEDIES {
            let mut tried = 0;
            remedies.extend(way.planned((way.changes)(self), |changed| {
                tried += 1;
                let is_on_mesh = changed.sharding.is_some();
                let bytes = match changed.bytes(limit).transpose() {
                    // What fits no plan of these kernels is planned without the limit, if in any case.
                    None if tried <= way.always => changed.bytes(None).transpose()?,
                    bytes => bytes?,
                };
                let bytes = Taken::new(bytes);
                let fits = limit.is_none_or(|limit| bytes.within(limit).is_some());
                let looked_for = self.sharding.is_none() && is_on_mesh;
                (!looked_for || matches!(bytes, Taken::Bytes(_))).then_some((bytes, fits))
            }));
        }
        remedies
    }
}

/// A change of a training, with the flag that makes it.
type Retrained = (String, Trained);

/// The remedies for a training: a name, and a function that returns the changed trainings, none if the remedy does not apply. Of several, the
/// first that fits is the last that is planned; those that no plan makes fit are left out, beyond those that are planned in any case: what
/// optimizers and frozen weights take is told even if it is not enough, and that accumulation takes more.
pub const TRAINING_REMEDIES: &[Way<fn(&Trained) -> Vec<Retrained>>] = &[
    Way::all("smaller optimizer", smaller_optimizer),
    Way::all("the last layer alone", last_layer),
    Way { name: "accumulation", changes: accumulated, always: 1 },
    Way { name: "smaller batch", changes: fewer_rows, always: 0 },
    Way { name: "halves", changes: halves, always: 0 },
    Way { name: "one of several cards", changes: sharing, always: 0 },
];

/// The most times that a batch is halved.
const HALVED: usize = 4;

/// An optimizer that keeps less per weight.
fn smaller_optimizer(case: &Trained) -> Vec<Retrained> {
    let sgd = |change: &str, momentum: f64| {
        let optimizer = Optimizer::Sgd { momentum, nesterov: false };
        (change.to_owned(), Trained { training: Training { optimizer, ..case.training.clone() }, ..case.clone() })
    };
    match case.training.optimizer {
        Optimizer::Adam { .. } => vec![sgd("--optimizer sgd --momentum 0.9", 0.9), sgd("--optimizer sgd", 0.0)],
        Optimizer::Sgd { momentum, nesterov: false } if momentum != 0.0 => vec![sgd("--momentum 0", 0.0)],
        Optimizer::Sgd { .. } => Vec::new(),
    }
}

/// All weights frozen but those of the last layer: of the name, up to its last part, that the last node has which reads a weight.
fn last_layer(case: &Trained) -> Vec<Retrained> {
    let made = train::programs_of_file(case.model.clone(), case.dims.clone(), case.batch, &case.training);
    let (Ok(made), Some(graph)) = (made, &case.model.proto.graph) else { return Vec::new() };
    let trained = made.outline.trained;
    let mut read = graph.node.iter().rev().flat_map(|node| &node.input);
    let Some(last) = read.find(|input| trained.contains(input)).filter(|_| case.training.only.is_empty()) else {
        return Vec::new();
    };
    let pattern = last.rfind(['.', '/']).map_or_else(|| last.clone(), |end| format!("{}*", &last[..=end]));
    if trained.iter().all(|name| file::glob(&pattern, name)) {
        return Vec::new();
    }
    let change = format!("--train-only '{pattern}'");
    let training = Training { only: vec![pattern], ..case.training.clone() };
    vec![(change, Trained { training, ..case.clone() })]
}

/// More parts of an update: 2 to 16 times as many. With fewer rows than a sixteenth, a part loses more speed than its bytes are worth.
fn accumulated(case: &Trained) -> Vec<Retrained> {
    let rows = case.batch / case.training.accumulate.max(1);
    let more = (1..=HALVED).map(|times| 1 << times).filter(|parts| rows.is_multiple_of(*parts));
    let with = |parts: usize| {
        let accumulate = case.training.accumulate * parts;
        let training = Training { accumulate, ..case.training.clone() };
        (format!("--accumulate {accumulate}"), Trained { training, ..case.clone() })
    };
    more.map(with).collect()
}

fn fewer_rows(case: &Trained) -> Vec<Retrained> {
    let parts = case.training.accumulate.max(1);
    let fewer = (1..=HALVED).map(|times| ((case.batch / parts) >> times) * parts).filter(|&batch| batch > 0);
    fewer.map(|batch| (format!("--batch {batch}"), Trained { batch, ..case.clone() })).collect()
}

/// Values of 16 bits.
fn halves(case: &Trained) -> Vec<Retrained> {
    if [case.training.precision, case.training.kept] != [DType::F32; 2] {
        return Vec::new();
    }
    let training = Training { precision: DType::BF16, ..case.training.clone() }.on(&case.target);
    vec![("--precision bf16".into(), Trained { training, ..case.clone() })]
}

/// States that several cards share out, and rows.
fn sharing(case: &Trained) -> Vec<Retrained> {
    if !may_spread(&case.target, case.sharding.as_ref(), case.runs, &case.recipe) {
        return Vec::new();
    }
    let mut model = case.model.clone();
    let nodes = model.proto.graph.iter_mut().flat_map(|graph| &mut graph.node);
    nodes.for_each(|node| node.device_configurations.clear());
    model.proto.configuration.clear();
    let on = |(change, sharding)| (change, Trained { model: model.clone(), sharding: Some(sharding), ..case.clone() });
    let rows = case.batch / case.training.accumulate.max(1);
    let cards = CARDS.into_iter().filter(|cards| rows.is_multiple_of(*cards));
    cards.filter_map(|cards| several(DATA, cards, Kept::Weights)).map(on).collect()
}

/// Why a training does not fit, and what would help.
#[derive(Clone, Debug, Serialize)]
pub struct Refusal {
    /// The limit.
    pub limit_bytes: u64,
    /// Bytes of the smallest plan that was found.
    pub needed_bytes: u64,
    /// Its bytes over the limit.
    pub deficit_bytes: u64,
    /// The lower bound of every plan of these kernels, whatever is computed again.
    pub bound: Bound,
    /// The bytes without a limit.
    pub whole_bytes: u64,
    /// The work that the smallest plan does again.
    pub recompute: Recompute,
    /// The remedies that were planned. The first is to compute again what the smallest plan does.
    pub remedies: Vec<Remedy>,
}

/// Explains why a training does not fit a limit; `None` if it does.
///
/// # Errors
/// The training cannot be planned at all.
pub fn refusal(case: &Trained, limit: u64) -> Result<Option<Refusal>> {
    let job = case.job()?;
    let mut planner = Planner::new(&job)?;
    let needed_bytes = match planner.within(Some(limit)) {
        Ok(_) => return Ok(None),
        Err(Error::Fit { needed, .. }) => needed,
        Err(error) => return Err(error),
    };
    let point = |planned: Planned| Point::of(&planned.plan, case.training.accumulate);
    let whole = point(planner.within(None)?);
    let least = point(planner.within(Some(needed_bytes))?);
    Ok(Some(Refusal {
        limit_bytes: limit,
        needed_bytes,
        deficit_bytes: needed_bytes.saturating_sub(limit),
        bound: planner.bound()?,
        whole_bytes: whole.planned_bytes,
        recompute: least.recompute,
        remedies: case.remedies(&whole, &least, Some(limit)),
    }))
}

/// Plans a training and every remedy for it.
///
/// # Errors
/// The training cannot be planned at all.
pub fn advise_training(case: &Trained, limit: Option<u64>) -> Result<Advice> {
    let job = case.job()?;
    let mut planner = Planner::new(&job)?;
    let planned = match planner.within(limit) {
        // The plan that was refused: it fits the bytes that it takes.
        Err(Error::Fit { needed, .. }) => planner.within(Some(needed))?,
        planned => planned?,
    };
    let point = |planned: &Planned| Point::of(&planned.plan, case.training.accumulate);
    // The bytes that one run lacks come first, then those of all runs at once.
    let mut most = 0;
    let least = loop {
        match planner.within(Some(most)) {
            Err(Error::Fit { needed, .. }) if needed > most => most = needed,
            planned => break planned?,
        }
    };
    let remedies = case.remedies(&point(&planned), &point(&least), limit);
    let mut answer = limit.map(|limit| Answer::of(&planned.plan, limit));
    if let Some(answer) = answer.as_mut().filter(|answer| answer.deficit_bytes > 0) {
        let bound = planner.bound()?;
        answer.verdict = if bound.bytes > answer.limit_bytes { Verdict::Cannot } else { Verdict::NotFound };
        answer.bound = Some(bound);
    }
    Ok(Advice::of(&planned, answer, remedies))
}
