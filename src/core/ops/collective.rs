//! Collectives: what the ranks of a mesh axis exchange. A graph of one rank has them; see the pass that shards graphs.

use super::{ensure, output};
use crate::dtype::DType;
use crate::kernel::{Collective, Exchange, Reduction, Template};
use crate::op::{Attrs, Call, Eval, Lower, OpDef, OpResult, Part, TemplateCall, inputs, names};
use crate::shape::Shape;

/// The rows of collectives.
pub const ALL_REDUCE: &str = "plimsoll.AllReduce";
/// As [`ALL_REDUCE`].
pub const ALL_GATHER: &str = "plimsoll.AllGather";
/// As [`ALL_REDUCE`].
pub const REDUCE_SCATTER: &str = "plimsoll.ReduceScatter";
/// As [`ALL_REDUCE`].
pub const ALL_TO_ALL: &str = "plimsoll.AllToAll";
/// What a rank sends to another along a mesh axis. Its result is nothing but a mark: what reads it comes later.
pub const SEND: &str = "plimsoll.Send";
/// What a rank receives from another along a mesh axis.
pub const RECV: &str = "plimsoll.Recv";

pub(super) static OPS: &[OpDef] = &[
    row(ALL_REDUCE, "The elements of all ranks of a mesh axis, joined by `reduction`: sum, max or min").grad(
        |b, call, back| {
            let dy = b.op(ALL_REDUCE, &[back.first()?], of(call).with("reduction", "sum"));
            Ok(vec![Some(match collective(call)?.exchange {
                Exchange::AllReduce(Reduction::Sum) => dy,
                // Whoever has what was chosen has the gradient.
                _ => {
                    let chosen = back.x[0].op("Equal", &[back.y[0]], Attrs::new());
                    chosen.select(dy, b.scalar(0.0, call.dtype(0)))
                }
            })])
        },
    ),
    row(ALL_GATHER, "The elements of all ranks of a mesh axis, one after another along a new first axis").grad(
        |b, call, back| Ok(vec![Some(b.op(REDUCE_SCATTER, &[back.first()?], of(call).with("reduction", "sum")))]),
    ),
    row(
        REDUCE_SCATTER,
        "A rank's own part, along the first axis, of the elements of all ranks of a mesh axis, joined by `reduction`",
    )
    .grad(|b, call, back| match collective(call)?.exchange {
        Exchange::ReduceScatter(Reduction::Sum) => Ok(vec![Some(b.op(ALL_GATHER, &[back.first()?], of(call)))]),
        _ => Err("it has derivatives as a sum alone".into()),
    })
    .sample(|s| s.floats(&[&[1, 5]]).attr("ranks", 1).attr("mesh_axis", "data").attr("reduction", "sum")),
    row(ALL_TO_ALL, "Of each rank of a mesh axis the part, along the first axis, that is this rank's own")
        .grad(|b, call, back| Ok(vec![Some(b.op(ALL_TO_ALL, &[back.first()?], of(call)))]))
        .sample(|s| s.floats(&[&[1, 5]]).attr("ranks", 1).attr("mesh_axis", "data").attr("reduction", "sum")),
    OpDef::new(
        SEND,
        "Sends data to the rank at `place` along a mesh axis, after what `after` is; the result is a mark that what comes later reads",
        inputs![x after],
        |call| {
            collective(call)?;
            output(DType::I32, MARK)
        },
        Eval::Tensor(|_, call| alone(call, 1)),
        Lower::Template(|call, x| {
            let (template, shape) = (Template::Collective(collective(call)?), Shape::new(MARK));
            Ok(TemplateCall { template, shape, reads: vec![(0, x[0].clone()), (1, x[1].clone())] })
        }),
    )
    .attrs(names![mesh_axis ranks place])
    .grad(|_, _, _| Err(CUT_LAST.into()))
    .alone()
    .sample(|s| s.floats(&[&[2, 3], &[1]]).attr("ranks", 1).attr("mesh_axis", "stage").attr("place", 0)),
    OpDef::new(
        RECV,
        "Receives data of `shape` and the type `to` from the rank at `place` along a mesh axis, after what `after` is; a rank alone has zeros",
        inputs![after],
        |call| {
            collective(call)?;
            let to = DType::from_onnx(call.int("to", 1)?).ok_or("attribute 'to': expected a type of elements")?;
            output(to, received(call)?)
        },
        Eval::Tensor(|_, call| alone(call, received(call)?.numel())),
        Lower::Template(|call, x| {
            let (template, shape) = (Template::Collective(collective(call)?), received(call)?);
            Ok(TemplateCall { template, shape, reads: vec![(0, x[0].clone())] })
        }),
    )
    .attrs(names![mesh_axis ranks place shape to])
    .grad(|_, _, _| Err(CUT_LAST.into()))
    .alone()
    .sample(|s| {
        let s = s.floats(&[&[1]]).attr("ranks", 1).attr("mesh_axis", "stage").attr("place", 0);
        s.ints("shape", &[2, 3]).attr("to", DType::F32.onnx())
    }),
];

