//! Cores whose values are elements of another index: gather, pad, resize, sums by index, and the gradient of a maximum of windows.

use super::block::Repr;
use super::filters;
use super::map::{Core, CoreSpec};
use super::moves;
use super::nest::Motion;
use super::operands::stored;
use super::program::literal;
use super::task::Args;
use plimsoll_core::error::ensure;
use plimsoll_core::kernel::{Kernel, Nearest, PadMode, ResizeMode, Template, Window};
use plimsoll_core::shape::Shape;
use std::ops::Range;

/// Prepares the core of a template whose values are found one by one.
pub fn core(kernel: &Kernel) -> Result<CoreSpec<'_>, String> {
    match &kernel.template {
        Template::Gather { strides, extents } => gather(kernel, strides, extents),
        Template::Pad { before, mode } => pad(kernel, before, *mode),
        Template::Resize { scales, offsets, mode } => resize(kernel, scales, offsets, *mode),
        Template::ConvFilters { .. } => filters::core(kernel),
        Template::PoolGrad { window } => pool_grad(kernel, window),
        Template::SumByIndex => sum_by_index(kernel),
        other => Err(format!("a core of template '{}'", other.name())),
    }
}

fn gather<'a>(kernel: &Kernel, strides: &[isize], extents: &[usize]) -> Result<CoreSpec<'a>, String> {
    let rank = kernel.shape.len();
    let repr = stored(&kernel.reads[0])?;
    let (data, indices) = (&kernel.reads[0], &kernel.reads[1..1 + strides.len()]);
    let mut axes = Vec::new();
    for ((operand, &stride), &extent) in indices.iter().zip(strides).zip(extents) {
        let repr = stored(operand)?;
        ensure(matches!(repr, Repr::I64 | Repr::I32), || format!("indices of type {}", operand.dtype))?;
        axes.push(Indexed {
            wide: repr == Repr::I64,
            extent: extent as i64,
            stride: stride * data.dtype.size() as isize,
        });
    }
    let motions = std::iter::once(data).chain(indices).map(|o| Motion::bytes(o, 0..rank)).collect();
    let size = repr.size();
    Ok(CoreSpec {
        repr,
        motions,
        cost: 0.5,
        tables: 0,
        build: Box::new(move |steps, _| Box::new(Gather { axes, size, steps: steps.to_vec() })),
    })
}

struct Indexed {
    wide: bool,
    extent: i64,
    /// In bytes of the data.
    stride: isize,
}

struct Gather {
    axes: Vec<Indexed>,
    size: usize,
    /// Along the innermost axis: the data's, then the indices'.
    steps: Vec<isize>,
}

impl Indexed {
    /// Bytes from the data's base to the element that an index names.
    ///
    /// # Safety
    /// `index` must be readable.
    #[inline(always)]
    unsafe fn offset(&self, index: *const u8) -> isize {
        // SAFETY: guaranteed by the caller.
        let i = unsafe {
            if self.wide {
                index.cast::<i64>().read_unaligned()
            } else {
                i64::from(index.cast::<i32>().read_unaligned())
            }
        };
        let i = if i < 0 { i.wrapping_add(self.extent) } else { i };
        i.clamp(0, self.extent - 1) as isize * self.stride
    }
}

impl Core for Gather {
    unsafe fn feed(&self, args: &Args, at: &[isize], start: usize, n: usize, to: *mut u8) -> *const u8 {
        let start = start as isize;
        let index = |j: usize, i: isize| args.at(1 + j, at[1 + j] + (start + i) * self.steps[1 + j]).cast_const();
        // SAFETY: indices were checked to span their memory and are clamped, so that data is read inside its own.
        unsafe {
            if self.steps[1..].iter().all(|&s| s == 0) {
                let offset: isize = self.axes.iter().enumerate().map(|(j, axis)| axis.offset(index(j, 0))).sum();
                let from = args.at(0, at[0] + start * self.steps[0] + offset);
                if self.steps[0] == self.size as isize {
                    return from;
                }
                moves::gather(self.size, n, from, self.steps[0], to);
            } else {
                for i in 0..n as isize {
                    let offset: isize = self.axes.iter().enumerate().map(|(j, axis)| axis.offset(index(j, i))).sum();
                    let from = args.at(0, at[0] + (start + i) * self.steps[0] + offset);
                    moves::gather(self.size, 1, from, 0, to.offset(i * self.size as isize));
                }
            }
        }
        to
    }
}

