//! Rows of ONNX Runtime's domain that its optimizer and its quantizer insert.

use super::quantize::{bounds, spread_node};
use super::{expect_dtype, find, indices, same_float};
use crate::dtype::DType;
use crate::op::{Args, Attrs, Call, Eval, Fact, Input, Lower, Nodes, OpDef, OpResult, Sample, Var, one, optional};
use crate::shape::{Access, Shape};

const UNARY: &[Input] = &[one("X"), one("X_scale"), optional("X_zero_point"), one("Y_scale"), optional("Y_zero_point")];
const BINARY: &[Input] = &[
    one("A"),
    one("A_scale"),
    optional("A_zero_point"),
    one("B"),
    one("B_scale"),
    optional("B_zero_point"),
    one("C_scale"),
    optional("C_zero_point"),
];
const POOL: &[&str] =
    &["auto_pad", "ceil_mode", "channels_last", "count_include_pad", "kernel_shape", "pads", "strides"];
const SKIP: &[Input] = &[one("input"), one("skip"), one("gamma"), optional("beta"), optional("bias")];
const SKIP_SIMPLIFIED: &[Input] = &[one("input"), one("skip"), one("gamma"), optional("bias")];

pub(super) static OPS: &[OpDef] = &[
    quantized("QLinearAdd", "QuantizeLinear of the sum of two DequantizeLinears", BINARY).sample(of_two),
    quantized("QLinearMul", "QuantizeLinear of the product of two DequantizeLinears", BINARY).sample(of_two),
    quantized("QLinearSigmoid", "QuantizeLinear of Sigmoid of DequantizeLinear", UNARY)
        .sample(|s| of_one(s, &[3, 7], 0.0078125)),
    quantized("QLinearLeakyRelu", "QuantizeLinear of LeakyRelu of DequantizeLinear", UNARY)
        .sample(|s| of_one(s, &[3, 7], 0.0625).attr("alpha", 0.25))
        .attrs(&["alpha"]),
    quantized("QLinearAveragePool", "QuantizeLinear of AveragePool of DequantizeLinear", UNARY)
        .sample(|s| of_one(s, &[1, 2, 6, 5], 0.0625).ints("kernel_shape", &[2, 2]).ints("strides", &[2, 1]))
        .attrs(POOL),
    quantized("QLinearGlobalAveragePool", "QuantizeLinear of GlobalAveragePool of DequantizeLinear", UNARY)
        .sample(|s| of_one(s, &[2, 3, 4, 4], 0.0625))
        .attrs(&["channels_last"]),
    skip("SkipLayerNormalization", "LayerNormalization of a sum, its statistics, and the sum", SKIP)
        .sample(|s| s.floats(&[&[2, 3, 8], &[2, 3, 8], &[8]])),
    skip("SkipSimplifiedLayerNormalization", "RMSNormalization of a sum, and the sum", SKIP_SIMPLIFIED)
        .sample(|s| s.floats(&[&[2, 3, 8], &[2, 3, 8], &[8]])),
];

/// A row `QLinear..`: the row called `..` on quantized inputs and outputs.
const fn quantized(name: &'static str, doc: &'static str, inputs: &'static [Input]) -> OpDef {
    OpDef::new(
        name,
        doc,
        inputs,
        |call| Quantized::of(call).map(|q| vec![q.result]),
        Eval::Tensor(quantized_eval),
        Lower::Decompose(quantized_nodes),
    )
}

/// Inputs of a sample with one operand, up to the result's zero point.
fn of_one(s: Sample, shape: &[usize], scale: f64) -> Sample {
    let s = s.input(DType::U8, shape, 0.0, 120.0).given(DType::F32, &[], &[0.0625]).given(DType::U8, &[], &[60.0]);
    s.given(DType::F32, &[1], &[scale]).given(DType::U8, &[1], &[3.0])
}

/// Inputs of a sample with two operands.
fn of_two(s: Sample) -> Sample {
    let s = s.input(DType::U8, &[2, 3, 5], 0.0, 120.0).given(DType::F32, &[], &[0.0625]).given(DType::U8, &[], &[60.0]);
    let s = s.input(DType::U8, &[3, 1], 0.0, 120.0).given(DType::F32, &[], &[0.125]).given(DType::U8, &[], &[7.0]);
    s.given(DType::F32, &[1], &[0.25]).given(DType::U8, &[1], &[3.0])
}

