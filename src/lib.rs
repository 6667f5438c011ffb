//! plimsoll plans the device memory of a neural network: it reads a compute graph, decides every byte before the first kernel runs, and
//! then runs the graph from one arena, without allocating again.
//!
//! Use it to know how much memory a model takes before you run it, to hold a model to a limit, and to run it in exactly the bytes that were
//! planned: on the CPU, on NVIDIA GPUs through CUDA, and on Vulkan, Metal and DX12 devices through wgpu.
//!
//! ```
//! use plimsoll::{DType, Options, Session, Tensor, Trace};
//! # fn main() -> plimsoll::Result<()> {
//! let trace = Trace::new("layer");
//! let (x, w) = (trace.input("x", DType::F32, [4, 8]), trace.input("w", DType::F32, [8, 2]));
//! trace.output("y", x.matmul(w).relu());
//!
//! let session = Session::from_graph(trace.finish()?, &Options::default())?;
//! println!("{} takes {} bytes", session.device(), session.plan().bytes());
//!
//! let (x, w) = (Tensor::from_f32([4, 8], &[0.5; 32])?, Tensor::from_f32([8, 2], &[0.25; 16])?);
//! let outputs = session.run(&[("x", x), ("w", w)])?;
//! assert_eq!(outputs[0].1.to_f64(), [1.0; 8]);
//! # Ok(())
//! # }
//! ```
//!
//! # Where to go next
//! - Run a model file: [`Session::from_path`] reads `.onnx` and `.onnxtxt`.
//! - Run a plan that was saved and checked before: [`Session::from_plan`].
//! - Choose the device, bind named dims, set a memory limit: [`Options`].
//! - Ask what a model's file takes, whether it fits, what would help, how far its batch grows, how many cards it needs: [`Model`], with no device
//!   and no weights. Of a graph: [`Planning::plan`] of a [`Recipe`], for a [`Target`]. The [`Plan`] says what lies where, and when.
//! - Train a model's file: [`training`].
//! - Build a graph in Rust: [`Trace`].
//! - Handle what does not fit: [`Error::Fit`] has the bytes needed and the limit.
//! - Copy from a program: `tests/examples` in the source has one for each of a model from a file, a traced net, a decoder with states, memory of
//!   your own, training, and arrays of `ndarray`.
//! - Use it from a shell: the command `plimsoll`. The README shows the first five minutes, [`guide`] all of it.
//! - Use it from C or C++: [`guide`] has a program, `src/ffi/plimsoll.h` all functions.
//! - See what it computes, and how well: [`operators`], [`measurements`].
//! - Read or extend the source: [`architecture`].
#![warn(missing_docs)]

#[doc = include_str!("architecture.md")]
pub mod architecture {}
#[doc = include_str!("measurements.md")]
pub mod measurements {}
#[doc = include_str!("guide.md")]
pub mod guide {}
#[doc = include_str!("operators.md")]
pub mod operators {}

/// How a model's file is trained: [`Model::trainer`].
///
/// ```
/// use plimsoll::training::{Data, Loss, Optimizer, Rate, Rows, Training};
/// use plimsoll::{Choice, Model, Options};
/// # std::env::set_current_dir(concat!(env!("CARGO_MANIFEST_DIR"))).expect("the folder of the project");
/// # fn main() -> plimsoll::Result<()> {
/// let model = Model::from_path("graphs/linear.onnxtxt", &Options::default().on(Choice::Cpu))?;
/// let (x, labels) = (Rows::open("graphs/linear-x.npy".as_ref())?, Rows::open("graphs/linear-y.npy".as_ref())?);
/// let data = Data { inputs: vec![("x".into(), x)], labels };
/// let method = Training::new(Loss::Mse, Optimizer::adam(None, None, None, false), Rate::constant(0.01));
/// let mut trainer = model.trainer(&data, 16, method)?;
/// let first = trainer.step(&data, 0, None)?.loss;
/// for step in 1..10 {
///     trainer.step(&data, step, None)?;
/// }
/// assert!(trainer.evaluate(&data)?.loss < f64::from(first));
/// # Ok(())
/// # }
/// ```
pub mod training {
    pub use crate::train::data::Rows;
    pub use crate::train::run::{Data, Score, Shown, Trainer};
    pub use crate::train::{Loss, Optimizer, Rate, Schedule, Training};
}

/// What a [`Model`] answers.
pub mod answers {
    pub use crate::advise::{Advice, Answer, Largest, Remedy, Size, Taken, Verdict};
    pub use crate::eager::compare::Comparison;
    pub use crate::fit::{Cluster, Found, Tried};
}

// The members of the workspace bring in modules by their names.
#[cfg(feature = "cli")]
pub(crate) use plimsoll_core::log;
pub(crate) use plimsoll_core::{
    constant, decisions, dtype, elements, error, expr, figures, file, kernel, mesh, npy, npz, op, ops, random,
    safetensors, shape, table, target, tensor,
};
pub(crate) use plimsoll_graph::{graph, onnx, pass, reference, trace};
use plimsoll_place as place;
pub(crate) use plimsoll_plan as plan;
#[cfg(feature = "cli")]
pub(crate) use plimsoll_run::whole;
pub(crate) use plimsoll_run::{
    advise, backend, decoder, driver_memory, eager, exec, fit, model, reserve, roofline, session, settings, train, tune,
};

#[cfg(feature = "cli")]
#[doc(hidden)]
pub mod cli;
#[cfg(feature = "ffi")]
mod ffi;
#[cfg(feature = "python")]
mod python;
mod report;
#[cfg(all(feature = "web", target_arch = "wasm32"))]
mod web;

/// The parts, for the tests of this project. They may change at any time.
#[doc(hidden)]
pub mod internals {
    macro_rules! modules {
        ($($name:ident)*) => { $(pub mod $name { pub use crate::$name::*; })* };
    }
    modules! {
        advise backend driver_memory constant decisions decoder dtype eager elements error exec expr file fit graph kernel mesh model npy npz onnx op
        ops pass place plan random reference report reserve safetensors session settings shape table target tensor trace train tune
    }
}

// The documented names; a test counts them.
pub use backend::{Place, Usage};
pub use constant::Constant;
pub use decoder::Decoder;
pub use dtype::DType;
/// An error is matched by its variant:
///
/// ```
/// use plimsoll::{DType, Error, Options, Session, Trace};
/// let trace = Trace::new("large");
/// trace.output("y", trace.input("x", DType::F32, [1000]).relu());
/// let graph = trace.finish().unwrap();
/// match Session::from_graph(graph, &Options { memory_limit: Some(1024), ..Options::default() }) {
///     Err(Error::Fit { needed, limit, .. }) => assert!(needed > limit),
///     other => panic!("it takes more than 1024 bytes: {other:?}"),
/// }
/// ```
pub use error::Error;
pub use error::Result;
pub use graph::Graph;
pub use kernel::Kernel;
pub use mesh::Mesh;
pub use model::Model;
pub use op::{Attr, Attrs, Fact, NodeId, ValueId};
pub use plan::{
    Because, BindRange, Buffer, BufferIdx, Candidate, Class, ConstantPort, Dim, KernelIdx, Knob, Limits, Plan,
    Planning, Port, Prefer, Program, Recipe, Segment, SegmentIdx, StatePort, Step, StepIdx, Summary, View,
};
pub use session::{Choice, Options, Session, SessionProgram};
pub use shape::{Extent, Shape};
pub use target::{Family, Libraries, Memory, Target};
pub use tensor::Tensor;
pub use trace::{Trace, Var};
