//! Bodies applied to finished tiles of a product or a convolution while those are in the cache.

use super::block::{BLOCK, Repr};
use super::gemm::Tile;
use super::map::{leaves, stored};
use super::moves;
use super::nest::{Motion, Nest};
use super::program::{Frame, Program, Sink, Source, source};
use super::simd::Isa;
use super::{Args, Needs};
use crate::expr::Body;
use crate::kernel::Kernel;
use crate::shape::Shape;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Place {
    Dense,
    Still,
    Staged(usize),
}

#[derive(Clone, Debug)]
struct Stream {
    /// The launch's argument; `None` is the index itself, or the tile where it is a destination.
    arg: Option<usize>,
    size: usize,
    place: Place,
    /// Step per row of the core's result.
    row: isize,
    cols: Cols,
}

/// How an operand moves along the columns.
#[derive(Clone, Debug)]
enum Cols {
    Even(isize),
    /// The axes that make up the columns do not act as one for this operand.
    Split(Nest),
}

/// The body of a kernel over the rows and columns of its core's result.
pub struct Epilogue {
    isa: Isa,
    program: Program,
    /// Source 0 is the core value.
    sources: Vec<Stream>,
    outs: Vec<Stream>,
    slots: usize,
    bytes: usize,
}

/// The operands of an epilogue's body as they move over the kernel's axes: what is read, then what is written.
pub struct Operands {
    frame: Frame,
    sinks: Vec<Sink>,
    streams: Vec<(Option<usize>, usize)>,
    /// One per operand.
    pub motions: Vec<Motion>,
}

impl Operands {
    /// Lists what the body of a kernel with a core of `f32` values reads and writes.
    pub fn new(kernel: &Kernel) -> Result<Operands, String> {
        let core = kernel.template.core_reads();
        let mut operands = Operands::read(kernel, &kernel.body, core, &kernel.shape)?;
        for (k, operand) in kernel.writes.iter().enumerate() {
            operands.write(
                Some(kernel.reads.len() + k),
                stored(operand)?,
                Motion::bytes(operand, 0..kernel.shape.len()),
            );
        }
        Ok(operands)
    }

    /// Lists what a body over the indices of `shape` reads, and has its result take the place of the core value. Operands are
    /// numbered from `first`.
    pub fn in_place(kernel: &Kernel, body: &Body, first: usize, shape: &Shape) -> Result<Operands, String> {
        let mut operands = Operands::read(kernel, body, first, shape)?;
        let mut motion = Motion::still(shape.len());
        motion.steps[shape.len() - 1] = Repr::F32.size() as isize;
        operands.write(None, Repr::F32, motion);
        Ok(operands)
    }

    fn write(&mut self, arg: Option<usize>, repr: Repr, motion: Motion) {
        self.sinks.push(Sink::Store(repr));
        self.streams.push((arg, repr.size()));
        self.motions.push(motion);
    }

    fn read(kernel: &Kernel, body: &Body, core: usize, shape: &Shape) -> Result<Operands, String> {
        let rank = shape.len();
        let (inputs, axes) = leaves([body]);
        let mut frame = Frame { inputs: vec![None; kernel.reads.len() - core + 1], ..Frame::default() };
        frame.sources.push(Source { repr: Repr::F32, still: false, padded: false });
        frame.inputs[0] = Some(0);
        let (mut streams, mut motions) = (Vec::new(), Vec::new());
        for j in inputs.into_iter().filter(|&j| j > 0) {
            let read = core + j as usize - 1;
            let operand = kernel.reads[..kernel.further().end].get(read);
            let operand = operand.ok_or_else(|| format!("a body reads operand {j} of too few"))?;
            let repr = stored(operand)?;
            frame.inputs[j as usize] = Some(frame.sources.len());
            frame.sources.push(Source { repr, still: false, padded: false });
            streams.push((Some(read), repr.size()));
            motions.push(Motion::bytes(operand, 0..rank));
        }
        for axis in axes {
            if axis as usize >= rank {
                return Err(format!("a body reads the index along axis {axis} of {rank}"));
            }
            frame.index.insert(axis, frame.sources.len());
            frame.sources.push(Source { repr: Repr::I64, still: false, padded: false });
            streams.push((None, 8));
            motions.push(Motion::index(axis as usize, rank));
        }
        Ok(Operands { frame, sinks: Vec::new(), streams, motions })
    }
}

impl Epilogue {
    /// Compiles a body over the indices of `shape` for a core whose result has the axis `row` as rows and the axes `cols`, joined, as
    /// columns.
    pub fn new(
        body: &Body,
        shape: &Shape,
        isa: Isa,
        operands: Operands,
        row: usize,
        cols: std::ops::Range<usize>,
    ) -> Result<Epilogue, String> {
        let Operands { mut frame, sinks, streams, motions } = operands;
        let reads = frame.sources.len() - 1;
        let mut bytes = 0;
        let mut reserve = |size: usize| {
            bytes += size.next_multiple_of(64);
            bytes - size.next_multiple_of(64)
        };
        let mut place = |k: usize| {
            let (arg, size) = streams[k];
            let along = Motion { steps: motions[k].steps[cols.clone()].to_vec(), start: 0 };
            let nest = Nest::new(&shape[cols.clone()], &[along], None);
            let even = match nest.rank() {
                0 => Some(if k < reads { 0 } else { size as isize }),
                1 => Some(nest.steps[0][0]),
                _ => None,
            };
            let place = match even {
                Some(0) if k < reads => Place::Still,
                Some(s) if s == size as isize && (arg.is_some() || k >= reads) => Place::Dense,
                _ => Place::Staged(reserve(BLOCK * size)),
            };
            Stream { arg, size, place, row: motions[k].steps[row], cols: even.map_or(Cols::Split(nest), Cols::Even) }
        };
        let sources: Vec<Stream> = (0..reads).map(&mut place).collect();
        let outs: Vec<Stream> = (reads..streams.len()).map(&mut place).collect();
        for (source, stream) in frame.sources[1..].iter_mut().zip(&sources) {
            source.still = stream.place == Place::Still;
            source.padded = matches!(stream.place, Place::Staged(_));
        }
        let slots = reserve(8 * sources.len());
        let program = Program::new(body, &frame, &sinks)?;
        Ok(Epilogue { isa, program, sources, outs, slots, bytes })
    }

