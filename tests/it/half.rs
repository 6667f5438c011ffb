//! Halves are rounded late and seldom: some values are stored as `f32`, and results become more exact. Products of halves side by side
//! become one, which computes the same.

use crate::common;
use plimsoll::internals::backend::cpu::Cpu;
use plimsoll::internals::constant::Constant;
use plimsoll::internals::kernel::Template;
use plimsoll::internals::kernel::library::{Activation, Call, MatMul};
use plimsoll::internals::op::{Sample, SampleInput};
use plimsoll::internals::pass::{Context, PASSES};
use plimsoll::internals::plan::Limits;
use plimsoll::internals::{onnx, ops, plan, reference};
use plimsoll::{Attrs, DType, Graph, Options, Plan, Recipe, Shape, Target, Tensor, Trace, Var};
use serde_json::Value;
use std::collections::BTreeSet;
use std::fmt::Write;
use std::path::Path;

const LAYERS: usize = 6;

/// A decoder's layers without attention: a normalisation, and two products with a GELU between them, which add to a stream. `TYPE` is the
/// type of all, `FROM` and `TO` are a layer's numbers.
const LAYER: &str = "
    nFROM = LayerNormalization (xFROM, sFROM, hFROM)
    pFROM = MatMul (nFROM, vFROM)  fFROM = Add (pFROM, bFROM)
    qFROM = Pow (fFROM, three)  rFROM = Mul (qFROM, cube)  tFROM = Add (fFROM, rFROM)  uFROM = Mul (tFROM, outer)
    yFROM = Tanh (uFROM)  zFROM = Add (yFROM, one)  gFROM = Mul (fFROM, half)  eFROM = Mul (gFROM, zFROM)
    oFROM = MatMul (eFROM, wFROM)  aFROM = Add (oFROM, cFROM)  xTO = Add (xFROM, aFROM)";
/// Its parameters: one of each per layer.
const PARAMETERS: &str =
    "TYPE[64] sFROM, TYPE[64] hFROM, TYPE[64, 128] vFROM, TYPE[128] bFROM, TYPE[128, 64] wFROM, TYPE[64] cFROM";

/// Layers between `head` and `tail`. In `tail`, `LAST` is the stream after them.
fn layers(dtype: DType, layer: &str, tail: &str) -> Graph {
    let mut body = String::new();
    for (name, value) in [("half", 0.5), ("one", 1.0), ("outer", 0.797_884_6), ("cube", 0.044_715), ("three", 3.0)] {
        let cast = format!("{name} = Cast <to = {}> ({name}wide)", dtype.onnx());
        writeln!(body, "{name}wide = Constant <value_float = {value:?}> ()  {cast}").expect("a string");
    }
    let mut head = "TYPE[2, 24, 64] start, TYPE[24, 64] place".to_owned();
    body += "x0 = Add (start, place)";
    for l in 0..LAYERS {
        let number = |text: &str| text.replace("FROM", &l.to_string()).replace("TO", &(l + 1).to_string());
        write!(head, ", {}", number(PARAMETERS)).expect("a string");
        body += &number(layer);
    }
    let tail = tail.replace("LAST", &format!("x{LAYERS}"));
    let name = if dtype == DType::F32 { "float" } else { "bfloat16" };
    let text = format!("layers ({head}) => (TYPE[2, 24, 64] y) {{\n{body}\n{tail}\n}}");
    parameterised(&text.replace("TYPE", name))
}

/// The graph of a text. All inputs but the first are constants.
fn parameterised(text: &str) -> Graph {
    let text = format!("<ir_version: 8, opset_import: [\"\" : 17]>\n{text}");
    let model = onnx::Model::new(onnx::text::parse(&text, Path::new("text")).expect("it parses"));
    let mut graph = onnx::import(&model, &[]).expect("it is a graph");
    let mut random = Random(7);
    let parameters = graph.inputs()[1..].to_vec();
    for value in parameters {
        let fact = graph.fact(value);
        let constant = Constant::new(graph.value_name(value), random.tensor(fact.dtype, &fact.shape));
        graph.insert_at(value.node);
        let constant = graph.constant(constant);
        graph.replace(value, constant);
    }
    graph
}

struct Random(u64);

