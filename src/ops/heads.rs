//! Rows of ONNX Runtime's domain that fuse attention with its projections, biases, rotations, caches and masks.

use super::attention::with_heads;
use super::compose::{binary, composed, given, outputs, required, reshape, transpose, unary, with_number};
use super::{expect_dtype, input_name};
use crate::dtype::DType;
use crate::op::{Attrs, Build, Call, Fact, OpDef, OpResult, ValueId, hint, one, optional};
use std::ops::Range;

pub(super) static OPS: &[OpDef] = &[
    composed(
        "com.microsoft.RotaryEmbedding",
        "RotaryEmbedding of ONNX with the inputs in another order; the positions may be given by the first one",
        &[one("input"), one("position_ids"), one("cos_cache"), one("sin_cache")],
        rotated,
    )
    .sample(|s| s.floats(&[&[2, 3, 5, 8]]).input(DType::I64, &[2, 5], 0.0, 4.0).floats(&[&[9, 4], &[9, 4]]))
    .attrs(&["interleaved", "is_packed_batching", "num_heads", "rotary_embedding_dim", "scale"]),
    composed(
        "com.microsoft.Attention",
        "Attention of ONNX between projections of one input, with keys and values behind those of the past",
        &[
            one("input"),
            one("weights"),
            optional("bias"),
            optional("mask_index"),
            optional("past"),
            optional("attention_bias"),
        ],
        |b, call, x| {
            let projected = binary(b, "MatMul", required(x, 0), required(x, 1))?;
            let projected = added(b, projected, given(x, 2))?;
            attended(b, call, projected, [given(x, 3), given(x, 4), given(x, 5)])
        },
    )
    .sample(|s| s.floats(&[&[2, 4, 6], &[6, 24], &[24]]).attr("num_heads", 2).attr("unidirectional", 1))
    .attrs(&[
        "do_rotary",
        "mask_filter_value",
        "num_heads",
        "past_present_share_buffer",
        "qkv_hidden_sizes",
        "scale",
        "unidirectional",
    ]),
    composed(
        "QAttention",
        "com.microsoft.Attention whose projection is a product of small integers",
        &[
            one("input"),
            one("weight"),
            one("bias"),
            one("input_scale"),
            one("weight_scale"),
            optional("mask_index"),
            optional("input_zero_point"),
            optional("weight_zero_point"),
            optional("past"),
        ],
        |b, call, x| {
            let product = [Some(required(x, 0)), Some(required(x, 1)), Some(required(x, 3)), Some(required(x, 4))];
            let product = [&product[..], &[given(x, 6), given(x, 7), Some(required(x, 2))]].concat();
            let projected = b.node("MatMulIntegerToFloat", &product, Attrs::new())?;
            attended(b, call, projected, [given(x, 5), given(x, 8), None])
        },
    )
    .sample(|s| {
        s.input(DType::U8, &[2, 3, 6], 0.0, 255.0)
            .input(DType::I8, &[6, 24], -128.0, 127.0)
            .floats(&[&[24]])
            .given(DType::F32, &[], &[0.015625])
            .given(DType::F32, &[], &[0.0078125])
            .attr("num_heads", 2)
    })
    .attrs(&[
        "do_rotary",
        "mask_filter_value",
        "num_heads",
        "past_present_share_buffer",
        "scale",
        "unidirectional",
    ]),
    composed(
        "MultiHeadAttention",
        "Attention of ONNX of queries, keys and values that may be packed and have a bias; padding is \
         masked, and of more keys than queries the last query sees all where it is unidirectional",
        &[
            one("query"),
            optional("key"),
            optional("value"),
            optional("bias"),
            optional("key_padding_mask"),
            optional("attention_bias"),
            optional("past_key"),
            optional("past_value"),
        ],
        many,
    )
    .sample(|s| s.floats(&[&[2, 4, 8], &[2, 6, 8], &[2, 6, 12], &[28]]).attr("num_heads", 2))
    .attrs(&["mask_filter_value", "num_heads", "scale", "unidirectional"]),
    composed(
        "GroupQueryAttention",
        "Causal Attention of ONNX of queries of which several share keys, rotated, with caches of keys and \
         values that may be longer than what they hold; where the total length is not known ahead, the past \
         has room for the new tokens if it is as long as they are, and grows by them if not",
        &[
            one("query"),
            optional("key"),
            optional("value"),
            optional("past_key"),
            optional("past_value"),
            one("seqlens_k"),
            hint("total_sequence_length"),
            optional("cos_cache"),
            optional("sin_cache"),
            optional("position_ids"),
            optional("attention_bias"),
            optional("head_sink"),
        ],
        shared,
    )
    .sample(|s| {
        s.floats(&[&[1, 1, 32], &[1, 1, 16], &[1, 1, 16], &[1, 2, 9, 8], &[1, 2, 9, 8]])
            .given(DType::I32, &[1], &[6.0])
            .ints("total_sequence_length", &[7])
            .attr("num_heads", 4)
            .attr("kv_num_heads", 2)
    })
    .attrs(&[
        "do_rotary",
        "kv_num_heads",
        "local_window_size",
        "num_heads",
        "rotary_interleaved",
        "scale",
        "smooth_softmax",
        "softcap",
    ]),
];

