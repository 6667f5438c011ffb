//! Rows that compute constants from shapes, and rows that read elements by index.

use super::compose::composed;
use super::{
    along, ensure, expect_dtype, indices, input_name, moving, output, position, required_ints, row, transposed_map,
};
use crate::dtype::DType;
use crate::expr::Expr;
use crate::kernel::{PadMode, Template};
use crate::narrow::{self, Rounding};
use crate::op::{
    Args, Attr, Attrs, Back, Call, Eval, Fact, Infer, Input, Lower, Nodes, OpDef, OpResult, Part, TemplateCall, Var,
    inputs, names,
};
use crate::shape::{Access, Shape};
use crate::tensor::Tensor;

/// The row of a condition of the index.
pub const BAND: &str = "plimsoll.Band";

const DATA: &[Input] = inputs![data];
const GATHER: &[Input] = inputs![data indices];
const PAD: &[Input] = inputs![data pads= constant_value= axes=];
const RANGE: &[Input] = inputs![start= limit= delta=];
const CONSTANT: &[&str] = names![value value_float value_floats value_int value_ints];

#[rustfmt::skip] // A table: one row, one line, where it fits.
pub(super) static OPS: &[OpDef] = &[
    // Known before the run
    known("Constant", "The value of its attribute", &[],
        |c| constant(c.attrs).map(|t| vec![Fact::new(t.dtype(), t.shape().clone())]),
        |c| constant(c.attrs))
        .sample(|s| s.attr("value", Tensor::from_f64(DType::F32, [2, 2], &[1.0, -2.0, 3.0, 4.0])))
        .attrs(CONSTANT),
    known("ConstantOfShape", "One value everywhere", inputs![input=], constant_of_shape,
        |c| {
            let (filler, shape) = (filler(c)?, constant_of_shape(c)?.remove(0).shape);
            Ok(filler.gather(&Access { strides: vec![0; shape.len()], shape, offset: 0 }))
        })
        .sample(|s| s.ints("input", &[2, 3]).attr("value", Tensor::from_f64(DType::F32, [1], &[2.5])))
        .attrs(names![value]),
    known("EyeLike", "1 on the `k`-th diagonal, 0 elsewhere", inputs![input], eye_like,
        |c| {
            let (k, fact) = (c.int("k", 0)?, eye_like(c)?.remove(0));
            let eye: Vec<_> = indices(&fact.shape).map(|i| f64::from(u8::from(diagonal(&i) == k))).collect();
            Ok(Tensor::from_f64(fact.dtype, fact.shape, &eye))
        })
        .sample(|s| s.input(DType::I64, &[3, 4], 0.0, 1.0).attr("k", -1).attr("dtype", DType::F32.onnx()))
        .attrs(names![dtype k]),
    known("Range", "The numbers from `start` to `limit`, which is left out, `delta` apart", RANGE,
        |c| range(c).map(|(dtype, len)| vec![Fact::new(dtype, [len])]),
        range_values)
        .sample(|s| s.attr("start", Tensor::from_f64(DType::F32, [], &[3.0])).attr("limit", Tensor::from_f64(DType::F32, [], &[9.0])).attr("delta", Tensor::from_f64(DType::F32, [], &[3.0])))
        .attrs(names![stash_type]),
    known("Shape", "The extents of the input's axes `start` to `end`", DATA,
        |c| output(DType::I64, [extents(c)?.len()]),
        |c| extents(c).map(|d| whole_numbers([d.len()].into(), d)))
        .sample(|s| s.floats(&[&[2, 5, 3]]).attr("start", -2).attr("end", 2))
        .attrs(names![start end]),
    known("Size", "The number of the input's elements", DATA,
        |_| output(DType::I64, Shape::default()),
        |c| Ok(whole_numbers(Shape::default(), &[c.shape(0).numel()]))).sample(|s| s.floats(&[&[2, 5, 3]])),
    // Read where an index says
    moving("Gather", "The slices along `axis` that the indices name", GATHER, gather,
        |x, c| {
            let (axis, rank) = (c.axis("axis", 0, c.shape(0))?, c.shape(1).len());
            lookup(x, c, |i, indices| {
                let named = indices(&i[axis..axis + rank], c.shape(0)[axis]);
                [&i[..axis], &[named], &i[axis + rank..]].concat()
            })
        },
        Lower::Template(|c, x| {
            let (axis, shape) = (c.axis("axis", 0, c.shape(0))?, c.infer()?.remove(0).shape);
            let (data, indices) = (&x[0], &x[1]);
            let mut base = data.clone();
            base.strides.splice(axis..=axis, indices.shape.iter().map(|_| 0));
            let mut at = Access { strides: vec![0; shape.len()], ..indices.clone() };
            at.strides[axis..axis + indices.strides.len()].copy_from_slice(&indices.strides);
            Ok(gather_core(data, axis..axis + 1, shape, base, [at]))
        }))
        .sample(|s| s.floats(&[&[5, 3]]).input(DType::I64, &[2, 4], -5.0, 4.0))
        .attrs(names![axis])
        .grad(gather_grad)
        .part(|c, axis, _| {
            let (at, rank) = (c.axis("axis", 0, c.shape(0)).ok()?, c.shape(1).len());
            Part::of(match axis {
                k if k < at => [Some(k), None],
                k if k < at + rank => [None, Some(k - at)],
                k => [Some(k + 1 - rank), None],
            })
        }),
    moving("GatherElements", "For each index, the element it names along `axis` at its own place", GATHER,
        gather_elements,
        |x, c| {
            let axis = c.axis("axis", 0, c.shape(0))?;
            lookup(x, c, |i, indices| {
                let mut source = i.to_vec();
                source[axis] = indices(i, c.shape(0)[axis]);
                source
            })
        },
        Lower::Template(|c, x| {
            let (axis, mut base) = (c.axis("axis", 0, c.shape(0))?, x[0].clone());
            base.strides[axis] = 0;
            Ok(gather_core(&x[0], axis..axis + 1, x[1].shape.clone(), base, [x[1].clone()]))
        }))
        .sample(|s| s.floats(&[&[4, 3]]).input(DType::I64, &[2, 6], -3.0, 2.0).attr("axis", 1))
        .attrs(names![axis])
        .grad(|b, c, back| {
            let (zeros, dy) = (b.scalar(0.0, c.dtype(0)).expand(c.shape(0)), back.first()?);
            let attrs = Attrs::new().with("axis", c.axis("axis", 0, c.shape(0))? as i64).with("reduction", "add");
            Ok(vec![Some(zeros.op("ScatterElements", &[back.x[1], dy], attrs)), None])
        })
        .part(|c, axis, _| {
            let along = c.axis("axis", 0, c.shape(0)).ok()?;
            let alike = c.shape(0)[axis] == c.shape(1)[axis];
            if axis == along { Part::of([None, Some(axis)]) } else { Part::of([Some(axis); 2]).filter(|_| alike) }
        }),
    moving("GatherND", "The slices that the tuples along the last axis of the indices name", GATHER,
        gather_nd,
        |x, c| {
            let (batch, tuple) = tuples(c)?;
            let outer = c.shape(1).len() - 1;
            lookup(x, c, |i, indices| {
                let named = (0..tuple).map(|j| indices(&[&i[..outer], &[j]].concat(), c.shape(0)[batch + j]));
                [&i[..batch], &named.collect::<Vec<_>>(), &i[outer..]].concat()
            })
        },
        Lower::Template(|c, x| {
            let ((batch, tuple), shape) = (tuples(c)?, c.infer()?.remove(0).shape);
            let (data, outer) = (&x[0], x[1].shape.len() - 1);
            let mut base = data.clone();
            base.strides.splice(batch..batch + tuple, vec![0; outer - batch]);
            let at = |j: usize| {
                let mut strides = x[1].strides[..outer].to_vec();
                strides.resize(shape.len(), 0);
                let offset = x[1].offset + j as isize * x[1].strides[outer];
                Access { strides, offset, shape: shape.clone() }
            };
            Ok(gather_core(data, batch..batch + tuple, shape.clone(), base, (0..tuple).map(at)))
        }))
        .sample(|s| s.floats(&[&[3, 3]]).input(DType::I64, &[4, 2], -3.0, 2.0))
        .attrs(names![batch_dims])
        .grad(|b, c, back| {
            // Tuples name the batch, too.
            let mut indices = back.x[1];
            let mut one = c.shape(1).clone();
            *one.last_mut().expect("indices have an axis of tuples") = 1;
            for axis in (0..tuples(c)?.0).rev() {
                let numbers = b.numbers(c.dtype(1), along(one[axis], one.len() - axis), 0.0).expand(&one);
                indices = b.concat(&[numbers, indices], -1);
            }
            let zeros = b.scalar(0.0, c.dtype(0)).expand(c.shape(0));
            let attrs = Attrs::new().with("reduction", "add");
            Ok(vec![Some(zeros.op("ScatterND", &[indices, back.first()?], attrs)), None])
        })
        .part(|c, axis, _| {
            let ((batch, tuple), outer) = (tuples(c).ok()?, c.shape(1).len() - 1);
            Part::of(match axis {
                k if k < batch => [Some(k), Some(k)],
                k if k < outer => [None, Some(k)],
                k => [Some(k - outer + batch + tuple), None],
            })
        }),
    row("Pad", "The input with more elements, or fewer, at both ends of its axes", PAD, pad, pad_eval,
        Lower::Template(pad_core))
        .sample(|s| s.floats(&[&[3, 4]]).ints("pads", &[0, 2, 1, 0]))
        .attrs(names![mode])
        .grad(pad_grad)
        .upgrade(|_, _, attrs| {
            // Before opset 11.
            if let Some(value) = attrs.remove("value") {
                attrs.set("constant_value", value);
            }
        })
        .part(|c, axis, _| Part::of([Some(axis)]).filter(|_| pads(c).is_ok_and(|pads| pads[axis] == (0, 0)))),
    // Computed from the index
    row("OneHot", "`values[1]` where an index is the position along the new `axis`, else `values[0]`",
        inputs![indices depth= values], one_hot,
        |x, c| {
            let (axis, depth) = one_hot_axis(c)?;
            let [at, values] = [x[0], x[1]];
            let hot = |mut i: Vec<usize>| {
                let place = i.remove(axis) as f64;
                let named = at[position(&i, c.shape(0))].trunc();
                values[usize::from(place == named || place == named + depth as f64)]
            };
            Ok(vec![indices(&one_hot(c)?[0].shape).map(hot).collect()])
        },
        Lower::Decompose(one_hot_nodes))
        .sample(|s| s.input(DType::I64, &[2, 3], -5.0, 4.0).floats(&[&[2]]).attr("depth", 4).attr("axis", 0).element(DType::F32))
        .attrs(names![axis]),
    row("Trilu", "The part on and above the `k`-th diagonal, or on and below it where `upper` is 0",
        inputs![input k=], trilu,
        |x, c| {
            let (k, upper) = (c.int("k", 0)?, c.int("upper", 1)? != 0);
            let x = x[0].iter();
            let keep = |i: &[usize]| if upper { diagonal(i) >= k } else { diagonal(i) <= k };
            Ok(vec![x.zip(indices(c.shape(0))).map(|(&x, i)| if keep(&i) { x } else { 0.0 }).collect()])
        },
        Lower::Map(trilu_expr))
        .grad(|_, c, back| Ok(vec![Some(back.first()?.op("Trilu", &[], c.attrs.clone()))]))
        .sample(|s| s.floats(&[&[2, 4, 5]]).attr("k", 1))
        .attrs(names![upper])
        .part(|c, axis, _| Part::of([Some(axis)]).filter(|_| axis + 2 < c.shape(0).len())),
    row(BAND, "True where the column is from `from` to `to` behind the row, in a space such as that of `x`, whose elements do not count",
        inputs![x],
        |c| {
            let rank = c.shape(0).len();
            ensure(rank > 1, || format!("input 'x': expected at least 2 axes, found {}", c.shape(0)))?;
            ends(c)?;
            output(DType::Bool, c.shape(0).clone())
        },
        |_, c| {
            let [from, to] = ends(c)?;
            let inside = |i: Vec<usize>| f64::from(u8::from((from..=to).contains(&diagonal(&i))));
            Ok(vec![indices(c.shape(0)).map(inside).collect()])
        },
        Lower::Map(band_expr))
        .sample(|s| s.floats(&[&[2, 4, 5]]).attr("from", -1).attr("to", 1))
        .attrs(names![from to])
        .part(|c, axis, _| Part::of([Some(axis)]).filter(|_| axis + 2 < c.shape(0).len())),
    composed("CenterCropPad", "The middle of the data, or the data in the middle of zeros, along `axes`, where `shape` says how many",
        inputs![input_data shape=], |_, c, x| centred(c, x[0]))
        .sample(|s| s.floats(&[&[10, 7, 3]]).ints("shape", &[4, 10, 3]))
        .attrs(names![axes]),
];

