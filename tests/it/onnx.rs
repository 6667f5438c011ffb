//! ONNX files from outside: those that are read, and those that are refused with a message.

use plimsoll::internals::backend::cpu::Cpu;
use plimsoll::internals::exec::Exec;
use plimsoll::internals::graph::{Graph, Kind};
use plimsoll::internals::onnx::proto::{DataLocation, DataType, ModelProto, SparseTensorProto, StringStringEntryProto};
use plimsoll::internals::onnx::{Model, export, import, load, text};
use plimsoll::internals::plan::Recipe;
use plimsoll::internals::session::{Choice, Options, Session};
use plimsoll::internals::{npy, plan, reference};
use plimsoll::{Limits, Target, Tensor};
use prost::Message;
use std::fs;
use std::path::{Path, PathBuf};

fn graphs(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("graphs").join(name)
}

/// An empty folder for one test.
fn folder(test: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("onnx-{test}"));
    _ = fs::remove_dir_all(&path);
    fs::create_dir_all(&path).expect("the folder for tests is writable");
    path
}

fn dims(given: &[(&str, usize)]) -> Vec<(String, usize)> {
    given.iter().map(|&(name, size)| (name.into(), size)).collect()
}

/// A model in text, of opset 20 unless it has a header.
fn model(source: &str) -> Model {
    let header = if source.contains("ir_version") { "" } else { "<ir_version: 9, opset_import: [\"\" : 20]>" };
    let proto = text::parse(&format!("{header}{source}"), Path::new("test")).expect("the test's text is well-formed");
    Model::new(proto)
}

fn graph(source: &str, given: &[(&str, usize)]) -> Graph {
    let graph = import(&model(source), &dims(given)).unwrap_or_else(|e| panic!("{e}\n{source}"));
    graph.verify().expect("an imported graph is sound");
    graph
}

fn refusal(source: &str, given: &[(&str, usize)]) -> String {
    import(&model(source), &dims(given)).expect_err("it must be refused").to_string()
}

/// The operators of a graph, in order.
fn operators(graph: &Graph) -> Vec<&'static str> {
    let order = graph.order().expect("no cycles");
    order.into_iter().filter_map(|n| graph.node(n).op()).map(|op| op.name).collect()
}

fn facts(graph: &Graph) -> Vec<String> {
    let inputs = graph.inputs().iter().map(|&v| format!("{} {}", graph.value_name(v), graph.fact(v)));
    inputs.chain(graph.outputs().iter().map(|(name, v)| format!("{name} {}", graph.fact(*v)))).collect()
}

/// Some exporters list an output twice.
#[test]
fn an_output_that_is_listed_twice_is_one() {
    let graph = graph("g (float[2] x) => (float[2] y, float[2] z, float[2] y) { y = Relu (x)  z = Neg (x) }", &[]);
    assert_eq!(graph.outputs().iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(), ["y", "z"]);
}

/// The outputs for inputs whose elements count up from 1.
fn run(graph: &Graph) -> Vec<Vec<f64>> {
    let input = |&v: &_| {
        let fact = graph.fact(v);
        let values: Vec<f64> = (0..fact.shape.numel()).map(|i| (i + 1) as f64).collect();
        Tensor::from_f64(fact.dtype, fact.shape.clone(), &values)
    };
    let inputs: Vec<_> = graph.inputs().iter().map(input).collect();
    reference::run(graph, &inputs).expect("it runs").iter().map(Tensor::to_f64).collect()
}

#[test]
fn the_example_graphs_are_read() {
    let read = |name, given: &[(&str, usize)]| {
        let model = load(&graphs(name)).unwrap_or_else(|e| panic!("{e}"));
        let graph = import(&model, &dims(given)).unwrap_or_else(|e| panic!("{e}"));
        graph.verify().expect("an imported graph is sound");
        graph
    };
    let mlp = read("mlp.onnxtxt", &[("batch", 3)]);
    assert_eq!(facts(&mlp)[0], "x f32[3,784]");
    assert_eq!(operators(&mlp), ["MatMul", "Add", "Relu", "MatMul", "Add"]);
    let attention = read("attention.onnxtxt", &[("batch", 2), ("sequence", 5)]);
    assert_eq!(facts(&attention).last().map(String::as_str), Some("y f32[2,5,64]"));
    let residual = read("residual.onnxtxt", &[("batch", 2), ("height", 9), ("width", 7)]);
    assert_eq!(facts(&residual).last().map(String::as_str), Some("y f32[2,8,9,7]"));
}

#[test]
fn the_digits_are_classified_as_they_are_labelled() {
    const COUNT: usize = 24;
    let model = load(&graphs("digits.onnx")).expect("it is a model");
    let graph = import(&model, &dims(&[("batch", COUNT)])).expect("it is understood");
    let images = npy::read(&graphs("digits-images.npy")).expect("images");
    let labels = npy::read(&graphs("digits-labels.npy")).expect("labels").to_i64().expect("integers");
    let batch = Tensor::new(images.dtype(), [COUNT, 1, 8, 8], images.bytes().slice(..COUNT * 64 * 4)).expect("it fits");
    let logits = reference::run(&graph, &[batch]).expect("it runs")[0].to_f64();
    let largest = |row: &[f64]| (0..10).max_by(|&a, &b| row[a].total_cmp(&row[b])).expect("ten of them") as i64;
    let right = logits.chunks(10).zip(labels).filter(|(row, label)| largest(row) == *label).count();
    assert!(right >= COUNT - 1, "{right} of {COUNT} are right");
}

#[test]
fn shape_arithmetic_is_gone_once_dims_are_bound() {
    let source = "
        agraph (float[batch, sequence, 12] x) => (float[batch, heads, sequence, 4] y)
        <int64 zero = {0}, int64 one = {1}, int64[1] first = {0}, int64 three = {3}>
        {
            shape = Shape (x)
            batch = Gather <axis = 0> (shape, zero)
            length = Gather <axis = 0> (shape, one)
            batch1 = Unsqueeze (batch, first)
            length1 = Unsqueeze (length, first)
            split = Constant <value = int64[2] {3, -1}> ()
            target = Concat <axis = 0> (batch1, length1, split)
            heads = Reshape (x, target)
            positions = Range (zero, length, one)
            column = Unsqueeze (positions, one)
            wide = Mul (column, three)
            offsets = Cast <to = 1> (wide)
            swapped = Transpose <perm = [0, 2, 1, 3]> (heads)
            y = Add (swapped, offsets)
        }";
    let graph = graph(source, &[("batch", 2), ("sequence", 5)]);
    assert_eq!(facts(&graph), ["x f32[2,5,12]", "y f32[2,3,5,4]"]);
    assert_eq!(operators(&graph), ["Reshape", "Transpose", "Add"]);
    let y = &run(&graph)[0];
    // Row s of head 0 starts at element 12 s of the input, and 3 s is added.
    assert_eq!(y[4..8], [13.0 + 3.0, 14.0 + 3.0, 15.0 + 3.0, 16.0 + 3.0]);
}

