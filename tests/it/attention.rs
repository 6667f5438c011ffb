//! Attentions that become one kernel.

use crate::common::{agrees, random};
use plimsoll::internals::expr::{Binary, Code};
use plimsoll::internals::kernel::Template;
use plimsoll::internals::op::{Attrs, Fact};
use plimsoll::internals::ops;
use plimsoll::internals::pass::Prepared;
use plimsoll::internals::train::{self, Loss, Optimizer, Rate, Training};
use plimsoll::internals::{onnx, plan, reference};
use plimsoll::{DType, Graph, Limits, Plan, Recipe, Target, Tensor};
use std::path::Path;

fn passed(text: &str, target: &Target, fuse: bool) -> Prepared {
    let text = format!("<ir_version: 10, opset_import: [\"\" : 23, \"com.microsoft\" : 1]>\n{text}");
    let model = onnx::Model::new(onnx::text::parse(&text, Path::new("text")).expect("it parses"));
    let graph = onnx::import(&model, &[]).expect("it is a graph");
    Recipe { fuse, ..Recipe::default() }.whole(graph, target).expect("passes run")
}

fn planned(graph: &Prepared, target: &Target) -> Plan {
    plan::planned(graph, target, &Limits { memory: None }).expect("it is planned")
}

/// The templates of a graph's kernels on a target.
fn kernels(text: &str, target: &Target) -> Vec<&'static str> {
    let plan = planned(&passed(text, target, true), target);
    plan.programs[0].steps.iter().map(|step| plan.programs[0].kernels[step.kernel].template.name()).collect()
}

/// A step with six heads of queries and two heads of keys. `outputs` names further outputs than `y`.
fn grouped(outputs: &str) -> String {
    format!(
        "g (float[1, 6, 1, 8] q, float[1, 2, 40, 8] k, float[1, 2, 40, 8] v) => (float[1, 6, 1, 8] y{outputs})
        <int64[1] axis = {{2}}, int64[5] wide = {{1, 2, 3, 40, 8}}, int64[4] flat = {{1, 6, 40, 8}}> {{
            k1 = Unsqueeze (k, axis)  k2 = Expand (k1, wide)  k3 = Reshape (k2, flat)
            v1 = Unsqueeze (v, axis)  v2 = Expand (v1, wide)  v3 = Reshape (v2, flat)
            kt = Transpose <perm = [0, 1, 3, 2]> (k3)
            s = MatMul (q, kt)  w = Softmax <axis = -1> (s)  y = MatMul (w, v3)
        }}"
    )
}

#[test]
fn a_step_of_grouped_queries_is_one_kernel_on_gpus() {
    for target in [Target::cuda(), Target::wgpu()] {
        assert_eq!(kernels(&grouped(""), &target), ["attention"]);
        // Copies that are stored anyway would be live beside the kernel.
        let stored = kernels(&grouped(", float[1, 6, 40, 8] k3"), &target);
        assert!(!stored.contains(&"attention"), "{stored:?}");
    }
    // On the CPU, one row of scores is computed as a product.
    let elsewhere = kernels(&grouped(""), &Target::cpu(2));
    assert!(!elsewhere.contains(&"attention"), "{elsewhere:?}");
}

#[test]
fn a_softmax_of_halves_in_f32_is_of_the_kernel() {
    for (half, to) in [("float16", 10), ("bfloat16", 16)] {
        let text = format!(
            "g ({half}[2, 20, 8] q, {half}[2, 8, 30] k, {half}[2, 30, 8] v, float[20, 30] mask) => ({half}[2, 20, 8] y) {{
                s = MatMul (q, k)  f = Cast <to = 1> (s)  m = Add (f, mask)  e = Softmax <axis = -1> (m)
                w = Cast <to = {to}> (e)  y = MatMul (w, v)
            }}"
        );
        assert_eq!(kernels(&text, &Target::cuda()), ["attention"], "{half}");
    }
}

