//! Targets describe devices that are not here, and plans keep to their limits.

use crate::common;
use plimsoll::internals::exec::Exec;
use plimsoll::internals::plan::{self, Class, Limits, Plan, compile};
use plimsoll::internals::target::{PRESETS, Target};
use plimsoll::internals::trace::Trace;
use plimsoll::internals::{onnx, reference};
use plimsoll::{DType, Error, Graph, Recipe, Tensor};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::Command;

/// splitmix64.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (x ^ (x >> 31)) % bound
    }
}

fn graph_file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("graphs").join(name)
}

/// The graphs that come with the project, and their open dims.
const GRAPHS: [(&str, &[&str]); 4] = [
    ("attention.onnxtxt", &["batch", "sequence"]),
    ("digits.onnx", &["batch"]),
    ("mlp.onnxtxt", &["batch"]),
    ("residual.onnxtxt", &["batch", "height", "width"]),
];

/// Extents that no device could hold are an error, without an overflow.
#[test]
fn giant_extents_are_refused() {
    let mut random = Random(1);
    let (mut planned, mut refused) = (0, 0);
    for (file, dims) in GRAPHS {
        let model = onnx::load(&graph_file(file)).expect("the graph is there");
        for _ in 0..150 {
            let extent = |dim: &&str| ((*dim).to_owned(), (1usize << random.below(63)) + random.below(3) as usize);
            let dims: Vec<_> = dims.iter().map(extent).collect();
            let unlimited = |mut target: Target| {
                (target.max_segment, target.max_binding) = (u64::MAX, u64::MAX);
                target
            };
            let target = [Target::cpu(2), Target::wgpu(), Target::cuda()][random.below(3) as usize].clone();
            let target = if random.below(2) == 0 { target } else { unlimited(target) };
            let made = catch_unwind(AssertUnwindSafe(|| {
                let graph = onnx::import(&model, &dims)?;
                let graph = Recipe::default().whole(graph, &target)?;
                plan::planned(&graph, &target, &Limits { memory: None })
            }));
            match made.unwrap_or_else(|_| panic!("{file} {dims:?} on {target:?}")) {
                Ok(_) => planned += 1,
                // No kernel can count that far.
                Err(Error::Plan { what, .. }) if what.contains("too large") || what.contains("too far") => refused += 1,
                Err(Error::Plan { what, .. }) => panic!("{file} {dims:?} on {}: {what}", target.name),
                Err(_) => refused += 1,
            }
        }
    }
    eprintln!("{planned} planned, {refused} refused");
    assert!(planned > 50 && refused > 50, "{planned} {refused}");
}

#[test]
fn presets_are_targets() {
    for preset in PRESETS {
        let target = Target::named(preset.name).expect("a preset");
        assert_eq!((target.name.as_str(), target.check()), (preset.name, Ok(())));
        let json = serde_json::to_string(&target).expect("a target is plain data");
        assert_eq!(Target::from_json(&json, Path::new("target.json")).expect("its own JSON"), target);
    }
    let error = Target::named("no/such").expect_err("there is none").to_string();
    assert!(error.contains("expected one of cpu, cuda, wgpu, wgpu-desktop or a file"), "{error}");
}

/// An unknown field is refused: it is probably a typo.
#[test]
fn unknown_fields_are_refused() {
    let mut json = serde_json::json!(Target::cuda());
    json["stagings"] = 0.into();
    let error = Target::from_json(&json.to_string(), Path::new("t.json")).expect_err("it is no field").to_string();
    assert!(error.contains("t.json:1:") && error.contains("unknown field `stagings`"), "{error}");
    let mut json = serde_json::json!(Target::cuda());
    json["libraries"]["cublas"] = true.into();
    let error = Target::from_json(&json.to_string(), Path::new("t.json")).expect_err("it is no field").to_string();
    assert!(error.contains("unknown field `cublas`"), "{error}");
}

