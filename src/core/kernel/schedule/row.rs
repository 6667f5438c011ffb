//! How GPUs share the rows of a reduction among invocations.

use super::Launch;
use super::map::{inputs, widest};
use crate::dtype::DType;
use crate::expr::{Body, Code};
use crate::kernel::algorithm::Rows;
use crate::kernel::space::{Along, BYTES, along, is_aligned};
use crate::kernel::{Kernel, Operand, RowReduction, Template};
use crate::shape::Access;
use crate::target::{FEW_GROUPS, Family, REGISTERS, Target};
use std::collections::BTreeSet;

/// Elements of one operand that an invocation may hold in registers, and of all together.
const HELD: usize = 32;
const HELD_ALL: usize = 64;
/// Registers that an invocation needs beside the elements that it holds.
const BESIDE: usize = 24;
/// The fewest elements of a stretch that warps read.
const STRETCH: usize = 32;
/// Bytes of a line of memory.
const LINE: usize = 128;
/// The fewest lanes of a row that has a workgroup for itself, in which subgroups meet.
const SUBGROUP_LANES: usize = 64;
/// The most invocations of a workgroup whose invocations reduce several rows.
const MOST_VECTORS: usize = 512;

/// The extents of a row kernel.
#[derive(Clone, Copy)]
pub(in crate::kernel) struct Extents {
    /// Axes in front of those that form a row.
    pub(in crate::kernel) outer: usize,
    /// Number of rows.
    pub(in crate::kernel) rows: usize,
    /// Elements of a row.
    pub(in crate::kernel) length: usize,
    /// True if the body runs once per row.
    pub(in crate::kernel) per_row: bool,
}

impl Extents {
    /// Panics if the kernel is no row kernel.
    pub(in crate::kernel) fn new(kernel: &Kernel) -> Extents {
        let Template::Row { inner, per_row, .. } = kernel.template else { unreachable!("rows are of row kernels") };
        let outer = kernel.shape.len() - inner;
        let [rows, length] = [&kernel.shape[..outer], &kernel.shape[outer..]].map(|axes| axes.iter().product());
        Extents { outer, rows, length, per_row }
    }
}

/// Operands of a row kernel that move along the rows. Elements of a row lie side by side in stretches, such as the images of a channel.
pub(in crate::kernel) struct Moving {
    /// Reads that reductions use.
    pub(in crate::kernel) held: Vec<usize>,
    /// Reads that the body alone uses.
    pub(in crate::kernel) late: Vec<usize>,
    /// The most elements that can be moved at once.
    pub(in crate::kernel) width: usize,
}

impl Moving {
    /// The operands that move along the rows; `None` if one moves along them in another way than stretch by stretch.
    pub(in crate::kernel) fn new(kernel: &Kernel) -> Option<Moving> {
        let Template::Row { reductions, .. } = &kernel.template else { return None };
        let Extents { outer, rows, length, per_row } = Extents::new(kernel);
        let reads = kernel.reads.len();
        let few = rows > 0 && rows < 1 << 30 && length < 1 << 30;
        if !few || length < 32 {
            return None;
        }
        let reduced: BTreeSet<usize> = reductions.iter().flat_map(|f| inputs(&f.body)).collect();
        let finished: BTreeSet<usize> = inputs(&kernel.body);
        let writes = (reads..reads + kernel.writes.len()).filter(|_| !per_row);
        let mut moving = Vec::new();
        let mut stretch = length;
        for slot in reduced.union(&finished).copied().chain(writes) {
            match along(&kernel.operand(slot).access, outer) {
                Along::Dense(run) if run == length || run >= STRETCH => {
                    moving.push(slot);
                    stretch = stretch.min(run);
                }
                Along::Still(run) if run == length && slot < reads => {}
                _ => return None,
            }
        }
        let fits = |slot: usize, width: usize| {
            stretch.is_multiple_of(width) && is_aligned(&kernel.operand(slot).access, stretch, width)
        };
        let width = widest(kernel, moving.iter().copied(), fits);
        let (held, others): (Vec<usize>, Vec<usize>) = moving.into_iter().partition(|slot| reduced.contains(slot));
        let late = others.into_iter().filter(|&slot| slot < reads && !per_row).collect();
        Some(Moving { held, late, width })
    }
}

