//! Products of 8-bit integers.
//!
//! An 8-bit integer minus its zero point is a whole number, and so are products of these. `f32` holds a sum of few
//! such products exactly. So kernels of float products compute partial sums, which are added as `i32`. This is how they are
//! computed where `src/graph/pass/int8.rs` finds no product of bytes: sums too long for `i32`, zero points along the summed axis,
//! filters that are no constants, few channels on GPUs.

use super::linear::{lower_matmul, part_matmul};
use super::quantize::{spread, spread_node};
use super::{ensure, expect_dtype, expect_shape, expect_type_of, find, indices, output};
use crate::dtype::DType;
use crate::op::{Args, Call, Eval, Fact, Input, Lower, Nodes, OpDef, OpResult, Var, inputs, names};
use crate::shape::{Access, Shape};
use std::ops::Range;

/// Number of products of differences of 8-bit integers that `f32` adds up exactly: `EXACT * 255 * 255 < 2^24`.
const EXACT: usize = 258;

const CONV: &[&str] = names![auto_pad dilations group kernel_shape pads strides];
const QLINEAR: &[Input] = inputs![x x_scale x_zero_point w w_scale w_zero_point y_scale y_zero_point B?];
const QLINEAR_MATRICES: &[Input] = inputs![a a_scale a_zero_point b b_scale b_zero_point y_scale y_zero_point];

/// The row of an exact product of `u8` by `i8`, or of `i8` by `u8`.
pub const PRODUCT_OF_BYTES: &str = "plimsoll.ProductOfBytes";
/// The row of the exact sums of bytes along an axis.
pub const SUMS_OF_BYTES: &str = "plimsoll.SumsOfBytes";
/// The row of bytes of the other sign, at the same distance from the middle of their type.
pub const OTHER_SIGN: &str = "plimsoll.OtherSign";

