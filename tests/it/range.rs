//! One plan for a range of shapes: every binding runs in the same bytes, with the results of a plan of its own.

use crate::common;
use plimsoll::internals::backend::cpu::Cpu;
use plimsoll::internals::backend::{Backend, Usage};
use plimsoll::internals::exec::Exec;
use plimsoll::internals::onnx;
use plimsoll::internals::op::{Attrs, ValueId};
use plimsoll::internals::plan::check::check;
use plimsoll::internals::plan::range::{ShapeRange, Source};
use plimsoll::internals::plan::{Buffer, Class, Plan, Recipe};
use plimsoll::internals::reference;
use plimsoll::internals::session::{Choice, Options};
use plimsoll::internals::shape::{Extent, Shape};
use plimsoll::internals::trace::{Trace, Var};
use plimsoll::{DType, Error, Graph, Limits, Result, Session, Target, Tensor};
use proptest::prelude::*;
use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;

/// The graph of a binding.
type Make = Source;

fn source(make: &Make) -> Source {
    make.clone()
}

fn file(name: &str) -> Make {
    let model = onnx::load(&Path::new(env!("CARGO_MANIFEST_DIR")).join("graphs").join(name)).expect("it is a graph");
    plimsoll::internals::session::source(model)
}

fn text(text: &str) -> Make {
    let model = onnx::text::parse(text, Path::new("test.onnxtxt")).expect("it is a graph");
    let model = onnx::Model::new(model);
    plimsoll::internals::session::source(model)
}

fn options(dims: &[(&str, Extent)]) -> Options {
    let options = Options { threads: 2, ..Options::default().on(Choice::Cpu) };
    dims.iter().fold(options, |options, (name, extent)| options.set(*name, *extent))
}

fn cpu() -> Box<dyn Backend> {
    Box::new(Cpu::new(2))
}

/// Values between -1 and 1; small whole numbers where they are integers.
fn random(dtype: DType, shape: &Shape, mut state: u64) -> Tensor {
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let value = (state >> 33) as f64 / f64::from(1u32 << 30) - 1.0;
        if dtype.is_float() { value } else { (value * 2.0).abs().floor() }
    };
    let values: Vec<f64> = (0..shape.numel()).map(|_| next()).collect();
    Tensor::from_f64(dtype, shape.clone(), &values)
}

fn inputs(graph: &Graph) -> Vec<Tensor> {
    let fact = |v: &ValueId| graph.fact(*v).clone();
    graph.inputs().iter().zip(1..).map(|(v, seed)| random(fact(v).dtype, &fact(v).shape, seed)).collect()
}

/// Compares as [`common::agrees`] does, but relative to a magnitude of at least 1, that of the summands.
fn agrees(found: &Tensor, expected: &Tensor, tolerance: f64) -> Result<(), String> {
    let peak = expected.to_f64().iter().fold(1.0f64, |m, v| m.max(v.abs()));
    found.compare(expected, 0.0, tolerance * peak)
}

fn named<'a>(plan: &'a Plan, tensors: &[Tensor]) -> Vec<(&'a str, Tensor)> {
    plan.programs[0].inputs.iter().map(|p| p.name.as_str()).zip(tensors.iter().cloned()).collect()
}

/// The plan of a binding is sound by itself, and lies within the plan of the range: the same segments, and nothing in the arena where
/// nothing was planned.
fn lies_within(plan: &Plan, range: &Plan) {
    check(plan).expect("sound");
    assert_eq!(plan.segments, range.segments);
    let place = |b: &Buffer| (b.segment, b.offset, b.class);
    let places: HashSet<_> = range.programs[0].buffers.iter().map(place).collect();
    let new = |b: &&Buffer| b.class != Class::Workspace && b.class != Class::Constant && !places.contains(&place(b));
    assert_eq!(plan.programs[0].buffers.iter().find(new), None, "{}", plan.programs[0].name);
    let steps = |plan: &Plan| plan.programs[0].steps.iter().map(|s| s.name.clone()).collect::<Vec<_>>();
    assert_eq!(steps(plan), steps(range));
}

