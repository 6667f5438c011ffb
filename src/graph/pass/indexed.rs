//! What devices compute differently by index: the order of a row, and updates that are added up.
//!
//! A GPU sorts in levels, each of which merges groups of runs by binary searches: so an element is compared with few. Where few elements are
//! kept, each level leaves less to the next.
//!
//! ```text
//! Sort <runs = n> (x)   =   Sort <runs = 64> (x) --groups of runs--> Sort <runs = 4> (x, order) --> ... --> one group
//! ```
//!
//! It adds updates up by their places, `SumByIndex`, if each index names a place of whole slices. Where many updates meet at few places, stretches
//! of them are added up by themselves, each at places of its own, and then the stretches:
//!
//! ```text
//! SumByIndex <extent = 32> (i, x)   =   ReduceSum (SumByIndex <extent = 64 * 32> (i + 32 * stretch, x) [64, 32])
//! ```
//!
//! The CPU adds updates in their order, in place.
//!
//! Sums up to each element of a long axis are those of blocks, and of the sums of blocks:
//!
//! ```text
//! x [n] --and zeros--> [blocks, 256] --sums inside--> + --> y [n]
//!                          '--sums of blocks, up to each--'
//! ```

use super::Context;
use crate::dtype::DType;
use crate::error::Result;
use crate::graph::{Decomposer, Graph};
use crate::op::{Attrs, NodeId, Nodes, OpResult, ValueId, Var, build};
use crate::ops::{SCAN, SCATTER, SORT, SUM_BY_INDEX, from_start};
use crate::target::{FEW_GROUPS, Family};

/// Runs of a group of the first level, and of others where few elements are kept.
const WIDE: usize = 64;
/// Runs of a group of a later level.
const NARROW: usize = 4;

/// Elements of a block, and the longest axis that is added up as one.
const BLOCK: usize = 1 << 8;
const SHORT: usize = 2 * BLOCK;

/// Elements of the workgroups by which those that add up by index are counted, and how many keep a multiprocessor busy.
const LOOKING: usize = 256;
const BUSY: usize = 2;
/// The fewest updates of a stretch. The most updates that every workgroup looks through.
const LEAST: usize = 128;
const MOST_UPDATES: usize = 1 << 18;

/// Rewrites such nodes as the target computes them.
pub fn run(graph: &mut Graph, context: &Context) -> Result<()> {
    let is_cpu = context.target.family == Family::Cpu;
    for id in graph.order()? {
        let name = graph.node(id).op_name();
        let levels = if name == SORT && !is_cpu { Levels::of(graph, id, context) } else { None };
        let sum = if name == SCATTER && !is_cpu { Sum::of(graph, id, context) } else { None };
        let blocks = if name == SCAN { Blocks::of(graph, id, context) } else { None };
        if levels.is_none() && sum.is_none() && blocks.is_none() && !(name == SUM_BY_INDEX && is_cpu) {
            continue;
        }
        let node = graph.node(id).clone();
        let operands: Vec<ValueId> = graph.operands(id).into_iter().flatten().collect();
        graph.insert_at(id);
        let made = build(Decomposer::new(graph, node.name.clone()), |b| {
            let x: Vec<Var> = operands.iter().map(|&value| b.value(value)).collect();
            let made = match (&levels, &sum, &blocks) {
                (Some(levels), ..) => levels.nodes(b, x[0])?,
                (_, Some(sum), _) => sum.nodes(b, x[0], x[2])?,
                (.., Some(blocks)) => blocks.nodes(x[0], blocks.levels, blocks.exclusive)?,
                _ => in_order(b, x[0], x[1], &node.outputs[0].fact.shape)?,
            };
            Ok(vec![made])
        });
        let made = made.map_err(|what| node.error(what))?;
        graph.replace(id.output(0), made[0]);
    }
    graph.sweep();
    Ok(())
}

/// The levels of a sort.
struct Levels {
    kept: usize,
    largest: bool,
    /// Levels behind the first, and the runs of their groups.
    more: usize,
    runs: usize,
}

impl Levels {
    /// `None` if the node is a level itself, or one is enough.
    fn of(graph: &Graph, id: NodeId, context: &Context) -> Option<Levels> {
        let operands = graph.operands(id);
        let &[Some(x)] = &operands[..] else { return None };
        let n = *graph.fact(x).shape.last()?;
        let (whole, kept, largest) = graph.with_call(id, |call| {
            let int = |name: &str, default| call.int(name, default).unwrap_or(default);
            (int("runs", 0) as usize >= n, int("kept", 0) as usize, int("largest", 1) != 0)
        })?;
        let room = |more: usize, runs: usize| (0..more).fold(WIDE, |room, _| room.saturating_mul(runs));
        let own = (whole && n > WIDE).then(|| {
            let runs = if kept < NARROW * WIDE { WIDE } else { NARROW };
            let more = (1..).find(|&more| room(more, runs) >= n).unwrap_or(1);
            (more * 2 + usize::from(runs == WIDE)) as u32
        });
        let ways = |chosen: u32| (chosen as usize / 2, if chosen % 2 == 1 { WIDE } else { NARROW });
        let valid = |chosen: u32| whole && room(ways(chosen).0, ways(chosen).1) >= n;
        let (more, runs) = context.decisions.choose("levels", id, own, valid).map(ways)?;
        Some(Levels { kept, largest, more, runs })
    }

