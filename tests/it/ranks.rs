//! Several ranks compute what one device does, and take the bytes that their plan says.

use crate::common::Folder;
use crate::graphs;
use plimsoll::internals::backend::ranks::{Ranks, Threads};
use plimsoll::internals::fit::{Asked, Cluster, fit};
use plimsoll::internals::kernel::{Exchange, Reduction, Template};
use plimsoll::internals::mesh::Mesh;
use plimsoll::internals::npy;
use plimsoll::internals::onnx;
use plimsoll::internals::plan::{self, Graphs, Job, Kept, Plan, Rule, Sharding, check};
use plimsoll::internals::train::data::Rows;
use plimsoll::internals::train::run::{Data, Trainer};
use plimsoll::internals::train::{Loss, Optimizer, Rate, Training, programs_of_file};
use plimsoll::{Choice, DType, Graph, KernelIdx, Options, Session, Target, Tensor};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::thread;

mod others;
mod reserve;
mod wire;

fn mesh(text: &str) -> Mesh {
    Mesh::parse(text).expect("it is a mesh")
}

/// What a rule of the command line says.
pub fn rule(pattern: &str, dim: usize, axis: &str) -> Rule {
    Rule { pattern: pattern.into(), dim, axis: axis.into() }
}

fn options() -> Options {
    Options { threads: 1, ..Options::default() }.on(Choice::Cpu)
}

/// Runs a function for each rank of a mesh, by a thread of its own.
pub fn each<T: Send>(mesh: &Mesh, of_rank: impl Fn(Arc<dyn Ranks>) -> T + Sync) -> Vec<T> {
    thread::scope(|scope| {
        let of_rank = &of_rank;
        let threads: Vec<_> = Threads::of(mesh).into_iter().map(|ranks| scope.spawn(move || of_rank(ranks))).collect();
        threads.into_iter().map(|thread| thread.join().expect("a rank does not panic")).collect()
    })
}

/// Random inputs of a session.
pub fn inputs(session: &Session) -> Vec<(String, Tensor)> {
    let tensor = |at: usize, shape: &[usize]| {
        let count: usize = shape.iter().product();
        let values: Vec<f64> = (0..count).map(|i| f64::from(((i * 37 + at * 11) % 101) as u32) / 101.0 - 0.5).collect();
        values
    };
    let made = |(at, port): (usize, &plimsoll::Port)| {
        (port.name.clone(), Tensor::from_f64(port.dtype, port.shape.clone(), &tensor(at, &port.shape)))
    };
    session.inputs().iter().enumerate().map(made).collect()
}

pub fn lent(inputs: &[(String, Tensor)]) -> Vec<(&str, Tensor)> {
    inputs.iter().map(|(name, tensor)| (&name[..], tensor.clone())).collect()
}

/// The plan of each rank: one for all.
fn planned(graph: &Graph, mesh: &Mesh, by: &[Rule]) -> Plan {
    let of = |rank: usize| {
        let sharding = Some(Sharding { mesh: mesh.clone(), rank, by: by.to_vec(), ..Sharding::default() });
        let job = Job { sharding, ..Job::of(graph.clone(), &Target::cpu(1)) };
        plan::plan(&job).expect("it is planned").plan
    };
    let first = of(0);
    for rank in 1..mesh.ranks() {
        let (a, b) = (first.to_json(), of(rank).to_json());
        let differ = a.lines().zip(b.lines()).find(|(a, b)| a != b);
        assert!(a == b, "rank {rank} of {mesh} has another plan of {}: {differ:?}", graph.name);
    }
    first
}

/// Holds what the ranks of a mesh compute against one device. Returns the plan of a rank.
fn same(graph: &Graph, on: &str, by: &[Rule], most: f64) -> Plan {
    same_on(graph, on, by, most, &|_| options())
}

/// As [`same`], with the options of each rank; one device has those of the first.
pub fn same_on(graph: &Graph, on: &str, by: &[Rule], most: f64, options: &(dyn Fn(usize) -> Options + Sync)) -> Plan {
    let whole = Session::from_graph(graph.clone(), &options(0)).expect("it is planned");
    let inputs = inputs(&whole);
    let expected = whole.run(&lent(&inputs)).expect("it runs");
    let mesh = mesh(on);
    planned(graph, &mesh, by);
    let found = each(&mesh, |ranks| {
        let own = options(ranks.rank());
        let options = Options { mesh: Some(mesh.clone()), shards: by.to_vec(), ranks: Some(ranks), ..own };
        let session = Session::from_graph(graph.clone(), &options).expect("it is planned");
        assert_eq!(session.usage().bytes, session.plan().bytes(), "planned == allocated");
        session.run_poisoned(&lent(&inputs)).expect("it runs");
        (session.run(&lent(&inputs)).expect("it runs"), session.plan().clone())
    });
    for (outputs, _) in &found {
        for ((name, expected), (_, found)) in expected.iter().zip(outputs) {
            let (a, b) = (expected.to_f64(), found.to_f64());
            let peak = a.iter().fold(0.0, |peak: f64, a| peak.max(a.abs()));
            let off = a.iter().zip(&b).fold(0.0, |off: f64, (a, b)| off.max((a - b).abs()));
            assert!(
                a.len() == b.len() && off <= most * peak,
                "'{}' of {} on {on}: off by {off} of {peak}",
                name,
                graph.name
            );
        }
    }
    found.into_iter().next().expect("a mesh has a rank").1
}

#[test]
fn files_are_the_same_on_two_and_four_ranks() {
    for (file, dims) in graphs::GRAPHS {
        let dims: Vec<_> =
            dims.iter().map(|&(name, extent)| (name, if name == "batch" { 8 } else { extent })).collect();
        let graph = graphs::import(file, &dims);
        for on in ["data=2", "data=4"] {
            same(&graph, on, &[], 1e-5);
        }
    }
}