/// The guard of rows that see nothing compares halves, where the softmax widens them: in every operator that has such a guard.
#[test]
fn attention_of_halves_with_a_mask_stores_no_scores() {
    for ty in ["float16", "bfloat16", "float"] {
        let own = |mask: &str, causal: usize| {
            format!(
                "g ({ty}[1, 2, 80, 16] q, {ty}[1, 2, 90, 16] k, {ty}[1, 2, 90, 16] v, {mask}[80, 90] m) => ({ty}[1, 2, 80, 16] y) {{
                    y = Attention <is_causal = {causal}> (q, k, v, m)
                }}"
            )
        };
        let of_heads = |mask: &str, inputs: &str| {
            format!(
                "g ({ty}[1, 80, 32] q, {ty}[1, 80, 32] k, {ty}[1, 80, 32] v, {mask} m) => ({ty}[1, 80, 32] y) {{
                    y = com.microsoft.MultiHeadAttention <num_heads = 2> (q, k, v, {inputs})
                }}"
            )
        };
        let texts = [
            own(ty, 0),
            own(ty, 1),
            own("bool", 0),
            own("bool", 1),
            of_heads("int32[1, 80]", ", m"),
            of_heads(&format!("{ty}[1, 2, 80, 80]"), ", , m"),
        ];
        for text in texts {
            for target in [Target::cuda(), Target::cpu(2)] {
                let found = kernels(&text, &target);
                // Queries may be scaled before, masks joined, and the result copied.
                let own = found.iter().filter(|name| **name != "map").collect::<Vec<_>>();
                assert_eq!(own, [&"attention"], "{text} on {}: {found:?}", target.name);
            }
        }
    }
}

#[test]
fn f64_is_two_products_where_kernels_sum_in_f32() {
    let text = "g (double[2, 20, 8] q, double[2, 8, 30] k, double[2, 30, 8] v) => (double[2, 20, 8] y) {
        s = MatMul (q, k)  w = Softmax <axis = -1> (s)  y = MatMul (w, v)
    }";
    assert!(!kernels(text, &Target::cuda()).contains(&"attention"));
    assert_eq!(kernels(&text.replace("double", "float"), &Target::cuda()), ["attention"]);
}

/// Queries and keys with factors. The operands are `q`, `k`, `v` and a mask.
fn factors(ty: &str, code: &str, outputs: &str) -> String {
    format!(
        "g ({ty}[2, 20, 8] q, {ty}[2, 30, 8] k, {ty}[2, 30, 8] v, {ty}[20, 30] mask) => ({ty}[2, 20, 8] y{outputs})
        <float s0 = {{0.25}}, float[1, 1] t0 = {{3.5}}, float[8] each0 = {{1, 2, 3, 4, 5, 6, 7, 8}}, float zero0 = {{0}}, float large0 = {{9000}}> {{
            s = CastLike (s0, q)  t = CastLike (t0, q)  each = CastLike (each0, q)  zero = CastLike (zero0, q)  large = CastLike (large0, q)  {code}  p = Softmax <axis = -1> (m)  y = MatMul (p, v)
        }}"
    )
}