#[test]
fn dims_are_bound_by_name_by_sum_or_by_place() {
    let source =
        "g (float[batch, 3] x, float[batch, \"past + 2*batch\"] m, float[?, 2] u) => (float[a, b] y, float[a, 2] z)
        { y = Concat <axis = 1> (x, m)  z = Identity (u) }";
    let bound = graph(source, &[("batch", 4), ("past", 1), ("u.0", 7)]);
    assert_eq!(facts(&bound), ["x f32[4,3]", "m f32[4,9]", "u f32[7,2]", "y f32[4,12]", "z f32[7,2]"]);
    let whole = graph(source, &[("batch", 4), ("past + 2*batch", 5), ("u.0", 1)]);
    assert_eq!(facts(&whole)[1], "m f32[4,5]");
    assert_eq!(refusal(source, &[("batch", 4)]), "dims not bound: 'past', 'u.0'");
    let all = [("batch", 4), ("past", 1), ("u.0", 7)];
    assert_eq!(
        refusal(source, &[&all[..], &[("bacth", 1)]].concat()),
        "the graph has no dim 'bacth' to set; its dims: 'batch', 'past', 'u.0'"
    );
    assert!(refusal(source, &[&all[..], &[("batch", 5)]].concat()).contains("'batch' is set twice"));
    assert!(refusal(source, &[("batch", usize::MAX), ("past", 1), ("u.0", 7)]).contains("larger than any memory"));
    // Two unknown sizes that an exporter calls "?" need not be equal.
    let unknown = "g (float[\"?\", \"?\"] x) => (float[a, b] y) { y = Identity (x) }";
    assert_eq!(facts(&graph(unknown, &[("x.0", 2), ("x.1", 3)])), ["x f32[2,3]", "y f32[2,3]"]);
}

#[test]
fn an_input_that_must_be_known_says_on_what_it_depends() {
    let message = refusal(
        "g (float[2, 3] x, int64[2] target) => (float[6] y)
        { [move] doubled = Add (target, target) [shape] y = Reshape (x, doubled) }",
        &[],
    );
    assert_eq!(
        message,
        "node 'shape' (Reshape): input 'shape' must be known before the run, but 'doubled' depends on the data of 'target'; where their elements are given, they are bound"
    );
}

#[test]
fn all_unknown_operators_are_listed_at_once() {
    let message = refusal(
        "<ir_version: 9, opset_import: [\"\" : 20, \"org.example\" : 1]>
        g (float[2] x) => (float[2] y)
        { a = Fourier (x) [second] b = org.example.Relu (a) c = Fourier (b) y = Relu (c) }",
        &[],
    );
    assert_eq!(
        message,
        "graph: plimsoll does not have these operators: Fourier (2 nodes, the first is 'a'), org.example.Relu (node 'second'); the model's \
         opset is 20, and `plimsoll ops` lists those that it has"
    );
}