const MOST_HEADS: usize = 1 << 16;

/// A number of heads. The bound keeps sums and products of such numbers from overflow.
fn count(call: &Call, name: &str) -> OpResult<usize> {
    let given = call.int(name, 0)?;
    let checked = usize::try_from(given).ok().filter(|n| (1..=MOST_HEADS).contains(n));
    checked.ok_or_else(|| format!("attribute '{name}': expected 1 to {MOST_HEADS}, found {given}"))
}

/// `[batch, sequence, width]` of an input.
fn rows(call: &Call, input: usize) -> OpResult<[usize; 3]> {
    let (name, shape) = (call.op.inputs[input].name, call.shape(input));
    shape[..].try_into().map_err(|_| format!("input '{name}': expected [batch, sequence, width], found {shape}"))
}

fn refuse(call: &Call, names: &[&str]) -> OpResult<()> {
    match names.iter().find(|name| call.int(name, 0).is_ok_and(|given| given > 0)) {
        Some(name) => Err(format!("attribute '{name}': expected 0, found a value that is not supported")),
        None => Ok(()),
    }
}

fn whole(b: &mut dyn Build, shape: &[usize], numbers: Range<usize>) -> OpResult<ValueId> {
    b.numbers(DType::I64, shape, numbers.start as f64)
}

fn added(b: &mut dyn Build, x: ValueId, bias: Option<ValueId>) -> OpResult<ValueId> {
    bias.map_or(Ok(x), |bias| binary(b, "Add", x, bias))
}

/// The attributes of ONNX's Attention. A scale of 0 means none.
fn attributes(call: &Call, heads: [usize; 2], causal: bool) -> OpResult<Attrs> {
    let attrs = Attrs::new().with("q_num_heads", heads[0] as i64).with("kv_num_heads", heads[1] as i64);
    let attrs = attrs.with("is_causal", i64::from(causal));
    Ok(match call.float("scale", 0.0)? {
        0.0 => attrs,
        scale => attrs.with("scale", scale),
    })
}

fn rotated(b: &mut dyn Build, call: &Call, x: &[Option<ValueId>]) -> OpResult<Vec<ValueId>> {
    refuse(call, &["is_packed_batching"])?;
    // ONNX Runtime's kernels accept a scale and ignore it.
    call.float("scale", 1.0)?;
    let &[_, columns] = &call.shape(2)[..] else {
        return Err(format!("input 'cos_cache': expected [positions, pairs], found {}", call.shape(2)));
    };
    let mut heads = call.int("num_heads", 0)?;
    let (batch, sequence) = match call.shape(0)[..] {
        [batch, sequence, width] => {
            if heads == 0 {
                heads = (width / (2 * columns).max(1)) as i64;
            }
            (batch, sequence)
        }
        [batch, _, sequence, _] => (batch, sequence),
        _ => {
            return Err(format!(
                "input 'input': expected [batch, sequence, width] or heads before, found {}",
                call.shape(0)
            ));
        }
    };
    let mut ids = required(x, 1);
    if call.shape(1).len() < 2 {
        let places = whole(b, &[1, sequence], 0..sequence)?;
        let first = b.cast(ids, DType::I64)?;
        ids = binary(b, "Add", first, places)?;
        ids = b.op("Expand", &[ids], Attrs::new().with("shape", vec![batch as i64, sequence as i64]))?;
    }
    let attrs = Attrs::new().with("num_heads", heads).with("interleaved", call.int("interleaved", 0)?);
    let attrs = attrs.with("rotary_embedding_dim", call.int("rotary_embedding_dim", 0)?);
    Ok(vec![b.op("RotaryEmbedding", &[required(x, 0), required(x, 2), required(x, 3), ids], attrs)?])
}

