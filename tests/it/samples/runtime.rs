//! Rows of ONNX Runtime's domain that stand for others.

use super::{Sample, call};
use plimsoll::internals::dtype::DType::{self, *};
use plimsoll::internals::op::Attr;

pub fn samples() -> Vec<Sample> {
    [
        fused(),
        embeddings(),
        groups(),
        packed(),
        codes(),
        experts(),
        weights(),
        rotations(),
        projections(),
        heads(),
        caches(),
        recurrent(),
    ]
    .concat()
}

fn fused() -> Vec<Sample> {
    let matrices = |a: &[usize], b: &[usize]| call("FusedMatMul", &[a, b]);
    let conv = |shapes: &[&[usize]]| call("FusedConv", shapes);
    vec![
        matrices(&[2, 4, 3], &[2, 5, 4]).attr("transA", 1).attr("transB", 1),
        matrices(&[4, 2, 3], &[5, 2, 4])
            .attr("transBatchA", 1)
            .attr("transBatchB", 1)
            .attr("transA", 1)
            .attr("transB", 1),
        matrices(&[4], &[4, 5]).attr("transA", 1),
        call("FusedGemm", &[&[4, 3], &[5, 4]])
            .attr("activation", "HardSigmoid")
            .attr("activation_alpha", 0.3)
            .attr("activation_beta", 0.4)
            .attr("transA", 1)
            .attr("transB", 1),
        call("FusedGemm", &[&[3, 4], &[4, 5]])
            .attr("activation", "Selu")
            .attr("activation_alpha", 1.5)
            .attr("activation_gamma", 0.5),
        conv(&[&[1, 4, 7, 8], &[4, 2, 3, 3], &[4], &[1, 4, 3, 3]])
            .attr("activation", "Clip")
            .attr("activation_params", vec![-0.3, 0.5])
            .attr("group", 2)
            .ints("kernel_shape", &[3, 3])
            .ints("strides", &[2, 2]),
        conv(&[&[1, 2, 9], &[3, 2, 3]]).attr("auto_pad", "VALID").ints("dilations", &[2]),
        call("NhwcConv", &[&[1, 6, 5, 4], &[6, 3, 2, 2], &[6]])
            .attr("group", 2)
            .ints("kernel_shape", &[3, 2])
            .ints("strides", &[2, 1])
            .ints("pads", &[1, 0, 1, 1]),
        call("NhwcFusedConv", &[&[1, 7, 8, 4], &[4, 2, 3, 3]])
            .attr("activation", "Clip")
            .attr("activation_params", vec![-0.3, 0.5])
            .attr("auto_pad", "SAME_UPPER")
            .attr("group", 2)
            .ints("dilations", &[1, 1])
            .ints("kernel_shape", &[3, 3])
            .ints("strides", &[2, 2]),
        call("TransposeMatMul", &[&[2, 3, 4], &[2, 5, 4]]).attr("transB", 1),
        call("BiasSoftmax", &[&[2, 3, 4], &[3, 4]]).attr("axis", 1).attr("is_inner_broadcast", 0),
        bytes(Sample::new("NhwcMaxPool"), I8, &[2, 7, 6, 3])
            .attr("auto_pad", "NOTSET")
            .attr("ceil_mode", 1)
            .ints("dilations", &[2, 1])
            .ints("kernel_shape", &[2, 2])
            .ints("pads", &[1, 0, 0, 1])
            .ints("strides", &[2, 2]),
        bytes(Sample::new("QLinearReduceMean"), U8, &[2, 3, 4])
            .quantized(0.0625, 60.0)
            .quantized(0.03125, 7.0)
            .ints("axes", &[1])
            .attr("keepdims", 0),
        call("PackedAttention", &[&[5, 6], &[6, 20], &[20]])
            .given(I32, &[1, 5], &[0.0, 1.0, 2.0, 3.0, 4.0])
            .given(I32, &[2], &[0.0, 5.0])
            .attr("num_heads", 2)
            .attr("scale", 0.5)
            .ints("qkv_hidden_sizes", &[6, 6, 8]),
        call("CausalConvWithState", &[&[2, 6, 1], &[6, 1, 4], &[6], &[2, 6, 3]])
            .attr("activation", "silu")
            .attr("channels_last", 0)
            .attr("dilation", 1)
            .attr("ndim", 1)
            .attr("state_window", 0),
    ]
}

