//! Rows of ONNX Runtime's domain for weights of few bits: products of small integers with scales, and numbers packed
//! into bytes.

use super::compose::composed;
use super::index::{as_shape, from_start};
use super::{ensure, expect_dtype, expect_shape, input_name, output, required_ints};
use crate::dtype::DType;
use crate::kernel::{Packing, Template, ZeroPoints};
use crate::narrow;
use crate::op::{
    Args, Attrs, Back, Call, Eval, Fact, Lower, Nodes, OpDef, OpResult, Part, TemplateCall, Var, inputs, names,
};

const BLOCKS: &[&str] = names![K N bits block_size];

pub(super) static OPS: &[OpDef] = &[
    composed(
        "MatMulIntegerToFloat",
        "MatMulInteger times both scales, plus a bias",
        inputs![A B a_scale b_scale a_zero_point? b_zero_point? bias?],
        |b, call, x| {
            let dtype = scale_type(call, &[2, 3, 6])?;
            let product = b.op("MatMulInteger", &[x.0[0], x.0[1], x.given(4), x.given(5)], Attrs::new());
            let y = scaled(product, x[2], x[3]);
            Ok(vec![x.given(6).map_or(y, |bias| y + bias.cast(DType::F32)).cast(dtype)])
        },
    )
    .sample(|s| {
        s.input(DType::U8, &[3, 8], 0.0, 255.0)
            .input(DType::U8, &[8, 5], 0.0, 255.0)
            .given(DType::F32, &[], &[0.125])
            .given(DType::F32, &[], &[0.0625])
    }),
    composed(
        "DynamicQuantizeMatMul",
        "MatMulIntegerToFloat of DynamicQuantizeLinear",
        inputs![A B b_scale b_zero_point? bias?],
        |b, _, x| {
            let [a, scale, zero] = b.outputs("DynamicQuantizeLinear", &[x[0]], Attrs::new());
            let inputs = [Some(a), x.0[1], Some(scale), x.0[2], Some(zero), x.given(3), x.given(4)];
            Ok(vec![b.op("MatMulIntegerToFloat", &inputs, Attrs::new())])
        },
    )
    .sample(|s| s.floats(&[&[2, 3, 8]]).input(DType::I8, &[8, 5], -128.0, 127.0).given(DType::F32, &[], &[0.0625])),
    composed(
        "QGemm",
        "alpha (A' B' + C) times both scales, of small integers and an i32 C; QuantizeLinear of it where \
         `y_scale` is given",
        inputs![A a_scale a_zero_point B b_scale b_zero_point C? y_scale? y_zero_point?],
        gemm,
    )
    .sample(|s| {
        s.input(DType::U8, &[3, 8], 0.0, 255.0)
            .quantized(0.125, 120.0)
            .input(DType::U8, &[8, 5], 0.0, 255.0)
            .quantized(0.0625, 3.0)
    })
    .attrs(names![alpha transA transB]),
    composed(
        "QLinearConcat",
        "QuantizeLinear of Concat of DequantizeLinears: each input is followed by its scale and its zero point",
        inputs![Y_scale Y_zero_point inputs*],
        |b, call, x| {
            let parts = x.0[2..].chunks(3).enumerate().map(|(i, part)| match part.len() {
                3 => Ok(b.op("DequantizeLinear", part, Attrs::new())),
                _ => Err(format!(
                    "{}: expected a scale and a zero point behind it, found none",
                    input_name(call, 2 + 3 * i)
                )),
            });
            let parts = parts.collect::<OpResult<Vec<_>>>()?;
            let y = b.op("Concat", &parts, call.attrs.clone());
            Ok(vec![y.op("QuantizeLinear", &[x[0], x[1]], Attrs::new())])
        },
    )
    .sample(|s| {
        s.quantized(0.25, 10.0)
            .input(DType::U8, &[2, 3], 0.0, 255.0)
            .quantized(0.125, 9.0)
            .input(DType::U8, &[2, 3], 0.0, 255.0)
            .quantized(0.5, 2.0)
            .attr("axis", 1)
            .element(DType::U8)
    })
    .attrs(names![axis]),
    composed(
        "QLinearSoftmax",
        "QuantizeLinear of Softmax of DequantizeLinear; before `opset` 13, over all axes from `axis` on",
        inputs![X X_scale x_zero_point? y_scale y_zero_point],
        |b, call, x| {
            let flat = call.int("opset", 13)? < 13;
            // A softmax that is rounded to halves may be next to another number.
            let numbers = b.op("DequantizeLinear", &[x.0[0], Some(x[1].cast(DType::F32)), x.0[2]], Attrs::new());
            let axis = call.int("axis", if flat { 1 } else { -1 })?;
            let y = numbers.op("Softmax", &[], Attrs::new().with("axis", axis).with("flatten", i64::from(flat)));
            Ok(vec![y.op("QuantizeLinear", &[x[3].cast(DType::F32), x[4]], Attrs::new())])
        },
    )
    .sample(|s| {
        s.input(DType::U8, &[2, 3, 4], 0.0, 255.0)
            .quantized(0.03125, 100.0)
            .quantized(0.00390625, 0.0)
            .attr("opset", 13)
            .attr("axis", 1)
    })
    .attrs(names![axis opset]),
    composed(
        "QLinearWhere",
        "QuantizeLinear of Where between DequantizeLinears",
        inputs![condition X x_scale x_zero_point Y y_scale y_zero_point z_scale z_zero_point],
        |b, _, x| {
            let number = |first: usize| b.op("DequantizeLinear", &x.0[first..first + 3], Attrs::new());
            let y = x[0].select(number(1), number(4));
            Ok(vec![y.op("QuantizeLinear", &[x[7], x[8]], Attrs::new())])
        },
    )
    .sample(|s| {
        s.input(DType::Bool, &[2, 3], 0.0, 1.0)
            .input(DType::U8, &[2, 3], 0.0, 255.0)
            .quantized(0.5, 7.0)
            .input(DType::U8, &[2, 3], 0.0, 255.0)
            .quantized(0.25, 90.0)
            .quantized(0.5, 50.0)
            .element(DType::U8)
    }),
    composed(
        "MatMulNBits",
        "A times the transpose of N rows of K numbers of `bits` bits each, of which every `block_size` \
         have a scale and a zero point; 2 to 8 bits. Constant weights stay packed. They are unpacked to the type of the scales \
         where `g_idx` gives blocks of different sizes, or is no constant",
        inputs![A B scales zero_points? g_idx? bias?],
        few_bits,
    )
    .sample(|s| {
        s.floats(&[&[2, 3, 32]])
            .input(DType::U8, &[8, 2, 8], 0.0, 255.0)
            .input(DType::F32, &[8, 2], 0.01, 0.1)
            .attr("N", 8)
            .attr("K", 32)
            .attr("bits", 4)
            .attr("block_size", 16)
    })
    .attrs(names![K N accuracy_level bits block_size weight_prepacked]),
    composed(
        "MatMulBnb4",
        "A times the transpose of N rows of K codes of 4 bits, the first of a byte in its highest bits: FP4, or NF4 where \
         `quant_type` is 1; every `block_size` of all codes have a scale. Constant codes stay packed",
        inputs![A B absmax],
        four_bits,
    )
    .sample(|s| {
        s.floats(&[&[2, 3, 40]])
            .input(DType::U8, &[120], 0.0, 255.0)
            .input(DType::F32, &[15], 0.01, 0.1)
            .attr("N", 6)
            .attr("K", 40)
            .attr("block_size", 16)
            .attr("quant_type", 1)
    })
    .attrs(names![K N block_size quant_type training_mode transB]),
    OpDef::new(
        "plimsoll.Weights",
        "The weights of a MatMulNBits, [N, K]",
        inputs![B scales zero_points? g_idx?],
        |call| Weights::of(call).and_then(|w| output(w.dtype, [w.n, w.k])),
        Eval::Tensor(|x, call| Weights::of(call)?.eval(x, call)),
        Lower::Decompose(|b, call, x| Ok(vec![Weights::of(call)?.nodes(b, call, x)?])),
    )
    .sample(|s| {
        s.input(DType::U8, &[6, 3, 8], 0.0, 255.0)
            .input(DType::F32, &[6, 3], 0.01, 0.1)
            .attr("N", 6)
            .attr("K", 40)
            .attr("bits", 4)
            .attr("block_size", 16)
            .element(DType::F32)
    })
    .attrs(BLOCKS),
    OpDef::new(
        "plimsoll.MatMulBits",
        "A times the transpose of N rows of numbers of `bits` bits each, in words of 32 bits, of which every `block_size` have a scale and \
         a zero point: a float, or one of as many bits in words, too; `signed` numbers have a sign; with `codes`, `zeros` has what each number \
         stands for",
        inputs![A words scales zeros?],
        |call| {
            let w = Words::of(call)?;
            let mut shape = call.shape(0).clone();
            *shape.last_mut().expect("it has axes") = w.n;
            output(call.dtype(0), shape)
        },
        Eval::Tensor(|x, call| Words::of(call)?.eval(x, call)),
        Lower::Template(|call, x| {
            let w = Words::of(call)?;
            let mut shape = call.shape(0).clone();
            *shape.last_mut().expect("it has axes") = w.n;
            let (bits, signed) = (w.packing.bits, w.packing.flip != 0);
            let template = Template::MatMulBits { bits, signed, block: w.packing.block, zeros: w.zeros };
            let reads = x.iter().cloned().enumerate().collect();
            Ok(TemplateCall { template, shape, reads })
        }),
    )
    .grad(|b, call, back| Words::of(call)?.grad(b, call, back))
    .flop(|call| Words::of(call).map_or(0.0, |w| 2.0 * call.shape(0).numel() as f64 * w.n as f64))
    .sample(|s| {
        s.floats(&[&[2, 3, 40]])
            .input(DType::I32, &[6 * 3 * 2], -2147483648.0, 2147483647.0)
            .input(DType::F32, &[6, 3], 0.01, 0.1)
            .attr("N", 6)
            .attr("bits", 4)
            .attr("block_size", 16)
    })
    .attrs(names![N bits block_size codes signed zero])
    .part(|call, axis, _| (axis + 1 < call.shape(0).len()).then(|| Part::of([Some(axis), None, None, None])).flatten()),
    composed(
        "plimsoll.GatherBits",
        "Gather of rows of `K` numbers of few bits, as plimsoll.MatMulBits has them, in the type of the scales; packed zero points of a row \
         fill whole words",
        inputs![indices words scales zeros?],
        |b, call, x| Ok(vec![Words::chosen(call)?.rows(b, call, x)?]),
    )
    .sample(|s| {
        s.input(DType::I64, &[2, 5], -6.0, 5.0)
            .input(DType::I32, &[6 * 3 * 2], -2147483648.0, 2147483647.0)
            .input(DType::F32, &[6, 3], 0.01, 0.1)
            .attr("N", 6)
            .attr("K", 40)
            .attr("bits", 4)
            .attr("block_size", 16)
            .element(DType::F32)
    })
    .attrs(names![N K bits block_size codes signed zero]),
    OpDef::new(
        "plimsoll.Unpack",
        "The integers of `bits` bits, signed or not, that bytes hold, the lowest bits first, in a shape",
        inputs![bytes],
        |call| Packed::of(call).map(|p| vec![p.fact]),
        Eval::Tensor(|x, call| Packed::of(call)?.eval(x)),
        Lower::Decompose(|b, call, x| Packed::of(call)?.nodes(b, x[0])),
    )
    .sample(|s| {
        s.input(DType::U8, &[8], 0.0, 255.0).ints("shape", &[3, 5]).attr("bits", 4).attr("signed", 1).attr("to", DType::I4.onnx())
    })
    .attrs(names![bits shape signed to]),
    composed(
        "GatherBlockQuantized",
        "Gather of numbers of which every `block_size` along `quantize_axis` have a scale and a zero \
         point: numbers of `bits` bits each, of which u8 holds several and the rows that are read are \
         unpacked, or whole ones, i8",
        inputs![data indices scales zero_points?],
        gathered,
    )
    .sample(|s| {
        s.input(DType::U8, &[12, 24], 0.0, 255.0)
            .input(DType::I64, &[2, 5], -12.0, 11.0)
            .input(DType::F32, &[12, 3], 0.01, 0.1)
            .attr("bits", 4)
            .attr("block_size", 16)
            .element(DType::F32)
    })
    .attrs(names![bits block_size gather_axis quantize_axis]),
];