/// A stage that does not fit is told on all ranks at once, with both numbers.
#[test]
fn a_stage_that_does_not_fit_is_told_everywhere() {
    let folder = Folder::new("stage-too-large");
    let (graph, mesh) = (decoder(&folder, 4), mesh("stage=2"));
    let sharding = Some(Sharding { mesh: mesh.clone(), ..Sharding::default() });
    let all = plan::of_all_ranks(&Job { sharding, ..Job::of(graph.clone(), &Target::cpu(1)) }).expect("it is planned");
    let mut sizes: Vec<u64> = all.iter().map(|(planned, _)| planned.plan.bytes()).collect();
    sizes.sort_unstable();
    assert!(sizes[0] + 8 < sizes[1], "the stages differ: {sizes:?}");
    let start = std::time::Instant::now();
    let errors = each(&mesh, |ranks| {
        let memory_limit = Some(sizes[0] + 4);
        let options = Options { mesh: Some(mesh.clone()), ranks: Some(ranks), memory_limit, ..options() };
        Session::from_graph(graph.clone(), &options).expect_err("one does not fit")
    });
    assert!(start.elapsed().as_secs() < 10, "nobody waits for a rank that is gone");
    for error in &errors {
        assert!(matches!(error, plimsoll::Error::Fit { limit, .. } if *limit == sizes[0] + 4), "{error}");
    }
    assert_eq!(errors.iter().filter(|error| error.to_string().contains("rank ")).count(), 1, "{errors:?}");
}

/// What is received is one run of bytes, also where it is to be a part of a concatenation.
#[test]
fn what_is_received_may_be_a_part() {
    const PARTS: &str = r#"<ir_version: 10, opset_import: ["" : 20]>
        parts (float[batch, 8] x) => (float[batch, 8] y)
        <float[8, 8] a, float[8, 8] b, float[16, 8] c>
        {
          first = MatMul (x, a)
          second = MatMul (first, b)
          both = Concat <axis = 1> (first, second)
          y = MatMul (both, c)
        }"#;
    let folder = Folder::new("received-parts");
    let path = folder.path("parts.onnxtxt");
    std::fs::write(&path, filled(PARTS, &[("a", 64), ("b", 64), ("c", 128)])).expect("it can be written");
    let model = onnx::load(Path::new(&path)).expect("it is a model");
    let graph = onnx::import(&model, &[("batch".to_owned(), 4)]).expect("it is imported");
    let whole = Session::from_graph(graph.clone(), &options()).expect("it is planned");
    let inputs = inputs(&whole);
    let expected = whole.run(&lent(&inputs)).expect("it runs");
    let mesh = mesh("stage=3");
    for outputs in each(&mesh, |ranks| {
        let options = Options { mesh: Some(mesh.clone()), ranks: Some(ranks), ..options() };
        Session::from_graph(graph.clone(), &options).expect("it is planned").run(&lent(&inputs)).expect("it runs")
    }) {
        assert_eq!(outputs[0].1.to_f64(), expected[0].1.to_f64());
    }
}

/// A weight with a row for each of the batch has a gradient that is split by rows, though the sum over parts of an update has terms.
#[test]
fn a_weight_may_have_the_rows_of_the_batch() {
    const TOKENS: &str = r#"<ir_version: 10, opset_import: ["" : 20]>
        tokens (float[4, 8] x) => (float[4, 3] y)
        <float[4, 8] token, float[8, 3] down>
        {
          sum = Add (x, token)
          y = MatMul (sum, down)
        }"#;
    let steps = |folder: &Folder, options: &Options| {
        let path = folder.path("tokens.onnxtxt");
        std::fs::write(&path, filled(TOKENS, &[("token", 32), ("down", 24)])).expect("it can be written");
        let open = |name: &str, tensor: Tensor| {
            let path = folder.path(name);
            npy::write(Path::new(&path), &tensor).expect("it can be written");
            Rows::open(Path::new(&path)).expect("it is an array of rows")
        };
        let x: Vec<f64> = (0..16 * 8).map(|i| f64::from((i * 37 % 101) as u32) / 50.0 - 1.0).collect();
        let y: Vec<f64> = (0..16).map(|row| f64::from(row % 3)).collect();
        let inputs = vec![("x".to_owned(), open("x.npy", Tensor::from_f64(DType::F32, [16, 8], &x)))];
        let data = Data { inputs, labels: open("y.npy", Tensor::from_f64(DType::I64, [16], &y)) };
        let model = onnx::load(Path::new(&path)).expect("it is a model");
        let mut trainer = Trainer::new(model, &data, 8, method(2), options).expect("it is planned");
        let losses: Vec<f32> = (0..10).map(|step| trainer.step(&data, step, Some(3)).expect("it runs").loss).collect();
        losses
    };
    let expected = steps(&Folder::new("tokens"), &options());
    let mesh = mesh("data=2");
    for losses in each(&mesh, |ranks| {
        let folder = Folder::new(&format!("tokens-{}", ranks.rank()));
        steps(&folder, &Options { mesh: Some(mesh.clone()), ranks: Some(ranks), ..options() })
    }) {
        let off = expected.iter().zip(&losses).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(off < 1e-5, "{expected:?} {losses:?}");
    }
}

/// Each stage has its own plan, and all give all outputs.
#[test]
fn stages_compute_the_same() {
    let folder = Folder::new("stages");
    let graph = decoder(&folder, 4);
    let whole = Session::from_graph(graph.clone(), &options()).expect("it is planned");
    let inputs = inputs(&whole);
    let expected = whole.run(&lent(&inputs)).expect("it runs");
    let all = whole.plan().programs[0].summary.constant_bytes;
    for on in ["stage=2", "stage=3", "stage=2,tensor=2", "data=2,stage=2", "data=2,stage=2,tensor=2"] {
        let mesh = mesh(on);
        let sharding = Some(Sharding { mesh: mesh.clone(), ..Sharding::default() });
        let planned = plan::of_all_ranks(&Job { sharding, ..Job::of(graph.clone(), &Target::cpu(1)) });
        let planned = planned.unwrap_or_else(|e| panic!("{on}: {e}"));
        let most = planned.iter().map(|(of, _)| of.plan.programs[0].summary.constant_bytes).max();
        assert!(most.is_some_and(|most| most * 10 < all * 8), "{on}: {most:?} of {all} bytes of constants");
        let found = each(&mesh, |ranks| {
            let options = Options { mesh: Some(mesh.clone()), ranks: Some(ranks), ..options() };
            let session = Session::from_graph(graph.clone(), &options).expect("it is planned");
            assert_eq!(session.usage().bytes, session.plan().bytes(), "planned == allocated");
            session.run_poisoned(&lent(&inputs)).expect("it runs");
            session.run(&lent(&inputs)).expect("it runs")
        });
        for outputs in &found {
            let off = |(a, b): (&(String, Tensor), &(String, Tensor))| {
                let (a, b) = (a.1.to_f64(), b.1.to_f64());
                assert_eq!(a.len(), b.len());
                a.iter().zip(&b).fold(0.0, |off: f64, (a, b)| off.max((a - b).abs()))
            };
            let off = expected.iter().zip(outputs).map(off).fold(0.0, f64::max);
            assert!(off < 1e-6, "{on}: off by {off}");
        }
    }
}

