//! How CPU kernels use memory beyond their operands: packed constants and workspaces, from shapes alone.
//!
//! Planning asks here, and the CPU backend obeys: what a kernel needs is a function of the kernel and the target, the same on every
//! machine.

use super::{Kernel, Template};
use crate::expr::Code;
use crate::shape::Access;
use crate::target::{Family, Target};
use std::ops::Range;

/// Rows per panel of a packed left operand.
pub const PANEL_ROWS: usize = 12;
/// Columns per panel of a packed right operand.
pub const PANEL_COLS: usize = 16;

/// A batch axis of a product.
#[derive(Clone, Debug, PartialEq)]
pub struct BatchAxis {
    /// Extent.
    pub dim: usize,
    /// The kernel's axis.
    pub axis: usize,
    /// Step of every read, then every write, in elements (of packed operands, in packed matrices).
    pub steps: Vec<isize>,
}

/// A [`Template::MatMul`] kernel as a batch of matrix products.
#[derive(Clone, Debug, PartialEq)]
pub struct Product {
    /// Batch axes that remain after those that only lengthen the rows were joined with them.
    pub batch: Vec<BatchAxis>,
    /// Rows of the left operand and the result.
    pub m: usize,
    /// Columns of the right operand and the result.
    pub n: usize,
    /// Columns of the left operand, rows of the right one.
    pub k: usize,
    /// Steps of every read, then every write, per row and per column of its matrix, in elements.
    pub steps: Vec<(isize, isize)>,
    /// Whether the left, the right operand is packed.
    pub packed: [bool; 2],
    /// Whether the result is collected in the workspace, tile by tile, rather than where it goes.
    pub buffered: bool,
}

impl Product {
    /// Takes a matrix product apart.
    ///
    /// # Errors
    /// When the operands do not fit together.
    pub fn new(kernel: &Kernel) -> Result<Product, String> {
        let Kernel { shape, reads, writes, .. } = kernel;
        let [a, b, ..] = &reads[..] else { return Err("a product of fewer than two operands".into()) };
        let rank = shape.len();
        let (left, right) = (&a.access, &b.access);
        if rank < 2 || left.shape.len() != rank || right.shape.len() != rank || writes.is_empty() {
            return Err(format!("a product of {} and {} in {shape}", left.shape, right.shape));
        }
        let (batch, m, n, k) = (rank - 2, shape[rank - 2], shape[rank - 1], left.shape[rank - 1]);
        let fits = |access: &Access, rows, cols| {
            access.shape[..batch] == shape[..batch] && access.shape[batch..] == [rows, cols]
        };
        if !fits(left, m, k) || !fits(right, k, n) {
            return Err(format!("a product of {} and {} in {shape}", left.shape, right.shape));
        }
        let operands: Vec<_> = reads.iter().chain(writes).collect();
        let packed = [a.packed, b.packed];
        let step = |operand: usize, axis: usize| match packed.get(operand) {
            Some(true) => packed_step(&operands[operand].access, axis, batch),
            _ => operands[operand].access.strides[axis],
        };
        let mut product = Product {
            batch: Vec::new(),
            m,
            n,
            k,
            steps: operands.iter().map(|o| (o.access.strides[rank - 2], o.access.strides[rank - 1])).collect(),
            packed,
            buffered: false,
        };
        // A body that looks at the index wants the axes apart.
        let mut joining = !kernel.body.code.iter().any(|i| matches!(i.code, Code::Index(_)));
        for axis in (0..batch).rev().filter(|&axis| shape[axis] != 1) {
            let steps: Vec<isize> = (0..operands.len()).map(|o| step(o, axis)).collect();
            let rows = product.m as isize;
            let joins = |o: usize| match o {
                0 => !packed[0] && Some(steps[0]) == product.steps[0].0.checked_mul(rows),
                1 => steps[1] == 0,
                _ => Some(steps[o]) == product.steps[o].0.checked_mul(rows),
            };
            joining &= (0..operands.len()).all(joins) && m > 0;
            match joining {
                true => product.m *= shape[axis],
                false => product.batch.insert(0, BatchAxis { dim: shape[axis], axis, steps }),
            }
        }
        let [write] = &writes[..] else { return Ok(Product { buffered: true, ..product }) };
        let at_once = write.dtype == crate::dtype::DType::F32
            && product.steps[reads.len()].1 == 1
            && product.steps[reads.len()].0 >= 0
            && !reads[2..].iter().any(|r| same_elements(&r.access, &write.access));
        product.buffered = !at_once && !(kernel.body.is_identity() && write.dtype == crate::dtype::DType::F32);
        Ok(product)
    }

    /// Number of matrices.
    pub fn count(&self) -> usize {
        self.batch.iter().map(|axis| axis.dim).product()
    }

    /// Into how many parts threads may cut the work without losing more than they gain.
    pub fn parts(&self, threads: usize) -> usize {
        let flops = 2.0 * self.count() as f64 * self.m as f64 * self.n as f64 * self.k as f64;
        if flops < 2e6 { 1 } else { threads }
    }
}

/// Whether two accesses of one shape put every index at the same element.
pub fn same_elements(a: &Access, b: &Access) -> bool {
    let steps = |access: &Access| -> Vec<(usize, usize, isize)> {
        let axes = access.shape.iter().zip(&access.strides).enumerate();
        axes.filter(|(_, (d, _))| **d != 1).map(|(k, (&d, &s))| (k, d, s)).collect()
    };
    a.offset == b.offset && steps(a) == steps(b)
}

/// Step along a batch axis of a packed operand, in matrices: those that differ follow each other.
fn packed_step(access: &Access, axis: usize, batch: usize) -> isize {
    if access.strides[axis] == 0 { 0 } else { matrices(access, axis + 1..batch) as isize }
}

