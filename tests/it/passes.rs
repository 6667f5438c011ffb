//! Passes leave a graph's meaning as it is, and its memory no larger.

use crate::common;
use plimsoll::internals::backend::cpu::Cpu;
use plimsoll::internals::exec::Exec;
use plimsoll::internals::plan::{self, Limits, Step};
use plimsoll::internals::reference;
use plimsoll::internals::tensor::Tensor;
use plimsoll::internals::trace::Trace;
use plimsoll::{DType, Graph, Recipe, Shape, Target};

fn passed(graph: &Graph, target: &Target) -> Graph {
    Recipe::default().whole(graph.clone(), target).unwrap_or_else(|e| panic!("{}: {e}", graph.name)).graph
}

/// Shapes that broadcast to this one: of each rank up to its own, with each axis or without it.
fn below(shape: &[usize]) -> Vec<Vec<usize>> {
    let suffixes = (0..=shape.len()).map(|skip| &shape[skip..]);
    let masked = |suffix: &[usize], mask: usize| {
        suffix.iter().enumerate().map(|(k, &d)| if mask >> k & 1 == 1 { d } else { 1 }).collect()
    };
    let mut all: Vec<Vec<usize>> =
        suffixes.flat_map(|suffix| (0..1 << suffix.len()).map(move |mask| masked(suffix, mask))).collect();
    all.sort();
    all.dedup();
    all
}

/// A product with weights on one side, a scalar factor before it, and these operators with constants of a shape after it.
fn product([left, right]: [&[usize]; 2], weights: usize, tail: &[&str], shape: &[usize], state: &mut u64) -> Graph {
    let g = Trace::new(&format!("{left:?} x {right:?}, weights {weights}, {tail:?} {shape:?}"));
    let mut constant = |shape: &[usize]| g.constant("c", common::random(state, &Shape::new(shape.to_vec())));
    let x = g.input("x", DType::F32, [left, right][1 - weights].to_vec()) * constant(&[1]);
    let w = constant([left, right][weights]);
    let product = if weights == 1 { x.matmul(w) } else { w.matmul(x) };
    let result = tail.iter().fold(product, |y, &op| match op {
        "Mul" => y * constant(shape),
        "Div" => y / constant(shape),
        _ => y + constant(shape),
    });
    g.output("y", result);
    g.finish().expect("the graph is sound")
}

#[test]
fn constants_around_products_keep_their_meaning() {
    let shapes: [&[usize]; 7] = [&[3], &[1, 3], &[3, 1], &[3, 3], &[2, 3], &[3, 2], &[2, 3, 3]];
    let tails = [&["Mul"][..], &["Div"], &["Add", "Mul"], &["Mul", "Add"], &["Mul", "Mul"]];
    let targets = [Target::cpu(1), Target::cuda()];
    let (mut state, mut count) = (7, 0);
    for sides in shapes.iter().flat_map(|&left| shapes.iter().map(move |&right| [left, right])) {
        let [left, right] = sides;
        if left[left.len() - 1] != right[right.len().saturating_sub(2)] {
            continue;
        }
        let whole = product(sides, 1, &[], &[], &mut state);
        let whole = whole.fact(whole.outputs()[0].1).shape.clone();
        for shape in below(&whole) {
            for (weights, tail) in [0, 1].into_iter().flat_map(|w| tails.map(|tail| (w, tail))) {
                let graph = product(sides, weights, tail, &shape, &mut state);
                let inputs = [common::random(&mut state, &graph.fact(graph.inputs()[0]).shape)];
                let expected = &reference::run(&graph, &inputs).expect("it has a meaning")[0];
                for target in &targets {
                    let found = &reference::run(&passed(&graph, target), &inputs).expect("it has a meaning")[0];
                    common::agrees(found, expected, 1e-5).unwrap_or_else(|e| panic!("{}: {e}", graph.name));
                    count += 1;
                }
            }
        }
    }
    assert!(count > 1000, "{count}");
}

