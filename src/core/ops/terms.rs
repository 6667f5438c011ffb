//! Rows of ONNX's operators for features: counts of words, and features chosen or compared.

use super::compose::composed;
use super::{ensure, expect_dtype};
use crate::dtype::DType;
use crate::op::{Args, Call, Nodes, OpDef, OpResult, Var, inputs, names};

pub(super) static OPS: &[OpDef] = &[
    composed(
        "TfIdfVectorizer",
        "How often each of a pool of short sequences stands in rows of numbers, or a weight if it does, or both multiplied",
        inputs![X],
        count,
    )
    .sample(|s| {
        s.given(DType::I64, &[2, 4], &[1.0, 5.0, 7.0, 5.0, 5.0, 7.0, 7.0, 1.0])
            .attr("mode", "TFIDF")
            .attr("min_gram_length", 1)
            .attr("max_gram_length", 2)
            .attr("max_skip_count", 1)
            .ints("ngram_counts", &[0, 2])
            .ints("ngram_indexes", &[2, 0, 1])
            .ints("pool_int64s", &[1, 5, 5, 7])
            .attr("weights", crate::op::Attr::Floats(vec![0.5, 2.0, 3.0]))
    })
    .attrs(names![max_gram_length max_skip_count min_gram_length mode ngram_counts ngram_indexes pool_int64s
                  weights]),
    composed(
        "ai.onnx.ml.ArrayFeatureExtractor",
        "The elements along the last axis that the second input names",
        inputs![X Y],
        |_, call, x| {
            expect_dtype(call, 1, "i64 or i32", |d| matches!(d, DType::I64 | DType::I32))?;
            let count = call.shape(1).numel();
            let y = x[0].gather(x[1].shaped(&[count]), -1);
            Ok(vec![if call.shape(0).len() == 1 { y.unsqueeze(&[0]) } else { y }])
        },
    )
    .sample(|s| s.floats(&[&[3, 4]]).given(DType::I64, &[2], &[3.0, 1.0])),
    composed("ai.onnx.ml.Binarizer", "1 where x is above `threshold`, else 0", inputs![X], |_, call, x| {
        let above = x[0].greater(call.float("threshold", 0.0)?);
        Ok(vec![above.cast(call.dtype(0))])
    })
    .sample(|s| s.floats(&[&[3, 4]]))
    .attrs(names![threshold]),
];

/// What counts are turned into.
#[derive(Clone, Copy, PartialEq)]
enum Mode {
    Counts,
    Weights,
    Both,
}

/// The short sequences of a call, by length.
struct Pool {
    /// A matrix with a sequence per row, and its length.
    grams: Vec<(usize, Vec<i64>)>,
    /// The place in the result of each sequence, and its weight.
    places: Vec<usize>,
    weights: Vec<f64>,
    /// The largest distance of neighbours in a sequence.
    reach: usize,
}

impl Pool {
    fn of(call: &Call) -> OpResult<Pool> {
        let list = |name: &str| call.ints(name).map(|list| list.map(|list| list.into_owned()));
        let number = |name: &str, least: i64, most: i64| match call.int(name, 0)? {
            n if (least..=most).contains(&n) => Ok(n as usize),
            n => Err(format!("attribute '{name}': expected {least} to {most}, found {n}")),
        };
        let (shortest, longest) = (number("min_gram_length", 1, 64)?, number("max_gram_length", 1, 64)?);
        let reach = 1 + number("max_skip_count", 0, 1 << 10)?;
        let pool = list("pool_int64s")?
            .ok_or("attribute 'pool_int64s': expected numbers, found none; let the model begin after texts")?;
        let starts = list("ngram_counts")?.ok_or("attribute 'ngram_counts': expected numbers, found none")?;
        let wrong = || {
            format!("attribute 'ngram_counts': expected ascending places in a pool of {}, found {starts:?}", pool.len())
        };
        let mut grams = Vec::new();
        let mut skipped = vec![];
        for (i, &start) in starts.iter().enumerate() {
            let end = starts.get(i + 1).map_or(pool.len() as i64, |&end| end);
            let range = usize::try_from(start).ok().zip(usize::try_from(end).ok());
            let part = range.and_then(|(start, end)| pool.get(start..end)).ok_or_else(wrong)?;
            ensure(part.len().is_multiple_of(i + 1), wrong)?;
            let counted = (shortest..=longest).contains(&(i + 1));
            skipped.extend(std::iter::repeat_n(!counted, part.len() / (i + 1)));
            if counted {
                grams.push((i + 1, part.to_vec()));
            }
        }
        let places = list("ngram_indexes")?.ok_or("attribute 'ngram_indexes': expected numbers, found none")?;
        let weights = call.floats("weights")?.unwrap_or_else(|| vec![1.0; places.len()]);
        ensure(places.len() == skipped.len() && weights.len() == places.len(), || {
            format!(
                "expected a place and a weight for each of {} sequences, found {} and {}",
                skipped.len(),
                places.len(),
                weights.len()
            )
        })?;
        let kept = |i: &usize| !skipped[*i];
        let place = |i: usize| usize::try_from(places[i]).ok().filter(|&place| place < MOST);
        let chosen: Option<Vec<usize>> = (0..places.len()).filter(kept).map(place).collect();
        let chosen =
            chosen.ok_or_else(|| format!("attribute 'ngram_indexes': expected 0 to {}, found {places:?}", MOST - 1))?;
        let weights = (0..places.len()).filter(kept).map(|i| weights[i]).collect();
        Ok(Pool { grams, places: chosen, weights, reach })
    }
}

