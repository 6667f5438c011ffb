//! Sessions, the library's main interface: shared and misused, over their own memory or the host's, and with random graphs.

use crate::common;
use plimsoll::internals::backend::cpu::{Cpu, Line, Region};
use plimsoll::internals::backend::{Backend, KernelId, Launch, RecordId, SegmentId, Slice, Usage};
use plimsoll::internals::eager::alloc::Kind;
use plimsoll::internals::eager::{Eager, Program};
use plimsoll::internals::exec::Exec;
use plimsoll::internals::kernel::Kernel;
use plimsoll::internals::plan::range::Source;
use plimsoll::internals::plan::{BufferIdx, Class, Limits, Plan, Recipe, Step, StepIdx, check};
use plimsoll::internals::session::{Choice, Options, Session};
use plimsoll::internals::target::Memory;
use plimsoll::internals::trace::{Trace, Var};
use plimsoll::internals::{driver_memory, plan, reference};
use plimsoll::{DType, Error, Graph, Target, Tensor};
use proptest::prelude::*;
use proptest::test_runner::{TestRng, TestRunner};
use std::cell::Cell;
use std::path::Path;
use std::sync::Arc;

fn cpu() -> Box<dyn Backend> {
    Box::new(Cpu::new(2))
}

fn options() -> Options {
    Options { threads: 2, ..Options::default() }.on(Choice::Cpu)
}

/// softmax(relu(x w)), of 6 rows.
fn small() -> Graph {
    let g = Trace::new("small");
    let x = g.input("x", DType::F32, [6, 40]);
    let w = g.input("w", DType::F32, [40, 24]);
    g.output("y", x.matmul(w).relu().softmax(-1));
    g.finish().expect("the graph is sound")
}

/// Values in [-1, 1) that depend on the seed.
fn random(shape: impl Into<plimsoll::Shape>, seed: u64) -> Tensor {
    let shape = shape.into();
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f64 / f64::from(1u32 << 23) - 1.0
    };
    let values: Vec<f64> = (0..shape.numel()).map(|_| next()).collect();
    Tensor::from_f64(DType::F32, shape, &values)
}

#[test]
fn threads_share_a_session() {
    let graph = small();
    let session = Session::from_graph(graph.clone(), &options()).expect("the graph runs");
    let w = random([40, 24], 99);
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let (session, graph, w) = (&session, &graph, &w);
            scope.spawn(move || {
                let x = random([6, 40], thread);
                let expected = reference::run(graph, &[x.clone(), w.clone()]).expect("the reference runs");
                let first = session.run(&[("w", w.clone()), ("x", x.clone())]).expect("it runs");
                assert_eq!(first[0].0, "y");
                common::agrees(&first[0].1, &expected[0], 1e-5).expect("a thread gets the results of its own inputs");
                for _ in 0..25 {
                    let again = session.run(&[("x", x.clone()), ("w", w.clone())]).expect("it runs");
                    assert_eq!(again[0].1.bytes(), first[0].1.bytes());
                }
            });
        }
    });
}

#[test]
fn a_thousand_runs_allocate_nothing() {
    let session = Session::from_graph(small(), &options()).expect("the graph runs");
    let loaded = session.usage();
    assert_eq!(loaded.bytes, session.plan().bytes());
    assert_eq!(loaded.allocations, session.plan().segments.len() as u64);
    let inputs = [("x", random([6, 40], 1)), ("w", random([40, 24], 2))];
    for _ in 0..1000 {
        session.run(&inputs).expect("it runs");
    }
    assert_eq!(session.usage(), loaded);
}

#[test]
fn wrong_inputs_are_named() {
    let session = Session::from_graph(small(), &options()).expect("the graph runs");
    let (x, w) = (|| random([6, 40], 1), || random([40, 24], 2));
    let wide = Tensor::from_f64(DType::F64, [6, 40], &[0.0; 240]);
    let cases: [(&[(&str, Tensor)], &str); 6] = [
        (&[("x", x())], "input 'w' (f32[40,24]) is missing"),
        (&[("x", x()), ("w", w()), ("v", w())], "input 'v': not an input of the graph; its inputs: x, w"),
        (&[("x", x()), ("w", w()), ("x", x())], "input 'x' is given twice"),
        (&[("x", w()), ("w", w())], "input 'x': expected f32[6,40], found f32[40,24]"),
        (&[("x", wide), ("w", w())], "input 'x': expected f32[6,40], found f64[6,40]"),
        (&[], "input 'x' (f32[6,40]) is missing"),
    ];
    for (inputs, expected) in cases {
        assert_eq!(session.run(inputs).expect_err("the inputs are wrong").to_string(), expected);
    }
    session.run(&[("x", x()), ("w", w())]).expect("a session survives wrong inputs");
}

