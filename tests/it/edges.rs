//! Edge cases of ONNX on the CPU, against results worked out by hand: no elements, NaN, flipped images.

use crate::common;
use plimsoll::internals::onnx;
use plimsoll::internals::plan::Recipe;
use plimsoll::internals::reference;
use plimsoll::internals::session::{Choice, Options, Session};
use plimsoll::{Attrs, DType, Tensor, Trace};
use std::collections::BTreeMap;
use std::path::Path;

/// A graph's outputs and how many steps they took.
fn run(text: &str, inputs: &[(&str, Tensor)], fuse: bool) -> (Vec<Vec<f64>>, usize) {
    let text = format!("<ir_version: 8, opset_import: [\"\" : 17]>\n{text}");
    let model = onnx::Model::new(onnx::text::parse(&text, Path::new("text")).expect("it parses"));
    let graph = onnx::import(&model, &[]).expect("it is a graph");
    let options =
        Options { threads: 2, recipe: Recipe { fuse, ..Recipe::default() }, ..Options::default() }.on(Choice::Cpu);
    let session = Session::from_graph(graph, &options).expect("it is planned");
    let outputs = session.run(inputs).expect("it runs");
    (outputs.iter().map(|(_, tensor)| tensor.to_f64()).collect(), session.plan().programs[0].steps.len())
}

/// The outputs of a graph, fused and unfused, which must agree bit for bit.
fn outputs(text: &str, inputs: &[(&str, Tensor)]) -> Vec<Vec<f64>> {
    let (fused, unfused) = (run(text, inputs, true).0, run(text, inputs, false).0);
    let bits = |outputs: &[Vec<f64>]| outputs.iter().flatten().map(|x| x.to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(&fused), bits(&unfused));
    fused
}

fn tensor(shape: &[usize], values: &[f32]) -> Tensor {
    Tensor::from_f32(shape.to_vec(), values).expect("as many values as the shape has")
}

/// Numbers as text: a NaN equals itself.
fn shown(values: &[f64]) -> String {
    values.iter().map(|x| format!("{x}")).collect::<Vec<_>>().join(" ")
}

/// Odd functions keep the sign of a negative zero.
#[test]
fn a_zero_keeps_its_sign() {
    let names = ["Asin", "Asinh", "Atan", "Atanh", "Erf", "Sin", "Sinh", "Tan", "Tanh"];
    let values: Vec<_> = names.iter().map(|name| format!("float[2] {name}_x")).collect();
    let nodes: Vec<_> = names.iter().map(|name| format!("{name}_x = {name} (x)")).collect();
    let text = format!("g (float[2] x) => ({}) {{ {} }}", values.join(", "), nodes.join(" "));
    for (name, y) in names.iter().zip(outputs(&text, &[("x", tensor(&[2], &[-0.0, 0.0]))])) {
        assert_eq!(shown(&y), "-0 0", "{name}");
    }
}

/// By IEEE 754, the square root of minus infinity is NaN, and its power with exponent 0.5 is infinity.
#[test]
fn powers_of_infinity() {
    let text =
        "g (float[4] x) => (float[4] half, float[4] inverse, float[4] root) <float h = {0.5}, float i = {-0.5}> {
        half = Pow (x, h)
        inverse = Pow (x, i)
        root = Sqrt (x)
    }";
    let found = outputs(text, &[("x", tensor(&[4], &[f32::NEG_INFINITY, f32::INFINITY, 4.0, -4.0]))]);
    assert_eq!(found.iter().map(|v| shown(v)).collect::<Vec<_>>(), ["inf inf 2 NaN", "0 0 0.5 NaN", "NaN inf 2 NaN"]);
}

/// A constant index out of range is refused, with the input's name. A computed index is clamped.
#[test]
fn indices_of_what_is_not_there() {
    let text = "g (float[5, 2] table, int64[3] ids, int64[3] others) => (float[1, 3, 2] y, float[3, 2] z) <int64[1] first = {0}, int64 far = {9}> {
        wide = Unsqueeze (ids, first)
        y = Gather (table, wide)
        beyond = Add (others, far)
        z = Gather (table, beyond)
    }";
    let table = tensor(&[5, 2], &[0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5]);
    let ids = |values: [i64; 3]| Tensor::from_i64([3], &values).expect("three");
    let given = |values| [("table", table.clone()), ("ids", ids(values)), ("others", ids([-14, -100, 3]))];
    let found = outputs(text, &given([4, -5, 0]));
    assert_eq!((shown(&found[0]), shown(&found[1])), ("4 4.5 0 0.5 0 0.5".into(), "0 0.5 0 0.5 4 4.5".into()));
    let text = format!("<ir_version: 8, opset_import: [\"\" : 17]>\n{text}");
    let model = onnx::Model::new(onnx::text::parse(&text, Path::new("text")).expect("it parses"));
    let graph = onnx::import(&model, &[]).expect("it is a graph");
    let session = Session::from_graph(graph, &Options::default().on(Choice::Cpu)).expect("it is planned");
    for (values, index, at) in [([4, 5, 0], 5, 1), ([-6, 0, 0], -6, 0)] {
        let error = session.run(&given(values)).expect_err("there is no such row").to_string();
        let expected = format!(
            "input 'ids': expected indices from -5 to 4, by which node 'y' looks up, found {index} (element {at})"
        );
        assert_eq!(error, expected);
    }
    let json = session.plan().to_json();
    assert_eq!(&plimsoll::Plan::from_json(&json, Path::new("plan.json")).expect("its own JSON"), session.plan());
}

