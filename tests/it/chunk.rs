//! Computing in chunks: rows tell how they are computed in parts, held to their own meaning; graphs in chunks agree on every backend, and
//! take less.

use crate::common;
use crate::common::{Opener, agrees, backends};
use crate::graphs;
use crate::samples;
use plimsoll::internals::exec::Exec;
use plimsoll::internals::graph::Graph;
use plimsoll::internals::op::{Call, Fact, Lower, ValueId};
use plimsoll::internals::pass::{Prepared, chunk};
use plimsoll::internals::plan::fit::chunks;
use plimsoll::internals::plan::{Limits, Plan, Recipe};
use plimsoll::internals::shape::{Access, Shape};
use plimsoll::internals::{onnx, ops, plan, reference, session};
use plimsoll::{Target, Tensor};
use std::collections::BTreeSet;
use std::path::Path;

/// The graph of a sample.
fn graph(sample: &samples::Sample) -> Graph {
    let mut graph = Graph::new(sample.op);
    let mut input = |(i, input): (usize, &Option<samples::Input>)| {
        input.as_ref().map(|t| graph.input(format!("x{i}"), Fact::new(t.dtype, t.shape.clone())))
    };
    let inputs: Vec<Option<ValueId>> = sample.inputs.iter().enumerate().map(&mut input).collect();
    let op = ops::find(sample.op).expect("a row");
    let node = graph.add(op, sample.op, &inputs, sample.attrs.clone(), &[]).expect("it is a call");
    for port in 0..graph.node(node).outputs.len() {
        graph.output(format!("y{port}"), node.output(port));
    }
    graph
}

/// Row-major values of a part of a tensor.
fn sliced(values: &[f64], shape: &Shape, axis: usize, start: usize, len: usize) -> Vec<f64> {
    let whole = Access::contiguous(shape.clone());
    let part = whole.slice(axis, start, 1, len);
    let mut index = vec![0; shape.len()];
    let next = |_| {
        let value = values[part.at(&index) as usize];
        plimsoll::internals::shape::advance(&mut index, &part.shape);
        value
    };
    (0..part.shape.numel()).map(next).collect()
}

/// Compares each part of a call's output, computed from parts as its row says, with the same part of the whole. Returns the number of such axes.
fn parts_are_parts(call: &Call, inputs: &[Option<Vec<f64>>]) -> usize {
    let values = |inputs: &[Option<Vec<f64>>]| -> Vec<f64> {
        let inputs: Vec<_> = inputs.iter().map(Option::as_deref).collect();
        call.eval(&inputs).expect("it has a value").remove(0)
    };
    let (fact, whole) = (call.infer().expect("facts").remove(0), values(inputs));
    let mut found = 0;
    for axis in 0..fact.shape.len() {
        let extent = fact.shape[axis];
        for units in (2..=extent).filter(|units| extent.is_multiple_of(*units)) {
            let Some(part) = call.part(axis, units) else { continue };
            found += 1;
            for (start, end) in [(0, 1), (1, units), (units / 2, units)] {
                let (mut facts, mut read) = (Vec::new(), Vec::new());
                for ((input, fact), along) in inputs.iter().zip(call.inputs).zip(&part.inputs) {
                    let (mut fact, mut input) = (fact.cloned(), input.clone());
                    if let (Some(fact), Some(values), &Some(axis)) = (&mut fact, &mut input, along) {
                        let size = fact.shape[axis] / units;
                        *values = sliced(values, &fact.shape, axis, start * size, (end - start) * size);
                        fact.shape[axis] = (end - start) * size;
                    }
                    facts.push(fact);
                    read.push(input);
                }
                let size = extent / units;
                let mut expected = fact.clone();
                expected.shape[axis] = (end - start) * size;
                let attrs = part.attrs(call.attrs, &expected.shape);
                let facts: Vec<_> = facts.iter().map(Option::as_ref).collect();
                let own = Call { op: call.op, attrs: &attrs, inputs: &facts };
                let what = format!("{} {:?}, {start}..{end} of {units} along {axis}", call.op.name, call.attrs);
                assert_eq!(own.infer(), Ok(vec![expected]), "{what}");
                let read: Vec<_> = read.iter().map(Option::as_deref).collect();
                let values = own.eval(&read).expect("it has a value").remove(0);
                let of_whole = sliced(&whole, &fact.shape, axis, start * size, (end - start) * size);
                let same = |(a, b): (&f64, &f64)| {
                    (a - b).abs() <= 1e-12 * b.abs().max(1.0) || a.is_nan() && b.is_nan() || a == b
                };
                assert!(values.iter().zip(&of_whole).all(same), "{what}: {values:?}, expected {of_whole:?}");
            }
        }
    }
    found
}

