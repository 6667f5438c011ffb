//! Measured schedules: they compute the same, take no more bytes, and are never trusted.

use crate::common::{Folder, agrees, backends, random, runs_long};
use plimsoll::internals::backend::cpu::Cpu;
use plimsoll::internals::backend::{Backend, KernelId, Launch, RecordId, SegmentId, Slice, Usage};
use plimsoll::internals::exec::Exec;
use plimsoll::internals::file::{sealed, unsealed};
use plimsoll::internals::kernel::algorithm::{self, Schedule};
use plimsoll::internals::kernel::call::{Call, LibraryAlgorithm};
use plimsoll::internals::kernel::tuned::Tuned;
use plimsoll::internals::kernel::{Kernel, schedule};
use plimsoll::internals::pass::Prepared;
use plimsoll::internals::plan::Planning;
use plimsoll::internals::plan::{self, Compiled, Job, Limits};
use plimsoll::internals::session::Device;
use plimsoll::internals::target::Memory;
use plimsoll::internals::tune::{self, Entry, cache};
use plimsoll::{DType, Error, Graph, Plan, Recipe, Session, Target, Tensor, Trace};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

const FREE: Limits = Limits { memory: None };

/// Graphs with products, convolutions, attention and reductions.
fn examples() -> Vec<Graph> {
    let unet: &[(&str, usize)] = &[("batch", 1), ("height", 16), ("width", 16)];
    let attention: &[(&str, usize)] = &[("batch", 1), ("sequence", 24)];
    [
        ("graphs/digits.onnx", &[("batch", 2)][..]),
        ("graphs/unet.onnxtxt", unet),
        ("graphs/attention.onnxtxt", attention),
    ]
    .map(|(path, dims)| Graph::from_path(path, dims).expect("it is a graph"))
    .into()
}

fn prepared(graph: &Graph, target: &Target) -> Prepared {
    Recipe::default().graph(graph.clone(), target, &FREE).expect("the passes run")
}

fn asked(prepared: &Prepared, target: &Target) -> Vec<(Kernel, usize)> {
    tune::kernels(std::slice::from_ref(prepared), target).expect("it is lowered")
}

/// The schedules of a kernel as lowering asks for it.
fn candidates(kernel: &Kernel, target: &Target) -> Vec<Schedule> {
    let mut plain = kernel.clone();
    plain.reads.iter_mut().for_each(|read| read.packed = false);
    schedule::candidates(&plain, target, &|_| true)
}

/// A table with the schedule that `choose` picks for each kernel.
/// A graph's plan with measured schedules.
fn by(
    graph: Prepared,
    target: &Target,
    limits: &Limits,
    tuned: &Arc<Tuned>,
    more_memory: bool,
) -> Result<Compiled, Error> {
    let schedules = Some(Arc::clone(tuned));
    plan::compiled(&Job { schedules, more_memory, ..Job::of(graph, target).within(limits.memory) })
}

fn table(kernels: &[(Kernel, usize)], choose: impl Fn(&Kernel) -> Option<Schedule>) -> Arc<Tuned> {
    let mut tuned = Tuned::new("a device");
    for (kernel, _) in kernels {
        if let Some(schedule) = choose(kernel) {
            tuned.insert(kernel, schedule);
        }
    }
    Arc::new(tuned)
}

fn inputs(graph: &Graph) -> Vec<Tensor> {
    let mut state = 7;
    graph.inputs().iter().map(|&value| random(&mut state, &graph.fact(value).shape)).collect()
}

fn run(backend: Box<dyn Backend>, (plan, constants): &plan::Compiled, inputs: &[Tensor]) -> Vec<Tensor> {
    let mut exec = Exec::load(backend, plan.clone(), constants, &|_| {}).expect("it loads");
    assert_eq!(exec.backend().usage().bytes, plan.bytes());
    exec.run(inputs).expect("it runs")
}

