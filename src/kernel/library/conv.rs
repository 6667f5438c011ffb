//! Kernels as convolutions of cuDNN, and as their gradients.
//!
//! ```text
//! kernel                                                       call
//! conv            x [n, c, in..],  w [o, c, k..]   -> y         Result
//! conv_transpose  y [n, o, out..], w [o, c, k..]   -> x         Images
//! conv            x [c, n, in..],  y [o, n, out..] -> w         Filters: the window is y, the result has the few elements of a filter
//! ```

use super::epilogue::{Abilities, Epilogue};
use super::{Activation, Call, Computes, Conv, Image, on_tensor_cores, vector};
use crate::dtype::DType;
use crate::kernel::{Kernel, Operand, Window};
use crate::shape::{self, Access};
use crate::target::Target;

/// True if a convolution is the gradient of another one by its filters: its window is an image, and it has few results per channel, each
/// with a sum over a whole image.
pub fn gives_filters(window: &Window, result: &[usize]) -> bool {
    let [taps, results] = [&window.kernel[..], result].map(|extents| extents.iter().product::<usize>());
    results <= MOST_TAPS && taps > results
}

/// The most elements per channel of a filter.
const MOST_TAPS: usize = 15 * 15;

/// A tensor of a call: its axes in the call's order, those of a flat image's depth left out.
fn image(slot: usize, operand: &Operand, access: &Access, channels_last: bool, first: usize) -> Option<Image> {
    let Access { shape: extents, strides, offset } = access;
    let kept = |k: &usize| *k < 2 || *k >= 2 + first;
    // An axis of extent 1 gets the step that it would have in a dense tensor.
    let mut dense = 1;
    let mut steps = vec![0; extents.len()];
    let order = if channels_last { shape::channels_last(extents.len()) } else { (0..extents.len()).collect() };
    for k in order.into_iter().rev() {
        steps[k] = if extents[k] == 1 { dense } else { u64::try_from(strides[k]).ok()? };
        dense = steps[k].checked_mul(extents[k] as u64)?;
    }
    let axes: Vec<usize> = (0..extents.len()).filter(kept).collect();
    let small = axes.iter().all(|&k| i32::try_from(extents[k]).is_ok() && i32::try_from(steps[k]).is_ok());
    small.then_some(Image {
        slot,
        dtype: operand.dtype,
        offset: (*offset).try_into().ok()?,
        dims: axes.iter().map(|&k| extents[k] as u64).collect(),
        strides: axes.iter().map(|&k| steps[k]).collect(),
    })
}

/// True if windows whose padding is the same at both ends take just these positions on an image.
fn pads_evenly(window: &Window, image: &[usize], positions: &[usize]) -> Option<bool> {
    for a in 0..3 {
        let reach = (window.kernel[a].checked_sub(1)?).checked_mul(window.dilations[a])?.checked_add(1)?;
        let padded = image[a].checked_add(window.pads[a].checked_mul(2)?)?;
        if padded.checked_sub(reach)? / window.strides[a].max(1) + 1 != positions[a] {
            return Some(false);
        }
    }
    Some(true)
}

/// A kernel as a gradient of the convolution of `x` by `w` whose result is `y`. Each is an operand's slot with its access.
struct Gradient<'a> {
    kernel: &'a Kernel,
    target: &'a Target,
    computes: Computes,
    x: (usize, Access),
    w: (usize, Access),
    y: (usize, Access),
    window: Window,
}

impl Gradient<'_> {
    fn call(&self) -> Option<(Call, u32)> {
        let Gradient { kernel, target, computes, x, w, y, window } = self;
        let operands = [&kernel.reads[0], &kernel.reads[1], &kernel.writes[0]];
        let dtype = operands[0].dtype;
        let known = (dtype.is_half() || dtype == DType::F32) && operands.iter().all(|o| o.dtype == dtype && !o.packed);
        let tensors = [x, w, y];
        let channels_last = on_tensor_cores(dtype, target) && tensors.iter().all(|(_, a)| a.has_channels_last());
        // cuDNN takes dense filters alone, and on tensor cores nothing but channels that come last.
        let rows = !on_tensor_cores(dtype, target) && tensors.iter().all(|(_, a)| a.is_contiguous());
        let dense = channels_last || rows;
        if !known || !dense || !pads_evenly(window, &x.1.shape[2..], &y.1.shape[2..])? {
            return None;
        }
        let epilogue = Epilogue::none(kernel)?;
        let flat = window.kernel[0] == 1 && window.pads[0] == 0 && [x, y].iter().all(|(_, a)| a.shape[2] == 1);
        let first = usize::from(flat);
        let operand = |slot: usize| operands[slot.min(2)];
        let slot = |slot: usize| if slot == 2 { kernel.reads.len() } else { slot };
        let image = |(at, access): &(usize, Access)| image(slot(*at), operand(*at), access, channels_last, first);
        let spatial = |values: &[usize; 3]| values[first..].iter().map(|&v| v as u64).collect::<Vec<_>>();
        let call = Conv {
            computes: *computes,
            groups: 1,
            strides: spatial(&window.strides),
            dilations: spatial(&window.dilations),
            pads: spatial(&window.pads),
            x: image(x)?,
            w: image(w)?,
            y: image(y)?,
            bias: None,
            residual: None,
            activation: Activation::None,
            channels_last,
            tf32: target.allow_tf32 && dtype == DType::F32,
        };
        Some((Call::Conv(call), epilogue.end))
    }
}