/// The gradients of the elements that each index names, added up: a row of the table per index, in the order of the indices.
fn gather_grad<'g>(b: Nodes<'g>, call: &Call, back: &Back<'_, 'g>) -> OpResult<Vec<Option<Var<'g>>>> {
    let (data, dy) = (call.shape(0), back.first()?);
    let (axis, rank) = (call.axis("axis", 0, data)?, call.shape(1).len());
    let count = call.shape(1).numel();
    // The axis first, in the data as in the gradient.
    let mut order: Vec<usize> = (axis..axis + rank).collect();
    order.extend((0..data.len() - 1 + rank).filter(|k| !(axis..axis + rank).contains(k)));
    let mut inner: Vec<usize> = data.to_vec();
    let extent = inner.remove(axis);
    let rows = dy.transpose(&order).shaped(&[&[count], &inner[..]].concat());
    let zeros = b.scalar(0.0, call.dtype(0)).expand(&[&[extent], &inner[..]].concat());
    let indices = back.x[1].shaped(&[count, 1]);
    let sums = zeros.op("ScatterND", &[indices, rows], Attrs::new().with("reduction", "add"));
    let mut order: Vec<usize> = (1..data.len()).collect();
    order.insert(axis, 0);
    Ok(vec![Some(sums.transpose(&order)), None])
}

