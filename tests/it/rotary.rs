//! Concatenations of a value's own parts, as in rotary embeddings: some become views, with the same meaning.

use crate::common;
use plimsoll::internals::exec::Exec;
use plimsoll::internals::plan::Limits;
use plimsoll::internals::{onnx, plan, reference};
use plimsoll::{DType, Graph, Recipe, Target, Tensor};
use std::path::Path;

/// A graph over `x` (its head names more), and how many steps its plan has: none where parts are stored, each by a step of its own.
struct Case {
    head: &'static str,
    body: &'static str,
    steps: Option<usize>,
}

const HALVES: &str = "lo = Slice (x, zero, four, last)  hi = Slice (x, four, eight, last)";
const NEIGHBOURS: &str =
    "even = Slice (x, zero, eight, last, two)  odd = Slice (x, one, eight, last, two)  n = Neg (odd)
    first = Unsqueeze (n, last)  second = Unsqueeze (even, last)  t = Concat <axis = -1> (first, second)";

const CASES: &[Case] = &[
    // Rotary embeddings that swap halves of a row, between a transposed product and its reader; and ones that swap neighbours.
    Case {
        head: "halves (float[2, 3, 5, 8] x, float[5, 8] c, float[5, 8] s) => (float[2, 3, 5, 8] y)",
        body: "HALVES  n = Neg (hi)  t = Concat <axis = -1> (n, lo)  a = Mul (x, c)  b = Mul (t, s)  y = Add (a, b)",
        steps: Some(1),
    },
    Case {
        head: "turned (float[2, 5, 3, 8] z, float[2, 1, 5, 1] c, float[8] s, float k) => (float[2, 3, 5, 8] y)",
        body: "x = Transpose <perm = [0, 2, 1, 3]> (z)  HALVES  n = Neg (lo)  t = Concat <axis = 3> (hi, n)
            a = Mul (x, c)  b = Mul (t, s)  d = Sub (b, a)  e = Mul (d, k)  y = Tanh (e)",
        steps: Some(1),
    },
    Case {
        head: "neighbours (float[2, 5, 8] x, float[5, 8] c, float[5, 8] s) => (float[2, 5, 8] y)",
        body: "NEIGHBOURS  shape = Shape (x)  r = Reshape (t, shape)  a = Mul (x, c)  b = Mul (r, s)  y = Add (a, b)",
        steps: Some(1),
    },
    // With several readers, the view is stored once, with its signs applied.
    Case {
        head: "shared (float[3, 8] x, float[8] s) => (float[3, 8] y, float[3, 8] w)",
        body: "HALVES  n = Neg (hi)  t = Concat <axis = -1> (n, lo)  y = Mul (t, s)  w = Exp (t)",
        steps: Some(3),
    },
    // The concatenation is an output, its parts are in order, there are more than two, or one of them has another reader.
    Case {
        head: "signs (float[3, 8] x) => (float[3, 8] y)",
        body: "HALVES  n = Neg (hi)  y = Concat <axis = -1> (lo, n)",
        steps: Some(1),
    },
    Case {
        head: "quarters (float[8, 3] x, float[8, 3] s) => (float[8, 3] y)",
        body: "p = Slice (x, zero, two, zero)  q = Slice (x, two, four, zero)  r = Slice (x, four, six, zero)  u = Slice (x, six, eight, zero)
            n = Neg (q)  t = Concat <axis = 0> (u, r, n, p)  y = Add (t, s)",
        steps: Some(1),
    },
    Case {
        head: "pairs (float[2, 5, 8] x) => (float[2, 5, 4, 2] y)",
        body: "NEIGHBOURS  y = Mul (t, t)",
        steps: Some(1),
    },
    Case {
        head: "needed (float[3, 8] x) => (float[3, 8] y, float[3, 4] n)",
        body: "HALVES  n = Neg (hi)  y = Concat <axis = -1> (n, lo)",
        steps: Some(2),
    },
    // None of these: parts of different lengths, in no even order, of two values, with nothing to compute.
    Case {
        head: "uneven (float[3, 8] x) => (float[3, 8] y)",
        body: "a = Slice (x, two, eight, last)  b = Slice (x, zero, two, last)
            n = Neg (a)  y = Concat <axis = 1> (n, b)",
        steps: None,
    },
    Case {
        head: "order (float[3, 6] x) => (float[3, 6] y)",
        body: "a = Slice (x, two, four, last)  b = Slice (x, zero, two, last)  c = Slice (x, four, six, last)
            n = Neg (a)  y = Concat <axis = 1> (n, b, c)",
        steps: None,
    },
    Case {
        head: "others (float[3, 8] x, float[3, 8] z) => (float[3, 8] y)",
        body: "a = Slice (x, four, eight, last)  b = Slice (z, zero, four, last)
            n = Neg (a)  y = Concat <axis = 1> (n, b)",
        steps: None,
    },
    Case { head: "swap (float[3, 8] x) => (float[3, 8] y)", body: "HALVES  y = Concat <axis = -1> (hi, lo)", steps: None },
];

fn graph(case: &Case) -> Graph {
    let constants = ["zero", "one", "two", "four", "six", "eight", "last"].iter().zip([0, 1, 2, 4, 6, 8, -1]);
    let constants = constants.map(|(name, value)| format!("{name} = Constant <value_ints = [{value}]> ()\n"));
    let body = case.body.replace("HALVES", HALVES).replace("NEIGHBOURS", NEIGHBOURS);
    let (head, constants) = (case.head, constants.collect::<String>());
    let text = format!("<ir_version: 8, opset_import: [\"\" : 17]>\n{head} {{\n{constants}{body}\n}}");
    let model = onnx::Model::new(onnx::text::parse(&text, Path::new("text")).expect("it parses"));
    onnx::import(&model, &[]).expect("it is a graph")
}

fn planned(graph: &Graph, target: &Target) -> plan::Compiled {
    let graph = graph.clone();
    let graph = Recipe::default().whole(graph, target).expect("the passes run");
    plan::compile(&graph, target, &Limits { memory: None }).expect("it is planned and checked")
}

#[test]
fn parts_that_change_places_are_views() {
    let mut wrong = Vec::new();
    for case in CASES {
        for target in [Target::cpu(2), Target::wgpu(), Target::cuda()] {
            let (plan, _) = planned(&graph(case), &target);
            if case.steps.map_or(plan.programs[0].steps.len() < 2, |steps| plan.programs[0].steps.len() != steps) {
                wrong.push(format!("{} on {}: {} steps", case.head, target.name, plan.programs[0].steps.len()));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn results_are_those_of_the_reference() {
    for (name, open) in common::backends() {
        for case in CASES {
            let graph = graph(case);
            let wave = |k: usize, len: usize| (0..len).map(|i| ((i * 7 + k) as f64 * 0.61).sin()).collect::<Vec<_>>();
            let inputs = graph.inputs().iter().enumerate().map(|(k, &v)| {
                let shape = graph.fact(v).shape.clone();
                Tensor::from_f64(DType::F32, shape.clone(), &wave(k, shape.numel()))
            });
            let inputs: Vec<_> = inputs.collect();
            let expected = reference::run(&graph, &inputs).expect("the reference runs");
            let backend = open();
            let (plan, constants) = planned(&graph, backend.target());
            let mut exec = Exec::load(backend, plan, &constants, &|_| {}).expect("it loads");
            let found = exec.run(&inputs).expect("it runs");
            for (found, expected) in found.iter().zip(&expected) {
                common::agrees(found, expected, 1e-5).unwrap_or_else(|e| panic!("{name}, {}: {e}", case.head));
            }
        }
    }
}
