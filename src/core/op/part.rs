//! Parts of an output: the parts of the inputs that each is computed from.

use super::attr::Attrs;
use super::fact::Fact;
use super::{Args, Call, Lower, Part};
use crate::expr::Expr;
use crate::kernel::Reduction;
use crate::shape::Shape;

impl Part {
    /// A part that reads each input along this axis, or whole.
    pub fn of(inputs: impl Into<Vec<Option<usize>>>) -> Option<Part> {
        Some(Part { inputs: inputs.into(), extents: None })
    }

    /// The attributes of a node that computes a part of this shape.
    pub fn attrs(&self, attrs: &Attrs, shape: &Shape) -> Attrs {
        self.extents.into_iter().fold(attrs.clone(), |attrs, name| attrs.with(name, &shape[..]))
    }
}

impl Call<'_> {
    /// Splits the only output along `axis` into `units` equal units, and says which input is split alike.
    ///
    /// The row, applied to the same units of these inputs, computes exactly those units of the output. `None` if the
    /// row cannot be split there.
    pub fn part(&self, axis: usize, units: usize) -> Option<Part> {
        let facts = self.infer().ok()?;
        let [Fact { shape, .. }] = &facts[..] else { return None };
        let divides = |extent: usize| extent > 0 && extent.is_multiple_of(units);
        if !divides(*shape.get(axis)?) {
            return None;
        }
        let part = match (self.op.part, self.op.lower) {
            (Some(rule), _) => rule(self, axis, units)?,
            (None, Lower::Map(map)) if !self.uses_index(map) => self.broadcast_part(shape, axis),
            (None, Lower::Reduce(_)) => {
                let reduced = self.reduced_axes().ok()?;
                let mut kept = (0..self.shape(0).len()).filter(|k| !reduced.contains(k));
                let keeps = shape.len() == self.shape(0).len();
                let from = if keeps { kept.find(|&k| k == axis) } else { kept.nth(axis) };
                Part::of([Some(from?)])?
            }
            (None, Lower::Concat) if self.axis("axis", 0, self.shape(0)).ok()? != axis => {
                Part::of(vec![Some(axis); self.inputs.len()])?
            }
            _ => return None,
        };
        let mut read = part.inputs.iter().zip(self.inputs).filter_map(|(k, fact)| Some(fact.as_ref()?.shape[(*k)?]));
        read.all(divides).then_some(part)
    }

    /// The ways to split inputs along axes into `units` equal units so that the results of the units, joined, are the only output: per way, the
    /// axis of each data input, or `None` if all units read the whole of it.
    pub fn summed(&self, units: usize) -> Vec<(Vec<Option<usize>>, Reduction)> {
        let ways = match (self.op.summed, self.op.lower) {
            (Some(rule), _) => rule(self).into_iter().map(|way| (way, Reduction::Sum)).collect(),
            (None, Lower::Reduce(reduction)) => {
                let axes = self.reduced_axes().unwrap_or_default();
                axes.into_iter().map(|axis| (vec![Some(axis)], reduction)).collect()
            }
            _ => Vec::new(),
        };
        let divides = |way: &[Option<usize>]| {
            let mut axes = way.iter().zip(self.inputs).filter_map(|(axis, fact)| Some(fact.as_ref()?.shape[(*axis)?]));
            axes.all(|extent| extent > 0 && extent.is_multiple_of(units))
        };
        ways.into_iter().filter(|(way, _)| divides(way)).collect::<Vec<_>>()
    }

    /// A part of a broadcast result of this shape. An input with one element along the axis is read whole.
    pub fn broadcast_part(&self, shape: &Shape, axis: usize) -> Part {
        let along = |fact: &Option<&Fact>| {
            let own = &fact.as_ref()?.shape;
            (axis + own.len()).checked_sub(shape.len()).filter(|&k| own[k] == shape[axis])
        };
        Part { inputs: self.inputs.iter().map(along).collect(), extents: None }
    }

    /// True if an elementwise row's expression depends on the index of the element.
    pub fn uses_index(&self, map: fn(&Args, &Call) -> Expr) -> bool {
        self.map(map).is_indexed()
    }
}
