//! What CUDA kernels compute, where there is no GPU: their texts compiled for the host, with contexts that take turns for threads.
//!
//! It needs a C++ compiler (`CXX`, else `c++`) with `_Float16` and `ucontext`; without one the test says that it was skipped.
#![cfg(target_os = "linux")]

mod kernels;

use kernels::{Case, cases, elements, interpret, unordered};
use libloading::Library;
use plimsoll::dtype::DType;
use plimsoll::expr::{Body, Expr};
use plimsoll::kernel::render::{Bindings, Dialect, PRELUDE, Source, render};
use plimsoll::kernel::{Kernel, Operand, Template};
use plimsoll::shape::{Access, Shape};
use plimsoll::target::{Libraries, Target};
use plimsoll::tensor::Tensor;
use std::fmt::Write;
use std::process::Command;

const DEVICE: &str = include_str!("emulate/device.h");

/// What a buffer holds before a kernel writes to it.
const UNTOUCHED: f64 = 77.0;

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

/// The case with halves where it has `f32`.
fn halved(case: &Case, dtype: DType) -> Case {
    let mut kernel = case.kernel.clone();
    for operand in kernel.reads.iter_mut().chain(&mut kernel.writes).filter(|o| o.dtype == DType::F32) {
        operand.dtype = dtype;
    }
    let round =
        |(values, operand): (&Vec<f64>, &Operand)| Tensor::from_f64(operand.dtype, [values.len()], values).to_f64();
    let inputs = case.inputs.iter().zip(&kernel.reads).map(round).collect();
    let fits = |&(w, r): &(usize, usize)| kernel.writes[w].dtype.size() == kernel.reads[r].dtype.size();
    let in_place = case.in_place.filter(fits);
    Case { name: format!("{} in {dtype}", case.name), kernel, inputs, in_place }
}

/// The case with halves as the operands of its core; what is added to it and stored is as it was.
fn summed(case: &Case, dtype: DType) -> Case {
    let core = case.kernel.template.core_reads();
    let mut summed = halved(case, dtype);
    summed.kernel.reads[core..].clone_from_slice(&case.kernel.reads[core..]);
    summed.kernel.writes.clone_from(&case.kernel.writes);
    summed.inputs[core..].clone_from_slice(&case.inputs[core..]);
    summed.name += ", summed";
    summed
}

/// Products that are large enough for every tile.
fn products() -> Vec<Case> {
    let dense = |shape: &[usize]| Access::contiguous(Shape::new(shape));
    let mut state = 1u64;
    let mut random = move || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        f64::from(((state >> 40) as f64 / (1u64 << 23) as f64 - 1.0) as f32)
    };
    let mut list = Vec::new();
    for (batch, [m, k, n], flips) in [
        (1, [70, 72, 88], [false, false]),
        (2, [70, 72, 88], [false, true]),
        (1, [50, 40, 33], [true, false]),
        (1, [33, 37, 41], [false, true]),
        (1, [1, 96, 136], [false, false]),
        (2, [3, 72, 41], [false, true]),
        (1, [70, 64, 2], [false, false]),
        (1, [72, 64, 3], [true, true]),
        (24, [130, 19, 136], [false, false]),
        (24, [130, 24, 131], [false, true]),
        (24, [129, 33, 136], [true, true]),
    ] {
        let matrix = |flip: bool, rows: usize, columns: usize| match flip {
            true => dense(&[batch, columns, rows]).permute(&[0, 2, 1]),
            false => dense(&[batch, rows, columns]),
        };
        let operand = |access| Operand { dtype: DType::F32, access, packed: false };
        let bias = dense(&[n]).broadcast(&Shape::new([batch, m, n]));
        let reads: Vec<_> = [matrix(flips[0], m, k), matrix(flips[1], k, n), bias].into_iter().map(operand).collect();
        let inputs = reads.iter().map(|r| (0..elements(&r.access)).map(|_| random()).collect()).collect();
        let x = |i| Expr::input(i, DType::F32);
        let kernel = Kernel {
            template: Template::MatMul,
            shape: Shape::new([batch, m, n]),
            reads,
            writes: vec![operand(dense(&[batch, m, n]))],
            prologues: Vec::new(),
            body: Body::new(&[x(0) * 0.5 + x(1)]),
            workspace: 0,
            call: None,
        };
        list.push(Case { name: format!("product {batch}x{m}x{k}x{n} {flips:?}"), kernel, inputs, in_place: None });
    }
    list
}

/// Convolutions and windows over images whose channels come last.
fn channels_last() -> Vec<Case> {
    let mut list = cases();
    list.retain(|c| matches!(c.kernel.template, Template::Conv { .. } | Template::Pool { .. }));
    for case in &mut list {
        let Kernel { template, reads, writes, .. } = &mut case.kernel;
        let core = template.core_reads();
        for operand in reads[..core].iter_mut().chain(writes.iter_mut().filter(|_| case.in_place.is_none())) {
            operand.access = Access::channels_last(operand.access.shape.clone());
        }
        for (operand, values) in reads.iter().zip(&mut case.inputs) {
            values.resize(elements(&operand.access), 0.25);
        }
        case.name += ", channels last";
    }
    list
}