pub(super) static OPS: &[OpDef] = &[
    OpDef::new(
        PRODUCT_OF_BYTES,
        "The exact i32 product of matrices, one of u8 and the other one of i8: MatMulInteger without zero points",
        inputs![A B],
        |call| {
            let fact = MATRICES.exact_infer(call)?;
            let (a, b) = (call.dtype(0), call.dtype(1));
            ensure(a != b, || format!("input 'B': expected the other one of u8 and i8 than input 'A', found {b}"))?;
            Ok(fact)
        },
        Eval::Tensor(|x, call| MATRICES.exact_eval(x, call)),
        Lower::Template(lower_matmul),
    )
    .sample(|s| s.input(DType::U8, &[2, 3, 5], 0.0, 255.0).input(DType::I8, &[5, 4], -128.0, 127.0))
    .part(part_matmul),
    OpDef::new(
        SUMS_OF_BYTES,
        "The i32 sums of u8 or i8 along `axis`, which stays with extent 1",
        inputs![X],
        |call| {
            expect_dtype(call, 0, "u8 or i8", DType::is_byte)?;
            let mut shape = call.shape(0).clone();
            shape[call.axis("axis", -1, call.shape(0))?] = 1;
            output(DType::I32, shape)
        },
        Eval::Tensor(|x, call| {
            let axis = call.axis("axis", -1, call.shape(0))?;
            let (extent, inner) = (call.shape(0)[axis], call.shape(0)[axis + 1..].iter().product::<usize>());
            let outer: usize = call.shape(0)[..axis].iter().product();
            let at = |o: usize, k: usize, i: usize| x[0][(o * extent + k) * inner + i];
            let sums = (0..outer * inner).map(|n| (0..extent).map(|k| at(n / inner, k, n % inner)).sum());
            Ok(vec![sums.collect()])
        }),
        Lower::Decompose(|_, call, x| {
            let axis = call.axis("axis", -1, call.shape(0))?;
            Ok(vec![x[0].cast(DType::I32).reduce_sum(&[axis as i64], true)])
        }),
    )
    .sample(|s| s.input(DType::U8, &[3, 5, 2], 0.0, 255.0).attr("axis", 1))
    .attrs(names![axis]),
    OpDef::new(
        OTHER_SIGN,
        "u8 less 128 as i8, or i8 plus 128 as u8",
        inputs![X],
        |call| output(other_sign(expect_dtype(call, 0, "u8 or i8", DType::is_byte)?).0, call.shape(0).clone()),
        Eval::Tensor(|x, call| {
            let (_, by) = other_sign(call.dtype(0));
            Ok(vec![x[0].iter().map(|x| x + by).collect()])
        }),
        Lower::Decompose(|_, call, x| {
            let (to, by) = other_sign(call.dtype(0));
            Ok(vec![(x[0].cast(DType::I32) + by).cast(to)])
        }),
    )
    .sample(|s| s.input(DType::U8, &[3, 5], 0.0, 255.0)),
    OpDef::new(
        "MatMulInteger",
        "The exact i32 product of matrices of u8 or i8 less their zero points, which may differ per row of \
         A and column of B",
        inputs![A B a_zero_point? b_zero_point?],
        |call| MATRICES.exact_infer(call),
        Eval::Tensor(|x, call| MATRICES.exact_eval(x, call)),
        Lower::Decompose(|b, call, x| MATRICES.exact_nodes(b, call, x)),
    )
    .sample(|s| s.input(DType::U8, &[3, 5], 0.0, 255.0).input(DType::U8, &[5, 4], 0.0, 255.0)),
    OpDef::new(
        "ConvInteger",
        "The exact i32 convolution of u8 or i8 less their zero points, which may differ per filter",
        inputs![x w x_zero_point? w_zero_point?],
        |call| FILTERS.exact_infer(call),
        Eval::Tensor(|x, call| FILTERS.exact_eval(x, call)),
        Lower::Decompose(|b, call, x| FILTERS.exact_nodes(b, call, x)),
    )
    .sample(|s| {
        s.input(DType::U8, &[1, 2, 18, 17], 0.0, 255.0).input(DType::U8, &[2, 2, 17, 16], 0.0, 255.0).given(
            DType::U8,
            &[],
            &[250.0],
        )
    })
    .attrs(CONV),
    OpDef::new(
        "QLinearMatMul",
        "QuantizeLinear of the product of two DequantizeLinears; its sums are whole numbers in f32, times (a_scale b_scale) / y_scale in f32",
        QLINEAR_MATRICES,
        |call| MATRICES.linear_infer(call),
        Eval::Tensor(|x, call| MATRICES.linear_eval(x, call)),
        Lower::Decompose(|_, call, x| MATRICES.linear_nodes(call, x)),
    )
    .sample(|s| {
        s.input(DType::U8, &[2, 3, 40], 0.0, 255.0)
            .quantized(0.0625, 3.0)
            .input(DType::U8, &[40, 5], 0.0, 255.0)
            .given(DType::F32, &[1], &[0.5])
            .given(DType::U8, &[1], &[2.0])
            .given(DType::F32, &[1], &[16.0])
            .given(DType::U8, &[], &[10.0])
    }),
    OpDef::new(
        "QLinearConv",
        "QuantizeLinear of the convolution of two DequantizeLinears plus an i32 bias; its sums are whole \
         numbers in f32, times (x_scale w_scale) / y_scale in f32",
        QLINEAR,
        |call| FILTERS.linear_infer(call),
        Eval::Tensor(|x, call| FILTERS.linear_eval(x, call)),
        Lower::Decompose(|_, call, x| FILTERS.linear_nodes(call, x)),
    )
    .sample(|s| {
        s.input(DType::U8, &[2, 4, 6, 5], 0.0, 255.0)
            .quantized(0.25, 100.0)
            .input(DType::U8, &[4, 4, 3, 3], 0.0, 255.0)
            .given(DType::F32, &[4], &[0.5, 0.25, 1.0, 0.125])
            .given(DType::U8, &[1], &[2.0])
            .quantized(64.0, 7.0)
    })
    .attrs(CONV),
];

