//! Places of rows and lengths beyond a capacity: the run is refused before it starts, by both names, and states are as before.

use crate::common;
use plimsoll::internals::op::Attrs;
use plimsoll::internals::session::{Choice, Options, Session};
use plimsoll::internals::{onnx, reference};
use plimsoll::{DType, Graph, Place, Recipe, Tensor, Trace};
use std::path::Path;

fn integers(shape: &[usize], values: &[i64]) -> Tensor {
    Tensor::from_i64(shape, values).expect("as many as the shape has")
}

/// The graph of a text, with states.
fn graph(text: &str, states: &[(&str, &str)]) -> Graph {
    let text = format!("<ir_version: 8, opset_import: [\"\" : 24, \"com.microsoft\" : 1]>\n{text}");
    let model = onnx::Model::new(onnx::text::parse(&text, Path::new("text")).expect("it parses"));
    let states: Vec<_> = states.iter().map(|(input, output)| ((*input).to_owned(), (*output).to_owned())).collect();
    onnx::import(&model.with_state(&states), &[]).expect("it is a graph")
}

fn session((name, open): &common::Opener, graph: &Graph) -> Session {
    let options = Options { threads: 2, ..Options::default() };
    common::load(graph.clone(), open(), *name, &options).expect("it loads")
}

/// The elements of all states.
fn states(session: &Session, graph: &Graph) -> Vec<Tensor> {
    let names = graph.states().iter().map(|state| graph.value_name(state.value));
    names.map(|name| session.state(name).expect("it is a state")).collect()
}

/// A cache of eight rows, in which a run writes two from a position on.
fn writes(at: &str, node: &str) -> String {
    format!(
        "g (float[1, 1, 8, 2] past, float[1, 1, 2, 2] new, {at}) => (float[1, 1, 8, 2] present)
        <int64[1] behind = {{3}}, int64[2] rows = {{0, 1}}, int64[2, 1] column = {{2, 1}}, int64[1] last = {{-1}}, int64[4] all = {{0, 0, 0, 0}}> {{
            {node}
        }}"
    )
}

#[test]
fn a_place_that_is_an_input_is_checked() {
    let scatter = "present = TensorScatter (past, new, at)";
    let cases = [
        (writes("int64[1] position", "at = Identity (position)\n present = TensorScatter (past, new, at)"), 0, 6),
        (writes("int64[1] position", "at = Add (position, behind)\n present = TensorScatter (past, new, at)"), -3, 3),
        (writes("int64[1] position", "at = Sub (position, behind)\n present = TensorScatter (past, new, at)"), 3, 9),
        (
            writes(
                "int32[1] position",
                &format!("wide = Cast <to = 7> (position)\n at = Add (behind, wide)\n {scatter}"),
            ),
            -3,
            3,
        ),
        (
            // As exporters write it: the row is the third axis of all.
            writes(
                "int64[1] position",
                "places = Add (position, rows)
                 tuples = Unsqueeze (places, last)
                 turned = Transpose <perm = [2, 0, 1, 3]> (past)
                 updates = Transpose <perm = [2, 0, 1, 3]> (new)
                 written = ScatterND (turned, tuples, updates)
                 present = Transpose <perm = [1, 2, 0, 3]> (written)",
            ),
            -8,
            6,
        ),
    ];
    for opener in common::backends() {
        for (text, least, most) in &cases {
            let graph = graph(text, &[("past", "present")]);
            let session = session(&opener, &graph);
            let new = Tensor::from_f32([1, 1, 2, 2], &[1.0, 2.0, 3.0, 4.0]).expect("four");
            let run = |place: i64| {
                let dtype = session.plan().programs[0]
                    .inputs
                    .iter()
                    .find(|port| port.name == "position")
                    .expect("it is one")
                    .dtype;
                session.run(&[("new", new.clone()), ("position", Tensor::from_f64(dtype, [1], &[place as f64]))])
            };
            for place in [*least, *most] {
                run(place).unwrap_or_else(|e| panic!("{}, {text}, {place}: {e}", opener.0));
            }
            let before = states(&session, &graph);
            for place in [least - 1, most + 1, i64::from(i32::MAX)] {
                let error = run(place).expect_err("there is no such place").to_string();
                let expected = format!("input 'position': expected {least} to {most}, from where node '");
                assert!(error.starts_with(&expected), "{}: {error}", opener.0);
                let expected = format!("writes along 8 rows, found {place} (element 0)");
                assert!(error.ends_with(&expected), "{}: {error}", opener.0);
                assert_eq!(states(&session, &graph), before, "{}: the states are as before", opener.0);
            }
            let bytes = i64::from(i32::MAX).to_le_bytes();
            if session.plan().programs[0].inputs.iter().any(|port| port.name == "position" && port.dtype == DType::I64)
            {
                let lent = [("new", Place::bytes(new.bytes())), ("position", Place::bytes(&bytes))];
                session.run_in_place(&lent, &mut []).expect_err("in memory of the caller, too");
            }
            run(*least).expect("it goes on");
        }
    }
}

