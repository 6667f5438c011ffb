//! Normalizations: rescale values to a common mean and deviation, or to a sum of 1.

use super::compose::composed;
use super::window::larger;
use super::{along, broadcasts_to, ensure, expect_dtype, expect_shape, indices, input_name, same_float};
use crate::dtype::DType;
use crate::op::{
    Args, Attr, Attrs, Back, Call, Eval, Fact, Lower, Nodes, OpDef, OpResult, ValueId, Var, inputs, names,
};
use crate::shape::{Access, Shape};

pub(super) static OPS: &[OpDef] = &[
    OpDef::new(
        "BatchNormalization",
        "(X - mean) / sqrt(var + epsilon) * scale + B per channel (axis 1), with given statistics: \
         inference only",
        inputs![X scale B input_mean input_var],
        infer_batch,
        Eval::Tensor(eval_batch),
        Lower::Decompose(|_, call, x| decompose_batch(call, x)),
    )
    .sample(|s| s.floats(&[&[2, 3, 4, 5], &[3], &[3], &[3]]).input(DType::F32, &[3], 0.5, 2.0))
    .attrs(names![epsilon momentum spatial training_mode]),
    composed(
        "plimsoll.BatchNormalization",
        "BatchNormalization by the statistics of the batch, and these: the mean and the variance per channel",
        inputs![X scale B],
        |_, call, x| {
            infer_groups(call, 2, None)?;
            let axes = beside_channels(call);
            let mean = reduce("ReduceMean", x[0], &axes);
            let centred = x[0] - mean;
            let variance = reduce("ReduceMean", centred * centred, &axes);
            let [scale, bias] = [x[1], x[2]].map(|parameter| along_channels(parameter, call.shape(0).len()));
            let y = centred * (inverse_deviation(variance, epsilon(call)?) * scale?) + bias?;
            let flat = call.shape(1);
            Ok(vec![y, mean.shaped(flat), variance.shaped(flat)])
        },
    )
    .grad(batch_grad)
    .wide()
    .sample(|s| s.floats(&[&[2, 3, 4, 5], &[3], &[3]]))
    .attrs(names![epsilon]),
    OpDef::new(
        "InstanceNormalization",
        "Each image of [n, c, spatial..] brought to mean 0 and variance 1, then scaled and shifted per channel",
        inputs![input scale B],
        |call| infer_groups(call, 3, None),
        Eval::Tensor(|inputs, call| eval_groups(inputs, call, call.shape(0)[1].max(1))),
        Lower::Decompose(|_, call, x| decompose_instance(call, x)),
    )
    .wide()
    .sample(|s| s.floats(&[&[2, 3, 4, 5], &[3], &[3]]))
    .attrs(names![epsilon]),
    OpDef::new(
        "GroupNormalization",
        "Groups of channels brought to mean 0 and variance 1, then scaled and shifted per channel (or, \
         before opset 21, group)",
        inputs![X scale bias],
        |call| infer_groups(call, 2, Some(groups(call)?)),
        Eval::Tensor(|inputs, call| eval_groups(inputs, call, groups(call)?)),
        Lower::Decompose(|_, call, x| decompose_group(call, x)),
    )
    .sample(|s| s.floats(&[&[2, 6, 4, 3], &[6], &[6]]).attr("num_groups", 2))
    .attrs(names![epsilon num_groups stash_type]),
    OpDef::new(
        "LayerNormalization",
        "The axes from `axis` on brought to mean 0 and variance 1, then scaled and shifted; with both \
         statistics",
        inputs![X Scale B?],
        |call| infer_layer(call, 2),
        Eval::Tensor(|inputs, call| eval_layer(inputs, call, true)),
        Lower::Decompose(|_, call, x| decompose_layer(call, x, true)),
    )
    .grad(|_, call, back| layer_grad(call, back, true))
    .sample(|s| s.floats(&[&[2, 5, 48], &[48], &[48]]))
    .attrs(names![axis epsilon stash_type]),
    OpDef::new(
        "RMSNormalization",
        "The axes from `axis` on divided by their root mean square, then scaled",
        inputs![X scale],
        |call| infer_layer(call, 0),
        Eval::Tensor(|inputs, call| eval_layer(inputs, call, false).map(|mut y| y.drain(..1).collect())),
        Lower::Decompose(|_, call, x| decompose_layer(call, x, false).map(|mut y| y.drain(..1).collect())),
    )
    .grad(|_, call, back| layer_grad(call, back, false))
    .sample(|s| s.floats(&[&[2, 5, 48], &[48]]))
    .attrs(names![axis epsilon stash_type]),
    OpDef::new(
        "SimplifiedLayerNormalization",
        "RMSNormalization under its name in ONNX Runtime; also the inverse root mean square",
        inputs![X scale],
        |call| infer_layer(call, 1),
        Eval::Tensor(|inputs, call| eval_layer(inputs, call, false)),
        Lower::Decompose(|_, call, x| decompose_layer(call, x, false)),
    )
    .grad(|_, call, back| layer_grad(call, back, false))
    .sample(|s| s.floats(&[&[2, 5, 48], &[48]]).attr("axis", -1).attr("epsilon", 0.01))
    .attrs(names![axis epsilon stash_type]),
    OpDef::new(
        "LRN",
        "x / (bias + alpha m)^beta with the mean square m of the `size` channels around each, zeros beyond \
         the first and the last",
        inputs![X],
        |call| neighbours(call).map(|_| vec![call.fact(0).clone()]),
        Eval::Tensor(eval_neighbours),
        Lower::Decompose(|_, call, x| decompose_neighbours(call, x[0])),
    )
    .wide()
    .sample(|s| s.floats(&[&[2, 7, 3, 2]]).attr("size", 5))
    .attrs(names![alpha beta bias size]),
    OpDef::new(
        "MeanVarianceNormalization",
        "Along `axes` (0, 2 and 3 if not given) brought to mean 0 and variance 1",
        inputs![X],
        |call| infer_over(call, mean_axes),
        Eval::Tensor(|inputs, call| {
            eval_over(inputs, call, mean_axes, |x| {
                let (mean, inverse) = statistics(x.iter().copied(), DEVIATION * DEVIATION);
                Box::new(move |x| (x - mean) * inverse)
            })
        }),
        Lower::Decompose(|_, call, x| {
            let (y, ..) = normalize(x[0], &mean_axes(call)?, DEVIATION * DEVIATION, true);
            Ok(vec![y])
        }),
    )
    .wide()
    .sample(|s| s.floats(&[&[2, 3, 4, 5]]))
    .attrs(names![axes]),
    OpDef::new(
        "LpNormalization",
        "x over the sum of magnitudes along `axis` (`p` 1), or the root of the sum of squares (2); 0 where \
         that is 0",
        inputs![input],
        |call| {
            length(call)?;
            infer_over(call, axis_alone)
        },
        Eval::Tensor(|inputs, call| {
            let squares = length(call)? == "ReduceL2";
            let of = |x: &[f64], power: i32| x.iter().map(|x| x.abs().powi(power)).sum::<f64>();
            eval_over(inputs, call, axis_alone, |x| {
                let length = if squares { of(x, 2).sqrt() } else { of(x, 1) };
                Box::new(move |x| if length == 0.0 { 0.0 } else { x / length })
            })
        }),
        Lower::Decompose(|b, call, x| {
            let length = reduce(length(call)?, x[0], &axis_alone(call)?);
            let (zero, one) = (b.scalar(0.0, call.dtype(0)), b.scalar(1.0, call.dtype(0)));
            Ok(vec![x[0] / length.equal(zero).select(one, length)])
        }),
    )
    .wide()
    .sample(|s| s.floats(&[&[2, 3, 5]]))
    .attrs(names![axis p]),
    OpDef::new(
        "Hardmax",
        "1 for the first largest element along `axis`, 0 for the others; with flatten (opsets before 13), \
         along all axes from `axis` on",
        inputs![input],
        |call| match softmax_axes(call)?.iter().find(|&&axis| call.shape(0)[axis] == 0) {
            Some(axis) => Err(format!("input 'input': expected elements along axis {axis}, found {}", call.shape(0))),
            None => infer_softmax(call),
        },
        Eval::Tensor(eval_hardmax),
        Lower::Decompose(decompose_hardmax),
    )
    .sample(|s| s.floats(&[&[2, 3, 5]]).attr("axis", 1))
    .attrs(names![axis flatten])
    .upgrade(flattened),
    OpDef::new(
        "Softmax",
        "exp(x) over its sum along `axis`; with flatten (opsets before 13), along all axes from `axis` on",
        inputs![input],
        infer_softmax,
        Eval::Tensor(|inputs, call| eval_softmax(inputs, call, |x, max, sum| (x - max).exp() / sum)),
        Lower::Decompose(|_, call, x| decompose_softmax(call, x[0], false)),
    )
    .grad(|_, call, back| {
        let (y, dy, axes) = (back.y[0], back.first()?, softmax_axes(call)?);
        let mean = if axes.is_empty() { y * dy } else { reduce("ReduceSum", y * dy, &axes) };
        Ok(vec![Some(y * (dy - mean))])
    })
    .wide()
    .sample(|s| s.input(DType::F32, &[2, 3, 4], -20.0, 20.0).attr("axis", 1))
    .attrs(names![axis flatten])
    .upgrade(flattened),
    OpDef::new(
        "LogSoftmax",
        "The logarithm of Softmax",
        inputs![input],
        infer_softmax,
        Eval::Tensor(|inputs, call| eval_softmax(inputs, call, |x, max, sum| x - max - sum.ln())),
        Lower::Decompose(|_, call, x| decompose_softmax(call, x[0], true)),
    )
    .grad(|_, call, back| {
        let (y, dy, axes) = (back.y[0], back.first()?, softmax_axes(call)?);
        let sum = if axes.is_empty() { dy } else { reduce("ReduceSum", dy, &axes) };
        Ok(vec![Some(dy - y.exp() * sum)])
    })
    .wide()
    .sample(|s| s.input(DType::F32, &[2, 3, 4], -20.0, 20.0).attr("axis", 1))
    .attrs(names![axis flatten])
    .upgrade(flattened),
];

