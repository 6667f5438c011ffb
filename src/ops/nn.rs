//! Rows.

use crate::op::OpDef;

pub(super) static OPS: &[OpDef] = &[];
