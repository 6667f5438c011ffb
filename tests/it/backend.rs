//! Each available backend runs the kernel cases, and is compared with the interpreter.

use crate::kernels::{Case, cases, encode, infinite, unordered, untouched, variants};
use plimsoll::internals::backend::cpu::Cpu;
use plimsoll::internals::backend::{Backend, Launch, SegmentId, Slice};
use plimsoll::internals::kernel::algorithm::Schedule;
use plimsoll::internals::kernel::meaning::evaluate;
use plimsoll::internals::kernel::{Kernel, Operand, schedule};
use plimsoll::internals::target::{Memory, Target};

/// The kernel with its operands in types that the target stores.
fn stored(kernel: &Kernel, target: &Target) -> Kernel {
    let mut kernel = kernel.clone();
    for operand in kernel.reads.iter_mut().chain(&mut kernel.writes) {
        operand.dtype = target.storage(operand.dtype).expect("cases use types that every target stores");
    }
    scheduled(&kernel, target)
}

/// The kernel as it is launched by itself.
fn scheduled(kernel: &Kernel, target: &Target) -> Kernel {
    schedule::scheduled(kernel, target).expect("the target has an algorithm for it")
}

/// Runs one case in an arena and a segment of constants. Returns its failure.
fn run(backend: &mut dyn Backend, case: &Case, arena: SegmentId, constants: SegmentId) -> Result<(), String> {
    let kernel = stored(&case.kernel, backend.target());
    run_by(backend, case, kernel, [arena, constants])
}

/// The same by the schedule that the kernel has.
fn run_by(
    backend: &mut dyn Backend,
    case: &Case,
    kernel: Kernel,
    [arena, constants]: [SegmentId; 2],
) -> Result<(), String> {
    let fail = |e: plimsoll::internals::error::Error| e.to_string();
    let mut free = [0u64; 2];
    let mut place = |constant: bool, bytes: u64| {
        let offset = free[usize::from(constant)];
        free[usize::from(constant)] = (offset + bytes).next_multiple_of(256);
        Slice { segment: if constant { constants } else { arena }, offset, bytes }
    };
    let reused = case.in_place.map(|(_, read)| read);
    let mut args = Vec::new();
    for (r, (operand, values)) in kernel.reads.iter().zip(&case.inputs).enumerate() {
        let bytes = encode(operand, values);
        // Every other operand is a constant.
        let at = place(r % 2 == 1 && reused != Some(r), bytes.len() as u64);
        backend.write(at, &bytes).map_err(fail)?;
        args.push(at);
    }
    for (w, operand) in kernel.writes.iter().enumerate() {
        let before = untouched(operand);
        let at = match case.in_place {
            Some((write, read)) if write == w => args[read],
            _ => {
                let at = place(false, before.len() as u64);
                backend.write(at, &before).map_err(fail)?;
                at
            }
        };
        args.push(at);
    }
    if kernel.workspace > 0 {
        args.push(place(false, kernel.workspace));
    }
    let id = backend.compile(&kernel).map_err(fail)?;
    let record = backend.record(&[Launch::new(id, args.clone())]).map_err(fail)?;
    backend.replay(record).map_err(fail)?;
    for w in 0..kernel.writes.len() {
        let at = args[kernel.reads.len() + w];
        let mut bytes = vec![0; at.bytes as usize];
        backend.read(at, &mut bytes).map_err(fail)?;
        case.judge(&kernel, w, bytes)?;
    }
    Ok(())
}

/// Allocates staging of at most `bytes` bytes each way, if the backend needs it. Returns the bytes and the number of segments.
fn stage(backend: &mut dyn Backend, bytes: u64) -> (u64, u64) {
    let each = backend.target().staged(bytes);
    if each == 0 {
        return (0, 0);
    }
    for memory in [Memory::Upload, Memory::Download] {
        backend.alloc(each, memory).expect("staging");
    }
    (2 * each, 2)
}

