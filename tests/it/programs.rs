//! Programs: graphs that share segments, constants and states, and run one at a time.

use crate::common;
use plimsoll::internals::op::Attrs;
use plimsoll::internals::plan::Planning;
use plimsoll::internals::plan::range::Source;
use plimsoll::internals::plan::{self, check};
use plimsoll::internals::plan::{Graphs, Job};
use plimsoll::internals::session::{Choice, Options, Session};
use plimsoll::internals::shape::Extent;
use plimsoll::{Class, DType, Error, Graph, Limits, Plan, Program, Recipe, Target, Tensor, Trace};
use std::process::Command;
use std::sync::Arc;

const F32: DType = DType::F32;

fn options() -> Options {
    Options { threads: 2, ..Options::default() }.on(Choice::Cpu)
}

fn numbers(rows: usize, columns: usize, seed: u64) -> Tensor {
    common::random(&mut seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).max(1), &[rows, columns].into())
}

/// A graph over weights that others have, too: `rows` of x through `depth` products, with a weight of its own at the end.
fn part(name: &str, rows: usize, depth: usize, own: usize) -> Graph {
    let g = Trace::new(name);
    let mut value = g.input("x", F32, [rows, 32]);
    for layer in 0..depth {
        value = value.matmul(g.constant(&format!("w{layer}"), numbers(32, 32, layer as u64 + 1))).tanh();
    }
    g.output("y", value.matmul(g.constant("own", numbers(32, own, own as u64))));
    g.finish().expect("the graph is sound")
}

/// Three graphs, the second of which has the largest arena.
fn three() -> Vec<(String, Graph)> {
    let parts = [("small", 4, 2, 8), ("large", 64, 3, 40), ("middle", 16, 3, 24)];
    parts.map(|(name, rows, depth, own)| (name.to_owned(), part(name, rows, depth, own))).into()
}

fn alone(graph: &Graph, target: &Target) -> Plan {
    Recipe::default().plan(graph.clone(), target, &Limits { memory: None }).expect("it is planned")
}

#[test]
fn the_arena_is_the_largest_and_constants_are_there_once() {
    for (name, open) in common::backends() {
        let session = common::load_programs(three(), open(), name, &options());
        let session = session.expect("the programs load");
        let plan = session.plan();
        assert_eq!(session.usage().bytes, plan.bytes(), "{name}");
        let plans: Vec<Plan> = three().iter().map(|(_, graph)| alone(graph, &plan.target)).collect();
        let largest = plans.iter().map(|plan| plan.class_bytes(Class::Activation)).max();
        assert_eq!(Some(plan.class_bytes(Class::Activation)), largest, "{name}");
        // Three weights that are shared, and one of each program.
        let align = plan.target.alignment;
        let own: u64 = [8, 40, 24].iter().map(|columns: &u64| (32 * columns * 4).next_multiple_of(align)).sum();
        let union = 3 * 32 * 32 * 4 + own;
        // The CPU packs the operands of products, which takes no more than a few columns each.
        assert!((union..union + union / 4).contains(&plan.class_bytes(Class::Constant)), "{name}");
        let sum: u64 = plans.iter().map(|plan| plan.class_bytes(Class::Constant)).sum();
        assert!(plan.class_bytes(Class::Constant) < sum, "{name}");
        check::check(plan).expect("all are sound");
    }
}

#[test]
fn results_are_those_of_each_alone() {
    for (name, open) in common::backends() {
        let session = common::load_programs(three(), open(), name, &options());
        let session = session.expect("the programs load");
        let expected = three().into_iter().map(|(_, graph)| {
            let rows = graph.fact(graph.inputs()[0]).shape[0];
            let alone = common::load(graph, open(), name, &options()).expect("it loads");
            let x = numbers(rows, 32, rows as u64);
            (alone.run(&[("x", x.clone())]).expect("it runs"), x)
        });
        let expected: Vec<_> = expected.collect();
        for round in 0..3 {
            for (program, (expected, x)) in session.programs().zip(&expected) {
                let inputs = [("x", x.clone())];
                let found = if round == 1 { program.run_poisoned(&inputs) } else { program.run(&inputs) };
                assert_eq!(found.expect("it runs"), *expected, "{name}, {}", program.plan().name);
            }
        }
        assert_eq!(session.usage().bytes, session.plan().bytes(), "{name}");
    }
}

