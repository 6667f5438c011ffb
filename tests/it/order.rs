//! Orders of steps: sound, counted right, never worse than the file's, and on small graphs the best there are.

use crate::common;
use plimsoll::internals::op::NodeId;
use plimsoll::internals::pass::Prepared;
use plimsoll::internals::place::{Effort, Item, Problem, place};
use plimsoll::internals::plan::lower::Dag;
use plimsoll::internals::plan::lower::{Draft, DraftBuffer, DraftStep};
use plimsoll::internals::plan::make::liveness::live;
use plimsoll::internals::plan::make::order::orders;
use plimsoll::internals::plan::make::streams::Streams;
use plimsoll::internals::plan::{BufferIdx, Class, KernelIdx, Limits, StepIdx};
use plimsoll::internals::trace::{Trace, Var};
use plimsoll::internals::{onnx, plan};
use plimsoll::{DType, Graph, Recipe, Shape, Target};
use std::path::Path;

const ALIGN: u64 = 256;

/// splitmix64.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((x ^ (x >> 31)) % bound as u64) as usize
    }
}

/// Steps over buffers of random sizes. Some work in place, some write a part of a buffer that others have begun, some need a workspace.
fn random_draft(random: &mut Random, steps: usize) -> Draft {
    let mut draft = Draft::default();
    let add = |draft: &mut Draft, class, bytes| {
        draft.buffers.push(buffer(&format!("b{}", draft.buffers.len()), class, bytes));
        BufferIdx::new(draft.buffers.len() - 1)
    };
    let input = add(&mut draft, Class::Input, 1000);
    draft.inputs.push((NodeId::new(0).output(0), input));
    let (mut made, reach) = (vec![input], 1 + random.below(8));
    let sizes = [200, 256, 1000, 5000];
    for s in 0..steps {
        let pick = |random: &mut Random, made: &[BufferIdx]| made[made.len() - 1 - random.below(made.len().min(reach))];
        let reads: Vec<_> = (0..1 + random.below(3)).map(|_| pick(random, &made)).collect();
        let part = (random.below(8) == 0).then(|| pick(random, &made));
        let part = part.filter(|b| draft.buffers[*b].class == Class::Activation && !reads.contains(b));
        let size = draft.buffers[reads[0]].bytes as usize;
        let (reusable, size) =
            if random.below(2) == 0 { (vec![reads[0]], size) } else { (Vec::new(), sizes[random.below(4)]) };
        let class = if random.below(10) == 0 { Class::Output } else { Class::Activation };
        let mut writes = vec![part.unwrap_or_else(|| add(&mut draft, class, size))];
        made.push(writes[0]);
        if random.below(6) == 0 {
            writes.push(add(&mut draft, Class::Workspace, sizes[random.below(4)]));
        }
        let reusable = if part.is_none() && class == Class::Activation { reusable } else { Vec::new() };
        draft.steps.push(DraftStep {
            name: format!("s{s}"),
            kernel: KernelIdx::default(),
            reads,
            writes,
            bind_ranges: Vec::new(),
            reusable,
        });
    }
    draft
}

/// The placement problem of an order, by its live ranges.
fn problem(draft: &Draft, order: &[StepIdx]) -> Problem {
    let live = live(draft, order, &Streams::new(draft, order, 1));
    let item = |r: &plan::make::liveness::Range| Item {
        lower: r.lower as u64,
        upper: r.upper as u64,
        size: r.bytes,
        align: ALIGN,
    };
    Problem::new(live.ranges.iter().map(item).collect(), ALIGN).expect("it is sound")
}

/// The least bound of all orders.
fn least(draft: &Draft, dag: &Dag, order: &mut Vec<StepIdx>, best: &mut u64) {
    if order.len() == draft.steps.len() {
        *best = problem(draft, order).lower_bound().min(*best);
    }
    for s in StepIdx::all(&draft.steps) {
        if !order.contains(&s) && dag.before[s].iter().all(|p| order.contains(p)) {
            order.push(s);
            least(draft, dag, order, best);
            order.pop();
        }
    }
}

