//! States that grow: caches of decoders that append by Concat, with a capacity that is planned once.

use crate::common::{self, Folder};
use plimsoll::internals::session::{Choice, Options, Session};
use plimsoll::internals::{onnx, reference};
use plimsoll::{DType, Error, Extent, Graph, Shape, Target, Tensor};
use std::collections::HashMap;

const CAPACITY: usize = 13;

/// A step of a decoder of two heads, which attends to the rows of its cache and to those before it among the new rows. Positions, angles
/// and masks are computed from the cache's extent, as exporters do.
const DECODER: &str = r#"<ir_version: 8, opset_import: ["" : 18]>
decoder (
    float[1, t, 8] x, int64[1, total] mask, float[1, 2, past, 4] past_k, float[1, 2, past, 4] past_v
) => (float[1, t, 8] y, float[1, 2, all, 4] present_k, float[1, 2, all, 4] present_v)
<
    int64 zero = {0}, int64 one = {1}, int64 two = {2}, float low = {-1e9}, float none = {0}, float half = {0.5},
    int64[4] heads = {0, 0, 2, 4}, int64[3] joined = {0, 0, 8}, int64[1] first = {0}, int64[1] second = {1}, int64[1] third = {2},
    int64[2] column = {-1, 1}, int64[2] ahead = {0, 1}, int64[2] table = {40, 1}, int64 rows = {40}
>
{
    past_shape = Shape (past_k)
    rows_before = Gather (past_shape, two)
    x_shape = Shape (x)
    rows_new = Gather (x_shape, one)
    rows_after = Add (rows_before, rows_new)
    positions = Range (rows_before, rows_after, one)
    numbers = Range (zero, rows, one)
    floats = Cast <to = 1> (numbers)
    cosines = Cos (floats)
    embeddings = Reshape (cosines, table)
    embedded = Gather (embeddings, positions)
    placed = Cast <to = 1> (positions)
    scaled = Mul (placed, half)
    angles = Sin (scaled)
    wide = Unsqueeze (angles, second)
    x_placed = Add (x, embedded)
    x_turned = Add (x_placed, wide)
    split = Reshape (x_turned, heads)
    query = Transpose <perm = [0, 2, 1, 3]> (split)
    key = Tanh (query)
    value = Neg (query)
    only_past = Concat <axis = -2> (past_k)
    present_k = Concat <axis = -2> (only_past, key)
    present_v = Concat <axis = 2> (past_v, value)
    columns = Transpose <perm = [0, 1, 3, 2]> (present_k)
    products = MatMul (query, columns)
    places = Range (zero, rows_after, one)
    row_places = Reshape (positions, column)
    seen = LessOrEqual (places, row_places)
    bias = Where (seen, none, low)
    causal = Add (products, bias)
    given = Cast <to = 9> (mask)
    allowed = Unsqueeze (given, ahead)
    scores = Where (allowed, causal, low)
    weights = Softmax <axis = -1> (scores)
    attended = MatMul (weights, present_v)
    last = Transpose <perm = [0, 2, 1, 3]> (attended)
    merged = Reshape (last, joined)
    y = Add (x_turned, merged)
}"#;

/// Reductions, searches and slices over the rows of a cache.
const REDUCTIONS: &str = r#"<ir_version: 8, opset_import: ["" : 18]>
reductions (float[1, t, 4] x, float[1, past, 4] old) => (
    float[1, all, 4] new, float[1, 4] mean, float[1, 4] whole, float[1, 4] least, float[1, 4] most, float[1, 1, 4] product, float log,
    float[1, 4] end, float[1, 1, 4] before, float[1, 4] early, int64[1, 1, 4] place, float[1, 2, 4] best, float[1, t, 4] square,
    float[1, 4, 4] gram, float[1, 1, 4] sums, float[1, 1, 4] back, float[1, 4] prior, float[1, t, 4] rest
)
<
    int64[1] axis = {1}, int64[3] all = {0, 1, 2}, int64 last = {-1}, int64[1] end_at = {9223372036854775807}, int64[1] from = {-1},
    int64[1] k = {2}, int64[1] first = {0}, int64[1] one = {1}, int64 two = {2}, float quarter = {0.25}, int64 unit = {1}
