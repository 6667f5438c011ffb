//! The op table: one row per operator, by family.

use crate::dtype::DType;
use crate::op::{Arity, Call, Fact, OpDef, OpResult};
use crate::shape::Shape;

mod elementwise;
mod index;
mod layout;
mod linear;
mod norm;
mod reduce;
mod resize;
mod window;

/// Every row, by family; names are unique.
pub static OPS: [&[OpDef]; 8] =
    [elementwise::OPS, reduce::OPS, layout::OPS, index::OPS, linear::OPS, window::OPS, norm::OPS, resize::OPS];

/// Every row, in order of the families.
pub fn all() -> impl Iterator<Item = &'static OpDef> {
    OPS.iter().flat_map(|family| family.iter())
}

/// The row of the operator called `name`.
pub fn find(name: &str) -> Option<&'static OpDef> {
    all().find(|op| op.name == name)
}

/// The shape that the given inputs broadcast to.
fn broadcast(call: &Call) -> OpResult<Shape> {
    let shapes = || call.inputs.iter().flatten().map(|f| &f.shape);
    Shape::broadcast(shapes()).ok_or_else(|| {
        let shapes: Vec<_> = shapes().map(Shape::to_string).collect();
        format!("expected shapes that broadcast, found {}", shapes.join(" and "))
    })
}

/// The one element type of all given inputs.
fn same_dtype(call: &Call) -> OpResult<DType> {
    let mut given = call.inputs.iter().enumerate().filter_map(|(i, f)| Some((i, f.as_ref()?.dtype)));
    let (first, dtype) = given.next().expect("a row with operands has at least one: arity is checked first");
    match given.find(|&(_, d)| d != dtype) {
        Some((i, other)) => {
            let (first, name) = (input_name(call, first), input_name(call, i));
            Err(format!("input '{name}': expected {dtype} as input '{first}', found {other}"))
        }
        None => Ok(dtype),
    }
}

/// The name of a data input, counting repetitions of a variadic one.
fn input_name(call: &Call, input: usize) -> String {
    let data: Vec<_> = call.op.inputs.iter().filter(|i| i.arity != Arity::Shaping).collect();
    match data.last() {
        Some(last) if input + 1 >= data.len() && last.arity == Arity::Variadic => {
            format!("{}[{}]", last.name, input + 1 - data.len())
        }
        _ => data[input].name.to_owned(),
    }
}

/// Refuses an input whose type is not among the `expected` ones.
fn expect_dtype(call: &Call, input: usize, expected: &str, allowed: fn(DType) -> bool) -> OpResult<DType> {
    let dtype = call.dtype(input);
    match allowed(dtype) {
        true => Ok(dtype),
        false => Err(format!("input '{}': expected {expected}, found {dtype}", input_name(call, input))),
    }
}

/// The one floating-point type of all given inputs.
fn same_float(call: &Call) -> OpResult<DType> {
    let dtype = same_dtype(call)?;
    expect_dtype(call, 0, "a floating-point type", DType::is_float).map(|_| dtype)
}

/// One output of this type and shape.
fn output(dtype: DType, shape: impl Into<Shape>) -> OpResult<Vec<Fact>> {
    Ok(vec![Fact::new(dtype, shape)])
}

/// Every index of a shape, in row-major order.
fn indices(shape: &Shape) -> impl Iterator<Item = Vec<usize>> {
    let (shape, mut next) = (shape.clone(), (!shape.contains(&0)).then(|| vec![0; shape.len()]));
    std::iter::from_fn(move || {
        let index = next.clone()?;
        let carry = (0..shape.len()).rev().find(|&k| index[k] + 1 < shape[k]);
        match (carry, &mut next) {
            (Some(k), Some(next)) => {
                next[k] += 1;
                next[k + 1..].fill(0);
            }
            _ => next = None,
        }
        Some(index)
    })
}

/// The row-major position of an index.
fn position(index: &[usize], shape: &Shape) -> usize {
    index.iter().zip(shape.iter()).fold(0, |at, (&i, &d)| at * d + i)
}
