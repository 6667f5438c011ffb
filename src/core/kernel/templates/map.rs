//! Scalar code alone.

use super::*;

pub(super) static MAP: TemplateDef = TemplateDef {
    name: "map",
    doc: "the body at each index",
    kind: Kind::Elementwise,
    core_reads: |_| 0,
    samples: || {
        let x = |n| Expr::input(n, DType::F32);
        vec![sample(Template::Map, &[2, 3], vec![floats(&[2, 3]); 2], x(0) * x(1))]
    },
    ..PLAIN
};
