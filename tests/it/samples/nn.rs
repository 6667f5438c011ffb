use super::{Sample, call};
use plimsoll::internals::dtype::DType::{self, *};
use plimsoll::internals::op::Attr;

pub fn samples() -> Vec<Sample> {
    [
        products(),
        equations(),
        recurrences(),
        convolutions(),
        transposed(),
        pools(),
        normalizations(),
        softmax(),
        resizes(),
        neighbours(),
        grids(),
        quantized(),
        integers(),
        attentions(),
        rotations(),
        between_numbers(),
        skips(),
    ]
    .concat()
}

fn products() -> Vec<Sample> {
    let shapes: [(&[usize], &[usize]); 12] = [
        (&[3], &[3]),
        (&[3], &[3, 2]),
        (&[2, 3], &[3]),
        (&[65, 70], &[70, 33]),
        (&[1, 130], &[130, 257]),
        (&[3, 17, 64], &[64, 96]),
        (&[5, 2, 3], &[5, 3, 4]),
        (&[2, 1, 2, 3], &[5, 3, 4]),
        (&[1, 4, 3], &[2, 1, 3, 2]),
        (&[3], &[5, 3, 4]),
        (&[5, 2, 3], &[3]),
        (&[1, 1], &[1, 1]),
    ];
    let mut samples: Vec<_> = shapes.iter().map(|(a, b)| call("MatMul", &[a, b])).collect();
    let whole = |op: &'static str, a: &[usize], b: &[usize]| {
        Sample::new(op).input(I32, a, -90.0, 90.0).input(I32, b, -90.0, 90.0)
    };
    samples.extend([
        whole("MatMul", &[2, 1, 7, 33], &[3, 33, 5]),
        whole("MatMul", &[3], &[3, 2]),
        whole("Gemm", &[3, 2], &[4, 3]).attr("transA", 1).attr("transB", 1).attr("alpha", -2.0),
        whole("Einsum", &[2, 3, 4], &[4, 5]).attr("equation", "bij,jk->bki"),
    ]);
    samples.extend([
        call("Gemm", &[&[2, 3], &[3, 4]]),
        call("Gemm", &[&[3, 2], &[3, 4], &[2, 1]]).attr("transA", 1),
        call("Gemm", &[&[2, 3], &[4, 3], &[2, 4]]).attr("transB", 1).attr("alpha", 0.5),
        call("Gemm", &[&[3, 2], &[4, 3], &[1, 4]]).attr("transA", 1).attr("transB", 1).attr("beta", -2.0),
        call("Gemm", &[&[2, 3], &[3, 4], &[]]).attr("alpha", 0.25).attr("beta", 3.0),
        call("Gemm", &[&[33, 65], &[40, 65], &[40]]).attr("transB", 1),
    ]);
    samples
}

/// Products with none, one or several letters of a kind, as views and not, of one to three inputs.
fn equations() -> Vec<Sample> {
    let equations: [(&str, &[&[usize]]); 16] = [
        ("bsd,hde->bhse", &[&[2, 5, 6], &[3, 6, 4]]),
        ("bhse,bhte->bhst", &[&[2, 3, 5, 4], &[2, 3, 6, 4]]),
        ("bhst,bhte,hed->bsd", &[&[2, 3, 5, 4], &[2, 3, 4, 6], &[3, 6, 2]]),
        ("nhwpqc->nchpwq", &[&[2, 3, 3, 2, 2, 4]]),
        ("abcd,cdae->be", &[&[2, 3, 4, 5], &[4, 5, 2, 3]]),
        ("i,j->ij", &[&[3], &[4]]),
        ("ij,ij->ij", &[&[3, 4], &[3, 1]]),
        ("ij,ij->i", &[&[3, 4], &[1, 4]]),
        ("ij,kl->l", &[&[2, 3], &[4, 5]]),
        ("...ij,...jk->...ik", &[&[2, 1, 3, 4], &[5, 4, 2]]),
        ("...d,d", &[&[2, 3, 4], &[4]]),
        ("ij->j", &[&[3, 4]]),
        ("ij,jk->", &[&[3, 4], &[4, 2]]),
        (",ij->ji", &[&[], &[3, 4]]),
        ("...ii->...i", &[&[2, 3, 3]]),
        ("iji,jk->k", &[&[3, 2, 3], &[2, 4]]),
    ];
    equations.iter().map(|(equation, shapes)| call("Einsum", shapes).attr("equation", *equation)).collect()
}