/// The values that a mask adds to scores `[batch, heads, queries, keys]`: 0, or `mask_filter_value` for a hidden key.
///
/// A mask lists a truth per key, or per query and key, or the number of visible keys of each row. After these numbers
/// it may list where the visible keys of each row begin, or where rows would begin without padding.
fn hidden(
    b: &mut dyn Build,
    call: &Call,
    mask: ValueId,
    [batch, queries, keys]: [usize; 3],
    dtype: DType,
) -> OpResult<ValueId> {
    let shape = b.fact(mask).shape;
    let row = |b: &mut dyn Build, mask, from| {
        let part = b.slice(mask, 0, from, from + batch)?;
        let part = b.cast(part, DType::I64)?;
        reshape(b, part, &[batch, 1, 1, 1])
    };
    let seen = match shape[..] {
        [n] if n == batch || n == 2 * batch || n == 3 * batch + 2 => {
            let (end, places) = (row(b, mask, 0)?, whole(b, &[keys], 0..keys)?);
            let before = binary(b, "Less", places, end)?;
            if n == 2 * batch {
                let start = row(b, mask, batch)?;
                let behind = binary(b, "GreaterOrEqual", places, start)?;
                binary(b, "And", before, behind)?
            } else {
                before
            }
        }
        [n, k] if n == batch && k == keys => reshape(b, mask, &[batch, 1, 1, keys])?,
        [n, q, k] if n == batch && q == queries && k == keys => reshape(b, mask, &[batch, 1, queries, keys])?,
        [n, 1, most, k] if n == batch && most == k && k >= keys && keys >= queries => {
            let rows = b.slice(mask, 2, keys - queries, keys)?;
            b.slice(rows, 3, 0, keys)?
        }
        _ => {
            return Err(format!(
                "expected a mask of {batch} times {keys} keys, or of {queries} queries as well, found {shape}"
            ));
        }
    };
    let (seen, zero) = (b.cast(seen, DType::Bool)?, b.scalar(0.0, dtype));
    let never = b.scalar(call.float("mask_filter_value", -10000.0)?, dtype);
    b.op("Where", &[seen, zero, never], Attrs::new())
}

/// Attention of queries, keys and values that are packed side by side. The second output is the past keys and values
/// followed by the new ones.
fn attended(
    b: &mut dyn Build,
    call: &Call,
    projected: ValueId,
    [mask, past, bias]: [Option<ValueId>; 3],
) -> OpResult<Vec<ValueId>> {
    refuse(call, &["do_rotary", "past_present_share_buffer"])?;
    let heads = count(call, "num_heads")?;
    let fact = b.fact(projected);
    let [batch, queries, width] = fact.shape[..] else {
        return Err(format!("input 'input': expected [batch, sequence, width], found {}", call.shape(0)));
    };
    let third = (width / 3) as i64;
    let sizes = call.ints("qkv_hidden_sizes")?.unwrap_or_default();
    let sizes = if sizes.is_empty() { vec![third; 3] } else { sizes.to_vec() };
    if sizes.len() != 3
        || sizes.iter().any(|&n| n < 0)
        || sizes.iter().try_fold(0i64, |sum, &n| sum.checked_add(n)) != Some(width as i64)
    {
        return Err(format!("expected queries, keys and values of {sizes:?} elements, found {width} in all"));
    }
    let mut inputs = Vec::new();
    let mut from = 0;
    for size in sizes {
        inputs.push(Some(b.slice(projected, 2, from, from + size as usize)?));
        from += size as usize;
    }
    let mut keys = queries;
    let mut caches = [None; 2];
    if let Some(past) = past {
        let &[2, n, h, before, width] = &b.fact(past).shape[..] else {
            return Err(format!("input 'past': expected [2, batch, heads, sequence, width], found {}", b.fact(past)));
        };
        keys += before;
        for (i, cache) in caches.iter_mut().enumerate() {
            let part = b.slice(past, 0, i, i + 1)?;
            *cache = Some(reshape(b, part, &[n, h, before, width])?);
        }
    }
    // A mask of one truth for all keys hides none of them from the others.
    let mask = mask.filter(|&mask| !matches!(b.fact(mask).shape[..], [n, 1] if n == batch || n == 1));
    let mask = match mask {
        Some(mask) => {
            let hidden = hidden(b, call, mask, [batch, queries, keys], fact.dtype)
                .map_err(|what| format!("input 'mask_index': {what}"))?;
            Some(added(b, hidden, bias)?)
        }
        None => bias,
    };
    inputs.extend([mask, caches[0], caches[1]]);
    let attrs = attributes(call, [heads; 2], call.int("unidirectional", 0)? != 0)?;
    let y = outputs(b, "Attention", &inputs, attrs)?;
    let mut presents = [y[1], y[2]];
    for present in &mut presents {
        *present = b.op("Unsqueeze", &[*present], Attrs::new().with("axes", vec![0]))?;
    }
    // Keys and values of different widths have no common present.
    if b.fact(presents[0]) != b.fact(presents[1]) {
        return Ok(vec![y[0]]);
    }
    Ok(vec![y[0], b.op("Concat", &presents, Attrs::new().with("axis", 0))?])
}

