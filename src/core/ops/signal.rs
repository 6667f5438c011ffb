//! Rows of signals: windows and filters as constants. Fourier transforms are in `fourier`.

use super::compose::composed;
use super::index::known;
use super::{ensure, output, required_ints};
use crate::dtype::DType;
use crate::op::{Args, Attrs, Call, Fact, Input, Nodes, OpDef, OpResult, Var, inputs, names};
use crate::tensor::Tensor;
use std::f64::consts::TAU;

pub(super) mod fourier;

const SIZE: &[Input] = inputs![size=];
const WINDOW: &[&str] = names![output_datatype periodic];

pub(super) static OPS: &[OpDef] = &[
    known("HannWindow", "The Hann window of `size` elements", SIZE, window_fact, |c| window(c, &[0.5, 0.5]))
        .sample(|s| s.attr("size", 9).attr("output_datatype", DType::F32.onnx()))
        .attrs(WINDOW),
    known("HammingWindow", "The Hamming window of `size` elements", SIZE, window_fact, |c| {
        window(c, &[25.0 / 46.0, 21.0 / 46.0])
    })
    .sample(|s| s.attr("size", 9).attr("output_datatype", DType::F32.onnx()))
    .attrs(WINDOW),
    known("BlackmanWindow", "The Blackman window of `size` elements", SIZE, window_fact, |c| {
        window(c, &[0.42, 0.5, 0.08])
    })
    .sample(|s| s.attr("size", 9).attr("output_datatype", DType::F32.onnx()))
    .attrs(WINDOW),
    known(
        "MelWeightMatrix",
        "The weights that take a spectrum to bins of equal width in mel",
        inputs![num_mel_bins= dft_length= sample_rate= lower_edge_hertz= upper_edge_hertz=],
        |call| {
            let mel = Mel::of(call)?;
            output(datatype(call)?, [mel.spectrum, mel.bins])
        },
        |call| Mel::of(call)?.weights(datatype(call)?),
    )
    .sample(|s| {
        s.attr("num_mel_bins", 8)
            .attr("dft_length", 64)
            .attr("sample_rate", 16000)
            .attr("lower_edge_hertz", 20.0)
            .attr("upper_edge_hertz", 7000.0)
            .attr("output_datatype", DType::F32.onnx())
    })
    .attrs(names![output_datatype]),
    composed(
        "DFT",
        "The discrete Fourier transform along `axis` of numbers, real or complex, whose parts are the last axis",
        inputs![input dft_length= axis=],
        fourier::transform,
    )
    .sample(|s| s.floats(&[&[2, 8, 3, 2]]))
    .attrs(names![inverse onesided])
    .upgrade(|opset, _, attrs| {
        if opset < 20 && attrs.get("axis").is_none() {
            attrs.set("axis", 1);
        }
    }),
    composed(
        "STFT",
        "DFT of frames of a signal [batch, length, parts], `frame_step` apart and `frame_length` long, \
         each times a window",
        inputs![signal frame_step= window? frame_length=],
        frames,
    )
    .sample(|s| s.floats(&[&[2, 40, 1], &[16]]).attr("frame_step", 5))
    .attrs(names![onesided]),
];

/// The type that `output_datatype` names.
fn datatype(call: &Call) -> OpResult<DType> {
    let code = call.int("output_datatype", DType::F32.onnx())?;
    DType::from_onnx(code).ok_or_else(|| format!("attribute 'output_datatype': unknown element type {code}"))
}

/// A shaping input that is an integer of at least 1.
fn length(call: &Call, name: &str) -> OpResult<usize> {
    if call.attrs.get(name).is_none() {
        required_ints(call, name)?;
    }
    let given = call.int(name, 0)?;
    let checked = usize::try_from(given).ok().filter(|n| (1..=1 << 30).contains(n));
    checked.ok_or_else(|| format!("'{name}': expected 1 or more, found {given}"))
}

fn window_fact(call: &Call) -> OpResult<Vec<Fact>> {
    call.int("periodic", 1)?;
    output(datatype(call)?, [length(call, "size")?])
}

