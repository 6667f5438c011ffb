//! CUDA kernels run without a GPU: their texts are compiled for the host, where contexts stand for threads and run round robin.
//!
//! It needs a C++ compiler (`CXX`, else `c++`) with `_Float16` and `ucontext`; without one the test says that it was skipped.

use crate::common;
use crate::kernels::{Case, elements, encode, untouched, variants};
use libloading::Library;
use plimsoll::internals::dtype::DType;
use plimsoll::internals::kernel::algorithm::{Rows, Schedule, Text};
use plimsoll::internals::kernel::render::{Bindings, Dialect, PRELUDE, Source, render};
use plimsoll::internals::kernel::schedule;
use plimsoll::internals::kernel::{Fold, Kernel, Template};
use plimsoll::internals::target::{Libraries, Target};
use std::ffi::{CStr, OsStr, c_char};
use std::fmt::Write;
use std::path::Path;
use std::process::Command;

const DEVICE: &str = include_str!("emulate/device.h");

fn bindings(case: &Case) -> Bindings {
    let mut bindings = Bindings::distinct(&case.kernel);
    if let Some((write, read)) = case.in_place {
        // The binding of the write is removed, and the later ones move up.
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

/// A case as it is rendered for a target.
struct Job {
    case: Case,
    multiprocessors: u32,
    source: Source,
}

impl Job {
    fn new(case: Case, target: &Target) -> Job {
        let kernel = schedule::scheduled(&case.kernel, target).unwrap_or_else(|e| panic!("{}: {e}", case.name));
        Job::of(case, &kernel, target)
    }

    /// A transposed convolution by each of its products, rows by each number of warps, products by each tile of `matmul_regs`, and those by numbers
    /// of few bits by each of their texts. Scores that are no softmax by each of their cuts.
    fn each(case: &Case, target: &Target) -> Vec<Job> {
        let candidates = schedule::candidates(&case.kernel, target, &|_| true).into_iter();
        let is_tried = |text: &Text| matches!(text, Text::ConvTranspose { .. } | Text::Rows(Rows::Warps { .. }));
        let few_bits = matches!(case.kernel.template, Template::MatMulBits { .. })
            || case.kernel.template == Template::MatMul && case.kernel.reads[0].dtype.is_byte();
        let folds = matches!(case.kernel.template, Template::Attention { fold, .. } if fold != Fold::Softmax);
        let is_tiled = |schedule: &Schedule| few_bits || folds || schedule.name(&case.kernel, target) == "matmul_regs";
        let is_vector = matches!(case.kernel.template, Template::PoolGrad { .. });
        let is_tiled = |schedule: &Schedule| is_vector || is_tiled(schedule);
        let tried = candidates.filter(|s| is_tiled(s) || matches!(s, Schedule::Text(text) if is_tried(text)));
        let scheduled = tried.map(|schedule| Kernel { schedule, ..case.kernel.clone() });
        scheduled.map(|kernel| Job::of(case.clone(), &kernel, target)).collect()
    }

    fn of(case: Case, kernel: &Kernel, target: &Target) -> Job {
        let source = render(kernel, target, &bindings(&case), Dialect::Cuda);
        let source = source.unwrap_or_else(|e| panic!("{}: {e}", case.name));
        Job { case, multiprocessors: target.multiprocessors, source }
    }

    fn name(&self) -> String {
        let template = self.source.text.lines().next().unwrap_or_default();
        format!("{} ({template}, {} multiprocessors)", self.case.name, self.multiprocessors)
    }
}

/// Kernels of a file: a compiler takes some megabytes for each.
const OF_A_FILE: usize = 300;

/// Compiles jobs to a library and runs them. Returns the failures.
fn run_all(compiler: &str, file: &Path, jobs: &[&Job]) -> Vec<String> {
    let mut text = DEVICE.replace("PRELUDE", PRELUDE.split("// What only PTX can say.").next().expect("it is there"));
    for (i, Job { source, .. }) in jobs.iter().enumerate().filter(|(_, job)| !job.source.text.is_empty()) {
        let kernel = source.text.replacen(PRELUDE, "", 1).replacen(" kernel(", &format!(" kernel_{i}("), 1);
        writeln!(text, "namespace n{i} {{\n{kernel}}}").expect("a string");
        let head = format!("extern \"C\" const char* run_{i}(void** a, unsigned x, unsigned y, unsigned size)");
        let launch = format!("launch(n{i}::kernel_{i}, a, x, y, size, {})", source.cluster);
        writeln!(text, "{head} {{ return {launch}; }}").expect("a string");
    }
    std::fs::write(file, text).expect("the text is written");
    let object = file.with_extension("so");
    // Optimizing would take longer than it saves. Fortified builds refuse jumps from one stack to another.
    let built = Command::new(compiler)
        .args(["-std=c++17", "-O0", "-w", "-fno-strict-aliasing", "-U_FORTIFY_SOURCE", "-pthread", "-shared", "-fPIC"])
        .args([OsStr::new("-o"), object.as_os_str(), file.as_os_str()])
        .output()
        .expect("the compiler runs");
    let log = String::from_utf8_lossy(&built.stderr);
    assert!(built.status.success(), "{}", log.lines().take(30).collect::<Vec<_>>().join("\n"));
    // SAFETY: the library holds nothing but the kernels.
    let library = unsafe { Library::new(&object) }.expect("what was built can be loaded");
    let run = |(i, job)| Some(format!("{}: {}", Job::name(job), run(&library, i, &job.case, &job.source).err()?));
    jobs.iter().copied().enumerate().filter_map(run).collect()
}

/// Runs a case. Returns its failure.
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
        let fault = unsafe {
            type Run = unsafe extern "C" fn(*mut *mut u128, u32, u32, u32) -> *const c_char;
            let run = library.get::<Run>(format!("run_{number}").as_bytes()).map_err(|e| e.to_string())?;
            let fault = run(args.as_mut_ptr(), x, y, source.size);
            (!fault.is_null()).then(|| CStr::from_ptr(fault).to_string_lossy().into_owned())
        };
        fault.map_or(Ok(()), Err)?;
    }
    for (w, operand) in kernel.writes.iter().enumerate() {
        let Some(b) = bindings.of[kernel.reads.len() + w] else { continue };
        let len = elements(&kernel.reach(kernel.reads.len() + w)) * operand.dtype.size();
        case.judge(kernel, w, bytemuck::cast_slice::<_, u8>(&buffers[b])[..len].to_vec())?;
    }
    Ok(())
}

