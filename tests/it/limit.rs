//! Limits and remedies: every figure that is printed is held against a plan of its own.

use crate::annotations;
use crate::common;
use crate::graphs;
use plimsoll::internals::advise::{self, Answer, Case, Taken, Verdict, largest};
use plimsoll::internals::onnx::proto::NodeProto;
use plimsoll::internals::pass::{Prepared, half};
use plimsoll::internals::plan::fit::bound::bound;
use plimsoll::internals::plan::lower::Dag;
use plimsoll::internals::plan::lower::Options;
use plimsoll::internals::plan::make::liveness::live;
use plimsoll::internals::plan::make::lowered;
use plimsoll::internals::plan::make::streams::Streams;
use plimsoll::internals::plan::tell::diff::{Fate, diff};
use plimsoll::internals::plan::tell::peak::peak;
use plimsoll::internals::plan::{Candidate, Class, Limits, Mesh, Plan, Recipe, SegmentIdx, Sharding, StepIdx};
use plimsoll::internals::report::grouped;
use plimsoll::internals::target::Target;
use plimsoll::internals::trace::Trace;
use plimsoll::internals::{onnx, plan, reference};
use plimsoll::{DType, Error, Graph, Tensor};
use serde_json::{Value, json};
use std::ops::Bound::{Excluded, Included, Unbounded};
use std::path::{Path, PathBuf};
use std::process::Command;

const MLP: &[&str] = &["graphs/mlp.onnxtxt", "--set", "batch=64"];
const CPU: &[&str] = &["--backend", "cpu", "--threads", "2"];

struct Ran {
    code: Option<i32>,
    out: String,
    err: String,
}

fn run(args: &[&[&str]]) -> Ran {
    let mut command = Command::new(env!("CARGO_BIN_EXE_plimsoll"));
    command.args(args.concat()).current_dir(env!("CARGO_MANIFEST_DIR")).env_remove("RUST_LOG");
    let output = command.output().expect("the program starts");
    let text = |bytes| String::from_utf8(bytes).expect("the output is text");
    let ran = Ran { code: output.status.code(), out: text(output.stdout), err: text(output.stderr) };
    assert!(!ran.err.contains("panicked"), "{args:?}: {}", ran.err);
    ran
}

fn ok(args: &[&[&str]]) -> String {
    let ran = run(args);
    assert_eq!(ran.code, Some(0), "{args:?}: {}", ran.err);
    ran.out
}

fn ok_json(args: &[&[&str]]) -> Value {
    common::printed(&args.concat(), &ok(&[args, &[&["--json"]]].concat()))
}

/// The record of a command that does not fit.
#[track_caller]
fn refused(args: &[&[&str]]) -> Value {
    let ran = run(&[args, &[&["--json"]]].concat());
    assert_eq!(ran.code, Some(2), "{args:?}: {}", ran.err);
    assert!(ran.err.contains("error: "), "the error is told, too: {}", ran.err);
    common::printed(&args.concat(), &ran.out)
}

/// A wrong command: its error contains all words, and stdout is empty.
#[track_caller]
fn fails(args: &[&[&str]], words: &[&str]) {
    let ran = run(args);
    assert_eq!((ran.code, ran.out.as_str()), (Some(1), ""), "{args:?}: {}", ran.err);
    let missing: Vec<_> = words.iter().filter(|word| !ran.err.contains(**word)).collect();
    assert!(missing.is_empty(), "{args:?}: {missing:?} missing in {}", ran.err);
}

/// Bytes of a plan that the program makes.
fn planned(args: &[&[&str]]) -> u64 {
    ok_json(&[&[&["plan"][..]], args].concat())["programs"][0]["summary"]["planned_bytes"]
        .as_u64()
        .expect("a number of bytes")
}

fn bytes(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| panic!("expected a number of bytes, found {value}"))
}

/// A file that is removed with the test.
struct File(PathBuf);

impl File {
    fn new(name: &str, content: &str) -> File {
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("limit-{}-{name}", std::process::id()));
        std::fs::write(&path, content).expect("the file is written");
        File(path)
    }

    fn path(&self) -> &str {
        self.0.to_str().expect("the path is text")
    }
}

impl Drop for File {
    fn drop(&mut self) {
        // A temporary file that cannot be removed does no harm.
        let _ = std::fs::remove_file(&self.0);
    }
}

fn targets() -> [Target; 3] {
    [Target::cpu(2), Target::wgpu(), Target::cuda()]
}

const UNLIMITED: Limits = Limits { memory: None };

// ---- A limit is an input

#[test]
fn a_limit_is_answered() {
    let needed = planned(&[MLP]);
    let under = |command: &[&str], limit: u64| -> Vec<String> {
        let limit = limit.to_string();
        let device = if command[0] == "plan" { &[] } else { CPU };
        [command, MLP, device, &["--memory-limit", &limit]].concat().into_iter().map(str::to_owned).collect()
    };
    let commands: [&[&str]; 4] =
        [&["plan"], &["run"], &["bench", "--iters", "1", "--warmup", "0"], &["compare", "--iters", "1"]];
    for command in commands {
        let args = under(command, needed + 1024);
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        let text = ok(&[&args]);
        assert!(text.ends_with("\nfits: 1.00 KiB (1,024 bytes) to spare\n"), "{command:?}: {text}");
        let answer = &ok_json(&[&args])["answer"];
        assert_eq!(answer["verdict"], "fits", "{command:?}");
        assert_eq!((bytes(&answer["needed_bytes"]), bytes(&answer["deficit_bytes"])), (needed, 0));

        // With one byte less, a batch of one less is the largest that fits, and it is found.
        let args = under(command, needed - 1);
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        let found = refused(&[&args]);
        assert_eq!(found["verdict"], "fits_smaller", "{command:?}");
        assert_eq!(bytes(&found["deficit_bytes"]), 1, "{command:?}");
        assert!(found["error"].as_str().is_some_and(|e| e.contains("(1 over)")), "{found}");
        let smaller = &found["smaller"][0];
        assert_eq!(smaller["fits"]["extent"], 63);
        assert_eq!(smaller["next"], json!({"extent": 64, "planned_bytes": needed}));
        let less = planned(&[&["graphs/mlp.onnxtxt", "--set", "batch=63"]]);
        assert_eq!(bytes(&smaller["fits"]["planned_bytes"]), less);
        let Ran { code, out, err } = run(&[&args]);
        assert_eq!((code, out.as_str()), (Some(2), ""));
        for words in ["(1 over)", "smaller binding", "--set batch=63 takes", "live at the peak", "what would help"] {
            assert!(err.contains(words), "{command:?}: {words} missing in {err}");
        }
    }

    // Below the bound of the smallest binding nothing fits, and for the given binding that is proven.
    let found = refused(&[&["plan"], MLP, &["--memory-limit", "1KiB"]]);
    assert_eq!((&found["verdict"], &found["smaller"][0]["fits"]), (&json!("cannot"), &Value::Null));
    assert!(bytes(&found["bound"]["bytes"]) > 1024);

    // Between the bound and the plan, there is neither a plan nor a proof that none exists.
    let digits = &["graphs/digits.onnx", "--set", "batch=1"];
    let (needed, least) = (planned(&[digits]), refused(&[&["plan"], digits, &["--memory-limit", "1KiB"]]));
    let least = bytes(&least["bound"]["bytes"]);
    assert!(least < needed, "the bound leaves out padding, of which digits has some");
    let found = refused(&[&["plan"], digits, &["--memory-limit", &least.to_string()]]);
    assert_eq!(found["verdict"], "not_found");
    let found = refused(&[&["plan"], digits, &["--memory-limit", &(least - 1).to_string()]]);
    assert_eq!(found["verdict"], "cannot");
}

