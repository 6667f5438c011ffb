//! plimsoll
pub mod error;
pub mod dtype;
