//! The number is the process's: it needs what its plan says, and a few megabytes that any program needs.
//!
//! Each file is loaded and run in a process whose own memory is limited. The limit is what the plan says, 8 MiB, and 2 %. It is that of
//! memory that only this process can hold: pages of a mapped file are the system's.

use crate::common::{Folder, printed};
use plimsoll::internals::driver_memory;
use plimsoll::internals::dtype::DType::{self, F32, I64};
use plimsoll::internals::graph::Graph;
use plimsoll::internals::onnx;
use plimsoll::internals::onnx::proto::StringStringEntryProto;
use plimsoll::internals::op::{Attr, Attrs};
use plimsoll::internals::tensor::Tensor;
use plimsoll::internals::trace::{Trace, Var};
use prost::Message;

/// Writes a graph to a file, with its large constants in a second one. That one is sparse: their elements are zeros.
fn write(folder: &Folder, graph: &Graph) -> String {
    let mut model = onnx::export(graph).expect("it is exported");
    let entry = |key: &str, value: String| StringStringEntryProto { key: key.into(), value };
    let mut end = 0;
    for tensor in model.graph.iter_mut().flat_map(|graph| &mut graph.initializer) {
        let bytes = tensor.raw_data.len() as u64;
        if bytes >= 1 << 16 {
            tensor.raw_data.clear();
            tensor.data_location = 1;
            let location = [entry("location", "weights".into()), entry("offset", end.to_string())];
            tensor.external_data = location.into_iter().chain([entry("length", bytes.to_string())]).collect();
            end += bytes.next_multiple_of(4096);
        }
    }
    let weights = std::fs::File::create(folder.path("weights")).expect("a file for the weights");
    weights.set_len(end).expect("a sparse file");
    folder.file("model.onnx", model.encode_to_vec())
}

/// Runs a graph in a process that may take what its plan says, 8 MiB, and 2 %.
fn runs_within_the_plan(name: &str, graph: &Graph, flags: &[&str]) {
    let folder = Folder::new(&format!("whole-{name}"));
    let file = write(&folder, graph);
    let program = env!("CARGO_BIN_EXE_plimsoll");
    let states = flags.iter().take_while(|flag| **flag != "--iters");
    let plan =
        std::process::Command::new(program).args(["plan", &file, "--threads", "2", "--json"]).args(states).output();
    let plan = String::from_utf8(plan.expect("it starts").stdout).expect("it is text");
    let plan = printed(&["plan"], &plan);
    let bytes = plan["programs"][0]["summary"]["planned_bytes"].as_u64().expect("it is a number");
    let limit = (bytes + driver_memory::process(bytes)) >> 10;
    let command = format!("ulimit -d {limit}; exec \"$0\" run \"$@\" --backend cpu --threads 2");
    let output = std::process::Command::new("sh").args(["-c", &command, program, &file]).args(flags).output();
    let output = output.expect("sh runs");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{name}: {bytes} bytes planned, {limit} KiB allowed: {error}");
    std::fs::remove_dir_all(&folder.0).expect("the folder is there");
}

fn zeros<'g>(g: &'g Trace, name: &str, shape: &[usize]) -> Var<'g> {
    let bytes = vec![0; shape.iter().product::<usize>() * F32.size()];
    g.constant(name, Tensor::new(F32, shape, bytes).expect("a byte for each"))
}

/// Zeros that only this constant has: a small one is part of the file, and equal ones would be one.
fn small<'g>(g: &'g Trace, name: &str, len: usize) -> Var<'g> {
    let number = name.bytes().fold(1.0, |sum, byte| sum * 1.01 + f64::from(byte));
    g.constant(name, Tensor::from_f64(F32, [len], &vec![1.0 / number; len]))
}

/// A convolution, normalised or with a bias.
fn conv<'g>(
    g: &'g Trace,
    x: Var<'g>,
    name: &str,
    [outputs, inputs, kernel]: [usize; 3],
    stride: i64,
    norm: bool,
) -> Var<'g> {
    let weight = zeros(g, name, &[outputs, inputs, kernel, kernel]);
    let part = |what: &str| small(g, &format!("{name}.{what}"), outputs);
    let bias = (!norm).then(|| part("bias"));
    let y = x.conv2d(weight, bias, stride, kernel as i64 / 2, 1);
    if norm { y.batch_norm(part("scale"), part("shift"), part("mean"), part("variance"), 1e-5) } else { y }
}

/// ResNet-50 on a small image.
fn resnet(norm: bool) -> Graph {
    let g = Trace::new("resnet-50");
    let x = g.input("x", F32, [1, 3, 64, 64]);
    let mut x = conv(&g, x, "stem", [64, 3, 7], 2, norm).relu().max_pool2d(3, 2, 1);
    let mut inputs = 64;
    for (stage, (blocks, width)) in [(3, 64), (4, 128), (6, 256), (3, 512)].into_iter().enumerate() {
        for block in 0..blocks {
            let stride = if stage > 0 && block == 0 { 2 } else { 1 };
            let name = |part: &str| format!("{stage}.{block}.{part}");
            let y = conv(&g, x, &name("a"), [width, inputs, 1], 1, norm).relu();
            let y = conv(&g, y, &name("b"), [width, width, 3], stride, norm).relu();
            let y = conv(&g, y, &name("c"), [4 * width, width, 1], 1, norm);
            if block == 0 {
                x = conv(&g, x, &name("skip"), [4 * width, inputs, 1], stride, norm);
            }
            x = (x + y).relu();
            inputs = 4 * width;
        }
    }
    let pooled = x.reduce_mean(&[2, 3], false);
    g.output("y", pooled.matmul(zeros(&g, "head", &[2048, 1000])) + small(&g, "head.bias", 1000));
    g.finish().expect("the graph is sound")
}

