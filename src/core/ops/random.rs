//! Random numbers, and dropout. A number depends on a key, a count of draws and the place of its element, so two computations of it agree,
//! in every pass and on every device: nothing is kept for a gradient.

use super::{expect_dtype, output};
use crate::dtype::DType;
use crate::error::ensure;
use crate::expr::Expr;
use crate::op::{Attrs, Call, Eval, Fact, Lower, OpDef, OpResult, Var, inputs, names};
use crate::random::{NUMBERS, PARITY, ROTATIONS, ROUNDS, key, uniform};
use crate::shape::{Shape, indices};

/// The row of dropout in training.
pub const DROPOUT: &str = "plimsoll.Dropout";
const RANDOM: &str = "plimsoll.Random";

pub(super) static OPS: &[OpDef] = &[
    OpDef::new(
        "Dropout",
        "The input, as in inference, and a mask that keeps all of it; in training mode the same elements are dropped at every run",
        inputs![data ratio= training_mode=],
        |c| {
            dropped(c)?;
            c.int("seed", 0)?;
            Ok(vec![c.fact(0).clone(), Fact::new(DType::Bool, c.shape(0).clone())])
        },
        Eval::Tensor(|x, c| {
            let key = key(c.int("seed", 0)? as u64, 0);
            let (share, scale) = dropped(c)?.map_or((0.0, 1.0), |ratio| (share(ratio), scale(ratio)));
            let kept: Vec<bool> = (0..x[0].len()).map(|element| uniform(key, 0, element as u32) >= share).collect();
            let y = x[0].iter().zip(&kept).map(|(x, &kept)| if kept { x * scale } else { 0.0 });
            Ok(vec![y.collect(), kept.iter().map(|&kept| f64::from(u8::from(kept))).collect()])
        }),
        Lower::Decompose(|b, c, x| match dropped(c)? {
            None => Ok(vec![x[0], b.scalar(1.0, DType::Bool).expand(c.shape(0))]),
            Some(ratio) => {
                let (draw, key) = (b.scalar(0.0, DType::I32), key(c.int("seed", 0)? as u64, 0));
                dropout(x[0], draw, ratio, key).map(Vec::from)
            }
        }),
    )
    .sample(|s| s.floats(&[&[2, 3]]))
    .attrs(names![seed]),
    OpDef::new(
        RANDOM,
        "Numbers in 0..1: a function of a key, a count of draws, and the place of the element",
        inputs![draw],
        |c| {
            words(c)?;
            draw(c, 0)?;
            output(DType::F32, shape(c)?)
        },
        Eval::Tensor(|x, c| {
            let (key, draw) = (words(c)?, x[0][0] as i64 as u32);
            Ok(vec![(0..shape(c)?.numel()).map(|element| uniform(key, draw, element as u32)).collect()])
        }),
        Lower::Map(|x, c| number(&shape(c).expect("facts are inferred"), c, &x[0], None)),
    )
    .attrs(names![key shape])
    .sample(|s| s.given(DType::I32, &[], &[3.0]).ints("key", &[17, -4]).ints("shape", &[2, 3, 37])),
    OpDef::new(
        DROPOUT,
        "x / (1 - ratio), and 0 at a share `ratio` of the places, which depend on a key and a count of draws. Of a part of a tensor `of` is the whole's \
         shape, and `first` the place of its first element there",
        inputs![data draw first?],
        |c| {
            words(c)?;
            ratio(c)?;
            draw(c, 1)?;
            of(c)?;
            if c.has(2) {
                draw(c, 2)?;
            }
            output(expect_dtype(c, 0, "a float type", DType::is_float)?, c.shape(0).clone())
        },
        Eval::Tensor(|x, c| {
            let (key, draw, ratio) = (words(c)?, x[1][0] as i64 as u32, ratio(c)?);
            let (of, first) = (of(c)?.strides(), x.get(2).map_or(0, |first| first[0] as i64));
            let place = |index: &[usize]| index.iter().zip(&of).fold(first, |at, (&i, &stride)| at + i as i64 * stride as i64);
            let kept = |place: i64| uniform(key, draw, place as u32) >= share(ratio);
            let each = indices(c.shape(0)).map(|index| place(&index)).zip(x[0].iter());
            Ok(vec![each.map(|(place, x)| if kept(place) { x * scale(ratio) } else { 0.0 }).collect()])
        }),
        Lower::Map(|x, c| {
            let (of, ratio) = (of(c).expect("facts are inferred"), ratio(c).expect("facts are inferred"));
            let number = number(&of, c, &x[1], x.get(2));
            number.like(share(ratio)).le(&number).select(&(&x[0] * scale(ratio)), &x[0].like(0.0))
        }),
    )
    .attrs(names![key ratio of])
    .grad(|b, c, back| {
        // The same elements are dropped again.
        let first = back.x.given(2);
        let inputs: Vec<Var> = [back.first()?, back.x[1]].into_iter().chain(first).collect();
        let mut gradients = vec![None; inputs.len()];
        gradients[0] = Some(b.op(DROPOUT, &inputs, c.attrs.clone()));
        Ok(gradients)
    })
    .sample(|s| s.uniform(-3.0, 3.0).given(DType::I32, &[], &[3.0]).ints("key", &[17, -4]).attr("ratio", 0.25))
    .sample(|s| {
        let part = s.floats(&[&[2, 3]]).given(DType::I32, &[], &[3.0]).given(DType::I32, &[], &[6.0]);
        part.ints("key", &[17, -4]).attr("ratio", 0.25).ints("of", &[4, 3])
    }),
];