/// A list of devices can be used as a target if it is clear which device is meant.
#[test]
fn a_list_of_devices_names_a_target() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("devices");
    std::fs::create_dir_all(&folder).expect("it can be made");
    let file = folder.join("devices.json");
    let device = |name: &str, status: &str, target: Target| serde_json::json!({"name": name, "status": status, "target": target, "device": "any"});
    let list = |devices: &[serde_json::Value]| {
        let text = serde_json::json!({"devices": devices, "libraries": []}).to_string();
        std::fs::write(&file, text).expect("it can be written");
    };
    let named = |suffix: &str| {
        let text = format!("{}{suffix}", file.display());
        Target::named(&text).map(|target| target.name).map_err(|e| e.to_string())
    };
    let cpu = device("cpu", "available", Target::cpu(8));
    let (gpu, soft) = (
        device("cuda:0", "available", Target::cuda()),
        device("wgpu:0", "software: used when asked for", Target::wgpu()),
    );
    list(&[cpu.clone(), gpu.clone(), soft.clone()]);
    assert_eq!(named(""), Ok("cuda".into()));
    assert_eq!(named("#wgpu:0"), Ok("wgpu".into()));
    assert_eq!(named("#cpu"), Ok("cpu".into()));
    let error = named("#cuda:7").expect_err("there is none");
    assert!(error.contains("devices.json: no device 'cuda:7' among: cpu, cuda:0, wgpu:0"), "{error}");
    list(&[cpu.clone(), soft]);
    assert_eq!(named(""), Ok("cpu".into()));
    list(&[cpu.clone(), gpu.clone(), device("cuda:1", "available", Target::cuda())]);
    let error = named("").expect_err("there are two");
    assert!(error.contains("several devices are available; name one of cuda:0, cuda:1: FILE#NAME"), "{error}");
    list(&[]);
    assert!(named("").expect_err("there is none").contains("no device in this list is available"));
    list(&[cpu, device("wgpu:0", "available", Target { alignment: 3, ..Target::wgpu() })]);
    assert!(named("").expect_err("it is no target").contains("alignment: expected a power of two"));
    std::fs::write(&file, "{\"devices\": 3}").expect("it can be written");
    assert!(named("").expect_err("it is no list").contains("expected a target, or a list of devices"));
    std::fs::write(&file, "{").expect("it can be written");
    assert!(named("").expect_err("it is not JSON").contains("devices.json:1:"));
}

fn graph(text: &str) -> Graph {
    let text = format!("<ir_version: 8, opset_import: [\"\" : 17]> g {text}");
    let model = onnx::Model::new(onnx::text::parse(&text, Path::new("text")).expect("it parses"));
    onnx::import(&model, &[]).expect("it is a graph")
}

fn planned(text: &str, target: &Target) -> Result<Plan, String> {
    let graph = graph(text);
    let graph = Recipe::default().whole(graph, target).expect("the passes run");
    plan::planned(&graph, target, &Limits { memory: None }).map_err(|e| e.to_string())
}

