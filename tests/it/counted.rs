//! Nodes that find as many elements as a run decides, held against the same graph whose inputs are constants: it is folded, node by node.

use crate::common::backends;
use plimsoll::internals::exec::Exec;
use plimsoll::internals::onnx::{self, Model, text};
use plimsoll::internals::{plan, reference};
use plimsoll::{Choice, DType, Graph, Limits, Options, Recipe, Session, Tensor};
use std::path::Path;

/// A graph of inputs, outputs and nodes.
struct Case {
    inputs: &'static [(&'static str, &'static str, DType, &'static [usize])],
    rest: &'static str,
}

impl Case {
    fn text(&self, given: Option<&[Vec<f64>]>) -> String {
        let name = |(name, dtype, _, shape): &(&str, &str, DType, &[usize])| {
            let extents: Vec<_> = shape.iter().map(usize::to_string).collect();
            format!("{dtype}[{}] {name}", extents.join(", "))
        };
        let rest = self.rest;
        let (ports, constants) = match given {
            None => (self.inputs.iter().map(name).collect::<Vec<_>>().join(", "), String::new()),
            Some(given) => {
                let literal = |(port, values): (&_, &Vec<f64>)| {
                    let values: Vec<_> = values.iter().map(f64::to_string).collect();
                    format!("{} = {{{}}}", name(port), values.join(", "))
                };
                let all: Vec<_> = self.inputs.iter().zip(given).map(literal).collect();
                (String::new(), all.join(", "))
            }
        };
        let (outputs, nodes) = rest.split_once('{').expect("nodes stand in braces");
        format!("<ir_version: 9, opset_import: [\"\" : 20]> g ({ports}) => {outputs} <{constants}> {{{nodes}")
    }

    fn graph(&self, given: Option<&[Vec<f64>]>) -> plimsoll::Result<Graph> {
        let source = self.text(given);
        onnx::import(&Model::new(text::parse(&source, Path::new("test")).expect("the text is well-formed")), &[])
    }

    /// Runs the plan of each backend on all inputs, and compares what it finds.
    fn holds(&self, all: &[Vec<Vec<f64>>]) {
        let graph = self.graph(None).unwrap_or_else(|e| panic!("{e}\n{}", self.rest));
        for (name, open) in backends() {
            let backend: Box<dyn plimsoll::internals::backend::Backend> = open();
            let passed = Recipe::default().whole(graph.clone(), backend.target()).expect("the passes run");
            let (plan, constants) =
                plan::compile(&passed, backend.target(), &Limits { memory: None }).expect("it is planned");
            let mut exec = Exec::load(backend, plan, &constants, &|_| {}).expect("it loads");
            // WGSL has no infinities: the largest finite number stands for them.
            let is_known = |given: &&Vec<Vec<f64>>| name != "wgpu" || given.iter().flatten().all(|x| !x.is_infinite());
            for given in all.iter().filter(is_known) {
                let tensor = |(port, values): (&(&str, &str, DType, &[usize]), &Vec<f64>)| {
                    Tensor::from_f64(port.2, port.3, values)
                };
                let inputs: Vec<_> = self.inputs.iter().zip(given).map(tensor).collect();
                let in_room = exec.run(&inputs).unwrap_or_else(|e| panic!("{name}: {e}"));
                let known = self.graph(Some(given)).expect("constants are folded");
                let expected = reference::run(&known, &[]).expect("the reference runs");
                // Counts stand behind the outputs of the file.
                assert!(in_room.len() > expected.len());
                for (number, expected) in expected.iter().enumerate() {
                    let found = exec.found(number).expect("it is read");
                    let output = &known.outputs()[number].0;
                    assert_eq!(found.shape(), expected.shape(), "{name}: {output} of {given:?}");
                    found
                        .compare(expected, 1e-5, 1e-6)
                        .unwrap_or_else(|e| panic!("{name}: {output} of {given:?}: {e}"));
                }
            }
        }
    }
}

