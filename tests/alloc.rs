//! A run allocates nothing. On the CPU the tests count calls of the allocator, over every kernel case at once, with one thread and with
//! two. On wgpu they read its own allocator's report after each of a thousand runs, and hold the host's heap to its size. On GPUs constants
//! are loaded through the staging slots of the plan, and the host's heap holds no copy of one.

#[path = "it/kernels/mod.rs"]
#[allow(dead_code, reason = "the cases serve other tests as well")]
mod kernels;

use plimsoll::internals::backend::cpu::Cpu;
use plimsoll::internals::backend::{Backend, KernelId, Launch, RecordId, SegmentId, Slice};
use plimsoll::internals::dtype::DType;
use plimsoll::internals::expr::{Body, Expr};
use plimsoll::internals::kernel::algorithm::Schedule;
use plimsoll::internals::kernel::{Kernel, Operand, Template, schedule};
use plimsoll::internals::shape::{Access, Shape};
use plimsoll::internals::target::{Memory, Target};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Mutex;
use std::sync::atomic::{AtomicIsize, AtomicUsize, Ordering};

struct Counting;

static CALLS: AtomicUsize = AtomicUsize::new(0);

/// Bytes allocated and not given back.
static LIVE: AtomicIsize = AtomicIsize::new(0);

/// The most that these were.
static PEAK: AtomicIsize = AtomicIsize::new(0);

/// The counts are of the whole process, so one test runs at a time.
static ALONE: Mutex<()> = Mutex::new(());

