//! States: values that last from one run to the next.

use crate::common::{self, Folder};
use plimsoll::internals::eager::alloc::Kind;
use plimsoll::internals::eager::{Eager, Program};
use plimsoll::internals::exec::Exec;
use plimsoll::internals::kernel::{Kernel, Template};
use plimsoll::internals::op::{Attrs, Fact, ValueId};
use plimsoll::internals::plan::Planning;
use plimsoll::internals::plan::{Class, Step};
use plimsoll::internals::session::{Choice, Options, Session};
use plimsoll::internals::{onnx, plan, reference};
use plimsoll::{DType, Graph, Limits, Recipe, Target, Tensor, Trace, Var};
use std::collections::BTreeSet;

const F32: DType = DType::F32;

fn options() -> Options {
    Options { threads: 2, ..Options::default() }.on(Choice::Cpu)
}

fn filled(shape: impl Into<plimsoll::Shape>, value: f64) -> Tensor {
    let shape = shape.into();
    let values = vec![value; shape.numel()];
    Tensor::from_f64(F32, shape, &values)
}

fn cast(tensor: &Tensor, dtype: DType) -> Tensor {
    Tensor::from_f64(dtype, tensor.shape().clone(), &tensor.to_f64())
}

/// A moving mean in place, a product of the old elements, two states that are exchanged, one that is read behind its update, one that
/// never changes, and one that an output shows.
pub fn mixed() -> Graph {
    mixed_of(F32)
}

fn mixed_of(dtype: DType) -> Graph {
    let g = Trace::new("mixed");
    let x = g.input("x", dtype, [8, 8]);
    let state = |name: &str, first: f64| g.state(name, cast(&filled([8, 8], first), dtype));
    let (mean, product, one, other) =
        (state("mean", 0.0), state("product", 0.5), state("one", 0.1), state("other", 0.2));
    let (late, fixed, shown) = (state("late", 0.3), state("fixed", 0.4), state("shown", 0.6));
    g.update(mean, mean * 0.9 + x * 0.1);
    let next = x.matmul(one) * 0.1;
    g.update(product, next);
    g.output("y", product.matmul(x) - next);
    g.update(one, other);
    g.update(other, one);
    let changed = (x + fixed).tanh();
    g.update(late, changed);
    // The old elements are needed by what needs the new ones.
    g.output("z", changed.matmul(late));
    let seen = shown.matmul(x) * 0.1;
    g.update(shown, seen);
    g.output("shown", seen);
    g.output("before", shown);
    g.finish().expect("the graph is sound")
}

/// A `TensorScatter` of a row per sequence.
fn scattered<'g>(cache: Var<'g>, row: Var<'g>, position: Var<'g>, mode: &str) -> Var<'g> {
    cache.op("TensorScatter", &[row.shaped(&[2, 1, 4]), position], Attrs::new().with("axis", 1).with("mode", mode))
}

/// Caches of which each run writes rows: read before, between and behind the writes, shown, in a ring, in several steps, through views, and
/// one whose update is another value.
pub fn caches() -> Graph {
    caches_of(F32)
}