/// The share of elements that a Dropout in training mode drops; `None` if it drops none.
pub fn dropped(call: &Call) -> OpResult<Option<f64>> {
    let ratio = ratio(call)?;
    Ok((call.int("training_mode", 0)? != 0 && ratio != 0.0).then_some(ratio))
}

/// The share of elements that a Dropout drops in training.
pub fn ratio(call: &Call) -> OpResult<f64> {
    let ratio = call.float("ratio", 0.5)?;
    ensure((0.0..=1.0).contains(&ratio), || format!("input 'ratio': expected 0 to 1, found {ratio}"))?;
    Ok(ratio)
}

/// The shape of the whole tensor, of which the data are a part.
fn of(call: &Call) -> OpResult<Shape> {
    let own = call.shape(0);
    let Some(found) = call.ints("of")? else { return Ok(own.clone()) };
    let extents: Option<Shape> = found.iter().map(|&extent| usize::try_from(extent).ok()).collect();
    // Elements are counted in 32 bits.
    let fits = |whole: &Shape| {
        let contains = whole.len() == own.len() && whole.iter().zip(own.iter()).all(|(whole, own)| own <= whole);
        contains && whole.checked_len().is_some_and(|count| count <= u32::MAX as usize)
    };
    extents.filter(fits).ok_or_else(|| format!("attribute 'of': expected extents of at least {own}, found {found:?}"))
}

/// Dropout in training, and the mask of the elements that stay.
pub fn dropout<'g>(x: Var<'g>, draw: Var<'g>, ratio: f64, key: [u32; 2]) -> OpResult<[Var<'g>; 2]> {
    let key = key.map(|word| i64::from(word as i32)).to_vec();
    let y = x.op(DROPOUT, &[draw], Attrs::new().with("key", key.clone()).with("ratio", ratio));
    let shape = x.shape()?;
    let numbers = draw.op(RANDOM, &[], Attrs::new().with("key", key).with("shape", &shape[..]));
    Ok([y, numbers.greater_or_equal(share(ratio))])
}

/// The numbers below drop their elements. It is a multiple of 2^-24, as they are: `f32` holds both exactly.
fn share(ratio: f64) -> f64 {
    (ratio * NUMBERS).ceil() / NUMBERS
}

/// The factor of elements that stay.
fn scale(ratio: f64) -> f64 {
    if ratio < 1.0 { 1.0 / (1.0 - ratio) } else { 0.0 }
}

fn words(call: &Call) -> OpResult<[u32; 2]> {
    let found = call.ints("key")?;
    match found.as_deref() {
        Some(&[a, b]) => Ok([a, b].map(|word| word as u32)),
        _ => Err("attribute 'key': expected 2 ints".to_owned()),
    }
}

fn shape(call: &Call) -> OpResult<Shape> {
    let found = call.ints("shape")?.ok_or("attribute 'shape' is required")?;
    let extents: Option<Shape> = found.iter().map(|&extent| usize::try_from(extent).ok()).collect();
    extents.ok_or_else(|| format!("attribute 'shape': expected extents, found {found:?}"))
}

/// Refuses a count of draws that is none.
fn draw(call: &Call, input: usize) -> OpResult<()> {
    expect_dtype(call, input, "i32", |dtype| dtype == DType::I32)?;
    let found = call.shape(input);
    ensure(found.is_empty(), || format!("input 'draw': expected no axes, found {found}"))
}

/// The number of an element of a tensor of this shape, or of its part that begins at `first`: [`uniform`], in code.
fn number(shape: &Shape, call: &Call, draw: &Expr, first: Option<&Expr>) -> Expr {
    let key = words(call).expect("facts are inferred");
    let mut element = first.cloned().unwrap_or_else(|| draw.like(0.0));
    let mut stride = 1;
    for (axis, &extent) in shape.iter().enumerate().rev().filter(|&(_, &extent)| extent != 1) {
        element = element + Expr::index(axis).cast(DType::I32) * f64::from(stride as i32);
        stride *= extent;
    }
    let bits = first_word(key, &element, draw).shr(&draw.like(8.0));
    bits.cast(DType::F32) * (1.0 / NUMBERS)
}

/// The first word of [`threefry`](crate::random::threefry), in code.
fn first_word(key: [u32; 2], first: &Expr, second: &Expr) -> Expr {
    let word = |bits: u32| f64::from(bits as i32);
    let keys = [key[0], key[1], PARITY ^ key[0] ^ key[1]];
    let (mut a, mut b) = (first + word(keys[0]), second + word(keys[1]));
    for round in 0..ROUNDS {
        let by = ROTATIONS[round % ROTATIONS.len()];
        a = &a + &b;
        b = b.shl(&b.like(by.into())).or(&b.shr(&b.like((32 - by).into()))).xor(&a);
        if round % 4 == 3 {
            let number = round / 4 + 1;
            a = a + word(keys[number % 3]);
            b = b + word(keys[(number + 1) % 3].wrapping_add(number as u32));
        }
    }
    a
}
