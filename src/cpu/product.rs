//! Matrix products: a batch loop around [`Gemm`], with the body as its epilogue.

use super::block::Repr;
use super::gemm::{Bytes, COPIED, Elements, Gemm, Grid, Matrix, Out, PRODUCED, Tile, View};
use super::halves::Halves;
use super::nest::Nest;
use super::operands::Operands;
use super::packed::{Bound, Weights};
use super::prologue::{Prologue, Space};
use super::simd::Isa;
use super::task::{Args, Compiled, Needs, Scratch, Workspace};
use super::tile::Epilogue;
use plimsoll_core::dtype::DType;
use plimsoll_core::kernel::cpu::gemm::{packed_a_bytes, packed_b_bytes};
use plimsoll_core::kernel::cpu::{Product, right_matrix, slots};
use plimsoll_core::kernel::{Kernel, Template};
use plimsoll_core::shape::Access;

/// A compiled matrix product.
pub struct MatMul {
    isa: Isa,
    product: Product,
    elements: Elements,
    /// Over matrices: left, right, destination, then the operands of the epilogue and of the prologues; in bytes.
    nest: Nest,
    /// Elements per row and per column of left, right and destination.
    steps: [(isize, isize); 3],
    /// Of the left and the right operand, each with the first of its operands in the nest.
    prologues: [Option<(Prologue, usize)>; 2],
    /// The right operand, if it is one of numbers of few bits.
    weights: Option<Weights>,
    /// The type of the right operand, if it is one of packed halves.
    halves: Option<DType>,
    epilogue: Option<Epilogue>,
    /// The destination's argument.
    write: usize,
    grid: Grid,
    items: usize,
    workspace: Workspace,
}

impl MatMul {
    /// Compiles a matrix product.
    pub fn new(kernel: &Kernel, isa: Isa, threads: usize) -> Result<MatMul, String> {
        let weights =
            matches!(kernel.template, Template::MatMulBits { .. }).then(|| Weights::new(kernel)).transpose()?;
        let right = &*right_matrix(kernel);
        let (elements, core) = match [kernel.reads[0].dtype, right.dtype] {
            [DType::F32, DType::F32] => (Elements::Floats, Repr::F32),
            [DType::F32, DType::F16 | DType::BF16] if right.packed => (Elements::Floats, Repr::F32),
            [DType::U8, DType::I8] => (Elements::Bytes { left_unsigned: true }, Repr::I32),
            [DType::I8, DType::U8] => (Elements::Bytes { left_unsigned: false }, Repr::I32),
            [a, b] => return Err(format!("a matrix product of {a} and {b}")),
        };
        let product = Product::new(kernel);
        let (rank, write) = (kernel.shape.len(), kernel.reads.len());
        let operands = Operands::new(kernel, std::slice::from_ref(&kernel.body), Some(core))?;
        let words = |o: usize| if product.halves[o] { product.k.div_ceil(2) } else { product.k };
        let unit = [packed_a_bytes(product.m, words(0)), packed_b_bytes(words(1), product.n)];
        let element = kernel.reads[0].dtype.size() as isize;
        let is_packed = [0, 1].map(|o| product.packed[o] || product.halves[o]);
        let unit = [0, 1].map(|o| if is_packed[o] { unit[o] as isize } else { element });
        let start = [&kernel.reads[0], right].map(|read| if read.packed { 0 } else { element * read.access.offset });
        let out = &kernel.writes[0];
        let size = out.dtype.size() as isize;
        let mut nest = Nest {
            dims: product.batch.iter().map(|b| b.dim).collect(),
            steps: Vec::new(),
            start: vec![start[0], start[1], out.access.offset * size],
        };
        nest.start.extend(operands.motions.iter().map(|m| m.start));
        let row = product.row_axis;
        let mut prologues = [None, None];
        for (o, (lane, depth)) in [(row, rank - 1), (rank - 1, rank - 2)].into_iter().enumerate() {
            let steps = |access: &Access| Some([0, access.strides[depth], access.strides[lane]]);
            if let Some(prologue) = Prologue::new(kernel, o, steps)? {
                let first = nest.start.len();
                nest.start.extend_from_slice(&prologue.start);
                prologues[o] = Some((prologue, first));
            }
        }
        for axis in &product.batch {
            let mut steps = vec![axis.steps[0] * unit[0], axis.steps[1] * unit[1]];
            steps.push(out.access.strides[axis.axis] * size);
            steps.extend(operands.motions.iter().map(|m| m.steps[axis.axis]));
            for (prologue, _) in prologues.iter().flatten() {
                steps.extend(prologue.reads.iter().map(|&r| 4 * kernel.reads[r].access.strides[axis.axis]));
            }
            nest.steps.push(steps);
        }
        let steps = [(&kernel.reads[0], row), (right, rank - 2), (out, row)]
            .map(|(o, axis)| (o.access.strides[axis], o.access.strides[rank - 1]));
        let stores_itself = kernel.body.is_identity() && product.direct;
        let epilogue =
            (!stores_itself).then(|| Epilogue::new(&kernel.body, &kernel.shape, isa, operands, row, rank - 1..rank));
        let epilogue = epilogue.transpose()?;

        let halves = product.halves[1].then_some(right.dtype);
        let (count, ns) = (product.count(), product.nanoseconds());
        let parts = if slots(kernel).count > 1 { threads } else { 1 };
        // Twice as many parts as threads even out what else the machine does, when they are large.
        let pieces = if parts > 1 && ns > 1e6 { 2 * parts } else { parts };
        let produced = [prologues[0].is_some(), prologues[1].is_some() || weights.is_some() || halves.is_some()];
        let costs = [0, 1].map(|o| match (produced[o], product.packed[o]) {
            (true, _) => PRODUCED,
            (false, true) => 0,
            (false, false) => COPIED,
        });
        let grid = Grid::packing(product.m, product.n, pieces.div_ceil(count.max(1)), costs);
        let items = count * grid.len();
        let workspace = Workspace::new(kernel, threads, pieces.min(items))?;
        Ok(MatMul {
            isa,
            product,
            elements,
            nest,
            steps,
            prologues,
            weights,
            halves,
            epilogue,
            write,
            grid,
            items,
            workspace,
        })
    }
}

