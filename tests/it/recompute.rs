//! Values that are computed again: they change the memory, and no result.

use plimsoll::internals::graph::AGAIN;
use plimsoll::internals::onnx::{self, Model};
use plimsoll::internals::pass::recompute::work;
use plimsoll::internals::plan::Planning;
use plimsoll::internals::train::classes::Classes;
use plimsoll::internals::train::{self, Loss, Optimizer, Rate, Training};
use plimsoll::{Choice, DType, Error, Graph, Limits, Options, Recipe, Session, Target, Tensor, Trace};

struct Random(u64);

impl Random {
    fn draw(&mut self, count: usize, scale: f64) -> Vec<f64> {
        let mut next = || {
            self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (self.0 >> 11) as f64 / (1u64 << 53) as f64 - 0.5
        };
        (0..count).map(|_| next() * scale).collect()
    }
}

/// Residual blocks of two products, trained by plain steps on one batch.
fn blocks(count: usize) -> Graph {
    let (rows, width) = (128, 32);
    let g = Trace::new("blocks");
    let mut random = Random(1);
    let x = g.input("x", DType::F32, [rows, width]);
    let mut weights = Vec::new();
    let mut y = x;
    for block in 0..count {
        let mut weight = |name: &str| {
            let values = random.draw(width * width, 0.3);
            let weight = g.state(&format!("{name}{block}"), Tensor::from_f64(DType::F32, [width, width], &values));
            weights.push(weight);
            weight
        };
        let (a, b) = (weight("a"), weight("b"));
        y = y + y.matmul(a).tanh().matmul(b).sigmoid();
    }
    let loss = (y * y).reduce_mean(&[], false);
    for (weight, gradient) in weights.iter().zip(g.grad(loss, &weights)) {
        g.update(*weight, *weight - gradient * 0.1);
    }
    g.output("loss", loss);
    g.finish().expect("the graph is sound")
}

fn session(limit: Option<u64>) -> plimsoll::Result<Session> {
    let options = Options { threads: 1, memory_limit: limit, ..Options::default() }.on(Choice::Cpu);
    Session::from_graph(blocks(8), &options)
}

/// The losses of some steps, and a weight behind them.
fn trained(session: &Session) -> (Vec<Vec<u8>>, Vec<u8>) {
    let x = Tensor::from_f64(DType::F32, [128, 32], &Random(2).draw(128 * 32, 2.0));
    let step = || session.run(&[("x", x.clone())]).expect("it runs")[0].1.bytes().to_vec();
    let losses: Vec<_> = (0..4).map(|_| step()).collect();
    (losses, session.state("a3").expect("it is a state").bytes().to_vec())
}

#[test]
fn a_limit_changes_bytes_and_no_bit_of_a_result() {
    let whole = session(None).expect("it is planned");
    let bytes = whole.plan().bytes();
    let expected = trained(&whole);
    assert!(expected.0[3] != expected.0[0], "the loss moves");
    let mut least = bytes;
    let mut reached = Vec::new();
    for percent in [90, 80, 70, 60, 50, 30] {
        let limit = bytes * percent / 100;
        match session(Some(limit)) {
            Ok(session) => {
                let planned = session.plan().bytes();
                assert!(planned <= limit, "{percent} %: {planned} of {limit}");
                assert_eq!(session.usage().bytes, planned);
                assert!(trained(&session) == expected, "{percent} %: other results");
                assert!(planned <= least, "{percent} %: a smaller limit gave a larger plan");
                least = planned;
                reached.push(percent);
            }
            Err(Error::Fit { needed, .. }) => assert!(needed > limit),
            Err(error) => panic!("{error}"),
        }
    }
    assert!(least * 10 < bytes * 8, "{least} of {bytes}: {reached:?}");
}

/// A value that is computed again is not kept for the backward computation, and is no gradient. If it were taken for one of the forward
/// computation, it would be counted so.
#[test]
fn what_is_computed_again_is_not_kept() {
    let plan = |limit| {
        let recipe = Recipe::default();
        recipe.plan(blocks(8), &Target::cpu(1), &Limits { memory: limit }).expect("it is planned")
    };
    let bytes = plan(None).bytes();
    let plan = plan(Some(bytes * 8 / 10));
    let copies = plan.programs[0].steps.iter().filter(|step| step.name.ends_with(AGAIN)).count();
    assert!(copies > 0, "nothing is computed again");
    let mut renamed = plan.clone();
    for step in &mut renamed.programs[0].steps {
        step.name = step.name.trim_end_matches(AGAIN).to_owned();
    }
    let (found, taken) = (Classes::of(&plan), Classes::of(&renamed));
    assert!(found.kept > 0 && found.kept < taken.kept, "{found:?} and {taken:?}");
    assert_eq!(found.kept + found.activation, taken.kept + taken.activation, "{found:?} and {taken:?}");
    assert_eq!(Classes { kept: 0, activation: 0, ..found }, Classes { kept: 0, activation: 0, ..taken });
}

/// A convolution, and the normalization of a batch that trains.
const NORMALIZED: &str = r#"<ir_version: 10, opset_import: ["" : 20]>
    net (float[batch, 2, 16, 16] x) => (float[batch, 2] y)
    <float[2, 2, 1, 1] filters = {1, 2, 3, 4}, float[2] scale = {1, 2}, float[2] shift = {0, 1},
     float[2] mean = {0, 0}, float[2] variance = {1, 1}, int64[2] axes = {2, 3}>
    {
        c = Conv (x, filters)
        n = BatchNormalization (c, scale, shift, mean, variance)
        r = Relu (n)
        y = ReduceMean <keepdims = 0> (r, axes)
    }"#;

/// Where launches and bytes cost, kernels compute `x - mean`, what is normalized and the deviations where they read them. The CPU computes
/// them once.
#[test]
fn a_normalization_stores_no_elementwise_value_that_its_kernels_can_compute() {
    let model = Model::new(onnx::text::parse(NORMALIZED, "net".as_ref()).expect("the text is sound")).with_weights();
    let graph = onnx::import(&model, &[("batch".into(), 8)]).expect("it is a graph");
    let method =
        Training::new(Loss::CrossEntropy, Optimizer::Sgd { momentum: 0.0, nesterov: false }, Rate::constant(0.1));
    let step = train::programs(&graph, &model.weights(), &method).expect("it trains").parts.remove(0).1;
    for (target, expected) in [(Target::cuda(), 1), (Target::cpu(2), 9)] {
        let plan = Recipe::default().plan(step.clone(), &target, &Limits { memory: None }).expect("it is planned");
        let maps =
            plan.programs[0].steps.iter().filter(|step| plan.programs[0].kernels[step.kernel].template.name() == "map");
        let own = maps.filter(|step| step.name.contains("BatchNormalization")).count();
        assert_eq!(own, expected, "for {}", target.name);
    }
}

/// A sum costs what it sums, unless its reader holds the row.
#[test]
fn sums_of_what_readers_hold_cost_one_operation() {
    let g = Trace::new("sums");
    let [x, long] = [("x", 100), ("long", 5000)].map(|(name, width)| g.input(name, DType::F32, [4, width]));
    g.output("of short rows", x.reduce_sum(&[1], true));
    g.output("of columns", x.reduce_sum(&[0], true));
    g.output("of all", x.reduce_sum(&[], true));
    g.output("of long rows", long.reduce_sum(&[1], true));
    let graph = g.finish().expect("it is a graph");
    let found: Vec<f64> = graph.outputs().iter().map(|(_, value)| work(&graph, value.node)).collect();
    assert_eq!(found, [4.0, 400.0, 1.0, 20_000.0]);
}
