//! On GPUs, a workgroup computes a result of a reduction. Few results would leave most of the device idle, so such a reduction becomes two
//! stages. The first stage reduces the inner axes, the second one reduces the outer axes.
//!
//! ```text
//! [2048, 50257] -> []    =    [2048, 50257] -> [2048, 1] -> []
//! ```

use super::Context;
use crate::dtype::DType;
use crate::error::Result;
use crate::graph::Graph;
use crate::op::{Attrs, Lower, NodeId, ValueId};
use crate::target::{FEW_GROUPS, Family};

/// Two stages are faster from this many elements per result on, if a workgroup computes one result.
const LONG: usize = 1 << 14;
/// The same, if a workgroup computes several results side by side.
const LONG_SIDE_BY_SIDE: usize = 1 << 10;
/// Results that a workgroup has side by side, if rows do not lie along the innermost axis.
const SIDE_BY_SIDE: usize = 16;

/// Adds the first stages.
pub fn run(graph: &mut Graph, context: &Context) -> Result<()> {
    if context.target.family == Family::Cpu {
        return Ok(());
    }
    let busy = 2 * (context.target.multiprocessors as usize).max(FEW_GROUPS);
    let order = graph.order()?;
    let channels_last = context.target.prefers_channels_last() && order.iter().any(|&id| convolves(graph, id, context));
    for id in order {
        let Some((axes, first)) = reduced(graph, id) else { continue };
        let inner = inner_axes(&graph.fact(first).shape, &axes, busy, channels_last);
        let own = inner.map(|count| count as u32);
        let valid = |count: u32| (1..axes.len()).contains(&(count as usize));
        let Some(count) = context.decisions.choose("stages", id, own, valid) else { continue };
        let node = graph.node(id).clone();
        let mut operands = graph.operands(id);
        graph.insert_at(id);
        let attrs = Attrs::new().with("axes", &axes[axes.len() - count as usize..]).with("keepdims", 1);
        // A first stage of 16-bit floats would be rounded.
        let dtype = graph.fact(first).dtype;
        let cast = |graph: &mut Graph, value: ValueId, to: DType| {
            context.add(graph, &node.name, "Cast", &[Some(value)], Attrs::new().with("to", to.onnx()))
        };
        if dtype.is_half() {
            operands[0] = Some(cast(graph, first, DType::F32)?);
        }
        operands[0] = Some(context.add(graph, &node.name, node.op_name(), &operands[..1], attrs)?);
        graph.insert_at(id);
        let mut whole = context.add(graph, &node.name, node.op_name(), &operands, node.attrs.clone())?;
        if dtype.is_half() {
            whole = cast(graph, whole, dtype)?;
        }
        graph.replace(id.output(0), whole);
    }
    graph.sweep();
    Ok(())
}

/// True for a convolution that wants its images' channels last. What is computed beside it then has them last, too.
fn convolves(graph: &Graph, id: NodeId, context: &Context) -> bool {
    let node = graph.node(id);
    let narrow = |dtype: DType| dtype.is_half() || dtype == DType::F32 && context.target.allow_tf32;
    node.op_name() == "plimsoll.Conv" && narrow(node.outputs[0].fact.dtype)
}

/// The axes and the operand of a reduction over several axes.
fn reduced(graph: &Graph, id: NodeId) -> Option<(Vec<usize>, ValueId)> {
    let reduces = matches!(graph.node(id).op()?.lower, Lower::Reduce(_));
    let first = graph.operands(id)[0].filter(|_| reduces)?;
    let axes = graph.with_call(id, |call| call.reduced_axes())?.ok()?;
    (axes.len() > 1).then_some((axes, first))
}

/// The number of innermost axes that the first stage reduces; `None` if one stage is as fast. `busy` workgroups fill the device. Images
/// may have their channels last.
fn inner_axes(shape: &[usize], axes: &[usize], busy: usize, channels_last: bool) -> Option<usize> {
    let extent = |axes: &[usize]| axes.iter().map(|&axis| shape[axis]).product::<usize>();
    let last = shape.iter().rposition(|&extent| extent > 1)?;
    let last = if channels_last && shape.len() == 4 { 1 } else { last };
    let (long, side_by_side) = if axes.contains(&last) { (LONG, 1) } else { (LONG_SIDE_BY_SIDE, SIDE_BY_SIDE) };
    let kept: Vec<usize> = (0..shape.len()).filter(|axis| !axes.contains(axis)).collect();
    let groups = |outer: &[usize]| extent(&kept).saturating_mul(extent(outer)).div_ceil(side_by_side);
    if extent(axes) < long || groups(&[]) >= busy {
        return None;
    }
    // As few outer axes as fill the device, or all but one.
    let outer = (1..axes.len()).find(|&count| groups(&axes[..count]) >= busy).unwrap_or(axes.len() - 1);
    (extent(&axes[..outer]) > 1 && extent(&axes[outer..]) > 1).then_some(axes.len() - outer)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_results_of_many_elements_take_two_stages() {
        assert_eq!(inner_axes(&[2048, 50257], &[0, 1], 264, false), Some(1));
        assert_eq!(inner_axes(&[16, 128, 50257], &[0, 1, 2], 264, false), Some(1));
        assert_eq!(inner_axes(&[512, 8, 500], &[0, 1, 2], 264, false), Some(2));
        // The sum of a bias's gradient: 768 results side by side.
        assert_eq!(inner_axes(&[16, 128, 768], &[0, 1], 264, false), Some(1));
        // The statistics of a batch normalisation.
        assert_eq!(inner_axes(&[32, 64, 112, 112], &[0, 2, 3], 264, false), Some(2));
        assert_eq!(inner_axes(&[32, 512, 28, 28], &[0, 2, 3], 264, false), None);
        assert_eq!(inner_axes(&[32, 512, 28, 28], &[0, 2, 3], 264, true), Some(2));
        for (shape, axes) in [
            (&[2048, 50257][..], &[1][..]),
            (&[8, 8], &[0, 1]),
            (&[1, 1 << 20], &[0, 1]),
            (&[32, 2048, 7, 7], &[0, 2, 3]),
            (&[0, 3], &[0, 1]),
        ] {
            let found = if axes.len() > 1 { inner_axes(shape, axes, 264, false) } else { None };
            assert_eq!(found, None, "{shape:?}");
        }
    }
}
