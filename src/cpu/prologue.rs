//! Bodies applied to the packed blocks of a product's operand.

use super::block::{BLOCK, Repr};
use super::gemm::{Change, Part, View, pack_panel};
use super::operands::leaves;
use super::program::{Frame, Program, Sink, Source, source};
use super::simd::Isa;
use super::task::{Args, Needs};
use plimsoll_core::dtype::DType;
use plimsoll_core::error::ensure;
use plimsoll_core::kernel::Kernel;
use plimsoll_core::shape::Access;
use std::ops::Range;

/// An own operand of a prologue; steps in bytes.
#[derive(Clone, Debug)]
struct Own {
    image: isize,
    depth: isize,
    lane: isize,
    /// The offset in the scratch memory where blocks of it are collected; `None` if it stands still.
    staged: Option<usize>,
}

/// The prologue of a core operand, over the depth and the lanes of its panels.
pub struct Prologue {
    program: Program,
    /// The launch's arguments that the own operands are.
    pub reads: Vec<usize>,
    /// Where they begin, in bytes.
    pub start: Vec<isize>,
    own: Vec<Own>,
    staged: usize,
}

/// Scratch memory of which parts are taken.
pub struct Space<'a> {
    /// Bytes, aligned to 64.
    pub mem: *mut u8,
    /// Base pointers.
    pub bases: &'a mut [*mut u8],
}

/// A part of the scratch memory.
#[derive(Clone, Copy)]
pub struct Lent {
    mem: *mut u8,
    bases: *mut *mut u8,
    count: usize,
}

impl Prologue {
    /// Compiles the prologue of an operand, if there is one. `steps` are an access's, in elements: from image to image, along the depth,
    /// from lane to lane.
    pub fn new(
        kernel: &Kernel,
        operand: usize,
        steps: impl Fn(&Access) -> Option<[isize; 3]>,
    ) -> Result<Option<Prologue>, String> {
        let Some((prologue, range)) = kernel.prologue(operand) else { return Ok(None) };
        let mut frame = Frame { inputs: vec![None; 1 + range.len()], ..Frame::default() };
        frame.sources.push(Source { repr: Repr::F32, still: false, padded: false });
        frame.inputs[0] = Some(0);
        let (mut reads, mut start, mut own, mut staged) = (Vec::new(), Vec::new(), Vec::new(), 0);
        ensure(!kernel.reads[operand].packed, || "a prologue of a packed operand".to_owned())?;
        for j in leaves([&prologue.body]).0.into_iter().filter(|&j| j > 0) {
            let read = range.start + j as usize - 1;
            let operand = kernel.reads.get(read).filter(|_| read < range.end);
            let operand = operand.ok_or_else(|| format!("a prologue reads operand {j} of too few"))?;
            ensure(operand.dtype == DType::F32, || format!("a prologue of {}", operand.dtype))?;
            let [image, depth, lane] = steps(&operand.access).ok_or("a prologue whose operand does not move evenly")?;
            let still = depth == 0 && lane == 0;
            frame.inputs[j as usize] = Some(frame.sources.len());
            frame.sources.push(Source { repr: Repr::F32, still, padded: !still });
            reads.push(read);
            start.push(4 * operand.access.offset);
            let at = (!still).then_some(staged);
            own.push(Own { image: 4 * image, depth: 4 * depth, lane: 4 * lane, staged: at });
            staged += if still { 0 } else { 4 * BLOCK };
        }
        let program = Program::new(&prologue.body, &frame, &[Sink::Store(Repr::F32)])?;
        Ok(Some(Prologue { program, reads, start, own, staged }))
    }

    fn bytes(&self) -> usize {
        (self.staged + self.program.registers).next_multiple_of(64)
    }

    fn bases(&self) -> usize {
        source(1 + self.own.len() + 1)
    }

    /// Scratch memory for itself and for something else.
    pub fn needs_beside(&self, other: Needs) -> Needs {
        Needs { bytes: self.bytes() + other.bytes, bases: self.bases() + other.bases, ..other }
    }

    /// Takes its part of the scratch memory.
    pub fn take(&self, space: &mut Space) -> Lent {
        let (first, rest) = std::mem::take(&mut space.bases).split_at_mut(self.bases());
        let lent = Lent { mem: space.mem, bases: first.as_mut_ptr(), count: first.len() };
        *space = Space { mem: space.mem.wrapping_add(self.bytes()), bases: rest };
        lent
    }

