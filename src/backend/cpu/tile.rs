//! Bodies applied to finished tiles of a product or a convolution while those are in the cache.

use super::block::{BLOCK, Repr};
use super::map::{leaves, stored};
use super::moves;
use super::nest::Motion;
use super::program::{Frame, Program, Sink, Source, source};
use super::simd::Isa;
use super::{Args, Needs, Scratch};
use crate::kernel::Kernel;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Place {
    Dense,
    Still,
    Staged(usize),
}

#[derive(Clone, Copy, Debug)]
struct Stream {
    /// The launch's argument; `None` is the index itself.
    arg: Option<usize>,
    size: usize,
    place: Place,
    /// Steps per row and per column of the tile.
    steps: (isize, isize),
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
        let (rank, core) = (kernel.shape.len(), kernel.template.core_reads());
        let (inputs, axes) = leaves([&kernel.body]);
        let mut frame = Frame { inputs: vec![None; kernel.reads.len() - core + 1], ..Frame::default() };
        frame.sources.push(Source { repr: Repr::F32, still: false });
        frame.inputs[0] = Some(0);
        let (mut streams, mut motions) = (Vec::new(), Vec::new());
        for j in inputs.into_iter().filter(|&j| j > 0) {
            let read = core + j as usize - 1;
            let operand = kernel.reads.get(read).ok_or_else(|| format!("a body reads operand {j} of too few"))?;
            let repr = stored(operand)?;
            frame.inputs[j as usize] = Some(frame.sources.len());
            frame.sources.push(Source { repr, still: false });
            streams.push((Some(read), repr.size()));
            motions.push(Motion::bytes(operand, 0..rank));
        }
        for axis in axes {
            if axis as usize >= rank {
                return Err(format!("a body reads the index along axis {axis} of {rank}"));
            }
            frame.index.insert(axis, frame.sources.len());
            frame.sources.push(Source { repr: Repr::I64, still: false });
            streams.push((None, 8));
            motions.push(Motion::index(axis as usize, rank));
        }
        let mut sinks = Vec::new();
        for (k, operand) in kernel.writes.iter().enumerate() {
            let repr = stored(operand)?;
            sinks.push(Sink::Store(repr));
            streams.push((Some(kernel.reads.len() + k), repr.size()));
            motions.push(Motion::bytes(operand, 0..rank));
        }
        Ok(Operands { frame, sinks, streams, motions })
    }
}

impl Epilogue {
    /// Compiles the body for tiles along which the operands take these steps per row and per column.
    pub fn new(kernel: &Kernel, isa: Isa, operands: Operands, steps: &[(isize, isize)]) -> Result<Epilogue, String> {
        let Operands { mut frame, sinks, streams, .. } = operands;
        let reads = frame.sources.len() - 1;
        let mut bytes = 0;
        let mut reserve = |size: usize| {
            bytes += size.next_multiple_of(64);
            bytes - size.next_multiple_of(64)
        };
        let mut place = |k: usize| {
            let (arg, size) = streams[k];
            let place = match steps[k].1 {
                0 if k < reads => Place::Still,
                s if arg.is_some() && s == size as isize => Place::Dense,
                _ => Place::Staged(reserve(BLOCK * size)),
            };
            Stream { arg, size, place, steps: steps[k] }
        };
        let sources: Vec<Stream> = (0..reads).map(&mut place).collect();
        let outs: Vec<Stream> = (reads..streams.len()).map(&mut place).collect();
        for (source, stream) in frame.sources[1..].iter_mut().zip(&sources) {
            source.still = stream.place == Place::Still;
        }
        let slots = reserve(8 * sources.len());
        let program = Program::new(&kernel.body, &frame, &sinks)?;
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

    /// Applies the body to a tile of `rows` by `cols` core values, `stride` elements from row to row; `at` is where the operands stand at
    /// the tile's first element.
    ///
    /// # Safety
    /// The tile must be readable, and so must the operands over it (the destinations writable); the scratch memory must be what
    /// [`Epilogue::needs`] says. A destination may be the tile itself, or an operand with the same steps.
    #[expect(clippy::too_many_arguments, reason = "a tile and its surroundings")]
    pub unsafe fn apply(
        &self,
        args: &Args,
        at: &[isize],
        rows: usize,
        cols: usize,
        tile: *mut f32,
        stride: usize,
        mem: *mut u8,
        bases: &mut [*mut u8],
    ) {
        self.program.bind(mem.wrapping_add(self.bytes), bases);
        let first_out = self.sources.len();
        for r in 0..rows {
            for c in (0..cols).step_by(BLOCK) {
                let n = BLOCK.min(cols - c);
                let position = |k: usize, s: &Stream| at[k] + r as isize * s.steps.0 + c as isize * s.steps.1;
                bases[source(0)] = tile.wrapping_add(r * stride + c).cast();
                for (k, s) in self.sources.iter().enumerate() {
                    bases[source(k + 1)] = match (s.place, s.arg) {
                        (Place::Staged(offset), arg) => {
                            let to = mem.wrapping_add(offset);
                            // SAFETY: a staging block holds a block; the operand is the caller's word.
                            unsafe {
                                match arg {
                                    Some(arg) => moves::gather(s.size, n, args.at(arg, position(k, s)), s.steps.1, to),
                                    None => moves::iota(n, position(k, s), s.steps.1, to.cast()),
                                }
                            }
                            to
                        }
                        (_, Some(arg)) => args.at(arg, position(k, s)),
                        (_, None) => {
                            let slot = mem.wrapping_add(self.slots + 8 * k);
                            // SAFETY: eight bytes per source are set aside for this.
                            unsafe { slot.cast::<i64>().write_unaligned(position(k, s) as i64) }
                            slot
                        }
                    };
                }
                for (k, s) in self.outs.iter().enumerate() {
                    bases[self.program.out(k)] = match s.place {
                        Place::Staged(offset) => mem.wrapping_add(offset),
                        _ => args.at(s.arg.expect("destinations are memory"), position(first_out + k, s)),
                    };
                }
                // SAFETY: the caller's word.
                unsafe {
                    if c == 0 {
                        self.program.run_still(self.isa, bases);
                    }
                    self.program.run_each(self.isa, n, bases);
                    for (k, s) in self.outs.iter().enumerate() {
                        if let (Place::Staged(offset), Some(arg)) = (s.place, s.arg) {
                            let to = args.at(arg, position(first_out + k, s));
                            moves::scatter(s.size, n, mem.wrapping_add(offset), to, s.steps.1);
                        }
                    }
                }
            }
        }
    }
}

/// The parts of scratch memory that an epilogue uses.
pub fn split(scratch: &mut Scratch) -> (*mut u8, &mut [*mut u8], &mut [usize], &mut [isize]) {
    (scratch.mem.as_mut_ptr().cast(), &mut scratch.bases, &mut scratch.index, &mut scratch.at)
}