#[test]
fn products_are_split_along_columns_and_rows() {
    let mlp = graphs::import("mlp.onnxtxt", &[("batch", 8)]);
    let by = [rule("w1", 1, "tensor"), rule("b1", 0, "tensor"), rule("w2", 0, "tensor")];
    for on in ["tensor=2", "tensor=4", "data=2,tensor=2"] {
        let plan = same(&mlp, on, &by, 1e-6);
        let exchanges: Vec<_> = plan.programs[0].kernels.iter().filter_map(|kernel| kernel.collective()).collect();
        // The sums of the second product; and the rows of the output.
        assert_eq!(exchanges.len(), 1 + usize::from(on.starts_with("data")), "{exchanges:?}");
    }
    let attention = graphs::import("attention.onnxtxt", &[("batch", 2), ("sequence", 16)]);
    let mut by: Vec<Rule> = ["query", "key", "value"]
        .iter()
        .flat_map(|of| [rule(&format!("w_{of}"), 1, "tensor"), rule(&format!("b_{of}"), 0, "tensor")])
        .collect();
    by.push(rule("w_out", 0, "tensor"));
    let plan = same(&attention, "tensor=2", &by, 1e-6);
    let exchanges = plan.programs[0].kernels.iter().filter_map(|kernel| kernel.collective()).count();
    assert_eq!(exchanges, 1, "heads are apart, and their sum is one exchange");
    assert_eq!(plan.programs[0].shards.len(), by.len());
}

/// A block of a decoder whose queries, keys and values are one product, over a table.
const DECODER: &str = r#"<ir_version: 10, opset_import: ["" : 20]>
    decoder (int64[batch, 8] ids) => (float[batch, 8, 32] logits)
    <float[32, 16] table, float[16, 48] qkv, float[48] qkv_bias, float[16, 16] out, float[16] ones, float[16] zeros,
     float[16, 64] up, float[64] up_bias, float[64, 16] down, float[16, 32] head, int64[4] heads = {0, 0, 4, 4}, int64[3] flat = {0, 0, 16},
     float quarter = {0.5}>
    {
      x = Gather (table, ids)
      a = LayerNormalization (x, ones, zeros)
      product = MatMul (a, qkv)
      all = Add (product, qkv_bias)
      q, k, v = Split <axis = -1, num_outputs = 3> (all)
      qh = Reshape (q, heads)  kh = Reshape (k, heads)  vh = Reshape (v, heads)
      qt = Transpose <perm = [0, 2, 1, 3]> (qh)
      kt = Transpose <perm = [0, 2, 3, 1]> (kh)
      vt = Transpose <perm = [0, 2, 1, 3]> (vh)
      scores = MatMul (qt, kt)
      scaled = Mul (scores, quarter)
      weights = Softmax <axis = -1> (scaled)
      mixed = MatMul (weights, vt)
      back = Transpose <perm = [0, 2, 1, 3]> (mixed)
      joined = Reshape (back, flat)
      attended = MatMul (joined, out)
      y = Add (x, attended)
      b = LayerNormalization (y, ones, zeros)
      wider = MatMul (b, up)
      wide = Add (wider, up_bias)
      bent = Gelu (wide)
      narrow = MatMul (bent, down)
      z = Add (y, narrow)
      logits = MatMul (z, head)
    }"#;

/// The decoder, on so many rows.
fn decoder(folder: &Folder, rows: usize) -> Graph {
    let sizes = [
        ("table", 512),
        ("qkv", 768),
        ("qkv_bias", 48),
        ("out", 256),
        ("ones", 16),
        ("zeros", 16),
        ("up", 1024),
        ("up_bias", 64),
        ("down", 1024),
        ("head", 512),
    ];
    let path = folder.path("decoder.onnxtxt");
    std::fs::write(&path, filled(DECODER, &sizes)).expect("it can be written");
    let model = onnx::load(Path::new(&path)).expect("it is a model");
    onnx::import(&model, &[("batch".to_owned(), rows)]).expect("it is imported")
}

#[test]
fn weights_are_split_as_it_suits() {
    let folder = Folder::new("decoder-by-ranks");
    let graph = decoder(&folder, 4);
    let whole = Session::from_graph(graph.clone(), &options()).expect("it is planned");
    for (on, exchanges) in [("tensor=2", 4), ("tensor=4", 4), ("data=2,tensor=2", 5)] {
        let plan = same(&graph, on, &[], 1e-5);
        let found: Vec<_> = plan.programs[0].kernels.iter().filter_map(|kernel| kernel.collective()).collect();
        // Rows of the table; the sums of both halves of the block; the logits; and the rows of the output.
        let steps =
            plan.programs[0].steps.iter().filter(|step| plan.programs[0].kernels[step.kernel].collective().is_some());
        assert_eq!(steps.count(), exchanges, "{on}: {found:?}");
        let [all, own] = [whole.plan(), &plan].map(|plan| plan.programs[0].summary.constant_bytes);
        assert!(own * 3 < all * 2, "{own} of {all} bytes of constants");
    }
}