/// A run adds a number to its position. The host adds it to a copy, and so needs not read the state.
#[test]
fn a_place_that_counts_is_checked() {
    let model = || onnx::load("graphs/generate.onnxtxt".as_ref()).expect("it is a model");
    let pair = |a: &str, b: &str| (a.to_owned(), b.to_owned());
    let pairs = [pair("token", "next_token"), pair("position", "next_position"), pair("past_*", "present_*")];
    let sizes = [("batch".to_owned(), 2), ("capacity".to_owned(), 3)];
    let graph = onnx::import(&model().with_state(&pairs), &sizes).expect("it is a graph");
    for opener in common::backends() {
        let session = session(&opener, &graph);
        let inputs = session.plan().programs[0]
            .inputs
            .iter()
            .map(|port| (port.name.as_str(), common::random(&mut 3, &port.shape)));
        let inputs: Vec<_> = inputs.collect();
        let position =
            session.plan().programs[0].state.iter().find(|s| s.port.name == "position").expect("it is a state");
        assert_eq!(position.count.map(|count| (count.by, count.most)), Some((1, 3)), "{}", opener.0);
        for _ in 0..3 {
            session.run(&inputs).expect("there is room");
        }
        let before = states(&session, &graph);
        let refused = "state 'position' is 3: expected 0 to 2, from where node 'present_keys' writes along 3 rows; \
                       reset the states, or plan a larger capacity";
        for refusal in [session.run(&inputs), session.run_poisoned(&inputs)] {
            assert_eq!(refusal.unwrap_err().to_string(), refused, "{}", opener.0);
        }
        assert_eq!(states(&session, &graph), before, "{}", opener.0);
        let refusal = session.set_state("position", &integers(&[2], &[1, 4])).unwrap_err().to_string();
        assert_eq!(refusal, "state 'position': expected 0 to 3, found 4", "{}", opener.0);
        // The row that is behind counts alone.
        session.set_state("position", &integers(&[2], &[0, 2])).expect("it fits");
        session.run(&inputs).expect("there is room");
        assert!(session.run(&inputs).is_err(), "{}: the second row is full", opener.0);
        session.reset_state().expect("it is reset");
        session.run(&inputs).expect("it is empty");
        assert_eq!(session.state("position").expect("it is a state"), integers(&[2], &[1, 1]), "{}", opener.0);
    }
}

/// A position that a run moves by what an input says: the state is read, with the outputs or before the next run.
#[test]
fn a_place_that_moves_freely_is_checked() {
    let g = Trace::new("moves");
    let (x, step) = (g.input("x", DType::F32, [1, 1, 2]), g.input("step", DType::I64, [1]));
    let cache = g.state("cache", Tensor::from_f32([1, 4, 2], &[0.0; 8]).expect("eight"));
    let position = g.state("position", integers(&[1], &[0]));
    g.update(position, position + step);
    let written = cache.op("TensorScatter", &[x, position], Attrs::new().with("axis", 1));
    g.update(cache, written);
    g.output("sum", written.reduce_sum(&[1], false));
    let graph = g.finish().expect("the graph is sound");
    for opener in common::backends() {
        let session = session(&opener, &graph);
        assert_eq!(session.plan().programs[0].state.iter().filter_map(|state| state.count).count(), 0, "{}", opener.0);
        let x = Tensor::from_f32([1, 1, 2], &[1.0, 2.0]).expect("two");
        let inputs = |step: i64| [("x", x.clone()), ("step", integers(&[1], &[step]))];
        for step in [3, -2, 4] {
            session.run(&inputs(step)).expect("it is inside");
        }
        let before = states(&session, &graph);
        for refusal in [session.run(&inputs(-5)), session.run_poisoned(&inputs(-5))] {
            let error = refusal.expect_err("5 is beyond").to_string();
            assert!(error.starts_with("state 'position' is 5: expected 0 to 3, from where node '"), "{error}");
        }
        assert_eq!(states(&session, &graph), before, "{}", opener.0);
        session.set_state("position", &integers(&[1], &[3])).expect("it is a state");
        // Nobody reads the outputs in between.
        let replayed = session.with(|exec| {
            exec.write(&inputs(1).map(|(_, tensor)| tensor))?;
            exec.replay()?;
            exec.write(&inputs(1).map(|(_, tensor)| tensor))?;
            exec.replay()
        });
        let error = replayed.expect_err("4 is beyond").to_string();
        assert!(error.starts_with("state 'position' is 4: expected 0 to 3"), "{}: {error}", opener.0);
    }
}