/// The tuples of a GatherND are held to the longest axis that they name, those of batches to the axes behind the batch.
#[test]
fn tuples_of_what_is_not_there() {
    for (batch, data, tuples, most) in [(0, "2, 3", [2, 2], 2), (1, "2, 4", [2, 1], 3)] {
        let [rows, width] = tuples;
        let text = format!(
            "<ir_version: 8, opset_import: [\"\" : 17]>
            g (float[{data}] data, int64[{rows}, {width}] at) => (float[2] y) {{ y = GatherND <batch_dims = {batch}> (data, at) }}"
        );
        let model = onnx::Model::new(onnx::text::parse(&text, Path::new("text")).expect("it parses"));
        let graph = onnx::import(&model, &[]).expect("it is a graph");
        let session = Session::from_graph(graph, &Options::default().on(Choice::Cpu)).expect("it is planned");
        let data = session.plan().programs[0]
            .inputs
            .iter()
            .find(|input| input.name == "data")
            .expect("an input")
            .shape
            .clone();
        let numbers: Vec<f64> = (0..data.numel()).map(|n| n as f64).collect();
        let data = Tensor::from_f64(DType::F32, data, &numbers);
        let run = |first: i64| {
            let mut at = vec![1; rows * width];
            at[0] = first;
            session.run(&[("data", data.clone()), ("at", Tensor::from_i64(tuples, &at).expect("as many"))])
        };
        run(0).expect("it is there");
        let error = run(most + 1).expect_err("there is no such place").to_string();
        assert!(error.starts_with("input 'at': expected indices from -") && error.contains("looks up"), "{error}");
        assert!(error.contains(&format!("to {most}, ")), "{error}");
    }
}

/// A Gather looks up the integers that a Cast makes of an input's elements.
#[test]
fn indices_may_be_cast() {
    for (from, to, values, expected) in [
        ("int64", 9, [3.0, 0.0], "1 0"),
        ("int64", 2, [256.0, 257.0], "0 1"),
        ("int32", 3, [255.0, 256.0], "1 0"),
        ("uint8", 3, [255.0, 1.0], "1 1"),
        ("float", 7, [1.5, 0.5], "1 0"),
    ] {
        let text = format!(
            "g (float[2] table, {from}[2] m) => (float[2] y) {{ b = Cast <to = {to}> (m)  i = Cast <to = 7> (b)  y = Gather (table, i) }}"
        );
        let dtype = match from {
            "int64" => DType::I64,
            "int32" => DType::I32,
            "uint8" => DType::U8,
            _ => DType::F32,
        };
        let m = Tensor::from_f64(dtype, [2], &values);
        let found = outputs(&text, &[("table", tensor(&[2], &[0.0, 1.0])), ("m", m)]);
        assert_eq!(shown(&found[0]), expected, "{from} to {to}");
    }
    let text = "g (float[2] table, int32[2] m) => (float[2] y) { i = Cast <to = 7> (m)  y = Gather (table, i) }";
    let text = format!("<ir_version: 8, opset_import: [\"\" : 17]>\n{text}");
    let model = onnx::Model::new(onnx::text::parse(&text, Path::new("text")).expect("it parses"));
    let graph = onnx::import(&model, &[]).expect("it is a graph");
    let session = Session::from_graph(graph, &Options::default().on(Choice::Cpu)).expect("it is planned");
    let beyond = [("table", tensor(&[2], &[0.0, 1.0])), ("m", Tensor::from_f64(DType::I32, [2], &[0.0, 2.0]))];
    assert!(session.run(&beyond).expect_err("there are two").to_string().contains("found 2 (element 1)"));
}

#[test]
fn a_nan_stays_one() {
    let x: Vec<f32> = (0..37).map(|i| if i % 5 == 3 { f32::NAN } else { i as f32 - 18.0 }).collect();
    let text = "g (float[37] x) => (float[37] a, float[37] b, float[37] c, float[37] d, float[1] e, float[1] f, float[1, 1, 36] p) \
                <float lo = {-2}, float hi = {3}, int64[3] shape = {1, 1, 37}> {
        a = Relu (x)
        b = Clip (x, lo, hi)
        c = Max (lo, x)
        d = HardSigmoid (x)
        e = ReduceMax <axes = [0]> (x)
        f = ReduceMin <axes = [0]> (x)
        images = Reshape (x, shape)
        p = MaxPool <kernel_shape = [2]> (images)
    }";
    let found = outputs(text, &[("x", tensor(&[37], &x))]);
    let of = |f: fn(f64) -> f64| {
        shown(&x.iter().map(|&x| if x.is_nan() { f64::NAN } else { f(x.into()) }).collect::<Vec<_>>())
    };
    assert_eq!(shown(&found[0]), of(|x| x.max(0.0)));
    assert_eq!(shown(&found[1]), of(|x| x.clamp(-2.0, 3.0)));
    assert_eq!(shown(&found[2]), of(|x| x.max(-2.0)));
    for (x, y) in x.iter().zip(&found[3]) {
        assert_eq!(x.is_nan(), y.is_nan());
    }
    assert_eq!([shown(&found[4]), shown(&found[5])], ["NaN", "NaN"]);
    let larger: Vec<f64> =
        x.windows(2).map(|w| if w[0].is_nan() || w[1].is_nan() { f64::NAN } else { w[0].max(w[1]).into() }).collect();
    assert_eq!(shown(&found[6]), shown(&larger));
}