/// An element that is not in the data.
const OUTSIDE: isize = isize::MIN;

fn pad<'a>(kernel: &'a Kernel, before: &[isize], mode: PadMode) -> Result<CoreSpec<'a>, String> {
    let data = &kernel.reads[0].access.shape;
    let mut maps: Vec<Option<AxisMap>> = Vec::new();
    for ((&extent, &n), &before) in kernel.shape.iter().zip(data.iter()).zip(before) {
        if before == 0 && extent == n {
            maps.push(None);
            continue;
        }
        let n = n as i64;
        let source = move |i: usize| {
            let i = i as i64 - before as i64;
            Some(match mode {
                _ if (0..n).contains(&i) => i as usize,
                PadMode::Constant(_) => return None,
                PadMode::Edge => i.clamp(0, n - 1) as usize,
                PadMode::Wrap => i.rem_euclid(n) as usize,
                PadMode::Reflect if n == 1 => 0,
                PadMode::Reflect => {
                    let i = i.rem_euclid(2 * (n - 1));
                    i.min(2 * (n - 1) - i) as usize
                }
            })
        };
        maps.push(Some(Box::new(source)));
    }
    let value = if let PadMode::Constant(value) = mode { value } else { 0.0 };
    mapped(kernel, maps, value)
}

/// The coordinate of the data that an index of an axis reads; `None` if it is outside.
type AxisMap<'a> = Box<dyn Fn(usize) -> Option<usize> + 'a>;

/// A resize: per axis, the index of the data as a function of that of the result.
#[derive(Clone, Copy)]
struct Resizing<'a> {
    kernel: &'a Kernel,
    data: &'a Shape,
    scales: &'a [f64],
    offsets: &'a [f64],
}

impl<'a> Resizing<'a> {
    /// True if an axis stays as it is.
    fn is_still(&self, axis: usize) -> bool {
        self.scales[axis] == 1.0 && self.offsets[axis] == 0.0 && self.data[axis] == self.kernel.shape[axis]
    }

    fn position(&self, axis: usize, i: usize) -> f64 {
        i as f64 * self.scales[axis] + self.offsets[axis]
    }

    fn clamp(&self, axis: usize, i: f64) -> usize {
        (i as i64).clamp(0, self.data[axis] as i64 - 1) as usize
    }

    /// The element that each index of an axis reads; `None` if the axis stays as it is.
    fn nearest(self, axis: usize, rule: Nearest) -> Option<AxisMap<'a>> {
        let source = move |i: usize| Some(self.clamp(axis, rule.choose(self.position(axis, i))));
        (!self.is_still(axis)).then(|| Box::new(source) as AxisMap)
    }

    /// The elements that make up each index of an axis, `step` bytes apart.
    fn taps(&self, axis: usize, mode: ResizeMode, step: isize) -> Taps {
        let count = taps_of(mode);
        let mut taps = Vec::with_capacity(self.kernel.shape[axis] * count);
        for i in 0..self.kernel.shape[axis] {
            let found = neighbours(mode, self.position(axis, i), self.data[axis]);
            taps.extend(found.into_iter().map(|(i, w)| (self.clamp(axis, i) as isize * step, w as f32)));
        }
        Taps { taps, count }
    }
}

