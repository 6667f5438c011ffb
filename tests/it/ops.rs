//! The op table on every backend against the reference.

use crate::common;
use crate::samples;
use plimsoll::Tensor;
use plimsoll::internals::backend::Backend;
use plimsoll::internals::constant::Constant;
use plimsoll::internals::dtype::DType;
use plimsoll::internals::exec::Exec;
use plimsoll::internals::graph::Graph;
use plimsoll::internals::op::{Attr, Attrs, Fact, ValueId};
use plimsoll::internals::plan::Planning;
use plimsoll::internals::plan::{Limits, Recipe};
use plimsoll::internals::target::Target;
use plimsoll::internals::{ops, plan, reference};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// Within this share of the output's peak.
const TOLERANCE: f64 = 1e-5;
/// The same where values are halves.
const HALF_TOLERANCE: f64 = 1e-2;

fn graph(sample: &samples::Sample) -> Result<Graph, String> {
    let op = ops::find(sample.op).ok_or_else(|| format!("no row '{}'", sample.op))?;
    let mut graph = Graph::new(sample.op);
    let inputs: Vec<Option<ValueId>> = sample
        .inputs
        .iter()
        .enumerate()
        .map(|(i, input)| input.as_ref().map(|t| graph.input(format!("x{i}"), Fact::new(t.dtype, t.shape.clone()))))
        .collect();
    let node = graph.add(op, sample.op, &inputs, sample.attrs.clone(), &[]).map_err(|e| e.to_string())?;
    for port in 0..graph.node(node).outputs.len() {
        graph.output(format!("y{port}"), node.output(port));
    }
    Ok(graph)
}

/// Runs a sample, on poisoned memory as well, and holds it against the reference. Planned for the backend's target if for no other; how
/// many steps bind ranges of their buffers.
fn agrees(
    backend: Box<dyn Backend>,
    target: Option<&Target>,
    sample: &samples::Sample,
    tolerance: f64,
) -> Result<usize, String> {
    let graph = graph(sample)?;
    let inputs: Vec<_> = sample.tensors().into_iter().flatten().collect();
    let expected = reference::run(&graph, &inputs).map_err(|e| format!("reference: {e}"))?;
    let passed = graph.clone();
    let target = target.unwrap_or(backend.target());
    let passed = Recipe::default().whole(passed, target).map_err(|e| e.to_string())?;
    let (plan, constants) =
        plan::compile(&passed, target, &Limits { memory: None }).map_err(|e| format!("plan: {e}"))?;
    let steps = plan.programs[0].steps.iter().filter(|step| !step.bind_ranges.is_empty()).count();
    let planned = plan.bytes();
    let mut exec = Exec::load(backend, plan, &constants, &|_| {}).map_err(|e| format!("load: {e}"))?;
    let found = exec.run_poisoned(&inputs).map_err(|e| format!("run: {e}"))?;
    let allocated = exec.backend().usage().bytes;
    if planned != allocated {
        return Err(format!("planned {planned} bytes, allocated {allocated}"));
    }
    for (found, expected) in found.iter().zip(&expected) {
        common::agrees(found, expected, tolerance)?;
    }
    Ok(steps)
}

/// A sample's plan for a target, and its constants.
pub fn planned(sample: &samples::Sample, target: &Target) -> Result<(plan::Plan, Vec<Vec<Arc<Constant>>>), String> {
    let passed = Recipe::default().whole(graph(sample)?, target).map_err(|e| e.to_string())?;
    plan::compile(&passed, target, &Limits { memory: None }).map_err(|e| format!("plan: {e}"))
}

/// What a sample computes on a backend, on poisoned memory.
pub fn found(backend: Box<dyn Backend>, sample: &samples::Sample) -> Result<Vec<Tensor>, String> {
    let (plan, constants) = planned(sample, backend.target())?;
    let inputs: Vec<_> = sample.tensors().into_iter().flatten().collect();
    let mut exec = Exec::load(backend, plan, &constants, &|_| {}).map_err(|e| format!("load: {e}"))?;
    exec.run_poisoned(&inputs).map_err(|e| format!("run: {e}"))
}

