//! Rows of ONNX Runtime's domain that fuse attention with its projections, biases, rotations, caches and masks.

use super::attention::with_heads;
use super::compose::composed;
use super::{ensure, expect_dtype, input_name};
use crate::dtype::DType;
use crate::op::{Args, Attrs, Call, Fact, Nodes, OpDef, OpResult, Var, inputs, names};
use crate::shape::Shape;

pub(super) static OPS: &[OpDef] = &[
    composed(
        "com.microsoft.RotaryEmbedding",
        "RotaryEmbedding of ONNX with the inputs in another order; the positions may be given by the first one",
        inputs![input position_ids cos_cache sin_cache],
        rotated,
    )
    .sample(|s| s.floats(&[&[2, 3, 5, 8]]).input(DType::I64, &[2, 5], 0.0, 4.0).floats(&[&[9, 4], &[9, 4]]))
    .attrs(names![interleaved is_packed_batching num_heads rotary_embedding_dim scale]),
    composed(
        "com.microsoft.Attention",
        "Attention of ONNX between projections of one input, with keys and values behind those of the past",
        inputs![input weights bias? mask_index? past? attention_bias?],
        |b, call, x| {
            let projected = added(x[0].matmul(x[1]), x.given(2));
            attended(b, call, projected, [x.given(3), x.given(4), x.given(5)])
        },
    )
    .sample(|s| s.floats(&[&[2, 4, 6], &[6, 24], &[24]]).attr("num_heads", 2).attr("unidirectional", 1))
    .attrs(names![
        do_rotary mask_filter_value num_heads past_present_share_buffer qkv_hidden_sizes scale unidirectional
    ]),
    composed(
        "QAttention",
        "com.microsoft.Attention whose projection is a product of small integers",
        inputs![input weight bias input_scale weight_scale mask_index? input_zero_point? weight_zero_point? past?],
        |b, call, x| {
            let product = [x.0[0], x.0[1], x.0[3], x.0[4], x.given(6), x.given(7), x.0[2]];
            let projected = b.op("MatMulIntegerToFloat", &product, Attrs::new());
            attended(b, call, projected, [x.given(5), x.given(8), None])
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
    .attrs(names![do_rotary mask_filter_value num_heads past_present_share_buffer scale unidirectional]),
    composed(
        "PackedAttention",
        "com.microsoft.Attention of the tokens of several sequences, one behind another without padding: a token sees those of its sequence",
        inputs![input weights bias token_offset cumulative_sequence_length],
        of_packed,
    )
    .sample(|s| {
        let s = s.floats(&[&[5, 6], &[6, 24], &[24]]).given(DType::I32, &[2, 3], &[0.0, 1.0, 3.0, 4.0, 5.0, 2.0]);
        s.given(DType::I32, &[3], &[0.0, 2.0, 5.0]).attr("num_heads", 2)
    })
    .attrs(names![num_heads qkv_hidden_sizes scale]),
    composed(
        "RestorePadding",
        "The tokens of several sequences at their places in [batch, sequence, width], and zeros elsewhere",
        inputs![input token_offset],
        |b, call, x| {
            let (&[tokens, width], &[batch, sequence]) = (&call.shape(0)[..], &call.shape(1)[..]) else {
                let (found, places) = (call.shape(0), call.shape(1));
                return Err(format!("expected [tokens, width] and [batch, sequence], found {found} and {places}"));
            };
            let rows = batch.saturating_mul(sequence);
            ensure(tokens <= rows, || format!("input 'input': expected at most {rows} tokens, found {tokens}"))?;
            let places = x[1].cast(DType::I64).shaped(&[rows]).part(0, 0..tokens).shaped(&[tokens, 1]);
            let zeros = b.scalar(0.0, call.dtype(0)).expand(&[rows, width]);
            Ok(vec![zeros.op("ScatterND", &[places, x[0]], Attrs::new()).shaped(&[batch, sequence, width])])
        },
    )
    .sample(|s| s.floats(&[&[4, 3]]).given(DType::I32, &[2, 3], &[0.0, 1.0, 3.0, 4.0, 2.0, 5.0])),
    composed(
        "MultiHeadAttention",
        "Attention of ONNX of queries, keys and values that may be packed and have a bias; padding is \
         masked, and of more keys than queries the last query sees all where it is unidirectional",
        inputs![query key? value? bias? key_padding_mask? attention_bias? past_key? past_value?],
        many,
    )
    .sample(|s| s.floats(&[&[2, 4, 8], &[2, 6, 8], &[2, 6, 12], &[28]]).attr("num_heads", 2))
    .attrs(names![mask_filter_value num_heads scale unidirectional]),
    composed(
        "GroupQueryAttention",
        "Causal Attention of ONNX of queries of which several share keys, rotated, with caches of keys and \
         values that may be longer than what they hold; where the total length is not known ahead, the past \
         has room for the new tokens if it is as long as they are, and grows by them if not",
        inputs![
            query key? value? past_key? past_value? seqlens_k total_sequence_length~ cos_cache? sin_cache?
            position_ids? attention_bias? head_sink?
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
    .attrs(names![do_rotary kv_num_heads local_window_size num_heads rotary_interleaved scale smooth_softmax softcap]),
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

/// The positions from `first` on.
fn places<'g>(b: Nodes<'g>, shape: &[usize], first: usize) -> Var<'g> {
    b.numbers(DType::I64, shape, first as f64)
}

fn added<'g>(x: Var<'g>, bias: Option<Var<'g>>) -> Var<'g> {
    bias.map_or(x, |bias| x + bias)
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

fn rotated<'g>(b: Nodes<'g>, call: &Call, x: &Args<Var<'g>>) -> OpResult<Vec<Var<'g>>> {
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
    let mut ids = x[1];
    if call.shape(1).len() < 2 {
        let places = places(b, &[1, sequence], 0);
        ids = (ids.cast(DType::I64) + places).expand(&[batch, sequence]);
    }
    let attrs = Attrs::new().with("num_heads", heads).with("interleaved", call.int("interleaved", 0)?);
    let attrs = attrs.with("rotary_embedding_dim", call.int("rotary_embedding_dim", 0)?);
    Ok(vec![x[0].op("RotaryEmbedding", &[x[2], x[3], ids], attrs)])
}

/// The values that a mask adds to scores `[batch, heads, queries, keys]`: 0, or `mask_filter_value` for a hidden key.
///
/// A mask lists a truth per key, or per query and key, or the number of visible keys of each row. After these numbers
/// it may list where the visible keys of each row begin, or where rows would begin without padding.
fn hidden<'g>(
    b: Nodes<'g>,
    call: &Call,
    mask: Var<'g>,
    [batch, queries, keys]: [usize; 3],
    dtype: DType,
) -> OpResult<Var<'g>> {
    let shape = mask.shape()?;
    let row = |from| mask.part(0, from..from + batch).cast(DType::I64).shaped(&[batch, 1, 1, 1]);
    let seen = match shape[..] {
        [n] if n == batch || n == 2 * batch || n == 3 * batch + 2 => {
            let (end, places) = (row(0), places(b, &[keys], 0));
            let before = places.less(end);
            if n == 2 * batch { before.and(places.greater_or_equal(row(batch))) } else { before }
        }
        [n, k] if n == batch && k == keys => mask.shaped(&[batch, 1, 1, keys]),
        [n, q, k] if n == batch && q == queries && k == keys => mask.shaped(&[batch, 1, queries, keys]),
        [n, 1, most, k] if n == batch && most == k && k >= keys && keys >= queries => {
            mask.part(2, keys - queries..keys).part(3, 0..keys)
        }
        _ => {
            return Err(format!(
                "expected a mask of {batch} times {keys} keys, or of {queries} queries as well, found {shape}"
            ));
        }
    };
    let (seen, zero) = (seen.cast(DType::Bool), b.scalar(0.0, dtype));
    Ok(seen.select(zero, call.float("mask_filter_value", -10000.0)?))
}

/// Attention of queries, keys and values that are packed side by side. The second output is the past keys and values
/// followed by the new ones.
fn attended<'g>(
    b: Nodes<'g>,
    call: &Call,
    projected: Var<'g>,
    [mask, past, bias]: [Option<Var<'g>>; 3],
) -> OpResult<Vec<Var<'g>>> {
    refuse(call, &["do_rotary", "past_present_share_buffer"])?;
    let heads = count(call, "num_heads")?;
    let fact = projected.fact()?;
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
        inputs.push(Some(projected.part(2, from..from + size as usize)));
        from += size as usize;
    }
    let mut keys = queries;
    let mut caches = [None; 2];
    if let Some(past) = past {
        let &[2, n, h, before, width] = &past.shape()?[..] else {
            return Err(format!("input 'past': expected [2, batch, heads, sequence, width], found {}", past.fact()?));
        };
        keys += before;
        caches = [0, 1].map(|i| Some(past.part(0, i..i + 1).shaped(&[n, h, before, width])));
    }
    // A mask of one truth for all keys hides none of them from the others.
    let one_for_all = |shape: &[usize]| matches!(*shape, [n, 1] if n == batch || n == 1);
    let mask = match mask {
        Some(mask) if !one_for_all(&mask.shape()?) => {
            let hidden = hidden(b, call, mask, [batch, queries, keys], fact.dtype)
                .map_err(|what| format!("input 'mask_index': {what}"))?;
            Some(added(hidden, bias))
        }
        _ => bias,
    };
    inputs.extend([mask, caches[0], caches[1]]);
    let attrs = attributes(call, [heads; 2], call.int("unidirectional", 0)? != 0)?;
    let [y, key, value] = b.outputs("Attention", &inputs, attrs);
    let presents = [key, value].map(|present| present.unsqueeze(&[0]));
    // Keys and values of different widths have no common present.
    if key.fact()? != value.fact()? {
        return Ok(vec![y]);
    }
    Ok(vec![y, b.concat(&presents, 0)])
}

