//! Convolutions, transposed convolutions and pooling, with the body as their epilogue.

use super::block::Repr;
use super::conv::{Compute, Conv, Image, Share, Tensors};
use super::gemm::{Grid, PANEL_COLS, PANEL_ROWS, Tile, View, pack_a, pack_b, pack_reversed};
use super::operands::Operands;
use super::prologue::{Prologue, Space};
use super::shares::portion;
use super::simd::Isa;
use super::task::{Args, Compiled, Needs, Scratch, Workspace};
use super::tile::Epilogue;
use super::window::{self, Planes, slide};
use plimsoll_core::dtype::DType;
use plimsoll_core::kernel::algorithm::Way;
use plimsoll_core::kernel::cpu::{Plain, Slide, Windowed, slots};
use plimsoll_core::kernel::schedule::prologue::per_position;
use plimsoll_core::kernel::{Kernel, Operand, Pool};
use plimsoll_core::shape::Access;
use std::slice::{from_raw_parts, from_raw_parts_mut};

/// A compiled kernel with a window.
pub struct Sliding {
    isa: Isa,
    windowed: Windowed,
    /// Bytes of an element of the data, and of the weights.
    size: usize,
    prologue: Option<Prologue>,
    epilogue: Option<Epilogue>,
    /// Step of the epilogue's operands from image to image, and where they start; in bytes.
    images: Vec<(isize, isize)>,
    /// Bytes to the first element of data, weights and destination.
    offsets: [isize; 3],
    /// Shape of the weights, and their steps in bytes.
    weights: Vec<(usize, isize)>,
    write: usize,
    /// For how many parts the work is cut, and into how many items.
    parts: usize,
    items: usize,
    workspace: Workspace,
}

impl Sliding {
    /// Compiles a kernel with a window.
    pub fn new(kernel: &Kernel, isa: Isa, threads: usize) -> Result<Sliding, String> {
        let core = kernel.template.core_reads();
        let windowed = Windowed::new(kernel)?;
        let bytes = matches!(windowed.slide, Slide::Conv(conv) if conv.bytes.is_some());
        let halves = matches!(windowed.slide, Slide::Conv(conv) if conv.halves.is_some() && windowed.packed);
        let floats = |(o, r): (usize, &Operand)| r.dtype == DType::F32 || halves && o == 1;
        if !bytes && !kernel.reads[..core].iter().enumerate().all(floats) {
            return Err("a window over other than f32 or bytes".into());
        }
        let value = if bytes { Repr::I32 } else { Repr::F32 };
        let operands = Operands::new(kernel, std::slice::from_ref(&kernel.body), Some(value))?;
        let images = operands.motions.iter().map(|m| (m.steps[0], m.start)).collect();
        let stores_itself = kernel.body.is_identity() && windowed.direct.is_some();
        let epilogue = (!stores_itself).then(|| Epilogue::new(&kernel.body, &kernel.shape, isa, operands, 1, 2..5));
        let epilogue = epilogue.transpose()?;
        let steps = |access: &Access| Some([access.strides[0], access.strides[1], per_position(access)?]);
        let prologue = Prologue::new(kernel, 0, steps)?;
        let takes_prologue =
            matches!(windowed.slide, Slide::Conv(conv) if conv.is_pointwise() && conv.way != Way::Depthwise);
        if prologue.is_some() && !takes_prologue || kernel.prologues.len() > 1 {
            return Err("a prologue of a window that is not a product".into());
        }
        let size = kernel.reads[0].dtype.size() as isize;
        let weights = kernel.reads[..core].get(1).map_or(Vec::new(), |w| {
            w.access.shape.iter().zip(&w.access.strides).map(|(&d, &s)| (d, size * s)).collect()
        });
        let offset = |o: usize| match kernel.reads.get(o) {
            Some(r) if o < core && !r.packed => size * r.access.offset,
            _ => 0,
        };
        let offsets = [offset(0), offset(1), 4 * kernel.writes[0].access.offset];
        let threads_used = if slots(kernel).count > 1 { threads } else { 1 };
        // Twice as many parts as threads even out what else the machine does, when they are large.
        let parts = if threads_used > 1 && windowed.nanoseconds() > 1e6 { 2 * threads_used } else { threads_used };
        let empty = windowed.planes.contains(&0) || kernel.shape.contains(&0);
        let mut this = Sliding {
            isa,
            windowed,
            size: size as usize,
            prologue,
            epilogue,
            images,
            offsets,
            weights,
            write: kernel.reads.len(),
            parts,
            items: 0,
            workspace: Workspace::default(),
        };
        this.items = match this.windowed.slide {
            _ if empty => 0,
            Slide::Conv(conv) => conv.tasks(parts),
            Slide::ConvTranspose(conv) => conv.tasks(parts),
            Slide::Pool(_) => this.planes().len(),
        };
        this.workspace =
            Workspace::new(kernel, threads, if threads_used > 1 { parts.min(this.items) } else { 1.min(this.items) })?;
        Ok(this)
    }