/// Prepares interpolation.
fn resize<'a>(
    kernel: &'a Kernel,
    scales: &'a [f64],
    offsets: &'a [f64],
    mode: ResizeMode,
) -> Result<CoreSpec<'a>, String> {
    let (data, rank) = (&kernel.reads[0].access.shape, kernel.shape.len());
    let resizing = Resizing { kernel, data, scales, offsets };
    if let ResizeMode::Nearest(rule) = mode {
        return mapped(kernel, (0..rank).map(|axis| resizing.nearest(axis, rule)).collect(), 0.0);
    }
    ensure(stored(&kernel.reads[0])? == Repr::F32, || format!("interpolation of {}", kernel.reads[0].dtype))?;
    let access = &kernel.reads[0].access;
    let mut data_motion = Motion { steps: vec![0; rank], start: 4 * access.offset };
    let (mut motions, mut axes) = (Vec::new(), Vec::new());
    for axis in 0..rank {
        let step = 4 * access.strides[axis];
        if resizing.is_still(axis) {
            data_motion.steps[axis] = step;
        } else {
            motions.push(Motion::index(axis, rank));
            axes.push((axis, step));
        }
    }
    motions.insert(0, data_motion);
    let rows: usize = axes.iter().map(|&(axis, _)| kernel.shape[axis]).sum();
    Ok(CoreSpec {
        repr: Repr::F32,
        motions,
        cost: (taps_of(mode) as f64).powi(axes.len() as i32),
        tables: (rows as u64).saturating_mul((taps_of(mode) * size_of::<(isize, f32)>()) as u64),
        build: Box::new(move |steps, _| {
            let axes: Vec<Taps> = axes.into_iter().map(|(axis, step)| resizing.taps(axis, mode, step)).collect();
            let inner = axes.iter().enumerate().position(|(k, _)| steps[1 + k] != 0);
            Box::new(Blend { step: steps[0], inner, axes })
        }),
    })
}

/// The coordinates around `x` that an interpolation looks at along an axis of `n` elements, and their weights: always the same number.
fn neighbours(mode: ResizeMode, x: f64, n: usize) -> Vec<(f64, f64)> {
    let ResizeMode::Cubic { a, exclude_outside } = mode else {
        let x = x.clamp(0.0, n as f64 - 1.0);
        let f = x - x.floor();
        return vec![(x.floor(), 1.0 - f), (x.floor() + 1.0, f)];
    };
    let weight = |d: f64| match d.abs() {
        d if d <= 1.0 => ((a + 2.0) * d - (a + 3.0)) * d * d + 1.0,
        d if d < 2.0 => ((a * d - 5.0 * a) * d + 8.0 * a) * d - 4.0 * a,
        _ => 0.0,
    };
    let outside = |i: f64| exclude_outside && !(0.0..n as f64).contains(&i);
    let mut taps: Vec<(f64, f64)> =
        (-1..3).map(|k| x.floor() + f64::from(k)).map(|i| (i, if outside(i) { 0.0 } else { weight(x - i) })).collect();
    if exclude_outside {
        let total: f64 = taps.iter().map(|t| t.1).sum();
        taps.iter_mut().for_each(|t| t.1 /= total);
    }
    taps
}

/// The number of coordinates that [`neighbours`] returns.
fn taps_of(mode: ResizeMode) -> usize {
    if matches!(mode, ResizeMode::Cubic { .. }) { 4 } else { 2 }
}

/// Prepares a core that reads one element per index. `maps` has, per axis that does not stay as it is, the coordinate that each index
/// reads, or none for `value`.
fn mapped<'a>(kernel: &'a Kernel, maps: Vec<Option<AxisMap<'a>>>, value: f64) -> Result<CoreSpec<'a>, String> {
    let operand = &kernel.reads[0];
    let (rank, repr) = (kernel.shape.len(), stored(operand)?);
    let size = repr.size();
    let access = &operand.access;
    let mut data = Motion { steps: vec![0; rank], start: access.offset * size as isize };
    let (mut motions, mut tables) = (Vec::new(), Vec::new());
    for (axis, map) in maps.into_iter().enumerate() {
        let step = access.strides[axis].wrapping_mul(size as isize);
        match map {
            None => data.steps[axis] = step,
            Some(map) => {
                motions.push(Motion::index(axis, rank));
                tables.push((kernel.shape[axis], step, map));
            }
        }
    }
    motions.insert(0, data);
    let rows: usize = tables.iter().map(|table| table.0).sum();
    Ok(CoreSpec {
        repr,
        motions,
        cost: 0.3,
        tables: (rows as u64).saturating_mul((size_of::<isize>() + size_of::<u32>()) as u64),
        build: Box::new(move |steps, _| {
            let table = |(extent, step, map): (usize, isize, AxisMap)| {
                let offsets = (0..extent).map(|i| map(i).map_or(OUTSIDE, |i| i as isize * step)).collect();
                Table::new(offsets, size as isize)
            };
            let tables: Vec<Table> = tables.into_iter().map(table).collect();
            let inner = tables.iter().enumerate().position(|(k, _)| steps[1 + k] != 0);
            Box::new(Mapped { tables, inner, step: steps[0], size, value: literal(value, repr) })
        }),
    })
}

