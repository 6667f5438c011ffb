//! Collectives of ONNX Runtime, in files that others have cut for the ranks of a mesh. A mesh says along which axis they run: attributes that no
//! file has, see the pass that resolves them.

use super::compose::composed;
use super::{ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, ensure, output};
use crate::op::{Attrs, Call, Infer, OpDef, OpResult, inputs, names};

/// The rows.
pub const OF_CUT_FILES: [&str; 3] = ["com.microsoft.AllReduce", "com.microsoft.AllGather", "com.microsoft.AllToAll"];

pub(super) static OPS: &[OpDef] = &[
    OpDef {
        infer: |call| output(call.dtype(0), call.shape(0).clone()),
        ..composed(
            OF_CUT_FILES[0],
            "The sums of the elements of all ranks, of a file that was cut for several",
            inputs![input],
            |_, call, x| Ok(vec![x[0].op(ALL_REDUCE, &[], attrs(call)?.with("reduction", "sum"))]),
        )
    }
    .attrs(names![mesh_axis ranks])
    .sample(|s| s.floats(&[&[2, 3]]).attr("ranks", 1).attr("mesh_axis", "data")),
    OpDef {
        infer: GATHERED,
        ..composed(
            OF_CUT_FILES[1],
            "The elements of all ranks one after another along `axis`, of a file that was cut for several",
            inputs![input],
            |_, call, x| {
                let (at, shape) = (axis(call)?, call.shape(0));
                let parts = x[0].op(ALL_GATHER, &[], attrs(call)?);
                let mut order: Vec<usize> = (1..=shape.len()).collect();
                order.insert(at, 0);
                let mut joined = shape.to_vec();
                joined[at] *= group(call)?;
                Ok(vec![parts.transpose(&order).shaped(&joined)])
            },
        )
    }
    .attrs(names![axis group_size mesh_axis ranks])
    .sample(|s| {
        let s = s.floats(&[&[2, 3]]).attr("ranks", 1).attr("mesh_axis", "data");
        s.attr("axis", 1).attr("group_size", 1)
    }),
    OpDef {
        infer: |call| {
            let (elements, ranks) = (call.shape(0).numel(), group(call)?);
            ensure(elements.is_multiple_of(ranks), || format!("{ranks} ranks do not divide {elements} elements"))?;
            output(call.dtype(0), call.shape(0).clone())
        },
        ..composed(
            OF_CUT_FILES[2],
            "Of each rank the part of the elements that is this rank's own, of a file that was cut for several",
            inputs![input],
            |_, call, x| {
                let (shape, ranks) = (call.shape(0), group(call)?);
                let parts = x[0].shaped(&[ranks, shape.numel() / ranks]);
                Ok(vec![parts.op(ALL_TO_ALL, &[], attrs(call)?).shaped(shape)])
            },
        )
    }
    .attrs(names![group_size mesh_axis ranks])
    .sample(|s| s.floats(&[&[2, 3]]).attr("ranks", 1).attr("mesh_axis", "data").attr("group_size", 1)),
];

const GATHERED: Infer = |call| {
    let (at, mut shape) = (axis(call)?, call.shape(0).clone());
    shape[at] = shape[at].checked_mul(group(call)?).ok_or("its elements are too many")?;
    output(call.dtype(0), shape)
};

fn axis(call: &Call) -> OpResult<usize> {
    call.axis("axis", 1, call.shape(0))
}

/// The ranks that the file was cut for.
fn group(call: &Call) -> OpResult<usize> {
    let size = call.int("group_size", 1)?;
    let ranks = call.int("ranks", size)?;
    ensure(ranks == size, || {
        format!("attribute 'group_size': expected the {ranks} ranks that a mesh has, found {size}")
    })?;
    usize::try_from(size)
        .ok()
        .filter(|&size| size > 0)
        .ok_or(format!("attribute 'group_size': expected at least 1, found {size}"))
}

/// Who takes part, when a mesh has said so.
fn attrs(call: &Call) -> OpResult<Attrs> {
    let size = call.int("group_size", 0)?;
    ensure(call.int("ranks", 0)? > 0, || {
        let size = if size > 0 { size.to_string() } else { "several".into() };
        format!(
            "the file was cut for {size} ranks: expected a mesh of one axis with as many, such as tensor=2, found none"
        )
    })?;
    Ok(call.attrs.only(&["mesh_axis", "ranks"]))
}
