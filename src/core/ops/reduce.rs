//! Reductions over axes.

use super::elementwise::most;
use super::{along, expect_dtype, indices, is_factor, output, position};
use crate::dtype::DType;
use crate::expr::{maximum, minimum};
use crate::kernel::{Reduction, Template};
use crate::op::{
    Args, Attrs, Call, Eval, Fact, Infer, Input, Lower, Nodes, OpDef, OpResult, Part, TemplateCall, Tensors, Var,
    inputs, names,
};
use crate::shape::Shape;

const ONE: &[Input] = inputs![data];
const DATA: &[Input] = inputs![data axes=];

#[rustfmt::skip] // A table: one row, one line, where it fits.
pub(super) static OPS: &[OpDef] = &[
    row("ReduceMax", "The largest value along axes", logical,
        |x, c| reduced_by(x, c, |x, d| x.iter().copied().fold(d.range().0, maximum)), Lower::Reduce(Reduction::Max)),
    row("ReduceMin", "The smallest value along axes", logical,
        |x, c| reduced_by(x, c, |x, d| x.iter().copied().fold(d.range().1, minimum)), Lower::Reduce(Reduction::Min)),
    row("ReduceProd", "The product along axes", number,
        |x, c| reduced_by(x, c, |x, _| x.iter().product()), Lower::Reduce(Reduction::Prod)),
    row("ReduceSum", "The sum along axes", number,
        |x, c| reduced_by(x, c, |x, _| x.iter().sum()), Lower::Reduce(Reduction::Sum)),
    added("ReduceL1", "The sum of magnitudes along axes", number,
        |x, c| reduced_by(x, c, |x, _| x.iter().map(|x| x.abs()).sum()),
        Lower::Decompose(|_, c, x| Ok(vec![reduce(c, "ReduceSum", x[0].abs())?]))),
    added("ReduceL2", "The root of the sum of squares along axes; of integers, rounded down", factor,
        |x, c| reduced_by(x, c, |x, d| whole(x.iter().map(|x| x * x).sum::<f64>().sqrt(), d)),
        Lower::Decompose(|_, c, x| {
            let sum = sum_square(c, x[0])?;
            Ok(vec![if c.dtype(0).is_int() { root(sum)? } else { sum.sqrt() }])
        }))
        .grad(|_, c, back| {
            // Of a norm of zeros it is 0, though the root has none.
            let kept = kept(c)?;
            let (y, dy) = (back.y[0].shaped(&kept), back.first()?.shaped(&kept));
            Ok(vec![Some(back.x[0] * (dy / y.equal(0.0).select(1.0, y)))])
        }),
    added("ReduceLogSum", "The logarithm of the sum along axes; of integers, rounded toward zero", factor,
        |x, c| reduced_by(x, c, |x, d| whole(x.iter().sum::<f64>().ln(), d)),
        Lower::Decompose(|_, c, x| Ok(vec![in_floats(reduce(c, "ReduceSum", x[0])?)?.log().cast(c.dtype(0))])))
        .sample(|s| s.input(DType::F32, &[3, 4, 5], 0.5, 3.0).ints("axes", &[1]).attr("keepdims", 0)),
    added("ReduceLogSumExp", "The logarithm of the sum of exponentials along axes; of integers, rounded toward zero", factor,
        |x, c| reduced_by(x, c, |x, d| {
            let max = x.iter().copied().fold(f64::MIN, f64::max).min(f64::MAX);
            whole(max + x.iter().map(|x| (x - max).exp()).sum::<f64>().ln(), d)
        }),
        Lower::Decompose(|_, c, x| {
            let made = log_sum_exp(c, in_floats(x[0])?)?;
            Ok(made.into_iter().map(|y| y.cast(c.dtype(0))).collect())
        })),
    added("ReduceMean", "The mean along axes", number,
        |x, c| reduced_by(x, c, |x, _| x.iter().sum::<f64>() / x.len() as f64),
        Lower::Decompose(|_, c, x| {
            let count: usize = c.reduced_axes()?.into_iter().map(|axis| c.shape(0)[axis]).product();
            Ok(vec![reduce(c, "ReduceSum", x[0])? / count as f64])
        })),
    added("ReduceSumSquare", "The sum of squares along axes", number,
        |x, c| reduced_by(x, c, |x, _| x.iter().map(|x| x * x).sum()),
        Lower::Decompose(|_, c, x| Ok(vec![sum_square(c, x[0])?]))),
    argument("ArgMax", "The index of the largest value along `axis`",
        |x, c| position_of(x, c, |a, b| a > b), Lower::Decompose(|b, c, x| locate(b, c, x[0], "ReduceMax"))),
    argument("ArgMin", "The index of the smallest value along `axis`",
        |x, c| position_of(x, c, |a, b| a < b), Lower::Decompose(|b, c, x| locate(b, c, x[0], "ReduceMin"))),
    OpDef::new("CumSum",
        "The sum of the elements up to each along `axis`, without itself (`exclusive`), or from the end (`reverse`)",
        inputs![x axis=], running_infer, Eval::Tensor(|x, c| running(x, c, |parts| parts.sum())), Lower::Decompose(|_, c, x| {
            let axis = c.axis("axis", 0, c.shape(0))?;
            Ok(vec![running_sums(x[0], axis, c.int("exclusive", 0)? != 0, c.int("reverse", 0)? != 0)])
        }))
        .sample(|s| s.input(DType::F32, &[3, 4, 5], -3.0, 3.0).attr("axis", 0))
        .attrs(names![exclusive reverse]),
    OpDef::new(SCAN,
        "CumSum by one kernel, row by row",
        inputs![x], running_infer, Eval::Tensor(|x, c| running(x, c, |parts| parts.sum())),
        Lower::Template(|c, x| {
            let axis = c.axis("axis", 0, c.shape(0))?;
            let template = Template::Scan { axis, exclusive: c.int("exclusive", 0)? != 0, reverse: c.int("reverse", 0)? != 0 };
            Ok(TemplateCall { template, shape: c.shape(0).clone(), reads: vec![(0, x[0].clone())] })
        }))
        .sample(|s| s.input(DType::F32, &[3, 4, 5], -3.0, 3.0).attr("axis", 1).attr("exclusive", 1))
        .attrs(names![axis exclusive reverse])
        .alone()
        .grad(|_, c, back| {
            let attrs = c.attrs.clone().with("reverse", i64::from(c.int("reverse", 0)? == 0));
            Ok(vec![Some(back.first()?.op(SCAN, &[], attrs))])
        })
        .part(|c, axis, _| Part::of([Some(axis)]).filter(|_| c.axis("axis", 0, c.shape(0)).is_ok_and(|along| along != axis))),
    OpDef::new("CumProd",
        "The product of the elements up to each along `axis`, without itself (`exclusive`), or from the end (`reverse`)",
        inputs![x axis=], running_infer, Eval::Tensor(|x, c| running(x, c, |parts| parts.product())),
        Lower::Decompose(|b, c, x| running_products(b, c, x[0])))
        .sample(|s| s.input(DType::F32, &[3, 4, 5], -2.0, 2.0).attr("axis", 1).attr("reverse", 1))
        .attrs(names![exclusive reverse]),
];