/// The offset in bytes that each index of an axis reads at.
struct Table {
    offsets: Vec<isize>,
    /// The number of indices from each on that read neighbours, or that are all outside.
    runs: Vec<u32>,
}

impl Table {
    fn new(offsets: Vec<isize>, size: isize) -> Table {
        let mut runs = vec![1u32; offsets.len()];
        for i in (1..offsets.len()).rev() {
            let (a, b) = (offsets[i - 1], offsets[i]);
            let joins = if a == OUTSIDE || b == OUTSIDE { a == b } else { a + size == b };
            if joins {
                runs[i - 1] = runs[i].saturating_add(1);
            }
        }
        Table { offsets, runs }
    }
}

struct Mapped {
    tables: Vec<Table>,
    /// The table of the innermost axis, if it has one; its step along that axis if not.
    inner: Option<usize>,
    step: isize,
    size: usize,
    value: u64,
}

impl Mapped {
    /// # Safety
    /// `to` must be writable for `n` elements.
    unsafe fn fill(&self, n: usize, to: *mut u8) {
        let value = self.value.to_le_bytes();
        // SAFETY: guaranteed by the caller; no element is larger than eight bytes.
        unsafe { moves::gather(self.size, n, value.as_ptr(), 0, to) }
    }
}

impl Core for Mapped {
    unsafe fn feed(&self, args: &Args, at: &[isize], start: usize, n: usize, to: *mut u8) -> *const u8 {
        let mut base = at[0];
        for (k, table) in self.tables.iter().enumerate().filter(|(k, _)| Some(*k) != self.inner) {
            match table.offsets[at[1 + k] as usize] {
                // SAFETY: guaranteed by the caller.
                OUTSIDE => unsafe {
                    self.fill(n, to);
                    return to;
                },
                offset => base += offset,
            }
        }
        // SAFETY: the offsets are those of elements of the data, which was checked to span its memory.
        unsafe {
            let Some(inner) = self.inner else {
                let from = args.at(0, base + start as isize * self.step);
                if self.step == self.size as isize {
                    return from;
                }
                moves::gather(self.size, n, from, self.step, to);
                return to;
            };
            let table = &self.tables[inner];
            let first = at[1 + inner] as usize + start;
            let mut i = 0;
            while i < n {
                let len = (table.runs[first + i] as usize).min(n - i);
                let to = to.add(i * self.size);
                match table.offsets[first + i] {
                    OUTSIDE => self.fill(len, to),
                    offset => moves::gather(self.size, len, args.at(0, base + offset), self.size as isize, to),
                }
                i += len;
            }
        }
        to
    }
}

/// The elements that make up each index of an axis: bytes to them, and weights; as many for every index.
struct Taps {
    taps: Vec<(isize, f32)>,
    count: usize,
}

struct Blend {
    axes: Vec<Taps>,
    /// The number of the innermost of them, if that is resized; its step if not.
    inner: Option<usize>,
    step: isize,
}