/// Columns are reduced side by side, whichever row has a NaN.
#[test]
fn a_nan_stays_one_among_columns() {
    let text = "g (float[3, 40] x) => (float[40] a, float[40] b) {
        a = ReduceMax <axes = [0], keepdims = 0> (x)
        b = ReduceMin <axes = [0], keepdims = 0> (x)
    }";
    let mut x: Vec<f32> = (0..120).map(|i| i as f32).collect();
    [3, 45, 117].iter().for_each(|&i| x[i] = f32::NAN);
    let found = outputs(text, &[("x", tensor(&[3, 40], &x))]);
    for (y, row) in found.iter().zip([2, 0]) {
        for (i, &y) in y.iter().enumerate() {
            assert!(if [3, 5, 37].contains(&i) { y.is_nan() } else { y == (row * 40 + i) as f64 }, "{y} in column {i}");
        }
    }
}

/// Integers of one byte wrap around, whether or not an intermediate value is stored.
#[test]
fn small_integers_wrap_around() {
    let text = "g (uint8[3] a, uint8[3] b, int8[3] c) => (float[3] d, uint8[3] e, bool[3] f, float[1] g, float[3] h, float[3] i) {
        sum = Add (a, b)
        d = Cast <to = 1> (sum)
        e = Div (sum, b)
        f = Greater (sum, a)
        total = ReduceSum (a)
        whole = Cast <to = 1> (total)
        g = Reshape (whole, one)
        minus = Neg (c)
        h = Cast <to = 1> (minus)
        turned = Cast <to = 2> (c)
        i = Cast <to = 1> (turned)
    }";
    let text = text.replace(") {", ") <int64[1] one = {1}> {");
    let of = |dtype, values: &[f64]| Tensor::from_f64(dtype, [3], values);
    let a = ("a", of(DType::U8, &[255.0, 200.0, 7.0]));
    let b = ("b", of(DType::U8, &[1.0, 100.0, 3.0]));
    let found = outputs(&text, &[a, b, ("c", of(DType::I8, &[-128.0, 127.0, -1.0]))]);
    let expected: [&[f64]; 6] = [
        &[0.0, 44.0, 10.0],
        &[0.0, 0.0, 3.0],
        &[0.0, 0.0, 1.0],
        &[206.0],
        &[-128.0, -127.0, 1.0],
        &[128.0, 127.0, 255.0],
    ];
    assert_eq!(found, expected);
}

/// Integers without a sign wrap around at their own ends, and those beyond others' ranges are compared, divided and stored exactly.
#[test]
fn wide_integers_have_all_their_values() {
    let text = "g (uint64[3] a, uint64[3] b, uint32[3] c, float[3] f) => (uint64[3] d, uint64[3] e, uint64[1] m, bool[3] g, uint32[3] h, uint32[3] i, \
                uint64[3] j, int64[3] k) {
        d = Add (a, b)
        e = Div (a, b)
        m = ReduceMax (a)
        g = Greater (a, b)
        left = Sub (c, c)
        one = Cast <to = 12> (b)
        h = Sub (left, one)
        i = BitwiseNot (c)
        j = Cast <to = 13> (f)
        k = Cast <to = 7> (a)
    }";
    let source = format!("<ir_version: 8, opset_import: [\"\" : 18]>\n{text}");
    let model = onnx::Model::new(onnx::text::parse(&source, Path::new("text")).expect("it parses"));
    let graph = onnx::import(&model, &[]).expect("it is a graph");
    let session = Session::from_graph(graph, &Options::default().on(Choice::Cpu)).expect("it is planned");
    let long = |values: [u64; 3]| {
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        Tensor::new(DType::U64, [3], bytes).expect("a value per element")
    };
    let most = u64::MAX;
    let inputs = [
        ("a", long([most, 1 << 63, 7])),
        ("b", long([1, 3, 9])),
        ("c", Tensor::from_f64(DType::U32, [3], &[4294967295.0, 0.0, 5.0])),
        ("f", tensor(&[3], &[1e30, -1.0, f32::NAN])),
    ];
    let found: BTreeMap<String, Tensor> = session.run(&inputs).expect("it runs").into_iter().collect();
    let integers = |name: &str| found[name].bytes().clone();
    assert_eq!(integers("d"), long([0, (1 << 63) + 3, 16]).bytes());
    assert_eq!(integers("e"), long([most, (1 << 63) / 3, 0]).bytes());
    assert_eq!(integers("m"), most.to_le_bytes().to_vec());
    assert_eq!(found["g"].to_f64(), [1.0, 1.0, 0.0]);
    assert_eq!(found["h"].to_f64(), [4294967295.0, 4294967293.0, 4294967287.0]);
    assert_eq!(found["i"].to_f64(), [0.0, 4294967295.0, 4294967290.0]);
    assert_eq!(integers("j"), long([most, 0, 0]).bytes());
    assert_eq!(found["k"].to_i64(), Some(vec![-1, i64::MIN, 7]));
}

