//! The front door: a path or a graph in, a plan that runs out.

use crate::backend::cpu::{Cpu, Region};
use crate::backend::ranks::Ranks;
use crate::backend::{Backend, Place, Usage};
use crate::error::{Error, Result, ensure};
use crate::exec::finite::NotFinite;
use crate::exec::{self, Exec};
use crate::figures::grouped;
use crate::graph::Graph;
use crate::kernel::call::Call;
use crate::kernel::tuned::Tuned;
use crate::mesh::Mesh;
use crate::onnx;
use crate::plan::range::{ShapeRange, Source};
use crate::plan::{self, Data, Graphs, Job, Kept, Plan, Planned, Port, Rule, Sharding, View};
use crate::reserve;
use crate::shape::{Extent, Shape};
use crate::target::Target;
use crate::tensor::Tensor;
use crate::tune;
use crate::whole::batch;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

mod options;
mod ranks;
mod saved;

pub use options::Options;
pub use saved::Saved;

/// The device to run on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Choice {
    /// The best available device: CUDA, else wgpu on a GPU, else the CPU.
    #[default]
    Auto,
    /// An NVIDIA GPU.
    Cuda,
    /// Any wgpu adapter, software ones included.
    Wgpu,
    /// The host.
    Cpu,
}

impl Options {
    /// A model's file as these options shape its graph, and its dims. One of several programs may have one half of a state's pair.
    pub(crate) fn shape(&self, model: onnx::Model, several: bool) -> Result<(onnx::Model, Vec<(String, Extent)>)> {
        let model = if self.training { model.with_training()? } else { model };
        let model = self.ties.iter().try_fold(model, |model, (dim, sum)| model.with_tie(dim, sum))?;
        let model = if several { model.with_shared_state(&self.state).0 } else { model.with_state(&self.state) };
        let model = model.with_given(self.given.iter().map(String::as_str))?;
        let model = model.with_outputs(&self.outputs).with_values(self.values.clone());
        let mut dims = self.dims.clone();
        if let Some(extent) = self.batch {
            let dim = batch(&model)?;
            let bound = dims.iter().any(|(name, _)| *name == dim);
            ensure(!bound, || {
                Error::usage(format!("dim '{dim}' is the batch, and bound by its name: expected one of them"))
            })?;
            dims.push((dim, extent));
        }
        model.grow(dims)
    }

    /// These options as a job: programs to plan for a device.
    #[doc(hidden)]
    pub fn job<N: Into<String>, G: Into<Graphs>>(
        &self,
        programs: impl IntoIterator<Item = (N, G)>,
        device: &Device,
    ) -> Job {
        let measured = || Some(Arc::new(tune::cache::load(&device.backend.identity())?.0));
        let schedules = if self.tuned { measured() } else { None };
        let reserved = Target { reserve: device.reserve, ..device.backend.target().clone() };
        Job { schedules, ..self.job_for(programs, &reserved) }
    }

    /// These options as a job: programs to plan for a target.
    pub(crate) fn job_for<N: Into<String>, G: Into<Graphs>>(
        &self,
        programs: impl IntoIterator<Item = (N, G)>,
        target: &Target,
    ) -> Job {
        let target = target.among(self.mesh.as_ref().map_or(1, Mesh::ranks));
        let (recipe, limit, runs, sharding) = (self.recipe, self.memory_limit, self.forks, self.sharding());
        Job { recipe, limit, runs, sharding, ..Job::new(programs, &target) }
    }

    /// What is asked of a mesh, if there is one.
    #[doc(hidden)]
    pub fn sharding(&self) -> Option<Sharding> {
        asked(self.mesh.as_ref(), &self.shards, self.shard_states, self.ranks.as_deref())
    }
}

/// What is asked of a mesh, if there is one. What is to be split without a mesh names an axis that is not there, and is refused.
#[doc(hidden)]
pub fn asked(mesh: Option<&Mesh>, shards: &[Rule], kept: Kept, ranks: Option<&dyn Ranks>) -> Option<Sharding> {
    let splits = !shards.is_empty() || kept != Kept::Whole;
    let mesh = mesh.cloned().or_else(|| splits.then(Mesh::default))?;
    Some(Sharding { mesh, rank: ranks.map_or(0, Ranks::rank), by: shards.to_vec(), kept })
}

/// A device that is open.
#[doc(hidden)]
pub struct Device {
    /// The device.
    pub backend: Box<dyn Backend>,
    /// Which device it is, in one line.
    pub name: String,
    /// Why it is not a better one that was looked for.
    pub fallback: Option<String>,
    /// The ranks that it has joined.
    pub ranks: Option<Arc<dyn Ranks>>,
    /// The bytes that a plan for its ranks leaves to NCCL, if they were measured; 0 if they are not known.
    pub reserve: u64,
}

impl Device {
    /// A device that the caller opened, such as one over memory of its own.
    pub fn new(backend: Box<dyn Backend>, name: impl Into<String>) -> Device {
        Device { backend, name: name.into(), fallback: None, ranks: None, reserve: 0 }
    }

