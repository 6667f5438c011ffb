//! Kernels as convolutions of cuDNN.

use super::epilogue::{Abilities, Epilogue, core_alone};
use super::{Activation, Call, Conv, Image, on_tensor_cores, vector};
use crate::dtype::DType;
use crate::kernel::{Kernel, Operand, Window};
use crate::shape::{self, Access};
use crate::target::Target;

/// The convolution of a kernel, and the end of the part of its body that the library computes.
pub(super) fn call(kernel: &Kernel, groups: usize, window: &Window, target: &Target) -> Option<(Call, u32)> {
    let (shape, write) = (&kernel.shape, &kernel.writes[0]);
    let [x, w, ..] = &kernel.reads[..] else { return None };
    let dtype = x.dtype;
    let half = dtype.is_half();
    if !(half || dtype == DType::F32) || [w.dtype, write.dtype] != [dtype; 2] || w.packed {
        return None;
    }
    let tensor_cores = on_tensor_cores(dtype, target);
    let channels_last = tensor_cores && [x, w, write].iter().all(|o| o.access.has_channels_last());
    if !channels_last && !w.access.is_contiguous() {
        return None;
    }
    if !pads_evenly(&kernel.reads[0].access.shape, shape, window)? {
        return None;
    }
    let bias = |o: &Operand| o.access.moves_only_along(1);
    let epilogue = Epilogue::new(kernel, &Abilities { scale: false, gelu: false, bias: &bias })?;
    // cuDNN adds and activates only behind a bias.
    let plain = epilogue.residual.is_none() && epilogue.activation == Activation::None;
    let epilogue = if epilogue.bias.is_some() || plain { epilogue } else { Epilogue::none(kernel)? };
    let flat = shape[2] == 1 && window.kernel[0] == 1 && x.access.shape[2] == 1 && window.pads[0] == 0;
    let first = usize::from(flat);
    let image = |slot: usize, operand: &Operand| image(slot, operand, first, channels_last);
    let spatial = |values: &[usize; 3]| values[first..].iter().map(|&v| v as u64).collect::<Vec<_>>();
    let call = Conv {
        backward: false,
        groups: groups as u64,
        strides: spatial(&window.strides),
        dilations: spatial(&window.dilations),
        pads: spatial(&window.pads),
        x: image(0, x)?,
        w: image(1, w)?,
        y: image(kernel.reads.len(), write)?,
        bias: if let Some(slot) = epilogue.bias { Some(vector(kernel, slot)?) } else { None },
        residual: if let Some(slot) = epilogue.residual { Some(image(slot, &kernel.reads[slot])?) } else { None },
        activation: epilogue.activation,
        channels_last,
        tf32: target.allow_tf32 && dtype == DType::F32,
        algorithm: None,
    };
    Some((Call::Conv(call), epilogue.end))
}

/// The gradient of a convolution by its data that a kernel is, of 16-bit floats and with strides: without these it is a convolution itself.
pub(super) fn gradient(kernel: &Kernel, groups: usize, window: &Window, target: &Target) -> Option<(Call, u32)> {
    let write = &kernel.writes[0];
    let [y, w, ..] = &kernel.reads[..] else { return None };
    let operands = [y, w, write];
    let half = operands.iter().all(|o| o.dtype == y.dtype && o.dtype.is_half() && o.access.has_channels_last());
    let strided = window.strides.iter().any(|&stride| stride > 1);
    let pads = pads_evenly(&kernel.shape, &y.access.shape, window)?;
    if !half || !strided || groups != 1 || w.packed || !pads || !on_tensor_cores(y.dtype, target) {
        return None;
    }
    let flat = kernel.shape[2] == 1 && window.kernel[0] == 1 && y.access.shape[2] == 1 && window.pads[0] == 0;
    let first = usize::from(flat);
    let spatial = |values: &[usize; 3]| values[first..].iter().map(|&v| v as u64).collect::<Vec<_>>();
    let call = Conv {
        backward: true,
        groups: 1,
        strides: spatial(&window.strides),
        dilations: spatial(&window.dilations),
        pads: spatial(&window.pads),
        x: image(kernel.reads.len(), write, first, true)?,
        w: image(1, w, first, true)?,
        y: image(0, y, first, true)?,
        bias: None,
        residual: None,
        activation: Activation::None,
        channels_last: true,
        tf32: false,
        algorithm: None,
    };
    Some((Call::Conv(call), core_alone(kernel)?))
}

/// True if the padding is the same at both ends of each axis, as far as the extents of the result can tell.
fn pads_evenly(data: &[usize], result: &[usize], window: &Window) -> Option<bool> {
    for a in 0..3 {
        let reach = (window.kernel[a].checked_sub(1)?).checked_mul(window.dilations[a])?.checked_add(1)?;
        let padded = data.get(2 + a)?.checked_add(window.pads[a].checked_mul(2)?)?;
        if padded.checked_sub(reach)? / window.strides[a].max(1) + 1 != *result.get(2 + a)? {
            return Some(false);
        }
    }
    Some(true)
}

/// An operand without its first `first` spatial axes, which have extent 1. `None` if cuDNN cannot count its elements.
fn image(slot: usize, operand: &Operand, first: usize, channels_last: bool) -> Option<Image> {
    let Access { shape: extents, strides, offset } = &operand.access;
    // An axis of extent 1 gets the step that it would have in a dense tensor.
    let mut dense = 1;
    let mut steps = vec![0; extents.len()];
    let order = if channels_last { shape::channels_last(extents.len()) } else { (0..extents.len()).collect() };
    for k in order.into_iter().rev() {
        steps[k] = if extents[k] == 1 { dense } else { u64::try_from(strides[k]).ok()? };
        dense = steps[k].checked_mul(extents[k] as u64)?;
    }
    let axes: Vec<usize> = (0..extents.len()).filter(|&k| k < 2 || k >= 2 + first).collect();
    let small = axes.iter().all(|&k| i32::try_from(extents[k]).is_ok() && i32::try_from(steps[k]).is_ok());
    small.then_some(Image {
        slot,
        dtype: operand.dtype,
        offset: (*offset).try_into().ok()?,
        dims: axes.iter().map(|&k| extents[k] as u64).collect(),
        strides: axes.iter().map(|&k| steps[k]).collect(),
    })
}
