//! The meaning of a kernel in `f64`, element by element: the one reference that every backend's kernels are held against.
//!
//! ```text
//! for each row of the index space         one index, unless Template::rows says more
//!     core values, or reductions          the template's row of TEMPLATES
//!     for each element of the row         once, if it is written once
//!         body(core value, further operands, reductions) -> writes
//! ```

use super::{Guard, Kernel, Nearest, PadMode, Pool, Reduction, ResizeMode, Template, Window};
use crate::expr::{maximum, minimum};
use crate::shape::Access;

/// Where a kernel's elements are. Operands are counted among the reads, or among the writes.
pub trait Memory {
    /// An element of an operand read.
    fn load(&mut self, read: usize, element: isize) -> f64;
    /// Sets an element of an operand written.
    fn store(&mut self, write: usize, element: isize, value: f64);
    /// The next row begins.
    fn begin_row(&mut self) {}
    /// True if no store changes what a load gives. Prologues then run once per element, and not at each use.
    fn is_apart(&self) -> bool {
        false
    }
}

/// The order in which rows, and elements of a row, are computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names say it")]
pub enum Order {
    Forwards,
    Backwards,
}

/// The values that a template computes for a row.
#[derive(Default)]
pub struct Row {
    /// The core values, element by element; none if there is no core.
    pub core: Vec<f64>,
    /// The reductions.
    pub reductions: Vec<f64>,
}

/// The elements of the operands that a kernel reads.
pub struct Elements<'a> {
    kernel: &'a Kernel,
    memory: &'a mut dyn Memory,
    /// Core operands that have passed their prologues, and how they lie.
    passed: Vec<Option<(Access, Vec<f64>)>>,
}

impl Elements<'_> {
    fn new<'a>(kernel: &'a Kernel, memory: &'a mut dyn Memory) -> Elements<'a> {
        let mut elements = Elements { kernel, memory, passed: Vec::new() };
        if elements.memory.is_apart() && !kernel.prologues.is_empty() {
            let pass = |operand: usize| {
                kernel.prologue(operand)?;
                let access = Access::contiguous(kernel.reads[operand].access.shape.clone());
                let all = indices(&access.shape, Order::Forwards);
                Some((access, all.iter().map(|index| elements.at(operand, index)).collect()))
            };
            elements.passed = (0..kernel.template.core_reads()).map(pass).collect();
        }
        elements
    }

    /// An element of an operand, as it is stored.
    fn load(&mut self, read: usize, index: &[usize]) -> f64 {
        self.memory.load(read, self.kernel.reads[read].access.at(index))
    }

    /// An element of a core operand, behind its prologue.
    fn at(&mut self, operand: usize, index: &[usize]) -> f64 {
        if let Some(Some((access, values))) = self.passed.get(operand) {
            return values[access.at(index) as usize];
        }
        let Some((prologue, own)) = self.kernel.prologue(operand) else { return self.load(operand, index) };
        let inputs: Vec<f64> = std::iter::once(operand).chain(own).map(|r| self.load(r, index)).collect();
        prologue.body.eval(&inputs, index, &[])[0]
    }

    /// The elements of a core operand along an axis, behind its prologue; `index` is the first.
    fn along(&mut self, operand: usize, index: &[usize], axis: usize) -> Vec<f64> {
        let access = &self.kernel.reads[operand].access;
        if self.kernel.prologues.is_empty() {
            let (first, step) = (access.at(index), access.strides[axis]);
            let load = |i: usize| self.memory.load(operand, first + i as isize * step);
            return (0..access.shape[axis]).map(load).collect();
        }
        let mut index = index.to_vec();
        let at = |i: usize| {
            index[axis] = i;
            self.at(operand, &index)
        };
        (0..access.shape[axis]).map(at).collect()
    }

    /// The elements that the body reads at an index. An operand that moves along the axes from `still` on has no element there, and
    /// gives NaN.
    fn further(&mut self, index: &[usize], still: usize) -> Vec<f64> {
        let kernel = self.kernel;
        let read = |r: usize| {
            let access = &kernel.reads[r].access;
            let moves = (still..index.len()).any(|k| access.strides[k] != 0 && access.shape[k] != 1);
            if moves { f64::NAN } else { self.load(r, index) }
        };
        kernel.further().map(read).collect()
    }

    fn shape(&self, operand: usize) -> &[usize] {
        &self.kernel.reads[operand].access.shape
    }
}

/// Every index of a shape.
fn indices(shape: &[usize], order: Order) -> Vec<Vec<usize>> {
    let mut all: Vec<_> = crate::shape::indices(shape).collect();
    if order == Order::Backwards {
        all.reverse();
    }
    all
}