/// A reduction over any axes.
const fn row(name: &'static str, doc: &'static str, infer: Infer, eval: Tensors, lower: Lower) -> OpDef {
    let attrs = &["keepdims", "noop_with_empty_axes"];
    OpDef::new(name, doc, DATA, infer, Eval::Tensor(eval), lower)
        .attrs(attrs)
        .sample(|s| s.input(DType::F32, &[3, 4, 5], -2.0, 2.0).ints("axes", &[1]).attr("keepdims", 0))
}

/// A reduction that adds up what it makes of the elements.
const fn added(name: &'static str, doc: &'static str, infer: Infer, eval: Tensors, lower: Lower) -> OpDef {
    row(name, doc, infer, eval, lower).wide()
}

/// A search along one axis.
const fn argument(name: &'static str, doc: &'static str, eval: Tensors, lower: Lower) -> OpDef {
    let attrs = &["axis", "keepdims", "select_last_index"];
    let infer: Infer = |c| {
        expect_dtype(c, 0, "a float or integer type", DType::is_number)?;
        let axis = c.axis("axis", 0, c.shape(0))?;
        c.int("select_last_index", 0)?;
        match c.shape(0)[axis] {
            0 => Err(format!("input 'data': expected elements along axis {axis}, found {}", c.shape(0))),
            _ => output(DType::I64, reduced(c, &[axis])?),
        }
    };
    OpDef::new(name, doc, ONE, infer, Eval::Tensor(eval), lower)
        .attrs(attrs)
        .sample(|s| s.input(DType::F32, &[3, 4, 5], -3.0, 3.0).attr("axis", -1).attr("keepdims", 0))
}

