//! Rows that write elements by index.
//!
//! An update goes to its place, or joins what is there: `plimsoll.Scatter` writes nothing else. Updates of one place join in their order, so the
//! result is the same in every run.
//!
//! GPUs add floating-point updates up by the places: `plimsoll.SumByIndex`. The pass `indexed` chooses between both.

use super::compose::composed;
use super::index::from_start;
use super::{along, expect_dtype, indices, output, position};
use crate::dtype::DType;
use crate::kernel::{Reduction, Template};
use crate::op::{
    Args, Attrs, Back, Call, Eval, Fact, Lower, Nodes, OpDef, OpResult, Part, TemplateCall, Var, inputs, names,
};
use crate::shape::{Access, Shape};

/// The row whose kernel writes its updates alone. Its result lies over the data, so computing it in parts would only add copies of these.
pub const SCATTER: &str = "plimsoll.Scatter";

/// The row whose kernel adds updates up by their indices.
pub const SUM_BY_INDEX: &str = "plimsoll.SumByIndex";

pub(super) static OPS: &[OpDef] = &[
    OpDef::new(
        SCATTER,
        "ScatterElements of indices that broadcast to the updates; with `unique_indices`, no two along `axis` are the same",
        inputs![data indices updates],
        scatter_rows,
        Eval::Tensor(scatter_elements_eval),
        Lower::Template(|call, x| {
            let (axis, shape) = (call.axis("axis", 0, call.shape(0))?, call.shape(2).clone());
            let (data, indices) = (&x[0], x[1].broadcast(&shape));
            let template = Template::Scatter {
                axis,
                stride: data.strides[axis],
                extent: data.shape[axis],
                unique: call.int("unique_indices", 0)? != 0,
                join: join(call)?,
            };
            let mut base = Access { shape: shape.clone(), ..data.clone() };
            base.strides[axis] = 0;
            Ok(TemplateCall { template, shape, reads: vec![(0, base), (1, indices), (2, x[2].clone())] })
        }),
    )
    .grad(scatter_grad)
    .sample(|s| s.floats(&[&[2, 5, 3]]).input(DType::I64, &[2, 4, 1], -5.0, 4.0).floats(&[&[2, 4, 3]]).attr("axis", 1))
    .sample(|s| {
        let s = s.floats(&[&[2, 5, 3]]).given(DType::I64, &[1, 4, 1], &[0.0, -1.0, 5.0, 2.0]);
        s.floats(&[&[2, 4, 3]]).attr("axis", 1).attr("unique_indices", 1)
    })
    .in_place()
    .attrs(names![axis unique_indices reduction]),
    OpDef::new(
        SUM_BY_INDEX,
        "For each index below `extent`, the sum of the updates that have it; of indices [n] and updates [n, ..]",
        inputs![indices updates],
        sum_by_index,
        Eval::Tensor(sum_by_index_eval),
        Lower::Template(|call, x| {
            let shape = sum_by_index(call)?.remove(0).shape;
            let reads = [1, 0].map(|input| (input, x[input].clone())).into();
            Ok(TemplateCall { template: Template::SumByIndex, shape, reads })
        }),
    )
    .grad(|_, call, back| {
        let (updates, extent) = (call.shape(1), call.int("extent", 0)?);
        let at = from_start(back.x[0], extent as usize);
        let inside = at.greater_or_equal(0.0).and(at.less(extent as f64));
        let rows = back.first()?.op("Gather", &[back.x[0]], Attrs::new());
        Ok(vec![None, Some(inside.shaped(&along(updates[0], updates.len())).select(rows, 0.0))])
    })
    .sample(|s| s.given(DType::I64, &[6], &[1.0, -1.0, 4.0, 1.0, -5.0, 2.0]).floats(&[&[6, 2, 3]]).attr("extent", 4))
    .attrs(names![extent])
    .part(|_, axis, _| if axis == 0 { None } else { Part::of([None, Some(axis)]) })
    .summed(|_| vec![vec![Some(0), Some(0)]]),
    OpDef::new(
        "ScatterND",
        "The data with updates at the places that the tuples along the last axis of the indices name; the \
         last of several where nothing is reduced, none where an index is outside",
        inputs![data indices updates],
        scatter_nd,
        Eval::Tensor(scatter_nd_eval),
        Lower::Decompose(scatter_nd_nodes),
    )
    .sample(|s| s.floats(&[&[5, 3]]).input(DType::I64, &[4, 1], -5.0, 4.0).floats(&[&[4, 3]]))
    .attrs(names![reduction]),
    OpDef::new(
        "ScatterElements",
        "The data with each update at its own place but along `axis`, where its index says; the last of \
         several where nothing is reduced, none where an index is outside",
        inputs![data indices updates],
        scatter_elements,
        Eval::Tensor(scatter_elements_eval),
        Lower::Decompose(|_, call, x| scatter_elements_nodes(call, x)),
    )
    .sample(|s| s.floats(&[&[3, 4, 2]]).input(DType::I64, &[2, 6, 1], -4.0, 3.0).floats(&[&[2, 6, 1]]).attr("axis", 1))
    .attrs(names![axis reduction]),
    composed(
        "Scatter",
        "ScatterElements under its name before opset 11",
        inputs![data indices updates],
        |_, call, x| Ok(vec![x[0].op("ScatterElements", &[x[1], x[2]], call.attrs.clone())]),
    )
    .sample(|s| s.floats(&[&[3, 5]]).given(DType::I64, &[1, 2], &[1.0, 3.0]).floats(&[&[1, 2]]).attr("axis", 1))
    .attrs(names![axis]),
    composed(
        "TensorScatter",
        "The cache with the update written along `axis`, from a place on that differs from row to row; \
         what goes beyond the end is left out, or goes on at the start where `mode` is circular",
        inputs![past_cache update write_indices?],
        tensor_scatter_nodes,
    )
    .sample(|s| s.floats(&[&[2, 3, 6, 4], &[2, 3, 2, 4]]).given(DType::I64, &[2], &[0.0, 4.0]))
    .attrs(names![axis mode]),
];