/// The fewest cards, and the best meshes, are those that planning every mesh finds.
#[test]
fn the_fewest_cards_are_found() {
    let folder = Folder::new("cards");
    let graph = decoder(&folder, 8);
    let job = Job::new(Vec::<(String, Graphs)>::new(), &Target::cpu(1));
    let all = (1..=8).flat_map(|a| (1..=8 / a).flat_map(move |b| (1..=8 / a / b).map(move |c| [a, b, c])));
    let own = |[stage, data, tensor]: [usize; 3], limit: Option<u64>| {
        let mesh = Mesh::new([("stage", stage), ("data", data), ("tensor", tensor)]).expect("it is a mesh");
        let sharding = (mesh.ranks() > 1).then(|| Sharding { mesh: mesh.clone(), ..Sharding::default() });
        let job = Job { sharding, limit, ..Job::of(graph.clone(), &Target::cpu(1)) };
        let all = plan::of_all_ranks(&job)?;
        Ok::<_, plimsoll::Error>(all.iter().map(|(planned, _)| planned.plan.bytes()).max().expect("it has a stage"))
    };
    let meshes: Vec<[usize; 3]> = all.filter(|mesh| own(*mesh, None).is_ok()).collect();
    let mut sizes: Vec<u64> = meshes.iter().map(|mesh| own(*mesh, None).expect("it was planned")).collect();
    sizes.sort_unstable();
    sizes.dedup();
    let sizes: Vec<u64> = sizes.iter().copied().step_by(sizes.len().div_ceil(10)).collect();
    let mut answers = std::collections::BTreeSet::new();
    for limit in sizes.iter().map(|bytes| bytes + 64).chain([sizes[0] - 1]) {
        let programs = || Ok(vec![(String::new(), graph.clone().into(), 1)]);
        let (by, cluster) = (Vec::new(), Cluster::default());
        let found = fit(&Asked {
            programs: &programs,
            job: job.clone(),
            limit,
            cards: 1..=8,
            by,
            kept: vec![Kept::Whole],
            cluster,
            first: &|_| (),
        })
        .expect("it is planned");
        let fewest = found.fewest.as_ref().map(|fewest| fewest.cards);
        let holds = meshes.iter().filter(|&&mesh| own(mesh, Some(limit)).is_ok());
        let expected = holds.map(|mesh| mesh.iter().product::<usize>()).min();
        assert_eq!(fewest, expected, "the fewest cards of {limit} bytes");
        assert!(found.best.iter().all(|tried| tried.card_bytes <= limit), "{found:?}");
        answers.insert(fewest);
    }
    assert!(answers.len() > 2, "{answers:?}");
}

/// A plan over ranks that is not as it was is refused, wherever that would stop or mix them up.
#[test]
fn harmful_changes_of_one_rank_are_refused() {
    let folder = Folder::new("changed-ranks");
    let graph = decoder(&folder, 4);
    let mesh = mesh("data=2,tensor=2");
    let plan = planned(&graph, &mesh, &[]);
    let ranks = |changed: &Plan, rank: usize| {
        let others = (0..4).filter(|other| *other != rank).collect();
        check::ranks::ranks(&mesh, &[(&plan, others), (changed, vec![rank])])
    };
    ranks(&plan, 1).expect("it is sound");
    let exchanges: Vec<usize> = (0..plan.programs[0].steps.len()).filter(|&at| exchange(&plan, at).is_some()).collect();
    let mut seed = 7u64;
    let mut below = |count: usize| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (seed >> 33) as usize % count
    };
    let mut harmful = 0;
    while harmful < 1000 {
        let mut changed = plan.clone();
        let (at, rank, how) = (exchanges[below(exchanges.len())], below(4), below(6));
        let other = exchanges[below(exchanges.len())];
        let mut kernel = exchange(&plan, at).expect("it is an exchange").clone();
        let Template::Collective(collective) = &mut kernel.template else { unreachable!("it is an exchange") };
        match how {
            // Two that bring the same may change places, and two of different groups are each met in their time.
            0 if brings(&plan, at) != brings(&plan, other) && axis(&plan, at) == axis(&plan, other) => {
                let steps = &mut changed.programs[0].steps;
                let (a, b) = (steps[at].kernel, steps[other].kernel);
                (steps[at].kernel, steps[other].kernel) = (b, a);
            }
            1 => drop(changed.programs[0].steps.remove(at)),
            2 => collective.axis = if collective.axis == "data" { "tensor" } else { "data" }.into(),
            3 => kernel.reads[0].access.shape[0] += 1,
            4 => kernel.reads[0].dtype = DType::F16,
            5 => collective.exchange = Exchange::AllReduce(Reduction::Max),
            _ => continue,
        }
        if how >= 2 {
            let kernels: Vec<_> = changed.programs[0].kernels.iter().cloned().chain([kernel]).collect();
            changed.programs[0].kernels = kernels;
            changed.programs[0].steps[at].kernel = KernelIdx::new(changed.programs[0].kernels.len() - 1);
        }
        assert!(ranks(&changed, rank).is_err(), "change {how} of step {at} on rank {rank}");
        harmful += 1;
    }
}

/// The plans of stages go on together; none does if a send, a receive or a sum of one of them is gone, another, or elsewhere.
#[test]
fn harmful_changes_of_one_stage_are_refused() {
    let folder = Folder::new("changed-stages");
    let mesh = mesh("stage=3,data=2");
    let sharding = Some(Sharding { mesh: mesh.clone(), ..Sharding::default() });
    let job = Job { sharding, ..Job::of(decoder(&folder, 4), &Target::cpu(1)) };
    let all = plan::of_all_ranks(&job).expect("it is planned");
    let mut tried = 0;
    for class in 0..all.len() {
        let plan = &all[class].0.plan;
        let refuses = |changed: &Plan, how: &str, at: usize| {
            let own = |(number, (planned, ranks)): (usize, &(plan::Planned, Vec<usize>))| {
                (if number == class { changed.clone() } else { planned.plan.clone() }, ranks.clone())
            };
            let plans: Vec<(Plan, Vec<usize>)> = all.iter().enumerate().map(own).collect();
            let plans: Vec<_> = plans.iter().map(|(plan, ranks)| (plan, ranks.clone())).collect();
            assert!(check::ranks::ranks(&mesh, &plans).is_err(), "{how} of step {at} of stage {class}");
        };
        let exchanges: Vec<usize> =
            (0..plan.programs[0].steps.len()).filter(|&at| exchange(plan, at).is_some()).collect();
        for (number, &at) in exchanges.iter().enumerate() {
            let is_alone = exchange(plan, at).is_some_and(|kernel| {
                kernel.collective().is_some_and(|of| of.exchange.other().is_none() && of.axis == "data")
            });
            let change = |how: &str, edit: &dyn Fn(&mut plimsoll::Kernel)| {
                let mut changed = plan.clone();
                let mut kernel = exchange(plan, at).expect("it is an exchange").clone();
                edit(&mut kernel);
                let kernels: Vec<_> = changed.programs[0].kernels.iter().cloned().chain([kernel]).collect();
                changed.programs[0].kernels = kernels;
                changed.programs[0].steps[at].kernel = KernelIdx::new(changed.programs[0].kernels.len() - 1);
                refuses(&changed, how, at);
            };
            // Both ranks of a stage have its plan: what they alone exchange they change together.
            if is_alone {
                continue;
            }
            let mut changed = plan.clone();
            changed.programs[0].steps.remove(at);
            refuses(&changed, "loss", at);
            change("another count", &|kernel| {
                kernel.reads[0].access.shape[0] += 1;
                kernel.writes[0].access.shape[0] += 1;
            });
            change("another way", &|kernel| {
                let Template::Collective(of) = &mut kernel.template else { unreachable!("it is an exchange") };
                of.exchange = match of.exchange {
                    Exchange::Send { to } => Exchange::Recv { from: to },
                    _ => Exchange::Send { to: (class + 1) % 3 },
                };
            });
            if let Some(&next) = exchanges.get(number + 1).filter(|&&next| brings(plan, at) != brings(plan, next)) {
                let mut changed = plan.clone();
                let steps = &mut changed.programs[0].steps;
                (steps[at].kernel, steps[next].kernel) = (steps[next].kernel, steps[at].kernel);
                // Those with different ranks may be begun in either order if nobody waits in a circle.
                let pair = |at| exchange(plan, at).and_then(|kernel| kernel.collective()?.exchange.other());
                if pair(at) == pair(next) {
                    refuses(&changed, "another order", at);
                }
            }
            tried += 3;
        }
    }
    assert!(tried >= 18, "{tried} changes");
}