/// If no element equals the largest value, as with NaN, the index is still within the row.
#[test]
fn indices_of_no_number_are_indices() {
    let text = "g (float[2, 4] x) => (int64[2, 1] a, int64[2, 1] b, int64[2, 1] c) {
        a = ArgMax <axis = 1> (x)
        b = ArgMin <axis = 1> (x)
        c = ArgMax <axis = 1, select_last_index = 1> (x)
    }";
    let x = [f32::NAN, 1.0, 2.0, f32::NAN, -3.0, -1.0, -1.0, -2.0];
    let found = outputs(text, &[("x", tensor(&[2, 4], &x))]);
    assert!(found.iter().all(|y| (0.0..4.0).contains(&y[0])), "{found:?}");
    assert_eq!([found[0][1], found[1][1], found[2][1]], [1.0, 0.0, 2.0]);
}

#[test]
fn infinities_have_a_largest() {
    let text = "g (float[1, 1, 6] x) => (float[1, 1, 1] a, float[1, 1, 3] b) {
        a = ReduceMax <axes = [2]> (x)
        b = MaxPool <kernel_shape = [2], strides = [2]> (x)
    }";
    let least = f64::NEG_INFINITY;
    assert_eq!(outputs(text, &[("x", tensor(&[1, 1, 6], &[f32::NEG_INFINITY; 6]))]), [vec![least], vec![least; 3]]);
}

/// Rows of several axes, one of which is empty; and queries without keys.
#[test]
fn rows_of_nothing() {
    let text = "g (float[3, 2, 0] x, float[40, 0, 3] y) => (float[3] a, float[40] b, float[3, 2, 0] c) <int64[2] axes = {1, 2}> {
        a = ReduceSum <keepdims = 0> (x, axes)
        b = ReduceProd <axes = [1, 2], keepdims = 0> (y)
        c = Softmax <axis = -1> (x)
    }";
    let none = |shape: &[usize]| tensor(shape, &[]);
    let found = outputs(text, &[("x", none(&[3, 2, 0])), ("y", none(&[40, 0, 3]))]);
    assert_eq!(found, [vec![0.0; 3], vec![1.0; 40], vec![]]);
    let text = "g (float[2, 70, 8] q, float[2, 8, 0] k, float[2, 0, 8] v) => (float[2, 70, 8] y) {
        s = MatMul (q, k)
        p = Softmax <axis = -1> (s)
        y = MatMul (p, v)
    }";
    let q = ("q", tensor(&[2, 70, 8], &[0.5; 1120]));
    assert_eq!(outputs(text, &[q, ("k", none(&[2, 8, 0])), ("v", none(&[2, 0, 8]))]), [vec![0.0; 1120]]);
}

/// -0 + 0 is 0, so adding zero can change a value.
#[test]
fn zeros_have_signs() {
    let text =
        "g (float[2] x) => (float[2] a, float[2] b, float[2] c, float[2] d) <float zero = {0}, float minus = {-0.0}> {
        a = Add (x, zero)
        b = Add (minus, x)
        c = Sub (x, minus)
        d = Sub (x, zero)
    }";
    let found = outputs(text, &[("x", tensor(&[2], &[-0.0, 0.0]))]);
    let signs: Vec<[bool; 2]> = found.iter().map(|y| [y[0].is_sign_negative(), y[1].is_sign_negative()]).collect();
    assert_eq!(signs, [[false, false], [true, false], [false, false], [true, false]]);
}

#[test]
fn convolutions_of_no_channels_are_their_bias() {
    let text =
        "g (float[1, 0, 4, 4] x, float[2, 0, 3, 3] w, float[2] b) => (float[1, 2, 2, 2] y) { y = Conv (x, w, b) }";
    let inputs =
        [("x", tensor(&[1, 0, 4, 4], &[])), ("w", tensor(&[2, 0, 3, 3], &[])), ("b", tensor(&[2], &[1.5, -2.0]))];
    assert_eq!(outputs(text, &inputs), [[1.5, 1.5, 1.5, 1.5, -2.0, -2.0, -2.0, -2.0]]);
    let text = "g (float[1, 0, 1, 1] x, float[0, 2, 2, 2] w, float[2] b) => (float[1, 2, 2, 2] y) { y = ConvTranspose (x, w, b) }";
    let inputs =
        [("x", tensor(&[1, 0, 1, 1], &[])), ("w", tensor(&[0, 2, 2, 2], &[])), ("b", tensor(&[2], &[1.5, -2.0]))];
    assert_eq!(outputs(text, &inputs), [[1.5, 1.5, 1.5, 1.5, -2.0, -2.0, -2.0, -2.0]]);
}

#[test]
fn parts_of_no_elements_are_joined() {
    let text = "g (float[0, 3] x) => (float[0, 9] y) { r = Relu (x) c = Concat <axis = 1> (r, r, r) y = Sigmoid (c) }";
    assert_eq!(outputs(text, &[("x", tensor(&[0, 3], &[]))]), [[0.0; 0]]);
}

