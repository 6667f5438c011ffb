//! Plans a range of shapes at once: the named dims of a graph have a range each, and every binding in the range runs in the same
//! segments at the same offsets.
//!
//! ```text
//! largest binding --graph, passes, lower---> Draft ---.                     the decisions of the largest are recorded,
//!        | decisions                                  |                     and the others follow them, so that all have
//!        v                                            v largest sizes       the same steps and buffers
//! other bindings  --graph, passes, lower---> Draft --- --> order, place --> segments, offsets
//!                                              |                                    |
//!                                              '-------------> Plan <---------------'   one per binding, each judged by check
//! ```
//!
//! Each buffer is planned with the largest size that it has in any binding that is tried. If the range has few bindings, all are
//! tried; else its corners and some between them. Sizes of other bindings are assumed to be between those of their neighbours.
//! If the size of a tensor both grows and shrinks with a dim, all extents of the dim are tried. If these are too many, the range is
//! refused.
//!
//! A binding that was not tried is lowered when it is needed. A buffer may still be larger than planned, such as a workspace of a
//! kernel that uses another algorithm at some extents. Then the binding's own arena is placed within the same segments.

use super::fit::chunks;
use super::lower::{Draft, DraftConstant, Options};
use super::make::arrange::{self, Arrangement, arrange};
use super::make::assemble::assemble;
use super::make::offsets::{Layout, layout};
use super::make::workspace;
use super::{BufferIdx, Class, Compiled, Dim, Knob, Limits, Plan, Recipe, StepIdx, check};
use crate::backend::cpu::OwnBytes;
use crate::decisions::{Decisions, Divergence, Record};
use crate::error::{Error, Result};
use crate::graph::Graph;
use crate::kernel::cpu::TILE_BYTES;
use crate::kernel::tuned::Tuned;
use crate::parallel;
use crate::pass::Prepared;
use crate::pass::chunk;
use crate::shape::{Extent, Shape};
use crate::target::{Family, Target};
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

/// The most bindings that are tried when a range is planned.
const MOST_TRIED: usize = 64;
/// Bindings that are made at once, on all threads, before their decisions are looked at.
const WAVE: usize = 8;
/// The most bindings that are tried if the size of a tensor both grows and shrinks with a dim.
const MOST_UNEVEN: usize = 256;

/// Makes the graph of a binding. Graphs of different bindings differ in extents only.
pub type Source = Arc<dyn Fn(&[(String, usize)]) -> Result<Graph> + Send + Sync>;

/// A range to plan.
#[derive(Clone)]
pub struct Bindings {
    /// Makes the graphs.
    pub source: Source,
    /// The dims, each with an extent or a range.
    pub dims: Vec<(String, Extent)>,
    /// How the graphs are prepared, the same for each binding.
    pub recipe: Recipe,
    /// Measured schedules.
    pub tuned: Option<Arc<Tuned>>,
}

impl Bindings {
    /// The graph of the largest binding, before it is cut into chunks.
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn graph(&self, target: &Target) -> Result<Prepared> {
        let maker = Maker::new(self.clone(), target)?;
        maker.graph(&maker.largest(), Decisions::default())
    }
}

/// A binding that was tried.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tried {
    /// One extent per dim of the range.
    pub binding: Vec<usize>,
    /// The largest sum of live bytes over the steps.
    pub live: u64,
}

/// The plan of a graph over a range of bindings.
pub struct ShapeRange {
    maker: Maker,
    record: Arc<Record>,
    arrangement: Arrangement,
    largest: Compiled,
    tried: Vec<Tried>,
    /// Per dim, the inputs and their axes that have the dim's extent.
    dim_sources: Vec<Vec<(usize, usize)>>,
}

/// A range whose steps are ordered and whose buffers have places.
pub struct Arranged {
    maker: Maker,
    record: Arc<Record>,
    /// The decisions about all bindings that are tried. Another user of the segments may give it other places.
    pub arrangement: Arrangement,
    members: Vec<Member>,
}

