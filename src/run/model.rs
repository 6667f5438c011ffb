//! A model's file, and what is asked of it: what it takes, whether it fits, what would help, how far it grows, how it runs and trains.

use crate::advise::{self, Advice, Case, Largest, Trained};
use crate::eager::compare::{self, Comparison, Setup};
use crate::error::{Error, Result, ensure};
use crate::fit::{self, Asked, Cluster, Found};
use crate::log::silent;
use crate::onnx;
use crate::pass::shard::Kept;
use crate::plan::{self, Graphs, Job, Plan, Planned};
use crate::session::{self, Device, Options, Session};
use crate::shape::Extent;
use crate::target::Target;
use crate::tensor::Tensor;
use crate::train::run::{self, Trainer};
use crate::train::{Training, quoted};
use crate::whole::{Whole, largest, leading};
use std::borrow::Cow;
use std::fmt;
use std::ops::Bound::Unbounded;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::time::Instant;

pub mod fill;

/// A model's file as [`Options`] shape it, before it runs. All that it is asked needs no device and no weights, but for what runs it.
///
/// Dims that no option binds are 1: [`assumed`](Model::assumed) has their names.
///
/// ```
/// # std::env::set_current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../..")).expect("the folder of the project");
/// use plimsoll::{Model, Options, Target};
/// let model = Model::from_path("graphs/mlp.onnxtxt", &Options::default().batch(8).memory_limit(1 << 20))?;
/// let plan = model.plan(&Target::cpu(1))?;
/// println!("{plan}");
/// assert!(plan.bytes() <= 1 << 20);
/// let found = model.max_batch(&Target::cpu(1), None)?;
/// assert!(found.fits.is_some_and(|size| size.extent >= 8));
/// # Ok::<(), plimsoll::Error>(())
/// ```
#[derive(Clone)]
pub struct Model {
    path: Option<PathBuf>,
    /// The file, before dims are bound.
    file: onnx::Model,
    /// As it is planned.
    whole: Whole,
    options: Options,
}

impl fmt::Debug for Model {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Model").field("name", &self.name()).field("dims", &self.whole.dims).finish_non_exhaustive()
    }
}

/// The file of a model and how it was read: what a plan is saved with, so that a session can load it again.
#[derive(Clone, Debug)]
pub struct Source {
    path: PathBuf,
    options: Options,
}

impl Source {
    /// A plan as its file has it: with its origin, if it has a source. It reads the whole file of the model.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub fn name<'a>(of: Option<&Source>, plan: &'a Plan) -> Result<Cow<'a, Plan>> {
        let Some(Source { path, options }) = of else { return Ok(Cow::Borrowed(plan)) };
        Ok(Cow::Owned(Plan { origin: Some(options.origin(path)?), ..plan.clone() }))
    }
}

impl Model {
    /// Reads a graph file, `.onnx` or `.onnxtxt`.
    ///
    /// # Errors
    /// When the file is not a graph, or an option does not suit it.
    pub fn from_path(path: impl AsRef<Path>, options: &Options) -> Result<Model> {
        let path = path.as_ref();
        let file = onnx::load_weighed(path, options.weights.as_deref())?;
        Model::new(file, Some(path.to_owned()), options).map_err(|e| e.in_file(path))
    }

    /// Reads the bytes of a graph file. Data that it refers to lie in the current folder.
    ///
    /// # Errors
    /// As [`from_path`](Self::from_path).
    pub fn from_bytes(bytes: impl Into<bytes::Bytes>, options: &Options) -> Result<Model> {
        let file = onnx::from_bytes(bytes)?;
        let file = options.weights.iter().try_fold(file, |file, weights| file.with_elements_of(weights))?;
        Model::new(file, None, options)
    }

    /// Reads the bytes of a graph file of this name, which need not be there.
    ///
    /// # Errors
    /// As [`from_path`](Self::from_path).
    #[doc(hidden)]
    pub fn from_bytes_of(path: &Path, bytes: bytes::Bytes, options: &Options) -> Result<Model> {
        let file = onnx::from_bytes_of(path, bytes)?;
        Model::new(file, Some(path.to_owned()), options).map_err(|e| e.in_file(path))
    }

    fn new(file: onnx::Model, path: Option<PathBuf>, options: &Options) -> Result<Model> {
        let (shaped, dims) = options.shape(file.clone(), false)?;
        Ok(Model { path, file, whole: Whole::new(shaped, dims)?, options: options.clone() })
    }

    /// The graph's name.
    pub fn name(&self) -> &str {
        self.whole.model.name()
    }

    /// The file, if it is of one.
    pub fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    /// Where it is from, if it is of a file: for plans that are saved.
    #[doc(hidden)]
    pub fn source(&self) -> Option<Source> {
        let options = Options { dims: self.dims().to_vec(), batch: None, ..self.options.clone() };
        Some(Source { path: self.path.clone()?, options })
    }