    fn nodes<'g>(&self, b: Nodes<'g>, x: Var<'g>) -> OpResult<Var<'g>> {
        let shape = x.shape()?;
        let (&n, outer) = shape.split_last().ok_or("expected an axis to sort along")?;
        let attrs = |runs: usize, kept: usize| {
            let sizes = Attrs::new().with("runs", runs as i64).with("kept", kept as i64);
            sizes.with("largest", i64::from(self.largest))
        };
        let (mut groups, mut kept) = (n.div_ceil(WIDE), self.kept.min(WIDE));
        let mut order = x.op(SORT, &[], attrs(WIDE, kept));
        for _ in 0..self.more {
            let (before, from) = (groups, kept);
            groups = before.div_ceil(self.runs);
            kept = self.kept.min(self.runs * from);
            if groups * self.runs != before {
                // Indices that stand for nothing.
                let missing = [outer, &[groups * self.runs - before, from]].concat();
                let nothing = b.scalar(n as f64, DType::I32).expand(&missing);
                order = b.concat(&[order, nothing], outer.len() as i64);
            }
            let runs = order.shaped(&[outer, &[groups, self.runs, from]].concat());
            order = x.op(SORT, &[runs], attrs(self.runs, kept));
        }
        Ok(order)
    }
}

/// Sums up to each element, in levels of blocks.
struct Blocks {
    axis: usize,
    exclusive: bool,
    reverse: bool,
    levels: usize,
}

impl Blocks {
    /// `None` if one kernel adds all up.
    fn of(graph: &Graph, id: NodeId, context: &Context) -> Option<Blocks> {
        let shape = &graph.node(id).outputs[0].fact.shape;
        let (axis, exclusive, reverse) = graph.with_call(id, |call| {
            let flag = |name: &str| call.int(name, 0).is_ok_and(|flag| flag != 0);
            (call.axis("axis", 0, call.shape(0)), flag("exclusive"), flag("reverse"))
        })?;
        let axis = axis.ok()?;
        let (mut n, mut own) = (shape[axis], 0);
        while n > SHORT {
            (n, own) = (n / BLOCK + 1, own + 1);
        }
        // More levels than an axis needs add zeros up.
        let levels = context.decisions.choose("blocks", id, (own > 0).then_some(own), |levels| levels > 0 && n > 0)?;
        Some(Blocks { axis, exclusive, reverse, levels: levels as usize })
    }

    fn nodes<'g>(&self, x: Var<'g>, levels: usize, exclusive: bool) -> OpResult<Var<'g>> {
        let (axis, fact) = (self.axis, x.fact()?);
        let along = |axis: usize| {
            let flags = Attrs::new().with("exclusive", i64::from(exclusive));
            flags.with("reverse", i64::from(self.reverse)).with("axis", axis as i64)
        };
        if levels == 0 {
            return Ok(x.op(SCAN, &[], along(axis)));
        }
        let n = fact.shape[axis];
        // There are always zeros, so that graphs of other extents have the same nodes.
        let blocks = n / BLOCK + 1;
        let with = |extents: &[usize]| [&fact.shape[..axis], extents, &fact.shape[axis + 1..]].concat();
        let mut pads = vec![0; 2 * fact.shape.len()];
        pads[fact.shape.len() + axis] = (blocks * BLOCK - n) as i64;
        let room = x.op("Pad", &[], Attrs::new().with("pads", pads)).shaped(&with(&[blocks, BLOCK]));
        let behind = [axis as i64 + 1];
        let inside = room.op(SCAN, &[], along(axis + 1));
        let totals = room.reduce_sum(&behind, false);
        let before = self.nodes(totals, levels - 1, true)?;
        let sums = (inside + before.unsqueeze(&behind)).shaped(&with(&[blocks * BLOCK]));
        Ok(sums.part(axis, 0..n))
    }
}

/// A scatter that adds updates up, each index of which is for whole slices.
struct Sum {
    axis: usize,
    /// The indices `[n]`, or as many axes of 1 around these.
    indices: ValueId,
    /// Stretches of the updates that are added up by themselves.
    stretches: usize,
}