#[test]
fn functions_are_inlined() {
    let source = "
        <ir_version: 9, opset_import: [\"\" : 20, \"local\" : 1]>
        g (float[4] x) => (float[4] y, float[4] z)
        { [outer] y = local.twice <by = 3.0> (x)  z = local.scale (y) }

        <domain: \"local\", opset_import: [\"\" : 20, \"local\" : 1]>
        twice <by> (v) => (r) { t = local.scale <by: float = @by> (v)  r = local.scale <by: float = @by> (t, t) }

        <domain: \"local\", opset_import: [\"\" : 20]>
        scale <by: float = 0.5> (v, extra) => (r) {
            k = Constant <value_float: float = @by> ()
            s = Mul (v, k)
            r = Clip (s, extra)
        }";
    let graph = graph(source, &[]);
    assert_eq!(run(&graph), [[9.0, 18.0, 27.0, 36.0], [4.5, 9.0, 13.5, 18.0]]);
    let names: Vec<_> = graph.order().unwrap().into_iter().map(|n| graph.node(n).name.clone()).collect();
    assert!(names.contains(&"outer/t/s".to_owned()), "{names:?}");

    let endless =
        source.replace("s = Mul (v, k)", "s = local.scale (v)").replace("[\"\" : 20]>", "[\"\" : 20, \"local\" : 1]>");
    assert!(refusal(&endless, &[]).contains("nest deeper than 32: does one call itself?"));
    let unknown = source.replace("local.scale (y)", "local.scale <to = 1> (y)");
    assert_eq!(refusal(&unknown, &[]), "node 'z' (scale): unknown attribute 'to'");
}

#[test]
fn functions_cannot_grow_a_model_without_end() {
    let mut source =
        "<ir_version: 9, opset_import: [\"\" : 20, \"l\" : 1]> g (float[4] x) => (float[4] y) { y = l.f0 (x) }"
            .to_owned();
    for level in 0..30 {
        let next = if level == 29 { "Relu".to_owned() } else { format!("l.f{}", level + 1) };
        source += &format!(
            "<domain: \"l\", opset_import: [\"\" : 20, \"l\" : 1]> f{level} (v) => (r) {{ t = {next} (v) r = {next} (t) }}"
        );
    }
    assert!(refusal(&source, &[]).contains("functions and loops let the graph grow beyond 262144 nodes"));
}

/// Chains of constants may be as long as the file makes them.
#[test]
fn long_chains_of_constants_are_folded() {
    let chain: String = (1..100_000).map(|i| format!("c{i} = Neg (c{}) ", i - 1)).collect();
    let source = format!("g (float[2] x) => (float[2] y) <float c0 = {{3}}> {{ {chain} y = Mul (x, c99999) }}");
    assert_eq!(run(&graph(&source, &[])), [[-3.0, -6.0]]);
}

/// A loop whose iterations are known before the run becomes its iterations, one after another.
#[test]
fn loops_that_can_be_counted_need_no_run() {
    let graph_of = |body: &str| format!("g (float[2, 3] x, bool c) => (float[k] last, float[m, n] all) {{ {body} }}");
    let constants =
        "three = Constant <value_int = 3> () yes = Constant <value = bool {1}> () one = Constant <value_int = 1> ()
        start = Constant <value_floats = [1.0, 2.0]> ()";
    // The state is multiplied by i + 1: 1, 2; then 2, 4; then 6, 12.
    let body = "body = b (int64 i, bool go, float[2] state) => (bool go_on, float[2] next, float[2] seen)
        { go_on = Identity (go) n = Add (i, one) f = Cast <to = 1> (n) next = Mul (state, f) seen = Identity (next) }";
    let counted = format!("{constants} last, all = Loop <{body}> (three, yes, start)");
    assert_eq!(run(&graph(&graph_of(&counted), &[])), [vec![6.0, 12.0], vec![1.0, 2.0, 2.0, 4.0, 6.0, 12.0]]);
    // The loop has no bound and ends when the iteration's number is 1.
    let until = body.replace("go_on = Identity (go)", "go_on = Less (i, one)");
    let until = format!("{constants} last, all = Loop <{until}> (, yes, start)");
    assert_eq!(run(&graph(&graph_of(&until), &[])), [vec![2.0, 4.0], vec![1.0, 2.0, 2.0, 4.0]]);
    // Running sums over the columns of x from the last to the first, stacked along axis 1.
    let body = "body = b (float[2] state, float[2] column) => (float[2] next, float[2] seen)
        { next = Add (state, column) seen = Neg (next) }";
    let axes = "num_scan_inputs = 1, scan_input_axes = [1], scan_input_directions = [1], scan_output_axes = [1]";
    let scanned = format!("{constants} last, all = Scan <{axes}, {body}> (start, x)");
    // x is 1, 2, 3 and 4, 5, 6.
    assert_eq!(run(&graph(&graph_of(&scanned), &[])), [vec![7.0, 17.0], vec![-4.0, -6.0, -7.0, -8.0, -13.0, -17.0]]);

    let open = counted.replace("(three, yes, start)", "(three, c, start)");
    assert_eq!(
        refusal(&graph_of(&open), &[]),
        "node 'last' (Loop): output 'all' has as many parts as there are iterations: input 'cond' must be known before the run, but 'c' \
         depends on the data of 'c'; where their elements are given, they are bound"
    );
    // Without iterations there are no parts, but their type and shape are known.
    for none in
        [counted.replace("(three, yes, start)", "(zero, yes, start)"), counted.replace("yes, start)", "no, start)")]
    {
        let none = format!("zero = Constant <value_int = 0> () no = Constant <value = bool {{0}}> () {none}");
        let graph = graph(&graph_of(&none), &[]);
        let facts: Vec<_> = graph.outputs().iter().map(|(_, value)| graph.fact(*value).to_string()).collect();
        assert_eq!(facts, ["f32[2]", "f32[0,2]"]);
        assert_eq!(run(&graph), [vec![1.0, 2.0], vec![]]);
        assert!(operators(&graph).is_empty(), "the body is not run");
    }
    let endless = counted.replace("(three, yes, start)", "(, yes, start)");
    let found = refusal(&graph_of(&endless), &[]);
    assert!(found.ends_with("it runs more than 8192 times: expected an 'M' or a 'cond' that ends it"), "{found}");
}

/// Sequences whose length and order follow from shapes and constants become plain values.
#[test]
fn sequences_are_lists_of_values() {
    let graph_of = |body: &str| format!("g (float[5, 2] x, float[1, 2] z) => (float[m, k] y) {{ {body} }}");
    let constants =
        "zero = Constant <value_int = 0> () last = Constant <value_int = -1> () two = Constant <value_int = 2> ()";
    let parts = format!("{constants} parts = SplitToSequence <axis = 0> (x, two)");
    // x counts from 1 to 10, z from 1 to 2.
    let first = graph_of(&format!(
        "{parts} a = SequenceAt (parts, zero) b = SequenceAt (parts, last) y = Concat <axis = 0> (b, a)"
    ));
    assert_eq!(run(&graph(&first, &[])), [[9.0, 10.0, 1.0, 2.0, 3.0, 4.0]]);
    assert_eq!(operators(&graph(&first, &[])), ["Split", "Concat"]);
    let edited = "more = SequenceInsert (parts, z, last) fewer = SequenceErase (more, zero) rest = SequenceErase (fewer) \
                  all = SequenceInsert (rest, z) y = ConcatFromSequence <axis = 0> (all)";
    assert_eq!(run(&graph(&graph_of(&format!("{parts} {edited}")), &[])), [[5.0, 6.0, 7.0, 8.0, 1.0, 2.0, 1.0, 2.0]]);
    // The rows lose their axis and get a new one.
    let rows =
        "rows = SplitToSequence <axis = 0, keepdims = 0> (x) y = ConcatFromSequence <axis = 1, new_axis = 1> (rows)";
    assert_eq!(run(&graph(&graph_of(rows), &[])), [[1.0, 3.0, 5.0, 7.0, 9.0, 2.0, 4.0, 6.0, 8.0, 10.0]]);
    let unbound = "one = Constant <value_int = 1> () rows = SplitToSequence <axis = 0, keepdims = 0> (x, one) same = Identity (rows) \
                   y = ConcatFromSequence <axis = 1, new_axis = 1> (same)";
    assert_eq!(run(&graph(&graph_of(unbound), &[])), [[1.0, 3.0, 5.0, 7.0, 9.0, 2.0, 4.0, 6.0, 8.0, 10.0]]);
    let long =
        "g (float[1000000000000] x) => (float[m] y) { q = SplitToSequence (x) y = ConcatFromSequence <axis = 0> (q) }";
    assert_eq!(refusal(long, &[]), "node 'q' (SplitToSequence): expected 8192 tensors or fewer, found 1000000000000");
    let sizes = "sizes = Constant <value_ints = [1, 4]> () parts = SplitToSequence (x, sizes) one = Constant <value_int = 1> () \
                 made = SequenceConstruct (z, x) n = SequenceLength (made) at = Sub (n, one) a = SequenceAt (parts, at) y = Neg (a)";
    assert_eq!(run(&graph(&graph_of(sizes), &[])), [[-3.0, -4.0, -5.0, -6.0, -7.0, -8.0, -9.0, -10.0]]);

    let refused = |body: &str| refusal(&graph_of(&format!("{parts} {body}")), &[]);
    assert_eq!(
        refused("three = Constant <value_int = 3> () y = SequenceAt (parts, three)"),
        "node 'y' (SequenceAt): input 'position': expected a place in a sequence of 3, found [3]"
    );
    assert_eq!(refused("y = Neg (parts)"), "node 'y' (Neg): expected a tensor, found the sequence 'parts'");
    assert_eq!(
        refused("y = SequenceInsert (parts, zero)"),
        "node 'y' (SequenceInsert): expected tensors of one type, found f32 and i64"
    );
    assert_eq!(
        refused("y = SequenceConstruct (x)"),
        "graph: output 'y': expected a tensor, found a sequence; make its tensors outputs of the model"
    );
}

#[test]
fn a_branch_that_is_known_is_taken() {
    let source = "
        g (float[2, n] x) => (float[m, k] y)
        {
            last = Shape <start = 1> (x)
            five = Constant <value = int64[1] {5}> ()
            long = Greater (last, five)
            y = If (long) <
                then_branch = t () => (float[m, k] a) { a = Neg (x) },
                else_branch = e () => (float[m, k] b) <float two = {2}> { b = Mul (x, two) }
            >
        }";
    assert_eq!(operators(&graph(source, &[("n", 6)])), ["Neg"]);
    assert_eq!(run(&graph(source, &[("n", 2)])), [[2.0, 4.0, 6.0, 8.0]]);
}

#[test]
fn initializers_may_be_listed_as_inputs() {
    let source =
        "<ir_version: 3, opset_import: [\"\" : 7]> g (float[2] x, float[2] w) => (float[2] y, float[2] w, float[2] x)
        <float[2] w = {10, 20}> { y = Add (x, w) }";
    let graph = graph(source, &[]);
    assert_eq!(facts(&graph), ["x f32[2]", "y f32[2]", "w f32[2]", "x f32[2]"]);
    assert_eq!(run(&graph), [[11.0, 22.0], [10.0, 20.0], [1.0, 2.0]]);
}

#[test]
fn opsets_from_7_on_mean_what_they_meant() {
    // In old opsets, axes, split and bounds are attributes.
    let source = |opset| {
        format!(
            "<ir_version: 7, opset_import: [\"\" : {opset}]> g (float[1, 6] x) => (float[1, 3] y, float[3] z) {{
                a, b = Split <axis = 1, split = [3, 3]> (x)
                y = Slice <axes = [1], starts = [0], ends = [100]> (a)
                z = Squeeze <axes = [0]> (b)
            }}"
        )
    };
    assert_eq!(run(&graph(&source(9), &[])), [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]);
    assert_eq!(refusal(&source(0), &[]), "graph: opset 0: expected 1 or newer");
    let none = "<ir_version: 7, opset_import: [\"other\" : 1]> g (float[1] x) => (float[1] y) { y = Relu (x) }";
    assert_eq!(refusal(none, &[]), "graph: not a whole ONNX model: it does not say which opset it uses");
    let parts = graph("g (float[7] x) => (float[4] a, float[3] b) { a, b = Split <num_outputs = 2> (x) }", &[]);
    assert_eq!(facts(&parts)[1..], ["a f32[4]", "b f32[3]"]);
    let equal =
        graph("<ir_version: 7, opset_import: [\"\" : 13]> g (float[6] x) => (float[2] b) { a, b, c = Split (x) }", &[]);
    assert_eq!(run(&equal), [[3.0, 4.0]]);
}

