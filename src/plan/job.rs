//! A job is all that is asked of a plan, and [`plan()`] the one way to make it.
//!
//! ```text
//! graphs, ranges of graphs --passes--> parts --recompute, chunks--> --lower, order, place--> segments that all share --> Plan
//!                                                '------ as far as it takes to fit the limit, for all runs at once ------'
//! ```
//!
//! Programs run one at a time, in one arena. Constants with the same content lie in one place, and so do states of one name. Runs at once
//! share the constants; each has an arena, states and staging of its own.

use super::fit::bound::{self, Bound};
use super::fit::chunks;
use super::fit::limit::{Program, Search};
use super::fit::recompute;
use super::lower::{Draft, DraftState};
use super::make::arrange::{Arrangement, arrange, draft};
use super::make::assemble::assemble;
use super::make::offsets::stack;
use super::range::{Arranged, Bindings, ShapeRange, Source};
use super::{
    Because, BufferIdx, Class, Compiled, Data, Kept, Knob, Limits, MOST_RUNS, Plan, Prefer, Recipe, Segment, Spot,
    check,
};
use crate::error::{Error, Result, ensure};
use crate::graph::Graph;
use crate::kernel::schedule::variants::is_no_larger;
use crate::kernel::tuned::Tuned;
use crate::onnx;
use crate::pass::Prepared;
use crate::pass::shard::{self, Shard, Sharding};
use crate::shape::Extent;
use crate::target::{Family, Target};
use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::Arc;

/// All that is asked of a plan.
#[derive(Clone)]
pub struct Job {
    /// The programs, each with its name.
    pub programs: Vec<(String, Graphs)>,
    /// How the graphs are prepared.
    pub recipe: Recipe,
    /// The device.
    pub target: Target,
    /// The most bytes that the plan may take, for all programs and all runs at once.
    pub limit: Option<u64>,
    /// Runs at once.
    pub runs: u32,
    /// Schedules that were measured on the device, and library calls that it refuses.
    pub schedules: Option<Arc<Tuned>>,
    /// True to let measured schedules take more bytes than the plan takes without them.
    pub more_memory: bool,
    /// The mesh of whose ranks each runs the plan, if there are several, and which rank this one is.
    pub sharding: Option<Sharding>,
}

/// The graphs of a program.
#[derive(Clone)]
pub enum Graphs {
    /// One graph.
    One(Box<Graph>),
    /// One graph whose passes have run. It is lowered as it is.
    Prepared(Box<Prepared>),
    /// A graph per binding of dims that have ranges.
    Range(Source, Vec<(String, Extent)>),
}

impl From<Graph> for Graphs {
    fn from(graph: Graph) -> Graphs {
        Graphs::One(Box::new(graph))
    }
}

impl Graphs {
    /// The graph before its passes; of a range, that of the largest binding.
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn largest(&self) -> Result<Graph> {
        match self {
            Graphs::One(graph) => Ok((**graph).clone()),
            Graphs::Prepared(graph) => Ok(graph.graph.clone()),
            Graphs::Range(source, dims) => {
                let dims: Vec<_> = dims.iter().map(|(name, extent)| (name.clone(), extent.most())).collect();
                source(&dims)
            }
        }
    }
}

impl From<Prepared> for Graphs {
    fn from(graph: Prepared) -> Graphs {
        Graphs::Prepared(Box::new(graph))
    }
}

impl Job {
    /// Programs for a target: one run, with the default recipe and no limit.
    pub fn new<N: Into<String>, G: Into<Graphs>>(programs: impl IntoIterator<Item = (N, G)>, target: &Target) -> Job {
        Job {
            programs: programs.into_iter().map(|(name, graphs)| (name.into(), graphs.into())).collect(),
            recipe: Recipe::default(),
            target: target.clone(),
            limit: None,
            runs: 1,
            schedules: None,
            more_memory: false,
            sharding: None,
        }
    }

    /// One program that has its graph's name. See [`new`](Self::new).
    pub fn of(graphs: impl Into<Graphs>, target: &Target) -> Job {
        Job::new([(String::new(), graphs)], target)
    }

    /// This job under a limit.
    pub fn within(self, limit: impl Into<Option<u64>>) -> Job {
        Job { limit: limit.into(), ..self }
    }
}