/// The most elements of a row of the result.
const MOST: usize = 1 << 20;

fn count<'g>(b: Nodes<'g>, call: &Call, x: &Args<Var<'g>>) -> OpResult<Vec<Var<'g>>> {
    let dtype = expect_dtype(call, 0, "i64 or i32", |d| matches!(d, DType::I64 | DType::I32))?;
    let mode = call.choice("mode", &[("TF", Mode::Counts), ("IDF", Mode::Weights), ("TFIDF", Mode::Both)])?;
    let (rows, length) = match call.shape(0)[..] {
        [length] => (1, length),
        [rows, length] => (rows, length),
        _ => return Err(format!("input 'X': expected one axis or two, found {}", call.shape(0))),
    };
    let pool = Pool::of(call)?;
    let x = x[0].shaped(&[rows, 1, length]);
    let zeros = |count: usize| b.scalar(0.0, DType::F32).expand(&[rows, count]);
    let mut counts = Vec::new();
    for (n, grams) in &pool.grams {
        let many = grams.len() / n;
        let mut sum = zeros(many);
        // A single number has no neighbours to skip.
        for distance in 1..=if *n == 1 { 1 } else { pool.reach } {
            let Some(places) = length.checked_sub((n - 1) * distance).filter(|&places| places > 0) else { break };
            let equal = |k: usize| {
                let own = b.constant(dtype, [many, 1], || grams[k..].iter().step_by(*n).map(|&v| v as f64).collect());
                x.part(2, k * distance..k * distance + places).equal(own)
            };
            let hit = (1..*n).fold(equal(0), |hit, k| hit.and(equal(k)));
            sum = sum + hit.cast(DType::F32).reduce_sum(&[2], false);
        }
        counts.push(sum);
    }
    // The last column stands for places that no sequence has.
    counts.push(zeros(1));
    let (counts, total) = (b.concat(&counts, 1), pool.places.len());
    let weights = b.constant(DType::F32, [total + 1], || [&pool.weights[..], &[0.0]].concat());
    let values = match mode {
        Mode::Counts => counts,
        Mode::Weights => counts.greater(0.0).select(weights, 0.0),
        Mode::Both => counts * weights,
    };
    let width = pool.places.iter().max().map_or(0, |&place| place + 1);
    let sources = b.constant(DType::I64, [width], || {
        let mut sources = vec![total as f64; width];
        pool.places.iter().enumerate().for_each(|(i, &place)| sources[place] = i as f64);
        sources
    });
    let y = values.gather(sources, 1);
    Ok(vec![if call.shape(0).len() == 1 { y.shaped(&[width]) } else { y }])
}

#[cfg(test)]
mod tests {
    use crate::dtype::DType::*;
    use crate::op::{Attr, Attrs};
    use crate::ops::tests::eval;

    #[test]
    fn sequences_are_counted_with_gaps() {
        let attrs = |skips: i64, mode: &str| {
            Attrs::new()
                .with("mode", mode)
                .with("min_gram_length", 2)
                .with("max_gram_length", 2)
                .with("max_skip_count", skips)
                .with("ngram_counts", vec![0, 1])
                .with("ngram_indexes", vec![0, 2, 1])
                .with("pool_int64s", vec![9, 1, 2, 1, 3])
                .with("weights", Attr::Floats(vec![1.0, 0.5, 4.0]))
        };
        let of = |attrs: Attrs| eval("TfIdfVectorizer", &[(I64, &[5], &[1.0, 2.0, 3.0, 1.0, 2.0])], &attrs);
        assert_eq!(of(attrs(0, "TF")), ("f32[3]".into(), vec![0.0, 0.0, 2.0]));
        assert_eq!(of(attrs(1, "TF")).1, [0.0, 1.0, 2.0]);
        assert_eq!(of(attrs(1, "IDF")).1, [0.0, 4.0, 0.5]);
        assert_eq!(of(attrs(1, "TFIDF")).1, [0.0, 4.0, 1.0]);
    }
}