#[test]
fn an_order_can_make_it_fit() {
    let source = "<ir_version: 8, opset_import: [\"\" : 17]>
        g (float[n, 4] x, float[4, 512] a, float[4, 512] b, float[4, 512] c) => (float[n, 1] p, float[n, 1] q, float[n, 1] r)
        {
            wide_a = MatMul (x, a)
            wide_b = MatMul (x, b)
            wide_c = MatMul (x, c)
            p = ReduceMax <axes = [1]> (wide_a)
            q = ReduceMax <axes = [1]> (wide_b)
            r = ReduceMax <axes = [1]> (wide_c)
        }";
    let model = File::new("order.onnxtxt", source);
    let args: &[&str] = &["plan", model.path(), "--set", "n=2048"];
    let plan = ok_json(&[args]);
    let figure = |key: &str| bytes(&plan["programs"][0]["summary"][key]);
    let (needed, least) = (figure("planned_bytes"), bytes(&plan["programs"][0]["summary"]["orders"][0]["bound"]));
    let file = needed - figure("arena_bytes") + least;
    assert!(
        least >= 3 * 2048 * 512 * 4 && figure("arena_bytes") < least,
        "all three are live in the file's order alone"
    );
    for (limit, verdict) in [(needed, "fits_reordered"), (file - 1, "fits_reordered"), (file, "fits")] {
        let limit = limit.to_string();
        let answer = &ok_json(&[args, &["--memory-limit", &limit]])["answer"];
        assert_eq!((answer["verdict"].as_str(), bytes(&answer["file_order_bytes"])), (Some(verdict), file));
    }
    let text = ok(&[args, &["--advise", "--memory-limit", &(file - 1).to_string()]]);
    assert!(text.contains("fits after reordering: ") && text.contains("in the file's order at least 1 B"), "{text}");
    assert!(text.contains("reordering") && text.contains("than the file's order"), "{text}");
    let refused = refused(&[args, &["--memory-limit", &(needed - 1).to_string()]]);
    assert_eq!(refused["verdict"], "fits_smaller");
}

/// If a plan takes fewer bytes in the file's order, with copied parts of concatenations, it is not reordered.
#[test]
fn copied_parts_are_no_other_order() {
    let limit = 1 << 20;
    let mut plan = plan_of(8, true);
    let verdict = |plan: &Plan| Answer::of(plan, limit).verdict;
    let candidate = |name: &str, bound: u64| Candidate { name: name.into(), bound, peak: bound };
    plan.programs[0].summary.orders = vec![candidate("file", 1 << 30), candidate("late", 1 << 10)];
    assert_eq!(verdict(&plan), Verdict::FitsReordered);
    let arena = plan.class_bytes(Class::Activation);
    plan.programs[0].summary.orders.push(candidate("file, parts copied", arena));
    assert_eq!(verdict(&plan), Verdict::Fits);
}

#[test]
fn what_is_no_limit_is_refused() {
    for (limit, words) in [
        ("0", "above 0"),
        ("0GiB", "above 0"),
        ("-5MiB", "'-5MiB'"),
        ("-1", "'-1'"),
        ("much", "'much'"),
        ("GiB", "'GiB'"),
        ("5 parsec", "parsec"),
        ("99999999999TiB", "64 bits"),
    ] {
        fails(&[&["plan"], MLP, &["--memory-limit", limit]], &["--memory-limit", words]);
        fails(&[&["plan"], MLP, &["--assert-bytes", limit]], &["--assert-bytes", words]);
        fails(&[&["max-batch", "graphs/mlp.onnxtxt", "--memory-limit", limit]], &["--memory-limit", words]);
    }
}

// ---- The bound

/// A graph of some elementwise operators, products and concatenations.
fn random(seed: u64, nodes: usize) -> Graph {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut below = |n: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 11) as usize % n
    };
    let trace = Trace::new("random");
    let mut vars = vec![trace.input("x", DType::F32, [16, 16])];
    for _ in 0..nodes {
        let (a, b) = (vars[below(vars.len())], vars[below(vars.len())]);
        vars.push(match below(5) {
            0 => a + b,
            1 => a.relu(),
            2 | 3 => a.matmul(b),
            _ => trace.concat(&[a, b], 0).slice(0, 8..24),
        });
    }
    for k in 0..1 + below(2) {
        trace.output(&format!("y{k}"), vars[vars.len() - 1 - k]);
    }
    trace.finish().expect("the graph is sound")
}

/// The least peak of all orders, by trying them all; `None` if there are too many.
fn least_of_all_orders(graph: &Prepared, target: &Target) -> Option<u64> {
    let mut least = u64::MAX;
    for join in [true, false] {
        let draft = lowered(graph, target, Options { join }).expect("it is lowered");
        let dag = Dag::new(&draft);
        let (mut order, mut missing) = (Vec::new(), dag.before.iter().map(Vec::len).collect::<Vec<_>>());
        let mut left = 20_000u32;
        let mut work = vec![0usize];
        // Go through the ready steps, depth first.
        while let Some(from) = work.pop() {
            left = left.checked_sub(1)?;
            if order.len() == missing.len() {
                let live = live(&draft, &order, &Streams::new(&draft, &order, 1));
                let at = |s: usize| live.ranges.iter().filter(|r| r.lower <= s && s < r.upper).map(|r| r.bytes).sum();
                least = least.min((0..order.len()).map(at).max().unwrap_or(0));
            }
            let next = (from..missing.len()).map(StepIdx::new).find(|&s| missing[s] == 0 && !order.contains(&s));
            match next.filter(|_| order.len() < missing.len()) {
                Some(s) => {
                    work.push(s.index() + 1);
                    order.push(s);
                    dag.after[s].iter().for_each(|&t| missing[t] -= 1);
                    work.push(0);
                }
                None => {
                    if let Some(s) = order.pop() {
                        dag.after[s].iter().for_each(|&t| missing[t] += 1);
                    }
                }
            }
        }
    }
    Some(least)
}

#[test]
fn the_bound_holds_for_every_order() {
    let (mut judged, mut reached) = (0, 0);
    for seed in 0..400 {
        let target = &targets()[seed as usize % 3];
        let graph = random(seed, 3 + seed as usize % 7);
        let graph = Recipe { fuse: seed % 2 == 0, ..Recipe::default() }.whole(graph, target).expect("the passes run");
        let found = bound(&graph, target).expect("it is lowered");
        let made = plan::planned(&graph, target, &UNLIMITED).expect("it is planned");
        assert!(found.bytes <= made.bytes(), "seed {seed}: {found:?}, but a plan takes {}", made.bytes());
        let Some(least) = least_of_all_orders(&graph, target) else { continue };
        judged += 1;
        reached += usize::from(found.arena_bytes == least);
        assert!(found.arena_bytes <= least, "seed {seed}: {found:?}, but an order needs only {least}");
    }
    assert!(judged > 300, "{judged} graphs have few enough orders");
    assert!(reached * 2 > judged, "a bound that is seldom reached says little: {reached} of {judged}");
}

