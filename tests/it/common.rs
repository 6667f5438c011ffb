//! What several integration tests need: the backends that are here, and a comparison in terms of the peak.

use plimsoll::backend::{Backend, cpu::Cpu};
use plimsoll::exec::Exec;
use plimsoll::plan::Limits;
use plimsoll::tensor::Tensor;
use plimsoll::{DType, Graph, Plan, Shape, Target, onnx, pass, plan, reference};
use std::path::Path;

/// A backend's name and how to open it.
pub type Opener = (&'static str, fn() -> Box<dyn Backend>);

/// Every backend that can be opened here. Without a CUDA device or a wgpu adapter that backend is skipped, in words, unless
/// `PLIMSOLL_REQUIRE_CUDA` or `PLIMSOLL_REQUIRE_WGPU` is set: then its absence is a failure. `PLIMSOLL_BACKENDS` names the only ones to
/// use, separated by commas.
pub fn backends() -> Vec<Opener> {
    let mut list = all();
    if let Ok(named) = std::env::var("PLIMSOLL_BACKENDS") {
        list.retain(|(name, _)| named.split(',').any(|n| n == *name));
    }
    list
}

fn all() -> Vec<Opener> {
    let mut list: Vec<Opener> = vec![("cpu", || Box::new(Cpu::new(2)))];
    #[cfg(feature = "cuda")]
    match cuda() {
        Ok(held) => {
            // Devices share the context that this one holds: each test would make its own otherwise, which takes long.
            std::mem::forget(held);
            list.push(("cuda", || cuda().expect("it was opened before")));
        }
        Err(error) if std::env::var_os("PLIMSOLL_REQUIRE_CUDA").is_some() => panic!("CUDA is required: {error}"),
        Err(error) => eprintln!("SKIPPED on cuda: {error}"),
    }
    #[cfg(feature = "wgpu")]
    match plimsoll::backend::wgpu::open(None, true) {
        Ok(_) => list.push(("wgpu", || plimsoll::backend::wgpu::open(None, true).expect("it was opened before").0)),
        Err(error) if std::env::var_os("PLIMSOLL_REQUIRE_WGPU").is_some() => panic!("wgpu is required: {error}"),
        Err(error) => eprintln!("SKIPPED on wgpu: {error}"),
    }
    list
}

/// The first CUDA device.
#[cfg(feature = "cuda")]
pub fn cuda() -> plimsoll::Result<Box<dyn Backend>> {
    use plimsoll::backend::cuda::{Settings, library::Search, open};
    open(&Search::here(), &Settings::default()).map(|(backend, _)| backend)
}

/// Whether two tensors agree within `tolerance` times the expected one's largest magnitude (exactly, if they are not of
/// floats); if not, what differs.
pub fn agrees(found: &Tensor, expected: &Tensor, tolerance: f64) -> Result<(), String> {
    let peak = expected.to_f64().iter().filter(|v| v.is_finite()).fold(0.0f64, |m, v| m.max(v.abs()));
    let absolute = if expected.dtype().is_float() { tolerance * peak } else { 0.0 };
    found.compare(expected, 0.0, absolute)
}

/// A graph from ONNX's textual form, without its header.
pub fn graph(text: &str) -> Graph {
    let text = format!("<ir_version: 8, opset_import: [\"\" : 17]>\n{text}");
    let model = onnx::Model::new(onnx::text::parse(&text, Path::new("text")).expect("it parses"));
    onnx::import(&model, &[]).expect("it is a graph")
}

/// What is planned of a graph.
pub fn planned(graph: &Graph, target: &Target) -> Plan {
    let mut graph = graph.clone();
    pass::run(&mut graph, target, true).expect("the passes run");
    plan::plan(&graph, target, &Limits { memory: None }).expect("it is planned")
}

/// Numbers from -1 to 1, the same for the same state.
pub fn random(state: &mut u64, shape: &Shape) -> Tensor {
    let mut next = || {
        *state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (*state >> 40) as f64 / f64::from(1u32 << 23) - 1.0
    };
    let values: Vec<f64> = (0..shape.numel()).map(|_| next()).collect();
    Tensor::from_f64(DType::F32, shape.clone(), &values)
}

/// Runs a graph of floats on random inputs, and holds its outputs against the reference's: within 1e-5 of the peak.
pub fn runs_as_the_reference(graph: &Graph, (name, open): &Opener, state: &mut u64) -> Plan {
    let inputs: Vec<_> = graph.inputs().iter().map(|&v| random(state, &graph.fact(v).shape)).collect();
    let expected = reference::run(graph, &inputs).expect("the reference runs");
    let backend = open();
    let mut passed = graph.clone();
    pass::run(&mut passed, backend.target(), true).expect("the passes run");
    let (plan, constants) = plan::compile(&passed, backend.target(), &Limits { memory: None }).expect("it is planned");
    let mut exec = Exec::load(backend, plan.clone(), &constants, &|_| {}).expect("it loads");
    let found = exec.run(&inputs).expect("it runs");
    for (found, expected) in found.iter().zip(&expected) {
        agrees(found, expected, 1e-5).unwrap_or_else(|e| panic!("{name}, {}: {e}", graph.name));
    }
    plan
}
