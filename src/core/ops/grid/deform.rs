//! Convolutions whose filters read the image at places that data moves.

use super::{Tap, channels_last, combine, linear};
use crate::dtype::DType;
use crate::op::{Args, Call, Nodes, OpDef, OpResult, Var, inputs, names};
use crate::ops::compose::composed;
use crate::ops::{ensure, expect_shape, required_ints, same_float};
use crate::shape::{Shape, indices};

/// Indices of inputs.
const OFFSETS: usize = 2;
const BIAS: usize = 3;
const MASK: usize = 4;

pub(in crate::ops) static OPS: &[OpDef] = &[composed(
    "DeformConv",
    "The convolution of [n, c, spatial..] whose filters read each element at a place moved by an offset, times a mask",
    inputs![X W offset B? mask?],
    convolve,
)
.sample(|s| {
    s.floats(&[&[2, 4, 4, 5], &[6, 2, 2, 3]])
        .input(DType::F32, &[2, 2 * 6 * 2, 5, 4], -1.3, 1.3)
        .floats(&[&[6], &[2, 2 * 6, 5, 4]])
        .attr("group", 2)
        .attr("offset_group", 2)
        .ints("pads", &[1, 0, 1, 1])
})
.attrs(names![dilations group kernel_shape offset_group pads strides])];

/// The geometry of a call.
struct Filters {
    images: usize,
    /// Channels of the image, and of the result.
    channels: [usize; 2],
    groups: usize,
    /// Groups of channels with offsets of their own.
    offsets: usize,
    image: Shape,
    kernel: Shape,
    out: Shape,
    strides: Vec<usize>,
    dilations: Vec<usize>,
    before: Vec<usize>,
}

/// A list of one number per axis, or `default`.
fn listed(call: &Call, name: &str, count: usize, default: usize, least: usize) -> OpResult<Vec<usize>> {
    if call.attrs.get(name).is_none() {
        return Ok(vec![default; count]);
    }
    let found = required_ints(call, name)?;
    let fits = |n: &i64| usize::try_from(*n).ok().filter(|n| (least..=MOST).contains(n));
    let list: Option<Vec<usize>> = found.iter().map(fits).collect();
    list.filter(|list| list.len() == count)
        .ok_or_else(|| format!("attribute '{name}': expected {count} numbers of {least} to {MOST}, found {found:?}"))
}

/// The largest stride, dilation and padding.
const MOST: usize = 1 << 20;

impl Filters {
    fn of(call: &Call) -> OpResult<Filters> {
        let (x, w) = (call.shape(0), call.shape(1));
        let axes = x.len().saturating_sub(2);
        ensure((1..=3).contains(&axes) && w.len() == x.len() && !x[2..].contains(&0), || {
            format!("expected an image [n, c, spatial..] and filters with as many axes, found {x} and {w}")
        })?;
        let count = |name: &str| match call.int(name, 1)? {
            n if n > 0 && x[1].is_multiple_of(n as usize) => Ok(n as usize),
            n => Err(format!("attribute '{name}': expected a number that divides {} channels, found {n}", x[1])),
        };
        let (groups, offsets) = (count("group")?, count("offset_group")?);
        ensure(w[1] * groups == x[1] && w[0].is_multiple_of(groups), || {
            format!("input 'W': expected filters of {} channels in {groups} groups, found {w}", x[1] / groups)
        })?;
        let kernel = listed(call, "kernel_shape", axes, 0, 1)?;
        ensure(call.attrs.get("kernel_shape").is_none() || kernel[..] == w[2..], || {
            format!("attribute 'kernel_shape': expected {} as the filters', found {kernel:?}", Shape::new(&w[2..]))
        })?;
        let strides = listed(call, "strides", axes, 1, 1)?;
        let dilations = listed(call, "dilations", axes, 1, 1)?;
        let pads = listed(call, "pads", 2 * axes, 0, 0)?;
        let out = (0..axes).map(|k| {
            let reach = w[2 + k].saturating_sub(1).saturating_mul(dilations[k]);
            let room = (x[2 + k] + pads[k] + pads[axes + k]).checked_sub(reach.saturating_add(1));
            room.map(|room| room / strides[k] + 1)
                .ok_or_else(|| format!("a filter of {w} is larger than an image of {x}"))
        });
        let out = out.collect::<OpResult<Vec<usize>>>()?;
        Ok(Filters {
            images: x[0],
            channels: [x[1], w[0]],
            groups,
            offsets,
            image: Shape::new(&x[2..]),
            kernel: Shape::new(&w[2..]),
            out: Shape::new(out),
            strides,
            dilations,
            before: pads[..axes].to_vec(),
        })
    }