/// Runs bindings of a range one after another, and compares each with the reference and with a plan of its own. Returns the range's plan.
fn runs(
    make: &Make,
    dims: &[(&str, Extent)],
    bindings: &[&[usize]],
    open: &dyn Fn() -> Box<dyn Backend>,
    tolerance: f64,
) -> Result<Plan, String> {
    let options = options(dims);
    let say = |e: Error| e.to_string();
    let session = common::load_range(source(make), open(), "test", &options).map_err(say)?;
    let mut usage: Option<Usage> = None;
    let ranges: Vec<&str> = dims.iter().filter(|(_, e)| e.fixed().is_none()).map(|(name, _)| *name).collect();
    for binding in bindings {
        let fixed = dims.iter().filter_map(|(name, e)| Some(((*name).to_owned(), e.fixed()?)));
        let own = ranges.iter().zip(*binding).map(|(name, &extent)| ((*name).to_owned(), extent));
        let (fixed, own): (Vec<_>, Vec<_>) = (fixed.collect(), own.collect());
        let all = [fixed, own.clone()].concat();
        let graph = make(&all).map_err(say)?;
        let inputs = inputs(&graph);
        let expected = reference::run(&graph, &inputs).map_err(say)?;
        let alone = common::load(graph, open(), "test", &options).map_err(say)?;
        let given = named(session.plan(), &inputs);
        let (found, planned) = (session.run(&given).map_err(say)?, alone.run(&given).map_err(say)?);
        for (((name, found), (_, planned)), expected) in found.iter().zip(&planned).zip(&expected) {
            agrees(found, expected, tolerance).map_err(|e| format!("{name} at {all:?}: {e}"))?;
            agrees(found, planned, tolerance).map_err(|e| format!("{name} at {all:?} alone: {e}"))?;
        }
        lies_within(&session.select(&own).map_err(say)?, session.plan());
        let now = session.usage();
        let (bytes, allocations) = usage.map_or((now.bytes, now.allocations), |u| (u.bytes, u.allocations));
        assert_eq!((now.bytes, now.allocations), (bytes, allocations), "a binding takes nothing of the device");
        assert_eq!(now.bytes, session.plan().bytes());
        usage = Some(now);
    }
    Ok(session.plan().clone())
}

