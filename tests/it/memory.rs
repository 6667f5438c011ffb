//! Plans hold no bytes that they do not need: constants twice, copies of repeated values, workspaces beyond the peak, inputs after their
//! last use.

use crate::common;
use plimsoll::Recipe;
use plimsoll::internals::dtype::DType::{F32, I64};
use plimsoll::internals::graph::Graph;
use plimsoll::internals::plan::{Class, Limits, Plan};
use plimsoll::internals::session::{self, Options, Session};
use plimsoll::internals::target::{Libraries, Target};
use plimsoll::internals::tensor::Tensor;
use plimsoll::internals::trace::{Trace, Var};
use plimsoll::internals::{plan, reference};

fn floats(shape: &[usize], seed: usize) -> Tensor {
    let count = shape.iter().product();
    let values: Vec<f64> = (0..count).map(|i| ((i * 7 + seed * 5) % 23) as f64 / 11.0 - 1.0).collect();
    Tensor::from_f64(F32, shape, &values)
}

fn planned(graph: &Graph, target: &Target) -> Plan {
    let graph = graph.clone();
    let graph = Recipe::default().whole(graph, target).expect("the passes run");
    plan::planned(&graph, target, &Limits { memory: None }).expect("it is planned")
}

/// Runs a graph on every backend and holds its outputs against the reference.
fn runs(graph: &Graph, inputs: &[(&str, Tensor)]) {
    let ordered: Vec<Tensor> = inputs.iter().map(|(_, tensor)| tensor.clone()).collect();
    let expected = reference::run(graph, &ordered).expect("the reference runs");
    for (name, open) in common::backends() {
        let session = common::load(graph.clone(), open(), name, &Options::default());
        let session = session.unwrap_or_else(|e| panic!("{name}: {e}"));
        for _ in 0..2 {
            let found = session.run(inputs).unwrap_or_else(|e| panic!("{name}: {e}"));
            for ((output, found), expected) in found.iter().zip(&expected) {
                common::agrees(found, expected, 1e-5).unwrap_or_else(|e| panic!("{name}: {output}: {e}"));
            }
        }
    }
}

/// A table whose rows are looked up and whose transpose makes the logits.
fn tied() -> Graph {
    let g = Trace::new("tied");
    let table = g.constant("table", floats(&[96, 32], 1));
    let ids = g.input("ids", I64, [2, 8]);
    let hidden = table.gather(ids, 0).relu();
    g.output("logits", hidden.matmul(table.transpose(&[1, 0])));
    g.finish().expect("the graph is sound")
}

#[test]
fn a_constant_is_held_once_however_it_is_read() {
    let graph = tied();
    for target in [Target::cuda(), Target::wgpu()] {
        assert_eq!(planned(&graph, &target).class_bytes(Class::Constant), 96 * 32 * 4, "{}", target.name);
    }
    let ids: Vec<i64> = (0..16).map(|i| i * 5 % 96).collect();
    runs(&graph, &[("ids", Tensor::from_i64([2, 8], &ids).expect("a number per element"))]);
}

/// A constant in a form that has no other readers is made once, at load, in the layout that its kernel prefers.
#[test]
fn a_constant_of_one_form_lies_in_that_form() {
    let g = Trace::new("one form");
    let x = g.input("x", F32, [64, 32]);
    g.output("y", x.matmul(g.constant("w", floats(&[96, 32], 1)).transpose(&[1, 0])));
    let plan = planned(&g.finish().expect("the graph is sound"), &Target::cuda());
    assert_eq!(plan.class_bytes(Class::Constant), 96 * 32 * 4);
    assert_eq!(plan.programs[0].buffers[plan.programs[0].constants[0].buffer].shape[..], [32, 96]);
}

/// If only parts of a table are read, the table itself is not stored.
#[test]
fn parts_of_a_constant_do_not_bring_the_whole() {
    let g = Trace::new("parts");
    let x = g.input("x", F32, [1, 32]);
    let table = g.constant("table", floats(&[4096, 32], 1));
    for (i, row) in [7, 99].into_iter().enumerate() {
        g.output(&format!("y{i}"), (x + table.slice(0, row..row + 1)).exp());
    }
    let graph = g.finish().expect("the graph is sound");
    for target in [Target::cpu(2), Target::cuda(), Target::wgpu()] {
        let constants = planned(&graph, &target).class_bytes(Class::Constant);
        assert!(constants <= 2 * 32 * 4 + target.alignment, "{}: {constants}", target.name);
    }
}

#[test]
fn equal_constants_are_one() {
    let g = Trace::new("twins");
    let x = g.input("x", F32, [4, 32]);
    let [a, b, other] = [("a", 1), ("b", 1), ("other", 2)].map(|(n, seed)| g.constant(n, floats(&[4, 32], seed)));
    g.output("y", (x + a).exp() * b + other);
    let graph = g.finish().expect("the graph is sound");
    assert_eq!(planned(&graph, &Target::cuda()).class_bytes(Class::Constant), 2 * 4 * 32 * 4);
    runs(&graph, &[("x", floats(&[4, 32], 3))]);
}