    /// The target of plans for the ranks of a mesh, or for this device alone.
    pub fn target(&self, mesh: Option<&Mesh>) -> Target {
        let own = self.backend.target().clone();
        Target { reserve: self.reserve, ..own }.among(mesh.map_or(1, Mesh::ranks))
    }

    /// The device and, where it stands in for a better one, the reason.
    #[doc(hidden)]
    pub fn described(&self) -> String {
        match &self.fallback {
            Some(why) => format!("{} ({why})", self.name),
            None => self.name.clone(),
        }
    }
}

/// Opens the device that `options` select.
///
/// # Errors
/// [`Error::Backend`] if the named device is absent.
pub fn open(options: &Options) -> Result<Device> {
    let ((mut backend, name), fallback) = find(options)?;
    if let Some(ranks) = &options.ranks {
        backend.join(Arc::clone(ranks))?;
    }
    let reserve = match &options.mesh {
        Some(mesh) => reserve::known(&*backend, mesh, options.ranks.as_deref())?,
        None => 0,
    };
    Ok(Device { backend, name, fallback, ranks: options.ranks.clone(), reserve })
}

/// The CPU over memory that the host program lends.
///
/// # Errors
/// [`Error::Usage`] when the options name a GPU; when a part of the memory is lent already.
pub(crate) fn lent(options: &Options, memory: &'static mut [u8]) -> Result<Device> {
    ensure(matches!(options.backend, Choice::Auto | Choice::Cpu), || {
        let backend = format!("{:?}", options.backend).to_lowercase();
        Error::usage(format!("memory of the host is lent to the CPU: expected the backend cpu, found {backend}"))
    })?;
    let threads = options.thread_count();
    let backend = Box::new(Cpu::with_arena(threads, Region::of(memory)?));
    Ok(Device::new(backend, format!("cpu, {threads} threads, in memory of the program")))
}

/// The backend with its name, and why it is not a better one that was looked for.
fn find(options: &Options) -> Result<((Box<dyn Backend>, String), Option<String>)> {
    let threads = options.thread_count();
    let cpu = || -> Box<dyn Backend> { Box::new(Cpu::new(threads)) };
    let device = options.device.as_deref();
    match (options.backend, device) {
        (Choice::Cpu, None) => Ok(((cpu(), format!("cpu, {threads} threads")), None)),
        (Choice::Cpu, Some(name)) => Err(Error::Backend {
            backend: "cpu",
            what: format!("no device '{name}': the CPU is one device, without a number"),
            file: None,
        }),
        (Choice::Cuda, _) => Ok((cuda(options)?, None)),
        (Choice::Wgpu, device) => Ok((wgpu(device, true)?, None)),
        (Choice::Auto, _) => {
            let no_cuda = match cuda(options) {
                Ok(opened) => return Ok((opened, None)),
                Err(error) => reason(error),
            };
            let no_wgpu = match wgpu(device, false) {
                Ok(opened) => return Ok((opened, Some(format!("no CUDA: {no_cuda}")))),
                Err(error) => reason(error),
            };
            let why = format!("no CUDA: {no_cuda}; no GPU: {no_wgpu}");
            match device {
                Some(name) => {
                    Err(Error::Backend { backend: "auto", what: format!("no device '{name}' ({why})"), file: None })
                }
                None => Ok(((cpu(), format!("cpu, {threads} threads")), Some(why))),
            }
        }
    }
}

/// An error without the backend's name before it.
fn reason(error: Error) -> String {
    match error {
        Error::Backend { what, .. } => what,
        error => error.to_string(),
    }
}

#[cfg(feature = "cuda")]
fn cuda(options: &Options) -> Result<(Box<dyn Backend>, String)> {
    use crate::backend::cuda::{Settings, library::Search, open};
    let device = match &options.device {
        None => 0,
        Some(name) => name.parse().map_err(|_| {
            let what = format!("no device '{name}': expected the number of a CUDA device");
            Error::Backend { backend: "cuda", what, file: None }
        })?,
    };
    open(&Search::here(), &Settings { device, libraries: options.libraries, allow_tf32: options.allow_tf32 })
}

#[cfg(not(feature = "cuda"))]
fn cuda(_: &Options) -> Result<(Box<dyn Backend>, String)> {
    Err(Error::Backend { backend: "cuda", what: "this build has no CUDA".into(), file: None })
}

#[cfg(feature = "wgpu")]
fn wgpu(device: Option<&str>, software: bool) -> Result<(Box<dyn Backend>, String)> {
    crate::backend::wgpu::open(device, software)
}

#[cfg(not(feature = "wgpu"))]
fn wgpu(_: Option<&str>, _: bool) -> Result<(Box<dyn Backend>, String)> {
    Err(Error::Backend { backend: "wgpu", what: "this build has no wgpu".into(), file: None })
}

