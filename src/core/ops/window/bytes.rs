//! Convolutions of bytes, whose sums are exact.

use super::{conv, ensure, eval_conv, images, output, taps_of, widened, window};
use crate::dtype::DType;
use crate::kernel::{MOST_TAPS, MOST_TERMS, Template};
use crate::op::{Args, Call, Eval, Lower, OpDef, OpResult, inputs, names};
use crate::ops::expect_dtype;

/// The row of an exact convolution of `u8` by `i8`, or of `i8` by `u8`.
pub const CONV_OF_BYTES: &str = "plimsoll.ConvOfBytes";

pub(in crate::ops) static OPS: &[OpDef] = &[OpDef::new(
    CONV_OF_BYTES,
    "The exact i32 convolution of data and filters, one of u8 and the other one of i8, with `padding` around the data",
    inputs![X W],
    |call| {
        let (data, filters) = (expect_dtype(call, 0, "u8 or i8", DType::is_byte)?, call.dtype(1));
        ensure(filters.is_byte() && filters != data, || {
            format!("input 'W': expected the other one of u8 and i8 than input 'X', found {filters}")
        })?;
        let (low, high) = data.range();
        let padding = padding(call)?;
        ensure((low..=high).contains(&f64::from(padding)), || {
            format!("attribute 'padding': expected {data}, found {padding}")
        })?;
        let shape = conv(call)?.0;
        let (taps, terms) = (call.shape(1)[2..].iter().product::<usize>(), taps_of(call));
        ensure(taps <= MOST_TAPS && terms <= MOST_TERMS as f64, || {
            format!("expected windows of up to {MOST_TAPS} elements and sums of up to {MOST_TERMS} products, found {taps} and {terms}")
        })?;
        output(DType::I32, shape)
    },
    // The convolution of what the data differ from their padding by has zeros around it.
    Eval::Tensor(|x, call| {
        let padding = f64::from(padding(call)?);
        let data: Vec<f64> = x[0].iter().map(|x| x - padding).collect();
        let (filters, (shape, ..)) = (x[1], conv(call)?);
        let sums = eval_conv(&Args(&[Some(&data[..]), Some(filters)]), call)?.swap_remove(0);
        let (terms, positions) = (filters.len() / shape[1].max(1), shape[2..].iter().product::<usize>());
        let whole = |(i, sum): (usize, f64)| {
            let o = i / positions % shape[1];
            sum + padding * filters[o * terms..(o + 1) * terms].iter().sum::<f64>()
        };
        Ok(vec![sums.into_iter().enumerate().map(whole).collect()])
    }),
    Lower::Template(|call, at| {
        let (shape, groups, sides) = conv(call)?;
        let template = Template::Conv { groups, window: window(&sides), padding: padding(call)? };
        Ok(widened(template, &shape, at))
    }),
)
.flop(|call| conv(call).map_or(0.0, |(shape, ..)| 2.0 * shape.numel() as f64 * taps_of(call)))
.sample(|s| {
    s.input(DType::U8, &[2, 4, 6, 5], 0.0, 255.0)
        .input(DType::I8, &[6, 2, 3, 2], -128.0, 127.0)
        .attr("group", 2)
        .attr("padding", 7)
        .ints("pads", &[1, 0, 2, 1])
})
.attrs(names![auto_pad dilations group kernel_shape padding pads strides])
.part(images)];

/// The element around the data.
fn padding(call: &Call) -> OpResult<i32> {
    let padding = call.int("padding", 0)?;
    i32::try_from(padding).map_err(|_| format!("attribute 'padding': expected a byte, found {padding}"))
}
