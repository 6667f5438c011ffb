//! The operands of block programs: the values that bodies read and write, and the way that blocks of them reach the registers.

use super::block::Repr;
use super::moves;
use super::nest::Motion;
use super::program::{Frame, Sink, Source};
use super::task::Args;
use plimsoll_core::expr::{Body, Code};
use plimsoll_core::kernel::{Kernel, Operand};

/// The origin or destination of an operand's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Feed {
    /// An argument of the launch.
    Memory(usize),
    /// The index itself.
    Index,
    /// The value that a template computes at each index, ahead of the body.
    Core,
}

/// The way to a block of an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// Block instructions use the memory itself.
    Dense,
    /// One value for the whole run, in memory.
    Still,
    /// One value for the whole run, which is written to this offset of the scratch memory.
    Slot(usize),
    /// By way of a staging block at this offset of the scratch memory.
    Staged(usize),
    /// Dense across rows: by way of staging memory at this offset, where some rows are transposed at once.
    Transposed(usize),
}

/// An operand of a block program.
#[derive(Clone, Copy, Debug)]
pub struct BlockOperand {
    pub feed: Feed,
    /// Bytes of an element.
    pub size: usize,
    pub place: Place,
    /// From one element of a block to the next, in bytes or indices.
    pub step: isize,
}

impl BlockOperand {
    /// The launch's argument.
    pub fn arg(&self) -> usize {
        match self.feed {
            Feed::Memory(arg) => arg,
            Feed::Index | Feed::Core => unreachable!("the operand is memory"),
        }
    }

    /// The address where a program finds `n` elements from `position` on. They are collected in the scratch memory `mem` if need be.
    ///
    /// # Safety
    /// The operand must be readable there, and `mem` be the memory that its place was reserved in. Neither the core's values nor
    /// transposed rows are found this way.
    #[inline(always)]
    pub unsafe fn block(&self, args: &Args, position: isize, n: usize, mem: *mut u8) -> *mut u8 {
        let step = self.step;
        // SAFETY: guaranteed by the caller; a staging block holds a block, and a slot eight bytes.
        unsafe {
            match (self.place, self.feed) {
                (Place::Still | Place::Dense, _) => args.at(self.arg(), position),
                (Place::Slot(offset), _) => {
                    let slot = mem.wrapping_add(offset);
                    slot.cast::<i64>().write_unaligned(position as i64);
                    slot
                }
                (Place::Staged(offset), feed) => {
                    let to = mem.wrapping_add(offset);
                    match feed {
                        Feed::Memory(arg) => moves::gather(self.size, n, args.at(arg, position), step, to),
                        Feed::Index => moves::iota(n, position, step, to.cast()),
                        Feed::Core => unreachable!("the core feeds itself"),
                    }
                    to
                }
                (Place::Transposed(_), _) => unreachable!("rows are transposed together"),
            }
        }
    }
}

/// The operands of bodies, before the ways to their blocks are chosen.
pub struct Operands {
    /// The outside of the bodies: one source per operand that is read.
    pub frame: Frame,
    /// The destinations of the results.
    pub sinks: Vec<Sink>,
    /// The operands, reads before writes: the elements' origin and size.
    feeds: Vec<(Feed, usize)>,
    /// The motion of each over the axes of the index space.
    pub motions: Vec<Motion>,
}

impl Operands {
    /// The operands of bodies over the kernel's index space, and what the kernel writes. Where the template computes a core value of type
    /// `core`, that is the first.
    pub fn new(kernel: &Kernel, bodies: &[Body], core: Option<Repr>) -> Result<Operands, String> {
        let rank = kernel.shape.len();
        let mut operands = Operands::read(kernel, bodies, core, kernel.template.core_reads(), rank)?;
        for (k, operand) in kernel.writes.iter().enumerate() {
            let mut motion = Motion::bytes(operand, 0..operand.access.shape.len());
            motion.steps.resize(rank, 0);
            operands.write(Feed::Memory(kernel.reads.len() + k), stored(operand)?, motion);
        }
        Ok(operands)
    }

    /// The operands of a body over an index space of `rank` axes whose result takes the place of a core value of type `f32`. Further
    /// operands are numbered from `first`.
    pub fn in_place(kernel: &Kernel, body: &Body, first: usize, rank: usize) -> Result<Operands, String> {
        let mut operands = Operands::read(kernel, std::slice::from_ref(body), Some(Repr::F32), first, rank)?;
        let mut motion = Motion::still(rank);
        motion.steps[rank - 1] = Repr::F32.size() as isize;
        operands.write(Feed::Core, Repr::F32, motion);
        Ok(operands)
    }