/// Operands of a row kernel whose neighbouring rows lie side by side.
pub(in crate::kernel) struct Beside {
    /// Reads that reductions use, and that move along the rows and across them.
    pub(in crate::kernel) held: Vec<usize>,
    /// Those that move along the rows alone: neighbouring rows share their elements, such as the mean of a token where columns are added up.
    pub(in crate::kernel) shared: Vec<usize>,
    /// The most rows that can be read at once.
    pub(in crate::kernel) width: usize,
}

impl Beside {
    /// The operands of reductions that run once per row, apart from each other; `None` if one moves along the rows, and its elements of
    /// neighbouring rows do not lie side by side.
    pub(in crate::kernel) fn new(kernel: &Kernel) -> Option<Beside> {
        let Template::Row { reductions, per_row: true, .. } = &kernel.template else { return None };
        let Extents { outer, rows, length, .. } = Extents::new(kernel);
        let few = (1..1 << 30).contains(&rows) && (1..1 << 30).contains(&length);
        let depends = |body: &Body| body.code.iter().any(|i| matches!(i.code, Code::Reduction(_)));
        if !few || reductions.iter().any(|f| depends(&f.body)) {
            return None;
        }
        let reduced: BTreeSet<usize> = reductions.iter().flat_map(|f| inputs(&f.body)).collect();
        let across = |slot: usize| {
            let access = &kernel.reads[slot].access;
            let (shape, strides) = (access.shape[..outer].into(), access.strides[..outer].to_vec());
            Access { shape, strides, offset: access.offset }
        };
        // Elements that stand still along the rows are read as they are.
        let along_rows = |&slot: &usize| {
            let access = &kernel.reads[slot].access;
            (outer..kernel.shape.len()).any(|k| access.shape[k] > 1 && access.strides[k] != 0)
        };
        let (shared, held): (Vec<usize>, Vec<usize>) = reduced
            .into_iter()
            .filter(along_rows)
            .partition(|&slot| matches!(along(&across(slot), 0), Along::Still(_)));
        let fits = |slot: usize, width: usize| {
            let (access, across) = (&kernel.reads[slot].access, across(slot));
            let whole =
                |axis: usize| access.shape[axis] == 1 || access.strides[axis].unsigned_abs().is_multiple_of(width);
            match along(&across, 0) {
                Along::Dense(run) => {
                    run.is_multiple_of(width)
                        && is_aligned(&across, run, width)
                        && (outer..kernel.shape.len()).all(whole)
                }
                Along::Still(run) => run == rows || run.is_multiple_of(width),
                Along::Other => false,
            }
        };
        let size = |slot: &usize| kernel.reads[*slot].dtype.size();
        let mut width = held.iter().map(|slot| BYTES / size(slot)).min().unwrap_or(1);
        while width > 1 && !held.iter().chain(&shared).all(|&slot| fits(slot, width)) {
            width /= 2;
        }
        (width > 1 && !held.is_empty()).then_some(Beside { held, shared, width })
    }
}

impl Rows {
    pub(in crate::kernel) fn launch(&self, kernel: &Kernel, target: &Target) -> Launch {
        let Extents { rows: count, length, per_row, .. } = Extents::new(kernel);
        let count = if per_row || length > 0 { count } else { 0 };
        if let Rows::Vectors { lanes, across, width } = *self {
            let shared = if lanes > 1 { lanes * across * width * exchanged_bytes(kernel, target) } else { 0 };
            return Launch {
                threads: (lanes * across) as u32,
                groups: count.div_ceil((across * width).max(1)) as u64,
                cluster: 1,
                shared: shared as u64,
            };
        }
        let (each, rows) = match self {
            Rows::Lanes { lanes, rows, .. } => (lanes, rows),
            Rows::Warps { threads, rows, .. } => (threads, rows),
            Rows::Vectors { .. } => unreachable!("it has returned"),
        };
        let threads = each * rows;
        let places = match self {
            Rows::Lanes { lanes: 1, .. } => 0,
            Rows::Lanes { .. } => threads,
            _ => threads / 32,
        };
        let shared = places * exchanged_bytes(kernel, target);
        Launch {
            threads: threads as u32,
            groups: count.div_ceil((*rows).max(1)) as u64,
            cluster: 1,
            shared: shared as u64,
        }
    }