/// Operators with a kernel that cannot be computed in parts. Random numbers are drawn by the number of the element in the whole; a scatter takes
/// no memory beside its data; steps of a loop follow from each other.
const WHOLE: &[&str] = &["plimsoll.Dropout", "plimsoll.Random", "plimsoll.Repeat", "plimsoll.Scatter"];

#[test]
fn what_rows_say_of_parts_is_so() {
    let (mut parted, mut with_kernel) = (BTreeSet::new(), BTreeSet::new());
    for sample in samples::samples() {
        let graph = graph(&sample);
        let inputs: Vec<_> = sample.tensors().into_iter().flatten().collect();
        let unfused = Recipe { fuse: false, ..Recipe::default() };
        let Prepared { graph, .. } = unfused.whole(graph, &Target::cpu(1)).expect("the passes run");
        // Every intermediate value, computed node by node.
        let mut values = std::collections::HashMap::new();
        for (&input, tensor) in graph.inputs().iter().zip(&inputs) {
            values.insert(input, tensor.to_f64());
        }
        for id in graph.order().expect("it has an order") {
            let node = graph.node(id);
            let value = id.output(0);
            if let Some(constant) = graph.as_constant(value) {
                values.insert(value, constant.value().expect("it is there").to_f64());
            }
            let Some(op) = node.op() else { continue };
            let operands = graph.operands(id);
            let facts: Vec<_> = operands.iter().map(|v| v.map(|v| graph.fact(v))).collect();
            let read: Vec<_> = operands.iter().map(|v| v.map(|v| values[&v].clone())).collect();
            let call = Call { op, attrs: &node.attrs, inputs: &facts };
            if !matches!(op.lower, Lower::Decompose(_) | Lower::Const) {
                with_kernel.insert(op.name);
            }
            if parts_are_parts(&call, &read) > 0 {
                parted.insert(op.name);
            }
            let read: Vec<_> = read.iter().map(Option::as_deref).collect();
            let made = call.eval(&read).expect("it has values").into_iter().enumerate();
            values.extend(made.map(|(port, made)| (id.output(port), made)));
        }
    }
    let whole: Vec<_> = with_kernel.difference(&parted).copied().collect();
    assert_eq!(whole, WHOLE);
}

/// The live bytes from which on a graph is computed in chunks.
type Least = fn(&[u64]) -> u64;

const ALL: Least = |_| 0;
const HALF: Least = |levels| levels[levels.len() / 2];
const PEAK: Least = |levels| levels[levels.len() - 1];

/// A graph in chunks.
fn chunked(graph: &Graph, target: &Target, fuse: bool, chunks: usize, least: Least) -> plimsoll::Result<Prepared> {
    let mut graph = Recipe { fuse, ..Recipe::default() }.whole(graph.clone(), target).expect("the passes run");
    let (_, levels) = chunk::levels(&graph)?;
    chunk::run(&mut graph, chunks, least(&levels))?;
    Ok(graph)
}

/// Inputs that every operator accepts: whole numbers for types other than floats.
fn inputs(graph: &Graph, state: &mut u64) -> Vec<Tensor> {
    let made = |&v: &ValueId| {
        let fact = graph.fact(v);
        let values = common::random(state, &fact.shape).to_f64();
        let whole = |v: &f64| if fact.dtype.is_float() { *v } else { f64::from(u8::from(*v > 0.0)) };
        Tensor::from_f64(fact.dtype, fact.shape.clone(), &values.iter().map(whole).collect::<Vec<_>>())
    };
    graph.inputs().iter().map(made).collect()
}

/// Runs a graph in chunks, also on poisoned memory, and compares it with the reference of the whole.
fn runs_in_chunks(
    graph: &Graph,
    inputs: &[Tensor],
    (name, open): &Opener,
    fuse: bool,
    (chunks, least): (usize, Least),
) -> Option<Plan> {
    let backend = open();
    let passed = chunked(graph, backend.target(), fuse, chunks, least).ok()?;
    let expected = reference::run(graph, inputs).expect("the reference runs");
    let again = reference::run(&passed.graph, inputs).expect("the reference runs");
    let (plan, constants) = plan::compile(&passed, backend.target(), &Limits { memory: None }).expect("it is planned");
    let mut exec = Exec::load(backend, plan.clone(), &constants, &|_| {}).expect("it loads");
    let found = exec.run_poisoned(inputs).expect("it runs");
    for (found, expected) in found.iter().chain(&again).zip(expected.iter().chain(&expected)) {
        agrees(found, expected, 1e-5).unwrap_or_else(|e| panic!("{name}, {} in {chunks} chunks: {e}", graph.name));
    }
    Some(plan)
}

