//! Arguments that commands share: the model, its inputs, the device. Also the parsers of flags.

use super::Failure;
use super::modules::modules;
use super::open::{self, Whole};
use super::ranks::Meshed;
use crate::advise::{Answer, Case, advise};
use crate::decoder;
use crate::dtype::DType;
use crate::error::{Error, Result, ensure};
use crate::file::fnv;
use crate::graph::Graph;
use crate::model::fill::{self, CONVERT, made};
use crate::pass::Quantize;
use crate::pass::offload::Offload;
use crate::plan::{Graphs, Job, Mesh, Plan, Prefer, Program, Recipe};
use crate::random::splitmix;
use crate::report::picture::Modules;
use crate::report::{Table, human};
use crate::session::{Choice, Device, Options};
use crate::shape::{Extent, Shape};
use crate::target::{Family, Libraries, PRESETS, Preset, Target};
use crate::tensor::Tensor;
use crate::train::data::of_other_format;
use crate::{figures, npz, onnx, report};
use clap::{Args, ValueEnum};
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::json;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// What to do with an array of another type.

#[derive(Args, Clone)]
pub(super) struct Model {
    /// The graph: an .onnx or .onnxtxt file. Or a folder with a decoder: a genai_config.json and its graph.
    pub(super) model: PathBuf,
    /// Take the elements of initializers from this safetensors file, by their names. It stays mapped.
    #[arg(long, value_name = "FILE")]
    pub(super) weights: Option<PathBuf>,
    /// Give a named dim its extent. `plan`, `run` and `bench` also take a range, such as 1..64, which includes both ends. An input that is
    /// given sets the dims of its shape, too; what is left is 1. A dim may be a sum of other dims and numbers: total=past+sequence. LOOP.trips=N bounds the iterations of a Loop of which the run decides how often it runs.
    #[arg(long, value_name = "DIM=N", value_parser = bound)]
    pub(super) set: Vec<(String, Bound)>,
    /// Of a folder with a decoder, as onnxruntime-genai has it (genai_config.json): plan room in its caches for N tokens, the prompt among them.
    /// Default: as many as the model was made for. --set prefill=N is the number of tokens of a prompt that are taken at a time.
    #[arg(long, value_name = "N")]
    pub(super) context: Option<usize>,
    /// Give an input's shape, such as x=8x3x224x224, in the place of the sizes that the file fixes. The nodes must allow it. It stands for
    /// --set x.0=8 --set x.1=3 and so on.
    #[arg(long = "shape", value_name = "INPUT=NxN", value_parser = shape)]
    pub(super) shapes: Vec<Axes>,
    /// Keep a state on the device from one run to the next: an input that reads it, and the output that updates it. It begins as zeros. One
    /// * in both stands for the same text: --state 'past_*=present_*'.
    ///
    /// If the output is the input with new rows behind it (a Concat), give the dim of the rows a range, such as --set past=0..4096. Room for
    /// 4096 rows is planned once, and each run writes its new rows. Their number is a state of the dim's name. Other inputs that have as many
    /// rows as there are after a run take 4096.
    #[arg(long, value_name = "INPUT=OUTPUT", value_parser = pair)]
    pub(super) state: Vec<(String, String)>,
    /// Run the training step of the file: the graph and the algorithm of its training_info. Initializers that the step updates are states,
    /// which go on from run to run and which --save-states writes. Without it, the graph runs alone.
    #[arg(long)]
    pub(super) training: bool,
    /// Compute this output alone; give it several times for several. What only other outputs need is not computed, except updates of states.
    #[arg(long = "output", value_name = "NAME")]
    pub(super) outputs: Vec<String>,
    /// The models' files of a saved plan, which is then in the place of the graph; no flag of its own, but one of the commands that run plans.
    #[arg(skip)]
    pub(super) of: Vec<PathBuf>,
    /// The extent of the dim that leads the inputs; no flag of its own, but one of the commands that have a use for it.
    #[arg(skip)]
    pub(super) batch: Option<u64>,
    /// The extent of the dim of `set` that --batch gave; no flag of its own.
    #[arg(skip)]
    pub(super) of_batch: Option<u64>,
    /// Runs at once; no flag of its own, but one of the commands that have a use for it.
    #[arg(skip = 1u32)]
    pub(super) forks: u32,
    /// Refuse a plan that takes more memory than this, with exit code 2. For `max-batch`, which needs it, the memory to fill. A size is a number of bytes, or has
    /// a unit: K, M, G, T or KiB .. TiB are powers of 1024, KB .. TB of 1000.
    #[arg(long, value_name = "SIZE", value_parser = limit, allow_hyphen_values = true)]
    pub(super) memory_limit: Option<u64>,
    /// Compile each operator to a kernel of its own: no fusion.
    #[arg(long)]
    pub(super) no_fuse: bool,
    /// Store f32 values as f16 inside; on the CPU, only weights. Inputs and outputs stay f32; results are less exact.
    #[arg(long)]
    pub(super) f16: bool,
    /// Save memory: hold the weights of matrix products in few bits, int8 or int4, with a scale for each 32 numbers of a column, or for as many as are
    /// given: int4:64. They are rounded to the nearest number; results are less exact.
    #[arg(long, value_name = "TYPE")]
    pub(super) quantize: Option<Quantize>,
    /// Save memory: hold caches, the states that each run writes rows to, in 8 bits, with a scale for each row of a head. Results are less exact.
    #[arg(long, value_name = "TYPE")]
    pub(super) cache: Option<Cache>,
    /// Save memory: compute the largest activations in N chunks of the batch, one after another. If the batch is 1, tokens are split, but not images.
    /// Under a limit, no more is split than needed to fit. A part that would save nothing stays whole.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = chunks)]
    pub(super) chunks: u32,
    /// What comes first where memory and speed pull apart: streams, copies, workspaces, recomputation, measured schedules. memory takes the
    /// smallest plan, speed as much as the limit allows. Default: a balance, which takes speed where that costs little memory. `plan -v` lists the choices.
    #[arg(long, value_name = "WHAT", value_enum)]
    pub(super) prefer: Option<First>,
    /// Keep data in pinned memory of the host, from which planned copies bring it shortly before it is read: of a training, what is kept beside
    /// the weights (states); the weights; or all. Limits are of the device. For CUDA.
    #[arg(long, value_enum, value_name = "WHAT")]
    pub(super) offload: Option<Offloaded>,
    #[command(flatten)]
    pub(super) several: Meshed,
    /// Threads of the CPU backend. Default: one per core of this machine; where no device is used, the target's number, which is 2 for cpu.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=4096))]
    pub(super) threads: Option<u16>,
    /// On CUDA, do not use cuBLASLt and cuDNN.
    #[arg(long)]
    pub(super) no_libraries: bool,
    /// On CUDA, let matrix products and convolutions round f32 operands to TF32. That is faster; the error is about 1e-3 of the peak.
    #[arg(long)]
    pub(super) allow_tf32: bool,
}

