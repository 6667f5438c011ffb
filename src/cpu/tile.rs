//! Bodies applied to finished tiles of a product or a convolution while those are in the cache.

use super::block::BLOCK;
use super::epilogue::{Chain, Rows};
use super::gemm::Tile;
use super::moves;
use super::nest::{Motion, Nest};
use super::operands::{BlockOperand, Feed, Operands, Place, Reserved};
use super::program::{Program, source};
use super::simd::Isa;
use super::task::{Args, Needs};
use plimsoll_core::expr::Body;
use plimsoll_core::shape::Shape;
use std::ops::Range;

/// The most columns with which several rows are one block: of so few, a block's instructions would take longer to begin than to run.
const FEW_COLUMNS: usize = 64;

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
    /// Number of columns.
    columns: usize,
    /// Over columns of one row.
    by_row: Blocks,
    /// Over several whole rows, if there are few columns.
    by_rows: Option<Blocks>,
    /// Offset of the programs' registers in the scratch memory.
    registers: usize,
}

/// The body over blocks of a tile.
struct Blocks {
    program: Program,
    /// The first is the core value.
    sources: Vec<TileOperand>,
    outs: Vec<TileOperand>,
    /// Bytes from one row to the next, by base pointer; `None` for the tile itself.
    steps: Vec<Option<isize>>,
}

impl Blocks {
    /// `joined`: blocks have so many columns of several rows.
    fn new(
        body: &Body,
        operands: &mut Operands,
        tile: &[(isize, Nest)],
        joined: Option<usize>,
        memory: &mut Reserved,
    ) -> Result<Blocks, String> {
        let first_out = operands.first_out();
        let (sources, outs) = operands.place(|k, feed, size| {
            let (row, nest) = &tile[k];
            let even = match nest.rank() {
                0 => Some(if k < first_out { 0 } else { size as isize }),
                1 => Some(nest.steps[0][0]),
                _ => None,
            };
            let is_dense =
                even == Some(size as isize) && joined.is_none_or(|columns| *row == (columns * size) as isize);
            let place = match (feed, even) {
                // The tile itself, row by row.
                (Feed::Core, _) => Place::Dense,
                (Feed::Memory(_), Some(0)) if k < first_out && joined.is_none() => Place::Still,
                (Feed::Index, Some(0)) if joined.is_none() => Place::Slot(memory.take(size)),
                (Feed::Memory(_), _) if is_dense => Place::Dense,
                _ => Place::Staged(memory.take(BLOCK * size)),
            };
            (place, even.unwrap_or(0))
        });
        let program = Program::new(body, &operands.frame, &operands.sinks)?;
        let mut over_tile = tile.iter().map(|(row, nest)| (*row, (nest.rank() > 1).then(|| nest.clone())));
        let mut of_tile = |operands: Vec<BlockOperand>| -> Vec<TileOperand> {
            let pairs = operands.into_iter().zip(over_tile.by_ref());
            pairs.map(|(operand, (row, cols))| TileOperand { operand, row, cols }).collect()
        };
        let (sources, outs) = (of_tile(sources), of_tile(outs));
        let step = |s: &TileOperand| (s.operand.feed != Feed::Core).then_some(s.row);
        let steps = (0..source(0)).map(|_| Some(0)).chain(sources.iter().chain(&outs).map(step)).collect();
        Ok(Blocks { program, sources, outs, steps })
    }