/// The axis of an exchange.
fn axis(plan: &Plan, step: usize) -> String {
    exchange(plan, step).and_then(|kernel| kernel.collective()).expect("it is one").axis.clone()
}

/// What a rank brings to an exchange.
fn brings(plan: &Plan, step: usize) -> (String, DType, usize) {
    let kernel = exchange(plan, step).expect("it is an exchange");
    let collective = kernel.collective().expect("it is one");
    let moved = kernel.moved().expect("it moves elements");
    (collective.to_string(), moved.dtype, moved.access.shape.numel())
}

/// The kernel of a step, if it is an exchange.
fn exchange(plan: &Plan, step: usize) -> Option<&plimsoll::Kernel> {
    let program = &plan.programs[0];
    Some(&program.kernels[program.steps[step].kernel]).filter(|kernel| kernel.collective().is_some())
}

/// The launcher of MPI's processes, if there is one: `PLIMSOLL_MPIRUN`, or `mpirun`.
fn launcher() -> Option<String> {
    let named = std::env::var("PLIMSOLL_MPIRUN").unwrap_or("mpirun".into());
    let starts = Command::new(&named).arg("--version").output().is_ok_and(|ran| ran.status.success());
    if !starts {
        assert!(std::env::var_os("PLIMSOLL_REQUIRE_MPI").is_none(), "{named} does not start");
        eprintln!("SKIPPED: no mpirun; PLIMSOLL_MPIRUN names one");
    }
    starts.then_some(named)
}

/// Runs the program by so many processes. Returns what it printed, and the errors.
fn launched(launcher: &str, ranks: usize, arguments: &[&str]) -> (bool, String, String) {
    let mut command = Command::new(launcher);
    command.args(["-n", &ranks.to_string(), env!("CARGO_BIN_EXE_plimsoll")]).args(arguments);
    let ran = command.output().expect("it starts");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (ran.status.success(), text(&ran.stdout), text(&ran.stderr))
}

#[test]
fn ranks_are_processes() {
    let Some(launcher) = launcher() else { return };
    let folder = Folder::new("processes");
    let model = folder.path("decoder.onnxtxt");
    decoder(&folder, 4);
    let run = |ranks: usize, mesh: &[&str], to: &str| {
        let to = folder.path(to);
        let more = ["run", &model, "--backend", "cpu", "--batch", "4", "--output-dir", &to, "--json"];
        let (ran, printed, errors) = launched(&launcher, ranks, &[&more[..], mesh].concat());
        assert!(ran, "{mesh:?}: {errors}");
        let record: serde_json::Value = serde_json::from_str(&printed).expect("one rank prints one record");
        assert_eq!(record["memory"]["planned_bytes"], record["memory"]["allocated_bytes"], "{mesh:?}");
        npy::read(Path::new(&format!("{to}/logits.npy"))).expect("the first rank writes it").to_f64()
    };
    let expected = run(1, &[], "alone");
    let peak = expected.iter().fold(0.0, |peak: f64, a| peak.max(a.abs()));
    for (ranks, on) in [(2, "data=2"), (2, "tensor=2"), (4, "tensor=4"), (4, "data=2,tensor=2")] {
        let found = run(ranks, &["--mesh", on], on);
        let off = expected.iter().zip(&found).fold(0.0, |off: f64, (a, b)| off.max((a - b).abs()));
        assert!(found.len() == expected.len() && off <= 1e-5 * peak, "{on}: off by {off} of {peak}");
    }
    let trace = folder.path("trace.json");
    let traced = ["run", &model, "--backend", "cpu", "--batch", "4", "--mesh", "data=2", "--trace", &trace];
    let (ran, _, errors) = launched(&launcher, 2, &traced);
    assert!(ran && Path::new(&trace).is_file(), "{errors}");
    // What is wrong is told once, with both sides.
    for (arguments, what) in [
        (&["--mesh", "data=4"][..], "--mesh data=4: expected 4 processes, found 2"),
        (&[], "a launcher started 2 processes: expected --mesh"),
        (&["--mesh", "other=2"], "mesh axis 'other': expected 'data', 'tensor' or 'stage'"),
        (&["--mesh", "tensor=2", "--shard", "up=7:tensor"], "which has no dim 7"),
        (&["--mesh", "tensor=2", "--shard", "down=1:data"], "no axis 'data'"),
        (&["--mesh", "tensor=2", "--shard", "nothing=0:tensor"], "no input, constant or state has this name"),
    ] {
        let all = [&["run", &model, "--backend", "cpu", "--batch", "4"], arguments].concat();
        // MPICH's launcher can lose what a process wrote before it failed.
        let tried = (0..5).map(|_| launched(&launcher, 2, &all)).find(|(ran, _, errors)| *ran || !errors.is_empty());
        let (ran, _, errors) = tried.expect("the launcher tells what a process wrote");
        assert!(!ran && errors.contains(what) && errors.matches("error: ").count() == 1, "{arguments:?}: {errors}");
    }
}