#[test]
fn images_are_read_backwards() {
    let text =
        "g (float[2, 1, 2, 2] x) => (float[2, 1, 1, 1] y) <int64[1] a = {-1}, int64[1] b = {-9}, int64[1] c = {0}> {
        s = Slice (x, a, b, c, a)
        y = MaxPool <kernel_shape = [2, 2]> (s)
    }";
    let x = tensor(&[2, 1, 2, 2], &[1.0, 2.0, 3.0, 4.0, 5.0, 8.0, 7.0, 6.0]);
    assert_eq!(outputs(text, &[("x", x)]), [[8.0, 4.0]]);
}

/// A fully masked row is zero if the weights are guarded, and NaN otherwise.
#[test]
fn guarded_attention_of_nothing_is_zero() {
    let text = |guard: &str| {
        format!(
            "g (float[2, 3, 4] q, float[2, 4, 5] k, float[2, 5, 6] v, float[3, 5] mask) => (float[2, 3, 6] y) <float zero = {{0}}> {{
                products = MatMul (q, k)
                scores = Add (products, mask)
                weights = Softmax <axis = -1> (scores)
                {guard}
                y = MatMul (guarded, v)
            }}"
        )
    };
    let values =
        |shape: &[usize]| -> Vec<f32> { (0..shape.iter().product::<usize>()).map(|i| (i % 7) as f32 - 3.0).collect() };
    let given = |name, shape: &[usize]| (name, tensor(shape, &values(shape)));
    // The second row is fully masked, and the third sees only the first key.
    let low = f32::NEG_INFINITY;
    let mask = [[0.0; 5], [low; 5], [0.0, low, low, low, low]].concat();
    let inputs =
        [given("q", &[2, 3, 4]), given("k", &[2, 4, 5]), given("v", &[2, 5, 6]), ("mask", tensor(&[3, 5], &mask))];
    let guarded = text("none = IsNaN (weights)\n guarded = Where (none, zero, weights)");
    let ((fused, steps), (apart, _)) = (run(&guarded, &inputs, true), run(&guarded, &inputs, false));
    assert_eq!(steps, 1, "it is one kernel");
    let (fused, apart) = (&fused[0], &apart[0]);
    for (at, (a, b)) in fused.iter().zip(apart).enumerate() {
        assert!((a - b).abs() < 1e-5, "element {at}: {a} and {b}");
    }
    assert!(fused[6..12].iter().all(|&y| y == 0.0), "{fused:?}");
    let open = &run(&text("guarded = Identity (weights)"), &inputs, true).0[0];
    assert!(open[6..12].iter().all(|y| y.is_nan()) && open[..6].iter().all(|y| y.is_finite()), "{open:?}");
}

/// A query whose keys are all masked takes nothing from the values. A NaN stays NaN.
#[test]
fn a_mask_hides_keys_but_no_nan() {
    let text =
        "g (float[1, 1, 3, 2] q, float[1, 1, 2, 2] k, float[1, 1, 2, 2] v, bool[3, 2] mask) => (float[1, 1, 3, 2] y) {
        y = Attention <scale = 1.0> (q, k, v, mask)
    }";
    let given = |name, values: &[f32]| (name, tensor(&[1, 1, values.len() / 2, 2], values));
    let q = given("q", &[1.0, 2.0, f32::NAN, 1.0, 3.0, 4.0]);
    let mask = ("mask", Tensor::from_f64(DType::Bool, [3, 2], &[1.0, 1.0, 1.0, 0.0, 0.0, 0.0]));
    let inputs = [q, given("k", &[0.0; 4]), given("v", &[2.0, 4.0, 4.0, 8.0]), mask];
    let ((fused, steps), (apart, _)) = (run(text, &inputs, true), run(text, &inputs, false));
    assert_eq!(steps, 1, "it is one kernel");
    assert_eq!([shown(&fused[0]), shown(&apart[0])], ["3 6 NaN NaN 0 0"; 2]);
}

/// A zero tensor with more rows than the weights repeats the weights.
#[test]
fn a_guard_may_repeat_rows() {
    let text =
        "g (float[1, 1, 2] q, float[1, 2, 4] k, float[1, 4, 8] v) => (float[1, 4, 8] y) <float[1, 4, 1] zero = {0, 0, 0, 0}> {
        s = MatMul (q, k)
        p = Softmax <axis = -1> (s)
        none = IsNaN (p)
        w = Where (none, zero, p)
        y = MatMul (w, v)
    }";
    let given = |name, shape: &[usize]| (name, tensor(shape, &vec![0.5; shape.iter().product()]));
    let inputs = [given("q", &[1, 1, 2]), given("k", &[1, 2, 4]), given("v", &[1, 4, 8])];
    assert_eq!(outputs(text, &inputs)[0], [0.5; 32]);
}