/// The other one of `u8` and `i8`, and the difference of its values.
fn other_sign(dtype: DType) -> (DType, f64) {
    if dtype == DType::U8 { (DType::I8, -128.0) } else { (DType::U8, 128.0) }
}

/// A product of integers, computed by the row of the float product.
struct Product {
    /// The float product's row.
    row: &'static str,
    /// Number of axes that follow a parameter that is not a scalar: in the left operand, in the right operand, and in
    /// the result for a left and a right parameter.
    behind: fn(&Call, [usize; 2]) -> [usize; 4],
    /// Splits a product into parts whose sums are exact in `f32`.
    parts: for<'g> fn(Nodes<'g>, &Call, [Var<'g>; 2]) -> OpResult<Vec<Var<'g>>>,
}

static MATRICES: Product = Product { row: "MatMul", behind: |_, _| [1, 0, 1, 0], parts: matrix_parts };

static FILTERS: Product = Product {
    row: "Conv",
    behind: |call, [x, w]| {
        let behind = |input: usize, axes| call.shape(input).len().saturating_sub(axes);
        [behind(x, 2), behind(w, 1), behind(x, 2), behind(x, 2)]
    },
    parts: filter_parts,
};

/// Refuses parameters that do not broadcast to `shape`.
fn fits(call: &Call, input: usize, shape: &Shape, behind: usize) -> OpResult<()> {
    let fits = || Shape::broadcast([shape, &spread(call.shape(input), behind)]).as_ref() == Some(shape);
    expect_shape(call, input, !call.has(input) || fits(), format_args!("one value or one along an axis of {shape}"))
}

impl Product {
    /// The shape of the product of two inputs.
    fn shape(&self, call: &Call, operands: [usize; 2]) -> OpResult<Shape> {
        for input in operands {
            expect_dtype(call, input, "u8 or i8", DType::is_byte)?;
        }
        let facts = operands.map(|input| Fact::new(DType::F32, call.shape(input).clone()));
        Ok(self.call(call, &facts.each_ref().map(Some)).infer()?.swap_remove(0).shape)
    }

