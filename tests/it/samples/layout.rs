use super::Sample;
use plimsoll::internals::dtype::DType::{self, *};
use plimsoll::internals::tensor::Tensor;

pub fn samples() -> Vec<Sample> {
    [views(), several(), reductions(), known(), gathers(), selections(), scatters(), scatters_along(), tops(), pads()]
        .concat()
}

fn data(op: &'static str, shape: &[usize]) -> Sample {
    Sample::new(op).input(F32, shape, -3.0, 3.0)
}

fn selections() -> Vec<Sample> {
    let reversed =
        |lengths: &[f64], shape: &[usize]| data("ReverseSequence", shape).given(I64, &[lengths.len()], lengths);
    vec![
        data("Compress", &[3, 4]).ints("condition", &[0, 1, 1, 0, 1]),
        data("Compress", &[3, 4]).ints("condition", &[0, 0]).attr("axis", -1),
        Sample::new("NonZero").ints("X", &[0, 1, 7, 0]),
        reversed(&[1.0, 4.0], &[2, 5]).attr("batch_axis", 0).attr("time_axis", 1),
    ]
}

fn views() -> Vec<Sample> {
    let mut all = Vec::new();
    for dtype in [F32, I64, I32, Bool] {
        all.push(Sample::new("Identity").input(dtype, &[2, 3], -3.0, 3.0));
        all.push(Sample::new("Transpose").input(dtype, &[3, 5], -3.0, 3.0));
    }
    for (shape, axis) in [(&[2, 3, 4][..], 0), (&[2, 3, 4], 3), (&[2, 3, 4], -1), (&[], 0)] {
        all.push(data("Flatten", shape).attr("axis", axis));
    }
    all.push(data("Flatten", &[2, 3, 4]));
    for (from, to) in [(&[2, 3, 4][..], &[0, -1][..]), (&[2, 3, 4], &[-1]), (&[2, 3, 4], &[1, 6, 0]), (&[1], &[])] {
        all.push(data("Reshape", from).ints("shape", to));
    }
    all.push(data("Reshape", &[0, 3]).ints("shape", &[3, 0]).attr("allowzero", 1));
    all.push(data("Squeeze", &[1, 3, 1, 2]));
    all.push(data("Unsqueeze", &[]).ints("axes", &[0]));
    for (from, to) in [(&[3, 4][..], &[1][..]), (&[], &[2, 2]), (&[3, 1], &[1, 5]), (&[1], &[0])] {
        all.push(data("Expand", from).ints("shape", to));
    }
    for perm in [[3, 2, 1, 0], [0, 2, 3, 1], [1, 0, 2, 3]] {
        all.push(data("Transpose", &[2, 3, 4, 5]).ints("perm", &perm));
    }
    all.push(data("Transpose", &[]));
    for (starts, ends, axes, steps) in [
        (&[-2][..], &[i64::MAX][..], &[-1][..], &[1][..]),
        (&[i64::MAX], &[i64::MIN], &[2], &[-1]),
        (&[-1, 4], &[-9, 0], &[0, 2], &[-2, -3]),
        (&[2], &[2], &[1], &[1]),
        (&[0], &[i64::MAX], &[2], &[i64::MAX]),
    ] {
        all.push(
            data("Slice", &[4, 3, 5]).ints("starts", starts).ints("ends", ends).ints("axes", axes).ints("steps", steps),
        );
    }
    all.push(data("Slice", &[4, 3]).ints("starts", &[1, 0]).ints("ends", &[-1, 2]));
    all
}

fn several() -> Vec<Sample> {
    let mut all = Vec::new();
    for axis in [0, 1, -1] {
        let mut part = [2, 3, 4];
        let mut whole = Sample::new("Concat").attr("axis", axis);
        for extent in [1, 4, 0, 2] {
            part[(axis + 3) as usize % 3] = extent;
            whole = whole.input(F32, &part, -3.0, 3.0);
        }
        all.push(whole);
    }
    all.push(Sample::new("Concat").attr("axis", 0).input(I64, &[3], -9.0, 9.0));
    all.push(Sample::new("Concat").attr("axis", 0).input(Bool, &[3], 0.0, 1.0).input(Bool, &[2], 0.0, 1.0));
    all.push(data("Dropout", &[2, 3]).attr("ratio", 0.25).attr("training_mode", 0).attr("seed", 7));
    all.push(data("Dropout", &[2, 300]).attr("ratio", 0.25).attr("training_mode", 1).attr("seed", 7));
    for shape in [&[][..], &[1], &[5, 1, 300], &[3, 0]] {
        let drawn = Sample::new("plimsoll.Random").given(I32, &[], &[-7.0]).ints("key", &[-17, 1 << 31]);
        all.push(drawn.attr("shape", shape));
    }
    for ratio in [0.5, 1.0, 0.0] {
        let dropped = data("plimsoll.Dropout", &[2, 1, 200]);
        all.push(dropped.given(I32, &[], &[4.0]).ints("key", &[9, 2]).attr("ratio", ratio));
    }
    all.push(data("Split", &[2, 6]).attr("num_outputs", 2).attr("axis", -1));
    all.push(data("Split", &[2, 6, 3]).ints("split", &[1, 0, 5]).attr("axis", 1));
    for mode in ["DCR", "CRD"] {
        all.push(data("DepthToSpace", &[2, 12, 2, 3]).attr("blocksize", 2).attr("mode", mode));
    }
    all.push(data("SpaceToDepth", &[1, 2, 3, 6]).attr("blocksize", 3).attr("mode", "CRD"));
    for (shape, repeats) in [(&[2, 3][..], &[1, 3][..]), (&[1, 4], &[5, 1]), (&[2, 3], &[0, 1]), (&[], &[])] {
        all.push(data("Tile", shape).ints("repeats", repeats));
    }
    all.push(Sample::new("Tile").input(I64, &[3], -9.0, 9.0).ints("repeats", &[2]));
    all
}

