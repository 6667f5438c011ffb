//! Graphs whose extents exceed, or nearly exceed, any memory. Each is planned or refused, with work that does not grow with the extents.

use crate::common::Folder;
use plimsoll::Tensor;
use plimsoll::internals::backend::cpu::Cpu;
use plimsoll::internals::backend::{Backend, Launch, SegmentId, Slice};
use plimsoll::internals::constant::Constant;
use plimsoll::internals::dtype::DType;
use plimsoll::internals::expr::{Body, Expr};
use plimsoll::internals::graph::Graph;
use plimsoll::internals::kernel::algorithm::Schedule;
use plimsoll::internals::kernel::{Kernel, Operand, Template, schedule};
use plimsoll::internals::onnx;
use plimsoll::internals::plan::Planning;
use plimsoll::internals::plan::check::check;
use plimsoll::internals::plan::tell::diff::diff;
use plimsoll::internals::plan::{Limits, Plan, Recipe};
use plimsoll::internals::report;
use plimsoll::internals::session::{Choice, Options, Session};
use plimsoll::internals::shape::{Access, Shape};
use plimsoll::internals::target::{Memory, Target};
use plimsoll::internals::trace::Trace;
use std::path::Path;

fn imported(text: &str, dims: &[(String, usize)]) -> Result<Graph, String> {
    let text = format!("<ir_version: 10, opset_import: [\"\" : 23]>\n{text}");
    let model = onnx::Model::new(onnx::text::parse(&text, Path::new("text")).expect("it parses"));
    onnx::import(&model, dims).map_err(|e| e.to_string())
}

fn planned(graph: Graph, target: &Target) -> Result<Plan, String> {
    Recipe::default().plan(graph, target, &Limits { memory: None }).map_err(|e| e.to_string())
}

/// With an extent of 0 a value has no bytes, whatever its other extents are. The others are still checked.
#[test]
fn extents_beyond_memory_are_refused_where_they_come_in() {
    let huge = "has extents larger than any memory";
    let given = "g (float[0, 2305843009213693952, 8] x) => (float[0] y) { y = Relu (x) }";
    let refused = imported(given, &[]).expect_err("an input");
    assert!(refused.contains(&format!("input 'x': f32[0,2305843009213693952,8] {huge}")), "{refused}");
    let named = "g (float[none, n, 8] x) => (float[a, b, c] y) { y = Relu (x) }";
    let refused = imported(named, &[("none".into(), 0), ("n".into(), 1 << 61)]).expect_err("a dim");
    assert!(refused.contains(&format!("input 'x': f32[0,2305843009213693952,8] {huge}")), "{refused}");
    let inferred =
        "g (float[0, 1073741824] x) => (float[a, b] y) <int64[2] often = {1, 1073741824}> { y = Tile (x, often) }";
    let refused = imported(inferred, &[]).expect_err("an output");
    assert!(refused.contains(&format!("(Tile): the output f32[0,1152921504606846976] {huge}")), "{refused}");

    let shape = [0, 1 << 61, 8];
    let traced = Trace::new("traced");
    traced.output("y", traced.input("x", DType::F32, shape));
    let refused = traced.finish().expect_err("an input").to_string();
    assert!(refused.contains(&format!("input 'x': f32[0,2305843009213693952,8] {huge}")), "{refused}");
    let none = Tensor::new(DType::F32, shape, Vec::new()).expect("no bytes");
    let constant = || Constant::new("c", none.clone());
    let traced = Trace::new("traced");
    traced.output("y", traced.constant("c", none.clone()).relu());
    let refused = traced.finish().expect_err("a constant").to_string();
    assert!(refused.contains(huge), "{refused}");
    // Nothing computes with this value.
    let mut graph = Graph::new("passed");
    let value = graph.constant(constant());
    graph.output("y", value);
    let refused = planned(graph, &Target::cpu(1)).expect_err("a constant");
    assert!(refused.contains(huge), "{refused}");
}

/// The host folds constants unless the result is much larger than they are.
#[test]
fn constants_that_grow_far_are_left_to_the_run() {
    let tiled = |often: i64| {
        let text = format!(
            "g () => (float[n] y) <float[1024] c = {{{}}}, int64[1] often = {{{often}}}> {{ y = Tile (c, often) }}",
            vec!["1.5"; 1024].join(", ")
        );
        planned(imported(&text, &[]).expect("a graph"), &Target::cpu(1)).expect("a plan")
    };
    let constants =
        |plan: &Plan| plan.programs[0].constants.iter().map(|c| plan.programs[0].buffers[c.buffer].bytes).sum::<u64>();
    assert_eq!(constants(&tiled(1 << 10)), 4 << 20);
    let large = tiled(1 << 20);
    assert!(constants(&large) <= 4096 && large.bytes() >= 4 << 30, "{} bytes", constants(&large));
}