/// Guarded attention: rows of which nothing is seen, or something is no number, weigh nothing. Of many rows and of few, which are kernels
/// of their own.
fn guarded() -> [Case; 2] {
    let find = |name: &str| {
        let mut case = cases().into_iter().find(|c| c.name == name).expect("it is one of the cases");
        let Template::Attention { guarded, .. } = &mut case.kernel.template else { unreachable!("{name}") };
        *guarded = true;
        case.name += ", guarded";
        case
    };
    let mut many = find("attention of odd extents");
    let keys = many.kernel.reads[1].access.shape[2];
    for row in [0, 5, 36] {
        many.inputs[3][row * keys..(row + 1) * keys].fill(f64::NEG_INFINITY);
    }
    many.inputs[3][keys] = f64::NAN;
    let mut few = find("attention of one row");
    let depth = few.kernel.reads[0].access.shape[2];
    few.inputs[0][depth] = f64::NAN;
    [many, few]
}

fn bytes(operand: &Operand, values: &[f64]) -> Vec<u8> {
    Tensor::from_f64(operand.dtype, [values.len()], values).bytes().to_vec()
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
            fill(&mut buffers[b], &bytes(operand, &vec![UNTOUCHED; elements(&operand.access)]));
        }
    }
    for (r, (operand, values)) in kernel.reads.iter().zip(&case.inputs).enumerate() {
        if let Some(b) = bindings.of[r] {
            fill(&mut buffers[b], &bytes(operand, values));
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
    let half = kernel.reads.iter().chain(&kernel.writes).any(|o| matches!(o.dtype, DType::F16 | DType::BF16));
    for (w, (expected, operand)) in interpret(kernel, &case.inputs).iter().zip(&kernel.writes).enumerate() {
        // What is beyond a half's range is infinite in it.
        let stored = Tensor::from_f64(operand.dtype, [expected.len()], expected).to_f64();
        let expected = if half { &stored } else { expected };
        let Some(b) = bindings.of[kernel.reads.len() + w] else { continue };
        let len = elements(&operand.access);
        let found = bytemuck::cast_slice::<_, u8>(&buffers[b])[..len * operand.dtype.size()].to_vec();
        let found = Tensor::new(operand.dtype, [len], found).expect("whole elements").to_f64();
        let peak = expected.iter().filter(|v| v.is_finite()).fold(1e-30f64, |p, v| p.max(v.abs()));
        let room = match operand.dtype.is_float() {
            true if half => 1e-2 * peak,
            true => 1e-5 * peak,
            false => 0.0,
        };
        let mut touched = vec![false; len];
        for (index, want) in kernels::indices(&operand.access.shape).iter().zip(expected) {
            let address = operand.access.at(index) as usize;
            touched[address] = true;
            let got = found[address];
            let none = got.is_nan() && want.is_nan();
            if got != *want && !none && ((got - want).is_nan() || (got - want).abs() > room) {
                return Err(format!("write {w} at {index:?}: expected {want}, found {got} (peak {peak})"));
            }
        }
        let in_place = case.in_place.is_some_and(|(write, _)| write == w);
        let stray = touched.iter().zip(&found).position(|(t, v)| !t && *v != UNTOUCHED && !in_place);
        if let Some(address) = stray {
            return Err(format!("write {w} touched element {address}, which is not its own"));
        }
    }
    Ok(())
}

#[test]
fn cuda_kernels_compute_what_the_interpreter_does() {
    let target = Target { libraries: Libraries::default(), ..Target::cuda() };
    // Where there is one multiprocessor, small cases fill it, too.
    let small_target = Target { multiprocessors: 1, ..target.clone() };
    // Contexts that take turns are slow.
    let small = |c: &Case| c.kernel.template != Template::MatMul || c.kernel.shape.numel() < 20_000;
    let plain: Vec<Case> = cases()
        .into_iter()
        .filter(small)
        .chain(products())
        .chain(unordered())
        .chain(channels_last())
        .chain(guarded())
        .collect();
    // Long sums of halves are right, too, but their smallest digits are not what an element's type keeps.
    let mut all: Vec<Case> = Vec::new();
    for dtype in [DType::F16, DType::BF16] {
        all.extend(
            plain.iter().filter(|c| !c.name.contains("rem") && !c.name.contains("resize")).map(|c| halved(c, dtype)),
        );
        all.extend(products().iter().map(|c| summed(c, dtype)));
    }
    all.extend(plain.iter().cloned());
    all.retain(|case| case.is_hosted(&target));
    let attends = |case: &Case| {
        let rows = case.kernel.shape.iter().rev().nth(1);
        matches!(case.kernel.template, Template::Attention { .. }) && rows > Some(&32) && case.kernel.shape[0] < 100
    };
    let again = plain.iter().flat_map(|case| [case.clone(), halved(case, DType::F16)]).filter(attends);
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
