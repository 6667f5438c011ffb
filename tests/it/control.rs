//! `If` and `Loop` whose conditions a run decides, held against the same decisions in Rust.

use crate::common::backends;
use plimsoll::internals::exec::Exec;
use plimsoll::internals::onnx::{self, Model, text};
use plimsoll::internals::{plan, reference};
use plimsoll::{DType, Graph, Limits, Recipe, Tensor};
use std::path::Path;

fn model(source: &str) -> Model {
    let source = format!("<ir_version: 9, opset_import: [\"\" : 20]> {source}");
    Model::new(text::parse(&source, Path::new("test")).expect("the test's text is well-formed"))
}

fn imported(source: &str, dims: &[(&str, usize)]) -> plimsoll::Result<Graph> {
    let dims: Vec<_> = dims.iter().map(|&(name, size)| (name.to_owned(), size)).collect();
    let graph = onnx::import(&model(source), &dims)?;
    graph.verify()?;
    Ok(graph)
}

fn refusal(source: &str, dims: &[(&str, usize)]) -> String {
    imported(source, dims).expect_err("it must be refused").to_string()
}

/// A graph that is loaded on every backend.
struct Loaded {
    graph: Graph,
    execs: Vec<(&'static str, Exec)>,
}

impl Loaded {
    fn new(source: &str, dims: &[(&str, usize)]) -> Loaded {
        let graph = imported(source, dims).unwrap_or_else(|e| panic!("{e}\n{source}"));
        let load = |(name, open): (&'static str, fn() -> _)| {
            let backend: Box<dyn plimsoll::internals::backend::Backend> = open();
            let passed = Recipe::default().whole(graph.clone(), backend.target()).expect("the passes run");
            let limits = Limits { memory: None };
            let (plan, constants) = plan::compile(&passed, backend.target(), &limits).expect("it is planned");
            (name, Exec::load(backend, plan, &constants, &|_| {}).expect("it loads"))
        };
        let execs = backends().into_iter().map(load).collect();
        Loaded { graph, execs }
    }

    /// The outputs, which are the same to six digits in the reference and on every backend.
    fn run(&mut self, inputs: &[&[f64]]) -> Vec<Vec<f64>> {
        let tensor = |(&value, elements): (&_, &&[f64])| {
            let fact = self.graph.fact(value);
            Tensor::from_f64(fact.dtype, fact.shape.clone(), elements)
        };
        let inputs: Vec<_> = self.graph.inputs().iter().zip(inputs).map(tensor).collect();
        let expected = reference::run(&self.graph, &inputs).expect("the reference runs");
        for (name, exec) in &mut self.execs {
            let found = exec.run(&inputs).unwrap_or_else(|e| panic!("{name}: {e}"));
            for (found, expected) in found.iter().zip(&expected) {
                found.compare(expected, 1e-6, 1e-6).unwrap_or_else(|e| panic!("{name}: {e}"));
            }
        }
        expected.iter().map(Tensor::to_f64).collect()
    }
}

fn close(found: &[f64], expected: &[f64]) {
    let near = found.iter().zip(expected).all(|(a, b)| (a - b).abs() <= 1e-6 * (1.0 + b.abs()));
    assert!(found.len() == expected.len() && near, "expected {expected:?}, found {found:?}");
}

/// Neither the root of a negative number nor a quotient by zero comes through.
#[test]
fn the_branch_that_is_not_taken_leaves_no_trace() {
    let source = "g (bool[1] c, float[3] x, float[3] z) => (float[3] y, float[3] w) {
        y, w = If (c) <
            then_branch = t () => (float[3] a, float[3] b) { a = Sqrt (x) b = Div (x, z) },
            else_branch = e () => (float[3] d, float[3] x) { d = Neg (x) }
        >
    }";
    let mut loaded = Loaded::new(source, &[]);
    let x = [-4.0, -9.0, -16.0];
    let found = loaded.run(&[&[0.0], &x, &[0.0; 3]]);
    assert_eq!(found, [vec![4.0, 9.0, 16.0], x.to_vec()]);
    let found = loaded.run(&[&[1.0], &[4.0, 9.0, 16.0], &[2.0, 0.5, -4.0]]);
    assert_eq!(found, [vec![2.0, 3.0, 4.0], vec![2.0, 18.0, -4.0]]);
}