fn tensor_scatter_nodes<'g>(b: Nodes<'g>, call: &Call, x: &Args<Var<'g>>) -> OpResult<Vec<Var<'g>>> {
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
        return Ok(vec![x[0]]);
    }
    // The place of each row of the update, [1 or batch, new].
    let mut at = b.numbers(DType::I64, [1, new], 0.0);
    if let Some(first) = x.given(2) {
        let first = first.cast(DType::I64).shaped(&[batch, 1]);
        at = if new == 1 { first } else { first + at };
        // A place before the start is none, and does not count from the end.
        at = if circular { at % extent as f64 } else { at.less(0.0).select(extent as f64, at) };
    }
    let mut row = vec![1; rank];
    (row[0], row[axis]) = (if x.given(2).is_some() { batch } else { 1 }, new);
    let attrs = Attrs::new().with("axis", axis as i64).with("unique_indices", 1);
    Ok(vec![x[0].op(SCATTER, &[at.shaped(&row), x[1]], attrs)])
}

/// How an update joins an element; none if it takes its place.
fn join(call: &Call) -> OpResult<Option<Reduction>> {
    let words = [
        ("none", None),
        ("add", Some(Reduction::Sum)),
        ("mul", Some(Reduction::Prod)),
        ("max", Some(Reduction::Max)),
        ("min", Some(Reduction::Min)),
    ];
    call.choice("reduction", &words)
}

/// The element after an update.
fn updated_by(join: Option<Reduction>, old: f64, update: f64) -> f64 {
    join.map_or(update, |join| join.combine(old, update))
}