#[test]
fn factors_of_queries_and_keys_are_of_the_kernel() {
    const TURN: &str = "kt = Transpose <perm = [0, 2, 1]> ";
    for ty in ["float", "float16", "bfloat16"] {
        for (code, more) in [
            (format!("a = Mul (q, s) {TURN} (k) b = Mul (kt, s) m = MatMul (a, b)"), 0),
            (format!("a = Div (q, t) b = Mul (s, k) {TURN} (b) m = MatMul (a, kt)"), 0),
            (format!("a = Mul (q, s) b = Div (a, t) {TURN} (k) r = MatMul (b, kt) m = Add (r, mask)"), 0),
            (format!("{TURN} (k) b = Mul (kt, s) r = MatMul (q, b) c = Div (r, t) m = Add (c, mask)"), 0),
            // The factor is more than one number, or a number that cannot be divided out.
            (format!("a = Mul (q, each) {TURN} (k) m = MatMul (a, kt)"), 1),
            (format!("a = Mul (q, zero) {TURN} (k) m = MatMul (a, kt)"), 1),
            // Each factor could be moved, but both together exceed 16-bit floats.
            (format!("a = Mul (q, large) b = Mul (a, large) {TURN} (k) m = MatMul (b, kt)"), 1),
        ] {
            let found = kernels(&factors(ty, &code, ""), &Target::cuda());
            let expected = ["map", "attention"];
            assert_eq!(found, expected[1 - more..], "{ty} {code}");
        }
        let stored = format!("a = Mul (q, s) {TURN} (k) m = MatMul (a, kt)");
        let found = kernels(&factors(ty, &stored, &format!(", {ty}[2, 20, 8] a")), &Target::cuda());
        assert_eq!(found, ["map", "attention"], "what is an output is computed, {ty}");
    }
}

/// Products that no half holds, of queries that are scaled so that one holds them. In one kernel they are scaled before they are rounded;
/// where they would be stored, the queries are scaled as they were.
#[test]
fn products_that_no_half_holds_are_scaled_first() {
    let text = |outputs: &str| {
        format!(
            "g (float16[1, 2, 1, 64] q, float16[1, 1, 3, 64] k, float16[1, 1, 3, 2] v) => (float16[1, 2, 1, 2] y{outputs})
            <float wide = {{0.001}}, int64[4] often = {{1, 2, 3, 64}}> {{
                s = Cast <to = 10> (wide)  small = Mul (q, s)
                copies = Expand (k, often)  kt = Transpose <perm = [0, 1, 3, 2]> (copies)  products = MatMul (small, kt)
                weights = Softmax <axis = -1> (products)  y = MatMul (weights, v)
            }}"
        )
    };
    let (alone, stored) = (text(""), text(", float16[1, 2, 3, 64] copies"));
    let target = Target::cuda();
    let plan = planned(&passed(&alone, &target, true), &target);
    let [kernel] = &plan.programs[0].kernels[..] else { panic!("one kernel: {:?}", plan.programs[0].steps) };
    let Template::Attention { score, .. } = &kernel.template else { panic!("{:?}", kernel.template) };
    let code: Vec<_> = score.code.iter().map(|i| (i.code, i.dtype)).collect();
    let factor = Code::Const(f64::from(0.001f32));
    let [product, wide, factor, scaled, rounded] =
        [Code::Input(0), Code::Cast(0), factor, Code::Binary(Binary::Mul, 1, 2), Code::Cast(3)];
    let expected = [product, wide, factor, scaled, rounded].into_iter();
    let dtypes = [DType::F16, DType::F32, DType::F32, DType::F32, DType::F16];
    assert_eq!(code, expected.zip(dtypes).collect::<Vec<_>>());

    // The scores of the first query are 0, 128 and 256; those of the second are the negatives.
    let halves = |shape: [usize; 4], f: &dyn Fn(usize) -> f64| {
        let values: Vec<f64> = (0..shape.iter().product()).map(f).collect();
        Tensor::from_f64(DType::F16, shape, &values)
    };
    let inputs = [
        halves([1, 2, 1, 64], &|i| if i < 64 { 50.0 } else { -50.0 }),
        halves([1, 1, 3, 64], &|i| (i / 64) as f64 * 40.0),
        halves([1, 1, 3, 2], &|i| 1.0 + i as f64),
    ];
    for (text, fuse) in [(&stored, true), (&alone, false)] {
        let graph = passed(text, &target, fuse);
        let found = planned(&graph, &target);
        assert!(found.programs[0].steps.len() > 2, "{:?}", found.programs[0].steps);
        let found = reference::run(&graph.graph, &inputs).expect("it has a meaning")[0].to_f64();
        assert_eq!(found, [5.0, 6.0, 1.0, 2.0], "fused: {fuse}");
    }
}