#[test]
fn what_cannot_be_had_is_said() {
    let limited = Options { memory_limit: Some(1000), ..options() };
    let error = Session::from_graph(small(), &limited).expect_err("it does not fit");
    assert!(matches!(error, Error::Fit { limit: 1000, .. }), "{error}");
    let error = Session::from_path("no/such.onnx", &options()).expect_err("it is not there").to_string();
    assert!(error.starts_with("no/such.onnx: "), "{error}");
    let digits = Path::new(env!("CARGO_MANIFEST_DIR")).join("graphs/digits.onnx");
    let error = Session::from_path(&digits, &options()).expect_err("a dim is open").to_string();
    assert!(error.contains("digits.onnx") && error.contains("batch"), "{error}");
    let session = Session::from_path(&digits, &options().set("batch", 3)).expect("it is bound");
    assert_eq!(session.run(&[("image", random([3, 1, 8, 8], 5))]).expect("it runs")[0].1.shape()[..], [3, 10]);
}

#[test]
fn the_host_provides_the_memory() {
    let graph = small();
    let own = Session::from_graph(graph.clone(), &options()).expect("the graph runs");
    let inputs = [("x", random([6, 40], 1)), ("w", random([40, 24], 2))];
    let expected = own.run(&inputs).expect("it runs");

    // Each segment begins at its own cache line. Stacks of threads are the system's.
    let lent = own.plan().segments.iter().filter(|s| s.memory != Memory::Own);
    let lines: u64 = lent.map(|s| s.bytes.div_ceil(256)).sum();
    // The old contents of the host's memory must not matter.
    let region = |lines: u64| Region::new(vec![Line([0xff; 256]); lines as usize]);
    let load = |lines| {
        let backend = Box::new(Cpu::with_arena(2, region(lines)));
        common::load(graph.clone(), backend, "the host's memory", &options())
    };
    let session = load(lines).expect("it fits exactly");
    assert_eq!(session.device(), "the host's memory");
    let Usage { bytes, allocations, .. } = session.usage();
    assert_eq!((bytes, allocations), (session.plan().bytes(), own.usage().allocations));
    let found = session.run(&inputs).expect("it runs");
    assert_eq!(found[0].1.bytes(), expected[0].1.bytes());
    assert!(load(lines - 1).is_err(), "it does not fit into less");
}

const HEADS: &str = r#"< ir_version: 8, opset_import: ["" : 11] >
heads (float[n, 4] x, float[n, 4] total) => (float[n, 4] wide, float[n, 1] sum, float[n, 4] next_total)
{
   bent = Exp (x)
   wide = Neg (bent)
   sum = ReduceSum <axes = [1]> (x)
   next_total = Add (total, x)
}"#;

/// A caller names the outputs that it wants. What only others need is no step, and states are updated all the same.
#[test]
fn outputs_that_nobody_asks_for_are_not_computed() {
    let folder = common::Folder::new("outputs");
    let path = folder.file("heads.onnxtxt", HEADS);
    let asked = |names: &[&str]| Options {
        outputs: names.iter().map(|&name| name.to_owned()).collect(),
        state: vec![("total".into(), "next_total".into())],
        ..options()
    };
    let x = ("x", random([3, 4], 5));
    let all = Session::from_path(&path, &asked(&[]).set("n", 3)).expect("it loads");
    let expected = all.run(std::slice::from_ref(&x)).expect("it runs");
    for one in [asked(&["sum"]).set("n", 3), asked(&["sum"]).set("n", 1..=3)] {
        // A state of the range's rows is refused for another reason.
        let one = if one.fixed().is_none() { Options { state: Vec::new(), ..one } } else { one };
        let session = Session::from_path(&path, &one).expect("it loads");
        assert!(session.plan().programs[0].steps.len() < all.plan().programs[0].steps.len());
        assert_eq!(session.plan().programs[0].outputs.len(), 1);
        let total = ("total", random([3, 4], 6));
        let inputs = if one.state.is_empty() { vec![x.clone(), total] } else { vec![x.clone()] };
        assert_eq!(session.run(&inputs).expect("it runs"), expected[1..2]);
        if !one.state.is_empty() {
            assert_eq!(session.state("total").expect("it is a state"), all.state("total").expect("it is a state"));
        }
    }
    let graph = Graph::from_path(&path, &[("n", 3)]).expect("it is a graph");
    let session = Session::from_graph(graph, &asked(&["sum", "wide"])).expect("it loads");
    assert_eq!(session.plan().programs[0].outputs.iter().map(|o| &o.name[..]).collect::<Vec<_>>(), ["wide", "sum"]);
    for (name, words) in [
        ("product", "output 'product': not an output of the graph; its outputs: wide, sum, next_total"),
        ("next_total", "output 'next_total': it updates state 'total', which is read by that name"),
    ] {
        let error = Session::from_path(&path, &asked(&[name]).set("n", 3)).expect_err("it is no output").to_string();
        assert!(error.contains(words), "{error}");
    }
}