#[test]
fn processes_train_and_go_on_in_another_mesh() {
    let Some(launcher) = launcher() else { return };
    let folder = Folder::new("trained-processes");
    let train = |ranks: usize, mesh: &str, kept: &str, steps: &str, more: &[&str]| {
        let kept = folder.path(kept);
        let data = ["--data", "graphs/digits-train-images.npy", "--labels", "graphs/digits-train-labels.npy"];
        let method =
            ["--loss", "cross_entropy", "--batch", "32", "--lr", "0.001", "--steps", steps, "--checkpoint", &kept];
        let of = if mesh.is_empty() { Vec::new() } else { vec!["--mesh", mesh] };
        let start = ["train", "graphs/digits.onnx", "--backend", "cpu", "--json"];
        let (ran, printed, errors) = launched(&launcher, ranks, &[&start[..], &data, &method, &of, more].concat());
        assert!(ran, "{mesh}: {errors}");
        let record: serde_json::Value = serde_json::from_str(&printed).expect("one rank prints one record");
        assert_eq!(record["planned_bytes"], record["allocated_bytes"]);
        record["loss"].as_f64().expect("it has a loss")
    };
    let alone = train(1, "", "alone", "20", &[]);
    for on in ["data=2", "data=4"] {
        let loss = train(on[5..].parse().expect("a number"), on, on, "20", &[]);
        assert!((loss - alone).abs() < 1e-5 * alone.abs(), "{on}: {loss} of {alone}");
    }
    train(2, "data=2", "resumed", "5", &[]);
    train(4, "stage=2,data=2", "resumed", "10", &["--resume", "--shard-states", "3"]);
    let loss = train(4, "data=4", "resumed", "20", &["--resume"]);
    assert!((loss - alone).abs() < 1e-5 * alone.abs(), "resumed: {loss} of {alone}");
}

/// A target with streams: what reads the sum of a gradient comes behind other exchanges, which have a stream of their own.
#[test]
fn exchanges_run_beside_what_is_computed() {
    let model = onnx::load(Path::new("graphs/digits.onnx")).expect("it is a model");
    let adam = Optimizer::Adam { beta1: 0.9, beta2: 0.999, eps: 1e-8, decoupled: true };
    let training = Training::new(Loss::CrossEntropy, adam, Rate::constant(0.01));
    let programs = programs_of_file(model, Vec::new(), 64, &training).expect("it can be trained");
    let sharding = Some(Sharding { mesh: mesh("data=2"), ..Sharding::default() });
    let plan =
        plan::plan(&Job { sharding, ..Job::new(programs.named(), &Target::cuda()) }).expect("it is planned").plan;
    let steps = &plan.programs[0].steps;
    let exchanges: Vec<usize> = (0..steps.len()).filter(|&at| exchange(&plan, at).is_some()).collect();
    let streams: std::collections::BTreeSet<u32> = exchanges.iter().map(|&at| steps[at].stream).collect();
    assert_eq!(streams.len(), 1, "{streams:?}");
    let others = steps.iter().enumerate().filter(|(at, _)| !exchanges.contains(at));
    assert!(others.clone().all(|(_, step)| !streams.contains(&step.stream)), "their stream is their own");
    // Most have time: another exchange begins before one of its readers.
    let has_time = |&&at: &&usize| {
        let mut readers =
            others.clone().filter(|(reader, step)| *reader > at && step.reads.contains(&steps[at].writes[0]));
        readers.next().is_some_and(|(reader, _)| exchanges.iter().any(|&other| (at + 1..reader).contains(&other)))
    };
    let timely = exchanges.iter().filter(has_time).count();
    assert!(timely * 2 > exchanges.len(), "{timely} of {}", exchanges.len());
}

/// Weights that no way of a reader keeps split are gathered in the run, and what cannot be parted stays one.
#[test]
fn what_does_not_suit_is_gathered_or_stays_whole() {
    let digits = graphs::import("digits.onnx", &[("batch", 4)]);
    for name in ["stem.0.weight", "body.0.weight"] {
        let plan = same(&digits, "m=2", &[rule(name, 0, "m")], 1e-5);
        let gathers =
            |kernel: &&plimsoll::Kernel| kernel.collective().is_some_and(|of| of.exchange == Exchange::AllGather);
        assert!(plan.programs[0].kernels.iter().any(|kernel| gathers(&kernel)), "{name} is gathered");
    }
    let parted = |added: &str| {
        format!(
            r#"<ir_version: 10, opset_import: ["" : 20]>
            parted (float[batch, 4, 16] x) => (float[batch, 4, 32] y)
            <float[16, 96] wide, float[1] one = {{0.5}}, float[96] bias>
            {{ product = MatMul (x, wide) all = Add (product, {added})
              a, b, c = Split <axis = -1, num_outputs = 3> (all) s = Add (a, b) y = Add (s, c) }}"#
        )
    };
    let folder = Folder::new("parted");
    let sizes = [("wide", 1536), ("bias", 96)];
    for added in ["bias", "one"] {
        let path = folder.file("parted.onnxtxt", filled(&parted(added), &sizes));
        let graph = onnx::import(&onnx::load(Path::new(&path)).expect("a model"), &[("batch".into(), 2)]);
        same(&graph.expect("it is imported"), "tensor=2", &[], 1e-5);
    }
    let text = r#"<ir_version: 10, opset_import: ["" : 20]>
        vectors (float[batch, 6, 16] x) => (float[batch, 3, 8] z)
        <float[16] narrow, float[3, 64] up, float[64, 8] down>
        { product = MatMul (x, narrow) a, b = Split <axis = -1, num_outputs = 2> (product) y = Sub (a, b)
          w = MatMul (y, up) p = Unsqueeze (w, axes) e = Expand (p, extents) z = MatMul (e, down) }"#;
    let text = text.replace("down>", "down, int64[1] axes = {1}, int64[3] extents = {1, 3, 64}>");
    let path = folder.file("vectors.onnxtxt", filled(&text, &[("narrow", 16), ("up", 192), ("down", 512)]));
    let graph = onnx::import(&onnx::load(Path::new(&path)).expect("a model"), &[("batch".into(), 2)]);
    same(&graph.expect("it is imported"), "tensor=2", &[], 1e-5);
}

#[test]
fn rows_are_split_along_data() {
    let graph = graphs::import("mlp.onnxtxt", &[("batch", 8)]);
    let whole = Session::from_graph(graph.clone(), &options()).expect("it is planned").plan().bytes();
    for on in ["data=2", "data=4", "data=2,tensor=1"] {
        let plan = same(&graph, on, &[], 1e-5);
        assert_eq!(plan.mesh, Some(mesh(on)));
        assert!(plan.bytes() < whole, "{} of {whole}", plan.bytes());
    }
}