impl Random {
    /// Numbers that each of the types can represent, and whose products are about as large as the operands.
    fn tensor(&mut self, dtype: DType, shape: &Shape) -> Tensor {
        let scale = if shape.len() == 2 && shape[0] >= 64 { (3.0 / shape[0] as f64).sqrt() } else { 1.0 };
        let mut next = || {
            self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            ((self.0 >> 40) as f64 / f64::from(1 << 23) - 1.0) * scale
        };
        let values: Vec<f64> = (0..shape.numel()).map(|_| next()).collect();
        let values = Tensor::from_f64(DType::BF16, shape.clone(), &values).to_f64();
        Tensor::from_f64(dtype, shape.clone(), &values)
    }
}

const END: &str = "y = LayerNormalization (LAST, s0, h0)";

fn planned(graph: &Graph, target: &Target) -> Plan {
    let graph = graph.clone();
    let graph = Recipe::default().whole(graph, target).expect("the passes run");
    plan::compile(&graph, target, &Limits { memory: None }).expect("it is planned and checked").0
}

fn products(plan: &Plan) -> Vec<&MatMul> {
    let call = |step: &plan::Step| match plan.programs[0].kernels[step.kernel].schedule.call() {
        Some(Call::MatMul(call)) => Some(call),
        _ => None,
    };
    plan.programs[0].steps.iter().filter_map(call).collect()
}

/// The number of products in its plan, without those inside attention.
fn count(graph: &Graph, target: &Target) -> usize {
    let plan = planned(graph, target);
    plan.programs[0]
        .steps
        .iter()
        .filter(|step| plan.programs[0].kernels[step.kernel].template == Template::MatMul)
        .count()
}

/// The output of the graph in this type, with or without passes, on the same numbers. 16-bit floats are rounded at every node.
fn result(dtype: DType, skip: Option<&str>) -> Vec<f64> {
    let mut graph = layers(dtype, LAYER, END);
    let cuda = Target::cuda();
    for (_, pass, _) in PASSES.iter().filter(|(name, ..)| Some(*name) != skip) {
        pass(&mut graph, &Context::new(&cuda, Recipe::default())).expect("the passes run");
    }
    output(&graph)
}

/// The reference's output, for the same numbers in any type.
fn output(graph: &Graph) -> Vec<f64> {
    let mut random = Random(11);
    let facts = graph.inputs().iter().map(|&v| graph.fact(v));
    let inputs: Vec<_> = facts.map(|fact| random.tensor(fact.dtype, &fact.shape)).collect();
    reference::run(graph, &inputs).expect("the reference runs")[0].to_f64()
}

#[test]
fn a_stream_is_rounded_to_f32() {
    let plan = planned(&layers(DType::BF16, LAYER, END), &Target::cuda());
    // The start, then three steps per layer: the normalisation, and two products with the operators after them; the last normalisation.
    assert_eq!(plan.programs[0].steps.len(), 2 + 3 * LAYERS);
    let products = products(&plan);
    assert_eq!(products.len(), 2 * LAYERS);
    for pair in products.chunks(2) {
        let [inner, outer] = pair else { unreachable!("two a layer") };
        let seen = (inner.d.dtype, inner.activation, inner.bias.is_some(), inner.c.is_some());
        assert_eq!(seen, (DType::BF16, Activation::GeluTanh, true, false));
        let seen = (outer.d.dtype, outer.a.dtype, outer.bias.is_some(), outer.c.as_ref().map(|c| c.dtype));
        assert_eq!(seen, (DType::F32, DType::BF16, true, Some(DType::F32)));
    }
    let sums: Vec<_> = plan.programs[0]
        .steps
        .iter()
        .filter(|s| plan.programs[0].kernels[s.kernel].writes[0].dtype == DType::F32)
        .collect();
    assert_eq!(sums.len(), 1 + LAYERS, "the start and each layer's sum");
    let place = |step: &plan::Step| {
        let buffer = &plan.programs[0].buffers[step.writes[0]];
        (buffer.segment, buffer.offset)
    };
    assert!(sums.iter().all(|step| place(step) == place(sums[0])), "each sum takes the place of the one before it");
}

#[test]
fn results_are_more_exact() {
    let exact = result(DType::F32, None);
    let distance = |found: Vec<f64>| {
        let squares = found.iter().zip(&exact).map(|(a, b)| (a - b).powi(2)).sum::<f64>();
        (squares / exact.iter().map(|v| v * v).sum::<f64>()).sqrt()
    };
    let [often, seldom] = [Some("elide_rounding"), None].map(|skip| distance(result(DType::BF16, skip)));
    assert!(seldom < 0.7 * often, "an error of {seldom:.1e}, and of {often:.1e} where all is rounded");
}

