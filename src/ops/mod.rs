//! The op table: one row per operator, by family.

use crate::op::OpDef;

mod elementwise;
mod index;
mod layout;
mod linear;
mod nn;
mod reduce;

/// Every row, by family; names are unique.
pub static OPS: [&[OpDef]; 6] =
    [elementwise::OPS, reduce::OPS, layout::OPS, index::OPS, linear::OPS, nn::OPS];

/// Every row, in order of the families.
pub fn all() -> impl Iterator<Item = &'static OpDef> {
    OPS.iter().flat_map(|family| family.iter())
}

/// The row of the operator called `name`.
pub fn find(name: &str) -> Option<&'static OpDef> {
    all().find(|op| op.name == name)
}
