//! Operators with one definition only, as nodes or as values, against values that other programs computed.

use crate::samples::Sample;
use plimsoll::internals::dtype::DType::*;
use plimsoll::internals::op::{Call, Fact};
use plimsoll::internals::ops;

trait Wave {
    /// A further input, whose elements go up and down between -1.25 and 1.25. Each input starts at another value.
    fn wave(self, shape: &[usize]) -> Sample;
}

impl Wave for Sample {
    fn wave(self, shape: &[usize]) -> Sample {
        let element = |i: usize| ((i * 7 + 3 * self.inputs.len()) % 11) as f64 / 4.0 - 1.25;
        let values: Vec<f64> = (0..shape.iter().product()).map(element).collect();
        self.given(F32, shape, &values)
    }
}

/// The first output of a sample's row.
fn found(sample: &Sample) -> Vec<f64> {
    let op = ops::find(sample.op).unwrap_or_else(|| panic!("no row '{}'", sample.op));
    let tensors = sample.tensors();
    let facts: Vec<_> = tensors.iter().map(|t| t.as_ref().map(|t| Fact::new(t.dtype(), t.shape().clone()))).collect();
    let facts: Vec<_> = facts.iter().map(Option::as_ref).collect();
    let values: Vec<_> = tensors.iter().map(|t| t.as_ref().map(|t| t.to_f64())).collect();
    let values: Vec<_> = values.iter().map(Option::as_deref).collect();
    let outputs = Call { op, attrs: &sample.attrs, inputs: &facts }.eval(&values);
    outputs.unwrap_or_else(|what| panic!("{sample:?}: {what}")).swap_remove(0)
}

/// Signed elements of 4 bits.
const NIBBLES: [f64; 34] = [
    -8.0, -1.0, 6.0, -3.0, 4.0, -5.0, 2.0, -7.0, 0.0, 7.0, -2.0, 5.0, -4.0, 3.0, -6.0, 1.0, -8.0, -1.0, 6.0, -3.0, 4.0,
    -5.0, 2.0, -7.0, 0.0, 7.0, -2.0, 5.0, -4.0, 3.0, -6.0, 1.0, -8.0, -1.0,
];

/// Expected values have four decimals.
fn agree(cases: &[(Sample, &[f64])]) {
    for (sample, expected) in cases {
        let values = found(sample);
        let close = values.iter().zip(*expected).all(|(a, b)| (a - b).abs() < 6e-5);
        assert!(values.len() == expected.len() && close, "{sample:?}: expected {expected:?}, found {values:?}");
    }
}

/// Log-probabilities of three classes for two labels: those of the second class are -inf.
#[test]
fn labels_that_do_not_count_leave_losses_alone() {
    let loss = |labels: &[f64], reduction: &str, ignored: Option<i64>| {
        let logs = [-1.0, f64::NEG_INFINITY, -2.0, -3.0, f64::NEG_INFINITY, -4.0];
        let sample = Sample::new("NegativeLogLikelihoodLoss").given(F32, &[2, 3], &logs).given(I64, &[2], labels);
        let sample = sample.attr("reduction", reduction);
        found(&ignored.into_iter().fold(sample, |sample, class| sample.attr("ignore_index", class)))
    };
    assert_eq!(loss(&[0.0, 1.0], "none", Some(1)), [1.0, 0.0]);
    assert_eq!(loss(&[0.0, 1.0], "sum", Some(1)), [1.0]);
    assert_eq!(loss(&[0.0, 1.0], "mean", Some(1)), [1.0]);
    assert_eq!(loss(&[0.0, 2.0], "mean", Some(1)), [2.5]);
    assert_eq!(loss(&[0.0, 5.0], "mean", None), [1.0], "a label that is no class");
}