#[test]
fn every_row_agrees_with_the_reference_on_every_backend() {
    let samples = samples::samples();
    let mut failures = Vec::new();
    for (name, open) in common::backends() {
        let mut ran = 0;
        for (number, sample) in samples.iter().enumerate() {
            ran += 1;
            if let Err(error) = agrees(open(), None, sample, TOLERANCE) {
                failures.push(format!("{name}: sample {number}, {} {:?}: {error}", sample.op, sample.attrs));
            }
        }
        eprintln!("{name}: {ran} samples");
    }
    assert!(failures.is_empty(), "{} failures\n{}", failures.len(), failures.join("\n"));
}

/// The same samples where a binding holds next to nothing: kernels are cut, or refused by name.
#[test]
fn every_row_agrees_with_the_reference_in_small_bindings() {
    let mut failures = Vec::new();
    for (name, open) in common::backends() {
        let (mut cut, mut refused) = (0, 0);
        // Each part may be a shader of its own, and those take their time.
        let every = if name == "cpu" { 1 } else { 6 };
        for (number, sample) in samples::samples().into_iter().enumerate().step_by(every) {
            let backend = open();
            let target = Target { max_binding: backend.target().alignment, ..backend.target().clone() };
            match agrees(backend, Some(&target), &sample, TOLERANCE) {
                Ok(steps) => cut += steps,
                Err(error) if error.contains("binds at most") => refused += 1,
                Err(error) => {
                    failures.push(format!("{name}: sample {number}, {} {:?}: {error}", sample.op, sample.attrs))
                }
            }
        }
        eprintln!("{name}: {cut} steps that bind ranges, {refused} samples refused");
        assert!(cut > 100, "{name}: {cut}");
    }
    assert!(failures.is_empty(), "{} failures\n{}", failures.len(), failures.join("\n"));
}

/// The same samples with halves for their `f32` inputs, where the backend has halves.
#[test]
fn every_row_agrees_with_the_reference_in_halves() {
    let mut failures = Vec::new();
    for (name, open) in common::backends() {
        let mut ran = 0;
        for dtype in [DType::F16, DType::BF16] {
            if let Err(error) = open().target().storage(dtype) {
                assert!(error.to_string().contains(&format!("has no type for {dtype} values")), "{error}");
                eprintln!("{name}: {error}");
                continue;
            }
            for (number, mut sample) in samples::samples().into_iter().enumerate() {
                let floats = sample.inputs.iter_mut().flatten().filter(|input| input.dtype == DType::F32);
                if floats.map(|input| input.dtype = dtype).count() == 0 || graph(&sample).is_err() {
                    continue;
                }
                ran += 1;
                if let Err(error) = agrees(open(), None, &sample, HALF_TOLERANCE) {
                    failures
                        .push(format!("{name}: sample {number}, {} {dtype} {:?}: {error}", sample.op, sample.attrs));
                }
            }
        }
        eprintln!("{name}: {ran} samples");
    }
    assert!(failures.is_empty(), "{} failures\n{}", failures.len(), failures.join("\n"));
}

/// The samples agree with the types that `plimsoll ops` lists.
#[test]
fn every_sample_is_of_a_type_that_the_table_lists() {
    let listed = std::process::Command::new(env!("CARGO_BIN_EXE_plimsoll")).args(["ops", "--json"]).output();
    let listed = String::from_utf8(listed.expect("it starts").stdout).expect("it is text");
    let listed = common::printed(&["ops"], &listed);
    let listed = listed.as_array().expect("it is a list");
    for sample in samples::samples().iter().filter(|s| s.inputs.iter().any(Option::is_some)) {
        let row = listed.iter().find(|row| row["name"] == sample.op).expect("every row is listed");
        for (backend, types) in row["types"].as_object().expect("types by backend") {
            let mut inputs = sample.inputs.iter().flatten();
            let known = inputs.any(|input| types.get(input.dtype.name()).is_some());
            assert!(known, "{backend} runs {sample:?}, but {types} are listed");
        }
    }
}

