//! Reports for people: aligned plain text, the same on a terminal and in a pipe, and pictures.

mod choices;
mod diff;
mod dot;
mod memory;
mod orders;
pub mod picture;
mod range;
mod ranks;
mod steps;
mod svg;
mod training;

pub use crate::advise::told::{advice, answer, largest, peak, refusal};
pub use crate::eager::told::comparison;
pub use crate::figures::{bytes, count, grouped, human};
pub use crate::plan::tell::memory::{memory, overhead, planned, programs, shared};
pub use crate::table::{Table, percent, plain};
pub use choices::choices;
pub use diff::diff;
pub use dot::dot;
pub use memory::beside;
pub use orders::orders;
pub use range::range;
pub use ranks::{offloaded, ranks, stages};
pub use steps::{TimedStep, algorithms, placement, timed_steps, trace};
pub use svg::svg;
pub use training::{curve, outline, precisions, recompute, training, undivided};