const WIDTH: usize = 768;

fn norm<'g>(g: &'g Trace, x: Var<'g>, name: &str) -> Var<'g> {
    let part = |what: &str| small(g, &format!("{name}.{what}"), WIDTH);
    x.layer_norm(part("scale"), Some(part("shift")), -1, 1e-5)
}

fn linear<'g>(g: &'g Trace, x: Var<'g>, name: &str, [from, to]: [usize; 2]) -> Var<'g> {
    x.matmul(zeros(g, name, &[from, to])) + small(g, &format!("{name}.bias"), to)
}

/// Twelve layers of attention over 768 channels; the table of words makes the logits, too, if it is `tied`.
fn transformer(name: &str, words: usize, positions: usize, tied: bool) -> Graph {
    const ROWS: usize = 4;
    let g = Trace::new(name);
    let words = zeros(&g, "words", &[words, WIDTH]);
    let places = zeros(&g, "places", &[positions, WIDTH]);
    let mut x = words.gather(g.input("ids", I64, [1, ROWS]), 0) + places.gather(g.input("at", I64, [1, ROWS]), 0);
    for layer in 0..12 {
        let name = |part: &str| format!("{layer}.{part}");
        let y = norm(&g, x, &name("before"));
        let [q, k, v] =
            ["q", "k", "v"].map(|part| linear(&g, y, &name(part), [WIDTH; 2]).reshape(&[1, ROWS as i64, 12, 64]));
        let weights = q.transpose(&[0, 2, 1, 3]).matmul(k.transpose(&[0, 2, 3, 1])) * 0.125;
        let heads = weights.softmax(-1).matmul(v.transpose(&[0, 2, 1, 3]));
        let heads = heads.transpose(&[0, 2, 1, 3]).reshape(&[1, ROWS as i64, WIDTH as i64]);
        x = x + linear(&g, heads, &name("out"), [WIDTH; 2]);
        let inner = linear(&g, norm(&g, x, &name("between")), &name("up"), [WIDTH, 4 * WIDTH]);
        x = x + linear(&g, inner * (inner * 1.702).sigmoid(), &name("down"), [4 * WIDTH, WIDTH]);
    }
    let x = norm(&g, x, "last");
    g.output("y", if tied { x.matmul(words.transpose(&[1, 0])) } else { x });
    g.finish().expect("the graph is sound")
}

#[test]
fn networks_run_within_their_plans() {
    runs_within_the_plan("resnet-50", &resnet(false), &[]);
    runs_within_the_plan("resnet-50-normalised", &resnet(true), &[]);
    runs_within_the_plan("bert-base", &transformer("bert-base", 30522, 512, false), &[]);
    runs_within_the_plan("gpt-2", &transformer("gpt-2", 50257, 1024, true), &[]);
}

/// A constant comes from its file to its place without a copy beside it, whatever is computed on the way.
#[test]
fn constants_are_computed_within_the_plan() {
    const SIDE: usize = 2048;
    type Make = for<'g> fn(&'g Trace, Var<'g>, Var<'g>) -> Var<'g>;
    let cases: [(&str, Make); 11] = [
        ("packed", |_, w, x| x.matmul(w)),
        ("packed-transposed", |_, w, x| x.matmul(w.transpose(&[1, 0]))),
        ("transposed", |g, w, _| w.transpose(&[1, 0]).gather(g.input("rows", I64, [4]), 0)),
        ("scaled", |g, w, _| (w * 0.5f32).gather(g.input("rows", I64, [4]), 0)),
        ("broadcast", |g, w, _| (w * small(g, "row", SIDE)).gather(g.input("rows", I64, [4]), 0)),
        ("scaled-packed", |g, w, x| x.matmul(w * small(g, "row", 2 * SIDE))),
        ("scaled-packed-transposed", |g, w, x| x.matmul((w * small(g, "row", SIDE)).transpose(&[1, 0]))),
        ("cast-packed", |_, w, x| x.matmul(w.cast(DType::F16).cast(F32))),
        ("filled-packed", |g, _, x| {
            let shape = Attrs::new().with("input", vec![SIDE as i64; 2]);
            let value = Attr::Tensor(Tensor::from_f64(F32, [1], &[0.25]));
            x.matmul(g.op("ConstantOfShape", &[], shape.with("value", value)))
        }),
        ("reduced", |_, w, x| x + w.reduce_max(&[0], false)),
        ("reduced-rows", |_, w, x| x + w.reduce_sum(&[1], false)),
    ];
    for (name, make) in cases {
        let g = Trace::new(name);
        // One of them is 64 MiB.
        let side = if name == "scaled-packed" { 2 * SIDE } else { SIDE };
        let (w, x) = (zeros(&g, "w", &[side, side]), g.input("x", F32, [8, side]));
        g.output("y", make(&g, w, x));
        g.output("z", x.relu());
        runs_within_the_plan(name, &g.finish().expect("the graph is sound"), &[]);
    }
}

/// Outputs and states come to the host a piece at a time.
#[test]
fn outputs_and_states_are_seen_within_the_plan() {
    let g = Trace::new("seen");
    for name in ["a", "b", "c", "d", "e"] {
        let state = g.input(name, F32, [1000, 1000]);
        g.output(&format!("next {name}"), state + 1.0);
        g.output(&format!("{name} now"), state.tanh());
    }
    let flags = ["--state", "*=next *", "--iters", "2"];
    runs_within_the_plan("seen", &g.finish().expect("the graph is sound"), &flags);
}