// SAFETY: the system's allocator, counted.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        CALLS.fetch_add(1, Ordering::Relaxed);
        let size = layout.size() as isize;
        PEAK.fetch_max(LIVE.fetch_add(size, Ordering::Relaxed) + size, Ordering::Relaxed);
        // SAFETY: the caller's word.
        unsafe { System.alloc(layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        CALLS.fetch_add(1, Ordering::Relaxed);
        let grown = size as isize - layout.size() as isize;
        PEAK.fetch_max(LIVE.fetch_add(grown, Ordering::Relaxed) + grown, Ordering::Relaxed);
        // SAFETY: the caller's word.
        unsafe { System.realloc(ptr, layout, size) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        CALLS.fetch_add(1, Ordering::Relaxed);
        LIVE.fetch_sub(layout.size() as isize, Ordering::Relaxed);
        // SAFETY: the caller's word.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// Calls of the allocator while `work` runs. The harness calls it, too, once, to say of a test that it takes more than a minute: `work` is
/// done again where there were calls, three times in all.
fn calls(mut work: impl FnMut()) -> usize {
    let mut once = || {
        let before = CALLS.load(Ordering::Relaxed);
        work();
        CALLS.load(Ordering::Relaxed) - before
    };
    let mut count = once();
    for _ in 0..2 {
        count = if count == 0 { 0 } else { once() };
    }
    count
}

/// Kernels that are large enough to be shared among threads.
fn large() -> Vec<Kernel> {
    let operand =
        |shape: &[usize]| Operand { dtype: DType::F32, access: Access::contiguous(Shape::new(shape)), packed: false };
    let x = Expr::input(0, DType::F32);
    let kernel = |template, shape: &[usize], reads: &[&[usize]], body: &Expr| Kernel {
        template,
        shape: Shape::new(shape),
        reads: reads.iter().map(|s| operand(s)).collect(),
        writes: vec![operand(shape)],
        body: Body::new(std::slice::from_ref(body)),
        prologues: Vec::new(),
        workspace: 0,
        schedule: Schedule::Open,
    };
    vec![
        kernel(Template::Map, &[200_000], &[&[200_000]], &x.exp()),
        kernel(Template::MatMul, &[160, 200], &[&[160, 100], &[100, 200]], &x.max(&x.like(0.0))),
    ]
}

#[test]
fn replay_allocates_nothing() {
    let _alone = ALONE.lock();
    for threads in [1, 2] {
        let mut cpu = Cpu::new(threads);
        let mut launches = Vec::new();
        let mut bytes = 0u64;
        let mut kernels: Vec<Kernel> =
            kernels::cases().into_iter().filter(|c| c.is_supported(&Target::cpu(2))).map(|case| case.kernel).collect();
        kernels.retain(|k| k.shape.numel() < 3000 && k.body.code.len() < 100);
        kernels.extend(large());
        for kernel in kernels {
            let kernel = schedule::scheduled(&kernel, &Target::cpu(threads as u32)).expect("it has a schedule");
            let mut sizes: Vec<u64> = Vec::new();
            for (slot, operand) in kernel.reads.iter().chain(&kernel.writes).enumerate() {
                sizes.push((kernels::elements(&kernel.reach(slot)) * operand.dtype.size()) as u64);
            }
            sizes.extend((kernel.workspace > 0).then_some(kernel.workspace));
            let mut args = Vec::new();
            for size in sizes {
                args.push(Slice { segment: SegmentId(0), offset: bytes, bytes: size });
                bytes = (bytes + size).next_multiple_of(256);
            }
            launches.push(Launch::new(cpu.compile(&kernel).expect("compiles"), args));
        }
        let segment = cpu.alloc(bytes, Memory::Device).expect("memory");
        launches.iter_mut().flat_map(|l| &mut l.args).for_each(|a| a.segment = segment);
        let record = cpu.record(&launches).expect("is recorded");
        cpu.replay(record).expect("runs");
        let usage = cpu.usage();
        let calls = calls(|| (0..1000).for_each(|_| cpu.replay(record).expect("runs")));
        assert_eq!(calls, 0, "calls of the allocator, {threads} threads");
        assert_eq!((cpu.usage(), usage.bytes), (usage, bytes));
    }
}

/// Bindings of a range that run in turn, a thousand runs: in the bytes of one plan, with nothing allocated on the way.
#[test]
fn a_range_of_bindings_allocates_nothing() {
    use plimsoll::internals::exec::Exec;
    use plimsoll::internals::plan::{Graphs, Job};
    use plimsoll::internals::{onnx, plan, session};
    use plimsoll::{DType, Tensor};
    let _alone = ALONE.lock();
    let model = onnx::load(std::path::Path::new("graphs/digits.onnx")).expect("it is a graph");
    let graphs = Graphs::Range(session::source(model), vec![("batch".to_owned(), (1..=64).into())]);
    let planned = plan::plan(&Job::of(graphs, &Target::cpu(2))).expect("it is planned");
    let [Some(range)] = &planned.ranges[..] else { panic!("a dim has a range") };
    let (plan, constants) = range.largest();
    let mut exec = Exec::load(Box::new(Cpu::new(2)), plan.clone(), constants, &|_| {}).expect("it loads");
    let turns = [32, 16, 64, 1, 32].map(|batch| {
        let (plan, own) = range.at(&[batch]).expect("a plan");
        let number = exec.add(plan, &own, constants).expect("it runs in the same bytes");
        (number, [Tensor::from_f64(DType::F32, [batch, 1, 8, 8], &vec![0.25; batch * 64])])
    });
    let round = |exec: &mut Exec| {
        for (number, inputs) in &turns {
            exec.select(*number).expect("it is there");
            exec.write(inputs).expect("they fit");
            exec.replay().expect("it runs");
        }
    };
    round(&mut exec);
    let usage = exec.backend().usage();
    // Five runs each.
    let calls = calls(|| (0..200).for_each(|_| round(&mut exec)));
    assert_eq!(calls, 0, "calls of the allocator");
    assert_eq!((exec.backend().usage(), usage.bytes), (usage, plan.bytes()));
}

/// Inputs and outputs move in every run.
#[cfg(feature = "wgpu")]
#[test]
fn a_thousand_runs_on_wgpu_allocate_nothing() {
    use plimsoll::internals::exec::Exec;
    use plimsoll::internals::plan;
    use plimsoll::{Limits, Recipe, Tensor, Trace};
    let _alone = ALONE.lock();
    let backend = match plimsoll::internals::backend::wgpu::Wgpu::new(None) {
        Ok(backend) => backend,
        Err(e) if std::env::var_os("PLIMSOLL_REQUIRE_WGPU").is_some() => panic!("wgpu is required: {e}"),
        Err(e) => return eprintln!("SKIPPED: {e}"),
    };
    let device = backend.device().clone();
    // The report of wgpu's allocator: names and sizes of allocations, sizes of blocks.
    let report = || {
        let report = device.generate_allocator_report()?;
        let mut allocations: Vec<_> = report.allocations.iter().map(|a| (a.name.clone(), a.size)).collect();
        allocations.sort();
        let blocks: Vec<_> = report.blocks.iter().map(|b| b.size).collect();
        Some((allocations, blocks, report.total_allocated_bytes, report.total_reserved_bytes))
    };
    let g = Trace::new("small");
    let x = g.input("x", DType::F32, [60, 400]);
    let w = g.input("w", DType::F32, [400, 24]);
    let bias = g.constant("bias", Tensor::from_f64(DType::F32, [24], &[0.5; 24]));
    g.output("y", (x.matmul(w) + bias).relu().softmax(-1));
    g.output("z", x.tanh());
    let graph = g.finish().expect("the graph is sound");
    let graph = Recipe::default().whole(graph, backend.target()).expect("the passes run");
    let limits = Limits { memory: None };
    let (plan, constants) = plan::compile(&graph, backend.target(), &limits).expect("it is planned");
    let mut exec = Exec::load(Box::new(backend), plan.clone(), &constants, &|_| {}).expect("it loads");
    let inputs = |run: usize| {
        let value = |i: usize| ((i * 7 + run) % 11) as f32 - 5.0;
        let tensor = |shape: [usize; 2]| {
            let values: Vec<f32> = (0..shape[0] * shape[1]).map(value).collect();
            Tensor::from_f32(shape, &values).expect("as many values")
        };
        [tensor([60, 400]), tensor([400, 24])]
    };

    let first = exec.run(&inputs(0)).expect("it runs");
    let (usage, held) = (exec.backend().usage(), report());
    assert_eq!((usage.bytes, usage.allocations), (plan.bytes(), plan.segments.len() as u64));
    if let Some((allocations, _, allocated, reserved)) = &held {
        // Every segment is there, rounded up by some words, and beside them what wgpu keeps for itself.
        let is_segment = |(name, size): &(String, u64)| (name == "segment").then_some(*size);
        let found: Vec<u64> = allocations.iter().filter_map(is_segment).collect();
        let mut sizes: Vec<u64> = plan.segments.iter().map(|s| s.bytes).collect();
        sizes.sort();
        let fits = sizes.len() == found.len() && sizes.iter().zip(&found).all(|(s, f)| s <= f && *f < s + 256);
        assert!(fits, "planned {sizes:?}, found {allocations:?}");
        assert!(allocated - plan.bytes() < 1 << 20, "{allocations:?}");
        assert_eq!(usage.overhead, Some(reserved - plan.bytes()));
    }
    let mut settled = 0;
    for run in 1..1000 {
        if run == 100 {
            settled = LIVE.load(Ordering::Relaxed);
        }
        let found = exec.run(&inputs(run)).expect("it runs");
        assert!(found[1] != first[1] || run % 11 == 0, "inputs move");
        assert_eq!(report(), held, "run {run}");
    }
    assert_eq!(exec.backend().usage(), usage);
    assert!(exec.run(&inputs(0)).expect("it runs") == first);
    let grown = LIVE.load(Ordering::Relaxed) - settled;
    eprintln!("{usage:?}; the host's heap grew by {grown} bytes in 900 runs");
    assert!(grown < 900, "the host's heap grew by {grown} bytes in 900 runs");
}

/// A trainer's rows move into the same slot, converted, in this thread and in its own.
#[test]
fn rows_made_ready_ahead_allocate_nothing() {
    use plimsoll::internals::npy;
    use plimsoll::internals::train::data::{Order, Rows};
    use plimsoll::internals::train::prefetch::{Batch, Prefetch};
    use plimsoll::{Fact, Tensor};
    let _alone = ALONE.lock();
    let path = std::env::temp_dir().join(format!("plimsoll-rows-{}.npy", std::process::id()));
    let values: Vec<f64> = (0..64 * 300).map(|at| f64::from(at % 251)).collect();
    npy::write(&path, &Tensor::from_f64(DType::U8, [64, 300], &values)).expect("it is written");
    let rows = Rows::open(&path).expect("it is an array of rows");
    let facts = [DType::F32, DType::U8].map(|dtype| Fact::new(dtype, [8, 300]));
    let mut ahead = Prefetch::new(&facts, Box::new(vec![0; 8 * 300 * 5]));
    let columns = || [&rows, &rows].into_iter();
    let batch = |at: usize| Batch { order: Order::new(64, Some(1), 0), first: at % 8 * 8, count: 8 };
    let mut turns = |turns: usize| {
        for at in 0..turns {
            ahead.wait(columns(), batch(at)).expect("they are finite");
            ahead.ask(columns(), batch(at + 1 + usize::from(at % 5 == 0)));
        }
    };
    turns(100);
    assert_eq!(calls(|| turns(1000)), 0, "calls of the allocator");
    std::fs::remove_file(path).expect("it was written");
}

/// A card that keeps nothing, to count what the host does.
struct Paper(Target);

impl Backend for Paper {
    fn target(&self) -> &Target {
        &self.0
    }
    fn identity(&self) -> String {
        "paper".into()
    }
    fn usage(&self) -> plimsoll::Usage {
        plimsoll::Usage::default()
    }
    fn alloc(&mut self, _: u64, _: Memory) -> plimsoll::Result<SegmentId> {
        Ok(SegmentId(0))
    }
    fn free(&mut self, _: SegmentId) {}
    fn write(&mut self, _: Slice, _: &[u8]) -> plimsoll::Result<()> {
        Ok(())
    }
    fn read(&mut self, _: Slice, _: &mut [u8]) -> plimsoll::Result<()> {
        Ok(())
    }
    fn compile(&mut self, _: &Kernel) -> plimsoll::Result<KernelId> {
        Ok(KernelId(0))
    }
    fn record(&mut self, _: &[Launch]) -> plimsoll::Result<RecordId> {
        Ok(RecordId(0))
    }
    fn replay(&mut self, _: RecordId) -> plimsoll::Result<()> {
        Ok(())
    }
}

/// While a graph is planned and loaded on a device with memory of its own, the host holds the two staging slots and pieces of a constant,
/// whatever is computed of it on the way: together no more than two slots of full size.
#[test]
fn loading_holds_two_staging_slots() {
    use plimsoll::internals::exec::Exec;
    use plimsoll::internals::plan;
    use plimsoll::internals::target::STAGING;
    use plimsoll::internals::trace::Var;
    use plimsoll::{Class, Limits, Recipe, Tensor, Trace};
    const SIDE: usize = 2048;
    type Make = for<'g> fn(&'g Trace, Var<'g>, Var<'g>) -> Var<'g>;
    type Open = fn() -> Option<Box<dyn Backend>>;
    fn paper() -> Option<Box<dyn Backend>> {
        Some(Box::new(Paper(Target::cuda())))
    }
    #[cfg(feature = "wgpu")]
    fn wgpu() -> Option<Box<dyn Backend>> {
        match plimsoll::internals::backend::wgpu::Wgpu::new(None) {
            Ok(backend) => Some(Box::new(backend)),
            Err(e) if std::env::var_os("PLIMSOLL_REQUIRE_WGPU").is_some() => panic!("wgpu is required: {e}"),
            Err(e) => {
                eprintln!("SKIPPED: {e}");
                None
            }
        }
    }
    let cases: [(&str, Make); 7] = [
        ("plain", |_, w, x| x.matmul(w)),
        ("transposed", |_, w, x| x.matmul(w.transpose(&[1, 0]))),
        ("gathered", |g, w, _| w.transpose(&[1, 0]).gather(g.input("rows", DType::I64, [4]), 0)),
        ("scaled", |_, w, x| x.matmul(w * 0.5f32)),
        ("scaled and transposed", |_, w, x| x.matmul((w * 0.5f32).transpose(&[1, 0]))),
        ("cast", |_, w, x| x.matmul(w.cast(DType::F16).cast(DType::F32))),
        ("reduced", |_, w, x| x + w.reduce_max(&[0], false)),
    ];
    let _alone = ALONE.lock();
    let devices: &[(&str, Open)] = &[
        ("cuda", paper),
        #[cfg(feature = "wgpu")]
        ("wgpu", wgpu),
    ];
    for (device, open) in devices {
        for (name, make) in &cases {
            let Some(backend) = open() else { continue };
            let g = Trace::new(name);
            let w = Tensor::new(DType::F32, [SIDE, SIDE], vec![0; SIDE * SIDE * 4]).expect("a byte for each");
            let (w, x) = (g.constant("w", w), g.input("x", DType::F32, [8, SIDE]));
            g.output("y", make(&g, w, x));
            let graph = g.finish().expect("the graph is sound");
            let before = LIVE.load(Ordering::Relaxed);
            PEAK.store(before, Ordering::Relaxed);
            let graph = Recipe::default().whole(graph, backend.target()).expect("the passes run");
            let limits = Limits { memory: None };
            let (plan, constants) = plan::compile(&graph, backend.target(), &limits).expect("it is planned");
            let slots = plan.class_bytes(Class::Staging);
            let exec = Exec::load(backend, plan, &constants, &|_| {}).expect("it loads");
            let heap = (PEAK.load(Ordering::Relaxed) - before) as u64;
            eprintln!("{device}, {name}: {heap} bytes of the heap, {slots} of staging slots");
            assert!(heap + slots <= 2 * STAGING, "{device}, {name}: {heap} bytes beside {slots} of staging slots");
            drop(exec);
        }
    }
}

/// A field of a message that holds bytes, as protobuf writes it.
fn field(number: u8, body: &[u8]) -> Vec<u8> {
    let mut wire = vec![number << 3 | 2];
    if number > 15 {
        wire = vec![number << 3 & 0x7f | 0x82, number >> 4];
    }
    let mut length = body.len();
    while length > 0x7f {
        wire.push(length as u8 & 0x7f | 0x80);
        length >>= 7;
    }
    wire.push(length as u8);
    [&wire, body].concat()
}

/// Files of very many parts, each as short as it can be. `number` is how many.
fn crowded(number: usize) -> Vec<(&'static str, Vec<u8>)> {
    // A model has its graph in field 7, its functions in 25 and its training steps in 20; the others are fields of the graph.
    let graph = |number: u8, body: &[u8]| field(7, &field(number, body));
    let many = |of: u8, body: &[u8]| field(of, body).repeat(number);
    let text = |before: &str, each: &str, after: &str| {
        format!("<ir_version: 10, opset_import: [\"\" : 17]>\ng {before}{}{after}", each.repeat(number)).into_bytes()
    };
    let type_of = |body: &[u8]| field(2, &field(1, &field(2, body)));
    vec![
        ("nodes.onnx", field(7, &many(1, &[]))),
        ("initializers.onnx", field(7, &many(5, &[]))),
        ("inputs.onnx", field(7, &many(11, &[]))),
        ("annotations.onnx", field(7, &many(14, &[]))),
        ("sparse.onnx", field(7, &many(15, &[]))),
        ("entries.onnx", field(7, &many(16, &[]))),
        ("names.onnx", graph(1, &many(1, &[]))),
        ("texts.onnx", graph(1, &many(1, b"x"))),
        ("attributes.onnx", graph(1, &many(5, &[]))),
        ("nodes-with-one.onnx", field(7, &field(1, &field(5, &[])).repeat(number))),
        ("strings.onnx", graph(1, &field(5, &many(9, &[])))),
        ("tensors.onnx", graph(1, &field(5, &many(10, &[])))),
        ("graphs.onnx", graph(1, &field(5, &many(11, &[])))),
        ("types.onnx", graph(1, &field(5, &many(15, &[])))),
        ("dims.onnx", graph(5, &field(1, &vec![1; number]))),
        ("numbers.onnx", graph(5, &field(7, &vec![1; number]))),
        ("shapes.onnx", graph(11, &type_of(&many(1, &[])))),
        ("functions.onnx", many(25, &[])),
        ("steps.onnx", many(20, &[])),
        ("nodes.onnxtxt", text("() => () {", "y=R(x)", "}")),
        ("names.onnxtxt", text("() => () {y=R(", "x,", ")}")),
        ("empty-names.onnxtxt", text("() => () {y=R(", ",", ")}")),
        ("inputs.onnxtxt", text("(", "x,", "y) => () {}")),
        ("types.onnxtxt", text("(", "float x,", "y) => () {}")),
        ("shapes.onnxtxt", text("(float[", "1,", "1] x) => () {}")),
        ("ints.onnxtxt", text("() => () {y=R<a=[", "1,", "1]>()}")),
        ("strings.onnxtxt", text("() => () {y=R<a=[", "\"\",", "\"\"]>()}")),
        ("graphs.onnxtxt", text("() => () {y=R<a=[", "g()=>(){},", "g()=>(){}]>()}")),
        ("tensors.onnxtxt", text("() => () {y=R<a=[", "int8{1},", "int8{1}]>()}")),
        ("attributes.onnxtxt", text("() => () {y=R<", "a=1,", "a=1>()}")),
        ("sparse.onnxtxt", text("() => () <", "sparse_tensor(int8[0]) x={},", "int8 y>{}")),
        ("initializers.onnxtxt", text("() => () <", "int8[0] x={},", "int8 y>{}")),
        ("floats.onnxtxt", text("() => () <float[9] x={", "1,", "1}>{}")),
        ("functions.onnxtxt", text("() => () {}", "f () => () {}", "")),
        ("parameters.onnxtxt", text("() => () {} f (", "x,", "x) => () {}")),
        ("opsets.onnxtxt", [&b"<opset_import: ["[..], &b"\"\":1,".repeat(number), b"\"\":1]> g () => () {}"].concat()),
    ]
}

/// No file takes more than 64 MiB and four times its size while it is read, whatever its parts are; packed numbers may take 16 times their
/// bytes beside that, which takes larger files to see. Each kind of part is doubled until a file
/// is refused for it, and the last file before that one is near the bound.
#[test]
fn a_model_is_read_in_memory_in_proportion_to_its_file() {
    use plimsoll::internals::onnx;

    let _alone = ALONE.lock();
    let folder = std::env::temp_dir().join(format!("plimsoll-crowded-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder for the files");
    let mut refused = vec![false; crowded(1).len()];
    for power in [12, 14, 16, 17, 18, 19, 20, 21, 22] {
        for (refused, (name, bytes)) in refused.iter_mut().zip(crowded(1 << power)).filter(|(refused, _)| !**refused) {
            let path = folder.join(name);
            std::fs::write(&path, &bytes).expect("a file");
            let most = (64 << 20) + 4 * bytes.len() as isize;
            drop(bytes);
            let before = LIVE.load(Ordering::Relaxed);
            PEAK.store(before, Ordering::Relaxed);
            let read = onnx::load(&path);
            let peak = PEAK.load(Ordering::Relaxed) - before;
            assert!(peak <= most, "{name} of 2^{power} parts: {peak} bytes of at most {most}");
            let why = read.err().map_or(String::new(), |e| e.to_string());
            *refused = why.contains("very many, very small parts");
        }
    }
    std::fs::remove_dir_all(&folder).expect("it is there");
    // Numbers take as much as the bound gives, and no more.
    let slight = ["names.onnx", "dims.onnx", "numbers.onnx", "floats.onnxtxt"];
    for ((name, _), refused) in crowded(1).iter().zip(refused) {
        assert!(refused || slight.contains(name), "{name}: not refused at 2^22 parts");
    }
}