/// What a job becomes.
#[derive(Debug)]
pub struct Planned {
    /// The plan. A program of a range is that of the largest binding.
    pub plan: Plan,
    /// The elements of its constants and states.
    pub data: Data,
    /// Per program, the range, which plans the other bindings.
    pub ranges: Vec<Option<ShapeRange>>,
    /// Per program, the graph that was lowered; of a range, that of the largest binding.
    pub graphs: Vec<Graph>,
}

/// Plans a job: exact bytes, before any device is touched.
///
/// Several orders are placed; the smallest arena wins, the file's order among equals. Parts of concatenations are copied only where that
/// saves enough, or where the plan would not fit without. On a target with streams its steps are then spread over them, as long as that
/// costs little and the limit holds. Measured schedules are used where the plan takes no more bytes for them. The recipe may prefer memory, or
/// speed.
///
/// # Errors
/// [`Error::Fit`] when the plan exceeds the limit. [`Error::Usage`] when the target lacks a tensor's type, or a tensor is too large: for the
/// target's segments, or for its bindings if a kernel needs all of it at once; when there is no program or no run, two programs have one
/// name, or states of one name differ; when graphs of a range differ by more than extents.
pub fn plan(job: &Job) -> Result<Planned> {
    Planner::new(job)?.within(job.limit)
}

/// Plans a job for all ranks of its mesh: a plan for each stage, with the ranks that have it, the first stage first.
///
/// # Errors
/// As [`plan()`], and when the ranks could not go on together.
pub fn of_all_ranks(job: &Job) -> Result<Vec<(Planned, Vec<usize>)>> {
    let Some(sharding) = &job.sharding else { return Ok(vec![(plan(job)?, vec![0])]) };
    let of = |(sharding, ranks): (Sharding, Vec<usize>)| {
        let own = Job { sharding: Some(sharding), ..job.clone() };
        Ok((plan(&own)?, ranks))
    };
    let all = sharding.classes().map(of).collect::<Result<Vec<_>>>()?;
    let plans: Vec<_> = all.iter().map(|(planned, ranks)| (&planned.plan, ranks.clone())).collect();
    check::ranks::ranks(&sharding.mesh, &plans)?;
    Ok(all)
}

/// What is lowered of a program: a graph whose passes have run, or a range, whose passes run each time that it is planned.
enum Part {
    Graph(Box<Prepared>),
    /// It is lowered as it is.
    Fixed(Box<Prepared>),
    Range(Bindings),
}

/// A job that is ready to be planned under several limits. The passes of its graphs have run; those of ranges run with each plan.
pub struct Planner<'a> {
    job: &'a Job,
    parts: Vec<(&'a str, Part)>,
    /// Per program, what is split between ranks.
    shards: Vec<Vec<Shard>>,
    search: Option<Search<'a>>,
}