fn run_all(backend: &mut dyn Backend, cases: &[Case]) {
    let (staging, slots) = stage(backend, 64 << 10);
    let [arena, constants] = [(); 2].map(|()| backend.alloc(16 << 20, Memory::Device).expect("the device has 16 MiB"));
    let target = backend.target().clone();
    let wrong: Vec<String> = cases
        .iter()
        .filter(|case| case.is_supported(&target))
        .filter_map(|case| run(backend, case, arena, constants).err().map(|what| format!("{}: {what}", case.name)))
        .collect();
    assert!(wrong.is_empty(), "{} cases differ:\n{}", wrong.len(), wrong.join("\n"));
    assert_eq!(backend.usage().bytes, (32 << 20) + staging, "kernels allocate nothing");
    assert_eq!(backend.usage().allocations, 2 + slots, "kernels allocate nothing");
}

#[test]
fn every_case_has_a_meaning() {
    for case in cases() {
        let written = evaluate(&case.kernel, &case.inputs);
        for (values, write) in written.iter().zip(&case.kernel.writes) {
            let all = write.access.shape.numel();
            let right = if case.kernel.is_in_place() { values.len() <= all } else { values.len() == all };
            assert!(right, "{}: {} of {all}", case.name, values.len());
            assert!(values.iter().all(|v| v.is_finite()), "{}: {values:?}", case.name);
        }
    }
}

#[test]
fn every_case_runs_on_the_cpu() {
    for threads in [1, 2] {
        run_all(&mut Cpu::new(threads), &[cases(), unordered(), infinite()].concat());
    }
}

/// On the first CUDA device, rendered.
#[cfg(feature = "cuda")]
#[test]
fn every_case_agrees_on_cuda() {
    use plimsoll::internals::backend::cuda::{Settings, library::Search, open};
    match open(&Search::here(), &Settings::default()) {
        Ok((mut cuda, name)) => {
            eprintln!("on {name}");
            let plain = variants::plain();
            run_all(&mut *cuda, &[variants::halves(&plain), variants::folded(), plain].concat());
        }
        Err(error) if std::env::var_os("PLIMSOLL_REQUIRE_CUDA").is_some() => panic!("CUDA is required: {error}"),
        Err(error) => eprintln!("SKIPPED: {error}"),
    }
}

/// Attention that is long enough for cuDNN, on the first CUDA device: of all keys or causal, with more queries than keys or fewer, with heads that
/// share keys, of three to five axes.
#[cfg(feature = "cuda")]
#[test]
fn attention_of_the_library_agrees() {
    use crate::kernels::elements;
    use crate::library::attention_of;
    use plimsoll::internals::backend::cuda::{Settings, library::Search, open};
    use plimsoll::internals::dtype::DType;
    use plimsoll::internals::expr::Expr;
    use plimsoll::internals::kernel::call::Call;
    use plimsoll::internals::shape::Shape;
    let mut cuda = match open(&Search::here(), &Settings::default()) {
        Ok((cuda, _)) => cuda,
        Err(error) if std::env::var_os("PLIMSOLL_REQUIRE_CUDA").is_some() => panic!("CUDA is required: {error}"),
        Err(error) => return eprintln!("SKIPPED: {error}"),
    };
    let target = cuda.target().clone();
    if !target.libraries.attention || target.compute != 90 {
        return eprintln!("SKIPPED: there is no cuDNN for it, or another device");
    }
    stage(&mut *cuda, 64 << 10);
    let arena = [(); 2].map(|()| cuda.alloc(16 << 20, Memory::Device).expect("the device has 16 MiB"));
    let shapes = [
        ([3, 2, 200, 196], [16, 24], 5),
        ([2, 1, 333, 200], [64, 64], 5),
        ([1, 4, 200, 333], [128, 64], 5),
        ([1, 1, 256, 256], [128, 128], 4),
        ([1, 1, 192, 197], [40, 80], 3),
    ];
    for (dtype, (heads, columns, axes), causal, offset) in
        [DType::F16, DType::BF16].into_iter().flat_map(|dtype| shapes.map(|shape| (dtype, shape))).flat_map(
            |(dtype, shape)| [(false, 0), (true, 0), (true, 16)].map(|(causal, offset)| (dtype, shape, causal, offset)),
        )
    {
        let score = Expr::input(0, dtype) * 0.25;
        let sees = Expr::index(axes - 1).le(&Expr::index(axes - 2));
        let score = if causal { sees.select(&score, &Expr::lit(f64::NEG_INFINITY, dtype)) } else { score };
        let mut kernel = attention_of(heads, columns, score, dtype);
        for operand in kernel.reads.iter_mut().chain(&mut kernel.writes) {
            operand.access.shape = Shape::new(&operand.access.shape[5 - axes..]);
            operand.access.strides.drain(..5 - axes);
            operand.access.offset = offset;
        }
        kernel.shape = kernel.writes[0].access.shape.clone();
        let values = |seed: usize, operand: &Operand| -> Vec<f64> {
            (0..elements(&operand.access)).map(|i| ((i * 7 + seed * 3 + i / 13) % 17) as f64 * 0.125 - 1.0).collect()
        };
        let inputs = kernel.reads.iter().enumerate().map(|(seed, operand)| values(seed, operand)).collect();
        let name = format!("{heads:?}, {columns:?} of {dtype}, {axes} axes, causal {causal}, from element {offset}");
        let case = Case { name, kernel, inputs, in_place: None };
        let kernel = scheduled(&case.kernel, &target);
        assert!(matches!(kernel.schedule.call(), Some(Call::Attention(_))), "{}: {}", case.name, kernel.schedule);
        run_by(&mut *cuda, &case, kernel, arena).unwrap_or_else(|what| panic!("{}: {what}", case.name));
    }
}