/// Every cell both ways, with and without what may be left out.
fn recurrences() -> Vec<Sample> {
    let mut all = Vec::new();
    for (op, gates) in [("RNN", 1), ("GRU", 3), ("LSTM", 4)] {
        let (input, hidden) = (3, 5);
        let rows = gates * hidden;
        let plain = |steps: usize, directions: usize| {
            call(op, &[&[steps, 2, input], &[directions, rows, input], &[directions, rows, hidden]])
        };
        all.push(plain(3, 1).attr("direction", "reverse").attr("hidden_size", hidden as i64));
        all.push(plain(1, 1).input(F32, &[1, 2 * rows], -1.0, 1.0).attr("linear_before_reset", 1));
        let mut both = plain(3, 2).input(F32, &[2, 2 * rows], -1.0, 1.0).attr("direction", "bidirectional");
        let mut ending = both.clone().given(I32, &[2], &[2.0, 3.0]);
        both = both.omitted();
        for _ in 0..if op == "LSTM" { 2 } else { 1 } {
            both = both.input(F32, &[2, 2, hidden], -1.0, 1.0);
            ending = ending.input(F32, &[2, 2, hidden], -1.0, 1.0);
        }
        all.push(both);
        // The batch first, with states that begin at zero and with given ones.
        all.push(plain(3, 2).attr("direction", "bidirectional").attr("layout", 1));
        let states = plain(4, 1).omitted().omitted();
        all.push(states.input(F32, &[4, 1, hidden], -1.0, 1.0).attr("layout", 1));
        all.push(ending.attr("linear_before_reset", 1));
        all.push(plain(3, 1).omitted().given(I32, &[2], &[1.0, 0.0]));
        all.push(plain(2, 1).omitted().omitted().input(F32, &[1, 2, hidden], -1.0, 1.0));
    }
    let named = |names: &[&str]| Attr::Strs(names.iter().map(|&name| name.into()).collect());
    for (op, gates, activations) in [
        ("RNN", 1, named(&["Relu"])),
        ("GRU", 3, named(&["Sigmoid", "Tanh"])),
        ("LSTM", 4, named(&["sigmoid", "tanh", "tanh"])),
    ] {
        let usual = call(op, &[&[3, 2, 4], &[1, gates * 5, 4], &[1, gates * 5, 5]]).attr("activations", activations);
        all.push(usual.attr("layout", 0).attr("input_forget", 0));
    }
    // Parameters go to the functions that have some, in turn; `clip` cuts some arguments.
    for (op, gates, activations) in [
        ("RNN", 1, &["Affine", "ScaledTanh"][..]),
        ("RNN", 1, &["Softsign", "LeakyRelu"]),
        ("GRU", 3, &["HardSigmoid", "Softplus", "Sigmoid", "Elu"]),
        ("LSTM", 4, &["Sigmoid", "ThresholdedRelu", "Tanh", "HardSigmoid", "Softsign", "Affine"]),
    ] {
        let own =
            call(op, &[&[3, 2, 4], &[2, gates * 5, 4], &[2, gates * 5, 5]]).attr("activations", named(activations));
        let own = own.attr("direction", "bidirectional").attr("input_forget", 1);
        let own = own.attr("activation_alpha", vec![0.3, 0.6]).attr("activation_beta", vec![0.4]);
        all.extend([own.clone(), own.attr("clip", 0.7)]);
    }
    all.push(call("LSTM", &[&[0, 2, 4], &[1, 20, 4], &[1, 20, 5]]));
    let peepholes =
        |sample: Sample| [(); 4].iter().fold(sample, |sample, ()| sample.omitted()).input(F32, &[2, 15], -1.0, 1.0);
    all.push(peepholes(call("LSTM", &[&[3, 2, 4], &[2, 20, 4], &[2, 20, 5]]).attr("direction", "bidirectional")));
    all
}

/// Points inside, at the edges and beyond them.
fn grids() -> Vec<Sample> {
    let grid = |image: &[usize], grid: &[usize]| {
        Sample::new("GridSample").input(F32, image, -1.0, 1.0).input(F32, grid, -1.3, 1.3)
    };
    vec![
        grid(&[2, 3, 5, 4], &[2, 3, 6, 2]).attr("align_corners", 1).attr("mode", "bilinear"),
        grid(&[1, 2, 4, 6], &[1, 5, 5, 2]).attr("padding_mode", "border"),
        grid(&[2, 1, 3, 3], &[2, 4, 4, 2]).attr("mode", "nearest"),
        grid(&[1, 2, 1, 1], &[1, 2, 2, 2]).attr("mode", "nearest").attr("padding_mode", "border"),
        grid(&[1, 2, 3, 4], &[1, 0, 2, 2]),
        grid(&[2, 2, 5], &[2, 7, 1]).attr("padding_mode", "reflection"),
        grid(&[1, 2, 3, 1], &[1, 4, 5, 2]).attr("padding_mode", "reflection").attr("align_corners", 1),
        grid(&[1, 2, 4, 5], &[1, 4, 3, 2]).attr("mode", "cubic"),
        grid(&[1, 2, 4, 5], &[1, 4, 3, 2])
            .attr("mode", "bicubic")
            .attr("padding_mode", "border")
            .attr("align_corners", 1),
        grid(&[1, 2, 4, 5], &[1, 4, 3, 2]).attr("mode", "cubic").attr("padding_mode", "reflection"),
        grid(&[2, 2, 3, 4, 5], &[2, 3, 2, 4, 3]),
        grid(&[2, 2, 3, 4, 5], &[2, 3, 2, 4, 3]).attr("mode", "nearest").attr("padding_mode", "border"),
    ]
}