impl Core for Blend {
    unsafe fn feed(&self, args: &Args, at: &[isize], start: usize, n: usize, to: *mut u8) -> *const u8 {
        let sums = to.cast::<f32>();
        // SAFETY: guaranteed by the caller.
        unsafe { to.write_bytes(0, 4 * n) }
        let outer = |k: usize| Some(k) != self.inner;
        let rows: usize = self.axes.iter().enumerate().filter(|(k, _)| outer(*k)).map(|(_, a)| a.count).product();
        for row in 0..rows {
            let (mut rest, mut base, mut weight) = (row, at[0], 1.0);
            for (k, axis) in self.axes.iter().enumerate().filter(|(k, _)| outer(*k)) {
                let (offset, w) = axis.taps[at[1 + k] as usize * axis.count + rest % axis.count];
                rest /= axis.count;
                base += offset;
                weight *= w;
            }
            if weight == 0.0 {
                continue;
            }
            // SAFETY: the offsets are those of elements of the data, which was checked to span its memory.
            unsafe {
                match self.inner {
                    None => {
                        let from = args.at(0, base + start as isize * self.step);
                        for i in 0..n {
                            *sums.add(i) += weight * from.offset(i as isize * self.step).cast::<f32>().read();
                        }
                    }
                    Some(inner) => {
                        let axis = &self.axes[inner];
                        let first = at[1 + inner] as usize + start;
                        let from = args.at(0, base).cast_const();
                        match axis.count {
                            2 => blend::<2>(&axis.taps[2 * first..], n, weight, from, sums),
                            _ => blend::<4>(&axis.taps[4 * first..], n, weight, from, sums),
                        }
                    }
                }
            }
        }
        to
    }
}

/// `sums[i] += weight * (the element that taps make up)`.
///
/// # Safety
/// Taps must lead from `from` to readable elements; `sums` must be writable for `n`.
unsafe fn blend<const T: usize>(taps: &[(isize, f32)], n: usize, weight: f32, from: *const u8, sums: *mut f32) {
    for (i, taps) in taps.chunks_exact(T).take(n).enumerate() {
        let mut sum = 0.0;
        for &(offset, w) in taps {
            // SAFETY: guaranteed by the caller.
            sum += w * unsafe { from.offset(offset).cast::<f32>().read() };
        }
        // SAFETY: `i < n`.
        unsafe { *sums.add(i) += weight * sum }
    }
}

/// Prepares the gradient of a maximum of windows.
fn pool_grad<'a>(kernel: &'a Kernel, window: &'a Window) -> Result<CoreSpec<'a>, String> {
    let rank = kernel.shape.len();
    let operands = &kernel.reads[..3];
    for operand in operands {
        ensure(stored(operand)? == Repr::F32, || format!("gradients of maxima of {}", operand.dtype))?;
    }
    // By image and channel. Along the spatial axes the core itself moves, by the number of the element in its image.
    let base = |operand| {
        let mut motion = Motion::bytes(operand, 0..rank);
        motion.steps[2..].fill(0);
        motion
    };
    let mut number = Motion::still(rank);
    for axis in 2..rank {
        number.steps[axis] = kernel.shape[axis + 1..].iter().product::<usize>() as isize;
    }
    let motions = operands.iter().map(base).chain([number]).collect();
    let spatial = |i: usize| {
        let access = &operands[i].access;
        let strides = &access.strides[2..];
        [4 * strides[0], 4 * strides[1], 4 * strides[2]]
    };
    let data = &operands[0].access.shape;
    let places = &operands[1].access.shape;
    Ok(CoreSpec {
        repr: Repr::F32,
        motions,
        cost: 0.5 * window.kernel.iter().product::<usize>() as f64,
        tables: 0,
        build: Box::new(move |steps, _| {
            Box::new(PoolGrad {
                window: window.clone(),
                data: [data[2], data[3], data[4]],
                places: [places[2], places[3], places[4]],
                strides: [spatial(0), spatial(1), spatial(2)],
                steps: steps.try_into().expect("four motions"),
            })
        }),
    })
}

/// Windows that are searched side by side.
const STRETCH: usize = 64;

/// The element of a window whose maximum is in another row of the image.
const NOWHERE: u32 = u32::MAX;

struct PoolGrad {
    window: Window,
    /// The spatial extents of the input, and the number of windows along each axis.
    data: [usize; 3],
    places: [usize; 3],
    /// Per operand, bytes along the spatial axes: of the input, the maxima, their gradients.
    strides: [[isize; 3]; 3],
    /// Along the innermost axis: those of the operands, then of the element's number.
    steps: [isize; 4],
}

impl PoolGrad {
    /// The windows along an axis that reach elements `from..=to`.
    fn reaching(&self, axis: usize, from: usize, to: usize) -> Range<usize> {
        let Window { kernel, strides, dilations, pads } = &self.window;
        let first = (from + pads[axis]).saturating_sub((kernel[axis] - 1) * dilations[axis]).div_ceil(strides[axis]);
        first..((to + pads[axis]) / strides[axis] + 1).min(self.places[axis])
    }

