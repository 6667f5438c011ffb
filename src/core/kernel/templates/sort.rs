//! The first elements of groups, in order.
//!
//! A group is `runs` neighbouring runs. Of the keys alone, each is a run:
//!
//! ```text
//! keys  [3 1 2 | 5 4]   runs 3, the first two     order [1 2 | 4 3]
//! order [1 2 | 4 3]     both runs, the first two  order [1 2]            keys 1, 2
//! ```
//!
//! The place of an element in its group is the number of elements before it: its own place in its run, and what a binary search counts in
//! each other run. So invocations need nothing of each other, and write places apart.

use super::*;
use std::cmp::Ordering;

pub(super) static SORT: TemplateDef = TemplateDef {
    name: "sort",
    doc: "the first elements of each group, in order, by their indices",
    kind: Kind::Row,
    alone: true,
    core_reads: |t| {
        let &Template::Sort { given, .. } = t else { mismatch(t) };
        1 + usize::from(given)
    },
    rows: |_| Rows { axes: 1, written_once: false },
    invocations: |kernel| {
        let &Template::Sort { given, runs, .. } = &kernel.template else { mismatch(&kernel.template) };
        if given { kernel.reads[1].access.shape.numel() } else { kernel.written_groups() * runs }
    },
    check: |kernel, _| {
        let &Template::Sort { given, runs, .. } = &kernel.template else { mismatch(&kernel.template) };
        let Kernel { shape, reads, writes, body, .. } = kernel;
        let [outer @ .., groups, kept] = &shape[..] else {
            return Err(format!("expected groups and their elements, found {shape}"));
        };
        kernel.reads_axes(0, outer.len() + 1)?;
        let n = reads[0].access.shape[outer.len()];
        kernel.reads_extents(0, &[outer, &[n]].concat())?;
        ensure(reads[0].dtype.is_number(), || format!("operand 0 read: expected numbers, found {}", reads[0].dtype))?;
        ensure(n <= MOST_EXTENT, || format!("{n} elements are too many"))?;
        let all = groups.checked_mul(runs).filter(|&all| all <= 2 * MOST_EXTENT);
        let all = all.ok_or_else(|| format!("{groups} groups of {runs} runs are too many"))?;
        let room = if given {
            kernel.reads_axes(1, outer.len() + 3)?;
            let from = reads[1].access.shape[outer.len() + 2];
            kernel.reads_extents(1, &[outer, &[*groups, runs, from]].concat())?;
            ensure(reads[1].dtype == DType::I32, || {
                format!("operand 1 read: expected i32 indices, found {}", reads[1].dtype)
            })?;
            from.saturating_mul(runs)
        } else {
            ensure(runs > 0 && all >= n, || format!("{groups} groups of {runs} do not have {n} elements"))?;
            runs
        };
        ensure(*kept <= room, || format!("{kept} elements of groups of {room}"))?;
        let indices = writes.first().is_some_and(|to| to.dtype == DType::I32);
        let alone = kernel.stores_alone() && body.is_identity() && indices;
        ensure(alone, || "expected i32 indices that are stored as they are".into())
    },
    axis_of: |kernel, operand, axis| {
        let groups = kernel.shape.len() - 2;
        match (operand, axis) {
            (_, axis) if axis < groups => Along::Axis(axis),
            (1, axis) if axis == groups => Along::Axis(axis),
            // Groups of runs know the indices of all elements.
            (0, axis) if axis == groups && kernel.template.core_reads() == 2 => Along::Whole,
            _ => Along::Tied,
        }
    },
    meaning: sort,
    samples: || {
        let of = |keys: &[usize], largest, runs, shape: &[usize]| {
            let template = Template::Sort { largest, given: false, runs };
            let mut kernel = sample(template, shape, vec![floats(keys)], Expr::input(0, DType::I32));
            kernel.writes[0].dtype = DType::I32;
            kernel
        };
        vec![of(&[2, 7], true, 7, &[2, 1, 3]), of(&[10], false, 4, &[3, 4]), of(&[2, 3, 70], false, 70, &[2, 3, 1, 70])]
    },
    ..PLAIN
};

impl Kernel {
    /// Rows of a kernel of groups.
    fn written_groups(&self) -> usize {
        self.shape[..self.shape.len() - 1].iter().product()
    }
}

/// The order of two numbers. Zeros of both signs are equal, and what is not a number stands above all numbers.
pub fn ascending(a: f64, b: f64) -> Ordering {
    a.partial_cmp(&b).unwrap_or_else(|| a.is_nan().cmp(&b.is_nan()))
}

fn sort(kernel: &Kernel, row: &[usize], elements: &mut Elements) -> Row {
    let &Template::Sort { largest, given, runs } = &kernel.template else { mismatch(&kernel.template) };
    let (group, outer) = row.split_last().expect("an axis of groups");
    let n = elements.shape(0)[outer.len()];
    // An index that is not inside names nothing, and stands behind all.
    let named: Vec<usize> = if given {
        let from = elements.shape(1)[outer.len() + 2];
        let place = |i: usize| [row, &[i / from, i % from]].concat();
        let index = |i: usize| elements.at(1, &place(i));
        let inside = |i: f64| if (0.0..n as f64).contains(&i) { i as usize } else { n };
        (0..runs * from).map(index).map(inside).collect()
    } else {
        (group * runs..(group + 1) * runs).map(|i| i.min(n)).collect()
    };
    let key = |&i: &usize| if i < n { Some(elements.at(0, &[outer, &[i]].concat())) } else { None };
    let keys: Vec<Option<f64>> = named.iter().map(key).collect();
    let mut order: Vec<usize> = (0..named.len()).collect();
    order.sort_by(|&i, &j| match (keys[i], keys[j]) {
        (Some(a), Some(b)) if largest => ascending(b, a),
        (Some(a), Some(b)) => ascending(a, b),
        (a, b) => b.is_some().cmp(&a.is_some()),
    });
    let kept = kernel.shape[kernel.shape.len() - 1];
    Row { core: order[..kept].iter().map(|&i| named[i] as f64).collect(), ..Row::default() }
}