    /// The prologue of one matrix; `at` are the positions of its own operands.
    pub fn bind<'a>(&'a self, args: &'a Args, at: &'a [isize], lent: Lent) -> Bound<'a> {
        Bound { prologue: self, args, at, lent, image: 0, skip: 0 }
    }
}

/// A prologue with its operands and scratch memory, for one thread.
#[derive(Clone, Copy)]
pub struct Bound<'a> {
    prologue: &'a Prologue,
    args: &'a Args,
    at: &'a [isize],
    lent: Lent,
    image: usize,
    /// Depth before the matrix.
    skip: usize,
}

// SAFETY: whoever calls `change` vouches for the scratch memory, which is one thread's.
unsafe impl Sync for Bound<'_> {}

impl Bound<'_> {
    /// The prologue of a matrix in an image, `skip` deep.
    pub fn of_image(self, image: usize, skip: usize) -> Self {
        Bound { image, skip, ..self }
    }

    /// The address of an own operand at an element of the matrix.
    fn address(&self, number: usize, depth: usize, lane: usize) -> *mut u8 {
        let own = &self.prologue.own[number];
        let steps = [(self.image, own.image), (self.skip + depth, own.depth), (lane, own.lane)];
        let position = steps.into_iter().map(|(n, step)| n as isize * step).sum::<isize>();
        self.args.at(self.prologue.reads[number], self.at[number] + position)
    }
}

impl Bound<'_> {
    /// Collects an operand for some lanes over a range of the depth, in the order of a panel.
    ///
    /// # Safety
    /// The operand must be readable there, its part of the scratch memory writable.
    unsafe fn stage(&self, isa: Isa, number: usize, k: Range<usize>, lanes: Range<usize>, step: usize, to: *mut f32) {
        let Own { depth, lane, .. } = self.prologue.own[number];
        let ptr = self.address(number, k.start, lanes.start).cast_const().cast::<f32>();
        // SAFETY: guaranteed by the caller.
        unsafe {
            if lane != 0 {
                return pack_panel(isa, View { ptr, rs: lane / 4, cs: depth / 4 }, lanes.len(), k.len(), to, step);
            }
            for p in 0..k.len() {
                let value = *ptr.byte_offset(p as isize * depth);
                std::slice::from_raw_parts_mut(to.add(p * step), step).fill(value);
            }
        }
    }
}

impl Change for Bound<'_> {
    unsafe fn change(&self, isa: Isa, part: Part, block: *mut f32) {
        let Part { k, lanes, width, padded } = part;
        if k.is_empty() || lanes.is_empty() {
            return;
        }
        let Prologue { program, own, staged, .. } = self.prologue;
        // SAFETY: the scratch memory was taken for this, is this thread's, and outlives the run; the operands were checked to span their
        // memory; whole steps of a panel are no more than `BLOCK` elements.
        unsafe {
            let bases = std::slice::from_raw_parts_mut(self.lent.bases, self.lent.count);
            program.bind(self.lent.mem.wrapping_add(*staged), bases);
            for (number, own) in own.iter().enumerate() {
                bases[source(1 + number)] = match own.staged {
                    Some(offset) => self.lent.mem.wrapping_add(offset),
                    None => self.address(number, k.start, lanes.start),
                };
            }
            program.run_still(isa, bases);
            let (most, start) = (BLOCK / width, lanes.start);
            for from in k.clone().step_by(most) {
                let these = from..k.end.min(from + most);
                // An operand that is the same for all lanes is collected for the first panel, and again if the last is narrower.
                let mut collected = 0;
                for first in lanes.clone().step_by(width) {
                    let lanes = first..lanes.end.min(first + width);
                    let step = if padded { width } else { lanes.len() };
                    for (number, own) in own.iter().enumerate().filter(|(_, own)| own.staged.is_some()) {
                        if own.lane != 0 || collected != step {
                            let to = bases[source(1 + number)].cast();
                            self.stage(isa, number, these.clone(), lanes.clone(), step, to);
                        }
                    }
                    collected = step;
                    // Panels before this one are full.
                    let panel = block.add((first - start) * k.len() + (from - k.start) * step);
                    bases[source(0)] = panel.cast();
                    bases[program.out(0)] = panel.cast();
                    program.run_each(isa, these.len() * step, bases);
                    for p in 0..if lanes.len() < step { these.len() } else { 0 } {
                        panel.add(p * step + lanes.len()).write_bytes(0, step - lanes.len());
                    }
                }
            }
        }
    }
}