/// A row whose scores are all masked has no softmax; exporters ask for that, and give it no weight.
#[test]
fn rows_without_a_softmax_are_found() {
    let mut graph = Graph::new("masked");
    let add = |graph: &mut Graph, op: &str, inputs: &[ValueId]| {
        let inputs: Vec<_> = inputs.iter().copied().map(Some).collect();
        let node = graph.add(ops::find(op).expect("a row"), op, &inputs, Attrs::new(), &[]).expect("it fits");
        node.output(0)
    };
    let mask = graph.input("mask", Fact::new(DType::F32, [3, 37]));
    let zero = graph.input("zero", Fact::new(DType::F32, []));
    let weights = add(&mut graph, "Softmax", &[mask]);
    let none = add(&mut graph, "IsNaN", &[weights]);
    let kept = add(&mut graph, "Where", &[none, zero, weights]);
    graph.output("none", none);
    graph.output("kept", kept);
    let allowed = |i: usize| !(5..74).contains(&i);
    let mask: Vec<f64> = (0..111).map(|i| if allowed(i) { 0.5 } else { f64::NEG_INFINITY }).collect();
    let inputs = [Tensor::from_f64(DType::F32, [3, 37], &mask), Tensor::from_f64(DType::F32, [], &[0.0])];
    // A shader need not know what is not a number.
    let (_, open) = common::backends().into_iter().find(|(name, _)| *name == "cpu").expect("the CPU is always there");
    let backend = open();
    let graph = Recipe::default().whole(graph, backend.target()).expect("the passes run");
    let (plan, constants) = plan::compile(&graph, backend.target(), &Limits { memory: None }).expect("it is planned");
    let mut exec = Exec::load(backend, plan, &constants, &|_| {}).expect("it loads");
    let found = exec.run(&inputs).expect("it runs");
    let none: Vec<f64> = (0..111).map(|i| f64::from(u8::from((37..74).contains(&i)))).collect();
    assert_eq!(found[0].to_f64(), none);
    let share = [1.0 / 5.0, 0.0, 1.0 / 37.0];
    for (i, found) in found[1].to_f64().into_iter().enumerate() {
        let expected = if allowed(i) { share[i / 37] } else { 0.0 };
        assert!((found - expected).abs() < 1e-6, "{found} at {i}, expected {expected}");
    }
}

const HOSTILE: [usize; 12] = [0, 1, 2, 3, 255, 65536, (1 << 31) - 1, 1 << 31, 1 << 33, 1 << 40, 1 << 61, 1 << 62];

/// Numbers that are the same in every run.
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((self.0 >> 33) as usize) % n
    }

    fn extent(&mut self) -> usize {
        HOSTILE[self.below(HOSTILE.len())]
    }

    fn number(&mut self) -> i64 {
        match self.below(4) {
            0 => [-1, -2, -(1 << 40), i64::MIN, i64::MAX][self.below(5)],
            _ => self.extent() as i64,
        }
    }
}

fn numbers(attr: &mut Attr) -> Option<&mut [i64]> {
    match attr {
        Attr::Int(v) => Some(std::slice::from_mut(v)),
        Attr::Ints(v) => Some(v),
        _ => None,
    }
}