    /// Planes of a pooling, and rows of each, cut for the parts.
    fn planes(&self) -> Grid {
        let planes = self.windowed.planes.iter().product::<usize>();
        let cuts = self.parts.div_ceil(planes.max(1)).min(self.windowed.window.rows().max(1));
        Grid::even(planes, self.windowed.window.rows(), self.parts.min(planes.max(1)), cuts)
    }

    /// The offset of the packed weights in the workspace. Dense ones are before them, if they have to be made dense.
    fn packed_at(&self) -> isize {
        if self.windowed.dense { 0 } else { (self.workspace.shared / 2) as isize }
    }

    /// Packs a task's part of weights that are computed, not constant. Dense ones are packed panel by panel; others by one task, which makes
    /// them dense first.
    ///
    /// # Safety
    /// As for [`Compiled::run`].
    unsafe fn pack(&self, args: &Args, task: usize) {
        let workspace = |at: isize| args.at(self.workspace.arg, at);
        let from = args.at(1, self.offsets[1]).cast_const();
        // SAFETY: the weights were checked to span their memory, and the shared part of the workspace is theirs.
        unsafe {
            if self.windowed.dense {
                let (to, share) = (workspace(self.packed_at()).cast(), (task, self.tasks(0)));
                return match self.windowed.slide {
                    Slide::Conv(conv) if self.windowed.flipped => pack_flipped(&conv, from.cast(), to, share),
                    slide => pack_panels(self.isa, &slide, from.cast(), to, share),
                };
            }
            let count: usize = self.weights.iter().map(|axis| axis.0).product();
            let dense = workspace(0);
            for i in 0..count {
                let (mut rest, mut position) = (i, 0);
                for &(dim, step) in self.weights.iter().rev() {
                    position += (rest % dim) as isize * step;
                    rest /= dim;
                }
                dense.add(i * self.size).copy_from_nonoverlapping(from.offset(position), self.size);
            }
            let to = from_raw_parts_mut(workspace(self.packed_at()), self.windowed.packed_bytes());
            self.windowed.pack(Plain::whole(from_raw_parts(dense.cast_const(), self.size * count)), 0, to);
        }
    }

    fn packs(&self) -> bool {
        // Weights of no elements have no place in the workspace.
        !self.windowed.packed && self.workspace.shared > 0 && self.windowed.packs_weights()
    }
}

/// Packs the panels of dense weights that are a task's, of so many.
///
/// # Safety
/// `from` must be readable for the weights, `to` writable for their packed form. No other thread may use the task's panels.
unsafe fn pack_panels(isa: Isa, slide: &Slide, from: *const f32, to: *mut f32, (task, tasks): (usize, usize)) {
    match slide {
        Slide::Conv(conv) => {
            let outputs = conv.out_channels / conv.groups;
            let (_, _, k) = conv.product();
            let unit = match conv.way {
                // Packed as they are.
                Way::Depthwise => outputs.max(1),
                Way::WeightsLeft => PANEL_ROWS,
                Way::WeightsRight => PANEL_COLS,
                Way::WholeBatch => return,
            };
            let panels = outputs.div_ceil(unit);
            let size = conv.packed_weight_bytes() / size_of::<f32>() / conv.groups.max(1);
            for panel in portion(conv.groups * panels, task, tasks) {
                let (group, first) = (panel / panels, panel % panels * unit);
                let lines = first..outputs.min(first + unit);
                let (from, to) = (from.wrapping_add(group * outputs * k), to.wrapping_add(group * size));
                // SAFETY: guaranteed by the caller.
                unsafe {
                    match conv.way {
                        Way::Depthwise => to.copy_from_nonoverlapping(from, outputs * k),
                        Way::WeightsLeft => pack_a(isa, View { ptr: from, rs: k as isize, cs: 1 }, lines, k, to),
                        _ => pack_b(isa, View { ptr: from, rs: 1, cs: k as isize }, k, lines, to),
                    }
                }
            }
        }
        Slide::ConvTranspose(conv) => {
            let (inputs, outputs) = (conv.in_channels / conv.groups, conv.out_channels / conv.groups);
            let taps = conv.window.taps();
            for item in portion(conv.groups * conv.blocks(), task, tasks) {
                let (group, first) = (item / conv.blocks(), item % conv.blocks() * conv.block());
                let rows = conv.block().min(outputs - first) * taps;
                let ptr = from.wrapping_add((group * inputs * outputs + first) * taps);
                let to = to.wrapping_add((group * outputs + first) * taps * inputs);
                // SAFETY: guaranteed by the caller.
                unsafe { pack_a(isa, View { ptr, rs: 1, cs: (outputs * taps) as isize }, 0..rows, inputs, to) }
            }
        }
        Slide::Pool(_) => {}
    }
}

