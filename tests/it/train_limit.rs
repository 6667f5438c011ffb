//! Limits of trainings: what is computed again for them, what is refused, and what would help.

use crate::cli::ok_json;
use crate::common::{Folder, printed, random};
use plimsoll::internals::advise::Trained;
use plimsoll::internals::onnx::{self, Model};
use plimsoll::internals::plan::Planner;
use plimsoll::internals::train::curve::Point;
use plimsoll::internals::train::{Loss, Optimizer, Rate, Training};
use plimsoll::{DType, Error, Recipe, Target, Trace};
use serde_json::Value;
use std::process::Command;

/// The points of a sweep between the bound and the whole.
const POINTS: u64 = 16;

fn training(accumulate: usize, ema: Option<f64>) -> Training {
    let adam = Optimizer::Adam { beta1: 0.9, beta2: 0.999, eps: 1e-8, decoupled: true };
    Training { accumulate, ema, ..Training::new(Loss::CrossEntropy, adam, Rate::constant(0.1)) }
}

/// Blocks of two products, beside which their input goes on.
fn residual(folder: &Folder, blocks: usize) -> Model {
    let trace = Trace::new("residual");
    let mut state = 5;
    let mut weight = |name: String| trace.constant(&name, random(&mut state, &[32, 32].into()));
    let mut y = trace.input("x", DType::F32, [96, 32]);
    for block in 0..blocks {
        y = y + y.matmul(weight(format!("a{block}"))).tanh().matmul(weight(format!("b{block}"))).sigmoid();
    }
    trace.output("y", y);
    let path = folder.path("residual.onnx");
    trace.finish().expect("a graph").save(&path).expect("it is written");
    onnx::load(path.as_ref()).expect("it was written")
}

/// The bytes under a limit, and the operations that are done again; or the bytes that are needed.
fn within(planner: &mut Planner, case: &Trained, memory: Option<u64>) -> Result<(u64, u64), u64> {
    match planner.within(memory) {
        Ok(planned) => {
            let point = Point::of(&planned.plan, case.training.accumulate);
            Ok((planned.plan.bytes(), point.recompute.extra_flop))
        }
        Err(Error::Fit { needed, limit, .. }) if Some(limit) == memory => Err(needed),
        Err(error) => panic!("{error}"),
    }
}

/// More memory is never refused where less is taken, and never does more again. What a refusal names is taken, and a byte less is not.
fn sweep(what: &str, case: &Trained) {
    let job = case.job().expect("there are graphs");
    let mut planner = Planner::new(&job).expect("it is planned");
    let bound = planner.bound().expect("it is planned").bytes;
    let (full, _) = within(&mut planner, case, None).expect("there is no limit");
    let least = within(&mut planner, case, Some(1)).expect_err("a byte is too little");
    assert!(bound <= least && least <= full, "{what}: at least {bound}, {least} found, {full} without a limit");
    let mut limits: Vec<u64> = (0..=POINTS).map(|point| bound + (full - bound) * point / POINTS).collect();
    limits.extend([least - 1, least, least + 1, full - 1, full, full + 1]);
    limits.sort_unstable();
    let mut last = u64::MAX;
    for (at, limit) in limits.into_iter().enumerate() {
        let found = within(&mut planner, case, Some(limit));
        // Another search knows nothing of the limits before.
        if at % 8 == 3 {
            let mut own = Planner::new(&job).expect("it is planned");
            assert_eq!(found, within(&mut own, case, Some(limit)), "{what}: {limit}");
        }
        match found {
            Ok((bytes, work)) => {
                assert!(
                    limit >= least && bytes <= limit,
                    "{what}: {bytes} within {limit}, though {least} is the least"
                );
                assert!(work <= last, "{what}: {limit} bytes take {work} operations, fewer take {last}");
                last = work;
            }
            Err(needed) => assert!(limit < least && needed == least, "{what}: {limit} is refused: {needed}, {least}"),
        }
    }
}

#[test]
fn more_memory_is_never_worse() {
    let folder = Folder::new("limits");
    let digits = onnx::load("graphs/digits.onnx".as_ref()).expect("it is there");
    let residual = residual(&folder, 6);
    let cases = [
        ("digits", &digits, 24, training(1, None)),
        ("digits in parts", &digits, 48, training(3, Some(0.9))),
        ("residual", &residual, 96, training(1, None)),
        ("residual, clipped", &residual, 96, Training { clip: Some(1.0), ..training(1, None) }),
    ];
    for (what, model, batch, training) in cases {
        let (target, recipe) = (Target::cpu(2), Recipe::default());
        sweep(
            what,
            &Trained {
                model: model.clone(),
                dims: Vec::new(),
                batch,
                training,
                target,
                recipe,
                runs: 1,
                sharding: None,
            },
        );
    }
}

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| panic!("expected a number, found {value}"))
}