/// Splits an input that packs several parts per head, each as `[batch, sequence, heads width]`.
fn unpacked(b: &mut dyn Build, value: ValueId, parts: usize) -> OpResult<Vec<ValueId>> {
    let shape = b.fact(value).shape;
    let &[batch, sequence, heads, found, width] = &shape[..] else {
        return Err(format!("expected [batch, sequence, heads, {parts}, width], found {shape}"));
    };
    if found != parts {
        return Err(format!("expected [batch, sequence, heads, {parts}, width], found {shape}"));
    }
    let part = |i| {
        let part = b.slice(value, 3, i, i + 1)?;
        reshape(b, part, &[batch, sequence, heads * width])
    };
    (0..parts).map(part).collect()
}

/// Joins both masks: `mask` where keys are seen, minus infinity elsewhere.
fn shown(b: &mut dyn Build, seen: ValueId, mask: Option<ValueId>, dtype: DType) -> OpResult<ValueId> {
    let Some(mask) = mask else { return Ok(seen) };
    let never = b.scalar(f64::NEG_INFINITY, dtype);
    b.op("Where", &[seen, mask, never], Attrs::new())
}

fn many(b: &mut dyn Build, call: &Call, x: &[Option<ValueId>]) -> OpResult<Vec<ValueId>> {
    let heads = count(call, "num_heads")?;
    let dtype = expect_dtype(call, 0, "a float type", DType::is_float)?;
    let mut qkv = match (given(x, 1), given(x, 2)) {
        (None, None) => unpacked(b, required(x, 0), 3).map_err(|what| format!("input 'query': {what}"))?,
        (Some(key), None) => {
            let pair = unpacked(b, key, 2).map_err(|what| format!("input 'key': {what}"))?;
            vec![required(x, 0), pair[0], pair[1]]
        }
        (Some(key), Some(value)) => vec![required(x, 0), key, value],
        (None, Some(_)) => return Err("expected input 'key' before input 'value', found none".into()),
    };
    let facts: Vec<_> = qkv.iter().map(|&value| b.fact(value).shape).collect();
    let (&[batch, queries, _], Some(&new)) = (&facts[0][..], facts[1].iter().rev().nth(1)) else {
        return Err(format!("expected queries [batch, sequence, width] and keys, found {} and {}", facts[0], facts[1]));
    };
    if let Some(bias) = given(x, 3) {
        let mut from = 0;
        for (value, shape) in qkv.iter_mut().zip(&facts) {
            // Heads that stand apart come from another row, which has added its bias.
            let apart = shape.len() == 4;
            let width = if apart { shape[1] * shape[3] } else { shape.last().copied().unwrap_or(0) };
            if !apart {
                let part = b.slice(bias, 0, from, from + width)?;
                *value = binary(b, "Add", *value, part)?;
            }
            from += width;
        }
    }
    let before = if call.has(6) { call.shape(6).get(2).copied().unwrap_or(0) } else { 0 };
    let keys = before.checked_add(new).ok_or("more keys than can be counted")?;
    let mut mask = match given(x, 4) {
        Some(mask) => {
            let space = [batch, queries, keys];
            let hidden =
                hidden(b, call, mask, space, dtype).map_err(|what| format!("input 'key_padding_mask': {what}"))?;
            Some(added(b, hidden, given(x, 5))?)
        }
        None => given(x, 5),
    };
    let mut causal = call.int("unidirectional", 0)? != 0;
    if causal && queries < new {
        // If there are more keys than queries, the last query sees them all.
        causal = false;
        if queries > 1 {
            let (places, keys) = (whole(b, &[queries, 1], before..before + queries)?, whole(b, &[keys], 0..keys)?);
            let (up_to, last) = (binary(b, "LessOrEqual", keys, places)?, (before + queries - 1) as f64);
            let last = with_number(b, "GreaterOrEqual", places, last)?;
            let seen = binary(b, "Or", up_to, last)?;
            mask = Some(shown(b, seen, mask, dtype)?);
        }
    }
    let mut inputs: Vec<_> = qkv.into_iter().map(Some).collect();
    inputs.extend([mask, given(x, 6), given(x, 7)]);
    let mut y = outputs(b, "Attention", &inputs, attributes(call, [heads; 2], causal)?)?;
    y.truncate(3);
    Ok(y)
}