#[derive(Args)]
pub(super) struct Inputs {
    /// Give an input: NAME=FILE.npy, NAME=FILE.npz:MEMBER, or NAME=2x784xf32=0.5 for equal elements, or
    /// NAME=2x128xi64=random:0..99 for random integers from 0 to 99. Elements of at most 8 bits: NAME=2x64xi4=3, NAME=2x64xf8e4m3fn=0.5, or arrays
    /// of i1, u1 or f4 whose elements the type has. FILE.npz alone gives an input for each of its members, by name. Inputs
    /// that are not given are random; those that look up rows of a table are indices of its rows. Another type is converted if that changes no element. What shapes the computation (axes, sizes ...) is bound.
    /// A state begins with what is given; a cache that grows may have fewer rows than there is room for. Of several programs, those that have
    /// the input take it; PROGRAM:NAME=VALUE gives it to one alone.
    #[arg(long = "input", visible_alias = "inputs", value_name = "NAME=VALUE")]
    pub(super) inputs: Vec<String>,
    /// Seed of the random inputs.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(super) seed: u64,
}

/// The type of caches.
#[derive(Clone, Copy, PartialEq, ValueEnum)]
pub(super) enum Cache {
    /// Integers of 8 bits, with a scale for each row.
    Int8,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
pub(super) enum Backend {
    /// CUDA if it is usable, else wgpu on a GPU, else the CPU. The log says which, and why.
    Auto,
    /// An NVIDIA GPU.
    Cuda,
    /// A Vulkan, Metal or DX12 device, or a software adapter.
    Wgpu,
    /// The host's threads.
    Cpu,
}

/// What comes first.
#[derive(Clone, Copy, PartialEq, ValueEnum)]
pub(super) enum First {
    Memory,
    Speed,
}

impl From<First> for Prefer {
    fn from(first: First) -> Prefer {
        match first {
            First::Memory => Prefer::Memory,
            First::Speed => Prefer::Speed,
        }
    }
}

/// What lies in the memory of the host.
#[derive(Clone, Copy, PartialEq, ValueEnum)]
pub(super) enum Offloaded {
    States,
    Weights,
    All,
}

impl From<Offloaded> for Offload {
    fn from(what: Offloaded) -> Offload {
        match what {
            Offloaded::States => Offload::States,
            Offloaded::Weights => Offload::Weights,
            Offloaded::All => Offload::All,
        }
    }
}

impl From<Backend> for Choice {
    fn from(backend: Backend) -> Choice {
        match backend {
            Backend::Auto => Choice::Auto,
            Backend::Cuda => Choice::Cuda,
            Backend::Wgpu => Choice::Wgpu,
            Backend::Cpu => Choice::Cpu,
        }
    }
}

#[derive(Args)]
pub(super) struct On {
    /// The backend to run on.
    #[arg(long, value_enum, default_value_t = Backend::Auto)]
    pub(super) backend: Backend,
    /// The backend's device: its number, or, for wgpu, a part of its name. Default: the first CUDA device, the best wgpu device.
    #[arg(long, value_name = "N")]
    pub(super) device: Option<String>,
}

#[derive(Args)]
pub(super) struct Measured {
    /// Do not use the schedules that `tune` measured on this device.
    #[arg(long)]
    pub(super) no_tuned: bool,
}

impl Model {
    /// The options of a session, from the flags.
    ///
    /// # Errors
    /// A flag that the backend, if one is asked for, has no use for.
    pub(super) fn options(&self, on: &On) -> Result<Options> {
        match on.backend {
            Backend::Auto => {}
            Backend::Cuda => self.suits(Family::Cuda, "--backend cuda")?,
            Backend::Wgpu => self.suits(Family::Wgpu, "--backend wgpu")?,
            Backend::Cpu => self.suits(Family::Cpu, "--backend cpu")?,
        }
        Ok(Options {
            backend: on.backend.into(),
            device: self.several.device(on.device.as_deref(), on.backend == Backend::Cuda),
            libraries: !self.no_libraries,
            allow_tf32: self.allow_tf32,
            state: self.state.clone(),
            training: self.training,
            outputs: self.outputs.clone(),
            // The flag is one of those of dims by then.
            batch: None,
            values: Vec::new(),
            given: Vec::new(),
            weights: self.weights.clone(),
            ties: self.ties().map(|(dim, sum)| (dim.to_owned(), sum.to_owned())).collect(),
            dims: self.dims(),
            threads: self.several.threads(self.threads),
            recipe: self.recipe(),
            memory_limit: self.memory_limit,
            forks: self.forks,
            tuned: true,
            mesh: self.several.mesh.clone(),
            shards: self.several.shards.clone(),
            shard_states: self.several.kept(),
            ranks: self.several.ranks.clone(),
        })
    }

