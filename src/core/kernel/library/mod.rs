//! Kernels as calls of cuBLASLt and cuDNN, in plain data.
//!
//! [`absorb`] finds the call, and how much of the kernel's body the call computes. The [schedule](super::schedule) chooses if it is made.
//!
//! ```text
//! body of the kernel    core -> * alpha -> + bias -> + residual -> activation -> anything else
//!                       `------------------ the call -----------------------'   `-- a map --'
//! ```

pub use super::call::*;
use super::{Fold, Kernel, Template};
use crate::dtype::DType;
use crate::target::{Family, Target};

mod attention;
mod conv;
mod epilogue;
mod matmul;

use epilogue::core_alone;
pub use epilogue::part;

fn vector(kernel: &Kernel, slot: usize) -> Option<Vector> {
    Some(Vector { slot, offset: kernel.reads[slot].access.offset.try_into().ok()? })
}

/// The library call that computes a kernel as a whole; `None` if this target has none.
pub fn call(kernel: &Kernel, target: &Target) -> Option<Call> {
    let (call, end) = absorb(kernel, target)?;
    (end == kernel.body.results[0]).then_some(call)
}

/// The call that computes a kernel's core and as much of its body as it can, and the instruction whose value it returns.
pub fn absorb(kernel: &Kernel, target: &Target) -> Option<(Call, u32)> {
    let there = target.family == Family::Cuda && !kernel.shape.contains(&0);
    if !there || !kernel.prologues.is_empty() || kernel.writes.len() != 1 || kernel.body.results.len() != 1 {
        return None;
    }
    let found = match &kernel.template {
        Template::MatMul if target.libraries.cublaslt => matmul::call(kernel, target),
        Template::Conv { groups, window, .. } if target.libraries.cudnn => conv::call(kernel, *groups, window, target),
        Template::ConvTranspose { groups, window } if target.libraries.cudnn => {
            conv::gradient(kernel, *groups, window, target)
        }
        Template::Attention { score, further: 0, guarded, fold: Fold::Softmax } if target.libraries.attention => {
            attention::call(kernel, score, *guarded, target).and_then(|call| Some((call, core_alone(kernel)?)))
        }
        _ => None,
    };
    // Its workspace is one binding.
    found.filter(|(call, _)| call.least_workspace() <= target.max_binding)
}

/// True if libraries compute products of this type on tensor cores.
pub fn on_tensor_cores(dtype: DType, target: &Target) -> bool {
    dtype.is_half() || target.allow_tf32 && dtype == DType::F32
}