/// A convolution whose library call profits from a large workspace but runs with a small one.
#[test]
fn a_plan_never_takes_less_than_the_bound() {
    let text = "<ir_version: 8, opset_import: [\"\" : 17]>
        g (float[1, 512, 4, 4] x, float[512, 512, 3, 3] w) => (float[1, 512, 4, 4] y) {
            c = Conv <pads = [1, 1, 1, 1]> (x, w)
            y = Relu (c)
        }";
    let model = onnx::Model::new(onnx::text::parse(text, Path::new("text")).expect("it parses"));
    for target in [Target::cpu(2), Target::wgpu(), Target::cuda(), Target { allow_tf32: true, ..Target::cuda() }] {
        let graph = onnx::import(&model, &[]).expect("it is a graph");
        let graph = Recipe::default().whole(graph, &target).expect("the passes run");
        let (least, plan) =
            (bound(&graph, &target), plan::planned(&graph, &target, &UNLIMITED).expect("it is planned"));
        let least = least.expect("it is lowered").bytes;
        assert!(least <= plan.bytes(), "{}: at least {least}, and planned {}", target.name, plan.bytes());
    }
}

#[test]
fn where_steps_have_one_order_the_bound_is_what_is_live() {
    let trace = Trace::new("chain");
    let x = trace.input("x", DType::F32, [64, 64]);
    let mut kept = x.matmul(x);
    let first = kept;
    for _ in 0..5 {
        kept = kept.matmul(x);
    }
    trace.output("y", kept.matmul(first).matmul(x));
    let graph = trace.finish().expect("the graph is sound");
    let target = Target::cpu(1);
    let graph = Recipe::default().whole(graph, &target).expect("the passes run");
    let found = bound(&graph, &target).expect("it is lowered");
    // The input and the first product are live during all other steps.
    assert_eq!(found.arena_bytes, 4 * 64 * 64 * 4);
    assert_eq!(found.bytes, plan::planned(&graph, &target, &UNLIMITED).expect("it is planned").bytes());
}

// ---- The peak

/// Bytes of the plan that hold needed data during each step, counted by byte ranges. Outside the arena, all bytes do.
fn counted(plan: &Plan) -> Vec<u64> {
    let mut uses: Vec<Option<(usize, usize)>> = vec![None; plan.programs[0].buffers.len()];
    for (s, step) in plan.programs[0].steps.iter().enumerate() {
        for &b in step.reads.iter().chain(&step.writes) {
            uses[b] = Some(uses[b].map_or((s, s), |(first, _)| (first, s)));
        }
    }
    for port in &plan.programs[0].inputs {
        uses[port.buffer] = Some((0, uses[port.buffer].map_or(0, |(_, last)| last)));
    }
    for port in &plan.programs[0].outputs {
        uses[port.buffer] = uses[port.buffer].map(|(first, _)| (first, plan.programs[0].steps.len()));
    }
    let arena = |b: &usize| plan.segments[plan.programs[0].buffers[*b].segment].class == Class::Activation;
    let resident = plan.bytes() - plan.class_bytes(Class::Activation);
    let buffers: Vec<usize> = (0..plan.programs[0].buffers.len()).filter(arena).collect();
    let at = |step: usize| {
        let live = |b: &usize| uses[*b].is_some_and(|(first, last)| first <= step && step <= last);
        let range = |b: usize| {
            let buffer = &plan.programs[0].buffers[b];
            (buffer.segment, buffer.offset, buffer.offset + buffer.bytes)
        };
        // Bytes that buffers share count once.
        let mut ranges: Vec<_> = buffers.iter().copied().filter(live).map(range).collect();
        ranges.sort_unstable();
        let mut end = (SegmentIdx::default(), 0);
        ranges.iter().fold(resident, |sum, &(segment, from, to)| {
            let from = if end.0 == segment { from.max(end.1) } else { from };
            end = (segment, if end.0 == segment { to.max(end.1) } else { to });
            sum + to.saturating_sub(from)
        })
    };
    (0..plan.programs[0].steps.len()).map(at).collect()
}

#[test]
fn the_peak_adds_up() {
    for (file, dims) in graphs::GRAPHS {
        for target in targets() {
            let graph = graphs::import(file, dims);
            let graph = Recipe::default().whole(graph, &target).expect("the passes run");
            let plan = plan::planned(&graph, &target, &UNLIMITED).expect("it is planned");
            let peak = peak(plan.first(), Some(&graph.graph));
            let live: u64 = peak.live.iter().map(|h| h.bytes).sum();
            let held: u64 = peak.held.iter().map(|h| h.bytes).sum();
            assert_eq!(live + peak.others.bytes + peak.idle_bytes + held, plan.bytes(), "{file}: {peak:?}");
            assert_eq!(peak.bytes, plan.bytes());
            assert!(peak.live.is_sorted_by(|a, b| a.bytes >= b.bytes), "{file}: {peak:?}");
            let step = &plan.programs[0].steps[peak.step.expect("there are steps")];
            assert_eq!(step.name, peak.name);
            // The results of the step in the arena are live while it runs.
            for &b in &step.writes {
                let buffer = &plan.programs[0].buffers[b];
                let listed = peak.live.iter().any(|h| h.name == buffer.name) || peak.others.count > 0;
                assert!(plan.segments[buffer.segment].class != Class::Activation || listed, "{file}: {}", buffer.name);
            }
            if target.streams == 1 {
                // This count has no padding; the choice of the peak's step includes it.
                let most = counted(&plan).into_iter().max().expect("there are steps");
                let (found, padding) = (plan.bytes() - peak.idle_bytes, 256 * plan.programs[0].buffers.len() as u64);
                assert!(found <= most && most < found + padding, "{file}: {found} of {most}");
            }
        }
    }
}

// ---- The largest binding

/// The result of a search, and the number of plans that it took.
fn search(limit: u64, most: usize, take: impl Fn(usize) -> Result<u64, String>) -> (Option<usize>, usize, usize) {
    let mut measure = |extent: usize| take(extent).map_err(Error::usage);
    let most = most.checked_add(1).map_or(Unbounded, Excluded);
    let found = largest("n", limit, most, &mut measure).expect("something can be planned");
    (found.fits.map(|size| size.extent), found.next.expect("there is a larger one").extent, found.plans)
}

/// An extent that may be the answer is tried, and none above it is.
#[test]
fn no_more_is_planned_than_is_asked_for() {
    for (limit, most, step, fits, next) in [
        (1000, 7, 1, Some(7), None),
        (7, 7, 1, Some(7), None),
        (6, 7, 1, Some(6), Some(7)),
        (1000, 30, 8, Some(24), None),
        (20, 30, 8, Some(16), Some(24)),
        (5, 30, 8, None, Some(8)),
        (1000, 1, 1, Some(1), None),
        // It can be planned although no small extent can.
        (100_000, 30_011 * 2, 30_011, Some(60_022), None),
    ] {
        let mut tried = 0;
        let mut measure = |extent: usize| {
            tried = tried.max(extent);
            if extent.is_multiple_of(step) {
                Ok(extent as u64)
            } else {
                Err(Error::usage(format!("{extent} of {step}")))
            }
        };
        let found = largest("n", limit, Included(most), &mut measure).expect("something can be planned");
        assert_eq!((found.fits.map(|size| size.extent), found.next.map(|size| size.extent)), (fits, next), "{most}");
        assert!(tried <= most, "{tried} of {most}");
    }
}