    /// Refuses a flag that devices of a family have no use for.
    fn suits(&self, family: Family, asked: &str) -> Result<()> {
        let flags = [
            ("--threads", Family::Cpu, self.threads.is_some()),
            ("--no-libraries", Family::Cuda, self.no_libraries),
            ("--allow-tf32", Family::Cuda, self.allow_tf32),
            ("--offload", Family::Cuda, self.offload.is_some()),
        ];
        match flags.into_iter().find(|&(_, of, given)| given && of != family) {
            Some((flag, of, _)) => {
                Err(Error::usage(format!("{flag}: {asked} has no use for it: it is for {} alone", of.name())))
            }
            None => Ok(()),
        }
    }

    /// The files that the flags name to be read, and those with the models' data.
    pub(super) fn read(&self) -> impl Iterator<Item = PathBuf> {
        let models = [&self.model].into_iter().chain(&self.of).flat_map(|path| model_files(path));
        models.chain(self.weights.clone())
    }

    /// How the graph is compiled, from the flags.
    pub(super) fn recipe(&self) -> Recipe {
        let Model { f16, quantize, cache, .. } = *self;
        let int8_caches = cache == Some(Cache::Int8);
        let prefer = self.prefer.map_or(Prefer::Balance, Prefer::from);
        let offload = self.offload.map_or(Offload::None, Offload::from);
        Recipe { f16, fuse: !self.no_fuse, chunks: self.chunks as usize, quantize, int8_caches, prefer, offload }
    }

    /// Programs as a job, as the flags have it compiled.
    ///
    /// # Errors
    /// As [`Meshed::sharding`].
    pub(super) fn job<N: Into<String>, G: Into<Graphs>>(
        &self,
        programs: impl IntoIterator<Item = (N, G)>,
        target: &Target,
    ) -> Result<Job> {
        let target = target.among(self.several.mesh.as_ref().map_or(1, Mesh::ranks));
        Ok(Job { recipe: self.recipe(), sharding: self.several.sharding()?, ..Job::new(programs, &target) })
    }

    /// The target of this name, as the flags change it.
    ///
    /// # Errors
    /// When there is no such target, or it has no use for a flag.
    pub(super) fn target(&self, name: &str) -> Result<Target> {
        let mut target = Target::named(name)?;
        self.suits(target.family, &format!("target '{name}'"))?;
        if let (Family::Cpu, Some(threads)) = (target.family, self.threads) {
            target.threads = threads.into();
        }
        if self.no_libraries {
            target.libraries = Libraries::default();
        }
        target.allow_tf32 |= self.allow_tf32;
        Ok(target)
    }

    /// Refuses to offload data of a device that has no memory beside the host's.
    pub(super) fn may_offload(&self, device: &Device) -> Result<()> {
        let Target { name, family, .. } = device.backend.target();
        ensure(self.offload.is_none() || *family == Family::Cuda, || {
            Error::usage(format!(
                "--offload: expected a CUDA device, which has memory beside the host's, found '{name}'"
            ))
        })
    }

    /// The options that made a plan, for its origin: the dims that flags set, and behind them those that inputs set, which are not bound anew by
    /// other inputs.
    pub(super) fn origin(&self, set: &[(String, Extent)], all: &[(String, Extent)]) -> Result<Options> {
        let is_set = |(name, _): &&(String, Extent)| set.iter().any(|(other, _)| other == name);
        let given = all.iter().filter(|dim| !is_set(dim));
        let dims = set.iter().chain(given).cloned().collect();
        Ok(Options { dims, ..self.options(&On { backend: Backend::Auto, device: None })? })
    }

    /// These flags as options of a plan's program shape its graph.
    pub(super) fn shaped(&self, options: &Options) -> Model {
        let Options { dims, ties, state, training, outputs, .. } = options.clone();
        let extents = dims.into_iter().map(|(name, extent)| (name, Bound::Extent(extent)));
        let set = extents.chain(ties.into_iter().map(|(name, sum)| (name, Bound::Tie(sum)))).collect();
        Model { set, context: None, shapes: Vec::new(), state, training, outputs, ..self.clone() }
    }

    /// The dims that flags set.
    pub(super) fn dims(&self) -> Vec<(String, Extent)> {
        let context = self.context.map(|tokens| (decoder::CONTEXT.to_owned(), tokens.into()));
        let set = self.set.iter().filter_map(|(name, bound)| match bound {
            Bound::Extent(extent) => Some((name.clone(), *extent)),
            Bound::Tie(_) => None,
        });
        set.chain(context).chain(self.shapes.iter().flat_map(Axes::dims)).collect()
    }

    /// These flags with other extents of dims.
    pub(super) fn with_dims(&self, dims: &[(String, usize)]) -> Model {
        let extents = dims.iter().map(|(name, extent)| (name.clone(), Bound::Extent((*extent).into())));
        let ties = self.set.iter().filter(|(_, bound)| matches!(bound, Bound::Tie(_))).cloned();
        Model { set: extents.chain(ties).collect(), context: None, shapes: Vec::new(), ..self.clone() }
    }