#[test]
fn measured_plans_compute_the_same_in_no_more_bytes() {
    for (name, open) in backends() {
        for graph in examples() {
            let mut device = open();
            let target = device.target().clone();
            let prepared = prepared(&graph, &target);
            let untuned = plan::compile(&prepared, &target, &FREE).expect("it is planned");
            let kernels = asked(&prepared, &target);
            assert!(kernels.len() >= 3, "{name}, {}", graph.name);
            let found =
                tune::measure(&mut *device, kernels.clone(), Duration::from_secs(600), &|_| {}).expect("it measures");
            assert_eq!(device.usage().bytes, 0, "{name}: what was allocated is freed");
            for Entry { kernel, schedule, expected, tried, after, .. } in &found {
                assert!(kernels.iter().any(|(asked, _)| asked == kernel) && *tried > 1 && after.is_finite(), "{name}");
                let known = candidates(kernel, &target);
                for schedule in [schedule, expected] {
                    assert!(schedule.call().is_some() || known.contains(schedule), "{name}: {schedule}");
                }
            }
            let mut tuned = Tuned::new(device.identity());
            found.iter().for_each(|entry| tuned.insert(&entry.kernel, entry.schedule.clone()));
            let compiled = by(prepared, &target, &FREE, &Arc::new(tuned), false).expect("it is planned");
            assert!(compiled.0.bytes() <= untuned.0.bytes(), "{name}, {}", graph.name);
            let inputs = inputs(&graph);
            let [expected, found] = [&untuned, &compiled].map(|compiled| run(open(), compiled, &inputs));
            for (found, expected) in found.iter().zip(&expected) {
                agrees(found, expected, 1e-4).unwrap_or_else(|e| panic!("{name}, {}: {e}", graph.name));
            }
        }
    }
}

/// A processor whose launches of some schedules do nothing, which takes no time.
struct Idle {
    cpu: Cpu,
    works: Vec<Schedule>,
    idle: Vec<KernelId>,
}

impl Backend for Idle {
    fn target(&self) -> &Target {
        self.cpu.target()
    }
    fn identity(&self) -> String {
        self.cpu.identity()
    }
    fn usage(&self) -> Usage {
        self.cpu.usage()
    }
    fn alloc(&mut self, bytes: u64, memory: Memory) -> plimsoll::Result<SegmentId> {
        self.cpu.alloc(bytes, memory)
    }
    fn free(&mut self, segment: SegmentId) {
        self.cpu.free(segment);
    }
    fn write(&mut self, at: Slice, data: &[u8]) -> plimsoll::Result<()> {
        self.cpu.write(at, data)
    }
    fn read(&mut self, at: Slice, data: &mut [u8]) -> plimsoll::Result<()> {
        self.cpu.read(at, data)
    }
    fn compile(&mut self, kernel: &Kernel) -> plimsoll::Result<KernelId> {
        let id = self.cpu.compile(kernel)?;
        if !self.works.contains(&kernel.schedule) {
            self.idle.push(id);
        }
        Ok(id)
    }
    fn record(&mut self, launches: &[Launch]) -> plimsoll::Result<RecordId> {
        let works = |launch: &&Launch| !self.idle.contains(&launch.kernel);
        self.cpu.record(&launches.iter().filter(works).cloned().collect::<Vec<_>>())
    }
    fn replay(&mut self, record: RecordId) -> plimsoll::Result<()> {
        self.cpu.replay(record)
    }
}

#[test]
fn a_schedule_that_computes_nothing_is_not_the_fastest() {
    let target = Target::cpu(2);
    let mut idle = 0;
    for graph in examples() {
        let kernels = asked(&prepared(&graph, &target), &target);
        let works = kernels.iter().filter_map(|(kernel, _)| candidates(kernel, &target).into_iter().next()).collect();
        let mut device = Idle { cpu: Cpu::new(2), works, idle: Vec::new() };
        let found = tune::measure(&mut device, kernels, Duration::from_secs(600), &|_| {}).expect("it measures");
        idle += device.idle.len();
        for Entry { kernel, schedule, .. } in found {
            assert!(device.works.contains(&schedule), "{}: {schedule}", kernel.template.name());
        }
    }
    assert!(idle > 3, "{idle}");
}

