//! Rows of transformers: attention as a whole, and the rotation that tells queries and keys where they stand.
//!
//! Query heads that share keys are an axis of their own. Keys and values are broadcast along it, not copied:
//!
//! ```text
//! Q [b, kv, group, s, d] --x scale--.
//!                                MatMul --softcap, mask--> Softmax --.
//! past, K [b, kv, 1, t, d] ---T-----'                             MatMul --> Y [b, kv, group, s, v]
//! past, V [b, kv, 1, t, v] -------------------------------------------'
//! ```
//!
//! A masked score is minus infinity where an output shows it. WGSL has no infinities: there it is the lowest number.

use super::{along, ensure, expect_dtype, expect_shape, expect_type_of, indices, position, same_float};
use crate::dtype::DType;
use crate::op::{Args, Attrs, Call, Eval, Fact, Lower, Nodes, OpDef, OpResult, Var, inputs, names};
use crate::shape::{Access, Shape};
use std::ops::Range;

const ATTENTION: &[&str] =
    names![is_causal kv_num_heads q_num_heads qk_matmul_output_mode scale softcap softmax_precision];

pub(super) static OPS: &[OpDef] = &[
    OpDef::new(
        "Attention",
        "Softmax of masked products of queries and keys, times values; also keys and values behind those \
         of the past, and the products",
        inputs![Q K V attn_mask? past_key? past_value? nonpad_kv_seqlen?],
        infer,
        Eval::Tensor(eval),
        Lower::Decompose(nodes),
    )
    .sample(|s| s.floats(&[&[2, 3, 5, 8], &[2, 3, 7, 8], &[2, 3, 7, 6]]))
    .attrs(ATTENTION),
    OpDef::new(
        "RotaryEmbedding",
        "Pairs of elements of each head rotated by the angles of their position, whose cosines and sines \
         are given",
        inputs![X cos_cache sin_cache position_ids?],
        |call| Rotation::of(call).map(|_| vec![call.fact(0).clone()]),
        Eval::Tensor(rotate),
        Lower::Decompose(rotation),
    )
    .sample(|s| s.floats(&[&[2, 3, 5, 8], &[2, 5, 4], &[2, 5, 4]]))
    .attrs(names![interleaved num_heads rotary_embedding_dim]),
];

const Q: usize = 0;
const MASK: usize = 3;
const PAST: usize = 4;
/// The number of keys of each row of the batch. Later keys hold no data.
const LENGTHS: usize = 6;

/// The extents of an attention.
struct Extents {
    batch: usize,
    /// Heads of keys and values, and how many query heads share each.
    heads: usize,
    group: usize,
    queries: usize,
    /// Keys that came before, and all of them.
    past: usize,
    keys: usize,
    /// Elements of a query or key, and of a value.
    width: usize,
    value: usize,
}

impl Extents {
    fn of(call: &Call) -> OpResult<Extents> {
        let [batch, q_heads, queries, width] = headed(call, 0, "q_num_heads")?;
        let [k_batch, heads, new, k_width] = headed(call, 1, "kv_num_heads")?;
        let [v_batch, v_heads, v_new, value] = headed(call, 2, "kv_num_heads")?;
        if [k_batch, v_batch] != [batch; 2] || k_width != width || [v_heads, v_new] != [heads, new] {
            let (q, k, v) = (call.shape(0), call.shape(1), call.shape(2));
            return Err(format!(
                "expected queries, keys and values of one batch that fit each other, found {q}, {k} and {v}"
            ));
        }
        if heads == 0 || q_heads == 0 || !q_heads.is_multiple_of(heads) {
            return Err(format!("expected a multiple of the {heads} heads of input 'K', found {q_heads} of input 'Q'"));
        }
        let mut past = 0;
        if call.has(PAST) || call.has(PAST + 1) {
            past = if call.has(PAST) { call.shape(PAST).get(2).copied().unwrap_or(0) } else { 0 };
            for (i, width) in [width, value].into_iter().enumerate() {
                let expected = Shape::new([batch, heads, past, width]);
                if !call.has(PAST + i) || *call.shape(PAST + i) != expected {
                    let found = if call.has(PAST + i) { call.shape(PAST + i).to_string() } else { "none".into() };
                    return Err(format!(
                        "input '{}': expected {expected}, found {found}",
                        call.op.inputs[PAST + i].name
                    ));
                }
            }
        }
        let keys = past.checked_add(new).ok_or("more keys than can be counted")?;
        Ok(Extents { batch, heads, group: q_heads / heads, queries, past, keys, width, value })
    }