    /// The dims that follow from others, and the sums that they are.
    pub(super) fn ties(&self) -> impl Iterator<Item = (&str, &str)> {
        self.set.iter().filter_map(|(name, bound)| match bound {
            Bound::Extent(_) => None,
            Bound::Tie(sum) => Some((name.as_str(), sum.as_str())),
        })
    }

    /// True if the model is a folder with a decoder.
    pub(super) fn is_folder(&self) -> bool {
        decoder::Files::are_in(&self.model)
    }

    /// The decoder, if the model is a folder.
    ///
    /// # Errors
    /// When the folder has none, or a flag is for a graph alone.
    pub(super) fn decoder(&self) -> Result<Option<decoder::Files>> {
        if !self.is_folder() {
            return Ok(None);
        }
        let files = decoder::Files::read(&self.model)?;
        let flags = [
            ("--batch", self.batch.is_some()),
            ("--shape", !self.shapes.is_empty()),
            ("--state", !self.state.is_empty()),
            ("--training", self.training),
            ("--output", !self.outputs.is_empty()),
            ("--set of a sum", self.ties().next().is_some()),
            ("--mesh", self.several.mesh.is_some()),
        ];
        match flags.into_iter().find(|(_, given)| *given) {
            Some((flag, _)) => Err(Error::usage(format!("{flag}: a folder with a decoder has no use for it"))),
            None => Ok(Some(files)),
        }
    }

    /// The first flag given that changes how the model is planned, if any is.
    pub(super) fn flag(&self) -> Option<&'static str> {
        let Model {
            model: _,
            weights: _,
            set,
            context,
            shapes,
            state,
            training,
            outputs,
            of: _,
            forks: _,
            batch,
            of_batch: _,
            memory_limit,
            no_fuse,
            f16,
            quantize,
            cache,
            chunks,
            threads,
            no_libraries,
            allow_tf32,
            prefer,
            offload,
            several: Meshed { mesh, shards, states, ranks: _ },
        } = self;
        let flags = [
            ("--set", !set.is_empty()),
            ("--batch", batch.is_some()),
            ("--context", context.is_some()),
            ("--shape", !shapes.is_empty()),
            ("--state", !state.is_empty()),
            ("--training", *training),
            ("--output", !outputs.is_empty()),
            ("--memory-limit", memory_limit.is_some()),
            ("--no-fuse", *no_fuse),
            ("--prefer", prefer.is_some()),
            ("--offload", offload.is_some()),
            ("--f16", *f16),
            ("--quantize", quantize.is_some()),
            ("--cache", cache.is_some()),
            ("--chunks", *chunks > 1),
            ("--threads", threads.is_some()),
            ("--no-libraries", *no_libraries),
            ("--allow-tf32", *allow_tf32),
            ("--mesh", mesh.is_some()),
            ("--shard", !shards.is_empty()),
            ("--shard-states", states.is_some()),
        ];
        flags.into_iter().find_map(|(flag, given)| given.then_some(flag))
    }

    /// Refuses flags that the training of a model has no use for.
    pub(super) fn suits_training(&self) -> Result<()> {
        let flags = [
            ("--state", !self.state.is_empty()),
            ("--training", self.training),
            ("--output", !self.outputs.is_empty()),
            ("--f16", self.f16),
            ("--quantize", self.quantize.is_some()),
            ("--cache", self.cache.is_some()),
            ("--chunks", self.chunks > 1),
        ];
        match flags.into_iter().find(|(_, given)| *given) {
            Some((flag, _)) => Err(Error::usage(format!("{flag}: --train has no use for it"))),
            None => Ok(()),
        }
    }

    /// Loads the model. A named dim has one extent, from `--set` or from the shape of a given input. Others are open.
    pub(super) fn load(&self, given: &[Given]) -> Result<(onnx::Model, Vec<(String, usize)>)> {
        let fixed = |(name, extent): (String, Extent)| match extent.fixed() {
            Some(extent) => Ok((name, extent)),
            None => {
                Err(Error::usage(format!("--set {name}={extent}: expected one extent, as this command takes no range")))
            }
        };
        let (model, dims) = self.load_open(given)?;
        Ok((model, dims.into_iter().map(fixed).collect::<Result<_>>()?))
    }

    /// The file as it is, with the elements of `--weights`.
    pub(super) fn file(&self) -> Result<onnx::Model> {
        if self.is_folder() {
            let graph = decoder::Files::read(&self.model)?.path();
            let what = "expected one graph, as is trained and written, found the folder of a decoder";
            return Err(Error::usage(format!("{what}; its graph: {}", graph.display())).in_file(&self.model));
        }
        let file = onnx::load_weighed(&self.model, self.weights.as_deref());
        file.map_err(|error| if self.weights.is_none() { open::not_a_model(&self.model, error) } else { error })
    }

    /// The modules that the file names, for pictures; `None` for the folder of a decoder.
    pub(super) fn modules(&self) -> Option<Modules> {
        Some(modules(&onnx::load(&self.model).ok()?.proto))
    }

    /// Loads the model with all of its dims, which may have ranges.
    pub(super) fn load_whole(&self, given: &[Given]) -> Result<Whole> {
        let (model, dims) = self.load_open(given)?;
        Whole::new(model, dims).map_err(|e| e.in_file(&self.model))
    }