/// The sample with other extents, of one size everywhere or in one place, and other numbers among its attributes.
fn spoilt(mut sample: samples::Sample, random: &mut Random) -> samples::Sample {
    let mut attrs: Vec<(String, Attr)> = sample.attrs.iter().map(|(k, v)| (k.to_owned(), v.clone())).collect();
    for _ in 0..1 + random.below(3) {
        let extents: Vec<usize> = sample.inputs.iter().flatten().flat_map(|input| input.shape.clone()).collect();
        let which = random.below(4);
        if which < 3 && !extents.is_empty() {
            let (at, new) = (random.below(extents.len()), random.extent());
            let old = extents[at];
            let all = sample.inputs.iter_mut().flatten().flat_map(|input| &mut input.shape).enumerate();
            all.for_each(|(k, extent)| {
                if k == at || which < 2 && *extent == old {
                    *extent = new
                }
            });
            if which == 0 && old > 1 {
                let listed = attrs.iter_mut().filter_map(|(_, attr)| numbers(attr)).flatten();
                listed.for_each(|number| {
                    if *number == old as i64 {
                        *number = new as i64
                    }
                });
            }
        } else {
            let mut listed: Vec<&mut i64> = attrs.iter_mut().filter_map(|(_, attr)| numbers(attr)).flatten().collect();
            if !listed.is_empty() {
                let at = random.below(listed.len());
                *listed[at] = random.number();
            }
        }
    }
    sample.attrs = attrs.into_iter().fold(Attrs::new(), |attrs, (name, value)| attrs.with(&name, value));
    sample
}

/// The sample as a graph, where one of its inputs, if it has so many, is a constant of equal elements.
fn partly_known(sample: &samples::Sample, known: usize) -> Result<Graph, String> {
    let (mut graph, given) = (graph(sample)?, sample.inputs.iter().flatten().nth(known));
    let Some(input) = given else { return Ok(graph) };
    let one = Tensor::from_f64(input.dtype, vec![1; input.shape.len()], &[1.0]);
    let one = graph.constant(Constant::new("one", one));
    let (row, often) = (ops::find("Tile").expect("a row"), Attrs::new().with("repeats", &input.shape[..]));
    let node = graph.add(row, "tile", &[Some(one)], often, &[]).map_err(|e| e.to_string())?;
    graph.replace(graph.inputs()[known], node.output(0));
    Ok(graph)
}

/// Every row, with extents and numbers that are large where others are none: a plan or an error, and no panic.
#[test]
fn rows_meet_hostile_extents() {
    let (samples, targets) = (samples::samples(), [Target::cpu(2), Target::wgpu(), Target::cuda()]);
    let (mut plans, mut failures) = (0, Vec::new());
    for seed in 0..2 * samples.len() {
        let mut random = Random(seed as u64);
        let sample = spoilt(samples[seed / 2].clone(), &mut random);
        let target = &targets[random.below(3)];
        let constant = random.below(16);
        let run = || {
            let limits = Limits { memory: None };
            Recipe::default().plan(partly_known(&sample, constant)?, target, &limits).map_err(|e| e.to_string())
        };
        match catch_unwind(AssertUnwindSafe(run)) {
            Ok(plan) => plans += usize::from(plan.is_ok()),
            Err(_) => failures.push(format!("seed {seed} on {}: {sample:?}", target.name)),
        }
    }
    assert!(failures.is_empty(), "{} panics\n{}", failures.len(), failures.join("\n"));
    assert!(plans > samples.len() / 2, "{plans} plans: most extents are refused before anything is planned");
}

/// Behind the sum of an empty row, elementwise code still reads its other operands.
#[test]
fn what_follows_an_empty_sum_is_computed() {
    let graph = common::graph(
        "g (float[0, 40] q, float[40] h, float[3, 0] p, float[3] v) => (float[40] y, float[3] z) <int64[1] first = {0}, int64[1] last = {1}> {
            s = ReduceSum <keepdims = 0> (q, first) y = Add (h, s)
            e = Exp (p) m = ReduceProd <keepdims = 0> (e, last) z = Mul (v, m)
        }",
    );
    let mut state = 9;
    for opener in common::backends() {
        common::runs_as_the_reference(&graph, &opener, &mut state);
    }
}
