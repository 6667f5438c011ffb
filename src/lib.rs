//! plimsoll
pub mod backend;
pub mod dtype;
pub mod error;
pub mod exec;
pub mod expr;
pub mod graph;
pub mod kernel;
pub mod npy;
pub mod op;
pub mod ops;
pub mod pass;
pub mod plan;
pub mod reference;
pub mod shape;
pub mod target;
pub mod tensor;
