//! Rows that quantize numbers to small integers and back: `x = (q - zero point) scale`.

use super::elementwise::narrowed::rounding;
use super::{ensure, expect_dtype, expect_shape, expect_type_of, indices, input_name, output, position};
use crate::dtype::DType;
use crate::narrow;
use crate::op::{Args, Attrs, Call, Eval, Fact, Input, Lower, Nodes, OpDef, OpResult, Var, inputs, names};
use crate::shape::Shape;

const QUANTIZE: &[Input] = inputs![x y_scale y_zero_point?];
const DEQUANTIZE: &[Input] = inputs![x x_scale x_zero_point?];

pub(super) static OPS: &[OpDef] = &[
    OpDef::new(
        "QuantizeLinear",
        "x / y_scale, rounded, plus the zero point, within the bounds of an integer of at most 16 bits or a float of at most 8; parameters \
         may differ along `axis`",
        QUANTIZE,
        quantize,
        Eval::Tensor(|x, call| {
            let to = quantize(call)?[0].dtype;
            let (low, high) = to.range();
            each(x, call, |x, scale, zero| match to.is_narrow_float() {
                true => narrow::round(to, x / scale + zero, rounding(call)),
                false => ((x / scale).round_ties_even() + zero).clamp(low, high),
            })
        }),
        Lower::Decompose(|b, call, x| {
            let to = quantize(call)?[0].dtype;
            let ((x, scale, zero), (low, high)) = (operands(b, call, x, DType::is_float)?, to.range());
            if to.is_narrow_float() {
                let number = zero.map_or(x / scale, |zero| x / scale + zero);
                let attrs = Attrs::new().with("to", to.onnx()).with("saturate", call.int("saturate", 1)?);
                return Ok(vec![number.op("Cast", &[], attrs)]);
            }
            let whole = (x / scale).round();
            let whole = zero.map_or(whole, |zero| whole + zero);
            Ok(vec![whole.clip(low, high).cast(to)])
        }),
    )
    .sample(|s| {
        s.input(DType::F32, &[2, 3, 4], -9.0, 9.0).given(DType::F32, &[3], &[0.05, 0.5, 2.0]).given(
            DType::I8,
            &[3],
            &[0.0, 1.0, -2.0],
        )
    })
    .attrs(names![axis block_size output_dtype precision saturate]),
    OpDef::new(
        "DequantizeLinear",
        "(x - the zero point) x_scale; parameters may differ along `axis`",
        DEQUANTIZE,
        dequantize,
        Eval::Tensor(|x, call| each(x, call, |x, scale, zero| (x - zero) * scale)),
        Lower::Decompose(|b, call, x| {
            // Sums of products are exact; floats of their size are not.
            let (x, scale, zero) = operands(b, call, x, |dtype| dtype == DType::I32)?;
            Ok(vec![zero.map_or(x, |zero| x - zero).cast(dequantized(call)?) * scale])
        }),
    )
    .sample(|s| s.input(DType::U8, &[2, 3, 4], 0.0, 99.0).given(DType::F32, &[], &[0.25]))
    .attrs(names![axis block_size output_dtype]),
    OpDef::new(
        "DynamicQuantizeLinear",
        "QuantizeLinear to u8 by the scale and the zero point that fit the data and zero; both are outputs, too",
        inputs![x],
        |call| {
            let dtype = expect_dtype(call, 0, "f32", |d| d == DType::F32)?;
            Ok(vec![Fact::new(DType::U8, call.shape(0).clone()), Fact::new(dtype, []), Fact::new(DType::U8, [])])
        },
        Eval::Tensor(|x, _| {
            let x = x[0];
            let low = x.iter().copied().fold(0.0, f64::min);
            let range = x.iter().copied().fold(0.0, f64::max) - low;
            let scale = if range > 0.0 { range / 255.0 } else { 1.0 };
            let zero = (-low / scale).round_ties_even().clamp(0.0, 255.0);
            let number = |x: &f64| ((x / scale).round_ties_even() + zero).clamp(0.0, 255.0);
            Ok(vec![x.iter().map(number).collect(), vec![scale], vec![zero]])
        }),
        Lower::Decompose(fit),
    )
    .sample(|s| s.input(DType::F32, &[3, 7], -2.0, 5.0)),
];

/// Like `eval` above. As in ONNX Runtime, data of zeros has the scale 1.
fn fit<'g>(b: Nodes<'g>, call: &Call, x: &Args<Var<'g>>) -> OpResult<Vec<Var<'g>>> {
    let x = x[0];
    let [zero, one, steps] = [0.0, 1.0, 255.0].map(|n| b.scalar(n, DType::F32));
    let (mut low, mut high) = (zero, zero);
    if call.shape(0).numel() > 0 {
        low = x.reduce_min(&[], false).min(zero);
        high = x.reduce_max(&[], false).max(zero);
    }
    let range = high - low;
    let wide = range.greater(zero);
    let scale = wide.select(range / steps, one);
    let point = (-(low / scale)).round().clip(0.0, 255.0).cast(DType::U8);
    Ok(vec![x.op("QuantizeLinear", &[scale, point], Attrs::new()), scale, point])
}

