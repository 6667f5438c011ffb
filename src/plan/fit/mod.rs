//! How a graph is made to fit: the passes it is given, the chunks it is computed in, and the least that any plan of it takes.

pub mod bound;
pub mod chunks;
pub mod limit;
pub mod recompute;
