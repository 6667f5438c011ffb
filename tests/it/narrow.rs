//! Elements of at most 8 bits: integers of 4 and 2, floats of 8 and 4.

use crate::common::{self, Folder};
use plimsoll::internals::{npy, reference};
use plimsoll::{DType, Graph, Options, Shape, Target, Tensor, Trace};
use std::process::Command;

fn narrow() -> impl Iterator<Item = DType> {
    DType::ALL.into_iter().filter(|dtype| dtype.is_narrow())
}

/// The name in text files.
fn name(dtype: DType) -> &'static str {
    match dtype {
        DType::I4 => "int4",
        DType::U4 => "uint4",
        DType::I2 => "int2",
        DType::U2 => "uint2",
        DType::F8E4M3FN => "float8e4m3fn",
        DType::F8E4M3FNUZ => "float8e4m3fnuz",
        DType::F8E5M2 => "float8e5m2",
        DType::F8E5M2FNUZ => "float8e5m2fnuz",
        DType::F8E8M0 => "float8e8m0",
        _ => "float4e2m1",
    }
}

/// All codes of a type, each once.
fn all(dtype: DType) -> Tensor {
    let codes = (0..1usize << dtype.bits()).map(|code| match dtype {
        DType::I4 => code as u8 | if code > 7 { 0xf0 } else { 0 },
        DType::I2 => code as u8 | if code > 1 { 0xfc } else { 0 },
        _ => code as u8,
    });
    let codes: Vec<u8> = codes.collect();
    Tensor::new(dtype, [codes.len() / 2, 2], codes).expect("as many codes as elements")
}

fn run(graph: &Graph, x: &Tensor) -> Vec<(String, Vec<(String, Tensor)>)> {
    let options = Options { threads: 2, ..Options::default() };
    let each = common::backends().into_iter().map(|(backend, open)| {
        let session = common::load(graph.clone(), open(), backend, &options);
        let session = session.expect("it loads");
        assert_eq!(session.usage().bytes, session.plan().bytes(), "{backend}");
        (backend.to_owned(), session.run(&[("x", x.clone())]).expect("it runs"))
    });
    each.collect()
}

fn same(found: &[f64], expected: &[f64]) -> bool {
    found.len() == expected.len()
        && found
            .iter()
            .zip(expected)
            .all(|(a, b)| a == b && a.is_sign_negative() == b.is_sign_negative() || a.is_nan() && b.is_nan())
}

#[test]
fn every_code_is_its_number_on_every_backend() {
    for dtype in narrow() {
        let x = all(dtype);
        let text = format!(
            r#"g ({0}[{1},2] x) => (float[{1},2] wide, {0}[{1},2] back)
            {{ wide = Cast <to = 1> (x) back = Cast <to = {2}, saturate = 0> (wide) }}"#,
            name(dtype),
            x.shape()[0],
            dtype.onnx()
        );
        for (backend, found) in run(&common::graph(&text), &x) {
            let expected = x.to_f64();
            // WGSL need not have infinities and what is no number.
            let hard = expected.iter().any(|value| !value.is_finite()) && backend.starts_with("wgpu");
            if !hard {
                assert!(same(&found[0].1.to_f64(), &expected), "{backend} {dtype}: {:?}", found[0].1.to_f64());
                assert!(same(&found[1].1.to_f64(), &expected), "{backend} {dtype}: {:?}", found[1].1.to_f64());
            }
            assert_eq!(found[1].1.dtype(), dtype, "{backend}");
        }
    }
}

#[test]
fn numbers_are_rounded_as_the_reference_rounds_them() {
    for dtype in narrow() {
        for rounding in ["saturate = 1", "saturate = 0", r#"round_mode = "nearest""#, r#"round_mode = "down""#] {
            let is_power = dtype == DType::F8E8M0;
            if rounding.starts_with("round") && !is_power {
                continue;
            }
            let text = format!(
                r#"g (float[60,5] x) => (float[60,5] y)
                {{ q = Cast <to = {}, {rounding}> (x) y = Cast <to = 1> (q) }}"#,
                dtype.onnx()
            );
            let value = |at: usize| {
                let size = (1.0 + (at * 37 % 64) as f64 / 64.0) * f64::powi(2.0, (at / 8) as i32 - 20);
                if at % 2 == 1 && !is_power { -size } else { size }
            };
            let values: Vec<f64> = (0..300).map(value).collect();
            let x = Tensor::from_f64(DType::F32, [60, 5], &values);
            let graph = common::graph(&text);
            let expected = reference::run(&graph, std::slice::from_ref(&x));
            let expected = expected.expect("it has a meaning")[0].to_f64();
            for (backend, found) in run(&graph, &x) {
                if backend.starts_with("wgpu") && expected.iter().any(|value| !value.is_finite()) {
                    continue;
                }
                let found = found[0].1.to_f64();
                let differs = |at: &usize| !same(&found[*at..=*at], &expected[*at..=*at]);
                let worst = (0..300).find(differs).map(|at| (values[at], expected[at], found[at]));
                assert_eq!(worst, None, "{backend} {dtype} {rounding}: the number, expected, found");
            }
        }
    }
}