#[test]
fn the_largest_extent_is_found() {
    for limit in [100, 101, 163, 164, 165, 1000, 6500, 1 << 20, 1 << 40] {
        let (found, next, plans) = search(limit, usize::MAX, |n| Ok(100 + n as u64 * 64));
        let expected = ((limit - 100) / 64) as usize;
        assert_eq!((found.unwrap_or(0), next), (expected, expected + 1));
        // Bytes that grow evenly need no bisection.
        assert!(plans <= 60, "{plans}");
    }
    // The upper end fits in one case, and not in the other.
    assert_eq!(search(1000, 7, |n| Ok(n as u64)).0, Some(7));
    assert_eq!(search(6, 7, |n| Ok(n as u64)).0, Some(6));
    // A smaller extent can take more bytes: here at even extents, and at extents that are no multiples of 16.
    let ragged = |n: usize| Ok(n as u64 * 10 + if n.is_multiple_of(2) { 0 } else { 25 });
    assert_eq!(search(1005, usize::MAX, ragged).0, Some(100));
    let padded = |n: usize| Ok(n as u64 * 10 + if n.is_multiple_of(16) { 0 } else { 300 });
    assert_eq!(search(1920, 200, padded).0, Some(192));
    // Only multiples of eight can be planned. An extent that cannot be planned does not fit.
    let eights = |n: usize| if n.is_multiple_of(8) { Ok(n as u64) } else { Err(format!("{n} of 8")) };
    assert_eq!(search(100, usize::MAX, eights).0, Some(96));
    // Multiples of three, six, twenty and 48. The next extent is the next that can be planned.
    for step in [3, 6, 20, 48, 63, 64, 67, 96, 100, 127, 128, 134, 143, 196, 997, 1000, 1024] {
        let multiples = |n: usize| if n.is_multiple_of(step) { Ok(n as u64) } else { Err(format!("{n} of {step}")) };
        let (found, next, plans) = search(5000, usize::MAX, multiples);
        assert_eq!((found, next), (Some(5000 / step * step), 5000 / step * step + step));
        assert!(plans < 300 + step, "{plans}");
        assert_eq!(search(5000, 3 * step - 1, multiples).0, Some(2 * step));
        // The smallest that can be planned does not fit.
        assert_eq!(search(step as u64 - 1, usize::MAX, multiples).1, step);
        assert_eq!(search(step as u64 - 1, usize::MAX, multiples).0, None);
    }
    // Multiples of a large prime: found because the given extent can be planned.
    let primes = |n: usize| if n.is_multiple_of(101) { Ok(n as u64) } else { Err(format!("{n} of 101")) };
    assert_eq!(search(1234, 3029, primes).0, Some(1212));
    assert_eq!(search(1234, 3029, primes).1, 1313);
    // Multiples from a least one on: 201 is found, although 268 is a fraction of the given extent.
    let from = |n: usize| if n.is_multiple_of(67) && n > 100 { Ok(n as u64) } else { Err(format!("{n} of 67")) };
    assert_eq!((search(140, 6699, from).0, search(210, 6699, from).0), (Some(134), Some(201)));
    assert_eq!(search(100, usize::MAX, from), (None, 134, search(100, usize::MAX, from).2));
    // If the extent does not matter, the search stops when it has seen that.
    let mut tries = 0;
    let never = largest("n", 10, Unbounded, &mut |_| {
        tries += 1;
        Err(Error::usage("no such operator".into()))
    });
    assert!(never.is_err() && tries < 300, "{tries}");
    // Extents of at least seven; odd extents; only one and ten.
    let least = |n: usize| if n >= 7 { Ok(n as u64) } else { Err(format!("{n} < 7")) };
    assert_eq!(search(1234, usize::MAX, least).0, Some(1234));
    let far = |n: usize| if n >= 107 { Ok(n as u64) } else { Err(format!("{n} < 107")) };
    assert_eq!(search(1234, usize::MAX, far).0, Some(1234));
    let odd = |n: usize| if n.is_multiple_of(2) { Err(format!("{n} of 2")) } else { Ok(n as u64) };
    assert_eq!(search(1234, usize::MAX, odd).0, Some(1233));
    let two = |n: usize| if n == 1 || n == 10 { Ok(n as u64) } else { Err(format!("{n}")) };
    assert_eq!(search(1234, usize::MAX, two).0, Some(10));
    let ends = |n: usize| if n < 1000 { Ok(n as u64) } else { Err("too large".into()) };
    assert_eq!(search(u64::MAX, usize::MAX, ends).0, Some(999));
    let nothing = largest("n", 10, Unbounded, &mut |n| Err(Error::usage(format!("not {n}"))));
    assert_eq!(nothing.expect_err("nothing can be planned").to_string(), "not 1");
}

#[test]
fn max_batch_is_what_plans_say() {
    // 784-100-10 with its weights as inputs: 318,040 bytes and 3,576 more for each image.
    for (model, limit) in
        [("graphs/mlp.onnxtxt", "1MiB"), ("graphs/mlp.onnxtxt", "24GiB"), ("graphs/digits.onnx", "8MiB")]
    {
        for target in ["cpu", "wgpu", "cuda"] {
            let args: &[&[&str]] =
                &[&["max-batch", model, "--dim", "batch", "--memory-limit", limit, "--target", target]];
            let found = ok_json(args);
            let (largest, next) = (&found["largest"], &found["next"]);
            assert_eq!(bytes(&next["extent"]), bytes(&largest["extent"]) + 1);
            for size in [largest, next] {
                let Some(expected) = size["planned_bytes"].as_u64() else {
                    // WebGPU's baseline has buffers of at most 256 MiB.
                    assert!(size["error"].as_str().is_some_and(|e| e.contains("allocates at most")), "{found}");
                    continue;
                };
                let set = format!("batch={}", size["extent"]);
                let flags: &[&str] = &[model, "--set", &set, "--target", target];
                // With several streams, a plan without a limit may take more bytes.
                let alone = planned(&[flags, &["--memory-limit", "1TiB"]]);
                assert!(expected == alone || target == "cuda" && expected < alone, "{found}");
                assert_eq!(expected <= bytes(&found["limit_bytes"]), size == largest);
            }
            assert!(ok(args).contains(&format!("{}", bytes(&largest["extent"]))));
        }
    }
}