fn recurrent() -> Vec<Sample> {
    let plain = |dtype| {
        let s = call("DynamicQuantizeLSTM", &[&[2, 3, 3]]).attr("direction", "bidirectional");
        bytes(bytes(s, dtype, &[2, 3, 20]), dtype, &[2, 5, 20])
    };
    let scales = |s: Sample, dtype, shape: &[usize]| {
        let s = s.input(F32, shape, 0.002, 0.008).input(dtype, shape, 90.0, 120.0);
        s.input(F32, shape, 0.002, 0.008).input(dtype, shape, 90.0, 120.0)
    };
    let states = |s: Sample| s.input(F32, &[2, 3, 5], -1.0, 1.0).input(F32, &[2, 3, 5], -1.0, 1.0);
    let names = ["HardSigmoid", "Tanh", "Affine"].repeat(2).into_iter().map(String::from).collect();
    let bare = (0..5).fold(plain(I8), |s, _| s.omitted());
    let full = states(plain(U8).input(F32, &[2, 40], -1.0, 1.0).given(I32, &[3], &[2.0, 0.0, 1.0]));
    vec![
        scales(bare, I8, &[2]).attr("activations", Attr::Strs(names)).attr("activation_alpha", vec![0.3, 0.6]),
        scales(full.input(F32, &[2, 15], -1.0, 1.0), U8, &[2, 20])
            .attr("hidden_size", 5)
            .attr("clip", 0.8)
            .attr("input_forget", 1)
            .attr("activation_beta", vec![0.4]),
    ]
}

fn embeddings() -> Vec<Sample> {
    let table = |s: Sample, rows: usize| s.input(F32, &[rows, 8], -1.0, 1.0);
    let norm = |s: Sample| s.input(F32, &[8], -1.0, 1.0).input(F32, &[8], -1.0, 1.0);
    let ids = || Sample::new("EmbedLayerNormalization").input(I32, &[2, 5], 0.0, 19.0);
    let few = norm(table(table(ids().omitted(), 20), 6).omitted());
    vec![few.clone(), few.omitted().input(I32, &[2, 5], 0.0, 5.0)]
}

fn codes() -> Vec<Sample> {
    let product = Sample::new("MatMulBnb4").input(F32, &[2, 32], -1.0, 1.0).input(U8, &[64], 0.0, 255.0);
    let product = product.input(F32, &[8], 0.01, 0.1).attr("N", 4).attr("K", 32).attr("block_size", 16);
    vec![product.attr("transB", 1).attr("training_mode", 0)]
}

fn experts() -> Vec<Sample> {
    let plain = call("MoE", &[&[5, 6], &[5, 4], &[4, 8, 6], &[4, 8], &[4, 6, 8], &[4, 6], &[4, 8, 6], &[4, 8]]);
    let plain = plain.attr("k", 2).attr("activation_type", "silu").attr("swiglu_fusion", 0);
    let gated = call("MoE", &[&[5, 6], &[5, 4], &[4, 16, 6], &[4, 16], &[4, 6, 8], &[4, 6]]);
    let gated = gated.attr("k", 1).attr("activation_type", "swiglu").attr("swiglu_fusion", 2).attr("swiglu_limit", 0.5);
    let gated = gated.attr("activation_alpha", 1.7).attr("activation_beta", 1.0);
    let gated = gated.attr("swiglu_limit_after_activation", 0).attr("use_sparse_mixer", 0);
    let weights = |s: Sample, n: usize, k: usize| {
        s.input(U8, &[4, n, k], 0.0, 255.0).input(F32, &[4, n, k / 16], 0.01, 0.1).input(F32, &[4, n], -1.0, 1.0)
    };
    let packed = call("QMoE", &[&[5, 32], &[5, 4]]);
    let packed = weights(weights(weights(packed, 32, 32), 32, 32), 32, 32);
    let packed = [0; 3].into_iter().fold(packed, |s, _| s.input(U8, &[4, 32, 2], 100.0, 150.0));
    let packed =
        packed.input(F32, &[5, 4], 0.1, 1.0).attr("k", 2).attr("activation_type", "silu").attr("block_size", 16);
    let packed =
        packed.attr("expert_weight_bits", 8).attr("fc1_expert_weight_bits", 8).attr("fc2_expert_weight_bits", 8);
    let packed =
        packed.attr("fc3_expert_weight_bits", 8).attr("normalize_routing_weights", 1).attr("quant_type", "int");
    let packed = packed.attr("swiglu_fusion", 0).attr("swiglu_limit", 1.0).attr("swiglu_limit_after_activation", 0);
    let packed = packed.attr("activation_alpha", 1.0).attr("activation_beta", 0.0).attr("use_sparse_mixer", 0);
    vec![plain, gated, packed.attr("weights_prepacked", 0).attr("accuracy_level", 4)]
}