/// Packs what a task has to pack of the dense weights `[in_channels, out_channels / groups, kernel]` of a transposed convolution, with
/// channels exchanged and taps in reverse.
///
/// # Safety
/// As for [`pack_panels`].
unsafe fn pack_flipped(conv: &Conv, from: *const f32, to: *mut f32, (task, tasks): (usize, usize)) {
    let (inputs, outputs) = (conv.in_channels / conv.groups, conv.out_channels / conv.groups);
    let (taps, k) = (conv.window.taps(), inputs * conv.window.taps());
    // Lines of a panel, and of each step of it.
    let (unit, padded) = match conv.way {
        Way::Depthwise => (1, false),
        Way::WeightsLeft => (PANEL_ROWS, false),
        Way::WeightsRight => (PANEL_COLS, true),
        Way::WholeBatch => return,
    };
    let panels = outputs.div_ceil(unit);
    let size = conv.packed_weight_bytes() / size_of::<f32>() / conv.groups.max(1);
    // Channel by channel, as they are in memory: each has the filters of all panels side by side.
    for channel in portion(conv.groups * inputs, task, tasks) {
        let (group, input) = (channel / inputs, channel % inputs);
        let filters = from.wrapping_add(channel * outputs * taps);
        for panel in 0..panels {
            let first = panel * unit;
            let lines = unit.min(outputs - first);
            let step = if padded { unit } else { lines };
            let to = to.wrapping_add(group * size + first * k + input * taps * step);
            let view = View { ptr: filters.wrapping_add(first * taps), rs: taps as isize, cs: 1 };
            // SAFETY: guaranteed by the caller.
            unsafe {
                pack_reversed(view, lines, taps, to, step);
                for tap in (0..taps).filter(|_| lines < step) {
                    to.add(tap * step + lines).write_bytes(0, step - lines);
                }
            }
        }
    }
}

impl Compiled for Sliding {
    fn needs(&self) -> Needs {
        let needs = self.epilogue.as_ref().map_or(Needs::default(), Epilogue::needs);
        let needs = self.prologue.iter().fold(needs, |needs, prologue| prologue.needs_beside(needs));
        Needs { motions: self.images.len(), tile: self.workspace.tile_bytes(), ..needs }
    }

    fn phases(&self) -> usize {
        if self.packs() { 2 } else { 1 }
    }

    fn tasks(&self, phase: usize) -> usize {
        match phase + 1 < self.phases() {
            true if self.windowed.dense => self.items.min(self.parts),
            true => self.items.min(1),
            false => self.workspace.tasks,
        }
    }