/// A constant of a range that depends on the binding shares its place with one of another program. Both are there when their plan runs.
#[test]
fn a_binding_overwrites_a_constant_that_programs_share() {
    let scaled = |rows: usize, seed: usize| {
        let g = Trace::new("scaled");
        let sum = g.state("sum", numbers(1, 32, 9));
        let y = (g.input("x", F32, [rows, 32]) * g.constant("scale", numbers(1, 32, seed as u64))).tanh();
        g.update(sum, sum + y.reduce_sum(&[0], true));
        g.output("y", y + sum);
        g.finish().expect("the graph is sound")
    };
    let extent = |dims: &[(String, usize)]| dims.iter().find(|(name, _)| name == "rows").expect("it is set").1;
    for (name, open) in common::backends() {
        let source: Source = Arc::new(move |dims| Ok(scaled(extent(dims), extent(dims))));
        let programs = vec![
            ("many".to_owned(), Graphs::Range(source, vec![("rows".to_owned(), Extent::from(1..=6))])),
            ("one".to_owned(), scaled(4, 6).into()),
        ];
        let session = common::load_programs(programs, open(), name, &options());
        let session = session.expect("the programs load");
        let constants = session.plan().class_bytes(Class::Constant);
        assert!(constants < 2 * 32 * 4, "{name}: {constants} bytes of constants");
        let mut kept = numbers(1, 32, 9);
        for (round, (program, rows, seed)) in [
            ("one", 4, 6),
            ("many", 2, 2),
            ("one", 4, 6),
            ("many", 6, 6),
            ("many", 3, 3),
            ("many", 2, 2),
            ("one", 4, 6),
        ]
        .into_iter()
        .enumerate()
        {
            let alone = common::load(scaled(rows, seed), open(), name, &options());
            let alone = alone.expect("it loads");
            alone.set_state("sum", &kept).expect("it is one");
            let x = [("x", numbers(rows, 32, round as u64 + 1))];
            let program = session.program(program).expect("it is there");
            let found = if round % 2 == 1 { program.run_poisoned(&x) } else { program.run(&x) };
            assert_eq!(found.expect("it runs"), alone.run(&x).expect("it runs"), "{name}, round {round}");
            kept = session.state("sum").expect("it is one");
            assert_eq!(kept, alone.state("sum").expect("it is one"), "{name}, round {round}");
        }
    }
}

/// A program may have a range of shapes: its bindings run in the same segments as the other programs.
#[test]
fn a_range_is_a_program() {
    let source = |depth: usize| -> Source {
        Arc::new(move |dims| {
            Ok(part("range", dims.iter().find(|(name, _)| name == "rows").expect("it is set").1, depth, 8))
        })
    };
    let rows = |least: usize, most: usize| vec![("rows".to_owned(), Extent::from(least..=most))];
    for (name, open) in common::backends() {
        let programs = vec![
            ("many".to_owned(), Graphs::Range(source(2), rows(1, 40))),
            ("one".to_owned(), part("one", 24, 3, 24).into()),
            ("few".to_owned(), Graphs::Range(source(3), rows(2, 5))),
        ];
        let session = common::load_programs(programs, open(), name, &options());
        let session = session.expect("the programs load");
        let bytes = session.plan().bytes();
        for (round, (program, depth, own, rows)) in [
            ("many", 2, 8, 7),
            ("one", 3, 24, 24),
            ("few", 3, 8, 3),
            ("many", 2, 8, 40),
            ("one", 3, 24, 24),
            ("many", 2, 8, 7),
        ]
        .into_iter()
        .enumerate()
        {
            let alone = common::load(part("alone", rows, depth, own), open(), name, &options());
            let inputs = [("x", numbers(rows, 32, round as u64 + 1))];
            let expected = alone.expect("it loads").run(&inputs).expect("it runs");
            let program = session.program(program).expect("it is there");
            let found = if round % 2 == 0 { program.run_poisoned(&inputs) } else { program.run(&inputs) };
            let found = found.expect("it runs");
            common::agrees(&found[0].1, &expected[0].1, 1e-6).unwrap_or_else(|e| panic!("{name}, {rows} rows: {e}"));
        }
        assert_eq!((session.usage().bytes, session.plan().bytes()), (bytes, bytes), "{name}");
        let beyond = session.program("few").expect("it is there").run(&[("x", numbers(6, 32, 1))]);
        let beyond = beyond.expect_err("it is outside of the range").to_string();
        assert!(beyond.contains("expected 2 to 5, as was planned, found 6"), "{beyond}");
    }
}