/// Makes the graph and the draft of a binding.
#[derive(Clone)]
struct Maker {
    /// The name of the program.
    program: Option<String>,
    source: Source,
    fixed: Vec<(String, usize)>,
    dims: Vec<Dim>,
    target: Target,
    recipe: Recipe,
    /// The live bytes from which on the graph is computed in chunks, if it is.
    chunked: Option<u64>,
    /// What the chunks save.
    knob: Option<Knob>,
    /// Measured schedules.
    tuned: Option<Arc<Tuned>>,
}

/// Graphs of bindings whose passes made the same decisions.
struct AllPrepared {
    bindings: Vec<Vec<usize>>,
    graphs: Vec<Arc<Prepared>>,
    record: Arc<Record>,
}

/// The graph and the draft of one binding.
struct Member {
    binding: Vec<usize>,
    graph: Arc<Prepared>,
    draft: Draft,
    /// Per buffer of the draft, its index in the range's draft; `None` if the draft does not use it.
    whole: Vec<Option<BufferIdx>>,
}

impl std::fmt::Debug for ShapeRange {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ShapeRange").field("dims", &self.maker.dims).finish_non_exhaustive()
    }
}

impl ShapeRange {
    /// The dims and their ranges.
    pub fn dims(&self) -> &[Dim] {
        &self.maker.dims
    }

    /// The plan of the largest binding, in the segments of all of them.
    pub fn plan(&self) -> &Plan {
        &self.largest.0
    }

    /// The plan of the largest binding, with its constants.
    pub fn largest(&self) -> &Compiled {
        &self.largest
    }

    /// The bindings that were tried when the range was planned, in order.
    pub fn tried(&self) -> &[Tried] {
        &self.tried
    }

    /// The plan of a binding, in the segments of [`plan`](Self::plan). A binding has one extent per dim of [`dims`](Self::dims).
    ///
    /// # Errors
    /// [`Error::Usage`] if the binding is outside the range or needs more than the segments hold.
    pub fn at(&self, binding: &[usize]) -> Result<Compiled> {
        self.maker.check(binding)?;
        let options = self.arrangement.options;
        let decisions = Decisions::follow(&self.record);
        let made = self.maker.prepare(binding, decisions.clone()).and_then(|graph| {
            let draft = arrange::draft(&graph, &self.maker.target, options)?;
            Ok((Arc::new(graph), draft))
        });
        let diverges =
            |divergence| self.maker.diverges(binding, divergence, made.as_ref().ok().map(|(graph, _)| &**graph));
        match (decisions.finish(), &made) {
            (Err(divergence @ Divergence::Invalid(_)), _) | (Err(divergence), Ok(_)) => {
                return Err(diverges(divergence));
            }
            _ => {}
        }
        let (graph, draft) = made?;
        let binding = binding.to_vec();
        match correspond(&mut self.arrangement.draft.clone(), &draft, false) {
            Ok(whole) => self.maker.compile(&self.arrangement, &Member { binding, graph, draft, whole }),
            Err(what) => {
                let refused = |more: String| self.maker.differs(&binding, &format!("{what}; {more}"));
                let own = self.place_own(&draft).map_err(refused)?;
                let whole = BufferIdx::all(&draft.buffers).map(Some).collect();
                self.maker.compile(&own, &Member { binding, graph, draft, whole })
            }
        }
    }

    /// Places the arena of a draft whose buffers are larger than planned, within the segments of the range.
    ///
    /// Constants keep their addresses: the plans of a range run by turns, and tell by the address which constant is there.
    fn place_own(&self, draft: &Draft) -> Result<Arrangement, String> {
        let Arrangement {
            draft: planned,
            options,
            layout: Layout { order, streams, .. },
            orders,
            segments,
            places,
            knobs,
        } = &self.arrangement;
        let mut whole = planned.clone();
        let map = correspond(&mut whole, draft, true)?;
        let layout =
            layout(draft, &self.maker.target, order, streams.used(), u64::MAX).map_err(|error| error.to_string())?;
        let arena: Vec<u64> = segments.iter().filter(|s| s.class == Class::Activation).map(|s| s.bytes).collect();
        let within =
            layout.segments.len() <= arena.len() && layout.segments.iter().zip(&arena).all(|(own, is)| own <= is);
        if !within {
            return Err(format!("placed by itself it takes {:?} bytes, planned were {arena:?}", layout.segments));
        }
        let used = draft.used();
        let place = |b: BufferIdx| match layout.live.range[b] {
            _ if !used[b] => Ok(None),
            Some(range) => Ok(Some(layout.offsets[range])),
            None => {
                let known = map[b].filter(|b| b.index() < places.len());
                let planned = known.filter(|&w| planned.buffers[w].bytes >= draft.buffers[b].bytes);
                planned
                    .and_then(|w| places[w])
                    .map(Some)
                    .ok_or_else(|| format!("there is no place for '{}'", draft.buffers[b].name))
            }
        };
        let places = BufferIdx::all(&draft.buffers).map(place).collect::<Result<_, _>>()?;
        let (draft, orders, segments) = (draft.clone(), orders.clone(), segments.clone());
        Ok(Arrangement { draft, options: *options, layout, orders, segments, places, knobs: knobs.clone() })
    }