/// The gradient of each element of the data: the sum of those of its copies.
fn pad_grad<'g>(b: Nodes<'g>, call: &Call, back: &Back<'_, 'g>) -> OpResult<Vec<Option<Var<'g>>>> {
    let (mode, crops, pads) = (pad_mode(call)?, cropped(call)?, pads(call)?);
    let mut dx = back.first()?;
    for (axis, (&(start, left), &(before, after))) in crops.iter().zip(&pads).enumerate() {
        let extent = call.shape(0)[axis];
        if let PadMode::Constant(_) = mode {
            let first = before.max(0) as usize;
            dx = super::layout::pad(dx.part(axis, first..first + left), axis, start, extent - start - left);
        } else if (before, after) != (0, 0) {
            let out = dx.shape()?[axis];
            let source = |i: usize| pad_source(mode, left, i as i64 - before.max(0)).map(|at| (start + at, 1.0));
            dx = transposed_map(b, dx, axis, [out, extent], |i| source(i).into_iter().collect())?;
        }
    }
    Ok(vec![Some(dx)])
}

fn centred<'g>(call: &Call, mut y: Var<'g>) -> OpResult<Vec<Var<'g>>> {
    let (data, wanted) = (call.shape(0), as_shape(&required_ints(call, "shape")?)?);
    let axes = call.listed_axes()?.unwrap_or_else(|| (0..data.len()).collect());
    ensure(axes.len() == wanted.len(), || format!("'shape': expected {} extents, found {wanted}", axes.len()))?;
    let mut pads = vec![0; 2 * data.len()];
    for (&axis, &extent) in axes.iter().zip(wanted.iter()) {
        let (found, at) = (data[axis], data[axis].abs_diff(extent) / 2);
        if found > extent {
            y = y.part(axis, at..(at + extent));
        }
        (pads[axis], pads[data.len() + axis]) = match extent.checked_sub(found) {
            Some(missing) => (at as i64, (missing - at) as i64),
            None => (0, 0),
        };
    }
    if pads.iter().any(|&n| n > 0) {
        y = y.op("Pad", &[], Attrs::new().with("pads", pads));
    }
    Ok(vec![y])
}

/// A row without a kernel: its value follows from facts and attributes.
pub(super) const fn known(
    name: &'static str,
    doc: &'static str,
    inputs: &'static [Input],
    infer: Infer,
    value: fn(&Call) -> OpResult<Tensor>,
) -> OpDef {
    OpDef::new(name, doc, inputs, infer, Eval::Known(value), Lower::Const)
}

/// The tensor in a Constant's attributes, exactly.
fn constant(attrs: &Attrs) -> OpResult<Tensor> {
    let mut given = attrs.iter();
    let (Some((name, attr)), None) = (given.next(), given.next()) else {
        return Err(format!("expected one attribute of {}, found {}", CONSTANT.join(", "), attrs.iter().count()));
    };
    let vector = |dtype, values: &[f64]| Tensor::from_f64(dtype, [values.len()], values);
    let ints = |values: &[i64], shape: Shape| Tensor::from_i64(shape, values).map_err(|e| e.to_string());
    match (name, attr) {
        ("value", Attr::Tensor(tensor)) => Ok(tensor.clone()),
        ("value_float", Attr::Float(value)) => Ok(Tensor::from_f64(DType::F32, Shape::default(), &[*value])),
        ("value_floats", Attr::Floats(values)) => Ok(vector(DType::F32, values)),
        ("value_floats", Attr::Ints(values)) if values.is_empty() => Ok(vector(DType::F32, &[])),
        ("value_int", Attr::Int(value)) => ints(&[*value], Shape::default()),
        ("value_ints", Attr::Ints(values)) => ints(values, Shape::new([values.len()])),
        ("value_ints", Attr::Floats(values)) if values.is_empty() => ints(&[], Shape::new([0])),
        (name, attr) => Err(format!("attribute '{name}': unexpected {}", attr.kind())),
    }
}

