//! Weights of few bits stay as the file has them: in the plan, on every target, and in the memory of a run.

use crate::common::{self, Folder};
use plimsoll::internals::eager::compare::{Moved, Setup, moved_by_quantizing};
use plimsoll::internals::onnx::proto::DataType;
use plimsoll::internals::onnx::{self, text};
use plimsoll::internals::op::Attrs;
use plimsoll::internals::pass::{Quantize, quantized};
use plimsoll::internals::plan::Planning;
use plimsoll::internals::plan::check::check;
use plimsoll::internals::plan::{Class, Plan, compile};
use plimsoll::internals::reference;
use plimsoll::{Choice, DType, Graph, Limits, Options, Recipe, Session, Target, Tensor, Trace};
use std::path::Path;

/// Products of every kind: bits, numbers of a block, zero points, with a bias or without.
const KINDS: &[(usize, usize, &str, bool)] = &[
    (4, 32, "", false),
    (4, 16, "packed", true),
    (4, 128, "floats", false),
    (8, 32, "", true),
    (8, 16, "packed", false),
    (2, 16, "", false),
    (2, 64, "packed", false),
    // Numbers that may begin in one word and end in the next, and blocks that may.
    (3, 32, "packed", false),
    (3, 16, "", true),
    (5, 16, "packed", false),
    (6, 64, "floats", false),
    (7, 32, "packed", true),
    (4, 4, "packed", false),
    (8, 2, "", false),
];

const ROWS: usize = 24;

/// A product by `ROWS` rows of `k` numbers, as a file; and the bytes of its initializers.
fn product(k: usize, kind: (usize, usize, &str, bool)) -> (onnx::Model, u64) {
    grouped(k, kind, &[])
}