/// Refuses a limit that the device's memory makes meaningless.
///
/// # Errors
/// [`Error::Usage`] with both numbers.
pub fn check_limit(backend: &dyn Backend, limit: Option<u64>) -> Result<()> {
    match (limit, backend.room()) {
        (Some(limit), Some(room)) if limit > room.total => {
            let (name, total) = (&backend.target().name, room.total);
            let [limit, total] = [limit, total].map(grouped);
            Err(Error::usage(format!("the memory limit is {limit} bytes, but '{name}' has {total} bytes")))
        }
        _ => Ok(()),
    }
}

/// The library calls of a plan that a device refuses, each with a line in the log.
fn refused(backend: &mut dyn Backend, plan: &Plan) -> Vec<Call> {
    let mut refused = Vec::new();
    for kernel in plan.programs.iter().flat_map(|program| &program.kernels).flat_map(|kernel| kernel.launched()) {
        let Some(call) = kernel.schedule.call() else { continue };
        if let Err(error) = backend.compile(kernel) {
            tracing::warn!("{error}; a text computes it");
            refused.push(call.clone());
        }
    }
    refused
}

/// Plans a job, and once more without the library calls that the device refuses.
pub(crate) fn plan_on(job: &mut Job, backend: &mut dyn Backend) -> Result<Planned> {
    let planned = plan::plan(job)?;
    let refused = refused(backend, &planned.plan);
    if refused.is_empty() {
        return Ok(planned);
    }
    let known = job.schedules.take().map_or_else(Tuned::default, |known| known.filter(|_, _| true));
    job.schedules = Some(Arc::new(known.without(refused)));
    plan::plan(job)
}

/// A plan, loaded on a device: one program or several. Threads can share it; it runs one call at a time.
///
/// ```
/// # std::env::set_current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../..")).expect("the folder of the project");
/// use plimsoll::{Choice, DType, Options, Session, Tensor};
/// let options = Options::default().on(Choice::Cpu).set("batch", 2);
/// let session = Session::from_path("graphs/mlp.onnxtxt", &options)?;
/// assert_eq!(session.usage().bytes, session.plan().bytes());
/// let inputs = session.inputs().iter().map(|input| {
///     let zeros = vec![0.0; input.shape.numel()];
///     (input.name.as_str(), Tensor::from_f64(input.dtype, input.shape.clone(), &zeros))
/// });
/// let outputs = session.run(&inputs.collect::<Vec<_>>())?;
/// assert_eq!(outputs[0].1.shape()[0], 2);
/// # Ok::<(), plimsoll::Error>(())
/// ```
#[derive(Debug)]
pub struct Session {
    family: Arc<Shared>,
    /// The number of its run.
    run: usize,
}

/// A session and its forks: runs at once on the same constants.
#[derive(Debug)]
struct Shared {
    plan: Plan,
    /// Per program, its range if it has one.
    ranges: Vec<Option<ShapeRange>>,
    /// The plan's data, if any program has a range: its bindings may want other constants in their places.
    data: Data,
    device: String,
    /// The ranks of the plan's mesh.
    ranks: Option<Arc<dyn Ranks>>,
    /// The runs that were planned. Constants are the first one's, so it is dropped last.
    runs: Vec<Mutex<Run>>,
    /// The bytes that each run had taken when it was loaded.
    taken: Vec<Usage>,
    /// The numbers of runs that no session has.
    idle: Mutex<Vec<usize>>,
}

impl Drop for Shared {
    fn drop(&mut self) {
        while self.runs.pop().is_some() {}
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.family.idle.lock().unwrap_or_else(PoisonError::into_inner).push(self.run);
    }
}

#[derive(Debug)]
struct Run {
    exec: Exec,
    /// Programs and bindings that are ready, and their numbers in `exec`.
    ready: BTreeMap<(usize, Vec<usize>), usize>,
}

impl Session {
    /// Reads a graph file (`.onnx` or `.onnxtxt`), plans it, and loads it. If a dim has a range, one plan serves all bindings in it.
    ///
    /// # Errors
    /// When the file is not a graph, the plan exceeds the limit, or the device is not there.
    pub fn from_path(path: impl AsRef<Path>, options: &Options) -> Result<Session> {
        let path = path.as_ref();
        let file = onnx::load_weighed(path, options.weights.as_deref())?;
        let (model, dims) = options.shape(file, false).map_err(|e| e.in_file(path))?;
        let device = open(options)?;
        let job = options.job([("", Graphs::Range(source(model), dims))], &device);
        Session::new(job, device, &|_, _| {}).map_err(|e| e.in_file(path))
    }

    /// Plans a graph and loads it.
    ///
    /// # Errors
    /// When the plan exceeds the limit, or the device is not there.
    pub fn from_graph(mut graph: Graph, options: &Options) -> Result<Session> {
        graph.keep_outputs(&options.outputs)?;
        let device = open(options)?;
        Session::new(options.job([("", graph)], &device), device, &|_, _| {})
    }