impl<'a> Planner<'a> {
    /// Checks a job, and runs the passes of its graphs.
    ///
    /// # Errors
    /// When a pass refuses a graph, and when the job asks for what cannot be.
    pub fn new(job: &'a Job) -> Result<Planner<'a>> {
        ensure(!job.programs.is_empty(), || Error::usage("expected a program, found none".into()))?;
        ensure(job.runs > 0, || Error::usage("runs: expected at least one run at once, found 0".into()))?;
        let (mut parts, mut shards): (Vec<(&str, Part)>, _) = (Vec::new(), Vec::new());
        for (name, graphs) in &job.programs {
            if parts.iter().any(|(other, _)| other == name) {
                return Err(Error::usage(format!("two programs have the name '{name}': expected a name for each")));
            }
            let (graphs, split) = job.sharded(graphs)?;
            shards.push(split);
            parts.push((name, job.part(&graphs)?));
        }
        if job.runs > 1 && parts.iter().any(|(_, part)| matches!(part, Part::Range(_))) {
            let what = "runs: a range of shapes has one run at once, as its bindings write constants, which runs share; \
                give each dim one extent";
            return Err(Error::usage(what.into()));
        }
        Ok(Planner { job, parts, shards, search: None })
    }

    /// The least that the programs take together, whatever is computed again.
    ///
    /// # Errors
    /// As [`bound::together`].
    pub fn bound(&self) -> Result<Bound> {
        let graph = |(_, part): &(_, Part)| match part {
            Part::Graph(graph) | Part::Fixed(graph) => Ok((**graph).clone()),
            Part::Range(bindings) => bindings.graph(&self.job.target),
        };
        let graphs = self.parts.iter().map(graph).collect::<Result<Vec<_>>>()?;
        bound::together(&graphs, &self.job.target)
    }

    /// The job's plan under this limit.
    ///
    /// # Errors
    /// As [`plan()`].
    pub fn within(&mut self, limit: Option<u64>) -> Result<Planned> {
        let mut planned = self.tuned_within(limit)?;
        // A stage may have none of it.
        let stages = self.job.sharding.as_ref().map_or(1, |of| of.mesh.stages());
        let finds = self.job.recipe.offload.is_none() || planned.plan.offloaded_bytes() > 0 || stages > 1;
        ensure(finds, || {
            Error::usage("offloaded data: expected constants or states of 64 KiB or more, found none".to_owned())
        })?;
        if let Some(Sharding { mesh, kept, rank, .. }) = &self.job.sharding {
            planned.plan.mesh = Some(mesh.clone());
            planned.plan.stage = mesh.stage(*rank);
            planned
                .plan
                .programs
                .iter_mut()
                .zip(&self.shards)
                .for_each(|(program, shards)| program.shards.clone_from(shards));
            // Inputs are split along it, too. States may be those of another stage.
            let is_shared = |program: &super::Program| {
                let is_input = |name: &str| program.inputs.iter().any(|port| port.name == name);
                program.shards.iter().any(|shard| shard.axis == shard::DATA && !is_input(&shard.name))
            };
            ensure(*kept == Kept::Whole || planned.plan.programs.iter().any(is_shared), || {
                let what = "expected some of 256 floats or more whose extents the axis 'data' divides, found none";
                Error::usage(format!("mesh '{mesh}': states that its ranks share out: {what}"))
            })?;
            check::ranks::one(&planned.plan)?;
            if mesh.stages() == 1 {
                check::ranks::ranks(mesh, &[(&planned.plan, (0..mesh.ranks()).collect())])?;
            }
        }
        Ok(planned)
    }

    /// The plan of one rank, with measured schedules where they take no more bytes.
    fn tuned_within(&mut self, limit: Option<u64>) -> Result<Planned> {
        let table = self.job.schedules.clone();
        let refused = table.as_ref().map_or(&[][..], |table| table.refused());
        let texts = (!refused.is_empty()).then(|| Arc::new(Tuned::default().without(refused.to_vec())));
        let plain = self.for_all_runs(limit, texts.as_ref());
        let Some(table) = table.filter(|table| !table.is_empty()) else { return plain };
        let most = match &plain {
            Ok(plain) if !self.job.more_memory && self.job.recipe.prefer != Prefer::Speed => Some(plain.plan.bytes()),
            _ => limit,
        };
        let tuned = self.for_all_runs(most, Some(&table)).or_else(|_| {
            let target = &self.job.target;
            let small = table.filter(|kernel, schedule| is_no_larger(kernel, schedule, target));
            self.for_all_runs(most, Some(&Arc::new(small)))
        });
        let Ok(mut tuned) = tuned else { return plain };
        if let (Some(_), Ok(plain)) = (&tuned.plan.tuned, &plain) {
            let [with, without] =
                [&tuned.plan, &plain.plan].map(|plan| plan.segments.iter().map(|s| s.bytes as i64).sum::<i64>());
            let bytes = with - without;
            tuned.plan.choices.push(Knob::new("measured schedules", bytes, Because::Speed));
        }
        Ok(tuned)
    }

    /// The graphs that are lowered under a limit: with values [computed again](super::fit::limit) for backward computations, as far as it
    /// takes for all programs together to fit, and in chunks if they are asked for. Of a range, the largest binding's.
    ///
    /// # Errors
    /// When a program cannot be planned at all.
    pub fn graphs(&mut self, limit: Option<u64>) -> Result<Vec<Prepared>> {
        let target = &self.job.target;
        let graph = |part| match part {
            Part::Graph(graph) | Part::Fixed(graph) => Ok(*graph),
            Part::Range(bindings) => bindings.graph(target),
        };
        self.fitted(limit, limit, None, self.job.recipe.prefer)?.0.into_iter().map(graph).collect()
    }

    /// Plans all runs at once.
    fn for_all_runs(&mut self, limit: Option<u64>, table: Option<&Arc<Tuned>>) -> Result<Planned> {
        for_all_runs(self.job.runs, limit, &mut |limit| self.for_one_run(limit, table))
    }

    /// Plans one run. If speed comes first, but does not fit, it comes as far as it takes little memory.
    fn for_one_run(&mut self, limit: Option<u64>, table: Option<&Arc<Tuned>>) -> Result<Planned> {
        match self.job.recipe.prefer {
            Prefer::Speed => match self.preferring(Prefer::Speed, limit, table) {
                Err(Error::Fit { .. }) => self.preferring(Prefer::Balance, limit, table),
                planned => planned,
            },
            prefer => self.preferring(prefer, limit, table),
        }
    }

    /// Plans one run with this preference. Several programs in chunks are cut as without a limit if they do not fit together.
    fn preferring(&mut self, prefer: Prefer, limit: Option<u64>, table: Option<&Arc<Tuned>>) -> Result<Planned> {
        let is_cut_together = self.parts.len() > 1 && self.job.recipe.chunks > 1;
        let mut plan = |chunked| {
            let (parts, knobs) = self.fitted(limit, chunked, table, prefer)?;
            let mut planned = self.arranged(&parts, limit)?;
            planned.plan.choices.extend(knobs);
            Ok(planned)
        };
        match plan(limit) {
            // Each program was cut until it fits alone.
            Err(Error::Fit { .. }) if is_cut_together => plan(None),
            planned => planned,
        }
    }

    /// Plans parts that are ready to be lowered.
    fn arranged(&self, parts: &[Part], limit: Option<u64>) -> Result<Planned> {
        let names: Vec<&str> = self.parts.iter().map(|(name, _)| *name).collect();
        let planned = together(&names, parts, &self.job.target, &Limits { memory: limit })?;
        let Some(limit) = limit.filter(|&limit| planned.plan.bytes() > limit) else { return Ok(planned) };
        if names.len() == 1 {
            return Err(planned.plan.exceeds(limit));
        }
        // Each program was arranged as if it had the limit for itself, and may take more than its least, for speed.
        let least = together(&names, parts, &self.job.target, &Limits { memory: Some(0) })?;
        if least.plan.bytes() > limit { Err(least.plan.exceeds(limit)) } else { Ok(least) }
    }

    /// The parts as they are lowered under a limit, and the choices that were made for it. Each program is cut into chunks until it fits
    /// `chunked` alone.
    fn fitted(
        &mut self,
        limit: Option<u64>,
        chunked: Option<u64>,
        table: Option<&Arc<Tuned>>,
        prefer: Prefer,
    ) -> Result<(Vec<Part>, Vec<Knob>)> {
        let Job { target, recipe, .. } = self.job;
        let has_backward = |part: &Part| matches!(part, Part::Graph(graph) if graph.graph.has_backward());
        let (mut chosen, mut knobs) = (Vec::new(), Vec::new());
        let smallest = if recipe.prefer == Prefer::Memory { Some(0) } else { limit };
        if let Some(limit) = smallest.filter(|_| self.parts.iter().any(|(_, part)| has_backward(part))) {
            let (graphs, saved) = self.search()?.within(limit)?;
            chosen = graphs;
            let because = if limit > 0 { Because::Limit } else { Because::Memory };
            knobs.extend((saved != 0).then(|| Knob::new("recomputation", saved, because)));
        }
        let mut chosen = chosen.into_iter();
        let mut parts = Vec::with_capacity(self.parts.len());
        for (name, part) in &self.parts {
            let tuned = |graph: &Prepared| table.cloned().or(graph.tuned.clone());
            parts.push(match part {
                Part::Graph(graph) => {
                    let mut graph = chosen.next().unwrap_or_else(|| (**graph).clone());
                    graph.prefer = prefer;
                    let knob = chunks::run(&mut graph, target, &Limits { memory: chunked }, recipe.chunks)?;
                    knobs.extend(knob.map(|knob| self.job.own(name, knob)));
                    Part::Graph(Box::new(Prepared { tuned: tuned(&graph), ..graph }))
                }
                Part::Fixed(graph) => Part::Fixed(Box::new(Prepared { tuned: tuned(graph), ..(**graph).clone() })),
                Part::Range(bindings) => {
                    let recipe = Recipe { prefer, ..bindings.recipe };
                    Part::Range(Bindings { tuned: table.cloned(), recipe, ..bindings.clone() })
                }
            });
        }
        Ok((parts, knobs))
    }

    /// The search among what backward computations compute again.
    fn search(&mut self) -> Result<&mut Search<'a>> {
        if self.search.is_none() {
            let target = &self.job.target;
            let least = Limits { memory: Some(0) };
            let program = |(_, part): &(_, Part)| {
                Ok(match part {
                    Part::Graph(graph) => Program::Graph(graph.clone()),
                    Part::Fixed(graph) => {
                        Program::Fixed(Box::new(arrange(target, &least, |options| draft(graph, target, options))?))
                    }
                    Part::Range(bindings) => {
                        Program::Fixed(Box::new(Arranged::new(bindings.clone(), target, &least)?.arrangement))
                    }
                })
            };
            let programs = self.parts.iter().map(program).collect::<Result<Vec<_>>>()?;
            self.search = Some(Search::new(programs, target)?);
        }
        Ok(self.search.as_mut().expect("it was made above"))
    }
}

