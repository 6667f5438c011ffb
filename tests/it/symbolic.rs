//! A model that is imported once: its graphs for other extents are those of an import for these.

use plimsoll::internals::constant::Constant;
use plimsoll::internals::graph::Kind;
use plimsoll::internals::onnx::{self, Model, Symbolic, text};
use plimsoll::internals::op::Fact;
use plimsoll::internals::reference;
use plimsoll::{Graph, Result, Tensor};
use std::path::Path;
use std::sync::Arc;

fn constants(graph: &Graph) -> Vec<Arc<Constant>> {
    let nodes = graph.order().expect("no cycles").into_iter();
    nodes
        .filter_map(|id| match &graph.node(id).kind {
            Kind::Constant(constant) => Some(constant.clone()),
            _ => None,
        })
        .collect()
}

/// What a graph computes of inputs that its extents decide, and the names and facts of its outputs.
fn computed(graph: Result<Graph>) -> Result<Vec<(String, Tensor)>, String> {
    let graph = graph.map_err(|e| e.to_string())?;
    graph.verify().expect("its facts follow");
    let facts = graph.inputs().iter().map(|&v| graph.fact(v).clone());
    let input = |(fact, seed): (Fact, usize)| {
        let of = |k: usize| match fact.dtype.is_float() {
            true => ((k * 37 + seed * 11) % 7) as f64 - 2.5,
            false => (k % 2) as f64,
        };
        let elements: Vec<_> = (0..fact.shape.numel()).map(of).collect();
        Tensor::from_f64(fact.dtype, fact.shape.clone(), &elements)
    };
    let inputs: Vec<_> = facts.zip(1..).map(input).collect();
    let outputs = reference::run(&graph, &inputs).map_err(|e| e.to_string())?;
    Ok(graph.outputs().iter().map(|(name, _)| name.clone()).zip(outputs).collect())
}

/// Holds the graphs of a model that is imported for the first of these bindings against imports for each. Returns how many share a constant
/// with the first: those were derived.
fn hold(name: &str, model: &Model, bindings: &[Vec<(String, usize)>]) -> usize {
    let symbolic = Symbolic::new(model.clone());
    let first = symbolic.at(&bindings[0]).map(|graph| constants(&graph)).unwrap_or_default();
    let (mut derived, mut computes) = (0, 0);
    for dims in bindings {
        let (found, expected) = (symbolic.at(dims), onnx::import(model, dims));
        let shares = |graph: &Graph| constants(graph).iter().any(|c| first.iter().any(|own| Arc::ptr_eq(own, c)));
        derived += usize::from(found.as_ref().is_ok_and(shares));
        let (found, expected) = (computed(found), computed(expected));
        computes += usize::from(found.is_ok());
        let same = match (&found, &expected) {
            (Ok(found), Ok(expected)) => {
                let pairs = || found.iter().zip(expected);
                found.len() == expected.len()
                    && pairs().all(|(a, b)| a.0 == b.0 && a.1.shape() == b.1.shape() && a.1.bytes() == b.1.bytes())
            }
            (found, expected) => found.as_ref().err() == expected.as_ref().err(),
        };
        assert!(same, "{name} at {dims:?}: found {found:?}, expected {expected:?}");
    }
    assert!(computes > bindings.len() / 2, "{name}: {computes} bindings have a graph");
    derived
}

/// All files in `graphs/`, with each dim at several extents, one after another.
#[test]
fn graphs_of_other_extents_are_those_of_an_import() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("graphs");
    let mut files = 0;
    for entry in std::fs::read_dir(folder).expect("the folder") {
        let path = entry.expect("an entry").path();
        if !path.extension().is_some_and(|e| e == "onnx" || e == "onnxtxt") {
            continue;
        }
        let model = onnx::load(&path).expect("a model");
        let open = model.open_dims().expect("dims");
        if open.is_empty() {
            continue;
        }
        let binding = |extents: &dyn Fn(usize) -> usize| -> Vec<_> {
            open.iter().enumerate().map(|(k, dim)| (dim.clone(), extents(k))).collect()
        };
        let mut bindings = vec![binding(&|_| 3)];
        for extent in [1, 2, 6] {
            bindings.extend((0..open.len()).map(|at| binding(&|k| if k == at { extent } else { 3 })));
            bindings.push(binding(&|_| extent));
        }
        let name = path.display().to_string();
        let derived = hold(&name, &model, &bindings);
        files += usize::from(derived == bindings.len());
    }
    assert!(files >= 8, "{files} files are imported once");
}