/// The gradient by its filters of the convolution that has this kernel's strides as dilations, if the kernel is one.
fn filters(kernel: &Kernel, window: &Window, target: &Target) -> Option<(Call, u32)> {
    let turned = |operand: &Operand| operand.access.permute(&[1, 0, 2, 3, 4]);
    let w = turned(&kernel.writes[0]);
    let kernel_of = [w.shape[2], w.shape[3], w.shape[4]];
    let window = Window { kernel: kernel_of, strides: window.dilations, dilations: window.strides, pads: window.pads };
    let (x, y) = (turned(&kernel.reads[0]), turned(&kernel.reads[1]));
    Gradient { kernel, target, computes: Computes::Filters, x: (0, x), w: (2, w), y: (1, y), window }.call()
}

/// The gradient by its images that a transposed convolution is.
pub(super) fn images(kernel: &Kernel, groups: usize, window: &Window, target: &Target) -> Option<(Call, u32)> {
    let [y, w, ..] = &kernel.reads[..] else { return None };
    let (x, w, y) = ((2, kernel.writes[0].access.clone()), (1, w.access.clone()), (0, y.access.clone()));
    let gradient = Gradient { kernel, target, computes: Computes::Images, x, w, y, window: window.clone() };
    if groups == 1 { gradient.call() } else { None }
}

/// The convolution of a kernel, and the end of the part of its body that the library computes.
pub(super) fn call(kernel: &Kernel, groups: usize, window: &Window, target: &Target) -> Option<(Call, u32)> {
    let (shape, write) = (&kernel.shape, &kernel.writes[0]);
    let [x, w, ..] = &kernel.reads[..] else { return None };
    let dtype = x.dtype;
    let half = dtype.is_half();
    if !(half || dtype == DType::F32) || [w.dtype, write.dtype] != [dtype; 2] || w.packed {
        return None;
    }
    if groups == 1
        && gives_filters(window, &shape[2..])
        && let Some(found) = filters(kernel, window, target)
    {
        return Some(found);
    }
    let tensor_cores = on_tensor_cores(dtype, target);
    let channels_last = tensor_cores && [x, w, write].iter().all(|o| o.access.has_channels_last());
    if !channels_last && !w.access.is_contiguous() {
        return None;
    }
    if !pads_evenly(window, &x.access.shape[2..], &shape[2..])? {
        return None;
    }
    let bias = |o: &Operand| o.access.moves_only_along(1);
    let epilogue = Epilogue::new(kernel, &Abilities { scale: false, gelu: false, bias: &bias })?;
    // cuDNN adds and activates only behind a bias.
    let plain = epilogue.residual.is_none() && epilogue.activation == Activation::None;
    let epilogue = if epilogue.bias.is_some() || plain { epilogue } else { Epilogue::none(kernel)? };
    let flat = shape[2] == 1 && window.kernel[0] == 1 && x.access.shape[2] == 1 && window.pads[0] == 0;
    let first = usize::from(flat);
    let image = |slot: usize, operand: &Operand| image(slot, operand, &operand.access, channels_last, first);
    let spatial = |values: &[usize; 3]| values[first..].iter().map(|&v| v as u64).collect::<Vec<_>>();
    let residual = match epilogue.residual {
        Some(slot) => Some(image(slot, &kernel.reads[slot])?),
        None => None,
    };
    let bias = match epilogue.bias {
        Some(slot) => Some(vector(kernel, slot)?),
        None => None,
    };
    let call = Conv {
        computes: Computes::Result,
        groups: groups as u64,
        strides: spatial(&window.strides),
        dilations: spatial(&window.dilations),
        pads: spatial(&window.pads),
        x: image(0, x)?,
        w: image(1, w)?,
        y: image(kernel.reads.len(), write)?,
        bias,
        residual,
        activation: epilogue.activation,
        channels_last,
        tf32: target.allow_tf32 && dtype == DType::F32,
    };
    Some((Call::Conv(call), epilogue.end))
}