#[test]
fn every_row_in_chunks_agrees_with_the_whole() {
    for opener in backends() {
        // Shaders take their time to compile.
        let every = if opener.0 == "cpu" { 1 } else { 8 };
        let mut ran = 0;
        for sample in samples::samples().iter().step_by(every) {
            let inputs: Vec<_> = sample.tensors().into_iter().flatten().collect();
            for chunks in [2, 3] {
                ran += usize::from(runs_in_chunks(&graph(sample), &inputs, &opener, true, (chunks, ALL)).is_some());
            }
        }
        eprintln!("{}: {ran} samples", opener.0);
        assert!(ran > 300 / every, "{}: {ran}", opener.0);
    }
}

/// Files in `graphs/` with several elements along an outer axis: of the batch, or where that is one, of the next.
const GRAPHS: &[(&str, &[(&str, usize)])] = &[
    ("attention.onnxtxt", &[("batch", 5), ("sequence", 16)]),
    ("attention.onnxtxt", &[("batch", 1), ("sequence", 16)]),
    ("decode.onnxtxt", &[("batch", 4), ("past", 15)]),
    ("digits.onnx", &[("batch", 7)]),
    ("experts.onnxtxt", &[("tokens", 8)]),
    ("mlp.onnxtxt", &[("batch", 8)]),
    ("residual.onnxtxt", &[("batch", 4), ("height", 8), ("width", 8)]),
    ("unet.onnxtxt", &[("batch", 2), ("height", 16), ("width", 16)]),
];

#[test]
fn graphs_in_chunks_agree_with_the_whole() {
    for opener in backends() {
        for &(file, dims) in GRAPHS {
            let graph = graphs::import(file, dims);
            let inputs = inputs(&graph, &mut 7);
            for (fuse, chunks, least) in
                [(true, 2, ALL), (true, 3, ALL), (false, 3, ALL), (true, 3, HALF), (false, 2, HALF), (true, 2, PEAK)]
            {
                // Shaders take their time to compile.
                if opener.0 == "cpu" || fuse && chunks == 3 {
                    let plan = runs_in_chunks(&graph, &inputs, &opener, fuse, (chunks, least));
                    assert!(plan.is_some(), "{file} {dims:?} has no chunks");
                }
            }
        }
    }
}

fn planned(graph: &Graph, target: &Target, limits: &Limits, chunks: usize) -> Plan {
    let mut graph = Recipe::default().whole(graph.clone(), target).expect("the passes run");
    chunks::run(&mut graph, target, limits, chunks).expect("it has chunks");
    plan::planned(&graph, target, limits).expect("it is planned")
}

/// Keys that several heads share. A chunk has fewer rows of scores than one kernel needs to be worth it.
#[test]
fn attentions_stay_one_kernel() {
    let graph = common::graph(
        "grouped (float[1, 32, 64] x, float[1, 2, 32, 16] k, float[1, 2, 16, 32] t) => (float[1, 4, 32, 16] y)
         <int64[4] heads = {1, 32, 4, 16}, int64[1] two = {2}, int64[5] wide = {1, 2, 2, 32, 16}, int64[5] long = {1, 2, 2, 16, 32},
          int64[4] keys = {1, 4, 32, 16}, int64[4] turned = {1, 4, 16, 32}> {
           ku = Unsqueeze (k, two)  ke = Expand (ku, wide)  kr = Reshape (ke, keys)
           tu = Unsqueeze (t, two)  te = Expand (tu, long)  tr = Reshape (te, turned)
           h = Reshape (x, heads)  q = Transpose <perm = [0, 2, 1, 3]> (h)  r = Relu (q)
           s = MatMul (r, tr)  w = Softmax <axis = -1> (s)  y = MatMul (w, kr)
         }",
    );
    let inputs = inputs(&graph, &mut 3);
    for opener in backends() {
        let plan = runs_in_chunks(&graph, &inputs, &opener, true, (4, ALL)).expect("it has chunks");
        let attentions = plan.programs[0]
            .steps
            .iter()
            .filter(|step| plan.programs[0].kernels[step.kernel].template.name() == "attention");
        assert_eq!(attentions.count(), 4, "{}: {:?}", opener.0, plan.programs[0].steps);
    }
}