/// Each model, and how many of the extents 6, 1, 2, 3, 5, 7 and 12 of `n` are derived from the first.
const MODELS: &[(&str, usize, &str)] = &[
    (
        "shapes that follow",
        7,
        "g (float[n, 4] x) => (float[h, 4] y, int64[k] r) <int64 half = {2}, int64[1] none = {0}, int64 zero = {0}, int64 one = {1}, float[4] w = {1, 2, 3, 4}> {
            s = Shape <start = 0, end = 1> (x) h = Div (s, half) part = Slice (x, none, h) y = Mul (part, w)
            flat = Squeeze (s) r = Range (zero, flat, one)
        }",
    ),
    (
        "constants that follow",
        7,
        "g (float[n, 3] x) => (float[n, 3] y, float[n, n] m) <int64 one = {1}, int64 zero = {0}, float[3] w = {1, 2, 3}> {
            s = Shape <start = 0, end = 1> (x) c = Squeeze (s) r = Range (zero, c, one) f = Cast <to = 1> (r)
            q = Div (r, one) two = Add (one, one) parity = Mod (r, two) p = Cast <to = 1> (parity)
            column = Unsqueeze (p, one) z = Mul (x, w) y = Add (z, column)
            m = Sub (column, f)
        }",
    ),
    (
        "a branch by the extent",
        4,
        "g (float[n] x) => (float[n] y) <int64 four = {4}, float two = {2}> {
            s = Shape (x) c = Squeeze (s) big = Greater (c, four)
            y = If (big) < then_branch = t () => (float[n] a) { a = Mul (x, two) }, else_branch = e () => (float[n] b) { b = Add (x, two) } >
        }",
    ),
    (
        "a step for each",
        7,
        "g (float[2] h, float[n, 2] x) => (float[2] last, float[n, 2] all, float[n, 2] more) <float two = {2}> {
            last, all = Scan <num_scan_inputs = 1, body = b (float[2] a, float[2] v) => (float[2] c, float[2] d) { e = Mul (a, two) c = Add (e, v) d = Identity (c) }> (h, x)
            more = Mul (all, two)
        }",
    ),
    (
        "a tensor for each",
        1,
        "g (float[n, 2] x) => (float[2] y) <int64 last = {-1}, float[2] w = {2, 3}> {
            z = Mul (x, w) parts = SplitToSequence <axis = 0, keepdims = 0> (z) y = SequenceAt (parts, last)
        }",
    ),
    (
        "an index that few have",
        5,
        "g (float[n, 2] x) => (float[2] y) <int64 third = {2}, float[2] w = {2, 3}> { z = Mul (x, w) y = Gather (z, third) }",
    ),
    (
        "what a run finds",
        0,
        "g (float[n] x) => (float[k] y) <float zero = {0}, int64[1] all = {-1}> {
            is = Greater (x, zero) places = NonZero (is) flat = Reshape (places, all) y = Gather (x, flat)
        }",
    ),
    (
        "an axis of an old operator",
        6,
        "<ir_version: 3, opset_import: [\"\" : 6]> g (float[n, 4, 4] x) => (y) <float[4] w = {1, 2, 3, 4}> {
            s = Squeeze (x) y = Add <broadcast = 1, axis = 1> (s, w)
        }",
    ),
    (
        "slopes of an old operator",
        6,
        "<ir_version: 3, opset_import: [\"\" : 6]> g (float[n, 4, 4] x) => (y) <float[4] w = {1, 2, 3, 4}> {
            s = Squeeze (x) y = PRelu (s, w)
        }",
    ),
    (
        "branches that fold other nodes",
        4,
        "g (float[n] x) => (y) <int64 four = {4}, int64[1] all = {-1}, int64[1] one = {1}, int64[1] many = {2000}, float two = {2}> {
            s = Shape (x) q = Squeeze (s) b = Greater (q, four) z = Mul (x, two)
            y = If (b) <
                then_branch = t () => (a) { e = Expand (all, many) d = Neg (z) r = Reshape (z, all) a = Mul (r, r) },
                else_branch = u () => (a) { e = Expand (all, one) r = Reshape (z, e) a = Mul (r, r) }
            >
        }",
    ),
    (
        "ties and pads",
        7,
        "g (float[n] x, float[n] z) => (float[p] y) <int64[2] pads = {1, 1}, float[1] w = {3}> {
            a = Pad (x, pads) b = Concat <axis = 0> (z, w) c = Concat <axis = 0> (b, w) y = Add (a, c)
        }",
    ),
];

#[test]
fn models_that_decide_by_extents_are_imported_again() {
    let mut found = Vec::new();
    for (name, _, source) in MODELS {
        let head = if source.starts_with('<') { "" } else { "<ir_version: 9, opset_import: [\"\" : 18]> " };
        let source = format!("{head}{source}");
        let proto = text::parse(&source, Path::new("test")).unwrap_or_else(|e| panic!("{name}: {e}"));
        let bindings: Vec<_> = [6, 1, 2, 3, 5, 7, 12].map(|n| vec![("n".to_owned(), n)]).to_vec();
        found.push((*name, hold(name, &Model::new(proto), &bindings)));
    }
    let expected: Vec<_> = MODELS.iter().map(|(name, derived, _)| (*name, *derived)).collect();
    assert_eq!(found, expected);
}

/// What an import refuses, a graph for other extents is not.
#[test]
fn what_an_import_refuses_is_refused_for_other_extents() {
    let source = "<ir_version: 11, opset_import: [\"\" : 24, \"ai.onnx.preview\" : 1]>
        g (float[2, 2, 3, 4] q, float[2, 2, 5, 4] k, float[n, 2, 5, 4] v) => (y) { y = ai.onnx.preview.FlexAttention (q, k, v) }";
    let model = Model::new(text::parse(source, Path::new("test")).expect("the text is well-formed"));
    let symbolic = Symbolic::new(model.clone());
    let at = |n: usize| [("n".to_owned(), n)];
    symbolic.at(&at(2)).expect("its values fit its keys");
    let [found, expected] = [symbolic.at(&at(1)), onnx::import(&model, &at(1))]
        .map(|graph| graph.expect_err("its values do not fit").to_string());
    assert_eq!(found, expected);
    assert!(found.contains("expected keys and values that fit the queries"), "{found}");
}