/// A model's text with numbers for its weights.
pub fn filled(text: &str, sizes: &[(&str, usize)]) -> String {
    let mut text = text.to_owned();
    let mut seed = 1u32;
    for &(name, count) in sizes {
        let mut number = || {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            format!("{:.3}", f64::from(seed >> 8) / f64::from(1u32 << 24) - 0.5)
        };
        let numbers: Vec<_> = (0..count).map(|_| number()).collect();
        for end in [",", ">"] {
            text = text.replace(&format!("] {name}{end}"), &format!("] {name} = {{{}}}{end}", numbers.join(", ")));
        }
    }
    text
}

/// A network of most that trainings have: a convolution, the norm of a batch, a Dropout, a norm of rows.
const NETWORK: &str = r#"<ir_version: 10, opset_import: ["" : 20]>
    network (float[batch, 1, 6, 6] x) => (float[batch, 3] y)
    <float[4, 1, 3, 3] filters, float[4] scale = {1, 1, 1, 1}, float[4] shift = {0, 0, 0, 0}, float[4] mean = {0, 0, 0, 0},
     float[4] variance = {1, 1, 1, 1}, float[64, 8] up, float[8] bias, float[8] weight = {1, 1, 1, 1, 1, 1, 1, 1},
     float[8] zero = {0, 0, 0, 0, 0, 0, 0, 0}, float[8] late = {0, 0, 0, 0, 0, 0, 0, 0},
     float[8] spread = {1, 1, 1, 1, 1, 1, 1, 1}, float[8, 3] down, float ratio = {0.25}, bool training = {1}>
    {
      image = Conv (x, filters)
      normed = BatchNormalization (image, scale, shift, mean, variance)
      positive = Relu (normed)
      flat = Flatten (positive)
      hidden = MatMul (flat, up)
      later = BatchNormalization (hidden, weight, zero, late, spread)
      biased = Add (later, bias)
      some = Dropout (biased, ratio, training)
      even = LayerNormalization (some, weight, zero)
      bent = Gelu (even)
      y = MatMul (bent, down)
    }"#;

/// The network with weights, and its data.
fn network(folder: &Folder, rows: usize) -> (onnx::Model, Data) {
    let text = filled(NETWORK, &[("filters", 36), ("up", 512), ("bias", 8), ("down", 24)]);
    let path = folder.path("network.onnxtxt");
    std::fs::write(&path, text).expect("it can be written");
    let open = |name: &str, tensor: Tensor| {
        let path = folder.path(name);
        npy::write(Path::new(&path), &tensor).expect("it can be written");
        Rows::open(Path::new(&path)).expect("it is an array of rows")
    };
    let x: Vec<f64> = (0..rows * 36).map(|i| f64::from((i * 37 % 101) as u32) / 50.0 - 1.0).collect();
    // The class follows from a pixel.
    let y: Vec<f64> = x.chunks(36).map(|image| ((image[7] + 1.0) * 1.5).floor()).collect();
    let inputs = vec![("x".to_owned(), open("x.npy", Tensor::from_f64(DType::F32, [rows, 1, 6, 6], &x)))];
    let data = Data { inputs, labels: open("y.npy", Tensor::from_f64(DType::I64, [rows], &y)) };
    (onnx::load(Path::new(&path)).expect("it is a model"), data)
}

fn method(accumulate: usize) -> Training {
    let adam = Optimizer::Adam { beta1: 0.9, beta2: 0.999, eps: 1e-8, decoupled: true };
    let plain = Training::new(Loss::CrossEntropy, adam, Rate::constant(0.01));
    Training { accumulate, clip: Some(0.5), ema: Some(0.9), decay: 0.01, ..plain }
}

/// The losses of steps, and a weight and a running statistic after them.
pub fn trained(folder: &Folder, options: &Options, accumulate: usize, steps: u64) -> (Vec<f32>, Vec<Tensor>, f64) {
    let (model, data) = network(folder, 24);
    let mut trainer = Trainer::new(model, &data, 8, method(accumulate), options).expect("it is planned");
    let losses = (0..steps).map(|step| trainer.step(&data, step, Some(3)).expect("it runs").loss).collect();
    let session = trainer.session();
    assert_eq!(session.usage().bytes, session.plan().bytes(), "planned == allocated");
    let states = ["up", "filters", "mean", "late", "ema/down"].map(|name| session.state(name).expect("it is a state"));
    // The last of its parts has rows for some ranks alone.
    let (_, few) =
        network(&Folder::new(&format!("{}-few", options.ranks.as_ref().map_or(0, |ranks| 1 + ranks.rank()))), 9);
    let score = trainer.evaluate(&few).expect("it runs").loss;
    (losses, states.to_vec(), score)
}

/// Each level of states that ranks share out takes fewer bytes; all of them on four ranks take at most 0.30 of one rank's.
#[test]
fn shared_states_take_their_share() {
    const WIDE: &str = r#"<ir_version: 10, opset_import: ["" : 20]>
        wide (float[batch, 64] x) => (float[batch, 4] y)
        <float[64, 128] up, float[128] bias, float[128, 4] down>
        {
          product = MatMul (x, up)
          sum = Add (product, bias)
          bent = Gelu (sum)
          y = MatMul (bent, down)
        }"#;
    let folder = Folder::new("shared-states");
    let path = folder.path("wide.onnxtxt");
    std::fs::write(&path, filled(WIDE, &[("up", 64 * 128), ("bias", 128), ("down", 512)])).expect("it can be written");
    let model = onnx::load(Path::new(&path)).expect("it is a model");
    let programs = programs_of_file(model, vec![("batch".to_owned(), 8)], 16, &method(2)).expect("it is trained").parts;
    let bytes = |kept: Kept| {
        let sharding = Some(Sharding { mesh: mesh("data=4"), kept, ..Sharding::default() });
        let plan =
            plan::plan(&Job { sharding, ..Job::new(programs.clone(), &Target::cpu(1)) }).expect("it is planned").plan;
        plan.class_bytes(plimsoll::Class::State) as f64
    };
    let shares = Kept::LEVELS.map(|kept| bytes(kept) / bytes(Kept::Whole));
    assert!(shares.windows(2).all(|two| two[1] < two[0] - 0.05), "{shares:?}");
    assert!(shares[3] <= 0.30, "{shares:?}");
}

