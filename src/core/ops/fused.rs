//! Rows of ONNX Runtime's domain that its optimizer fuses from several operators.

use super::compose::{channels_first, channels_last, composed};
use super::{broadcasts_to, ensure, expect_dtype, find, same_float};
use crate::dtype::DType;
use crate::op::{Args, Attr, Attrs, Call, Lower, Nodes, OpDef, OpResult, Sample, Var, inputs, names};

const GEMM: &[&str] = names![activation activation_alpha activation_beta activation_gamma alpha beta transA transB];
const CONV: &[&str] = names![activation activation_params auto_pad dilations group kernel_shape pads strides];
const GROUP: &[&str] = names![activation channels_last epsilon groups];

pub(super) static OPS: &[OpDef] = &[
    composed(
        "FusedMatMul",
        "alpha A' B', where A' and B' may have their last axes swapped, and their first one put before the last",
        inputs![A B],
        |_, call, x| product(call, x),
    )
    .sample(|s| s.floats(&[&[3, 4], &[4, 5]]).attr("alpha", 0.5))
    .attrs(names![alpha transA transB transBatchA transBatchB]),
    composed(
        "TransposeMatMul",
        "FusedMatMul by its older name, without swaps of first axes",
        inputs![A B],
        |_, call, x| product(call, x),
    )
    .sample(|s| s.floats(&[&[4, 3], &[4, 5]]).attr("transA", 1).attr("alpha", 0.5))
    .attrs(names![alpha transA transB]),
    composed(
        "BiasSoftmax",
        "Softmax, over `axis` and all behind it together, of the sum of the data and a bias that broadcasts to them",
        inputs![data bias],
        |_, call, x| {
            let shape = call.shape(0);
            broadcasts_to(call, 1, shape)?;
            call.int("is_inner_broadcast", 0)?;
            let (axis, sum) = (call.axis("axis", 1, shape)?, x[0] + x[1]);
            if axis + 1 == shape.len() {
                return Ok(vec![sum.softmax(-1)]);
            }
            let rows = [&shape[..axis], &[shape[axis..].iter().product()]].concat();
            Ok(vec![sum.shaped(&rows).softmax(-1).shaped(shape)])
        },
    )
    .sample(|s| s.floats(&[&[2, 3, 4], &[2, 1, 4]]).attr("axis", 2).attr("is_inner_broadcast", 1))
    .attrs(names![axis is_inner_broadcast]),
    composed("FusedGemm", "An activation of Gemm", inputs![A B C?], |b, call, x| {
        let y = b.op("Gemm", x.0, known("Gemm", call));
        let names = ["activation_alpha", "activation_beta", "activation_gamma"];
        let given = names.iter().filter(|&&name| call.attrs.get(name).is_some());
        let parameters = given.map(|name| call.float(name, 0.0)).collect::<OpResult<Vec<_>>>()?;
        Ok(vec![activated(call, y, &parameters)?])
    })
    .sample(|s| s.floats(&[&[3, 4], &[4, 5], &[5]]).attr("activation", "Relu").attr("alpha", 0.5).attr("beta", 2.0))
    .attrs(GEMM),
    composed("FusedConv", "An activation of Conv, to which Z may be added before", inputs![X W B? Z?], |b, call, x| {
        let y = b.op("Conv", &x.0[..x.0.len().min(3)], known("Conv", call));
        let y = x.given(3).map_or(y, |z| y + z);
        let parameters = call.floats("activation_params")?.unwrap_or_default();
        Ok(vec![activated(call, y, &parameters)?])
    })
    .sample(|s| s.floats(&[&[1, 3, 7, 8], &[4, 3, 3, 3], &[4]]).attr("activation", "Relu").ints("pads", &[1, 1, 1, 1]))
    .attrs(CONV),
    composed("NhwcConv", "Conv of images and by filters whose channels stand last", inputs![X W B?], |b, call, x| {
        let rank = call.shape(0).len();
        if rank < 3 || call.shape(1).len() != rank {
            let (x, w) = (call.shape(0), call.shape(1));
            return Err(format!("expected images and filters of one rank, 3 or more, found {x} and {w}"));
        }
        let inputs = [Some(channels_first(x[0], rank)), Some(channels_first(x[1], rank)), x.given(2)];
        Ok(vec![channels_last(b.op("Conv", &inputs, call.attrs.clone()), rank)])
    })
    .sample(|s| s.floats(&[&[1, 9, 2], &[3, 3, 2]]).attr("auto_pad", "SAME_UPPER").ints("dilations", &[2]))
    .attrs(names![auto_pad dilations group kernel_shape pads strides]),
    composed(
        "NhwcFusedConv",
        "FusedConv of images, and with Z, whose channels stand last; the filters are those of Conv",
        inputs![X W B? Z?],
        |b, call, x| {
            let rank = call.shape(0).len();
            ensure(rank >= 3, || format!("input 'X': expected a batch of images, found {}", call.shape(0)))?;
            let inputs = [Some(channels_first(x[0], rank)), x.given(1), x.given(2)];
            let y = channels_last(b.op("Conv", &inputs, known("Conv", call)), rank);
            let y = x.given(3).map_or(y, |z| y + z);
            let parameters = call.floats("activation_params")?.unwrap_or_default();
            Ok(vec![activated(call, y, &parameters)?])
        },
    )
    .sample(|s| {
        let s = s.floats(&[&[1, 7, 8, 3], &[4, 3, 3, 3], &[4], &[1, 7, 8, 4]]);
        s.attr("activation", "Relu").ints("pads", &[1, 1, 1, 1])
    })
    .attrs(CONV),
    composed("BiasAdd", "The sum X + bias + skip", inputs![X bias skip], |_, _, x| Ok(vec![x[0] + x[1] + x[2]]))
        .sample(|s| s.floats(&[&[2, 3, 4], &[4], &[2, 3, 4]])),
    composed(
        "BiasSplitGelu",
        "The first half of X + bias along the last axis times Gelu of the second",
        inputs![X bias],
        |_, call, x| {
            let (axis, width) = match call.shape(0)[..] {
                [.., width] if width % 2 == 0 => (call.shape(0).len() - 1, width),
                _ => return Err(format!("input 'X': expected an even last axis, found {}", call.shape(0))),
            };
            let sum = x[0] + x[1];
            let (left, right) = (sum.part(axis, 0..width / 2), sum.part(axis, width / 2..width));
            Ok(vec![left * right.gelu()])
        },
    )
    .sample(|s| s.floats(&[&[2, 3, 8], &[8]])),
    composed(
        "EmbedLayerNormalization",
        "LayerNormalization of the sum of embeddings of words, positions and segments; how many words a \
         mask leaves, and the sum",
        inputs![
            input_ids segment_ids? word_embedding position_embedding segment_embedding? gamma beta mask? position_ids?
        ],
        |b, call, x| embedded(b, call, x, x.given(8), &|_, value| value),
    )
    .sample(|s| {
        s.input(DType::I32, &[2, 5], 0.0, 19.0)
            .input(DType::I32, &[2, 5], 0.0, 1.0)
            .floats(&[&[20, 8], &[6, 8], &[2, 8], &[8], &[8]])
            .input(DType::I32, &[2, 5], 0.0, 1.0)
            .attr("mask_index_type", 1)
            .attr("epsilon", 0.1)
            .element(DType::F32)
    })
    .attrs(names![epsilon mask_index_type]),
    composed(
        "QEmbedLayerNormalization",
        "EmbedLayerNormalization of tables and parameters of 8 bits, each with a scale and a zero point; without the sum",
        inputs![
            input_ids segment_ids? word_embedding position_embedding segment_embedding? gamma beta mask?
            word_embedding_scale position_embedding_scale segment_embedding_scale? gamma_scale beta_scale
            word_embedding_zero_point position_embedding_zero_point segment_embedding_zero_point? gamma_zero_point
            beta_zero_point
        ],
        |b, call, x| {
            // A scale stands 6 inputs behind what it scales, and a zero point 11.
            let number = |input: usize, value| {
                let parameters = [Some(value), x.given(input + 6), x.given(input + 11)];
                b.op("DequantizeLinear", &parameters, Attrs::new())
            };
            let mut outputs = embedded(b, call, x, None, &number)?;
            outputs.truncate(2);
            Ok(outputs)
        },
    )
    .sample(|s| {
        let table = |s: Sample, shape: &[usize]| s.input(DType::U8, shape, 0.0, 255.0);
        let s = s.input(DType::I32, &[2, 5], 0.0, 19.0).input(DType::I32, &[2, 5], 0.0, 1.0);
        let s = [&[20, 8][..], &[6, 8], &[2, 8], &[8], &[8]].into_iter().fold(s, table);
        let s = s.input(DType::I32, &[2, 5], 0.0, 1.0);
        let s = [0.0625, 0.03125, 0.015625, 0.0078125, 0.125].iter().fold(s, |s, &v| s.given(DType::F32, &[], &[v]));
        let s = [100.0, 120.0, 7.0, 50.0, 128.0].iter().fold(s, |s, &v| s.given(DType::U8, &[], &[v]));
        s.attr("epsilon", 0.1).element(DType::U8)
    })
    .attrs(names![epsilon]),
    composed(
        "GroupNorm",
        "GroupNormalization of channels that stand last unless `channels_last` is 0, and Swish of it where \
         `activation` is 1",
        inputs![X gamma beta],
        |_, call, x| Ok(vec![grouped(call, x, x[0])?]),
    )
    .sample(|s| s.floats(&[&[2, 4, 3, 6], &[6], &[6]]).attr("groups", 2).attr("activation", 1).attr("epsilon", 0.1))
    .attrs(GROUP),
    composed(
        "SkipGroupNorm",
        "GroupNorm of the sum of X, skip and bias, and the sum",
        inputs![X gamma beta skip bias?],
        |_, call, x| {
            let mut skip = x[3];
            if let ([n, c], rank @ 3..) = (&call.shape(3)[..], call.shape(0).len()) {
                let last = call.int("channels_last", 1)? != 0;
                let mut shape = vec![1; rank];
                (shape[0], shape[if last { rank - 1 } else { 1 }]) = (*n, *c);
                skip = skip.shaped(&shape);
            }
            let sum = x[0] + skip;
            let sum = x.given(4).map_or(sum, |bias| sum + bias);
            Ok(vec![grouped(call, x, sum)?, sum])
        },
    )
    .sample(|s| s.floats(&[&[2, 4, 3, 6], &[6], &[6], &[2, 6], &[6]]).attr("groups", 2).attr("activation", 1))
    .attrs(GROUP),
    composed(
        "CausalConvWithState",
        "Conv of each channel of [n, c, steps] by itself, behind the steps of the past, and Swish of it \
         where `activation` says so; and the steps that the next one needs",
        inputs![input weight bias? past_state?],
        causal,
    )
    .sample(|s| s.floats(&[&[2, 6, 5], &[6, 1, 4]]))
    .attrs(names![activation channels_last dilation ndim state_window]),
];