#[cfg(feature = "wgpu")]
mod wgpu {
    use super::*;
    use crate::common::Folder;
    use crate::kernels::many_patches;
    use ::wgpu::naga;
    use plimsoll::internals::backend::RecordId;
    use plimsoll::internals::backend::wgpu::Wgpu;
    use plimsoll::internals::dtype::DType;
    use plimsoll::internals::expr::{Body, Expr};
    use plimsoll::internals::kernel::Template;
    use plimsoll::internals::kernel::algorithm::{Rows, Text, Tiling};
    use plimsoll::internals::kernel::render::{Bindings, Dialect, render};
    use plimsoll::internals::shape::{Access, Shape};
    use std::collections::BTreeSet;

    /// The best adapter, software ones included; without one the test is skipped, or fails where one is required.
    fn device() -> Option<Wgpu> {
        match Wgpu::new(None) {
            Ok(wgpu) => {
                eprintln!("on {}", wgpu.adapter());
                Some(wgpu)
            }
            Err(e) if std::env::var("PLIMSOLL_REQUIRE_WGPU").is_ok_and(|v| v == "1") => panic!("{e}"),
            Err(e) => {
                eprintln!("SKIPPED: {e}");
                None
            }
        }
    }

    #[test]
    fn every_case_is_valid_wgsl() {
        let mut small = Target::wgpu();
        (small.max_workgroup, small.max_groups) = (64, 40);
        let mut reached = BTreeSet::new();
        let with_subgroups = Target { subgroups: true, ..Target::wgpu() };
        for target in [Target::wgpu(), small, with_subgroups] {
            for case in cases() {
                let kernel = stored(&case.kernel, &target);
                let source = render(&kernel, &target, &Bindings::distinct(&kernel), Dialect::Wgsl);
                let source = source.unwrap_or_else(|e| panic!("{}: {e}", case.name));
                if source.groups == [0; 3] {
                    continue;
                }
                reached.extend(source.text.lines().next().map(str::to_owned));
                assert!(source.size <= target.max_workgroup && source.groups.iter().all(|g| *g <= target.max_groups));
                let module = naga::front::wgsl::parse_str(&source.text)
                    .unwrap_or_else(|e| panic!("{}: {}\n{}", case.name, e.emit_to_string(&source.text), source.text));
                let flags = naga::valid::ValidationFlags::all();
                naga::valid::Validator::new(flags, naga::valid::Capabilities::SUBGROUP)
                    .validate(&module)
                    .unwrap_or_else(|e| panic!("{}: {}", case.name, e.emit_to_string(&source.text)));
                let shared: u32 = module
                    .global_variables
                    .iter()
                    .filter(|(_, v)| v.space == naga::AddressSpace::WorkGroup)
                    .map(|(_, v)| module.types[v.ty].inner.size(module.to_ctx()))
                    .sum();
                assert!(shared <= target.max_shared, "{}: {shared} bytes of workgroup memory", case.name);
            }
        }
        let products = ["matmul", "matmul_large", "matmul_slice_k", "gemv", "gemv_vec4"];
        for template in products.into_iter().chain(["attention", "attention_decode", "attention_vec4"]) {
            assert!(reached.contains(&format!("// {template}")), "no case reaches {template}");
        }
    }