/// A product whose numbers are listed with their blocks, unless the list is empty.
fn grouped(k: usize, (bits, block, zeros, bias): (usize, usize, &str, bool), groups: &[usize]) -> (onnx::Model, u64) {
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
    if !groups.is_empty() {
        let list = groups.iter().map(usize::to_string).collect::<Vec<_>>().join(", ");
        initializers += &format!(", int32[{}] g_idx = {{{list}}}", groups.len());
        total += 4 * groups.len();
    }
    let group = if groups.is_empty() { "" } else { "g_idx" };
    let mut inputs = vec!["x", "b", "s", zero, group, if bias { "c" } else { "" }];
    inputs.truncate(inputs.iter().rposition(|name| !name.is_empty()).expect("x") + 1);
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

/// A product by `ROWS` rows of `k` codes, NF4 or FP4, as a file; and the bytes of its initializers.
fn codes(k: usize, block: usize, kind: usize) -> (onnx::Model, u64) {
    let (bytes, scales) = ((ROWS * k).div_ceil(2), (ROWS * k).div_ceil(block));
    let list = |count: usize, most: usize| {
        (0..count).map(|i| (i * 37 % 251 % most).to_string()).collect::<Vec<_>>().join(", ")
    };
    let source = format!(
        "<ir_version: 10, opset_import: [\"\" : 20, \"com.microsoft\" : 1]>
        g (float[m, {k}] x) => (float[m, {ROWS}] y) <uint8[{bytes}] b = {{{}}}, float[{scales}] s = {{{}}}> {{
            y = com.microsoft.MatMulBnb4 <K = {k}, N = {ROWS}, block_size = {block}, quant_type = {kind}> (x, b, s)
        }}",
        list(bytes, 251),
        list(scales, 9)
    );
    (parsed(&source), (bytes + 4 * scales) as u64)
}

fn graph(model: &onnx::Model, rows: usize) -> Graph {
    onnx::import(model, &[("m".to_owned(), rows)]).expect("it is a graph")
}

#[test]
fn constants_take_the_bytes_of_the_file() {
    for &kind in KINDS {
        let (model, bytes) = product(256, kind);
        for target in [Target::cpu(2), Target::cuda(), Target::preset("wgpu").expect("a preset")] {
            for rows in [1, 100] {
                let prepared = Recipe::default().whole(graph(&model, rows), &target).expect("the passes run");
                let (plan, _) = compile(&prepared, &target, &Limits { memory: None }).expect("it is planned");
                let found = plan.first().buffer_bytes(Class::Constant);
                assert!(found <= bytes + 4 * 256, "{kind:?} on {}: {found} bytes of {bytes}", target.name);
            }
        }
    }
}

/// Compares all backends with the reference, where a graph has so many rows of `k` elements. Constants of a plan take at most `most` bytes.
fn agrees(name: &str, graph: &Graph, rows: &[usize], most: u64, state: &mut u64) {
    let x = common::random(state, &rows.into());
    let expected = reference::run(graph, std::slice::from_ref(&x)).expect("the reference runs");
    for (backend_name, open) in common::backends() {
        let backend = open();
        let prepared = Recipe::default().whole(graph.clone(), backend.target()).expect("the passes run");
        let (plan, constants) = compile(&prepared, backend.target(), &Limits { memory: None }).expect("it is planned");
        let found = plan.first().buffer_bytes(Class::Constant);
        assert!(found <= most, "{name} on {backend_name}: {found} bytes of {most}");
        let mut exec = plimsoll::internals::exec::Exec::load(backend, plan, &constants, &|_| {}).expect("it loads");
        let found = exec.run(std::slice::from_ref(&x)).expect("it runs");
        common::agrees(&found[0], &expected[0], 1e-5).unwrap_or_else(|e| panic!("{backend_name} {name}: {e}"));
    }
}

#[test]
fn products_are_those_of_the_reference() {
    let mut state = 3;
    for &kind in KINDS {
        // Whole blocks, and a last one that is not.
        for k in [256, 200] {
            let (model, bytes) = product(k, kind);
            for rows in [1, 3, 20] {
                agrees(&format!("{kind:?} {k}"), &graph(&model, rows), &[rows, k], bytes + 4 * 256, &mut state);
            }
        }
    }
}

/// Blocks that `g_idx` gives: in the order of the numbers, in another one, and of different sizes.
#[test]
fn listed_blocks_stay_packed() {
    let mut state = 4;
    for &kind in KINDS {
        for k in [256_usize, 200] {
            let block = kind.1;
            let blocks = k.div_ceil(block);
            let kept: Vec<_> = (0..blocks * block).map(|place| place / block).collect();
            let moved: Vec<_> = (0..k).map(|place| place * 7 % k / block).collect();
            let other: Vec<_> = (0..k).map(|place| place * place % blocks).collect();
            for (groups, is_packed) in [(kept, true), (moved, true), (other, blocks == 1)] {
                let (model, bytes) = grouped(k, kind, &groups);
                // The order of the activation has 8 bytes per number.
                let most = if is_packed { bytes + 8 * k as u64 + 4 * 256 } else { u64::MAX };
                for rows in [1, 20] {
                    let name = format!("{kind:?} {k} {:?}", &groups[..5]);
                    agrees(&name, &graph(&model, rows), &[rows, k], most, &mut state);
                }
            }
        }
    }
}

#[test]
fn codes_stay_packed() {
    let mut state = 8;
    for kind in [0, 1] {
        // Whole blocks; a row that is a part of one; blocks that are cut by the ends of rows; and ones that few numbers are common to.
        for (k, block) in [(256, 64), (32, 64), (200, 64), (37, 16)] {
            let (model, bytes) = codes(k, block, kind);
            let most = if k == 37 { u64::MAX } else { bytes + 4 * 4 * (ROWS * k / 8) as u64 / 4 + 2048 };
            let most = if k % block == 0 { bytes + 512 } else { most };
            for rows in [1, 3, 20] {
                agrees(&format!("{kind} {k} {block}"), &graph(&model, rows), &[rows, k], most, &mut state);
            }
        }
    }
}

/// A mixture of four experts, of 64 and 32 elements, as a file; and the bytes of its initializers.
fn mixture(bits: usize, block: Option<usize>, zeros: bool, activation: &str) -> (onnx::Model, u64) {
    let list = |count: usize, most: usize| {
        (0..count).map(|i| (i * 37 % 251 % most).to_string()).collect::<Vec<_>>().join(", ")
    };
    let (mut initializers, mut total, mut names) = (Vec::new(), 0, vec![String::new(); 13]);
    let mut add = |name: String, kind: &str, shape: &[usize], port: usize, most: usize| {
        let count = shape.iter().product::<usize>();
        initializers.push(format!("{kind}{shape:?} {name} = {{{}}}", list(count, most)));
        total += count * if kind == "float" { 4 } else { 1 };
        names[port] = name;
    };
    let gates = if activation == "swiglu" { 2 } else { 1 };
    for (number, n, k, port) in [(1, 32 * gates, 64, 2), (2, 64, 32, 5)] {
        let blocks = k / block.unwrap_or(k);
        add(format!("q{number}"), "uint8", &[4, n, k * bits / 8], port, 251);
        let scales = if block.is_some() { vec![4, n, blocks] } else { vec![4, n] };
        add(format!("s{number}"), "float", &scales, port + 1, 3);
        add(format!("b{number}"), "float", &[4, n], port + 2, 5);
        if zeros {
            let bytes = (blocks * bits).div_ceil(8);
            let shape = if block.is_some() { vec![4, n, bytes] } else { vec![4, (n * bits).div_ceil(8)] };
            add(format!("z{number}"), "uint8", &shape, 10 + number, 251);
        }
    }
    let inputs = names[2..].iter().map(|name| if name.is_empty() { "\"\"" } else { name });
    let inputs = inputs.collect::<Vec<_>>().join(", ");
    let block = block.map_or(String::new(), |block| format!(", block_size = {block}"));
    let source = format!(
        "<ir_version: 10, opset_import: [\"\" : 20, \"com.microsoft\" : 1]>
        g (float[m, 64] x, float[m, 4] r) => (float[m, 64] y) <{}> {{
            y = com.microsoft.QMoE <k = 2, activation_type = \"{activation}\", swiglu_fusion = {}, expert_weight_bits = {bits}{block}>
                (x, r, {inputs})
        }}",
        initializers.join(", "),
        gates - 1
    );
    (parsed(&source), total as u64)
}

#[test]
fn experts_stay_packed() {
    let mut state = 8;
    for (bits, block, zeros, activation) in [
        (4, None, false, "swiglu"),
        (4, Some(16), true, "silu"),
        (8, Some(16), true, "swiglu"),
        (8, None, true, "relu"),
    ] {
        let (model, bytes) = mixture(bits, block, zeros, activation);
        for rows in [1, 9] {
            let graph = graph(&model, rows);
            let inputs = [64, 4].map(|len| common::random(&mut state, &[rows, len].into()));
            let expected = reference::run(&graph, &inputs).expect("the reference runs");
            for (name, open) in common::backends() {
                let backend = open();
                let prepared = Recipe::default().whole(graph.clone(), backend.target()).expect("the passes run");
                let (plan, constants) =
                    compile(&prepared, backend.target(), &Limits { memory: None }).expect("it is planned");
                let found = plan.first().buffer_bytes(Class::Constant);
                // Zero points that do not fill bytes are floats.
                let most = bytes + if zeros { 4 * 4 * 128 * 4 } else { 0 } + 16 * 256;
                assert!(found <= most, "{name} {bits} {block:?}: {found} bytes of {most}");
                let mut exec =
                    plimsoll::internals::exec::Exec::load(backend, plan, &constants, &|_| {}).expect("it loads");
                let found = exec.run(&inputs).expect("it runs");
                common::agrees(&found[0], &expected[0], 1e-5)
                    .unwrap_or_else(|e| panic!("{name} {bits} {block:?} {activation}: {e}"));
            }
        }
    }
}

#[test]
fn numbers_that_are_no_weights_are_refused() {
    let of = |bits: usize, block: usize, scales: usize| {
        let model = parsed(&format!(
            "<ir_version: 10, opset_import: [\"\" : 20, \"com.microsoft\" : 1]>
            g (float[m, 32] x) => (float[m, 2] y) <uint8[2, 1, 16] b = {{{}}}, float[{scales}] s = {{{}}}> {{
                y = com.microsoft.MatMulNBits <K = 32, N = 2, bits = {bits}, block_size = {block}> (x, b, s)
            }}",
            ["7"; 32].join(", "),
            vec!["1"; scales].join(", ")
        ));
        onnx::import(&model, &[("m".to_owned(), 1)]).expect_err("it is no product").to_string()
    };
    for bits in [1, 9] {
        let found = of(bits, 32, 2);
        assert!(found.contains("'y'") && found.contains("expected whole bytes of numbers of 2 to 8 bits"), "{found}");
    }
    for (bits, block) in [(0, 32), (4, 0)] {
        let found = of(bits, block, 2);
        assert!(found.contains("'y'") && found.contains("expected 1 or more, found 0"), "{found}");
    }
    let found = of(4, 32, 3);
    assert!(found.contains("'y'") && found.contains("'scales': expected [2, 1], found"), "{found}");
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

/// Programs of few and of many rows read the same words.
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
    let [packed] = constants(&[64])[..] else { panic!("there is one program") };
    assert_eq!(constants(&[1, 64]), [packed; 2]);
}

fn parsed(source: &str) -> onnx::Model {
    onnx::Model::new(text::parse(source, Path::new("m.onnxtxt")).expect("it parses"))
}

/// Weights that `DequantizeLinear` makes: the type of their numbers, its bits, and true if rows of the numbers are the columns of the product.
const TYPES: &[(&str, usize)] = &[("int4", 4), ("uint4", 4), ("int8", 8), ("uint8", 8), ("int2", 2)];

/// How scales are shared: one for all, one per column, one per block of a column.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Shared {
    Everywhere,
    Columns,
    Blocks(usize),
}