    /// Shape of the scores: `[batch, query heads, queries, keys]`.
    fn scores(&self) -> Shape {
        Shape::new([self.batch, self.heads * self.group, self.queries, self.keys])
    }

    /// Extents of the head axes: one axis if every query head has its own keys, otherwise the key heads and the query
    /// heads that share each.
    fn split(&self) -> Vec<usize> {
        if self.group == 1 { vec![self.heads] } else { vec![self.heads, self.group] }
    }
}

/// The extents `[batch, heads, sequence, width]` of an input of that shape or of `[batch, sequence, heads width]`.
fn headed(call: &Call, input: usize, heads: &str) -> OpResult<[usize; 4]> {
    let name = call.op.inputs[input].name;
    let given = call.int(heads, 0)?;
    match (&call.shape(input)[..], usize::try_from(given)) {
        (&[b, h, s, d], Ok(n)) if n == 0 || n == h => Ok([b, h, s, d]),
        (&[b, s, all], Ok(n @ 1..)) if all.is_multiple_of(n) => Ok([b, n, s, all / n]),
        _ => Err(format!(
            "input '{name}': expected [batch, heads, sequence, width], or [batch, sequence, heads width] where '{heads}' says how many, \
             found {} with {given}",
            call.shape(input)
        )),
    }
}

fn infer(call: &Call) -> OpResult<Vec<Fact>> {
    let dtype = expect_dtype(call, Q, "a float type", DType::is_float)?;
    for input in [1, 2, PAST, PAST + 1] {
        expect_type_of(call, input, dtype, "input 'Q'")?;
    }
    let e = Extents::of(call)?;
    if call.has(MASK) {
        let mask = call.fact(MASK);
        ensure(mask.dtype == DType::Bool || mask.dtype.is_number(), || {
            format!("input 'attn_mask': expected bool, a float or integer type, found {mask}")
        })?;
        let mut shape = mask.shape.clone();
        if call.has(LENGTHS) && shape.last().is_some_and(|&keys| keys > 1 && keys < e.keys) {
            // Keys beyond the mask's last one are not seen.
            *shape.last_mut().expect("it has a last axis") = e.keys;
        }
        if Shape::broadcast([&e.scores(), &shape]).as_ref() != Some(&e.scores()) {
            return Err(format!("input 'attn_mask': expected a shape that broadcasts to {}, found {mask}", e.scores()));
        }
    }
    if call.has(LENGTHS) {
        let lengths = call.fact(LENGTHS);
        ensure(lengths.dtype.is_int() && lengths.shape[..] == [e.batch] && !call.has(PAST), || {
            format!("input 'nonpad_kv_seqlen': expected integers [{}] and no past, found {lengths}", e.batch)
        })?;
    }
    scale(call, &e)?;
    call.float("softcap", 0.0)?;
    call.int("is_causal", 0)?;
    precision(call)?;
    if !(0..4).contains(&call.int("qk_matmul_output_mode", 0)?) {
        return Err("attribute 'qk_matmul_output_mode': expected 0 to 3".into());
    }
    let y = match call.shape(Q).len() {
        3 => Shape::new([e.batch, e.queries, e.heads * e.group * e.value]),
        _ => Shape::new([e.batch, e.heads * e.group, e.queries, e.value]),
    };
    let present = |width| Fact::new(dtype, [e.batch, e.heads, e.keys, width]);
    Ok(vec![Fact::new(dtype, y), present(e.width), present(e.value), Fact::new(dtype, e.scores())])
}