/// A table of embeddings whose transpose computes the logits: a factor after them must not make a second table.
#[test]
fn weights_that_others_read_are_held_once() {
    let tied = |behind: &str| {
        let text = format!(
            "g (int64[4] i, float[4, 64] h) => (float[4, 64] e, float[4, 256] y)
            <float[256, 64] table = {{{}}}, float s = {{0.125}}> {{
                e = Gather (table, i)  t = Transpose (table)  p = MatMul (h, t)  {behind}
            }}",
            (0..256 * 64).map(|i| format!("{}", i % 97)).collect::<Vec<_>>().join(", ")
        );
        common::planned(&common::graph(&text), &Target::cuda()).programs[0].summary.constant_bytes
    };
    assert_eq!(tied("y = Mul (p, s)"), tied("y = Relu (p)"));
}

/// A kernel's code does not grow with the length of a chain.
#[test]
fn groups_are_bounded() {
    let chain = |core: &str, tail: &str| {
        let ops: String = (0..300).map(|i| format!("c{} = {} (c{i}) ", i + 1, ["Cos", "Sin"][i % 2])).collect();
        format!("g (float[2, 4, 4] x) => (float[2, 4, 4] y) {{ {core} {ops} {tail} }}")
    };
    for (core, tail) in [
        ("c0 = MatMul (x, x)", "y = Neg (c300)"),
        ("c0 = Neg (x)", "y = Neg (c300)"),
        ("c0 = Neg (x)", "y = Softmax (c300)"),
        ("c0 = Softmax (x)", "y = Neg (c300)"),
        ("c0 = MatMul (x, x)", "w = Softmax <axis = -1> (c300) y = MatMul (w, x)"),
    ] {
        let graph = common::graph(&chain(core, tail));
        let groups = Recipe::default().whole(graph, &Target::cuda()).expect("the passes run").groups;
        let largest = groups.iter().map(|group| group.nodes.len()).max().expect("there are groups");
        assert!((32..=64).contains(&largest), "{core} .. {tail}: {largest} nodes");
    }
}

/// Parts of `x`, and their readers. Returns how often the code on each part, which ends in a Tanh, is computed.
#[test]
fn parts_side_by_side_are_computed_together_where_nothing_else_is_lost() {
    const HEADS: &str = "s = Reshape (A, qs) t = Transpose <perm = [0, 2, 1, 3]> (s) u = Mul (t, c) a = Tanh (u)
        v = Reshape (B, ks) w = Transpose <perm = [0, 2, 1, 3]> (v) z = Mul (w, c) b = Tanh (z) ";
    const PLAIN: &str = "a = Tanh (A) b = Tanh (B) ";
    let wide = "A = Slice (x, n0, n16, n2) B = Slice (x, n16, n24, n2) ";
    let even = "A = Slice (x, n0, n8, n2) B = Slice (x, n8, n16, n2) ";
    let gap = "A = Slice (x, n0, n8, n2) B = Slice (x, n16, n24, n2) ";
    let product = "r = Transpose <perm = [0, 2, 1]> (b) y = MatMul (a, r)";
    let grouped = "g = Reshape (a, gs) r = Transpose <perm = [0, 1, 3, 2]> (b) y = MatMul (g, r)";
    for (parts, code, reader, together, apart) in [
        (wide, HEADS, grouped, 1, 2),
        (even, PLAIN, product, 1, 2),
        (
            even,
            "a = Tanh (A) b = Tanh (B) C = Slice (x, n16, n24, n2) d = Tanh (C) ",
            "r = Transpose <perm = [0, 2, 1]> (b) e = MatMul (a, r) y = MatMul (e, d)",
            1,
            3,
        ),
        (even, PLAIN, "r = Transpose <perm = [0, 2, 1]> (b) o = MatMul (a, r) p = Neg (x) y = MatMul (o, p)", 1, 2),
        // Both are already in one kernel, or are not needed at the same time.
        (even, PLAIN, "y = Mul (a, b)", 2, 2),
        (even, PLAIN, "y = Concat <axis = 2> (b, a)", 2, 2),
        (even, PLAIN, "o = MatMul (a, m) r = ReduceSum <keepdims = 0> (o) y = Mul (b, r)", 2, 2),
        // The code or the parts differ.
        (even, "n = Neg (A) a = Tanh (n) b = Tanh (B) ", product, 2, 2),
        (gap, PLAIN, product, 2, 2),
    ] {
        let text = format!(
            "g (float[2, 5, 24] x) => (y) <int64[1] n0 = {{0}}, int64[1] n2 = {{2}}, int64[1] n8 = {{8}}, int64[1] n16 = {{16}},
            int64[1] n24 = {{24}}, int64[4] qs = {{2, 5, 4, 4}}, int64[4] ks = {{2, 5, 2, 4}}, int64[4] gs = {{2, 2, 10, 4}},
            float[5, 4] c = {{{}}}, float[8, 3] m = {{{}}}> {{ {parts} {code} {reader} }}",
            (0..20).map(|i| format!("{}", 0.5 + f64::from(i) / 7.0)).collect::<Vec<_>>().join(", "),
            (0..24).map(|i| format!("{}", f64::from(i) / 9.0)).collect::<Vec<_>>().join(", "),
        );
        let graph = common::graph(&text);
        let inputs = [common::random(&mut 3, &graph.fact(graph.inputs()[0]).shape)];
        let expected = &reference::run(&graph, &inputs).expect("it has a meaning")[0];
        for (target, count) in [(Target::wgpu_desktop(), together), (Target::cuda(), together), (Target::cpu(1), apart)]
        {
            let graph = passed(&graph, &target);
            let order = graph.order().expect("no cycle");
            let found = order.iter().filter(|&&node| graph.node(node).op_name() == "Tanh").count();
            assert_eq!(found, count, "{code} {reader} for {}", target.name);
            let found = &reference::run(&graph, &inputs).expect("it has a meaning")[0];
            common::agrees(found, expected, 1e-6).unwrap_or_else(|e| panic!("{code} {reader}: {e}"));
        }
    }
}