#[test]
fn nodes_may_be_listed_in_any_order() {
    let main = graph("g () => (float[1] y) { y = Neg (b) b = Relu (a) a = Constant <value = float[1] {3}> () }", &[]);
    assert_eq!(run(&main), [[-3.0]]);
    // A body waits for what it takes from around it, and its own nodes may stand in any order, too.
    let body = graph(
        "g () => (float[1] y) {
            y = If (yes) <then_branch = t () => (float[1] r) { r = Add (q, a) q = Neg (a) },
                          else_branch = e () => (float[1] r) { r = Neg (a) }>
            a = Constant <value = float[1] {3}> ()
            yes = Constant <value = bool {1}> ()
        }",
        &[],
    );
    assert_eq!(run(&body), [[0.0]]);
}

#[test]
fn what_is_wrong_with_a_graph_is_said_of_its_node() {
    let cases = [
        (
            "g (float[2] x) => (float[2] y) { y = Add (x, w) }",
            "node 'y' (Add): reads 'w', which is no input, no initializer and no node's output",
        ),
        (
            "g (float[2] x) => (float[2] z) { [c] z = Relu (y) [a] y = Add (x, w) [b] w = Relu (y) }",
            "node 'a' (Add): reads 'w', which node 'b' makes, and that node waits for this one: expected nodes that do not wait in a circle",
        ),
        (
            "g (float[2] x) => (float[2] y) { [a] y = Add (x, y) }",
            "node 'a' (Add): reads 'y', which node 'a' makes, and that node waits for this one: expected nodes that do not wait in a circle",
        ),
        (
            "g (float[2] x) => (float[2] y) { y = Relu (x) y = Relu (x) }",
            "node 'y' (Relu): 'y' is already another value's name",
        ),
        ("g (float[2] x) => (float[2] z) { y = Relu (x) }", "graph: output 'z' is produced by no node"),
        ("g (float[2] x, float[2] x) => (float[2] y) { y = Relu (x) }", "graph: two inputs are called 'x'"),
        ("g (float[2] x) => () { y = Relu (x) }", "graph: it has no outputs"),
        (
            "g (float[2] x) => (int64[2] y) { y = Relu (x) }",
            "graph: output 'y': the file declares int64, but its nodes make f32[2]",
        ),
        ("g (float[] x) => (float[2] y) { y = Relu (x) }", "graph: input 'x': its rank is unknown: expected a shape"),
        (
            "g (seq(float[2]) x) => (float[2] y) { y = Relu (x) }",
            "graph: input 'x': expected a tensor type, found a sequence",
        ),
        (
            "g (complex64[2] x) => (complex64[2] y) { y = Relu (x) }",
            "graph: input 'x': element type complex64 is not supported (supported: float, float16, bfloat16, double, int64, \
          int32, int16, int8, uint64, uint32, uint16, uint8, bool, int4, uint4, int2, uint2, float8e4m3fn, float8e4m3fnuz, float8e5m2, float8e5m2fnuz, float8e8m0, float4e2m1)",
        ),
        (
            "g (float[2] x) => (float[2] y) { y = Relu <speed = 3> (x) }",
            "node 'y' (Relu): unknown attribute 'speed'; it takes none",
        ),
        (
            "g (float[2, 3] x, float[4] w) => (float[2, 3] y) { [sum] y = Add (x, w) }",
            "node 'sum' (Add): expected shapes that broadcast, found [2,3] and [4]",
        ),
        ("g (float[2] x) => (float[2] y) { y = Relu (x, x) }", "node 'y' (Relu): expected 1 inputs, found 2"),
        (
            "g (float[2] x) => (float[2] y) <string s = {\"a\"}> { y = Relu (x) }",
            "graph: tensor 's' (string []): element type string is not supported",
        ),
    ];
    for (source, expected) in cases {
        let message = refusal(source, &[]);
        assert!(message.starts_with(expected), "{source}\nexpected: {expected}\n   found: {message}");
    }
}

#[test]
fn constants_are_windows_into_the_file() {
    let file = load(&graphs("digits.onnx")).expect("it is a model");
    let graph = import(&file, &dims(&[("batch", 1)])).expect("it is understood");
    let proto = file.proto.graph.as_ref().expect("a graph");
    let mut found = 0;
    for node in graph.order().expect("no cycles") {
        let Kind::Constant(constant) = &graph.node(node).kind else { continue };
        let Some(tensor) = proto.initializer.iter().find(|t| t.name == constant.name) else { continue };
        let value = constant.value().expect("it is there");
        assert_eq!(value.bytes().as_ptr(), tensor.raw_data.as_ptr(), "{}", constant.name);
        found += 1;
    }
    assert!(found > 5, "{found} weights");
}

/// A model whose weight `[2]` lies at byte 8 of `w.bin`.
fn external(length: &str) -> ModelProto {
    let Model { mut proto, .. } = model("g (float[2] x) => (float[2] y) <float[2] w = {0, 0}> { y = Mul (x, w) }");
    let weight = &mut proto.graph.as_mut().expect("a graph").initializer[0];
    weight.float_data.clear();
    weight.data_location = DataLocation::External as i32;
    let entries = [("location", "w.bin"), ("offset", "8"), ("length", length)];
    weight.external_data =
        entries.map(|(key, value)| StringStringEntryProto { key: key.into(), value: value.into() }).into();
    proto
}

/// A model whose weight `[2, 3]` lists two elements, at these places.
fn sparse(dims: &[i64], places: &[i64]) -> ModelProto {
    let text = "g (float[2, 3] x) => (float[2, 3] y) <float[2] w = {5, 7}, int64[1] at = {0}> { y = Add (x, w) }";
    let Model { mut proto, .. } = model(text);
    let graph = proto.graph.as_mut().expect("a graph");
    let (mut indices, values) = (graph.initializer.remove(1), graph.initializer.remove(0));
    (indices.dims, indices.int64_data) = (dims.to_vec(), places.to_vec());
    indices.raw_data.clear();
    graph.sparse_initializer =
        vec![SparseTensorProto { values: Some(values), indices: Some(indices), dims: vec![2, 3] }];
    proto
}