    fn load_open(&self, given: &[Given]) -> Result<(onnx::Model, Vec<(String, Extent)>)> {
        if self.model.extension().is_some_and(|end| end == "json") {
            let what =
                "it is no model; `run` and `bench` run a saved plan, if --model gives the model that it was made of";
            return Err(Error::usage(what.into()).in_file(&self.model));
        }
        let model = self.file()?;
        let model = if self.training { model.with_training()? } else { model };
        if model.offers_training() {
            tracing::info!("the file has a training step, which --training runs");
        }
        self.shapes.iter().try_for_each(|shape| shape.suits(&model)).map_err(|e| e.in_file(&self.model))?;
        let model = self.ties().try_fold(model, |model, (dim, sum)| model.with_tie(dim, sum))?;
        let model = model.with_state(&self.state).with_outputs(&self.outputs);
        let (model, dims) = model.grow(self.dims())?;
        self.bind(model, dims, given)
    }

    /// Adds the dims that the shapes of given inputs set, and the elements of those that are states.
    pub(super) fn bind(
        &self,
        model: onnx::Model,
        mut dims: Vec<(String, Extent)>,
        given: &[Given],
    ) -> Result<(onnx::Model, Vec<(String, Extent)>)> {
        if let Some(Given { name, .. }) = given.iter().find(|g| !model.takes(&g.name)) {
            let inputs: Vec<&str> = model.proto.graph.iter().flat_map(|g| &g.input).map(|i| i.name.as_str()).collect();
            let what = format!("--input {name}: not an input of the graph; its inputs: {}", inputs.join(", "));
            return Err(Error::usage(what).in_file(&self.model));
        }
        let model = model.with_given(given.iter().map(|given| &given.name[..]))?;
        for Given { name, tensor, flag } in given {
            if let Some(expected) = model.other_rank(name, tensor.shape()) {
                let (dtype, shape) = (tensor.dtype(), tensor.shape());
                let what = format!("{flag}: input '{name}': expected {expected}, found {dtype}{shape}");
                return Err(Error::usage(what).in_file(&self.model));
            }
            for (dim, extent) in model.dims_of(name, tensor.shape()) {
                if !model.grows_along(&dim) && !dims.iter().any(|(d, _)| *d == dim) {
                    dims.push((dim, extent.into()));
                }
            }
        }
        let given = given.iter().map(|g| (g.name.clone(), g.tensor.clone()));
        let (states, values) = given.partition(|(name, _)| model.is_state(name));
        Ok((model.with_first(states).with_values(values), dims))
    }

    /// The graph of a loaded model, at its largest extents.
    pub(super) fn import(&self, Whole { model, dims, assumed }: &Whole, given: &[Given]) -> Result<Graph> {
        let graph = onnx::import(model, &open::largest(dims));
        let graph = graph.map_err(|e| open::blamed(assumed, e.in_file(&self.model)))?;
        for &input in graph.inputs() {
            let (name, fact) = (graph.value_name(input), graph.fact(input));
            let is_same = |tensor: &Tensor| {
                *tensor.shape() == fact.shape
                    && (tensor.dtype() == fact.dtype || tensor.converted(fact.dtype).is_some())
            };
            let wrong = |g: &&Given| g.name == name && !is_same(&g.tensor);
            if let Some(Given { tensor, flag, .. }) = given.iter().find(wrong) {
                let (dtype, shape) = (tensor.dtype(), tensor.shape());
                let extents: Vec<_> = shape.iter().map(usize::to_string).collect();
                let is_bound = |dim: &str| dims.iter().find(|(bound, _)| bound == dim).map(|(_, extent)| extent.most());
                let own = model.dims_of(name, shape).into_iter();
                let mut others = own.filter_map(|(dim, found)| Some((is_bound(&dim)?, dim, found)));
                let remedy = match others.find(|(bound, _, found)| bound != found) {
                    _ if *shape == fact.shape => CONVERT.to_owned(),
                    _ if shape.len() != fact.shape.len() => String::new(),
                    Some((bound, dim, found)) if !self.of.is_empty() => {
                        format!("; the saved plan has {dim}={bound}: plan again for {found}")
                    }
                    Some((bound, ..)) if self.of_batch == Some(bound as u64) => {
                        format!("; leave out --batch {bound}, or give {bound} rows")
                    }
                    Some((bound, dim, _)) if self.set.iter().any(|(name, _)| *name == dim) => {
                        format!("; leave out --set {dim}={bound}, or give it {bound} there")
                    }
                    _ => {
                        format!("; --shape {name}={} plans for that shape, where the nodes allow it", extents.join("x"))
                    }
                };
                let what = format!("{flag}: input '{name}': expected {fact}, found {dtype}{shape}{remedy}");
                return Err(Error::usage(what).in_file(&self.model));
            }
        }
        Ok(graph)
    }

    /// Says which inputs and outputs look like states, if none is made one.
    pub(super) fn mention_states(&self, graph: &Graph) {
        let likely = if self.state.is_empty() { onnx::likely_states(graph) } else { Vec::new() };
        if let Some((input, output)) = likely.first() {
            let count = likely.len();
            let pairs =
                if count == 1 { "1 pair looks like a state".into() } else { format!("{count} pairs look like states") };
            tracing::info!("{pairs}; to keep them on the device: --state {input}={output}");
        }
    }

    /// The answer for a plan that fits the limit, if there is one.
    pub(super) fn answer(&self, plan: &Plan) -> Option<Answer> {
        self.memory_limit.map(|limit| Answer::of(plan, limit))
    }

    /// The answer as the last line of a report.
    pub(super) fn answer_text(&self, plan: &Plan) -> String {
        self.answer(plan).map_or(String::new(), |answer| format!("\n{}", report::answer(&answer)))
    }
}

