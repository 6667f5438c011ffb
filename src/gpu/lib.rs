//! Graphics processors as devices: CUDA, and wgpu for all others. They know kernels and bytes; no operators, no graphs.

#[cfg(any(feature = "cuda", feature = "wgpu", feature = "web"))]
mod bound;
#[cfg(feature = "cuda")]
pub mod cuda;
#[cfg(any(feature = "cuda", feature = "wgpu"))]
mod kept;
#[cfg(any(feature = "cuda", feature = "wgpu"))]
mod staged;
#[cfg(feature = "web")]
pub mod web;
#[cfg(feature = "wgpu")]
pub mod wgpu;