/// Numbers whose scales and zero points are shared by blocks along an axis, of which rows are gathered.
struct Blocked {
    dtype: DType,
    held: DType,
    gather: usize,
    quantize: usize,
    bits: usize,
    /// Numbers per byte.
    per: usize,
    block: usize,
    blocks: usize,
}

impl Blocked {
    fn of(call: &Call) -> OpResult<Blocked> {
        let dtype = expect_dtype(call, 2, "a float type", DType::is_float)?;
        let held = expect_dtype(call, 0, "u8 or i8", DType::is_byte)?;
        let data = call.shape(0);
        let (gather, quantize) = (call.axis("gather_axis", 0, data)?, call.axis("quantize_axis", 1, data)?);
        ensure(held != DType::U8 || gather == 0 && quantize + 1 == data.len() && quantize != 0, || {
            format!(
                "expected rows along axis 0 whose blocks lie along the last one, found axes {gather} and {quantize} \
                 of {data}"
            )
        })?;
        let (bits, block) = (call.int("bits", 4)?, call.int("block_size", 128)?);
        let (bits, block) = match (bits, usize::try_from(block)) {
            (2 | 4 | 8, Ok(block @ 1..)) => (bits as usize, block),
            _ => return Err(format!("expected blocks of numbers of 2, 4 or 8 bits, found {block} of {bits}")),
        };
        let per = if held == DType::U8 { 8 / bits } else { 1 };
        let extent = data[quantize].checked_mul(per).ok_or("more numbers than can be counted")?;
        let (block, blocks) = (block.min(extent.max(1)), extent.div_ceil(block));
        for (input, dtype, extent) in [(2, dtype, blocks), (3, held, blocks.div_ceil(per))] {
            let mut expected = Fact::new(dtype, data.clone());
            expected.shape[quantize] = extent;
            ensure(!call.has(input) || *call.fact(input) == expected, || {
                format!("input '{}': expected {expected}, found {}", input_name(call, input), call.fact(input))
            })?;
        }
        Ok(Blocked { dtype, held, gather, quantize, bits, per, block, blocks })
    }
}

