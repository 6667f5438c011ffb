//! Runs plans on the CPU's own kernels, with guards around their memory, and with poison where nothing lives.

use super::run::given;
use plimsoll::internals::backend::cpu::{Cpu, Line, Region};
use plimsoll::internals::constant::Constant;
use plimsoll::internals::dtype::DType;
use plimsoll::internals::error::Error;
use plimsoll::internals::exec::Exec;
use plimsoll::internals::plan::Plan;
use plimsoll::internals::shape::Shape;
use plimsoll::internals::target::Family;
use plimsoll::internals::tensor::Tensor;
use std::ptr::NonNull;
use std::sync::Arc;

/// A pattern that no kernel writes.
const GUARD: Line = Line([0xa5; 256]);
/// The lines of a guard: more than a vector, or a row of a tile, reaches beyond its end.
const LINES: usize = 16;
/// The most memory, and the most threads, that are worth it.
const MOST: (u64, u32) = (1 << 22, 4);

fn tensor(dtype: DType, shape: &Shape, port: usize) -> Tensor {
    let values: Vec<_> = (0..shape.numel()).map(|element| given(dtype, port, element, 0)).collect();
    Tensor::from_f64(dtype, shape.clone(), &values)
}

/// The elements of the constants, and then those that states begin with.
fn constants(plan: &Plan) -> Vec<Vec<Arc<Constant>>> {
    let ports =
        plan.programs[0].constants.iter().map(|c| (&c.name, c.dtype, &plan.programs[0].buffers[c.buffer].shape));
    let states = plan.programs[0].state.iter().filter(|s| s.given).map(|s| (&s.port.name, s.port.dtype, &s.port.shape));
    let made = ports.chain(states).enumerate();
    vec![
        made.map(|(port, (name, dtype, shape))| Arc::new(Constant::new(name.clone(), tensor(dtype, shape, port))))
            .collect(),
    ]
}

/// The outputs of a plan that the checker lets through, as bytes. `None` if it is not one of the CPU, takes too much, or is refused before it
/// runs.
///
/// # Errors
/// When the results follow from what is dead, or a byte outside of its memory has changed.
pub fn guarded(plan: &Plan) -> Option<Result<Vec<Vec<u8>>, String>> {
    let bytes: u64 = plan.segments.iter().map(|segment| segment.bytes.next_multiple_of(256)).sum();
    // A constant in a packed layout may have more elements than its buffer has room for.
    let elements = plan.programs[0].buffers.iter().map(|buffer| buffer.shape.numel() as u64).max().unwrap_or(0);
    if plan.target.family != Family::Cpu || bytes.max(elements) > MOST.0 || plan.target.threads > MOST.1 {
        return None;
    }
    let mut lines = vec![GUARD; bytes as usize / 256 + 2 * LINES];
    let start = NonNull::from(&mut lines[LINES]).cast::<u8>();
    // SAFETY: the lines are used by nobody else while the device lives.
    let region = unsafe { Region::from_raw(start, bytes) }.expect("lines are aligned");
    let backend = Box::new(Cpu::with_arena(plan.target.threads as usize, region));
    let mut exec = Exec::load(backend, plan.clone(), &constants(plan), &|_| {}).ok()?;
    let inputs: Vec<_> =
        plan.programs[0].inputs.iter().enumerate().map(|(i, p)| tensor(p.dtype, &p.shape, 5 + i)).collect();
    let found = match exec.run_poisoned(&inputs) {
        Ok(outputs) => Ok(outputs.iter().map(|output| output.bytes().to_vec()).collect()),
        Err(error @ Error::Differ { .. }) => Err(error.to_string()),
        Err(_) => return None,
    };
    drop(exec);
    let guards = [&lines[..LINES], &lines[lines.len() - LINES..]];
    let whole = guards.into_iter().flatten().all(|line| line.0 == GUARD.0);
    Some(if whole { found } else { Err("bytes outside of its memory have changed".into()) })
}