/// The CPU computes 16-bit floats in `f32`, scores among them.
#[test]
fn attention_of_halves_runs_where_there_are_none() {
    let text = |to: u32| {
        format!(
            "g (float[3, 2] q, float[2, 4] k, float[4, 2] v) => (float[3, 2] y) {{
                a = Cast <to = {to}> (q)
                b = Cast <to = {to}> (k)
                c = Cast <to = {to}> (v)
                products = MatMul (a, b)
                scores = Add (products, products)
                weights = Softmax <axis = -1> (scores)
                z = MatMul (weights, c)
                y = Cast <to = 1> (z)
            }}"
        )
    };
    let values = |n: usize| -> Vec<f32> { (0..n).map(|i| (i % 5) as f32 * 0.25 - 0.5).collect() };
    let inputs =
        [("q", tensor(&[3, 2], &values(6))), ("k", tensor(&[2, 4], &values(8))), ("v", tensor(&[4, 2], &values(8)))];
    let plain = &run(&text(1), &inputs, true).0[0];
    for half in [10, 16] {
        let found = &run(&text(half), &inputs, true).0[0];
        assert!(found.iter().zip(plain).all(|(a, b)| (a - b).abs() < 1e-2), "{found:?}, {plain:?}");
    }
}

/// Exporters compute the softmax of 16-bit floats in f32.
#[test]
fn attention_of_halves_may_be_weighed_in_f32() {
    let text = |narrow: u32, wide: u32| {
        format!(
            "g (float[3, 2] q, float[2, 4] k, float[4, 2] v) => (float[3, 2] y) {{
                a = Cast <to = {narrow}> (q)
                b = Cast <to = {narrow}> (k)
                c = Cast <to = {narrow}> (v)
                products = MatMul (a, b)
                scores = Cast <to = {wide}> (products)
                exact = Softmax <axis = -1> (scores)
                weights = Cast <to = {narrow}> (exact)
                z = MatMul (weights, c)
                y = Cast <to = 1> (z)
            }}"
        )
    };
    let values = |n: usize| -> Vec<f32> { (0..n).map(|i| (i % 5) as f32 * 0.25 - 0.5).collect() };
    let inputs =
        [("q", tensor(&[3, 2], &values(6))), ("k", tensor(&[2, 4], &values(8))), ("v", tensor(&[4, 2], &values(8)))];
    let (plain, one) = run(&text(1, 1), &inputs, true);
    for half in [10, 16] {
        let (found, steps) = run(&text(half, 1), &inputs, true);
        assert!(found[0].iter().zip(&plain[0]).all(|(a, b)| (a - b).abs() < 1e-2), "{found:?}, {plain:?}");
        let (_, alike) = run(&text(half, half), &inputs, true);
        assert_eq!(steps, alike, "the casts around the softmax are of the kernel; of one type it is {one}");
    }
}

/// The weights multiply the scores that they are computed from, so the scores are needed twice.
#[test]
fn scores_may_be_the_values() {
    let text = "g (float[3, 3] a, float[3, 3] b) => (float[3, 3] y) {
        products = MatMul (a, b)
        scores = Relu (products)
        weights = Softmax <axis = -1> (scores)
        y = MatMul (weights, scores)
    }";
    let (a, b) = ([1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 3.0, 3.0, 3.0, -1.0, -2.0, -3.0]);
    let found = outputs(text, &[("a", tensor(&[3, 3], &a)), ("b", tensor(&[3, 3], &b))]);
    // All scores of a row are equal, so every result is the mean of a column.
    assert!(found[0].iter().all(|y| (y - 1.0).abs() < 1e-6), "{found:?}");
}

/// Scores to which an operand of their product is added, so the operand is needed twice.
#[test]
fn scores_may_hold_an_operand_of_their_product() {
    let text = "g (float[3, 3] a, float[3, 3] b, float[3, 3] c) => (float[3, 3] y) {
        query = Relu (a)
        products = MatMul (query, b)
        scores = Add (products, query)
        weights = Softmax <axis = -1> (scores)
        y = MatMul (weights, c)
    }";
    let (a, b) = ([1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0], [-1.0, 0.0, 0.0, 3.0, 2.0, 3.0, -1.0, -1.0, -2.0]);
    let inputs = [("a", tensor(&[3, 3], &a)), ("b", tensor(&[3, 3], &b)), ("c", tensor(&[3, 3], &a))];
    let found = outputs(text, &inputs);
    // The scores are (0, 0, 0), (3, 3, 3), (-1, -1, -1), and c is the identity.
    assert!(found[0].iter().all(|y| (y - 1.0 / 3.0).abs() < 1e-6), "{found:?}");
}

/// Queries, keys and values that are constants. Products have packed forms of such operands, attention has none.
#[test]
fn attention_may_read_constants() {
    let text = |query: &str, key: &str, value: &str| {
        format!(
            "g (float[3, 3] x) => (float[3, 3] y)
            <float[3, 3] zeros = {{0, 0, 0, 0, 0, 0, 0, 0, 0}}, float[3, 3] rows = {{0, 0, 0, 3, 3, 3, -1, -2, -3}}> {{
                products = MatMul ({query}, {key})
                weights = Softmax <axis = -1> (products)
                y = MatMul (weights, {value})
            }}"
        )
    };
    let rows = tensor(&[3, 3], &[0.0, 0.0, 0.0, 3.0, 3.0, 3.0, -1.0, -2.0, -3.0]);
    for (names, x) in
        [(["zeros", "x", "rows"], &rows), (["x", "zeros", "rows"], &rows), (["zeros", "rows", "x"], &rows)]
    {
        let [query, key, value] = names;
        let found = outputs(&text(query, key, value), &[("x", x.clone())]);
        // All scores are zeros, so every result is the mean of a column.
        let means = [2.0 / 3.0, 1.0 / 3.0, 0.0];
        assert!(found[0].iter().zip(means.iter().cycle()).all(|(y, m)| (y - m).abs() < 1e-6), "{names:?}: {found:?}");
    }
}