    /// Plans a graph, and loads it on the CPU into memory of the caller: all segments lie there but what the system and the compiled kernels
    /// take, stacks of threads and tables. Bytes before the first multiple of 256 are not used. Memory of GPUs is lent by `Wgpu::with_buffers`
    /// and `Cuda::lend`, of the crate's internals.
    ///
    /// ```
    /// # std::env::set_current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../..")).expect("the folder of the project");
    /// use plimsoll::{Choice, Graph, Options, Session};
    /// let memory: &'static mut [u8] = vec![0; 1 << 20].leak();
    /// let graph = Graph::from_path("graphs/mlp.onnxtxt", &[("batch", 2)])?;
    /// let options = Options { threads: 1, ..Options::default() }.on(Choice::Cpu);
    /// let session = Session::from_graph_in(graph, &options, memory)?;
    /// assert_eq!(session.usage().bytes, session.plan().bytes());
    /// # Ok::<(), plimsoll::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Fit`] when the memory is too small; [`Error::Usage`] when the options name a GPU; as [`from_graph`](Self::from_graph).
    pub fn from_graph_in(mut graph: Graph, options: &Options, memory: &'static mut [u8]) -> Result<Session> {
        graph.keep_outputs(&options.outputs)?;
        let device = lent(options, memory)?;
        Session::new(options.job([("", graph)], &device), device, &|_, _| {})
    }

    /// Plans a job and loads it. A library call that the device refuses is left to a text. `progress` gets the number of constants loaded so
    /// far, and the number of all.
    ///
    /// # Errors
    /// As [`plan()`](plan::plan()), and when the device refuses.
    #[doc(hidden)]
    pub fn new(mut job: Job, mut device: Device, progress: &dyn Fn(usize, usize)) -> Result<Session> {
        check_limit(&*device.backend, job.limit)?;
        if let Some(Sharding { mesh, .. }) = &job.sharding {
            ranks::expect(mesh, device.ranks.as_ref())?;
        }
        let planned = plan_on(&mut job, &mut *device.backend);
        if let Some(ranks) = &device.ranks {
            ranks::all_well(planned.as_ref().err(), &**ranks)?;
        }
        let planned = planned?;
        if let Some(device) = &planned.plan.tuned {
            let [measured, all] = [|p: &plan::Program| p.measured, |p: &plan::Program| p.steps.len()]
                .map(|count| planned.plan.programs.iter().map(count).sum::<usize>());
            tracing::info!("the algorithms of {measured} of {all} steps were measured on {device}");
        }
        Session::load(planned, device, progress)
    }

    /// Loads a plan, for all runs at once.
    fn load(planned: Planned, device: Device, progress: &dyn Fn(usize, usize)) -> Result<Session> {
        let Planned { plan, data, ranges, .. } = planned;
        let Device { backend, name: device, ranks, .. } = device;
        if let Some(ranks) = &ranks {
            ranks::agree(&plan, &**ranks)?;
        }
        let count = data.iter().map(Vec::len).sum();
        let loaded = Exec::load(backend, plan.clone(), &data, &|n| progress(n, count));
        if let Some(ranks) = &ranks {
            ranks::all_well(loaded.as_ref().err(), &**ranks)?;
        }
        let mut exec = loaded?;
        ranks.iter().try_for_each(|ranks| exec.share(ranks))?;
        let data = if ranges.iter().any(Option::is_some) { data } else { Vec::new() };
        let largest =
            |range: &Option<ShapeRange>| range.iter().flat_map(ShapeRange::dims).map(|dim| dim.most).collect();
        let ready = || ranges.iter().enumerate().map(|(number, range)| ((number, largest(range)), number)).collect();
        let runs = plan.runs as usize;
        let mut execs = (1..runs).map(|_| exec.fork()).collect::<Result<Vec<_>>>()?;
        execs.insert(0, exec);
        let taken = execs.iter().map(|exec| exec.backend().usage()).collect();
        let idle = Mutex::new((1..execs.len()).rev().collect());
        let states = |exec| Mutex::new(Run { exec, ready: ready() });
        let runs = execs.into_iter().map(states).collect();
        Ok(Session { family: Arc::new(Shared { plan, ranges, data, device, ranks, runs, taken, idle }), run: 0 })
    }

