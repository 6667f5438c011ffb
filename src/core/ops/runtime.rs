//! Rows of ONNX Runtime's domain that its optimizer and its quantizer insert.

use super::compose::{channels_first, channels_last, composed};
use super::quantize::spread_node;
use super::{broadcasts_to, ensure, expect_dtype, expect_shape, expect_type_of, find, same_float};
use crate::dtype::DType;
use crate::op::{Args, Attrs, Call, Input, Nodes, OpDef, OpResult, Sample, Var, inputs, names};

const UNARY: &[Input] = inputs![X X_scale X_zero_point? Y_scale Y_zero_point?];
const REDUCED: &[Input] = inputs![data data_scale data_zero_point? reduced_scale reduced_zero_point?];
const BINARY: &[Input] = inputs![A A_scale A_zero_point? B B_scale B_zero_point? C_scale C_zero_point?];
const POOL: &[&str] = names![auto_pad ceil_mode channels_last count_include_pad kernel_shape pads strides];
const SKIP: &[Input] = inputs![input skip gamma beta? bias?];
const SKIP_SIMPLIFIED: &[Input] = inputs![input skip gamma bias?];

pub(super) static OPS: &[OpDef] = &[
    quantized("QLinearAdd", "QuantizeLinear of the sum of two DequantizeLinears", BINARY).sample(of_two),
    quantized("QLinearMul", "QuantizeLinear of the product of two DequantizeLinears", BINARY).sample(of_two),
    quantized("QLinearSigmoid", "QuantizeLinear of Sigmoid of DequantizeLinear", UNARY)
        .sample(|s| of_one(s, &[3, 7], 0.0078125)),
    quantized("QLinearLeakyRelu", "QuantizeLinear of LeakyRelu of DequantizeLinear", UNARY)
        .sample(|s| of_one(s, &[3, 7], 0.0625).attr("alpha", 0.25))
        .attrs(names![alpha]),
    quantized("QLinearAveragePool", "QuantizeLinear of AveragePool of DequantizeLinear", UNARY)
        .sample(|s| of_one(s, &[1, 2, 6, 5], 0.0625).ints("kernel_shape", &[2, 2]).ints("strides", &[2, 1]))
        .attrs(POOL),
    quantized("QLinearGlobalAveragePool", "QuantizeLinear of GlobalAveragePool of DequantizeLinear", UNARY)
        .sample(|s| of_one(s, &[2, 3, 4, 4], 0.0625))
        .attrs(names![channels_last]),
    quantized("QLinearReduceMean", "QuantizeLinear of ReduceMean of DequantizeLinear, along `axes`", REDUCED)
        .sample(|s| of_one(s, &[2, 3, 4], 0.0625).ints("axes", &[1, -1]))
        .attrs(names![axes keepdims]),
    composed("NhwcMaxPool", "MaxPool of images of u8 or i8 whose channels stand last", inputs![x], |_, call, x| {
        expect_dtype(call, 0, "u8 or i8", DType::is_byte)?;
        let rank = call.shape(0).len();
        ensure(rank >= 3, || format!("input 'x': expected a batch of images, found {}", call.shape(0)))?;
        Ok(vec![channels_last(channels_first(x[0], rank).op("MaxPool", &[], call.attrs.clone()), rank)])
    })
    .sample(|s| s.input(DType::U8, &[1, 6, 5, 2], 0.0, 255.0).ints("kernel_shape", &[2, 3]).ints("strides", &[2, 1]))
    .attrs(names![auto_pad ceil_mode dilations kernel_shape pads strides]),
    composed(
        "com.microsoft.QLinearConv",
        "QLinearConv of ONNX, of images whose channels stand last where `channels_last` says so",
        inputs![x x_scale x_zero_point w w_scale w_zero_point y_scale y_zero_point B?],
        |b, call, x| {
            let (rank, mut inputs) = (call.shape(0).len(), x.0.to_vec());
            let mut attrs = call.attrs.clone();
            attrs.remove("channels_last");
            if call.int("channels_last", 0)? == 0 {
                return Ok(vec![b.op("QLinearConv", &inputs, attrs)]);
            }
            ensure(rank >= 3, || format!("input 'x': expected a batch of images, found {}", call.shape(0)))?;
            inputs[0] = Some(channels_first(x[0], rank));
            Ok(vec![channels_last(b.op("QLinearConv", &inputs, attrs), rank)])
        },
    )
    .sample(|s| {
        s.input(DType::U8, &[1, 6, 5, 4], 0.0, 255.0)
            .quantized(0.25, 100.0)
            .input(DType::U8, &[3, 4, 3, 3], 0.0, 255.0)
            .given(DType::F32, &[3], &[0.5, 0.25, 1.0])
            .given(DType::U8, &[1], &[2.0])
            .quantized(64.0, 7.0)
            .attr("channels_last", 1)
    })
    .attrs(names![auto_pad channels_last dilations group kernel_shape pads strides]),
    composed("SkipLayerNormalization", "LayerNormalization of a sum, its statistics, and the sum", SKIP, skipped)
        .attrs(names![epsilon])
        .sample(|s| s.floats(&[&[2, 3, 8], &[2, 3, 8], &[8]])),
    composed("SkipSimplifiedLayerNormalization", "RMSNormalization of a sum, and the sum", SKIP_SIMPLIFIED, skipped)
        .attrs(names![epsilon])
        .sample(|s| s.floats(&[&[2, 3, 8], &[2, 3, 8], &[8]])),
];