/// The states of a long sequence are slices of one value, and each depends on the one before. No pair of them is tried.
#[test]
fn passes_take_long_sequences_slice_by_slice() {
    let text = "g (float[512, 1, 4] x, float[1, 16, 4] w, float[1, 16, 4] r) => (float[512, 1, 1, 4] y) {
        y = LSTM <hidden_size = 4> (x, w, r)
    }";
    let graph = common::graph(text);
    let passes = |target: Target| common::core_seconds(|| drop(passed(&graph, &target)));
    let (alone, beside) = (passes(Target::cpu(1)), passes(Target::wgpu_desktop()));
    assert!(beside < 8.0 * alone, "{beside} s, without joining parts {alone} s");
}

/// A product's rows are followed through views. A file may have any number of views.
#[test]
fn views_in_a_row_are_as_many_as_the_file_has() {
    let slices: String = (1..20_000).map(|i| format!("s{i} = Slice (s{}, one, end, zero) ", i - 1)).collect();
    let text = format!(
        "g (float[3, 20002, 4] x) => (float[m, n, 4] y)
        <float[4, 4] w = {{1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1}}, int64[1] zero = {{0}}, int64[1] one = {{1}}, int64[1] end = {{30000}}> {{
            r = Relu (x)  t = Transpose <perm = [1, 0, 2]> (r)  s0 = MatMul (t, w)  {slices}  y = MatMul (s19999, w)
        }}"
    );
    passed(&common::graph(&text), &Target::cpu(1)).verify().expect("it is sound");
}

/// A kernel binds at most as many buffers as the target allows, however many inputs an operator has.
#[test]
fn operators_of_many_inputs_are_divided() {
    for op in ["Sum", "Max", "Min", "Mean"] {
        let list = |f: &dyn Fn(usize) -> String, sep: &str| (0..20).map(f).collect::<Vec<_>>().join(sep);
        let text = format!(
            "g ({}) => (float[4, 4] y) {{ {} y = {op} ({}) }}",
            list(&|i| format!("float[4, 4] x{i}"), ", "),
            list(&|i| format!("m{i} = MatMul (x{i}, x{i})"), " "),
            list(&|i| format!("m{i}"), ", "),
        );
        let graph = common::graph(&text);
        let mut state = 5;
        let inputs: Vec<_> = graph.inputs().iter().map(|&v| common::random(&mut state, &graph.fact(v).shape)).collect();
        let expected = &reference::run(&graph, &inputs).expect("it has a meaning")[0];
        for target in [Target::wgpu(), Target::wgpu_desktop(), Target::cuda(), Target::cpu(1)] {
            let plan = common::planned(&graph, &target);
            let bound = plan.programs[0].steps.iter().map(|step| step.reads.len() + step.writes.len()).max();
            assert!(bound <= Some(target.max_bindings as usize), "{op} for {}", target.name);
            let found = &reference::run(&passed(&graph, &target), &inputs).expect("it has a meaning")[0];
            common::agrees(found, expected, 1e-6).unwrap_or_else(|e| panic!("{op}: {e}"));
        }
    }
}