/// Numbers from 0 to 1 that look random.
fn numbers(seed: u64, count: usize) -> Vec<f64> {
    let mix = |i: usize| {
        let mut x = (seed << 32 | i as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        x ^= x >> 29;
        x = x.wrapping_mul(0xbf58_476d_1ce4_e5b9);
        (x >> 40) as f64 / (1u64 << 24) as f64
    };
    (0..count).map(mix).collect()
}

/// Inputs of which all, some, or no elements are found.
fn some_of(count: usize) -> Vec<Vec<f64>> {
    let share = |k: usize| {
        let [values, chances] = [2 * k as u64, 2 * k as u64 + 1].map(|seed| numbers(seed, count));
        values.iter().zip(chances).map(|(v, c)| if c * 4.0 < k as f64 { v + 0.25 } else { 0.0 }).collect()
    };
    (0..=4).map(share).collect()
}

#[test]
fn what_follows_reads_the_elements_that_are_found() {
    let rest = "(int64[2, n] at, float[n] picked, float total, float[n] sorted, int64[2] many, float[k] ends) {
        one = Constant <value_ints = [1]> ()
        two = Constant <value = float[1, 1] {2.0}> ()
        tail = Constant <value_floats = [8.0, 9.0]> ()
        at = NonZero (x)
        pairs = Transpose <perm = [1, 0]> (at)
        picked = GatherND (x, pairs)
        total = ReduceSum <keepdims = 0> (picked)
        soft = Softmax <axis = 0> (picked)
        line = Unsqueeze (soft, one)
        scaled = MatMul (line, two)
        sorted = Squeeze (scaled, one)
        many = Shape (at)
        ends = Concat <axis = 0> (tail, picked, tail)
    }";
    let case = Case { inputs: &[("x", "float", DType::F32, &[3, 5])], rest };
    case.holds(&some_of(15).into_iter().map(|x| vec![x]).collect::<Vec<_>>());
}

#[test]
fn a_condition_keeps_slices() {
    let rest = "(float[2, n, 3] y, float[m] z, float[2, 3] best, float[2, 2] products) {
        axes = Constant <value_ints = [1]> ()
        zero = Constant <value_int = 0> ()
        y = Compress <axis = 1> (x, c)
        z = Compress (x, d)
        best = ReduceL2 <keepdims = 0> (y, axes)
        a = Gather <axis = 2> (y, zero)
        t = Transpose <perm = [1, 0]> (a)
        products = MatMul (a, t)
    }";
    let case = Case {
        inputs: &[
            ("x", "float", DType::F32, &[2, 4, 3]),
            ("c", "bool", DType::Bool, &[4]),
            ("d", "bool", DType::Bool, &[7]),
        ],
        rest,
    };
    let bits = |bits: usize, n: usize| (0..n).map(|i| f64::from((bits >> i & 1) as u8)).collect::<Vec<_>>();
    let given = |k: usize| vec![numbers(k as u64, 24), bits(k, 4), bits(37 * k, 7)];
    case.holds(&[0, 1, 6, 11, 15].map(given));
}

#[test]
fn different_elements_are_found() {
    for (attributes, shape) in [
        ("", "7"),
        ("<sorted = 0>", "7"),
        ("<axis = 0>", "7, 1"),
        ("<axis = 1, sorted = 0>", "2, 4"),
        ("<axis = -1>", "2, 4"),
    ] {
        let rest = format!("(y, first, inverse, counts) {{ y, first, inverse, counts = Unique {attributes} (x) }}");
        let shape: &[usize] = match shape {
            "7" => &[7],
            "7, 1" => &[7, 1],
            _ => &[2, 4],
        };
        let inputs: &'static [_] =
            Box::leak(Box::new([("x", "float", DType::F32, &*Box::leak(shape.to_vec().into_boxed_slice()))]));
        let case = Case { inputs, rest: Box::leak(rest.into_boxed_str()) };
        let count = shape.iter().product();
        let given = |kinds: f64| vec![numbers(kinds as u64 + 9, count).iter().map(|v| (v * kinds).floor()).collect()];
        case.holds(&[1.0, 2.0, 3.0, 40.0].map(given));
    }
}

/// Two images and classes, with thresholds, by corners and by centres.
#[test]
fn the_best_boxes_are_found() {
    for attributes in ["", "<center_point_box = 1>"] {
        let rest = format!(
            "(int64[n, 3] best, float[n] scores) {{
                most = Constant <value_ints = [4]> ()
                overlap = Constant <value_floats = [0.3]> ()
                least = Constant <value_floats = [0.4]> ()
                best = NonMaxSuppression {attributes} (boxes, s, most, overlap, least)
                scores = GatherND (s, best)
            }}"
        );
        let case = Case {
            inputs: &[("boxes", "float", DType::F32, &[2, 9, 4]), ("s", "float", DType::F32, &[2, 2, 9])],
            rest: Box::leak(rest.into_boxed_str()),
        };
        let given = |k: u64| vec![numbers(k, 72), numbers(k + 50, 36).iter().map(|v| v * k as f64 / 3.0).collect()];
        case.holds(&[1, 2, 3, 4].map(given));
    }
}