#[test]
fn the_graphs_run_at_every_binding_on_every_backend() {
    let dims = |list: &[(&'static str, Extent)]| list.to_vec();
    let batch = ("batch", Extent::from(1..=64));
    let cases: [(&str, Vec<(&str, Extent)>, &[&[usize]]); 5] = [
        ("digits.onnx", dims(&[batch]), &[&[32], &[16], &[64], &[1], &[3], &[32]]),
        ("mlp.onnxtxt", dims(&[batch]), &[&[1], &[64], &[5], &[1]]),
        (
            "attention.onnxtxt",
            dims(&[("batch", (1..=4).into()), ("sequence", (1..=33).into())]),
            &[&[4, 33], &[1, 1], &[2, 1], &[1, 9], &[3, 32]],
        ),
        (
            "attention.onnxtxt",
            dims(&[("batch", 2.into()), ("sequence", (3..=70).into())]),
            &[&[3], &[64], &[65], &[16]],
        ),
        (
            "residual.onnxtxt",
            dims(&[("batch", (1..=3).into()), ("height", (1..=12).into()), ("width", (3..=12).into())]),
            &[&[3, 12, 12], &[1, 1, 3], &[2, 7, 11], &[1, 12, 4]],
        ),
    ];
    for (backend, open) in common::backends() {
        for (name, dims, bindings) in &cases {
            runs(&file(name), dims, bindings, &open, 1e-5).unwrap_or_else(|e| panic!("{name} on {backend}: {e}"));
        }
    }
}

/// A dim may only shape a computation: ranges, constants of its extent, bounds of slices, sizes that fall while it rises. Constants that
/// differ from binding to binding are written anew when the binding changes.
#[test]
fn dims_that_only_shape_a_computation() {
    let shaped = text(
        r#"<ir_version: 8, opset_import: ["" : 17]>
        shaped (float[batch, length] x, float[16, 8] table, float[8, 8] w)
            => (float[batch, length, 8] y, float[rest, 8] left, float[length, length] mask)
        <int64 zero = {0}, int64 one = {1}, int64[1] ones = {1}, int64[1] lone = {0}, int64[1] all = {16}, float nothing = {0}>
        {
            shape = Shape (x)
            length = Gather (shape, one)
            positions = Range (zero, length, one)
            rows = Gather (table, positions)
            axis = Constant <value_ints = [0]> ()
            bound = Unsqueeze (length, axis)
            first = Slice (table, lone, bound, lone)
            left = Slice (table, bound, all, lone)
            ramp = Cast <to = 1> (positions)
            column = Unsqueeze (ramp, ones)
            row = Unsqueeze (ramp, lone)
            over = Greater (row, column)
            square = Concat <axis = 0> (bound, bound)
            minus = ConstantOfShape <value = float[1] {-1.0}> (square)
            mask = Where (over, minus, nothing)
            last = Constant <value_ints = [2]> ()
            wide = Unsqueeze (x, last)
            sum = Add (first, rows)
            product = MatMul (sum, w)
            scaled = Mul (wide, product)
            tilted = Add (scaled, column)
            y = Tanh (tilted)
        }"#,
    );
    let dims = [("batch", Extent::from(1..=5)), ("length", Extent::from(1..=15))];
    let bindings: [&[usize]; 7] = [&[5, 15], &[1, 1], &[2, 7], &[5, 1], &[1, 15], &[2, 7], &[5, 15]];
    let plan = runs(&shaped, &dims, &bindings, &cpu, 1e-5).expect("runs");
    // With one row, fifteen are left, which is more than with the largest binding.
    let left = plan.programs[0].outputs.iter().find(|p| p.name == "left").expect("an output");
    assert_eq!(left.shape[..], [1, 8]);
    assert!(plan.class_bytes(Class::Activation) >= 4 * (5 * 15 * 8 + 15 * 8 + 15 * 15));
}

/// At the largest binding, a reshape does nothing and two values are equal. The structure must not depend on that.
#[test]
fn extents_that_are_equal_by_accident() {
    let graph = text(
        r#"<ir_version: 8, opset_import: ["" : 17]>
        accidents (float[batch, 8] x, float[8, 8] w) => (float[eight, batch] y, float[a, b] z, float[c, d] t)
        <int64[2] turned = {8, -1}, int64[2] kept = {-1, 8}>
        {
            a = Relu (x)
            left = Reshape (a, turned)
            right = Reshape (a, kept)
            y = Tanh (left)
            sum = MatMul (right, w)
            z = Sigmoid (sum)
            crossed = Transpose (left)
            t = Add (crossed, x)
        }"#,
    );
    runs(&graph, &[("batch", (1..=8).into())], &[&[8], &[1], &[3], &[7], &[8]], &cpu, 1e-5).expect("runs");
}

/// A graph whose structure differs between bindings cannot have one plan. The error says where it differs.
#[test]
fn another_structure_is_refused() {
    let graph = text(
        r#"<ir_version: 8, opset_import: ["" : 17]>
        branches (float[batch, 4] x) => (float[batch, 4] y)
        <int64 zero = {0}, int64 two = {2}>
        {
            shape = Shape (x)
            batch = Gather (shape, zero)
            large = Greater (batch, two)
            y = If (large) <
                then_branch = then () => (float[batch, 4] t) { t = Relu (x) },
                else_branch = else () => (float[batch, 4] e) { n = Neg (x) e = Tanh (n) }
            >
        }"#,
    );
    let error = |extents: Extent| runs(&graph, &[("batch", extents)], &[&[4]], &cpu, 1e-5).expect_err("refused");
    let found = error(Extent::from(1..=4));
    assert!(found.starts_with("the graph at batch=2 does not run in the plan of batch=4: "), "{found}");
    assert!(found.contains("at node '") || found.contains("step '"), "{found}");
    assert!(found.ends_with("plan ranges of their own for 'batch' up to 2 and above it"), "{found}");
    runs(&graph, &[("batch", (3..=4).into())], &[&[4], &[3]], &cpu, 1e-5).expect("one branch");
}

/// Runs bindings of a range that was planned for a special target, and compares each with the reference.
fn replays(range: &ShapeRange, make: &Make, backend: Box<dyn Backend>, bindings: &[&[usize]]) {
    let (plan, constants) = range.largest();
    let mut exec = Exec::load(backend, plan.clone(), constants, &|_| {}).expect("it loads");
    let before = exec.backend().usage();
    for &binding in bindings {
        let (own, data) = range.at(binding).expect("it is in the range");
        check(&own).expect("sound");
        assert_eq!(own.segments, plan.segments);
        let number = exec.add(own, &data, constants).expect("it is made ready");
        exec.select(number).expect("it is selected");
        let dims: Vec<_> = range.dims().iter().map(|d| d.name.clone()).zip(binding.iter().copied()).collect();
        let graph = make(&dims).expect("a graph");
        let given = inputs(&graph);
        let expected = reference::run(&graph, &given).expect("it has a meaning");
        for (found, expected) in exec.run(&given).expect("it runs").iter().zip(&expected) {
            agrees(found, expected, 1e-5).unwrap_or_else(|e| panic!("{binding:?}: {e}"));
        }
    }
    let after = exec.backend().usage();
    assert_eq!((after.bytes, after.allocations), (before.bytes, before.allocations));
}

fn extent(dims: &[(String, usize)], name: &str) -> usize {
    dims.iter().find(|(n, _)| n == name).expect("it is bound").1
}

/// A value that is cut at the largest binding has as many parts at the others. Some of them are empty.
#[test]
fn bindings_have_the_parts_of_the_largest() {
    let make: Make = Arc::new(|dims| {
        let (batch, left) = (extent(dims, "batch"), 9 - extent(dims, "batch"));
        let g = Trace::new("parts");
        let x = g.input("x", DType::F32, [batch, 16, 64]);
        let w = g.input("w", DType::F32, [64, 16]);
        let y = x.relu();
        g.output("y", y);
        g.output("product", y.matmul(w));
        g.output("row", x.softmax(-1));
        g.output("rest", g.input("rest", DType::F32, [left, 16]).tanh());
        g.finish()
    });
    let dims = [("batch".to_owned(), Extent::from(1..=8))];
    for (name, open) in common::backends() {
        let backend = open();
        let target = Target { max_binding: 4096, streams: 1, ..backend.target().clone() };
        let range =
            common::range(source(&make), &dims, &target, Recipe::default(), &Limits { memory: None }).expect("plans");
        let parts = range.plan().programs[0].steps.iter().filter(|step| !step.bind_ranges.is_empty()).count();
        assert!(parts >= 16, "{parts} parts on {name}");
        replays(&range, &make, backend, &[&[8], &[1], &[3], &[8], &[5]]);
    }
    // A value that is cut at a smaller binding only.
    let make: Make = Arc::new(|dims| {
        let g = Trace::new("rest");
        g.output("y", g.input("x", DType::F32, [9 - extent(dims, "batch"), 1024]).tanh());
        g.finish()
    });
    let target = Target { max_binding: 4096, ..Target::wgpu() };
    let error =
        common::range(source(&make), &dims, &target, Recipe::default(), &Limits { memory: None }).expect_err("refused");
    let error = error.to_string();
    let words = ["(f32[2,1024]) takes 8192 bytes", "is not split as at the largest binding", "'batch' up to 7"];
    assert!(words.iter().all(|word| error.contains(word)), "{error}");
}

/// A size that grows and then shrinks: neighbours say nothing about the extents between them, so all are tried.
#[test]
fn sizes_that_rise_and_fall_are_all_tried_or_refused() {
    let make: Make = Arc::new(|dims| {
        let (length, of) = (extent(dims, "length"), extent(dims, "of"));
        let g = Trace::new("arch");
        let x = g.input("x", DType::F32, [length, 1]);
        let y = g.input("y", DType::F32, [1, of + 1 - length]);
        g.output("z", (x * y).relu());
        g.finish()
    });
    let plan = |most: usize| {
        let dims = [("length".to_owned(), Extent::from(1..=most)), ("of".to_owned(), most.into())];
        common::range(source(&make), &dims, &Target::cpu(2), Recipe::default(), &Limits { memory: None })
    };
    let range = plan(100).expect("all are tried");
    assert_eq!(range.tried().len(), 100);
    let largest = range.tried().iter().map(|t| t.live).max().expect("some");
    assert!(range.tried().iter().any(|t| t.binding == [50] && t.live == largest));
    assert!(range.plan().class_bytes(Class::Activation) >= 50 * 51 * 4);
    for length in 1..=100 {
        lies_within(&range.at(&[length]).expect("it runs").0, range.plan());
    }
    let error = plan(1000).expect_err("too many").to_string();
    assert!(error.starts_with("dim 'length', 1..1000: the size of 'z' is not monotonic in it"), "{error}");
}

/// Sums up to each element and orders take more levels of kernels the longer they are.
#[test]
fn sums_and_orders_run_at_every_length() {
    let make: Make = Arc::new(|dims| {
        let length = extent(dims, "length");
        let g = Trace::new("sums");
        let x = g.input("x", DType::F32, [2, length]);
        g.output("sums", x.op("CumSum", &[], Attrs::new().with("axis", 1).with("reverse", 1)));
        let halved = Attrs::new().with("mode", "linear").with("antialias", 1).with("scales", vec![1.0, 0.5]);
        g.output("halved", g.input("rows", DType::F32, [length, 600]).op("Resize", &[], halved));
        let first = Attrs::new().with("runs", length as i64).with("kept", 1);
        g.output("first", x.op("plimsoll.Sort", &[], first).cast(DType::F32));
        g.finish()
    });
    for (backend, open) in common::backends() {
        let dims = [("length", Extent::from(1..=1500))];
        let bindings: [&[usize]; 6] = [&[1500], &[1], &[511], &[512], &[513], &[1024]];
        runs(&make, &dims, &bindings, &open, 1e-5).unwrap_or_else(|e| panic!("{backend}: {e}"));
    }
}

/// A binding that was not tried, with a buffer larger than planned, is placed by itself in the same segments.
#[test]
fn an_odd_binding_is_placed_within_the_segments() {
    let odd = |length: usize, more: usize| -> Make {
        Arc::new(move |dims| {
            let now = extent(dims, "length");
            let g = Trace::new("odd");
            let x = g.input("x", DType::F32, [now, 16]);
            let z = g.input("z", DType::F32, [if now == length { more } else { 1 }]);
            g.output("y", x.relu());
            g.output("t", z.tanh());
            g.finish()
        })
    };
    let dims = [("length".to_owned(), Extent::from(1..=1000))];
    let plan = |make: &Make| {
        common::range(source(make), &dims, &Target::cpu(2), Recipe::default(), &Limits { memory: None }).expect("plans")
    };
    let make = odd(777, 2000);
    let range = plan(&make);
    assert!(range.tried().iter().all(|t| t.binding != [777]));
    replays(&range, &make, cpu(), &[&[1000], &[777], &[3], &[777], &[1000]]);
    let error = plan(&odd(777, 200_000)).at(&[777]).expect_err("it takes more").to_string();
    assert!(error.contains("'z' takes 800000 bytes, planned were 4; placed by itself it takes"), "{error}");
}

#[test]
fn bad_ranges_and_inputs_are_named() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("graphs/mlp.onnxtxt");
    let fails = |options: &Options| Session::from_path(&path, options).expect_err("refused").to_string();
    #[allow(clippy::reversed_empty_ranges, reason = "that is what is refused")]
    let reversed = fails(&options(&[("batch", (8..=1).into())]));
    assert!(
        reversed.ends_with("dim 'batch': the range 8..1 is empty: expected the smaller extent first"),
        "{reversed}"
    );
    let unknown = fails(&options(&[("batch", 4.into()), ("length", (1..=8).into())]));
    assert!(unknown.contains("the graph has no dim 'length' to set; its dims: 'batch'"), "{unknown}");
    let twice = fails(&options(&[("batch", (1..=4).into()), ("batch", (1..=8).into())]));
    assert!(twice.ends_with("dim 'batch' is set twice, to different values"), "{twice}");
    let missing = fails(&options(&[]));
    assert!(missing.contains("dims not bound: 'batch'"), "{missing}");
    let limited = Options { memory_limit: Some(1000), ..options(&[("batch", (1..=64).into())]) };
    let refused = Session::from_path(&path, &limited);
    assert!(matches!(&refused, Err(Error::Fit { limit: 1000, file: Some(file), .. }) if *file == path), "{refused:?}");

    let session = Session::from_path(&path, &options(&[("batch", (2..=8).into())])).expect("loads");
    let graph = |batch: usize| file("mlp.onnxtxt")(&[("batch".into(), batch)]).expect("a graph");
    for batch in [1, 9] {
        let given = inputs(&graph(batch));
        let found = session.run(&named(session.plan(), &given)).expect_err("outside").to_string();
        let expected = format!("input 'x': dim 'batch' (axis 0): expected 2 to 8, as was planned, found {batch}");
        assert_eq!(found, expected);
    }
    let mut odd = inputs(&graph(4));
    odd[1] = random(DType::F32, &Shape::new([784, 99]), 1);
    let found = session.run(&named(session.plan(), &odd)).expect_err("odd").to_string();
    assert_eq!(found, "input 'w1': expected f32[784,100], found f32[784,99]");
    let found = session.select(&[("batch".into(), 9)]).expect_err("outside").to_string();
    assert_eq!(found, "batch=9 is outside of the range batch=2..8");
    let found = session.select(&[("rows".into(), 9)]).expect_err("unknown").to_string();
    assert_eq!(found, "rows=9: no range was planned for a dim 'rows'");
    let given = inputs(&graph(4));
    session.run(&named(session.plan(), &given)).expect("an error leaves it as it was");
}

/// The plan of a range is a plan like any other: it is written, read and checked, and has its dims. It is the same on every machine.
#[test]
fn the_plan_of_a_range_is_a_file() {
    let make = file("attention.onnxtxt");
    let dims = [("batch".to_owned(), Extent::from(1..=8)), ("sequence".to_owned(), Extent::from(1..=300))];
    for target in ["cpu", "cuda", "wgpu"] {
        let target = Target::preset(target).expect("a preset");
        let plan = || {
            common::range(source(&make), &dims, &target, Recipe::default(), &Limits { memory: None }).expect("plans")
        };
        let planned = plan();
        let range = planned.plan();
        let named: Vec<_> = range.programs[0].dims.iter().map(|d| (d.name.as_str(), d.least, d.most)).collect();
        assert_eq!(named, [("batch", 1, 8), ("sequence", 1, 300)]);
        let back = Plan::from_json(&range.to_json(), Path::new("plan.json")).expect("is read");
        assert_eq!((&back, range), (range, plan().plan()));
        // Bindings that were not tried when the range was planned.
        for binding in [[7, 299], [1, 150], [3, 11], [8, 33], [5, 5]] {
            let (own, constants) = planned.at(&binding).expect("a plan");
            lies_within(&own, range);
            assert_eq!(constants[0].len(), own.programs[0].constants.len());
            assert!(own.programs[0].summary.lower_bound <= range.programs[0].summary.lower_bound);
        }
        let tried = planned.tried();
        assert!(tried.len() <= 64 && tried[0].binding == [1, 1] && tried[tried.len() - 1].binding == [8, 300]);
        assert_eq!(tried[tried.len() - 1].live, range.programs[0].summary.lower_bound);
    }
}

/// An extent as `fixed + batch * b + length * l + both * b * l`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Sum([usize; 4]);

impl Sum {
    fn at(self, [b, l]: [usize; 2]) -> usize {
        self.0[0] + self.0[1] * b + self.0[2] * l + self.0[3] * b * l
    }

    fn plus(self, other: Sum) -> Sum {
        Sum([0, 1, 2, 3].map(|i| self.0[i] + other.0[i]))
    }

    fn times(self, other: Sum) -> Option<Sum> {
        let mut product = [0; 4];
        // Bits: 1 is the batch, 2 the length.
        for (i, &a) in self.0.iter().enumerate() {
            for (j, &b) in other.0.iter().enumerate().filter(|(_, b)| a * **b > 0) {
                if i & j != 0 {
                    return None;
                }
                product[i | j] += a * b;
            }
        }
        Some(Sum(product))
    }

    fn fixed(n: usize) -> Sum {
        Sum([n, 0, 0, 0])
    }

    fn is_fixed(self) -> bool {
        self.0[1..] == [0; 3]
    }
}

const BATCH: Sum = Sum([0, 1, 0, 0]);
const LENGTH: Sum = Sum([0, 0, 1, 0]);

/// One operator on values made so far: an operator's number and three numbers that choose its operands and attributes.
type Drawn = (u8, u16, u16, u16);

/// A graph of random operators, the same one at every binding but for its extents: what is drawn is chosen by what extents are made of, never
/// by their values. All values stay within [-1, 1].
fn random_graph(drawn: &[Drawn], binding: [usize; 2]) -> Graph {
    let g = Trace::new("random");
    let extents = |shape: &[Sum]| shape.iter().map(|s| s.at(binding)).collect::<Vec<_>>();
    let mut values: Vec<(Var, Vec<Sum>)> = Vec::new();
    let input = |name: &str, shape: &[Sum]| (g.input(name, DType::F32, extents(shape)), shape.to_vec());
    let four = Sum::fixed(4);
    values.push(input("a", &[BATCH, LENGTH, four]));
    values.push(input("b", &[BATCH, four]));
    values.push(input("c", &[four, four]));
    // A constant that depends on the binding: its extents.
    let shape = [LENGTH, four];
    values.push((g.constant("d", random(DType::F32, &Shape::new(extents(&shape)), 3)), shape.to_vec()));
    let shape = [BATCH, Sum::fixed(1), Sum::fixed(1)];
    values.push((g.constant("e", random(DType::F32, &Shape::new(extents(&shape)), 4)), shape.to_vec()));
    for &(op, p, q, r) in drawn {
        let (p, q, r) = (usize::from(p), usize::from(q), usize::from(r));
        let (x, shape) = values[p % values.len()].clone();
        let rank = shape.len();
        let axis = q % rank.max(1);
        let partner = |fits: &dyn Fn(&[Sum]) -> bool| {
            (0..values.len()).map(|k| &values[(q + k) % values.len()]).find(|(_, s)| fits(s)).cloned()
        };
        let made = match op {
            0 => ([x.relu(), x.tanh(), x.sigmoid(), -x, x.abs(), x.sin()][q % 6], shape),
            1 | 2 => {
                let one = Sum::fixed(1);
                let broadcast = |other: &[Sum]| -> Option<Vec<Sum>> {
                    let rank = rank.max(other.len());
                    let at = |s: &[Sum], k: usize| (k + s.len()).checked_sub(rank).map_or(one, |k| s[k]);
                    let both = (0..rank).map(|k| match (at(&shape, k), at(other, k)) {
                        (a, b) if a == b || b == one => Some(a),
                        (a, b) => (a == one).then_some(b),
                    });
                    both.collect()
                };
                let Some((y, other)) = partner(&|s| broadcast(s).is_some()) else { continue };
                let shape = broadcast(&other).expect("a partner fits");
                ([(x + y) * 0.5, (x - y) * 0.5, x * y, x.max(y), x.min(y)][r % 5], shape)
            }
            3 if rank >= 2 => {
                let depth = shape[rank - 1];
                let x = [x.abs(), x * 0.5, x][r % 3];
                let Some((y, other)) = partner(&|s| s.len() == 2 && s[0] == depth) else { continue };
                let shape = [&shape[..rank - 1], &[other[1]]].concat();
                (x.matmul(y) * (1.0 / depth.at(binding) as f32), shape)
            }
            4 if rank >= 1 => {
                let (keep, over) = (r % 2 == 0, [axis as i64]);
                let y = [x.reduce_mean(&over, keep), x.reduce_max(&over, keep), x.reduce_min(&over, keep)][r % 3];
                let mut shape = shape;
                if keep {
                    shape[axis] = Sum::fixed(1)
                } else {
                    _ = shape.remove(axis)
                }
                (y, shape)
            }
            5 if rank >= 1 => (x.softmax(axis as i64), shape),
            6 if rank >= 1 => {
                let fits = |s: &[Sum]| s.len() == rank && (0..rank).all(|k| k == axis || s[k] == shape[k]);
                let Some((y, other)) = partner(&fits) else { continue };
                let mut shape = shape;
                shape[axis] = shape[axis].plus(other[axis]);
                (g.concat(&[x, y], axis as i64), shape)
            }
            7 if rank >= 1 => {
                let mut cut = shape.clone();
                let bounds = if shape[axis].is_fixed() {
                    let extent = shape[axis].0[0];
                    let start = r % extent;
                    start..start + 1 + (r / 7) % (extent - start)
                } else {
                    // Up to the last element, or all but the first of a sum.
                    match shape[axis].0 {
                        [0, ..] => shape[axis].at(binding) - 1..shape[axis].at(binding),
                        _ => 1..shape[axis].at(binding),
                    }
                };
                cut[axis] = match shape[axis] {
                    s if s.is_fixed() => Sum::fixed(bounds.len()),
                    Sum([0, ..]) => Sum::fixed(1),
                    Sum([n, rest @ ..]) => Sum([n - 1, rest[0], rest[1], rest[2]]),
                };
                (x.slice(axis as i64, bounds.start as i64..bounds.end as i64), cut)
            }
            8 if rank >= 2 => {
                let mut axes: Vec<usize> = (0..rank).collect();
                axes.rotate_left(q % rank);
                if r % 2 == 0 {
                    axes.swap(0, rank - 1);
                }
                let turned = axes.iter().map(|&a| shape[a]).collect();
                (x.transpose(&axes), turned)
            }
            9 if r % 3 == 0 => {
                let at = q % (rank + 1);
                let mut shape = shape;
                shape.insert(at, Sum::fixed(1));
                (x.unsqueeze(&[at as i64]), shape)
            }
            9 if rank >= 2 => {
                let at = q % (rank - 1);
                let Some(joined) = shape[at].times(shape[at + 1]) else { continue };
                let mut shape = shape;
                shape.splice(at..at + 2, [joined]);
                (x.reshape(&extents(&shape).iter().map(|&e| e as i64).collect::<Vec<_>>()), shape)
            }
            _ => continue,
        };
        if made.1.len() <= 4 && made.1.iter().map(|s| s.at([4, 5])).product::<usize>() <= 2000 {
            values.push(made);
        }
    }
    g.output("last", values[values.len() - 1].0);
    g.output("middle", values[values.len() / 2].0);
    g.finish().expect("only what fits was built")
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// Any binding, in any order, runs in the plan of the range: random graphs with fixed extents that equal those of dims by accident.
    #[test]
    fn random_graphs_run_at_random_bindings(
        drawn in proptest::collection::vec((0u8..10, any::<u16>(), any::<u16>(), any::<u16>()), 1..24),
        bindings in proptest::collection::vec((1usize..=4, 1usize..=5), 1..4),
    ) {
        let make: Make = Arc::new(move |dims| {
            let extent = |name: &str| dims.iter().find(|(n, _)| n == name).expect("it is bound").1;
            Ok(random_graph(&drawn, [extent("batch"), extent("length")]))
        });
        let mut bindings: Vec<Vec<usize>> = bindings.into_iter().map(|(b, l)| vec![b, l]).collect();
        bindings.extend([vec![1, 1], vec![4, 5]]);
        let bindings: Vec<&[usize]> = bindings.iter().map(Vec::as_slice).collect();
        let dims = [("batch", Extent::from(1..=4)), ("length", Extent::from(1..=5))];
        runs(&make, &dims, &bindings, &cpu, 1e-5).map_err(TestCaseError::fail)?;
    }
}