fn caches_of(dtype: DType) -> Graph {
    let g = Trace::new("caches");
    let x = g.input("x", dtype, [2, 4]);
    let state = |name: &str, first: f64| g.state(name, cast(&filled([2, 5, 4], first), dtype));
    let position = g.state("position", Tensor::from_i64([2], &[0, 3]).expect("two numbers"));
    g.update(position, position + 1.0);
    let row = (x * 2.0).tanh();
    // Computed, so that nobody checks it: now and then it is a place behind the end, where nothing is written.
    let free = position % 6.0;

    let behind = state("behind", 0.1);
    let written = scattered(behind, row, free, "linear");
    g.update(behind, written);
    g.output("behind sum", written.reduce_sum(&[1], false));

    let ring = state("ring", 0.2);
    g.output("ring before", ring.reduce_sum(&[1], false));
    g.update(ring, scattered(ring, x, position, "circular"));

    // The old elements are needed by what needs the new ones.
    let late = state("late", 0.3);
    let written = scattered(late, row, position, "circular");
    g.update(late, written);
    g.output("late sum", (late * written).reduce_sum(&[1], false));

    let shown = state("shown", 0.4);
    let written = scattered(shown, x, position, "circular");
    g.update(shown, written);
    g.output("shown now", written);
    g.output("shown before", shown);

    // Two of the tuples are the same: the last one counts. Then there is a step more, in another shape.
    let steps = state("steps", 0.5);
    let tuples = g.concat(&[position % 2.0, position % 2.0], 0).shaped(&[4, 1]);
    let rows = g.concat(&[x, row], 0).shaped(&[4, 1, 4]).expand(&[4, 5, 4]);
    let first = steps.op("ScatterND", &[tuples, rows], Attrs::new());
    g.output("between", first.reduce_sum(&[1], false));
    let at = (position % 40.0).shaped(&[2, 1]);
    let second = first.shaped(&[40]).op("ScatterND", &[at, x.part(1, 0..1).shaped(&[2])], Attrs::new());
    g.update(steps, second.shaped(&[2, 5, 4]));

    let aside = state("aside", 0.6);
    let written = scattered(aside, x, free, "linear");
    g.update(aside, written * 0.5 + aside * 0.5);
    g.finish().expect("the graph is sound")
}

/// Scatters over what is no state: an input, activations that die, live on, or are read for the updates, a constant, one value twice; and
/// results that are outputs, parts of another value, and data again.
fn scatters() -> Graph {
    let g = Trace::new("scatters");
    let (x, rows) = (g.input("x", F32, [6, 4]), g.input("rows", F32, [3, 4]));
    let at = g.constant("at", Tensor::from_i64([3, 1], &[4, -2, 9]).expect("three numbers"));
    let write = |data, updates| g.op("ScatterND", &[Some(data), Some(at), Some(updates)], Attrs::new());
    g.output("over an input", write(x, rows));
    let dies = (x * 2.0).tanh();
    g.output("over what dies", write(dies, rows) * 3.0);
    let lives = x.matmul(rows.transpose(&[1, 0]));
    let written = write(lives, rows.part(1, 0..3));
    g.output("over what lives on", written.matmul(lives.transpose(&[1, 0])));
    let own = x.abs();
    g.output("updates of the data", write(own, own.part(0, 1..4)));
    let zeros = g.constant("zeros", filled([6, 4], 0.0));
    g.output("over a constant", write(zeros, rows));
    let shared = x.sin();
    g.output("one", write(shared, rows));
    g.output("other", write(shared, rows * 2.0));
    g.output("joined", g.concat(&[write(x.cos(), rows), x], 0));
    let along = g.constant("along", Tensor::from_i64([2, 4], &[0, 5, -1, 3, 0, 5, 2, 7]).expect("eight numbers"));
    let elements =
        write(x.exp(), rows).op("ScatterElements", &[along, rows.part(0, 0..2)], Attrs::new().with("axis", 0));
    g.output("again", elements);
    g.finish().expect("the graph is sound")
}

/// Runs a graph several times on a backend beside the reference, and compares outputs and states.
fn follows_the_reference(graph: &Graph, (name, open): &common::Opener, recipe: Recipe) {
    let backend = open();
    let options = Options { recipe, ..options() };
    let session = common::load(graph.clone(), backend, *name, &options).expect("it loads");
    assert_eq!(session.usage().bytes, session.plan().bytes(), "{name}");
    let mut states = reference::initial(graph).expect("the elements are there");
    let mut seed = 7;
    let is_narrow = recipe.f16 || graph.states().iter().any(|state| graph.fact(state.value).dtype.is_half());
    let tolerance = if is_narrow { 3e-2 } else { 1e-4 };
    for run in 0..6 {
        let mut random = |v: &ValueId| {
            let Fact { dtype, shape } = graph.fact(*v);
            cast(&common::random(&mut seed, shape), *dtype)
        };
        let inputs: Vec<_> = graph.inputs().iter().map(&mut random).collect();
        let named: Vec<_> = graph.inputs().iter().map(|&v| graph.value_name(v)).zip(inputs.iter().cloned()).collect();
        let expected = reference::step(graph, &inputs, &mut states).expect("the reference runs");
        let found = if run == 3 { session.run_poisoned(&named) } else { session.run(&named) }.expect("it runs");
        for ((output, found), expected) in found.iter().zip(&expected) {
            common::agrees(found, expected, tolerance).unwrap_or_else(|e| panic!("{name}, run {run}, '{output}': {e}"));
        }
        for (state, expected) in graph.states().iter().zip(&states) {
            let state = graph.value_name(state.value);
            let found = session.state(state).expect("it is a state");
            common::agrees(&found, expected, tolerance)
                .unwrap_or_else(|e| panic!("{name}, run {run}, state '{state}': {e}"));
        }
    }
}