/// The templates of a graph's kernels on CUDA, whose results are the reference's.
fn kernels(text: &str) -> Vec<&'static str> {
    let graph = common::graph(text);
    let mut state = 3;
    let inputs: Vec<_> = graph.inputs().iter().map(|&v| common::random(&mut state, &graph.fact(v).shape)).collect();
    let expected = &reference::run(&graph, &inputs).expect("it has a meaning")[0];
    let target = Target::cuda();
    let found = &reference::run(&passed(&graph, &target), &inputs).expect("it has a meaning")[0];
    common::agrees(found, expected, 1e-5).unwrap_or_else(|e| panic!("{text}: {e}"));
    let plan = common::planned(&graph, &target);
    plan.programs[0].steps.iter().map(|step| plan.programs[0].kernels[step.kernel].template.name()).collect()
}

/// Constant indices that a Slice could express become a view.
#[test]
fn known_indices_are_views_where_they_are_evenly_apart() {
    for (at, shape, axis, view) in [
        ("2", "", 1, true),
        ("-1", "", 1, true),
        ("-5", "[1]", 1, true),
        ("1, 2, 3", "[3]", 1, true),
        ("0, 2, 4", "[3]", -2, true),
        ("4, 2, 0", "[3]", 1, true),
        ("4, 3, 2, 1, 0", "[5]", 1, true),
        ("-5, -4, 3, 2", "[2, 2]", 1, false),
        ("-5, -4, 2, 3", "[2, 2]", 1, true),
        ("1, 3", "[1, 2]", 2, true),
        ("1, 1", "[2]", 1, false),
        ("0, 1, 3", "[3]", 1, false),
    ] {
        let text = format!(
            "g (float[2, 5, 4] x) => (y) <int64{shape} at = {{{at}}}> {{ p = Gather <axis = {axis}> (x, at)  y = Neg (p) }}"
        );
        let graph = common::graph(&text);
        let target = Target::cuda();
        let inputs = [common::random(&mut 3, &graph.fact(graph.inputs()[0]).shape)];
        let [found, expected] = [&passed(&graph, &target), &graph].map(|graph| reference::run(graph, &inputs).ok());
        assert_eq!(found, expected, "{text}");
        let plan = common::planned(&graph, &target);
        let names: Vec<_> =
            plan.programs[0].steps.iter().map(|step| plan.programs[0].kernels[step.kernel].template.name()).collect();
        assert_eq!(names, [if view { "map" } else { "gather" }], "{text}");
    }
}

/// `torch.nn.MultiheadAttention` as `torch.export` writes it: the sequence is the first axis, queries, keys and values come from one product, and both have factors.
fn packed(ty: &str, queries: &str) -> String {
    let table = |n: usize| (0..n).map(|i| format!("{}", (i % 13) as f64 / 8.0 - 0.75)).collect::<Vec<_>>().join(", ");
    format!(
        "g ({ty}[2, 5, 8] x) => ({ty}[2, 5, 8] y)
        <{ty}[8, 24] w = {{{}}}, {ty}[24] b = {{{}}}, {ty}[8, 8] u = {{{}}}, {ty}[8] d = {{{}}}, {ty}[1] c = {{0.75}}, {ty} half = {{0.5}},
        int64[4] four = {{5, 2, 3, 8}}, int64[1] n0 = {{0}}, int64[1] n3 = {{3}}, int64 i0 = {{0}}, int64 i1 = {{1}}, int64 i2 = {{-1}},
        int64[3] heads = {{5, 4, 4}}, int64[4] apart = {{2, 2, 5, 4}}, int64[4] keys = {{2, 2, 4, 5}}, int64[2] rows = {{10, 8}}, int64[3] back = {{5, 2, 8}}> {{
            n = Relu (x)  t = Transpose <perm = [1, 0, 2]> (n)  m = MatMul (t, w)  l = Add (m, b)
            r = Reshape (l, four)  o = Unsqueeze (r, n0)  z = Transpose <perm = [3, 1, 2, 0, 4]> (o)  s = Squeeze (z, n3)
            sq = Gather <axis = 0> (s, i0)  sk = Gather <axis = 0> (s, i1)  sv = Gather <axis = 0> (s, i2)
            rq = Reshape (sq, heads)  rk = Reshape (sk, heads)  rv = Reshape (sv, heads)
            tq = Transpose <perm = [1, 0, 2]> (rq)  tk = Transpose <perm = [1, 0, 2]> (rk)  tv = Transpose <perm = [1, 0, 2]> (rv)
            q = Reshape (tq, apart)  kk = Transpose <perm = [0, 2, 1]> (tk)  k = Reshape (kk, keys)  v = Reshape (tv, apart)
            {queries}  p = MatMul (fq, fk)  e = Softmax <axis = -1> (p)  a = MatMul (e, v)
            ta = Transpose <perm = [2, 0, 1, 3]> (a)  ra = Reshape (ta, rows)  g = Gemm (ra, u, d)
            rg = Reshape (g, back)  tg = Transpose <perm = [1, 0, 2]> (rg)  y = Add (tg, x)
        }}",
        table(192),
        table(24),
        table(64),
        table(8),
    )
}