/// To and from both types, with one parameter and with many, and without a zero point.
fn quantized() -> Vec<Sample> {
    let floats = || Sample::new("QuantizeLinear").input(F32, &[2, 3, 4], -9.0, 9.0);
    let scales: Vec<f64> = (0..16).map(|i| f64::from(1 + i % 5) / 8.0).collect();
    let zeros: Vec<f64> = (0..12).map(|i| f64::from(i % 7)).collect();
    let whole = |dtype: DType| Sample::new("DequantizeLinear").input(dtype, &[2, 3, 4], 0.0, 99.0);
    vec![
        floats().given(F32, &[], &[0.3]).attr("block_size", 0).attr("precision", 1).attr("saturate", 1),
        floats().given(F32, &[], &[0.011]).given(U8, &[], &[128.0]),
        floats().given(F32, &[1], &[0.05]).given(I8, &[1], &[-3.0]).attr("axis", 0),
        floats().given(F32, &[4], &[0.05, 0.5, 2.0, 0.1]).attr("axis", -1).attr("output_dtype", I8.onnx()),
        whole(I8).given(F32, &[2], &[0.25, 3.0]).given(I8, &[2], &[7.0, -1.0]).attr("axis", 0),
        whole(I32).given(F32, &[1], &[0.5]).attr("block_size", 0).attr("output_dtype", F32.onnx()),
        whole(I32).given(F32, &[1], &[0.5]).given(I32, &[], &[4.0]),
        Sample::new("DequantizeLinear")
            .given(I32, &[3], &[16777217.0, 16777219.0, -16777215.0])
            .given(F32, &[], &[1.0])
            .given(I32, &[], &[16777216.0]),
        whole(U8).given(F32, &[3], &[0.25, 1.0, 2.0]).given(U8, &[3], &[128.0, 0.0, 1.0]),
        floats().given(F32, &[2, 2, 4], &scales).attr("block_size", 2).attr("axis", 1),
        whole(I8)
            .given(F32, &[2, 3, 2], &scales[..12])
            .given(I8, &[2, 3, 2], &zeros)
            .attr("block_size", 3)
            .attr("axis", -1),
    ]
}

/// Of both types, with parameters for all and for each row, column and filter; sums too long for one product. Scales are powers of two, so
/// that ties are ties in every type.
fn integers() -> Vec<Sample> {
    let small = |s: Sample, dtype: DType, shape: &[usize]| match dtype {
        I8 => s.input(I8, shape, -128.0, 127.0),
        _ => s.input(U8, shape, 0.0, 255.0),
    };
    let pair = |op, a: (DType, &[usize]), b: (DType, &[usize])| small(small(Sample::new(op), a.0, a.1), b.0, b.1);
    let mut all = vec![
        pair("MatMulInteger", (U8, &[3, 300]), (I8, &[300, 2])).given(U8, &[], &[131.0]),
        pair("MatMulInteger", (U8, &[2, 3, 530]), (I8, &[530, 4])).given(U8, &[1], &[7.0]).given(
            I8,
            &[4],
            &[0.0, 1.0, -2.0, 3.0],
        ),
        pair("MatMulInteger", (I8, &[3, 5]), (I8, &[2, 5, 4])).given(I8, &[3], &[0.0, 9.0, -9.0]),
        pair("MatMulInteger", (U8, &[600]), (U8, &[600, 2])),
        pair("ConvInteger", (U8, &[1, 3, 6, 5]), (I8, &[4, 3, 3, 3])).given(U8, &[], &[128.0]).ints("pads", &[1; 4]),
        pair("ConvInteger", (U8, &[2, 64, 5, 4]), (U8, &[3, 64, 3, 3])).given(U8, &[], &[100.0]).given(
            U8,
            &[3],
            &[1.0, 128.0, 2.0],
        ),
        pair("ConvInteger", (I8, &[1, 80, 9]), (I8, &[6, 40, 8])).attr("group", 2).ints("strides", &[2]),
        pair("ConvInteger", (U8, &[1, 2, 7, 6]), (I8, &[3, 2, 2, 2]))
            .attr("auto_pad", "SAME_UPPER")
            .ints("dilations", &[1, 2])
            .ints("kernel_shape", &[2, 2]),
        Sample::new("DynamicQuantizeLinear").input(F32, &[9], 1.0, 3.0),
        Sample::new("DynamicQuantizeLinear").given(F32, &[2, 2], &[0.0; 4]),
        Sample::new("DynamicQuantizeLinear").given(F32, &[0], &[]),
    ];
    let matrices = |x: DType, w: DType, y: DType| {
        let s = small(Sample::new("QLinearMatMul"), x, &[2, 3, 40]).given(F32, &[], &[0.0625]).given(x, &[], &[3.0]);
        let s = small(s, w, &[40, 5]).given(F32, &[5], &[0.5, 0.25, 1.0, 0.125, 0.5]);
        s.given(w, &[5], &[0.0, 1.0, 2.0, 0.0, 3.0]).given(F32, &[1], &[16.0]).given(y, &[], &[10.0])
    };
    all.extend([matrices(U8, I8, U8), matrices(I8, I8, I8), matrices(U8, U8, I8)]);
    let filters = |x: DType, w: DType, groups: usize| {
        let s = small(Sample::new("QLinearConv"), x, &[2, 4, 6, 5]).given(F32, &[], &[0.25]).given(x, &[], &[100.0]);
        let s = small(s, w, &[4, 4 / groups, 3, 3]).attr("group", groups as i64);
        let s = s.given(F32, &[4], &[0.5, 0.25, 1.0, 0.125]).given(w, &[1], &[2.0]);
        s.given(F32, &[], &[64.0]).given(x, &[], &[7.0])
    };
    all.push(filters(U8, I8, 1).ints("pads", &[1, 1, 1, 1]).ints("kernel_shape", &[3, 3]));
    all.push(filters(U8, I8, 2).attr("auto_pad", "SAME_LOWER").ints("dilations", &[2, 1]));
    all.push(filters(U8, U8, 1).given(I32, &[4], &[0.0, -3000.0, 20000.0, 1.0]).ints("strides", &[2, 1]));
    all.push(filters(I8, I8, 4).given(I32, &[4], &[5.0, 0.0, 20000.0, -1.0]));
    all
}

