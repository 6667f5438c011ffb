//! Sorting. `plimsoll.Sort` gives the order of a row, in which elements are looked up. GPUs sort in levels: see the pass `indexed`.

use super::{ensure, expect_dtype, indices, position};
use crate::dtype::DType;
use crate::kernel::{Template, templates::ascending};
use crate::op::{Args, Attrs, Call, Eval, Fact, Lower, Nodes, OpDef, OpResult, Part, TemplateCall, Var, inputs, names};
use crate::shape::Shape;

/// The row whose kernel sorts.
pub const SORT: &str = "plimsoll.Sort";

pub(super) static OPS: &[OpDef] = &[
    OpDef::new(
        "TopK",
        "The `K` largest elements along `axis`, or the smallest, in order, the first of equal ones first; \
         and their indices",
        inputs![X K=],
        |call| {
            let (axis, k) = extent(call)?;
            let mut shape = call.shape(0).clone();
            shape[axis] = k;
            Ok(vec![Fact::new(call.dtype(0), shape.clone()), Fact::new(DType::I64, shape)])
        },
        Eval::Tensor(eval),
        Lower::Decompose(nodes),
    )
    .sample(|s| s.floats(&[&[9]]).attr("K", 4))
    .attrs(names![axis largest sorted])
    .upgrade(|_, _, attrs| {
        // Before opset 10.
        if let Some(k) = attrs.remove("k") {
            attrs.set("K", k);
        }
    }),
    OpDef::new(
        SORT,
        "The indices of the first `kept` elements of each group along the last axis of `x`, in order; a group has `runs` elements, or as many \
         runs of `order` [.., groups, runs, from], each in order",
        inputs![x order?],
        |call| Ok(vec![Fact::new(DType::I32, Groups::of(call)?.shape(call))]),
        Eval::Tensor(|x, call| {
            let groups = Groups::of(call)?;
            let (n, per_group) = (groups.n, groups.per_group(call));
            let compare = |a: f64, b: f64| if groups.largest { ascending(b, a) } else { ascending(a, b) };
            let of = |group: usize| {
                let row = group / groups.groups * n;
                let all = (0..per_group).map(|i| match x.get(1) {
                    Some(order) => order[group * per_group + i] as usize,
                    None => group % groups.groups * per_group + i,
                });
                let mut named: Vec<usize> = all.map(|i| i.min(n)).collect();
                named.sort_by(|&i, &j| match (i < n, j < n) {
                    (true, true) => compare(x[0][row + i], x[0][row + j]),
                    (i, j) => j.cmp(&i),
                });
                named.truncate(groups.kept);
                named.into_iter().map(|i| i as f64)
            };
            let count = call.shape(0)[..call.shape(0).len() - 1].iter().product::<usize>() * groups.groups;
            Ok(vec![(0..count).flat_map(of).collect()])
        }),
        Lower::Template(|call, x| {
            let groups = Groups::of(call)?;
            let template = Template::Sort { largest: groups.largest, given: x.len() == 2, runs: groups.runs };
            let reads = x.iter().cloned().enumerate().collect();
            Ok(TemplateCall { template, shape: groups.shape(call), reads })
        }),
    )
    .sample(|s| s.floats(&[&[3, 10]]).attr("runs", 4).attr("kept", 3))
    .sample(|s| {
        let order = [0.0, 2.0, 3.0, 1.0, 4.0, 5.0];
        s.given(DType::F32, &[6], &[1.0, 4.0, 2.0, 3.0, 5.0, 9.0])
            .given(DType::I32, &[1, 3, 2], &order)
            .attr("runs", 3)
            .attr("kept", 4)
            .attr("largest", 0)
    })
    .attrs(names![runs kept largest])
    .alone()
    .part(|call, axis, _| {
        let outer = call.shape(0).len() - 1;
        let given = call.inputs.len() == 2;
        if axis < outer { Part::of(vec![Some(axis); call.inputs.len()]) } else { Part::of([None, Some(axis)]).filter(|_| given && axis == outer) }
    }),
];

