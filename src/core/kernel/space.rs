//! Index spaces that texts walk by variables, and how accesses move along axes: facts about kernels that schedules and texts share.

use crate::shape::Access;
use std::collections::BTreeMap;

/// Bytes of the widest access of a GPU.
pub(super) const BYTES: usize = 16;

/// A piece of an axis of the kernel's index space: coordinate `p` of it stands for `start + p * step` of the axis.
#[derive(Clone, Copy, Debug)]
pub(super) struct Piece {
    pub(super) axis: usize,
    pub(super) extent: usize,
    pub(super) step: isize,
    pub(super) start: isize,
}

impl Piece {
    pub(super) fn new(axis: usize, extent: usize, step: usize) -> Piece {
        Piece { axis, extent, step: step as isize, start: 0 }
    }
}

/// A variable that runs over some pieces of axes, row-major, and the parameter that holds it.
#[derive(Clone, Debug)]
pub(super) struct Var {
    pub(super) name: &'static str,
    pub(super) pieces: Vec<Piece>,
}

/// Variables that together run over an index space.
pub(super) type Space = Vec<Var>;

/// One variable over whole axes.
pub(super) fn over(name: &'static str, shape: &[usize], axes: impl IntoIterator<Item = usize>) -> Var {
    Var { name, pieces: axes.into_iter().map(|axis| Piece::new(axis, shape[axis], 1)).collect() }
}

/// The axes of which a space goes beyond these extents: to the front of them, behind them.
pub(super) fn beyond(space: &Space, shape: &[usize]) -> BTreeMap<usize, (bool, bool)> {
    let mut reach: BTreeMap<usize, (isize, isize)> = BTreeMap::new();
    for piece in space.iter().flat_map(|var| &var.pieces) {
        let (low, high) = reach.entry(piece.axis).or_default();
        let far = piece.step * (piece.extent.max(1) as isize - 1);
        *low += piece.start + far.min(0);
        *high += piece.start + far.max(0);
    }
    let sides = |(axis, (low, high)): (usize, (isize, isize))| (axis, (low < 0, high >= shape[axis] as isize));
    reach.into_iter().map(sides).filter(|(_, (front, behind))| *front || *behind).collect()
}

/// How an access moves along some axes, walked as one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Along {
    /// Element by element: from run to run of this many.
    Dense(usize),
    /// Not at all, for this many elements.
    Still(usize),
    /// In another way.
    Other,
}

/// How an access moves along the axes from `first` on.
pub(super) fn along(access: &Access, first: usize) -> Along {
    let axes = || (first..access.shape.len()).rev().filter(|&k| access.shape[k] != 1);
    let run = |expected: fn(usize) -> isize| {
        let mut run = 1usize;
        for k in axes() {
            if access.strides[k] != expected(run) {
                break;
            }
            run *= access.shape[k];
        }
        run
    };
    match (run(|run| run as isize), run(|_| 0)) {
        (1, 1) if axes().next().is_none() => Along::Still(1),
        (1, 1) => Along::Other,
        (dense, 1) => Along::Dense(dense),
        (_, still) => Along::Still(still),
    }
}

/// True if every run of `run` elements starts at a multiple of `width`.
pub(super) fn is_aligned(access: &Access, run: usize, width: usize) -> bool {
    let mut inside = 1;
    let step = |(&extent, &stride): (&usize, &isize)| {
        let within = inside < run;
        inside *= extent;
        extent == 1 || within || stride.unsigned_abs().is_multiple_of(width)
    };
    access.offset.unsigned_abs().is_multiple_of(width) && access.shape.iter().zip(&access.strides).rev().all(step)
}