#[test]
fn sparse_initializers_are_read_as_dense_ones() {
    let path = folder("sparse").join("model.onnx");
    let read = |dims: &[i64], places: &[i64]| {
        fs::write(&path, sparse(dims, places).encode_to_vec()).expect("writable");
        import(&load(&path)?, &[])
    };
    let [listed, tuples] =
        [run(&read(&[2], &[1, 5]).expect("places")), run(&read(&[2, 2], &[0, 1, 1, 2]).expect("tuples"))];
    assert_eq!(listed, [[1.0, 7.0, 3.0, 4.0, 5.0, 13.0]]);
    assert_eq!(listed, tuples);
    let refused = |dims: &[i64], places: &[i64]| read(dims, places).expect_err("refused").to_string();
    let found = refused(&[2], &[1, 6]);
    assert!(found.ends_with("sparse initializer 'w': expected places from 0 to below 6, found 6"), "{found}");
    let found = refused(&[2, 1], &[1, 5]);
    assert!(found.ends_with("expected places int64 [2] or [2, 2], found int64 [2, 1]"), "{found}");
}

#[test]
fn external_data_lies_beside_the_model_and_is_read_late() {
    let folder = folder("external");
    let path = folder.join("model.onnx");
    fs::write(&path, external("8").encode_to_vec()).expect("writable");
    fs::write(folder.join("w.bin"), [0; 15]).expect("writable");
    let message = load(&path).expect_err("its weights are cut off").to_string();
    assert!(message.ends_with("w.bin: tensor 'w' needs 8 bytes from byte 8 on, but the file has 15"), "{message}");

    let weights: Vec<u8> = [0.0f32, 0.0, 3.0, -1.0].iter().flat_map(|v| v.to_le_bytes()).collect();
    fs::write(folder.join("w.bin"), weights).expect("writable");
    let graph = import(&load(&path).expect("all is there"), &[]).expect("it is understood");
    assert_eq!(run(&graph), [[3.0, -2.0]]);

    let wrong = folder.join("wrong.onnx");
    fs::write(&wrong, external("12").encode_to_vec()).expect("writable");
    let message = load(&wrong).expect_err("its length is wrong").to_string();
    assert!(message.contains("wrong.onnx: ") && message.contains("expected 8 bytes of external data"), "{message}");

    // Loading does not read the weights. Reading them later names the missing file.
    let late = import(&load(&path).expect("all is there"), &[]).expect("it is understood");
    fs::remove_file(folder.join("w.bin")).expect("it is there");
    let message = reference::run(&late, &[Tensor::from_f32([2], &[1.0, 2.0]).unwrap()]).expect_err("gone").to_string();
    assert!(message.contains("w.bin") && message.contains("tensor 'w'"), "{message}");
}

/// A model that is planned without its weights has the same plan.
#[test]
fn planning_needs_no_weights() {
    let folder = folder("weightless");
    let path = folder.join("model.onnx");
    fs::write(&path, external("8").encode_to_vec()).expect("writable");
    let target = Target::cpu(1);
    let compile = || {
        let graph = import(&load(&path).expect("weights are not looked for"), &[]).expect("nor needed");
        let graph = Recipe::default().whole(graph, &target).expect("the passes run");
        plan::compile(&graph, &target, &Limits { memory: None }).expect("the graph is planned")
    };
    let (without, constants) = compile();
    let message =
        Exec::load(Box::new(Cpu::new(1)), without.clone(), &constants, &|_| {}).expect_err("to run is to read");
    let file = folder.join("w.bin");
    assert_eq!(
        message.to_string(),
        format!("{}: no such file; it should hold 8 bytes of tensor 'w' at 8: put it there", file.display())
    );
    fs::write(&file, [0; 16]).expect("writable");
    assert_eq!(without.to_json(), compile().0.to_json());
}

/// A mask in another file may be a band. A plan without that file cannot know.
#[test]
fn a_mask_in_another_file_has_one_plan() {
    let folder = folder("masked");
    let path = folder.join("model.onnx");
    let seen = |i: usize| if i % 300 <= i / 300 { "1" } else { "0" };
    let mask: Vec<_> = (0..300 * 300).map(seen).collect();
    let source = format!(
        "g (float[2, 300, 300] s) => (float[2, 300, 300] y) <bool[300, 300] mask = {{{}}}, float low = {{-1e38}}> {{ y = Where (mask, s, low) }}",
        mask.join(", ")
    );
    let bytes = |external: bool| {
        let mut proto = model(&source).proto;
        let initializers = &mut proto.graph.as_mut().expect("a graph").initializer;
        let tensor = initializers.iter_mut().find(|tensor| tensor.name == "mask").expect("it is there");
        if external {
            (tensor.int32_data, tensor.raw_data) = (Vec::new(), Default::default());
            tensor.data_location = DataLocation::External as i32;
            tensor.external_data = vec![StringStringEntryProto { key: "location".into(), value: "mask.bin".into() }];
        }
        fs::write(&path, proto.encode_to_vec()).expect("writable");
        let graph = import(&load(&path).expect("it loads"), &[]).expect("it is a graph");
        let graph = Recipe::default().whole(graph, &Target::cpu(1)).expect("the passes run");
        plan::compile(&graph, &Target::cpu(1), &Limits { memory: None }).expect("it is planned").0.bytes()
    };
    let without = bytes(true);
    let elements: Vec<u8> = (0..300 * 300).map(|i| u8::from(i % 300 <= i / 300)).collect();
    fs::write(folder.join("mask.bin"), elements).expect("writable");
    assert_eq!(bytes(true), without);
    let within = bytes(false);
    assert!(within + 65_536 <= without, "a mask in the model's own file is a condition: {within} of {without} bytes");
}

#[test]
fn a_tensor_that_planning_does_need_is_named() {
    let folder = folder("needed");
    let path = folder.join("model.onnx");
    let external = |source: &str, tensor: &str| {
        let mut proto = model(source).proto;
        let initializers = &mut proto.graph.as_mut().expect("a graph").initializer;
        let tensor = initializers.iter_mut().find(|t| t.name == tensor).expect("it is there");
        (tensor.float_data, tensor.int64_data) = (Vec::new(), Vec::new());
        tensor.data_location = DataLocation::External as i32;
        tensor.external_data = vec![StringStringEntryProto { key: "location".into(), value: "w.bin".into() }];
        fs::write(&path, proto.encode_to_vec()).expect("writable");
        load(&path).expect("nothing is looked for")
    };
    let reshape = "g (float[6] x) => (float[2, 3] y) <int64[2] to = {2, 3}> { [fold] y = Reshape (x, to) }";
    let message = import(&external(reshape, "to"), &[]).expect_err("the shape is unknown").to_string();
    assert!(message.starts_with(&path.display().to_string()), "{message}");
    assert!(message.contains("node 'fold' (Reshape): input 'shape' must be known to plan: "), "{message}");
    assert!(
        message.ends_with("w.bin: no such file; it should hold 16 bytes of tensor 'to' at 0: put it there"),
        "{message}"
    );

    // The shape of a tensor is known without its elements.
    let shape = "g (float[6] x) => (float[2, 3] y) <float[2, 3] like = {1, 2, 3, 4, 5, 6}>
        { to = Shape (like) y = Reshape (x, to) }";
    assert_eq!(facts(&import(&external(shape, "like"), &[]).expect("the shape is known")), ["x f32[6]", "y f32[2,3]"]);

    // A tensor of one element becomes part of the kernel's code.
    let scalar = "g (float[6] x) => (float[6] y) <float one = {1}> { y = Mul (x, one) }";
    let graph = import(&external(scalar, "one"), &[]).expect("its value is not asked for yet");
    let message = Recipe::default().whole(graph, &Target::cpu(1)).expect_err("now it is").to_string();
    assert!(message.contains("4 bytes of tensor 'one'"), "{message}");
}