/// Two conditions, one within a branch of the other, over values of each type that people choose among.
#[test]
fn branches_nest() {
    let source = "g (bool c, bool d, int64[2] n, bool[2] b) => (int64[2] y, bool[2] z, int64[2] k) <int64[2] k1 = {7, 8}, int64[2] k2 = {5, 6}> {
        y, z, k = If (c) <
            then_branch = t () => (int64[2] ty, bool[2] tz, int64[2] k1) {
                ty, tz = If (d) <
                    then_branch = tt () => (int64[2] p, bool[2] q) { p = Add (n, n) q = Not (b) },
                    else_branch = te () => (int64[2] p, bool[2] b) { p = Neg (n) }
                >
            },
            else_branch = e () => (int64[2] n, bool[2] ez, int64[2] k2) { ez = Identity (b) }
        >
    }";
    let mut loaded = Loaded::new(source, &[]);
    for (c, d) in [(0.0, 0.0), (0.0, 1.0), (1.0, 0.0), (1.0, 1.0)] {
        let (n, b) = ([3.0, -4.0], [1.0, 0.0]);
        let expected = match (c == 1.0, d == 1.0) {
            (true, true) => [[6.0, -8.0], [0.0, 1.0], [7.0, 8.0]],
            (true, false) => [[-3.0, 4.0], b, [7.0, 8.0]],
            (false, _) => [n, b, [5.0, 6.0]],
        };
        assert_eq!(loaded.run(&[&[c], &[d], &n, &b]), expected.map(|y| y.to_vec()), "{c} {d}");
    }
}

/// Indices are refused before a run only where they matter.
#[test]
fn indices_of_the_other_branch_may_be_any() {
    let source = "g (bool c, float[3] x, int64[2] at) => (float[2] y, float[3] s) <int64[2] far = {40, -50}> {
        y, s = If (c) <
            then_branch = t () => (float[2] a, float[3] u) { a = Gather (x, at) u = ScatterElements (x, at, a) },
            else_branch = e () => (float[2] b, float[3] v) { f = Cast <to = 1> (at) b = Neg (f) v = Neg (x) }
        >
    }";
    let mut loaded = Loaded::new(source, &[]);
    let x = [1.0, 2.0, 3.0];
    assert_eq!(loaded.run(&[&[1.0], &x, &[2.0, -3.0]]), [vec![3.0, 1.0], vec![1.0, 2.0, 3.0]]);
    assert_eq!(loaded.run(&[&[0.0], &x, &[1000.0, -70.0]]), [vec![-1000.0, 70.0], vec![-1.0, -2.0, -3.0]]);
    let constant = source.replace("Gather (x, at)", "Gather (x, far)").replace("(x, at, a)", "(x, far, a)");
    let found = Loaded::new(&constant, &[]).run(&[&[0.0], &x, &[1.0, 2.0]]);
    assert_eq!(found, [vec![-1.0, -2.0], vec![-1.0, -2.0, -3.0]]);
}