/// Both types, with zero points and without. Scales are powers of two.
fn between_numbers() -> Vec<Sample> {
    let data = |s: Sample, dtype: DType, shape: &[usize], scale: f64, zero: f64| {
        s.input(dtype, shape, 0.0, 120.0).given(F32, &[], &[scale]).given(dtype, &[], &[zero])
    };
    let one = |op, dtype: DType, shape: &[usize]| data(Sample::new(op), dtype, shape, 0.0625, 60.0);
    let result = |s: Sample, dtype: DType, scale: f64| s.given(F32, &[1], &[scale]).given(dtype, &[1], &[3.0]);
    let mut all = Vec::new();
    for op in ["QLinearAdd", "QLinearMul"] {
        all.push(data(one(op, I8, &[4]), I8, &[4], 0.125, -7.0).given(F32, &[], &[0.25]));
    }
    all.push(result(one("QLinearLeakyRelu", I8, &[3, 7]).attr("alpha", 0.25), I8, 0.0625));
    all.push(Sample::new("QLinearLeakyRelu").input(U8, &[9], 0.0, 255.0).given(F32, &[], &[0.5]).omitted().given(
        F32,
        &[],
        &[1.0],
    ));
    let pool = result(one("QLinearAveragePool", U8, &[1, 2, 6, 5]), U8, 0.0625).ints("kernel_shape", &[2, 2]);
    all.push(pool.clone().ints("pads", &[1, 0, 1, 0]).attr("ceil_mode", 1).attr("count_include_pad", 1));
    all.push(pool.ints("strides", &[2, 1]).attr("auto_pad", "VALID").attr("channels_last", 0));
    all.push(result(one("QLinearGlobalAveragePool", U8, &[2, 3, 4, 4]), U8, 0.0625).attr("channels_last", 0));
    all.push(result(one("QLinearGlobalAveragePool", U8, &[2, 4, 4, 3]), U8, 0.0625).attr("channels_last", 1));
    let pool = result(one("QLinearAveragePool", U8, &[1, 6, 5, 2]), U8, 0.0625).ints("kernel_shape", &[2, 3]);
    all.push(pool.attr("channels_last", 1));
    let conv = |shape: &[usize]| {
        let data = Sample::new("com.microsoft.QLinearConv").input(U8, shape, 0.0, 255.0).quantized(0.25, 100.0);
        let filters = data.input(U8, &[4, 2, 3, 3], 0.0, 255.0).quantized(0.5, 2.0);
        filters.quantized(64.0, 7.0).input(I32, &[4], -900.0, 900.0).attr("group", 2)
    };
    all.push(conv(&[1, 4, 6, 7]).ints("pads", &[1, 0, 1, 2]).ints("strides", &[2, 1]).ints("dilations", &[1, 2]));
    all.push(conv(&[1, 6, 5, 4]).attr("auto_pad", "SAME_UPPER").ints("kernel_shape", &[3, 3]).attr("channels_last", 1));
    all
}

fn skips() -> Vec<Sample> {
    let (x, one): (&[usize], &[usize]) = (&[2, 3, 8], &[8]);
    vec![
        call("SkipLayerNormalization", &[x, &[1, 3, 8], one, one, one]).attr("epsilon", 0.1),
        call("SkipLayerNormalization", &[x, x, one]).omitted().input(F32, one, -1.0, 1.0),
        call("SkipSimplifiedLayerNormalization", &[x, &[3, 8], one, one]).attr("epsilon", 0.1),
    ]
}

