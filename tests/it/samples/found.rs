//! Rows of sampled regions, of states that attend, of features, and of what is found.

use super::{Sample, call};
use plimsoll::Tensor;
use plimsoll::internals::dtype::DType::{F32, I32, I64};
use plimsoll::internals::op::Attr;

pub fn samples() -> Vec<Sample> {
    [regions(), attention(), products(), found(), rest()].concat()
}

fn regions() -> Vec<Sample> {
    let align = || {
        call("RoiAlign", &[&[2, 2, 8, 7]])
            .given(F32, &[3, 4], &[0.0, 0.0, 7.0, 7.0, 1.5, 2.0, 4.0, 3.0, -3.0, -2.0, 12.0, 9.0])
            .given(I64, &[3], &[0.0, 1.0, 1.0])
            .attr("output_height", 3)
            .attr("output_width", 2)
    };
    let deform = |image: &[usize], filters: &[usize], offsets: &[usize]| {
        call("DeformConv", &[image, filters]).input(F32, offsets, -1.5, 1.5)
    };
    vec![
        align(),
        align()
            .attr("mode", "max")
            .attr("coordinate_transformation_mode", "output_half_pixel")
            .attr("spatial_scale", 0.5),
        align().attr("sampling_ratio", 1).attr("spatial_scale", 0.5),
        align()
            .attr("sampling_ratio", 2)
            .attr("mode", "max")
            .attr("coordinate_transformation_mode", "output_half_pixel"),
        deform(&[1, 2, 7], &[3, 2, 3], &[1, 3, 3]).ints("strides", &[2]).ints("kernel_shape", &[3]),
        deform(&[2, 2, 6, 5], &[2, 2, 2, 2], &[2, 8, 4, 3]).ints("dilations", &[2, 2]),
        deform(&[1, 2, 3, 3, 3], &[1, 2, 2, 2, 2], &[1, 24, 2, 2, 2]),
    ]
}

fn attention() -> Vec<Sample> {
    let plain = |queries: i64, heads: i64| {
        let (q, kv) = (queries as usize * 4, heads as usize * 4);
        call("LinearAttention", &[&[1, 3, q], &[1, 3, kv], &[1, 3, kv]])
            .attr("q_num_heads", queries)
            .attr("kv_num_heads", heads)
    };
    let shared = |s: Sample, width: usize| s.omitted().input(F32, &[1, 3, width], -0.7, 0.0);
    vec![
        plain(2, 2).attr("update_rule", "linear").attr("scale", 0.3).attr("chunk_size", 2),
        shared(plain(2, 1), 1).attr("update_rule", "gated"),
        plain(2, 2).omitted().omitted().input(F32, &[1, 3, 1], 0.0, 1.0).attr("update_rule", "delta"),
        shared(plain(4, 2), 2).input(F32, &[1, 3, 2], 0.0, 1.0),
    ]
}

fn products() -> Vec<Sample> {
    let running = |shape: &[usize]| call("CumProd", &[shape]);
    vec![
        running(&[5]).attr("axis", 0).attr("exclusive", 1),
        running(&[3, 7]).attr("axis", -1).attr("exclusive", 1).attr("reverse", 1),
        running(&[1, 3]).attr("axis", 0),
        Sample::new("CumProd").input(I32, &[3, 4], -3.0, 3.0).attr("axis", 1),
        call("Det", &[&[2, 2]]),
        call("Det", &[&[3, 1, 4, 4]]),
        Sample::new("BitCast").input(I32, &[9], 1e9, 1.05e9).attr("to", F32.onnx()),
    ]
}

fn found() -> Vec<Sample> {
    let boxes = [0.5, 0.5, 1.0, 1.0, 0.5, 0.6, 1.0, 1.0, 0.5, 10.5, 1.0, 1.0];
    let rows = Tensor::from_f64(I32, [3, 2], &[4.0, 0.0, 1.0, 7.0, 4.0, 0.0]);
    vec![
        Sample::new("NonMaxSuppression")
            .attr("boxes", Tensor::from_f64(F32, [1, 3, 4], &boxes))
            .attr("scores", Tensor::from_f64(F32, [1, 2, 3], &[0.9, 0.95, 0.1, 0.3, 0.3, 0.8]))
            .attr("max_output_boxes_per_class", 2)
            .attr("iou_threshold", 0.4)
            .attr("score_threshold", 0.2)
            .attr("center_point_box", 1),
        Sample::new("Unique").attr("X", rows).attr("axis", 0).attr("sorted", 0),
    ]
}

fn rest() -> Vec<Sample> {
    let terms = |mode: &str| {
        let s = Sample::new("TfIdfVectorizer").given(I32, &[6], &[1.0, 2.0, 1.0, 2.0, 3.0, 1.0]).attr("mode", mode);
        s.attr("min_gram_length", 1)
            .attr("max_gram_length", 3)
            .attr("max_skip_count", 1)
            .ints("ngram_counts", &[0, 1, 3])
            .ints("ngram_indexes", &[3, 0, 4])
            .ints("pool_int64s", &[2, 1, 2, 1, 1, 3])
            .attr("weights", Attr::Floats(vec![0.5, 2.0, 3.0]))
    };
    vec![
        terms("TF"),
        terms("IDF"),
        call("MaxUnpool", &[&[1, 2, 3]])
            .given(I64, &[1, 2, 3], &[1.0, 2.0, 4.0, 6.0, 9.0, 10.0])
            .ints("kernel_shape", &[2])
            .ints("strides", &[2]),
        call("MaxUnpool", &[&[1, 1, 3]])
            .given(I64, &[1, 1, 3], &[0.0, 2.0, 3.0])
            .ints("kernel_shape", &[2])
            .ints("strides", &[2])
            .ints("pads", &[1, 1]),
        call("ai.onnx.ml.Binarizer", &[&[7]]).attr("threshold", 0.25),
    ]
}
