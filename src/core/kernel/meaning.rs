//! The meaning of a kernel in `f64`, element by element: the one reference that every backend's kernels are held against.
//!
//! ```text
//! for each row of the index space         one index, unless Template::rows says more
//!     core values, or reductions          the template's row of TEMPLATES
//!     for each element of the row         once, if it is written once
//!         body(core value, further operands, reductions) -> writes
//! ```

use super::{Kernel, Template};
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
    fn is_disjoint(&self) -> bool {
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

/// The place of a row's values in what is written.
#[derive(Clone, Copy, Default)]
pub enum To {
    /// At the row's index.
    #[default]
    Index,
    /// In this element of the buffer.
    Element(isize),
    /// They are not stored.
    Nowhere,
}

/// The values that a template computes for a row.
#[derive(Default)]
pub struct Row {
    /// The core values, element by element; none if there is no core.
    pub core: Vec<f64>,
    /// The reductions.
    pub reductions: Vec<f64>,
    /// Where they go.
    pub to: To,
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
        if elements.memory.is_disjoint() && !kernel.prologues.is_empty() {
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

    /// An element of the buffer of an operand, wherever its access leads.
    pub(super) fn element(&mut self, read: usize, element: isize) -> f64 {
        self.memory.load(read, element)
    }

    /// An element of a core operand, behind its prologue.
    pub(super) fn at(&mut self, operand: usize, index: &[usize]) -> f64 {
        if let Some(Some((access, values))) = self.passed.get(operand) {
            return values[access.at(index) as usize];
        }
        let Some((prologue, own)) = self.kernel.prologue(operand) else { return self.load(operand, index) };
        let inputs: Vec<f64> = std::iter::once(operand).chain(own).map(|r| self.load(r, index)).collect();
        prologue.body.eval(&inputs, index, &[])[0]
    }

    /// The elements of a core operand along an axis, behind its prologue; `index` is the first.
    pub(super) fn along(&mut self, operand: usize, index: &[usize], axis: usize) -> Vec<f64> {
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
    pub(super) fn further(&mut self, index: &[usize], still: usize) -> Vec<f64> {
        let kernel = self.kernel;
        let read = |r: usize| {
            let access = &kernel.reads[r].access;
            let moves = (still..index.len()).any(|k| access.strides[k] != 0 && access.shape[k] != 1);
            if moves { f64::NAN } else { self.load(r, index) }
        };
        kernel.further().map(read).collect()
    }

    pub(super) fn shape(&self, operand: usize) -> &[usize] {
        &self.kernel.reads[operand].access.shape
    }
}

/// Every index of a shape.
pub(super) fn indices(shape: &[usize], order: Order) -> Vec<Vec<usize>> {
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
        let Row { core, reductions, to } = meaning(kernel, &row, &mut elements);
        let write = |elements: &mut Elements, inputs: &[f64], index: &[usize]| {
            let results = kernel.body.eval(inputs, index, &reductions);
            for (w, (operand, value)) in kernel.writes.iter().zip(results).enumerate() {
                let element = match to {
                    To::Index => operand.access.at(index),
                    To::Element(element) => element,
                    To::Nowhere => continue,
                };
                elements.memory.store(w, element, value);
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
    let values = |stored: Vec<(isize, f64)>| stored.into_iter().map(|(_, value)| value).collect();
    stores(kernel, reads).into_iter().map(values).collect()
}

/// The elements of every operand written and what is stored there, in row-major order of the index space.
pub fn stores(kernel: &Kernel, reads: &[Vec<f64>]) -> Vec<Vec<(isize, f64)>> {
    struct Buffers<'a> {
        reads: &'a [Vec<f64>],
        written: Vec<Vec<(isize, f64)>>,
    }
    impl Memory for Buffers<'_> {
        fn load(&mut self, read: usize, element: isize) -> f64 {
            self.reads[read][element as usize]
        }
        fn store(&mut self, write: usize, element: isize, value: f64) {
            self.written[write].push((element, value));
        }
        fn is_disjoint(&self) -> bool {
            true
        }
    }
    let mut buffers = Buffers { reads, written: vec![Vec::new(); kernel.writes.len()] };
    run(kernel, Order::Forwards, &mut buffers);
    buffers.written
}

pub(super) fn single(value: f64) -> Row {
    Row { core: vec![value], ..Row::default() }
}

pub(super) fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// A row's function met a kernel of another row.
pub(super) fn mismatch(template: &Template) -> ! {
    panic!("a template is given to functions of its own row alone: {template:?}")
}