/// A FlexAttention without bodies is an Attention, whose heads of keys may be shared.
#[test]
fn heads_of_a_flex_attention_are_shared() {
    let text = r#"<ir_version: 13, opset_import: ["" : 24, "ai.onnx.preview" : 1]>
    shared (float[2, 8, 4, 16] q, float[2, 2, 6, 16] k, float[2, 2, 6, 12] v) => (float[2, 8, 4, 12] y, float[2, 8, 4, 12] z) {
        y = ai.onnx.preview.FlexAttention (q, k, v)
        z = Attention (q, k, v)
    }"#;
    let model = onnx::Model::new(onnx::text::parse(text, "text".as_ref()).expect("it parses"));
    let graph = onnx::import(&model, &[]).expect("it is a graph");
    let mut state = 3;
    let inputs: Vec<_> = graph.inputs().iter().map(|&v| random(&mut state, &graph.fact(v).shape)).collect();
    let [y, z] = &reference::run(&graph, &inputs).expect("it has a meaning")[..] else { panic!("two outputs") };
    agrees(y, z, 1e-6).expect("each head of keys serves four heads of queries");
}

/// Masks of 2 heads of 300 queries and keys, by their names: the nodes that make masked scores `m` of `s`, and what they read.
fn masked() -> Vec<(&'static str, String)> {
    let of = |inputs: &str, constants: &str, code: &str| {
        format!(
            "g (float[1, 2, 300, 8] q, float[1, 2, 8, 300] k, float[1, 2, 300, 8] v{inputs}) => (float[1, 2, 300, 8] y)
            <float low = {{-1e38}}, float zero = {{0}}, float half = {{0.5}}, int64[1] one = {{1}}, int64[1, 300] keys = {{{counted}}}, int64[300, 1] queries = {{{counted}}},
             int64[4] wide = {{1, 1, 300, 300}}, int64 window = {{17}}{constants}> {{
                s = MatMul (q, k)  {code}  w = Softmax <axis = -1> (m)  y = MatMul (w, v)
            }}",
            counted = (0..300).map(|i| i.to_string()).collect::<Vec<_>>().join(", ")
        )
    };
    let square = |seen: fn(usize, usize) -> bool, yes: &str, no: &str| {
        let element = |i: usize| if seen(i / 300, i % 300) { yes } else { no };
        (0..300 * 300).map(element).collect::<Vec<_>>().join(", ")
    };
    let causal = square(|row, column| column <= row, "1", "0");
    let added = square(|row, column| column <= row && column + 30 > row, "0", "-1e38");
    vec![
        ("compared", of("", "", "c = LessOrEqual (keys, queries)  m = Where (c, s, low)")),
        (
            "a window",
            of(
                "",
                "",
                "c = LessOrEqual (keys, queries)  far = Sub (queries, window)  d = Greater (keys, far)  e = And (c, d)  m = Where (e, s, low)",
            ),
        ),
        ("a constant", of("", &format!(", bool[1, 1, 300, 300] mask = {{{causal}}}"), "m = Where (mask, s, low)")),
        ("a constant that is added", of("", &format!(", float[300, 300] mask = {{{added}}}"), "m = Add (s, mask)")),
        (
            "padding, too",
            of(
                ", float[1, 300] given",
                "",
                "c = LessOrEqual (keys, queries)  pad = Less (given, half)  p = Unsqueeze (pad, one)  z = And (c, p)  f = Where (z, zero, low)  m = Add (s, f)",
            ),
        ),
    ]
}

