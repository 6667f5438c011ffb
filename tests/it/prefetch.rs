//! Rows that are made ready while a step is computed: results and errors are those of rows that are read in turn, their memory is planned,
//! and the thread ends with the trainer. On the CPU, few bytes of rows are filled in where the plan has its inputs.

use crate::cli::{fails, ok, ok_json};
use crate::common::{Folder, printed};
use plimsoll::internals::npy;
use plimsoll::internals::onnx;
use plimsoll::internals::plan::check;
use plimsoll::internals::target::{Memory, PREFETCH_STACK};
use plimsoll::internals::train::data::{Order, Rows};
use plimsoll::internals::train::prefetch::{Batch, Prefetch};
use plimsoll::internals::train::run::{Data, Trainer};
use plimsoll::internals::train::{self, Loss, Optimizer, Rate, Schedule, Training};
use plimsoll::{Choice, Class, DType, Fact, Options, Place, Session, Tensor};
use std::path::Path;

const LINEAR: &str = "graphs/linear.onnxtxt";

/// Rows that are so small that the CPU does not make them ready ahead, and so many that it does, even a third of a batch.
const FEW: usize = 24;
const MANY: usize = 36_000;

fn training(accumulate: usize) -> Training {
    let rate = Rate { most: 0.01, schedule: Schedule::Constant, warmup: 0, steps: 8 };
    let optimizer = Optimizer::Sgd { momentum: 0.9, nesterov: false };
    Training { accumulate, ..Training::new(Loss::Mse, optimizer, rate) }
}

/// Rows for `graphs/linear.onnxtxt`, two batches, stored as `dtype`. The row `bad` is not finite.
fn data(folder: &Folder, dtype: DType, rows: usize, bad: Option<usize>) -> Data {
    let mut x: Vec<f64> = (0..10 * rows as u32).map(|i| f64::from(i * 37 % 19) / 4.0 - 2.0).collect();
    let y: Vec<f64> = x.chunks(10).map(|row| row[0] - row[3] + 0.5).collect();
    if let Some(row) = bad {
        x[10 * row + 4] = f64::NAN;
    }
    let open = |name: &str, tensor: Tensor| {
        let path = folder.path(name);
        npy::write(Path::new(&path), &tensor).expect("it can be written");
        Rows::open(Path::new(&path)).expect("it is an array of rows")
    };
    let inputs = vec![("x".to_owned(), open("x.npy", Tensor::from_f64(dtype, [rows, 10], &x)))];
    Data { inputs, labels: open("y.npy", Tensor::from_f64(DType::F32, [rows, 1], &y)) }
}

fn trainer(data: &Data, accumulate: usize, backend: Choice) -> plimsoll::Result<Trainer> {
    let model = onnx::load(Path::new(LINEAR)).expect("it is a model");
    Trainer::new(model, data, data.labels.count() / 2, training(accumulate), &Options::default().on(backend))
}

/// The losses of some steps, and the weights after them, of a loop that reads rows and runs programs by turns.
fn by_turns(data: &Data, accumulate: usize, backend: Choice, steps: u64, seed: Option<u64>) -> (Vec<u32>, Tensor) {
    let model = onnx::load(Path::new(LINEAR)).expect("it is a model");
    let (rows, batch) = (data.labels.count(), data.labels.count() / 2);
    let made = train::programs_of_file(model, Vec::new(), batch, &training(accumulate)).expect("it can be trained");
    let session = Session::from_graphs(made.named(), &Options::default().on(backend)).expect("it loads");
    let micro = batch / accumulate;
    let facts = [10, 1].map(|columns| Fact::new(DType::F32, [micro, columns]));
    let mut losses = Vec::new();
    for step in 0..steps {
        let order = Order::new(rows, seed, step / 2);
        let mut loss = [0; 4];
        for part in 0..accumulate {
            let first = step as usize % 2 * batch + part * micro;
            let columns = [&data.inputs[0].1, &data.labels].into_iter().zip(&facts);
            let [x, y]: [Vec<u8>; 2] = columns
                .map(|(rows, fact)| {
                    let mut bytes = vec![0; fact.shape.numel() * 4];
                    let places = (first..first + micro).map(|place| order.row(place));
                    rows.fill(places, fact, &mut bytes).expect("the rows are finite");
                    bytes
                })
                .collect::<Vec<_>>()
                .try_into()
                .expect("two columns");
            let name = match part {
                _ if accumulate == 1 => "step",
                0 => "first",
                part if part + 1 == accumulate => "last",
                _ => "next",
            };
            let program = session.program(name).expect("it is one of them");
            let inputs = [("x", Place::bytes(&x)), ("labels", Place::bytes(&y))];
            let (mut rate, mut norm) = ([0; 4], [0; 4]);
            let mut outputs = vec![
                ("loss", Place::bytes_mut(&mut loss)),
                ("lr", Place::bytes_mut(&mut rate)),
                ("grad_norm", Place::bytes_mut(&mut norm)),
            ];
            outputs.retain(|(name, _)| program.plan().outputs.iter().any(|port| port.name == *name));
            program.run_in_place(&inputs, &mut outputs).expect("it runs");
        }
        losses.push(u32::from_le_bytes(loss));
    }
    (losses, session.state("w").expect("it is a state"))
}

