//! Forks: runs at once, on the same constants.

use crate::common;
use plimsoll::internals::backend::cpu::{Cpu, Line, Region};
use plimsoll::internals::backend::{Backend, KernelId, Launch, RecordId, SegmentId, Slice};
use plimsoll::internals::plan::Planned;
use plimsoll::internals::plan::job::for_all_runs;
use plimsoll::internals::plan::{Plan, Segment};
use plimsoll::internals::session::{Choice, Options, Session};
use plimsoll::{Class, DType, Error, Graph, Kernel, Memory, Target, Tensor, Trace, Usage};
use std::collections::HashMap;
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

const F32: DType = DType::F32;

fn options(forks: u32) -> Options {
    Options { threads: 1, forks, ..Options::default() }.on(Choice::Cpu)
}

fn numbers(rows: usize, columns: usize, seed: u64) -> Tensor {
    common::random(&mut seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).max(1), &[rows, columns].into())
}

/// tanh(x w0) w1 ..., and a state that counts and one that keeps the mean of what has been seen.
fn net(depth: usize) -> Graph {
    let g = Trace::new("net");
    let mut value = g.input("x", F32, [8, 48]);
    for layer in 0..depth {
        value = value.matmul(g.constant(&format!("w{layer}"), numbers(48, 48, layer as u64 + 1))).tanh();
    }
    let count = g.state("count", Tensor::from_f64(F32, [1], &[0.0]));
    let seen = g.state("seen", Tensor::from_f64(F32, [8, 48], &[0.25; 8 * 48]));
    g.update(count, count + 1.0);
    g.update(seen, seen * 0.5 + value);
    g.output("y", value + seen);
    g.output("runs", count * 1.0);
    g.finish().expect("the graph is sound")
}

fn open(forks: u32) -> impl Iterator<Item = (&'static str, Session)> {
    common::backends().into_iter().map(move |(name, open)| {
        let session = common::load(net(3), open(), name, &options(forks));
        (name, session.expect("it loads"))
    })
}

/// Results of `count` runs in a row, on inputs that depend on `who`.
fn series(session: &Session, who: u64, count: u64) -> Vec<Vec<(String, Tensor)>> {
    (0..count).map(|at| session.run(&[("x", numbers(8, 48, 100 * who + at + 7))]).expect("it runs")).collect()
}

#[test]
fn runs_at_once_give_what_they_give_alone() {
    for (name, session) in open(3) {
        let plan = session.plan();
        assert_eq!(plan.bytes(), plan.class_bytes(Class::Constant) + 3 * plan.run_bytes(), "{name}");
        assert_eq!(session.usage().bytes, plan.bytes(), "{name}: before there is a fork");
        let alone = common::load(
            net(3),
            common::backends().into_iter().find(|(other, _)| *other == name).expect("it is there").1(),
            name,
            &options(1),
        );
        let alone = alone.expect("it loads");
        let expected: Vec<_> = (0..3)
            .map(|who| {
                alone.reset_state().expect("they are reset");
                series(&alone, who, 6)
            })
            .collect();
        let sessions = [session.fork().expect("it was planned"), session.fork().expect("it was planned")];
        let refused = session.fork().expect_err("no more were planned").to_string();
        let more = plan.run_bytes();
        assert!(refused.contains("all of its 3 runs at once are taken") && refused.contains(&format!("{more} bytes")));
        thread::scope(|scope| {
            for (who, session) in [&session, &sessions[0], &sessions[1]].into_iter().enumerate() {
                let expected = &expected[who];
                scope.spawn(move || assert_eq!(series(session, who as u64, 6), *expected, "{name}, run {who}"));
            }
        });
        assert_eq!(session.usage().bytes, plan.bytes(), "{name}");
        // States are apart: resetting one leaves the others.
        sessions[0].reset_state().expect("they are reset");
        assert_eq!(sessions[0].state("count").expect("it is one").to_f64(), [0.0], "{name}");
        assert_eq!(sessions[1].state("count").expect("it is one").to_f64(), [6.0], "{name}");
        let x = [("x", numbers(8, 48, 5))];
        sessions[0].run_poisoned(&x).expect("no step reads dead memory");
        assert_eq!(session.state("count").expect("it is one").to_f64(), [6.0], "{name}");
    }
}

