//! Rows of ONNX Runtime's domain for weights of few bits: products of small integers with scales, and numbers packed
//! into bytes.

use super::compose::{binary, composed, given, outputs, required, reshape, transpose, with_number};
use super::index::as_shape;
use super::{expect_dtype, input_name, output, required_ints};
use crate::dtype::DType;
use crate::op::{Attrs, Build, Call, Eval, Fact, Lower, OpDef, OpResult, ValueId, one, optional, variadic};

const BLOCKS: &[&str] = &["K", "N", "bits", "block_size"];

pub(super) static OPS: &[OpDef] = &[
    composed(
        "MatMulIntegerToFloat",
        "MatMulInteger times both scales, plus a bias",
        &[
            one("A"),
            one("B"),
            one("a_scale"),
            one("b_scale"),
            optional("a_zero_point"),
            optional("b_zero_point"),
            optional("bias"),
        ],
        |b, call, x| {
            let dtype = scale_type(call, &[2, 3, 6])?;
            let product = b.node("MatMulInteger", &[x[0], x[1], given(x, 4), given(x, 5)], Attrs::new())?;
            let mut y = scaled(b, product, required(x, 2), required(x, 3))?;
            if let Some(bias) = given(x, 6) {
                let bias = b.cast(bias, DType::F32)?;
                y = binary(b, "Add", y, bias)?;
            }
            Ok(vec![b.cast(y, dtype)?])
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
        &[one("A"), one("B"), one("b_scale"), optional("b_zero_point"), optional("bias")],
        |b, _, x| {
            let a = outputs(b, "DynamicQuantizeLinear", &x[..1], Attrs::new())?;
            let inputs = [Some(a[0]), x[1], Some(a[1]), x[2], Some(a[2]), given(x, 3), given(x, 4)];
            Ok(vec![b.node("MatMulIntegerToFloat", &inputs, Attrs::new())?])
        },
    )
    .sample(|s| s.floats(&[&[2, 3, 8]]).input(DType::I8, &[8, 5], -128.0, 127.0).given(DType::F32, &[], &[0.0625])),
    composed(
        "QGemm",
        "alpha (A' B' + C) times both scales, of small integers and an i32 C; QuantizeLinear of it where \
         `y_scale` is given",
        &[
            one("A"),
            one("a_scale"),
            one("a_zero_point"),
            one("B"),
            one("b_scale"),
            one("b_zero_point"),
            optional("C"),
            optional("y_scale"),
            optional("y_zero_point"),
        ],
        gemm,
    )
    .sample(|s| {
        s.input(DType::U8, &[3, 8], 0.0, 255.0)
            .given(DType::F32, &[], &[0.125])
            .given(DType::U8, &[], &[120.0])
            .input(DType::U8, &[8, 5], 0.0, 255.0)
            .given(DType::F32, &[], &[0.0625])
            .given(DType::U8, &[], &[3.0])
    })
    .attrs(&["alpha", "transA", "transB"]),
    composed(
        "QLinearConcat",
        "QuantizeLinear of Concat of DequantizeLinears: each input is followed by its scale and its zero point",
        &[one("Y_scale"), one("Y_zero_point"), variadic("inputs")],
        |b, call, x| {
            let parts = x[2..].chunks(3).enumerate().map(|(i, part)| match part.len() {
                3 => b.node("DequantizeLinear", part, Attrs::new()),
                _ => Err(format!(
                    "{}: expected a scale and a zero point behind it, found none",
                    input_name(call, 2 + 3 * i)
                )),
            });
            let parts = parts.collect::<OpResult<Vec<_>>>()?;
            let y = b.op("Concat", &parts, call.attrs.clone())?;
            Ok(vec![b.node("QuantizeLinear", &[Some(y), x[0], x[1]], Attrs::new())?])
        },
    )
    .sample(|s| {
        s.given(DType::F32, &[], &[0.25])
            .given(DType::U8, &[], &[10.0])
            .input(DType::U8, &[2, 3], 0.0, 255.0)
            .given(DType::F32, &[], &[0.125])
            .given(DType::U8, &[], &[9.0])
            .input(DType::U8, &[2, 3], 0.0, 255.0)
            .given(DType::F32, &[], &[0.5])
            .given(DType::U8, &[], &[2.0])
            .attr("axis", 1)
            .element(DType::U8)
    })
    .attrs(&["axis"]),
    composed(
        "QLinearSoftmax",
        "QuantizeLinear of Softmax of DequantizeLinear; before `opset` 13, over all axes from `axis` on",
        &[one("X"), one("X_scale"), optional("x_zero_point"), one("y_scale"), one("y_zero_point")],
        |b, call, x| {
            let flat = call.int("opset", 13)? < 13;
            let numbers = b.node("DequantizeLinear", &x[..3], Attrs::new())?;
            let axis = call.int("axis", if flat { 1 } else { -1 })?;
            let y = b.op("Softmax", &[numbers], Attrs::new().with("axis", axis).with("flatten", i64::from(flat)))?;
            Ok(vec![b.node("QuantizeLinear", &[Some(y), x[3], x[4]], Attrs::new())?])
        },
    )
    .sample(|s| {
        s.input(DType::U8, &[2, 3, 4], 0.0, 255.0)
            .given(DType::F32, &[], &[0.03125])
            .given(DType::U8, &[], &[100.0])
            .given(DType::F32, &[], &[0.00390625])
            .given(DType::U8, &[], &[0.0])
            .attr("opset", 13)
            .attr("axis", 1)
    })
    .attrs(&["axis", "opset"]),
    composed(
        "QLinearWhere",
        "QuantizeLinear of Where between DequantizeLinears",
        &[
            one("condition"),
            one("X"),
            one("x_scale"),
            one("x_zero_point"),
            one("Y"),
            one("y_scale"),
            one("y_zero_point"),
            one("z_scale"),
            one("z_zero_point"),
        ],
        |b, _, x| {
            let (yes, no) = (
                b.node("DequantizeLinear", &x[1..4], Attrs::new())?,
                b.node("DequantizeLinear", &x[4..7], Attrs::new())?,
            );
            let y = b.op("Where", &[required(x, 0), yes, no], Attrs::new())?;
            Ok(vec![b.node("QuantizeLinear", &[Some(y), x[7], x[8]], Attrs::new())?])
        },
    )
    .sample(|s| {
        s.input(DType::Bool, &[2, 3], 0.0, 1.0)
            .input(DType::U8, &[2, 3], 0.0, 255.0)
            .given(DType::F32, &[], &[0.5])
            .given(DType::U8, &[], &[7.0])
            .input(DType::U8, &[2, 3], 0.0, 255.0)
            .given(DType::F32, &[], &[0.25])
            .given(DType::U8, &[], &[90.0])
            .given(DType::F32, &[], &[0.5])
            .given(DType::U8, &[], &[50.0])
            .element(DType::U8)
    }),
    composed(
        "MatMulNBits",
        "A times the transpose of N rows of K numbers of `bits` bits each, of which every `block_size` \
         have a scale and a zero point; weights that are constants are unpacked once and kept in the type \
         of the scales",
        &[one("A"), one("B"), one("scales"), optional("zero_points"), optional("g_idx"), optional("bias")],
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
    .attrs(&["K", "N", "accuracy_level", "bits", "block_size", "weight_prepacked"]),
    OpDef::new(
        "plimsoll.Weights",
        "The weights of a MatMulNBits, [N, K]",
        &[one("B"), one("scales"), optional("zero_points"), optional("g_idx")],
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
        "plimsoll.Unpack",
        "The integers of `bits` bits, signed or not, that bytes hold, the lowest bits first, in a shape",
        &[one("bytes")],
        |call| Packed::of(call).map(|p| vec![p.fact]),
        Eval::Tensor(|x, call| Packed::of(call)?.eval(x)),
        Lower::Decompose(|b, call, x| Packed::of(call)?.nodes(b, x)),
    )
    .sample(|s| s.input(DType::U8, &[8], 0.0, 255.0).ints("shape", &[3, 5]).attr("bits", 4).attr("signed", 1))
    .attrs(&["bits", "shape", "signed"]),
    composed(
        "GatherBlockQuantized",
        "Gather of numbers of which every `block_size` along `quantize_axis` have a scale and a zero \
         point: numbers of `bits` bits each, of which u8 holds several and the rows that are read are \
         unpacked, or whole ones, i8",
        &[one("data"), one("indices"), one("scales"), optional("zero_points")],
        looked_up,
    )
    .sample(|s| {
        s.input(DType::U8, &[12, 24], 0.0, 255.0)
            .input(DType::I64, &[2, 5], -12.0, 11.0)
            .input(DType::F32, &[12, 3], 0.01, 0.1)
            .attr("bits", 4)
            .attr("block_size", 16)
            .element(DType::F32)
    })
    .attrs(&["bits", "block_size", "gather_axis", "quantize_axis"]),
];

fn looked_up(b: &mut dyn Build, call: &Call, x: &[Option<ValueId>]) -> OpResult<Vec<ValueId>> {
    let dtype = expect_dtype(call, 2, "a float type", DType::is_float)?;
    let held = expect_dtype(call, 0, "u8 or i8", |d| matches!(d, DType::U8 | DType::I8))?;
    let (data, indices) = (call.shape(0), call.shape(1).len());
    let (gather, quantize) = (call.axis("gather_axis", 0, data)?, call.axis("quantize_axis", 1, data)?);
    if held == DType::U8 && (gather != 0 || quantize + 1 != data.len() || quantize == 0) {
        return Err(format!(
            "expected rows along axis 0 whose blocks lie along the last one, found axes {gather} and {quantize} \
         of {data}"
        ));
    }
    let (bits, block) = (call.int("bits", 4)?, call.int("block_size", 128)?);
    let (bits, block) = match (bits, usize::try_from(block)) {
        (2 | 4 | 8, Ok(block @ 1..)) => (bits as usize, block),
        _ => return Err(format!("expected blocks of numbers of 2, 4 or 8 bits, found {block} of {bits}")),
    };
    // Numbers per byte, and the number of blocks along the axis.
    let per = if held == DType::U8 { 8 / bits } else { 1 };
    let extent = data[quantize].checked_mul(per).ok_or("more numbers than can be counted")?;
    let (block, blocks) = (block.min(extent.max(1)), extent.div_ceil(block));
    let expect = |input: usize, dtype: DType, extent: usize| {
        let mut shape = data.clone();
        shape[quantize] = extent;
        let (expected, found) = (Fact::new(dtype, shape), call.fact(input));
        if *found == expected {
            Ok(())
        } else {
            Err(format!("input '{}': expected {expected}, found {found}", input_name(call, input)))
        }
    };
    expect(2, dtype, blocks)?;
    if call.has(3) {
        expect(3, held, blocks.div_ceil(per))?;
    }
    let at = required(x, 1);
    let take = |b: &mut dyn Build, table: usize, at| {
        b.op("Gather", &[required(x, table), at], Attrs::new().with("axis", gather as i64))
    };
    let mut numbers = take(b, 0, at)?;
    // If indices are along the axis of the blocks, each index has its own block.
    let each = gather == quantize;
    let mut of = at;
    if each {
        let end = with_number(b, "Add", at, data[gather] as f64)?;
        let behind = with_number(b, "Less", at, 0.0)?;
        let from_start = b.op("Where", &[behind, end, at], Attrs::new())?;
        of = with_number(b, "Div", from_start, block as f64)?;
    }
    let mut parameters = [Some(take(b, 2, of)?), None];
    if call.has(3) {
        parameters[1] = Some(take(b, 3, of)?);
    }
    if per > 1 {
        numbers = unpacked(b, numbers, bits)?;
        if let Some(zero) = &mut parameters[1] {
            let all = unpacked(b, *zero, bits)?;
            *zero = b.slice(all, b.fact(all).shape.len() - 1, 0, blocks)?;
        }
    }
    let shape = b.fact(numbers).shape;
    let along = if quantize < gather { quantize } else { quantize + indices - usize::from(quantize > gather) };
    if !each {
        let (before, behind) = (&shape[..along], &shape[along + 1..]);
        let missing = blocks * block - shape[along];
        if missing > 0 {
            let mut pads = vec![0; 2 * shape.len()];
            pads[shape.len() + along] = missing as i64;
            numbers = b.op("Pad", &[numbers], Attrs::new().with("pads", pads))?;
        }
        numbers = reshape(b, numbers, &[before, &[blocks, block], behind].concat())?;
        for parameter in parameters.iter_mut().flatten() {
            *parameter = reshape(b, *parameter, &[before, &[blocks, 1], behind].concat())?;
        }
    }
    let numbers = b.cast(numbers, dtype)?;
    let zero = match (parameters[1], held) {
        (Some(zero), _) => b.cast(zero, dtype)?,
        (None, DType::U8) => b.scalar(f64::from(1u32 << (bits - 1)), dtype),
        (None, _) => b.scalar(0.0, dtype),
    };
    let centred = binary(b, "Sub", numbers, zero)?;
    let mut y = binary(b, "Mul", centred, parameters[0].expect("scales are required"))?;
    if !each {
        let mut padded = shape.clone();
        padded[along] = blocks * block;
        y = reshape(b, y, &padded)?;
        y = b.slice(y, along, 0, shape[along])?;
    }
    Ok(vec![y])
}

/// Scales a product of integers in `f32`. A half could not hold every sum, whatever the type of the scales.
fn scaled(b: &mut dyn Build, product: ValueId, left: ValueId, right: ValueId) -> OpResult<ValueId> {
    let (left, right) = (b.cast(left, DType::F32)?, b.cast(right, DType::F32)?);
    let scale = binary(b, "Mul", left, right)?;
    let numbers = b.cast(product, DType::F32)?;
    binary(b, "Mul", numbers, scale)
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

fn gemm(b: &mut dyn Build, call: &Call, x: &[Option<ValueId>]) -> OpResult<Vec<ValueId>> {
    let dtype = scale_type(call, &[1, 4, 7])?;
    let mut matrices = [required(x, 0), required(x, 3)];
    for (matrix, (input, flip)) in matrices.iter_mut().zip([(0, "transA"), (3, "transB")]) {
        if call.shape(input).len() != 2 {
            return Err(format!("input '{}': expected a matrix, found {}", input_name(call, input), call.shape(input)));
        }
        if call.int(flip, 0)? != 0 {
            *matrix = transpose(b, *matrix, &[1, 0])?;
        }
    }
    let mut sums = b.node("MatMulInteger", &[Some(matrices[0]), Some(matrices[1]), x[2], x[5]], Attrs::new())?;
    if let Some(c) = given(x, 6) {
        sums = binary(b, "Add", sums, c)?;
    }
    let mut y = scaled(b, sums, required(x, 1), required(x, 4))?;
    let alpha = call.float("alpha", 1.0)?;
    if alpha != 1.0 {
        y = with_number(b, "Mul", y, alpha)?;
    }
    let Some(scale) = given(x, 7) else { return Ok(vec![b.cast(y, dtype)?]) };
    let scale = b.cast(scale, DType::F32)?;
    let to = match given(x, 8) {
        Some(_) => Attrs::new(),
        None => Attrs::new().with("output_dtype", call.dtype(0).onnx()),
    };
    Ok(vec![b.node("QuantizeLinear", &[Some(y), Some(scale), given(x, 8)], to)?])
}

/// Unpacks numbers of `bits` bits from bytes along the last axis, the lowest bits first.
fn unpacked(b: &mut dyn Build, bytes: ValueId, bits: usize) -> OpResult<ValueId> {
    let mut shape = b.fact(bytes).shape.to_vec();
    let mut parts = Vec::new();
    for lowest in (0..8).step_by(bits) {
        let mut part = bytes;
        if lowest > 0 {
            part = with_number(b, "Div", part, f64::from(1u32 << lowest))?;
        }
        if lowest + bits < 8 {
            part = with_number(b, "Mod", part, f64::from(1u32 << bits))?;
        }
        parts.push(b.op("Unsqueeze", &[part], Attrs::new().with("axes", vec![-1]))?);
    }
    let together = b.op("Concat", &parts, Attrs::new().with("axis", -1))?;
    if let Some(last) = shape.last_mut() {
        *last *= 8 / bits;
    }
    reshape(b, together, &shape)
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
                Ok(Packed { bits, signed, fact: Fact::new(if signed { DType::I8 } else { DType::U8 }, shape) })
            }
            (found, _) => Err(format!("input 'bytes': expected those of {shape}, found {found:?}")),
        }
    }

    fn eval(&self, x: &[Option<&[f64]>]) -> OpResult<Vec<Vec<f64>>> {
        let bytes = x[0].ok_or("input 'bytes' has no value")?;
        let (per, values) = (8 / self.bits, 1 << self.bits);
        let number = |at: usize| {
            let bits = bytes[at / per] as i32 >> (at % per * self.bits) & (values - 1);
            f64::from(if self.signed && bits >= values / 2 { bits - values } else { bits })
        };
        Ok(vec![(0..self.fact.shape.numel()).map(number).collect()])
    }

    fn nodes(&self, b: &mut dyn Build, x: &[Option<ValueId>]) -> OpResult<Vec<ValueId>> {
        let all = unpacked(b, required(x, 0), self.bits)?;
        let mut y = b.slice(all, 0, 0, self.fact.shape.numel())?;
        if self.signed {
            let values = f64::from(1u32 << self.bits);
            let low = b.cast(y, DType::I8)?;
            let negative = with_number(b, "GreaterOrEqual", low, values / 2.0)?;
            let lowered = with_number(b, "Sub", low, values)?;
            y = b.op("Where", &[negative, lowered, low], Attrs::new())?;
        }
        Ok(vec![reshape(b, y, &self.fact.shape)?])
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
        if ![2, 4, 8].contains(&bits) || !(block * bits).is_multiple_of(8) {
            return Err(format!("expected whole bytes of 2, 4 or 8 bits, found {block} of {bits} bits"));
        }
        let w = Weights { n, k, bits, block, blocks: k.div_ceil(block), dtype };
        let expect = |input: usize, shape: &[usize]| {
            if call.shape(input).numel() == shape.iter().product::<usize>() {
                return Ok(());
            }
            Err(format!("input '{}': expected {shape:?}, found {}", input_name(call, input), call.shape(input)))
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

    fn eval(&self, x: &[Option<&[f64]>], call: &Call) -> OpResult<Vec<Vec<f64>>> {
        let [bytes, scales] =
            [BYTES, SCALES].map(|i| x[i].expect("a required input is present: arity is checked first"));
        let given = |input: usize| x.get(input).copied().flatten();
        let few = |bytes: &[f64], at: usize| {
            let per = 8 / self.bits;
            f64::from(bytes[at / per] as u32 >> (at % per * self.bits) & ((1 << self.bits) - 1))
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

    fn nodes(&self, b: &mut dyn Build, call: &Call, x: &[Option<ValueId>]) -> OpResult<ValueId> {
        let &Weights { n, k, bits, block, blocks, dtype } = self;
        let bytes = reshape(b, required(x, BYTES), &[n, blocks * block * bits / 8])?;
        let whole = unpacked(b, bytes, bits)?;
        let numbers = b.cast(whole, dtype)?;
        let zero = match given(x, ZEROS) {
            None => b.scalar(self.middle(), dtype),
            Some(zero) if call.dtype(ZEROS) == DType::U8 => {
                let zero = reshape(b, zero, &[n, self.zero_bytes()])?;
                let zero = unpacked(b, zero, bits)?;
                let zero = b.slice(zero, 1, 0, blocks)?;
                b.cast(zero, dtype)?
            }
            Some(zero) => reshape(b, zero, &[n, blocks])?,
        };
        // The parameter of each number: that of its block, or of the group that lists it.
        let mut parameters = [zero, reshape(b, required(x, SCALES), &[n, blocks])?];
        let shape = if call.has(GROUPS) { [n, k, 1] } else { [n, blocks, block] };
        for parameter in parameters.iter_mut() {
            if b.fact(*parameter).shape.is_empty() {
                continue;
            }
            if let Some(groups) = given(x, GROUPS) {
                let groups = b.slice(groups, 0, 0, k)?;
                *parameter = b.op("Gather", &[*parameter, groups], Attrs::new().with("axis", 1))?;
            }
            *parameter = reshape(b, *parameter, &[n, shape[1], 1])?;
        }
        let numbers = if call.has(GROUPS) { b.slice(numbers, 1, 0, k)? } else { numbers };
        let numbers = reshape(b, numbers, &shape)?;
        let centred = binary(b, "Sub", numbers, parameters[0])?;
        let weights = binary(b, "Mul", centred, parameters[1])?;
        let weights = reshape(b, weights, &[n, shape[1] * shape[2]])?;
        b.slice(weights, 1, 0, k)
    }
}

fn few_bits(b: &mut dyn Build, call: &Call, x: &[Option<ValueId>]) -> OpResult<Vec<ValueId>> {
    if call.int("weight_prepacked", 0)? != 0 {
        return Err(
            "attribute 'weight_prepacked': expected 0, found another: weights come as the specification has them"
                .into(),
        );
    }
    call.int("accuracy_level", 0)?;
    let kept = call.attrs.iter().filter(|(name, _)| BLOCKS.contains(name));
    let attrs = kept.fold(Attrs::new(), |attrs, (name, value)| attrs.with(name, value.clone()));
    let mut inputs = x[1..x.len().min(5)].to_vec();
    while inputs.last() == Some(&None) {
        inputs.pop();
    }
    let weights = b.node("plimsoll.Weights", &inputs, attrs)?;
    let weights = b.cast(weights, call.dtype(0))?;
    let weights = transpose(b, weights, &[1, 0])?;
    let y = binary(b, "MatMul", required(x, 0), weights)?;
    Ok(vec![given(x, 5).map_or(Ok(y), |bias| binary(b, "Add", y, bias))?])
}