/// A command that is refused with these words in its error: what it prints, and its error.
#[track_caller]
pub fn refused(args: &[&[&str]], words: &[&str]) -> [String; 2] {
    let mut command = Command::new(env!("CARGO_BIN_EXE_plimsoll"));
    let ran = command.args(args.concat()).current_dir(env!("CARGO_MANIFEST_DIR")).output().expect("the program starts");
    let [out, err] = [ran.stdout, ran.stderr].map(|text| String::from_utf8(text).expect("it is text"));
    assert_eq!(ran.status.code(), Some(2), "{args:?}: {err}");
    let missing: Vec<_> = words.iter().filter(|word| !err.contains(**word)).collect();
    assert!(missing.is_empty(), "{args:?}: {missing:?} missing in {err}");
    [out, err]
}

/// A refusal has the bound, the smallest plan, and remedies with the bytes of their plans. What it names is accepted.
#[test]
fn a_refused_training_is_told_what_would_help() {
    let record = |more: &[&[&str]]| -> Value {
        let [out, _] = refused(&[&[&["plan", "--train", "--json"][..]], more].concat(), &["does not fit"]);
        printed(&["plan"], &out)
    };
    let flags = ["graphs/digits.onnx", "--loss", "cross_entropy", "--batch", "48", "--threads", "2"];
    let data =
        ["--data", "graphs/digits-images.npy", "--labels", "graphs/digits-labels.npy", "--lr", "0.1", "--steps", "1"];
    let planned = |more: &[&str]| number(&ok_json(&[&["plan", "--train"], &flags, more])["planned_bytes"]);
    let whole = planned(&[]);
    let limit = number(&record(&[&flags, &["--memory-limit", "1"]])["needed_bytes"]) - 1;
    let limited = ["--memory-limit", &limit.to_string()];
    let told = record(&[&flags, &limited]);
    let [needed, bound] = [&told["needed_bytes"], &told["bound"]["bytes"]].map(number);
    assert!(limit < needed && bound <= needed, "{told}");
    assert_eq!((number(&told["whole_bytes"]), number(&told["limit_bytes"])), (whole, limit));
    assert_eq!(planned(&["--memory-limit", &needed.to_string()]), needed);
    let remedies = told["remedies"].as_array().expect("remedies");
    let mut names = Vec::new();
    for remedy in remedies {
        let (name, change) = (remedy["name"].as_str().expect("a name"), remedy["change"].as_str().expect("a change"));
        names.push(name);
        if name == "recomputation" {
            assert!(change.contains(&needed.to_string()) && number(&remedy["planned_bytes"]) == needed, "{remedy}");
            continue;
        }
        // What fits is planned so with the flag; the last flag of a name counts.
        let flag: Vec<&str> = change.split(' ').map(|word| word.trim_matches('\'')).collect();
        let mut changed: Vec<&str> = flags.to_vec();
        match flag[0] {
            "--batch" => changed[4] = flag[1],
            _ => changed.extend(&flag),
        }
        let bytes = number(&remedy["planned_bytes"]);
        if bytes <= limit {
            assert_eq!(
                number(&ok_json(&[&["plan", "--train"], &changed, &limited])["planned_bytes"]),
                bytes,
                "{remedy}"
            );
        } else {
            // What no plan makes fit is planned without the limit.
            let record = record(&[&changed, &limited]);
            assert!([&record["needed_bytes"], &record["whole_bytes"]].map(number).contains(&bytes), "{remedy}");
        }
    }
    assert!(names.starts_with(&["recomputation"]) && names.contains(&"smaller batch"), "{names:?}");
    for name in ["halves", "smaller optimizer", "the last layer alone", "accumulation"] {
        assert!(names.contains(&name), "{names:?}");
    }
    let texts = [
        refused(&[&["plan", "--train"], &flags, &limited], &["does not fit"]),
        refused(&[&["train"], &flags, &data, &["--backend", "cpu"], &limited], &["does not fit"]),
    ];
    for [_, text] in texts {
        for words in ["whatever is computed again, these kernels take at least", "what would help", "--batch 24"] {
            assert!(text.contains(words), "{words} missing in\n{text}");
        }
    }
    // A device that stores halves is told of them, too.
    let cuda = ["--target", "cuda"];
    let told = record(&[&flags[..5], &cuda, &["--memory-limit", "1000"]]);
    let limit = (number(&told["needed_bytes"]) - 1).to_string();
    let told = record(&[&flags[..5], &cuda, &["--memory-limit", &limit]]);
    assert!(told["remedies"].to_string().contains("--precision bf16"), "{told}");
}