    /// The binding for inputs of these shapes, in the plan's order. A dim that no given input has gets its largest extent.
    ///
    /// # Errors
    /// [`Error::Usage`] if an extent is outside the range.
    pub fn binding(&self, inputs: &[Option<&Shape>]) -> Result<Vec<usize>> {
        let mut binding = Vec::with_capacity(self.dims().len());
        for (dim, sources) in self.dims().iter().zip(&self.dim_sources) {
            let extent =
                |&(input, axis): &(usize, usize)| Some((input, axis, *inputs.get(input)?.as_ref()?.get(axis)?));
            let Some((input, axis, extent)) = sources.iter().find_map(extent) else {
                binding.push(dim.most);
                continue;
            };
            if !(dim.least..=dim.most).contains(&extent) {
                let (name, Dim { name: dim, least, most }) = (&self.plan().programs[0].inputs[input].name, dim);
                return Err(Error::usage(format!(
                    "input '{name}': dim '{dim}' (axis {axis}): expected {least} to {most}, as was planned, found {extent}"
                )));
            }
            binding.push(extent);
        }
        Ok(binding)
    }
}

impl Arranged {
    /// Orders and places the largest sizes of the bindings that are tried.
    ///
    /// # Errors
    /// As [`plan`](crate::plan()), except that the limit is an aim alone.
    pub fn new(bindings: Bindings, target: &Target, limits: &Limits) -> Result<Arranged> {
        let maker = Maker::new(bindings, target)?;
        let mut found: Vec<(Options, Arc<Record>, Vec<Member>)> = Vec::new();
        let mut prepared = None;
        let mut arrangement = arrange(&maker.target, limits, |options| {
            let (record, whole, members) = maker.all(options, &mut prepared)?;
            found.push((options, record, members));
            Ok(whole)
        })?;
        arrangement.knobs.extend(maker.knob.clone());
        let chosen = found.into_iter().find(|(options, ..)| *options == arrangement.options);
        let (_, record, members) = chosen.expect("what is arranged was made");
        Ok(Arranged { maker, record, arrangement, members })
    }

    /// The graph of the largest binding.
    pub fn graph(&self) -> &Prepared {
        &self.members[0].graph
    }

    /// Plans the bindings that were tried, each of which is checked.
    ///
    /// # Errors
    /// When a plan is not sound.
    pub fn finish(self, program: Option<String>) -> Result<ShapeRange> {
        let Arranged { mut maker, record, arrangement, members } = self;
        maker.program = program;
        let dim_sources = dim_sources(&members, maker.dims.len());
        let mut tried = Vec::with_capacity(members.len());
        let mut largest = None;
        for member in members {
            let compiled = maker.compile(&arrangement, &member)?;
            tried.push(Tried { binding: member.binding, live: compiled.0.programs[0].summary.lower_bound });
            largest.get_or_insert(compiled);
        }
        let mut largest = largest.expect("the largest binding is tried first");
        largest.0.programs[0].dims.clone_from(&maker.dims);
        tried.sort_by(|a, b| a.binding.cmp(&b.binding));
        Ok(ShapeRange { maker, record, arrangement, largest, tried, dim_sources })
    }
}