/// A file with a matrix of `k` by `n` dequantized numbers `w`, its inputs and outputs, and the nodes that use it; and the bytes of its initializers.
fn dequantized(
    (name, bits): (&str, usize),
    [k, n]: [usize; 2],
    by_rows: bool,
    shared: Shared,
    with_zeros: bool,
    (ports, nodes): (&str, &str),
) -> (onnx::Model, usize) {
    let mut state = 11u32;
    let mut list = |count: usize, most: u32| {
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) % most
        };
        let values = (0..count).map(|_| next()).map(|value| match name {
            "int8" => (value as i32 - 128).to_string(),
            _ => value.to_string(),
        });
        values.collect::<Vec<_>>().join(", ")
    };
    let bytes = |count: usize| (count * bits).div_ceil(8);
    let (shape, sums) = if by_rows { ([n, k], 1) } else { ([k, n], 0) };
    let (of, scales, attrs) = match shared {
        Shared::Everywhere => (String::new(), 1, String::new()),
        Shared::Columns => (format!("[{n}]"), n, format!("<axis = {}>", 1 - sums)),
        Shared::Blocks(block) => {
            let mut each = shape;
            each[sums] = k.div_ceil(block);
            (format!("{each:?}"), each[0] * each[1], format!("<axis = {sums}, block_size = {block}>"))
        }
    };
    let floats = (0..scales).map(|i| format!("{}", 0.01 + i as f64 / 1000.0)).collect::<Vec<_>>().join(", ");
    let single = shared == Shared::Everywhere;
    let mut initializers = format!("{name}{shape:?} q = {{{}}}, float{of} s = {{{floats}}}", list(bytes(k * n), 256));
    let mut total = bytes(k * n) + 4 * scales;
    if with_zeros {
        let zeros = if single { "3".to_owned() } else { list(bytes(scales), 256) };
        initializers += &format!(", {name}{of} z = {{{zeros}}}");
        total += bytes(scales);
    }
    let zeros = if with_zeros { ", z" } else { "" };
    let source = format!(
        "<ir_version: 10, opset_import: [\"\" : 25]>
        g {ports} <{initializers}> {{ w = DequantizeLinear {attrs} (q, s{zeros}) {nodes} }}"
    );
    (parsed(&source), total)
}