#[test]
fn max_batch_says_what_is_wrong() {
    let mlp = &["max-batch", "graphs/mlp.onnxtxt"];
    let limit = &["--memory-limit", "1GiB"];
    fails(&[mlp], &["--memory-limit"]);
    fails(&[mlp, limit, &["--dim", "width"]], &["mlp.onnxtxt", "no dim 'width'", "'batch'", "x f32[batch,784]"]);
    fails(&[mlp, limit, &["--dim", "batch", "--set", "batch=3"]], &["'batch'", "--set", "--dim"]);
    fails(&[mlp, limit, &["--set", "batch=3"]], &["--set binds all dims", "'batch'"]);
    let attention = &["max-batch", "graphs/attention.onnxtxt"];
    fails(&[attention, limit], &["several dims are open", "'batch', 'sequence'", "--dim"]);
    let text = ok(&[attention, limit, &["--dim", "batch"]]);
    assert!(text.contains("attention.onnxtxt (sequence=1, as none was given; --set sequence=N) for cpu"), "{text}");
    assert_eq!(ok_json(&[attention, limit, &["--set", "sequence=128"]])["dim"], "batch");

    let head = "<ir_version: 8, opset_import: [\"\" : 17]>\n";
    let fixed = File::new("fixed.onnxtxt", &format!("{head}g (float[8, 4] x) => (float[8, 4] y) {{ y = Relu (x) }}"));
    let words = &["no dim 'batch'", "numbers in the file", "x f32[8,4]", "dynamic"];
    fails(&[&["max-batch", fixed.path()], limit, &["--dim", "batch"]], words);
    fails(&[&["max-batch", fixed.path()], limit], words);

    // Nothing fits, which is an answer, too: it shows the bytes of the smallest extent.
    let found = refused(&[mlp, &["--memory-limit", "4KiB"]]);
    assert_eq!(bytes(&found["needed_bytes"]), planned(&[&["graphs/mlp.onnxtxt", "--set", "batch=1"]]));
    assert_eq!(found["verdict"], "cannot");
    // No limit is too large: the search ends where sizes can no longer be counted.
    let found = ok_json(&[mlp, &["--memory-limit", "16777215TiB"]]);
    assert!(found["next"]["error"].as_str().is_some_and(|e| e.contains("too large")), "{found}");
}

#[test]
fn a_dim_that_must_be_a_multiple_is_found() {
    let source = |of: usize| {
        format!(
            "<ir_version: 8, opset_import: [\"\" : 17]> z (float[N] x) => (float[P, {of}] y)
            <int64[2] s = {{-1, {of}}}> {{ y = Reshape (x, s) }}"
        )
    };
    for of in [2usize, 3, 6, 20, 48] {
        let file = File::new(&format!("of-{of}.onnxtxt"), &source(of));
        // One thread has no stack of its own.
        let search: &[&str] = &["max-batch", file.path(), "--threads", "1", "--memory-limit"];
        let found = ok_json(&[search, &["1KiB"]]);
        let extent = bytes(&found["largest"]["extent"]);
        let planned = |n: u64| planned(&[&[file.path(), "--threads", "1", "--set", &format!("N={n}")]]);
        assert_eq!(bytes(&found["largest"]["planned_bytes"]), planned(extent));
        assert_eq!(bytes(&found["next"]["extent"]), extent + of as u64);
        assert!(planned(extent) <= 1024 && 1024 < planned(extent + of as u64), "{found}");
        // A plan that exceeds the limit gets the same advice.
        let refusal = refused(&[&["plan", file.path(), "--threads", "1", "--set", "N=4800", "--memory-limit", "1KiB"]]);
        assert_eq!(refusal["verdict"], "fits_smaller");
        assert_eq!(refusal["smaller"][0]["fits"]["extent"], extent);
        // Nothing fits: the smallest extent is reported, once.
        let needed = planned(of as u64);
        let ran = run(&[search, &["4"]]);
        assert!(
            ran.code == Some(2) && ran.err.contains(&format!("N={of}: needs {} bytes", grouped(needed))),
            "{}",
            ran.err
        );
        assert_eq!(ran.err.lines().next().expect("a line").matches(file.path()).count(), 1, "{}", ran.err);
    }
    // 127 has no fraction that can be planned. The text says only that none was found.
    let file = File::new("prime.onnxtxt", &source(127));
    let refusal = refused(&[&["plan", file.path(), "--set", "N=127", "--memory-limit", "8"]]);
    assert_eq!((&refusal["verdict"], &refusal["rigid"][0]["dim"]), (&json!("not_found"), &json!("N")));
    let found = ok_json(&[&["max-batch", file.path(), "--threads", "1", "--memory-limit", "4KiB"]]);
    assert_eq!((bytes(&found["largest"]["extent"]), bytes(&found["next"]["extent"])), (1016, 1143));
    let far = File::new("far.onnxtxt", &source(5003));
    fails(&[&["max-batch", far.path(), "--memory-limit", "8"]], &["cannot reshape [1] to [-1, 5003]"]);
}

// ---- Remedies

#[test]
fn remedies_are_planned() {
    let model: &[&str] = &["graphs/attention.onnxtxt", "--set", "sequence=128"];
    let base = planned(&[model, &["--set", "batch=8"]]);
    let advice = ok_json(&[&["plan", "--advise"], model, &["--set", "batch=8"]]);
    assert_eq!(bytes(&advice["programs"][0]["summary"]["planned_bytes"]), base, "it is still a plan");
    let remedies = advice["advice"]["remedies"].as_array().expect("a list");
    assert!(remedies.len() >= 4, "{remedies:?}");
    for remedy in remedies {
        let change = remedy["change"].as_str().expect("a change");
        let Some(found) = remedy["planned_bytes"].as_u64() else {
            let error = remedy["error"].as_str().expect("why not");
            assert!(error.contains("int4 weights: no product has constant weights"), "{error}");
            continue;
        };
        let expected = match change.split(' ').collect::<Vec<_>>()[..] {
            ["--set", "sequence=64"] => {
                planned(&[&["graphs/attention.onnxtxt", "--set", "batch=8"], &["--set", "sequence=64"]])
            }
            ["--set", "batch=4"] => planned(&[model, &["--set", "batch=4"]]),
            ["--threads", "1"] | ["--no-fuse"] | ["--f16"] | ["--chunks", "2" | "4"] => {
                let flags: Vec<&str> = change.split(' ').collect();
                planned(&[model, &["--set", "batch=8"], &flags])
            }
            _ => panic!("{remedy}"),
        };
        assert_eq!(found, expected, "{change}");
    }
    let text = ok(&[&["plan", "--advise"], model, &["--set", "batch=8"]]);
    for words in ["live at the peak", "half the extent", "--set batch=4", "no help: "] {
        assert!(text.contains(words), "{words} missing in {text}");
    }
}