#[derive(Args)]
pub(super) struct Planned {
    /// Run a saved plan, which is given in place of the graph: FILE is the model that it was made of. A plan of several programs takes the file of
    /// each, in their order, or one of all. The plan is checked, and must be of files with this content. Dims, states and outputs are the
    /// plan's; weights of another file, and inputs that shape the computation, are given again.
    #[arg(id = "of", long = "model", value_name = "FILE")]
    pub(super) of: Vec<PathBuf>,
}

/// True if a dim has a range.
pub(super) fn has_range(dims: &[(String, Extent)]) -> bool {
    dims.iter().any(|(_, extent)| extent.fixed().is_none())
}

/// Refuses to write a file twice, or one that is read, or is in a folder of which all files are.
pub(super) fn outputs<'a>(
    files: impl IntoIterator<Item = (&'static str, &'a Path)>,
    read: impl IntoIterator<Item = impl AsRef<Path>>,
) -> Result<()> {
    let mut files = files.into_iter().peekable();
    if files.peek().is_none() {
        return Ok(());
    }
    let read: Vec<PathBuf> = read.into_iter().map(|path| whole(path.as_ref())).collect();
    let mut taken: Vec<(&str, PathBuf)> = Vec::new();
    for (flag, path) in files {
        // A device or a pipe takes whatever comes.
        if path.metadata().is_ok_and(|there| !there.is_file()) {
            continue;
        }
        let whole = whole(path);
        let is_read = read.iter().any(|read| is_same(read, &whole) || read.is_dir() && whole.starts_with(read));
        ensure(!is_read, || {
            Error::usage(format!("{flag} would replace {}, which is read: expected another file", path.display()))
        })?;
        if let Some((other, _)) = taken.iter().find(|(_, taken)| is_same(taken, &whole)) {
            let what = format!("{other} and {flag} would both write {}: expected a file for each", path.display());
            return Err(Error::usage(what));
        }
        taken.push((flag, whole));
    }
    Ok(())
}

/// The path of a file without links; of one that is not there yet, in its folder's.
fn whole(path: &Path) -> PathBuf {
    let in_folder = || {
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        Some(folder.canonicalize().ok()?.join(path.file_name()?))
    };
    path.canonicalize().ok().or_else(in_folder).unwrap_or_else(|| path.to_owned())
}

/// True if two paths lead to one file, perhaps by two names of it.
fn is_same(a: &Path, b: &Path) -> bool {
    #[cfg(unix)]
    if let (Ok(a), Ok(b)) = (a.metadata(), b.metadata()) {
        use std::os::unix::fs::MetadataExt;
        return (a.dev(), a.ino()) == (b.dev(), b.ino());
    }
    a == b
}

/// The files that flags name for arrays: `NAME=FILE`, `FILE`, or one of these with a member of an archive behind it.
pub(super) fn arrays(given: &[String]) -> impl Iterator<Item = PathBuf> {
    let file = |text: &String| {
        let path = text.split_once('=').map_or(&text[..], |(_, path)| path);
        let archive = path.rsplit_once(':').map(|(file, _)| file).filter(|file| file.ends_with(".npz"));
        PathBuf::from(archive.unwrap_or(path))
    };
    given.iter().map(file).filter(|path| path.exists())
}

/// The file of a model, and those with its data.
pub(super) fn model_files(path: &Path) -> Vec<PathBuf> {
    let mut files = vec![path.to_owned()];
    if path.is_dir() {
        // All files of a folder are read, perhaps.
        return files;
    }
    // What is no model is told where it is read.
    files.extend(onnx::load(path).into_iter().flat_map(|model| model.files()));
    files
}

/// Refuses a file that could not be written, before the work that it is to hold.
pub(super) fn has_place(path: &Path) -> Result<()> {
    let fail = |what: String| Err(Error::File { path: path.to_owned(), what, source: None });
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    if path.is_dir() || path.as_os_str().to_string_lossy().ends_with(std::path::is_separator) {
        return fail("expected a file to write, found a folder".to_owned());
    }
    if !folder.is_dir() {
        return fail(format!("cannot be written: there is no folder {}", folder.display()));
    }
    // A device or a pipe is written through. A file is made beside its place first.
    if !path.exists() || path.is_file() {
        let trial = folder.join(format!(".plimsoll-{}.partial", std::process::id()));
        File::create(&trial)
            .and_then(|_| std::fs::remove_file(&trial))
            .map_err(|e| Error::file(path, "write it", e))?;
    }
    Ok(())
}

/// Explains an [`Error::Fit`]: what would fit, what is live at the peak, what would help.
pub(super) fn refuse(case: &Case, error: Error, json: bool) -> Failure {
    let Error::Fit { limit, .. } = error else { return error.into() };
    match advise(case, Some(limit)) {
        Ok(advice) => Failure::explained(error, json, json!(advice), report::advice(&advice)),
        // The first error says more than an error of its explanation.
        Err(_) => error.into(),
    }
}

/// The named targets and their limits.
pub(super) fn targets() -> String {
    let mut table = Table::new("<>>><");
    table.row(["", "buffer", "binding", "bindings", ""]);
    for Preset { name, doc, target } in PRESETS {
        let Target { max_segment, max_binding, max_bindings, .. } = target();
        let bindings = if max_bindings == u32::MAX { "any".to_owned() } else { max_bindings.to_string() };
        table.row([format!("  {name}"), human(max_segment), human(max_binding), bindings, (*doc).to_owned()]);
    }
    let files = "  FILE         one device, from `devices cuda:0`, or the one GPU of `devices --json`
  FILE#cuda:0  this device of such a list";
    format!("Targets:\n{table}{files}")
}