/// The axis, and the number of elements to take.
fn extent(call: &Call) -> OpResult<(usize, usize)> {
    expect_dtype(call, 0, "a float or integer type", DType::is_number)?;
    let shape = call.shape(0);
    let axis = call.axis("axis", -1, shape)?;
    call.int("largest", 1)?;
    call.int("sorted", 1)?;
    let (k, n) = (call.int("K", -1)?, shape[axis]);
    match usize::try_from(k) {
        Ok(k) if k <= n => Ok((axis, k)),
        _ => Err(format!("'K' is required and must be a constant of 0 to {n}, found {k}")),
    }
}

/// The extents of a sort.
struct Groups {
    largest: bool,
    n: usize,
    groups: usize,
    runs: usize,
    kept: usize,
}

impl Groups {
    fn of(call: &Call) -> OpResult<Groups> {
        expect_dtype(call, 0, "a float or integer type", DType::is_number)?;
        let (x, given) = (call.shape(0), call.inputs.get(1).copied().flatten());
        let n = *x.last().ok_or("expected an axis to sort along, found a scalar")?;
        let number = |name: &str, least: usize| {
            let found = call.int(name, 0)?;
            let known = usize::try_from(found).ok().filter(|&found| found >= least);
            known.ok_or_else(|| format!("attribute '{name}': expected {least} or more, found {found}"))
        };
        let (runs, kept, largest) = (number("runs", 1)?, number("kept", 0)?, call.int("largest", 1)? != 0);
        let most = i32::MAX as usize;
        ensure(runs <= most, || format!("attribute 'runs': expected at most {most}, found {runs}"))?;
        let (groups, room) = match given {
            None => (n.div_ceil(runs), runs),
            Some(order) => {
                let [outer @ .., groups, count, from] = &order.shape[..] else {
                    return Err(format!("input 'order': expected [.., groups, runs, from], found {}", order.shape));
                };
                let fits = *outer == x[..x.len() - 1] && *count == runs && order.dtype == DType::I32;
                ensure(fits, || {
                    format!(
                        "input 'order': expected i32 {:?} and groups of {runs} runs, found {order}",
                        &x[..x.len() - 1]
                    )
                })?;
                (*groups, runs * from)
            }
        };
        ensure(kept <= room, || format!("attribute 'kept': expected at most {room}, found {kept}"))?;
        Ok(Groups { largest, n, groups, runs, kept })
    }

    fn shape(&self, call: &Call) -> Shape {
        let outer = &call.shape(0)[..call.shape(0).len() - 1];
        Shape::new([outer, &[self.groups, self.kept]].concat())
    }

    /// Elements of a group.
    fn per_group(&self, call: &Call) -> usize {
        self.runs * call.inputs.get(1).copied().flatten().and_then(|order| order.shape.last().copied()).unwrap_or(1)
    }
}

fn eval(x: &Args<&[f64]>, call: &Call) -> OpResult<Vec<Vec<f64>>> {
    let (x, shape) = (x[0], call.shape(0));
    let ((axis, k), largest) = (extent(call)?, call.int("largest", 1)? != 0);
    let (n, inner) = (shape[axis], shape[axis + 1..].iter().product::<usize>());
    let taken = call.infer()?.swap_remove(0).shape;
    let (mut values, mut at) = (vec![0.0; taken.numel()], vec![0.0; taken.numel()]);
    for index in indices(&taken).filter(|index| index[axis] == 0) {
        let first = position(&index, shape);
        let mut order: Vec<usize> = (0..n).collect();
        let by_value = |&i: &usize, &j: &usize| {
            let order = ascending(x[first + i * inner], x[first + j * inner]);
            if largest { order.reverse() } else { order }
        };
        order.sort_by(by_value);
        let place = position(&index, &taken);
        for (rank, &i) in order[..k].iter().enumerate() {
            (values[place + rank * inner], at[place + rank * inner]) = (x[first + i * inner], i as f64);
        }
    }
    Ok(vec![values, at])
}