/// The input of an Attention that has the number of each row's keys, and the most that it may be.
pub fn keys_seen(call: &Call) -> OpResult<(usize, usize)> {
    Ok((LENGTHS, Extents::of(call)?.keys))
}

fn scale(call: &Call, e: &Extents) -> OpResult<f64> {
    call.float("scale", 1.0 / (e.width.max(1) as f64).sqrt())
}

/// The type of the softmax.
fn precision(call: &Call) -> OpResult<DType> {
    match call.int("softmax_precision", 0)? {
        0 => Ok(call.dtype(Q)),
        code => DType::from_onnx(code)
            .filter(|d| d.is_float())
            .ok_or_else(|| format!("attribute 'softmax_precision': expected a floating-point type, found {code}")),
    }
}

fn eval(x: &Args<&[f64]>, call: &Call) -> OpResult<Vec<Vec<f64>>> {
    let e = Extents::of(call)?;
    let value = |input: usize| x.given(input);
    // Of [batch, heads, sequence, width], wherever the heads stand.
    let at = |input: usize, [b, h, s, i]: [usize; 4]| {
        let (values, shape) = (value(input).unwrap_or_default(), call.shape(input));
        match shape.len() {
            3 => values[position(&[b, s, h * if input == 2 { e.value } else { e.width } + i], shape)],
            _ => values[position(&[b, h, s, i], shape)],
        }
    };
    let present = |input: usize, width: usize| -> Vec<f64> {
        let shape = Shape::new([e.batch, e.heads, e.keys, width]);
        let element = |index: Vec<usize>| match index[2].checked_sub(e.past) {
            Some(t) => at(input, [index[0], index[1], t, index[3]]),
            None => at(PAST + input - 1, [index[0], index[1], index[2], index[3]]),
        };
        indices(&shape).map(element).collect()
    };
    let (k, v) = (present(1, e.width), present(2, e.value));
    let masked_keys = if call.has(MASK) { call.shape(MASK).last().copied().filter(|&n| n > 1) } else { None };
    let masked_keys = masked_keys.unwrap_or(e.keys);
    let mask = value(MASK).map(|m| {
        let mut seen = e.scores();
        *seen.last_mut().expect("scores have keys") = masked_keys;
        (m, Access::contiguous(call.shape(MASK).clone()).broadcast(&seen))
    });
    let (scale, softcap) = (scale(call, &e)?, call.float("softcap", 0.0)?);
    let (causal, mode) = (call.int("is_causal", 0)? != 0, call.int("qk_matmul_output_mode", 0)?);
    let (mut y, mut shown) = (vec![0.0; e.batch * e.heads * e.group * e.queries * e.value], Vec::new());
    let out = match call.shape(Q).len() {
        3 => Shape::new([e.batch, e.queries, e.heads * e.group, e.value]),
        _ => Shape::new([e.batch, e.heads * e.group, e.queries, e.value]),
    };
    for row in indices(&Shape::new([e.batch, e.heads * e.group, e.queries])) {
        let [b, h, s] = [row[0], row[1], row[2]];
        let key = |t: usize, width: usize| ((b * e.heads + h / e.group) * e.keys + t) * width;
        let dot = |t: usize| (0..e.width).map(|i| at(Q, [b, h, s, i]) * k[key(t, e.width) + i]).sum::<f64>();
        let raw: Vec<f64> = (0..e.keys).map(|t| dot(t) * scale).collect();
        let capped: Vec<f64> =
            raw.iter().map(|&v| if softcap > 0.0 { softcap * (v / softcap).tanh() } else { v }).collect();
        let masked = |t: usize| {
            let bias = mask.as_ref().filter(|_| t < masked_keys).map_or(0.0, |(m, access)| {
                let m = m[access.at(&[b, h, s, t]) as usize];
                if call.dtype(MASK) != DType::Bool {
                    m
                } else if m != 0.0 {
                    0.0
                } else {
                    f64::NEG_INFINITY
                }
            });
            // The last query stands at the last key.
            let hidden = match (value(LENGTHS), causal) {
                (Some(lengths), true) => (t + e.queries) as f64 > s as f64 + lengths[b],
                (Some(lengths), false) => t as f64 >= lengths[b],
                (None, causal) => causal && t > s + e.past,
            };
            if hidden || t >= masked_keys { f64::NEG_INFINITY } else { capped[t] + bias }
        };
        let scores: Vec<f64> = (0..e.keys).map(masked).collect();
        let most = scores.iter().copied().fold(f64::MIN, f64::max);
        let sum: f64 = scores.iter().map(|v| (v - most).exp()).sum();
        let weights: Vec<f64> = scores.iter().map(|v| if sum == 0.0 { 0.0 } else { (v - most).exp() / sum }).collect();
        for i in 0..e.value {
            let place = if call.shape(Q).len() == 3 { [b, s, h, i] } else { [b, h, s, i] };
            y[position(&place, &out)] = (0..e.keys).map(|t| weights[t] * v[key(t, e.value) + i]).sum();
        }
        shown.extend(&[&raw, &capped, &scores, &weights][mode as usize][..]);
    }
    Ok(vec![y, k, v, shown])
}