/// What is found is searched again; two searches meet in a product.
#[test]
fn searches_follow_one_another() {
    let case = Case {
        inputs: &[("x", "float", DType::F32, &[12])],
        rest: "(float[a] p, float[b] q, int64[1, b] at, float[a, c] outer, float sum) {
            half = Constant <value_float = 0.5> ()
            zero = Constant <value_float = 0.0> ()
            column = Constant <value_ints = [1]> ()
            row = Constant <value_ints = [0]> ()
            some = Greater (x, zero)
            p = Compress <axis = 0> (x, some)
            more = Greater (p, half)
            q = Compress <axis = 0> (p, more)
            less = Sub (p, half)
            above = Relu (less)
            at = NonZero (above)
            tall = Unsqueeze (p, column)
            wide = Unsqueeze (q, row)
            outer = Mul (tall, wide)
            sum = ReduceSum <keepdims = 0> (outer)
        }",
    };
    case.holds(&some_of(12).into_iter().map(|x| vec![x]).collect::<Vec<_>>());
}

/// Numbers that are computed from the count, also where it is 0, odd, or squared.
#[test]
fn numbers_follow_from_the_count() {
    let case = Case {
        inputs: &[("x", "float", DType::F32, &[5])],
        rest: "(bool none, int64[1] odd, int64[1] squares, float share, int64[1] sum, float[n] y) {
            zero = Constant <value_ints = [0]> ()
            one = Constant <value_ints = [1]> ()
            two = Constant <value_ints = [2]> ()
            at = NonZero (x)
            flat = Squeeze (at, zero)
            y = Gather <axis = 0> (x, flat)
            s = Shape (y)
            none0 = Equal (s, zero)
            none = Squeeze (none0, zero)
            odd = Mod (s, two)
            square = Mul (s, s)
            more = Add (square, s)
            squares = Sub (more, one)
            sum = ReduceSum <keepdims = 1> (squares, zero)
            some = Max (s, one)
            number0 = Squeeze (some, zero)
            number = Cast <to = 1> (number0)
            total = ReduceSum <keepdims = 0> (y)
            share = Div (total, number)
        }",
    };
    case.holds(&some_of(5).into_iter().map(|x| vec![x]).collect::<Vec<_>>());
}

/// Two searches make rows of one axis, and the best boxes are sought among those that were found.
#[test]
fn searches_meet_along_an_axis() {
    let case = Case {
        inputs: &[("x", "float", DType::F32, &[4]), ("z", "float", DType::F32, &[6])],
        rest: "(float[n] y, float most, int64[1] many) {
            zero = Constant <value_float = 0.0> ()
            a = Greater (x, zero)
            b = Greater (z, zero)
            k = Compress <axis = 0> (x, a)
            l = Compress <axis = 0> (z, b)
            y = Concat <axis = 0> (k, l)
            most = ReduceSum <keepdims = 0> (y)
            many = Shape (y)
        }",
    };
    let given = |k: usize| vec![some_of(4)[k].clone(), some_of(6)[4 - k].clone()];
    case.holds(&[0, 1, 2, 3, 4].map(given));
    let case = Case {
        inputs: &[
            ("boxes", "float", DType::F32, &[1, 6, 4]),
            ("s", "float", DType::F32, &[1, 1, 6]),
            ("c", "float", DType::F32, &[6]),
        ],
        rest: "(int64[n, 3] best) {
            row = Constant <value_ints = [0]> ()
            most = Constant <value_ints = [6]> ()
            overlap = Constant <value_floats = [0.5]> ()
            at = NonZero (c)
            flat = Squeeze (at, row)
            some = Gather <axis = 1> (boxes, flat)
            scores = Gather <axis = 2> (s, flat)
            best = NonMaxSuppression (some, scores, most, overlap)
        }",
    };
    let given = |k: usize| vec![numbers(k as u64, 24), numbers(k as u64 + 9, 6), some_of(6)[k].clone()];
    case.holds(&[1, 2, 3, 4].map(given));
}