#[test]
fn a_bool_is_0_or_1_wherever_it_comes_from() {
    let folder = folder("flags");
    let path = folder.join("model.onnx");
    let source = "g (bool[3] x) => (bool[3] a, bool[3] b)
        <bool[3] inside = {0, 1, 1}, bool[3] outside = {0, 1, 1}> { a = And (x, inside) b = And (x, outside) }";
    let mut proto = model(source).proto;
    let [inside, outside] = &mut proto.graph.as_mut().expect("a graph").initializer[..] else { panic!("two of them") };
    inside.int32_data.clear();
    inside.raw_data = vec![0, 2, 255].into();
    outside.int32_data.clear();
    outside.data_location = DataLocation::External as i32;
    outside.external_data = vec![StringStringEntryProto { key: "location".into(), value: "w.bin".into() }];
    fs::write(&path, proto.encode_to_vec()).expect("writable");
    fs::write(folder.join("w.bin"), [0, 2, 255]).expect("writable");
    let session = Session::from_path(&path, &Options::default().on(Choice::Cpu)).expect("it is planned");
    let all = Tensor::new(plimsoll::DType::Bool, [3], vec![1; 3]).expect("three flags");
    for (name, found) in session.run(&[("x", all)]).expect("it runs") {
        assert_eq!(found.bytes()[..], [0, 1, 1], "{name}");
    }
}

/// Integers that no double can represent reach the outputs, both folded ones and those computed in the run.
#[test]
fn integers_stay_exact_from_the_file_to_the_outputs() {
    const ODD: i64 = (1 << 53) + 1;
    let source = format!(
        "g (int64[1] x) => (int64[3] given, int64[3] made, int64[3] sum, int64[2] product, int64[2] some, int64[6] both,
            int64 alone, int64[1] late)
        <int64[3] given = {{{ODD}, {min}, {max}}}, int64[2] at = {{2, 0}}, int64 three = {{3}}, int64 odd = {{{ODD}}}>
        {{
            made = Constant <value_ints = [{ODD}, {min}, {max}]> ()
            zero = Constant <value_int = 0> ()
            sum = Add (given, zero)
            first = Constant <value = int64[2] {{{ODD}, -{ODD}}}> ()
            product = Mul (first, three)
            some = Gather (given, at)
            both = Concat <axis = 0> (given, made)
            alone = Identity (odd)
            late = Add (x, odd)
        }}",
        min = i64::MIN,
        max = i64::MAX
    );
    for fuse in [true, false] {
        let options = Options { recipe: Recipe { fuse, ..Recipe::default() }, ..Options::default().on(Choice::Cpu) };
        let session = Session::from_graph(graph(&source, &[]), &options).expect("it is planned");
        let outputs = session.run(&[("x", Tensor::from_i64([1], &[-1]).expect("one number"))]).expect("it runs");
        let ends = [ODD, i64::MIN, i64::MAX];
        let expected: [&[i64]; 8] =
            [&ends, &ends, &ends, &[3 * ODD, -3 * ODD], &[i64::MAX, ODD], &[ends, ends].concat(), &[ODD], &[ODD - 1]];
        for ((name, found), expected) in outputs.iter().zip(expected) {
            assert_eq!(found.to_i64().as_deref(), Some(expected), "{name}, fused: {fuse}");
        }
    }
}

#[test]
fn files_that_are_no_models_are_named() {
    let folder = folder("files");
    let refused = |name: &str, content: &[u8]| {
        let path = folder.join(name);
        fs::write(&path, content).expect("writable");
        let message = load(&path).expect_err("it is no model").to_string();
        assert!(message.starts_with(&path.display().to_string()), "{message}");
        message
    };
    assert!(refused("empty.onnx", b"").contains("the file is empty"));
    assert!(refused("text.onnx", b"hello, this is no protobuf").contains("not an ONNX model"));
    assert!(refused("nothing.onnx", &[8, 8]).contains("it has no graph"));
    assert!(refused("text.onnxtxt", b"<ir_version: 9>\n graph (").contains("text.onnxtxt:2:"));
    assert!(refused("bytes.onnxtxt", &[0xff, 0xfe, 0]).contains("expected text"));
    let missing = folder.join("missing.onnx");
    assert!(load(&missing).expect_err("it is missing").to_string().starts_with(&missing.display().to_string()));
    assert!(load(&folder).expect_err("it is a folder").to_string().contains("found a folder"));
    // Without an extension, the content decides.
    let text = folder.join("text");
    fs::copy(graphs("mlp.onnxtxt"), &text).expect("writable");
    assert!(load(&text).is_ok());
    let binary = folder.join("binary");
    fs::copy(graphs("digits.onnx"), &binary).expect("writable");
    assert!(load(&binary).is_ok());
    // An error in a file's graph names the file, too.
    let wrong = folder.join("wrong.onnxtxt");
    fs::write(&wrong, "<ir_version: 9, opset_import: [\"\" : 20]> g (float[2] x) => (float[2] y) { y = Nope (x) }")
        .expect("writable");
    let message = import(&load(&wrong).expect("well-formed"), &[]).expect_err("unknown operator").to_string();
    assert!(message.starts_with(&wrong.display().to_string()) && message.contains("Nope"), "{message}");
}

/// Loads and imports; a refusal must name the file.
fn survives(path: &Path, content: &[u8], given: &[(String, usize)]) -> bool {
    fs::write(path, content).expect("writable");
    let result = load(path).and_then(|model| import(&model, given));
    match result {
        Ok(graph) => {
            graph.verify().unwrap_or_else(|e| panic!("{e}"));
            true
        }
        // A wrong dim name is the caller's mistake, not the file's.
        Err(error) => {
            let message = error.to_string();
            assert!(message.contains(&path.display().to_string()), "{message}");
            false
        }
    }
}

#[test]
fn a_truncated_file_is_refused() {
    let folder = folder("truncated");
    let given = dims(&[("batch", 2)]);
    let whole = fs::read(graphs("digits.onnx")).expect("it is there");
    let path = folder.join("part.onnx");
    assert!(survives(&path, &whole, &given));
    for length in (0..whole.len()).step_by(97) {
        assert!(!survives(&path, &whole[..length], &given), "{length} bytes of it are no model");
    }
}