/// A state's input and output.
fn pair(text: &str) -> Result<(String, String), String> {
    let (input, output) = text.split_once('=').ok_or("expected INPUT=OUTPUT")?;
    let stars = |text: &str| text.matches('*').count();
    if stars(input) > 1 || stars(input) != stars(output) {
        return Err(format!("expected one * in both names or in none, found '{text}'"));
    }
    Ok((input.to_owned(), output.to_owned()))
}

/// The axes of an input, by the dims that they set.
#[derive(Clone)]
pub(super) struct Axes {
    input: String,
    extents: Vec<usize>,
}

impl Axes {
    /// The dims that they set.
    pub(super) fn dims(&self) -> impl Iterator<Item = (String, Extent)> {
        let axis = |(axis, extent): (usize, &usize)| (format!("{}.{axis}", self.input), Extent::from(*extent));
        self.extents.iter().enumerate().map(axis)
    }

    /// Refuses another number of axes than an input of a model has.
    pub(super) fn suits(&self, model: &onnx::Model) -> Result<()> {
        let Axes { input, extents } = self;
        let shape: Shape = extents.iter().copied().collect();
        match model.other_rank(input, &shape) {
            Some(declared) => {
                Err(Error::usage(format!("--shape {input}: the file declares {declared}, found {shape}")))
            }
            None if !model.takes(input) => {
                let inputs = model.declared_inputs();
                Err(Error::usage(format!("--shape {input}: not an input of the graph; its inputs: {inputs}")))
            }
            None => Ok(()),
        }
    }
}

pub(super) fn shape(text: &str) -> Result<Axes, String> {
    let (input, extents) = text.rsplit_once('=').ok_or("expected INPUT=NxN, such as x=8x3x224x224")?;
    let number = |extent: &str| {
        let wrong = |_| format!("expected numbers with x between them after '{input}=', found '{extents}'");
        extent.parse::<usize>().map_err(wrong)
    };
    Ok(Axes { input: input.to_owned(), extents: extents.split('x').map(number).collect::<Result<_, _>>()? })
}

/// What `--set` gives a dim.
#[derive(Clone)]
pub(super) enum Bound {
    Extent(Extent),
    /// A sum of other dims and numbers.
    Tie(String),
}

/// A dim and its extent, or the sum that it is.
fn bound(text: &str) -> Result<(String, Bound), String> {
    match text.rsplit_once('=') {
        Some((name, sum)) if sum.contains(|c: char| c.is_alphabetic() || c == '_') && !sum.contains("..") => {
            Ok((name.to_owned(), Bound::Tie(sum.to_owned())))
        }
        _ => binding(text).map(|(name, extent)| (name, Bound::Extent(extent))),
    }
}

pub(super) fn binding(text: &str) -> Result<(String, Extent), String> {
    // A dim's name may contain '='.
    let (name, extent) = text.rsplit_once('=').ok_or("expected DIM=N")?;
    let number = |text: &str| {
        let fail = |_| format!("expected a whole number, or a range such as 1..64, after '{name}=', found '{extent}'");
        text.parse::<usize>().map_err(fail)
    };
    let extent = match extent.split_once("..") {
        Some((least, most)) if number(least)? > number(most)? => {
            return Err(format!("the range '{extent}' of '{name}' is empty: expected the smaller extent first"));
        }
        Some((least, most)) => Extent::from(number(least)?..=number(most)?),
        None => number(extent)?.into(),
    };
    Ok((name.to_owned(), extent))
}

/// A batch.
pub(super) fn batch(text: &str) -> Result<u64, String> {
    match text.contains("..") {
        true => Err(format!("expected one whole number above 0; a range goes to --set batch={text}")),
        false => rows(text),
    }
}

/// A number of rows.
pub(super) fn rows(text: &str) -> Result<u64, String> {
    let number = text.parse().ok().filter(|&number| number > 0);
    number.ok_or_else(|| "expected a whole number above 0".to_owned())
}

/// A number of chunks.
fn chunks(text: &str) -> Result<u32, String> {
    let number = text.parse().ok().filter(|&number| number > 0);
    number.ok_or_else(|| {
        "expected a whole number above 0: the most chunks; under --memory-limit, no more are made than needed to fit".to_owned()
    })
}

/// A dim and a list of extents.
pub(super) fn extents(text: &str) -> Result<(String, Vec<usize>), String> {
    let (name, list) = text.rsplit_once('=').ok_or("expected DIM=N,N,..")?;
    let number =
        |text: &str| text.parse().map_err(|_| format!("expected whole numbers after '{name}=', found '{text}'"));
    Ok((name.to_owned(), list.split(',').map(number).collect::<Result<_, _>>()?))
}

/// A memory limit.
pub(super) fn limit(text: &str) -> Result<u64, String> {
    match figures::size(text)? {
        0 => Err("expected a size above 0, such as 512MiB".into()),
        bytes => Ok(bytes),
    }
}

pub(super) fn duration(text: &str) -> Result<Duration, String> {
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let scale = match unit.trim() {
        "ms" => 1e-3,
        "s" => 1.0,
        "m" | "min" => 60.0,
        other => return Err(format!("unknown unit '{other}'; use ms, s or min")),
    };
    let seconds = number.parse::<f64>().ok().and_then(|n| Duration::try_from_secs_f64(n * scale).ok());
    seconds.ok_or_else(|| format!("expected a time such as 500ms, found '{text}'"))
}

pub(super) fn tolerance(text: &str) -> Result<f64, String> {
    let value = text.parse::<f64>().ok().filter(|v| v.is_finite() && *v >= 0.0);
    value.ok_or_else(|| "expected a number that is not negative".into())
}