impl Maker {
    fn new(Bindings { source, dims, recipe, tuned }: Bindings, target: &Target) -> Result<Maker> {
        for (i, (name, extent)) in dims.iter().enumerate() {
            if dims[..i].iter().any(|(other, e)| other == name && e != extent) {
                return Err(Error::usage(format!("dim '{name}' is set twice, to different values")));
            }
        }
        if let Some((name, extent)) = dims.iter().find(|(_, e)| e.least() > e.most()) {
            return Err(Error::usage(format!(
                "dim '{name}': the range {extent} is empty: expected the smaller extent first"
            )));
        }
        let (mut fixed, mut ranges): (Vec<_>, Vec<Dim>) = (Vec::new(), Vec::new());
        for (name, extent) in dims {
            match extent.fixed() {
                Some(extent) => fixed.push((name, extent)),
                None if ranges.iter().any(|d| d.name == name) => {}
                None => ranges.push(Dim { name, least: extent.least(), most: extent.most() }),
            }
        }
        let target = target.clone();
        let mut maker =
            Maker { program: None, source, fixed, dims: ranges, target, recipe, chunked: None, knob: None, tuned };
        if recipe.chunks > 1 {
            // Other bindings may need more than the largest, so everything that chunks make smaller is in chunks, whatever the limit.
            let largest = maker.graph(&maker.largest(), Decisions::default())?;
            let limits = Limits { memory: None };
            if let Some(cut) = chunks::threshold(&largest, &maker.target, &limits, recipe.chunks)? {
                (maker.chunked, maker.knob) = (Some(cut.least), cut.knob(recipe.chunks, &limits));
            }
        }
        Ok(maker)
    }

    fn largest(&self) -> Vec<usize> {
        self.dims.iter().map(|d| d.most).collect()
    }

    fn show(&self, binding: &[usize]) -> String {
        let pairs = self.dims.iter().zip(binding).map(|(dim, extent)| format!("{}={extent}", dim.name));
        pairs.collect::<Vec<_>>().join(", ")
    }

    fn check(&self, binding: &[usize]) -> Result<()> {
        let inside = |(dim, extent): (&Dim, &usize)| (dim.least..=dim.most).contains(extent);
        if binding.len() == self.dims.len() && self.dims.iter().zip(binding).all(inside) {
            return Ok(());
        }
        let ranges = self.dims.iter().map(|d| format!("{}={}..{}", d.name, d.least, d.most)).collect::<Vec<_>>();
        Err(Error::usage(format!("{} is outside of the range {}", self.show(binding), ranges.join(", "))))
    }

    fn differs(&self, binding: &[usize], what: &str) -> Error {
        let (here, largest) = (self.show(binding), self.show(&self.largest()));
        let smaller = self.dims.iter().zip(binding).filter(|(dim, extent)| dim.most != **extent);
        let separate: Vec<_> =
            smaller.map(|(dim, extent)| format!("'{}' up to {extent} and above it", dim.name)).collect();
        let ranges = if separate.is_empty() { "" } else { "; plan ranges of their own for " };
        let separate = separate.join(", or for ");
        Error::usage(format!("the graph at {here} does not run in the plan of {largest}: {what}{ranges}{separate}"))
    }

    fn diverges(&self, binding: &[usize], divergence: Divergence, graph: Option<&Prepared>) -> Error {
        let node = match (divergence, graph) {
            (Divergence::Elsewhere(Some(node)), Some(graph)) => graph.graph.name_of(node.into()),
            _ => None,
        };
        let at = node.map_or(String::new(), |name| format!(", at node '{name}'"));
        self.differs(binding, &format!("it has another structure{at}"))
    }

    /// The graph of a binding before it is cut into chunks.
    fn graph(&self, binding: &[usize], decisions: Decisions) -> Result<Prepared> {
        let named = self.dims.iter().zip(binding).map(|(dim, &extent)| (dim.name.clone(), extent));
        let dims: Vec<_> = self.fixed.iter().cloned().chain(named).collect();
        self.recipe.following((self.source)(&dims)?, &self.target, decisions)
    }

    /// The graph of a binding that is lowered.
    fn prepare(&self, binding: &[usize], decisions: Decisions) -> Result<Prepared> {
        let mut graph = self.graph(binding, decisions)?;
        if let Some(least) = self.chunked {
            chunk::run(&mut graph, self.recipe.chunks, least)?;
        }
        graph.sequential |= self.recipe.chunks > 1;
        graph.tuned.clone_from(&self.tuned);
        Ok(graph)
    }