    /// Refuses offsets, a mask or a bias of another shape.
    fn expect_inputs(&self, call: &Call) -> OpResult<()> {
        let taps = self.offsets * self.kernel.numel();
        let per_place = |planes: usize| [&[self.images, planes][..], &self.out].concat();
        for (input, expected) in
            [(OFFSETS, per_place(taps * self.image.len())), (MASK, per_place(taps)), (BIAS, vec![self.channels[1]])]
        {
            let fits = !call.has(input) || call.shape(input)[..] == expected;
            expect_shape(call, input, fits, format_args!("{}", Shape::new(&expected[..])))?;
        }
        Ok(())
    }

    /// The places that all taps read along an axis, `[n x offsets, taps, places, 1]`.
    fn places<'g>(&self, b: Nodes<'g>, offset: Var<'g>, axis: usize) -> OpResult<Var<'g>> {
        let (taps, places) = (self.kernel.numel(), self.out.numel());
        let moved = offset
            .shaped(&[self.images * self.offsets, taps, self.image.len(), places])
            .part(2, axis..axis + 1)
            .shaped(&[self.images * self.offsets, taps, places, 1]);
        let fixed = b.constant(offset.fact()?.dtype, [taps, places, 1], || {
            let tap = |tap: Vec<usize>| tap[axis] * self.dilations[axis];
            let place = |out: Vec<usize>| out[axis] * self.strides[axis];
            let before = self.before[axis] as f64;
            let taps = indices(&self.kernel).map(tap);
            taps.flat_map(|tap| indices(&self.out).map(move |out| (tap + place(out)) as f64 - before)).collect()
        });
        Ok(moved + fixed)
    }
}

fn convolve<'g>(b: Nodes<'g>, call: &Call, x: &Args<Var<'g>>) -> OpResult<Vec<Var<'g>>> {
    let dtype = same_float(call)?;
    let f = Filters::of(call)?;
    f.expect_inputs(call)?;
    let wide = dtype.unhalved();
    let (taps, places, each) = (f.kernel.numel(), f.out.numel(), f.channels[0] / f.offsets);
    let offset = x[OFFSETS].cast(wide);
    let around = |axis: usize| Ok(linear(f.places(b, offset, axis)?).into());
    let around = (0..f.image.len()).map(around).collect::<OpResult<Vec<Vec<Tap>>>>()?;
    let image = x[0].cast(wide).shaped(&[&[f.images * f.offsets, each][..], &f.image].concat());
    // [n x offsets, taps, places, channels]
    let mut read = combine(b, channels_last(image, 2 + f.image.len()), &around)?;
    if let Some(mask) = x.given(MASK) {
        read = read * mask.cast(wide).shaped(&[f.images * f.offsets, taps, places, 1]);
    }
    let columns = read.transpose(&[0, 3, 1, 2]).shaped(&[f.images, f.groups, f.channels[0] / f.groups * taps, places]);
    let filters = x[1].cast(wide).shaped(&[f.groups, f.channels[1] / f.groups, f.channels[0] / f.groups * taps]);
    let mut y = filters.matmul(columns).shaped(&[f.images, f.channels[1], places]);
    if let Some(bias) = x.given(BIAS) {
        y = y + bias.cast(wide).shaped(&[f.channels[1], 1]);
    }
    Ok(vec![y.cast(dtype).shaped(&[&[f.images, f.channels[1]][..], &f.out].concat())])
}

#[cfg(test)]
mod tests {
    use crate::dtype::DType::*;
    use crate::op::Attrs;
    use crate::ops::tests::{eval, refused};

    #[test]
    fn offsets_move_what_filters_read() {
        let image = (F32, &[1, 1, 3][..], &[1.0, 2.0, 4.0][..]);
        let filter = (F32, &[1, 1, 2][..], &[1.0, 10.0][..]);
        let at = |offsets: &[f64]| eval("DeformConv", &[image, filter, (F32, &[1, 2, 2], offsets)], &Attrs::new());
        assert_eq!(at(&[0.0; 4]), ("f32[1,1,2]".into(), vec![21.0, 42.0]));
        // The first tap reads half an element to the right; the second one beyond the end.
        assert_eq!(at(&[0.5, 0.5, 2.0, 2.0]).1, [1.5, 3.0]);
        let found = refused("DeformConv", &[(F32, &[1, 1, 3]), (F32, &[1, 1, 2]), (F32, &[1, 1, 2])], &Attrs::new());
        assert_eq!(found, "input 'offset': expected [1,2,2], found [1,1,2]");
    }
}