/// Two products of one input, so that no step overwrites it.
fn kept() -> plan::Compiled {
    let g = Trace::new("kept");
    let x = g.input("x", DType::F32, [6, 40]);
    g.output("y", x.matmul(g.constant("w", random([40, 24], 2))));
    g.output("z", x.matmul(g.constant("v", random([40, 5], 3))));
    let graph = g.finish().expect("the graph is sound");
    let target = Target::cpu(2);
    let graph = Recipe::default().whole(graph, &target).expect("the passes run");
    plan::compile(&graph, &target, &Limits { memory: None }).expect("it is planned")
}

#[test]
fn inputs_are_written_before_the_first_run() {
    let (plan, constants) = kept();
    assert!(!plan.programs[0].consumes_inputs());
    let mut exec = Exec::load(cpu(), plan, &constants, &|_| {}).expect("it loads");
    let refused = |exec: &mut Exec| {
        let error = exec.replay().expect_err("the input is not there").to_string();
        assert!(error.contains("written before each run"), "{error}");
    };
    refused(&mut exec);
    let inputs = [random([6, 40], 1)];
    let found = exec.run(&inputs).expect("it runs");
    // The inputs keep their bytes.
    exec.replay().expect("it runs again");
    assert_eq!(exec.read().expect("it is there"), found);
    exec.run_poisoned(&inputs).expect("nothing reads dead memory");
    refused(&mut exec);
}

#[test]
fn constants_are_those_of_the_plan() {
    let (plan, constants) = kept();
    let refused = |constants: &[_], words: &str| {
        let data = vec![constants.to_vec()];
        let error = Exec::load(cpu(), plan.clone(), &data, &|_| {}).expect_err("they are not the plan's").to_string();
        assert!(error.contains(words), "{error}");
    };
    refused(&[], "expected 2 constants, found 0");
    let swapped: Vec<_> = constants[0].iter().rev().cloned().collect();
    refused(&swapped, "expected constant 'w' (f32[40,24]), found 'v' (f32[40,5])");
    let short = std::sync::Arc::new(plimsoll::internals::constant::Constant::new("w", random([40, 23], 2)));
    refused(&[short, constants[0][1].clone()], "found 'w' (f32[40,23])");
}

/// A device whose memory is full of NaN, and which runs steps to record them, as CUDA does with library calls.
struct Used(Cpu);

impl Backend for Used {
    fn target(&self) -> &Target {
        self.0.target()
    }
    fn identity(&self) -> String {
        self.0.identity()
    }
    fn usage(&self) -> Usage {
        self.0.usage()
    }
    fn alloc(&mut self, bytes: u64, memory: Memory) -> plimsoll::Result<SegmentId> {
        let segment = self.0.alloc(bytes, memory)?;
        if memory.is_device() {
            self.0.write(Slice { segment, offset: 0, bytes }, &vec![0xff; bytes as usize])?;
        }
        Ok(segment)
    }
    fn free(&mut self, segment: SegmentId) {
        self.0.free(segment);
    }
    fn write(&mut self, at: Slice, data: &[u8]) -> plimsoll::Result<()> {
        self.0.write(at, data)
    }
    fn read(&mut self, at: Slice, data: &mut [u8]) -> plimsoll::Result<()> {
        self.0.read(at, data)
    }
    fn compile(&mut self, kernel: &Kernel) -> plimsoll::Result<KernelId> {
        self.0.compile(kernel)
    }
    fn record(&mut self, launches: &[Launch]) -> plimsoll::Result<RecordId> {
        let record = self.0.record(launches)?;
        self.0.replay(record)?;
        Ok(record)
    }
    fn replay(&mut self, record: RecordId) -> plimsoll::Result<()> {
        self.0.replay(record)
    }
}

/// The sum of all rows so far, of `rows` rows in each run; and a count, which begins with 2.
fn counting(rows: usize) -> Graph {
    let g = Trace::new("sum");
    let [x, total] = [("x", rows), ("total", 1)].map(|(name, rows)| g.input(name, DType::F32, [rows, 40]));
    let count = g.state("count", Tensor::from_f64(DType::F32, [1], &[2.0]));
    g.update(count, count + 1.0);
    g.output("next", total + x.reduce_sum(&[0], true));
    g.output("old", total);
    g.output("count", count);
    let mut graph = g.finish().expect("the graph is sound");
    graph.pair("total", "next").expect("they are alike");
    graph
}

/// Runs on rows of ones, and gives the sum and the count from before the run.
fn counted(session: &Session, rows: usize) -> (f64, f64) {
    let x = Tensor::from_f64(DType::F32, [rows, 40], &vec![1.0; rows * 40]);
    let found = session.run(&[("x", x)]).expect("it runs");
    let sum = found[0].1.to_f64();
    assert!(sum.iter().all(|&element| element == sum[0]), "{sum:?}");
    (sum[0], found[1].1.to_f64()[0])
}

