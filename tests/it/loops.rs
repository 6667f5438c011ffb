//! Loops: one step of a plan, however long they run, on every backend, forwards and back.

use crate::common::{self, backends};
use plimsoll::internals::kernel::{Repeat, Template};
use plimsoll::internals::ops::REPEAT;
use plimsoll::internals::plan::{Job, check, plan};
use plimsoll::internals::{onnx, reference};
use plimsoll::{DType, Graph, Limits, Planning, Recipe, Target, Tensor, Trace};

/// The gates of each recurrent row.
const ROWS: [(&str, usize); 3] = [("RNN", 1), ("GRU", 3), ("LSTM", 4)];

/// A recurrent row over a sequence, with the derivatives of the sum of squares of all that it gives.
fn recurrent(op: &str, gates: usize, steps: usize, derives: bool) -> Graph {
    let (batch, input, hidden) = (2, 3, 5);
    let g = Trace::new(op);
    let x = g.input("x", DType::F32, [steps, batch, input]);
    let w = g.input("w", DType::F32, [1, gates * hidden, input]);
    let r = g.input("r", DType::F32, [1, gates * hidden, hidden]);
    let all = g.outputs(op, &[Some(x), Some(w), Some(r)], plimsoll::Attrs::new());
    let loss = all.iter().map(|y| (*y * *y).reduce_sum(&[], false)).reduce(|a, b| a + b).expect("it has outputs");
    if derives {
        for (name, gradient) in ["dx", "dw", "dr"].into_iter().zip(g.grad(loss, &[x, w, r])) {
            g.output(name, gradient);
        }
    }
    all.iter().enumerate().for_each(|(port, y)| g.output(&format!("y{port}"), *y));
    g.finish().expect("the row takes these inputs")
}

#[test]
fn sequences_and_their_derivatives_agree_with_the_reference() {
    let mut state = 11;
    for opener in backends() {
        for (op, gates) in ROWS {
            for (steps, derives) in [(2, false), (9, true), (70, true)] {
                let graph = recurrent(op, gates, steps, derives);
                common::runs_as_the_reference(&graph, &opener, &mut state);
            }
        }
    }
}

#[test]
fn a_sequence_is_one_step_however_long() {
    for target in [Target::cpu(2), Target::wgpu(), Target::cuda()] {
        for (op, gates) in ROWS {
            let plan = |steps: usize| {
                let graph = recurrent(op, gates, steps, true);
                Recipe::default().plan(graph, &target, &Limits { memory: None }).expect("it is planned")
            };
            let [short, long] = [plan(16), plan(65_536)];
            check::check(&long).expect("the plan is sound");
            assert_eq!(short.programs[0].steps.len(), long.programs[0].steps.len(), "{op} on {}", target.name);
            let walks = long.programs[0].kernels.iter().filter(|kernel| kernel.repeat().is_some()).count();
            assert_eq!(walks, 2, "{op} on {}: one loop walks on, one back", target.name);
            // Of a row that is thousands of times as long, nothing but the rows grows.
            let ports =
                |plan: &plimsoll::Plan| plan.programs[0].summary.input_bytes + plan.programs[0].summary.output_bytes;
            let rows = long.programs[0].summary.arena_bytes / ports(&long);
            assert!(rows <= 12, "{op} on {}: {rows} times its inputs and outputs", target.name);
        }
    }
}

/// Two sequences, one after the other: both count from the same number, and programs share constants.
#[test]
fn programs_of_several_loops_share_their_constants() {
    let g = Trace::new("two");
    let x = g.input("x", DType::F32, [6, 2, 5]);
    let weights = |name: &str| g.constant(name, Tensor::from_f64(DType::F32, [1, 5, 5], &[0.25; 25]));
    let layer = |x, n: &str| {
        let all = g.outputs(
            "RNN",
            &[Some(x), Some(weights(&format!("w{n}"))), Some(weights(&format!("r{n}")))],
            plimsoll::Attrs::new(),
        );
        all[0].squeeze(&[1])
    };
    g.output("y", layer(layer(x, "1"), "2"));
    let graph = g.finish().expect("the rows take these inputs");
    for target in [Target::cpu(2), Target::wgpu(), Target::cuda()] {
        let job = Job {
            programs: ["a", "b"].map(|name| (name.to_owned(), graph.clone().into())).into(),
            ..Job::of(graph.clone(), &target)
        };
        let planned = plan(&job).expect("it is planned");
        check::check(&planned.plan).expect("the plan is sound");
    }
}

