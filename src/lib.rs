//! plimsoll decides every byte of device memory before the first kernel runs, proves that it fits, and runs a compute
//! graph from one arena without allocating.
//!
//! ```text
//! model.onnx / .onnxtxt --onnx--.                                             .--> plan.json, html, svg, dot, wgsl, cuda
//!                               Graph --passes--> Graph --lower, order, place--> Plan --exec--> Backend (cuda | wgpu | cpu)
//! Rust code ------------trace---'   '--reference (f64, node by node)             '--check (knows only the plan)
//! ```
//!
//! # Seven words
//! - [`Graph`]: what was asked, a DAG of operators over values.
//! - [`OpDef`](op::OpDef): what an operator means; one row of the [op table](ops).
//! - [`Body`](expr::Body): scalar code.
//! - [`Kernel`](kernel::Kernel): a template with its holes filled; on CUDA perhaps a [library's call](kernel::library).
//! - [`Plan`]: what will run, on which bytes.
//! - [`Backend`](backend::Backend): a device.
//! - [`Tensor`]: host data.
//!
//! # Layers
//! A module uses its own folder, its own line, and the lines above it:
//! ```text
//! values   error file dtype shape elements tensor npy target
//! meaning  expr kernel op ops
//! graph    choices constant graph      graph is the only file that names petgraph
//! in, out  trace onnx reference pass
//! kernels  kernel::library             what cuBLASLt and cuDNN compute of a kernel
//!          kernel::layout              packed constants, workspaces, where prologues pay: from shapes alone
//!          kernel::render              WGSL and CUDA C++ from shaders/
//! place    place                       offsets for items with live ranges: knows no plan
//! plan     plan::check                 judges a plan from the plan alone
//!          plan::lower                 groups of nodes become kernels, values become buffers
//!          plan::make                  order, streams, liveness, offsets, workspaces: tries several, assembles the best
//!          plan::fit                   the recipe of passes, what is worth computing in chunks, the least that any plan takes
//!          plan::range                 one plan for a range of extents; the largest binding's choices are followed
//!          plan::tell                  what can be said of a plan: who lives when, the peak, what became of another plan
//! devices  backend::{cpu, cuda, wgpu} exec eager
//! door     session advise report cli
//! ```
//!
//! # Invariants
//! 1. Backends and [`exec`] know kernels and bytes; no operators, no graphs.
//! 2. Planning needs no device and no weights, and is deterministic: searches count steps, not time.
//! 3. Planned bytes are allocated bytes, those that data passes through on its way to a device ([staging](target::Memory)) included;
//!    a run allocates nothing. What a driver takes for itself is [measured](backend::Usage::overhead) and shown apart.
//! 4. Every pass ends in [`Graph::verify`], every plan in [`plan::check`], every placement of `plimsoll place` in
//!    [`plan::check::placement()`].
//! 5. No globals and no thread-locals: a device is a value that is held.
//! 6. Bad input is an [`Error`] that names the node, the file or the flag; a broken invariant is a panic that names the
//!    invariant.
//!
//! # How things are added
//! - An elementwise operator: one row in `src/ops/elementwise.rs`. Shape inference, fusion, the kernels of all backends and the test
//!   that walks the table follow from it.
//! - A structured operator: one row that decomposes into others, or names a [template](kernel::Template).
//! - A kernel template: a variant of [`kernel::Template`], a file in `shaders/` with its row in [`kernel::render::KERNELS`] and its holes
//!   in `kernel/render/`, its workspace in [`kernel::layout`], its rules in `plan/check/kernel.rs`, a function of the CPU backend,
//!   and cases in `tests/it/kernels`.
//! - A text of a template for CUDA alone: a file in `shaders/` with the same holes, chosen where the template is rendered.
//! - A library's call: a variant of [`kernel::library::Call`], which the checker derives again, and its execution in `backend/cuda/`.
//! - A backend: a file with the methods of [`backend::Backend`], a [`target::Family`] with its preset, an arm of [`session::open`],
//!   and a line in `tests/it/common.rs`.
//! - A pass: one function and one line in [`pass::PASSES`], or, if it runs on request, a field of [`Recipe`]. What it decides by extents goes through [`choices`];
//!   only `pass/bind.rs` cuts by what a binding holds without asking: a range whose ends it cuts differently is refused.
//! - What can be [computed in chunks](pass::chunk): a rule in the operator's row, [`part`](op::OpDef::part), unless its kind tells.
//! - An order of the steps: one function and one line in [`plan::order::orders`].
//! - A remedy: one function and one row in [`advise::REMEDIES`], where the place of rematerialisation is.
//! - A target that goes by a name: one row in [`target::PRESETS`].
#![warn(missing_docs)]

pub mod advise;
pub mod backend;
pub mod choices;
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
pub use session::Session;
pub use shape::Shape;
pub use target::Target;
pub use tensor::Tensor;
pub use trace::Trace;