/// Groups of heads that share a matrix are separate axes until they are joined, at any rank, and differently on both sides.
#[test]
fn heads_share_matrices_in_groups() {
    let joined = "g (float[1, 4, 1, 2] q, float[2, 1, 2, 1] v) => (float[1, 4, 1, 1] y)
        <int64[4] wide = {2, 2, 2, 1}, int64[4] flat = {1, 4, 2, 1}> {
            e = Expand (v, wide)  r = Reshape (e, flat)  y = MatMul (q, r)
        }";
    let inputs =
        [("q", tensor(&[1, 4, 1, 2], &[1.0, 0.0].repeat(4))), ("v", tensor(&[2, 1, 2, 1], &[3.0, 4.0, 5.0, 6.0]))];
    assert_eq!(outputs(joined, &inputs), [[3.0, 3.0, 5.0, 5.0]]);
    let both = "g (float[1, 2, 1, 1] k, float[1, 4, 1, 1] v) => (float[1, 8, 1, 1] y)
        <int64[1] axis = {2}, int64[5] fours = {1, 2, 4, 1, 1}, int64[5] twos = {1, 4, 2, 1, 1}, int64[4] flat = {1, 8, 1, 1}> {
            k1 = Unsqueeze (k, axis)  k2 = Expand (k1, fours)  k3 = Reshape (k2, flat)
            v1 = Unsqueeze (v, axis)  v2 = Expand (v1, twos)  v3 = Reshape (v2, flat)
            y = MatMul (k3, v3)
        }";
    let inputs = [("k", tensor(&[1, 2, 1, 1], &[10.0, 20.0])), ("v", tensor(&[1, 4, 1, 1], &[1.0, 2.0, 3.0, 4.0]))];
    assert_eq!(outputs(both, &inputs), [[10.0, 10.0, 20.0, 20.0, 60.0, 60.0, 80.0, 80.0]]);
}

/// A Gather reads one part of a concatenation and writes another.
#[test]
fn a_part_is_chosen_from_its_neighbour() {
    for (axis, [rows, columns], expected) in
        [(1, [2, 3], vec![1.0, 2.0, 2.0, 3.0, 4.0, 4.0]), (0, [3, 2], vec![1.0, 2.0, 3.0, 4.0, 3.0, 4.0])]
    {
        let text = format!(
            "g (float[2, 2] x, int64[1] i) => (float[{rows}, {columns}] y) {{
                c = Abs (x)  g = Gather <axis = {axis}> (c, i)  y = Concat <axis = {axis}> (c, g)
            }}"
        );
        let index = Tensor::from_i64([1], &[1]).expect("one index");
        let found = outputs(&text, &[("x", tensor(&[2, 2], &[-1.0, 2.0, -3.0, 4.0])), ("i", index)]);
        assert_eq!(found, [expected], "axis {axis}");
    }
}

/// Products of bytes as ONNX Runtime has them: whole sums, times the scales in this order, in f32. Other orders round ties to other sides, and
/// weights that hold a scale make sums that are not whole.
#[test]
fn quantized_products_are_exact_at_ties() {
    let (mut state, mut ties) = (1u64, 0);
    let mut next = |below: u64| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) % below
    };
    for case in 0..60 {
        let (rows, terms, columns) = (5, 1 + next(24) as usize, 1 + next(5) as usize);
        // Steps of 8 and of 10, so that half of the sums times 0.0625 x 0.1 are ties.
        let mut bytes = |zero: i64, step: i64, count: usize| -> Vec<i64> {
            (0..count).map(|_| zero + step * (next(15) as i64 - 7)).collect()
        };
        let (a, b) = (bytes(119, 8, rows * terms), bytes(128, 10, terms * columns));
        let scales: [f32; 3] = [0.0625, [0.1, 0.3, 0.25][case % 3], [1.0, 1.7, 20.0, 0.7][case % 4]];
        let list = |values: &[i64]| values.iter().map(i64::to_string).collect::<Vec<_>>().join(", ");
        let sum =
            |i: usize, j: usize| (0..terms).map(|k| (a[i * terms + k] - 119) * (b[k * columns + j] - 128)).sum::<i64>();
        let mut expected = Vec::with_capacity(rows * columns);
        for (i, j) in (0..rows).flat_map(|i| (0..columns).map(move |j| (i, j))) {
            let scaled = sum(i, j) as f32 * (scales[0] * scales[1] / scales[2]);
            ties += usize::from((scaled - scaled.floor() - 0.5).abs() < 1e-4 && scaled.abs() < 128.0);
            expected.push((f64::from(scaled.round_ties_even()) + 100.0).clamp(0.0, 255.0));
        }
        let constants = format!(
            "float s = {{{:?}}}, uint8 z = {{119}}, uint8[{terms}, {columns}] w = {{{}}}, float t = {{{:?}}}, uint8 v = {{128}}, float u = {{{:?}}}, uint8 o = {{100}}",
            scales[0],
            list(&b),
            scales[1],
            scales[2]
        );
        // The convolution has the columns as filters of one element, and the rows as positions.
        let text = format!(
            "g (uint8[{rows}, {terms}] x) => (uint8[{rows}, {columns}] y, uint8[{rows}, {columns}] c) <{constants}, int64[3] positions = {{1, {terms}, {rows}}}, int64[3] filters = {{{columns}, {terms}, 1}}, int64[2] matrix = {{{columns}, {rows}}}> {{
                y = QLinearMatMul (x, s, z, w, t, v, u, o)
                xt = Transpose (x)  xr = Reshape (xt, positions)  wt = Transpose (w)  wr = Reshape (wt, filters)
                r = QLinearConv (xr, s, z, wr, t, v, u, o)
                m = Reshape (r, matrix)  c = Transpose (m)
            }}"
        );
        let x = a.iter().map(|&byte| byte as f64).collect::<Vec<_>>();
        let found = outputs(&text, &[("x", Tensor::from_f64(DType::U8, [rows, terms], &x))]);
        assert_eq!(found, [expected.clone(), expected], "case {case}");
    }
    assert!(ties > 100, "{ties} results are near ties");
}

