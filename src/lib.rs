//! plimsoll
pub mod backend;
pub mod dtype;
pub mod error;
pub mod expr;
pub mod graph;
pub mod kernel;
pub mod op;
pub mod ops;
pub mod plan;
pub mod reference;
pub mod shape;
pub mod target;
pub mod tensor;