    pub(in crate::kernel) fn check(&self, kernel: &Kernel, target: &Target) -> Result<(), String> {
        let rule = |holds: bool, what: &str| if holds { Ok(()) } else { Err(what.to_owned()) };
        match *self {
            Rows::Lanes { lanes, rows, subgroups, .. } => {
                let powers = lanes.is_power_of_two() && rows.is_power_of_two();
                let fits = powers && lanes.saturating_mul(rows) <= 1 << target.max_workgroup.min(256).ilog2();
                rule(fits, "row: expected powers of two whose product is within a workgroup")?;
                rule(!subgroups || target.subgroups, "row: its device has no subgroups")?;
                rule(!subgroups || rows == 1 && lanes > 1, "row: expected one row whose lanes are subgroups")
            }
            Rows::Warps { threads, rows, width, held } => {
                rule(target.family == Family::Cuda, "row_warp: it is written for CUDA")?;
                let moving = Moving::new(kernel).ok_or("row_warp: its rows do not lie in stretches")?;
                let fits = width.is_power_of_two() && width <= moving.width;
                rule(fits, "row_warp: elements are not moved so many at once")?;
                let warps =
                    threads.is_power_of_two() && (32..=1024).contains(&threads) && rows == (128 / threads).max(1);
                rule(warps, "row_warp: expected 32 to 1024 invocations per row, and 128 of a workgroup or one row")?;
                rule(!held || holds(kernel, &moving, threads, width), "row_warp: a row does not fit in registers")
            }
            Rows::Vectors { lanes, across, width } => {
                rule(target.family == Family::Cuda, "row_vec: it is written for CUDA")?;
                let beside = Beside::new(kernel).ok_or("row_vec: its neighbouring rows do not lie side by side")?;
                let powers = [lanes, across, width].iter().all(|n| n.is_power_of_two());
                rule(powers && width <= beside.width, "row_vec: rows are not read so many at once")?;
                let threads = lanes.saturating_mul(across);
                rule((32..=MOST_VECTORS).contains(&threads), "row_vec: expected 32 to 512 invocations")
            }
        }
    }
}

/// Bytes of the values that an invocation exchanges with others: one of each type that reductions have.
fn exchanged_bytes(kernel: &Kernel, target: &Target) -> usize {
    let Template::Row { reductions, .. } = &kernel.template else { return 0 };
    let result =
        |reduction: &RowReduction| Some(reduction.body.code.get(*reduction.body.results.first()? as usize)?.dtype);
    let held = |dtype: DType| match dtype {
        DType::F64 | DType::I64 | DType::U64 if target.family == Family::Cuda => dtype,
        _ if dtype.is_float() => DType::F32,
        _ => DType::I32,
    };
    let types: BTreeSet<DType> = reductions.iter().filter_map(result).map(held).collect();
    types.into_iter().map(DType::size).sum()
}

/// True if the elements of a row that reductions read fit in registers.
fn holds(kernel: &Kernel, moving: &Moving, threads: usize, width: usize) -> bool {
    let each = Extents::new(kernel).length.div_ceil(threads * width) * width;
    each <= HELD && each * moving.held.len() <= HELD_ALL.min((REGISTERS / threads).saturating_sub(BESIDE))
}

/// The way that is expected to be fastest.
pub(super) fn best(kernel: &Kernel, target: &Target) -> Rows {
    let Extents { rows, length, .. } = Extents::new(kernel);
    match Moving::new(kernel).filter(|_| target.family == Family::Cuda) {
        Some(moving) => {
            let wants = |threads: usize| {
                length > HELD / 2 * threads || rows * threads < 1 << 16 && length > 2 * moving.width * threads
            };
            let mut threads = 32;
            while threads < 1024 && wants(threads) {
                threads *= 2;
            }
            warps(kernel, &moving, threads)
        }
        None => vectors(kernel, target).unwrap_or_else(|| lanes(kernel, target)),
    }
}