fn groups() -> Vec<Sample> {
    let norm = |op, x: &[usize]| call(op, &[x, &[6], &[6]]).attr("groups", 2);
    vec![
        norm("GroupNorm", &[2, 6, 5]).attr("channels_last", 0),
        norm("SkipGroupNorm", &[2, 6, 4, 3])
            .input(F32, &[2, 6, 4, 3], -1.0, 1.0)
            .attr("channels_last", 0)
            .attr("activation", 0)
            .attr("epsilon", 0.1),
    ]
}

fn bytes(s: Sample, dtype: DType, shape: &[usize]) -> Sample {
    let low = if dtype == I8 { -128.0 } else { 0.0 };
    s.input(dtype, shape, low, low + 255.0)
}

/// Scales are powers of two, so that ties are ties in every type.
fn packed() -> Vec<Sample> {
    let scale = |s: Sample, value: f64| s.given(F32, &[], &[value]);
    let product = |a: &[usize], b: DType| bytes(bytes(Sample::new("MatMulIntegerToFloat"), U8, a), b, &[8, 5]);
    let dynamic = bytes(call("DynamicQuantizeMatMul", &[&[2, 3, 8]]), I8, &[8, 5]);
    let left = |shape: &[usize]| scale(bytes(Sample::new("QGemm"), U8, shape), 0.125).given(U8, &[], &[120.0]);
    let gemm = scale(bytes(left(&[3, 8]), I8, &[8, 5]), 0.0625).given(I8, &[], &[3.0]);
    let parts = |dtype: DType, axis: i64| {
        let s = scale(Sample::new("QLinearConcat"), 0.25).given(dtype, &[], &[10.0]).attr("axis", axis);
        let s = scale(bytes(s, dtype, &[2, 3]), 0.125).given(dtype, &[], &[9.0]);
        scale(bytes(s, dtype, &[2, 3]), 0.5).given(dtype, &[], &[2.0])
    };
    let softmax = scale(bytes(Sample::new("QLinearSoftmax"), U8, &[2, 3, 4]), 0.03125);
    let whole = |s: Sample| scale(s, 0.00390625).given(U8, &[], &[0.0]);
    vec![
        scale(product(&[2, 3, 8], I8), 0.125)
            .input(F32, &[5], 0.01, 0.1)
            .given(U8, &[], &[120.0])
            .given(I8, &[5], &[1.0, 0.0, -3.0, 4.0, 5.0])
            .input(F32, &[5], -1.0, 1.0),
        dynamic.input(F32, &[5], 0.01, 0.1).given(I8, &[], &[3.0]).input(F32, &[5], -1.0, 1.0),
        scale(gemm.clone().input(I32, &[5], -500.0, 500.0), 0.5).given(U8, &[], &[100.0]).attr("alpha", 0.5),
        scale(gemm.omitted(), 0.5),
        scale(bytes(left(&[8, 3]), U8, &[5, 8]), 0.5).given(U8, &[], &[3.0]).attr("transA", 1).attr("transB", 1),
        parts(I8, -2),
        whole(softmax.omitted()).attr("opset", 12),
    ]
}