/// A list of integers as a shape.
pub(super) fn as_shape(dims: &[i64]) -> OpResult<Shape> {
    let shape = dims.iter().map(|&d| usize::try_from(d)).collect::<Result<Shape, _>>();
    shape.map_err(|_| format!("expected extents of at least 0, found {dims:?}"))
}

/// The one-element tensor that fills a ConstantOfShape.
fn filler(call: &Call) -> OpResult<Tensor> {
    match call.attrs.get("value") {
        None => Ok(Tensor::from_f64(DType::F32, Shape::default(), &[0.0])),
        Some(Attr::Tensor(tensor)) if tensor.shape().checked_len() == Some(1) => Ok(tensor.clone()),
        Some(Attr::Tensor(tensor)) => Err(format!("attribute 'value': expected one element, found {}", tensor.shape())),
        Some(other) => Err(format!("attribute 'value': expected a tensor, found {}", other.kind())),
    }
}

fn constant_of_shape(call: &Call) -> OpResult<Vec<Fact>> {
    output(filler(call)?.dtype(), as_shape(&required_ints(call, "input")?)?)
}

fn eye_like(call: &Call) -> OpResult<Vec<Fact>> {
    call.int("k", 0)?;
    let to = call.int("dtype", call.dtype(0).onnx())?;
    let dtype = DType::from_onnx(to).ok_or_else(|| format!("attribute 'dtype': unknown element type {to}"))?;
    match call.shape(0).len() {
        2 => output(dtype, call.shape(0).clone()),
        _ => Err(format!("input 'input': expected a matrix, found {}", call.shape(0))),
    }
}

/// The diagonal of the last two axes that an index is on.
fn diagonal(index: &[usize]) -> i64 {
    index[index.len() - 1] as i64 - index[index.len() - 2] as i64
}

/// Counts of elements or axes as an `i64` tensor.
fn whole_numbers(shape: Shape, numbers: &[usize]) -> Tensor {
    let numbers: Vec<_> = numbers.iter().map(|&n| n as i64).collect();
    Tensor::from_i64(shape, &numbers).expect("as many numbers as the shape has elements")
}

/// The start, the limit and the delta of a Range.
enum Bounds {
    Ints([i64; 3]),
    Others(DType, [f64; 3]),
}

fn bounds(call: &Call) -> OpResult<Bounds> {
    let names = ["start", "limit", "delta"];
    let dtype = |name| match call.attrs.get(name) {
        None => Err(format!("'{name}' is required and must be a constant")),
        Some(Attr::Int(_) | Attr::Ints(_)) => Ok(DType::I64),
        Some(Attr::Tensor(tensor)) => Ok(tensor.dtype()),
        Some(_) => Ok(DType::F32),
    };
    match [dtype(names[0])?, dtype(names[1])?, dtype(names[2])?] {
        [DType::I64, DType::I64, DType::I64] => {
            Ok(Bounds::Ints([call.int(names[0], 0)?, call.int(names[1], 0)?, call.int(names[2], 0)?]))
        }
        [a, b, c] if a == b && b == c && a != DType::Bool => {
            let [start, limit, delta] = names.map(|name| call.float(name, 0.0));
            Ok(Bounds::Others(a, [start?, limit?, delta?]))
        }
        [a, b, c] => Err(format!("expected start, limit and delta of one number type, found {a}, {b} and {c}")),
    }
}

/// The element type and the length of a Range.
fn range(call: &Call) -> OpResult<(DType, usize)> {
    match bounds(call)? {
        Bounds::Ints([start, limit, 0]) => Err(format!("expected finite steps, found 0 from {start} to {limit}")),
        Bounds::Ints([start, limit, delta]) => {
            let (distance, delta) = (i128::from(limit) - i128::from(start), i128::from(delta));
            let count = (distance + delta - delta.signum()) / delta;
            let count = usize::try_from(count.max(0)).map_err(|_| "more numbers than memory could hold".to_owned())?;
            Ok((DType::I64, count))
        }
        Bounds::Others(dtype, [start, limit, delta]) => {
            let count = ((limit - start) / delta).ceil().max(0.0);
            ensure(delta != 0.0 && count.is_finite(), || {
                format!("expected finite steps, found {delta} from {start} to {limit}")
            })?;
            Ok((dtype, count as usize))
        }
    }
}

fn range_values(call: &Call) -> OpResult<Tensor> {
    let (dtype, count) = range(call)?;
    match bounds(call)? {
        Bounds::Ints([start, _, delta]) => {
            let mut numbers: Vec<i64> = Vec::with_capacity(count);
            // The number after the last may not fit the type. It is not part of the result.
            numbers.extend(std::iter::successors(Some(start), |n| Some(n.wrapping_add(delta))).take(count));
            Tensor::from_i64([count], &numbers).map_err(|e| e.to_string())
        }
        Bounds::Others(_, [start, _, delta]) => {
            let numbers: Vec<_> = (0..count).map(|i| start + i as f64 * delta).collect();
            Ok(Tensor::from_f64(dtype, [count], &numbers))
        }
    }
}

/// The extents that a Shape node returns.
fn extents<'a>(call: &Call<'a>) -> OpResult<&'a [usize]> {
    let shape = call.shape(0);
    let rank = shape.len() as i64;
    let clamp = |at: i64| if at < 0 { at.saturating_add(rank) } else { at }.clamp(0, rank) as usize;
    let (start, end) = (clamp(call.int("start", 0)?), clamp(call.int("end", rank)?));
    Ok(&shape[start.min(end)..end])
}