/// With and without heads of their own, shared keys, a past, masks of both types, and everything that may be shown.
fn attentions() -> Vec<Sample> {
    let apart = |heads: [usize; 2], queries: usize, keys: usize| {
        call("Attention", &[&[2, heads[0], queries, 8], &[2, heads[1], keys, 8], &[2, heads[1], keys, 6]])
    };
    let within =
        call("Attention", &[&[2, 5, 32], &[2, 7, 16], &[2, 7, 12]]).attr("q_num_heads", 4).attr("kv_num_heads", 2);
    let past =
        |s: Sample, heads: usize| s.input(F32, &[2, heads, 3, 8], -1.0, 1.0).input(F32, &[2, heads, 3, 6], -1.0, 1.0);
    let seen = |s: Sample, shape: &[usize]| {
        // Every query sees the first key.
        let len: usize = shape.iter().product();
        let row = shape[shape.len() - 1];
        s.given(Bool, shape, &(0..len).map(|i| f64::from(u8::from(i % row == 0 || i % 3 != 1))).collect::<Vec<_>>())
    };
    vec![
        apart([3, 3], 7, 7).attr("is_causal", 1),
        // A mask of fewer keys than there are.
        call("Attention", &[&[2, 3, 4, 8], &[2, 3, 6, 8], &[2, 3, 6, 10], &[2, 3, 4, 4]]).omitted().omitted().given(
            I64,
            &[2],
            &[3.0, 6.0],
        ),
        apart([4, 2], 5, 5).attr("is_causal", 1).attr("scale", 0.5),
        apart([4, 1], 5, 7).attr("softcap", 0.5),
        within.clone(),
        within.clone().input(F32, &[5, 7], -1.0, 1.0).attr("softmax_precision", 1),
        seen(within, &[2, 1, 5, 7]).attr("qk_matmul_output_mode", 3),
        seen(apart([4, 2], 5, 7), &[2, 4, 5, 7]),
        // Masks of another type are added, too.
        apart([3, 3], 4, 6).input(I32, &[4, 6], -3.0, 3.0),
        apart([4, 2], 4, 6).input(I8, &[2, 1, 4, 6], -3.0, 3.0),
        past(apart([3, 3], 2, 2).omitted(), 3).attr("is_causal", 1),
        past(seen(apart([6, 2], 2, 2), &[1, 5]), 2).attr("is_causal", 1).attr("qk_matmul_output_mode", 1),
        apart([4, 2], 5, 7).omitted().omitted().omitted().given(I64, &[2], &[5.0, 7.0]).attr("is_causal", 1),
        seen(apart([3, 3], 5, 7), &[5, 7]).omitted().omitted().given(I64, &[2], &[1.0, 6.0]),
        past(apart([4, 2], 1, 1).input(F32, &[2, 1, 1, 4], -1.0, 1.0), 2)
            .attr("qk_matmul_output_mode", 2)
            .attr("softcap", 2.0),
    ]
}

fn rotations() -> Vec<Sample> {
    let row = |x: &[usize], caches: &[usize]| call("RotaryEmbedding", &[x, caches, caches]);
    vec![
        row(&[2, 3, 5, 8], &[9, 4]).input(I64, &[2, 5], 0.0, 8.0).attr("interleaved", 1),
        row(&[2, 5, 24], &[9, 4]).input(I64, &[2, 5], 0.0, 8.0).attr("num_heads", 3),
        row(&[2, 5, 24], &[2, 5, 2]).attr("num_heads", 3).attr("rotary_embedding_dim", 4),
        row(&[1, 2, 5, 6], &[1, 5, 2]).attr("rotary_embedding_dim", 4).attr("interleaved", 1),
    ]
}

/// Windows of odd and even sizes, longer than the channels, of one; behind them none to three axes.
fn neighbours() -> Vec<Sample> {
    let lrn = |shape: &[usize], size: i64| call("LRN", &[shape]).attr("size", size);
    vec![
        lrn(&[1, 5, 4], 2).attr("alpha", 0.5).attr("beta", 0.3).attr("bias", 2.0),
        lrn(&[2, 3], 9).attr("alpha", 1.0),
        lrn(&[1, 4, 2, 1, 3], 1).attr("beta", 0.5),
    ]
}

fn convolutions() -> Vec<Sample> {
    let conv = |shapes: &[&[usize]]| call("Conv", shapes);
    vec![
        // One spatial axis.
        conv(&[&[2, 3, 9], &[4, 3, 3]]),
        conv(&[&[1, 4, 11], &[6, 2, 3], &[6]]).attr("group", 2).ints("strides", &[2]).ints("pads", &[2, 1]),
        // Two: plain, 1x1, strided, asymmetric pads, dilated, grouped, depthwise, depthwise with a multiplier.
        conv(&[&[1, 1, 5, 5], &[1, 1, 3, 3]]),
        conv(&[&[2, 8, 5, 7], &[16, 8, 1, 1], &[16]]),
        conv(&[&[1, 8, 6, 6], &[5, 8, 1, 1]]).ints("strides", &[2, 2]),
        conv(&[&[1, 2, 9, 8], &[3, 2, 3, 2]]).ints("dilations", &[2, 3]).ints("pads", &[2, 1, 2, 2]),
        conv(&[&[1, 6, 5, 5], &[4, 3, 3, 3], &[4]]).attr("group", 2).ints("pads", &[1, 1, 1, 1]),
        conv(&[&[2, 5, 7, 6], &[5, 1, 3, 3], &[5]]).attr("group", 5).ints("pads", &[1, 1, 1, 1]),
        conv(&[&[1, 3, 8, 8], &[6, 1, 5, 5]]).attr("group", 3).ints("pads", &[2, 2, 2, 2]).ints("strides", &[2, 2]),
        conv(&[&[1, 16, 13, 11], &[32, 16, 3, 3], &[32]]).ints("pads", &[1, 1, 1, 1]),
        conv(&[&[1, 3, 20, 20], &[8, 3, 7, 7], &[8]]).ints("pads", &[3, 3, 3, 3]).ints("strides", &[2, 2]),
        conv(&[&[1, 2, 6, 6], &[3, 2, 4, 4]]).attr("auto_pad", "SAME_UPPER").ints("kernel_shape", &[4, 4]),
        conv(&[&[1, 2, 7, 6], &[3, 2, 2, 3]]).attr("auto_pad", "SAME_LOWER").ints("strides", &[2, 2]),
        conv(&[&[1, 2, 7, 6], &[3, 2, 2, 3]]).attr("auto_pad", "SAME_UPPER").ints("dilations", &[2, 2]),
        conv(&[&[1, 2, 7, 6], &[3, 2, 2, 3], &[3]]).attr("auto_pad", "VALID"),
        conv(&[&[1, 1, 4, 4], &[2, 1, 2, 2]]).attr("auto_pad", "NOTSET").ints("pads", &[5, 0, 0, 5]),
        // Three.
        conv(&[&[1, 2, 4, 5, 6], &[3, 2, 2, 3, 2], &[3]]).ints("pads", &[1, 0, 1, 0, 1, 1]),
        conv(&[&[2, 4, 5, 4, 5], &[4, 2, 3, 2, 3]])
            .attr("group", 2)
            .ints("strides", &[2, 1, 2])
            .ints("dilations", &[1, 2, 1])
            .ints("pads", &[1, 1, 1, 1, 1, 1]),
    ]
}

