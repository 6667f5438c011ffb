//! Concatenations that move behind elementwise operators: how many kernels are left, and what these compute.

mod common;

use common::{graph, runs_as_the_reference};
use plimsoll::plan::lower::{Options, lower};
use plimsoll::{Target, pass};

/// A graph and the steps that it is lowered to where parts are written in place.
const CASES: &[(usize, &str)] = &[
    // Halves that change places, one of them through an operator: a kernel per half.
    (
        2,
        "halves (float[2, 4, 3, 16] x, float[3, 16] cos, float[3, 16] sin) => (float[2, 4, 3, 16] y) {
            z = Constant <value = int64[1] {0}> ()  h = Constant <value = int64[1] {8}> ()
            e = Constant <value = int64[1] {16}> ()  l = Constant <value = int64[1] {3}> ()
            a = Slice (x, z, h, l)  b = Slice (x, h, e, l)  n = Abs (b)
            t = Concat <axis = -1> (n, a)
            p = Mul (t, sin)  q = Mul (x, cos)  y = Add (q, p)
        }",
    ),
    // Of unlike parts, under operands that broadcast along the axis or lack it, to the last operator.
    (
        2,
        "unlike (float[3, 2, 4] a, float[3, 5, 4] b, float[3, 1, 4] r, float[4] s, float[7, 1] t) => (float[3, 7, 4] y) {
            c = Relu (a)  d = Neg (b)  w = Concat <axis = 1> (c, d)
            e = Add (r, w)  f = Mul (e, s)  y = Sub (t, f)
        }",
    ),
    // What the reader reads beside it has another reader: it is made once, and the halves see slices of it.
    (
        3,
        "shared (float[6, 4] a, float[6, 8] b) => (float[6, 8] y, float[6, 8] u) {
            c = Exp (a)  d = Abs (a)  w = Concat <axis = 1> (c, d)
            u = Tanh (b)  y = Mul (w, u)
        }",
    ),
    // Somebody else reads the concatenation.
    (
        4,
        "read (float[6, 4] a, float[6, 8] b) => (float[6, 8] y, float[6] u) {
            c = Exp (a)  d = Abs (a)  w = Concat <axis = 1> (c, d)
            u = ReduceMax <axes = [1], keepdims = 0> (w)  y = Mul (w, b)
        }",
    ),
    // The reader broadcasts it.
    (
        3,
        "wider (float[6, 4] a, float[2, 6, 8] b) => (float[2, 6, 8] y) {
            c = Exp (a)  d = Abs (a)  w = Concat <axis = 1> (c, d)  y = Mul (w, b)
        }",
    ),
    // An input is no work to save.
    (
        3,
        "input (float[6, 4] a, float[6, 4] b) => (float[6, 8] y) { c = Exp (a)  w = Concat <axis = 1> (c, b)  y = Sqrt (w) }",
    ),
    // It reads the concatenation twice.
    (
        3,
        "twice (float[6, 4] a) => (float[6, 8] y) {
            c = Exp (a)  d = Abs (a)  w = Concat <axis = 1> (c, d)  y = Mul (w, w)
        }",
    ),
];

#[test]
fn parts_are_computed_where_they_lie() {
    for (steps, text) in CASES {
        let graph = graph(text);
        for target in [Target::cpu(2), Target::wgpu()] {
            let mut passed = graph.clone();
            pass::run(&mut passed, &target, true).expect("the passes run");
            let draft = lower(&passed, &target, Options { join: true }).expect("it is lowered");
            let names: Vec<_> = draft.steps.iter().map(|s| s.name.clone()).collect();
            assert_eq!(names.len(), *steps, "{} on {}: {names:?}", graph.name, target.name);
        }
    }
}

#[test]
fn results_are_those_of_the_reference() {
    let mut state = 1;
    for opener in common::backends() {
        CASES.iter().for_each(|(_, text)| drop(runs_as_the_reference(&graph(text), &opener, &mut state)));
    }
}

/// Random chains of elementwise operators behind concatenations along random axes, of operands that broadcast in random ways.
#[test]
fn random_chains_are_computed_as_by_the_reference() {
    let mut state = 7u64;
    let mut pick = |n: usize| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) as usize % n
    };
    let (mut sunk, mut numbers) = (0, 3);
    for round in 0..150 {
        let rank = 1 + pick(3);
        let axis = pick(rank);
        let base: Vec<usize> = (0..rank).map(|_| 1 + pick(4)).collect();
        let lens: Vec<usize> = (0..2 + pick(3)).map(|_| 1 + pick(4)).collect();
        let with =
            |len: usize| base.iter().enumerate().map(|(k, &d)| if k == axis { len } else { d }).collect::<Vec<_>>();
        let whole = with(lens.iter().sum());
        let show = |shape: &[usize]| shape.iter().map(usize::to_string).collect::<Vec<_>>().join(", ");
        let mut inputs = Vec::new();
        let mut body = String::new();
        for (i, &len) in lens.iter().enumerate() {
            inputs.push(format!("float[{}] x{i}", show(&with(len))));
            body += &format!(" p{i} = {} (x{i})", ["Neg", "Abs", "Relu", "Sigmoid"][pick(4)]);
        }
        let parts: Vec<String> = (0..lens.len()).map(|i| format!("p{i}")).collect();
        body += &format!(" v0 = Concat <axis = {axis}> ({})", parts.join(", "));
        let depth = 1 + pick(4);
        for step in 0..depth {
            let skip = pick(rank);
            let operand: Vec<usize> = whole[skip..].iter().map(|&d| if pick(3) == 0 { 1 } else { d }).collect();
            inputs.push(format!("float[{}] o{step}", show(&operand)));
            let other = match pick(2) {
                0 => format!("o{step}"),
                _ => {
                    body += &format!(" q{step} = Tanh (o{step})");
                    format!("q{step}")
                }
            };
            let op = ["Add", "Sub", "Mul", "Max"][pick(4)];
            let (left, right) = if pick(2) == 0 { (format!("v{step}"), other) } else { (other, format!("v{step}")) };
            body += &format!(" v{} = {op} ({left}, {right})", step + 1);
        }
        let text = format!("g{round} ({}) => (float[{}] v{depth}) {{{body} }}", inputs.join(", "), show(&whole));
        let plan = runs_as_the_reference(&graph(&text), &common::backends()[0], &mut numbers);
        sunk +=
            usize::from(plan.steps.iter().filter(|s| s.name.starts_with(&format!("v{depth}/"))).count() == lens.len());
    }
    assert!(sunk > 100, "{sunk} of 150 concatenations moved to the end");
}