/// An input as `[batch, heads.., sequence, width]`. Its heads may be within the last axis.
pub(super) fn with_heads<'g>(value: Var<'g>, heads: &[usize]) -> OpResult<Var<'g>> {
    let shape = value.shape()?;
    let (count, all) = (heads.len(), heads.iter().product::<usize>());
    let [batch, sequence, width] = shape[..] else {
        return Ok(value.shaped(&[&shape[..1], heads, &shape[2..]].concat()));
    };
    let perm: Vec<usize> = [0].into_iter().chain(2..2 + count).chain([1, 2 + count]).collect();
    Ok(value.shaped(&[&[batch, sequence], heads, &[width / all.max(1)]].concat()).transpose(&perm))
}

/// A mask for all keys: those beyond its last one are not seen.
fn whole_mask<'g>(b: Nodes<'g>, mask: Var<'g>, keys: usize) -> OpResult<Var<'g>> {
    let fact = mask.fact()?;
    let Some(&last) = fact.shape.last().filter(|&&last| last > 1 && last < keys) else { return Ok(mask) };
    let mut shape = fact.shape.clone();
    *shape.last_mut().ok_or("a mask without axes")? = keys - last;
    let unseen = if fact.dtype == DType::Bool { 0.0 } else { f64::NEG_INFINITY };
    Ok(b.concat(&[mask, b.scalar(unseen, fact.dtype).expand(&shape)], -1))
}