    fn read(
        kernel: &Kernel,
        bodies: &[Body],
        core: Option<Repr>,
        first: usize,
        rank: usize,
    ) -> Result<Operands, String> {
        let further = kernel.reads[..kernel.further().end].get(first..).unwrap_or_default();
        let before = usize::from(core.is_some());
        let frame = Frame { inputs: vec![None; before + further.len()], ..Frame::default() };
        let mut operands = Operands { frame, sinks: Vec::new(), feeds: Vec::new(), motions: Vec::new() };
        if let Some(repr) = core {
            operands.frame.inputs[0] = Some(operands.source(Feed::Core, repr, Motion::still(rank)));
        }
        let (inputs, axes) = leaves(bodies);
        for j in inputs.into_iter().map(|j| j as usize).filter(|&j| j >= before) {
            let operand = further.get(j - before).ok_or_else(|| format!("a body reads operand {j} of too few"))?;
            let (feed, motion) = (Feed::Memory(first + j - before), Motion::bytes(operand, 0..rank));
            operands.frame.inputs[j] = Some(operands.source(feed, stored(operand)?, motion));
        }
        for axis in axes {
            if axis as usize >= rank {
                return Err(format!("a body reads the index along axis {axis} of {rank}"));
            }
            let source = operands.source(Feed::Index, Repr::I64, Motion::index(axis as usize, rank));
            operands.frame.index.insert(axis, source);
        }
        Ok(operands)
    }

    fn source(&mut self, feed: Feed, repr: Repr, motion: Motion) -> usize {
        self.frame.sources.push(Source { repr, still: false, padded: false });
        self.feeds.push((feed, repr.size()));
        self.motions.push(motion);
        self.frame.sources.len() - 1
    }

    fn write(&mut self, feed: Feed, repr: Repr, motion: Motion) {
        self.sinks.push(Sink::Store(repr));
        self.feeds.push((feed, repr.size()));
        self.motions.push(motion);
    }

    /// The first operand that is written.
    pub fn first_out(&self) -> usize {
        self.feeds.len() - self.sinks.len()
    }

    /// Bytes of an element of an operand.
    pub fn size(&self, k: usize) -> usize {
        self.feeds[k].1
    }

    /// Gives every operand the place and step that `place` chooses by its number, origin and element size. Returns those that are read and
    /// those that are written.
    pub fn place(
        &mut self,
        mut place: impl FnMut(usize, Feed, usize) -> (Place, isize),
    ) -> (Vec<BlockOperand>, Vec<BlockOperand>) {
        let placed = self.feeds.iter().enumerate().map(|(k, &(feed, size))| {
            let (place, step) = place(k, feed, size);
            BlockOperand { feed, size, place, step }
        });
        let mut sources: Vec<BlockOperand> = placed.collect();
        let outs = sources.split_off(self.first_out());
        for (source, operand) in self.frame.sources.iter_mut().zip(&sources) {
            source.still = matches!(operand.place, Place::Still | Place::Slot(_));
            // A core may have its values elsewhere.
            source.padded =
                operand.feed != Feed::Core && matches!(operand.place, Place::Staged(_) | Place::Transposed(_));
        }
        (sources, outs)
    }
}

/// Lists which inputs and which axes bodies read.
pub fn leaves<'a>(bodies: impl IntoIterator<Item = &'a Body>) -> (Vec<u32>, Vec<u32>) {
    let (mut inputs, mut axes) = (Vec::new(), Vec::new());
    for instr in bodies.into_iter().flat_map(|b| &b.code) {
        match instr.code {
            Code::Input(j) => inputs.push(j),
            Code::Index(axis) => axes.push(axis),
            _ => {}
        }
    }
    for list in [&mut inputs, &mut axes] {
        list.sort_unstable();
        list.dedup();
    }
    (inputs, axes)
}

/// The representation of an operand's elements in memory.
pub fn stored(operand: &Operand) -> Result<Repr, String> {
    Repr::stored(operand.dtype).ok_or_else(|| format!("no kernels for {}", operand.dtype))
}

/// Scratch memory as it is handed out, in whole cache lines.
#[derive(Default)]
pub struct Reserved(pub usize);

impl Reserved {
    /// The offset of so many bytes.
    pub fn take(&mut self, size: usize) -> usize {
        let at = self.0;
        self.0 += size.next_multiple_of(64);
        at
    }
}