#[test]
fn masks_are_conditions() {
    let mut state = 7;
    for (name, text) in masked() {
        let graph = crate::common::graph(&text);
        for target in [Target::cpu(2), Target::cuda(), Target::wgpu()] {
            let plan = crate::common::planned(&graph, &target);
            let names: Vec<_> = plan.programs[0].kernels.iter().map(|kernel| kernel.template.name()).collect();
            let kernel = plan.programs[0].kernels.iter().find(|kernel| kernel.template.name() == "attention");
            let kernel = kernel.unwrap_or_else(|| panic!("{name} on {}: {names:?}", target.name));
            // What is padded is a row, by itself.
            let rows = usize::from(name == "padding, too");
            assert_eq!(plan.programs[0].steps.len(), 1 + rows, "{name} on {}: {names:?}", target.name);
            let band = plimsoll::internals::kernel::templates::band(kernel);
            // Where a query may see nothing, what is hidden is a number like others.
            assert_eq!(band.is_some(), name != "padding, too", "{name} on {}: {:?}", target.name, kernel.template);
            // Scores and masks would be 90,000 elements each.
            let others: u64 = plan.programs[0].buffers.iter().map(|buffer| buffer.bytes).max().unwrap_or(0);
            assert!(others < 90_000, "{name} on {}: {others}", target.name);
        }
        for opener in crate::common::backends() {
            crate::common::runs_as_the_reference(&graph, &opener, &mut state);
        }
    }
}

/// A step of training of two heads of `tokens` tokens in bf16, whose scores are masked as `code` says: it makes scores `m` of `s`.
fn trained(tokens: usize, code: &str, attention: &str) -> Graph {
    let numbers = |count: usize| -> String {
        let number = |at: usize| (((at * 7919 + count * 31) % 97) as f64 / 120.0 - 0.4).to_string();
        (0..count).map(number).collect::<Vec<_>>().join(", ")
    };
    let causal = (0..tokens * tokens).map(|i| if i % tokens <= i / tokens { "1" } else { "0" });
    let text = format!(
        r#"<ir_version: 10, opset_import: ["" : 23]>
        net (float[batch, {tokens}, 16] x) => (float[batch, 3] y)
        <float[16, 16] a = {{{square}}}, float[16, 16] b = {{{other}}}, float[16, 16] c = {{{third}}}, float[16, 3] last = {{{last}}},
         int64[4] heads = {{0, {tokens}, 2, 8}}, int64[3] whole = {{0, {tokens}, 16}}, float low = {{-inf}}, float billion = {{-1e9}}, float scale = {{0.35}},
         float[2, {tokens}, {tokens}] bias = {{{bias}}}, bool[{tokens}, {tokens}] causal = {{{causal}}}> {{
            q1 = MatMul (x, a)  q2 = Reshape (q1, heads)  q = Transpose <perm = [0, 2, 1, 3]> (q2)
            k1 = MatMul (x, b)  k2 = Reshape (k1, heads)  k3 = Transpose <perm = [0, 2, 1, 3]> (k2)  k = Transpose <perm = [0, 1, 3, 2]> (k3)
            v1 = MatMul (x, c)  v2 = Reshape (v1, heads)  v = Transpose <perm = [0, 2, 1, 3]> (v2)
            {attention}
            t = Transpose <perm = [0, 2, 1, 3]> (z)  r = Reshape (t, whole)
            f = ReduceMean <keepdims = 0> (r, axis)  y = MatMul (f, last)
        }}"#,
        square = numbers(256),
        other = numbers(256).replace("0.1", "0.2"),
        third = numbers(256).replace("0.3", "0.1"),
        last = numbers(48),
        bias = numbers(2 * tokens * tokens),
        causal = causal.collect::<Vec<_>>().join(", "),
        attention = attention.replace("CODE", code),
    );
    let text = text.replacen(
        "float low",
        "int64[1] axis = {1}, int64[1] last_axis = {2}, int64[4] row = {0, 1, 1, -1}, float low",
        1,
    );
    let model = onnx::Model::new(onnx::text::parse(&text, Path::new("net")).expect("it parses")).with_weights();
    let (graph, weights) = (onnx::import(&model, &[("batch".into(), 4)]).expect("it is a graph"), model.weights());
    let method = Training {
        precision: DType::BF16,
        ..Training::new(Loss::CrossEntropy, Optimizer::Sgd { momentum: 0.0, nesterov: false }, Rate::constant(0.5))
    };
    train::programs(&graph, &weights, &method).expect("it trains").parts.remove(0).1
}

