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
//! - Choose the device, bind named dims, set a memory limit: [`Options`].
//! - Plan without a device and without weights: [`Recipe::plan`], for a [`Target`]. The [`Plan`] says what lies where, and when.
//! - Build a graph in Rust: [`Trace`].
//! - Handle what does not fit: [`Error::Fit`] has the bytes needed and the limit.
//! - Use it from a shell: the command `plimsoll`, which the README shows.
//! - Read or extend the source: [`architecture`].
#![warn(missing_docs)]

#[doc = include_str!("architecture.md")]
pub mod architecture {}

pub mod advise;
pub mod backend;
pub mod choices;
#[cfg(feature = "cli")]
pub mod cli;
pub mod constant;
pub mod dtype;
pub mod eager;
pub mod elements;
pub mod error;
pub mod exec;
pub mod expr;
pub mod file;
pub mod graph;
pub mod kernel;
pub mod npy;
pub mod onnx;
pub mod op;
pub mod ops;
pub mod pass;
pub mod place;
pub mod plan;
pub mod reference;
pub mod report;
pub mod session;
pub mod shape;
pub mod target;
pub mod tensor;
pub mod trace;

pub use dtype::DType;
pub use error::{Error, Result};
pub use graph::Graph;
pub use plan::{Limits, Plan, Recipe};
pub use session::{Options, Session};
pub use shape::Shape;
pub use target::Target;
pub use tensor::Tensor;
pub use trace::Trace;
