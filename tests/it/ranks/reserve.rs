//! What NCCL takes of a card is a part of the plan of a rank.

use super::mesh;
use crate::common::Folder;
use crate::graphs;
use plimsoll::internals::fit::{Asked, Cluster, fit};
use plimsoll::internals::plan::{self, Class, Graphs, Job, Kept, Plan, Sharding, check};
use plimsoll::internals::target::{Memory, RESERVE};
use plimsoll::{Error, Target};
use std::process::Command;

/// The plan of a rank of a mesh, under a limit.
fn planned(target: &Target, on: &str, limit: Option<u64>) -> Result<Plan, Error> {
    let mesh = mesh(on);
    let mlp = graphs::import("mlp.onnxtxt", &[("batch", 8)]);
    let target = target.among(mesh.ranks());
    let sharding = Some(Sharding { mesh, rank: 0, by: Vec::new(), ..Sharding::default() });
    plan::plan(&Job { sharding, ..Job::of(mlp, &target) }.within(limit)).map(|planned| planned.plan)
}

fn bytes(on: &str, target: &Target) -> u64 {
    let plan = planned(target, on, None).expect("it is planned");
    let summary = &plan.programs[0].summary;
    assert_eq!(summary.reserve_bytes, plan.class_bytes(Class::Reserve));
    assert_eq!(summary.planned_bytes, plan.segments.iter().map(|segment| segment.bytes).sum::<u64>());
    summary.reserve_bytes
}

#[test]
fn ranks_on_cuda_leave_memory_to_nccl() {
    let cuda = Target::cuda();
    assert_eq!(bytes("data=2", &cuda), RESERVE);
    assert_eq!(bytes("data=2", &Target { reserve: 3 << 20, ..cuda.clone() }), 3 << 20);
    for (on, target) in [("data=1", &cuda), ("data=2", &Target::cpu(1))] {
        assert_eq!(bytes(on, target), 0);
    }
}

#[test]
fn the_limit_counts_the_reserve() {
    let cuda = Target::cuda();
    let needed = planned(&cuda, "data=2", None).expect("it is planned").bytes();
    assert!(needed > RESERVE);
    planned(&cuda, "data=2", Some(needed)).expect("it fits");
    let error = planned(&cuda, "data=2", Some(RESERVE)).expect_err("there is no room for the rest");
    assert!(matches!(error, Error::Fit { needed, .. } if needed > RESERVE), "{error}");
    // On one card alone nothing is reserved.
    let mlp = graphs::import("mlp.onnxtxt", &[("batch", 8)]);
    let programs = || Ok(vec![(String::new(), Graphs::from(mlp.clone()), 1)]);
    let found = fit(&Asked {
        first: &|_| (),
        programs: &programs,
        job: Job::of(mlp.clone(), &cuda),
        limit: 1 << 30,
        cards: 1..=2,
        by: Vec::new(),
        kept: vec![Kept::Whole],
        cluster: Cluster::default(),
    });
    let found = found.expect("it is planned");
    let fewest = found.fewest.expect("it fits");
    assert!(fewest.cards == 1 && fewest.card_bytes < RESERVE, "{fewest:?}");
}

#[test]
fn plans_with_another_reserve_are_refused() {
    let plan = planned(&Target::cuda(), "data=2", None).expect("it is planned");
    let at = plan.segments.iter().position(|segment| segment.class == Class::Reserve).expect("it has one");
    let changes: [&dyn Fn(&mut Plan); 5] = [
        &|plan| plan.target.reserve += 1,
        &|plan| plan.segments[at].bytes -= 1,
        &|plan| _ = plan.segments.remove(at),
        &|plan| plan.segments.push(plan.segments[at].clone()),
        &|plan| plan.segments[at].memory = Memory::Device,
    ];
    for (number, change) in changes.iter().enumerate() {
        let mut changed = plan.clone();
        change(&mut changed);
        let error = check::check(&changed).expect_err("it is refused").to_string();
        assert!(error.contains("reserve"), "{number}: {error}");
    }
    let read = Plan::from_json(&plan.to_json(), "plan.json".as_ref()).expect("it is a plan");
    assert_eq!(read, plan);
}

#[test]
fn the_reserve_is_a_line_of_its_own() {
    let folder = Folder::new("reserve");
    let run = |arguments: &[&str]| {
        let program = Command::new(env!("CARGO_BIN_EXE_plimsoll"))
            .args(arguments)
            .env("PLIMSOLL_CACHE_DIR", &folder.0)
            .output()
            .expect("it runs");
        String::from_utf8_lossy(&[program.stdout, program.stderr].concat()).into_owned()
    };
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/graphs/mlp.onnxtxt");
    for (target, on, has) in [("cuda", "data=2", true), ("cuda", "data=1", false), ("cpu", "data=2", false)] {
        let text = run(&["plan", model, "--batch", "8", "--target", target, "--mesh", on]);
        assert_eq!(text.contains("NCCL's reserve"), has, "{text}");
    }
    let text = run(&["devices", "--ranks", "2,2"]);
    let expected = "--ranks 2,2: expected 4 processes, found one that runs alone; start them: mpirun -n 4 plimsoll";
    assert!(text.contains(expected), "{text}");
    let text = run(&["devices", "--ranks", "1"]);
    assert!(text.contains("expected several ranks, found 1"), "{text}");
}
