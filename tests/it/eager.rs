//! Eager and planned runs of the same graphs: equal results, and the figures that each claims of its memory.

use crate::common;
use plimsoll::internals::backend::Backend;
use plimsoll::internals::constant::Constant;
use plimsoll::internals::eager::alloc::{Kind, smallest_device};
use plimsoll::internals::eager::compare::{Column, Comparison, Measured, Outcome, Setup, compare};
use plimsoll::internals::eager::{Eager, Program};
use plimsoll::internals::graph::Graph;
use plimsoll::internals::op::{Attrs, Fact, ValueId};
use plimsoll::internals::pass::Prepared;
use plimsoll::internals::{onnx, ops, plan, reference, report};
use plimsoll::{DType, Error, Limits, Recipe, Result, Shape, Target, Tensor};
use proptest::prelude::*;
use std::path::{Path, PathBuf};

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("graphs")
}

/// A graph file with its dims bound to extents that are inconvenient for every kernel.
fn load(file: &str) -> Graph {
    let model = onnx::load(&folder().join(file)).expect("the file is a graph");
    let dims = model.open_dims().expect("its dims have names");
    let dims: Vec<_> = dims.into_iter().zip([3, 9, 10]).collect();
    onnx::import(&model, &dims).expect("the graph is imported")
}

/// The names of all graph files.
fn files() -> Vec<String> {
    let files = std::fs::read_dir(folder()).expect("the folder is there");
    let names = files.map(|f| f.expect("it can be listed").file_name().to_string_lossy().into_owned());
    let mut graphs: Vec<_> = names.filter(|n| n.ends_with(".onnx") || n.ends_with(".onnxtxt")).collect();
    graphs.sort();
    assert!(graphs.len() >= 4, "{graphs:?}");
    graphs
}

/// Values between -1 and 1, the same ones at every call.
fn random(fact: &Fact, mut state: u64) -> Tensor {
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as f64 / f64::from(1u32 << 30) - 1.0
    };
    let values: Vec<f64> = (0..fact.shape.numel()).map(|_| next()).collect();
    Tensor::from_f64(fact.dtype, fact.shape.clone(), &values)
}

fn inputs(graph: &Graph) -> Vec<Tensor> {
    graph.inputs().iter().zip(1..).map(|(&value, seed)| random(graph.fact(value), seed)).collect()
}

fn cpu() -> Box<dyn Backend> {
    common::backends()[0].1()
}

fn compared(graph: &Graph, open: fn() -> Box<dyn Backend>, memory_limit: Option<u64>) -> Comparison {
    let setup = Setup {
        open: &|| Ok(open()),
        memory_limit,
        iters: 2,
        poison: true,
        recipe: Recipe::default(),
        progress: &|_| {},
        observe: None,
    };
    compare(graph, &inputs(graph), &setup).expect("the graph is compared")
}

fn measured(column: &Column) -> &Measured {
    match &column.outcome {
        Outcome::Ran(measured) => measured,
        Outcome::Refused { does_not_fit } => panic!("{}: {does_not_fit}", column.name),
    }
}

fn unfused(graph: &Graph, target: &Target) -> (Prepared, Program) {
    let graph = Recipe { fuse: false, ..Recipe::default() }.whole(graph.clone(), target).expect("the graph passes");
    let program = Program::new(&graph, target).expect("the graph is lowered");
    (graph, program)
}

