//! The choices between memory and speed: what each costs is in the plan, and `--prefer` turns all of them.

use crate::cli::{fails, ok, ok_json};
use crate::common::{self, Folder};
use crate::graphs;
use plimsoll::internals::plan::check::check;
use plimsoll::internals::plan::{self, Job, Knob, Prefer};
use plimsoll::{Because, DType, Graph, Recipe, Target, Trace};

/// Branches that meet, with products that a library computes.
fn branches() -> Graph {
    let g = Trace::new("branches");
    let part = |k: usize| {
        let [x, w] = ["x", "w"].map(|name| g.input(&format!("{name}{k}"), DType::F32, [256, 128 << k]));
        x.matmul(w.transpose(&[1, 0])).softmax(-1)
    };
    let parts: Vec<_> = (0..4).map(part).collect();
    g.output("y", g.concat(&parts, 1));
    g.finish().expect("the graph is sound")
}

fn planned(graph: &Graph, target: &Target, prefer: Prefer, limit: Option<u64>) -> plan::Plan {
    let recipe = Recipe { prefer, ..Recipe::default() };
    let plan = plan::plan(&Job { recipe, ..Job::of(graph.clone(), target).within(limit) }).expect("it is planned").plan;
    check(&plan).expect("it is sound");
    plan
}

/// What comes first decides about the bytes: memory takes the fewest, speed the most, and none more than a limit that the default fits.
#[test]
fn what_comes_first_decides_about_the_bytes() {
    let digits = graphs::import("digits.onnx", &[("batch", 64)]);
    for target in [Target::cpu(2), Target::cuda(), Target::wgpu()] {
        for graph in [&digits, &branches()] {
            let [memory, balance, speed] =
                [Prefer::Memory, Prefer::Balance, Prefer::Speed].map(|first| planned(graph, &target, first, None));
            let bytes = [&memory, &balance, &speed].map(plan::Plan::bytes);
            assert!(bytes.is_sorted(), "{} on {}: {bytes:?}", graph.name, target.name);
            assert!(memory.choices.iter().all(|knob| knob.bytes <= 0), "{:?}", memory.choices);
            let within = planned(graph, &target, Prefer::Speed, Some(balance.bytes()));
            assert!(within.bytes() <= balance.bytes(), "{} on {}", graph.name, target.name);
            assert_eq!(planned(graph, &target, Prefer::Balance, None), balance, "the same each time");
        }
    }
    let wide = planned(&branches(), &Target::cuda(), Prefer::Speed, None);
    assert!(wide.choices.iter().any(|knob| knob.what.ends_with("streams") && knob.because == Because::Speed));
    // A choice is of a program that there is.
    let mut wrong = wide.clone();
    wrong.choices.push(Knob { program: Some("other".into()), ..wide.choices[0].clone() });
    assert!(check(&wrong).expect_err("there is no such program").to_string().contains("other"));
}

/// Whatever comes first, results are the same.
#[test]
fn results_do_not_depend_on_what_comes_first() {
    for opener in &common::backends() {
        let graph = branches();
        let results = [Prefer::Memory, Prefer::Balance, Prefer::Speed].map(|prefer| {
            let recipe = Recipe { prefer, ..Recipe::default() };
            let options = plimsoll::Options { recipe, tuned: false, ..plimsoll::Options::default() };
            let session = common::load(graph.clone(), (opener.1)(), opener.0, &options).expect("it loads");
            let mut state = 3;
            let inputs: Vec<_> = session.inputs().iter().map(|port| common::random(&mut state, &port.shape)).collect();
            let named = session.inputs().iter().map(|port| &port.name[..]).zip(inputs).collect::<Vec<_>>();
            session.run_poisoned(&named).expect("it runs")
        });
        for other in &results[1..] {
            for (a, b) in results[0].iter().zip(other) {
                common::agrees(&a.1, &b.1, 1e-5).unwrap_or_else(|e| panic!("{}: {e}", opener.0));
            }
        }
    }
}

/// The command lists the choices, with bytes and reasons, and tells how those of two plans differ.
#[test]
fn choices_are_listed_and_compared() {
    let folder = Folder::new("choices");
    let train = ["plan", "--train", "graphs/digits.onnx", "--loss", "cross_entropy", "--batch", "24", "--threads", "2"];
    let [one, other] = ["one.json", "other.json"].map(|name| folder.path(name));
    let told = ok(&[&train, &["-o", &one, "--verbose"]]);
    assert!(told.contains("choice") && told.contains("to take less memory"), "{told}");
    ok(&[&train, &["-o", &other, "--prefer", "memory"]]);
    let [before, after] = [&one, &other].map(|file| {
        let text = std::fs::read_to_string(file).expect("it was written");
        serde_json::from_str::<serde_json::Value>(&text).expect("it is JSON")
    });
    let again = |plan: &serde_json::Value| {
        let choices = plan["choices"].as_array().cloned().unwrap_or_default();
        choices.iter().filter(|choice| choice["what"] == "recomputation").map(|choice| choice["bytes"].as_i64()).next()
    };
    assert_eq!(again(&before), None);
    assert!(again(&after).flatten().is_some_and(|bytes| bytes < 0), "{}", after["choices"]);
    let differs = ok(&[&["diff", &one, &other]]);
    assert!(differs.contains("chosen only in the second plan") && differs.contains("recomputation"), "{differs}");
    assert!(ok_json(&[&["diff", &one, &other]])["programs"][0]["diff"]["choices"][1].is_array());
    fails(1, &[&train, &["--prefer", "both"]], &["both"]);
}

/// Under a limit, speed comes as far as the limit allows: what the default fits, it fits, and it computes no more again.
#[test]
fn speed_fits_what_the_default_fits() {
    let train =
        ["plan", "--train", "graphs/digits.onnx", "--loss", "cross_entropy", "--batch", "24", "--target", "cuda"];
    for limit in ["1036100", "1085308", "1200000"] {
        let [default, speed] = [&[][..], &["--prefer", "speed"]]
            .map(|flags| ok_json(&[&train, &["--memory-limit", limit], flags])["recompute"]["extra_flop"].as_u64());
        assert!(speed <= default, "{limit}: {speed:?}, {default:?}");
    }
}

/// Chunks of several programs are as small as it takes for all of them together to fit.
#[test]
fn chunks_of_several_programs_fit_together() {
    let files = ["a=graphs/digits.onnx", "b=graphs/mlp.onnxtxt", "--set", "a:batch=2", "--set", "b:batch=100"];
    let plan = |flags: &[&str]| ok_json(&[&["plan"], &files, &["--chunks", "4"], flags])["planned_bytes"].as_u64();
    let bytes = plan(&[]).expect("it is planned");
    assert!(plan(&["--memory-limit", &bytes.to_string()]) <= Some(bytes));
    // The smallest plan is no larger than one under a limit.
    let one = ["plan", "graphs/digits.onnx", "--set", "batch=24", "--chunks", "4"];
    let least = ok_json(&[&one, &["--prefer", "memory"]])["planned_bytes"].as_u64();
    assert!(least <= ok_json(&[&one])["planned_bytes"].as_u64());
    assert!(least <= ok_json(&[&one, &["--prefer", "speed"]])["planned_bytes"].as_u64());
}