fn integer_indices(call: &Call) -> OpResult<()> {
    expect_dtype(call, 1, "i64 or i32", |d| matches!(d, DType::I64 | DType::I32)).map(|_| ())
}

/// Refuses to read along axes without elements.
fn inhabited(call: &Call, axes: std::ops::Range<usize>, out: Shape) -> OpResult<Vec<Fact>> {
    ensure(!call.shape(0)[axes].contains(&0) || out.contains(&0), || {
        format!("input '{}': expected elements to gather, found {}", input_name(call, 0), call.shape(0))
    })?;
    output(call.dtype(0), out)
}

fn gather(call: &Call) -> OpResult<Vec<Fact>> {
    integer_indices(call)?;
    let axis = call.axis("axis", 0, call.shape(0))?;
    let mut out = call.shape(0).clone();
    out.splice(axis..=axis, call.shape(1).iter().copied());
    inhabited(call, axis..axis + 1, out)
}

fn gather_elements(call: &Call) -> OpResult<Vec<Fact>> {
    integer_indices(call)?;
    let (data, out) = (call.shape(0), call.shape(1));
    let axis = call.axis("axis", 0, data)?;
    if data.len() != out.len() || (0..data.len()).any(|k| k != axis && out[k] > data[k]) {
        return Err(format!("input 'indices': expected extents within {data} but for axis {axis}, found {out}"));
    }
    inhabited(call, axis..axis + 1, out.clone())
}

/// The batch axes of a GatherND, and the length of its tuples.
pub fn tuples(call: &Call) -> OpResult<(usize, usize)> {
    let (data, at) = (call.shape(0), call.shape(1));
    let refuse = || format!("expected indices of [batch.., n.., tuple] for data {data}, found {at}");
    let batch = usize::try_from(call.int("batch_dims", 0)?).map_err(|_| refuse())?;
    let tuple = *at.last().ok_or_else(refuse)?;
    let fits = batch < at.len() && tuple >= 1 && batch.checked_add(tuple).is_some_and(|n| n <= data.len());
    if fits && data[..batch] == at[..batch] { Ok((batch, tuple)) } else { Err(refuse()) }
}

fn gather_nd(call: &Call) -> OpResult<Vec<Fact>> {
    integer_indices(call)?;
    let ((batch, tuple), at) = (tuples(call)?, call.shape(1));
    let out = [&at[..at.len() - 1], &call.shape(0)[batch + tuple..]].concat();
    inhabited(call, batch..batch + tuple, out.into())
}

/// Fills the output from input 0: `source` gives the index to read for an index of the output, with a function that
/// reads input 1 at an index and resolves what it finds along an axis of the given extent.
fn lookup(
    x: &Args<&[f64]>,
    call: &Call,
    source: impl Fn(&[usize], &dyn Fn(&[usize], usize) -> usize) -> Vec<usize>,
) -> OpResult<Vec<Vec<f64>>> {
    let [data, at] = [x[0], x[1]];
    let named = |index: &[usize], extent: usize| {
        let i = at[position(index, call.shape(1))];
        (if i < 0.0 { i + extent as f64 } else { i }).clamp(0.0, extent as f64 - 1.0) as usize
    };
    let shape = &call.infer()?[0].shape;
    Ok(vec![indices(shape).map(|i| data[position(&source(&i, &named), call.shape(0))]).collect()])
}

/// A gather along `axes` of the data. `base` is the access of the other axes; `at` has one index access per axis.
fn gather_core(
    data: &Access,
    axes: std::ops::Range<usize>,
    shape: Shape,
    base: Access,
    at: impl IntoIterator<Item = Access>,
) -> TemplateCall {
    let template =
        Template::Gather { strides: data.strides[axes.clone()].to_vec(), extents: data.shape[axes].to_vec() };
    let operand = |input: usize, access: Access| (input, Access { shape: shape.clone(), ..access });
    let reads = [operand(0, base)].into_iter().chain(at.into_iter().map(|at| operand(1, at))).collect();
    TemplateCall { template, reads, shape: shape.clone() }
}

/// Elements to add before and behind each axis.
fn pads(call: &Call) -> OpResult<Vec<(i64, i64)>> {
    let (shape, pads) = (call.shape(0), required_ints(call, "pads")?);
    let all: Vec<_> = (0..shape.len() as i64).collect();
    let axes = call.ints("axes")?.unwrap_or(all.into());
    if pads.len() != 2 * axes.len() {
        return Err(format!("input 'pads': expected {} values, found {}", 2 * axes.len(), pads.len()));
    }
    let mut out: Vec<Option<(i64, i64)>> = vec![None; shape.len()];
    for (&axis, (&before, &behind)) in axes.iter().zip(pads.iter().zip(&pads[axes.len()..])) {
        let at = shape.axis(axis).ok_or_else(|| format!("input 'axes': axis {axis} is outside {shape}"))?;
        ensure(out[at].replace((before, behind)).is_none(), || format!("input 'axes': axis {axis} is given twice"))?;
    }
    Ok(out.into_iter().map(Option::unwrap_or_default).collect())
}

/// The value of the added elements.
fn filling(call: &Call) -> OpResult<f64> {
    let value = call.float("constant_value", 0.0)?;
    match call.int("constant_value", 0) {
        Ok(exact) if call.dtype(0) == DType::I64 && exact != value as i64 => {
            Err(format!("input 'constant_value': expected an integer that f64 holds, found {exact}"))
        }
        _ => Ok(value),
    }
}

fn pad_mode(call: &Call) -> OpResult<PadMode> {
    match call.str("mode", "constant")? {
        "constant" => {
            let (value, dtype) = (filling(call)?, call.dtype(0));
            // Kernels have codes.
            let code = || narrow::encode(dtype, value, Rounding::default()).into();
            Ok(PadMode::Constant(if dtype.is_narrow_float() { code() } else { value }))
        }
        "edge" => Ok(PadMode::Edge),
        "reflect" => Ok(PadMode::Reflect),
        "wrap" => Ok(PadMode::Wrap),
        other => Err(format!("attribute 'mode': expected constant, edge, reflect or wrap, found {other}")),
    }
}