#[test]
fn results_are_those_of_rows_that_are_read_by_turns() {
    let folder = Folder::new("ahead-bits");
    for backend in [Choice::Cpu, Choice::Wgpu] {
        for (dtype, rows, accumulate, seed) in [
            (DType::F32, FEW, 1, None),
            (DType::F32, FEW, 3, Some(7)),
            (DType::F64, FEW, 1, Some(7)),
            (DType::F32, FEW, 4, None),
            (DType::F32, MANY, 1, None),
            (DType::F64, MANY, 3, Some(7)),
        ] {
            let data = data(&folder, dtype, rows, None);
            let Ok(mut trainer) = trainer(&data, accumulate, backend) else {
                assert_ne!(backend, Choice::Cpu, "the CPU is always there");
                continue;
            };
            let mut losses = Vec::new();
            for step in 0..7 {
                losses.push(trainer.step(&data, step, seed).expect("it runs").loss.to_bits());
                if step % 3 == 1 {
                    // Other rows take the place of those that were made ready.
                    trainer.evaluate(&data).expect("it runs");
                }
            }
            let weights = trainer.session().state("w").expect("it is a state");
            let (expected, other) = by_turns(&data, accumulate, backend, 7, seed);
            assert_eq!(losses, expected, "{backend:?}, {dtype}, {rows}, {accumulate}");
            assert!(weights == other, "{backend:?}, {dtype}, {rows}, {accumulate}: weights differ");
        }
    }
}

#[test]
fn a_row_that_is_not_finite_fails_the_step_that_takes_it() {
    let folder = Folder::new("ahead-bad");
    for (rows, accumulate) in [(FEW, 1), (FEW, 3), (MANY, 1), (MANY, 3)] {
        // With 3 parts, it is in the last one of the second step.
        let bad = rows - 3;
        let data = data(&folder, DType::F32, rows, Some(bad));
        let mut trainer = trainer(&data, accumulate, Choice::Cpu).expect("it loads");
        trainer.step(&data, 0, None).expect("its rows are finite");
        for _ in 0..2 {
            let error = trainer.step(&data, 1, None).expect_err("a row is not finite").to_string();
            assert!(
                error.contains("x.npy") && error.contains(&format!("row {bad}: element 4 is not a finite")),
                "{error}"
            );
            assert!(trainer.evaluate(&data).is_err(), "it takes all rows");
            trainer.step(&data, 2, None).expect("its rows are finite");
        }
    }
    let (x, y) = (folder.path("x.npy"), folder.path("y.npy"));
    let command: &[&str] = &["train", LINEAR, "--data", &x, "--labels", &y, "--loss", "mse", "--lr", "0.01"];
    let rest: &[&str] = &["--batch", "18000", "--no-shuffle", "--backend", "cpu"];
    // It is made ready, but no step takes it.
    ok(&[command, rest, &["--steps", "1"]]);
    fails(1, &[command, rest, &["--steps", "2"]], &["x.npy", "row 35997: element 4"]);
}