fn transposed() -> Vec<Sample> {
    let conv = |shapes: &[&[usize]]| call("ConvTranspose", shapes);
    vec![
        conv(&[&[2, 3, 5], &[3, 4, 3], &[4]]).ints("strides", &[2]),
        conv(&[&[1, 2, 5], &[2, 3, 3]]).ints("strides", &[3]).ints("dilations", &[2]).ints("pads", &[1, 2]),
        conv(&[&[1, 3, 4, 5], &[3, 2, 2, 2]]).ints("strides", &[2, 2]),
        conv(&[&[2, 4, 3, 4], &[4, 3, 3, 3], &[6]]).attr("group", 2).ints("pads", &[1, 1, 1, 1]),
        conv(&[&[1, 3, 4, 4], &[3, 1, 3, 3]]).attr("group", 3).ints("kernel_shape", &[3, 3]),
        conv(&[&[1, 1, 3, 3], &[1, 2, 3, 2]]).ints("strides", &[2, 2]).ints("output_shape", &[6, 5]),
        conv(&[&[1, 1, 3, 3], &[1, 2, 3, 2]])
            .ints("strides", &[2, 2])
            .ints("output_shape", &[8, 5])
            .attr("auto_pad", "SAME_UPPER"),
        conv(&[&[1, 1, 3, 4], &[1, 1, 3, 4]]).ints("strides", &[2, 2]).attr("auto_pad", "SAME_UPPER"),
        conv(&[&[1, 1, 3, 4], &[1, 1, 3, 4]]).ints("strides", &[2, 2]).attr("auto_pad", "SAME_LOWER"),
        conv(&[&[1, 1, 3, 4], &[1, 1, 2, 1]]).ints("strides", &[3, 2]).attr("auto_pad", "SAME_LOWER"),
        conv(&[&[1, 1, 3, 4], &[1, 1, 3, 4]]).attr("auto_pad", "VALID"),
        conv(&[&[1, 2, 3, 2, 3], &[2, 2, 2, 3, 2], &[2]]).ints("strides", &[2, 1, 2]).ints("pads", &[0, 1, 1, 1, 1, 0]),
        // Enough channels for a product of matrices.
        conv(&[&[2, 8, 3, 4], &[8, 6, 2, 2], &[6]]).ints("strides", &[2, 2]),
        conv(&[&[1, 8, 3, 3], &[8, 4, 4, 4], &[4]]).ints("strides", &[2, 2]).ints("pads", &[1, 1, 1, 1]),
        conv(&[&[2, 8, 3, 2], &[8, 5, 3, 3]])
            .ints("strides", &[2, 2])
            .ints("pads", &[1, 1, 1, 1])
            .ints("output_padding", &[1, 1]),
        conv(&[&[2, 16, 4], &[16, 4, 5], &[8]]).attr("group", 2).ints("strides", &[3]).ints("pads", &[4, 1]),
    ]
}