    /// The call of the float product.
    fn call<'a>(&self, call: &Call<'a>, inputs: &'a [Option<&'a Fact>]) -> Call<'a> {
        Call { op: find(self.row).expect("the table has the row of every product"), attrs: call.attrs, inputs }
    }

    /// The product in `f64`, of the operands minus their zero points.
    fn eval(
        &self,
        x: &Args<&[f64]>,
        call: &Call,
        operands: [usize; 2],
        zeros: [usize; 2],
        bias: Option<&[f64]>,
    ) -> OpResult<Vec<f64>> {
        let behind = (self.behind)(call, operands);
        let mut whole = Vec::new();
        for i in 0..2 {
            let (at, shape) = (operands[i], call.shape(operands[i]));
            let zero = x.given(zeros[i]).map(|v| (v, spread(call.shape(zeros[i]), behind[i])));
            whole.push(differences(x[at], shape, zero));
        }
        let mut facts = operands.map(|input| Fact::new(DType::F32, call.shape(input).clone())).to_vec();
        facts.extend(bias.map(|bias| Fact::new(DType::F32, [bias.len()])));
        let facts: Vec<_> = facts.iter().map(Some).collect();
        let inputs: Vec<_> = whole.iter().map(Vec::as_slice).chain(bias).map(Some).collect();
        Ok(self.call(call, &facts).eval(&inputs)?.swap_remove(0))
    }

    /// The operands in `f32`, minus their zero points.
    fn whole<'g>(
        &self,
        call: &Call,
        x: &Args<Var<'g>>,
        operands: [usize; 2],
        zeros: [usize; 2],
    ) -> OpResult<[Var<'g>; 2]> {
        let behind = (self.behind)(call, operands);
        let whole = |i: usize| {
            let operand = x[operands[i]].cast(DType::F32);
            let zero = x.given(zeros[i]).map(|zero| spread_node(zero.cast(DType::F32), behind[i])).transpose()?;
            OpResult::Ok(zero.map_or(operand, |zero| operand - zero))
        };
        Ok([whole(0)?, whole(1)?])
    }

    fn exact_infer(&self, call: &Call) -> OpResult<Vec<Fact>> {
        let (shape, behind) = (self.shape(call, [0, 1])?, (self.behind)(call, [0, 1]));
        for (operand, zero) in [(0, 2), (1, 3)] {
            fits(call, zero, call.shape(operand), behind[operand])?;
            expect_type_of(call, zero, call.dtype(operand), "its operand")?;
        }
        output(DType::I32, shape)
    }

    fn exact_eval(&self, x: &Args<&[f64]>, call: &Call) -> OpResult<Vec<Vec<f64>>> {
        Ok(vec![self.eval(x, call, [0, 1], [2, 3], None)?])
    }

    fn exact_nodes<'g>(&self, b: Nodes<'g>, call: &Call, x: &Args<Var<'g>>) -> OpResult<Vec<Var<'g>>> {
        let parts = (self.parts)(b, call, self.whole(call, x, [0, 1], [2, 3])?)?;
        let sum = parts.iter().map(|part| part.cast(DType::I32)).reduce(|sum, part| sum + part);
        Ok(vec![sum.expect("a product has at least one part")])
    }

    fn linear_infer(&self, call: &Call) -> OpResult<Vec<Fact>> {
        let (shape, behind) = (self.shape(call, [0, 3])?, (self.behind)(call, [0, 3]));
        for (scale, zero, own) in [(1, behind[0], call.shape(0)), (4, behind[1], call.shape(3)), (6, behind[2], &shape)]
        {
            expect_dtype(call, scale, "a float type", DType::is_float)?;
            fits(call, scale + 1, own, zero)?;
        }
        for (scale, behind) in self.scales(call) {
            fits(call, scale, &shape, behind)?;
        }
        for (operand, zero) in [(0, 2), (3, 5)] {
            expect_type_of(call, zero, call.dtype(operand), "its operand")?;
        }
        if call.has(8) && (call.dtype(8) != DType::I32 || call.shape(8)[..] != call.shape(3)[..1]) {
            let found = call.fact(8);
            return Err(format!("input 'B': expected i32[{}], one value per filter, found {found}", call.shape(3)[0]));
        }
        output(expect_dtype(call, 7, "u8 or i8", DType::is_byte)?, shape)
    }

    /// The inputs that are scales, of the operands and of the result, each with the number of result axes that follow
    /// it.
    fn scales(&self, call: &Call) -> [(usize, usize); 3] {
        let [.., left, right] = (self.behind)(call, [0, 3]);
        [(1, left), (4, right), (6, left)]
    }

    fn linear_eval(&self, x: &Args<&[f64]>, call: &Call) -> OpResult<Vec<Vec<f64>>> {
        let fact = self.linear_infer(call)?.swap_remove(0);
        let sums = self.eval(x, call, [0, 3], [2, 5], x.given(8))?;
        let [of_x, of_w, of_y] = self.scales(call);
        let at = |(input, behind): (usize, usize)| {
            let access = Access::contiguous(spread(call.shape(input), behind)).broadcast(&fact.shape);
            (x[input], access)
        };
        let (x_scale, w_scale, y_scale, zero) = (at(of_x), at(of_w), at(of_y), at((7, of_y.1)));
        let (low, high) = fact.dtype.range();
        let y = sums.into_iter().zip(indices(&fact.shape)).map(|(sum, index)| {
            let value = |(values, access): &(&[f64], Access)| values[access.at(&index) as usize];
            let [x_scale, w_scale, y_scale] = [&x_scale, &w_scale, &y_scale].map(|scale| value(scale) as f32);
            let scaled = sum as f32 * (x_scale * w_scale / y_scale);
            (f64::from(scaled.round_ties_even()) + value(&zero)).clamp(low, high)
        });
        Ok(vec![y.collect()])
    }

    fn linear_nodes<'g>(&self, call: &Call, x: &Args<Var<'g>>) -> OpResult<Vec<Var<'g>>> {
        let [left, right] = self.whole(call, x, [0, 3], [2, 5])?;
        let bias: Vec<_> = x.given(8).iter().map(|bias| bias.cast(DType::F32)).collect();
        let sum = left.op(self.row, &[&[right], &bias[..]].concat(), call.attrs.clone());
        // A whole number already, the sum is rounded so that no scale moves into the weights, whose products would be whole no more.
        Ok(vec![self.requantized(call, x, sum.round())?])
    }

    /// The result of a sum of products, in `f32`.
    fn requantized<'g>(&self, call: &Call, x: &Args<Var<'g>>, sum: Var<'g>) -> OpResult<Var<'g>> {
        let spread = |(input, behind): (usize, usize)| spread_node(x[input].cast(DType::F32), behind);
        let [of_x, of_w, of_y] = self.scales(call);
        let (x_scale, w_scale, y_scale) = (spread(of_x)?, spread(of_w)?, spread(of_y)?);
        // In this order, as ONNX Runtime has it: near a tie another one rounds to the other side.
        let whole = (sum * (x_scale * w_scale / y_scale)).round();
        let (low, high) = call.dtype(7).range();
        Ok((whole + spread((7, of_y.1))?).clip(low, high).cast(call.dtype(7)))
    }
}