/// The row between DequantizeLinear and QuantizeLinear.
struct Quantized {
    row: &'static OpDef,
    attrs: Attrs,
    /// Facts of the dequantized inputs.
    facts: Vec<Fact>,
    result: Fact,
}

impl Quantized {
    /// Inputs come in threes: data, scale, zero point. The result's scale and zero point come last.
    fn of(call: &Call) -> OpResult<Quantized> {
        let row = call.op.name.strip_prefix("QLinear").and_then(find).expect("QLinear and the name of a row");
        if call.int("channels_last", 0)? != 0 {
            return Err("attribute 'channels_last': expected 0, found 1".into());
        }
        let last = call.op.inputs.len() - 2;
        let mut facts = Vec::new();
        for scale in (1..=last).step_by(3).chain([last]) {
            expect_dtype(call, scale, "f32", |d| d == DType::F32)?;
            for parameter in [scale, scale + 1].into_iter().filter(|&input| call.has(input)) {
                if call.shape(parameter).numel() != 1 {
                    let (name, found) = (call.op.inputs[parameter].name, call.shape(parameter));
                    return Err(format!("input '{name}': expected one element, found {found}"));
                }
            }
        }
        for data in (0..last).step_by(3) {
            let dtype = expect_dtype(call, data, "u8 or i8", |d| matches!(d, DType::U8 | DType::I8))?;
            if call.has(data + 2) && call.dtype(data + 2) != dtype {
                let (name, found) = (call.op.inputs[data + 2].name, call.dtype(data + 2));
                return Err(format!("input '{name}': expected {dtype} as its operand, found {found}"));
            }
            facts.push(Fact::new(DType::F32, call.shape(data).clone()));
        }
        let dtype = if call.has(last + 1) { call.dtype(last + 1) } else { call.dtype(0) };
        if !matches!(dtype, DType::U8 | DType::I8) {
            return Err(format!("input '{}': expected u8 or i8, found {dtype}", call.op.inputs[last + 1].name));
        }
        let attrs = call.attrs.only(row.attrs);
        let given: Vec<_> = facts.iter().map(Some).collect();
        let shape = Call { op: row, attrs: &attrs, inputs: &given }.infer()?.swap_remove(0).shape;
        Ok(Quantized { row, attrs, facts, result: Fact::new(dtype, shape) })
    }
}

fn quantized_eval(x: &Args<&[f64]>, call: &Call) -> OpResult<Vec<Vec<f64>>> {
    let Quantized { row, attrs, facts, result } = Quantized::of(call)?;
    let last = call.op.inputs.len() - 2;
    let parameters = |scale: usize| -> OpResult<(f64, f64)> {
        let number = |input: usize| x.given(input).and_then(|v| v.first().copied());
        Ok((number(scale).ok_or("a scale has no value")?, number(scale + 1).unwrap_or(0.0)))
    };
    let mut numbers = Vec::new();
    for data in (0..last).step_by(3) {
        let (scale, zero) = parameters(data + 1)?;
        numbers.push(x[data].iter().map(|q| (q - zero) * scale).collect::<Vec<_>>());
    }
    let facts: Vec<_> = facts.iter().map(Some).collect();
    let numbers: Vec<_> = numbers.iter().map(|numbers| Some(&numbers[..])).collect();
    let y = Call { op: row, attrs: &attrs, inputs: &facts }.eval(&numbers)?.swap_remove(0);
    let ((scale, zero), (low, high)) = (parameters(last)?, bounds(result.dtype));
    Ok(vec![y.iter().map(|y| ((y / scale).round_ties_even() + zero).clamp(low, high)).collect()])
}

fn quantized_nodes<'g>(b: Nodes<'g>, call: &Call, x: &Args<Var<'g>>) -> OpResult<Vec<Var<'g>>> {
    let Quantized { row, attrs, result, .. } = Quantized::of(call)?;
    let last = call.op.inputs.len() - 2;
    let one = |input: usize| match x.given(input) {
        Some(parameter) if input >= last || !input.is_multiple_of(3) => spread_node(parameter, 0).map(Some),
        value => Ok(value),
    };
    let given = (0..last + 2).map(one).collect::<OpResult<Vec<_>>>()?;
    let data = given[..last].chunks(3).map(|data| b.op("DequantizeLinear", data, Attrs::new()));
    let y = b.op(row.name, &data.collect::<Vec<_>>(), attrs);
    let to = match given[last + 1] {
        Some(_) => Attrs::new(),
        None => Attrs::new().with("output_dtype", result.dtype.onnx()),
    };
    Ok(vec![b.op("QuantizeLinear", &[Some(y), given[last], given[last + 1]], to)])
}