impl Sum {
    fn of(graph: &Graph, id: NodeId, context: &Context) -> Option<Sum> {
        let operands = graph.operands(id);
        let (data, updates) = (graph.fact(operands[0]?), graph.fact(operands[2]?));
        let (adds, axis) = graph.with_call(id, |call| {
            (call.str("reduction", "none").is_ok_and(|how| how == "add"), call.axis("axis", 0, call.shape(0)))
        })?;
        let (axis, rank) = (axis.ok()?, data.shape.len());
        let whole = (0..rank).all(|k| k == axis || data.shape[k] == updates.shape[k]);
        // An index that was repeated is one.
        let mut indices = operands[1]?;
        while graph.node(indices.node).op_name() == "Expand" {
            indices = graph.operands(indices.node)[0]?;
        }
        let own = &graph.fact(indices).shape;
        let behind = own.len().checked_sub(rank - axis);
        let alone = own.numel() == updates.shape[axis] && behind.is_some_and(|at| own[at] == updates.shape[axis]);
        if !(adds && whole && alone && data.dtype.is_float()) {
            return None;
        }
        let n = updates.shape[axis];
        let busy = BUSY * (context.target.multiprocessors as usize).max(FEW_GROUPS);
        let own = Sum::stretches(n, data.shape[axis], data.shape.numel(), busy);
        let valid = |count: u32| count > 0 && n.is_multiple_of(count as usize);
        let stretches = context.decisions.choose("stretches", id, Some(own as u32), valid)? as usize;
        Some(Sum { axis, indices, stretches })
    }

    /// Stretches of `n` updates that occupy the device. Their sums, each as many elements as the result has, are no more than the updates.
    fn stretches(n: usize, places: usize, elements: usize, busy: usize) -> usize {
        let few = elements.div_ceil(LOOKING) < busy / 2 && n <= MOST_UPDATES;
        let fits = |count: &usize| n.is_multiple_of(*count) && n / count >= places.max(LEAST);
        let enough = busy.div_ceil(elements.div_ceil(LOOKING).max(1));
        if few { (1..=enough).rev().find(fits).unwrap_or(1) } else { 1 }
    }

    fn nodes<'g>(&self, b: Nodes<'g>, data: Var<'g>, updates: Var<'g>) -> OpResult<Var<'g>> {
        let (extents, rank) = (data.shape()?, data.shape()?.len());
        let (extent, n) = (extents[self.axis], updates.shape()?[self.axis]);
        let first: Vec<usize> = std::iter::once(self.axis).chain((0..rank).filter(|&k| k != self.axis)).collect();
        let back: Vec<usize> =
            (0..rank).map(|k| if k == self.axis { 0 } else { k + usize::from(k < self.axis) }).collect();
        let indices = b.value(self.indices).shaped(&[n]);
        let (updates, dtype) = (updates.transpose(&first), data.fact()?.dtype);
        let attrs = |places: usize| Attrs::new().with("extent", places as i64);
        if self.stretches == 1 {
            return Ok(data + indices.op(SUM_BY_INDEX, &[updates], attrs(extent)).transpose(&back));
        }
        // An index of no place is none of the places of all stretches.
        let (count, places) = (self.stretches, self.stretches * extent);
        let at = from_start(indices, extent).shaped(&[count, n / count]);
        let first = b.constant(DType::I32, [count, 1], || (0..count).map(|part| (part * extent) as f64).collect());
        let own = at.cast(DType::I32) + first;
        let nowhere = own.like(places as f64);
        let at = at.less(at.like(0.0)).select(nowhere, at.less(at.like(extent as f64)).select(own, nowhere));
        let at = at.shaped(&[n]);
        let sums = at.op(SUM_BY_INDEX, &[updates.cast(dtype.unhalved())], attrs(places));
        let shape: Vec<usize> = [count, extent].into_iter().chain(updates.shape()?[1..].iter().copied()).collect();
        let sums = sums.shaped(&shape).reduce_sum(&[0], false).transpose(&back);
        // Halves are rounded once.
        Ok((data.cast(dtype.unhalved()) + sums).cast(dtype))
    }
}

/// Sums of updates in their order, by their indices.
fn in_order<'g>(b: Nodes<'g>, indices: Var<'g>, updates: Var<'g>, shape: &[usize]) -> OpResult<Var<'g>> {
    let fact = updates.fact()?;
    let mut along = vec![1; fact.shape.len()];
    along[0] = fact.shape[0];
    let zeros = b.scalar(0.0, fact.dtype).expand(shape);
    let attrs = Attrs::new().with("axis", 0).with("reduction", "add");
    Ok(zeros.op(SCATTER, &[indices.shaped(&along), updates], attrs))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stretches_occupy_the_device_where_few_sums_are_of_many_updates() {
        // A table of positions, 32 by 12, that 256 by 256 indices name, on a device of 132 multiprocessors; one of windows, 169 by 3.
        assert_eq!(Sum::stretches(65_536, 32, 384, 264), 128);
        assert_eq!(Sum::stretches(2_401, 169, 507, 264), 7);
        // A table of words has sums enough, and so has a short list of updates.
        assert_eq!(Sum::stretches(16_384, 32_000, 32_000 * 768, 264), 1);
        assert_eq!(Sum::stretches(64, 4, 64, 264), 1);
    }
}