fn gathered<'g>(b: Nodes<'g>, call: &Call, x: &Args<Var<'g>>) -> OpResult<Vec<Var<'g>>> {
    let Blocked { dtype, held, gather, quantize, bits, per, block, blocks } = Blocked::of(call)?;
    let (data, indices) = (call.shape(0), call.shape(1).len());
    let at = x[1];
    let take = |table: usize, at| x[table].gather(at, gather as i64);
    let mut numbers = take(0, at);
    // If indices are along the axis of the blocks, each index has its own block.
    let each = gather == quantize;
    let of = if each { from_start(at, data[gather]) / block as f64 } else { at };
    let mut scale = take(2, of);
    let mut zero = x.given(3).map(|_| take(3, of));
    if per > 1 {
        numbers = unpacked(b, numbers, bits)?;
        if let Some(zero) = &mut zero {
            let all = unpacked(b, *zero, bits)?;
            *zero = all.part(all.shape()?.len() - 1, 0..blocks);
        }
    }
    let shape = numbers.shape()?;
    let along = if quantize < gather { quantize } else { quantize + indices - usize::from(quantize > gather) };
    if !each {
        let missing = blocks * block - shape[along];
        if missing > 0 {
            let mut pads = vec![0; 2 * shape.len()];
            pads[shape.len() + along] = missing as i64;
            numbers = numbers.op("Pad", &[], Attrs::new().with("pads", pads));
        }
        let split =
            |value: Var<'g>, within| value.shaped(&[&shape[..along], &[blocks, within], &shape[along + 1..]].concat());
        numbers = split(numbers, block);
        scale = split(scale, 1);
        zero = zero.map(|zero| split(zero, 1));
    }
    let numbers = numbers.cast(dtype);
    let zero = match (zero, held) {
        (Some(zero), _) => zero.cast(dtype),
        (None, DType::U8) => b.scalar(f64::from(1u32 << (bits - 1)), dtype),
        (None, _) => b.scalar(0.0, dtype),
    };
    let y = (numbers - zero) * scale;
    if each {
        return Ok(vec![y]);
    }
    let mut padded = shape.clone();
    padded[along] = blocks * block;
    Ok(vec![y.shaped(&padded).part(along, 0..shape[along])])
}

/// Scales a product of integers in `f32`. A half could not hold every sum, whatever the type of the scales.
fn scaled<'g>(product: Var<'g>, left: Var<'g>, right: Var<'g>) -> Var<'g> {
    let scale = left.cast(DType::F32) * right.cast(DType::F32);
    product.cast(DType::F32) * scale
}