    /// A session that runs at the same time as this one: on the same constants, with an arena and states of its own, which begin as this
    /// one's did. [`Options::forks`] plans how many there can be; their memory is taken when the first is loaded. One that is dropped makes
    /// room for another.
    ///
    /// ```
    /// # std::env::set_current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../..")).expect("the folder of the project");
    /// use plimsoll::{Choice, Options, Session, Tensor};
    /// let options = Options { forks: 2, ..Options::default() }.on(Choice::Cpu).set("batch", 1);
    /// let session = Session::from_path("graphs/mlp.onnxtxt", &options)?;
    /// assert_eq!(session.usage().bytes, session.plan().bytes());
    /// let fork = session.fork()?;
    /// std::thread::spawn(move || fork.inputs().len()).join().expect("it runs beside the session");
    /// # Ok::<(), plimsoll::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Usage`] when all runs that were planned are taken.
    pub fn fork(&self) -> Result<Session> {
        let run = self.family.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let Some(run) = run else {
            let plan = self.plan();
            let (forks, more) = (plan.runs, plan.run_bytes());
            return Err(Error::usage(format!(
                "'{}': all of its {forks} runs at once are taken; one more takes {more} bytes: plan it with the option forks",
                plan.title()
            )));
        };
        // If what follows fails, dropping it gives the run back.
        let fork = Session { family: Arc::clone(&self.family), run };
        fork.reset_state()?;
        Ok(fork)
    }

    /// Plans graphs as programs: they run one at a time, in one arena. Constants with the same content and states of one name are there once.
    ///
    /// ```
    /// use plimsoll::{Choice, DType, Options, Session, Tensor, Trace};
    /// let [set, add] = [false, true].map(|adds| {
    ///     let trace = Trace::new("sum");
    ///     let (x, sum) = (trace.input("x", DType::F32, [4]), trace.state("sum", Tensor::from_f64(DType::F32, [4], &[0.0; 4])));
    ///     trace.update(sum, if adds { sum + x } else { x });
    ///     trace.finish().expect("the graph is sound")
    /// });
    /// let session = Session::from_graphs([("set", set), ("add", add)], &Options::default().on(Choice::Cpu))?;
    /// let x = Tensor::from_f32([4], &[1.0; 4])?;
    /// session.program("set")?.run(&[("x", x.clone())])?;
    /// session.program("add")?.run(&[("x", x)])?;
    /// assert_eq!(session.state("sum")?.to_f64(), [2.0; 4]);
    /// # Ok::<(), plimsoll::Error>(())
    /// ```
    ///
    /// # Errors
    /// When all together exceed the limit, states of one name differ, two programs have one name, or the device is not there.
    pub fn from_graphs<N: Into<String>>(
        programs: impl IntoIterator<Item = (N, Graph)>,
        options: &Options,
    ) -> Result<Session> {
        let device = open(options)?;
        let mut programs: Vec<_> = programs.into_iter().map(|(name, graph)| (name.into(), graph)).collect();
        let has = |graph: &Graph, name: &String| graph.outputs().iter().any(|(output, _)| output == name);
        if let Some(name) = options.outputs.iter().find(|name| !programs.iter().any(|(_, graph)| has(graph, name))) {
            let known: Vec<_> = programs.iter().map(|(name, _)| &name[..]).collect();
            let known = known.join(", ");
            return Err(Error::usage(format!("output '{name}': no program has such an output; the programs: {known}")));
        }
        for (_, graph) in &mut programs {
            let own: Vec<String> = options.outputs.iter().filter(|name| has(graph, name)).cloned().collect();
            graph.keep_outputs(&own)?;
        }
        Session::new(options.job(programs, &device), device, &|_, _| {})
    }

    /// The ranks, of a mesh.
    pub(crate) fn ranks(&self) -> Option<&Arc<dyn Ranks>> {
        self.family.ranks.as_ref()
    }

    /// The number of this rank, of a mesh.
    #[doc(hidden)]
    pub fn rank(&self) -> usize {
        self.family.ranks.as_ref().map_or(0, |ranks| ranks.rank())
    }

    /// The plan. A program of a range is that of the largest binding.
    pub fn plan(&self) -> &Plan {
        &self.family.plan
    }

    /// The inputs of a run: their names, types and extents. Of several [programs](Self::program), those of the first.
    pub fn inputs(&self) -> &[Port] {
        &self.family.plan.programs[0].inputs
    }

    /// The outputs of a run. See [`inputs`](Self::inputs).
    pub fn outputs(&self) -> &[Port] {
        &self.family.plan.programs[0].outputs
    }