#[test]
fn cuda_kernels_compute_what_the_interpreter_does() {
    let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".into());
    if Command::new(&compiler).arg("--version").output().is_err() {
        eprintln!("SKIPPED: no C++ compiler '{compiler}'");
        return;
    }
    let target = Target { libraries: Libraries::default(), ..Target::cuda() };
    // With one multiprocessor, even small cases fill it.
    let small_target = Target { multiprocessors: 1, ..target.clone() };
    let plain = variants::plain();
    let attends = |case: &Case| {
        let rows = case.kernel.shape.iter().rev().nth(1);
        matches!(case.kernel.template, Template::Attention { .. }) && rows > Some(&32) && case.kernel.shape[0] < 100
    };
    let convolved = |case: &Case| ["conv strips", "conv patches"].iter().any(|name| case.name.starts_with(name));
    let again = plain
        .iter()
        .flat_map(|case| [case.clone(), variants::halved(case, DType::F16)])
        .filter(|c| attends(c) || convolved(c));
    let all = variants::halves(&plain).into_iter().chain(plain.iter().cloned()).filter(|c| c.is_supported(&target));
    let all: Vec<Case> = all.collect();
    let mut jobs: Vec<Job> = all.iter().flat_map(|case| Job::each(case, &target)).collect();
    for width in [1, 2, 4, 8] {
        let (head, width) = ("// row_warp\n", format!("i32 WIDTH = {width};"));
        let is_read = |job: &Job| job.case.name.starts_with("stretches") && job.source.text.starts_with(head);
        assert!(
            jobs.iter().any(|job| is_read(job) && job.source.text.contains(&width)),
            "no stretch is read by {width}"
        );
    }
    jobs.extend(all.into_iter().chain(variants::folded()).map(|case| Job::new(case, &target)));
    jobs.extend(variants::folded().iter().flat_map(|case| Job::each(case, &target)));
    jobs.extend(variants::folded().into_iter().map(|case| Job::new(case, &small_target)));
    jobs.extend(again.map(|case| Job::new(case, &small_target)));
    // Every part gets equally many cases of a template.
    jobs.sort_by(|a, b| a.source.text.cmp(&b.source.text));
    // To look into some of them alone.
    let named = std::env::var("PLIMSOLL_CASES").ok();
    jobs.retain(|job| named.as_ref().is_none_or(|name| job.case.name.contains(name)));
    let jobs = common::part_of(jobs, "CUDA kernels run on the host", |job| &job.source.text);
    let folder = std::env::temp_dir().join(format!("plimsoll-emulate-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a temporary folder");
    let parts = std::thread::available_parallelism().map_or(1, usize::from);
    let wrong: Vec<String> = std::thread::scope(|scope| {
        let part = |p: usize| {
            let (compiler, folder) = (&compiler, &folder);
            let jobs: Vec<&Job> = jobs.iter().skip(p).step_by(parts).collect();
            let file = move |n: usize| folder.join(format!("kernels_{p}_{n}.cc"));
            let each = move |(n, jobs): (usize, &[&Job])| run_all(compiler, &file(n), jobs);
            scope.spawn(move || jobs.chunks(OF_A_FILE).enumerate().flat_map(each).collect::<Vec<_>>())
        };
        let parts: Vec<_> = (0..parts).map(part).collect();
        parts.into_iter().flat_map(|part| part.join().expect("it runs to the end")).collect()
    });
    let _ = std::fs::remove_dir_all(&folder);
    eprintln!("{} kernels", jobs.len());
    assert!(wrong.is_empty(), "{} cases differ:\n{}", wrong.len(), wrong.join("\n"));
    if named.is_some() {
        return;
    }
    for template in [
        "map_vec",
        "row_warp",
        "matmul_regs",
        "matmul_mma",
        "matmul_mma_async",
        "matmul_wgmma",
        "matmul_bytes",
        "matmul_bytes_mma",
        "matmul_bits",
        "matmul_bits_mma",
        "gemv",
        "gemv_vec16b",
        "attention_regs",
        "attention_decode_vec16b",
        "attention_mma",
        "conv_direct",
        "filters_direct",
        "gather",
        "scatter",
    ] {
        let head = format!("// {template}\n");
        assert!(jobs.iter().any(|job| job.source.text.starts_with(&head)), "no case reaches {template}");
    }
    assert!(jobs.iter().any(|job| job.source.text.contains("PHASES")), "no case is cut by phase");
}