/// Every remedy that is offered is a flag that exists, for a target by name and for one from a file.
#[test]
fn remedies_name_flags_that_are_there() {
    let digits: &[&str] = &["graphs/digits.onnx", "--set", "batch=64"];
    let with = |target: &str, flags: &[&str]| {
        ok_json(&[&["plan", "--target", target, "--advise"], digits, flags])["advice"].clone()
    };
    let said = |advice: &Value, change: &str| {
        let remedies = advice["remedies"].as_array().expect("a list");
        remedies.iter().find(|r| r["change"] == change).map(|r| bytes(&r["planned_bytes"]))
    };
    let cuda = with("cuda", &[]);
    let without = with("cuda", &["--no-libraries"]);
    assert_eq!(said(&cuda, "--no-libraries"), Some(bytes(&without["peak"]["bytes"])), "{cuda}");
    assert_eq!(said(&without, "--no-libraries"), None, "{without}");
    let search: &[&str] = &["max-batch", digits[0], "--memory-limit", "8MiB", "--target", "cuda"];
    let largest = &ok_json(&[search, &["--no-libraries"]])["largest"];
    let set = format!("batch={}", largest["extent"]);
    let alone = planned(&[&[digits[0], "--set", &set, "--target", "cuda", "--no-libraries", "--memory-limit", "8MiB"]]);
    assert_eq!(bytes(&largest["planned_bytes"]), alone);
    assert!(ok(&[&["emit", digits[0], "cuda", "--set", "batch=64"]]).contains("// {\""), "calls of libraries");
    assert!(!ok(&[&["emit", digits[0], "cuda", "--set", "batch=64", "--no-libraries"]]).contains("// {\""));

    // 16-bit floats are a flag, for one binding and for a range.
    let halves = with("cuda", &["--f16"]);
    assert_eq!(said(&cuda, "--f16"), Some(bytes(&halves["peak"]["bytes"])), "{cuda}");
    assert_eq!(said(&halves, "--f16"), None, "{halves}");
    let range = ok_json(&[&["plan", digits[0], "--target", "cuda", "--f16", "--set", "batch=1..64"]]);
    assert_eq!(
        range["programs"][0]["summary"]["arena_bytes"],
        ok_json(&[&["plan", "--target", "cuda", "--f16"], digits])["programs"][0]["summary"]["arena_bytes"]
    );
    let kernels: &[&[&str]] = &[&["emit", digits[0], "cuda", "--set", "batch=64"]];
    assert_ne!(ok(kernels), ok(&[kernels, &[&["--f16"]]].concat()));

    let eight = File::new("eight.json", &json!(Target::cpu(8)).to_string());
    let plan = |flags: &[&str]| ok_json(&[&["plan", "--target", eight.path()], digits, flags]);
    assert_eq!(plan(&[])["target"]["threads"], 8);
    assert_eq!(plan(&["--threads", "1"])["target"]["threads"], 1);
    let advised = plan(&["--advise"])["advice"].clone();
    for threads in [4, 2, 1].map(|n: u32| n.to_string()) {
        let expected = bytes(&plan(&["--threads", &threads])["programs"][0]["summary"]["planned_bytes"]);
        assert_eq!(said(&advised, &format!("--threads {threads}")), Some(expected), "{advised}");
    }
}

/// Chunks are a flag of every command that plans, and can make a model fit.
#[test]
fn chunks_are_a_flag() {
    let digits: &[&str] = &["graphs/digits.onnx", "--set", "batch=65"];
    let chunks: &[&str] = &["--chunks", "2"];
    let (whole, half) = (planned(&[digits]), planned(&[digits, chunks]));
    assert!(half < whole, "{half} of {whole}");
    let limit: &[&str] = &["--memory-limit", &half.to_string()];
    for command in [&["run"][..], &["bench", "--iters", "1"]] {
        assert_eq!(run(&[command, digits, limit, CPU]).code, Some(2), "{command:?}");
        ok(&[command, digits, limit, chunks, CPU]);
    }
    let advice = refused(&[&["plan"], digits, limit]);
    let remedies = advice["remedies"].as_array().expect("a list");
    let found = remedies.iter().find(|r| r["change"] == "--chunks 2").expect("it is planned");
    assert_eq!(bytes(&found["planned_bytes"]), half);
    let compared = ok_json(&[&["compare", "--iters", "1", "--poison"], digits, chunks, CPU]);
    let last = compared["columns"].as_array().and_then(|columns| columns.last()).expect("a column");
    assert_eq!(bytes(&last["smallest_device_bytes"]), planned(&[digits, chunks, &["--threads", "2"]]));
    let largest = |flags: &[&str]| {
        let search: &[&str] = &["max-batch", digits[0], "--memory-limit", "4MiB"];
        bytes(&ok_json(&[search, flags])["largest"]["extent"])
    };
    assert!(largest(chunks) > largest(&[]));
    assert!(ok(&[&["emit", digits[0], "dot", "--set", "batch=65"], chunks]).contains("[1/2]"));

    // Over a range, an axis must have enough elements at every binding.
    let range = |range: &str| run(&[&["run", digits[0], "--set", range], chunks, CPU]);
    assert_eq!(range("batch=2..65").code, Some(0));
    let refused = range("batch=1..65");
    assert!(
        refused.code == Some(1) && refused.err.contains("expected at least 2 elements for 2 chunks"),
        "{}",
        refused.err
    );
    assert!(refused.err.contains("'batch' up to 1 and above it"), "{}", refused.err);
    fails(&[&["plan"], digits, &["--chunks", "0"]], &[]);
    let one: &[&str] = &["plan", digits[0], "--set", "batch=1"];
    fails(&[one, chunks], &["nothing can be computed in chunks", "found 'image' f32[1,1,8,8]; bind a larger batch"]);
    assert_eq!(ok(&[one, &["--advise"]]).matches("no help: chunks").count(), 1);
}

#[test]
fn what_helps_is_pointed_to() {
    // No extent can be smaller, but 16-bit floats fit.
    let digits: &[&str] = &["graphs/digits.onnx", "--set", "batch=1", "--target", "cuda", "--no-libraries"];
    let limit = planned(&[digits]) - 1;
    let args: &[&[&str]] = &[&["plan"], digits, &["--memory-limit", &limit.to_string()]];
    let remedies = refused(args)["remedies"].clone();
    let halves = remedies.as_array().expect("a list").iter().find(|r| r["name"] == "f16 values");
    assert!(bytes(&halves.expect("it is tried")["planned_bytes"]) < limit);
    let err = run(args).err;
    assert!(err.contains("\ndoes not fit; what would help is below\n"), "{err}");
    assert!(err.lines().any(|line| line.contains("--f16") && line.ends_with("  fits")), "{err}");
    let ran = run(&[&["plan"], MLP, &["--memory-limit", "1KiB"]]);
    assert!(
        ran.err.contains("\ndoes not fit, and no smaller binding does\n") && !ran.err.contains("cannot fit"),
        "{}",
        ran.err
    );
}

