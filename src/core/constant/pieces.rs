//! The elements of a constant, range by range, so that few are held at a time.

use crate::error::{Error, Result};
use crate::op::{Attrs, Call, Fact, OpDef};
use crate::shape::Access;
use crate::tensor::Tensor;
use std::ops::Range;

/// The elements of a range, if the caller has no reason for another number. As 64-bit numbers, in which operators compute, they are half a megabyte.
pub(super) const PIECE: usize = 1 << 16;

/// A constant's elements, row-major.
#[derive(Debug)]
pub enum Pieces {
    /// Those that an access reads of a tensor, which may be mapped.
    Held(Tensor, Access),
    /// Those that an elementwise operator makes.
    Map(Box<Map>),
}

/// An elementwise operator. Its operands have as many elements as its result.
#[derive(Debug)]
pub struct Map {
    name: String,
    op: &'static OpDef,
    attrs: Attrs,
    operands: Vec<Option<Pieces>>,
    fact: Fact,
}

impl Map {
    /// `None` if the operator means something else for a row of elements than for the whole shape.
    pub fn new(
        name: &str,
        op: &'static OpDef,
        attrs: &Attrs,
        operands: Vec<Option<Pieces>>,
        fact: &Fact,
    ) -> Option<Map> {
        let map = Map { name: name.into(), op, attrs: attrs.clone(), operands, fact: fact.clone() };
        let rows: Vec<_> =
            map.operands.iter().flatten().map(|p| Fact::new(p.fact().dtype, [fact.shape.numel()])).collect();
        let mut row = rows.iter();
        let inputs: Vec<_> = map.operands.iter().map(|p| p.as_ref().and_then(|_| row.next())).collect();
        let made = Call { op, attrs, inputs: &inputs }.infer().ok()?;
        (made == [Fact::new(fact.dtype, [fact.shape.numel()])]).then_some(map)
    }

    fn range(&self, elements: Range<usize>) -> Result<Tensor> {
        let mut values = Vec::with_capacity(self.operands.len());
        for operand in &self.operands {
            values.push(operand.as_ref().map(|operand| operand.range(elements.clone())).transpose()?);
        }
        let facts: Vec<_> =
            values.iter().map(|v| v.as_ref().map(|v| Fact::new(v.dtype(), v.shape().clone()))).collect();
        let facts: Vec<_> = facts.iter().map(Option::as_ref).collect();
        let values: Vec<_> = values.iter().map(Option::as_ref).collect();
        let fail = |what| Error::Node { node: self.name.clone(), op: self.op.name.into(), what, file: None };
        let mut made = Call { op: self.op, attrs: &self.attrs, inputs: &facts }.compute(&values).map_err(fail)?;
        Ok(made.swap_remove(0))
    }
}

impl Pieces {
    fn fact(&self) -> Fact {
        match self {
            Pieces::Held(tensor, access) => Fact::new(tensor.dtype(), access.shape.clone()),
            Pieces::Map(map) => map.fact.clone(),
        }
    }

    /// The elements of a view. An elementwise operator then has views of its operands. `None` if there is no such view.
    pub fn viewed(self, view: &dyn Fn(&Access) -> Option<Access>) -> Option<Pieces> {
        match self {
            Pieces::Held(tensor, access) => Some(Pieces::Held(tensor, view(&access)?)),
            Pieces::Map(map) => {
                let Map { name, op, attrs, operands, fact } = *map;
                let shape = view(&Access::contiguous(fact.shape))?.shape;
                let operand = |operand: Option<Pieces>| operand.map_or(Some(None), |o| o.viewed(view).map(Some));
                let operands = operands.into_iter().map(operand).collect::<Option<_>>()?;
                let map = Map::new(&name, op, &attrs, operands, &Fact::new(fact.dtype, shape))?;
                Some(Pieces::Map(Box::new(map)))
            }
        }
    }

    /// All elements, if they are there, one after another.
    pub fn at_once(&self) -> Option<Tensor> {
        match self {
            Pieces::Held(tensor, access) if access.is_contiguous() => Some(tensor.gather(access)),
            _ => None,
        }
    }

    /// A range of the elements, as a tensor of one axis.
    ///
    /// # Errors
    /// When the operator refuses a value.
    pub fn range(&self, elements: Range<usize>) -> Result<Tensor> {
        match self {
            Pieces::Held(tensor, access) => Ok(tensor.gather_range(access, elements)),
            Pieces::Map(map) => map.range(elements),
        }
    }

    /// Calls `take` with all elements, some at a time, in order.
    ///
    /// # Errors
    /// Those of [`range`](Self::range) and of `take`.
    pub fn each(&self, mut take: impl FnMut(&Tensor) -> Result<()>) -> Result<()> {
        let count = self.fact().shape.numel();
        (0..count).step_by(PIECE).try_for_each(|first| take(&self.range(first..count.min(first + PIECE))?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::{Eval, Lower};
    use crate::ops;

    /// An operator gives a range of its result the elements that it gives the whole.
    #[test]
    fn ranges_are_parts_of_the_whole() {
        let mut checked = 0;
        for op in ops::all().filter(|op| matches!((op.lower, op.eval), (Lower::Map(_), Eval::Scalar(_)))) {
            let sample = op.example();
            let inputs = sample.tensors();
            let facts: Vec<_> =
                inputs.iter().map(|t| t.as_ref().map(|t| Fact::new(t.dtype(), t.shape().clone()))).collect();
            let facts: Vec<_> = facts.iter().map(Option::as_ref).collect();
            let call = Call { op, attrs: &sample.attrs, inputs: &facts };
            let fact = call.infer().expect("a sample is sound").swap_remove(0);
            let values: Vec<_> = inputs.iter().map(Option::as_ref).collect();
            let whole = call.compute(&values).expect("a sample has values").swap_remove(0);
            let broadcast =
                |t: &Tensor| Pieces::Held(t.clone(), Access::contiguous(t.shape().clone()).broadcast(&fact.shape));
            let operands = inputs.iter().map(|t| t.as_ref().map(broadcast)).collect();
            let Some(map) = Map::new(op.name, op, &sample.attrs, operands, &fact) else { continue };
            let count = fact.shape.numel();
            let parts = [0..count / 3, count / 3..count / 2, count / 2..count];
            let found: Vec<u8> =
                parts.into_iter().flat_map(|part| map.range(part).expect("values").bytes().to_vec()).collect();
            assert!(found == whole.bytes()[..], "{}", op.name);
            checked += 1;
        }
        assert!(checked > 40, "{checked} operators");
    }

    #[test]
    fn ranges_of_an_access_are_parts_of_its_elements() {
        let tensor = Tensor::from_i64([4, 5, 3], &(0..60).collect::<Vec<_>>()).expect("a number per element");
        let plain = Access::contiguous(tensor.shape().clone());
        for access in [plain.clone(), plain.permute(&[2, 0, 1]), plain.slice(1, 4, -2, 2), plain.slice(2, 0, 2, 2)] {
            let expected: Vec<i64> = access.elements().map(|at| at as i64).collect();
            for first in 0..expected.len() {
                for last in first..=expected.len() {
                    let found = tensor.gather_range(&access, first..last).to_i64().expect("integers");
                    assert_eq!(found, expected[first..last], "{access:?}");
                }
            }
        }
    }
}