#[test]
fn a_mutated_file_never_panics() {
    let folder = folder("mutated");
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut random = move |below: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 16) as usize % below
    };
    let given = dims(&[("batch", 2), ("sequence", 3), ("height", 5), ("width", 5)]);
    for name in ["attention.onnxtxt", "residual.onnxtxt", "mlp.onnxtxt"] {
        let text = fs::read(graphs(name)).expect("it is there");
        let given: Vec<_> = given.iter().filter(|(d, _)| contains(&text, d.as_bytes())).cloned().collect();
        let binary = load(&graphs(name)).expect("it is a model").proto.encode_to_vec();
        for (source, path) in [(text, folder.join("m.onnxtxt")), (binary, folder.join("m.onnx"))] {
            assert!(survives(&path, &source, &given), "{name}");
            let mut read = 0;
            for _ in 0..250 {
                let mut mutant = source.clone();
                for _ in 0..1 + random(4) {
                    let at = random(mutant.len());
                    match random(3) {
                        0 => mutant[at] = random(256) as u8,
                        1 => mutant[at] ^= 1 << random(8),
                        _ => _ = mutant.remove(at),
                    }
                }
                read += usize::from(survives(&path, &mutant, &given));
            }
            assert!(read < 250, "{name}: no mutant was refused");
        }
    }
}

fn contains(text: &[u8], part: &[u8]) -> bool {
    text.windows(part.len()).any(|w| w == part)
}

#[test]
fn export_and_import_are_inverse() {
    let sources = [
        fs::read_to_string(graphs("attention.onnxtxt")).expect("it is there"),
        fs::read_to_string(graphs("residual.onnxtxt")).expect("it is there"),
        "<ir_version: 9, opset_import: [\"\" : 20]> g (float[batch, 6] x, bool[2, 1] c) => (float[2, 3] y, float[2, 6] z, float[2, 6] x, float[3] k)
            <int64[2] axes = {0, 1}, float[3] k = {1, 2, 3}, int64 one = {1}, float low = {2.5}>
            {
                a, b = Split <axis = -1, num_outputs = 2> (x)
                m = ReduceMax <keepdims = 1> (x, axes)
                w = Where (c, a, b)
                s = Sub (w, m)
                t = Trilu (s, one)
                r = Mul (t, k)
                y = Clip (r, , low)
                z = Cast <to = 1> (x)
            }".into(),
    ];
    for source in sources {
        let given = dims(&[("batch", 2), ("sequence", 3), ("height", 5), ("width", 5)]);
        let given: Vec<_> = given.into_iter().filter(|(d, _)| contains(source.as_bytes(), d.as_bytes())).collect();
        let first = import(&model(&source), &given).unwrap_or_else(|e| panic!("{e}"));
        let proto = export(&first).expect("it can be written");
        let printed = text::print(&proto);
        let read = text::parse(&printed, Path::new("printed")).unwrap_or_else(|e| panic!("{e}\n{printed}"));
        let second = import(&Model::new(read), &[]).unwrap_or_else(|e| panic!("{e}\n{printed}"));
        assert_eq!(facts(&first), facts(&second), "{printed}");
        assert_eq!(run(&first), run(&second), "{printed}");
        assert_eq!(text::print(&export(&second).expect("it can be written")), printed);
    }
}

#[test]
fn element_types_of_a_file_and_of_the_crate_have_one_number() {
    for dtype in plimsoll::DType::ALL {
        assert_eq!(DataType::from(dtype) as i64, dtype.onnx());
    }
}

/// Elements of 4 and 2 bits, signed and unsigned. The lowest bits come first, and the last byte may be partly used.
#[test]
fn elements_that_share_bytes_are_taken_apart() {
    let header = "<ir_version: 10, opset_import: [\"\" : 21]>";
    let read = format!(
        "{header} g (float[3] x) => (float[3] y, float[3] z)
        <int4[3] w = {{225, 7}}, uint2[3] u = {{57}}, float s = {{0.5}}> {{
            a = DequantizeLinear (w, s)  y = Add (x, a)
            b = DequantizeLinear (u, s)  z = Add (x, b)
        }}"
    );
    assert_eq!(run(&graph(&read, &[])), [[1.5, 1.0, 6.5], [1.5, 3.0, 4.5]]);
    let written = format!(
        "{header} g (float[3] x) => (int4[3] y) <float s = {{0.5}}, int4 zero = {{0}}> {{ y = QuantizeLinear (x, s, zero) }}"
    );
    let graph = graph(&written, &[]);
    assert_eq!(graph.fact(graph.outputs()[0].1).to_string(), "i4[3]");
}

/// Rows of 17 and of 16 numbers in blocks of 16. An input that is bytes in another operator holds packed numbers here.
#[test]
fn a_table_of_elements_that_share_bytes_is_looked_up() {
    let of = |kind: &str, zero: &str| {
        let source = format!(
            "<ir_version: 10, opset_import: [\"\" : 21, \"com.microsoft\" : 1]>
            g (float[2] x) => (float[1, 3] y)
            <{kind}[2, 3] w = {{225, 151, 254}}, float[2, 1] s = {{1.0, 0.5}}, int64[1] i = {{1}}, {kind}[2, 1] z = {{33}}> {{
                y = com.microsoft.GatherBlockQuantized <block_size = 16> (w, i, s{zero})
            }}"
        );
        run(&graph(&source, &[])).swap_remove(0)
    };
    assert_eq!(of("int4", ""), [-3.5, -1.0, -0.5]);
    assert_eq!(of("uint4", ""), [4.5, 7.0, 7.5]);
    assert_eq!(of("int4", ", z"), [-4.5, -2.0, -1.5]);
    assert_eq!(of("uint4", ", z"), [3.5, 6.0, 6.5]);
    let found = refusal(
        "<ir_version: 10, opset_import: [\"\" : 21, \"com.microsoft\" : 1]>
        g (int64[1] i, float[2, 2] s) => (float[1, 3] y) <int4[2, 3] w = {225, 151, 254}> {
            y = com.microsoft.GatherBlockQuantized <block_size = 16> (w, i, s)
        }",
        &[],
    );
    assert!(found.contains("input 'scales': expected f32[2,1], found f32[2,2]"), "{found}");
}

/// The total length is read if it is a constant. Otherwise the caches are assumed to be full.
#[test]
fn a_length_that_only_the_run_tells_is_not_read() {
    let of = |past: usize, total: &str| {
        let graph = graph(
            &format!(
                "<ir_version: 9, opset_import: [\"\" : 20, \"com.microsoft\" : 1]>
                g (float[1, 2, 24] x, float[1, 1, {past}, 8] k, float[1, 1, {past}, 8] v, int32[1] last, int32[1, 5] mask)
                => (float[a, b, c] y, float[d, e, f, g] keys)
                <int32[1] four = {{4}}, int64 one = {{1}}> {{
                    sum = ReduceSum <keepdims = 0> (mask)
                    shape = Shape (mask)
                    long = Gather (shape, one)
                    five = Cast <to = 6> (long)
                    y, keys = com.microsoft.GroupQueryAttention <num_heads = 1, kv_num_heads = 1> (x, , , k, v, last, {total})
                }}"
            ),
            &[],
        );
        facts(&graph).split_off(5)
    };
    let expected = |keys: usize| vec!["y f32[1,2,8]".to_owned(), format!("keys f32[1,1,{keys},8]")];
    assert_eq!(of(7, "sum"), expected(7));
    assert_eq!(of(2, "sum"), expected(2));
    assert_eq!(of(1, "sum"), expected(3));
    assert_eq!(of(0, "sum"), expected(2));
    assert_eq!(of(3, "four"), expected(4));
    assert_eq!(of(3, "five"), expected(5));
    assert_eq!(of(9, "five"), expected(9));
}