/// States begin as zeros, or as given, whatever the memory had before and whatever a device runs to record.
#[test]
fn states_begin_as_declared() {
    let session = common::load(counting(6), Box::new(Used(Cpu::new(1))), "used", &options());
    let session = session.expect("it loads");
    assert_eq!([counted(&session, 6), counted(&session, 6)], [(0.0, 2.0), (6.0, 3.0)]);
}

/// A binding that is prepared later, which records its steps, leaves the states as they are.
#[test]
fn states_last_over_the_bindings_of_a_range() {
    let source: Source = Arc::new(|dims| Ok(counting(dims[0].1)));
    let options = options().set("rows", 1..=6);
    let session = common::load_range(source, Box::new(Used(Cpu::new(1))), "used", &options);
    let session = session.expect("it loads");
    let found = [6, 2, 3, 2].map(|rows| counted(&session, rows));
    assert_eq!(found, [(0.0, 2.0), (6.0, 3.0), (8.0, 4.0), (11.0, 5.0)]);
}

/// The README's example, word for word.
mod readme {
    #[rustfmt::skip]
    mod example {
        // begin
        use plimsoll::{Choice, DType, Options, Session, Tensor, Trace};

        fn main() -> plimsoll::Result<()> {
            let trace = Trace::new("two layers");
            let x = trace.input("x", DType::F32, [4, 8]);
            let w = trace.input("w", DType::F32, [8, 2]);
            trace.output("y", x.matmul(w).relu());

            let session = Session::from_graph(trace.finish()?, &Options::default().on(Choice::Cpu))?;
            println!("{} bytes, known before the run", session.plan().bytes());

            let x = Tensor::from_f32([4, 8], &[0.5; 32])?;
            let w = Tensor::from_f32([8, 2], &[0.25; 16])?;
            let outputs = session.run(&[("x", x), ("w", w)])?;
            assert_eq!(outputs[0].1.to_f64(), [1.0; 8]);
            assert_eq!(session.usage().bytes, session.plan().bytes());
            Ok(())
        }
        // end

        #[test]
        fn it_runs() {
            main().expect("the example runs");
        }
    }

    #[test]
    fn it_is_what_the_readme_shows() {
        let lines =
            |text: &str| text.lines().map(|l| l.trim().to_owned()).collect::<Vec<_>>().join("\n").trim().to_owned();
        let between = |text: &str, begin: &str, end: &str| {
            let (_, rest) = text.split_once(begin).expect("it begins");
            lines(rest.split_once(end).expect("it ends").0)
        };
        let shown = between(include_str!("../../README.md"), "```rust\n", "\n```");
        let here = between(include_str!("session.rs"), "// begin\n", "// end\n");
        assert_eq!(shown, here);
    }
}

/// One operator on values made so far: an operator's number and three numbers that choose its operands and attributes.
type Choices = (u8, usize, usize, usize);

