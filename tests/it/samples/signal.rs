//! Rows of signals, and of sums over windows.

use super::{Sample, call};
use plimsoll::internals::dtype::DType;

pub fn samples() -> Vec<Sample> {
    [known(), transforms(), sums(), places()].concat()
}

fn known() -> Vec<Sample> {
    let mut all = Vec::new();
    for op in ["HannWindow", "HammingWindow", "BlackmanWindow"] {
        all.push(Sample::new(op).attr("size", 9));
        all.push(Sample::new(op).attr("size", 8).attr("periodic", 0).attr("output_datatype", DType::F32.onnx()));
    }
    all
}

/// Of real and complex numbers, cut and continued by zeros, both ways.
fn transforms() -> Vec<Sample> {
    let dft = |shape: &[usize]| call("DFT", &[shape]);
    let stft = |shapes: &[&[usize]]| call("STFT", shapes).attr("frame_step", 5);
    vec![
        dft(&[2, 7, 1]).attr("axis", 1).attr("onesided", 1),
        dft(&[2, 3, 6, 2]).attr("dft_length", 9).attr("inverse", 1),
        dft(&[2, 8, 3, 1]).attr("dft_length", 5).attr("axis", 1),
        // Half of a spectrum, of an even and of an odd number of samples.
        dft(&[2, 5, 2]).attr("axis", 1).attr("onesided", 1).attr("inverse", 1),
        dft(&[2, 5, 2]).attr("dft_length", 9).attr("axis", 1).attr("onesided", 1).attr("inverse", 1),
        stft(&[&[2, 40]]).attr("frame_length", 12),
        stft(&[&[1, 40, 2], &[12]]).attr("onesided", 0),
    ]
}

fn sums() -> Vec<Sample> {
    let pool = |shape: &[usize], kernel: &[i64]| call("LpPool", &[shape]).ints("kernel_shape", kernel);
    let image = |shape: &[usize], image: &[i64], block: &[i64]| {
        call("Col2Im", &[shape]).ints("image_shape", image).ints("block_shape", block)
    };
    vec![
        pool(&[1, 2, 7, 8], &[3, 2]).ints("strides", &[2, 2]).attr("ceil_mode", 1).attr("p", 1),
        pool(&[1, 2, 9], &[3]).ints("dilations", &[2]).attr("auto_pad", "SAME_UPPER").attr("p", 3),
        call("GlobalLpPool", &[&[1, 2, 7]]).attr("p", 3),
        image(&[1, 8, 16], &[6, 6], &[2, 2]).ints("dilations", &[2, 2]),
        image(&[1, 18, 25], &[5, 5], &[3, 3]).ints("pads", &[1, 1, 1, 1]),
    ]
}

fn places() -> Vec<Sample> {
    vec![
        call("AffineGrid", &[&[1, 3, 4]]).ints("size", &[1, 3, 2, 4, 5]).attr("align_corners", 1),
        call("CenterCropPad", &[&[10, 7, 3]]).ints("shape", &[10, 9]).ints("axes", &[-2, 0]),
    ]
}