#[test]
fn other_sums_stay_halves() {
    let wide = |graph: &Graph, target: &Target| {
        let plan = planned(graph, target);
        plan.programs[0]
            .steps
            .iter()
            .filter(|s| plan.programs[0].kernels[s.kernel].writes[0].dtype == DType::F32)
            .count()
    };
    // Products read these values directly, so each product would need a 16-bit copy.
    let read = LAYER.replace("MatMul (nFROM, vFROM)", "MatMul (xFROM, vFROM)");
    assert_eq!(wide(&layers(DType::BF16, &read, END), &Target::cuda()), 0);
    // These sums are normalised before anything is added to them.
    let post = LAYER.replace("xTO = Add (xFROM, aFROM)", "dFROM = Add (nFROM, aFROM)  xTO = Relu (dFROM)");
    assert_eq!(wide(&layers(DType::BF16, &post, END), &Target::cuda()), 0);
    // An output is stored in its own type.
    let plan = planned(&layers(DType::BF16, LAYER, "y = Identity (LAST)"), &Target::cuda());
    let last = plan.programs[0].steps.last().expect("there are steps");
    assert_eq!(plan.programs[0].kernels[last.kernel].writes[0].dtype, DType::BF16);
    // Targets without 16-bit floats store everything as `f32` anyway.
    let graph = layers(DType::F32, LAYER, END);
    let before = planned(&graph, &Target::cuda());
    assert!(
        before.programs[0].kernels.iter().all(|k| k.body.code.iter().all(|i| i.dtype == DType::F32)),
        "f32 is left alone"
    );
}

#[test]
fn factors_behind_a_normalisation_are_not_rounded_between() {
    let plan = planned(&layers(DType::BF16, LAYER, END), &Target::cuda());
    let rows = plan.programs[0].kernels.iter().filter(|k| matches!(k.template, Template::Row { .. }));
    for kernel in rows {
        let halves = kernel.body.code.iter().filter(|i| i.dtype == DType::BF16).count();
        assert_eq!(halves, 1, "the result alone: {:?}", kernel.body);
    }
}

/// Queries, keys and values of grouped heads, and their readers.
const QKV: &str =
    "qkv (TYPE[2, 24, 64] x, TYPE[64, 64] wq, TYPE[64] bq, TYPE[64, 64] wk, TYPE[64] bk, TYPE[64, 64] wv, TYPE[64] bv)
    => (TYPE[2, 24, 64] y) {
    heads = Constant <value_ints = [0, 0, -1, 32]> ()  rows = Constant <value_ints = [0, 0, -1]> ()
    q = MatMul (x, wq)  qb = Add (q, bq)  qh = Reshape (qb, heads)  qt = Transpose <perm = [0, 2, 1, 3]> (qh)
    k = MatMul (x, wk)  kb = Add (k, bk)  kh = Reshape (kb, heads)  kt = Transpose <perm = [0, 2, 3, 1]> (kh)
    v = MatMul (x, wv)  vb = Add (v, bv)  vh = Reshape (vb, heads)  vt = Transpose <perm = [0, 2, 1, 3]> (vh)
    s = MatMul (qt, kt)  p = Softmax <axis = -1> (s)  o = MatMul (p, vt)
    t = Transpose <perm = [0, 2, 1, 3]> (o)  y = Reshape (t, rows)\n}";

