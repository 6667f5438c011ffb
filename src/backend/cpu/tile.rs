//! Bodies applied to finished tiles of a product or a convolution while those are in the cache.

use super::block::BLOCK;
use super::gemm::Tile;
use super::moves;
use super::nest::{Motion, Nest};
use super::operands::{BlockOperand, Feed, Operands, Place, Reserved};
use super::program::{Program, source};
use super::simd::Isa;
use super::task::{Args, Needs};
use crate::expr::Body;
use crate::shape::Shape;
use std::ops::Range;

/// An operand over the rows and columns of the core's result.
struct TileOperand {
    operand: BlockOperand,
    /// Step from row to row.
    row: isize,
    /// The axes of the columns, if they do not act as one for this operand.
    cols: Option<Nest>,
}

/// The body of a kernel over the rows and columns of its core's result.
pub struct Epilogue {
    isa: Isa,
    program: Program,
    /// The first is the core value.
    sources: Vec<TileOperand>,
    outs: Vec<TileOperand>,
    /// Offset of the program's registers in the scratch memory.
    registers: usize,
}

impl Epilogue {
    /// Compiles a body over the indices of `shape`. Of the core's result, the axis `row` is the rows, and the axes `cols`, joined, are the
    /// columns.
    pub fn new(
        body: &Body,
        shape: &Shape,
        isa: Isa,
        mut operands: Operands,
        row: usize,
        cols: Range<usize>,
    ) -> Result<Epilogue, String> {
        let motions = std::mem::take(&mut operands.motions);
        let along = |m: &Motion| Motion { steps: m.steps[cols.clone()].to_vec(), start: 0 };
        let nests: Vec<Nest> = motions.iter().map(|m| Nest::new(&shape[cols.clone()], &[along(m)], None)).collect();
        let first_out = operands.first_out();
        let mut memory = Reserved::default();
        let (sources, outs) = operands.place(|k, feed, size| {
            let even = match nests[k].rank() {
                0 => Some(if k < first_out { 0 } else { size as isize }),
                1 => Some(nests[k].steps[0][0]),
                _ => None,
            };
            let place = match (feed, even) {
                // The tile itself, row by row.
                (Feed::Core, _) => Place::Dense,
                (Feed::Memory(_), Some(0)) if k < first_out => Place::Still,
                (Feed::Index, Some(0)) => Place::Slot(memory.take(size)),
                (Feed::Memory(_), Some(step)) if step == size as isize => Place::Dense,
                _ => Place::Staged(memory.take(BLOCK * size)),
            };
            (place, even.unwrap_or(0))
        });
        let program = Program::new(body, &operands.frame, &operands.sinks)?;
        let cols = nests.into_iter().map(|nest| (nest.rank() > 1).then_some(nest));
        let mut over_tile = motions.iter().map(|m| m.steps[row]).zip(cols);
        let mut of_tile = |operands: Vec<BlockOperand>| -> Vec<TileOperand> {
            let pairs = operands.into_iter().zip(over_tile.by_ref());
            pairs.map(|(operand, (row, cols))| TileOperand { operand, row, cols }).collect()
        };
        let (sources, outs) = (of_tile(sources), of_tile(outs));
        Ok(Epilogue { isa, program, sources, outs, registers: memory.0 })
    }

    /// Scratch memory for [`Epilogue::apply`].
    pub fn needs(&self) -> Needs {
        Needs {
            bytes: self.registers + self.program.registers,
            bases: source(self.sources.len() + self.outs.len()),
            ..Needs::default()
        }
    }