/// One program writes a row of hidden elements, another takes them through a layer and counts, a third shows them.
fn stateful() -> Vec<(String, Graph)> {
    let program = |name: &str| {
        let g = Trace::new(name);
        let hidden = g.state("hidden", Tensor::from_f64(F32, [2, 16], &[0.5; 32]));
        let count = g.state("count", Tensor::from_f64(F32, [1], &[0.0]));
        match name {
            "encode" => {
                g.update(hidden, g.input("x", F32, [2, 16]) * 0.5);
                g.update(count, count * 0.0);
            }
            "decode" => {
                let next = hidden.matmul(g.constant("w", numbers(16, 16, 3))).tanh();
                g.update(hidden, next);
                g.update(count, count + 1.0);
                g.output("sum", next.reduce_sum(&[1], false));
            }
            _ => g.output("shown", hidden * 1.0),
        }
        (name.to_owned(), g.finish().expect("the graph is sound"))
    };
    ["encode", "decode", "show"].map(program).into()
}

#[test]
fn programs_share_states_by_name() {
    let mut first: Option<Vec<Tensor>> = None;
    for (name, open) in common::backends() {
        let session = common::load_programs(stateful(), open(), name, &options());
        let session = session.expect("the programs load");
        let run = |program: &str, inputs: &[(&str, Tensor)]| {
            session.program(program).expect("it is there").run_poisoned(inputs).expect("it runs")
        };
        assert_eq!(run("show", &[])[0].1.to_f64(), [0.5; 32], "{name}");
        run("encode", &[("x", numbers(2, 16, 9))]);
        (0..4).for_each(|_| drop(run("decode", &[])));
        let found = vec![session.state("hidden").expect("it is a state"), session.state("count").expect("it is one")];
        assert_eq!(found[1].to_f64(), [4.0], "{name}");
        assert_eq!(run("show", &[])[0].1, found[0], "{name}");
        let expected = first.get_or_insert_with(|| found.clone());
        common::agrees(&found[0], &expected[0], 1e-5).unwrap_or_else(|e| panic!("{name}: {e}"));
        session.reset_state().expect("they are reset");
        assert_eq!(session.state("hidden").expect("it is a state").to_f64(), [0.5; 32], "{name}");
    }
}

#[test]
fn programs_that_do_not_fit_together_are_refused() {
    let refused = |programs: Vec<(&str, Graph)>, options: &Options| {
        Session::from_graphs(programs, options).expect_err("they do not fit together")
    };
    let twice = refused(vec![("a", part("a", 2, 1, 8)), ("a", part("b", 2, 1, 8))], &options());
    assert_eq!(twice.to_string(), "two programs have the name 'a': expected a name for each");
    let state = |extent: usize, first: f64| {
        let g = Trace::new("g");
        let s = g.state("s", Tensor::from_f64(F32, [extent], &vec![first; extent]));
        g.update(s, s + 1.0);
        g.finish().expect("the graph is sound")
    };
    let shapes = refused(vec![("a", state(2, 0.0)), ("b", state(3, 0.0))], &options());
    assert_eq!(shapes.to_string(), "state 's' is f32[2] in program 'a', and f32[3] in 'b'");
    let begins = refused(vec![("a", state(2, 0.0)), ("b", state(2, 1.0))], &options());
    assert_eq!(begins.to_string(), "state 's' begins with other elements in program 'a' than in 'b'");
    let limit = Options { memory_limit: Some(4096), ..options() };
    let beyond = Session::from_graphs(three(), &limit).expect_err("they do not fit");
    let Error::Fit { needed, limit: 4096, .. } = beyond else { panic!("{beyond}") };
    let fits = Options { memory_limit: Some(needed), ..options() };
    let session = Session::from_graphs(three(), &fits).expect("they fit what was said");
    assert!(session.plan().bytes() <= needed);
    let unknown = session.program("tiny").expect_err("it has none").to_string();
    assert_eq!(unknown, "no program 'tiny'; the programs: small, large, middle");
    refused(Vec::new(), &options());
}