>
{
    new = Concat <axis = 1> (old, x)
    mean = ReduceMean <keepdims = 0> (new, axis)
    whole = ReduceSum <keepdims = 0> (new, axis)
    least = ReduceMin <keepdims = 0> (new, axis)
    most = ReduceMax <keepdims = 0> (new, axis)
    shifted = Mul (new, quarter)
    product = ReduceL2 <keepdims = 1> (shifted, axis)
    log = ReduceLogSumExp <keepdims = 0> (new, all)
    end = Gather <axis = 1> (new, last)
    before = Slice (new, from, end_at, axis)
    early = Gather <axis = 1> (new, unit)
    place = ArgMax <axis = 1> (new)
    best, best_places = TopK <axis = 1> (new, k)
    columns = Transpose <perm = [0, 2, 1]> (shifted)
    gram = MatMul (columns, new)
    folded = MatMul (x, gram)
    square = Tanh (folded)
    running = CumSum (new, one)
    sums = Slice (running, from, end_at, axis)
    reversed = CumSum <reverse = 1> (new, one)
    back = Slice (reversed, first, one, axis)
    soft = Softmax <axis = 1> (new)
    weighted = Mul (soft, new)
    prior = ReduceSum <keepdims = 0> (weighted, axis)
    behind = Concat <axis = 1> (new, x)
    x_shape = Shape (x)
    x_rows = Slice (x_shape, axis, k)
    minus = Neg (x_rows)
    rest = Slice (behind, minus, end_at, axis)
}"#;

/// Attention with caches of its own, as ONNX has it since opset 23.
const ATTENTION: &str = r#"<ir_version: 8, opset_import: ["" : 23]>
attention (float[1, t, 8] x, float[1, 2, past, 4] past_k, float[1, 2, past, 4] past_v) => (
    float[1, t, 8] y, float[1, 2, all, 4] present_k, float[1, 2, all, 4] present_v
)
{
    k = Tanh (x)
    v = Neg (x)
    y, present_k, present_v = Attention <q_num_heads = 2, kv_num_heads = 2, is_causal = 1> (x, k, v, , past_k, past_v)
}"#;

/// Attention of ONNX Runtime's decoders, whose lengths are sums of a mask.
const GROUPED: &str = r#"<ir_version: 8, opset_import: ["" : 18, "com.microsoft" : 1]>
grouped (float[1, t, 16] x, int64[1, total] mask, float[1, 1, past, 4] past_k, float[1, 1, past, 4] past_v) => (
    float[1, t, 8] y, float[1, 1, all, 4] present_k, float[1, 1, all, 4] present_v
)
<int64[1] axis = {1}, int64 one = {1}, int64 place = {1}>
{
    counted = ReduceSum <keepdims = 0> (mask, axis)
    last = Sub (counted, one)
    lengths = Cast <to = 6> (last)
    mask_shape = Shape (mask)
    all_keys = Gather (mask_shape, place)
    total_keys = Cast <to = 6> (all_keys)
    y, present_k, present_v = com.microsoft.GroupQueryAttention <num_heads = 2, kv_num_heads = 1> (
        x, , , past_k, past_v, lengths, total_keys
    )
}"#;

fn pairs(list: &[(&str, &str)]) -> Vec<(String, String)> {
    list.iter().map(|(a, b)| ((*a).to_owned(), (*b).to_owned())).collect()
}

fn dims(list: &[(&str, usize)]) -> Vec<(String, usize)> {
    list.iter().map(|(name, extent)| ((*name).to_owned(), *extent)).collect()
}

/// The graph of a file whose states grow.
fn grown(path: &str, states: &[(&str, &str)], ranges: &[(&str, Extent)], t: usize) -> plimsoll::Result<Graph> {
    let extents = ranges.iter().map(|(name, extent)| ((*name).to_owned(), *extent)).collect();
    let (model, left) = onnx::load(path.as_ref())?.with_state(&pairs(states)).grow(extents)?;
    assert!(left.is_empty(), "every range is of what grows: {left:?}");
    onnx::import(&model, &dims(&[("t", t)]))
}

fn zeros(dtype: DType, shape: impl Into<Shape>) -> Tensor {
    let shape = shape.into();
    let values = vec![0.0; shape.numel()];
    Tensor::from_f64(dtype, shape, &values)
}

/// The first elements along an axis.
fn head(tensor: &Tensor, axis: usize, count: usize) -> Tensor {
    let access = plimsoll::internals::shape::Access::contiguous(tensor.shape().clone());
    tensor.gather(&access.slice(axis, 0, 1, count))
}