/// Of 4, 8 and 2 bits, in whole blocks and not, with every kind of zero point, and with groups that are not blocks.
fn weights() -> Vec<Sample> {
    let row = |n: usize, k: usize, block: usize, bits: usize| {
        let blocks = k.div_ceil(block);
        bytes(call("MatMulNBits", &[&[2, 3, k]]), U8, &[n, blocks, block * bits / 8])
            .input(F32, &[n, blocks], 0.01, 0.1)
            .attr("N", n as i64)
            .attr("K", k as i64)
            .attr("bits", bits as i64)
            .attr("block_size", block as i64)
    };
    let parts = |bits: i64, shape: &[usize]| {
        let s = bytes(Sample::new("plimsoll.Weights"), U8, shape).input(F32, &[6, 3], 0.01, 0.1);
        s.attr("N", 6).attr("K", 40).attr("bits", bits).attr("block_size", 16)
    };
    let packed = |s: Sample, words: usize| s.input(I32, &[words], -2147483648.0, 2147483647.0);
    let words = |n: usize, k: usize, block: usize, bits: usize| {
        let blocks = k.div_ceil(block);
        packed(call("plimsoll.MatMulBits", &[&[2, 3, k]]), n * (blocks * block * bits).div_ceil(32))
            .input(F32, &[n, blocks], 0.01, 0.1)
            .attr("N", n as i64)
            .attr("bits", bits as i64)
            .attr("block_size", block as i64)
    };
    let rows = |n: usize, k: usize, block: usize, bits: usize| {
        let blocks = k.div_ceil(block);
        let s = Sample::new("plimsoll.GatherBits").input(I64, &[2, 3], -(n as f64), n as f64 - 1.0);
        packed(s, n * (blocks * block * bits).div_ceil(32))
            .input(F32, &[n, blocks], 0.01, 0.1)
            .attr("N", n as i64)
            .attr("K", k as i64)
            .attr("bits", bits as i64)
            .attr("block_size", block as i64)
            .element(F32)
    };
    let bits = |held: &[usize], shape: &[i64], bits: i64, signed: i64| {
        let s = bytes(Sample::new("plimsoll.Unpack"), U8, held).ints("shape", shape);
        s.attr("bits", bits).attr("signed", signed)
    };
    let table = |bits: usize, block: usize| {
        let s = bytes(Sample::new("GatherBlockQuantized"), U8, &[12, 6 * bits]).input(I64, &[2, 5], -12.0, 11.0);
        s.input(F32, &[12, 48 / block], 0.01, 0.1).attr("bits", bits as i64).attr("block_size", block as i64)
    };
    let nibbles = |data: &[usize], scales: &[usize]| {
        let s = Sample::new("GatherBlockQuantized").input(I8, data, -8.0, 7.0).input(I32, &[2], -3.0, 2.0);
        s.input(F32, scales, 0.01, 0.1).attr("block_size", 16)
    };
    let groups: Vec<f64> = (0..40).map(|k| f64::from(k * 7 % 3)).collect();
    vec![
        row(8, 32, 16, 4).attr("accuracy_level", 0).attr("weight_prepacked", 0),
        bytes(row(6, 40, 16, 4), U8, &[6, 2]).omitted().input(F32, &[6], -1.0, 1.0),
        row(6, 48, 16, 4).input(F32, &[6, 3], 3.0, 9.0),
        bytes(row(6, 40, 16, 4), U8, &[6, 2]).given(I32, &[40], &groups),
        bytes(row(6, 32, 16, 8), U8, &[6, 2]),
        row(6, 32, 16, 2),
        parts(4, &[6, 3, 8]).omitted().given(I32, &[40], &groups).attr("bits", 4),
        bytes(parts(2, &[6, 3, 4]), U8, &[6, 1]).attr("bits", 2),
        parts(8, &[6, 48]).input(F32, &[6, 3], 100.0, 150.0),
        packed(words(6, 40, 16, 4), 3),
        words(5, 70, 32, 4).input(F32, &[5, 3], 3.0, 9.0),
        packed(words(6, 33, 16, 8), 5),
        packed(words(3, 50, 16, 2), 1),
        words(6, 33, 16, 8).attr("signed", 1).attr("zero", -3),
        words(6, 40, 16, 2).attr("zero", 1),
        packed(words(6, 40, 16, 4), 3).attr("signed", 1),
        packed(words(6, 40, 16, 3), 3),
        packed(words(5, 33, 16, 5), 3).attr("signed", 1),
        words(6, 40, 8, 7).input(F32, &[6, 5], 3.0, 9.0),
        words(6, 40, 16, 4).input(F32, &[16], -1.0, 1.0).attr("codes", 1),
        packed(rows(6, 40, 16, 3), 6).attr("signed", 1),
        rows(6, 40, 16, 4).input(F32, &[16], -1.0, 1.0).attr("codes", 1),
        row(6, 40, 16, 3),
        bytes(row(6, 40, 16, 6), U8, &[6, 3]),
        rows(6, 40, 16, 4).attr("signed", 1).attr("zero", -8),
        packed(rows(6, 33, 16, 8), 6).attr("signed", 1),
        rows(5, 70, 32, 4).input(F32, &[5, 3], 3.0, 9.0),
        bits(&[8], &[3, 5], 4, 0),
        bits(&[4], &[15], 2, 1),
        bytes(table(4, 16), U8, &[12, 2]).attr("gather_axis", 0).attr("quantize_axis", 1),
        table(8, 8),
        nibbles(&[5, 40, 3], &[5, 3, 3]).attr("gather_axis", 2).attr("quantize_axis", 1),
        nibbles(&[40, 6], &[3, 6]).input(I8, &[3, 6], -8.0, 7.0).attr("gather_axis", 0).attr("quantize_axis", 0),
    ]
}