/// The common type of the scales and of the inputs beside them.
fn scale_type(call: &Call, inputs: &[usize]) -> OpResult<DType> {
    let half_or_float = |d: DType| d.is_float() && d != DType::F64;
    let dtype = expect_dtype(call, inputs[0], "f32, f16 or bf16", half_or_float)?;
    match inputs.iter().find(|&&input| call.has(input) && call.dtype(input) != dtype) {
        Some(&input) => {
            Err(format!("input '{}': expected {dtype}, found {}", input_name(call, input), call.dtype(input)))
        }
        None => Ok(dtype),
    }
}

fn gemm<'g>(b: Nodes<'g>, call: &Call, x: &Args<Var<'g>>) -> OpResult<Vec<Var<'g>>> {
    let dtype = scale_type(call, &[1, 4, 7])?;
    let mut matrices = [x[0], x[3]];
    for (matrix, (input, flip)) in matrices.iter_mut().zip([(0, "transA"), (3, "transB")]) {
        expect_shape(call, input, call.shape(input).len() == 2, format_args!("a matrix"))?;
        if call.int(flip, 0)? != 0 {
            *matrix = matrix.transpose(&[1, 0]);
        }
    }
    let sums = b.op("MatMulInteger", &[Some(matrices[0]), Some(matrices[1]), x.0[2], x.0[5]], Attrs::new());
    let sums = x.given(6).map_or(sums, |c| sums + c);
    let y = scaled(sums, x[1], x[4]);
    let alpha = call.float("alpha", 1.0)?;
    let y = if alpha == 1.0 { y } else { y * alpha };
    let Some(scale) = x.given(7) else { return Ok(vec![y.cast(dtype)]) };
    let to = match x.given(8) {
        Some(_) => Attrs::new(),
        None => Attrs::new().with("output_dtype", call.dtype(0).onnx()),
    };
    Ok(vec![b.op("QuantizeLinear", &[Some(y), Some(scale.cast(DType::F32)), x.given(8)], to)])
}

/// Unpacks numbers of `bits` bits from bytes along the last axis, the lowest bits first: all that are whole there.
pub(super) fn unpacked<'g>(b: Nodes<'g>, bytes: Var<'g>, bits: usize) -> OpResult<Var<'g>> {
    let mut shape = bytes.shape()?;
    let count = shape.last().map_or(0, |&last| last * 8 / bits);
    if !bits.is_power_of_two() {
        return straddling(b, bytes, bits, 8, &(0..count).map(|place| place * bits).collect::<Vec<_>>());
    }
    let part = |lowest: usize| {
        let above = if lowest > 0 { bytes / f64::from(1u32 << lowest) } else { bytes };
        let own = if lowest + bits < 8 { above % f64::from(1u32 << bits) } else { above };
        own.unsqueeze(&[-1])
    };
    let parts: Vec<_> = (0..8).step_by(bits).map(part).collect();
    if let Some(last) = shape.last_mut() {
        *last = count;
    }
    Ok(b.concat(&parts, -1).shaped(&shape))
}

/// The numbers, as i32, that begin at some bits of integers of `width` bits along the last axis. Each may end in the next integer.
fn straddling<'g>(b: Nodes<'g>, from: Var<'g>, bits: usize, width: usize, starts: &[usize]) -> OpResult<Var<'g>> {
    let list = |dtype: DType, of: &dyn Fn(usize) -> usize| {
        b.constant(dtype, [starts.len()], || starts.iter().map(|&bit| of(bit) as f64).collect())
    };
    // Bits of the number that are in its first integer.
    let own = |bit: usize| bits.min(width - bit % width);
    let at = |of: &dyn Fn(usize) -> usize| from.gather(list(DType::I64, of), -1).cast(DType::I32);
    let shift = |value: Var<'g>, by: &dyn Fn(usize) -> usize, direction: &str| {
        value.op("BitShift", &[list(DType::I32, by)], Attrs::new().with("direction", direction))
    };
    let mask = |value: Var<'g>, of: &dyn Fn(usize) -> usize| {
        value.op("BitwiseAnd", &[list(DType::I32, &|bit| (1 << of(bit)) - 1)], Attrs::new())
    };
    let low = mask(shift(at(&|bit| bit / width), &|bit| bit % width, "RIGHT"), &own);
    let high = mask(at(&|bit| (bit + bits - 1) / width), &|bit| bits - own(bit));
    let number = low + shift(high, &own, "LEFT");
    number.fact()?;
    Ok(number)
}

/// Integers packed into bytes.
struct Packed {
    bits: usize,
    signed: bool,
    fact: Fact,
}

impl Packed {
    fn of(call: &Call) -> OpResult<Packed> {
        expect_dtype(call, 0, "u8", |d| d == DType::U8)?;
        let bits = match call.int("bits", 4)? {
            bits @ (2 | 4) => bits as usize,
            bits => return Err(format!("attribute 'bits': expected 2 or 4, found {bits}")),
        };
        let signed = call.int("signed", 0)? != 0;
        let shape = as_shape(&required_ints(call, "shape")?)?;
        match (&call.shape(0)[..], shape.checked_len()) {
            (&[bytes], Some(len)) if bytes == len.div_ceil(8 / bits) => {
                let wide = if signed { DType::I8 } else { DType::U8 };
                let dtype = match call.int("to", 0)? {
                    0 => wide,
                    to => {
                        let narrow = DType::from_onnx(to).filter(|d| d.bits() == bits && d.held() == wide);
                        narrow.ok_or_else(|| format!("attribute 'to': expected a type of {bits} bits, found {to}"))?
                    }
                };
                Ok(Packed { bits, signed, fact: Fact::new(dtype, shape) })
            }
            (found, _) => Err(format!("input 'bytes': expected those of {shape}, found {found:?}")),
        }
    }

    fn eval(&self, x: &Args<&[f64]>) -> OpResult<Vec<Vec<f64>>> {
        let bytes = x[0];
        let (per, values) = (8 / self.bits, 1 << self.bits);
        let number = |at: usize| {
            let bits = bytes[at / per] as i32 >> (at % per * self.bits) & (values - 1);
            let whole = if self.signed && bits >= values / 2 { bits - values } else { bits };
            narrow::decode(self.fact.dtype, whole as u8)
        };
        Ok(vec![(0..self.fact.shape.numel()).map(number).collect()])
    }