#[test]
fn states_follow_the_reference_on_every_backend() {
    for opener in common::backends() {
        for fuse in [true, false] {
            follows_the_reference(&mixed(), &opener, Recipe { fuse, ..Recipe::default() });
        }
        follows_the_reference(&mixed(), &opener, Recipe { chunks: 2, ..Recipe::default() });
        follows_the_reference(&mixed(), &opener, Recipe { f16: true, ..Recipe::default() });
    }
}

#[test]
fn scatters_follow_the_reference_on_every_backend() {
    for opener in common::backends() {
        for graph in [caches(), scatters()] {
            for fuse in [true, false] {
                follows_the_reference(&graph, &opener, Recipe { fuse, ..Recipe::default() });
            }
            follows_the_reference(&graph, &opener, Recipe { chunks: 2, ..Recipe::default() });
            follows_the_reference(&graph, &opener, Recipe { f16: true, ..Recipe::default() });
        }
    }
}

/// States of halves take two bytes an element wherever they are computed with.
#[test]
fn states_of_halves_stay_halves() {
    for opener in common::backends() {
        for graph in [mixed_of, caches_of].into_iter().flat_map(|of| [DType::F16, DType::BF16].map(of)) {
            let plan = Recipe::default().plan(graph.clone(), opener.1().target(), &Limits { memory: None });
            for state in &plan.expect("it is planned").programs[0].state {
                let dtype = graph.states().iter().find(|s| graph.value_name(s.value) == state.port.name);
                assert_eq!(state.port.dtype, graph.fact(dtype.expect("it is one").value).dtype, "{}", opener.0);
            }
            for fuse in [true, false] {
                follows_the_reference(&graph, &opener, Recipe { fuse, ..Recipe::default() });
            }
            follows_the_reference(&graph, &opener, Recipe { chunks: 2, ..Recipe::default() });
        }
    }
}

/// The steps that copy, and the buffers of states, of a plan of `caches`: only what an output shows, what is read too late, and what is no
/// update takes a copy.
#[test]
fn a_cache_is_written_where_it_is() {
    for target in [Target::cpu(2), Target::cuda(), Target::wgpu()] {
        let plan = Recipe::default().plan(caches(), &target, &Limits { memory: None }).expect("it is planned");
        let is_cache = |step: &&Step| plan.programs[0].buffers[step.writes[0]].shape.numel() == 40;
        let copied: BTreeSet<&str> = plan.programs[0]
            .steps
            .iter()
            .filter(is_cache)
            .filter_map(|step| step.name.strip_prefix("copy of "))
            .collect();
        let [output] = copied.iter().filter(|name| name.starts_with("TensorScatter")).collect::<Vec<_>>()[..] else {
            panic!("{}: expected a copy for the output, found {copied:?}", target.name)
        };
        assert_eq!(copied, BTreeSet::from([*output, "aside", "late", "shown"]), "{}", target.name);
    }
}

