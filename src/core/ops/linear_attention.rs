//! Attention without a softmax: a matrix per head holds what has been read so far.

use super::compose::composed;
use super::repeat::{Inputs, repeat};
use super::{ensure, expect_shape, same_float};
use crate::dtype::DType;
use crate::op::{Args, Call, Nodes, OpDef, OpResult, Var, inputs, names};

const MOST_HEADS: i64 = 1 << 16;

/// Indices of inputs.
const PAST: usize = 3;
const DECAY: usize = 4;
const BETA: usize = 5;

pub(super) static OPS: &[OpDef] = &[composed(
    "LinearAttention",
    "Attention by a state [keys, values] per head, along a sequence: what the queries read from it, and the last state",
    inputs![query key value past_state? decay? beta?],
    attend,
)
.sample(|s| {
    s.floats(&[&[2, 3, 4 * 3], &[2, 3, 2 * 3], &[2, 3, 2 * 5], &[2, 2, 3, 5]])
        .input(DType::F32, &[2, 3, 2 * 3], -0.5, 0.0)
        .input(DType::F32, &[2, 3, 2], 0.0, 1.0)
        .attr("q_num_heads", 4)
        .attr("kv_num_heads", 2)
})
.attrs(names![chunk_size kv_num_heads q_num_heads scale update_rule])];

/// The extents of a call.
struct Heads {
    batch: usize,
    places: usize,
    /// Heads of keys and values, and the heads of queries that share one of these.
    heads: usize,
    sharing: usize,
    keys: usize,
    values: usize,
}

/// How a place changes the state.
#[derive(Clone, Copy)]
struct Rule {
    /// The state decays first.
    decays: bool,
    /// What the state says of the key is taken from the value.
    corrects: bool,
}

const RULES: &[(&str, Rule)] = &[
    ("gated_delta", Rule { decays: true, corrects: true }),
    ("linear", Rule { decays: false, corrects: false }),
    ("gated", Rule { decays: true, corrects: false }),
    ("delta", Rule { decays: false, corrects: true }),
];

impl Heads {
    fn of(call: &Call) -> OpResult<Heads> {
        let count = |name: &str| match call.int(name, 0)? {
            n if (1..=MOST_HEADS).contains(&n) => Ok(n as usize),
            n => Err(format!("attribute '{name}': expected 1 to {MOST_HEADS} heads, found {n}")),
        };
        let (all, heads) = (count("q_num_heads")?, count("kv_num_heads")?);
        ensure(all.is_multiple_of(heads), || {
            format!("attribute 'q_num_heads': expected a multiple of {heads} as 'kv_num_heads' says, found {all}")
        })?;
        let &[batch, places, width] = &call.shape(0)[..] else {
            return Err(format!("input 'query': expected [batch, places, heads x keys], found {}", call.shape(0)));
        };
        ensure(places > 0, || format!("input 'query': expected a place, found {}", call.shape(0)))?;
        let per_head = |input: usize, of: usize| {
            let width = *call.shape(input).last().unwrap_or(&0);
            expect_shape(
                call,
                input,
                call.shape(input)[..] == [batch, places, width] && width.is_multiple_of(of),
                format_args!("[{batch}, {places}, a multiple of {of}]"),
            )?;
            Ok::<_, String>(width / of)
        };
        let (keys, values) = (per_head(1, heads)?, per_head(2, heads)?);
        expect_shape(call, 0, width == all * keys, format_args!("[{batch}, {places}, {}]", all * keys))?;
        Ok(Heads { batch, places, heads, sharing: all / heads, keys, values })
    }
}

