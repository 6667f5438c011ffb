//! Rows that write elements by index.
//!
//! They become reductions: each place of the data finds the updates that are for it. So no two invocations write one
//! place, and the result is the same on every device:
//!
//! ```text
//! indices [n, k] --column j, raised--> [1.., n] --. equal, for all j
//! 0..d_j ------------------------------> [d_j, 1] --'-> hit [d_0 .. d_k-1, n] --fold over n--> the last that hits, or a sum, ...
//! ```

use super::compose::{binary, composed, given, required, reshape, transpose, with_number};
use super::{expect_dtype, indices, output, position};
use crate::dtype::DType;
use crate::expr::{maximum, minimum};
use crate::op::{Attrs, Build, Call, Eval, Fact, Lower, OpDef, OpResult, ValueId, one, optional};
use crate::shape::Shape;

pub(super) static OPS: &[OpDef] = &[
    OpDef::new(
        "ScatterND",
        "The data with updates at the places that the tuples along the last axis of the indices name; the \
         last of several where nothing is reduced, none where an index is outside",
        &[one("data"), one("indices"), one("updates")],
        scatter_nd,
        Eval::Tensor(scatter_nd_eval),
        Lower::Decompose(scatter_nd_nodes),
    )
    .sample(|s| s.floats(&[&[5, 3]]).input(DType::I64, &[4, 1], -5.0, 4.0).floats(&[&[4, 3]]))
    .attrs(&["reduction"]),
    OpDef::new(
        "ScatterElements",
        "The data with each update at its own place but along `axis`, where its index says; the last of \
         several where nothing is reduced, none where an index is outside",
        &[one("data"), one("indices"), one("updates")],
        scatter_elements,
        Eval::Tensor(scatter_elements_eval),
        Lower::Decompose(scatter_elements_nodes),
    )
    .sample(|s| s.floats(&[&[3, 4, 2]]).input(DType::I64, &[2, 6, 1], -4.0, 3.0).floats(&[&[2, 6, 1]]).attr("axis", 1))
    .attrs(&["axis", "reduction"]),
    composed(
        "Scatter",
        "ScatterElements under its name before opset 11",
        &[one("data"), one("indices"), one("updates")],
        |b, call, x| Ok(vec![b.node("ScatterElements", x, call.attrs.clone())?]),
    )
    .sample(|s| s.floats(&[&[3, 5]]).given(DType::I64, &[1, 2], &[1.0, 3.0]).floats(&[&[1, 2]]).attr("axis", 1))
    .attrs(&["axis"]),
    composed(
        "TensorScatter",
        "The cache with the update written along `axis`, from a place on that differs from row to row; \
         what goes beyond the end is left out, or goes on at the start where `mode` is circular",
        &[one("past_cache"), one("update"), optional("write_indices")],
        tensor_scatter_nodes,
    )
    .sample(|s| s.floats(&[&[2, 3, 6, 4], &[2, 3, 2, 4]]).given(DType::I64, &[2], &[0.0, 5.0]))
    .attrs(&["axis", "mode"]),
];

fn tensor_scatter_nodes(b: &mut dyn Build, call: &Call, x: &[Option<ValueId>]) -> OpResult<Vec<ValueId>> {
    let (cache, update, rank) = (call.shape(0), call.shape(1), call.shape(0).len());
    let axis = call.axis("axis", -2, cache)?;
    let other = |shape: &Shape| (0..shape.len()).filter(|&k| k != axis).map(|k| shape[k]).collect::<Vec<_>>();
    if axis == 0 || update.len() != rank || other(cache) != other(update) || update[axis] > cache[axis] {
        return Err(format!(
            "expected an update that fits {cache} but for axis {axis}, which is not the first, found {update}"
        ));
    }
    let circular = call.choice("mode", &[("linear", false), ("circular", true)])?;
    let (batch, extent, new) = (cache[0], cache[axis], update[axis]);
    if call.has(2) && (!call.dtype(2).is_int() || call.shape(2)[..] != [batch]) {
        return Err(format!("input 'write_indices': expected integers [{batch}], found {}", call.fact(2)));
    }
    if new == 0 || cache.contains(&0) {
        return Ok(vec![required(x, 0)]);
    }
    // The element of the update for each place: [batch, extent].
    let mut at = b.numbers(DType::I64, [1, extent], 0.0)?;
    if let Some(first) = given(x, 2) {
        let first = b.cast(first, DType::I64)?;
        let first = reshape(b, first, &[batch, 1])?;
        at = binary(b, "Sub", at, first)?;
    }
    if circular {
        at = with_number(b, "Mod", at, extent as f64)?;
    }
    let (from, to) = (with_number(b, "GreaterOrEqual", at, 0.0)?, with_number(b, "Less", at, new as f64)?);
    let inside = binary(b, "And", from, to)?;
    let at = with_number(b, "Max", at, 0.0)?;
    let at = with_number(b, "Min", at, new as f64 - 1.0)?;
    let at = b.op("Expand", &[at], Attrs::new().with("shape", &[batch, extent][..]))?;
    let at = reshape(b, at, &[batch, extent, 1])?;
    let ahead: Vec<usize> = [0, axis].into_iter().chain((1..rank).filter(|&k| k != axis)).collect();
    let back: Vec<usize> = (0..rank).map(|k| ahead.iter().position(|&a| a == k).expect("axes are permuted")).collect();
    let rows = transpose(b, required(x, 1), &ahead)?;
    let rows = b.op("GatherND", &[rows, at], Attrs::new().with("batch_dims", 1))?;
    let rows = transpose(b, rows, &back)?;
    let mut along = vec![1; rank];
    (along[0], along[axis]) = (b.fact(inside).shape[0], extent);
    let inside = reshape(b, inside, &along)?;
    Ok(vec![b.op("Where", &[inside, rows, required(x, 0)], Attrs::new())?])
}