/// Operators with too many parts for any plan, and operators that once looked at every element to infer a fact.
#[test]
fn nothing_is_counted_one_by_one() {
    let sums = "g (uint8[3, 8589934592] a, uint8[8589934592, 2] b) => (int32[3, 2] y) { y = MatMulInteger (a, b) }";
    let refused = planned(imported(sums, &[]).expect("a graph"), &Target::cpu(1)).expect_err("too many parts");
    assert!(refused.contains("expected sums of up to 4096 parts of 258 products each, found"), "{refused}");
    let filters = "g (uint8[1, 65536, 18, 17] x, uint8[65536, 65536, 17, 16] w) => (int32[n, c, h, k] y) { y = ConvInteger (x, w) }";
    let refused = planned(imported(filters, &[]).expect("a graph"), &Target::cpu(1)).expect_err("too many parts");
    assert!(refused.contains("expected sums of up to 4096 parts of 258 products each, found"), "{refused}");
    let parts = "g (float[1099511627776] x) => (float[n] y) { y = Split <num_outputs = 1099511627776> (x) }";
    let refused = imported(parts, &[]).expect_err("too many outputs");
    assert!(refused.contains("attribute 'num_outputs': expected 1 to 65536, found 1099511627776"), "{refused}");
    for pool in [
        "AveragePool <kernel_shape = [536870912], auto_pad = \"SAME_UPPER\"> (x)",
        "LpPool <kernel_shape = [536870912], pads = [268435456, 268435456]> (x)",
    ] {
        let text = format!("g (float[1, 2, 65536] x) => (float[n, c, w] y) {{ y = {pool} }}");
        planned(imported(&text, &[]).expect("a graph"), &Target::cpu(1)).expect("a plan");
    }
    // The strips of a tall attention are sized by the room there is.
    let tall = "g (float[1, 2, 8589934592, 8] q, float[1, 2, 255, 8] k) => (y) { y = Attention (q, k, k) }";
    let refused = planned(imported(tall, &[]).expect("a graph"), &Target::cpu(1)).expect_err("too tall");
    assert!(refused.contains("an attention of 8589934592 by 8 by 255 by 8 is too large"), "{refused}");
    for (values, node) in [
        ("int64[1] x", "<int64 n = {2147483647}, float[2] v = {0, 1}> { y = OneHot (x, n, v) }"),
        ("float[1099511627776, 1] x, int64[1] n", "{ y = ReverseSequence (x, n) }"),
        ("float[1, 1, 1, 1] q, float[1, 1, 536870912, 1] k", "{ y = Attention <is_causal = 1> (q, k, k) }"),
    ] {
        let graph = imported(&format!("g ({values}) => (y) {node}"), &[]);
        let refused = graph.and_then(|graph| planned(graph, &Target::cpu(1))).expect_err("too large a constant");
        assert!(refused.contains("expected a constant of at most 1073741824 bytes, found "), "{refused}");
    }
    // Far more parts than a plan can have steps, of a tensor that no segment can hold.
    let product = "g (float[3, 17, 2147483647] a, float[2147483647, 96] b) => (float[n, m, k] y) { y = MatMul (a, b) }";
    let refused = planned(imported(product, &[]).expect("a graph"), &Target::wgpu()).expect_err("too large");
    assert!(refused.contains("allocates at most"), "{refused}");
}

/// Any number of empty rows.
#[test]
fn kernels_that_write_nothing_take_no_time() {
    for (text, shape) in [
        (
            "g (float[0, 1, 6, 1099511627776] x) => (float[n, c, h, w] y) <float[4] s = {1, 1, 0.5, 0.5}> { y = Resize (x, , s) }",
            vec![0, 1, 6, 1 << 40],
        ),
        ("g (float[2147483648, 3, 0] x) => (float[n, m, k] y) { y = Softmax (x) }", vec![1 << 31, 3, 0]),
        ("g (float[1048576, 0, 1048576] x) => (float[n, m, k] y) { y = CumSum (x, at) }", vec![1 << 20, 0, 1 << 20]),
    ] {
        let text =
            text.replace("=> (float[n, m, k] y) { y = CumSum", "=> (float[n, m, k] y) <int64 at = {1}> { y = CumSum");
        let graph = imported(&text, &[]).expect("a graph");
        let session = Session::from_graph(graph, &Options::default().on(Choice::Cpu)).expect("a plan");
        let found =
            session.run(&[("x", Tensor::new(DType::F32, shape, Vec::new()).expect("no bytes"))]).expect("it runs");
        assert_eq!(found[0].1.shape().numel(), 0);
    }
}