/// The folds of a program's attentions, sorted.
fn folds(plan: &Plan) -> Vec<String> {
    let program = &plan.programs[0];
    let fold = |step: &plan::Step| match &program.kernels[step.kernel].template {
        Template::Attention { fold, .. } => Some(format!("{fold:?}")),
        _ => None,
    };
    let mut found: Vec<_> = program.steps.iter().filter_map(fold).collect();
    found.sort();
    found
}

/// The attention of a net, spelled out, with `CODE` between the products.
const SPELLED: &str = "s1 = MatMul (q, k)  s = Mul (s1, scale)  CODE  w = Softmax <axis = -1> (m)  z = MatMul (w, v)";

/// No matrix of scores is stored by a step of training on tensor cores: each of the three products that read some computes them again.
#[test]
fn scores_are_computed_again_by_the_products_that_read_them() {
    let cases = [
        ("plain", "m = Identity (s)", SPELLED),
        ("causal", "m = Where (causal, s, low)", SPELLED),
        ("hidden by a number", "m = Where (causal, s, billion)", SPELLED),
        ("used twice", "g = Sigmoid (s)  m = Mul (s, g)", SPELLED),
        ("softcapped", "h = Tanh (s)  m = Where (causal, h, low)", SPELLED),
        // A mask that is large enough to become a condition of the index.
        ("a band", "m = Where (causal, s, low)", SPELLED),
        ("one row", "", "z = Attention <is_causal = 1> (q, k3, v)"),
    ];
    for (name, code, attention) in cases {
        let tokens = if name == "a band" { 256 } else { 100 };
        let graph = trained(tokens, code, attention);
        let target = Target::cuda();
        let prepared = Recipe::default().whole(graph.clone(), &target).expect("the passes run");
        let plan = planned(&prepared, &target);
        let expected =
            ["LogSum", "Plain { second: false }", "Plain { second: true }", "Plain { second: true }", "Softmax"];
        assert_eq!(folds(&plan), expected, "{name}");
        let scores = (4 * 2 * tokens * tokens * 2) as u64;
        let largest = plan.programs[0].buffers.iter().map(|buffer| buffer.bytes).max();
        assert!(largest < Some(scores), "{name}: {largest:?}");

        // The step means what it meant.
        let mut state = 5;
        let inputs =
            [random(&mut state, &[4, tokens, 16].into()), Tensor::from_f64(DType::I64, [4], &[0.0, 2.0, 1.0, 2.0])];
        let after = |graph: &Graph| {
            let mut states = reference::initial(graph).expect("the elements are there");
            let before = states.clone();
            let loss = reference::step(graph, &inputs, &mut states).expect("it runs").remove(0);
            (loss, before, states)
        };
        let ((loss, before, states), (found_loss, _, found)) = (after(&graph), after(&prepared.graph));
        agrees(&found_loss, &loss, 1e-3).unwrap_or_else(|e| panic!("{name}: {e}"));
        for ((before, state), found) in
            before.iter().zip(&states).zip(&found).filter(|((_, s), _)| s.dtype() == DType::F32)
        {
            let moved = |after: &Tensor| -> Vec<f64> {
                after.to_f64().iter().zip(before.to_f64()).map(|(a, b)| a - b).collect()
            };
            let (moved, found) = (moved(state), moved(found));
            let peak = moved.iter().fold(0f64, |peak, v| peak.max(v.abs()));
            let worst = moved.iter().zip(&found).fold(0f64, |worst, (a, b)| worst.max((a - b).abs()));
            assert!(worst <= 0.03 * peak, "{name}: a weight moved by {worst} of {peak} otherwise");
        }
    }
}