fn pools() -> Vec<Sample> {
    let mut samples = Vec::new();
    for op in ["MaxPool", "AveragePool"] {
        let pool = |shape: &[usize], kernel: &[i64]| call(op, &[shape]).ints("kernel_shape", kernel);
        samples.extend([
            pool(&[2, 3, 9], &[3]),
            pool(&[1, 2, 7], &[2]).ints("strides", &[3]).ints("pads", &[1, 1]).attr("ceil_mode", 1),
            pool(&[2, 2, 6, 6], &[3, 3]).ints("strides", &[2, 2]).attr("ceil_mode", 1),
            pool(&[1, 2, 6, 6], &[3, 3]).ints("strides", &[2, 2]).ints("pads", &[1, 1, 1, 1]).attr("ceil_mode", 1),
            pool(&[1, 2, 9, 8], &[3, 2]).ints("dilations", &[2, 3]),
            pool(&[1, 2, 5, 6], &[2, 3]).attr("auto_pad", "SAME_UPPER"),
            pool(&[1, 2, 5, 6], &[2, 4]).attr("auto_pad", "SAME_LOWER").ints("strides", &[2, 1]),
            pool(&[1, 2, 5, 6], &[2, 4]).attr("auto_pad", "VALID").ints("strides", &[2, 1]),
            pool(&[1, 2, 4, 5, 6], &[2, 3, 2]).ints("strides", &[2, 1, 3]).ints("pads", &[0, 1, 1, 1, 0, 1]),
        ]);
    }
    let padded = |shape: &[usize]| call("AveragePool", &[shape]).attr("count_include_pad", 1);
    samples.extend([
        call("MaxPool", &[&[2, 3, 4, 5]]).ints("kernel_shape", &[2, 2]).attr("storage_order", 1),
        call("MaxPool", &[&[1, 2, 3, 4, 5]]).ints("kernel_shape", &[2, 2, 3]).attr("storage_order", 1),
        // Where a maximum stands twice, the first place counts; padding is no place.
        Sample::new("MaxPool")
            .given(F32, &[1, 1, 3, 3], &[2.0, 2.0, -1.0, 2.0, 2.0, -1.0, -1.0, -1.0, 0.0])
            .ints("kernel_shape", &[2, 2])
            .ints("pads", &[1, 1, 1, 1]),
        Sample::new("MaxPool").input(U8, &[1, 2, 5, 6], 0.0, 255.0).ints("kernel_shape", &[3, 2]),
        padded(&[1, 2, 6, 6]).ints("kernel_shape", &[3, 3]).ints("pads", &[1, 1, 1, 1]),
        padded(&[1, 1, 6, 6])
            .ints("kernel_shape", &[3, 3])
            .ints("pads", &[1, 1, 1, 1])
            .ints("strides", &[2, 2])
            .attr("ceil_mode", 1),
        padded(&[1, 1, 7]).ints("kernel_shape", &[3]).ints("dilations", &[2]).ints("pads", &[2, 3]),
        padded(&[1, 2, 7, 5]).ints("kernel_shape", &[4, 2]).ints("strides", &[2, 2]).attr("auto_pad", "SAME_UPPER"),
        call("GlobalMaxPool", &[&[2, 3, 7]]),
        call("GlobalAveragePool", &[&[2, 3, 7]]),
        call("GlobalAveragePool", &[&[1, 2, 3, 4, 2]]),
    ]);
    samples
}

fn normalizations() -> Vec<Sample> {
    let mut samples = Vec::new();
    for shape in [&[2, 3, 4, 5][..], &[4, 3], &[2, 3, 4]] {
        let parameters = |shape| call("BatchNormalization", &[shape, &[3], &[3], &[3]]).input(F32, &[3], 0.5, 2.0);
        samples.push(parameters(shape));
        samples.push(parameters(shape).attr("epsilon", 0.01).attr("momentum", 0.75).attr("training_mode", 1));
        samples.push(parameters(shape).attr("epsilon", 0.1).attr("momentum", 0.5).attr("training_mode", 0));
    }
    samples.push(call("BatchNormalization", &[&[5], &[1], &[1], &[1]]).input(F32, &[1], 0.5, 2.0));
    let per_value = call("BatchNormalization", &[&[2, 3, 4], &[3, 4], &[3, 4], &[3, 4]]);
    samples.push(per_value.input(F32, &[3, 4], 0.5, 2.0).attr("spatial", 0));
    samples.extend([
        call("InstanceNormalization", &[&[2, 3, 7], &[3], &[3]]).attr("epsilon", 0.1),
        call("GroupNormalization", &[&[2, 6, 5], &[6], &[6]])
            .attr("num_groups", 3)
            .attr("epsilon", 0.1)
            .attr("stash_type", 1),
        call("GroupNormalization", &[&[2, 6, 5], &[3], &[3]]).attr("num_groups", 3),
        call("GroupNormalization", &[&[2, 4, 5], &[4], &[4]]).attr("num_groups", 4),
        call("GroupNormalization", &[&[2, 4, 5], &[4], &[4]]).attr("num_groups", 1),
        call("LayerNormalization", &[&[3, 130], &[130]]).attr("epsilon", 0.1).attr("stash_type", 1),
        call("LayerNormalization", &[&[2, 3, 4], &[3, 4], &[4]]).attr("axis", 1),
        call("LayerNormalization", &[&[2, 3, 4], &[3, 1], &[2, 3, 4]]).attr("axis", -2),
        call("LayerNormalization", &[&[2, 3, 4], &[2, 3, 4], &[]]).attr("axis", 0),
        // Short rows, side by side.
        call("RMSNormalization", &[&[2, 3, 4, 5], &[5]]),
        call("RMSNormalization", &[&[2, 3, 4], &[3, 4]]).attr("axis", 1).attr("epsilon", 0.1).attr("stash_type", 1),
        call("SimplifiedLayerNormalization", &[&[2, 3, 4], &[3, 4]]).attr("axis", 1).attr("stash_type", 1),
        call("MeanVarianceNormalization", &[&[2, 3, 7]]).ints("axes", &[-1, 0]),
        call("LpNormalization", &[&[2, 3, 5]]).attr("axis", 1).attr("p", 1),
        Sample::new("LpNormalization").given(F32, &[2, 2], &[0.0, 0.0, 3.0, -4.0]),
        call("Hardmax", &[&[2, 3, 5]]),
        call("Hardmax", &[&[2, 3, 5]]).attr("axis", 1).attr("flatten", 1),
    ]);
    samples
}