/// The order of the rows and the factors of queries and keys need no kernels of their own.
#[test]
fn packed_heads_are_read_where_they_lie() {
    for queries in [
        "fq = Mul (q, c)  fk = Mul (c, k)",
        "fq = Div (q, half)  fk = Identity (k)",
        "fq = Identity (q)  fk = Mul (k, half)",
        "fq = Identity (q)  fk = Identity (k)",
    ] {
        assert_eq!(kernels(&packed("float", queries)), ["map", "matmul", "attention", "matmul"], "{queries}");
    }
    // The rows of both products are contiguous, and the second product adds the residual.
    let graph = common::graph(&packed("float", "fq = Mul (q, c)  fk = Mul (k, c)"));
    let plan = common::planned(&graph, &Target::cuda());
    let kernels = plan.programs[0].steps.iter().map(|step| &plan.programs[0].kernels[step.kernel]);
    let products: Vec<_> = kernels.filter(|kernel| kernel.template.name() == "matmul").collect();
    let lies = |operand: &plimsoll::internals::kernel::Operand| operand.access.is_contiguous();
    assert!(products.iter().all(|kernel| lies(&kernel.reads[0]) && lies(&kernel.writes[0])));
    assert_eq!(products.iter().map(|kernel| kernel.reads.len()).collect::<Vec<_>>(), [3, 4]);
}

/// Views of views become as few as possible. Views that cannot be combined stay.
#[test]
fn axes_that_are_joined_on_the_way_are_not_copied() {
    const TURN: &str = "a = Transpose <perm = [1, 0, 2]> (x)";
    // The views that are left, and the number of kernels.
    for (views, left, steps) in [
        // Axes that are joined are transposed as one, and split again.
        ("b = Reshape (a, rows)  d = Transpose (b)  c = Reshape (d, turned)", vec!["Transpose"], 1),
        ("b = Reshape (a, flat)  c = Reshape (b, parts)", vec!["Reshape", "Transpose"], 1),
        // In the end they are in their order in memory.
        ("b = Transpose <perm = [2, 1, 0]> (a)  c = Transpose <perm = [1, 2, 0]> (b)", vec![], 1),
        // Parts that are joined in another way are copied.
        ("b = Reshape (a, others)  c = Transpose (b)", vec!["Transpose", "Reshape", "Transpose"], 2),
    ] {
        let text = format!(
            "g (float[6, 4, 10] x) => (y) <int64[1] flat = {{240}}, int64[2] rows = {{24, 10}}, int64[2] others = {{16, 15}},
            int64[3] turned = {{10, 4, 6}}, int64[4] parts = {{4, 3, 2, 10}}> {{
                {TURN}  {views}  y = Cos (c)
            }}"
        );
        let graph = passed(&common::graph(&text), &Target::cuda());
        let names = graph.order().expect("no cycle").into_iter().map(|node| graph.node(node).op_name());
        let names: Vec<_> = names.filter(|name| ["Reshape", "Transpose"].contains(name)).collect();
        assert_eq!((names, kernels(&text).len()), (left, steps), "{views}");
    }
}