    #[test]
    fn every_case_agrees() {
        if let Some(mut wgpu) = device() {
            let attends = |case: &Case| matches!(case.kernel.template, Template::Attention { .. });
            let all: Vec<Case> = cases().into_iter().chain(infinite().into_iter().filter(attends)).collect();
            run_all(&mut wgpu, &all);
        }
    }

    /// Some schedules of each case. Returns the texts.
    fn all_agree(cases: Vec<Case>, tried: impl Fn(&Kernel, &Target) -> Vec<Schedule>) -> Vec<String> {
        let Some(mut wgpu) = device() else { return Vec::new() };
        let target = wgpu.target().clone();
        stage(&mut wgpu, 64 << 10);
        let segments = [(); 2].map(|()| wgpu.alloc(16 << 20, Memory::Device).expect("the device has 16 MiB"));
        let (mut texts, mut wrong) = (Vec::new(), Vec::new());
        for case in cases.iter().filter(|case| case.is_supported(&target)) {
            let kernel = stored(&case.kernel, &target);
            for schedule in tried(&kernel, &target) {
                let kernel = Kernel { schedule, ..kernel.clone() };
                let text =
                    render(&kernel, &target, &Bindings::distinct(&kernel), Dialect::Wgsl).expect("it is rendered");
                texts.push(text.text);
                let words = kernel.schedule.to_string();
                wrong.extend(
                    run_by(&mut wgpu, case, kernel, segments).err().map(|e| format!("{}, {words}: {e}", case.name)),
                );
            }
        }
        assert!(wrong.is_empty(), "{} differ:\n{}", wrong.len(), wrong.join("\n"));
        eprintln!("{} texts", texts.len());
        texts
    }

    /// Large tiles of products whose operands lie four at a time, along the inner axis and across it.
    #[test]
    fn large_tiles_of_vectors_agree() {
        let is_tried = |schedule: &Schedule| match schedule {
            Schedule::Text(Text::Matmul { tiling, .. } | Text::Conv { tiling, .. }) => {
                matches!(tiling, Tiling::LargeVec4 { .. })
            }
            _ => false,
        };
        let tried = |kernel: &Kernel, target: &Target| {
            schedule::candidates(kernel, target, &|_| true).into_iter().filter(is_tried).collect()
        };
        let mut cases = [variants::products(), many_patches()].concat();
        cases.retain(|case| case.kernel.shape.numel() < 100_000);
        let texts = all_agree(cases, tried);
        for form in ["a_fours(", "b_fours(", "a_block(", "b_block(", "STEP: i32 = 16", "STEP: i32 = 32"] {
            assert!(texts.is_empty() || texts.iter().any(|text| text.contains(form)), "no case reads {form}");
        }
    }

    /// Rows whose lanes meet within subgroups first, in every size. Those of two lanes are no whole subgroup, and meet as they would without.
    #[test]
    fn rows_in_subgroups_agree() {
        let Some(wgpu) = device() else { return };
        let mut cases = [cases(), unordered()].concat();
        cases.retain(|case| wgpu.target().subgroups && matches!(case.kernel.template, Template::Row { .. }));
        let of = |lanes| Rows::Lanes { lanes, rows: 1, along_row: true, subgroups: true };
        let tried =
            |_: &Kernel, _: &Target| [2, 32, 64, 128, 256].map(|lanes| Schedule::Text(Text::Rows(of(lanes)))).into();
        let texts = all_agree(cases, tried);
        assert_eq!(wgpu.target().subgroups, texts.len() > 100, "{} texts", texts.len());
        assert!(texts.iter().all(|text| text.is_empty() || text.contains("subgroupShuffleXor")));
    }