fn rotations() -> Vec<Sample> {
    let row = |x: &[usize], ids: &[usize], pairs: usize| {
        let s = call("com.microsoft.RotaryEmbedding", &[x]).input(I64, ids, 0.0, 4.0);
        s.input(F32, &[9, pairs], -1.0, 1.0).input(F32, &[9, pairs], -1.0, 1.0)
    };
    vec![
        row(&[2, 3, 5, 8], &[2, 5], 4).attr("scale", 0.5).attr("is_packed_batching", 0),
        row(&[2, 5, 24], &[1], 4).attr("interleaved", 1),
        row(&[2, 5, 24], &[2, 5], 2).attr("num_heads", 3).attr("rotary_embedding_dim", 4),
    ]
}

/// Masks of every kind, a past, a bias of the scores.
fn projections() -> Vec<Sample> {
    let row =
        |queries: usize| call("com.microsoft.Attention", &[&[2, queries, 6], &[6, 24], &[24]]).attr("num_heads", 2);
    let past = |s: Sample| s.input(F32, &[2, 2, 2, 5, 4], -1.0, 1.0);
    let seen = |s: Sample, shape: &[usize]| {
        let row = shape[shape.len() - 1];
        let seen = (0..shape.iter().product()).map(|i| f64::from(u8::from(i % row == 0 || i % 3 != 1)));
        s.given(I32, shape, &seen.collect::<Vec<_>>())
    };
    let whole = bytes(bytes(Sample::new("QAttention"), U8, &[2, 3, 6]), I8, &[6, 24]).input(F32, &[24], -1.0, 1.0);
    let whole = whole.given(F32, &[], &[0.015625]).given(F32, &[], &[0.0078125]).attr("num_heads", 2);
    let unshared = |s: Sample| s.attr("do_rotary", 0).attr("past_present_share_buffer", 0);
    vec![
        row(4).attr("unidirectional", 1).attr("scale", 0.25),
        call("com.microsoft.Attention", &[&[2, 4, 6], &[6, 28]])
            .attr("num_heads", 2)
            .ints("qkv_hidden_sizes", &[8, 8, 12]),
        seen(row(4), &[2, 4]).attr("mask_filter_value", -3.0),
        row(4).given(I32, &[2], &[3.0, 4.0]),
        row(4).given(I32, &[4], &[3.0, 4.0, 1.0, 0.0]),
        row(4).given(I32, &[2, 1], &[0.0, 1.0]),
        seen(row(4), &[2, 4, 4]),
        past(seen(row(3), &[2, 1, 9, 9])),
        unshared(past(seen(row(3), &[2, 8])).input(F32, &[2, 2, 3, 8], -1.0, 1.0).attr("unidirectional", 1)),
        unshared(whole.given(I32, &[2], &[8.0, 7.0]).given(U8, &[], &[120.0]).given(I8, &[], &[3.0]))
            .input(F32, &[2, 2, 2, 5, 4], -1.0, 1.0)
            .attr("unidirectional", 1)
            .attr("scale", 0.25)
            .attr("mask_filter_value", -100.0),
    ]
}