fn nodes<'g>(b: Nodes<'g>, call: &Call, x: &Args<Var<'g>>) -> OpResult<Vec<Var<'g>>> {
    let (e, dtype) = (Extents::of(call)?, call.dtype(Q));
    let heads = e.split();
    let rank = heads.len() + 3;
    let q = with_heads(x[Q], &heads)?;
    let mut presents = [with_heads(x[1], &[e.heads])?, with_heads(x[2], &[e.heads])?];
    for (i, present) in presents.iter_mut().enumerate() {
        if let Some(past) = x.given(PAST + i) {
            *present = b.concat(&[past, *present], 2);
        }
    }
    let [keys, values] = presents.map(|present| if e.group > 1 { present.unsqueeze(&[2]) } else { present });
    let transposed: Vec<usize> = (0..rank - 2).chain([rank - 1, rank - 2]).collect();
    let raw = (q * b.scalar(scale(call, &e)?, dtype)).matmul(keys.transpose(&transposed));
    let capped = match call.float("softcap", 0.0)? {
        cap if cap > 0.0 => {
            let cap = b.scalar(cap, dtype);
            (raw / cap).tanh() * cap
        }
        _ => raw,
    };
    let added = |mask: Var<'g>| if call.dtype(MASK) == DType::Bool { mask } else { mask.cast(dtype) };
    let mask = x.given(MASK).map(|mask| whole_mask(b, added(mask), e.keys)).transpose()?;
    let scores = masked(b, call, &e, [mask, x.given(LENGTHS)], capped)?;
    let wide = scores.cast(precision(call)?);
    let mut weights = wide.softmax(-1);
    if call.has(MASK) || call.has(LENGTHS) {
        // Queries that see no key have no softmax, and take nothing of the values.
        let (low, zero) = (wide.like(f64::NEG_INFINITY), wide.like(0.0));
        let unseen = wide.reduce_max(&[rank as i64 - 1], true).equal(low);
        weights = unseen.select(zero, weights);
    }
    let weights = weights.cast(dtype);
    let y = weights.matmul(values);
    let y = match call.shape(Q).len() {
        3 => {
            let perm: Vec<usize> = [0, rank - 2].into_iter().chain(1..rank - 2).chain([rank - 1]).collect();
            y.transpose(&perm).shaped(&[e.batch, e.queries, e.heads * e.group * e.value])
        }
        _ => y.shaped(&[e.batch, e.heads * e.group, e.queries, e.value]),
    };
    let shown = [raw, capped, scores, weights][call.int("qk_matmul_output_mode", 0)? as usize];
    Ok(vec![y, presents[0], presents[1], shown.shaped(&e.scores())])
}

/// The scores with a mask applied: minus infinity where the mask hides a key.
fn masked<'g>(
    b: Nodes<'g>,
    call: &Call,
    e: &Extents,
    [mask, lengths]: [Option<Var<'g>>; 2],
    mut scores: Var<'g>,
) -> OpResult<Var<'g>> {
    let mut allowed = None;
    if let Some(mut mask) = mask {
        let Fact { dtype, shape } = mask.fact()?;
        if e.group > 1 && shape.len() > 2 {
            let at = shape.len() - 3;
            let heads = if shape[at] == 1 { vec![1, 1] } else { e.split() };
            mask = mask.shaped(&[&shape[..at], &heads, &shape[at + 1..]].concat());
        }
        match dtype {
            DType::Bool => allowed = Some(mask),
            _ => scores = scores + mask,
        }
    }
    if let Some(seen) = seen(b, call, e, lengths)? {
        allowed = Some(allowed.map_or(seen, |mask| mask.and(seen)));
    }
    Ok(allowed.map_or(scores, |allowed| allowed.select(scores, f64::NEG_INFINITY)))
}

/// The keys that each query sees: those that exist, and if the row is causal, at or before the query.
fn seen<'g>(b: Nodes<'g>, call: &Call, e: &Extents, lengths: Option<Var<'g>>) -> OpResult<Option<Var<'g>>> {
    let causal = call.int("is_causal", 0)? != 0;
    if !causal && lengths.is_none() {
        return Ok(None);
    }
    let places = |shape: [usize; 2], first: f64| b.numbers(DType::I32, shape, first);
    let keys = places([1, e.keys], 0.0);
    let Some(lengths) = lengths else {
        return Ok(Some(keys.less_or_equal(places([e.queries, 1], e.past as f64))));
    };
    // The last query stands at the last key.
    let queries = places([e.queries, 1], 1.0 - e.queries as f64);
    let ends = lengths.cast(DType::I32).shaped(&along(e.batch, e.split().len() + 3));
    Ok(Some(keys.less(if causal { ends + queries } else { ends })))
}