/// The call's attributes that a row knows.
fn known(row: &str, call: &Call) -> Attrs {
    call.attrs.only(find(row).map_or(&[], |row| row.attrs))
}

/// The function that `activation` names, with its parameters in the order of its attributes.
fn activated<'g>(call: &Call, y: Var<'g>, parameters: &[f64]) -> OpResult<Var<'g>> {
    let name = call.str("activation", "")?;
    if name.is_empty() {
        return Ok(y);
    }
    let row = find(name).filter(|row| matches!(row.lower, Lower::Map(_)) && row.arity().0 == 1);
    let row = row.ok_or_else(|| format!("attribute 'activation': expected a function of one value, found {name}"))?;
    let named = row.attrs.iter().zip(parameters);
    Ok(y.op(name, &[], named.fold(Attrs::new(), |attrs, (name, &value)| attrs.with(name, value))))
}

fn product<'g>(call: &Call, x: &Args<Var<'g>>) -> OpResult<Vec<Var<'g>>> {
    same_float(call)?;
    let mut operands = [x[0], x[1]];
    for (i, [batch, matrix]) in [["transBatchA", "transA"], ["transBatchB", "transB"]].into_iter().enumerate() {
        let rank = call.shape(i).len();
        let mut axes: Vec<usize> = (0..rank).collect();
        if call.int(batch, 0)? != 0 && rank > 2 {
            axes[..rank - 1].rotate_left(1);
        }
        if call.int(matrix, 0)? != 0 && rank > 1 {
            axes.swap(rank - 2, rank - 1);
        }
        if !axes.is_sorted() {
            operands[i] = operands[i].transpose(&axes);
        }
    }
    let y = operands[0].matmul(operands[1]);
    match call.float("alpha", 1.0)? {
        1.0 => Ok(vec![y]),
        alpha => Ok(vec![y * alpha]),
    }
}