/// Neighbouring rows, several per invocation. Neighbouring invocations read whole lines, if that leaves no multiprocessor idle.
fn vectors(kernel: &Kernel, target: &Target) -> Option<Rows> {
    let Beside { held, width, .. } = Beside::new(kernel).filter(|_| target.family == Family::Cuda)?;
    let Extents { rows, length, .. } = Extents::new(kernel);
    let bytes = held.iter().map(|&slot| width * kernel.reads[slot].dtype.size()).min()?;
    let mut across = (LINE / bytes).clamp(1, (rows / width).next_power_of_two());
    // Two per multiprocessor at least: one alone waits for memory most of its time.
    while across * bytes > LINE / 4 && (rows / width).div_ceil(across) < 2 * target.multiprocessors as usize {
        across /= 2;
    }
    let lanes = (length / 8).next_power_of_two().clamp(1, MOST_VECTORS / across).max((32 / across).max(1));
    Some(Rows::Vectors { lanes, across, width })
}

fn warps(kernel: &Kernel, moving: &Moving, threads: usize) -> Rows {
    let width = moving.width;
    Rows::Warps { threads, rows: (128 / threads).max(1), width, held: holds(kernel, moving, threads, width) }
}

/// Neighbouring invocations lie along the axis in which the elements of rows are dense: that of the row, or else that of the rows.
fn lanes(kernel: &Kernel, target: &Target) -> Rows {
    let Extents { outer, rows, length, .. } = Extents::new(kernel);
    let shape = &kernel.shape;
    let moves = |r: &&Operand| (outer..shape.len()).any(|a| shape[a] > 1 && r.access.strides[a] != 0);
    let along_row = kernel.reads.iter().find(moves).or(kernel.reads.first()).is_none_or(|r| {
        let dense = |axes: std::ops::Range<usize>| {
            axes.rev().find(|&a| shape[a] > 1).is_some_and(|a| r.access.strides[a].abs() == 1)
        };
        dense(outer..shape.len()) || !dense(0..outer)
    });
    let most = 1usize << target.max_workgroup.min(256).ilog2();
    let side_by_side = rows.max(1).next_power_of_two();
    let lanes = if along_row {
        length / 4
    } else {
        // As many as occupy the device. Those that lie together still read whole lines.
        let room = 4 * most * (target.multiprocessors as usize).max(FEW_GROUPS);
        (length / 8).min(room / rows.max(1)).min(most / side_by_side.min(16))
    };
    let lanes = lanes.max(1).next_power_of_two().min(most);
    let subgroups = target.subgroups && lanes >= SUBGROUP_LANES && (along_row || side_by_side == 1);
    Rows::Lanes { lanes, rows: if subgroups { 1 } else { (most / lanes).min(side_by_side) }, along_row, subgroups }
}

/// Every way that may be worth a try.
pub(super) fn all(kernel: &Kernel, target: &Target) -> Vec<Rows> {
    let mut all = vec![best(kernel, target)];
    all.extend(vectors(kernel, target));
    if let Some(Beside { width, .. }) = Beside::new(kernel).filter(|_| target.family == Family::Cuda) {
        let shares = [(8, 4), (32, 4), (64, 4), (128, 4), (32, 8), (16, 16)];
        all.extend(shares.map(|(lanes, across)| Rows::Vectors { lanes, across, width }));
    }
    if let Some(moving) = Moving::new(kernel).filter(|_| target.family == Family::Cuda) {
        all.extend([32, 64, 128, 256, 512, 1024].map(|threads| warps(kernel, &moving, threads)));
    }
    let Rows::Lanes { along_row, .. } = lanes(kernel, target) else { return all };
    let most = 1usize << target.max_workgroup.min(256).ilog2();
    let side_by_side = Extents::new(kernel).rows.max(1).next_power_of_two();
    let powers = || (0..=most.ilog2()).map(|power| 1usize << power);
    let of = |lanes, rows, subgroups| Rows::Lanes { lanes, rows, along_row, subgroups };
    all.extend(powers().step_by(2).map(|lanes| of(lanes, (most / lanes).min(side_by_side), false)));
    if target.subgroups {
        all.extend(powers().filter(|lanes| *lanes >= SUBGROUP_LANES / 2).map(|lanes| of(lanes, 1, true)));
    }
    all
}