    /// The bindings to try, the largest first.
    ///
    /// Of a small range, these are all bindings. Else they have the ends of each dim and some extents between, and all extents of
    /// `uneven` dims.
    ///
    /// # Errors
    /// The number of bindings, if it is too large.
    fn bindings(&self, uneven: &[bool]) -> Result<Vec<Vec<usize>>, usize> {
        let count = |dim: &Dim| (dim.most - dim.least).saturating_add(1);
        let product = |counts: &mut dyn Iterator<Item = usize>| counts.fold(1, usize::saturating_mul);
        let chosen = |each: usize| {
            product(
                &mut self
                    .dims
                    .iter()
                    .zip(uneven)
                    .map(|(dim, all)| count(dim).min(if *all { usize::MAX } else { each })),
            )
        };
        let most = if uneven.contains(&true) { MOST_UNEVEN } else { MOST_TRIED };
        let each = if chosen(usize::MAX) <= most {
            usize::MAX
        } else {
            (2..=most).rev().find(|&each| chosen(each) <= most).unwrap_or(2)
        };
        if uneven.contains(&true) && chosen(each) > most {
            return Err(chosen(each));
        }
        let mut bindings = vec![Vec::new()];
        for (dim, all) in self.dims.iter().zip(uneven) {
            let extents = dim.extents(if *all { usize::MAX } else { each });
            bindings = bindings.iter().flat_map(|b| extents.iter().map(|&e| [&b[..], &[e]].concat())).collect();
        }
        Ok(bindings)
    }

    /// The decisions that are valid for every binding that is tried, the draft with the largest sizes, and the drafts of all bindings.
    /// Graphs whose passes have run are kept for other options.
    fn all(&self, options: Options, prepared: &mut Option<AllPrepared>) -> Result<(Arc<Record>, Draft, Vec<Member>)> {
        let mut uneven = vec![false; self.dims.len()];
        let mut bindings = self.bindings(&uneven).expect("corners and some between them");
        loop {
            let family = match prepared.take() {
                Some(family) if family.bindings == bindings => family,
                _ => self.family(bindings.clone())?,
            };
            let made = self.drafts(options, prepared.insert(family))?;
            let Some((dim, tensor)) = self.uneven(&made.1, &made.2) else { return Ok(made) };
            tracing::debug!(dim = self.dims[dim].name, tensor, "its size neither grows with the dim nor shrinks");
            uneven[dim] = true;
            bindings = self.bindings(&uneven).map_err(|count| {
                let Dim { name, least, most } = &self.dims[dim];
                Error::usage(format!(
                    "dim '{name}', {least}..{most}: the size of '{tensor}' is not monotonic in it, so all {count} bindings must be planned \
                     (at most {MOST_UNEVEN}): give a smaller range"
                ))
            })?;
        }
    }

    /// A dim and a tensor whose size both grows and shrinks with it, unless the members have all extents of the dim.
    fn uneven(&self, whole: &Draft, members: &[Member]) -> Option<(usize, String)> {
        let tensor =
            |b: &BufferIdx| matches!(whole.buffers[*b].class, Class::Input | Class::Output | Class::Activation);
        let mut sizes = vec![vec![0; members.len()]; whole.buffers.len()];
        for (number, member) in members.iter().enumerate() {
            let used = member.whole.iter().zip(&member.draft.buffers).filter_map(|(w, buffer)| Some(((*w)?, buffer)));
            used.for_each(|(w, buffer)| sizes[w][number] = buffer.bytes);
        }
        for (at, dim) in self.dims.iter().enumerate() {
            let mut lines: HashMap<Vec<usize>, Vec<usize>> = HashMap::new();
            for (number, member) in members.iter().enumerate() {
                let mut others = member.binding.clone();
                others.remove(at);
                lines.entry(others).or_default().push(number);
            }
            if lines.values().all(|line| line.len() > dim.most - dim.least) {
                continue;
            }
            let even = |sizes: &[u64], line: &[usize]| {
                line.is_sorted_by_key(|&m| sizes[m]) || line.iter().rev().is_sorted_by_key(|&m| sizes[m])
            };
            let found = BufferIdx::all(&whole.buffers)
                .filter(tensor)
                .find(|&b| lines.values().any(|line| !even(&sizes[b], line)));
            if let Some(buffer) = found {
                return Some((at, whole.buffers[buffer].name.clone()));
            }
        }
        None
    }