/// Added to a deviation to keep it from zero.
const DEVIATION: f64 = 1e-9;

type Axes = fn(&Call) -> OpResult<Vec<usize>>;

fn axis_alone(call: &Call) -> OpResult<Vec<usize>> {
    Ok(vec![call.axis("axis", -1, call.shape(0))?])
}

fn mean_axes(call: &Call) -> OpResult<Vec<usize>> {
    match call.listed_axes()? {
        Some(axes) => Ok(axes),
        None if call.shape(0).len() > 3 => Ok(vec![0, 2, 3]),
        None => Err(format!("attribute 'axes': expected axes of {}, found none", call.shape(0))),
    }
}

/// The reduction that computes the norm `p`.
fn length(call: &Call) -> OpResult<&'static str> {
    match call.int("p", 2)? {
        1 => Ok("ReduceL1"),
        2 => Ok("ReduceL2"),
        found => Err(format!("attribute 'p': expected 1 or 2, found {found}")),
    }
}

fn infer_over(call: &Call, axes: Axes) -> OpResult<Vec<Fact>> {
    same_float(call)?;
    axes(call)?;
    Ok(vec![call.fact(0).clone()])
}

/// Applies a function to each element. It is made from all elements along some axes.
fn eval_over(
    inputs: &Args<&[f64]>,
    call: &Call,
    axes: Axes,
    of: impl Fn(&[f64]) -> Box<dyn Fn(f64) -> f64>,
) -> OpResult<Vec<Vec<f64>>> {
    let x = inputs[0];
    let mut y = vec![0.0; x.len()];
    for row in super::groups(call.shape(0), &axes(call)?) {
        let values: Vec<f64> = row.iter().map(|&i| x[i]).collect();
        let make = of(&values);
        row.iter().for_each(|&i| y[i] = make(x[i]));
    }
    Ok(vec![y])
}