impl Job {
    /// A choice of this program's own.
    fn own(&self, program: &str, knob: Knob) -> Knob {
        Knob { program: (self.programs.len() > 1).then(|| program.to_owned()), ..knob }
    }

    /// The graphs of a program of one rank, and what is split between ranks.
    fn sharded<'g>(&self, graphs: &'g Graphs) -> Result<(Cow<'g, Graphs>, Vec<Shard>)> {
        ensure(self.target.family != Family::Wgpu || self.recipe.offload.is_none(), || {
            Error::usage(format!("offloaded data: expected a target cpu or cuda, found '{}'", self.target.name))
        })?;
        let Some(sharding) = &self.sharding else { return Ok((Cow::Borrowed(graphs), Vec::new())) };
        if self.target.family == Family::Wgpu {
            let what =
                format!("mesh '{}': '{}' runs alone; expected a target cpu or cuda", sharding.mesh, self.target.name);
            return Err(Error::usage(what));
        }
        let alone = [("runs at once", self.runs > 1), ("chunks", self.recipe.chunks > 1)];
        if let Some((what, _)) = alone.into_iter().find(|(_, asked)| *asked) {
            return Err(Error::usage(format!(
                "mesh '{}': its ranks have one run each, of the whole: no {what}",
                sharding.mesh
            )));
        }
        let mut largest = graphs.largest()?;
        let shards = onnx::shard(&mut largest, sharding)?;
        let of_rank = match graphs {
            Graphs::One(_) => Graphs::One(Box::new(largest)),
            Graphs::Prepared(_) => {
                let what = format!("mesh '{}': expected a graph whose passes have not run", sharding.mesh);
                return Err(Error::usage(what));
            }
            Graphs::Range(source, dims) => {
                let (source, sharding) = (Arc::clone(source), sharding.clone());
                let of_rank = move |dims: &[(String, usize)]| {
                    let mut graph = source(dims)?;
                    onnx::shard(&mut graph, &sharding)?;
                    Ok(graph)
                };
                Graphs::Range(Arc::new(of_rank), dims.clone())
            }
        };
        Ok((Cow::Owned(of_rank), shards))
    }

    /// The graphs of a program after the passes.
    fn part(&self, graphs: &Graphs) -> Result<Part> {
        // What is computed again under a limit is the same whether speed comes first or not.
        let prefer = if self.recipe.prefer == Prefer::Speed { Prefer::Balance } else { self.recipe.prefer };
        let recipe = Recipe { prefer, ..self.recipe };
        let whole = |graph: Graph| {
            let mut graph = recipe.whole(graph, &self.target)?;
            recompute::free(&mut graph, &self.target, self.recipe.fuse)?;
            Ok::<_, Error>(Part::Graph(Box::new(graph)))
        };
        match graphs {
            Graphs::One(graph) => whole((**graph).clone()),
            Graphs::Prepared(graph) => Ok(Part::Fixed(graph.clone())),
            Graphs::Range(source, dims) => {
                let fixed: Option<Vec<_>> =
                    dims.iter().map(|(name, extent)| Some((name.clone(), extent.fixed()?))).collect();
                if let Some(dims) = fixed {
                    return whole(source(&dims)?);
                }
                let (source, dims) = (Arc::clone(source), dims.clone());
                Ok(Part::Range(Bindings { source, dims, recipe: self.recipe, tuned: None }))
            }
        }
    }
}