/// The large constants of a decomposition are made when a device needs them, and equal ones are made once.
#[test]
fn constants_of_decompositions_are_made_when_they_are_asked_for() {
    let text = "g (float[100] a, float[100] b) => (y, z, w) <int64 at = {0}> {
        y = CumSum (a, at)
        z = CumSum (b, at)
        w = CumSum <reverse = 1> (a, at)
    }";
    let graph = imported(text, &[]).expect("a graph");
    let session = Session::from_graph(graph, &Options::default().on(Choice::Cpu)).expect("a plan");
    let masks = session.plan().programs[0]
        .constants
        .iter()
        .filter(|c| session.plan().programs[0].buffers[c.buffer].bytes >= 10_000);
    assert_eq!(masks.count(), 0);
    let ones = |n: f64| Tensor::from_f64(DType::F32, [100], &[n; 100]);
    let found = session.run(&[("a", ones(1.0)), ("b", ones(2.0))]).expect("it runs");
    let found: Vec<_> = found.iter().map(|(_, y)| y.to_f64()).collect();
    let line = |from: f64, step: f64| (0..100).map(|i| from + step * f64::from(i)).collect::<Vec<_>>();
    assert_eq!(found, [line(1.0, 1.0), line(2.0, 2.0), line(100.0, -1.0)]);
    // Planning makes no elements of this constant, whatever the binding.
    let text = "g (float[1, n, 1] x) => (y) { y = DFT <onesided = 1> (x) }";
    for n in [2048, 4096, 8192, 12288] {
        planned(imported(text, &[("n".into(), n)]).expect("a graph"), &Target::cpu(1)).expect("a plan");
    }
}

/// Inlining copies the names, lists and tensors of a function or body each time, so the copies are bounded.
#[test]
fn what_loops_repeat_is_bounded() {
    let long = "n".repeat(1 << 20);
    let list = |item: &dyn Fn(usize) -> String| (0..100_000).map(item).collect::<Vec<_>>().join(", ");
    let looped = |name: &str, outputs: &str, body: &str, collected: &str| {
        format!(
            "g (float[2] x) => (float[2] y) {{
                yes = Constant <value = bool {{1}}> ()
                [{name}] y{outputs} = Loop <body = b (int64 i, bool go, float[2] s) => (bool more, float[2] t{collected}) {{
                    more = Identity (go)  {body}
                }}> (, yes, x)
            }}"
        )
    };
    let endless = "it runs more than 8192 times: expected an 'M' or a 'cond' that ends it";
    let repeated = "functions and loops repeat more than 4194304 nodes, inputs and outputs, where 64 bytes count as one: expected fewer calls or iterations";
    // A long name keeps both its ends, even in a body without nodes.
    let bare = format!(
        "g (float[2] x) => (float[2] y) {{
            yes = Constant <value = bool {{1}}> ()
            [{long}] y = Loop <body = b (int64 i, bool go, float[2] s) => (bool go, float[2] s) {{ }}> (, yes, x)
        }}"
    );
    let refused = imported(&bare, &[]).expect_err("it does not end");
    assert!(refused.ends_with(endless) && refused.len() < 2000, "{} bytes", refused.len());
    for (name, outputs, body, collected, expected) in [
        (&long[..], String::new(), "t = Identity (s)".to_owned(), String::new(), endless),
        ("l", String::new(), format!("[{long}] t = Identity (s)"), String::new(), repeated),
        ("l", String::new(), format!("{long} = Identity (s)  t = Identity (s)"), String::new(), repeated),
        (
            "l",
            String::new(),
            format!("u = Constant <value_ints = [{}]> ()  t = Identity (s)", list(&|i| i.to_string())),
            String::new(),
            repeated,
        ),
        (
            "l",
            String::new(),
            format!("u = Constant <value = float[100000] {{{}}}> ()  t = Identity (s)", list(&|i| i.to_string())),
            String::new(),
            repeated,
        ),
        ("l", list(&|_| String::new()), "t = Identity (s)".into(), ", float[2] t".repeat(100_000), repeated),
    ] {
        let refused = imported(&looped(name, &outputs, &body, &collected), &[]).expect_err("it does not end");
        assert!(refused.ends_with(expected), "{}", &refused[..refused.len().min(3000)]);
        assert!(refused.starts_with(&format!("node '{}", &name[..1])), "{refused}");
        assert!(refused.len() < 2000, "{} bytes", refused.len());
    }
}

