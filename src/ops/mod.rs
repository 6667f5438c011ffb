//! The op table: one row per operator, by family.

use crate::dtype::DType;
use crate::op::{Arity, Call, OpDef, OpResult};

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

/// Every data input that is given has one floating-point type, which is returned.
fn one_float(call: &Call) -> OpResult<DType> {
    let dtype = call.dtype(0);
    let data = call.op.inputs.iter().filter(|i| i.arity != Arity::Shaping);
    for (input, fact) in data.zip(call.inputs).filter_map(|(i, f)| Some((i.name, (*f)?))) {
        if !fact.dtype.is_float() {
            return Err(format!("input {input}: expected a floating-point type, found {fact}"));
        }
        if fact.dtype != dtype {
            return Err(format!("input {input}: expected {dtype} like input {}, found {fact}", call.op.inputs[0].name));
        }
    }
    Ok(dtype)
}

/// Calls `f` with every index of a tensor of this shape, in row-major order.
fn each_index(shape: &[usize], mut f: impl FnMut(&[usize])) {
    if shape.contains(&0) {
        return;
    }
    let mut index = vec![0; shape.len()];
    loop {
        f(&index);
        let Some(axis) = (0..shape.len()).rev().find(|&k| index[k] + 1 < shape[k]) else { return };
        index[axis] += 1;
        index[axis + 1..].fill(0);
    }
}
