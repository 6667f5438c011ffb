//! A plan is made of a graph: its lowering is ordered, spread over streams, and placed.
//!
//! ```text
//! lower --> Draft --> order --> streams --> liveness --> offsets --> workspace --> assemble --> Plan
//!                     '------------- arrange tries several -------------'
//! ```

pub(super) mod arrange;
pub(super) mod assemble;
pub mod liveness;
pub(super) mod offsets;
pub mod order;
mod overlap;
pub mod rebind;
pub mod streams;
pub(super) mod workspace;

pub use arrange::lowered;