/// One program counts the rows of a cache, another begins anew. The count holds for both.
#[test]
fn a_count_holds_across_programs() {
    let none = || Tensor::from_i64([1], &[0]).expect("a number");
    let g = Trace::new("write");
    let (x, cache, rows) = (
        g.input("x", F32, [1, 1, 2]),
        g.state("cache", Tensor::from_f32([1, 3, 2], &[0.0; 6]).expect("six")),
        g.state("rows", none()),
    );
    g.update(cache, cache.op("TensorScatter", &[x, rows], Attrs::new().with("axis", 1)));
    g.update(rows, rows + 1.0);
    let write = g.finish().expect("the graph is sound");
    let g = Trace::new("set");
    let (to, rows) = (g.input("to", DType::I64, [1]), g.state("rows", none()));
    g.update(rows, to * 2.0);
    let set = g.finish().expect("the graph is sound");
    let session = Session::from_graphs([("write", write), ("set", set)], &options()).expect("they fit together");
    let number = |n: i64| Tensor::from_i64([1], &[n]).expect("a number");
    let write = || session.program("write").expect("it is one").run(&[("x", Tensor::from_f32([1, 1, 2], &[1.0; 2])?)]);
    let set = |to: i64| session.program("set").expect("it is one").run(&[("to", number(to))]).expect("it sets");
    (0..3).for_each(|_| drop(write().expect("there is room")));
    let refused = || {
        let before = [session.state("cache"), session.state("rows")].map(|state| state.expect("it is a state"));
        let error = write().expect_err("there is none").to_string();
        assert_eq!([session.state("cache"), session.state("rows")].map(|state| state.expect("it is a state")), before);
        error
    };
    assert!(refused().starts_with("state 'rows' is 3: expected 0 to 2, from where node '"));
    set(1);
    write().expect("the row is the last but one");
    assert!(refused().starts_with("state 'rows' is 3: expected 0 to 2"));
    set(-1);
    assert!(refused().starts_with("state 'rows' is -2: expected 0 to 2"));
    set(0);
    write().expect("the cache is empty");
}

/// Plans that do not fit together are found from the plans alone.
#[test]
fn edited_programs_are_refused() {
    let target = Target::named("cpu").expect("it is a target");
    let plan = plan::plan(&Job::new(stateful(), &target)).expect("they are planned").plan;
    check::check(&plan).expect("they fit together");
    let refused = |edit: &dyn Fn(&mut Program)| {
        let mut plan = plan.clone();
        edit(&mut plan.programs[1]);
        check::check(&plan).expect_err("they do not fit together").to_string()
    };
    let align = target.alignment;
    let found = [
        refused(&|program| program.name = plan.programs[0].name.clone()),
        refused(&|program| program.state[0].port.name = "other".into()),
        refused(&|program| program.state[0].given = false),
        refused(&|program| {
            let [a, b] = &mut program.state[..] else { unreachable!("it has two states") };
            std::mem::swap(&mut a.port.name, &mut b.port.name);
        }),
        refused(&|program| {
            let (a, b) = (program.state[0].port.buffer, program.state[1].port.buffer);
            program.buffers[a].offset = program.buffers[b].offset;
        }),
        refused(&|program| {
            let buffer = program.state[0].port.buffer;
            program.buffers[buffer].offset += align;
        }),
    ];
    for text in &found {
        assert!(text.contains("program '"), "{text}");
    }
}

/// Constants of programs that are equal, but are other tensors, are held once; those that differ in one element are not.
#[test]
fn equal_constants_are_held_once() {
    let graph = |name: &str, change: f64| {
        let g = Trace::new(name);
        let mut values = numbers(1, 4096, 5).to_f64();
        values[4095] += change;
        let w = g.constant(name, Tensor::from_f64(F32, [1, 4096], &values));
        g.output("y", g.input("x", F32, [1, 4096]) * w);
        g.finish().expect("the graph is sound")
    };
    let bytes = |change: f64| {
        let programs = [("a", graph("a", 0.0)), ("b", graph("b", change))];
        let session = Session::from_graphs(programs, &options()).expect("they load");
        let x = Tensor::from_f64(F32, [1, 4096], &vec![1.0; 4096]);
        let run = |name: &str| session.program(name).expect("it is there").run(&[("x", x.clone())]).expect("it runs");
        let [a, b] = ["a", "b"].map(|name| run(name)[0].1.to_f64()[4095]);
        assert!((b - a - change).abs() < 1e-6, "{a} {b}");
        session.plan().class_bytes(Class::Constant)
    };
    assert_eq!([bytes(0.0), bytes(1.0)], [4096 * 4, 2 * 4096 * 4]);
}