/// The positions of a GroupQueryAttention's new tokens, `[1 or batch, sequence]`: from `first` of each row, `[batch,
/// 1]`, or from 0.
fn places(b: &mut dyn Build, first: Option<ValueId>, sequence: usize) -> OpResult<ValueId> {
    let places = whole(b, &[1, sequence], 0..sequence)?;
    first.map_or(Ok(places), |first| binary(b, "Add", first, places))
}

const PAST: usize = 3;
const LENGTHS: usize = 5;
const COS: usize = 6;
const PLACES: usize = 8;
const BIAS: usize = 9;
const SINK: usize = 10;

/// The extents of a GroupQueryAttention.
struct Grouped {
    heads: [usize; 2],
    batch: usize,
    sequence: usize,
    /// Width of a head.
    width: usize,
    /// Keys that the past caches have room for, and the largest total number of keys.
    past: usize,
    total: usize,
}

impl Grouped {
    fn of(call: &Call) -> OpResult<Grouped> {
        let heads = [count(call, "num_heads")?, count(call, "kv_num_heads")?];
        let [batch, sequence, all] = rows(call, 0)?;
        let side_by_side = if call.has(1) { heads[0] } else { heads[0] + 2 * heads[1] };
        if !all.is_multiple_of(side_by_side) || call.has(1) != call.has(2) {
            return Err(format!(
                "input 'query': expected a multiple of {side_by_side} heads, with key and value or without, found {all}"
            ));
        }
        let past = if call.has(PAST) {
            *call.shape(PAST).get(2).ok_or("input 'past_key': expected [batch, heads, sequence, width]")?
        } else {
            0
        };
        let width = all / side_by_side;
        for cache in [PAST, PAST + 1] {
            let expected = Fact::new(call.dtype(0), [batch, heads[1], past, width]);
            let found = call.inputs.get(cache).copied().flatten();
            if found.is_some() != call.has(PAST) || found.is_some_and(|found| *found != expected) {
                let found = found.map_or("none".into(), Fact::to_string);
                return Err(format!("input '{}': expected {expected}, found {found}", input_name(call, cache)));
            }
        }
        let most = past.checked_add(sequence).ok_or("more keys than can be counted")?;
        let (given, total) = match call.inputs.get(BIAS).copied().flatten() {
            _ if call.attrs.get("total_sequence_length").is_some() => {
                ("total_sequence_length", usize::try_from(call.int("total_sequence_length", 0)?).ok())
            }
            Some(bias) => ("attention_bias", bias.shape.last().copied()),
            None => ("past_key", Some(if past >= sequence { past } else { most })),
        };
        let total = total.filter(|total| (sequence..=most).contains(total));
        let total =
            total.ok_or_else(|| format!("'{given}': expected {sequence} to {most} keys, found another number"))?;
        Ok(Grouped { heads, batch, sequence, width, past, total })
    }
}