    /// Bytes of an operand to an index.
    fn to(&self, operand: usize, index: [usize; 3]) -> isize {
        (0..3).map(|k| index[k] as isize * self.strides[operand][k]).sum()
    }

    /// The windows along the rows, of some, whose tap `tap` is inside the image.
    fn inside(&self, tap: usize, windows: &Range<usize>) -> Range<usize> {
        let (stride, pad, tap) = (self.window.strides[2], self.window.pads[2], tap * self.window.dilations[2]);
        let end = self.data[2] + pad;
        // Only windows at the ends of a row are cut, so the divisions are rare.
        let is_first = windows.start * stride + tap >= pad;
        let is_last = windows.end.saturating_sub(1) * stride + tap < end;
        let start = if is_first { windows.start } else { (pad - tap).div_ceil(stride) };
        start..if is_last { windows.end } else { end.saturating_sub(tap).div_ceil(stride) }
    }

    /// Adds the gradients that go to elements `wanted` of an image to `sums`: of each window, to the first element that is its maximum. An
    /// element's windows are added in their order.
    ///
    /// # Safety
    /// The addresses must be those of one image in each operand.
    unsafe fn add(&self, [image, maxima, gradients]: [*const u8; 3], wanted: Range<usize>, sums: *mut f32) {
        let [_, height, width] = self.data;
        let (stride, pad) = (self.window.strides[2], self.window.pads[2]);
        let rows = wanted.start / width..(wanted.end - 1) / width + 1;
        let (first, last) = (rows.start, rows.end - 1);
        let is_plane = first / height == last / height;
        let (top, bottom) = if is_plane { (first % height, last % height) } else { (0, height - 1) };
        let before = wanted.start - first * width;
        let (left, right) = if rows.len() == 1 { (before, before + wanted.len() - 1) } else { (0, width - 1) };
        let across = self.reaching(2, left, right);
        for z in self.reaching(0, first / height, last / height) {
            for y in self.reaching(1, top, bottom) {
                for start in across.clone().step_by(STRETCH) {
                    let windows = start..across.end.min(start + STRETCH);
                    // SAFETY: windows are inside the operands, and `sums` has the wanted elements.
                    unsafe {
                        let maxima = maxima.offset(self.to(1, [z, y, start]));
                        let gradients = gradients.offset(self.to(2, [z, y, start]));
                        let found = self.search(image, maxima, [z, y], &rows, windows.clone());
                        for (at, &element) in found[..windows.len()].iter().enumerate() {
                            // Windows whose maximum is elsewhere add a zero to some element: guessing which they are costs more.
                            let to = (element as usize + (start + at) * stride).wrapping_sub(pad + before);
                            let is_here = element < NOWHERE && to < wanted.len();
                            let gradient = gradients.offset(at as isize * self.strides[2][2]).cast::<f32>().read();
                            let sum = sums.add(if is_here { to } else { 0 });
                            *sum += if is_here { gradient } else { 0.0 };
                        }
                    }
                }
            }
        }
    }