/// A graph of random operators. All values stay within [-1, 1], so that one absolute tolerance holds for all. With `joined`, every value
/// ends in one concatenation.
fn random_graph(choices: &[Choices], joined: bool) -> Graph {
    const LARGEST: usize = 3000;
    let g = Trace::new("random");
    let mut values = vec![
        g.input("a", DType::F32, [3, 4, 5]),
        g.input("b", DType::F32, [4, 5]),
        g.input("c", DType::F32, [5, 6]),
        g.constant("d", random([3, 1, 5], 7)),
    ];
    let shape = |v: Var| v.fact().expect("no error came before").shape;
    for &(op, p, q, r) in choices {
        let x = values[p % values.len()];
        let dims = shape(x);
        let rank = dims.len();
        // A partner for which `fits` is true; the value itself if there is no other.
        let partner = |fits: &dyn Fn(&[usize]) -> bool| {
            let count = values.len();
            let at = (0..count).map(|k| values[(q + k) % count]).find(|v| fits(&shape(*v)));
            at.unwrap_or(x)
        };
        let axis = |n: usize| n % rank.max(1);
        let made = match op {
            0 => [x.relu(), x.tanh(), x.sigmoid(), -x, x.abs(), x.sin()][q % 6],
            1 | 2 => {
                let fits = |other: &[usize]| {
                    let other = plimsoll::Shape::new(other);
                    plimsoll::Shape::broadcast([&dims, &other]).is_some_and(|s| s.numel() <= LARGEST)
                };
                let y = partner(&fits);
                [(x + y) * 0.5, (x - y) * 0.5, x * y, x.max(y), x.min(y)][r % 5]
            }
            3 if rank >= 2 => {
                let depth = dims[rank - 1];
                // Some operands have a prologue, others do not.
                let x = [x.abs(), x * 0.5, (x.max(-x) - 0.5) * 0.5, x, x][r % 5];
                let y = partner(&|other| other.len() == 2 && other[0] == depth);
                let y = match shape(y)[..] {
                    [k, _] if k == depth => y,
                    _ => {
                        let mut axes: Vec<usize> = (0..rank).collect();
                        axes.swap(rank - 1, rank - 2);
                        x.transpose(&axes)
                    }
                };
                let y = if r % 7 < 2 { -y } else { y };
                x.matmul(y) * (1.0 / depth as f32)
            }
            4 if rank >= 1 => {
                let (axis, keep) = (axis(q), r % 2 == 0);
                let over = [axis as i64];
                match r % 4 {
                    0 => x.reduce_mean(&over, keep),
                    1 => x.reduce_max(&over, keep),
                    2 => x.reduce_sum(&over, keep) * (1.0 / dims[axis] as f32),
                    _ => x.reduce_min(&over, keep),
                }
            }
            5 if rank >= 1 => x.softmax(axis(q) as i64),
            6 if rank >= 1 => {
                let y = partner(&|other| *other == dims[..]);
                g.concat(&[x, y], axis(r) as i64)
            }
            7 if rank >= 1 && dims[axis(q)] > 1 => {
                let extent = dims[axis(q)];
                let start = r % (extent - 1);
                let end = start + 1 + (r / 7) % (extent - start);
                x.slice(axis(q) as i64, start as i64..end as i64)
            }
            8 if rank >= 2 => {
                let mut axes: Vec<usize> = (0..rank).collect();
                axes.rotate_left(q % rank);
                if r % 2 == 0 {
                    axes.swap(0, rank - 1);
                }
                x.transpose(&axes)
            }
            9 => match q % 3 {
                0 => x.reshape(&[-1]),
                1 if rank >= 2 => x.flatten(1 + r as i64 % (rank as i64 - 1)),
                _ => x.unsqueeze(&[r as i64 % (rank as i64 + 1)]),
            },
            _ => continue,
        };
        let found = shape(made);
        if found.numel() <= LARGEST && found.len() <= 5 {
            values.push(made);
        }
    }
    // Values without readers are outputs. So are some others, so that results in the middle are checked, too.
    g.output("last", values[values.len() - 1]);
    g.output("middle", values[values.len() / 2]);
    if joined {
        let flat: Vec<Var> = values.iter().map(|v| v.reshape(&[-1])).collect();
        g.output("all", g.concat(&flat, 0));
    }
    g.finish().expect("only what fits was built")
}

fn inputs(graph: &Graph) -> Vec<Tensor> {
    graph.inputs().iter().zip(1..).map(|(&v, seed)| random(graph.fact(v).shape.clone(), seed)).collect()
}

fn planned(graph: &Graph, inputs: &[Tensor], fuse: bool, backend: Box<dyn Backend>) -> (Plan, Vec<Tensor>) {
    let options = Options { recipe: Recipe { fuse, ..Recipe::default() }, ..options() };
    let session = common::load(graph.clone(), backend, "test", &options).expect("it loads");
    assert_eq!(session.usage().bytes, session.plan().bytes());
    (session.plan().clone(), session.with(|exec| exec.run_poisoned(inputs)).expect("it runs"))
}

/// A plan computes the graph: fused within a tolerance, unfused with the same bits as eager. Returns both plans.
fn runs_as_planned(graph: &Graph, open: &dyn Fn() -> Box<dyn Backend>) -> Result<[Plan; 2], TestCaseError> {
    let inputs = inputs(graph);
    let expected = reference::run(graph, &inputs).expect("the reference runs");

    let (fused, found) = planned(graph, &inputs, true, open());
    for (found, expected) in found.iter().zip(&expected) {
        prop_assert!(expected.to_f64().iter().all(|v| v.abs() <= 1.001));
        prop_assert_eq!(found.compare(expected, 0.0, 1e-5), Ok(()));
    }

    let (unfused, found) = planned(graph, &inputs, false, open());
    let passed = graph.clone();
    let backend = open();
    let passed = Recipe { fuse: false, ..Recipe::default() }.whole(passed, backend.target()).expect("the passes run");
    let program = Program::new(&passed, backend.target()).expect("the graph is lowered");
    let mut eager = Eager::load(&program, backend, Kind::Caching, None, None).expect("it loads");
    let results = eager.run(&inputs).expect("it runs");
    prop_assert_eq!(eager.backend().usage().bytes, eager.stats().reserved + program.staging_bytes());
    for (found, eager) in found.iter().zip(&results) {
        prop_assert_eq!(found.shape(), eager.shape());
        prop_assert!(found.bytes() == eager.bytes(), "planned and eager bits differ");
    }

    for plan in [&fused, &unfused] {
        prop_assert!(check::check(plan).is_ok());
        prop_assert!(plan.programs[0].summary.lower_bound <= plan.programs[0].summary.arena_bytes);
        prop_assert!(plan.programs[0].summary.arena_bytes <= plan.programs[0].summary.unshared_bytes);
        let back = Plan::from_json(&plan.to_json(), Path::new("plan.json"));
        prop_assert_eq!(&back.map_err(|e| e.to_string()), &Ok(plan.clone()));
    }
    Ok([fused, unfused])
}