/// A normalization of the sum of a branch and its skip connection.
const fn skip(name: &'static str, doc: &'static str, inputs: &'static [Input]) -> OpDef {
    OpDef::new(
        name,
        doc,
        inputs,
        |call| Skip::of(call).map(|(_, facts)| facts),
        Eval::Tensor(skip_eval),
        Lower::Decompose(skip_nodes),
    )
    .attrs(&["epsilon"])
}

/// The normalization that follows the sum.
struct Skip {
    row: &'static OpDef,
    attrs: Attrs,
    /// Indices of inputs: the normalization's shift, and the bias of the sum.
    beta: Option<usize>,
    bias: usize,
}

impl Skip {
    /// Reads the call and infers the outputs: the normalized sum, its mean and inverse deviation (or inverse root mean
    /// square), and the sum.
    fn of(call: &Call) -> OpResult<(Skip, Vec<Fact>)> {
        let dtype = same_float(call)?;
        let simplified = call.op.name == "SkipSimplifiedLayerNormalization";
        let row = find(if simplified { "SimplifiedLayerNormalization" } else { "LayerNormalization" });
        let row = row.expect("the table has normalizations");
        let attrs = Attrs::new().with("axis", -1).with("epsilon", call.float("epsilon", 1e-12)?);
        let (beta, bias) = if simplified { (None, 3) } else { (Some(3), 4) };
        for input in [1, bias].into_iter().filter(|&input| call.has(input)) {
            if Shape::broadcast([call.shape(0), call.shape(input)]).as_ref() != Some(call.shape(0)) {
                let (name, found) = (call.op.inputs[input].name, call.shape(input));
                return Err(format!(
                    "input '{name}': expected a shape that broadcasts to {}, found {found}",
                    call.shape(0)
                ));
            }
        }
        let beta = beta.filter(|&input| call.has(input));
        let mut inputs = vec![call.inputs[0], call.inputs[2]];
        inputs.extend(beta.map(|input| call.inputs[input]));
        let facts = Call { op: row, attrs: &attrs, inputs: &inputs }.infer()?;
        let statistics = &facts[1];
        let sum = Fact::new(dtype, call.shape(0).clone());
        let facts = vec![facts[0].clone(), statistics.clone(), statistics.clone(), sum];
        Ok((Skip { row, attrs, beta, bias }, facts))
    }
}

fn skip_eval(x: &Args<&[f64]>, call: &Call) -> OpResult<Vec<Vec<f64>>> {
    let (Skip { row, attrs, beta, bias }, facts) = Skip::of(call)?;
    let shape = call.shape(0);
    let mut sum = x[0].to_vec();
    for input in [1, bias].into_iter().filter(|&input| call.has(input)) {
        let (addend, access) = (x[input], Access::contiguous(call.shape(input).clone()).broadcast(shape));
        sum.iter_mut().zip(indices(shape)).for_each(|(sum, index)| *sum += addend[access.at(&index) as usize]);
    }
    let mut inputs = vec![Some(&facts[3]), call.inputs[2]];
    inputs.extend(beta.map(|input| call.inputs[input]));
    let mut values = vec![Some(&sum[..]), Some(x[2])];
    values.extend(beta.map(|input| Some(x[input])));
    let mut y = Call { op: row, attrs: &attrs, inputs: &inputs }.eval(&values)?;
    if beta.is_none() && y.len() == 2 {
        let width = shape.last().copied().unwrap_or(1).max(1);
        y.insert(1, sum.chunks(width).map(|row| row.iter().sum::<f64>() / width as f64).collect());
    }
    y.push(sum);
    Ok(y)
}

fn skip_nodes<'g>(b: Nodes<'g>, call: &Call, x: &Args<Var<'g>>) -> OpResult<Vec<Var<'g>>> {
    let (Skip { row, attrs, beta, bias }, facts) = Skip::of(call)?;
    let addends = [1, bias].into_iter().filter_map(|input| x.given(input));
    let sum = addends.fold(x[0], |sum, addend| sum + addend);
    let mut inputs = vec![sum, x[2]];
    inputs.extend(beta.map(|input| x[input]));
    let mut y = b.all_outputs(row.name, &inputs, attrs);
    if row.name != "LayerNormalization" {
        y.insert(1, sum.reduce_mean(&[-1], true).cast(facts[1].dtype));
    }
    y.push(sum);
    Ok(y)
}