/// Keys and values that several heads share, as exporters write it, over so many rows of queries.
fn grouped(rows: usize) -> Graph {
    let g = Trace::new("grouped");
    let m = rows as i64;
    let q = g.input("q", F32, [2, 6, rows, 16]);
    let [k, v] = ["k", "v"].map(|name| g.input(name, F32, [2, 2, 24, 16]));
    fn repeated(x: Var<'_>) -> Var<'_> {
        x.unsqueeze(&[2]).expand(&[2, 2, 3, 24, 16]).reshape(&[2, 6, 24, 16])
    }
    let mask = g.constant("mask", floats(&[1, 1, rows, 24], 9));
    let weights = (q.matmul(repeated(k).transpose(&[0, 1, 3, 2])) * 0.25 + mask).softmax(-1);
    g.output("y", weights.matmul(repeated(v)).transpose(&[0, 2, 1, 3]).reshape(&[2, m, 96]));
    g.finish().expect("the graph is sound")
}

#[test]
fn shared_keys_are_not_copied() {
    for rows in [1, 3, 20] {
        let graph = grouped(rows);
        for target in [Target::cpu(2), Target::cuda(), Target::wgpu()] {
            let plan = planned(&graph, &target);
            let largest =
                plan.programs[0].buffers.iter().filter(|b| b.class == Class::Activation).map(|b| b.bytes).max();
            // Six copies of the two heads' keys would be 2 * 6 * 24 * 16 floats.
            let most = (2 * 6 * rows * 24 * 4) as u64;
            assert!(largest.is_none_or(|bytes| bytes <= most), "{rows} rows on {}: {largest:?}", target.name);
            assert!(
                plan.programs[0].steps.iter().all(|s| !s.name.contains("expand") && !s.name.contains("Expand")),
                "{plan:#?}"
            );
        }
        let [k, v] = [5, 6].map(|seed| floats(&[2, 2, 24, 16], seed));
        runs(&graph, &[("q", floats(&[2, 6, rows, 16], 4)), ("k", k), ("v", v)]);
    }
}

/// Heads are repeated for readers that are no products, and for outputs.
#[test]
fn repeated_heads_are_there_for_who_needs_them() {
    let g = Trace::new("repeated");
    let x = g.input("x", F32, [2, 2, 4, 8]);
    let heads = x.unsqueeze(&[2]).expand(&[2, 2, 3, 4, 8]).reshape(&[2, 6, 4, 8]);
    let q = g.input("q", F32, [2, 6, 5, 4]);
    g.output("product", q.matmul(heads));
    g.output("heads", heads);
    g.output("sums", heads.exp());
    let graph = g.finish().expect("the graph is sound");
    runs(&graph, &[("x", floats(&[2, 2, 4, 8], 1)), ("q", floats(&[2, 6, 5, 4], 2))]);
}

/// A chain of products with the peak in the middle one.
fn products() -> Graph {
    let g = Trace::new("products");
    let mut x = g.input("x", F32, [512, 256]);
    for (i, [k, n]) in [[256, 2048], [2048, 1024], [1024, 64]].into_iter().enumerate() {
        x = x.matmul(g.constant(&format!("w{i}"), floats(&[k, n], i))).relu();
    }
    g.output("y", x);
    g.finish().expect("the graph is sound")
}

#[test]
fn workspaces_take_what_is_free() {
    const MIB: u64 = 1 << 20;
    let graph = products();
    // On tensor cores, all of them are library calls.
    let target = Target { allow_tf32: true, ..Target::cuda() };
    let without = planned(&graph, &Target { libraries: Libraries::default(), ..target.clone() });
    let plan = planned(&graph, &target);
    let (with, least) = (plan.bytes(), without.bytes());
    assert!(with <= least + least / 16 + MIB / 8, "{with} beside {least}");
    let spaces: Vec<u64> =
        plan.programs[0].buffers.iter().filter(|b| b.class == Class::Workspace).map(|b| b.bytes).collect();
    let calls: Vec<_> = plan.programs[0]
        .steps
        .iter()
        .filter_map(|step| plan.programs[0].kernels[step.kernel].schedule.call())
        .collect();
    assert_eq!((spaces.len(), calls.len()), (3, 3));
    // The second makes the peak. The others have room for larger workspaces than they need.
    assert!(calls.iter().zip(&spaces).all(|(c, &s)| c.least_workspace() <= s && s <= c.workspace()), "{spaces:?}");
    assert!(spaces[1] <= least / 16 && spaces[1] < calls[1].wanted_workspace(), "{spaces:?}");
    assert!(spaces[0] > calls[0].least_workspace() || spaces[2] == calls[2].workspace(), "{spaces:?}");
    for step in &plan.programs[0].steps {
        let kernel = &plan.programs[0].kernels[step.kernel];
        let space = plan.programs[0].buffers[step.writes[kernel.writes.len()]].bytes;
        assert!(kernel.schedule.call().is_some() && kernel.workspace == space, "{}", step.name);
    }
}

#[test]
fn inputs_make_room_and_are_written_before_each_run() {
    let g = Trace::new("room");
    let x = g.input("x", F32, [64, 64]);
    g.output("y", x.transpose(&[1, 0]).matmul(x).exp().matmul(g.constant("w", floats(&[64, 64], 1))));
    let graph = g.finish().expect("the graph is sound");
    let options = Options { backend: session::Choice::Cpu, threads: 1, ..Options::default() };
    let session = Session::from_graph(graph, &options).expect("it is loaded");
    let plan = session.plan();
    assert!(plan.programs[0].consumes_inputs());
    assert!(
        plan.programs[0].summary.arena_bytes
            < plan.programs[0].summary.input_bytes + plan.programs[0].summary.output_bytes + 64 * 64 * 4
    );
    let input = [("x", floats(&[64, 64], 2))];
    let first = session.run(&input).expect("it runs");
    let error = session.with(|exec| exec.replay()).expect_err("the input is gone");
    assert!(error.to_string().contains("written before each run"), "{error}");
    assert_eq!(session.run(&input).expect("it runs"), first);
    // Outputs stay live.
    assert_eq!(session.with(|exec| exec.read()).expect("they are there")[0], first[0].1);
}