/// Plans a graph for bindings of so many bytes and holds it against the reference; how many steps bind ranges of their buffers, or why
/// there is no such plan.
fn binds_parts(graph: &Graph, most: u64, backend: Box<dyn Backend>) -> Result<usize, String> {
    let inputs = inputs(graph);
    let target = Target { max_binding: most, ..backend.target().clone() };
    let passed = graph.clone();
    let passed = Recipe::default().whole(passed, &target).expect("the passes run");
    let made = plan::compile(&passed, &target, &Limits { memory: None });
    let (plan, constants) = made.map_err(|e| match e {
        Error::Usage { what, .. } => what,
        other => panic!("{other}"),
    })?;
    for step in &plan.programs[0].steps {
        for (slot, &b) in step.reads.iter().chain(&step.writes).enumerate() {
            assert!(step.bind_ranges.get(slot).map_or(plan.programs[0].buffers[b].bytes, |w| w.bytes) <= most);
        }
    }
    let mut exec = Exec::load(backend, plan.clone(), &constants, &|_| {}).expect("it loads");
    let found = exec.run_poisoned(&inputs).expect("it runs");
    for (found, expected) in found.iter().zip(&reference::run(graph, &inputs).expect("the reference runs")) {
        assert_eq!(found.compare(expected, 0.0, 1e-5), Ok(()), "{}", plan.to_json());
    }
    Ok(plan.programs[0].steps.iter().filter(|step| !step.bind_ranges.is_empty()).count())
}

/// Tensors that are larger than a binding: kernels are cut into parts that bind ranges of them, or say which tensor is too large.
#[test]
fn large_tensors_are_bound_in_parts() {
    let mut random = {
        let mut state = 9u64;
        move || {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 48) as u16
        }
    };
    for (name, open) in common::backends() {
        let (mut cut, mut refused) = (0, 0);
        for _ in 0..if name == "cpu" { 300 } else { 30 } {
            let choices: Vec<Drawn> = (0..12).map(|_| ((random() % 10) as u8, random(), random(), random())).collect();
            match binds_parts(&drawn(&choices, true), 1024, open()) {
                Ok(steps) => cut += steps,
                Err(what) => {
                    assert!(what.starts_with("node '") && what.contains("binds at most 1024, and kernel '"), "{what}");
                    refused += 1;
                }
            }
        }
        eprintln!("{name}: {cut} steps that bind ranges, {refused} graphs refused");
        assert!(cut > 50, "{name}: {cut}");
    }
}

type Drawn = (u8, u16, u16, u16);

fn drawn(choices: &[Drawn], joined: bool) -> Graph {
    let choices: Vec<Choices> = choices.iter().map(|&(op, p, q, r)| (op, p.into(), q.into(), r.into())).collect();
    random_graph(&choices, joined)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_graphs_run_as_planned(
        choices in proptest::collection::vec((0u8..10, any::<u16>(), any::<u16>(), any::<u16>()), 1..14)
    ) {
        runs_as_planned(&drawn(&choices, false), &cpu)?;
    }
}

/// Lays each buffer of the arena over each other one, and swaps neighbouring steps, and runs what the checker refuses; how many plans
/// poison found at fault. None of the others may compute something else.
fn spoil(graph: &Graph, fuse: bool) -> usize {
    let inputs = inputs(graph);
    let passed = graph.clone();
    let target = Target::cpu(2);
    let passed = Recipe { fuse, ..Recipe::default() }.whole(passed, &target).expect("the passes run");
    let (plan, constants) = plan::compile(&passed, &target, &Limits { memory: None }).expect("it is planned");
    let run = |plan: &Plan| Exec::load(cpu(), plan.clone(), &constants, &|_| {})?.run_poisoned(&inputs);
    let expected = run(&plan).expect("a good plan reads nothing that is dead");
    let arena: Vec<usize> = (0..plan.programs[0].buffers.len())
        .filter(|&b| plan.programs[0].buffers[b].class.segment() == Class::Activation)
        .collect();
    let over = |(&a, &b): (&usize, &usize)| {
        let mut faulty = plan.clone();
        faulty.programs[0].buffers[a].offset = plan.programs[0].buffers[b].offset;
        let end = faulty.programs[0].buffers[a].offset + faulty.programs[0].buffers[a].bytes;
        let segment = &mut faulty.segments[plan.programs[0].buffers[a].segment];
        segment.bytes = segment.bytes.max(end.next_multiple_of(4));
        faulty.programs[0].summary.planned_bytes = faulty.bytes();
        faulty.programs[0].summary.arena_bytes = faulty.class_bytes(Class::Activation);
        faulty
    };
    let swapped = |at: usize| {
        let mut faulty = plan.clone();
        faulty.programs[0].steps.swap(at - 1, at);
        faulty
    };
    let pairs = arena.iter().flat_map(|a| arena.iter().map(move |b| (a, b)));
    let faulty = pairs.map(over).chain((1..plan.programs[0].steps.len()).map(swapped));
    let mut found = 0;
    for faulty in faulty {
        let Err(refused) = check::check(&faulty) else { continue };
        if refused.to_string().contains("summary") {
            continue;
        }
        match run(&faulty) {
            Err(Error::Differ { what, .. }) => {
                let named = what.contains("step") || what.starts_with("output");
                assert!(what.contains("dead memory") && named, "{what}");
                found += 1;
            }
            // The device itself refuses arguments that overlap.
            Err(Error::Backend { .. }) => {}
            result => {
                let outputs = result.expect("faults are found or do nothing");
                assert!(outputs.iter().zip(&expected).all(|(a, b)| a.bytes() == b.bytes()), "{}", faulty.to_json());
            }
        }
    }
    found
}