/// Attention by lengths: those of GroupQueryAttention's keys, as an input or as the sum of a mask, and the number of keys that are seen.
#[test]
fn lengths_beyond_the_keys_are_refused() {
    let grouped = "present_k, present_v";
    let node = |lengths: &str| {
        format!(
            "y, {grouped} = com.microsoft.GroupQueryAttention <num_heads = 2, kv_num_heads = 1> (x, , , past_k, past_v, {lengths}, total)"
        )
    };
    let caches = "float[2, 1, 16] x, float[2, 1, 4, 4] past_k, float[2, 1, 4, 4] past_v";
    let outputs = "float[2, 1, 8] y, float[2, 1, 4, 4] present_k, float[2, 1, 4, 4] present_v";
    let pairs = [("past_k", "present_k"), ("past_v", "present_v")];
    let by_input =
        format!("g ({caches}, int32[2] lengths) => ({outputs}) <int32 total = {{4}}> {{ {} }}", node("lengths"));
    let by_mask = format!(
        "g ({caches}, int64[2, 4] mask) => ({outputs}) <int32 total = {{4}}, int64[1] axis = {{1}}, int64 one = {{1}}> {{
            sum = ReduceSum <keepdims = 0> (mask, axis)
            less = Sub (sum, one)
            lengths = Cast <to = 6> (less)
            {}
        }}",
        node("lengths")
    );
    let seen =
        "g (float[2, 1, 3, 4] q, float[2, 1, 5, 4] k, float[2, 1, 5, 4] v, int64[2] lengths) => (float[2, 1, 3, 4] y) {
        y = Attention (q, k, v, , , , lengths)
    }";
    let i32s = |values: &[f64]| Tensor::from_f64(DType::I32, [values.len()], values);
    let cases: [(Graph, &str, Vec<Tensor>, Vec<(Tensor, &str)>); 3] = [
        (
            graph(&by_input, &pairs),
            "lengths",
            vec![i32s(&[0.0, 3.0])],
            vec![
                (i32s(&[0.0, 4.0]), "expected 0 to 3, from where node 'y' writes along 4 rows, found 4 (element 1)"),
                (i32s(&[-1.0, 0.0]), "expected 0 to 3, from where node 'y' writes along 4 rows, found -1 (element 0)"),
            ],
        ),
        (
            graph(&by_mask, &pairs),
            "mask",
            vec![integers(&[2, 4], &[1, 0, 0, 0, 1, 1, 1, 1])],
            vec![
                (
                    integers(&[2, 4], &[1, 1, 1, 0, 1, 1, 1, 2]),
                    "expected 1 to 4, from where node 'y' writes along 4 rows, found 5 (sum of 4 elements from 4 on)",
                ),
                (
                    integers(&[2, 4], &[0; 8]),
                    "expected 1 to 4, from where node 'y' writes along 4 rows, found 0 (sum of 4 elements from 0 on)",
                ),
            ],
        ),
        (
            graph(seen, &[]),
            "lengths",
            vec![integers(&[2], &[0, 5])],
            vec![(integers(&[2], &[5, 6]), "expected 0 to 5, as node 'y' sees at most 5 rows, found 6 (element 1)")],
        ),
    ];
    for opener in common::backends() {
        for (graph, name, right, wrong) in &cases {
            let session = session(&opener, graph);
            let run = |given: &Tensor| {
                let inputs = session.plan().programs[0].inputs.iter().map(|port| {
                    let tensor = if port.name == *name { given.clone() } else { common::random(&mut 5, &port.shape) };
                    (port.name.as_str(), tensor)
                });
                session.run(&inputs.collect::<Vec<_>>())
            };
            right.iter().for_each(|given| drop(run(given).unwrap_or_else(|e| panic!("{}: {e}", opener.0))));
            let before = states(&session, graph);
            for (given, expected) in wrong {
                let error = run(given).expect_err("it is beyond").to_string();
                assert_eq!(error, format!("input '{name}': {expected}"), "{}", opener.0);
                assert_eq!(states(&session, graph), before, "{}", opener.0);
            }
        }
    }
}