/// A tensor that a flag gives, by name.
#[derive(Clone)]
pub(super) struct Given {
    pub(super) name: String,
    pub(super) tensor: Tensor,
    /// The argument as it was given, for messages.
    pub(super) flag: String,
}

pub(super) fn given(flag: &str, values: &[String]) -> Result<Vec<Given>> {
    let mut given = Vec::with_capacity(values.len());
    for text in values {
        // An archive alone has a tensor per name.
        let file = Path::new(text);
        if npz::is_archive(file) && (!text.contains('=') || file.exists()) {
            let own = |(name, tensor)| Given { flag: format!("{flag} {text}: {name}"), name, tensor };
            given.extend(npz::read_all(file)?.into_iter().map(own));
        } else {
            given.push(value(flag, text)?);
        }
    }
    Ok(given)
}

fn value(flag: &str, text: &str) -> Result<Given> {
    let bad = || {
        Error::usage(format!(
            "{flag} {text}: expected NAME=FILE.npy, NAME=FILE.npz:MEMBER, NAME=2x784xf32=0.5, NAME=2x128xi64=random:0..99 or FILE.npz"
        ))
    };
    let (name, value) = text.split_once('=').ok_or_else(bad)?;
    let (name, flag) = (name.to_owned(), format!("{flag} {text}"));
    let Some((spec, fill)) = value.split_once('=').filter(|_| !Path::new(value).exists()) else {
        let file = Path::new(value);
        let tensor = npz::read(file).map_err(|error| of_other_format(file, error))?;
        return Ok(Given { name, tensor, flag });
    };
    let mut parts: Vec<&str> = spec.split('x').collect();
    let dtype = parts.pop().and_then(DType::from_name).ok_or_else(bad)?;
    let shape = parts.iter().map(|d| d.parse::<usize>().map_err(|_| bad())).collect::<Result<Vec<_>>>()?;
    let mut fill: Box<dyn FnMut() -> f64> = match fill.strip_prefix("random:").map(|range| range.split_once("..")) {
        Some(range) => {
            let (least, most) = range.ok_or_else(bad)?;
            let [least, most] = [least, most].map(|bound| bound.parse::<i64>());
            let (Ok(least), Ok(most)) = (least, most) else { return Err(bad()) };
            // Larger numbers are no doubles, by which elements are made.
            ensure([least, most].iter().all(|bound| bound.unsigned_abs() <= 1 << 53), bad)?;
            let count = most.checked_sub(least).and_then(|n| u64::try_from(n).ok()?.checked_add(1)).ok_or_else(bad)?;
            let mut random = splitmix(fnv(name.as_bytes()) as u64);
            Box::new(move || least as f64 + (random() % count) as f64)
        }
        None => {
            let fill: f64 = fill.parse().map_err(|_| bad())?;
            Box::new(move || fill)
        }
    };
    // What a small type does not have is refused, as in a file.
    let (least, most) = dtype.range();
    let mut outside = None;
    let tensor = made(dtype, Shape::new(shape), || {
        let value = fill();
        if dtype.is_narrow() && !(least..=most).contains(&value) {
            outside.get_or_insert(value);
        }
        value
    });
    let tensor = tensor.map_err(|what| Error::usage(format!("{flag}: {what}")))?;
    if let Some(value) = outside {
        return Err(Error::usage(format!("{flag}: expected {dtype} from {least} to {most}, found {value}")));
    }
    Ok(Given { name, tensor, flag })
}

/// Inputs in the plan's order: those given, random ones for the rest. What is given to states is in the graph.
pub(super) fn fill(plan: &Program, mesh: Option<&Mesh>, given: Vec<Given>, seed: u64) -> Result<Vec<Tensor>> {
    fill::fill(plan, mesh, given.into_iter().map(|g| (g.name, g.tensor)).collect(), seed)
}

/// Loads weights under a bar. `load` gets a function that takes the number of constants loaded so far, and the number of all.
pub(super) fn loading<T>(load: impl FnOnce(&dyn Fn(usize, usize)) -> T) -> T {
    let bar = progress("weights");
    let loaded = load(&|done, of| {
        bar.set_length(of as u64);
        bar.set_position(done as u64);
    });
    bar.finish_and_clear();
    loaded
}

/// Lines of the log about a search that takes long, one now and then.
pub(super) struct Pace {
    last: Instant,
}

impl Pace {
    /// The time from one line to the next.
    const EVERY: Duration = Duration::from_secs(3);

    /// From now on.
    pub(super) fn new() -> Pace {
        Pace { last: Instant::now() }
    }

    /// Says how far the search is, if nothing was said for a while.
    pub(super) fn say(&mut self, line: impl FnOnce() -> String) {
        if self.last.elapsed() >= Pace::EVERY {
            tracing::info!("{}", line());
            self.last = Instant::now();
        }
    }
}

/// Writes a line to stderr: above the bar, if it is seen.
pub(super) fn above(bar: &ProgressBar, line: &str) {
    if bar.is_hidden() {
        // Where stderr is closed, nobody waits for it.
        let _ = writeln!(std::io::stderr(), "{line}");
    } else {
        bar.println(line);
    }
}

/// A bar on a terminal, nothing elsewhere.
pub(super) fn progress(what: &'static str) -> ProgressBar {
    let style =
        ProgressStyle::with_template("{msg:>10} [{wide_bar}] {pos}/{len} {eta}").expect("the template is valid");
    ProgressBar::new(0).with_style(style.progress_chars("=> ")).with_message(what)
}