    /// A program by its name.
    ///
    /// # Errors
    /// When the session has no such program.
    pub fn program(&self, name: &str) -> Result<SessionProgram<'_>> {
        let programs = &self.family.plan.programs;
        let number = programs.iter().position(|program| program.name == name).ok_or_else(|| {
            let known: Vec<_> = programs.iter().map(|program| &program.name[..]).collect();
            Error::usage(format!("no program '{name}'; the programs: {}", known.join(", ")))
        })?;
        Ok(SessionProgram { session: self, number })
    }

    /// All programs, in order: one, if the session was made of one graph.
    pub fn programs(&self) -> impl Iterator<Item = SessionProgram<'_>> {
        (0..self.family.plan.programs.len()).map(|number| SessionProgram { session: self, number })
    }

    /// The device in one line, and why it was chosen.
    pub fn device(&self) -> &str {
        &self.family.device
    }

    /// The memory that the session has taken from the device, for all runs at once.
    pub fn usage(&self) -> Usage {
        let own = self.with(|exec| exec.backend().usage());
        let others = self.family.taken.iter().enumerate().filter(|(run, _)| *run != self.run);
        others.fold(own, |sum, (_, taken)| Usage {
            bytes: sum.bytes + taken.bytes,
            pinned: sum.pinned + taken.pinned,
            allocations: sum.allocations + taken.allocations,
            overhead: sum.overhead.zip(taken.overhead).map(|(sum, taken)| sum + taken),
        })
    }

    /// Memory that the backend and its driver have taken beside the plan, part by part, as far as it is known. What a GPU's driver has taken
    /// for all runs at once is told by the session that was loaded, not by its forks.
    pub fn overhead(&self) -> Vec<(&'static str, u64)> {
        self.with(|exec| exec.backend().overhead())
    }

    /// Runs once: takes inputs by name in any order, gives outputs by name in the graph's order. For a range, the inputs' shapes select the
    /// binding. Of several [programs](Self::program), the first one runs.
    ///
    /// # Errors
    /// When an input is missing, unknown, given twice, or not of the type and shape that were planned.
    pub fn run(&self, inputs: &[(&str, Tensor)]) -> Result<Vec<(String, Tensor)>> {
        self.run_by(0, inputs, Exec::run)
    }

    /// Runs once, with inputs and outputs in memory of the caller. No tensor is made, and nothing is allocated for elements that the device
    /// stores in their own type. Of several [programs](Self::program), the first one runs.
    ///
    /// ```
    /// # std::env::set_current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../..")).expect("the folder of the project");
    /// use plimsoll::{Choice, Options, Place, Session};
    /// let session = Session::from_path("graphs/product.onnxtxt", &Options::default().on(Choice::Cpu).set("n", 2))?;
    /// let (a, b, mut y) = ([0u8; 16], [0u8; 16], [1u8; 16]);
    /// session.run_in_place(&[("a", Place::bytes(&a)), ("b", Place::bytes(&b))], &mut [("y", Place::bytes_mut(&mut y))])?;
    /// assert_eq!(y, [0; 16]);
    /// # Ok::<(), plimsoll::Error>(())
    /// ```
    ///
    /// # Errors
    /// When a place is missing, unknown, given twice, not of its tensor's length, not in memory of the host or of the device that runs, or
    /// overlaps another; when indices come from a device; when a dim has a range. Then nothing runs.
    pub fn run_in_place(&self, inputs: &[(&str, Place)], outputs: &mut [(&str, Place)]) -> Result<()> {
        self.first().run_in_place(inputs, outputs)
    }

    /// Runs as [`run`](Self::run) does, then again step by step with unused memory overwritten. It finds a step that reads such memory.
    ///
    /// # Errors
    /// As [`run`](Self::run); [`Error::Differ`] when a step reads memory that is dead.
    pub fn run_poisoned(&self, inputs: &[(&str, Tensor)]) -> Result<Vec<(String, Tensor)>> {
        self.run_by(0, inputs, Exec::run_poisoned)
    }

    /// Runs a program, or the binding that the inputs' shapes select.
    fn run_by(
        &self,
        program: usize,
        inputs: &[(&str, Tensor)],
        run: fn(&mut Exec, &[Tensor]) -> Result<Vec<Tensor>>,
    ) -> Result<Vec<(String, Tensor)>> {
        let (plan, range) = (&self.family.plan.programs[program], &self.family.ranges[program]);
        let ordered = self.own(program, arrange(plan, inputs)?)?;
        let shapes: Vec<_> = ordered.iter().map(|tensor| Some(tensor.shape())).collect();
        let binding = range.as_ref().map_or(Ok(Vec::new()), |range| range.binding(&shapes))?;
        let outputs = self.lend(|state| {
            self.make_current(state, program, binding)?;
            run(&mut state.exec, &ordered)
        })?;
        Ok(plan
            .outputs
            .iter()
            .map(|p| p.name.clone())
            .zip(exec::found(plan.outputs.iter().map(Port::room), outputs))
            .collect())
    }

    /// The parts of inputs that are this rank's own.
    fn own(&self, program: usize, inputs: Vec<Tensor>) -> Result<Vec<Tensor>> {
        let Shared { plan, ranks, .. } = &*self.family;
        let Some(ranks) = ranks else { return Ok(inputs) };
        let own = |(at, input)| ranks::own(&plan.programs[program], ranks, at, input);
        inputs.into_iter().enumerate().map(own).collect()
    }

    /// The elements of a state, after the last run.
    ///
    /// # Errors
    /// When the graph has no such state, or the device fails.
    pub fn state(&self, name: &str) -> Result<Tensor> {
        self.with(|exec| exec.state(name))
    }

    /// The names of all states, those of other stages of a mesh among them.
    #[doc(hidden)]
    pub fn state_names(&self) -> Vec<String> {
        self.with(exec::Exec::state_names)
    }

    /// Gives a state elements, for the next run.
    ///
    /// # Errors
    /// When the graph has no such state, or the tensor is not of its type and shape: the state is then as before.
    pub fn set_state(&self, name: &str, tensor: &Tensor) -> Result<()> {
        self.with(|exec| exec.set_state(name, tensor))
    }

    /// Gives all states the elements that they began with.
    ///
    /// # Errors
    /// When these cannot be fetched, or the device fails.
    pub fn reset_state(&self) -> Result<()> {
        self.with(Exec::reset_state)
    }

    /// Writes all states to a safetensors file, by name and in their own types. A reader sees the old file or the complete new one.
    ///
    /// ```
    /// use plimsoll::{Choice, DType, Options, Session, Tensor, Trace};
    /// let trace = Trace::new("counter");
    /// let count = trace.state("count", Tensor::from_f32([1], &[0.0])?);
    /// trace.update(count, count + 1.0);
    /// let session = Session::from_graph(trace.finish()?, &Options::default().on(Choice::Cpu))?;
    /// session.run(&[])?;
    /// let path = std::env::temp_dir().join(format!("counter-{}.safetensors", std::process::id()));
    /// session.save_states(&path)?;
    /// session.reset_state()?;
    /// session.load_states(&path)?;
    /// assert_eq!(session.state("count")?.to_f64(), [1.0]);
    /// # std::fs::remove_file(path).expect("it was written");
    /// # Ok::<(), plimsoll::Error>(())
    /// ```
    ///
    /// # Errors
    /// When the graph has no states, the file cannot be written, or the device fails.
    pub fn save_states(&self, path: impl AsRef<Path>) -> Result<()> {
        self.with(|exec| exec.save_states(path.as_ref(), &[]))
    }

    /// Gives all states the elements that a safetensors file has under their names, for the next run. The file is mapped, not read as a
    /// whole.
    ///
    /// # Errors
    /// When the file does not have exactly the states of this session, each of its type and shape, or holds a length beyond its capacity:
    /// all states are then as before. When the device fails.
    pub fn load_states(&self, path: impl AsRef<Path>) -> Result<()> {
        self.with(|exec| exec.load_states(path.as_ref()))
    }

    /// The binding of the range that inputs of these shapes select. A dim that the shapes do not determine has its largest extent. Empty if
    /// no dim has a range. Of several [programs](Self::program), it is the first one's.
    ///
    /// # Errors
    /// When an input is outside of the range.
    pub fn binding(&self, inputs: &[(&str, &Shape)]) -> Result<Vec<(String, usize)>> {
        self.first().binding(inputs)
    }

    /// Prepares a binding of the range, and gives its plan. A dim that is not given has its largest extent. The binding's kernels are compiled
    /// when it is selected, or run, for the first time.
    ///
    /// # Errors
    /// When the binding is not in the range, or the device refuses.
    pub fn select(&self, binding: &[(String, usize)]) -> Result<Plan> {
        self.selected(binding, |exec| exec.plan().plan.clone())
    }

    /// [Selects](Self::select) a binding, and lends its plan before anybody else can select another.
    ///
    /// # Errors
    /// As [`select`](Self::select).
    #[doc(hidden)]
    pub fn selected<T>(&self, binding: &[(String, usize)], f: impl FnOnce(&mut Exec) -> T) -> Result<T> {
        self.first().selected(binding, f)
    }

    fn first(&self) -> SessionProgram<'_> {
        SessionProgram { session: self, number: 0 }
    }

    /// Makes a binding's plan the next to run, and plans it first if it is new.
    fn make_current(&self, state: &mut Run, program: usize, binding: Vec<usize>) -> Result<()> {
        let key = (program, binding);
        let number = match state.ready.get(&key) {
            Some(&number) => number,
            None => {
                let range = self.family.ranges[program].as_ref().expect("a program without a range is ready");
                let (plan, data) = range.at(&key.1)?;
                let number = state.exec.add(plan, &data, &self.family.data)?;
                state.ready.insert(key, number);
                number
            }
        };
        state.exec.select(number)
    }

    /// Lends the loaded plan, for callers that time or repeat its parts. For a range, it is the plan that ran last.
    #[doc(hidden)]
    pub fn with<T>(&self, f: impl FnOnce(&mut Exec) -> T) -> T {
        self.lend(|state| f(&mut state.exec))
    }

    fn lend<T>(&self, f: impl FnOnce(&mut Run) -> T) -> T {
        // A panic in another thread leaves no half-written state that a new run would not overwrite.
        f(&mut self.family.runs[self.run].lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// A program of a [`Session`].
#[derive(Clone, Copy, Debug)]
pub struct SessionProgram<'a> {
    session: &'a Session,
    number: usize,
}

impl<'a> SessionProgram<'a> {
    /// The program as it was planned, with what it shares with the others.
    pub fn plan(self) -> View<'a> {
        self.session.family.plan.views().nth(self.number).expect("the session has it")
    }

    /// Runs once, as [`Session::run`] does.
    ///
    /// # Errors
    /// As [`Session::run`].
    pub fn run(self, inputs: &[(&str, Tensor)]) -> Result<Vec<(String, Tensor)>> {
        self.session.run_by(self.number, inputs, Exec::run)
    }

    /// Runs once, as [`Session::run_in_place`] does.
    ///
    /// # Errors
    /// As [`Session::run_in_place`].
    pub fn run_in_place(self, inputs: &[(&str, Place)], outputs: &mut [(&str, Place)]) -> Result<()> {
        if self.session.family.ranges[self.number].is_some() {
            let what = "a place has no shape, and a dim has a range: expected one extent for each dim";
            return Err(Error::usage(what.into()));
        }
        self.selected(&[], |exec| exec.run_in_place(inputs, outputs))?
    }

    /// Runs as [`Session::run_poisoned`] does.
    ///
    /// # Errors
    /// As [`Session::run_poisoned`].
    pub fn run_poisoned(self, inputs: &[(&str, Tensor)]) -> Result<Vec<(String, Tensor)>> {
        self.session.run_by(self.number, inputs, Exec::run_poisoned)
    }

    /// The parts of inputs, in the plan's order, that are this rank's own.
    ///
    /// # Errors
    /// When one is neither a whole nor a part.
    #[doc(hidden)]
    pub fn own(self, inputs: Vec<Tensor>) -> Result<Vec<Tensor>> {
        self.session.own(self.number, inputs)
    }

    /// Runs step by step, and returns the first result that has a value that is not finite: where a run went wrong. Updates of states stay.
    ///
    /// # Errors
    /// As [`Session::run`].
    #[doc(hidden)]
    pub fn first_not_finite(self, inputs: &[(&str, Tensor)]) -> Result<Option<NotFinite>> {
        let ordered = self.session.own(self.number, arrange(&self.plan(), inputs)?)?;
        self.selected(&[], |exec| exec.first_not_finite(&ordered))?
    }

    /// As [`Session::binding`].
    ///
    /// # Errors
    /// When an input is outside of the range.
    pub fn binding(self, inputs: &[(&str, &Shape)]) -> Result<Vec<(String, usize)>> {
        let Some(range) = &self.session.family.ranges[self.number] else { return Ok(Vec::new()) };
        let plan = self.plan();
        let shape = |port: &plan::Port| inputs.iter().find(|(name, _)| *name == port.name).map(|(_, shape)| *shape);
        let shapes: Vec<_> = plan.inputs.iter().map(shape).collect();
        let extents = range.binding(&shapes)?;
        Ok(range.dims().iter().map(|d| d.name.clone()).zip(extents).collect())
    }

    /// Makes it the program that runs, by this binding, and lends it to a caller that times or repeats its parts.
    ///
    /// # Errors
    /// As [`Session::select`].
    #[doc(hidden)]
    pub fn selected<T>(self, binding: &[(String, usize)], f: impl FnOnce(&mut Exec) -> T) -> Result<T> {
        let dims = self.session.family.ranges[self.number].as_ref().map_or(&[][..], ShapeRange::dims);
        if let Some((name, extent)) = binding.iter().find(|(name, _)| dims.iter().all(|d| d.name != *name)) {
            return Err(Error::usage(format!("{name}={extent}: no range was planned for a dim '{name}'")));
        }
        let extent = |dim: &plan::Dim| binding.iter().find(|(name, _)| *name == dim.name).map_or(dim.most, |b| b.1);
        let extents: Vec<usize> = dims.iter().map(extent).collect();
        self.session.lend(|state| {
            self.session.make_current(state, self.number, extents)?;
            Ok(f(&mut state.exec))
        })
    }
}