/// Every schedule that may be worth a try, in the plan of a whole graph.
#[test]
fn any_legal_schedule_may_be_the_measured_one() {
    for (name, open) in backends() {
        for graph in examples() {
            let target = open().target().clone();
            let prepared = prepared(&graph, &target);
            let expected =
                run(open(), &plan::compile(&prepared, &target, &FREE).expect("it is planned"), &inputs(&graph));
            let kernels = asked(&prepared, &target);
            let most = kernels.iter().map(|(kernel, _)| candidates(kernel, &target).len()).max().unwrap_or(0);
            let tried = if runs_long("most of the schedules of whole graphs") { 6 } else { 2 };
            for number in 1..most.min(tried) {
                let tuned = table(&kernels, |kernel| candidates(kernel, &target).into_iter().nth(number));
                let (plan, constants) = by(prepared.clone(), &target, &FREE, &tuned, true).expect("it is planned");
                let Some(measured) = &plan.tuned else { panic!("{name}, {}: no schedule was taken", graph.name) };
                assert!(plan.programs[0].measured > 0 && measured == "a device");
                let again =
                    Plan::from_json(&plan.to_json(), Path::new("plan")).expect("a plan may have any legal schedule");
                assert_eq!(again, plan);
                for (found, expected) in run(open(), &(plan, constants), &inputs(&graph)).iter().zip(&expected) {
                    agrees(found, expected, 1e-4).unwrap_or_else(|e| panic!("{name}, {}, {number}: {e}", graph.name));
                }
            }
        }
    }
}

/// On a target with libraries, a text may replace a call, and a call a text.
#[test]
fn calls_and_texts_replace_each_other() {
    let target = Target::cuda();
    let mut replaced = [0, 0];
    for graph in examples() {
        let prepared = prepared(&graph, &target);
        let kernels = asked(&prepared, &target);
        let texts = table(&kernels, |kernel| candidates(kernel, &target).into_iter().find(|s| s.call().is_none()));
        let calls = table(&kernels, |kernel| {
            schedule::split(kernel, &target).map(|split| Schedule::Library(split.library().clone()))
        });
        let calls_of = |tuned: &Arc<Tuned>| {
            let (plan, _) = by(prepared.clone(), &target, &FREE, tuned, true).expect("it is planned");
            plan.programs[0]
                .steps
                .iter()
                .filter(|step| plan.programs[0].kernels[step.kernel].schedule.call().is_some())
                .count()
        };
        assert_eq!(calls_of(&texts), 0, "{}", graph.name);
        replaced[0] += kernels.iter().filter(|(kernel, _)| schedule::split(kernel, &target).is_some()).count();
        replaced[1] += calls_of(&calls);
    }
    assert!(replaced[0] > 5 && replaced[1] >= replaced[0], "{replaced:?}");
}