/// The outputs of embeddings: `number` makes floats of what is read of an input.
fn embedded<'g>(
    b: Nodes<'g>,
    call: &Call,
    x: &Args<Var<'g>>,
    positions: Option<Var<'g>>,
    number: &dyn Fn(usize, Var<'g>) -> Var<'g>,
) -> OpResult<Vec<Var<'g>>> {
    let [batch, sequence] = call.shape(0)[..] else {
        return Err(format!("input 'input_ids': expected [batch, sequence], found {}", call.shape(0)));
    };
    let words = number(2, x[2].gather(x[0], 0));
    let positions = match positions {
        Some(ids) => x[3].gather(ids, 0),
        None if call.shape(3).first().is_some_and(|&n| n >= sequence) => x[3].part(0, 0..sequence),
        None => {
            return Err(format!(
                "input 'position_embedding': expected {sequence} or more rows, found {}",
                call.shape(3)
            ));
        }
    };
    let mut sum = words + number(3, positions);
    if let (Some(ids), Some(segments)) = (x.given(1), x.given(4)) {
        sum = sum + number(4, segments.gather(ids, 0));
    }
    let y = sum.layer_norm(number(5, x[5]), Some(number(6, x[6])), -1, call.float("epsilon", 1e-12)?);
    call.int("mask_index_type", 0)?;
    let left = match x.given(7) {
        Some(mask) => mask.reduce_sum(&[1], false),
        None => b.constant(DType::I32, [batch], || vec![0.0; batch]),
    };
    Ok(vec![y, left, sum])
}