#[test]
fn the_rows_are_planned_and_allocated() {
    let folder = Folder::new("ahead-bytes");
    let data = data(&folder, DType::F64, MANY, None);
    for accumulate in [1, 3] {
        let rows = MANY as u64 / 2 / accumulate as u64 * (10 + 1) * 4;
        let mut trainer = trainer(&data, accumulate, Choice::Cpu).expect("it loads");
        trainer.step(&data, 0, Some(1)).expect("it runs");
        let plan = trainer.session().plan();
        assert_eq!(plan.class_bytes(Class::Staging), PREFETCH_STACK + rows);
        assert_eq!((trainer.session().usage().bytes, trainer.host_bytes()), (plan.bytes(), 0));
        check::check(plan).expect("it is sound");
        // The checker counts them itself.
        for by in [-1i64, 1, 256, -(PREFETCH_STACK as i64)] {
            let mut wrong = plan.clone();
            for segment in wrong.segments.iter_mut().filter(|segment| segment.memory == Memory::Prefetch) {
                segment.bytes = segment.bytes.wrapping_add_signed(by);
            }
            for program in &mut wrong.programs {
                let summary = &mut program.summary;
                summary.planned_bytes = summary.planned_bytes.wrapping_add_signed(by);
                summary.staging_bytes = summary.staging_bytes.wrapping_add_signed(by);
            }
            let error = check::check(&wrong).expect_err("it is not the inputs' number").to_string();
            assert!(error.contains("Prefetch memory: expected one segment of"), "{error}");
        }
        let mut twice = plan.clone();
        let own = twice.segments.iter().find(|s| s.memory == Memory::Prefetch).expect("there is one").clone();
        for program in &mut twice.programs {
            program.summary.planned_bytes += own.bytes;
            program.summary.staging_bytes += own.bytes;
        }
        twice.segments.push(own);
        check::check(&twice).expect_err("one is enough");
    }
    let method: &[&str] = &["plan", "--train", LINEAR, "--loss", "mse"];
    for (batch, is_ahead) in [(6000u64, true), (12, false)] {
        let batch_flag = batch.to_string();
        let plan = |target| ok_json(&[method, &["--batch", &batch_flag, "--target", target]]);
        let [cpu, cuda] = ["cpu", "cuda"].map(plan);
        let rows = batch * 11 * 4 + PREFETCH_STACK;
        let planned = if is_ahead { rows } else { 0 };
        assert_eq!((&cpu["classes"]["staging"], &cpu["host_bytes"]), (&planned.into(), &0.into()));
        // On a device of its own memory, they are the host's.
        assert_eq!(cuda["host_bytes"], rows);
        let memory = |plan: &serde_json::Value| plan["segments"].to_string().contains("prefetch");
        assert_eq!((memory(&cpu), memory(&cuda)), (is_ahead, false));
    }
    assert!(ok(&[method, &["--batch", "12", "--target", "cuda"]]).contains("of the host: the next rows"));
    // Few bytes are not read ahead: nothing is planned, and nothing taken, for a second place.
    let data = self::data(&folder, DType::F32, FEW, None);
    let mut trainer = trainer(&data, 1, Choice::Cpu).expect("it loads");
    trainer.step(&data, 0, None).expect("it runs");
    let plan = trainer.session().programs().next().expect("there is one").plan();
    assert_eq!(plan.class_bytes(Class::Staging), 0);
    assert_eq!((trainer.session().usage().bytes, trainer.host_bytes()), (plan.bytes(), 0));
}

#[test]
fn a_log_has_the_time_that_a_step_waits() {
    let folder = Folder::new("ahead-log");
    drop(data(&folder, DType::F32, FEW, None));
    let [x, y, log] = ["x.npy", "y.npy", "log.jsonl"].map(|name| folder.path(name));
    let found = ok(&[
        &["train", LINEAR, "--data", &x, "--labels", &y, "--loss", "mse", "--lr", "0.01", "--batch", "12"],
        &["--steps", "5", "--backend", "cpu", "--log", &log, "--json"],
    ]);
    let found = printed(&["train"], &found);
    let text = std::fs::read_to_string(log).expect("it is written");
    let mut sum = 0.0;
    for line in text.lines() {
        let step: serde_json::Value = serde_json::from_str(line).expect("an object");
        let [wait, all] = ["wait_ms", "ms"].map(|name| step[name].as_f64().expect("a number"));
        assert!((0.0..=all).contains(&wait), "{line}");
        sum += wait / 1e3;
    }
    assert_eq!(text.lines().count(), 5);
    let total = found["wait_seconds"].as_f64().expect("a number");
    assert!((total - sum).abs() < 1e-9 && total > 0.0, "{total} and {sum}");
}

/// Whoever reads the loss of few steps gets the losses and the weights of one who reads all.
#[test]
fn losses_may_be_read_now_and_then() {
    let folder = Folder::new("now-and-then");
    drop(data(&folder, DType::F32, FEW, None));
    let [x, y] = ["x.npy", "y.npy"].map(|name| folder.path(name));
    let run = |every: &str, parts: &str| {
        let [model, log] = ["model.onnx", "log.jsonl"].map(|name| folder.path(&format!("{every}-{parts}-{name}")));
        let found = ok(&[
            &[
                "train", LINEAR, "--data", &x, "--labels", &y, "--loss", "mse", "--lr", "0.01", "--batch", "12",
                "--json",
            ],
            &["--steps", "7", "--backend", "cpu", "--accumulate", parts, "--log-every", every, "--log", &log],
            &["--output", &model],
        ]);
        let losses = std::fs::read_to_string(log).expect("it is written");
        let losses = losses.lines().map(|line| {
            let step: serde_json::Value = serde_json::from_str(line).expect("an object");
            (step["step"].as_u64().expect("a number"), step["loss"].clone())
        });
        let losses: Vec<_> = losses.collect();
        (printed(&["train"], &found)["loss"].clone(), losses, std::fs::read(model).expect("it is written"))
    };
    for parts in ["1", "3"] {
        let (last, all, weights) = run("1", parts);
        assert_eq!(all.iter().map(|(step, _)| *step).collect::<Vec<_>>(), [0, 1, 2, 3, 4, 5, 6]);
        let (own, few, same) = run("3", parts);
        assert!(own == last && same == weights, "{parts} parts");
        // An epoch has so many batches; what ends one is read, and so is the last step.
        let epoch = FEW as u64 / 12;
        let is_read = |step: &u64| (step + 1).is_multiple_of(3) || (step + 1).is_multiple_of(epoch) || *step == 6;
        let expected: Vec<_> = all.into_iter().filter(|(step, _)| is_read(step)).collect();
        assert_eq!(few, expected, "{parts} parts");
        assert!(few.len() < 7, "{few:?}");
    }
}