/// Threads run several programs of one session.
#[test]
fn threads_share_programs() {
    let session = Arc::new(Session::from_graphs(three(), &options()).expect("the programs load"));
    let expected: Vec<_> = ["small", "large", "middle"].into_iter().zip([4, 64, 16]).collect();
    std::thread::scope(|scope| {
        for (name, rows) in expected {
            let session = Arc::clone(&session);
            scope.spawn(move || {
                let program = session.program(name).expect("it is there");
                let first = program.run(&[("x", numbers(rows, 32, 1))]).expect("it runs");
                for _ in 0..20 {
                    assert_eq!(program.run(&[("x", numbers(rows, 32, 1))]).expect("it runs"), first, "{name}");
                }
            });
        }
    });
}

/// Runs the program; gives its exit code, stdout and stderr.
fn plimsoll(arguments: &[&str]) -> (Option<i32>, String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_plimsoll"));
    let command = command.args(arguments).current_dir(env!("CARGO_MANIFEST_DIR")).env_remove("RUST_LOG");
    let output = command.output().expect("the program starts");
    let text = |bytes| String::from_utf8(bytes).expect("the output is text");
    (output.status.code(), text(output.stdout), text(output.stderr))
}

fn json(arguments: &[&str]) -> serde_json::Value {
    let (code, out, err) = plimsoll(&[arguments, &["--json"]].concat());
    assert_eq!(code, Some(0), "{arguments:?}: {err}");
    common::printed(arguments, &out)
}

const ENCODE: &str = r#"< ir_version: 8, opset_import: ["" : 17] >
encode (float[2, rows] x) => (float[2, rows] encoded)
{
   two = Constant <value = float {2.0}> ()
   encoded = Mul (x, two)
}"#;

const DECODE: &str = r#"< ir_version: 8, opset_import: ["" : 17] >
decode (float[2, rows] hidden, float[1, 1] total) => (float[2, rows] seen, float[1, 1] next_total)
{
   seen = Neg (hidden)
   sum = ReduceSum (hidden)
   next_total = Add (total, sum)
}"#;

const SUM: &str = r#"< ir_version: 8, opset_import: ["" : 18] >
sum (float[rows, 4] cache, float[1, 4] new) => (float[all, 4] grown, float[4] sums)
<int64[1] axis = {0}>
{
   grown = Concat <axis = 0> (cache, new)
   sums = ReduceSum <keepdims = 0> (grown, axis)
}"#;

const DOUBLE: &str = r#"< ir_version: 8, opset_import: ["" : 17] >
double (float[4] shared, float[4] more) => (float[4] doubled)
{
   twice = Add (shared, shared)
   doubled = Add (twice, more)
}"#;

/// A program whose cache grows may update a state that only another program reads.
#[test]
fn a_growing_program_shares_its_results() {
    let folder = common::Folder::new("programs-grow");
    let files = [folder.file("sum.onnxtxt", SUM), folder.file("double.onnxtxt", DOUBLE)];
    let grows = ["--state", "cache=grown", "--state", "shared=sums", "--set", "rows=0..8"];
    let on = ["--backend", "cpu", "--threads", "1", "--input", "new=1x4xf32=1", "--poison"];
    let run = ["--input", "more=4xf32=0.5", "--program", "sum", "--program", "sum", "--program", "double"];
    let found = json(&[&["run", &files[0], &files[1]], &grows[..], &on, &run].concat());
    let states = found["states"].as_array().cloned().unwrap_or_default();
    let shared = states.iter().find(|state| state["name"] == "shared").expect("it is a state");
    assert_eq!((&shared["max"], &found["outputs"][0]["max"]), (&2.0.into(), &4.5.into()), "{found}");
    // States that are given, and rows of the cache. One run of `sum` follows.
    let given = ["--input", "shared=4xf32=3", "--input", "cache=2x4xf32=0.5"];
    let run = ["--input", "more=4xf32=0.5", "--program", "double"];
    let found = json(&[&["run", &files[0], &files[1]], &grows[..], &on, &given, &run].concat());
    assert_eq!(found["outputs"][0]["max"], 6.5, "{found}");
    let run = [&run[..2], &["--program", "sum", "--program", "double"]].concat();
    let found = json(&[&["run", &files[0], &files[1]], &grows[..], &on, &given, &run].concat());
    assert_eq!(found["outputs"][0]["max"], 4.5, "{found}");
    for (arguments, words) in [
        (["--state", "more=sums"], "state 'more=sums': there is a state 'shared' already, which output 'sums' updates"),
        (["--input", "shared=5xf32=1"], "state 'shared': expected to begin with f32[4], found f32[5]"),
        (["--input", "sums=4xf32=1"], "--input sums: no program has such an input or state"),
    ] {
        let (code, _, err) = plimsoll(&[&["run", &files[0], &files[1]], &grows[..], &arguments].concat());
        assert_eq!(code, Some(1), "{err}");
        assert!(err.contains(words), "{err}");
    }
}