#[test]
fn graph_files_give_the_same_results_eager_and_planned() {
    for (backend, open) in common::backends() {
        let mut saved = 0;
        for file in files() {
            let graph = load(&file);
            let found = compared(&graph, open, None);
            let text = report::comparison("graph", &found);
            eprintln!("{backend}: {text}");
            let names: Vec<_> = found.columns.iter().map(|c| c.name.as_str()).collect();
            assert_eq!(names, ["eager direct", "eager caching", "eager bfc", "planned", "planned fused"]);
            found.verdict(1e-5).unwrap_or_else(|e| panic!("{backend}: {file}: {e}\n{text}"));
            let [direct, caching, bfc, planned, fused] = &found.columns[..] else { unreachable!("named above") };
            for column in [caching, bfc, planned] {
                assert!(measured(column).agreement.as_ref().is_some_and(|a| a.equal), "{file}: {text}");
            }

            let target = open().target().clone();
            let (graph, program) = unfused(&graph, &target);
            let bytes = plan::planned(&graph, &target, &Limits { memory: None }).expect("the graph is planned").bytes();
            assert_eq!((measured(planned).peak_reserved_bytes, planned.smallest_device_bytes), (bytes, bytes));
            assert_eq!(measured(direct).driver_calls_last, 2 * program.allocations() as u64);
            for column in [caching, planned, fused] {
                assert_eq!(measured(column).driver_calls_last, 0, "{file}: {}", column.name);
            }
            // A plan holds outputs outside the arena for the whole run; eager allocates them when they are written.
            let outputs: u64 = graph
                .graph
                .outputs()
                .iter()
                .map(|(_, v)| graph.graph.fact(*v))
                .map(|f| (f.shape.numel() * f.dtype.size()) as u64)
                .sum();
            for column in &found.columns {
                let Measured { peak_live_bytes, peak_reserved_bytes, .. } = *measured(column);
                assert!(0 < peak_live_bytes && peak_live_bytes <= peak_reserved_bytes, "{file}: {}", column.name);
                if column.name != fused.name {
                    assert!(planned.smallest_device_bytes <= column.smallest_device_bytes + outputs, "{file}: {text}");
                }
            }
            assert!(fused.launches <= planned.launches && planned.launches <= direct.launches);
            saved += planned.launches - fused.launches;
        }
        assert!(saved > 0, "{backend}: fusion saves launches");
    }
}

/// The simulated devices are true to the real one: an allocator gets along with the bytes of the smallest device that was found for it,
/// and not with fewer.
#[test]
fn eager_runs_on_the_smallest_device_and_not_below() {
    for file in files() {
        let graph = load(&file);
        let backend = cpu();
        let (_, program) = unfused(&graph, backend.target());
        for kind in Kind::ALL {
            let run = |limit: u64| -> Result<()> {
                let mut eager = Eager::load(&program, cpu(), kind, Some(limit), None)?;
                for _ in 0..2 {
                    let outputs = eager.run(&inputs(&graph));
                    assert!(
                        eager.stats().peak_reserved + program.staging_bytes() <= limit
                            && eager.backend().usage().bytes <= limit
                    );
                    outputs?;
                }
                Ok(())
            };
            let least = smallest_device(kind, &program.trace(2)).expect("some device is large enough");
            let limit = least + program.staging_bytes();
            run(limit).unwrap_or_else(|e| panic!("{file}: {}: {e}", kind.name()));
            let error = run(limit - 256).expect_err("a smaller device was not enough in the simulation");
            assert!(matches!(error, Error::Fit { .. }), "{file}: {}: {error}", kind.name());
        }
    }
}

/// Elementwise steps, which a plan runs in place and an eager run does not.
fn tall() -> Graph {
    let mut graph = Graph::new("tall");
    let mut value = graph.input("x", Fact::new(DType::F32, [64, 64]));
    for k in 0..4 {
        let row = ops::find(["Relu", "Tanh"][k % 2]).expect("a row");
        let node = graph.add(row, &format!("step{k}"), &[Some(value)], Attrs::new(), &[]).expect("it fits");
        value = node.output(0);
    }
    let row = ops::find("ReduceMean").expect("a row");
    let node = graph.add(row, "mean", &[Some(value)], Attrs::new(), &[]).expect("it fits");
    graph.output("y", node.output(0));
    graph
}