/// A tensor larger than a binding is cut. One that cannot be cut, or is larger than a segment, is refused by name.
#[test]
fn tensors_beyond_the_limits_are_cut_or_named() {
    let target = Target { max_binding: 4096, max_segment: 1 << 20, ..Target::wgpu() };
    let steps = |text: &str| {
        let plan = planned(text, &target).expect("it is cut");
        assert!(
            plan.programs[0].steps.iter().flat_map(|step| &step.bind_ranges).all(|w| w.bytes <= 4096),
            "{}",
            plan.to_json()
        );
        assert_eq!(Plan::from_json(&plan.to_json(), Path::new("plan.json")).expect("its own JSON"), plan);
        (
            plan.programs[0].steps.iter().filter(|step| !step.bind_ranges.is_empty()).count(),
            plan.programs[0].kernels.len(),
        )
    };
    // 64 rows of 64 bytes fit a binding, and all parts share one kernel.
    assert_eq!(steps("(float[256, 16] x) => (float[256, 16] y) { y = Relu (x) }"), (4, 1));
    assert_eq!(steps("(float[256, 16] x, float[16] b) => (float[256, 16] y) { y = Add (x, b) }"), (4, 1));
    // Rows of the left operand and of the result; all of the right one.
    assert_eq!(steps("(float[256, 16] x, float[16, 16] w) => (float[256, 16] y) { y = MatMul (x, w) }"), (4, 1));
    // Columns of a right operand that is stored column by column.
    let turned = "(float[4, 16] x, float[256, 16] w) => (float[4, 256] y) {
        t = Transpose <perm = [1, 0]> (w)
        y = MatMul (x, t)
    }";
    assert_eq!(steps(turned), (4, 4));
    assert_eq!(steps("(float[256, 16] x) => (float[256] y) { y = ReduceMax <axes = [1], keepdims = 0> (x) }"), (4, 4));
    // Rows of a right operand, whose products are summed up; rows of a table, of which one has what is looked for. Each part is a kernel.
    let inner =
        "(float[4, 256] x, float[256, 16] w) => (float[4, 16] y) { product = MatMul (x, w)  y = Relu (product) }";
    assert_eq!(steps(inner).0, 5);
    // The sum stays in its buffer.
    let two = "(float[4, 100] x, float[100, 16] w) => (float[4, 16] y) { y = MatMul (x, w) }";
    let plan = planned(two, &target).expect("it is cut in two");
    assert_eq!((plan.programs[0].steps.len(), plan.class_bytes(Class::Activation)), (2, 1792 + 6400 + 256));
    assert_eq!(steps("(float[1000, 16] table, int64[8] i) => (float[8, 16] y) { y = Gather (table, i) }").0, 17);
    // Cutting either axis alone is not enough.
    let (parts, _) = steps("(float[2, 4096] x, float[2, 4096] z) => (float[2, 4096] y) { y = Mul (x, z) }");
    assert_eq!(parts, 8);

    let refused = |text: &str, words: &[&str]| {
        let error = planned(text, &target).expect_err("it is too large");
        assert!(words.iter().all(|word| error.contains(word)), "{error}");
    };
    refused(
        "(float[4, 16] x, float[16, 2048] w) => (float[4, 2048] y) { y = MatMul (x, w) }",
        &[
            "'w' (f32[16,2048]) takes 131072 bytes",
            "target 'wgpu' binds at most 4096",
            "kernel 'matmul' cannot be split",
        ],
    );
    refused(
        "(float[1000, 16] table, int64[8, 16] i) => (float[8, 16] y) { y = GatherElements (table, i) }",
        &["'table' (f32[1000,16]) takes 64000 bytes", "kernel 'gather' cannot be split"],
    );
    refused(
        "(float[1024, 1024] huge) => (float[1024, 1024] y) { y = Relu (huge) }",
        &["'huge' (f32[1024,1024]) takes 4194304 bytes", "'wgpu' allocates at most 1048576 at once"],
    );
}

/// Tables and right operands larger than a binding: as inputs, as constants, and as one constant for both, which is stored once.
#[test]
fn parts_of_tables_and_products_mean_the_whole() {
    let numbers = |shape: &[usize], by: usize| {
        let values: Vec<f64> =
            (0..shape.iter().product()).map(|i: usize| ((i * by) % 61) as f64 / 61.0 - 0.5).collect();
        Tensor::from_f64(DType::F32, shape.to_vec(), &values)
    };
    let graph = || {
        let g = Trace::new("large");
        let table = g.constant("table", numbers(&[300, 16], 7));
        let at = g.input("at", DType::I64, [2, 5]);
        let x = table.gather(at, 0);
        let turned = g.input("turned", DType::F32, [1, 300, 2, 8]);
        g.output("rows", turned.gather(at, 1));
        let w = g.input("w", DType::F32, [256, 16]);
        g.output("product", g.input("v", DType::F32, [3, 256]).matmul(w).relu());
        g.output("own", x.matmul(g.constant("own", numbers(&[16, 200], 3)).slice(1, 0..50)));
        // The table of embeddings computes the logits, too.
        g.output("logits", x.matmul(table.transpose(&[1, 0])));
        g.finish().expect("the graph is sound")
    };
    let at: Vec<f64> = [0, 59, 60, 61, 299, -1, -300, 120, 180, 7].iter().map(|&i| f64::from(i)).collect();
    let given = [
        Tensor::from_f64(DType::I64, [2, 5], &at),
        numbers(&[1, 300, 2, 8], 5),
        numbers(&[256, 16], 11),
        numbers(&[3, 256], 13),
    ];
    let expected = reference::run(&graph(), &given).expect("it has a meaning");
    for (name, open) in common::backends() {
        let backend = open();
        let target = Target { max_binding: 4096, streams: 1, ..backend.target().clone() };
        let graph = graph();
        let graph = Recipe::default().whole(graph, &target).expect("the passes run");
        let (plan, constants) = compile(&graph, &target, &Limits { memory: None }).expect("it is cut");
        let held: u64 = plan.programs[0].buffers.iter().filter(|b| b.class == Class::Constant).map(|b| b.bytes).sum();
        if name != "cpu" {
            assert!(held < 2 * 300 * 16 * 4, "{name} holds {held} bytes of constants: the table twice");
        }
        let mut exec = Exec::load(backend, plan, &constants, &|_| {}).expect("it loads");
        for (found, expected) in exec.run(&given).expect("it runs").iter().zip(&expected) {
            common::agrees(found, expected, 1e-5).unwrap_or_else(|e| panic!("{name}: {e}"));
        }
    }
}