/// Two buffers that are live at once in the same bytes, so that one is dead when it is read; and steps that read data before it is written.
#[test]
fn poison_shows_reads_of_dead_memory() {
    let mut found = 0;
    for (width, depth) in [(2, 2), (3, 3), (4, 2)] {
        found += [true, false].map(|fuse| spoil(&branches(width, depth), fuse)).iter().sum::<usize>();
    }
    let mut state = 5u64;
    let mut word = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 48) as u16
    };
    for _ in 0..30 {
        let choices: Vec<Drawn> = (0..12).map(|_| ((word() % 10) as u8, word(), word(), word())).collect();
        found += spoil(&drawn(&choices, false), false);
    }
    assert!(found > 1000, "{found} faults");
}

/// The steps in an order that streams and waits allow.
fn shuffled(plan: &Plan, random: &mut impl FnMut(usize) -> usize) -> Plan {
    let mut rest: Vec<_> = StepIdx::all(&plan.programs[0].steps).collect();
    let mut steps = Vec::new();
    while !rest.is_empty() {
        let ready = |at: &&StepIdx| {
            let step = &plan.programs[0].steps[**at];
            let held =
                |other: &StepIdx| step.waits.contains(other) || plan.programs[0].steps[*other].stream == step.stream;
            !rest.iter().any(|other| other < *at && held(other))
        };
        let ready: Vec<_> = rest.iter().filter(ready).copied().collect();
        let next = ready[random(ready.len())];
        rest.retain(|at| *at != next);
        steps.push(plan.programs[0].steps[next].clone());
    }
    Plan { programs: vec![plan::Program { steps, ..plan.programs[0].clone() }], ..plan.clone() }
}

/// Branches that meet and part again: `width` of them, of `depth` products.
fn branches(width: usize, depth: usize) -> Graph {
    let g = Trace::new("branches");
    let x = g.input("x", DType::F32, [8, 16]);
    let weights: Vec<Var> = (0..width).map(|i| g.input(&format!("w{i}"), DType::F32, [16, 16])).collect();
    let mut values = vec![x; width];
    for layer in 0..depth {
        let next = |i: usize| (values[i].matmul(weights[i]) * (1.0 / 16.0)).tanh();
        let made: Vec<Var> = (0..width).map(next).collect();
        let meet = |i: usize| if layer % 2 == 1 { made[i] + made[(i + 1) % width] } else { made[i] };
        values = (0..width).map(meet).collect();
    }
    let sum = values.iter().copied().reduce(|a, b| a + b).expect("there are branches");
    g.output("y", sum);
    g.finish().expect("the graph is sound")
}

/// Plans the graph in streams and runs it in orders that they allow, with all waits and with each one missing. Returns how many plans had
/// streams, and how many missing waits were found.
fn runs_in_streams(graph: &Graph, random: &mut impl FnMut(usize) -> usize) -> (usize, usize) {
    let inputs = inputs(graph);
    let target = Target { streams: 4, ..Target::cpu(2) };
    let (mut wide, mut refused) = (0, 0);
    for fuse in [true, false] {
        let passed = graph.clone();
        let passed = Recipe { fuse, ..Recipe::default() }.whole(passed, &target).expect("the passes run");
        let (plan, constants) = plan::compile(&passed, &target, &Limits { memory: None }).expect("it is planned");
        let run = |plan: &Plan| -> Vec<Vec<u8>> {
            let mut exec = Exec::load(cpu(), plan.clone(), &constants, &|_| {}).expect("it loads");
            exec.run(&inputs).expect("it runs").iter().map(|t| t.bytes().to_vec()).collect()
        };
        wide += usize::from(plan.programs[0].steps.iter().any(|step| step.stream != 0));
        let expected = run(&plan);
        let waits =
            plan.programs[0].steps.iter().enumerate().flat_map(|(at, s)| (0..s.waits.len()).map(move |w| (at, w)));
        let without = |(at, wait): (usize, usize)| {
            let mut mutant = plan.clone();
            mutant.programs[0].steps[at].waits.remove(wait);
            mutant
        };
        for mutant in std::iter::once(plan.clone()).chain(waits.map(without)) {
            if check::check(&mutant).is_err() {
                assert!(mutant != plan, "a plan that was made passes");
                refused += 1;
                continue;
            }
            for _ in 0..4 {
                assert!(run(&shuffled(&mutant, random)) == expected, "{}", mutant.to_json());
            }
        }
    }
    (wide, refused)
}