    /// The named dims, with the extents that they are planned for.
    pub fn dims(&self) -> &[(String, Extent)] {
        &self.whole.dims
    }

    /// The dims that no option binds: they are 1.
    pub fn assumed(&self) -> &[String] {
        &self.whole.assumed
    }

    /// As [`assumed`](Self::assumed), of a training, whose batch is given with it.
    ///
    /// # Errors
    /// When an option has no use in a training.
    #[doc(hidden)]
    pub fn assumed_in_training(&self) -> Result<Vec<String>> {
        Ok(self.trained()?.assumed)
    }

    /// The options.
    pub fn options(&self) -> &Options {
        &self.options
    }

    /// Adds the file to an error.
    fn in_file(&self, error: Error) -> Error {
        match &self.path {
            Some(path) => error.in_file(path),
            None => error,
        }
    }

    /// The graphs, for one binding or for a range.
    fn graphs(&self) -> Result<Graphs> {
        let Whole { model, dims, .. } = &self.whole;
        let is_range = dims.iter().any(|(_, extent)| extent.fixed().is_none());
        Ok(match is_range {
            true => Graphs::Range(session::source(model.clone()), dims.clone()),
            false => onnx::import(model, &largest(dims))?.into(),
        })
    }

    /// The job of a plan for a target, with no schedules measured on a device.
    fn job(&self, target: &Target) -> Result<Job> {
        Ok(self.options.job_for([("", self.graphs()?)], target))
    }

    /// Plans it for a target, with no device and no weights.
    ///
    /// # Errors
    /// [`Error::Fit`] when it does not fit the limit; when an operator is not supported.
    pub fn plan(&self, target: &Target) -> Result<Plan> {
        Ok(self.planned(target)?.plan)
    }

    /// As [`plan`](Self::plan), with the graphs, for pictures.
    ///
    /// # Errors
    /// As [`plan`](Self::plan).
    #[doc(hidden)]
    pub fn planned(&self, target: &Target) -> Result<Planned> {
        self.job(target).and_then(|job| plan::plan(&job)).map_err(|e| self.in_file(e))
    }

    /// A case for advice.
    fn case(&self, target: &Target) -> Case {
        let Whole { model, dims, .. } = &self.whole;
        let Options { recipe, forks, .. } = self.options;
        let case = Case::of(model, largest(dims), target.clone(), recipe);
        Case { runs: forks, sharding: self.options.sharding(), ..case }
    }

    /// What is live at the peak, and the bytes that each remedy would save: whether it fits the limit, if there is one.
    ///
    /// # Errors
    /// When it cannot be planned, with or without a limit.
    pub fn advise(&self, target: &Target) -> Result<Advice> {
        advise::advise(&self.case(target), self.options.memory_limit).map_err(|e| self.in_file(e))
    }

    /// The largest extent of a dim with which the plan fits the limit of the options. By default it is the dim that is left open, or the one
    /// that leads the inputs.
    ///
    /// # Errors
    /// When there is no limit, the dim is not there, or no extent can be planned.
    pub fn max_batch(&self, target: &Target, dim: Option<&str>) -> Result<Largest> {
        let found = self.sought(dim).and_then(|dim| {
            let limit = self.options.memory_limit.ok_or_else(|| {
                Error::usage("the largest extent that fits: expected a memory limit, found none".to_owned())
            })?;
            let mut case = self.case(target);
            if self.assumed().contains(&dim) || Some(&dim) == self.led_by().as_ref() {
                case.dims.retain(|(name, _)| *name != dim);
            }
            advise::largest_binding(&case, &dim, limit)
        });
        found.map_err(|e| self.in_file(e))
    }

    /// The dim that leads the inputs, if an option gives its extent.
    fn led_by(&self) -> Option<String> {
        self.options.batch.and_then(|_| match &leading(&self.file)[..] {
            [dim] => Some(dim.clone()),
            _ => None,
        })
    }

    /// The dim that is asked for, or the only one that is open, or that leads the inputs.
    fn sought(&self, dim: Option<&str>) -> Result<String> {
        let model = &self.whole.model;
        if let Some(dim) = dim {
            let known = self.dims().iter().map(|(name, _)| name.as_str());
            ensure(model.has_dim(dim), || {
                Error::usage(format!("the graph has no dim '{dim}'; the dims: {}", quoted(known)))
            })?;
            return Ok(dim.to_owned());
        }
        let leads = leading(&self.file);
        match (self.assumed(), &leads[..]) {
            ([open], _) => Ok(open.clone()),
            (_, [first]) => Ok(first.clone()),
            (open, _) => {
                let names = if open.is_empty() { &leads } else { open };
                let found = if names.is_empty() { "none".to_owned() } else { quoted(names.iter().map(String::as_str)) };
                let inputs = model.declared_inputs();
                Err(Error::usage(format!("expected one open dim to enlarge, found {found} ({inputs}): name one")))
            }
        }
    }

