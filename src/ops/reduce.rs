//! Reductions over axes.

use super::{expect_dtype, indices, output, position};
use crate::dtype::DType;
use crate::expr::{maximum, minimum};
use crate::kernel::Reduction;
use crate::op::{Attrs, Build, Call, Eval, Fact, Infer, Input, Lower, OpDef, OpResult, Tensors, ValueId, one, shaping};
use crate::shape::Shape;

const ONE: &[Input] = &[one("data")];
const DATA: &[Input] = &[one("data"), shaping("axes")];

#[rustfmt::skip] // A table: one row, one line, where it fits.
pub(super) static OPS: &[OpDef] = &[
    row("ReduceMax", "The largest value along axes", logical,
        |x, c| fold(x, c, |x, d| x.iter().copied().fold(lowest(d), maximum)), Lower::Reduce(Reduction::Max)),
    row("ReduceMin", "The smallest value along axes", logical,
        |x, c| fold(x, c, |x, d| x.iter().copied().fold(highest(d), minimum)), Lower::Reduce(Reduction::Min)),
    row("ReduceProd", "The product along axes", number,
        |x, c| fold(x, c, |x, _| x.iter().product()), Lower::Reduce(Reduction::Prod)),
    row("ReduceSum", "The sum along axes", number,
        |x, c| fold(x, c, |x, _| x.iter().sum()), Lower::Reduce(Reduction::Sum)),
    row("ReduceL1", "The sum of magnitudes along axes", number,
        |x, c| fold(x, c, |x, _| x.iter().map(|x| x.abs()).sum()),
        Lower::Decompose(|b, c, x| {
            let abs = b.op("Abs", &[data(x)], Attrs::new())?;
            reduce(b, c, "ReduceSum", abs)
        })),
    row("ReduceL2", "The root of the sum of squares along axes", float,
        |x, c| fold(x, c, |x, _| x.iter().map(|x| x * x).sum::<f64>().sqrt()),
        Lower::Decompose(|b, c, x| {
            let sum = sum_square(b, c, data(x))?;
            Ok(vec![b.op("Sqrt", &[sum], Attrs::new())?])
        })),
    row("ReduceLogSum", "The logarithm of the sum along axes", float,
        |x, c| fold(x, c, |x, _| x.iter().sum::<f64>().ln()),
        Lower::Decompose(|b, c, x| {
            let sum = reduce(b, c, "ReduceSum", data(x))?[0];
            Ok(vec![b.op("Log", &[sum], Attrs::new())?])
        })).sample(|s| s.input(DType::F32, &[3, 4, 5], 0.5, 3.0).ints("axes", &[1]).attr("keepdims", 0)),
    row("ReduceLogSumExp", "The logarithm of the sum of exponentials along axes", float,
        |x, c| fold(x, c, |x, _| {
            let max = x.iter().copied().fold(f64::MIN, f64::max).min(f64::MAX);
            max + x.iter().map(|x| (x - max).exp()).sum::<f64>().ln()
        }),
        Lower::Decompose(log_sum_exp)),
    row("ReduceMean", "The mean along axes", number,
        |x, c| fold(x, c, |x, _| x.iter().sum::<f64>() / x.len() as f64),
        Lower::Decompose(|b, c, x| {
            let sum = reduce(b, c, "ReduceSum", data(x))?[0];
            let count: usize = c.reduced_axes()?.into_iter().map(|axis| c.shape(0)[axis]).product();
            let count = b.scalar(count as f64, c.dtype(0));
            Ok(vec![b.op("Div", &[sum, count], Attrs::new())?])
        })),
    row("ReduceSumSquare", "The sum of squares along axes", number,
        |x, c| fold(x, c, |x, _| x.iter().map(|x| x * x).sum()),
        Lower::Decompose(|b, c, x| Ok(vec![sum_square(b, c, data(x))?]))),
    argument("ArgMax", "The index of the largest value along `axis`",
        |x, c| position_of(x, c, |a, b| a > b), Lower::Decompose(|b, c, x| locate(b, c, x, "ReduceMax"))),
    argument("ArgMin", "The index of the smallest value along `axis`",
        |x, c| position_of(x, c, |a, b| a < b), Lower::Decompose(|b, c, x| locate(b, c, x, "ReduceMin"))),
    OpDef::new("CumSum",
        "The sum of the elements up to each along `axis`, without itself (`exclusive`), or from the end (`reverse`)",
        &[one("x"), shaping("axis")], running_infer, Eval::Tensor(running), Lower::Decompose(running_sums))
        .sample(|s| s.input(DType::F32, &[3, 4, 5], -3.0, 3.0).attr("axis", 0))
        .attrs(&["exclusive", "reverse"]),
];

/// A reduction over any axes.
const fn row(name: &'static str, doc: &'static str, infer: Infer, eval: Tensors, lower: Lower) -> OpDef {
    let attrs = &["keepdims", "noop_with_empty_axes"];
    OpDef::new(name, doc, DATA, infer, Eval::Tensor(eval), lower)
        .attrs(attrs)
        .sample(|s| s.input(DType::F32, &[3, 4, 5], -2.0, 2.0).ints("axes", &[1]).attr("keepdims", 0))
}