    fn nodes<'g>(&self, b: Nodes<'g>, bytes: Var<'g>) -> OpResult<Vec<Var<'g>>> {
        let mut y = unpacked(b, bytes, self.bits)?.part(0, 0..self.fact.shape.numel());
        if self.signed {
            let values = f64::from(1u32 << self.bits);
            let low = y.cast(DType::I8);
            y = low.greater_or_equal(values / 2.0).select(low - values, low);
        }
        if self.fact.dtype.is_narrow_float() {
            let dtype = self.fact.dtype;
            let numbers = b.constant(DType::F32, [1 << self.bits], || {
                (0..1 << self.bits).map(|c| narrow::decode(dtype, c)).collect()
            });
            y = numbers.gather(y.cast(DType::I32), 0);
        }
        Ok(vec![y.shaped(&self.fact.shape).cast(self.fact.dtype)])
    }
}

/// Packed rows of weights with their scales.
struct Weights {
    n: usize,
    k: usize,
    bits: usize,
    /// Numbers of a row that share a scale, and the number of such blocks in a row.
    block: usize,
    blocks: usize,
    dtype: DType,
}

const BYTES: usize = 0;
const SCALES: usize = 1;
const ZEROS: usize = 2;
const GROUPS: usize = 3;

impl Weights {
    fn of(call: &Call) -> OpResult<Weights> {
        let dtype = expect_dtype(call, SCALES, "a float type", DType::is_float)?;
        expect_dtype(call, BYTES, "u8", |d| d == DType::U8)?;
        let size = |name: &str, default: i64| {
            let given = call.int(name, default)?;
            let checked = usize::try_from(given).ok().filter(|n| (1..=1 << 30).contains(n));
            checked.ok_or_else(|| format!("attribute '{name}': expected 1 or more, found {given}"))
        };
        let (n, k, bits, block) = (size("N", 0)?, size("K", 0)?, size("bits", 4)?, size("block_size", 0)?);
        if !(2..=8).contains(&bits) || !(block * bits).is_multiple_of(8) {
            return Err(format!("expected whole bytes of numbers of 2 to 8 bits, found {block} of {bits} bits"));
        }
        let w = Weights { n, k, bits, block, blocks: k.div_ceil(block), dtype };
        let expect = |input: usize, shape: &[usize]| {
            let fits = call.shape(input).numel() == shape.iter().product::<usize>();
            expect_shape(call, input, fits, format_args!("{shape:?}"))
        };
        expect(BYTES, &[n, w.blocks, block * bits / 8])?;
        expect(SCALES, &[n, w.blocks])?;
        if call.has(ZEROS) {
            match call.dtype(ZEROS) {
                DType::U8 => expect(ZEROS, &[n, w.zero_bytes()])?,
                other if other == dtype => expect(ZEROS, &[n, w.blocks])?,
                other => return Err(format!("input 'zero_points': expected u8 or {dtype}, found {other}")),
            }
        }
        if call.has(GROUPS)
            && (!call.dtype(GROUPS).is_int() || call.shape(GROUPS).len() != 1 || call.shape(GROUPS)[0] < k)
        {
            return Err(format!("input 'g_idx': expected integers [{k}], found {}", call.fact(GROUPS)));
        }
        Ok(w)
    }

    /// Bytes of the zero points of a row.
    fn zero_bytes(&self) -> usize {
        (self.blocks * self.bits).div_ceil(8)
    }

    /// The zero point where none is given.
    fn middle(&self) -> f64 {
        f64::from(1u32 << (self.bits - 1))
    }

    fn eval(&self, x: &Args<&[f64]>, call: &Call) -> OpResult<Vec<Vec<f64>>> {
        let [bytes, scales] = [BYTES, SCALES].map(|i| x[i]);
        let given = |input: usize| x.given(input);
        let few = |bytes: &[f64], at: usize| {
            let (byte, shift) = (at * self.bits / 8, at * self.bits % 8);
            let next = if shift + self.bits > 8 { bytes[byte + 1] as u32 } else { 0 };
            f64::from((bytes[byte] as u32 | next << 8) >> shift & ((1 << self.bits) - 1))
        };
        let packed = call.has(ZEROS) && call.dtype(ZEROS) == DType::U8;
        let (row, zero_row) = (self.blocks * self.block * self.bits / 8, self.zero_bytes());
        let mut weights = Vec::with_capacity(self.n * self.k);
        for n in 0..self.n {
            let bytes = &bytes[n * row..][..row];
            for k in 0..self.k {
                let group = given(GROUPS).map_or(k / self.block, |groups| groups[k] as usize).min(self.blocks - 1);
                let zero = match given(ZEROS) {
                    None => self.middle(),
                    Some(zeros) if packed => few(&zeros[n * zero_row..][..zero_row], group),
                    Some(zeros) => zeros[n * self.blocks + group],
                };
                weights.push((few(bytes, k) - zero) * scales[n * self.blocks + group]);
            }
        }
        Ok(vec![weights])
    }