#[test]
fn products_of_one_value_are_one() {
    let cuda = Target::cuda();
    let graph = |dtype: &str, from: &str, to: &str| {
        assert!(QKV.contains(from), "{from}");
        parameterised(&QKV.replace(from, to).replace("TYPE", dtype))
    };
    let plain = graph("bfloat16", "", "");
    let plan = planned(&plain, &cuda);
    let names: Vec<_> = plan.programs[0].steps.iter().map(|s| &s.name).collect();
    assert_eq!((names.len(), products(&plan)[0].m), (3, 192), "a product, an attention, its rows: {names:?}");
    assert_eq!(count(&graph("float16", "", ""), &cuda), 1);
    // Without a bias; with an operator in between; with another value.
    for (from, to, left) in [
        ("q = MatMul (x, wq)  qb = Add (q, bq)", "qb = MatMul (x, wq)", 2),
        (
            "k = MatMul (x, wk)",
            "w = Transpose (x)  z = ReduceMax <keepdims = 0> (w)  i = Add (x, z)  k = MatMul (i, wk)",
            3,
        ),
        ("k = MatMul (x, wk)", "z = Neg (x)  k = MatMul (z, wk)", 3),
    ] {
        assert_eq!(count(&graph("bfloat16", from, to), &cuda), left, "{to}");
    }
    // f32 is left alone but on wgpu, whose products run one after another, and so is what takes as many turns of the device as before.
    assert_eq!(count(&graph("float", "", ""), &cuda), 3);
    assert_eq!(count(&graph("float", "", ""), &Target::wgpu()), 1);
    assert_eq!(count(&graph("float", "2, 24, 64", "2, 1024, 64"), &Target::wgpu()), 3);
    assert_eq!(count(&plain, &Target::cpu(2)), 3);
    let even = Target { multiprocessors: 1, ..cuda.clone() };
    assert_eq!(count(&plain, &even), 3);

    let passed = |target: &Target| {
        let mut graph = plain.clone();
        let context = Context::new(target, Recipe::default());
        PASSES.iter().for_each(|(_, pass, _)| pass(&mut graph, &context).expect("the passes run"));
        graph
    };
    // Products that fit a binding separately, but not together, are not merged either.
    let nodes = |graph: &Graph| {
        let order = graph.order().expect("it has no cycle");
        order.iter().filter(|&&node| graph.node(node).op_name() == "MatMul").count()
    };
    assert_eq!(nodes(&passed(&Target { max_binding: 16 << 10, ..cuda.clone() })), 5);
    let merged = passed(&cuda);
    assert_eq!(nodes(&merged), 3);
    let [apart, one] = [&plain, &merged].map(output);
    let peak = apart.iter().fold(0f64, |peak, v| peak.max(v.abs()));
    // A decomposed softmax rounds each of its steps.
    assert!(apart.iter().zip(&one).all(|(a, b)| (a - b).abs() <= 0.02 * peak));
}

#[test]
fn products_that_meet_again_stay_apart() {
    let gated =
        "gated (bfloat16[2, 24, 64] x, bfloat16[64, 128] wg, bfloat16[64, 128] wu) => (bfloat16[2, 24, 128] y) {
        g = MatMul (x, wg)  s = Sigmoid (g)  a = Mul (g, s)  u = MatMul (x, wu)  y = Mul (a, u)\n}";
    assert_eq!(count(&parameterised(gated), &Target::cuda()), 2);
}

#[test]
fn results_that_nothing_needs_together_stay_apart() {
    // Each value can be freed before the next is computed.
    let fan = "fan (bfloat16[2, 24, 64] x, bfloat16[64, 64] wa, bfloat16[64, 64] wb)
        => (bfloat16[2, 24] y, bfloat16[2, 24] z) {
        a = MatMul (x, wa)  b = MatMul (x, wb)
        y = ReduceMax <keepdims = 0, axes = [2]> (a)  z = ReduceMax <keepdims = 0, axes = [2]> (b)\n}";
    assert_eq!(count(&parameterised(fan), &Target::cuda()), 2);
    // Weights with other readers would be stored twice.
    let shared =
        QKV.replace("TYPE", "bfloat16").replace("y = Reshape (t, rows)", "r = Reshape (t, rows)  y = MatMul (r, wk)");
    assert_eq!(count(&parameterised(&shared), &Target::cuda()), 4);
}

#[test]
fn large_constants_are_not_widened() {
    let bytes = |rows: usize| {
        let text = format!(
            "g (float[{rows}, 256] x, bfloat16[{rows}, 256] c) => (bfloat16[{rows}, 256] y) {{
                e = Exp (x)  h = Cast <to = 16> (e)  y = Add (h, c)
            }}"
        );
        planned(&parameterised(&text), &Target::cuda()).programs[0].summary.constant_bytes
    };
    assert_eq!((bytes(256), bytes(512)), (4 * 256 * 256, 2 * 512 * 256));
}

/// Sizes of an axis: more than bf16 counts exactly, more than f16 holds, and more than `f32` counts exactly.
const EXTENTS: [usize; 3] = [1500, 70_000, 20_000_000];

/// The sample of a row on `dtype` with this extent in place of one of its first input's.
fn stretched(sample: &Sample, axis: usize, extent: usize, dtype: DType) -> Sample {
    let own = sample.inputs[0].as_ref().map_or(0, |input| input.shape[axis]);
    let mut sample = sample.clone();
    for input in sample.inputs.iter_mut().flatten() {
        input.shape.iter_mut().filter(|of| **of == own).for_each(|of| *of = extent);
        if input.dtype == DType::F32 {
            input.dtype = dtype;
        }
    }
    sample
}