/// Operators that name a place are asked about rows and windows of five elements, with NaN at these places.
#[test]
fn places_of_what_is_not_a_number_are_its_own() {
    let nan = f64::NAN;
    let axis = || Attrs::new().with("axis", 0).with("keepdims", 0);
    let last = || axis().with("select_last_index", 1);
    let window = || Attrs::new().with("kernel_shape", vec![5]);
    // Per row: the operator, its attributes, which output names places, its axes, and whether it takes the last of several.
    let rows: &[(&str, Attrs, usize, bool)] = &[
        ("ArgMax", axis(), 0, false),
        ("ArgMax", last(), 0, true),
        ("ArgMin", axis(), 0, false),
        ("ArgMin", last(), 0, true),
        ("TopK", Attrs::new().with("K", 1), 1, false),
        ("Hardmax", Attrs::new().with("axis", 0), 0, false),
        ("MaxPool", window(), 1, false),
        ("MaxPool", window().with("pads", vec![2, 2]), 1, false),
    ];
    let mut failures = Vec::new();
    for ((op, attrs, port, last), at) in
        rows.iter().flat_map(|row| [&[0][..], &[2], &[4], &[1, 3], &[0, 1, 2, 3, 4]].map(|at| (row, at)))
    {
        let mut data = [1.0, 7.0, -3.0, 7.0, 2.0];
        at.iter().for_each(|&at| data[at] = nan);
        let shape = if *op == "MaxPool" { vec![1, 1, 5] } else { vec![5] };
        let g = Trace::new(op);
        let x = g.input("x", DType::F32, &shape[..]);
        g.output("y", g.outputs(op, &[Some(x)], attrs.clone())[*port]);
        let graph = g.finish().expect("it is a graph");
        let input = Tensor::from_f64(DType::F32, &shape[..], &data);
        let place = if *last { at[at.len() - 1] } else { at[0] };
        // Padded windows start two, one and no elements before the first, and end as many behind the last.
        let expected: Vec<f64> = match (*op, attrs.get("pads")) {
            ("Hardmax", _) => (0..5).map(|k| f64::from(u8::from(k == place))).collect(),
            ("MaxPool", Some(_)) => (0..5usize)
                .map(|o| {
                    let window = o.saturating_sub(2)..(o + 3).min(5);
                    let best = |best: usize, k: usize| {
                        let is_larger = data[k] > data[best] || data[k].is_nan() && !data[best].is_nan();
                        if is_larger { k } else { best }
                    };
                    window.reduce(best).expect("a window has elements") as f64
                })
                .collect(),
            _ => vec![place as f64],
        };
        let by_reference = reference::run(&graph, std::slice::from_ref(&input)).expect("it runs")[0].to_f64();
        let mut found = vec![("the reference", by_reference)];
        for (name, open) in common::backends() {
            let session = common::load(graph.clone(), open(), name, &Options::default());
            let values = session.expect("it is planned").run(&[("x", input.clone())]).expect("it runs")[0].1.to_f64();
            // Shaders do not tell NaN apart, but what they name is inside.
            assert!(*op == "Hardmax" || values.iter().all(|place| (0.0..5.0).contains(place)), "{op}: {values:?}");
            if name != "wgpu" {
                found.push((name, values));
            }
        }
        for (by, found) in found {
            if found != expected {
                failures.push(format!("{op} {attrs:?} of {data:?}, by {by}: expected {expected:?}, found {found:?}"));
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

/// An empty tensor has no byte that another could overwrite.
#[test]
fn parts_without_elements_lie_anywhere() {
    let text = "g (float[0, 4] w) => (float[4, 4] y) <int64[4] pad = {0, 0, 4, 0}> {
        a = Tanh (w) b = Pad (a, pad) c = Concat <axis = 0> (b, a) y = Neg (c)
    }";
    for fuse in [true, false] {
        let (outputs, _) = run(text, &[("w", Tensor::from_f64(DType::F32, [0, 4], &[]))], fuse);
        assert_eq!(outputs, [vec![0.0; 16]]);
    }
}