    fn nodes<'g>(&self, b: Nodes<'g>, call: &Call, x: &Args<Var<'g>>) -> OpResult<Var<'g>> {
        let &Weights { n, k, bits, block, blocks, dtype } = self;
        let numbers = unpacked(b, x[BYTES].shaped(&[n, blocks * block * bits / 8]), bits)?.cast(dtype);
        // The parameter of each number: that of its block, or of the group that lists it.
        let shape = if call.has(GROUPS) { [n, k, 1] } else { [n, blocks, block] };
        let each = |parameter: Var<'g>| {
            let listed = x.given(GROUPS).map_or(parameter, |groups| parameter.gather(groups.part(0, 0..k), 1));
            listed.shaped(&[n, shape[1], 1])
        };
        let zero = match x.given(ZEROS) {
            None => b.scalar(self.middle(), dtype),
            Some(zero) if call.dtype(ZEROS) == DType::U8 => {
                let zero = unpacked(b, zero.shaped(&[n, self.zero_bytes()]), bits)?;
                each(zero.part(1, 0..blocks).cast(dtype))
            }
            Some(zero) => each(zero.shaped(&[n, blocks])),
        };
        let scale = each(x[SCALES].shaped(&[n, blocks]));
        let numbers = if call.has(GROUPS) { numbers.part(1, 0..k) } else { numbers };
        let weights = (numbers.shaped(&shape) - zero) * scale;
        Ok(weights.shaped(&[n, shape[1] * shape[2]]).part(1, 0..k))
    }
}

/// Rows of packed numbers, in words.
struct Words {
    n: usize,
    k: usize,
    packing: Packing,
    zeros: ZeroPoints,
}

impl Words {
    /// The words of a product.
    fn of(call: &Call) -> OpResult<Words> {
        expect_dtype(call, 0, "f32, f16 or bf16", |d| d.is_float() && d != DType::F64)?;
        let k = match &call.shape(0)[..] {
            [_, .., k] => *k,
            found => return Err(format!("input 'A': expected two axes or more, found {found:?}")),
        };
        ensure(k > 0, || "input 'A': expected rows of one element or more, found 0".to_owned())?;
        Words::with(call, k, |packing| packing.zero_bytes)
    }

    /// The words whose rows are chosen by indices: packed zero points of a row fill whole words.
    fn chosen(call: &Call) -> OpResult<Words> {
        expect_dtype(call, 0, "integers", DType::is_int)?;
        let k = call.int("K", 0)?;
        let k = usize::try_from(k).ok().filter(|k| (1..=1 << 30).contains(k));
        let k = k.ok_or_else(|| "attribute 'K': expected 1 or more".to_owned())?;
        Words::with(call, k, |packing| packing.zero_bytes.next_multiple_of(4))
    }

    /// Rows of `k` numbers. `zero_bytes` are those of a row's packed zero points.
    fn with(call: &Call, k: usize, zero_bytes: fn(&Packing) -> usize) -> OpResult<Words> {
        let float = |d: DType| d.is_float() && d != DType::F64;
        expect_dtype(call, 1, "i32", |d| d == DType::I32)?;
        expect_dtype(call, 2, "f32, f16 or bf16", float)?;
        let size = |name: &str, default: i64| {
            let given = call.int(name, default)?;
            let checked = usize::try_from(given).ok().filter(|size| (1..=1 << 30).contains(size));
            checked.ok_or_else(|| format!("attribute '{name}': expected 1 or more, found {given}"))
        };
        let (n, bits, block) = (size("N", 0)?, size("bits", 4)?, size("block_size", 0)?);
        let packing = Packing::new(bits, call.int("signed", 0)? != 0, block, k)?;
        let words = packing.words_per_row.checked_mul(n);
        let words = words.ok_or_else(|| format!("{n} rows of {k} numbers are too many"))?;
        let expect = |input: usize, shape: &[usize]| {
            expect_shape(call, input, call.shape(input)[..] == *shape, format_args!("{shape:?}"))
        };
        expect(1, &[words])?;
        expect(2, &[n, packing.blocks])?;
        let codes = call.int("codes", 0)? != 0;
        let zeros = match call.has(3).then(|| call.dtype(3)) {
            _ if codes => {
                ensure(packing.flip == 0, || "attribute 'signed': expected 0 beside codes, found 1".to_owned())?;
                ensure(call.has(3), || "input 'zeros': expected codes, found none".to_owned())?;
                expect_dtype(call, 3, "f32, f16 or bf16", float)?;
                expect(3, &[1 << bits])?;
                ZeroPoints::Codes
            }
            None => {
                let default = if packing.flip == 0 { 1i64 << (bits - 1) } else { 0 };
                let (zero, least) = (call.int("zero", default)?, -i64::from(packing.raised()));
                ensure((least..least + (1 << bits)).contains(&zero), || {
                    format!("attribute 'zero': expected a number of {bits} bits, found {zero}")
                })?;
                ZeroPoints::Number(zero as f64)
            }
            Some(DType::I32) => {
                expect(3, &[(n * zero_bytes(&packing)).div_ceil(4)])?;
                ZeroPoints::Packed
            }
            Some(_) => {
                expect_dtype(call, 3, "i32, f32, f16 or bf16", float)?;
                expect(3, &[n, packing.blocks])?;
                ZeroPoints::Floats
            }
        };
        Ok(Words { n, k, packing, zeros })
    }

    /// The zero point of a block.
    fn zero(&self, x: &Args<&[f64]>, row: usize, block: usize) -> f64 {
        let packing = &self.packing;
        match self.zeros {
            ZeroPoints::Number(zero) => zero,
            ZeroPoints::Floats => x[3][row * packing.blocks + block],
            ZeroPoints::Packed => packing.number_in(packing.zero_bit(row, block), |word| x[3][word]),
            ZeroPoints::Codes => 0.0,
        }
    }

    fn eval(&self, x: &Args<&[f64]>, _: &Call) -> OpResult<Vec<Vec<f64>>> {
        let packing = &self.packing;
        let weight = |row: usize, j: usize| {
            let block = j / packing.block;
            let number = packing.number_in(packing.bit(row, j), |word| x[1][word]);
            let number = if self.zeros == ZeroPoints::Codes { x[3][number as usize] } else { number };
            (number - self.zero(x, row, block)) * x[2][row * packing.blocks + block]
        };
        let rows: Vec<Vec<f64>> = (0..self.n).map(|row| (0..self.k).map(|j| weight(row, j)).collect()).collect();
        let dot = |left: &[f64], row: &Vec<f64>| left.iter().zip(row).map(|(a, b)| a * b).sum::<f64>();
        let lefts = x[0].chunks(self.k.max(1));
        Ok(vec![lefts.flat_map(|left| rows.iter().map(move |row| dot(left, row))).collect()])
    }