/// A plan may have nothing to do: its outputs have no elements.
#[test]
fn plans_without_steps_are_checked() {
    let text = "g (float[3] x, float[0] z) => (float[0] y) { y = Relu (z) }";
    let mut plan = planned(imported(text, &[]).expect("a graph"), &Target::cpu(1)).expect("a plan");
    plan.programs[0].steps.clear();
    plan.programs[0].kernels.clear();
    plan.programs[0].summary.steps = 0;
    check(&plan).expect("nothing is to be computed");
    assert!(report::diff(&diff(plan.first(), plan.first())).contains("the same: 3 buffers"));
}

/// A plan that says where the columns of a product go may say that they are apart. The product is then collected elsewhere, and has room.
#[test]
fn a_product_that_is_written_by_columns_has_its_workspace() {
    let (m, n, k) = (200, 72, 100);
    let operand =
        |shape: [usize; 2]| Operand { dtype: DType::F32, access: Access::contiguous(Shape::new(shape)), packed: false };
    let mut write = operand([m, n]);
    write.access.strides = [1, m as isize].into_iter().collect();
    let kernel = Kernel {
        template: Template::MatMul,
        shape: Shape::new([m, n]),
        reads: vec![operand([m, k]), operand([k, n])],
        writes: vec![write],
        body: Body::new(&[Expr::input(0, DType::F32)]),
        prologues: Vec::new(),
        workspace: 0,
        schedule: Schedule::Open,
    };
    let kernel = schedule::scheduled(&kernel, &Target::cpu(1)).expect("it has a schedule");
    let mut cpu = Cpu::new(1);
    let sizes = [m * k, k * n, m * n].map(|elements| 4 * elements as u64);
    let mut args = Vec::new();
    let mut bytes = 0;
    for size in sizes.into_iter().chain((kernel.workspace > 0).then_some(kernel.workspace)) {
        args.push(Slice { segment: SegmentId(0), offset: bytes, bytes: size });
        bytes = (bytes + size).next_multiple_of(256);
    }
    let result = args[2];
    let mut launch = Launch::new(cpu.compile(&kernel).expect("it compiles"), args);
    let segment = cpu.alloc(bytes, Memory::Device).expect("memory");
    launch.args.iter_mut().for_each(|arg| arg.segment = segment);
    let values = |count: usize, value: fn(usize) -> f64| {
        Tensor::from_f64(DType::F32, [count], &(0..count).map(value).collect::<Vec<_>>())
    };
    let (a, b) = (values(m * k, |i| (i % 7) as f64 - 3.0), values(k * n, |i| (i % 5) as f64 - 2.0));
    for (arg, tensor) in launch.args.iter().zip([&a, &b]) {
        cpu.write(*arg, tensor.bytes()).expect("it is written");
    }
    let record = cpu.record(std::slice::from_ref(&launch)).expect("it is recorded");
    cpu.replay(record).expect("it runs");
    let mut found = vec![0; result.bytes as usize];
    cpu.read(Slice { segment, ..result }, &mut found).expect("it is read");
    let found = Tensor::new(DType::F32, [n, m], found).expect("its bytes").to_f64();
    let (a, b) = (a.to_f64(), b.to_f64());
    for (i, j) in (0..m).flat_map(|i| (0..n).map(move |j| (i, j))) {
        let expected: f64 = (0..k).map(|l| a[i * k + l] * b[l * n + j]).sum();
        assert_eq!(found[j * m + i], expected, "row {i}, column {j}");
    }
}