    /// Runs the passes for these bindings.
    fn family(&self, bindings: Vec<Vec<usize>>) -> Result<AllPrepared> {
        let begun: Vec<_> = bindings.iter().map(|_| Decisions::record(&BTreeSet::new())).collect();
        let decisions = |number: usize| &begun[number];
        let make = |number: usize| Ok(Arc::new(self.prepare(&bindings[number], decisions(number).clone())?));
        let (record, graphs) = self.agreed(&bindings, &Record::default(), decisions, make, |_, graph| graph.clone())?;
        Ok(AllPrepared { bindings, graphs, record })
    }

    /// Lowers the graphs of bindings, as [`all`](Self::all) returns them.
    fn drafts(&self, options: Options, family: &AllPrepared) -> Result<(Arc<Record>, Draft, Vec<Member>)> {
        let AllPrepared { bindings, graphs, record } = family;
        let make = |number: usize| arrange::draft(&graphs[number], &self.target, options);
        let decisions = |number: usize| &graphs[number].decisions;
        let (record, drafts) = self.agreed(bindings, record, decisions, make, |number, _| graphs[number].clone())?;
        let mut whole = drafts[0].clone();
        let mut members = Vec::with_capacity(drafts.len());
        for ((binding, graph), draft) in bindings.iter().zip(graphs).zip(drafts) {
            let map = correspond(&mut whole, &draft, true).map_err(|what| self.differs(binding, &what))?;
            members.push(Member { binding: binding.clone(), graph: graph.clone(), draft, whole: map });
        }
        whole.least_own = self.own_bytes(&members);
        Ok((record, whole, members))
    }

    /// Makes something for each binding, with the same decisions behind those of `begun`: the first decides, the others follow. Where a
    /// decision is not valid for one, it is forbidden to all, and everything is made again.
    fn agreed<'a, T: Send + 'a>(
        &self,
        bindings: &[Vec<usize>],
        begun: &Record,
        decisions: impl Fn(usize) -> &'a Decisions + Sync,
        make: impl Fn(usize) -> Result<T> + Sync,
        graph: impl Fn(usize, &T) -> Arc<Prepared>,
    ) -> Result<(Arc<Record>, Vec<T>)> {
        let others: Vec<usize> = (1..bindings.len()).collect();
        let mut forbidden = BTreeSet::new();
        'decisions: loop {
            decisions(0).resume(begun, None, &forbidden);
            let mut all = vec![make(0)?];
            let record = Arc::new(decisions(0).finish().expect("nothing is followed"));
            for some in others.chunks(WAVE) {
                let made = parallel::each(some, |&number| {
                    decisions(number).resume(begun, Some(&record), &BTreeSet::new());
                    let made = make(number);
                    (decisions(number).finish(), made)
                });
                for (&number, (ended, made)) in some.iter().zip(made) {
                    let binding = &bindings[number];
                    match ended {
                        Err(Divergence::Invalid(choice)) => {
                            tracing::debug!(choice, binding = self.show(binding), "not right for all of the range");
                            // The decisions after this one are made again, and may be others.
                            forbidden.split_off(&choice);
                            forbidden.insert(choice);
                            continue 'decisions;
                        }
                        Err(divergence) if made.is_ok() => {
                            let graph = made.as_ref().ok().map(|made| graph(number, made));
                            return Err(self.diverges(binding, divergence, graph.as_deref()));
                        }
                        _ => {}
                    }
                    all.push(made.map_err(|e| self.differs(binding, &e.to_string()))?);
                }
            }
            return Ok((record, all));
        }
    }

    /// The most bytes that the CPU backend takes for itself with any binding. If not all were tried, threads get room for another tile.
    fn own_bytes(&self, members: &[Member]) -> OwnBytes {
        let all = self.dims.iter().map(|dim| (dim.most - dim.least).saturating_add(1)).fold(1, usize::saturating_mul);
        let room = if members.len() < all && self.target.family == Family::Cpu { TILE_BYTES } else { 0 };
        let thread = members.iter().flat_map(|m| &m.draft.own).map(|own| own.thread).max().unwrap_or(0);
        let tables = members.iter().map(|m| m.draft.own.iter().map(|own| own.tables).sum());
        OwnBytes { thread: thread + room, tables: tables.max().unwrap_or(0) }
    }

    fn compile(&self, arrangement: &Arrangement, member: &Member) -> Result<Compiled> {
        let Member { binding, graph, draft, whole } = member;
        let mut draft = draft.clone();
        workspace::take(&mut draft, &arrangement.layout, whole);
        let (mut plan, constants) = assemble(graph, &self.target, arrangement, &draft, whole)?;
        let own = |(dim, &extent): (&Dim, &usize)| Dim { name: dim.name.clone(), least: extent, most: extent };
        plan.programs[0].dims = self.dims.iter().zip(binding).map(own).collect();
        if let Some(name) = &self.program {
            plan.programs = plan.programs.into_iter().map(|program| program.named(name.clone())).collect();
        }
        check::check(&plan)?;
        Ok((plan, constants))
    }
}