/// Attention among tokens that stand one behind another, sequence by sequence.
fn of_packed<'g>(b: Nodes<'g>, call: &Call, x: &Args<Var<'g>>) -> OpResult<Vec<Var<'g>>> {
    let (&[tokens, _], &[ends]) = (&call.shape(0)[..], &call.shape(4)[..]) else {
        let (found, ends) = (call.shape(0), call.shape(4));
        return Err(format!(
            "expected [tokens, width] and the end of each sequence behind a 0, found {found} and {ends}"
        ));
    };
    ensure(ends > 0, || "input 'cumulative_sequence_length': expected a 0 and ends, found no elements".to_owned())?;
    let projected = added(x[0].matmul(x[1]), x.given(2)).unsqueeze(&[0]);
    // The number of a token's sequence is how many end before it.
    let ends = x[4].cast(DType::I64).part(0, 1..ends).unsqueeze(&[0]);
    let before = places(b, &[tokens, 1], 0).greater_or_equal(ends).cast(DType::I32).reduce_sum(&[1], false);
    let alike = before.unsqueeze(&[1]).equal(before.unsqueeze(&[0]));
    let mask = alike.select(b.scalar(0.0, call.dtype(0)), f64::NEG_INFINITY);
    let y = attended(b, call, projected, [None, None, Some(mask)])?[0];
    Ok(vec![y.squeeze(&[0])])
}

