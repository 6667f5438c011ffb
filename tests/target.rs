//! Targets: what is said of devices that are not here, and limits that plans keep to.

use plimsoll::plan::{Limits, plan};
use plimsoll::target::Target;
use plimsoll::trace::Trace;
use plimsoll::{DType, Error, onnx, pass};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

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

/// Extents that no device could hold are an error, and no overflow on the way to it.
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
                let mut graph = onnx::import(&model, &dims)?;
                pass::run(&mut graph, &target, true)?;
                plan(&graph, &target, &Limits { memory: None })
            }));
            match made.unwrap_or_else(|_| panic!("{file} {dims:?} on {target:?}")) {
                Ok(_) => planned += 1,
                // No kernel counts that far.
                Err(Error::Plan(what)) if what.contains("too large") || what.contains("too far") => refused += 1,
                Err(Error::Plan(what)) => panic!("{file} {dims:?} on {}: {what}", target.name),
                Err(_) => refused += 1,
            }
        }
    }
    eprintln!("{planned} planned, {refused} refused");
    assert!(planned > 50 && refused > 50, "{planned} {refused}");
}

/// Each tensor can be counted, their sum cannot.
#[test]
fn sums_of_sizes_are_checked() {
    let g = Trace::new("giants");
    for i in 0..3 {
        g.output(&format!("y{i}"), g.input(&format!("x{i}"), DType::F32, [1 << 60]).slice(0, 0..4).relu());
    }
    let mut graph = g.finish().expect("each is sound");
    let target = Target { max_segment: u64::MAX, max_binding: u64::MAX, ..Target::cpu(2) };
    pass::run(&mut graph, &target, true).expect("the passes run");
    let error = plan(&graph, &target, &Limits { memory: None }).expect_err("there is no such memory");
    assert!(matches!(&error, Error::Usage(what) if what.contains("beyond 63 bits")), "{error}");
}

/// Whatever a target file says, it is refused in words, or plans keep to it.
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
                let mut graph = graph.clone();
                pass::run(&mut graph, &target, true)?;
                plan(&graph, &target, &Limits { memory: None })
            }));
            match made.unwrap_or_else(|_| panic!("{file} on {text}")) {
                Ok(plan) => {
                    planned += 1;
                    let target = &plan.target;
                    assert!(plan.segments.iter().all(|s| s.bytes <= target.max_segment), "{text}");
                    assert!(plan.buffers.iter().all(|b| b.offset.is_multiple_of(target.alignment)), "{text}");
                }
                Err(Error::Plan(what)) => panic!("{file} on {text}: {what}"),
                Err(_) => refused += 1,
            }
        }
    }
    eprintln!("{planned} planned, {refused} refused");
    assert!(planned > 200 && refused > 200, "{planned} {refused}");
}