    /// Plans for devices with subgroups are refused on others.
    #[test]
    fn subgroups_are_the_targets() {
        let with = Target { subgroups: true, ..Target::wgpu() };
        let case = cases().into_iter().find(|case| case.name == "softmax 7x1000").expect("it is one of the cases");
        let kernel = scheduled(&case.kernel, &with);
        let Schedule::Text(Text::Rows(Rows::Lanes { rows: 1, lanes: 256, subgroups: true, .. })) = kernel.schedule
        else {
            panic!("{}", kernel.schedule)
        };
        assert!(schedule::check(&kernel, &with).is_ok());
        let refused = schedule::check(&kernel, &Target::wgpu()).expect_err("it has no subgroups");
        assert!(refused.contains("its device has no subgroups"), "{refused}");
        let two = Schedule::Text(Text::Rows(Rows::Lanes { lanes: 64, rows: 2, along_row: true, subgroups: true }));
        assert!(schedule::check(&Kernel { schedule: two, ..kernel }, &with).is_err());
        assert!(Target { subgroups: true, ..Target::cuda() }.check().is_err());
    }

    /// More workgroups than a dimension of a grid holds.
    #[test]
    fn large_grids_fold() {
        let Some(mut wgpu) = device() else { return };
        let n = 256 * 65_600 + 3;
        let kernel = Kernel {
            template: Template::Map,
            shape: Shape::new([n]),
            reads: vec![],
            writes: vec![Operand { dtype: DType::I32, access: Access::contiguous(Shape::new([n])), packed: false }],
            body: Body::new(&[Expr::index(0).cast(DType::I32) * 3.0]),
            prologues: Vec::new(),
            workspace: 0,
            schedule: Schedule::Open,
        };
        let bytes = 4 * n as u64;
        stage(&mut wgpu, 1 << 20);
        let segment = wgpu.alloc(bytes, Memory::Device).expect("64 MiB");
        let at = Slice { segment, offset: 0, bytes };
        let kernel = wgpu.compile(&scheduled(&kernel, wgpu.target())).expect("renders");
        let record = wgpu.record(&[Launch::new(kernel, vec![at])]).expect("records");
        wgpu.replay(record).expect("runs");
        let mut data = vec![0u8; bytes as usize];
        wgpu.read(at, &mut data).expect("reads");
        let wrong = data
            .chunks_exact(4)
            .enumerate()
            .find(|(i, c)| i32::from_le_bytes((*c).try_into().expect("four bytes")) != 3 * *i as i32);
        assert_eq!(wrong, None);
    }