impl Compiled for MatMul {
    fn needs(&self) -> Needs {
        let needs = self.epilogue.as_ref().map_or(Needs::default(), Epilogue::needs);
        let needs = self.prologues.iter().flatten().fold(needs, |needs, (prologue, _)| prologue.needs_beside(needs));
        Needs { rank: self.nest.rank(), motions: self.nest.start.len(), tile: self.workspace.tile_bytes(), ..needs }
    }

    fn tasks(&self, _: usize) -> usize {
        self.workspace.tasks
    }

    unsafe fn run(&self, _: usize, task: usize, args: &Args, scratch: &mut Scratch) {
        // SAFETY: the task's own, by the contract of `run`.
        let workspace = unsafe { self.workspace.slot(args, task, scratch) };
        let items = self.workspace.share(self.items, task);
        let Product { m, n, k, packed, ref sharing, .. } = self.product;
        let direct = self.product.direct || !sharing.is_empty() && args.are_apart(self.write, sharing);
        let Scratch { mem, bases, index, at, .. } = scratch;
        let (index, at) = (&mut index[..self.nest.rank()], &mut at[..self.nest.start.len()]);
        self.nest.seek(items.start / self.grid.len(), index, at);
        let mut space = Space { mem: *mem, bases };
        let lent = self.prologues.each_ref().map(|p| p.as_ref().map(|(prologue, _)| prologue.take(&mut space)));
        let Space { mem, bases } = space;
        for item in items {
            let part = item % self.grid.len();
            let (rows, cols) = self.grid.get(part);
            let view = |o: usize| {
                let (rs, cs) = self.steps[o];
                View { ptr: args.at(o, at[o]).cast_const().cast(), rs, cs }
            };
            let bound = [0, 1].map(|o| {
                let (prologue, first) = self.prologues[o].as_ref()?;
                Some(prologue.bind(args, &at[*first..], lent[o]?))
            });
            let weights = self.weights.as_ref().map(|weights| Bound { weights, args });
            let halves = self.halves.map(|dtype| Halves::right(view(1).ptr.cast(), n, k, dtype));
            let matrix = |o: usize| match (&bound[o], self.elements) {
                _ if o == 1 && weights.is_some() => Matrix::Produced(weights.as_ref().expect("it is some")),
                _ if o == 1 && halves.is_some() => Matrix::Produced(halves.as_ref().expect("it is some")),
                (Some(prologue), _) => Matrix::Changed(view(o), prologue),
                (None, _) if packed[o] => Matrix::Packed(view(o).ptr),
                (None, Elements::Floats) => Matrix::Strided(view(o)),
                (None, Elements::Bytes { .. }) => {
                    let View { ptr, rs, cs } = view(o);
                    Matrix::Bytes(Bytes { ptr: ptr.cast(), rs, cs, depth: self.product.depth })
                }
            };
            let (a, b) = (matrix(0), matrix(1));
            let (rs, cs) = self.steps[2];
            // A single column has any step.
            let to = Out::Strided { ptr: args.at(self.write, at[2]).cast(), rs, cs: if n == 1 { 1 } else { cs } };
            let c = if direct { to } else { Out::Epilogue };
            let mut finish = |tile: Tile| {
                if let Some(epilogue) = &self.epilogue {
                    // SAFETY: the tile is a part of the kernel's index space.
                    unsafe { epilogue.apply(args, &at[3..], &tile, mem, bases) }
                }
            };
            let gemm = Gemm { m, n, k, elements: self.elements, a, b, c, accumulate: false };
            // SAFETY: operands were checked to span their memory, and items cover disjoint parts of the result.
            unsafe { gemm.run(self.isa, rows, cols, workspace, &mut finish) }
            if part + 1 == self.grid.len() {
                self.nest.advance(index, at);
            }
        }
    }
}
