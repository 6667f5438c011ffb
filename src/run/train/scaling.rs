//! Dynamic loss scaling: `f16` rounds small gradients to zero, so the loss is multiplied before it is derived. A step whose gradients are not
//! finite changes no weight, and halves the factor. After many finite ones it doubles.

use super::grow;
use crate::constant::Constant;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::graph::Graph;
use crate::op::{Fact, ValueId};
use crate::tensor::Tensor;
use std::sync::Arc;

/// The first factor.
const FIRST: f64 = 65536.0;
/// Finite steps in a row after which the factor doubles.
const GOOD: f64 = 2000.0;

/// The state that holds the factor.
pub(super) fn state(graph: &mut Graph) -> Result<ValueId> {
    let fact = Fact::new(DType::F32, []);
    let first = Constant::new("scale/value", Tensor::from_f64(DType::F32, [], &[FIRST]));
    Ok(graph.state("scale/value", fact, Some(Arc::new(first))))
}

/// Adds the update of the factor, by whether the gradients were finite.
pub(super) fn update(graph: &mut Graph, scale: ValueId, finite: ValueId) -> Result<()> {
    let good = graph.state("scale/good steps", Fact::new(DType::F32, []), None);
    let made = grow(graph, "update", |b| {
        let [scale, finite, good] = [scale, finite, good].map(|value| b.value(value));
        let count = finite.select(good + 1.0, 0.0);
        let is_long = count.greater_or_equal(GOOD);
        let next = finite.select(is_long.select(scale * 2.0, scale), scale * 0.5);
        Ok(vec![next, is_long.select(0.0, count)])
    })?;
    for (state, next) in [scale, good].into_iter().zip(made) {
        graph.update(state, next).map_err(Error::graph)?;
    }
    Ok(())
}