/// A cache that no binding holds is written part by part, at the same bytes. Where the row may be anywhere in it, it is refused by name.
#[test]
fn caches_are_larger_than_a_binding() {
    let graph = |anywhere: bool| {
        let g = Trace::new("large");
        let (x, cache) = (g.input("x", F32, [4, 2, 1, 16]), g.state("cache", filled([4, 2, 8, 16], 0.5)));
        let position = g.state("position", Tensor::from_i64([4], &[0, 6, 3, 7]).expect("four numbers"));
        g.update(position, position + 1.0);
        let written = if anywhere {
            let tuples = (position % 4.0).shaped(&[4, 1]);
            cache.op("ScatterND", &[tuples, x.expand(&[4, 2, 8, 16])], Attrs::new())
        } else {
            cache.op("TensorScatter", &[x, position], Attrs::new().with("mode", "circular"))
        };
        g.update(cache, written);
        g.output("sums", written.reduce_sum(&[2], false));
        g.finish().expect("the graph is sound")
    };
    for (name, open) in common::backends() {
        let backend = open();
        let target = Target { max_binding: 1024, ..backend.target().clone() };
        let passed = |anywhere| Recipe::default().whole(graph(anywhere), &target).expect("the passes run");
        let error =
            plan::compile(&passed(true), &target, &Limits { memory: None }).expect_err("it is too large").to_string();
        assert!(error.contains("binds at most 1024, and kernel 'scatter' cannot be split"), "{name}: {error}");
        let whole = passed(false);
        let (plan, constants) = plan::compile(&whole, &target, &Limits { memory: None }).expect("it is planned");
        let parts = plan.programs[0].steps.iter().filter(|step| plan.programs[0].kernels[step.kernel].is_in_place());
        assert_eq!(parts.filter(|step| !step.bind_ranges.is_empty()).count(), 4, "{name}");
        let mut exec = Exec::load(backend, plan, &constants, &|_| {}).expect("it loads");
        let (mut states, mut seed) = (reference::initial(&whole.graph).expect("they are there"), 3);
        for run in 0..5 {
            let x = [common::random(&mut seed, &[4, 2, 1, 16].into())];
            let expected = reference::step(&whole.graph, &x, &mut states).expect("the reference runs");
            let found = exec.run(&x).expect("it runs");
            common::agrees(&found[0], &expected[0], 1e-4).unwrap_or_else(|e| panic!("{name}, run {run}: {e}"));
        }
    }
}

/// A token costs as much in a long cache as in a short one, apart from attention: its row is written, and nothing else.
#[test]
fn a_token_writes_its_row_alone() {
    let graph = |capacity: usize| {
        let model = onnx::load("graphs/generate.onnxtxt".as_ref()).expect("it is a model");
        let pair = |a: &str, b: &str| (a.to_owned(), b.to_owned());
        let states = [pair("token", "next_token"), pair("position", "next_position"), pair("past_*", "present_*")];
        onnx::import(&model.with_state(&states), &[("batch".into(), 2), ("capacity".into(), capacity)])
            .expect("a graph")
    };
    for target in [Target::cpu(2), Target::cuda(), Target::wgpu()] {
        let work = [64, 4096].map(|capacity| {
            let plan =
                Recipe::default().plan(graph(capacity), &target, &Limits { memory: None }).expect("it is planned");
            let kernels = plan.programs[0].steps.iter().map(|step| &plan.programs[0].kernels[step.kernel]);
            let attends = |k: &Kernel| matches!(k.template, Template::Attention { .. });
            // Attention reads a truth per row and place.
            let masks = |k: &Kernel| k.template == Template::Map && k.shape.numel() == 2 * capacity;
            let others = kernels.filter(|k| !attends(k) && !masks(k));
            others.map(|k| k.shape.numel()).sum::<usize>()
        });
        assert_eq!(work[0], work[1], "{}", target.name);
    }
}

/// Runs through an allocator keep states, too, and give the same results.
#[test]
fn eager_runs_keep_states() {
    eager_is_as_planned(mixed(), |run| vec![filled([8, 8], 0.25 * f64::from(run))]);
    eager_is_as_planned(caches(), |run| vec![filled([2, 4], 0.25 * f64::from(run))]);
    eager_is_as_planned(scatters(), |run| vec![filled([6, 4], 0.25 * f64::from(run)), filled([3, 4], 0.5)]);
}

