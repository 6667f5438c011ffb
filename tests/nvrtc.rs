//! Every CUDA kernel of the op table, of the kernel cases and of the golden graphs, in every type, compiled by NVRTC: it needs no GPU.
//!
//! The library is `PLIMSOLL_NVRTC`, or what the loader finds. Without one the test says that it was skipped, unless
//! `PLIMSOLL_REQUIRE_NVRTC` is set: then it fails.

mod kernels;
#[allow(dead_code, reason = "the samples serve other tests as well")]
mod samples;

use libloading::{Library, Symbol};
use plimsoll::dtype::DType;
use plimsoll::graph::Graph;
use plimsoll::kernel::Kernel;
use plimsoll::kernel::render::{Bindings, Dialect, PRELUDE, render};
use plimsoll::op::{Fact, ValueId};
use plimsoll::target::{Libraries, Target};
use plimsoll::{Limits, onnx, ops, pass, plan};
use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::Path;

/// Kernels per program: many enough that a program's fixed cost does not count, few enough that threads share the work.
const BATCH: usize = 60;

/// Graph files with their dims, as in the goldens.
const GRAPHS: &[(&str, &[(&str, usize)])] = &[
    ("attention.onnxtxt", &[("batch", 2), ("sequence", 16)]),
    ("digits.onnx", &[("batch", 8)]),
    ("mlp.onnxtxt", &[("batch", 8)]),
    ("residual.onnxtxt", &[("batch", 2), ("height", 8), ("width", 8)]),
];

/// A device without libraries: everything is rendered.
fn target() -> Target {
    Target { libraries: Libraries::default(), ..Target::cuda() }
}

fn nvrtc() -> Option<Library> {
    let named = std::env::var("PLIMSOLL_NVRTC").ok();
    let usual = ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so", "nvrtc64_130_0.dll", "nvrtc64_120_0.dll"];
    // SAFETY: NVRTC has no code that runs when it is loaded, beyond what any C++ library has.
    let open = |name: &str| unsafe { Library::new(name) };
    let found = match &named {
        Some(path) => Some(open(path).unwrap_or_else(|e| panic!("PLIMSOLL_NVRTC: {e}"))),
        None => usual.iter().find_map(|name| open(name).ok()),
    };
    if found.is_none() {
        assert!(std::env::var_os("PLIMSOLL_REQUIRE_NVRTC").is_none(), "NVRTC is required, and there is none");
        eprintln!("SKIPPED: no NVRTC; tests/test.sh installs it");
    }
    found
}

/// Compiles for an architecture; the log if it fails.
fn compile(nvrtc: &Library, text: &str, arch: &str) -> Result<(), String> {
    type Create = unsafe extern "C" fn(
        *mut *mut c_void,
        *const c_char,
        *const c_char,
        c_int,
        *const c_void,
        *const c_void,
    ) -> c_int;
    type Compile = unsafe extern "C" fn(*mut c_void, c_int, *const *const c_char) -> c_int;
    type Size = unsafe extern "C" fn(*mut c_void, *mut usize) -> c_int;
    type Log = unsafe extern "C" fn(*mut c_void, *mut c_char) -> c_int;
    type Destroy = unsafe extern "C" fn(*mut *mut c_void) -> c_int;
    let text = CString::new(text).expect("no zero bytes");
    let options =
        [format!("--gpu-architecture={arch}"), "--std=c++17".into()].map(|o| CString::new(o).expect("no zero bytes"));
    let options = options.each_ref().map(|o| o.as_ptr());
    // SAFETY: the signatures are those of nvrtc.h, and what is passed lives as long as the program.
    unsafe {
        fn symbol<'a, T>(nvrtc: &'a Library, name: &str) -> Symbol<'a, T> {
            // SAFETY: as above.
            unsafe { nvrtc.get(name.as_bytes()) }.expect("NVRTC has it")
        }
        let mut program = std::ptr::null_mut();
        let none = std::ptr::null();
        symbol::<Create>(nvrtc, "nvrtcCreateProgram")(
            &mut program,
            text.as_ptr(),
            c"kernels.cu".as_ptr(),
            0,
            none,
            none,
        );
        let status = symbol::<Compile>(nvrtc, "nvrtcCompileProgram")(program, options.len() as c_int, options.as_ptr());
        let mut size = 0;
        symbol::<Size>(nvrtc, "nvrtcGetProgramLogSize")(program, &mut size);
        let mut log = vec![0u8; size + 1];
        symbol::<Log>(nvrtc, "nvrtcGetProgramLog")(program, log.as_mut_ptr().cast());
        symbol::<Destroy>(nvrtc, "nvrtcDestroyProgram")(&mut program);
        let log = CStr::from_bytes_until_nul(&log).expect("it ends").to_string_lossy().into_owned();
        if status == 0 { Ok(()) } else { Err(log) }
    }
}

