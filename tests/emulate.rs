//! What CUDA kernels compute, where there is no GPU: their texts compiled for the host, with contexts that take turns for threads.
//!
//! It needs a C++ compiler (`CXX`, else `c++`) with `_Float16` and `ucontext`; without one the test says that it was skipped.
#![cfg(target_os = "linux")]

mod kernels;

use kernels::{Case, elements, encode, untouched, variants};
use libloading::Library;
use plimsoll::dtype::DType;
use plimsoll::kernel::Template;
use plimsoll::kernel::render::{Bindings, Dialect, PRELUDE, Source, render};
use plimsoll::target::{Libraries, Target};
use std::fmt::Write;
use std::process::Command;

const DEVICE: &str = include_str!("emulate/device.h");

fn bindings(case: &Case) -> Bindings {
    let mut bindings = Bindings::distinct(&case.kernel);
    if let Some((write, read)) = case.in_place {
        // The write's binding goes; those behind it move up.
        let slot = case.kernel.reads.len() + write;
        if let (Some(gone), Some(kept)) = (bindings.of[slot], bindings.of[read]) {
            bindings.of[slot] = Some(kept);
            bindings.read_only.remove(gone);
            bindings.of.iter_mut().flatten().filter(|b| **b > gone).for_each(|b| *b -= 1);
            bindings.read_only[kept] = false;
        }
    }
    bindings
}

/// Runs a case; what it found wrong.
fn run(library: &Library, number: usize, case: &Case, source: &Source) -> Result<(), String> {
    let bindings = bindings(case);
    let kernel = &case.kernel;
    let mut buffers: Vec<Vec<u128>> = vec![Vec::new(); bindings.read_only.len()];
    let fill = |buffer: &mut Vec<u128>, bytes: &[u8]| {
        buffer.resize(bytes.len().div_ceil(16), 0);
        bytemuck::cast_slice_mut(buffer)[..bytes.len()].copy_from_slice(bytes);
    };
    for (w, operand) in kernel.writes.iter().enumerate() {
        if let Some(b) = bindings.of[kernel.reads.len() + w] {
            fill(&mut buffers[b], &untouched(operand));
        }
    }
    for (r, (operand, values)) in kernel.reads.iter().zip(&case.inputs).enumerate() {
        if let Some(b) = bindings.of[r] {
            fill(&mut buffers[b], &encode(operand, values));
        }
    }
    let mut args: Vec<_> = buffers.iter_mut().map(|b| b.as_mut_ptr()).collect();
    let [x, y, _] = source.groups;
    if x * y > 0 {
        // SAFETY: the function was compiled from a text that says so, and buffers are as large as its operands reach.
        unsafe {
            type Run = unsafe extern "C" fn(*mut *mut u128, u32, u32, u32);
            let run = library.get::<Run>(format!("run_{number}").as_bytes()).map_err(|e| e.to_string())?;
            run(args.as_mut_ptr(), x, y, source.size);
        }
    }
    for (w, operand) in kernel.writes.iter().enumerate() {
        let Some(b) = bindings.of[kernel.reads.len() + w] else { continue };
        let len = elements(&operand.access) * operand.dtype.size();
        case.judge(kernel, w, bytemuck::cast_slice::<_, u8>(&buffers[b])[..len].to_vec())?;
    }
    Ok(())
}

#[test]
fn cuda_kernels_compute_what_the_interpreter_does() {
    let target = Target { libraries: Libraries::default(), ..Target::cuda() };
    // Where there is one multiprocessor, small cases fill it, too.
    let small_target = Target { multiprocessors: 1, ..target.clone() };
    // Contexts that take turns are slow: of large products, those that no smaller one stands for.
    let small = |c: &Case| {
        c.kernel.template != Template::MatMul || c.kernel.shape.numel() < 20_000 || c.name.starts_with("product")
    };
    let plain: Vec<Case> = variants::plain().into_iter().filter(small).collect();
    let mut all = variants::halves(&plain);
    all.extend(plain.iter().cloned());
    all.retain(|case| case.is_hosted(&target));
    let attends = |case: &Case| {
        let rows = case.kernel.shape.iter().rev().nth(1);
        matches!(case.kernel.template, Template::Attention { .. }) && rows > Some(&32) && case.kernel.shape[0] < 100
    };
    let again = plain.iter().flat_map(|case| [case.clone(), variants::halved(case, DType::F16)]).filter(attends);
    let mut all: Vec<(Case, &Target)> = all.into_iter().map(|case| (case, &target)).collect();
    all.extend(again.map(|case| (case, &small_target)));
    let mut text = DEVICE.replace("PRELUDE", PRELUDE.split("// What only PTX can say.").next().expect("it is there"));
    let mut sources = Vec::new();
    for (i, (case, target)) in all.iter().enumerate() {
        let source = render(&case.kernel, target, &bindings(case), Dialect::Cuda);
        let source = source.unwrap_or_else(|e| panic!("{}: {e}", case.name));
        if !source.text.is_empty() {
            let kernel = source.text.replacen(PRELUDE, "", 1).replacen(" kernel(", &format!(" kernel_{i}("), 1);
            writeln!(text, "namespace n{i} {{\n{kernel}}}").expect("a string");
            let head = format!("extern \"C\" void run_{i}(void** a, unsigned x, unsigned y, unsigned size)");
            writeln!(text, "{head} {{ launch(n{i}::kernel_{i}, a, x, y, size, {}); }}", source.cluster)
                .expect("a string");
        }
        sources.push(source);
    }
    let folder = std::env::temp_dir().join(format!("plimsoll-emulate-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a temporary folder");
    let (file, object) = (folder.join("kernels.cc"), folder.join("kernels.so"));
    std::fs::write(&file, text).expect("the text is written");
    let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".into());
    let built = Command::new(&compiler)
        .args(["-std=c++17", "-O1", "-w", "-fno-strict-aliasing", "-pthread", "-shared", "-fPIC", "-o"])
        .args([&object, &file])
        .output();
    let Ok(built) = built else {
        eprintln!("SKIPPED: no C++ compiler '{compiler}'");
        return;
    };
    let log = String::from_utf8_lossy(&built.stderr);
    assert!(built.status.success(), "{}", log.lines().take(30).collect::<Vec<_>>().join("\n"));
    // SAFETY: the library holds nothing but the kernels.
    let library = unsafe { Library::new(&object) }.expect("what was built can be loaded");
    let wrong: Vec<String> = all
        .iter()
        .zip(&sources)
        .enumerate()
        .filter_map(|(i, ((case, target), source))| {
            let name = source.text.lines().next().unwrap_or_default();
            run(&library, i, case, source)
                .err()
                .map(|e| format!("{} ({name}, {} multiprocessors): {e}", case.name, target.multiprocessors))
        })
        .collect();
    drop(library);
    let _ = std::fs::remove_dir_all(&folder);
    eprintln!("{} kernels", all.len());
    for template in [
        "map_wide",
        "row_team",
        "matmul_tile",
        "matmul_mma",
        "matmul_stream",
        "matmul_thin",
        "matmul_slim",
        "attention_tile",
        "attention_mma",
        "conv",
        "gather",
    ] {
        let head = format!("// {template}\n");
        assert!(sources.iter().any(|s| s.text.starts_with(&head)), "no case reaches {template}");
    }
    assert!(wrong.is_empty(), "{} cases differ:\n{}", wrong.len(), wrong.join("\n"));
}
