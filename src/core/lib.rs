//! What all of plimsoll speaks of: values and their files, scalar code, operators and kernels. The crate `plimsoll` is the library; the parts
//! here may change at any time.

pub mod constant;
pub mod decisions;
pub mod dtype;
pub mod elements;
pub mod error;
pub mod expr;
pub mod figures;
pub mod file;
pub mod hash;
pub mod kernel;
pub mod log;
pub mod mesh;
pub mod narrow;
pub mod npy;
pub mod npz;
pub mod op;
pub mod ops;
pub mod parallel;
pub mod random;
pub mod safetensors;
pub mod shape;
pub mod table;
pub mod target;
pub mod tensor;

// What the examples of the documentation name, as the crate `plimsoll` does.
pub use dtype::DType;
pub use error::{Error, Result};
pub use tensor::Tensor;