fn eval_hardmax(inputs: &Args<&[f64]>, call: &Call) -> OpResult<Vec<Vec<f64>>> {
    // Elements are numbered, to tell each from the others of its row.
    let x = inputs[0];
    let places: Vec<f64> = (0..x.len()).map(|i| i as f64).collect();
    let data = x.to_vec();
    eval_over(&Args(&[Some(&places)]), call, softmax_axes, move |row| {
        let first = |best: usize, &i: &f64| if larger(data[i as usize], data[best]) { i as usize } else { best };
        let best = row.first().map_or(0, |&start| row.iter().fold(start as usize, first));
        Box::new(move |i| f64::from(u8::from(i as usize == best)))
    })
}

fn decompose_hardmax<'g>(b: Nodes<'g>, call: &Call, x: &Args<Var<'g>>) -> OpResult<Vec<Var<'g>>> {
    let (shape, axes) = (call.shape(0), softmax_axes(call)?);
    // The axes as one, which stands where the first of them does.
    let first = axes.first().copied().unwrap_or(shape.len());
    let row: usize = axes.iter().map(|&axis| shape[axis]).product();
    let rows = x[0].shaped(&[&shape[..first], &[row], &shape[first + axes.len()..]].concat());
    let best = rows.op("ArgMax", &[], Attrs::new().with("axis", first as i64).with("keepdims", 0));
    let values = b.numbers(call.dtype(0), [2], 0.0);
    let hot = best.op("OneHot", &[values], Attrs::new().with("depth", row as i64).with("axis", first as i64));
    Ok(vec![hot.shaped(shape)])
}

fn epsilon(call: &Call) -> OpResult<f64> {
    call.float("epsilon", 1e-5)
}