/// Commands that plan know programs: the largest extent that fits, a page, eager beside planned.
#[test]
fn commands_know_programs() {
    let folder = common::Folder::new("programs-commands");
    let (encode, decode) = (folder.file("encode.onnxtxt", ENCODE), folder.file("decode.onnxtxt", DECODE));
    let states = ["--state", "hidden=encoded", "--state", "total=next_total"];
    // One thread has no stack of its own.
    let files = [&[&encode[..], &decode], &states[..], &["--threads", "1"]].concat();
    let planned = |rows: &str| -> u64 {
        let plan = json(&[&["plan"], &files[..], &["--set", &format!("rows={rows}")]].concat());
        let segments = plan["segments"].as_array().cloned().expect("they have segments");
        segments.iter().map(|segment| segment["bytes"].as_u64().expect("it is a number")).sum()
    };
    let found = json(&[&["max-batch"], &files[..], &["--memory-limit", "64KiB"]].concat());
    let rows = found["largest"]["extent"].as_u64().expect("one fits");
    assert_eq!(
        (&found["dim"], &found["largest"]["planned_bytes"]),
        (&"rows".into(), &planned(&rows.to_string()).into())
    );
    assert!(planned(&rows.to_string()) <= 65536 && planned(&(rows + 8).to_string()) > 65536, "{found}");
    let (code, _, err) = plimsoll(&[&["max-batch"], &files[..], &["--memory-limit", "64"]].concat());
    assert_eq!((code, err.contains("the plan at rows=1: needs")), (Some(2), true), "{err}");
    let (code, _, err) =
        plimsoll(&[&["max-batch"], &files[..], &["--memory-limit", "64KiB", "--dim", "columns"]].concat());
    assert_eq!((code, err.contains("no program has a dim 'columns'; the dims: 'rows'")), (Some(1), true), "{err}");
    let page = folder.path("page.html");
    let (code, _, err) = plimsoll(&[&["plan"], &files[..], &["--set", "rows=3", "--html", &page]].concat());
    assert_eq!(code, Some(0), "{err}");
    let page = std::fs::read_to_string(&page).expect("it was written");
    assert!(page.contains("encode, decode on cpu") && page.matches("\"arena\":").count() > 2);
    let on = ["--set", "rows=3", "--backend", "cpu", "--poison"];
    let compared = json(&[&["compare"], &files[..], &on].concat());
    assert_eq!(compared["programs"].as_array().map(Vec::len), Some(2), "{compared}");
    assert_eq!(compared["planned_together_bytes"], planned("3"), "{compared}");
    // A range of one program: the shapes of a run's inputs select the binding.
    let ranged = [&files[..2], &["--set", "encode:rows=1..6", "--set", "decode:rows=3"]].concat();
    let page = folder.path("range.html");
    let plan = json(&[&["plan"], &ranged[..], &["--html", &page]].concat());
    assert_eq!(plan["programs"][0]["dims"][0]["most"], 6, "{plan}");
    let run = ["--backend", "cpu", "--threads", "1", "--input", "x=2x5xf32=0.5", "--program", "encode", "--poison"];
    let run = json(&[&["run"], &ranged[..], &run].concat());
    assert_eq!((&run["outputs"][0]["shape"][1], &run["outputs"][0]["max"]), (&5.into(), &1.0.into()), "{run}");
    // Inputs of one name and different shapes: each is given to its program.
    let fixed = [&files[..2], &["--set", "encode:rows=2", "--set", "decode:rows=3", "--backend", "cpu"]].concat();
    let x = ["--program", "encode", "--input", "encode:x=2x2xf32=0.5"];
    let run = json(&[&["run"], &fixed[..], &x].concat());
    assert_eq!(run["outputs"][0]["max"], 1.0, "{run}");
    let (code, _, err) = plimsoll(&[&["run"], &fixed[..], &["--input", "other:x=2x2xf32=0.5"]].concat());
    assert_eq!((code, err.contains("--input other:x: no program has such an input")), (Some(1), true), "{err}");
    let beyond = [&["plan"], &files[..], &["--set", "rows=3", "--assert-bytes", "64"]].concat();
    let (code, _, err) = plimsoll(&beyond);
    assert_eq!((code, err.contains("needs the most arena")), (Some(2), true), "{err}");
}