fn eager_is_as_planned(graph: Graph, inputs: impl Fn(i32) -> Vec<Tensor>) {
    let names: Vec<String> = graph.inputs().iter().map(|&v| graph.value_name(v).to_owned()).collect();
    let backend = common::backends()[0].1();
    let recipe = Recipe { fuse: false, ..Recipe::default() };
    let passed = recipe.whole(graph.clone(), backend.target()).expect("the passes run");
    let program = Program::new(&passed, backend.target()).expect("it is lowered");
    let mut eager = Eager::load(&program, backend, Kind::Caching, None, None).expect("it loads");
    let options = Options { recipe, ..options() };
    let session = common::load(graph, common::backends()[0].1(), "a device", &options);
    let session = session.expect("it loads");
    for run in 0..4 {
        let inputs = inputs(run);
        let named: Vec<_> = names.iter().map(String::as_str).zip(inputs.iter().cloned()).collect();
        let planned = session.run(&named).expect("it runs");
        let found = eager.run(&inputs).expect("it runs");
        assert!(planned.iter().zip(&found).all(|((_, a), b)| a.bytes() == b.bytes()), "run {run}");
    }
}

#[test]
fn an_update_is_in_place_where_all_readers_come_first() {
    let g = Trace::new("steps");
    let x = g.input("x", F32, [16, 16]);
    let w = g.state("w", filled([16, 16], 1.0));
    let m = g.state("m", filled([16, 16], 0.0));
    let y = x.matmul(w);
    g.output("y", y);
    let momentum = m * 0.9 + y * 0.1;
    g.update(m, momentum);
    g.update(w, w - momentum * 0.01);
    let graph = g.finish().expect("the graph is sound");
    for target in [Target::cpu(2), Target::cuda(), Target::wgpu()] {
        let plan = Recipe::default().plan(graph.clone(), &target, &Limits { memory: None }).expect("it is planned");
        assert_eq!(plan.programs[0].summary.state_bytes, 2 * 1024, "{}", target.name);
        assert_eq!(plan.programs[0].state.len(), 2);
        assert!(
            !plan.programs[0].steps.iter().any(|step| step.name.starts_with("copy")),
            "{}: {:#?}",
            target.name,
            plan.programs[0].steps
        );
        for state in &plan.programs[0].state {
            let update = &plan.programs[0].buffers[state.update.expect("both are updated")];
            let old = &plan.programs[0].buffers[state.port.buffer];
            assert_eq!((update.segment, update.offset, update.class), (old.segment, old.offset, Class::State));
        }
    }
}

#[test]
fn states_are_read_written_and_reset_by_name() {
    let g = Trace::new("sum");
    let (x, total) = (g.input("x", F32, [3]), g.state("total", filled([3], 2.0)));
    g.update(total, total + x);
    let session = Session::from_graph(g.finish().expect("a state is enough"), &options()).expect("it loads");
    let run = || session.run(&[("x", filled([3], 1.0))]).expect("it runs");
    let total = || session.state("total").expect("it is a state").to_f64();
    assert_eq!(total(), [2.0; 3]);
    assert!(run().is_empty() && run().is_empty());
    assert_eq!(total(), [4.0; 3]);
    session.set_state("total", &filled([3], 10.0)).expect("it fits");
    run();
    assert_eq!(total(), [11.0; 3]);
    let wrong = session.set_state("total", &filled([4], 0.0)).unwrap_err().to_string();
    assert_eq!(wrong, "state 'total': expected f32[3], found f32[4]");
    let missing = session.state("sum").unwrap_err().to_string();
    assert_eq!(missing, "state 'sum': not a state of the graph; its states: total");
    assert_eq!(total(), [11.0; 3], "a refused change leaves it as before");
    session.reset_state().expect("it is reset");
    assert_eq!(total(), [2.0; 3]);
}

const DECODER: &str = r#"<ir_version: 8, opset_import: ["" : 17]>
cached (float[2, n] x, float[2, 4] past_a, float[2, 4] past_b) => (float[2, n] y, float[2, 4] present_a, float[2, 4] present_b) {
    present_a = Tanh (past_a)
    both = Add (past_a, past_b)
    present_b = Sin (both)
    sum = ReduceSum <keepdims = 1> (both)
    y = Mul (x, sum)
}"#;