/// A window: the sum of cosines with these amplitudes and alternating signs.
fn window(call: &Call, amplitudes: &[f64]) -> OpResult<Tensor> {
    let size = length(call, "size")?;
    let period = if call.int("periodic", 1)? != 0 { size } else { (size - 1).max(1) };
    let element = |n: usize| {
        let term = |(k, a): (usize, &f64)| {
            a * (TAU * (k * n) as f64 / period as f64).cos() * if k % 2 == 0 { 1.0 } else { -1.0 }
        };
        amplitudes.iter().enumerate().map(term).sum::<f64>()
    };
    Ok(Tensor::from_f64(datatype(call)?, [size], &(0..size).map(element).collect::<Vec<_>>()))
}

/// Triangles over the bins of a spectrum. Their edges are equally spaced in mel.
struct Mel {
    bins: usize,
    spectrum: usize,
    dft: usize,
    rate: usize,
    /// The first edge and the distance to the next, in mel.
    low: f64,
    step: f64,
}

impl Mel {
    fn of(call: &Call) -> OpResult<Mel> {
        let [bins, dft, rate] = ["num_mel_bins", "dft_length", "sample_rate"].map(|name| length(call, name));
        let (bins, dft, rate) = (bins?, dft?, rate?);
        let [low, high] = ["lower_edge_hertz", "upper_edge_hertz"].map(|name| call.float(name, f64::NAN));
        let [low, high] = [low?, high?].map(|hertz| 2595.0 * (1.0 + hertz / 700.0).log10());
        let mel = Mel { bins, spectrum: dft / 2 + 1, dft, rate, low, step: (high - low) / (bins + 2) as f64 };
        // Those between them ascend, too.
        let ends = [0, bins + 1].map(|i| mel.edge(i));
        ensure(ends.is_sorted() && ends.iter().all(|e| (0.0..mel.spectrum as f64).contains(e)), || {
            "expected edges that ascend from 0 to half the sample rate, found others".to_owned()
        })?;
        Ok(mel)
    }

    /// Edge `i`: triangle `i` begins, triangle `i - 1` has its peak, and triangle `i - 2` ends there.
    fn edge(&self, i: usize) -> f64 {
        let hertz = 700.0 * (10f64.powf((self.low + self.step * i as f64) / 2595.0) - 1.0);
        ((self.dft + 1) as f64 * hertz / self.rate as f64).floor()
    }

    fn weights(&self, dtype: DType) -> OpResult<Tensor> {
        let mut weights = vec![0.0; self.spectrum * self.bins];
        for bin in 0..self.bins {
            let [low, peak, high] = [0, 1, 2].map(|k| (self.edge(bin + k) as usize).min(self.spectrum - 1));
            for at in low..high.max(peak + 1) {
                weights[at * self.bins + bin] = if at > peak {
                    (high - at) as f64 / (high - peak) as f64
                } else if peak == low {
                    1.0
                } else {
                    (at - low) as f64 / (peak - low) as f64
                };
            }
        }
        Ok(Tensor::from_f64(dtype, [self.spectrum, self.bins], &weights))
    }
}

fn frames<'g>(b: Nodes<'g>, call: &Call, x: &Args<Var<'g>>) -> OpResult<Vec<Var<'g>>> {
    let (batch, extent, parts) = match call.shape(0)[..] {
        [batch, extent] => (batch, extent, 1),
        [batch, extent, parts] => (batch, extent, parts),
        _ => return Err(format!("input 'signal': expected [batch, length, parts], found {}", call.shape(0))),
    };
    let step = length(call, "frame_step")?;
    let window = if call.has(1) { Some(call.shape(1).numel()) } else { None };
    let frame = match (call.attrs.get("frame_length"), window) {
        (Some(_), _) => length(call, "frame_length")?,
        (None, window) => window.unwrap_or(extent),
    };
    ensure(frame != 0 && frame <= extent && window.is_none_or(|n| n == frame), || {
        format!("expected frames and a window of the same length, 1 to {extent}, found {frame} and {window:?}")
    })?;
    let count = (extent - frame) / step + 1;
    let place = |i: usize| (i / frame * step + i % frame) as f64;
    let places = b.constant(DType::I64, [count, frame], || (0..count * frame).map(place).collect());
    let mut rows = x[0].shaped(&[batch, extent, parts]).gather(places, 1);
    if let Some(window) = x.given(1) {
        rows = rows * window.shaped(&[frame, 1]);
    }
    let onesided = call.int("onesided", 1)?;
    Ok(vec![rows.op("DFT", &[], Attrs::new().with("axis", 2).with("onesided", onesided))])
}