fn logical(call: &Call) -> OpResult<Vec<Fact>> {
    expect_dtype(call, 0, "bool, a float or integer type", |d| d.is_number() || d == DType::Bool)?;
    output(call.dtype(0), reduced(call, &call.reduced_axes()?)?)
}

fn number(call: &Call) -> OpResult<Vec<Fact>> {
    expect_dtype(call, 0, "a float or integer type", DType::is_number)?;
    logical(call)
}

fn factor(call: &Call) -> OpResult<Vec<Fact>> {
    expect_dtype(call, 0, "a float type, or integers of 32 or 64 bits", is_factor)?;
    logical(call)
}

/// A number as an element of this type.
fn whole(value: f64, dtype: DType) -> f64 {
    if dtype.is_int() { value.trunc() } else { value }
}

/// Integers as floats. Floats stay as they are.
fn in_floats(x: Var) -> OpResult<Var> {
    Ok(if x.fact()?.dtype.is_int() { x.cast(DType::F32) } else { x })
}

/// The largest whole number whose square is not above an integer.
fn root(x: Var) -> OpResult<Var> {
    let dtype = x.fact()?.dtype;
    let guess = x.cast(DType::F32).sqrt().cast(dtype).max(1.0);
    // A single has 24 bits of 32: a step of Newton's method leaves the number, or the one above.
    let near = (guess + x / guess) / 2.0;
    // Quotients overflow less than squares.
    Ok(near - near.greater(x / near.max(1.0)).cast(dtype))
}

/// The input's shape without `axes`, or with extents of 1 there.
fn reduced(call: &Call, axes: &[usize]) -> OpResult<Shape> {
    let keep = call.int("keepdims", 1)? != 0;
    let dims = call.shape(0).iter().enumerate();
    Ok(dims.filter(|(k, _)| keep || !axes.contains(k)).map(|(k, &d)| if axes.contains(&k) { 1 } else { d }).collect())
}

/// The elements that each output element reduces, in row-major order.
fn groups(values: &[f64], shape: &Shape, axes: &[usize]) -> Vec<Vec<f64>> {
    let values = |group: &Vec<usize>| group.iter().map(|&at| values[at]).collect();
    super::groups(shape, axes).iter().map(values).collect()
}

fn reduced_by(x: &Args<&[f64]>, call: &Call, f: fn(&[f64], DType) -> f64) -> OpResult<Vec<Vec<f64>>> {
    let x = x[0];
    let groups = groups(x, call.shape(0), &call.reduced_axes()?);
    Ok(vec![groups.iter().map(|group| f(group, call.dtype(0))).collect()])
}

fn position_of(x: &Args<&[f64]>, call: &Call, better: fn(f64, f64) -> bool) -> OpResult<Vec<Vec<f64>>> {
    let x = x[0];
    let last = call.int("select_last_index", 0)? != 0;
    let best = |group: Vec<f64>| {
        let mut at = 0;
        for (i, &v) in group.iter().enumerate() {
            // What is not a number is better than any number.
            let (own, best) = (v.is_nan(), group[at].is_nan());
            if better(v, group[at]) || own && !best || last && (v == group[at] || own && best) {
                at = i;
            }
        }
        at as f64
    };
    let groups = groups(x, call.shape(0), &[call.axis("axis", 0, call.shape(0))?]);
    Ok(vec![groups.into_iter().map(best).collect()])
}