#[test]
fn operators_that_no_plan_can_hold_say_why() {
    let of = |op: &str| {
        refusal(
            &format!(
                "<ir_version: 9, opset_import: [\"\" : 20, \"com.microsoft\" : 1]>
                g (float[2] x) => (float[2] y) {{ y = {op} (x) }}"
            ),
            &[],
        )
    };
    let found = of("RandomNormalLike");
    assert!(
        found.contains("(node 'y': it draws other numbers at every run; make them an input of the model)"),
        "{found}"
    );
    assert!(of("StringSplit").contains("how much it finds depends on data"), "{}", of("StringSplit"));
    let found = of("com.microsoft.NGramRepeatBlock");
    assert!(
        found.contains("plimsoll does not have this operator: com.microsoft.NGramRepeatBlock (node 'y')"),
        "{found}"
    );
    // ONNX has an operator with this name and another meaning.
    let found = of("com.microsoft.Attention");
    assert!(found.contains("com.microsoft.Attention") && found.contains("expected 2 to 6 inputs, found 1"), "{found}");
}

/// An input that shapes the computation is bound to the elements that are given for it; the others are inputs.
#[test]
fn inputs_that_shape_the_computation_are_bound_by_value() {
    let source = "<ir_version: 10, opset_import: [\"\" : 18]>
        g (float[2, 3] x, int64[1] axes, int64[2] shape, float[2] unused) => (y, z) {
            y = ReduceSum <keepdims = 0> (x, axes)
            two = Constant <value_ints = [1, 1]> ()
            doubled = Mul (shape, two)
            z = Reshape (x, doubled)
        }";
    let refused = refusal(source, &[]);
    assert!(refused.contains("input 'axes' must be known before the run") && refused.contains("'axes'"), "{refused}");
    let number = |name: &str, values: &[i64]| {
        (name.to_owned(), Tensor::from_i64([values.len()], values).expect("a number per element"))
    };
    let given = |axis: i64| {
        let unused = ("unused".to_owned(), Tensor::from_f64(plimsoll::DType::F32, [2], &[0.0, 0.0]));
        model(source).with_values(vec![number("axes", &[axis]), number("shape", &[3, 2]), unused])
    };
    let bound = |axis| import(&given(axis), &[]).expect("what is needed is given");
    assert_eq!(facts(&bound(0)), ["x f32[2,3]", "unused f32[2]", "y f32[3]", "z f32[3,2]"]);
    assert_eq!(facts(&bound(-1)), ["x f32[2,3]", "unused f32[2]", "y f32[2]", "z f32[3,2]"]);
    let wrong = model(source).with_values(vec![number("axes", &[0, 1]), number("shape", &[3, 2])]);
    let refused = import(&wrong, &[]).expect_err("two axes").to_string();
    assert!(refused.contains("input 'axes': expected i64[1], found i64[2]"), "{refused}");
}

/// Operators of opsets 1 to 6 said how they broadcast, and by which types.
#[test]
fn opsets_before_7_mean_what_they_meant() {
    let of = |opset: i64, inputs: &str, node: &str| {
        format!("<ir_version: 3, opset_import: [\"\" : {opset}]> g ({inputs}) => (y) {{ y = {node} }}")
    };
    let tens = "<float[2] c = {10, 20}> {";
    let run_with =
        |opset, inputs, node| run(&graph(&of(opset, inputs, node).replace("(y) {", &format!("(y) {tens}")), &[]));
    assert_eq!(run_with(6, "float[2, 2] x", "Add <broadcast = 1, axis = 0> (x, c)"), [[11.0, 12.0, 23.0, 24.0]]);
    assert_eq!(run_with(6, "float[2, 2] x", "Add <broadcast = 1> (x, c)"), [[11.0, 22.0, 13.0, 24.0]]);
    assert_eq!(run_with(6, "float[1, 2, 2] x", "Mul <broadcast = 1, axis = -2> (x, c)"), [[10.0, 20.0, 60.0, 80.0]]);
    assert_eq!(run_with(1, "float[2, 2] x", "Relu <consumed_inputs = [0]> (x)"), [[1.0, 2.0, 3.0, 4.0]]);
    assert_eq!(
        run_with(2, "float[1, 2] x", "Pad <paddings = [0, 1, 0, 0], mode = \"constant\"> (x)"),
        [[0.0, 1.0, 2.0]]
    );
    assert_eq!(run_with(5, "float[2] x", "Cast <to = \"FLOAT\"> (x)"), [[1.0, 2.0]]);
    assert_eq!(run_with(6, "float[2] x", "Dropout <is_test = 1> (x)"), [[1.0, 2.0]]);
    let refused = refusal(&of(6, "float[2] x", "Dropout (x)"), &[]);
    assert!(refused.contains("attribute 'is_test': expected 1 (inference), found 0"), "{refused}");
    for axis in ["2", "9223372036854775807", "-9223372036854775808"] {
        let node = format!("Add <broadcast = 1, axis = {axis}> (x, c)");
        let refused = refusal(&of(6, "float[2, 2] x, float[2] c", &node), &[]);
        assert!(refused.contains("attribute 'axis'"), "{refused}");
    }
    assert_eq!(run_with(6, "float[2] x", "PRelu (x, c)"), [[1.0, 2.0]]);
    assert_eq!(run_with(1, "float[1, 1, 2] x", "GlobalLpPool <p = 2.0> (x)"), [[5f64.sqrt() as f32 as f64]]);
    let refused = refusal(&of(6, "float[2, 2] x, float[2] c", "Add <broadcast = 1, axis = 2> (x, c)"), &[]);
    assert!(refused.contains("expected a place for 1 axes among 2, found 2"), "{refused}");
}

/// A row whose name ONNX does not have belongs to ONNX Runtime's domain, in what is written, too.
#[test]
fn operators_of_the_runtime_keep_their_domain() {
    let source = r#"<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]>
        g (float[2, 8] x, float[2, 8] y) => (float[2, 8] z) <float[8] scale = {1, 1, 1, 1, 1, 1, 1, 1}> {
            normed = com.microsoft.SkipSimplifiedLayerNormalization (x, y, scale)
            half = com.microsoft.QuickGelu (normed)
            z = SimplifiedLayerNormalization (half, scale)
        }"#;
    let written = plimsoll::internals::onnx::export(&graph(source, &[])).expect("it is exported");
    let nodes = &written.graph.as_ref().expect("a graph").node;
    let domains: Vec<_> = nodes.iter().filter(|node| node.op_type != "Constant").map(|node| &node.domain[..]).collect();
    assert_eq!(domains, ["com.microsoft", "com.microsoft", ""]);
    assert!(written.opset_import.iter().any(|import| import.domain == "com.microsoft"));
    import(&Model::new(written), &[]).expect("it is read again");
}
