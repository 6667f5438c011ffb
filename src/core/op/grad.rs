//! Derivatives: a row may state the nodes that compute the gradients of its inputs.

use super::build::Nodes;
use super::fact::OpResult;
use super::var::Var;
use super::{Args, Call};

/// Adds the nodes of the gradients: per data input one, or `None` where it is zero.
pub type GradRule = for<'g> fn(Nodes<'g>, &Call, &Back<'_, 'g>) -> OpResult<Vec<Option<Var<'g>>>>;

/// The derivatives of a row by its inputs.
#[derive(Clone, Copy)]
pub enum Grad {
    /// They follow from how the row becomes kernels: from the expression, the reduction, or the nodes that it decomposes into.
    Derived,
    /// The row states them.
    Rule(GradRule),
}

/// A call whose outputs have gradients, as its rule sees it.
pub struct Back<'a, 'g> {
    /// The inputs.
    pub x: Args<'a, Var<'g>>,
    /// The outputs.
    pub y: &'a [Var<'g>],
    /// The gradients of the outputs; `None` where nothing depends on an output.
    pub dy: &'a [Option<Var<'g>>],
}

impl<'g> Back<'_, 'g> {
    /// The gradient of the first output.
    ///
    /// # Errors
    /// When only another output has one.
    pub fn first(&self) -> OpResult<Var<'g>> {
        self.dy[0].ok_or_else(|| "it has derivatives only by its first output".into())
    }
}