/// Splits an input that packs several parts per head, each as `[batch, sequence, heads width]`.
fn unpacked<const N: usize>(value: Var) -> OpResult<[Var; N]> {
    match value.shape()?[..] {
        [batch, sequence, heads, found, width] if found == N => {
            let part = |i| value.part(3, i..i + 1).shaped(&[batch, sequence, heads * width]);
            Ok(std::array::from_fn(part))
        }
        ref shape => Err(format!("expected [batch, sequence, heads, {N}, width], found {}", Shape::new(shape))),
    }
}

/// Joins both masks: `mask` where keys are seen, minus infinity elsewhere.
fn shown<'g>(seen: Var<'g>, mask: Option<Var<'g>>) -> Var<'g> {
    mask.map_or(seen, |mask| seen.select(mask, f64::NEG_INFINITY))
}

fn many<'g>(b: Nodes<'g>, call: &Call, x: &Args<Var<'g>>) -> OpResult<Vec<Var<'g>>> {
    let heads = count(call, "num_heads")?;
    let dtype = expect_dtype(call, 0, "a float type", DType::is_float)?;
    let mut qkv = match (x.given(1), x.given(2)) {
        (None, None) => unpacked(x[0]).map_err(|what| format!("input 'query': {what}"))?,
        (Some(key), None) => {
            let [key, value] = unpacked(key).map_err(|what| format!("input 'key': {what}"))?;
            [x[0], key, value]
        }
        (Some(key), Some(value)) => [x[0], key, value],
        (None, Some(_)) => return Err("expected input 'key' before input 'value', found none".into()),
    };
    let facts = qkv.iter().map(|value| value.shape()).collect::<OpResult<Vec<_>>>()?;
    let (&[batch, queries, _], Some(&new)) = (&facts[0][..], facts[1].iter().rev().nth(1)) else {
        return Err(format!("expected queries [batch, sequence, width] and keys, found {} and {}", facts[0], facts[1]));
    };
    if let Some(bias) = x.given(3) {
        let mut from = 0;
        for (value, shape) in qkv.iter_mut().zip(&facts) {
            // Heads that stand apart come from another row, which has added its bias.
            let apart = shape.len() == 4;
            let width = if apart { shape[1] * shape[3] } else { shape.last().copied().unwrap_or(0) };
            if !apart {
                *value = *value + bias.part(0, from..from + width);
            }
            from += width;
        }
    }
    let before = if call.has(6) { call.shape(6).get(2).copied().unwrap_or(0) } else { 0 };
    let keys = before.checked_add(new).ok_or("more keys than can be counted")?;
    let mut mask = match x.given(4) {
        Some(mask) => {
            let space = [batch, queries, keys];
            let hidden =
                hidden(b, call, mask, space, dtype).map_err(|what| format!("input 'key_padding_mask': {what}"))?;
            Some(added(hidden, x.given(5)))
        }
        None => x.given(5),
    };
    let mut causal = call.int("unidirectional", 0)? != 0;
    if causal && queries < new {
        // If there are more keys than queries, the last query sees them all.
        causal = false;
        if queries > 1 {
            let (places, keys) = (places(b, &[queries, 1], before), places(b, &[keys], 0));
            let last = (before + queries - 1) as f64;
            mask = Some(shown(keys.less_or_equal(places).or(places.greater_or_equal(last)), mask));
        }
    }
    let inputs = [Some(qkv[0]), Some(qkv[1]), Some(qkv[2]), mask, x.given(6), x.given(7)];
    Ok(b.outputs::<3, _>("Attention", &inputs, attributes(call, [heads; 2], causal)?).into())
}

