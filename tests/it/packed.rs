//! Weights of few bits stay as the file has them: in the plan, on every target, and in the memory of a run.

use crate::common::{self, Folder};
use plimsoll::internals::onnx::{self, text};
use plimsoll::internals::op::Attrs;
use plimsoll::internals::plan::check::check;
use plimsoll::internals::plan::{Class, Plan, compile};
use plimsoll::internals::reference;
use plimsoll::{Choice, DType, Graph, Limits, Options, Recipe, Session, Target, Tensor, Trace};
use std::path::Path;

/// Products of one row of every kind: bits, numbers of a block, zero points, with a bias or without.
const KINDS: &[(usize, usize, &str, bool)] = &[
    (4, 32, "", false),
    (4, 16, "packed", true),
    (4, 128, "floats", false),
    (8, 32, "", true),
    (8, 16, "packed", false),
    (2, 16, "", false),
    (2, 64, "packed", false),
];

const ROWS: usize = 24;

/// A product by `ROWS` rows of `k` numbers, as a file; and the bytes of its initializers.
fn product(k: usize, (bits, block, zeros, bias): (usize, usize, &str, bool)) -> (onnx::Model, u64) {
    let blocks = k.div_ceil(block);
    let mut state = 7u32;
    let mut list = |count: usize, most: u32| {
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) % most
        };
        (0..count).map(|_| next().to_string()).collect::<Vec<_>>().join(", ")
    };
    let (bytes, zero_bytes) = (ROWS * blocks * block * bits / 8, ROWS * (blocks * bits).div_ceil(8));
    let weights = list(bytes, 256);
    let scales = list(ROWS * blocks, 3);
    let mut initializers = format!(
        "uint8[{ROWS}, {blocks}, {}] b = {{{weights}}}, float[{ROWS}, {blocks}] s = {{{scales}}}",
        block * bits / 8
    );
    let mut total = bytes + 4 * ROWS * blocks;
    let zero = match zeros {
        "packed" => {
            initializers += &format!(", uint8[{zero_bytes}] z = {{{}}}", list(zero_bytes, 256));
            total += zero_bytes;
            "z"
        }
        "floats" => {
            initializers += &format!(", float[{ROWS}, {blocks}] z = {{{}}}", list(ROWS * blocks, 9));
            total += 4 * ROWS * blocks;
            "z"
        }
        _ => "",
    };
    if bias {
        initializers += &format!(", float[{ROWS}] c = {{{}}}", list(ROWS, 5));
        total += 4 * ROWS;
    }
    let mut inputs = vec!["x", "b", "s"];
    if !zero.is_empty() || bias {
        inputs.push(zero);
    }
    if bias {
        inputs.extend(["", "c"]);
    }
    let inputs =
        inputs.into_iter().map(|name| if name.is_empty() { "\"\"" } else { name }).collect::<Vec<_>>().join(", ");
    let source = format!(
        "<ir_version: 10, opset_import: [\"\" : 20, \"com.microsoft\" : 1]>
        g (float[m, {k}] x) => (float[m, {ROWS}] y) <{initializers}> {{
            y = com.microsoft.MatMulNBits <K = {k}, N = {ROWS}, bits = {bits}, block_size = {block}> ({inputs})
        }}"
    );
    (onnx::Model::new(text::parse(&source, Path::new("m.onnxtxt")).expect("it parses")), total as u64)
}

fn graph(model: &onnx::Model, rows: usize) -> Graph {
    onnx::import(model, &[("m".to_owned(), rows)]).expect("it is a graph")
}

#[test]
fn constants_take_the_bytes_of_the_file() {
    for &kind in KINDS {
        let (model, bytes) = product(256, kind);
        for target in [Target::cpu(2), Target::cuda(), Target::preset("wgpu").expect("a preset")] {
            let prepared = Recipe::default().whole(graph(&model, 1), &target).expect("the passes run");
            let (plan, _) = compile(&prepared, &target, &Limits { memory: None }).expect("it is planned");
            let found = plan.buffer_bytes(Class::Constant);
            assert!(found <= bytes + 4 * 256, "{kind:?} on {}: {found} bytes of {bytes}", target.name);
        }
    }
}

#[test]
fn products_are_those_of_the_reference() {
    let mut state = 3;
    for &kind in KINDS {
        // Whole blocks, and a last one that is not.
        for k in [256, 200] {
            let (model, _) = product(k, kind);
            for rows in [1, 5] {
                let graph = graph(&model, rows);
                let x = common::random(&mut state, &[rows, k].into());
                let expected = reference::run(&graph, std::slice::from_ref(&x)).expect("the reference runs");
                for (name, open) in common::backends() {
                    let backend = open();
                    let prepared = Recipe::default().whole(graph.clone(), backend.target()).expect("the passes run");
                    let (plan, constants) =
                        compile(&prepared, backend.target(), &Limits { memory: None }).expect("it is planned");
                    let mut exec =
                        plimsoll::internals::exec::Exec::load(backend, plan, &constants, &|_| {}).expect("it loads");
                    let found = exec.run(std::slice::from_ref(&x)).expect("it runs");
                    common::agrees(&found[0], &expected[0], 1e-5)
                        .unwrap_or_else(|e| panic!("{name} {kind:?} {k}: {e}"));
                }
            }
        }
    }
}