/// Plans of one graph: sugar for a [`Job`].
pub trait Planning: Sized {
    /// The graph that is lowered for a plan under these limits.
    ///
    /// # Errors
    /// As [`plan()`].
    fn graph(self, graph: Graph, target: &Target, limits: &Limits) -> Result<Prepared>;

    /// The graph's plan, with the data of its constants.
    ///
    /// # Errors
    /// As [`plan()`].
    fn compile(self, graph: Graph, target: &Target, limits: &Limits) -> Result<Compiled>;

    /// The graph's plan.
    ///
    /// # Errors
    /// As [`plan()`].
    fn plan(self, graph: Graph, target: &Target, limits: &Limits) -> Result<Plan> {
        Ok(self.compile(graph, target, limits)?.0)
    }
}

impl Planning for Recipe {
    fn graph(self, graph: Graph, target: &Target, limits: &Limits) -> Result<Prepared> {
        let job = Job { recipe: self, ..Job::of(graph, target) };
        Ok(Planner::new(&job)?.graphs(limits.memory)?.swap_remove(0))
    }

    fn compile(self, graph: Graph, target: &Target, limits: &Limits) -> Result<Compiled> {
        compiled(&Job { recipe: self, limit: limits.memory, ..Job::of(graph, target) })
    }
}