/// How an element and its updates combine.
#[derive(Clone, Copy, PartialEq)]
enum Combine {
    /// The last update.
    None,
    Add,
    Mul,
    Max,
    Min,
}

fn combine(call: &Call) -> OpResult<Combine> {
    let words = [
        ("none", Combine::None),
        ("add", Combine::Add),
        ("mul", Combine::Mul),
        ("max", Combine::Max),
        ("min", Combine::Min),
    ];
    call.choice("reduction", &words)
}

impl Combine {
    /// The element after an update.
    fn apply(self, old: f64, update: f64) -> f64 {
        match self {
            Combine::None => update,
            Combine::Add => old + update,
            Combine::Mul => old * update,
            Combine::Max => maximum(old, update),
            Combine::Min => minimum(old, update),
        }
    }

    /// The row that reduces the updates of a place, the row that joins the result to the data, and the value that
    /// stands for no update. `None` stands for the element itself.
    fn rows(self) -> (&'static str, &'static str, Option<f64>) {
        match self {
            Combine::None | Combine::Add => ("ReduceSum", "Add", Some(0.0)),
            Combine::Mul => ("ReduceProd", "Mul", Some(1.0)),
            Combine::Max => ("ReduceMax", "Max", None),
            Combine::Min => ("ReduceMin", "Min", None),
        }
    }
}

/// The type of the data and the updates. Some reductions restrict it.
fn updated(call: &Call) -> OpResult<DType> {
    expect_dtype(call, 1, "i64 or i32", |d| matches!(d, DType::I64 | DType::I32))?;
    let dtype = match combine(call)? {
        Combine::None => call.dtype(0),
        _ => expect_dtype(call, 0, "a float or integer type", |d| d != DType::Bool)?,
    };
    if call.dtype(2) == dtype {
        Ok(dtype)
    } else {
        Err(format!("input 'updates': expected {dtype} as input 'data', found {}", call.dtype(2)))
    }
}

/// The length of the tuples.
fn tuple(call: &Call) -> OpResult<usize> {
    let (data, at) = (call.shape(0), call.shape(1));
    match at.last() {
        Some(&tuple) if tuple <= data.len() => Ok(tuple),
        _ => Err(format!("input 'indices': expected [n.., tuple] for data {data}, found {at}")),
    }
}

fn scatter_nd(call: &Call) -> OpResult<Vec<Fact>> {
    let dtype = updated(call)?;
    let (data, at) = (call.shape(0), call.shape(1));
    let expected = [&at[..at.len() - usize::from(!at.is_empty())], &data[tuple(call)?..]].concat();
    if call.shape(2)[..] == expected[..] {
        output(dtype, data.clone())
    } else {
        Err(format!("input 'updates': expected {expected:?}, found {}", call.shape(2)))
    }
}

