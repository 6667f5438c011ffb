//! The graphs of plimsoll: traced, differentiated, read from ONNX files, and prepared by passes. The crate `plimsoll` is the library; the parts
//! here may change at any time.

pub mod annotations;
pub mod autodiff;
pub mod body;
pub mod graph;
pub mod onnx;
pub mod pass;
pub mod reference;
pub mod trace;

pub(crate) use plimsoll_core::{
    constant, decisions, dtype, error, expr, figures, file, hash, kernel, mesh, narrow, op, ops, safetensors, shape,
    target, tensor,
};