/// The plan of a graph whose passes have run, with the data of its constants.
///
/// # Errors
/// As [`plan()`].
pub fn compile(graph: &Prepared, target: &Target, limits: &Limits) -> Result<Compiled> {
    compiled(&Job::of(graph.clone(), target).within(limits.memory))
}

/// The plan of a graph whose passes have run.
///
/// # Errors
/// As [`plan()`].
pub fn planned(graph: &Prepared, target: &Target, limits: &Limits) -> Result<Plan> {
    Ok(compile(graph, target, limits)?.0)
}

/// The plan of a job, with its data.
///
/// # Errors
/// As [`plan()`].
pub fn compiled(job: &Job) -> Result<Compiled> {
    let Planned { plan, data, .. } = plan(job)?;
    Ok((plan, data))
}

/// Plans for all runs at once, which together are to be within the limit. `make` plans one run under a limit.
///
/// # Errors
/// The error of `make`; [`Error::Fit`] when the runs do not fit together; [`Error::Usage`] when their bytes cannot be counted.
pub fn for_all_runs(
    runs: u32,
    limit: Option<u64>,
    make: &mut dyn FnMut(Option<u64>) -> Result<Planned>,
) -> Result<Planned> {
    let mut made = make(limit)?;
    loop {
        let (bytes, constants) = set_runs(runs, &mut made.plan)?;
        let Some(limit) = limit.filter(|&limit| bytes > limit) else { return Ok(made) };
        // One run may have taken more than its least, for speed. If the next one is too large, too, it has fewer constants than this one, so
        // that this ends.
        let each = constants + limit.saturating_sub(constants) / u64::from(runs);
        made = make(Some(each)).map_err(|error| match error {
            Error::Fit { needed, .. } => {
                let own = needed.saturating_sub(constants).saturating_mul(u64::from(runs));
                let what = format!("the plan of {runs} runs at once of '{}'", made.plan.title());
                Error::Fit { what, needed: constants.saturating_add(own), limit, file: None }
            }
            error => error,
        })?;
    }
}

/// Notes the number of runs in a plan. Returns the bytes of all runs, and those of the constants.
fn set_runs(runs: u32, plan: &mut Plan) -> Result<(u64, u64)> {
    let (constants, each) = (plan.class_bytes(Class::Constant), plan.run_bytes());
    let all = each.checked_mul(runs.into()).and_then(|bytes| bytes.checked_add(constants));
    let all = all.filter(|&bytes| bytes <= i64::MAX as u64).ok_or_else(|| {
        Error::usage(format!("runs: the bytes of {runs} runs at once, {each} each, are beyond 63 bits"))
    })?;
    ensure(runs <= MOST_RUNS, || Error::usage(format!("runs: expected at most {MOST_RUNS} at once, found {runs}")))?;
    plan.programs.iter_mut().for_each(|program| program.summary.planned_bytes = all);
    plan.runs = runs;
    Ok((all, constants))
}

/// A part whose steps are ordered and whose buffers have places.
enum Ready<'a> {
    Graph(&'a Prepared, Box<Arrangement>),
    Range(Box<Arranged>),
}