fn scatter_nd_eval(x: &[Option<&[f64]>], call: &Call) -> OpResult<Vec<Vec<f64>>> {
    let [data, at, updates] = [0, 1, 2].map(|i| x[i].expect("a required input is present: arity is checked first"));
    let (combine, tuple, shape) = (combine(call)?, tuple(call)?, call.shape(0));
    let outer = call.shape(1).len() - 1;
    let mut result = data.to_vec();
    for (index, &update) in indices(call.shape(2)).zip(updates) {
        let named = |j: usize| {
            let i = at[position(&[&index[..outer], &[j]].concat(), call.shape(1))];
            let i = if i < 0.0 { i + shape[j] as f64 } else { i };
            (0.0..shape[j] as f64).contains(&i).then_some(i as usize)
        };
        let Some(mut place) = (0..tuple).map(named).collect::<Option<Vec<_>>>() else { continue };
        place.extend(&index[outer..]);
        let old = &mut result[position(&place, shape)];
        *old = combine.apply(*old, update);
    }
    Ok(vec![result])
}

fn scatter_nd_nodes(b: &mut dyn Build, call: &Call, x: &[Option<ValueId>]) -> OpResult<Vec<ValueId>> {
    let [data, at, updates] = [0, 1, 2].map(|i| x[i].expect("a required input is present: arity is checked first"));
    let (combine, tuple, shape) = (combine(call)?, tuple(call)?, call.shape(0));
    let count: usize = call.shape(1)[..call.shape(1).len() - 1].iter().product();
    if count == 0 || shape.contains(&0) {
        return Ok(vec![b.op("Identity", &[data], Attrs::new())?]);
    }
    let ints = |values: &[usize]| values.iter().map(|&v| v as i64).collect::<Vec<_>>();
    let (places, rest) = shape.split_at(tuple);
    let updates = b.op("Reshape", &[updates], Attrs::new().with("shape", ints(&[&[count], rest].concat())))?;
    // Behind the places come the axes of a slice where slices are reduced, and then the updates.
    let inner = if combine == Combine::None { 0 } else { rest.len() };
    let hit = hits(b, call, at, count, inner)?;
    let last = |keep: i64| Attrs::new().with("axes", vec![(tuple + inner) as i64]).with("keepdims", keep);
    if combine == Combine::None {
        let numbers = b.numbers(DType::I64, [count], 0.0)?;
        let none = b.scalar(-1.0, DType::I64);
        let number = b.op("Where", &[hit, numbers, none], Attrs::new())?;
        let number = b.op("ReduceMax", &[number], last(0))?;
        // Where there is none, any update will do.
        let update = b.op("Gather", &[updates, number], Attrs::new().with("axis", 0))?;
        let wide =
            b.op("Reshape", &[number], Attrs::new().with("shape", ints(&[places, &vec![1; rest.len()]].concat())))?;
        let found = b.op("Greater", &[wide, none], Attrs::new())?;
        return Ok(vec![b.op("Where", &[found, update, data], Attrs::new())?]);
    }
    let turned: Vec<i64> = (1..=rest.len() as i64).chain([0]).collect();
    let updates = b.op("Transpose", &[updates], Attrs::new().with("perm", turned))?;
    let (fold, join, neutral) = combine.rows();
    let neutral = match neutral {
        Some(number) => b.scalar(number, call.dtype(0)),
        None => b.op("Unsqueeze", &[data], Attrs::new().with("axes", vec![shape.len() as i64]))?,
    };
    let update = b.op("Where", &[hit, updates, neutral], Attrs::new())?;
    let update = b.op(fold, &[update], last(0))?;
    Ok(vec![b.op(join, &[data, update], Attrs::new())?])
}

fn scatter_elements(call: &Call) -> OpResult<Vec<Fact>> {
    let (dtype, data, at) = (updated(call)?, call.shape(0), call.shape(1));
    let axis = call.axis("axis", 0, data)?;
    if data.len() != at.len() || (0..data.len()).any(|k| k != axis && at[k] > data[k]) {
        return Err(format!("input 'indices': expected extents within {data} but for axis {axis}, found {at}"));
    }
    if call.shape(2) == at {
        output(dtype, data.clone())
    } else {
        Err(format!("input 'updates': expected {at} as input 'indices', found {}", call.shape(2)))
    }
}

fn scatter_elements_eval(x: &[Option<&[f64]>], call: &Call) -> OpResult<Vec<Vec<f64>>> {
    let [data, at, updates] = [0, 1, 2].map(|i| x[i].expect("a required input is present: arity is checked first"));
    let (combine, shape) = (combine(call)?, call.shape(0));
    let axis = call.axis("axis", 0, shape)?;
    let mut result = data.to_vec();
    for ((mut index, &named), &update) in indices(call.shape(1)).zip(at).zip(updates) {
        let extent = shape[axis] as f64;
        let place = if named < 0.0 { named + extent } else { named };
        if (0.0..extent).contains(&place) {
            index[axis] = place as usize;
            let old = &mut result[position(&index, shape)];
            *old = combine.apply(*old, update);
        }
    }
    Ok(vec![result])
}

