//! A plan is made of a graph: its lowering is ordered, spread over streams, and placed.
//!
//! ```text
//! lower --> Draft --> order --> streams --> liveness --> offsets --> workspace --> assemble --> Plan
//!                     '------------- arrange tries several -------------'
//! ```

use super::{BufferIdx, Compiled, Limits, Plan, check};
use crate::error::Result;
use crate::pass::Prepared;
use crate::target::Target;
use arrange::{arrange, draft};
use assemble::assemble;

pub mod again;
pub(super) mod arrange;
pub(super) mod assemble;
pub mod liveness;
pub(super) mod offsets;
pub mod order;
pub mod streams;
pub(super) mod workspace;

/// Plans a graph that a [`Recipe`](crate::Recipe) made: exact bytes, before any device is touched.
///
/// Several orders are placed; the smallest arena wins, the file's order among equals. Parts of concatenations are copied only where that
/// saves enough, or where the plan would not fit without. On a target with streams its steps are then spread over them, as long as that
/// costs little and the limit holds.
///
/// # Errors
/// [`Error::Fit`](crate::Error::Fit) when the plan exceeds the limit. [`Error::Usage`](crate::Error::Usage) when the target lacks a tensor's
/// type, or a tensor is too large: for the target's segments, or for its bindings if a kernel needs all of it at once.
pub fn plan(graph: &Prepared, target: &Target, limits: &Limits) -> Result<Plan> {
    Ok(compile(graph, target, limits)?.0)
}

/// As [`plan`], with the data of the plan's constants.
///
/// # Errors
/// As [`plan`].
pub fn compile(graph: &Prepared, target: &Target, limits: &Limits) -> Result<Compiled> {
    let found = arrange(target, limits, |options| draft(graph, target, options))?;
    let same: Vec<_> = BufferIdx::all(&found.draft.buffers).map(Some).collect();
    let (plan, constants) = assemble(graph, target, &found, &found.draft, &same)?;
    check::check(&plan)?;
    limits.check(&plan)?;
    Ok((plan, constants))
}