/// What is not a number stands above all numbers, and is one element; so are zeros of both signs.
#[test]
fn elements_that_are_no_numbers_are_one() {
    let nan = f64::NAN;
    for attributes in ["", "<sorted = 0>"] {
        let rest = format!("(y, first, inverse, counts) {{ y, first, inverse, counts = Unique {attributes} (x) }}");
        let rest: &'static str = Box::leak(rest.into_boxed_str());
        let case = Case { inputs: &[("x", "float", DType::F32, &[3])], rest };
        let graph = case.graph(None).expect("a graph");
        let numbers = |x: [f64; 3]| -> Vec<Vec<f64>> {
            let found = reference::run(&graph, &[Tensor::from_f64(DType::F32, [3], &x)]).expect("it runs");
            found[1..].iter().map(Tensor::to_f64).collect()
        };
        // Where each stands first, which one each is, how often it stands, and how many there are.
        assert_eq!(numbers([nan, nan, nan]), [vec![0.0; 3], vec![0.0; 3], vec![3.0, 0.0, 0.0], vec![1.0]]);
        assert_eq!(numbers([0.0, -0.0, 0.0]), [vec![0.0; 3], vec![0.0; 3], vec![3.0, 0.0, 0.0], vec![1.0]]);
        assert_eq!(numbers([2.0, 1.0, nan])[3], [3.0]);
        case.holds(&[[2.0, 1.0, nan], [nan, 2.0, 1.0], [nan, 1.0, nan], [0.0, -0.0, 0.0]].map(|x| vec![x.to_vec()]));
    }
}

/// The areas of these boxes are larger than a half can be.
#[test]
fn boxes_in_pixels_of_halves_hide_each_other() {
    let case = Case {
        inputs: &[("boxes", "float", DType::F32, &[1, 3, 4]), ("s", "float", DType::F32, &[1, 1, 3])],
        rest: "(int64[n, 3] best) {
            most = Constant <value_ints = [3]> ()
            overlap = Constant <value_floats = [0.5]> ()
            half_boxes = Cast <to = 10> (boxes)
            half_s = Cast <to = 10> (s)
            best = NonMaxSuppression (half_boxes, half_s, most, overlap)
        }",
    };
    let boxes = [0.0, 0.0, 640.0, 640.0, 8.0, 0.0, 640.0, 640.0, 0.0, 0.0, 32.0, 640.0];
    case.holds(&[vec![boxes.to_vec(), vec![0.5, 0.75, 0.25]]]);
}

#[test]
fn a_session_gives_what_was_found() {
    let source = Case { inputs: &[("x", "float", DType::F32, &[6])], rest: "(int64[1, n] at) { at = NonZero (x) }" };
    let options = Options::default().on(Choice::Cpu);
    let session = Session::from_graph(source.graph(None).expect("a graph"), &options).expect("a session");
    let x = Tensor::from_f32([6], &[0.0, 2.0, 0.0, 0.0, 5.0, 0.0]).expect("a tensor");
    let outputs = session.run(&[("x", x)]).expect("it runs");
    let shown: Vec<_> = outputs.iter().map(|(name, tensor)| (&name[..], tensor.to_f64())).collect();
    assert_eq!(shown, [("at", vec![1.0, 4.0]), ("at.count", vec![2.0])]);
    assert_eq!(outputs[0].1.shape()[..], [1, 2]);
    let port = &session.plan().programs[0].outputs[0];
    assert_eq!((&port.shape[..], port.counted[0].axis), (&[1, 6][..], 1), "the plan has room for all");
}

#[test]
fn what_cannot_follow_is_refused_by_name() {
    let refused = |rest: &'static str| {
        let case = Case { inputs: &[("x", "float", DType::F32, &[6])], rest };
        case.graph(None).expect_err("it must be refused").to_string()
    };
    let found = refused(
        "(y) { at = NonZero (x)  k = Constant <value_ints = [-1]> ()  flat = Reshape (at, k)  y = Det (flat) }",
    );
    assert!(found.contains("node 'y' (Det)"), "{found}");
    let found = refused("(y) { at = NonZero (x)  two = Constant <value_ints = [2, -1]> ()  y = Reshape (at, two) }");
    assert!(found.contains("node 'y' (Reshape)"), "{found}");
    let found = refused(
        "(float[6] y) { zero = Constant <value_float = 0.0> ()  c = Greater (x, zero)  k = Compress <axis = 0> (x, c)  y = Add (k, x) }",
    );
    assert!(found.contains("node 'y' (Add)"), "{found}");
    let found = refused(
        "(int64 y) { zero = Constant <value_float = 0.0> ()  c = Greater (x, zero)  k = Compress <axis = 0> (x, c)
            y = ArgMax <keepdims = 0, select_last_index = 1> (k) }",
    );
    assert!(found.contains("node 'y' (ArgMax)"), "{found}");
}