/// Runs the passes for a GPU with tensor cores and libraries, and compares what the graph means before and behind them.
fn keeps_its_meaning(text: &str, tolerance: f64) -> Graph {
    let graph = common::graph(text);
    let shapes = graph.inputs().iter().map(|&input| graph.fact(input).shape.clone());
    let mut state = 5;
    let inputs: Vec<_> = shapes.map(|shape| common::random(&mut state, &shape)).collect();
    let expected = &reference::run(&graph, &inputs).expect("it has a meaning")[0];
    let passed = passed(&graph, &Target::cuda());
    let found = &reference::run(&passed, &inputs).expect("it has a meaning")[0];
    common::agrees(found, expected, tolerance).unwrap_or_else(|e| panic!("{text}: {e}"));
    passed
}

fn count(graph: &Graph, op: &str) -> usize {
    graph.order().expect("no cycle").iter().filter(|&&node| graph.node(node).op_name() == op).count()
}

#[test]
fn transposed_convolutions_without_strides_are_convolutions_on_cuda() {
    for (x, w, attrs, to, turned) in [
        ("2, 3, 5, 4", "3, 6, 1, 1", "", 16, true),
        ("1, 3, 5, 4", "3, 2, 3, 2", "pads = [1, 0, 1, 1]", 16, true),
        ("1, 3, 5, 4", "3, 2, 3, 2", "pads = [2, 1, 0, 0], dilations = [2, 3]", 16, true),
        ("1, 3, 7", "3, 2, 3", "pads = [1, 2]", 16, true),
        // A convolution has no pads below zero, and spreads no image apart.
        ("1, 3, 7", "3, 2, 3", "pads = [3, 0]", 16, false),
        ("1, 3, 5, 4", "3, 2, 3, 2", "strides = [2, 1]", 16, false),
        ("1, 4, 5, 4", "4, 2, 3, 2", "group = 2", 16, false),
        ("1, 3, 7", "3, 2, 3", "pads = [1, 2]", 1, false),
    ] {
        let attrs = if attrs.is_empty() { String::new() } else { format!("<{attrs}>") };
        let text = format!(
            "g (float[{x}] x, float[{w}] w) => (y) {{ a = Cast <to = {to}> (x) b = Cast <to = {to}> (w)
            t = ConvTranspose {attrs} (a, b) y = Cast <to = 1> (t) }}"
        );
        let graph = keeps_its_meaning(&text, 1e-2);
        assert_eq!(count(&graph, "plimsoll.Conv"), usize::from(turned), "{text}");
        assert_eq!(count(&graph, "plimsoll.ConvTranspose"), usize::from(!turned), "{text}");
    }
}

#[test]
fn rows_of_halves_are_lengthened_where_tensor_cores_are_fed_from_them() {
    const HEAD: &str = "a = Cast <to = 16> (x) b = Cast <to = 16> (w)";
    for (x, w, code, longer, parts) in [
        // The inner axis, and the columns; a constant's or a short one's stay.
        ("4, 1029", "1029, 6", "p = MatMul (a, b)", 2, 0),
        ("2, 4, 1029", "1029, 6", "p = MatMul (a, b)", 2, 0),
        ("4, 16", "16, 1029", "p = MatMul (a, b)", 1, 1),
        ("4, 16", "16, 1029", "o = MatMul (a, b) p = Transpose <perm = [1, 0]> (o)", 1, 1),
        ("4, 1029", "1029, 1031", "p = MatMul (a, b)", 3, 1),
        ("4, 1032", "1032, 6", "p = MatMul (a, b)", 0, 0),
        ("4, 29", "29, 6", "p = MatMul (a, b)", 0, 0),
        // Rows lie along the other axis of a transposed operand.
        ("4, 16", "1029, 16", "t = Transpose <perm = [1, 0]> (b) p = MatMul (a, t)", 0, 0),
        (
            "16, 1029",
            "6, 16",
            "t = Transpose <perm = [1, 0]> (a) s = Transpose <perm = [1, 0]> (b) p = MatMul (t, s)",
            0,
            0,
        ),
        // One longer operand serves two products.
        ("4, 1029", "1029, 6", "q = MatMul (a, b) t = Transpose <perm = [1, 0]> (q) p = MatMul (t, a)", 2, 1),
    ] {
        let text = format!("g (float[{x}] x, float[{w}] w) => (y) {{ {HEAD} {code} y = Cast <to = 1> (p) }}");
        let graph = keeps_its_meaning(&text, 2e-2);
        assert_eq!(count(&graph, "Concat"), longer, "{text}");
        assert_eq!(count(&graph, "Slice"), parts, "{text}");
    }
}