impl Dim {
    /// At most `count` extents, at least two, evenly spaced on a logarithmic scale; the largest first.
    fn extents(&self, count: usize) -> Vec<usize> {
        if self.most - self.least < count {
            return (self.least..=self.most).rev().collect();
        }
        let (low, high) = (self.least.max(1) as f64, self.most as f64);
        let between = (1..count - 1).map(|i| (high * (low / high).powf(i as f64 / (count - 1) as f64)) as usize);
        let mut extents: Vec<usize> = [self.most, self.least].into_iter().chain(between).collect();
        extents.sort_unstable_by(|a, b| b.cmp(a));
        extents.dedup();
        extents
    }
}

/// Per dim, the inputs and their axes that have the dim's extent in every member.
fn dim_sources(members: &[Member], dims: usize) -> Vec<Vec<(usize, usize)>> {
    let first = &members[0].graph.graph;
    let axes = || {
        let ranks = first.inputs().iter().map(|&v| first.fact(v).shape.len()).enumerate();
        ranks.flat_map(|(input, rank)| (0..rank).map(move |axis| (input, axis)))
    };
    let tells = |dim: usize, input: usize, axis: usize| {
        let extent = |m: &Member| m.graph.graph.fact(m.graph.graph.inputs()[input]).shape[axis];
        members.iter().all(|m| extent(m) == m.binding[dim])
    };
    (0..dims).map(|dim| axes().filter(|&(input, axis)| tells(dim, input, axis)).collect()).collect()
}

/// Maps each buffer of a draft to its index in `whole`, a draft with the same steps. With `grow`, `whole` is enlarged as needed.
fn correspond(whole: &mut Draft, own: &Draft, grow: bool) -> Result<Vec<Option<BufferIdx>>, String> {
    if whole.steps.len() != own.steps.len() {
        return Err(format!("expected {} steps, found {}", whole.steps.len(), own.steps.len()));
    }
    let mut map = Map { whole, own, to: vec![None; own.buffers.len()], grow };
    let inputs: Vec<_> = map.whole.inputs.iter().map(|p| p.1).zip(own.inputs.iter().map(|p| p.1)).collect();
    let outputs: Vec<_> = map.whole.outputs.iter().map(|p| p.2).zip(own.outputs.iter().map(|p| p.2)).collect();
    for (whole, own) in map.whole.states.iter().zip(&own.states) {
        let (planned, found) = (&map.whole.buffers[whole.buffer], &map.own.buffers[own.buffer]);
        if planned.shape != found.shape {
            let (name, shape) = (&planned.name, &planned.shape);
            return Err(format!(
                "state '{name}' is {} here and {shape} there, but has one shape: give its dims one extent each",
                found.shape
            ));
        }
    }
    let states = map.whole.states.iter().zip(&own.states).flat_map(|(whole, own)| {
        [Some((whole.buffer, own.buffer)), whole.update.zip(own.update)].into_iter().flatten()
    });
    let states: Vec<_> = states.collect();
    for (whole, own) in states.into_iter().chain(inputs).chain(outputs) {
        map.set(own, whole)?;
    }
    map.constants()?;
    for step in StepIdx::all(&own.steps) {
        let name = &own.steps[step].name;
        map.step(step).map_err(|what| format!("step '{name}': {what}"))?;
    }
    Ok(map.to)
}