    /// The numbers that begin at some bits of words along the last axis.
    fn numbers<'g>(&self, b: Nodes<'g>, words: Var<'g>, starts: &[usize]) -> OpResult<Var<'g>> {
        let Packing { bits, per_word, flip, .. } = self.packing;
        let raised = f64::from(self.packing.raised());
        if !bits.is_power_of_two() {
            let sign = b.scalar(raised, DType::I32);
            let numbers = straddling(b, words, bits, 32, starts)?.op("BitwiseXor", &[sign], Attrs::new());
            return Ok(numbers.cast(DType::F32) - raised);
        }
        let mut shape = words.shape()?;
        let shifts = b.numbers(DType::I32, [per_word], 0.0) * bits as f64;
        let attrs = Attrs::new().with("direction", "RIGHT");
        let flip = b.scalar(f64::from(flip as i32), DType::I32);
        let words = words.op("BitwiseXor", &[flip], Attrs::new());
        let shifted = words.unsqueeze(&[-1]).op("BitShift", &[shifts], attrs);
        let mask = b.scalar(f64::from(u32::MAX >> (32 - bits)), DType::I32);
        let numbers = shifted.op("BitwiseAnd", &[mask], Attrs::new()).cast(DType::F32) - raised;
        let last = shape.len() - 1;
        shape[last] *= per_word;
        let all = numbers.shaped(&shape);
        if starts.iter().enumerate().all(|(place, &start)| start == place * bits) {
            return Ok(all.part(last, 0..starts.len()));
        }
        let places = || starts.iter().map(|&bit| (bit / bits) as f64).collect();
        Ok(all.gather(b.constant(DType::I64, [starts.len()], places), -1))
    }

    /// The bits at which the numbers of a row begin.
    fn starts(&self) -> Vec<usize> {
        (0..self.packing.blocks * self.packing.block).map(|place| self.packing.bit(0, place)).collect()
    }

    /// The rows that indices choose, as floats of the scales' type.
    fn rows<'g>(&self, b: Nodes<'g>, call: &Call, x: &Args<Var<'g>>) -> OpResult<Var<'g>> {
        let &Words { n, k, packing, zeros } = self;
        let (blocks, block, dtype) = (packing.blocks, packing.block, call.dtype(2));
        let at = |table: Var<'g>, row: usize| table.shaped(&[n, row]).gather(x[0], 0);
        let of = |rest: &[usize]| [call.shape(0), rest].concat();
        let words = at(x[1], packing.words_per_row);
        let mut numbers = self.numbers(b, words, &self.starts())?.shaped(&of(&[blocks, block]));
        let each = |value: Var<'g>| value.cast(DType::F32).shaped(&of(&[blocks, 1]));
        let zero = match zeros {
            ZeroPoints::Number(zero) => b.scalar(zero, DType::F32),
            ZeroPoints::Floats => each(at(x[3], blocks)),
            ZeroPoints::Packed => {
                let starts: Vec<_> = (0..blocks).map(|block| packing.zero_bit(0, block)).collect();
                each(self.numbers(b, at(x[3], packing.zero_bytes.div_ceil(4)), &starts)?)
            }
            ZeroPoints::Codes => {
                numbers = x[3].cast(DType::F32).gather(numbers.cast(DType::I32), 0);
                b.scalar(0.0, DType::F32)
            }
        };
        let rows = (numbers - zero) * each(at(x[2], blocks));
        Ok(rows.shaped(&of(&[blocks * block])).part(call.shape(0).len(), 0..k).cast(dtype))
    }

    /// The gradients: of a product by weights that are unpacked for it.
    fn grad<'g>(&self, b: Nodes<'g>, call: &Call, back: &Back<'_, 'g>) -> OpResult<Vec<Option<Var<'g>>>> {
        let (n, k, Packing { blocks, block, words_per_row, .. }) = (self.n, self.k, self.packing);
        let split = [n, blocks, block];
        let words = back.x[1].shaped(&[n, words_per_row]);
        let mut numbers = self.numbers(b, words, &self.starts())?.shaped(&split);
        let mut places = None;
        let each = |value: Var<'g>| value.cast(DType::F32).shaped(&[n, blocks, 1]);
        let zero = match self.zeros {
            ZeroPoints::Number(zero) => b.scalar(zero, DType::F32),
            ZeroPoints::Floats => each(back.x[3]),
            ZeroPoints::Packed => {
                let starts = |row: usize| (0..blocks).map(move |block| self.packing.zero_bit(row, block));
                each(self.numbers(b, back.x[3], &(0..n).flat_map(starts).collect::<Vec<_>>())?)
            }
            ZeroPoints::Codes => {
                let at = numbers.cast(DType::I32);
                numbers = back.x[3].cast(DType::F32).gather(at, 0);
                places = Some(at);
                b.scalar(0.0, DType::F32)
            }
        };
        let (above, scale) = (numbers - zero, each(back.x[2]));
        let weights = (above * scale).shaped(&[n, blocks * block]).part(1, 0..k);
        let rows = call.shape(0).numel() / k.max(1);
        let dy = back.first()?.cast(DType::F32).shaped(&[rows, n]);
        let left = back.x[0].cast(DType::F32).shaped(&[rows, k]);
        // By the weights, filled up to whole blocks.
        let by = dy.transpose(&[1, 0]).matmul(left);
        let pads = vec![0, 0, 0, (blocks * block - k) as i64];
        let by = by.op("Pad", &[], Attrs::new().with("pads", pads)).shaped(&split);
        let summed = |value: Var<'g>, input: usize| {
            value.reduce_sum(&[2], false).shaped(call.shape(input)).cast(call.dtype(input))
        };
        let mut gradients =
            vec![Some(dy.matmul(weights).shaped(call.shape(0)).cast(call.dtype(0))), None, Some(summed(by * above, 2))];
        if self.zeros == ZeroPoints::Floats {
            gradients.push(Some(summed(-(by * scale), 3)));
        }
        if let Some(places) = places {
            // Of a code: the sum over all numbers that are its place.
            let codes = b.numbers(DType::I32, [1, call.shape(3).numel()], 0.0);
            let len = n * blocks * block;
            let is_code = places.shaped(&[len, 1]).equal(codes).cast(DType::F32);
            let each = (by * scale).shaped(&[1, len]).matmul(is_code);
            gradients.push(Some(each.shaped(call.shape(3)).cast(call.dtype(3))));
        }
        Ok(gradients)
    }
}