/// A file whose caches the host feeds back.
struct Host<'a> {
    model: onnx::Model,
    states: &'a [(&'a str, &'a str)],
    ranges: &'a [(&'a str, Extent)],
    t: usize,
    mask: Vec<f64>,
    caches: Vec<Tensor>,
}

impl Host<'_> {
    /// The graph where the caches have so many rows.
    fn graph(&self, rows: usize) -> Graph {
        let after = self.ranges.iter().skip(1).map(|(name, _)| (*name, rows + self.t));
        let all: Vec<_> = [("t", self.t), ("past", rows)].into_iter().chain(after).collect();
        onnx::import(&self.model, &dims(&all)).expect("it is a graph")
    }

    /// The inputs of a graph beside caches. Behind the rows that there are, a mask holds rubbish.
    fn inputs(&self, graph: &Graph, x: &Tensor, rows: usize) -> Vec<(String, Tensor)> {
        let element = |i: usize| if i < rows + self.t { self.mask[i] } else { 77.0 };
        let one = |name: &str, shape: &Shape| match name {
            "x" => x.clone(),
            _ => Tensor::from_f64(DType::I64, shape.clone(), &(0..shape.numel()).map(element).collect::<Vec<_>>()),
        };
        let inputs = graph.inputs().iter().map(|&v| (graph.value_name(v), &graph.fact(v).shape));
        let inputs = inputs.filter(|(name, _)| self.states.iter().all(|(state, _)| state != name));
        inputs.map(|(name, shape)| (name.to_owned(), one(name, shape))).collect()
    }

    /// The outputs of a run on caches of so many rows, by name.
    fn run(&mut self, x: &Tensor, rows: usize) -> HashMap<String, Tensor> {
        let graph = self.graph(rows);
        if self.caches.is_empty() {
            let empty =
                |name: &str| graph.inputs().iter().find(|&&v| graph.value_name(v) == name).expect("it is an input");
            let empty = |(name, _): &(&str, &str)| zeros(DType::F32, graph.fact(*empty(name)).shape.clone());
            self.caches = self.states.iter().map(empty).collect();
        }
        let others = self.inputs(&graph, x, rows).into_iter().map(|(_, tensor)| tensor);
        let inputs: Vec<_> = others.chain(self.caches.drain(..)).collect();
        let found = reference::run(&graph, &inputs).expect("the reference runs");
        let found: HashMap<_, _> = graph.outputs().iter().map(|(name, _)| name.clone()).zip(found).collect();
        self.caches = self.states.iter().map(|(_, new)| found[*new].clone()).collect();
        found
    }
}

/// Runs a file whose states grow beside one whose caches the host feeds back, on the reference and on every backend, until it is full.
fn grows_as_the_host_would(text: &str, states: &[(&str, &str)], ranges: &[(&str, Extent)], axis: usize, t: usize) {
    let folder = Folder::new("grow");
    let path = folder.file("model.onnxtxt", text);
    let graph = grown(&path, states, ranges, t).expect("it grows");
    let model = onnx::load(path.as_ref()).expect("it is a model");
    let open = |(name, open): common::Opener| {
        let options = Options { threads: 2, ..Options::default() };
        let session = common::load(graph.clone(), open(), name, &options);
        (name, session.unwrap_or_else(|e| panic!("{name}: {e}")))
    };
    let sessions: Vec<_> = common::backends().into_iter().map(open).collect();
    let (mut held, mut seed) = (reference::initial(&graph).expect("states begin with zeros"), 5);
    // The lengths of grouped attention are sums of the mask.
    let hidden = if text == GROUPED { CAPACITY } else { 2 };
    let mask: Vec<f64> = (0..CAPACITY).map(|i| f64::from(u8::from(i != hidden))).collect();
    let mut host = Host { model, states, ranges, t, mask, caches: Vec::new() };
    let is = |backend: &str, rows: usize, name: &str, found: &Tensor, expected: &Tensor| {
        common::agrees(found, expected, 1e-4).unwrap_or_else(|e| panic!("{backend}, {rows} rows, '{name}': {e}"));
    };
    for rows in (0..=CAPACITY - t).step_by(t) {
        let x = common::random(&mut seed, &graph.fact(graph.inputs()[0]).shape);
        let expected = host.run(&x, rows);
        let inputs = host.inputs(&graph, &x, rows);
        let tensors: Vec<_> = inputs.iter().map(|(_, tensor)| tensor.clone()).collect();
        let found = reference::step(&graph, &tensors, &mut held).expect("the reference runs");
        for ((name, _), found) in graph.outputs().iter().zip(&found) {
            is("reference", rows, name, found, &expected[name]);
        }
        let named: Vec<_> = inputs.iter().map(|(name, tensor)| (name.as_str(), tensor.clone())).collect();
        for (backend, session) in &sessions {
            let bytes = session.usage().bytes;
            let found = if rows == 2 * t { session.run_poisoned(&named) } else { session.run(&named) };
            for (name, found) in found.unwrap_or_else(|e| panic!("{backend}, {rows} rows: {e}")) {
                is(backend, rows, &name, &found, &expected[&name]);
            }
            for ((name, _), expected) in states.iter().zip(&host.caches) {
                let found = head(&session.state(name).expect("it is a state"), axis, rows + t);
                is(backend, rows, name, &found, expected);
            }
            assert_eq!(session.state("past").expect("it is the length").to_f64(), [(rows + t) as f64]);
            assert_eq!((session.usage().bytes, bytes), (session.plan().bytes(), bytes));
        }
    }
}