/// A plan holds the algorithm that was measured, with its workspace, and no other one.
#[test]
fn a_measured_algorithm_of_a_library_is_in_the_plan() {
    let target = Target::cuda();
    let graph = examples().remove(1);
    let prepared = prepared(&graph, &target);
    let kernels = asked(&prepared, &target);
    let planned = |change: &dyn Fn(LibraryAlgorithm) -> LibraryAlgorithm| {
        let by_last = |kernel: &Kernel| {
            let split = schedule::split(kernel, &target)?;
            let algorithm = split.algorithms().pop().map(change);
            Some(Schedule::Library(split.library().clone().by(algorithm)))
        };
        by(prepared.clone(), &target, &FREE, &table(&kernels, by_last), true).expect("it is planned").0
    };
    let named = |plan: &Plan| -> Vec<(LibraryAlgorithm, u64)> {
        let calls = plan.programs[0].kernels.iter().filter_map(|kernel| Some((kernel, kernel.schedule.call()?)));
        calls.filter_map(|(kernel, call)| Some((call.algorithm()?, kernel.workspace))).collect()
    };
    let plan = planned(&|last| last);
    let found = named(&plan);
    assert!(found.len() > 3, "{found:?}");
    assert!(found.iter().all(|(algorithm, given)| algorithm.rank > 0 && *given == algorithm.workspace), "{found:?}");
    let text = plan.to_json();
    assert_eq!(Plan::from_json(&text, Path::new("plan")).expect("the plan is legal"), plan);
    for (from, to) in [("\"rank\":3", "\"rank\":4"), ("\"rank\":3,\"workspace\":", "\"rank\":3,\"workspace\":1")] {
        let text = text.split_whitespace().collect::<String>();
        assert!(text.contains(from), "{from}");
        Plan::from_json(&text.replace(from, to), Path::new("plan")).expect_err("no such algorithm is tried");
    }
    assert!(named(&planned(&|last| LibraryAlgorithm { rank: 4, ..last })).is_empty());
    assert!(named(&planned(&|last| LibraryAlgorithm { workspace: u64::MAX, ..last })).is_empty());
}

#[test]
fn a_plan_takes_no_more_bytes_unless_it_may() {
    let mut grown = 0;
    for graph in examples() {
        for target in [Target::cpu(2), Target::cuda()] {
            let prepared = prepared(&graph, &target);
            let untuned = plan::planned(&prepared, &target, &FREE).expect("it is planned").bytes();
            // The schedule with the largest workspace.
            let hungry = table(&asked(&prepared, &target), |kernel| {
                let bytes = |schedule: &Schedule| {
                    let kernel = Kernel { schedule: schedule.clone(), ..kernel.clone() };
                    schedule::workspace(&kernel)
                };
                candidates(kernel, &target).into_iter().max_by_key(bytes)
            });
            let bytes = |more| by(prepared.clone(), &target, &FREE, &hungry, more).expect("it is planned").0.bytes();
            assert!(bytes(false) <= untuned, "{}", graph.name);
            grown += usize::from(bytes(true) > untuned);
            let limits = Limits { memory: Some(untuned) };
            if let Ok((plan, _)) = by(prepared.clone(), &target, &limits, &hungry, true) {
                assert!(plan.bytes() <= untuned, "a limit is a limit");
            }
        }
    }
    assert!(grown > 0, "no schedule took more bytes: the test shows nothing");
}

#[test]
fn what_is_not_legal_here_is_not_taken() {
    let target = Target::cpu(2);
    for graph in examples() {
        let prepared = prepared(&graph, &target);
        let untuned = plan::planned(&prepared, &target, &FREE).expect("it is planned");
        let kernels = asked(&prepared, &target);
        let text = schedule::choose(&kernels[0].0, &Target::wgpu(), &|_| true);
        for wrong in [
            Schedule::Open,
            Schedule::Cpu(algorithm::Cpu::Window { threads: 99 }),
            Schedule::Cpu(algorithm::Cpu::Matmul { threads: 3 }),
        ]
        .into_iter()
        .chain(text)
        {
            let tuned = table(&kernels, |_| Some(wrong.clone()));
            let (plan, _) = by(prepared.clone(), &target, &FREE, &tuned, false).expect("it is planned");
            assert_eq!(plan, untuned, "{wrong}");
        }
    }
}

/// A device with libraries that refuse convolutions.
struct Refusing(Target);