/// The shape in which a parameter broadcasts: a scalar if it has one element; a vector is followed by `behind` axes of
/// extent 1.
pub(super) fn spread(shape: &Shape, behind: usize) -> Shape {
    match shape[..] {
        _ if shape.numel() == 1 => Shape::default(),
        [n] => std::iter::once(n).chain(std::iter::repeat_n(1, behind)).collect(),
        _ => shape.clone(),
    }
}

/// Reshapes a parameter by [`spread`].
pub(super) fn spread_node(value: Var, behind: usize) -> OpResult<Var> {
    Ok(value.shaped(&spread(&value.shape()?, behind)))
}

/// How scales and zero points are shared among the elements.
#[derive(Clone, Copy, PartialEq)]
enum Differ {
    Nowhere,
    /// One parameter per element of an axis.
    Along(usize),
    /// One parameter per element, shared along an axis by blocks of this many elements.
    Blocks(usize, usize),
}

/// Finds how the parameters are shared, and refuses shapes that do not fit.
fn differ(call: &Call) -> OpResult<Differ> {
    let (x, scale) = (call.shape(0), call.shape(1));
    let block = call.int("block_size", 0)?;
    let differ = match (&scale[..], usize::try_from(block)) {
        (_, Err(_)) => return Err(format!("attribute 'block_size': expected 0 or more, found {block}")),
        ([] | [1], Ok(0)) => Some(Differ::Nowhere),
        (&[n], Ok(0)) => Some(call.axis("axis", 1, x)?).filter(|&axis| x[axis] == n).map(Differ::Along),
        (_, Ok(0)) => (scale.numel() == 1).then_some(Differ::Nowhere),
        (_, Ok(block)) => {
            let axis = call.axis("axis", 1, x)?;
            let mut blocks = x.clone();
            blocks[axis] = x[axis].div_ceil(block);
            (*scale == blocks).then_some(Differ::Blocks(axis, block))
        }
    };
    let Some(differ) = differ else {
        return Err(format!(
            "input '{}': expected one scale or one along the axis of {x}, found {scale}",
            input_name(call, 1)
        ));
    };
    // A single zero point may be a scalar or a vector of one element.
    let alike = |zero: &Shape| zero == scale || (zero.len() < 2 && zero.numel() == 1 && differ == Differ::Nowhere);
    expect_shape(call, 2, !call.has(2) || alike(call.shape(2)), format_args!("{scale} as the scale"))?;
    Ok(differ)
}

fn quantize(call: &Call) -> OpResult<Vec<Fact>> {
    let dtype = expect_dtype(call, 0, "a float type", DType::is_float)?;
    expect_dtype(call, 1, "a float type", DType::is_float)?;
    differ(call)?;
    let to = match (call.has(2), call.int("output_dtype", 0)?) {
        (true, _) => Some(call.dtype(2)),
        (false, 0) => Some(DType::U8),
        (false, code) => DType::from_onnx(code),
    };
    let to = to.filter(|&to| is_quantized(to));
    let to =
        to.ok_or("expected a zero point, or 'output_dtype', of an integer of at most 16 bits or a float of at most 8")?;
    expect_type_of(call, 1, dtype, "input 'x'")?;
    output(to, call.shape(0).clone())
}

/// True for the types that numbers are quantized to.
fn is_quantized(dtype: DType) -> bool {
    matches!(dtype, DType::U8 | DType::I8 | DType::U16 | DType::I16) || dtype.is_narrow() && dtype != DType::F8E8M0
}

/// The type of the numbers that a DequantizeLinear makes: the scale's, unless another one is given.
fn dequantized(call: &Call) -> OpResult<DType> {
    match call.int("output_dtype", 0)? {
        0 => Ok(call.dtype(1)),
        code => DType::from_onnx(code)
            .ok_or_else(|| format!("attribute 'output_dtype': expected a float type, found {code}")),
    }
}

fn dequantize(call: &Call) -> OpResult<Vec<Fact>> {
    let expected = "i32, an integer of at most 16 bits, or a float of at most 8";
    let dtype = expect_dtype(call, 0, expected, |d| is_quantized(d) || d == DType::I32)?;
    expect_dtype(call, 1, "a float type", |d| d.is_float() || d == DType::F8E8M0)?;
    differ(call)?;
    expect_type_of(call, 2, dtype, "input 'x'")?;
    let to = dequantized(call)?;
    ensure(to.is_float(), || {
        format!("attribute 'output_dtype': expected a float type of at least 16 bits, found {to}")
    })?;
    output(to, call.shape(0).clone())
}