/// A cast to a half and back rounds, though both are in one kernel, and though the CPU computes halves in `f32`.
#[test]
fn casts_to_halves_round() {
    for dtype in [DType::F16, DType::BF16] {
        for from in [DType::F32, DType::I64] {
            let name = if from == DType::F32 { "float" } else { "int64" };
            let text = format!(
                "g ({name}[4] x) => (float[4] y) {{ h = Cast <to = {}> (x) y = Cast <to = 1> (h) }}",
                dtype.onnx()
            );
            let x = Tensor::from_f64(from, [4], &[2049.0, 4099.0, -257.0, 3.0]);
            let expected = Tensor::from_f64(dtype, [4], &x.to_f64()).to_f64();
            assert_ne!(expected, x.to_f64());
            for (backend, found) in run(&common::graph(&text), &x) {
                assert_eq!(found[0].1.to_f64(), expected, "{backend} {from} to {dtype}");
            }
        }
    }
}

/// Rows that move elements move them, whatever they are.
#[test]
fn elements_are_moved() {
    for dtype in narrow() {
        let x = all(dtype);
        let rows = x.shape()[0];
        let text = format!(
            r#"g ({0}[{1},2] x) => ({0}[2,{1}] turned, {0}[m,2] twice, {0}[k,2] part, {0}[3,2] chosen)
            <int64[1] one = {{1}}, int64[1] end = {{9223372036854775807}}, int64[3] places = {{1, 0, 1}}, int64[1] flat = {{-1}}>
            {{
                same = Identity (x)
                turned = Transpose (same)
                twice = Concat <axis = 0> (x, same)
                part = Slice (x, one, end)
                chosen = Gather (x, places)
            }}"#,
            name(dtype),
            rows
        );
        let text = text.replace("[m,2]", &format!("[{},2]", 2 * rows)).replace("[k,2]", &format!("[{},2]", rows - 1));
        let (bytes, codes) = (x.bytes().to_vec(), |list: &[usize]| -> Vec<u8> {
            list.iter().flat_map(|row| x.bytes()[2 * row..2 * row + 2].to_vec()).collect()
        });
        let expected = [
            x.transposed().bytes().to_vec(),
            [&bytes[..], &bytes[..]].concat(),
            bytes[2..].to_vec(),
            codes(&[1, 0, 1]),
        ];
        for (backend, found) in run(&common::graph(&text), &x) {
            for ((name, found), expected) in found.iter().zip(&expected) {
                assert_eq!((&found.bytes()[..], found.dtype()), (&expected[..], dtype), "{backend} {dtype} {name}");
            }
        }
    }
}

/// A plan's port has the type; arithmetic is refused, with the type's name.
#[test]
fn types_are_named() {
    let trace = Trace::new("g");
    let x = trace.input("x", DType::F8E4M3FN, [4]);
    trace.output("y", x.cast(DType::F32) * 2.0);
    let plan = common::planned(&trace.finish().expect("a graph"), &Target::cuda());
    assert_eq!(
        (plan.programs[0].inputs[0].dtype, &plan.programs[0].inputs[0].shape),
        (DType::F8E4M3FN, &Shape::new([4]))
    );
    // What is added at the edges is a number, not a code.
    let text = r#"g (float8e4m3fn[1,2] x) => (float[1,3] y)
        <int64[4] pads = {0, 1, 0, 0}, float8e4m3fn one = {56}> { wide = Pad (x, pads, one) y = Cast <to = 1> (wide) }"#;
    let two = Tensor::from_f64(DType::F8E4M3FN, [1, 2], &[2.0, 2.0]);
    for (backend, found) in run(&common::graph(text), &two) {
        assert_eq!(found[0].1.to_f64(), [1.0, 2.0, 2.0], "{backend}");
    }
    let trace = Trace::new("g");
    let x = trace.input("x", DType::I4, [4]);
    trace.output("y", x + x);
    let refused = trace.finish().expect_err("it is refused").to_string();
    assert!(refused.contains("i4"), "{refused}");
}