fn shared(b: &mut dyn Build, call: &Call, x: &[Option<ValueId>]) -> OpResult<Vec<ValueId>> {
    let dtype = expect_dtype(call, 0, "a float type", DType::is_float)?;
    expect_dtype(call, LENGTHS, "i32", |d| d == DType::I32)?;
    let g = Grouped::of(call)?;
    // After a prompt, each row has its own number of keys, which may be less than the total.
    let mut first = None;
    if g.total > g.sequence {
        let lengths = b.cast(required(x, LENGTHS), DType::I64)?;
        let lengths = reshape(b, lengths, &[g.batch, 1])?;
        let mut place = with_number(b, "Sub", lengths, g.sequence as f64 - 1.0)?;
        if g.sequence > 1 {
            // It may be a prompt. The rows of a prompt begin at position 0, even if they are short.
            place = with_number(b, "Max", place, 0.0)?;
        }
        first = Some(place);
    }
    let [mut q, mut k, v] = match (given(x, 1), given(x, 2)) {
        (Some(k), Some(v)) => [required(x, 0), k, v],
        _ => {
            let (own, other) = (g.heads[0] * g.width, g.heads[1] * g.width);
            let part = |b: &mut dyn Build, from, to| b.slice(required(x, 0), 2, from, to);
            [part(b, 0, own)?, part(b, own, own + other)?, part(b, own + other, own + 2 * other)?]
        }
    };
    if call.int("do_rotary", 0)? != 0 {
        (q, k) = (turned(b, call, x, &g, first, q, g.heads[0])?, turned(b, call, x, &g, first, k, g.heads[1])?);
    }
    let attrs = attributes(call, g.heads, first.is_none())?.with("softcap", call.float("softcap", 0.0)?);
    let seen = seen(b, call, &g, first)?;
    let mask = match seen {
        Some(seen) => Some(shown(b, seen, given(x, BIAS), dtype)?),
        None => given(x, BIAS),
    };
    let past = [given(x, PAST), given(x, PAST + 1)];
    let attrs = attrs.with("qk_matmul_output_mode", 2);
    let mut y = match first {
        None => {
            let mut y = outputs(b, "Attention", &[Some(q), Some(k), Some(v), mask], attrs)?;
            for (present, past) in y[1..3].iter_mut().zip(past) {
                if let Some(past) = past.filter(|_| g.past > g.total) {
                    let rest = b.slice(past, 2, g.total, g.past)?;
                    *present = b.op("Concat", &[*present, rest], Attrs::new().with("axis", 2))?;
                }
            }
            y
        }
        Some(first) => {
            let before = reshape(b, first, &[g.batch])?;
            let (mut presents, mut visible) = ([k, v], [None; 2]);
            for (i, present) in presents.iter_mut().enumerate() {
                let mut cache = past[i]
                    .ok_or("expected input 'past_key' and input 'past_value' where tokens follow others, found none")?;
                if let Some(room) = g.total.checked_sub(g.past).filter(|&room| room > 0) {
                    let pads = [0, 0, 0, 0, 0, 0, room as i64, 0];
                    cache = b.op("Pad", &[cache], Attrs::new().with("pads", pads.to_vec()))?;
                }
                let new = with_heads(b, *present, &[g.heads[1]])?;
                *present = b.op("TensorScatter", &[cache, new, before], Attrs::new())?;
                visible[i] = Some(b.slice(*present, 2, 0, g.total)?);
            }
            let mut y = outputs(b, "Attention", &[Some(q), visible[0], visible[1], mask], attrs)?;
            y[1..3].copy_from_slice(&presents);
            y
        }
    };
    if call.has(SINK) || call.int("smooth_softmax", 0)? != 0 {
        y[0] = sunk(b, &g, y[0], y[3], given(x, SINK))?;
    }
    y.truncate(3);
    Ok(y)
}