/// What is written within its bounds is what the reference writes: the first and the last place, also from the end.
#[test]
fn allowed_places_are_written() {
    let text = "g (float[4, 2] data, int64[2, 1] row, float[2] updates) => (float[4, 2] y) <int64[1, 1] one = {1}, int64[2] both = {2, 1}> {
        column = Expand (one, both)
        tuples = Concat <axis = 1> (row, column)
        y = ScatterND (data, tuples, updates)
    }";
    let graph = graph(text, &[]);
    for opener in common::backends() {
        let session = session(&opener, &graph);
        let data = common::random(&mut 3, &[4, 2].into());
        let inputs = |rows: [i64; 2]| {
            let updates = Tensor::from_f32([2], &[5.0, 6.0]).expect("two");
            [("data", data.clone()), ("row", integers(&[2, 1], &rows)), ("updates", updates)]
        };
        for rows in [[0, 3], [-1, -4], [2, 1]] {
            let found = session.run(&inputs(rows)).expect("they are places");
            let given = inputs(rows).map(|(_, tensor)| tensor);
            let expected = reference::run(&graph, &given).expect("the reference runs");
            assert_eq!(found[0].1, expected[0], "{}, {rows:?}", opener.0);
        }
        for (rows, found) in [([4, 0], 4), ([0, -5], -5)] {
            let error = session.run(&inputs(rows)).expect_err("it is no place").to_string();
            let expected =
                format!("input 'row': expected -4 to 3, from where node 'y' writes along 4 rows, found {found}");
            assert!(error.starts_with(&expected), "{}: {error}", opener.0);
        }
    }
}

/// Where a batch is computed in chunks, inputs and states keep their bounds.
#[test]
fn chunks_keep_bounds() {
    let g = Trace::new("chunks");
    let (x, at) = (g.input("x", DType::F32, [4, 64]), g.input("at", DType::I64, [4]));
    let cache = g.state("cache", Tensor::from_f32([4, 3, 64], &[0.0; 768]).expect("as many"));
    let position = g.state("position", integers(&[4], &[0; 4]));
    g.update(position, position + 1.0);
    let row = x.shaped(&[4, 1, 64]);
    g.update(cache, cache.op("TensorScatter", &[row, position], Attrs::new().with("axis", 1)));
    let wide = x.shaped(&[4, 64, 1]).matmul(x.shaped(&[4, 1, 64]));
    g.output("sum", wide.matmul(wide).reduce_sum(&[1], false));
    let zeros = g.constant("zeros", Tensor::from_f32([4, 3, 64], &[0.0; 768]).expect("as many"));
    g.output("written", zeros.op("TensorScatter", &[row, at], Attrs::new().with("axis", 1)));
    let graph = g.finish().expect("the graph is sound");
    let load = |chunks: usize| {
        let options = Options { recipe: Recipe { chunks, ..Recipe::default() }, ..Options::default() };
        Session::from_graph(graph.clone(), &options.on(Choice::Cpu)).expect("it is planned")
    };
    let session = load(2);
    assert!(
        session.plan().programs[0].steps.len() > load(1).plan().programs[0].steps.len(),
        "it is computed in chunks"
    );
    let run =
        |at: i64| session.run(&[("x", common::random(&mut 3, &[4, 64].into())), ("at", integers(&[4], &[at; 4]))]);
    for _ in 0..2 {
        run(2).expect("there is room");
    }
    assert!(run(3).expect_err("it is no place").to_string().starts_with("input 'at': expected 0 to 2"));
    run(0).expect("there is room for one more");
    let error = run(0).expect_err("all rows are written").to_string();
    assert!(error.starts_with("state 'position' is 3: expected 0 to 2"), "{error}");
}