/// A rotation of `[batch, heads, sequence, width]` or `[batch, sequence, heads width]`.
struct Rotation {
    heads: usize,
    width: usize,
    /// Pairs to rotate at the start of each head; the elements behind them stay.
    pairs: usize,
    /// True if the members of a pair are neighbours, false if they are half the elements apart.
    interleaved: bool,
}

impl Rotation {
    fn of(call: &Call) -> OpResult<Rotation> {
        same_float(&Call { inputs: &call.inputs[..3], ..*call })?;
        let [batch, heads, sequence, width] = headed(call, 0, "num_heads")?;
        let rotated = match call.int("rotary_embedding_dim", 0)? {
            0 => width,
            n => usize::try_from(n).unwrap_or(usize::MAX),
        };
        ensure(rotated <= width && rotated.is_multiple_of(2), || {
            format!("expected an even number of at most {width} elements that are rotated, found {rotated}")
        })?;
        let pairs = rotated / 2;
        for input in [1, 2] {
            let fits = match (call.has(3), &call.shape(input)[..]) {
                (true, &[positions, n]) => n == pairs && positions > 0 && call.shape(input) == call.shape(1),
                (false, found) => *found == [batch, sequence, pairs],
                _ => false,
            };
            let expected = if call.has(3) { format!("[.., {pairs}]") } else { format!("[{batch},{sequence},{pairs}]") };
            expect_shape(call, input, fits, format_args!("{expected}"))?;
        }
        ensure(!call.has(3) || call.dtype(3).is_int() && call.shape(3)[..] == [batch, sequence], || {
            format!("input 'position_ids': expected integers [{batch},{sequence}], found {}", call.fact(3))
        })?;
        Ok(Rotation { heads, width, pairs, interleaved: call.int("interleaved", 0)? != 0 })
    }
}

fn rotate(x: &Args<&[f64]>, call: &Call) -> OpResult<Vec<Vec<f64>>> {
    let r = Rotation::of(call)?;
    let [data, cos, sin] = [0, 1, 2].map(|i| x[i]);
    let [_, heads, sequence, _] = headed(call, 0, "num_heads")?;
    let mut y = data.to_vec();
    for (at, start) in (0..data.len()).step_by(r.width.max(1)).enumerate() {
        // Of [batch, sequence].
        let row = match call.shape(0).len() {
            3 => at / heads,
            _ => at / heads / sequence * sequence + at % sequence,
        };
        // As Gather has it: from the end where negative, and held within the caches.
        let positions = (cos.len() / r.pairs.max(1)) as f64;
        let place = x.given(3).map_or(row as f64, |ids| ids[row]);
        let place = if place < 0.0 { place + positions } else { place };
        let angle = place.clamp(0.0, positions.max(1.0) - 1.0) as usize * r.pairs;
        for pair in 0..r.pairs {
            let (i, j) = if r.interleaved { (2 * pair, 2 * pair + 1) } else { (pair, pair + r.pairs) };
            let (a, b, c, s) = (data[start + i], data[start + j], cos[angle + pair], sin[angle + pair]);
            (y[start + i], y[start + j]) = (c * a - s * b, s * a + c * b);
        }
    }
    Ok(vec![y])
}

fn rotation<'g>(b: Nodes<'g>, call: &Call, x: &Args<Var<'g>>) -> OpResult<Vec<Var<'g>>> {
    let r = Rotation::of(call)?;
    let shape = call.shape(0);
    let (data, heads) = match shape[..] {
        [batch, sequence, _] => (x[0].shaped(&[batch, sequence, r.heads, r.width]), 2),
        _ => (x[0], 1),
    };
    let angle = |cache: Var<'g>| x.given(3).map_or(cache, |ids| cache.gather(ids, 0)).unsqueeze(&[heads]);
    let (cos, sin) = (angle(x[1]), angle(x[2]));
    let part = |range: Range<usize>, step: i64| data.op("Slice", &[], Attrs::span(3, range).with("steps", vec![step]));
    let rotated = 2 * r.pairs;
    let (first, second) = if r.interleaved {
        (part(0..rotated, 2), part(1..rotated, 2))
    } else {
        (part(0..r.pairs, 1), part(r.pairs..rotated, 1))
    };
    let mut parts = vec![cos * first - sin * second, sin * first + cos * second];
    if r.interleaved {
        let mut whole = parts[0].shape()?;
        whole[3] = rotated;
        let pairs: Vec<_> = parts.iter().map(|part| part.unsqueeze(&[4])).collect();
        parts = vec![b.concat(&pairs, 4).shaped(&whole)];
    }
    if rotated < r.width {
        parts.push(part(rotated..r.width, 1));
    }
    Ok(vec![b.concat(&parts, 3).shaped(shape)])
}