/// The type of the statistics.
fn stash(call: &Call) -> OpResult<DType> {
    let code = call.int("stash_type", 1)?;
    let float = DType::from_onnx(code).filter(|d| d.is_float());
    float.ok_or_else(|| format!("attribute 'stash_type': expected a floating-point type such as 1 (f32), found {code}"))
}

fn reduce<'g>(op: &str, x: Var<'g>, axes: &[usize]) -> Var<'g> {
    x.op(op, &[], Attrs::new().with("axes", axes).with("keepdims", 1))
}

/// `1 / sqrt(variance + epsilon)`.
fn inverse_deviation(variance: Var, epsilon: f64) -> Var {
    (variance + epsilon).sqrt().reciprocal()
}

/// The values normalized over `axes`, their mean (if `centred`) and their inverse deviation.
fn normalize<'g>(x: Var<'g>, axes: &[usize], epsilon: f64, centred: bool) -> (Var<'g>, Option<Var<'g>>, Var<'g>) {
    let mean = centred.then(|| reduce("ReduceMean", x, axes));
    let x = mean.map_or(x, |mean| x - mean);
    let inverse = inverse_deviation(reduce("ReduceMean", x * x, axes), epsilon);
    (x * inverse, mean, inverse)
}

/// A per-channel parameter in the shape that broadcasts along axis 1 of [n, c, spatial..].
fn along_channels(parameter: Var, rank: usize) -> OpResult<Var> {
    Ok(parameter.shaped(&along(parameter.shape()?[0], rank - 1)))
}

/// Mean and inverse deviation.
fn statistics(values: impl Iterator<Item = f64> + Clone, epsilon: f64) -> (f64, f64) {
    let count = values.clone().count() as f64;
    let mean = values.clone().sum::<f64>() / count;
    (mean, 1.0 / (values.map(|v| (v - mean).powi(2)).sum::<f64>() / count + epsilon).sqrt())
}

fn infer_batch(call: &Call) -> OpResult<Vec<Fact>> {
    let x = call.fact(0);
    for input in 0..5 {
        expect_dtype(call, input, "a floating-point type", DType::is_float)?;
    }
    let trains = call.int("training_mode", 0)? != 0;
    call.float("momentum", 0.9)?;
    epsilon(call)?;
    let expected = match (x.shape.len(), call.int("spatial", 1)? != 0) {
        (0, _) => return Err(format!("input 'X': expected [n, c, spatial..], found {x}")),
        (1, _) => Shape::new([1]),
        (_, true) => Shape::new([x.shape[1]]),
        (_, false) => Shape::new(&x.shape[1..]),
    };
    for input in 1..5 {
        expect_shape(call, input, *call.shape(input) == expected, format_args!("{expected}"))?;
    }
    let mut facts = vec![x.clone()];
    if trains {
        let channels = x.shape.len() > 1 && expected.len() == 1 && x.shape.numel() > 0;
        ensure(channels, || {
            format!("input 'X': expected [n, c, spatial..] with elements and a mean per channel, found {x}")
        })?;
        facts.extend([3, 4].map(|input| call.fact(input).clone()));
    }
    Ok(facts)
}

/// The mean and the variance of each channel.
fn of_channels(x: &[f64], shape: &Shape) -> [Vec<f64>; 2] {
    let axes: Vec<usize> = (0..shape.len()).filter(|&axis| axis != 1).collect();
    let of_group = |group: &Vec<usize>| {
        let count = group.len() as f64;
        let mean = group.iter().map(|&at| x[at]).sum::<f64>() / count;
        (mean, group.iter().map(|&at| (x[at] - mean).powi(2)).sum::<f64>() / count)
    };
    let (means, variances) = super::groups(shape, &axes).iter().map(of_group).unzip();
    [means, variances]
}

/// The old statistics moved toward those of a batch.
fn moved(old: &[f64], new: &[f64], momentum: f64) -> Vec<f64> {
    old.iter().zip(new).map(|(old, new)| old * momentum + new * (1.0 - momentum)).collect()
}