fn grouped<'g>(call: &Call, x: &Args<Var<'g>>, sum: Var<'g>) -> OpResult<Var<'g>> {
    let dtype = expect_dtype(call, 0, "a float type", DType::is_float)?;
    for parameter in [1, 2] {
        expect_dtype(call, parameter, "a float type", DType::is_float)?;
    }
    let rank = call.shape(0).len();
    ensure(rank >= 3, || format!("input 'X': expected a batch of images, found {}", call.shape(0)))?;
    let last = call.int("channels_last", 1)? != 0;
    let first = if last { channels_first(sum, rank) } else { sum };
    let groups = call.attrs.get("groups").cloned().unwrap_or(Attr::Int(0));
    let attrs = Attrs::new().with("num_groups", groups).with("epsilon", call.float("epsilon", 1e-5)?);
    let y = first.op("GroupNormalization", &[x[1].cast(dtype), x[2].cast(dtype)], attrs);
    let y = if last { channels_last(y, rank) } else { y };
    match call.int("activation", 0)? {
        0 => Ok(y),
        1 => Ok(y.op("Swish", &[], Attrs::new())),
        other => Err(format!("attribute 'activation': expected 0 or 1, found {other}")),
    }
}

fn causal<'g>(b: Nodes<'g>, call: &Call, x: &Args<Var<'g>>) -> OpResult<Vec<Var<'g>>> {
    let (&[_, channels, _], &[_, _, kernel @ (1..)]) = (&call.shape(0)[..], &call.shape(1)[..]) else {
        let (x, w) = (call.shape(0), call.shape(1));
        return Err(format!("expected [n, c, steps] and a filter per channel, found {x} and {w}"));
    };
    for (name, only) in [("channels_last", 0), ("dilation", 1), ("ndim", 1), ("state_window", 0)] {
        let found = call.int(name, only)?;
        ensure(found == only, || format!("attribute '{name}': expected {only}, found {found}"))?;
    }
    let before = kernel - 1;
    let steps = match x.given(3) {
        Some(past) if past.shape()?.get(2) == Some(&before) => b.concat(&[past, x[0]], 2),
        Some(_) => return Err(format!("input 'past_state': expected {before} steps, found {}", call.shape(3))),
        None => x[0].op("Pad", &[], Attrs::new().with("pads", vec![0, 0, before as i64, 0, 0, 0])),
    };
    let y = b.op("Conv", &[Some(steps), x.0[1], x.given(2)], Attrs::new().with("group", channels as i64));
    let y = match call.str("activation", "none")? {
        "none" | "" => y,
        "silu" | "swish" => y.op("Swish", &[], Attrs::new()),
        other => return Err(format!("attribute 'activation': expected none, silu or swish, found {other}")),
    };
    let all = steps.shape()?[2];
    Ok(vec![y, steps.part(2, all - before..all)])
}
