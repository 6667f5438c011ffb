//! Facts about a finished plan, for people.

pub mod diff;
pub mod memory;
pub mod offload;
pub mod peak;
pub mod ranks;
pub mod timeline;