impl Backend for Refusing {
    fn target(&self) -> &Target {
        &self.0
    }
    fn identity(&self) -> String {
        "refusing".into()
    }
    fn usage(&self) -> Usage {
        Usage::default()
    }
    fn alloc(&mut self, _: u64, _: Memory) -> plimsoll::Result<SegmentId> {
        Ok(SegmentId(0))
    }
    fn free(&mut self, _: SegmentId) {}
    fn write(&mut self, _: Slice, _: &[u8]) -> plimsoll::Result<()> {
        Ok(())
    }
    fn read(&mut self, _: Slice, _: &mut [u8]) -> plimsoll::Result<()> {
        unreachable!("loading reads nothing")
    }
    fn compile(&mut self, kernel: &Kernel) -> plimsoll::Result<KernelId> {
        match kernel.schedule.call() {
            Some(Call::Conv(_)) => Err(plimsoll::Error::Backend { backend: "none", what: "no".into(), file: None }),
            _ => Ok(KernelId(0)),
        }
    }
    fn record(&mut self, _: &[Launch]) -> plimsoll::Result<RecordId> {
        Ok(RecordId(0))
    }
    fn replay(&mut self, _: RecordId) -> plimsoll::Result<()> {
        unreachable!("loading runs nothing")
    }
}

/// What a library refuses is computed by a text, with and without measured schedules. Other calls stay.
#[test]
fn refused_calls_are_left_to_texts() {
    // Products and convolutions that are large enough for libraries.
    let g = Trace::new("calls");
    let [x, w] = [("x", [8, 64, 56, 56]), ("w", [64, 64, 3, 3])].map(|(name, shape)| g.input(name, DType::F32, shape));
    g.output("y", x.conv2d(w, None, 1, 1, 1).relu());
    let [a, b] = ["a", "b"].map(|name| g.input(name, DType::F32, [2048, 2048]));
    g.output("z", a.matmul(b));
    let graph = g.finish().expect("the graph is sound");
    let target = Target::cuda();
    let calls = |plan: &Plan| -> Vec<&'static str> {
        let called =
            plan.programs[0].steps.iter().filter_map(|step| plan.programs[0].kernels[step.kernel].schedule.call());
        called.map(Call::library).collect()
    };
    let plain = Recipe::default().plan(graph.clone(), &target, &FREE).expect("it is planned");
    assert!(calls(&plain).contains(&"cuDNN") && calls(&plain).contains(&"cuBLASLt"), "{:?}", calls(&plain));
    let measured =
        table(&asked(&prepared(&graph, &target), &target), |kernel| candidates(kernel, &target).into_iter().next());
    for tuned in [None, Some(&measured)] {
        let device = Device::new(Box::new(Refusing(target.clone())), "refusing");
        let schedules = tuned.cloned();
        let job = Job { schedules, ..Job::of(graph.clone(), &target) };
        let session = Session::new(job, device, &|_, _| {}).expect("it is planned");
        let plan = session.plan();
        assert_eq!(calls(plan), ["cuBLASLt"]);
        assert_eq!(plan.tuned.is_some(), tuned.is_some(), "only what was measured is said to be");
    }
}

struct Ran {
    out: String,
    log: String,
}

fn plimsoll(cache: &Path, args: &[&str]) -> Ran {
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_plimsoll"));
    let command = command.args(args).current_dir(env!("CARGO_MANIFEST_DIR"));
    let output = command.env("PLIMSOLL_CACHE_DIR", cache).env_remove("RUST_LOG").output().expect("it starts");
    let [out, log] = [output.stdout, output.stderr].map(|text| String::from_utf8(text).expect("it is text"));
    assert!(output.status.success() && !log.contains("panicked"), "{args:?}: {log}");
    Ran { out, log }
}

const MODEL: [&str; 5] = ["graphs/digits.onnx", "--set", "batch=2", "--threads", "2"];