fn reductions() -> Vec<Sample> {
    let mut all = Vec::new();
    let rows: &[(&str, &[DType])] = &[
        ("ReduceSum", &[F32, I64, I32]),
        ("ReduceMax", &[F32, I64, I32, Bool]),
        ("ReduceMin", &[F32, I64, I32, Bool]),
        ("ReduceProd", &[F32, I64, I32]),
        ("ReduceL2", &[F32, I32]),
        ("ReduceMean", &[F32, I64]),
        ("ReduceL1", &[F32, I64]),
        ("ReduceL2", &[F32]),
        ("ReduceLogSum", &[F32]),
        ("ReduceLogSumExp", &[F32]),
        ("ReduceSumSquare", &[F32, I64]),
    ];
    for &(op, dtypes) in rows {
        let (low, high) = if op == "ReduceLogSum" { (0.5, 3.0) } else { (-2.0, 2.0) };
        let of = |dtype, shape: &[usize]| match dtype {
            Bool => Sample::new(op).input(Bool, shape, 0.0, 1.0),
            dtype => Sample::new(op).input(dtype, shape, low, high),
        };
        for &dtype in dtypes {
            all.push(of(dtype, &[3, 4, 5]).ints("axes", &[-1]).attr("keepdims", 0));
        }
        all.push(of(F32, &[3, 4, 5]));
        all.push(of(F32, &[3, 4, 5]).ints("axes", &[0]));
        all.push(of(F32, &[3, 4, 5]).ints("axes", &[2, 0]).attr("keepdims", 0));
        all.push(of(F32, &[2, 300]).ints("axes", &[1]));
        all.push(of(F32, &[3, 4]).ints("axes", &[]).attr("keepdims", 0));
        let positive = Sample::new(op).input(F32, &[3, 4], 0.5, 3.0);
        all.push(positive.ints("axes", &[]).attr("noop_with_empty_axes", 1));
        all.push(Sample::new(op).input(F32, &[], 0.5, 3.0));
    }
    all.push(
        Sample::new("ReduceLogSumExp").given(F32, &[2, 2], &[1000.0, 1000.0, -1000.0, -1000.0]).ints("axes", &[1]),
    );
    all.push(Sample::new("ReduceSum").input(F32, &[2, 0, 3], 0.0, 1.0).ints("axes", &[1]));
    for (axis, exclusive, reverse) in [(0, 0, 0), (1, 1, 0), (-1, 0, 1), (2, 1, 1)] {
        for dtype in [F32, I64, I32] {
            let sums = Sample::new("CumSum").input(dtype, &[3, 4, 5], -3.0, 3.0).attr("axis", axis);
            all.push(sums.attr("exclusive", exclusive).attr("reverse", reverse));
            let row = Sample::new("plimsoll.Scan").input(dtype, &[3, 4, 5], -3.0, 3.0).attr("axis", axis);
            all.push(row.attr("exclusive", exclusive).attr("reverse", reverse));
        }
    }
    for op in ["ArgMax", "ArgMin"] {
        all.push(data(op, &[3, 4, 5]));
        for last in [0, 1] {
            let ties = Sample::new(op).input(I64, &[4, 9], 0.0, 2.0);
            all.push(ties.attr("axis", 1).attr("select_last_index", last));
        }
    }
    all
}