/// A reduction of `x` over the axes of `call`.
fn reduce<'g>(call: &Call, op: &str, x: Var<'g>) -> OpResult<Var<'g>> {
    Ok(x.op(op, &[], over(&call.reduced_axes()?, call.int("keepdims", 1)?)))
}

/// The result's shape with the reduced axes, which have extent 1.
fn kept(call: &Call) -> OpResult<Shape> {
    let axes = call.reduced_axes()?;
    Ok(call.shape(0).iter().enumerate().map(|(axis, &extent)| if axes.contains(&axis) { 1 } else { extent }).collect())
}

/// Attributes of a reduction over exactly these axes.
fn over(axes: &[usize], keepdims: i64) -> Attrs {
    Attrs::new().with("axes", axes).with("keepdims", keepdims).with("noop_with_empty_axes", 1)
}

fn sum_square<'g>(call: &Call, x: Var<'g>) -> OpResult<Var<'g>> {
    reduce(call, "ReduceSum", x * x)
}

/// `m + ln(sum(e^(x - m)))` with the largest value `m`, which is kept finite so that no infinities are subtracted.
fn log_sum_exp<'g>(call: &Call, x: Var<'g>) -> OpResult<Vec<Var<'g>>> {
    let (axes, finite) = (call.reduced_axes()?, most(x.fact()?.dtype));
    let max = x.op("ReduceMax", &[], over(&axes, 1)).clip(-finite, finite);
    let out = (x - max).exp().op("ReduceSum", &[], over(&axes, 1)).log() + max;
    unkept(call, &axes, out)
}

/// A result of a call that reduces, whose reduced axes were kept: without them, if the call keeps none.
fn unkept<'g>(call: &Call, axes: &[usize], out: Var<'g>) -> OpResult<Vec<Var<'g>>> {
    match call.int("keepdims", 1)? {
        0 if !axes.is_empty() => Ok(vec![out.op("Squeeze", &[], Attrs::new().with("axes", axes))]),
        _ => Ok(vec![out]),
    }
}

/// The first index, or the last, at which the extreme value stands.
fn locate<'g>(b: Nodes<'g>, call: &Call, x: Var<'g>, extreme: &str) -> OpResult<Vec<Var<'g>>> {
    let shape = call.shape(0);
    let axis = call.axis("axis", 0, shape)?;
    let last = call.int("select_last_index", 0)? != 0;
    let mut hit = x.equal(x.op(extreme, &[], over(&[axis], 1)));
    if call.dtype(0).is_float() {
        // What is not a number is the extreme wherever it stands, and equals nothing.
        hit = hit.or(x.op("IsNaN", &[], Attrs::new()));
    }
    let count = b.numbers(DType::I64, along(shape[axis], shape.len() - axis), 0.0);
    // Where a device does not tell NaN apart, nothing may be hit. The index must be within the axis all the same.
    let (miss, pick) = if last { (0.0, "ReduceMax") } else { (shape[axis] as f64 - 1.0, "ReduceMin") };
    // Both reductions keep the axis: so one kernel has both, and the indices of all elements are not stored.
    unkept(call, &[axis], hit.select(count, miss).op(pick, &[], over(&[axis], 1)))
}

fn running_infer(call: &Call) -> OpResult<Vec<Fact>> {
    expect_dtype(call, 0, "a float or integer type", DType::is_number)?;
    call.axis("axis", 0, call.shape(0))?;
    call.int("exclusive", 0)?;
    call.int("reverse", 0)?;
    Ok(vec![call.fact(0).clone()])
}

/// True if element `from` belongs to the sum at `to`.
fn summed(call: &Call) -> OpResult<impl Fn(usize, usize) -> bool> {
    let (exclusive, reverse) = (call.int("exclusive", 0)? != 0, call.int("reverse", 0)? != 0);
    Ok(move |from: usize, to: usize| if from == to { !exclusive } else { (from > to) == reverse })
}

fn running(x: &Args<&[f64]>, call: &Call, join: fn(&mut dyn Iterator<Item = f64>) -> f64) -> OpResult<Vec<Vec<f64>>> {
    let (x, shape) = (x[0], call.shape(0));
    let (axis, summed) = (call.axis("axis", 0, shape)?, summed(call)?);
    let joined = |index: Vec<usize>| {
        let at = |from: usize| {
            let mut index = index.clone();
            index[axis] = from;
            x[position(&index, shape)]
        };
        join(&mut (0..shape[axis]).filter(|&from| summed(from, index[axis])).map(at))
    };
    Ok(vec![indices(shape).map(joined).collect()])
}