/// Of files: a `Scan` that reads two inputs along other axes and backwards, a `Loop` that computes of its number, and one that ends where the
/// run says.
const FILES: [&str; 3] = [
    "g (float[2] h, float[2, 7] x, float[9, 2] w) => (float[2] last, float[2, 7] all) {
        v = Slice (w, from, to)
        last, all = Scan <num_scan_inputs = 2, scan_input_axes = [1, 0], scan_input_directions = [0, 1], scan_output_axes = [1], \
            body = b (float[2] a, float[2] s, float[2] t) => (float[2] c, float[2] d) { e = Mul (a, t) c = Add (e, s) d = Neg (c) }> (h, x, v)
    }",
    "g (float[2] x, float[2] w) => (float[2] y, float[11, 2] rows) {
        y, rows = Loop (eleven, , x) <body = b (int64 i, bool go, float[2] a) => (bool on, float[2] c, float[2] d) {
            on = Identity (go) f = Cast <to = 1> (i) g = Mul (w, f) c = Add (a, g) d = Sin (c) }>
    }",
    "g (float[2] x, float[2] w) => (float[2] y) {
        y = Loop (eleven, , x) <body = b (int64 i, bool go, float[2] a) => (bool on, float[2] c) {
            c = Add (a, w) s = ReduceSum <keepdims = 0> (c) on = Less (s, two) }>
    }",
];

fn file(source: &str) -> Graph {
    let known = "<int64 eleven = {11}, float two = {2}, int64[1] from = {1}, int64[1] to = {8}> {";
    let at = source.find("{\n").expect("a body");
    common::graph(&[&source[..at], known, &source[at + 1..]].concat())
}

fn loops(graph: &Graph) -> usize {
    let order = graph.order().expect("no cycles");
    order.into_iter().filter(|&node| graph.node(node).op_name() == REPEAT).count()
}

#[test]
fn loops_of_files_are_loops() {
    let mut state = 5;
    for source in FILES {
        let graph = file(source);
        assert_eq!(loops(&graph), 1, "{source}");
        for opener in backends() {
            common::runs_as_the_reference(&graph, &opener, &mut state);
        }
    }
}

/// Loops are written as ONNX has them, and read as what they were.
#[test]
fn written_loops_compute_the_same() {
    let recurrent = ROWS.map(|(op, gates)| recurrent(op, gates, 6, true));
    for graph in FILES.map(file).into_iter().chain(recurrent) {
        let model = onnx::Model::new(onnx::export(&graph).expect("it is written"));
        let again = onnx::import(&model, &[]).expect("it is read");
        assert_eq!(loops(&again), loops(&graph), "{}", graph.name);
        let mut state = 3;
        let inputs: Vec<_> = graph.inputs().iter().map(|&v| common::random(&mut state, &graph.fact(v).shape)).collect();
        let [found, expected] = [&again, &graph].map(|graph| reference::run(graph, &inputs).expect("it runs"));
        for (found, expected) in found.iter().zip(&expected) {
            common::agrees(found, expected, 1e-9).unwrap_or_else(|e| panic!("{}: {e}", graph.name));
        }
    }
}

/// A loop whose launches do not fit together is refused: what begins it, which rows it has, where its launches work.
#[test]
fn loops_that_do_not_fit_together_are_refused() {
    for target in [Target::cpu(2), Target::wgpu(), Target::cuda()] {
        let graph = recurrent("GRU", 3, 4, false);
        let plan = Recipe::default().plan(graph, &target, &Limits { memory: None }).expect("it is planned");
        check::check(&plan).expect("the plan is sound");
        let number =
            plan.programs[0].kernels.iter().position(|kernel| kernel.repeat().is_some()).expect("it has a loop");
        let own = plan.programs[0].kernels[number].repeat().expect("it is a loop").clone();
        let mut mutants: Vec<(String, Repeat)> = Vec::new();
        let mut mutant = |what: String, change: &dyn Fn(&mut Repeat)| {
            let mut changed = own.clone();
            change(&mut changed);
            mutants.push((what, changed));
        };
        for times in [0, 3, 5, u64::MAX] {
            mutant(format!("{times} steps"), &move |of| of.times = times);
        }
        for at in 0..own.first.len() {
            mutant(format!("without first launch {at}"), &move |of| drop(of.first.remove(at)));
        }
        for (at, inner) in own.each.iter().enumerate() {
            let reads = own.kernels[inner.kernel].reads.len();
            mutant(format!("launch {at} has fewer arguments"), &move |of| _ = of.each[at].args.pop());
            mutant(format!("launch {at} is of no kernel"), &move |of| of.each[at].kernel = of.kernels.len());
            for arg in 0..inner.args.len() {
                let named = |what: &str| format!("argument {arg} of launch {at} {what}");
                mutant(named("is nowhere"), &move |of| of.each[at].args[arg].slot = 1 << 10);
                mutant(named("is beyond"), &move |of| of.each[at].args[arg].offset = 1 << 40);
                mutant(named("is not aligned"), &move |of| of.each[at].args[arg].offset += 1);
                mutant(named("is short"), &move |of| of.each[at].args[arg].bytes = 0);
                if arg >= reads {
                    mutant(named("is a read of the loop"), &move |of| of.each[at].args[arg].slot = 0);
                }
            }
        }
        for (what, changed) in mutants {
            let mut plan = plan.clone();
            plan.programs[0].kernels[number].template = Template::Repeat(Box::new(changed));
            assert!(check::check(&plan).is_err(), "on {}: {what}", target.name);
        }
    }
}
