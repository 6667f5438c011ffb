//! Sorting.
//!
//! The rank of an element is the number of elements before it in the order. So every element finds its place by
//! itself, no two invocations write one place, and the result is the same on every device. What is not a number stands above all
//! numbers:
//!
//! ```text
//! x [n, 1] --.
//!            comes before --sum over n--> rank [n] --equal 0..k--> hit [k, n] --the one that hits--> index [k] --GatherElements--> value
//! x [1, n] --'
//! ```

use super::{expect_dtype, indices, position};
use crate::dtype::DType;
use crate::op::{Args, Attrs, Call, Eval, Fact, Lower, Nodes, OpDef, OpResult, Var, inputs, names};
use std::cmp::Ordering;

/// Upper bound of the axis length: each element is compared with every other.
pub(super) const LONGEST: usize = 1 << 14;

pub(super) static OPS: &[OpDef] = &[OpDef::new(
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
})];

/// The axis, and the number of elements to take.
fn extent(call: &Call) -> OpResult<(usize, usize)> {
    expect_dtype(call, 0, "a float or integer type", DType::is_number)?;
    let shape = call.shape(0);
    let axis = call.axis("axis", -1, shape)?;
    call.int("largest", 1)?;
    call.int("sorted", 1)?;
    let (k, n) = (call.int("K", -1)?, shape[axis]);
    match usize::try_from(k) {
        _ if n > LONGEST => Err(format!("input 'X': expected at most {LONGEST} elements along axis {axis}, found {n}")),
        Ok(k) if k <= n => Ok((axis, k)),
        _ => Err(format!("'K' is required and must be a constant of 0 to {n}, found {k}")),
    }
}

/// The order of two elements: zeros of both signs are equal, and what is not a number stands above all numbers.
pub(super) fn ascending(a: f64, b: f64) -> Ordering {
    a.partial_cmp(&b).unwrap_or_else(|| a.is_nan().cmp(&b.is_nan()))
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
    let (x, shape) = (x[0], call.shape(0));
    let ((axis, k), largest) = (extent(call)?, call.int("largest", 1)? != 0);
    let n = shape[axis];
    // Numbers of type `dtype` along the axis, behind which there are as many as in the input.
    let count = |dtype: DType, along: [usize; 2]| {
        b.numbers(dtype, [&along[..], &vec![1; shape.len() - axis - 1]].concat(), 0.0)
    };
    let (at, behind) = ([axis as i64], [axis as i64 + 1]);
    // [.., each, others, ..]
    let (each, others) = (x.unsqueeze(&behind), x.unsqueeze(&at));
    let before = if largest { others.greater(each) } else { others.less(each) };
    let (before, equal) = if call.dtype(0).is_float() {
        let undefined = x.op("IsNaN", &[], Attrs::new());
        let (each_is, others_are) = (undefined.unsqueeze(&behind), undefined.unsqueeze(&at));
        let [above, below] = if largest { [others_are, each_is] } else { [each_is, others_are] };
        (before.or(above).and(below.op("Not", &[], Attrs::new())), others.equal(each).or(each_is.and(others_are)))
    } else {
        (before, others.equal(each))
    };
    let (rows, columns) = (count(DType::I32, [n, 1]), count(DType::I32, [1, n]));
    let before = before.or(equal.and(columns.less(rows))).cast(DType::I32);
    // [.., places, each, ..]
    let rank = before.reduce_sum(&behind, false).unsqueeze(&at);
    let hit = rank.equal(count(DType::I32, [k, 1]));
    let index = hit.select(count(DType::I64, [1, n]), 0.0).reduce_max(&behind, false);
    Ok(vec![x.op("GatherElements", &[index], Attrs::new().with("axis", axis as i64)), index])
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
        let found = refused("TopK", &[(F32, &[20_000])], &attrs(1));
        assert_eq!(found, "input 'X': expected at most 16384 elements along axis 0, found 20000");
    }

    #[test]
    fn before_opset_10_how_many_was_an_attribute() {
        let mut attrs = Attrs::new().with("k", 2);
        find("TopK").and_then(|op| op.upgrade).expect("an upgrade")(9, &mut Vec::new(), &mut attrs);
        assert_eq!(outputs("TopK", &[(F32, &[3], &[1.0, 3.0, 2.0])], &attrs)[0].1, [3.0, 2.0]);
    }
}