fn softmax() -> Vec<Sample> {
    let mut samples = Vec::new();
    for op in ["Softmax", "LogSoftmax"] {
        let wide = |shape: &[usize]| Sample::new(op).input(F32, shape, -20.0, 20.0);
        samples.extend([
            wide(&[7]),
            wide(&[3, 130]),
            wide(&[2, 3, 4]).attr("axis", -3),
            wide(&[2, 3, 4]).attr("axis", 1).attr("flatten", 1),
            wide(&[2, 3, 4]).attr("axis", 0).attr("flatten", 1),
            wide(&[2, 3]).attr("axis", 2).attr("flatten", 1),
        ]);
    }
    samples
}

fn resizes() -> Vec<Sample> {
    const COORDINATE: &str = "coordinate_transformation_mode";
    let resize = |shape: &[usize]| call("Resize", &[shape]);
    let mut samples = Vec::new();
    let coordinates = ["half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "align_corners", "asymmetric"];
    for coordinate in coordinates {
        let with = |mode: &str| resize(&[1, 2, 6, 7]).attr(COORDINATE, coordinate).attr("mode", mode);
        for nearest in ["round_prefer_floor", "round_prefer_ceil", "floor", "ceil"] {
            let with = |scales: [f64; 2]| {
                with("nearest").attr("nearest_mode", nearest).attr("scales", vec![1.0, 1.0, scales[0], scales[1]])
            };
            samples.extend([with([2.0, 3.0]), with([0.5, 1.0]), with([1.3, 2.6])]);
        }
        for mode in ["linear", "cubic"] {
            samples.push(with(mode).attr("scales", vec![1.0, 1.0, 2.0, 1.7]));
            samples.push(with(mode).ints("sizes", &[1, 2, 4, 1]));
            samples.push(with(mode).ints("sizes", &[1, 2, 9, 13]));
        }
    }
    for policy in ["stretch", "not_larger", "not_smaller"] {
        let with = resize(&[1, 2, 6, 9]).attr("keep_aspect_ratio_policy", policy).ints("axes", &[-1, 2]);
        samples.push(with.clone().ints("sizes", &[14, 9]).attr("mode", "linear"));
        samples.push(with.ints("sizes", &[5, 4]).attr("mode", "nearest"));
    }
    // Wider kernels where there are fewer elements, and only there; the innermost axis, one before it, and one that stays.
    for mode in ["linear", "cubic", "nearest"] {
        let with = |shape: &[usize]| resize(shape).attr("mode", mode).attr("antialias", 1);
        samples.push(with(&[1, 2, 9, 8]).attr("scales", vec![1.0, 1.0, 0.4, 1.5]));
        samples.push(with(&[2, 7, 11]).ints("sizes", &[2, 3, 2]).attr("exclude_outside", 1));
        samples.push(with(&[3, 9, 4]).ints("sizes", &[5]).ints("axes", &[1]).attr("cubic_coeff_a", -0.5));
    }
    // Of integers between elements, halves and quarters are exact.
    for dtype in [U8, I8, I32] {
        let whole =
            || Sample::new("Resize").input(dtype, &[1, 2, 4, 8], 0.0, 120.0).attr("scales", vec![1.0, 1.0, 2.0, 0.5]);
        samples.extend(["nearest", "linear"].map(|mode| whole().attr("mode", mode)));
    }
    // Inside the data, beyond it at either end, backwards, and a single element in the middle.
    for (roi, sizes) in [
        ([0.25, 0.1, 0.75, 0.9], [5, 4]),
        ([-0.5, 0.6, 0.5, 1.7], [4, 3]),
        ([1.0, 0.8, 0.0, -0.2], [3, 5]),
        ([0.2, 0.3, 0.7, 0.8], [1, 1]),
    ] {
        let with = resize(&[1, 2, 6, 7]).attr(COORDINATE, "tf_crop_and_resize").attr("roi", roi.to_vec());
        let with = with.ints("axes", &[2, 3]).ints("sizes", &sizes).attr("extrapolation_value", 10.0);
        samples.extend(["nearest", "linear", "cubic"].map(|mode| with.clone().attr("mode", mode)));
    }
    samples.extend([
        resize(&[1, 1, 5, 6])
            .attr("mode", "cubic")
            .attr("cubic_coeff_a", -0.5)
            .attr("exclude_outside", 1)
            .attr("scales", vec![1.0, 1.0, 0.6, 1.5]),
        resize(&[9]).attr("scales", vec![2.4]),
        resize(&[1, 2, 3, 4, 5]).attr("scales", vec![1.0, 1.0, 2.0, 1.5, 0.5]).attr("mode", "linear"),
        resize(&[2, 3, 4]).attr("scales", vec![2.0]).ints("axes", &[0]).attr("extrapolation_value", 1.0),
        resize(&[1, 1, 4, 5])
            .attr("scales", vec![1.0, 1.0, 0.6, 0.7])
            .attr(COORDINATE, "align_corners")
            .attr("mode", "cubic"),
        call("Upsample", &[&[1, 2, 3, 4]]).attr("scales", vec![1.0, 1.0, 1.5, 2.0]).attr("mode", "linear"),
    ]);
    samples
}