#[test]
fn f16_values_take_less_and_mean_the_same() {
    let cuda = Target::cuda();
    for (file, dims) in graphs::GRAPHS {
        let graph = graphs::import(file, dims);
        let mut narrow = graph.clone();
        half::run(&mut narrow).expect("every operator takes f16");
        narrow.verify().expect("the graph is sound");
        let facts = |g: &Graph| {
            let inputs: Vec<_> = g.inputs().iter().map(|&v| (g.value_name(v).to_owned(), g.fact(v).clone())).collect();
            let outputs: Vec<_> = g.outputs().iter().map(|(name, v)| (name.clone(), g.fact(*v).clone())).collect();
            (inputs, outputs)
        };
        assert_eq!(facts(&graph), facts(&narrow), "{file}: the ports are the same");
        let inputs = graph.inputs().iter().map(|&v| {
            let fact = graph.fact(v);
            let values: Vec<f64> = (0..fact.shape.numel()).map(|i| ((i * 37 % 19) as f64 - 9.0) / 40.0).collect();
            Tensor::from_f64(fact.dtype, fact.shape.clone(), &values)
        });
        let inputs: Vec<_> = inputs.collect();
        let [wide, half] = [&graph, &narrow].map(|g| reference::run(g, &inputs).expect("it runs"));
        for (wide, half) in wide.iter().zip(&half) {
            let peak = wide.to_f64().iter().fold(0.0f64, |m, v| m.max(v.abs()));
            half.compare(wide, 0.0, 0.02 * peak).unwrap_or_else(|what| panic!("{file}: {what}"));
            assert!(half.compare(wide, 0.0, 0.0).is_err(), "{file}: nothing was rounded");
        }
    }
    let model = onnx::load(Path::new("graphs/digits.onnx")).expect("it is a model");
    // At small batches, cuDNN's convolutions of 16-bit floats need more workspace than the smaller floats save.
    let dims = vec![("batch".to_owned(), 512)];
    let case = Case::of(&model, dims, cuda, Recipe::default());
    let advice = advise::advise(&case, None).expect("it is planned");
    let remedy = advice.remedies.iter().find(|r| r.name == "f16 values").expect("it is tried");
    let Taken::Bytes(found) = remedy.bytes else { panic!("{remedy:?}") };
    assert!(found < advice.peak.bytes, "{found} of {}", advice.peak.bytes);
}

/// The error, the record and the table of a refusal are of one plan.
#[test]
fn a_refusal_tells_of_the_plan_that_was_refused() {
    for chunks in ["1", "4", "8", "16"] {
        let args =
            [&["plan", "graphs/digits.onnx", "--set", "batch=64", "--chunks", chunks, "--memory-limit", "300KiB"][..]];
        let found = refused(&args);
        let needed = bytes(&found["needed_bytes"]);
        let error = found["error"].as_str().expect("a text").replace(',', "");
        assert!(error.contains(&format!("needs {needed} bytes")), "{chunks} chunks: {needed}: {error}");
        assert_eq!(found["needed_bytes"], found["peak"]["bytes"], "{chunks} chunks");
    }
}