/// Scores stay where something else reads what is made of them, and where no tensor cores compute them.
#[test]
fn scores_that_others_read_are_stored() {
    let cases = [
        // A bias of positions is trained: its gradient is a sum over the batch.
        "m = Add (s, bias)",
        // A row may see nothing but the lowest number: one number of f32 is not its largest score and the logarithm of its sum.
        "g = ReduceMax <keepdims = 1> (x, last_axis)  o = Reshape (g, row)  seen = Greater (o, scale)  m = Where (seen, s, billion)",
        "g = ReduceMax <keepdims = 1> (x, last_axis)  o = Reshape (g, row)  p = Mul (o, billion)  m = Add (s, p)",
    ];
    for code in cases {
        let graph = trained(100, code, SPELLED);
        let found = folds(&crate::common::planned(&graph, &Target::cuda()));
        assert!(found.iter().all(|fold| fold == "Softmax"), "{code}: {found:?}");
    }
    let graph = trained(100, "m = Identity (s)", SPELLED);
    let old = Target { compute: 75, ..Target::cuda() };
    for target in [Target::cpu(2), Target::wgpu(), old] {
        let found = folds(&crate::common::planned(&graph, &target));
        assert!(found.iter().all(|fold| fold == "Softmax"), "{}: {found:?}", target.name);
    }
}

/// A file may name the product, too, in whatever type and for whatever target.
#[test]
fn scores_of_a_file_are_a_product() {
    let mut graph = Graph::new("file");
    let mut input = |name: &str, shape: [usize; 3]| graph.input(name, Fact::new(DType::F32, shape));
    let [q, k, v] = [("q", [2, 20, 8]), ("k", [2, 8, 30]), ("v", [2, 30, 8])].map(|(name, shape)| input(name, shape));
    let mut value = q;
    for (name, operands) in [("plimsoll.Scores", vec![k]), ("Tanh", vec![]), ("MatMul", vec![v])] {
        let operands: Vec<_> = [value].into_iter().chain(operands).map(Some).collect();
        let op = ops::find(name).expect("a row");
        value = graph.add(op, name, &operands, Attrs::new(), &[]).expect("it is an operator").output(0);
    }
    graph.output("y", value);
    for target in [Target::cpu(2), Target::wgpu(), Target::cuda()] {
        let found = folds(&crate::common::planned(&graph, &target));
        assert!(found.is_empty(), "{}: {found:?}", target.name);
    }
}

#[test]
fn a_training_has_one_plan() {
    // Layers between which other nodes come and go: new nodes take their numbers.
    let mut layers = String::new();
    for layer in 0..3 {
        let (from, to) = (if layer == 0 { "x".into() } else { format!("g{}", layer - 1) }, format!("g{layer}"));
        let heads = |weights: &str, perm: &str| {
            format!(
                "{weights}{layer}1 = MatMul ({from}, {weights})  {weights}{layer}2 = Reshape ({weights}{layer}1, heads)
                 {weights}{layer} = Transpose <perm = {perm}> ({weights}{layer}2)  "
            )
        };
        layers += &[heads("a", "[0, 2, 1, 3]"), heads("b", "[0, 2, 3, 1]"), heads("c", "[0, 2, 1, 3]")].concat();
        layers += &format!(
            "p{layer} = MatMul (a{layer}, b{layer})  s{layer} = Mul (p{layer}, scale)  m{layer} = Where (causal, s{layer}, low)
             w{layer} = Softmax <axis = -1> (m{layer})  z{layer} = MatMul (w{layer}, c{layer})
             t{layer} = Transpose <perm = [0, 2, 1, 3]> (z{layer})  r{layer} = Reshape (t{layer}, whole)
             y{layer} = Add (r{layer}, {from})  {to} = Gelu (y{layer})  "
        );
    }
    let graph = trained(40, "", &(layers + "g = Reshape (g2, heads)  z = Transpose <perm = [0, 2, 1, 3]> (g)"));
    let plan = || serde_json::to_string(&crate::common::planned(&graph, &Target::cuda())).expect("it is plain data");
    let first = plan();
    assert!(first.contains("log_sum"));
    assert!((0..30).all(|_| plan() == first), "plans differ");
}
