use super::{Data, Sample};
use plimsoll::internals::dtype::DType::{self, *};
use plimsoll::internals::op::Lower;
use plimsoll::internals::ops;

const BINARY: &[(&[usize], &[usize])] =
    &[(&[2, 3, 4], &[2, 3, 4]), (&[2, 3, 4], &[3, 1]), (&[5], &[2, 1]), (&[3, 4], &[]), (&[], &[]), (&[0, 2], &[1, 2])];

pub fn samples() -> Vec<Sample> {
    let mut all = Vec::new();
    // Scalars, for every row of one operand.
    for sample in ops::all().filter(|op| matches!(op.lower, Lower::Map(_))).map(|op| op.example()) {
        if let [Some(input)] = &sample.inputs[..]
            && let Data::Uniform(low, high) = input.data
            && input.shape == [2, 3, 37]
        {
            let mut scalar = Sample::new(sample.op).input(input.dtype, &[], low, high);
            scalar.attrs = sample.attrs.clone();
            all.push(scalar);
        }
    }
    for shape in [&[2, 3, 37][..], &[]] {
        all.push(Sample::new("FastGelu").input(F32, shape, -5.0, 5.0));
    }
    // Where a careless formula overflows or loses everything.
    for op in ["Sigmoid", "Softplus", "Swish", "Mish", "Tanh", "Elu", "Selu", "Celu", "Gelu", "Erf", "Softsign"] {
        all.push(Sample::new(op).given(F32, &[8], &[-1000.0, -90.0, -20.0, -0.0, 1e-6, 20.0, 90.0, 1000.0]));
    }
    // Small values, whose digits a difference of exponentials would lose.
    for op in ["Tanh", "Elu", "Celu", "Selu"] {
        all.push(Sample::new(op).given(F32, &[4], &[-1e-3, -2e-3, 1e-3, -1e-4]));
    }
    for (op, ends) in [
        ("Acos", [-1.0, -0.99999, -1e-6, 0.0, 0.3826, 0.9239, 0.99999, 1.0]),
        ("Asin", [-1.0, -0.99999, -1e-6, 0.0, 0.3826, 0.9239, 0.99999, 1.0]),
        ("Acosh", [1.0, 1.0001, 1.3, 1.35, 2.0, 1e4, 1e20, 3e38]),
        ("Asinh", [-3e38, -1e20, -0.4142, -1e-6, 0.0, 0.4143, 1.0, 1e20]),
        ("Atan", [-3e38, -2.4142, -0.4142, -1e-6, 0.0, 0.4143, 2.4143, 1e20]),
        ("Atanh", [-0.9999, -0.4143, -1e-6, 0.0, 1e-6, 0.4142, 0.5, 0.9999]),
        ("Cosh", [-88.5, -88.0, -87.5, -1e-6, 0.0, 87.0, 88.0, 88.5]),
        ("Sinh", [-1.5, -1.0, -0.99, -1e-6, 0.0, 1e-3, 0.99, 1.01]),
        ("Sinh", [-88.5, -88.0, -1e-6, 0.0, 1.0, 87.0, 88.0, 88.5]),
    ] {
        // Halves have no such numbers, and none so close to 1.
        all.push(Sample::new(op).given(F32, &[8], &ends));
    }
    all.push(Sample::new("Shrink").input(F32, &[64], -3.0, 3.0).attr("bias", 0.25).attr("lambd", 1.5));
    all.push(Sample::new("Sign").given(F32, &[5], &[f64::NAN, f64::NEG_INFINITY, -0.0, 1e-30, f64::INFINITY]));
    all.push(Sample::new("Round").given(F32, &[6], &[-2.5, -1.5, -0.5, 0.5, 1.5, 2.5]));
    let infinite = Sample::new("IsInf").given(F32, &[4], &[f64::INFINITY, f64::NEG_INFINITY, 1e30, f64::NAN]);
    all.push(infinite.clone().attr("detect_negative", 0));
    all.push(infinite.clone().attr("detect_positive", 0));
    all.push(infinite);
    all.push(Sample::new("Sign").given(F32, &[4], &[-0.0, 0.0, -2.0, 1e-30]));
    for op in ["Celu", "Elu", "LeakyRelu", "QuickGelu", "ThresholdedRelu", "Swish"] {
        all.push(Sample::new(op).input(F32, &[64], -3.0, 3.0).attr("alpha", 0.625));
    }
    all.push(Sample::new("Selu").input(F32, &[64], -3.0, 3.0).attr("alpha", 1.25).attr("gamma", 0.75));
    all.push(Sample::new("HardSigmoid").input(F32, &[64], -3.0, 3.0).attr("alpha", 0.5).attr("beta", 0.25));
    all.push(Sample::new("Gelu").input(F32, &[64], -5.0, 5.0).attr("approximate", "tanh"));
    for alpha in [1.0, 0.625] {
        all.push(
            Sample::new("SwiGLU").input(F32, &[3, 8], -3.0, 3.0).input(F32, &[3, 8], -2.0, 2.0).attr("alpha", alpha),
        );
    }
    for op in ["BiasGelu", "FastGelu"] {
        all.push(Sample::new(op).input(F32, &[3, 8], -3.0, 3.0).input(F32, &[8], -2.0, 2.0));
    }
    all.push(Sample::new("Not").input(Bool, &[3, 5], 0.0, 1.0));
    for (dtype, low) in [(U8, 0.0), (I8, -128.0), (I32, -1000.0), (I64, -1000.0), (U16, 0.0), (I16, -1000.0)] {
        let some = |op, shape: &[usize]| Sample::new(op).input(dtype, shape, low, low + 255.0);
        all.push(some("BitwiseNot", &[3, 5]));
        all.extend(
            ["BitwiseAnd", "BitwiseOr", "BitwiseXor"].map(|op| some(op, &[3, 5]).input(dtype, &[5], low, low + 255.0)),
        );
    }
    for (direction, dtype, low, high) in [
        ("LEFT", U8, 0.0, 255.0),
        ("RIGHT", U8, 0.0, 255.0),
        ("LEFT", U16, 0.0, 65535.0),
        ("RIGHT", U16, 0.0, 65535.0),
        ("RIGHT", U32, 0.0, 2e9),
        ("RIGHT", U64, 0.0, 2e9),
        ("LEFT", I32, -1e9, 1e9),
        ("RIGHT", I32, -1e9, 1e9),
    ] {
        let bits = Sample::new("BitShift").input(dtype, &[3, 50], low, high);
        all.push(bits.input(dtype, &[50], 0.0, 31.0).attr("direction", direction));
    }
    for op in ["Abs", "Neg", "Sign", "Relu"] {
        all.extend([I64, I32, I16].map(|d| Sample::new(op).input(d, &[17], -9.0, 9.0)));
    }
    // Values and results are within those of an i32, which stands for wider types on some devices.
    for dtype in [U8, U16, I16, U32, U64] {
        for op in
            ["Add", "Mul", "Div", "Mod", "Max", "Min", "Equal", "Greater", "LessOrEqual", "BitwiseAnd", "BitwiseXor"]
        {
            all.push(binary(op, dtype, (&[3, 40], &[40]), (1.0, 15.0), (0.0, 15.0)));
        }
        all.push(binary("Sub", dtype, (&[3, 40], &[40]), (250.0, 255.0), (0.0, 250.0)));
        all.push(binary("Pow", dtype, (&[3, 40], &[40]), (1.0, 5.0), (0.0, 3.0)));
        for op in ["ReduceMax", "ReduceMin", "ReduceSum"] {
            all.push(Sample::new(op).input(dtype, &[7, 9], 0.0, 250.0).ints("axes", &[1]));
        }
        all.push(Sample::new("Transpose").input(dtype, &[3, 4], 0.0, 250.0));
        all.push(
            Sample::new("Concat").input(dtype, &[3, 4], 0.0, 250.0).input(dtype, &[2, 4], 0.0, 250.0).attr("axis", 0),
        );
        all.push(Sample::new("Gather").input(dtype, &[9, 3], 0.0, 250.0).given(I64, &[4], &[8.0, 0.0, -1.0, 3.0]));
    }

    // Two operands.
    for (op, dtypes) in [
        ("Add", &[F32, I64, I32][..]),
        ("Sub", &[F32, I64, I32]),
        ("Mul", &[F32, I64, I32]),
        ("Equal", &[F32, I64, I32, Bool]),
        ("Greater", &[F32, I64, I32]),
        ("GreaterOrEqual", &[F32, I64, I32]),
        ("Less", &[F32, I64, I32]),
        ("LessOrEqual", &[F32, I64, I32]),
        ("And", &[Bool]),
        ("Or", &[Bool]),
        ("Xor", &[Bool]),
    ] {
        for (shapes, dtype) in BINARY.iter().zip(dtypes.iter().cycle()) {
            all.push(binary(op, *dtype, *shapes, (-3.0, 3.0), (-3.0, 3.0)));
        }
        all.extend(dtypes.iter().map(|&d| binary(op, d, (&[2, 9], &[9]), (-3.0, 3.0), (-3.0, 3.0))));
    }
    for shapes in BINARY {
        all.push(binary("Div", F32, *shapes, (-3.0, 3.0), (0.3, 2.0)));
        all.push(binary("Pow", F32, *shapes, (0.2, 3.0), (-2.0, 2.0)));
    }
    for dtype in [I64, I32] {
        let a = [7.0, -7.0, 7.0, -7.0, 0.0, 6.0, -6.0, 5.0];
        let b = [2.0, 2.0, -2.0, -2.0, 3.0, 3.0, 3.0, 0.0];
        let pair = |op| Sample::new(op).given(dtype, &[8], &a).given(dtype, &[8], &b);
        all.extend([pair("Div"), pair("Mod"), pair("Mod").attr("fmod", 1)]);
        all.push(Sample::new("Pow").given(dtype, &[4], &[2.0, -3.0, 0.0, 5.0]).given(
            dtype,
            &[4],
            &[3.0, 3.0, 0.0, 1.0],
        ));
    }
    let floats = |op| {
        let a = Sample::new(op).given(F32, &[6], &[7.5, -7.5, 7.5, -7.5, 6.0, 0.0]);
        a.given(F32, &[6], &[2.0, 2.0, -2.0, -2.0, 3.0, 3.0])
    };
    all.extend([floats("Mod").attr("fmod", 1), floats("Mod").attr("fmod", 0)]);
    // A negative base has powers where the exponent is whole; base and exponent need not be of one type.
    all.push(Sample::new("Pow").given(F32, &[6], &[-2.0, -2.0, -1.5, 2.0, 0.0, 0.0]).given(
        F32,
        &[6],
        &[3.0, 2.0, -1.0, 0.5, 2.0, 0.0],
    ));
    all.push(Sample::new("Pow").input(F32, &[3, 4], -2.0, 2.0).given(I64, &[4], &[0.0, 1.0, 2.0, 3.0]));
    all.push(Sample::new("Pow").given(I64, &[3], &[2.0, 3.0, 9.0]).given(F32, &[3], &[3.0, 2.5, 0.5]));
    all.push(Sample::new("PRelu").input(F32, &[2, 3, 4], -3.0, 3.0).input(F32, &[3, 1], 0.0, 1.0));
    all.push(Sample::new("PRelu").input(F32, &[2, 3, 4], -3.0, 3.0).input(F32, &[], -1.0, 1.0));

    // Any number of operands.
    for op in ["Max", "Min", "Sum", "Mean"] {
        all.push(Sample::new(op).input(F32, &[2, 5], -3.0, 3.0));
        let three = Sample::new(op).input(F32, &[2, 1, 5], -3.0, 3.0).input(F32, &[3, 1], -3.0, 3.0);
        all.push(three.input(F32, &[5], -3.0, 3.0));
        if op != "Mean" {
            all.push(Sample::new(op).input(I64, &[7], -9.0, 9.0).input(I64, &[7], -9.0, 9.0));
        }
    }

    // Bounds as inputs, as attributes (before opset 11), and only one of them.
    let clipped = |dtype: DType| Sample::new("Clip").input(dtype, &[4, 9], -5.0, 5.0);
    all.push(clipped(F32));
    all.push(clipped(F32).input(F32, &[], -2.0, -1.0).input(F32, &[], 1.0, 2.0));
    all.push(clipped(F32).given(F32, &[1], &[-1.0]));
    all.push(clipped(F32).omitted().given(F32, &[], &[1.5]));
    all.push(clipped(F32).attr("min", 0.0).attr("max", 3.5));
    all.push(clipped(F32).given(F32, &[], &[2.0]).given(F32, &[], &[-2.0]));
    all.push(clipped(I64).given(I64, &[], &[-2.0]).given(I64, &[], &[2.0]));

    let choice = |shape: &[usize]| Sample::new("Where").input(Bool, shape, 0.0, 1.0);
    all.push(choice(&[2, 3, 4]).input(F32, &[2, 3, 4], -3.0, 3.0).input(F32, &[2, 3, 4], -3.0, 3.0));
    all.push(choice(&[4]).input(F32, &[2, 1, 1], -3.0, 3.0).input(F32, &[3, 1], -3.0, 3.0));
    all.push(choice(&[2, 1]).input(I64, &[], -3.0, 3.0).input(I64, &[3], -3.0, 3.0));
    all.push(choice(&[3]).input(Bool, &[3], 0.0, 1.0).input(Bool, &[3], 0.0, 1.0));

    for from in [F32, I64, I32, I16, U16, U32, U64, Bool] {
        for to in [F32, I64, I32, I16, U16, U32, U64, Bool] {
            if from != F32 && to.is_unsigned() && to.size() >= 4 {
                // What wraps around to more than an i32 is another matter.
                all.push(Sample::new("Cast").input(from, &[3, 7], 0.0, 3.0).attr("to", to.onnx()));
                continue;
            }
            all.push(Sample::new("Cast").input(from, &[3, 7], -3.0, 3.0).attr("to", to.onnx()));
        }
    }
    all.push(Sample::new("Cast").given(F32, &[6], &[-1.9, -0.5, 0.0, 0.5, 1.9, 100.0]).attr("to", I64.onnx()));
    // What is not a number becomes 0, and what is beyond a type its end.
    for to in [I32, I16, I8, U16, U8, Bool] {
        let wild = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 3e9, -3e9, 70000.5, -70000.5, 255.9];
        all.push(Sample::new("Cast").given(F32, &[8], &wild).attr("to", to.onnx()));
    }
    let ignored = |s: Sample| s.attr("saturate", 0).attr("round_mode", "down");
    all.push(ignored(Sample::new("Cast").input(F32, &[3], -3.0, 3.0).attr("to", I32.onnx())));
    all.push(ignored(Sample::new("CastLike").input(F32, &[3, 2], -3.0, 3.0).input(I64, &[5], 0.0, 1.0)));
    all
}

fn binary(op: &'static str, dtype: DType, shapes: (&[usize], &[usize]), a: (f64, f64), b: (f64, f64)) -> Sample {
    let range = |(low, high)| if dtype == Bool { (0.0, 1.0) } else { (low, high) };
    let (a, b) = (range(a), range(b));
    Sample::new(op).input(dtype, shapes.0, a.0, a.1).input(dtype, shapes.1, b.0, b.1)
}