    /// Where there is no session of a desktop, Mesa's helpers say so on stderr, in words that look like ours. A run that succeeds has none.
    #[test]
    fn other_libraries_do_not_speak_for_us() {
        if device().is_none() {
            return;
        }
        let run = ["run", "graphs/mlp.onnxtxt", "--set", "batch=2", "--backend", "wgpu", "-q"];
        for args in [&["devices"][..], &run] {
            let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_plimsoll"));
            command.args(args).env_remove("XDG_RUNTIME_DIR").current_dir(env!("CARGO_MANIFEST_DIR"));
            let output = command.output().expect("the program starts");
            let err = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success() && !err.contains("XDG_RUNTIME_DIR"), "{args:?}: {err}");
        }
    }

    /// The second process that opens a device has what the first one compiled. A file that was changed is left out, and written again.
    #[test]
    fn compiled_pipelines_are_kept() {
        let Some(wgpu) = device() else { return };
        let (folder, has) = (Folder::new("pipelines"), ::wgpu::Features::PIPELINE_CACHE);
        let run = || {
            let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_plimsoll"));
            command.args(["run", "graphs/mlp.onnxtxt", "--set", "batch=2", "--backend", "wgpu", "--json"]);
            command
                .env("PLIMSOLL_CACHE_DIR", folder.path("cache"))
                .env("RUST_LOG", "plimsoll_gpu=debug,plimsoll_core=warn");
            let output = command.current_dir(env!("CARGO_MANIFEST_DIR")).output().expect("the program starts");
            let log = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(output.status.success(), "{log}");
            let file = || Some(std::fs::read_dir(folder.path("cache/pipelines")).ok()?.next()?.ok()?.path());
            (log, file())
        };
        let (log, file) = run();
        assert_eq!(file.is_some(), wgpu.device().features().contains(has), "{log}");
        let Some(file) = file else { return };
        let kept = std::fs::read(&file).expect("it is there");
        assert!(log.contains("pipelines kept") && !log.contains("pipelines from the cache"), "{log}");
        let (log, _) = run();
        assert!(log.contains("pipelines from the cache") && !log.contains("pipelines kept"), "{log}");
        for spoilt in [kept[..kept.len() / 2].to_vec(), [&kept[..kept.len() - 1], &[!kept[kept.len() - 1]]].concat()] {
            std::fs::write(&file, spoilt).expect("it is ours");
            let (log, _) = run();
            assert!(log.contains("compiled pipelines are not used") && log.contains("pipelines kept"), "{log}");
            let (log, _) = run();
            assert!(log.contains("pipelines from the cache") && !log.contains("not used"), "{log}");
        }
    }

    /// A record is timed by the device's clock.
    #[test]
    fn times_are_the_devices() {
        let Some(mut wgpu) = device() else { return };
        use ::wgpu::Features as F;
        if !wgpu.device().features().contains(F::TIMESTAMP_QUERY | F::MAPPABLE_PRIMARY_BUFFERS) {
            return;
        }
        stage(&mut wgpu, 256);
        let n = 1 << 16;
        let operand = Operand { dtype: DType::F32, access: Access::contiguous(Shape::new([n])), packed: false };
        let kernel = Kernel {
            template: Template::Map,
            shape: Shape::new([n]),
            reads: vec![],
            writes: vec![operand],
            body: Body::new(&[(0..20).fold(Expr::index(0).cast(DType::F32), |x, _| x.sin())]),
            prologues: Vec::new(),
            workspace: 0,
            schedule: Schedule::Open,
        };
        let bytes = 4 * n as u64;
        let segment = wgpu.alloc(bytes, Memory::Device).expect("256 KiB");
        let kernel = wgpu.compile(&scheduled(&kernel, wgpu.target())).expect("renders");
        let at = Slice { segment, offset: 0, bytes };
        let records: Vec<RecordId> =
            (0..6).map(|runs| wgpu.record(&vec![Launch::new(kernel, vec![at]); runs]).expect("records")).collect();
        let usage = wgpu.usage();
        // The least of five, because the machine has other work, too.
        let mut least = |runs: usize| {
            let record = records[runs];
            (0..5).map(|_| wgpu.time(record).expect("runs")).min().expect("five")
        };
        let (none, one, five) = (least(0), least(1), least(5));
        assert!(none < one && five > 2 * one, "{none:?}, {one:?}, {five:?}");
        assert!(wgpu.time(RecordId(99)).is_err());
        // To the host, a record without steps is still a submission. With steps, it takes the device's time and the submission.
        let mut whole = |runs: usize| {
            let mut once = || {
                let start = wgpu.start().expect("starts");
                let device = wgpu.time(records[runs]).expect("runs");
                let host = wgpu.stop(start).expect("stops");
                assert!(device < host, "{device:?} of {host:?}");
                host
            };
            (0..5).map(|_| once()).min().expect("five")
        };
        let (without, with) = (whole(0), whole(5));
        assert!(4 * none < without, "{none:?} of {without:?}");
        assert!(1000 * five > with, "{five:?} of {with:?}");
        assert_eq!(wgpu.usage(), usage);
    }

    #[test]
    fn misuse_is_an_error() {
        let Some(mut wgpu) = device() else { return };
        let segment = wgpu.alloc(1024, Memory::Device).expect("1 KiB");
        assert!(wgpu.alloc(1023, Memory::Device).is_err(), "bytes that are no words");
        assert!(wgpu.alloc(u64::MAX - 3, Memory::Device).is_err(), "more than any device has");
        let beyond = Slice { segment, offset: 768, bytes: 512 };
        assert!(wgpu.write(beyond, &[0; 512]).is_err() && wgpu.read(beyond, &mut [0; 512]).is_err());
        let case = cases().into_iter().find(|c| c.name == "map large").expect("a case of 70001 elements");
        let kernel = wgpu.compile(&scheduled(&case.kernel, wgpu.target())).expect("renders");
        let args = vec![Slice { segment, offset: 0, bytes: 512 }, Slice { segment, offset: 512, bytes: 512 }];
        let error = wgpu.record(&[Launch::new(kernel, args)]).expect_err("operands reach beyond their slices");
        assert!(error.to_string().contains("operand 0"), "{error}");
        let whole = Slice { segment, offset: 0, bytes: 1024 };
        assert!(wgpu.write(whole, &[0; 1024]).is_err() && wgpu.read(whole, &mut [0; 1024]).is_err(), "no staging");
        let upload = wgpu.alloc(256, Memory::Upload).expect("a slot");
        assert!(wgpu.alloc(256, Memory::Upload).is_err(), "a second slot");
        assert!(wgpu.alloc(0, Memory::Download).is_err(), "a slot without room");
        let slot = Slice { segment: upload, offset: 0, bytes: 256 };
        assert!(wgpu.write(slot, &[0; 256]).is_err(), "slots are the backend's own");
        assert!(wgpu.record(&[Launch::new(kernel, vec![slot, slot])]).is_err(), "slots are not for kernels");
        wgpu.free(segment);
        assert_eq!((wgpu.usage().bytes, wgpu.usage().allocations), (256, 2));
        wgpu.free(upload);
        wgpu.free(upload);
        assert_eq!((wgpu.usage().bytes, wgpu.usage().allocations), (0, 2));
        assert!(wgpu.read(Slice { segment, offset: 0, bytes: 4 }, &mut [0; 4]).is_err(), "a segment given back");
        assert!(Wgpu::new(Some("no such adapter")).is_err());
    }

    /// Numbers of which no two words are equal.
    fn words(n: usize, seed: u32) -> Vec<u8> {
        (0..n as u32).flat_map(|i| (i.wrapping_mul(2_654_435_761) ^ seed).to_le_bytes()).collect()
    }

    /// Data that is larger than the slots moves in parts, and writes that share a slot do not mix.
    #[test]
    fn data_moves_through_small_slots() {
        let Some(mut wgpu) = device() else { return };
        let segment = wgpu.alloc(4096, Memory::Device).expect("memory");
        let at = |offset, bytes| Slice { segment, offset, bytes };
        wgpu.alloc(256, Memory::Upload).expect("a slot");
        wgpu.alloc(512, Memory::Download).expect("a slot");
        let mut mirror = vec![0u8; 4096];
        let slices = [(0, 4096), (256, 4), (512, 12), (768, 256), (1024, 252), (1280, 260), (2048, 0), (3840, 256)];
        for round in 0..3 {
            for (k, (offset, bytes)) in slices.into_iter().enumerate() {
                let data = words(bytes as usize / 4, 1000 * round + k as u32);
                wgpu.write(at(offset, bytes), &data).expect("it is written");
                mirror[offset as usize..][..data.len()].copy_from_slice(&data);
            }
            let mut found = vec![1; 4096];
            wgpu.read(at(0, 4096), &mut found).expect("it is read");
            assert!(found == mirror, "round {round}");
            let mut part = vec![1; 520];
            wgpu.read(at(1024, 520), &mut part).expect("it is read");
            assert!(part == mirror[1024..][..520], "round {round}");
            let (mut a, mut b, mut c) = ([1; 260], [1; 12], vec![1; 1024]);
            let mut pieces = [(at(1280, 260), &mut a[..]), (at(512, 12), &mut b[..]), (at(256, 1024), &mut c[..])];
            wgpu.read_all(&mut pieces).expect("they are read");
            assert!(a == mirror[1280..][..260] && b == mirror[512..][..12] && c == mirror[256..][..1024], "{round}");
        }
        assert_eq!((wgpu.usage().bytes, wgpu.usage().allocations), (4096 + 256 + 512, 3));
    }

    /// A record is dropped with any of its segments. So is data that waits to be written to the segment.
    #[test]
    fn what_uses_a_segment_goes_with_it() {
        let Some(mut wgpu) = device() else { return };
        stage(&mut wgpu, 256);
        let [a, b, c] = [0; 3].map(|_| wgpu.alloc(256, Memory::Device).expect("memory"));
        let at = |segment| Slice { segment, offset: 0, bytes: 256 };
        let operand = Operand { dtype: DType::I32, access: Access::contiguous(Shape::new([64])), packed: false };
        let kernel = Kernel {
            template: Template::Map,
            shape: Shape::new([64]),
            reads: vec![operand.clone()],
            writes: vec![operand],
            body: Body::new(&[Expr::input(0, DType::I32) + 1.0]),
            prologues: Vec::new(),
            workspace: 0,
            schedule: Schedule::Open,
        };
        let kernel = wgpu.compile(&scheduled(&kernel, wgpu.target())).expect("renders");
        let mut record =
            |from, to| wgpu.record(&[Launch::new(kernel, vec![at(from), at(to)])]).expect("it is recorded");
        let (ab, bc) = (record(a, b), record(b, c));
        wgpu.write(at(a), &words(64, 7)).expect("it waits in a slot that is full now");
        wgpu.free(a);
        assert!(wgpu.replay(ab).is_err(), "its memory is gone");
        wgpu.write(at(b), &[0; 256]).expect("there is room again");
        wgpu.replay(bc).expect("it uses other memory");
        let mut found = [9; 256];
        wgpu.read(at(c), &mut found).expect("it is read");
        assert!(found.chunks(4).all(|word| word == [1, 0, 0, 0]));
        let again = wgpu.alloc(256, Memory::Device).expect("memory");
        assert!(wgpu.replay(ab).is_err() && again != a, "ids are not given twice");
    }

    /// An error that no scope caught ends the device's use, not the process.
    #[test]
    fn an_uncaught_error_is_an_error() {
        let Some(mut wgpu) = device() else { return };
        stage(&mut wgpu, 256);
        let usage = ::wgpu::BufferUsages::empty();
        let wrong = ::wgpu::BufferDescriptor { label: None, size: 4, usage, mapped_at_creation: false };
        drop(wgpu.device().create_buffer(&wrong));
        let error = wgpu.alloc(256, Memory::Device).expect_err("something went wrong before").to_string();
        assert!(error.contains("usage"), "{error}");
    }

    /// A device that is gone returns errors, and nothing panics, even if the host program has set no handlers.
    #[test]
    fn a_lost_device_is_an_error() {
        let Some(own) = device() else { return };
        let instance = ::wgpu::Instance::new(::wgpu::InstanceDescriptor::new_without_display_handle());
        let adapter = pollster::block_on(instance.request_adapter(&Default::default())).expect("an adapter");
        let descriptor = ::wgpu::DeviceDescriptor { required_limits: adapter.limits(), ..Default::default() };
        let (lent, queue) = pollster::block_on(adapter.request_device(&descriptor)).expect("a device");
        for (mut wgpu, is_own) in [(own, true), (Wgpu::from_device(lent, queue), false)] {
            stage(&mut wgpu, 256);
            let segment = wgpu.alloc(256, Memory::Device).expect("memory");
            let at = Slice { segment, offset: 0, bytes: 256 };
            let kernel = Kernel {
                template: Template::Map,
                shape: Shape::new([64]),
                reads: vec![],
                writes: vec![Operand {
                    dtype: DType::I32,
                    access: Access::contiguous(Shape::new([64])),
                    packed: false,
                }],
                body: Body::new(&[Expr::index(0).cast(DType::I32)]),
                prologues: Vec::new(),
                workspace: 0,
                schedule: Schedule::Open,
            };
            let kernel = wgpu.compile(&scheduled(&kernel, wgpu.target())).expect("renders");
            let launch = [Launch::new(kernel, vec![at])];
            let record = wgpu.record(&launch).expect("it is recorded");
            wgpu.write(at, &[0; 256]).expect("it is written");
            wgpu.replay(record).expect("it runs");
            wgpu.read(at, &mut [0; 256]).expect("it is read");

            wgpu.device().destroy();
            let calls = [
                ("read", wgpu.read(at, &mut [0; 256]).err()),
                ("write", wgpu.write(at, &[0; 256]).and_then(|()| wgpu.read(at, &mut [0; 256])).err()),
                ("alloc", wgpu.alloc(256, Memory::Device).err()),
                ("record", wgpu.record(&launch).err()),
                ("replay", wgpu.replay(record).err()),
            ];
            for (k, (call, error)) in calls.iter().enumerate() {
                let failed = matches!(error, Some(plimsoll::Error::Backend { backend: "wgpu", .. }));
                assert!(failed || !is_own && k >= 2, "{call}, own device {is_own}: {error:?}");
            }
            wgpu.free(segment);
        }
    }
}