/// Runs a kernel that is [well-formed](Kernel::validate).
pub fn run(kernel: &Kernel, order: Order, memory: &mut dyn Memory) {
    let rows = kernel.template.rows();
    let (outer, inner) = kernel.shape.split_at(kernel.shape.len() - rows.axes);
    let meaning = kernel.template.def().meaning;
    let mut elements = Elements::new(kernel, memory);
    for row in indices(outer, order) {
        elements.memory.begin_row();
        let Row { core, reductions } = meaning(kernel, &row, &mut elements);
        let write = |elements: &mut Elements, inputs: &[f64], index: &[usize]| {
            let results = kernel.body.eval(inputs, index, &reductions);
            for (w, (operand, value)) in kernel.writes.iter().zip(results).enumerate() {
                elements.memory.store(w, operand.access.at(index), value);
            }
        };
        if rows.written_once {
            let first = [&row[..], &vec![0; rows.axes]].concat();
            let inputs = elements.further(&first, outer.len());
            write(&mut elements, &inputs, &row);
            continue;
        }
        let mut places: Vec<(usize, Vec<usize>)> = indices(inner, Order::Forwards).into_iter().enumerate().collect();
        if order == Order::Backwards {
            places.reverse();
        }
        for (i, place) in places {
            let index = [&row[..], &place].concat();
            let further = elements.further(&index, index.len());
            let inputs: Vec<f64> = core.get(i).copied().into_iter().chain(further).collect();
            write(&mut elements, &inputs, &index);
        }
    }
}

/// The values of every operand written, over its index space in row-major order; `reads` are the buffers of the operands read.
pub fn evaluate(kernel: &Kernel, reads: &[Vec<f64>]) -> Vec<Vec<f64>> {
    struct Buffers<'a> {
        reads: &'a [Vec<f64>],
        written: Vec<Vec<f64>>,
    }
    impl Memory for Buffers<'_> {
        fn load(&mut self, read: usize, element: isize) -> f64 {
            self.reads[read][element as usize]
        }
        fn store(&mut self, write: usize, _: isize, value: f64) {
            self.written[write].push(value);
        }
        fn is_apart(&self) -> bool {
            true
        }
    }
    let mut buffers = Buffers { reads, written: vec![Vec::new(); kernel.writes.len()] };
    run(kernel, Order::Forwards, &mut buffers);
    buffers.written
}

/// The reductions of a row.
pub(super) fn row(kernel: &Kernel, row: &[usize], elements: &mut Elements) -> Row {
    let Template::Row { reductions, .. } = &kernel.template else { mismatch(&kernel.template) };
    let places = indices(&kernel.shape[row.len()..], Order::Forwards);
    let mut reduced = Vec::new();
    for reduction in reductions {
        let (first, combine): (f64, fn(f64, f64) -> f64) = match reduction.reduction {
            Reduction::Sum => (0.0, |a, b| a + b),
            Reduction::Prod => (1.0, |a, b| a * b),
            Reduction::Max => (f64::NEG_INFINITY, maximum),
            Reduction::Min => (f64::INFINITY, minimum),
        };
        let value = places.iter().fold(first, |total, place| {
            let index = [row, place].concat();
            let inputs = elements.further(&index, index.len());
            combine(total, reduction.body.eval(&inputs, &index, &reduced)[0])
        });
        reduced.push(value);
    }
    Row { core: Vec::new(), reductions: reduced }
}