fn heads() -> Vec<Sample> {
    let row = |shapes: &[&[usize]]| call("MultiHeadAttention", shapes).attr("num_heads", 2);
    let (q, k): (&[usize], &[usize]) = (&[2, 4, 8], &[2, 6, 8]);
    let past = |s: Sample| s.input(F32, &[2, 2, 5, 4], -1.0, 1.0).input(F32, &[2, 2, 5, 4], -1.0, 1.0);
    vec![
        row(&[q, q, q]).attr("unidirectional", 1).attr("scale", 0.25),
        row(&[&[2, 4, 2, 3, 4]]),
        row(&[q, &[2, 6, 2, 2, 4]]),
        row(&[q, &[2, 2, 6, 4], &[2, 2, 6, 4], &[24]]),
        row(&[q, k, k]).omitted().given(I32, &[2], &[3.0, 6.0]).attr("mask_filter_value", -2.0),
        row(&[q, k, k]).omitted().given(I32, &[8], &[3.0, 6.0, 0.0, 4.0, 8.0, 0.0, 3.0, 9.0]).attr("unidirectional", 1),
        row(&[&[2, 1, 8], k, k]).attr("unidirectional", 1),
        past(row(&[q, q, q]).omitted().omitted().input(F32, &[1, 2, 4, 9], -1.0, 1.0)),
    ]
}

/// Prompts and what follows them, in rows that hold as much as each other and not, with room to spare and without.
fn caches() -> Vec<Sample> {
    let unknown = |batch: usize, new: usize, past: usize, lengths: &[f64]| {
        let s = call("GroupQueryAttention", &[&[batch, new, 32], &[batch, new, 16], &[batch, new, 16]]);
        let cache = |s: Sample| if past > 0 { s.input(F32, &[batch, 2, past, 8], -1.0, 1.0) } else { s.omitted() };
        cache(cache(s)).given(I32, &[lengths.len()], lengths).attr("num_heads", 4).attr("kv_num_heads", 2)
    };
    let row = |batch: usize, new: usize, past: usize, lengths: &[f64], total: i64| {
        unknown(batch, new, past, lengths).ints("total_sequence_length", &[total])
    };
    let angles = |s: Sample| s.input(F32, &[16, 4], -1.0, 1.0).input(F32, &[16, 4], -1.0, 1.0).attr("do_rotary", 1);
    let together = call("GroupQueryAttention", &[&[2, 3, 64]]).omitted().omitted().omitted().omitted();
    let together = together.given(I32, &[2], &[2.0, 2.0]).ints("total_sequence_length", &[3]);
    let update = |cache: &[usize], new: &[usize]| call("TensorScatter", &[cache, new]);
    vec![
        row(2, 5, 0, &[4.0, 4.0], 5).attr("scale", 0.25).attr("softcap", 2.0).attr("smooth_softmax", 0),
        row(1, 2, 6, &[7.0], 8).attr("local_window_size", 3),
        angles(row(2, 1, 6, &[6.0, 3.0], 7)),
        angles(row(2, 2, 9, &[6.0, 4.0], 7))
            .given(I64, &[2, 2], &[5.0, 6.0, 3.0, 4.0])
            .input(F32, &[2, 1, 2, 7], -1.0, 1.0)
            .attr("rotary_interleaved", 1),
        angles(together).attr("num_heads", 4).attr("kv_num_heads", 2),
        angles(unknown(2, 3, 7, &[2.0, 1.0])),
        unknown(1, 3, 2, &[4.0]).attr("local_window_size", 2),
        row(1, 3, 0, &[2.0], 3).attr("smooth_softmax", 1),
        row(2, 1, 9, &[6.0, 4.0], 7)
            .omitted()
            .omitted()
            .omitted()
            .omitted()
            .input(F32, &[4], -2.0, 2.0)
            .attr("local_window_size", 3)
            .attr("softcap", 2.0),
        update(&[2, 6, 4], &[2, 3, 4]).given(I64, &[2], &[1.0, 4.0]).attr("mode", "circular").attr("axis", 1),
        update(&[2, 6, 4], &[2, 3, 4]),
    ]
}