    /// Scratch memory for [`Epilogue::apply`].
    pub fn needs(&self) -> Needs {
        Needs {
            bytes: self.bytes + self.program.registers,
            bases: source(1 + self.sources.len() + self.outs.len()),
            ..Needs::default()
        }
    }

    /// Applies the body to a finished tile; `at` is where the operands stand at row 0 and column 0 of the core's result.
    ///
    /// # Safety
    /// The tile must be readable, and so must the operands over it (the destinations writable); the scratch memory must be what
    /// [`Epilogue::needs`] says. A destination may be the tile itself, or an operand with the same steps.
    pub unsafe fn apply(&self, args: &Args, at: &[isize], tile: &Tile, mem: *mut u8, bases: &mut [*mut u8]) {
        self.program.bind(mem.wrapping_add(self.bytes), bases);
        let first_out = self.sources.len();
        for (r, row) in tile.rows.clone().enumerate() {
            for c in (0..tile.cols.len()).step_by(BLOCK) {
                let n = BLOCK.min(tile.cols.len() - c);
                let col = tile.cols.start + c;
                bases[source(0)] = tile.ptr.wrapping_add(r * tile.stride + c).cast();
                for (k, s) in self.sources.iter().enumerate() {
                    let line = at[k] + row as isize * s.row;
                    bases[source(k + 1)] = match (s.place, s.arg) {
                        (Place::Staged(offset), arg) => {
                            let to = mem.wrapping_add(offset);
                            s.runs(line, col, n, |position, step, done, len| {
                                let to = to.wrapping_add(done * s.size);
                                // SAFETY: a staging block holds a block; the operand is the caller's word.
                                unsafe {
                                    match arg {
                                        Some(arg) => moves::gather(s.size, len, args.at(arg, position), step, to),
                                        None => moves::iota(len, position, step, to.cast()),
                                    }
                                }
                            });
                            to
                        }
                        (_, Some(arg)) => args.at(arg, s.even(line, col)),
                        (_, None) => {
                            let slot = mem.wrapping_add(self.slots + 8 * k);
                            // SAFETY: eight bytes per source are set aside for this.
                            unsafe { slot.cast::<i64>().write_unaligned(s.even(line, col) as i64) }
                            slot
                        }
                    };
                }
                for (k, s) in self.outs.iter().enumerate() {
                    let line = at[first_out + k] + row as isize * s.row;
                    bases[self.program.out(k)] = match s.place {
                        Place::Staged(offset) => mem.wrapping_add(offset),
                        _ => s.arg.map_or(bases[source(0)], |arg| args.at(arg, s.even(line, col))),
                    };
                }
                // SAFETY: the caller's word.
                unsafe {
                    if c == 0 {
                        self.program.run_still(self.isa, bases);
                    }
                    self.program.run_each(self.isa, n, bases);
                }
                for (k, s) in self.outs.iter().enumerate() {
                    if let (Place::Staged(offset), Some(arg)) = (s.place, s.arg) {
                        let line = at[first_out + k] + row as isize * s.row;
                        s.runs(line, col, n, |position, step, done, len| {
                            let from = mem.wrapping_add(offset + done * s.size);
                            // SAFETY: as for sources.
                            unsafe { moves::scatter(s.size, len, from, args.at(arg, position), step) }
                        });
                    }
                }
            }
        }
    }
}

impl Stream {
    /// The position at a column, given the row's, where columns are evenly spaced.
    fn even(&self, line: isize, col: usize) -> isize {
        match self.cols {
            Cols::Even(step) => line + col as isize * step,
            Cols::Split(_) => unreachable!("uneven columns are staged"),
        }
    }

    /// Calls `f(position, step, elements before, elements)` for every evenly spaced run of `n` columns.
    fn runs(&self, line: isize, col: usize, n: usize, f: impl Fn(isize, isize, usize, usize)) {
        let nest = match &self.cols {
            Cols::Even(step) => return f(line + col as isize * step, *step, 0, n),
            Cols::Split(nest) => nest,
        };
        let inner = *nest.dims.last().expect("columns that are split have axes");
        let mut done = 0;
        while done < n {
            let (mut rest, mut position) = (col + done, line);
            let len = (inner - rest % inner).min(n - done);
            for (dim, steps) in nest.dims.iter().zip(&nest.steps).rev() {
                position += (rest % dim) as isize * steps[0];
                rest /= dim;
            }
            f(position, nest.steps[nest.rank() - 1][0], done, len);
            done += len;
        }
    }
}