/// Steps in streams compute the same in every order that streams and waits allow. A missing wait is found, or was not needed.
#[test]
fn streams_run_in_any_order_that_they_allow() {
    let mut state = 1u64;
    let mut random = |n: usize| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) as usize % n
    };
    let mut found = (0, 0);
    let mut add = |(wide, refused)| found = (found.0 + wide, found.1 + refused);
    for (width, depth) in (2..9).flat_map(|width| (1..7).map(move |depth| (width, depth))) {
        add(runs_in_streams(&branches(width, depth), &mut random));
    }
    for _ in 0..120 {
        let mut word = || random(1 << 16) as u16;
        let choices: Vec<Drawn> = (0..20).map(|_| ((word() % 10) as u8, word(), word(), word())).collect();
        add(runs_in_streams(&drawn(&choices, false), &mut random));
    }
    assert!(found.0 > 60 && found.1 > 10, "plans with streams, and missing waits that were found: {found:?}");
}

/// The same on wgpu, which tracks a buffer's usage as a whole: mostly with concatenations, whose parts are ranges of one buffer.
#[test]
fn random_graphs_run_as_planned_on_wgpu() {
    let Some((_, open)) = common::backends().into_iter().find(|(name, _)| *name == "wgpu") else { return };
    // Operators by number. One in three is a concatenation.
    let op = proptest::sample::select(vec![0u8, 1, 2, 3, 4, 5, 7, 8, 9, 6, 6, 6, 6]);
    let choices = proptest::collection::vec((op, any::<u16>(), any::<u16>(), any::<u16>()), 4..14);
    let config =
        ProptestConfig { cases: 24, failure_persistence: None, max_shrink_iters: 64, ..ProptestConfig::default() };
    // The same graphs every time: compiling shaders is slow, so these few cases are chosen.
    let rng = TestRng::deterministic_rng(config.rng_algorithm);
    let (ranges, joined) = (Cell::new(0), Cell::new(0));
    let result = TestRunner::new_with_rng(config, rng).run(&choices, |choices| {
        for plan in runs_as_planned(&drawn(&choices, true), &open)? {
            ranges.set(ranges.get() + plan.programs[0].steps.iter().filter(|step| binds_ranges(&plan, step)).count());
            joined
                .set(joined.get() + BufferIdx::all(&plan.programs[0].buffers).filter(|b| is_joined(&plan, *b)).count());
        }
        Ok(())
    });
    result.unwrap_or_else(|e| panic!("{e}"));
    let found = (ranges.get(), joined.get());
    assert!(found.0 > 50 && found.1 > 10, "steps with ranges of one segment, and joined buffers: {found:?}");
}

/// True if a step writes to a segment that it reads elsewhere.
fn binds_ranges(plan: &Plan, step: &Step) -> bool {
    let place = |b: &BufferIdx| (plan.programs[0].buffers[*b].segment, plan.programs[0].buffers[*b].offset);
    let apart = |r: &BufferIdx, w: &BufferIdx| place(r).0 == place(w).0 && place(r).1 != place(w).1;
    step.writes.iter().any(|w| step.reads.iter().any(|r| apart(r, w)))
}

/// True if several steps write one buffer, as they do with the parts of a concatenation.
fn is_joined(plan: &Plan, buffer: BufferIdx) -> bool {
    plan.programs[0].steps.iter().filter(|step| step.writes.contains(&buffer)).count() > 1
}

/// What a driver takes beside plans is measured on whatever device is here.
#[test]
fn what_is_beside_plans_is_measured() {
    for (name, open) in common::backends() {
        let found = driver_memory::measure(&|| Ok(open())).expect("small graphs run");
        let device = open();
        let target = device.target();
        assert_eq!((&found.device, &found.target, found.family), (&device.identity(), &target.name, target.family));
        let g = Trace::new("sum");
        g.output("y", g.input("x", DType::F32, [8]) + 1.0);
        let plan = common::planned(&g.finish().expect("the graph is sound"), target);
        let estimate = found.estimate(&plan);
        assert_eq!((estimate.context, estimate.libraries), (found.context, 0), "{name}");
        assert_eq!((estimate.modules, estimate.graphs), (found.kernel, found.step), "{name}");
        assert_eq!(estimate.bytes, found.context + found.kernel + found.step, "{name}");
    }
}
