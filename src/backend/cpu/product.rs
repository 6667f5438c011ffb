//! Matrix products: a batch loop around [`Gemm`], with the body as its epilogue.

use super::gemm::{Gemm, Grid, Lhs, Out, Rhs, Tile, View};
use super::nest::Nest;
use super::simd::Isa;
use super::tile::{self, Epilogue, Operands};
use super::{Args, Compiled, Needs, Scratch};
use crate::dtype::DType;
use crate::kernel::layout::{Product, packed_bytes};
use crate::kernel::Kernel;

/// A compiled matrix product.
pub struct MatMul {
    isa: Isa,
    product: Product,
    /// Over matrices: left, right, destination, then the epilogue's operands; in bytes.
    nest: Nest,
    /// The epilogue's steps per row and column of a matrix.
    steps: Vec<(isize, isize)>,
    epilogue: Option<Epilogue>,
    reads: usize,
    args: usize,
    grid: Grid,
    items: usize,
    tasks: usize,
    slots: usize,
    slot_bytes: usize,
}

impl MatMul {
    /// Compiles a matrix product.
    pub fn new(kernel: &Kernel, isa: Isa, threads: usize) -> Result<MatMul, String> {
        if kernel.reads[..2].iter().any(|r| r.dtype != DType::F32) {
            return Err("a matrix product of other than f32".into());
        }
        let product = Product::new(kernel)?;
        let (rank, reads) = (kernel.shape.len(), kernel.reads.len());
        let operands = Operands::new(kernel)?;
        // Step of every operand of the nest along a batch axis, in bytes.
        let matrix = |o: usize| -> isize {
            match product.packed[o] {
                true => {
                    let batch = &kernel.reads[o].access;
                    let count: usize =
                        (0..rank - 2).filter(|&k| batch.strides[k] != 0).map(|k| batch.shape[k]).product();
                    (packed_bytes(kernel, o).unwrap_or(0) as usize / count.max(1)) as isize
                }
                false => 4,
            }
        };
        let start = |o: usize| if product.packed[o] { 0 } else { 4 * kernel.reads[o].access.offset };
        let write = &kernel.writes[0];
        let mut nest = Nest {
            dims: product.batch.iter().map(|b| b.dim).collect(),
            steps: Vec::new(),
            start: vec![start(0), start(1), write.access.offset * write.dtype.size() as isize],
        };
        nest.start.extend(operands.motions.iter().map(|m| m.start));
        for axis in &product.batch {
            let mut steps = vec![axis.steps[0] * matrix(0), axis.steps[1] * matrix(1)];
            steps.push(axis.steps[reads] * write.dtype.size() as isize);
            steps.extend(operands.motions.iter().map(|m| m.steps[axis.axis]));
            nest.steps.push(steps);
        }
        let steps: Vec<_> = operands.motions.iter().map(|m| (m.steps[rank - 2], m.steps[rank - 1])).collect();
        let plain = kernel.body.is_identity() && write.dtype == DType::F32 && kernel.writes.len() == 1;
        let epilogue = match plain {
            true => None,
            false => Some(Epilogue::new(kernel, isa, operands, &steps)?),
        };

        let slot_bytes = product.thread_bytes() as usize;
        let slots = match slot_bytes {
            0 => usize::MAX,
            bytes => (kernel.workspace / bytes as u64) as usize,
        };
        if slots == 0 {
            return Err(format!("a workspace of {} bytes, at least {slot_bytes} needed", kernel.workspace));
        }
        let (count, parts) = (product.count(), product.parts(threads));
        let flops = count as f64 * product.m as f64 * product.n as f64 * product.k as f64;
        // Twice as many parts as threads even out what else the machine does, when they are large.
        let pieces = if parts == 1 { 1 } else { parts * if flops > 5e7 { 2 } else { 1 } };
        let grid = Grid::new(product.m, product.n, pieces.div_ceil(count.max(1)));
        let items = count * grid.len();
        let most = if threads <= slots { pieces } else { pieces.min(slots) };
        let tasks = most.min(items);
        Ok(MatMul {
            isa,
            product,
            nest,
            steps,
            epilogue,
            reads,
            args: reads + kernel.writes.len(),
            grid,
            items,
            tasks,
            slots,
            slot_bytes,
        })
    }
}

impl Compiled for MatMul {
    fn needs(&self) -> Needs {
        let needs = self.epilogue.as_ref().map_or(Needs::default(), Epilogue::needs);
        Needs { rank: self.nest.rank(), motions: 2 * self.nest.start.len(), ..needs }
    }

    fn tasks(&self) -> usize {
        self.tasks
    }

    unsafe fn run(&self, task: usize, args: &Args, scratch: &mut Scratch) {
        let slot = if self.tasks <= self.slots { task } else { scratch.worker };
        let workspace: &mut [f32] = match self.slot_bytes {
            0 => &mut [],
            // SAFETY: the workspace has a slot for this task or, if there are more tasks than slots, one for each thread.
            bytes => unsafe {
                std::slice::from_raw_parts_mut(args.at(self.args, (slot * bytes) as isize).cast(), bytes / 4)
            },
        };
        let items = self.items * task / self.tasks..self.items * (task + 1) / self.tasks;
        let Product { m, n, k, packed, steps, buffered, .. } = &self.product;
        let (mem, bases, index, at) = tile::split(scratch);
        let motions = self.nest.start.len();
        let (at, rest) = at.split_at_mut(motions);
        let index = &mut index[..self.nest.rank()];
        self.nest.seek(items.start / self.grid.len(), index, at);
        for item in items {
            let part = item % self.grid.len();
            let (rows, cols) = self.grid.get(part);
            let view = |o: usize| View { ptr: args.at(o, at[o]).cast_const().cast(), rs: steps[o].0, cs: steps[o].1 };
            let c = steps[self.reads];
            let gemm = Gemm {
                m: *m,
                n: *n,
                k: *k,
                a: if packed[0] { Lhs::Packed(view(0).ptr) } else { Lhs::Strided(view(0)) },
                b: if packed[1] { Rhs::Packed(view(1).ptr) } else { Rhs::Strided(view(1)) },
                c: match buffered {
                    true => Out::Epilogue,
                    false => Out::Strided { ptr: args.at(self.reads, at[2]).cast(), rs: c.0, cs: c.1 },
                },
                accumulate: false,
            };
            let corner = &mut rest[..motions - 3];
            let mut finish = |tile: Tile| {
                let Some(epilogue) = &self.epilogue else { return };
                for (k, corner) in corner.iter_mut().enumerate() {
                    let (row, col) = (tile.rows.start as isize, tile.cols.start as isize);
                    *corner = at[3 + k] + row * self.steps[k].0 + col * self.steps[k].1;
                }
                // SAFETY: the tile is a part of the kernel's index space.
                unsafe {
                    epilogue.apply(args, corner, tile.rows.len(), tile.cols.len(), tile.ptr, tile.stride, mem, bases);
                }
            };
            let epilogue: Option<&mut dyn FnMut(Tile)> = if self.epilogue.is_some() { Some(&mut finish) } else { None };
            // SAFETY: operands were checked to span their memory, and items cover disjoint parts of the result.
            unsafe { gemm.run(self.isa, rows, cols, workspace, epilogue) }
            if part + 1 == self.grid.len() {
                self.nest.advance(index, at);
            }
        }
    }
}