#[test]
fn a_column_that_does_not_fit_says_so() {
    let graph = tall();
    let bytes = |found: &Comparison, k: usize| found.columns[k].smallest_device_bytes;
    let free = compared(&graph, cpu, None);
    let limit = bytes(&free, 3);
    let tight = compared(&graph, cpu, Some(limit));
    for (k, column) in tight.columns.iter().enumerate() {
        assert_eq!(column.smallest_device_bytes, bytes(&free, k), "{}", column.name);
        match &column.outcome {
            Outcome::Ran(measured) => assert!(measured.peak_reserved_bytes <= limit, "{}", column.name),
            Outcome::Refused { does_not_fit } => {
                let named = does_not_fit.replace(',', "").contains(&limit.to_string());
                assert!(column.smallest_device_bytes > limit && named);
            }
        }
    }
    assert_eq!(tight.reference.as_deref(), Some("planned"));
    tight.verdict(1e-5).expect("what ran agrees");
    let text = report::comparison("graph", &tight);
    assert!(text.contains("eager caching: does not fit: caching allocator"), "{text}");
    let none = compared(&graph, cpu, Some(1000));
    assert!(none.reference.is_none() && none.columns.iter().all(|c| matches!(c.outcome, Outcome::Refused { .. })));
    none.verdict(0.0).expect("nothing ran, nothing differs");
}

#[test]
fn what_the_allocator_reserves_is_what_the_device_gave() {
    let graph = load("attention.onnxtxt");
    let inputs = inputs(&graph);
    let (_, program) = unfused(&graph, cpu().target());
    for kind in Kind::ALL {
        let mut eager = Eager::load(&program, cpu(), kind, None, None).expect("it fits");
        let loaded = eager.stats();
        for _ in 0..3 {
            let (usage, calls) = (eager.backend().usage(), eager.stats().driver_calls);
            eager.run(&inputs).expect("it runs");
            let stats = eager.stats();
            assert_eq!(stats.reserved + program.staging_bytes(), eager.backend().usage().bytes);
            assert_eq!(stats.live, loaded.live, "nothing of a run stays");
            if kind == Kind::Direct {
                let took = eager.backend().usage().allocations - usage.allocations;
                assert_eq!(took, program.allocations() as u64);
                assert_eq!(stats.driver_calls - calls, 2 * took);
            }
        }
        // A run that is refused frees all its blocks, and the next run works.
        assert!(eager.run(&inputs[1..]).is_err());
        assert_eq!(eager.stats().live, loaded.live);
        eager.run(&inputs).expect("it runs again");
    }
}

/// Adds a node, unless its operands do not fit together or its result is too large.
fn grow(graph: &mut Graph, values: &mut Vec<ValueId>, choice: u8, a: ValueId, b: ValueId) {
    let shape = graph.fact(a).shape.clone();
    let last = shape.len() as i64 - 1;
    let (op, operands, attrs): (&str, &[ValueId], Attrs) = match choice {
        0 => ("Add", &[a, b], Attrs::new()),
        1 => ("Mul", &[a, b], Attrs::new()),
        2 => ("Relu", &[a], Attrs::new()),
        3 => ("Tanh", &[a], Attrs::new()),
        4 | 5 => ("MatMul", &[a, b], Attrs::new()),
        6 | 7 => ("Concat", &[a, b], Attrs::new().with("axis", i64::from(choice) - 6)),
        8 => ("Transpose", &[a], Attrs::new()),
        9 => ("Softmax", &[a], Attrs::new().with("axis", last)),
        10 => ("ReduceMean", &[a], Attrs::new().with("axes", vec![last])),
        11 => ("Slice", &[a], Attrs::new().with("starts", vec![1]).with("ends", vec![5]).with("axes", vec![last])),
        _ => ("Reshape", &[a], Attrs::new().with("shape", vec![-1, shape[0] as i64])),
    };
    let operands: Vec<_> = operands.iter().copied().map(Some).collect();
    graph.append();
    let name = format!("{op}{}", graph.len());
    let Ok(node) = graph.add(ops::find(op).expect("a row"), &name, &operands, attrs, &[]) else { return };
    let value = node.output(0);
    if (1..=1 << 12).contains(&graph.fact(value).shape.numel()) {
        values.push(value);
    }
}