/// The part of each axis that negative pads leave: its start and its extent.
fn cropped(call: &Call) -> OpResult<Vec<(usize, usize)>> {
    let crop = |(&extent, (before, behind)): (&usize, (i64, i64))| {
        let start = before.min(0).unsigned_abs();
        let left = (extent as u64).checked_sub(start).and_then(|d| d.checked_sub(behind.min(0).unsigned_abs()));
        let left =
            left.ok_or_else(|| format!("input 'pads': cannot take {before} and {behind} from {extent} elements"))?;
        Ok((start as usize, left as usize))
    };
    call.shape(0).iter().zip(pads(call)?).map(crop).collect()
}

fn pad(call: &Call) -> OpResult<Vec<Fact>> {
    let mode = pad_mode(call)?;
    let grow = |((_, left), (before, behind)): ((usize, usize), (i64, i64))| {
        let more = before.max(0).checked_add(behind.max(0)).ok_or("the extents overflow")?;
        match (left, more, mode) {
            (0, 1.., PadMode::Edge | PadMode::Reflect | PadMode::Wrap) => {
                Err(format!("input 'data': expected elements along each padded axis, found {}", call.shape(0)))
            }
            _ => Ok(left.checked_add(more as usize).ok_or("the extents overflow")?),
        }
    };
    output(call.dtype(0), cropped(call)?.into_iter().zip(pads(call)?).map(grow).collect::<OpResult<Shape>>()?)
}

fn pad_eval(x: &Args<&[f64]>, call: &Call) -> OpResult<Vec<Vec<f64>>> {
    let (x, mode) = (x[0], pad_mode(call)?);
    let (crops, pads) = (cropped(call)?, pads(call)?);
    // Along one axis: the element of the data at output index `i`, if there is one.
    let source = |k: usize, i: usize| {
        let (start, left) = crops[k];
        pad_source(mode, left, i as i64 - pads[k].0.max(0)).map(|at| start + at)
    };
    let element = |index: Vec<usize>| {
        let inside: Option<Vec<_>> = index.iter().enumerate().map(|(k, &i)| source(k, i)).collect();
        match (inside, mode) {
            (Some(inside), _) => x[position(&inside, call.shape(0))],
            (None, PadMode::Constant(value)) => value,
            (None, _) => unreachable!("every other mode finds an element"),
        }
    };
    Ok(vec![indices(&pad(call)?[0].shape).map(element).collect()])
}

/// Negative pads are a slice of the data, so the template only adds elements.
/// The element of an axis of `extent` that stands at this place, which may be outside.
fn pad_source(mode: PadMode, extent: usize, at: i64) -> Option<usize> {
    let extent = extent as i64;
    let at = match mode {
        PadMode::Constant(_) if at < 0 || at >= extent => return None,
        PadMode::Constant(_) => at,
        PadMode::Edge => at.clamp(0, extent - 1),
        PadMode::Wrap => at.rem_euclid(extent),
        PadMode::Reflect => {
            let period = (2 * (extent - 1)).max(1);
            let at = at.rem_euclid(period);
            if at < extent { at } else { period - at }
        }
    };
    Some(at as usize)
}

fn pad_core(call: &Call, x: &[Access]) -> OpResult<TemplateCall> {
    let crops = cropped(call)?;
    let data = crops.iter().enumerate().fold(x[0].clone(), |a, (k, &(start, left))| a.slice(k, start, 1, left));
    let before = pads(call)?.iter().map(|&(before, _)| before.max(0) as isize).collect();
    let shape = pad(call)?.remove(0).shape;
    Ok(TemplateCall { template: Template::Pad { before, mode: pad_mode(call)? }, shape, reads: vec![(0, data)] })
}

/// The new axis of a OneHot, and its extent.
fn one_hot_axis(call: &Call) -> OpResult<(usize, usize)> {
    let rank = call.shape(0).len() as i64 + 1;
    let (axis, depth) = (call.int("axis", -1)?, call.float("depth", -1.0)?);
    let at = if axis < 0 { axis.saturating_add(rank) } else { axis };
    ensure((0..rank).contains(&at), || format!("attribute 'axis': axis {axis} is outside rank {rank}"))?;
    ensure(depth >= 1.0 && depth <= f64::from(i32::MAX), || {
        format!("'depth' is required and must be a constant of at least 1, found {depth}")
    })?;
    Ok((at as usize, depth as usize))
}

fn one_hot(call: &Call) -> OpResult<Vec<Fact>> {
    expect_dtype(call, 0, "a float or integer type", DType::is_number)?;
    let (axis, depth) = one_hot_axis(call)?;
    ensure(call.shape(1)[..] == [2], || format!("input 'values': expected [2], found {}", call.shape(1)))?;
    let mut shape = call.shape(0).clone();
    shape.insert(axis, depth);
    output(call.dtype(1), shape)
}

fn one_hot_nodes<'g>(b: Nodes<'g>, call: &Call, x: &Args<Var<'g>>) -> OpResult<Vec<Var<'g>>> {
    let (axis, depth) = one_hot_axis(call)?;
    let at = from_start(x[0].cast(DType::I64), depth).unsqueeze(&[axis as i64]);
    let hit = at.equal(b.numbers(DType::I64, along(depth, call.shape(0).len() + 1 - axis), 0.0));
    let (off, on) = (x[1].part(0, 0..1), x[1].part(0, 1..2));
    Ok(vec![hit.select(on, off)])
}

/// Indices counted from the start of an axis of this extent. A negative index counts from the end.
pub fn from_start(at: Var, extent: usize) -> Var {
    let (zero, extent) = (at.like(0.0), at.like(extent as f64));
    at.less(zero).select(at + extent, at)
}

