//! Plans that run and train on devices, and advice on what does not fit. The crate `plimsoll` is the library; the parts here may change at any
//! time.

pub mod advise;
pub mod decoder;
pub mod driver_memory;
pub mod eager;
pub mod exec;
pub mod fit;
pub mod model;
pub mod reserve;
pub mod roofline;
pub mod session;
pub mod settings;
pub mod train;
pub mod tune;
pub mod whole;

/// The devices, and what all of them are asked for.
pub mod backend {
    pub use plimsoll_backend::*;
    pub use plimsoll_cpu as cpu;
    #[cfg(feature = "cuda")]
    pub use plimsoll_gpu::cuda;
    #[cfg(feature = "web")]
    pub use plimsoll_gpu::web;
    #[cfg(feature = "wgpu")]
    pub use plimsoll_gpu::wgpu;
}

pub(crate) use plimsoll_core::{
    constant, dtype, error, figures, file, hash, kernel, log, mesh, npz, op, ops, random, safetensors, shape, table,
    target, tensor,
};
pub(crate) use plimsoll_graph::{autodiff, graph, onnx, pass, trace};
pub(crate) use plimsoll_plan as plan;