/// What is rendered of a plan's kernels, by text.
fn collect(name: &str, kernels: &[Kernel], into: &mut BTreeMap<String, String>) {
    for kernel in kernels.iter().filter(|k| k.call.is_none() && !k.reads.iter().any(|r| r.packed)) {
        let source = render(kernel, &target(), &Bindings::distinct(kernel), Dialect::Cuda);
        let source = source.unwrap_or_else(|e| panic!("{name}: {e}"));
        if !source.text.is_empty() {
            into.entry(source.text).or_insert_with(|| name.to_owned());
        }
    }
}

fn planned(name: &str, graph: &mut Graph, into: &mut BTreeMap<String, String>) {
    let planned =
        pass::run(graph, &target(), true).and_then(|()| plan::plan(graph, &target(), &Limits { memory: None }));
    collect(name, &planned.unwrap_or_else(|e| panic!("{name}: {e}")).kernels, into);
}

/// Every text, with the name of what it is for.
fn texts() -> BTreeMap<String, String> {
    let mut texts = BTreeMap::new();
    for (number, sample) in samples::samples().iter().enumerate() {
        for dtype in [DType::F32, DType::F16, DType::BF16, DType::F64] {
            let name = format!("sample {number}, {} in {dtype}", sample.op);
            let mut graph = Graph::new(sample.op);
            let mut input = |i: usize, input: &samples::Input| {
                let dtype = if input.dtype == DType::F32 { dtype } else { input.dtype };
                graph.input(format!("x{i}"), Fact::new(dtype, input.shape.clone()))
            };
            let inputs: Vec<_> =
                sample.inputs.iter().enumerate().map(|(i, x)| x.as_ref().map(|x| input(i, x))).collect();
            let op = ops::find(sample.op).expect("a row");
            let node = match graph.add(op, sample.op, &inputs, sample.attrs.clone(), &[]) {
                Ok(node) => node,
                // Attributes may fix the type of what goes with them.
                Err(error) if dtype != DType::F32 => {
                    eprintln!("{name}: {error}");
                    continue;
                }
                Err(error) => panic!("{name}: {error}"),
            };
            for port in 0..graph.node(node).outputs.len() as u32 {
                graph.output(format!("y{port}"), ValueId { node, port });
            }
            planned(&name, &mut graph, &mut texts);
        }
    }
    for case in kernels::cases() {
        collect(&case.name, &[case.kernel], &mut texts);
    }
    for (file, dims) in GRAPHS {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("graphs").join(file);
        let dims: Vec<_> = dims.iter().map(|&(name, n)| (name.to_owned(), n)).collect();
        let mut graph = onnx::import(&onnx::load(&path).expect("a graph"), &dims).expect("it is imported");
        planned(file, &mut graph, &mut texts);
    }
    texts
}

#[test]
fn every_kernel_compiles() {
    let texts = texts();
    let Some(nvrtc) = nvrtc() else { return };
    let all: Vec<_> = texts.iter().collect();
    let program = |batch: &[(&String, &String)]| {
        let kernels = batch.iter().enumerate().map(|(i, (text, name))| {
            let text = text.replacen(PRELUDE, "", 1).replacen(" kernel(", &format!(" kernel_{i}("), 1);
            format!("// {name}\nnamespace n{i} {{\n{text}}}\n")
        });
        format!("{PRELUDE}{}", kernels.collect::<String>())
    };
    let failure = |batch: &[(&String, &String)], log: String| {
        // The text around the first error.
        let line = log.split("kernels.cu(").nth(1).and_then(|rest| rest.split(')').next()?.parse::<usize>().ok());
        let text = program(batch);
        let around: Vec<&str> = text.lines().skip(line.unwrap_or(1).saturating_sub(8)).take(10).collect();
        format!("{}\n{}", log.lines().take(12).collect::<Vec<_>>().join("\n"), around.join("\n"))
    };
    let batches: Vec<_> = all.chunks(BATCH).collect();
    let failures: Vec<String> = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..2)
            .map(|worker| {
                let (batches, program, failure, nvrtc) = (&batches, &program, &failure, &nvrtc);
                scope.spawn(move || {
                    let own = batches.iter().skip(worker).step_by(2);
                    own.filter_map(|b| compile(nvrtc, &program(b), "sm_90").err().map(|log| failure(b, log))).collect()
                })
            })
            .collect();
        workers.into_iter().flat_map(|w| -> Vec<String> { w.join().expect("it compiles to the end") }).collect()
    });
    eprintln!("{} kernels in {} programs", all.len(), batches.len());
    assert!(failures.is_empty(), "{} programs fail\n{}", failures.len(), failures.join("\n\n"));
}