/// Scales the result as if the softmax had one more score, of the head or 0, whose value is zero.
fn sunk(b: &mut dyn Build, g: &Grouped, y: ValueId, scores: ValueId, sink: Option<ValueId>) -> OpResult<ValueId> {
    let Fact { dtype, shape } = b.fact(y);
    let wide = if dtype == DType::F64 { dtype } else { DType::F32 };
    let scores = b.cast(scores, wide)?;
    let mut ahead = b.op("ReduceLogSumExp", &[scores], Attrs::new().with("axes", vec![3]).with("keepdims", 1))?;
    if let Some(sink) = sink {
        let sink = b.cast(sink, wide)?;
        let sink = reshape(b, sink, &[g.heads[0], 1, 1])?;
        ahead = binary(b, "Sub", ahead, sink)?;
    }
    let part = unary(b, "Sigmoid", ahead)?;
    let part = transpose(b, part, &[0, 2, 1, 3])?;
    let part = b.cast(part, dtype)?;
    let y = reshape(b, y, &[g.batch, g.sequence, g.heads[0], g.width])?;
    let y = binary(b, "Mul", y, part)?;
    reshape(b, y, &shape)
}

/// Rotates queries or keys by their positions.
fn turned(
    b: &mut dyn Build,
    call: &Call,
    x: &[Option<ValueId>],
    g: &Grouped,
    first: Option<ValueId>,
    value: ValueId,
    heads: usize,
) -> OpResult<ValueId> {
    let (Some(cos), Some(sin)) = (given(x, COS), given(x, COS + 1)) else {
        return Err("expected input 'cos_cache' and input 'sin_cache' where 'do_rotary' is 1, found none".into());
    };
    let ids = match given(x, PLACES) {
        Some(ids) if first.is_some() => ids,
        // In a prompt, all rows have the positions of the first.
        Some(ids) => {
            let (row, places) = (b.slice(ids, 0, 0, 1)?, places(b, None, g.sequence)?);
            let place = b.slice(row, 1, 0, 1)?;
            binary(b, "Add", places, place)?
        }
        None => places(b, first, g.sequence)?,
    };
    let ids = b.op("Expand", &[ids], Attrs::new().with("shape", &[g.batch, g.sequence][..]))?;
    let pairs = b.fact(cos).shape.last().copied().unwrap_or(0);
    let attrs = Attrs::new().with("num_heads", heads as i64).with("rotary_embedding_dim", 2 * pairs as i64);
    b.op("RotaryEmbedding", &[value, cos, sin, ids], attrs.with("interleaved", call.int("rotary_interleaved", 0)?))
}

/// The keys that each query sees, `[1 or batch, 1, sequence, total]`. `None` if the causal mask of Attention suffices.
fn seen(b: &mut dyn Build, call: &Call, g: &Grouped, first: Option<ValueId>) -> OpResult<Option<ValueId>> {
    let window = usize::try_from(call.int("local_window_size", -1)?).ok().filter(|&n| n < g.total);
    if window.is_none() && first.is_none() {
        return Ok(None);
    }
    let places = places(b, first, g.sequence)?;
    let rows = b.fact(places).shape[0];
    let places = reshape(b, places, &[rows, 1, g.sequence, 1])?;
    let keys = whole(b, &[g.total], 0..g.total)?;
    let mut seen = binary(b, "LessOrEqual", keys, places)?;
    if let Some(window) = window {
        let last = with_number(b, "Add", keys, window as f64)?;
        let near = binary(b, "Greater", last, places)?;
        seen = binary(b, "And", seen, near)?;
    }
    Ok(Some(seen))
}

#[cfg(test)]
mod tests {
    use crate::dtype::DType::*;
    use crate::op::Attrs;
    use crate::ops::tests::refused;

    #[test]
    fn caches_and_totals_fit() {
        let new = (F32, &[1, 2, 8][..]);
        let of = |value: &[usize], attrs: Attrs| {
            let inputs = [new, new, new, (F32, &[1, 1, 3, 8]), (F32, value), (I32, &[1])];
            refused("GroupQueryAttention", &inputs, &attrs.with("num_heads", 1).with("kv_num_heads", 1))
        };
        assert_eq!(of(&[1, 1, 4, 8], Attrs::new()), "input 'past_value': expected f32[1,1,3,8], found f32[1,1,4,8]");
        assert_eq!(
            of(&[1, 1, 3, 8], Attrs::new().with("total_sequence_length", 6)),
            "'total_sequence_length': expected 2 to 5 keys, found another number"
        );
    }
}