fn all_in_chunks(graph: &Graph, target: &Target, chunks: usize) -> Plan {
    let graph = chunked(graph, target, true, chunks, ALL).expect("it has chunks");
    plan::planned(&graph, target, &FREE).expect("it is planned")
}

const FREE: Limits = Limits { memory: None };

/// Chunks run one after another, without copies.
#[test]
fn chunks_shrink_activations() {
    // A library call's workspace does not shrink with its chunk, and streams run chunks side by side if that costs little.
    let rendered = Target { libraries: Default::default(), streams: 1, ..Target::cuda() };
    for target in [Target::cpu(2), rendered, Target::wgpu()] {
        for (file, dims) in [
            ("digits.onnx", &[("batch", 513)][..]),
            ("mlp.onnxtxt", &[("batch", 511)]),
            ("attention.onnxtxt", &[("batch", 32), ("sequence", 64)]),
        ] {
            let graph = graphs::import(file, dims);
            let [half, quarter] = [2, 4].map(|chunks| all_in_chunks(&graph, &target, chunks));
            let whole = planned(&graph, &target, &FREE, 1);
            let arena = |plan: &Plan| plan.programs[0].summary.arena_bytes;
            eprintln!("{} {file}: {} {} {}", target.name, arena(&whole), arena(&half), arena(&quarter));
            assert!(arena(&half) < arena(&whole) && arena(&quarter) < arena(&half), "{} {file}", target.name);
            assert!(
                half.programs[0].steps.len() <= 2 * whole.programs[0].steps.len(),
                "{} {file}: copies",
                target.name
            );
            assert_eq!(
                whole.programs[0].summary.constant_bytes, quarter.programs[0].summary.constant_bytes,
                "{} {file}",
                target.name
            );
            assert!(half.programs[0].steps.iter().all(|step| !step.name.starts_with("copy")), "{} {file}", target.name);
        }
    }
}

/// Chunks cover the values between two large ones, and not a long tail of small ones.
#[test]
fn what_is_not_at_the_peak_stays_whole() {
    let tail: String = (0..20).map(|i| format!("t{} = MatMul (t{i}, w)\n", i + 1)).collect();
    let graph = common::graph(&format!(
        "stretch (float[64, 4] x) => (float[64, 4] t20) <float[4, 512] a = {{{}}}, float[512, 4] b = {{{}}}, float[4, 4] w = {{{}}}> {{
           h = MatMul (x, a)  e = Tanh (h)  t0 = MatMul (e, b)
           {tail}
         }}",
        vec!["0.1"; 2048].join(", "),
        vec!["0.1"; 2048].join(", "),
        vec!["0.1"; 16].join(", "),
    ));
    for target in [Target::cpu(2), Target { libraries: Default::default(), ..Target::cuda() }, Target::wgpu()] {
        let (whole, half) = (planned(&graph, &target, &FREE, 1), planned(&graph, &target, &FREE, 2));
        let all = all_in_chunks(&graph, &Target { streams: 1, ..target.clone() }, 2);
        let saved = |plan: &Plan| whole.bytes().saturating_sub(plan.bytes());
        eprintln!("{}: {} half {} all {}", target.name, whole.bytes(), half.bytes(), all.bytes());
        assert!(saved(&all) > 0 && saved(&half) >= saved(&all) - saved(&all) / 16, "{}", target.name);
        assert!(
            half.programs[0].steps.len() <= whole.programs[0].steps.len() + 3,
            "{}: {} steps",
            target.name,
            half.programs[0].steps.len()
        );
        assert!(
            all.programs[0].steps.len() >= 2 * whole.programs[0].steps.len(),
            "{}: {} steps",
            target.name,
            all.programs[0].steps.len()
        );
    }
}