fn eval_batch(inputs: &Args<&[f64]>, call: &Call) -> OpResult<Vec<Vec<f64>>> {
    let [x, scale, bias, mean, var] = [0, 1, 2, 3, 4].map(|i: usize| inputs[i]);
    let (shape, epsilon) = (call.shape(0), epsilon(call)?);
    if call.int("training_mode", 0)? != 0 {
        let momentum = call.float("momentum", 0.9)?;
        let [means, variances] = of_channels(x, shape);
        let after: usize = shape[2..].iter().product();
        let number = |(i, x): (usize, &f64)| {
            let c = i / after % means.len();
            (x - means[c]) / (variances[c] + epsilon).sqrt() * scale[c] + bias[c]
        };
        let y = x.iter().enumerate().map(number).collect();
        return Ok(vec![y, moved(mean, &means, momentum), moved(var, &variances, momentum)]);
    }
    let per_value = shape.len() > 1 && call.shape(1).len() + 1 == shape.len();
    let per_channel: usize = shape.iter().skip(2).product();
    let mut y = Vec::with_capacity(x.len());
    for (i, x) in x.iter().enumerate() {
        let p = if per_value { i % scale.len() } else { i / per_channel % scale.len() };
        y.push((x - mean[p]) / (var[p] + epsilon).sqrt() * scale[p] + bias[p]);
    }
    Ok(vec![y])
}

/// Computes factor and shift per channel as nodes of their own, so that constant statistics fold away.
fn decompose_batch<'g>(call: &Call, x: &Args<Var<'g>>) -> OpResult<Vec<Var<'g>>> {
    // Halves are rounded once, at the end.
    let common = if call.dtype(3).size() < 4 { DType::F32 } else { call.dtype(3) };
    let [scale, bias, mut mean, mut var] = [1, 2, 3, 4].map(|i| x[i].cast(common));
    let mut statistics = Vec::new();
    if call.int("training_mode", 0)? != 0 {
        let axes: Vec<i64> = (0..call.shape(0).len() as i64).filter(|&axis| axis != 1).collect();
        let (wide, old) = (x[0].cast(common), [mean, var]);
        let middle = wide.reduce_mean(&axes, true);
        let off = wide - middle;
        mean = middle.shaped(call.shape(3));
        var = (off * off).reduce_mean(&axes, false);
        let momentum = call.float("momentum", 0.9)?;
        let moved = |(old, new): (Var<'g>, Var<'g>)| (old * momentum + new * (1.0 - momentum)).cast(call.dtype(3));
        statistics = [(old[0], mean), (old[1], var)].map(moved).into();
    }
    let factor = scale * inverse_deviation(var, epsilon(call)?);
    let shift = bias - mean * factor;
    let rank = call.shape(0).len();
    let spread = |p| if call.shape(1).len() == 1 && rank > 1 { along_channels(p, rank) } else { Ok(p) };
    let [factor, shift] = [factor, shift].map(|p| spread(p).map(|p| p.cast(call.dtype(0))));
    Ok([vec![x[0] * factor? + shift?], statistics].concat())
}

/// The number of groups; it divides the number of channels.
fn groups(call: &Call) -> OpResult<usize> {
    let x = call.shape(0);
    let groups = call.int("num_groups", 0)?;
    match usize::try_from(groups) {
        Ok(n @ 1..) if x.len() >= 2 && x[1].is_multiple_of(n) => Ok(n),
        _ => Err(format!("attribute 'num_groups': expected a divisor of the channels of {x}, found {groups}")),
    }
}

/// The extent of scale and shift: channels, or groups.
fn infer_groups(call: &Call, rank: usize, groups: Option<usize>) -> OpResult<Vec<Fact>> {
    same_float(call)?;
    epsilon(call)?;
    stash(call)?;
    let x = call.fact(0);
    if x.shape.len() < rank {
        return Err(format!("input '{}': expected [n, c, spatial..], found {x}", input_name(call, 0)));
    }
    for input in [1, 2] {
        let (parameter, channels) = (call.shape(input), x.shape[1]);
        let fits = parameter[..] == [channels] || groups.is_some_and(|groups| parameter[..] == [groups]);
        expect_shape(call, input, fits, format_args!("[{channels}], one value per channel"))?;
    }
    Ok(vec![x.clone()])
}

fn eval_groups(inputs: &Args<&[f64]>, call: &Call, groups: usize) -> OpResult<Vec<Vec<f64>>> {
    let [x, scale, bias] = [0, 1, 2].map(|i: usize| inputs[i]);
    let (shape, epsilon) = (call.shape(0), epsilon(call)?);
    let channels = shape[1];
    let image: usize = shape[2..].iter().product();
    let group = channels / groups * image;
    let mut y = Vec::with_capacity(x.len());
    for (start, values) in x.chunks(group.max(1)).enumerate().map(|(g, values)| (g * group, values)) {
        let (mean, inverse) = statistics(values.iter().copied(), epsilon);
        for (i, v) in values.iter().enumerate() {
            let c = (start + i) / image % channels;
            let p = |p: &[f64]| p[c * p.len() / channels];
            y.push((v - mean) * inverse * p(scale) + p(bias));
        }
    }
    Ok(vec![y])
}