/// A row's graph, or that of its derivatives.
fn of_row(sample: &Sample, derives: bool) -> Option<Graph> {
    let g = Trace::new(sample.op);
    let given = |(slot, input): (usize, &Option<SampleInput>)| {
        input.as_ref().map(|input| g.input(&format!("x{slot}"), input.dtype, &input.shape[..]))
    };
    let inputs: Vec<_> = sample.inputs.iter().enumerate().map(given).collect();
    let outputs = g.outputs(sample.op, &inputs, sample.attrs.clone());
    let float = |var: &Var| var.fact().is_ok_and(|fact| fact.dtype.is_float());
    if !derives {
        outputs.into_iter().enumerate().for_each(|(port, output)| g.output(&format!("y{port}"), output));
    } else {
        // Gradients that a run alone knows.
        let dy = g.input("dy", DType::F32, [1]);
        let sums =
            outputs.into_iter().filter(float).map(|output| (output.cast(DType::F32) * dy).reduce_sum(&[], false));
        let loss = sums.reduce(|all, sum| all + sum)?;
        let floats: Vec<_> = inputs.into_iter().flatten().filter(float).collect();
        g.grad(loss, &floats).into_iter().enumerate().for_each(|(k, d)| g.output(&format!("d{k}"), d));
    }
    g.finish().ok()
}

/// The floats among the literals of all code of a plan.
fn literals(plan: &Plan) -> BTreeSet<String> {
    fn walk(value: &Value, found: &mut BTreeSet<String>) {
        let is_small_float = |dtype: &str| matches!(dtype, "f32" | "f16" | "bf16");
        if let Some(literal) = value.pointer("/code/const")
            && value.get("dtype").and_then(Value::as_str).is_some_and(is_small_float)
        {
            let number = literal.as_f64().or_else(|| literal.as_str()?.parse().ok()).expect("a number");
            found.insert(format!("{:?}", number as f32));
        }
        match value {
            Value::Array(all) => all.iter().for_each(|value| walk(value, found)),
            Value::Object(all) => all.values().for_each(|value| walk(value, found)),
            _ => {}
        }
    }
    let mut found = BTreeSet::new();
    walk(&serde_json::to_value(&plan.programs[0].kernels).expect("it is JSON"), &mut found);
    found
}

/// Rows whose numbers are those of the type, and say why.
const OF_THE_TYPE: &[(&str, &str)] = &[
    ("IsInf", "what is larger than any number of the type"),
    (
        "PackedAttention",
        "what hides a score, where the attention is one kernel, as it is beside `f32` with another extent",
    ),
];

/// A number that a row or a pass needs, such as a count, an epsilon or a scale, is the same beside halves as beside `f32`: not rounded to
/// the type of the data, and finite where it is.
#[test]
fn numbers_beside_halves_are_those_beside_f32() {
    let (mut failures, mut plans) = (Vec::new(), 0);
    for sample in ops::all().map(|op| op.example()) {
        let Some(Some(first)) = sample.inputs.first() else { continue };
        if !sample.inputs.iter().flatten().any(|input| input.dtype == DType::F32) {
            continue;
        }
        // Each axis takes its turn with each extent over the rows; derivatives are of the middle one.
        let extent = |axis: usize| if axis == 1 { EXTENTS[1] } else { EXTENTS[(axis + sample.op.len()) % 3] };
        let cases = (0..first.shape.len()).map(|axis| (axis, extent(axis)));
        for ((axis, extent), derives) in
            cases.flat_map(|(axis, extent)| [((axis, extent), false), ((axis, EXTENTS[1]), true)])
        {
            if derives && axis != 1 {
                continue;
            }
            for target in [Target::cpu(2), Target::cuda()] {
                let found = |dtype: DType| {
                    let graph = of_row(&stretched(&sample, axis, extent, dtype), derives)?;
                    let graph = Recipe::default().whole(graph, &target).ok()?;
                    plan::compile(&graph, &target, &Limits { memory: None }).ok().map(|(plan, _)| literals(&plan))
                };
                let Some(expected) = found(DType::F32) else { continue };
                for dtype in [DType::F16, DType::BF16] {
                    let Some(found) = found(dtype) else { continue };
                    plans += 1;
                    let other: Vec<_> = found.difference(&expected).collect();
                    if !other.is_empty() && OF_THE_TYPE.iter().all(|(op, _)| *op != sample.op) {
                        let what = if derives { "gradient of " } else { "" };
                        failures.push(format!(
                            "{}, {dtype}: {what}{} with {extent} along axis {axis}: {other:?} not among {expected:?}",
                            target.name, sample.op
                        ));
                    }
                }
            }
        }
    }
    eprintln!("{plans} plans");
    assert!(plans > 1000, "{plans}");
    assert!(failures.is_empty(), "{} failures\n{}", failures.len(), failures.join("\n"));
}