#[test]
fn a_decoder_appends_to_its_caches_in_place() {
    let ranges = [("past", Extent::from(0..=CAPACITY)), ("total", Extent::from(1..=CAPACITY))];
    for t in [1, 3] {
        grows_as_the_host_would(DECODER, &[("past_k", "present_k"), ("past_v", "present_v")], &ranges, 2, t);
    }
}

#[test]
fn operators_with_caches_grow_them_in_place() {
    let states = [("past_k", "present_k"), ("past_v", "present_v")];
    let ranges = [("past", Extent::from(0..=CAPACITY)), ("total", Extent::from(1..=CAPACITY))];
    for t in [1, 2] {
        grows_as_the_host_would(ATTENTION, &states, &ranges[..1], 2, t);
    }
    grows_as_the_host_would(GROUPED, &states, &ranges, 2, 1);
}

/// New rows are written into the states: no step copies one.
#[test]
fn no_step_copies_what_grows() {
    let folder = Folder::new("grow-steps");
    let states = [("past_k", "present_k"), ("past_v", "present_v")];
    // The decoder knows 40 positions.
    const ROOM: usize = 40;
    let (past, total) = (("past", Extent::from(0..=ROOM)), ("total", Extent::from(1..=ROOM)));
    for (text, ranges) in [(DECODER, &[past, total][..]), (ATTENTION, &[past]), (GROUPED, &[past, total])] {
        let graph = grown(&folder.file("model.onnxtxt", text), &states, ranges, 1).expect("it grows");
        for target in [Target::cpu(1), Target::wgpu(), Target::cuda()] {
            let plan = common::planned(&graph, &target);
            let rows = |state: &str| {
                plan.programs[0].state.iter().find(|s| s.port.name == state).expect("it is a state").port.shape[2]
            };
            assert_eq!([rows("past_k"), rows("past_v")], [ROOM; 2]);
            let kernels =
                plan.programs[0].steps.iter().map(|step| (&step.name, &plan.programs[0].kernels[step.kernel].shape));
            let large: Vec<_> = kernels.filter(|(_, shape)| shape.numel() >= ROOM * 4).collect();
            assert!(large.is_empty(), "{} on {}: {large:?}", graph.name, target.name);
        }
    }
}

#[test]
fn reductions_over_rows_end_at_the_length() {
    for t in [2, 3] {
        grows_as_the_host_would(REDUCTIONS, &[("old", "new")], &[("past", Extent::from(0..=CAPACITY))], 1, t);
    }
}

/// Comparisons of the number of rows with those of which no import is.
const COMPARISONS: &str = r#"<ir_version: 8, opset_import: ["" : 18]>
comparisons (float[1, t, 4] x, float[1, past, 4] old) => (float[1, all, 4] new, float[1, t, 4] y, float[1, t, 4] z)
<int64 zero = {0}, int64 one = {1}, int64 two = {2}, int64 three = {3}, float plus = {1}, float minus = {-1}>
{
    new = Concat <axis = 1> (old, x)
    shape = Shape (old)
    rows = Gather (shape, one)
    first = Equal (rows, zero)
    sign = Where (first, plus, minus)
    y = Mul (x, sign)
    rest = Mod (rows, three)
    third = Equal (rest, two)
    z = If (third) <
        then_branch = t () => (float[1, t, 4] a) { a = Neg (y) },
        else_branch = e () => (float[1, t, 4] b) { b = Add (y, plus) }
    >
}"#;