/// Like ScatterND, but an update can only meet places along the axis: `hit [.., places, updates, ..]`.
fn scatter_elements_nodes(b: &mut dyn Build, call: &Call, x: &[Option<ValueId>]) -> OpResult<Vec<ValueId>> {
    let [data, at, updates] = [0, 1, 2].map(|i| x[i].expect("a required input is present: arity is checked first"));
    let (combine, shape, given) = (combine(call)?, call.shape(0), call.shape(1));
    let axis = call.axis("axis", 0, shape)?;
    if given.contains(&0) || shape.contains(&0) {
        return Ok(vec![b.op("Identity", &[data], Attrs::new())?]);
    }
    let (count, extent, dtype) = (given[axis], shape[axis], call.dtype(1));
    let (zero, extents) = (b.scalar(0.0, dtype), b.scalar(extent as f64, dtype));
    let below = b.op("Less", &[at, zero], Attrs::new())?;
    let raised = b.op("Add", &[at, extents], Attrs::new())?;
    let at = b.op("Where", &[below, raised, at], Attrs::new())?;
    // Where the data extends beyond the updates, the indices are padded with one that matches no element.
    let missing: Vec<_> = (0..shape.len()).map(|k| if k == axis { 0 } else { (shape[k] - given[k]) as i64 }).collect();
    let pads = [vec![0; shape.len()], missing].concat();
    let pad = |b: &mut dyn Build, value: ValueId, filler: f64| {
        if pads.iter().all(|&n| n == 0) {
            Ok(value)
        } else {
            b.op("Pad", &[value], Attrs::new().with("pads", pads.clone()).with("constant_value", filler))
        }
    };
    let (at, updates) = (pad(b, at, -1.0)?, pad(b, updates, 0.0)?);
    let wide = |b: &mut dyn Build, value: ValueId, axis: usize| {
        b.op("Unsqueeze", &[value], Attrs::new().with("axes", vec![axis as i64]))
    };
    let numbers = |b: &mut dyn Build, dtype: DType, along: [usize; 2]| {
        b.numbers(dtype, [&along[..], &vec![1; shape.len() - axis - 1]].concat(), 0.0)
    };
    let (at, places) = (wide(b, at, axis)?, numbers(b, dtype, [extent, 1])?);
    let hit = b.op("Equal", &[at, places], Attrs::new())?;
    let over = || Attrs::new().with("axes", vec![axis as i64 + 1]).with("keepdims", 0);
    if combine == Combine::None {
        let (number, none) = (numbers(b, DType::I64, [1, count])?, b.scalar(-1.0, DType::I64));
        let number = b.op("Where", &[hit, number, none], Attrs::new())?;
        let number = b.op("ReduceMax", &[number], over())?;
        // Where there is none, any update will do.
        let update = b.op("GatherElements", &[updates, number], Attrs::new().with("axis", axis as i64))?;
        let found = b.op("Greater", &[number, none], Attrs::new())?;
        return Ok(vec![b.op("Where", &[found, update, data], Attrs::new())?]);
    }
    let (fold, join, neutral) = combine.rows();
    let neutral = match neutral {
        Some(number) => b.scalar(number, call.dtype(0)),
        None => wide(b, data, axis + 1)?,
    };
    let update = wide(b, updates, axis)?;
    let update = b.op("Where", &[hit, update, neutral], Attrs::new())?;
    let update = b.op(fold, &[update], over())?;
    Ok(vec![b.op(join, &[data, update], Attrs::new())?])
}

/// True where an update is for a place: `[places.., 1 (inner times).., count]`.
fn hits(b: &mut dyn Build, call: &Call, at: ValueId, count: usize, inner: usize) -> OpResult<ValueId> {
    let (tuple, dtype) = (tuple(call)?, call.dtype(1));
    let flat = Attrs::new().with("shape", vec![count as i64, tuple as i64]).with("allowzero", 1);
    let at = b.op("Reshape", &[at], flat)?;
    let zero = b.scalar(0.0, dtype);
    let mut all: Option<ValueId> = None;
    for (j, &extent) in call.shape(0)[..tuple].iter().enumerate() {
        let column = b.slice(at, 1, j, j + 1)?;
        let column = b.op("Reshape", &[column], Attrs::new().with("shape", vec![count as i64]))?;
        let extents = b.scalar(extent as f64, dtype);
        let below = b.op("Less", &[column, zero], Attrs::new())?;
        let raised = b.op("Add", &[column, extents], Attrs::new())?;
        let column = b.op("Where", &[below, raised, column], Attrs::new())?;
        let mut along = vec![1; tuple - j + inner + 1];
        along[0] = extent;
        let coordinates = b.numbers(dtype, along, 0.0)?;
        let equal = b.op("Equal", &[column, coordinates], Attrs::new())?;
        all = Some(match all {
            Some(others) => b.op("And", &[others, equal], Attrs::new())?,
            None => equal,
        });
    }
    match all {
        Some(all) => Ok(all),
        // Without a tuple every update goes everywhere.
        None => b.constant(DType::Bool, vec![1; inner + 1], || vec![1.0]),
    }
}