fn trilu(call: &Call) -> OpResult<Vec<Fact>> {
    call.int("k", 0)?;
    call.int("upper", 1)?;
    match call.shape(0).len() {
        0 | 1 => Err(format!("input 'input': expected at least 2 axes, found {}", call.shape(0))),
        _ => Ok(vec![call.fact(0).clone()]),
    }
}

/// The ends of a band.
fn ends(call: &Call) -> OpResult<[i64; 2]> {
    Ok([call.int("from", i64::MIN)?, call.int("to", i64::MAX)?])
}

fn band_expr(x: &Args, call: &Call) -> Expr {
    let shape = call.shape(0);
    let axis = shape.len() - 2;
    let [from, to] = ends(call).unwrap_or([i64::MIN, i64::MAX]);
    let (row, column) = (Expr::index(axis), Expr::index(axis + 1));
    // Ends beyond the corners are none.
    let [low, high] = [-(shape[axis] as i64), shape[axis + 1] as i64];
    let first = (from > low).then(|| (&row + from.min(high) as f64).le(&column));
    let last = (to < high).then(|| column.le(&(&row + to.max(low) as f64)));
    let both = first.into_iter().chain(last).reduce(|a, b| a.and(&b));
    both.unwrap_or_else(|| x[0].like(1.0).cast(DType::Bool))
}

fn trilu_expr(x: &Args, call: &Call) -> Expr {
    let (k, upper) = (call.int("k", 0).unwrap_or(0), call.int("upper", 1).unwrap_or(1) != 0);
    let shape = call.shape(0);
    let axis = shape.len() - 2;
    // Diagonals beyond the corners are all alike, and a literal holds few of the 64-bit integers.
    let k = k.clamp(-(shape[axis] as i64), shape[axis + 1] as i64) as f64;
    let (row, column) = (Expr::index(axis) + k, Expr::index(axis + 1));
    let keep = if upper { row.le(&column) } else { column.le(&row) };
    keep.select(&x[0], &x[0].like(0.0))
}

#[cfg(test)]
mod tests {
    use crate::dtype::DType::*;
    use crate::op::{Attr, Attrs};
    use crate::ops::tests::{eval, refused};
    use crate::ops::{find, index::constant};
    use crate::shape::Shape;
    use crate::tensor::Tensor;

    const MATRIX: (crate::dtype::DType, &[usize], &[f64]) = (F32, &[3, 2], &[1.0, 1.2, 2.3, 3.4, 4.5, 5.7]);

    fn ints(name: &str, values: &[i64]) -> Attrs {
        Attrs::new().with(name, values.to_vec())
    }

    #[test]
    fn pad_follows_the_specification() {
        let pads = ints("pads", &[0, 2, 0, 0]);
        let padded = |mode: &str, pads: Attrs| eval("Pad", &[MATRIX], &pads.with("mode", mode)).1;
        assert_eq!(padded("constant", pads.clone())[..4], [0.0, 0.0, 1.0, 1.2]);
        assert_eq!(padded("reflect", pads.clone())[..4], [1.0, 1.2, 1.0, 1.2]);
        assert_eq!(padded("edge", pads.clone())[4..8], [2.3, 2.3, 2.3, 3.4]);
        let wrapped = padded("wrap", ints("pads", &[2, 1, 1, 1]));
        assert_eq!(wrapped[..8], [3.4, 2.3, 3.4, 2.3, 5.7, 4.5, 5.7, 4.5]);
        assert_eq!(wrapped[20..], [1.2, 1.0, 1.2, 1.0]);
        let cut = ints("pads", &[-1, 1]).with("axes", vec![0]).with("constant_value", 9.0);
        assert_eq!(eval("Pad", &[MATRIX], &cut), ("f32[3,2]".into(), vec![2.3, 3.4, 4.5, 5.7, 9.0, 9.0]));
        let x: &[_] = &[(F32, &[3][..], &[1.0, 2.0, 3.0][..])];
        let far = ints("pads", &[5, 4]).with("mode", "reflect");
        assert_eq!(eval("Pad", x, &far).1, [2.0, 1.0, 2.0, 3.0, 2.0, 1.0, 2.0, 3.0, 2.0, 1.0, 2.0, 3.0]);
        assert_eq!(
            refused("Pad", &[(F32, &[3])], &ints("pads", &[-2, -2])),
            "input 'pads': cannot take -2 and -2 from 3 elements"
        );
        assert_eq!(refused("Pad", &[(F32, &[3])], &ints("pads", &[1])), "input 'pads': expected 2 values, found 1");
        let row = Tensor::from_i64([1, 2], &[1, 0]).expect("two numbers");
        let (found, _) = eval("Pad", &[(F32, &[3], &[0.0; 3])], &Attrs::new().with("pads", Attr::shaping(&row)));
        assert_eq!(found, "f32[4]", "a list may be a row");
        let filled = |value: i64| ints("pads", &[1, 0]).with("constant_value", value);
        assert_eq!(eval("Pad", &[(I64, &[1], &[1.0])], &filled(i64::MAX)).1, [i64::MAX as f64, 1.0]);
        let found = refused("Pad", &[(I64, &[1])], &filled((1 << 53) + 1));
        assert_eq!(found, "input 'constant_value': expected an integer that f64 holds, found 9007199254740993");
    }

    #[test]
    fn pad_before_opset_11_names_its_value_otherwise() {
        let mut attrs = ints("pads", &[1, 0]).with("value", 2.5);
        find("Pad").and_then(|op| op.upgrade).expect("an upgrade")(2, &mut Vec::new(), &mut attrs);
        assert_eq!(eval("Pad", &[(F32, &[1], &[1.0])], &attrs).1, [2.5, 1.0]);
    }