    /// Of some windows of a row of windows, the first element that is the maximum: its number from the first of `rows` on, as if its window
    /// were the image's first and had no padding before it. [`NOWHERE`] if it is in another row.
    ///
    /// # Safety
    /// The image must be one, and `maxima` the first window's.
    unsafe fn search(
        &self,
        image: *const u8,
        maxima: *const u8,
        place: [usize; 2],
        rows: &Range<usize>,
        windows: Range<usize>,
    ) -> [u32; STRETCH] {
        let Window { kernel, strides, dilations, pads } = &self.window;
        let (mut most, mut elements) = ([0f32; STRETCH], [NOWHERE; STRETCH]);
        for (i, most) in most[..windows.len()].iter_mut().enumerate() {
            // SAFETY: windows are inside the operand.
            *most = unsafe { maxima.offset(i as isize * self.strides[1][2]).cast::<f32>().read() };
        }
        let line = |axis: usize, tap: usize| {
            let at = (place[axis] * strides[axis] + tap * dilations[axis]).checked_sub(pads[axis]);
            at.filter(|&at| at < self.data[axis])
        };
        // From the last line to the first: what is found earlier in a window overwrites what is behind it.
        for tz in (0..kernel[0]).rev() {
            for ty in (0..kernel[1]).rev() {
                let (Some(z), Some(y)) = (line(0, tz), line(1, ty)) else { continue };
                let row = z * self.data[1] + y;
                if row >= rows.end {
                    continue;
                }
                let line = image.wrapping_offset(self.to(0, [z, y, 0]));
                for tap in (0..kernel[2]).rev() {
                    let Range { start, end } = self.inside(tap, &windows);
                    if start >= end {
                        continue;
                    }
                    let ahead = row.checked_sub(rows.start).map(|row| row * self.data[2] + tap * dilations[2]);
                    let found = ahead.map_or(NOWHERE, |ahead| ahead as u32);
                    let column = start * strides[2] + tap * dilations[2] - pads[2];
                    let from = line.wrapping_offset(column as isize * self.strides[0][2]);
                    let here = start - windows.start..end - windows.start;
                    let lanes = elements[here.clone()].iter_mut().zip(&most[here]);
                    let step = strides[2] as isize * self.strides[0][2];
                    let choose = |element: &mut u32, is: bool| *element = if is { found } else { *element };
                    // Steps that are known become vectors.
                    // SAFETY: the line is inside the image, and so are the taps of these windows.
                    unsafe {
                        match step {
                            4 => lanes
                                .enumerate()
                                .for_each(|(i, (to, most))| choose(to, from.cast::<f32>().add(i).read() == *most)),
                            8 => lanes.enumerate().for_each(|(i, (to, most))| {
                                choose(to, from.cast::<[f32; 2]>().add(i).cast::<f32>().read() == *most);
                            }),
                            _ => lanes.enumerate().for_each(|(i, (to, most))| {
                                choose(to, from.offset(i as isize * step).cast::<f32>().read() == *most);
                            }),
                        }
                    }
                }
            }
        }
        elements
    }
}

impl Core for PoolGrad {
    unsafe fn feed(&self, args: &Args, at: &[isize], start: usize, n: usize, to: *mut u8) -> *const u8 {
        let sums = to.cast::<f32>();
        // Elements that follow one another are added together; else each is alone.
        let len = if self.steps == [0, 0, 0, 1] { n } else { 1 };
        for done in (0..n).step_by(len) {
            let moved = |k: usize| at[k] + (start + done) as isize * self.steps[k];
            let images = [0, 1, 2].map(|k| args.at(k, moved(k)).cast_const());
            let first = moved(3) as usize;
            // SAFETY: all indices are inside the operands, which were checked to span their memory; `to` has room for `n` elements.
            unsafe {
                let sums = sums.add(done);
                sums.write_bytes(0, len);
                self.add(images, first..first + len, sums);
            }
        }
        to
    }
}

/// Prepares sums of the updates that have the same index.
fn sum_by_index<'a>(kernel: &'a Kernel) -> Result<CoreSpec<'a>, String> {
    let [updates, indices] = [&kernel.reads[0], &kernel.reads[1]];
    ensure(stored(updates)? == Repr::F32, || format!("sums by index of {}", updates.dtype))?;
    let repr = stored(indices)?;
    ensure(matches!(repr, Repr::I64 | Repr::I32), || format!("indices of type {}", indices.dtype))?;
    let rank = kernel.shape.len();
    // Along the first axis the core itself moves, over the updates.
    let mut inner = Motion::bytes(updates, 0..rank);
    inner.steps[0] = 0;
    let count = indices.access.shape[0];
    Ok(CoreSpec {
        repr: Repr::F32,
        motions: vec![Motion::index(0, rank), inner],
        // A block's look at all indices is shared by its elements.
        cost: 1.0 + 0.01 * count as f64,
        tables: 0,
        build: Box::new(move |steps, _| {
            Box::new(SumByIndex {
                count,
                extent: kernel.shape[0] as i64,
                wide: repr == Repr::I64,
                first: indices.access.offset * repr.size() as isize,
                index_step: indices.access.strides[0] * repr.size() as isize,
                update_step: updates.access.strides[0] * size_of::<f32>() as isize,
                steps: [steps[0], steps[1]],
            })
        }),
    })
}

