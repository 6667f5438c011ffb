//! Trainings that are interrupted, and go on: no bit differs from one that was not.

use crate::cli::{fails, ok, ok_json};
use crate::common::{Folder, printed, random};
use plimsoll::internals::safetensors::SafeTensors;
use plimsoll::{Attrs, DType, Trace};
use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const TRAIN: &[&str] = &["train", "graphs/digits.onnx", "--loss", "cross_entropy", "--lr", "0.001", "--batch", "12"];
const DATA: &[&str] = &["--data", "graphs/digits-images.npy", "--labels", "graphs/digits-labels.npy"];
const CPU: &[&str] = &["--backend", "cpu", "--threads", "1"];

fn command(args: &[&[&str]]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_plimsoll"));
    command.args(args.concat()).current_dir(env!("CARGO_MANIFEST_DIR")).stdout(Stdio::null()).stderr(Stdio::null());
    command
}

fn child(args: &[&[&str]]) -> Child {
    command(args).spawn().expect("the program starts")
}

/// The steps of a folder's checkpoints.
fn steps(folder: &str) -> Vec<u64> {
    let names = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.file_name());
    let step = |name: std::ffi::OsString| name.to_str()?.strip_prefix("step-")?.split('.').next()?.parse().ok();
    let mut found: Vec<u64> = names.filter_map(step).collect();
    found.sort_unstable();
    found
}