/// A window takes no memory for padding that it reads wherever it lies, and no time.
#[test]
fn windows_far_beyond_their_data_are_cut() {
    for (pool, expected) in [
        ("MaxPool <kernel_shape = [536870912], auto_pad = \"SAME_UPPER\"> (x)", [4.0, 4.0, 4.0, 4.0]),
        ("AveragePool <kernel_shape = [536870912], pads = [268435456, 268435455]> (x)", [2.5, 2.5, 2.5, 2.5]),
        ("AveragePool <kernel_shape = [536870911], pads = [536870910, 0]> (x)", [1.0, 1.5, 2.0, 2.5]),
        ("MaxPool <kernel_shape = [3], dilations = [268435456], pads = [536870912, 0]> (x)", [1.0, 2.0, 3.0, 4.0]),
    ] {
        for x in ["x", "c"] {
            let text = format!(
                "g (float[1, 1, 4] x) => (float[n, c, w] y) <float[1, 1, 4] c = {{1, 2, 3, 4}}> {{ y = {} }}",
                pool.replace("(x)", &format!("({x})"))
            );
            let session =
                Session::from_graph(imported(&text, &[]).expect("a graph"), &Options::default().on(Choice::Cpu));
            let session = session.expect("a plan");
            assert!(session.plan().bytes() < 1 << 20, "{pool}: {} bytes", session.plan().bytes());
            let x = Tensor::from_f64(DType::F32, [1, 1, 4], &[1.0, 2.0, 3.0, 4.0]);
            assert_eq!(session.run(&[("x", x)]).expect("it runs")[0].1.to_f64(), expected, "{pool}");
        }
    }
}

/// Kernels cannot tell that an index is outside of what it looks up.
#[test]
fn constant_indices_outside_are_refused() {
    for (values, node, range) in [
        ("int64[2] i = {1, 3}", "Gather (x, i)", "-3 to 2, found 3"),
        ("int64[2] i = {-4, 1}", "Gather (x, i)", "-3 to 2, found -4"),
        ("int64[1, 2] i = {0, 4}", "Gather <axis = -1> (x, i)", "-4 to 3, found 4"),
        ("int64[1, 2] i = {0, 4}", "GatherElements <axis = 1> (x, i)", "-4 to 3, found 4"),
        ("int64[2, 2] i = {2, 3, 0, 4}", "GatherND (x, i)", "-4 to 3, found 4"),
        ("int64[3, 1] i = {2, 3, -5}", "GatherND <batch_dims = 1> (x, i)", "-4 to 3, found -5"),
        ("int64[1, 2] i = {3, 0}, float[1] u = {0}", "ScatterND (x, i, u)", "-3 to 2, found 3"),
        ("int64[1, 1] i = {9}, float[1, 1] u = {0}", "ScatterElements <axis = 1> (x, i, u)", "-4 to 3, found 9"),
    ] {
        let text = format!("g (float[3, 4] x) => (y) <{values}> {{ y = {node} }}");
        let refused = imported(&text, &[]).expect_err("an index is outside");
        assert!(refused.contains(&format!("input 'indices': expected indices from {range}")), "{refused}");
    }
    let text = "g (float[3, 4] x) => (y) <int64[2, 2] i = {2, 3, -3, -4}> { y = GatherND (x, i) }";
    imported(text, &[]).expect("each index is inside");
}

/// A link may lead to any file that the user can read. The caches of model hubs hold models as links into a folder with all of their files.
#[cfg(unix)]
#[test]
fn data_outside_of_the_models_folder_is_refused() {
    use std::os::unix::fs::symlink;

    let folder = Folder::new("links");
    let [blobs, models] = ["blobs", "models"].map(|name| folder.path(name));
    [&blobs, &models].into_iter().for_each(|folder| std::fs::create_dir(folder).expect("a folder"));
    let text = "<ir_version: 10, opset_import: [\"\" : 17]>\ng () => (float[2] y) <float[2] w = [\"location\": \"w.bin\"]> { y = Identity (w) }";
    let model = folder.file("models/model.onnxtxt", text);
    folder.file("blobs/1", text);
    let data = folder.file("blobs/2", [0; 8]);
    let link = Path::new(&models).join("w.bin");
    symlink(&data, &link).expect("a link");
    let refused = onnx::load(Path::new(&model)).expect_err("it leads out").to_string();
    assert!(refused.contains("outside the model's folder") && refused.contains("w.bin"), "{refused}");
    std::fs::remove_file(&model).expect("it is there");
    symlink(Path::new(&blobs).join("1"), &model).expect("a link");
    onnx::load(Path::new(&model)).expect("both are links to one folder");
}

/// A pipe that nobody writes to would be waited for, for ever.
#[cfg(unix)]
#[test]
fn a_pipe_is_no_model() {
    let folder = Folder::new("pipes");
    let pipe = folder.path("model.onnx");
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().expect("mkfifo runs").success());
    let refused = onnx::load(Path::new(&pipe)).expect_err("it is no file").to_string();
    assert!(refused.contains("expected a file, found a folder, a pipe or a device"), "{refused}");
}