/// A graph of matrices that follows from choices. Its last values are its outputs.
fn grown(steps: &[(u8, usize, usize)]) -> Graph {
    let mut graph = Graph::new("grown");
    let matrix = |rows: usize, columns: usize| Fact::new(DType::F32, [rows, columns]);
    let weights = Constant::new("w", random(&matrix(6, 6), 7));
    let mut values = vec![graph.input("x", matrix(4, 6)), graph.input("y", matrix(6, 6)), graph.constant(weights)];
    for &(choice, a, b) in steps {
        // Operands are counted from the newest value, so that a shrunk case keeps its meaning.
        let pick = |back: usize| values[values.len() - 1 - back % values.len()];
        let (a, b) = (pick(a), pick(b));
        grow(&mut graph, &mut values, choice, a, b);
    }
    for (k, &value) in values.iter().rev().take(3).enumerate() {
        graph.output(format!("out{k}"), value);
    }
    graph
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_graphs_give_the_same_results_eager_and_planned(
        steps in prop::collection::vec((0u8..13, 0usize..20, 0usize..20), 1..40)
    ) {
        let graph = grown(&steps);
        let setup = Setup {
            open: &|| Ok(cpu()),
            memory_limit: None,
            iters: 1,
            poison: true,
            recipe: Recipe::default(),
            progress: &|_| {},
            observe: None,
        };
        let found = compare(&graph, &inputs(&graph), &setup).map_err(|e| TestCaseError::fail(e.to_string()))?;
        if let Err(error) = found.verdict(1e-5) {
            return Err(TestCaseError::fail(format!("{error}\n{}", report::comparison("graph", &found))));
        }
        prop_assert_eq!(measured(&found.columns[3]).peak_reserved_bytes, found.columns[3].smallest_device_bytes);
    }
}

/// A constant that several kernels read in different packed layouts is stored once per layout.
#[test]
fn a_constant_is_packed_for_each_use() {
    let mut graph = Graph::new("shared");
    let fact = |shape: &[usize]| Fact::new(DType::F32, Shape::new(shape));
    let square = graph.input("square", fact(&[16, 16]));
    let w = graph.constant(Constant::new("w", random(&fact(&[16, 16]), 3)));
    let taps = graph.constant(Constant::new("taps", random(&fact(&[16, 16, 1, 1]), 4)));
    let large = graph.input("large", fact(&[1, 16, 12, 12]));
    let small = graph.input("small", fact(&[1, 16, 3, 3]));
    let uses = [("MatMul", square, w), ("MatMul", w, square), ("Conv", large, taps), ("Conv", small, taps)];
    for (k, (op, a, b)) in uses.into_iter().enumerate() {
        let row = ops::find(op).expect("a row");
        let node = graph.add(row, &format!("use{k}"), &[Some(a), Some(b)], Attrs::new(), &[]).expect("it fits");
        graph.output(format!("y{k}"), node.output(0));
    }
    let inputs = inputs(&graph);
    let expected = reference::run(&graph, &inputs).expect("the reference runs");
    let (_, program) = unfused(&graph, cpu().target());
    let mut eager = Eager::load(&program, cpu(), Kind::Caching, None, None).expect("it fits");
    for (found, expected) in eager.run(&inputs).expect("it runs").iter().zip(&expected) {
        common::agrees(found, expected, 1e-5).expect("as the reference");
    }
    compared(&graph, cpu, None).verdict(1e-5).expect("planned as eager");
}

/// Products that are written in place into their concatenation, each row of it apart from the next, are the same to the bit as
/// products that are copied there. Deep ones, so that any other order of summation shows.
#[test]
fn products_in_a_concatenation_are_summed_in_the_same_order() {
    let fact = |shape: &[usize]| Fact::new(DType::F32, Shape::new(shape));
    let mut graph = Graph::new("joined");
    let x = graph.input("x", fact(&[5, 3, 700]));
    let mut parts = Vec::new();
    for seed in 0..2 {
        let weights = Constant::new(format!("w{seed}"), random(&fact(&[700, 40]), seed));
        let w = graph.constant(weights);
        let row = ops::find("MatMul").expect("a row");
        let node = graph.add(row, "product", &[Some(x), Some(w)], Attrs::new(), &[]).expect("it multiplies");
        parts.push(Some(node.output(0)));
    }
    let row = ops::find("Concat").expect("a row");
    let node = graph.add(row, "joined", &parts, Attrs::new().with("axis", -1), &[]).expect("it joins");
    graph.output("y", node.output(0));
    let found = compared(&graph, cpu, None);
    found.verdict(1e-5).expect("equal bit for bit");
    assert!(found.columns[3].launches < found.columns[0].launches, "the plan joins in place, eager copies");
}
