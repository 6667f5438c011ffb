//! What is asked of a session: the device, and how a graph is compiled.

use super::{Choice, Ranks};
use crate::mesh::Mesh;
use crate::plan::{Kept, Recipe, Rule};
use crate::shape::Extent;
use crate::tensor::Tensor;
use std::path::PathBuf;
use std::sync::Arc;

/// How a graph is compiled and where it runs.
///
/// ```
/// use plimsoll::{Choice, Options};
/// let options = Options { memory_limit: Some(2 << 30), ..Options::default() };
/// let options = options.on(Choice::Cpu).set("batch", 1..=64).set("sequence", 128);
/// assert_eq!(options.dims.len(), 2);
///
/// let same = Options::default().memory_limit(2 << 30).on(Choice::Cpu).batch(1..=64).set("sequence", 128);
/// assert_eq!(same.memory_limit, options.memory_limit);
/// ```
#[derive(Clone, Debug)]
pub struct Options {
    /// The device.
    pub backend: Choice,
    /// The backend's device: its number, or, for wgpu, a part of its name. Default: the first CUDA device, the best wgpu device.
    pub device: Option<String>,
    /// True to let CUDA call cuBLASLt and cuDNN.
    pub libraries: bool,
    /// True to let CUDA round `f32` operands of products and convolutions to TF32.
    pub allow_tf32: bool,
    /// States of a model's file: pairs of an input, which reads the state, and an output, which updates it. One `*` in both stands for the
    /// same text: `("past_*", "present_*")`. If the output is the input with new rows behind it, a range in `dims` is the number of rows:
    /// room for the most is planned once.
    pub state: Vec<(String, String)>,
    /// True to run the training step of a model's file: its graph and the algorithm of its `training_info`, in one. Initializers that the
    /// step updates are states. Otherwise the graph runs alone, and they are constants.
    pub training: bool,
    /// The outputs to compute; empty for all. What only others need is not computed. Of programs, one that has none of these computes all.
    pub outputs: Vec<String>,
    /// Elements of inputs that shape the computation of a model's file, such as axes or sizes: see [`bind`](Options::bind).
    pub values: Vec<(String, Tensor)>,
    /// Inputs of a model's file that each run gives though they have a default there: see [`give`](Options::give).
    pub given: Vec<String>,
    /// A safetensors file: its tensors are the elements of the initializers of a model's file that have their names.
    pub weights: Option<PathBuf>,
    /// Dims of a model's file that follow from others, each with the sum that it is: `("total", "past+new")`.
    pub ties: Vec<(String, String)>,
    /// The extent of the open dim that leads the inputs of a model's file: see [`batch`](Options::batch).
    pub batch: Option<Extent>,
    /// Named dims, each with an extent or a range of extents. `LOOP.trips` is the most iterations of a Loop, where the run decides how often
    /// it runs.
    pub dims: Vec<(String, Extent)>,
    /// Number of CPU threads; 0 means one per core of the host.
    pub threads: usize,
    /// How the graph is compiled.
    pub recipe: Recipe,
    /// The most bytes the plan may take.
    pub memory_limit: Option<u64>,
    /// Runs at once: the session and its [forks](super::Session::fork). Constants are there once, all other memory once per run.
    pub forks: u32,
    /// True to use the schedules that `plimsoll tune` measured on this device, if there are any. The plan takes no more bytes for it, unless the
    /// recipe prefers speed.
    pub tuned: bool,
    /// The mesh on whose ranks the model is computed, each by a process or a thread of its own.
    pub mesh: Option<Mesh>,
    /// What is split between ranks, beside what an axis `data` splits: the rows of the inputs.
    pub shards: Vec<Rule>,
    /// The states of a training that the ranks of an axis `data` share out.
    pub shard_states: Kept,
    /// The ranks, to the one that this is. Without them a model is planned, and does not run.
    #[doc(hidden)]
    pub ranks: Option<Arc<dyn Ranks>>,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            backend: Choice::Auto,
            device: None,
            libraries: true,
            allow_tf32: false,
            state: Vec::new(),
            training: false,
            outputs: Vec::new(),
            values: Vec::new(),
            given: Vec::new(),
            weights: None,
            ties: Vec::new(),
            batch: None,
            dims: Vec::new(),
            threads: 0,
            recipe: Recipe::default(),
            memory_limit: None,
            forks: 1,
            tuned: true,
            mesh: None,
            shards: Vec::new(),
            shard_states: Kept::Whole,
            ranks: None,
        }
    }
}