/// The bias of a product by packed weights.
const BIAS: usize = 5;

fn few_bits<'g>(b: Nodes<'g>, call: &Call, x: &Args<Var<'g>>) -> OpResult<Vec<Var<'g>>> {
    ensure(call.int("weight_prepacked", 0)? == 0, || {
        "attribute 'weight_prepacked': expected 0, found another: weights come as the specification has them".to_owned()
    })?;
    call.int("accuracy_level", 0)?;
    if call.has(BIAS) {
        let n = usize::try_from(call.int("N", 0)?).unwrap_or(0);
        expect_shape(call, BIAS, call.shape(BIAS)[..] == [n], format_args!("[{n}]"))?;
    }
    let mut inputs = x.0[1..x.0.len().min(5)].to_vec();
    while matches!(inputs.last(), Some(None)) {
        inputs.pop();
    }
    let weights = b.op("plimsoll.Weights", &inputs, call.attrs.only(BLOCKS));
    let y = x[0].matmul(weights.cast(call.dtype(0)).transpose(&[1, 0]));
    Ok(vec![x.given(BIAS).map_or(y, |bias| y + bias)])
}

/// What the numbers of four bits stand for in NF4: quantiles of the normal distribution.
const NF4: [f64; 16] = [
    -1.0,
    -0.696_192_800_998_687_7,
    -0.525_073_051_452_636_7,
    -0.394_917_488_098_144_53,
    -0.284_441_381_692_886_35,
    -0.184_773_430_228_233_34,
    -0.091_050_036_251_544_95,
    0.0,
    0.079_580_299_556_255_34,
    0.160_930_201_411_247_25,
    0.246_112_301_945_686_34,
    0.337_915_241_718_292_24,
    0.440_709_829_330_444_34,
    0.562_617_003_917_694_1,
    0.722_956_836_223_602_3,
    1.0,
];

/// What the numbers of four bits stand for in FP4, without a sign, which is the highest bit.
const FP4: [f64; 8] = [0.0, 0.005_208_333_33, 0.666_666_67, 1.0, 0.333_333_33, 0.5, 0.166_666_67, 0.25];

/// Codes of four bits, in rows.
pub struct Codes {
    /// Rows.
    pub n: usize,
    /// Numbers of a row.
    pub k: usize,
    /// Numbers that share a scale, whatever their rows.
    pub block: usize,
    /// What each number stands for.
    pub list: [f64; 16],
}

impl Codes {
    /// The codes of a node.
    pub fn of(call: &Call) -> OpResult<Codes> {
        expect_dtype(call, 1, "u8", |d| d == DType::U8)?;
        scale_type(call, &[0, 2])?;
        let size = |name: &str| {
            let given = call.int(name, 0)?;
            let checked = usize::try_from(given).ok().filter(|n| (1..=1 << 30).contains(n));
            checked.ok_or_else(|| format!("attribute '{name}': expected 1 or more, found {given}"))
        };
        let (n, k, block) = (size("N")?, size("K")?, size("block_size")?);
        let all = n * k;
        for (input, len) in [(1, all.div_ceil(2)), (2, all.div_ceil(block))] {
            expect_shape(call, input, call.shape(input).numel() == len, format_args!("[{len}]"))?;
        }
        call.int("training_mode", 0)?;
        let turned = call.int("transB", 1)?;
        ensure(turned == 1, || format!("attribute 'transB': expected 1, found {turned}"))?;
        let list = match call.int("quant_type", 1)? {
            0 => std::array::from_fn(|number| if number < 8 { FP4[number] } else { -FP4[number - 8] }),
            1 => NF4,
            other => return Err(format!("attribute 'quant_type': expected 0 or 1, found {other}")),
        };
        Ok(Codes { n, k, block, list })
    }
}

fn four_bits<'g>(b: Nodes<'g>, call: &Call, x: &Args<Var<'g>>) -> OpResult<Vec<Var<'g>>> {
    let Codes { n, k, block, list } = Codes::of(call)?;
    let (all, blocks) = (n * k, (n * k).div_ceil(block));
    let bytes = x[1].shaped(&[all.div_ceil(2), 1]);
    let numbers = b.concat(&[bytes / 16.0, bytes % 16.0], -1).shaped(&[2 * all.div_ceil(2)]).part(0, 0..all);
    let codes = b.constant(call.dtype(2), [16], || list.to_vec()).gather(numbers.cast(DType::I32), 0);
    let pads = vec![0, (blocks * block - all) as i64];
    let codes = codes.op("Pad", &[], Attrs::new().with("pads", pads)).shaped(&[blocks, block]);
    let weights = codes * x[2].shaped(&[blocks, 1]);
    let weights = weights.shaped(&[blocks * block]).part(0, 0..all).shaped(&[n, k]);
    Ok(vec![x[0].matmul(weights.transpose(&[1, 0]))])
}