#[test]
fn tune_keeps_what_run_and_plan_use() {
    let folder = Folder::new("tuned");
    let cache = folder.0.join("cache");
    let with = |command: &str, more: &[&str]| plimsoll(&cache, &[&[command][..], &MODEL, more].concat());
    let cpu = ["--backend", "cpu"];
    let plan = folder.0.join("plan.json");
    let plan = plan.to_str().expect("the path is text");
    let told = with("tune", &["--backend", "cpu", "-o", plan]).out;
    assert!(told.contains("untuned") && told.contains("kept in"), "{told}");
    plimsoll(&cache, &["check", plan]);
    let files: Vec<_> = std::fs::read_dir(cache.join("tuned")).expect("it was made").collect();
    assert_eq!(files.len(), 1);
    let file = files[0].as_ref().expect("it is listed").path();
    let (tuned, entries) = cache::read(&file).expect("it is read");
    assert!(tuned.device.starts_with("cpu, "), "{}", tuned.device);

    // One more entry that is legal, and not what is expected: a plan that used it says so.
    let target = Target::cpu(2);
    let graph = Graph::from_path("graphs/digits.onnx", &[("batch", 2)]).expect("it is a graph");
    let kernels = asked(&prepared(&graph, &target), &target);
    let other = |kernel: &Kernel| candidates(kernel, &target).into_iter().nth(1);
    let (kernel, schedule) = kernels.iter().find_map(|(k, _)| Some((k.clone(), other(k)?))).expect("one has a choice");
    let expected = candidates(&kernel, &target).swap_remove(0);
    let entry = Entry { kernel, schedule, expected, before: Some(2.0), after: 1.0, tried: 2, launches: 1 };
    let kept = std::fs::read_to_string(&file).expect("it is there");
    let mut value: serde_json::Value =
        serde_json::from_str(unsealed(&kept, &file).expect("it is whole")).expect("it is JSON");
    value["kernels"] = serde_json::json!([entry]);
    let whole = sealed(&value.to_string());
    std::fs::write(&file, &whole).expect("it is written");
    let name = file.to_str().expect("the path is text");
    let said = "measured on cpu, ";
    let tuned = with("plan", &["--tuned", name]).out;
    assert!(tuned.contains("the algorithms of 1 of") && tuned.contains(said), "{tuned}");
    assert!(!with("plan", &[]).out.contains(said), "without the file, a plan is the same on every machine");
    for command in ["run", "bench"] {
        let (with, without) = (with(command, &cpu), with(command, &["--backend", "cpu", "--no-tuned"]));
        assert!(with.log.contains("measured") && !without.log.contains("measured"), "{}{}", with.log, without.log);
    }

    // Whatever is wrong with the file is a line in the log.
    let mut version = value.clone();
    version["version"] = 99.into();
    let mut device = value.clone();
    device["device"] = "cpu, another".into();
    let mut made = value.clone();
    made["plimsoll"] = "0.0.1".into();
    let mut field = value.clone();
    field["kernels"][0]["schedule"] = serde_json::json!({"cpu": "magic"});
    let wrong = [version, device, made, field].map(|value| sealed(&value.to_string()).into_bytes());
    let cut = [0, 1, whole.len() / 2, whole.len() - 2].map(|length| whole.as_bytes()[..length].to_vec());
    for content in wrong.into_iter().chain(cut).chain([vec![0xff; 100], b"[]".to_vec(), b"{}".to_vec()]) {
        std::fs::write(&file, &content).expect("it is written");
        let ran = with("run", &cpu);
        let lines = ran.log.lines().filter(|line| line.contains("not used")).count();
        assert_eq!(lines, 1, "{}: {}", String::from_utf8_lossy(&content[..content.len().min(200)]), ran.log);
    }
    // An illegal schedule is left out without a word: what is legal depends on the machine.
    value["kernels"][0]["schedule"] = serde_json::json!({"cpu": {"matmul": {"threads": 77}}});
    std::fs::write(&file, sealed(&value.to_string())).expect("it is written");
    with("run", &cpu);

    // A cache that cannot be written is told, and the plan is written all the same.
    let blocked = folder.0.join("blocked");
    std::fs::write(&blocked, "a file").expect("it is written");
    std::fs::remove_file(plan).expect("it is there");
    let ran = plimsoll(&blocked, &[&["tune"][..], &MODEL, &["--backend", "cpu", "-o", plan]].concat());
    assert!(ran.log.contains("not kept") && Path::new(plan).exists(), "{}", ran.log);
    assert!(!entries.is_empty());
}