impl Options {
    /// These options with a named dim bound, to one extent or to a range of them: `options.set("batch", 1..=64)`.
    pub fn set(mut self, dim: impl Into<String>, extent: impl Into<Extent>) -> Options {
        self.dims.push((dim.into(), extent.into()));
        self
    }

    /// These options with the elements of an input that shapes the computation of a model's file: `options.bind("axes", axes)`. The plan is for
    /// these elements alone, and the input is none of the session's. An input that shapes nothing stays an input.
    pub fn bind(mut self, input: impl Into<String>, elements: Tensor) -> Options {
        self.values.push((input.into(), elements));
        self
    }

    /// These options with an input that each run gives, though the model's file has a default for it, an initializer of its name. Without this,
    /// the default is a constant of the plan, and the session has no such input.
    pub fn give(mut self, input: impl Into<String>) -> Options {
        self.given.push(input.into());
        self
    }

    /// The dims with an extent each, unless one has a range.
    pub fn fixed(&self) -> Option<Vec<(String, usize)>> {
        self.dims.iter().map(|(name, extent)| Some((name.clone(), extent.fixed()?))).collect()
    }

    /// These options with an extent, or a range of them, for the open dim that leads the inputs of a model's file, whatever its name is.
    pub fn batch(mut self, extent: impl Into<Extent>) -> Options {
        self.batch = Some(extent.into());
        self
    }

    /// These options with a dim that follows from others: `options.tie("total", "past+new")`.
    pub fn tie(mut self, dim: impl Into<String>, sum: impl Into<String>) -> Options {
        self.ties.push((dim.into(), sum.into()));
        self
    }

    /// These options with a state: an input, and the output that updates it. One `*` in both stands for the same text.
    pub fn state(mut self, input: impl Into<String>, output: impl Into<String>) -> Options {
        self.state.push((input.into(), output.into()));
        self
    }

    /// These options with this output computed; what no such output needs is not.
    pub fn output(mut self, name: impl Into<String>) -> Options {
        self.outputs.push(name.into());
        self
    }

    /// These options with a safetensors file for the weights.
    pub fn weights(mut self, path: impl Into<PathBuf>) -> Options {
        self.weights = Some(path.into());
        self
    }

    /// These options on this device of the backend: a number, or, for wgpu, a part of a name.
    pub fn device(mut self, device: impl Into<String>) -> Options {
        self.device = Some(device.into());
        self
    }

    /// These options with the ranks of a mesh.
    pub fn mesh(mut self, mesh: Mesh) -> Options {
        self.mesh = Some(mesh);
        self
    }

    /// These options with something more that is split between ranks.
    pub fn shard(mut self, rule: Rule) -> Options {
        self.shards.push(rule);
        self
    }

    /// These options with the most bytes that the plan may take.
    pub fn memory_limit(mut self, bytes: u64) -> Options {
        self.memory_limit = Some(bytes);
        self
    }

    /// These options with so many threads of the CPU; 0 means one per core.
    pub fn threads(mut self, threads: usize) -> Options {
        self.threads = threads;
        self
    }

    /// These options with another recipe.
    pub fn recipe(mut self, recipe: Recipe) -> Options {
        self.recipe = recipe;
        self
    }

    /// These options with so many runs at once.
    pub fn forks(mut self, forks: u32) -> Options {
        self.forks = forks;
        self
    }

    /// These options with cuBLASLt and cuDNN, or without them.
    pub fn libraries(mut self, libraries: bool) -> Options {
        self.libraries = libraries;
        self
    }

    /// These options with operands of products rounded to TF32, or not.
    pub fn allow_tf32(mut self, allow_tf32: bool) -> Options {
        self.allow_tf32 = allow_tf32;
        self
    }

    /// These options with the training step of a model's file, or without it.
    pub fn training(mut self, training: bool) -> Options {
        self.training = training;
        self
    }

    /// These options with the schedules that were measured on this device, or without them.
    pub fn tuned(mut self, tuned: bool) -> Options {
        self.tuned = tuned;
        self
    }

    /// These options with states of a training that ranks share out.
    pub fn shard_states(mut self, shard_states: Kept) -> Options {
        self.shard_states = shard_states;
        self
    }

    /// These options on another device.
    pub fn on(mut self, backend: Choice) -> Options {
        self.backend = backend;
        self
    }

    /// Threads, with 0 resolved.
    pub fn thread_count(&self) -> usize {
        match self.threads {
            0 => std::thread::available_parallelism().map_or(1, usize::from),
            n => n,
        }
    }
}