#[test]
fn branches_of_other_shapes_are_refused() {
    let source = "g (float[2] x, bool c) => (float[m] y) {
        y = If (c) <
            then_branch = t () => (float[k] a) { a = Neg (x) },
            else_branch = e () => (float[k] b) { b = Concat <axis = 0> (x, x) }
        >
    }";
    assert_eq!(
        refusal(source, &[]),
        "node 'y' (If): output 'y' is f32[2] in one branch and f32[4] in the other: input 'cond' must be known before the run, but 'c' \
         depends on the data of 'c'; where their elements are given, they are bound"
    );
    // Where it is given, it is bound, and the other branch may be anything.
    let broken = source.replace("Concat <axis = 0> (x, x)", "Nothing (x)");
    for source in [source, &broken] {
        let given = vec![("c".to_owned(), Tensor::from_f64(DType::Bool, [], &[1.0]))];
        let graph = onnx::import(&model(source).with_values(given), &[]).expect("a graph");
        assert_eq!(graph.inputs().len(), 1);
    }
    let found = refusal(&broken, &[]);
    assert!(found.starts_with("node 'y/else/b' (Nothing): plimsoll does not have this operator"), "{found}");
    assert!(
        found.contains("; it is in a branch that is read because input 'cond' must be known before the run"),
        "{found}"
    );
    let wide = source.replace("bool c", "bool[2] c");
    assert_eq!(refusal(&wide, &[]), "node 'y' (If): input 'cond': expected one element of bool, found bool[2]");
}

/// x becomes x / 2 if it is even, and else 3 x + 1, until it is 1.
const COLLATZ: &str = "g (int64 x) => (int64 last, int64 steps) <int64 zero = {0}, int64 one = {1}, int64 two = {2}, int64 three = {3}, int64 m = {20}> {
    more = Greater (x, one)
    last, steps = Loop (m, more, x, zero) <body = b (int64 i, bool go, int64 n, int64 k) => (bool on, int64 next, int64 up) {
        rest = Mod (n, two) odd = Equal (rest, one)
        next = If (odd) <
            then_branch = t () => (int64 a) { p = Mul (n, three) a = Add (p, one) },
            else_branch = e () => (int64 h) { h = Div (n, two) }
        >
        up = Add (k, one)
        on = Greater (next, one)
    }>
}";

fn collatz(mut x: i64, most: i64) -> [Vec<f64>; 2] {
    let mut steps = 0;
    while x > 1 && steps < most {
        x = if x % 2 == 1 { 3 * x + 1 } else { x / 2 };
        steps += 1;
    }
    [vec![x as f64], vec![steps as f64]]
}

#[test]
fn a_loop_ends_when_its_condition_does() {
    let mut loaded = Loaded::new(COLLATZ, &[]);
    for x in [-5, 0, 1, 2, 3, 6, 7, 12, 19, 27] {
        assert_eq!(loaded.run(&[&[x as f64]]), collatz(x, 20), "from {x}");
    }
    // A dim says how often it runs at most, as 'M' does.
    let open = COLLATZ.replace("Loop (m, ", "Loop (, ");
    let mut loaded = Loaded::new(&open, &[("last.trips", 7)]);
    for x in [1, 3, 16, 7] {
        assert_eq!(loaded.run(&[&[x as f64]]), collatz(x, 7), "from {x}");
    }
    assert_eq!(
        refusal(&open, &[]),
        "node 'last' (Loop): its iterations have no bound: set the dim 'last.trips' to the most iterations, up to 8192, or: input 'cond' \
         must be known before the run, but 'more' depends on the data of 'x'; where their elements are given, they are bound"
    );
    assert_eq!(
        refusal(&open, &[("first.trips", 7)]),
        "the graph has no dim 'first.trips' to set; its dims: 'last.trips'"
    );
}

/// An element of a table is added per iteration. The table is shorter than the bound.
const SUMS: &str = "g (int64 m, float[2] x) => (float[2] y) <float[3, 2] table = {1, 2, 4, 8, 16, 32}, int64 five = {5}, bool yes = {1}> {
    most = Min (m, five)
    y = Loop (most, yes, x) <body = b (int64 i, bool go, float[2] s) => (bool go, float[2] t) {
        row = Gather (table, i)
        t = Add (s, row)
    }>
}";