/// Counts that no import is for: what compares them with a number, or is shaped by what does, is right or refused.
#[test]
fn counts_between_those_that_are_imported_decide() {
    let case = Case {
        inputs: &[("x", "float", DType::F32, &[12])],
        rest: "(float y, float z, float[n] kept, float w) {
            zero = Constant <value_int = 0> ()
            one = Constant <value_int = 1> ()
            three = Constant <value_int = 3> ()
            yes = Constant <value_float = 7.0> ()
            no = Constant <value_float = -7.0> ()
            at = NonZero (x)
            s = Shape (at)
            count = Gather (s, one)
            is = Equal (count, three)
            y = If (is) <
                then_branch = t () => (float a) { a = Constant <value_float = 1.0> () },
                else_branch = e () => (float b) { b = ReduceSum <keepdims = 0> (x) }
            >
            z = Where (is, yes, no)
            rest = Mod (count, three)
            step = Equal (rest, one)
            shift = Where (step, no, yes)
            row = Gather <axis = 0> (at, zero)
            picked = Gather <axis = 0> (x, row)
            kept = Add (picked, shift)
            some = Greater (count, zero)
            other = Less (count, zero)
            w = If (other) <
                then_branch = t () => (float[2] a) { a = Constant <value_floats = [1.0, 2.0]> () },
                else_branch = e () => (float b) { b = Cast <to = 1> (some) }
            >
        }",
    };
    let first = |count: usize| vec![(0..12).map(|k| if k < count { k as f64 + 0.5 } else { 0.0 }).collect()];
    case.holds(&[0, 1, 2, 3, 4, 5, 7, 9, 12].map(first));
    let refused = |rest: &'static str| {
        let case = Case { inputs: &[("x", "float", DType::F32, &[12])], rest };
        case.graph(None).expect_err("it must be refused").to_string()
    };
    let count =
        "one = Constant <value_int = 1> ()  three = Constant <value_int = 3> ()  at = NonZero (x)  s = Shape (at)
        count = Gather (s, one)  is = Equal (count, three)";
    let decided =
        |name: &str, what: &str| refused(Box::leak(format!("(y) {{ {count} {what} {name} }}").into_boxed_str()));
    let found = decided(
        "y = Slice (x, start, end)",
        "none = Constant <value_ints = [0]> ()  some = Constant <value_ints = [1]> ()  end = Constant <value_ints = [9]> ()
        start = Where (is, some, none)",
    );
    let words = "node 'y' (Slice): input 'starts' must be known before the run, but 'start' depends on how many elements node 'at' finds";
    assert!(found.contains(words), "{found}");
    let found = decided("y = Range (one, end, one)", "end = Where (is, one, three)");
    assert!(found.contains("node 'y' (Range): input 'limit'"), "{found}");
    let found = decided(
        "y = If (is) < then_branch = t () => (float[2] a) { a = Constant <value_floats = [1.0, 2.0]> () },
            else_branch = e () => (float b) { b = Constant <value_float = 1.0> () } >",
        "",
    );
    assert!(found.contains("node 'y' (If)") && found.contains("how many elements node 'at' finds"), "{found}");
    let found = decided(
        "y = Slice (x, start, end)",
        "ten = Constant <value_ints = [10]> ()  eight = Constant <value_ints = [8]> ()
        start = Sub (count, ten)  end = Sub (count, eight)",
    );
    let words = "node 'y' (Slice): where it begins along axis 0 depends on what the run decides";
    assert!(found.contains(words), "{found}");
}