#[test]
fn orders_are_sound_and_counted_as_they_will_be_placed() {
    let mut random = Random(1);
    for _ in 0..3000 {
        let steps = 1 + random.below(60);
        let draft = random_draft(&mut random, steps);
        let dag = Dag::new(&draft);
        let found = orders(&draft, ALIGN);
        assert_eq!((found[0].name.as_str(), found[0].steps.is_sorted()), ("file", true));
        for order in &found {
            let mut position = vec![usize::MAX; steps];
            order.steps.iter().enumerate().for_each(|(at, &s)| position[s] = at);
            assert!(order.steps.len() == steps && !position.contains(&usize::MAX), "{}", order.name);
            let follows = |s: StepIdx| dag.before[s].iter().all(|&p| position[p] < position[s]);
            assert!(StepIdx::all(&draft.steps).all(follows), "{}: {:?}", order.name, order.steps);
            assert_eq!(order.bound, problem(&draft, &order.steps).lower_bound(), "{}: {draft:?}", order.name);
        }
    }
}

#[test]
fn short_drafts_get_the_least_bound_of_all_orders() {
    let mut random = Random(2);
    let mut better = 0;
    for _ in 0..1500 {
        let steps = 1 + random.below(7);
        let draft = random_draft(&mut random, steps);
        let mut best = u64::MAX;
        least(&draft, &Dag::new(&draft), &mut Vec::new(), &mut best);
        let found = orders(&draft, ALIGN);
        let bound = found.iter().map(|order| order.bound).min();
        assert_eq!(bound, Some(best), "{draft:?}");
        better += usize::from(best < found[0].bound);
    }
    assert!(better > 50, "{better}");
}

/// Values of several sizes, combined at random.
fn random_graph(random: &mut Random, nodes: usize) -> Graph {
    let g = Trace::new("random");
    let widths = [8, 64, 200];
    let weights: Vec<Var> =
        (0..9).map(|k| g.input(&format!("w{k}"), DType::F32, [widths[k / 3], widths[k % 3]])).collect();
    let mut values: Vec<(Var, usize)> = vec![(g.input("x", DType::F32, [16, 8]), 0)];
    for _ in 0..nodes {
        let (value, width) = values[values.len() - 1 - random.below(values.len().min(8))];
        let (other, width) = match (random.below(4), random.below(3)) {
            (0, other) => (value.matmul(weights[3 * width + other]), other),
            (1, _) => (value.softmax(-1), width),
            (2, _) => {
                let same = values.iter().rev().skip(1).find(|(_, w)| *w == width);
                (same.map_or(value.relu(), |(other, _)| value + *other), width)
            }
            (_, other) => (value.softmax(-1).matmul(weights[3 * width + other]), other),
        };
        values.push((other, width));
    }
    let all: Vec<Var> = values.iter().rev().take(6).map(|(value, _)| value.reduce_sum(&[1], true)).collect();
    g.output("y", g.concat(&all, 1));
    g.finish().expect("the graph is sound")
}

#[test]
fn no_plan_is_worse_than_the_files_order() {
    let mut random = Random(3);
    let mut better = 0;
    for round in 0..400 {
        let nodes = 2 + random.below(40);
        let graph = random_graph(&mut random, nodes);
        let target = Target::cpu(1);
        let graph = Recipe::default().whole(graph, &target).expect("the passes run");
        let plan = plan::planned(&graph, &target, &Limits { memory: None }).expect("it is planned and checked");
        let found = &plan.programs[0].summary.orders;
        let draft = plan::make::lowered(&graph, &target, plan::lower::Options { join: true }).expect("it is lowered");
        let order: Vec<_> = StepIdx::all(&draft.steps).collect();
        let file = place(&problem(&draft, &order), Effort::PLAN);
        assert!(
            plan.programs[0].summary.arena_bytes.next_multiple_of(ALIGN) <= file.peak,
            "round {round}: {} for {found:?}",
            file.peak
        );
        assert_eq!(found[0].name, "file");
        assert!(found.iter().all(|order| order.bound <= order.peak), "{found:?}");
        assert_eq!(found.iter().map(|order| order.peak).min(), Some(plan.programs[0].summary.arena_bytes));
        better += usize::from(plan.programs[0].summary.arena_bytes.next_multiple_of(ALIGN) < file.peak);
    }
    assert!(better > 20, "{better}");
}

