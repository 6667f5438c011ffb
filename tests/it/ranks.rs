//! Several ranks compute what one device does, and take the bytes that their plan says.

use crate::graphs;
use plimsoll::internals::backend::ranks::{Ranks, Threads};
use plimsoll::internals::mesh::Mesh;
use plimsoll::internals::plan::{Plan, Rule};
use plimsoll::{Choice, Graph, Options, Session, Tensor};
use std::sync::Arc;
use std::thread;

fn mesh(text: &str) -> Mesh {
    Mesh::parse(text).expect("it is a mesh")
}

/// What a rule of the command line says.
fn rule(pattern: &str, dim: usize, axis: &str) -> Rule {
    Rule { pattern: pattern.into(), dim, axis: axis.into() }
}

fn options() -> Options {
    Options { threads: 1, ..Options::default() }.on(Choice::Cpu)
}

/// Runs a function for each rank of a mesh, by a thread of its own.
fn each<T: Send>(mesh: &Mesh, of_rank: impl Fn(Arc<dyn Ranks>) -> T + Sync) -> Vec<T> {
    thread::scope(|scope| {
        let of_rank = &of_rank;
        let threads: Vec<_> = Threads::of(mesh).into_iter().map(|ranks| scope.spawn(move || of_rank(ranks))).collect();
        threads.into_iter().map(|thread| thread.join().expect("a rank does not panic")).collect()
    })
}

/// Random inputs of a session.
fn inputs(session: &Session) -> Vec<(String, Tensor)> {
    let tensor = |at: usize, shape: &[usize]| {
        let count: usize = shape.iter().product();
        let values: Vec<f64> = (0..count).map(|i| f64::from(((i * 37 + at * 11) % 101) as u32) / 101.0 - 0.5).collect();
        values
    };
    let made = |(at, port): (usize, &plimsoll::Port)| {
        (port.name.clone(), Tensor::from_f64(port.dtype, port.shape.clone(), &tensor(at, &port.shape)))
    };
    session.inputs().iter().enumerate().map(made).collect()
}

fn lent(inputs: &[(String, Tensor)]) -> Vec<(&str, Tensor)> {
    inputs.iter().map(|(name, tensor)| (&name[..], tensor.clone())).collect()
}

/// Holds what the ranks of a mesh compute against one device. Returns the plan of a rank.
fn same(graph: &Graph, on: &str, by: &[Rule], most: f64) -> Plan {
    let whole = Session::from_graph(graph.clone(), &options()).expect("it is planned");
    let inputs = inputs(&whole);
    let expected = whole.run(&lent(&inputs)).expect("it runs");
    let mesh = mesh(on);
    let found = each(&mesh, |ranks| {
        let options = Options { mesh: Some(mesh.clone()), shards: by.to_vec(), ranks: Some(ranks), ..options() };
        let session = Session::from_graph(graph.clone(), &options).expect("it is planned");
        assert_eq!(session.usage().bytes, session.plan().bytes(), "planned == allocated");
        session.run_poisoned(&lent(&inputs)).expect("it runs");
        (session.run(&lent(&inputs)).expect("it runs"), session.plan().clone())
    });
    for (outputs, _) in &found {
        for ((name, expected), (_, found)) in expected.iter().zip(outputs) {
            let (a, b) = (expected.to_f64(), found.to_f64());
            let peak = a.iter().fold(0.0, |peak: f64, a| peak.max(a.abs()));
            let off = a.iter().zip(&b).fold(0.0, |off: f64, (a, b)| off.max((a - b).abs()));
            assert!(
                a.len() == b.len() && off <= most * peak,
                "'{}' of {} on {on}: off by {off} of {peak}",
                name,
                graph.name
            );
        }
    }
    found.into_iter().next().expect("a mesh has a rank").1
}

#[test]
fn files_are_the_same_on_two_and_four_ranks() {
    for (file, dims) in graphs::GRAPHS {
        let dims: Vec<_> =
            dims.iter().map(|&(name, extent)| (name, if name == "batch" { 8 } else { extent })).collect();
        let graph = graphs::import(file, &dims);
        for on in ["data=2", "data=4"] {
            same(&graph, on, &[], 1e-5);
        }
    }
}

#[test]
fn products_are_split_along_columns_and_rows() {
    let mlp = graphs::import("mlp.onnxtxt", &[("batch", 8)]);
    let by = [rule("w1", 1, "tensor"), rule("b1", 0, "tensor"), rule("w2", 0, "tensor")];
    for on in ["tensor=2", "tensor=4", "data=2,tensor=2"] {
        let plan = same(&mlp, on, &by, 1e-6);
        let exchanges: Vec<_> = plan.programs[0].kernels.iter().filter_map(|kernel| kernel.collective()).collect();
        // The sums of the second product; and the rows of the output.
        assert_eq!(exchanges.len(), 1 + usize::from(on.starts_with("data")), "{exchanges:?}");
    }
    let attention = graphs::import("attention.onnxtxt", &[("batch", 2), ("sequence", 16)]);
    let mut by: Vec<Rule> = ["query", "key", "value"]
        .iter()
        .flat_map(|of| [rule(&format!("w_{of}"), 1, "tensor"), rule(&format!("b_{of}"), 0, "tensor")])
        .collect();
    by.push(rule("w_out", 0, "tensor"));
    let plan = same(&attention, "tensor=2", &by, 1e-6);
    let exchanges = plan.programs[0].kernels.iter().filter_map(|kernel| kernel.collective()).count();
    assert_eq!(exchanges, 1, "heads are apart, and their sum is one exchange");
    assert_eq!(plan.programs[0].shards.len(), by.len());
}

#[test]
fn rows_are_split_along_data() {
    let graph = graphs::import("mlp.onnxtxt", &[("batch", 8)]);
    let whole = Session::from_graph(graph.clone(), &options()).expect("it is planned").plan().bytes();
    for on in ["data=2", "data=4", "data=2,tensor=1"] {
        let plan = same(&graph, on, &[], 1e-5);
        assert_eq!(plan.mesh, Some(mesh(on)));
        assert!(plan.bytes() < whole, "{} of {whole}", plan.bytes());
    }
}