#[test]
fn values_are_those_of_onnxruntime() {
    agree(&[
        (
            Sample::new("FusedMatMul")
                .wave(&[2, 2, 3])
                .wave(&[2, 2, 3])
                .attr("alpha", 0.5)
                .attr("transBatchA", 1)
                .attr("transB", 1),
            &[0.5625, 0.7188, -0.375, -0.375, -0.4375, -0.5312, -0.3125, -0.2188],
        ),
        (
            Sample::new("FusedGemm")
                .wave(&[3, 2])
                .wave(&[3, 2])
                .wave(&[2])
                .attr("activation", "LeakyRelu")
                .attr("activation_alpha", 0.5)
                .attr("transA", 1),
            &[1.0, -0.9688, -0.2188, -0.5312],
        ),
        (
            Sample::new("FusedConv")
                .wave(&[1, 2, 4])
                .wave(&[2, 2, 3])
                .wave(&[2])
                .wave(&[1, 2, 2])
                .attr("activation", "Clip")
                .attr("activation_params", vec![-0.5, 1.5]),
            &[1.4375, 1.25, -0.5, 0.25],
        ),
        (
            Sample::new("EmbedLayerNormalization")
                .given(I32, &[1, 2], &[2.0, 1.0])
                .given(I32, &[1, 2], &[0.0, 1.0])
                .wave(&[3, 3])
                .wave(&[4, 3])
                .wave(&[2, 3])
                .wave(&[3])
                .wave(&[3])
                .attr("epsilon", 0.25),
            &[0.3843, -0.5, 1.0185, 0.3843, -0.5, 1.0185],
        ),
        (
            Sample::new("MatMulIntegerToFloat")
                .given(U8, &[2, 3], &[0.0, 53.0, 9.0, 62.0, 18.0, 71.0])
                .given(I8, &[3, 2], &[0.0, 53.0, 9.0, 62.0, 18.0, 71.0])
                .given(F32, &[], &[0.125])
                .given(F32, &[2], &[0.5, 0.25])
                .given(U8, &[], &[40.0])
                .given(I8, &[2], &[3.0, -2.0])
                .wave(&[2]),
            &[-16.1875, -113.9688, 17.1875, 64.0312],
        ),
        (
            Sample::new("DynamicQuantizeMatMul")
                .given(F32, &[2, 3], &[-1.0, 0.5, -0.3, 1.5, 0.2, -0.7])
                .given(I8, &[3, 2], &[0.0, 53.0, 9.0, 62.0, 18.0, 71.0])
                .given(F32, &[2], &[0.5, 0.25])
                .given(I8, &[2], &[3.0, -2.0]),
            &[0.7206, -11.2966, -6.8824, 11.0588],
        ),
        (
            Sample::new("QGemm")
                .given(U8, &[2, 3], &[0.0, 53.0, 9.0, 62.0, 18.0, 71.0])
                .given(F32, &[], &[0.125])
                .given(U8, &[], &[40.0])
                .given(I8, &[2, 3], &[0.0, 53.0, 9.0, 62.0, 18.0, 71.0])
                .given(F32, &[], &[0.25])
                .given(I8, &[], &[3.0])
                .given(I32, &[2], &[500.0, -700.0])
                .given(F32, &[], &[2.0])
                .given(U8, &[], &[100.0])
                .attr("transB", 1)
                .attr("alpha", 0.5),
            &[108.0, 61.0, 96.0, 119.0],
        ),
        (
            Sample::new("QLinearConcat")
                .given(F32, &[], &[0.25])
                .given(U8, &[], &[100.0])
                .given(U8, &[1, 2], &[0.0, 53.0])
                .given(F32, &[], &[0.5])
                .given(U8, &[], &[9.0])
                .given(U8, &[1, 3], &[0.0, 53.0, 9.0])
                .given(F32, &[], &[0.125])
                .given(U8, &[], &[20.0])
                .attr("axis", 1),
            &[82.0, 188.0, 90.0, 116.0, 94.0],
        ),
        (
            Sample::new("QLinearSoftmax")
                .given(U8, &[1, 4], &[0.0, 53.0, 9.0, 62.0])
                .given(F32, &[], &[0.03125])
                .given(U8, &[], &[9.0])
                .given(F32, &[], &[0.00390625])
                .given(U8, &[], &[0.0])
                .attr("opset", 13)
                .attr("axis", -1),
            &[18.0, 92.0, 23.0, 123.0],
        ),
        (
            Sample::new("QLinearWhere")
                .given(Bool, &[3], &[1.0, 0.0, 1.0])
                .given(U8, &[3], &[0.0, 53.0, 9.0])
                .given(F32, &[], &[0.5])
                .given(U8, &[], &[9.0])
                .given(U8, &[1], &[0.0])
                .given(F32, &[], &[0.25])
                .given(U8, &[], &[90.0])
                .given(F32, &[], &[0.5])
                .given(U8, &[], &[20.0]),
            &[11.0, 0.0, 20.0],
        ),
        (
            Sample::new("MatMulNBits")
                .wave(&[1, 20])
                .given(
                    U8,
                    &[2, 2, 8],
                    &[
                        0.0, 53.0, 9.0, 62.0, 18.0, 71.0, 27.0, 80.0, 36.0, 89.0, 45.0, 1.0, 54.0, 10.0, 63.0, 19.0,
                        72.0, 28.0, 81.0, 37.0, 90.0, 46.0, 2.0, 55.0, 11.0, 64.0, 20.0, 73.0, 29.0, 82.0, 38.0, 91.0,
                    ],
                )
                .wave(&[2, 2])
                .given(U8, &[2, 1], &[53.0, 156.0])
                .omitted()
                .wave(&[2])
                .attr("N", 2)
                .attr("K", 20)
                .attr("block_size", 16)
                .attr("bits", 4),
            &[6.1875, -17.25],
        ),
        (
            Sample::new("com.microsoft.RotaryEmbedding")
                .wave(&[1, 2, 4])
                .given(I64, &[1], &[1.0])
                .wave(&[4, 2])
                .wave(&[4, 2])
                .attr("interleaved", 1),
            &[-0.75, 1.75, -0.9375, -0.375, -0.4375, 0.6875, 0.75, -1.25],
        ),
        (
            Sample::new("com.microsoft.Attention")
                .wave(&[1, 2, 3])
                .wave(&[3, 12])
                .wave(&[12])
                .given(I32, &[1, 3], &[1.0, 0.0, 1.0])
                .wave(&[2, 1, 2, 1, 2])
                .attr("num_heads", 2)
                .attr("unidirectional", 1)
                .attr("mask_filter_value", -2.0),
            &[0.4061, -0.1558, 1.1535, 0.3224, 0.2497, -0.6428, 0.9094, 0.3348],
        ),
        (
            Sample::new("QAttention")
                .given(U8, &[1, 2, 3], &[0.0, 53.0, 9.0, 62.0, 18.0, 71.0])
                .given(
                    I8,
                    &[3, 6],
                    &[
                        0.0, 53.0, 9.0, 62.0, 18.0, 71.0, 27.0, 80.0, 36.0, 89.0, 45.0, 1.0, 54.0, 10.0, 63.0, 19.0,
                        72.0, 28.0,
                    ],
                )
                .wave(&[6])
                .given(F32, &[], &[0.03125])
                .given(F32, &[], &[0.015625])
                .given(I32, &[1], &[1.0])
                .given(U8, &[], &[40.0])
                .given(I8, &[], &[30.0])
                .attr("num_heads", 1),
            &[-1.3062, -0.2046, -1.3062, -0.2046],
        ),
        (
            Sample::new("MultiHeadAttention")
                .wave(&[1, 2, 4])
                .wave(&[1, 3, 4])
                .wave(&[1, 3, 6])
                .wave(&[14])
                .given(I32, &[1, 3], &[1.0, 1.0, 0.0])
                .wave(&[1, 1, 2, 3])
                .attr("num_heads", 2)
                .attr("mask_filter_value", -2.0)
                .attr("scale", 0.5),
            &[1.3103, -0.3917, 0.0603, 0.563, 0.8144, -0.687, 1.0029, -0.9043, -0.2471, 0.53, 1.0391, -0.72],
        ),
        (
            Sample::new("GroupQueryAttention")
                .wave(&[1, 1, 32])
                .wave(&[1, 1, 16])
                .wave(&[1, 1, 16])
                .wave(&[1, 1, 3, 16])
                .wave(&[1, 1, 3, 16])
                .given(I32, &[1], &[3.0])
                .attr("total_sequence_length", 4)
                .wave(&[8, 8])
                .wave(&[8, 8])
                .attr("num_heads", 2)
                .attr("kv_num_heads", 1)
                .attr("do_rotary", 1)
                .attr("local_window_size", 2),
            &[
                0.0669, -0.9331, 0.8169, -0.1831, -1.1831, 0.5669, -0.4331, 0.581, 0.3169, -0.6831, 1.0669, 0.0669,
                -0.9331, 0.8169, -0.1831, -1.1831, 0.1821, -0.8179, 0.9321, -0.0679, -1.0679, 0.6821, -0.3179, -0.5714,
                0.4321, -0.5679, 1.1821, 0.1821, -0.8179, 0.9321, -0.0679, -1.0679,
            ],
        ),
        (
            Sample::new("GroupQueryAttention")
                .wave(&[2, 1, 8])
                .wave(&[2, 1, 8])
                .wave(&[2, 1, 8])
                .wave(&[2, 1, 3, 8])
                .wave(&[2, 1, 3, 8])
                .given(I32, &[2], &[3.0, 1.0])
                .attr("total_sequence_length", 4)
                .attr("num_heads", 1)
                .attr("kv_num_heads", 1)
                .attr("softcap", 2.0),
            &[
                -0.5798, 0.9086, 0.1702, -0.8298, 0.6586, -0.0798, -0.5332, 0.4086, -0.1242, -1.1242, 0.6258, -0.3742,
                0.9146, 0.3758, -0.6242, 0.6646,
            ],
        ),
        // The caches have room for four keys, and the length says that three are valid.
        (
            Sample::new("GroupQueryAttention")
                .wave(&[1, 1, 16])
                .wave(&[1, 1, 8])
                .wave(&[1, 1, 8])
                .wave(&[1, 1, 4, 8])
                .wave(&[1, 1, 4, 8])
                .given(I32, &[1], &[2.0])
                .attr("total_sequence_length", 4)
                .attr("num_heads", 2)
                .attr("kv_num_heads", 1),
            &[
                -0.6619, 0.5727, 0.0881, -0.9119, 0.3227, -0.1619, -0.0693, 0.0727, -0.2627, -0.0109, 0.4873, -0.5127,
                -0.2609, 0.2373, -0.1299, -0.5109,
            ],
        ),
        // The same without the total length.
        (
            Sample::new("GroupQueryAttention")
                .wave(&[1, 2, 16])
                .wave(&[1, 2, 8])
                .wave(&[1, 2, 8])
                .wave(&[1, 1, 4, 8])
                .wave(&[1, 1, 4, 8])
                .given(I32, &[1], &[2.0])
                .attr("num_heads", 2)
                .attr("kv_num_heads", 1),
            &[
                -0.5993, 0.2692, 0.1507, -0.8493, 0.0192, -0.0993, 0.7692, -0.2308, -0.1212, -0.3046, 0.6288, -0.3712,
                -0.5546, 0.3788, 0.1954, -0.8046, 0.237, -0.6012, 0.987, -0.013, -0.8512, 0.737, -0.1012, -1.1012,
                0.2435, -0.6145, 0.9935, -0.0065, -0.8645, 0.7435, -0.1145, -1.1145,
            ],
        ),
        (
            Sample::new("GroupQueryAttention")
                .wave(&[1, 2, 16])
                .wave(&[1, 2, 8])
                .wave(&[1, 2, 8])
                .omitted()
                .omitted()
                .given(I32, &[1], &[1.0])
                .omitted()
                .omitted()
                .omitted()
                .omitted()
                .given(F32, &[2], &[0.25, 0.75])
                .attr("num_heads", 2)
                .attr("kv_num_heads", 1)
                .attr("softcap", 2.0),
            &[
                0.0974, -0.2923, 0.3898, 0.0, -0.3898, 0.2923, -0.0974, -0.4872, 0.1156, -0.3469, 0.4625, 0.0, -0.4625,
                0.3469, -0.1156, -0.5781, 0.2691, -0.5487, 0.8824, 0.0646, -0.7531, 0.678, -0.1398, -0.9576, 0.242,
                -0.4966, 0.796, 0.0574, -0.6812, 0.6113, -0.1273, -0.8659,
            ],
        ),
        (
            Sample::new("GroupQueryAttention")
                .wave(&[1, 2, 8])
                .wave(&[1, 2, 8])
                .wave(&[1, 2, 8])
                .omitted()
                .omitted()
                .given(I32, &[1], &[1.0])
                .attr("num_heads", 1)
                .attr("kv_num_heads", 1)
                .attr("smooth_softmax", 1),
            &[
                0.1126, -0.3378, 0.4504, 0.0, -0.4504, 0.3378, -0.1126, -0.5631, 0.2417, -0.4904, 0.7907, 0.0587,
                -0.6734, 0.6077, -0.1244, -0.8564,
            ],
        ),
        // More keys than queries: the last query sees all keys that the mask does not hide.
        (
            Sample::new("MultiHeadAttention")
                .wave(&[1, 2, 4])
                .wave(&[1, 3, 4])
                .wave(&[1, 3, 4])
                .omitted()
                .given(I32, &[5], &[3.0, 0.0, 2.0, 0.0, 3.0])
                .attr("num_heads", 2)
                .attr("unidirectional", 1),
            &[0.25, -0.75, 1.0, 0.0, -0.0418, -0.1099, 0.9163, -0.0837],
        ),
        (
            Sample::new("MultiHeadAttention")
                .wave(&[1, 1, 4])
                .wave(&[1, 3, 4])
                .wave(&[1, 3, 4])
                .omitted()
                .given(I32, &[5], &[2.0, 0.0, 1.0, 0.0, 2.0])
                .attr("num_heads", 2)
                .attr("unidirectional", 1),
            &[0.0677, -0.5313, -0.0677, -1.0677],
        ),
        (
            Sample::new("com.microsoft.Attention")
                .wave(&[1, 2, 3])
                .wave(&[3, 6])
                .wave(&[6])
                .given(I32, &[1, 1], &[0.0])
                .attr("num_heads", 1),
            &[0.1929, 1.3463, -1.7189, 1.0444],
        ),
        (
            Sample::new("TensorScatter")
                .wave(&[2, 3, 2])
                .wave(&[2, 2, 2])
                .given(I64, &[2], &[1.0, 2.0])
                .attr("axis", 1)
                .attr("mode", "circular"),
            &[-1.25, 0.5, -0.5, 1.25, 0.25, -0.75, -1.0, 0.75, -1.0, 0.75, 1.0, 0.0],
        ),
        (
            Sample::new("Scatter").wave(&[2, 3]).given(I64, &[1, 2], &[1.0, 0.0]).wave(&[1, 2]).attr("axis", 0),
            &[-1.25, -0.75, -0.5, 0.25, 0.25, -0.75],
        ),
        (Sample::new("HannWindow").attr("size", 5), &[0.0, 0.3455, 0.9045, 0.9045, 0.3455]),
        (Sample::new("HammingWindow").attr("size", 5), &[0.087, 0.4024, 0.9128, 0.9128, 0.4024]),
        (Sample::new("BlackmanWindow").attr("size", 5), &[0.0, 0.2008, 0.8492, 0.8492, 0.2008]),
        (Sample::new("HannWindow").attr("size", 4).attr("periodic", 0), &[0.0, 0.75, 0.75, 0.0]),
        (
            Sample::new("MelWeightMatrix")
                .attr("num_mel_bins", 2)
                .attr("dft_length", 14)
                .attr("sample_rate", 8000)
                .attr("lower_edge_hertz", 200.0)
                .attr("upper_edge_hertz", 3800.0),
            &[0.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0],
        ),
        (
            Sample::new("DFT").wave(&[1, 5, 1]).attr("dft_length", 4).attr("axis", 1).attr("onesided", 1),
            &[0.0, 0.0, -0.75, 0.75, -3.5, 0.0],
        ),
        (Sample::new("DFT").wave(&[1, 3, 2]).attr("inverse", 1), &[-0.5, 0.3333, -0.9524, -0.1332, 0.2024, 0.2998]),
        (
            Sample::new("STFT").wave(&[1, 7, 1]).attr("frame_step", 2).wave(&[4]),
            &[0.1875, 0.0, 0.75, -1.5625, 0.8125, -0.0, 2.4375, 0.0, 0.1875, -1.0, -1.8125, 0.0],
        ),
        (
            Sample::new("LpPool")
                .wave(&[1, 1, 3, 4])
                .ints("kernel_shape", &[2, 2])
                .ints("pads", &[1, 0, 0, 1])
                .ints("strides", &[2, 2])
                .attr("p", 3),
            &[1.2761, 1.2761, 1.2297, 1.4372],
        ),
        (Sample::new("GlobalLpPool").wave(&[1, 2, 4]), &[1.9039, 1.2748]),
        (
            Sample::new("Col2Im")
                .wave(&[1, 4, 4])
                .ints("image_shape", &[3, 4])
                .ints("block_shape", &[2, 2])
                .ints("strides", &[1, 2])
                .ints("dilations", &[1, 1]),
            &[-1.25, 0.25, 0.5, -0.75, -1.5, 1.5, 2.0, -0.5, -0.25, 1.25, -1.25, 0.25],
        ),
        (
            Sample::new("AffineGrid").wave(&[1, 2, 3]).ints("size", &[1, 1, 2, 3]).attr("align_corners", 0),
            &[0.0833, -1.7083, -0.75, -0.875, -1.5833, -0.0417, 0.5833, -1.4583, -0.25, -0.625, -1.0833, 0.2083],
        ),
        (Sample::new("CenterCropPad").wave(&[2, 5]).ints("shape", &[4, 2]), &[0.0, 0.0, 0.5, -0.5, 1.0, 0.0, 0.0, 0.0]),
        (
            Sample::new("GatherBlockQuantized")
                .given(
                    U8,
                    &[3, 8],
                    &[
                        0.0, 53.0, 9.0, 62.0, 18.0, 71.0, 27.0, 80.0, 36.0, 89.0, 45.0, 1.0, 54.0, 10.0, 63.0, 19.0,
                        72.0, 28.0, 81.0, 37.0, 90.0, 46.0, 2.0, 55.0,
                    ],
                )
                .given(I64, &[2], &[2.0, 0.0])
                .wave(&[3, 1])
                .given(U8, &[3, 1], &[3.0, 12.0, 7.0])
                .attr("bits", 4)
                .attr("block_size", 16)
                .attr("quantize_axis", 1),
            &[
                1.0, -3.0, 5.0, -6.0, -6.0, -2.0, -2.0, -5.0, 3.0, -2.0, 7.0, -5.0, -5.0, -7.0, 0.0, -4.0, -0.75,
                -0.75, 0.5, 0.0, 1.5, -0.75, 2.75, 0.0, -0.25, -0.5, 1.0, 0.25, 2.0, -0.5, -0.75, 0.5,
            ],
        ),
        (
            Sample::new("GatherBlockQuantized")
                .given(I8, &[2, 17], &NIBBLES)
                .given(I64, &[2], &[16.0, -15.0])
                .wave(&[2, 2])
                .attr("gather_axis", 1)
                .attr("block_size", 16),
            &[6.0, 1.5, 0.0, -3.0],
        ),
        (
            Sample::new("GatherBlockQuantized")
                .given(I8, &[17, 2], &NIBBLES)
                .given(I64, &[1], &[1.0])
                .wave(&[2, 2])
                .given(I8, &[2, 2], &[1.0, -2.0, 3.0, 0.0])
                .attr("gather_axis", 1)
                .attr("quantize_axis", 0)
                .attr("block_size", 16),
            &[
                -0.75, 0.75, 2.25, 3.75, -6.75, -5.25, -3.75, -2.25, -0.75, 0.75, 2.25, 3.75, -6.75, -5.25, -3.75,
                -2.25, 0.0,
            ],
        ),
        (
            Sample::new("CausalConvWithState")
                .wave(&[1, 2, 3])
                .wave(&[2, 1, 3])
                .wave(&[2])
                .wave(&[1, 2, 2])
                .attr("activation", "silu"),
            &[-0.2042, -0.2775, 1.0975, 0.5094, -0.0303, -0.2759],
        ),
    ]);
}