    unsafe fn run(&self, phase: usize, task: usize, args: &Args, scratch: &mut Scratch) {
        if phase + 1 < self.phases() {
            // SAFETY: guaranteed by the caller.
            return unsafe { self.pack(args, task) };
        }
        // SAFETY: the task's own, by the contract of `run`.
        let workspace = unsafe { self.workspace.slot(args, task, scratch) };
        let items = self.workspace.share(self.items, task);
        let Scratch { mem, bases, at, .. } = scratch;
        let at = &mut at[..self.images.len()];
        let [batch_stride, channel_stride] = self.windowed.input;
        let x = Image { ptr: args.at(0, self.offsets[0]).cast_const().cast::<f32>(), batch_stride, channel_stride };
        let apart = |(reads, steps): &(Vec<usize>, [usize; 2])| args.are_apart(self.write, reads).then_some(*steps);
        let direct = self.windowed.direct.or_else(|| self.windowed.sharing.as_ref().and_then(apart));
        let y = direct.map(|[batch_stride, channel_stride]| Image {
            ptr: args.at(self.write, self.offsets[2]).cast::<f32>(),
            batch_stride,
            channel_stride,
        });
        let weights = if self.packs() {
            args.at(self.workspace.arg, self.packed_at()).cast_const().cast::<f32>()
        } else {
            args.at(1, self.offsets[1]).cast_const().cast()
        };
        let mut space = Space { mem: *mem, bases };
        let prologue = self.prologue.as_ref().map(|p| p.bind(args, &p.start, p.take(&mut space)));
        let Space { mem, bases } = space;
        let flipped = self.windowed.flipped;
        let axes = if flipped { [1, 0] } else { [0, 1] };
        let weight_steps = axes.map(|axis| self.weights.get(axis).map_or(0, |(_, step)| step / 4));
        let tensors = Tensors { x, weights, weight_steps, flipped, y, prologue };
        let mut finish = |image: usize, tile: Tile| {
            let Some(epilogue) = &self.epilogue else { return };
            for (at, (step, start)) in at.iter_mut().zip(&self.images) {
                *at = start + image as isize * step;
            }
            // SAFETY: the tile is a part of the kernel's index space.
            unsafe { epilogue.apply(args, at, &tile, mem, bases) }
        };
        for task in items {
            let share = Share { isa: self.isa, parts: self.parts, task };
            // SAFETY: operands were checked to span their memory, and items cover disjoint parts of the result.
            unsafe {
                match self.windowed.slide {
                    Slide::Conv(conv) => conv.run(share, &tensors, workspace, &mut finish),
                    Slide::ConvTranspose(conv) => {
                        let split = conv.workspace_bytes().next_multiple_of(64) / 4;
                        let (space, planes) = workspace.split_at_mut(split);
                        let y = tensors.y.unwrap_or_else(|| {
                            // The item's images and channels are where the workspace is, so the first image begins as many before.
                            let (outputs, block) = (conv.out_channels / conv.groups, task % conv.blocks());
                            let channel = task / conv.blocks() % conv.groups * outputs + block * conv.block();
                            let image = task / conv.blocks() / conv.groups * conv.together();
                            let channel_stride = self.windowed.window.input_len();
                            let batch_stride = conv.block() * channel_stride;
                            let before = image * batch_stride + channel * channel_stride;
                            let ptr = planes.as_mut_ptr().wrapping_sub(before);
                            Image { ptr, batch_stride, channel_stride }
                        });
                        conv.run(share, &Tensors { y: Some(y), ..tensors }, space, &mut finish);
                    }
                    Slide::Pool(pool) => self.pool(pool, task, &tensors, workspace, &mut finish),
                }
            }
        }
    }
}

impl Sliding {
    /// One item of a pooling: some rows of some planes.
    ///
    /// # Safety
    /// As for [`Compiled::run`].
    unsafe fn pool(
        &self,
        pool: Pool,
        item: usize,
        Tensors { x, y, .. }: &Tensors,
        workspace: &mut [f32],
        finish: &mut dyn FnMut(usize, Tile),
    ) {
        let what = match pool {
            Pool::Max => window::Slide::Max,
            Pool::Mean => window::Slide::Average { count_pads: false },
            Pool::MeanPadded { .. } => window::Slide::Average { count_pads: true },
        };
        let w = &self.windowed.window;
        let (space, buffer) = workspace.split_at_mut(w.workspace_bytes().next_multiple_of(64) / 4);
        let (planes, rows) = self.planes().get(item);
        let (channels, mut plane) = (self.windowed.planes[1], planes.start);
        while plane < planes.end {
            let (image, channel) = (plane / channels, plane % channels);
            let count = w.together().min(channels - channel).min(planes.end - plane);
            let from = x.ptr.wrapping_add(image * x.batch_stride + channel * x.channel_stride);
            for first in rows.clone().step_by(w.band()) {
                let rows = first..rows.end.min(first + w.band());
                let cols = rows.start * w.output[2]..rows.end * w.output[2];
                let (ptr, stride) = match y {
                    Some(y) => {
                        let plane = y.ptr.wrapping_add(image * y.batch_stride + channel * y.channel_stride);
                        (plane.wrapping_add(cols.start), y.channel_stride)
                    }
                    None => (buffer.as_mut_ptr(), cols.len()),
                };
                let planes = Planes { count, x: from, x_step: x.channel_stride, y: ptr, y_step: stride, rows };
                // SAFETY: planes of the data, and bands of the result or of the workspace.
                unsafe { slide(self.isa, w, what, planes, space) }
                finish(image, Tile { rows: channel..channel + count, stride, cols, ptr });
            }
            plane += count;
        }
    }
}