/// Means, norms and pools over more elements than a half counts, on the CPU.
#[test]
fn sums_of_many_halves_are_exact_until_they_are_rounded() {
    let axes = |axis: i64| Attrs::new().with("axes", vec![axis]);
    for extent in [1500, 70_000] {
        let wide = [&[2, extent][..], &[2]].concat();
        let (row, image) = (&wide[..2], [1, 2, extent]);
        let pool = || Attrs::new().with("kernel_shape", vec![extent as i64]);
        let cases: &[(&str, Vec<&[usize]>, Attrs)] = &[
            ("ReduceMean", vec![row], axes(1)),
            ("ReduceL1", vec![row], axes(1)),
            ("ReduceL2", vec![row], axes(1)),
            ("ReduceLogSum", vec![row], axes(1)),
            ("ReduceLogSumExp", vec![row], axes(1)),
            ("ReduceSumSquare", vec![row], axes(1)),
            ("GlobalAveragePool", vec![&image], Attrs::new()),
            ("AveragePool", vec![&image], pool()),
            ("LpPool", vec![&image], pool()),
            ("GlobalLpPool", vec![&image], Attrs::new()),
            ("InstanceNormalization", vec![&image, &[2], &[2]], Attrs::new()),
            ("GroupNormalization", vec![&image, &[2], &[2]], Attrs::new().with("num_groups", 1)),
            ("LayerNormalization", vec![row, &[1]], Attrs::new()),
            ("RMSNormalization", vec![row, &[1]], Attrs::new()),
            ("MeanVarianceNormalization", vec![row], axes(1)),
            ("LpNormalization", vec![row], Attrs::new()),
            ("Softmax", vec![row], Attrs::new()),
            ("LogSoftmax", vec![row], Attrs::new()),
        ];
        for ((op, shapes, attrs), dtype) in cases.iter().flat_map(|case| [(case, DType::F16), (case, DType::BF16)]) {
            // The sums of such elements are larger than any f16.
            let sample = shapes.iter().fold(Sample::new(op), |sample, shape| sample.input(dtype, shape, 0.5, 4.0));
            let sample = attrs.iter().fold(sample, |sample, (name, value)| sample.attr(name, value.clone()));
            let inputs: Vec<_> = sample.tensors().into_iter().flatten().collect();
            let halves = of_row(&sample, false).expect("it is a graph");
            let wide: Vec<_> =
                inputs.iter().map(|x| Tensor::from_f64(DType::F64, x.shape().clone(), &x.to_f64())).collect();
            let mut as_wide = sample.clone();
            as_wide.inputs.iter_mut().flatten().for_each(|input| input.dtype = DType::F64);
            let expected = reference::run(&of_row(&as_wide, false).expect("it is a graph"), &wide).expect("it runs");
            let names: Vec<String> = (0..inputs.len()).map(|slot| format!("x{slot}")).collect();
            let named: Vec<_> = names.iter().map(String::as_str).zip(inputs).collect();
            for fuse in [true, false] {
                let recipe = Recipe { fuse, ..Recipe::default() };
                let options = Options { recipe, ..Options::default() };
                let backend = Box::new(Cpu::new(2));
                let session = common::load(halves.clone(), backend, "halves", &options);
                let session = session.expect("it is planned");
                let found = session.run(&named).expect("it runs");
                for (found, expected) in found[0].1.to_f64().into_iter().zip(expected[0].to_f64()) {
                    let expected = Tensor::from_f64(dtype, [1], &[expected]).to_f64()[0];
                    let near = found == expected || (found - expected).abs() <= 0.01 * expected.abs().max(1e-3);
                    assert!(near, "{op} of {extent} {dtype}, fused {fuse}: expected {expected}, found {found}");
                }
            }
        }
    }
}