    /// The meshes on which it fits cards of the options' memory limit, in `cards`.
    ///
    /// # Errors
    /// When there is no limit, or no mesh can be planned.
    pub fn fit(&self, target: &Target, cards: RangeInclusive<usize>, cluster: Cluster) -> Result<Found> {
        ensure(self.options.mesh.is_none(), || {
            Error::usage("the mesh is what is looked for: expected options without one".to_owned())
        })?;
        let limit = self.options.memory_limit.ok_or_else(|| {
            Error::usage("the fewest cards: expected a memory limit, the memory of a card, found none".to_owned())
        })?;
        let programs = || Ok(vec![(String::new(), self.graphs()?, 1)]);
        let job = self.options.job_for(Vec::<(String, Graphs)>::new(), target);
        let (by, kept) = (self.options.shards.clone(), vec![Kept::Whole]);
        let asked = Asked { programs: &programs, job, limit, cards, by, kept, cluster, first: &|_| {} };
        fit::fit(&asked).map_err(|e| self.in_file(e))
    }

    /// Plans it for the device of the options, and loads it.
    ///
    /// # Errors
    /// As [`Session::from_path`].
    pub fn session(&self) -> Result<Session> {
        let load = || self.session_on(session::open(&self.options)?);
        load().map_err(|e| self.in_file(e))
    }

    /// As [`session`](Self::session), on the CPU, in memory of the caller: see [`Session::from_graph_in`]. How much that takes is told by
    /// [`Plan::lent_bytes`].
    ///
    /// # Errors
    /// [`Error::Fit`] when the memory is too small; [`Error::Usage`] when the options name a GPU; as [`session`](Self::session).
    pub fn session_in(&self, memory: &'static mut [u8]) -> Result<Session> {
        let device = session::lent(&self.options, memory);
        device.and_then(|device| self.session_on(device)).map_err(|e| self.in_file(e))
    }

    /// The job of a session on a device.
    fn job_on(&self, device: &Device) -> Job {
        let Whole { model, dims, .. } = &self.whole;
        self.options.job([("", Graphs::Range(session::source(model.clone()), dims.clone()))], device)
    }

    fn session_on(&self, device: Device) -> Result<Session> {
        Session::new(self.job_on(&device), device, &|_, _| {})
    }

    /// Opens the device of the options, and plans it as a [session](Self::session) there is: with the algorithms that were measured on it.
    ///
    /// # Errors
    /// As [`session`](Self::session).
    pub fn plan_here(&self) -> Result<Plan> {
        let plan = || {
            let mut device = session::open(&self.options)?;
            Ok(session::plan_on(&mut self.job_on(&device), &mut *device.backend)?.plan)
        };
        plan().map_err(|e| self.in_file(e))
    }

    /// Runs it as others do, buffer by buffer with and without a pool, and as it is planned, on the device of the options. Inputs that are not
    /// given are random, by a fixed seed. `runs` are timed.
    ///
    /// # Errors
    /// When it cannot run.
    pub fn compare(&self, inputs: &[(&str, Tensor)], runs: usize) -> Result<Comparison> {
        let compared = || {
            let graph = onnx::import(&self.whole.model, &largest(&self.whole.dims))?;
            // A plan for any device says which elements inputs may have.
            let planned = plan::plan(&Job::new([("", graph.clone())], &Target::cpu(1)))?.plan;
            let known = || planned.programs[0].inputs.iter().map(|port| port.name.as_str());
            if let Some((name, _)) = inputs.iter().find(|(name, _)| !known().any(|known| known == *name)) {
                let known = known().collect::<Vec<_>>().join(", ");
                return Err(Error::usage(format!("input '{name}': not an input of the graph; its inputs: {known}")));
            }
            let given = inputs.iter().map(|(name, tensor)| ((*name).to_owned(), tensor.clone())).collect();
            let inputs = fill::fill(&planned.programs[0], None, given, 0)?;
            let setup = Setup {
                open: &|| session::open(&self.options).map(|device| device.backend),
                memory_limit: self.options.memory_limit,
                iters: runs.max(1),
                poison: false,
                recipe: self.options.recipe,
                progress: &|_| {},
                observe: None,
            };
            compare::compare(&graph, &inputs, &setup)
        };
        compared().map_err(|e| self.in_file(e))
    }