fn decompose_instance<'g>(call: &Call, x: &Args<Var<'g>>) -> OpResult<Vec<Var<'g>>> {
    let rank = call.shape(0).len();
    let axes: Vec<usize> = (2..rank).collect();
    let (y, ..) = normalize(x[0], &axes, epsilon(call)?, true);
    let (scale, bias) = (along_channels(x[1], rank)?, along_channels(x[2], rank)?);
    Ok(vec![y * scale + bias])
}

fn decompose_group<'g>(call: &Call, x: &Args<Var<'g>>) -> OpResult<Vec<Var<'g>>> {
    let (shape, groups) = (call.shape(0), groups(call)?);
    // [n, groups, c / groups, spatial..]
    let mut split = shape[..].to_vec();
    split.splice(1..2, [groups, shape[1] / groups]);
    let axes: Vec<usize> = (2..split.len()).collect();
    let (y, ..) = normalize(x[0].shaped(&split).cast(stash(call)?), &axes, epsilon(call)?, true);
    let per_group = |p: usize| {
        let mut own = vec![1; split.len() - 1];
        own[..2].copy_from_slice(&[groups, call.shape(p)[0] / groups]);
        x[p].shaped(&own)
    };
    // Scaled and shifted before it is rounded.
    let y = y * per_group(1).cast(stash(call)?) + per_group(2).cast(stash(call)?);
    Ok(vec![y.cast(call.dtype(0)).shaped(shape)])
}

/// The facts of the normalized values and of this many statistics of each row.
fn infer_layer(call: &Call, statistics: usize) -> OpResult<Vec<Fact>> {
    same_float(call)?;
    epsilon(call)?;
    stash(call)?;
    let x = call.fact(0);
    let axis = call.axis("axis", -1, &x.shape)?;
    for input in 1..call.inputs.len() {
        broadcasts_to(call, input, &x.shape)?;
    }
    let rows: Shape = x.shape.iter().enumerate().map(|(k, &d)| if k < axis { d } else { 1 }).collect();
    let mut outputs = vec![x.clone()];
    outputs.resize(1 + statistics, Fact::new(stash(call)?, rows));
    Ok(outputs)
}

fn eval_layer(inputs: &Args<&[f64]>, call: &Call, centred: bool) -> OpResult<Vec<Vec<f64>>> {
    let x = inputs[0];
    let (shape, epsilon) = (call.shape(0), epsilon(call)?);
    let (outer, inner) = shape.split_at(call.axis("axis", -1, shape)?);
    let (rows, row): (usize, usize) = (outer.iter().product(), inner.iter().product());
    let (mut means, mut inverses) = (Vec::new(), Vec::new());
    for values in (0..rows).map(|r| &x[r * row..][..row]) {
        let (mean, inverse) = if centred {
            statistics(values.iter().copied(), epsilon)
        } else {
            (0.0, 1.0 / (values.iter().map(|v| v * v).sum::<f64>() / row as f64 + epsilon).sqrt())
        };
        means.push(mean);
        inverses.push(inverse);
    }
    let parameter = |input: usize| {
        let values = inputs.given(input)?;
        Some((values, Access::contiguous(call.shape(input).clone()).broadcast(shape)))
    };
    let parameters = [parameter(1), parameter(2)];
    let mut y = Vec::with_capacity(x.len());
    for (i, index) in indices(shape).enumerate() {
        let [scale, bias] =
            parameters.each_ref().map(|p| p.as_ref().map(|(values, at)| values[at.at(&index) as usize]));
        let normal = (x[i] - means[i / row]) * inverses[i / row];
        y.push(normal * scale.unwrap_or(1.0) + bias.unwrap_or(0.0));
    }
    Ok(if centred { vec![y, means, inverses] } else { vec![y, inverses] })
}

fn decompose_layer<'g>(call: &Call, x: &Args<Var<'g>>, centred: bool) -> OpResult<Vec<Var<'g>>> {
    let shape = call.shape(0);
    let axes: Vec<usize> = (call.axis("axis", -1, shape)?..shape.len()).collect();
    let (y, mean, inverse) = normalize(x[0].cast(stash(call)?), &axes, epsilon(call)?, centred);
    let mut y = y.cast(call.dtype(0)) * x[1];
    if let Some(bias) = x.given(2) {
        y = y + bias;
    }
    Ok([Some(y), mean, Some(inverse)].into_iter().flatten().collect())
}