fn known() -> Vec<Sample> {
    let scalar = |dtype, value| Tensor::from_f64(dtype, Vec::new(), &[value]);
    let range =
        |start, limit, delta| Sample::new("Range").attr("start", start).attr("limit", limit).attr("delta", delta);
    vec![
        Sample::new("Constant").attr("value", Tensor::from_f64(I32, [2, 2], &[1.0, -2.0, 3.0, 4.0])),
        Sample::new("Constant").attr("value_float", 0.5),
        Sample::new("Constant").attr("value_floats", vec![0.5, 2.0]),
        Sample::new("Constant").attr("value_int", -3),
        Sample::new("Constant").ints("value_ints", &[1, 2, 3]),
        Sample::new("ConstantOfShape").ints("input", &[2, 3]),
        Sample::new("ConstantOfShape").ints("input", &[]).attr("value", Tensor::from_f64(I64, [1], &[7.0])),
        Sample::new("EyeLike").input(I64, &[3, 4], 0.0, 1.0),
        range(scalar(I64, 3.0), scalar(I64, 9.0), scalar(I64, 3.0)),
        range(scalar(I32, 9.0), scalar(I32, -1.0), scalar(I32, -4.0)),
        range(scalar(F32, 0.5), scalar(F32, 2.25), scalar(F32, 0.5)).attr("stash_type", 1),
        data("Shape", &[2, 0, 3]),
    ]
}

/// Tuples of all lengths, slices of all ranks, the same place twice. Places outside are refused where they are inputs.
fn scatters() -> Vec<Sample> {
    let scatter = |dtype: DType, shape: &[usize], at: &[usize], extent: f64, updates: &[usize]| {
        let given = Sample::new("ScatterND").input(dtype, shape, -3.0, 3.0).input(I64, at, -extent, extent - 1.0);
        given.input(dtype, updates, -3.0, 3.0)
    };
    let mut all = vec![
        scatter(F32, &[5], &[3, 1], 5.0, &[3]),
        scatter(F32, &[3, 3], &[4, 2], 3.0, &[4]),
        scatter(F32, &[3, 3, 2], &[2, 2, 2], 3.0, &[2, 2, 2]),
        scatter(F32, &[2, 4, 3], &[1], 2.0, &[4, 3]),
        scatter(F32, &[4, 3], &[2, 1], 4.0, &[2, 3]),
        scatter(F32, &[4, 3], &[0, 1], 4.0, &[0, 3]),
        scatter(F32, &[4, 3], &[2, 0], 1.0, &[2, 4, 3]),
        scatter(F32, &[4, 3], &[2, 3, 0], 1.0, &[2, 3, 4, 3]),
        scatter(I64, &[4, 3], &[2, 1], 4.0, &[2, 3]),
        scatter(Bool, &[4, 3], &[2, 2], 3.0, &[2]),
        Sample::new("ScatterND").input(F32, &[5], -1.0, 1.0).given(I32, &[2, 1], &[1.0, -1.0]).input(
            F32,
            &[2],
            2.0,
            3.0,
        ),
    ];
    for how in ["none", "add", "mul", "max", "min"] {
        all.push(scatter(F32, &[3, 4], &[6, 1], 3.0, &[6, 4]).attr("reduction", how));
        all.push(scatter(F32, &[3, 4], &[6, 2], 3.0, &[6]).attr("reduction", how));
        all.push(scatter(I32, &[2, 3], &[4, 1], 2.0, &[4, 3]).attr("reduction", how));
        all.push(scatter(F32, &[3], &[2, 0], 1.0, &[2, 3]).attr("reduction", how));
    }
    all
}

/// Indices that go on as far as the data and not, the same place twice. Places outside are refused where they are inputs.
fn scatters_along() -> Vec<Sample> {
    let scatter = |dtype: DType, shape: &[usize], at: &[usize], extent: f64| {
        let given = Sample::new("ScatterElements").input(dtype, shape, -3.0, 3.0).input(I64, at, -extent, extent - 1.0);
        given.input(dtype, at, -3.0, 3.0)
    };
    let mut all = vec![
        scatter(F32, &[5], &[3], 5.0),
        scatter(F32, &[3, 4], &[3, 0], 4.0).attr("axis", -1),
        scatter(Bool, &[4, 3], &[2, 3], 4.0),
        Sample::new("ScatterElements").input(F32, &[3], 0.0, 1.0).given(I32, &[1], &[-1.0]).input(F32, &[1], 2.0, 3.0),
    ];
    for how in ["none", "add", "mul", "max", "min"] {
        all.push(scatter(F32, &[3, 4], &[2, 6], 4.0).attr("axis", 1).attr("reduction", how));
        all.push(scatter(I32, &[4, 3], &[3, 3], 4.0).attr("reduction", how));
        let row = Sample::new("plimsoll.Scatter").input(F32, &[4, 3], -3.0, 3.0).input(I64, &[6, 1], -4.0, 3.0);
        all.push(row.input(F32, &[6, 3], -3.0, 3.0).attr("axis", 0).attr("reduction", how));
    }
    all
}