/// The row whose kernel adds up along an axis.
pub const SCAN: &str = "plimsoll.Scan";

/// The sums up to each element along an axis. Long axes are added up in blocks: see the pass `indexed`.
pub(super) fn running_sums(x: Var, axis: usize, exclusive: bool, reverse: bool) -> Var {
    let flags = Attrs::new().with("exclusive", i64::from(exclusive)).with("reverse", i64::from(reverse));
    x.op(SCAN, &[], flags.with("axis", axis as i64))
}

/// Multiplies each element by the one before it, then by the product of the two before these, then of four, and so on.
fn running_products<'g>(b: Nodes<'g>, call: &Call, x: Var<'g>) -> OpResult<Vec<Var<'g>>> {
    let (fact, axis) = (call.fact(0), call.axis("axis", 0, call.shape(0))?);
    let (n, reverse) = (fact.shape[axis], call.int("reverse", 0)? != 0);
    // The values `by` places before each; there are ones where there is none.
    let moved = |x: Var<'g>, by: usize| {
        let mut shape = fact.shape.clone();
        shape[axis] = by;
        let ones = b.scalar(1.0, fact.dtype).expand(&shape);
        match (by == n, reverse) {
            (true, _) => ones,
            (_, true) => b.concat(&[x.part(axis, by..n), ones], axis as i64),
            (_, false) => b.concat(&[ones, x.part(axis, 0..n - by)], axis as i64),
        }
    };
    let mut product = if call.int("exclusive", 0)? != 0 && n > 0 { moved(x, 1) } else { x };
    for by in (0..).map(|k| 1 << k).take_while(|&by| by < n) {
        product = product * moved(product, by);
    }
    Ok(vec![product])
}

#[cfg(test)]
mod tests {
    use crate::dtype::DType::*;
    use crate::op::Attrs;
    use crate::ops::tests::{eval, refused};

    /// The specification's example.
    const DATA: [f64; 12] = [5.0, 1.0, 20.0, 2.0, 30.0, 1.0, 40.0, 2.0, 55.0, 1.0, 60.0, 2.0];

    fn reduce(op: &str, attrs: Attrs) -> (String, Vec<f64>) {
        eval(op, &[(F32, &[3, 2, 2], &DATA)], &attrs)
    }