#[test]
fn comparisons_of_the_number_of_rows_hold_for_all() {
    grows_as_the_host_would(COMPARISONS, &[("old", "new")], &[("past", Extent::from(0..=CAPACITY))], 1, 1);
}

/// Options that grow the decoder's caches.
fn options(states: &[(&str, &str)], capacity: usize) -> Options {
    let options = Options { state: pairs(states), threads: 1, ..Options::default() }.on(Choice::Cpu);
    options.set("past", 0..=capacity).set("total", 1..=capacity).set("t", 2)
}

#[test]
fn a_run_beyond_the_capacity_is_refused_before_it_writes() {
    let folder = Folder::new("grow-beyond");
    let path = folder.file("decoder.onnxtxt", DECODER);
    let session = Session::from_path(&path, &options(&[("past_*", "present_*")], 5)).expect("it loads");
    let state = &session.plan().programs[0].state[0];
    assert_eq!((state.port.name.as_str(), state.count.map(|c| (c.by, c.most))), ("past", Some((2, 5))));
    let inputs = || {
        [
            ("x", common::random(&mut 3, &Shape::new([1, 2, 8]))),
            ("mask", Tensor::from_i64([1, 5], &[1; 5]).expect("it fits")),
        ]
    };
    let run = || session.run(&inputs());
    let (first, length) = (run().expect("it runs"), || session.state("past").expect("it is a state").to_f64());
    run().expect("it runs");
    assert_eq!(length(), [4.0]);
    let before = session.state("past_k").expect("it is a state");
    let refused =
        "state 'past' is 4, and a run adds 2: expected at most 5 after it; reset the states, or plan a larger capacity";
    for refusal in [run(), session.run_poisoned(&inputs())] {
        assert_eq!(refusal.unwrap_err().to_string(), refused);
    }
    assert_eq!((length(), session.state("past_k").expect("it is a state")), (vec![4.0], before), "all is as before");
    let integer = |n: i64| Tensor::from_i64([], &[n]).expect("it fits");
    for wrong in [-1, 6] {
        let refusal = session.set_state("past", &integer(wrong)).unwrap_err().to_string();
        assert_eq!(refusal, format!("state 'past': expected 0 to 5, found {wrong}"));
    }
    session.set_state("past", &integer(3)).expect("it fits");
    run().expect("three rows and two");
    assert!(run().is_err());
    session.reset_state().expect("it is reset");
    assert_eq!(run().expect("it runs again"), first);
    let later = Options { dims: Vec::new(), ..options(&[("past_*", "present_*")], 5) };
    let later = Session::from_path(&path, &later.set("past", 4..=6).set("total", 1..=6).set("t", 2)).expect("it loads");
    assert_eq!(later.state("past").expect("it is a state").to_f64(), [4.0], "it begins with the least");
    assert!(later.run(&inputs()).is_err(), "a mask of another capacity");
}