/// A part that is computed early and joined late: copying it keeps fewer bytes live meanwhile. That is worth a kernel if it saves much, or if
/// the plan would not fit without.
#[test]
fn parts_are_copied_where_it_pays_or_where_they_must() {
    let late = |width: usize| {
        let text = format!(
            "late (float[64, 1024] u, float[64, 64] x, float[64, 256] v, float[256, {width}] w) => (float[64, {}] y) {{
                p = ReduceMax <axes = [1], keepdims = 1> (u)
                a = MatMul (x, v)  b = Softmax (a)  q = MatMul (b, w)
                y = Concat <axis = 1> (p, q)
            }}",
            width + 1
        );
        let graph = common::graph(&text);
        Recipe::default().whole(graph, &Target::cpu(1)).expect("the passes run")
    };
    let copied = |graph: &Prepared, memory: Option<u64>| {
        let plan = plan::planned(graph, &Target::cpu(1), &Limits { memory }).expect("it is planned");
        (plan.programs[0].steps.iter().any(|step| step.name.starts_with("copy of")), plan.bytes())
    };
    let little = late(8);
    let (copies, bytes) = copied(&little, None);
    assert!(!copies);
    let (copies, less) = copied(&little, Some(bytes - 1));
    assert!(copies && less < bytes, "{less} of {bytes}");
    assert!(less + bytes / 64 >= bytes, "so little that it was left: {less} of {bytes}");

    let (copies, _) = copied(&late(96), None);
    assert!(copies, "much is saved");
}

/// The bound of the file's order, and the plan's arena below it.
#[test]
fn graphs_that_gain_by_another_order() {
    let figures: [(&str, &[(&str, usize)], u64, u64); 3] = [
        ("decode", &[("batch", 1), ("past", 127)], 604_672, 459_776),
        ("experts", &[("tokens", 128)], 1_675_264, 1_214_464),
        ("unet", &[("batch", 1), ("height", 64), ("width", 64)], 1_381_120, 1_116_480),
    ];
    for (name, dims, file, best) in figures {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("graphs/{name}.onnxtxt"));
        let model = onnx::load(&path).expect("it is a model");
        let dims: Vec<_> = dims.iter().map(|&(dim, extent)| (dim.to_owned(), extent)).collect();
        let graph = onnx::import(&model, &dims).expect("it is a graph");
        let target = Target::cpu(1);
        let graph = Recipe::default().whole(graph, &target).expect("the passes run");
        let plan = plan::planned(&graph, &target, &Limits { memory: None }).expect("it is planned");
        assert_eq!(
            (plan.programs[0].summary.orders[0].bound, plan.programs[0].summary.arena_bytes),
            (file, best),
            "{name}"
        );
    }
}

/// Branches that the file interleaves step by step, and readers far behind.
fn branches(steps: usize) -> Draft {
    let mut draft = Draft::default();
    let mut random = Random(4);
    let mut heads = vec![(BufferIdx::default(), 1000)];
    draft.buffers.push(buffer("x", Class::Input, 1000));
    while draft.steps.len() < steps {
        let at = random.below(heads.len());
        let (from, size) = heads[at];
        let far = BufferIdx::new(random.below(draft.buffers.len()));
        let bytes = [size, 512, 1000, 5000][random.below(4)];
        draft.buffers.push(buffer("b", Class::Activation, bytes));
        let to = BufferIdx::new(draft.buffers.len() - 1);
        let reads = if random.below(10) == 0 { vec![from, far] } else { vec![from] };
        let reusable = if bytes == size && reads[0] != BufferIdx::default() { vec![from] } else { Vec::new() };
        draft.steps.push(DraftStep {
            name: "s".into(),
            kernel: KernelIdx::default(),
            reads,
            writes: vec![to],
            bind_ranges: Vec::new(),
            reusable,
        });
        match random.below(8) {
            0 => heads.push((to, bytes)),
            1 if heads.len() > 1 => drop(heads.swap_remove(at)),
            _ => heads[at] = (to, bytes),
        }
    }
    draft
}

/// Ten times the steps take about ten times the work: a hundred times would be that of steps compared with one another.
#[test]
fn work_grows_with_the_steps_and_not_with_their_square() {
    let [few, many] = [10_000, 100_000].map(|steps| {
        let draft = branches(steps);
        common::core_seconds(|| {
            let found = orders(&draft, ALIGN);
            let best = found.iter().min_by_key(|order| order.bound).expect("the file's is there");
            let solution = place(&problem(&draft, &best.steps), Effort::Steps(0));
            assert!(best.bound <= solution.peak && best.bound < found[0].bound, "{} {}", best.bound, found[0].bound);
        })
    });
    assert!(many < 40.0 * few, "{few} s for 10,000 steps, {many} s for 100,000");
}

fn buffer(name: &str, class: Class, bytes: usize) -> DraftBuffer {
    DraftBuffer {
        offloaded: false,
        name: name.into(),
        dtype: DType::U8,
        shape: Shape::new([bytes]),
        bytes: bytes as u64,
        class,
        over: None,
    }
}