    #[test]
    fn running_sums_follow_the_specification() {
        let sums =
            |attrs: Attrs, shape: &[usize]| eval("CumSum", &[(I64, shape, &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0])], &attrs).1;
        let axis = |axis: i64| Attrs::new().with("axis", axis);
        assert_eq!(sums(axis(0), &[6]), [1.0, 3.0, 6.0, 10.0, 15.0, 21.0]);
        assert_eq!(sums(axis(0).with("exclusive", 1), &[6]), [0.0, 1.0, 3.0, 6.0, 10.0, 15.0]);
        assert_eq!(sums(axis(0).with("reverse", 1), &[6]), [21.0, 20.0, 18.0, 15.0, 11.0, 6.0]);
        assert_eq!(sums(axis(-1), &[2, 3]), [1.0, 3.0, 6.0, 4.0, 9.0, 15.0]);
        assert_eq!(sums(axis(0).with("exclusive", 1).with("reverse", 1), &[2, 3]), [4.0, 5.0, 6.0, 0.0, 0.0, 0.0]);
    }

    #[test]
    fn running_products_follow_the_specification() {
        let products = |attrs: Attrs| eval("CumProd", &[(I32, &[3], &[1.0, 2.0, 3.0])], &attrs.with("axis", 0)).1;
        assert_eq!(products(Attrs::new()), [1.0, 2.0, 6.0]);
        assert_eq!(products(Attrs::new().with("exclusive", 1)), [1.0, 1.0, 2.0]);
        assert_eq!(products(Attrs::new().with("reverse", 1)), [6.0, 6.0, 3.0]);
        assert_eq!(products(Attrs::new().with("exclusive", 1).with("reverse", 1)), [6.0, 3.0, 1.0]);
    }

    #[test]
    fn reductions_follow_the_specification() {
        let keep = Attrs::new().with("keepdims", 1);
        let axis = Attrs::new().with("axes", vec![1]).with("keepdims", 0);
        assert_eq!(reduce("ReduceMax", axis.clone()), ("f32[3,2]".into(), vec![20.0, 2.0, 40.0, 2.0, 60.0, 2.0]));
        assert_eq!(reduce("ReduceMean", axis.clone()), ("f32[3,2]".into(), vec![12.5, 1.5, 35.0, 1.5, 57.5, 1.5]));
        assert_eq!(reduce("ReduceMin", keep.clone().with("axes", vec![-2])).0, "f32[3,1,2]");
        assert_eq!(reduce("ReduceSum", Attrs::new()), ("f32[1,1,1]".into(), vec![219.0]));
        let noop = Attrs::new().with("axes", Vec::<i64>::new()).with("noop_with_empty_axes", 1);
        assert_eq!(reduce("ReduceSum", noop.clone()), ("f32[3,2,2]".into(), DATA.to_vec()));
        assert_eq!(reduce("ReduceSumSquare", noop).1[2], 400.0);
        assert_eq!(reduce("ArgMax", Attrs::new().with("axis", 1)).1, [1.0, 1.0, 1.0, 1.0, 1.0, 1.0]);
        assert_eq!(reduce("ArgMin", Attrs::new().with("keepdims", 0)), ("i64[2,2]".into(), vec![0.0; 4]));
        assert_eq!(
            refused("ReduceSum", &[(F32, &[3, 2])], &Attrs::new().with("axes", vec![2])),
            "attribute 'axes': axis 2 is outside [3,2]"
        );
        assert_eq!(
            refused("ReduceSum", &[(Bool, &[3])], &keep),
            "input 'data': expected a float or integer type, found bool"
        );
        assert!(refused("ArgMax", &[(F32, &[0, 3])], &keep).starts_with("input 'data': expected elements"));
    }

    #[test]
    fn of_integers_results_are_whole() {
        let of = |op: &str| eval(op, &[(I32, &[2, 2], &[3.0, 4.0, 2.0, 2.0])], &Attrs::new().with("axes", vec![1]));
        assert_eq!(of("ReduceL2"), ("i32[2,1]".into(), vec![5.0, 2.0]));
        assert_eq!((of("ReduceLogSum").1, of("ReduceLogSumExp").1), (vec![1.0, 1.0], vec![4.0, 2.0]));
    }

    #[test]
    fn ties_go_to_the_first_or_the_last() {
        let x: &[_] = &[(I64, &[1, 4][..], &[3.0, 7.0, 7.0, 3.0][..])];
        let last = |n: i64| Attrs::new().with("axis", -1).with("select_last_index", n);
        assert_eq!((eval("ArgMax", x, &last(0)).1, eval("ArgMax", x, &last(1)).1), (vec![1.0], vec![2.0]));
        assert_eq!((eval("ArgMin", x, &last(0)).1, eval("ArgMin", x, &last(1)).1), (vec![0.0], vec![3.0]));
    }

    #[test]
    fn nothing_reduces_to_the_neutral_element() {
        for (op, expected) in [
            ("ReduceSum", 0.0),
            ("ReduceProd", 1.0),
            ("ReduceMax", f64::NEG_INFINITY),
            ("ReduceMin", f64::INFINITY),
            ("ReduceL2", 0.0),
            ("ReduceLogSum", f64::NEG_INFINITY),
            ("ReduceLogSumExp", f64::NEG_INFINITY),
        ] {
            let found = eval(op, &[(F32, &[2, 0], &[])], &Attrs::new().with("axes", vec![1]));
            assert_eq!(found, ("f32[2,1]".into(), vec![expected; 2]), "{op}");
        }
        assert_eq!(eval("ReduceMax", &[(I32, &[0], &[])], &Attrs::new()).1, [f64::from(i32::MIN)]);
    }
}