/// Distinct values, equal ones, either end, any axis, all and none.
fn tops() -> Vec<Sample> {
    let top = |dtype: DType, shape: &[usize], k: i64| Sample::new("TopK").input(dtype, shape, -2.0, 2.0).attr("K", k);
    vec![
        top(F32, &[2, 7], 7).attr("largest", 0),
        top(I64, &[3, 9], 5),
        top(I32, &[9, 2, 3], 3).attr("axis", 0).attr("sorted", 0),
        top(U8, &[2, 6, 2], 2).attr("axis", -2).attr("largest", 0),
        top(F32, &[2, 3], 0),
        top(F32, &[2, 3], 1),
        // Several levels on GPUs: of few that are kept, and of all; the last groups are not full.
        top(F32, &[2, 4500], 3),
        top(F32, &[700], 700).attr("largest", 0),
        top(I32, &[900, 2], 400).attr("axis", 0),
        top(U8, &[300], 300),
    ]
}

fn gathers() -> Vec<Sample> {
    let at = |sample: Sample, shape: &[usize], extent: f64| sample.input(I64, shape, -extent, extent - 1.0);
    let mut all = vec![
        at(data("Gather", &[2, 5, 3]), &[4], 5.0).attr("axis", 1),
        at(data("Gather", &[2, 5, 3]), &[2, 2], 3.0).attr("axis", -1),
        at(data("Gather", &[5, 3]), &[], 5.0),
        at(data("Gather", &[5]), &[], 5.0),
        at(data("Gather", &[5, 3]), &[0], 5.0),
        data("Gather", &[5, 3]).input(I32, &[4], -5.0, 4.0),
        at(Sample::new("Gather").input(I64, &[5, 3], -9.0, 9.0), &[4], 5.0),
        at(Sample::new("Gather").input(Bool, &[5], 0.0, 1.0), &[4], 5.0),
        at(data("GatherElements", &[4, 3]), &[2, 3], 4.0),
        at(data("GatherElements", &[2, 4, 3]), &[2, 4, 1], 3.0).attr("axis", -1),
        at(data("GatherND", &[3, 3, 2]), &[4, 1], 3.0),
        at(data("GatherND", &[2, 3, 4]), &[2, 2, 1], 3.0).attr("batch_dims", 1),
        at(data("GatherND", &[2, 3, 3, 2]), &[2, 2], 3.0).attr("batch_dims", 1),
        at(data("GatherND", &[3]), &[1], 3.0),
    ];
    for (axis, shape) in [(-1, &[2, 3][..]), (1, &[2, 3]), (0, &[])] {
        let hot = at(Sample::new("OneHot"), shape, 5.0).input(F32, &[2], -1.0, 1.0);
        all.push(hot.attr("depth", 4).attr("axis", axis));
    }
    all.push(Sample::new("OneHot").input(I64, &[4], 0.0, 3.0).given(I64, &[2], &[0.0, 1.0]).attr("depth", 4));
    for (upper, k) in [(1, 0), (0, 0), (1, 2), (0, -1), (1, -9), (0, i64::MAX)] {
        all.push(data("Trilu", &[2, 4, 5]).attr("upper", upper).attr("k", k));
    }
    all.push(data("Trilu", &[3, 3]));
    all.push(Sample::new("Trilu").input(Bool, &[3, 3], 0.0, 1.0));
    all.push(Sample::new("Trilu").input(I64, &[3, 4], -9.0, 9.0).attr("upper", 0));
    all
}

fn pads() -> Vec<Sample> {
    let mut all = Vec::new();
    for mode in ["constant", "edge", "reflect", "wrap"] {
        let pad = |shape: &[usize]| data("Pad", shape).attr("mode", mode);
        all.push(pad(&[3, 4]).ints("pads", &[0, 2, 1, 0]));
        all.push(pad(&[3, 4]).ints("pads", &[2, 3]).ints("axes", &[-1]));
        all.push(pad(&[3, 5]).ints("pads", &[-1, 2, 1, -2]));
        all.push(pad(&[2, 4, 5, 6]).ints("pads", &[0, 1, -1, -2, 0, -1, 2, -1]));
        all.push(pad(&[2]).ints("pads", &[5, 7]));
        all.push(pad(&[1, 2]).ints("pads", &[2, 0, 1, 0]));
        all.push(Sample::new("Pad").input(I64, &[4], -9.0, 9.0).ints("pads", &[1, 2]).attr("mode", mode));
    }
    all.push(data("Pad", &[2, 3]).ints("pads", &[1, 1, 1, 1]).attr("constant_value", 2.5));
    all.push(data("Pad", &[0, 2]).ints("pads", &[1, 0, 1, 0]).attr("constant_value", -1.0));
    all.push(Sample::new("Pad").input(Bool, &[3], 0.0, 1.0).ints("pads", &[1, 1]).attr("constant_value", 1.0));
    all
}