pub const PAST: usize = 3;
const LENGTHS: usize = 5;
pub const COS: usize = 6;
const PLACES: usize = 8;
const BIAS: usize = 9;
const SINK: usize = 10;

/// The input of a GroupQueryAttention that has the place of each row's last key, and the number of keys that there may be.
pub fn key_room(call: &Call) -> OpResult<(usize, usize)> {
    Ok((LENGTHS, Grouped::of(call)?.total))
}

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

fn shared<'g>(b: Nodes<'g>, call: &Call, x: &Args<Var<'g>>) -> OpResult<Vec<Var<'g>>> {
    expect_dtype(call, 0, "a float type", DType::is_float)?;
    expect_dtype(call, LENGTHS, "i32", |d| d == DType::I32)?;
    let g = Grouped::of(call)?;
    // After a prompt, each row has its own number of keys, which may be less than the total.
    let first = (g.total > g.sequence).then(|| {
        let place = x[LENGTHS].cast(DType::I64).shaped(&[g.batch, 1]) - (g.sequence as f64 - 1.0);
        // It may be a prompt. The rows of a prompt begin at position 0, even if they are short.
        if g.sequence > 1 { place.max(0.0) } else { place }
    });
    let [mut q, mut k, v] = match (x.given(1), x.given(2)) {
        (Some(k), Some(v)) => [x[0], k, v],
        _ => {
            let (own, other) = (g.heads[0] * g.width, g.heads[1] * g.width);
            [0..own, own..own + other, own + other..own + 2 * other].map(|range| x[0].part(2, range))
        }
    };
    if call.int("do_rotary", 0)? != 0 {
        q = rotated_heads(b, call, x, &g, first, q, g.heads[0])?;
        k = rotated_heads(b, call, x, &g, first, k, g.heads[1])?;
    }
    let attrs = attributes(call, g.heads, first.is_none())?.with("softcap", call.float("softcap", 0.0)?);
    let attrs = attrs.with("qk_matmul_output_mode", 2);
    let mask = match seen(b, call, &g, first)? {
        Some(seen) => Some(shown(seen, x.given(BIAS))),
        None => x.given(BIAS),
    };
    let past = [x.given(PAST), x.given(PAST + 1)];
    let [y, key, value, scores] = match first {
        None => {
            let [y, key, value, scores] = b.outputs("Attention", &[Some(q), Some(k), Some(v), mask], attrs);
            let longer = |present, past: Option<Var<'g>>| match past {
                // A prompt is written to the start of the caches.
                Some(past) if g.past > g.total => past.op("TensorScatter", &[present], Attrs::new()),
                _ => present,
            };
            [y, longer(key, past[0]), longer(value, past[1]), scores]
        }
        Some(first) => {
            let before = first.shaped(&[g.batch]);
            let cached = |new, past: Option<Var<'g>>| -> OpResult<Var<'g>> {
                let mut cache = past
                    .ok_or("expected input 'past_key' and input 'past_value' where tokens follow others, found none")?;
                if let Some(room) = g.total.checked_sub(g.past).filter(|&room| room > 0) {
                    let pads = [0, 0, 0, 0, 0, 0, room as i64, 0];
                    cache = cache.op("Pad", &[], Attrs::new().with("pads", pads.to_vec()));
                }
                Ok(cache.op("TensorScatter", &[with_heads(new, &[g.heads[1]])?, before], Attrs::new()))
            };
            let visible = |cache: Var<'g>| Some(cache.part(2, 0..g.total));
            let key = cached(k, past[0])?;
            let keys = visible(key);
            let value = cached(v, past[1])?;
            let [y, _, _, scores] = b.outputs("Attention", &[Some(q), keys, visible(value), mask], attrs);
            [y, key, value, scores]
        }
    };
    if call.has(SINK) || call.int("smooth_softmax", 0)? != 0 {
        return Ok(vec![sunk(&g, y, scores, x.given(SINK))?, key, value]);
    }
    Ok(vec![y, key, value])
}

