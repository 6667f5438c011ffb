//! Files that others have cut for ranks, with ONNX Runtime's collectives.

use super::{each, mesh, options, rule};
use plimsoll::internals::graph::Graph;
use plimsoll::internals::onnx::{self, text};
use plimsoll::internals::reference;
use plimsoll::{DType, Options, Session, Tensor};
use std::path::Path;

const COLUMNS: usize = 8;

fn weight(row: usize, column: usize) -> f64 {
    ((row * 13 + column * 7) % 11) as f64 / 4.0 - 1.0
}

/// The file of a rank: two products, cut along what is between them.
fn graph(rank: usize, ranks: usize) -> Graph {
    let own = rank * COLUMNS / ranks..(rank + 1) * COLUMNS / ranks;
    let listed = |numbers: Vec<f64>| numbers.iter().map(f64::to_string).collect::<Vec<_>>().join(", ");
    let up = listed((0..4).flat_map(|row| own.clone().map(move |column| weight(row, column))).collect());
    let down = listed(own.clone().flat_map(|row| (0..3).map(move |column| weight(row, column + 5))).collect());
    let (each, all) = (own.len(), if ranks == 1 { "Identity" } else { "com.microsoft.AllReduce" });
    let (size, width) = (ranks, COLUMNS);
    let of_two = if ranks == 1 {
        "gathered = Identity (hidden) swapped = Identity (hidden)".to_owned()
    } else {
        format!(
            "gathered = com.microsoft.AllGather <axis = -1, group_size = {size}> (hidden)
             swapped = com.microsoft.AllToAll <group_size = {size}> (hidden)"
        )
    };
    let source = format!(
        r#"<ir_version: 10, opset_import: ["" : 20, "com.microsoft" : 1]>
        cut (float[2, 4] x) => (float[2, 3] y, float[2, {width}] gathered, float[2, {each}] swapped)
        <float[4, {each}] up = {{{up}}}, float[{each}, 3] down = {{{down}}}>
        {{
          hidden = MatMul (x, up)
          bent = Relu (hidden)
          terms = MatMul (bent, down)
          y = {all} (terms)
          {of_two}
        }}"#
    );
    let proto = text::parse(&source, Path::new("cut")).expect("the test's text is well-formed");
    onnx::import(&onnx::Model::new(proto), &[]).expect("it is imported")
}

fn x() -> Tensor {
    Tensor::from_f64(DType::F32, [2, 4], &[1.0, -2.0, 0.5, 3.0, -1.5, 0.25, 2.0, -0.75])
}

#[test]
fn files_that_others_cut_run_as_they_are() {
    let whole = Session::from_graph(graph(0, 1), &options()).expect("it is planned");
    let expected = whole.run(&[("x", x())]).expect("it runs");
    let expected: Vec<Vec<f64>> = expected.iter().map(|(_, tensor)| tensor.to_f64()).collect();
    for (on, ranks) in [("tensor=2", 2), ("tensor=4", 4), ("data=2,tensor=1", 2)] {
        let mesh = mesh(on);
        let found = each(&mesh, |ranks| {
            let own = graph(ranks.rank(), mesh.ranks());
            let options = Options { mesh: Some(mesh.clone()), ranks: Some(ranks), ..options() };
            let session = Session::from_graph(own, &options).expect("it is planned");
            assert_eq!(session.usage().bytes, session.plan().bytes(), "planned == allocated");
            session.run(&[("x", x())]).expect("it runs")
        });
        let each = COLUMNS / ranks;
        // The columns of each rank, row by row, as the whole has them.
        let own = |rank: usize| -> Vec<f64> {
            (0..2).flat_map(|row| expected[1][row * COLUMNS + rank * each..][..each].to_vec()).collect()
        };
        for (rank, outputs) in found.iter().enumerate() {
            let found: Vec<Vec<f64>> = outputs.iter().map(|(_, tensor)| tensor.to_f64()).collect();
            let part = 2 * each / ranks;
            let swapped: Vec<f64> = (0..ranks).flat_map(|of| own(of)[rank * part..][..part].to_vec()).collect();
            for (found, expected) in found.iter().zip([&expected[0], &expected[1], &swapped]) {
                let off = found.iter().zip(expected).fold(0.0, |off: f64, (a, b)| off.max((a - b).abs()));
                assert!(found.len() == expected.len() && off < 1e-5, "{on}: {found:?} of {expected:?}");
            }
        }
    }
}

#[test]
fn a_mesh_of_other_ranks_than_the_file_was_cut_for_is_refused() {
    let alone = Session::from_graph(graph(0, 2), &options()).map(drop).expect_err("it was cut").to_string();
    assert!(alone.contains("the file was cut for"), "{alone}");
    assert!(alone.contains("expected a mesh of one axis with as many, such as tensor=2, found none"), "{alone}");
    let alone = reference::run(&graph(0, 2), &[x()]).map(drop).expect_err("it was cut").to_string();
    assert!(alone.contains("the file was cut for"), "{alone}");
    for on in ["tensor=4", "data=2,tensor=2"] {
        for error in each(&mesh(on), |ranks| {
            let options = Options { mesh: Some(mesh(on)), ranks: Some(ranks), ..options() };
            Session::from_graph(graph(0, 2), &options).map(drop).expect_err("the mesh is another").to_string()
        }) {
            assert!(error.contains(&format!("with as many, found '{on}'")), "{error}");
        }
    }
    for error in each(&mesh("tensor=2"), |ranks| {
        let options = Options {
            mesh: Some(mesh("tensor=2")),
            shards: vec![rule("up", 1, "tensor")],
            ranks: Some(ranks),
            ..options()
        };
        Session::from_graph(graph(0, 2), &options).map(drop).expect_err("it is cut already").to_string()
    }) {
        assert!(error.contains("expected nothing to split, found 'up'"), "{error}");
    }
}