/// The gradients of a layer's normalization, as two means per row:
/// `dx = (g - mean (g) - n mean (g n)) / deviation`, with the normalized `n` and `g = dy scale`.
fn layer_grad<'g>(call: &Call, back: &Back<'_, 'g>, centred: bool) -> OpResult<Vec<Option<Var<'g>>>> {
    let (shape, stash) = (call.shape(0), stash(call)?);
    let axes: Vec<usize> = (call.axis("axis", -1, shape)?..shape.len()).collect();
    let x = back.x[0].cast(stash);
    let (x, inverse) = if centred {
        (x - back.y[1], back.y[2])
    } else {
        (x, inverse_deviation(reduce("ReduceMean", x * x, &axes), epsilon(call)?))
    };
    let normal = x * inverse;
    let share = 1.0 / axes.iter().map(|&axis| shape[axis]).product::<usize>().max(1) as f64;
    let (mut dx, mut dscale) = (None, None);
    if let Some(dy) = back.dy[0] {
        let g = (dy * back.x[1]).cast(stash);
        let even = if centred { g - reduce("ReduceMean", g, &axes) } else { g };
        dx = Some((even - normal * reduce("ReduceMean", g * normal, &axes)) * inverse);
        dscale = Some(dy * normal.cast(call.dtype(0)));
    }
    // Those of the statistics: of the mean, and of `1 / deviation`.
    let (dmean, dinverse) = match back.dy.get(1..).unwrap_or_default() {
        [dmean, dinverse] => (*dmean, *dinverse),
        [dinverse] => (None, *dinverse),
        _ => (None, None),
    };
    let spread = dinverse.map(|d| -(normal * (d * inverse * inverse * share)));
    let moved = dmean.map(|d| (d * share).expand(shape));
    for more in [spread, moved].into_iter().flatten() {
        dx = Some(dx.map_or(more, |dx| dx + more));
    }
    Ok(vec![dx.map(|dx| dx.cast(call.dtype(0))), dscale, back.dy[0]])
}

/// The axes that are no channels.
fn beside_channels(call: &Call) -> Vec<usize> {
    (0..call.shape(0).len()).filter(|&axis| axis != 1).collect()
}

/// The gradients of a batch's normalization, from the two sums that those of its parameters are.
fn batch_grad<'g>(_: Nodes<'g>, call: &Call, back: &Back<'_, 'g>) -> OpResult<Vec<Option<Var<'g>>>> {
    let (shape, axes) = (call.shape(0), beside_channels(call));
    // Of the rank of the data: kernels over these compute what is per channel where they read it.
    let mut per_channel = vec![1; shape.len()];
    per_channel[1] = shape[1];
    let spread = |of_channel: Var<'g>| of_channel.shaped(&per_channel);
    let inverse = inverse_deviation(spread(back.y[2]), epsilon(call)?);
    let share = 1.0 / axes.iter().map(|&axis| shape[axis]).product::<usize>().max(1) as f64;
    let centred = back.x[0] - spread(back.y[1]);
    let normal = centred * inverse;
    let (mut gradients, mut dx) = ([None, None], None);
    if let Some(dy) = back.dy[0] {
        let [dscale, dbias] = [dy * normal, dy].map(|v| reduce("ReduceSum", v, &axes));
        dx = Some((dy - dbias * share - normal * (dscale * share)) * (spread(back.x[1]) * inverse));
        gradients = [dscale, dbias].map(|sum| Some(sum.shaped(call.shape(1))));
    }
    let moved = back.dy[1].map(|d| spread(d * share).expand(shape));
    let varied = back.dy[2].map(|d| centred * spread(d * (2.0 * share)));
    for more in [moved, varied].into_iter().flatten() {
        dx = Some(dx.map_or(more, |dx| dx + more));
    }
    Ok(vec![dx, gradients[0], gradients[1]])
}

/// The number of channels in a window, and how many of those precede its own.
fn neighbours(call: &Call) -> OpResult<(usize, usize)> {
    expect_dtype(call, 0, "a floating-point type", DType::is_float)?;
    for name in ["alpha", "beta", "bias"] {
        call.float(name, 0.0)?;
    }
    let (shape, size) = (call.shape(0), call.int("size", 0)?);
    ensure(shape.len() >= 2, || format!("input 'X': expected [n, c, spatial..], found {shape}"))?;
    match usize::try_from(size) {
        Ok(size @ 1..=0xffff) => Ok((size, (size - 1) / 2)),
        _ => Err(format!("attribute 'size': expected 1 to 65535 channels, found {size}")),
    }
}