/// No plan in chunks is larger than the plan of the whole. If chunks save nothing, it is the plan of the whole.
#[test]
fn no_plan_grows_with_chunks() {
    for target in [Target::cpu(2), Target::cuda(), Target::wgpu()] {
        for &(file, dims) in GRAPHS {
            let graph = graphs::import(file, dims);
            let whole = planned(&graph, &target, &FREE, 1);
            for chunks in [2, 3, 4] {
                let plan = planned(&graph, &target, &FREE, chunks);
                assert!(plan.bytes() <= whole.bytes(), "{} {file} {dims:?} in {chunks} chunks", target.name);
                assert!(
                    plan.programs[0].steps.len() >= whole.programs[0].steps.len(),
                    "{} {file} {dims:?}",
                    target.name
                );
            }
        }
        // The result overwrites the input in place, but slices would keep all of it.
        let graph = common::graph("one (float[64, 64] x) => (float[64, 64] y) { y = Relu (x) }");
        let target = Target { streams: 1, ..target };
        assert_eq!(planned(&graph, &target, &FREE, 2), planned(&graph, &target, &FREE, 1));
    }
}

#[test]
fn a_limit_has_no_more_in_chunks_than_it_takes() {
    let graph = graphs::import("digits.onnx", &[("batch", 512)]);
    let target = Target::cpu(2);
    let (whole, least) = (planned(&graph, &target, &FREE, 1), planned(&graph, &target, &FREE, 4));
    assert!(least.bytes() < whole.bytes());
    let steps = |plan: &Plan| plan.programs[0].steps.iter().filter(|step| step.name.contains("/4]")).count();
    let mut most = steps(&least);
    for limit in (least.bytes()..=whole.bytes()).step_by(4096).chain([whole.bytes()]) {
        let plan = planned(&graph, &target, &Limits { memory: Some(limit) }, 4);
        assert!(plan.bytes() <= limit && steps(&plan) <= most, "{limit}: {} of {most} steps", steps(&plan));
        most = steps(&plan);
    }
    assert_eq!(most, 0, "the whole fits");
}

#[test]
fn streams_take_back_nothing_that_chunks_save() {
    let graph = graphs::import("attention.onnxtxt", &[("batch", 32), ("sequence", 64)]);
    let one = Target { streams: 1, ..Target::cuda() };
    for chunks in [2, 4] {
        let (plan, alone) = (planned(&graph, &Target::cuda(), &FREE, chunks), planned(&graph, &one, &FREE, chunks));
        assert_eq!(plan.bytes(), alone.bytes(), "{chunks} chunks");
    }
    assert!(planned(&graph, &Target::cuda(), &FREE, 1).bytes() > planned(&graph, &one, &FREE, 1).bytes());
}

#[test]
fn chunks_of_a_range_are_those_of_its_largest_binding() {
    let model = onnx::load(&Path::new(env!("CARGO_MANIFEST_DIR")).join("graphs/digits.onnx")).expect("a graph");
    let family = |range: std::ops::RangeInclusive<usize>, chunks| {
        let dims = [("batch".to_owned(), range.into())];
        common::range(
            session::source(model.clone()),
            &dims,
            &Target::cpu(2),
            Recipe { chunks, ..Recipe::default() },
            &Limits { memory: None },
        )
    };
    let (whole, three) = (family(3..=64, 1).expect("it is planned"), family(3..=64, 3).expect("it is planned"));
    assert!(three.plan().bytes() < whole.plan().bytes());
    for batch in [3, 4, 5, 17, 63, 64] {
        let (plan, _) = three.at(&[batch]).expect("it is in the range");
        assert_eq!(plan.bytes(), three.plan().bytes());
    }
    let error = family(2..=64, 3).expect_err("two are not three").to_string();
    assert!(error.contains("expected at least 3 elements for 3 chunks"), "{error}");
}

#[test]
fn what_has_no_chunks_is_refused() {
    let mut graph = Prepared::from(common::graph("sum (float[8] x) => (float[1] y) { y = ReduceSum (x) }"));
    let error = chunk::run(&mut graph, 2, 0).expect_err("all of it is needed").to_string();
    assert!(error.contains("nothing can be computed in chunks"), "{error}");
    let mut one = Prepared::from(common::graph("one (float[1, 1] x) => (float[1, 1] y) { y = Relu (x) }"));
    assert!(chunk::run(&mut one, 2, 0).is_err());
    chunk::run(&mut one, 1, 0).expect("one chunk is the whole");
    let mut many =
        Prepared::from(common::graph("many (float[2000000, 1] x) => (float[2000000, 1] y) { y = Relu (x) }"));
    let error = chunks::run(&mut many, &Target::cpu(1), &FREE, u32::MAX as usize).expect_err("too many").to_string();
    assert!(error.contains("ask for fewer chunks"), "{error}");
}