#[test]
fn states_that_cannot_grow_are_refused_by_name() {
    let folder = Folder::new("grow-refused");
    let refused = |text: &str, states: &[(&str, &str)], capacity: usize| {
        let path = folder.file("model.onnxtxt", text);
        let error = Session::from_path(&path, &options(states, capacity)).expect_err("it cannot grow");
        assert!(!matches!(error, Error::Plan { .. }), "{error}");
        error.to_string().split_once("onnxtxt: ").expect("it names the file").1.to_owned()
    };
    let both = [("past_*", "present_*")];
    assert_eq!(refused(DECODER, &both, 2), "dim 'past', 0..2: a run adds 2 rows to 0: expected a capacity of more");
    assert_eq!(
        refused(DECODER, &[("past_k", "present_k"), ("past_v", "y")], 8),
        "state 'past_v=y': input 'past_v' is f32[1,2,6,4], but output 'y' is f32[1,2,8]: expected more rows along one axis"
    );
    let changed = |from: &str, to: &str| DECODER.replacen(from, to, 1);
    let read = refused(&changed("value = Neg (query)", "value = Neg (query)\n    seen_before = ReduceSum <keepdims = 0> (past_v)\n    unused = Add (seen_before, none)").replace("y = Add (x_turned, merged)", "y_before = Add (x_turned, merged)\n    y = Add (y_before, unused)"), &both, 8);
    assert!(read.contains("reads state 'past_v' before it has grown: expected a Concat alone"), "{read}");
    let other = refused(
        &changed(
            "present_v = Concat <axis = 2> (past_v, value)",
            "joined_v = Concat <axis = 2> (past_v, value)\n    present_v = Neg (joined_v)",
        ),
        &both,
        8,
    );
    assert!(
        other.contains("state 'past_v=present_v': expected 'present_v' to be a Concat of 'past_v' and new rows"),
        "{other}"
    );
    let flat = refused(&changed("columns = Transpose <perm = [0, 1, 3, 2]> (present_k)", "order = Reshape (present_k, column)\n    columns = Transpose <perm = [0, 1, 3, 2]> (present_k)").replace("y = Add (x_turned, merged)", "y_before = Add (x_turned, merged)\n    order_sum = ReduceSum <keepdims = 0> (order)\n    y = Add (y_before, order_sum)"), &both, 8);
    assert!(flat.contains("node 'order' (Reshape)") && flat.contains("expected one element per row"), "{flat}");
    // An output that grows and is no state: the rows from before, the rows behind, and those of an input.
    for (node, words) in [
        ("past", "output 'other', f32[7,4], grows along dim 'rows'"),
        ("present", "output 'other', f32[8,4], grows along dim 'rows'"),
    ] {
        let text = format!(
            "< ir_version: 8, opset_import: [\"\" : 18] >\nplain (float[rows, 4] past, float[1, 4] new) => (float[all, 4] present, float[some, 4] other) \
             {{\n present = Concat <axis = 0> (past, new)\n other = Identity ({node})\n}}"
        );
        let path = folder.file("plain.onnxtxt", &text);
        let options = Options { state: pairs(&[("past", "present")]), ..Options::default() }.on(Choice::Cpu);
        let error = Session::from_path(&path, &options.set("rows", 0..=8)).expect_err("it cannot grow").to_string();
        assert!(error.contains(words), "{error}");
    }
}

#[test]
fn a_prompt_and_tokens_share_what_grows() {
    let folder = Folder::new("grow-programs");
    let path = folder.file("decoder.onnxtxt", DECODER);
    let states = [("past_k", "present_k"), ("past_v", "present_v")];
    let ranges = [("past", Extent::from(0..=CAPACITY)), ("total", Extent::from(1..=CAPACITY))];
    let parts =
        || [("prompt", 3), ("token", 1)].map(|(name, t)| (name, grown(&path, &states, &ranges, t).expect("it grows")));
    let x = common::random(&mut 9, &Shape::new([1, CAPACITY, 8]));
    let mask = Tensor::from_i64([1, CAPACITY], &[1; CAPACITY]).expect("it fits");
    let rows = |from: usize, count: usize| {
        let access = plimsoll::internals::shape::Access::contiguous(x.shape().clone());
        vec![("x", x.gather(&access.slice(1, from, 1, count))), ("mask", mask.clone())]
    };
    for (name, open) in common::backends() {
        let options = Options { threads: 2, ..Options::default() };
        let named = parts().map(|(name, graph)| (name.to_owned(), graph)).to_vec();
        let session = common::load_programs(named, open(), name, &options).expect("it loads");
        let single = common::load(parts()[1].1.clone(), open(), name, &options);
        let single = single.expect("it loads");
        let program = |name: &str| session.program(name).expect("it is one");
        let mut at = 0;
        for (part, count) in [("prompt", 3), ("token", 1), ("token", 1), ("prompt", 3), ("token", 1), ("prompt", 3)] {
            let found = program(part).run(&rows(at, count)).expect("it runs").remove(0).1;
            for row in 0..count {
                let expected = single.run(&rows(at + row, 1)).expect("it runs").remove(0).1;
                let access = plimsoll::internals::shape::Access::contiguous(found.shape().clone());
                let found = found.gather(&access.slice(1, row, 1, 1));
                common::agrees(&found, &expected, 1e-4).unwrap_or_else(|e| panic!("{name}, row {}: {e}", at + row));
            }
            at += count;
        }
        let refused = program("prompt").run(&rows(0, 3)).unwrap_err().to_string();
        assert!(refused.contains("state 'past' is 12, and a run adds 3: expected at most 13 after it"), "{refused}");
        program("token").run(&rows(12, 1)).expect("there is room for one");
        assert_eq!(session.state("past").expect("it is a state").to_f64(), [13.0]);
        assert_eq!(session.usage().bytes, session.plan().bytes(), "{name}");
    }
}