/// The shape of the mark of what is sent: one `i32`.
pub const MARK: [usize; 1] = [1];

/// Why what is sent has no gradient.
const CUT_LAST: &str = "a graph is differentiated before it is cut into stages";

/// What a rank has that exchanges with none.
fn alone(call: &Call, elements: usize) -> OpResult<Vec<Vec<f64>>> {
    ensure(collective(call)?.ranks == 1, || "it is computed by two ranks together".to_owned())?;
    Ok(vec![vec![0.0; elements]])
}

/// The shape of what a call receives.
fn received(call: &Call) -> OpResult<Shape> {
    let shape = call.ints("shape")?.ok_or("attribute 'shape': expected extents, found none")?;
    let extent =
        |&extent: &i64| usize::try_from(extent).map_err(|_| format!("attribute 'shape': {extent} is no extent"));
    shape.iter().map(extent).collect()
}

/// The row of a collective. A sample is a group of one rank, as no other rank runs it.
const fn row(name: &'static str, doc: &'static str) -> OpDef {
    OpDef::new(
        name,
        doc,
        inputs![x],
        |call| {
            let Collective { exchange, ranks, .. } = collective(call)?;
            output(call.dtype(0), exchange.shape(call.shape(0), ranks)?)
        },
        Eval::Move(|x, call| {
            let ranks = collective(call)?.ranks;
            ensure(ranks == 1, || format!("it is computed by {ranks} ranks together"))?;
            Ok(vec![x[0].to_vec()])
        }),
        Lower::Template(|call, x| {
            let collective = collective(call)?;
            let shape = collective.exchange.shape(call.shape(0), collective.ranks)?;
            Ok(TemplateCall { template: Template::Collective(collective), shape, reads: vec![(0, x[0].clone())] })
        }),
    )
    .attrs(names![mesh_axis ranks reduction])
    .alone()
    // Along another axis of the mesh. The first axis of parts has one per rank.
    .part(|call, axis, _| match collective(call).ok()?.exchange {
        Exchange::AllReduce(_) => Part::of([Some(axis)]),
        Exchange::AllGather => Part::of([Some(axis.checked_sub(1)?)]),
        Exchange::ReduceScatter(_) => Part::of([Some(axis + 1)]),
        Exchange::AllToAll => Part::of([Some(axis)]).filter(|_| axis > 0),
        Exchange::Send { .. } | Exchange::Recv { .. } => None,
    })
    .sample(|s| s.floats(&[&[2, 3]]).attr("ranks", 1).attr("mesh_axis", "data").attr("reduction", "sum"))
}

/// True if a row is a collective.
pub fn is_collective(op: &OpDef) -> bool {
    [ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL].contains(&op.name) || is_passed(op)
}

/// True if a row is of what one rank has from another: each is met by the other rank's, once.
pub fn is_passed(op: &OpDef) -> bool {
    [SEND, RECV].contains(&op.name)
}

/// The collective of a call.
///
/// # Errors
/// When an attribute is none of a collective.
pub fn collective(call: &Call) -> OpResult<Collective> {
    let ranks = call.int("ranks", 0)?;
    let ranks = usize::try_from(ranks).ok().filter(|&ranks| ranks > 0);
    let ranks = ranks.ok_or("attribute 'ranks': expected at least 1")?;
    let by = || call.choice("reduction", &[("sum", Reduction::Sum), ("max", Reduction::Max), ("min", Reduction::Min)]);
    let place = || {
        let place = usize::try_from(call.int("place", 0)?).ok().filter(|&place| place < ranks);
        place.ok_or_else(|| format!("attribute 'place': expected one of {ranks} ranks"))
    };
    let exchange = match call.op.name {
        SEND => Exchange::Send { to: place()? },
        RECV => Exchange::Recv { from: place()? },
        ALL_REDUCE => Exchange::AllReduce(by()?),
        ALL_GATHER => Exchange::AllGather,
        REDUCE_SCATTER => Exchange::ReduceScatter(by()?),
        ALL_TO_ALL => Exchange::AllToAll,
        name => unreachable!("'{name}' is no collective"),
    };
    Ok(Collective { exchange, axis: call.str("mesh_axis", "")?.to_owned(), ranks })
}

/// The attributes that say who takes part.
fn of(call: &Call) -> Attrs {
    call.attrs.only(&["mesh_axis", "ranks"])
}