/// A graph of quantized matrices `x` of bytes and `w`, a constant of `k` by `n` bytes, with a product between them.
fn quantized(x: &str, w: &str, per: usize, nodes: &str) -> Graph {
    let list =
        |n: usize, number: &dyn Fn(usize) -> i64| (0..n).map(|i| number(i).to_string()).collect::<Vec<_>>().join(", ");
    let low = if w == "int8" { -128 } else { 0 };
    let byte = |i: usize| low + (i as i64 * 89 + i as i64 / 7) % 256;
    let scales = (0..per).map(|i| format!("{}", 0.0078125 * (1 + i % 3) as f64)).collect::<Vec<_>>().join(", ");
    common::graph(&format!(
        "g ({x}[2, 6, 20] x, {x} zx) => (y)
        <{w}[20, 12] w = {{{}}}, {w}[12, 20] turned = {{{}}}, {w}[12, 20, 1] filters = {{{}}}, {w}[12, 2, 10] long = {{{}}},
        {w}[6, 1, 40] own = {{{}}}, {w}[{per}] zw = {{{}}}, float[{per}] sw = {{{scales}}},
        float sx = {{0.125}}, {x} zc = {{7}}> {{ {nodes} }}",
        list(240, &byte),
        list(240, &byte),
        list(240, &byte),
        list(240, &byte),
        list(240, &byte),
        list(per, &|i| low + 128 + i as i64 % 2),
    ))
}

/// Products of quantized matrices are products of their bytes, whose sums are exact, and their weights take as many bytes as they have.
#[test]
fn products_of_quantized_matrices_are_products_of_bytes() {
    let forms = [
        (1, "y = MatMulInteger (x, w, zx, zw)"),
        (12, "y = MatMulInteger (x, w, zx, zw)"),
        (1, "y = MatMulInteger (x, w)"),
        (12, "a = DequantizeLinear (x, sx, zx)  b = DequantizeLinear <axis = 1> (w, sw, zw)  y = MatMul (a, b)"),
        (
            12,
            "a = DequantizeLinear (x, sx, zc)  b = DequantizeLinear <axis = 0> (turned, sw, zw)  t = Transpose (b)  y = MatMul (a, t)",
        ),
        (
            1,
            "t = Transpose <perm = [0, 2, 1]> (x)  a = DequantizeLinear (t, sx, zc)  b = DequantizeLinear (filters, sw, zw)  y = Conv <strides = [4]> (a, b)",
        ),
        (
            12,
            "t = Transpose <perm = [0, 2, 1]> (x)  a = DequantizeLinear (t, sx, zc)  b = DequantizeLinear <axis = 0> (filters, sw, zw)  y = Conv <pads = [1, 0]> (a, b)",
        ),
        (
            1,
            "a = DequantizeLinear (x, sx, zc)  b = DequantizeLinear (long, sw, zw)  y = Conv <group = 3, pads = [4, 5]> (a, b)",
        ),
        (
            1,
            "a = DequantizeLinear (x, sx, zc)  b = DequantizeLinear (own, sw, zw)  y = Conv <group = 6, pads = [20, 20]> (a, b)",
        ),
    ];
    let target = Target::cpu(2);
    for (x, w) in ["uint8", "int8"].into_iter().flat_map(|x| ["uint8", "int8"].map(|w| (x, w))) {
        for (per, nodes) in forms {
            let graph = quantized(x, w, per, nodes);
            let low = if x == "int8" { -128 } else { 0 };
            let dtype = graph.fact(graph.inputs()[0]).dtype;
            let data: Vec<f64> = (0..240).map(|i| f64::from(low + (i * 71 + i / 5) % 256)).collect();
            let inputs =
                [Tensor::from_f64(dtype, [2, 6, 20], &data), Tensor::from_f64(dtype, [], &[f64::from(low + 117)])];
            let expected = reference::run(&graph, &inputs).expect("it has a meaning");
            let whole = Recipe::default().whole(graph.clone(), &target).expect("the passes run");
            let (plan, constants) = plan::compile(&whole, &target, &Limits { memory: None }).expect("it is planned");
            let bytes =
                |step: &Step| plan.programs[0].kernels[step.kernel].reads.first().is_some_and(|r| r.dtype.is_byte());
            let products = plan.programs[0]
                .steps
                .iter()
                .filter(|s| ["matmul", "conv"].contains(&plan.programs[0].kernels[s.kernel].template.name()));
            let products: Vec<bool> = products.map(bytes).collect();
            assert!(!products.is_empty() && products.iter().all(|&of_bytes| of_bytes), "{x} {w} {nodes}");
            let packed = plan.programs[0].constants.iter().map(|c| plan.programs[0].buffers[c.buffer].bytes).max();
            assert!(packed <= Some(20 * 16), "{x} {w} {nodes}: {packed:?}");
            let mut exec = Exec::load(Box::new(Cpu::new(2)), plan.clone(), &constants, &|_| {}).expect("it loads");
            let found = exec.run(&inputs).expect("it runs");
            // Sums are exact, and scales are powers of two, but for their multiples of three.
            let tolerance = if found[0].dtype() == DType::F32 { 1e-6 } else { 0.0 };
            common::agrees(&found[0], &expected[0], tolerance).unwrap_or_else(|e| panic!("{x} {w} {nodes}: {e}"));
        }
    }
}