/// Values beyond the length of a prompt's row do not count.
#[test]
fn rows_of_a_prompt_begin_where_their_caches_do() {
    let prompt = Sample::new("GroupQueryAttention")
        .wave(&[2, 2, 8])
        .wave(&[2, 2, 8])
        .wave(&[2, 2, 8])
        .wave(&[2, 1, 3, 8])
        .wave(&[2, 1, 3, 8])
        .given(I32, &[2], &[1.0, 0.0])
        .attr("num_heads", 1)
        .attr("kv_num_heads", 1);
    let expected = [
        0.25, -0.75, 1.0, 0.0, -1.0, 0.75, -0.25, -1.25, 0.3301, -0.6699, 1.0801, 0.0801, -0.9199, 0.8301, -0.1699,
        -1.1699, 0.75, -0.25, -1.25, 0.5, -0.5, 1.25, 0.25, -0.75,
    ];
    for sample in
        [prompt.clone(), prompt.clone().attr("total_sequence_length", 2), prompt.attr("total_sequence_length", 3)]
    {
        let values = found(&sample);
        assert!(values.iter().zip(expected).all(|(a, b)| (a - b).abs() < 6e-5), "{sample:?}: {values:?}");
    }
}

/// ONNX Runtime has these for CUDA only: the values are those of their definitions in NumPy.
#[test]
fn values_are_those_of_the_definitions() {
    agree(&[
        (Sample::new("BiasAdd").wave(&[2, 2]).wave(&[2]).wave(&[2, 2]), &[-1.5, 1.0, 0.0, 2.5]),
        (Sample::new("BiasSplitGelu").wave(&[2, 4]).wave(&[4]), &[0.1756, 0.605, -0.2795, -0.085]),
        (
            Sample::new("GroupNorm").wave(&[1, 3, 4]).wave(&[4]).wave(&[4]).attr("groups", 2).attr("activation", 1),
            &[0.6338, 0.2792, 0.5888, -0.2725, -0.0345, -0.2712, 1.0004, 0.0185, 0.4947, 0.6027, 0.6534, 0.852],
        ),
        (
            Sample::new("SkipGroupNorm")
                .wave(&[1, 3, 4])
                .wave(&[4])
                .wave(&[4])
                .wave(&[1, 4])
                .attr("groups", 2)
                .attr("activation", 1),
            &[0.4094, -0.1196, 0.4709, -0.2784, -0.1903, -0.1759, 0.7473, -0.1945, 0.2669, 0.1069, 0.5146, 0.1476],
        ),
        (
            Sample::new("NhwcConv").wave(&[1, 2, 3, 2]).wave(&[2, 2, 2, 2]).wave(&[2]).ints("pads", &[1, 0, 0, 0]),
            &[0.4375, -0.5625, -1.0625, -2.0, 3.0, 0.8125, 1.0, -3.8125],
        ),
    ]);
}