struct SumByIndex {
    /// Updates.
    count: usize,
    /// The extent of the axis that indices name.
    extent: i64,
    /// True if indices are `i64`; else they are `i32`.
    wide: bool,
    /// Bytes to the first index, from one index to the next, and from one update to the next.
    first: isize,
    index_step: isize,
    update_step: isize,
    /// Along the innermost axis: the place's, and bytes of an update.
    steps: [isize; 2],
}

impl SumByIndex {
    /// Calls `f` with the number of every update for `place`, in order.
    ///
    /// # Safety
    /// `first` must lead to `count` readable indices.
    #[inline(always)]
    unsafe fn each(&self, first: *const u8, place: i64, f: impl FnMut(usize)) {
        if self.wide {
            // SAFETY: guaranteed by the caller.
            unsafe { self.each_of::<i64>(first, place, f) }
        } else {
            // SAFETY: guaranteed by the caller. No index of 32 bits is further outside.
            unsafe { self.each_of::<i32>(first, place as i32, f) }
        }
    }

    /// The same for one type of indices. Indices that lie side by side are compared many at a time.
    ///
    /// # Safety
    /// As for [`SumByIndex::each`].
    #[inline(always)]
    unsafe fn each_of<T: Index>(&self, first: *const u8, place: T, mut f: impl FnMut(usize)) {
        const MANY: usize = 32;
        let from_end = place.wrapping_sub(self.extent);
        // SAFETY: `u` is below `count`.
        let at = |u: usize| unsafe { first.offset(u as isize * self.index_step).cast::<T>().read_unaligned() };
        let is_dense = self.index_step == size_of::<T>() as isize;
        let mut u = 0;
        while u < self.count {
            let n = MANY.min(self.count - u);
            if is_dense && n == MANY {
                // SAFETY: `MANY` indices from `u` on are below `count`.
                let some = unsafe { first.cast::<T>().add(u).cast::<[T; MANY]>().read_unaligned() };
                if !some.iter().fold(false, |any, &i| any | (i == place) | (i == from_end)) {
                    u += MANY;
                    continue;
                }
            }
            (u..u + n).filter(|&u| at(u) == place || at(u) == from_end).for_each(&mut f);
            u += n;
        }
    }
}

/// An integer that chooses a place.
trait Index: Copy + PartialEq {
    /// `self - extent`, where no index is below it.
    fn wrapping_sub(self, extent: i64) -> Self;
}

impl Index for i64 {
    fn wrapping_sub(self, extent: i64) -> i64 {
        i64::wrapping_sub(self, extent)
    }
}

impl Index for i32 {
    fn wrapping_sub(self, extent: i64) -> i32 {
        i32::wrapping_sub(self, extent as i32)
    }
}

impl Core for SumByIndex {
    unsafe fn feed(&self, args: &Args, at: &[isize], start: usize, n: usize, to: *mut u8) -> *const u8 {
        let (first, sums) = (args.at(1, self.first).cast_const(), to.cast::<f32>());
        let [place_step, step] = self.steps;
        let updates = args.at(0, at[1] + start as isize * step).cast_const();
        // SAFETY: operands were checked to span their memory; `to` has room for `n` elements.
        unsafe {
            to.write_bytes(0, n * size_of::<f32>());
            // Along a row the place stays, and all of an update is added at once. Else each element is a place.
            let (places, len) = if place_step == 0 { (1, n) } else { (n, 1) };
            for p in 0..places {
                let place = at[0] + (start + p) as isize * place_step;
                let (sums, updates) = (sums.add(p), updates.offset(p as isize * step));
                self.each(first, place as i64, |u| {
                    let row = updates.offset(u as isize * self.update_step);
                    if step == size_of::<f32>() as isize {
                        let row = row.cast::<f32>();
                        for i in 0..len {
                            *sums.add(i) += row.add(i).read_unaligned();
                        }
                    } else {
                        for i in 0..len {
                            *sums.add(i) += row.offset(i as isize * step).cast::<f32>().read_unaligned();
                        }
                    }
                });
            }
        }
        to
    }
}