/// Sessions and forks go in any order. One that goes makes room for another, which begins anew.
#[test]
fn forks_outlive_the_session() {
    for (name, session) in open(2) {
        let first = series(&session, 1, 2);
        let fork = session.fork().expect("it was planned");
        drop(session);
        assert_eq!(series(&fork, 1, 2), first, "{name}");
        let again = fork.fork().expect("the session's run is free");
        assert_eq!(series(&again, 1, 2), first, "{name}: it begins as the first did");
        drop(fork);
        assert_eq!(thread::spawn(move || series(&again, 2, 1).len()).join().expect("it runs elsewhere"), 1, "{name}");
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    let one = Session::from_graph(net(3), &options(1)).expect("it loads");
    let (bytes, each) = (one.plan().bytes(), one.plan().run_bytes());
    let limited = |limit: u64| {
        let options = Options { memory_limit: Some(limit), ..options(4) };
        Session::from_graph(net(3), &options)
    };
    let session = limited(bytes + 3 * each).expect("it fits exactly");
    assert_eq!(session.usage().bytes, bytes + 3 * each);
    let Err(Error::Fit { what, needed, limit, .. }) = limited(bytes + 2 * each) else { panic!("it does not fit") };
    assert_eq!((what.as_str(), limit), ("the plan of 4 runs at once of 'net'", bytes + 2 * each));
    assert!(needed > limit && needed <= bytes + 3 * each);
    let region = Region::new(vec![Line([0xff; 256]); 4096]);
    let lent = common::load(net(1), Box::new(Cpu::with_arena(1, region)), "lent", &options(2));
    assert!(lent.expect_err("it has one run").to_string().contains("serves one run at a time"));
    let range = Session::from_path("graphs/mlp.onnxtxt", &options(2).set("batch", 1..=4)).expect_err("it has one run");
    assert!(range.to_string().contains("a range of shapes has one run at once"), "{range}");
}

/// Programs have forks, too: each has all of the programs and states of its own.
#[test]
fn programs_have_forks() {
    let add = |name: &str, by: f64| {
        let g = Trace::new(name);
        let sum = g.state("sum", Tensor::from_f64(F32, [4], &[0.0; 4]));
        g.update(sum, sum + g.constant("by", Tensor::from_f64(F32, [4], &[by; 4])));
        g.finish().expect("the graph is sound")
    };
    let programs = [("one", add("one", 1.0)), ("ten", add("ten", 10.0))];
    let session = Session::from_graphs(programs, &options(2)).expect("they load");
    assert_eq!(session.usage().bytes, session.plan().bytes());
    let fork = session.fork().expect("it was planned");
    let run =
        |session: &Session, name: &str| drop(session.program(name).expect("it is there").run(&[]).expect("it runs"));
    (0..3).for_each(|_| run(&session, "one"));
    (0..2).for_each(|_| run(&fork, "ten"));
    run(&fork, "one");
    assert_eq!(session.state("sum").expect("it is one").to_f64(), [3.0; 4]);
    assert_eq!(fork.state("sum").expect("it is one").to_f64(), [21.0; 4]);
}

/// Constants have arrived when a fork runs, even if the session has not run yet.
#[test]
fn a_fork_runs_before_the_session() {
    for opener @ (name, _) in common::backends() {
        let graph = || {
            let g = Trace::new("first");
            g.output("y", g.input("x", F32, [8, 48]).matmul(g.constant("w", numbers(48, 48, 3))));
            g.finish().expect("the graph is sound")
        };
        let load = |forks| {
            let session = common::load(graph(), opener.1(), name, &options(forks));
            session.expect("it loads")
        };
        let expected = series(&load(1), 1, 1);
        let session = load(3);
        let forks = [session.fork().expect("it was planned"), session.fork().expect("it was planned")];
        for fork in &forks {
            assert_eq!(series(fork, 1, 1), expected, "{name}");
        }
        assert_eq!(series(&session, 1, 1), expected, "{name}");
    }
}

/// What runs at once take is planned: it is none of the bytes beside the plan.
#[test]
fn bytes_of_forks_are_not_beside_the_plan() {
    for (name, open) in common::backends() {
        let beside = |forks| {
            let g = Trace::new("wide");
            g.output("y", g.input("x", F32, [2048, 2048]).tanh());
            let graph = g.finish().expect("the graph is sound");
            let session = common::load(graph, open(), name, &options(forks));
            let session = session.expect("it loads");
            assert_eq!(session.usage().bytes, session.plan().bytes(), "{name}");
            (session.usage().overhead.unwrap_or(0), session.plan().run_bytes())
        };
        let ((alone, _), (all, each)) = (beside(1), beside(4));
        assert!(all < alone + each, "{name}: {all} bytes beside 4 runs of {each}, {alone} beside one");
    }
}

/// Bytes that are beyond counting are refused, as are no runs.
#[test]
fn runs_are_counted() {
    let graph = |rows: usize| {
        let g = Trace::new("wide");
        g.output("y", g.input("x", F32, [rows]).tanh());
        g.finish().expect("the graph is sound")
    };
    let refused = |rows, forks, memory_limit| {
        let options = Options { memory_limit, ..options(forks) };
        Session::from_graph(graph(rows), &options).expect_err("there are too many, or none").to_string()
    };
    assert!(refused(4, 0, None).contains("expected at least one run at once, found 0"));
    assert!(refused(1 << 42, u32::MAX, None).contains("beyond 63 bits"));
    assert!(refused(1 << 42, u32::MAX, Some(1 << 20)).contains("the limit is 1,048,576 bytes"));
}

/// The bytes that all backends hold together, up to a limit.
struct Held {
    bytes: u64,
    limit: u64,
}

/// A device of little memory, which its forks share.
struct Scarce {
    device: Box<dyn Backend>,
    held: Arc<Mutex<Held>>,
    own: HashMap<SegmentId, u64>,
}

impl Scarce {
    fn over(device: Box<dyn Backend>, held: &Arc<Mutex<Held>>) -> Box<dyn Backend> {
        Box::new(Scarce { device, held: Arc::clone(held), own: HashMap::new() })
    }
}

impl Backend for Scarce {
    fn target(&self) -> &Target {
        self.device.target()
    }
    fn identity(&self) -> String {
        self.device.identity()
    }
    fn usage(&self) -> Usage {
        self.device.usage()
    }
    fn alloc(&mut self, bytes: u64, memory: Memory) -> plimsoll::Result<SegmentId> {
        let mut held = self.held.lock().expect("nobody panics");
        if held.bytes + bytes > held.limit {
            let (needed, limit) = (bytes, held.limit - held.bytes);
            return Err(Error::Fit { what: "a segment".into(), needed, limit, file: None });
        }
        let segment = self.device.alloc(bytes, memory)?;
        held.bytes += bytes;
        self.own.insert(segment, bytes);
        Ok(segment)
    }
    fn fork(&mut self, shared: &[SegmentId]) -> plimsoll::Result<Box<dyn Backend>> {
        Ok(Scarce::over(self.device.fork(shared)?, &self.held))
    }
    fn free(&mut self, segment: SegmentId) {
        self.held.lock().expect("nobody panics").bytes -= self.own.remove(&segment).unwrap_or(0);
        self.device.free(segment);
    }
    fn write(&mut self, at: Slice, data: &[u8]) -> plimsoll::Result<()> {
        self.device.write(at, data)
    }
    fn read(&mut self, at: Slice, data: &mut [u8]) -> plimsoll::Result<()> {
        self.device.read(at, data)
    }
    fn compile(&mut self, kernel: &Kernel) -> plimsoll::Result<KernelId> {
        self.device.compile(kernel)
    }
    fn record(&mut self, launches: &[Launch]) -> plimsoll::Result<RecordId> {
        self.device.record(launches)
    }
    fn replay(&mut self, record: RecordId) -> plimsoll::Result<()> {
        self.device.replay(record)
    }
}

/// Wherever memory ends while the runs are loaded, all that was taken is given back.
#[test]
fn what_was_taken_is_given_back() {
    for (name, open) in common::backends() {
        let load = |limit: u64| {
            let held = Arc::new(Mutex::new(Held { bytes: 0, limit }));
            let session = common::load(net(1), Scarce::over(open(), &held), name, &options(3));
            (session, held)
        };
        let bytes = |held: &Mutex<Held>| held.lock().expect("nobody panics").bytes;
        let (session, held) = load(u64::MAX);
        let session = session.expect("it loads");
        let (all, each) = (session.plan().bytes(), session.plan().run_bytes());
        assert_eq!(bytes(&held), all, "{name}");
        drop(session);
        assert_eq!(bytes(&held), 0, "{name}");
        for limit in [all - 1, all - each, all - each - 1, all - 2 * each, all - 2 * each - 1, 0] {
            let (session, held) = load(limit);
            let refused = session.expect_err("memory ends").to_string();
            assert!(refused.contains("needs") && refused.contains("the limit is"), "{name}: {refused}");
            assert_eq!(bytes(&held), 0, "{name}: with {limit} of {all} bytes");
        }
        assert!(load(all).0.is_ok(), "{name}");
    }
}

/// A thread that panics while it has a run takes nothing from the others, nor from the next user of its own.
#[test]
fn a_panic_leaves_runs_usable() {
    for (name, session) in open(2) {
        let fork = session.fork().expect("it was planned");
        let x = |seed| [("x", numbers(8, 48, seed))];
        let panicked = thread::scope(|scope| {
            let held = || session.with(|exec| exec.replay().map(|()| panic!("as planned")));
            scope.spawn(held).join().is_err()
                || scope.spawn(|| session.with(|_| -> () { panic!("as planned") })).join().is_err()
        });
        assert!(panicked, "{name}");
        assert_eq!(fork.run(&x(1)).expect("it runs"), session.run(&x(1)).expect("it runs"), "{name}");
        drop(session);
        assert_eq!(fork.fork().expect("it is free").run(&x(1)).expect("it runs").len(), 2, "{name}");
    }
}

/// A plan as the only program of a job.
fn alone(plan: Plan) -> Planned {
    Planned { plan, data: Vec::new(), ranges: vec![None], graphs: vec![Graph::default()] }
}

/// One run that takes as many bytes may take fewer for its constants, and more for the rest. Four of them then take more.
#[test]
fn measured_schedules_take_no_more_for_all_runs() {
    let one = common::planned(&net(1), &Target::cpu(1));
    let of = |constants: u64, rest: u64| {
        let segment = |class, bytes| Segment { class, memory: Memory::Device, bytes };
        let segments = vec![segment(Class::Constant, constants), segment(Class::Activation, rest)];
        Plan { segments, ..one.clone() }
    };
    let planned = |measured: (u64, u64), forks, memory| {
        let all = |(constants, rest), memory| {
            let mut make = |memory: Option<u64>| {
                let plan = of(constants, rest);
                let fits = memory.is_none_or(|limit| plan.bytes() <= limit);
                let (needed, limit) = (plan.bytes(), memory.unwrap_or_default());
                let refused = || Error::Fit { what: "one".into(), needed, limit, file: None };
                if fits { Ok(alone(plan)) } else { Err(refused()) }
            };
            for_all_runs(forks, memory, &mut make).map(|planned| planned.plan.bytes())
        };
        let plain = all((1000, 100), memory)?;
        Ok::<_, Error>(all(measured, Some(plain)).unwrap_or(plain))
    };
    assert_eq!(planned((100, 900), 1, None).expect("it fits"), 1000);
    assert_eq!(planned((100, 900), 4, None).expect("it fits"), 1400);
    assert_eq!(planned((100, 900), 4, Some(1400)).expect("it fits"), 1400);
    assert_eq!(planned((100, 325), 4, Some(1400)).expect("it fits"), 1400);
    assert_eq!(planned((100, 300), 4, Some(1400)).expect("it fits"), 1300);
    assert!(planned((100, 900), 4, Some(1399)).is_err());
}

/// With fewer constants than the first plan has, there is less room for each run than it seemed: more chunks may still fit.
#[test]
fn further_chunks_are_tried_before_a_refusal() {
    let one = common::planned(&net(1), &Target::cpu(1));
    let of = |(constants, rest): (u64, u64)| {
        let segment = |class, bytes| Segment { class, memory: Memory::Device, bytes };
        let segments = vec![segment(Class::Constant, constants), segment(Class::Activation, rest)];
        Plan { segments, ..one.clone() }
    };
    let planned = |limit: u64| {
        let mut make = |memory: Option<u64>| {
            let limit = memory.expect("there is one");
            let chunked = [(500, 100), (200, 250), (150, 120)].map(of).into_iter().find(|plan| plan.bytes() <= limit);
            chunked.map(alone).ok_or_else(|| Error::Fit { what: "one".into(), needed: 270, limit, file: None })
        };
        for_all_runs(4, Some(limit), &mut make).map(|planned| planned.plan.bytes())
    };
    assert_eq!(planned(900).expect("it fits as it is"), 900);
    assert_eq!(planned(700).expect("it fits in more chunks"), 150 + 4 * 120);
    assert_eq!(planned(630).expect("it fits exactly"), 630);
    let Err(Error::Fit { needed, limit, .. }) = planned(629) else { panic!("it does not fit") };
    assert!(limit == 629 && needed > limit, "{needed} bytes");
}

/// Entries of a folder that Linux has for this process.
#[cfg(target_os = "linux")]
fn count(folder: &str) -> usize {
    std::fs::read_dir(folder).expect("Linux has it").count()
}

/// Bytes of anonymous memory, open files and threads of this process. A thread that has been joined may still be listed for a moment: it
/// waits until there are no more than `threads`.
#[cfg(target_os = "linux")]
fn held(threads: usize) -> (u64, usize, usize) {
    let settled = |_: &u32| count("/proc/self/task") <= threads;
    (0..2000).take_while(|turn| !settled(turn)).for_each(|_| thread::sleep(Duration::from_millis(1)));
    let rollup = std::fs::read_to_string("/proc/self/smaps_rollup").expect("Linux has it");
    let anonymous = rollup.lines().find_map(|line| line.strip_prefix("Anonymous:")).expect("it is a line");
    let kib: u64 = anonymous.trim().trim_end_matches(" kB").parse().expect("it is a number");
    (kib * 1024, count("/proc/self/fd"), count("/proc/self/task"))
}

/// One round: runs on a session and two forks in threads, on memory that the host lends, and with inputs that are refused.
#[cfg(target_os = "linux")]
fn round(session: &Session, lent: &Session, at: u64) {
    let forks = [session.fork().expect("it was planned"), session.fork().expect("it was planned")];
    thread::scope(|scope| {
        for session in [session, &forks[0], &forks[1]] {
            scope.spawn(move || {
                for turn in 0..8 {
                    series(session, at, 1);
                    let wrong = [("x", numbers(8, 47, turn + 1))];
                    assert!(session.run(&wrong).is_err() && session.run(&[]).is_err());
                }
            });
        }
    });
    assert!(session.fork().is_err() && lent.fork().is_err());
    lent.run(&[("x", numbers(8, 48, at + 1))]).expect("it runs");
}

/// Bytes, files and threads stay what they are. The test runs in a process of its own, as others make threads, too.
#[cfg(target_os = "linux")]
#[test]
fn ten_thousand_runs_hold_what_the_first_ones_held() {
    const CHILD: &str = "PLIMSOLL_SOAK";
    const ROUND: u64 = 25;
    let Ok(runs) = std::env::var(CHILD) else {
        let all = common::runs_long("9 of 10 runs of forks");
        let mut child = Command::new(std::env::current_exe().expect("it has a path"));
        let child =
            child.args(["--exact", "forks::ten_thousand_runs_hold_what_the_first_ones_held", "--test-threads=1"]);
        let output = child.env(CHILD, if all { "10000" } else { "1000" }).output().expect("it starts");
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        assert!(output.status.success(), "{}{}", text(&output.stdout), text(&output.stderr));
        return;
    };
    let rounds = runs.parse::<u64>().expect("it is a number") / ROUND;
    let threads = count("/proc/self/task");
    let session = Session::from_graph(net(2), &options(3)).expect("it loads");
    let region = Region::new(vec![Line([0xff; 256]); 1024]);
    let lent = common::load(net(2), Box::new(Cpu::with_arena(1, region)), "lent", &options(1));
    let lent = lent.expect("it loads");
    (0..8).for_each(|at| round(&session, &lent, at));
    let (bytes, files, threads_first) = held(threads);
    let taken = (session.usage(), lent.usage());
    (8..rounds).for_each(|at| round(&session, &lent, at));
    let (last, files_last, threads_last) = held(threads);
    assert_eq!((files_last, threads_first, threads_last), (files, threads, threads));
    assert_eq!((session.usage(), lent.usage()), taken);
    // The allocator may keep a few pages more for threads that have ended.
    assert!(last <= bytes + (1 << 20), "{bytes} bytes at first, {last} at last");
}

fn plimsoll(arguments: &[&str]) -> (Option<i32>, String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_plimsoll"));
    let command = command.args(arguments).current_dir(env!("CARGO_MANIFEST_DIR")).env_remove("RUST_LOG");
    let output = command.output().expect("the program starts");
    let text = |bytes| String::from_utf8(bytes).expect("the output is text");
    (output.status.code(), text(output.stdout), text(output.stderr))
}

/// The bytes of several runs are known from the plan, and are what they take.
#[test]
fn the_command_line_plans_runs_at_once() {
    let json = |arguments: &[&str]| -> serde_json::Value {
        let (code, out, err) = plimsoll(&[arguments, &["--json"]].concat());
        assert_eq!(code, Some(0), "{err}");
        common::printed(arguments, &out)
    };
    let model = ["graphs/digits.onnx", "--set", "batch=8", "--threads", "1"];
    let plan = json(&[&["plan"], &model[..], &["--forks", "4"]].concat());
    assert_eq!(plan["runs"], 4);
    let folder = common::Folder::new("forks");
    let file = folder.file("plan.json", plan.to_string());
    let (code, _, err) = plimsoll(&["check", &file]);
    assert_eq!(code, Some(0), "{err}");
    for forks in [serde_json::json!(0), serde_json::json!(5), serde_json::json!(u32::MAX), serde_json::json!(-1)] {
        let mut wrong = plan.clone();
        wrong["runs"] = forks;
        let (code, _, err) = plimsoll(&["check", &folder.file("wrong.json", wrong.to_string())]);
        assert!(code == Some(1) && err.contains("wrong.json"), "{err}");
    }
    let segments = plan["segments"].as_array().expect("it has segments");
    let bytes = |segment: &serde_json::Value| segment["bytes"].as_u64().expect("it is a number");
    let (constants, rest): (Vec<_>, Vec<_>) = segments.iter().partition(|segment| segment["class"] == "constant");
    let sum = |list: &[&serde_json::Value]| list.iter().map(|segment| bytes(segment)).sum::<u64>();
    let expected = sum(&constants) + 4 * sum(&rest);
    let limit = |bytes: u64| {
        [&["plan"], &model[..], &["--forks", "4", "--memory-limit", &bytes.to_string()]].concat().join(" ")
    };
    let limited = |bytes: u64| plimsoll(&limit(bytes).split(' ').collect::<Vec<_>>());
    assert_eq!(plan["programs"][0]["summary"]["planned_bytes"], expected);
    assert_eq!(limited(expected).0, Some(0));
    let (code, _, err) = limited(sum(&constants) + 3 * sum(&rest));
    assert_eq!((code, err.contains("4 runs at once of")), (Some(2), true), "{err}");
    let (code, _, err) = plimsoll(&[&["plan"], &model[..], &["--forks", "4", "--advise"]].concat());
    assert_eq!(code, Some(0), "advice is for all runs: {err}");
    let timed = json(&[&["bench"], &model[..], &["--backend", "cpu", "--forks", "4", "--iters", "3"]].concat());
    assert_eq!((&timed["planned_bytes"], &timed["allocated_bytes"]), (&expected.into(), &expected.into()), "{timed}");
    assert_eq!(timed["allocations_in_runs"], 0);
}
