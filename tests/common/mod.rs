//! What several integration tests need: the backends that are here, and a comparison in terms of the peak.
#![allow(dead_code, reason = "each test file uses a part of it")]

use plimsoll::backend::{Backend, cpu::Cpu};
use plimsoll::tensor::Tensor;

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