/// Words of a file are read from it when a device asks for them: the constant is a part of the mapped file.
#[test]
fn words_lie_where_the_bytes_do() {
    let folder = Folder::new("words");
    let bytes: Vec<u8> = (0..64).collect();
    let path = folder.file("w.bin", &bytes);
    let fact = plimsoll::Fact::new(DType::U8, [32]);
    let constant = plimsoll::Constant::in_file("w", fact, path.into(), 16);
    let constant = std::sync::Arc::new(constant);
    let words = constant.reinterpreted(plimsoll::Fact::new(DType::I32, [8])).expect("as many bytes");
    let expected = Tensor::new(DType::I32, [8], bytes[16..48].to_vec()).expect("whole words");
    assert_eq!(words.value().expect("the file is there"), &expected);
    assert!(constant.reinterpreted(plimsoll::Fact::new(DType::I32, [9])).is_none());
}

/// A program of more rows has the weights unpacked. One of one row reads these, so that nothing is there twice.
#[test]
fn programs_hold_weights_in_one_form() {
    let (model, _) = product(256, KINDS[0]);
    let options = Options { threads: 2, ..Options::default() }.on(Choice::Cpu);
    let constants = |programs: &[usize]| {
        let graphs = programs.iter().map(|&rows| (format!("rows{rows}"), graph(&model, rows)));
        let session = Session::from_graphs(graphs, &options).expect("it is planned");
        session.programs().map(|program| program.plan().buffer_bytes(Class::Constant)).collect::<Vec<_>>()
    };
    // One form, so the same bytes in both.
    let [unpacked] = constants(&[64])[..] else { panic!("there is one program") };
    assert_eq!(constants(&[1, 64]), [unpacked; 2]);
}

fn parsed(source: &str) -> onnx::Model {
    onnx::Model::new(text::parse(source, Path::new("m.onnxtxt")).expect("it parses"))
}

/// A reader of more rows has the weights unpacked. So has the one of one row beside it.
#[test]
fn readers_of_one_graph_have_weights_in_one_form() {
    let zeros = |count: usize| vec!["0"; count].join(", ");
    let model = parsed(&format!(
        "<ir_version: 10, opset_import: [\"\" : 20, \"com.microsoft\" : 1]>
        g (float[1, 256] x, float[3, 256] z) => (float[1, 64] y, float[3, 64] u)
        <uint8[64, 8, 16] b = {{{}}}, float[64, 8] s = {{{}}}> {{
            y = com.microsoft.MatMulNBits <K = 256, N = 64, bits = 4, block_size = 32> (x, b, s)
            u = com.microsoft.MatMulNBits <K = 256, N = 64, bits = 4, block_size = 32> (z, b, s)
        }}",
        zeros(64 * 8 * 16),
        zeros(64 * 8)
    ));
    let graph = onnx::import(&model, &[]).expect("it is a graph");
    let (plan, _) = Recipe::default().compile(graph, &Target::cpu(2), &Limits { memory: None }).expect("it is planned");
    assert_eq!(plan.buffer_bytes(Class::Constant), 4 * 64 * 256);
}

/// A target without a type for the scales has them in the weights that it unpacks.
#[test]
fn scales_that_a_target_cannot_store_are_unpacked() {
    let model = parsed(
        "<ir_version: 10, opset_import: [\"\" : 20, \"com.microsoft\" : 1]>
        g (float[1, 32] x) => (float[1, 2] y) <uint8[2, 1, 16] b, float16[2, 1] s> {
            y = com.microsoft.MatMulNBits <K = 32, N = 2, bits = 4, block_size = 32> (x, b, s)
        }"
        .replace("16] b", &format!("16] b = {{{}}}", ["7"; 32].join(", ")))
        .replace("1] s", "1] s = {1, 2}")
        .as_str(),
    );
    for name in ["wgpu", "wgpu-desktop"] {
        let graph = onnx::import(&model, &[]).expect("it is a graph");
        let target = Target::preset(name).expect("a preset");
        Recipe::default().plan(graph, &target, &Limits { memory: None }).unwrap_or_else(|e| panic!("{name}: {e}"));
    }
}

#[test]
fn operands_that_are_no_product_are_refused() {
    let of = |left: [usize; 2], n: i64| {
        let trace = Trace::new("g");
        let x = trace.input("x", DType::F32, left);
        let (words, scales) = (trace.input("b", DType::I32, [4]), trace.input("s", DType::F32, [1, 1]));
        let attrs = Attrs::new().with("N", n).with("bits", 4).with("block_size", 32);
        trace.output("y", trace.op("plimsoll.MatMulBits", &[Some(x), Some(words), Some(scales)], attrs));
        trace.finish().expect_err("it is no product").to_string()
    };
    let found = of([1, 0], 1);
    assert!(found.contains("expected rows of one element or more"), "{found}");
    let found = of([0, 1 << 40], 1 << 30);
    assert!(found.contains("too many"), "{found}");
}

/// A team of invocations computes an element: a workgroup has whole teams.
#[test]
fn workgroups_of_less_than_a_team_are_refused() {
    let (model, _) = product(256, KINDS[0]);
    let target = Target::preset("wgpu").expect("a preset");
    let limits = Limits { memory: None };
    let plan = Recipe::default().plan(graph(&model, 1), &target, &limits).expect("it is planned");
    let text = plan.to_json();
    let read = |text: &str| {
        let plan = Plan::from_json(text, Path::new("plan.json"))?;
        check(&plan)
    };
    read(&text).expect("it is a good plan");
    let edited = text.replace("\"threads\":64", "\"threads\":16").replace("\"threads\": 64", "\"threads\": 16");
    assert_ne!(edited, text, "the plan has its workgroups' size");
    let error = read(&edited).expect_err("half a team").to_string();
    assert!(error.contains("workgroups of 16 invocations"), "{error}");
}