/// The real limits of WebGPU: a tensor of 160 MB on a device that binds 128 MiB.
#[test]
fn the_webgpu_baseline_holds_what_it_cannot_bind() {
    let wide = "(float[40, 1048576] x) => (float[40, 1048576] y) { y = Neg (x) }";
    let plan = planned(wide, &Target::wgpu()).expect("it is cut in two");
    assert_eq!(plan.programs[0].steps.len(), 2);
    assert!(plan.programs[0].steps.iter().flat_map(|s| &s.bind_ranges).all(|w| w.bytes <= 128 << 20));
    let whole = planned(wide, &Target::wgpu_desktop()).expect("it is bound at once");
    assert!(whole.programs[0].steps.len() == 1 && whole.programs[0].steps[0].bind_ranges.is_empty());
    let Some((_, open)) = common::backends().into_iter().find(|(name, _)| *name == "wgpu") else { return };
    let values: Vec<f32> = (0..40 << 20).map(|i| (i % 8191) as f32).collect();
    let input = Tensor::from_f32([40, 1 << 20], &values).expect("as many");
    let mut exec = Exec::load(open(), plan, &vec![Vec::new()], &|_| {}).expect("it loads");
    let found = exec.run(&[input]).expect("it runs");
    let found = found[0].bytes().chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().expect("four bytes")));
    assert!(found.zip(&values).all(|(y, x)| y == -x));
}

fn command(args: &[&str]) -> (Option<i32>, String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_plimsoll"));
    let output = command.args(args).current_dir(env!("CARGO_MANIFEST_DIR")).output().expect("the program starts");
    let text = |bytes| String::from_utf8(bytes).expect("it is text");
    (output.status.code(), text(output.stdout), text(output.stderr))
}