    /// Inputs for a run, in the order of a session's: those that are given, and random ones, by a seed, for the rest.
    ///
    /// # Errors
    /// When a given one is not the program's.
    pub fn inputs(plan: &Plan, given: Vec<(String, Tensor)>, seed: u64) -> Result<Vec<(String, Tensor)>> {
        let program = &plan.programs[0];
        let filled = fill::fill(program, plan.mesh.as_ref(), given, seed)?;
        Ok(program.inputs.iter().map(|port| port.name.clone()).zip(filled).collect())
    }

    /// The model with its dims but the batch, for a training.
    fn trained(&self) -> Result<Whole> {
        let options = &self.options;
        let unused = [
            ("state", !options.state.is_empty()),
            ("training", options.training),
            ("output", !options.outputs.is_empty()),
            ("f16", options.recipe.f16),
            ("quantize", options.recipe.quantize.is_some()),
            ("chunks", options.recipe.chunks > 1),
            ("batch", options.batch.is_some()),
        ];
        if let Some((name, _)) = unused.into_iter().find(|(_, is_given)| *is_given) {
            return Err(Error::usage(format!("option {name}: a training has no use for it")));
        }
        let (dims, file) = (options.dims.clone(), self.file.clone());
        Whole::but(file.batch_dim(), file, dims)
    }

    /// The training as a case: `batch` rows an update.
    fn trained_case(&self, target: &Target, batch: usize, training: &Training) -> Result<Trained> {
        let whole = self.trained()?;
        Ok(Trained {
            dims: largest(&whole.dims),
            model: whole.model,
            batch,
            training: training.clone().on(target),
            target: target.clone(),
            recipe: self.options.recipe,
            runs: self.options.forks,
            sharding: self.options.sharding(),
        })
    }

    /// Plans its training on batches of so many rows, with no device and no data.
    ///
    /// # Errors
    /// [`Error::Fit`] when it does not fit the limit; when an operator has no derivatives.
    pub fn plan_training(&self, target: &Target, batch: usize, training: &Training) -> Result<Plan> {
        Ok(self.planned_training(target, batch, training)?.plan)
    }

    /// As [`plan_training`](Self::plan_training), with the graphs, for pictures.
    ///
    /// # Errors
    /// As [`plan_training`](Self::plan_training).
    #[doc(hidden)]
    pub fn planned_training(&self, target: &Target, batch: usize, training: &Training) -> Result<Planned> {
        let case = self.trained_case(target, batch, training);
        let planned = case.and_then(|case| plan::plan(&case.job()?.within(self.options.memory_limit)));
        planned.map_err(|e| self.in_file(e))
    }

    /// What would make its training smaller.
    ///
    /// # Errors
    /// As [`plan_training`](Self::plan_training).
    pub fn advise_training(&self, target: &Target, batch: usize, training: &Training) -> Result<Advice> {
        let case = self.trained_case(target, batch, training);
        case.and_then(|case| advise::advise_training(&case, self.options.memory_limit)).map_err(|e| self.in_file(e))
    }

    /// The largest batch with which its training fits the limit of the options.
    ///
    /// # Errors
    /// When there is no limit, or no batch can be planned.
    pub fn max_batch_of_training(&self, target: &Target, training: &Training) -> Result<Largest> {
        let found = || {
            let limit = self.options.memory_limit.ok_or_else(|| {
                Error::usage("the largest batch that fits: expected a memory limit, found none".to_owned())
            })?;
            advise::largest_batch(training.accumulate, limit, Unbounded, &mut |batch| {
                silent(|| advise::needed(&self.trained_case(target, batch, training)?.job()?.within(Some(limit))))
            })
        };
        found().map_err(|e| self.in_file(e))
    }

    /// Plans its training on data, and loads it on the device of the options.
    ///
    /// # Errors
    /// When data and model do not fit each other, an operator has no derivatives, or the plan exceeds the limit.
    pub fn trainer(&self, data: &run::Data, batch: usize, training: Training) -> Result<Trainer> {
        let made = || {
            let Whole { model, dims, .. } = self.trained()?;
            Trainer::new(model, data, batch, training, &Options { dims, ..self.options.clone() })
        };
        made().map_err(|e| self.in_file(e))
    }
}

impl Session {
    /// Milliseconds of runs on random inputs, by a seed: of as many as are asked for, after one that is not timed.
    ///
    /// # Errors
    /// When it cannot run.
    #[doc(hidden)]
    pub fn bench(&self, seed: u64) -> Result<impl Iterator<Item = Result<f64>>> {
        let inputs = Model::inputs(self.plan(), Vec::new(), seed)?;
        let run = move || {
            let inputs: Vec<_> = inputs.iter().map(|(name, tensor)| (name.as_str(), tensor.clone())).collect();
            let begun = Instant::now();
            self.run(&inputs)?;
            Ok(begun.elapsed().as_secs_f64() * 1e3)
        };
        run()?;
        Ok(std::iter::repeat_with(run))
    }
}