/// Waits until a step's checkpoint is there, or the process has ended.
fn wait_for(folder: &str, step: u64, child: &mut Child) {
    let begin = Instant::now();
    while steps(folder).last().is_none_or(|&last| last < step) && child.try_wait().expect("it is ours").is_none() {
        assert!(begin.elapsed() < Duration::from_secs(120), "no checkpoint of step {step}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// A model with a Dropout, for half a batch of the digits' images.
fn dropping(folder: &Folder) -> String {
    let trace = Trace::new("dropping");
    let mut state = 11;
    let mut weight = |name, shape: [usize; 2]| trace.constant(name, random(&mut state, &shape.into()));
    let (first, head) = (weight("first", [64, 48]), weight("head", [48, 10]));
    let image = trace.input("image", DType::F32, [6, 1, 8, 8]);
    trace.output("y", image.flatten(1).matmul(first).relu().op("Dropout", &[], Attrs::default()).matmul(head));
    let path = folder.path("dropping.onnx");
    trace.finish().expect("a graph").save(&path).expect("it is written");
    path
}

/// Killed ten times, at moments that are drawn: while it starts, within a step, while it writes a checkpoint.
#[test]
fn a_training_that_is_killed_goes_on_bit_for_bit() {
    let folder = Folder::new("killed");
    let method: &[&str] = &["--accumulate", "2", "--ema", "0.9", "--clip-norm", "1", "--steps", "40"];
    let model = dropping(&folder);
    let train = [&["train", &model], &TRAIN[2..]].concat();
    let whole = folder.path("whole.onnx");
    ok(&[&train, DATA, CPU, method, &["--output", &whole]]);
    let (points, log) = (folder.path("points"), folder.path("log"));
    let parts: &[&str] = &["--checkpoint", &points, "--save-every", "1", "--resume", "--log", &log];
    let mut drawn = 17u64;
    let mut below = |most: u64| {
        drawn = drawn.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (drawn >> 33) % most
    };
    for _ in 0..10 {
        let mut running = child(&[&train, DATA, CPU, method, parts]);
        // Some end before their first step is done.
        if below(5) > 0 {
            let done = steps(&points).last().copied().unwrap_or(0);
            wait_for(&points, (done + 1 + below(3)).min(40), &mut running);
        }
        std::thread::sleep(Duration::from_micros(below(20_000)));
        running.kill().expect("it is ours");
        running.wait().expect("it has ended");
        assert!(steps(&points).len() <= 3, "{:?}", steps(&points));
    }
    let last = folder.path("last.onnx");
    ok(&[&train, DATA, CPU, method, parts, &["--output", &last]]);
    assert!(fs::read(&whole).expect("it was written") == fs::read(&last).expect("it was written"), "other weights");
    assert_eq!(steps(&points), [39, 40]);
    let text = fs::read_to_string(&log).expect("it was written");
    let logged: Vec<u64> = text
        .lines()
        .map(|line| serde_json::from_str::<serde_json::Value>(line).expect("JSON")["step"].as_u64().expect("a number"))
        .collect();
    assert!(logged.iter().copied().eq(0..40), "{logged:?}");
    // All of it is done: nothing runs, and the same model is written.
    let record = ok_json(&[&train, DATA, CPU, method, parts, &["--output", &last]]);
    assert_eq!(record["steps"], 40);
    assert!(fs::read(&whole).expect("it was written") == fs::read(&last).expect("it was written"), "other weights");
    let left: Vec<_> = folder.names("points").into_iter().filter(|name| name.contains("partial")).collect();
    assert!(left.is_empty(), "{left:?}");
}

#[cfg(unix)]
#[test]
fn an_interrupted_training_finishes_its_step_and_writes_a_checkpoint() {
    let folder = Folder::new("interrupted");
    let points = folder.path("points");
    let steps_of = |count: &'static str| ["--steps", count];
    let parts: &[&str] = &["--checkpoint", &points, "--save-every", "1000"];
    for (run, (signal, expected)) in [("-INT", 130), ("-TERM", 143)].into_iter().enumerate() {
        let log = ["--resume", "--log", &folder.path("log")];
        let out = folder.path("out");
        let file = fs::File::create(&out).expect("it can be written");
        let words = [TRAIN, DATA, CPU, parts, &steps_of("100000"), &log];
        let mut running = command(&words).stdout(file).spawn().expect("the program starts");
        let begin = Instant::now();
        // A step is in hand once the log is there.
        while !Path::new(&folder.path("log")).exists() {
            assert!(begin.elapsed() < Duration::from_secs(60), "no log");
            std::thread::sleep(Duration::from_millis(5));
        }
        std::thread::sleep(Duration::from_millis(200));
        let sent = Command::new("kill").args([signal, &running.id().to_string()]).status().expect("kill runs");
        let code = running.wait().expect("it ends").code();
        assert!(sent.success() && code == Some(expected), "{signal}: {code:?}: it ends by itself");
        let last = *steps(&points).last().expect("a checkpoint");
        let text = fs::read_to_string(&out).expect("it was written");
        let words = format!("go on with --resume: {points}/step-{last:09}.safetensors");
        assert!(text.contains(&words), "{signal}: {words} in {text}");
        fs::remove_file(folder.path("log")).unwrap_or_else(|e| panic!("{run}: {e}"));
    }
}

/// Where stderr is no terminal, each epoch has a line. A training that is done validates once more.
#[test]
fn epochs_are_told_and_so_is_what_is_done() {
    let folder = Folder::new("told");
    let points = folder.path("points");
    let valid: &[&str] = &["--valid", "graphs/digits-images.npy", "--valid-labels", "graphs/digits-labels.npy"];
    let told = |more: &[&[&str]]| {
        let own: &[&str] = &["--epochs", "2", "--checkpoint", &points, "--resume"];
        let output = command(&[&[TRAIN, DATA, CPU, own], more].concat())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .output()
            .expect("it starts");
        [output.stdout, output.stderr].map(|text| String::from_utf8(text).expect("it is text"))
    };
    let [_, log] = told(&[]);
    let lines: Vec<&str> = log.lines().filter(|line| line.starts_with("epoch ")).collect();
    assert!(
        matches!(lines[..], [first, second] if first.starts_with("epoch    1  loss ") && second.ends_with(" s")),
        "{log}"
    );
    assert!(log.contains("points has no checkpoint: the training begins at step 1"), "{log}");
    let [text, log] = told(&[valid]);
    assert!(!text.contains("wrote "), "{text}");
    assert!(!log.contains("epoch  ") && log.contains("60 of 60 steps were done"), "{log}");
    assert!(text.contains("no step was left to do; validation loss ") && text.contains("accuracy "), "{text}");
    std::fs::remove_dir_all(&points).expect("it is there");
    let steps = folder.path("steps");
    let [text, log] = told(&[valid, &["--log", &steps]]);
    let last = format!("{points}/step-000000060.safetensors");
    assert!(text.ends_with(&format!("wrote {steps}: the log\nwrote {last}: the last checkpoint\n")), "{text}");
    // The loss of an epoch is the mean of its 30 steps.
    let written = fs::read_to_string(&steps).expect("it was written");
    let losses = written.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).expect("a record"));
    let losses: Vec<f64> = losses.map(|record| record["loss"].as_f64().expect("a loss")).collect();
    let means: Vec<_> =
        losses.chunks(30).map(|epoch| format!("  loss {:8.4}  ", epoch.iter().sum::<f64>() / 30.0)).collect();
    let epochs: Vec<&str> = log.lines().filter(|line| line.starts_with("epoch ")).collect();
    assert!(means.len() == 2 && epochs.iter().zip(&means).all(|(line, mean)| line.contains(mean)), "{means:?}: {log}");
    assert_eq!(log.lines().filter(|line| line.contains("  validation ")).count(), 2, "{log}");
}

#[test]
fn checkpoints_of_other_trainings_and_damaged_ones_are_refused() {
    let folder = Folder::new("refused");
    let points = folder.path("points");
    let again: &[&str] = &["--checkpoint", &points, "--resume"];
    ok(&[TRAIN, DATA, CPU, &["--steps", "2", "--checkpoint", &points]]);
    let file = format!("{points}/step-000000002.safetensors");
    let sgd: &[&str] = &["--optimizer", "sgd", "--momentum", "0.9"];
    fails(
        1,
        &[TRAIN, DATA, CPU, again, &["--steps", "4"], sgd],
        &[&file, "another training", "--optimizer was adam, is sgd"],
    );
    fails(1, &[TRAIN, DATA, CPU, again, &["--steps", "4", "--seed", "1"]], &[&file, "--seed was 0, is 1"]);
    let frozen = "--freeze was not given, is stem*";
    fails(1, &[TRAIN, DATA, CPU, again, &["--steps", "4", "--freeze", "stem*"]], &[&file, frozen]);
    fails(
        1,
        &[TRAIN, DATA, CPU, again, &["--steps", "4", "--clip-norm", "2"]],
        &["--clip-norm was not given, is 2.0;"],
    );
    let other: &[&str] = &["--accumulate", "2"];
    let words = [&file, "another training: --accumulate was 1, is 2; resume"];
    fails(1, &[TRAIN, DATA, CPU, again, &["--steps", "4"], other], &words);
    let other = [&["train", "graphs/digits-fresh.onnx"], &TRAIN[2..]].concat();
    let words = ["another training: the model is another one"];
    fails(1, &[&other, DATA, CPU, again, &["--steps", "4"]], &words);
    let good = fs::read(&file).expect("it was written");
    fs::write(&file, &good[..good.len() - 100]).expect("it can be written");
    fails(1, &[TRAIN, DATA, CPU, again, &["--steps", "4"]], &[&file, "part of one"]);
    // A bit of the states, and one of the place.
    let place = br#"\"step\":2"#;
    let digit = good.windows(place.len()).position(|text| text == place).expect("it is there") + place.len() - 1;
    for (at, bit) in [(good.len() - 100, 4), (digit, 1)] {
        let mut flipped = good.clone();
        flipped[at] ^= bit;
        fs::write(&file, &flipped).expect("it can be written");
        fails(1, &[TRAIN, DATA, CPU, again, &["--steps", "4"]], &[&file, "it is damaged"]);
    }
    fs::write(&file, &good).expect("it can be written");
    assert_eq!(ok_json(&[TRAIN, DATA, CPU, again, &["--steps", "4"]])["steps"], 4);
    fails(1, &[TRAIN, DATA, CPU, &["--steps", "4", "--resume"]], &["--checkpoint"]);
    // Checkpoints of another training would be taken for those of this one.
    let before = folder.names("points");
    fails(
        1,
        &[TRAIN, DATA, CPU, &["--steps", "1", "--checkpoint", &points]],
        &[&points, "it has checkpoints of a training: add --resume", "or name another folder"],
    );
    assert_eq!(folder.names("points"), before);
}

/// The best checkpoint is that of the epoch with the least validation loss, whatever comes after it.
#[test]
fn the_best_checkpoint_is_that_of_the_least_validation_loss() {
    let folder = Folder::new("best");
    let valid: &[&str] =
        &["--valid", "graphs/digits-images.npy", "--valid-labels", "graphs/digits-labels.npy", "--batch", "60"];
    // A rate that makes the loss rise and fall.
    let train: &[&str] = &["train", "graphs/digits-fresh.onnx", "--loss", "cross_entropy", "--lr", "0.05"];
    let points = |epochs: &str| folder.path(&format!("points-{epochs}"));
    let mut losses = Vec::new();
    for epochs in ["1", "2", "3", "4", "5", "6", "7"] {
        let record = ok(&[train, DATA, CPU, valid, &["--epochs", epochs, "--checkpoint", &points(epochs), "--json"]]);
        let record = printed(train, &record);
        losses.push(record["valid_loss"].as_f64().expect("a number"));
    }
    let (epoch, least) = losses.iter().enumerate().min_by(|a, b| a.1.total_cmp(b.1)).expect("there are some");
    assert!(epoch > 0 && epoch + 1 < losses.len(), "the least loss is on neither end: {losses:?}");
    let open = |path: String| SafeTensors::open(Path::new(&path)).expect("it is a checkpoint");
    let best = open(format!("{}/best.safetensors", points("7")));
    let place: serde_json::Value =
        serde_json::from_str(best.metadata("training").expect("it has a place")).expect("JSON");
    let step = (epoch as u64 + 1) * 6;
    assert_eq!((place["step"].as_u64(), place["best"].as_f64()), (Some(step), Some(*least)), "{losses:?}");
    let same = open(format!("{}/step-{step:09}.safetensors", points(&(epoch + 1).to_string())));
    for name in same.names() {
        let [best, same] = [&best, &same].map(|file| file.tensor(name).expect("it is there"));
        assert!(best.bytes() == same.bytes(), "{name}");
    }
    assert_eq!(steps(&points("7")), [36, 42]);
}

/// A disk that takes no more bytes: the error says so, and the last checkpoint is still there.
#[cfg(unix)]
#[test]
fn a_full_disk_leaves_the_last_checkpoint() {
    let folder = Folder::new("full");
    let points = folder.path("points");
    let method = [TRAIN, DATA, CPU, &["--checkpoint", &points, "--save-every", "1", "--resume"]].concat();
    ok(&[&method, &["--steps", "2"]]);
    let before = fs::read(format!("{points}/step-000000002.safetensors")).expect("it was written");
    // Files of at most 16 blocks of 512 or 1024 bytes, which a checkpoint is larger than.
    let words =
        format!("trap '' XFSZ; ulimit -f 16; exec {} {} --steps 4", env!("CARGO_BIN_EXE_plimsoll"), method.join(" "));
    let ran =
        Command::new("sh").args(["-c", &words]).current_dir(env!("CARGO_MANIFEST_DIR")).output().expect("sh runs");
    let error = String::from_utf8_lossy(&ran.stderr);
    assert!(!ran.status.success() && error.contains("write the states"), "{error}");
    assert_eq!(folder.names("points"), ["step-000000001.safetensors", "step-000000002.safetensors"]);
    assert!(fs::read(format!("{points}/step-000000002.safetensors")).expect("it is there") == before);
    assert_eq!(ok_json(&[&method, &["--steps", "4"]])["steps"], 4);
}