#[test]
fn commands_take_targets() {
    let (code, help, _) = command(&["plan", "--help"]);
    assert_eq!(code, Some(0));
    for words in ["wgpu-desktop", "128.00 MiB", "256.00 MiB", "FILE#cuda:0"] {
        assert!(help.contains(words), "{words} missing in {help}");
    }
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("targets");
    std::fs::create_dir_all(&folder).expect("it can be made");
    let list = folder.join("list.json");
    let (code, devices, err) = command(&["devices", "--json"]);
    assert_eq!(code, Some(0), "{err}");
    common::printed(&["devices"], &devices);
    std::fs::write(&list, devices).expect("it can be written");
    let cpu = format!("{}#cpu", list.display());
    let (code, plan, err) = command(&["plan", "graphs/mlp.onnxtxt", "--set", "batch=3", "--target", &cpu, "--json"]);
    assert!(code == Some(0) && plan.contains(r#""family":"cpu""#), "{err}");

    let wgsl = ["emit", "graphs/mlp.onnxtxt", "wgsl", "--set", "batch=3"];
    let emit = |target: &str| command(&[&wgsl[..], &["--target", target]].concat());
    assert_eq!(emit("wgpu").1, command(&wgsl).1);
    // Another workgroup size gives another text.
    assert_eq!(emit("wgpu-desktop").0, Some(0));
    let (code, _, err) = emit("cuda");
    assert!(code == Some(1) && err.contains("--target cuda: expected a target of family wgpu, found cuda"), "{err}");
    let (code, _, err) = command(&["plan", "graphs/mlp.onnxtxt", "--set", "batch=200000", "--target", "wgpu"]);
    assert!(code == Some(1) && err.contains("'x' (f32[200000,784]) takes 627200000 bytes"), "{err}");
}

/// Each tensor's size can be counted. With such an alignment, their sum cannot.
#[test]
fn sums_of_sizes_are_checked() {
    let g = Trace::new("giants");
    for i in 0..3 {
        g.output(&format!("y{i}"), g.input(&format!("x{i}"), DType::F32, [1 << 44]).slice(0, 0..4).relu());
    }
    let graph = g.finish().expect("each is sound");
    let target = Target { max_segment: u64::MAX, max_binding: u64::MAX, alignment: 1 << 62, ..Target::cpu(2) };
    let graph = Recipe::default().whole(graph, &target).expect("the passes run");
    let error = plan::planned(&graph, &target, &Limits { memory: None }).expect_err("there is no such memory");
    assert!(matches!(&error, Error::Usage { what, .. } if what.contains("beyond 63 bits")), "{error}");
}

/// A target file is refused with a message, or plans keep to its limits.
#[test]
fn edited_targets_never_panic() {
    const NUMBERS: [u64; 17] =
        [0, 1, 2, 3, 4, 8, 64, 255, 256, 512, 4096, 65536, 1 << 20, 1 << 31, u32::MAX as u64, 1 << 63, u64::MAX];
    let mut random = Random(2);
    let (mut planned, mut refused) = (0, 0);
    for (file, dims) in GRAPHS {
        let model = onnx::load(&graph_file(file)).expect("the graph is there");
        let dims: Vec<_> = dims.iter().map(|dim| ((*dim).to_owned(), 6)).collect();
        let graph = onnx::import(&model, &dims).expect("it is sound");
        for round in 0..300 {
            let preset = [Target::cpu(2), Target::wgpu(), Target::cuda()][round % 3].clone();
            let mut json = serde_json::to_value(&preset).expect("a target is plain data");
            for _ in 0..1 + random.below(3) {
                let fields = json.as_object_mut().expect("a target has fields");
                let field = random.below(fields.len() as u64) as usize;
                let value = fields.values_mut().nth(field).expect("it has that many");
                *value = match random.below(12) {
                    0 => serde_json::json!("cuda"),
                    1 => serde_json::json!(-1),
                    2 => serde_json::json!(null),
                    _ => serde_json::json!(NUMBERS[random.below(NUMBERS.len() as u64) as usize]),
                };
            }
            let text = json.to_string();
            let made = catch_unwind(AssertUnwindSafe(|| {
                let target = Target::from_json(&text, Path::new("target.json"))?;
                let graph = graph.clone();
                let graph = Recipe::default().whole(graph, &target)?;
                plan::planned(&graph, &target, &Limits { memory: None })
            }));
            match made.unwrap_or_else(|_| panic!("{file} on {text}")) {
                Ok(plan) => {
                    planned += 1;
                    let target = &plan.target;
                    let mut placed = plan.segments.iter().filter(|s| s.class != Class::Backend);
                    assert!(placed.all(|s| s.bytes <= target.max_segment), "{text}");
                    assert!(
                        plan.programs[0].buffers.iter().all(|b| b.offset.is_multiple_of(target.alignment)),
                        "{text}"
                    );
                }
                Err(Error::Plan { what, .. }) => panic!("{file} on {text}: {what}"),
                Err(_) => refused += 1,
            }
        }
    }
    eprintln!("{planned} planned, {refused} refused");
    assert!(planned > 200 && refused > 200, "{planned} {refused}");
}