struct Map<'a> {
    whole: &'a mut Draft,
    own: &'a Draft,
    to: Vec<Option<BufferIdx>>,
    grow: bool,
}

impl Map<'_> {
    fn set(&mut self, own: BufferIdx, whole: BufferIdx) -> Result<(), String> {
        let (buffer, slot) = (&self.own.buffers[own], &mut self.whole.buffers[whole]);
        if self.to[own].is_some_and(|other| other != whole) || buffer.class != slot.class {
            return Err(format!("writes '{}' where another buffer was planned, '{}'", buffer.name, slot.name));
        }
        if self.grow {
            slot.bytes = slot.bytes.max(buffer.bytes);
        } else if buffer.bytes > slot.bytes {
            let (found, planned) = (buffer.bytes, slot.bytes);
            return Err(format!("'{}' takes {found} bytes, planned were {planned}", buffer.name));
        }
        self.to[own] = Some(whole);
        Ok(())
    }

    /// Adds a buffer to the range's draft that only smaller bindings have.
    fn add(&mut self, own: BufferIdx) -> Result<BufferIdx, String> {
        let buffer = &self.own.buffers[own];
        if !self.grow {
            return Err(format!("needs '{}', which was not planned", buffer.name));
        }
        self.whole.buffers.push(buffer.clone());
        Ok(BufferIdx::new(self.whole.buffers.len() - 1))
    }

    /// Maps constants by name and packed form. A wrong pair does no harm: a constant is written when its binding is chosen.
    fn constants(&mut self) -> Result<(), String> {
        let used = self.own.used();
        let mut known: HashMap<(String, Option<usize>), Vec<BufferIdx>> = HashMap::new();
        for constant in self.whole.constants.iter().rev() {
            let key = (constant.constant.name.clone(), constant.packed.map(|(_, operand)| operand));
            known.entry(key).or_default().push(constant.buffer);
        }
        for constant in self.own.constants.iter().filter(|c| used[c.buffer]) {
            let key = (constant.constant.name.clone(), constant.packed.map(|(_, operand)| operand));
            let whole = match known.get_mut(&key).and_then(Vec::pop) {
                Some(whole) => whole,
                None => {
                    let whole = self.add(constant.buffer)?;
                    self.whole.constants.push(DraftConstant { buffer: whole, ..constant.clone() });
                    whole
                }
            };
            self.set(constant.buffer, whole)?;
        }
        Ok(())
    }

    fn step(&mut self, number: StepIdx) -> Result<(), String> {
        let own = &self.own.steps[number];
        let results = self.own.kernels[own.kernel].writes.len();
        let planned = &self.whole.steps[number];
        if planned.name != own.name {
            return Err(format!("stands where '{}' was planned", planned.name));
        }
        let planned_results = self.whole.kernels[planned.kernel].writes.len();
        if results != planned_results {
            return Err(format!("writes {results} buffers, planned were {planned_results}"));
        }
        for slot in 0..results {
            self.set(own.writes[slot], self.whole.steps[number].writes[slot])?;
        }
        if let Some(&work) = own.writes.get(results) {
            let whole = match self.whole.steps[number].writes.get(results) {
                Some(&whole) => whole,
                None => {
                    let whole = self.add(work)?;
                    self.whole.steps[number].writes.push(whole);
                    whole
                }
            };
            self.set(work, whole)?;
        }
        for &read in &own.reads {
            let reads = &mut self.whole.steps[number].reads;
            let Some(whole) = self.to[read].filter(|whole| self.grow || reads.contains(whole)) else {
                return Err(format!("reads '{}', which it was not planned to", self.own.buffers[read].name));
            };
            if !reads.contains(&whole) {
                reads.push(whole);
            }
        }
        if self.grow {
            let dies: Vec<_> = own.reusable.iter().map(|&b| self.to[b]).collect();
            self.whole.steps[number].reusable.retain(|b| dies.contains(&Some(*b)));
        }
        Ok(())
    }
}
