//! Kernels whose operands are not known yet.

use crate::expr::Body;
use crate::kernel::{Prologue, Template};
use crate::shape::Shape;

/// A kernel without its operands.
pub(super) struct Outline {
    pub(super) template: Template,
    pub(super) shape: Shape,
    pub(super) prologues: Vec<Prologue>,
    pub(super) body: Body,
}

impl Outline {
    pub(super) fn new(template: Template, shape: Shape, body: Body) -> Outline {
        Outline { template, shape, prologues: Vec::new(), body }
    }
}