fn attend<'g>(b: Nodes<'g>, call: &Call, x: &Args<Var<'g>>) -> OpResult<Vec<Var<'g>>> {
    let dtype = same_float(call)?;
    let h = Heads::of(call)?;
    let Heads { batch, places, heads, sharing, keys, values } = h;
    let rule = call.choice("update_rule", RULES)?;
    let decay = gate(call, x, &h, rule.decays, DECAY, &[heads * keys, heads])?;
    let rate = gate(call, x, &h, rule.corrects, BETA, &[heads, 1])?;
    // States add up many products: f16 would lose them.
    let wide = dtype.unhalved();
    let state = match x.given(PAST) {
        Some(past) => {
            let expected = [batch, heads, keys, values];
            expect_shape(call, PAST, call.shape(PAST)[..] == expected, format_args!("{expected:?}"))?;
            past.cast(wide)
        }
        None => b.scalar(0.0, wide).expand(&[batch, heads, keys, values]),
    };
    let scale = match call.float("scale", 0.0)? {
        0.0 => 1.0 / (keys as f64).sqrt(),
        scale => scale,
    };
    // One place of all rows after another: [places, batch, ..].
    let along = |x: Var<'g>| x.cast(wide).transpose(&[1, 0, 2]);
    let mut scanned: Vec<_> = [0, 1, 2].map(|input| along(x[input])).into();
    scanned.extend(decay.map(|(decay, _)| along(decay)));
    scanned.extend(rate.map(|(rate, _)| along(rate)));
    let (decay, rate) = (decay.map(|(_, width)| width), rate.map(|(_, width)| width));
    let made =
        repeat(b, (places, false), Inputs { carried: vec![state], scanned, captured: Vec::new() }, &|_, given| {
            let &[mut state, query, key, value, ref gates @ ..] = given else {
                return Err("a place has a query, a key and a value".into());
            };
            let (key, mut value) = (key.shaped(&[batch, heads, keys, 1]), value.shaped(&[batch, heads, 1, values]));
            if let (Some(width), Some(decay)) = (decay, gates.first()) {
                state = state * decay.shaped(&[batch, heads, width / heads, 1]).exp();
            }
            if let (Some(width), Some(rate)) = (rate, gates.last()) {
                let known = key.transpose(&[0, 1, 3, 2]).matmul(state);
                value = (value - known) * rate.shaped(&[batch, width, 1, 1]);
            }
            state = state + key * value;
            let query = query.shaped(&[batch, heads, sharing, keys]) * scale;
            Ok(vec![state, query.matmul(state).shaped(&[batch, heads * sharing * values])])
        })?;
    let &[state, read] = &made[..] else { return Err("a loop that was refused".into()) };
    Ok(vec![read.transpose(&[1, 0, 2]).cast(dtype), state.cast(dtype)])
}

/// An input that a rule needs, and its last extent, which is one of these. None if the rule does not need it.
fn gate<'g>(
    call: &Call,
    x: &Args<Var<'g>>,
    h: &Heads,
    needed: bool,
    input: usize,
    widths: &[usize],
) -> OpResult<Option<(Var<'g>, usize)>> {
    if !needed {
        return Ok(None);
    }
    let name = if input == DECAY { "decay" } else { "beta" };
    let gate = x.given(input).ok_or_else(|| format!("input '{name}': attribute 'update_rule' needs it"))?;
    let width = *call.shape(input).last().unwrap_or(&0);
    let fits = widths.contains(&width) && call.shape(input)[..] == [h.batch, h.places, width];
    expect_shape(call, input, fits, format_args!("[{}, {}, one of {widths:?}]", h.batch, h.places))?;
    Ok(Some((gate, width)))
}

#[cfg(test)]
mod tests {
    use crate::dtype::DType::*;
    use crate::op::Attrs;
    use crate::ops::tests::{outputs, refused};

    fn heads() -> Attrs {
        Attrs::new().with("q_num_heads", 1).with("kv_num_heads", 1).with("scale", 1.0)
    }

    #[test]
    fn states_follow_the_rules() {
        let row = |values: &'static [f64]| (F32, &[1, 2, 1][..], values);
        let (q, k, v) = (row(&[1.0, 1.0]), row(&[1.0, 1.0]), row(&[3.0, 5.0]));
        let linear = outputs("LinearAttention", &[q, k, v], &heads().with("update_rule", "linear"));
        assert_eq!(linear, [("f32[1,2,1]".into(), vec![3.0, 8.0]), ("f32[1,1,1,1]".into(), vec![8.0])]);
        // What is known of a key is replaced by half of what is new.
        let past = (F32, &[1, 1, 1, 1][..], &[1.0][..]);
        let none = (F32, &[1, 2, 1][..], &[0.0, 0.0][..]);
        let delta = outputs("LinearAttention", &[q, k, v, past, none, row(&[0.5, 1.0])], &heads());
        assert_eq!(delta[0].1, [2.0, 5.0]);
    }

    #[test]
    fn rules_need_their_inputs() {
        let x = (F32, &[1, 2, 1][..]);
        let found = refused("LinearAttention", &[x, x, x], &heads());
        assert_eq!(found, "input 'decay': attribute 'update_rule' needs it");
        let found = refused("LinearAttention", &[x, x, x], &heads().with("q_num_heads", 0));
        assert_eq!(found, "attribute 'q_num_heads': expected 1 to 65536 heads, found 0");
    }
}