#[test]
fn a_loop_runs_as_often_as_the_run_says() {
    let mut loaded = Loaded::new(SUMS, &[]);
    for (m, expected) in [(-3.0, [0.5, 0.25]), (0.0, [0.5, 0.25]), (1.0, [1.5, 2.25]), (3.0, [21.5, 42.25])] {
        close(&loaded.run(&[&[m], &[0.5, 0.25]])[0], &expected);
    }
    let open = SUMS.replace("(most, yes", "(m, yes");
    let mut loaded = Loaded::new(&open, &[("y.trips", 2)]);
    close(&loaded.run(&[&[9.0], &[0.0, 0.0]])[0], &[5.0, 10.0]);
    assert!(refusal(&open, &[]).contains("its iterations have no bound: set the dim 'y.trips'"));
    let given = vec![("m".to_owned(), Tensor::from_f64(DType::I64, [], &[3.0]))];
    let graph = onnx::import(&model(&open).with_values(given), &[]).expect("a graph");
    assert_eq!(graph.inputs().len(), 1, "where it is given, and needed, it is bound");
}

/// A root by Newton's iteration, within a loop over numbers: the loops end at run time, both of them.
#[test]
fn loops_nest() {
    let source = "g (int64 m, float a) => (float y) <float half = {0.5}, float tenth = {0.1}, float one = {1}, int64 n = {8}, int64 w = {3}, bool yes = {1}> {
        most = Min (m, w)
        y = Loop (most, yes, a) <body = b (int64 i, bool go, float s) => (bool go, float t) {
            root = Loop (n, yes, s) <body = c (int64 j, bool on, float r) => (bool more, float q) {
                d = Div (s, r) e = Add (r, d) q = Mul (e, half)
                miss = Sub (q, r) size = Abs (miss) more = Greater (size, tenth)
            }>
            t = Add (root, one)
        }>
    }";
    let mut loaded = Loaded::new(source, &[]);
    for (m, a) in [(0, 5.0), (1, 30.0), (2, 100.0), (3, 1000.0)] {
        let mut s: f64 = a;
        for _ in 0..m {
            let mut r = s;
            for _ in 0..8 {
                let q = (r + s / r) * 0.5;
                let miss = (q - r).abs();
                r = q;
                if miss <= 0.1 {
                    break;
                }
            }
            s = r + 1.0;
        }
        close(&loaded.run(&[&[f64::from(m)], &[a]])[0], &[s]);
    }
}

#[test]
fn what_a_plan_has_no_room_for_is_refused() {
    let stacked = SUMS
        .replace("y = Loop", "y, all = Loop")
        .replace("(bool go, float[2] t)", "(bool go, float[2] t, float[2] row)");
    assert_eq!(
        refusal(&stacked, &[]),
        "node 'y' (Loop): output 'all' has as many parts as there are iterations: input 'M' must be known before the run, but 'most' depends \
         on the data of 'm'; where their elements are given, they are bound"
    );
    let growing = SUMS.replace("t = Add (s, row)", "t = Concat <axis = 0> (s, row)");
    assert_eq!(
        refusal(&growing, &[]),
        "node 'y' (Loop): 'x' is f32[2] before iteration 0 and f32[4] after it: as the run decides how often it runs, expected one type and shape"
    );
}

/// A body without nodes, which turns the values around that it carries.
#[test]
fn iterations_are_bounded_by_what_they_carry() {
    let list = |item: &dyn Fn(usize) -> String| (0..2000).map(item).collect::<Vec<_>>().join(", ");
    let source = format!(
        "g (bool c, {}) => (float[1] y0) <int64 m = {{8000}}> {{
            {} = Loop (m, , {}) <body = b (int64 i, bool go, {}) => (bool go, {}) {{ }}>
        }}",
        list(&|i| format!("float[{}] x{i}", if i == 0 { 2 } else { 1 })),
        list(&|i| format!("y{i}")),
        list(&|i| format!("x{i}")),
        list(&|i| format!("float[1] s{i}")),
        list(&|i| format!("float[1] s{}", (i + 1) % 2000)),
    );
    let found = refusal(&source, &[]);
    assert_eq!(
        found,
        "node 'y0' (Loop): functions and loops repeat more than 4194304 nodes, inputs and outputs, where 64 bytes count as one: expected fewer calls or iterations"
    );
}