/// A search along one axis.
const fn argument(name: &'static str, doc: &'static str, eval: Tensors, lower: Lower) -> OpDef {
    let attrs = &["axis", "keepdims", "select_last_index"];
    let infer: Infer = |c| {
        expect_dtype(c, 0, "a float or integer type", |d| d != DType::Bool)?;
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
    output(call.dtype(0), reduced(call, &call.reduced_axes()?)?)
}

fn number(call: &Call) -> OpResult<Vec<Fact>> {
    expect_dtype(call, 0, "a float or integer type", |d| d != DType::Bool)?;
    logical(call)
}

fn float(call: &Call) -> OpResult<Vec<Fact>> {
    expect_dtype(call, 0, "a float type", DType::is_float)?;
    logical(call)
}

/// The input's shape without `axes`, or with extents of 1 there.
fn reduced(call: &Call, axes: &[usize]) -> OpResult<Shape> {
    let keep = call.int("keepdims", 1)? != 0;
    let dims = call.shape(0).iter().enumerate();
    Ok(dims.filter(|(k, _)| keep || !axes.contains(k)).map(|(k, &d)| if axes.contains(&k) { 1 } else { d }).collect())
}

fn lowest(dtype: DType) -> f64 {
    match dtype {
        DType::I64 => i64::MIN as f64,
        DType::I32 => i32::MIN.into(),
        DType::I8 => i8::MIN.into(),
        DType::U8 | DType::Bool => 0.0,
        _ => f64::NEG_INFINITY,
    }
}

fn highest(dtype: DType) -> f64 {
    match dtype {
        DType::I64 => i64::MAX as f64,
        DType::I32 => i32::MAX.into(),
        DType::I8 => i8::MAX.into(),
        DType::U8 => u8::MAX.into(),
        DType::Bool => 1.0,
        _ => f64::INFINITY,
    }
}

/// The elements that each output element reduces, in row-major order.
fn groups(values: &[f64], shape: &Shape, axes: &[usize]) -> Vec<Vec<f64>> {
    let kept: Shape = shape.iter().enumerate().map(|(k, &d)| if axes.contains(&k) { 1 } else { d }).collect();
    let mut groups = vec![Vec::new(); kept.numel()];
    for (mut index, &value) in indices(shape).zip(values) {
        axes.iter().for_each(|&axis| index[axis] = 0);
        groups[position(&index, &kept)].push(value);
    }
    groups
}

fn fold(x: &[Option<&[f64]>], call: &Call, f: fn(&[f64], DType) -> f64) -> OpResult<Vec<Vec<f64>>> {
    let x = x[0].ok_or("input 'data' has no value")?;
    let groups = groups(x, call.shape(0), &call.reduced_axes()?);
    Ok(vec![groups.iter().map(|group| f(group, call.dtype(0))).collect()])
}

fn position_of(x: &[Option<&[f64]>], call: &Call, better: fn(f64, f64) -> bool) -> OpResult<Vec<Vec<f64>>> {
    let x = x[0].ok_or("input 'data' has no value")?;
    let last = call.int("select_last_index", 0)? != 0;
    let best = |group: Vec<f64>| {
        let mut at = 0;
        for (i, &v) in group.iter().enumerate() {
            if better(v, group[at]) || last && v == group[at] {
                at = i;
            }
        }
        at as f64
    };
    let groups = groups(x, call.shape(0), &[call.axis("axis", 0, call.shape(0))?]);
    Ok(vec![groups.into_iter().map(best).collect()])
}

fn data(inputs: &[Option<ValueId>]) -> ValueId {
    inputs[0].expect("a required input is present: arity is checked first")
}

/// A reduction of `x` over the axes of `call`.
fn reduce(b: &mut dyn Build, call: &Call, op: &str, x: ValueId) -> OpResult<Vec<ValueId>> {
    let attrs = over(&call.reduced_axes()?, call.int("keepdims", 1)?);
    Ok(vec![b.op(op, &[x], attrs)?])
}

/// Attributes of a reduction over exactly these axes.
fn over(axes: &[usize], keepdims: i64) -> Attrs {
    Attrs::new().with("axes", axes).with("keepdims", keepdims).with("noop_with_empty_axes", 1)
}

fn sum_square(b: &mut dyn Build, call: &Call, x: ValueId) -> OpResult<ValueId> {
    let square = b.op("Mul", &[x, x], Attrs::new())?;
    Ok(reduce(b, call, "ReduceSum", square)?[0])
}

/// `m + ln(sum(e^(x - m)))` with the largest value `m`, which is kept finite so that no infinities are subtracted.
fn log_sum_exp(b: &mut dyn Build, call: &Call, inputs: &[Option<ValueId>]) -> OpResult<Vec<ValueId>> {
    let (x, axes) = (data(inputs), call.reduced_axes()?);
    let finite = match call.dtype(0) {
        DType::F16 => half::f16::MAX.to_f64(),
        DType::BF16 => half::bf16::MAX.to_f64(),
        DType::F32 => f32::MAX.into(),
        _ => f64::MAX,
    };
    let max = b.op("ReduceMax", &[x], over(&axes, 1))?;
    let max = b.op("Clip", &[max], Attrs::new().with("min", -finite).with("max", finite))?;
    let shifted = b.op("Sub", &[x, max], Attrs::new())?;
    let exp = b.op("Exp", &[shifted], Attrs::new())?;
    let sum = b.op("ReduceSum", &[exp], over(&axes, 1))?;
    let log = b.op("Log", &[sum], Attrs::new())?;
    let out = b.op("Add", &[log, max], Attrs::new())?;
    match call.int("keepdims", 1)? {
        0 if !axes.is_empty() => Ok(vec![b.op("Squeeze", &[out], Attrs::new().with("axes", &axes[..]))?]),
        _ => Ok(vec![out]),
    }
}

/// The first index, or the last, at which the extreme value stands.
fn locate(b: &mut dyn Build, call: &Call, inputs: &[Option<ValueId>], extreme: &str) -> OpResult<Vec<ValueId>> {
    let (x, shape) = (data(inputs), call.shape(0));
    let axis = call.axis("axis", 0, shape)?;
    let last = call.int("select_last_index", 0)? != 0;
    let best = b.op(extreme, &[x], over(&[axis], 1))?;
    let hit = b.op("Equal", &[x, best], Attrs::new())?;
    let mut along = vec![1; shape.len() - axis];
    along[0] = shape[axis];
    let count = b.numbers(DType::I64, along, 0.0)?;
    // If the extreme is NaN, nothing equals it. The index must be within the axis all the same.
    let (miss, pick) = if last { (0.0, "ReduceMax") } else { (shape[axis] as f64 - 1.0, "ReduceMin") };
    let miss = b.scalar(miss, DType::I64);
    let index = b.op("Where", &[hit, count, miss], Attrs::new())?;
    Ok(vec![b.op(pick, &[index], over(&[axis], call.int("keepdims", 1)?))?])
}

/// Upper bound of the axis length: every sum reads the whole axis, masked by a constant with one row per element.
const LONGEST: usize = 1 << 14;

fn running_infer(call: &Call) -> OpResult<Vec<Fact>> {
    expect_dtype(call, 0, "a float or integer type", |d| d != DType::Bool)?;
    let axis = call.axis("axis", 0, call.shape(0))?;
    call.int("exclusive", 0)?;
    call.int("reverse", 0)?;
    match call.shape(0)[axis] {
        n if n > LONGEST => Err(format!("input 'x': expected at most {LONGEST} elements along axis {axis}, found {n}")),
        _ => Ok(vec![call.fact(0).clone()]),
    }
}

/// True if element `from` belongs to the sum at `to`.
fn summed(call: &Call) -> OpResult<impl Fn(usize, usize) -> bool> {
    let (exclusive, reverse) = (call.int("exclusive", 0)? != 0, call.int("reverse", 0)? != 0);
    Ok(move |from: usize, to: usize| if from == to { !exclusive } else { (from > to) == reverse })
}

fn running(x: &[Option<&[f64]>], call: &Call) -> OpResult<Vec<Vec<f64>>> {
    let (x, shape) = (x[0].ok_or("input 'x' has no value")?, call.shape(0));
    let (axis, summed) = (call.axis("axis", 0, shape)?, summed(call)?);
    let sum = |index: Vec<usize>| {
        let at = |from: usize| {
            let mut index = index.clone();
            index[axis] = from;
            x[position(&index, shape)]
        };
        (0..shape[axis]).filter(|&from| summed(from, index[axis])).map(at).sum()
    };
    Ok(vec![indices(shape).map(sum).collect()])
}

/// Repeats each element along a new axis, masks, and sums along the old one.
fn running_sums(b: &mut dyn Build, call: &Call, inputs: &[Option<ValueId>]) -> OpResult<Vec<ValueId>> {
    let shape = call.shape(0);
    let (axis, summed) = (call.axis("axis", 0, shape)?, summed(call)?);
    let n = shape[axis];
    let x = b.op("Unsqueeze", &[data(inputs)], Attrs::new().with("axes", &[axis][..]))?;
    let mask = |i: usize| f64::from(u8::from(summed(i % n, i / n)));
    // [to, from], then the axes behind.
    let mut along = vec![1; shape.len() - axis + 1];
    along[..2].fill(n);
    let mask = b.constant(DType::Bool, along, || (0..n * n).map(mask).collect())?;
    let zero = b.scalar(0.0, call.dtype(0));
    let part = b.op("Where", &[mask, x, zero], Attrs::new())?;
    Ok(vec![b.op("ReduceSum", &[part], over(&[axis + 1], 0))?])
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
        let found = refused("CumSum", &[(F32, &[2, 20_000])], &axis(1));
        assert_eq!(found, "input 'x': expected at most 16384 elements along axis 1, found 20000");
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