impl<'a> Ready<'a> {
    fn new(part: &'a Part, target: &Target, limits: &Limits) -> Result<Ready<'a>> {
        Ok(match part {
            Part::Graph(graph) | Part::Fixed(graph) => {
                Ready::Graph(graph, Box::new(arrange(target, limits, |options| draft(graph, target, options))?))
            }
            Part::Range(bindings) => Ready::Range(Box::new(Arranged::new(bindings.clone(), target, limits)?)),
        })
    }

    fn arrangement(&self) -> &Arrangement {
        match self {
            Ready::Graph(_, arrangement) => arrangement,
            Ready::Range(range) => &range.arrangement,
        }
    }

    /// The plan of this part with these segments and places.
    fn finish(
        mut self,
        name: &str,
        target: &Target,
        segments: &[Segment],
        places: Vec<Option<Spot>>,
    ) -> Result<Planned> {
        let arrangement = match &mut self {
            Ready::Graph(_, arrangement) => arrangement,
            Ready::Range(range) => &mut range.arrangement,
        };
        (arrangement.segments, arrangement.places) = (segments.to_vec(), places);
        let name = (!name.is_empty()).then(|| name.to_owned());
        Ok(match self {
            Ready::Graph(graph, found) => {
                let same: Vec<_> = BufferIdx::all(&found.draft.buffers).map(Some).collect();
                let (mut plan, data) = assemble(graph, target, &found, &found.draft, &same)?;
                if let Some(name) = name {
                    plan.programs = plan.programs.into_iter().map(|program| program.named(name.clone())).collect();
                }
                Planned { plan, data, ranges: vec![None], graphs: vec![graph.graph.clone()] }
            }
            Ready::Range(range) => {
                let graph = range.graph().graph.clone();
                let range = range.finish(name)?;
                let (plan, data) = range.largest().clone();
                Planned { plan, data, ranges: vec![Some(range)], graphs: vec![graph] }
            }
        })
    }
}

/// Plans with each program arranged as if it had the memory of `own` for itself.
fn together(names: &[&str], parts: &[Part], target: &Target, own: &Limits) -> Result<Planned> {
    let ready = parts.iter().map(|part| Ready::new(part, target, own)).collect::<Result<Vec<_>>>()?;
    agree(names, &ready)?;
    let drafts: Vec<_> = ready.iter().map(|part| (&part.arrangement().draft, &part.arrangement().layout)).collect();
    let (segments, places) = stack(target, &drafts);
    let parts = names.iter().zip(ready).zip(places);
    let mut made = parts.map(|((name, part), places)| part.finish(name, target, &segments, places));
    let mut all = made.next().expect("a job has a program")?;
    let own = |program: &str, choices: &mut Vec<Knob>| {
        choices.iter_mut().filter(|_| names.len() > 1).for_each(|knob| knob.program = Some(program.to_owned()));
    };
    own(names[0], &mut all.plan.choices);
    for (name, next) in names[1..].iter().zip(made) {
        let Planned { mut plan, data, ranges, graphs } = next?;
        own(name, &mut plan.choices);
        all.plan.choices.extend(plan.choices);
        all.plan.programs.extend(plan.programs);
        all.plan.tuned = all.plan.tuned.or(plan.tuned);
        all.data.extend(data);
        all.ranges.extend(ranges);
        all.graphs.extend(graphs);
    }
    check::check(&all.plan)?;
    Ok(all)
}

/// Refuses states of one name that differ.
fn agree(names: &[&str], parts: &[Ready]) -> Result<()> {
    let mut known: HashMap<&str, (&str, &Draft, &DraftState)> = HashMap::new();
    for (program, part) in names.iter().zip(parts) {
        let draft = &part.arrangement().draft;
        for state in &draft.states {
            let buffer = &draft.buffers[state.buffer];
            let (other, of, first) = known.entry(&buffer.name).or_insert((program, draft, state));
            let before = &of.buffers[first.buffer];
            let (a, b) = (format!("{}{}", before.dtype, before.shape), format!("{}{}", buffer.dtype, buffer.shape));
            let name = &buffer.name;
            if a != b {
                return Err(Error::usage(format!(
                    "state '{name}' is {a} in program '{other}', and {b} in '{program}'"
                )));
            }
            let same = match (&first.initial, &state.initial) {
                (Some(a), Some(b)) => a.same(b),
                (a, b) => a.is_none() && b.is_none(),
            };
            if !same {
                return Err(Error::usage(format!(
                    "state '{name}' begins with other elements in program '{other}' than in '{program}'"
                )));
            }
        }
    }
    Ok(())
}