#[test]
fn inputs_and_outputs_of_files_become_states() {
    let folder = Folder::new("state-pairs");
    let path = folder.file("cached.onnxtxt", DECODER);
    let pair = |a: &str, b: &str| (a.to_owned(), b.to_owned());
    for state in [vec![pair("past_*", "present_*")], vec![pair("past_a", "present_a"), pair("past_b", "present_b")]] {
        for dims in [options().set("n", 3), options().set("n", 1..=5)] {
            let session = Session::from_path(&path, &Options { state: state.clone(), ..dims }).expect("it loads");
            let names: Vec<_> = session.plan().programs[0].state.iter().map(|s| s.port.name.as_str()).collect();
            assert_eq!(names, ["past_a", "past_b"]);
            assert_eq!((session.plan().programs[0].inputs.len(), session.plan().programs[0].outputs.len()), (1, 1));
            session.set_state("past_a", &filled([2, 4], 1.0)).expect("it fits");
            let mut states = [1.0f64, 0.0];
            for run in 0..4 {
                let y = session.run(&[("x", filled([2, 3], 1.0))]).expect("it runs");
                let expected = 8.0 * (states[0] + states[1]);
                assert!((y[0].1.to_f64()[0] - expected).abs() < 1e-5, "run {run}: {:?}, {expected}", y[0].1.to_f64());
                states = [states[0].tanh(), (states[0] + states[1]).sin()];
            }
        }
    }
    let refused = |a: &str, b: &str| {
        let options = Options { state: vec![pair(a, b)], ..options().set("n", 3) };
        Session::from_path(&path, &options).unwrap_err().to_string().rsplit_once(": state ").map(|(_, e)| e.to_owned())
    };
    let is = |found: Option<String>, expected: &str| assert_eq!(found.as_deref(), Some(expected));
    is(refused("past_c", "present_a"), "'past_c=present_a': no input 'past_c'; the inputs: x, past_a, past_b");
    is(refused("past_a", "present"), "'past_a=present': no output 'present'; the outputs: y, present_a, present_b");
    is(refused("x", "present_a"), "'x=present_a': input 'x' is f32[2,3], but output 'present_a' is f32[2,4]");
    let twice =
        Options { state: vec![pair("past_a", "present_a"), pair("past_b", "present_a")], ..options().set("n", 3) };
    let twice = Session::from_path(&path, &twice).unwrap_err().to_string();
    assert!(twice.ends_with("state 'past_b=present_a': 'past_a=present_a' is a state already"), "{twice}");
    is(refused("old_*", "new_*"), "'old_*=new_*': no input is like 'old_*'; the inputs: x, past_a, past_b");
}

#[test]
fn likely_states_are_found() {
    let model = onnx::load(Folder::new("likely").file("cached.onnxtxt", DECODER).as_ref()).expect("it is a model");
    let graph = onnx::import(&model, &[("n".into(), 2)]).expect("it is a graph");
    let pairs = [("past_a", "present_a"), ("past_b", "present_b")];
    assert_eq!(onnx::likely_states(&graph), pairs.map(|(a, b)| (a.to_owned(), b.to_owned())));
}

#[test]
fn wrong_updates_are_refused() {
    let refused = |make: &dyn Fn(&Trace)| {
        let g = Trace::new("wrong");
        make(&g);
        g.finish().unwrap_err().to_string()
    };
    let shape = |g: &Trace| g.update(g.state("s", filled([2], 0.0)), g.input("x", F32, [3]));
    assert_eq!(refused(&shape), "graph: state 's': expected an update of f32[2], found 'x' of f32[3]");
    let twice = |g: &Trace| {
        let (s, x) = (g.state("s", filled([2], 0.0)), g.input("x", F32, [2]));
        g.update(s, x);
        g.update(s, x + x);
    };
    let error = refused(&twice);
    assert!(error.starts_with("graph: state 's': updated twice, by 'x' and by "), "{error}");
    let none = |g: &Trace| g.update(g.input("x", F32, [2]), g.input("y", F32, [2]));
    assert_eq!(refused(&none), "graph: state 'x': not a state of the graph");
    let names = |g: &Trace| _ = (g.state("s", filled([2], 0.0)), g.state("s", filled([2], 0.0)));
    assert_eq!(refused(&names), "graph: two states are called 's'");
}