/// A row `QLinear..`: the row called `..` on quantized inputs and outputs.
const fn quantized(name: &'static str, doc: &'static str, inputs: &'static [Input]) -> OpDef {
    composed(name, doc, inputs, quantized_nodes)
}

/// Inputs of a sample with one operand, up to the result's zero point.
fn of_one(s: Sample, shape: &[usize], scale: f64) -> Sample {
    let s = s.input(DType::U8, shape, 0.0, 120.0).quantized(0.0625, 60.0);
    s.given(DType::F32, &[1], &[scale]).given(DType::U8, &[1], &[3.0])
}

/// Inputs of a sample with two operands.
fn of_two(s: Sample) -> Sample {
    let s = s.input(DType::U8, &[2, 3, 5], 0.0, 120.0).quantized(0.0625, 60.0);
    let s = s.input(DType::U8, &[3, 1], 0.0, 120.0).quantized(0.125, 7.0);
    s.given(DType::F32, &[1], &[0.25]).given(DType::U8, &[1], &[3.0])
}

/// Refuses quantized inputs that do not fit, and finds the type of the result. Inputs come in threes: data, scale, zero
/// point. The result's scale and zero point come last.
fn quantized_type(call: &Call) -> OpResult<DType> {
    let last = call.op.inputs.len() - 2;
    for scale in (1..=last).step_by(3).chain([last]) {
        expect_dtype(call, scale, "f32", |d| d == DType::F32)?;
        for parameter in [scale, scale + 1].into_iter().filter(|&input| call.has(input)) {
            expect_shape(call, parameter, call.shape(parameter).numel() == 1, format_args!("one element"))?;
        }
    }
    for data in (0..last).step_by(3) {
        let dtype = expect_dtype(call, data, "u8 or i8", DType::is_byte)?;
        expect_type_of(call, data + 2, dtype, "its operand")?;
    }
    expect_dtype(call, if call.has(last + 1) { last + 1 } else { 0 }, "u8 or i8", DType::is_byte)
}

fn quantized_nodes<'g>(b: Nodes<'g>, call: &Call, x: &Args<Var<'g>>) -> OpResult<Vec<Var<'g>>> {
    let row = call.op.name.strip_prefix("QLinear").and_then(find).expect("QLinear and the name of a row");
    let (dtype, last) = (quantized_type(call)?, call.op.inputs.len() - 2);
    let one = |input: usize| match x.given(input) {
        Some(parameter) if input >= last || !input.is_multiple_of(3) => spread_node(parameter, 0).map(Some),
        value => Ok(value),
    };
    let given = (0..last + 2).map(one).collect::<OpResult<Vec<_>>>()?;
    let data = given[..last].chunks(3).map(|data| b.op("DequantizeLinear", data, Attrs::new()));
    let mut attrs = call.attrs.only(row.attrs);
    if let Some(axes) = call.attrs.get("axes") {
        attrs.set("axes", axes.clone());
    }
    let mut data: Vec<_> = data.collect();
    let rank = call.shape(0).len();
    let stands_last = call.int("channels_last", 0)? != 0;
    if stands_last {
        ensure(rank >= 3, || format!("input 'X': expected a batch of images, found {}", call.shape(0)))?;
        data[0] = channels_first(data[0], rank);
    }
    let y = b.op(row.name, &data, attrs);
    let y = if stands_last { channels_last(y, rank) } else { y };
    let to = match given[last + 1] {
        Some(_) => Attrs::new(),
        None => Attrs::new().with("output_dtype", dtype.onnx()),
    };
    Ok(vec![b.op("QuantizeLinear", &[Some(y), given[last], given[last + 1]], to)])
}

/// A normalization of the sum of a branch and its skip connection: the normalized sum, its mean and inverse deviation
/// (or inverse root mean square), and the sum.
fn skipped<'g>(b: Nodes<'g>, call: &Call, x: &Args<Var<'g>>) -> OpResult<Vec<Var<'g>>> {
    same_float(call)?;
    let simplified = call.op.name == "SkipSimplifiedLayerNormalization";
    let row = if simplified { "SimplifiedLayerNormalization" } else { "LayerNormalization" };
    let attrs = Attrs::new().with("axis", -1).with("epsilon", call.float("epsilon", 1e-12)?);
    // The normalization's shift, and the bias of the sum.
    let (beta, bias) = if simplified { (None, 3) } else { (x.given(3), 4) };
    let mut sum = x[0];
    for input in [1, bias] {
        broadcasts_to(call, input, call.shape(0))?;
        sum = x.given(input).map_or(sum, |addend| sum + addend);
    }
    let mut inputs = vec![sum, x[2]];
    inputs.extend(beta);
    let mut y = b.all_outputs(row, &inputs, attrs);
    if simplified {
        let statistics = y.last().ok_or("a normalization has outputs")?.fact()?.dtype;
        y.insert(1, sum.reduce_mean(&[-1], true).cast(statistics));
    }
    y.push(sum);
    Ok(y)
}