/// Scales the result as if the softmax had one more score, of the head or 0, whose value is zero.
fn sunk<'g>(g: &Grouped, y: Var<'g>, scores: Var<'g>, sink: Option<Var<'g>>) -> OpResult<Var<'g>> {
    let Fact { dtype, shape } = y.fact()?;
    let wide = if dtype == DType::F64 { dtype } else { DType::F32 };
    let axes = Attrs::new().with("axes", vec![3]).with("keepdims", 1);
    let mut ahead = scores.cast(wide).op("ReduceLogSumExp", &[], axes);
    if let Some(sink) = sink {
        ahead = ahead - sink.cast(wide).shaped(&[g.heads[0], 1, 1]);
    }
    let part = ahead.sigmoid().transpose(&[0, 2, 1, 3]).cast(dtype);
    Ok((y.shaped(&[g.batch, g.sequence, g.heads[0], g.width]) * part).shaped(&shape))
}

/// The positions of a GroupQueryAttention's new tokens, `[1 or batch, sequence]`: from `first` of each row, `[batch,
/// 1]`, or from 0.
fn new_places<'g>(b: Nodes<'g>, first: Option<Var<'g>>, sequence: usize) -> Var<'g> {
    let places = places(b, &[1, sequence], 0);
    first.map_or(places, |first| first + places)
}

/// Rotates queries or keys by their positions.
fn rotated_heads<'g>(
    b: Nodes<'g>,
    call: &Call,
    x: &Args<Var<'g>>,
    g: &Grouped,
    first: Option<Var<'g>>,
    value: Var<'g>,
    heads: usize,
) -> OpResult<Var<'g>> {
    let (Some(cos), Some(sin)) = (x.given(COS), x.given(COS + 1)) else {
        return Err("expected input 'cos_cache' and input 'sin_cache' where 'do_rotary' is 1, found none".into());
    };
    let ids = match x.given(PLACES) {
        Some(ids) if first.is_some() => ids,
        // In a prompt, all rows have the positions of the first.
        Some(ids) => {
            let (row, places) = (ids.part(0, 0..1), new_places(b, None, g.sequence));
            places + row.part(1, 0..1)
        }
        None => new_places(b, first, g.sequence),
    };
    let ids = ids.expand(&[g.batch, g.sequence]);
    let pairs = cos.shape()?.last().copied().unwrap_or(0);
    let attrs = Attrs::new().with("num_heads", heads as i64).with("rotary_embedding_dim", 2 * pairs as i64);
    let attrs = attrs.with("interleaved", call.int("rotary_interleaved", 0)?);
    Ok(value.op("RotaryEmbedding", &[cos, sin, ids], attrs))
}

/// The keys that each query sees, `[1 or batch, 1, sequence, total]`. `None` if the causal mask of Attention suffices.
fn seen<'g>(b: Nodes<'g>, call: &Call, g: &Grouped, first: Option<Var<'g>>) -> OpResult<Option<Var<'g>>> {
    // Whether it hides a key must not depend on how many a cache has: graphs of several lengths have the same nodes.
    let window = usize::try_from(call.int("local_window_size", -1)?).ok();
    let window = window.filter(|&n| n > 0 && (n < g.total || call.has(PAST)));
    if window.is_none() && first.is_none() {
        return Ok(None);
    }
    let new = new_places(b, first, g.sequence);
    let new = new.shaped(&[new.shape()?[0], 1, g.sequence, 1]);
    let keys = places(b, &[g.total], 0);
    let seen = keys.less_or_equal(new);
    Ok(Some(match window {
        Some(window) => seen.and((keys + window as f64).greater(new)),
        None => seen,
    }))
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