/// Bytes that are dequantized and quantized anew by one scale are the same bytes, moved by what lies between. Readers of bytes make floats of them
/// on their own: no step but the last stores any.
#[test]
fn quantized_values_are_stored_as_bytes() {
    let product = "b = DequantizeLinear <axis = 1> (w, sw, zw)  p = MatMul (a, b)";
    let turned = |zero: &str| {
        format!(
            "d = DequantizeLinear (x, sx, zc)  t = Transpose <perm = [0, 2, 1]> (d)  q = QuantizeLinear (t, sx, {zero})
             e = DequantizeLinear (q, sx, {zero})  u = Transpose <perm = [0, 2, 1]> (e)  r = QuantizeLinear (u, sx, {zero})
             a = DequantizeLinear (r, sx, {zero})  {product}  y = Relu (p)"
        )
    };
    let plain = format!("a = DequantizeLinear (x, sx, zc)  {product}  y = Relu (p)");
    let read_twice = format!(
        "a = DequantizeLinear (x, sx, zc)  {product}  q = QuantizeLinear (p, sx, zc)  d = DequantizeLinear (q, sx, zc)
         g = Sigmoid (d)  m = ReduceMax <axes = [2]> (d)  y = Add (g, m)"
    );
    let target = Target::cpu(2);
    for x in ["uint8", "int8"] {
        let low = if x == "int8" { -128 } else { 0 };
        let run = |nodes: &str| {
            let graph = quantized(x, "int8", 1, nodes);
            let dtype = graph.fact(graph.inputs()[0]).dtype;
            let data: Vec<f64> = (0..240).map(|i| f64::from(low + (i * 71 + i / 5) % 256)).collect();
            let inputs =
                [Tensor::from_f64(dtype, [2, 6, 20], &data), Tensor::from_f64(dtype, [], &[f64::from(low + 117)])];
            let expected = reference::run(&graph, &inputs).expect("it has a meaning");
            let whole = Recipe::default().whole(graph, &target).expect("the passes run");
            let (plan, constants) = plan::compile(&whole, &target, &Limits { memory: None }).expect("it is planned");
            let mut exec = Exec::load(Box::new(Cpu::new(2)), plan.clone(), &constants, &|_| {}).expect("it loads");
            let found = exec.run(&inputs).expect("it runs");
            common::agrees(&found[0], &expected[0], 1e-6).unwrap_or_else(|e| panic!("{x} {nodes}: {e}"));
            plan.programs[0]
                .steps
                .iter()
                .map(|s| plan.programs[0].kernels[s.kernel].writes[0].dtype)
                .collect::<Vec<_>>()
        };
        // Products of two signed operands add up the rows of one.
        let stored = run(&plain);
        assert_eq!(run(&turned("zc")), stored, "{x}");
        assert!(run(&turned("zx")).len() > stored.len(), "{x}: an unknown zero point may be another one");
        let stored = run(&read_twice);
        let (last, before) = stored.split_last().expect("a plan has steps");
        assert_eq!(*last, DType::F32);
        assert!(before.last().is_some_and(|dtype| dtype.is_byte()) && !before.contains(&DType::F32), "{x}: {stored:?}");
    }
}