/// A loop runs as often as elements are found, up to the most.
#[test]
fn a_loop_runs_as_often_as_elements_are_found() {
    let case = Case {
        inputs: &[("x", "float", DType::F32, &[5])],
        rest: "(float y, float once) {
            one = Constant <value_int = 1> ()
            three = Constant <value_int = 3> ()
            yes = Constant <value = bool {1}> ()
            half = Constant <value_float = 0.5> ()
            start = Constant <value_float = 1.0> ()
            at = NonZero (x)
            s = Shape (at)
            count = Gather (s, one)
            few = Min (count, three)
            once = Loop (few, yes, start) <body = c (int64 j, bool run, float d) => (bool again, float e) {
                again = Identity (run)
                e = Add (d, start)
            }>
            y = Loop (count, yes, start) <body = b (int64 i, bool go, float a) => (bool on, float b) {
                on = Identity (go)
                c = Mul (a, half)
                number = Cast <to = 1> (i)
                b = Add (c, number)
            }>
        }",
    };
    let first = |count: usize| vec![(0..5).map(|k| if k < count { 1.0 } else { 0.0 }).collect()];
    case.holds(&[0, 1, 2, 3, 4, 5].map(first));
}

/// The message of the refusal of a file.
fn refusal(ports: &str, outputs: &str, nodes: &str) -> String {
    let source = format!("<ir_version: 9, opset_import: [\"\" : 20]> g ({ports}) => ({outputs}) {{ {nodes} }}");
    let model = Model::new(text::parse(&source, Path::new("test")).expect("the text is well-formed"));
    onnx::import(&model, &[]).expect_err("it must be refused").to_string()
}

/// It takes no longer than the nodes before the one that is too many.
#[test]
fn too_many_searches_are_refused_at_the_first_that_is() {
    let node = |k: usize| format!("a{} = Abs (a{k})  y{k} = NonZero (a{})\n", k + 1, k + 1);
    let nodes: String = (0..2000).map(node).collect();
    let outputs: Vec<_> = (0..2000).map(|k| format!("y{k}")).collect();
    let found = refusal("float[4] a0", &outputs.join(", "), &nodes);
    let words = "node 'y4' (NonZero): expected at most 4 nodes that find as many as a run decides, found more: before it stand 'y0', 'y1', 'y2', 'y3'";
    assert!(found.contains(words), "{found}");
}

/// Each constant is derived from the one before it, twice.
#[test]
fn shared_constants_are_compared_once() {
    let node = |k: usize| format!("c{} = Max (c{k}, c{k})\n", k + 1);
    let nodes: String = (0..60).map(node).collect();
    let source = format!(
        "<ir_version: 9, opset_import: [\"\" : 20]> g (float[4] x) => (int64[1, n] at, float[5000] y) {{
            k = Constant <value_ints = [5000]> ()  at = NonZero (x)  c0 = ConstantOfShape (k)
            {nodes} y = Neg (c60)
        }}"
    );
    let model = Model::new(text::parse(&source, Path::new("test")).expect("the text is well-formed"));
    assert_eq!(onnx::import(&model, &[]).expect("a graph").outputs().len(), 3);
}

/// What is found cannot be reshaped so for all counts, but for those elements that are given.
#[test]
fn elements_that_are_given_are_known_where_counts_are_refused() {
    let source = "<ir_version: 9, opset_import: [\"\" : 20]> g (float[4] x, float[4] z) => (y) {
        two = Constant <value_ints = [2, -1]> ()  at = NonZero (x)  y = Reshape (at, two)  w = Abs (z)
    }";
    let model = Model::new(text::parse(source, Path::new("test")).expect("the text is well-formed"));
    let x = Tensor::from_f64(DType::F32, [4], &[0.0, 1.0, 2.0, 0.0]);
    let graph = onnx::import(&model.clone().with_values(vec![("x".to_owned(), x)]), &[]).expect("a graph");
    assert_eq!(graph.fact(graph.outputs()[0].1).to_string(), "i64[2,1]");
    // What is given does not help: the message is that of what the run decides.
    let z = Tensor::from_f64(DType::F32, [4], &[0.0; 4]);
    let found =
        onnx::import(&model.with_values(vec![("z".to_owned(), z)]), &[]).expect_err("it is refused").to_string();
    assert!(found.contains("node 'y' (Reshape)"), "{found}");
    // The first import fails already.
    let source = "<ir_version: 9, opset_import: [\"\" : 20]> g (float[4] x, int64[1] axes) => (y) {
        a = NonZero (x)  b = NonZero (a)  c = NonZero (b)  d = NonZero (c)  e = NonZero (d)  y = ReduceSum (e, axes)
    }";
    let model = Model::new(text::parse(source, Path::new("test")).expect("the text is well-formed"));
    let x = Tensor::from_f64(DType::F32, [4], &[0.0, 1.0, 2.0, 0.0]);
    let axes = Tensor::from_f64(DType::I64, [1], &[1.0]);
    let given = vec![("x".to_owned(), x), ("axes".to_owned(), axes)];
    let graph = onnx::import(&model.with_values(given), &[]).expect("a graph");
    assert_eq!(graph.inputs().len(), 0, "both are bound");
}