fn single(value: f64) -> Row {
    Row { core: vec![value], reductions: Vec::new() }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

pub(super) fn matmul(_: &Kernel, index: &[usize], elements: &mut Elements) -> Row {
    let [batch @ .., m, n] = index else { panic!("a product has at least two axes") };
    let row = elements.along(0, &[batch, &[*m, 0]].concat(), batch.len() + 1);
    let column = elements.along(1, &[batch, &[0, *n]].concat(), batch.len());
    single(dot(&row, &column))
}

pub(super) fn attention(kernel: &Kernel, row: &[usize], elements: &mut Elements) -> Row {
    let Template::Attention { score, further, guarded } = &kernel.template else { mismatch(&kernel.template) };
    let [batch @ .., _] = row else { panic!("an attention has at least two axes") };
    let query = elements.along(0, &[row, &[0]].concat(), row.len());
    let mut scores = Vec::new();
    for n in 0..elements.shape(1)[row.len()] {
        let index = [row, &[n]].concat();
        let mut inputs = vec![dot(&query, &elements.along(1, &[batch, &[0, n]].concat(), batch.len()))];
        inputs.extend((3..3 + further).map(|r| elements.at(r, &index)));
        scores.push(score.eval(&inputs, &index, &[])[0]);
    }
    let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let powers: Vec<f64> = scores.iter().map(|s| (s - top).exp()).collect();
    let total: f64 = powers.iter().sum();
    let weightless = match guarded {
        Some(Guard::Unseen) => scores.iter().all(|&s| s == f64::NEG_INFINITY),
        Some(Guard::All) => total.is_nan(),
        None => false,
    };
    let mut value = |e: usize| {
        let values = elements.along(2, &[batch, &[0, e]].concat(), batch.len());
        if weightless { 0.0 } else { dot(&powers, &values) / total }
    };
    let core = (0..kernel.shape[row.len()]).map(&mut value).collect();
    Row { core, reductions: Vec::new() }
}

/// Where element `tap` of the window at `place` is on data of these spatial extents; `None` is outside.
fn source(window: &Window, place: &[usize], tap: &[usize], data: &[usize]) -> Option<[usize; 3]> {
    let mut at = [0; 3];
    for k in 0..3 {
        let behind = place[k] * window.strides[k] + tap[k] * window.dilations[k];
        at[k] = behind.checked_sub(window.pads[k]).filter(|&i| i < data[k])?;
    }
    Some(at)
}

/// The place of the window whose element `tap` is at `at`, among `places`.
fn place(window: &Window, at: &[usize], tap: &[usize], places: &[usize]) -> Option<[usize; 3]> {
    let mut place = [0; 3];
    for k in 0..3 {
        let start = (at[k] + window.pads[k]).checked_sub(tap[k] * window.dilations[k])?;
        let steps = start / window.strides[k];
        place[k] = (start.is_multiple_of(window.strides[k]) && steps < places[k]).then_some(steps)?;
    }
    Some(place)
}

pub(super) fn conv(kernel: &Kernel, index: &[usize], elements: &mut Elements) -> Row {
    let Template::Conv { groups, window } = &kernel.template else { mismatch(&kernel.template) };
    let &[n, o, ref spatial @ ..] = index else { panic!("a convolution has five axes") };
    let first = o / (kernel.shape[1] / groups) * elements.shape(1)[1];
    let mut sum = 0.0;
    for t in indices(&window.kernel, Order::Forwards) {
        let Some([z, y, x]) = source(window, spatial, &t, &elements.shape(0)[2..]) else { continue };
        let weights = elements.along(1, &[o, 0, t[0], t[1], t[2]], 1);
        let data = (first..first + weights.len()).map(|c| elements.at(0, &[n, c, z, y, x]));
        sum += dot(&weights, &data.collect::<Vec<f64>>());
    }
    single(sum)
}

pub(super) fn conv_transpose(kernel: &Kernel, index: &[usize], elements: &mut Elements) -> Row {
    let Template::ConvTranspose { groups, window } = &kernel.template else { mismatch(&kernel.template) };
    let &[n, o, ref spatial @ ..] = index else { panic!("a convolution has five axes") };
    let (channels, per_group) = (elements.shape(0)[1] / groups, kernel.shape[1] / groups);
    let (group, o) = (o / per_group, o % per_group);
    let mut sum = 0.0;
    for t in indices(&window.kernel, Order::Forwards) {
        let Some([z, y, x]) = place(window, spatial, &t, &elements.shape(0)[2..]) else { continue };
        for c in group * channels..(group + 1) * channels {
            sum += elements.at(0, &[n, c, z, y, x]) * elements.at(1, &[c, o, t[0], t[1], t[2]]);
        }
    }
    single(sum)
}

pub(super) fn pool(kernel: &Kernel, index: &[usize], elements: &mut Elements) -> Row {
    let Template::Pool { window, pool } = &kernel.template else { mismatch(&kernel.template) };
    let &[n, c, ref spatial @ ..] = index else { panic!("pooling has five axes") };
    let data = [elements.shape(0)[2], elements.shape(0)[3], elements.shape(0)[4]];
    let taps = indices(&window.kernel, Order::Forwards);
    let inside: Vec<[usize; 3]> = taps.iter().filter_map(|t| source(window, spatial, t, &data)).collect();
    let values: Vec<f64> = inside.iter().map(|&[z, y, x]| elements.at(0, &[n, c, z, y, x])).collect();
    let mean = |count: usize| values.iter().sum::<f64>() / count.max(1) as f64;
    single(match pool {
        Pool::Max => values.iter().copied().fold(f64::NEG_INFINITY, maximum),
        Pool::Mean => mean(values.len()),
        Pool::MeanPadded { pads_end } => {
            // The window's elements inside the data with its padding.
            let padded = [0, 1, 2].map(|k| window.pads[k] + data[k] + pads_end[k]);
            let bare = Window { pads: [0; 3], ..window.clone() };
            mean(taps.iter().filter(|t| source(&bare, spatial, t, &padded).is_some()).count())
        }
    })
}

pub(super) fn gather(kernel: &Kernel, index: &[usize], elements: &mut Elements) -> Row {
    let Template::Gather { strides, extents } = &kernel.template else { mismatch(&kernel.template) };
    let mut element = kernel.reads[0].access.at(index);
    for (j, (&stride, &extent)) in strides.iter().zip(extents).enumerate() {
        let i = elements.at(1 + j, index);
        let i = if i < 0.0 { i + extent as f64 } else { i };
        element += i.clamp(0.0, extent as f64 - 1.0) as isize * stride;
    }
    single(elements.memory.load(0, element))
}

pub(super) fn pad(kernel: &Kernel, index: &[usize], elements: &mut Elements) -> Row {
    let Template::Pad { before, mode } = &kernel.template else { mismatch(&kernel.template) };
    let mut at = Vec::new();
    for (axis, (&i, &before)) in index.iter().zip(before).enumerate() {
        let n = elements.shape(0)[axis] as isize;
        let i = i as isize - before;
        let inside = match mode {
            _ if (0..n).contains(&i) => i,
            PadMode::Constant(value) => return single(*value),
            PadMode::Edge => i.clamp(0, n - 1),
            PadMode::Wrap => i.rem_euclid(n),
            PadMode::Reflect if n == 1 => 0,
            PadMode::Reflect => {
                let i = i.rem_euclid(2 * (n - 1));
                i.min(2 * (n - 1) - i)
            }
        };
        at.push(inside as usize);
    }
    single(elements.at(0, &at))
}

pub(super) fn resize(kernel: &Kernel, index: &[usize], elements: &mut Elements) -> Row {
    let Template::Resize { scales, offsets, mode } = &kernel.template else { mismatch(&kernel.template) };
    let neighbours = |axis: usize| {
        // An axis that stays as it is has no neighbours, whatever the mode.
        if stays(kernel, axis) {
            return vec![(index[axis], 1.0)];
        }
        neighbours(index[axis] as f64 * scales[axis] + offsets[axis], elements.shape(0)[axis], *mode)
    };
    let taps: Vec<Vec<(usize, f64)>> = (0..index.len()).map(neighbours).collect();
    let counts: Vec<usize> = taps.iter().map(Vec::len).collect();
    let mut sum = 0.0;
    for choice in indices(&counts, Order::Forwards) {
        let chosen = || choice.iter().zip(&taps).map(|(&k, taps)| taps[k]);
        let at: Vec<usize> = chosen().map(|(i, _)| i).collect();
        sum += elements.at(0, &at) * chosen().map(|(_, weight)| weight).product::<f64>();
    }
    single(sum)
}

/// The neighbours of coordinate `x` on an axis of `n` elements, and their weights.
fn neighbours(x: f64, n: usize, mode: ResizeMode) -> Vec<(usize, f64)> {
    let last = n as f64 - 1.0;
    let clamp = |i: f64| i.clamp(0.0, last) as usize;
    match mode {
        ResizeMode::Nearest(rule) => {
            let nearest = match rule {
                Nearest::Floor => x.floor(),
                Nearest::Ceil => x.ceil(),
                Nearest::RoundPreferFloor => (x - 0.5).ceil(),
                Nearest::RoundPreferCeil => (x + 0.5).floor(),
            };
            vec![(clamp(nearest), 1.0)]
        }
        ResizeMode::Linear => {
            let x = x.clamp(0.0, last);
            let fraction = x - x.floor();
            vec![(clamp(x.floor()), 1.0 - fraction), (clamp(x.floor() + 1.0), fraction)]
        }
        ResizeMode::Cubic { a, exclude_outside } => {
            let weight = |distance: f64| {
                let d = distance.abs();
                if d <= 1.0 {
                    ((a + 2.0) * d - (a + 3.0)) * d * d + 1.0
                } else if d < 2.0 {
                    ((a * d - 5.0 * a) * d + 8.0 * a) * d - 4.0 * a
                } else {
                    0.0
                }
            };
            let around = (-1..3).map(|k| x.floor() + f64::from(k));
            let mut taps: Vec<(f64, f64)> = around.map(|i| (i, weight(x - i))).collect();
            if exclude_outside {
                taps.retain(|(i, _)| (0.0..n as f64).contains(i));
                let total: f64 = taps.iter().map(|t| t.1).sum();
                taps.iter_mut().for_each(|t| t.1 /= total);
            }
            taps.into_iter().map(|(i, w)| (clamp(i), w)).collect()
        }
    }
}

/// A row's function met a kernel of another row.
pub(super) fn mismatch(template: &Template) -> ! {
    panic!("a template is given to functions of its own row alone: {template:?}")
}

/// True if a resize leaves an axis as it is.
pub(super) fn stays(kernel: &Kernel, axis: usize) -> bool {
    let Template::Resize { scales, offsets, .. } = &kernel.template else { mismatch(&kernel.template) };
    scales[axis] == 1.0 && offsets[axis] == 0.0 && kernel.reads[0].access.shape[axis] == kernel.shape[axis]
}