/// A state may be the output of one file and the input of another. Each flag has to be of use to a program.
#[test]
fn files_share_states() {
    let folder = common::Folder::new("programs");
    let (encode, decode) = (folder.file("encode.onnxtxt", ENCODE), folder.file("decode.onnxtxt", DECODE));
    let files = [&encode[..], &decode, "--set", "rows=3"];
    let states = ["--state", "hidden=encoded", "--state", "total=next_total"];
    let on = ["--backend", "cpu", "--threads", "2", "--input", "x=2x3xf32=0.5", "--poison"];
    let run = ["--program", "encode", "--program", "decode", "--iters", "4"];
    let found = json(&[&["run"], &files[..], &states, &on, &run].concat());
    assert_eq!(found["model"], "decode");
    assert_eq!(found["outputs"][0]["max"], -1.0, "{found}");
    assert_eq!(found["states"].as_array().map(Vec::len), Some(2), "{found}");
    let total = found["states"].as_array().into_iter().flatten().find(|s| s["name"] == "total").cloned();
    assert_eq!(total.expect("it is a state")["max"], 24.0, "{found}");
    assert_eq!(found["memory"]["planned_bytes"], found["memory"]["allocated_bytes"], "{found}");
    let timed = json(&[&["bench"], &files[..], &states, &on[..6], &["--program", "decode", "--iters", "2"]].concat());
    assert_eq!(timed["model"], "decode");
    let one = json(&[&["run"], &files[..], &on, &["--program", "decode", "--output", "seen"]].concat());
    assert_eq!(one["outputs"].as_array().map(Vec::len), Some(1), "{one}");
    // A plan of several programs is checked again from its file.
    let plan = folder.path("plan.json");
    let (code, out, err) = plimsoll(&[&["plan"], &files[..], &states, &["-o", &plan]].concat());
    assert_eq!(code, Some(0), "{err}");
    assert!(out.contains(" for cpu, 2 programs") && out.contains("planned together"), "{out}");
    let (code, out, err) = plimsoll(&["check", &plan]);
    assert_eq!((code, out.lines().last()), (Some(0), Some("together: sound")), "{err}");
    let (code, out, err) = plimsoll(&["diff", &plan, &plan]);
    assert_eq!((code, out.matches("program ").count()), (Some(0), 2), "{err}");
    let refused = |arguments: &[&str]| {
        let (code, _, err) = plimsoll(&[&["plan"], &files[..], arguments].concat());
        assert_eq!(code, Some(1), "{arguments:?}: {err}");
        err
    };
    for (arguments, words) in [
        (&["--set", "columns=3"][..], "--set columns=3: no program has such a dim; the programs: encode, decode"),
        (&["--set", "encode:columns=3"], "--set encode:columns=3: no program has such a dim"),
        (&["--state", "hidden=encoded", "--set", "decode:rows=1..4"], "dim 'rows' has a range, but no state grows"),
        (&["--output", "logits"], "--output logits: no program has such an output; the programs: encode, decode"),
        (&["--state", "cache=present"], "--state cache=present: no program has such an input or output"),
    ] {
        let found = refused(arguments);
        assert!(found.contains(words), "{found}");
    }
    let differ = ["--state", "hidden=encoded", "--set", "decode:rows=4"];
    assert!(refused(&differ).contains("state 'hidden' is f32[2,3] in program 'encode', and f32[2,4] in 'decode'"));
    let (code, _, err) = plimsoll(&[&["run"], &files[..], &on, &["--program", "train"]].concat());
    assert_eq!(code, Some(1));
    assert!(err.contains("no program 'train'; the programs: encode, decode"), "{err}");
}