/// States of all stages, of several types, are written to one file, in one order, and read by one device.
#[test]
fn states_of_stages_are_written_as_a_whole() {
    const WEIGHTS: &str = "float[256, 128] table, float[128, 128] w_query, float[128, 32] w_key, float[128, 32] w_value, float[128, 128] w_out";
    let folder = Folder::new("states-of-stages");
    let [path, states] = ["append.onnxtxt", "states.safetensors"].map(|name| folder.path(name));
    // Weights as inputs would be no place to cut.
    let text = std::fs::read_to_string("graphs/append.onnxtxt").expect("it is there");
    let text = text.replacen(&format!(",\n   {WEIGHTS}"), "", 1).replacen(
        "int64 zero =",
        &format!("{WEIGHTS},\n   int64 zero ="),
        1,
    );
    let sizes = [
        ("table", 256 * 128),
        ("w_query", 128 * 128),
        ("w_key", 128 * 32),
        ("w_value", 128 * 32),
        ("w_out", 128 * 128),
    ];
    std::fs::write(&path, filled(&text, &sizes)).expect("it can be written");
    let options = || {
        let pairs = [("token", "next_token"), ("past_*", "present_*")];
        let state = pairs.map(|(input, output)| (input.to_owned(), output.to_owned())).to_vec();
        Options { state, ..options() }.set("past", 0..=16).set("batch", 2)
    };
    let alone = Session::from_path(&path, &options()).expect("it is planned");
    (0..5).for_each(|_| drop(alone.run(&[]).expect("it runs")));
    let names = ["token", "past", "past_keys", "past_values"];
    let of = |session: &Session| names.map(|name| session.state(name).expect("it is a state"));
    let expected = of(&alone);
    let size = |tensor: &Tensor| tensor.dtype().size();
    assert!(expected.iter().any(|state| size(state) != size(&expected[0])), "files are in the order of sizes");
    for on in ["stage=2", "stage=3", "stage=4"] {
        let mesh = mesh(on);
        let found = each(&mesh, |ranks| {
            let options = Options { mesh: Some(mesh.clone()), ranks: Some(ranks), ..options() };
            let session = Session::from_path(&path, &options).expect("it is planned");
            (0..5).for_each(|_| drop(session.run(&[]).expect("it runs")));
            session.save_states(&states).expect("they are written");
            of(&session)
        });
        alone.reset_state().expect("it is reset");
        alone.load_states(&states).expect("they are read");
        for own in found.iter().chain([&of(&alone)]) {
            for ((name, a), b) in names.iter().zip(&expected).zip(own) {
                let off = a.to_f64().iter().zip(b.to_f64()).fold(0.0, |off: f64, (a, b)| off.max((a - b).abs()));
                assert!(off < 1e-5, "'{name}' on {on}: off by {off}");
            }
        }
    }
}

/// Norms by the rows of a rank are those that one device has for parts of its batch, and need no exchange.
#[test]
fn norms_may_be_of_a_ranks_rows() {
    let steps = |folder: &Folder, options: &Options, norm_groups: usize| {
        let (model, data) = network(folder, 24);
        let training = Training { norm_groups, ..method(1) };
        let mut trainer = Trainer::new(model, &data, 8, training, options).expect("it is planned");
        let losses: Vec<f32> = (0..30).map(|step| trainer.step(&data, step, Some(3)).expect("it runs").loss).collect();
        let plan = trainer.session().plan();
        let exchanges =
            plan.programs[0].steps.iter().filter(|step| plan.programs[0].kernels[step.kernel].collective().is_some());
        (losses, trainer.session().state("variance").expect("it is a state").to_f64(), exchanges.count())
    };
    let folder = Folder::new("norms-of-ranks");
    let (alone, variance, _) = steps(&folder, &options(), 2);
    let (whole, ..) = steps(&folder, &options(), 1);
    let mesh = mesh("data=2");
    let of_ranks = |groups: usize| {
        each(&mesh, |ranks| {
            let folder = Folder::new(&format!("norms-of-rank-{groups}-{}", ranks.rank()));
            let options = Options { mesh: Some(mesh.clone()), ranks: Some(ranks), ..options() };
            steps(&folder, &options, groups)
        })
    };
    let far = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    let (apart, together) = (of_ranks(2), of_ranks(1));
    for (losses, own, exchanges) in &apart {
        assert!(far(&alone, losses) < 1e-5, "{alone:?} {losses:?}");
        assert!(far(&whole, losses) > 1e-4, "parts of a batch have other statistics");
        assert!(variance.iter().zip(own).all(|(a, b)| (a - b).abs() < 1e-5), "{variance:?} {own:?}");
        assert!(*exchanges < together[0].2, "{exchanges} of {}", together[0].2);
    }
}

#[test]
fn a_training_is_that_of_the_whole_batch() {
    let folder = Folder::new("trained-by-ranks");
    for accumulate in [1, 2] {
        let (losses, states, score) = trained(&folder, &options(), accumulate, 30);
        assert!(losses[29] < 0.8 * losses[0], "{losses:?}");
        let by_data = ["data=2", "data=4"].into_iter().flat_map(|on| Kept::LEVELS.map(|kept| (on, kept)));
        let by_stage = [("stage=2", Kept::Whole), ("stage=2,data=2", Kept::Whole), ("data=2,stage=2", Kept::Weights)];
        for (on, kept) in by_data.chain(by_stage) {
            let mesh = mesh(on);
            let found = each(&mesh, |ranks| {
                let folder = Folder::new(&format!("trained-by-rank-{on}-{}", ranks.rank()));
                let options = Options { mesh: Some(mesh.clone()), ranks: Some(ranks), shard_states: kept, ..options() };
                trained(&folder, &options, accumulate, 30)
            });
            let on = format!("{on}, states {kept:?}");
            for (own, kept, own_score) in &found {
                let off = losses.iter().zip(own).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                assert!(off < 1e-5, "{on} in {accumulate} parts: losses off by {off}: {losses:?} {own:?}");
                for (state, own) in states.iter().zip(kept) {
                    let off =
                        state.to_f64().iter().zip(own.to_f64()).fold(0.0, |off: f64, (a, b)| off.max((a - b).abs()));
                    assert!(off < 1e-4, "{on} in {accumulate} parts: a state is off by {off}");
                }
                assert!((score - own_score).abs() < 1e-5, "{on} in {accumulate} parts: {score} {own_score}");
            }
        }
    }
}