/// Arrays in files have the nearest types that NumPy knows, and come back if that changes no element.
#[test]
fn the_command_takes_and_writes_arrays() {
    let folder = Folder::new("narrow");
    for dtype in narrow().filter(|dtype| *dtype != DType::F8E8M0) {
        let x = all(dtype);
        let path = folder.path("x.npy");
        npy::write(path.as_ref(), &x).expect("it is written");
        let written = npy::read(path.as_ref()).expect("it is read");
        assert_eq!(written.dtype(), if dtype.is_narrow_float() { DType::F32 } else { dtype.held() });
        let text = format!(
            r#"<ir_version: 12, opset_import: ["" : 25]> g ({0}[{1},2] x) => ({0}[2,{1}] y) {{ y = Transpose (x) }}"#,
            name(dtype),
            x.shape()[0]
        );
        let model = folder.file("g.onnxtxt", text);
        let args =
            ["run", &model, "--backend", "cpu", "--input", &format!("x={path}"), "--output-dir", &folder.path("out")];
        let output = Command::new(env!("CARGO_BIN_EXE_plimsoll")).args(args).output().expect("the program starts");
        assert!(output.status.success(), "{dtype}: {}", String::from_utf8_lossy(&output.stderr));
        let found = npy::read(folder.path("out/y.npy").as_ref()).expect("it was written");
        assert!(same(&found.to_f64(), &x.transposed().to_f64()), "{dtype}");
    }
}

/// Elements of less than 8 bits share the bytes of inputs, outputs and states, the last byte of odd extents among them.
#[test]
fn elements_share_the_bytes_of_ports() {
    for dtype in narrow().filter(|dtype| dtype.bits() < 8) {
        for extents in [[2, 3], [5, 3], [1, 1], [4, 8]] {
            let count = extents[0] * extents[1];
            let codes = all(dtype).bytes().to_vec();
            let tensor = |by: usize| {
                let elements: Vec<u8> = (0..count).map(|at| codes[(at * by + 1) % codes.len()]).collect();
                Tensor::new(dtype, extents, elements).expect("as many as elements")
            };
            let text = Trace::new("g");
            let x = text.input("x", dtype, extents);
            let state = text.state("state", tensor(3));
            text.output("before", state);
            text.output("turned", x.transpose(&[1, 0]));
            text.update(state, x);
            let graph = text.finish().expect("the graph is sound");
            for (backend, open) in common::backends() {
                let name = format!("{backend} {dtype}{extents:?}");
                let options = Options { threads: 2, ..Options::default() };
                let session = common::load(graph.clone(), open(), backend, &options);
                let session = session.expect("it loads");
                let plan = session.plan();
                assert_eq!(session.usage().bytes, plan.bytes(), "{name}");
                let bytes = (count * dtype.bits()).div_ceil(8).next_multiple_of(4) as u64;
                let ports = plan.programs[0]
                    .inputs
                    .iter()
                    .chain(&plan.programs[0].outputs)
                    .chain(plan.programs[0].state.iter().map(|state| &state.port));
                for port in ports {
                    assert_eq!(
                        (plan.programs[0].buffers[port.buffer].bytes, port.dtype),
                        (bytes, dtype),
                        "{name} {}",
                        port.name
                    );
                }
                let mut expected = tensor(3);
                for by in [1, 5, 7] {
                    let found = session.run_poisoned(&[("x", tensor(by))]).expect("it runs");
                    assert_eq!(found[0].1.bytes(), expected.bytes(), "{name}: the state");
                    assert_eq!(found[1].1.bytes(), tensor(by).transposed().bytes(), "{name}: what is turned");
                    expected = tensor(by);
                    assert_eq!(session.state("state").expect("there is one").bytes(), expected.bytes(), "{name}");
                }
                session.set_state("state", &tensor(9)).expect("it is given");
                assert_eq!(session.state("state").expect("there is one").bytes(), tensor(9).bytes(), "{name}");
            }
        }
    }
}