/// What a mesh would save is what a plan of its ranks takes, and on a mesh a refusal is of the plan that a rank has.
#[test]
fn cards_are_a_remedy_and_refusals_on_a_mesh_are_of_its_ranks() {
    // What is looked for is not held to what the file says, here of four devices.
    let annotated = r#"@ "cards" [up <1: [4]> (0, 1, 2, 3)]"#;
    let [annotated, plain] =
        [(r#""cards" : 4"#, annotated), ("", "")].map(|(of, first)| annotations::file(of, first, ""));
    let case = |text: &str| {
        let model = onnx::Model::new(onnx::text::parse(text, Path::new("net")).expect("a model"));
        Case::of(&model, Vec::new(), Target::cpu(1), Recipe::default())
    };
    let rank = |cards: usize, limit: Option<u64>| {
        let sharding = Sharding { mesh: Mesh::new([("tensor", cards)]).expect("a mesh"), ..Sharding::default() };
        let case = Case { sharding: Some(sharding), ..case(&plain) };
        (case.bytes(limit).expect("it is planned"), case)
    };
    let case = case(&annotated);
    let advice = advise::advise(&case, None).expect("it is planned");
    let cards: Vec<_> = advice.remedies.iter().filter(|r| r.name == "one of several cards").collect();
    let [one] = cards[..] else { panic!("without a limit, one number of cards is tried: {cards:?}") };
    assert_eq!((&one.change[..], &one.bytes), ("--mesh tensor=2", &Taken::Bytes(rank(2, None).0)));
    // The fewest that fit are the last that are tried.
    let limit = rank(4, None).0;
    let advice = advise::advise(&case, Some(limit)).expect("it is planned");
    let cards: Vec<_> = advice.remedies.iter().filter(|r| r.name == "one of several cards").collect();
    let [_, four] = cards[..] else { panic!("{cards:?}") };
    assert!(four.change.starts_with("--mesh tensor=4") && four.bytes.within(limit).is_some(), "{four:?}");
    // On a mesh, all bytes are those of a rank.
    let (needed, of_two) = rank(2, Some(limit));
    let advice = advise::advise(&of_two, Some(limit)).expect("it is planned");
    let answer = advice.answer.expect("there is a limit");
    assert_eq!((answer.needed_bytes, advice.peak.bytes), (needed, needed));
    assert!(
        advice.remedies.iter().all(|r| !["one of several cards", "chunks"].contains(&r.name)),
        "{:?}",
        advice.remedies
    );
    let file = File::new("cards.onnxtxt", &plain);
    let args = ["plan", file.path(), "--target", "cpu", "--threads", "1", "--mesh", "tensor=2"];
    let found = refused(&[&args, &["--memory-limit", &limit.to_string()]]);
    assert_eq!(bytes(&found["needed_bytes"]), needed);
    assert_eq!(found["needed_bytes"], found["peak"]["bytes"]);
}

// ---- For people's tests

#[test]
fn a_peak_is_asserted() {
    let needed = planned(&[MLP]);
    let file = File::new("asserted.json", "");
    ok(&[&["plan"], MLP, &["--assert-bytes", &needed.to_string()]]);
    let over = (needed - 1).to_string();
    // The name that it had is understood.
    refused(&[&["plan"], MLP, &["--assert-peak", &over]]);
    let found = refused(&[&["plan"], MLP, &["--assert-bytes", &over, "-o", file.path()]]);
    assert_eq!((bytes(&found["needed_bytes"]), bytes(&found["deficit_bytes"])), (needed, 1));
    let live = found["peak"]["live"].as_array().expect("a list");
    assert!(live.iter().any(|h| h["name"] == "hidden" && h["operator"] == "Relu"), "{found}");
    // The plan is written, so that it can be inspected.
    let written = std::fs::read_to_string(file.path()).expect("the plan is written");
    let whole = File::new("whole.json", "");
    ok(&[&["plan", "-o", whole.path()], MLP]);
    assert_eq!(written, std::fs::read_to_string(whole.path()).expect("the plan is written"));
    let text = run(&[&["plan"], MLP, &["--assert-bytes", &over]]);
    assert_eq!((text.code, text.out.as_str()), (Some(2), ""));
    for words in ["--assert-bytes", "(1 over)", "live at the peak", "hidden"] {
        assert!(text.err.contains(words), "{words} missing in {}", text.err);
    }
    let advised: &[&[&str]] = &[&["plan", "--advise"], MLP, &["--assert-bytes", &over]];
    assert!(refused(advised)["advice"]["remedies"].is_array());
    let text = run(advised).err;
    assert!(text.contains("half the extent") && text.matches("live at the peak").count() == 1, "{text}");
}

/// Nodes may share a name. The report then shows kernels instead of operators.
#[test]
fn nodes_of_one_name_are_not_mixed_up() {
    let node = |op: &str, inputs: &[&str], output: &str| NodeProto {
        op_type: op.into(),
        name: "n".into(),
        input: inputs.iter().map(|&name| name.into()).collect(),
        output: vec![output.into()],
        ..NodeProto::default()
    };
    let source = "<ir_version: 8, opset_import: [\"\" : 17]> g (float[64, 64] x) => (float[64, 64] y) { y = Relu (x) }";
    let mut proto = onnx::text::parse(source, Path::new("text")).expect("it parses");
    let graph = proto.graph.as_mut().expect("it has a graph");
    graph.node = vec![
        node("Exp", &["x"], "e"),
        node("MatMul", &["e", "x"], "a"),
        node("Softmax", &["a"], "s"),
        node("MatMul", &["s", "e"], "y"),
    ];
    let target = Target::cpu(1);
    let graph = onnx::import(&onnx::Model::new(proto), &[]).expect("it is a graph");
    let graph = Recipe { fuse: false, ..Recipe::default() }.whole(graph, &target).expect("the passes run");
    let peak = peak(plan::planned(&graph, &target, &UNLIMITED).expect("it is planned").first(), Some(&graph.graph));
    assert!(peak.live.iter().any(|h| h.kernel != "input"), "{peak:?}");
    for holder in &peak.live {
        assert_eq!(holder.operator, holder.kernel, "{peak:?}");
    }
}

fn plan_of(batch: usize, fuse: bool) -> Plan {
    let graph = graphs::import("digits.onnx", &[("batch", batch)]);
    let target = Target::cpu(2);
    let graph = Recipe { fuse, ..Recipe::default() }.whole(graph, &target).expect("the passes run");
    plan::planned(&graph, &target, &UNLIMITED).expect("it is planned")
}

#[test]
fn plans_are_compared() {
    let [small, large, unfused] = [plan_of(4, true), plan_of(64, true), plan_of(4, false)];
    let same = diff(small.first(), small.first());
    assert!(same.buffers.is_empty() && same.unchanged == small.programs[0].buffers.len());

    let grown = diff(small.first(), large.first());
    assert_eq!(grown.planned_bytes, [small.bytes(), large.bytes()]);
    let sum = |k: usize| grown.classes.iter().map(|t| t.bytes[k]).sum::<u64>();
    assert_eq!([sum(0), sum(1)], grown.planned_bytes, "the classes add up");
    assert!(grown.buffers.iter().all(|c| matches!(c.fate, Fate::Grown | Fate::Moved)), "{:?}", grown.buffers);
    assert!(grown.buffers.iter().any(|c| c.name == "image" && c.fate == Fate::Grown && c.bytes == [1024, 16384]));
    assert!(grown.buffers.is_sorted_by_key(|c| std::cmp::Reverse(c.bytes[0].abs_diff(c.bytes[1]))));
    let back = diff(large.first(), small.first());
    let count =
        |d: &plimsoll::internals::plan::tell::diff::Diff, fate| d.buffers.iter().filter(|c| c.fate == fate).count();
    assert_eq!(count(&grown, Fate::Grown), count(&back, Fate::Shrunk));

    let more = diff(small.first(), unfused.first());
    let [new, gone] = [Fate::New, Fate::Gone].map(|fate| count(&more, fate));
    assert!(new > 0, "unfused operators have buffers of their own");
    assert_eq!(small.programs[0].buffers.len() + new - gone, unfused.programs[0].buffers.len());

    let [a, b] = [("a.json", &small), ("b.json", &large)].map(|(name, plan)| File::new(name, &plan.to_json()));
    let found = ok_json(&[&["diff", a.path(), b.path()]]);
    assert_eq!(found["planned_bytes"], json!([small.bytes(), large.bytes()]));
    let text = ok(&[&["diff", a.path(), b.path()]]);
    for words in ["planned", "took more", "image", "the peak is still step"] {
        assert!(text.contains(words), "{words} missing in {text}");
    }
    let c = File::new("c.json", &unfused.to_json());
    let text = ok(&[&["diff", a.path(), c.path()]]);
    for words in ["new", "moved", "the peak was step"] {
        assert!(text.contains(words), "{words} missing in {text}");
    }
    let none = File::new("none.json", "{}");
    fails(&[&["diff", a.path(), none.path()]], &["none.json", "not a plan"]);
    fails(&[&["diff", a.path(), "graphs/none.json"]], &["graphs/none.json"]);
    fails(&[&["diff", a.path()]], &["AFTER"]);
}

// ---- Inputs, attributes

#[test]
fn inputs_of_a_wrong_shape_are_named_with_their_flag() {
    let mlp: &[&str] = &["run", "graphs/mlp.onnxtxt", "--backend", "cpu"];
    for (value, expected, found) in [
        ("x=784xf32=1", "f32[batch,784]", "f32[784]"),
        ("x=3x28x28xf32=1", "f32[batch,784]", "f32[3,28,28]"),
        ("x=3x783xf32=1", "f32[3,784]", "f32[3,783]"),
        ("x=3x784xi64=1", "f32[3,784]", "i64[3,784]"),
    ] {
        fails(&[mlp, &["--input", value]], &["mlp.onnxtxt", &format!("--input {value}: input 'x'"), expected, found]);
    }
    let digits: &[&str] = &["run", "graphs/digits.onnx", "--backend", "cpu"];
    let labels = "image=graphs/digits-labels.npy";
    fails(
        &[digits, &["--input", labels]],
        &["--input image=graphs/digits-labels.npy", "expected f32[batch,1,8,8]", "[360]"],
    );
    let head = "<ir_version: 8, opset_import: [\"\" : 17]>\n";
    let relu = format!("{head}g (float[2] x) => (float[2] y) {{ y = Relu <slope = 0.5> (x) }}");
    fails(&[&["plan", File::new("attr.onnxtxt", &relu).path()]], &["unknown attribute 'slope'; it takes none"]);
    let reshape = format!("{head}g (float[2] x) => (float[2] y) {{ y = Softmax <size = 2> (x) }}");
    fails(&[&["plan", File::new("axis.onnxtxt", &reshape).path()]], &["unknown attribute 'size'; known: axis"]);
}

// ---- The README, and the guide

/// Every `$ plimsoll` in the console blocks of the README and the guide prints what stands below it. `BLESS=1` writes down what is printed.
#[test]
fn the_readme_shows_what_is_printed() {
    for (page, least) in [("README.md", 1), ("src/guide.md", 4)] {
        let commands = shows_what_is_printed(page);
        assert!(commands >= least, "{page} shows {commands}");
    }
}

/// Checks a page, or writes it anew. Returns the number of its commands.
fn shows_what_is_printed(page: &str) -> usize {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(page);
    let shown = std::fs::read_to_string(&path).expect("the page is there");
    let mut blocks = shown.split("```console\n");
    let mut text = blocks.next().expect("a text has a beginning").to_owned();
    let mut commands = 0;
    for block in blocks {
        let (lines, after) = block.split_once("```").expect("a block ends");
        text += "```console\n";
        for line in lines.lines().filter_map(|line| line.strip_prefix("$ ")) {
            let args: Vec<&str> =
                line.strip_prefix("plimsoll ").expect("a command of this program").split(' ').collect();
            let Ran { out, err, .. } = run(&[&args]);
            text += &format!("$ {line}\n{out}{err}");
            commands += 1;
        }
        text += &format!("```{after}");
    }
    if std::env::var_os("BLESS").is_some() {
        std::fs::write(&path, text).expect("the page is written");
        return commands;
    }
    let differs = shown.lines().zip(text.lines()).find(|(shown, printed)| shown != printed);
    assert!(shown == text, "{page} shows other than what is printed: {differs:?}; BLESS=1 writes it down");
    commands
}
