//! Layouts and workspaces of the CPU's kernels.

use super::Kernel;
use crate::target::Target;

/// Bytes of scratch memory that a kernel needs.
pub fn workspace(_: &Kernel, _: &Target) -> u64 {
    0
}

/// Bytes of a constant operand in the layout that the kernel prefers.
pub fn packed_bytes(_: &Kernel, _: usize) -> Option<u64> {
    None
}

/// A constant operand's elements in the layout that the kernel prefers.
pub fn pack(_: &Kernel, _: usize, bytes: &[u8]) -> Vec<u8> {
    bytes.to_vec()
}