    #[test]
    fn gathers_follow_the_specification() {
        let at = (I64, &[2, 2][..], &[0.0, 1.0, 1.0, 2.0][..]);
        let gathered = eval("Gather", &[MATRIX, at], &Attrs::new());
        assert_eq!(gathered, ("f32[2,2,2]".into(), vec![1.0, 1.2, 2.3, 3.4, 2.3, 3.4, 4.5, 5.7]));
        let last = eval("Gather", &[MATRIX, (I64, &[1], &[-1.0])], &Attrs::new().with("axis", 1));
        assert_eq!(last, ("f32[3,1]".into(), vec![1.2, 3.4, 5.7]));
        let data = (F32, &[2, 2][..], &[1.0, 2.0, 3.0, 4.0][..]);
        let at = (I64, &[2, 2][..], &[0.0, 0.0, 1.0, 0.0][..]);
        assert_eq!(eval("GatherElements", &[data, at], &Attrs::new().with("axis", 1)).1, [1.0, 1.0, 4.0, 3.0]);
        let corners = (I64, &[2, 2][..], &[0.0, 0.0, 1.0, 1.0][..]);
        assert_eq!(eval("GatherND", &[data, corners], &Attrs::new()), ("f32[2]".into(), vec![1.0, 4.0]));
        let cube = (F32, &[2, 2, 2][..], &[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0][..]);
        let batched = eval("GatherND", &[cube, (I64, &[2, 1], &[1.0, 0.0])], &Attrs::new().with("batch_dims", 1));
        assert_eq!(batched, ("f32[2,2]".into(), vec![2.0, 3.0, 4.0, 5.0]));
        assert_eq!(
            refused("Gather", &[(F32, &[2]), (F32, &[1])], &Attrs::new()),
            "input 'indices': expected i64 or i32, found f32"
        );
        assert!(refused("GatherND", &[(F32, &[2]), (I64, &[1, 2])], &Attrs::new()).starts_with("expected indices of"));
        assert!(refused("Gather", &[(F32, &[0]), (I64, &[1])], &Attrs::new()).ends_with("found [0]"));
    }

    #[test]
    fn trilu_follows_the_specification() {
        let x: &[_] = &[(I64, &[3, 3][..], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0][..])];
        let part = |upper: i64, k: i64| eval("Trilu", x, &Attrs::new().with("upper", upper).with("k", k)).1;
        assert_eq!(part(1, 0), [1.0, 2.0, 3.0, 0.0, 5.0, 6.0, 0.0, 0.0, 9.0]);
        assert_eq!(part(0, -1), [0.0, 0.0, 0.0, 4.0, 0.0, 0.0, 7.0, 8.0, 0.0]);
        assert_eq!((part(1, i64::MAX), part(0, i64::MAX).len()), (vec![0.0; 9], 9));
    }

    #[test]
    fn shapes_and_ranges_follow_the_specification() {
        let shape = |attrs| eval("Shape", &[(F32, &[2, 3, 0], &[])], &attrs);
        assert_eq!(shape(Attrs::new()), ("i64[3]".into(), vec![2.0, 3.0, 0.0]));
        assert_eq!(shape(Attrs::new().with("start", -2).with("end", 2)).1, [3.0]);
        assert_eq!(shape(Attrs::new().with("start", i64::MIN).with("end", i64::MAX)).1.len(), 3);
        assert_eq!(shape(Attrs::new().with("start", 2).with("end", 1)).0, "i64[0]");
        assert_eq!(eval("Size", &[(F32, &[2, 3], &[0.0; 6])], &Attrs::new()), ("i64[]".into(), vec![6.0]));
        let range = |a: Attr, b: Attr, c: Attr| {
            eval("Range", &[], &Attrs::new().with("start", a).with("limit", b).with("delta", c))
        };
        assert_eq!(range(3.into(), 9.into(), 3.into()), ("i64[2]".into(), vec![3.0, 6.0]));
        assert_eq!(range(10.0.into(), 4.0.into(), (-2.0).into()), ("f32[3]".into(), vec![10.0, 8.0, 6.0]));
        let i32s = |v: f64| Attr::shaping(&Tensor::from_f64(I32, Shape::default(), &[v]));
        assert_eq!(range(i32s(0.0), i32s(-1.0), i32s(1.0)), ("i32[0]".into(), vec![]));
        let stuck = Attrs::new().with("start", 0).with("limit", 9).with("delta", 0);
        assert_eq!(refused("Range", &[], &stuck), "expected finite steps, found 0 from 0 to 9");
    }

    #[test]
    fn constants_are_exact() {
        let exact = Attrs::new().with("value_ints", vec![i64::MAX, i64::MIN + 1]);
        assert_eq!(constant(&exact).map(|t| t.to_i64()), Ok(Some(vec![i64::MAX, i64::MIN + 1])));
        assert_eq!(eval("Constant", &[], &Attrs::new().with("value_float", 0.5)), ("f32[]".into(), vec![0.5]));
        assert!(refused("Constant", &[], &Attrs::new()).starts_with("expected one attribute of value, "));
        let filled = ints("input", &[2, 0]).with("value", Tensor::from_f64(Bool, [1], &[1.0]));
        assert_eq!(eval("ConstantOfShape", &[], &filled), ("bool[2,0]".into(), vec![]));
        assert_eq!(eval("ConstantOfShape", &[], &ints("input", &[])), ("f32[]".into(), vec![0.0]));
    }

    #[test]
    fn one_hot_follows_the_specification() {
        let values = (F32, &[2][..], &[1.0, 3.0][..]);
        let x: &[_] = &[(I64, &[3][..], &[1.0, -9.0, -1.0][..]), values];
        let hot = eval("OneHot", x, &Attrs::new().with("depth", 3));
        assert_eq!(hot, ("f32[3,3]".into(), vec![1.0, 3.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 3.0]));
        let eye = Attrs::new().with("k", 1).with("dtype", F32.onnx());
        assert_eq!(eval("EyeLike", &[(I32, &[2, 3], &[0.0; 6])], &eye).1, [0.0, 1.0, 0.0, 0.0, 0.0, 1.0]);
    }
}