#[cfg(test)]
mod tests {
    use crate::dtype::DType::*;
    use crate::op::Attrs;
    use crate::ops::tests::{Input, eval, outputs, refused};

    #[test]
    fn queries_take_the_values_of_the_keys_that_they_see() {
        // Two queries, a key before them and two of their own; all products are equal.
        let zeros = (F32, &[1, 1, 2, 1][..], &[0.0, 0.0][..]);
        let (values, past) = ((F32, &[1, 1, 2, 1][..], &[4.0, 9.0][..]), (F32, &[1, 1, 1, 1][..], &[2.0][..]));
        let mask = (Bool, &[2, 3][..], &[1.0, 1.0, 1.0, 1.0, 0.0, 1.0][..]);
        let inputs: [Input; 6] = [zeros, zeros, values, mask, past, past];
        let found = outputs("Attention", &inputs, &Attrs::new().with("is_causal", 1).with("qk_matmul_output_mode", 3));
        assert_eq!(found[0], ("f32[1,1,2,1]".into(), vec![3.0, 5.5]));
        assert_eq!(found[2], ("f32[1,1,3,1]".into(), vec![2.0, 4.0, 9.0]));
        assert_eq!(found[3], ("f32[1,1,2,3]".into(), vec![0.5, 0.5, 0.0, 0.5, 0.0, 0.5]));
        let none = (Bool, &[1][..], &[0.0][..]);
        assert_eq!(outputs("Attention", &[zeros, zeros, values, none], &Attrs::new())[0].1, [0.0, 0.0]);
    }

    #[test]
    fn pairs_stand_apart_or_side_by_side() {
        let (x, right) = ((F32, &[1, 1, 1, 4][..], &[1.0, 2.0, 3.0, 4.0][..]), (F32, &[1, 1, 2][..], &[0.0, 1.0][..]));
        let turn = (F32, &[1, 1, 2][..], &[1.0, 0.0][..]);
        let of = |attrs| eval("RotaryEmbedding", &[x, right, turn], &attrs).1;
        assert_eq!(of(Attrs::new()), [-3.0, 2.0, 1.0, 4.0]);
        assert_eq!(of(Attrs::new().with("interleaved", 1)), [-2.0, 1.0, 3.0, 4.0]);
        let found =
            refused("RotaryEmbedding", &[(F32, &[1, 1, 4]), (F32, &[1, 1, 2]), (F32, &[1, 1, 2])], &Attrs::new());
        assert!(found.ends_with("found [1,1,4] with 0"), "{found}");
    }

    #[test]
    fn heads_and_masks_fit() {
        let q = (F32, &[1, 3, 2, 4][..]);
        let found = refused("Attention", &[q, (F32, &[1, 2, 2, 4]), (F32, &[1, 2, 2, 4])], &Attrs::new());
        assert_eq!(found, "expected a multiple of the 2 heads of input 'K', found 3 of input 'Q'");
        let found = refused("Attention", &[q, q, q, (F32, &[2, 3])], &Attrs::new());
        assert_eq!(found, "input 'attn_mask': expected a shape that broadcasts to [1,3,2,2], found f32[2,3]");
    }
}
