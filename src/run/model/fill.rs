//! Inputs of a run: those that are given, and random ones for the rest.

use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::mesh::Mesh;
use crate::plan::Program;
use crate::random::splitmix;
use crate::session;
use crate::shape::Shape;
use crate::tensor::Tensor;

/// What to do about elements of another type.
pub const CONVERT: &str = "; convert it, as with NumPy's astype";

/// A tensor of made-up values, or why the host cannot hold it.
///
/// # Errors
/// The host has no such memory.
pub fn made(dtype: DType, shape: Shape, mut next: impl FnMut() -> f64) -> Result<Tensor, String> {
    const BLOCK: usize = 4096;
    let size = shape.checked_len().and_then(|n| n.checked_mul(dtype.size()));
    let size = size.ok_or_else(|| format!("{dtype}{shape} is larger than any memory"))?;
    let mut bytes = Vec::new();
    bytes.try_reserve_exact(size).map_err(|_| format!("the host has no {size} bytes for {dtype}{shape}"))?;
    let mut left = shape.numel();
    while left > 0 {
        let block: Vec<f64> = std::iter::repeat_with(&mut next).take(left.min(BLOCK)).collect();
        bytes.extend_from_slice(Tensor::from_f64(dtype, vec![block.len()], &block).bytes());
        left -= block.len();
    }
    Tensor::new(dtype, shape, bytes).map_err(|e| e.to_string())
}

/// Inputs in the plan's order: those given, random ones for the rest. What is given to states is in the graph.
///
/// # Errors
/// When a given one has another type than the plan, or the host cannot hold a random one.
pub fn fill(plan: &Program, mesh: Option<&Mesh>, given: Vec<(String, Tensor)>, seed: u64) -> Result<Vec<Tensor>> {
    let mut random = splitmix(seed);
    // What else is given is a state's, or of an input that the plan is bound to.
    let is_input = |(name, _): &(String, Tensor)| plan.inputs.iter().any(|port| port.name == *name);
    let mut inputs: Vec<_> = given.into_iter().filter(is_input).collect();
    for (name, tensor) in &mut inputs {
        let port = plan.inputs.iter().find(|port| port.name == *name);
        if let Some(same) = port.and_then(|port| tensor.converted(port.dtype)) {
            tracing::info!("input '{name}': {} to {}, which changes no element", tensor.dtype(), same.dtype());
            *tensor = same;
        }
        if let Some(port) = port.filter(|port| port.dtype != tensor.dtype() && port.shape == *tensor.shape()) {
            let (expected, found, shape) = (port.dtype, tensor.dtype(), &port.shape);
            let what = format!("input '{name}': expected {expected}{shape}, found {found}{shape}{CONVERT}");
            return Err(Error::usage(what));
        }
    }
    for port in &plan.inputs {
        if !inputs.iter().any(|(name, _)| *name == port.name) {
            let ends = port.indexes.iter().map(|i| [i.least, i.most].map(|end| end as f64 / i.sum as f64));
            let [least, most] = ends.fold([f64::NEG_INFINITY, f64::INFINITY], |[least, most], [low, high]| {
                [least.max(low.ceil()), most.min(high.floor())]
            });
            let first = if most >= 0.0 { least.max(0.0) } else { least };
            let whole = mesh.map_or_else(|| port.shape.clone(), |mesh| plan.whole(mesh, &port.name, &port.shape));
            let tensor = made(port.dtype, whole, || {
                let count = most - first + 1.0;
                // Of what is bounded at one end alone, no range is known.
                if !count.is_finite() || count < 1.0 {
                    return drawn(random(), port.dtype).max(least).min(most);
                }
                first + (random() % count as u64) as f64
            });
            let tensor = tensor.map_err(|what| Error::usage(format!("input '{}': {what}", port.name)))?;
            inputs.push((port.name.clone(), tensor));
        }
    }
    let inputs: Vec<_> = inputs.iter().map(|(name, tensor)| (name.as_str(), tensor.clone())).collect();
    session::arrange(plan, &inputs)
}

/// A float in [-1, 1) of random bits; 0 or 1 for integers, which every index allows.
fn drawn(bits: u64, dtype: DType) -> f64 {
    if dtype.is_real() { (bits >> 11) as f64 / (1u64 << 52) as f64 - 1.0 } else { (bits >> 63) as f64 }
}