/// The graphs of a model, for a range of its dims.
pub fn source(model: onnx::Model) -> Source {
    let model = onnx::Symbolic::new(model);
    Arc::new(move |dims| model.at(dims))
}

/// Inputs given by name, in the order of the plan.
///
/// # Errors
/// When one is missing, unknown or given twice.
pub fn arrange(plan: &plan::Program, inputs: &[(&str, Tensor)]) -> Result<Vec<Tensor>> {
    for (i, (name, _)) in inputs.iter().enumerate() {
        if !plan.inputs.iter().any(|p| p.name == *name) {
            let known: Vec<_> = plan.inputs.iter().map(|p| p.name.as_str()).collect();
            let known = known.join(", ");
            return Err(Error::usage(format!("input '{name}': not an input of the graph; its inputs: {known}")));
        }
        if inputs[..i].iter().any(|(other, _)| other == name) {
            return Err(Error::usage(format!("input '{name}' is given twice")));
        }
    }
    let find = |name: &str| inputs.iter().find(|(n, _)| *n == name).map(|(_, t)| t.clone());
    let missing = |p: &plan::Port| Error::usage(format!("input '{}' ({}{}) is missing", p.name, p.dtype, p.shape));
    plan.inputs.iter().map(|p| find(&p.name).ok_or_else(|| missing(p))).collect()
}