/// What is searched is computed from a count alone.
#[test]
fn a_search_among_what_follows_from_a_count() {
    let case = Case {
        inputs: &[("x", "float", DType::F32, &[7])],
        rest: "(int64[1, n] at, int64[m] odd) {
            zero = Constant <value_int = 0> ()
            one = Constant <value_int = 1> ()
            two = Constant <value_int = 2> ()
            seven = Constant <value_int = 7> ()
            found = NonZero (x)
            s = Shape (found)
            count = Gather (s, one)
            numbers = Range (zero, seven, one)
            before = Less (numbers, count)
            at = NonZero (before)
            rest = Mod (numbers, two)
            is = Equal (rest, one)
            both = And (is, before)
            odd = Compress <axis = 0> (numbers, both)
        }",
    };
    case.holds(&some_of(7).into_iter().map(|x| vec![x]).collect::<Vec<_>>());
}

/// What is not a number is larger than all numbers, but is found, as what stands behind the count is not.
#[test]
fn the_smallest_of_what_is_found_are_found() {
    for (largest, shape) in [(0, "7"), (1, "7"), (0, "7, 2"), (1, "7, 2")] {
        let rest = format!(
            "(y, at) {{
                zero = Constant <value_ints = [0]> ()
                k = Constant <value_ints = [2]> ()
                some = Compress <axis = 0> (x, c)
                tail = Slice (x, zero, k, zero)
                more = Concat <axis = 0> (some, tail)
                y, at = TopK <axis = 0, largest = {largest}> (more, k)
            }}"
        );
        let shape: &'static [usize] = if shape == "7" { &[7] } else { &[7, 2] };
        let inputs: &'static [_] =
            Box::leak(Box::new([("x", "float", DType::F32, shape), ("c", "bool", DType::Bool, &[7][..])]));
        let case = Case { inputs, rest: Box::leak(rest.into_boxed_str()) };
        let count: usize = shape.iter().product();
        let (nan, infinite) = (f64::NAN, f64::INFINITY);
        let given = |values: &[f64], bits: usize| {
            let x = (0..count).map(|k| values[k % values.len()]).collect();
            vec![x, (0..7).map(|i| f64::from((bits >> i & 1) as u8)).collect::<Vec<_>>()]
        };
        case.holds(&[
            given(&[nan], 0b1),
            given(&[nan], 0b1010110),
            given(&[nan, 1.0, nan, 2.0, 0.5], 0b1111111),
            given(&[nan, 1.0, nan, 2.0, 0.5], 0b0000101),
            given(&[infinite, nan, infinite], 0b0011011),
            given(&[3.0, 1.0, 2.0], 0b0111000),
        ]);
    }
}

/// Sums over more than a row of 128, and over more than 128 rows, are sums of sums.
#[test]
fn few_and_many_are_found() {
    const COUNTS: [usize; 5] = [0, 1, 128, 129, 16_385];
    for n in COUNTS {
        let shape: &'static [usize] = Box::leak(vec![n].into_boxed_slice());
        let inputs: &'static [_] =
            Box::leak(Box::new([("x", "float", DType::F32, shape), ("c", "bool", DType::Bool, shape)]));
        let case = Case {
            inputs,
            rest: "(int64[1, n] at, float[m] kept) { at = NonZero (x)  kept = Compress <axis = 0> (x, c) }",
        };
        // Every so many, so that they lie in all rows.
        let given = |count: usize| {
            let is = |i: usize| count > 0 && i.is_multiple_of(n / count) && i / (n / count) < count;
            let x: Vec<_> = (0..n).map(|i| if is(i) { 0.5 + (i % 1000) as f64 } else { 0.0 }).collect();
            let c = (0..n).map(|i| f64::from(u8::from(is(i)))).collect();
            vec![x, c]
        };
        case.holds(&COUNTS.into_iter().filter(|&count| count <= n).map(given).collect::<Vec<_>>());
    }
}