/// Every form of dequantized weights, and where each is used.
fn each_dequantized(mut test: impl FnMut(&str, onnx::Model, usize, DType, usize)) {
    for &kind in TYPES {
        for by_rows in [false, true] {
            for shared in [Shared::Everywhere, Shared::Columns, Shared::Blocks(32)] {
                for zeros in [false, true] {
                    // The last block of 75 numbers is not whole, and their rows begin within bytes.
                    for extents in [[96, 40], [75, 13]] {
                        let [k, n] = extents;
                        let name = format!("{kind:?} {by_rows} {shared:?} {zeros} {extents:?}");
                        let (turn, w) = if by_rows { ("t = Transpose <perm = [1, 0]> (w) ", "t") } else { ("", "w") };
                        let ports = format!("(float[m, {k}] x) => (float[m, {n}] y)");
                        let flip = -i32::from(by_rows);
                        let gemm = format!("y = Gemm <transB = {flip}, alpha = 0.5> (x, w)");
                        let lookup = format!("(int64[m] x) => (float[m, {k}] y)");
                        let mut uses = vec![(&ports, format!("{turn}y = MatMul (x, {w})")), (&ports, gemm)];
                        if by_rows {
                            uses.push((&lookup, "y = Gather (w, x)".into()));
                        }
                        for (ports, nodes) in uses {
                            let (model, bytes) = dequantized(kind, extents, by_rows, shared, zeros, (ports, &nodes));
                            let dtype = if *ports == lookup { DType::I64 } else { DType::F32 };
                            test(&format!("{name} {nodes}"), model, bytes, dtype, k);
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn dequantized_weights_take_the_bytes_of_the_file() {
    each_dequantized(|name, model, bytes, _, _| {
        for target in [Target::cpu(2), Target::cuda(), Target::preset("wgpu").expect("a preset")] {
            let plan = Recipe::default().plan(graph(&model, 5), &target, &Limits { memory: None }).expect(name);
            let found = plan.first().buffer_bytes(Class::Constant);
            // Each buffer may be filled up; rows of 75 numbers begin in words of their own.
            let most = bytes as u64 * 105 / 100 + 40 * 8 + 3 * 256;
            assert!(found <= most, "{name} on {}: {found} bytes of {bytes}", target.name);
        }
    });
}

#[test]
fn dequantized_weights_are_those_of_the_reference() {
    let mut state = 5;
    each_dequantized(|name, model, _, dtype, extent| {
        for rows in [1, 6] {
            let graph = graph(&model, rows);
            let x = match dtype {
                DType::F32 => common::random(&mut state, &[rows, extent].into()),
                _ => Tensor::from_i64([rows], &(0..rows as i64).map(|i| i * 3 - 7).collect::<Vec<_>>()).expect("ints"),
            };
            let expected = reference::run(&graph, std::slice::from_ref(&x)).expect("the reference runs");
            for (backend, open) in common::backends() {
                let backend_of = open();
                let prepared = Recipe::default().whole(graph.clone(), backend_of.target()).expect("the passes run");
                let (plan, constants) =
                    compile(&prepared, backend_of.target(), &Limits { memory: None }).expect("it is planned");
                let mut exec =
                    plimsoll::internals::exec::Exec::load(backend_of, plan, &constants, &|_| {}).expect("it loads");
                let found = exec.run(std::slice::from_ref(&x)).expect("it runs");
                common::agrees(&found[0], &expected[0], 1e-5).unwrap_or_else(|e| panic!("{backend} {name}: {e}"));
            }
        }
    });
}

/// A table of embeddings that makes the logits, too, is there once.
#[test]
fn tied_weights_are_there_once() {
    for zeros in [false, true] {
        let ports = "(int64[m] x) => (float[m, 64] y)";
        let nodes = "e = Gather (w, x) t = Transpose <perm = [1, 0]> (w) y = MatMul (e, t)";
        let (model, bytes) = dequantized(("uint8", 8), [96, 64], true, Shared::Blocks(32), zeros, (ports, nodes));
        for target in [Target::cpu(2), Target::cuda(), Target::preset("wgpu").expect("a preset")] {
            let plan = Recipe::default().plan(graph(&model, 5), &target, &Limits { memory: None }).expect("a plan");
            let found = plan.first().buffer_bytes(Class::Constant);
            // The zero points of a lookup fill whole words.
            let most = bytes as u64 + if zeros { 96 * 4 } else { 0 } + 256;
            assert!(found <= most, "{} {zeros}: {found} bytes of {bytes}", target.name);
        }
    }
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

/// Nodes that read constants of halves: inputs, outputs and constants, by their extents, and the nodes.
const OF_HALVES: &[(&str, &str)] = &[
    ("T[5, 301] x, T[301, 77] w, T[77] b", "p = MatMul (x, w) y = Add (p, b)"),
    ("T[1, 300] x, T[300, 77] w", "y = MatMul (x, w)"),
    ("T[3, 5, 31] x, T[3, 31, 48] w", "y = MatMul (x, w)"),
    ("T[40, 301] x, T[77, 301] w, T[77] b", "y = Gemm <transB = 1> (x, w, b)"),
    ("T[2, 13, 17, 19] x, T[21, 13, 3, 3] w, T[21] b", "c = Conv <pads = [1, 1, 1, 1]> (x, w, b) y = Relu (c)"),
    ("T[1, 13, 7, 7] x, T[30, 13, 1, 1] w", "y = Conv (x, w)"),
    ("T[1, 33, 4, 4] x, T[64, 33, 3, 3] w", "y = Conv <pads = [1, 1, 1, 1]> (x, w)"),
    ("T[2, 15, 9, 9] x, T[12, 5, 3, 3] w", "y = Conv <group = 3> (x, w)"),
    ("T[2, 15, 9, 9] x, T[15, 1, 3, 3] w", "y = Conv <group = 15> (x, w)"),
    ("T[2, 6, 9, 9] x, T[6, 5, 3, 3] w", "y = ConvTranspose <strides = [2, 2]> (x, w)"),
    ("T[7, 65] x, T[65] s, T[65] b", "y = LayerNormalization (x, s, b)"),
    ("T[7, 65] x, T[65] s, T[7, 1] b", "p = Mul (x, s) y = Add (p, b)"),
];

/// The graph of nodes whose inputs but the first are initializers; and the bytes of these.
fn of_halves(dtype: DType, inputs: &str, nodes: &str, state: &mut u64) -> (Graph, u64) {
    let name = if dtype == DType::F16 { "float16" } else { "bfloat16" };
    let (input, constants) = inputs.split_once(", T").expect("an input and constants");
    let mut bytes = 0;
    let mut initializers = Vec::new();
    for constant in constants.split(", T") {
        let (extents, _) = constant[1..].split_once(']').expect("extents");
        let shape: Vec<usize> = extents.split(", ").map(|extent| extent.parse().expect("a number")).collect();
        let values = Tensor::from_f64(dtype, shape.clone(), &common::random(state, &shape.into()).to_f64());
        bytes += values.bytes().len() as u64;
        let bits = values.bytes().chunks_exact(2).map(|bits| u16::from_le_bytes([bits[0], bits[1]]).to_string());
        initializers.push(format!("{name}{constant} = {{{}}}", bits.collect::<Vec<_>>().join(", ")));
    }
    let (input, initializers) = (input.replacen('T', name, 1), initializers.join(", "));
    let model = parsed(&format!(
        "<ir_version: 10, opset_import: [\"\" : 22]> g ({input}) => ({name}[] y) <{initializers}> {{ {nodes} }}"
    ));
    (onnx::import(&model, &[]).expect("it is a graph"), bytes)
}

#[test]
fn halves_of_a_file_stay_halves() {
    let mut state = 9;
    for dtype in [DType::F16, DType::BF16] {
        for &(inputs, nodes) in OF_HALVES {
            let (graph, bytes) = of_halves(dtype, inputs, nodes, &mut state);
            let fact = graph.fact(graph.inputs()[0]).clone();
            let x = Tensor::from_f64(fact.dtype, fact.shape.clone(), &common::random(&mut state, &fact.shape).to_f64());
            let expected = reference::run(&graph, std::slice::from_ref(&x)).expect("the reference runs");
            for (backend, open) in common::backends() {
                let backend_of = open();
                let prepared = Recipe::default().whole(graph.clone(), backend_of.target()).expect("the passes run");
                let (plan, constants) =
                    compile(&prepared, backend_of.target(), &Limits { memory: None }).expect("it is planned");
                let found = plan.first().buffer_bytes(Class::Constant);
                // Panels of a right operand are filled up. Filters that are read tap by tap are floats on the CPU.
                // Where halves are rounded, scales and shifts of rows are applied before that, in floats.
                let wide = ["group = 15", "Transpose", "LayerNormalization"];
                let most = if wide.iter().any(|part| nodes.contains(part)) { 2 } else { 1 };
                assert!(found <= most * bytes * 13 / 10 + 512, "{backend} {dtype} {nodes}: {found} bytes of {bytes}");
                let mut exec =
                    plimsoll::internals::exec::Exec::load(backend_of, plan, &constants, &|_| {}).expect("it loads");
                let found = exec.run(std::slice::from_ref(&x)).expect("it runs");
                let tolerance = if dtype == DType::F16 { 3e-3 } else { 2e-2 };
                common::agrees(&found[0], &expected[0], tolerance)
                    .unwrap_or_else(|e| panic!("{backend} {dtype} {nodes}: {e}"));
            }
        }
    }
}

/// Filters as a file may have them: their type, the scale's extents, and the node that makes floats of them.
const FILTERS: &[(&str, &str, &str)] = &[
    ("int8", "[24]", "DequantizeLinear <axis = 0> (q, s)"),
    ("uint8", "", "DequantizeLinear (q, s)"),
    ("int4", "[24]", "DequantizeLinear <axis = 0> (q, s)"),
    ("float8e4m3fn", "[24]", "DequantizeLinear <axis = 0> (q, s)"),
];

/// Convolutions whose filters alone are quantized hold these as the file does.
#[test]
fn filters_stay_as_the_file_has_them() {
    let mut state = 5;
    for &(dtype, scales, node) in FILTERS {
        for convolve in ["Conv <pads = [1, 1, 1, 1]>", "ConvTranspose <pads = [1, 1, 1, 1]>"] {
            let signed = dtype == "int8" || dtype == "int4";
            let number = |i: usize| i as i64 * 37 % 15 - if signed { 7 } else { 0 };
            // Two numbers of four bits are in a byte.
            let (held, number): (usize, &dyn Fn(usize) -> i64) =
                if dtype == "int4" { (24 * 24 * 9 / 2, &|i| i as i64 * 37 % 251) } else { (24 * 24 * 9, &number) };
            let list = (0..held).map(|i| number(i).to_string()).collect::<Vec<_>>().join(", ");
            let each = if scales.is_empty() { 1 } else { 24 };
            let scale = (0..each).map(|i| format!("0.0{}", i + 1)).collect::<Vec<_>>().join(", ");
            let model = parsed(&format!(
                "<ir_version: 11, opset_import: [\"\" : 23]>
                g (float[m, 24, 6, 7] x) => (float[m, 24, 6, 7] y)
                <{dtype}[24, 24, 3, 3] q = {{{list}}}, float{scales} s = {{{scale}}}> {{
                    w = {node} y = {convolve} (x, w)
                }}"
            ));
            let bytes = held as u64 + 4 * 24 + 4 * 24;
            // The numbers of codes beside it.
            let codes = if dtype.starts_with("float8") { 1024 } else { 0 };
            let graph = onnx::import(&model, &[("m".to_owned(), 2)]).expect("it is a graph");
            agrees(&format!("{dtype} {convolve}"), &graph, &[2, 24, 6, 7], bytes + codes + 1024, &mut state);
        }
    }
}

/// A product, a Gemm and a product by few weights, one after another: a file of floats.
fn of_floats() -> onnx::Model {
    let mut state = 3;
    let mut weights = |shape: &[usize]| {
        let values = common::random(&mut state, &shape.into()).to_f64();
        let extents = shape.iter().map(usize::to_string).collect::<Vec<_>>().join(", ");
        let list = values.iter().map(f64::to_string).collect::<Vec<_>>().join(", ");
        format!("float[{extents}] NAME = {{{list}}}")
    };
    let (v, w, few) = (weights(&[128, 96]), weights(&[64, 96]), weights(&[64, 8]));
    parsed(
        &format!(
            "<ir_version: 10, opset_import: [\"\" : 22]> g (float[m, 128] x) => (float[m, 8] y)
        <{}, {}, {}, float[64] c> {{ a = MatMul (x, v) b = Gemm <transB = 1> (a, w, c) y = MatMul (b, few) }}",
            v.replace("NAME", "v"),
            w.replace("NAME", "w"),
            few.replace("NAME", "few")
        )
        .replace("float[64] c>", &format!("float[64] c = {{{}}}>", vec!["0.5"; 64].join(", "))),
    )
}

/// Weights of a product and of a Gemm, as a flag has them in few bits: bytes, and how far results are off.
#[test]
fn weights_are_quantized_where_it_is_asked_for() {
    let model = of_floats();
    let x = common::random(&mut 5, &[3, 128].into());
    let expected = reference::run(&graph(&model, 3), std::slice::from_ref(&x)).expect("the reference runs");
    let elements = 128 * 96 + 64 * 96;
    for (text, bits, off) in [("int8", 8, 0.01), ("int4", 4, 0.2), ("int4:64", 4, 0.2)] {
        let quantize: Quantize = text.parse().expect("a type");
        assert_eq!(quantize.to_string(), text);
        // 96 is no whole number of blocks of 64, and the last weights are few.
        let left = if quantize.block == 64 { 64 * 96 } else { 0 } + 64 * 8;
        for (name, open) in common::backends() {
            let backend = open();
            let recipe = Recipe { quantize: Some(quantize), ..Recipe::default() };
            let prepared = recipe.whole(graph(&model, 3), backend.target()).expect("the passes run");
            let (plan, constants) =
                compile(&prepared, backend.target(), &Limits { memory: None }).expect("it is planned");
            let found = plan.first().buffer_bytes(Class::Constant);
            let few = elements - (left - 64 * 8);
            let most = few * bits / 8 + few / quantize.block * 4 + left * 4 * 2 + 64 * 4 + 512;
            assert!(found <= most as u64, "{name} {text}: {found} bytes, expected {most}");
            let mut exec = plimsoll::internals::exec::Exec::load(backend, plan, &constants, &|_| {}).expect("it loads");
            let found = exec.run(std::slice::from_ref(&x)).expect("it runs");
            common::agrees(&found[0], &expected[0], off).unwrap_or_else(|e| panic!("{name} {text}: {e}"));
            assert!(common::agrees(&found[0], &expected[0], 1e-6).is_err(), "{name} {text}: nothing is rounded");
        }
    }
    for text in ["int3", "int4:", "int4:8", "int4:33", "int8:2048", "4"] {
        let error = text.parse::<Quantize>().expect_err(text);
        assert!(error.contains("expected int8 or int4") && error.contains(text), "{error}");
    }
}

/// A graph that is emitted with weights in few bits has them in every plan of the file, as many bytes as those of the flag, and computes the same.
#[test]
fn weights_in_few_bits_are_emitted_as_such() {
    let folder = Folder::new("emitted");
    let source = graph(&of_floats(), 3);
    let x = common::random(&mut 5, &[3, 128].into());
    for (text, kind, products) in
        [("int8", DataType::Int8, 2), ("int4", DataType::Int4, 2), ("int4:64", DataType::Int4, 1)]
    {
        let quantize: Quantize = text.parse().expect("a type");
        let emitted = onnx::export(&quantized(source.clone(), quantize).expect(text)).expect("it is exported");
        let proto = emitted.graph.as_ref().expect("a graph");
        let found = proto.node.iter().filter(|node| node.op_type == "DequantizeLinear").count();
        let numbers = proto.initializer.iter().filter(|tensor| tensor.data_type == kind as i32).count();
        assert_eq!((found, numbers), (products, products), "{text}");
        let paths = [folder.path("whole.onnx"), folder.path("parts.onnx"), folder.path("text.onnxtxt")];
        for (path, most) in paths.iter().zip([None, Some(0), None]) {
            onnx::write(emitted.clone(), Path::new(path), most).expect("it is written");
            let again = onnx::import(&onnx::load(Path::new(path)).expect("it is a file"), &[]).expect("it is a graph");
            let error = quantized(again.clone(), quantize).expect_err("nothing is left to quantize").to_string();
            assert!(error.contains("those of DequantizeLinear have few bits already"), "{error}");
            for (name, open) in common::backends() {
                let run = |graph: &Graph, recipe: Recipe| {
                    let backend = open();
                    let prepared = recipe.whole(graph.clone(), backend.target()).expect("the passes run");
                    let (plan, constants) =
                        compile(&prepared, backend.target(), &Limits { memory: None }).expect("it is planned");
                    let bytes = plan.first().buffer_bytes(Class::Constant);
                    let exec = plimsoll::internals::exec::Exec::load(backend, plan, &constants, &|_| {});
                    (bytes, exec.expect("it loads").run(std::slice::from_ref(&x)).expect("it runs"))
                };
                let (bytes, expected) = run(&source, Recipe { quantize: Some(quantize), ..Recipe::default() });
                let (found_bytes, found) = run(&again, Recipe::default());
                assert_eq!(found_bytes, bytes, "{name} {text} {path}");
                common::agrees(&found[0], &expected[0], 1e-6).unwrap_or_else(|e| panic!("{name} {text} {path}: {e}"));
                // What is read back is written again as it is, and not as floats.
                let twice = onnx::export(&again).expect("it is exported");
                assert_eq!(twice.graph.expect("a graph").initializer.len(), proto.initializer.len());
            }
        }
    }
}

/// What `compare` says of weights in few bits: how far each output is from that of the floats, of its peak.
#[test]
fn outputs_are_compared_with_those_of_floats() {
    let source = graph(&of_floats(), 3);
    let x = common::random(&mut 5, &[3, 128].into());
    let expected = reference::run(&source, std::slice::from_ref(&x)).expect("the reference runs")[0].to_f64();
    for (name, open) in common::backends() {
        let mut moved = Vec::new();
        for text in ["int8", "int4"] {
            let recipe = Recipe { quantize: Some(text.parse().expect("a type")), ..Recipe::default() };
            let setup = Setup {
                open: &|| Ok(open()),
                memory_limit: None,
                iters: 1,
                poison: false,
                recipe,
                progress: &|_| {},
                observe: None,
            };
            let found = moved_by_quantizing(&source, std::slice::from_ref(&x), &setup).expect("both run");
            let [Moved { name: output, of_peak }] = &found[..] else { panic!("{found:?}") };
            assert_eq!(output, "y");
            let prepared = recipe.whole(source.clone(), open().target()).expect("the passes run");
            let (plan, constants) =
                compile(&prepared, open().target(), &Limits { memory: None }).expect("it is planned");
            let exec = plimsoll::internals::exec::Exec::load(open(), plan, &constants, &|_| {});
            let rounded = exec.expect("it loads").run(std::slice::from_ref(&x)).expect("it runs")[0].to_f64();
            let off = rounded.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            let peak = expected.iter().map(|value| value.abs()).fold(0.0, f64::max);
            assert!((of_peak - off / peak).abs() < 1e-5, "{name} {text}: {of_peak}, expected {}", off / peak);
            moved.push(*of_peak);
            let tight = Setup { memory_limit: Some(1 << 10), open: &|| Ok(open()), ..setup };
            let error = moved_by_quantizing(&source, std::slice::from_ref(&x), &tight).expect_err("it is too large");
            assert_eq!(error.exit_code(), 2, "{error}");
        }
        assert!(moved[1] > 4.0 * moved[0], "{name}: {moved:?}");
    }
}

/// The scale of the smallest halves is rounded by much, and no number is more than its bits hold.
#[test]
fn weights_that_are_hardly_halves_keep_their_sign() {
    let list = |bits: u16| vec![bits.to_string(); 64 * 64].join(", ");
    let model = parsed(&format!(
        "<ir_version: 10, opset_import: [\"\" : 22]> g (float16[m, 64] x) => (float16[m, 64] y)
        <float16[64, 64] w = {{{}}}> {{ y = MatMul (x, w) }}",
        list(10)
    ));
    let x = Tensor::from_f64(DType::F16, [1, 64], &[4096.0; 64]);
    let backend = (common::backends()[0].1)();
    let recipe = Recipe { quantize: Some("int4".parse().expect("a type")), ..Recipe::default() };
    let prepared = recipe.whole(graph(&model, 1), backend.target()).expect("the passes run");
    let (plan, constants) = compile(&prepared, backend.target(), &Limits { memory: None }).expect("it is planned");
    let mut exec = plimsoll::internals::exec::Exec::load(backend, plan, &constants, &|_| {}).expect("it loads");
    let found = exec.run(std::slice::from_ref(&x)).expect("it runs");
    assert!(found[0].to_f64().iter().all(|&y| y > 0.0), "{:?}", found[0].to_f64());
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
    assert!(error.contains("expected workgroups of 32 to 256 invocations"), "{error}");
}

/// Floats of 8 and 4 bits, scaled as a whole, by column, or by block; cast alone; and scales that are powers of two.
#[test]
fn floats_of_few_bits_stay_packed() {
    const K: usize = 64;
    const N: usize = 48;
    let numbers = |kind: &str| -> String {
        let (count, most) = if kind == "float4e2m1" { (K * N / 2, 256) } else { (K * N, 120) };
        (0..count).map(|at| (at * 37 % most).to_string()).collect::<Vec<_>>().join(", ")
    };
    let scales = |count: usize, power: bool| -> String {
        let one =
            |at: usize| if power { (122 + at % 5).to_string() } else { format!("{}", 0.01 * (1 + at % 7) as f64) };
        (0..count).map(one).collect::<Vec<_>>().join(", ")
    };
    for (kind, scaled, bytes) in [
        ("float8e4m3fn", "", K * N + 4),
        ("float8e5m2", "float s = {0.125}", K * N + 4),
        ("float8e4m3fnuz", "float[48] s", K * N + 4 * N),
        ("float8e5m2fnuz", "float[2, 48] s", K * N + 8 * N),
        ("float4e2m1", "float[2, 48] s", K * N / 2 + 8 * N),
        ("float4e2m1", "float8e8m0[2, 48] s", K * N / 2 + 8 * N),
    ] {
        let power = scaled.starts_with("float8e8m0");
        let (scale, made) = match scaled {
            "" => (String::new(), "f = Cast <to = 1> (w)".to_owned()),
            one if one.contains('{') => (format!(", {one}"), "f = DequantizeLinear (w, s)".to_owned()),
            each if each.contains("[48]") => {
                (format!(", {each} = {{{}}}", scales(N, false)), "f = DequantizeLinear <axis = 1> (w, s)".to_owned())
            }
            blocks => {
                let attrs = if power { ", output_dtype = 1" } else { "" };
                let made = format!("f = DequantizeLinear <axis = 0, block_size = 32{attrs}> (w, s)");
                (format!(", {blocks} = {{{}}}", scales(2 * N, power)), made)
            }
        };
        let source = format!(
            r#"<ir_version: 12, opset_import: ["" : 25]> g (float[3, {K}] x) => (float[3, {N}] y)
            <{kind}[{K}, {N}] w = {{{}}}{scale}> {{ {made} y = MatMul (x, f) }}"#,
            numbers(kind)
        );
        let model = onnx::Model::new(text::parse(&source, Path::new("text")).expect("it parses"));
        let graph = onnx::import(&model, &[]).expect("it is a graph");
        for target in [Target::cpu(2), Target::cuda(), Target::wgpu()] {
            let plan = common::planned(&graph, &target);
            // The list of what the codes stand for has 4 bytes for each.
            let most = bytes + if kind == "float4e2m1" { 64 } else { 1024 } + 3 * target.alignment as usize;
            let found = plan.first().buffer_bytes(Class::Constant) as usize;
            assert!(found <= most, "{kind} {scaled} on {}: {found} bytes, expected at most {most}", target.name);
        }
        let mut state = 3;
        common::backends().iter().for_each(|opener| drop(common::runs_as_the_reference(&graph, opener, &mut state)));
    }
}
