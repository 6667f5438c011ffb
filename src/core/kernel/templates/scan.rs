//! Sums of the elements up to each.
//!
//! ```text
//! data [1 2 3 4]     sums [1 3 6 10]     exclusive [0 1 3 6]     in reverse [10 9 7 4]
//! ```

use super::*;

pub(super) static SCAN: TemplateDef = TemplateDef {
    name: "scan",
    doc: "sums of the elements up to each along an axis",
    kind: Kind::Row,
    alone: true,
    invocations: |kernel| {
        let &Template::Scan { axis, .. } = &kernel.template else { mismatch(&kernel.template) };
        kernel.shape.numel() / kernel.shape[axis].max(1)
    },
    check: |kernel, _| {
        let &Template::Scan { axis, .. } = &kernel.template else { mismatch(&kernel.template) };
        let Kernel { shape, reads, body, .. } = kernel;
        kernel.reads_extents(0, shape)?;
        ensure(axis < shape.len(), || format!("sums along axis {axis} of {shape}"))?;
        ensure(reads[0].dtype.is_number(), || format!("operand 0 read: expected numbers, found {}", reads[0].dtype))?;
        ensure(kernel.stores_alone() && body.is_identity(), || "expected sums that are stored as they are".into())
    },
    axis_of: |kernel, _, k| {
        let &Template::Scan { axis, .. } = &kernel.template else { mismatch(&kernel.template) };
        if k == axis { Along::Tied } else { Along::Axis(k) }
    },
    meaning: scan,
    samples: || {
        let of = |shape: &[usize], axis, exclusive, reverse| {
            let template = Template::Scan { axis, exclusive, reverse };
            sample(template, shape, vec![floats(shape)], Expr::input(0, DType::F32))
        };
        vec![
            of(&[7], 0, false, false),
            of(&[3, 5], 1, true, false),
            of(&[2, 4, 3], 1, false, true),
            of(&[4, 70], 0, true, true),
        ]
    },
    ..PLAIN
};

fn scan(kernel: &Kernel, index: &[usize], elements: &mut Elements) -> Row {
    let &Template::Scan { axis, exclusive, reverse } = &kernel.template else { mismatch(&kernel.template) };
    let all = elements.along(0, &[&index[..axis], &[0], &index[axis + 1..]].concat(), axis);
    let own = index[axis];
    let (first, last) = if exclusive { (own + 1, own) } else { (own, own + 1) };
    single(if reverse { all[first..].iter().rev().sum() } else { all[..last].iter().sum() })
}