    /// Applies the body to a finished tile; `at` are the positions of the operands at row 0 and column 0 of the core's result.
    ///
    /// # Safety
    /// The tile must be readable, and so must the operands over it (the destinations writable); the scratch memory must be what
    /// [`Epilogue::needs`] says. A destination may be the tile itself, or an operand with the same steps.
    pub unsafe fn apply(&self, args: &Args, at: &[isize], tile: &Tile, mem: *mut u8, bases: &mut [*mut u8]) {
        self.program.bind(mem.wrapping_add(self.registers), bases);
        let (source_at, out_at) = at[..self.sources.len() + self.outs.len()].split_at(self.sources.len());
        for (r, row) in tile.rows.clone().enumerate() {
            for c in (0..tile.cols.len()).step_by(BLOCK) {
                let cols = tile.cols.start + c..tile.cols.end.min(tile.cols.start + c + BLOCK);
                let core = tile.ptr.wrapping_add(r * tile.stride + c).cast();
                // SAFETY: guaranteed by the caller; a staging block holds a block.
                unsafe {
                    for (k, (s, at)) in self.sources.iter().zip(source_at).enumerate() {
                        bases[source(k)] = s.read(args, at + row as isize * s.row, &cols, core, mem);
                    }
                    for (k, (s, at)) in self.outs.iter().zip(out_at).enumerate() {
                        bases[self.program.out(k)] = match (s.operand.place, s.operand.feed) {
                            (Place::Staged(offset), _) => mem.wrapping_add(offset),
                            (_, Feed::Memory(arg)) => args.at(arg, s.position(at + row as isize * s.row, cols.start)),
                            _ => core,
                        };
                    }
                    if c == 0 {
                        self.program.run_still(self.isa, bases);
                    }
                    self.program.run_each(self.isa, cols.len(), bases);
                    for (s, at) in self.outs.iter().zip(out_at) {
                        s.spill(args, at + row as isize * s.row, &cols, mem);
                    }
                }
            }
        }
    }
}

impl TileOperand {
    /// The position at a column, given the row's, where columns are evenly spaced.
    fn position(&self, line: isize, col: usize) -> isize {
        line + col as isize * self.operand.step
    }

    /// Where the program finds some columns of the row at `line`; those of the core's result are at `core`.
    ///
    /// # Safety
    /// As for [`Epilogue::apply`].
    #[inline(always)]
    unsafe fn read(&self, args: &Args, line: isize, cols: &Range<usize>, core: *mut u8, mem: *mut u8) -> *mut u8 {
        let BlockOperand { feed, size, place, .. } = self.operand;
        // SAFETY: guaranteed by the caller.
        unsafe {
            match (&self.cols, place) {
                (_, Place::Dense) if feed == Feed::Core => core,
                (Some(nest), Place::Staged(offset)) => {
                    for_each_run(nest, line, cols, |position, step, done, n| {
                        let to = mem.wrapping_add(offset + done * size);
                        match feed {
                            Feed::Memory(arg) => moves::gather(size, n, args.at(arg, position), step, to),
                            _ => moves::iota(n, position, step, to.cast()),
                        }
                    });
                    mem.wrapping_add(offset)
                }
                _ => self.operand.block(args, self.position(line, cols.start), cols.len(), mem),
            }
        }
    }

    /// Copies columns from their staging block to the row at `line`, if they are staged.
    ///
    /// # Safety
    /// As for [`Epilogue::apply`].
    unsafe fn spill(&self, args: &Args, line: isize, cols: &Range<usize>, mem: *mut u8) {
        let BlockOperand { size, place: Place::Staged(offset), step, .. } = self.operand else { return };
        let scatter = |position, step, done, n| {
            let from = mem.wrapping_add(offset + done * size);
            // SAFETY: guaranteed by the caller.
            unsafe { moves::scatter(size, n, from, args.at(self.operand.arg(), position), step) }
        };
        match &self.cols {
            None => scatter(self.position(line, cols.start), step, 0, cols.len()),
            Some(nest) => for_each_run(nest, line, cols, scatter),
        }
    }
}

/// Calls `f(position, step, elements before, elements)` for every evenly spaced run of some columns, whose first axis starts at `line`.
fn for_each_run(nest: &Nest, line: isize, cols: &Range<usize>, f: impl Fn(isize, isize, usize, usize)) {
    let inner = *nest.dims.last().expect("columns that are no single axis have axes");
    let mut done = 0;
    while done < cols.len() {
        let (mut rest, mut position) = (cols.start + done, line);
        let len = (inner - rest % inner).min(cols.len() - done);
        for (dim, steps) in nest.dims.iter().zip(&nest.steps).rev() {
            position += (rest % dim) as isize * steps[0];
            rest /= dim;
        }
        f(position, nest.steps[nest.rank() - 1][0], done, len);
        done += len;
    }
}