/// How many different matrices an operand has over these batch axes.
fn matrices(access: &Access, axes: Range<usize>) -> usize {
    axes.filter(|&k| access.strides[k] != 0).map(|k| access.shape[k]).product()
}

/// Bytes of the packed form of a constant operand on the CPU, if the kernel's template has one for it.
pub fn packed_bytes(kernel: &Kernel, operand: usize) -> Option<u64> {
    let access = &kernel.reads.get(operand)?.access;
    let rank = access.shape.len();
    match (&kernel.template, operand) {
        (Template::MatMul, 0 | 1) if rank >= 2 => {
            let (rows, cols) = (access.shape[rank - 2], access.shape[rank - 1]);
            let matrix = if operand == 0 { packed_a(rows, cols) } else { packed_b(rows, cols) };
            matrix.checked_mul(matrices(access, 0..rank - 2) as u64)
        }
        _ => None,
    }
}

fn packed_a(m: usize, k: usize) -> u64 {
    4 * m as u64 * k as u64
}

fn packed_b(k: usize, n: usize) -> u64 {
    4 * n.next_multiple_of(PANEL_COLS) as u64 * k as u64
}

/// The packed form of a constant operand, whose buffer is given.
///
/// # Panics
/// When [`packed_bytes`] is `None`, or the operand reaches outside its buffer.
pub fn pack(kernel: &Kernel, operand: usize, bytes: &[u8]) -> Vec<u8> {
    let total = packed_bytes(kernel, operand).expect("an operand with a packed form");
    let access = &kernel.reads[operand].access;
    let batch = access.shape.len() - 2;
    let (rows, cols) = (access.shape[batch], access.shape[batch + 1]);
    let mut packed = vec![0u8; total as usize];
    // The matrices that differ, in order.
    let mut outer = access.clone();
    outer.shape.truncate(batch);
    outer.strides.truncate(batch);
    let mut index = vec![0usize; batch];
    let size = if operand == 0 { packed_a(rows, cols) } else { packed_b(rows, cols) } as usize;
    for matrix in packed.chunks_exact_mut(size.max(1)) {
        let start = outer.at(&index);
        let (rs, cs) = (access.strides[batch], access.strides[batch + 1]);
        // A panel holds `width` lines side by side; of A those are rows, of B columns.
        let (lines, depth, unit, line_step, depth_step) =
            if operand == 0 { (rows, cols, PANEL_ROWS, rs, cs) } else { (cols, rows, PANEL_COLS, cs, rs) };
        for (panel, first) in matrix.chunks_mut(4 * unit * depth.max(1)).zip((0..lines).step_by(unit)) {
            let width = unit.min(lines - first);
            let stride = if operand == 0 { width } else { unit };
            for (p, row) in panel.chunks_exact_mut(4 * stride).enumerate() {
                for (i, to) in row.chunks_exact_mut(4).take(width).enumerate() {
                    let at = start + (first + i) as isize * line_step + p as isize * depth_step;
                    to.copy_from_slice(&bytes[4 * at as usize..4 * at as usize + 4]);
                }
            }
        }
        for k in (0..batch).rev().filter(|&k| access.strides[k] != 0) {
            index[k] += 1;
            if index[k] < access.shape[k] {
                break;
            }
            index[k] = 0;
        }
    }
    packed
}

/// Bytes of workspace that a kernel needs on this target.
pub fn workspace(kernel: &Kernel, target: &Target) -> u64 {
    if target.family != Family::Cpu {
        return 0;
    }
    match &kernel.template {
        Template::MatMul => Product::new(kernel).map_or(0, |p| p.thread_bytes() * p.parts(target.threads as usize) as u64),
        _ => 0,
    }
}

impl Product {
    /// Bytes of workspace per part, a multiple of 64.
    pub fn thread_bytes(&self) -> u64 {
        let c_unit = !self.buffered && self.steps[self.steps.len() - 1].1 == 1;
        gemm_workspace(self.m, self.n, self.k, self.packed[0], self.packed[1], c_unit).next_multiple_of(64)
    }
}

/// Depth of one block of `k`: two panels of `B` of this depth stay in the L1 cache.
const DEPTH: usize = 256;
/// Rows of `A` that are packed together and stay in the L2 cache.
const BLOCK_ROWS: usize = 16 * PANEL_ROWS;
/// Up to this many rows a product is limited by reading `B`, and `A` is not packed.
const FEW_ROWS: usize = 4;

fn gemm_workspace(m: usize, n: usize, k: usize, a_packed: bool, b_packed: bool, c_unit: bool) -> u64 {
    const TILE: usize = 128 << 10;
    let (m_up, n_up) = (m.next_multiple_of(PANEL_ROWS), n.next_multiple_of(2 * PANEL_COLS));
    let tile = if m_up <= 384 {
        (m_up, n_up.min((TILE / m_up.max(64)) & !31))
    } else if n_up <= 352 {
        (m_up.min(TILE / n_up.max(64) / PANEL_ROWS * PANEL_ROWS), n_up)
    } else {
        (372, 352)
    };
    let depth = if m <= FEW_ROWS { k } else { k.div_ceil(k.div_ceil(DEPTH).max(1)) };
    let up = |len: usize| len.next_multiple_of(PANEL_COLS);
    let a = if !a_packed && m > FEW_ROWS { up(tile.0.min(BLOCK_ROWS).min(m) * depth) } else { 0 };
    let b = if !b_packed { up(tile.1.min(n.next_multiple_of(PANEL_COLS)) * depth) } else { 0 };
    let c = if !c_unit { up(tile.0.min(m) * tile.1) } else { 0 };
    4 * (a + b + c) as u64
}