/// Bytes of anonymous memory, and threads, once there are at most `threads`.
#[cfg(target_os = "linux")]
fn held(threads: usize) -> (u64, usize) {
    let count = || std::fs::read_dir("/proc/self/task").expect("Linux has it").count();
    let wait = || std::thread::sleep(std::time::Duration::from_millis(1));
    (0..2000).take_while(|_| count() > threads).for_each(|_| wait());
    let rollup = std::fs::read_to_string("/proc/self/smaps_rollup").expect("Linux has it");
    let line = rollup.lines().find_map(|line| line.strip_prefix("Anonymous:")).expect("it is a line");
    let kib: u64 = line.trim().trim_end_matches(" kB").parse().expect("it is a number");
    (kib << 10, count())
}

/// No thread and no memory stays of trainers, whether their last step failed or left rows that nobody took. The test runs in a process of its
/// own, as others make threads, too.
#[cfg(target_os = "linux")]
#[test]
fn many_trainers_leave_nothing() {
    const CHILD: &str = "PLIMSOLL_TRAINERS";
    if std::env::var_os(CHILD).is_none() {
        let mut child = std::process::Command::new(std::env::current_exe().expect("it has a path"));
        let child = child.args(["--exact", "prefetch::many_trainers_leave_nothing", "--test-threads=1"]);
        let output = child.env(CHILD, "1").output().expect("it starts");
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        assert!(output.status.success(), "{}{}", text(&output.stdout), text(&output.stderr));
        return;
    }
    let folder = Folder::new("ahead-leak");
    let data = data(&folder, DType::F32, MANY / 3, Some(MANY / 3 - 3));
    let threads = held(usize::MAX).1;
    let round = |at: u64| {
        let mut trainer = trainer(&data, 1, Choice::Cpu).expect("it loads");
        assert_eq!(trainer.step(&data, at % 2, None).is_err(), at % 2 == 1);
    };
    (0..10).for_each(round);
    let before = held(threads);
    assert_eq!(before.1, threads);
    (10..100).for_each(round);
    let after = held(threads);
    assert_eq!(after.1, threads);
    assert!(after.0 <= before.0 + (1 << 20), "{} bytes at first, {} at last", before.0, after.0);
}

/// A slot may be asked for other rows than those that it has, or dropped while it is filled.
#[test]
fn a_slot_has_what_was_asked_for() {
    let folder = Folder::new("ahead-slot");
    let data = data(&folder, DType::F64, FEW, None);
    let facts = [10, 1].map(|columns| Fact::new(DType::F32, [4, columns]));
    let rows = || [&data.inputs[0].1, &data.labels].into_iter();
    let batch = |first: usize, seed: u64| Batch { order: Order::new(24, Some(seed), 0), first, count: 4 };
    let expected = |batch: Batch| {
        rows().zip(&facts).map(move |(rows, fact)| {
            let mut bytes = vec![0; fact.shape.numel() * 4];
            let places = (batch.first..batch.first + 4).map(|place| batch.order.row(place));
            rows.fill(places, fact, &mut bytes).expect("they are finite");
            bytes
        })
    };
    let mut ahead = Prefetch::new(&facts, Box::new(vec![0; 4 * 11 * 4]));
    for at in 0..200 {
        let wanted = batch(at % 5 * 4, at as u64 / 20);
        ahead.wait(rows(), wanted).expect("they are finite");
        assert!(ahead.columns().map(|(_, bytes)| bytes.to_vec()).eq(expected(wanted)), "{at}");
        let next = (at + 1 + usize::from(at % 7 == 0)) % 5 * 4;
        ahead.ask(rows(), batch(next, at as u64 / 20));
        if at % 11 == 0 {
            ahead.ask(rows(), batch(20, 3));
        }
    }
    // Rows of another length are refused, not cut.
    let error = ahead.wait([&data.labels, &data.labels].into_iter(), batch(0, 0)).expect_err("too short").to_string();
    assert!(error.contains("y.npy") && error.contains("expected a batch of"), "{error}");
}