/// The type of the data and the updates. Some reductions restrict it.
fn updated(call: &Call) -> OpResult<DType> {
    expect_dtype(call, 1, "i64 or i32", |d| matches!(d, DType::I64 | DType::I32))?;
    let dtype = match join(call)? {
        None => call.dtype(0),
        _ => expect_dtype(call, 0, "a float or integer type", DType::is_number)?,
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

/// The derivatives of a scatter, by the data and by the updates.
fn scatter_grad<'g>(b: Nodes<'g>, call: &Call, back: &Back<'_, 'g>) -> OpResult<Vec<Option<Var<'g>>>> {
    let (dy, data, updates) = (back.first()?, call.shape(0), call.shape(2));
    let axis = call.axis("axis", 0, data)?;
    let along = || Attrs::new().with("axis", axis as i64);
    let (x, u, at) = (back.x[0], back.x[2], back.x[1]);
    let places = at.expand(updates);
    let look_up = |of: Var<'g>| of.op("GatherElements", &[places], along());
    // An update outside has no part in the result.
    let own = from_start(at, data[axis]);
    let inside = own.greater_or_equal(0.0).and(own.less(data[axis] as f64)).expand(updates);
    let given = |of: Var<'g>| inside.select(look_up(of), 0.0);
    let joined = |of: Var<'g>, by: Var<'g>, how: &str| of.op(SCATTER, &[at, by], along().with("reduction", how));
    match join(call)? {
        None => {
            let zeros = b.scalar(0.0, call.dtype(2)).expand(updates);
            let kept = dy.op(SCATTER, &[at, zeros], call.attrs.clone());
            // An update has a part in the result if its number is what a scatter of numbers leaves at its place.
            let numbers = b.numbers(DType::I32, updates.clone(), 0.0);
            let left = b.scalar(-1.0, DType::I32).expand(data).op(SCATTER, &[places, numbers], along());
            let stays = look_up(left).equal(numbers);
            Ok(vec![Some(kept), None, Some(stays.select(look_up(dy), 0.0))])
        }
        Some(Reduction::Sum) => Ok(vec![Some(dy), None, Some(given(dy))]),
        Some(Reduction::Max | Reduction::Min) => {
            // Those that are the extreme share its derivative.
            let (y, dtype) = (back.y[0], call.dtype(0));
            let [old, new] = [x.equal(y), u.equal(look_up(y)).and(inside)].map(|hit| hit.cast(dtype));
            let share = dy / joined(old, new, "add").max(1.0);
            Ok(vec![Some(old * share), None, Some(new * look_up(share))])
        }
        Some(Reduction::Prod) => {
            // Of an update, the product of all others at its place: of those that are not zero, unless one is.
            let is_zero = [x, u].map(|v| v.equal(0.0));
            let [old, new] = [(is_zero[0], x), (is_zero[1], u)].map(|(zero, v)| zero.select(1.0, v));
            let product = joined(old, new, "mul");
            let zeros = joined(is_zero[0].cast(call.dtype(0)), is_zero[1].cast(call.dtype(0)), "add");
            let others = |zero: Var<'g>, own: Var<'g>, product: Var<'g>, zeros: Var<'g>| {
                let alone = zeros.equal(zero.cast(call.dtype(0)));
                alone.select(product / own, 0.0)
            };
            let by_data = dy * others(is_zero[0], old, product, zeros);
            let by_updates = given(dy) * others(is_zero[1], new, look_up(product), look_up(zeros));
            Ok(vec![Some(by_data), None, Some(by_updates)])
        }
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

fn scatter_nd_eval(x: &Args<&[f64]>, call: &Call) -> OpResult<Vec<Vec<f64>>> {
    let [data, at, updates] = [0, 1, 2].map(|i| x[i]);
    let (join, tuple, shape) = (join(call)?, tuple(call)?, call.shape(0));
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
        *old = updated_by(join, *old, update);
    }
    Ok(vec![result])
}

fn scatter_nd_nodes<'g>(b: Nodes<'g>, call: &Call, x: &Args<Var<'g>>) -> OpResult<Vec<Var<'g>>> {
    let [data, at, updates] = [0, 1, 2].map(|i| x[i]);
    let (tuple, shape) = (tuple(call)?, call.shape(0));
    let count: usize = call.shape(1)[..call.shape(1).len() - 1].iter().product();
    if count == 0 || shape.contains(&0) {
        return Ok(vec![data]);
    }
    let (places, rest) = shape.split_at(tuple);
    let updates = updates.shaped(&[&[count], rest].concat());
    let at = numbered(b, at.shaped(&[count, tuple]), places)?.shaped(&along(count, 1 + rest.len()));
    let rows = data.shaped(&[&[places.iter().product()], rest].concat());
    Ok(vec![rows.op(SCATTER, &[at, updates], reduction(call)).shaped(shape)])
}

/// The attribute that says how updates join, if they do.
fn reduction(call: &Call) -> Attrs {
    let given = call.attrs.get("reduction");
    given.map_or(Attrs::new(), |how| Attrs::new().with("reduction", how.clone()))
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

fn sum_by_index(call: &Call) -> OpResult<Vec<Fact>> {
    let dtype = expect_dtype(call, 1, "a floating-point type", DType::is_float)?;
    expect_dtype(call, 0, "i64 or i32", |d| matches!(d, DType::I64 | DType::I32))?;
    let (at, updates) = (call.shape(0), call.shape(1));
    if at.len() != 1 || updates.first() != at.first() {
        return Err(format!("expected indices [n] and updates [n, ..], found {at} and {updates}"));
    }
    match call.int("extent", 0)? {
        extent @ 1.. => output(dtype, [&[extent as usize], &updates[1..]].concat()),
        extent => Err(format!("attribute 'extent': expected 1 or more, found {extent}")),
    }
}

fn sum_by_index_eval(x: &Args<&[f64]>, call: &Call) -> OpResult<Vec<Vec<f64>>> {
    let shape = sum_by_index(call)?.remove(0).shape;
    let mut sums = vec![0.0; shape.numel()];
    for (index, &update) in indices(call.shape(1)).zip(x[1]) {
        let (named, extent) = (x[0][index[0]], shape[0] as f64);
        let place = if named < 0.0 { named + extent } else { named };
        if (0.0..extent).contains(&place) {
            sums[position(&[&[place as usize], &index[1..]].concat(), &shape)] += update;
        }
    }
    Ok(vec![sums])
}

fn scatter_rows(call: &Call) -> OpResult<Vec<Fact>> {
    let dtype = updated(call)?;
    let (data, at, updates) = (call.shape(0), call.shape(1), call.shape(2));
    let axis = call.axis("axis", 0, data)?;
    call.int("unique_indices", 0)?;
    let fits = |k: usize| (k == axis || updates[k] <= data[k]) && (at[k] == updates[k] || at[k] == 1);
    if [at.len(), updates.len()] == [data.len(); 2]
        && (0..data.len()).all(fits)
        && (data[axis] > 0 || updates.contains(&0))
    {
        output(dtype, data.clone())
    } else {
        Err(format!("expected indices and updates within {data} but for axis {axis}, found {at} and {updates}"))
    }
}

fn scatter_elements_eval(x: &Args<&[f64]>, call: &Call) -> OpResult<Vec<Vec<f64>>> {
    let [data, at, updates] = [0, 1, 2].map(|i| x[i]);
    let (join, shape) = (join(call)?, call.shape(0));
    let axis = call.axis("axis", 0, shape)?;
    let mut result = data.to_vec();
    for (mut index, &update) in indices(call.shape(2)).zip(updates) {
        // One index may serve several updates.
        let own: Vec<usize> = index.iter().zip(call.shape(1).iter()).map(|(&i, &extent)| i.min(extent - 1)).collect();
        let (named, extent) = (at[position(&own, call.shape(1))], shape[axis] as f64);
        let place = if named < 0.0 { named + extent } else { named };
        if (0.0..extent).contains(&place) {
            index[axis] = place as usize;
            let old = &mut result[position(&index, shape)];
            *old = updated_by(join, *old, update);
        }
    }
    Ok(vec![result])
}

fn scatter_elements_nodes<'g>(call: &Call, x: &Args<Var<'g>>) -> OpResult<Vec<Var<'g>>> {
    let (data, shape) = (x[0], call.shape(0));
    let axis = call.axis("axis", 0, shape)?;
    if call.shape(1).contains(&0) || shape.contains(&0) {
        return Ok(vec![data]);
    }
    Ok(vec![data.op(SCATTER, &[x[1], x[2]], reduction(call).with("axis", axis as i64))])
}

/// The number of the place that each tuple of `[count, tuple]` names, or how many there are if it names none.
fn numbered<'g>(b: Nodes<'g>, at: Var<'g>, places: &[usize]) -> OpResult<Var<'g>> {
    let [count, tuple] = at.shape()?[..] else { return Err("expected tuples".into()) };
    if tuple == 1 {
        return Ok(at);
    }
    // Without a tuple every update goes everywhere, which is one place.
    let (mut number, mut inside) = (b.constant(DType::I64, vec![count], || vec![0.0; count]), None);
    for (j, &extent) in places.iter().enumerate() {
        let column = from_start(at.part(1, j..j + 1).shaped(&[count]).cast(DType::I64), extent);
        let own = column.greater_or_equal(0.0).and(column.less(extent as f64));
        number = if j == 0 { column } else { number * extent as f64 + column };
        inside = Some(inside.map_or(own, |others: Var<'g>| others.and(own)));
    }
    Ok(inside.map_or(number, |inside| inside.select(number, places.iter().product::<usize>() as f64)))
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