fn nodes<'g>(b: Nodes<'g>, call: &Call, x: &Args<Var<'g>>) -> OpResult<Vec<Var<'g>>> {
    let ((axis, k), largest) = (extent(call)?, call.int("largest", 1)? != 0);
    let (x, taken) = (x[0], call.infer()?.swap_remove(0).shape);
    if taken.numel() == 0 {
        return Ok([call.dtype(0), DType::I64].map(|dtype| b.constant(dtype, taken.clone(), Vec::new)).into());
    }
    let rank = taken.len();
    let last: Vec<usize> = (0..rank).filter(|&k| k != axis).chain([axis]).collect();
    let rows = x.transpose(&last);
    let order = order(rows, call.shape(0)[axis], k, largest);
    let back: Vec<usize> = (0..rank).map(|k| if k == axis { rank - 1 } else { k - usize::from(k > axis) }).collect();
    let order = order.transpose(&back);
    let values = x.op("GatherElements", &[order], Attrs::new().with("axis", axis as i64));
    Ok(vec![values, order.cast(DType::I64)])
}

/// The indices of the first `k` of `n` elements along the last axis, in order, as `i32`.
pub(super) fn order(x: Var, n: usize, k: usize, largest: bool) -> Var {
    let attrs = Attrs::new().with("runs", n as i64).with("kept", k as i64).with("largest", i64::from(largest));
    let order = x.op(SORT, &[], attrs);
    let rank = x.shape().map_or(0, |shape| shape.len());
    order.squeeze(&[rank as i64 - 1])
}

#[cfg(test)]
mod tests {
    use crate::dtype::DType::*;
    use crate::op::Attrs;
    use crate::ops::find;
    use crate::ops::tests::{outputs, refused};

    #[test]
    fn the_first_of_equal_ones_comes_first() {
        let x: &[_] = &[(F32, &[2, 4][..], &[3.0, 7.0, 7.0, 1.0, 0.0, -1.0, -1.0, -2.0][..])];
        let top = |attrs: Attrs| outputs("TopK", x, &attrs);
        let found = top(Attrs::new().with("K", 3));
        assert_eq!(found[0], ("f32[2,3]".into(), vec![7.0, 7.0, 3.0, 0.0, -1.0, -1.0]));
        assert_eq!(found[1], ("i64[2,3]".into(), vec![1.0, 2.0, 0.0, 0.0, 1.0, 2.0]));
        assert_eq!(top(Attrs::new().with("K", 2).with("largest", 0))[1].1, [3.0, 0.0, 3.0, 1.0]);
        let columns = top(Attrs::new().with("K", 1).with("axis", 0));
        assert_eq!(columns[1], ("i64[1,4]".into(), vec![0.0; 4]));
    }

    #[test]
    fn what_is_not_a_number_stands_above_all_numbers() {
        let x: &[_] = &[(F32, &[5][..], &[2.0, f64::NAN, f64::INFINITY, -f64::NAN, 1.0][..])];
        let places =
            |largest: i64| outputs("TopK", x, &Attrs::new().with("K", 5).with("largest", largest))[1].1.clone();
        assert_eq!(places(1), [1.0, 3.0, 2.0, 0.0, 4.0]);
        assert_eq!(places(0), [4.0, 0.0, 2.0, 1.0, 3.0]);
    }

    #[test]
    fn too_many_are_refused() {
        let attrs = |k: i64| Attrs::new().with("K", k);
        let found = refused("TopK", &[(F32, &[2, 3])], &attrs(4));
        assert_eq!(found, "'K' is required and must be a constant of 0 to 3, found 4");
    }

    #[test]
    fn before_opset_10_how_many_was_an_attribute() {
        let mut attrs = Attrs::new().with("k", 2);
        find("TopK").and_then(|op| op.upgrade).expect("an upgrade")(9, &mut Vec::new(), &mut attrs);
        assert_eq!(outputs("TopK", &[(F32, &[3], &[1.0, 3.0, 2.0])], &attrs)[0].1, [3.0, 2.0]);
    }
}