    /// The chain that is all of the program, if every operand of it is where it is used.
    fn chain(&self) -> Option<&Chain> {
        let in_place = |s: &TileOperand| matches!(s.operand.place, Place::Dense | Place::Still);
        self.program.chain().filter(|_| self.sources.iter().chain(&self.outs).all(in_place))
    }
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
        let along = |m: &Motion| Motion { steps: m.steps[cols.clone()].to_vec(), start: 0 };
        let nest = |m: &Motion| (m.steps[row], Nest::new(&shape[cols.clone()], &[along(m)], None));
        let tile: Vec<_> = std::mem::take(&mut operands.motions).iter().map(nest).collect();
        let columns: usize = shape[cols.clone()].iter().product();
        let [mut one, mut several] = [Reserved::default(), Reserved::default()];
        let by_row = Blocks::new(body, &mut operands, &tile, None, &mut one)?;
        let is_few = (1..=FEW_COLUMNS).contains(&columns) && shape[row] > 1;
        let by_rows =
            is_few.then(|| Blocks::new(body, &mut operands, &tile, Some(columns), &mut several)).transpose()?;
        Ok(Epilogue { isa, columns, by_row, by_rows, registers: one.0.max(several.0) })
    }

    /// Scratch memory for [`Epilogue::apply`].
    pub fn needs(&self) -> Needs {
        let several = self.by_rows.as_ref().map_or(0, |blocks| blocks.program.registers);
        Needs {
            bytes: self.registers + self.by_row.program.registers.max(several),
            bases: source(self.by_row.sources.len() + self.by_row.outs.len()),
            ..Needs::default()
        }
    }

    /// Applies the body to a finished tile; `at` are the positions of the operands at row 0 and column 0 of the core's result.
    ///
    /// # Safety
    /// The tile must be readable, and so must the operands over it (the destinations writable); the scratch memory must be what
    /// [`Epilogue::needs`] says. A destination may be the tile itself, or an operand with the same steps.
    pub unsafe fn apply(&self, args: &Args, at: &[isize], tile: &Tile, mem: *mut u8, bases: &mut [*mut u8]) {
        // SAFETY: guaranteed by the caller.
        unsafe {
            if let Some(chain) = self.by_row.chain() {
                return self.apply_chain(chain, args, at, tile, bases);
            }
            match &self.by_rows {
                Some(blocks) if tile.cols.len() == self.columns && tile.stride == self.columns => {
                    self.apply_to_rows(blocks, args, at, tile, mem, bases);
                }
                _ => self.apply_by_row(args, at, tile, mem, bases),
            }
        }
    }

    /// Applies the body to as many whole rows at once as a block has.
    ///
    /// # Safety
    /// As for [`Epilogue::apply`], with a tile of whole rows that has no gaps.
    unsafe fn apply_to_rows(
        &self,
        Blocks { program, sources, outs, .. }: &Blocks,
        args: &Args,
        at: &[isize],
        tile: &Tile,
        mem: *mut u8,
        bases: &mut [*mut u8],
    ) {
        program.bind(mem.wrapping_add(self.registers), bases);
        let (source_at, out_at) = at[..sources.len() + outs.len()].split_at(sources.len());
        let height = BLOCK / self.columns;
        // SAFETY: guaranteed by the caller; a staging block holds a block.
        unsafe {
            program.run_still(self.isa, bases);
            for first in (0..tile.rows.len()).step_by(height) {
                let rows = height.min(tile.rows.len() - first);
                let core = tile.ptr.wrapping_add(first * tile.stride).cast();
                let line = |s: &TileOperand, at: isize| at + (tile.rows.start + first) as isize * s.row;
                for (k, (s, &at)) in sources.iter().zip(source_at).enumerate() {
                    bases[source(k)] = s.read_rows(args, line(s, at), (rows, self.columns), core, mem);
                }
                for (k, (s, &at)) in outs.iter().zip(out_at).enumerate() {
                    bases[program.out(k)] = s.destination(args, line(s, at), core, mem);
                }
                program.run_each(self.isa, rows * self.columns, bases);
                for (s, &at) in outs.iter().zip(out_at) {
                    let Place::Staged(offset) = s.operand.place else { continue };
                    for row in 0..rows {
                        let from = mem.wrapping_add(offset + row * self.columns * s.operand.size);
                        s.spill(args, line(s, at) + row as isize * s.row, &(0..self.columns), from);
                    }
                }
            }
        }
    }

    /// Applies a body that is one chain, whose rows need not be cut into blocks.
    ///
    /// # Safety
    /// As for [`Epilogue::apply`].
    unsafe fn apply_chain(&self, chain: &Chain, args: &Args, at: &[isize], tile: &Tile, bases: &mut [*mut u8]) {
        let Blocks { program, sources, outs, steps } = &self.by_row;
        let first_row = tile.rows.start as isize;
        for ((k, s), &at) in sources.iter().chain(outs).enumerate().zip(at) {
            bases[source(k)] = match s.operand.feed {
                Feed::Core => tile.ptr.cast(),
                _ => args.at(s.operand.arg(), s.position(at + first_row * s.row, tile.cols.start)),
            };
        }
        program.bind(std::ptr::null_mut(), bases);
        let stride = (4 * tile.stride) as isize;
        let rows = Rows { count: tile.rows.len(), len: tile.cols.len(), steps, stride };
        // SAFETY: guaranteed by the caller; a chain alone has no registers.
        unsafe { chain.run(self.isa, &rows, bases) }
    }

    /// Applies the body to one row after the other.
    ///
    /// # Safety
    /// As for [`Epilogue::apply`].
    unsafe fn apply_by_row(&self, args: &Args, at: &[isize], tile: &Tile, mem: *mut u8, bases: &mut [*mut u8]) {
        let Blocks { program, sources, outs, .. } = &self.by_row;
        program.bind(mem.wrapping_add(self.registers), bases);
        let (source_at, out_at) = at[..sources.len() + outs.len()].split_at(sources.len());
        for (r, row) in tile.rows.clone().enumerate() {
            for c in (0..tile.cols.len()).step_by(BLOCK) {
                let cols = tile.cols.start + c..tile.cols.end.min(tile.cols.start + c + BLOCK);
                let core = tile.ptr.wrapping_add(r * tile.stride + c).cast();
                let line = |s: &TileOperand, at: isize| at + row as isize * s.row;
                // SAFETY: guaranteed by the caller; a staging block holds a block.
                unsafe {
                    for (k, (s, &at)) in sources.iter().zip(source_at).enumerate() {
                        bases[source(k)] = s.read(args, line(s, at), &cols, core, mem);
                    }
                    for (k, (s, &at)) in outs.iter().zip(out_at).enumerate() {
                        bases[program.out(k)] = s.destination(args, s.position(line(s, at), cols.start), core, mem);
                    }
                    if c == 0 {
                        program.run_still(self.isa, bases);
                    }
                    program.run_each(self.isa, cols.len(), bases);
                    for (s, &at) in outs.iter().zip(out_at) {
                        let Place::Staged(offset) = s.operand.place else { continue };
                        s.spill(args, line(s, at), &cols, mem.wrapping_add(offset));
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

    /// As [`TileOperand::read`], of some whole rows, the first at `line`, of so many columns.
    ///
    /// # Safety
    /// As for [`Epilogue::apply`].
    #[inline(always)]
    unsafe fn read_rows(
        &self,
        args: &Args,
        line: isize,
        (rows, columns): (usize, usize),
        core: *mut u8,
        mem: *mut u8,
    ) -> *mut u8 {
        let BlockOperand { feed, size, place, step } = self.operand;
        let Place::Staged(offset) = place else {
            return if feed == Feed::Core { core } else { args.at(self.operand.arg(), line) };
        };
        let staged = mem.wrapping_add(offset);
        // SAFETY: guaranteed by the caller.
        unsafe {
            match (&self.cols, feed) {
                (None, Feed::Memory(arg)) => {
                    moves::gather_rows(size, rows, columns, args.at(arg, line), (self.row, step), staged);
                }
                _ => {
                    for row in 0..rows {
                        let to = mem.wrapping_add(row * columns * size);
                        self.read(args, line + row as isize * self.row, &(0..columns), core, to);
                    }
                }
            }
        }
        staged
    }

    /// Where the program writes from a position on; the core's result is at `core`.
    fn destination(&self, args: &Args, position: isize, core: *mut u8, mem: *mut u8) -> *mut u8 {
        match (self.operand.place, self.operand.feed) {
            (Place::Staged(offset), _) => mem.wrapping_add(offset),
            (_, Feed::Memory(arg)) => args.at(arg, position),
            _ => core,
        }
    }

    /// Copies columns from their staging block to the row at `line`.
    ///
    /// # Safety
    /// As for [`Epilogue::apply`].
    unsafe fn spill(&self, args: &Args, line: isize, cols: &Range<usize>, staged: *const u8) {
        let BlockOperand { size, step, .. } = self.operand;
        let scatter = |position, step, done, n| {
            // SAFETY: guaranteed by the caller.
            unsafe {
                moves::scatter(size, n, staged.wrapping_add(done * size), args.at(self.operand.arg(), position), step)
            }
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