/// Applies `f` to every element with its scale and its zero point.
fn each(x: &Args<&[f64]>, call: &Call, number: impl Fn(f64, f64, f64) -> f64) -> OpResult<Vec<Vec<f64>>> {
    let [values, scale] = [0, 1].map(|i| x[i]);
    let (differ, zero) = (differ(call)?, x.given(2));
    let one = |(mut index, &x): (Vec<usize>, &f64)| {
        let at = match differ {
            Differ::Nowhere => 0,
            Differ::Along(axis) => index[axis],
            Differ::Blocks(axis, block) => {
                index[axis] /= block;
                position(&index, call.shape(1))
            }
        };
        number(x, scale[at], zero.map_or(0.0, |zero| zero[at]))
    };
    Ok(vec![indices(call.shape(0)).zip(values).map(one).collect()])
}

/// The data, the scale and the zero point in the scale's type and in shapes that broadcast. Data stays in its type if
/// `keep` says so.
fn operands<'g>(
    b: Nodes<'g>,
    call: &Call,
    x: &Args<Var<'g>>,
    keep: fn(DType) -> bool,
) -> OpResult<(Var<'g>, Var<'g>, Option<Var<'g>>)> {
    let (differ, shape) = (differ(call)?, call.shape(0));
    let wide = if call.op.name == "DequantizeLinear" { dequantized(call)? } else { call.dtype(1) };
    let cast = |value: Var<'g>| OpResult::Ok(if keep(value.fact()?.dtype) { value } else { value.cast(wide) });
    let shared = |value: Var<'g>| match differ {
        Differ::Nowhere => spread_node(value, 0),
        Differ::Along(axis) => spread_node(value, shape.len() - axis - 1),
        Differ::Blocks(axis, block) => {
            let number = |k: usize| (k / block) as f64;
            let blocks = b.constant(DType::I64, [shape[axis]], || (0..shape[axis]).map(number).collect());
            Ok(value.gather(blocks, axis as i64))
        }
    };
    let data = cast(x[0])?;
    let scale = shared(if call.dtype(1) == wide { x[1] } else { x[1].cast(wide) })?;
    Ok((data, scale, x.given(2).map(|zero| shared(cast(zero)?)).transpose()?))
}

#[cfg(test)]
mod tests {
    use crate::dtype::DType::*;
    use crate::op::Attrs;
    use crate::ops::tests::{eval, refused};

    #[test]
    fn there_and_back() {
        let x = (F32, &[2, 3][..], &[0.0, 2.0, 3.0, 1000.0, -254.0, -1000.0][..]);
        let none = Attrs::new();
        let small = eval("QuantizeLinear", &[x, (F32, &[], &[2.0]), (U8, &[], &[128.0])], &none);
        assert_eq!(small, ("u8[2,3]".into(), vec![128.0, 129.0, 130.0, 255.0, 1.0, 0.0]));
        let rows = Attrs::new().with("axis", 0);
        let each = eval("QuantizeLinear", &[x, (F32, &[2], &[1.0, 10.0]), (I8, &[2], &[0.0, 1.0])], &rows);
        assert_eq!(each, ("i8[2,3]".into(), vec![0.0, 2.0, 3.0, 101.0, -24.0, -99.0]));
        let q = (I8, &[2, 3][..], &each.1[..]);
        let back = eval("DequantizeLinear", &[q, (F32, &[2], &[1.0, 10.0]), (I8, &[2], &[0.0, 1.0])], &rows);
        assert_eq!(back, ("f32[2,3]".into(), vec![0.0, 2.0, 3.0, 1000.0, -250.0, -1000.0]));
        assert_eq!(eval("QuantizeLinear", &[x, (F32, &[1], &[1.0])], &none).0, "u8[2,3]");
        let bias =
            eval("DequantizeLinear", &[(I32, &[2], &[3.0, -4.0]), (F32, &[1], &[0.5]), (I32, &[], &[1.0])], &none);
        assert_eq!(bias.1, [1.0, -2.5], "one parameter has an axis or not");
    }

    #[test]
    fn parameters_fit_the_axis_and_each_other() {
        let of = |scale: &[usize], zero: &[usize]| {
            refused("DequantizeLinear", &[(U8, &[2, 3]), (F32, scale), (U8, zero)], &Attrs::new())
        };
        assert_eq!(of(&[2], &[2]), "input 'x_scale': expected one scale or one along the axis of [2,3], found [2]");
        assert_eq!(of(&[3], &[1]), "input 'x_zero_point': expected [3] as the scale, found [1]");
        assert_eq!(of(&[3], &[2]), "input 'x_zero_point': expected [3] as the scale, found [2]");
        let wide = refused("QuantizeLinear", &[(F32, &[2]), (F32, &[]), (I32, &[])], &Attrs::new());
        assert_eq!(
            wide,
            "expected a zero point, or 'output_dtype', of an integer of at most 16 bits or a float of at most 8"
        );
    }
}