/// The result of `QLinearMatMul` or `QLinearConv` of the exact sum of its products, bias included.
pub fn requantized<'g>(call: &Call, x: &Args<Var<'g>>, sum: Var<'g>) -> OpResult<Var<'g>> {
    let product = if call.op.name == "QLinearConv" { &FILTERS } else { &MATRICES };
    product.requantized(call, x, sum.cast(DType::F32))
}

/// Values minus their zero points, in `f64`.
fn differences(x: &[f64], shape: &Shape, zero: Option<(&[f64], Shape)>) -> Vec<f64> {
    let Some((zero, own)) = zero else { return x.to_vec() };
    let access = Access::contiguous(own).broadcast(shape);
    x.iter().zip(indices(shape)).map(|(x, index)| x - zero[access.at(&index) as usize]).collect()
}

fn matrix_parts<'g>(_: Nodes<'g>, _: &Call, [x, w]: [Var<'g>; 2]) -> OpResult<Vec<Var<'g>>> {
    let (x_shape, w_shape) = (x.shape()?, w.shape()?);
    let (columns, rows) = (x_shape.len() - 1, w_shape.len().saturating_sub(2));
    let terms = x_shape[columns];
    few(terms.div_ceil(EXACT))?;
    let part = |range: Range<usize>| x.part(columns, range.clone()).matmul(w.part(rows, range));
    // Without terms there is one part all the same.
    Ok((0..terms.max(1)).step_by(EXACT).map(|from| part(from..terms.min(from + EXACT))).collect())
}

/// Refuses sums of more parts than a plan should hold.
fn few(parts: usize) -> OpResult<()> {
    const MOST: usize = 1 << 12;
    ensure(parts <= MOST, || {
        format!("expected sums of up to {MOST} parts of {EXACT} products each, found {parts} parts")
    })
}

/// Splits a convolution by channels: each part has some channels of every group.
fn filter_parts<'g>(b: Nodes<'g>, call: &Call, [x, w]: [Var<'g>; 2]) -> OpResult<Vec<Var<'g>>> {
    let (x_shape, w_shape) = (x.shape()?, w.shape()?);
    let (channels, taps) = (w_shape[1], w_shape[2..].iter().product::<usize>());
    let conv = |x: Var<'g>, w| x.op("Conv", &[w], call.attrs.clone());
    if channels * taps <= EXACT {
        return Ok(vec![conv(x, w)]);
    }
    if taps > EXACT {
        return tap_parts(b, call, [x, w]);
    }
    let groups = x_shape[1] / channels;
    let grouped = |channels: &[usize]| [&x_shape[..1], channels, &x_shape[2..]].concat();
    few(channels.div_ceil(EXACT / taps))?;
    let split = x.shaped(&grouped(&[groups, channels]));
    let part = |range: Range<usize>| {
        let x = split.part(2, range.clone()).shaped(&grouped(&[groups * range.len()]));
        conv(x, w.part(1, range))
    };
    let step = EXACT / taps;
    Ok((0..channels).step_by(step).map(|from| part(from..channels.min(from + step))).collect())
}

/// Splits a convolution whose single channels are too long: each part has one channel of every group and some taps;
/// the other taps are 0.
fn tap_parts<'g>(b: Nodes<'g>, call: &Call, [x, w]: [Var<'g>; 2]) -> OpResult<Vec<Var<'g>>> {
    let shape = w.shape()?;
    let taps = shape[2..].iter().product::<usize>();
    few(shape[1].saturating_mul(taps.div_ceil(EXACT)))?;
    let at = b.numbers(DType::I32, [&[1], &shape[1..]].concat(), 0.0);
    let nothing = w.like(0.0);
    let mut parts = Vec::new();
    for channel in 0..shape[1] {
        for from in (0..taps).step_by(EXACT) {
            let [first, end] = [from, taps.min(from + EXACT)].map(|tap| (channel * taps + tap) as f64);
            let counted = at.greater_or_equal(first).and(at.less(end));
            parts.push(x.op("Conv", &[counted.select(w, nothing)], call.attrs.clone()));
        }
    }
    Ok(parts)
}

#[cfg(test)]
mod tests {
    use crate::dtype::DType::*;
    use crate::op::Attrs;
    use crate::ops::tests::{eval, refused};

    #[test]
    fn zero_points_belong_to_rows_columns_and_filters() {
        let (a, b) = ((U8, &[2, 2][..], &[1.0, 2.0, 3.0, 4.0][..]), (I8, &[2, 2][..], &[1.0, -1.0, 0.0, 2.0][..]));
        let none = Attrs::new();
        assert_eq!(eval("MatMulInteger", &[a, b], &none), ("i32[2,2]".into(), vec![1.0, 3.0, 3.0, 5.0]));
        let points = [a, b, (U8, &[2], &[1.0, 3.0]), (I8, &[2], &[1.0, 0.0])];
        assert_eq!(eval("MatMulInteger", &points, &none).1, [-1.0, 2.0, -1.0, 2.0]);
        let found = refused("MatMulInteger", &[(U8, &[2, 2]), (I8, &[2, 2]), (I8, &[])], &none);
        assert_eq!(found, "input 'a_zero_point': expected u8 as its operand, found i8");
        let filters = [
            (U8, &[1, 1, 2][..], &[5.0, 6.0][..]),
            (U8, &[2, 1, 1], &[1.0, 2.0]),
            (U8, &[], &[5.0]),
            (U8, &[2], &[0.0, 1.0]),
        ];
        assert_eq!(eval("ConvInteger", &filters, &none).1, [0.0, 1.0, 0.0, 1.0]);
    }

    #[test]
    fn results_are_rounded_and_held() {
        let one = |scale: f64| {
            let (scale, zero) = ([scale], [0.0]);
            let number = |value| (F32, &[][..], value);
            let x = (U8, &[1, 2][..], &[200.0, 3.0][..]);
            let w = (I8, &[2, 1][..], &[1.0, 1.0][..]);
            let (zero_u8, zero_i8) = ((U8, &[][..], &zero[..]), (I8, &[][..], &zero[..]));
            let one = number(&[1.0][..]);
            eval("QLinearMatMul", &[x, one, zero_u8, w, one, zero_i8, number(&scale[..]), zero_u8], &Attrs::new())
        };
        assert_eq!(one(2.0), ("u8[1,1]".into(), vec![102.0]), "101.5 is as near to 101, which is odd");
        assert_eq!(one(0.5).1, [255.0]);
    }
}