fn eval_neighbours(inputs: &Args<&[f64]>, call: &Call) -> OpResult<Vec<Vec<f64>>> {
    let (x, shape, (size, before)) = (inputs[0], call.shape(0), neighbours(call)?);
    let (alpha, beta, bias) = (call.float("alpha", 1e-4)?, call.float("beta", 0.75)?, call.float("bias", 1.0)?);
    let (channels, inner): (usize, usize) = (shape[1], shape[2..].iter().product());
    let scaled = |(i, value): (usize, &f64)| {
        let c = i / inner % channels;
        let around = c.saturating_sub(before)..channels.min(c + size - before);
        let squares: f64 = around.map(|k| x[i + k * inner - c * inner].powi(2)).sum();
        value / (bias + alpha * squares / size as f64).powf(beta)
    };
    Ok(vec![x.iter().enumerate().map(scaled).collect()])
}

/// Computes the mean over channels by a pool, for which the channels are rows of an image.
fn decompose_neighbours<'g>(call: &Call, x: Var<'g>) -> OpResult<Vec<Var<'g>>> {
    let (shape, (size, before)) = (call.shape(0), neighbours(call)?);
    if shape.numel() == 0 {
        return Ok(vec![x]);
    }
    let rows = (x * x).shaped(&[shape[0], 1, shape[1], shape[2..].iter().product()]);
    let window = Attrs::new()
        .with("kernel_shape", vec![size as i64, 1])
        .with("pads", vec![before as i64, 0, (size - 1 - before) as i64, 0])
        .with("count_include_pad", 1);
    let mean = rows.op("AveragePool", &[], window).shaped(shape);
    let (alpha, bias) = (call.float("alpha", 1e-4)?, call.float("bias", 1.0)?);
    Ok(vec![x / (mean * alpha + bias).pow(call.float("beta", 0.75)?)])
}

/// Upgrades opsets before 13, which flatten the input to two axes at `axis`, by default 1.
fn flattened(opset: i64, _: &mut Vec<Option<ValueId>>, attrs: &mut Attrs) {
    if opset < 13 {
        if attrs.get("axis").is_none() {
            attrs.set("axis", Attr::Int(1));
        }
        attrs.set("flatten", Attr::Int(1));
    }
}

/// The axes along which values sum to one.
pub fn softmax_axes(call: &Call) -> OpResult<Vec<usize>> {
    let shape = call.shape(0);
    let flatten = call.int("flatten", 0)? != 0;
    // Flattened at the end, every value is a row of its own.
    if flatten && call.int("axis", -1)? == shape.len() as i64 {
        return Ok(Vec::new());
    }
    let axis = call.axis("axis", -1, shape)?;
    Ok(if flatten { (axis..shape.len()).collect() } else { vec![axis] })
}

fn infer_softmax(call: &Call) -> OpResult<Vec<Fact>> {
    infer_over(call, softmax_axes)
}

fn eval_softmax(inputs: &Args<&[f64]>, call: &Call, finish: fn(f64, f64, f64) -> f64) -> OpResult<Vec<Vec<f64>>> {
    eval_over(inputs, call, softmax_axes, |row| {
        let max = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = row.iter().map(|x| (x - max).exp()).sum();
        Box::new(move |x| finish(x, max, sum))
    })
}

fn decompose_softmax<'g>(call: &Call, x: Var<'g>, log: bool) -> OpResult<Vec<Var<'g>>> {
    let axes = softmax_axes(call)?;
    if axes.is_empty() {
        // The only member of a row: 1, or 0 as a logarithm.
        let zero = x.op("Sub", &[x], Attrs::new());
        return Ok(vec![if log { zero } else { zero.exp() }]);
    }
    let shifted = x - reduce("ReduceMax", x, &axes);
    let exp = shifted.exp();
    let sum = reduce("ReduceSum", exp, &axes);
    Ok(vec![if log { shifted - sum.log() } else { exp / sum }])
}

#[cfg(test)]
mod tests {
    use crate::dtype::DType::F32;
    use crate::op::Attrs;
    use crate::ops::tests::{eval, refused};

    #[test]
    fn neighbours_stand_on_both_sides() {
        let of = |size: i64| {
            let attrs = Attrs::new().with("size", size).with("alpha", size as f64).with("beta", 1.0).with("bias", 0.0);
            eval("LRN", &[(F32, &[1, 3, 1], &[1.0, 2.0, 4.0])], &attrs).1
        };
        assert_eq!(of(1), [1.0, 0.5, 0.25]);
        assert_eq!(of(2), [1.0 / 5.0, 2.0 / 20.0, 4.0 / 16.0], "an even one out stands behind");
        assert_eq!(of(3), [1.0 / 5.0, 2.0 / 21.0, 4.0 / 20.0]);
        let found = refused("LRN", &[(F32, &[1, 3])], &Attrs::new());
        assert_eq!(found, "attribute 'size': expected 1 to 65535 channels, found 0");
    }
}