#[cfg(test)]
mod tests {
    use crate::dtype::DType::*;
    use crate::op::Attrs;
    use crate::ops::tests::{eval, refused};

    #[test]
    fn scatters_follow_the_specification() {
        let data = (F32, &[8][..], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0][..]);
        let at = (I64, &[4, 1][..], &[4.0, 3.0, 1.0, 7.0][..]);
        let updates = (F32, &[4][..], &[9.0, 10.0, 11.0, 12.0][..]);
        let scattered = eval("ScatterND", &[data, at, updates], &Attrs::new());
        assert_eq!(scattered, ("f32[8]".into(), vec![1.0, 11.0, 3.0, 10.0, 9.0, 6.0, 7.0, 12.0]));
        let rows = (F32, &[2, 2][..], &[1.0, 2.0, 3.0, 4.0][..]);
        let twice = (I64, &[2, 1][..], &[-1.0, 1.0][..]);
        let reduced = |how: &str| {
            eval(
                "ScatterND",
                &[rows, twice, (F32, &[2, 2], &[5.0, 1.0, 2.0, 9.0])],
                &Attrs::new().with("reduction", how),
            )
            .1
        };
        assert_eq!(reduced("none"), [1.0, 2.0, 2.0, 9.0]);
        assert_eq!(reduced("add"), [1.0, 2.0, 10.0, 14.0]);
        assert_eq!(reduced("mul"), [1.0, 2.0, 30.0, 36.0]);
        assert_eq!(reduced("max"), [1.0, 2.0, 5.0, 9.0]);
        assert_eq!(reduced("min"), [1.0, 2.0, 2.0, 1.0]);
        let nan = (F32, &[1][..], &[f64::NAN][..]);
        for how in ["max", "min"] {
            let how = Attrs::new().with("reduction", how);
            let found = eval("ScatterND", &[nan, (I64, &[1, 1], &[0.0]), (F32, &[1], &[1.0])], &how);
            assert!(found.1[0].is_nan(), "{found:?}");
        }
        let row = (F32, &[1, 5][..], &[1.0, 2.0, 3.0, 4.0, 5.0][..]);
        let along = |at: [f64; 2], how: &str| {
            let attrs = Attrs::new().with("axis", 1).with("reduction", how);
            eval("ScatterElements", &[row, (I64, &[1, 2], &at), (F32, &[1, 2], &[1.1, 2.1])], &attrs).1
        };
        assert_eq!(along([1.0, -2.0], "none"), [1.0, 1.1, 3.0, 2.1, 5.0]);
        assert_eq!(along([1.0, 1.0], "add"), [1.0, 2.0 + 1.1 + 2.1, 3.0, 4.0, 5.0]);
        assert_eq!(along([5.0, -6.0], "none"), row.2, "what is outside goes nowhere");
        let outside = eval("ScatterND", &[data, (I64, &[2, 1], &[8.0, -9.0]), (F32, &[2], &[0.0, 0.0])], &Attrs::new());
        assert_eq!(outside.1, data.2, "what is outside goes nowhere");
        let wrong = refused("ScatterND", &[(F32, &[8]), (I64, &[4, 1]), (F32, &[3])], &Attrs::new());
        assert_eq!(wrong, "input 'updates': expected [4], found [3]");
        let wrong = refused("ScatterND", &[(F32, &[8]), (I64, &[4, 2]), (F32, &[4])], &Attrs::new());
        assert_eq!(wrong, "input 'indices': expected [n.., tuple] for data [8], found [4,2]");
        let how = Attrs::new().with("reduction", "sum");
        let wrong = refused("ScatterND", &[(F32, &[8]), (I64, &[4, 1]), (F32, &[4])], &how);
        assert!(wrong.contains("found 'sum'"), "{wrong}");
    }
}
